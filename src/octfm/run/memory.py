"""Memory of host and device, and out-of-memory detection."""

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

from octfm.io.cores import memory_left


def host_bytes_at_peak() -> int:
    """Peak resident memory of this process."""
    with suppress(OSError, ValueError, StopIteration):
        # Rather than ru_maxrss, which a process inherits from its parent.
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    # In bytes on macOS, in kilobytes elsewhere.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def host_bytes_available() -> int:
    """Memory available without swapping, as the system estimates it, or less inside a container."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text("utf-8").splitlines()
        bounds.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    if (left := memory_left()) is not None:
        bounds.append(left)
    return max(0, min(bounds))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: on CUDA by the error's type, on CPU and Apple's GPU by the allocator's words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The last two are oneDNN's, whose own allocations fail without saying so.
    words = (
        "DefaultCPUAllocator|can't allocate memory|bad_alloc|could not create a primitive|could not create a memory|"
        "MPS backend out of memory"
    )
    return isinstance(error, RuntimeError) and re.search(words, str(error)) is not None
