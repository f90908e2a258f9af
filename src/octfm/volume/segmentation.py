"""Segmentation: surfaces and masks found in one volume, in its native frame; names of what a voxel of a phantom can
be (octfm.phantom.native.prepared says which)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from octfm.display import box, brief, number
from octfm.errors import EvaluationError, shown
from octfm.volume.volume import Spacing3

LAYERS = ("vitreous", "nfl", "gcl_ipl", "inl", "opl", "onl", "photoreceptors", "rpe", "choroid")
"""From the vitreous outwards. `onl` reaches from OPL to ellipsoid zone, `choroid` is all below Bruch's membrane."""
BORDERS = ("ilm", "nfl_gcl", "ipl_inl", "inl_opl", "opl_onl", "ez", "rpe_inner", "bm")
"""Layer i lies between border i - 1 and border i."""
AREAS = ("intraretinal_fluid", "subretinal_fluid", "drusen", "membrane", "detachment", "subretinal_material")
"""Lesions, in place of the layer that they lie in."""
CLASSES = (*LAYERS, *AREAS)
LESION_CLASSES = range(len(LAYERS), len(CLASSES))
UNKNOWN = 255
"""Of voxels without truth: padding, A-scans in which no surface lies in the image, and all scans."""
_ABBREVIATIONS = ("ilm", "nfl", "gcl", "ipl", "inl", "opl", "onl", "ez", "rpe", "bm")


def words_of(name: str) -> str:
    """The name of a surface or area for readers: NFL/GCL, RPE inner, intraretinal fluid."""
    parts = name.split("_")
    short = [part in _ABBREVIATIONS for part in parts]
    shown = [part.upper() if known else part for part, known in zip(parts, short, strict=True)]
    return ("/" if len(parts) == 2 and all(short) else " ").join(shown)


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Surfaces and masks of one volume, in its native frame."""

    surfaces: dict[str, np.ndarray]
    """float [D, W]: native row of each surface, 0 at the centre of the first row; NaN where it was not found."""
    masks: dict[str, np.ndarray]
    """bool [D, H, W]"""
    spacing_mm: Spacing3
    note: ClassVar[str] = ""
    """What exported files must say about it, in at most 64 characters, as DICOM's long strings."""

    def __repr__(self) -> str:
        return brief(type(self).__name__, *self._described().values())

    def _repr_html_(self) -> str:
        return box(type(self).__name__, self._described())

    def _described(self) -> dict[str, str]:
        shape = next((rows.shape for rows in self.surfaces.values()), None) or next(
            ((len(mask), mask.shape[2]) for mask in self.masks.values()), (0, 0)
        )
        return {
            "surfaces": ", ".join(self.surfaces),
            "masks": ", ".join(name.replace("_", " ") for name in self.masks),
            "size": f"{number(shape[0], 'B-scan')} of {number(shape[1], 'A-scan')}",
        }

    @property
    def comments(self) -> str:
        """The note at length, with the name of what made the segmentation; empty if there is no note."""
        return ""

    @property
    def by_hand(self) -> frozenset[str]:
        """Names of the surfaces and masks that somebody has corrected or checked."""
        return frozenset()

    @property
    def image_rows(self) -> int | None:
        """Rows of a B-scan; None if nothing says how many there are."""
        return next((mask.shape[1] for mask in self.masks.values()), None)

    @property
    def why_no_um(self) -> str:
        """Why nothing is given in micrometres; empty if it is."""
        return ""

    def _expect_um(self) -> None:
        if self.why_no_um:
            raise EvaluationError(f"no micrometres: {self.why_no_um}; surfaces and thickness_rows are in rows")

    def _rows_of(self, name: str) -> np.ndarray:
        if name not in self.surfaces:
            raise EvaluationError(f"no surface {shown(name)}; surfaces: {', '.join(self.surfaces)}")
        return self.surfaces[name]

    def heights_um(self, name: str) -> np.ndarray:
        """float [D, W]: depth of a surface below the upper edge of the image, in µm per A-scan.

        Raises EvaluationError, as all in micrometres does, where `why_no_um`.
        """
        self._expect_um()
        return (self._rows_of(name) + 0.5) * self.spacing_mm[1] * 1000

    def thickness_um(self, upper: str, lower: str) -> np.ndarray:
        """float [D, W]"""
        self._expect_um()
        return self.thickness_rows(upper, lower) * self.spacing_mm[1] * 1000

    def thickness_rows(self, upper: str, lower: str) -> np.ndarray:
        """float [D, W]: rows of the image between two surfaces."""
        return self._rows_of(lower) - self._rows_of(upper)
