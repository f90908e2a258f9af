"""Defective DICOM files of the kinds found in archives, each with the reason code that `octfm scan` must report.

Most kinds have several forms, one of them drawn at random: a reader that handles only the commonest form fails the
tests.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from pydicom.dataset import Dataset
from pydicom.uid import UID

from octfm.phantom.dicom import set_pixels, to_bytes

OCT_ANGIOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.8"
UNDECODABLE = (
    "1.2.840.10008.1.2.4.94",  # JPIP Referenced
    "1.2.840.10008.1.2.4.102",  # MPEG-4 video
    "1.2.840.113619.5.2",  # a vendor's own
)


@dataclass(frozen=True)
class Defect:
    """One kind of defective file, and how `octfm scan` must treat it."""

    kind: str
    code: str
    """Reason code in rejects.parquet, or the flag of the accepted row."""
    outcome: Literal["rejected", "skipped", "flagged"] = "rejected"
    """What scan does: reject the file, skip it as expected, or accept it with a flag."""
    rescanned: bool = False
    """The file holds a second scan of the same eye, not the good file's voxels."""
    same_uid: bool = False
    """The file has the SOP Instance UID of the good one, and the manifest does not list it."""


DEFECTS = (
    Defect("zero_bytes", "empty_file"),
    Defect("not_dicom", "not_dicom"),
    Defect("truncated_encapsulated", "truncated_pixel_data"),
    Defect("no_pixel_data", "missing_pixel_data"),
    Defect("wrong_number_of_frames", "frame_count_mismatch"),
    Defect("unknown_transfer_syntax", "unsupported_transfer_syntax"),
    Defect("no_spacing", "missing_spacing"),
    Defect("absurd_spacing", "absurd_spacing"),
    Defect("blank", "blank_volume"),
    Defect("duplicate_sop_uid", "duplicate_sop_uid", same_uid=True),
    Defect("reused_sop_uid", "reused_sop_uid", rescanned=True, same_uid=True),
    Defect("wrong_laterality", "laterality_conflict", "flagged", rescanned=True),
    Defect("angiography", "angiography", "skipped"),
)


def spoil(ds: Dataset, voxels: np.ndarray, kind: str, rng: np.random.Generator) -> bytes:
    """The bytes of a file with exactly this one defect. `ds` is modified; do not use it afterwards."""
    if kind == "zero_bytes":
        return b""
    if kind == "not_dicom":
        return _other_content(rng)
    if kind == "truncated_encapsulated":
        return _cut(ds, voxels, rng)
    if kind == "no_pixel_data":
        if rng.random() < 0.5:
            del ds.PixelData
        else:
            ds.PixelData = b""
    elif kind == "wrong_number_of_frames":
        # More frames than there are, or fewer; at fewer most readers only warn, and lose B-scans.
        ds.NumberOfFrames = len(voxels) + (3 if rng.random() < 0.5 else -max(1, len(voxels) // 4))
        set_pixels(ds, voxels, rle=rng.random() < 0.5)
    elif kind == "unknown_transfer_syntax":
        set_pixels(ds, voxels, rle=True)
        ds.file_meta.TransferSyntaxUID = UID(UNDECODABLE[rng.integers(len(UNDECODABLE))])
    elif kind == "no_spacing":
        # B-scan spacing could also be derived from frame positions, so those go as well.
        del ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence
        for frame in ds.PerFrameFunctionalGroupsSequence:
            del frame.PlanePositionSequence
            del frame.OphthalmicFrameLocationSequence
    elif kind == "absurd_spacing":
        measures = ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        micrometres = [round(1000 * float(mm), 4) for mm in measures.PixelSpacing]
        # A default that nobody filled in, zeros, and micrometres in a field of millimetres.
        measures.PixelSpacing = ([1, 1], [0, 0], micrometres)[rng.integers(3)]
    elif kind == "blank":
        set_pixels(ds, np.full_like(voxels, rng.choice([0, 17, 255])), rle=rng.random() < 0.5)
    elif kind == "angiography":
        ds.SOPClassUID = OCT_ANGIOGRAPHY
        set_pixels(ds, voxels, rle=False)
    elif kind == "duplicate_sop_uid":
        # Half of the copies are compressed differently: the same voxels in other bytes.
        set_pixels(ds, voxels, rle=rng.random() < 0.5)
    elif kind not in ("reused_sop_uid", "wrong_laterality"):  # defects relative to another file
        raise ValueError(f"unknown kind of defect {kind!r}, expected one of {', '.join(d.kind for d in DEFECTS)}")
    return to_bytes(ds)


def _other_content(rng: np.random.Generator) -> bytes:
    """What a failed download or a wrong export leaves in place of the image: an error page, a GIF, zeros."""
    page = b"<html><body>503 Service Unavailable: the download did not finish</body></html>\n" * 40
    picture = b"GIF89a" + rng.bytes(2000)
    return (page, picture, bytes(4096))[rng.integers(3)]


def _cut(ds: Dataset, voxels: np.ndarray, rng: np.random.Generator) -> bytes:
    """Truncate encapsulated pixel data anywhere: within a fragment, between two, or inside the end marker."""
    set_pixels(ds, voxels, rle=True)
    whole = to_bytes(ds)
    # The header of PixelData: tag (7FE0,0010), VR OB, two reserved bytes, undefined length.
    start = whole.rindex(b"\xe0\x7f\x10\x00OB\x00\x00\xff\xff\xff\xff") + 12
    return whole[: int(rng.integers(start, len(whole)))]
