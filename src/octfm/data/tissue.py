"""The tissue band: two surfaces per A-scan around everything between ILM and Bruch's membrane (BM), found without labels."""

from dataclasses import dataclass

import numpy as np

from octfm.data.registration import register_bscans
from octfm.data.volume import Spacing3

MARGIN_MM = 0.05
"""The band starts this far above the estimated ILM and ends this far below the estimated BM (DESIGN §5)."""

COARSE_MM = (0.045, 0.008, 0.045)
"""The surfaces are searched on a block-averaged volume of about this spacing: fine against the margin, and speckle averages out."""


@dataclass(frozen=True, eq=False)
class Tissue:
    """What the search found, in native rows of a volume whose B-scan order and laterality are already canonical."""

    ilm: np.ndarray
    """[D, W] float32, estimated inner limiting membrane; a full-thickness hole is bridged from rim to rim."""
    bm: np.ndarray
    """[D, W] float32, estimated Bruch's membrane."""
    fovea: tuple[float, float] | None
    """(B-scan, A-scan) index of the foveal pit, None where no pit stands out."""
    displacement: np.ndarray
    """[D] float64, axial displacement of each B-scan by eye motion."""
    confident: bool
    """False: do not trust the surfaces, keep every row."""
    confidence: dict[str, float]
    """The measurements behind `confident`, each with its floor in `FLOORS`."""


FLOORS = {"contrast": 0.1, "ilm_support": 0.6, "rpe_support": 0.6, "smoothness": 0.7, "plausible_thickness": 0.8}
"""Smallest value of each confidence measurement that is still trusted."""


def find_tissue(voxels_DHW: np.ndarray, spacing_mm: Spacing3) -> Tissue:
    """Register the B-scans, then find BM and ILM as smoothest best paths per B-scan, agreeing with the B-scans beside it."""
    coarse, block = _block_mean(voxels_DHW, spacing_mm)
    dz, dy, dx = (mm * n for mm, n in zip(spacing_mm, (1, *block), strict=True))
    displacement = register_bscans(coarse, (dz, dy, dx))
    pad = int(np.ceil(np.abs(displacement).max() + 0.3 / dy))
    signal, low, high = _signal(coarse)
    signal = _align(signal, displacement, pad, fill=np.nan)
    signal = _smooth_bscans(signal, dz)
    outside = np.isnan(signal)
    rpe_score = _attenuation(np.where(outside, 0, signal), dy)
    rpe_score[outside] = 0.3
    rpe = _best_path(rpe_score, jump=max(1, round(dx / dy)), penalty=0.05)
    bm = _lower_envelope(_median(rpe), (dz, dx))
    ilm_score = _vitreous_to_retina(np.where(outside, THRESHOLD, signal), bm, dy)
    ilm = _median(_best_path(ilm_score, jump=max(1, round(1.5 * dx / dy)), penalty=0.05))
    ilm = _bridge_holes(ilm, bm, dy, dx)
    confidence = _confidence(signal, rpe_score, rpe, ilm, bm, dy, (high - low) / 255)
    rows = np.stack([ilm, bm]) - pad + displacement[None, :, None]
    native = _refine((rows + 0.5) * block[0] - 0.5, block[1], voxels_DHW.shape[2])
    return Tissue(
        ilm=native[0],
        bm=native[1],
        fovea=_find_fovea((bm - ilm) * dy, (dz, dx), block[1]),
        displacement=displacement * block[0],
        confident=all(confidence[name] >= floor for name, floor in FLOORS.items()),
        confidence=confidence,
    )


THRESHOLD = 0.2
"""Signal between vitreous and retina, on the scale of `_signal`."""


def _block_mean(voxels: np.ndarray, spacing_mm: Spacing3) -> tuple[np.ndarray, tuple[int, int]]:
    """Means over (rows, A-scans) blocks, float32; a remainder at the far border is dropped."""
    depth, height, width = voxels.shape
    rows = min(max(1, round(COARSE_MM[1] / spacing_mm[1])), height)
    columns = min(max(1, round(COARSE_MM[2] / spacing_mm[2])), width)
    h, w = height // rows, width // columns
    total = np.zeros((depth, h, w * columns), np.uint16)
    for row in range(rows):
        total += voxels[:, row : h * rows : rows, : w * columns]
    mean = total.reshape(depth, h, w, columns).sum(axis=3, dtype=np.uint32) / np.float32(rows * columns)
    return mean.astype(np.float32), (rows, columns)


