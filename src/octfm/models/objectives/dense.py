"""Synthetic supervision: every token predicts its composition and where surfaces cross it, learned from the truth of
streamed phantoms."""

from collections.abc import Sequence
from math import prod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from octfm.errors import ConfigError
from octfm.models.objectives.enface import EnFaceGoals
from octfm.models.objectives.objective import Objective, ObjectiveConfig, ObjectiveOutput, View
from octfm.models.objectives.voxels import averaged, check_average
from octfm.models.predictor import Predictor, PredictorConfig, seen_and_answers
from octfm.models.products import Linear
from octfm.models.vit3d import Shape3, Side, TokenGrid, VisionTransformer3D, ViTConfig, take_tokens
from octfm.volume.segmentation import CLASSES, LESION_CLASSES


class TruthConfig(ObjectiveConfig):
    """Settings of objectives that learn the truth of streamed phantoms, and train a summary by it."""

    answer_average: tuple[Side, Side, Side] = (2, 1, 8)
    """Voxels of a patch, (B-scan, axial, lateral), whose composition is one answer. With one row per answer, the
    composition locates the surfaces that cross the patch to within a row."""
    lesion_weight: float = Field(default=4.0, gt=0, le=1e3)
    """Weight of voxels in lesions, which fill few voxels, over those in layers."""
    summary_weight: float = Field(default=4.0, ge=0, le=1e3)
    """Weight of the error of model.summary's queries on phantoms: how thick layers and lesions are, and where."""

    def check(self, model: ViTConfig) -> None:
        check_average(self.answer_average, model.patch_size, predicted=False, name="answer_average")

    @property
    def learns_truth(self) -> bool:
        return True

    @property
    def teaches_summary(self) -> bool:
        return True


class DenseConfig(TruthConfig):
    """Predict the shares of layers and lesions in the parts of every token. Supervised by synthetic data: it needs
    data.phantoms."""

    name: Literal["dense"] = "dense"
    """The name chooses the objective and, with it, this table of settings."""
    hidden: bool = False
    """Whether the encoder sees only the context and the predictor answers for the hidden tokens, with weight 1 against
    context_loss for the visible ones. Otherwise it sees all kept tokens, and there is no context loss."""

    @property
    def hides_tokens(self) -> bool:
        return self.hidden

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "Dense":
        return Dense(self, model, predictor if self.hidden else None, grid)


