"""Read prepared volumes: zarr v3 arrays with one shard per volume, and one row of metadata per volume."""

import operator
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, overload

import numpy as np

from octfm.display import box, brief, counted, data_frame, number, readable, times, with_labels
from octfm.errors import ConfigError, StoreError, reason_of
from octfm.io.cores import available_cores
from octfm.io.location import Location, location
from octfm.store.arrays import open_arrays, says_damage
from octfm.store.item import StoredVolume
from octfm.store.layout import (
    ARRAYS,
    LEASE,
    SHARD_CHECKSUM,
    Arrays,
    Compression,
    StoreRow,
    Unprepared,
    digest,
    read_header,
    read_rows,
    read_unprepared,
    shard_key,
    summary,
)
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import STRUCTURE_ONLY, Modality


class Store:
    """A prepared store, opened for reading. It pickles as its path, so any kind of worker process can receive it."""

    def __init__(self, path: Location, header: dict[str, Any], rows: tuple[StoreRow, ...], threads: int | None):
        self.path, self.rows, self.threads = path, rows, threads
        self.fingerprint: str = header["fingerprint"]
        self.compression: Compression = header["compression"]
        self.image_size: tuple[int, int, int] = tuple(header["image_size"])
        self._settings: dict[str, Any] = header["preprocessing"]
        self.checks_shards: bool = header.get(SHARD_CHECKSUM) == "crc32c"
        """Whether shards contain checksums, which every read verifies. Those of older stores do not."""
        self._arrays: Any = None
        self._compared = np.zeros(len(rows), bool)
        """Rows whose voxels this object has compared with the checksum in rows.jsonl."""
        self._hashers: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self.folder = path.absolute() if isinstance(path, Path) else path
        """`path`, also after the current folder has changed."""
        self._made = _when_made(path)
        self.requests: dict[str, int] = {}
        """Requests that `prepare` made to buckets, and how many of them were retries."""

    @staticmethod
    def open(path: str | Location, threads: int | None = None) -> "Store":
        """Open a store; `threads` limits reading and copying, None uses every core.

        Raises StoreError if there is no store, or one of another version.
        """
        path = location(path)
        made, header = _when_made(path), read_header(path)
        if header is None:
            raise StoreError(f"{path}: no prepared store here (store.json is missing); make one with `octfm prepare`")
        store = Store(path, header, read_rows(path)[0], threads)
        store._made = made  # before the rows were read, which takes a while
        return store

    def __reduce__(self):
        return Store._reopened, (self.folder, self.threads, len(self), self._order(len(self)))

    @staticmethod
    def _reopened(path: Location, threads: int | None, count: int, order: str) -> "Store":
        """The store in another process; volumes may have been added since."""
        store = Store.open(path, threads)
        if store._order(count) != order:
            raise store._replaced()
        return store

    def with_rows(self, rows: tuple[StoreRow, ...]) -> "Store":
        """This store with other metadata of the same volumes."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), rows=rows)
        return other

    def _order(self, count: int) -> str:
        """Digest of the first acquisitions, to notice in another process that rows are other volumes."""
        return digest("\n".join(row.acquisition for row in self.rows[:count]).encode())

    def _replaced(self) -> StoreError:
        return StoreError(
            f"{self.path}: another store is here than was opened; it was replaced meanwhile, and its rows may be other "
            "volumes; put the former store back, or start again with this one"
        )

    def _gone(self) -> StoreError:
        return StoreError(
            f"{self.path}: this store is no longer here (store.json cannot be read): it was moved or deleted, or its "
            "disk is away; put it back, or open it where it is now"
        )

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, index: int) -> StoredVolume: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> "Store": ...

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray) -> "StoredVolume | Store":
        """One volume, counted from the end if negative; of a slice, rows or a mask a store. Raises IndexError."""
        if isinstance(index, slice):
            return self.part(np.arange(len(self))[index])
        if np.ndim(index) == 1 and not isinstance(index, str):
            return self.part(index)  # pyright: ignore[reportArgumentType]
        row = operator.index(index)  # pyright: ignore[reportArgumentType]
        if not -len(self) <= row < len(self):
            raise IndexError(f"{self.path}: no volume {row}; the store has {len(self)}, numbered from 0")
        row %= len(self)
        arrays = self.read([row])
        spacing = self.preprocessing.target_spacing
        return StoredVolume(
            self.rows[row], arrays.voxels[0], arrays.band[0], arrays.valid[0], spacing, self.fingerprint
        )

    def __iter__(self) -> Iterator[StoredVolume]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        facts = self._described()
        return brief("Store", facts["volumes"], facts["size"], facts["volumes per split"])

    def _repr_html_(self) -> str:
        pictures = []
        # Showing a store must not download from a bucket, and must not fail where a volume is damaged.
        first = {row.scanner: row.index for row in reversed(self.rows)} if isinstance(self.path, Path) else {}
        for scanner, row in sorted(first.items())[:3]:
            try:
                pictures.append((self[row].pictures()[0][0], readable(scanner)))
            except StoreError:
                continue
        return box("Store", self._described(), pictures=pictures)

    def _described(self) -> dict[str, str]:
        spacing = self._settings.get("target_spacing") or ()
        facts = self.summary()
        scanners = {name: counts["volumes"] for name, counts in facts["by_scanner"].items()}
        millimetres = f" of {' × '.join(f'{mm:g}' for mm in spacing)} mm" if spacing else ""
        return {
            "volumes": f"{number(len(self), 'volume')} of {number(facts['participants'], 'participant')}",
            "size": f"{times(self.image_size)} voxels{millimetres}",
            "scanners": counted(scanners),
            "volumes per split": counted(Counter(row.split or "no split" for row in self.rows)),
            "tissue band": f"of low confidence in {facts['low_confidence']:,}" if facts["low_confidence"] else "",
            "could not be prepared": counted(facts["unprepared"]),
        }

    def to_pandas(self) -> Any:
        """A DataFrame with one row per volume, in the order of the store: ids, eye, scanner, split, flags, and a column
        for every label of its participant. Raises ConfigError without pandas."""
        hidden = {"participant_labels", "transform", "confidence", "checksum", "pixels"}
        rows = []
        for row in self.rows:
            own = {name: value for name, value in asdict(row).items() if name not in hidden}
            rows.append(with_labels(own, row.participant_labels))
        return data_frame(rows).set_index("index") if rows else data_frame(rows)

    def as_torch(
        self,
        labels: Any = None,
        *,
        target: str | None = None,
        split: str | None = None,
        modalities: Sequence[Modality] = STRUCTURE_ONLY,
        transform: Any = None,
    ) -> Any:
        """A `torch.utils.data.Dataset` of these volumes; see octfm.evaluation.dataset.VolumeDataset for its items.

        labels: a table of labels (CSV, TSV or DataFrame), joined by id as `octfm probe` joins it.
        target: its column, or one of the participants' own labels; may be left out if the table has only one.
        split: train, val or test, by participant; None for all volumes.
        modalities: ("octa",) for the volumes of OCT angiography, ("structure", "octa") for all.
        transform: a function applied to every item, in the worker that has read it.

        Raises EvaluationError for labels that do not fit, ConfigError for another wrong argument, such as a split that
        the store does not have.
        """
        # By name: it needs torch and the evaluation, which nothing on the data side imports.
        return import_module("octfm.evaluation.dataset").dataset_of(
            self, labels, target=target, split=split, modalities=modalities, transform=transform
        )

    def part(self, rows: Sequence[int] | np.ndarray) -> "Store":
        """A store of these rows only, renumbered from 0. `rows`: numbers, negative ones counted from the end, or a mask
        bool [N]. Raises IndexError for others."""
        chosen, count = np.asarray(rows), len(self)
        if chosen.dtype == bool:
            # Taken as numbers, a mask would choose rows 0 and 1 over and over.
            if chosen.shape != (count,):
                raise IndexError(f"{self.path}: a mask of shape {list(chosen.shape)}; the store has {count} volumes")
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
            got = f"{chosen.dtype} {list(chosen.shape)}"
            raise IndexError(f"{self.path}: expected numbers of rows or a mask, [N], got {got}")
        if chosen.size and not (-count <= chosen.min() and chosen.max() < count):
            odd = next(row for row in chosen.tolist() if not -count <= row < count)
            raise IndexError(f"{self.path}: no volume {odd}; the store has {count}, numbered from 0")
        return _Part(self, chosen.astype(np.int64) % max(1, count))

    @property
    def left_out(self) -> tuple[str, ...]:
        """Acquisitions in the folder that are not in this part of the store."""
        return ()

    @property
    def preprocessing(self) -> Preprocessing:
        """The settings that the volumes were prepared with."""
        try:
            return Preprocessing.recorded(self._settings)
        except ConfigError as error:
            raise StoreError(
                f"{self.path / 'store.json'}: {error}; it was written by another version of octfm, or edited; "
                "prepare into a new folder"
            ) from None

    def reads_at_once(self, count: int) -> int:
        """How many reads of `count` volumes keep all cores busy: one, which reads volumes in parallel."""
        return 1

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        """The volumes of these rows, in this order; rows may repeat. Raises StoreError if one is damaged.

        `out` (such as `Arrays.empty(len(indices), store.image_size)`) is filled and returned. Reused memory causes no
        page faults, which for full-size volumes take as long as the copy itself.
        """
        index = self._numbers(indices)
        if out is None:
            out = replace(
                Arrays.empty(len(index), self.image_size), acquisition=tuple(self.rows[i].acquisition for i in index)
            )
        try:
            self._read_intact(index, out)
        except _Damaged as damage:
            raise StoreError(
                f"{damage}; `{self._verifying}` finds all damaged volumes and marks them to be prepared again"
            ) from damage
        return out

    def _numbers(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 [B]. Raises StoreError for anything but numbers of rows."""
        index = np.asarray(indices).reshape(-1)
        # A mask taken as numbers would read rows 0 and 1 over and over.
        if index.size and index.dtype.kind not in "iu":
            raise StoreError(f"{self.path}: expected numbers of rows, got {index.dtype}; part() takes a mask")
        index = index.astype(np.int64)
        if (outside := index[(index < 0) | (index >= len(self))]).size:
            raise StoreError(f"{self.path}: no row {outside[0]}; the store has {len(self)} rows, numbered from 0")
        return index

    def damaged(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, str]:
        """Compare these rows, or all, with their checksums; returns row -> what is wrong, for damaged rows only."""
        checked = np.arange(len(self)) if rows is None else self._numbers(rows)
        self._compared[checked] = False

        def one(row: int) -> str | None:
            try:
                self._read_intact(np.array([row]), Arrays.empty(1, self.image_size))
            except _Damaged as damage:
                return str(damage)
            return None

        self._arrays = self._arrays or self._opened()  # before the threads start, or each would open its own
        with ThreadPoolExecutor(self.threads or available_cores()) as pool:
            found = zip(checked.tolist(), pool.map(one, checked.tolist()), strict=True)
            return {row: sentence for row, sentence in found if sentence is not None}

    def holds(self, row: int, arrays: Arrays) -> bool:
        """Whether `arrays`, a batch of one, is the volume written as this row; True without a checksum."""
        known = self.rows[row].checksum
        return not known or arrays.checksum() == known

    def recorded(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` that are volumes of a prepared store: all but streamed phantoms."""
        return rows

    def turns(self, rows: np.ndarray, batch: int) -> tuple[list[np.ndarray], list[int]]:
        """Groups of `rows`, and how many volumes of each are in every global batch; a single group fills all of it."""
        return [rows], [batch]

    def verify(self, sample: int | None = None, seed: int = 0) -> int:
        """Compare all volumes, or a random `sample`, with their checksums; returns how many were compared.

        Raises StoreError naming the damaged ones.
        """
        count = len(self) if sample is None else min(sample, len(self))
        found = self.damaged(np.sort(np.random.default_rng(seed).permutation(len(self))[:count]))
        if found:
            names = ", ".join(f"{i} ({self.rows[i].acquisition})" for i in list(found)[:5])
            raise StoreError(
                f"{self.path}: {len(found)} of {count} volumes are damaged: "
                f"rows {names}{' …' if len(found) > 5 else ''}; run `{self._verifying}`, "
                "which marks them to be prepared again"
            )
        return count

    @property
    def _verifying(self) -> str:
        return f"octfm prepare CATALOG --out {shlex.quote(str(self.path))} --verify"

    def _read_intact(self, index: np.ndarray, out: Arrays) -> None:
        """Fill `out`; a damaged cached copy of a volume in a bucket is downloaded once more. Raises _Damaged."""
        if self._process != os.getpid():
            # After a fork, as in a worker of torch's DataLoader: threads of the parent do not exist here. Its readers
            # are kept, because the end of one deletes files that the parent uses.
            self._inherited = self._arrays, self._hashers
            self._arrays, self._hashers, self._process = None, None, os.getpid()
        # A shard of a store that has been moved here is whole and has the name of a row.
        if (made := _when_made(self.folder)) != self._made:
            raise self._replaced() if made is not None else self._gone()
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
        """Read into `out` and compare with rows.jsonl. Raises _Damaged."""
        # Opened at the first read and not by `open`: many callers need the rows only.
        self._arrays = self._arrays or self._opened()
        for name in ARRAYS:
            try:
                self._arrays.read_into(name, index, getattr(out, name))
            except (ValueError, OSError) as error:
                raise self._unreadable(index, name, error) from error
        # A shard with checksums of its own is hashed once, to make sure that it belongs to this row; later reads verify
        # those checksums. Shards of older stores are hashed at every read.
        places = [place for place, row in enumerate(index) if not (self.checks_shards and self._compared[row])]
        if len(places) > 1:
            self._hashers = self._hashers or ThreadPoolExecutor(self.threads or available_cores(), "octfm-checksum")
            hashes = self._hashers.map(out.checksum, places)
        else:
            hashes = map(out.checksum, places)
        # hashlib releases the GIL, so threads hash in parallel.
        for place, found in zip(places, hashes, strict=True):
            row = int(index[place])
            if found != self.rows[row].checksum:
                raise _Damaged(
                    row,
                    f"{self.path / 'voxels' / shard_key(row)}: volume {row} ({self.rows[row].acquisition}) is damaged: "
                    "this file, or that of the same name in band or valid, does not match the checksum in rows.jsonl",
                )
            self._compared[row] = True

    def unprepared(self) -> tuple[Unprepared, ...]:
        """Acquisitions that could not be prepared."""
        return read_unprepared(self.folder)

    def unfinished(self) -> str:
        """A sentence if `octfm prepare` is adding volumes to this store now, or was killed; else empty."""
        folder = self.folder
        if not (any(folder.glob("staging-*")) if isinstance(folder, Path) else (folder / LEASE).is_file()):
            return ""
        volumes = number(len(self.recorded(np.arange(len(self)))), "volume")
        begun = f"octfm prepare is not done with this store, or was killed; it had {volumes} when it was opened"
        return f"{self.path}: {begun}"

    def summary(self) -> dict[str, Any]:
        """Counts: volumes, participants, low-confidence bands per scanner and diagnosis, unprepared per code."""
        return summary(self.rows, self.unprepared())

    def _opened(self) -> Any:
        how = self.threads, self.compression, self.checks_shards
        if isinstance(self.folder, Path):
            return open_arrays(self.folder, *how)
        from octfm.store.bucket import BucketArrays

        return BucketArrays(self.folder, self.rows, self.image_size, *how)

    def _unreadable(self, index: np.ndarray, name: str, error: Exception) -> "StoreError | _Damaged":
        """The error for an unreadable shard, which need not be damaged."""
        # Only the reader's message names the row.
        named = re.search(rf"{name}[/\\]c\.(\d+)\.", str(error))
        row = int(named[1]) if named else int(index[0])
        # Opened by its absolute folder, which a message need not repeat.
        why = reason_of(str(error).replace(str(self.folder), str(self.path)), 200)
        file = self.path / name / shard_key(row)
        sentence = f"{file}: volume {row} ({self.rows[row].acquisition}) cannot be read: {why}"
        if not says_damage(error):
            return StoreError(
                f"{sentence}; the file may be intact: remove this cause (permissions, limits, a disk that is away), "
                "and run the same command again"
            )
        return _Damaged(row, sentence)


def _when_made(path: Location) -> int | None:
    """When store.json, which no writer changes, was written: whether it is still the same store. None in a bucket."""
    try:
        return (path / "store.json").stat().st_mtime_ns if isinstance(path, Path) else None
    except OSError:
        return None


class _Damaged(Exception):
    """A volume that does not match its checksum or cannot be read."""

    def __init__(self, row: int, sentence: str):
        super().__init__(sentence)
        self.row = row


class _Part(Store):
    """Some rows of a store, renumbered from 0."""

    def __init__(self, whole: Store, kept: np.ndarray):
        self.__dict__.update(whole.__dict__)
        self._whole, self._kept = whole, kept
        self.rows = tuple(replace(whole.rows[row], index=index) for index, row in enumerate(kept))

    def __reduce__(self):
        return _Part, (self._whole, self._kept)

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        return self._whole.read(self._kept[self._numbers(indices)], out)

    def damaged(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, str]:
        checked = np.arange(len(self)) if rows is None else self._numbers(rows)
        found = self._whole.damaged(self._kept[checked])
        return {
            int(row): found[whole] for row, whole in zip(checked, self._kept[checked], strict=True) if whole in found
        }

    @property
    def left_out(self) -> tuple[str, ...]:
        kept = {row.acquisition for row in self.rows}
        return tuple(sorted(row.acquisition for row in self._whole.rows if row.acquisition not in kept))
