"""The V-JEPA 2 objective: predict the target encoder's tokens where the context encoder was blind, and, as in 2.1, where it was not."""

from copy import deepcopy
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.models.objectives.objective import ObjectiveOutput, TargetNorm, TokenIndex, distance, move_average
from octfm.models.predictor import Predictor, PredictorConfig, predictor_table
from octfm.models.vit3d import Shape3, TokenGrid, VisionTransformer3D, ViTConfig, rotary, take_rotary, take_tokens
from octfm.models.voxels import averaged, despeckled, hidden_voxels
from octfm.models.whitening import Whitening


class JEPA(nn.Module):
    """V-JEPA 2 (arXiv:2506.09985): context encoder, EMA target encoder, predictor."""

    name = "vjepa2"

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
        """`voxel_loss` is the weight of also predicting the voxels of hidden tissue (0: nothing predicts them); `goal_average` the voxels
        of a patch that are averaged before the target encoder sees them, or they are predicted."""
        super().__init__()
        self.encoder = VisionTransformer3D(model, grid)
        self.voxel_loss, self.goal_width = voxel_loss, model.width * target_levels
        self.goal_average = goal_average
        answers = self.goal_width + (prod(model.patch_size) // prod(goal_average) if voxel_loss else 0)
        self.predictor = Predictor(predictor, model.width, answers, model.activation_checkpointing)
        self.levels = [round(model.depth * (i + 1) / target_levels) - 1 for i in range(target_levels)]
        self.target_encoder = deepcopy(self.encoder).requires_grad_(False)
        self.whitening = Whitening(target_levels, model.width) if target_norm == "whiten" else None

    def forward(
        self, patches_BKP: Tensor, target_patches_BKP: Tensor, index: TokenIndex, context_weight: float | Tensor
    ) -> ObjectiveOutput:
        """Losses of normalised patches of the kept tokens. The context encoder receives the context patches and nothing else.

        `target_patches_BKP` are the same voxels as the target encoder is to see them (without recolouring).
        """
        encoder, grid = self.encoder, self.encoder.grid
        table = rotary(grid, index.kept, encoder.head_width) if encoder.config.positions == "rotary" else None
        learns, blocks = torch.is_grad_enabled(), (encoder.config.patch_size, self.goal_average)
        with torch.no_grad():
            stream = self.target_encoder.hidden(despeckled(target_patches_BKP, *blocks), index.kept, table)
            features = self.target_encoder.norm(stream[-1])
            levels = [F.layer_norm(stream[level].float(), features.shape[-1:]) for level in self.levels]
            goal = self.whitening(levels, gather=learns) if self.whitening is not None else torch.cat(levels, dim=-1)
        context_patches = take_tokens(patches_BKP, index.context)
        context_index = torch.gather(index.kept, 1, index.context)
        seen = encoder(context_patches, context_index, take_rotary(table, index.context) if table else None)

        asked = torch.cat((index.context, index.target), dim=1)
        answers = self.predictor(
            seen, index.target.shape[1], predictor_table(self.predictor, encoder, table, index, asked)
        )
        answer = answers[..., : self.goal_width]
        wanted = take_tokens(goal, asked)
        num_context = index.context.shape[1]
        context_loss_B = distance(self.name, answer[:, :num_context], wanted[:, :num_context])
        masked_loss_B = distance(self.name, answer[:, num_context:], wanted[:, num_context:])
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        if self.voxel_loss:
            voxels = answers[:, num_context:, self.goal_width :]
            loss = (
                loss + self.voxel_loss * hidden_voxels(voxels, averaged(target_patches_BKP, *blocks), index)[0].mean()
            )
        return ObjectiveOutput(
            loss, masked_loss_B, context_loss_B, wanted[:, num_context:], wanted[:, :num_context], features
        )

    def update_target(self, momentum: float | Tensor) -> None:
        move_average(self.target_encoder, self.encoder, momentum)
        if self.whitening is not None:
            self.whitening.update()

    @property
    def gathers(self) -> bool:
        """Whether a step leaves more behind than gradients."""
        return self.whitening is not None

    def discard_step(self) -> None:
        """Forget what this step gathered: its update will not be made."""
        if self.whitening is not None:
            self.whitening.discard()
