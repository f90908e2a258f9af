"""Stores in a bucket: written shard by shard and visible row by row, read through verified copies on the local disk."""

import json
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from octfm.errors import StoreError
from octfm.io import bucket, bucket_cache
from octfm.io.hashing import hash_text
from octfm.io.lease import Lease
from octfm.io.location import BucketPath, write_whole
from octfm.store.layout import ARRAYS, Compression, StoreRow, checksum, read_rows, shapes, shard_key
from octfm.store.writer import StoreWriter

if TYPE_CHECKING:
    from octfm.volume.preprocessing import Preprocessing

AT_ONCE = 16
"""Volumes fetched together."""
TRIES = 3
"""Of a volume whose bytes arrived and differ from its checksum."""
COMMIT_SHARE, COMMIT_LEAST = 0.05, 16
"""Objects cannot be appended to: the list of rows is written again after so many new ones, and in between each has an object of its own."""


class BucketArrays:
    """The arrays of a store in a bucket. A volume is fetched once, compared with its checksum, and read from the cache ever after."""

    def __init__(
        self,
        path: BucketPath,
        rows: tuple[StoreRow, ...],
        image_size: tuple[int, int, int],
        metadata: Mapping[str, Any],
        open_arrays,
    ):
        """`metadata`: of each array; `open_arrays`: what opens a local folder of arrays."""
        self._path, self._rows, self._image_size = path, rows, image_size
        self._listing: dict[str, bucket.Object] = {}
        self._lock = threading.Lock()
        # Links to cached shards, under the names that zarr expects.
        self._links = tempfile.TemporaryDirectory(prefix="octfm-store-", ignore_cleanup_errors=True)
        for name in ARRAYS:
            folder = Path(self._links.name) / name
            folder.mkdir()
            (folder / "zarr.json").write_text(json.dumps(metadata[name]))
        self._arrays = open_arrays(Path(self._links.name))
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="octfm-bucket")

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        with ExitStack() as held:
            list(self._pool.map(lambda row: self._hold(row, held), (int(row) for row in np.unique(index))))
            self._arrays.read_into(name, index, out)

    def forget(self, row: int) -> None:
        """Delete a damaged copy, so that the next read fetches another one."""
        self._forget(row)
        warnings.warn(
            f"{self._path}: the copy of volume {row} in {bucket_cache.folder()} was damaged and is fetched again",
            stacklevel=2,
        )

    def _hold(self, row: int, held: ExitStack) -> None:
        """Link the shards of a volume and keep them from being evicted as long as `held` is open."""
        for _ in range(TRIES):
            own = ExitStack()
            fresh = [self._link(name, row, own) for name in ARRAYS]
            if not any(fresh) or self._as_it_was_written(row):
                with self._lock:
                    held.enter_context(own)
                return
            own.close()
            self._forget(row)
        raise OSError(
            f"{self._path / 'voxels' / shard_key(row)}: fetched {TRIES} times, and never as its checksum says"
        )

    def _link(self, name: str, row: int, own: ExitStack) -> bool:
        """Whether it had to be fetched."""
        uri, made = str(self._path / name / shard_key(row)), []
        found = self._find(uri)

        def make(file: Path) -> None:
            made.append(True)
            bucket.download(uri, file, found.size)

        cached = own.enter_context(bucket_cache.kept(bucket_cache.key(uri, found), found.size, make))
        link = Path(self._links.name) / name / shard_key(row)
        if not link.is_symlink() or link.readlink() != cached:
            beside = link.with_name(f".{link.name}.{threading.get_ident()}")
            beside.symlink_to(cached)
            beside.replace(link)
        return bool(made)

    def _find(self, uri: str) -> bucket.Object:
        """From one listing of the store; from another one where something was added since."""
        with self._lock:
            if uri not in self._listing:
                self._listing = bucket.find(str(self._path))
            if uri not in self._listing:
                raise FileNotFoundError(f"{uri} is absent")
            return self._listing[uri]

    def _as_it_was_written(self, row: int) -> bool:
        arrays = {name: np.empty((1, *shape), ARRAYS[name]) for name, shape in shapes(self._image_size).items()}
        try:
            for name, array in arrays.items():
                self._arrays.read_into(name, np.array([row]), array)
        except (ValueError, OSError):
            return False
        return checksum(*(arrays[name][0] for name in ("voxels", "band", "valid"))) == self._rows[row].checksum

    def _forget(self, row: int) -> None:
        for name in ARRAYS:
            (Path(self._links.name) / name / shard_key(row)).resolve().unlink(missing_ok=True)


