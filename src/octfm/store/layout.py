"""The format of a prepared store: arrays, rows and checksums, with the checks that readers and writers share."""

import hashlib
import json
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np

from octfm.catalog.participants.ids import under_one_id
from octfm.catalog.participants.splits import diagnosis_of
from octfm.display import EYES, brief, fields_line, readable
from octfm.errors import StoreError
from octfm.io.location import Location, from_json
from octfm.volume.preprocessing import Prepared
from octfm.volume.volume import Laterality

FORMAT, VERSION = "octfm-store", 1
CHECKSUM = "sha256 of the voxels, band and valid of a volume, in this order, C order, little endian"
HEADER_KEYS = ("fingerprint", "image_size", "compression", "preprocessing")
"""Required in store.json, in addition to format and version."""
LEASE = "writer.lock"
"""Object in a store in a bucket while a writer is at work; one that was killed leaves it."""
SHARD_CHECKSUM = "shard_checksum"
"""Key in store.json of stores whose shards contain checksums; absent from older stores."""
KEY_DIGEST = "pseudonyms"
"""Key in store.json of stores with pseudonyms: the digest of the key that they were made with."""
_DIGEST = ',"digest":"'
_DIGEST_AT_END = re.compile(rb',"digest":"([0-9a-f]{16})"}$')
_OF_MANY = ("laterality", "scanner", "protocol", "split", "layout", "modality")
"""Fields of a row that many rows share."""
ARRAYS = {"voxels": "uint8", "band": "float32", "valid": "int16"}

Compression = Literal["none", "zstd"]


@dataclass(frozen=True)
class StoreRow:
    """Metadata of one prepared volume; `index` is its position along the first axis of the arrays."""

    index: int
    acquisition: str
    """SOP Instance UID; for files other than DICOM, a UID derived from their content."""
    uri: str
    participant: str
    eye_id: str
    laterality: Laterality | None
    scanner: str
    protocol: str
    split: str | None
    participant_labels: dict[str, str]
    flags: tuple[str, ...]
    confident: bool
    """False if no tissue band was found with confidence; the band then covers every row of the image."""
    confidence: dict[str, float | None]
    transform: dict[str, Any]
    """Maps prepared coordinates back to the native frame; read by `Transform.from_dict`."""
    checksum: str
    pixels: str = ""
    """Fingerprint of the native voxels (octfm.volume.pixel_copies); empty in stores written before it existed."""
    found: tuple[str, ...] = ()
    """Flags raised by the voxels themselves (keys of acquisition.FLAGS); kept when a new catalog updates the row."""
    layout: str = "raster"
    """Scan pattern. A radial scan is stored as a raster made from its star, which is what `transform` refers to."""
    modality: str = "structure"
    """octa: voxels are flow (octfm.volume.volume.Modality)."""

    def __repr__(self) -> str:
        return brief(
            "StoreRow", f"volume {self.index}", readable(self.scanner), EYES[self.laterality], self.split or ""
        )

    def to_line(self) -> str:
        """One line of rows.jsonl, ending with a digest of everything before it."""
        body = to_line(asdict(self))[: -len("}\n")]
        return f'{body}{_DIGEST}{digest(body.encode())}"}}\n'

    @property
    def diagnosis(self) -> str | None:
        return diagnosis_of(self.participant_labels)


@dataclass(frozen=True)
class Unprepared:
    """An acquisition that could not be prepared; the next `prepare` tries again."""

    acquisition: str
    uri: str
    scanner: str
    code: str
    sentence: str

    def __repr__(self) -> str:
        return brief("Unprepared", self.code, readable(self.scanner))


@dataclass(frozen=True, eq=False)
class Arrays:
    """The arrays of B prepared volumes."""

    voxels: np.ndarray
    """uint8 [B, D, H, W]"""
    band: np.ndarray
    """float32 [B, 2, D, W]: upper and lower surface of the tissue band, in fractional rows."""
    valid: np.ndarray
    """int16 [B, 2, D, W]: first image row and one past the last, per A-scan; both 0 where the A-scan is padding."""
    acquisition: tuple[str, ...] = ()
    """Acquisition of each volume, for error messages; empty if unknown."""
    labels: np.ndarray | None = None
    """uint8 [B, D, H, W]: classes of phantoms (octfm.volume.segmentation), 255 if unknown; None if there are none."""

    __repr__ = fields_line

    @staticmethod
    def of(prepared: Prepared) -> "Arrays":
        """One prepared volume as a batch."""
        return Arrays(prepared.voxels[None], prepared.band[None], prepared.valid[None])

    @staticmethod
    def empty(count: int, image_size: Sequence[int]) -> "Arrays":
        """Uninitialised arrays for `count` volumes."""
        voxels, band, valid = (np.empty((count, *shape), ARRAYS[name]) for name, shape in shapes(image_size).items())
        return Arrays(voxels, band, valid)

    def one(self, place: int) -> "Arrays":
        """One of these volumes, as a batch of one."""
        own = slice(place, place + 1)
        labels = self.labels[own] if self.labels is not None else None
        return Arrays(self.voxels[own], self.band[own], self.valid[own], self.acquisition[own], labels)

    def checksum(self, place: int = 0) -> str:
        """`checksum` of one of these volumes."""
        return checksum(self.voxels[place], self.band[place], self.valid[place])


