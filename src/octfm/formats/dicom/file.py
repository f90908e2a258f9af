"""Parse one DICOM file: its header, and where its pixels are. All checks come before any pixel is decoded.

Standard: DICOM PS3.5 (encoding), PS3.10 (files).
"""

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from octfm.errors import ReadError
from octfm.formats.dicom.codecs import DAMAGE, find_decoders
from octfm.formats.dicom.gray import lowest_is_white, padding, read_gray
from octfm.formats.dicom.groups import Elements, Group, is_behind_header, items_in_groups, read_groups
from octfm.formats.dicom.pixels import (
    MAX_BYTES,
    Pixels,
    check_encapsulated,
    check_native,
    check_size,
    find_fragments,
    find_frames,
)
from octfm.formats.reasons import cannot_open
from octfm.io.archive import MAX_RATIO, RATIO_FROM_BYTES, open_file, split_uri
from octfm.threads import Shared, ignoring_warnings
from octfm.volume.volume import Shape3

if TYPE_CHECKING:
    from pydicom import Dataset

_IMPLICIT, _BIG_ENDIAN, _DEFLATED = "1.2.840.10008.1.2", "1.2.840.10008.1.2.2", "1.2.840.10008.1.2.1.99"
_DEFLATED_META = {"TransferSyntaxUID": _DEFLATED}
_NATIVE = (_IMPLICIT, "1.2.840.10008.1.2.1", _BIG_ENDIAN, _DEFLATED)

_PIXEL_ELEMENTS = {0x7FE00010: "PixelData", 0x7FE00008: "FloatPixelData", 0x7FE00009: "DoubleFloatPixelData"}
# Privacy: only these are ever parsed. Names, birth dates and free text stay in the file.
ELEMENTS = (
    "SOPClassUID", "SOPInstanceUID", "Manufacturer", "ManufacturerModelName", "ProtocolName", "PatientID",
    "Laterality", "ImageLaterality",
    "PixelSpacing", "SliceThickness", "SpacingBetweenSlices", "NumberOfFrames", "Rows", "Columns", "SamplesPerPixel",
    "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "SeriesInstanceUID",
    "InstanceNumber", "RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "PresentationLUTShape",
    "PixelPaddingValue", "PixelPaddingRangeLimit",
    "ConcatenationUID", "InConcatenationNumber", "InConcatenationTotalNumber", "SOPInstanceUIDOfConcatenationSource",
    "ImagePositionPatient", "ImageOrientationPatient", "ReferencedSeriesSequence", "ReferencedImageSequence",
)  # fmt: skip

MOST_READS, MOST_BYTES = 2**18, 2**21
"""Reads that pydicom may take for a header, one or two per element and item, and bytes of an element. Real headers take
hundreds of reads, a thousand frames with 60 private elements each would take 120,000; a million empty items, 13 kB
deflated, would take 1.4 GB."""

# No ELEMENT is a person's name or a date. In a damaged file one can be: a flipped bit turns the tag of the birth date
# into that of the patient's id.
_PERSONAL_VRS = ("PN", "DA")


class FileHeader:
    """Elements of a file by keyword: functional groups as plain dicts, all others as pydicom converts them."""

    def __init__(self, dataset: "Dataset", groups: Group, file_meta: Elements):
        self._dataset, self._groups, self.file_meta = dataset, groups, file_meta
        self.implicit = bool(dataset.original_encoding[0])  # as found: the transfer syntax may be missing or wrong

    def get(self, keyword: str, /) -> Any:
        if keyword in self._groups:
            return self._groups[keyword]
        from pydicom.tag import Tag

        stored, element = self._dataset.get_item(keyword), self._dataset.get(Tag(keyword))
        if element is None or element.VR in _PERSONAL_VRS:
            return None
        # Letters that are not of the stated character set, mostly Windows' as UTF-8. pydicom makes U+FFFD of each, and
        # one participant of Müller and Möller.
        if "\ufffd" in str(element.value) and stored is not None and stored.is_raw:
            content = stored.value or b""
            if "\ufffd".encode() not in content:
                # Escapes for the bytes that have no letter: an id that is not printable would not count.
                pieces = [piece.decode("cp1252", "backslashreplace") for piece in content.split(b"\\")]
                element.value = " ".join(pieces).replace("\\", "%").strip(" \0")
        return element.value


