"""Predictors: from context tokens to a prediction for every target token."""

from collections.abc import Callable

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from octfm.config import Config
from octfm.models.products import Linear
from octfm.models.recompute import through
from octfm.models.vit3d import (
    Block,
    Rotary,
    TokenIndex,
    VisionTransformer3D,
    check_heads,
    init_weights,
    rotary,
    take_rotary,
    take_tokens,
    turn_qkv,
)


class PredictorConfig(Config):
    """Size of the predictor, a narrow transformer; 64-wide heads keep its attention efficient."""

    width: int = Field(default=192, ge=8, le=16_384)
    """Channels of a token inside the predictor."""
    depth: int = Field(default=6, ge=1, le=200)
    """Transformer blocks."""
    heads: int = Field(default=3, ge=1, le=1024)
    """Attention heads; must divide the width into parts of even size."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "PredictorConfig":
        check_heads(self.width, self.heads, rotary=True)
        return self


class Predictor(nn.Module):
    """V-JEPA 2's predictor (arXiv:2506.09985): a narrow transformer over context tokens and mask tokens. Unlike there,
    a linear map of the cosines and sines of its rotary angles is added to every token."""

    def __init__(
        self, config: PredictorConfig, encoder_width: int, goal_width: int, activation_checkpointing: bool = False
    ):
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        self.config = config
        self.embed = Linear(encoder_width, config.width)
        # Not zero: rotary positions act on queries, and a zero query stays zero in every rotation.
        self.mask_token = nn.Parameter(torch.randn(config.width) * 0.02)
        # Rotary positions act only inside attention, so all mask tokens would start out identical. Adding the position
        # to each token saves hundreds of steps.
        self.position = Linear(self.head_width, config.width, bias=False)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, 4.0) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.project = Linear(config.width, goal_width)
        self.apply(init_weights)

    @property
    def head_width(self) -> int:
        return self.config.width // self.config.heads

    def forward(self, context_BCD: Tensor, num_target: int, table: Rotary) -> Tensor:
        """Predictions [B, C + T, goal_width]: for context tokens first, then for targets, in the order of `table`."""
        x = self.embed(context_BCD)
        queries = self.mask_token.to(x.dtype).expand(len(x), num_target, -1)
        # Cosines and sines of the rotary angles serve as position features.
        where = torch.cat(table, dim=-1).squeeze(1)
        x = torch.cat((x, queries), dim=1) + self.position(where)
        turn = turn_qkv(table)
        for block in self.blocks:
            x = through(block, x, turn, self.activation_checkpointing)
        return self.project(self.norm(x))


def predictor_table(
    predictor: Predictor, encoder: VisionTransformer3D, table: Rotary | None, index: TokenIndex, asked_BM: Tensor
) -> Rotary:
    """Rotary table of the tokens at places `asked_BM` of `index.kept`.

    It is taken from the encoder's table if head widths agree, so that a step computes the angles once.
    """
    if table is not None and predictor.head_width == encoder.head_width:
        return take_rotary(table, asked_BM)
    return rotary(encoder.grid, torch.gather(index.kept, 1, asked_BM), predictor.head_width)


def seen_and_answers(
    encoder: VisionTransformer3D,
    predictor: Predictor,
    patches_BKP: Tensor,
    index: TokenIndex,
    table: Rotary | None = None,
    read: Callable[[Tensor, Tensor, Rotary | None], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens [B, C, D] of the context patches, the only ones that the encoder receives, and the predictor's answers
    [B, C + T, A] for context and targets, in this order.

    `table`: rotary angles of the kept tokens, if the caller has them. `read`: makes the tokens of patches, by default
    the encoder.
    """
    table = encoder.table(index.kept) if table is None else table
    # Hidden tokens are removed before the encoder, not masked in its attention, so that nothing of them can leak.
    seen = (read or encoder)(
        take_tokens(patches_BKP, index.context),
        torch.gather(index.kept, 1, index.context),
        take_rotary(table, index.context) if table else None,
    )
    # Context first: the predictor appends one mask token for each target.
    places = torch.cat((index.context, index.target), dim=1)
    table_BM = predictor_table(predictor, encoder, table, index, places)
    return seen, predictor(seen, index.target.shape[1], table_BM)


class MLPPredictor(nn.Module):
    """The prototype's two-layer predictor (0.296 M parameters at width 384; F19): [B, M, D] to [B, M, D]."""

    def __init__(self, width: int):
        super().__init__()
        self.layers = nn.Sequential(Linear(width, width), nn.LayerNorm(width), nn.GELU(), Linear(width, width))
        self.apply(init_weights)

    def forward(self, x_BMD: Tensor) -> Tensor:
        return self.layers(x_BMD)
