"""metrics.jsonl: a line per event, written at once, cut back to the checkpoint on resume, so that no step is twice."""

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from octfm.config import Config, Seconds
from octfm.errors import require_objects
from octfm.io.location import from_json, write_whole
from octfm.io.progress import say


class TrackingConfig(Config):
    """Where metrics go besides metrics.jsonl, which is always written."""

    tensorboard: bool = False
    """Event files in RUN/tensorboard (needs octfm[tensorboard])."""
    wandb: Literal["online", "offline"] | None = None
    """Weights & Biases: one run per job, also after resuming (needs octfm[wandb])."""
    project: str = "octfm"
    """Project name in Weights & Biases."""
    step_deadline_s: Seconds = 120.0
    """If no step finishes for so long, say what the run is waiting for (F8)."""


class Listener(Protocol):
    """Receives everything that goes into metrics.jsonl: a tracker, a progress bar or a monitor of your own.

    A listener that raises an exception gets no more rows; training continues. See docs/guide/plug-ins.md.
    """

    def row(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """A row of metrics.jsonl: its kind (train, health, validation, incident, …) and step, and the other values."""

    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        """B-scans and their masks at a validation: uint8 [H, W, 3]."""

    def close(self) -> None:
        """Called once, when the run ends or stops."""


def require_listeners(listeners: object) -> None:
    """Raises ConfigError unless these are objects with the methods of a Listener."""
    require_objects("listeners", listeners, ("row", "picture", "close"))


class Metrics:
    """Appends rows to a run's metrics.jsonl and passes them on."""

    def __init__(self, path: Path, first_step: int = 0, rollbacks: int = 0, listeners: Sequence[Listener] = ()):
        """Remove rows of `first_step` and later, which training writes again; those about the first `rollbacks`
        rollbacks stay."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._owed: deque[bytes | tuple[int, int]] = deque()
        """Rows, and arguments of `rewind`, that the disk has not taken yet, in their order."""
        self.listeners = list(listeners)
        # Rows come from the loop, and from the thread that reports when the loop stands still.
        self._lock = threading.RLock()
        self.broken = _keep_before(path, first_step, rollbacks) if path.exists() else None
        """A sentence about lines that are no rows and were set aside; None if there were none."""
        self._file = path.open("ab", buffering=0)
        self._report_broken(self.broken, first_step)

    def rewind(self, first_step: int, rollbacks: int) -> None:
        """Move rows of `first_step` and later to abandoned-N.jsonl (N = `rollbacks`): now, or once the disk has room.
        Trackers keep their rows."""
        with self._lock:
            self._owed.append((first_step, rollbacks))
            self._catch_up()

    def _catch_up(self) -> None:
        """Write what is owed, as far as the disk takes it: metrics are no reason to stop training."""
        with suppress(OSError):
            while self._owed:
                due = self._owed[0]
                if isinstance(due, bytes):
                    # An unbuffered write may take a part of a row; the rest is written next time.
                    self._owed[0] = due[self._file.write(due) :]
                    if not self._owed[0]:
                        self._owed.popleft()
                    continue
                broken = self._set_aside(*due)
                self._owed.popleft()
                self._report_broken(broken, due[0])

    def _set_aside(self, first_step: int, rollbacks: int) -> str | None:
        rows = [(text, row) for _, text, row in _lines(self._path) if row is not None]
        abandoned = b"".join(text + b"\n" for text, row in rows if not _stays(row, first_step, rollbacks))
        write_whole(self._path.with_name(f"abandoned-{rollbacks}.jsonl"), abandoned)
        broken = _keep_before(self._path, first_step, rollbacks)
        replaced, self._file = self._file, self._path.open("ab", buffering=0)
        replaced.close()
        return broken

    def _report_broken(self, broken: str | None, step: int) -> None:
        if broken is not None:
            facts = {"what": "metrics", "verdict": "watch", "action": "set aside", "sentence": broken, "volumes": []}
            self.write("incident", step, **facts)

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a row. Rows for which the disk has no space are kept and written later."""
        row = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        with self._lock:
            self._owed.append(json.dumps(row).encode() + b"\n")
            self._catch_up()
            self._tell(step, lambda listener: listener.row(kind, step, dict(values)))  # each may change its own

    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        """Pass a picture on to listeners; metrics.jsonl holds numbers only."""
        self._tell(step, lambda listener: listener.picture(name, step, pixels))

    def close(self) -> None:
        self._tell(0, lambda listener: listener.close())
        with self._lock:
            self._catch_up()
        self._file.close()

    def _tell(self, step: int, tell: Callable[[Listener], None]) -> None:
        for listener in list(self.listeners):
            if listener not in self.listeners:  # it failed on the row about another one
                continue
            try:
                tell(listener)
            except Exception as error:
                # Foreign code may fail in any way, and must not end a month of training.
                # Removed before `write`, which calls all listeners again.
                self.listeners.remove(listener)
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                sentence = f"{type(listener).__name__} failed and gets no more rows: {reason}; metrics.jsonl goes on"
                say(f"step {step + 1}: {sentence}")
                self.write("tracker", step, verdict="watch", sentence=sentence)


class NoMetrics(Metrics):
    """The metrics of ranks other than 0: writes nothing, so that a job logs once (F10)."""

    def __init__(self) -> None:
        self.listeners, self.broken = [], None

    def rewind(self, first_step: int, rollbacks: int) -> None: ...
    def write(self, kind: str, step: int, **values: Any) -> None: ...
    def picture(self, name: str, step: int, pixels: np.ndarray) -> None: ...
    def close(self) -> None: ...


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics.jsonl, without damaged lines: the next start of the run sets those aside and names them."""
    for _, _, row in _lines(path):
        if row is not None:
            yield row


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Number, bytes and row (None if damaged) of each line; without a last line that a kill cut off."""
    texts = path.read_bytes().split(b"\n")
    for number, text in enumerate(texts, 1):
        row = _row(text)
        if text.strip() and (row is not None or number < len(texts)):
            yield number, text, row


def _row(text: bytes) -> dict[str, Any] | None:
    try:
        row = from_json(text)
    except ValueError:
        return None
    whole = isinstance(row, dict) and isinstance(row.get("kind"), str) and isinstance(row.get("step"), int)
    return row if whole else None


def _stays(row: dict[str, Any], first_step: int, rollbacks: int) -> bool:
    number = row.get("rollback", rollbacks + 1)
    return row["step"] < first_step or (isinstance(number, int) and number <= rollbacks)


def _keep_before(path: Path, first_step: int, rollbacks: int) -> str | None:
    """Remove rows that will be written again, and move damaged lines to metrics.broken.txt; returns a sentence about
    those, if any."""
    lines = list(_lines(path))
    broken = [(number, text) for number, text, row in lines if row is None]
    aside = path.with_suffix(".broken.txt")
    if broken:
        before = aside.read_bytes() if aside.exists() else b""
        # Before the rows: a kill in between loses nothing, and the next start finds the same lines again.
        known = set(before.split(b"\n"))
        write_whole(aside, before + b"".join(text + b"\n" for _, text in broken if text not in known))
    kept = [text + b"\n" for _, text, row in lines if row is not None and _stays(row, first_step, rollbacks)]
    write_whole(path, b"".join(kept))
    if not broken:
        return None
    places = ", ".join(str(number) for number, _ in broken[:5]) + (" …" if len(broken) > 5 else "")
    return (
        f"{path}: {len(broken)} damaged {'line was' if len(broken) == 1 else 'lines were'} moved to {aside.name} "
        f"(line {places}); all other rows are kept"
    )


def _plain(value: Any) -> Any:
    """A value for JSON, which has no NaN or infinity: they become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
