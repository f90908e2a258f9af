"""Memory and arithmetic of an optimizer step: the run's networks run on fake tensors, and allocations are counted."""

import functools
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octfm.models.objectives.objective import Objective, ObjectiveOutput, View
from octfm.models.token_map import token_grid
from octfm.models.vit3d import TokenIndex, VisionTransformer3D, count_parameters
from octfm.pretraining import augment
from octfm.pretraining.inputs import view_of
from octfm.pretraining.learner import blueprint, grid_of
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import Runtime
from octfm.volume.preprocessing import Preprocessing

GB = 1e9
ALLOCATOR = {"cpu": 1.15, "cuda": 1.0}
"""What allocators keep beyond live tensors. Measured on CPU (glibc): 1.05 to 1.3, shrinking as tensors grow; without
its heap, 1.02. On an H200 torch's took .78 (float32) and .85 (bfloat16) of what the CPU's factor says."""
GRAPHS = 0.6
"""Memory of the CUDA graphs of compiled passes over that of uncompiled ones, which inspected steps need as well: on an
H200 2.5 and 4.2 GB (ViT-S, 8 volumes of 3,072 tokens)."""
FEW_TOKENS = 1024
"""Tokens with which a CPU's rate is measured, unless one volume has more: larger batches are hardly faster there."""


@dataclass(frozen=True)
class Cost:
    """Resources of one optimizer step with its micro-batches."""

    weights_bytes: int
    """Weights, gradients, both moments and target encoder, or a rank's share of them; needed for any batch size."""
    peak_bytes: int
    """Peak memory of a step or of the start, weights_bytes included, on the rank that needs most."""
    flops: float
    """Floating-point operations of matrix products and attention, over all micro-batches."""
    moved_bytes: float
    """Bytes written by all kernels, over all micro-batches."""
    kernels: int
    """Kernels launched one by one, over all micro-batches; those of a graph are launched at once and not counted."""


