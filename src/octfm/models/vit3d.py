"""A plain pre-norm Vision Transformer over 3-D patches, with axial rotary positions in millimetres.

Shape suffixes: B batch, N tokens of the grid, M selected tokens, P voxels of a patch, S = 3 for query, key and value,
H heads, D model width, K head width, k = K / 2 frequency pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Annotated, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from octfm.config import Config, Place
from octfm.errors import ConfigError
from octfm.models.attention import attend
from octfm.models.pooling import VectorPool, pooled
from octfm.models.products import Linear
from octfm.models.recompute import through
from octfm.volume.volume import Shape3

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines of `rotary`, or factors of `turn_qkv`."""
Intensity = tuple[float, float] | Literal["own"]
"""Mean and standard deviation of grey values scaled to 0..1; `own`: each volume by its own, as in the prototype."""
STANDARDISED = 16.0
"""Floats that reach below 0 and stay below this are taken for standardised voxels, not grey values from 0 to 255."""
WHITEST = 1023.0
"""Largest grey value that is accepted. Brightening may exceed 255; larger values come from voxels of 12 or 16 bits."""
Side = Annotated[int, Field(ge=1, le=1024)]
"""Voxels along one axis of a patch."""


class ViTConfig(Config):
    """Size of the encoder. The default is ViT-S/12 on 4 x 16 x 16 patches."""

    patch_size: tuple[Side, Side, Side] = (4, 16, 16)
    """Voxels of one token, (B-scan, axial, lateral)."""
    width: int = Field(default=384, ge=8, le=16_384)
    """Channels of a token, and of a volume's vector if objective.pool is mean."""
    depth: int = Field(default=12, ge=1, le=200)
    """Transformer blocks."""
    heads: int = Field(default=6, ge=1, le=1024)
    """Attention heads; must divide the width into parts of even size."""
    mlp_ratio: float = Field(default=4.0, ge=0.125, le=64)
    """Width of the hidden layer of a block's MLP, as a multiple of `width`."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotary positions have no parameters; `learned` is the prototype's position table, kept for comparison (F17)."""
    summary: int = Field(default=0, ge=0, le=1024)
    """Learned queries that read a volume's tokens, with their places, into its vector (objective.pool=summary); 0 for
    none. Only `dense` and `anchored` train them."""
    activation_checkpointing: bool = False
    """Keep only the activations between blocks and recompute the rest in the backward pass: the same numbers, less
    memory, more time (arXiv:1604.06174)."""
    init: Place | None = None
    """Initial weights, random by default. `packaged`: the encoder that comes with octfm (a run records its name and
    hash). A run of `octfm pretrain` or an export, on a disk or in a bucket, or a run's checkpoint on a disk: its
    encoder and, if the objective is the same, its other networks; its participants count as seen by the new run. Or a
    local checkpoint (.pt) of V-JEPA 2. Patches, width and heads must agree, and there may be more blocks."""

    @model_validator(mode="after")
    def _heads_fit(self) -> "ViTConfig":
        check_heads(self.width, self.heads, rotary=self.positions == "rotary")
        return self


