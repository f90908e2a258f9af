"""The learned tissue band of `prepare`: ILM and Bruch's membrane (BM) by a packaged network, where it is sure.

The classic search runs first: it registers the B-scans, and its surfaces stay, with low confidence, where the network
is unsure. benchmarks/bands.py compares both.
"""

from dataclasses import dataclass, replace

import numpy as np

from octfm.errors import CheckpointError
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.verdict import SEEN, own_error_um
from octfm.models.layer_net import SURFACES
from octfm.run.runtime import torch_threads
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.surface import between_bscans, bowl, median_of_bscans
from octfm.volume.tissue import COARSE_MM, MARGIN_MM, Tissue, find_fovea, searched_bscans
from octfm.volume.volume import Planes, Spacing3, Volume
from octfm.weights.packaged import CURRENT, find_packaged, packaged

BSCANS_MM = 0.24
"""If B-scans are closer than this, the network sees only some of them, and surfaces in between are interpolated."""
ALIKE_MM = 0.25
"""B-scans at most this far apart show nearly the same retina."""
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
"""Least value of each measurement; if one is below, the network's surfaces are not used."""


@dataclass(frozen=True)
class LearnedBand:
    """The finder of a learned band (octfm.volume.tissue.BandFinder). Workers get its name and load the weights from
    their own octfm."""

    name: str = CURRENT
    """A packaged network."""
    memory = 1_300_000_000
    """Bytes that PyTorch and the network need for the largest B-scan; a usual one, 496 x 512, needs 300 million."""
    seconds_per_megabyte = 10.0
    """Time limit for the network; it usually takes a tenth of that."""

    @property
    def network(self) -> str:
        """Name and SHA-256 of the network, as Preprocessing records them."""
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
    """float32 [S, W]: error of the thickness from ILM to BM that the network's own distribution implies."""


def _find(finder: LayerFinder, voxels_DHW: np.ndarray | Planes, at: np.ndarray, spacing_mm: Spacing3) -> Found:
    """What the network finds in the B-scans `at`: one after the other, so that a worker needs memory for one only, and
    with one thread, so that the result does not depend on the number of threads."""
    surfaces_only = LayerFinder(finder.network, finder.name, finder.digest, masks=())
    with torch_threads(1):
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


def retina(found: Found, at: np.ndarray, height: int, spacing_mm: Spacing3, classic: Tissue) -> Tissue:
    """The retina of a volume from what was found in its B-scans `at`, int [S]: the network's surfaces if every FLOORS
    is reached, otherwise those of `classic` with low confidence. `height`: rows of the volume."""
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
    # Where neighbouring B-scans show nearly the same retina, a median removes errors of a single one.
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
    """Differences between successive B-scans in rows, [S − 1, W]. Unless `whole`, without their median over A-scans,
    because a retina that drifts as a whole is no error. Where B-scans in between are interpolated it is one
    (`whole`)."""
    steps = np.diff(surface, axis=0)
    return steps if whole else steps - np.median(steps, axis=1, keepdims=True)


def _unsure(classic: Tissue, measured: dict[str, float]) -> Tissue:
    return replace(classic, confident=False, confidence={**classic.confidence, **measured})


def _fovea(thickness_mm: np.ndarray, at: np.ndarray, apart_mm: float, dx: float) -> tuple[float, float] | None:
    """(B-scan, A-scan) of the pit in fractions, from thickness [S, W] averaged over about as many A-scans as in the
    classic search; None if there is none."""
    block = min(max(1, round(COARSE_MM[1] / dx)), thickness_mm.shape[1])
    columns = thickness_mm.shape[1] // block
    coarse = thickness_mm[:, : columns * block].reshape(len(at), columns, block).mean(axis=2)
    pit = find_fovea(coarse, (apart_mm, block * dx))
    return pit and (float(np.interp(pit[0], np.arange(len(at)), at)), (pit[1] + 0.5) * block - 0.5)


def with_network(preprocessing: Preprocessing) -> Preprocessing:
    """The same settings, with the current network named if the band needs one and names none."""
    if preprocessing.band == "classic" or preprocessing.band_network:
        return preprocessing
    return preprocessing.model_copy(update={"band_network": LearnedBand().network})


def band_finder(preprocessing: Preprocessing, where: str) -> LearnedBand | None:
    """The finder that the settings name; None for a classic band.

    Raises CheckpointError, whose text begins with `where`, if this octfm has no network of that name and hash, or if
    its file is damaged.
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
    load_finder(name, "cpu")  # so that a damaged file is one error, and not one in every worker
    return LearnedBand(name)
