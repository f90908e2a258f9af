"""Stores in a bucket: written shard by shard, visible row by row, read through verified copies on local disk."""

import json
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import numpy as np

from octfm.errors import StoreError
from octfm.io import bucket, bucket_cache
from octfm.io.hashing import hash_text
from octfm.io.lease import Lease
from octfm.io.location import BucketPath, write_whole
from octfm.store.arrays import open_arrays, says_damage
from octfm.store.layout import ARRAYS, LEASE, Arrays, Compression, StoreRow, array_metadata, read_rows, shard_key
from octfm.store.writer import StoreWriter
from octfm.volume.preprocessing import Preprocessing

AT_ONCE = 16
"""Volumes fetched at the same time."""
TRIES = 3
"""Downloads of a volume whose bytes do not match its checksum, before giving up."""
COMMIT_SHARE, COMMIT_LEAST = 0.05, 16
"""rows.jsonl is uploaded again once this share of its rows is new, and at least this many. Nothing can be appended to
an object, so until then every new row is an object of its own below pending/."""


class BucketArrays:
    """The arrays of a store in a bucket: each volume is downloaded once, verified, and then read from the cache."""

    def __init__(
        self,
        path: BucketPath,
        rows: tuple[StoreRow, ...],
        image_size: tuple[int, int, int],
        threads: int | None,
        compression: Compression,
        crc: bool,
    ):
        self._path, self._rows, self._image_size = path, rows, image_size
        self._listing: dict[str, bucket.Object] = {}
        self._lock = threading.Lock()
        # Symbolic links to cached shards, under the names that zarr expects.
        self._links = tempfile.TemporaryDirectory(prefix="octfm-store-", ignore_cleanup_errors=True)
        for name in ARRAYS:
            folder = Path(self._links.name) / name
            folder.mkdir()
            metadata = array_metadata(name, len(rows), image_size, compression, crc)
            (folder / "zarr.json").write_text(json.dumps(metadata), "utf-8")
        self._arrays = open_arrays(Path(self._links.name), threads, compression, crc)
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="octfm-bucket")

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        with ExitStack() as held:
            list(self._pool.map(lambda row: self._hold(row, held), (int(row) for row in np.unique(index))))
            self._arrays.read_into(name, index, out)

    def forget(self, row: int) -> None:
        """Delete a damaged cached copy, so that the next read downloads it again."""
        self._forget(row)
        warnings.warn(
            f"{self._path}: the copy of volume {row} in {bucket_cache.folder()} was damaged and is downloaded again",
            stacklevel=2,
        )

    def _hold(self, row: int, held: ExitStack) -> None:
        """Link the shards of a volume and keep them from being evicted as long as `held` is open."""
        for _ in range(TRIES):
            own = ExitStack()
            downloaded = [self._link(name, row, own) for name in ARRAYS]
            # Cached copies were verified when they arrived.
            if not any(downloaded) or self._matches_checksum(row):
                with self._lock:
                    held.enter_context(own)
                return
            own.close()
            self._forget(row)
        raise OSError(
            f"{self._path / 'voxels' / shard_key(row)}: downloaded {TRIES} times, never matching its checksum"
        )

    def _link(self, name: str, row: int, own: ExitStack) -> bool:
        """Link a shard to its cached copy, held by `own`; True if it had to be downloaded."""
        uri, downloads = str(self._path / name / shard_key(row)), []
        found = self._find(uri)

        def download(file: Path) -> None:
            downloads.append(uri)
            bucket.download(uri, file, found.size)

        cached = own.enter_context(bucket_cache.kept(bucket_cache.key(uri, found), found.size, download))
        link = Path(self._links.name) / name / shard_key(row)
        if not link.is_symlink() or link.readlink() != cached:
            # Symbolic links cannot be changed in place: make another one and rename it over the old one.
            renewed = link.with_name(f".{link.name}.{threading.get_ident()}")
            renewed.symlink_to(cached)
            renewed.replace(link)
        return bool(downloads)

    def _find(self, uri: str) -> bucket.Object:
        """Look an object up in a listing of the store, which is renewed if the object was added since."""
        with self._lock:
            if uri not in self._listing:
                self._listing = bucket.find(str(self._path))
            if uri not in self._listing:
                raise FileNotFoundError(f"{uri} is absent")
            return self._listing[uri]

    def _matches_checksum(self, row: int) -> bool:
        arrays = Arrays.empty(1, self._image_size)
        try:
            for name in ARRAYS:
                self._arrays.read_into(name, np.array([row]), getattr(arrays, name))
        except (ValueError, OSError) as error:
            if says_damage(error):
                return False
            raise
        return arrays.checksum() == self._rows[row].checksum

    def _forget(self, row: int) -> None:
        for name in ARRAYS:
            (Path(self._links.name) / name / shard_key(row)).resolve().unlink(missing_ok=True)


