"""`octfm doctor --tpu v4-32`: compile a config's training step for a TPU without having one, and measure its memory.

Two separate processes, because each needs its environment variables set before its libraries load: tpu_record records
the step on the CPU (torch_xla), tpu_compile compiles it with the TPU's compiler (libtpu, through JAX). This proves that
a step lowers, is divided among the devices and fits; it proves nothing about speed or numerics.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from octfm.config import load
from octfm.errors import ConfigError, Echo
from octfm.io.isolation import import_path
from octfm.models.token_map import token_grid
from octfm.pretraining.preflight.check import Check, fail, fail_with, passed
from octfm.pretraining.settings import PretrainConfig
from octfm.run.memory import host_bytes_available
from octfm.store.loader import accumulation
from octfm.volume.preprocessing import Preprocessing

GIB = 2**30
BUDGET = 3072
"""Token budget to try if the full grid does not fit."""


SLICES = {"v4-8": "v4:2x2x1", "v4-16": "v4:2x2x2", "v4-32": "v4:2x2x4", "v4-64": "v4:2x4x4", "v4-128": "v4:4x4x4"}
"""Topologies of TPU slices, by the name under which they are rented. On v4, two cores are one device (megacore)."""
HBM = 30.75 * GIB
"""Memory that libtpu gives a program on a v4 device; its error for a larger program names this number."""
TASKS = {"tpu_record": "recording the step (torch_xla)", "tpu_compile": "compiling the step (libtpu)"}
OWN_ERROR = re.compile(r"octfm\.errors\.\w+: (.*)")
REASONS = (
    re.compile(r"\w*(Error|Exception)\b|F\d{4} |.*(Check failed|terminate called)"),
    re.compile("Fatal Python error"),
)
"""Lines that name the cause of an exit: exceptions and checks of Python, abseil and C++, otherwise the fatal signal.
The lines after them only say where it happened."""
LOST_LIBRARY = re.compile(r"ModuleNotFoundError|ImportError|cannot open shared object")
NO_MEMORY = re.compile(r"\bMemoryError\b|bad_alloc|Cannot allocate memory|can't allocate memory", re.IGNORECASE)
LOCKED = re.compile(r"libtpu_lockfile|already in use by process")


@dataclass(frozen=True)
class Compiled:
    """Memory of one device in bytes, or why the step does not fit."""

    arguments: int = 0
    """Weights, moments and the batch."""
    temporaries: int = 0
    results: int = 0
    """Outputs that are not written over arguments."""
    seconds: float = 0.0
    trouble: str | None = None
    """The compiler's reason why the step does not fit."""

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.results

    def __str__(self) -> str:
        if self.trouble is not None:
            return self.trouble
        return (
            f"{self.total / GIB:.2f} of {HBM / GIB:.2f} GiB per device ({self.temporaries / GIB:.2f} temporaries, "
            f"{self.arguments / GIB:.2f} arguments, {self.results / GIB:.2f} results)"
        )


def examine(config: PretrainConfig, preprocessing: Preprocessing, name: str, echo: Echo) -> list[Check]:
    """Check that a config's step compiles for a TPU slice and fits; if it does not, look for a smaller one that does,
    minutes each. Raises ConfigError for an unknown slice, missing libraries, and settings that XLA does not run."""
    values = config.model_dump(mode="json")
    load(PretrainConfig, values | {"runtime": values["runtime"] | {"parallel": "xla_spmd"}})
    topology, data = slice_of(name), config.data
    try:
        passes = accumulation(data.global_batch_size, data.per_device_batch_size, devices_in(topology))
    except ConfigError as error:
        return [fail_with("batch arithmetic", error)]
    row = f"TPU {name}"
    product = f"{devices_in(topology)} devices x {data.per_device_batch_size} per device x {passes} accumulation"
    found = [passed("batch arithmetic", f"global batch {data.global_batch_size} = {product}")]
    echo(f"compiling the step for {name} ({topology}), which takes minutes")
    compiled = compile_step(config, preprocessing, topology)
    if compiled.trouble is None:
        time = f"compiled in {compiled.seconds:.0f} s"
        return [*found, passed(row, f"{compiled}; {time}; speed and numerics are untested on hardware")]
    last, tried = compiled, ""
    for overrides, smaller in smaller_steps(config, preprocessing):
        echo(f"{last}; trying {overrides}")
        last = compile_step(smaller, preprocessing, topology)
        if last.trouble is None:
            return [*found, fail(row, str(compiled), f"{overrides} fits: {last}")]
        tried = f"nothing tried fits, {overrides} last ({last}): "
    return [*found, fail(row, str(compiled), f"{tried}choose a smaller model.width, model.depth or predictor.width")]


