"""Count false alarms of the monitors in twenty clean runs of 500 steps: `python benchmarks/clean_runs.py --out clean`.

Every objective on the phantoms of benchmarks/soak.py, at two learning rates and with several seeds. After an
interruption, the same command continues.
"""

import argparse
import statistics
import time
from pathlib import Path

from octfm.catalog.scan import scan
from octfm.phantom import write_phantom
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import load_config
from octfm.run import checkpoint
from octfm.run.tracking import read_metrics
from octfm.store.prepare import prepare
from octfm.volume.preprocessing import Preprocessing
from soak import PREPROCESSING, SETTINGS

ARMS = {
    "demo": ("demo", 1e-3, ()),
    "demo_vjepa2": ("demo_vjepa2", 4e-3, ()),
    "vjepa2": (
        "demo_vjepa2",
        2e-3,
        (
            *(
                "objective.target_norm=layer",
                "objective.context_loss=0.5",
                "objective.frozen=target",
                "schedule.ema_base=null",
            ),
            *("objective.voxel_loss=0", "objective.goal_average=[1,1,1]"),
        ),
    ),
    "data2vec": ("data2vec_prototype", 1e-3, ("model.patch_size=[2,8,16]",)),
    "mae": ("mae", 1e-3, ("model.patch_size=[2,8,16]", "objective.goal_average=[2,1,8]")),
}
"""Packaged config, the higher of two learning rates, and overrides other than the size."""
SMALL = (
    *SETTINGS,
    "precision=fp32",
    "data.global_batch_size=8",
    "data.per_device_batch_size=8",
    "schedule.warmup_ratio=0.1",
)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("clean"))
    arguments.add_argument("--steps", type=int, default=500)
    arguments.add_argument("--seeds", type=int, default=5, help="runs of each objective")
    chosen = arguments.parse_args()
    clinic = chosen.out / "clinic"
    if not (clinic / "ground_truth" / "phantom.json").is_file():
        write_phantom(clinic, 24, seed=5)
    store = prepare(scan(str(clinic)), chosen.out / "prepared", Preprocessing.model_validate(PREPROCESSING))
    print("| objective | seed | incidents | verdicts that are bad | masked / baseline | effective rank | CPU seconds |")
    print("|---|---|---|---|---|---|---|")
    alarms = 0
    for seed in range(chosen.seeds):
        for arm, (preset, base_lr, changes) in ARMS.items():
            # Every second seed learns half as fast.
            settings = (
                *SMALL,
                *changes,
                f"schedule.base_lr={base_lr / (1 + seed % 2)}",
                f"steps={chosen.steps}",
                f"seed={seed}",
            )
            config = load_config(preset, settings)
            run, began = chosen.out / f"{arm}-{seed}", time.process_time()
            newest = checkpoint.newest(run) if (run / "config.yaml").is_file() else None
            if newest is None or checkpoint.load(newest)["step"] < chosen.steps:
                pretrain(config, store, run, echo=lambda _: None)
            spent = time.process_time() - began
            rows = list(read_metrics(run / "metrics.jsonl"))
            incidents = [
                f"step {row['step']}: {row['what']} ({row['action']})" for row in rows if row["kind"] == "incident"
            ]
            bad = [
                f"step {row['step']}: {row['what']}"
                for row in rows
                if row["kind"] == "health" and row["verdict"] == "bad"
            ]
            alarms += bool(incidents or bad)
            last = [row for row in rows if row["kind"] == "train"][-5:]
            masked, rank = (
                statistics.median(row[name] for row in last) for name in ("masked_over_baseline", "effective_rank")
            )
            told = "; ".join(incidents) or "none", "; ".join(bad) or "none"
            print(f"| {arm} | {seed} | {told[0]} | {told[1]} | {masked:.3f} | {rank:.1f} | {spent:.0f} |", flush=True)
    print(f"{alarms} of {chosen.seeds * len(ARMS)} runs with a false alarm")


if __name__ == "__main__":
    main()
