"""Device, precision and ranks: the only file that names cpu and cuda."""

import os
import platform
import resource
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from octfm.errors import ConfigError

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Runtime:
    """Where tensors live and in which precision matrices multiply."""

    device: torch.device
    precision: Precision = "fp32"
    rank: int = 0
    world: int = 1

    def autocast(self) -> AbstractContextManager:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def peak_memory_gb(self) -> float:
        """Device memory on CUDA, resident memory of the process on CPU, in GB (1e9 bytes)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        with suppress(OSError, ValueError, StopIteration):
            # Not ru_maxrss where it can be helped: a process inherits that from whoever started it.
            lines = Path("/proc/self/status").read_text().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1e9
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9

    def release(self) -> None:
        """Give cached device memory back, after an allocation failed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def free_memory_gb(self) -> float:
        """What could still be allocated, in GB (1e9 bytes)."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] / 1e9
        return _host_bytes_available() / 1e9


def _host_bytes_available() -> int:
    """Memory that could be had without swapping: the system's own estimate (page cache counts as free), or less inside a container."""
    bounds = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        bounds.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    with suppress(OSError, ValueError):  # "max" where a control group sets no limit
        group = Path("/sys/fs/cgroup")
        bounds.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, min(bounds))


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that memory could not be had: on CUDA by its type, on CPU by the allocator's words."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The last two are oneDNN's, whose own allocations fail without saying so.
    words = ("DefaultCPUAllocator", "can't allocate memory", "bad_alloc", "could not create a primitive", "could not create a memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def start(precision: Precision = "fp32", device: str | None = None) -> Runtime:
    """The device asked for, else CUDA where there is one, else CPU. A launcher with several ranks is refused, not ignored (F10)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world}: this version trains on one device, and {world} copies would each believe to be rank 0; "
            "start it without torchrun"
        )
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu or cuda (cuda:1 for the second), got {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name} was asked for, but torch {torch.__version__} finds no CUDA device here; use device cpu")
    return Runtime(torch.device(name), precision)


def environment(runtime: Runtime) -> dict[str, str]:
    """What a reader needs to know to repeat a run; no host or user names."""
    device = torch.cuda.get_device_name(runtime.device) if runtime.device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": f"{runtime.device.type} ({device})",
        "threads": str(torch.get_num_threads()),
        "precision": runtime.precision,
    }
