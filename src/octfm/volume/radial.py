"""Convert radial scans (stars: B-scans that cross at one point, each at its own angle) to rasters.

A star has angles between B-scans instead of a distance, so it does not fit on a grid in mm. Each A-scan of the raster
is interpolated between the two nearest B-scans of the star, after eye motion is removed, and along the retina: A-scans
are shifted by the height of the retina before they are averaged, so that layers are not blurred.
"""

from dataclasses import dataclass, replace

import numpy as np

from octfm.errors import ReadError
from octfm.volume.registration import register_star
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Lines, Volume, in_eight_bits

BSCAN_MM = 0.05
"""Distance between the B-scans of the raster: as in most cubes, and half of Preprocessing's default target_spacing."""

WIDEST_GAP_MM = 0.5
"""The raster ends where B-scans of the star are further apart: no A-scan is further than half of this from one."""

LEAST_RADIUS_MM = 1.0
"""Smallest usable radius of the raster: less shows neither a fovea nor an optic disc. Seven lines reach it."""

CROSSING_MM = 0.15
"""Within this distance of the centre all B-scans show the same tissue, whatever their angle."""

CENTRE_MM = 0.2
"""Largest distance of a line from the star's centre; eye tracking leaves some tens of micrometres."""


@dataclass(frozen=True, eq=False)
class Star:
    """Geometry of the straight B-scans of a radial scan, in the order of their angles."""

    used: np.ndarray
    """int64 [J] index of each B-scan in the volume; circles around a star are left out."""
    backwards: np.ndarray
    """bool [J] whether its A-scans are reversed, so that every angle is in [0, pi)."""
    angle: np.ndarray
    """float64 [J] ascending, radians from the right (x) towards inferior (y)."""
    before: np.ndarray
    """float64 [J] mm from the first A-scan (after reversal) to the centre."""
    length: np.ndarray
    """float64 [J] mm from the first A-scan to the last."""
    radius: float
    """mm around the centre that the raster shows."""


def expect_a_star(lines: Lines | None, uri: str) -> Star:
    """The star that these lines form. Raises ReadError not_raster for lines that cannot be made a raster."""
    if lines is None:
        raise ReadError(
            "not_raster", f"{uri}: a radial scan whose positions are not stated in millimetres on the fundus; left out"
        )
    used = np.flatnonzero(np.isfinite(lines.start).all(1) & np.isfinite(lines.end).all(1))
    direction = lines.end[used] - lines.start[used]
    angle = np.arctan2(direction[:, 1], direction[:, 0])
    # An angle of pi - 1e-9 and one of 0 are the same line.
    backwards = (angle < -1e-6) | (angle >= np.pi - 1e-6)
    order = np.argsort(np.where(backwards, angle - np.pi * np.sign(angle), angle), kind="stable")
    used, backwards = used[order], backwards[order]
    direction = direction[order] * np.where(backwards, -1, 1)[:, None]
    start = np.where(backwards[:, None], lines.end[used], lines.start[used])
    length = np.linalg.norm(direction, axis=1)
    if len(used) < 2 or length.min() < 1e-3:
        raise ReadError("not_raster", f"{uri}: a radial scan of {len(used)} straight B-scans; left out")
    along = direction / length[:, None]
    across = along[:, ::-1] * (-1, 1)
    # The centre is the point with the smallest sum of squared distances from all lines.
    centre, *_ = np.linalg.lstsq(across, (across * start).sum(1), rcond=None)
    missed = float(np.abs(((centre - start) * across).sum(1)).max())
    before = ((centre - start) * along).sum(1)
    angle = np.arctan2(direction[:, 1], direction[:, 0]).clip(0)
    gap = float(np.diff(angle, append=angle[0] + np.pi).max())
    reach = float(np.minimum(before, length - before).min())
    radius = min(reach, WIDEST_GAP_MM / gap)
    if missed > CENTRE_MM:
        raise ReadError(
            "not_raster", f"{uri}: B-scans turn without crossing at one point ({missed:.2f} mm apart); left out"
        )
    if radius < LEAST_RADIUS_MM:
        raise ReadError(
            "not_raster",
            f"{uri}: a star of {len(used)} B-scans, up to {np.rad2deg(gap):.0f} degrees apart, reaching "
            f"{max(reach, 0):.2f} mm from its centre; neighbours are less than {WIDEST_GAP_MM:g} mm apart "
            f"within a radius of {max(radius, 0):.2f} mm, expected {LEAST_RADIUS_MM:g}; left out",
        )
    once = np.append(np.diff(angle) > 1e-3, True)  # keep the last of lines scanned repeatedly
    return Star(used[once], backwards[once], angle[once], before[once], length[once], radius)


