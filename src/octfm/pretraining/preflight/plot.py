"""The doctor's picture: the curves that will drive every step, and how often each place is a target."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from octfm.display import drawing
from octfm.pretraining.preflight.data import read_sample
from octfm.pretraining.preflight.tokens import AXES, DRAWS, TOLERANCE, draw_coverage
from octfm.pretraining.schedule import Schedule
from octfm.pretraining.settings import PretrainConfig
from octfm.store.store import Store

INK, BAND, OBSERVED, EXPECTED = "#1b1c1d", "#d9e7f2", "#0072b2", "#d55e00"
NAMES = {"D": "B-scan (D)", "H": "row of tokens (H)", "W": "column of tokens (W)"}
MAX_POINTS = 2000


def draw_plot(path: Path, config: PretrainConfig, store: Store, train_rows: np.ndarray) -> None:
    """Write a PNG: the run's curves, and how often kept tokens are targets along D, H and W."""
    schedule = Schedule(config.schedule, config.steps)
    steps = np.unique(np.linspace(0, config.steps - 1, min(config.steps, MAX_POINTS)).astype(int))
    coverage = draw_coverage(config, read_sample(config, store, train_rows).tokens)
    with drawing({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK}):
        figure = Figure(figsize=(10, 5.6), layout="constrained")
        top, bottom = figure.subplots(2, 3)
        curves = (
            ("learning rate", schedule.lr),
            ("weight decay", schedule.weight_decay),
            ("EMA momentum of the teacher", schedule.ema),
        )
        for axes, (title, curve) in zip(top, curves, strict=True):
            axes.plot(steps, [curve(int(step)) for step in steps], color=OBSERVED)
            axes.set_title(title, loc="left")
            axes.set_xlabel("step")
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useOffset=False)
        top[0].set_ylim(bottom=0)
        for axes, axis in zip(bottom, AXES, strict=True):
            places = np.arange(len(coverage.observed[axis]))
            expected, error = coverage.expected[axis], coverage.standard_error[axis]
            known, drawn = np.isfinite(expected), error > 0
            low, high = expected * (1 - TOLERANCE[axis]), expected * (1 + TOLERANCE[axis])
            axes.fill_between(
                places, low, high, where=known, color=BAND, step="mid", label=f"expected ± {TOLERANCE[axis]:.0%}"
            )
            axes.step(places, expected, where="mid", color=EXPECTED, linewidth=1, linestyle="--")
            bars = {"yerr": 2 * error[drawn], "fmt": "o", "markersize": 3.5, "color": OBSERVED, "elinewidth": 1}
            axes.errorbar(places[drawn], coverage.observed[axis][drawn], **bars, label="drawn, ± 2 standard errors")
            axes.set_ylim(0, 1)
            axes.legend(frameon=False, loc="lower center", fontsize=8)
            axes.set_xlabel(NAMES[axis])
        bottom[0].set_title(f"share of kept tokens that are targets, {DRAWS} draws", loc="left")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, format="png")  # else a name without an ending would get one
