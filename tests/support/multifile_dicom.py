"""One DICOM volume in several files: concatenations, and series of one file per B-scan."""

from pathlib import Path

import numpy as np
from pydicom import uid

from support.dicom_files import item, write_oct_dicom

SPACING_MM = (0.12, 0.0039, 0.0115)


def cube(d=7, h=40, w=36) -> np.ndarray:
    return (np.arange(d)[:, None, None] * 20 + np.arange(h)[None, :, None] * 2 + np.arange(w)[None, None, :]).astype(
        np.uint8
    )


def concatenation(
    folder: Path, voxels=None, sizes=(3, 2, 2), total=True, edit=None, names="part{}.dcm", **options
) -> list[Path]:
    """One acquisition cut into parts of `sizes` B-scans; every part has the functional groups of its own frames
    only."""
    voxels = cube() if voxels is None else voxels
    series, source, start, paths = uid.generate_uid(), uid.generate_uid(), 0, []
    for number, size in enumerate(sizes, start=1):
        own = slice(start, start + size)

        def part(dataset, own=own, number=number, start=start):
            dataset.ConcatenationUID, dataset.InConcatenationNumber, dataset.ConcatenationFrameOffsetNumber = (
                series,
                number,
                start,
            )
            dataset.SOPInstanceUIDOfConcatenationSource = source
            if total:
                dataset.InConcatenationTotalNumber = len(sizes)
            for frame, place in zip(dataset.PerFrameFunctionalGroupsSequence, range(own.start, own.stop), strict=True):
                frame.PlanePositionSequence = [item(ImagePositionPatient=[0, 0, round(-place * SPACING_MM[0], 6)])]
            if edit:
                edit(dataset, number)

        paths.append(
            write_oct_dicom(
                folder / names.format(number), voxels[own], SPACING_MM, superior_first=True, edit=part, **options
            )
        )
        start += size
    return paths


def series(
    folder: Path, voxels=None, *, order=None, positions=True, numbers=True, enhanced=True, edit=None
) -> list[Path]:
    """One file per B-scan. `order`: which B-scan is stored first, second, ...; not `enhanced`: attributes at the top
    level, no groups."""
    voxels = cube() if voxels is None else voxels
    one, paths = uid.generate_uid(), []
    for number, place in enumerate(order or range(len(voxels)), start=1):

        def single(dataset, place=place, number=number):
            dataset.SeriesInstanceUID = one
            if numbers:
                dataset.InstanceNumber = number
            where = [0, 0, round(-place * SPACING_MM[0], 6)]
            measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
            if enhanced:
                if positions:
                    dataset.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence = [
                        item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])
                    ]
                    dataset.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence = [
                        item(ImagePositionPatient=where)
                    ]
            else:
                del (
                    dataset.SharedFunctionalGroupsSequence,
                    dataset.PerFrameFunctionalGroupsSequence,
                    dataset.NumberOfFrames,
                )
                dataset.PixelSpacing, dataset.SliceThickness = measures.PixelSpacing, measures.SliceThickness
                if positions:
                    dataset.ImagePositionPatient, dataset.ImageOrientationPatient = where, [1, 0, 0, 0, 1, 0]
            if edit:
                edit(dataset, place)

        # Names that people count and computers do not: IM2 before IM10.
        paths.append(write_oct_dicom(folder / f"IM{number}", voxels[place : place + 1], SPACING_MM, edit=single))
    return paths
