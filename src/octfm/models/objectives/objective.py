"""What every objective answers with, and the content-free baseline that its loss is measured against."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from octfm.config import Config
from octfm.models.pooling import VectorPool
from octfm.models.vit3d import Side

TargetNorm = Literal["layer", "whiten"]


class ObjectiveConfig(Config):
    """Which self-supervised objective, and its weights."""

    name: Literal["vjepa2", "data2vec", "mae"] = "vjepa2"
    """`vjepa2`: predict hidden tokens from visible ones. `data2vec`: the prototype's objective made sound. `mae`: predict hidden voxels."""
    context_loss: float = Field(default=0.5, ge=0, le=1e3)
    """Weight of also predicting the visible tokens (V-JEPA 2.1); without it the features lose rank (FACTS §2)."""
    target_levels: int = Field(default=1, ge=1, le=200)
    """Depths of the target encoder that are predicted, evenly spaced up to its end (V-JEPA 2.1 takes four)."""
    target_norm: TargetNorm = "layer"
    """How goals are normalised. `layer`: each token by itself (V-JEPA 2). `whiten`: decorrelated over tokens, which keeps the rank of
    the features in short runs (docs/LOG.md); vjepa2 only."""
    voxel_loss: float = Field(default=0.0, ge=0, le=1e3)
    """Weight of also predicting the voxels of hidden tissue, as mae does: an anchor that no teacher can drag away. vjepa2 only; not part
    of the losses that are told over a baseline."""
    goal_average: tuple[Side, Side, Side] = (1, 1, 1)
    """Voxels of a patch, (B-scan, axial, lateral), that are averaged before the target encoder sees them or they are predicted: speckle,
    which nobody can predict, is averaged away, layers stay. The encoder that learns sees every voxel."""
    frozen: Literal["target", "context"] = "target"
    """Which encoder is frozen for embedding and probing: the average, or the one that learns, which is ahead where a run is too short for
    its average to follow. mae has one encoder only."""
    pool: VectorPool = "mean"
    """How the tissue tokens of a volume become its vector, for embedding and probing: their mean, or by channel the means of the highest
    and of the lowest fifth, twice as wide, which keeps focal lesions."""
    context_warmup: float = Field(default=0.1, ge=0, le=1)
    """Share of the run over which the context loss is ramped in."""


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Masks as int64 tensors on the device."""

    kept: Tensor
    """[B, K] flat grid indices, sorted."""
    context: Tensor
    """[B, C] places within `kept`."""
    target: Tensor
    """[B, T] places within `kept`."""
    tissue: Tensor | None = None
    """bool [B, K]: which kept tokens are tissue; None: unknown."""


class ObjectiveOutput(NamedTuple):
    """A typed step result: no dict keys to mistype, no tuple order to confuse (F5)."""

    loss: Tensor
    """Scalar to differentiate."""
    masked_loss_B: Tensor
    context_loss_B: Tensor
    masked_goal_BTD: Tensor
    """What the hidden tokens should have been; detached."""
    context_goal_BCD: Tensor
    features_BMD: Tensor
    """Target-encoder features of all kept tokens; the encoder's of the context where there is no target encoder. Detached."""
    features_at_BM: Tensor | None = None
    """Places within `kept` of the features; None: all of `kept`."""


def distance(name: str, prediction: Tensor, goal: Tensor) -> Tensor:
    """Per-volume loss [B] of tokens [B, M, D], in float32: mean |difference| for vjepa2, squared distance of unit vectors for data2vec,
    mean squared difference for mae."""
    if name == "data2vec":
        # BYOL's form: 2 - 2 cos, summed over channels, so that its scale does not shrink with the width (F11 d).
        return (2 - 2 * F.cosine_similarity(prediction.float(), goal.float(), dim=-1)).mean(1)
    if name == "mae":
        return (prediction.float() - goal.float()).square().mean((1, 2))
    return (prediction.float() - goal.float()).abs().mean((1, 2))


def content_free_baseline(name: str, goal_BMD: Tensor) -> Tensor:
    """Loss [B] of the best constant answer, which needs no look at the volume: the per-channel median of the goals; for mae, whose
    error is squared, their mean: the average patch."""
    goals_ND = goal_BMD.float().flatten(0, 1)
    constant_D = goals_ND.mean(0) if name == "mae" else goals_ND.median(0).values
    return distance(name, constant_D.expand_as(goal_BMD), goal_BMD)


@torch.no_grad()
def move_average(average: torch.nn.Module, source: torch.nn.Module, momentum: float | Tensor) -> None:
    """average = momentum * average + (1 - momentum) * source, over all parameters; of sharded ones each rank moves its share."""
    targets, sources = ([_own(p) for p in module.parameters()] for module in (average, source))
    if isinstance(momentum, Tensor):
        torch._foreach_lerp_(targets, sources, [(1 - momentum).to(targets[0].dtype)] * len(targets))
    else:
        torch._foreach_lerp_(targets, sources, weight=1 - momentum)


def _own(parameter: Tensor) -> Tensor:
    share = getattr(parameter.detach(), "to_local", None)
    return share() if share else parameter.detach()
