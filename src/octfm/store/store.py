"""Prepared volumes on disk: zarr v3 arrays in which a shard is one volume, and a row per volume that says what it is."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octfm.errors import ConfigError, StoreError
from octfm.io.location import Location, location

if TYPE_CHECKING:
    from octfm.volume.preprocessing import Preprocessing
from octfm.store.layout import (
    ARRAYS,
    SHARD_CHECKSUM,
    Arrays,
    Compression,
    StoreRow,
    Unprepared,
    checksum,
    read_header,
    read_rows,
    read_unprepared,
    shard_key,
)


class Store:
    """A prepared store, opened for reading. Pickles as its path, so workers of any start method may take it along."""

    def __init__(self, path: Location, header: dict[str, Any], rows: tuple[StoreRow, ...], threads: int | None):
        self.path, self.rows, self.threads = path, rows, threads
        self.fingerprint: str = header["fingerprint"]
        self.compression: Compression = header["compression"]
        self.image_size: tuple[int, int, int] = tuple(header["image_size"])
        self._settings: dict[str, Any] = header["preprocessing"]
        self.checks_shards: bool = header.get(SHARD_CHECKSUM) == "crc32c"
        """Whether the shards carry checksums of their own, which whoever reads them verifies. Those of older stores do not."""
        self._arrays: Any = None
        self._compared = np.zeros(len(rows), bool)
        self._hashers: ThreadPoolExecutor | None = None
        self.requests: dict[str, int] = {}
        """Of `prepare` to or from a bucket: what it cost, and how many requests had to be sent again."""

    @staticmethod
    def open(path: str | Location, threads: int | None = None) -> "Store":
        """`threads` bounds those that read and copy; None lets every core help. Raises StoreError if missing or of another version."""
        path = location(path)
        header = read_header(path)
        if header is None:
            raise StoreError(f"{path}: no prepared store here (store.json is missing); make one with `octfm prepare`")
        return Store(path, header, read_rows(path)[0], threads)

    def __reduce__(self):
        return Store.open, (self.path, self.threads)

    def __len__(self) -> int:
        return len(self.rows)

    def part(self, rows: Sequence[int] | np.ndarray) -> "Store":
        """These rows alone, numbered anew; everything that reads a store takes it for one that never had others."""
        return _Part(self, np.asarray(rows, np.int64))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Acquisitions that are in the folder, but not in this part of it."""
        return ()

    @property
    def preprocessing(self) -> "Preprocessing":
        from octfm.volume.preprocessing import Preprocessing

        try:
            return Preprocessing.recorded(self._settings)
        except ConfigError as error:
            raise StoreError(
                f"{self.path / 'store.json'}: {error}; it was prepared by another octfm or edited, prepare into a new folder"
            ) from None

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        """The volumes of these rows, in this order, repeats allowed.

        `out` (of `Arrays.empty(len(indices), store.image_size)`) is filled and returned: reused memory costs no page faults, which
        at full size are as expensive as the copy itself.
        """
        index = np.asarray(indices, dtype=np.int64).reshape(-1)
        outside = index[(index < 0) | (index >= len(self))]
        if outside.size:
            raise StoreError(f"{self.path}: no row {outside[0]}; the store has {len(self)} rows, numbered from 0")
        if out is None:
            out = replace(
                Arrays.empty(len(index), self.image_size), acquisition=tuple(self.rows[i].acquisition for i in index)
            )
        try:
            self._read_sound(index, out)
        except _Damaged as damage:
            raise StoreError(
                f"{damage}; `octfm prepare CATALOG --out {self.path} --verify` finds all damaged volumes and sets them to be prepared again"
            ) from damage
        return out

    def damaged(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, str]:
        """Read these rows, or all, and compare them with their checksums: row -> what is wrong, of those that are not what was written."""
        wanted = np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.int64)
        self._compared[wanted] = False

        def one(row: int) -> str | None:
            try:
                self._read_sound(np.array([row]), Arrays.empty(1, self.image_size))
            except _Damaged as damage:
                return str(damage)
            return None

        self._arrays = self._arrays or self._opened()  # before the threads do
        # Each thread reads and hashes volumes of its own; `_fill` of one volume hashes in its own thread.
        with ThreadPoolExecutor(self.threads or os.cpu_count()) as pool:
            found = zip(wanted.tolist(), pool.map(one, wanted.tolist()), strict=True)
            return {row: sentence for row, sentence in found if sentence is not None}

    def verify(self, sample: int | None = None, seed: int = 0) -> int:
        """Compare the checksums of all volumes, or of `sample` drawn with `seed`; returns how many. StoreError names those that differ."""
        count = len(self) if sample is None else min(sample, len(self))
        found = self.damaged(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))
        if found:
            names = ", ".join(f"{i} ({self.rows[i].acquisition})" for i in list(found)[:5])
            raise StoreError(
                f"{self.path}: {len(found)} of {count} volumes are damaged: rows {names}{' …' if len(found) > 5 else ''}; "
                f"run `octfm prepare CATALOG --out {self.path} --verify`, which sets damaged volumes to be prepared again"
            )
        return count

    def _read_sound(self, index: np.ndarray, out: Arrays) -> None:
        """Fill `out`, fetching damaged copies of volumes in a bucket once again. Raises _Damaged."""
        renewed: set[int] = set()
        while True:
            try:
                return self._fill(index, out)
            except _Damaged as damage:
                if isinstance(self.path, Path) or damage.row in renewed:
                    raise
                renewed.add(damage.row)
                self._arrays.forget(damage.row)

    def _fill(self, index: np.ndarray, out: Arrays) -> None:
        """Read, and compare with rows.jsonl: shards that carry checksums once, which tells whether they are this row's; others always."""
        self._arrays = self._arrays or self._opened()
        for name in ARRAYS:
            try:
                self._arrays.read_into(name, index, getattr(out, name))
            except (ValueError, OSError) as error:
                raise self._unreadable(index, name, error) from error
        places = [place for place, row in enumerate(index) if not (self.checks_shards and self._compared[row])]

        def of_place(place: int) -> str:
            return checksum(out.voxels[place], out.band[place], out.valid[place])

        if len(places) > 1:
            self._hashers = self._hashers or ThreadPoolExecutor(self.threads or os.cpu_count(), "octfm-checksum")
        for place, found in zip(
            places, (self._hashers.map if len(places) > 1 and self._hashers else map)(of_place, places), strict=True
        ):
            row = int(index[place])
            if found != self.rows[row].checksum:
                raise _Damaged(
                    row,
                    f"{self.path / 'voxels' / shard_key(row)}: volume {row} ({self.rows[row].acquisition}) is not what was written: this "
                    "file, or that of the same name in band or valid, differs from the checksum in rows.jsonl",
                )
            self._compared[row] = True

    def unprepared(self) -> tuple[Unprepared, ...]:
        """What is quarantined, from unprepared.jsonl."""
        return read_unprepared(self.path)

    def summary(self) -> dict[str, Any]:
        """Counts: volumes, participants, low-confidence bands per scanner and diagnosis, quarantined per code."""
        by_scanner: dict[str, dict[str, int]] = {}
        by_diagnosis: dict[str, dict[str, int]] = {}
        for row in self.rows:
            for table, key in ((by_scanner, row.scanner), (by_diagnosis, row.diagnosis)):
                if key is not None:
                    counts = table.setdefault(key, {"volumes": 0, "low_confidence": 0})
                    counts["volumes"] += 1
                    counts["low_confidence"] += not row.confident
        return {
            "volumes": len(self),
            "participants": len({row.participant for row in self.rows}),
            "low_confidence": sum(not row.confident for row in self.rows),
            "by_scanner": dict(sorted(by_scanner.items())),
            "by_diagnosis": dict(sorted(by_diagnosis.items())),
            "found": dict(Counter(flag for row in self.rows for flag in row.found).most_common()),
            "unprepared": dict(Counter(u.code for u in self.unprepared()).most_common()),
        }

    def _opened(self) -> Any:
        if isinstance(self.path, Path):
            return _open_arrays(self.path, self.threads)
        from octfm.store.bucket import BucketArrays
        from octfm.store.writer import array_metadata

        metadata = {
            name: array_metadata(name, len(self), self.image_size, self.compression, self.checks_shards)
            for name in ARRAYS
        }
        return BucketArrays(
            self.path, self.rows, self.image_size, metadata, lambda folder: _open_arrays(folder, self.threads)
        )

    def _unreadable(self, index: np.ndarray, name: str, error: Exception) -> "_Damaged":
        """Which of these volumes has a bad shard, found by the shard that the engine's message names."""
        named = re.search(rf"{name}[/\\]c\.(\d+)\.", str(error))
        row = int(named[1]) if named else int(index[0])
        why = " ".join(str(error).split())[:200]
        return _Damaged(
            row,
            f"{self.path / name / shard_key(row)}: volume {row} ({self.rows[row].acquisition}) cannot be read: {why}",
        )


