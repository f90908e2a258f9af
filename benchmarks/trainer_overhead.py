"""Cost of checkpoints and health monitors during training: `python benchmarks/trainer_overhead.py [--steps 6]`.

Trains ViT-S/12 (config vit_s) on random voxels, with steps of a second or more, in one process, and prints each cost as
a share of run time at the default settings: checkpoints every `ckpt_every_steps`, monitors every
`health.check_every_steps`. Aims: at most 1 % for checkpoints and 2 % for monitors. Times are medians; steps before and
while a checkpoint is written are compared within the same minute, because other load changes both.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import monitors
from octfm.pretraining.monitors.limits import limits
from octfm.pretraining.monitors.measure import train_row, update
from octfm.pretraining.monitors.summary import exchange_results
from octfm.pretraining.settings import load_config
from octfm.pretraining.step import accumulate, judge
from octfm.run.checkpoint_writer import CheckpointWriter, Retention
from octfm.run.runtime import start
from octfm.store.loader import Batch
from octfm.volume.preprocessing import Preprocessing

SIZE = (32, 192, 192)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=6)
    arguments.add_argument("--volumes", type=int, default=4)
    arguments.add_argument("--micro-batch", type=int, default=4)
    chosen = arguments.parse_args()
    config = load_config(
        "vit_s",
        (
            "precision=fp32",
            f"data.global_batch_size={chosen.volumes}",
            f"data.per_device_batch_size={chosen.micro_batch}",
            "masks.budget=384",
        ),
    )
    learner = Learner(
        config, Preprocessing(image_size=SIZE, target_spacing=(0.19, 0.0104, 0.031)), start("fp32", "cpu")
    )
    batch = random_batch(chosen.volumes)

    def step(look: bool = False) -> float:
        begun = time.perf_counter()
        done = accumulate(learner, batch, 0.5, everything=look)
        norm = learner.runtime.clip(learner.trained, config.clip_grad_norm)
        outcome = judge(learner, done, norm, limits(config.health, learner.state))
        learner.set_rates(1e-4, 0.05, 0.999)
        moved = update(learner, outcome.made, inspect=look)
        told = exchange_results(learner, done, outcome)
        learner.state = learner.state.accept(told.loss, told.grad_norm, config.health.window)
        if look:
            monitors.step_findings(config, learner.state, told, batch.index)
            row = train_row(learner, done, moved, 0.999, ["phantom"] * chosen.volumes)
            monitors.row_findings(config.health, learner.state, row, config.model.width)
        return time.perf_counter() - begun

    for _ in range(2):
        step()
    pairs = [(step(), step(look=True)) for _ in range(chosen.steps)]
    plain = statistics.median(p for p, _ in pairs)
    look = statistics.median(b - a for a, b in pairs)
    state = learner.state
    for _ in range(config.health.window):
        state = state.accept(0.5, 1.0, config.health.window)
    begun = time.perf_counter()
    for _ in range(100):
        monitors.spike(config.health, state, 0.5, 1.0)
    every = (time.perf_counter() - begun) / 100
    share = (look / config.health.check_every_steps + every) / plain
    print(
        f"step {plain:.2f} s; a look costs {look:.3f} s, every {config.health.check_every_steps} steps; "
        f"spike detector {every * 1e3:.2f} ms"
    )
    print(f"monitors: {share:.2%} of run time (a look at every logged step is part of logging, too)")

    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter([Path(folder)], Retention(2))
        content = learner.content({"git": {}, "environment": {}}, "fingerprint", {"key": "", "hashes": []})
        held, slower, wall = [], [], []
        for number in range(3):
            before = step()
            begun = time.perf_counter()
            writer.save(number, content)
            held.append(time.perf_counter() - begun)
            while not writer._in_flight.done():
                slower.append(step() - before)
            writer.wait()
            wall.append(time.perf_counter() - begun)
        size = max(path.stat().st_size for path in Path(folder).glob("*.pt")) / 1e6
        writer.close()
    cost = statistics.median(held) + max(0.0, sum(slower) / 3)
    print(
        f"checkpoint of {size:.0f} MB: loop held for {statistics.median(held):.3f} s, "
        f"written after {statistics.median(wall):.2f} s"
    )
    print(f"steps while writing were longer by {sum(slower) / 3:+.2f} s per checkpoint")
    share, every = cost / (config.ckpt_every_steps * plain), config.ckpt_every_steps
    print(f"checkpoints: {share:.3%} of run time, one every {every} steps of {plain:.2f} s")


def random_batch(volumes: int) -> Batch:
    d, h, w = SIZE
    rng = np.random.default_rng(0)
    band = np.stack([np.full((volumes, d, w), 0.3 * h), np.full((volumes, d, w), 0.6 * h)], axis=1).astype(np.float32)
    valid = np.stack([np.zeros((volumes, d, w)), np.full((volumes, d, w), h)], axis=1).astype(np.int16)
    index = np.arange(volumes)
    voxels = rng.integers(0, 255, (volumes, d, h, w), dtype=np.uint8)
    return Batch(voxels, band, valid, index=index, position=index)


if __name__ == "__main__":
    main()
