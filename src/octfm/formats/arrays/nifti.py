"""NIfTI-1 and NIfTI-2 in one file, .nii or .nii.gz.

NIfTI does not say which axis is B-scan, axial or lateral. Spacing decides where it differs enough between the axes:
OCT pixels are by far the finest along depth, and B-scans are further apart than A-scans. Otherwise a sidecar must name
the axes.
Structure: nifti1.h and nifti2.h of the NIfTI Data Format Working Group.
"""

import gzip
import io
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import BinaryIO, cast

import numpy as np

from octfm.errors import ReadError
from octfm.formats.arrays import exact_gray, in_order
from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.declared import read_declared
from octfm.formats.dicom.geometry import SPACING_BOUNDS_MM
from octfm.formats.names import MASKS
from octfm.formats.reasons import PADDING, expect_bytes, voxel_labels
from octfm.io.archive import open_file

_TYPES = {
    2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8",
}  # fmt: skip
_FINE_SLOPE = 1 / 8
"""A scaled value this fine shows whether it was a whole number."""
_TO_MM = {0: 1.0, 1: 1000.0, 2: 1.0, 3: 0.001}
"""xyzt_units -> mm. 0 is unknown: read as millimetres, which counts only if the values are plausible for an OCT."""
_LABEL = 1002
"""Intent code of an image whose values are labels."""
HEIGHTS = "layer heights"
"""Intent name of octfm's height maps."""
_MOST_OFFSET = 2**26
"""Extensions before the voxels are a few megabytes at most. A damaged offset would inflate gigabytes to get there."""
_COMMENT = 6
"""Code of an extension of text."""
_AXIAL_FINER, _BSCANS_COARSER = 1.5, 1.2
"""Smallest ratios of lateral to axial spacing, and of B-scan distance to lateral spacing, that identify the axes."""


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, int, int]
    """As stored: fastest axis first."""
    dtype: np.dtype
    mm: tuple[float, float, float] | None
    offset: int
    slope: float
    intercept: float
    has_mm: bool
    """Whether it states a unit of length, plausible or not."""
    intent: tuple[int, bytes]
    """Code and name of what the values mean."""

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape))


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a NIfTI image holds of a segmentation."""

    values: np.ndarray
    """As stored, fastest axis first: labels [W, H, D] or as the scan's own file, heights [W, D, S]."""
    comments: str
    """Names, as written in an extension of the header."""
    has_mm: bool
    """Whether it states a unit of length. Without one, heights are rows."""


def open_bscans(uri: str) -> Bscans:
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        with _stream(file) as stream:
            header = _read_header(stream, uri)
        if header.intent[1] == HEIGHTS.encode():
            raise ReadError("layer_heights", f"{uri}: heights of layers, not an image; left out")
        zipped = _is_zipped(file)
        check_size(header.shape, uri, header.dtype.itemsize)
        if not zipped:
            expect_bytes(uri, size, header.offset + header.bytes, PADDING)
        uid = uid_of(file, size)
    last_word = PurePath(uri).name.lower().removesuffix(".gz").removesuffix(".nii").rpartition("_")[2]
    axes = _axes(header, uri)
    mm = in_order(header.mm, axes) if header.mm else None

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as whole, _stream(whole) as stream:
            return exact_gray(_array(stream, header, uri).transpose(in_order((0, 1, 2), axes)), uri)

    return Bscans(
        uri=uri,
        shape=in_order(header.shape, axes),
        decode=decode,
        uid=uid,
        in_plane_mm=(mm[1], mm[2]) if mm else None,
        between_mm=mm[0] if mm else None,
        bits=8 if header.dtype.itemsize == 1 else None,
        flags=("axial_direction_assumed",),
        aside=voxel_labels(uri) if header.intent[0] == _LABEL or last_word in MASKS else None,
    )


