"""A progress bar with ETA and data-wait share on a terminal; plain lines, which are printed anyway, everywhere else."""

import sys
from typing import Any

import numpy as np


class Progress:
    """Follows the train rows; `echo` prints above the bar."""

    def __init__(self, steps: int | None):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[tail]}"),
        )
        self._bar = Bar(*columns, console=Console(stderr=False), speed_estimate_period=600)
        self._task = self._bar.add_task("training", total=steps, tail="")
        self._bar.start()

    def echo(self, line: str) -> None:
        self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def row(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if kind == "train":
            tail = f"{values['volumes_per_s']:.3g} volumes/s, {values['data_wait_share']:.0%} waiting for data"
            self._bar.update(self._task, completed=step + 1, tail=tail)

    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        pass

    def close(self) -> None:
        self._bar.stop()


def on_terminal() -> bool:
    return sys.stdout.isatty()
