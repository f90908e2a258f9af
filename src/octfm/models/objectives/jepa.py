"""V-JEPA 2: predict the target encoder's features of hidden tokens and, as in V-JEPA 2.1, of visible ones.

Shape suffixes: B batch, C context, T targets, K kept tokens, D width, G width of the goals.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.models.objectives.objective import Objective, ObjectiveConfig, ObjectiveOutput, View
from octfm.models.objectives.voxels import averaged, check_average, despeckled, hidden_voxels
from octfm.models.predictor import Predictor, PredictorConfig, seen_and_answers
from octfm.models.products import Linear
from octfm.models.vit3d import (
    Rotary,
    Side,
    TokenGrid,
    TokenIndex,
    VisionTransformer3D,
    ViTConfig,
    init_weights,
    take_tokens,
)
from octfm.models.whitening import Whitening

TargetNorm = Literal["layer", "whiten"]


class JEPAConfig(ObjectiveConfig):
    """Predict the features of hidden tokens from visible ones (arXiv:2506.09985)."""

    name: Literal["vjepa2"] = "vjepa2"
    """The name chooses the objective and, with it, this table of settings."""
    target_levels: int = Field(default=1, ge=1, le=200)
    """Depths of the target encoder that are predicted, evenly spaced up to its end (V-JEPA 2.1 takes four)."""
    fuse_levels: bool = False
    """Whether the predictor reads the same depths of the trained encoder, fused by a small network, instead of its
    last tokens only (V-JEPA 2.1)."""
    context_nearness: bool = False
    """Whether the loss of a visible token is divided by the square root of its distance, in tokens, to the nearest
    hidden one (V-JEPA 2.1), because far from hidden tokens copying is all there is to learn."""
    target_norm: TargetNorm = "layer"
    """How goals are normalised. `layer`: each token separately, as in V-JEPA 2, but without the encoder's final norm
    before it. `whiten`: decorrelated over tokens, which keeps the rank of the features in short runs (docs/log)."""
    voxel_loss: float = Field(default=0.0, ge=0, le=1e3)
    """Weight of also predicting the voxels of hidden tissue, as mae does: a goal that does not depend on the teacher.
    Not part of the losses that are reported relative to a baseline."""
    goal_average: tuple[Side, Side, Side] = (1, 1, 1)
    """Voxels of a patch, (B-scan, axial, lateral), that are averaged before the target encoder sees them or they are
    predicted: averages out speckle, which cannot be predicted, and keeps layers. The trained encoder sees every
    voxel."""

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "JEPA":
        return JEPA(self, model, predictor, grid)

    @property
    def takes_large_blocks(self) -> bool:
        return True

    @property
    def gathers(self) -> bool:
        return self.target_norm == "whiten"

    def check(self, model: ViTConfig) -> None:
        if self.target_levels > model.depth:
            raise ValueError(
                f"objective.target_levels {self.target_levels} exceeds the {model.depth} blocks of model.depth"
            )
        if self.fuse_levels and self.target_levels == 1:
            raise ValueError("objective.fuse_levels needs more than one of objective.target_levels, such as 4")
        check_average(self.goal_average, model.patch_size, predicted=bool(self.voxel_loss))

    def shrunk(self, depth: int) -> "JEPAConfig":
        levels = min(depth, self.target_levels)
        return self.model_copy(update={"target_levels": levels, "fuse_levels": self.fuse_levels and levels > 1})


class JEPA(Objective):
    """V-JEPA 2 (arXiv:2506.09985): context encoder, EMA target encoder, predictor.

    Unlike there, the target encoder sees the kept tokens only, and goals are normalised without its final norm.
    """

    target_encoder: VisionTransformer3D

    def __init__(self, settings: JEPAConfig, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid):
        super().__init__()
        self.encoder = VisionTransformer3D(model, grid)
        levels, self.goal_average = settings.target_levels, settings.goal_average
        self.voxel_loss, self.context_nearness = settings.voxel_loss, settings.context_nearness
        self.goal_width = model.width * levels
        answers = self.goal_width + (prod(model.patch_size) // prod(self.goal_average) if self.voxel_loss else 0)
        self.predictor = Predictor(predictor, model.width, answers, model.activation_checkpointing)
        self.levels = [round(model.depth * (i + 1) / levels) - 1 for i in range(levels)]
        self.fusion = Fusion(levels, model.width) if settings.fuse_levels else None
        self.target_encoder = deepcopy(self.encoder).requires_grad_(False)
        self.whitening = Whitening(levels, model.width) if settings.target_norm == "whiten" else None

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of one view, or of several with different masks and contexts; every token counts the same. The context
        encoder receives the context patches and nothing else."""
        first, encoder = views[0], self.encoder
        kept_BK, blocks = first.index.kept, (encoder.config.patch_size, self.goal_average)
        table, learns = encoder.table(kept_BK), torch.is_grad_enabled()
        # The goal: the teacher sees every kept token, hidden ones as well, and gets no gradient.
        with torch.no_grad():
            stream = self.target_encoder.hidden(despeckled(first.target_patches_BKP, *blocks), kept_BK, table)
            features = self.target_encoder.norm(stream[-1])
            # Without normalisation the student could lower the loss by shrinking features. Variances need float32.
            levels = [F.layer_norm(stream[level].float(), features.shape[-1:]) for level in self.levels]
            goal = self.whitening(levels, gather=learns) if self.whitening is not None else torch.cat(levels, dim=-1)

        predicted, masked_goals, context_goals, voxel_losses, weights = [], [], [], [], []
        for view in views:
            index, num_context = view.index, view.index.context.shape[1]
            _, answers = seen_and_answers(encoder, self.predictor, view.patches_BKP, index, table, self._read)
            predicted.append((answers[:, num_context:, : self.goal_width], answers[:, :num_context, : self.goal_width]))
            masked_goals.append(take_tokens(goal, index.target))
            context_goals.append(take_tokens(goal, index.context))
            if self.context_nearness:
                weights.append(nearness(encoder.grid, index))
            if self.voxel_loss:
                voxels = averaged(first.target_patches_BKP, *blocks)
                voxel_losses.append(hidden_voxels(answers[:, num_context:, self.goal_width :], voxels, index)[0])
        masked_BTG, context_BCG = (torch.cat(parts, 1) for parts in zip(*predicted, strict=True))
        masked_goal, context_goal = torch.cat(masked_goals, 1), torch.cat(context_goals, 1)
        masked_loss_B = self.distance(masked_BTG, masked_goal)
        context_loss_B = self.distance(context_BCG, context_goal)
        minimised_B = context_loss_B
        if weights:
            error_BC = (context_BCG.float() - context_goal.float()).abs().mean(2)
            # The reported loss has no weights, so that it can be compared with the baseline.
            minimised_B, context_loss_B = (error_BC * torch.cat(weights, 1)).mean(1), context_loss_B.detach()
        loss = masked_loss_B.mean() + context_weight * minimised_B.mean()
        if voxel_losses:
            loss = loss + self.voxel_loss * torch.stack(voxel_losses).mean()
        return ObjectiveOutput(loss, masked_loss_B, context_loss_B, masked_goal, context_goal, features)

    def _read(self, patches_BCP: Tensor, index_BC: Tensor, table: Rotary | None) -> Tensor:
        """The tokens [B, C, D] that the predictor gets: the encoder's, or those of several of its depths, fused."""
        if self.fusion is None:
            return self.encoder(patches_BCP, index_BC, table)
        stream = self.encoder.hidden(patches_BCP, index_BC, table)
        # The last level is what `embed` returns, with the encoder's norm; inner levels have no learned norm.
        inner = [F.layer_norm(stream[level], (self.encoder.config.width,)) for level in self.levels[:-1]]
        return self.fusion(torch.cat((*inner, self.encoder.norm(stream[-1])), dim=-1))

    def update_target(self, momentum: float | Tensor) -> None:
        super().update_target(momentum)
        if self.whitening is not None:
            self.whitening.update()

    def discard_step(self) -> None:
        if self.whitening is not None:
            self.whitening.discard()

    def connect(self, sum_over_ranks: Callable[..., None]) -> None:
        if self.whitening is not None:
            self.whitening.over_ranks = sum_over_ranks