class BucketStoreWriter(StoreWriter):
    """Works in a local folder like any StoreWriter; shards go to the bucket at once, and their row after them.

    A reader sees what rows.jsonl lists, whose shards are all there. Rows since its last writing are objects below pending/, from
    which the next writer goes on when this one is killed.
    """

    def __init__(self, where: BucketPath, preprocessing: "Preprocessing", compression: Compression | None = None):
        self.where = where
        mirror = bucket_cache.folder() / "stores" / hash_text(str(where))[:24]
        super().__init__(mirror, preprocessing, compression)

    def __enter__(self) -> Self:
        self._lease = Lease(self.where / "writer.lock", "preparing this store").__enter__()
        try:
            self._refuse_foreign()
            self._fetch()
            if not (self.path / "store.json").is_file():
                self._asked = self._asked or "zstd"
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
        found = {
            (name, row.index): listing.get(str(self.where / name / shard_key(row.index)))
            for row in self.rows
            for name in ARRAYS
        }
        return {
            index for (name, index), there in found.items() if there is None or sizes[name] not in (None, there.size)
        }

    def _move(self, staged: str, index: int) -> None:
        self._lease.require()
        files = {self.staging / f"{staged}.{name}": str(self.where / name / shard_key(index)) for name in ARRAYS}
        with ThreadPoolExecutor(len(files)) as pool:
            list(pool.map(bucket.upload, files, files.values()))
        for file in files:
            file.unlink()

    def _commit(self) -> None:
        """Metadata first, then the list of rows: a reader never knows of a volume that the arrays do not reach."""
        self._lease.require()
        if not (self.where / "store.json").is_file():
            bucket.upload(self.path / "store.json", str(self.where / "store.json"))
        for name in ("zarr.json", *(f"{name}/zarr.json" for name in ARRAYS), "unprepared.jsonl", "rows.jsonl"):
            if (self.path / name).is_file():
                bucket.upload(self.path / name, str(self.where / name))
        for index in range(self._committed, len(self.rows)):
            bucket.delete(str(self._pending(index)))
        self._committed = len(self.rows)

    def _fetch(self) -> None:
        """The bucket's word about the store into the local folder, whatever is left there from another time."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir(parents=True)
        for name in ("store.json", "unprepared.jsonl", "rows.jsonl"):
            if (self.where / name).is_file():
                write_whole(self.path / name, (self.where / name).read_bytes())
        rows, _ = read_rows(self.path)
        self._listed = len(rows)
        pending = {BucketPath.of(uri).stem: uri for uri in bucket.find(str(self.where / "pending"))}
        for index in range(len(rows), len(rows) + len(pending)):
            if f"{index:08d}" not in pending:
                break
            with (self.path / "rows.jsonl").open("ab") as file:
                file.write(bucket.read(pending[f"{index:08d}"]))

    def _pending(self, index: int) -> BucketPath:
        return self.where / "pending" / f"{index:08d}.json"

    def _refuse_foreign(self) -> None:
        if not (self.where / "store.json").is_file() and any(
            path.name != "writer.lock" for path in self.where.iterdir()
        ):
            raise StoreError(f"{self.where}: there are objects here and no store; choose a new address, or delete them")
