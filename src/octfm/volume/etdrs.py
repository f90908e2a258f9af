"""Nine-zone ETDRS thickness grid, total volume, and the fovea it is centred on, from one thickness map.

Zones after the Early Treatment Diabetic Retinopathy Study: a centre of 1 mm diameter, four quadrants from 1 to 3 mm and
four from 3 to 6 mm.
"""

from dataclasses import dataclass, replace
from dataclasses import field as with_default
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from octfm.display import box, brief, data_frame
from octfm.volume.volume import Laterality, Lines, Volume

RINGS_MM = (0.5, 1.5, 3.0)
"""Radii of the centre, the inner and the outer ring."""
ZONES = (
    "centre",
    "inner superior",
    "inner nasal",
    "inner inferior",
    "inner temporal",
    "outer superior",
    "outer nasal",
    "outer inferior",
    "outer temporal",
)
SIDES = {"R": ("nasal", "temporal"), "L": ("temporal", "nasal"), None: ("right", "left")}
"""What lies right and left of the fovea, by laterality: the disc lies nasally, to the right in a right eye."""
LEAST_COVERED = 0.9
"""Share of a zone that must have been measured for its mean to be given."""
MOST_APART_MM = {"centre": 0.5, "inner": 0.75, "outer": 1.5}
"""Mean distance of B-scans above which zones of this ring rest on interpolation. In the public volume with drusen,
whose B-scans lie .03 mm apart, leaving some out moves zones by at most 7 µm up to these distances, and the centre by 13
at .6 mm and by 45 at 1.44."""
UNEVEN = 1.1
"""Distances of single B-scans may exceed MOST_APART_MM by this factor, since eyes move, if their mean does not."""
LENGTHS_ALIKE = 0.1
"""Share by which the two lengths of a B-scan may differ: by its end points, and by its A-scans and their spacing."""
BRIDGED_MM = 0.3
"""Greatest distance of B-scans between which a map is interpolated if those between them have no value, as after a
blink. In the public volume with drusen the centre moves by 2 µm if all B-scans lie .25 mm apart, and by 4 at .36."""
ONE_PLACE_MM = 1e-3
"""Extent of a raster across its B-scans below which they lie in one place: less than any instrument steps by."""
REFERENCE_AXIAL_LENGTH_MM = 24.46
"""Axial length for which an instrument's lateral millimetres are calibrated: Cirrus (doi 10.4103/0301-4738.159877)."""
CELL_MM = 0.025
"""Distance of the points at which a map is sampled: 1,256 of them in the centre."""
PIT_MM, AROUND_MM, STEP_MM = 0.5, 1.1, 0.1
"""Radius (to 1/e) of the fitted Gaussian pit, of the disc that it is fitted to, and distance of the places tried."""
PIT_UM, LEAST_FIT = 40.0, 0.25
"""Depth from which a depression counts in full, and least share of the variance around a slope that it must explain."""
REACH_MM = 1.5
"""Greatest distance of the pit from the middle of the scan."""
OFF_CENTRE_MM, INDEPENDENT = 0.5, 10.0
"""Spread of the fovea about the middle of the scan, since eyes fixate, and the number of independent values that a
disc counts for: together they decide between depressions of similar shape."""
APART_MM, RIVAL = 0.5, 1.5
"""A second depression this far away may be the pit if its log-likelihood is less than this below the first's."""

Centre = Literal["pit", "fovea", "device", "scan"]
"""What the grid is centred on: the foveal pit that was found, the fovea where somebody has set it, the fixation centre
the device recorded, or the centre of the scan."""
CENTRES: dict[Centre, str] = {
    "pit": "the foveal pit",
    "fovea": "the fovea set by hand",
    "device": "the device's fixation centre",
    "scan": "the middle of the scan",
}


