"""What the GPU path costs, cell by cell: `python benchmarks/gpu.py --out OUT [--peer VJEPA2_CLONE]`.

Cells come in order of what they tell. Each has a time limit and is written to OUT/cells as soon as it is there; a rerun
goes on with those that are missing. All are computed by one worker process, which is replaced if a cell outlasts its
limit or ends it. From what is there, OUT/gpu.json and OUT/gpu.md are made: a table of cells beside the prediction of
roofline.py, and one row for docs/log. --rehearse: tiny sizes, on the CPU.

Cells:
  peak     rates of a matrix product and of a copy
  update   one update with inputs that are there already: network, size, tokens, mode, batch, in bf16
  peer     the same of facebookresearch/vjepa2 beside octfm at equal work (equal; step.py)
  train    octfm's loop with a store on the local disk: waiting for data, stall of checkpoints
  inputs   patches and masks of a micro-batch with and without augmentation
  embed    volumes/s of a frozen encoder
  passes   one pass of the trainer with masks drawn before, and the same inspected
  classes  kernel time of an update by class of kernels, and the device's idle share
  attention forward and backward pass of scaled dot products by torch's flash attention and by cuDNN's
"""

import argparse
import gc
import json
import queue
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

LARGE, SMALL = (64, 384, 384), (32, 192, 192)
BUDGET = 3072
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LINKS = {8: 250e9, 64: 20e9}
"""Bytes/s per device while all send, as in docs/scaling.md: NVLink, 200 Gb/s network."""
TEN_MINUTES = 600.0


@dataclass(frozen=True)
class Cell:
    """One measurement."""

    kind: str
    image: tuple[int, int, int] = LARGE
    budget: int | None = None
    mode: str = "eager"
    batch: int = 8
    network: str = "ViT-S"
    limit_s: float = 30.0

    @property
    def name(self) -> str:
        size = "x".join(map(str, self.image))
        return f"{self.kind}-{self.network}-{size}-{self.budget or 'all'}-{self.mode.replace(' ', '-')}-{self.batch}"


def cells(peer: bool, rehearse: bool) -> list[Cell]:
    """All cells, the most telling first."""
    if rehearse:
        tiny = Cell("update", (8, 64, 32), batch=2, limit_s=120)
        found = [Cell("peak", limit_s=60), tiny, replace(tiny, mode="compiled"), replace(tiny, budget=48, batch=4)]
        kinds = ("train", "passes", "inputs", "embed", "classes", "attention", *(("peer", "equal") if peer else ()))
        return [*found, *(replace(tiny, kind=kind) for kind in kinds)]
    budget, whole, small = Cell("update", budget=BUDGET), Cell("update"), Cell("update", SMALL)
    # A third of the tokens, as of the large volumes.
    few = Cell("update", SMALL, budget=384)
    slow = {"limit_s": 90.0}  # nothing is in the compiler's cache yet
    graph = {**slow, "mode": "compiled graph"}
    found = [Cell("peak"), budget, replace(budget, **graph), replace(budget, network="ViT-B", **graph)]
    found += [Cell("attention", budget=BUDGET)]
    found += [Cell("train", budget=BUDGET, mode="compiled", limit_s=120), Cell("train", budget=BUDGET, limit_s=75)]
    found += [replace(budget, batch=32, **graph), whole, small, replace(whole, **graph), replace(small, **graph)]
    found += [Cell("passes", budget=BUDGET), Cell("passes", budget=BUDGET, mode="compiled", **slow)]
    found += [Cell("inputs", budget=BUDGET), Cell("embed", budget=BUDGET, batch=16)]
    found += [Cell("classes", budget=BUDGET, mode=mode, limit_s=75) for mode in ("eager", "compiled")]
    if peer:
        pairs = ((SMALL, 8), (LARGE, 1), (SMALL, 1), (LARGE, 8))
        found += [Cell(kind, image, batch=n) for image, n in pairs for kind in ("peer", "equal")]
        found += [Cell(kind, LARGE, mode="compiled", limit_s=120) for kind in ("peer", "equal")]
    found += [replace(each, mode="graph", batch=n) for each in (budget, small, whole, few) for n in (8, 1)]
    found += [replace(budget, network="ViT-B")]
    found += [replace(each, mode="compiled", **slow) for each in (budget, small, whole)]
    found += [replace(budget, mode="whole compiled", limit_s=150)]
    found += [replace(each, batch=n) for n in BATCHES for each in (budget, whole, small, few)]
    found += [
        replace(each, batch=n, mode=mode, **slow)
        for mode in ("compiled", "compiled graph")
        for n in (32, 64, 1)
        for each in (budget, small, whole)
    ]
    return list(dict.fromkeys(found))


