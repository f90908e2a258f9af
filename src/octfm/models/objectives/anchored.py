"""Anchored: learn from the user's own volumes by predicting masked voxels, without labels, and from streamed phantoms
by their truth."""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from octfm.models.objectives.dense import Composition, TruthConfig
from octfm.models.objectives.objective import Objective, ObjectiveOutput, View, squared_error
from octfm.models.objectives.voxels import averaged, check_average, hidden_voxels
from octfm.models.predictor import Predictor, PredictorConfig, seen_and_answers
from octfm.models.products import Linear
from octfm.models.vit3d import Shape3, Side, TokenGrid, VisionTransformer3D, ViTConfig, take_tokens


class AnchoredConfig(TruthConfig):
    """Masked voxels of volumes without labels (as mae) and the truth of phantoms (as dense with hidden tokens). Partly
    supervised by synthetic data: it needs data.phantoms with a share below 1."""

    name: Literal["anchored"] = "anchored"
    """The name chooses the objective and, with it, this table of settings."""
    context_loss: float = Field(default=1.0, ge=0, le=1e3)
    """Weight of predicting the composition of phantoms' visible tokens, by a linear head on the encoder. Visible voxels
    of other volumes are not predicted."""
    goal_average: tuple[Side, Side, Side] = (1, 1, 1)
    """Voxels of a patch, (B-scan, axial, lateral), that are averaged before they are predicted, as in mae."""
    masked_weight: float = Field(default=1.0, ge=0, le=1e3)
    """Weight of the masked voxels of volumes without labels."""
    truth_weight: float = Field(default=1.0, ge=0, le=1e3)
    """Weight of the truth of phantoms."""

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "Anchored":
        return Anchored(self, model, predictor, grid)

    def check(self, model: ViTConfig) -> None:
        check_average(self.goal_average, model.patch_size, predicted=True)
        super().check(model)


class Anchored(Objective):
    """One encoder of visible tokens and one predictor for scans and phantoms. The predictor answers with the voxels of
    a hidden token, then its composition; which of the two counts depends on whether the volume has labels."""

    def __init__(self, settings: AnchoredConfig, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid):
        super().__init__()
        self.composition = Composition(model.patch_size, settings.answer_average, settings.lesion_weight)
        self.goal_average: Shape3 = settings.goal_average
        self.voxels = prod(model.patch_size) // prod(settings.goal_average)
        self.weights = settings.masked_weight, settings.truth_weight
        self.encoder = VisionTransformer3D(model, grid)
        self.head = Linear(model.width, self.composition.answers)
        self.predictor = Predictor(
            predictor, model.width, self.voxels + self.composition.answers, model.activation_checkpointing
        )
        self.enface, self.summary_weight = self.composition.enface(model, grid), settings.summary_weight

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of one view. The encoder receives the context patches and nothing else."""
        (view,) = views
        patches_BKP, target_patches_BKP, index = view[:3]
        seen, answers = seen_and_answers(self.encoder, self.predictor, patches_BKP, index)
        answers = answers[:, index.context.shape[1] :]
        truth = self.composition.of(view.labels_BKP)
        masked_truth, context_truth = take_tokens(truth, index.target), take_tokens(truth, index.context)
        patches = averaged(target_patches_BKP, self.encoder.config.patch_size, self.goal_average)
        voxel_loss_B, voxel_goal = hidden_voxels(answers[..., : self.voxels], patches, index)
        labelled_B = self._labelled(truth)
        masked_loss_B = self._weighed(
            labelled_B, voxel_loss_B, self.composition.entropy(answers[..., self.voxels :], masked_truth)
        )
        named_B = self.composition.entropy(self.head(seen), context_truth)
        # 0 for volumes without labels, whose visible voxels are not predicted.
        context_loss_B = self._weighed(labelled_B, torch.zeros_like(named_B), named_B)
        no_voxels = voxel_goal.new_zeros(*context_truth.shape[:2], self.voxels)
        context_goal = self._goal(no_voxels, context_truth, labelled_B)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        if self.enface is not None and self.encoder.summary is not None:
            # The error of volumes with labels, 0 for all others.
            seen_at = torch.gather(index.kept, 1, index.context)
            summary_loss_B = self.enface.loss(self.encoder.summary, seen, seen_at, truth, index.kept)
            loss = loss + self.weights[1] * self.summary_weight * summary_loss_B.mean()
        masked_goal = self._goal(voxel_goal, masked_truth, labelled_B)
        return ObjectiveOutput(
            loss, masked_loss_B, context_loss_B, masked_goal, context_goal, seen.detach(), index.context
        )

    def baseline(self, goal_BMD: Tensor) -> Tensor:
        """Loss [B] of the best constant answers: the mean patch for volumes without labels, the mean composition for
        the others."""
        voxels, truth = goal_BMD.float().split((self.voxels, self.composition.answers), dim=-1)
        labelled_B = self._labelled(truth)
        others = (~labelled_B).float()[:, None, None]
        mean_V = (voxels * others).sum((0, 1)) / (others.sum() * voxels.shape[1]).clamp_min(1)
        return self._weighed(
            labelled_B,
            squared_error(mean_V.expand_as(voxels), voxels),
            self.composition.entropy(self.composition.constant(truth).expand_as(truth), truth),
        )

    def _labelled(self, truth_BMA: Tensor) -> Tensor:
        """bool [B]: volumes whose truth is known."""
        return truth_BMA.sum((1, 2)) > 0

    def _weighed(self, labelled_B: Tensor, without_B: Tensor, with_B: Tensor) -> Tensor:
        return torch.where(labelled_B, self.weights[1] * with_B, self.weights[0] * without_B)

    def _goal(self, voxels: Tensor, truth: Tensor, labelled_B: Tensor) -> Tensor:
        """Both goals, joined by channel; voxels of a volume with truth are 0, since they are not predicted."""
        return torch.cat((voxels.float() * (~labelled_B)[:, None, None], truth), dim=-1)
