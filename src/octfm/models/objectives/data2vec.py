"""data2vec: the student sees mask tokens in place of hidden ones, and an MLP predicts the teacher's features there."""

from collections.abc import Sequence
from copy import deepcopy
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from octfm.models.objectives.objective import Objective, ObjectiveConfig, ObjectiveOutput, View, cosine_error
from octfm.models.predictor import MLPPredictor, PredictorConfig
from octfm.models.vit3d import TokenGrid, VisionTransformer3D, ViTConfig, take_tokens


class Data2VecConfig(ObjectiveConfig):
    """Masked prediction of features as the prototype intended it, without its leak of the answers
    (arXiv:2202.03555)."""

    name: Literal["data2vec"] = "data2vec"
    """The name chooses the objective and, with it, this table of settings."""
    # Earlier versions accepted the setting here and ignored it.
    ignored: ClassVar[frozenset[str]] = frozenset({"target_levels"})

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "Data2Vec":
        return Data2Vec(model, grid)


class Data2Vec(Objective):
    """data2vec-style masked prediction (arXiv:2202.03555) with a two-layer MLP and BYOL's normalised squared error."""

    target_encoder: VisionTransformer3D
    distance = staticmethod(cosine_error)

    def __init__(self, model: ViTConfig, grid: TokenGrid):
        super().__init__()
        self.encoder = VisionTransformer3D(model, grid)
        self.predictor = MLPPredictor(model.width)
        self.mask_token = nn.Parameter(torch.randn(model.width) * 0.02)
        self.target_encoder = deepcopy(self.encoder).requires_grad_(False)

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of one view. Every token that is not context enters the student as the mask token."""
        (view,) = views
        patches_BKP, target_patches_BKP, index = view[:3]
        encoder = self.encoder
        table = encoder.table(index.kept)
        with torch.no_grad():
            features = self.target_encoder(target_patches_BKP, index.kept, table)
        hidden = torch.ones_like(index.kept, dtype=torch.bool).scatter(1, index.context, False)
        student = encoder(patches_BKP, index.kept, table, substitute=(hidden, self.mask_token))
        predicted = self.predictor(student)
        masked_goal, context_goal = take_tokens(features, index.target), take_tokens(features, index.context)
        masked_loss_B = self.distance(take_tokens(predicted, index.target), masked_goal)
        context_loss_B = self.distance(take_tokens(predicted, index.context), context_goal)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        return ObjectiveOutput(loss, masked_loss_B, context_loss_B, masked_goal, context_goal, features)
