"""The XLA runtime: TPUs, or several virtual devices of one CPU, run one program over all devices of all hosts (SPMD).

One process runs on each host, and tensors span all of them: a batch is split along its volumes, every device holds
all weights, and the compiler inserts the communication. Operations are recorded, compiled as one program when a step
is `read`, and run again from then on; whatever changes from step to step must therefore be a tensor. Tested on
virtual devices of one host; several hosts and TPUs are untested on hardware.
"""

# torch_xla lives in an environment of its own.
# pyright: reportMissingImports=false

import importlib
import os
import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from octfm.errors import ConfigError, TrainingError, reason_of
from octfm.run.optimizers import CompiledAdamW
from octfm.run.runtime import Precision, Runtime

NEEDED = (
    "runtime.parallel xla_spmd needs torch_xla, which exists for torch 2.9 only; make an environment for it: on a CPU "
    "with tests/xla/environment.sh, on a TPU with `pip install torch==2.9.0 'torch_xla[tpu]==2.9.0'` and octfm"
)
NO_DEVICE = (
    "runtime.parallel xla_spmd: no TPU is found here; on a CPU, set the number of virtual devices: "
    "PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 octfm pretrain …"
)
PORT = 12380
"""Port at which hosts meet, unless MASTER_PORT names another."""


@dataclass(frozen=True, eq=False)
class XLARuntime(Runtime):
    """All devices of all hosts. `rank` and `world` count hosts, `devices` those of this one."""

    mesh: Any = field(default=None, repr=False)

    @property
    def repeats(self) -> bool:
        return False

    def autocast(self) -> AbstractContextManager:
        return nullcontext() if self.precision == "fp32" else torch.autocast("xla", dtype=torch.bfloat16)

    def tensor(self, array: np.ndarray) -> Tensor:
        """This host's part of a tensor [volumes of all hosts, …], which is split along volumes."""
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as xs

        host = torch.from_numpy(np.ascontiguousarray(array))
        split = xs.ShardingSpec(self.mesh, ("data", *(None,) * (host.ndim - 1)), minibatch=self.world > 1)
        return xm.send_cpu_data_to_device([host], self.device, split)[0]

    def scalar(self) -> Tensor:
        return self._sent(torch.zeros(()))

    def set(self, scalar: Tensor, value: float) -> None:
        # As a list of one: a scalar 0 or 1 would become a constant, and compile another program.
        scalar.copy_(self.numbers(value)[0])

    def numbers(self, *values: float) -> Tensor:
        return self._sent(torch.tensor(values, dtype=torch.float32))

    def _sent(self, host: Tensor) -> Tensor:
        """The tensor, whole on every device."""
        import torch_xla.core.xla_model as xm
        import torch_xla.distributed.spmd as xs

        return xm.send_cpu_data_to_device([host], self.device, xs.ShardingSpec(self.mesh, (None,) * host.ndim))[0]

    def read(self, *tensors: Tensor) -> list[Tensor]:
        import torch_xla

        torch_xla.sync(wait=True)
        return [self._own(t.detach()) for t in tensors]

    def _own(self, tensor: Tensor) -> Tensor:
        """This host's rows, joined from its devices' parts: gathering a whole tensor would compile another program."""
        import torch_xla

        if tensor.device.type != "xla":
            return tensor
        parts = [part for part, _ in torch_xla._XLAC._get_local_shards([tensor])[0]]
        where = [index for _, index in torch_xla._XLAC._get_local_shard_replica_and_indices([tensor])[0]]
        if not tensor.ndim or where[0] is Ellipsis:
            return parts[0]
        box = [(min(i[d].start for i in where), max(i[d].stop for i in where)) for d in range(tensor.ndim)]
        if any(stop - start < n for (start, stop), n in zip(box[1:], tensor.shape[1:], strict=True)):
            # The compiler has split another axis than volumes, across hosts.
            whole = tensor.cpu()
            return whole.unflatten(0, (self.world, -1))[self.rank]
        found = torch.empty([stop - start for start, stop in box], dtype=tensor.dtype)
        for part, index in zip(parts, where, strict=True):
            size = tuple(slice(0, i.stop - i.start) for i in index)  # a part may be padded
            found[tuple(slice(i.start - start, i.stop - start) for i, (start, _) in zip(index, box, strict=True))] = (
                part[size]
            )
        return found

    def adamw(self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float]) -> torch.optim.AdamW:
        return CompiledAdamW(groups, lr, betas, self._sent)

    def follow(self, parameters: Iterable[Tensor], *inputs: Tensor) -> None:
        import torch_xla.core.xla_model as xm

        # Otherwise the compiler may begin all micro-batches at once, and hold the activations of all of them.
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            xm.optimization_barrier_([*gradients, *inputs])

    def peak_memory_gb(self) -> float:
        return _memory().get("peak_bytes_used", 0) / 1e9 or super().peak_memory_gb()

    def free_memory_gb(self) -> float:
        if (found := _memory()).get("bytes_limit"):
            return (found["bytes_limit"] - found["bytes_used"]) / 1e9
        return super().free_memory_gb() / self.devices

    def release(self) -> None:
        """Does nothing: the compiler plans all memory."""

    def place(self, model: nn.Module) -> None:
        import torch_xla.distributed.spmd as xs

        model.to(self.device)
        # Whole on every device, or the compiler may split them and compile the next step anew.
        for tensor in (*model.parameters(), *model.buffers()):
            xs.mark_sharding(tensor, self.mesh, (None,) * tensor.ndim)

    def average_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Does nothing: the loss is the mean over all devices already."""

    def sum_(self, *tensors: Tensor) -> None:
        """Does nothing: sums are over all devices already."""

    def share(self, tensors: Iterable[Tensor]) -> None:
        if self.world == 1:
            return
        for tensor in tensors:
            host = tensor.detach().cpu()
            dist.broadcast(host, 0)
            with torch.no_grad():
                tensor.copy_(host)

    def hardware(self) -> str:
        import torch_xla.runtime as xr

        return f"xla ({self.replicas} x {xr.device_type()})"


def _memory() -> dict[str, int]:
    """Memory of this host's first device; empty if it reports none."""
    import torch_xla
    import torch_xla.runtime as xr

    with suppress(RuntimeError):
        return dict(torch_xla._XLAC._xla_memory_info(f"{xr.device_type()}:0"))
    return {}


