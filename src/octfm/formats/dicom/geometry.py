"""Spacing, layout and B-scan order of an Ophthalmic Tomography dataset, from functional groups and positions.

Nothing is guessed: a dataset without spacing is refused. Functional groups: DICOM PS3.3 C.7.6.16. Frame locations on
the fundus image: C.8.17.10. Patient axes are LPS (towards left, posterior, head), so +z is superior.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octfm.errors import ReadError
from octfm.formats.dicom.groups import Elements
from octfm.volume.volume import RASTER_ONLY, Layout, Lines, Shape3, Spacing3

SPACING_BOUNDS_MM = ((0.002, 2.0), (0.0005, 0.05), (0.001, 0.4))
"""Generous bounds of (dz, dy, dx), wide enough for sparse rasters and small phantoms; 1, 1, 1 is far outside."""
EXTENT_BOUNDS_MM = ((0.02, 26.0), (0.05, 15.0), (0.1, 26.0))
"""Bounds of the field of view; widefield scans reach 24 mm."""

SAME_PLACE = 0.02
"""B-scans scattered unevenly or out of order over less than this share of their length show one place."""

FEWEST_OF_A_CUBE = 64
"""Cirrus cubes have 128, 200 or more B-scans; its HD rasters of 5 to 21 lines are not square."""

_PLACEHOLDER_MM = 1.0
"""A B-scan distance of exactly this stands for one that is not known."""
_HIGHEST_MM = 15.0
"""No field is higher, unless it is as wide."""
_MADE_UP_MM = {(0.05, 0.01): ".e2e", (0.004, 0.002): ".img", (0.2, 0.02): ".OCT", (0.02, 0.015): ".OCT"}
"""(SliceThickness, lateral PixelSpacing) that OCT-Converter 0.7 writes, with counted positions, for all of a kind."""

ROUNDING = 1.01
"""Largest ratio of spacings that are the same but for rounding."""


class NotRaster(ReadError):
    """B-scans that are not a stack of parallel planes at distinct positions."""

    def __init__(self, layout: Layout, message: str):
        super().__init__("not_raster", message)
        self.layout: Layout = layout


@dataclass(frozen=True)
class Geometry:
    """Where the voxels of a volume lie, and what is doubtful about it."""

    spacing_mm: Spacing3
    spacing_source: str
    superior_first: bool | None
    frame_order: tuple[int, ...] | None
    """Stored frame of each B-scan; None if frames are stored in the order of their positions."""
    flags: tuple[str, ...]
    layout: Layout = "raster"
    lines: Lines | None = None
    """Ends of the B-scans of a raster, in the order of their positions, or of a radial scan."""


@dataclass(frozen=True)
class Stack:
    """Positions of the frames along the direction in which a raster steps."""

    step: float
    """Median distance between neighbours, in the unit of the positions."""
    superior_first: bool | None
    order: tuple[int, ...] | None
    even: bool

    def doubts(self, lines: Lines | None) -> list[str]:
        """Flags for what is unusual about the positions, and about the B-scans' `lines`."""
        flags = ["uneven_positions"] * (not self.even) + ["frames_reordered"] * (self.order is not None)
        return flags + ["bscans_to_and_fro"] * (lines is not None and lines.to_and_fro)


class _Measures(NamedTuple):
    """What a dataset states in millimetres, and the functional group that stated the pixel spacing."""

    in_plane: tuple[float, float]
    """(dy, dx)."""
    between: float | None
    thickness: float | None
    source: str


