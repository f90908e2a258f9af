"""A 2-D U-Net that finds the surfaces and lesions of the retina in single B-scans, trained on phantoms alone.

Shape suffixes: B B-scans, S surfaces, M masks, H rows, W A-scans.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SURFACES = ("ilm", "nfl_gcl", "ipl_inl", "inl_opl", "opl_onl", "ez", "rpe_inner", "rpe_peak", "bm")
"""From the vitreous outwards, as octfm.phantom.native.bscans defines them."""
MASKS = ("intraretinal_fluid", "subretinal_fluid", "drusen", "detachment")
ROW_UM, ASCAN_UM = 3.9, 16.0
"""Distances of rows and A-scans that the network is trained for; B-scans are resampled to them."""
SPREAD_ROWS = 1.2
"""Standard deviation of the training target around a surface's true row."""


@dataclass(frozen=True)
class LayerNetConfig:
    """Size of the U-Net."""

    channels: tuple[int, ...] = (16, 24, 40, 64, 96, 128)
    """Channels of each level; every level after the first halves rows and A-scans."""

    @property
    def multiple(self) -> int:
        """Rows and A-scans of an image must be divisible by this."""
        return 2 ** (len(self.channels) - 1)


class Found(NamedTuple):
    """Logits of one batch, float32."""

    rows: Tensor
    """[B, S, H + 1, W]: softmax over axis 2 gives the probability of each row and, at index H, that the surface is not
    in this A-scan."""
    masks: Tensor
    """[B, M, H, W]: a sigmoid gives the probability of each mask; masks are independent of each other."""


class LayerNet(nn.Module):
    """B-scans [B, 1, H, W], each with mean 0 and variance 1 (`standardise`), to Found.

    H and W must be divisible by `config.multiple`. The position in the frame is no input.
    """

    def __init__(self, config: LayerNetConfig | None = None):
        super().__init__()
        self.config = config or LayerNetConfig()
        channels = self.config.channels
        self.down = nn.ModuleList(
            nn.Sequential(_conv(before, after), _conv(after, after))
            for before, after in zip((1, *channels), channels, strict=False)
        )
        pairs = list(pairwise(channels))
        self.narrow = nn.ModuleList(nn.Conv2d(below, here, 1) for here, below in pairs)
        self.up = nn.ModuleList(nn.Sequential(_conv(here, here), _conv(here, here)) for here, _ in pairs)
        self.surfaces = nn.Conv2d(channels[0], len(SURFACES), 1)
        self.masks = nn.Conv2d(channels[0], len(MASKS), 1)
        self.absent = nn.Conv1d(2 * channels[0], len(SURFACES), 5, padding=2)
        # Lesions are rare: starting from even odds would cost many steps.
        nn.init.constant_(self.masks.get_parameter("bias"), -3.0)

    def forward(self, images: Tensor) -> Found:
        levels = []
        x = images
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            levels.append(x)
        for skip, narrow, block in list(zip(levels[:-1], self.narrow, self.up, strict=True))[::-1]:
            x = block(skip + F.interpolate(narrow(x), scale_factor=2.0, mode="bilinear", align_corners=False))
        absent = self.absent(_most_and_mean(x))
        return Found(torch.cat([self.surfaces(x), absent.unsqueeze(2)], dim=2).float(), self.masks(x).float())


def _most_and_mean(x: Tensor) -> Tensor:
    """[B, C, H, W] to [B, 2C, W]: maximum and mean over rows."""
    if torch.is_grad_enabled():
        return torch.cat([x.amax(2), x.mean(2)], dim=1)
    # The same values, ten times as fast. Not in training: the gradients' other memory layout would change the last bits
    # of the weights.
    x_BHWC = x.permute(0, 2, 3, 1)
    return torch.cat([x_BHWC.amax(1), x_BHWC.mean(1)], dim=2).transpose(1, 2)


def _conv(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.GroupNorm(8, after), nn.SiLU())


def in_channels_last(network: LayerNet) -> LayerNet:
    """The network, changed in place to the memory layout in which convolutions on CPUs are fastest."""
    return network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]


def standardise(images: Tensor) -> Tensor:
    """[..., H, W] to mean 0 and variance 1 of every B-scan."""
    images = images.float()
    std, mean = torch.std_mean(images, dim=(-2, -1), keepdim=True)
    return (images - mean) / std.clamp_min(1e-3)


def layer_loss(found: Found, rows_BSW: Tensor, masks_BMHW: Tensor) -> Tensor:
    """Scalar: cross-entropy of rows + 0.1 × smooth L1 distance in rows + `mask_loss`.

    `rows_BSW`: true rows; where one is NaN or outside the image, the target is "not in this A-scan". `masks_BMHW`: 0 or
    1, float.
    """
    height = found.rows.shape[2] - 1
    log_p = F.log_softmax(found.rows, dim=2)
    inside = torch.isfinite(rows_BSW) & (rows_BSW >= -0.5) & (rows_BSW <= height - 0.5)
    truth = torch.where(inside, rows_BSW, 0.0).unsqueeze(2)
    row = torch.arange(height, device=truth.device, dtype=truth.dtype).view(1, 1, -1, 1)
    target = torch.exp(-0.5 * ((row - truth) / SPREAD_ROWS) ** 2)
    target = target / target.sum(2, keepdim=True)
    entropy = torch.where(inside, -(target * log_p[:, :, :-1]).sum(2), -log_p[:, :, -1]).mean()
    expected = (found.rows[:, :, :-1].softmax(2) * row).sum(2)
    distance = F.smooth_l1_loss(expected[inside], rows_BSW[inside]) if inside.any() else expected.sum() * 0
    return entropy + 0.1 * distance + mask_loss(found.masks, masks_BMHW)


def mask_loss(logits: Tensor, masks_BMHW: Tensor) -> Tensor:
    """Scalar: cross-entropy and 1 − soft Dice, summed over masks, from logits [B, M, H, W].

    Cross-entropy is averaged separately over the pixels of a lesion and over the rest, because lesions fill too few
    pixels to be learned otherwise. A mask with fewer than 100 pixels in the batch counts less.
    """
    area = masks_BMHW.sum((0, 2, 3))
    entropy = F.binary_cross_entropy_with_logits(logits, masks_BMHW, reduction="none")
    inside = (entropy * masks_BMHW).sum((0, 2, 3)) / area.clamp_min(100)
    outside = (entropy * (1 - masks_BMHW)).mean((0, 2, 3))
    # Dice only for lesions that the batch shows: for absent ones its gradient, summed over all pixels, teaches the
    # network to report none at all.
    p = logits.sigmoid()
    dice = 2 * (p * masks_BMHW).sum((0, 2, 3)) / ((p + masks_BMHW).sum((0, 2, 3)) + 1e-6)
    missed = torch.where(area > 0, 1 - dice, 0.0)
    return (inside + 30 * outside + missed).sum()
