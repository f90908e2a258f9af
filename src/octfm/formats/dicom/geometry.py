"""Spacing and B-scan order of an Ophthalmic Tomography dataset: functional groups first, then positions, never a guess.

Functional groups: DICOM PS3.3 C.7.6.16. Frame locations on the fundus image: C.8.17.10. Patient axes are LPS, so +z is superior.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from octfm.errors import ReadError
from octfm.volume.volume import RASTER_ONLY, Layout, Lines, Shape3, Spacing3

if TYPE_CHECKING:
    from pydicom import Dataset

SPACING_BOUNDS_MM = ((0.002, 2.0), (0.0005, 0.05), (0.001, 0.4))
"""(dz, dy, dx) of any retinal OCT with room to spare, sparse rasters and small phantoms too; 1, 1, 1 is far outside."""
EXTENT_BOUNDS_MM = ((0.02, 26.0), (0.05, 15.0), (0.1, 26.0))
"""Widefield scans reach 24 mm."""


SAME_PLACE = 0.02
"""Share of a B-scan's length: B-scans that scatter over less, unevenly or in no order, show one place while the eye moved."""

FEWEST_OF_A_CUBE = 64
"""Cirrus cubes have 128, 200 and more B-scans; its HD rasters of 5 to 21 lines are not square."""


class NotRaster(ReadError):
    """Frames that do not lie parallel and one behind the other."""

    def __init__(self, layout: Layout, message: str):
        super().__init__("not_raster", message)
        self.layout: Layout = layout


@dataclass(frozen=True)
class Geometry:
    spacing_mm: Spacing3
    spacing_source: str
    superior_first: bool | None
    frame_order: tuple[int, ...] | None
    """Stored frame of each B-scan where frames are not stored in the order of their positions."""
    flags: tuple[str, ...]
    layout: Layout = "raster"
    lines: Lines | None = None
    """Of a star."""


@dataclass(frozen=True)
class Stack:
    """Where the frames lie along the one direction in which a raster steps."""

    step: float
    """Median distance between neighbours, in the unit of the positions."""
    superior_first: bool | None
    order: tuple[int, ...] | None
    even: bool


def read_geometry(
    dataset: "Dataset", shape: Shape3, scanner: str, uri: str, layouts: Collection[Layout] = RASTER_ONLY
) -> Geometry:
    """Raises ReadError: missing_spacing, absurd_spacing, not_raster where the layout is none of `layouts`.

    Of lines, circles and stars dz repeats dx and means nothing (octfm.volume.volume.Volume.layout).
    """
    shared = _first(dataset, "SharedFunctionalGroupsSequence")
    frames = list(dataset.get("PerFrameFunctionalGroupsSequence") or ())
    in_plane, between, thickness, source = _pixel_measures(dataset, shared, frames, uri)
    dy, dx = in_plane
    try:
        if shape[0] == 1:
            raise NotRaster("line", f"{uri}: a single B-scan; a volume needs a raster of several")
        from_positions, stack, doubts_of_positions = _dz_from_positions(frames, shared, shape, dx, uri)
        if stack is None and _median([*_every_measures(shared, frames), dataset], "SpacingBetweenSlices") == 0:
            raise repeats(uri, "SpacingBetweenSlices is 0, so all B-scans show one place")
    except NotRaster as found:
        layout = _layout(frames, found.layout)
        if layout not in layouts:
            raise
        check_bounds((dx, dy, dx), (shape[2], shape[1], shape[2]), uri)
        lines = _lines(frames, shared, shape, dx) if layout == "radial" else None
        return Geometry((dx, dy, dx), source, None, None, (), layout, lines)
    dz, source, doubts = _distance(from_positions, between, thickness, (dy, dx), shape, (scanner, source), uri)
    flags = [*doubts, *doubts_of_positions]
    check_bounds((dz, dy, dx), shape, uri)
    if stack is not None and not stack.even:
        flags.append("uneven_positions")
    if stack is not None and stack.order is not None:
        flags.append("frames_reordered")
    return Geometry(
        spacing_mm=(dz, dy, dx),
        spacing_source=source,
        superior_first=stack.superior_first if stack else None,
        frame_order=stack.order if stack else None,
        flags=tuple(flags),
    )


