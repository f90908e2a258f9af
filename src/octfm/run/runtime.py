"""Device, precision and ranks: with its half for XLA (runtime_xla.py) all that names devices, and all that talks to other processes.

Everything else trains as if it were alone: on one device every call here is a no-op or a plain function call. `ddp` keeps the whole model
on every rank and averages gradients once per update; `fsdp` keeps a share of it on each (FSDP2). Another engine is another answer to the
same calls; see `Runtime.place`.
"""

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octfm.config import Config, Seconds
from octfm.errors import ConfigError, OctfmError, TrainingError
from octfm.run.memory import host_bytes_at_peak, host_bytes_available
from octfm.run.optimizers import CompiledAdamW, ShardedAdamW

Precision = Literal["fp32", "bf16"]
Result = TypeVar("Result")
BUCKET = 32 * 2**20
"""Bytes of gradients that are sent at a time."""


class RuntimeConfig(Config):
    """How several ranks train one model; a launcher (torchrun) says how many there are."""

    parallel: Literal["ddp", "fsdp", "xla_spmd", "tpu"] = "ddp"
    """`ddp`: every rank holds the whole model. `fsdp`: every rank holds a share of weights, gradients and optimizer (FSDP2), for models
    that do not fit one device; checkpoints are then folders of shards."""
    timeout_s: Seconds = 600.0
    """When another rank does not answer for so long, the job ends with a message, and torchrun restarts it. Longer than the slowest
    checkpoint, validation and start."""