def check_heads(width: int, heads: int, *, rotary: bool) -> None:
    """Raise ValueError unless a width splits into even heads, with a frequency pair for each axis if `rotary`."""
    if width % heads or (width // heads) % 2:
        raise ValueError(f"width {width} must split into {heads} heads of even size")
    if rotary and width // heads < 6:
        raise ValueError(
            f"rotary positions need heads of width 6 or more, a frequency pair for each axis; got {width // heads}"
        )


@dataclass(frozen=True)
class TokenGrid:
    """The grid of tokens: their number along each axis and the distance between centres in mm."""

    shape: Shape3
    pitch_mm: tuple[float, float, float]

    @property
    def size(self) -> int:
        return prod(self.shape)

    def positions_mm(self, index_BM: Tensor) -> Tensor:
        """Token centres [B, M, 3] in mm from the first token, in float32."""
        _, h, w = self.shape
        axes = (index_BM // (h * w), index_BM // w % h, index_BM % w)
        # Axis by axis: the host would wait for a tensor of the three distances to be copied to the device.
        return torch.stack([axis.float() * mm for axis, mm in zip(axes, self.pitch_mm, strict=True)], dim=-1)


@dataclass(frozen=True, eq=False)
class TokenIndex:
    """Which tokens a step uses, as int64 tensors on the device."""

    kept: Tensor
    """[B, K] flat grid indices, sorted."""
    context: Tensor
    """[B, C] places within `kept` that the encoder sees."""
    target: Tensor
    """[B, T] places within `kept` that are hidden from it."""
    tissue: Tensor | None = None
    """bool [B, K]: which kept tokens are tissue; None if unknown."""


def take_patches(voxels: Tensor, index_BM: Tensor, patch_size: Shape3, volume_BM: Tensor | None = None) -> Tensor:
    """The patches [B, M, P] at flat grid indices of voxels [B, 1, D, H, W]; other voxels are never read.

    `volume_BM`: which of the volumes each patch is taken from; by default, row b from volume b.
    """
    pd, ph, pw = patch_size
    # From [B, d, pd, h, ph, w, pw] to [B, d, h, w, pd, ph, pw]; both are views, and only the indexing below copies.
    blocks = voxels.squeeze(1).unflatten(3, (-1, pw)).unflatten(2, (-1, ph)).unflatten(1, (-1, pd))
    blocks = blocks.permute(0, 1, 3, 5, 2, 4, 6)
    _, _, h, w = blocks.shape[:4]
    if volume_BM is None:
        volume_BM = torch.arange(voxels.shape[0], device=voxels.device).unsqueeze(1)
    return blocks[volume_BM, index_BM // (h * w), index_BM // w % h, index_BM % w].flatten(2)


def normalise(patches_BMP: Tensor, mean: float, std: float) -> Tensor:
    """Patches of grey values, 0 to 255, as normalised float32, without augmentation; a float32 input is changed in
    place. `mean` and `std` are those of grey values scaled to 0..1."""
    return patches_BMP.float().div_(255).sub_(mean).div_(std)


def take_tokens(tokens_BND: Tensor, index_BM: Tensor) -> Tensor:
    """Select tokens [B, M, D] by their place in the sequence."""
    return torch.gather(tokens_BND, 1, index_BM.unsqueeze(-1).expand(-1, -1, tokens_BND.shape[-1]))


def rotary(grid: TokenGrid, index_BM: Tensor, head_width: int) -> Rotary:
    """Cosines and sines [B, 1, M, k], float32, of a third of the frequency pairs for each axis, in the order (B-scan,
    axial, lateral); pairs left over are the B-scan axis's.

    Wavelengths increase geometrically from two tokens to four times the field of view along their axis, so every pair
    distinguishes positions within the volume and none aliases between neighbours (RoFormer, arXiv:2104.09864, extended
    to 3-D and millimetres).
    """
    pairs = head_width // 2
    shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    positions = grid.positions_mm(index_BM)
    angles = []
    for axis, share in enumerate(shares):
        shortest = 2 * grid.pitch_mm[axis]
        longest = max(4 * grid.pitch_mm[axis] * grid.shape[axis], 2 * shortest)
        ramp = torch.arange(share, device=index_BM.device, dtype=torch.float32) / max(1, share - 1)
        wavelength = shortest * (longest / shortest) ** ramp
        angles.append(positions[..., axis : axis + 1] * (2 * torch.pi / wavelength))
    angles_B1Mk = torch.cat(angles, dim=-1).unsqueeze(1)
    return angles_B1Mk.cos(), angles_B1Mk.sin()


def take_rotary(table: Rotary, index_BM: Tensor) -> Rotary:
    """The part of a rotary table for some of its tokens, by their place in the sequence."""
    cos, sin = (take_tokens(t.squeeze(1), index_BM).unsqueeze(1) for t in table)
    return cos, sin


def turn_qkv(table: Rotary) -> Rotary:
    """Factors [B, M, 3, 1, K] that rotate queries, keys and values in one operation; values are left unrotated."""
    cos, sin = (t.movedim(1, 2).unsqueeze(2) for t in table)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return torch.cat((cos, cos, torch.ones_like(cos)), dim=2), torch.cat((sin, sin, torch.zeros_like(sin)), dim=2)


def rotate(x_BMSHK: Tensor, turn: Rotary) -> Tensor:
    """Rotate channel pairs (j, j + K / 2), computed in float32 whatever the dtype of x."""
    cos, sin = turn
    # Rolling by half the width puts each channel's partner in its place; `turn_qkv` has put the signs into `sin`.
    return torch.addcmul(x_BMSHK * cos, x_BMSHK.roll(x_BMSHK.shape[-1] // 2, -1), sin).to(x_BMSHK.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with optional rotary positions: [B, M, D] to [B, M, D]; arguments as for `Block`."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = Linear(width, 3 * width)
        self.out = Linear(width, width)

    def forward(self, x_BMD: Tensor, turn: Rotary | None, lengths: Sequence[int] | None = None) -> Tensor:
        qkv_BMSHK = self.qkv(x_BMD).unflatten(-1, (3, self.heads, -1))
        # To [S, B, H, M, K].
        q, k, v = (rotate(qkv_BMSHK, turn) if turn is not None else qkv_BMSHK).permute(2, 0, 3, 1, 4)
        return self.out(attend(q, k, v, lengths).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        super().__init__()
        hidden = int(mlp_ratio * width)
        self.norm1 = nn.LayerNorm(width)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(Linear(width, hidden), nn.GELU(), Linear(hidden, width))

    def forward(self, x_BMD: Tensor, turn: Rotary | None, lengths: Sequence[int] | None = None) -> Tensor:
        """`turn`: the result of `turn_qkv`, or None if positions were added to the tokens. `lengths`: see `attend`."""
        x_BMD = x_BMD + self.attn(self.norm1(x_BMD), turn, lengths)
        return x_BMD + self.mlp(self.norm2(x_BMD))


class Summary(nn.Module):
    """Learned queries that read tokens by attention and join what they read in one vector.

    Keys are rotated by the positions of their tokens, as in a block. Queries are not, so that each can prefer a region
    of the grid. Shape suffixes: Q queries, G groups of tokens.
    """

    def __init__(self, config: ViTConfig, grid: TokenGrid):
        super().__init__()
        width, self.grid, self.heads = config.width, grid, config.heads
        self.rotary = config.positions == "rotary"
        self.query = nn.Parameter(torch.randn(config.heads, config.summary, width // config.heads))
        self.key, self.value, self.out = (Linear(width, width) for _ in range(3))
        self.mlp = nn.Sequential(nn.LayerNorm(width), Linear(width, 2 * width), nn.GELU(), Linear(2 * width, width))

    def forward(self, tokens_BMD: Tensor, counts_BGM: Tensor, index_BM: Tensor) -> Tensor:
        """[B, G, Q D]: a vector for each group of tokens. `counts_BGM` (bool): the tokens of each, at least one.
        `index_BM`: flat grid indices of the tokens."""
        k_BHMK, v_BHMK = (
            layer(tokens_BMD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.key, self.value)
        )
        if self.rotary:
            cos, sin = rotary(self.grid, index_BM, k_BHMK.shape[-1])
            k_BHMK = rotate(k_BHMK, (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
        score_BHQM = self.query.to(k_BHMK.dtype) @ k_BHMK.mT * k_BHMK.shape[-1] ** -0.5
        score_BGHQM = score_BHQM.unsqueeze(1).masked_fill(~counts_BGM[:, :, None, None], float("-inf"))
        read_BGHQK = score_BGHQM.softmax(-1) @ v_BHMK.unsqueeze(1)
        x_BGQD = self.out(read_BGHQK.movedim(2, 3).flatten(-2))
        return (x_BGQD + self.mlp(x_BGQD)).flatten(2)


class VisionTransformer3D(nn.Module):
    """Encodes any subset of a volume's tokens; tokens that are not passed in cannot influence the result."""

    def __init__(self, config: ViTConfig, grid: TokenGrid):
        super().__init__()
        self.config, self.grid = config, grid
        self.intensity: Intensity | None = None
        """How `forward_features` normalises grey values; None in networks that are not part of an encoder."""
        self.patch_embed = Linear(prod(config.patch_size), config.width)
        if config.positions == "learned":
            self.position = nn.Parameter(torch.randn(1, grid.size, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config.width, config.heads, config.mlp_ratio) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.summary = Summary(config, grid) if config.summary else None
        self.apply(init_weights)

    @property
    def head_width(self) -> int:
        return self.config.width // self.config.heads

    @property
    def num_features(self) -> int:
        """Channels of a token, under timm's name."""
        return self.config.width

    def table(self, index_BM: Tensor) -> Rotary | None:
        """The rotary table of tokens at flat grid indices; None if positions are learned."""
        return rotary(self.grid, index_BM, self.head_width) if self.config.positions == "rotary" else None

    def forward_features(
        self, voxels: Tensor, index_BM: Tensor | None = None, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """Tokens [B, N, D] of prepared volumes, as in timm: all of the grid, or those at flat grid indices [B, M].

        `voxels`: [B, 1, D, H, W] or [B, D, H, W], 0 to 255, uint8 or float, as stores and `Encoder.prepare` hold them;
        they are normalised here.
        `lengths`: the number of tokens of each of B volumes, if they differ. `index_BM` [1, M] then holds their indices
        one volume after the other, and the tokens are [1, M, D] in the same order.

        Raises ConfigError for another shape of voxels, for an `index_BM` that is not integer [B, M] or not of the grid
        (checked on the CPU), for floats that are NaN, scaled or standardised already (neither checked in compiled and
        traced code), and in a network that is not part of an encoder.
        """
        voxels = voxels.unsqueeze(1) if voxels.ndim == 4 else voxels
        expected = [1, *(n * p for n, p in zip(self.grid.shape, self.config.patch_size, strict=True))]
        if list(voxels.shape[1:]) != expected:
            advice = "prepare volumes first (encoder.prepare, octfm prepare)"
            if list(voxels.shape[1:3]) == [1, 1]:
                advice = "single B-scans are read by the network of encoder.of_bscans()"
            raise ConfigError(
                f"expected voxels [B, {', '.join(map(str, expected))}], got {list(voxels.shape)}; {advice}"
            )
        if self.intensity is None:
            raise ConfigError("this network does not know its intensities; take the one of an octfm.Encoder")
        if index_BM is not None and (index_BM.ndim != 2 or index_BM.dtype not in (torch.int64, torch.int32)):
            # A mask would be taken for the numbers 0 and 1.
            raise ConfigError(
                f"expected places, flat grid indices int64 [B, M], got {index_BM.dtype} {list(index_BM.shape)}; "
                "encoder.select(arrays) returns them first, then which of them are tissue"
            )
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        # Elsewhere the host would wait for the device.
        if not traced and index_BM is not None and index_BM.device.type == "cpu" and index_BM.numel():
            low, high = map(int, index_BM.aminmax())
            if low < 0 or high >= self.grid.size:
                raise ConfigError(
                    f"expected places, flat grid indices from 0 to {self.grid.size - 1}, got {low} to {high}; "
                    "encoder.select(arrays) returns them"
                )
        if index_BM is None:
            index_BM = torch.arange(self.grid.size, device=voxels.device).expand(voxels.shape[0], -1)
        volume_BM = torch.arange(voxels.shape[0], device=voxels.device).unsqueeze(1)
        if lengths is not None:
            volume_BM = torch.cat([own.expand(n) for own, n in zip(volume_BM, lengths, strict=True)]).unsqueeze(0)
        patches_BMP = take_patches(voxels, index_BM, self.config.patch_size, volume_BM)
        if self.intensity == "own":
            whole = voxels.flatten(1).float()
            mean, std = (of_B[volume_BM].unsqueeze(-1) for of_B in (whole.mean(1), whole.std(1).clamp_min(1e-6)))
            return self(((patches_BMP.float() - mean) / std).to(self.norm.weight.dtype), index_BM, lengths=lengths)
        if voxels.dtype != torch.uint8 and not traced:
            _require_grey_values(voxels)
        return self(normalise(patches_BMP, *self.intensity).to(self.norm.weight.dtype), index_BM, lengths=lengths)

    def feature_map(self, voxels: Tensor) -> Tensor:
        """All tokens of prepared volumes as an image, channels first, [B, D, d, h, w], as MONAI's decoders expect it.

        `voxels` and errors as in `forward_features`.
        """
        return self.forward_features(voxels).unflatten(1, self.grid.shape).movedim(-1, 1)

    def vector(self, tokens_BMD: Tensor, counts_BM: Tensor, index_BM: Tensor, pool: VectorPool) -> Tensor:
        """[B, width_of(pool, D, queries)]: tokens that `forward` returned for flat grid indices, pooled over those that
        count (bool or 0 and 1, at least one per volume). Raises ConfigError for a summary if this network has none."""
        if pool != "summary":
            return pooled(tokens_BMD, counts_BM, pool)
        if self.summary is None:
            raise ConfigError("pool=summary: this encoder has no summary (model.summary is 0); choose another pooling")
        tokens_BMD = tokens_BMD.to(self.summary.query.dtype)
        return self.summary(tokens_BMD, counts_BM.unsqueeze(1) > 0, index_BM).squeeze(1)

    def forward(
        self,
        patches_BMP: Tensor,
        index_BM: Tensor,
        table: Rotary | None = None,
        substitute: tuple[Tensor, Tensor] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Tokens [B, M, D] of patches at flat grid indices.

        `table`: the rotary table of these tokens, if the caller has it already. `substitute` = (where [B, M] bool,
        token [D]) replaces patch embeddings before the first block (data2vec). `lengths`: see `forward_features`.
        """
        return self.norm(self.hidden(patches_BMP, index_BM, table, substitute, lengths)[-1])

    def hidden(
        self,
        patches_BMP: Tensor,
        index_BM: Tensor,
        table: Rotary | None = None,
        substitute: tuple[Tensor, Tensor] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """The residual stream [B, M, D] after every block, without the final norm; arguments as in `forward`."""
        x_BMD = self.patch_embed(patches_BMP)
        if substitute is not None:
            where_BM, token_D = substitute
            x_BMD = torch.where(where_BM.unsqueeze(-1), token_D.to(x_BMD.dtype), x_BMD)
        if self.config.positions == "learned":
            x_BMD = x_BMD + take_tokens(self.position.expand(x_BMD.shape[0], -1, -1), index_BM)
        table = self.table(index_BM) if table is None else table
        turn = turn_qkv(table) if table is not None else None
        stream = []
        for block in self.blocks:
            if lengths is None:
                x_BMD = through(block, x_BMD, turn, self.config.activation_checkpointing)
            else:
                x_BMD = block(x_BMD, turn, lengths)
            stream.append(x_BMD)
        return stream


def _require_grey_values(voxels: Tensor) -> None:
    """Raise ConfigError for numbers that are not grey values from 0 to 255: after a second normalisation, all scans
    look the same."""
    if not voxels.numel():
        return
    least, most = torch.stack(voxels.detach().float().aminmax()).tolist()
    if not (isfinite(least) and isfinite(most)):
        raise ConfigError("expected voxels from 0 to 255, got some that are NaN or infinite; set padding to 0")
    if 0 < most <= 1 or (least < 0 and most < STANDARDISED) or most > WHITEST:
        raise ConfigError(
            f"expected voxels from 0 to 255, which are normalised here, got {least:.3g} to {most:.3g}; give them as "
            "the store has them, without a scaling of your own"
        )


def bscan_weights(network: VisionTransformer3D) -> dict[str, Tensor]:
    """Weights of a network of volumes, converted for single B-scans (patches one voxel deep); copies.

    Patch kernels are summed over depth, so that a B-scan gets the embedding of a patch in which it is repeated. Learned
    positions are taken from the middle of the volume.
    """
    depth, rows, columns = network.config.patch_size
    weights = dict(network.state_dict())
    kernel_DdP = weights["patch_embed.weight"].unflatten(1, (depth, rows * columns))
    weights["patch_embed.weight"] = kernel_DdP.sum(1)
    if "position" in weights:
        d, h, w = network.grid.shape
        weights["position"] = weights["position"].unflatten(1, (d, h * w))[:, d // 2]
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


def init_weights(module: nn.Module) -> None:
    """LeCun normal initialisation.

    The usual standard deviation of 0.02 suits a width of 2,500; at a width of 128 it would keep every block near the
    identity for hundreds of steps.
    """
    if isinstance(module, nn.Linear):
        std = module.in_features**-0.5
        nn.init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def count_parameters(module: nn.Module) -> int:
    """Number of parameters, trained or not."""
    return sum(p.numel() for p in module.parameters())
