"""Kill ranks at random steps and compare the result with an undisturbed run: `python benchmarks/elastic.py --runs 20`.

torchrun's agent starts two ranks of a tiny model on CPU; one of them gets a SIGKILL at a random step; the agent starts
both again and they continue from the last checkpoint. Exits with 1 unless every run ends with bitwise identical
weights. Ranks are forked from a process that has imported everything, so that twenty runs take minutes;
`tests/run/test_elastic.py` uses the command line instead.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from octfm.pretraining import pretrain as loop
from octfm.pretraining.settings import load_config
from octfm.run import checkpoint
from octfm.store.store import Store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.small_store import small_store

SETTINGS = (
    "precision=fp32", "seed=3", "data.global_batch_size=4", "data.per_device_batch_size=1", "model.patch_size=[2,8,8]",
    "model.width=48", "model.depth=2", "model.heads=2", "predictor.width=24", "predictor.depth=1", "predictor.heads=1",
    "masks.budget=64", "augment.axial_shift=4", "schedule.base_lr=3e-3", "log_every_steps=1", "validate_every_steps=20",
    "ckpt_every_steps=5", "runtime.timeout_s=60",
)  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--runs", type=int, default=20)
    arguments.add_argument("--steps", type=int, default=40)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.optim.AdamW(
        [torch.nn.Parameter(torch.zeros(1))], fused=True
    ).step()  # load lazily imported code before forking
    loop.preflight.checks = lambda *_, **__: []  # their outcome is known for these runs
    rng = random.Random(chosen.seed)
    with tempfile.TemporaryDirectory() as folder:
        store = small_store(Path(folder) / "store").path
        settings = (f"steps={chosen.steps}", *SETTINGS)
        whole = Path(folder) / "whole"
        launch(settings, store, whole, restarts=0)
        print("undisturbed run done", flush=True)
        equal = 0
        for number in range(chosen.runs):
            out, at, rank = Path(folder) / f"run{number}", rng.randrange(1, chosen.steps - 4), rng.randrange(2)
            begun = time.monotonic()
            killer = kill_in_child(out, at, rank, rng.uniform(0, 0.05))
            launch(settings, store, out, restarts=3)
            os.waitpid(killer, 0)
            starts = len(Path(f"{out}.pid-{rank}").read_text().split())
            same = starts > 1 and same_weights(whole, out)
            equal += same
            told = f"rank {rank} killed after step {at}" if starts > 1 else "it ended before it could be killed"
            print(
                f"run {number}: {told}, {starts} starts, same weights: {same}, {time.monotonic() - begun:.0f} s",
                flush=True,
            )
    print(f"{equal} of {chosen.runs} runs ended with the weights of the undisturbed one")
    sys.exit(equal != chosen.runs)


def launch(settings: tuple[str, ...], store: Path, out: Path, restarts: int) -> None:
    """The same as `torchrun --standalone --nproc-per-node 2`, with forked ranks. Raises if the job finally fails."""
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id=out.name, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0",
        max_restarts=restarts, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, train)(settings, str(store), str(out))


def train(settings: tuple[str, ...], store: str, out: str) -> None:
    """One rank."""
    with Path(f"{out}.pid-{os.environ['RANK']}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    loop.pretrain(load_config("vit_s", settings), Store.open(store), out, "cpu", echo=lambda _: None)


def kill_in_child(out: Path, at: int, rank: int, moment: float) -> int:
    """Start a process that sends one SIGKILL to a rank, shortly after step `at` was logged."""
    pid = os.fork()
    if pid:
        return pid
    deadline = time.monotonic() + 600
    while steps_told(out) <= at and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(moment)
    try:
        os.kill(int(Path(f"{out}.pid-{rank}").read_text().split()[0]), signal.SIGKILL)
    finally:
        os._exit(0)


def steps_told(out: Path) -> int:
    try:
        lines = (out / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return 0
    told = 0
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        told = row["step"] + 1 if row["kind"] == "train" else told
    return told


def same_weights(one: Path, other: Path) -> bool:
    a, b = (checkpoint.load(checkpoint.newest(run)) for run in (one, other))
    return a["step"] == b["step"] and all(torch.equal(tensor, b["model"][name]) for name, tensor in a["model"].items())


if __name__ == "__main__":
    main()
