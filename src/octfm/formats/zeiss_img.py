"""Zeiss Cirrus .img: the bare voxels of a cube without a header, upside down and mirrored.

Voxels are stored from the bottom and from the right, as four published readers agree (retimat, the JHU reader,
oct-preprocess-cirrus, pyoct). The size of the file identifies the two standard cubes; the instrument's file names give
the shape of others, and the eye. Not verified on a real file.
"""

import io
import re
from pathlib import PurePath

import numpy as np

from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file

ROWS = 1024
_CUBES = {512 * 128 * ROWS: (128, 512), 200 * 200 * ROWS: (200, 200)}
"""Bytes -> (D, W)."""
_NAME = re.compile(r"([A-Za-z ]*Cube) (\d+)x(\d+)_[\d-]+_[\d-]+_(OD|OS)_sn\d+_cube_(?:z|raw)\.img$", re.IGNORECASE)


def fits(name: str, size: int) -> bool:
    """Whether a file without magic bytes can be a cube: it is called .img and has the size of one."""
    return PurePath(name).suffix.lower() == ".img" and (
        size in _CUBES or (size > 0 and size % ROWS == 0 and _named(name) is not None)
    )


def open_bscans(uri: str) -> Bscans:
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        named = _named(uri)
        depth, width = (int(named[3]), int(named[2])) if named else _CUBES[size]
        shape = (depth, ROWS, width)
        check_size(shape, uri)
        expect_bytes(uri, size, depth * ROWS * width, 0)
        uid = uid_of(file, size)

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as stream:
            stored = np.frombuffer(stream.read(), np.uint8).reshape(shape)
        return np.ascontiguousarray(stored[:, ::-1, ::-1])

    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        uid=uid,
        laterality=named[4] if named else "",
        scanner="zeiss_cirrus",
        protocol=f"{named[1]} {named[2]}x{named[3]}" if named else "",
        flags=("laterality_from_name",) if named else (),
    )


def _named(uri: str) -> re.Match[str] | None:
    return _NAME.search(PurePath(uri).name)
