"""Heidelberg .e2e: a patient's series, each a volume. If there are several, each is named file.e2e!/series_1_2_3.

Structure: the notes of uocte and LibE2E on the format, as eyepy and OCT-Converter read it, and those of private-eye
(Moorfields Eye Hospital). Axial millimetres are stated. B-scan positions are degrees on the fundus, from the middle of
its picture to the right and downwards: how many millimetres a degree has depends on the length of the eye, which the
file does not hold. Those of a mean eye are taken, and flagged, unless others are declared. Not verified on a real file.

Not read: chunk 10012, by which HEYEX shifts and shears each B-scan for display and exports. B-scans and layers are both
as they were stored, so they fit each other.
"""

import io
import re
import struct
from collections import defaultdict
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import MEAN_EYE, Bscans, check_size, uid_from, uid_of
from octfm.formats.heyex_vol import FUNDUS, LAYERS, NO_VALUE, PATTERNS, display, padded_text
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import MEMBER, open_file
from octfm.volume.volume import Fundus, Lines, Surfaces

_MULTIPLE = b"E2EMultipleVolumeFile"
_DIRECTORY, _ENTRY, _CHUNK = struct.Struct("<12sI20x4I"), struct.Struct("<7Ii2H2I"), struct.Struct("<12s3II4Ii2H2I")
_PATIENT, _LATERALITY, _PREAMBLE, _PICTURE, _BSCAN, _LAYER, _IMAGE = 9, 11, 3, 5, 10004, 10019, 0x40000000
_SERIES = re.compile(r"series_(\d+)_(\d+)_(\d+)")
_MOST_DIRECTORIES = 100_000
_FUNDUS_8_BIT = 33620481
_NO_VALUE_CODE = 0xFFFF
"""Of a voxel without image, which HEYEX shows black. As a float it would be twice the brightest reflectivity."""
MM_PER_DEGREE = 4.4 / 15
"""On the fundus of a mean eye, as OCT-Converter takes it. HEYEX states .300 and .303 in two real .vol files of eyes of
-1.2 and -1.8 dioptres."""
_PICTURE_DEGREES = (5, 180)
"""What the field of the fundus picture must lie between; other values are no degrees."""
_AXIAL_MM = (0.0005, 0.05)
"""What a stated height of a row must lie between; other values are no millimetres."""


@dataclass
class _Series:
    images: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    """B-scan number -> offset of its pixels, height, width."""
    ends: dict[int, tuple[float, float, float, float]] = field(default_factory=dict)
    """B-scan number -> x, y of its first and of its last A-scan, degrees from the middle of the fundus picture."""
    layers: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(layer, B-scan number) -> offset and number of the heights of its A-scans."""
    fundus: tuple[int, int, int] | None = None
    """Offset of the first 8-bit image of the fundus, height, width."""
    pictures: set[tuple[int, int, int]] = field(default_factory=set)
    """(Width, height, degrees) of pictures of the fundus, as stated."""
    row_mm: list[float] = field(default_factory=list)
    stated_count: int = 0
    pattern: int = 0
    eyes: set[str] = field(default_factory=set)


def split_series(uri: str) -> tuple[str, str]:
    """The file and the series that a uri names; the series is empty if it names none."""
    container, member, series = uri.rpartition(MEMBER)
    return (container, series) if member and _SERIES.fullmatch(series) else (uri, "")


def volumes(uri: str) -> list[str]:
    """A uri for each series of B-scans, the file's own if there is only one. Raises ReadError."""
    with open_file(uri) as file:
        found, _ = _index(file, uri)
    return [uri] if len(found) < 2 else [f"{uri}{MEMBER}{_name(key)}" for key in sorted(found)]


