"""Writing a store so that it is whole at every moment: a volume becomes visible by its row, after its shards are on the disk."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TextIO

import numpy as np

from octfm.errors import StoreError
from octfm.io.location import flush, lock, write_whole
from octfm.store.layout import (
    ARRAYS,
    CHECKSUM,
    FORMAT,
    SHARD_CHECKSUM,
    VERSION,
    Compression,
    StoreRow,
    Unprepared,
    checksum,
    header_digest,
    read_header,
    read_rows,
    read_unprepared,
    shapes,
    shard_key,
    to_line,
)

if TYPE_CHECKING:
    from octfm.volume.preprocessing import Prepared, Preprocessing


class StoreWriter:
    """The one writer of a store, from `with` to its end. Opening it mends whatever a killed writer left half done.

    Workers write shards into `staging` (see `stage`), whose files have no row yet; `append` and `put_back` move them into place.
    """

    def __init__(self, path: Path, preprocessing: "Preprocessing", compression: Compression | None = None):
        self.path, self._preprocessing, self._asked = path, preprocessing, compression
        self.rows: list[StoreRow] = []

    def __enter__(self) -> Self:
        _refuse_foreign_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = locked(self.path)
        try:
            self._header = self._open_header()
            self.compression: Compression = self._header["compression"]
            self.crc = self._header.get(SHARD_CHECKSUM) == "crc32c"
            self._mend()
            self.staging = Path(tempfile.mkdtemp(prefix="staging-", dir=self.path))
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.staging, ignore_errors=True)
        self._lock.close()

    def append(self, row: StoreRow, staged: str) -> None:
        """Make a staged volume visible as the next row; `row.index` is set here."""
        row = replace(row, index=len(self.rows))
        self._move(staged, row.index)
        self._write_metadata(row.index + 1)
        with (self.path / "rows.jsonl").open("ab") as handle:
            # A line cut off by a kill is dropped by the next writer and unseen by readers.
            handle.write(row.to_line().encode())
            handle.flush()
            os.fsync(handle.fileno())
        self.rows.append(row)

    def put_back(self, row: StoreRow, staged: str) -> None:
        """Replace the lost shards of an existing row."""
        self._move(staged, row.index)
        if row.to_line() != self.rows[row.index].to_line():
            self.rewrite([*self.rows[: row.index], row, *self.rows[row.index + 1 :]])

    def rewrite(self, rows: Iterable[StoreRow]) -> None:
        """Other words about the same volumes."""
        self.rows = list(rows)
        write_whole(self.path / "rows.jsonl", "".join(row.to_line() for row in self.rows).encode())

    def missing(self) -> set[int]:
        """Rows of which a shard is absent or, where its size is known, cut off."""
        sizes = {name: self._shard_size(name) for name in ARRAYS}
        return {
            row.index
            for row in self.rows
            for name in ARRAYS
            if not _is_whole(self.path / name / shard_key(row.index), sizes[name])
        }

    def keep_unprepared(self, keep: Callable[[Unprepared], bool]) -> None:
        """Drop from the quarantine what is about to be tried again."""
        kept = [u for u in read_unprepared(self.path) if keep(u)]
        write_whole(self.path / "unprepared.jsonl", "".join(to_line(asdict(u)) for u in kept).encode())

    def quarantine(self, unprepared: Unprepared) -> None:
        with (self.path / "unprepared.jsonl").open("ab") as handle:
            handle.write(to_line(asdict(unprepared)).encode())

    def _open_header(self) -> dict[str, Any]:
        header = read_header(self.path)
        settings = self._preprocessing.model_dump(mode="json")
        if header is None:
            header = {
                "format": FORMAT,
                "version": VERSION,
                "fingerprint": self._preprocessing.fingerprint(),
                "image_size": list(self._preprocessing.image_size),
                "compression": self._asked or "none",
                "checksum": CHECKSUM,
                SHARD_CHECKSUM: "crc32c",
                "preprocessing": settings,
            }
            header["digest"] = header_digest(header)
            write_whole(self.path / "store.json", (json.dumps(header, indent=2) + "\n").encode())
        if header["fingerprint"] != self._preprocessing.fingerprint():
            before = {"algorithm": 2, **header["preprocessing"]}
            keys = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
            differing = [f"{key} {before.get(key)} there, {settings.get(key)} here" for key in keys]
            what = "; ".join(differing) or "by another version of the algorithm"
            remedy = "use the settings in its store.json" if differing else "go on with the octfm that made it"
            raise StoreError(
                f"{self.path}: this store was prepared differently ({what}), and volumes of one store must be alike; "
                f"prepare into a new folder, or {remedy}"
            )
        if self._asked not in (None, header["compression"]):
            raise StoreError(
                f"{self.path}: compression is {header['compression']} there, {self._asked} was asked; "
                "prepare into a new folder, or leave the compression out"
            )
        return header

    def _mend(self) -> None:
        for left_over in self.path.glob("staging-*"):
            shutil.rmtree(left_over, ignore_errors=True)
        rows, whole = read_rows(self.path)
        self.rows = list(rows)
        file = self.path / "rows.jsonl"
        file.touch()
        if file.stat().st_size != whole:
            os.truncate(file, whole)
        write_whole(
            self.path / "zarr.json", json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
        )
        for name in ARRAYS:
            (self.path / name).mkdir(exist_ok=True)
            # Volumes are committed one at a time, so at most one can have shards and no row.
            (self.path / name / shard_key(len(rows))).unlink(missing_ok=True)
        self._write_metadata(len(rows))

    def _write_metadata(self, volumes: int) -> None:
        """The arrays' length, for every reader of zarr. It follows from the rows, so it needs no fsync."""
        for name in ARRAYS:
            metadata = array_metadata(name, volumes, self._header["image_size"], self.compression, self.crc)
            temporary = self.path / name / ".zarr.json.tmp"
            temporary.write_text(json.dumps(metadata))
            temporary.replace(self.path / name / "zarr.json")

    def _move(self, staged: str, index: int) -> None:
        for name in ARRAYS:
            (self.staging / f"{staged}.{name}").replace(self.path / name / shard_key(index))
            flush(self.path / name)

    def _shard_size(self, name: str) -> int | None:
        if self.compression != "none":
            return None
        blank = np.zeros(shapes(self._header["image_size"])[name], ARRAYS[name])
        return len(encode(name, blank, self._header["image_size"], "none", self.crc))


