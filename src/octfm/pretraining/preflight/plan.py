"""Propose preset, batch and length of a pretraining run for a store and this machine, with the hours that it takes."""

import shlex
import time
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np

from octfm.catalog.participants.ids import under_one_id
from octfm.display import duration
from octfm.errors import StoreError
from octfm.io.progress import Progress
from octfm.pretraining.data import training_rows
from octfm.pretraining.preflight.cost import block_flops_per_s
from octfm.pretraining.preflight.data import arithmetic, patches_tile
from octfm.pretraining.preflight.resources import micro_batches, step_time
from octfm.pretraining.settings import PretrainConfig, load_config
from octfm.run.runtime import Precision, Runtime, start, torch_defaults
from octfm.store.selection import evenly
from octfm.store.store import Store
from octfm.weights.packaged import CURRENT_ENCODER

PRESETS = ("mae", "vit_s", "demo")
"""By preference: short runs learn more from masked voxels than from a teacher's features (docs/results.md)."""
EPOCHS = 300
"""Passes over the volumes that are proposed: three times the 100 until which the prototype's features improved."""
MOST_STEPS = 60_000
"""Most steps that are proposed: the length of mae and vit_s."""
STEPS_PER_EPOCH = 8
"""The batch is halved until an epoch has so many steps, or the batch is SMALLEST_BATCH."""
SMALLEST_BATCH = 4
SAMPLE = 16
"""Volumes read to measure the store's speed."""
WORTH_LESS_H = 0.5
"""Hours of a run below which the plan says that the packaged encoder is likely to be worth more: runs of a quarter of
an hour were worth less (docs/results.md), longer ones were not compared with it."""
FEW_PARTICIPANTS = 100
"""Training participants below which the plan says that little is to be expected."""


@dataclass(frozen=True)
class Candidate:
    """A preset on this store and machine, with the changes to it. `trouble` says why it cannot run, empty if it can."""

    preset: str
    config: PretrainConfig
    """With the changes; the preset's own if it cannot run."""
    changes: tuple[str, ...] = ()
    step_s: float = 0.0
    """Forecast of one step, reading included, in seconds."""
    trouble: str = ""

    @property
    def hours(self) -> float:
        """Forecast of all steps, without validation and checkpoints."""
        return self.config.steps * self.step_s / 3600

    def shortened(self, hours: float) -> "Candidate":
        """The same with as many steps as fit into the hours, at least one."""
        steps = max(1, int(hours * 3600 / self.step_s))
        return replace(self, config=self.config.model_copy(update={"steps": min(steps, self.config.steps)}))


@dataclass(frozen=True)
class Plan:
    """What was found, and what is proposed."""

    store: str
    volumes: int
    """Training volumes."""
    participants: int
    """Training participants."""
    validation_volumes: int
    machine: str
    hours: float
    """What the run may take."""
    candidates: tuple[Candidate, ...]
    device: str | None = None
    """As it was named; None: the default."""

    @property
    def chosen(self) -> Candidate | None:
        """The first candidate whose whole length fits into the hours, else the one that gets furthest, shortened."""
        able = [candidate for candidate in self.candidates if not candidate.trouble]
        whole = [candidate for candidate in able if candidate.hours <= self.hours]
        if whole or not able:
            return whole[0] if whole else None
        return min(able, key=lambda candidate: candidate.hours).shortened(self.hours)

    def epochs(self, candidate: Candidate) -> float:
        """Passes over the training volumes."""
        return candidate.config.steps * candidate.config.data.global_batch_size / self.volumes

    def command(self, verb: str, *words: str) -> str:
        """The command line that pretrains (or examines) what is proposed. Needs a chosen candidate."""
        chosen = self.chosen
        assert chosen is not None
        length = ["--steps", str(chosen.config.steps)]
        place = ["--device", self.device] if self.device is not None else []
        return shlex.join(
            ["octfm", verb, chosen.preset, "--store", self.store, *length, *chosen.changes, *place, *words]
        )

    def lines(self) -> list[str]:
        """The plan for a terminal."""
        found = [
            f"{self.store}: {self.volumes:,} training volumes of {self.participants:,} participants, "
            f"{self.validation_volumes:,} volumes to validate on",
            f"this machine: {self.machine}",
            f"{'':<8}{'batch':>6}{'a step':>10}{'steps':>8}{'epochs':>8}{'time':>11}",
        ]
        for each in self.candidates:
            if each.trouble:
                found.append(f"{each.preset:<8}{each.trouble}")
                continue
            found.append(
                f"{each.preset:<8}{each.config.data.global_batch_size:>6}{duration(each.step_s):>10}"
                f"{each.config.steps:>8,}{self.epochs(each):>8,.0f}{duration(3600 * each.hours):>11}"
            )
        chosen = self.chosen
        if chosen is None:
            return [
                *found,
                "no preset runs here: prepare a store of the default size (octfm prepare), or use a larger device",
            ]
        data = chosen.config.data
        found.append(
            f"proposed: {chosen.preset}, {chosen.config.steps:,} steps of {data.global_batch_size} volumes "
            f"({data.per_device_batch_size} at a time), {self.epochs(chosen):,.3g} epochs, about "
            f"{duration(3600 * chosen.hours)} and the time of validation"
        )
        if not any(not each.trouble and each.hours <= self.hours for each in self.candidates):
            found.append(
                f"no preset makes its whole length in {self.hours:g} hours here: allow more (--hours), use a faster "
                "device, or prepare smaller volumes"
            )
        if self.participants < FEW_PARTICIPANTS:
            found.append(
                f"{self.participants} participants are few to learn from: expect less than from the packaged "
                "encoder, and compare with the untrained network as well (octfm embed, octfm probe)"
            )
        if chosen.hours < WORTH_LESS_H:
            found.append(
                "runs of minutes, on 500 as on 5,000 phantom volumes, gave vectors that were worth less than those of "
                "the packaged encoder, which needs no training"
            )
        return [
            *found,
            f"first:   octfm prepare CATALOG --like {CURRENT_ENCODER} --out packaged && octfm embed --store packaged   "
            "(the packaged encoder, without training)",
            f"check:   {self.command('doctor')}",
            f"run:     {self.command('pretrain', '--out', f'runs/{chosen.preset}')}",
        ]


