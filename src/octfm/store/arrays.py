"""Open the arrays of prepared volumes: by octfm's own reader, or by tensorstore where google-crc32c is absent."""

import errno
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from octfm.errors import StoreError
from octfm.store.layout import ARRAYS, Compression
from octfm.store.shards import ShardArrays

_NOT_DAMAGE = (
    *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENOSPC, errno.EDQUOT),
)


class TensorStoreArrays:
    """The arrays of a local folder, read by tensorstore, as on machines that only train."""

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


class _Forked:
    """Whether this process was forked from one that had imported tensorstore: its first read would crash."""

    inherited_tensorstore = False

    @classmethod
    def note(cls) -> None:
        cls.inherited_tensorstore = cls.inherited_tensorstore or "tensorstore" in sys.modules


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Forked.note)


def open_arrays(
    path: Path, threads: int | None, compression: Compression, crc: bool
) -> ShardArrays | TensorStoreArrays:
    """Open the arrays of a store in a local folder. Raises StoreError if they cannot be opened."""
    if find_spec("google_crc32c") is not None:
        return ShardArrays(path, compression, crc, threads)
    if _Forked.inherited_tensorstore:
        raise StoreError(f"{path}: reading in a forked process needs google-crc32c; install it, or spawn the process")
    try:
        return TensorStoreArrays(path, threads)
    except ImportError:
        raise StoreError(f"{path}: reading needs google-crc32c; install it") from None
    except (ValueError, OSError) as error:
        raise StoreError(
            f"{path}: the arrays cannot be opened ({error}); run `octfm prepare` again to repair them"
        ) from error


def says_damage(error: Exception) -> bool:
    """Whether an error of reading a shard may be that of a damaged file, and not of permissions, limits of open files
    and memory, a network disk that is away, or no space for the copy of an object in a bucket."""
    told = re.search(r"os_error_code='(\d+)'", str(error))  # in tensorstore's ValueErrors
    return (int(told[1]) if told else getattr(error, "errno", None)) not in _NOT_DAMAGE
