"""The prototype's objective made sound: a student sees mask tokens instead of the answers, and an MLP matches the teacher there."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from octfm.models.objectives.objective import ObjectiveOutput, TokenIndex, distance, move_average
from octfm.models.predictor import MLPPredictor
from octfm.models.vit3d import TokenGrid, VisionTransformer3D, ViTConfig, rotary, take_tokens


class Data2Vec(nn.Module):
    """data2vec-style masked prediction (arXiv:2202.03555) with a two-layer MLP and a normalised squared error (BYOL)."""

    name = "data2vec"
    gathers = False

    def __init__(self, model: ViTConfig, grid: TokenGrid):
        super().__init__()
        self.encoder = VisionTransformer3D(model, grid)
        self.predictor = MLPPredictor(model.width)
        self.mask_token = nn.Parameter(torch.randn(model.width) * 0.02)
        self.target_encoder = deepcopy(self.encoder).requires_grad_(False)

    def forward(
        self, patches_BKP: Tensor, target_patches_BKP: Tensor, index: TokenIndex, context_weight: float | Tensor
    ) -> ObjectiveOutput:
        """Losses of normalised patches of the kept tokens; every token that is not context enters as the mask token."""
        encoder = self.encoder
        table = rotary(encoder.grid, index.kept, encoder.head_width) if encoder.config.positions == "rotary" else None
        with torch.no_grad():
            features = self.target_encoder(target_patches_BKP, index.kept, table)
        hidden = torch.ones_like(index.kept, dtype=torch.bool).scatter(1, index.context, False)
        student = encoder(patches_BKP, index.kept, table, substitute=(hidden, self.mask_token))
        answer = self.predictor(student)
        masked_goal, context_goal = take_tokens(features, index.target), take_tokens(features, index.context)
        masked_loss_B = distance(self.name, take_tokens(answer, index.target), masked_goal)
        context_loss_B = distance(self.name, take_tokens(answer, index.context), context_goal)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        return ObjectiveOutput(loss, masked_loss_B, context_loss_B, masked_goal, context_goal, features)

    def update_target(self, momentum: float | Tensor) -> None:
        move_average(self.target_encoder, self.encoder, momentum)

    def discard_step(self) -> None:
        """Nothing is gathered outside the weights."""
