"""Keep the memory of freed arrays in this process, for the next ones."""

import contextlib
import ctypes
import sys

LARGEST_REUSED, KEPT = 2**25, 10**9
"""Bytes: the memory of arrays up to this size is reused (glibc allows no more), and so much freed memory is kept."""
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGEST_REUSED), "MALLOC_TRIM_THRESHOLD_": str(KEPT)}
"""The same for a child process. Else Linux gets freed memory back, and maps and clears it again for the next B-scan: up
to a tenth of the CPU time of rendering and preparing, and a third of that of segmenting."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> None:
    """Have this process reuse freed memory (LARGEST_REUSED, KEPT); without glibc nothing changes."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, LARGEST_REUSED)
        mallopt(_TRIM_THRESHOLD, KEPT)
