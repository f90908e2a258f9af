"""Catalog + Preprocessing -> Store: parallel, resumable at any moment, and never stopped by a bad file."""

import functools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from octfm.catalog.acquisition import FLAGS, PSEUDONYM
from octfm.errors import BucketError, OctfmError, ReadError, StoreError
from octfm.formats.declared import doubtful_way_up
from octfm.formats.reasons import REASONS as READER_REASONS
from octfm.io.bucket import Account
from octfm.io.isolation import Limits, Lost, release
from octfm.io.location import Location, location
from octfm.io.spread import require_cluster, spread
from octfm.store.exclusion import without_excluded_files
from octfm.store.layout import Compression, StoreRow, Unprepared
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.pixel_copies import Owner, PixelCopies, describe_copy, fingerprint
from octfm.volume.volume import Volume

if TYPE_CHECKING:
    from octfm.catalog.catalog import Acquisition, Catalog
    from octfm.formats.bscans import Reader
    from octfm.volume.preprocessing import Prepared, Preprocessing

# What a bad file makes of a decoder or of numpy. A TypeError or an AttributeError would be our own mistake, and stops the run.
BAD_INPUT = (OctfmError, ValueError, ArithmeticError, LookupError, RuntimeError, OSError, MemoryError)

REASONS: dict[str, str] = {
    "changed_since_scan": "the file is not the one that the catalog describes; scan again",
    "no_image": "all that differs from one value lies outside the prepared field, or every A-scan has one value throughout: nothing is left "
    "to learn from; look at the scan. Noise without a retina is prepared, with a tissue band of low confidence",
    "preprocessing_failed": "the voxels could be read, and not brought into the prepared frame; report it with the sentence",
}
"""What can go wrong after the scan, besides the reason codes of the readers -> what it means and what would fix it."""

Read = Callable[[str], Volume]