@dataclass(frozen=True)
class OpenFile:
    """A DICOM file whose header is read and whose stream is open."""

    uri: str
    dataset: FileHeader
    stream: BinaryIO
    size: int
    pixel_offset: int


@contextmanager
def parsed(uri: str, whole: bool = False) -> Iterator[OpenFile]:
    """Open a file and read its header. Errors of damaged input inside the block become ReadError unreadable as well."""
    with guarded(uri, whole) as file:
        dataset, stream, size = _parse(file, uri)
        yield OpenFile(uri, dataset, stream, size, stream.tell())


@contextmanager
def guarded(uri: str, whole: bool = False) -> Iterator[BinaryIO]:
    """Open a file for a parser; its errors are converted by `refusing_damage`."""
    with refusing_damage(uri), open_file(uri, whole=whole) as file:
        yield file


def _without_validation() -> AbstractContextManager:
    from pydicom.config import disable_value_validation

    return disable_value_validation()


_WITHOUT_VALIDATION = Shared(_without_validation)


@contextmanager
def refusing_damage(uri: str) -> Iterator[None]:
    """Convert what pydicom raises on damaged input, while parsing or at first access to a value, to ReadError, and
    silence its warnings: they quote values of the file. What matters in them is checked here and has a code."""
    damaged = _damage()
    try:
        with _WITHOUT_VALIDATION(), ignoring_warnings():
            yield
    except OSError as error:
        raise cannot_open(uri, error) from None
    except damaged as error:
        # Neither message nor traceback: pydicom quotes element values, and those may identify a person.
        raise ReadError(
            "unreadable", f"{uri}: the DICOM header cannot be parsed ({type(error).__name__}); fetch it again"
        ) from None


def _damage() -> tuple[type[Exception], ...]:
    from pydicom.errors import BytesLengthException, InvalidDicomError

    return (*DAMAGE, StopIteration, BytesLengthException, InvalidDicomError, struct.error, zlib.error)


def _parse(file: BinaryIO, uri: str) -> tuple[FileHeader, BinaryIO, int]:
    """Header, stream and size; both are of the inflated content for a deflated file."""
    from pydicom.filereader import read_partial

    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    head = file.read(4096)
    if not head:
        raise ReadError("empty_file", f"{uri}: 0 bytes; fetch it again")
    _refuse_other_formats(head, uri)
    file.seek(0)
    # pydicom would inflate the whole dataset at once, whatever its size.
    if _DEFLATED.encode() in head:
        body = _inflate(file, head, uri)
        size = body.getbuffer().nbytes
        return FileHeader(*_header_of(body, size), _DEFLATED_META), body, size
    dataset = read_partial(_counted(file), force=True, stop_when=is_behind_header, specific_tags=_tags())
    _expect_small(dataset)
    implicit, little_endian = dataset.original_encoding
    groups = read_groups(file, size, bool(implicit), little_endian is False)
    return FileHeader(dataset, groups, dataset.file_meta), file, size