@torch_defaults()
def plan(store: Store, device: str | None = None, hours: float = 24.0) -> Plan:
    """Propose a run on the training volumes of `store` that takes at most `hours` on this device, in seconds. Time and
    memory are the doctor's estimates. Raises StoreError if the store has no training volumes."""
    if {row.layout for row in store.rows} == {"line"}:
        raise StoreError(
            f"{store.path}: holds single B-scans, expected volumes; for B-scans choose the length yourself and check "
            "it: octfm doctor vit_s --store STORE 'data.layouts=[line]' 'model.patch_size=[1,16,16]'"
        )
    config = load_config(PRESETS[0])
    train, validation = training_rows(config, store)
    if not len(train):
        raise StoreError(f"{store.path}: no volumes of the train split; scan and prepare a cohort with one")
    runtime = start(config.precision, device)
    reads = _reading_rate(store, train)
    with Progress("plan", len(PRESETS), "presets") as progress:
        candidates = [_candidate(name, store, len(train), runtime, reads) for name in progress.over(PRESETS)]
    return Plan(
        store=str(store.path),
        volumes=len(train),
        participants=len(set(under_one_id([store.rows[row].participant for row in train]))),
        validation_volumes=len(validation),
        machine=f"{runtime.hardware()}, {runtime.free_memory_gb():.1f} GB of memory free",
        hours=hours,
        candidates=tuple(candidates),
        device=device,
    )


def _reading_rate(store: Store, rows: np.ndarray) -> float:
    """Volumes per second that one process reads."""
    chosen = evenly(rows, SAMPLE)
    store.read(chosen[:1])  # open the store before timing
    begun = time.perf_counter()
    for row in chosen:
        store.read(np.array([row]))
    return len(chosen) / max(time.perf_counter() - begun, 1e-9)


def _candidate(preset: str, store: Store, volumes: int, runtime: Runtime, reads: float) -> Candidate:
    config = load_config(preset)
    tiles = patches_tile(config, store)
    if tiles.status == "FAIL":
        return Candidate(preset, config, trouble=f"does not fit the store: {tiles.measured}")
    batch = config.data.global_batch_size
    while batch > SMALLEST_BATCH and volumes < STEPS_PER_EPOCH * batch:
        batch //= 2
    micro = min(batch, config.data.per_device_batch_size)
    precision = _faster_precision(config, store, runtime)
    wanted = {"precision": precision, "data.global_batch_size": batch, "data.per_device_batch_size": micro}
    steps = min(MOST_STEPS, max(1, round(EPOCHS * volumes / batch)))
    alike = config.model_copy(update={"steps": steps}).steps_per_program
    runtime = replace(runtime, precision=precision).for_run(config.runtime, alike)

    def changed() -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in wanted.items() if value != attrgetter(key)(config))

    _, sizes = micro_batches(load_config(preset, changed()), store.preprocessing, runtime)
    if not sizes:
        return Candidate(preset, config, trouble="does not fit into memory, not even one volume at a time")
    # Accelerators gain from larger micro-batches, CPUs do not.
    largest = max(sizes) if runtime.device.type != "cpu" else micro
    wanted["data.per_device_batch_size"] = max(n for n in sizes if n <= max(largest, sizes[0]))
    proposed = load_config(preset, [*changed(), f"steps={steps}"])
    fits = arithmetic(proposed, store, 1, volumes)
    if fits.status == "FAIL":
        return Candidate(preset, config, trouble=fits.measured)
    step_s, _ = step_time(proposed, store.preprocessing, runtime)
    return Candidate(preset, proposed, changed(), max(step_s, batch / reads))


def _faster_precision(config: PretrainConfig, store: Store, runtime: Runtime) -> Precision:
    """The preset's, or fp32 where this device lacks bf16 or is faster in fp32, as many CPUs do."""
    if runtime.device.type != "cpu":
        return config.precision if config.precision == "fp32" else runtime.precision

    def rate(precision: Precision) -> float:
        return block_flops_per_s(replace(runtime, precision=precision), config, store.preprocessing)

    return config.precision if config.precision == "fp32" or rate("bf16") >= rate("fp32") else "fp32"
