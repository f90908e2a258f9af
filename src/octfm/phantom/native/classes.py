"""What every voxel of a phantom is: one of octfm.volume.segmentation.CLASSES, by its true surfaces and lesions."""

import numpy as np

from octfm.phantom.native.bscans import SURFACES, Labelled
from octfm.phantom.native.outer_retina import DETACHMENT, MATERIAL
from octfm.phantom.pathology import LESIONS
from octfm.volume.segmentation import BORDERS, CLASSES, LESION_CLASSES, UNKNOWN

_VALUES = LESIONS | {"detachment": DETACHMENT, "subretinal_material": MATERIAL}


def classes_of(image: Labelled) -> np.ndarray:
    """uint8 [D, H, W]: the place in CLASSES of every voxel, by its centre; UNKNOWN where there is no truth."""
    borders = image.surfaces[[SURFACES.index(name) for name in BORDERS]]
    found = np.isfinite(borders)
    # Surfaces do not cross: one that is missing below a visible one has left the image at its lower edge.
    outside = np.where(np.maximum.accumulate(found, axis=0), np.inf, -np.inf)
    borders = np.where(found, borders, outside).astype(np.float32)
    row = np.arange(image.voxels.shape[1], dtype=np.float32)[:, None]
    classes = np.zeros(image.voxels.shape, np.uint8)
    for border in borders:
        classes += row >= border[:, None]
    for place in LESION_CLASSES:
        classes[image.lesions == _VALUES[CLASSES[place]]] = place
    return np.where(found.any(0)[:, None], classes, np.uint8(UNKNOWN))  # pyright: ignore[reportIndexIssue]  (an array)
