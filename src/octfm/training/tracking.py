"""metrics.jsonl: one line per event, flushed at once, and cut back to the checkpoint on resume so that no step is told twice."""

import json
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


class Metrics:
    """Appends rows to a run's metrics.jsonl."""

    def __init__(self, path: Path, first_step: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_before(path, first_step)
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

    def write(self, kind: str, step: int, **values: Any) -> None:
        """Append a row. Rows that a full disk does not take are kept until it does: metrics are no reason to stop training."""
        row = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        self._unwritten += json.dumps(row).encode() + b"\n"
        with suppress(OSError):
            while self._unwritten:
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a metrics.jsonl; a last line that was cut off by a kill is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def _keep_before(path: Path, first_step: int) -> None:
    rows = [row for row in read_metrics(path) if row["step"] < first_step]
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
