"""Pool the tokens of a volume to one vector without learned weights: their mean, or the extremes of each channel.

Shape suffixes: B batch, M tokens, D width.
"""

from typing import Literal

import torch
from torch import Tensor

VectorPool = Literal["mean", "extremes"]
EXTREMES = 0.2
"""Share of a volume's tokens that each of its two extremes averages."""


def pooled(tokens_BMD: Tensor, counts_BM: Tensor, pool: VectorPool) -> Tensor:
    """[B, D], or [B, 2 D] for `extremes`. `counts_BM` (bool or 0 and 1) marks the tokens to pool, at least one each."""
    return mean(tokens_BMD, counts_BM) if pool == "mean" else extremes(tokens_BMD, counts_BM)


def width_of(pool: VectorPool, width: int) -> int:
    """Length of the pooled vector for tokens of this width."""
    return width if pool == "mean" else 2 * width


def mean(tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
    """[B, D]: the mean of the tokens that count."""
    weight = counts_BM.to(tokens_BMD.dtype).unsqueeze(-1)
    return (tokens_BMD * weight).sum(1) / weight.sum(1)


def extremes(tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
    """[B, 2 D]: per channel, the mean of the highest fifth of the tokens, then of the lowest.

    A lesion covers few tokens, and the mean over all tokens dilutes it (after WILDCAT, Durand et al., CVPR 2017).
    """
    counts = counts_BM.unsqueeze(-1) > 0
    taken = (counts_BM.to(tokens_BMD.dtype).sum(1) * EXTREMES).ceil().view(-1, 1, 1)
    used = torch.arange(tokens_BMD.shape[1], device=tokens_BMD.device).view(1, -1, 1) < taken
    ends = []
    for highest in (True, False):
        # Tokens that do not count sort to the far end, beyond the ones that are used.
        fill = float("-inf") if highest else float("inf")
        ordered = tokens_BMD.masked_fill(~counts, fill).sort(1, descending=highest).values
        # Not a product with `used`: infinity times zero is NaN.
        ends.append(torch.where(used, ordered, 0.0).sum(1) / taken.squeeze(1))
    return torch.cat(ends, 1)
