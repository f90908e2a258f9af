"""All settings of a pretraining run, section by section; the config is the experiment."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, ValidationInfo, model_validator

from octfm.addresses import expect_local, expect_place, refuse_windows
from octfm.config import Config, LocalPlace, Seed, load
from octfm.errors import ConfigError, shown
from octfm.models.objectives.builtin import AnyObjective
from octfm.models.objectives.jepa import JEPAConfig
from octfm.models.objectives.objective import ObjectiveConfig
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import ViTConfig
from octfm.pretraining import prototype_keys
from octfm.pretraining.augment import AugmentConfig
from octfm.pretraining.masks import MaskConfig
from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.monitors.online_probe import OnlineProbeConfig
from octfm.pretraining.schedule import ScheduleConfig
from octfm.run.runtime import Precision, RuntimeConfig
from octfm.run.tracking import TrackingConfig
from octfm.store.loader import DataConfig

Beta = Annotated[float, Field(ge=0, lt=1)]
DEFAULT_STEPS = 100_000
MAX_STEPS = 10_000_000
"""Most steps of a run: the preflight evaluates the schedule at every one of them (F1)."""
Epochs = Annotated[float, Field(gt=0, le=1e6)]
Every = Annotated[int, Field(ge=1, le=MAX_STEPS)]


class PretrainConfig(Config):
    """Settings of a pretraining run."""

    seed: Seed = 0
    """Decides initial weights, order of volumes, augmentation and masks."""
    steps: Every = DEFAULT_STEPS
    """Optimizer updates."""
    epochs: Epochs | None = None
    """Instead of steps: passes over the training volumes; becomes steps once the store is known."""
    precision: Precision = "bf16"
    """Arithmetic of the networks: bfloat16 where it is safe, or float32 throughout."""
    data: DataConfig = DataConfig()
    model: ViTConfig = ViTConfig()
    predictor: PredictorConfig = PredictorConfig()
    objective: AnyObjective = JEPAConfig()
    masks: MaskConfig = MaskConfig()
    augment: AugmentConfig = AugmentConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    health: HealthConfig = HealthConfig()
    tracking: TrackingConfig = TrackingConfig()
    probe: OnlineProbeConfig = OnlineProbeConfig()
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates."""
    clip_grad_norm: float = Field(default=3.0, gt=0, le=1e12)
    """Gradients are scaled down to this norm; the norm before clipping is what is logged (F3)."""
    log_every_steps: Every = 10
    """Steps between rows of metrics.jsonl."""
    validate_every_steps: Every = 500
    """Steps between validation losses on held-out participants."""
    validation_volumes: int = Field(default=64, ge=1, le=1_000_000)
    """Largest number of held-out volumes for the validation loss."""
    ckpt_every_steps: Every = 500
    """Steps between checkpoints."""
    ckpt_every_epochs: Epochs | None = None
    """Instead of ckpt_every_steps, in passes over the training volumes."""
    keep_checkpoints: int = Field(default=2, ge=1, le=100_000)
    """Number of newest checkpoints that are kept; the last healthy one is kept as well, for a rollback."""
    keep_every_steps: Every | None = None
    """Also keep the first checkpoint of every such interval for good."""
    keep_every_epochs: Epochs | None = None
    """The same, in passes over the training volumes."""
    ckpt_second_dir: LocalPlace | None = None
    """A folder on another disk, for checkpoints that the run folder's own has no room for."""

    @property
    def steps_per_program(self) -> int:
        """Steps that share a compiled program, those of one of masks.stages; 0 if the objective gathers statistics."""
        return 0 if self.objective.gathers else self.steps // max(1, len(self.masks.stages))

    def with_objective(self, objective: ObjectiveConfig) -> "PretrainConfig":
        """The same run with another objective. Raises ConfigError if it does not fit the other settings."""
        if not isinstance(objective, ObjectiveConfig):
            name = objective.__name__ if isinstance(objective, type) else "MyObjectiveConfig"
            raise ConfigError(
                f"objective: expected settings such as {name}(), which are an object, got {shown(objective)}"
            )
        # Through `load` and not model_copy, so that validators compare it with the other settings.
        return load(PretrainConfig, dict(self) | {"objective": objective})

    def on_device(self, device: str | torch.device | None) -> tuple["PretrainConfig", str | torch.device | None]:
        """The same run on this device, and the device to name to the runtime: `xla` is an engine (runtime.parallel).
        Raises ConfigError if the run cannot be compiled for XLA, or if its settings name another engine."""
        if device != "xla" or self.runtime.parallel == "xla_spmd":
            return self, None if device == "xla" else device
        if self.runtime.parallel != "ddp":
            raise ConfigError(
                f"device xla is runtime.parallel=xla_spmd, and the settings say {self.runtime.parallel}; leave one out"
            )
        engine = self.runtime.model_copy(update={"parallel": "xla_spmd"})
        return load(PretrainConfig, dict(self) | {"runtime": engine}), None

    @model_validator(mode="after")
    def _one_length(self) -> "PretrainConfig":
        if self.epochs is not None and self.steps != DEFAULT_STEPS:
            raise ValueError(
                f"steps {self.steps} and epochs {self.epochs:g} both say how long the run is; give one of them "
                "(epochs=null)"
            )
        return self

    @model_validator(mode="after")
    def _networks_fit(self, info: ValidationInfo) -> "PretrainConfig":
        if self.model.summary and not self.objective.teaches_summary:
            raise ValueError(
                f"model.summary {self.model.summary}: objective {self.objective.name} does not train these queries; "
                "set model.summary=0, or objective.name=dense or anchored"
            )
        if self.masks.large_blocks is not None and not self.objective.takes_large_blocks:
            raise ValueError(
                f"masks.large_blocks: objective {self.objective.name} takes one set of masks; set it to null"
            )
        if self.objective.pool == "summary" and not self.model.summary:
            raise ValueError("objective.pool summary needs queries, such as model.summary=8")
        if self.objective.gathers and (self.runtime.compile or self.runtime.parallel == "xla_spmd"):
            way = "xla_spmd compiles every step: use ddp, or settings that gather none (vjepa2: target_norm=layer)"
            raise ValueError(
                f"objective {self.objective.name} with these settings gathers statistics, which compiled steps lose; "
                + ("set runtime.compile=null" if self.runtime.compile else way)
            )
        # An encoder of volumes that was fine-tuned on single B-scans has flat patches and the objective of volumes.
        if not (info.context or {}).get("stored"):
            self.objective.check(self.model)
        return self


