"""Leaks of a step: of hidden voxels into the loss, and of one volume of a batch into the loss of another."""

from collections.abc import Sequence

import torch
from torch import Tensor

from octfm.models.objectives.objective import View
from octfm.models.vit3d import TokenIndex, take_tokens
from octfm.pretraining.learner import Learner

SAMPLED_TOKENS = 64
"""Tokens of a volume, at even distances, whose loss is compared with and without a second volume in the batch."""


def leak(learner: Learner, views: Sequence[View]) -> Tensor | None:
    """Largest gradient of the loss w.r.t. a voxel hidden from the encoder; None if the objective hides nothing. Call it
    after the backward pass of patches that require gradients."""
    found = []
    for view in views:
        hidden, gradient = learner.model.hidden_from_encoder(view.index), view.patches_BKP.grad
        if hidden is not None:
            # No gradient at all: the loss does not depend on the patches.
            none = torch.zeros((), device=view.patches_BKP.device)
            found.append(take_tokens(gradient, hidden).abs().max() if gradient is not None else none)
    return torch.stack(found).max() if found else None


@torch.no_grad()
def batch_effect(learner: Learner, views: Sequence[View], context_weight: Tensor) -> Tensor:
    """Relative change of a volume's loss when a second volume, or if there is none its own negative, joins the batch.
    In float32 whatever the run's precision: bfloat16 rounding would hide a leak of a percent."""
    thin = [_few(view) for view in views]
    # All views or none: those that differ in their masks only share a teacher, which sees the tokens of the first.
    all_thin = all(context.numel() and target.numel() for context, target in thin)
    pairs = [_pair(view, few if all_thin else None) for view, few in zip(views, thin, strict=True)]
    together = learner.model(pairs, context_weight).masked_loss_B[0]
    alone = learner.model([_first(pair) for pair in pairs], context_weight).masked_loss_B[0]
    return (alone - together).abs() / together.abs().clamp_min(1e-12)


def _every(view: View) -> int:
    """Distance, in kept tokens, at which about SAMPLED_TOKENS of them are left."""
    return -(-view.index.kept.shape[1] // SAMPLED_TOKENS)


def _few(view: View) -> tuple[Tensor, Tensor]:
    """Context and target [1, n] of the first volume among the tokens that are left; either may be empty."""
    every = _every(view)
    context, target = (
        (x[:1][x[:1] % every == 0] // every).unsqueeze(0) for x in (view.index.context, view.index.target)
    )
    return context, target


def _pair(view: View, few: tuple[Tensor, Tensor] | None) -> View:
    """Two volumes with the masks of the first, thinned out to the `few` tokens of its context and target, if given."""
    # An exact copy would not do: it has the statistics of the original, and a norm over both is the norm over one.
    patches, targets = (x[:2] if len(x) > 1 else torch.cat((x, -x)) for x in view[:2])
    labels = view.labels_BKP
    if labels is not None:
        labels = labels[:2] if len(labels) > 1 else torch.cat((labels, labels))
    kept, context, target, tissue = (x[:1] for x in vars(view.index).values())
    # A few tokens show whether something is normalised over the batch; all of them in float32 took 5 % of a run's time.
    if few is not None:
        (context, target), every = few, _every(view)
        kept, tissue, patches, targets = (x[:, ::every] for x in (kept, tissue, patches, targets))
        labels = labels[:, ::every] if labels is not None else None
    return View(patches, targets, TokenIndex(*(x.expand(2, -1) for x in (kept, context, target, tissue))), labels)


def _first(pair: View) -> View:
    index = TokenIndex(*(x[:1] for x in vars(pair.index).values()))
    labels = pair.labels_BKP[:1] if pair.labels_BKP is not None else None
    return View(pair.patches_BKP[:1], pair.target_patches_BKP[:1], index, labels)
