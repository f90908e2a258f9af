"""Topcon .fda and .fds: named chunks; B-scans are JPEG 2000 (IMG_JPEG) or 16-bit (IMG_MOT_COMP_03, IMG_SCAN_03).

Layers (CONTOUR_INFO) count rows from the bottom of the image, and B-scans from the last.

Structure: the uocte project's notes on the Topcon file format, and OCT-Converter's reader. Not verified on a real file.
"""

import io
import struct
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.images import decode_gray
from octfm.formats.names import scanner_slug
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file
from octfm.volume.volume import Layout, Shape3, Spacing3, Surfaces

_HEADER_BYTES = 15
_LAYOUTS: dict[int, Layout] = {3: "radial", 4: "radial"}
"""scan_mode -> layout; 2 is a raster, 3 radial, 4 a cross."""

_CONTOUR = struct.Struct("<20sH3I")
"""Name of a layer, kind, width, number of B-scans, bytes."""
_LAYERS = {
    "MULTILAYERS_1": "ILM",
    "MULTILAYERS_2": "RNFL_GCL",
    "MULTILAYERS_3": "GCL_IPL",
    "MULTILAYERS_4": "IPL_INL",
    "MULTILAYERS_8": "INL_OPL",
    "MULTILAYERS_9": "ELM",
    "MULTILAYERS_5": "MZ_EZ",
    "MULTILAYERS_6": "IZ_RPE",
    "MULTILAYERS_7": "BM",
    "MULTILAYERS_10": "CSI",
}
"""Name in the file -> boundary, from the vitreous downwards, as OCT-Converter knows them."""

Chunks = dict[str, list[tuple[int, int]]]
"""Name -> (offset, size) of each chunk of that name."""
Stored = tuple[int, Shape3, list[tuple[int, int]]]
"""scan_mode, shape, and (offset, size) of each compressed B-scan, or of all voxels."""


def open_bscans(uri: str) -> Bscans:
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        chunks = _chunks(file, size, uri)
        if "@IMG_JPEG" in chunks:
            mode, shape, places = _compressed(file, chunks["@IMG_JPEG"][0], uri)
        else:  # uncompressed voxels lie in one piece
            mode, shape, places = _plain(file, chunks, uri)
        spacing = _spacing(file, chunks, shape)
        eye = _first(file, chunks, ("@CAPTURE_INFO_02", "@CAPTURE_INFO"), 1)
        patient = _first(file, chunks, ("@PATIENT_INFO_02", "@PATIENT_INFO"), 32)
        model = _first(file, chunks, ("@HW_INFO_03", "@HW_INFO_02", "@HW_INFO_01"), 16)
        uid = uid_of(file, size)
        contours = _contours(file, chunks, shape)

    def surfaces() -> Surfaces | None:
        if not contours:
            return None
        heights = np.empty((len(contours), shape[0], shape[2]), np.float32)
        with open_file(uri, whole=True) as stream:
            for row, at in enumerate(contours.values()):
                stream.seek(at)
                stored = np.frombuffer(stream.read(2 * shape[0] * shape[2]), "<u2").reshape(shape[0], shape[2])
                # 0 is the bottom of the image, where no layer is.
                found = (stored > 0) & (stored <= shape[1])
                heights[row] = np.where(found, shape[1] - stored.astype(np.float32), np.nan)[::-1]
        return Surfaces(tuple(contours), heights, spacing[1] if spacing else None, uri)

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as stream:
            if "@IMG_JPEG" not in chunks:
                stream.seek(places[0][0])
                return np.frombuffer(stream.read(places[0][1]), "<u2").reshape(shape).astype(np.uint16)
            found = []
            for i, (offset, count) in enumerate(places):
                stream.seek(offset)
                name = f"{uri}: B-scan {i + 1} of {shape[0]}"
                found.append(decode_gray(stream.read(count), name, ("JPEG2000", "JPEG")))
                # At once: others as large may not fit into memory.
                if found[-1].shape != shape[1:]:
                    h, w = found[-1].shape
                    raise ReadError("damaged_file", f"{name} is {w} x {h}, expected {shape[2]} x {shape[1]}")
        return np.stack(found)

    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        uid=uid,
        in_plane_mm=spacing[1:] if spacing else None,
        between_mm=spacing[0] if spacing else None,
        layout=_LAYOUTS.get(mode),
        laterality={b"\0": "R", b"\1": "L"}.get(eye, ""),
        scanner=scanner_slug("Topcon", _text(model)),
        participant=_text(patient),
        surfaces=surfaces,
    )