MAY_CHANGE = {
    *("log_every_steps", "validate_every_steps", "validation_volumes", "ckpt_every_steps", "ckpt_every_epochs"),
    *("keep_checkpoints", "keep_every_steps", "keep_every_epochs", "ckpt_second_dir"),
    *("data.prefetch", "data.store", "model.activation_checkpointing", "objective.pool"),
    *("health.check_every_steps", "health.margin", "runtime.parallel", "runtime.compile", "runtime.timeout_s"),
    *("tracking.tensorboard", "tracking.wandb", "tracking.project", "tracking.step_deadline_s"),
    *("probe.target", "probe.labels", "probe.every_steps", "probe.volumes"),
}
"""Settings that a resumed run may change without ceasing to be the same run."""


def load_config(
    source: str | Path, overrides: Iterable[str] = (), *, objective: type[ObjectiveConfig] | None = None
) -> PretrainConfig:
    """A pretraining config from a YAML file or a packaged one (`vit_s`), with `section.key=value` overrides.

    `objective`: settings class of an objective of your own, for a file whose `objective.name` is its name.
    """
    try:
        return load(PretrainConfig, source, overrides, {"objective": objective})
    except ConfigError:
        # One error maps all settings of a prototype's YAML; any other problem is reported as it is.
        prototype_keys.refuse(source, PretrainConfig)
        raise


def stored_config(settings: dict[str, Any], objective: type[ObjectiveConfig] | None = None) -> PretrainConfig:
    """The settings inside a checkpoint or an export; `objective` as in `load_config`. Paths that are not valid here, on
    another machine than the one that wrote them, become None."""
    # A copy of each section: the caller's settings stay as they are.
    kept = {name: dict(value) if isinstance(value, dict) else value for name, value in settings.items()}
    places = (
        (kept, "ckpt_second_dir", expect_local),
        (kept.get("model"), "init", expect_place),
        (kept.get("probe"), "labels", expect_local),
        (kept.get("data"), "store", expect_place),
    )
    for section, name, expect in places:
        if isinstance(section, dict) and isinstance(value := section.get(name), str):
            try:
                refuse_windows(value)
                expect(value)
            except ConfigError:
                section[name] = None
    return load(PretrainConfig, kept, context={"objective": objective, "stored": True})


def in_steps(config: PretrainConfig, volumes: float) -> PretrainConfig:
    """The same settings with epochs converted to steps for this number of volumes per epoch."""

    def steps(epochs: float) -> int:
        count = max(1, round(epochs * volumes / config.data.global_batch_size))
        if count > MAX_STEPS:
            raise ConfigError(
                f"epochs={epochs:g} of {volumes:,.0f} volumes are {count:,} steps of {config.data.global_batch_size}; "
                f"the most is {MAX_STEPS:,}: choose fewer epochs or a larger data.global_batch_size"
            )
        return count

    changes: dict[str, Any] = {}
    if config.epochs is not None:
        changes |= {"steps": steps(config.epochs), "epochs": None}
    if config.ckpt_every_epochs is not None:
        changes |= {"ckpt_every_steps": steps(config.ckpt_every_epochs), "ckpt_every_epochs": None}
    return config.model_copy(update=changes)


SMOKE_IMAGE_SIZE, SMOKE_SPACING = (16, 128, 128), (0.375, 0.0156, 0.047)
"""Size and spacing of the phantom volumes that `--smoke` creates if no store is given."""


def smoke(config: PretrainConfig, ranks: int = 1) -> PretrainConfig:
    """The same run small enough for a CPU and a minute: same objective, patches, masks and schedule; few steps, narrow,
    few tokens; the same number of volumes for each of `ranks`."""
    share = max(1, 4 // ranks)
    batch = min(share * ranks, config.data.global_batch_size)
    micro = max(n for n in (1, 2, 4) if batch // ranks % n == 0 and n <= config.data.per_device_batch_size)
    depth = min(2, config.model.depth)
    data: dict[str, int] = {"global_batch_size": batch, "per_device_batch_size": micro}
    if config.data.phantoms is None or config.data.phantoms.share < 1:
        data["max_samples"] = min(8, most if isinstance(most := config.data.max_samples, int) else 8)
    return config.model_copy(
        update={
            "steps": 10,
            "epochs": None,
            # A CPU need not have fast bfloat16.
            "precision": "fp32",
            "data": config.data.model_copy(update=data),
            "model": config.model.model_copy(update={"width": 48, "heads": 2, "depth": depth, "init": None}),
            "predictor": config.predictor.model_copy(update={"width": 48, "heads": 2, "depth": 1}),
            "objective": config.objective.shrunk(depth),
            "masks": config.masks.model_copy(update={"budget": min(128, config.masks.budget or 128)}),
            "log_every_steps": min(2, config.log_every_steps),
            "validate_every_steps": 5,
            "validation_volumes": min(4, config.validation_volumes),
            "ckpt_every_steps": 5,
            "ckpt_every_epochs": None,
        }
    )
