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
    signal, contrast = _signal(coarse)
    signal = _align(signal, displacement, pad, fill=np.nan)
    signal = _smooth_bscans(signal, dz)
    ilm = _median(_best_path(_ilm_score(signal), jump=max(1, round(1.5 * dx / dy)), penalty=0.05))
    rpe_score = _rpe_score(signal, dy)
    rpe_score[np.isnan(signal)] = 0.1
    # The nerve fibre layer can be as bright as the RPE; pits and holes in the ILM must not forbid the RPE below them.
    rows = np.arange(signal.shape[1])[None, :, None]
    rpe_score[rows < _envelope(ilm, (dz, dx), -1)[:, None] + 0.1 / dy] = 0
    rpe = _median(_best_path(rpe_score, jump=max(1, round(dx / dy)), penalty=0.02))
    bm = _envelope(rpe, (dz, dx), 1) + np.float32(RPE_TO_BM_MM / dy)
    ilm = _bridge_holes(ilm, bm, dy, dx)
    confidence = _confidence(signal, rpe_score, rpe, ilm, bm, dy, contrast / 255)
    surfaces = np.stack([ilm, bm]) - pad + displacement[None, :, None]
    native = _refine((surfaces + 0.5) * block[0] - 0.5, block[1], voxels_DHW.shape[2])
    return Tissue(
        ilm=native[0],
        bm=native[1],
        fovea=_find_fovea((bm - ilm) * dy, (dz, dx), block[1]),
        displacement=displacement * block[0],
        confident=all(confidence[name] >= floor for name, floor in FLOORS.items()),
        confidence=confidence,
    )


RPE_TO_BM_MM = 0.01
"""The path follows the brightest row of the RPE; Bruch's membrane is its lower edge."""

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


def _signal(coarse: np.ndarray) -> tuple[np.ndarray, float]:
    """Brightness with the noise floor at 0 and the brightest layers near 1, and the step between them; blank A-scans are NaN."""
    blank = coarse.max(axis=1) == coarse.min(axis=1)
    smooth = _mean_of_neighbours(coarse, 1, 2)
    # The floor is the level of the noise, not its darkest speckle: look at means over many blocks.
    calm = _mean_of_neighbours(_mean_of_neighbours(coarse[::2], 3, 2), 3, 1)[:, ::3, ::3].transpose(0, 2, 1)
    calm = calm[~blank[::2, ::3]]
    if not calm.size:
        return np.full_like(coarse, np.nan), 0.0
    low = float(np.percentile(calm, 10))
    high = float(np.percentile(smooth[::2], 99))
    signal = (smooth - np.float32(low)) / np.float32(max(high - low, 1e-3))
    signal[np.broadcast_to(blank[:, None], signal.shape)] = np.nan
    return signal, high - low


def _mean_of_neighbours(array: np.ndarray, reach: int, axis: int) -> np.ndarray:
    """Mean over ± `reach` along an axis, the border repeated."""
    pad = [(0, 0)] * array.ndim
    pad[axis] = (reach, reach)
    padded = np.pad(array, pad, mode="edge")
    n = array.shape[axis]
    total = sum(padded[(slice(None),) * axis + (slice(i, i + n),)] for i in range(2 * reach + 1))
    return total / np.float32(2 * reach + 1)


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
    filled = np.where(seen, signal, np.float32(0))
    total, count = filled.copy(), seen.astype(np.float32)
    for step in range(1, reach + 1):
        total[step:] += filled[:-step]
        total[:-step] += filled[step:]
        count[step:] += seen[:-step]
        count[:-step] += seen[step:]
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _box(array: np.ndarray, reach: int, axis: int) -> np.ndarray:
    """Sum over a window of 2 * reach + 1, shorter at the borders."""
    total = np.cumsum(array, axis=axis, dtype=np.float64)
    total = np.concatenate([np.zeros_like(total.take([0], axis)), total], axis)
    n = array.shape[axis]
    index = np.arange(n)
    return total.take(np.minimum(index + reach + 1, n), axis) - total.take(np.maximum(index - reach, 0), axis)


