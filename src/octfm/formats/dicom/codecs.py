"""Decode compressed DICOM frames: the decoders of each transfer syntax, the fastest correct one first.

Order measured by benchmarks/dicom_decoders.py (docs/log). python-gdcm is left out: some damaged input makes it end the
process.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octfm.errors import ReadError, reason_of

RLE = "1.2.840.10008.1.2.5"
JPEG_2000 = ("1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91", *(f"1.2.840.10008.1.2.4.{n}" for n in (201, 202, 203)))

DAMAGE = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions of decoders on damaged input. Not MemoryError: another decoder would need as much memory."""


@dataclass(frozen=True)
class FrameFormat:
    """The pixel format of every frame according to the DICOM header."""

    rows: int
    columns: int
    bits_allocated: int
    signed: bool = False


@dataclass(frozen=True)
class Codestream:
    """The pixel format of a compressed frame according to its own first bytes."""

    rows: int
    columns: int
    components: int
    bits: int
    signed: bool


Decode = Callable[[bytes, FrameFormat], np.ndarray]


def _jpeg_pillow(frame: bytes, _: FrameFormat) -> np.ndarray:
    from PIL import Image

    # JPEG only: the bytes of a frame must not choose another of Pillow's parsers.
    return np.asarray(Image.open(io.BytesIO(frame), formats=["JPEG"]))


def _rle(frame: bytes, form: FrameFormat) -> np.ndarray:
    """PS3.5 G: a table of offsets, then one PackBits segment per byte of a pixel, the most significant byte first."""
    from imagecodecs import packbits_decode

    segments, *offsets = np.frombuffer(frame[:64], "<u4").tolist()
    if segments != form.bits_allocated // 8:
        raise ValueError(f"{segments} RLE segments, expected {form.bits_allocated // 8}")
    ends = [*offsets[1:segments], len(frame)]
    planes = [
        packbits_decode(frame[start:end], out=form.rows * form.columns)
        for start, end in zip(offsets, ends, strict=False)
    ]
    pixels = np.stack([np.frombuffer(plane, np.uint8) for plane in reversed(planes)], axis=-1)
    return pixels.view(f"<u{segments}").reshape(form.rows, form.columns)


class Decoder(NamedTuple):
    name: str
    decode: Decode


def _imagecodecs(function: str, **options: Any) -> Decoder:
    def decode(frame: bytes, _: FrameFormat) -> np.ndarray:
        import imagecodecs  # at first use: it is slow to import

        return getattr(imagecodecs, function)(frame, **options)

    return Decoder(f"imagecodecs.{function}", decode)


_JPEG = (_imagecodecs("jpeg8_decode"), Decoder("pillow", _jpeg_pillow))
_JPEG_LOSSLESS = _JPEG[:1]
_JPEG_LS = (_imagecodecs("jpegls_decode"),)
_OPENJPEG = (_imagecodecs("jpeg2k_decode", numthreads=1),)
_HTJ2K_LOSSLESS = (_imagecodecs("htj2k_decode"), *_OPENJPEG)
_UID = "1.2.840.10008.1.2.4."
_DECODERS: dict[str, tuple[str, tuple[Decoder, ...]]] = {
    RLE: ("RLE Lossless", (Decoder("imagecodecs.packbits_decode", _rle),)),
    _UID + "50": ("JPEG Baseline", _JPEG),
    _UID + "51": ("JPEG Extended", _JPEG),
    _UID + "57": ("JPEG Lossless", _JPEG_LOSSLESS),
    _UID + "70": ("JPEG Lossless, first-order prediction", _JPEG_LOSSLESS),
    _UID + "80": ("JPEG-LS Lossless", _JPEG_LS),
    _UID + "81": ("JPEG-LS Near-lossless", _JPEG_LS),
    _UID + "90": ("JPEG 2000 Lossless", _OPENJPEG),
    _UID + "91": ("JPEG 2000", _OPENJPEG),
    _UID + "201": ("HTJ2K Lossless", _HTJ2K_LOSSLESS),
    _UID + "202": ("HTJ2K Lossless RPCL", _HTJ2K_LOSSLESS),
    # Not OpenJPH: lossy values beyond 0 or 255 wrap around (imagecodecs 2026.3.6), so white becomes black.
    _UID + "203": ("HTJ2K", _OPENJPEG),
}
"""Transfer syntax -> name, and decoders in order of preference."""


