"""The cores that this process may use, and the memory that its container leaves it."""

import os
from contextlib import suppress
from math import ceil
from pathlib import Path, PurePosixPath

GROUP, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Control groups, of version 2 or version 1, which state the limits of a container or job; and which of them this
process is in."""


def available_cores(ranks: int = 1) -> int:
    """Cores of this process, or of one of this many ranks on the host: at most those that the process is bound to, and
    its share of what the container or the SLURM job may use."""
    host = os.cpu_count() or 1
    for folder in _groups("cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with suppress(OSError, ValueError):  # "max", or -1, if a control group sets no limit
                quota, period = map(int, " ".join(_text(folder / name) for name in names).split())
                host = min(host, ceil(quota / period)) if quota > 0 else host
    for name in ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"):
        with suppress(OSError, ValueError):  # as 0-3,8
            spans = [span.partition("-") for span in _text(GROUP / name).split(",")]
            host = min(host, sum(int(last or first) - int(first) + 1 for first, _, last in spans))
    with suppress(LookupError, ValueError):  # SLURM binds a job to its cores only where it is configured to
        host = min(host, int(os.environ["SLURM_CPUS_ON_NODE"]))
    return max(1, min(bound_cores(), host // ranks))


def bound_cores() -> int:
    """Cores that this process may run on, for however little of their time."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_left() -> int | None:
    """Bytes that the container or job may still use; None if it sets no limit."""
    left = []
    for folder in _groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with suppress(OSError, ValueError, LookupError):  # "max" if a control group sets no limit
                cached = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
                # Cached files count as used, such as a store that has just been prepared; in version 1 also those of
                # groups inside this one.
                total = "total_" if "total_active_file" in cached else ""
                files = sum(int(cached[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
                left.append(int(_text(folder / limit)) - int(_text(folder / used)) + files)
    return min(left, default=None)


def _groups(kind: str) -> list[Path]:
    """Folders of the control groups of this kind that hold this process. A container mostly sees the outermost only,
    which is its own; the limits of a SLURM job are in those inside."""
    folders = [GROUP, GROUP / kind]
    with suppress(OSError, ValueError):  # a name in other bytes than UTF-8
        for line in _text(MEMBERSHIP).splitlines():
            _, kinds, place = line.split(":", 2)
            if not kinds or kind in kinds.split(","):  # no kinds: version 2
                own = PurePosixPath(place.lstrip("/"))
                folders += [(GROUP / kind if kinds else GROUP) / around for around in (own, *own.parents)]
    return folders


def _text(file: Path) -> str:
    return file.read_text("utf-8").strip()