class Fusion(nn.Module):
    """Maps features of several depths of an encoder, joined by channel [B, C, G], to its width [B, C, D]."""

    def __init__(self, levels: int, width: int):
        super().__init__()
        self.layers = nn.Sequential(Linear(levels * width, width), nn.GELU(), Linear(width, width))
        self.apply(init_weights)

    def forward(self, x_BCG: Tensor) -> Tensor:
        return self.layers(x_BCG)


@torch.no_grad()
def nearness(grid: TokenGrid, index: TokenIndex) -> Tensor:
    """float32 [B, C]: 1 / sqrt(distance in tokens, Euclidean, from a context token to the nearest target)."""
    _, height, width = grid.shape

    def squared(places_BM: Tensor, others_BM: Tensor) -> Tensor:
        # In float32, which holds sums of squares of grid indices exactly; a matrix product might run in bfloat16.
        return (places_BM.float().unsqueeze(2) - others_BM.float().unsqueeze(1)).square_()

    context, target = (torch.gather(index.kept, 1, places) for places in (index.context, index.target))
    apart_BCT = squared(context // (height * width), target // (height * width))
    apart_BCT += squared(context // width % height, target // width % height)
    apart_BCT += squared(context % width, target % width)
    return apart_BCT.amin(2).clamp_min(1).pow(-0.25)
