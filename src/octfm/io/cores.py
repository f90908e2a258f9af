"""The cores that this process may use."""

import os
from contextlib import suppress
from math import ceil
from pathlib import Path

GROUP = Path("/sys/fs/cgroup")
"""Control group of the container that this process is in."""


def available_cores(ranks: int = 1) -> int:
    """Cores of this process, or of one of this many ranks on the host: at most those that the process is bound to, and
    its share of what the container may use."""
    host = os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2 of control groups, 1
        with suppress(OSError, ValueError):  # "max", or -1, if a control group sets no limit
            quota, period = map(int, " ".join((GROUP / name).read_text("utf-8") for name in names).split())
            host = min(host, ceil(quota / period)) if quota > 0 else host
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host
    return max(1, min(bound, host // ranks))
