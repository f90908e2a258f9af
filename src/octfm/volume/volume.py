"""Volume: the voxels of one OCT acquisition and their geometry, which every operation updates together.

Surfaces: the layer boundaries delivered with a volume, on the same axes. Planes: 8-bit B-scans of a 16-bit volume,
converted one at a time, since a worker's memory would not hold a converted copy as well.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np

from octfm.display import EYES, Picture, box, brief, fields_line, number, picture, readable, stretched, times
from octfm.errors import shown

Laterality = Literal["R", "L"]
Layout = Literal["raster", "line", "circle", "radial", "repeated"]
"""Arrangement of B-scans on the fundus. Only a raster, of parallel B-scans in a row, is a volume in space."""
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
TWELVE_BITS = 4095
NANOMETRE_MM = 1e-6
"""Least distance of voxels: filters of a given length would fill the memory if there were a thousand more of them."""
RASTER_ONLY: tuple[Literal["raster"]] = ("raster",)
Admissible = Literal["raster", "radial", "line"]
"""Layouts that a catalog may hold. Only on request: radial scans, which are converted to a raster (radial.to_raster),
and single B-scans (line), which go into stores of their own."""
ADMISSIBLE: tuple[Admissible, ...] = get_args(Admissible)
Modality = Literal["structure", "octa"]
"""What the voxels measure: reflectivity (structural OCT), or flow (OCT angiography)."""
MODALITIES: tuple[Modality, ...] = get_args(Modality)
STRUCTURE_ONLY: tuple[Literal["structure"]] = ("structure",)
Shape3 = tuple[int, int, int]
Spacing3 = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class Lines:
    """Positions on the fundus of the first and the last A-scan of each B-scan; NaN for a B-scan that is not straight.

    mm, [D, 2] as (x to the right of the image, y downwards, towards inferior).
    """

    start: np.ndarray
    end: np.ndarray

    __repr__ = fields_line

    def __getitem__(self, bscans: slice | Sequence[int]) -> "Lines":
        """Some of the B-scans, or all in another order."""
        at = bscans if isinstance(bscans, slice) else list(bscans)
        return Lines(self.start[at], self.end[at])

    @property
    def to_and_fro(self) -> bool:
        """Whether some B-scans run against the first."""
        direction = self.end - self.start
        return bool((direction @ direction[0] < 0).any())

    @property
    def one_way(self) -> "Lines":
        """The same places, with start and end exchanged of those that run against the first."""
        direction = self.end - self.start
        against = (direction @ direction[0] < 0)[:, None]
        return Lines(np.where(against, self.end, self.start), np.where(against, self.start, self.end))

    @property
    def vertical(self) -> bool:
        """Whether they run up or down rather than sideways."""
        x, y = np.abs(np.nan_to_num(self.end - self.start).mean(axis=0))
        return bool(y > x)

    def mirrored(self) -> "Lines":
        """Exchange left and right; A-scans are counted from the other end."""
        return Lines(self.end * (-1, 1), self.start * (-1, 1))


def as_spacing(spacing_mm: Any, what: str = "spacing_mm") -> Spacing3:
    """(dz, dy, dx) of three numbers, such as a list or an array. Raises ValueError, which begins with `what`, unless
    they may be millimetres."""
    try:
        z, y, x = map(float, spacing_mm)
    except (TypeError, ValueError):
        z = y = x = np.nan
    if isinstance(spacing_mm, str) or not all(NANOMETRE_MM <= mm < np.inf for mm in (z, y, x)):
        raise ValueError(f"{what} must be (dz, dy, dx) of {NANOMETRE_MM:g} mm or more, got {shown(spacing_mm)}")
    return z, y, x


def eye_id_of(participant: str, laterality: str | None) -> str:
    """Id of an eye: participant and laterality."""
    return f"{participant}_{laterality or 'unknown'}"


@dataclass(frozen=True, eq=False)
class Volume:
    """One OCT acquisition. Axes are always [D, H, W] = (B-scan, axial, lateral); row 0 is on the vitreous side."""

    voxels: np.ndarray
    """uint8 or uint16 [D, H, W], display (log) intensities as exported by the instrument."""
    spacing_mm: Spacing3
    """(dz, dy, dx): distance between B-scans, between axial pixels, between A-scans."""
    laterality: Laterality | None = None
    """Right or left eye; None is unknown, which nothing downstream replaces by a guess."""
    scanner: str = "unknown"
    """OCT instrument, for example heidelberg_spectralis."""
    protocol: str = "unknown"
    participant: str = "unknown"
    acquisition: str = "unknown"
    """SOP Instance UID if there is one."""
    superior_first: bool | None = None
    """Whether B-scan 0 is superior (True) or inferior (False); None if the file does not give frame positions."""
    modality: Modality = "structure"
    """octa: voxels are flow. Networks for structural OCT, their tissue band and their layers do not apply to it."""
    layout: Layout = "raster"
    """Other layouts than a raster have no spacing between B-scans: dz then repeats dx and has no meaning."""
    lines: Lines | None = None
    """Positions of the B-scans of a raster or a radial scan (star), in the order of the voxels, if the file gives them
    in millimetres. A star has angles instead of a spacing."""
    source: str = "memory"
    """Where the voxels came from; named in every error. Give "memory" with voxels of your own, also where you change
    those of a file: `dataclasses.replace(volume, voxels=changed, source="memory")`."""
    spacing_estimated: bool = False
    """The millimetres are estimated from the retina (octfm.volume.estimated): no result may give micrometres."""
    mean_eye: bool = False
    """The file states degrees: the lateral millimetres are those of a mean eye, as a rule right within a tenth."""
    full_scale: int = 65535
    """White value of uint16 voxels, e.g. 4095 if 12 bits are used; uint8 is white at 255."""

    def __post_init__(self):
        # Of a masked array, some operations use the mask, and others the values below it.
        masked = isinstance(self.voxels, np.ma.MaskedArray)
        if masked or not isinstance(self.voxels, np.ndarray):
            how = "fill its gaps with .filled(0)" if masked else "convert it with numpy.asarray"
            raise TypeError(f"{self.source}: voxels: expected a NumPy array, got {type(self.voxels).__name__}; {how}")
        if self.voxels.ndim != 3 or 0 in self.voxels.shape:
            raise ValueError(
                f"{self.source}: voxels must have 3 non-empty axes [B-scan, axial, lateral], got {self.voxels.shape}"
            )
        if self.voxels.dtype.kind != "u" or self.voxels.dtype.itemsize > 2:
            raise ValueError(
                f"{self.source}: voxels: expected grey levels in uint8 or uint16, got {self.voxels.dtype}; scale them "
                "to 0 to 255 and convert them to uint8"
            )
        object.__setattr__(self, "spacing_mm", as_spacing(self.spacing_mm, f"{self.source}: spacing_mm"))
        if not 0 < self.full_scale <= 65535:
            level = f"expected the grey level of white, 1 to 65535, got {self.full_scale}"
            raise ValueError(f"{self.source}: full_scale: {level}")
        eyes, ways = ("R", "L", None), (True, False, None)
        named = {"laterality": eyes, "superior_first": ways, "layout": LAYOUTS, "modality": MODALITIES}
        for name, known in named.items():
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{self.source}: {name}: expected {', '.join(map(str, known))}, got {value!r}")

    @property
    def white(self) -> int:
        """The grey level of white."""
        return 255 if self.voxels.dtype == np.uint8 else self.full_scale

    def __repr__(self) -> str:
        return brief("Volume", *self._described().values())

    def _repr_html_(self) -> str:
        return box("Volume", self._described(), pictures=self.pictures())

    def _described(self) -> dict[str, str]:
        d, h, w = self.shape
        estimated = " (estimated)" if self.spacing_estimated else ""
        return {
            "size": f"{number(d, 'B-scan')} of {h} × {w}, {self.voxels.dtype}",
            "extent": f"{times(self.extent_mm if self.layout == 'raster' else self.extent_mm[1:])} mm{estimated}",
            "scanner": readable(self.scanner),
            "eye": EYES[self.laterality],
            "layout": self.layout if self.layout != "raster" else "",
            "modality": "OCT angiography" if self.modality == "octa" else "",
        }

    def pictures(self) -> list[Picture]:
        """The middle B-scan and, of a raster, the mean over depth seen from the front; for notebooks."""
        z, y, x = self.extent_mm
        middle = self.voxels[len(self.voxels) // 2].astype(np.float32) * (255 / self.white)
        shown = [picture(middle.clip(0, 255).astype(np.uint8), (y, x), "middle B-scan")]
        if self.layout == "raster" and len(self.voxels) > 1:
            # Every fourth row is enough for a picture of a few hundred pixels.
            front = stretched(self.voxels[:, ::4].mean(axis=1))
            shown.append(picture(front if self.superior_first is not False else front[::-1], (z, x), "from the front"))
        return shown

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
    def vertical(self) -> bool:
        """Whether the B-scans of a raster run up or down the fundus: their ends are then not nasal and temporal."""
        return self.layout == "raster" and self.lines is not None and self.lines.vertical

    @property
    def left_to_right(self) -> bool:
        """Whether the first A-scans of a raster lie left on the fundus, unless its positions say otherwise."""
        if self.layout != "raster" or self.lines is None:
            return self.layout == "raster"
        return not self.vertical and bool(np.nan_to_num(self.lines.end - self.lines.start)[:, 0].mean() >= 0)

    @property
    def eye_id(self) -> str:
        return eye_id_of(self.participant, self.laterality)

    def mirrored(self) -> "Volume":
        """Exchange left and right in voxels, lines and laterality: of a vertical raster by reversing its B-scans.

        Raises ValueError if laterality is unknown.
        """
        if self.laterality is None:
            raise ValueError(f"{self.source}: laterality is unknown, so mirroring it would be a guess")
        other: Laterality = "L" if self.laterality == "R" else "R"
        lines = self.lines and self.lines.mirrored()
        if self.vertical:
            # A-scans keep their order, so the first stays the first.
            lines = lines and Lines(lines.end, lines.start)[::-1]
            return replace(self, voxels=self.voxels[::-1], lines=lines, laterality=other)
        return replace(self, voxels=self.voxels[:, :, ::-1], lines=lines, laterality=other)

    def with_eye(self, named: Laterality | None) -> "Volume":
        """The volume with the eye that its path names, if its file states none; unknown if it states the other."""
        if named is None or named == self.laterality:
            return self
        return replace(self, laterality=named if self.laterality is None else None)

    def superior_to_inferior(self) -> "Volume":
        """Reverse the B-scans if B-scan 0 is known to be inferior; else unchanged."""
        if self.superior_first is not False:
            return self
        lines = self.lines and self.lines[::-1]
        return replace(self, voxels=self.voxels[::-1], lines=lines, superior_first=True)


def expect_volume(volume: object) -> None:
    """Raises TypeError unless this is a Volume."""
    if not isinstance(volume, Volume):
        raise TypeError(f"expected a Volume, got {type(volume).__name__}; octfm.read_volume(path) reads one")


@dataclass(frozen=True, eq=False)
class Surfaces:
    """Layer boundaries of a segmentation, with the B-scans and A-scans of the Volume in the same file."""

    names: tuple[str, ...]
    """Names given by the instrument (ILM, RNFL, ..., BM), in the order of the file."""
    heights_px: np.ndarray
    """float32 [S, D, W], rows below the top of the image, increasing with depth; NaN where there is no boundary."""
    axial_mm: float | None
    """Height of a row; None if the file does not state it."""
    source: str = "memory"

    def __post_init__(self):
        if self.heights_px.ndim != 3 or len(self.names) != len(self.heights_px):
            raise ValueError(
                f"{self.source}: expected heights [{len(self.names)} surfaces, B-scan, lateral], "
                f"got {self.heights_px.shape}"
            )

    def __repr__(self) -> str:
        _, depth, width = self.heights_px.shape
        where = f"{number(depth, 'B-scan')} of {number(width, 'A-scan')}"
        return brief("Surfaces", ", ".join(self.names), f"in {where}")

    @property
    def heights_mm(self) -> np.ndarray:
        """[S, D, W], millimetres below the top of the image."""
        if self.axial_mm is None:
            raise ValueError(f"{self.source}: axial spacing is unknown, so heights are in pixels only")
        return self.heights_px * np.float32(self.axial_mm)


@dataclass(frozen=True, eq=False)
class Labels:
    """A label for every voxel of a Volume, by a person or a program, in the Volume's order of B-scans."""

    values: np.ndarray
    """uint8 [D, H, W], 0: nothing."""
    names: dict[int, str]
    """Of the values above 0."""
    source: str = "memory"

    def __repr__(self) -> str:
        return brief("Labels", ", ".join(self.names.values()), f"in {number(len(self.values), 'B-scan')}")


@dataclass(frozen=True, eq=False)
class Fundus:
    """A picture of the fundus, as the instrument shows it: superior at the top."""

    image: np.ndarray
    """uint8 [rows, columns]"""
    about: str
    """What kind of picture it is, for the reader."""
    lines: Lines | None = None
    """Pixels (x, y) of the first and the last A-scan of each B-scan, in the order of the Volume of the same file; None
    if the file does not say where they lie on the picture."""

    __repr__ = fields_line

    def reversed(self) -> "Fundus":
        """The same picture for B-scans in the opposite order."""
        return replace(self, lines=self.lines and self.lines[::-1])


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
    return in_eight_bits(volume.voxels, full_scale or volume.full_scale)


def in_eight_bits(voxels: np.ndarray, full_scale: int) -> np.ndarray | Planes:
    """uint8 voxels as they are, uint16 ones as `Planes`."""
    return voxels if voxels.dtype == np.uint8 else Planes(voxels, full_scale)


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
