"""Surfaces [D, W] (a row per A-scan): best paths through a score by dynamic programming, and anatomical smoothing."""

import numpy as np

BELOW_BOWL = 0.2
"""Share of places that `bowl` leaves deeper than itself."""


def best_path(score_DWH: np.ndarray, jump: int, penalty: float) -> np.ndarray:
    """Rows [D, W] of the path with the largest summed score in each B-scan (Viterbi).

    From one A-scan to the next it moves at most `jump` rows, at a cost of `penalty` per row.
    """
    depth, width, height = score_DWH.shape
    # A border of -inf as wide as a jump: no step leaves the array, and no path enters the border.
    best = np.empty((width, depth, height + 2 * jump), np.float32)
    best[:, :, :jump] = best[:, :, jump + height :] = -np.inf
    inner = slice(jump, jump + height)
    best[:, :, inner] = score_DWH.transpose(1, 0, 2)
    wide, lower = np.empty(best[0].size, np.float32), np.empty(best[0].size, np.float32)
    reached = wide.reshape(best.shape[1:])[:, inner]
    for x in range(1, width):
        _dilate(best[x - 1].reshape(-1), jump, penalty, wide, lower)
        best[x, :, inner] += reached
    steps = np.arange(-jump, jump + 1)
    cost = (penalty * np.abs(steps)).astype(np.float32)
    start = np.arange(depth)[:, None] * best.shape[2] + steps
    rows, before = np.empty((width, depth), np.int64), np.empty(start.shape, np.float32)
    rows[-1] = best[-1].argmax(axis=1)
    # Backwards along the path: where the best score at this A-scan can have come from.
    for x in range(width - 1, 0, -1):
        best[x - 1].reshape(-1).take(start + rows[x][:, None], out=before, mode="clip")
        np.subtract(before, cost, out=before)
        np.add(rows[x], before.argmax(axis=1) - jump, out=rows[x - 1])
    return (rows.T - jump).astype(np.float32)


def _dilate(values: np.ndarray, reach: int, penalty: float, wide: np.ndarray, lower: np.ndarray) -> None:
    """Write to `wide` the largest value within ± `reach` rows less `penalty` per row, by doubling the window.

    All B-scans are one array [D * (H + 2 reach)], kept apart by their borders. A value that returns from a border has
    paid for more rows than one that never left, so it never wins. `lower` is scratch memory.
    """
    covered = 0
    while covered < reach:
        step = min(covered + 1, reach - covered)
        np.subtract(values, np.float32(penalty * step), out=lower)
        if not covered:
            wide[:step] = values[:step]
        np.maximum(values[step:], lower[:-step], out=wide[step:])
        np.maximum(wide[:-step], lower[step:], out=wide[:-step])
        values = wide
        covered += step


