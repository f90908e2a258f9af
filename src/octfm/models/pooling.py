"""Pool a volume's tokens to one vector: mean, or mean and tails of each channel (`summary` is in models/vit3d.py).

Shape suffixes: B batch, M tokens, D width.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

TokenPool = Literal["mean", "extremes", "tails"]
VectorPool = Literal[TokenPool, "summary"]
POOLS: tuple[VectorPool, ...] = get_args(VectorPool)
EXTREMES = 0.2
"""`extremes`: share of a volume's tokens that are averaged at each end of a channel."""
TAILS = (EXTREMES, 0.05, 0.01)
"""`tails`: the same shares, for findings that spread over the retina down to a single small lesion."""


def pooled(tokens_BMD: Tensor, counts_BM: Tensor, pool: TokenPool) -> Tensor:
    """[B, width_of(pool, D)]. `counts_BM` (bool or 0 and 1) marks the tokens to pool, at least one per volume."""
    if pool == "tails":
        return torch.cat((mean(tokens_BMD, counts_BM), extremes(tokens_BMD, counts_BM, TAILS)), 1)
    return mean(tokens_BMD, counts_BM) if pool == "mean" else extremes(tokens_BMD, counts_BM)


def width_of(pool: VectorPool, width: int, queries: int = 0) -> int:
    """Length of the pooled vector for tokens of this width. `queries`: number of queries of a summary."""
    return width * {"mean": 1, "extremes": 2, "tails": 1 + 2 * len(TAILS), "summary": queries}[pool]


def mean(tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
    """[B, D]: the mean of the tokens that count."""
    weight = counts_BM.to(tokens_BMD.dtype).unsqueeze(-1)
    return (tokens_BMD * weight).sum(1) / weight.sum(1)


def extremes(tokens_BMD: Tensor, counts_BM: Tensor, shares: Sequence[float] = (EXTREMES,)) -> Tensor:
    """[B, 2 D · number of shares]: per channel, the mean of the highest tokens, then of the lowest; share by share.
    A share of n tokens is rounded up.

    A lesion covers few tokens, and the mean over all tokens dilutes it (after WILDCAT, Durand et al., CVPR 2017).
    """
    counts = counts_BM.unsqueeze(-1) > 0
    number = counts.sum(1, keepdim=True)
    place = torch.arange(tokens_BMD.shape[1], device=tokens_BMD.device).view(1, -1, 1)
    # Tokens that do not count sort to the far end. Once for both ends: sorting takes longest.
    ordered = _ordered(tokens_BMD.masked_fill(~counts, float("inf")))
    ends = []
    for share in shares:
        taken = (number.to(tokens_BMD.dtype) * share).ceil().long()
        for taking in ((place >= number - taken) & (place < number), place < taken):
            # Not a product with `taking`: infinity times zero is NaN.
            ends.append(torch.where(taking, ordered, 0.0).sum(1) / taken.squeeze(1))
    return torch.cat(ends, 1)


def _ordered(tokens_BMD: Tensor) -> Tensor:
    """Every channel's values in ascending order, [B, M, D]."""
    # With gradients enabled, tokens may also be those of torch.func, which NumPy cannot read.
    followed = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.jit.is_tracing()
    if followed or not (tokens_BMD.is_cpu and tokens_BMD.dtype is torch.float32):
        return tokens_BMD.sort(1).values
    # The same values in a seventh of the time: torch sorts their places as well.
    return torch.from_numpy(np.sort(tokens_BMD.numpy(), axis=1))
