"""Where the pixels of a DICOM file lie, whether they are all there, and their decoding.

pydicom drops encapsulated pixel data without its end and only warns about surplus frames, so the fragments are walked here
(DICOM PS3.5 A.4): two dozen bytes are read per fragment, nothing is decoded.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from octfm.data.volume import Shape3
from octfm.errors import ReadError

if TYPE_CHECKING:
    from pydicom.pixels.decoders.base import Decoder

MAX_BYTES = 2 * 2**30
"""Largest decoded volume. 512 x 1024 x 1024 at 16 bit is 1 GiB."""

PARSE_ERRORS = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What pydicom and its decoders raise on damaged input, besides its own errors, struct.error and zlib.error."""

_ITEM, _DELIMITER = 0xFFFEE000, 0xFFFEE0DD
_UNDEFINED = 0xFFFFFFFF
_RLE = "1.2.840.10008.1.2.5"
# Measured fastest first; gdcm last because it aborts the process on some damaged input.
_PLUGINS = ("pylibjpeg", "pyjpegls", "pillow", "gdcm", "pydicom")


@dataclass(frozen=True)
class Pixels:
    """Encoded pixels inside an open stream."""

    shape: Shape3
    bits_allocated: int
    bits_stored: int
    inverted: bool
    """MONOCHROME1: the lowest value is white."""
    transfer_syntax: str
    big_endian: bool
    vr: str
    offset: int
    """First byte of the value: of the first voxel, or of the offset table item when encapsulated."""
    length: int
    """Bytes of the value, without the sequence delimiter."""
    fragments: tuple[tuple[int, int], ...] | None
    """(offset, length) of each fragment, None when not encapsulated."""

    @property
    def bytes_expected(self) -> int:
        d, h, w = self.shape
        return d * h * w * self.bits_allocated // 8


