"""MATLAB .mat files of versions 5 to 7.2: [axial, lateral, B-scan] unless a sidecar declares other axes.

Duke's public sets (Farsiu et al. 2014, Chiu et al. 2015) store their `images` so. Format: MathWorks, MAT-File Format,
R2019b. Its parser here reads arrays of numbers only; scipy's ends the process on one in 4,000 damaged files. Version
7.3 is HDF5, which is not read.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError, one_line
from octfm.formats.arrays import exact_gray, in_order
from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.declared import read_declared
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file
from octfm.volume.volume import Shape3

_NAMES = ("images", "volume", "voxels")
"""Names that mark the volume among several arrays; if it has one B-scan, MATLAB drops the last axis."""
_FILE_HEADER = 128
_MATRIX, _COMPRESSED = 14, 15
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
"""dtype by data type. Doubles that hold whole numbers are stored as narrow integers."""
_NUMBERS = range(6, 16)
"""Array classes double to uint64; the others are cells, structs, text, sparse arrays and objects."""
_LOGICAL_OR_COMPLEX = 0x0200 | 0x0800
_HEAD = 4096
"""Bytes that hold an array's header: its flags, dimensions and a name of at most 63 letters."""
_MOST_ARRAYS = 10_000


@dataclass(frozen=True)
class _Array:
    """Where an array of numbers lies in the file."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    at: int
    """Of the element's content in the file, which is a zlib stream if `packed`."""
    size: int
    packed: bool
    skip: int
    """Bytes before the numbers, after inflating."""


def open_bscans(uri: str) -> Bscans:
    axes = read_declared(uri).axes or "HWD"
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        array = _volume(file, size, uri)
        height, width, count = (*array.shape, 1)[:3]
        stored: Shape3 = (height, width, count)
        check_size(in_order(stored, axes), uri, array.dtype.itemsize)
        expect_bytes(uri, size, array.at + array.size)
        uid = uid_of(file, size)

    def decode() -> np.ndarray:
        needed = array.dtype.itemsize * prod(stored)
        with open_file(uri, whole=True) as whole:
            whole.seek(array.at)
            if array.packed:
                inflate = zlib.decompressobj()
                content = inflate.decompress(whole.read(array.size), array.skip + needed)[array.skip :]
                inflate.decompress(inflate.unconsumed_tail, 8)  # padding, behind which zlib verifies its checksum
                if not inflate.eof:
                    raise ValueError("the compressed array has no end")
            else:
                whole.seek(array.skip, io.SEEK_CUR)
                content = whole.read(needed)
        expect_bytes(uri, len(content), needed)
        voxels = np.frombuffer(content, array.dtype).reshape(stored, order="F")
        return exact_gray(voxels.transpose(in_order((0, 1, 2), axes)), uri)

    bits = 8 if array.dtype.itemsize == 1 else None
    return Bscans(uri=uri, shape=in_order(stored, axes), decode=decode, uid=uid, bits=bits)


def _volume(file: BinaryIO, size: int, uri: str) -> _Array:
    arrays = list(_arrays(file, size, uri))
    named = [array for array in arrays if array.name in _NAMES and len(array.shape) in (2, 3)]
    volumes = named or [array for array in arrays if len(array.shape) == 3]
    if len(volumes) != 1:
        shapes = sorted(f"{array.name} {' x '.join(map(str, array.shape))}" for array in arrays)
        found = one_line(", ".join(shapes))[:120] or "none of numbers"
        raise ReadError(
            "unknown_axes",
            f"{uri}: which of its arrays is the volume? ({found}); save it as images, [axial, lateral, B-scan]",
        )
    return volumes[0]


def _arrays(file: BinaryIO, size: int, uri: str) -> Iterator[_Array]:
    """The arrays of real numbers."""
    file.seek(0)
    header = file.read(_FILE_HEADER)
    if not header.startswith(b"MATLAB 5.0"):
        raise ReadError(
            "not_dicom",
            f"{uri}: an HDF5 file, as MATLAB's -v7.3 writes; save its volume as .npz, or in MATLAB with -v7",
        )
    order = {b"IM": "<", b"MI": ">"}.get(header[126:])
    if order is None:
        raise ReadError("damaged_file", f"{uri}: states no byte order; fetch it again")
    at = _FILE_HEADER
    for _ in range(_MOST_ARRAYS):
        if at + 8 > size:
            return
        file.seek(at)
        kind, length = struct.unpack(f"{order}2I", file.read(8))
        at += 8
        head = file.read(min(length, _HEAD))
        if packed := kind == _COMPRESSED:
            head = zlib.decompressobj().decompress(head, _HEAD)
            kind, head = int.from_bytes(head[:4], "little" if order == "<" else "big"), head[8:]
        if kind == _MATRIX and (found := _header(head, order)) is not None:
            name, shape, dtype, skip = found
            yield _Array(name, shape, dtype, at, length, packed, skip + 8 * packed)
        at += length
    raise ReadError("damaged_file", f"{uri}: more than {_MOST_ARRAYS:,} arrays; save its volume alone")


def _header(head: bytes, order: str) -> tuple[str, tuple[int, ...], np.dtype, int] | None:
    """Name, shape, dtype as stored and place of the numbers; None if the array does not hold real numbers."""
    _, _, flags, end = _tag(head, 0, order)
    (word,) = struct.unpack_from(f"{order}I", head, flags)
    if word & 0xFF not in _NUMBERS or word & _LOGICAL_OR_COMPLEX:
        return None
    _, length, at, end = _tag(head, end, order)
    shape = tuple(np.frombuffer(head[at : at + length], f"{order}i4").tolist())
    _, length, at, end = _tag(head, end, order)
    name = head[at : at + length].decode("latin-1")
    kind, length, at, _ = _tag(head, end, order)
    dtype = np.dtype(f"{order}{_STORED[kind]}")
    if min(shape) < 0 or prod(shape) * dtype.itemsize != length:
        raise ValueError(f"{length} bytes for an array of {shape}")
    return name, shape, dtype, at


def _tag(head: bytes, at: int, order: str) -> tuple[int, int, int, int]:
    """Data type, length and place of the element at `at`, and the place of the next one."""
    kind, length = struct.unpack_from(f"{order}2I", head, at)
    if kind >> 16:  # up to four bytes lie within the tag
        return kind & 0xFFFF, kind >> 16, at + 4, at + 8
    return kind, length, at + 8, at + 8 + 8 * -(-length // 8)