def read_geometry(
    dataset: Elements, shape: Shape3, scanner: str, uri: str, layouts: Collection[Layout] = RASTER_ONLY
) -> Geometry:
    """Spacing, layout and frame order of a dataset.

    Raises ReadError: missing_spacing, mixed_spacing, absurd_spacing, swapped_spacing; not_raster for a layout not among
    `layouts`.
    For line, circular and radial scans, dz repeats dx and is meaningless (octfm.volume.volume.Volume.layout).
    """
    shared = _first(dataset, "SharedFunctionalGroupsSequence")
    frames = list(dataset.get("PerFrameFunctionalGroupsSequence") or ())
    measures = _pixel_measures(dataset, shared, frames, uri)
    dy, dx = measures.in_plane
    counted = _are_counted(frames, measures)
    if counted and (source := _MADE_UP_MM.get((measures.thickness or 0, dx))):
        raise ReadError(
            "absurd_spacing",
            f"{uri}: SliceThickness {measures.thickness:g} and lateral PixelSpacing {dx:g} mm are what OCT-Converter "
            f"writes for every {source} file, whatever its field; use the {source} file itself",
        )
    try:
        if shape[0] == 1:
            raise NotRaster("line", f"{uri}: a single B-scan; a volume needs a raster of several")
        dz_from_positions, stack, position_flags = _dz_from_positions(frames, shared, shape, dx, counted, uri)
        stated = [_first(group, "PixelMeasuresSequence") for group in (shared, *frames)]
        between = _values([*filter(None, stated), dataset], "SpacingBetweenSlices")
        if stack is None and between and np.median(between) == 0:
            raise repeats(uri, "SpacingBetweenSlices is 0, so all B-scans show one place")
    except NotRaster as found:
        layout = _layout(frames, found.layout)
        if layout not in layouts:
            raise
        check_bounds((dx, dy, dx), shape, uri, layout)
        lines = _lines(frames, shared, shape, dx, (shape[2] - 1) * dx) if layout == "radial" else None
        return Geometry((dx, dy, dx), measures.source, None, None, (), layout, lines)
    dz, source, dz_flags = _bscan_distance(dz_from_positions, measures, shape, scanner, uri)
    if counted and source == measures.source:
        source += "+positions"  # the distance they repeat; of several files, they show that none is missing
    check_bounds((dz, dy, dx), shape, uri)
    lines = _raster_lines(frames, shared, shape, (dz, dx), stack) if stack is not None else None
    doubts = stack.doubts(lines) if stack is not None else []
    return Geometry(
        spacing_mm=(dz, dy, dx),
        spacing_source=source,
        superior_first=stack.superior_first if stack else None,
        frame_order=stack.order if stack else None,
        flags=(*dz_flags, *position_flags, *doubts),
        lines=lines,
    )


def _bscan_distance(
    from_positions: float | None, measures: _Measures, shape: Shape3, scanner: str, uri: str
) -> tuple[float, str, tuple[str, ...]]:
    """Millimetres between B-scans, their source, and flags. Positions override what the header declares."""
    (dy, dx), between, thickness, source = measures
    declared = between or thickness
    if from_positions is not None:
        doubtful = declared is not None and abs(from_positions / declared - 1) > 0.1
        flags = ("slice_thickness_contradicts_positions",) if doubtful else ()
        return from_positions, source + "+positions", flags
    if declared is None:
        raise ReadError(
            "missing_spacing",
            f"{uri}: PixelSpacing is {dy:g} x {dx:g} mm, but neither frame positions nor SpacingBetweenSlices nor "
            "SliceThickness state one distance between B-scans; add one of them",
        )
    if declared == _PLACEHOLDER_MM:
        raise ReadError(
            "absurd_spacing", f"{uri}: a B-scan distance of exactly 1 mm is a placeholder; correct SliceThickness"
        )
    # A SliceThickness that equals dx is plausible only if the field of view is then at least half as high as wide.
    if between is not None or abs(declared / dx - 1) >= 0.01 or shape[0] * declared >= 0.5 * shape[2] * dx:
        return declared, source, ()
    if scanner != "zeiss_cirrus":
        return declared, source, ("slice_thickness_equals_lateral_spacing",)
    # Cirrus exports overwrite SliceThickness with the lateral spacing; the field of its cubes is square.
    if shape[0] < FEWEST_OF_A_CUBE:
        raise ReadError(
            "absurd_spacing",
            f"{uri}: SliceThickness repeats the lateral spacing of {dx:g} mm, as Cirrus exports do, and {shape[0]} "
            "B-scans are not a cube of known field of view; add positions or SpacingBetweenSlices",
        )
    return shape[2] * dx / shape[0], source + "+field_of_view", ("slice_thickness_corrected",)


