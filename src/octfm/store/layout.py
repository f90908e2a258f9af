"""What lies in a prepared store: arrays, rows, their checksums; read and checked here, for readers and writers alike."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from octfm.errors import StoreError
from octfm.io.location import Location

if TYPE_CHECKING:
    pass

FORMAT, VERSION = "octfm-store", 1
CHECKSUM = "sha256 of the voxels, band and valid of a volume, in this order, C order, little endian"
HEADER_KEYS = ("fingerprint", "image_size", "compression", "preprocessing")
"""Of store.json, besides format and version."""
SHARD_CHECKSUM = "shard_checksum"
"""In store.json, of stores whose shards carry checksums of their data."""
_DIGEST = ',"digest":"'
_DIGEST_AT_END = re.compile(rb',"digest":"([0-9a-f]{16})"}$')
ARRAYS = {"voxels": "uint8", "band": "float32", "valid": "int16"}
DIAGNOSIS_COLUMNS = ("diagnosis", "study_group")

Compression = Literal["none", "zstd"]


@dataclass(frozen=True)
class StoreRow:
    """What one prepared volume is; `index` is its place in the arrays."""

    index: int
    acquisition: str
    """SOP Instance UID."""
    uri: str
    participant: str
    eye_id: str
    laterality: str | None
    scanner: str
    protocol: str
    split: str | None
    participant_labels: dict[str, str]
    flags: tuple[str, ...]
    confident: bool
    """False: the tissue band could not be told, so it holds every row of the image."""
    confidence: dict[str, float | None]
    transform: dict[str, Any]
    """Way back to the native frame: `Transform.from_dict` reads it."""
    checksum: str
    pixels: str = ""
    """Fingerprint of the native voxels (octfm.volume.pixel_copies); empty in stores made before there was one."""
    found: tuple[str, ...] = ()
    """Doubts that only pixels can raise, keys of acquisition.FLAGS: they stay when the catalog's words change."""
    layout: str = "raster"
    """Of what was scanned: the voxels of a radial row are a raster made of a star, and `transform` leads back to that raster."""

    def to_line(self) -> str:
        """A line of rows.jsonl, which ends with a digest of all before it."""
        body = to_line(asdict(self))[: -len("}\n")]
        return f'{body}{_DIGEST}{digest(body.encode())}"}}\n'

    @property
    def diagnosis(self) -> str | None:
        """The first of the columns `diagnosis`, `study_group` that the participant has."""
        return next((self.participant_labels[c] for c in DIAGNOSIS_COLUMNS if self.participant_labels.get(c)), None)


@dataclass(frozen=True)
class Unprepared:
    """An acquisition that could not be prepared; the next call tries it again."""

    acquisition: str
    uri: str
    scanner: str
    code: str
    sentence: str


@dataclass(frozen=True, eq=False)
class Arrays:
    voxels: np.ndarray
    """uint8 [B, D, H, W]"""
    band: np.ndarray
    """float32 [B, 2, D, W]: upper and lower surface of the tissue band, in rows."""
    valid: np.ndarray
    """int16 [B, 2, D, W]: first row that holds image, one past the last; both 0 where the A-scan is padding."""
    acquisition: tuple[str, ...] = ()
    """Of each volume, for errors; empty: not known."""

    @staticmethod
    def empty(count: int, image_size: Sequence[int]) -> "Arrays":
        return Arrays(**{name: np.empty((count, *shape), ARRAYS[name]) for name, shape in shapes(image_size).items()})


def checksum(voxels: np.ndarray, band: np.ndarray, valid: np.ndarray) -> str:
    digest = hashlib.sha256()
    for name, array in (("voxels", voxels), ("band", band), ("valid", valid)):
        digest.update(np.ascontiguousarray(array, np.dtype(ARRAYS[name]).newbyteorder("<")).data)
    return f"sha256:{digest.hexdigest()}"


def digest(data: bytes) -> str:
    """Of a row or of the header, which are read by people as well: short, and against damage only."""
    return hashlib.sha256(data).hexdigest()[:16]


def shard_key(index: int) -> str:
    return f"c.{index}.0.0.0"


def read_header(path: Location) -> dict[str, Any] | None:
    """store.json, checked; None where there is none."""
    file = path / "store.json"
    if not file.is_file():
        return None
    try:
        header = json.loads(file.read_text())
    except ValueError as error:
        raise StoreError(f"{file}: not valid JSON ({error}); the store is damaged, prepare into a new folder") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StoreError(f"{file}: expected format {FORMAT!r}; this is not a store of octfm")
    if header.get("version") != VERSION:
        raise StoreError(
            f"{file}: store version {header.get('version')}, and this octfm reads version {VERSION}; "
            "use the octfm that wrote it, or prepare into a new folder"
        )
    if absent := [key for key in HEADER_KEYS if key not in header]:
        raise StoreError(
            f"{file}: expected {', '.join(absent)}, found none; the store is damaged, prepare into a new folder"
        )
    # Headers of older stores have none.
    if header.get("digest", header_digest(header)) != header_digest(header):
        raise StoreError(
            f"{file}: not what was written, a setting was changed or damaged; restore it from a copy, or prepare into a new folder"
        )
    return header


def header_digest(header: Mapping[str, Any]) -> str:
    return digest(to_line({key: value for key, value in header.items() if key != "digest"}).encode())


def read_rows(path: Location) -> tuple[tuple[StoreRow, ...], int]:
    """The visible volumes, and the length in bytes of their lines. A last line without its end belongs to a write that was cut off."""
    file = path / "rows.jsonl"
    data = file.read_bytes() if file.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    rows = []
    for number, line in enumerate(whole.splitlines()):
        try:
            values = _row(line)
            rows.append(
                StoreRow(**{**values, "flags": tuple(values["flags"]), "found": tuple(values.get("found", ()))})
            )
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"{file}: line {number + 1} is not a row ({error}); restore the file from a copy, or prepare into a new folder"
            ) from None
        if rows[-1].index != number:
            raise StoreError(
                f"{file}: line {number + 1} holds row {rows[-1].index}; the store is damaged, prepare into a new folder"
            )
    return tuple(rows), len(whole)


def _row(line: bytes) -> dict[str, Any]:
    """A row without its digest. ValueError where they differ; rows of older stores have none."""
    end = _DIGEST_AT_END.search(line)
    if end is not None:
        line = line[: end.start()]
        if digest(line) != end[1].decode():
            raise ValueError("it differs from its digest")
        line += b"}"
    values = json.loads(line)
    if "digest" in values:
        raise ValueError("it was edited by hand; octfm prepare brings the splits and labels of a catalog into a store")
    return values


def read_unprepared(path: Location) -> tuple[Unprepared, ...]:
    file = path / "unprepared.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    try:
        return tuple(Unprepared(**json.loads(line)) for line in lines)
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{file}: not a list of unprepared volumes ({error}); delete it and run `octfm prepare` again"
        ) from None


def shapes(image_size: Sequence[int]) -> dict[str, tuple[int, ...]]:
    d, h, w = image_size
    return {"voxels": (d, h, w), "band": (2, d, w), "valid": (2, d, w)}


def to_line(values: Mapping[str, Any]) -> str:
    return json.dumps(_plain(values), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """JSON has neither numpy scalars nor NaN."""
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