def stored_axes(uri: str) -> str:
    """The letters of the stored axes of a scan, fastest first. Raises ReadError."""
    with open_file(uri) as file, _stream(file) as stream:
        return _axes(_read_header(stream, uri), uri)


def same_directions(uri: str, other: str) -> bool:
    """Whether the stored axes of two files point the same way in space; True if one of them does not say (sform)."""
    one, two = _directions(uri), _directions(other)
    return one is None or two is None or bool(((one * two).sum(0) > 0.5).all())


def _directions(uri: str) -> np.ndarray | None:
    """Unit vectors [3, 3], a column per stored axis, of the sform (nifti1.h, method 3); None for one that says nothing,
    such as the identity that programs write for want of another."""
    with open_file(uri) as file, _stream(file) as stream:
        head = stream.read(540)
    order = "<" if head[:1] != b"\0" else ">"
    second = head[4:6] in (b"n+", b"ni")
    (code,) = struct.unpack_from(order + "i", head, 348) if second else struct.unpack_from(order + "h", head, 254)
    rows = struct.unpack_from(order + "12d", head, 400) if second else struct.unpack_from(order + "12f", head, 280)
    matrix = np.array(rows, np.float64).reshape(3, 4)[:, :3]
    length = np.linalg.norm(matrix, axis=0)
    stated = code > 0 and np.isfinite(matrix).all() and (length > 0).all() and not np.array_equal(matrix, np.eye(3))
    return matrix / length if stated else None


def _axes(header: _Header, uri: str) -> str:
    if axes := read_declared(uri).axes or axes_of_spacing(header.mm):
        return axes
    mm = header.mm
    found = "no millimetres stated" if mm is None else f"voxels of {mm[0]:g} x {mm[1]:g} x {mm[2]:g} mm"
    raise ReadError(
        "unknown_axes",
        f'{uri}: {found}, so its axes are unknown; declare them in a .json of the same name, such as "axes": "WHD"',
    )


def read_drawn(uri: str) -> Drawn:
    """An image of heights or labels, as octfm.layers.export writes them. Raises ReadError."""
    with open_file(uri, whole=True) as file, _stream(file) as stream:
        header = _read_header(stream, uri)
        check_size(header.shape, uri, header.dtype.itemsize)
        stream.seek(0)
        comments = _comments(stream.read(header.offset))
        stream.seek(0)
        return Drawn(_array(stream, header, uri), comments, header.has_mm)


def _comments(head: bytes) -> str:
    """Text of the header's extensions, which are lists of size, code and content (nifti1.h)."""
    at = 544 if head[:4] in (struct.pack("<i", 540), struct.pack(">i", 540)) else 352
    order, found = "<" if head[:1] != b"\0" else ">", []
    while at + 8 <= len(head):
        size, code = struct.unpack_from(order + "2i", head, at)
        if size < 8:
            break
        if code == _COMMENT:
            found.append(head[at + 8 : at + size].rstrip(b"\0").decode("utf-8", "replace").strip())
        at += size
    return "; ".join(found)


def plausible(mm: tuple[float, float, float]) -> tuple[float, float, float] | None:
    """These millimetres; None for placeholders, and for what no OCT instrument has on any axis."""
    possible = all(any(low <= value <= high for low, high in SPACING_BOUNDS_MM) for value in mm)
    return mm if possible and mm != (1.0, 1.0, 1.0) else None


def axes_of_spacing(mm: tuple[float, float, float] | None) -> str | None:
    """The letters of the stored axes, fastest first; None where spacing does not tell them apart."""
    if mm is not None:
        fine, middle, coarse = sorted(range(3), key=lambda i: mm[i])
        if mm[middle] >= _AXIAL_FINER * mm[fine] and mm[coarse] >= _BSCANS_COARSER * mm[middle]:
            return "".join({coarse: "D", fine: "H", middle: "W"}[i] for i in range(3))
    return None