def checksum(voxels: np.ndarray, band: np.ndarray, valid: np.ndarray) -> str:
    """The checksum of one volume, as rows.jsonl records it (see CHECKSUM)."""
    digest = hashlib.sha256()
    for name, part in (("voxels", voxels), ("band", band), ("valid", valid)):
        digest.update(np.ascontiguousarray(part, np.dtype(ARRAYS[name]).newbyteorder("<")).data)
    return f"sha256:{digest.hexdigest()}"


def digest(data: bytes) -> str:
    """Digest of a row or of the header: short because people read these files, and only against accidental damage."""
    return hashlib.sha256(data).hexdigest()[:16]


def shard_key(index: int) -> str:
    """Name of the shard of one volume, the same in each of the three arrays."""
    # The "default" chunk key encoding of zarr v3 with separator "."; one chunk per volume, so the other indices are 0.
    return f"c.{index}.0.0.0"


def read_header(path: Location) -> dict[str, Any] | None:
    """store.json, validated; None if it does not exist. Raises StoreError if it is damaged or of another version."""
    file = path / "store.json"
    if not file.is_file():
        return None
    try:
        header = from_json(file.read_text("utf-8"))
    except ValueError as error:
        raise StoreError(f"{file}: not valid JSON ({error}); the store is damaged, prepare into a new folder") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise StoreError(f"{file}: expected format {FORMAT!r}; this is not an octfm store, choose another folder")
    if header.get("version") != VERSION:
        raise StoreError(
            f"{file}: store version {header.get('version')}, but this octfm reads version {VERSION}; "
            "use the octfm that wrote it, or prepare into a new folder"
        )
    if absent := [key for key in HEADER_KEYS if key not in header]:
        raise StoreError(f"{file}: {', '.join(absent)} missing; the store is damaged, prepare into a new folder")
    # Headers of older stores have no digest.
    if header.get("digest", header_digest(header)) != header_digest(header):
        raise StoreError(
            f"{file}: does not match its digest, so it was edited or damaged; restore it from a copy, "
            "or prepare into a new folder"
        )
    return header


def header_digest(header: Mapping[str, Any]) -> str:
    """Digest of everything in store.json except the digest itself."""
    return digest(to_line({key: value for key, value in header.items() if key != "digest"}).encode())


def read_rows(path: Location) -> tuple[tuple[StoreRow, ...], int]:
    """The rows of all volumes in the store, and the length of their lines in bytes. Raises StoreError for a damaged
    row."""
    file = path / "rows.jsonl"
    rows, length = [], 0
    for number, line in enumerate(BytesIO(file.read_bytes() if file.is_file() else b"")):
        # A last line without its newline was cut off while it was written: that volume does not exist yet.
        if not line.endswith(b"\n"):
            break
        length += len(line)
        try:
            rows.append(StoreRow(**_compact(_row(line.rstrip(b"\r\n")))))
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"{file}: line {number + 1} is not a valid row ({error}); restore the file from a copy, "
                "or prepare into a new folder"
            ) from None
        if rows[-1].index != number:
            raise StoreError(
                f"{file}: line {number + 1} holds row {rows[-1].index}, expected row {number}; the store is damaged, "
                "prepare into a new folder"
            )
    return tuple(rows), length


def _row(line: bytes) -> dict[str, Any]:
    """A parsed row without its digest, which rows of older stores lack. Raises ValueError if the two do not match."""
    end = _DIGEST_AT_END.search(line)
    if end is not None:
        line = line[: end.start()]
        if digest(line) != end[1].decode():
            raise ValueError("it does not match its digest")
        line += b"}"
    values = from_json(line)
    if not isinstance(values, dict):
        raise ValueError(f"expected an object, got {type(values).__name__}")
    # A digest anywhere but at the end of the line: the row was reformatted, so it can no longer be verified.
    if "digest" in values:
        raise ValueError("it was edited by hand; to change splits or labels, run octfm prepare with a new catalog")
    return values