class Dense(Objective):
    """A linear head on a ViT's tokens; a predictor answers for hidden ones; a summary has goals of the whole volume."""

    def __init__(self, settings: DenseConfig, model: ViTConfig, predictor: PredictorConfig | None, grid: TokenGrid):
        super().__init__()
        self.composition = Composition(model.patch_size, settings.answer_average, settings.lesion_weight)
        self.encoder = VisionTransformer3D(model, grid)
        self.head = Linear(model.width, self.composition.answers)
        self.predictor = None
        if predictor is not None:
            self.predictor = Predictor(predictor, model.width, self.composition.answers, model.activation_checkpointing)
        self.enface, self.summary_weight = self.composition.enface(model, grid), settings.summary_weight

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of one view. Raises ConfigError if it has no labels."""
        (view,) = views
        encoder, index = self.encoder, view.index
        goal_BKA = self.composition.of(view.labels_BKP)
        if self.predictor is None:
            tokens = encoder(view.patches_BKP, index.kept)
            answers, context_goal = self.head(tokens), take_tokens(goal_BKA, index.context)
            masked_loss_B = self.distance(answers, goal_BKA)
            # Only reported: these tokens are among all kept ones.
            context_loss_B = self.distance(take_tokens(answers, index.context).detach(), context_goal)
            loss = masked_loss_B.mean() + self._summary_loss(tokens, index.kept, goal_BKA, index.kept)
            return ObjectiveOutput(loss, masked_loss_B, context_loss_B, goal_BKA, context_goal, tokens.detach())
        seen, answers = seen_and_answers(encoder, self.predictor, view.patches_BKP, index)
        hidden = answers[:, index.context.shape[1] :]
        masked_goal, context_goal = take_tokens(goal_BKA, index.target), take_tokens(goal_BKA, index.context)
        # Visible tokens are read by a linear head, so that the predictor's blocks cannot do the encoder's work.
        masked_loss_B, context_loss_B = self.distance(hidden, masked_goal), self.distance(self.head(seen), context_goal)
        seen_at = torch.gather(index.kept, 1, index.context)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        loss = loss + self._summary_loss(seen, seen_at, goal_BKA, index.kept)
        return ObjectiveOutput(
            loss, masked_loss_B, context_loss_B, masked_goal, context_goal, seen.detach(), index.context
        )

    def _summary_loss(self, tokens_BMD: Tensor, index_BM: Tensor, goal_BKA: Tensor, kept_BK: Tensor) -> Tensor | float:
        """Weighted error of the summary, which reads `tokens_BMD` at flat grid indices and describes all kept tokens;
        0 without one."""
        summary, enface = self.encoder.summary, self.enface
        if summary is None or enface is None:
            return 0.0
        return self.summary_weight * enface.loss(summary, tokens_BMD, index_BM, goal_BKA, kept_BK).mean()

    def distance(self, prediction_BMA: Tensor, goal_BMA: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.composition.entropy(prediction_BMA, goal_BMA)

    def baseline(self, goal_BMD: Tensor) -> Tensor:
        """Loss [B] of the best answer that is the same for every part of every volume: the mean composition."""
        return self.composition.entropy(self.composition.constant(goal_BMD).expand_as(goal_BMD), goal_BMD)

    def hidden_from_encoder(self, index) -> Tensor | None:
        return index.target if self.predictor is not None else None


class Composition:
    """Shares of CLASSES in the parts of patches; shape suffix A: parts × classes of a patch, part by part."""

    def __init__(self, patch_size: Shape3, over: Shape3, lesion_weight: float):
        self.patch_size, self.over = patch_size, over
        self.weights = [lesion_weight if c in LESION_CLASSES else 1.0 for c in range(len(CLASSES))]
        depth, height, width = (side // part for side, part in zip(patch_size, over, strict=True))
        self.parts = (depth, height, width)
        """Of a patch, along each axis."""
        self.answers = prod(self.parts) * len(CLASSES)

    def enface(self, model: ViTConfig, grid: TokenGrid) -> EnFaceGoals | None:
        """Goals and heads of a summary; None for an encoder without one."""
        if not model.summary:
            return None
        return EnFaceGoals(model.width * model.summary, grid, self.parts, self.over[1], self.weights)

    @torch.no_grad()
    def of(self, labels_BMP: Tensor | None) -> Tensor:
        """float32 [B, M, A]: weighted share of every class in every part. Voxels of unknown class do not count, so
        shares of a part without truth are 0. Raises ConfigError without labels."""
        if labels_BMP is None:
            raise ConfigError(
                "objective: a batch without truth; it is trained on streamed phantoms, set data.phantoms.seed=1"
            )
        shares = [
            averaged((labels_BMP == c).float(), self.patch_size, self.over) * weight
            for c, weight in enumerate(self.weights)
        ]
        return torch.stack(shares, dim=-1).flatten(2)

    def entropy(self, answer_BMA: Tensor, goal_BMA: Tensor) -> Tensor:
        """Cross-entropy [B] of answers (logits) per weighted voxel with truth, in float32; 0 without any."""
        answer, goal = (x.float().unflatten(-1, (-1, len(CLASSES))) for x in (answer_BMA, goal_BMA))
        lost = -(goal * answer.log_softmax(-1)).sum((1, 2, 3))
        return lost / goal.sum((1, 2, 3)).clamp_min(1e-6)

    def constant(self, goal_BMA: Tensor) -> Tensor:
        """[A]: the best answer, as logits, if every part gets the same."""
        shares = goal_BMA.float().unflatten(-1, (-1, len(CLASSES))).sum((0, 1, 2))
        return (shares / shares.sum().clamp_min(1e-6)).clamp_min(1e-9).log().repeat(self.answers // len(CLASSES))
