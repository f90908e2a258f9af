"""metrics.jsonl, always: one line per event, flushed at once, and cut back to the checkpoint on resume so that no step is told twice."""

import json
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from octfm.config import Config


class TrackingConfig(Config):
    """Who is told besides metrics.jsonl, which is always written."""

    tensorboard: bool = False
    """Event files in RUN/tensorboard (needs octfm[tensorboard])."""
    wandb: Literal["online", "offline"] | None = None
    """Weights & Biases: one run per job, also after resuming (needs octfm[wandb])."""
    project: str = "octfm"
    """Of Weights & Biases."""
    step_deadline_s: float = Field(default=120.0, gt=0)
    """When no step finishes for so long, say what is being waited for (F8)."""


class Listener(Protocol):
    """Somebody who wants to know what goes into metrics.jsonl: a tracker, a progress bar."""

    def row(self, kind: str, step: int, values: dict[str, Any]) -> None: ...
    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        """uint8 [H, W, 3]"""

    def close(self) -> None: ...


class Metrics:
    """Appends rows to a run's metrics.jsonl and passes them on."""

    def __init__(self, path: Path, first_step: int = 0, rollbacks: int = 0, listeners: Sequence[Listener] = ()):
        """Rows of `first_step` and later are told anew, except for the first `rollbacks` rollbacks, which stay on record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._unwritten = path, b""
        self.listeners = list(listeners)
        self._lock = (
            threading.RLock()
        )  # rows come from the loop, and from the thread that speaks up when it stands still
        if path.exists():
            _keep_before(path, first_step, rollbacks)
        self._file = path.open("ab", buffering=0)

    def rewind(self, first_step: int, rollbacks: int) -> None:
        """Training goes on from an earlier step: what was told since is moved to abandoned-N.jsonl. Trackers keep what they were told."""
        with self._lock:
            self._file.close()
            told = [row for row in read_metrics(self._path) if not _stays(row, first_step, rollbacks)]
            self._path.with_name(f"abandoned-{rollbacks}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in told)
            )
            _keep_before(self._path, first_step, rollbacks)
            self._file = self._path.open("ab", buffering=0)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a row. Rows that a full disk does not take are kept until it does: metrics are no reason to stop training."""
        row = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        with self._lock:
            self._unwritten += json.dumps(row).encode() + b"\n"
            with suppress(OSError):
                while self._unwritten:
                    self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
            self._tell(step, lambda listener: listener.row(kind, step, values))

    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        """For those who show pictures; metrics.jsonl holds numbers only."""
        self._tell(step, lambda listener: listener.picture(name, step, pixels))

    def close(self) -> None:
        self._tell(0, lambda listener: listener.close())
        self._file.close()

    def _tell(self, step: int, tell) -> None:
        for listener in list(self.listeners):
            try:
                tell(listener)
            except Exception as error:
                # Foreign code, often with a network behind it: it may fail in any way, and none is worth a month of training. It is
                # dropped, and metrics.jsonl says so.
                self.listeners.remove(listener)
                what = type(listener).__name__
                reason = " ".join(str(error).split())[:200]
                self.write(
                    "tracker",
                    step,
                    verdict="watch",
                    sentence=f"{what} failed and is told nothing more: {reason}; metrics.jsonl goes on",
                )


class Unheard(Metrics):
    """What other ranks than the first tell: nothing, so that a job is told once (F10)."""

    def __init__(self) -> None:
        self.listeners = []

    def rewind(self, first_step: int, rollbacks: int) -> None: ...
    def write(self, kind: str, step: int, **values: Any) -> None: ...
    def picture(self, name: str, step: int, pixels: np.ndarray) -> None: ...
    def close(self) -> None: ...


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics.jsonl; a last line that was cut off by a kill is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _stays(row: dict[str, Any], first_step: int, rollbacks: int) -> bool:
    return row["step"] < first_step or row.get("rollback", rollbacks + 1) <= rollbacks


def _keep_before(path: Path, first_step: int, rollbacks: int) -> None:
    rows = [row for row in read_metrics(path) if _stays(row, first_step, rollbacks)]
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _plain(value: Any) -> Any:
    """JSON has no NaN or infinity: they are written as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