def _chunks(file: BinaryIO, size: int, uri: str) -> Chunks:
    """A chunk is the length of its name, the name, the size of its content, the content; length 0 ends the file."""
    found: Chunks = {}
    at = _HEADER_BYTES
    while True:
        file.seek(at)
        length = file.read(1)
        if length == b"\0":
            return found
        head = file.read(length[0] + 4) if length else b""
        if not length or len(head) < length[0] + 4:
            raise ReadError(
                "truncated_pixel_data",
                f"{uri}: no end marker after {size:,} bytes; the file is incomplete, fetch it again",
            )
        count = int.from_bytes(head[-4:], "little")
        at += 1 + len(head)
        expect_bytes(uri, size, at + count)
        found.setdefault(head[:-4].decode("latin-1"), []).append((at, count))
        at += count


def _compressed(file: BinaryIO, chunk: tuple[int, int], uri: str) -> Stored:
    offset, length = chunk
    file.seek(offset)
    mode, _, _, width, height, count, _ = struct.unpack("<B6I", file.read(25))
    shape = (count, height, width)
    check_size(shape, uri)
    places, at = [], offset + 25
    for i in range(count):
        file.seek(at)
        (size,) = struct.unpack("<I", file.read(4))
        if at + 4 + size > offset + length:
            raise ReadError(
                "truncated_pixel_data",
                f"{uri}: B-scan {i + 1} of {count} extends beyond its chunk; fetch it again",
            )
        places.append((at + 4, size))
        at += 4 + size
    return mode, shape, places


def _plain(file: BinaryIO, chunks: Chunks, uri: str) -> Stored:
    name = next((name for name in ("@IMG_SCAN_03", "@IMG_MOT_COMP_03") if name in chunks), None)
    if name is None:
        raise ReadError("missing_pixel_data", f"{uri}: no B-scans among its chunks; export it again with images")
    offset, length = chunks[name][0]
    file.seek(offset)
    mode, width, height, bits, count = struct.unpack("<B4I", file.read(17))
    shape = (count, height, width)
    check_size(shape, uri, bytes_per_voxel=2)
    needed = 2 * width * height * count
    # The header of this chunk has 22 bytes; its last five are not used.
    if bits != 16 or 22 + needed > length:
        raise ReadError(
            "damaged_file",
            f"{uri}: {name} of {length:,} bytes for {count} B-scans of {height} x {width}, {bits} bits; fetch it again",
        )
    return mode, shape, [(offset + 22, needed)]


def _contours(file: BinaryIO, chunks: Chunks, shape: Shape3) -> dict[str, int]:
    """Boundary -> offset of its heights, for those that are whole and have the size of the volume."""
    found: dict[str, int] = {}
    expected = 2 * shape[0] * shape[2]
    for offset, size in chunks.get("@CONTOUR_INFO", []):
        file.seek(offset)
        name, _, width, count, stated = _CONTOUR.unpack(file.read(_CONTOUR.size))
        fits = (count, width, stated) == (shape[0], shape[2], expected) and size >= _CONTOUR.size + expected
        if fits and (boundary := _LAYERS.get(_text(name))):
            found.setdefault(boundary, offset + _CONTOUR.size)
    return {boundary: found[boundary] for boundary in _LAYERS.values() if boundary in found}


def _spacing(file: BinaryIO, chunks: Chunks, shape: Shape3) -> Spacing3 | None:
    """From the size of the scanned field in mm and the axial resolution in micrometres."""
    for name, skip in (("@PARAM_SCAN_04", 12), ("@PARAM_SCAN_02", 21)):
        if name in chunks:
            file.seek(chunks[name][0][0] + skip)
            across, along, axial_um = struct.unpack("<3d", file.read(24))
            spacing = (along / shape[0], axial_um / 1000, across / shape[2])
            return spacing if all(np.isfinite(mm) and mm > 0 for mm in spacing) else None
    return None


def _first(file: BinaryIO, chunks: Chunks, names: tuple[str, ...], count: int) -> bytes:
    """The first `count` bytes of the first of these chunks that is there."""
    for name in names:
        if name in chunks:
            offset, size = chunks[name][0]
            file.seek(offset)
            return file.read(min(count, size))
    return b""


def _text(field: bytes) -> str:
    """Empty if it is not plain text: newer files encrypt identifying fields."""
    text = field.split(b"\0")[0]
    return text.decode("ascii").strip() if text.isascii() and text.decode("ascii").isprintable() else ""
