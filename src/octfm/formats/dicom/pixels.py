"""Locate the pixels of a DICOM file, check that they are complete, and decode them.

pydicom drops encapsulated pixel data without an end marker and only warns about surplus frames. Therefore the fragments
are walked here (DICOM PS3.5 A.4): two dozen bytes are read per fragment, nothing is decoded. The first bytes of each
fragment show where frames begin. Offset tables, basic or extended, are ignored: writers leave them empty, or copy them
from another compression.
"""

import sys
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.dicom.codecs import (
    JPEG_2000,
    RLE,
    FrameFormat,
    decode_frame,
    disagreement,
    find_decoders,
    without_file_header,
)
from octfm.formats.dicom.gray import Gray, unsigned
from octfm.volume.volume import Shape3

MAX_BYTES = 2 * 2**30
"""Largest decoded volume. 512 x 1024 x 1024 at 16 bit is 1 GiB."""

MOST_FRAGMENTS = 2**18
"""Of the largest volume, each would have 8 kB. Empty ones would take thirty times their bytes."""

_ITEM, _DELIMITER = 0xFFFEE000, 0xFFFEE0DD
_HEAD = 4096
"""Bytes of a compressed frame that are searched for its size."""
_PIECE = 2**24
_JP2 = b"\0\0\0\x0cjP  "
_END = b"\xff\xd9"


Fragments = tuple[tuple[int, int], ...]
"""(offset, length) of fragments, of one compressed frame or of all."""


@dataclass(frozen=True)
class Pixels:
    """Encoded pixels inside an open stream."""

    shape: Shape3
    bits_allocated: int
    bits_stored: int
    inverted: bool
    """The lowest value is white."""
    transfer_syntax: str
    big_endian: bool
    vr: str
    offset: int
    """First byte of the value: of the first voxel, or of the offset table item when encapsulated."""
    length: int
    """Bytes of the value, without the sequence delimiter."""
    frames: tuple[Fragments, ...] | None
    """Position of each compressed frame, None when not encapsulated."""
    gray: Gray | None = None
    """Meaning of signed values, whose black and white must be stated; None for unsigned ones."""
    padding: tuple[int, int] | None = None
    """Lowest and highest value outside the image, which become black; None for signed values, clipped at black."""

    @property
    def bytes_expected(self) -> int:
        d, h, w = self.shape
        return d * h * w * self.bits_allocated // 8

    @property
    def frame_format(self) -> FrameFormat:
        return FrameFormat(self.shape[1], self.shape[2], self.bits_allocated, self.gray is not None)


def check_size(shape: Shape3, uri: str, bytes_per_voxel: int = 1) -> None:
    """Call this before allocating memory for the volume. Raises ReadError absurd_size."""
    d, h, w = shape
    if min(shape) < 1 or d * h * w * bytes_per_voxel > MAX_BYTES:
        raise ReadError(
            "absurd_size",
            f"{uri}: {d} B-scans of {h} x {w} pixels; expected 1 or more of each and at most {MAX_BYTES:,} bytes",
        )


def find_fragments(stream: BinaryIO, offset: int, size: int, uri: str) -> tuple[Fragments, int]:
    """All fragments, and the bytes up to the delimiter. Raises ReadError: truncated_pixel_data, decode_failed."""
    fragments: list[tuple[int, int]] = []
    position = offset
    while True:
        stream.seek(position)
        head = stream.read(8)
        if len(head) < 8:
            raise _truncated(
                uri,
                f"pixel data ends at byte {size:,} without an end marker, after {max(len(fragments) - 1, 0)} fragments",
            )
        tag = int.from_bytes(head[:2], "little") << 16 | int.from_bytes(head[2:4], "little")
        length = int.from_bytes(head[4:], "little")
        if tag == _DELIMITER:
            break
        if tag != _ITEM:
            raise ReadError(
                "decode_failed",
                f"{uri}: no fragment at byte {position:,}; the pixel data are damaged, fetch it again",
            )
        if position + 8 + length > size:
            raise _truncated(uri, f"fragment {len(fragments)} has {max(size - position - 8, 0):,} of {length:,} bytes")
        if len(fragments) > MOST_FRAGMENTS:
            raise ReadError(
                "decode_failed",
                f"{uri}: more than {MOST_FRAGMENTS:,} fragments; the pixel data are damaged, fetch it again",
            )
        fragments.append((position + 8, length))
        position += 8 + length
    return tuple(fragments[1:]), position - offset  # the first item is the offset table


