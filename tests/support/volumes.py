"""Small volumes: one whose voxels show where they are, and a phantom eye."""

import numpy as np

from octfm.volume.volume import Volume
from support.vendor_files import Format

SHAPE = Format.shape


def telling_voxels(dtype: type = np.uint8, shape=SHAPE) -> np.ndarray:
    """[D, H, W]: brightness falls along each axis by a step of its own, on noise; no two B-scans and no flip of any
    axis look alike."""
    z, y, x = np.indices(shape)
    noise = np.random.default_rng(0).integers(0, 20, shape)
    gray = (200 - 9 * z - 2 * y - x // 2 + noise).clip(1, 255)
    return gray.astype(np.uint8) if dtype is np.uint8 else (gray * 257 - (z + 3 * y) % 255).astype(np.uint16)


def eye(laterality="R", **changes) -> Volume:
    from octfm.phantom import phantom_volume

    volume, _ = phantom_volume(5, size=(16, 128, 96), laterality=laterality)
    return volume
