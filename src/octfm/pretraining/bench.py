"""Measure a config on this machine: speed, share of the peak, data wait, memory, hours; and what to change first."""

import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from octfm.config import load
from octfm.display import duration
from octfm.errors import ConfigError, Echo, TrainingError
from octfm.models.token_map import token_grid
from octfm.pretraining.data import training_rows
from octfm.pretraining.inputs import draw
from octfm.pretraining.learner import Learner
from octfm.pretraining.preflight.cost import GB, product_flops_per_s
from octfm.pretraining.preflight.resources import cost_on
from octfm.pretraining.settings import PretrainConfig, in_steps
from octfm.pretraining.step import accumulate
from octfm.run.runtime import Runtime, start
from octfm.store.loader import Batch, Loader, accumulation, batch_of_voxels, epoch_volumes
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

CLEARLY = 1.1
"""Ratio of speeds from which a trial counts as faster."""


@dataclass(frozen=True)
class Trial:
    """A variant of the config, and what one of its steps took."""

    name: str
    precision: str
    micro_batch: int
    step_s: float | None
    """Seconds of one optimizer step; None if it did not fit."""
    volumes_per_s: float
    mfu: float
    """Floating-point operations per second of the step's matrix products and attention, as a share of those that a
    single matrix product of the run's width reaches on this device."""
    estimated_gb: float
    """Peak memory of a step, weights included (estimate, see `octfm doctor`)."""
    trouble: str = ""


