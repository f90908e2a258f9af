"""Read shards of prepared volumes into memory, by tensorstore or by zarr-python."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from octfm.errors import StoreError
from octfm.store.layout import ARRAYS, shard_key


class TensorStoreArrays:
    """The arrays of a local folder, read by tensorstore."""

    def __init__(self, path: Path, threads: int | None):
        import tensorstore

        limit = threads or "shared"
        # Shards are renamed into place and never truncated, so it is safe to map them into memory, which saves a copy.
        context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": {"limit": limit},
                "file_io_concurrency": {"limit": limit},
                "file_io_mode": {"mode": "memmap"},
            }
        )
        self._tensorstore = tensorstore
        # An absent shard is damage, but by default zarr readers return zeros for it.
        self._arrays = {
            name: tensorstore.open(
                {
                    "driver": "zarr3",
                    "kvstore": {"driver": "file", "path": f"{path / name}/"},
                    "fill_missing_data_reads": False,
                },
                context=context,
                read=True,
            ).result()
            for name in ARRAYS
        }

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        target = self._tensorstore.array(out, copy=False, write=True)
        target.write(self._arrays[name][index]).result()


class ZarrArrays:
    """The arrays of a local folder, read by zarr-python: on platforms without tensorstore, and in forked processes."""

    def __init__(self, path: Path, threads: int | None):
        import zarr

        self._path = path
        self._arrays = {name: zarr.open_array(path / name, mode="r") for name in ARRAYS}
        self._pool = ThreadPoolExecutor(threads or os.cpu_count())

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        def one(position: int) -> None:
            shard = self._path / name / shard_key(index[position])
            # zarr-python returns zeros for an absent shard.
            if not shard.is_file():
                raise FileNotFoundError(f"{shard} is absent")
            try:
                out[position] = self._arrays[name][int(index[position])]
            except (ValueError, RuntimeError) as error:
                raise OSError(f"{shard}: {error}") from error

        # As a list, or errors of the threads would go unnoticed.
        list(self._pool.map(one, range(len(index))))


class _Forked:
    """Whether this process was forked from one that had imported tensorstore, which then ends it at the first read."""

    inherited_tensorstore = False

    @classmethod
    def note(cls) -> None:
        cls.inherited_tensorstore = cls.inherited_tensorstore or "tensorstore" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Forked.note)


def open_arrays(path: Path, threads: int | None) -> TensorStoreArrays | ZarrArrays:
    """Open the arrays of a store in a local folder. Raises StoreError if they cannot be opened."""
    try:
        if _Forked.inherited_tensorstore:
            return ZarrArrays(path, threads)
        try:
            return TensorStoreArrays(path, threads)
        except ImportError:
            return ZarrArrays(path, threads)
    except (ValueError, OSError) as error:
        raise StoreError(
            f"{path}: the arrays cannot be opened ({error}); run `octfm prepare` again to repair them"
        ) from error