@dataclass(frozen=True, eq=False)
class Runtime:
    """Where tensors live, in which precision matrices multiply, and who else trains."""

    device: torch.device
    precision: Precision = "fp32"
    rank: int = 0
    world: int = 1
    sharded: bool = False
    """Each rank holds a share of every parameter (fsdp)."""
    timeout_s: float = 600.0
    background: Any = field(default=None, repr=False)
    """A process group of its own for the thread that writes sharded checkpoints."""
    devices: int = 1
    """Devices that this process gives its volumes to."""
    steady: bool = False
    """Every step must do the same work on the same shapes: it is compiled once."""

    @property
    def replicas(self) -> int:
        """Devices that share a global batch."""
        return self.world * self.devices

    @property
    def repeats(self) -> bool:
        """Whether a step that ran out of memory can be computed again, in smaller parts. With shards the other ranks are waiting, in the
        middle of gathering them, for exactly what this one was about to send."""
        return not self.sharded

    @property
    def leads(self) -> bool:
        """Whether this rank writes, speaks and decides what only one can."""
        return self.rank == 0

    # One device.

    def autocast(self) -> AbstractContextManager:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def scalar(self) -> Tensor:
        """A number on the device, to be `set`: what changes from step to step is never a constant of a compiled step."""
        # float64 on CPU, where kernels take it and give the bits that a Python number would.
        return torch.zeros((), dtype=torch.float64 if self.device.type == "cpu" else torch.float32, device=self.device)

    def set(self, scalar: Tensor, value: float) -> None:
        """Give a device number its value for the next step."""
        scalar.fill_(value)

    def numbers(self, *values: float) -> Tensor:
        """float32 [n] on the device, of what changes from step to step."""
        return torch.tensor(values, dtype=torch.float32).to(self.device, non_blocking=True)

    def read(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors that the host may look into, of this process's volumes. Where steps are compiled this ends what is compiled at once."""
        return list(tensors)

    def adamw(self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float]) -> torch.optim.AdamW:
        """AdamW that takes `found_inf`: with 1 it changes nothing."""
        if self.sharded:
            return ShardedAdamW(groups, lr, betas, self.local)
        if self.device.type == "tpu":
            return CompiledAdamW(groups, lr, betas, lambda tensor: tensor.to(self.device))
        return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0, fused=True)

    def follow(self, parameters: Iterable[Tensor], *inputs: Tensor) -> None:
        """A micro-batch of these inputs begins only when the gradients of the one before are there."""

    def peak_memory_gb(self) -> float:
        """Device memory on CUDA, resident memory of the process on CPU, in GB (1e9 bytes)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        return host_bytes_at_peak() / 1e9

    def release(self) -> None:
        """Give cached device memory back, after an allocation failed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def free_memory_gb(self) -> float:
        """What this rank could still allocate, in GB (1e9 bytes); ranks of one host share its memory."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] / 1e9
        return host_bytes_available() / 1e9 / (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.world > 1 else 1)

    def hardware(self) -> str:
        """What it is, for the record of a run."""
        name = (
            torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else platform.processor() or platform.machine()
        )
        return f"{self.device.type} ({name})"

    def measures(self, looked: bool) -> bool:
        """Whether a step computes what a look at it needs; where steps are compiled all of them are alike, whoever looks."""
        return looked or self.steady

    # The model on its devices.

    def place(self, model: nn.Module) -> None:
        """Move a model here, in place; with fsdp each rank keeps its share of every parameter and gathers one block at a time."""
        model.to(self.device)
        if not self.sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        # Root too: its weights would otherwise stay as they were before an update whenever a forward pass without gradients came last.
        for module in (
            *(block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part),
            model,
        ):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)

    def last_pass(self, model: nn.Module, last: bool) -> None:
        """Gradients of shards travel with the last micro-batch of a step only."""
        if self.sharded:
            model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Mean over ranks, in place. After all micro-batches, not during the last: a rank that ran out of memory repeats its own (F7).

        Shards have been averaged by the backward pass already.
        """
        if self.world == 1 or self.sharded:
            return
        buckets: list[list[Tensor]] = [[]]
        for parameter in parameters:
            if parameter.grad is None:
                continue
            if sum(g.nbytes for g in buckets[-1]) > BUCKET:
                buckets.append([])
            buckets[-1].append(parameter.grad)
        sent = []
        for gradients in buckets:
            flat = torch.cat([g.flatten() for g in gradients])
            sent.append((gradients, flat, dist.all_reduce(flat, async_op=True)))
        for gradients, flat, work in sent:
            work.wait()
            parts = (flat / self.world).split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        """Scale averaged gradients down to a global norm of `most`; the norm before that (F3)."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        return norm.full_tensor() if self.sharded else norm  # pyright: ignore[reportAttributeAccessIssue]

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's share of a parameter, sharing its memory; the tensor itself where it is whole."""
        return tensor.to_local() if self.sharded and hasattr(tensor, "to_local") else tensor  # pyright: ignore

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a sharded tensor, on every rank: all of them have to ask."""
        return tensor.full_tensor() if self.sharded and hasattr(tensor, "full_tensor") else tensor  # pyright: ignore

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        """Copy the whole `values` into a tensor of which this rank may hold a share."""
        if self.sharded and hasattr(tensor, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = tensor.device_mesh, tensor.placements  # pyright: ignore
            values = distribute_tensor(values.to(self.device), mesh, placements, src_data_rank=None)
        tensor.detach().copy_(values)

    # Other ranks. All of them make these calls, in the same order.

    def first(self, work: Callable[[], Result]) -> Result:
        """What `work` returns on rank 0, where alone it is called; its error is everyone's."""
        if self.world == 1:
            return work()
        told: list[Any] = [None, None]
        if self.leads:
            try:
                told[0] = work()
            except Exception as error:
                told[1] = error
        sendable = [
            told[0],
            told[1] if isinstance(told[1], OctfmError) or told[1] is None else TrainingError(f"rank 0: {told[1]}"),
        ]
        dist.broadcast_object_list(sendable, 0)
        if self.leads and told[1] is not None:
            raise told[1]
        if sendable[1] is not None:
            sendable[1].elsewhere = True
            raise sendable[1]
        return sendable[0]

    def exchange(self, values: np.ndarray) -> np.ndarray:
        """float64 [world, n] of every rank's float64 [n]."""
        if self.world == 1:
            return values[None]
        parts = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(parts, torch.from_numpy(np.asarray(values, np.float64)))
        return torch.stack(parts).numpy()

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0 the tensors of all ranks, one after the other along their first axis, whatever its lengths; elsewhere nothing of it."""
        if self.world == 1:
            return tensor
        lengths = self.exchange(np.array([len(tensor)]))[:, 0].astype(int)
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.world)] if self.leads else None
        dist.gather(padded, parts)
        return (
            torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]) if parts is not None else tensor[:0]
        )

    def told_by_first(self, value: Any) -> Any:
        """What rank 0 has for `value`, among the threads that write sharded checkpoints."""
        dist.broadcast_object_list(told := [value], 0, group=self.background)
        return told[0]

    def sum_(self, *tensors: Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def sum_shares_(self, tensor: Tensor) -> None:
        """Sum over the shares of sharded tensors, in place: what is whole everywhere is counted once."""
        if self.sharded:
            dist.all_reduce(tensor)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Give every rank the values of rank 0, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def part(self, items: np.ndarray) -> np.ndarray:
        """This rank's share of a list; shares follow each other in the order of ranks and may differ by one."""
        return np.array_split(items, self.world)[self.rank]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """A collective that fails or does not end within its timeout becomes one clear error."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not _failed_together(error):
                raise
            lines = " ".join(str(error).split())
            late = "imed out" in lines or "imeout" in lines
            what = f"did not answer within {self.timeout_s:g} s (runtime.timeout_s)" if late else "has gone"
            raise TrainingError(
                f"rank {self.rank} of {self.world}: another rank {what}{self._last_words()}; torchrun restarts the job from its last "
                "checkpoint if it may (--max-restarts), else run the same command again. The library said: "
                + lines[:160]
            ) from error

    def say(self, what: str) -> None:
        """Leave word of what this rank waits for, for the others to find should it never answer."""
        if self.world > 1:
            with suppress(RuntimeError):
                _store().set(f"waiting/{self.rank}", what)

    def _last_words(self) -> str:
        heard = []
        with suppress(RuntimeError):
            store = _store()
            for rank in (r for r in range(self.world) if r != self.rank):
                if store.check([f"waiting/{rank}"]):
                    heard.append(f"rank {rank} was {store.get(f'waiting/{rank}').decode()}")
        return f" ({'; '.join(heard)})" if heard else ""

    def close(self) -> None:
        """Leave the other ranks, once everything is done."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _failed_together(error: RuntimeError) -> bool:
    words = (
        "gloo",
        "NCCL",
        "ProcessGroup",
        "Connection closed by peer",
        "Connection reset",
        "process group",
        "collective",
        "Broken pipe",
    )
    return isinstance(error, dist.DistError) or any(word in str(error) for word in words)


