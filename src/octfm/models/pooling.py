"""From the tokens of a volume to one vector, without weights: the mean, or per channel the extremes.

Shape suffixes: B batch, M tokens, D width.
"""

from typing import Literal

import torch
from torch import Tensor

VectorPool = Literal["mean", "extremes"]
EXTREMES = 0.2
"""Share of a volume's tokens that each of its two extremes averages."""


def pooled(tokens_BMD: Tensor, counts_BM: Tensor, pool: VectorPool) -> Tensor:
    """[B, D], or [B, 2 D] for `extremes`, of the tokens that count (bool or 0 and 1; at least one of each volume)."""
    return mean(tokens_BMD, counts_BM) if pool == "mean" else extremes(tokens_BMD, counts_BM)


def width_of(pool: VectorPool, width: int) -> int:
    """Numbers in a vector of tokens of this width."""
    return width if pool == "mean" else 2 * width


def mean(tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
    """[B, D]"""
    weight = counts_BM.to(tokens_BMD.dtype).unsqueeze(-1)
    return (tokens_BMD * weight).sum(1) / weight.sum(1)


def extremes(tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
    """[B, 2 D]: channel by channel the mean of the highest fifth of tokens, then of the lowest (after WILDCAT, Durand et al., CVPR 2017).

    A lesion covers few tokens, and the mean over all of them dilutes it.
    """
    counts = counts_BM.unsqueeze(-1) > 0
    taken = (counts_BM.to(tokens_BMD.dtype).sum(1) * EXTREMES).ceil().view(-1, 1, 1)
    used = torch.arange(tokens_BMD.shape[1], device=tokens_BMD.device).view(1, -1, 1) < taken
    ends = []
    for highest in (True, False):
        fill = float("-inf") if highest else float("inf")
        ordered = tokens_BMD.masked_fill(~counts, fill).sort(1, descending=highest).values
        ends.append(torch.where(used, ordered, 0.0).sum(1) / taken.squeeze(1))
    return torch.cat(ends, 1)
