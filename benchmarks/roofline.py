"""What a GPU should need for one optimizer step, per class of kernels: `python benchmarks/roofline.py`.

The run's own networks run on fake tensors, and every operator's arithmetic and bytes are counted as eager torch moves
them on CUDA. An operator takes as long as its arithmetic or its bytes, whichever is longer, at the rates of GPUS; the
host needs LAUNCH_S for each. Compiled, what stands between two products is one kernel: it reads each result of a
product once and writes each operand once. Nothing here is measured; benchmarks/gpu.py measures.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from unittest.mock import patch

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.module_tracker import ModuleTracker

from octfm.models import vit3d
from octfm.models.token_map import token_grid
from octfm.models.vit3d import count_parameters
from octfm.pretraining.learner import blueprint
from octfm.pretraining.preflight.cost import fake_view
from octfm.pretraining.settings import PretrainConfig, load_config
from octfm.volume.preprocessing import Preprocessing

VIT_B = ("model.width=768", "model.heads=12")
CLASSES = ("attention", "products", "elementwise", "input, embedding", "loss", "clip, AdamW", "average (EMA)")
LAUNCH_S = 6e-6
"""Of the host, per operator of eager torch: assumed."""


@dataclass(frozen=True)
class Gpu:
    """Dense bf16 and memory rates of the data sheet, and the shares of them that good kernels reach: assumed."""

    name: str
    peak: float
    """FLOP/s in bf16 with float32 accumulation."""
    bandwidth: float
    """Bytes/s."""
    memory_gb: float
    products: float = 0.8
    attention: float = 0.4
    """Flash attention with heads of 64, forward and backward."""
    traffic: float = 0.85

    def seconds(self, work: "Work") -> float:
        """Of one operator: its arithmetic or its bytes, whichever takes longer."""
        return max(self.arithmetic(work), work.moved / (self.traffic * self.bandwidth))

    def arithmetic(self, work: "Work") -> float:
        reached = self.attention if work.kind == "attention" else self.products
        return work.flops / (reached * self.peak)


GPUS = (
    Gpu("RTX 4090", 165e12, 1.008e12, 24, attention=0.6),
    Gpu("H200", 989e12, 4.8e12, 141),
)


@dataclass(frozen=True)
class Work:
    """One operator of one micro-batch."""

    kind: str
    flops: float
    moved: float
    """Bytes read and written."""
    border: float = 0.0
    """Of products and attention: bytes of activations that kernels before and after them write and read."""


class _Counter(TorchDispatchMode):
    """Records every operator that does something, with the class that it belongs to."""

    def __init__(self, tracker: ModuleTracker, parameters: set[tuple[int, ...]]):
        super().__init__()
        self.tracker, self.shapes, self.found = tracker, parameters, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view or func.namespace not in ("aten", "mkldnn"):
            return result
        name = func.overloadpacket.__name__
        read = [x for x in _flat((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        written = [x for x in _flat(result) if isinstance(x, torch.Tensor)]
        if name in ("detach", "empty", "empty_like", "new_empty", "_to_copy") and not any(x.numel() for x in read):
            return result
        inside = {part for parent in self.tracker.parents for part in parent.split(".")}
        flops = _flops(name, read, written)
        moved = float(sum(x.numel() * x.element_size() for x in (*read, *written)))
        border = 0.0
        if "scaled_dot_product" in name:
            kind, border = "attention", moved
        elif "patch_embed" in inside or len(inside - {"Global"}) == 0:
            # Outside of all modules: patches are cut out, moved and normalised.
            kind = "input, embedding"
        elif flops:
            kind = "products"
            border = float(
                sum(x.numel() * x.element_size() for x in (*read, *written) if tuple(x.shape) not in self.shapes)
            )
        elif len(inside - {"Global"}) == 1:
            kind = "loss"
        else:
            kind = "elementwise"
        # CUDA's autocast computes norms in float32: what is bf16 is copied to float32 before and back after.
        if name.startswith("native_layer_norm") and read[0].dtype is torch.bfloat16:
            moved *= 5 if name == "native_layer_norm" else 4
        self.found.append(Work(kind, flops, moved, border))
        return result


def _flat(values):
    if isinstance(values, dict):
        values = values.values()
    if not isinstance(values, (list, tuple, type({}.values()))):
        return [values]
    return [x for value in values for x in _flat(value)]


def _flops(name: str, read: list[torch.Tensor], written: list[torch.Tensor]) -> float:
    if "scaled_dot_product" in name:
        backward = "backward" in name
        (b, h, n, k), m = read[int(backward)].shape, read[1 + int(backward)].shape[2]
        return (10.0 if backward else 4.0) * b * h * n * m * k
    if name in ("mm", "bmm", "addmm"):
        a = read[1] if name == "addmm" else read[0]
        return 2.0 * prod(written[0].shape) * a.shape[-1]
    return 0.0


def micro_batch_work(config: PretrainConfig, preprocessing: Preprocessing, volumes: int) -> list[Work]:
    """All operators of the forward and backward pass of one micro-batch."""
    # What every operator computes and moves is a constant and a share for each volume. From two volumes on: with one,
    # some copies are not needed.
    two, three = (_counted(config, preprocessing, count) for count in (2, 3))

    def of(a: float, b: float) -> float:
        return a + (volumes - 2) * (b - a)

    return [
        Work(a.kind, of(a.flops, b.flops), of(a.moved, b.moved), of(a.border, b.border))
        for a, b in zip(two, three, strict=True)
    ]


@cache
def _counted(config: PretrainConfig, preprocessing: Preprocessing, volumes: int) -> tuple[Work, ...]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = blueprint(config, preprocessing)
    counts = config.masks.heaviest.counts(token_grid(preprocessing.image_size, config.model.patch_size))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        shapes = {shape for p in model.parameters() for shape in (tuple(p.shape), tuple(p.shape)[::-1])}
        tracker = ModuleTracker()
        # A CPU would attend by other kernels than CUDA.
        with tracker, _Counter(tracker, shapes) as counter, patch.object(vit3d, "attend", scaled_dot_product_attention):
            view = fake_view(config, preprocessing, volumes, *counts)
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
                loss = model([view], config.objective.context_loss).loss
            loss.backward()
    return tuple(counter.found)


def update_work(config: PretrainConfig, preprocessing: Preprocessing) -> list[Work]:
    """Clipping, AdamW and the average: once per step."""
    model = blueprint(config, preprocessing)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    teacher = count_parameters(model) - trained
    tensors = sum(p.requires_grad for p in model.parameters())
    # Norm and scaling read the gradients twice and write them once; AdamW reads four tensors and writes three; decay
    # reads and writes the weights.
    trained_bytes = 4.0 * trained * (3 + 7 + 2)
    few = 40  # kernels over many tensors at once take up to a few hundred each
    works = [Work("clip, AdamW", 0.0, trained_bytes / few)] * few
    # One kernel for each tensor: weights of `_foreach_lerp_` that are tensors take no shared one.
    each = max(1, tensors * teacher // max(1, trained))
    return works + [Work("average (EMA)", 0.0, 12.0 * teacher / each)] * each


@dataclass(frozen=True)
class Prediction:
    """One optimizer step on one GPU."""

    ms: dict[str, float]
    """Of each class, in CLASSES."""
    bound: dict[str, str]
    """What takes most of the time of each class: arithmetic or memory."""
    flops: float
    moved: dict[str, float]
    flops_of: dict[str, float]
    host_ms: float
    gpu: Gpu
    volumes: int

    @property
    def step_ms(self) -> float:
        """The device or the host, whichever takes longer."""
        return max(sum(self.ms.values()), self.host_ms)

    @property
    def mfu(self) -> float:
        """Products and attention of the step as a share of the data sheet's peak."""
        return self.flops / (self.step_ms / 1e3) / self.gpu.peak

    @property
    def bounded_by(self) -> str:
        if self.host_ms > sum(self.ms.values()):
            return "host"
        return max(self.ms, key=lambda kind: self.ms[kind])


