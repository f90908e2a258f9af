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

    def __init__(self, path: Path, first_step: int = 0, rollbacks: int = 0):
        """Rows of `first_step` and later are told anew, except for the first `rollbacks` rollbacks, which stay on record."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._unwritten = path, b""
        if path.exists():
            _keep_before(path, first_step, rollbacks)
        self._file = path.open("ab", buffering=0)

    def rewind(self, first_step: int, rollbacks: int) -> None:
        """Training goes on from an earlier step: what was told since is moved to abandoned-N.jsonl."""
        self._file.close()
        told = [row for row in read_metrics(self._path) if not _stays(row, first_step, rollbacks)]
        self._path.with_name(f"abandoned-{rollbacks}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
        _keep_before(self._path, first_step, rollbacks)
        self._file = self._path.open("ab", buffering=0)

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
