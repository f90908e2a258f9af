"""The cores that this process may use, and the memory that its container leaves it."""

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
"""Control group of the container that this process is in; each of its limits is stated by version 2 or by version 1."""


def available_cores(ranks: int = 1) -> int:
    """Cores of this process, or of one of this many ranks on the host: at most those that the process is bound to, and
    its share of what the container or the SLURM job may use."""
    host = os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):  # "max", or -1, if a control group sets no limit
            quota, period = map(int, " ".join(map(_text, names)).split())
            host = min(host, ceil(quota / period)) if quota > 0 else host
    for name in ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"):
        with suppress(OSError, ValueError):  # as 0-3,8
            spans = [span.partition("-") for span in _text(name).split(",")]
            host = min(host, sum(int(last or first) - int(first) + 1 for first, _, last in spans))
    with suppress(LookupError, ValueError):  # SLURM binds a job to its cores only where it is configured to
        host = min(host, int(os.environ["SLURM_CPUS_ON_NODE"]))
    return max(1, min(bound_cores(), host // ranks))


def bound_cores() -> int:
    """Cores that this process may run on, for however little of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_left() -> int | None:
    """Bytes that the container may still use; None if it sets no limit."""
    for limit, used, parts in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        with suppress(OSError, ValueError, LookupError):  # "max" if a control group sets no limit
            cached = dict(line.split() for line in _text(parts).splitlines())
            # Cached files count as used, such as a store that has just been prepared; in version 1 also those of groups
            # inside this one.
            total = "total_" if "total_active_file" in cached else ""
            files = sum(int(cached[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
            return int(_text(limit)) - int(_text(used)) + files
    return None


def _text(name: str) -> str:
    return (GROUP / name).read_text("utf-8").strip()