@dataclass(frozen=True)
class Bench:
    """The measurements of all variants."""

    config: PretrainConfig
    trials: list[Trial]
    """The unchanged config first."""
    read_volumes_per_s: float | None
    """Volumes per second of the store, read with nothing else to do; None without a store."""

    @property
    def as_configured(self) -> Trial:
        return self.trials[0]

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time for which the device would wait for the store."""
        if self.read_volumes_per_s is None or not self.as_configured.volumes_per_s:
            return None
        return max(0.0, 1 - self.read_volumes_per_s / self.as_configured.volumes_per_s)

    @property
    def run_s(self) -> float | None:
        """Seconds that the run would take on this device alone, without validation and checkpoints."""
        if self.as_configured.step_s is None:
            return None
        reading = self.config.data.global_batch_size / self.read_volumes_per_s if self.read_volumes_per_s else 0.0
        # Volumes are read while the device computes, so the slower of the two sets the pace.
        return self.config.steps * max(self.as_configured.step_s, reading)

    def lines(self) -> list[str]:
        """The table, the forecast and the advice, for a terminal."""
        head = f"{'':<22}{'volumes/s':>10}{'a step':>10}{'MFU':>6}{'memory':>9}"
        rows = [
            f"{t.name:<22}{t.volumes_per_s:>10.3g}{duration(t.step_s):>10}{t.mfu:>6.0%}{t.estimated_gb:>6.1f} GB"
            if t.step_s is not None
            else f"{t.name:<22}{t.trouble}"
            for t in self.trials
        ]
        lines = [head, *rows]
        if self.read_volumes_per_s is not None:
            share = self.data_wait_share
            wait = "" if share is None else f"; the device would wait {share:.0%} of the time"
            lines.append(f"the store delivers {self.read_volumes_per_s:.3g} volumes/s{wait}")
        if self.run_s is not None:
            seen = self.config.steps * self.config.data.global_batch_size
            lines.append(
                f"{self.config.steps:,} steps ({seen:,} volumes) take about {duration(self.run_s)} on this device"
            )
        return [*lines, f"change first: {self.advice()}"]

    def advice(self) -> str:
        """The one change that would gain most, as a sentence."""
        now, fitting = self.as_configured, [t for t in self.trials if t.step_s is not None]
        if now.step_s is None:
            if not fitting:
                return "a smaller masks.budget or model.width: no variant fits this device"
            fastest = max(fitting, key=lambda t: t.volumes_per_s)
            return f"{_difference(fastest, now)}; as configured it does not fit this device"
        wait = self.data_wait_share or 0.0
        best = max(fitting, key=lambda t: t.volumes_per_s)
        gain = best.volumes_per_s / now.volumes_per_s
        # The share of waiting at which the run takes CLEARLY times as long as without it.
        if wait > 1 - 1 / CLEARLY:
            return (
                f"the store: the device would wait for it {wait:.0%} of the time; prepare it with "
                "--compression none on a local disk"
            )
        if gain >= CLEARLY:
            return f"{_difference(best, now)}: {gain:.2f} times the volumes per second"
        if self.config.masks.budget is None:
            return (
                "masks.budget: the whole grid is encoded, most of it background (see the token budget of octfm doctor)"
            )
        return (
            "nothing stands out: the step runs as well as this device lets it; more devices are the next gain "
            "(docs/guide/scale-out.md)"
        )


def bench(
    config: PretrainConfig, store: Store | None = None, device: str | None = None, steps: int = 3, echo: Echo = print
) -> Bench:
    """Time steps (forward, backward, update) of a config and its neighbours: other precision, twice the micro-batch.

    Steps train on volumes of the store, whose reading is timed as well, or without a store on random voxels of the
    default Preprocessing. Each trial makes one step to warm up, then `steps`, of which the median counts."""
    if steps < 1:
        raise ConfigError(f"--steps: expected 1 or more, got {steps}")
    preprocessing = store.preprocessing if store is not None else load(Preprocessing, {})
    try:
        token_grid(preprocessing.image_size, config.model.patch_size)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    rows = np.array([], np.int64)
    if store is not None:
        rows = training_rows(config, store)[0]
        config = in_steps(config, epoch_volumes(store, rows, config.data.global_batch_size))
    trials = []
    for name, variant in _variants(config):
        runtime = start(variant.precision, device).for_run(config.runtime, config.steps_per_program)
        echo(f"timing {name} ..." + " (compiling first, which takes a minute)" * runtime.compiles)
        batch = _batch(variant, preprocessing, store, rows)
        # A run draws masks and augmentation while the device computes.
        batch = replace(batch, drawn=draw(variant, preprocessing, batch))
        trials.append(_trial(name, variant, preprocessing, batch, runtime, steps))
    return Bench(config, trials, _reading(config, store, rows, steps) if store is not None else None)


def _variants(config: PretrainConfig) -> list[tuple[str, PretrainConfig]]:
    """The config as it is, and variants that differ in one setting."""
    data = config.data
    accumulation(data.global_batch_size, data.per_device_batch_size, 1)
    other = "fp32" if config.precision == "bf16" else "bf16"
    changes = {other: f"precision={other}"}
    twice = 2 * data.per_device_batch_size
    if data.global_batch_size % twice == 0:
        changes[f"micro-batch {twice}"] = f"data.per_device_batch_size={twice}"
    values = config.model_dump(mode="json")
    variants = [(name, load(PretrainConfig, values, [change])) for name, change in changes.items()]
    return [("as configured", config), *variants]


def _difference(trial: Trial, now: Trial) -> str:
    if trial.precision != now.precision:
        return f"precision={trial.precision}"
    return f"data.per_device_batch_size={trial.micro_batch}"


def _trial(
    name: str, config: PretrainConfig, preprocessing: Preprocessing, batch: Batch, runtime: Runtime, steps: int
) -> Trial:
    data = config.data
    micro_steps = accumulation(data.global_batch_size, data.per_device_batch_size, runtime.world)
    cost = cost_on(runtime, config, preprocessing, data.per_device_batch_size, micro_steps)
    trial = Trial(name, config.precision, data.per_device_batch_size, None, 0.0, 0.0, cost.peak_bytes / GB)
    if trial.estimated_gb > (free := runtime.free_memory_gb()):
        return replace(trial, trouble=f"does not fit: {trial.estimated_gb:.1f} GB estimated, {free:.1f} GB free")
    # Before and after: other work on the machine may slow one of them down.
    peak = product_flops_per_s(runtime, config, preprocessing)
    learner = Learner(config, preprocessing, runtime)
    # A rate so low that random weights stay finite; an update takes as long at any rate.
    learner.set_rates(1e-6, 0.0, 0.999)
    passes, updates = [], []
    try:
        for _ in range(steps + 1):
            begun = time.perf_counter()
            loss = accumulate(learner, batch, config.objective.context_loss, everything=False)[0].loss
            float(loss)  # reading a number waits for the device
            passed = time.perf_counter()
            float(runtime.clip(learner.trained, config.clip_grad_norm))
            learner.update(torch.ones((), dtype=torch.bool, device=runtime.device))
            float(learner.trained[0].detach().flatten()[0])
            passes.append(passed - begun)
            updates.append(time.perf_counter() - passed)
        if learner.micro_batch != data.per_device_batch_size:
            return replace(trial, trouble=f"ran out of memory; {learner.micro_batch} volume(s) at a time fit")
    except TrainingError as error:
        return replace(trial, trouble=str(error))
    finally:
        del learner
        runtime.release()
    # One micro-batch was timed; a step has several, and a single update.
    step_s = micro_steps * statistics.median(passes[1:]) + statistics.median(updates[1:])
    peak = max(peak, product_flops_per_s(runtime, config, preprocessing))
    return replace(trial, step_s=step_s, volumes_per_s=data.global_batch_size / step_s, mfu=cost.flops / step_s / peak)


def _batch(config: PretrainConfig, preprocessing: Preprocessing, store: Store | None, rows: np.ndarray) -> Batch:
    """One micro-batch of the store, or of random voxels with a tissue band in the middle."""
    size, whole = config.data.per_device_batch_size, config.data.global_batch_size
    if store is not None:
        # The share of one of as many ranks as there are micro-batches: phantoms have theirs in global batches only.
        with Loader(store, rows, whole, config.seed, world=whole // size, prefetch=0) as loader:
            return loader.batches(0)
    return batch_of_voxels(np.random.default_rng(0).integers(0, 256, (size, *preprocessing.image_size), dtype=np.uint8))


def _reading(config: PretrainConfig, store: Store, rows: np.ndarray, steps: int) -> float:
    """Volumes per second of the store, read as in training."""
    with Loader(store, rows, config.data.global_batch_size, config.seed, prefetch=0) as loader:
        loader.batches(0)
        begun = time.perf_counter()
        for step in range(1, steps + 1):
            loader.batches(step)
        return steps * config.data.global_batch_size / (time.perf_counter() - begun)
