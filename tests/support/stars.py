"""Radial scans cut out of a raster volume, and as DICOM files."""

from dataclasses import replace

import numpy as np
from scipy.ndimage import map_coordinates

from octfm.volume.volume import Lines, Volume
from support.dicom_files import item, write_oct_dicom

RADIUS_MM, FUNDUS_MM = 2.4, 0.0115
"""Of the stars here, and of a pixel of their fundus image."""
CENTRE_MM = np.array([3.4, 3.1])


def lines_of(count: int, turn: float = 0.1) -> Lines:
    angle = turn + np.pi * np.arange(count) / count
    along = RADIUS_MM * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return Lines(CENTRE_MM - along, CENTRE_MM + along)


def scanned(eye: Volume, lines: Lines, columns: int = 384, motion_px=0.0, seed: int = 0) -> Volume:
    """The star that these lines on the fundus cut out of a raster, B-scan by B-scan, each displaced by eye motion."""
    depth, height, width = eye.shape
    dz, _, dx = eye.spacing_mm
    share = np.linspace(0, 1, columns)[:, None]
    planes = []
    for start, end, move in zip(
        lines.start, lines.end, np.random.default_rng(seed).normal(0, 1, len(lines.start)), strict=True
    ):
        x, y = ((1 - share) * start + share * end - CENTRE_MM).T
        rows = np.arange(height)[:, None] - move * motion_px
        at = np.broadcast_arrays((depth - 1) / 2 + y / dz, rows, (width - 1) / 2 + x / dx)
        planes.append(map_coordinates(eye.voxels, at, np.float32, order=1, mode="nearest"))
    spacing_mm = (mm := 2 * RADIUS_MM / (columns - 1), eye.spacing_mm[1], mm)
    voxels = np.rint(planes).astype(np.uint8)
    return replace(eye, voxels=voxels, spacing_mm=spacing_mm, layout="radial", lines=lines, superior_first=None)


def write_star(path, star: Volume, where="fundus", circles: int = 0, **options):
    """Positions as the instrument writes them: on the fundus image, or in the patient; circles around the star on
    the image only."""
    voxels = np.concatenate([star.voxels, star.voxels[:circles][:, :, ::-1]])

    def positions(dataset):
        frames = dataset.PerFrameFunctionalGroupsSequence
        for frame, start, end in zip(frames, star.lines.start, star.lines.end, strict=False):
            if where == "fundus":
                ends = [float(v) for (x, y) in (start, end) for v in (y / FUNDUS_MM, x / FUNDUS_MM)]
                frame.OphthalmicFrameLocationSequence = [
                    item(ReferenceCoordinates=ends, OphthalmicImageOrientation="LINEAR")
                ]
            else:
                right, down = (end - start) / np.linalg.norm(end - start)
                frame.PlanePositionSequence = [item(ImagePositionPatient=[float(v) for v in (start[0], 7, -start[1])])]
                frame.PlaneOrientationSequence = [
                    item(ImageOrientationPatient=[float(v) for v in (right, 0, -down, 0, 1, 0)])
                ]
        for number, frame in enumerate(frames[len(star.voxels) :]):
            ring = [(300 + (50 + 9 * number) * f(a)) for a in np.linspace(0, 2 * np.pi, 9) for f in (np.sin, np.cos)]
            frame.OphthalmicFrameLocationSequence = [
                item(ReferenceCoordinates=ring, OphthalmicImageOrientation="NONLINEAR")
            ]

    options = {"protocol": "spectralis_onh_rc_hr", "spacing_in": "per_frame", "laterality": star.laterality} | options
    return write_oct_dicom(path, voxels, star.spacing_mm, edit=positions, **options)
