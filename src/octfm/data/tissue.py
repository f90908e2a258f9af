"""The tissue band: two surfaces per A-scan around everything between ILM and Bruch's membrane (BM), found without labels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from octfm.data.registration import register_bscans
from octfm.data.surface import at_rows, best_path, envelope, median_of_bscans, near, refine, smooth
from octfm.data.volume import Spacing3

MARGIN_MM = 0.05
"""The band starts this far above the estimated ILM and ends this far below the estimated BM (DESIGN §5)."""

COARSE_MM = (0.008, 0.06)
"""The surfaces are searched on block means of about this size (axial, lateral): fine against the margin, and speckle averages out."""

THRESHOLD = 0.2
"""Signal between vitreous and retina, on the scale of `_signal`."""

THINNEST_MM = 0.11
"""No retina is thinner (a fovea keeps 0.15); less than this between ILM and BM is a full-thickness hole."""

DEEPEST_PIT_MM = 0.2
"""No fovea is deeper below its rim; what is deeper is a hole, or the cup of the optic disc."""

RPE_TO_BM_MM = 0.01
"""The path follows the brightest row of the RPE; Bruch's membrane is its lower edge."""

FLOORS = {
    "contrast": 0.04,
    "contrast_to_noise": 2.0,
    "unsaturated": 0.5,
    "ilm_support": 0.75,
    "retina_support": 0.85,
    "rpe_support": 0.6,
    "smoothness": 0.88,
    "thickness": 0.9,
}
"""Smallest value of each confidence measurement that is still trusted."""


@dataclass(frozen=True, eq=False)
class Tissue:
    """What the search found, in native rows of a volume whose B-scan order and laterality are already canonical."""

    ilm: np.ndarray
    """[D, W] float32, estimated inner limiting membrane; a full-thickness hole is bridged from rim to rim. May leave the frame."""
    bm: np.ndarray
    """[D, W] float32, estimated Bruch's membrane. May leave the frame."""
    fovea: tuple[float, float] | None
    """(B-scan, A-scan) index of the foveal pit, None where no pit stands out."""
    displacement: np.ndarray
    """[D] float64, axial displacement of each B-scan by eye motion."""
    confident: bool
    """False: do not trust the surfaces, keep every row."""
    confidence: dict[str, float]
    """The measurements behind `confident`, each with its floor in `FLOORS`."""


def find_tissue(voxels_DHW: np.ndarray, spacing_mm: Spacing3) -> Tissue:
    """Register the B-scans, find the ILM, then the RPE below it, each as the best path per B-scan with its neighbours as referees."""
    coarse, block = _block_means(voxels_DHW, spacing_mm)
    dz, dy, dx = spacing_mm[0], spacing_mm[1] * block[0], spacing_mm[2] * block[1]
    displacement = register_bscans(coarse, (dz, dy, dx))
    blank = coarse.max(axis=2) == coarse.min(axis=2)
    signal, contrast, contrast_to_noise = _signal(coarse, blank)
    pad = int(np.ceil(np.abs(displacement).max() + 0.3 / dy))
    signal, seen = _align(signal, blank, displacement, pad)
    _average_neighbours(signal, seen, dz)

    ilm_score = _by_bscan(partial(_ilm_score, dy=dy), signal, seen)
    ilm = median_of_bscans(best_path(ilm_score, jump=max(1, round(1.5 * dx / dy)), penalty=0.05), dz)
    del ilm_score
    # Pits and holes in the ILM must not forbid the RPE below them.
    rim = envelope(ilm, (dz, dx), -1)
    rpe_score = _by_bscan(partial(_rpe_score, dy=dy), signal, seen, rim)
    rpe_score /= max(float(np.median(rpe_score.max(axis=2))), 1e-6)
    # Out of the frame nothing speaks for or against, so a tilted RPE may leave it.
    rpe_score[~seen] = 0.25
    rpe = median_of_bscans(best_path(rpe_score, jump=max(1, round(dx / dy)), penalty=0.06), dz)
    bm = envelope(rpe, (dz, dx), 1) + np.float32(RPE_TO_BM_MM / dy)
    ilm = _bridge_holes(ilm, (bm - ilm < THINNEST_MM / dy) | (ilm - rim > DEEPEST_PIT_MM / dy), round(0.25 / dx))

    confidence = {
        "contrast": contrast / 255,
        "contrast_to_noise": contrast_to_noise,
        "unsaturated": 1 - min(1.0, float((coarse >= 254).sum() / max((bm - ilm).sum(), 1))),
        **_support(signal, seen, rpe_score, ilm, rpe, bm, (dz, dy, dx)),
    }
    native = ((surface - pad + displacement[:, None] + 0.5) * block[0] - 0.5 for surface in (ilm, bm))
    ilm_native, bm_native = (refine(surface, block[1], voxels_DHW.shape[2]) for surface in native)
    fovea = _find_fovea((bm - ilm) * dy, (dz, dx))
    return Tissue(
        ilm=ilm_native,
        bm=bm_native,
        fovea=fovea and (fovea[0], (fovea[1] + 0.5) * block[1] - 0.5),
        displacement=displacement * block[0],
        confident=all(confidence[name] >= floor for name, floor in FLOORS.items()),
        confidence=confidence,
    )