@functools.lru_cache(maxsize=32)
def step_cost(
    config: PretrainConfig,
    preprocessing: Preprocessing,
    micro_batch: int,
    micro_steps: int,
    ranks: int = 1,
    sharded: bool = False,
    device: str = "cpu",
    graphs: bool = False,
) -> Cost:
    """The cost of forward, backward and logging for one rank's micro-batch, from fake tensors, in a second for ViT-S.

    `sharded`: every rank holds a share of weights, gradients and moments (fsdp). `device`: its kind, such as cuda.
    `graphs`: passes of steps that are not inspected are CUDA graphs. Live tensors are counted to a percent, workspaces
    of kernels are not seen; on CPU the estimate is within 20 % of what a run's process grows by."""
    sharded = sharded and ranks > 1
    model = blueprint(config, preprocessing)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    teacher = model.parameters_by_part()["target_encoder"]
    shares = ranks if sharded else 1
    ledger, flops, output = _fake_pass(config, preprocessing, model, micro_batch, sharded)
    # A logged step keeps goals and features of every micro-batch until its end; the ledger has seen those of one.
    goals = 4 * (output.masked_goal_BTD.numel() + output.context_goal_BCD.numel())
    logged = goals + 4 * output.features_BMD.numel()
    kept_bytes = (micro_steps - 1) * logged
    weights = 4 * (3 * trained + count_parameters(model)) // shares
    # With accumulation, whole gradients exist from the second pass on; the ledger counts them only without shards.
    forward = ledger.peak + (4 * trained if micro_steps > 1 else 4 * trained // shares if sharded else 0)
    gathered = _gathered(model) if sharded else 0
    keeps = ALLOCATOR.get(device, ALLOCATOR["cpu"]) + GRAPHS * graphs
    activations = 4 * (2 * trained + count_parameters(model)) // shares + int(keeps * (forward + kept_bytes + gathered))
    # Measuring health: medians and distances over all goals, in float32; rank 0 collects those of all ranks.
    copies = 3.0 if ranks == 1 else 1.5 + 2.5 * ranks
    # Inspection follows the backward pass: its copies come on top of the weights, not of the activations.
    inspecting = weights + 4 * teacher // shares + int(copies * micro_steps * logged)
    held_out = config.validation_volumes * goals // micro_batch
    validating = weights + 2 * held_out + gathered
    # Every rank makes the same whole networks before it keeps its share of them.
    starting = 4 * count_parameters(model) if sharded else 0
    return Cost(
        weights_bytes=weights,
        peak_bytes=max(activations, inspecting, validating, starting),
        flops=flops * micro_steps,
        moved_bytes=float(ledger.total) * micro_steps + 28.0 * trained / shares,
        kernels=0 if graphs else ledger.kernels * micro_steps,
    )


def _fake_pass(
    config: PretrainConfig, preprocessing: Preprocessing, model: Objective, micro_batch: int, sharded: bool
) -> "tuple[_Ledger, float, ObjectiveOutput]":
    """Forward and backward of one micro-batch on fake tensors, which `model` gets as well: its live bytes, its
    floating-point operations, and what the objective returned."""
    # Imported here: it takes a second, and resumed runs and embedding never need it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    grid = token_grid(preprocessing.image_size, config.model.patch_size)
    sets = [config.masks.heaviest] + ([config.masks.large] if config.masks.large is not None else [])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to_empty(device="cpu")
        if sharded:
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter.register_post_accumulate_grad_hook(_give_away)
        # Views of weights take no memory of their own. For one process they are counted all the same: only then does
        # the estimate agree with its runs, so something else of that size must be missing (docs/log).
        ledger = _Ledger(model.parameters() if sharded else ())
        with ledger:
            views = [
                fake_view(config, preprocessing, micro_batch, *own.counts(grid))
                for _ in range(config.objective.num_views)
                for own in sets
            ]
            with torch.autocast("cpu", torch.bfloat16, enabled=config.precision == "bf16"):
                output = model(views, config.objective.context_loss)
            output.loss.backward()
    return ledger, float(ledger.flops), output


def _give_away(parameter: torch.Tensor) -> None:
    """Free a gradient as soon as it is known, as reduce-scatter does: the ranks that hold its shares receive it."""
    parameter.grad = None


def _gathered(model: torch.nn.Module) -> int:
    """Bytes that one rank holds whole for a while (fsdp): what is outside blocks, and of two blocks at a time weights
    and gradients, each with the buffer that it travels in."""
    blocks = [
        count_parameters(block) for part in model.modules() if isinstance(part, torch.nn.ModuleList) for block in part
    ]
    return 4 * (2 * (count_parameters(model) - sum(blocks)) + 4 * max(blocks, default=0))


def fake_view(
    config: PretrainConfig, preprocessing: Preprocessing, batch: int, kept: int, num_context: int, num_target: int
) -> View:
    """What `make_inputs` allocates on the device for one view of a micro-batch."""
    places = (torch.zeros(batch, n, dtype=torch.int64) for n in (kept, num_context, num_target))
    index = TokenIndex(*places, tissue=torch.ones(batch, kept, dtype=torch.bool))
    voxels = torch.zeros(batch, 1, *preprocessing.image_size, dtype=torch.uint8)
    labels = None if config.data.phantoms is None else torch.zeros_like(voxels)
    drawn = augment.draw(config.augment, [np.random.default_rng(0)] * batch)

    def fake(array: np.ndarray) -> torch.Tensor:
        return torch.zeros(array.shape, dtype=torch.from_numpy(array).dtype)

    return view_of(config, preprocessing, fake, voxels, labels, drawn, index)


def _flops_by_operator() -> dict[Any, Callable[..., int]]:
    """Floating-point operations from an operator's arguments and result. FlopCounterMode, which also counts by module,
    would double the time; torch counts neither the CPU's fused attention nor oneDNN's products."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    counts = {
        **flop_registry,
        flash: lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape),
        backward: lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape),
    }
    if (product := getattr(torch.ops.mkldnn, "_linear_pointwise", None)) is not None:  # octfm.models.products
        counts[product] = lambda a, *_, out_val, **__: 2 * a.shape[-1] * out_val.numel()
    return counts


# Storages instead of tensors, because views share them.
class _Ledger(TorchDispatchMode):
    """Counts operations, and live bytes: a storage is added when an operator first returns it and removed when its last
    tensor dies."""

    def __init__(self, elsewhere: Iterable[torch.Tensor] = ()):
        """`elsewhere`: tensors that are counted by others."""
        super().__init__()
        self._flops_of = _flops_by_operator()
        self.live = self.peak = self.total = self.kernels = self.flops = 0
        self._known: set[int] = {tensor.untyped_storage()._cdata for tensor in elsewhere}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (flops := self._flops_of.get(func.overloadpacket)) is not None:
            self.flops += flops(*args, **kwargs, out_val=result)
        new = False
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._known:
                continue
            new = True
            size = storage.nbytes()
            self._known.add(key)
            self.live += size
            self.total += size
            self.peak = max(self.peak, self.live)
            # An address may be used again, so a storage is forgotten as soon as it dies.
            weakref.finalize(storage, self._free, key, size)
        self.kernels += new
        return result

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def step_seconds(cost: Cost, runtime: Runtime, config: PretrainConfig, preprocessing: Preprocessing) -> float:
    """Forecast of one step on this device; measuring its rates takes a tenth of a second, on CPUs of large models more.

    On a CPU: from the rate at which a network of one block with the run's own widths and number of tokens goes forward
    and backward, elementwise work included. Elsewhere: products, memory traffic (each written byte was also read twice)
    and launches, one after the other."""
    if runtime.device.type == "cpu":
        return cost.flops / block_flops_per_s(runtime, config, preprocessing)
    block = torch.zeros(4_000_000, device=runtime.device)
    one = torch.zeros(1, device=runtime.device)
    bytes_per_s = 3 * block.nbytes * _rate(lambda: block + block)
    kernels_per_s = 20 * _rate(lambda: [one + one for _ in range(20)][-1])
    products = cost.flops / product_flops_per_s(runtime, config, preprocessing)
    return products + 3 * cost.moved_bytes / bytes_per_s + cost.kernels / kernels_per_s


@torch.no_grad()
def product_flops_per_s(runtime: Runtime, config: PretrainConfig, preprocessing: Preprocessing) -> float:
    """This device's rate for products of the run's own shape and of the runtime's precision."""
    grid = token_grid(preprocessing.image_size, config.model.patch_size)
    width, tokens = config.model.width, config.masks.counts(grid)[0] * config.data.per_device_batch_size
    dtype = torch.bfloat16 if runtime.precision == "bf16" else torch.float32
    rows = max(256, min(4096, tokens))
    random = torch.Generator().manual_seed(0)
    shapes = (rows, width), (width, 4 * width)
    a, b = (torch.randn(shape, generator=random).to(runtime.device, dtype) for shape in shapes)
    return 2 * prod((rows, width, 4 * width)) * _rate(lambda: a @ b)


def block_flops_per_s(runtime: Runtime, config: PretrainConfig, preprocessing: Preprocessing) -> float:
    """The CPU's rate, in operations of products and attention, for an encoder of one block, forward and backward."""
    grid = grid_of(preprocessing, config.model.patch_size)
    tokens, model = config.masks.counts(grid.shape)[1], config.model.model_copy(update={"depth": 1, "summary": 0})
    with torch.random.fork_rng(devices=[]):
        network = VisionTransformer3D(model, grid)
    volumes = min(config.data.per_device_batch_size, max(1, FEW_TOKENS // tokens))
    patches = torch.zeros(volumes, tokens, prod(model.patch_size))
    index = torch.arange(tokens).expand(volumes, -1)

    def forward_and_backward() -> torch.Tensor:
        with runtime.autocast():
            loss = network(patches, index).float().sum()
        loss.backward()
        return loss

    # Counted as the step's are, with what checkpointing computes twice.
    with _Ledger() as ledger:
        forward_and_backward()
    return ledger.flops * _rate(forward_and_backward)


def _rate(work) -> float:
    """Calls per second, the best of three short windows: another process may have had the device in one."""
    # The first call compiles or loads kernels.
    work().flatten()[0].item()
    best = 0.0
    for _ in range(3):
        start, calls, batch = time.perf_counter(), 0, 1
        while (elapsed := time.perf_counter() - start) < 0.01:
            for _ in range(batch):
                result = work()
            result.flatten()[0].item()  # waits for the device
            calls, batch = calls + batch, 2 * batch
        best = max(best, calls / elapsed)
    return best
