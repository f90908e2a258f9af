"""From tokens to an answer: mean or cross-attention pooling and one linear layer; and low-rank updates of a frozen encoder.

Shape suffixes: B batch, M tokens, D width, H heads, K head width, O outputs.
"""

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.models.pooling import mean
from octfm.models.products import Linear
from octfm.models.vit3d import Block, VisionTransformer3D

Pool = Literal["mean", "attention"]


class MeanPool(nn.Module):
    """Mean over the tokens that count."""

    def forward(self, tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
        return mean(tokens_BMD, counts_BM)


class CrossAttentionPool(nn.Module):
    """One learned query looks at all tokens: 0.3 million parameters at width 384."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query = nn.Parameter(torch.randn(heads, 1, width // heads) * 0.02)
        self.key, self.value = Linear(width, width), Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
        k, v = (layer(tokens_BMD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.key, self.value))
        query_BH1K = self.query.to(k.dtype).expand(k.shape[0], -1, -1, -1)
        pooled_BH1K = F.scaled_dot_product_attention(query_BH1K, k, v, attn_mask=counts_BM[:, None, None, :])
        return self.norm(pooled_BH1K.transpose(1, 2).flatten(1))

    def attention(self, tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
        """[B, H, M]: what `forward` weighs values by; 0 on tokens that do not count."""
        k_BHMK = self.key(tokens_BMD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores_BHM = (k_BHMK @ self.query.to(k_BHMK.dtype).transpose(-2, -1)).squeeze(-1) * k_BHMK.shape[-1] ** -0.5
        return scores_BHM.masked_fill(~counts_BM[:, None], float("-inf")).softmax(-1)


class TaskHead(nn.Module):
    """Standardise tokens, pool them, answer. Token statistics are set once from training volumes and saved with the weights."""

    mean: Tensor
    std: Tensor

    def __init__(self, width: int, heads: int, outputs: int, pool: Pool):
        super().__init__()
        self.pool = CrossAttentionPool(width, heads) if pool == "attention" else MeanPool()
        self.answer = nn.Linear(width, outputs)
        nn.init.zeros_(self.answer.weight)
        nn.init.zeros_(self.answer.bias)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def standardise_by(self, tokens_BMD: Tensor, counts_BM: Tensor) -> None:
        """Take the statistics of what the pool averages: means of volumes for mean pooling, tokens for attention."""
        if isinstance(self.pool, MeanPool):
            values = self.pool(tokens_BMD.float(), counts_BM)
        else:
            values = tokens_BMD.float()[counts_BM]
        self.mean.copy_(values.mean(0))
        self.std.copy_(values.std(0).clamp_min(1e-6))

    def forward(self, tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
        """[B, O]"""
        return self.answer(self.pool((tokens_BMD - self.mean) / self.std, counts_BM))


class LowRank(nn.Module):
    """A frozen linear layer plus a trained update of low rank (LoRA, arXiv:2106.09685), which begins at zero."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


def add_low_rank(encoder: VisionTransformer3D, rank: int) -> VisionTransformer3D:
    """The encoder with its weights frozen and a low-rank update on every attention projection; in place."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        assert isinstance(block, Block)
        block.attn.add_module("qkv", LowRank(block.attn.qkv, rank))
        block.attn.add_module("out", LowRank(block.attn.out, rank))
    return encoder


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's weights with their low-rank updates added in, under the names of the plain encoder."""
    plain = {
        name.replace(".layer.", "."): tensor for name, tensor in state.items() if not name.endswith((".down", ".up"))
    }
    for name, up in state.items():
        if name.endswith(".up"):
            layer = name.removesuffix(".up")
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + up @ state[f"{layer}.down"]
    return plain


def depth_of(name: str, depth: int) -> int:
    """How far a parameter of the encoder is from the input: 0 for patch embedding and positions, 1.. for blocks, depth + 1 for the norm."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith("norm.") else 0
