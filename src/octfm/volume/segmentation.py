"""Segmentation: surfaces and masks found in one volume, in its native frame."""

from dataclasses import dataclass

import numpy as np

from octfm.volume.volume import Spacing3


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Surfaces and masks of one volume, in its native frame."""

    surfaces: dict[str, np.ndarray]
    """float [D, W]: native row of each surface, 0 at the centre of the first row; NaN where it was not found."""
    masks: dict[str, np.ndarray]
    """bool [D, H, W]"""
    spacing_mm: Spacing3

    def heights_um(self, name: str) -> np.ndarray:
        """float [D, W]: depth of a surface below the upper edge of the image, in µm per A-scan."""
        return (self.surfaces[name] + 0.5) * self.spacing_mm[1] * 1000

    def thickness_um(self, upper: str, lower: str) -> np.ndarray:
        """float [D, W]"""
        return (self.surfaces[lower] - self.surfaces[upper]) * self.spacing_mm[1] * 1000