def _block_means(voxels: np.ndarray, spacing_mm: Spacing3) -> tuple[np.ndarray, tuple[int, int]]:
    """Means over (rows, A-scans) blocks, float32 [D, W, H]; a remainder at the far border is dropped."""
    depth, height, width = voxels.shape
    rows = min(max(1, round(COARSE_MM[0] / spacing_mm[1])), height)
    columns = min(max(1, round(COARSE_MM[1] / spacing_mm[2])), width)
    h, w = height // rows, width // columns
    means = np.empty((depth, w, h), np.float32)
    for bscan, mean in zip(voxels, means, strict=True):
        total = np.zeros((h, w * columns), np.uint16)
        for row in range(rows):
            total += bscan[row : h * rows : rows, : w * columns]
        sums = np.zeros((h, w), np.float32)
        for column in range(columns):
            sums += total[:, column::columns]
        np.divide(sums.T, np.float32(rows * columns), out=mean)
    return means, (rows, columns)


def _signal(coarse: np.ndarray, blank: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Brightness with the noise floor at 0 and the brightest layers near 1 (0 on blank A-scans); the step between them in grey
    levels, and the same step in standard deviations of the speckle that is left."""
    smoothed = _by_bscan(partial(_moving_mean, reach=1, axis=1), coarse)
    # The floor is the level of the noise, not its darkest speckle: look at means over many blocks.
    calm = _moving_mean(_moving_mean(coarse[::2], 3, 1, step=3), 3, 2, step=3)[~blank[::2, ::3]]
    if not calm.size:
        return np.zeros_like(coarse), 0.0, 0.0
    low = float(np.percentile(calm, 10))
    contrast = max(float(np.percentile(smoothed[::2][~blank[::2]], 99)) - low, 1e-3)
    noise = float(np.abs(coarse[::2, ::2, 2::2] - coarse[::2, ::2, :-2:2]).sum()) / max(coarse[::2, ::2, 2::2].size, 1) + 1e-3
    signal = _by_bscan(partial(_evened, low=low, contrast=contrast), smoothed, blank)
    return signal, contrast, contrast / noise


def _evened(smoothed: np.ndarray, blank: np.ndarray, low: float, contrast: float) -> np.ndarray:
    signal = (smoothed - np.float32(low)) / np.float32(contrast)
    signal[blank] = 0
    # Shadows, vignetting and fading dim whole A-scans: bring the brightest layer near 1 on each, but do not raise noise.
    peak = _moving_mean(_moving_mean(signal, 1, 2).max(axis=2, keepdims=True), 6, 1)
    signal /= np.maximum(peak, np.float32(0.35))
    return signal


def _by_bscan(function: Callable[..., np.ndarray], *arrays: np.ndarray) -> np.ndarray:
    """`function` of a few B-scans at a time, float32: they stay in the processor's cache, and what it needs besides stays small."""
    out = np.empty(arrays[0].shape, np.float32)
    few = max(1, 2**16 // max(out[0].size, 1))
    for start in range(0, len(out), few):
        part = slice(start, start + few)
        out[part] = function(*(array[part] for array in arrays))
    return out


def _moving_mean(array: np.ndarray, reach: int, axis: int, step: int = 1) -> np.ndarray:
    """Mean over ± `reach` along an axis, the border repeated, at every `step`-th place."""
    pad = [(0, 0)] * array.ndim
    pad[axis] = (reach, reach)
    padded = np.pad(array, pad, mode="edge")
    n = array.shape[axis]
    total = np.zeros_like(array[:, ::step] if axis == 1 else array[:, :, ::step])
    for i in range(2 * reach + 1):
        total += padded[:, i : i + n : step] if axis == 1 else padded[:, :, i : i + n : step]
    total /= np.float32(2 * reach + 1)
    return total


def _align(signal: np.ndarray, blank: np.ndarray, displacement: np.ndarray, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """Every B-scan shifted by minus its displacement (linear), `pad` rows added on both sides; and which voxels were seen at all."""
    depth, width, height = signal.shape
    out = np.zeros((depth, width, height + 2 * pad), np.float32)
    seen = np.zeros(out.shape, bool)
    for d, shift in enumerate(displacement):
        whole = int(np.floor(shift))
        part = np.float32(shift - whole)
        at = slice(pad - whole, pad - whole + height)
        out[d, :, at] = (1 - part) * signal[d]
        out[d, :, at][:, :-1] += part * signal[d][:, 1:]
        out[d, :, at][:, -1] += part * signal[d][:, -1]
        seen[d, :, at] = ~blank[d][:, None]
    return out, seen


def _average_neighbours(signal: np.ndarray, seen: np.ndarray, dz: float) -> None:
    """In place: mean over registered neighbours within about 0.1 mm, of what was seen."""
    reach = min(int(0.06 / dz), (len(signal) - 1) // 2)
    total, count = signal.copy(), seen.astype(np.float32)
    for step in range(1, reach + 1):
        for here, there in ((slice(step, None), slice(None, -step)), (slice(None, -step), slice(step, None))):
            total[here] += signal[there]
            count[here] += seen[there]
    np.divide(total, count, out=signal, where=count > 0)
    np.greater(count, 0, out=seen)


def _ilm_score(signal: np.ndarray, seen: np.ndarray, dy: float) -> np.ndarray:
    """Score of placing the ILM at each row: bright below it and dark above it count. Dark counts little, so that a cyst does not cut
    the retina in two; what is bright over less than 0.04 mm is not retina but a hyaloid or a floater, and counts as dark."""
    over = (_opened(signal, round(0.04 / dy)) - np.float32(THRESHOLD)) * seen
    gain = np.minimum(np.maximum(over, np.float32(0.15) * over), np.float32(0.5))
    return np.cumsum(gain[:, :, ::-1], axis=2)[:, :, ::-1]


def _opened(signal: np.ndarray, rows: int) -> np.ndarray:
    """Morphological opening along A-scans: bright runs shorter than `rows` disappear, every other edge stays where it is."""
    height = signal.shape[2]
    low = signal[:, :, : height - rows + 1].copy()
    for i in range(1, rows):
        np.minimum(low, signal[:, :, i : height - rows + 1 + i], out=low)
    out = np.full_like(signal, -1)
    for i in range(rows):
        np.maximum(out[:, :, i : height - rows + 1 + i], low, out=out[:, :, i : height - rows + 1 + i])
    return out


def _rpe_score(signal: np.ndarray, seen: np.ndarray, rim: np.ndarray, dy: float) -> np.ndarray:
    """Score of placing the RPE at each row; the nerve fibre layer can be as bright, so nothing near the inner border counts."""
    score = _attenuation(signal, seen, dy) * _brighter_than_above(signal, dy)
    score *= (np.arange(signal.shape[2]) >= rim[:, :, None] + 0.1 / dy) & seen
    return score


def _attenuation(signal: np.ndarray, seen: np.ndarray, dy: float) -> np.ndarray:
    """How strongly each voxel attenuates, 0 to 1: bright, with little energy left below it, as in Vermeer et al., Biomed. Opt.
    Express 5:322, 2014. The nerve fibre layer may be as bright as the RPE but has the whole retina below."""
    energy = np.square(np.maximum(signal, 0))
    # The choroid goes on below the frame; without a guess of it the last row would look like the end of all tissue.
    last = signal.shape[2] - 1 - seen[:, :, ::-1].argmax(axis=2)
    tail = np.mean([at_rows(energy, last - i) for i in range(max(1, round(0.05 / dy)))], axis=0) * 0.15
    above_and_here = np.cumsum(energy, axis=2) * np.float32(dy)
    below = (above_and_here[:, :, -1] + tail.astype(np.float32))[:, :, None] - above_and_here
    return energy / (energy + 40 * below + np.float32(0.05))


def _brighter_than_above(signal: np.ndarray, dy: float) -> np.ndarray:
    """Signal less that of 0.05-0.15 mm above, 0 to 1: outer retina or fluid over the RPE, but choroid over the bottom of the choroid."""
    bright = np.maximum(signal, 0)
    first, past = round(0.05 / dy), round(0.15 / dy) + 1
    total = np.cumsum(np.pad(bright, ((0, 0), (0, 0), (past, 0))), axis=2)
    above = (total[:, :, past - first : -first] - total[:, :, :-past]) / np.float32(past - first)
    return np.clip(bright - above, 0, 1)


def _bridge_holes(ilm: np.ndarray, hole: np.ndarray, reach: int) -> np.ndarray:
    """The ILM with holes bridged from rim to rim, starting `reach` A-scans and one B-scan outside, where the rim is at full height."""
    gap = near(near(hole, reach, axis=1), 1, axis=0)
    out = ilm.copy()
    x = np.arange(ilm.shape[1])
    for d in np.flatnonzero(gap.any(axis=1) & ~gap.all(axis=1)):
        out[d, gap[d]] = np.minimum(ilm[d, gap[d]], np.interp(x[gap[d]], x[~gap[d]], ilm[d, ~gap[d]]))
    return out


def _find_fovea(thickness_mm: np.ndarray, spacing_mm: tuple[float, float]) -> tuple[float, float] | None:
    """The deepest pit of the middle half of the field, the more central one if in doubt. A pit is thinner by at least 0.03 mm than
    what lies 0.9 mm away in every direction: beside a swelling, one side is thicker and the other is not."""
    local = smooth(thickness_mm, spacing_mm, 0.2)
    rows, columns = (np.arange(n) for n in local.shape)
    depth = np.full(local.shape, np.inf)
    for angle in np.arange(8) * np.pi / 4:
        there = np.clip(rows + round(0.9 * np.sin(angle) / spacing_mm[0]), 0, len(rows) - 1)
        across = np.clip(columns + round(0.9 * np.cos(angle) / spacing_mm[1]), 0, len(columns) - 1)
        depth = np.minimum(depth, local[there][:, across] - local)
    d, w = ((index - (len(index) - 1) / 2) * mm for index, mm in zip((rows, columns), spacing_mm, strict=True))
    central = (np.abs(d) <= len(d) * spacing_mm[0] / 4)[:, None] & (np.abs(w) <= len(w) * spacing_mm[1] / 4)
    score = np.where(central, depth - 0.02 * np.hypot(d[:, None], w[None]), -np.inf)
    best = np.unravel_index(score.argmax(), score.shape)
    return (float(best[0]), float(best[1])) if depth[best] >= 0.03 else None


def _support(
    signal: np.ndarray, seen: np.ndarray, score: np.ndarray, ilm: np.ndarray, rpe: np.ndarray, bm: np.ndarray, spacing_mm: Spacing3
) -> dict[str, float]:
    """Shares of A-scans (0 to 1) on which the surfaces look like an ILM and an RPE."""
    dz, dy, _ = spacing_mm
    n = max(1, round(0.05 / dy))
    step = np.mean([at_rows(signal, ilm + i) - at_rows(signal, ilm - i - 2) for i in range(n)], axis=0)
    filled = np.mean([at_rows(signal, ilm + i) > THRESHOLD for i in range(3 * n)], axis=0)
    ilm_seen = at_rows(seen, ilm + n) & at_rows(seen, ilm - n - 1)
    rpe_seen = at_rows(seen, rpe)
    jumps = (np.abs(np.diff(ilm, axis=0)) + np.abs(np.diff(rpe, axis=0))) * dy
    thickness = (bm - ilm) * dy
    return {
        "ilm_support": float((step[ilm_seen] > 0.15).mean()) if ilm_seen.any() else 0.0,
        "retina_support": float((filled[ilm_seen] > 0.5).mean()) if ilm_seen.any() else 0.0,
        "rpe_support": float((at_rows(score, rpe)[rpe_seen] > 0.3).mean()) if rpe_seen.any() else 0.0,
        "smoothness": float((jumps < 0.06 + 0.25 * dz).mean()) if jumps.size else 1.0,
        "thickness": float(((thickness > 0.1) & (thickness < 1.0)).mean()),
    }
