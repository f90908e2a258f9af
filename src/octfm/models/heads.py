"""Task heads (mean or attention pooling and a linear layer) and low-rank updates of a frozen encoder (LoRA).

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
    """Mean over the tokens marked in `counts`."""

    def forward(self, tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
        return mean(tokens_BMD, counts_BM)


class CrossAttentionPool(nn.Module):
    """Attention of one learned query to all tokens marked in `counts` (bool): 0.3 million parameters at width 384."""

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
        """[B, H, M]: the attention weights of `forward`; 0 on tokens that do not count."""
        # Computed again, because the fused kernel in `forward` does not return its weights.
        k_BHMK = self.key(tokens_BMD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores_BHM = (k_BHMK @ self.query.to(k_BHMK.dtype).transpose(-2, -1)).squeeze(-1) * k_BHMK.shape[-1] ** -0.5
        return scores_BHM.masked_fill(~counts_BM[:, None], float("-inf")).softmax(-1)


class TaskHead(nn.Module):
    """Standardise tokens, pool them, and apply a linear layer.

    Token statistics are set once, from training volumes, and saved with the weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, width: int, heads: int, outputs: int, pool: Pool):
        super().__init__()
        self.pool = CrossAttentionPool(width, heads) if pool == "attention" else MeanPool()
        self.answer = nn.Linear(width, outputs)
        # Zero, so that training starts from the same prediction for every volume.
        nn.init.zeros_(self.answer.weight)
        nn.init.zeros_(self.answer.bias)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def standardise_by(self, tokens_BMD: Tensor, counts_BM: Tensor) -> None:
        """Set the statistics: of the means of volumes for mean pooling, of single tokens for attention pooling."""
        if isinstance(self.pool, MeanPool):
            values = self.pool(tokens_BMD.float(), counts_BM)
        else:
            values = tokens_BMD.float()[counts_BM]
        self.mean.copy_(values.mean(0))
        self.std.copy_(values.std(0).clamp_min(1e-6))

    def forward(self, tokens_BMD: Tensor, counts_BM: Tensor) -> Tensor:
        """Answers [B, O]: logits or numbers."""
        return self.answer(self.pool((tokens_BMD - self.mean) / self.std, counts_BM))


class LowRank(nn.Module):
    """A frozen linear layer plus a trained low-rank update (LoRA, arXiv:2106.09685) that starts at zero."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) * layer.in_features**-0.5)
        # Zero, so that fine-tuning starts from exactly the frozen layer.
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.down), self.up)


def add_low_rank(encoder: VisionTransformer3D, rank: int) -> VisionTransformer3D:
    """Freeze an encoder and add a low-rank update to every attention projection, in place."""
    encoder.requires_grad_(False)
    for block in encoder.blocks:
        assert isinstance(block, Block)
        block.attn.add_module("qkv", LowRank(block.attn.qkv, rank))
        block.attn.add_module("out", LowRank(block.attn.out, rank))
    return encoder


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """An encoder's weights with the low-rank updates of `add_low_rank` added, under the names of the plain encoder."""
    kept = {name: tensor for name, tensor in state.items() if not name.endswith((".down", ".up"))}
    plain = {name.replace(".layer.", "."): tensor for name, tensor in kept.items()}
    for name, up in state.items():
        if name.endswith(".up"):
            layer = name.removesuffix(".up")
            plain[f"{layer}.weight"] = plain[f"{layer}.weight"] + up @ state[f"{layer}.down"]
    return plain


def depth_of(name: str, depth: int) -> int:
    """Layer index of an encoder's parameter: 0 for patch embedding and positions, from 1 for blocks, then the norm."""
    if name.startswith("blocks."):
        return int(name.split(".")[1]) + 1
    return depth + 1 if name.startswith("norm.") else 0
