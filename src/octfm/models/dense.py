"""From the full grid of tokens to surfaces and masks at voxel resolution: every token answers for its own voxels.

Shape suffixes: B batch, C channels (S surfaces, then masks), d h w tokens, p q r voxels of a patch, D H W voxels, F token width.
"""

from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.models.products import Linear
from octfm.volume.volume import Shape3

Decoder = Literal["linear", "light"]

SPREAD_ROWS = 1.5
"""Standard deviation of the training target around a surface's true row."""
LESIONS_ARE_RARE = -4.0
"""Log-odds of a lesion voxel before anything is learned."""
WINDOW_ROWS = 4
"""A surface is the mean row within so many of its path: a fraction of a row, and never between two candidates."""


class DenseDecoder(nn.Module):
    """Tokens [B, d, h, w, F] to logits [B, C, D, H, W]; `light` lets neighbouring tokens talk first.

    Along B-scans and A-scans a token answers at every second and fourth voxel of its patch and is linear in between: layers are smooth
    there, and eight times fewer weights need eight times fewer labels. Along rows it answers for each.
    """

    mean: Tensor
    std: Tensor
    across: Tensor
    along: Tensor

    def __init__(self, width: int, channels: int, patch_size: Shape3, kind: Decoder, masks: int = 0):
        super().__init__()
        self.channels, self.patch_size = channels, patch_size
        self.mix = None
        if kind == "light":
            near = nn.Conv3d(width, width, 3, padding=1, groups=width)
            self.mix = nn.Sequential(near, nn.GELU(), nn.Conv3d(width, width, 1), nn.GELU())
        pd, ph, pw = patch_size
        self.register_buffer("across", _between(pd, 2))
        self.register_buffer("along", _between(pw, 4))
        self.knots = (self.across.shape[1], ph, self.along.shape[1])
        self.answer = Linear(width, channels * prod(self.knots))
        nn.init.zeros_(self.answer.weight)
        nn.init.zeros_(self.answer.bias)
        # The last channels are masks: lesions are rare, and unlearning an even guess would take longer than learning where they are.
        with torch.no_grad():
            self.answer.bias.unflatten(0, (channels, -1))[channels - masks :] = LESIONS_ARE_RARE
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def standardise_by(self, tokens_NF: Tensor) -> None:
        """Take the statistics of these tokens; saved with the weights."""
        self.mean.copy_(tokens_NF.mean(0))
        self.std.copy_(tokens_NF.std(0).clamp_min(1e-6))

    def forward(self, tokens_BdhwF: Tensor) -> Tensor:
        x = (tokens_BdhwF - self.mean) / self.std
        if self.mix is not None:
            x = x + self.mix(x.movedim(-1, 1)).movedim(1, -1)
        b, d, h, w, _ = x.shape
        knots = self.answer(x).unflatten(-1, (self.channels, *self.knots))
        voxels = torch.einsum("bdhwcmqn,pm,rn->bcdphqwr", knots, self.across, self.along)
        pd, ph, pw = self.patch_size
        return voxels.reshape(b, self.channels, d * pd, h * ph, w * pw)


def _between(voxels: int, every: int) -> Tensor:
    """[voxels, knots]: how much each knot of a patch says at each of its voxels along one axis; outer knots lie on outer voxels."""
    knots = min(voxels, max(2, voxels // every))
    at = torch.linspace(0, knots - 1, voxels) if voxels > 1 else torch.zeros(1)
    return (1 - (at[:, None] - torch.arange(knots)).abs()).clamp_min(0)


def surface_loss(logits_BSDHW: Tensor, rows_BSDW: Tensor) -> Tensor:
    """Mean cross-entropy, over A-scans whose true row is known (finite and in the frame), with a narrow bell around that row."""
    height = logits_BSDHW.shape[3]
    known = torch.isfinite(rows_BSDW) & (rows_BSDW >= 0) & (rows_BSDW <= height - 1)
    if not known.any():
        return logits_BSDHW.sum() * 0
    log_p = F.log_softmax(logits_BSDHW.movedim(3, -1)[known], dim=-1)
    offset = torch.arange(height, device=log_p.device) - rows_BSDW[known].unsqueeze(-1)
    target = torch.softmax(-0.5 * (offset / SPREAD_ROWS) ** 2, dim=-1)
    return -(target * log_p).sum(-1).mean()


def mask_loss(logits_BMDHW: Tensor, truth_BMDHW: Tensor) -> Tensor:
    """Cross-entropy of every voxel plus one minus the soft Dice of the batch, which small lesions are not lost in."""
    p = logits_BMDHW.sigmoid()
    overlap = 2 * (p * truth_BMDHW).sum() + 1
    dice = overlap / (p.sum() + truth_BMDHW.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits_BMDHW, truth_BMDHW) + 1 - dice


def surface_rows(logits_BSDHW: Tensor, path_BSDW: Tensor) -> Tensor:
    """Mean row near a path through the likely rows [B, S, D, W], in fractions; later surfaces never lie above earlier ones."""
    p = logits_BSDHW.softmax(3)
    row = torch.arange(p.shape[3], device=p.device, dtype=p.dtype)[:, None]
    near = (row - path_BSDW.unsqueeze(3)).abs() <= WINDOW_ROWS
    p = p * near
    return ((p * row).sum(3) / p.sum(3)).cummax(1).values
