"""Files that are wrong in ways archives are wrong, each with the reason code the catalog must give it."""

from dataclasses import dataclass

import numpy as np
from pydicom.dataset import Dataset

from octfm.data.phantom.dicom import set_pixels, to_bytes

OCT_ANGIOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.8"


@dataclass(frozen=True)
class Defect:
    kind: str
    code: str
    """Reason code of readers.read_volume and of rejects.parquet."""


DEFECTS = (
    Defect("zero_bytes", "empty_file"),
    Defect("not_dicom", "not_dicom"),
    Defect("truncated_encapsulated", "truncated_pixel_data"),
    Defect("no_pixel_data", "missing_pixel_data"),
    Defect("wrong_number_of_frames", "frame_count_mismatch"),
    Defect("no_spacing", "missing_spacing"),
    Defect("absurd_spacing", "absurd_spacing"),
    Defect("blank", "blank_volume"),
    Defect("angiography", "not_oct"),
)


def spoil(ds: Dataset, voxels: np.ndarray, kind: str, rng: np.random.Generator) -> bytes:
    """The bytes of a file that is defective in exactly this one way. `ds` is changed and should be thrown away."""
    if kind == "zero_bytes":
        return b""
    if kind == "not_dicom":
        return b"<html><body>503 Service Unavailable: the download did not finish</body></html>\n" * 40
    if kind == "truncated_encapsulated":
        set_pixels(ds, voxels, rle=True)
        whole = to_bytes(ds)
        return whole[: int(len(whole) * rng.uniform(0.3, 0.9))]
    if kind == "no_pixel_data":
        del ds.PixelData
    elif kind == "wrong_number_of_frames":
        # More than there are, or fewer: the latter only warns in most readers and loses B-scans.
        ds.NumberOfFrames = len(voxels) + (3 if rng.random() < 0.5 else -max(1, len(voxels) // 4))
        set_pixels(ds, voxels, rle=False)
    elif kind == "no_spacing":
        del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
        for frame in ds.PerFrameFunctionalGroupsSequence:
            del frame.PlanePositionSequence
            del frame.OphthalmicFrameLocationSequence
    elif kind == "absurd_spacing":
        ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [1, 1]
    elif kind == "blank":
        set_pixels(ds, np.zeros_like(voxels), rle=False)
    elif kind == "angiography":
        ds.SOPClassUID = OCT_ANGIOGRAPHY
        set_pixels(ds, voxels, rle=False)
    else:
        raise ValueError(f"defect {kind!r}: known kinds are {', '.join(d.kind for d in DEFECTS)}")
    return to_bytes(ds)
