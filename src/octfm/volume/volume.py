"""Volume: one OCT acquisition, its voxels plus the geometry needed to interpret them; every operation keeps both true.

Surfaces: the layer boundaries that came with it, on the same axes."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

Laterality = Literal["R", "L"]
Layout = Literal["raster", "line", "circle", "radial", "repeated"]
"""How the B-scans lie on the fundus; only a raster, parallel and one behind the other, is a volume in space."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
RASTER_ONLY: tuple[Literal["raster"]] = ("raster",)
Admissible = Literal["raster", "radial"]
"""What may enter a catalog: stars only when asked for, and then as the raster that octfm.volume.radial makes of them."""
ADMISSIBLE: tuple[Admissible, ...] = get_args(Admissible)
Shape3 = tuple[int, int, int]
Spacing3 = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class Lines:
    """Where B-scans start and end on the fundus, mm: [D, 2] as (x to the right of the image, y downwards, towards inferior)."""

    start: np.ndarray
    end: np.ndarray
    """Of the first and of the last A-scan; NaN for a B-scan that is no straight line."""

    def mirrored(self) -> "Lines":
        """With left and right exchanged, and A-scans counted from the other end."""
        return Lines(self.end * (-1, 1), self.start * (-1, 1))


@dataclass(frozen=True, eq=False)
class Volume:
    """Axes are always [D, H, W] = (B-scan, axial, lateral); row 0 is the vitreous side."""

    voxels: np.ndarray
    """[D, H, W], uint8 or uint16, display (log) intensities as the instrument exports them."""
    spacing_mm: Spacing3
    """(dz, dy, dx): distance between B-scans, between axial pixels, between A-scans."""
    laterality: Laterality | None = None
    """Right or left eye; None is unknown, and nothing downstream will guess it."""
    scanner: str = "unknown"
    """OCT instrument, for example heidelberg_spectralis."""
    protocol: str = "unknown"
    participant: str = "unknown"
    acquisition: str = "unknown"
    """SOP Instance UID where there is one."""
    superior_first: bool | None = None
    """True: B-scan 0 is superior; False: inferior; None: frame positions do not tell."""
    layout: Layout = "raster"
    """Anything but a raster has no spacing between B-scans: dz then repeats dx and means nothing."""
    lines: Lines | None = None
    """Of a star (radial), where positions tell: the angles that its B-scans have instead of a spacing."""
    source: str = "memory"
    """Where the voxels came from; named in every error."""
    full_scale: int = 65535
    """The value of uint16 voxels that is white: 4095 where 12 bits are used. uint8 is white at 255."""

    def __post_init__(self):
        if self.voxels.ndim != 3 or 0 in self.voxels.shape:
            raise ValueError(
                f"{self.source}: voxels must have 3 non-empty axes [B-scan, axial, lateral], got shape {self.voxels.shape}"
            )
        if len(self.spacing_mm) != 3 or not all(np.isfinite(mm) and mm > 0 for mm in self.spacing_mm):
            raise ValueError(f"{self.source}: spacing_mm must be positive on every axis, got {self.spacing_mm}")

    @property
    def shape(self) -> Shape3:
        d, h, w = self.voxels.shape
        return d, h, w

    @property
    def extent_mm(self) -> Spacing3:
        """Physical size (D, H, W) in mm. A macular cube has about (6, 2, 6)."""
        z, y, x = (n * mm for n, mm in zip(self.shape, self.spacing_mm, strict=True))
        return z, y, x

    @property
    def eye_id(self) -> str:
        """Participant and laterality: the unit that both eyes of a participant do not share."""
        return f"{self.participant}_{self.laterality or 'unknown'}"

    def with_voxels(self, voxels: np.ndarray) -> "Volume":
        """The same acquisition resampled: the physical extent is kept, so spacing follows the new shape."""
        z, y, x = (mm / n for mm, n in zip(self.extent_mm, voxels.shape, strict=True))
        return replace(self, voxels=voxels, spacing_mm=(z, y, x))

    def mirrored(self) -> "Volume":
        """Left and right exchanged, voxels and laterality together; an unknown laterality is refused, never guessed."""
        if self.laterality is None:
            raise ValueError(f"{self.source}: laterality is unknown, so mirroring it would be a guess")
        lines = self.lines and self.lines.mirrored()
        return replace(
            self, voxels=self.voxels[:, :, ::-1], lines=lines, laterality="L" if self.laterality == "R" else "R"
        )

    def superior_to_inferior(self) -> "Volume":
        """B-scan 0 superior where positions tell; unchanged otherwise."""
        if self.superior_first is not False:
            return self
        return replace(self, voxels=self.voxels[::-1], superior_first=True)


@dataclass(frozen=True, eq=False)
class Surfaces:
    """Layer boundaries of a segmentation, B-scan for B-scan as in the Volume of the same file."""

    names: tuple[str, ...]
    """As the instrument calls them (ILM, RNFL, ..., BM), in the order of the file."""
    heights_px: np.ndarray
    """[S, D, W] float32, rows below the top of the image, growing with depth as the axial axis does; NaN where there is no boundary."""
    axial_mm: float | None
    """Height of a row, None where nothing states it."""
    source: str = "memory"

    def __post_init__(self):
        if self.heights_px.ndim != 3 or len(self.names) != len(self.heights_px):
            raise ValueError(
                f"{self.source}: expected heights [{len(self.names)} surfaces, B-scan, lateral], got {self.heights_px.shape}"
            )

    @property
    def heights_mm(self) -> np.ndarray:
        """[S, D, W], millimetres below the top of the image."""
        if self.axial_mm is None:
            raise ValueError(f"{self.source}: axial spacing is unknown, so heights are in pixels only")
        return self.heights_px * np.float32(self.axial_mm)