def _distance(
    from_positions: float | None,
    between: float | None,
    thickness: float | None,
    in_plane: tuple[float, float],
    shape: Shape3,
    scanner_and_source: tuple[str, str],
    uri: str,
) -> tuple[float, str, tuple[str, ...]]:
    """Millimetres between B-scans, where they came from, and what is doubtful about them."""
    (dy, dx), (scanner, source) = in_plane, scanner_and_source
    declared = between or thickness
    if from_positions is not None:
        doubtful = declared is not None and abs(from_positions / declared - 1) > 0.1
        flags = ("slice_thickness_contradicts_positions",) if doubtful else ()
        return from_positions, source + "+positions", flags
    if declared is None:
        raise ReadError(
            "missing_spacing",
            f"{uri}: PixelSpacing is {dy:g} x {dx:g} mm, but neither frame positions nor SpacingBetweenSlices nor SliceThickness "
            "tell the distance between B-scans; add one of them",
        )
    if declared == 1.0:
        raise ReadError(
            "absurd_spacing", f"{uri}: a B-scan distance of exactly 1 mm is a placeholder; correct SliceThickness"
        )
    if between is not None or abs(declared / dx - 1) >= 0.01 or shape[0] * declared >= 0.5 * shape[2] * dx:
        return declared, source, ()
    if scanner != "zeiss_cirrus":
        flags = ("slice_thickness_equals_lateral_spacing",)
        return declared, source, flags
    # Cirrus exports overwrite SliceThickness with the lateral spacing; its cubes are square.
    if shape[0] < FEWEST_OF_A_CUBE:
        raise ReadError(
            "absurd_spacing",
            f"{uri}: SliceThickness repeats the lateral spacing of {dx:g} mm, as Cirrus exports do, and {shape[0]} B-scans are no cube "
            "whose field of view is known; add positions or SpacingBetweenSlices",
        )
    flags = ("slice_thickness_corrected",)
    return shape[2] * dx / shape[0], source + "+field_of_view", flags


def _layout(frames, first_seen: Layout) -> Layout:
    """Circle where most frames end where they start: a star with a few circles around it is a star."""
    lines = [_line(item) for frame in frames if (item := _first(frame, "OphthalmicFrameLocationSequence")) is not None]
    closed = [np.hypot(line[-2] - line[0], line[-1] - line[1]) < 1e-6 for line in lines if line is not None]
    if not closed or not any(closed):
        return first_seen
    return "circle" if 2 * sum(closed) > len(closed) else "radial"


def _lines(frames, shared, shape: Shape3, dx: float) -> Lines | None:
    """Where the B-scans of a star lie: on the fundus image, whose pixels are square, else in patient space. None: not told."""
    if len(frames) != shape[0]:
        return None
    length_mm = (shape[2] - 1) * dx
    locations = [_first(frame, "OphthalmicFrameLocationSequence") for frame in frames]
    found = [_line(location) if location is not None else None for location in locations]
    ends = np.array([(*line[:2], *line[-2:]) if line else (np.nan,) * 4 for line in found])  # (row, column) twice
    length = np.hypot(ends[:, 2] - ends[:, 0], ends[:, 3] - ends[:, 1])
    ends[~(length > 1e-6)] = np.nan  # circles around the star
    if np.isfinite(ends).any():
        ends *= length_mm / np.nanmedian(np.where(length > 1e-6, length, np.nan))
        return Lines(ends[:, [1, 0]], ends[:, [3, 2]])
    points = [
        floats(item.get("ImagePositionPatient")) if (item := _first(f, "PlanePositionSequence")) is not None else None
        for f in frames
    ]
    planes = [
        _first(frame, "PlaneOrientationSequence") or _first(shared, "PlaneOrientationSequence") for frame in frames
    ]
    axes = [floats(plane.get("ImageOrientationPatient")) if plane is not None else None for plane in planes]
    if any(p is None or len(p) != 3 for p in points) or any(a is None or len(a) != 6 for a in axes):
        return None
    start, turned = np.array(points), np.array(axes)
    if (
        np.abs(turned[:, 4]) < 0.7
    ).any():  # the beam does not run from front to back, so that left and up cannot be told
        return None
    end = start + length_mm * turned[:, :3]
    return Lines(start[:, [0, 2]] * (1, -1), end[:, [0, 2]] * (1, -1))


