"""Bioptigen .OCT: a header of fields, then per B-scan more fields and its 16-bit A-scans.

A field is the length of its key, the key, the length of its value, the value. Structure: OCT-Converter's reader, which
goes by the order of the fields, not by their keys. Not verified on a real file.
"""

import io
import struct
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file
from octfm.volume.volume import Layout

_START = 6
"""First field, after a magic number and a version."""
_HEADER = (
    "frame_count", "line_count", "line_length", "sample_format", "description", "x_min", "x_max", "x_caption",
    "y_min", "y_max", "y_caption", "scan_type", "scan_depth", "scan_length", "azimuth_length", "elevation_length",
    "object_distance", "scan_angle", "scans", "frames", "doppler", "config",
)  # fmt: skip
_FRAME = ("date", "timestamp", "lines")
_LONGEST_KEY, _LONGEST_VALUE = 64, 64
_LAYOUTS: dict[int, Layout] = {0: "line", 1: "raster", 3: "radial"}


def fits(head: bytes) -> bool:
    """Whether a file starts with two fields whose keys are capital letters, the second with a value of 4 bytes."""
    at = _START
    for value_bytes in (None, 4):
        length = int.from_bytes(head[at : at + 4], "little")
        key, count = head[at + 4 : at + 4 + length], head[at + 4 + length : at + 8 + length]
        if not (1 < length <= _LONGEST_KEY and key.rstrip(b"\0").isalpha() and key.isupper() and len(count) == 4):
            return False
        if value_bytes is not None and int.from_bytes(count, "little") != value_bytes:
            return False
        at += 8 + length
    return True


def open_bscans(uri: str) -> Bscans:
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        at = _skip_key(file, _START, size, uri)[1]
        facts, at = _fields(file, at, _HEADER, size, uri)
        count, width, height = (
            int.from_bytes(facts[name], "little") for name in ("frame_count", "line_count", "line_length")
        )
        shape = (count, height, width)
        check_size(shape, uri, bytes_per_voxel=2)
        at, places = at + 4, []
        for i in range(count):
            frame, at = _fields(file, _skip_key(file, at, size, uri)[1], _FRAME, size, uri)
            if int.from_bytes(frame["lines"], "little") != width:
                raise ReadError(
                    "mixed_images", f"{uri}: B-scan {i + 1} differs in width from the first; export it again"
                )
            at = _skip_key(file, at, size, uri)[1]
            places.append(at)
            at += 2 * width * height + 4
            expect_bytes(uri, size, at)
        uid = uid_of(file, size)
    scans, frames, kind = (int.from_bytes(facts[name], "little") for name in ("scans", "frames", "scan_type"))
    # Both counts above 1 mean repeated B-scans; which of the two counts the repeats is not documented.
    layout: Layout = "repeated" if min(scans, frames) > 1 else _LAYOUTS.get(kind, "repeated")
    depth_mm, along_mm, across_mm = (
        _float(facts[name]) for name in ("scan_depth", "azimuth_length", "elevation_length")
    )

    def decode() -> np.ndarray:
        voxels = np.empty(shape, np.uint16)
        with open_file(uri, whole=True) as stream:
            for i, start in enumerate(places):
                stream.seek(start)
                voxels[i] = np.frombuffer(stream.read(2 * width * height), "<u2").reshape(width, height).T
        return voxels

    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        uid=uid,
        in_plane_mm=(depth_mm / height, along_mm / width) if depth_mm > 0 and along_mm > 0 else None,
        between_mm=across_mm / count if across_mm > 0 else None,
        layout=layout,
        scanner="bioptigen",
    )


def _fields(file: BinaryIO, at: int, names: tuple[str, ...], size: int, uri: str) -> tuple[dict[str, bytes], int]:
    """Values of consecutive fields by name, cut to 64 bytes, and the offset of the next field."""
    found = {}
    for name in names:
        count, at = _skip_key(file, at, size, uri)
        found[name] = file.read(min(count, _LONGEST_VALUE))
        at += count
    return found, at


def _skip_key(file: BinaryIO, at: int, size: int, uri: str) -> tuple[int, int]:
    """Length and offset of the value of the field at `at`; leaves `file` at the value."""
    file.seek(at)
    length = int.from_bytes(file.read(4), "little")
    head = file.read(length + 4) if length <= _LONGEST_KEY else b""
    if len(head) < length + 4 or not head:
        raise ReadError(
            "truncated_pixel_data",
            f"{uri}: no valid field at byte {at:,} of {size:,}; the file is cut or damaged, fetch it again",
        )
    return int.from_bytes(head[-4:], "little"), at + 4 + len(head)


def _float(value: bytes) -> float:
    (number,) = struct.unpack("<d", value) if len(value) == 8 else (0.0,)
    return number if np.isfinite(number) else 0.0
