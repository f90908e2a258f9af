"""Grey levels of B-scans: 8-bit ones of a 16-bit volume, converted one at a time, since a worker's memory would not
hold a converted copy as well; and what is white padding."""

import warnings
from collections.abc import Iterator
from typing import Literal

import numpy as np

from octfm.volume.volume import Shape3, Volume

MOST_PADDING = 0.2
"""Largest share of a B-scan that is taken for white padding."""
NEARLY_WHITE = 0.96
"""Share of white from which a voxel may be padding: JPEG does not keep white exactly."""
TWELVE_BITS = 4095


class Planes:
    """Replaces an array uint8 [D, H, W] in code that reads one B-scan after the other."""

    def __init__(self, voxels: np.ndarray, full_scale: int):
        """`full_scale`: the value of uint16 `voxels` that becomes 255."""
        self.shape: Shape3 = voxels.shape  # type: ignore[assignment]
        self._voxels, self._scale = voxels, np.float32(255 / full_scale)

    def __len__(self) -> int:
        return len(self._voxels)

    def __getitem__(self, bscan: int) -> np.ndarray:
        plane = self._voxels[bscan]
        step = memory_order(plane)
        gray = plane[:, ::step].astype(np.float32)
        gray *= self._scale
        gray += np.float32(0.5)
        return np.minimum(gray, 255, out=gray).astype(np.uint8)[:, ::step]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[bscan] for bscan in range(len(self)))


def eight_bit(volume: Volume, full_scale: int | None = None) -> np.ndarray | Planes:
    """The volume's B-scans as uint8, white at 255. `full_scale` is white in 16-bit voxels, None for what the volume
    states, with a warning if that is the default and the voxels look as if they had 12 bits."""
    unstated = full_scale is None and volume.voxels.dtype == np.uint16 and volume.full_scale == 65535
    if unstated and 0 < volume.voxels.max() <= TWELVE_BITS:
        # The text is the same for every volume, so that Python shows it once.
        warnings.warn(
            "a Volume of uint16 voxels up to 4,095 or less is nearly black on its full_scale of 65,535; if it has 12 "
            "bits, give Volume(…, full_scale=4095), as octfm.read_volume does",
            stacklevel=2,
        )
    return volume.voxels if volume.voxels.dtype == np.uint8 else Planes(volume.voxels, full_scale or volume.full_scale)


def used_full_scale(voxels: np.ndarray) -> int:
    """White value of uint16 voxels whose file does not state how many bits are used.

    It is the maximum of the smallest even bit depth from 8 to 16 that holds the brightest voxel. Odd depths, which no
    instrument uses, are left out: of two volumes of one cohort, on different sides of such a limit, one would come out
    brighter than the other.
    """
    return (1 << max(8, -(-int(voxels.max()).bit_length() // 2) * 2)) - 1


def memory_order(plane: np.ndarray) -> Literal[1, -1]:
    """-1 if A-scans lie backwards in memory, as in the mirrored view of a left eye, else 1.

    Operations on `plane[:, ::-1]` are then several times as fast.
    """
    return -1 if plane.strides[1] < 0 else 1


def without_white_padding(bscans: np.ndarray, white: int) -> np.ndarray:
    """A copy of B-scans [B, H, W] in which white rows at the top or bottom of A-scans are black, as in training.

    Where Spectralis has shifted A-scans to average frames, exported images are white. B-scans of which more than a
    fifth would change stay as they are: those are dark-on-bright exports with a saturated vitreous.
    """
    full = bscans >= NEARLY_WHITE * white
    padding = np.logical_and.accumulate(full, axis=1) | np.logical_and.accumulate(full[:, ::-1], axis=1)[:, ::-1]
    padding &= padding.mean(axis=(1, 2), keepdims=True) <= MOST_PADDING
    return np.where(padding, 0, bscans)
