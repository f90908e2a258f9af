"""metrics.jsonl: one line per event, flushed at once, and cut back to the checkpoint on resume so that no step is told twice."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Metrics:
    """Appends rows to a run's metrics.jsonl."""

    def __init__(self, path: Path, first_step: int = 0):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _keep_before(path, first_step)
        self._file = path.open("a")

    def write(self, kind: str, step: int, **values: Any) -> None:
        row = {"kind": kind, "step": step, **{name: _plain(value) for name, value in values.items()}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

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