def prepare(
    catalog: "Catalog",
    out: str | Location,
    preprocessing: "Preprocessing",
    *,
    workers: int | None = None,
    compression: Compression | None = None,
    progress: bool = True,
    read: Read | None = None,
    locations: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    cluster: str | None = None,
    keep_upside_down: bool = False,
    exclude: str | Path | None = None,
    readers: "Sequence[Reader]" = (),
) -> Store:
    """Prepare every accepted acquisition that `out` does not hold yet, in catalog order, whatever the number of workers.

    Stopped at any moment, even by kill -9, the same call continues. What cannot be prepared goes to unprepared.jsonl with a
    code and a sentence and is tried again by the next call. Volumes already there are not read again; when the catalog says
    other things about them (split, labels, scanner), their rows follow it.

    workers: child processes, None for one per core; 0 works in this process, where a crash of a decoder is a crash of the run.
    compression: "none" for a local disk, "zstd" for a bucket; what a new store gets there.
    read: how a uri becomes a Volume, by default `read_volume`, which decides by content; it travels to the workers.
    locations: where the file of each uri lies, for a catalog whose uris are pseudonyms (octfm.catalog.participants.pseudonyms.locate).
    limits: seconds and memory of one file; what needs more is quarantined, like a file that crashes its decoder.
    keep_upside_down: prepare what looks upside down as it lies, with a flag, instead of setting it aside.
    cluster: address of a dask scheduler (tcp://host:port); all its workers are used, and must see files and store at the same paths.
    exclude: a file that names volumes not to prepare (octfm.store.exclusion); those that are in the store already stay in it.
    readers: the readers of formats of your own that the catalog was scanned with.
    Raises StoreError where `out` was prepared with other settings, is being written by another process or cannot be written, and
    where nothing at all could be prepared.
    """
    from octfm.catalog.participants.pseudonyms import is_pseudonymous

    out = location(out)
    account = Account(out, catalog.root)
    if not catalog.acquisitions:
        raise StoreError(
            f"{catalog.root}: the catalog has no accepted acquisition, so there is nothing to prepare; see its rejects"
        )
    if locations is None and read is None and is_pseudonymous(catalog):
        raise StoreError(
            f"{out}: the catalog names files by pseudonyms; give its key and root (octfm prepare --key FILE --root FOLDER)"
        )
    if workers is not None and workers < 0:
        raise StoreError(f"workers must be at least 1, or 0 to work in this process, got {workers}")
    limits = limits or Limits()
    if cluster is not None:
        require_cluster(cluster)  # before anything is written
    wanted = without_excluded_files(catalog.acquisitions, exclude, str(catalog.root))
    with _writer(out, preprocessing, compression) as writer:
        _follow_catalog(writer, catalog.acquisitions)
        tasks = _missing(writer, wanted, locations or {})
        unwanted = {a.sop_instance_uid for a in catalog.acquisitions} - {a.sop_instance_uid for a in wanted}
        trying = {task.acquisition.sop_instance_uid for task in tasks} | unwanted
        writer.keep_unprepared(lambda u: u.acquisition not in trying)
        run = functools.partial(
            _prepare_one,
            preprocessing=preprocessing,
            read=read,
            readers=readers,
            staging=writer.staging,
            compression=writer.compression,
            crc=writer.crc,
            keep_upside_down=keep_upside_down,
        )
        copies = PixelCopies()
        for row in writer.rows:
            copies.first_owner(row.pixels, Owner(row.uri, row.participant, row.laterality))
        try:
            with _Progress(len(tasks), progress) as shown:
                outcomes = spread(
                    account.counting(run),
                    tasks,
                    _lost,
                    workers=workers,
                    limits=limits,
                    deadline=functools.partial(_deadline, limits),
                    chunk=1,
                    cluster=cluster,
                )
                for task, outcome in zip(tasks, account.counted(outcomes), strict=True):
                    outcome = _unless_copied(outcome, task, copies, writer)
                    if isinstance(outcome, Unprepared):
                        writer.quarantine(outcome)
                    elif task.index is None:
                        writer.append(outcome, task.name)
                    else:
                        writer.put_back(outcome, task.name)
                    shown.advance(outcome)
        except OSError as error:
            raise StoreError(
                f"{out}: writing failed ({error}); what is there stays valid, mend that and run the same command again"
            ) from error
    # Their memory is of use to the training that may follow in this process.
    release(keep=1)
    store = Store.open(out)
    if not len(store):
        code, count = Counter(u.code for u in store.unprepared()).most_common(1)[0]
        first = next(u for u in store.unprepared() if u.code == code)
        raise StoreError(
            f"{out}: none of {len(tasks)} volumes could be prepared, {count} with {code}, for example: {first.sentence}; "
            f"see {out / 'unprepared.jsonl'}"
        )
    if progress:
        print(describe(store.summary()), file=sys.stderr)
    if spent := account.close():
        store.requests = spent
        if progress:
            print(f"  bucket: {', '.join(f'{name} {count:,}' for name, count in spent.items())}", file=sys.stderr)
    return store


def _unless_copied(
    outcome: StoreRow | Unprepared, task: "_Task", copies: PixelCopies, writer: StoreWriter
) -> StoreRow | Unprepared:
    """Voxels that the store already has are not put there again; where they are another participant's, the row that has them says so."""
    if isinstance(outcome, Unprepared) or task.index is not None:
        return outcome
    owner = Owner(outcome.uri, outcome.participant, outcome.laterality)
    first = copies.first_owner(outcome.pixels, owner)
    if first is None:
        return outcome
    code, sentence = describe_copy(owner, first)
    if code in FLAGS:
        new = {row.index for row in writer.rows if row.uri == first.uri and code not in row.found}
        writer.rewrite([replace(row, found=(*row.found, code)) if row.index in new else row for row in writer.rows])
    return _unprepared(task.acquisition, code, sentence)


def _writer(out: Location, preprocessing: "Preprocessing", compression: Compression | None) -> StoreWriter:
    if isinstance(out, Path):
        return StoreWriter(out, preprocessing, compression)
    from octfm.store.bucket import BucketStoreWriter

    return BucketStoreWriter(out, preprocessing, compression)


def describe(summary: dict[str, Any]) -> str:
    """`Store.summary()` in lines for people."""
    lines = [f"{summary['volumes']:,} volumes of {summary['participants']:,} participants prepared"]
    for title, key in (("scanner", "by_scanner"), ("diagnosis", "by_diagnosis")):
        for name, counts in summary[key].items():
            low = f"{counts['low_confidence']:,} ({counts['low_confidence'] / counts['volumes']:.0%})"
            lines.append(f"  {title} {name}: {counts['volumes']:,} volumes, tissue band of low confidence in {low}")
    lines += [f"  {count:,} {flag}: {FLAGS[flag]}" for flag, count in summary["found"].items()]
    lines += [f"  not prepared, {code}: {count:,}" for code, count in summary["unprepared"].items()]
    return "\n".join(lines)


