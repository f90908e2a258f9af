"""Attention, by the kernel that is fastest for the tensors at hand.

torch's fused kernel is, but for bfloat16 on CPUs: there plain matrix products over blocks of scores that stay in the cache are
1.3 to 1.9 times as fast (docs/LOG.md). Blocks keep memory bounded at any number of tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK_BYTES = 2_800_000
"""Of scores at a time: about one core's share of the cache."""
KEPT_TOKENS = 1200
"""Up to here the attention weights are kept for the backward pass; beyond, their memory would outgrow everything else's."""


def attend(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, [B, H, N, K]."""
    if q_BHNK.is_cpu and q_BHNK.dtype is torch.bfloat16:
        if not (torch.is_grad_enabled() and q_BHNK.requires_grad):
            return _blocked(q_BHNK, k_BHNK, v_BHNK)[0].view(q_BHNK.shape)
        if q_BHNK.shape[2] <= KEPT_TOKENS:
            return KeptAttention.apply(q_BHNK, k_BHNK, v_BHNK)
    return F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)


class KeptAttention(torch.autograd.Function):
    """Keeps the attention weights, so that the backward pass need not compute them again."""

    @staticmethod
    def forward(ctx, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
        out_GNK, scaled_GNK, weights = _blocked(q_BHNK, k_BHNK, v_BHNK, keep=True)
        ctx.save_for_backward(scaled_GNK, k_BHNK, v_BHNK, *weights)
        return out_GNK.view(q_BHNK.shape)

    @staticmethod
    def backward(ctx, grad_BHNK: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_GNK, k_BHNK, v_BHNK, *weights = ctx.saved_tensors
        k_GNK, v_GNK, grad_GNK = (x.flatten(0, 1) for x in (k_BHNK, v_BHNK, grad_BHNK))
        dq_GNK, dk_GNK, dv_GNK = torch.empty((3, *q_GNK.shape), dtype=q_GNK.dtype, device=q_GNK.device)
        scale = q_GNK.shape[-1] ** -0.5
        for (heads, _), weight in zip(_blocks(q_GNK, whole=True), weights, strict=True):
            torch.bmm(weight.mT, grad_GNK[heads], out=dv_GNK[heads])
            dscore = torch._softmax_backward_data(torch.bmm(grad_GNK[heads], v_GNK[heads].mT), weight, -1, weight.dtype)
            torch.baddbmm(dq_GNK[heads], dscore, k_GNK[heads], beta=0, alpha=scale, out=dq_GNK[heads])
            torch.bmm(dscore.mT, q_GNK[heads], out=dk_GNK[heads])
        dq, dk, dv = (x.view(k_BHNK.shape) for x in (dq_GNK, dk_GNK, dv_GNK))
        return dq, dk, dv


def _blocks(q_GNK: Tensor, whole: bool = False) -> Iterator[tuple[slice, slice]]:
    """Groups of heads, and of query rows where the scores of a single head are too many (not if `whole`)."""
    groups, tokens, _ = q_GNK.shape
    row_bytes = tokens * q_GNK.element_size()
    heads = max(1, BLOCK_BYTES // (tokens * row_bytes))
    rows = tokens if whole else min(tokens, max(1, BLOCK_BYTES // row_bytes))
    for head in range(0, groups, heads):
        for row in range(0, tokens, rows):
            yield slice(head, head + heads), slice(row, row + rows)


def _blocked(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, keep: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attended tokens and scaled queries [B * H, N, K], and the attention weights of every block if they are to be kept."""
    # Contiguous: products over strided operands copy them again in every block.
    q_GNK = (q_BHNK * q_BHNK.shape[-1] ** -0.5).flatten(0, 1)
    k_GNK, v_GNK = (x.contiguous().flatten(0, 1) for x in (k_BHNK, v_BHNK))
    out_GNK, kept = torch.empty_like(q_GNK), []
    for heads, rows in _blocks(q_GNK, whole=keep):
        weight = torch.softmax(torch.bmm(q_GNK[heads, rows], k_GNK[heads].mT), -1)
        torch.bmm(weight, v_GNK[heads], out=out_GNK[heads, rows])
        if keep:
            kept.append(weight)
    return out_GNK, q_GNK, kept
