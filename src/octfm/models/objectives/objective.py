"""What objectives share: base classes of settings and networks, the views that they receive, what they return."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Self

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.config import Config
from octfm.models.pooling import VectorPool
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import TokenGrid, TokenIndex, VisionTransformer3D, ViTConfig, count_parameters


class ObjectiveConfig(Config):
    """Settings that all objectives share. Each objective has a subclass with its name, its own settings and `build`.

    An objective of your own is passed as an object, `octfm.pretrain(config, store, objective=MyConfig())`; see
    docs/guide/plug-ins.md.
    """

    model_config = ConfigDict(revalidate_instances="never")  # read_objective does it, by the class that it is of

    name: str
    """Name of the objective in config.yaml and checkpoints."""
    context_loss: float = Field(default=0.5, ge=0, le=1e3)
    """Weight of also predicting the visible tokens (V-JEPA 2.1); without it the features lose rank (docs/log)."""
    frozen: Literal["target", "context"] = "target"
    """Which encoder is frozen for embedding and probing. `target`: the moving average. `context`: the trained one,
    which is better in runs too short for the average to follow. Without a target encoder both are the trained one."""
    pool: VectorPool = "mean"
    """How the tissue tokens of a volume become its vector, for embedding and probing. `extremes`: for each channel the
    means of the highest and of the lowest fifth, which keeps focal lesions; twice as wide as `mean`. `tails`: the mean,
    and the same ends of 20, 5 and 1 %; seven times as wide. `summary`: read by the learned queries of model.summary."""
    context_warmup: float = Field(default=0.1, ge=0, le=1)
    """Share of the run over which the context loss is ramped in."""

    def build(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid) -> "Objective":
        """The networks with initial weights from torch's CPU generator, which the caller has seeded."""
        raise NotImplementedError(f"{type(self).__name__} has no build(model, predictor, grid)")

    @property
    def learns_truth(self) -> bool:
        """Whether it is trained with the truth of streamed phantoms, so that `data.phantoms` must be set."""
        return False

    @property
    def teaches_summary(self) -> bool:
        """Whether it trains the queries of `model.summary`, so that these may be set."""
        return False

    @property
    def hides_tokens(self) -> bool:
        """Whether the encoder must predict tokens that it does not see, so that a training mask can be drawn."""
        return True

    @property
    def num_views(self) -> int:
        """Views of each volume per step; each is augmented differently."""
        return 1

    @property
    def shares_masks(self) -> bool:
        """Whether all views show the same tokens at the same places and differ only in grey values; otherwise each view
        has its own geometry and masks."""
        return False

    @property
    def takes_large_blocks(self) -> bool:
        """Whether each view may be followed by the same view under a second set of masks (`masks.large_blocks`)."""
        return False

    @property
    def gathers(self) -> bool:
        """Whether a training step accumulates more than gradients, such as statistics. `Objective.update_target`
        applies them, `discard_step` drops them. Such steps are not compiled: the next compiled pass would overwrite
        tensors that one leaves behind."""
        return False

    def check(self, model: ViTConfig) -> None:
        """Raise ValueError if these settings do not fit the encoder."""

    def shrunk(self, depth: int) -> Self:
        """The same objective for a small copy of the networks, an encoder of `depth` blocks (`--smoke`, preflight)."""
        return self


class View(NamedTuple):
    """One view of a micro-batch: normalised patches of the kept tokens only."""

    patches_BKP: Tensor
    """Patches of the kept tokens; the encoder in training sees only some of them."""
    target_patches_BKP: Tensor
    """The same patches without noise and changes of intensity: input of a target encoder, or voxels to predict."""
    index: TokenIndex
    labels_BKP: Tensor | None = None
    """uint8: class of each voxel of the patches (octfm.volume.segmentation), 255 if unknown; None if no volume of the
    batch has classes."""


class ObjectiveOutput(NamedTuple):
    """What a forward pass returns, by name, so that losses cannot be confused (F5)."""

    loss: Tensor
    """Scalar to differentiate; computed from masked_loss_B, so that the monitors can check its gradient."""
    masked_loss_B: Tensor
    """Loss of each volume on its hidden tokens, which the monitors compare with `Objective.baseline` of
    masked_goal_BTD."""
    context_loss_B: Tensor
    """Loss of each volume on its visible tokens, not yet weighted."""
    masked_goal_BTD: Tensor
    """Goals of the hidden tokens; detached."""
    context_goal_BCD: Tensor
    features_BMD: Tensor
    """Features of the first view whose health is monitored: the target encoder's of all kept tokens, or the encoder's
    of the context where there is no target encoder. Detached."""
    features_at_BM: Tensor | None = None
    """Places within `kept` of the features; None: all of `kept`."""


