"""NumPy arrays, .npy and .npz: [B-scan, axial, lateral] unless a sidecar declares other axes.

An .npz may also hold `spacing_mm`, an array (dz, dy, dx), and `laterality`, a text. Format: numpy.lib.format.
Nothing is ever unpickled: a pickle can run code.
"""

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from tokenize import TokenError
from typing import IO, BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.arrays import exact_gray, in_order
from octfm.formats.bscans import Bscans, check_size, damage_has_a_code, uid_of
from octfm.formats.declared import KEYS, read_declared, spacing_from
from octfm.formats.names import may_be_an_eye
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file
from octfm.volume.volume import Shape3

_NAMES = ("volume", "voxels")
"""Names that mark the volume among several arrays."""
_FACT_BYTES = 4096
_SLACK_BYTES = 2**20
"""Allowance for the header and for trailing bytes of careless writers."""


def open_bscans(uri: str) -> Bscans:
    declared = read_declared(uri)
    axes = declared.axes or "DHW"
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        with _volume_stream(file, uri) as (stream, facts, available):
            stored, fortran, dtype = _array_header(stream, uri)
            check_size(stored, uri, dtype.itemsize)
            needed = dtype.itemsize * prod(stored)
            expect_bytes(uri, available, needed)
            if available > needed + _SLACK_BYTES:
                raise ReadError(
                    "decompression_bomb",
                    f"{uri}: {available:,} bytes for an array of {stored}, which takes {needed:,}; save it again",
                )
        uid = uid_of(file, size)
    spacing = spacing_from(facts["spacing_mm"], uri) if "spacing_mm" in facts else None
    eye = facts.get("laterality", "")
    eye = eye.decode("latin-1") if isinstance(eye, bytes) else str(eye)
    if not may_be_an_eye(eye):
        raise ReadError(
            "contradicting_declaration", f"{uri}: its laterality is {eye[:40]!r}; expected {KEYS['laterality']}"
        )

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as whole, _volume_stream(whole, uri) as (stream, _, _):
            _array_header(stream, uri)
            content = stream.read(needed)
            expect_bytes(uri, len(content), needed)
            stream.read()  # zipfile verifies a member's checksum only when it reaches the end
        array = np.frombuffer(content, dtype).reshape(stored, order="F" if fortran else "C")
        return exact_gray(array.transpose(in_order((0, 1, 2), axes)), uri)

    return Bscans(
        uri=uri,
        shape=in_order(stored, axes),
        decode=decode,
        uid=uid,
        in_plane_mm=spacing[1:] if spacing else None,
        between_mm=spacing[0] if spacing else None,
        laterality=eye,
        bits=8 if dtype.itemsize == 1 else None,
    )


def named_arrays(uri: str) -> dict[str, np.ndarray]:
    """All arrays of an .npz by name. Raises ReadError."""
    with damage_has_a_code(uri), np.load(uri, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


@contextmanager
def _volume_stream(file: BinaryIO, uri: str) -> Iterator[tuple[IO[bytes], dict[str, object], int]]:
    """The stored array at its header, the other facts of an .npz, and the bytes of the array with its header."""
    file.seek(0)
    if file.read(2) != b"PK":
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        yield file, {}, size
        return
    with zipfile.ZipFile(file) as archive:
        members = {name.removesuffix(".npy"): name for name in archive.namelist() if name.endswith(".npy")}
        if "raw_volume" in members and "meta.json" in archive.namelist():
            raise ReadError(
                "not_dicom",
                f"{uri}: a volume that eyepy saved, of values whose white is not stated; read the file it imported, or "
                "in Python: np.savez(name, volume=eye.data, spacing_mm=eye.scale, laterality=eye.laterality)",
            )
        named = [member for name, member in members.items() if name in _NAMES]
        volumes = named or [member for member in members.values() if _dimensions(archive, member, uri) == 3]
        if len(volumes) != 1:
            found = ", ".join(sorted(members))[:120] or "none"
            raise ReadError(
                "unknown_axes",
                f"{uri}: which of its arrays is the volume? ({found}); name it volume, [B-scan, axial, lateral]",
            )
        facts = {name: _fact(archive, members[name], uri) for name in ("spacing_mm", "laterality") if name in members}
        with archive.open(volumes[0]) as stream:
            yield stream, facts, archive.getinfo(volumes[0]).file_size


def _dimensions(archive: zipfile.ZipFile, member: str, uri: str) -> int:
    with archive.open(member) as stream:
        return len(_any_array_header(stream, uri)[0])


def _fact(archive: zipfile.ZipFile, member: str, uri: str) -> object:
    if archive.getinfo(member).file_size > _FACT_BYTES:
        raise ReadError(
            "contradicting_declaration",
            f"{uri}: its {member} is too long for a number or a word; see octfm's guide to data",
        )
    with archive.open(member) as stream:
        return np.lib.format.read_array(io.BytesIO(stream.read()), allow_pickle=False).tolist()


def _array_header(stream: IO[bytes], uri: str) -> tuple[Shape3, bool, np.dtype]:
    """Shape as stored, whether the order is Fortran's, dtype. Raises ReadError for anything but a volume of numbers."""
    shape, fortran, dtype = _any_array_header(stream, uri)
    if len(shape) != 3 or dtype.hasobject or dtype.kind not in "iuf":
        raise ReadError(
            "unknown_axes",
            f"{uri}: a {len(shape)}-dimensional array of {dtype.str}; expected [B-scan, axial, lateral] numbers",
        )
    return shape, fortran, dtype


def _any_array_header(stream: IO[bytes], uri: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    # Version 3.0 exists for structured arrays with names in UTF-8, which are no volumes.
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ReadError("damaged_file", f"{uri}: version {version} of the NumPy format; expected 1.0 or 2.0")
    try:
        return read(stream)
    except (SyntaxError, TokenError, ValueError, TypeError):  # the header is a Python literal
        raise ReadError("damaged_file", f"{uri}: the header of the array cannot be read; save it again") from None