def _line(location) -> tuple[float, ...] | None:
    """Reference coordinates (row, column) of at least a first and a last A-scan."""
    found = floats(location.get("ReferenceCoordinates"))
    return found if found and len(found) >= 4 else None


def floats(value: Any) -> tuple[float, ...] | None:
    """Finite numbers of a DICOM value of any multiplicity, None for anything else."""
    several = hasattr(value, "__iter__") and not isinstance(value, (str, bytes))
    try:
        numbers = tuple(float(v) for v in (value if several else [value]))
    except (TypeError, ValueError):
        return None
    return numbers if numbers and all(np.isfinite(numbers)) else None


def _first(dataset: "Dataset | None", sequence: str) -> "Dataset | None":
    items = dataset.get(sequence) if dataset is not None else None
    return items[0] if items else None


def _pixel_measures(dataset, shared, frames, uri) -> tuple[tuple[float, float], float | None, float | None, str]:
    """(dy, dx), SpacingBetweenSlices, SliceThickness and where they stood; shared wins, then per-frame, then the top level."""
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
        between = between or _median(measures, "SpacingBetweenSlices")
        thickness = thickness or _median(measures, "SliceThickness")
        if measures and all(pair is not None and len(pair) == 2 for pair in in_plane):
            if between is None and thickness is None:
                between, thickness = _median([dataset], "SpacingBetweenSlices"), _median([dataset], "SliceThickness")
            dy, dx = np.median(np.array(in_plane), axis=0)
            return (float(dy), float(dx)), between, thickness, source
    raise ReadError(
        "missing_spacing",
        f"{uri}: no PixelSpacing in shared functional groups, per-frame functional groups or at the top level; "
        "add it, millimetres are never guessed",
    )


def _median(measures, keyword: str) -> float | None:
    values = [floats(item.get(keyword)) for item in measures]
    found = [value[0] for value in values if value is not None]
    return float(np.median(found)) if found else None


def _every_measures(shared, frames) -> list[Any]:
    found = [_first(group, "PixelMeasuresSequence") for group in (shared, *frames)]
    return [item for item in found if item is not None]


