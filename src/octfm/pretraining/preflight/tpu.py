"""`octfm doctor --tpu v4-32`: the training step of a config, compiled for a TPU that is not there, and the memory it takes there.

Two programs of their own, since each must have its environment before its libraries load: the first records the step on the CPU
(torch_xla), the second compiles it with the TPU's own compiler (libtpu, through JAX). That proves that a step lowers, is divided among
the devices and fits; it proves nothing about speed or numerics.
"""

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octfm.config import load
from octfm.errors import ConfigError, Echo
from octfm.pretraining.masks import token_grid
from octfm.pretraining.preflight.check import Check, fail, passed
from octfm.pretraining.preflight.tpu_program import run
from octfm.pretraining.settings import PretrainConfig
from octfm.store.loader import accumulation
from octfm.volume.preprocessing import Preprocessing

GIB = 2**30
BUDGET = 3072
"""Tokens that are tried where the full grid does not fit."""


@dataclass(frozen=True)
class Slice:
    """A TPU slice by the name under which it is rented. Of v4, two cores are one device (megacore)."""

    topology: str
    devices: int


SLICES = {
    "v4-8": Slice("v4:2x2x1", 4),
    "v4-16": Slice("v4:2x2x2", 8),
    "v4-32": Slice("v4:2x2x4", 16),
    "v4-64": Slice("v4:2x4x4", 32),
    "v4-128": Slice("v4:4x4x4", 64),
}
HBM = 30.75 * GIB
"""What libtpu gives to a program on a device of v4 (it says so of one that needs more)."""


@dataclass(frozen=True)
class Compiled:
    """Memory of one device in bytes, or why there is no such program."""

    arguments: int = 0
    """Weights, moments and the batch."""
    temporaries: int = 0
    results: int = 0
    """What a step leaves behind and does not write over its arguments."""
    seconds: float = 0.0
    trouble: str | None = None
    """What the compiler said of a step that does not fit."""

    @property
    def total(self) -> int:
        return self.arguments + self.temporaries + self.results

    def __str__(self) -> str:
        if self.trouble is not None:
            return self.trouble
        parts = f"{self.temporaries / GIB:.2f} temporaries, {self.arguments / GIB:.2f} arguments, {self.results / GIB:.2f} results"
        return f"{self.total / GIB:.2f} of {HBM / GIB:.2f} GiB per device ({parts})"


def examine(config: PretrainConfig, preprocessing: Preprocessing, name: str, echo: Echo) -> list[Check]:
    """Whether the step of this config compiles for and fits a TPU slice, and if not, what does. Takes minutes per attempt, of which `echo`
    hears. ConfigError for a slice or libraries that are not there, and for settings that no run with XLA accepts."""
    values = config.model_dump(mode="json")
    load(PretrainConfig, values | {"runtime": values["runtime"] | {"parallel": "xla_spmd"}})
    chosen, data = slice_of(name), config.data
    try:
        passes = accumulation(data.global_batch_size, data.per_device_batch_size, chosen.devices)
    except ConfigError as error:
        measured, _, remedy = str(error).partition("; ")
        return [fail("batch arithmetic", measured, remedy)]
    row = f"TPU {name}"
    wording = f"{chosen.devices} devices x {data.per_device_batch_size} per device x {passes} accumulation"
    found = [passed("batch arithmetic", f"global batch {data.global_batch_size} = {wording}")]
    echo(f"compiling the step for {name} ({chosen.topology}): minutes")
    made = compile_step(config, preprocessing, chosen)
    if made.trouble is None:
        return [
            *found,
            passed(row, f"{made}; compiled in {made.seconds:.0f} s; speed and numerics are untested on hardware"),
        ]
    last, tried = made, ""
    for words, smaller in smaller_steps(config, preprocessing):
        echo(f"{last}; trying {words}")
        last = compile_step(smaller, preprocessing, chosen)
        if last.trouble is None:
            return [*found, fail(row, str(made), f"{words} fits: {last}")]
        tried = f"nothing that was tried fits either, {words} last ({last}): "
    return [*found, fail(row, str(made), f"{tried}a smaller model.width, model.depth or predictor.width")]


def smaller_steps(config: PretrainConfig, preprocessing: Preprocessing) -> Iterator[tuple[str, PretrainConfig]]:
    """The same training with less memory, then with fewer tokens, as (overrides, config), each smaller than the one before."""
    words: list[str] = []

    def with_(section: str, key: str, value: Any) -> tuple[str, PretrainConfig]:
        nonlocal config
        config = config.model_copy(update={section: getattr(config, section).model_copy(update={key: value})})
        words[:] = [w for w in words if not w.startswith(f"{section}.{key}=")] + [
            f"{section}.{key}={str(value).lower()}"
        ]
        return " ".join(words), config

    while (size := config.data.per_device_batch_size) > 1:
        yield with_("data", "per_device_batch_size", max(n for n in range(1, size) if size % n == 0))
    if not config.model.activation_checkpointing:
        yield with_("model", "activation_checkpointing", True)
    tokens = config.masks.budget or _tokens(config, preprocessing)
    if tokens > BUDGET:
        yield with_("masks", "budget", BUDGET)


def _tokens(config: PretrainConfig, preprocessing: Preprocessing) -> int:
    d, h, w = token_grid(preprocessing.image_size, config.model.patch_size)
    return d * h * w


def slice_of(name: str) -> Slice:
    """ConfigError, in words, for a slice that is not known or for libraries that are not installed."""
    if name not in SLICES:
        raise ConfigError(f"--tpu: expected one of {', '.join(SLICES)}, got {name!r}")
    missing = [module for module in ("torch_xla", "jax", "libtpu") if importlib.util.find_spec(module) is None]
    if missing:
        raise ConfigError(
            f"--tpu {name} compiles the step for a TPU and needs {', '.join(missing)}, which this environment lacks; make one with "
            "`tests/xla/environment.sh .venv-xla` in a clone of octfm (Linux x86-64, 4 GB, no TPU needed) and run "
            ".venv-xla/bin/octfm doctor there"
        )
    return SLICES[name]


def compile_step(config: PretrainConfig, preprocessing: Preprocessing, slice_: Slice) -> Compiled:
    """The program of one update, compiled. Takes minutes; what does not fit is an answer, not an error. ConfigError, in words, where the
    libraries crash or this machine's memory runs out."""
    with tempfile.TemporaryDirectory(prefix="octfm-tpu-") as folder:
        job = {
            "config": config.model_dump(mode="json"),
            "preprocessing": preprocessing.model_dump(mode="json"),
            "devices": slice_.devices,
        }
        place = Path(folder)
        (place / "job.json").write_text(json.dumps(job))
        run("tpu_record", place, "arguments.json", {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "1"})
        # libtpu is the property of one process per machine, unless it is told that no TPU is meant.
        alone = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        told = run("tpu_compile", place, "compiled.json", alone, slice_.topology)
    return Compiled(**json.loads(told))