_KINDS = {
    "a GIF, WebP, HEIC, AVIF, JPEG 2000 or PGM image; save it as PNG": (
        *((0, b"P5\n"), (0, b"GIF8"), (8, b"WEBP"), (4, b"jP  "), (4, b"ftyphei"), (4, b"ftypmif1"), (4, b"ftypavif")),
    ),
    "a compressed file or an archive other than ZIP; unpack it": (
        *((0, b"\x1f\x8b"), (0, b"BZh"), (0, b"\xfd7zXZ"), (0, b"\x28\xb5\x2f\xfd")),  # gzip, bzip2, xz, zstd
        *((0, b"7z\xbc\xaf"), (0, b"Rar!"), (257, b"ustar")),
    ),
    "a video; export the scan as DICOM, or its B-scans as PNG": ((4, b"ftyp"), (8, b"AVI "), (0, b"\x1a\x45\xdf\xa3")),
    "a PDF; export the scan itself, as DICOM": ((0, b"%PDF"),),
    "an NRRD, VTK or Analyze image; save it as NIfTI (.nii.gz) or MetaImage (.mha)": (
        *((0, b"NRRD000"), (0, b"# vtk DataFile"), (0, b"\x5c\x01\0\0"), (0, b"\0\0\x01\x5c")),
    ),
}
"""What to say of files that users take for scans -> bytes at an offset by which such a file is known."""


def _refuse_other_formats(head: bytes, uri: str) -> None:
    """Accept the DICM magic, or, without a preamble, a first element of group 2 or 8, as every dataset starts."""
    if head[128:132] == b"DICM":
        return
    explicit = len(head) >= 8 and head[4:6].isalpha() and head[4:6].isupper()
    order = "big" if head[:1] == b"\0" else "little"  # group 0002 or 0008: the zero byte comes first in big endian
    group, element = int.from_bytes(head[:2], order), int.from_bytes(head[2:4], order)
    short = len(head) >= 8 and int.from_bytes(head[4:8], "little") < 256  # length of the first value, implicit VR
    if group not in (2, 8) or element > 0x0100 or not (explicit or short):
        if head[:2] == b"PK" and uri.lower().endswith(".zip") and split_uri(uri) is None:
            found = f"a ZIP archive; unpack it, or give the folder that it is in, or one of its files, {uri}!/NAME"
        elif head[:2] == b"PK":
            found = "a ZIP archive inside another or without the ending .zip; unpack it"
        else:
            first = f"first bytes {head[:8].hex(' ')}"
            unread = f"no format that octfm reads ({first}); fetch it again, or export it as DICOM"
            kinds = (kind for kind, magic in _KINDS.items() if any(head.startswith(word, at) for at, word in magic))
            found = next(kinds, unread)
        raise ReadError("not_dicom", f"{uri}: expected DICOM, found {found}")


def _inflate(file: BinaryIO, head: bytes, uri: str) -> io.BytesIO:
    """The inflated dataset of a deflated file.

    Raises ReadError decompression_bomb for more bytes than archives may inflate to, unless the dataset's own header
    accounts for them.
    """
    # (0002,0000) is the length of the meta group; the deflated dataset follows that group.
    if head[132:140] != b"\x02\x00\x00\x00UL\x04\x00":
        raise ReadError("unreadable", f"{uri}: deflated, but the length of its meta group is missing; export it again")
    file.seek(144 + int.from_bytes(head[140:144], "little"))
    # Not a bytearray: turning it into a stream would copy all of it.
    inflater, packed, body = zlib.decompressobj(-zlib.MAX_WBITS), file.read(), io.BytesIO()
    size, limit = len(packed), min(MAX_BYTES, max(RATIO_FROM_BYTES, MAX_RATIO * len(packed)))
    header_consulted = False
    while packed and not inflater.eof:
        # In pieces, so that the limit is noticed before the memory is gone.
        body.write(inflater.decompress(packed, 2**24))
        packed = inflater.unconsumed_tail
        if body.tell() > limit and not header_consulted:
            header_consulted, limit = True, max(limit, _declared_bytes(body))
        if body.tell() > limit:
            raise ReadError(
                "decompression_bomb",
                f"{uri}: {size:,} deflated bytes inflate to more than {limit:,}, which its header does not account for",
            )
    if not inflater.eof:
        raise ReadError(
            "truncated_pixel_data", f"{uri}: the deflated stream has no end; the file is incomplete, fetch it again"
        )
    body.seek(0)
    return body


