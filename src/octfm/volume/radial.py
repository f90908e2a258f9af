"""Stars: B-scans that cross at one point, each at its own angle, made into a raster in which millimetres mean what they say.

A star has no distance between B-scans but an angle, so a grid in mm has no place for it as it is. Its A-scans are therefore interpolated
between the two B-scans on either side of each place of a raster, after eye motion is taken out and along the retina, not across it.
"""

from dataclasses import dataclass, replace

import numpy as np

from octfm.errors import ReadError
from octfm.volume.planes import Planes
from octfm.volume.registration import register_star
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Lines, Volume

BSCAN_MM = 0.05
"""Distance between the B-scans of the raster: that of most cubes, and half of what Preprocessing asks for by default."""

WIDEST_GAP_MM = 0.5
"""The raster ends where neighbouring B-scans of the star lie further apart: nothing is more than half of this from what was scanned."""

LEAST_RADIUS_MM = 1.0
"""A star of so few lines that it ends sooner shows neither a fovea nor an optic disc. Seven lines do."""

CROSSING_MM = 0.15
"""So near to the centre all B-scans show the same, whatever their angle."""

CENTRE_MM = 0.2
"""Lines of a star pass its centre at most this far away; eye tracking leaves some tens of micrometres."""


@dataclass(frozen=True, eq=False)
class Star:
    """Straight B-scans in the order of their angles."""

    used: np.ndarray
    """int64 [J]: which B-scans; circles around a star are not among them."""
    backwards: np.ndarray
    """bool [J]: stored from the end; turned round, every angle is in [0, pi)."""
    angle: np.ndarray
    """float64 [J], ascending, radians from the right (x) towards inferior (y)."""
    before: np.ndarray
    """float64 [J], mm from the first A-scan (turned round) to the centre."""
    length: np.ndarray
    """float64 [J], mm from the first A-scan to the last."""
    radius: float
    """mm around the centre that the raster shows."""


def expect_a_star(lines: Lines | None, uri: str) -> Star:
    """Raises ReadError not_raster for B-scans that no raster can be made of."""
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
    used, backwards, direction = (
        used[order],
        backwards[order],
        direction[order] * np.where(backwards[order], -1, 1)[:, None],
    )
    start = np.where(backwards[:, None], lines.end[used], lines.start[used])
    length = np.linalg.norm(direction, axis=1)
    if len(used) < 2 or length.min() < 1e-3:
        raise ReadError("not_raster", f"{uri}: a radial scan of {len(used)} straight B-scans; left out")
    along = direction / length[:, None]
    across = along[:, ::-1] * (-1, 1)
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
            f"{uri}: a star of {len(used)} B-scans, up to {np.rad2deg(gap):.0f} degrees apart, reaching {max(reach, 0):.2f} mm from its "
            f"centre; what lies less than {WIDEST_GAP_MM:g} mm between two of them is {max(radius, 0):.2f} mm wide, expected "
            f"{LEAST_RADIUS_MM:g}; left out",
        )
    once = np.append(np.diff(angle) > 1e-3, True)  # of a line that was scanned again, the last
    return Star(used[once], backwards[once], angle[once], before[once], length[once], radius)


def to_raster(volume: Volume) -> Volume:
    """The raster that a radial scan shows: B-scan 0 superior, A-scans from left to right of the fundus image, square around the centre.

    Places further out than `Star.radius` are 0, which everything downstream takes for padding. Raises ReadError not_raster.
    """
    star = expect_a_star(volume.lines, volume.source)
    planes = volume.voxels[star.used]
    planes[star.backwards] = planes[star.backwards][:, :, ::-1]
    (_, dy, dx), (_, height, width) = volume.spacing_mm, planes.shape
    motion, follow = _heights(planes, star, dy, dx, volume.full_scale)
    depth, columns = (2 * int(star.radius / mm) + 1 for mm in (BSCAN_MM, dx))
    x = (np.arange(columns) - columns // 2) * dx
    # A-scans as rows: each is taken as one piece.
    ascans = np.ascontiguousarray(planes.transpose(0, 2, 1)).reshape(-1, height)
    follow, rows = follow.reshape(-1), np.arange(height)
    out = np.zeros((depth, height, columns), planes.dtype)
    for bscan, y in enumerate((np.arange(depth) - depth // 2) * BSCAN_MM):
        inside = np.flatnonzero(x**2 + y**2 <= star.radius**2)
        pair, share, line = _places(x[inside], y, star, width)
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
    """Axial motion of each B-scan, [J], and how high the retina stands in it without that motion, [J, W], both in rows.

    Where the retina is not found, the height is 0 everywhere: interpolation is then straight across.
    """
    between = float(np.median(np.diff(star.angle))) * star.radius / 2
    eight_bit = planes_JHW if planes_JHW.dtype == np.uint8 else Planes(planes_JHW, full_scale)
    tissue = find_tissue(eight_bit, (between, dy, dx))
    reach, middle = (
        max(1, round(CROSSING_MM / dx)),
        np.rint(star.before / star.length * (planes_JHW.shape[2] - 1)).astype(int),
    )
    crossing = [plane[:, at - reach : at + reach + 1].mean(axis=1) for plane, at in zip(eight_bit, middle, strict=True)]
    motion = register_star(np.array(crossing), dy)
    if not tissue.located:
        return motion, np.zeros((len(planes_JHW), planes_JHW.shape[2]))
    return motion, (tissue.ilm.astype(np.float64) + tissue.bm) / 2 - motion[:, None]


def _places(x: np.ndarray, y: float, star: Star, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The A-scans [2, N] (counted through all B-scans) on either side of each place, their shares, and the B-scans they are of."""
    angle, radius = np.arctan2(y, x), np.hypot(x, y)
    other_end = (angle < 0) | (angle >= np.pi)
    side, angle = np.where(other_end, -1.0, 1.0), angle % np.pi
    lines = len(star.angle)
    after = np.searchsorted(star.angle, angle, side="right")
    line = np.stack([after - 1, after])
    # Half a turn on, the first B-scan comes again, seen from its other end.
    wraps = np.floor_divide(line, lines)
    line = line - wraps * lines
    at = star.angle[line] + np.pi * wraps
    share = (angle - at[0]) / (at[1] - at[0])
    along = star.before[line] + np.where(wraps == 0, side, -side) * radius
    ascan = np.rint(along / star.length[line] * (width - 1)).astype(int).clip(0, width - 1)
    return line * width + ascan, np.stack([1 - share, share]), line