class _Damaged(Exception):
    """A volume that is not what was written."""

    def __init__(self, row: int, sentence: str):
        super().__init__(sentence)
        self.row = row


class _Part(Store):
    """Some rows of a store, numbered from 0."""

    def __init__(self, whole: Store, kept: np.ndarray):
        self.__dict__.update(whole.__dict__)
        self._whole, self._kept = whole, kept
        self.rows = tuple(replace(whole.rows[row], index=index) for index, row in enumerate(kept))

    def __reduce__(self):
        return _Part, (self._whole, self._kept)

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        index = np.asarray(indices, dtype=np.int64).reshape(-1)
        outside = index[(index < 0) | (index >= len(self))]
        if outside.size:
            raise StoreError(f"{self.path}: no row {outside[0]}; {len(self)} rows are not left out, numbered from 0")
        return self._whole.read(self._kept[index], out)

    def damaged(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, str]:
        wanted = np.arange(len(self)) if rows is None else np.asarray(rows, dtype=np.int64)
        found = self._whole.damaged(self._kept[wanted])
        return {int(row): found[whole] for row, whole in zip(wanted, self._kept[wanted], strict=True) if whole in found}

    @property
    def left_out(self) -> tuple[str, ...]:
        kept = {row.acquisition for row in self.rows}
        return tuple(sorted(row.acquisition for row in self._whole.rows if row.acquisition not in kept))