def smaller_steps(config: PretrainConfig, preprocessing: Preprocessing) -> Iterator[tuple[str, PretrainConfig]]:
    """(overrides, config) of ever smaller steps: first the same training with less memory, then with fewer tokens."""
    overrides: dict[str, Any] = {}

    def with_(section: str, key: str, value: Any) -> tuple[str, PretrainConfig]:
        nonlocal config
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
        overrides[f"{section}.{key}"] = str(value).lower()
        return " ".join(f"{name}={text}" for name, text in overrides.items()), config

    while (size := config.data.per_device_batch_size) > 1:
        yield with_("data", "per_device_batch_size", max(n for n in range(1, size) if size % n == 0))
    if not config.model.activation_checkpointing:
        yield with_("model", "activation_checkpointing", True)
    if (config.masks.budget or prod(token_grid(preprocessing.image_size, config.model.patch_size))) > BUDGET:
        yield with_("masks", "budget", BUDGET)


def slice_of(name: str) -> str:
    """The topology of a slice. Raises ConfigError if it is unknown, or if libraries to compile for it are missing."""
    if name not in SLICES:
        raise ConfigError(f"--tpu: expected one of {', '.join(SLICES)}, got {name!r}")
    missing = [module for module in ("torch_xla", "jax", "libtpu") if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"--tpu {name} compiles the step for a TPU and needs {', '.join(missing)}, which this environment lacks; "
            "make one with `tests/xla/environment.sh .venv-xla` in a clone of octfm (Linux x86-64, 4 GB, no TPU "
            "needed) and run .venv-xla/bin/octfm doctor there"
        )
    return SLICES[name]


def devices_in(topology: str) -> int:
    return prod(map(int, topology.partition(":")[2].split("x")))


def compile_step(config: PretrainConfig, preprocessing: Preprocessing, topology: str) -> Compiled:
    """Record and compile the program of one update, which takes minutes. A step that does not fit is a result. Raises
    ConfigError if the libraries crash or this machine's memory runs out."""
    with tempfile.TemporaryDirectory(prefix="octfm-tpu-") as folder:
        job = {
            "config": config.model_dump(mode="json"),
            "preprocessing": preprocessing.model_dump(mode="json"),
            "devices": devices_in(topology),
        }
        place = Path(folder)
        (place / "job.json").write_text(json.dumps(job), "utf-8")
        run("tpu_record", place, "arguments.json", {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})
        # libtpu locks out other processes of the machine unless these say that no TPU is used.
        no_tpu = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        compiled = run("tpu_compile", place, "compiled.json", no_tpu, topology)
    return Compiled(**json.loads(compiled))


def run(program: str, folder: Path, answer: str, environment: dict[str, str], *words: str) -> str:
    """Run tpu_record or tpu_compile as a process and return the file `answer` that it wrote into `folder`.

    Raises ConfigError if it failed, crashed, was killed or ran out of memory.
    """
    command = [sys.executable, "-P", "-m", f"octfm.pretraining.preflight.{program}", str(folder), *words]
    # -P and PYTHONPATH keep it from importing modules of the current folder. The fault handler locates a crash in C++.
    paths = {"PYTHONPATH": os.pathsep.join(import_path()), "PYTHONFAULTHANDLER": "1"}
    environment = os.environ | environment | paths
    try:
        ended = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace"
        )
    except OSError as error:
        raise ConfigError(f"--tpu: {TASKS[program]} could not be started: {error}; {_remedy('', str(error))}") from None
    if ended.returncode or not (folder / answer).is_file():
        raise failure(program, ended.returncode, ended.stderr)
    return (folder / answer).read_text("utf-8")


def failure(program: str, status: int, stderr: str) -> ConfigError:
    """The error for a program that ended with `status`, negative for a signal; names a file that keeps `stderr`."""
    lines = stderr.strip().splitlines()
    # An error of octfm itself already says what to do.
    own = OWN_ERROR.fullmatch(lines[-1]) if lines else None
    if own:
        return ConfigError(own[1])
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    reasons = (line for reason in REASONS for line in reversed(lines) if reason.match(line))
    why = next(reasons, lines[-1] if lines else "it printed nothing")
    with tempfile.NamedTemporaryFile("wb", prefix=f"octfm-{program}-", suffix=".log", delete=False) as log:
        log.write(stderr.encode())
    wording = f"--tpu: {TASKS[program]} ended with {how} and no result: {why.strip()[:300]}"
    return ConfigError(f"{wording}; {_remedy(how, stderr)}; its output is in {log.name}")


def _remedy(how: str, output: str) -> str:
    if LOCKED.search(output):
        return "another process holds libtpu: wait for it, or delete /tmp/libtpu_lockfile if it was killed"
    if how == "SIGKILL" or NO_MEMORY.search(output):
        free = f"{host_bytes_available() / 1e9:.1f} GB are free now"
        return f"most likely this machine's memory ran out ({free}): end other programs, or try a smaller slice"
    if LOST_LIBRARY.search(output):
        return "a library is missing or damaged: create the environment again with `tests/xla/environment.sh .venv-xla`"
    return "try again; if it fails again, report it with your config"
