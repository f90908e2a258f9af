"""All settings of a pretraining run, section by section; the config is the experiment."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from octfm.addresses import expect_local, expect_place
from octfm.config import Config, LocalPlace, Seed, load
from octfm.errors import ConfigError
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
"""Every one is evaluated before step 0 (F1)."""
Epochs = Annotated[float, Field(gt=0, le=1e6)]
Every = Annotated[int, Field(ge=1, le=MAX_STEPS)]


class PretrainConfig(Config):
    """One run."""

    seed: Seed = 0
    steps: Every = DEFAULT_STEPS
    """Optimizer updates."""
    epochs: Epochs | None = None
    """Instead of steps: passes over the training volumes. Becomes steps as soon as the store is known, and is stored as such."""
    precision: Precision = "bf16"
    data: DataConfig = DataConfig()
    model: ViTConfig = ViTConfig()
    predictor: PredictorConfig = PredictorConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
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
    validate_every_steps: Every = 500
    validation_volumes: int = Field(default=64, ge=1, le=1_000_000)
    """At most so many held-out volumes are used for the validation loss."""
    ckpt_every_steps: Every = 500
    ckpt_every_epochs: Epochs | None = None
    """Instead of ckpt_every_steps, in passes over the training volumes."""
    keep_checkpoints: int = Field(default=2, ge=1, le=100_000)
    """So many of the newest checkpoints are kept."""
    keep_every_steps: Every | None = None
    """Besides, the first checkpoint of every so many steps is kept for good."""
    keep_every_epochs: Epochs | None = None
    """The same, in passes over the training volumes."""
    ckpt_second_dir: LocalPlace | None = None
    """A folder on another disk, for checkpoints that the run folder's own has no room for."""

    @model_validator(mode="after")
    def _one_length(self) -> "PretrainConfig":
        if self.epochs is not None and self.steps != DEFAULT_STEPS:
            raise ValueError(
                f"steps {self.steps} and epochs {self.epochs:g} both say how long the run is; give one of them (epochs=null)"
            )
        return self

    @model_validator(mode="after")
    def _compiles(self) -> "PretrainConfig":
        if self.runtime.parallel == "xla_spmd" and self.objective.target_norm == "whiten":
            raise ValueError(
                "objective.target_norm whiten needs an eigendecomposition, which XLA does not compile; use layer with xla_spmd"
            )
        return self

    @model_validator(mode="after")
    def _predictor_heads_fit(self) -> "PretrainConfig":
        if self.predictor.width % self.predictor.heads or (self.predictor.width // self.predictor.heads) % 2:
            raise ValueError(
                f"predictor.width {self.predictor.width} must split into {self.predictor.heads} heads of even size"
            )
        if self.objective.target_levels > self.model.depth:
            raise ValueError(
                f"objective.target_levels {self.objective.target_levels} exceeds the {self.model.depth} blocks of model.depth"
            )
        if self.objective.name != "vjepa2" and self.objective.target_norm != "layer":
            goals = "data2vec compares directions" if self.objective.name == "data2vec" else "mae predicts voxels"
            raise ValueError(f"objective.target_norm whiten belongs to objective.name vjepa2; {goals}")
        if self.objective.name != "vjepa2" and self.objective.voxel_loss:
            raise ValueError(
                f"objective.voxel_loss belongs to objective.name vjepa2, not {self.objective.name}; set it to 0"
            )
        average, patch = self.objective.goal_average, self.model.patch_size
        if self.objective.name == "data2vec" and average != (1, 1, 1):
            raise ValueError(
                "objective.goal_average belongs to objective.name vjepa2 or mae, not data2vec; set it to [1, 1, 1]"
            )
        if any(side % over for side, over in zip(patch, average, strict=True)):
            raise ValueError(f"objective.goal_average {list(average)} must divide model.patch_size {list(patch)}")
        if average == patch and (self.objective.name == "mae" or self.objective.voxel_loss):
            raise ValueError(
                f"objective.goal_average {list(average)} leaves one number of a patch, which has no contrast to predict; halve it"
            )
        if self.objective.name == "mae" and self.objective.target_levels != 1:
            raise ValueError(
                "objective.target_levels belongs to objective.name vjepa2; mae predicts voxels, set it to 1"
            )
        return self


MAY_CHANGE = {
    "log_every_steps",
    "validate_every_steps",
    "validation_volumes",
    "ckpt_every_steps",
    "ckpt_every_epochs",
    "keep_checkpoints",
    "keep_every_steps",
    "keep_every_epochs",
    "ckpt_second_dir",
    "data.prefetch",
    "model.activation_checkpointing",
    "runtime.parallel",
    "runtime.timeout_s",
    "tracking.tensorboard",
    "tracking.wandb",
    "tracking.project",
    "tracking.step_deadline_s",
    "objective.pool",
    "probe.target",
    "probe.labels",
    "probe.every_steps",
    "probe.volumes",
    "data.store",
}
"""Settings that a resumed run may change without ceasing to be the same run."""


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> PretrainConfig:
    """A pretraining config from a YAML file or the name of a packaged one (`vit_s`), with `section.key=value` overrides."""
    try:
        return load(PretrainConfig, source, overrides)
    except ConfigError:
        # Settings of the prototype are told all at once; anything else is told as it is.
        prototype_keys.refuse(source, PretrainConfig)
        raise


def stored_config(settings: dict[str, Any]) -> PretrainConfig:
    """The settings inside a checkpoint or an export. Paths of the machine that it was made on are not needed to read it, and earlier
    versions took some of them for folders that are addresses."""
    kept = {name: dict(value) if isinstance(value, dict) else value for name, value in settings.items()}
    places = (
        (kept, "ckpt_second_dir", expect_local),
        (kept.get("model"), "init", expect_local),
        (kept.get("probe"), "labels", expect_local),
        (kept.get("data"), "store", expect_place),
    )
    for section, name, expect in places:
        if isinstance(section, dict) and isinstance(value := section.get(name), str):
            try:
                expect(value)
            except ConfigError:
                section[name] = None
    return load(PretrainConfig, kept)


def in_steps(config: PretrainConfig, volumes: int) -> PretrainConfig:
    """The same settings with epochs as steps, now that it is known how many volumes are trained on."""

    def steps(epochs: float) -> int:
        count = max(1, round(epochs * volumes / config.data.global_batch_size))
        if count > MAX_STEPS:
            raise ConfigError(
                f"epochs={epochs:g} of {volumes:,} volumes are {count:,} steps of {config.data.global_batch_size}; "
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
"""Of the volumes that `--smoke` makes when it is given none."""


def smoke(config: PretrainConfig) -> PretrainConfig:
    """The same run small enough for a CPU and a minute: same objective, patches, masks and schedule; few steps, narrow, few tokens."""
    batch = min(4, config.data.global_batch_size)
    micro = max(n for n in (1, 2, 4) if batch % n == 0 and n <= config.data.per_device_batch_size)
    depth = min(2, config.model.depth)
    data = {
        "global_batch_size": batch,
        "per_device_batch_size": micro,
        "max_samples": min(8, most if isinstance(most := config.data.max_samples, int) else 8),
    }
    return config.model_copy(
        update={
            "steps": 10,
            "epochs": None,
            "precision": "fp32",
            "data": config.data.model_copy(update=data),
            "model": config.model.model_copy(update={"width": 48, "heads": 2, "depth": depth}),
            "predictor": config.predictor.model_copy(update={"width": 48, "heads": 2, "depth": 1}),
            "objective": config.objective.model_copy(
                update={"target_levels": min(depth, config.objective.target_levels)}
            ),
            "masks": config.masks.model_copy(update={"budget": min(128, config.masks.budget or 128)}),
            "log_every_steps": min(2, config.log_every_steps),
            "validate_every_steps": 5,
            "validation_volumes": min(4, config.validation_volumes),
            "ckpt_every_steps": 5,
            "ckpt_every_epochs": None,
        }
    )


def differences(a: PretrainConfig, b: PretrainConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ and which a resumed run must not change, with both values."""
    left, right = _flat(a.model_dump(mode="json")), _flat(b.model_dump(mode="json"))
    return {key: (left[key], right[key]) for key in sorted(left) if left[key] != right[key] and key not in MAY_CHANGE}


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
