"""Checks that need only voxels: is the volume upside down, does it show tissue, does a stored tissue band fit it, is a
picture a screenshot of two?

The thresholds were set on phantoms and a few real scans; the margins that they leave are given with each.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from octfm.volume.margins import ready_for_search, trimmed
from octfm.volume.tissue import COARSE_MM as BORDER_MM
from octfm.volume.tissue import MARGIN_MM, Tissue, find_tissue
from octfm.volume.volume import Planes, Spacing3

ENOUGH_MM = (0.1875, 0.0104, 0.031)
"""Voxel size (z, y, x) to which finer voxels are averaged: speckle averages out, the layers stay."""
CLEAR = 0.1
"""Smallest difference between the shares of A-scans with a clear vitreous border, one way up and the other. On phantoms
(100 of all scanners and diagnoses, on two grids, both ways up) it is .14 or more in favour of the right way; 388 of 400
get an answer, and none is wrong."""
LEAST_STRUCTURE = 0.3
"""Smallest share of the variance of brightness left in means over a sixteenth of the rows and a quarter of the A-scans
of a B-scan. Phantoms have .57 or more, seven real scans on four grids .47 or more, white noise and speckle .01 or less.
Noise smoothed over more than five voxels passes, but the tissue search is not confident on it."""
OWN_BAND_MM, OWN_BAND_ROWS = 0.025, 2.0
"""Largest median distance of a stored vitreous border from the one found again in the voxels, in millimetres or rows,
whichever is more. It is .010 mm or less on phantoms and real scans; for bands of other volumes .10 mm in the median,
and above .022 mm in 99 of 100."""

FEW_BSCANS, APART_MM = 12, 0.12
"""Number of B-scans of a file that are examined, and the smallest distance assumed between them, so that the tissue
search averages none with another."""
UNDOUBTED = 0.9
"""A volume with a clear vitreous border on a larger share of A-scans is not upside down: 420 phantoms turned over reach
at most .76."""
OVERTURNED, CONVINCING = 0.15, 0.5
"""For a file to count as upside down, the share of A-scans with a clear border must be larger by OVERTURNED when it is
turned over, and at least CONVINCING. The difference in favour of the right way is .22 or more on 420 phantoms (five
scanners, all diagnoses) and .49 or more on real volumes."""
EDGE_MM, SEEN_WHOLE = 0.06, 0.5
"""A volume may have lost its vitreous to a crop unless tissue begins further than EDGE_MM from the top of the B-scan on
a share of A-scans above SEEN_WHOLE. That share is .28 or less in real scans cropped or flattened at the ILM, and .59 or
more in scans turned over, except 0 for one whose choroid fills the frame."""
PLANES, LAYERED, CROSSWISE = 48, 0.15, 12.0
"""Layers lie across another axis if the means of its planes (at most PLANES) hold a share LAYERED of the variance
of brightness, and CROSSWISE times the share that means of rows hold. In the right order another axis has at most
2.3 times the share of rows (90 phantoms, some clipped, blinked, wide or overturned; three real volumes); 3
times if light fades to a tenth from one end to the other, 10 if a tilt over most of the frame comes on top."""
NOT_IMAGED = 8
"""B-scans whose grey levels span less than 1 / NOT_IMAGED of what those of the most varied B-scan span are left out:
they show a blink, or a scan was ended early. The others would look like bright layers among them, with 17 to 90 times
the share of rows."""
SEAM_ROWS, SEAM, SEAM_FLOOR = 8, 6.0, 0.5
"""Where a second picture begins next to the first one, means over eight rows differ by six times the median step
between neighbouring A-scans, which counts as half a grey level at least. In 251 real B-scans, 820 phantoms of all
conditions, discs and wide fields among them, and small JPEGs of 561 of them, no step is higher than 4.5 times, and none
of 950 public Cirrus B-scans is refused; a fundus image next to a B-scan has 7 and more, two B-scans mostly."""
STREAK, APART = 7, 5
"""A seam is still seen in medians over STREAK A-scans, APART from it; a reflection of three A-scans is not."""
ALIKE, FAINT_SEAM = 0.5, 1.5
"""B-scans that were taken close to each other may meet without such a seam. Then their halves correlate by .5 to .98,
those of one B-scan by up to .42; and a step of this height lies in the middle."""
LEAST_PICTURE, SEAM_MIDDLE, NO_SEAM = 100, 0.02, 0.15
"""Fewest rows and A-scans that are looked at, and shares of the A-scans: how far from the middle such a step lies, and
at either side those where no seam is looked for."""

Up = Literal["up", "down", "unclear"]


@dataclass(frozen=True)
class Look:
    """Result of inspecting one prepared volume."""

    up: Up
    """`down` is upside down."""
    structure: float
    """Share of the variance of brightness that is not speckle or noise, 0 to 1."""
    border_mm: float | None
    """Median distance between the vitreous border of the stored band and of the voxels; None if either is uncertain."""

    @property
    def noise(self) -> bool:
        """Whether the volume shows noise instead of tissue."""
        return self.structure < LEAST_STRUCTURE

    def strange_band(self, spacing_mm: Spacing3) -> bool:
        """Whether the stored band belongs to another volume."""
        return self.border_mm is not None and self.border_mm > max(OWN_BAND_MM, OWN_BAND_ROWS * spacing_mm[1])


def inspect(voxels_DHW: np.ndarray, band: np.ndarray, valid: np.ndarray, spacing_mm: Spacing3) -> Look:
    """Inspect one volume of a store; `band` and `valid` [2, D, W] are as in `Prepared`."""
    shown = (valid[1] > valid[0]).any(axis=1)
    voxels, band, valid = voxels_DHW[shown], band[:, shown], valid[:, shown]
    if not len(voxels):
        return Look("unclear", 0.0, None)
    coarse, block = _coarse(voxels, spacing_mm, ENOUGH_MM)
    dz, dy, dx = (mm * n for mm, n in zip(spacing_mm, block, strict=True))
    spacing = (dz, dy, dx)
    upright = find_tissue(coarse, spacing)
    flipped = find_tissue(np.ascontiguousarray(coarse[:, ::-1]), spacing)
    return Look(
        which_way_up(upright, flipped, spacing), structure(coarse), _border(upright, band, valid, spacing_mm, block)
    )


def which_way_up(upright: Tissue, flipped: Tissue, spacing_mm: Spacing3) -> Up:
    """Which way up a volume is, from the tissue found in it and in the same volume turned upside down.

    A retina has one sharp border, to the dark vitreous, and fades out on the other side. The answer is "unclear" unless
    the search is confident in only one of the two, and finds that border on clearly more A-scans there.
    """
    better = upright.confidence["ilm_support"] - flipped.confidence["ilm_support"]
    if better > CLEAR and upright.confident and not flipped.confident:
        return "up"
    if better < -CLEAR and flipped.confident and not upright.confident and _seen_whole(upright, spacing_mm):
        return "down"
    return "unclear"


def native_way_up(voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3) -> Up:
    """Which way up a volume lies in its file, from a dozen of its B-scans.

    Only the vitreous border counts, not whether the search is confident: fluid, holes and image margins lower its
    confidence without making the border less clear.
    """
    picked = np.unique(np.linspace(0, len(voxels_DHW) - 1, min(FEW_BSCANS, len(voxels_DHW))).round().astype(int))
    voxels = np.stack([voxels_DHW[i] for i in picked])
    coarse, (_, h, w) = _coarse(voxels, spacing_mm, (0.0, *BORDER_MM))
    apart = max(spacing_mm[0] * (picked[1] - picked[0] if len(picked) > 1 else 1), APART_MM)
    spacing = (float(apart), spacing_mm[1] * h, spacing_mm[2] * w)
    upright, flipped = (find_tissue(np.ascontiguousarray(way), spacing) for way in (coarse, coarse[:, ::-1]))
    as_is, turned = (tissue.confidence["ilm_support"] for tissue in (upright, flipped))
    if max(as_is, turned) < CONVINCING or abs(as_is - turned) < OVERTURNED:
        return "unclear"
    if as_is > turned:
        return "up"
    return "down" if _seen_whole(upright, spacing) else "unclear"


def layered_axis(voxels_DHW: np.ndarray | Planes) -> int:
    """The axis of uint8 voxels [D, H, W] across which the layers lie: 1, the rows of B-scans, unless 0 or 2 shows them
    far more clearly."""
    picked = np.unique(np.linspace(0, len(voxels_DHW) - 1, min(PLANES, len(voxels_DHW))).round().astype(int))
    voxels = np.stack([voxels_DHW[i] for i in picked])
    coarse, _ = _coarse(voxels, (1.0, 1.0, 1.0), (1.0, voxels.shape[1] / PLANES, voxels.shape[2] / PLANES))
    contrast = np.ptp(coarse, axis=(1, 2))
    coarse = coarse[contrast >= contrast.max() / NOT_IMAGED]
    planes = [coarse.mean(axis=other).var() for other in ((1, 2), (0, 2), (0, 1))]
    best = int(np.argmax(planes))
    clear = planes[best] >= max(LAYERED * coarse.var(), CROSSWISE * planes[1], 1e-9)
    return best if clear else 1


def _seen_whole(tissue: Tissue, spacing_mm: Spacing3) -> bool:
    """Whether tissue begins below the top of the B-scans; else no vitreous border can be visible either way up."""
    return bool((tissue.ilm * spacing_mm[1] > EDGE_MM).mean() > SEEN_WHOLE)


def structure(voxels_DHW: np.ndarray) -> float:
    """Share of the variance of brightness left in block means: layers survive averaging, noise does not."""
    depth, height, width = voxels_DHW.shape
    h, w = max(1, height // 16), max(1, width // 4)
    whole = voxels_DHW[:, : height // h * h, : width // w * w].astype(np.float32)
    means = whole.reshape(depth, height // h, h, width // w, w).mean((2, 4))
    return float(means.var() / max(whole.var(), 1e-9))


def _border(
    tissue: Tissue, band: np.ndarray, valid: np.ndarray, spacing_mm: Spacing3, block: tuple[int, int, int]
) -> float | None:
    """Median mm from the stored band's vitreous border to that of `tissue`; None where they cannot be compared."""
    depth, width = (n // b * b for n, b in zip(band.shape[1:], (block[0], block[2]), strict=True))
    # A band that reaches the upper edge of the image is cut off there, or is the whole image of an uncertain search.
    seen = (band[0] > valid[0] + 1) & (valid[1] > valid[0])
    seen = _blocks(seen[:depth, :width], block).min((1, 3)) > 0
    if not tissue.confident or seen.sum() < 0.1 * seen.size:
        return None
    stored = _blocks(band[0, :depth, :width], block).mean((1, 3)) + MARGIN_MM / spacing_mm[1]
    found = (tissue.ilm + 0.5) * block[1] - 0.5
    return float(np.median(np.abs(stored - found)[seen]) * spacing_mm[1])


def _coarse(
    voxels_DHW: np.ndarray, spacing_mm: Spacing3, block_mm: Spacing3
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """uint8 means over blocks of about `block_mm`, and the block size; a remainder at the far border is dropped."""
    target = (max(1, round(size / mm)) for size, mm in zip(block_mm, spacing_mm, strict=True))
    d, h, w = (min(block, n) for block, n in zip(target, voxels_DHW.shape, strict=True))
    depth, height, width = (n // b * b for n, b in zip(voxels_DHW.shape, (d, h, w), strict=True))
    if (d, h, w) == (1, 1, 1):
        return voxels_DHW, (1, 1, 1)
    parts = voxels_DHW[:depth, :height, :width].reshape(depth // d, d, height // h, h, width // w, w)
    return np.round(parts.mean((1, 3, 5), dtype=np.float32)).astype(np.uint8), (d, h, w)


def _blocks(plane_DW: np.ndarray, block: tuple[int, int, int]) -> np.ndarray:
    d, _, w = block
    return plane_DW.reshape(plane_DW.shape[0] // d, d, plane_DW.shape[1] // w, w)


def holds_two(bscan: np.ndarray) -> bool:
    """Whether uint8 [H, W] holds another picture next to the B-scan."""
    image = trimmed(bscan[None], 255).bscans[0]  # with its padding: a white gap looks like it
    height, width = image.shape
    if min(height, width) < LEAST_PICTURE:
        return False
    from scipy.ndimage import median_filter

    blocks = _rows_joined(image)
    steps = np.abs(np.diff(blocks)).mean(axis=0)
    wide = median_filter(blocks, (1, STREAK))
    lasting = np.abs(wide[:, 2 * APART + 1 :] - wide[:, : -2 * APART - 1]).mean(axis=0)
    place = np.arange(APART, APART + lasting.size)
    height_of = np.minimum(steps[place], lasting) / (np.median(steps) + SEAM_FLOOR)
    height_of[(place < NO_SEAM * width) | (place > (1 - NO_SEAM) * width)] = 0
    middle = np.abs(place + 1 - width / 2) <= max(3, SEAM_MIDDLE * width)
    faint = height_of[middle].max() > FAINT_SEAM and _likeness(ready_for_search(bscan[None], 255)[0]) > ALIKE
    return bool(height_of.max() > SEAM or faint)


def _rows_joined(image: np.ndarray) -> np.ndarray:
    """float32 means over SEAM_ROWS rows; the rest at the bottom is dropped."""
    return image[: len(image) // SEAM_ROWS * SEAM_ROWS].reshape(-1, SEAM_ROWS, image.shape[1]).mean(1, np.float32)


def _likeness(image: np.ndarray) -> float:
    """Correlation of the left and the right half, without what all A-scans of a half share."""
    blocks = _rows_joined(image)
    half = blocks.shape[1] // 2 // SEAM_ROWS * SEAM_ROWS
    halves = blocks[:, :half], blocks[:, -half:]
    left, right = (part.reshape(len(part), -1, SEAM_ROWS).mean(axis=2) for part in halves)
    left, right = (part - part.mean(axis=1, keepdims=True) for part in (left, right))
    return float((left * right).sum() / (np.sqrt((left**2).sum() * (right**2).sum()) + 1e-9))
