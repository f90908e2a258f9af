"""Augmentation of one batch on the device: axial shift, contrast and gamma; never a flip of any axis (F13)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from octfm.config import Config


class AugmentConfig(Config):
    """How far a volume may be moved and recoloured."""

    axial_shift: int = Field(default=8, ge=0)
    """Largest shift along the axial axis, in rows of the prepared volume, either way."""
    contrast: float = Field(default=0.2, ge=0, lt=1)
    """Gain is drawn from 1 - contrast to 1 + contrast."""
    gamma: float = Field(default=0.2, ge=0, lt=1)
    """Exponent is drawn from 1 / (1 + gamma) to 1 + gamma, evenly in the logarithm."""


@dataclass(frozen=True, eq=False)
class Augmentation:
    """One draw for each volume of a batch, made on the host so that surfaces can follow the voxels."""

    shift: np.ndarray
    """int64 [B] rows, positive is down."""
    gain: np.ndarray
    """float32 [B]"""
    gamma: np.ndarray
    """float32 [B]"""


def draw(config: AugmentConfig, rngs: Sequence[np.random.Generator]) -> Augmentation:
    """One augmentation for each generator."""
    rows = [
        (
            rng.integers(-config.axial_shift, config.axial_shift + 1),
            rng.uniform(1 - config.contrast, 1 + config.contrast),
            (1 + config.gamma) ** rng.uniform(-1, 1),
        )
        for rng in rngs
    ]
    shift, gain, gamma = (np.array(column) for column in zip(*rows, strict=True))
    return Augmentation(shift.astype(np.int64), gain.astype(np.float32), gamma.astype(np.float32))


def shift_surfaces(surfaces: np.ndarray, shift: np.ndarray, height: int) -> np.ndarray:
    """Surfaces [B, 2, D, W] in rows, moved with the voxels and kept within the volume."""
    return np.clip(surfaces + shift[:, None, None, None].astype(surfaces.dtype), 0, height)


def shift_rows(voxels: Tensor, shift_B: Tensor) -> Tensor:
    """Voxels [B, 1, D, H, W] moved along H; rows that come from outside are 0."""
    height = voxels.shape[3]
    source_BH = torch.arange(height, device=voxels.device) - shift_B.unsqueeze(1)
    outside = ((source_BH < 0) | (source_BH >= height))[:, None, None, :, None]
    index = source_BH.clamp(0, height - 1)[:, None, None, :, None].expand_as(voxels)
    return voxels.gather(3, index).masked_fill(outside, 0)


def recolour(patches_BMP: Tensor, gain_B: Tensor, gamma_B: Tensor, mean: float, std: float) -> Tensor:
    """uint8 patches to normalised float32: gamma, gain, then the Preprocessing's mean and standard deviation."""
    unit = patches_BMP.float().div_(255)
    unit = unit.pow_(gamma_B[:, None, None]).mul_(gain_B[:, None, None])
    return unit.sub_(mean).div_(std)


def normalise(patches_BMP: Tensor, mean: float, std: float) -> Tensor:
    """uint8 patches to normalised float32, without augmentation."""
    return patches_BMP.float().div_(255).sub_(mean).div_(std)