def find_decoders(transfer_syntax: str, uri: str) -> tuple[str, tuple[Decoder, ...]]:
    """Name of the compression, and its decoders. Raises ReadError unsupported_transfer_syntax."""
    if transfer_syntax not in _DECODERS:
        from pydicom.uid import UID

        raise ReadError(
            "unsupported_transfer_syntax",
            f"{uri}: octfm does not read the compression {UID(transfer_syntax).name[:64]}; transcode the file",
        )
    return _DECODERS[transfer_syntax]


def decode_frame(frame: bytes, form: FrameFormat, decoders: Sequence[Decoder]) -> np.ndarray | str:
    """[H, W] unsigned of `bits_allocated`, for signed pixels their bit patterns; or why every decoder failed, as text.

    The frame's own header is compared first: a damaged size would make a decoder allocate memory for it.
    """
    if problem := disagreement(frame, form):
        return problem
    refusals = []
    for name, decode in decoders:
        try:
            image = decode(frame, form)
        except DAMAGE as error:
            refusals.append(f"{name}: {reason_of(error)[-120:]}")
            continue
        if form.signed and image.dtype.kind == "i":  # JPEG 2000 decodes to signed; others to bit patterns
            image = image.view(f"u{image.dtype.itemsize}")
        if (
            image.shape == (form.rows, form.columns)
            and image.dtype.kind == "u"
            and 8 * image.dtype.itemsize <= form.bits_allocated
        ):
            return image
        refusals.append(
            f"{name}: decoded {image.shape} {image.dtype}, "
            f"expected {form.rows} x {form.columns} uint{form.bits_allocated}"
        )
    return "; ".join(refusals)


def disagreement(frame: bytes, form: FrameFormat) -> str:
    """How codestream and DICOM header contradict each other; empty if they agree. The head of the frame suffices."""
    found = inspect(frame)
    if found is None:
        return ""
    if (found.rows, found.columns, found.components) != (form.rows, form.columns, 1):
        size = f"{found.rows} x {found.columns} pixels of {found.components} component(s)"
        return f"the compressed frame has {size}, the header says {form.rows} x {form.columns} of 1"
    # Only JPEG 2000 states a sign; other codestreams hold the bit patterns of signed pixels as unsigned ones.
    if (found.signed and not form.signed) or found.bits > form.bits_allocated:
        kind = f"{'signed ' * found.signed}{found.bits}-bit"
        return f"the compressed frame has {kind} pixels, the header says {form.bits_allocated}"
    return ""


def inspect(frame: bytes) -> Codestream | None:
    """Size and depth of a codestream; None if these bytes do not hold its header.

    From the frame header of JPEG and JPEG-LS (ITU-T T.81 B.2.2) or the SIZ marker of JPEG 2000 (ITU-T T.800 A.5.1).
    """
    if frame[:4] == b"\xff\x4f\xff\x51" and len(frame) >= 43:
        # Behind SOC, SIZ, Lsiz and Rsiz: Xsiz, Ysiz, XOsiz and YOsiz. Csiz is at byte 40. Ssiz at 42 is the depth less
        # one, with the sign as its highest bit.
        x1, y1, x0, y0 = (int.from_bytes(frame[at : at + 4], "big") for at in (8, 12, 16, 20))
        depth = frame[42]
        return Codestream(y1 - y0, x1 - x0, int.from_bytes(frame[40:42], "big"), (depth & 0x7F) + 1, depth > 0x7F)
    at = 2
    while frame[:2] == b"\xff\xd8" and at + 10 <= len(frame) and frame[at] == 0xFF:
        marker = frame[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        # SOF0 to SOF15, without DHT, JPG and DAC, which share their range; F7 is SOF55 of JPEG-LS.
        if (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xF7:
            # Behind the marker: length (2 bytes), precision (1), rows (2), columns (2), components (1).
            rows, columns = int.from_bytes(frame[at + 5 : at + 7], "big"), int.from_bytes(frame[at + 7 : at + 9], "big")
            return Codestream(rows, columns, frame[at + 9], frame[at + 4], False)
        at += 2 + int.from_bytes(frame[at + 2 : at + 4], "big")
    return None


def without_file_header(frame: bytes) -> bytes:
    """The codestream without the JP2 boxes that some writers put before it, although PS3.5 A.4.4 forbids them."""
    if frame[4:8] != b"jP  ":
        return frame
    start = frame.find(b"\xff\x4f\xff\x51", 0, 4096)
    return frame[start:] if start > 0 else frame