def _array(stream: BinaryIO, header: _Header, uri: str) -> np.ndarray:
    """The scaled voxels as stored, fastest axis first."""
    stream.seek(header.offset)
    content = stream.read(header.bytes)
    expect_bytes(uri, len(content), header.bytes)
    stream.read(1)  # makes gzip verify the checksum after the last byte
    array = np.frombuffer(content, header.dtype).reshape(header.shape, order="F")
    # A slope of 0 means that values are not scaled (nifti1.h).
    if (header.slope, header.intercept) not in ((0.0, 0.0), (1.0, 0.0)) and header.slope:
        array = array * header.slope + header.intercept
        # Writers scale floats to the whole range of a header's type (nibabel), so that 1 becomes 128 steps of 1/127.5.
        near = 0.501 * abs(header.slope)
        if abs(header.slope) <= _FINE_SLOPE and all((np.abs(part - np.rint(part)) <= near).all() for part in array.T):
            np.rint(array, out=array)
    return array


def _read_header(stream: BinaryIO, uri: str) -> _Header:
    head = stream.read(540)
    # The header starts with its own length, which shows the byte order.
    order = "<" if head[:4] in (struct.pack("<i", 348), struct.pack("<i", 540)) else ">"
    (length,) = struct.unpack_from(order + "i", head)
    if length == 540:
        magic = head[4:7]
        (kind,) = struct.unpack_from(order + "h", head, 12)
        dim = struct.unpack_from(order + "8q", head, 16)
        mm = struct.unpack_from(order + "8d", head, 104)
        offset, slope, intercept = struct.unpack_from(order + "qdd", head, 168)
        units, intent, meaning = struct.unpack_from(order + "2i16s", head, 500)
    elif length == 348:
        magic = head[344:347]
        (kind,) = struct.unpack_from(order + "h", head, 70)
        dim = struct.unpack_from(order + "8h", head, 40)
        mm = struct.unpack_from(order + "8f", head, 76)
        offset, slope, intercept = struct.unpack_from(order + "3f", head, 108)
        units = head[123]
        (intent,), meaning = struct.unpack_from(order + "h", head, 68), head[328:344]
    else:
        raise ReadError("damaged_file", f"{uri}: a NIfTI header of {length} bytes, expected 348 or 540; fetch it again")
    if magic[:2] == b"ni":
        raise ReadError("incomplete_export", f"{uri}: the header of a NIfTI pair; save it as one file, .nii or .nii.gz")
    if kind not in _TYPES:
        raise ReadError("unsupported_pixels", f"{uri}: NIfTI data type {kind}; save it as uint8 or uint16")
    if not 3 <= dim[0] <= 7 or any(n != 1 for n in dim[4 : dim[0] + 1]):
        raise ReadError("unknown_axes", f"{uri}: {dim[0]} dimensions {dim[1 : dim[0] + 1]}; expected three")
    # The sign of pixdim is no part of the distance.
    first, second, third = (float(abs(value)) * _TO_MM.get(units & 7, 0.0) for value in mm[1:4])
    offset = max(int(offset), length)
    if offset > _MOST_OFFSET:
        raise ReadError("damaged_file", f"{uri}: its voxels begin at byte {offset:,}; fetch it again")
    slope, intercept = (float(value) if np.isfinite(value) else 0.0 for value in (slope, intercept))
    return _Header(
        shape=(dim[1], dim[2], dim[3]),
        dtype=np.dtype(_TYPES[kind]).newbyteorder(order),
        mm=plausible((first, second, third)),
        offset=offset,
        slope=slope,
        intercept=intercept,
        has_mm=units & 7 != 0,
        intent=(intent, meaning.rstrip(b"\0")),
    )


def _is_zipped(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(2) == b"\x1f\x8b"


@contextmanager
def _stream(file: BinaryIO) -> Iterator[BinaryIO]:
    zipped = _is_zipped(file)
    file.seek(0)
    if not zipped:
        yield file
        return
    with gzip.GzipFile(fileobj=file) as stream:
        yield cast(BinaryIO, stream)
