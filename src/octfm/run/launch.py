"""Join the job that this process is part of: a single device, one of torchrun's ranks, or a host of XLA devices."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from octfm.errors import ConfigError, TrainingError, reason_of
from octfm.io.ranks import world_size
from octfm.run.runtime import Precision, Runtime, RuntimeConfig, device_named, precision_on


def join(config: RuntimeConfig, precision: Precision, device: str | torch.device | None = None) -> Runtime:
    """The runtime of this process: a single device or, under torchrun, this rank's own. Raises ConfigError if the
    launcher's variables are incomplete or the device does not exist, TrainingError if the ranks do not meet."""
    if config.parallel in ("xla_spmd", "tpu"):
        from octfm.run import runtime_xla  # torch_xla needs an environment of its own

        if config.parallel == "xla_spmd":
            return runtime_xla.join(precision, config.timeout_s)
        runtime_xla.load_torch_tpu()
    world = world_size()
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if not os.environ.get("WORLD_SIZE") and tasks > 1:
        raise ConfigError(
            f"SLURM started {tasks} tasks and none of them knows its rank: each would train the whole run by itself "
            "(F10); start torchrun with one task per node, as launch/slurm.sbatch does"
        )
    tpu = config.parallel == "tpu"
    if world == 1:
        chosen = torch.device("tpu", 0) if tpu else device_named(device)
        return Runtime(chosen, precision_on(chosen, precision), compiles=bool(config.compile))
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {world} but {', '.join(missing)} is not set; start the job with torchrun "
            "(launch/torchrun.sh)"
        )
    local = int(os.environ["LOCAL_RANK"])
    chosen = torch.device("tpu", local) if tpu else device_named(device, local)
    return meet(config, precision, chosen, int(os.environ["RANK"]), world)


def meet(config: RuntimeConfig, precision: Precision, device: torch.device, rank: int, world: int) -> Runtime:
    """The runtime of a rank that met the others at MASTER_ADDR and MASTER_PORT. Raises TrainingError if it did not."""
    timeout = timedelta(seconds=config.timeout_s)
    # The launcher's store still holds what the last attempt wrote, so every attempt uses keys of its own.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # Usually torchrun's agent serves this store already, and its port is taken.
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(host, port, world, serves, timeout=timeout)
        # gloo as well, because `Runtime.exchange` sends tensors of the host, which NCCL cannot.
        backend = {"cuda": "cpu:gloo,cuda:nccl", "tpu": "cpu:gloo,tpu:tpu_dist"}.get(device.type, "gloo")
        prefixed = dist.PrefixStore(f"octfm/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{attempt}", store)
        dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world, timeout=timeout)
        sharded = config.parallel == "fsdp"
        # A group for the threads that write shards: in one group, their calls would interleave with those of the step.
        background = dist.new_group(backend="gloo", timeout=timeout) if sharded else None
    except (RuntimeError, dist.DistError) as error:
        raise TrainingError(
            f"rank {rank} of {world}: the ranks did not find each other at {host}:{port} within {config.timeout_s:g} s "
            f"({reason_of(error, 160)}); are all of them started, and is that address reachable?"
        ) from None
    precision = precision_on(device, precision)
    return Runtime(device, precision, rank, world, sharded, config.timeout_s, background, compiles=bool(config.compile))
