"""The built-in objectives, and how the section `objective` of a config becomes the settings of one."""

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, SerializeAsAny, ValidationInfo

from octfm.errors import ConfigError, shown
from octfm.models.objectives.anchored import AnchoredConfig
from octfm.models.objectives.data2vec import Data2VecConfig
from octfm.models.objectives.dense import DenseConfig
from octfm.models.objectives.jepa import JEPAConfig
from octfm.models.objectives.mae import MAEConfig
from octfm.models.objectives.objective import Objective, ObjectiveConfig
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import TokenGrid, ViTConfig

BUILT_IN: dict[str, type[ObjectiveConfig]] = {
    "vjepa2": JEPAConfig,
    "data2vec": Data2VecConfig,
    "mae": MAEConfig,
    "dense": DenseConfig,
    "anchored": AnchoredConfig,
}


class UnknownObjective(ObjectiveConfig):
    """Settings of an objective whose code was not passed: enough to embed with its encoder, not to train.

    `build` raises ConfigError.
    """

    model_config = ConfigDict(extra="allow")

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> Objective:
        raise ConfigError(_unknown(self.name))


def read_objective(value: Any, info: ValidationInfo) -> Any:
    """Settings of the objective that a mapping names; settings given as an object are checked.

    The name chooses among the built-in objectives and `objective` of the validation context. It never causes an import:
    a config or a checkpoint must not choose code to run. With `stored` in the context, the settings come from a
    checkpoint and may be those of an unknown objective. Raises ValueError for an unknown name and for settings of
    another objective.
    """
    context = info.context or {}
    plug_in: type[ObjectiveConfig] | None = context.get("objective")
    if isinstance(value, ObjectiveConfig):
        if value.name in BUILT_IN and type(value) is not BUILT_IN[value.name]:
            raise ValueError(f"name {value.name} is that of a built-in objective; give {type(value).__name__} another")
        return type(value).model_validate(dict(value))
    if not isinstance(value, dict):
        return value
    name = value.get("name", "vjepa2")
    if not isinstance(name, str) or name not in BUILT_IN:
        if plug_in is not None and name == plug_in.model_fields["name"].default:
            return plug_in.model_validate(value)
        if context.get("stored"):
            return UnknownObjective.model_validate(value)
        raise ValueError(_unknown(name))
    cls = BUILT_IN[name]
    return cls.model_validate({key: found for key, found in value.items() if not _belongs_to_others(cls, key, found)})


def _belongs_to_others(cls: type[ObjectiveConfig], key: str, value: Any) -> bool:
    """Whether a setting belongs to other built-in objectives only and has their default: earlier versions stored the
    settings of all objectives.

    Raises ValueError for another value, which would have no effect.
    """
    name = cls.model_fields["name"].default
    owners = [other for other, config in BUILT_IN.items() if key in config.model_fields]
    # A key that no objective knows is kept, so that validation names it.
    if key in cls.model_fields or not owners:
        return False
    default = BUILT_IN[owners[0]].model_fields[key].default
    value = tuple(value) if isinstance(value, list) else value
    if value != default and key not in getattr(cls, "ignored", ()):
        default = list(default) if isinstance(default, tuple) else default
        raise ValueError(
            f"objective.{key} belongs to objective.name {' or '.join(owners)}, not {name}; set it to {default}"
        )
    return True


def _unknown(name: Any) -> str:
    return (
        f"name {shown(name)} is none of the built-in objectives ({', '.join(BUILT_IN)}); pass an objective of your own "
        "as an object: octfm.pretrain(…, objective=…), load_config(…, objective=…) or load_encoder(…, objective=…)"
    )


AnyObjective = Annotated[SerializeAsAny[ObjectiveConfig], BeforeValidator(read_objective)]
"""Type of the section `objective`."""
