"""A streamed phantom as `prepare` would leave it: on the prepared grid, with tissue band, valid rows and the truth.

Rendered directly on that grid, in a tenth of the time that the scanner's own grid and Preprocessing would take. What
Preprocessing undoes is not drawn: motion of B-scans along the beam, the mirroring of left eyes, the order of B-scans.
"""

from dataclasses import dataclass, replace
from math import log

import numpy as np

from octfm.phantom.native.bscans import SURFACES, Labelled, render_native
from octfm.phantom.native.outer_retina import DETACHMENT, MATERIAL
from octfm.phantom.native.stream import Stream
from octfm.phantom.pathology import LESIONS
from octfm.volume.segmentation import BORDERS, CLASSES, LESION_CLASSES, UNKNOWN
from octfm.volume.volume import Shape3, Spacing3

_VALUES = LESIONS | {"detachment": DETACHMENT, "subretinal_material": MATERIAL}


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
    """uint8 [D, H, W]: place in octfm.volume.segmentation, UNKNOWN on padding."""


def render_prepared(
    stream: Stream, place: int, image_size: Shape3, spacing_mm: Spacing3, margin_mm: float
) -> PreparedPhantom:
    """The phantom at this place of the stream on a prepared grid; `margin_mm` as in Preprocessing."""
    shot, _, rng = replace(stream, size=image_size).shot(place)
    own = np.random.default_rng([stream.seed, 6, place])
    scanner, (depth, height, width) = shot.scanner, image_size
    dz, dy, dx = spacing_mm
    # A scan smaller than the prepared field is padded, a larger one cropped.
    bscans, ascans = (
        min(n, max(1, round(mm / step)))
        for n, mm, step in ((depth, scanner.field_mm[0], dz), (width, scanner.field_mm[2], dx))
    )
    # A prepared B-scan is the mean of several of the instrument's, whose speckle is independent. Many exports leave
    # B-scans out, so the number is drawn, up to all of them.
    averaged = dz * scanner.vendor_size[0] / scanner.field_mm[0] if depth > 1 else 1.0
    looks = shot.look.frames_averaged * float(np.exp(own.uniform(0, max(0.0, log(averaged)))))
    # Motion is that of B-scans against each other; a single one has none.
    motion_um = shot.acquisition.axial_motion_um[:bscans] if depth > 1 else np.zeros(1)
    crop_mm = height * dy
    start_mm, position = _crop(shot.placement.depth, scanner.field_mm[1], crop_mm)
    shot = replace(
        shot,
        eye=replace(shot.eye, laterality="R"),
        scanner=replace(scanner, field_mm=(bscans * dz, crop_mm, ascans * dx), superior_first=True),
        look=replace(shot.look, frames_averaged=looks),
        acquisition=replace(
            shot.acquisition,
            # What registration leaves.
            axial_motion_um=own.normal(0, 3.0, bscans),
            lateral_motion_mm=shot.acquisition.lateral_motion_mm[:bscans],
            signal_db=shot.acquisition.signal_db[:bscans],
        ),
        placement=replace(shot.placement, accident="none", depth=position),
    )
    image = render_native(shot, rng, (bscans, height, ascans))
    # Registration moves the edges of the frame, with the B-scans, against the crop.
    edges = (np.array([0, scanner.field_mm[1]])[:, None] - start_mm - motion_um / 1000) / dy
    valid = np.repeat(np.rint(edges).clip(0, height).astype(np.int16)[:, :, None], ascans, axis=2)
    ilm, bm = (image.surfaces[SURFACES.index(name)] for name in ("ilm", "bm"))
    margin = margin_mm / dy
    # A surface that has left the image is at its edge; with neither surface, all rows count, as without a band.
    band = np.stack([np.where(np.isnan(ilm), 0, ilm - margin), np.where(np.isnan(bm), height, bm + margin)])
    row = np.arange(height)[:, None]
    shown = (row >= valid[0][:, None]) & (row < valid[1][:, None])
    out = PreparedPhantom(
        np.zeros(image_size, np.uint8),
        np.zeros((2, depth, width), np.float32),
        np.zeros((2, depth, width), np.int16),
        np.full(image_size, UNKNOWN, np.uint8),
    )
    d, w = (slice((n - m) // 2, (n - m) // 2 + m) for n, m in ((depth, bscans), (width, ascans)))
    out.voxels[d, :, w] = image.voxels * shown
    out.labels[d, :, w] = np.where(shown, classes_of(image), UNKNOWN)
    out.band[:, d, w], out.valid[:, d, w] = band.clip(valid[0], valid[1]), valid
    return out


SCAN_MM, CROP_MM = 0.9, 0.55
"""Depth that the retina takes in a whole scan and in a crop of it, tilt and curvature included: they decide where in
the frame it may lie, and how far a crop can centre it."""


def _crop(depth: float, frame_mm: float, crop_mm: float) -> tuple[float, float]:
    """Where the crop begins in the frame, in mm, and the depth of the retina in the crop, as in `Placement`.

    As Preprocessing does it: the retina in the middle, unless image would be cropped where there is padding.
    """

    def room(field_mm: float, taken_mm: float) -> float:
        # The margins of Placement, 40 µm above and 100 µm below.
        return max(field_mm - taken_mm - 0.14, 1e-6)

    middle = 0.04 + SCAN_MM / 2 + depth * room(frame_mm, SCAN_MM)
    spare = frame_mm - crop_mm
    start = min(max(middle - crop_mm / 2, min(0.0, spare)), max(0.0, spare))
    return start, min(max((middle - start - 0.04 - CROP_MM / 2) / room(crop_mm, CROP_MM), 0.0), 1.0)


def classes_of(image: Labelled) -> np.ndarray:
    """uint8 [D, H, W]: the place in CLASSES of every voxel, by true surfaces and lesions; UNKNOWN without truth."""
    borders = image.surfaces[[SURFACES.index(name) for name in BORDERS]]
    found = np.isfinite(borders)
    # Surfaces do not cross: one that is missing below a visible one has left the image at its lower edge.
    outside = np.where(np.maximum.accumulate(found, axis=0), np.inf, -np.inf)
    borders = np.where(found, borders, outside).astype(np.float32)
    row = np.arange(image.voxels.shape[1], dtype=np.float32)[:, None]
    classes = np.zeros(image.voxels.shape, np.uint8)
    for border in borders:
        classes += row >= border[:, None]
    for place in LESION_CLASSES:
        classes[image.lesions == _VALUES[CLASSES[place]]] = place
    return np.where(found.any(0)[:, None], classes, np.uint8(UNKNOWN))  # pyright: ignore[reportIndexIssue]  (an array)