def find_decoder(transfer_syntax: str, uri: str) -> "tuple[Decoder, list[str], str]":
    """pydicom's decoder, its installed plugins in order of preference, and the name. Raises ReadError: unsupported_transfer_syntax."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.uid import UID

    name = UID(transfer_syntax).name
    try:
        decoder = get_decoder(UID(transfer_syntax))
    except NotImplementedError:
        raise ReadError("unsupported_transfer_syntax", f"{uri}: {name} is not a still-image compression; transcode it") from None
    plugins = sorted(decoder.available_plugins, key=lambda plugin: _PLUGINS.index(plugin) if plugin in _PLUGINS else len(_PLUGINS))
    if not plugins:
        raise ReadError(
            "unsupported_transfer_syntax",
            f"{uri}: no installed decoder reads {name}; install one of {', '.join(decoder.missing_dependencies)}, or transcode the file",
        )
    return decoder, plugins, name


def find_fragments(stream: BinaryIO, offset: int, size: int, uri: str) -> tuple[tuple[tuple[int, int], ...], int]:
    """((offset, length) of every fragment, bytes up to the delimiter). Raises ReadError: truncated_pixel_data, decode_failed."""
    fragments: list[tuple[int, int]] = []
    position = offset
    while True:
        stream.seek(position)
        head = stream.read(8)
        if len(head) < 8:
            raise _truncated(uri, f"pixel data ends at byte {size:,} without its end marker, after {max(len(fragments) - 1, 0)} fragments")
        tag = int.from_bytes(head[:2], "little") << 16 | int.from_bytes(head[2:4], "little")
        length = int.from_bytes(head[4:], "little")
        if tag == _DELIMITER:
            break
        if tag != _ITEM:
            raise ReadError(
                "decode_failed",
                f"{uri}: byte {position:,} should start a fragment but does not; the pixel data are damaged, fetch it again",
            )
        if position + 8 + length > size:
            raise _truncated(uri, f"fragment {len(fragments)} has {max(size - position - 8, 0):,} of {length:,} bytes")
        fragments.append((position + 8, length))
        position += 8 + length
    return tuple(fragments[1:]), position - offset  # the first item is the offset table


def check_native(pixels: Pixels, size: int, uri: str) -> None:
    """Uncompressed: declared length, bytes in the file and rows x columns x frames must agree."""
    available = size - pixels.offset
    frame = pixels.bytes_expected // pixels.shape[0]
    if available < pixels.length:
        raise _truncated(uri, f"pixel data has {max(available, 0):,} of {pixels.length:,} bytes")
    # An even length is required, and some writers pad to a machine word.
    if not 0 <= pixels.length - pixels.bytes_expected <= 8:
        raise ReadError(
            "frame_count_mismatch",
            f"{uri}: NumberOfFrames is {pixels.shape[0]}, but the pixel data hold {pixels.length / frame:.4g} B-scans of "
            f"{pixels.shape[1]} x {pixels.shape[2]}; export it again",
        )


def check_encapsulated(stream: BinaryIO, pixels: Pixels, uri: str) -> None:
    """Compressed: as many codestreams as frames, each with its beginning and its end."""
    fragments = pixels.fragments or ()
    if not fragments:
        raise ReadError("missing_pixel_data", f"{uri}: the pixel data are an empty sequence; export it again with images")
    if pixels.transfer_syntax == _RLE:
        found = len(fragments)
        starts = fragments
        if any(int.from_bytes(_bytes_at(stream, at, 4), "little") != pixels.bits_allocated // 8 for at, _ in starts[:1]):
            raise ReadError("decode_failed", f"{uri}: the first fragment has no RLE header; the pixel data are damaged, fetch it again")
    else:
        begins = [_bytes_at(stream, at, 2) in (b"\xff\xd8", b"\xff\x4f") for at, _ in fragments]
        if not begins[0]:
            raise ReadError(
                "decode_failed", f"{uri}: the first fragment does not start a JPEG codestream; the pixel data are damaged, fetch it again"
            )
        found = sum(begins)
    if found != pixels.shape[0]:
        raise ReadError(
            "frame_count_mismatch",
            f"{uri}: NumberOfFrames is {pixels.shape[0]}, but the pixel data hold {found} compressed B-scans; export it again",
        )
    if pixels.transfer_syntax != _RLE:
        ends = [i for i in range(len(fragments)) if i + 1 == len(fragments) or begins[i + 1]]
        for frame, i in enumerate(ends):
            at, length = fragments[i]
            tail = _bytes_at(stream, at + max(length - 16, 0), min(length, 16))
            if not tail.rstrip(b"\0").endswith(b"\xff\xd9"):
                raise _truncated(uri, f"B-scan {frame} of {pixels.shape[0]} has no end of codestream")


def is_blank(stream: BinaryIO, pixels: Pixels, uri: str) -> bool:
    """Whether all voxels are equal. A few bytes tell for nearly every file; only suspicious ones are read or decoded."""
    if pixels.fragments is None:
        middle = pixels.offset + pixels.bytes_expected // 2
        probe = np.frombuffer(_bytes_at(stream, middle, min(4096, pixels.bytes_expected // 2)), np.uint8)
        return not (probe.size and np.ptp(probe)) and bool(np.ptp(decode(stream, pixels, uri)) == 0)
    if len({length for _, length in pixels.fragments}) > 1:
        return False
    first = _bytes_at(stream, *pixels.fragments[0])
    if any(_bytes_at(stream, *fragment) != first for fragment in pixels.fragments[1:]):
        return False
    return bool(np.ptp(decode(stream, pixels, uri)) == 0)


def decode(stream: BinaryIO, pixels: Pixels, uri: str) -> np.ndarray:
    """Voxels [D, H, W], uint8 or uint16, white at full scale whatever BitsStored and PhotometricInterpretation say.

    Raises ReadError: unsupported_transfer_syntax, decode_failed. The transfer syntax in the header is believed or refused, never changed.
    """
    stored = _decode_native(stream, pixels) if pixels.fragments is None else _decode_encapsulated(stream, pixels, uri)
    unused = pixels.bits_allocated - pixels.bits_stored
    if pixels.inverted:
        stored = ~stored
    # Bits above BitsStored may hold overlays: shifting left drops them and makes 2^bits_stored - 1 white.
    return stored << np.array(unused, stored.dtype) if unused else stored


def _decode_native(stream: BinaryIO, pixels: Pixels) -> np.ndarray:
    stream.seek(pixels.offset)
    content = bytearray(stream.read(pixels.bytes_expected + pixels.bytes_expected % 2))
    if pixels.bits_allocated == 16:
        stored = np.frombuffer(content, ">u2" if pixels.big_endian else "<u2").astype(np.uint16, copy=False)
    elif pixels.big_endian and pixels.vr == "OW":  # 8-bit pixels in big-endian words: PS3.5 annex A.3
        stored = np.frombuffer(content, np.uint8).reshape(-1, 2)[:, ::-1].ravel()
    else:
        stored = np.frombuffer(content, np.uint8)
    return stored[: int(np.prod(pixels.shape))].reshape(pixels.shape)


def _decode_encapsulated(stream: BinaryIO, pixels: Pixels, uri: str) -> np.ndarray:
    decoder, plugins, name = find_decoder(pixels.transfer_syntax, uri)
    d, h, w = pixels.shape
    stream.seek(pixels.offset)
    content = stream.read(pixels.length)
    description: dict[str, Any] = {
        "number_of_frames": d,
        "rows": h,
        "columns": w,
        "samples_per_pixel": 1,
        "photometric_interpretation": "MONOCHROME2",
        "bits_allocated": pixels.bits_allocated,
        "bits_stored": pixels.bits_stored,
        "pixel_representation": 0,
        "pixel_keyword": "PixelData",
    }
    refusals = []
    for plugin in plugins:
        try:
            voxels, _ = decoder.as_array(content, raw=True, decoding_plugin=plugin, **description)
        except PARSE_ERRORS as error:
            refusals.append(f"{plugin}: {' '.join(str(error).split())[-120:]}")
            continue
        if voxels.shape == pixels.shape and voxels.dtype == f"u{pixels.bits_allocated // 8}":
            return voxels
        refusals.append(f"{plugin}: decoded {voxels.shape} {voxels.dtype}, expected {pixels.shape} uint{pixels.bits_allocated}")
    raise ReadError("decode_failed", f"{uri}: {name} pixels could not be decoded ({'; '.join(refusals)}); fetch it again, or transcode it")


def _bytes_at(stream: BinaryIO, offset: int, length: int) -> bytes:
    stream.seek(offset)
    return stream.read(length)


def _truncated(uri: str, found: str) -> ReadError:
    return ReadError("truncated_pixel_data", f"{uri}: {found}; the file is incomplete, fetch it again")
