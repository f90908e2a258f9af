"""Decode the full token grid to surfaces and masks at voxel resolution: each token predicts the voxels of its patch.

Shape suffixes: B batch, C channels (S surfaces, then masks), d h w tokens, p q r voxels of a patch, D H W voxels,
F token width.
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
"""Log-odds of a lesion voxel before training."""
WINDOW_ROWS = 4
"""A surface is the mean row within this distance of its path: sub-row precision, but never between two candidates."""


class DenseDecoder(nn.Module):
    """Tokens [B, d, h, w, F] to logits [B, C, D, H, W]; kind `light` first mixes neighbouring tokens by convolution.

    Across B-scans and A-scans a token predicts every second and fourth voxel of its patch (knots), with linear
    interpolation in between: layers are smooth there, and eight times fewer weights need fewer labels. Along the axial
    direction it predicts every row.
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
        # The last channels are masks. Lesions are rare: starting from even odds would cost many steps.
        with torch.no_grad():
            self.answer.bias.unflatten(0, (channels, -1))[channels - masks :] = LESIONS_ARE_RARE
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def standardise_by(self, tokens_NF: Tensor) -> None:
        """Set the mean and standard deviation by which tokens are standardised; they are saved with the weights."""
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
    """[voxels, knots]: weights of linear interpolation from knots to voxels along one axis of a patch."""
    # The outer knots lie on the outer voxels, so nothing is extrapolated.
    knots = min(voxels, max(2, voxels // every))
    at = torch.linspace(0, knots - 1, voxels) if voxels > 1 else torch.zeros(1)
    return (1 - (at[:, None] - torch.arange(knots)).abs()).clamp_min(0)


def surface_loss(logits_BSDHW: Tensor, rows_BSDW: Tensor) -> Tensor:
    """Scalar: mean cross-entropy with a narrow Gaussian around the true row, where it is known (finite and in the
    frame); 0 if none is."""
    height = logits_BSDHW.shape[3]
    known = torch.isfinite(rows_BSDW) & (rows_BSDW >= 0) & (rows_BSDW <= height - 1)
    if not known.any():
        return logits_BSDHW.sum() * 0  # a zero that gradients flow through
    log_p = F.log_softmax(logits_BSDHW.movedim(3, -1)[known], dim=-1)
    offset = torch.arange(height, device=log_p.device) - rows_BSDW[known].unsqueeze(-1)
    target = torch.softmax(-0.5 * (offset / SPREAD_ROWS) ** 2, dim=-1)
    return -(target * log_p).sum(-1).mean()


def mask_loss(logits_BMDHW: Tensor, truth_BMDHW: Tensor) -> Tensor:
    """Scalar: voxel-wise cross-entropy plus 1 − soft Dice of the batch, so that small lesions still count."""
    p = logits_BMDHW.sigmoid()
    # The ones keep Dice defined if there is no lesion, neither marked nor predicted.
    overlap = 2 * (p * truth_BMDHW).sum() + 1
    dice = overlap / (p.sum() + truth_BMDHW.sum() + 1)
    return F.binary_cross_entropy_with_logits(logits_BMDHW, truth_BMDHW) + 1 - dice


def surface_rows(logits_BSDHW: Tensor, path_BSDW: Tensor) -> Tensor:
    """Expected row [B, S, D, W] within WINDOW_ROWS of a path of rows, in fractional rows.

    Surfaces are ordered from top to bottom, and none is placed above the one before it.
    """
    p = logits_BSDHW.softmax(3)
    row = torch.arange(p.shape[3], device=p.device, dtype=p.dtype)[:, None]
    near = (row - path_BSDW.unsqueeze(3)).abs() <= WINDOW_ROWS
    p = p * near
    return ((p * row).sum(3) / p.sum(3)).cummax(1).values
