"""Scaled dot-product attention by the fastest kernel for the given tensors.

That is usually torch's fused kernel. On CPUs in bfloat16, and in float32 where oneDNN multiplies faster than MKL (see
products.py), plain matrix products over blocks of scores that fit the cache are 1.3 to 1.9 times as fast (docs/log).
Blocks also bound the memory for any number of tokens.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from octfm.models.products import by_onednn, onednn_is_faster, times, times_transposed

BLOCK_BYTES = 2_800_000
"""Size of a block of scores: about one core's share of the cache."""
KEPT_TOKENS = 1200
"""Up to this many tokens, attention weights are kept for the backward pass; beyond, they would dominate the memory."""
LEAST_TOKENS = 192
"""In float32 heads are multiplied one by one; with fewer tokens the calls would cost more than the products."""


def attend(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
    """softmax(q k^T / sqrt(K)) v, [B, H, N, K].

    `lengths`: numbers of tokens of volumes that lie one after the other along N and do not see each other.
    """
    if lengths is not None:
        volumes = zip(*(x.split(lengths, 2) for x in (q_BHNK, k_BHNK, v_BHNK)), strict=True)
        return torch.cat([attend(*volume) for volume in volumes], 2)
    tokens, needs_grad = q_BHNK.shape[2], torch.is_grad_enabled() and q_BHNK.requires_grad
    if torch.compiler.is_compiling():
        blocked = False
    elif q_BHNK.is_cpu and q_BHNK.dtype is torch.bfloat16:
        # Recomputing the weights block by block is no faster than the fused kernel's backward pass in bfloat16.
        blocked = not needs_grad or tokens <= KEPT_TOKENS
    else:
        blocked = tokens >= LEAST_TOKENS and q_BHNK.is_cpu and q_BHNK.dtype is torch.float32 and onednn_is_faster()
    if not blocked:
        return F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)
    if needs_grad:
        return BlockedAttention.apply(q_BHNK, k_BHNK, v_BHNK)
    return _blocked(q_BHNK, k_BHNK, v_BHNK)[0].view(q_BHNK.shape)


class BlockedAttention(torch.autograd.Function):
    """Attention in blocks. For up to KEPT_TOKENS tokens the weights are saved, otherwise recomputed in backward."""

    @staticmethod
    def forward(ctx, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
        out_GNK, scaled_GNK, weights = _blocked(q_BHNK, k_BHNK, v_BHNK, keep=q_BHNK.shape[2] <= KEPT_TOKENS)
        ctx.save_for_backward(scaled_GNK, k_BHNK, v_BHNK, *weights)
        return out_GNK.view(q_BHNK.shape)

    @staticmethod
    def backward(ctx, grad_BHNK: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        q_GNK, k_BHNK, v_BHNK, *weights = ctx.saved_tensors
        k_GNK, v_GNK, grad_GNK = (x.flatten(0, 1) for x in (k_BHNK, v_BHNK, grad_BHNK))
        dq_GNK, dk_GNK, dv_GNK = torch.empty((3, *q_GNK.shape), dtype=q_GNK.dtype, device=q_GNK.device)
        scale, kept = q_GNK.shape[-1] ** -0.5, iter(weights)
        for heads, rows in _blocks(q_GNK, whole=bool(weights)):
            query, key, value, grad = q_GNK[heads, rows], k_GNK[heads], v_GNK[heads], grad_GNK[heads, rows]
            weight = next(kept) if weights else torch.softmax(_product(query, key.mT), -1)
            # Backward of softmax(scale q k^T) v: `query` is already scaled, so only dq needs the factor again.
            dscore = torch._softmax_backward_data(_product(grad, value.mT), weight, -1, weight.dtype)
            first = rows.start == 0
            _product(weight.mT, grad, out=dv_GNK[heads], first=first)
            _product(dscore.mT, query, out=dk_GNK[heads], first=first)
            _product(dscore, key, out=dq_GNK[heads, rows], scale=scale)
        dq, dk, dv = (x.view(k_BHNK.shape) for x in (dq_GNK, dk_GNK, dv_GNK))
        return dq, dk, dv


def _product(a_GMK: Tensor, b_GKN: Tensor, out: Tensor | None = None, scale: float = 1.0, first: bool = True) -> Tensor:
    """scale a b, [G, M, N], written to `out` if given; added to its content unless `first`."""
    if not by_onednn(a_GMK):
        if out is None or (first and scale == 1):
            return torch.bmm(a_GMK, b_GKN, out=out)
        return torch.baddbmm(out, a_GMK, b_GKN, beta=0 if first else 1, alpha=scale, out=out)
    a, b = a_GMK[0], b_GKN[0]  # `_blocks` gives oneDNN one head at a time
    product = (times(a, b.mT) if a.stride(-1) == 1 else times_transposed(a.mT, b)).unsqueeze(0)
    if out is None:
        return product
    return torch.mul(product, scale, out=out) if first else out.add_(product, alpha=scale)


def _blocks(q_GNK: Tensor, whole: bool = False) -> Iterator[tuple[slice, slice]]:
    """Slices of heads and of query rows, of BLOCK_BYTES of scores each; all rows of a head together if `whole`."""
    groups, tokens, _ = q_GNK.shape
    row_bytes = tokens * q_GNK.element_size()
    heads = 1 if by_onednn(q_GNK) else max(1, BLOCK_BYTES // (tokens * row_bytes))
    rows = tokens if whole else min(tokens, max(1, BLOCK_BYTES // row_bytes))
    for head in range(0, groups, heads):
        for row in range(0, tokens, rows):
            yield slice(head, head + heads), slice(row, row + rows)


def _blocked(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, keep: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attended tokens and scaled queries [B * H, N, K], and the attention weights of every block if `keep`."""
    # Made contiguous once: products would otherwise copy strided operands again in every block.
    # Scaling the queries costs N K products, scaling the scores would cost N².
    q_GNK = (q_BHNK * q_BHNK.shape[-1] ** -0.5).flatten(0, 1)
    k_GNK, v_GNK = (x.contiguous().flatten(0, 1) for x in (k_BHNK, v_BHNK))
    out_GNK, kept = torch.empty_like(q_GNK), []
    for heads, rows in _blocks(q_GNK, whole=keep):
        weight = torch.softmax(_product(q_GNK[heads, rows], k_GNK[heads].mT), -1)
        _product(weight, v_GNK[heads], out=out_GNK[heads, rows])
        if keep:
            kept.append(weight)
    return out_GNK, q_GNK, kept
