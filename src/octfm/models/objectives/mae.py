"""Masked autoencoding, the baseline without a teacher: the voxels of hidden tissue are predicted from the tokens that are seen."""

from math import prod

import torch
from torch import Tensor, nn

from octfm.models.objectives.objective import ObjectiveOutput, TokenIndex, distance
from octfm.models.predictor import Predictor, PredictorConfig, predictor_table
from octfm.models.vit3d import Shape3, TokenGrid, VisionTransformer3D, ViTConfig, rotary, take_rotary, take_tokens
from octfm.models.voxels import averaged, hidden_voxels, own_contrast


class MAE(nn.Module):
    """MAE (arXiv:2111.06377) on 3-D patches, as VideoMAE (arXiv:2203.12602): an encoder of visible tokens and a narrow decoder.

    Hidden tokens that are tissue are what the loss is about (`voxels`).
    """

    name = "mae"
    gathers = False
    target_encoder = None
    """Voxels are the goal, so there is no teacher."""

    def __init__(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid, goal_average: Shape3 = (1, 1, 1)):
        """`goal_average`: the voxels of a patch that are averaged before they are predicted."""
        super().__init__()
        self.goal_average = goal_average
        self.encoder = VisionTransformer3D(model, grid)
        self.predictor = Predictor(
            predictor, model.width, prod(model.patch_size) // prod(goal_average), model.activation_checkpointing
        )

    def forward(
        self, patches_BKP: Tensor, target_patches_BKP: Tensor, index: TokenIndex, context_weight: float | Tensor
    ) -> ObjectiveOutput:
        """Losses of normalised patches of the kept tokens. The encoder receives the context patches and nothing else.

        `target_patches_BKP` are the same voxels as they are to be predicted (without recolouring and noise).
        """
        encoder = self.encoder
        table = rotary(encoder.grid, index.kept, encoder.head_width) if encoder.config.positions == "rotary" else None
        context_index = torch.gather(index.kept, 1, index.context)
        seen = encoder(
            take_tokens(patches_BKP, index.context), context_index, take_rotary(table, index.context) if table else None
        )

        asked = torch.cat((index.context, index.target), dim=1)
        answer = self.predictor(
            seen, index.target.shape[1], predictor_table(self.predictor, encoder, table, index, asked)
        )
        num_context = index.context.shape[1]
        goal_BKP = averaged(target_patches_BKP, encoder.config.patch_size, self.goal_average)
        context_goal = own_contrast(take_tokens(goal_BKP, index.context))
        context_loss_B = distance(self.name, answer[:, :num_context], context_goal)
        masked_loss_B, masked_goal = hidden_voxels(answer[:, num_context:], goal_BKP, index)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        return ObjectiveOutput(
            loss, masked_loss_B, context_loss_B, masked_goal, context_goal, seen.detach(), index.context
        )

    def update_target(self, momentum: float | Tensor) -> None:
        """There is none."""

    def discard_step(self) -> None:
        """Nothing is gathered outside the weights."""
