"""Image files: PNG, TIFF, BMP and JPEG are one gray B-scan each; a TIFF of several pages is a volume."""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from html import unescape
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, BinaryIO, Literal

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.names import may_be_labels
from octfm.io.archive import open_file
from octfm.threads import ignoring_warnings

if TYPE_CHECKING:
    from PIL.Image import Image

MAGIC = (b"\x89PNG\r\n\x1a\n", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+", b"BM", b"\xff\xd8\xff")
MAX_TINT, MOST_TINT, MOST_TINTED = 16, 64, 1e-3
"""Differences between the channels of a gray image that was saved as a colour JPEG: up to MAX_TINT, and in a share
MOST_TINTED of the pixels up to MOST_TINT. Lines of colour differ by more, colours of whole areas in more pixels."""
MAX_PAGES = 10_000
"""Ten times the B-scans of any instrument. More means a damaged file whose pages form a loop."""
_PNG_END = b"IEND\xaeB`\x82"
_TO_MM = {
    "m": 1000.0, "meter": 1000.0, "metre": 1000.0, "cm": 10.0, "centimeter": 10.0, "dm": 100.0,
    "in": 25.4, "inch": 25.4,
    "mm": 1.0, "millimeter": 1.0, "millimetre": 1.0, "thou": 0.0254, "mil": 0.0254, "pt": 25.4 / 72, "å": 1e-7,
    "um": 1e-3, "micron": 1e-3, "micrometer": 1e-3, "micrometre": 1e-3, "nm": 1e-6, "nanometer": 1e-6, "pm": 1e-9,
}  # fmt: skip
"""Units of length of OME 2016-06 and ImageJ -> mm; in lower case, with u for the micro sign, without a plural s."""


def open_bscans(uri: str) -> Bscans:
    """Open a TIFF of several pages of one size as a volume, any other image as a single B-scan. Raises ReadError."""
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        if several_pages(file, uri, MAX_PAGES):
            raise ReadError(
                "absurd_size",
                f"{uri}: more than {MAX_PAGES:,} pages; it is damaged, or not an OCT volume",
            )
        with _opened(file, uri) as image:
            pages = getattr(image, "n_frames", 1) if image.format == "TIFF" else 1
            _expect_one_stack(image, pages, uri)
            if pages == 1:
                return _single(file, size, uri, image)
            width, height = image.size
            shape = (pages, height, width)
            check_size(shape, uri)
            in_plane, between, bits = *_stated_mm(image), _stated_bits(image)
            for page in range(pages):
                image.seek(page)
                _check_page(image, (width, height), size, f"{uri}: page {page + 1} of {pages}")
            image.seek(pages // 2)
            if not may_be_labels(uri) and not _says_gray(image):
                _gray(image, f"{uri}: page {pages // 2 + 1}")
        uid = uid_of(file, size)

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as stream, _opened(stream, uri) as image:
            found = []
            for page in range(pages):
                image.seek(page)
                found.append(_gray(image, f"{uri}: page {page + 1}"))
        return np.stack(found)

    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        uid=uid,
        in_plane_mm=in_plane,
        between_mm=between,
        bits=bits,
    )


def _single(file: BinaryIO, size: int, uri: str, image: "Image") -> Bscans:
    """One image as a single B-scan."""
    in_plane, _ = _stated_mm(image)
    return Bscans(
        uri=uri,
        shape=(1, *image_size(uri)),
        decode=lambda: read_gray(uri)[None],
        uid=uid_of(file, size),
        in_plane_mm=in_plane,
        bits=_stated_bits(image),
        picture=True,
        alone=ReadError(
            "single_image",
            f"{uri}: one {image.format} image; a volume is a folder of them, or a TIFF of several pages; single "
            "B-scans are taken with --layouts line (octfm.read_volume: raster_only=False)",
        ),
    )


def significant_bits(uri: str) -> int | None:
    """Bits per pixel that carry values, from the header; None for 16-bit pixels if the file does not say."""
    with open_file(uri) as file, _opened(file, uri) as image:
        return _stated_bits(image)


def stated_mm(uris: Iterable[str], uri: str) -> tuple[tuple[float, float] | None, float | None]:
    """((dy, dx), dz) as the TIFF files of single B-scans state them, None for what they do not. Raises ReadError
    mixed_images where they differ by more than 1 %."""
    stated: dict[str, tuple[tuple[float, float] | None, float | None]] = {}
    for place in uris:
        with open_file(place) as file, _opened(file, place) as image:
            found = _stated_mm(image)
        if found != (None, None):
            stated[place] = found
        elif not stated:
            return None, None  # PNG and most TIFF files state none, and one of them is enough to see that
        # Others may state none: of the files of one OME-TIFF the first may describe all (BinaryOnly).
    first, *others = stated
    own, *theirs = (np.array([*(in_plane or (0, 0)), dz or 0]) for in_plane, dz in stated.values())
    for place, other in zip(others, theirs, strict=True):
        if not np.allclose(own, other, rtol=0.01, atol=0):
            raise ReadError(
                "mixed_images",
                f"{uri}: {PurePath(first).name} and {PurePath(place).name} state different millimetres; export all "
                "B-scans of a volume alike",
            )
    return stated[first]


def stack_gray(uris: Iterable[str], uri: str) -> np.ndarray:
    """[D, H, W] from one image per B-scan. Raises ReadError; mixed_images where some have 8 bits and others 16."""
    planes = {place: read_gray(place) for place in uris}
    first = next(iter(planes))
    if other := next((place for place, plane in planes.items() if plane.dtype != planes[first].dtype), None):
        raise ReadError(
            "mixed_images",
            f"{uri}: {PurePath(first).name} has {8 * planes[first].itemsize}-bit pixels, {PurePath(other).name} "
            f"{8 * planes[other].itemsize}-bit ones; save all B-scans of a volume alike",
        )
    return np.stack(list(planes.values()))


def read_gray(uri: str) -> np.ndarray:
    """[H, W] uint8 or uint16. Colour is accepted if all channels are equal, up to the tints that JPEG leaves in gray
    images. Raises ReadError."""
    with open_file(uri, whole=True) as file, _opened(file, uri) as image:
        return _gray(image, uri)


def expect_gray(uri: str) -> None:
    """Decode an image only if its header does not say that it is gray. Raises ReadError, as `read_gray`."""
    with open_file(uri) as file, _opened(file, uri) as image:
        gray = _says_gray(image)
    if not gray:
        read_gray(uri)


def image_size(uri: str) -> tuple[int, int]:
    """(H, W) without decoding. Raises ReadError, also for an image that ends early."""
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        if size == 0:
            raise ReadError("empty_file", f"{uri}: 0 bytes; fetch it again")
        with _opened(file, uri) as image:
            width, height = image.size
            if image.format == "TIFF":
                _check_page(image, image.size, size, uri)
            else:
                _expect_upright(image, uri)
        file.seek(max(size - 64, 0))
        tail = file.read()
        # JPEG and PNG end with a marker, which padding may follow; BMP states its size at byte 2.
        file.seek(2)
        declared = int.from_bytes(file.read(4), "little")
        cut = (image.format == "PNG" and _PNG_END not in tail) or (image.format == "BMP" and declared > size)
        if cut or (image.format == "JPEG" and b"\xff\xd9" not in tail):
            raise ReadError("truncated_pixel_data", f"{uri}: the image ends early; fetch it again")
    return height, width


def several_pages(file: BinaryIO, uri: str, most: int = 1) -> bool:
    """Whether a TIFF or BigTIFF has more than `most` pages, along its chain of directories (TIFF 6.0, section 2).

    Raises ReadError if the chain is cut: Pillow would read the pages before the cut, or others, without a word.
    """
    file.seek(0)
    head = file.read(16)
    if head[:4] not in MAGIC[1:5]:
        return False
    order: Literal["little", "big"] = "little" if head[:2] == b"II" else "big"
    # Bytes of the number of entries, of an entry, and of an offset; BigTIFF has + (43) where TIFF has * (42).
    count, entry, pointer = (8, 20, 8) if b"+" in head[:4] else (2, 12, 4)
    place = int.from_bytes(head[8:16] if pointer == 8 else head[4:8], order)
    for _ in range(most):
        file.seek(place)
        entries = int.from_bytes(file.read(count), order)
        file.seek(entries * entry, io.SEEK_CUR)
        following = file.read(pointer)
        if len(following) < pointer:
            raise ReadError("truncated_pixel_data", f"{uri}: the TIFF ends within its list of pages; fetch it again")
        if not (place := int.from_bytes(following, order)):
            return False
    return True


def digest_of(uris: Iterable[str]) -> bytes:
    """One digest for several files."""
    digest = hashlib.blake2b(digest_size=16)
    for uri in uris:
        with open_file(uri) as file:
            digest.update(uid_of(file, file.seek(0, io.SEEK_END)).encode())
    return digest.digest()


def decode_gray(content: bytes, uri: str, formats: tuple[str, ...]) -> np.ndarray:
    """[H, W] uint8 or uint16 from an image inside another file; `formats` as Pillow names them. Raises ReadError."""
    with _opened(io.BytesIO(content), uri, formats) as image:
        return _gray(image, uri)


@contextmanager
def _opened(file, uri: str, formats: tuple[str, ...] = ("PNG", "TIFF", "BMP", "JPEG")) -> Iterator["Image"]:
    from PIL import Image, UnidentifiedImageError

    file.seek(0)
    try:
        with ignoring_warnings(), Image.open(file, formats=formats) as image:
            yield image
    except Image.DecompressionBombError:
        raise ReadError("absurd_size", f"{uri}: more pixels than any B-scan has; fetch or export it again") from None
    except UnidentifiedImageError:
        file.seek(0)
        fix = ""
        if file.read(2) in (b"II", b"MM"):
            fix = "; a TIFF must have 8- or 16-bit gray pixels, uncompressed or packed by deflate, LZW, zstd or JPEG"
        raise ReadError(
            "decode_failed",
            f"{uri}: not an image that can be decoded (UnidentifiedImageError); fetch or export it again{fix}",
        ) from None
    except (OSError, SyntaxError, TypeError, AttributeError, RuntimeError) as error:  # Pillow's on damaged bytes
        raise ReadError(
            "decode_failed", f"{uri}: the image cannot be decoded ({type(error).__name__}); fetch or export it again"
        ) from None


def _says_gray(image: "Image") -> bool:
    return image.mode in ("1", "L", "LA") or image.mode.startswith("I;16")


def _gray(image: "Image", uri: str) -> np.ndarray:
    if image.width * image.height > 2**28:
        raise ReadError("absurd_size", f"{uri}: {image.width} x {image.height} pixels; no B-scan is so large")
    if image.mode in ("1", "P", "LA", "CMYK"):
        image = image.convert("RGB" if image.mode in ("P", "CMYK") else "L")
    pixels, tags = np.asarray(image), getattr(image, "tag_v2", {})
    if pixels.dtype.itemsize > 1 and tags.get(262) == 0:  # WhiteIsZero, which Pillow inverts for 8 bit only
        raise ReadError("unsupported_pixels", f"{uri}: 16-bit pixels whose 0 is white; save it with 0 as black")
    # SampleFormat 2 is signed; Pillow reads -1 as 255.
    if pixels.dtype == np.uint8 and _first_int(tags.get(339)) == 2 and pixels.max() > 127:
        raise ReadError("unsupported_pixels", f"{uri}: signed 8-bit pixels below 0; save it as uint8 or uint16")
    if image.mode in ("RGB", "RGBA") and _is_gray(pixels[..., :3]):
        pixels = np.asarray(image.convert("L"))
    if pixels.dtype == np.int32 and pixels.min() >= 0 and pixels.max() < 2**16:
        pixels = pixels.astype(np.uint16)  # Pillow opens some 16-bit images as int32
    if pixels.ndim != 2 or pixels.dtype.kind != "u" or pixels.dtype.itemsize > 2:
        fix = "; save it as uint8 or uint16"
        if pixels.ndim != 2:
            fix = ", without layer lines drawn into it; export it without coloured lines"
        raise ReadError(
            "unsupported_pixels", f"{uri}: {image.mode} pixels of {pixels.dtype}; expected 8- or 16-bit gray{fix}"
        )
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def _is_gray(pixels_HW3: np.ndarray) -> bool:
    red, green, blue = np.moveaxis(pixels_HW3, 2, 0)
    tint = np.maximum(np.maximum(red, green), blue) - np.minimum(np.minimum(red, green), blue)  # faster than np.ptp
    return bool(tint.max() <= MOST_TINT and np.mean(tint > MAX_TINT) <= MOST_TINTED)


def _expect_upright(image: "Image", where: str) -> None:
    """Raises ReadError for a stated orientation that is not upright: Pillow applies it to the first page of a TIFF
    only, and a viewer may show the image the other way up."""
    stated = getattr(image, "tag_v2", None) or (image.getexif() if "exif" in image.info else {})
    if (orientation := stated.get(274)) in range(2, 9):
        raise ReadError(
            "unsupported_pixels",
            f"{where}: stored turned or mirrored (Orientation {orientation}); save it the way it is shown",
        )


def _expect_one_stack(image: "Image", pages: int, uri: str) -> None:
    """Raises ReadError unless the pages of a TIFF are the B-scans of one volume: ImageJ, OME and tifffile also put
    channels, times and several stacks into one file, and files of more than 4 GB, or with an ImageDepth, hold further
    B-scans behind their pages."""
    text, tags = _description(image), getattr(image, "tag_v2", {})
    fewest, samples = _first_int(tags.get(32997)) or 1, _first_int(tags.get(277)) or 1  # ImageDepth, SamplesPerPixel
    if shape := _word(r'^\{"shape": \[([\d, ]+)\]', text):  # tifffile
        found = f"an array of {shape}"
        sizes = [size for n in shape.split(",") if (size := int(n)) > 1][: -3 if samples > 1 else -2]
        if '"truncated": true' in text:  # one page of all
            fewest = max(fewest, prod(sizes))
    else:
        if text.startswith("ImageJ="):
            fewest = max(fewest, int(_word(r"\bimages=(\d+)", text) or 1))
            z, c, t = (int(_word(rf"\b{n}=(\d+)", text) or 1) for n in ("slices", "channels", "frames"))
        else:
            z, c, t = (int(_attribute(f"Size{axis}", text) or 1) for axis in "ZCT")
            c = max(1, c // samples)  # OME counts the colours of a pixel as channels
        found, sizes = f"{z} slices, {c} channels and {t} times", [z, c, t]
    # Of pages that were written one by one, each is described as a stack of one.
    if sum(size > 1 for size in sizes) > 1 or pages > prod(sizes) > 1:
        raise ReadError(
            "unknown_axes",
            f"{uri}: {pages} pages, the first described as of {found}, in one file; save one stack of B-scans",
        )
    if pages < fewest:
        raise ReadError(
            "frame_count_mismatch", f"{uri}: states {fewest} images and has {pages} as pages; save each as a page"
        )


def _check_page(image: "Image", expected: tuple[int, int], size: int, where: str) -> None:
    """Check that the page has size `expected` (W, H), is upright, has 0 as black and all its strips or tiles inside the
    file."""
    _expect_upright(image, where)
    if re.search(r"^c0=-32768\b", _description(image), re.MULTILINE):
        raise ReadError(
            "unsupported_pixels",
            f"{where}: signed 16-bit pixels, to which ImageJ adds 32,768 as it saves them; save it with 0 as black",
        )
    if image.size != expected:
        raise ReadError(
            "mixed_images",
            f"{where} is {image.width} x {image.height}, expected {expected[0]} x {expected[1]} as the first",
        )
    tags = getattr(image, "tag_v2", {})
    # StripOffsets or TileOffsets, StripByteCounts or TileByteCounts
    starts, counts = (tags.get(strips, tags.get(tiles, ())) for strips, tiles in ((273, 324), (279, 325)))
    starts, counts = ((value,) if isinstance(value, int) else value for value in (starts, counts))
    if not starts or any(start + count > size for start, count in zip(starts, counts, strict=False)):
        raise ReadError(
            "truncated_pixel_data", f"{where} reaches beyond the end of the file ({size:,} bytes); fetch it again"
        )


def _stated_mm(image: "Image") -> tuple[tuple[float, float] | None, float | None]:
    """((dy, dx), dz) as ImageJ or OME state them, None for what they do not. Resolution tags alone do not count: they
    mean size in print, also where ImageJ repeats them, which it does without a spacing."""
    tags, text = getattr(image, "tag_v2", {}), _description(image)
    if text.startswith("ImageJ=") and (unit := to_mm(_word(r"\bunit=(\S+)", text))):
        dy, dx = (1 / float(tags[tag]) if tags.get(tag) else 0.0 for tag in (283, 282))
        z = _positive(_word(r"spacing=([\d.eE+-]+)", text)) * unit
        y, x = (dy * unit, dx * unit) if z > 0 else (0.0, 0.0)
    elif "<OME" in text:
        sizes = [_attribute(f"PhysicalSize{axis}", text) for axis in "ZYX"]
        units = [_attribute(f"PhysicalSize{axis}Unit", text) or "um" for axis in "ZYX"]
        z, y, x = (_positive(stated) * to_mm(unit) for stated, unit in zip(sizes, units, strict=True))
    else:
        return None, None
    return (y, x) if min(y, x) > 0 else None, z if z > 0 else None


def _positive(text: str) -> float:
    """A stated size; 0 if the text is no number above 0, and so states none."""
    try:
        return size if (size := float(text)) > 0 else 0.0  # not NaN either
    except ValueError:
        return 0.0


def to_mm(unit: str) -> float:
    """Millimetres per unit as ImageJ and OME write it; 0 if it is not a length.

    The micro sign may be U+00B5 or the Greek letter U+03BC, itself or as an escape sequence.
    """
    word = re.sub(r"\\u00?b5|\\u03bc|[\u00b5\u03bc]", "u", unit.strip().lower())
    return _TO_MM.get(word, _TO_MM.get(word.removesuffix("s"), 0.0))


def _stated_bits(image: "Image") -> int | None:
    """8 for 8-bit pixels; for wider ones the bits that TIFF or OME state, None if neither does."""
    if image.mode in ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK"):
        return 8
    tags = getattr(image, "tag_v2", {})
    stated = [_attribute("SignificantBits", _description(image)), tags.get(258)]  # BitsPerSample
    # MaxSampleValue and SMaxSampleValue count only as 2^n - 1: some writers store the brightest pixel there.
    whole = {(1 << bits) - 1: bits for bits in range(8, 16)}
    stated += [whole.get(value) for tag in (281, 341) if (value := _first_int(tags.get(tag))) is not None]
    return next((bits for value in stated if (bits := _first_int(value)) is not None and 8 <= bits < 16), None)


def _first_int(value: object) -> int | None:
    try:
        return int(value[0] if isinstance(value, tuple) else value)  # type: ignore[call-overload]
    except (TypeError, ValueError, IndexError):
        return None


def _description(image: "Image") -> str:
    """ImageDescription. TIFF says ASCII, OME writes UTF-8, older files Latin-1; Pillow decodes all as Latin-1."""
    text = str(getattr(image, "tag_v2", {}).get(270, ""))
    try:
        return text.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return text


def _attribute(name: str, text: str) -> str:
    """An attribute of the first <Pixels> element of an OME-XML; empty if it is missing."""
    pixels = _word(r"<(?:\w+:)?Pixels\b([^>]*)", text)
    match = re.search(rf"""\b{name}\s*=\s*(["'])(.*?)\1""", pixels)
    return unescape(match[2]).strip() if match else ""


def _word(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    return match[1] if match else ""
