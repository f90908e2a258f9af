"""A baseline from the tissue band alone, without voxels.

Which token positions are kept already reveals anatomy; an encoder has to do better than that.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.encoder.embed import facts_without_weights, write_rows
from octfm.encoder.embeddings import Embeddings
from octfm.evaluation.metrics import ratio
from octfm.store.store import Store

GRID = 8
"""Cells per side of the en-face grid."""
ABOUT = "tissue band, no voxel"
BATCH = 16
"""Volumes read at once."""


def tissue_map(store: Store, data: Embeddings) -> Embeddings:
    """Per volume: thickness of the band, and height of its upper surface relative to its mean, in µm.

    Both are means of 8 × 8 en-face cells, followed by the standard deviation: vectors float64 [N, 130]. Rows are in the
    order of `data`. Cells without image take the volume's mean; volumes without a band give zeros.
    """
    place = {row.acquisition: row.index for row in store.rows}
    rows = np.array([place[name] for name in data.acquisition.tolist()])
    facts = {"encoder": ABOUT}
    return replace(data, name="tissue_map", path="tissue_map", metadata=facts, vectors=_vectors(store, rows))


def tissue_map_baseline(store: Store, out: str | Path) -> Path:
    """Write `<out>/tissue_map.parquet`, an embeddings file of `tissue_map` for every volume of the store."""
    facts = facts_without_weights("tissue_map", ABOUT, f"{GRID}-{store.fingerprint}")
    return write_rows(out, store, _vectors(store, np.arange(len(store))), facts)


def _vectors(store: Store, rows: np.ndarray) -> np.ndarray:
    """The numbers of `tissue_map` for rows of the store, float64 [N, 130] in µm."""
    micrometres = 1000 * store.preprocessing.target_spacing[1]
    return np.concatenate([_described(store, rows[i : i + BATCH]) * micrometres for i in range(0, len(rows), BATCH)])


def _described(store: Store, rows: np.ndarray) -> np.ndarray:
    arrays = store.read(rows)
    upper, lower = arrays.band[:, 0].astype(float), arrays.band[:, 1].astype(float)
    image = (arrays.valid[:, 1] > arrays.valid[:, 0]) & (lower > upper)
    thickness = np.where(image, lower - upper, np.nan)
    height = np.where(image, upper, np.nan)
    # Relative to its mean, because the absolute height depends only on how the eye was positioned.
    height = height - _mean(height)[:, None, None]
    parts = []
    for surface in (thickness, height):
        cells = _cells(surface)
        # A number in every cell, because readouts take no NaN.
        cells = np.where(np.isfinite(cells), cells, _mean(surface)[:, None])
        parts += [cells, np.sqrt(_mean((surface - _mean(surface)[:, None, None]) ** 2))[:, None]]
    return np.nan_to_num(np.hstack(parts))


def _cells(surface: np.ndarray) -> np.ndarray:
    """Means over the cells of the en-face grid [B, 64]; with fewer B-scans or A-scans than cells, cells share them."""
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
    """Mean of the finite values [B]; NaN if there is none. Unlike np.nanmean, without a warning."""
    known = np.isfinite(surface)
    return ratio(np.where(known, surface, 0).sum((1, 2)), known.sum((1, 2)))
