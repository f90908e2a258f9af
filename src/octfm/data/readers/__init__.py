"""Files to Volumes: the format is decided by content, never by name, and what cannot be read has a reason code."""

from dataclasses import dataclass
from pathlib import Path

from octfm.data.volume import Laterality, Shape3, Spacing3, Volume
from octfm.errors import ReadError

REASONS: dict[str, str] = {
    "empty_file": "the file has no bytes; fetch it again",
    "unreadable": "the file system or the DICOM parser failed on it; check permissions and the disk, fetch it again",
    "not_dicom": "the content is of no format that octfm reads; remove it, or convert it to DICOM Ophthalmic Tomography",
    "not_oct": "DICOM, but a photograph, OCTA, layer heights or another object; nothing to fix, it is left out on purpose",
    "not_raster": "radial, circular or repeated B-scans do not form a volume; nothing to fix, they are left out on purpose",
    "missing_sop_uid": "without a SOP Instance UID an acquisition cannot be told from its copies; export it again",
    "missing_pixel_data": "the header is complete but there are no pixels; export it again with images",
    "truncated_pixel_data": "the file ends before its pixels do, so the transfer was cut; fetch it again",
    "frame_count_mismatch": "NumberOfFrames differs from the B-scans that are there; export it again, which frames are meant is a guess",
    "absurd_size": "rows, columns or frames are zero or beyond any OCT instrument; the header is damaged, export it again",
    "unsupported_pixels": "colour, signed, floating-point or neither 8 nor 16 bit; export 8- or 16-bit grayscale",
    "unsupported_transfer_syntax": "no installed decoder knows this compression; transcode it, for example with gdcmconv --raw",
    "decode_failed": "every installed decoder refused the compressed pixels; fetch it again, or transcode it",
    "missing_spacing": "no millimetres in shared, per-frame or top-level attributes nor in frame positions; add PixelSpacing",
    "absurd_spacing": "the millimetres fit no OCT instrument (1, 1, 1 is a placeholder); correct PixelSpacing and SliceThickness",
    "blank_volume": "every voxel has the same value; nothing was imaged, or the export failed",
    "duplicate_sop_uid": "the same acquisition is already in the catalog; remove the copy",
}
"""Reason code -> what it means and what would fix it. The one list; rejects.parquet and the report use no other code."""


@dataclass(frozen=True)
class Header:
    """What is known about an acquisition before its pixels are decoded."""

    uri: str
    shape: Shape3
    spacing_mm: Spacing3
    spacing_source: str
    """Where (dz, dy, dx) came from: shared, per_frame or top_level; `+positions` or `+field_of_view` when dz came from there."""
    laterality: Laterality | None
    scanner: str
    """Canonical slug, or unknown."""
    protocol: str
    participant: str | None
    """PatientID; None where the header has none."""
    sop_instance_uid: str
    superior_first: bool | None
    flags: tuple[str, ...] = ()


def read_volume(uri: str | Path) -> Volume:
    """The Volume in a file, whatever its name is. Raises ReadError with one of REASONS."""
    from octfm.data.readers import dicom  # pydicom stays out of the training path

    return dicom.read_dicom(uri)


def read_header(uri: str | Path) -> Header:
    """Everything `read_volume` would know, without decoding: cheap, and it still finds cut files. Raises ReadError."""
    from octfm.data.readers import dicom

    return dicom.read_header(uri)


__all__ = ["REASONS", "Header", "ReadError", "read_header", "read_volume"]