def absolute_error(prediction_BMD: Tensor, goal_BMD: Tensor) -> Tensor:
    """Mean absolute error of each volume, [B], in float32."""
    return (prediction_BMD.float() - goal_BMD.float()).abs().mean((1, 2))


def squared_error(prediction_BMD: Tensor, goal_BMD: Tensor) -> Tensor:
    """Mean squared error of each volume, [B], in float32."""
    return (prediction_BMD.float() - goal_BMD.float()).square().mean((1, 2))


def cosine_error(prediction_BMD: Tensor, goal_BMD: Tensor) -> Tensor:
    """Squared distance of unit vectors for each volume, [B], in float32."""
    # BYOL's form: 2 - 2 cos, summed over channels, so that its scale does not shrink with the width (F11 d).
    return (2 - 2 * F.cosine_similarity(prediction_BMD.float(), goal_BMD.float(), dim=-1)).mean(1)


class Objective(nn.Module):
    """Networks and loss of a self-supervised objective.

    A subclass sets `encoder`, and `target_encoder` if a moving average of it is the teacher. Other networks that are
    only averaged are attributes whose names begin with `target_`; everything else that has parameters is trained.
    """

    encoder: VisionTransformer3D
    target_encoder: VisionTransformer3D | None
    compares_volumes = False
    """Whether the loss of a volume depends on the others of its micro-batch, as a contrastive loss does; otherwise the
    monitors verify that it does not."""
    distance: Callable[[Tensor, Tensor], Tensor] = staticmethod(absolute_error)
    """(prediction [B, M, D], goal [B, M, D]) -> loss of each volume [B]."""

    def __init__(self) -> None:
        super().__init__()
        self.target_encoder = None

    def forward(self, views: Sequence[View], context_weight: float | Tensor) -> ObjectiveOutput:
        """Losses of the views of a micro-batch: `num_views`, twice as many with masks.large_blocks. `context_weight`:
        the current weight of the context loss."""
        raise NotImplementedError(f"{type(self).__name__} has no forward(views, context_weight)")

    def baseline(self, goal_BMD: Tensor) -> Tensor:
        """Loss [B] of the best answer that does not depend on the volume: here the per-channel median of all goals, the
        best constant for an absolute error. A model with a loss near it has learned nothing of the content."""
        constant_D = median(goal_BMD.float().flatten(0, 1))
        return self.distance(constant_D.expand_as(goal_BMD), goal_BMD)

    def hidden_from_encoder(self, index: TokenIndex) -> Tensor | None:
        """[B, T] places within `kept` whose voxels must not influence the encoder in training; the preflight checks
        their gradient. None if nothing is hidden."""
        return index.target

    def update_target(self, momentum: float | Tensor) -> None:
        """Move the target encoder after an update of the encoder, and apply what the step has gathered."""
        if self.target_encoder is not None:
            move_average(self.target_encoder, self.encoder, momentum)

    def discard_step(self) -> None:
        """Drop statistics of this step, because its update is skipped."""

    def connect(self, sum_over_ranks: Callable[..., None]) -> None:
        """Receive a function that sums tensors over all ranks in place, for statistics of the global batch."""

    def frozen_encoder(self, which: Literal["target", "context"]) -> VisionTransformer3D:
        """The encoder for embedding and probing (`objective.frozen`)."""
        return self.encoder if self.target_encoder is None or which == "context" else self.target_encoder

    def parameters_by_part(self) -> dict[str, int]:
        """Numbers of parameters: encoder, target_encoder (0 if there is none), predictor (all others), total."""
        encoder, total = count_parameters(self.encoder), count_parameters(self)
        teacher = count_parameters(self.target_encoder) if self.target_encoder is not None else 0
        return {"encoder": encoder, "target_encoder": teacher, "predictor": total - encoder - teacher, "total": total}


def median(rows_ND: Tensor) -> Tensor:
    """[D]: the median of every column; of two middle values the lower one."""
    if torch.are_deterministic_algorithms_enabled():
        # torch refuses its own median on CUDA in this mode, because the indices that it also returns are not
        # deterministic.
        return rows_ND.sort(0).values[(len(rows_ND) - 1) // 2]
    return rows_ND.median(0).values


@torch.no_grad()
def move_average(average: nn.Module, source: nn.Module, momentum: float | Tensor) -> None:
    """average = momentum * average + (1 - momentum) * source, over all parameters; if they are sharded, each rank moves
    its share."""
    targets, sources = ([_own(p) for p in module.parameters()] for module in (average, source))
    if isinstance(momentum, Tensor):
        torch._foreach_lerp_(targets, sources, [(1 - momentum).to(targets[0].dtype)] * len(targets))
    else:
        torch._foreach_lerp_(targets, sources, weight=1 - momentum)


def _own(parameter: Tensor) -> Tensor:
    share = getattr(parameter, "to_local", None)
    return share() if share else parameter
