"""Write a store so that it is consistent at every moment: shards first, then the row that makes a volume visible."""

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from octfm.errors import StoreError
from octfm.io.lease import only_one
from octfm.io.location import Location, flush, holds_other, write_whole
from octfm.store.item import StoredVolume
from octfm.store.layout import (
    ARRAYS,
    CHECKSUM,
    FORMAT,
    KEY_DIGEST,
    LEASE,
    SHARD_CHECKSUM,
    VERSION,
    Compression,
    StoreRow,
    Unprepared,
    array_metadata,
    checksum,
    header_digest,
    read_header,
    read_rows,
    read_unprepared,
    shapes,
    shard_key,
    to_line,
)
from octfm.store.shards import encode
from octfm.volume.preprocessing import Prepared, Preprocessing, differences, repeating


class StoreWriter:
    """The only writer of a store while its `with` block runs. Opening it repairs what a killed writer left half done.

    Workers write shards into the folder `staging` (see `stage`); `append` and `put_back` move them into place.
    """

    def __init__(
        self,
        path: Path,
        preprocessing: Preprocessing,
        compression: Compression | None = None,
        key_digest: str | None = None,
    ):
        """`key_digest`: of the key of the pseudonyms that rows will have; None if there are none, or it is unknown."""
        self.path, self._preprocessing, self._compression_wanted = path, preprocessing, compression
        self._key_digest = key_digest
        self.named: Location = path
        """The store as its user names it."""
        self.rows: list[StoreRow] = []

    def __enter__(self) -> Self:
        _refuse_foreign_folder(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            opened.enter_context(exclusive(self.path))
            self._header = self._open_header()
            self.compression: Compression = self._header["compression"]
            self.crc = self._header.get(SHARD_CHECKSUM) == "crc32c"
            self._recover()
            self.staging = Path(tempfile.mkdtemp(prefix="staging-", dir=self.path))
            opened.callback(_discard, self.staging)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def append(self, row: StoreRow, staged: str) -> None:
        """Make a staged volume visible as the next row; its `index` is assigned here."""
        row = replace(row, index=len(self.rows))
        # Shards, then array lengths, then the row: a kill in between leaves at most shards that no row refers to.
        self._move(staged, row.index)
        self._write_metadata(row.index + 1)
        with (self.path / "rows.jsonl").open("ab") as handle:
            # If a kill cuts the line off, readers ignore it and the next writer removes it.
            handle.write(row.to_line().encode())
            handle.flush()
            os.fsync(handle.fileno())
        self.rows.append(row)

    def put_back(self, row: StoreRow, staged: str) -> None:
        """Replace the missing or truncated shards of an existing row."""
        self._move(staged, row.index)
        if row.to_line() != self.rows[row.index].to_line():
            self.rewrite([*self.rows[: row.index], row, *self.rows[row.index + 1 :]])

    def rewrite(self, rows: Iterable[StoreRow]) -> None:
        """Replace the metadata of the volumes; the voxels stay."""
        self.rows = list(rows)
        write_whole(self.path / "rows.jsonl", "".join(row.to_line() for row in self.rows).encode())

    def missing(self) -> set[int]:
        """Rows with a shard that is absent or, where its size is known (uncompressed stores), truncated."""
        sizes = {name: self._shard_size(name) for name in ARRAYS}
        return {
            row.index
            for row in self.rows
            for name in ARRAYS
            if not _is_whole(self.path / name / shard_key(row.index), sizes[name])
        }

    def keep_unprepared(self, keep: Callable[[Unprepared], bool]) -> None:
        """Remove from unprepared.jsonl all entries for which `keep` is false."""
        kept = [u for u in read_unprepared(self.path) if keep(u)]
        write_whole(self.path / "unprepared.jsonl", "".join(to_line(asdict(u)) for u in kept).encode())

    def quarantine(self, unprepared: Unprepared) -> None:
        """Add an entry to unprepared.jsonl."""
        with (self.path / "unprepared.jsonl").open("ab") as handle:
            handle.write(to_line(asdict(unprepared)).encode())

    def _open_header(self) -> dict[str, Any]:
        """store.json, written if the store is new. Raises StoreError if it was made with other settings."""
        header = read_header(self.path)
        settings = self._preprocessing.model_dump(mode="json")
        if header is None:
            header = {
                "format": FORMAT,
                "version": VERSION,
                "fingerprint": self._preprocessing.fingerprint(),
                "image_size": list(self._preprocessing.image_size),
                "compression": self._compression_wanted or "none",
                "checksum": CHECKSUM,
                SHARD_CHECKSUM: "crc32c",
                "preprocessing": settings,
                **({} if self._key_digest is None else {KEY_DIGEST: self._key_digest}),
            }
            header["digest"] = header_digest(header)
            write_whole(self.path / "store.json", (json.dumps(header, indent=2) + "\n").encode())
        if header["fingerprint"] != self._preprocessing.fingerprint():
            differing = differences(header["preprocessing"], self._preprocessing)
            what = differing or "by another version of the algorithm"
            same = f"give its settings ({repeating(header['preprocessing'], self._preprocessing)})"
            remedy = same if differing else "continue with the octfm that made it"
            raise StoreError(
                f"{self.named}: this store was prepared differently ({what}), and volumes of one store must be alike; "
                f"prepare into a new folder, or {remedy}"
            )
        # Stores of earlier versions do not name the key of their pseudonyms.
        if self._key_digest is not None and header.get(KEY_DIGEST, self._key_digest) != self._key_digest:
            raise StoreError(
                f"{self.named}: its pseudonyms were made with another key than the catalog's, so the same people would "
                "count as others; scan with the key of this store, or prepare into a new folder"
            )
        if self._compression_wanted not in (None, header["compression"]):
            raise StoreError(
                f"{self.named}: this store has compression {header['compression']}, got {self._compression_wanted}; "
                "prepare into a new folder, or omit the compression"
            )
        return header

    def _recover(self) -> None:
        """Remove what a killed writer left: staged files, a truncated last line, shards without a row."""
        for left_over in [*self.path.glob("staging-*"), *self.path.glob(".staging-*")]:
            _discard(left_over)
        rows, whole = read_rows(self.path)
        self.rows = list(rows)
        file = self.path / "rows.jsonl"
        file.touch()
        # Cut off a line without its end; appending to it would join two rows.
        if file.stat().st_size != whole:
            os.truncate(file, whole)
        write_whole(
            self.path / "zarr.json", json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
        )
        for name in ARRAYS:
            (self.path / name).mkdir(exist_ok=True)
            # Volumes are committed one at a time, so at most the next one can have shards without a row.
            (self.path / name / shard_key(len(rows))).unlink(missing_ok=True)
        self._write_metadata(len(rows))

    def _write_metadata(self, volumes: int) -> None:
        """Set the length of the arrays for zarr readers. It can be derived from the rows, so it needs no fsync."""
        for name in ARRAYS:
            metadata = array_metadata(name, volumes, self._header["image_size"], self.compression, self.crc)
            # Replaced rather than rewritten, so that a concurrent reader never sees half a file.
            temporary = self.path / name / ".zarr.json.tmp"
            temporary.write_text(json.dumps(metadata), "utf-8")
            temporary.replace(self.path / name / "zarr.json")

    def _move(self, staged: str, index: int) -> None:
        for name in ARRAYS:
            (self.staging / f"{staged}.{name}").replace(self.path / name / shard_key(index))
            flush(self.path / name)

    def _shard_size(self, name: str) -> int | None:
        """Bytes of every shard of an array; None if compressed, when sizes differ."""
        if self.compression != "none":
            return None
        blank = np.zeros(shapes(self._header["image_size"])[name], ARRAYS[name])
        return len(encode(name, blank, self._header["image_size"], "none", self.crc))


def stage(volume: Prepared | StoredVolume, staging: Path, name: str, compression: Compression, crc: bool = True) -> str:
    """Write the shards of one volume into the staging folder, with fsync, and return their checksum. Runs in workers.

    `crc`: whether shards of this store contain checksums; those of older stores do not.
    """
    for array in ARRAYS:
        values = getattr(volume, array)
        write_durably(staging / f"{name}.{array}", encode(array, values, volume.voxels.shape, compression, crc))
    return checksum(volume.voxels, volume.band, volume.valid)


def _discard(staging: Path) -> None:
    """Remove a staging folder into which a worker of a killed writer may still write.

    Renamed first: that worker then finds no folder, and cannot add a file while the others are being removed.
    """
    gone = staging.with_name(f".{staging.name.lstrip('.')}")
    with contextlib.suppress(OSError):
        staging.replace(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _is_whole(shard: Path, size: int | None) -> bool:
    try:
        found = shard.stat().st_size
    except FileNotFoundError:
        return False
    return size is None or found == size


def _refuse_foreign_folder(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise StoreError(f"{path}: expected a folder for the store, got a file; choose another place")
    if holds_other(path, "store.json"):
        raise StoreError(f"{path}: the folder is not empty and holds no store; choose a new folder, or empty this one")


def exclusive(path: Location) -> AbstractContextManager[Any]:
    """A context in which no other process writes to the store. Raises StoreError or BucketError if one does."""
    return only_one(path, path / (".lock" if isinstance(path, Path) else LEASE), "preparing this store", StoreError)


def write_durably(file: Path, data: bytes) -> None:
    """Write a file with fsync. Never creates its folder: a worker that outlives its run must fail in a deleted one."""
    file.write_bytes(data)
    flush(file)
