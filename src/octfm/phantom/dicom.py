"""Write a phantom volume as an Ophthalmic Tomography DICOM file.

As in AI-READI files, geometry is in the shared and per-frame functional groups (PixelMeasures, PlanePosition,
OphthalmicFrameLocation), not in the top-level attributes.
"""

import struct
from io import BytesIO

import numpy as np
from pydicom.charset import convert_encodings
from pydicom.dataelem import RawDataElement
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.sequence import Sequence
from pydicom.tag import Tag
from pydicom.uid import ExplicitVRLittleEndian, JPEGLSLossless, RLELossless, generate_uid

from octfm.phantom.cohort import Participant
from octfm.phantom.scanner import Compression, Scanner
from octfm.volume.volume import Volume

OPHTHALMIC_TOMOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
# A constant, so that bytes do not change with the version of the library that writes them.
IMPLEMENTATION_UID = generate_uid(entropy_srcs=["octfm phantom implementation"])


def uid(*parts: object) -> str:
    """A UID derived from these parts by a hash."""
    return str(generate_uid(entropy_srcs=["octfm phantom", *(str(part) for part in parts)]))


def to_dataset(
    volume: Volume, scanner: Scanner, person: Participant, version: str, *, rle: bool | None = None
) -> Dataset:
    """The DICOM dataset of this volume, compressed as the scanner does, or as `rle` says.

    Patient coordinates: columns run to the patient's left, rows to posterior. Frame positions give the superior
    direction (+z), from which readers recover the order of B-scans.
    """
    frames, rows, columns = volume.shape
    ds = Dataset()
    ds.SpecificCharacterSet = "ISO_IR 192"
    ds.ImageType = ["ORIGINAL", "PRIMARY"]
    ds.SOPClassUID = OPHTHALMIC_TOMOGRAPHY
    ds.SOPInstanceUID = volume.acquisition
    ds.StudyDate = ds.SeriesDate = ds.ContentDate = person.study_date
    ds.StudyTime = ds.SeriesTime = ds.ContentTime = "120000"
    ds.AcquisitionDateTime = f"{person.study_date}120000"
    ds.AccessionNumber = ""
    ds.Modality = "OPT"
    ds.Manufacturer = scanner.manufacturer
    ds.ManufacturerModelName = scanner.model
    ds.DeviceSerialNumber = f"phantom-{scanner.name}"
    ds.SoftwareVersions = f"octfm phantom {version}"
    ds.SeriesDescription = ds.ProtocolName = volume.protocol
    ds.PatientName = f"Phantom^{person.participant}"
    ds.PatientID = person.participant
    ds.PatientBirthDate = ""
    ds.PatientSex = "M"  # as in every AI-READI file
    ds.StudyInstanceUID = uid("study", person.participant)
    ds.SeriesInstanceUID = uid("series", volume.acquisition)
    ds.FrameOfReferenceUID = uid("frame of reference", person.participant, volume.laterality)
    ds.PositionReferenceIndicator = ""
    ds.StudyID = "1"
    ds.SeriesNumber = ds.InstanceNumber = 1
    ds.Laterality = ds.ImageLaterality = volume.laterality
    ds.ImageComments = "Synthetic: an octfm phantom, not a person and not made by the named instrument"
    ds.SamplesPerPixel = 1
    ds.PhotometricInterpretation = "MONOCHROME2"
    ds.NumberOfFrames = frames
    ds.Rows, ds.Columns = rows, columns
    ds.BitsAllocated = ds.BitsStored = 8
    ds.HighBit = 7
    ds.PixelRepresentation = 0
    ds.BurnedInAnnotation = "NO"
    ds.LossyImageCompression = "00"
    ds.PresentationLUTShape = "IDENTITY"
    ds.SharedFunctionalGroupsSequence = Sequence([_shared(volume)])
    _add_frames(ds, volume)
    compress(ds, volume.voxels, scanner.compression if rle is None else "rle" if rle else "none")
    return ds


def set_pixels(ds: Dataset, voxels: np.ndarray, rle: bool) -> None:
    compress(ds, voxels, "rle" if rle else "none")


def _rle(bscan: np.ndarray) -> bytes:
    """PS3.5 G for 8 bits: a table of offsets with a single segment, PackBits of each row."""
    import imagecodecs

    segment = bytes(imagecodecs.packbits_encode(bscan))
    return struct.pack("<2I56x", 1, 64) + segment + bytes(len(segment) % 2)


def _jpeg_ls(bscan: np.ndarray) -> bytes:
    import imagecodecs

    stream = bytes(imagecodecs.jpegls_encode(bscan))
    # Without the SPIFF header before the start of frame, which no scanner writes.
    return stream[:2] + stream[stream.index(b"\xff\xf7") :]


_ENCODERS = {"rle": (RLELossless, _rle), "jpeg_ls": (JPEGLSLossless, _jpeg_ls)}


