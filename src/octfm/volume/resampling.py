"""Resample a volume onto the prepared grid by area averages, and track which rows hold image and which are padding."""

import numpy as np

from octfm.volume.transform import Transform
from octfm.volume.volume import Planes, memory_order


def seen_rows(voxels: np.ndarray | Planes) -> np.ndarray:
    """Rows [first, past) of every A-scan that hold image, int64 [2, D, W].

    Constant A-scans, and rows at the border that are constant over a whole B-scan, hold none.
    """
    depth, height, width = voxels.shape
    seen = np.zeros((2, depth, width), np.int64)
    for bscan, plane in enumerate(voxels):
        first, past = 0, height
        if _constant(plane[0]) or _constant(plane[-1]):
            rows = plane.max(axis=1) != plane.min(axis=1)
            first, past = (int(rows.argmax()), height - int(rows[::-1].argmax())) if rows.any() else (0, 0)
        # Comparing two rows shows for nearly every A-scan that it is not constant.
        varies = plane[height // 2] != plane[height // 3]
        doubtful = np.flatnonzero(~varies)
        if doubtful.size:
            columns = plane[:, doubtful]
            varies[doubtful] = columns.max(axis=0) != columns.min(axis=0)
        seen[0, bscan, varies], seen[1, bscan, varies] = first, past
    return seen


def _constant(values: np.ndarray) -> bool:
    return bool(values.min() == values.max())


def _weights(origin: float | np.ndarray, scale: float, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Area average along one axis as taps: index int32 [..., count, taps] into `length` native voxels, and weights.

    Weights are 0 outside the image; leading axes are those of `origin`. If target voxels are finer than native ones,
    the box is one native voxel wide, which is linear interpolation.
    """
    width = max(scale, 1.0)
    start = (np.asarray(origin)[..., None] + scale * np.arange(count) - width / 2 + 0.5)[..., None]
    index = np.floor(start).astype(int) + np.arange(int(np.ceil(width)) + 1)
    overlap = np.minimum(index + 1, start + width) - np.maximum(index, start)
    weight = np.where((index >= 0) & (index < length), np.maximum(overlap, 0), 0) / width
    return np.clip(index, 0, length - 1).astype(np.int32), weight.astype(np.float32)


def resample(voxels: np.ndarray | Planes, seen: np.ndarray, transform: Transform) -> tuple[np.ndarray, np.ndarray]:
    """Area-averaged voxels uint8 [D, H, W] and valid rows int16 [2, D, W]; padding and blank A-scans have no weight."""
    depth, height, width = voxels.shape
    out_d, out_h, out_w = transform.shape
    (z, _, x), (sz, _, sx) = transform.origin, transform.scale
    bscans, shares = _weights(z, sz, out_d, depth)
    shown = (seen[1] > seen[0]).astype(np.float32)
    lateral = _lateral(x, sx, out_w, width)
    weight_of, edges_of = _weights_and_edges(seen, shown, lateral, transform)
    # From here on A-scans are in memory order (a left eye is a mirrored view), and only those with weight are kept.
    step = memory_order(voxels[0])
    lateral, shown = lateral[::step], shown[:, ::step]
    used = np.flatnonzero(lateral.any(axis=1))
    columns = slice(used[0], used[-1] + 1) if used.size else slice(0, 1)
    bands, axially = _bands(lateral[columns]), _Axial(transform, height)

    out = np.zeros(transform.shape, np.uint8)
    valid = np.zeros((2, out_d, out_w), np.int16)
    total = np.empty((out_h, columns.stop - columns.start), np.float32)
    share_of, plane = np.empty_like(total), np.empty((out_h, out_w), np.float32)
    filtered: dict[int, np.ndarray] = {}
    for d in range(out_d):
        users = [(int(n), s) for n, s in zip(bscans[d], shares[d], strict=True) if s > 0 and shown[n].any()]
        if not users:
            continue
        # The filter is separable: rows first, cached for each native B-scan, then across B-scans, then A-scans once per
        # plane.
        # B-scans are used in order, so those before the first one needed here are finished.
        filtered = {n: rows for n, rows in filtered.items() if n >= users[0][0]}
        for place, (native, share) in enumerate(users):
            if native not in filtered:
                filtered[native] = axially(native, voxels[native][:, ::step][:, columns])
                if not shown[native, columns].all():
                    filtered[native] *= shown[native, columns]
            np.multiply(filtered[native], share, out=share_of if place else total)
            if place:
                total += share_of
        for to, of, matrix in bands:
            np.matmul(total[:, of], matrix, out=plane[:, to])
        weight, edges = (sum(s * of[..., n, :] for n, s in users) for of in (weight_of, edges_of))
        # An A-scan of which less than half was imaged is padding.
        scale = np.where(weight > 0.5, 1 / np.maximum(weight, 1e-6), 0)
        plane *= scale.astype(np.float32)
        plane += np.float32(0.5)
        # Means of grey levels exceed 255 by no more than rounding error, so after adding 0.5 the cast cannot overflow.
        np.copyto(out[d], plane, casting="unsafe")
        first, past = np.rint(edges * scale).clip(0, out_h).astype(np.int16)
        valid[:, d] = np.where(past > first, (first, past), 0)
        rows = np.arange(out_h)[:, None]
        # Taps of the filter reach across the edges of the image, which would leave a border in the padding.
        for part, outside in (
            (slice(0, first.max()), rows[: first.max()] < first),
            (slice(past.min(), None), rows[past.min() :] >= past),
        ):
            out[d, part][outside] = 0
    return out, valid


def _lateral(origin: float, scale: float, count: int, length: int) -> np.ndarray:
    """float32 [length, count]: weight of each native A-scan in each prepared one."""
    index, weight = _weights(origin, scale, count, length)
    matrix = np.zeros((length, count), np.float32)  # add.at, because a clipped index occurs twice (with weight 0)
    np.add.at(matrix, (index.T, np.arange(count)), weight.T)
    return matrix


def _weights_and_edges(
    seen: np.ndarray, shown: np.ndarray, lateral: np.ndarray, transform: Transform
) -> tuple[np.ndarray, np.ndarray]:
    """Weight of A-scans with image, float64 [D, out_w], and weight times their edges in prepared rows [2, ...]."""
    (_, y, _), (_, sy, _) = transform.origin, transform.scale
    matrix = lateral.astype(np.float64)
    weight = shown @ matrix
    shift = np.asarray(transform.displacement)[:, None]
    # Row edges, not centres: prepared voxel j covers [j, j + 1), native voxel i covers [i, i + 1).
    return weight, ((seen * shown) @ matrix - (y + shift + 0.5 - sy / 2) * weight) / sy


class _Axial:
    """Axial filter of B-scans, each at its own displacement; boxes cut by the border are renormalised, not darkened."""

    def __init__(self, transform: Transform, height: int):
        from scipy.sparse import csr_matrix

        origins = transform.origin[1] + np.asarray(transform.displacement)
        self._index, weight = _weights(origins, transform.scale[1], transform.shape[1], height)
        full = weight.sum(axis=-1, keepdims=True)
        self._weight = np.where(full > 0, weight / np.maximum(full, 1e-6), 0).astype(np.float32)
        _, rows, taps = weight.shape
        # One sparse matrix for all B-scans: each row has the same number of taps, so only places and weights change.
        starts = np.arange(0, rows * taps + 1, taps, dtype=np.int32)
        self._matrix = csr_matrix((self._weight[0].ravel(), self._index[0].ravel(), starts), shape=(rows, height))

    def __call__(self, bscan: int, plane: np.ndarray) -> np.ndarray:
        """Filter one native B-scan to prepared rows, float32 [out_h, W]."""
        self._matrix.data, self._matrix.indices = self._weight[bscan].ravel(), self._index[bscan].ravel()
        return self._matrix @ plane.astype(np.float32)


def _bands(lateral: np.ndarray, columns: int = 16) -> list[tuple[slice, slice, np.ndarray]]:
    """Non-zero blocks of a banded matrix as (output columns, input columns, block): a tenth of all the work."""
    blocks = []
    for start in range(0, lateral.shape[1], columns):
        out = slice(start, start + columns)
        used = np.flatnonzero(lateral[:, out].any(axis=1))
        inside = slice(used[0], used[-1] + 1) if used.size else slice(0, 1)
        blocks.append((out, inside, np.ascontiguousarray(lateral[inside, out])))
    return blocks
