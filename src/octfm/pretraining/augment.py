"""Augmentation of one batch on the device: shift, affine, contrast, gamma, noise, speckle; never an axial flip (F13).

Everything is drawn on the host, one generator per volume, so that surfaces and with them the token map follow the
voxels; what is applied on the device are batched tensor operations of fixed shapes. Noise is a hash of (the volume's
key, the voxel), so it is the same however volumes are put together in micro-batches and ranks, and on every kind of
device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import radians, tan
from typing import NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from octfm.config import Config


class AugmentConfig(Config):
    """Ranges of movement and recolouring. By default only the first three are not zero."""

    axial_shift: int = Field(default=8, ge=0, le=32_767)
    """Largest shift along the axial axis, in rows of the prepared volume, either way."""
    contrast: float = Field(default=0.2, ge=0, lt=1)
    """Gain is drawn from 1 - contrast to 1 + contrast."""
    gamma: float = Field(default=0.2, ge=0, lt=1)
    """Exponent is drawn from 1 / (1 + gamma) to 1 + gamma, evenly in the logarithm."""
    lateral_shift_mm: float = Field(default=0.0, ge=0, le=100)
    """Largest shift along the lateral axis, either way: what leaves the field is cropped, what enters it is padding."""
    lateral_scale: float = Field(default=0.0, ge=0, lt=1)
    """Magnification along the lateral axis, from 1 / (1 + lateral_scale) to 1 + lateral_scale, evenly in the logarithm:
    millimetres of a scan are nominal, the length of the eye changes them."""
    axial_scale: float = Field(default=0.0, ge=0, lt=1)
    """Magnification along the axial axis, drawn as `lateral_scale`; it changes how thick layers look."""
    tilt_deg: float = Field(default=0.0, ge=0, lt=45)
    """Largest tilt of the retina in the B-scan plane, either way. A-scans are sheared against each other, as by a beam
    that enters off the centre of the pupil; each stays an A-scan."""
    mirror_unknown: bool = False
    """Mirror volumes of unknown laterality, each with probability one half. Known left eyes lie mirrored in the store
    already, so that nasal is on one side in all of them; known eyes are never mirrored here."""
    noise: float = Field(default=0.0, ge=0, le=0.5)
    """Largest standard deviation of noise, the same in dark and bright, as a share of white; drawn for every volume."""
    speckle: float = Field(default=0.0, ge=0, le=1)
    """Largest standard deviation of noise in proportion to brightness; drawn anew for every volume."""

    @property
    def warps(self) -> bool:
        """Whether voxels are moved by other than whole rows, and therefore interpolated."""
        return bool(
            self.lateral_shift_mm or self.lateral_scale or self.axial_scale or self.tilt_deg or self.mirror_unknown
        )

    @property
    def is_noisy(self) -> bool:
        return bool(self.noise or self.speckle)


TYPES = (np.int64, *[np.float32] * 2, *[np.float64] * 4, np.bool_, *[np.float32] * 2, np.int32)
"""Of the arrays of an Augmentation, in their order."""


@dataclass(frozen=True, eq=False)
class Augmentation:
    """One draw for each volume of a batch, on the host, so that surfaces can follow the voxels; arrays [B] of TYPES."""

    config: AugmentConfig
    shift: np.ndarray
    """Rows, positive is down."""
    gain: np.ndarray
    gamma: np.ndarray
    lateral_mm: np.ndarray
    """Positive is to the right."""
    lateral_scale: np.ndarray
    axial_scale: np.ndarray
    slope: np.ndarray
    """Millimetres down per millimetre to the right."""
    mirrored: np.ndarray
    noise: np.ndarray
    speckle: np.ndarray
    key: np.ndarray
    """Seed of a volume's noise."""

    @classmethod
    def of(cls, config: AugmentConfig, rows: Sequence[tuple]) -> "Augmentation":
        """The draws of some volumes, each a tuple of the fields after `config`."""
        columns = zip(*rows, strict=True)
        return cls(config, *(np.array(column, kind) for column, kind in zip(columns, TYPES, strict=True)))

    def surfaces(
        self, band: np.ndarray, valid: np.ndarray, height: int, spacing_mm: tuple[float, float, float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """`band` and `valid` [B, 2, D, W] in rows, moved with the voxels and kept within the volume; float32."""
        both = band.astype(np.float32), valid.astype(np.float32)
        if not self.config.warps:
            band, valid = (shift_surfaces(s, self.shift, height) for s in both)
            return band, valid
        width = band.shape[-1]
        source = self.source(height, width, spacing_mm)
        # Centres of columns, measured from the corner; the source's, less 0.5, is an index again.
        x = np.arange(width) + 0.5
        column = source[:, 0, :1] * x + source[:, 0, 2:] - 0.5
        low = np.floor(column).astype(np.int64)
        share = (column - low)[:, None, :]
        left, right = (np.clip(i, 0, width - 1)[:, None, None, :] for i in (low, low + 1))
        # A column without image: its first row is not above its last.
        empty = valid[:, :1] >= valid[:, 1:]
        no_left, no_right = (np.take_along_axis(empty, i, -1)[:, 0] for i in (left, right))
        # A column is padding where the one nearest to its source is; there is nothing to interpolate with next to it.
        gone = np.where(share < 0.5, no_left, no_right) | ((column < -0.5) | (column > width - 0.5))[:, None, :]
        share = np.where(no_left, 1.0, np.where(no_right, 0.0, share))[:, None]
        # A row y of the source is found again where scale * y + slope * x + offset = y.
        scale, slope, offset = (source[:, 1, i][:, None, None, None] for i in (1, 0, 2))

        def follow(surfaces: np.ndarray) -> np.ndarray:
            rows = (1 - share) * np.take_along_axis(surfaces, left, -1) + share * np.take_along_axis(
                surfaces, right, -1
            )
            rows = np.clip((rows - slope * x - offset) / scale, 0, height)
            return np.where(gone[:, None], 0, rows).astype(np.float32)

        return follow(both[0]), follow(both[1])

    def at_places_of(self, other: "Augmentation | None") -> "Augmentation":
        """This draw with the geometry of `other`, so that both show the same places; grey values stay this draw's."""
        if other is None:
            return self
        geometry = ("shift", "lateral_mm", "lateral_scale", "axial_scale", "slope", "mirrored")
        return replace(self, **{name: getattr(other, name) for name in geometry})

    def source(self, height: int, width: int, spacing_mm: tuple[float, float, float]) -> np.ndarray:
        """float64 [B, 2, 3]: (column, row) that a column and row of the result come from, in voxels from upper left.
        The axial coefficient of the column is 0, so an A-scan stays one."""
        _, dy, dx = spacing_mm
        middle_x, middle_y = width / 2, height / 2
        maps = np.zeros((len(self.shift), 2, 3))
        sign = np.where(self.mirrored, -1.0, 1.0)
        # From result to source, about the middle: x goes to middle + (x - middle - shift) / scale, and y likewise.
        maps[:, 0, 0] = sign / self.lateral_scale
        maps[:, 0, 2] = middle_x - maps[:, 0, 0] * (middle_x + self.lateral_mm / dx)
        maps[:, 1, 1] = 1 / self.axial_scale
        maps[:, 1, 0] = -self.slope * dx / dy / self.axial_scale
        maps[:, 1, 2] = middle_y - maps[:, 1, 1] * (middle_y + self.shift) - maps[:, 1, 0] * middle_x
        return maps

    def on_device(
        self, tensor: Callable[[np.ndarray], Tensor], height: int, width: int, spacing_mm: tuple[float, float, float]
    ) -> "Moves":
        """The draw as tensors on the device, moved there by `tensor`."""
        theta = None
        if self.config.warps:
            theta = tensor(_normalised(self.source(height, width, spacing_mm), height, width).astype(np.float32))
        strength = tensor(np.stack((self.noise, self.speckle))) if self.config.is_noisy else None
        return Moves(tensor(self.shift), theta, tensor(self.gain), tensor(self.gamma), strength, tensor(self.key))


class Moves(NamedTuple):
    """One draw for each volume, on the device."""

    shift_B: Tensor
    theta_B23: Tensor | None
    """`source` in the coordinates of grid_sample, -1 to 1 from edge to edge; None: whole rows only."""
    gain_B: Tensor
    gamma_B: Tensor
    strength_2B: Tensor | None
    """Standard deviations of noise and speckle; None: neither."""
    key_B: Tensor


def draw(
    config: AugmentConfig, rngs: Sequence[np.random.Generator], laterality: Sequence[str | None] = ()
) -> Augmentation:
    """One augmentation for each generator. `laterality`: of each volume, None if unknown; empty if all are known."""
    rows = []
    for place, rng in enumerate(rngs):
        shift = rng.integers(-config.axial_shift, config.axial_shift + 1)
        gain = rng.uniform(1 - config.contrast, 1 + config.contrast)
        gamma = (1 + config.gamma) ** rng.uniform(-1, 1)
        # Always the same number of draws, after those above: switching one augmentation on changes no other.
        signed, unsigned, key = rng.uniform(-1, 1, 4), rng.uniform(0, 1, 3), rng.integers(2**31)
        unknown = place < len(laterality) and laterality[place] is None
        rows.append(
            (
                shift,
                gain,
                gamma,
                config.lateral_shift_mm * signed[0],
                (1 + config.lateral_scale) ** signed[1],
                (1 + config.axial_scale) ** signed[2],
                tan(radians(config.tilt_deg)) * signed[3],
                config.mirror_unknown and unknown and unsigned[0] < 0.5,
                config.noise * unsigned[1],
                config.speckle * unsigned[2],
                key,
            )
        )
    return Augmentation.of(config, rows)


def farthest(config: AugmentConfig) -> Augmentation:
    """All 32 combinations of the largest movements either way, as if each was drawn for a volume; grey values stay."""
    rows = [
        (
            *(config.axial_shift * down, 1, 1, config.lateral_shift_mm * right),
            *((1 + config.lateral_scale) ** wider, (1 + config.axial_scale) ** taller),
            *(tan(radians(config.tilt_deg)) * tilt, False, 0, 0, 0),
        )
        for down, right, wider, taller, tilt in product((-1, 1), repeat=5)
    ]
    return Augmentation.of(config, rows)


def shift_surfaces(surfaces: np.ndarray, shift: np.ndarray, height: int) -> np.ndarray:
    """Surfaces [B, 2, D, W] in rows, moved with the voxels and kept within the volume."""
    return np.clip(surfaces + shift[:, None, None, None].astype(surfaces.dtype), 0, height)


def move(voxels: Tensor, moves: Moves) -> Tensor:
    """uint8 voxels [B, 1, D, H, W] moved in the B-scan plane; what comes from outside is 0."""
    if moves.theta_B23 is None:
        return shift_rows(voxels, moves.shift_B)
    return _sampled(voxels, moves.theta_B23, "bilinear").round_().to(torch.uint8)


def move_labels(labels: Tensor, moves: Moves) -> Tensor:
    """uint8 labels [B, 1, D, H, W] moved as `move` moves voxels, to the nearest; 255, unknown, where nothing was."""
    # Inverted, so that unknown (255) becomes 0, the value that both ways of moving fill in.
    turned = 255 - labels
    if moves.theta_B23 is None:
        return 255 - shift_rows(turned, moves.shift_B)
    return 255 - _sampled(turned, moves.theta_B23, "nearest").to(torch.uint8)


def _sampled(volumes: Tensor, theta_B23: Tensor, mode: str) -> Tensor:
    """float32 [B, 1, D, H, W]: uint8 volumes at the places that `theta_B23` gives, 0 outside."""
    batch, _, _, height, width = volumes.shape
    grid = F.affine_grid(theta_B23, [batch, 1, height, width], align_corners=False)
    # B-scans are the channels: one set of weights for all of them.
    moved = F.grid_sample(volumes.squeeze(1).float(), grid, mode=mode, padding_mode="zeros", align_corners=False)
    return moved.unsqueeze(1)


def shift_rows(voxels: Tensor, shift_B: Tensor) -> Tensor:
    """uint8 voxels [B, 1, D, H, W] moved along H; rows that come from outside are 0."""
    batch, _, depth, height, width = voxels.shape
    source_BH = torch.arange(height, device=voxels.device) - shift_B.unsqueeze(1)
    inside = ((source_BH >= 0) & (source_BH < height))[:, None, None, :, None]
    # Whole rows, by their numbers among those of all B-scans: an index for each voxel takes twenty times as long.
    bscan = torch.arange(batch * depth, device=voxels.device).view(batch, depth, 1)
    rows_BDH = height * bscan + source_BH.clamp(0, height - 1).unsqueeze(1)
    return voxels.reshape(-1, width).index_select(0, rows_BDH.flatten()).view_as(voxels).mul_(inside)


def recoloured(patches_BMP: Tensor, index_BM: Tensor, moves: Moves, mean: float, std: float) -> Tensor:
    """uint8 patches to normalised float32: gamma, gain, noise, then the Preprocessing's mean and standard deviation.
    `index_BM` are the patches' places in the grid, to which noise is tied; noise never makes a value negative."""
    unit = patches_BMP.float().div_(255)
    unit = unit.pow_(moves.gamma_B[:, None, None]).mul_(moves.gain_B[:, None, None])
    if moves.strength_2B is not None:
        grain_BMP = grain_of(moves.key_B, index_BM, patches_BMP.shape[-1])
        noise, speckle = moves.strength_2B[:, :, None, None]
        # Two independent Gaussian noises are one, whose variances add.
        unit = unit.addcmul_((unit * speckle).square_().add_(noise**2).sqrt_(), grain_BMP).clamp_min_(0)
    return unit.sub_(mean).div_(std)


def grain_of(key_B: Tensor, index_BM: Tensor, voxels: int) -> Tensor:
    """Noise [B, M, P] of zero mean and unit variance, a function of a volume's key and a voxel's place alone. The sum
    of a hash's four bytes (Irwin & Hall) is nearly Gaussian, and never beyond 3.5 standard deviations."""
    offset = torch.arange(voxels, dtype=torch.int32, device=index_BM.device)
    x = _hash(index_BM.to(torch.int32).mul(voxels).unsqueeze(-1) + offset)
    x = _hash(x.bitwise_xor_(_hash(key_B.clone())[:, None, None]))
    # Two bytes at a time: bytes 0 and 2 plus bytes 1 and 3, then the sums of both halves.
    pairs = (x & 0x00FF00FF) + (x.bitwise_right_shift_(8) & 0x00FF00FF)
    total = (pairs & 0xFFFF) + (pairs.bitwise_right_shift_(16))
    return total.float().sub_(2 * 255).mul_(1 / (4 * (256**2 - 1) / 12) ** 0.5)


def _hash(x: Tensor) -> Tensor:
    """int32 to int32, in place: every bit of the result depends on every bit of x (a multiply-xorshift hash)."""
    # Constants of `lowbias32` (C. Wellons). torch shifts int32 with its sign; the mask clears the sign's copies.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        x = x.bitwise_xor_((x >> shift) & (0xFFFFFFFF >> shift)).mul_(factor)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def _normalised(source: np.ndarray, height: int, width: int) -> np.ndarray:
    """Maps [B, 2, 3] between voxels from the corner as maps between -1 and 1 from edge to edge."""
    to_voxels = np.array([[width / 2, 0, width / 2], [0, height / 2, height / 2], [0, 0, 1]])
    back = np.diag([2 / width, 2 / height])
    normal = back @ (source @ to_voxels)
    # From 0…2 to -1…1.
    normal[:, :, 2] -= 1
    return normal
