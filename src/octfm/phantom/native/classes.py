"""What every voxel of a labelled phantom is: one of CLASSES, from its true surfaces and lesion mask."""

import numpy as np

from octfm.phantom.native.bscans import SURFACES, Labelled
from octfm.phantom.native.outer_retina import DETACHMENT, MATERIAL
from octfm.phantom.pathology import LESIONS

_BORDERS = ("ilm", "nfl_gcl", "ipl_inl", "inl_opl", "opl_onl", "ez", "rpe_inner", "bm")
_LAYERS = ("vitreous", "nfl", "gcl_ipl", "inl", "opl", "onl", "photoreceptors", "rpe", "choroid")
"""Class i lies between border i - 1 and border i; `onl` reaches from OPL to ellipsoid zone, `choroid` is all below
Bruch's membrane."""
_AREAS = {
    "intraretinal_fluid": LESIONS["intraretinal_fluid"],
    "subretinal_fluid": LESIONS["subretinal_fluid"],
    "drusen": LESIONS["drusen"],
    "membrane": LESIONS["membrane"],
    "detachment": DETACHMENT,
    "subretinal_material": MATERIAL,
}
"""Values of the lesion mask that are classes of their own, in place of the layer that they lie in."""
CLASSES = (*_LAYERS, *_AREAS)
LESION_CLASSES = range(len(_LAYERS), len(CLASSES))
UNKNOWN = 255
"""Of voxels without truth: padding, and A-scans in which no surface lies in the image."""


def classes_of(image: Labelled) -> np.ndarray:
    """uint8 [D, H, W]: the place in CLASSES of every voxel, by its centre; UNKNOWN where there is no truth."""
    borders = image.surfaces[[SURFACES.index(name) for name in _BORDERS]]
    found = np.isfinite(borders)
    # Surfaces do not cross: one that is missing below a visible one has left the image at its lower edge.
    outside = np.where(np.maximum.accumulate(found, axis=0), np.inf, -np.inf)
    borders = np.where(found, borders, outside).astype(np.float32)
    row = np.arange(image.voxels.shape[1], dtype=np.float32)[:, None]
    classes = np.zeros(image.voxels.shape, np.uint8)
    for border in borders:
        classes += row >= border[:, None]
    for place, value in enumerate(_AREAS.values(), len(_LAYERS)):
        classes[image.lesions == value] = place
    return np.where(found.any(0)[:, None], classes, np.uint8(UNKNOWN))