class _TensorStoreArrays:
    def __init__(self, path: Path, threads: int | None):
        import tensorstore

        limit = threads or "shared"
        # Shards are written once and renamed into place, never truncated, so mapping them is safe and saves a copy.
        context = tensorstore.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": {"limit": limit},
                "file_io_concurrency": {"limit": limit},
                "file_io_mode": {"mode": "memmap"},
            }
        )
        self._tensorstore = tensorstore
        # A shard that is absent is damage; zarr's default would hand out zeros for it.
        self._arrays = {
            name: tensorstore.open(
                {
                    "driver": "zarr3",
                    "kvstore": {"driver": "file", "path": f"{path / name}/"},
                    "fill_missing_data_reads": False,
                },
                context=context,
                read=True,
            ).result()
            for name in ARRAYS
        }

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        target = self._tensorstore.array(out, copy=False, write=True)
        target.write(self._arrays[name][index]).result()


class _ZarrArrays:
    def __init__(self, path: Path, threads: int | None):
        import zarr

        self._path = path
        self._arrays = {name: zarr.open_array(path / name, mode="r") for name in ARRAYS}
        self._pool = ThreadPoolExecutor(threads or os.cpu_count())

    def read_into(self, name: str, index: np.ndarray, out: np.ndarray) -> None:
        def one(position: int) -> None:
            shard = self._path / name / shard_key(index[position])
            if not shard.is_file():
                raise FileNotFoundError(f"{shard} is absent")
            try:
                out[position] = self._arrays[name][int(index[position])]
            except (ValueError, RuntimeError) as error:
                raise OSError(f"{shard}: {error}") from error

        list(self._pool.map(one, range(len(index))))


def _open_arrays(path: Path, threads: int | None) -> _TensorStoreArrays | _ZarrArrays:
    try:
        try:
            return _TensorStoreArrays(path, threads)
        except ImportError:
            return _ZarrArrays(path, threads)
    except (ValueError, OSError) as error:
        raise StoreError(
            f"{path}: the arrays cannot be opened ({error}); `octfm prepare` repairs or makes them"
        ) from error
