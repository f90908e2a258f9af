"""3,000 steps of a small model on a phantom cohort: `python benchmarks/soak.py --out soak`.

The run goes past every step at which the prototype collapsed. After an interruption, the same command continues. Prints
a table of curves and draws them with `--plot`.
"""

import argparse
import itertools
import statistics
from pathlib import Path

from octfm.catalog.scan import scan
from octfm.phantom import write_phantom
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import load_config
from octfm.run.tracking import read_metrics
from octfm.store.prepare import prepare
from octfm.volume.preprocessing import Preprocessing

PREPROCESSING = {"image_size": [8, 96, 64], "target_spacing": [0.375, 0.0208, 0.062]}
SETTINGS = (
    "model.width=96",
    "model.depth=3",
    "model.heads=2",
    "predictor.width=48",
    "predictor.heads=1",
    "masks.budget=96",
    "log_every_steps=10",
    "validate_every_steps=250",
    "ckpt_every_steps=250",
    "keep_every_steps=1000",
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("soak"))
    arguments.add_argument("--steps", type=int, default=3000)
    arguments.add_argument("--participants", type=int, default=24)
    arguments.add_argument("--plot", type=Path)
    chosen = arguments.parse_args()
    clinic = chosen.out / "clinic"
    if not (clinic / "ground_truth" / "phantom.json").is_file():
        write_phantom(clinic, chosen.participants, seed=5)
    store = prepare(scan(str(clinic)), chosen.out / "prepared", Preprocessing.model_validate(PREPROCESSING))
    config = load_config("demo_vjepa2", (*SETTINGS, f"steps={chosen.steps}"))
    run = pretrain(config, store, chosen.out / "run", echo=lambda line: print(line, flush=True))
    rows = list(read_metrics(run / "metrics.jsonl"))
    table([row for row in rows if row["kind"] == "train"], [row for row in rows if row["kind"] == "validation"])
    incidents = [f"step {row['step']}: {row['what']} ({row['action']})" for row in rows if row["kind"] == "incident"]
    print("incidents:", "; ".join(incidents) or "none")
    if chosen.plot:
        plot(rows, chosen.plot)


def table(train: list[dict], validation: list[dict]) -> None:
    print(
        "| steps | masked / baseline | held out | effective rank | gradient norm | learning rate | teacher distance "
        "| volumes/s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    held_out = {row["step"]: row["masked_over_baseline"] for row in validation}
    edges = [0, 250, 500, 750, 1000, 1500, 2000, 2500, train[-1]["step"] + 1]
    for first, last in itertools.pairwise(edges):
        rows = [row for row in train if first <= row["step"] < last]
        if rows:
            names = ("masked_over_baseline", "effective_rank", "grad_norm", "lr", "teacher_distance", "volumes_per_s")
            middle = {name: statistics.median(row[name] for row in rows) for name in names}
            out = held_out.get(last - 1, float("nan"))
            print(
                f"| {first} to {last} | {middle['masked_over_baseline']:.3f} | {out:.3f} | "
                f"{middle['effective_rank']:.1f} | {middle['grad_norm']:.2f} | {middle['lr']:.1e} | "
                f"{middle['teacher_distance']:.3f} | {middle['volumes_per_s']:.0f} |"
            )


def plot(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    names = ("masked_over_baseline", "effective_rank", "grad_norm", "feature_std", "lr", "teacher_distance")
    for place, name in enumerate(names):
        axes = figure.add_subplot(2, 3, place + 1, title=name.replace("_", " "))
        for kind in ("train", "validation"):
            points = [(row["step"], row[name]) for row in rows if row["kind"] == kind and name in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=kind, linewidth=1)
        for died in (514,):
            axes.axvline(died, color="grey", linestyle=":", linewidth=1)
    figure.savefig(path, dpi=110)
    print(path)


if __name__ == "__main__":
    main()