def _layout(frames: Sequence[Elements], first_seen: Layout) -> Layout:
    """A circle if most B-scans end where they start; a radial scan may have a few circles around it."""
    closed = [np.hypot(line[-2] - line[0], line[-1] - line[1]) < 1e-6 for line in _fundus_locations(frames) if line]
    if not any(closed):
        return first_seen
    return "circle" if 2 * sum(closed) > len(closed) else "radial"


def _raster_lines(
    frames: Sequence[Elements], shared: Elements | None, shape: Shape3, spacing: tuple[float, float], stack: Stack
) -> Lines | None:
    """Ends of a raster's B-scans, in the order of their positions; `spacing`: (dz, dx).

    None if not all are known. If their distance contradicts dz, the pixels of the fundus image are not square: vertical
    B-scans are then moved dz apart, and None stands for horizontal ones, as for files without positions.
    """
    dz, dx = spacing
    # The whole width of the image, as in `_dz_from_positions`.
    lines = _lines(frames, shared, shape, dx, shape[2] * dx)
    if lines is None or not (np.isfinite(lines.start).all() and np.isfinite(lines.end).all()):
        return None
    if stack.order is not None:
        lines = lines[stack.order]
    middle, direction = (lines.start + lines.end) / 2, lines.end[0] - lines.start[0]
    across = middle @ (-direction[1], direction[0])
    step, length = float(np.median(np.abs(np.diff(across)))), float(np.linalg.norm(direction))
    if abs(step - dz * length) <= 0.1 * dz * length:
        return lines
    if stack.superior_first is not None:
        return None
    # Without lines they would be measured as horizontal ones, inferior for nasal.
    moved = np.outer(across - across[0], (-direction[1], direction[0])) * (dz * length / step - 1) / length**2
    return Lines(lines.start + moved, lines.end + moved)


def _lines(
    frames: Sequence[Elements], shared: Elements | None, shape: Shape3, dx: float, on_fundus_mm: float
) -> Lines | None:
    """Ends of the B-scans: on the fundus image, whose pixels are square, else in patient space.

    `on_fundus_mm`: length of a line on the fundus image, which gives its scale. None if neither is stated.
    """
    if len(frames) != shape[0]:
        return None
    locations = _fundus_locations(frames)
    ends = np.array([(*line[:2], *line[-2:]) if line else (np.nan,) * 4 for line in locations])  # (row, column) twice
    length = np.hypot(ends[:, 2] - ends[:, 0], ends[:, 3] - ends[:, 1])
    ends[~(length > 1e-6)] = np.nan  # circles around the radial lines
    if np.isfinite(ends).any():
        ends *= on_fundus_mm / np.nanmedian(np.where(length > 1e-6, length, np.nan))
        return Lines(ends[:, [1, 0]], ends[:, [3, 2]])
    start = _vectors([_first(frame, "PlanePositionSequence") for frame in frames], "ImagePositionPatient", 3)
    orientation = "PlaneOrientationSequence"
    planes = [_first(frame, orientation) or _first(shared, orientation) for frame in frames]
    axes = _vectors(planes, "ImageOrientationPatient", 6)
    if start is None or axes is None:
        return None
    if (np.abs(axes[:, 4]) < 0.7).any():  # columns do not run from front to back: left and up are then unknown
        return None
    end = start + (shape[2] - 1) * dx * axes[:, :3]
    # x towards the left as on the fundus image, and z downwards
    return Lines(start[:, [0, 2]] * (1, -1), end[:, [0, 2]] * (1, -1))


def _fundus_locations(frames: Iterable[Elements]) -> list[tuple[float, ...] | None]:
    """Per frame, (row, column) of at least its first and last A-scan on the fundus image; None if not stated."""
    found = []
    for frame in frames:
        location = _first(frame, "OphthalmicFrameLocationSequence")
        line = floats(location.get("ReferenceCoordinates")) if location is not None else None
        found.append(line if line and len(line) >= 4 else None)
    return found


