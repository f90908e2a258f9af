"""Device, precision and ranks: what a step needs of the device and of other processes goes through a `Runtime`.

Training code calls it as if it were alone: on a single device every call here does nothing or is a plain function
call. `ddp` keeps the whole model on every rank and averages gradients once per update; `fsdp` keeps a share of it on
each (FSDP2). Another engine implements the same calls, as runtime_xla.py does. launch.py joins the ranks, shards.py
writes their shares.
"""

import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from pydantic import model_validator
from torch import Tensor, nn

from octfm.config import Config, Seconds
from octfm.errors import ConfigError, OctfmError, TrainingError, reason_of
from octfm.io.ranks import rank, world_size
from octfm.run.memory import host_bytes_at_peak, host_bytes_available
from octfm.run.optimizers import CompiledAdamW, ShardedAdamW
from octfm.threads import held_while_forking

if dist.is_available():
    # Defaults of its functions are the group of all ranks at its import. torch imports it when it needs it, after the
    # ranks have met; their group then outlives destroy_process_group, and gloo's threads the end of Python.
    import torch.distributed.nn.functional

Precision = Literal["fp32", "bf16"]
Result = TypeVar("Result")
BUCKET = 32 * 2**20
"""Bytes of gradients per all-reduce."""
WITHOUT_FLOAT64 = {"mps"}
"""Kinds of devices that do not compute in float64."""
WORTH_COMPILING = 2000
"""Updates of a run from which compiling gains more time than it takes: on an H200 a minute, against .04 s per pass."""
PROGRAMS = 256
"""Compiled programs of networks of one kind that a process may hold: one for each stage of masks of each run."""
PLAIN_ADAMW = {"tpu", "mps"}
"""Kinds of devices without a fused AdamW that knows `found_inf`."""


class RuntimeConfig(Config):
    """How several ranks train one model; a launcher (torchrun) says how many there are."""

    parallel: Literal["ddp", "fsdp", "xla_spmd", "tpu"] = "ddp"
    """`ddp`: every rank holds the whole model. `fsdp`: every rank holds a share of weights, gradients and optimizer
    (FSDP2), for models that do not fit one device; checkpoints are then folders of shards."""
    compile: bool | None = None
    """Compile networks and loss (torch.compile) for steps that are not inspected: the same to rounding. The first such
    step takes about a minute; CUDA needs Triton, and both a C or C++ compiler. With `ddp` only. Null: with CUDA, in
    runs of at least 2,000 updates (in each of masks.stages), unless torch cannot compile them or the objective gathers
    statistics."""
    timeout_s: Seconds = 600.0
    """If another rank does not answer for so long, the job ends with a message, and torchrun restarts it. Must be
    longer than the slowest checkpoint, validation and start."""

    @model_validator(mode="after")
    def _compiles(self) -> "RuntimeConfig":
        if self.compile and self.parallel != "ddp":
            raise ValueError(f"compile true goes with parallel ddp (also on one device), got {self.parallel}")
        return self


@contextmanager
def torch_defaults() -> Iterator[None]:
    """torch as it is after its import. Its caller, such as a notebook, may have set another default dtype or device for
    networks of its own, or turned gradients off or autocast on; all of that is as before when the context ends."""
    dtype = torch.get_default_dtype()
    with ExitStack() as undo:
        if dtype != torch.float32:
            undo.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":  # a context of a device makes every call slower
            undo.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                undo.enter_context(torch.autocast(kind, enabled=False))
        undo.enter_context(torch.inference_mode(False))
        undo.enter_context(torch.enable_grad())
        yield


_THREADS = held_while_forking(threading.Lock())
_usual_threads: list[int] = []
"""For every thread inside `torch_threads`, the number to restore."""


@contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """torch with so many threads in the calling one. A thread that starts meanwhile begins with that number too, so
    that those inside together restore what the first of them found."""
    with _THREADS:
        before = _usual_threads[0] if _usual_threads else torch.get_num_threads()
        _usual_threads.append(before)
        torch.set_num_threads(number)
    try:
        yield
    finally:
        with _THREADS:
            _usual_threads.pop()
            torch.set_num_threads(before)


