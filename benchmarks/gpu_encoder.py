"""What a GPU buys the packaged encoder: `dense` with smaller patches and a wider network, some minutes on one device.

    python benchmarks/gpu_encoder.py --out OUT --minutes 8 [--rehearse]

A GPU trains on more phantoms than the host's cores render. So they are rendered all the time, by a process per core but
one, and kept in memory; a batch is drawn from all that are there, with masks and augmentation of its own. So, unlike
those of `octfm pretrain`, batches depend on the machine's speed. A run of --probe updates measures how long one takes,
by which their number is set. OUT/gpu-encoder-STEP are exports for benchmarks/yardstick.py, at half time and at the end;
OUT/gpu-encoder.json says what was seen. --rehearse: tiny, on the CPU.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from octfm.encoder.packaging import package
from octfm.errors import Preempted
from octfm.pretraining import preflight
from octfm.pretraining import pretrain as pretraining
from octfm.pretraining.settings import load_config
from octfm.run.tracking import read_metrics
from octfm.store.layout import Arrays, shapes
from octfm.store.phantoms import PhantomConfig, PhantomStore

NAME = "gpu-encoder"
NETWORK = ("model.patch_size=[2,4,8]", "model.width=384", "model.depth=6", "model.heads=6", "masks.budget=1600")
TINY = ("model.patch_size=[2,8,16]", "model.width=32", "model.depth=1", "model.heads=1", "masks.budget=100")
READ = ("model.summary=8", "objective.pool=summary")
LEARNED = ("schedule.base_lr=8.0e-4", "data.prefetch=3")
BATCH = 64
BLOCK = 40
"""Phantoms that are rendered together."""
LEAST = 1024
"""Phantoms that are there before the first batch."""


class Kept(PhantomStore):
    """Streamed phantoms, each rendered once and kept; rows of training are any of those that are there."""

    def __init__(self, config: PhantomConfig, held_out: int, painters: int, room: int, least: int):
        super().__init__(config, config.preprocessing(), held_out, threads=max(2, painters))
        self.kept = {name: np.empty((room, *shape), kind) for name, (shape, kind) in self._columns().items()}
        self.rendered, self.used = 0, 0
        self._room, self._least, self._next, self._enough = room, least, 0, threading.Condition()
        self._rng = np.random.default_rng([config.seed, 7])
        self.stopped = False
        # Two, so that while one block waits for its last phantom the next one is begun.
        for _ in range(2):
            threading.Thread(target=self._paint, daemon=True).start()

    def _columns(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        whole = shapes(self.image_size)
        kinds = {"voxels": np.uint8, "band": np.float32, "valid": np.int16}
        return {**{name: (whole[name], kind) for name, kind in kinds.items()}, "labels": (self.image_size, np.uint8)}

    def _paint(self) -> None:
        while not self.stopped:
            with self._enough:
                first, self._next = self._next, self._next + BLOCK
            if first + BLOCK > self._room:
                return
            images = super().read(np.arange(first, first + BLOCK))
            with self._enough:
                for name, column in self.kept.items():
                    column[self.rendered : self.rendered + BLOCK] = getattr(images, name)
                self.rendered += BLOCK
                self._enough.notify_all()

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        if min(indices) >= self.config.volumes:
            return super().read(indices, out)
        with self._enough:
            self._enough.wait_for(lambda: self.rendered >= self._least)
        # None twice in a batch, as the monitors demand.
        chosen = self._rng.choice(self.rendered, len(indices), replace=False)
        self.used += len(chosen)
        out = out or Arrays.empty(len(indices), self.image_size)
        for name in ("voxels", "band", "valid"):
            np.take(self.kept[name], chosen, axis=0, out=getattr(out, name))
        names = tuple(self.rows[int(i)].acquisition for i in indices)
        return replace(out, labels=np.take(self.kept["labels"], chosen, axis=0), acquisition=names)

    def holds(self, row: int, arrays: Arrays) -> bool:
        return True  # rows are no places of the stream here


def configured(chosen: argparse.Namespace, steps: int):
    network, batch = (TINY, 8) if chosen.rehearse else (NETWORK, BATCH)
    settings = (*network, *READ, *LEARNED, *chosen.setting)
    return load_config(
        "dense",
        [
            *settings,
            f"steps={steps}",
            f"seed={chosen.seed}",
            f"data.phantoms.seed={chosen.seed}",
            f"precision={'fp32' if chosen.rehearse else 'bf16'}",
            f"data.global_batch_size={batch}",
            f"data.per_device_batch_size={batch}",
            f"runtime.compile={str(chosen.compile).lower()}",
            "health.check_every_steps=50",
            "log_every_steps=10",
            f"validate_every_steps={max(1, steps // 4)}",
            f"ckpt_every_steps={max(1, steps // 2)}",
        ],
    )


def trained(chosen: argparse.Namespace, store: Kept, steps: int, run: Path, seconds: float) -> list[dict[str, Any]]:
    """Train without preflight, for so many seconds at most; the rows of training in its metrics."""
    checks, preflight.checks = preflight.checks, lambda *_, **__: []
    # As it makes it of data.phantoms, which a store given to it may not have.
    given, pretraining.given_store = pretraining.given_store, lambda *_: store
    # As if the machine were taken away: the run is saved.
    late = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()
    try:
        pretraining.pretrain(configured(chosen, steps), None, run, "cpu" if chosen.rehearse else "cuda", echo=print)
    except Preempted as error:
        print(error, flush=True)
    finally:
        late.cancel()
        preflight.checks, pretraining.given_store = checks, given
    return [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]


def seconds_of(rows: list[dict[str, Any]], batch: int) -> float:
    return batch / statistics.median(row["volumes_per_s"] for row in rows[len(rows) // 2 :])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--minutes", type=float, default=8.0, help="in all")
    arguments.add_argument("--seed", type=int, default=3)
    arguments.add_argument("--probe", type=int, default=40, help="updates that measure an update")
    arguments.add_argument("--painters", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes")
    arguments.add_argument("--probe-only", action="store_true")
    arguments.add_argument("--compile", action="store_true")
    arguments.add_argument("--setting", action="append", default=[], help="of the run, KEY=VALUE")
    arguments.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    chosen = arguments.parse_args()
    began = time.perf_counter()

    def passed() -> float:
        return time.perf_counter() - began

    chosen.out.mkdir(parents=True, exist_ok=True)
    room, least = (200, 16) if chosen.rehearse else (110_000, LEAST)
    config = configured(chosen, 8)
    phantoms = config.data.phantoms
    assert phantoms is not None
    store = Kept(phantoms, config.validation_volumes, chosen.painters, room, least)
    batch = config.data.global_batch_size
    probe = trained(chosen, store, chosen.probe, chosen.out / "probe", 30 * chosen.minutes)
    step_s = seconds_of(probe, batch)
    # What is left without packaging and, compiled, without compiling once more.
    spare = 3 if chosen.rehearse else 20
    left = 60 * chosen.minutes - passed() - spare - (25 if chosen.compile else 0)
    steps = max(8, 4 * int(0.23 * left / step_s))
    facts = {"probe_s": passed(), "step_s_probe": step_s, "steps": steps, "compiled": chosen.compile}
    facts |= {"painters": chosen.painters, "rendered_in_probe": store.rendered}
    print(json.dumps(facts), flush=True)
    shutil.rmtree(chosen.out / "probe")
    if chosen.probe_only:
        os._exit(0)  # without waiting for its painters
    at = passed()
    rows = trained(chosen, store, steps, chosen.out / "run", 60 * chosen.minutes - passed() - spare)
    facts |= {"train_s": passed() - at, "step_s": seconds_of(rows, batch), "rendered": store.rendered}
    facts |= {"updates": rows[-1]["step"] + 1, "read": store.used}
    facts["data_wait_share"] = statistics.median(row["data_wait_share"] for row in rows[2:] or rows)
    facts["masked_over_baseline"] = [row["masked_over_baseline"] for row in rows]
    store.stopped = True
    (chosen.out / f"{NAME}.json").write_text(json.dumps(facts, indent=1, default=str) + "\n")
    files = sorted((chosen.out / "run" / "checkpoints").glob("*.pt"))
    for file in files[::-1]:
        step = int("".join(c for c in file.stem if c.isdigit()))
        package(str(file), f"{NAME}-{step}", chosen.out)
        print(f"{file.name} packaged after {passed():.0f} s", flush=True)


if __name__ == "__main__":
    main()