def _vectors(items: Sequence[Elements | None], keyword: str, length: int) -> np.ndarray | None:
    """[D, length], one element of each item; None if any item is missing or has another number of values."""
    values = [floats(item.get(keyword)) if item is not None else None for item in items]
    return np.array(values) if all(value and len(value) == length for value in values) else None


def floats(value: Any) -> tuple[float, ...] | None:
    """The numbers of a DICOM value of any multiplicity; None unless all are finite numbers."""
    several = hasattr(value, "__iter__") and not isinstance(value, (str, bytes))
    try:
        numbers = tuple(float(v) for v in (value if several else [value]))
    except (TypeError, ValueError):
        return None
    return numbers if numbers and all(np.isfinite(numbers)) else None


def _first(dataset: Elements | None, sequence: str) -> Elements | None:
    """The first item of a sequence; functional groups other than the frames themselves have just one."""
    items = dataset.get(sequence) if dataset is not None else None
    return items[0] if items else None


def _pixel_measures(dataset: Elements, shared: Elements | None, frames: Sequence[Elements], uri: str) -> _Measures:
    """Pixel spacing and B-scan distances from the shared group, else the per-frame groups, else the top level.

    Instruments differ in where they state the spacing; readers that know one place lose the files of others.
    """
    per_frame = [_first(frame, "PixelMeasuresSequence") for frame in frames]
    candidates = (
        ("shared", [_first(shared, "PixelMeasuresSequence")]),
        ("per_frame", per_frame if per_frame and None not in per_frame else []),
        ("top_level", [dataset]),
    )
    between, thickness = None, None
    for source, measures in candidates:
        measures = [item for item in measures if item is not None]
        in_plane = [floats(item.get("PixelSpacing")) for item in measures]
        # `or`: a distance of 0 counts as missing here; `read_geometry` refuses it as repeats without positions.
        between = between or _agreed(measures, "SpacingBetweenSlices")
        thickness = thickness or _agreed(measures, "SliceThickness")
        if measures and all(pair is not None and len(pair) == 2 for pair in in_plane):
            for others in ([dataset], [item for item in per_frame if item is not None]):
                if between is None and thickness is None:
                    between, thickness = _agreed(others, "SpacingBetweenSlices"), _agreed(others, "SliceThickness")
            # Also where the shared group holds for all frames: some of them may state another spacing.
            stated = [floats(item.get("PixelSpacing")) for item in per_frame if item is not None]
            _expect_one_spacing([*in_plane, *(pair for pair in stated if pair is not None and len(pair) == 2)], uri)
            dy, dx = np.median(np.array(in_plane), axis=0)
            return _Measures((float(dy), float(dx)), between, thickness, source)
    raise ReadError(
        "missing_spacing",
        f"{uri}: no PixelSpacing in shared functional groups, per-frame functional groups or at the top level; "
        "add it, spacing is never guessed",
    )


def _expect_one_spacing(pairs: Sequence[tuple[float, ...] | None], uri: str) -> None:
    every = np.array(pairs)
    low, high = every.min(0), every.max(0)
    if low.min() <= 0:
        raise ReadError("absurd_spacing", f"{uri}: PixelSpacing is {low[0]:g} x {low[1]:g} mm; correct the header")
    if np.any(high - low > (ROUNDING - 1) * np.abs(low)):
        raise ReadError(
            "mixed_spacing",
            f"{uri}: PixelSpacing differs between frames, {low[0]:g} to {high[0]:g} x {low[1]:g} to {high[1]:g} mm; "
            "export frames of one spacing as one file",
        )


def _values(measures: Iterable[Elements], keyword: str) -> list[float]:
    values = [floats(item.get(keyword)) for item in measures]
    return [value[0] for value in values if value is not None]


def _agreed(measures: Iterable[Elements], keyword: str) -> float | None:
    """The median; None where there is no value, or where frames differ by more than rounding."""
    found = _values(measures, keyword)
    agreed = found and max(found) - min(found) <= (ROUNDING - 1) * abs(min(found))
    return float(np.median(found)) if agreed else None


