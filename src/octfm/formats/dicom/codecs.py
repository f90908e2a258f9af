"""Compressed DICOM frames to arrays: which decoder reads which transfer syntax, fastest correct one first.

Measured by benchmarks/dicom_decoders.py (docs/log). python-gdcm is not among them: it ends the process on some damaged input.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np

from octfm.errors import ReadError

RLE = "1.2.840.10008.1.2.5"
JPEG_2000 = ("1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91", *(f"1.2.840.10008.1.2.4.{n}" for n in (201, 202, 203)))

DAMAGE = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What decoders raise on damaged input. A MemoryError is told as such elsewhere: another decoder would need as much."""


@dataclass(frozen=True)
class FrameFormat:
    """What the DICOM header says of every frame."""

    rows: int
    columns: int
    bits_allocated: int
    bits_stored: int
    signed: bool = False


@dataclass(frozen=True)
class Codestream:
    """What the first bytes of a compressed frame say."""

    rows: int
    columns: int
    components: int
    bits: int
    signed: bool


def _jpeg(frame: bytes, _: FrameFormat) -> np.ndarray:
    import imagecodecs

    return imagecodecs.jpeg8_decode(frame)


def _jpeg_pillow(frame: bytes, _: FrameFormat) -> np.ndarray:
    from PIL import Image

    image = Image.open(io.BytesIO(frame), formats=["JPEG"])
    return np.asarray(image)


def _jpeg_ls(frame: bytes, _: FrameFormat) -> np.ndarray:
    import imagecodecs

    return imagecodecs.jpegls_decode(frame)


def _jpeg_ls_pyjpegls(frame: bytes, _: FrameFormat) -> np.ndarray:
    import jpeg_ls

    return jpeg_ls.decode(np.frombuffer(frame, np.uint8))


def _jpeg_2000(frame: bytes, _: FrameFormat) -> np.ndarray:
    import openjpeg

    return openjpeg.decode(frame)


def _jpeg_2000_imagecodecs(frame: bytes, _: FrameFormat) -> np.ndarray:
    import imagecodecs

    return imagecodecs.jpeg2k_decode(frame, numthreads=1)


def _htj2k(frame: bytes, _: FrameFormat) -> np.ndarray:
    import imagecodecs

    return imagecodecs.htj2k_decode(frame)


def _rle(frame: bytes, form: FrameFormat) -> np.ndarray:
    from rle.utils import decode_frame

    content = decode_frame(frame, form.rows * form.columns, form.bits_allocated, "<")
    return np.frombuffer(content, f"<u{form.bits_allocated // 8}").reshape(form.rows, form.columns)


_Decode = Callable[[bytes, FrameFormat], np.ndarray]
_JPEG: tuple[tuple[str, str, _Decode], ...] = (("imagecodecs", "imagecodecs", _jpeg), ("PIL", "pillow", _jpeg_pillow))
_JPEG_LOSSLESS = _JPEG[:1]
_JPEG_LS = (("imagecodecs", "imagecodecs", _jpeg_ls), ("jpeg_ls", "pyjpegls", _jpeg_ls_pyjpegls))
_OPENJPEG = (("openjpeg", "pylibjpeg-openjpeg", _jpeg_2000),)
_J2K = (*_OPENJPEG, ("imagecodecs", "imagecodecs", _jpeg_2000_imagecodecs))
_HTJ2K_LOSSLESS = (("imagecodecs", "imagecodecs", _htj2k), *_OPENJPEG)
_UID = "1.2.840.10008.1.2.4."
_DECODERS: dict[str, tuple[str, tuple[tuple[str, str, _Decode], ...]]] = {
    RLE: ("RLE Lossless", (("rle", "pylibjpeg-rle", _rle),)),
    _UID + "50": ("JPEG Baseline", _JPEG),
    _UID + "51": ("JPEG Extended", _JPEG),
    _UID + "57": ("JPEG Lossless", _JPEG_LOSSLESS),
    _UID + "70": ("JPEG Lossless, first-order prediction", _JPEG_LOSSLESS),
    _UID + "80": ("JPEG-LS Lossless", _JPEG_LS),
    _UID + "81": ("JPEG-LS Near-lossless", _JPEG_LS),
    _UID + "90": ("JPEG 2000 Lossless", _J2K),
    _UID + "91": ("JPEG 2000", _J2K),
    _UID + "201": ("HTJ2K Lossless", _HTJ2K_LOSSLESS),
    _UID + "202": ("HTJ2K Lossless RPCL", _HTJ2K_LOSSLESS),
    # Not imagecodecs: lossy values beyond 0 or 255 come back wrapped around (2026.3.6, measured), black for white.
    _UID + "203": ("HTJ2K", _OPENJPEG),
}
"""Transfer syntax -> name, then (module, package, function) in order of preference."""