def to_raster(volume: Volume) -> Volume:
    """Make a radial scan a square raster around its centre, B-scan 0 superior, A-scans left to right on the fundus.

    A-scans further out than `Star.radius` are 0, which everything downstream treats as padding. Raises ReadError
    not_raster.
    """
    star = expect_a_star(volume.lines, volume.source)
    planes = volume.voxels[star.used]
    # Selecting by index has copied the B-scans, so the volume itself is not changed.
    planes[star.backwards] = planes[star.backwards][:, :, ::-1]
    (_, dy, dx), (_, height, width) = volume.spacing_mm, planes.shape
    motion, follow = _heights(planes, star, dy, dx, volume.full_scale)
    depth, columns = (2 * int(star.radius / mm) + 1 for mm in (BSCAN_MM, dx))
    x = (np.arange(columns) - columns // 2) * dx
    # A-scans as rows, so that each is contiguous in memory.
    ascans = np.ascontiguousarray(planes.transpose(0, 2, 1)).reshape(-1, height)
    follow, rows = follow.reshape(-1), np.arange(height)
    out = np.zeros((depth, height, columns), planes.dtype)
    for bscan, y in enumerate((np.arange(depth) - depth // 2) * BSCAN_MM):
        inside = np.flatnonzero(x**2 + y**2 <= star.radius**2)
        pair, share, line = _places(x[inside], y, star, width)
        # The height that the retina has between the two B-scans; both are shifted to it before they are averaged.
        level = (follow[pair] * share).sum(axis=0)
        plane = np.zeros((len(inside), height), np.float32)
        for at, weight, of in zip(pair, share, line, strict=True):
            shift = np.rint(follow[at] - level + motion[of]).astype(int)
            taken = (rows + shift[:, None]).clip(0, height - 1)
            plane += weight[:, None].astype(np.float32) * ascans[at[:, None], taken]
        out[bscan][:, inside] = np.rint(plane).astype(planes.dtype).T
    return replace(volume, voxels=out, spacing_mm=(BSCAN_MM, dy, dx), superior_first=True, layout="raster", lines=None)


def _heights(
    planes_JHW: np.ndarray, star: Star, dy: float, dx: float, full_scale: int
) -> tuple[np.ndarray, np.ndarray]:
    """Axial motion of each B-scan, [J], and row of the retina's middle without that motion, [J, W].

    If the retina is not found, that row is 0 everywhere: A-scans are then averaged without a shift.
    """
    between = float(np.median(np.diff(star.angle))) * star.radius / 2
    eight_bit = in_eight_bits(planes_JHW, full_scale)
    tissue = find_tissue(eight_bit, (between, dy, dx))
    reach = max(1, round(CROSSING_MM / dx))
    middle = np.rint(star.before / star.length * (planes_JHW.shape[2] - 1)).astype(int)
    crossing = [plane[:, at - reach : at + reach + 1].mean(axis=1) for plane, at in zip(eight_bit, middle, strict=True)]
    motion = register_star(np.array(crossing), dy)
    if not tissue.located:
        return motion, np.zeros((len(planes_JHW), planes_JHW.shape[2]))
    return motion, (tissue.ilm.astype(np.float64) + tissue.bm) / 2 - motion[:, None]


def _places(x: np.ndarray, y: float, star: Star, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The two nearest A-scans of each place, [2, N] counted through all B-scans; their weights; and their B-scans."""
    angle, radius = np.arctan2(y, x), np.hypot(x, y)
    other_end = (angle < 0) | (angle >= np.pi)
    side, angle = np.where(other_end, -1.0, 1.0), angle % np.pi
    lines = len(star.angle)
    after = np.searchsorted(star.angle, angle, side="right")
    line = np.stack([after - 1, after])
    # After half a turn the first B-scan comes again, from its other end.
    wraps = np.floor_divide(line, lines)
    line = line - wraps * lines
    at = star.angle[line] + np.pi * wraps
    share = (angle - at[0]) / (at[1] - at[0])
    along = star.before[line] + np.where(wraps == 0, side, -side) * radius
    ascan = np.rint(along / star.length[line] * (width - 1)).astype(int).clip(0, width - 1)
    return line * width + ascan, np.stack([1 - share, share]), line