def _rpe_score(signal: np.ndarray, dy: float) -> np.ndarray:
    """How much each voxel looks like RPE, 0 to 1: it attenuates strongly (bright, with little energy left below it, as in Vermeer
    et al., Biomed. Opt. Express 5:322, 2014; the nerve fibre layer may be as bright but has the whole retina below) and it is
    brighter than the outer retina or fluid 0.05-0.15 mm above it (the bottom of the choroid has choroid above)."""
    bright = np.maximum(np.nan_to_num(signal), 0)
    energy = np.square(bright)
    # The choroid goes on below the frame; without a guess of it the last row would look like the end of all tissue.
    n = max(1, round(0.05 / dy))
    last = signal.shape[1] - 1 - np.isfinite(signal[:, ::-1]).argmax(axis=1)
    tail = np.mean([_at(energy, last - i) for i in range(n)], axis=0)[:, None] * np.float32(0.15)
    below = np.cumsum(energy[:, ::-1], axis=1)[:, ::-1] * np.float32(dy) - energy * np.float32(dy) + tail
    near, far = round(0.05 / dy), round(0.15 / dy)
    total = np.cumsum(np.pad(bright, ((0, 0), (far + 1, 0), (0, 0))), axis=1)
    above = (total[:, far + 1 - near : -near] - total[:, : -far - 1]) / np.float32(far + 1 - near)
    return energy / (energy + 10 * below + np.float32(0.05)) * np.clip(bright - above, 0, 1)


def _ilm_score(signal: np.ndarray) -> np.ndarray:
    """Score of placing the ILM at each row: bright below it and dark above it count. Dark counts little, so that a cyst does not cut
    the retina in two; bright counts in full, and a thin hyaloid line has too little of it to win."""
    over = np.nan_to_num(signal - np.float32(THRESHOLD))
    gain = np.where(over > 0, np.minimum(over, 0.5), 0.15 * over)
    return np.cumsum(gain[:, ::-1], axis=1)[:, ::-1]


def _best_path(score: np.ndarray, jump: int, penalty: float) -> np.ndarray:
    """Rows [D, W] of the path with the largest summed score per B-scan, moving at most `jump` rows per A-scan at `penalty` each."""
    depth, height, width = score.shape
    best = np.full((width, depth, height + 2 * jump), -np.inf, np.float32)
    inner = slice(jump, jump + height)
    best[:, :, inner] = score.transpose(2, 0, 1)
    for x in range(1, width):
        best[x] += _dilate(best[x - 1], jump, penalty)
    rows = np.empty((depth, width), np.int64)
    rows[:, -1] = best[-1].argmax(axis=1)
    steps = np.arange(-jump, jump + 1)
    cost = (penalty * np.abs(steps)).astype(np.float32)
    pick = np.arange(depth)[:, None]
    for x in range(width - 1, 0, -1):
        reachable = rows[:, x, None] + steps
        rows[:, x - 1] = reachable[pick[:, 0], (best[x - 1][pick, reachable] - cost).argmax(axis=1)]
    return (rows - jump).astype(np.float32)


def _dilate(values: np.ndarray, reach: int, penalty: float) -> np.ndarray:
    """Largest value within ± `reach` rows less `penalty` per row, [D, H]; the window doubles instead of being walked."""
    done = 0
    while done < reach:
        step = min(done + 1, reach - done)
        lower, wider = values - np.float32(penalty * step), values.copy()
        np.maximum(wider[:, step:], lower[:, :-step], out=wider[:, step:])
        np.maximum(wider[:, :-step], lower[:, step:], out=wider[:, :-step])
        values, done = wider, done + step
    return values


def _median(surface: np.ndarray) -> np.ndarray:
    """Median over 5 B-scans: one that disagrees with its registered neighbours is overruled."""
    reach = min(2, (len(surface) - 1) // 2)
    padded = np.pad(surface, ((reach, reach), (0, 0)), mode="edge")
    return np.median(np.stack([padded[i : i + len(surface)] for i in range(2 * reach + 1)]), axis=0).astype(np.float32)


def _envelope(surface: np.ndarray, spacing: tuple[float, float], side: int) -> np.ndarray:
    """The smooth surface that bumps stand on: side 1 is the deeper one (BM below drusen), -1 the shallower (the rim above pits)."""
    trend = _quadratic_surface(surface)
    residual = side * (surface - trend)
    for _ in range(3):
        residual = np.maximum(residual, _smooth(residual, spacing, 0.4))
    return (trend + side * np.maximum(residual, _smooth(residual, spacing, 0.1))).astype(np.float32)


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
        "rpe_support": float((_at(score, rpe)[np.isfinite(_at(signal, rpe))] > 0.1).mean()),
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
