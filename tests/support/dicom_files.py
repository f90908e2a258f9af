"""Writes Ophthalmic Tomography DICOM of any transfer syntax for tests; PHI is planted in every file, so that leaks
show."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pydicom
from pydicom import uid
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate

from support.codestreams import imagecodecs_encoder, rle_encoder

PATIENT_NAME, BIRTH_DATE = "Planted^Secret", "19500102"

NATIVE = (
    uid.ImplicitVRLittleEndian,
    uid.ExplicitVRLittleEndian,
    uid.ExplicitVRBigEndian,
    uid.DeflatedExplicitVRLittleEndian,
)
LOSSLESS = (*NATIVE, uid.RLELossless, uid.JPEGLSLossless, uid.JPEG2000Lossless, uid.JPEGLossless, uid.JPEGLosslessSV1)
LOSSY = (uid.JPEGBaseline8Bit, uid.JPEGLSNearLossless, uid.JPEG2000)


def write_oct_dicom(
    path: str | Path,
    voxels: np.ndarray,
    spacing_mm: tuple[float, float, float],
    *,
    laterality: str | None = "R",
    participant: str | None = "1001",
    manufacturer: str = "Heidelberg Engineering",
    model: str = "Spectralis",
    protocol: str = "spectralis_ppol_mac_hr",
    sop_instance_uid: str | None = None,
    sop_class: str = uid.OphthalmicTomographyImageStorage,
    transfer_syntax: str = uid.ExplicitVRLittleEndian,
    spacing_in: Literal["shared", "per_frame", "positions", "top_level", "nowhere"] = "shared",
    superior_first: bool | None = None,
    photometric: str = "MONOCHROME2",
    bits_stored: int | None = None,
    offset_table: bool = True,
    encode: Callable[[np.ndarray], bytes] | None = None,
    preamble: bool = True,
    edit: Callable[[Dataset], None] | None = None,
) -> Path:
    """`voxels` [D, H, W] uint8 or uint16. `superior_first` True or False also writes ImagePositionPatient per frame.

    `encode` makes the codestream of a B-scan, by default with the library that `_encode_frame` names for the transfer
    syntax. `spacing_in="positions"` leaves SliceThickness out, so only positions tell dz. `edit` changes the dataset
    before it is written.

    """
    dataset = Dataset()
    dataset.SOPClassUID = sop_class
    dataset.SOPInstanceUID = sop_instance_uid or uid.generate_uid()
    dataset.Modality = "OPT"
    dataset.Manufacturer = manufacturer
    dataset.ManufacturerModelName = model
    dataset.ProtocolName = protocol
    dataset.PatientName = PATIENT_NAME
    dataset.PatientBirthDate = BIRTH_DATE
    if participant is not None:
        dataset.PatientID = participant
    _describe_geometry(dataset, voxels.shape, spacing_mm, laterality, spacing_in, superior_first)
    _describe_pixels(dataset, voxels, photometric, bits_stored)
    dataset.PixelData = _encode(voxels, dataset, transfer_syntax, offset_table, encode)
    native = transfer_syntax in NATIVE
    dataset["PixelData"].VR = "OB" if voxels.dtype == np.uint8 or not native else "OW"
    dataset["PixelData"].is_undefined_length = not native
    if edit:
        edit(dataset)
    return save(dataset, path, transfer_syntax, preamble=preamble)


def save(dataset: Dataset, path: str | Path, transfer_syntax: str, *, preamble: bool = True) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not preamble:
        implicit = transfer_syntax == uid.ImplicitVRLittleEndian
        pydicom.dcmwrite(path, dataset, implicit_vr=implicit, little_endian=True)
        return path
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = uid.UID(transfer_syntax)
    dataset.file_meta.MediaStorageSOPClassUID = dataset.SOPClassUID
    dataset.file_meta.MediaStorageSOPInstanceUID = dataset.get("SOPInstanceUID", "1.2.3")
    pydicom.dcmwrite(path, dataset, enforce_file_format=True)
    return path


def item(**values) -> Dataset:
    """A sequence item; a Dataset given as value becomes a one-item sequence."""
    dataset = Dataset()
    for keyword, value in values.items():
        setattr(dataset, keyword, [value] if isinstance(value, Dataset) else value)
    return dataset


def _describe_geometry(dataset, shape, spacing_mm, laterality, spacing_in, superior_first):
    dz, dy, dx = spacing_mm
    shared, frames = Dataset(), [Dataset() for _ in range(shape[0])]
    measures = (
        item(PixelSpacing=[dy, dx]) if spacing_in == "positions" else item(PixelSpacing=[dy, dx], SliceThickness=dz)
    )
    if spacing_in in ("shared", "positions"):
        shared.PixelMeasuresSequence = [measures]
    elif spacing_in == "per_frame":
        for frame in frames:
            frame.PixelMeasuresSequence = [measures]
    elif spacing_in == "top_level":
        dataset.PixelSpacing, dataset.SliceThickness = [dy, dx], dz
    if laterality is not None:
        shared.FrameAnatomySequence = [item(FrameLaterality=laterality)]
        dataset.ImageLaterality = laterality
    if superior_first is None and spacing_in == "positions":
        superior_first = True
    if superior_first is not None:
        # LPS patient axes: A-scans run along x, the beam along y, and superior is +z.
        shared.PlaneOrientationSequence = [item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])]
        step = -dz if superior_first else dz
        for number, frame in enumerate(frames):
            frame.PlanePositionSequence = [item(ImagePositionPatient=[0, 7, round(number * step, 6)])]
    for number, frame in enumerate(frames, start=1):
        frame.FrameContentSequence = [item(InStackPositionNumber=number)]
    dataset.SharedFunctionalGroupsSequence = [shared]
    dataset.PerFrameFunctionalGroupsSequence = frames


def _describe_pixels(dataset, voxels, photometric, bits_stored):
    dataset.NumberOfFrames, dataset.Rows, dataset.Columns = voxels.shape
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = photometric
    dataset.BitsAllocated = 8 * voxels.dtype.itemsize
    dataset.BitsStored = bits_stored or dataset.BitsAllocated
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = 0


def _encode(voxels: np.ndarray, dataset: Dataset, transfer_syntax: str, offset_table: bool, encode) -> bytes:
    if transfer_syntax in NATIVE:
        big_endian = transfer_syntax == uid.ExplicitVRBigEndian and voxels.dtype == np.uint16
        content = voxels.astype(">u2" if big_endian else voxels.dtype).tobytes()
        return content + b"\0" * (len(content) % 2)
    encode = encode or (lambda frame: _encode_frame(frame, dataset, transfer_syntax))
    return encapsulate([encode(frame) for frame in voxels], has_bot=offset_table)


def _encode_frame(frame: np.ndarray, dataset: Dataset, transfer_syntax: str) -> bytes:
    if transfer_syntax == uid.JPEGBaseline8Bit:
        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=95)
        return buffer.getvalue()
    if transfer_syntax in (uid.JPEGLossless, uid.JPEGLosslessSV1):
        return _encode_jpeg_lossless(frame)
    if transfer_syntax == uid.RLELossless:
        return rle_encoder(dataset.BitsStored)(frame)
    if transfer_syntax in uid.JPEGLSTransferSyntaxes:
        return imagecodecs_encoder("jpegls", level=2 * (transfer_syntax == uid.JPEGLSNearLossless))(frame)
    loss = {"level": 60} if transfer_syntax == uid.JPEG2000 else {"reversible": True}
    return imagecodecs_encoder("jpeg2k", codecformat="J2K", bitspersample=dataset.BitsStored, **loss)(frame)


def _encode_jpeg_lossless(frame: np.ndarray) -> bytes:
    """ITU-T T.81 process 14, selection value 1: left neighbour predicts, five-bit code per difference category (Annex
    H).

    Written out because no installed library encodes it: gdcm can, and aborts the process on small images.

    """
    bits, (rows, columns) = 8 * frame.dtype.itemsize, frame.shape
    predicted = np.empty(frame.shape, np.int64)
    predicted[:, 1:] = frame[:, :-1]
    predicted[1:, 0] = frame[:-1, 0]
    predicted[0, 0] = 1 << (bits - 1)
    difference = (frame - predicted + 32767) % 65536 - 32767  # modulo 2^16, in -32767..32768
    coded = []
    for value in difference.ravel().tolist():
        category = abs(value).bit_length()
        coded.append(f"{category:05b}")
        if 0 < category < 16:
            coded.append(f"{value if value > 0 else value + (1 << category) - 1:0{category}b}")
    text = "".join(coded)
    text += "1" * (-len(text) % 8)
    entropy = int(text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\x00")
    frame_header = (
        b"\xff\xc3" + (11).to_bytes(2, "big") + bytes([bits]) + rows.to_bytes(2, "big") + columns.to_bytes(2, "big")
    )
    huffman = (
        b"\xff\xc4" + (2 + 17 + 17).to_bytes(2, "big") + b"\0" + bytes([0, 0, 0, 0, 17, *[0] * 11]) + bytes(range(17))
    )
    scan_header = b"\xff\xda" + (8).to_bytes(2, "big") + bytes([1, 1, 0, 1, 0, 0])
    return b"\xff\xd8" + frame_header + bytes([1, 1, 0x11, 0]) + huffman + scan_header + entropy + b"\xff\xd9"
