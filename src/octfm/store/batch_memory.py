"""Reuse batch buffers once no array references them: page faults of fresh memory cost as much as filling it."""

import math
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from octfm.store.layout import ARRAYS, Arrays, shapes


class BatchMemory:
    """Allocates `Arrays` for volumes of one size, reusing buffers that are no longer referenced.

    A buffer stays in use as long as any view of it exists, such as a slice or a tensor, and is reclaimed automatically
    when the last view is gone. At most `spare` batches are kept idle; further buffers are freed.
    """

    def __init__(self, image_size: Sequence[int], spare: int, allocate: Callable[[int], np.ndarray] | None = None):
        """`allocate` gives uint8 [n] for a number of bytes; default: ordinary memory."""
        self._shapes, self._spare = shapes(image_size), spare
        self._allocate = allocate or (lambda size: np.empty(size, np.uint8))
        self._idle: dict[int, list[np.ndarray]] = {}
        """Idle buffers by size in bytes."""

    def lend(self, count: int) -> Arrays:
        """Uninitialised arrays for `count` volumes."""
        voxels, band, valid = (
            self._array((count, *shape), np.dtype(ARRAYS[name])) for name, shape in self._shapes.items()
        )
        return Arrays(voxels, band, valid)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        idle = self._idle.setdefault(size, [])
        # Not `if idle`: the thread that drops a batch may append while the reader thread pops.
        try:
            memory = idle.pop()
        except IndexError:
            memory = self._allocate(size)
        # It wraps a foreign buffer, so the base of each of its views is `buffer` itself, not `memory`: `buffer` is
        # collected when the last view is, and its finalizer can return `memory`.
        buffer = np.frombuffer(memory.data, dtype)
        weakref.finalize(buffer, _take_back, idle, memory, self._spare).atexit = False
        return buffer.reshape(shape)


def _take_back(idle: list[np.ndarray], memory: np.ndarray, spare: int) -> None:
    if len(idle) < spare:
        idle.append(memory)