def predict(
    config: PretrainConfig,
    preprocessing: Preprocessing,
    gpu: Gpu,
    micro_batch: int,
    passes: int,
    compiled: bool = False,
) -> Prediction:
    """One step of `passes` micro-batches. `compiled`: everything between two products is one kernel, and the host
    launches a graph."""
    works = micro_batch_work(config, preprocessing, micro_batch) * passes + update_work(config, preprocessing)
    seconds, moved, flops = (defaultdict(float, dict.fromkeys(CLASSES, 0.0)) for _ in range(3))
    arithmetic = defaultdict(float)
    border = sum(work.border for work in works)
    between = sum(work.moved for work in works if work.kind in ("elementwise", "loss"))
    shrink = min(1.0, border / between) if compiled else 1.0
    for work in works:
        if work.kind in ("elementwise", "loss"):
            work = replace(work, moved=work.moved * shrink)
        seconds[work.kind] += gpu.seconds(work)
        arithmetic[work.kind] += gpu.arithmetic(work) if gpu.arithmetic(work) == gpu.seconds(work) else 0.0
        moved[work.kind] += work.moved
        flops[work.kind] += work.flops
    bound = {kind: "arithmetic" if arithmetic[kind] > seconds[kind] / 2 else "memory" for kind in CLASSES}
    host = 0.0 if compiled else len(works) * LAUNCH_S * 1e3
    ms = {kind: 1e3 * seconds[kind] for kind in CLASSES}
    return Prediction(ms, bound, sum(flops.values()), dict(moved), dict(flops), host, gpu, micro_batch * passes)


def settings(name: str, *overrides: str) -> PretrainConfig:
    """vit_s, or the same with a ViT-B, with `overrides`."""
    return load_config("vit_s", [*(VIT_B if name == "ViT-B" else ()), *overrides])


