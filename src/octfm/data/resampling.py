"""Area-averaged resampling of a volume onto a prepared grid, B-scan by B-scan, with what holds image and what is padding."""

import numpy as np

from octfm.data.transform import Transform


def seen_rows(voxels: np.ndarray) -> np.ndarray:
    """int64 [2, D, W]: rows [first, past) that hold image. Constant A-scans and border rows constant over a B-scan hold none."""
    height = voxels.shape[1]
    rows = voxels.max(axis=2) != voxels.min(axis=2)
    columns = voxels.max(axis=1) != voxels.min(axis=1)
    first = np.where(rows.any(axis=1), rows.argmax(axis=1), 0)
    past = np.where(rows.any(axis=1), height - rows[:, ::-1].argmax(axis=1), 0)
    return np.where(columns, np.stack([first, past])[:, :, None], 0)


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
        plane = _rows(voxels[native], h_index, h_weight)
        if not shown[native].all():
            plane *= shown[native]
        plane = plane @ lateral
        column = shown[native] @ lateral
        edges = (np.stack([seen[0, native], seen[1, native]]) * shown[native]) @ lateral
        # Row edges, not centres: prepared voxel j covers [j, j + 1), native voxel i covers [i, i + 1).
        edges = (edges - (y + shift + 0.5 - sy / 2) * column) / sy
        for d, share in users:
            total[d] += share * plane
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
    source = plane.astype(np.float32)
    out = weight[:, :1] * source[index[:, 0]]
    for tap in range(1, index.shape[1]):
        out += weight[:, tap : tap + 1] * source[index[:, tap]]
    return out