def check_native(pixels: Pixels, size: int, uri: str) -> None:
    """Check that declared length, bytes in the file and rows x columns x frames of uncompressed pixels agree."""
    available = size - pixels.offset
    frame = pixels.bytes_expected // pixels.shape[0]
    if available < pixels.length:
        raise _truncated(uri, f"pixel data has {max(available, 0):,} of {pixels.length:,} bytes")
    # DICOM requires an even length, and some writers pad to a machine word of 8 bytes.
    if not 0 <= pixels.length - pixels.bytes_expected <= 8:
        raise ReadError(
            "frame_count_mismatch",
            f"{uri}: NumberOfFrames is {pixels.shape[0]}, but the pixel data hold {pixels.length / frame:.4g} B-scans "
            f"of {pixels.shape[1]} x {pixels.shape[2]}; export it again",
        )


def find_frames(
    stream: BinaryIO,
    fragments: Fragments,
    transfer_syntax: str,
    count: int,
    manufacturer: str,
    uri: str,
) -> tuple[Fragments, ...]:
    """Group fragments into frames; each codestream must have its beginning and end, and there must be `count` of them.

    Raises ReadError: missing_pixel_data, scrambled_pixels, decode_failed, frame_count_mismatch, truncated_pixel_data.
    """
    if not fragments:
        raise ReadError(
            "missing_pixel_data", f"{uri}: the pixel data are an empty sequence; export it again with images"
        )
    heads = [_bytes_at(stream, at, 12) for at, _ in fragments]
    if transfer_syntax == RLE:  # PS3.5 A.4.2: a frame is one fragment
        begins = [True] * len(fragments)
        if not 1 <= int.from_bytes(heads[0][:4], "little") <= 2:
            raise ReadError(
                "decode_failed",
                f"{uri}: the first fragment has no RLE header; the pixel data are damaged, fetch it again",
            )
    else:
        # No frame begins in the middle of entropy-coded data: it holds no FF D8, and FF 4F FF 51 once in 2^32.
        begins = [head[:3] == b"\xff\xd8\xff" or head[:4] == b"\xff\x4f\xff\x51" or head[:8] == _JP2 for head in heads]
        if not begins[0]:
            if transfer_syntax in JPEG_2000 and "zeiss" in manufacturer.lower():
                raise ReadError(
                    "scrambled_pixels",
                    f"{uri}: Zeiss pixel data that do not start a codestream: scrambled for Zeiss' own software; "
                    "export it from FORUM or CIRRUS as unscrambled DICOM, or as .img",
                )
            raise ReadError(
                "decode_failed",
                f"{uri}: the first fragment does not start a codestream; the pixel data are damaged, fetch it again",
            )
    starts = [i for i, begin in enumerate(begins) if begin]
    if len(starts) != count:
        raise ReadError(
            "frame_count_mismatch",
            f"{uri}: NumberOfFrames is {count}, but the pixel data hold {len(starts)} compressed B-scans; "
            "export it again",
        )
    frames = tuple(fragments[i:j] for i, j in zip(starts, [*starts[1:], len(fragments)], strict=True))
    if transfer_syntax != RLE:
        for number, frame in enumerate(frames):
            at, length = frame[-1]
            # Fragments have an even length: a zero byte may follow the end marker FF D9, in Orthanc's JPEG-LS any byte.
            tail = _bytes_at(stream, at + max(length - 16, 0), min(length, 16))
            if not (tail.rstrip(b"\0").endswith(_END) or tail[:-1].endswith(_END)):
                raise _truncated(uri, f"B-scan {number} of {count} has no end of codestream")
    return frames


def check_encapsulated(stream: BinaryIO, pixels: Pixels, uri: str) -> None:
    """Check that codestream and DICOM header agree on the first frame. Raises ReadError decode_failed."""
    assert pixels.frames  # find_frames returns one per frame
    at, length = pixels.frames[0][0]
    if problem := disagreement(without_file_header(_bytes_at(stream, at, min(length, _HEAD))), pixels.frame_format):
        raise ReadError("decode_failed", f"{uri}: {problem}; export it again")


