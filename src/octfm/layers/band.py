"""The learned tissue band of `prepare`: ILM and Bruch's membrane (BM) by a packaged network, where it is sure.

The classic search runs first: it registers the B-scans, and its surfaces stay, with low confidence, where the network
is unsure. benchmarks/bands.py compares both.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from octfm.errors import CheckpointError
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.verdict import SEEN, own_error_um
from octfm.models.layer_net import SURFACES
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.surface import between_bscans, bowl, median_of_bscans
from octfm.volume.tissue import COARSE_MM, MARGIN_MM, Tissue, find_fovea, searched_bscans
from octfm.volume.volume import Planes, Spacing3, Volume
from octfm.weights.packaged import CURRENT, find_packaged, packaged

BSCANS_MM = 0.24
"""B-scans closer than this are not all given to the network: between them the surfaces are interpolated."""
ALIKE_MM = 0.25
"""B-scans this close show nearly the same retina."""
THICKNESS_MM = (0.1, 1.5)
"""Plausible distances of BM from the ILM; the upper one leaves room for detachments of 800 µm."""
FLOORS = {
    "learned_bscans": 0.9,
    "learned_found": 0.9,
    "learned_sure": 0.9,
    "learned_smoothness": 0.9,
    "learned_thickness": 0.95,
    "learned_bm_not_lifted": 0.99,
}
"""Smallest value of each measurement at which the surfaces are trusted."""


@dataclass(frozen=True)
class LearnedBand:
    """The finder of a learned band (octfm.volume.tissue.BandFinder). Workers get its name and load the weights from
    their own octfm."""

    name: str = CURRENT
    """A packaged network."""
    memory = 1_300_000_000
    """Bytes of PyTorch and the largest B-scan that the network takes; a usual one, of 496 x 512, needs 300 million."""
    seconds_per_megabyte = 10.0
    """Ten times what the network takes."""

    @property
    def network(self) -> str:
        return f"{self.name} {find_packaged(self.name).digest}"

    @property
    def settings(self) -> dict[str, str]:
        """What Preprocessing records of this finder."""
        return {"band": "learned", "band_network": self.network}

    def __call__(self, voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3, classic: Tissue) -> Tissue:
        """The surfaces of the network, or those of `classic` with low confidence; its measurements are kept."""
        at = searched_bscans(len(voxels_DHW), spacing_mm[0], BSCANS_MM)
        # On the CPU: a store must not depend on the device, and workers must not share a GPU.
        found = _find(load_finder(self.name, "cpu"), voxels_DHW, at, spacing_mm)
        return retina(found, at, voxels_DHW.shape[1], spacing_mm, classic)


@dataclass(frozen=True, eq=False)
class Found:
    """What the network found in S of the B-scans."""

    rows: np.ndarray
    """float32 [2, S, W]: ILM and BM in native rows, NaN where not in the image."""
    present: np.ndarray
    """float32 [S, W]: probability that the retina is in the image."""
    error_um: np.ndarray
    """float32 [S, W]: error of the thickness that the network's own distribution implies."""