def stage(prepared: "Prepared", staging: Path, name: str, compression: Compression, crc: bool = True) -> str:
    """Write the shards of one volume, durably, where they have no row yet; returns their checksum. Runs in the workers.

    `crc`: as the store has it; shards of older stores carry no checksum of their data."""
    for array in ARRAYS:
        values = getattr(prepared, array)
        write_durably(staging / f"{name}.{array}", encode(array, values, prepared.voxels.shape, compression, crc))
    return checksum(prepared.voxels, prepared.band, prepared.valid)


def _is_whole(shard: Path, size: int | None) -> bool:
    try:
        found = shard.stat().st_size
    except FileNotFoundError:
        return False
    return size is None or found == size


def _refuse_foreign_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: expected a folder for the store, this is a file; choose another place")
    # Names that begin with a dot are a lock, or a header that was being written when its writer was killed.
    if (
        path.is_dir()
        and not (path / "store.json").is_file()
        and any(not p.name.startswith(".") for p in path.iterdir())
    ):
        raise StoreError(f"{path}: the folder is not empty and holds no store; choose a new folder, or empty this one")


def locked(path: Path) -> TextIO:
    """The lock of a store that is changed: hold it by `with`, or until it is closed. Raises StoreError."""
    try:
        return lock(path / ".lock")
    except BlockingIOError:
        raise StoreError(
            f"{path}: another process is preparing into this store; wait for it, or prepare into another folder"
        ) from None


def array_metadata(
    name: str, volumes: int, image_size: Sequence[int], compression: Compression, crc: bool = True
) -> dict[str, Any]:
    """zarr.json of one array (zarr v3 core and sharding specifications). band and valid are small: their shard is one chunk."""
    shape = shapes(image_size)[name]
    codecs: list[dict[str, Any]] = [
        {"name": "bytes"} if name == "voxels" else {"name": "bytes", "configuration": {"endian": "little"}}
    ]
    if compression == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
    if crc:
        codecs.append({"name": "crc32c"})
    if name == "voxels":
        # Several chunks inside the shard: a few B-scans can be read alone, and one volume is decoded by several threads.
        bscans = _bscans_of_a_chunk(shape)
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


def _bscans_of_a_chunk(shape: Sequence[int]) -> int:
    return max(n for n in range(1, 17) if shape[0] % n == 0)


def encode(
    name: str, array: np.ndarray, image_size: Sequence[int], compression: Compression, crc: bool = True
) -> bytes:
    """The bytes of one shard, as zarr writes them. They do not depend on the row, so the row may be decided later."""
    if array.dtype != ARRAYS[name] or array.shape != shapes(image_size)[name]:
        raise ValueError(
            f"{name} of a prepared volume must be {ARRAYS[name]} {shapes(image_size)[name]}, got {array.dtype} {array.shape}"
        )
    if compression == "none":
        step = _bscans_of_a_chunk(array.shape) if name == "voxels" else len(array)
        plain = array.astype(array.dtype.newbyteorder("<"), copy=False)
        chunks = [plain[i : i + step].tobytes() for i in range(0, len(plain), step)]
        return b"".join([_index(name, tuple(image_size), crc), *(_with_crc(c) if crc else c for c in chunks)])
    return _encode_by_zarr(name, array, image_size, compression, crc)


def _with_crc(chunk: bytes) -> bytes:
    """What zarr's crc32c codec makes of a chunk."""
    import google_crc32c

    return chunk + google_crc32c.value(chunk).to_bytes(4, "little")


@functools.cache
def _index(name: str, image_size: tuple[int, ...], crc: bool) -> bytes:
    """What stands before the values of an uncompressed shard: where its chunks lie, the same for all volumes of a size."""
    if name != "voxels":
        return b""
    blank = np.zeros(shapes(image_size)[name], ARRAYS[name])
    shard = _encode_by_zarr(name, blank, image_size, "none", crc)
    chunks = len(blank) // _bscans_of_a_chunk(blank.shape)
    return shard[: len(shard) - blank.nbytes - 4 * chunks * crc]


def _encode_by_zarr(
    name: str, array: np.ndarray, image_size: Sequence[int], compression: Compression, crc: bool = True
) -> bytes:
    import zarr
    from zarr.core.buffer import cpu
    from zarr.storage import MemoryStore

    metadata = json.dumps(array_metadata(name, 1, image_size, compression, crc)).encode()
    memory: Any = {"zarr.json": cpu.Buffer.from_bytes(metadata)}
    # Otherwise a shard of zeros would not be written, and could not be told from one that was lost.
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(MemoryStore(memory), mode="r+")[0] = array
    return memory[shard_key(0)].to_bytes()


def write_durably(file: Path, data: bytes) -> None:
    """Never makes a folder: a worker that outlives its run finds its staging folder gone, and stops there."""
    file.write_bytes(data)
    flush(file)