def running_sum(array_DWH: np.ndarray) -> np.ndarray:
    """Cumulative sum along the last axis, float32 [D, W, H].

    A matrix product in blocks of 32, faster than np.cumsum, in which every addition waits for the one before.
    """
    depth, width, height = array_DWH.shape
    blocks = -(-height // len(_UP_TO))
    padded = np.zeros((depth, width, blocks * len(_UP_TO)), np.float32)
    padded[:, :, :height] = array_DWH
    sums = (padded.reshape(-1, len(_UP_TO)) @ _UP_TO).reshape(depth, width, blocks, -1)
    # Each block starts at the totals of the blocks before it.
    sums[:, :, 1:] += np.cumsum(sums[:, :, :-1, -1], axis=2)[..., None]
    return sums.reshape(depth, width, -1)[:, :, :height]


_UP_TO = np.triu(np.ones((32, 32), np.float32))


def at_rows(array_DWH: np.ndarray, rows_DW: np.ndarray) -> np.ndarray:
    """Values [D, W] at the row nearest to a surface, clipped to the frame."""
    depth, width, height = array_DWH.shape
    index = np.rint(rows_DW).astype(np.intp)
    bscan, column = np.arange(depth)[:, None], np.arange(width)  # np.ogrid takes as long as the rest
    return array_DWH[bscan, column, np.minimum(np.maximum(index, 0), height - 1)]


def median_of_bscans(surface: np.ndarray, dz: float) -> np.ndarray:
    """Median over 3 or 5 B-scans within about 0.25 mm: outvotes a B-scan that disagrees with its neighbours."""
    reach = min(max(1, min(2, round(0.25 / dz))), (len(surface) - 1) // 2)
    padded = np.pad(surface, ((reach, reach), (0, 0)), mode="edge")
    return np.median(np.stack([padded[i : i + len(surface)] for i in range(2 * reach + 1)]), axis=0).astype(np.float32)


def envelope(surface: np.ndarray, spacing_mm: tuple[float, float], side: int) -> np.ndarray:
    """Smooth envelope of a surface: side 1 is the deeper one (BM below drusen), -1 the shallower (rim above pits)."""
    # A least-squares quadratic: tilt and curvature, which a moving mean would flatten at the borders.
    basis = _quadratic_basis(surface.shape)
    trend = (basis @ np.linalg.lstsq(basis, surface.ravel(), rcond=None)[0]).reshape(surface.shape)
    residual = side * (surface - trend)
    for _ in range(3):
        # The mean replaces what lies below it, so that after a few rounds drusen or pits no longer count.
        residual = np.maximum(residual, smooth(residual, spacing_mm, 0.4))
    return (trend + side * np.maximum(residual, smooth(residual, spacing_mm, 0.1))).astype(np.float32)


def _quadratic_basis(shape: tuple[int, ...]) -> np.ndarray:
    d, w = (np.linspace(-1, 1, n) if n > 1 else np.zeros(1) for n in shape)
    D, W = np.meshgrid(d, w, indexing="ij")
    return np.stack([np.ones_like(D), D, W, D * W, D * D, W * W], axis=-1).reshape(-1, 6)


def bowl(surface: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Quadratic with a share BELOW_BOWL of the `known` places deeper than itself: elevations do not lift this
    quantile."""
    basis = _quadratic_basis(surface.shape)
    if not known.any():
        return surface
    some, rows = basis[known.ravel()], surface[known].astype(float)
    weight = np.ones(len(rows))
    for _ in range(8):  # quantile regression by weighted least squares
        root = np.sqrt(weight)
        fit = np.linalg.lstsq(some * root[:, None], rows * root, rcond=None)[0]
        deeper = rows - some @ fit
        weight = np.where(deeper > 0, 1 - BELOW_BOWL, BELOW_BOWL) / np.maximum(np.abs(deeper), 1.0)
    return (basis @ fit).reshape(surface.shape)


def smooth(surface: np.ndarray, spacing_mm: tuple[float, float], reach_mm: float) -> np.ndarray:
    """Mean over about ± `reach_mm` in both directions; at the borders over the part inside."""
    for axis, mm in enumerate(spacing_mm):
        reach = int(reach_mm / mm)
        if reach:
            surface = _sum_within(surface, reach, axis) / _sum_within(np.ones_like(surface), reach, axis)
    return surface


def near(mask: np.ndarray, reach: int, axis: int) -> np.ndarray:
    """True within ± `reach` of a True along one axis."""
    return _sum_within(mask.astype(np.float64), reach, axis) > 0.5


def _sum_within(array: np.ndarray, reach: int, axis: int) -> np.ndarray:
    n = array.shape[axis]
    total = np.cumsum(array, axis=axis, dtype=np.float64)
    total = np.concatenate([np.zeros_like(total.take([0], axis)), total], axis)
    index = np.arange(n)
    return total.take(np.minimum(index + reach + 1, n), axis) - total.take(np.maximum(index - reach, 0), axis)


def between_bscans(rows_SW: np.ndarray, at: np.ndarray, displacement_D: np.ndarray) -> np.ndarray:
    """Interpolate a surface from B-scans `at` of a registered volume to all, [D, W], and add their displacement."""
    position = np.interp(np.arange(len(displacement_D)), at, np.arange(len(at)))
    low = np.minimum(position.astype(int), max(len(at) - 2, 0))
    part = (position - low)[:, None]
    return (1 - part) * rows_SW[low] + part * rows_SW[np.minimum(low + 1, len(at) - 1)] + displacement_D[:, None]


def refine(rows_DW: np.ndarray, block: tuple[int, int], width: int) -> np.ndarray:
    """Convert a surface from blocks of rows and A-scans to native rows, float32 [D, width], linearly."""
    middle = (np.arange(rows_DW.shape[1]) + 0.5) * block[1] - 0.5
    position = np.arange(width)
    return np.stack([np.interp(position, middle, (row + 0.5) * block[0] - 0.5) for row in rows_DW]).astype(np.float32)


def window_sum(values: np.ndarray, rows: int) -> np.ndarray:
    """Sum of each `rows` successive values, put together from sums of 1, 2, 4, ... by the binary digits of `rows`."""
    count, total, at, size = len(values) - rows + 1, None, 0, 1
    while True:
        if rows & size:
            part = values[at : at + count]
            total = part.copy() if total is None else np.add(total, part, out=total)
            at += size
        if 2 * size > rows:
            assert total is not None  # the highest bit of `rows` is set
            return total
        values = values[size:] + values[:-size]
        size *= 2
