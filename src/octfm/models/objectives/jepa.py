"""V-JEPA 2: predict the target encoder's features of hidden tokens and, as in V-JEPA 2.1, of visible ones."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from octfm.models.objectives.objective import Objective, ObjectiveConfig, ObjectiveOutput, View
from octfm.models.predictor import Predictor, PredictorConfig, predictor_table
from octfm.models.vit3d import (
    Shape3,
    Side,
    TokenGrid,
    VisionTransformer3D,
    ViTConfig,
    rotary,
    take_rotary,
    take_tokens,
)
from octfm.models.voxels import averaged, check_average, despeckled, hidden_voxels
from octfm.models.whitening import Whitening

TargetNorm = Literal["layer", "whiten"]


class JEPAConfig(ObjectiveConfig):
    """Predict the features of hidden tokens from visible ones (arXiv:2506.09985)."""

    name: Literal["vjepa2"] = "vjepa2"
    """The name chooses the objective and, with it, this table of settings."""
    target_levels: int = Field(default=1, ge=1, le=200)
    """Depths of the target encoder that are predicted, evenly spaced up to its end (V-JEPA 2.1 takes four)."""
    target_norm: TargetNorm = "layer"
    """How goals are normalised. `layer`: each token by itself (V-JEPA 2). `whiten`: decorrelated over tokens, which
    keeps the rank of the features in short runs (docs/log)."""
    voxel_loss: float = Field(default=0.0, ge=0, le=1e3)
    """Weight of also predicting the voxels of hidden tissue, as mae does: an anchor that does not depend on the
    teacher. Not part of the losses that are reported over a baseline."""
    goal_average: tuple[Side, Side, Side] = (1, 1, 1)
    """Voxels of a patch, (B-scan, axial, lateral), that are averaged before the target encoder sees them or they are
    predicted: averages out speckle, which cannot be predicted, and keeps layers. The encoder that learns sees every
    voxel."""

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "JEPA":
        return JEPA(model, predictor, grid, self.target_levels, self.target_norm, self.voxel_loss, self.goal_average)

    def check(self, model: ViTConfig, compiled: bool) -> None:
        if compiled and self.target_norm == "whiten":
            raise ValueError(
                "objective.target_norm whiten needs an eigendecomposition, which XLA does not compile; "
                "use layer with xla_spmd"
            )
        if self.target_levels > model.depth:
            raise ValueError(
                f"objective.target_levels {self.target_levels} exceeds the {model.depth} blocks of model.depth"
            )
        check_average(self.goal_average, model.patch_size, predicted=bool(self.voxel_loss))

    def shrunk(self, depth: int) -> "JEPAConfig":
        return self.model_copy(update={"target_levels": min(depth, self.target_levels)})


class JEPA(Objective):
    """V-JEPA 2 (arXiv:2506.09985): context encoder, EMA target encoder, predictor."""

    target_encoder: VisionTransformer3D

    def __init__(
        self,
        model: ViTConfig,
        predictor: PredictorConfig,
        grid: TokenGrid,
        target_levels: int = 1,
        target_norm: TargetNorm = "layer",
        voxel_loss: float = 0.0,
        goal_average: Shape3 = (1, 1, 1),
    ):
        super().__init__()
        self.encoder = VisionTransformer3D(model, grid)
        self.voxel_loss, self.goal_width = voxel_loss, model.width * target_levels
        self.goal_average = goal_average
        answers = self.goal_width + (prod(model.patch_size) // prod(goal_average) if voxel_loss else 0)
        self.predictor = Predictor(predictor, model.width, answers, model.activation_checkpointing)
        self.levels = [round(model.depth * (i + 1) / target_levels) - 1 for i in range(target_levels)]
        self.target_encoder = deepcopy(self.encoder).requires_grad_(False)
        self.whitening = Whitening(target_levels, model.width) if target_norm == "whiten" else None
        self.gathers = self.whitening is not None

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of one view. The context encoder receives the context patches and nothing else."""
        (view,) = views
        patches_BKP, target_patches_BKP, index = view[:3]
        encoder, grid = self.encoder, self.encoder.grid
        table = rotary(grid, index.kept, encoder.head_width) if encoder.config.positions == "rotary" else None
        learns, blocks = torch.is_grad_enabled(), (encoder.config.patch_size, self.goal_average)
        # The goal: the teacher sees every kept token, hidden ones as well, and gets no gradient.
        with torch.no_grad():
            stream = self.target_encoder.hidden(despeckled(target_patches_BKP, *blocks), index.kept, table)
            features = self.target_encoder.norm(stream[-1])
            # Normalised, or the student could lower the loss by making features small. In float32: variances.
            levels = [F.layer_norm(stream[level].float(), features.shape[-1:]) for level in self.levels]
            goal = self.whitening(levels, gather=learns) if self.whitening is not None else torch.cat(levels, dim=-1)
        # Tokens are taken away before the encoder, not masked in its attention: what it never gets cannot leak.
        context_patches = take_tokens(patches_BKP, index.context)
        context_index = torch.gather(index.kept, 1, index.context)
        seen = encoder(context_patches, context_index, take_rotary(table, index.context) if table else None)

        # Context first: the predictor appends one mask token for each target.
        places = torch.cat((index.context, index.target), dim=1)
        answers = self.predictor(
            seen, index.target.shape[1], predictor_table(self.predictor, encoder, table, index, places)
        )
        features_predicted = answers[..., : self.goal_width]
        goals = take_tokens(goal, places)
        num_context = index.context.shape[1]
        context_loss_B = self.distance(features_predicted[:, :num_context], goals[:, :num_context])
        masked_loss_B = self.distance(features_predicted[:, num_context:], goals[:, num_context:])
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        if self.voxel_loss:
            voxels = answers[:, num_context:, self.goal_width :]
            voxel_loss_B, _ = hidden_voxels(voxels, averaged(target_patches_BKP, *blocks), index)
            loss = loss + self.voxel_loss * voxel_loss_B.mean()
        return ObjectiveOutput(
            loss, masked_loss_B, context_loss_B, goals[:, num_context:], goals[:, :num_context], features
        )

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