class BucketStoreWriter(StoreWriter):
    """A StoreWriter in a local folder that uploads each volume's shards at once, and then its row.

    Readers see what rows.jsonl lists, and all of those shards are there. Rows added since it was last uploaded are
    objects below pending/; if this writer is killed, the next one continues from them.
    """

    def __init__(
        self,
        where: BucketPath,
        preprocessing: Preprocessing,
        compression: Compression | None = None,
        key_digest: str | None = None,
    ):
        self.where = where
        mirror = bucket_cache.folder() / "stores" / hash_text(str(where))[:24]
        super().__init__(mirror, preprocessing, compression, key_digest)
        self.named = where

    def __enter__(self) -> Self:
        self._lease = Lease(self.where / LEASE, "preparing this store").__enter__()
        try:
            self._refuse_foreign()
            self._fetch()
            if not (self.path / "store.json").is_file():
                self._compression_wanted = self._compression_wanted or "zstd"
            super().__enter__()
            self._committed = self._listed
            self._commit()
        except BaseException:
            self._lease.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if not self._lease.lost:
                self._commit()
        finally:
            super().__exit__(*error)
            self._lease.__exit__()

    def append(self, row: StoreRow, staged: str) -> None:
        super().append(row, staged)
        row = self.rows[-1]
        bucket.write(str(self._pending(row.index)), row.to_line().encode())
        if len(self.rows) - self._committed >= max(COMMIT_LEAST, COMMIT_SHARE * len(self.rows)):
            self._commit()

    def rewrite(self, rows: Iterable[StoreRow]) -> None:
        super().rewrite(rows)
        self._commit()

    def missing(self) -> set[int]:
        sizes = {name: self._shard_size(name) for name in ARRAYS}
        listing = bucket.find(str(self.where))

        def is_whole(name: str, index: int) -> bool:
            shard = listing.get(str(self.where / name / shard_key(index)))
            return shard is not None and sizes[name] in (None, shard.size)

        return {row.index for row in self.rows if not all(is_whole(name, row.index) for name in ARRAYS)}

    def _move(self, staged: str, index: int) -> None:
        self._lease.require()
        files = {self.staging / f"{staged}.{name}": str(self.where / name / shard_key(index)) for name in ARRAYS}
        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(bucket.upload, files, files.values()))
        for file in files:
            file.unlink()

    def _commit(self) -> None:
        """Upload the metadata, then rows.jsonl: a reader never sees a row beyond the length of the arrays."""
        self._lease.require()
        if not (self.where / "store.json").is_file():
            bucket.upload(self.path / "store.json", str(self.where / "store.json"))
        for name in ("zarr.json", *(f"{name}/zarr.json" for name in ARRAYS), "unprepared.jsonl", "rows.jsonl"):
            if (self.path / name).is_file():
                bucket.upload(self.path / name, str(self.where / name))
        # Only now: until rows.jsonl is there, pending rows are the only record of these volumes.
        for index in range(self._committed, len(self.rows)):
            bucket.delete(str(self._pending(index)))
        self._committed = len(self.rows)

    def _fetch(self) -> None:
        """Replace the local folder by the header and rows in the bucket, including rows below pending/."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for name in ("store.json", "unprepared.jsonl", "rows.jsonl"):
            if (self.where / name).is_file():
                write_whole(self.path / name, (self.where / name).read_bytes())
        rows, _ = read_rows(self.path)
        self._listed = len(rows)
        pending = {BucketPath.of(uri).stem: uri for uri in bucket.find(str(self.where / "pending"))}
        # Pending rows with lower numbers are in rows.jsonl already; an interrupted commit left them behind.
        for index in range(len(rows), len(rows) + len(pending)):
            if f"{index:08d}" not in pending:
                break
            with (self.path / "rows.jsonl").open("ab") as file:
                file.write(bucket.read(pending[f"{index:08d}"]))

    def _pending(self, index: int) -> BucketPath:
        return self.where / "pending" / f"{index:08d}.json"

    def _refuse_foreign(self) -> None:
        if not (self.where / "store.json").is_file() and any(path.name != LEASE for path in self.where.iterdir()):
            raise StoreError(f"{self.where}: holds objects, but no store; choose a new address, or delete them")
