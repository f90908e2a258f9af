"""Memory of batches, lent out again once nobody holds an array of it: the page faults of fresh memory cost as much as filling it."""

import math
import weakref
from collections.abc import Sequence

import numpy as np

from octfm.store.layout import ARRAYS, Arrays, shapes


class BatchMemory:
    """Lends `Arrays` for volumes of one size. What is lent belongs to the borrower for as long as any view of it exists, be it a slice
    or a tensor; it comes back by itself. At most `spare` batches lie idle, the rest is given back to the system."""

    def __init__(self, image_size: Sequence[int], spare: int):
        self._shapes, self._spare = shapes(image_size), spare
        self._idle: dict[int, list[np.ndarray]] = {}

    def lend(self, count: int) -> Arrays:
        """Uninitialised arrays for `count` volumes."""
        return Arrays(
            **{name: self._array((count, *shape), np.dtype(ARRAYS[name])) for name, shape in self._shapes.items()}
        )

    def _array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        idle = self._idle.setdefault(size, [])
        # Not `if idle`: the thread that drops a batch appends here while the one that reads takes from here.
        try:
            memory = idle.pop()
        except IndexError:
            memory = np.empty(size, np.uint8)
        # Views of an array over a foreign buffer refer to that array, not past it to the owner: it ends with the last of them.
        lent = np.frombuffer(memory.data, dtype)
        weakref.finalize(lent, _take_back, idle, memory, self._spare).atexit = False
        return lent.reshape(shape)


def _take_back(idle: list[np.ndarray], memory: np.ndarray, spare: int) -> None:
    if len(idle) < spare:
        idle.append(memory)
