"""What the voxels of a volume say by themselves: which way up it is, whether it shows tissue at all, and whether a band is its own."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from octfm.volume.planes import Planes
from octfm.volume.tissue import COARSE_MM as BORDER_MM
from octfm.volume.tissue import MARGIN_MM, Tissue, find_tissue
from octfm.volume.volume import Spacing3

ENOUGH_MM = (0.1875, 0.0104, 0.031)
"""Finer voxels are averaged until they are about so large: speckle averages out, and the layers stay."""
CLEAR = 0.1
"""Share of A-scans by which the vitreous border must look better one way up than the other. Phantoms (100 of all scanners and diagnoses on
two grids, each both ways up): .14 or more in favour of the right way; 388 of 400 get an answer, and no answer is wrong."""
LEAST_STRUCTURE = 0.3
"""Share of the variance of brightness that is left in means over a sixteenth of the rows and a quarter of the A-scans of a B-scan.
Phantoms: .57 or more, seven real scans on four grids: .47 or more; white noise and speckle: .01 or less. Noise that was smoothed over
more than five voxels passes; the tissue search does not trust it."""
OWN_BAND_MM, OWN_BAND_ROWS = 0.025, 2.0
"""Median distance of a stored vitreous border from the one that is found again in the voxels, in millimetres or rows, whichever is more.
Phantoms and real scans: .010 mm or less; bands of other volumes: .10 mm in the median, above .022 mm in 99 of 100."""

FEW_BSCANS, APART_MM = 12, 0.12
"""How many B-scans of a file are looked at, and how far apart they count as being, so that none is averaged with another."""
UNDOUBTED = 0.9
"""Share of A-scans with a clear vitreous border above which a volume is not upside down: at most .76 on 420 phantoms turned over."""
OVERTURNED, CONVINCING = 0.15, 0.5
"""By how many A-scans more the border must be clear, and on which share of them, for a file to count as upside down. Phantoms (420 of five
scanners and all diagnoses): .22 or more in favour of the right way; real volumes .49 or more."""
EDGE_MM, SEEN_WHOLE = 0.06, 0.5
"""A volume whose tissue begins within so much of the top of its B-scans, on more A-scans than that, may have lost its vitreous to a crop.
Real scans cropped or flattened at the ILM: it begins further down on .28 of A-scans or less; turned over: on .59 or more, but 0 for one
whose choroid fills the frame."""

Up = Literal["up", "down", "unclear"]


@dataclass(frozen=True)
class Look:
    """What one prepared volume looks like."""

    up: Up
    """`down`: upside down."""
    structure: float
    """Share of the variance of brightness that is not speckle or noise, 0 to 1."""
    border_mm: float | None
    """Median distance of the vitreous border in the stored band from the one in the voxels; None where either is not sure."""

    @property
    def noise(self) -> bool:
        return self.structure < LEAST_STRUCTURE

    def strange_band(self, spacing_mm: Spacing3) -> bool:
        """Whether the stored band is not of these voxels."""
        return self.border_mm is not None and self.border_mm > max(OWN_BAND_MM, OWN_BAND_ROWS * spacing_mm[1])


def inspect(voxels_DHW: np.ndarray, band: np.ndarray, valid: np.ndarray, spacing_mm: Spacing3) -> Look:
    """Look at one volume of a store; `band` and `valid` [2, D, W] as the store holds them."""
    shown = (valid[1] > valid[0]).any(axis=1)
    voxels, band, valid = voxels_DHW[shown], band[:, shown], valid[:, shown]
    if not len(voxels):
        return Look("unclear", 0.0, None)
    coarse, block = _coarse(voxels, spacing_mm)
    dz, dy, dx = (mm * n for mm, n in zip(spacing_mm, block, strict=True))
    spacing = (dz, dy, dx)
    upright = find_tissue(coarse, spacing)
    flipped = find_tissue(np.ascontiguousarray(coarse[:, ::-1]), spacing)
    return Look(
        which_way_up(upright, flipped, spacing), structure(coarse), _border(upright, band, valid, spacing_mm, block)
    )


def which_way_up(upright: Tissue, flipped: Tissue, spacing_mm: Spacing3) -> Up:
    """From the tissue found in a volume and in the same volume turned upside down.

    A retina has one sharp border, to the dark vitreous, and fades out on the other side. Only where the search trusts what it finds
    in one of them, and finds that border there more often, is there an answer.
    """
    better = upright.confidence["ilm_support"] - flipped.confidence["ilm_support"]
    if better > CLEAR and upright.confident and not flipped.confident:
        return "up"
    if better < -CLEAR and flipped.confident and not upright.confident and _seen_whole(upright, spacing_mm):
        return "down"
    return "unclear"


def native_way_up(voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3) -> Up:
    """Which way up a volume lies in its file, from a dozen of its B-scans; spacing says how far apart B-scans of a raster are.

    Only the vitreous border counts, not whether the search trusts all it finds: fluid, holes and margins make it doubtful, not the border.
    """
    picked = np.unique(np.linspace(0, len(voxels_DHW) - 1, min(FEW_BSCANS, len(voxels_DHW))).round().astype(int))
    voxels = np.stack([voxels_DHW[i] for i in picked])
    h, w = (max(1, round(enough / mm)) for enough, mm in zip(BORDER_MM, spacing_mm[1:], strict=True))
    h, w = min(h, voxels.shape[1]), min(w, voxels.shape[2])
    depth, height, width = len(voxels), voxels.shape[1] // h, voxels.shape[2] // w
    parts = voxels[:, : height * h, : width * w].reshape(depth, height, h, width, w)
    coarse = np.round(parts.mean((2, 4), dtype=np.float32)).astype(np.uint8)
    apart = max(spacing_mm[0] * (picked[1] - picked[0] if len(picked) > 1 else 1), APART_MM)
    spacing = (float(apart), spacing_mm[1] * h, spacing_mm[2] * w)
    upright, flipped = (find_tissue(np.ascontiguousarray(way), spacing) for way in (coarse, coarse[:, ::-1]))
    as_is, turned = (tissue.confidence["ilm_support"] for tissue in (upright, flipped))
    if max(as_is, turned) < CONVINCING or abs(as_is - turned) < OVERTURNED:
        return "unclear"
    if as_is > turned:
        return "up"
    return "down" if _seen_whole(upright, spacing) else "unclear"


def _seen_whole(tissue: Tissue, spacing_mm: Spacing3) -> bool:
    """Whether tissue ends below the top of the B-scans: where it does not, no border can be expected there, whichever side is up."""
    return bool((tissue.ilm * spacing_mm[1] > EDGE_MM).mean() > SEEN_WHOLE)


def structure(voxels_DHW: np.ndarray) -> float:
    """Share of the variance of brightness that is left in block means: layers survive averaging, noise does not."""
    depth, height, width = voxels_DHW.shape
    h, w = max(1, height // 16), max(1, width // 4)
    whole = voxels_DHW[:, : height // h * h, : width // w * w].astype(np.float32)
    means = whole.reshape(depth, height // h, h, width // w, w).mean((2, 4))
    return float(means.var() / max(whole.var(), 1e-9))


def _border(
    tissue: Tissue, band: np.ndarray, valid: np.ndarray, spacing_mm: Spacing3, block: tuple[int, int, int]
) -> float | None:
    depth, width = (n // b * b for n, b in zip(band.shape[1:], (block[0], block[2]), strict=True))
    # A band that reaches the edge of the image is cut off there, or is all of it.
    seen = (band[0] > valid[0] + 1) & (valid[1] > valid[0])
    seen = _blocks(seen[:depth, :width], block).min((1, 3)) > 0
    if not tissue.confident or seen.sum() < 0.1 * seen.size:
        return None
    stored = _blocks(band[0, :depth, :width], block).mean((1, 3)) + MARGIN_MM / spacing_mm[1]
    found = (tissue.ilm + 0.5) * block[1] - 0.5
    return float(np.median(np.abs(stored - found)[seen]) * spacing_mm[1])


def _coarse(voxels_DHW: np.ndarray, spacing_mm: Spacing3) -> tuple[np.ndarray, tuple[int, int, int]]:
    """uint8 means over blocks of voxels, and the size of a block; a remainder at the far border is dropped."""
    wanted = (max(1, round(enough / mm)) for enough, mm in zip(ENOUGH_MM, spacing_mm, strict=True))
    d, h, w = (min(block, n) for block, n in zip(wanted, voxels_DHW.shape, strict=True))
    depth, height, width = (n // b * b for n, b in zip(voxels_DHW.shape, (d, h, w), strict=True))
    if (d, h, w) == (1, 1, 1):
        return voxels_DHW, (1, 1, 1)
    parts = voxels_DHW[:depth, :height, :width].reshape(depth // d, d, height // h, h, width // w, w)
    return np.round(parts.mean((1, 3, 5), dtype=np.float32)).astype(np.uint8), (d, h, w)


def _blocks(plane_DW: np.ndarray, block: tuple[int, int, int]) -> np.ndarray:
    d, _, w = block
    return plane_DW.reshape(plane_DW.shape[0] // d, d, plane_DW.shape[1] // w, w)