@dataclass(frozen=True)
class _Task:
    acquisition: "Acquisition"
    location: str
    """Where the file lies; the acquisition's uri, unless that is a pseudonym."""
    index: int | None
    """The row whose shards are lost; None for a volume that is new."""
    name: str
    """Of its files in the staging folder."""


def _missing(writer: StoreWriter, acquisitions: Sequence["Acquisition"], locations: Mapping[str, str]) -> list[_Task]:
    index = {row.acquisition: row.index for row in writer.rows}
    lost = writer.missing()
    tasks, seen = [], set()
    for position, acquisition in enumerate(acquisitions):
        uid = acquisition.sop_instance_uid
        if uid in seen:
            raise StoreError(
                f"{acquisition.uri}: acquisition {uid} is in the catalog twice; scan again, which rejects duplicates"
            )
        seen.add(uid)
        if uid not in index or index[uid] in lost:
            tasks.append(
                _Task(acquisition, locations.get(acquisition.uri, acquisition.uri), index.get(uid), f"{position:08d}")
            )
    return tasks


def _follow_catalog(writer: StoreWriter, acquisitions: Sequence["Acquisition"]) -> None:
    """A catalog scanned anew may have moved participants between splits, or learnt labels: stale rows would leak (F16)."""
    known = {acquisition.sop_instance_uid: acquisition for acquisition in acquisitions}
    rows = []
    for row in writer.rows:
        acquisition = known.get(row.acquisition)
        if acquisition is not None:
            if acquisition.laterality != row.laterality:
                raise StoreError(
                    f"{writer.path}: {row.uri} was prepared as laterality {row.laterality}, and the catalog now says "
                    f"{acquisition.laterality}; its voxels would be mirrored wrongly, prepare into a new folder"
                )
            row = replace(row, **words(acquisition))
        rows.append(row)
    if rows != writer.rows:
        writer.rewrite(rows)


def words(acquisition: "Acquisition") -> dict[str, Any]:
    """What a row repeats from the catalog."""
    return {
        "acquisition": acquisition.sop_instance_uid,
        "uri": acquisition.uri,
        "participant": acquisition.participant,
        "eye_id": acquisition.eye_id,
        "laterality": acquisition.laterality,
        "scanner": acquisition.scanner,
        "protocol": acquisition.protocol,
        "split": acquisition.split,
        "participant_labels": dict(acquisition.participant_labels),
        "flags": tuple(acquisition.flags),
        "layout": acquisition.layout,
    }


# ---- in a worker -----------------------------------------------------------------------------------------------------------------


def _prepare_one(
    task: _Task,
    *,
    preprocessing: "Preprocessing",
    read: Read | None,
    readers: "Sequence[Reader]",
    staging: Path,
    compression: Compression,
    crc: bool,
    keep_upside_down: bool,
) -> StoreRow | Unprepared:
    acquisition = task.acquisition
    try:
        prepared, pixels, doubts = prepare_acquisition(
            acquisition, task.location, preprocessing, read, keep_upside_down=keep_upside_down, readers=readers
        )
    except BucketError:
        raise  # what could not be fetched is no bad file
    except BAD_INPUT as error:
        sentence = " ".join(str(error).split()).replace(task.location, acquisition.uri)
        return _unprepared(acquisition, code_of(error), sentence or type(error).__name__)
    digest = stage(prepared, staging, task.name, compression, crc)
    row = row_of(acquisition, prepared, digest, pixels, doubts)
    return row if task.index is None else replace(row, index=task.index)


def row_of(
    acquisition: "Acquisition", prepared: "Prepared", digest: str, pixels: str = "", doubts: tuple[str, ...] = ()
) -> StoreRow:
    """The row of a volume that has no place in the store yet. `doubts`: flags that only its pixels give."""
    if acquisition.laterality and prepared.disc == "left":  # left eyes are mirrored, so every disc belongs on the right
        doubts = (*doubts, "laterality_contradicts_anatomy")
    return StoreRow(
        index=-1,
        confident=bool(prepared.confident),
        confidence=dict(prepared.confidence),
        transform=prepared.transform.to_dict(),
        checksum=digest,
        pixels=pixels,
        found=doubts,
        **words(acquisition),
    )


