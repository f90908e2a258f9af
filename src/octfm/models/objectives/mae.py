"""Masked autoencoding, the baseline without a teacher: predict the voxels of hidden tissue from the visible tokens."""

from collections.abc import Sequence
from math import prod
from typing import Literal

from torch import Tensor

from octfm.models.objectives.objective import Objective, ObjectiveConfig, ObjectiveOutput, View, squared_error
from octfm.models.objectives.voxels import averaged, check_average, hidden_voxels, own_contrast
from octfm.models.predictor import Predictor, PredictorConfig, seen_and_answers
from octfm.models.vit3d import Shape3, Side, TokenGrid, VisionTransformer3D, ViTConfig, take_tokens


class MAEConfig(ObjectiveConfig):
    """Predict the voxels of hidden tokens (arXiv:2111.06377)."""

    name: Literal["mae"] = "mae"
    """The name chooses the objective and, with it, this table of settings."""
    goal_average: tuple[Side, Side, Side] = (1, 1, 1)
    """Voxels of a patch, (B-scan, axial, lateral), that are averaged before they are predicted: averages out speckle,
    which cannot be predicted, and keeps layers. The encoder sees every voxel."""

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "MAE":
        return MAE(model, predictor, grid, self.goal_average)

    def check(self, model: ViTConfig) -> None:
        check_average(self.goal_average, model.patch_size, predicted=True)


class MAE(Objective):
    """MAE (arXiv:2111.06377) on 3-D patches (VideoMAE, arXiv:2203.12602): encoder of visible tokens, narrow decoder.

    The masked loss covers hidden tokens that are tissue (`hidden_voxels`).
    """

    distance = staticmethod(squared_error)

    def __init__(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid, goal_average: Shape3 = (1, 1, 1)):
        super().__init__()
        self.goal_average = goal_average
        self.encoder = VisionTransformer3D(model, grid)
        self.predictor = Predictor(
            predictor, model.width, prod(model.patch_size) // prod(goal_average), model.activation_checkpointing
        )

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of one view. The encoder receives the context patches and nothing else."""
        (view,) = views
        patches_BKP, target_patches_BKP, index = view[:3]
        seen, predicted = seen_and_answers(self.encoder, self.predictor, patches_BKP, index)
        num_context = index.context.shape[1]
        goal_BKP = averaged(target_patches_BKP, self.encoder.config.patch_size, self.goal_average)
        context_goal = own_contrast(take_tokens(goal_BKP, index.context))
        context_loss_B = self.distance(predicted[:, :num_context], context_goal)
        masked_loss_B, masked_goal = hidden_voxels(predicted[:, num_context:], goal_BKP, index)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        return ObjectiveOutput(
            loss, masked_loss_B, context_loss_B, masked_goal, context_goal, seen.detach(), index.context
        )

    def baseline(self, goal_BMD: Tensor) -> Tensor:
        """Loss [B] of the average patch, the best constant for a squared error."""
        constant_D = goal_BMD.float().flatten(0, 1).mean(0)
        return self.distance(constant_D.expand_as(goal_BMD), goal_BMD)
