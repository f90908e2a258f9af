"""The tables of docs/scaling.md, from the config's own counts and the constants named there: `python
docs/scaling_tables.py`."""

from dataclasses import dataclass

from octfm.pretraining.learner import build_objective
from octfm.pretraining.preflight.cost import step_cost
from octfm.pretraining.settings import PretrainConfig, load_config
from octfm.volume.preprocessing import Preprocessing

VOLUMES = (600, 26_000, 1_000_000)
MFU = 0.3
"""Share of the peak that a step reaches: an assumption. Measured on a CPU: see docs/scaling.md."""
READ_PER_CORE = {"uncompressed": 240, "zstd": 94}
"""Volumes per second and core of the loader: half of what two threads reached on the idle machine (docs/log)."""
CHECKPOINT_HOLD_S = 0.16 / 381e6
"""Seconds per byte for which a checkpoint holds the loop, measured on a CPU (docs/log); the rest is written in the
background."""


@dataclass(frozen=True)
class Machine:
    """Vendors' figures, per device."""

    name: str
    devices: int
    hosts: int
    peak: float
    """FLOP/s in bf16."""
    link: float
    """Bytes/s that one device sends while all do, in the slowest part of a ring."""
    cores: int
    """Of a host, for reading."""


A100 = 312e12
MACHINES = (
    Machine("1 GPU (A100)", 1, 1, A100, float("inf"), 12),
    Machine("8 GPUs (A100, NVLink)", 8, 1, A100, 250e9, 96),
    Machine("64 GPUs (8 hosts, 200 Gb/s per GPU)", 64, 8, A100, 20e9, 96),
    Machine("v4-32 (16 chips, 4 hosts)", 16, 4, 275e12, 100e9, 240),
)


@dataclass(frozen=True)
class Epoch:
    """Seconds of one pass over the volumes."""

    compute: float
    input: float
    communication: float
    checkpoints: float

    @property
    def total(self) -> float:
        """Reading goes on beside everything else; gradients are averaged after the last backward pass, so they are
        added."""
        return max(self.compute + self.communication + self.checkpoints, self.input)


@dataclass(frozen=True)
class Model:
    """What one config asks for."""

    flops: float
    """Per volume."""
    trained: int
    checkpoint_bytes: int
    batch: int
    """Volumes of an update."""
    checkpoint_steps: int

    @classmethod
    def of(cls, config: PretrainConfig) -> "Model":
        model = build_objective(config, Preprocessing())
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        total = sum(p.numel() for p in model.parameters())
        cost = step_cost(config, Preprocessing(), 1, 1)
        return cls(
            cost.flops, trained, 4 * (total + 2 * trained), config.data.global_batch_size, config.ckpt_every_steps
        )

    def sent(self, devices: int) -> float:
        """Bytes that one device sends per update: a ring all-reduce of float32 gradients."""
        return 2 * (devices - 1) / devices * 4 * self.trained

    def epoch(self, machine: Machine, volumes: int, stored: str) -> Epoch:
        # A smaller batch than there are devices leaves some of them idle: one volume each, then.
        batch = max(self.batch, machine.devices)
        steps = volumes / batch
        return Epoch(
            compute=volumes * self.flops / (machine.devices * machine.peak * MFU),
            input=volumes / (READ_PER_CORE[stored] * machine.cores * machine.hosts),
            communication=steps * self.sent(machine.devices) / machine.link,
            checkpoints=steps / self.checkpoint_steps * self.checkpoint_bytes * CHECKPOINT_HOLD_S,
        )


def duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"


def main() -> None:
    for name, overrides in (
        ("3,072 of 9,216 tokens (preset vit_s)", ()),
        ("all 9,216 tokens (masks.budget=null)", ("masks.budget=null",)),
    ):
        model = Model.of(load_config("vit_s", overrides))
        print(
            f"\n**ViT-S/12, {name}**: {model.flops / 1e12:.2f} TFLOP per volume, {model.trained / 1e6:.1f} M trained parameters, ",
            end="",
        )
        print(f"checkpoint {model.checkpoint_bytes / 1e6:.0f} MB, batch {model.batch} (64 on 64 GPUs).\n")
        print(
            "| machine | sent per update and device | "
            + " | ".join(f"{n:,} volumes" for n in VOLUMES)
            + " | shares of the step, 26,000 volumes |"
        )
        print("|---|---|" + "---|" * (len(VOLUMES) + 1))
        for machine in MACHINES:
            epochs = [model.epoch(machine, n, "zstd") for n in VOLUMES]
            middle = epochs[1]
            parts = (
                ("compute", middle.compute),
                ("communication", middle.communication),
                ("checkpoints", middle.checkpoints),
            )
            busy = sum(seconds for _, seconds in parts)
            shares = (
                ", ".join(f"{what} {seconds / busy:.1%}" for what, seconds in parts)
                + f"; input {middle.input / busy:.0%} beside it"
            )
            cells = " | ".join(duration(e.total) for e in epochs)
            print(f"| {machine.name} | {model.sent(machine.devices) / 1e6:.0f} MB | {cells} | {shares} |")


if __name__ == "__main__":
    main()