@dataclass(frozen=True, eq=False)
class Field:
    """Where the A-scans of a raster lie on the fundus, in mm: x to the right of the image, y downwards (inferior).

    A position (x, y) is `origin + along * a + across * b` with `a` the distance along a B-scan and `b` the distance
    across B-scans.
    """

    origin: np.ndarray
    """[2]: first A-scan of the first B-scan."""
    along: np.ndarray
    """[2]: unit vector from the first to the last A-scan."""
    across: np.ndarray
    """[2]: unit vector perpendicular to it, towards later B-scans."""
    bscans_mm: np.ndarray
    """[D], increasing: position of every B-scan across."""
    starts_mm: np.ndarray
    """[D]: position of every B-scan's first A-scan along."""
    columns: int
    ascan_mm: float
    upright: bool
    """False if nothing says which side is superior."""

    @property
    def centre(self) -> np.ndarray:
        """[2]: middle of the scanned field."""
        middle = float(self.starts_mm.mean()) + (self.columns - 1) / 2 * self.ascan_mm
        return self.origin + self.along * middle + self.across * (self.bscans_mm[0] + self.bscans_mm[-1]) / 2

    @property
    def per_mm(self) -> float:
        """B-scans per mm; 0 for a single one."""
        count = len(self.bscans_mm)
        return float((count - 1) / (self.bscans_mm[-1] - self.bscans_mm[0])) if count > 1 else 0.0

    @property
    def widths_mm(self) -> np.ndarray:
        """[D]: width of the field that each B-scan represents, in mm; NaN for a single one."""
        return np.gradient(self.bscans_mm) if len(self.bscans_mm) > 1 else np.full(1, np.nan)

    def to_mm(self, bscan: float, ascan: float) -> tuple[float, float]:
        """x and y in mm of a fractional (B-scan, A-scan): the reverse of `to_index`."""
        every = np.arange(len(self.bscans_mm))
        across, start = (float(np.interp(bscan, every, at)) for at in (self.bscans_mm, self.starts_mm))
        x, y = self.origin + self.along * (start + ascan * self.ascan_mm) + self.across * across
        return float(x), float(y)

    def apart_mm(self, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
        """Distance of the two B-scans between which each position lies, or of the two next to it beyond the outermost;
        infinite for a single B-scan."""
        if len(self.bscans_mm) == 1:
            return np.full(x_mm.shape, np.inf)
        gaps, across = np.diff(self.bscans_mm), (np.stack([x_mm, y_mm], axis=-1) - self.origin) @ self.across
        return gaps[np.clip(np.searchsorted(self.bscans_mm, across, side="right") - 1, 0, len(gaps) - 1)]

    def to_index(self, x_mm: np.ndarray, y_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fractional (B-scan, A-scan) of each position; NaN outside the outermost half pixels of the field.

        Linear between B-scans, which may be uneven and laterally shifted.
        """
        offset = np.stack([x_mm, y_mm], axis=-1) - self.origin
        along, across = offset @ self.along, offset @ self.across
        count = len(self.bscans_mm)
        if count == 1:
            return np.full(x_mm.shape, np.nan), np.full(x_mm.shape, np.nan)
        first, last = self.bscans_mm[0], self.bscans_mm[-1]
        margin = (last - first) / (count - 1) / 2
        bscan = np.interp(across, self.bscans_mm, np.arange(count))
        bscan[(across < first - margin) | (across > last + margin)] = np.nan
        ascan = (along - np.interp(across, self.bscans_mm, self.starts_mm)) / self.ascan_mm
        ascan[(ascan < -0.5) | (ascan > self.columns - 0.5)] = np.nan
        return bscan, ascan


def lateral_scale(axial_length_mm: float | None) -> float:
    """Factor for lateral distances; 1, for the instrument's nominal ones, if the axial length is not known.

    By the formula of Bennett, Rudnicka and Edgar (Graefes Arch 1994;232:361-367) a length on the retina is proportional
    to the axial length less 1.82 mm.
    """
    return 1.0 if axial_length_mm is None else (axial_length_mm - 1.82) / (REFERENCE_AXIAL_LENGTH_MM - 1.82)


def field_of_volume(volume: Volume, axial_length_mm: float | None = None) -> Field:
    """The field of a raster volume, whose B-scans and A-scans are those of a thickness map; see `field_of`.

    Raises ValueError for other layouts, and as `field_of`.
    """
    if volume.layout != "raster":
        raise ValueError(f"{volume.source}: a {volume.layout} scan; an ETDRS grid needs a raster (radial.to_raster)")
    depth, _, width = volume.shape
    return field_of((depth, width), volume.spacing_mm, volume.superior_first, volume.lines, axial_length_mm)


def field_of(
    shape: tuple[int, int],
    spacing_mm: tuple[float, float, float],
    superior_first: bool | None,
    lines: Lines | None = None,
    axial_length_mm: float | None = None,
) -> Field:
    """The field of a raster of `shape` (B-scans, A-scans): from the positions of its B-scans, else centred on (0, 0)
    with horizontal B-scans.

    `axial_length_mm` rescales lateral distances by `lateral_scale`. Raises ValueError if the B-scans do not have one
    direction, are not in the order of their positions or all have one, have another length than their A-scans
    `spacing_mm[2]` apart, or are not as many as `lines`.
    """
    count, columns = shape
    dz, _, dx = spacing_mm
    scale = lateral_scale(axial_length_mm)
    if lines is not None and len(lines.start) != count:
        raise ValueError(f"{count} B-scans, but positions of {len(lines.start)}; select the same B-scans in both")
    if lines is not None and count > 1 and np.isfinite(lines.start).all() and np.isfinite(lines.end).all():
        return _field_of_lines(Lines(scale * lines.start, scale * lines.end), columns, scale * dx)
    downwards = -1.0 if superior_first is False else 1.0
    origin = np.array([-(columns - 1) / 2 * dx, -downwards * (count - 1) / 2 * dz]) * scale
    return Field(
        origin,
        np.array([1.0, 0.0]),
        np.array([0.0, downwards]),
        np.arange(count) * dz * scale,
        np.zeros(count),
        columns,
        dx * scale,
        superior_first is not None,
    )


def _field_of_lines(lines: Lines, columns: int, dx: float) -> Field:
    middle, direction = (lines.start + lines.end) / 2, lines.end - lines.start
    length, stated = float(np.median(np.linalg.norm(direction, axis=1))), columns * dx
    if abs(length - stated) > max(2 * dx, LENGTHS_ALIKE * stated):
        raise ValueError(
            f"B-scans are {length:.1f} mm long by their positions, but {stated:.1f} mm by the distance of A-scans; "
            "correct the one that is wrong"
        )
    along = direction[0] / np.linalg.norm(direction[0])
    if (direction @ along < 0.9 * np.linalg.norm(direction, axis=1)).any():
        raise ValueError(
            "all B-scans must run in one direction; reverse the A-scans and the line of each that runs the other way"
        )
    along = direction.mean(axis=0)
    along /= np.linalg.norm(along)
    across = np.array([-along[1], along[0]])
    if (middle[-1] - middle[0]) @ across < 0:
        across = -across
    # Some formats state the outer edges of a B-scan instead of its first and last A-scan.
    at_edges = abs(length - columns * dx) < dx / 4
    step = length / (columns if at_edges else max(columns - 1, 1))
    first = middle - along * step * (columns - 1) / 2
    bscans, starts = (first - first[0]) @ across, (first - first[0]) @ along
    if np.ptp(bscans) < ONE_PLACE_MM:
        raise ValueError("all B-scans have one and the same position, so that their distance is unknown")
    steps = np.diff(bscans)
    # Eye motion may exchange B-scans of nearly one place.
    if (steps < -0.1 * np.median(np.abs(steps))).any():
        raise ValueError("B-scans must come in the order of their positions; sort the volume and its lines first")
    # B-scans at the same place stay distinct for the interpolation.
    bscans = np.maximum.accumulate(bscans) + 1e-9 * np.arange(len(bscans))
    return Field(first[0], along, across, bscans, starts, columns, step, True)


def find_pits(thickness_um: np.ndarray, field: Field) -> list[np.ndarray]:
    """[2] positions in mm of the depressions that could be the foveal pit, the likeliest first; empty if the retina has
    none within REACH_MM of the field's centre.

    `thickness_um` [D, W] is ILM to a boundary below the pit. Around every place a slope alone and a slope with a pit
    are fitted by least squares; the pit's share of the variance becomes a log-likelihood, to which that of the distance
    from the field's centre is added. That centre itself is among the positions if a pit elsewhere is hardly likelier
    than none. Single A-scans and B-scans that are wrong hardly move a fit to a whole disc.
    """
    from scipy.ndimage import gaussian_filter, maximum_filter

    steps, reach, around = round(STEP_MM / CELL_MM), round(REACH_MM / STEP_MM), round(AROUND_MM / STEP_MM)
    axis = CELL_MM * np.arange(-steps * (reach + around), steps * (reach + around) + 1)
    measured = sample(thickness_um, field, *np.meshgrid(field.centre[0] + axis, field.centre[1] + axis))
    known = np.isfinite(measured)
    if known.mean() < 0.5:
        return []
    sigma = STEP_MM / CELL_MM
    weight = gaussian_filter(known.astype(float), sigma)
    smooth = gaussian_filter(np.where(known, measured, 0.0), sigma) / np.maximum(weight, 1e-6)
    weight, smooth = (values[::steps, ::steps] for values in (np.where(weight < 0.5, 0.0, weight), smooth))

    offset = STEP_MM * np.arange(-around, around + 1)
    x, y = (values.ravel() for values in np.meshgrid(offset, offset))
    disc = np.hypot(x, y) <= AROUND_MM + 1e-9
    basis_4K = np.stack([np.ones_like(x), x, y, -np.exp(-(x**2 + y**2) / PIT_MM**2)])[:, disc]
    weight_NNK, smooth_NNK = (
        sliding_window_view(values, (len(offset), len(offset))).reshape(2 * reach + 1, 2 * reach + 1, -1)[..., disc]
        for values in (weight, smooth)
    )
    share = (weight_NNK > 0).mean(-1)
    # About their mean, or rounding would hide what the pit explains.
    smooth_NNK = smooth_NNK - (weight_NNK * smooth_NNK).sum(-1, keepdims=True) / np.maximum(
        weight_NNK.sum(-1, keepdims=True), 1e-6
    )
    normal_NN44 = np.einsum("yxk,ik,jk->yxij", weight_NNK, basis_4K, basis_4K, optimize=True) + 1e-9 * np.eye(4)
    moment_NN4 = (weight_NNK * smooth_NNK) @ basis_4K.T
    fit_NN4, slope_NN3 = (np.linalg.solve(normal_NN44[..., :n, :n], moment_NN4[..., :n, None])[..., 0] for n in (4, 3))
    explained = (moment_NN4 * fit_NN4).sum(-1) - (moment_NN4[..., :3] * slope_NN3).sum(-1)
    rest = (weight_NNK * smooth_NNK**2).sum(-1) - (moment_NN4[..., :3] * slope_NN3).sum(-1)
    depth = np.clip(fit_NN4[..., 3] / PIT_UM, 0, 1)
    fit = depth**2 * np.clip(explained / np.maximum(rest, 1e-6), 0, 0.999)
    places = STEP_MM * np.arange(-reach, reach + 1)
    off_mm = np.hypot(*np.meshgrid(places, places))
    likely = -INDEPENDENT / 2 * np.log1p(-fit) - 0.5 * (off_mm / OFF_CENTRE_MM) ** 2
    likely[share < 0.5] = -np.inf
    # 0 is the log-likelihood of a fovea in the middle of the scan whose pit cannot be seen.
    highest = (likely == maximum_filter(likely, 3)) & (likely > 0) & (off_mm <= REACH_MM) & (fit >= LEAST_FIT)
    highest[[0, -1]] = highest[:, [0, -1]] = False  # a slope that goes on
    if not highest.any():
        return []
    found: list[np.ndarray] = []
    least = likely[highest].max() - RIVAL
    for row, column in sorted(np.argwhere(highest & (likely >= least)), key=lambda at: -likely[tuple(at)]):
        down, right = likely[row - 1 : row + 2, column], likely[row, column - 1 : column + 2]
        place = field.centre + STEP_MM * (np.array([column, row]) - reach + [_vertex(right), _vertex(down)])
        if all(np.hypot(*(place - other)) >= APART_MM for other in found):
            found.append(place)
    if least < 0 and all(np.hypot(*(field.centre - other)) >= APART_MM for other in found):
        found.append(field.centre)
    return found


def _vertex(three: np.ndarray) -> float:
    """Where the parabola through three values is highest, in steps from the middle one, which is the highest."""
    before, middle, after = three
    bend = before - 2 * middle + after
    return 0.5 * (before - after) / bend if np.isfinite(bend) and bend < 0 else 0.0


def sample(values: np.ndarray, field: Field, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Values [D, W] at positions on the fundus, bilinear; NaN outside the field and next to an A-scan without a
    value, except that B-scans without any are skipped between two that are at most BRIDGED_MM apart."""
    from scipy.ndimage import map_coordinates

    values, field = _bridged(values, field)
    bscan, ascan = field.to_index(x_mm, y_mm)
    known = np.isfinite(values)
    outside = ~(np.isfinite(bscan) & np.isfinite(ascan))
    at = [np.where(outside, 0, bscan), np.where(outside, 0, ascan)]
    found = map_coordinates(np.where(known, values, 0.0), at, order=1, mode="nearest")
    if not known.all():
        outside |= map_coordinates(known.astype(float), at, order=1, mode="nearest") < 0.999
    found[outside] = np.nan
    return found


def _bridged(values: np.ndarray, field: Field) -> tuple[np.ndarray, Field]:
    """A map and its field without the B-scans that have no value and lie between two at most BRIDGED_MM apart."""
    kept = np.ones(len(values), bool)
    for before, after in pairwise(np.flatnonzero(np.isfinite(values).any(axis=1))):
        if field.bscans_mm[after] - field.bscans_mm[before] <= BRIDGED_MM:
            kept[before + 1 : after] = False
    return values[kept], replace(field, bscans_mm=field.bscans_mm[kept], starts_mm=field.starts_mm[kept])


@dataclass(frozen=True)
class EtdrsGrid:
    """Mean thickness per zone, in the names that the scan's orientation allows."""

    mean_um: dict[str, float | None]
    """Zone → mean; None if less than `LEAST_COVERED` of it was measured. Without laterality `left` and `right` stand
    for nasal and temporal; zones above and below are missing if nothing says which B-scan is superior."""
    coverage: dict[str, float]
    """Zone → measured share, in [0, 1]."""
    apart_mm: dict[str, float]
    """Zone → distance of neighbouring B-scans that is not exceeded in nine tenths of it."""
    volume_mm3: float | None
    """Volume over the circle of 6 mm diameter; None if less than `LEAST_COVERED` of it was measured."""
    centre: Centre
    centre_mm: tuple[float, float]
    """Where the grid lies, (x, y) in the field's coordinates."""
    rivals_mm: tuple[tuple[float, float], ...] = ()
    """Other places that could be the foveal pit."""
    bscans_per_mm: float = 0.0
    """How densely the zones were sampled across B-scans; the central zone is 1 mm wide."""
    sampling_um: dict[str, float] = with_default(default_factory=dict)
    """Zone → by how much its mean may be off because B-scans are samples of it: half of how far its B-scans lie from
    the line between their neighbours (root mean square), over the square root of their number. 0 where fewer than
    three neighbouring B-scans were measured."""
    place_um: dict[str, float] = with_default(default_factory=dict)
    """Zone → the most by which its mean changes if the grid moves as far as the fovea may lie from `centre_mm`; empty
    where that was not asked."""

    @property
    def too_sparse(self) -> list[str]:
        """Zones for which B-scans are too far apart (`MOST_APART_MM`)."""
        most_mm = {name: MOST_APART_MM[name.split()[0]] for name in self.mean_um}
        return [
            name
            for name, most in most_mm.items()
            if self.bscans_per_mm * most < 1 - 1e-6 or self.apart_mm[name] > UNEVEN * most
        ]

    @property
    def furthest_mm(self) -> float:
        """The largest distance of B-scans in zones that are too sparse; 0 without such a zone."""
        return max((self.apart_mm[name] for name in self.too_sparse), default=0.0)

    def __repr__(self) -> str:
        known = sum(mean is not None for mean in self.mean_um.values())
        return brief("EtdrsGrid", f"centre {_um(self.mean_um.get('centre'))}", f"{known} of {len(self.mean_um)} zones",
                     f"around {CENTRES[self.centre]}")  # fmt: skip

    def _repr_html_(self) -> str:
        volume = "" if self.volume_mm3 is None else f"{self.volume_mm3:.2f} mm³ within 3 mm"
        rows = [(name, _um(mean), f"{self.coverage[name]:.0%}") for name, mean in self.mean_um.items()]
        facts = {"centred on": CENTRES[self.centre], "volume": volume}
        return box("ETDRS grid", facts, table=(("zone", "mean", "measured"), rows))

    def to_pandas(self) -> Any:
        """A DataFrame with a row per zone: mean_um (None if it was not measured, or is withheld) and coverage in
        [0, 1]. Raises ConfigError without pandas."""
        rows = [{"zone": name, "mean_um": mean, "coverage": self.coverage[name]} for name, mean in self.mean_um.items()]
        return data_frame(rows).set_index("zone")


def _um(mean: float | None) -> str:
    return "not given" if mean is None else f"{mean:.0f} µm"


def measure_grid(
    thickness_um: np.ndarray,
    field: Field,
    laterality: Laterality | None,
    pit_map_um: np.ndarray | None = None,
) -> EtdrsGrid:
    """The ETDRS grid of a thickness map [D, W], NaN where nothing was measured.

    It is centred on the foveal pit, else on the middle of the scan. `pit_map_um` is the map in which the pit is looked
    for if `thickness_um` is not the whole retina's (a single layer, fluid).
    """
    pits = find_pits(thickness_um if pit_map_um is None else pit_map_um, field)
    centre, *rivals = ((float(x), float(y)) for x, y in pits or [field.centre])
    kind: Centre = "pit" if pits else "scan"
    return measure_around(centre, thickness_um, field, laterality, kind, tuple(rivals))


def measure_around(
    centre_mm: tuple[float, float],
    thickness_um: np.ndarray,
    field: Field,
    laterality: Laterality | None,
    centre: Centre = "device",
    rivals_mm: tuple[tuple[float, float], ...] = (),
) -> EtdrsGrid:
    """The ETDRS grid of a map [D, W] around a given place, x and y in mm; `centre` says what that place is."""
    x, y, zones = _cells(laterality, field.upright)
    values = sample(thickness_um, field, centre_mm[0] + x, centre_mm[1] + y)
    covered = float(np.isfinite(values).mean())
    mean, coverage, apart_mm = {}, {}, {}
    between_mm = field.apart_mm(centre_mm[0] + x, centre_mm[1] + y)
    for name, inside in zones.items():
        mean[name], coverage[name] = _mean(values[inside])
        apart_mm[name] = float(np.quantile(between_mm[inside], LEAST_COVERED, method="lower"))
    area = np.pi * RINGS_MM[-1] ** 2
    volume = float(np.nanmean(values)) / 1000 * area if covered >= LEAST_COVERED else None
    sampling_um = _sampling_um(centre_mm, thickness_um, field, laterality)
    return EtdrsGrid(mean, coverage, apart_mm, volume, centre, centre_mm, rivals_mm, field.per_mm, sampling_um)


def means_around(
    centre_mm: tuple[float, float], values_um: np.ndarray, field: Field, laterality: Laterality | None
) -> dict[str, float | None]:
    """`EtdrsGrid.mean_um` of a map [D, W] around a given place, faster than the whole grid."""
    x, y, zones = _cells(laterality, field.upright)
    values = sample(values_um, field, centre_mm[0] + x, centre_mm[1] + y)
    return {name: _mean(values[inside])[0] for name, inside in zones.items()}


@cache
def _cells(laterality: Laterality | None, upright: bool) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Positions x and y of the cells of a grid relative to its centre, and the places in them of those of each zone."""
    axis = np.arange(-RINGS_MM[-1] + CELL_MM / 2, RINGS_MM[-1], CELL_MM)
    x, y = np.meshgrid(axis, axis)
    whole = np.hypot(x, y) < RINGS_MM[-1]
    x, y = x[whole], y[whole]
    return x, y, {name: np.flatnonzero(inside) for name, inside in zones_at(x, y, laterality, upright).items()}


def _mean(values: np.ndarray) -> tuple[float | None, float]:
    """The mean of a zone, None if less than `LEAST_COVERED` of it was measured, and the measured share."""
    known = np.isfinite(values)
    coverage = float(known.mean())
    return float(values[known].mean()) if coverage >= LEAST_COVERED else None, coverage


def _sampling_um(
    centre_mm: tuple[float, float], thickness_um: np.ndarray, field: Field, laterality: Laterality | None
) -> dict[str, float]:
    """`EtdrsGrid.sampling_um`."""
    thickness_um, field = _bridged(thickness_um, field)
    ascans_mm = field.starts_mm[:, None] + field.ascan_mm * np.arange(field.columns)
    (x0, y0), (ax, ay), (bx, by) = field.origin - centre_mm, field.along, field.across
    bscans_mm = field.bscans_mm[:, None]
    zones = zones_at(
        x0 + ax * ascans_mm + bx * bscans_mm, y0 + ay * ascans_mm + by * bscans_mm, laterality, field.upright
    )
    before, here, after = bscans_mm[:-2], bscans_mm[1:-1], bscans_mm[2:]
    share = (here - before) / (after - before)
    off_um = thickness_um[1:-1] - (1 - share) * thickness_um[:-2] - share * thickness_um[2:]
    sampling_um = {}
    for name, inside in zones.items():
        known = inside[1:-1] & np.isfinite(off_um)
        count = known.sum(axis=1)
        lines_um = np.where(known, off_um, 0.0).sum(axis=1)[count > 0] / count[count > 0]
        sampling_um[name] = float(0.5 * np.sqrt(np.mean(lines_um**2) / len(lines_um))) if len(lines_um) else 0.0
    return sampling_um


def zones_at(x: np.ndarray, y: np.ndarray, laterality: Laterality | None, upright: bool) -> dict[str, np.ndarray]:
    """Zone → bool mask over positions relative to the fovea."""
    r = np.hypot(x, y)
    right, left = SIDES[laterality]
    sideways = np.abs(x) > np.abs(y)
    quadrants = {right: sideways & (x > 0), left: sideways & (x < 0)}
    if upright:
        quadrants |= {"superior": ~sideways & (y < 0), "inferior": ~sideways & (y >= 0)}
    zones = {"centre": r < RINGS_MM[0]}
    for ring, inner, outer in (("inner", *RINGS_MM[:2]), ("outer", *RINGS_MM[1:])):
        band = (r >= inner) & (r < outer)
        zones |= {f"{ring} {side}": band & inside for side, inside in quadrants.items()}
    order = {name: i for i, name in enumerate(ZONES)}
    return dict(sorted(zones.items(), key=lambda item: order.get(item[0], len(order))))
