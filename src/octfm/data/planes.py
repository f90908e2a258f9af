"""The B-scans of a 16-bit volume as 8-bit images, made one at a time: all of them would not fit into a worker beside it."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from octfm.data.volume import Shape3


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


def memory_order(plane: np.ndarray) -> Literal[1, -1]:
    """-1 where A-scans lie backwards in memory, as in the view that a mirrored eye is; then `plane[:, ::-1]` is several times as fast."""
    return -1 if plane.strides[1] < 0 else 1