def _dz_from_positions(
    frames: Sequence[Elements], shared: Elements | None, shape: Shape3, dx: float, counted: bool, uri: str
) -> tuple[float | None, Stack | None, tuple[str, ...]]:
    """Millimetres between B-scans, their order, and flags; (None, None, flags) for absent or unusable positions.

    `counted`: those in space are `_are_counted`."""
    # The shared group holds for every frame (PS3.3 C.7.6.16.1.1), also where there are no per-frame groups.
    frames, everywhere = frames or [{}] * shape[0], shared or {}
    if len(frames) != shape[0]:
        return None, None, ("positions_of_other_frames",)
    frames = [
        {name: item for name in _POSITION_GROUPS if (item := frame.get(name) or everywhere.get(name))}
        for frame in frames
    ]
    dz, stack = None, None
    in_space = _patient_positions(frames, shape[2] * dx, uri)
    if in_space is not None:
        stack = stack_of(in_space[0], in_space[1], uri, shape[2] * dx)
        dz = stack.step
    on_fundus = _fundus_lines(frames, uri)
    if on_fundus is not None:
        along, superior_first, length = on_fundus
        fundus = stack_of(along, superior_first, uri, length)
        # A B-scan's length is known in fundus pixels and in mm, which gives the scale of the fundus image.
        # Order by the fundus image: converters often fill ImagePositionPatient with a running number, no distance.
        if dz is None or abs(dz - _PLACEHOLDER_MM) < 1e-6:
            dz = fundus.step * shape[2] * dx / length
        stack = fundus
    if dz is not None and (is_running_number(dz, shape, dx) or (counted and on_fundus is None)):
        dz, stack = None, None
    # Stated everywhere and yet unusable: the positions are placeholders.
    zeros = stack is None and all(_first(frame, "PlanePositionSequence") is not None for frame in frames)
    return dz, stack, ("positions_placeholder",) if zeros else ()


_POSITION_GROUPS = ("PlanePositionSequence", "PlaneOrientationSequence", "OphthalmicFrameLocationSequence")


def _are_counted(frames: Sequence[Elements], measures: _Measures) -> bool:
    """Whether the position of frame i is (0, 0, i times the declared distance), as converters write that know none: it
    then says nothing about which B-scan is superior."""
    position = _vectors([_first(frame, "PlanePositionSequence") for frame in frames], "ImagePositionPatient", 3)
    declared = measures.between or measures.thickness
    if position is None or declared is None:
        return False
    return len(position) > 0 and np.allclose(position, np.outer(np.arange(len(position)), (0, 0, declared)), atol=1e-5)


def _patient_positions(frames: Sequence[Elements], length_mm: float, uri: str) -> tuple[np.ndarray, int | None] | None:
    """Position of each frame along the stack in mm, from ImagePositionPatient, and the sign of superior along it.

    None where positions are absent, all at the origin (a placeholder), or step within the plane of the B-scans.
    Raises NotRaster.
    """
    position = _vectors([_first(frame, "PlanePositionSequence") for frame in frames], "ImagePositionPatient", 3)
    if position is None or not position.any():
        return None
    moved = float(np.linalg.norm(np.ptp(position, axis=0)))
    if moved < 1e-6:
        raise repeats(uri, "all B-scans have one position")
    planes = [_first(frame, "PlaneOrientationSequence") for frame in frames]
    directions = _vectors(planes, "ImageOrientationPatient", 6)
    if directions is not None:
        refuse_rotating(
            np.arctan2(
                np.linalg.norm(np.cross(directions[0, :3], directions[:, :3]), axis=1),
                directions[:, :3] @ directions[0, :3],
            ),
            uri,
        )
        normal = np.cross(directions[0, :3], directions[0, 3:])
    else:
        normal = position[-1] - position[0]  # without orientation, the stack runs from the first to the last frame
    length = float(np.linalg.norm(normal))
    if length < 1e-6:
        return None
    normal = normal / length
    along = (position - position[0]) @ normal
    if np.ptp(along) < 1e-6:
        if moved < SAME_PLACE * length_mm:
            raise repeats(uri, f"all B-scans lie within {moved:.3f} mm of one position")
        return None
    # 0.7: within 45 degrees of vertical; a stack that steps sideways has no superior end.
    return along, int(np.sign(normal[2])) if abs(normal[2]) > 0.7 else None