def start(precision: Precision = "fp32", device: str | None = None) -> Runtime:
    """One device: the one asked for, else CUDA where there is one, else CPU. Several ranks are refused, not ignored (F10)."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world}: only octfm pretrain and finetune share work among ranks; start everything else without torchrun"
        )
    return Runtime(device_named(device), precision)


def device_named(name: str | None, local_rank: int | None = None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.split(":")[0] not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu or cuda (cuda:1 for the second), got {name!r}")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} was asked for, but torch {torch.__version__} finds no CUDA device here; use device cpu"
        )
    if local_rank is not None and name.startswith("cuda"):
        if local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"rank {local_rank} of this host has no CUDA device: there are {torch.cuda.device_count()}; start fewer ranks"
            )
        torch.cuda.set_device(local_rank)
        name = f"cuda:{local_rank}"
    return torch.device(name)


def environment(runtime: Runtime) -> dict[str, str]:
    """What a reader needs to know to repeat a run; no host or user names."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": runtime.hardware(),
        "threads": str(torch.get_num_threads()),
        "precision": runtime.precision,
        "ranks": str(runtime.world),
        "parallel": "xla_spmd"
        if runtime.steady
        else ("fsdp" if runtime.sharded else "ddp")
        if runtime.world > 1
        else "single",
    }