def compress(ds: Dataset, voxels: np.ndarray, compression: Compression) -> None:
    """Set the pixel data, and the file meta information with its transfer syntax."""
    meta = FileMetaDataset()
    meta.FileMetaInformationVersion = b"\x00\x01"
    meta.MediaStorageSOPClassUID = ds.SOPClassUID
    meta.MediaStorageSOPInstanceUID = ds.SOPInstanceUID
    meta.ImplementationClassUID = IMPLEMENTATION_UID
    meta.ImplementationVersionName = "OCTFM_PHANTOM"
    ds.file_meta = meta
    if compression == "none":
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        ds.PixelData = voxels.tobytes()
    else:
        meta.TransferSyntaxUID, encode = _ENCODERS[compression]
        ds.PixelData = encapsulate([encode(np.ascontiguousarray(bscan)) for bscan in voxels])
    ds["PixelData"].VR = "OB"
    ds["PixelData"].is_undefined_length = compression != "none"


def to_bytes(ds: Dataset) -> bytes:
    """The file's bytes, explicit VR little endian."""
    buffer = BytesIO()
    ds.save_as(buffer, implicit_vr=False, little_endian=True, enforce_file_format=True)
    return buffer.getvalue()


def _shared(volume: Volume) -> Dataset:
    dz, dy, dx = volume.spacing_mm
    measures = Dataset()
    measures.PixelSpacing = [_ds(dy), _ds(dx)]
    measures.SliceThickness = _ds(dz)
    orientation = Dataset()
    orientation.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
    region = Dataset()
    region.CodeValue, region.CodingSchemeDesignator, region.CodeMeaning = "5665001", "SCT", "Retina"
    anatomy = Dataset()
    anatomy.AnatomicRegionSequence = Sequence([region])
    anatomy.FrameLaterality = volume.laterality
    shared = Dataset()
    shared.PixelMeasuresSequence = Sequence([measures])
    shared.PlaneOrientationSequence = Sequence([orientation])
    shared.FrameAnatomySequence = Sequence([anatomy])
    return shared


def _add_frames(ds: Dataset, volume: Volume) -> None:
    """Set PerFrameFunctionalGroupsSequence as encoded bytes, which pydicom parses on access.

    Built from pydicom objects, a dozen for each of hundreds of B-scans, it took as long to make and write as the image.
    """
    frames, _, columns = volume.shape
    dz, _, dx = volume.spacing_mm
    left, fundus = _ds(-(columns - 1) / 2 * dx), uid("fundus", volume.acquisition)
    items = []
    for index in range(frames):
        superior = ((frames - 1) / 2 - index) * dz * (1 if volume.superior_first else -1)
        content = (
            _text(0x00209056, "SH", "1")
            + _numbers(0x00209057, "UL", "<I", index + 1)
            + _numbers(0x00209157, "UL", "<2I", 1, index + 1)
        )
        position = _text(0x00200032, "DS", f"{left}\\0.0\\{_ds(superior)}")
        location = _location(superior, volume.extent_mm[2], fundus)
        items.append(_sequence(0x00209111, content) + _sequence(0x00209113, position) + _sequence(0x00220031, location))
    tag = Tag("PerFrameFunctionalGroupsSequence")
    value = b"".join(map(_item, items))
    ds[tag] = RawDataElement(tag, "SQ", len(value), value, 0, is_implicit_VR=False, is_little_endian=True)
    # The encoding in which the file is written, so that pydicom writes the bytes as they are.
    ds.set_original_encoding(False, True, convert_encodings(ds.SpecificCharacterSet))


def _location(superior_mm: float, width_mm: float, fundus: str) -> bytes:
    """Encoded item of OphthalmicFrameLocationSequence: the B-scan as a line on a fundus image.

    The image has 768 x 768 pixels of 9 mm in all, row 1 superior; coordinates are (row, column) of the first and last
    A-scan.
    """
    pixel_mm = 9 / 768
    row = 384.5 - superior_mm / pixel_mm
    reach = width_mm / 2 / pixel_mm
    return (
        _text(0x00081150, "UI", "1.2.840.10008.5.1.4.1.1.77.1.5.1")  # Ophthalmic Photography 8 Bit Image
        + _text(0x00081155, "UI", fundus)
        + _numbers(0x00220032, "FL", "<4f", row, 384.5 - reach, row, 384.5 + reach)
        + _text(0x00220039, "CS", "LINEAR")
    )


def _text(tag: int, vr: str, text: str) -> bytes:
    """A text element, padded to an even length: UIDs with a null byte, others with a space (DICOM PS3.5 6.2)."""
    return _element(tag, vr, text.encode() + (b"\0" if vr == "UI" else b" ") * (len(text) % 2))


def _numbers(tag: int, vr: str, form: str, *numbers: float) -> bytes:
    return _element(tag, vr, struct.pack(form, *numbers))


def _element(tag: int, vr: str, value: bytes) -> bytes:
    """An explicit VR little-endian element with a 16-bit length (DICOM PS3.5 7.1.2)."""
    return struct.pack("<HH2sH", tag >> 16, tag & 0xFFFF, vr.encode(), len(value)) + value


def _sequence(tag: int, item: bytes) -> bytes:
    """A sequence of one item."""
    return struct.pack("<HH2sHI", tag >> 16, tag & 0xFFFF, b"SQ", 0, len(item) + 8) + _item(item)


def _item(content: bytes) -> bytes:
    return struct.pack("<HHI", 0xFFFE, 0xE000, len(content)) + content


def _ds(value: float) -> str:
    """Decimal string (DS), at most 16 characters."""
    return f"{value:.8f}".rstrip("0").rstrip(".")