def _fundus_lines(frames: Sequence[Elements], uri: str) -> tuple[np.ndarray, int | None, float] | None:
    """`positions_across` of the frames in pixels of the fundus image; None unless all frames have a location."""
    locations = [item for frame in frames if (item := _first(frame, "OphthalmicFrameLocationSequence")) is not None]
    if len(locations) != len(frames):
        return None
    kinds = {str(location.get("OphthalmicImageOrientation") or "LINEAR") for location in locations}
    if kinds & {"NONLINEAR", "TRANSVERSE"}:
        raise NotRaster(
            "circle", f"{uri}: frames are {' and '.join(sorted(kinds)).lower()}; a volume needs parallel linear B-scans"
        )
    lines = [line for line in _fundus_locations(frames) if line]
    if len(lines) != len(frames):
        return None
    return positions_across(np.array([line[:2] for line in lines]), np.array([line[-2:] for line in lines]), 0, uri)


def positions_across(
    start: np.ndarray, end: np.ndarray, vertical: int, uri: str
) -> tuple[np.ndarray, int | None, float]:
    """Position of each line across its direction, the sign of superior along these positions, and the median length.

    `start`, `end`: [D, 2]; `vertical` is the coordinate that grows downwards, 0 for (row, column), 1 for (x, y). The
    sign is +1 where growing positions go up, -1 where they go down, None where they go sideways. Raises NotRaster.
    """
    direction = end - start
    length = np.linalg.norm(direction, axis=1)
    if (length < 1e-6).any():
        raise NotRaster(
            "circle", f"{uri}: a B-scan ends where it starts, so it is a circle; a volume needs parallel linear B-scans"
        )
    angle = np.arctan2(direction[:, vertical], direction[:, 1 - vertical])
    refuse_rotating(np.angle(np.exp(1j * (angle - angle[0]))), uri)  # wrapped to -pi..pi
    across = direction[0, ::-1] / length[0]
    across[1 - vertical] *= -1
    middle = (start + end) / 2
    along = (middle - middle[0]) @ across
    superior = -int(np.sign(across[vertical])) if abs(across[vertical]) > 0.7 else None
    return along, superior, float(np.median(length))


def refuse_rotating(angle: np.ndarray, uri: str) -> None:
    """Raise NotRaster for an `angle` [D] to the first frame over 5 degrees. A line scanned backwards is parallel."""
    # Modulo pi: opposite directions of scanning are the same line.
    turned = np.abs((angle + np.pi / 2) % np.pi - np.pi / 2).max()
    if turned > np.deg2rad(5):
        raise NotRaster(
            "radial",
            f"{uri}: B-scans turn by {np.rad2deg(turned):.0f} degrees (radial scan); a volume needs parallel ones",
        )


def repeats(uri: str, found: str) -> NotRaster:
    return NotRaster("repeated", f"{uri}: {found} (repeats); a volume needs one B-scan per position")


def stack_of(along: np.ndarray, superior: int | None, uri: str, length: float) -> Stack:
    """The stack with positions `along` [D]; `superior` as in `positions_across`.

    `length`: of a B-scan, in the same unit. Raises NotRaster for repeats.
    """
    # Keep the direction of storage: a volume stored from inferior to superior is not reordered.
    falling = along[-1] < along[0]
    order = np.argsort(-along if falling else along, kind="stable")
    steps = np.abs(np.diff(along[order]))
    step = float(np.median(steps))
    # Not the median: where each place was scanned twice, the median is the small movement of the eye in between.
    to_the_next_place = float(np.quantile(steps, 0.9))
    if to_the_next_place < 1e-6 or np.mean(steps < 0.05 * to_the_next_place) > 0.2:
        raise repeats(uri, "several B-scans share one position")
    even, in_order = bool((np.abs(steps - step) <= 0.5 * step).all()), bool((order == np.arange(len(order))).all())
    if not (even and in_order) and np.ptp(along) < SAME_PLACE * length:
        raise repeats(uri, f"all B-scans scatter over {np.ptp(along) / length:.1%} of their length, as at one place")
    return Stack(
        step=step,
        superior_first=None if superior is None else bool((superior > 0) == falling),
        order=None if in_order else tuple(int(i) for i in order),
        even=even,
    )