def _compact(values: dict[str, Any]) -> dict[str, Any]:
    """The fields of a row in a third of the memory, since every process that opens a store holds all rows: text that
    rows share is held once, and long lists of numbers become arrays."""
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
        elif isinstance(value, dict):
            values[name] = {sys.intern(key): _dense(field) for key, field in value.items()}
        elif name in _OF_MANY:
            values[name] = _dense(value)
    return values


def _dense(value: Any) -> Any:
    if isinstance(value, str):
        return sys.intern(value)
    if isinstance(value, list) and len(value) > 8 and all(isinstance(number, float) for number in value):
        return array("d", value)
    return value


def read_unprepared(path: Location) -> tuple[Unprepared, ...]:
    """The quarantined acquisitions, from unprepared.jsonl."""
    file = path / "unprepared.jsonl"
    # Without what follows the last newline: a line that was cut off while it was written.
    lines = file.read_bytes().split(b"\n")[:-1] if file.is_file() else []
    try:
        return tuple(Unprepared(**from_json(line)) for line in lines)
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{file}: not a list of unprepared volumes ({error}); delete it and run `octfm prepare` again"
        ) from None


def shapes(image_size: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Shape of each array for one volume of `image_size` [D, H, W]."""
    d, h, w = image_size
    return {"voxels": (d, h, w), "band": (2, d, w), "valid": (2, d, w)}


def volume_bytes(image_size: Sequence[int]) -> int:
    """Bytes of one volume's voxels, band and valid, uncompressed."""
    return sum(math.prod(shape) * np.dtype(ARRAYS[name]).itemsize for name, shape in shapes(image_size).items())


def array_metadata(
    name: str, volumes: int, image_size: Sequence[int], compression: Compression, crc: bool
) -> dict[str, Any]:
    """zarr.json of one array, after the zarr v3 core and sharding-codec specifications.

    The voxels of a volume are a shard of several chunks; band and valid are small, so each of theirs is a single chunk.
    """
    shape = shapes(image_size)[name]
    codecs: list[dict[str, Any]] = [
        {"name": "bytes"} if name == "voxels" else {"name": "bytes", "configuration": {"endian": "little"}}
    ]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    if crc:
        codecs.append({"name": "crc32c"})
    if name == "voxels":
        # Several chunks per shard: a few B-scans can be read alone, and several threads decode one volume.
        bscans = bscans_per_chunk(shape)
        index_codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        inner = {
            "chunk_shape": [1, bscans, *shape[1:]],
            "codecs": codecs,
            "index_codecs": index_codecs,
            "index_location": "start",
        }
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [volumes, *shape],
        "data_type": ARRAYS[name],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, *shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": codecs,
        "attributes": {},
        "dimension_names": [
            "volume",
            *(("bscan", "axial", "lateral") if name == "voxels" else ("surface", "bscan", "lateral")),
        ],
    }


def bscans_per_chunk(shape: Sequence[int]) -> int:
    """The largest divisor of the number of B-scans up to 16."""
    return max(n for n in range(1, 17) if shape[0] % n == 0)


def to_line(values: Mapping[str, Any]) -> str:
    """Compact JSON and a newline."""
    # No NaN: Python would write a token that is not JSON and that other readers refuse.
    return json.dumps(_plain(values), allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """`value` in types that JSON has: numpy values become Python's, NaN and infinity become null."""
    if isinstance(value, np.generic | np.ndarray | array):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def summary(rows: Sequence[StoreRow], unprepared: Sequence[Unprepared]) -> dict[str, Any]:
    """Counts: volumes, participants, low-confidence bands per scanner and diagnosis, unprepared per code."""
    by_scanner: dict[str, dict[str, int]] = {}
    by_diagnosis: dict[str, dict[str, int]] = {}
    for row in rows:
        for table, key in ((by_scanner, row.scanner), (by_diagnosis, row.diagnosis)):
            if key is not None:
                counts = table.setdefault(key, {"volumes": 0, "low_confidence": 0})
                counts["volumes"] += 1
                counts["low_confidence"] += not row.confident
    return {
        "volumes": len(rows),
        "participants": len(set(under_one_id([row.participant for row in rows]))),
        "low_confidence": sum(not row.confident for row in rows),
        "by_scanner": dict(sorted(by_scanner.items())),
        "by_diagnosis": dict(sorted(by_diagnosis.items())),
        "found": dict(Counter(flag for row in rows for flag in row.found).most_common()),
        "unprepared": dict(Counter(u.code for u in unprepared).most_common()),
    }