def _dz_from_positions(
    frames, shared, shape: Shape3, dx: float, uri: str
) -> tuple[float | None, Stack | None, tuple[str, ...]]:
    """Millimetres between B-scans, their order, and flags; (None, None, flags) where positions are absent or placeholders."""
    if len(frames) != shape[0]:
        frames = [{}] * shape[0] if not frames else []  # without per-frame groups, what is shared holds for all
    if not frames:
        return None, None, ()
    # What stands in the shared group holds for every frame (PS3.3 C.7.6.16.1.1).
    frames = [
        {name: item for name in _POSITION_GROUPS if (item := frame.get(name) or (shared or {}).get(name))}
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
        # Both ends of a B-scan are known in fundus pixels and in mm, which gives the fundus scale (pixels are square).
        dz = dz if dz is not None else fundus.step * shape[2] * dx / length
        # The fundus image is what a reader sees; converters often fill ImagePositionPatient with a running number.
        stack = fundus
    zeros = stack is None and all(_first(frame, "PlanePositionSequence") is not None for frame in frames)
    return dz, stack, ("positions_placeholder",) if zeros else ()


_POSITION_GROUPS = ("PlanePositionSequence", "PlaneOrientationSequence", "OphthalmicFrameLocationSequence")


def _patient_positions(frames, length_mm: float, uri: str) -> tuple[np.ndarray, int | None] | None:
    """Position of each frame along the stack in mm and the sign of superior along it, from ImagePositionPatient.

    None where they are absent, all at the origin (a placeholder), or step within the plane of the B-scans. Raises NotRaster.
    """
    points = [
        floats(item.get("ImagePositionPatient")) if (item := _first(f, "PlanePositionSequence")) is not None else None
        for f in frames
    ]
    if any(point is None or len(point) != 3 for point in points):
        return None
    position = np.array(points)
    if not position.any():
        return None
    moved = float(np.linalg.norm(np.ptp(position, axis=0)))
    if moved < 1e-6:
        raise repeats(uri, "all B-scans have one position")
    planes = [_first(frame, "PlaneOrientationSequence") for frame in frames]
    axes = [floats(plane.get("ImageOrientationPatient")) if plane is not None else None for plane in planes]
    if all(axis is not None and len(axis) == 6 for axis in axes):
        directions = np.array(axes)
        refuse_rotating(
            np.arctan2(
                np.linalg.norm(np.cross(directions[0, :3], directions[:, :3]), axis=1),
                directions[:, :3] @ directions[0, :3],
            ),
            uri,
        )
        normal = np.cross(directions[0, :3], directions[0, 3:])
    else:
        normal = position[-1] - position[0]
    length = float(np.linalg.norm(normal))
    if length < 1e-6:
        return None
    normal = normal / length
    along = (position - position[0]) @ normal
    if np.ptp(along) < 1e-6:
        if moved < SAME_PLACE * length_mm:
            raise repeats(uri, f"all B-scans lie within {moved:.3f} mm of one position")
        return None
    return along, int(np.sign(normal[2])) if abs(normal[2]) > 0.7 else None


def _fundus_lines(frames, uri: str) -> tuple[np.ndarray, int | None, float] | None:
    """Position of each frame across its own direction, sign of superior, and line length, in pixels of the fundus image."""
    locations = [item for frame in frames if (item := _first(frame, "OphthalmicFrameLocationSequence")) is not None]
    if len(locations) != len(frames):
        return None
    kinds = {str(location.get("OphthalmicImageOrientation", "LINEAR")) for location in locations}
    if kinds & {"NONLINEAR", "TRANSVERSE"}:
        raise NotRaster(
            "circle", f"{uri}: frames are {' and '.join(sorted(kinds)).lower()}; a volume needs parallel linear B-scans"
        )
    lines = [line for location in locations if (line := _line(location)) is not None]
    if len(lines) != len(frames):
        return None
    start, end = np.array([line[:2] for line in lines]), np.array([line[-2:] for line in lines])
    direction = end - start  # (row, column); rows grow downwards, towards inferior
    length = np.linalg.norm(direction, axis=1)
    if (length < 1e-6).any():
        raise NotRaster(
            "circle", f"{uri}: a B-scan ends where it starts, so it is a circle; a volume needs parallel linear B-scans"
        )
    angle = np.arctan2(direction[:, 0], direction[:, 1])
    refuse_rotating(np.angle(np.exp(1j * (angle - angle[0]))), uri)
    across = np.array([direction[0, 1], -direction[0, 0]]) / length[0]
    middle = (start + end) / 2
    along = (middle - middle[0]) @ across
    return along, -int(np.sign(across[0])) if abs(across[0]) > 0.7 else None, float(np.median(length))


def refuse_rotating(angle: np.ndarray, uri: str) -> None:
    """`angle` [D] in radians against the first frame; a line scanned backwards is still parallel."""
    turned = np.abs((angle + np.pi / 2) % np.pi - np.pi / 2).max()
    if turned > np.deg2rad(5):
        raise NotRaster(
            "radial",
            f"{uri}: B-scans turn by {np.rad2deg(turned):.0f} degrees (radial scan); a volume needs parallel ones",
        )


def repeats(uri: str, found: str) -> NotRaster:
    return NotRaster("repeated", f"{uri}: {found} (repeats); a volume needs one B-scan per position")


def stack_of(along: np.ndarray, superior: int | None, uri: str, length: float) -> Stack:
    """`along` [D] positions; `superior` is +1 where growing positions go up, -1 down, None where the raster is vertical.

    `length`: of a B-scan, in the same unit. Raises NotRaster for repeats.
    """
    falling = along[-1] < along[0]
    order = np.argsort(-along if falling else along, kind="stable")
    steps = np.abs(np.diff(along[order]))
    step = float(np.median(steps))
    # Not the median: of a place that was scanned twice or more often, it is how far the eye moved in between.
    to_the_next_place = float(np.quantile(steps, 0.9))
    if to_the_next_place < 1e-6 or np.mean(steps < 0.05 * to_the_next_place) > 0.2:
        raise repeats(uri, "several B-scans share one position")
    even, in_order = bool((np.abs(steps - step) <= 0.5 * step).all()), bool((order == np.arange(len(order))).all())
    if not (even and in_order) and np.ptp(along) < SAME_PLACE * length:
        raise repeats(uri, f"all B-scans scatter over {np.ptp(along) / length:.1%} of their length, as of one place")
    return Stack(
        step=step,
        superior_first=None if superior is None else bool((superior > 0) == falling),
        order=None if in_order else tuple(int(i) for i in order),
        even=even,
    )


def looks_swapped(in_plane_mm: tuple[float, float], shape: Shape3) -> bool:
    """Whether the millimetres of (axial, lateral) can only be meant the other way round.

    No OCT is coarser along depth than across: native axial pixels are 1.5 to 4 µm and show 1 to 4 mm, A-scans are 5 µm apart or more. What is
    coarser after resampling is left alone unless the swapped reading, and only that, is a scan of the retina. Lines of 4,096 A-scans
    are the exception (Cirrus: 1.5 µm apart, pixels of 2.0 µm), and dense scans of a small field, so what is no distance of A-scans the
    other way round either is left alone.
    """
    (dy, dx), (_, height, width) = in_plane_mm, shape
    if dy <= 1.25 * dx or width * dy > EXTENT_BOUNDS_MM[2][1]:
        return False
    depth, depth_if_swapped = height * dy, height * dx
    (short, long), (finest, coarsest) = _DEPTH_MM, _AXIAL_PIXEL_MM
    if finest <= dx <= _FINEST_ASCANS_MM <= dy:
        # A frame cropped to the retina may show less than 1 mm, but no pixel is then coarser than 8 µm.
        return (_RETINA_MM if dy > coarsest else short) <= depth_if_swapped <= long
    return depth > long and short <= depth_if_swapped <= long


_DEPTH_MM, _RETINA_MM, _AXIAL_PIXEL_MM, _FINEST_ASCANS_MM = (1.0, 4.0), 0.4, (0.0015, 0.008), 0.005


def check_bounds(spacing_mm: Spacing3, shape: Shape3, uri: str) -> None:
    """Raises ReadError: absurd_spacing, swapped_spacing."""
    _, dy, dx = spacing_mm
    if looks_swapped((dy, dx), shape):
        raise ReadError(
            "swapped_spacing",
            f"{uri}: pixels of {dy:g} mm axially and {dx:g} mm laterally make a retina {shape[1] * dy:.1f} mm deep in {shape[1]} rows; "
            f"the two look exchanged ({shape[1] * dx:.1f} mm the other way round), state the axial one first",
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
                f"{uri}: {count} pixels of {mm:g} mm make a {axis} extent of {mm * count:g} mm, expected {short:g} to {long:g}; "
                "correct the header",
            )
