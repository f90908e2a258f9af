"""A streamed phantom as `prepare` would leave it: on the prepared grid, with tissue band, valid rows and the truth.

Rendered on that grid at once, which takes a tenth of the time that the scanner's own grid and Preprocessing would. What
Preprocessing undoes is not drawn: motion of B-scans along the beam, the mirroring of left eyes, the order of B-scans.
"""

from dataclasses import dataclass, replace
from math import log

import numpy as np

from octfm.phantom.native.bscans import SURFACES, render_native
from octfm.phantom.native.classes import UNKNOWN, classes_of
from octfm.phantom.native.stream import Stream
from octfm.volume.volume import Shape3, Spacing3


@dataclass(frozen=True, eq=False)
class PreparedPhantom:
    """voxels, band and valid as in `volume.preprocessing.Prepared`."""

    voxels: np.ndarray
    """uint8 [D, H, W]; padding is 0."""
    band: np.ndarray
    """float32 [2, D, W]"""
    valid: np.ndarray
    """int16 [2, D, W]"""
    labels: np.ndarray
    """uint8 [D, H, W]: place in `classes.CLASSES`, UNKNOWN on padding."""


def render_prepared(
    stream: Stream, place: int, image_size: Shape3, spacing_mm: Spacing3, margin_mm: float
) -> PreparedPhantom:
    """The phantom at this place of the stream on a prepared grid; `margin_mm` as in Preprocessing."""
    shot, _, rng = replace(stream, size=image_size).shot(place)
    own = np.random.default_rng([stream.seed, 6, place])
    scanner = shot.scanner
    # A scan smaller than the prepared field is padded, a larger one cropped.
    size = tuple(
        min(n, max(1, round(field / mm))) for n, field, mm in zip(image_size, scanner.field_mm, spacing_mm, strict=True)
    )
    field = tuple(n * mm for n, mm in zip(size, spacing_mm, strict=True))
    # Prepared B-scans are means of the instrument's, whose speckle is independent: of all of them or, as many exports
    # leave B-scans out, of fewer.
    averaged = spacing_mm[0] * scanner.vendor_size[0] / scanner.field_mm[0]
    looks = shot.look.frames_averaged * float(np.exp(own.uniform(0, max(0.0, log(averaged)))))
    still = replace(
        shot.acquisition,
        # What registration leaves: a tenth of a row to a third of one.
        axial_motion_um=own.normal(0, 3.0, size[0]),
        lateral_motion_mm=shot.acquisition.lateral_motion_mm[: size[0]],
        signal_db=shot.acquisition.signal_db[: size[0]],
    )
    shot = replace(
        shot,
        eye=replace(shot.eye, laterality="R"),
        scanner=replace(scanner, field_mm=field, superior_first=True),
        look=replace(shot.look, frames_averaged=looks),
        acquisition=still,
        # Preprocessing lays the crop around the retina, as well as its surfaces are found.
        placement=replace(shot.placement, accident="none", depth=float(own.uniform(0.4, 0.6))),
    )
    image = render_native(shot, rng, size)  # pyright: ignore[reportArgumentType]
    ilm, bm = (image.surfaces[SURFACES.index(name)] for name in ("ilm", "bm"))
    rows, margin = size[1], margin_mm / spacing_mm[1]
    # A surface that has left the image is at its edge; with neither surface, all rows count, as without a band.
    upper = np.clip(np.where(np.isnan(ilm), 0, ilm - margin), 0, rows)
    lower = np.clip(np.where(np.isnan(bm), rows, bm + margin), 0, rows)
    return _padded(image.voxels, np.stack([upper, lower]), classes_of(image), image_size)


def _padded(voxels: np.ndarray, band: np.ndarray, labels: np.ndarray, image_size: Shape3) -> PreparedPhantom:
    depth, height, width = image_size
    (d, h, w), first = voxels.shape, tuple((n - m) // 2 for n, m in zip(image_size, voxels.shape, strict=True))
    at = tuple(slice(start, start + n) for start, n in zip(first, (d, h, w), strict=True))
    across = (slice(None), at[0], at[2])
    out = PreparedPhantom(
        np.zeros(image_size, np.uint8),
        np.zeros((2, depth, width), np.float32),
        np.zeros((2, depth, width), np.int16),
        np.full((depth, height, width), UNKNOWN, np.uint8),
    )
    out.voxels[at], out.labels[at] = voxels, labels
    out.band[across] = band + first[1]
    out.valid[across] = np.array([first[1], first[1] + h])[:, None, None]
    return out
