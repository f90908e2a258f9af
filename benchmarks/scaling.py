"""Cost and gain of several ranks on one CPU machine: `python benchmarks/scaling.py [--xla .venv-xla/bin/python]`.

Weak scaling keeps the volumes per rank, strong scaling the global batch. Both run on a single rank, DDP and FSDP2 with
one thread per rank, and on one and two virtual XLA devices if --xla names the interpreter of an XLA environment. A step
of one rank in a distributed job of size one shows the overhead of the code path. Bytes are what the algorithm sends per
rank and step: an all-reduce of the gradients (DDP and XLA: 2 (n-1)/n of their size), or gathers of weights and a
reduce-scatter (FSDP2), plus the exchange of step results.

XLA programs are compiled without optimization: compare times of its rows only among themselves, and CPU time only with
many steps (--steps 60), since the CPU time of compiling is subtracted. On a loaded machine, two ranks wait for each
other; compare CPU time per volume there, not seconds.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from octfm.models.vit3d import count_parameters

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.ranks import Ranks
from support.small_store import small_preprocessing, small_store

WIDTH, DEPTH = 192, 6
XLA = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--per-rank", type=int, default=4, help="volumes per rank and step")
    arguments.add_argument("--repeats", type=int, default=3, help="rounds over all cases; the median counts")
    arguments.add_argument(
        "--xla", metavar="PYTHON", help="interpreter of an environment made by tests/xla/environment.sh"
    )
    chosen = arguments.parse_args()
    if chosen.steps < 4:
        arguments.error(f"--steps {chosen.steps}: expected 4 or more, since the first two are not timed")
    cases = {
        "single, 1 x n": (1, "ddp", chosen.per_rank),
        "DDP, 2 ranks x n (weak)": (2, "ddp", 2 * chosen.per_rank),
        "FSDP2, 2 ranks x n (weak)": (2, "fsdp", 2 * chosen.per_rank),
        "DDP, 2 ranks x n/2 (strong)": (2, "ddp", chosen.per_rank),
        "FSDP2, 2 ranks x n/2 (strong)": (2, "fsdp", chosen.per_rank),
    }
    if chosen.xla:
        cases |= {
            "XLA, 1 device x n": (1, "xla_spmd", chosen.per_rank),
            "XLA, 2 devices x n (weak)": (2, "xla_spmd", 2 * chosen.per_rank),
            "XLA, 2 devices x n/2 (strong)": (2, "xla_spmd", chosen.per_rank),
        }
    found: dict[str, list[float]] = {name: [] for name in cases}
    used: dict[str, list[float]] = {name: [] for name in cases}
    engines = {parallel for _, parallel, _ in cases.values()}
    jobs = {engine: Ranks(chosen.xla) if engine == "xla_spmd" else Ranks() for engine in engines}
    with tempfile.TemporaryDirectory() as folder:
        store = small_store(Path(folder) / "store").path
        for round_ in range(chosen.repeats):
            for number, (name, (world, parallel, batch)) in enumerate(cases.items()):
                out = Path(folder) / f"{round_}-{number}"
                # One process with several devices, or several ranks.
                ranks, environment = (
                    (1, XLA | {"CPU_NUM_DEVICES": str(world)}) if parallel == "xla_spmd" else (world, {})
                )
                ended = jobs[parallel](
                    ranks, store, out, settings(chosen.steps, batch, parallel), environment=environment
                )
                short = jobs[parallel](
                    ranks, store, Path(f"{out}-short"), settings(2, batch, parallel), environment=environment
                )
                assert all(rank.code == 0 for rank in ended + short), ended
                found[name].append(step_seconds(out))
                used[name].append(
                    sum(a.cpu_s - b.cpu_s for a, b in zip(ended, short, strict=True)) / (chosen.steps - 2) / batch
                )
        for server in jobs.values():
            server.close()
    base, cpu = (statistics.median(times["single, 1 x n"]) for times in (found, used))
    weights = 4 * parameters()
    trained = weights - 4 * teacher()
    size = f"{weights / 4e6:.2f} M parameters of which {trained / 4e6:.2f} M are trained"
    print(f"{os.cpu_count()} CPUs, {size}; n = {chosen.per_rank} volumes")
    print(
        f"{'case':<32}{'step, ms':>10}{'over single':>13}{'efficiency':>12}"
        f"{'CPU per volume over single':>28}{'sent per rank and step':>24}"
    )
    for name, (world, parallel, batch) in cases.items():
        seconds = statistics.median(found[name])
        ideal = base * batch / chosen.per_rank / world
        sent = bytes_sent(world, parallel, trained, weights, batch // world)
        cost = statistics.median(used[name]) / cpu
        print(
            f"{name:<32}{1e3 * seconds:>10.0f}{seconds / base:>13.2f}{ideal / seconds:>12.0%}"
            f"{cost:>28.2f}{sent / 1e6:>21.1f} MB"
        )


def settings(steps: int, batch: int, parallel: str) -> dict:
    return {
        "steps": steps, "precision": "fp32", "data": {"global_batch_size": batch, "per_device_batch_size": 1},
        "model": {"patch_size": [2, 8, 8], "width": WIDTH, "depth": DEPTH, "heads": 3}, "masks": {"budget": 64},
        "predictor": {"width": 96, "depth": 2, "heads": 3}, "log_every_steps": 1, "validate_every_steps": 10_000,
        "ckpt_every_steps": 10_000, "runtime": {"parallel": parallel},
    }  # fmt: skip


def step_seconds(out: Path) -> float:
    """Median time between logged steps of a run, without the first ones."""
    times = [
        row["time"]
        for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        if row["kind"] == "train"
    ]
    return statistics.median(b - a for a, b in itertools.pairwise(times[2:]))


def bytes_sent(world: int, parallel: str, trained: int, weights: int, passes: int) -> float:
    """Bytes sent per rank and step by ring collectives; `passes` micro-batches of one volume."""
    ring = (world - 1) / world
    if parallel != "fsdp":
        return 2 * ring * trained
    # FSDP2 gathers all weights per forward pass, trained ones again per backward pass, and scatters gradients once.
    return ring * (passes * (weights + trained) + trained)


def model():
    from octfm.pretraining.learner import build_objective
    from octfm.pretraining.settings import PretrainConfig

    return build_objective(PretrainConfig.model_validate(settings(1, 1, "ddp")), small_preprocessing())


def parameters() -> int:
    return count_parameters(model())


def teacher() -> int:
    return model().parameters_by_part()["target_encoder"]


if __name__ == "__main__":
    main()