# The worker.


def settings_of(cell: Cell, rehearse: bool, **changes: Any):
    from octfm.pretraining.settings import load_config
    from octfm.volume.preprocessing import Preprocessing
    from roofline import settings

    data = [
        f"data.global_batch_size={cell.batch}",
        f"data.per_device_batch_size={cell.batch}",
        f"masks.budget={cell.budget or 'null'}",
    ]
    data += [f"{name}={value}" for name, value in changes.items()]
    if rehearse:
        small = [
            "model.patch_size=[2,8,8]",
            "model.width=48",
            "model.heads=2",
            "model.depth=2",
            "predictor.width=24",
            "predictor.depth=1",
            "predictor.heads=1",
        ]
        return load_config("vit_s", [*small, *data]), Preprocessing(
            image_size=cell.image, target_spacing=(0.7, 0.03, 0.18)
        )
    scale = tuple(a / b for a, b in zip(LARGE, cell.image, strict=True))
    spacing = tuple(mm * s for mm, s in zip(Preprocessing().target_spacing, scale, strict=True))
    return settings(cell.network, *data), Preprocessing(image_size=cell.image, target_spacing=spacing)


class Worker:
    """Measures cells on one device, one after the other."""

    def __init__(self, chosen: argparse.Namespace):
        import torch

        self.chosen, self.torch = chosen, torch
        self.device = "cpu" if chosen.rehearse else "cuda"
        self.seconds = 0.2 if chosen.rehearse else 1.5

    def measure(self, cell: Cell) -> dict[str, Any]:
        self.clear()
        try:
            return getattr(self, cell.kind)(cell)
        except self.torch.OutOfMemoryError:
            return {"trouble": "does not fit"}
        finally:
            self.clear()

    def clear(self) -> None:
        gc.collect()
        if self.device == "cuda":
            self.torch.cuda.empty_cache()
            self.torch.cuda.reset_peak_memory_stats()

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def memory_gb(self) -> float | None:
        """Most memory that tensors took at a time; unknown on a CPU."""
        return self.torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else None

    def timed(self, work: Callable[[], Any]) -> float:
        """Seconds of one call: the median of windows of several, without the first three calls."""
        for _ in range(3):
            work()
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        calls = max(1, round(self.seconds / 5 / max(1e-6, time.perf_counter() - began)))
        windows = []
        for _ in range(3 if calls == 1 else 5):
            began = time.perf_counter()
            for _ in range(calls):
                work()
            self.wait()
            windows.append((time.perf_counter() - began) / calls)
        return statistics.median(windows)

    def peak(self, cell: Cell) -> dict[str, Any]:
        torch, side = self.torch, 512 if self.chosen.rehearse else 8192
        a, b = (torch.randn(side, side, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        product = 2 * side**3 / self.timed(lambda: a @ b)
        source = torch.empty(side**2 * 16, device=self.device, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy = 2 * source.nbytes / self.timed(lambda: target.copy_(source))
        name = torch.cuda.get_device_name() if self.device == "cuda" else "CPU"
        return {"device": name, "torch": torch.__version__, "product_flops_per_s": product, "copy_bytes_per_s": copy}

    def learner(self, cell: Cell, **changes: Any):
        import numpy as np

        from octfm.pretraining.bench import _batch
        from octfm.pretraining.learner import Learner
        from octfm.run.runtime import start

        config, preprocessing = settings_of(cell, self.chosen.rehearse, **changes)
        runtime = replace(
            start("bf16", self.device),
            compiles=cell.mode == "whole compiled" or (cell.kind, cell.mode) == ("passes", "compiled"),
        )
        learner = Learner(config, preprocessing, runtime)
        # A rate so low that random weights stay finite; an update takes as long at any rate.
        learner.set_rates(1e-6, 0.0, 0.999)
        return learner, _batch(config, preprocessing, None, np.arange(0))

    def update(self, cell: Cell) -> dict[str, Any]:
        from gpu_step import update_of

        learner, batch = self.learner(cell)
        began = time.perf_counter()
        update = update_of(learner, batch, learner.config.objective.context_loss, cell.mode)
        update()
        self.wait()
        first, seconds = time.perf_counter() - began, self.timed(update)
        return {
            "ms": 1e3 * seconds,
            "volumes_per_s": cell.batch / seconds,
            "memory_gb": self.memory_gb(),
            "first_s": first,
        }

    def attention(self, cell: Cell) -> dict[str, Any]:
        """Milliseconds of the shapes of a ViT-S and a ViT-B: all kept tokens, and the third that the encoder sees."""
        from torch.nn.attention import SDPBackend, sdpa_kernel

        torch, found = self.torch, {}
        for heads, tokens in ((6, cell.budget or 96), (6, (cell.budget or 96) // 3), (12, cell.budget or 96)):
            q, k, v = (
                torch.randn(cell.batch, tokens, heads, 64, device=self.device, dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )

            def both(q=q, k=k, v=v) -> None:
                out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
                out.backward(out.detach())

            shape = f"{heads}x{tokens}"
            found[f"{shape}_flash_ms"] = 1e3 * self.timed(both)
            if self.device == "cuda":
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    found[f"{shape}_cudnn_ms"] = 1e3 * self.timed(both)
        return found

    def passes(self, cell: Cell) -> dict[str, Any]:
        """Inputs, forward and backward pass as the trainer makes them: from the call until done."""
        from octfm.pretraining.inputs import draw
        from octfm.pretraining.step import accumulate

        learner, batch = self.learner(cell)
        batch = replace(batch, drawn=draw(learner.config, learner.preprocessing, batch))
        work = partial(accumulate, learner, batch, learner.config.objective.context_loss)
        found = {"ms": 1e3 * self.timed(partial(work, everything=False))}
        return {**found, "inspected_ms": 1e3 * self.timed(partial(work, everything=True))}

    def classes(self, cell: Cell) -> dict[str, Any]:
        """Milliseconds of one update by class of kernels, and the largest kernels by name."""
        from torch.profiler import ProfilerActivity, profile

        from gpu_step import update_of

        learner, batch = self.learner(cell)
        update, calls = update_of(learner, batch, learner.config.objective.context_loss, cell.mode), 3
        seconds = self.timed(update)
        kinds = [ProfilerActivity.CPU if self.device == "cpu" else ProfilerActivity.CUDA]
        with profile(activities=kinds) as seen:
            for _ in range(calls):
                update()
            self.wait()
        ms = {}
        for event in seen.key_averages():
            # A CPU has operators for kernels.
            spent = event.self_cpu_time_total if self.device == "cpu" else event.self_device_time_total
            if spent and (self.device == "cpu" or event.device_type == self.torch.autograd.DeviceType.CUDA):
                ms[event.key] = ms.get(event.key, 0.0) + spent / 1e3 / calls
        found = {"ms": 1e3 * seconds, "kernels_ms": sum(ms.values()), **dict.fromkeys(KERNELS, 0.0)}
        for name, spent in ms.items():
            found[kernel_class(name)] += spent
        largest = sorted(ms, key=lambda name: -ms[name])[:25]
        return {**found, "largest": {name[:160]: round(ms[name], 3) for name in largest}}

    def peer(self, cell: Cell) -> dict[str, Any]:
        from step import build_peer

        return self._step(
            cell, build_peer(self.chosen.peer, cell.image, cell.batch, self.device, cell.mode == "compiled")
        )

    def equal(self, cell: Cell) -> dict[str, Any]:
        from step import build_ours

        return self._step(
            cell,
            build_ours(cell.image, cell.batch, cell.budget, True, device=self.device, compiled=cell.mode == "compiled"),
        )

    def _step(self, cell: Cell, bare: Callable[[], None]) -> dict[str, Any]:
        torch = self.torch

        def step() -> None:
            with torch.autocast(self.device, dtype=torch.bfloat16):
                bare()

        seconds = self.timed(step)
        return {"ms": 1e3 * seconds, "volumes_per_s": cell.batch / seconds, "memory_gb": self.memory_gb()}

    def inputs(self, cell: Cell) -> dict[str, Any]:
        from octfm.pretraining.inputs import draw, make_inputs

        spatial = {
            "augment.tilt_deg": 4,
            "augment.lateral_shift_mm": 0.3,
            "augment.axial_scale": 0.1,
            "augment.noise": 0.05,
        }
        found = {}
        for name, changes, augmented in (("plain", {}, False), ("default", {}, True), ("all", spatial, True)):
            learner, batch = self.learner(cell, **changes)
            rules = learner.config, learner.preprocessing
            began = time.perf_counter()
            batch = replace(batch, drawn=draw(*rules, batch, augmented))
            found["drawing_ms"] = 1e3 * (time.perf_counter() - began)
            work = partial(make_inputs, *rules, learner.runtime, batch, augmented)
            found[f"{name}_ms"] = 1e3 * self.timed(work)
        return found

    def embed(self, cell: Cell) -> dict[str, Any]:
        from octfm.encoder.encoder import assemble
        from octfm.store.layout import Arrays

        learner, batch = self.learner(cell)
        network = learner.model.frozen_encoder(learner.config.objective.frozen)
        encoder = assemble(network, learner.config, learner.preprocessing, "random", "", learner.runtime)
        seconds = self.timed(lambda: encoder.embed_arrays(Arrays(batch.voxels, batch.band, batch.valid)))
        return {"volumes_per_s": cell.batch / seconds, "memory_gb": self.memory_gb()}

    def train(self, cell: Cell) -> dict[str, Any]:
        """The real loop on a store of the local disk: no preflight, a checkpoint in the middle and at the end."""
        import numpy as np

        from loader import write
        from octfm.pretraining import preflight
        from octfm.pretraining.bench import _batch
        from octfm.pretraining.pretrain import pretrain
        from octfm.run.loop import Session
        from octfm.run.tracking import read_metrics
        from octfm.store.store import Store
        from octfm.volume.preprocessing import Prepared
        from octfm.volume.transform import Transform

        compiled = cell.mode == "compiled"
        passes, volumes, steps = (2, 8, 24) if self.chosen.rehearse else (4, 64, 120 if compiled else 60)
        changes = {
            "data.global_batch_size": passes * cell.batch,
            "steps": steps,
            "ckpt_every_steps": steps // 2,
            "log_every_steps": 10,
            "runtime.compile": str(compiled).lower(),
        }
        config, pre = settings_of(cell, self.chosen.rehearse, **changes)
        folder = Path(self.chosen.out) / f"store-{'x'.join(map(str, cell.image))}"
        if not (folder / "store.json").is_file() or len(Store.open(folder)) < volumes:
            batch, depth = _batch(config, pre, None, np.arange(0)), cell.image[0]
            whole = Transform(
                cell.image, pre.target_spacing, cell.image, (0, 0, 0), (1, 1, 1), (0.0,) * depth, False, False
            )
            parts = zip(batch.voxels, batch.band, batch.valid, strict=True)
            drawn = [Prepared(voxels, band, valid, True, {}, whole) for voxels, band, valid in parts]
            began = time.perf_counter()
            write(folder, drawn, volumes, "none", pre)
            written = time.perf_counter() - began
        else:
            written = None
        held, save = [], Session.save

        def timed_save(session: Session) -> None:
            began = time.perf_counter()
            save(session)
            held.append(time.perf_counter() - began)

        run = Path(self.chosen.out) / f"run-{time.time_ns()}"
        checks, preflight.checks, Session.save = preflight.checks, lambda *_, **__: [], timed_save
        began = time.perf_counter()
        try:
            pretrain(config, Store.open(folder), run, self.device, echo=lambda _: None)
        finally:
            preflight.checks, Session.save = checks, save
        # Without the first windows, in which kernels are loaded or compiled.
        rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"][2:]
        sizes = [p.stat().st_size for p in (run / "checkpoints").glob("*.pt")]
        shutil.rmtree(run)
        return {
            "ms": 1e3 * config.data.global_batch_size / statistics.median(row["volumes_per_s"] for row in rows),
            "volumes_per_s": statistics.median(row["volumes_per_s"] for row in rows),
            "data_wait_share": statistics.median(row["data_wait_share"] for row in rows),
            "memory_gb": self.memory_gb(),
            "checkpoint_stall_s": max(held),
            "checkpoint_gb": max(sizes) / 1e9,
            "whole_s": time.perf_counter() - began,
            "store_written_s": written,
            "batch": config.data.global_batch_size,
        }


KERNELS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "mm_"),
    "update": ("multi_tensor_apply", "adam", "lerp"),
    "elementwise": (),
}
"""Classes of kernels, and parts of the names of those that belong to each; whatever has none is elementwise."""


def kernel_class(name: str) -> str:
    return next(kind for kind, parts in KERNELS.items() if not parts or any(part in name.lower() for part in parts))


def work(chosen: argparse.Namespace) -> None:
    """Serve the names of cells on stdin."""
    known = {cell.name: cell for cell in cells(bool(chosen.peer), chosen.rehearse)}
    worker = Worker(chosen)
    for line in sys.stdin:
        try:
            answer = worker.measure(known[line.strip()])
        # Whatever went wrong in a cell is its result; the others go on.
        except Exception as error:
            answer = {"trouble": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print("RESULT " + json.dumps(answer), flush=True)


# The process that others start.


class Remote:
    """A worker process, and its answers within a limit."""

    def __init__(self, chosen: argparse.Namespace):
        words = [sys.executable, __file__, "--worker", "--out", str(chosen.out), "--peer", chosen.peer]
        words += ["--rehearse"] if chosen.rehearse else []
        self.log = (Path(chosen.out) / "worker.log").open("a")
        self.process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )
        self.answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                self.answers.put(line.removeprefix("RESULT "))
            else:
                self.log.write(line)
        self.answers.put(None)

    def ask(self, cell: Cell, seconds: float) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(cell.name + "\n")
        self.process.stdin.flush()
        try:
            answer = self.answers.get(timeout=seconds)
        except queue.Empty:
            self.end()
            return {"trouble": f"not within {seconds:.0f} s"}
        if answer is None:
            return {"trouble": f"the worker ended with {self.process.wait()}; see worker.log"}
        return json.loads(answer)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def too_large(cell: Cell, done: dict[str, dict]) -> bool:
    """Whether fewer volumes of the same did not fit."""
    smaller = (replace(cell, batch=n).name for n in BATCHES if n < cell.batch)
    return any(done.get(name, {}).get("trouble") == "does not fit" for name in smaller)


def measure(chosen: argparse.Namespace) -> dict[str, dict]:
    """All results that are there, after measuring what is missing for as long as there is time."""
    folder = Path(chosen.out) / "cells"
    folder.mkdir(parents=True, exist_ok=True)
    planned = [
        cell
        for cell in cells(bool(chosen.peer), chosen.rehearse)
        if not chosen.only or any(cell.name.startswith(name) for name in chosen.only)
    ]
    done = {
        cell.name: json.loads(file.read_text()) for cell in planned if (file := folder / f"{cell.name}.json").is_file()
    }
    end, remote = time.monotonic() + 60 * chosen.minutes, None
    # The first cell of a process pays for its start.
    start_s = 60.0
    for cell in planned:
        left = end - time.monotonic()
        if cell.name in done or too_large(cell, done):
            continue
        if left < 5:
            break
        begun = remote is None or not remote.alive
        if begun:
            remote = Remote(chosen)
        limit = cell.limit_s + (start_s if begun else 0)
        answer = remote.ask(cell, min(limit, left))
        if left < limit and "not within" in answer.get("trouble", ""):
            break  # the whole time was over, not the cell's own
        temporary = folder / f".{cell.name}.tmp"
        temporary.write_text(json.dumps(answer))
        temporary.replace(folder / f"{cell.name}.json")
        done[cell.name] = answer
        if "CUDA error" in answer.get("trouble", ""):
            remote.end()  # nothing works in that process any more
        print(f"{cell.name:<52}{told(answer)}", flush=True)
    if remote is not None:
        remote.end()
    return done


def told(answer: dict[str, Any]) -> str:
    if "trouble" in answer:
        return answer["trouble"]
    return "  ".join(f"{name} {value:.4g}" for name, value in answer.items() if isinstance(value, (int, float)))


def with_predictions(done: dict[str, dict], chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each update: measured, MFU by the data sheet, and what roofline.py predicts for this device, if it
    knows it."""
    from roofline import GPUS, predict

    device = next((a["device"] for name, a in done.items() if name.startswith("peak") and "device" in a), "")
    gpu = next((gpu for gpu in GPUS if gpu.name.split()[-1] in device), None)
    rows = []
    for cell in cells(bool(chosen.peer), chosen.rehearse):
        answer = done.get(cell.name)
        if cell.kind != "update" or answer is None:
            continue
        row = {"cell": cell.name, **answer}
        if gpu is not None or chosen.rehearse:
            # Of one batch size: what is counted once serves all others.
            config, preprocessing = settings_of(replace(cell, batch=8), chosen.rehearse)
            expected = predict(config, preprocessing, gpu or GPUS[-1], cell.batch, 1, cell.mode != "eager")
            row["predicted_ms"] = expected.step_ms
            if "ms" in answer:
                row["mfu"] = expected.flops / (answer["ms"] / 1e3) / expected.gpu.peak
        rows.append(row)
    return rows


def ten_minutes(done: dict[str, dict]) -> dict[str, float]:
    """Volumes that vit_s would see in ten minutes on 1, 8 and 64 devices: measured updates, and gradients sent after
    them."""
    from octfm.pretraining.learner import blueprint
    from octfm.volume.preprocessing import Preprocessing
    from roofline import settings

    trained = [p for p in blueprint(settings("ViT-S"), Preprocessing()).parameters() if p.requires_grad]
    sent = sum(4 * p.numel() for p in trained)
    found = {}
    # Devices, volumes of each in an update, and in one pass. The update itself is counted with every pass.
    for devices, volumes, size in ((1, 32, 8), (8, 4, 4), (64, 1, 1)):
        answer = done.get(Cell("update", budget=BUDGET, batch=size).name, {})
        if "ms" in answer:
            seconds = volumes / size * answer["ms"] / 1e3
            seconds += 2 * (devices - 1) / devices * sent / LINKS[devices] if devices > 1 else 0.0
            found[str(devices)] = TEN_MINUTES / seconds * devices * volumes
    return found


def report(done: dict[str, dict], chosen: argparse.Namespace) -> None:
    """Write gpu.json and gpu.md."""
    pairs = {}
    for cell in cells(bool(chosen.peer), chosen.rehearse):
        both = [done.get(replace(cell, kind=kind).name, {}).get("ms") for kind in ("peer", "equal")]
        if cell.kind == "peer" and all(both):
            pairs[cell.name] = both[0] / both[1]
    content = {
        "about": next((answer for name, answer in done.items() if name.startswith("peak")), {}),
        "commit": commit(),
        "cells": done,
        "updates": with_predictions(done, chosen),
        "times_peer": pairs,
        "volumes_in_ten_minutes": ten_minutes(done),
    }
    (chosen.out / "gpu.json").write_text(json.dumps(content, indent=1) + "\n")
    lines = [*one_row(content), ""]
    lines += ["| update | ms | predicted ms | MFU | volumes/s | memory, GB |", "|---|---|---|---|---|---|"]
    forms = {"ms": ".1f", "predicted_ms": ".1f", "mfu": ".0%", "volumes_per_s": ".1f", "memory_gb": ".2f"}
    for row in content["updates"]:
        values = [number(row.get(name), form) for name, form in forms.items()]
        lines.append(f"| {row['cell']} | {row.get('trouble') or ' | '.join(values)} |")
    lines += ["", "| other cell | found |", "|---|---|"]
    lines += [f"| {name} | {told(answer)} |" for name, answer in done.items() if not name.startswith("update")]
    (chosen.out / "gpu.md").write_text("\n".join([*lines, ""]))


def one_row(content: dict[str, Any]) -> list[str]:
    """The row for docs/log; in brackets the bars."""
    done = content["cells"]

    def found(kind: str) -> dict[str, Any]:
        return next((answer for name, answer in done.items() if name.startswith(f"{kind}-")), {})

    train, inputs, step = found("train"), found("inputs"), done.get(Cell("update", budget=BUDGET).name, {})
    share = None
    if "default_ms" in inputs and "ms" in step:
        share = (inputs["default_ms"] - inputs["plain_ms"]) / step["ms"]
    seen = content["volumes_in_ten_minutes"].values()
    columns = {
        "device": content["about"].get("device", "unknown"),
        "commit": content["commit"],
        "best MFU (45 %)": number(max((row["mfu"] for row in content["updates"] if "mfu" in row), default=None), ".0%"),
        "times vjepa2 (2)": number(min(content["times_peer"].values(), default=None), ".2f"),
        "waiting for data (5 %)": number(train.get("data_wait_share"), ".1%"),
        "augmentation": number(share, ".1%"),
        "checkpoint stall, s": number(train.get("checkpoint_stall_s"), ".2f"),
        "embedded, volumes/s": number(found("embed").get("volumes_per_s"), ".0f"),
        "volumes in ten minutes on 1, 8, 64": ", ".join(f"{n:,.0f}" for n in seen) or "not measured",
        "cells": f"{sum('trouble' not in answer for answer in done.values())} of {len(done)}",
    }
    return ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns), "| " + " | ".join(columns.values()) + " |"]


def number(value: float | None, form: str) -> str:
    return "not measured" if value is None else format(value, form)


def commit() -> str:
    """Of the code that is measured; a bundle carries it in a file."""
    root = Path(__file__).parents[1]
    if (root / "COMMIT").is_file():
        return (root / "COMMIT").read_text().strip()
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("gpu-results"))
    arguments.add_argument("--peer", default="", help="a clone of facebookresearch/vjepa2")
    arguments.add_argument("--minutes", type=float, default=2.5, help="for measuring; a rerun goes on")
    arguments.add_argument("--only", action="append", help="cells whose names begin so; may be given several times")
    arguments.add_argument("--rehearse", action="store_true", help="tiny sizes, on the CPU")
    arguments.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.worker:
        work(chosen)
        return
    report(measure(chosen), chosen)
    print((chosen.out / "gpu.md").read_text())


if __name__ == "__main__":
    main()
