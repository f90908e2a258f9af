"""What several ranks have computed of the same evaluation, together."""

import numpy as np

from octfm.run.runtime import Runtime


def collect(runtime: Runtime, rows: np.ndarray) -> np.ndarray:
    """On every rank the rows [n, ...] of all of them, one rank after the other, whatever their numbers; float64 holds them on the way."""
    if runtime.world == 1:
        return rows
    lengths = runtime.exchange(np.array([len(rows)], np.float64))[:, 0].astype(int)
    padded = np.zeros((max(lengths), *rows.shape[1:]), np.float64)
    padded[: len(rows)] = rows
    parts = runtime.exchange(padded.reshape(-1)).reshape(runtime.world, *padded.shape)
    return np.concatenate([part[:n] for part, n in zip(parts, lengths, strict=True)]).astype(rows.dtype)
