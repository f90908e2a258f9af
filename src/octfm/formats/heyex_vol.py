"""Heidelberg .vol: one Spectralis scan with fundus image and layers, as HEYEX exports it for research.

Structure: Heidelberg Engineering, "Spectralis Special Function: Exporting Raw Data" (HSF-OCT-100 to 103). Little
endian: a header of 2,048 bytes, the fundus image, then per B-scan a header with layers and float32 reflectivity.
eyepy writes the same structure with display values in place of reflectivity.
"""

import io
import struct
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, uid_of
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file
from octfm.volume.volume import Fundus, Layout, Lines, Surfaces

_HEADER_BYTES = 2048
FUNDUS = "Infrared image of the fundus, taken with the scan"
NO_VALUE = 1e30
"""Missing reflectivity and layers are stored as the largest float32; anything above this counts as missing."""
PATTERNS: dict[int, Layout] = {1: "line", 2: "circle", 5: "radial"}
"""Layout of a scan by the number of its pattern, in .vol and .e2e."""
LAYERS = (
    "ILM", "BM", "RNFL", "GCL", "IPL", "INL", "OPL", "ONL", "ELM", "IOS", "OPT", "CHO", "VIT", "ANT", "EZ", "IZ", "RPE",
)  # fmt: skip
"""Names of layers by their number, in .vol and .e2e."""


def open_bscans(uri: str) -> Bscans:
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
        expect_bytes(uri, size, _HEADER_BYTES)
        file.seek(0)
        head = file.read(_HEADER_BYTES)
        version = head[:12]
        width, count, height = struct.unpack_from("<3I", head, 12)
        dx, between, dy = struct.unpack_from("<3d", head, 24)
        slo_width, slo_height, slo_dx, slo_dy = struct.unpack_from("<2I2d", head, 48)
        pattern, stated_bytes = struct.unpack_from("<iI", head, 96)
        shape = (count, height, width)
        check_size(shape, uri, bytes_per_voxel=4)
        first = _HEADER_BYTES + slo_width * slo_height
        head_bytes = _bscan_header_bytes(file, first, stated_bytes, shape, size, uri)
        step = head_bytes + 4 * width * height  # from one B-scan to the next: its header and float32 pixels
        expect_bytes(uri, size, first + count * step)
        ends, layer_counts = np.empty((count, 4)), []
        for i in range(count):
            file.seek(first + i * step)
            bscan = file.read(60)
            if not bscan.startswith((b"HSF-BS", b"ep-v")):
                raise ReadError(
                    "damaged_file",
                    f"{uri}: B-scan {i + 1} of {count} does not start where the header says; export it again",
                )
            ends[i] = struct.unpack_from("<4d", bscan, 16)
            layer_counts.append(struct.unpack_from("<2I", bscan, 48))
        uid = uid_of(file, size)
    layout = PATTERNS.get(pattern)

    def decode() -> np.ndarray:
        voxels = np.empty(shape, np.uint8)
        with open_file(uri, whole=True) as stream:
            for i in range(count):
                stream.seek(first + i * step + head_bytes)
                raw = np.frombuffer(stream.read(4 * width * height), "<f4").reshape(height, width)
                voxels[i] = display(raw) if version.startswith(b"HSF") else np.clip(np.rint(raw), 0, 255)
        return voxels

    def surfaces() -> Surfaces | None:
        num_layers = min(max(n for n, _ in layer_counts), len(LAYERS))
        heights = np.full((num_layers, count, width), np.nan, np.float32)
        with open_file(uri, whole=True) as stream:
            for i, (layers, offset) in enumerate(layer_counts):
                if offset + 4 * width * layers > head_bytes:
                    raise ReadError(
                        "damaged_file", f"{uri}: the layers of B-scan {i + 1} reach beyond its header; export it again"
                    )
                stream.seek(first + i * step + offset)
                layers = min(layers, num_layers)
                heights[:layers, i] = np.frombuffer(stream.read(4 * width * layers), "<f4").reshape(layers, width)
        heights[(heights > NO_VALUE) | (heights < 0)] = np.nan
        return Surfaces(LAYERS[:num_layers], heights, dy, uri) if num_layers else None

    def fundus() -> Fundus | None:
        if not slo_width or not slo_height:
            return None
        with open_file(uri, whole=True) as stream:
            stream.seek(_HEADER_BYTES)
            image = np.frombuffer(stream.read(slo_width * slo_height), np.uint8).reshape(slo_height, slo_width)
        return Fundus(image, FUNDUS, on_picture(ends, [slo_dx, slo_dy]) if layout != "circle" else None)

    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        uid=uid,
        in_plane_mm=(dy, dx),
        between_mm=between if between > 0 else None,
        # A circle stores its start and centre here, which are not the ends of a line.
        lines=Lines(ends[:, :2], ends[:, 2:]) if layout != "circle" else None,
        layout=layout,
        laterality=padded_text(head[84:88]),
        scanner="heidelberg_spectralis",
        participant=padded_text(head[140:164]),
        surfaces=surfaces,
        fundus=fundus,
    )


def on_picture(ends: np.ndarray, pixel_mm: list[float]) -> Lines | None:
    """B-scans whose `ends` [D, 4] are in mm, in pixels of the fundus picture; None where either is not stated."""
    scale = np.array(pixel_mm)
    known = np.isfinite(ends).all() and np.isfinite(scale).all() and (scale > 0).all()
    return Lines(ends[:, :2] / scale, ends[:, 2:] / scale) if known else None


def display(reflectivity: np.ndarray) -> np.ndarray:
    """uint8 as HEYEX displays it: the fourth root of the reflectivity, black where it is missing."""
    known = np.where(reflectivity < NO_VALUE, reflectivity, 0)
    return np.rint(255 * np.sqrt(np.sqrt(np.clip(known, 0, 1)))).astype(np.uint8)


def _bscan_header_bytes(
    file: BinaryIO, first: int, stated: int, shape: tuple[int, int, int], size: int, uri: str
) -> int:
    """Bytes of a B-scan header, which the file header and the B-scan header both state.

    Where they differ, as eyepy writes them, the first value that lets all B-scans fit into the file is taken.
    """
    expect_bytes(uri, size, first + 16)
    file.seek(first + 12)
    (own,) = struct.unpack("<I", file.read(4))
    count, height, width = shape
    fitting = [n for n in dict.fromkeys((own, stated)) if n >= 256 and first + count * (n + 4 * width * height) <= size]
    return fitting[0] if fitting else max(stated, 256)


def padded_text(field: bytes) -> str:
    """The text of a fixed-size field that ends at its first NUL."""
    return field.split(b"\0")[0].decode("latin-1").strip()