def prepare_acquisition(
    acquisition: "Acquisition",
    where: str,
    preprocessing: "Preprocessing",
    read: Read | None = None,
    *,
    keep_upside_down: bool = False,
    readers: "Sequence[Reader]" = (),
) -> tuple["Prepared", str, tuple[str, ...]]:
    """Read the file at `where`, which the catalog describes as `acquisition`, and prepare it; the fingerprint of its native voxels; and
    flags for what is doubtful about them.

    Raises one of BAD_INPUT; `code_of` says what to call it.
    """
    if read is None:
        from octfm.formats import read_volume

        read = functools.partial(
            read_volume,
            spacing_mm=acquisition.spacing_mm,
            raster_only=acquisition.layout == "raster",
            readers=readers,
        )
    volume = read(where)
    if volume.shape != tuple(acquisition.shape):
        raise ReadError(
            "changed_since_scan",
            f"{acquisition.uri}: the catalog says {acquisition.shape}, the file now holds {volume.shape}; scan again",
        )
    # The catalog has cross-checked header, manifest and positions; the file alone has not.
    known = replace(
        volume,
        spacing_mm=tuple(acquisition.spacing_mm),
        laterality=acquisition.laterality,
        scanner=acquisition.scanner,
        protocol=acquisition.protocol,
        participant=acquisition.participant,
        acquisition=acquisition.sop_instance_uid,
        source=acquisition.uri,
    )
    prepared = preprocessing(known)
    keep = keep_upside_down or "looks_upside_down" in acquisition.flags
    doubts = doubtful_way_up(replace(known, source=where), prepared.confidence["ilm_support"], keep, acquisition.flags)
    if not prepared.confident:  # which says as much
        doubts = tuple(flag for flag in doubts if flag != "way_up_unclear")
    return prepared, fingerprint(volume.voxels), doubts


def meaning_of(code: str) -> str:
    """What a reason code means and what would fix it: no word of it comes from a file."""
    if code in READER_REASONS:
        return f"{READER_REASONS[code].meaning}; {READER_REASONS[code].fix}"
    return REASONS[code] if code in REASONS else FLAGS[code]


def code_of(error: BaseException) -> str:
    """The reason code of a file that could not be prepared."""
    if isinstance(error, ReadError):
        return error.code
    if isinstance(error, MemoryError):
        return "decoder_memory"
    return "unreadable" if isinstance(error, OSError) else "preprocessing_failed"


def _lost(task: _Task, lost: Lost) -> Unprepared:
    return _unprepared(task.acquisition, lost.code, f"{task.acquisition.uri}: the process that read it {lost.what}")


def _deadline(limits: Limits, task: _Task) -> float:
    return limits.deadline(math.prod(task.acquisition.shape), task.location)


def _unprepared(acquisition: "Acquisition", code: str, sentence: str) -> Unprepared:
    if acquisition.uri.startswith(PSEUDONYM):  # sentences quote paths, members of archives, sidecars and values
        sentence = f"{acquisition.uri}: {meaning_of(code)}"
    return Unprepared(acquisition.sop_instance_uid, acquisition.uri, acquisition.scanner, code, sentence)


class _Progress:
    """A bar with the remaining time on a terminal, a plain line now and then elsewhere."""

    def __init__(self, total: int, wanted: bool, seconds_between_lines: float = 10):
        self._total, self._wanted, self._pause = total, wanted and total > 0, seconds_between_lines
        self._done = self._failed = 0
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._start = self._last = time.monotonic()
        if self._wanted and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            remaining = TimeRemainingColumn(compact=True)
            columns = (
                "prepare",
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                "left",
                remaining,
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("prepare", total=self._total, note="")
            self._bar.start()
        return self

    def advance(self, outcome: StoreRow | Unprepared) -> None:
        self._done += 1
        self._failed += isinstance(outcome, Unprepared)
        note = f"{self._failed:,} not prepared" if self._failed else ""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, note=note)
            return
        now = time.monotonic()
        if self._wanted and (now - self._last >= self._pause or self._done == self._total):
            rate = self._done / max(now - self._start, 1e-9)
            left = (self._total - self._done) / rate
            text = f"prepare: {self._done:,} of {self._total:,} volumes, {rate:.2g} volumes/s, {left / 60:.1f} min left"
            print(f"{text}, {note}" if note else text, file=sys.stderr, flush=True)
            self._last = now

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
