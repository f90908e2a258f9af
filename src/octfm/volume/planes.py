"""The B-scans of a 16-bit volume as 8-bit images, made one at a time: all of them would not fit into a worker beside it."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from octfm.volume.volume import Shape3, Volume


class Planes:
    """Stands in for voxels uint8 [D, H, W] wherever B-scans are looked at one by one."""

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
    """Voxels as uint8 B-scans, white at 255. `full_scale`: the value of 16-bit voxels that is white, None for the volume's own."""
    return volume.voxels if volume.voxels.dtype == np.uint8 else Planes(volume.voxels, full_scale or volume.full_scale)


def used_full_scale(voxels: np.ndarray) -> int:
    """White of uint16 `voxels` [D, H, W] that do not say how many of their bits are used: as few of 8, 10, 12, 14 or 16 as hold the brightest
    of all. No more steps than instruments have: at each, volumes of one cohort could part into brighter and darker ones."""
    return (1 << max(8, -(-int(voxels.max()).bit_length() // 2) * 2)) - 1


def memory_order(plane: np.ndarray) -> Literal[1, -1]:
    """-1 where A-scans lie backwards in memory, as in the view that a mirrored eye is; then `plane[:, ::-1]` is several times as fast."""
    return -1 if plane.strides[1] < 0 else 1
