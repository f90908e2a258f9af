"""Area-averaged resampling of a volume onto a prepared grid, B-scan by B-scan, with what holds image and what is padding."""

import numpy as np

from octfm.data.transform import Transform


def seen_rows(voxels: np.ndarray) -> np.ndarray:
    """int64 [2, D, W]: rows [first, past) that hold image. Constant A-scans and border rows constant over a B-scan hold none."""
    depth, height, width = voxels.shape
    seen = np.zeros((2, depth, width), np.int64)
    for bscan, plane in enumerate(voxels):
        first, past = 0, height
        if _constant(plane[0]) or _constant(plane[-1]):
            rows = plane.max(axis=1) != plane.min(axis=1)
            first, past = (int(rows.argmax()), height - int(rows[::-1].argmax())) if rows.any() else (0, 0)
        # Two rows tell nearly every A-scan from a constant one.
        varies = plane[height // 2] != plane[height // 3]
        doubtful = np.flatnonzero(~varies)
        if doubtful.size:
            columns = plane[:, doubtful]
            varies[doubtful] = columns.max(axis=0) != columns.min(axis=0)
        seen[0, bscan, varies], seen[1, bscan, varies] = first, past
    return seen


def _constant(values: np.ndarray) -> bool:
    return bool(values.min() == values.max())


def _weights(origin: float, scale: float, count: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Area average as taps: index [count, taps] into `length` native voxels and weight (0 outside). Finer targets interpolate
    linearly, which is the same average with a box of one native voxel."""
    width = max(scale, 1.0)
    middle = origin + scale * np.arange(count)
    start = middle - width / 2 + 0.5
    taps = int(np.ceil(width)) + 1
    index = np.floor(start).astype(int)[:, None] + np.arange(taps)
    overlap = np.minimum(index + 1, (start + width)[:, None]) - np.maximum(index, start[:, None])
    weight = np.where((index >= 0) & (index < length), np.maximum(overlap, 0), 0) / width
    return np.clip(index, 0, length - 1), weight.astype(np.float32)


def resample(voxels: np.ndarray, seen: np.ndarray, transform: Transform) -> tuple[np.ndarray, np.ndarray]:
    """Area-averaged voxels uint8 [D, H, W] and valid rows int16 [2, D, W]; padding and blank A-scans weigh nothing."""
    depth, height, width = voxels.shape
    out_d, out_h, out_w = transform.shape
    (z, y, x), (sz, sy, sx) = transform.origin, transform.scale
    d_index, d_weight = _weights(z, sz, out_d, depth)
    w_index, w_weight = _weights(x, sx, out_w, width)
    lateral = np.zeros((width, out_w), np.float32)
    np.add.at(lateral, (w_index.T, np.arange(out_w)), w_weight.T)
    bands = _bands(lateral)
    plane, share_of = np.empty((out_h, out_w), np.float32), np.empty((out_h, out_w), np.float32)
    total = np.zeros(transform.shape, np.float32)
    weight = np.zeros((out_d, out_w), np.float32)
    first, past = np.zeros((2, out_d, out_w), np.float32)
    shown = (seen[1] > seen[0]).astype(np.float32)
    for native in range(depth):
        users = [(int(d), float(d_weight[d, t])) for d, t in zip(*np.nonzero(d_index == native), strict=True) if d_weight[d, t] > 0]
        if not users or not shown[native].any():
            continue
        shift = transform.displacement[native]
        h_index, h_weight = _weights(y + shift, sy, out_h, height)
        rows = _rows(voxels[native], h_index, h_weight)
        if not shown[native].all():
            rows *= shown[native]
        for out, used, matrix in bands:
            np.matmul(rows[:, used], matrix, out=plane[:, out])
        column = shown[native] @ lateral
        edges = (np.stack([seen[0, native], seen[1, native]]) * shown[native]) @ lateral
        # Row edges, not centres: prepared voxel j covers [j, j + 1), native voxel i covers [i, i + 1).
        edges = (edges - (y + shift + 0.5 - sy / 2) * column) / sy
        for d, share in users:
            total[d] += np.multiply(plane, np.float32(share), out=share_of)
            weight[d] += share * column
            first[d] += share * edges[0]
            past[d] += share * edges[1]
    valid_column = weight > 0.5
    scale = np.where(valid_column, 1 / np.maximum(weight, 1e-6), 0)
    total *= scale[:, None]
    total += 0.5
    valid = np.rint(np.stack([first, past]) * scale).clip(0, out_h).astype(np.int16)
    rows = np.arange(out_h)[None, :, None]
    voxels_out = np.minimum(total, 255).astype(np.uint8)
    voxels_out[(rows < valid[0][:, None]) | (rows >= valid[1][:, None])] = 0
    return voxels_out, np.where(valid[1] > valid[0], valid, 0).astype(np.int16)


def _rows(plane: np.ndarray, index: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Weighted rows of one B-scan; at the border what is left of the box is averaged, not darkened."""
    full = weight.sum(axis=1, keepdims=True)
    weight = np.where(full > 0, weight / np.maximum(full, 1e-6), 0)
    out = weight[:, :1] * plane[index[:, 0]]
    product = np.empty_like(out)
    for tap in range(1, index.shape[1]):
        out += np.multiply(weight[:, tap : tap + 1], plane[index[:, tap]], out=product)
    return out


def _bands(lateral: np.ndarray, columns: int = 32) -> list[tuple[slice, slice, np.ndarray]]:
    """The non-zero blocks of a banded matrix as (output columns, input columns, block), a tenth of the work of the whole matrix."""
    blocks = []
    for start in range(0, lateral.shape[1], columns):
        out = slice(start, start + columns)
        used = np.flatnonzero(lateral[:, out].any(axis=1))
        inside = slice(used[0], used[-1] + 1) if used.size else slice(0, 1)
        blocks.append((out, inside, np.ascontiguousarray(lateral[inside, out])))
    return blocks