def _find(finder: LayerFinder, voxels_DHW: np.ndarray | Planes, at: np.ndarray, spacing_mm: Spacing3) -> Found:
    """One B-scan after the other, so that a worker needs memory for one, and with one thread, so that the result does
    not depend on how many there are."""
    surfaces_only = LayerFinder(finder.network, finder.name, finder.digest, masks=())
    with _one_thread():
        found = [
            surfaces_only.find(Volume(np.ascontiguousarray(voxels_DHW[bscan])[None], spacing_mm, layout="line"))
            for bscan in at
        ]
    ends = [SURFACES.index("ilm"), SURFACES.index("bm")]
    return Found(
        rows=np.concatenate([layers.rows[ends] for layers in found], axis=1),
        present=np.concatenate([layers.present for layers in found]),
        error_um=np.concatenate([own_error_um(layers) for layers in found]),
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def retina(found: Found, at: np.ndarray, height: int, spacing_mm: Spacing3, classic: Tissue) -> Tissue:
    """The retina in a volume of `height` rows from what was found in its B-scans `at`."""
    kept = (found.present > 0.5).mean(axis=1) >= SEEN
    measured = {"learned_bscans": float(kept.mean())}
    if not kept.any():
        return _unsure(classic, measured)
    at, rows = at[kept], found.rows[:, kept]
    dz, dy, dx = spacing_mm
    apart = dz * float(np.diff(at).mean()) if len(at) > 1 else dz
    inside = np.asarray(np.isfinite(rows).all(axis=0))
    # A surface that is not in the image lies beyond the frame: the band then reaches to its edge.
    edges = np.array([-0.5, height - 0.5])[:, None, None]
    registered = np.where(np.isfinite(rows), rows, edges) - classic.displacement[at, None]
    # Neighbours outvote a B-scan in which the network went astray, where they show nearly the same retina.
    ilm, bm = (median_of_bscans(surface, apart) if apart <= ALIKE_MM else surface for surface in registered)
    some = apart > 1.5 * dz
    jumps = (np.abs(_steps(ilm, whole=some)) + np.abs(_steps(bm, whole=some))) * dy
    thickness = (bm - ilm) * dy
    # As in the classic search: BM is smooth, so where it rises above the bowl fitted to the rest it is the RPE. A bowl
    # for each B-scan, because those of a volume may be displaced or tilted against each other.
    bottom = np.concatenate([bowl(bscan[None], known[None]) for bscan, known in zip(bm, inside, strict=True)])
    lifted = ((bottom - bm) * dy > MARGIN_MM) & inside
    measured |= {
        "learned_found": float(inside.mean()),
        "learned_sure": float((found.error_um[kept][inside] <= 1000 * MARGIN_MM).mean()) if inside.any() else 0.0,
        "learned_smoothness": float((jumps < 0.06 + 0.25 * apart).mean()) if jumps.size else 1.0,
        "learned_thickness": float(((thickness > THICKNESS_MM[0]) & (thickness < THICKNESS_MM[1])).mean()),
        "learned_bm_not_lifted": 1 - float(lifted.sum() / max(inside.sum(), 1)),
    }
    if any(measured[name] < floor for name, floor in FLOORS.items()):
        return _unsure(classic, measured)
    ilm_native, bm_native = (
        between_bscans(surface, at, classic.displacement).astype(np.float32) for surface in (ilm, bm)
    )
    return replace(
        classic,
        ilm=ilm_native,
        bm=bm_native,
        fovea=_fovea(thickness, at, apart, dx),
        confident=True,
        located=True,
        confidence={**classic.confidence, **measured},
    )


def _steps(surface: np.ndarray, whole: bool) -> np.ndarray:
    """Steps from B-scan to B-scan, in rows. Unless `whole`, without what moves all A-scans of a B-scan alike: a retina
    that drifts is no error, but B-scans between them would lie elsewhere."""
    steps = np.diff(surface, axis=0)
    return steps if whole else steps - np.median(steps, axis=1, keepdims=True)


def _unsure(classic: Tissue, measured: dict[str, float]) -> Tissue:
    return replace(classic, confident=False, confidence={**classic.confidence, **measured})


def _fovea(thickness_mm: np.ndarray, at: np.ndarray, apart_mm: float, dx: float) -> tuple[float, float] | None:
    """(B-scan, A-scan) of the pit, searched in means over about as many A-scans as the classic search uses."""
    block = min(max(1, round(COARSE_MM[1] / dx)), thickness_mm.shape[1])
    columns = thickness_mm.shape[1] // block
    coarse = thickness_mm[:, : columns * block].reshape(len(at), columns, block).mean(axis=2)
    pit = find_fovea(coarse, (apart_mm, block * dx))
    return pit and (float(np.interp(pit[0], np.arange(len(at)), at)), (pit[1] + 0.5) * block - 0.5)


def with_network(preprocessing: Preprocessing) -> Preprocessing:
    """The same settings; a band that needs a network and does not name it gets the current one."""
    if preprocessing.band == "classic" or preprocessing.band_network:
        return preprocessing
    return preprocessing.model_copy(update={"band_network": LearnedBand().network})


def band_finder(preprocessing: Preprocessing, where: str) -> LearnedBand | None:
    """The finder that settings name, None for a classic band.

    Raises CheckpointError, which begins with `where`, if this octfm has no network of that name and hash, or if its
    file is damaged.
    """
    if preprocessing.band == "classic":
        return None
    name, _, digest = preprocessing.band_network.partition(" ")
    here = {each.name: each.digest for each in packaged()}
    if here.get(name) != digest:
        known = ", ".join(f"{name} {digest[:12]}" for name, digest in here.items())
        raise CheckpointError(
            f"{where}: needs the network {name} {digest[:12]} to find tissue bands (band: {preprocessing.band}), this "
            f"octfm has {known}; use the octfm that it was made with"
        )
    load_finder(name, "cpu")  # here, not in every worker, a damaged file is one error
    return LearnedBand(name)