def _declared_bytes(body: io.BytesIO) -> int:
    """Bytes up to the end of the pixel data according to the header at the start of `body`; 0 if it cannot be parsed.

    A genuine file may need this much: a blank scan deflates to a thousandth.
    """
    end = body.tell()
    try:
        body.seek(0)
        dataset, groups = _header_of(body, end)
        shape, allocated, *_ = _pixel_format(FileHeader(dataset, groups, _DEFLATED_META), "PixelData", "")
        return min(MAX_BYTES, body.tell() + prod(shape) * allocated // 8 + 2**16)
    except (ReadError, *_damage()):
        return 0
    finally:
        body.seek(end)


def _header_of(body: io.BytesIO, size: int) -> tuple["Dataset", Group]:
    from pydicom.filereader import read_dataset

    dataset = read_dataset(
        _counted(body), is_implicit_VR=False, is_little_endian=True, stop_when=is_behind_header, specific_tags=_tags()
    )
    _expect_small(dataset)
    return dataset, read_groups(body, size, False, False)


class _Counted:
    """A stream that can be read MOST_READS times: pydicom makes a dataset of every item, also of those not wanted."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._left = stream, MOST_READS
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int = -1) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError("more elements than any header has")
        return self._stream.read(size)


def _counted(stream: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, _Counted(stream))


def _expect_small(dataset: "Dataset") -> None:
    """Raises ValueError for an element of more than MOST_BYTES, before pydicom converts it."""
    if any(element.is_raw and len(element.value or b"") > MOST_BYTES for element in dataset.values()):
        raise ValueError("an element larger than any header has")


def _tags() -> list[Any]:
    from pydicom.tag import Tag

    return [Tag(keyword) for keyword in ELEMENTS]


def locate_pixels(file: OpenFile) -> Pixels:
    """Find the pixel data and check, without decoding, that it is complete. Raises ReadError."""
    dataset, stream, uri = file.dataset, file.stream, file.uri
    transfer_syntax = text(dataset.file_meta, "TransferSyntaxUID")
    big_endian = transfer_syntax == _BIG_ENDIAN
    keyword, vr, offset, length = _pixel_element(stream, file.pixel_offset, dataset.implicit, big_endian)
    if keyword is None:
        raise ReadError(
            "missing_pixel_data",
            f"{uri}: the file ends at byte {file.size:,} without pixel data; fetch or export it again",
        )
    shape, bits_allocated, bits_stored, signed = _pixel_format(dataset, keyword, uri)
    if length == 0:
        raise ReadError("missing_pixel_data", f"{uri}: pixel data of 0 bytes; export it again with images")
    native = not transfer_syntax or transfer_syntax in _NATIVE
    if not native:
        find_decoders(transfer_syntax, uri)  # raises first: the bytes of an unknown syntax cannot be checked
    if native != (length != 0xFFFFFFFF):  # encapsulated pixel data have an undefined length (PS3.5 A.4)
        declared, found = ("uncompressed", "encapsulated") if native else ("encapsulated", "not")
        raise ReadError(
            "decode_failed", f"{uri}: transfer syntax says {declared} pixel data, but they are {found}; export it again"
        )
    frames = None
    if not native:
        fragments, length = find_fragments(stream, offset, file.size, uri)
        frames = find_frames(stream, fragments, transfer_syntax, shape[0], text(dataset, "Manufacturer"), uri)
    pixels = Pixels(
        shape=shape,
        bits_allocated=bits_allocated,
        bits_stored=bits_stored,
        inverted=lowest_is_white(dataset, signed, uri),
        transfer_syntax=transfer_syntax,
        big_endian=big_endian,
        vr=vr,
        offset=offset,
        length=length,
        frames=frames,
        gray=read_gray(dataset, uri) if signed else None,
        padding=None if signed else padding(dataset),
    )
    if native:
        check_native(pixels, file.size, uri)
    else:
        check_encapsulated(stream, pixels, uri)
    return pixels


def _pixel_element(stream: BinaryIO, offset: int, implicit: bool, big_endian: bool) -> tuple[str | None, str, int, int]:
    """Keyword (None if there is no pixel element), VR, offset of the value, its declared length."""
    stream.seek(offset)
    head = stream.read(12)
    order = "big" if big_endian else "little"
    tag = int.from_bytes(head[:2], order) << 16 | int.from_bytes(head[2:4], order)
    keyword = _PIXEL_ELEMENTS.get(tag)
    if keyword is None or len(head) < (8 if implicit else 12):
        return None, "", offset, 0
    if implicit:  # implicit VR pixel data are always OW (PS3.5 A.1)
        return keyword, "OW", offset + 8, int.from_bytes(head[4:8], order)
    return keyword, head[4:6].decode("latin-1"), offset + 12, int.from_bytes(head[8:12], order)


def _pixel_format(dataset: Elements, keyword: str, uri: str) -> tuple[Shape3, int, int, bool]:
    """Shape, bits allocated, bits stored, whether values are signed."""
    shape = (integer(dataset, "NumberOfFrames", 1), integer(dataset, "Rows", 0), integer(dataset, "Columns", 0))
    allocated = integer(dataset, "BitsAllocated", 0)
    stored = integer(dataset, "BitsStored", allocated)
    photometric = text(dataset, "PhotometricInterpretation")
    samples, signed = integer(dataset, "SamplesPerPixel", 1), integer(dataset, "PixelRepresentation", 0)
    grayscale = photometric in ("MONOCHROME1", "MONOCHROME2") and samples == 1 and signed in (0, 1)
    if keyword != "PixelData" or not grayscale or allocated not in (8, 16) or not 1 <= stored <= allocated:
        raise ReadError(
            "unsupported_pixels",
            f"{uri}: {keyword} with {samples} sample(s) of {stored}/{allocated} bits, "
            f"{'signed' if signed else 'unsigned'}, {photometric[:16] or 'no photometric interpretation'}; "
            "expected 8- or 16-bit MONOCHROME1 or MONOCHROME2",
        )
    if stored < allocated and (high := integer(dataset, "HighBit", stored - 1)) != stored - 1:
        raise ReadError(
            "unsupported_pixels",
            f"{uri}: HighBit is {high} where BitsStored is {stored}, so which bits hold the image is a guess; "
            "export it again",
        )
    check_size(shape, uri, allocated // 8)
    return shape, allocated, stored, signed == 1


def text(dataset: Elements, keyword: str) -> str:
    """A value as text; empty if it is not printable.

    A damaged length makes a value swallow the elements after it, which may include a name. Their binary headers are
    not printable.
    """
    value = dataset.get(keyword)
    # str() of several values is their repr, whose escapes would hide control characters from isprintable().
    several = value is not None and not isinstance(value, str) and hasattr(value, "__iter__")
    found = " ".join(map(str, cast(Any, value))) if several else "" if value is None else str(value)
    found = found.strip().strip("\0")
    return found if found.isprintable() else ""


def integer(dataset: Elements, keyword: str, default: int) -> int:
    value = dataset.get(keyword)
    return default if value is None or value == "" else int(value)


def referenced_uids(dataset: Elements) -> tuple[str, ...]:
    """SOP Instance UIDs of referenced images, from all places where writers put them: series, images, source images."""
    items = [
        i
        for series in dataset.get("ReferencedSeriesSequence") or []
        for i in series.get("ReferencedInstanceSequence") or []
    ]
    items += dataset.get("ReferencedImageSequence") or []
    for derivation in items_in_groups(dataset, "DerivationImageSequence"):
        items += derivation.get("SourceImageSequence") or []
    return tuple(dict.fromkeys(uid for item in items if (uid := text(item, "ReferencedSOPInstanceUID"))))
