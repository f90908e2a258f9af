"""The stages of a demonstration: one line each on the terminal, details in its log; and a check of free disk space."""

import math
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octfm.errors import ConfigError, Echo
from octfm.io.location import existing
from octfm.io.progress import lines_to

LOG = "demo.log"


class Stages:
    """Prints the start of every stage, records how long it took, and keeps details in OUT/demo.log."""

    def __init__(self, out: Path, echo: Echo, count: int | None = None):
        """`count`: how many stages there will be, if that is known."""
        self.log, self.echo, self.count = out / LOG, echo, count
        self.parts: list[tuple[str, float]] = []
        self.began = time.perf_counter()
        self._held: list[str] = []

    @property
    def total(self) -> float:
        return time.perf_counter() - self.began

    def say(self, line: str) -> None:
        """A line for the terminal, and for the log."""
        self.note(line)
        self.echo(line)

    def note(self, line: str) -> None:
        """A line for the log only. The log is written once a stage has succeeded, so that a refused request leaves no
        file."""
        self._held.append(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {line}\n")
        if self.parts:
            self._flush()

    def _flush(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(self._held)
        self._held.clear()

    @contextmanager
    def stage(self, name: str, what: str) -> Iterator[None]:
        """One stage; lines about progress inside it go to the log."""
        of = "" if self.count is None else f"/{self.count}"
        self.say(f"[{self.total:4.0f} s] {len(self.parts) + 1}{of} {name}: {what}")
        start = time.perf_counter()
        with lines_to(self.note):
            yield
        self.parts.append((name, time.perf_counter() - start))
        self._flush()


def require_room(out: Path, needed: float, advice: str) -> float:
    """Free bytes on the disk of `out`. Raises ConfigError, ending with `advice`, if there are fewer than `needed`."""
    free = shutil.disk_usage(existing(out)).free
    if free < needed:
        raise ConfigError(
            f"{out}: the demonstration needs {gigabytes(needed)} there, {gigabytes(free)} is free; free some, "
            f"choose another --out{advice}"
        )
    return free


def gigabytes(size: float) -> str:
    """`2.1 GB`, with at least two significant digits."""
    return f"{size / 1e9:.{max(1, 1 - math.floor(math.log10(max(size, 1e7) / 1e9)))}f} GB"