def find_decoders(transfer_syntax: str, uri: str) -> tuple[str, list[tuple[str, _Decode]]]:
    """Name of the compression and (package, function) of its installed decoders. Raises ReadError: unsupported_transfer_syntax."""
    known = _DECODERS.get(transfer_syntax)
    if known is None:
        from pydicom.uid import UID

        raise ReadError(
            "unsupported_transfer_syntax",
            f"{uri}: {UID(transfer_syntax).name[:64]} is no compression of OCT images that octfm reads; transcode it",
        )
    name, decoders = known
    installed = [(package, decode) for module, package, decode in decoders if find_spec(module) is not None]
    if not installed:
        packages = " or ".join(package for _, package, _ in decoders)
        raise ReadError(
            "unsupported_transfer_syntax",
            f"{uri}: no installed decoder reads {name}; install {packages}, or transcode the file",
        )
    return name, installed


def decode_frame(frame: bytes, form: FrameFormat, decoders: list[tuple[str, _Decode]]) -> np.ndarray | str:
    """[H, W] unsigned of `bits_allocated`, of signed pixels their bits, or why every decoder refused.

    A wrong size is refused before memory is spent on it.
    """
    if problem := disagreement(frame, form):
        return problem
    refusals = []
    for package, decode in decoders:
        try:
            image = decode(frame, form)
        except DAMAGE as error:
            refusals.append(f"{package}: {' '.join(str(error).split())[-120:]}")
            continue
        if form.signed and image.dtype.kind == "i":
            image = image.view(f"u{image.dtype.itemsize}")
        if (
            image.shape == (form.rows, form.columns)
            and image.dtype.kind == "u"
            and 8 * image.dtype.itemsize <= form.bits_allocated
        ):
            if form.bits_stored < form.bits_allocated and not form.signed and int(image.max()) >> form.bits_stored:
                return f"{package}: values up to {image.max()} where BitsStored is {form.bits_stored}"
            return image
        refusals.append(
            f"{package}: decoded {image.shape} {image.dtype}, expected {form.rows} x {form.columns} uint{form.bits_allocated}"
        )
    return "; ".join(refusals)


def disagreement(frame: bytes, form: FrameFormat) -> str:
    """What header and codestream say differently, or an empty string. Only the head of the frame is needed."""
    found = inspect(frame)
    if found is None:
        return ""
    if (found.rows, found.columns, found.components) != (form.rows, form.columns, 1):
        said = f"{found.rows} x {found.columns} pixels of {found.components} component(s)"
        return f"the compressed frame has {said}, the header says {form.rows} x {form.columns} of 1"
    # Codestreams other than JPEG 2000 know no sign and carry the bits of signed pixels.
    if (found.signed and not form.signed) or found.bits > form.bits_allocated:
        return f"the compressed frame has {'signed ' * found.signed}{found.bits}-bit pixels, the header says {form.bits_allocated}"
    return ""


def inspect(frame: bytes) -> Codestream | None:
    """Size and depth from the frame header of JPEG and JPEG-LS (ITU-T T.81 B.2.2) or the SIZ marker of JPEG 2000 (T.800 A.5.1); None
    where there is none in these bytes."""
    if frame[:4] == b"\xff\x4f\xff\x51" and len(frame) >= 43:
        x1, y1, x0, y0 = (int.from_bytes(frame[at : at + 4], "big") for at in (8, 12, 16, 20))
        depth = frame[42]
        return Codestream(y1 - y0, x1 - x0, int.from_bytes(frame[40:42], "big"), (depth & 0x7F) + 1, depth > 0x7F)
    at = 2
    while frame[:2] == b"\xff\xd8" and at + 10 <= len(frame) and frame[at] == 0xFF:
        marker = frame[at + 1]
        if marker == 0xFF:  # fill byte
            at += 1
            continue
        if (0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC)) or marker == 0xF7:
            rows, columns = int.from_bytes(frame[at + 5 : at + 7], "big"), int.from_bytes(frame[at + 7 : at + 9], "big")
            return Codestream(rows, columns, frame[at + 9], frame[at + 4], False)
        at += 2 + int.from_bytes(frame[at + 2 : at + 4], "big")
    return None


def without_file_header(frame: bytes) -> bytes:
    """The codestream alone: PS3.5 A.4.4 forbids the JP2 boxes before it, and some writers put them there."""
    if frame[4:8] != b"jP  ":
        return frame
    start = frame.find(b"\xff\x4f\xff\x51", 0, 4096)
    return frame[start:] if start > 0 else frame