def looks_swapped(in_plane_mm: tuple[float, float], shape: Shape3) -> bool:
    """Whether (axial, lateral) millimetres make sense only when exchanged.

    Native OCT is finer along depth than across: axial pixels are 1.5 to 4 µm and span 1 to 4 mm, A-scans are 5 µm or
    more apart. Exceptions are lines of 4,096 A-scans (Cirrus: 1.5 µm apart, pixels of 2.0 µm), dense scans of a small
    field, and resampled volumes. The exchanged values must therefore be plausible; unless they are those of native
    pixels, the stated depth must be impossible as well.
    """
    (dy, dx), (_, height, width) = in_plane_mm, shape
    if dy <= 1.25 * dx or width * dy > EXTENT_BOUNDS_MM[2][1]:
        return False
    depth, depth_if_swapped = height * dy, height * dx
    (short, long), (finest, coarsest) = _DEPTH_MM, _AXIAL_PIXEL_MM
    if finest <= dx <= _FINEST_ASCANS_MM <= dy:  # exchanged, these would be native axial and lateral pixels
        # A frame cropped to the retina may show less than 1 mm; its axial pixels are at most 8 µm.
        return (_RETINA_MM if dy > coarsest else short) <= depth_if_swapped <= long
    return depth > long and short <= depth_if_swapped <= long


_DEPTH_MM, _RETINA_MM, _AXIAL_PIXEL_MM, _FINEST_ASCANS_MM = (1.0, 4.0), 0.4, (0.0015, 0.008), 0.005


def is_running_number(between_mm: float, shape: Shape3, dx: float) -> bool:
    """Whether B-scans exactly 1 mm apart are numbered, not measured: no instrument scans such a field."""
    high, wide = shape[0] * between_mm, shape[2] * dx
    return abs(between_mm - _PLACEHOLDER_MM) < 1e-6 and high > max(_HIGHEST_MM, wide)


def check_bounds(spacing_mm: Spacing3, shape: Shape3, uri: str, layout: Layout = "raster") -> None:
    """Check spacing and extent against those of retinal OCT; dz only of a raster.

    Raises ReadError: absurd_spacing, swapped_spacing.
    """
    _, dy, dx = spacing_mm
    if layout != "raster":
        spacing_mm, shape = (dx, dy, dx), (shape[2], *shape[1:])
    if looks_swapped((dy, dx), shape):
        raise ReadError(
            "swapped_spacing",
            f"{uri}: pixels of {dy:g} mm axially and {dx:g} mm laterally make a retina {shape[1] * dy:.1f} mm deep in "
            f"{shape[1]} rows; the two look exchanged ({shape[1] * dx:.1f} mm the other way round), "
            "state the axial one first",
        )
    for axis, mm, count, (low, high), (short, long) in zip(
        ("B-scan", "axial", "lateral"), spacing_mm, shape, SPACING_BOUNDS_MM, EXTENT_BOUNDS_MM, strict=True
    ):
        if not low <= mm <= high:
            raise ReadError(
                "absurd_spacing",
                f"{uri}: {axis} spacing is {mm:g} mm, retinal OCT has {low:g} to {high:g}; correct the header",
            )
        if not short <= mm * count <= long:
            raise ReadError(
                "absurd_spacing",
                f"{uri}: {count} pixels of {mm:g} mm make a {axis} extent of {mm * count:g} mm, expected {short:g} to "
                f"{long:g}; correct the header",
            )