def _signal(coarse: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Brightness with the noise floor at 0 and the brightest layers near 1; blank A-scans are NaN."""
    blank = coarse.max(axis=1) == coarse.min(axis=1)
    seen = coarse.transpose(0, 2, 1)[~blank]
    if not seen.size:
        return np.full_like(coarse, np.nan), 0.0, 0.0
    low, high = (float(v) for v in np.percentile(seen, (10, 99)))
    signal = (coarse - np.float32(low)) / np.float32(max(high - low, 1e-3))
    signal[np.broadcast_to(blank[:, None], signal.shape)] = np.nan
    return signal, low, high


def _align(planes: np.ndarray, displacement: np.ndarray, pad: int, fill: float) -> np.ndarray:
    """Shift every B-scan by minus its displacement (linear), with `pad` rows of `fill` above and below."""
    depth, height, width = planes.shape
    out = np.full((depth, height + 2 * pad, width), fill, np.float32)
    for d, shift in enumerate(displacement):
        whole = int(np.floor(shift))
        part = np.float32(shift - whole)
        plane = planes[d] if part == 0 else (1 - part) * planes[d] + part * np.concatenate([planes[d, 1:], planes[d, -1:]])
        out[d, pad - whole : pad - whole + height] = plane
    return out


def _smooth_bscans(signal: np.ndarray, dz: float) -> np.ndarray:
    """Mean over registered neighbours within about 0.1 mm, ignoring what lies outside the image."""
    reach = min(int(0.06 / dz), (len(signal) - 1) // 2)
    if reach == 0:
        return signal
    seen = np.isfinite(signal)
    total, count = np.where(seen, signal, 0), seen.astype(np.float32)
    total, count = (_box(a, reach, 0) for a in (total, count))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan).astype(np.float32)


def _box(array: np.ndarray, reach: int, axis: int) -> np.ndarray:
    """Sum over a window of 2 * reach + 1, shorter at the borders."""
    total = np.cumsum(array, axis=axis, dtype=np.float64)
    total = np.concatenate([np.zeros_like(total.take([0], axis)), total], axis)
    n = array.shape[axis]
    index = np.arange(n)
    return total.take(np.minimum(index + reach + 1, n), axis) - total.take(np.maximum(index - reach, 0), axis)


def _attenuation(signal: np.ndarray, dy: float) -> np.ndarray:
    """How strongly each voxel attenuates: its energy against all energy below it, 0 to 1. The RPE is bright with little left below;
    the nerve fibre layer may be as bright but has the whole retina below (Vermeer et al., Biomed. Opt. Express 5:322, 2014)."""
    energy = np.square(np.maximum(signal, 0))
    tail = energy[:, -max(1, round(0.05 / dy)) :].mean(axis=1, keepdims=True) * 0.1
    below = np.cumsum(energy[:, ::-1], axis=1)[:, ::-1] * np.float32(dy) - energy * np.float32(dy) + tail
    return energy / (energy + 10 * below + np.float32(0.05))


def _vitreous_to_retina(signal: np.ndarray, bm: np.ndarray, dy: float) -> np.ndarray:
    """Score of placing the ILM at each row: bright below it and dark above it count, down to BM. Dark counts little, so that a
    cyst does not cut the retina in two; bright counts in full, and a thin hyaloid line has too little of it to win."""
    over = signal - np.float32(THRESHOLD)
    gain = np.where(over > 0, np.minimum(over, 0.5), 0.15 * over)
    rows = np.arange(signal.shape[1])[None, :, None]
    gain = np.where(rows <= bm[:, None], gain, 0)
    return np.cumsum(gain[:, ::-1], axis=1)[:, ::-1]


def _best_path(score: np.ndarray, jump: int, penalty: float) -> np.ndarray:
    """Rows [D, W] of the path with the largest summed score per B-scan, moving at most `jump` rows per A-scan at `penalty` each."""
    depth, height, width = score.shape
    columns = np.ascontiguousarray(score.transpose(2, 0, 1), np.float32)
    came = np.zeros((width, depth, height), np.int8)
    best = columns[0].copy()
    padded = np.full((depth, height + 2 * jump), -np.inf, np.float32)
    for x in range(1, width):
        padded[:, jump : jump + height] = best
        best = padded[:, jump : jump + height].copy()
        for step in [s for n in range(1, jump + 1) for s in (-n, n)]:
            candidate = padded[:, jump + step : jump + step + height] - np.float32(penalty * abs(step))
            better = candidate > best
            np.copyto(best, candidate, where=better)
            came[x][better] = step
        best += columns[x]
    rows = np.empty((depth, width), np.int64)
    rows[:, -1] = best.argmax(axis=1)
    pick = np.arange(depth)
    for x in range(width - 1, 0, -1):
        rows[:, x - 1] = rows[:, x] + came[x, pick, rows[:, x]]
    return rows.astype(np.float32)


def _median(surface: np.ndarray) -> np.ndarray:
    """Median over 5 B-scans: one that disagrees with its registered neighbours is overruled."""
    reach = min(2, (len(surface) - 1) // 2)
    padded = np.pad(surface, ((reach, reach), (0, 0)), mode="edge")
    return np.median(np.stack([padded[i : i + len(surface)] for i in range(2 * reach + 1)]), axis=0).astype(np.float32)


def _lower_envelope(rpe: np.ndarray, spacing: tuple[float, float]) -> np.ndarray:
    """BM from RPE: drusen lift the RPE off a smooth BM, so keep what is below the local mean and smooth again."""
    trend = _quadratic_surface(rpe)
    residual = rpe - trend
    for _ in range(3):
        residual = np.maximum(residual, _smooth(residual, spacing, 0.4))
    return (trend + np.maximum(residual, _smooth(residual, spacing, 0.1))).astype(np.float32)


def _quadratic_surface(surface: np.ndarray) -> np.ndarray:
    d, w = (np.linspace(-1, 1, n) if n > 1 else np.zeros(1) for n in surface.shape)
    D, W = np.meshgrid(d, w, indexing="ij")
    basis = np.stack([np.ones_like(D), D, W, D * W, D * D, W * W], axis=-1).reshape(-1, 6)
    return (basis @ np.linalg.lstsq(basis, surface.ravel(), rcond=None)[0]).reshape(surface.shape)


def _smooth(surface: np.ndarray, spacing: tuple[float, float], reach_mm: float) -> np.ndarray:
    """Mean over about ± `reach_mm` in both directions, shorter at the borders."""
    for axis, mm in enumerate(spacing):
        reach = int(reach_mm / mm)
        if reach:
            surface = _box(surface, reach, axis) / _box(np.ones_like(surface), reach, axis)
    return surface


def _bridge_holes(ilm: np.ndarray, bm: np.ndarray, dy: float, dx: float) -> np.ndarray:
    """Where less than 110 µm remain above BM there is no retina (a fovea keeps 150): a hole, bridged from rim to rim."""
    thin = bm - ilm < 0.11 / dy
    reach = round(0.1 / dx)
    gap = _box(thin.astype(np.float32), reach, 1) > 0 if thin.any() else thin
    out = ilm.copy()
    x = np.arange(ilm.shape[1])
    for d in np.flatnonzero(gap.any(axis=1) & ~gap.all(axis=1)):
        out[d, gap[d]] = np.minimum(ilm[d, gap[d]], np.interp(x[gap[d]], x[~gap[d]], ilm[d, ~gap[d]]))
    return out


def _find_fovea(thickness_mm: np.ndarray, spacing: tuple[float, float], block: int) -> tuple[float, float] | None:
    """The deepest pit: thickness within 0.25 mm against the ring at 1 mm, in the middle half of the field, at least 40 µm deep."""
    inner = _smooth(thickness_mm, spacing, 0.25)
    depth = _smooth(thickness_mm, spacing, 1.0) - inner
    d, w = (n // 4 for n in depth.shape)
    middle = depth[d : len(depth) - d, w : depth.shape[1] - w]
    best = np.unravel_index(middle.argmax(), middle.shape)
    if middle[best] < 0.04:
        return None
    return float(best[0] + d), (float(best[1] + w) + 0.5) * block - 0.5


def _confidence(
    signal: np.ndarray, score: np.ndarray, rpe: np.ndarray, ilm: np.ndarray, bm: np.ndarray, dy: float, contrast: float
) -> dict[str, float]:
    """Shares of A-scans (0 to 1) on which the surfaces look like an ILM and a BM, plus the contrast they were found in."""
    n = max(1, round(0.05 / dy))
    above = np.stack([_at(signal, ilm - i) for i in range(2, n + 2)])
    below = np.stack([_at(signal, ilm + i) for i in range(n)])
    seen = np.isfinite(above).any(axis=0) & np.isfinite(below).any(axis=0)
    if not seen.any():
        return dict.fromkeys(FLOORS, 0.0)
    step = np.nanmean(below[:, seen], axis=0) - np.nanmean(above[:, seen], axis=0)
    jumps = np.abs(np.diff(ilm, axis=0)) + np.abs(np.diff(rpe, axis=0))
    thickness = (bm - ilm) * dy
    return {
        "contrast": contrast,
        "ilm_support": float((step > 0.15).mean()),
        "rpe_support": float((_at(score, rpe)[np.isfinite(_at(signal, rpe))] > 0.4).mean()),
        "smoothness": float((jumps * dy < 0.06).mean()) if jumps.size else 1.0,
        "plausible_thickness": float(((thickness > 0.1) & (thickness < 0.8)).mean()),
    }


def _at(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    index = np.clip(np.rint(rows).astype(int), 0, array.shape[1] - 1)
    return np.take_along_axis(array, index[:, None], axis=1)[:, 0]


def _refine(rows: np.ndarray, block: int, width: int) -> np.ndarray:
    """Surfaces [2, D, w] of column blocks to every A-scan [2, D, W], linear between block centres."""
    position = np.clip((np.arange(width) + 0.5) / block - 0.5, 0, rows.shape[2] - 1)
    low = np.minimum(position.astype(int), max(rows.shape[2] - 2, 0))
    part = position - low
    high = np.minimum(low + 1, rows.shape[2] - 1)
    return ((1 - part) * rows[:, :, low] + part * rows[:, :, high]).astype(np.float32)
