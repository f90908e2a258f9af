"""All settings of a pretraining run, section by section; the config is the experiment."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from octfm.config import Config, load
from octfm.data.loader import DataConfig
from octfm.masks import MaskConfig
from octfm.models.objective import ObjectiveConfig
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import ViTConfig
from octfm.training.augment import AugmentConfig
from octfm.training.health import HealthConfig
from octfm.training.runtime import Precision
from octfm.training.schedule import ScheduleConfig

Beta = Annotated[float, Field(ge=0, lt=1)]


class PretrainConfig(Config):
    """One run."""

    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=100_000, ge=1)
    """Optimizer updates."""
    precision: Precision = "bf16"
    data: DataConfig = DataConfig()
    model: ViTConfig = ViTConfig()
    predictor: PredictorConfig = PredictorConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    masks: MaskConfig = MaskConfig()
    augment: AugmentConfig = AugmentConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    health: HealthConfig = HealthConfig()
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates."""
    clip_grad_norm: float = Field(default=3.0, gt=0)
    """Gradients are scaled down to this norm; the norm before clipping is what is logged (F3)."""
    log_every_steps: int = Field(default=10, ge=1)
    validate_every_steps: int = Field(default=500, ge=1)
    validation_volumes: int = Field(default=64, ge=1)
    """At most so many held-out volumes are used for the validation loss."""
    ckpt_every_steps: int = Field(default=500, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    """So many of the newest checkpoints are kept."""
    keep_every_steps: int | None = Field(default=None, ge=1)
    """Besides, the first checkpoint of every so many steps is kept for good."""
    keep_every_epochs: float | None = Field(default=None, gt=0)
    """The same, in passes over the training volumes."""
    ckpt_second_dir: str | None = None
    """Another disk, for checkpoints that the run folder's own has no room for."""

    @model_validator(mode="after")
    def _predictor_heads_fit(self) -> "PretrainConfig":
        if self.predictor.width % self.predictor.heads or (self.predictor.width // self.predictor.heads) % 2:
            raise ValueError(f"predictor.width {self.predictor.width} must split into {self.predictor.heads} heads of even size")
        if self.objective.target_levels > self.model.depth:
            raise ValueError(f"objective.target_levels {self.objective.target_levels} exceeds the {self.model.depth} blocks of model.depth")
        if self.objective.name == "data2vec" and self.objective.target_norm != "layer":
            raise ValueError("objective.target_norm whiten belongs to objective.name vjepa2; data2vec compares directions")
        return self


MAY_CHANGE = {
    "log_every_steps",
    "validate_every_steps",
    "validation_volumes",
    "ckpt_every_steps",
    "keep_checkpoints",
    "keep_every_steps",
    "keep_every_epochs",
    "ckpt_second_dir",
    "data.prefetch",
    "data.store",
}
"""Settings that a resumed run may change without ceasing to be the same run."""


def load_config(source: str | Path, overrides: Iterable[str] = ()) -> PretrainConfig:
    """A pretraining config from a YAML file or the name of a packaged one (`vit_s`), with `section.key=value` overrides."""
    return load(PretrainConfig, source, overrides)


def differences(a: PretrainConfig, b: PretrainConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ and which a resumed run must not change, with both values."""
    left, right = _flat(a.model_dump(mode="json")), _flat(b.model_dump(mode="json"))
    return {key: (left[key], right[key]) for key in sorted(left) if left[key] != right[key] and key not in MAY_CHANGE}


def _flat(values: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
