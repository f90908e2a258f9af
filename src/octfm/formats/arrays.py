"""NumPy arrays, .npy and .npz: [B-scan, axial, lateral] unless a sidecar declares other axes.

An archive may say more about itself: an array `spacing_mm` (dz, dy, dx) and a text `laterality`. Format: numpy.lib.format; nothing is
ever unpickled.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from tokenize import TokenError
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, damage_has_a_code, uid_of
from octfm.formats.declared import read_declared, spacing_from
from octfm.io.archive import open_file

_NAMES = ("volume", "voxels")
"""Which of several arrays is meant."""
_FACT_BYTES = 4096
_MORE_BYTES = 2**20
"""A header, and what a careless program left behind the array; more is no array of that size."""


def open_bscans(uri: str) -> Bscans:
    declared = read_declared(uri)
    axes = declared.axes or "DHW"
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        with _stream(file, uri) as (stream, facts, left):
            stored, fortran, dtype = _array_header(stream, uri)
            check_size(tuple(stored), uri, dtype.itemsize)  # type: ignore[arg-type]
            if left is not None and left < dtype.itemsize * int(np.prod(stored)):
                raise ReadError("truncated_pixel_data", f"{uri}: the array ends early; fetch it again")
            if left is not None and left > dtype.itemsize * int(np.prod(stored)) + _MORE_BYTES:
                raise ReadError(
                    "decompression_bomb",
                    f"{uri}: {left:,} bytes for an array of {stored}, which takes {dtype.itemsize * int(np.prod(stored)):,}; save it again",
                )
        uid = uid_of(file, size)
    shape = tuple(stored[axes.index(axis)] for axis in "DHW")
    spacing = spacing_from(facts["spacing_mm"], uri) if "spacing_mm" in facts else None

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as whole, _stream(whole, uri) as (stream, _, _):
            _array_header(stream, uri)
            count = int(np.prod(stored))
            content = stream.read(count * dtype.itemsize)
            if len(content) < count * dtype.itemsize:
                raise ReadError("truncated_pixel_data", f"{uri}: the array ends early; fetch it again")
            stream.read()  # to the end, where the checksum of an archive is verified
        array = np.frombuffer(content, dtype).reshape(stored, order="F" if fortran else "C")
        return exact_gray(to_axes(array, axes), uri)

    return Bscans(
        uri=uri,
        shape=shape,  # type: ignore[arg-type]
        decode=decode,
        uid=uid,
        in_plane_mm=spacing[1:] if spacing else None,
        between_mm=spacing[0] if spacing else None,
        laterality=str(facts.get("laterality", "")),
        bits=8 if dtype.itemsize == 1 else None,
    )


def named_arrays(uri: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz by name. Raises ReadError."""
    with damage_has_a_code(uri), np.load(uri, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def to_axes(array: np.ndarray, axes: str) -> np.ndarray:
    """An array whose axes are the letters of `axes`, outermost first, as [D, H, W]."""
    return array.transpose([axes.index(axis) for axis in "DHW"])


def exact_gray(array: np.ndarray, uri: str) -> np.ndarray:
    """uint8 or uint16 with the same values. Raises ReadError unsupported_pixels where that is not possible: scaling would be a guess."""
    if array.dtype.newbyteorder("=") in (np.uint8, np.uint16):
        return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    if array.dtype.kind in "iuf" and np.isfinite(array).all():
        low, high = array.min(), array.max()
        if low >= 0 and high < 2**16 and (array.dtype.kind != "f" or (array == np.rint(array)).all()):
            return np.ascontiguousarray(array).astype(np.uint8 if high < 256 else np.uint16)
    raise ReadError(
        "unsupported_pixels",
        f"{uri}: {array.dtype} values that are no gray levels from 0 to 65,535; save it as uint8 or uint16",
    )


@contextmanager
def _stream(file: BinaryIO, uri: str) -> Iterator[tuple[BinaryIO, dict[str, object], int | None]]:
    """The stored array of the volume at its header, what the file says beside it, and how many bytes there are after the stream's start."""
    file.seek(0)
    if file.read(2) != b"PK":
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        yield file, {}, size
        return
    with zipfile.ZipFile(file) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        volumes = [name for name in members if name in _NAMES] or [
            n for n in members if _dimensions(archive, members[n], uri) == 3
        ]
        if len(volumes) != 1:
            found = ", ".join(sorted(members))[:120] or "none"
            raise ReadError(
                "unknown_axes",
                f"{uri}: which of its arrays is the volume? ({found}); call one of them volume, [B-scan, axial, lateral]",
            )
        facts = {name: _fact(archive, members[name], uri) for name in ("spacing_mm", "laterality") if name in members}
        with archive.open(members[volumes[0]]) as stream:
            yield stream, facts, archive.getinfo(members[volumes[0]]).file_size  # type: ignore[misc]


def _dimensions(archive: zipfile.ZipFile, member: str, uri: str) -> int:
    with archive.open(member) as stream:
        return len(_array_header(stream, uri, dimensions=None)[0])


def _fact(archive: zipfile.ZipFile, member: str, uri: str) -> object:
    if archive.getinfo(member).file_size > _FACT_BYTES:
        raise ReadError(
            "contradicting_declaration", f"{uri}: its {member} is no number or word; see octfm's guide to data"
        )
    with archive.open(member) as stream:
        return np.lib.format.read_array(io.BytesIO(stream.read()), allow_pickle=False).tolist()


def _array_header(stream, uri: str, dimensions: int | None = 3) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ReadError("damaged_file", f"{uri}: version {version} of the NumPy format; expected 1.0 or 2.0")
    try:
        shape, fortran, dtype = read(stream)
    except (SyntaxError, TokenError, ValueError, TypeError):  # the header is a Python literal
        raise ReadError("damaged_file", f"{uri}: the header of the array cannot be read; save it again") from None
    if dimensions is not None and (len(shape) != dimensions or dtype.hasobject or dtype.kind not in "iuf"):
        raise ReadError(
            "unknown_axes",
            f"{uri}: a {len(shape)}-dimensional array of {dtype.str}; expected [B-scan, axial, lateral] numbers",
        )
    return shape, fortran, dtype