def is_blank(stream: BinaryIO, pixels: Pixels, uri: str) -> bool:
    """Whether all voxels are equal. A few bytes rule it out for nearly every file; only the others are decoded."""
    if pixels.gray is not None:  # rare; whether signed pixels are readable may depend on their values
        return bool(np.ptp(decode(stream, pixels, uri)) == 0)
    if pixels.frames is None:
        middle = pixels.offset + pixels.bytes_expected // 2
        probe = np.frombuffer(_bytes_at(stream, middle, min(4096, pixels.bytes_expected // 2)), np.uint8)
        voxel = pixels.bits_allocated // 8
        repeats = bool((probe[voxel:] == probe[:-voxel]).all())
        return repeats and bool(np.ptp(decode(stream, pixels, uri)) == 0)
    # Blank frames compress to equal bytes.
    if len({sum(length for _, length in frame) for frame in pixels.frames}) > 1:
        return False
    first = _content(stream, pixels.frames[0])
    if any(_content(stream, frame) != first for frame in pixels.frames[1:]):
        return False
    return bool(np.ptp(decode(stream, pixels, uri)) == 0)


def decode(stream: BinaryIO, pixels: Pixels, uri: str) -> np.ndarray:
    """Voxels [D, H, W], uint8 or uint16, white at full scale whatever BitsStored and PhotometricInterpretation say.

    Raises ReadError: unsupported_transfer_syntax, unsupported_pixels, decode_failed; also where the pixels contradict
    the transfer syntax of the header, for which no other is tried.
    """
    stored = _decode_native(stream, pixels) if pixels.frames is None else _decode_encapsulated(stream, pixels, uri)
    if pixels.gray is not None:
        return unsigned(stored, pixels.bits_stored, pixels.gray, pixels.inverted, uri)
    if pixels.padding is not None:
        _blacken(stored, pixels.padding, pixels.inverted)
    unused = pixels.bits_allocated - pixels.bits_stored
    if unused and int(stored.max()) >> pixels.bits_stored:
        raise ReadError(
            "unsupported_pixels",
            f"{uri}: values up to {stored.max()} where BitsStored is {pixels.bits_stored}; export it again",
        )
    # In place: a second volume would not fit into a worker's memory.
    if pixels.inverted:
        np.invert(stored, out=stored)
    # Shifting left makes 2^bits_stored - 1 white.
    return np.left_shift(stored, np.array(unused, stored.dtype), out=stored) if unused else stored


def _blacken(stored: np.ndarray, padding: tuple[int, int], inverted: bool) -> None:
    """Make padding as dark as the darkest voxel of the image, plane by plane: a mask of all would take a byte each."""
    low, high = padding

    def outside(plane: np.ndarray) -> np.ndarray:
        return (plane >= low) & (plane <= high)

    black = max((int(plane[~outside(plane)].max(initial=0)) for plane in stored), default=0) if inverted else 0
    for plane in stored:
        plane[outside(plane)] = black


def _decode_native(stream: BinaryIO, pixels: Pixels) -> np.ndarray:
    stream.seek(pixels.offset)
    # Read in pieces into the array that then holds the voxels. Its size is even, to swap the bytes of 16-bit words.
    content, at = np.empty(pixels.bytes_expected + pixels.bytes_expected % 2, np.uint8), 0
    while at < len(content) and (count := stream.readinto(content[at : at + _PIECE].data)):  # type: ignore[attr-defined]
        at += count
    content = content[:at]
    stored = content.view(np.uint16) if pixels.bits_allocated == 16 else content
    if pixels.bits_allocated == 16 and pixels.big_endian == (sys.byteorder == "little"):
        stored.byteswap(inplace=True)
    elif pixels.bits_allocated == 8 and pixels.big_endian and pixels.vr == "OW":
        content.view(np.uint16).byteswap(inplace=True)  # pairs of 8-bit pixels are big-endian words (PS3.5 A.3)
    return stored[: int(np.prod(pixels.shape))].reshape(pixels.shape)


def _decode_encapsulated(stream: BinaryIO, pixels: Pixels, uri: str) -> np.ndarray:
    name, decoders = find_decoders(pixels.transfer_syntax, uri)
    voxels = np.empty(pixels.shape, f"u{pixels.bits_allocated // 8}")
    for number, frame in enumerate(pixels.frames or ()):
        image = decode_frame(_content(stream, frame), pixels.frame_format, decoders)
        if isinstance(image, str):
            raise ReadError(
                "decode_failed",
                f"{uri}: {name} B-scan {number} could not be decoded ({image}); fetch it again, or transcode it",
            )
        voxels[number] = image
    return voxels


def _content(stream: BinaryIO, frame: Fragments) -> bytes:
    return without_file_header(b"".join(_bytes_at(stream, *fragment) for fragment in frame))


def _bytes_at(stream: BinaryIO, offset: int, length: int) -> bytes:
    stream.seek(offset)
    return stream.read(length)


def _truncated(uri: str, found: str) -> ReadError:
    return ReadError("truncated_pixel_data", f"{uri}: {found}; the file is incomplete, fetch it again")
