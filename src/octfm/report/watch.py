"""A live dashboard of a run in the terminal, from its metrics.jsonl: curves as sparklines, verdicts, remaining time."""

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from octfm.config import parse_yaml
from octfm.display import duration
from octfm.errors import ConfigError, one_line, shown
from octfm.io import bucket_cache
from octfm.io.location import BucketPath, Location, location
from octfm.report.sources import require_pretraining, seconds_per_step, series
from octfm.report.words import checkpoint_advice, latest_health
from octfm.run.tracking import read_metrics

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40
"""Most bars of a sparkline."""
BUCKET_S = 10.0
"""Shortest time in seconds between two downloads from a bucket."""
CURVES = (
    ("train", "masked_over_baseline", "masked loss / baseline", "{:.3f}"),
    ("validation", "masked_over_baseline", "the same, held out", "{:.3f}"),
    ("probe", "score", "online probe", "{:.3f}"),
    ("train", "effective_rank", "effective rank", "{:.1f}"),
    ("train", "grad_norm", "gradient norm", "{:.2f}"),
    ("train", "lr", "learning rate", "{:.1e}"),
    ("train", "volumes_per_s", "volumes per second", "{:.3g}"),
    ("train", "data_wait_share", "waiting for data", "{:.0%}"),
)
COLOURS = {"ok": "green", "watch": "yellow", "bad": "bold red"}


def follow(metrics: Location) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl so far, without a line that is still being written; empty before the first."""
    copy = bucket_cache.local_copy(str(metrics)) if isinstance(metrics, BucketPath) else nullcontext(metrics)
    try:
        with copy as path:
            return list(read_metrics(path))
    except FileNotFoundError:
        return []


def watch(run: str | Location, *, once: bool = False, every_s: float = 2.0, console: "Console | None" = None) -> None:
    """Show the dashboard until the run finishes or stops itself, or until Ctrl-C; `once` prints it and returns. A run
    in a bucket is shown as of its last upload, which is fetched at most every BUCKET_S seconds. Raises EvaluationError
    if `run` is no run folder of octfm pretrain, ConfigError if its config.yaml is damaged."""
    from rich.console import Console
    from rich.live import Live

    run = location(run)
    require_pretraining(run)
    console, metrics, steps = console or Console(), run / "metrics.jsonl", planned_steps(run)
    name, every_s = (run.name, max(every_s, BUCKET_S)) if isinstance(run, BucketPath) else (run.resolve().name, every_s)
    if once:
        console.print(dashboard(name, follow(metrics), steps))
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            began, rows = time.perf_counter(), follow(metrics)
            live.update(dashboard(name, rows, steps), refresh=True)
            if last_step(rows) + 1 >= steps or stopped(rows):
                return
            # Reading the file of a long run takes a second: spend at most a tenth of the time on it.
            time.sleep(max(every_s, 9 * (time.perf_counter() - began)))


def planned_steps(run: Location) -> int:
    """Length of the run, from its config.yaml. Raises ConfigError if that is damaged."""
    file = run / "config.yaml"
    steps = parse_yaml(file.read_bytes(), str(file)).get("steps")
    if not isinstance(steps, int):
        raise ConfigError(f"{file}: expected steps, a whole number, got {shown(steps)}; restore the file from a copy")
    return steps


def last_step(rows: list[dict[str, Any]]) -> int:
    return max((int(row["step"]) for row in rows if row["kind"] == "train"), default=-1)


def stopped(rows: list[dict[str, Any]]) -> bool:
    """Whether a finding has stopped the run; its next start removes that row."""
    return bool(rows) and rows[-1]["kind"] == "incident" and rows[-1].get("action") == "stop"


def seconds_left(rows: list[dict[str, Any]], steps: int) -> float | None:
    """Remaining time at the median pace of the last twenty logged steps, which a pause hardly changes; or None."""
    logged = [row for row in rows if row["kind"] == "train"][-20:]
    pace = seconds_per_step(logged)
    return None if pace is None else pace * max(0, steps - 1 - int(logged[-1]["step"]))


def sparkline(values: np.ndarray) -> str:
    """Finite values as bars on a scale from the lowest to the highest; each bar is the median of its part."""
    values = values[np.isfinite(values)]
    if not len(values):
        return ""
    parts = np.array([np.median(part) for part in np.array_split(values, min(WIDTH, len(values)))])
    span = np.ptp(parts) or 1.0
    level = ((parts - parts.min()) / span * (len(BARS) - 1)).round().astype(int)
    return "".join(BARS[i] for i in level)


def dashboard(name: str, rows: list[dict[str, Any]], steps: int) -> "RenderableType":
    """One screen: progress, curves, health verdicts and recent events."""
    from rich import box
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    done, left = last_step(rows) + 1, seconds_left(rows, steps)
    if done >= steps:
        state = "finished"
    elif stopped(rows):
        state = "stopped"
    elif not done:
        state = "nothing logged yet"
    else:
        state = "pace not known yet" if left is None else f"{duration(left)} to go"
    head, bar = Table.grid(padding=(0, 2)), ProgressBar(total=steps, completed=done, width=30)
    # As Text, which has no markup; a run of a stranger may hold any sentence.
    head.add_row(Text(one_line(name), style="bold"), bar, f"step {done:,} of {steps:,}", state)
    curves = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for kind, key, title, form in CURVES:
        values = series([row for row in rows if row["kind"] == kind], key)[1]
        if len(values):
            curves.add_row(title, Text(sparkline(values), style="cyan"), form.format(values[-1]))
    verdicts = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    for row in latest_health([row for row in rows if row["kind"] == "health"]):
        words = [Text(one_line(row[key])) for key in ("verdict", "what", "sentence")]
        words[0].stylize(COLOURS.get(row["verdict"], ""))
        verdicts.add_row(*words)
    parts: list[RenderableType] = [head, curves, verdicts]
    events = [row for row in rows if row["kind"] in ("incident", "checkpoint", "waiting", "tracker")][-4:]
    parts += [Text(one_line(f"step {row['step'] + 1}: {row['sentence']}"), style="yellow") for row in events]
    if advice := checkpoint_advice(rows):
        parts.append(Text(one_line(advice), style="bold"))
    return Group(*parts)
