"""What the tissue band alone tells, without one voxel: the kept positions leak anatomy, and an encoder has to beat that."""

from dataclasses import replace

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.store.store import Store

GRID = 8
"""Cells along either side of the en-face plane."""
BATCH = 16


def tissue_map(store: Store, data: Embeddings) -> Embeddings:
    """Thickness of the band in µm and the height of its upper surface over its own mean, in 8 × 8 en-face cells, and the spread of both.

    Rows in the order of `data`. Cells without image take the volume's mean; without any band the whole vector is 0.
    """
    place = {row.acquisition: row.index for row in store.rows}
    rows = np.array([place[name] for name in data.acquisition.tolist()])
    micrometres = 1000 * store.preprocessing.target_spacing[1]
    vectors = np.concatenate([_described(store, rows[i : i + BATCH]) * micrometres for i in range(0, len(rows), BATCH)])
    return replace(
        data, name="tissue_map", path="tissue_map", metadata={"encoder": "tissue band, no voxel"}, vectors=vectors
    )


def _described(store: Store, rows: np.ndarray) -> np.ndarray:
    arrays = store.read(rows)
    upper, lower = arrays.band[:, 0].astype(float), arrays.band[:, 1].astype(float)
    image = (arrays.valid[:, 1] > arrays.valid[:, 0]) & (lower > upper)
    thickness = np.where(image, lower - upper, np.nan)
    height = np.where(image, upper, np.nan)
    height = height - _mean(height)[:, None, None]
    parts = []
    for surface in (thickness, height):
        cells = _cells(surface)
        cells = np.where(np.isfinite(cells), cells, _mean(surface)[:, None])
        parts += [cells, np.sqrt(_mean((surface - _mean(surface)[:, None, None]) ** 2))[:, None]]
    return np.nan_to_num(np.hstack(parts))


def _cells(surface: np.ndarray) -> np.ndarray:
    """[B, 64]: means over the cells of the en-face grid; fewer B-scans or A-scans than cells repeat their neighbours."""
    _, d, w = surface.shape
    z, x = (np.minimum(np.arange(GRID + 1) * n // GRID, n) for n in (d, w))
    return np.stack(
        [
            _mean(surface[:, z[i] : max(z[i + 1], z[i] + 1), x[j] : max(x[j + 1], x[j] + 1)])
            for i in range(GRID)
            for j in range(GRID)
        ],
        axis=1,
    )  # fmt: skip


def _mean(surface: np.ndarray) -> np.ndarray:
    """[B]: mean of what is finite, NaN where nothing is."""
    known = np.isfinite(surface)
    count = known.sum((1, 2))
    return np.divide(np.where(known, surface, 0).sum((1, 2)), count, out=np.full(len(surface), np.nan), where=count > 0)