def open_bscans(uri: str) -> Bscans:
    container, wanted = split_series(uri)
    with open_file(container) as file:
        found, participants = _index(file, container)
        whole = uid_of(file, file.seek(0, io.SEEK_END))
    if not found:
        raise ReadError("missing_pixel_data", f"{uri}: no series with B-scans; export it again with OCT images")
    keys = [key for key in found if wanted in ("", _name(key))]
    if len(keys) != 1:
        names = ", ".join(map(_name, sorted(found)))
        raise ReadError(
            "several_volumes",
            f"{uri}: which of its {len(found)} series? add {MEMBER} and one of {names[:200]}, in single quotes",
        )
    key, series = keys[0], found[keys[0]]
    slices = sorted(series.images)
    sizes = {series.images[i][1:] for i in slices}
    if len(sizes) > 1:
        raise ReadError("mixed_images", f"{uri}: B-scans of {len(sizes)} sizes in one series; export it again")
    if 1 < series.stated_count != len(slices):
        raise ReadError(
            "frame_count_mismatch", f"{uri}: {len(slices)} of {series.stated_count} B-scans are there; export it again"
        )
    height, width = sizes.pop()
    shape = (len(slices), height, width)
    check_size(shape, uri, bytes_per_voxel=2)
    ends = np.array([series.ends.get(i, (np.nan,) * 4) for i in slices])
    degrees = Lines(ends[:, :2], ends[:, 2:]) if np.isfinite(ends).all() else None
    lines = degrees and Lines(degrees.start * MM_PER_DEGREE, degrees.end * MM_PER_DEGREE)
    in_plane_mm = _in_plane_mm(series.row_mm, lines, width)

    def decode() -> np.ndarray:
        table = display(reflectivity_of_codes())  # the same gray values as a .vol of this scan gives
        voxels = np.empty(shape, np.uint8)
        with open_file(container, whole=True) as stream:
            for row, i in enumerate(slices):
                stream.seek(series.images[i][0])
                voxels[row] = table[np.frombuffer(stream.read(2 * height * width), "<u2").reshape(height, width)]
        return voxels

    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        # One UID per series: that of the file, changed by the numbers of patient, study and series.
        uid=uid_from((int(whole.split(".")[-1]) ^ (key[0] << 64 | key[1] << 32 | key[2])).to_bytes(16, "big")),
        in_plane_mm=in_plane_mm,
        lines=lines,
        surfaces=lambda: _surfaces(container, series, slices, width, in_plane_mm and in_plane_mm[0], uri),
        fundus=lambda: _fundus(container, series, degrees),
        flags=(MEAN_EYE,) if lines is not None else (),
        beside=container,
        layout=PATTERNS.get(series.pattern),
        laterality=series.eyes.pop() if len(series.eyes) == 1 else "",
        scanner="heidelberg_spectralis",
        participant=participants.get(key[0], ""),
    )


def _in_plane_mm(row_mm: list[float], lines: Lines | None, width: int) -> tuple[float, float] | None:
    """(dy, dx); None where the file does not give what they take."""
    stated = [mm for mm in row_mm if _AXIAL_MM[0] <= mm <= _AXIAL_MM[1]]
    if not stated or len(stated) < len(row_mm) or lines is None:
        return None
    length_mm = float(np.median(np.linalg.norm(lines.end - lines.start, axis=1)))
    return (float(np.median(stated)), length_mm / width) if length_mm > 0 else None


def _surfaces(
    container: str, series: _Series, slices: list[int], width: int, axial_mm: float | None, uri: str
) -> Surfaces | None:
    numbers = sorted({layer for layer, _ in series.layers})
    if not numbers:
        return None
    heights = np.full((len(numbers), len(slices), width), np.nan, np.float32)
    row_of = {number: row for row, number in enumerate(slices)}
    with open_file(container, whole=True) as stream:
        for (layer, number), (at, count) in series.layers.items():
            if number not in row_of:
                continue
            if count != width:
                raise ReadError(
                    "damaged_file",
                    f"{uri}: a layer of B-scan {row_of[number] + 1} has {count} of {width} values; export it again",
                )
            stream.seek(at)
            heights[numbers.index(layer), row_of[number]] = np.frombuffer(stream.read(4 * width), "<f4")
    heights[~((heights > 1e-9) & (heights < NO_VALUE))] = np.nan
    return Surfaces(tuple(LAYERS[n] for n in numbers), heights, axial_mm, uri)


def _fundus(container: str, series: _Series, degrees: Lines | None) -> Fundus | None:
    """The picture, with lines if the file says of a picture of this size how many degrees it shows, and they are not
    of a circle."""
    if series.fundus is None:
        return None
    at, height, width = series.fundus
    with open_file(container, whole=True) as stream:
        stream.seek(at)
        image = np.frombuffer(stream.read(height * width), np.uint8).reshape(height, width)
    fields = {shown for *size, shown in series.pictures if size == [width, height]}
    if degrees is None or len(fields) != 1 or PATTERNS.get(series.pattern) == "circle":
        return Fundus(image, FUNDUS)
    size, shown = np.array([width, height]), fields.pop()
    return Fundus(image, FUNDUS, Lines((0.5 + degrees.start / shown) * size, (0.5 + degrees.end / shown) * size))


def reflectivity_of_codes() -> np.ndarray:
    """[65536] float32: the reflectivity of each 16-bit code, an unsigned float of 6 exponent and 10 mantissa bits.

    The mantissa has its most significant bit first, as usual: the code is then a part of the float32 in a .vol of the
    same scan, whose 13 lowest bits are 0. eyepy and OCT-Converter reverse the mantissa's bits, so that a brighter code
    may come out darker.
    """
    code = np.arange(2**16)
    value = (1 + (code & 0x3FF) / 1024) * 2.0 ** ((code >> 10) - 63)
    value[[0, _NO_VALUE_CODE]] = 0
    return value.astype(np.float32)