def join(precision: Precision, timeout_s: float) -> Runtime:
    """The runtime of this host, one of those that the TPU connects, or of a CPU."""
    try:
        import torch_xla.backends
        import torch_xla.distributed.spmd as xs
        import torch_xla.runtime as xr
        from torch_xla._internal import tpu
    except ImportError as error:
        raise ConfigError(f"{NEEDED} ({error})") from None
    if "PJRT_DEVICE" not in os.environ and not tpu.num_available_chips():
        raise ConfigError(NO_DEVICE)
    xr.use_spmd()
    if precision == "fp32" and xr.device_type() == "TPU":
        # By default it multiplies float32 in bfloat16.
        torch_xla.backends.set_mat_mul_precision("highest")
    world, rank, devices = xr.process_count(), xr.process_index(), xr.addressable_runtime_device_count()
    mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), (xr.global_runtime_device_count(),), ("data",))
    runtime = XLARuntime(
        torch_xla.device(), precision, rank, world, False, timeout_s, devices=devices, steady=True, mesh=mesh
    )
    if world > 1:
        _meet(runtime, xr.get_master_ip())
    return runtime


def _meet(runtime: XLARuntime, leader: str) -> None:
    """Connect the hosts over their network (gloo), for everything they exchange besides tensors."""
    host, port = os.environ.get("MASTER_ADDR", leader), int(os.environ.get("MASTER_PORT", PORT))
    timeout = timedelta(seconds=runtime.timeout_s)
    try:
        store = dist.TCPStore(host, port, runtime.world, runtime.leads, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=runtime.rank, world_size=runtime.world, timeout=timeout)
    except (RuntimeError, dist.DistError) as error:
        raise TrainingError(
            f"host {runtime.rank} of {runtime.world}: the hosts did not find each other at {host}:{port} "
            f"within {runtime.timeout_s:g} s ({reason_of(error, 160)}); "
            "was the run started on all of them (launch/tpu_pod.sh)?"
        ) from None


def load_torch_tpu() -> None:
    """PyTorch's own TPU device (torch-tpu, torch 2.11 to 2.15), a rank per chip as with DDP. Never run on hardware."""
    try:
        importlib.import_module("torch_tpu")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            "runtime.parallel tpu needs a TPU and the package torch-tpu, which could not be loaded "
            f"({reason_of(error, 160)}); it is untested on hardware: use runtime.parallel "
            "xla_spmd on TPUs, which has been tested on virtual devices, and ddp or fsdp on CPU and CUDA"
        ) from None
    warnings.warn(
        "runtime.parallel tpu (torch-tpu) is untested on hardware: compare its first losses with a CPU's", stacklevel=3
    )
