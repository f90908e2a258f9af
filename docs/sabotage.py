"""Makes the picture of docs/guide/training.md: `python docs/sabotage.py FOLDER docs/sabotage.png` plants four faults.

Each is a run of `octfm demo --sabotage NAME --out FOLDER`; one that FOLDER holds already is not made again.
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octfm.demo.sabotage import SABOTAGED_AT, run_sabotage
from octfm.pretraining.monitors.sabotage import NAMES
from octfm.run.tracking import read_metrics

CURVES = {
    "teacher-frozen": {"teacher_asked": "what its average asks for", "teacher_step": "how far the teacher moved"},
    "context-unmasked": {"target_gradient": "gradient that the voxels of targets get"},
    "lr-restart": {"lr": "learning rate that the optimizer used"},
    "nan-volume": {"masked_over_baseline": "masked loss over baseline"},
}
"""What shows each fault."""
UNHARMED = "masked_over_baseline"
"""What shows none of them while they happen; drawn beside."""


def main(folder: Path, out: Path) -> None:
    figure = Figure(figsize=(11, 7), dpi=80, layout="constrained")
    for axes, name in zip(figure.subplots(2, 2).flat, NAMES, strict=True):
        if not (folder / f"report-{name}.html").is_file():
            run_sabotage(name, folder)
        draw(axes, name, list(read_metrics(folder / f"run-{name}" / "metrics.jsonl")))
    figure.savefig(out)
    print(out)


def draw(axes: Axes, name: str, rows: list[dict]) -> None:
    """One fault: its curves from the first steps on, and every step at which it was named, counted from 1."""
    train = [row for row in rows if row["kind"] == "train"]
    for (key, label), style in zip(CURVES[name].items(), ("-o", "-s"), strict=False):
        axes.plot(
            *zip(*((row["step"] + 1, row[key]) for row in train if key in row), strict=True),
            style,
            markersize=4,
            label=label,
        )
    if name == "lr-restart":
        axes.set_yscale("log")
    if name != "nan-volume":
        loss = axes.twinx()
        points = [(row["step"] + 1, row[UNHARMED]) for row in train]
        axes.plot([], [], color="silver", label="masked loss over baseline (right)")
        loss.plot(*zip(*points, strict=True), color="silver", zorder=0)
        loss.set_ylim(0.95, 1.15)
        loss.tick_params(labelsize=8, colors="grey")
    else:
        axes.set_ylim(0.95, 1.15)
    named = [row for row in rows if row["kind"] == "incident" and row["what"] == NAMES[name]]
    for row in named:
        axes.axvline(
            row["step"] + 1,
            color="tab:red",
            linewidth=1,
            label=f'"{NAMES[name]}" is named' if row is named[0] else None,
        )
    what = {"stop": "the run stopped", "exclude": "its volume left out", "skip": "its update skipped"}[
        named[-1]["action"]
    ]
    axes.set_title(
        f"{name}, after step {SABOTAGED_AT}: named at {named[0]['step'] + 1}, {what} at {named[-1]['step'] + 1}",
        fontsize=10,
    )
    axes.set_xlim(0, 61)
    axes.set_xlabel("step", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2, frameon=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
