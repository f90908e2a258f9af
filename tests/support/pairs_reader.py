"""A reader of a made-up format, in a module of its own: a child process that reads with it imports this file alone."""

import io
from pathlib import Path

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, uid_of
from octfm.io.archive import open_file
from support.small_store import prepared_eye, small_preprocessing


class PairsReader:
    """A made-up format: `PAIRS`, then for each eye its side, size and voxels."""

    SIZE = 3 * 4

    def fits(self, head, uri):
        return head.startswith(b"PAIRS")

    def volumes(self, uri):
        return ["right", "left"]

    def open_bscans(self, uri, name):
        with open_file(uri) as file:
            content = file.read()
        eyes, rest = {}, content[5:]
        for side in self.volumes(uri):
            shape = tuple(np.frombuffer(rest[: self.SIZE], "<u4").tolist())
            end = self.SIZE + int(np.prod(shape))
            if len(rest) < end:
                raise ReadError("truncated_pixel_data", f"{uri}: {side} eye is incomplete; fetch it again")
            eyes[side], rest = (shape, rest[self.SIZE : end]), rest[end:]
        shape, voxels = eyes[name]
        return Bscans(
            uri,
            shape,
            decode=lambda: np.frombuffer(voxels, np.uint8).reshape(shape),
            uid=uid_of(io.BytesIO(content), len(content)),
            in_plane_mm=(0.03, 0.18),
            between_mm=0.7,
            laterality="OD" if name == "right" else "OS",
            scanner="pairs",
            participant=Path(uri).stem,
        )


def write_pairs(path, seed):
    eyes = [prepared_eye(2 * seed + side, small_preprocessing()).voxels for side in range(2)]
    path.write_bytes(b"PAIRS" + b"".join(np.array(e.shape, "<u4").tobytes() + e.tobytes() for e in eyes))
    return eyes