@dataclass(frozen=True, eq=False)
class Runtime:
    """Where tensors are, in which precision matrices multiply, and which other ranks train."""

    device: torch.device
    precision: Precision = "fp32"
    rank: int = 0
    world: int = 1
    sharded: bool = False
    """Each rank holds a share of every parameter (fsdp)."""
    timeout_s: float = 600.0
    background: Any = field(default=None, repr=False)
    """Process group of the threads that write sharded checkpoints."""
    devices: int = 1
    """Devices that share this process's volumes."""
    compiles: bool = False
    """Steps that are not inspected run compiled (runtime.compile); with CUDA, each pass is a graph."""
    insists: bool = True
    """Whether a step that torch cannot compile ends the run, instead of running uncompiled (runtime.compile null)."""
    steady: bool = False
    """Steps are compiled once: all must do the same work on the same shapes."""

    @property
    def replicas(self) -> int:
        """Devices that share a global batch."""
        return self.world * self.devices

    @property
    def repeats(self) -> bool:
        """Whether a step that ran out of memory can be computed again in smaller parts. Not with shards: the other
        ranks wait, in the middle of gathering them, for exactly what this rank was about to send."""
        return not self.sharded

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which writes, prints and decides for all."""
        return self.rank == 0

    # One device.

    def autocast(self) -> AbstractContextManager:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def tensor(self, array: np.ndarray) -> Tensor:
        """A copy on the device. The array must stay as it is until the host has waited for a result that needs it."""
        # torch accepts no negative strides, which a mirrored view has.
        return self._pinned(torch.from_numpy(np.ascontiguousarray(array))).to(self.device, non_blocking=True)

    def host_memory(self, size: int) -> np.ndarray:
        """uint8 [size] of the host that a device copies from without waiting: page-locked with CUDA."""
        if self.device.type == "cuda":
            with suppress(RuntimeError):  # the system grants only so much
                return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
        return np.empty(size, np.uint8)

    def _pinned(self, host: Tensor) -> Tensor:
        """The tensor in page-locked memory with CUDA: from any other it would first wait for all work before."""
        return host.pin_memory() if self.device.type == "cuda" and not host.is_pinned() else host

    def scalar(self) -> Tensor:
        """A number on the device, for `set`: what changes between steps must not be a constant of a compiled step."""
        # float64 on CPU, where kernels accept it and give the same bits as a Python number.
        return torch.zeros((), dtype=torch.float64 if self.device.type == "cpu" else torch.float32, device=self.device)

    def set(self, scalar: Tensor, value: float) -> None:
        """Set a device number for the next step."""
        scalar.fill_(value)

    def numbers(self, *values: float) -> Tensor:
        """float32 [n] on the device, for values that change from step to step."""
        return self._pinned(torch.tensor(values, dtype=torch.float32)).to(self.device, non_blocking=True)

    def read(self, *tensors: Tensor) -> list[Tensor]:
        """The parts of tensors of this process's volumes, for the host to read. With XLA, this ends the program."""
        return list(tensors)

    def adamw(self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float]) -> torch.optim.AdamW:
        """AdamW with `found_inf`: if that is 1, a step changes nothing."""
        if self.sharded:
            return ShardedAdamW(groups, lr, betas, self.local)
        if self.device.type in PLAIN_ADAMW:
            return CompiledAdamW(groups, lr, betas, lambda tensor: tensor.to(self.device))
        return torch.optim.AdamW(groups, lr=lr, betas=betas, weight_decay=0.0, fused=True)

    def follow(self, parameters: Iterable[Tensor], *inputs: Tensor) -> None:
        """Start on these inputs only once the gradients of the micro-batch before are there; needed for XLA only."""

    def peak_memory_gb(self) -> float:
        """Peak device memory with CUDA, else peak resident memory of this process, in GB (1e9 bytes); with MPS, which
        records no peak, the memory that it holds now."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 1e9
        if self.device.type == "mps":
            return torch.mps.driver_allocated_memory() / 1e9
        return host_bytes_at_peak() / 1e9

    def release(self) -> None:
        """Free cached device memory, after an allocation failed."""
        if self.device.type == "cuda":
            if self.graphs:  # they hold memory of their own, and steps will have other shapes
                torch.compiler.reset()
            torch.cuda.empty_cache()
        elif self.device.type == "mps":
            torch.mps.empty_cache()

    def free_memory_gb(self) -> float:
        """Memory that this rank can still allocate, in GB (1e9 bytes); ranks on one host share its memory."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0] / 1e9
        host = host_bytes_available() / 1e9
        if self.device.type == "mps":  # it shares the host's memory
            return min(host, (torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()) / 1e9)
        return host / (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if self.world > 1 else 1)

    def hardware(self) -> str:
        """Name of the device, for run.json."""
        if self.device.type == "cuda":
            kind = "rocm" if torch.version.hip else "cuda"
            return f"{kind} ({torch.cuda.get_device_name(self.device)})"
        return f"{self.device.type} ({platform.processor() or platform.machine()})"

    def measures(self, inspected: bool) -> bool:
        """Whether a step computes what an inspection needs: if it is `inspected`, or all steps are the same program."""
        return inspected or self.steady

    # The model on its devices.

    def place(self, model: nn.Module) -> None:
        """Move a model here, in place; with fsdp a rank keeps its share of parameters and gathers a block at a time."""
        model.to(self.device)
        if not self.sharded:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        # The root as well: else it keeps old weights after an update whose last forward pass had no gradients.
        blocks = [block for part in model.modules() if isinstance(part, nn.ModuleList) for block in part]
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)

    def for_run(self, config: RuntimeConfig, updates: int) -> "Runtime":
        """This runtime for a run; by default it compiles steps if each program serves many `updates`."""
        if config.compile is not None:
            return replace(self, compiles=config.compile, insists=True)
        able = self.device.type == "cuda" and not self.sharded and find_spec("triton") is not None
        return replace(self, compiles=able and updates >= WORTH_COMPILING, insists=False)

    @property
    def graphs(self) -> bool:
        """Whether compiled steps are CUDA graphs, whose results the next call of the same program overwrites."""
        return self.compiles and self.device.type == "cuda"

    def compiled(self, model: nn.Module) -> Callable[..., Any]:
        """The networks as steps that are not inspected call them; shares their weights. What a call returns is
        overwritten by the next one, and so are gradients: see `keep` and `keep_gradients`."""
        # Shapes never change within a stage of masks, so each shape gets a program of its own.
        if not self.compiles:
            return model
        from torch._dynamo import config  # takes a second
        from torch._dynamo.exc import TorchDynamoException

        mode = "reduce-overhead" if self.graphs else None
        program: Callable[..., Any] = torch.compile(model, fullgraph=True, dynamic=False, mode=mode)

        def call(*inputs: Any) -> Any:
            nonlocal program
            if self.graphs:
                torch.compiler.cudagraph_mark_step_begin()
            try:
                # torch's own limit is that of all networks of this kind in the process, not of one run.
                with config.patch(recompile_limit=PROGRAMS):
                    return program(*inputs)
            except TorchDynamoException as error:
                reason = reason_of(error, 200)
                what = f"runtime.compile: torch {torch.__version__} could not compile the step ({reason})"
                if self.insists:
                    raise ConfigError(f"{what}; set runtime.compile=false") from error
            _warn(f"{what}; steps are not compiled")
            program = model
            return model(*inputs)

        return call

    def keep(self, tensor: Tensor) -> Tensor:
        """A result of a compiled step that stays as it is when the next one runs."""
        return tensor.clone() if self.graphs else tensor

    def keep_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Let gradients of a compiled pass stay as they are, so that those of the next one can be added to them."""
        if not self.graphs:
            return
        with torch.no_grad():
            reached = [(p, p.grad) for p in parameters if p.grad is not None]
            kept = torch._foreach_mul([gradient for _, gradient in reached], 1.0)
        for (parameter, _), gradient in zip(reached, kept, strict=True):
            parameter.grad = gradient

    def last_pass(self, model: nn.Module, last: bool) -> None:
        """Reduce the gradients of shards with the last micro-batch of a step only."""
        if self.sharded:
            model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Mean over ranks, in place; shards are averaged by the backward pass already. After all micro-batches, not
        during the last one: a rank that runs out of memory repeats its own (F7)."""
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
        # All buckets are on their way before the first is waited for, so that they overlap.
        for gradients, flat, work in sent:
            work.wait()
            parts = (flat / self.world).split([g.numel() for g in gradients])
            torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        """Scale averaged gradients down to a global norm of `most`; returns the norm before that (F3)."""
        norm = torch.nn.utils.clip_grad_norm_(parameters, most)
        return norm.full_tensor() if self.sharded else norm  # pyright: ignore[reportAttributeAccessIssue]

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's share of a parameter, sharing its memory; the tensor itself if it is not sharded."""
        return tensor.to_local() if self.sharded and hasattr(tensor, "to_local") else tensor  # pyright: ignore

    def whole(self, tensor: Tensor) -> Tensor:
        """A sharded tensor gathered on every rank; a collective call."""
        return tensor.full_tensor() if self.sharded and hasattr(tensor, "full_tensor") else tensor  # pyright: ignore

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        """Copy whole `values` into a tensor, or this rank's share of them if it is sharded."""
        if self.sharded and hasattr(tensor, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            mesh, placements = tensor.device_mesh, tensor.placements  # pyright: ignore
            values = distribute_tensor(values.to(self.device), mesh, placements, src_data_rank=None)
        tensor.detach().copy_(values)

    # Collective calls: all ranks make them, in the same order.

    def first(self, work: Callable[[], Result]) -> Result:
        """Call `work` on rank 0 only; every rank gets what it returns, or its error."""
        if self.world == 1:
            return work()
        answer: list[Any] = [None, None]  # the result, and an error that can be sent
        failure: Exception | None = None
        if self.leads:
            try:
                answer[0] = work()
            # Any error at all: the other ranks are waiting for the broadcast below.
            except Exception as error:
                failure = error
                answer[1] = error if isinstance(error, OctfmError) else TrainingError(f"rank 0: {error}")
        dist.broadcast_object_list(answer, 0)
        if failure is not None:
            raise failure
        if answer[1] is not None:
            answer[1].elsewhere = True
            raise answer[1]
        return answer[0]

    def exchange(self, values: np.ndarray) -> np.ndarray:
        """float64 [world, n]: the float64 [n] of every rank."""
        if self.world == 1:
            return values[None]
        parts = [torch.empty(len(values), dtype=torch.float64) for _ in range(self.world)]
        dist.all_gather(parts, torch.from_numpy(np.asarray(values, np.float64)))
        return torch.stack(parts).numpy()

    def collect(self, rows: np.ndarray) -> np.ndarray:
        """The rows [n, ...] of all ranks, concatenated in rank order, on every rank; n may differ. Sent as float64."""
        if self.world == 1:
            return rows
        lengths = self.exchange(np.array([len(rows)]))[:, 0].astype(int)
        padded = np.zeros((max(lengths), *rows.shape[1:]), np.float64)
        padded[: len(rows)] = rows
        parts = self.exchange(padded.reshape(-1)).reshape(self.world, *padded.shape)
        return np.concatenate([part[:n] for part, n in zip(parts, lengths, strict=True)]).astype(rows.dtype)

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0 the tensors of all ranks, joined along their first axis, which may differ; empty on the others."""
        if self.world == 1:
            return tensor
        lengths = self.exchange(np.array([len(tensor)]))[:, 0].astype(int)
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.world if self.leads else 0)]
        dist.gather(padded, parts or None)
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)]) if parts else tensor[:0]

    def value_of_first(self, value: Any) -> Any:
        """Send rank 0's `value` to every rank, for the threads that write sharded checkpoints."""
        dist.broadcast_object_list(sent := [value], 0, group=self.background)
        return sent[0]

    def sum_(self, *tensors: Tensor) -> None:
        """Sum over ranks, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)

    def sum_shares_(self, tensor: Tensor) -> None:
        """Sum over the shares of sharded tensors, in place; does nothing if tensors are not sharded."""
        if self.sharded:
            dist.all_reduce(tensor)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of rank 0 to every rank, in place."""
        if self.world > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def part(self, items: np.ndarray) -> np.ndarray:
        """This rank's share of a list; shares are in the order of ranks, and their sizes differ by at most one."""
        return np.array_split(items, self.world)[self.rank]

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Raises TrainingError, with one clear sentence, if a collective call fails or times out."""
        try:
            yield
        except RuntimeError as error:
            if self.world == 1 or not _failed_together(error):
                raise
            lines = reason_of(error)
            late = "imed out" in lines or "imeout" in lines
            what = f"did not answer within {self.timeout_s:g} s (runtime.timeout_s)" if late else "has gone"
            raise TrainingError(
                f"rank {self.rank} of {self.world}: another rank {what}{self._last_words()}; torchrun restarts the job "
                "from its last checkpoint if it may (--max-restarts), else run the same command again. The library's "
                "error: " + lines[:160]
            ) from error

    def say(self, what: str) -> None:
        """Tell the other ranks what this one waits for; they report it if it never answers."""
        if self.world > 1:
            with suppress(RuntimeError):
                _store().set(f"waiting/{self.rank}", f"{time.time()} {what}")

    def _last_words(self) -> str:
        words = []
        with suppress(RuntimeError):
            store = _store()
            for other in (r for r in range(self.world) if r != self.rank):
                if not store.check([f"waiting/{other}"]):
                    continue
                when, _, what = store.get(f"waiting/{other}").decode().partition(" ")
                # An older wait is over, or the collective call would have timed out before.
                if time.time() - float(when) <= self.timeout_s:
                    words.append(f"rank {other} was {what}")
        return f" ({'; '.join(words)})" if words else ""

    def close(self) -> None:
        """Leave the process group, at the end."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _failed_together(error: RuntimeError) -> bool:
    # gloo and NCCL mostly raise plain RuntimeErrors; only their words tell what failed.
    words = "gloo|NCCL|ProcessGroup|process group|collective|Connection closed by peer|Connection reset|Broken pipe"
    return isinstance(error, dist.DistError) or re.search(words, str(error)) is not None


def start(precision: Precision = "fp32", device: str | torch.device | None = None) -> Runtime:
    """A single device (see `device_named`). Raises ConfigError under torchrun (F10)."""
    world = world_size()
    if world > 1:
        raise ConfigError(
            f"WORLD_SIZE is {world}: only octfm pretrain and finetune share work among ranks; start everything else "
            "without torchrun"
        )
    return alone(precision, device)


def alone(precision: Precision = "fp32", device: str | torch.device | None = None) -> Runtime:
    """This process's device (see `device_named`), which it uses alone, also in a job of several ranks."""
    chosen = device_named(device)
    return Runtime(chosen, precision_on(chosen, precision))


def device_named(name: str | torch.device | None, local_rank: int | None = None) -> torch.device:
    """The device of this name; None and `auto` are CUDA if there is one, which ROCm counts as, else the CPU. `mps` and
    other accelerators that torch finds are never chosen by themselves: octfm is not tested on them. With a
    `local_rank`, that rank's own CUDA device. Raises ConfigError if there is no such device."""
    name = str(name) if name not in (None, "auto") else "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    found = torch.accelerator.current_accelerator(check_available=True)
    if kind == "xla":
        raise ConfigError(
            "device xla: only octfm pretrain trains on XLA devices, as with runtime.parallel=xla_spmd; use auto, cpu "
            "or cuda here"
        )
    known = kind in ("cpu", "cuda", "mps") or (found is not None and kind == found.type)
    if not known or (number and not number.isdecimal()):
        raise ConfigError(f"device: expected auto, cpu, cuda (cuda:1 for the second), mps or xla, got {name!r}")
    if kind != "cpu" and (found is None or kind != found.type):
        what = {"cuda": "CUDA device", "mps": "Apple GPU"}[kind]
        raise ConfigError(f"device {name}: torch {torch.__version__} finds no {what} here; use device cpu")
    count = 1 if kind == "cpu" else torch.accelerator.device_count()
    if int(number or 0) >= count:
        raise ConfigError(f"device {name}: there are {count} of this kind here, counted from 0")
    if local_rank is not None and kind not in ("cpu", "cuda"):
        raise ConfigError(f"device {name}: several ranks train on cpu or cuda only; start one process without torchrun")
    if local_rank is not None and kind == "cuda":
        if local_rank >= count:
            raise ConfigError(
                f"rank {local_rank} of this host has no CUDA device: there are {count}; start fewer ranks"
            )
        torch.cuda.set_device(local_rank)
        name = f"cuda:{local_rank}"
    return torch.device(name)


def widest_on(device: torch.device) -> torch.dtype:
    """The most exact type of numbers that a device computes with."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def precision_on(device: torch.device, precision: Precision) -> Precision:
    """The precision that a device computes in. Says in one line on stderr where it is not the one wanted, or slow."""
    if precision == "bf16" and device.type == "mps":
        try:
            torch.zeros(1, dtype=torch.bfloat16, device=device)
        except (RuntimeError, TypeError):  # before macOS 14
            _warn(f"device {device}: no bfloat16 in this version of macOS; computing in float32 instead")
            return "fp32"
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        _warn(f"device {device}: {name} emulates bfloat16, which is slow; precision=fp32 may be faster")
    return precision


def _warn(line: str) -> None:
    if rank() == 0 and sys.stderr is not None:
        sys.stderr.write(f"octfm: {line}\n")


def environment(runtime: Runtime) -> dict[str, str]:
    """Software and hardware that a run depends on; no host or user names."""
    engine = "fsdp" if runtime.sharded else "ddp" if runtime.world > 1 else "single"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "device": runtime.hardware(),
        "kernels": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "precision": runtime.precision,
        "ranks": str(runtime.world),
        "parallel": "xla_spmd" if runtime.steady else engine,
    }