def _index(file: BinaryIO, uri: str) -> tuple[dict[tuple[int, int, int], _Series], dict[int, str]]:
    """Series that hold B-scans by (patient, study, series), and participant ids by patient."""
    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    skip = 64 if file.read(len(_MULTIPLE)) == _MULTIPLE else 0
    found: dict[tuple[int, int, int], _Series] = defaultdict(_Series)
    participants: dict[int, str] = {}
    for start in _chunk_places(file, skip, size, uri):
        expect_bytes(uri, size, start + skip + _CHUNK.size)
        file.seek(start + skip)
        fields = _CHUNK.unpack(file.read(_CHUNK.size))
        patient, study, number, part, kind_of_image, kind = *fields[6:11], fields[12]
        _read_chunk(file, kind, kind_of_image, part, found[patient, study, number], size, uri)
        if kind == _PATIENT:
            participants[patient] = padded_text(file.read(127)[102:127])
    return {key: series for key, series in found.items() if series.images}, participants


def _read_chunk(file: BinaryIO, kind: int, ind: int, part: int, series: _Series, size: int, uri: str) -> None:
    """Record in `series` what a chunk says; the position of `file` is the start of the chunk's data."""
    if kind == _IMAGE and ind == 0 and series.fundus is None:
        _, content, _, height, width = struct.unpack("<5I", file.read(20))
        at = file.tell()
        # Other kinds of image at this place are left alone; one that is cut off costs the scan nothing.
        if content == _FUNDUS_8_BIT and 0 < height * width <= size - at:
            series.fundus = (at, height, width)
    elif kind == _IMAGE and ind == 1:
        _, _, _, height, width = struct.unpack("<5I", file.read(20))
        at = file.tell()
        check_size((1, height, width), uri, bytes_per_voxel=2)
        expect_bytes(uri, size, at + 2 * height * width)
        series.images[part // 2] = (at, height, width)
    elif kind == _PICTURE:
        content = file.read(26)
        if len(content) == 26:
            width, height, shown = struct.unpack_from("<2H8xH", content, 12)
            if _PICTURE_DEGREES[0] <= shown < _PICTURE_DEGREES[1]:
                series.pictures.add((width, height, shown))
    elif kind == _BSCAN:
        content = file.read(76)
        series.ends[part // 2] = struct.unpack_from("<4f", content, 12)
        series.row_mm.append(struct.unpack_from("<f", content, 36)[0])
        series.stated_count, _, series.pattern = struct.unpack_from("<3I", content, 64)
    elif kind == _LAYER:
        _, layer, _, count = struct.unpack("<4I", file.read(16))
        at = file.tell()
        # Numbers beyond the instrument's layers are not known to be heights; a count of 0 is a layer not found.
        if count and layer < len(LAYERS):
            expect_bytes(uri, size, at + 4 * count)
            series.layers[layer, part // 2] = (at, count)
    elif kind in (_LATERALITY, _PREAMBLE):
        at = 14 if kind == _LATERALITY else 4
        if (eye := file.read(at + 1)[at:]) in (b"R", b"L"):
            series.eyes.add(eye.decode())


def _chunk_places(file: BinaryIO, skip: int, size: int, uri: str) -> list[int]:
    """Offsets of all chunks: the main directory names the last one, and each directory the one before it."""
    expect_bytes(uri, size, 36 + skip + _DIRECTORY.size)
    file.seek(36 + skip)
    current = _DIRECTORY.unpack(file.read(_DIRECTORY.size))[3]
    places, seen, entries_bytes = [], set(), 0
    while current:
        if current in seen or len(seen) > _MOST_DIRECTORIES:
            raise ReadError("damaged_file", f"{uri}: its directories form a loop; export it again")
        seen.add(current)
        expect_bytes(uri, size, current + skip + _DIRECTORY.size)
        file.seek(current + skip)
        _, _, count, _, previous, _ = _DIRECTORY.unpack(file.read(_DIRECTORY.size))
        # Before reading: a damaged count may ask for gigabytes.
        expect_bytes(uri, size, current + skip + _DIRECTORY.size + count * _ENTRY.size)
        # Directories that share their bytes could claim every entry a hundred thousand times.
        entries_bytes += count * _ENTRY.size
        if entries_bytes > size:
            raise ReadError("damaged_file", f"{uri}: its directories overlap; export it again")
        entries = _ENTRY.iter_unpack(file.read(count * _ENTRY.size))
        # Unused entries point to before themselves.
        places += [start for position, start, *_ in entries if start > position]
        current = previous
    return places


def _name(key: tuple[int, int, int]) -> str:
    return f"series_{'_'.join(map(str, key))}"
