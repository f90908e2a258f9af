"""Names of what a voxel of a phantom can be; octfm.phantom.native.classes says of each voxel what it is."""

LAYERS = ("vitreous", "nfl", "gcl_ipl", "inl", "opl", "onl", "photoreceptors", "rpe", "choroid")
"""From the vitreous outwards. `onl` reaches from OPL to ellipsoid zone, `choroid` is all below Bruch's membrane."""
AREAS = ("intraretinal_fluid", "subretinal_fluid", "drusen", "membrane", "detachment", "subretinal_material")
"""Lesions, in place of the layer that they lie in."""
CLASSES = (*LAYERS, *AREAS)
LESION_CLASSES = range(len(LAYERS), len(CLASSES))
UNKNOWN = 255
"""Of voxels without truth: padding, A-scans in which no surface lies in the image, and all scans."""