def table(name: str, micro_batch: int) -> list[str]:
    """A Markdown table of the classes of one model's step on all GPUs."""
    config, pre = settings(name), Preprocessing()
    passes = config.data.global_batch_size // micro_batch
    found = [predict(config, pre, gpu, micro_batch, passes) for gpu in GPUS]
    lines = [
        f"**{name}/12, 3,072 of 9,216 tokens, {config.data.global_batch_size} volumes in {passes} passes of "
        f"{micro_batch}, bf16, eager**: {found[0].flops / 1e12:.1f} TFLOP per step.",
        "",
        "| class | TFLOP | GB moved | " + " | ".join(f"{gpu.name}, ms | bound by" for gpu in GPUS) + " |",
        "|---|---|---|" + "---|---|" * len(GPUS),
    ]
    for kind in CLASSES:
        cells = " | ".join(f"{p.ms[kind]:.1f} | {p.bound[kind]}" for p in found)
        lines.append(f"| {kind} | {found[0].flops_of[kind] / 1e12:.2f} | {found[0].moved[kind] / 1e9:.1f} | {cells} |")
    cells = " | ".join(f"**{p.step_ms:.0f}** | MFU {p.mfu:.0%}" for p in found)
    lines.append(f"| **step** | {found[0].flops / 1e12:.2f} | {sum(found[0].moved.values()) / 1e9:.1f} | {cells} |")
    cells = " | ".join(f"{p.host_ms:.0f} | beside it" for p in found)
    return [*lines, f"| host, launching | | | {cells} |", ""]


def summary() -> list[str]:
    """A Markdown table of steps of both models, token budgets and sizes on all GPUs, eager and compiled."""
    lines = [
        "| network | volume, tokens, passes × volumes | "
        + " | ".join(f"{g.name}, eager | compiled, graph" for g in GPUS)
        + " |",
        "|---|---|" + "---|---|" * len(GPUS),
    ]
    for name in ("ViT-S", "ViT-B"):
        for image, budget, micro in (
            ((64, 384, 384), 3072, 8), ((64, 384, 384), None, 4), ((32, 192, 192), None, 8), ((32, 192, 192), None, 1),
        ):  # fmt: skip
            config = settings(name, f"masks.budget={budget or 'null'}")
            pre = Preprocessing().model_copy(update={"image_size": image})
            tokens = min(budget or 10**9, prod(token_grid(image, config.model.patch_size)))
            passes = 32 // micro if micro > 1 else 1
            cells = []
            for gpu in GPUS:
                both = [predict(config, pre, gpu, micro, passes, compiled) for compiled in (False, True)]
                cells += [f"{number(p.step_ms)} ms, {p.mfu:.0%}, {p.bounded_by}" for p in both]
            lines.append(f"| {name} | {list(image)}, {tokens:,}, {passes} × {micro} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def step_work(build: Callable[[], Callable[[], None]]) -> list[Work]:
    """All operators of one eager step that `build` makes, without its optimizer."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    attend = patch.object(vit3d, "attend", scaled_dot_product_attention)
    # Fake tensors have no values for the host to read: AdamW's step number, vjepa2's rates of dropping paths, bounds of
    # initial weights.
    resting = patch.object(torch.optim.AdamW, "step", lambda self: None)
    zeros = patch.object(torch.nn.init, "trunc_normal_", lambda tensor, **_: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), attend, resting, torch.autocast("cpu", torch.bfloat16):
        with patch.object(torch, "linspace", np.linspace), zeros:
            step = build()
        tracker = ModuleTracker()
        with tracker, _Counter(tracker, set()) as counter:
            step()
    return counter.found


def beside_peer(path: str) -> list[str]:
    """A Markdown table of eager steps of facebookresearch/vjepa2 and of octfm at equal work (step.py)."""
    from step import SIZES, build_ours, build_peer

    lines = ["| volumes | " + " | ".join(f"{g.name}: vjepa2, ms | octfm, ms | times" for g in GPUS) + " |"]
    lines.append("|---|" + "---|---|---|" * len(GPUS))
    for name, batch in (("32", 1), ("32", 8), ("64", 1), ("64", 8)):
        size, cells = SIZES[name], []
        works = [
            step_work(partial(build_peer, path, size, batch)),
            step_work(partial(build_ours, size, batch, None, equal=True)),
        ]
        hosts = [1e3 * LAUNCH_S * len(work) for work in works]
        for gpu in GPUS:
            devices = [1e3 * sum(gpu.seconds(each) for each in work) for work in works]
            peer, own = (max(pair) for pair in zip(devices, hosts, strict=True))
            said = [
                f"{number(ms)} ({'host' if host > device else 'device'})"
                for ms, host, device in zip((peer, own), hosts, devices, strict=True)
            ]
            cells += [*said, f"{peer / own:.2f}"]
        lines.append(f"| {batch} of {list(size)} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peer", help="a clone of facebookresearch/vjepa2: print only how octfm compares with it")
    chosen = arguments.parse_args()
    if chosen.peer:
        print("\n".join(beside_peer(chosen.peer)))
        return
    for name in ("ViT-S", "ViT-B"):
        print("\n".join(table(name, 8)))
    print("\n".join(summary()))


if __name__ == "__main__":
    main()
