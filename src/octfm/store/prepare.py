"""Catalog + Preprocessing -> Store: in parallel, resumable at any moment, never stopped by a bad file."""

import functools
import math
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, get_args

from octfm.catalog.acquisition import FLAGS, PSEUDONYM, Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.duplicates import (
    CONTRADICTS,
    OF_TWO,
    describe_copy,
    described_otherwise,
    filed_otherwise,
    first_filed,
)
from octfm.catalog.participants.ids import may_be_one_person, person_key
from octfm.catalog.participants.pseudonyms import hidden_uid, is_pseudonymous, key_digest
from octfm.display import number
from octfm.errors import BAD_INPUT, BucketError, ReadError, StoreError, reason_of, shown
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.declared import doubtful_way_up
from octfm.formats.reasons import REASONS as READER_REASONS
from octfm.io.bucket import Account
from octfm.io.cores import available_cores
from octfm.io.isolation import Limits, Lost, release
from octfm.io.location import Location, location
from octfm.io.progress import Progress, say
from octfm.io.spread import expect_workers, require_cluster, spread
from octfm.store.exclusion import without_excluded_files
from octfm.store.layout import Compression, StoreRow, Unprepared, read_unprepared
from octfm.store.reuse import open_other, stage_again
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.estimated import FLAG
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.preprocessing import Prepared, Preprocessing
from octfm.volume.tissue import BandFinder
from octfm.volume.volume import Volume

REASONS: dict[str, str] = {
    "changed_since_scan": "the file is not the one that the catalog describes; scan again",
    "no_image": "the image is constant inside the prepared field, or every A-scan has one value throughout: nothing is "
    "left to learn from; look at the scan. Noise without a retina is prepared, with a tissue band of low confidence",
    "preprocessing_failed": "the voxels were read, but could not be brought into the prepared frame; report it with "
    "the sentence",
}
"""Reason codes added to those of the readers: what went wrong after the scan, and what would fix it."""

Read = Callable[[str], Volume]
OF_COPIES = (OF_TWO, CONTRADICTS)
"""Flags of a row whose copies were left out."""


def prepare(
    catalog: Catalog,
    out: str | Location,
    preprocessing: Preprocessing,
    *,
    workers: int | None = None,
    compression: Compression | None = None,
    progress: bool = True,
    read: Read | None = None,
    locations: Mapping[str, str] | None = None,
    key: bytes | None = None,
    limits: Limits | None = None,
    cluster: str | None = None,
    keep_upside_down: bool = False,
    exclude: str | Path | None = None,
    readers: Sequence[Reader] = (),
    find_band: BandFinder | None = None,
    reuse: Store | str | Location | None = None,
) -> Store:
    """Prepare every accepted acquisition that `out` does not hold yet; rows are in catalog order for any `workers`.

    A catalog of single B-scans only is prepared with `preprocessing.of_bscans()`.

    If it is stopped, even by kill -9, the same call continues. Acquisitions that cannot be prepared go to
    unprepared.jsonl with a code and a sentence, and the next call tries them again. Volumes that are in the store are
    not read again, but their rows are updated from the catalog (split, labels, scanner).

    workers: child processes, None for one per core; 0 works in this process, which a crashing decoder takes down.
    compression: of a new store; by default "none" on a local disk and "zstd" in a bucket.
    read: turns a uri into a Volume, by default `read_volume`; it is pickled and sent to the workers.
    locations: uri -> file, if uris are pseudonyms (octfm.catalog.participants.pseudonyms.locate). key: that of the
        pseudonyms, which a store keeps for all its catalogs; without it, another key is not noticed, and without it or
        with a cluster neither is a file that has been replaced by another since the scan.
    limits: seconds and memory per file; files that need more are quarantined, like files that crash their decoder.
    keep_upside_down: prepare volumes that look upside down as they are, with a flag, instead of quarantining them.
    cluster: a dask scheduler (tcp://host:port), all of whose workers must see files and store at the same paths.
    exclude: a file naming volumes not to prepare (octfm.store.exclusion); those already in the store stay.
    readers: the custom readers that the catalog was scanned with.
    find_band: the network of a learned band (octfm.layers.band.LearnedBand), pickled and sent to the workers.
    reuse: another store with the same settings. Volumes that the catalog describes as they were prepared there are
        taken over, without a second copy if both stores are on one disk; only the others are prepared from their files.
    Raises ConfigError if `find_band` is not what `preprocessing` names; StoreError if `out` was prepared with other
    settings, is being written by another process or cannot be written any more, if `reuse` has nothing to take over,
    and if nothing at all could be prepared; OSError if `out` cannot be made or locked.
    """
    if not isinstance(catalog, Catalog):
        raise TypeError(f"catalog: expected a Catalog, got {type(catalog).__name__}; octfm.Catalog.load opens one")
    if not isinstance(preprocessing, Preprocessing):
        kind = type(preprocessing).__name__
        raise TypeError(f"preprocessing: expected octfm.Preprocessing(…), got {kind}; an encoder has its own")
    if catalog.acquisitions and all(a.layout == "line" for a in catalog.acquisitions):
        preprocessing = preprocessing.of_bscans()
    preprocessing.expect_finder(find_band)
    out = location(out)
    account = Account(out, catalog.root)
    _expect_files(catalog, out, named=locations is not None or read is not None)
    expect_workers(workers)
    if compression not in (None, *get_args(Compression)):
        raise StoreError(f"compression: expected {' or '.join(get_args(Compression))}, got {shown(compression)}")
    limits = with_finder(limits or Limits(), find_band)
    if cluster is not None:
        require_cluster(cluster)  # fails before anything is written
    included = without_excluded_files(catalog.acquisitions, exclude, str(catalog.root))
    other = open_other(reuse, out, preprocessing) if reuse is not None else None
    reusable = {} if other is None else _reusable(other, included, keep_upside_down)
    key_hash = key_digest(key) if key is not None and is_pseudonymous(catalog) else None
    with _writer(out, preprocessing, compression, key_hash) as writer:
        _expect_same_names(out, writer, is_pseudonymous(catalog))
        _follow_catalog(writer, catalog.acquisitions)
        tasks = _missing(writer, included, locations or {})
        if other is not None and tasks and progress:
            taken = sum(task.acquisition.sop_instance_uid in reusable for task in tasks)
            of = f"{taken:,} of {number(len(tasks), 'volume')}"
            say(f"{of} taken over from {other.path}, unless damaged or doubtful there")
        outdated = {a.sop_instance_uid for a in catalog.acquisitions}
        writer.keep_unprepared(lambda u: u.acquisition not in outdated)
        run = functools.partial(
            _prepare_one,
            preprocessing=preprocessing,
            read=read,
            readers=readers,
            staging=writer.staging,
            compression=writer.compression,
            crc=writer.crc,
            keep_upside_down=keep_upside_down,
            find_band=find_band,
            key=None if cluster else key,  # which would cross the network, perhaps unencrypted
        )

        def anew(tasks: Sequence[_Task]) -> Iterator[StoreRow | Unprepared]:
            # `spread` yields outcomes in the order of tasks, so rows do not depend on the number of workers.
            outcomes = spread(
                account.counting(run),
                tasks,
                _lost,
                workers=workers,
                limits=limits,
                deadline=_deadline,
                chunk=1,
                cluster=cluster,
            )
            return account.counted(outcomes)

        try:
            with Progress("prepare", len(tasks), failure="not prepared", enabled=progress, always=True) as display:
                if other is None:
                    outcomes = anew(tasks)
                else:
                    outcomes = _with_reused(tasks, other, reusable, writer, anew, workers or available_cores())
                for prepared in _write(outcomes, tasks, writer):
                    display.advance(1, not prepared)
        except OSError as error:
            raise StoreError(
                f"{out}: writing failed ({error}); what was written stays valid, so fix the cause and run the same "
                "command again"
            ) from error
    # Training may follow in this process and can use the memory of the workers.
    release(keep=1)
    store = Store.open(out)
    _expect_volumes(store, out, len(tasks), keyed=key_hash is not None)
    if progress:
        for line in describe(store.summary()):
            say(line)
    if spent := account.close():
        store.requests = spent
        if progress:
            say(f"  bucket: {', '.join(f'{name} {count:,}' for name, count in spent.items())}")
    return store


def _expect_files(catalog: Catalog, out: Location, *, named: bool) -> None:
    """Raises StoreError for a catalog without acquisitions, or with pseudonyms whose files are not `named`."""
    if not catalog.acquisitions:
        raise StoreError(
            f"{catalog.root}: the catalog has no accepted acquisition, so nothing can be prepared; see its rejects"
        )
    if not named and is_pseudonymous(catalog):
        raise StoreError(
            f"{out}: the catalog names files by pseudonyms; give its key and root "
            "(octfm prepare --key FILE --root FOLDER)"
        )


def _expect_volumes(store: Store, out: Location, tried: int, *, keyed: bool) -> None:
    """Raises StoreError with the most frequent reason if the store holds no volume. `keyed`: whether the key of
    pseudonyms was given."""
    if len(store):
        return
    code, count = Counter(u.code for u in store.unprepared()).most_common(1)[0]
    first = next(u for u in store.unprepared() if u.code == code)
    other = "; or the key is not that of the catalog's pseudonyms" if keyed and code == "changed_since_scan" else ""
    raise StoreError(
        f"{out}: none of {tried} volumes could be prepared, {count} with {code}, for example: {first.sentence}{other}; "
        f"see {out / 'unprepared.jsonl'}"
    )


def _expect_same_names(out: Location, writer: StoreWriter, pseudonymous: bool) -> None:
    """Raises StoreError if only one of store and catalog has pseudonyms: names would stay in a store that seems free of
    them, and one person would count as two."""
    uris = (each.uri for each in (*writer.rows, *read_unprepared(out)))
    if any(uri.startswith(PSEUDONYM) != pseudonymous for uri in uris):
        has, wants = ("names and paths", "pseudonyms") if pseudonymous else ("pseudonyms", "names and paths")
        raise StoreError(f"{out}: the store has {has}, the catalog {wants}; choose another --out")


def with_finder(limits: Limits, find_band: BandFinder | None) -> Limits:
    """`limits` with the memory and the time that a learned band takes in addition."""
    if find_band is None:
        return limits
    return replace(
        limits,
        memory=limits.memory + find_band.memory,
        seconds_per_megabyte=limits.seconds_per_megabyte + find_band.seconds_per_megabyte,
    )


def _write(outcomes: Iterator[StoreRow | Unprepared], tasks: Sequence["_Task"], writer: StoreWriter) -> Iterator[bool]:
    """Write the outcome of every task, and yield whether its volume is now in the store."""
    # Start from the voxels already in the store, so that copies are found across calls as well.
    known: dict[str, StoreRow] = {}
    for row in writer.rows:
        first_filed(known, row.pixels, row)
    doubts: dict[str, set[str]] = {}
    for task, outcome in zip(tasks, outcomes, strict=True):
        outcome = _unless_copy(outcome, task, known, writer, doubts)
        if isinstance(outcome, Unprepared):
            writer.quarantine(outcome)
        elif task.index is None:
            writer.append(outcome, task.name)
        else:
            writer.put_back(outcome, task.name)
        yield isinstance(outcome, StoreRow)
    # All at once, since each change writes every row. After a kill the next call tries copies again, and gets here.
    flagged = [
        replace(row, found=(*(flag for flag in row.found if flag not in OF_COPIES), *sorted(doubts[row.uri])))
        if row.uri in doubts
        else row
        for row in writer.rows
    ]
    if flagged != writer.rows:
        writer.rewrite(flagged)


def _unless_copy(
    outcome: StoreRow | Unprepared,
    task: "_Task",
    known: dict[str, StoreRow],
    writer: StoreWriter,
    doubts: dict[str, set[str]],
) -> StoreRow | Unprepared:
    """`outcome`, or an Unprepared if the store already holds the same voxels.

    `doubts` gets the flags of the row that is there, by its uri: that the copy is another participant's, or contradicts
    it; none if they agree by now. The row keeps them if it is repaired. Its eye stays that of the catalog, since its
    voxels were mirrored by it.
    """
    if isinstance(outcome, Unprepared):
        return outcome
    if task.index is not None:
        before = writer.rows[task.index]
        kept = [flag for flag in before.found if flag in OF_COPIES and before.pixels == outcome.pixels]
        return replace(outcome, found=(*outcome.found, *kept))
    first = first_filed(known, outcome.pixels, outcome)
    if first is None:
        return outcome
    differences = [*filed_otherwise(outcome, first).values()]
    if outcome.layout == first.layout == "raster":  # of other patterns a row has the millimetres of the raster made
        millimetres = (row.transform["native_spacing_mm"] for row in (outcome, first))
        differences += described_otherwise(outcome, first, *millimetres)
    code, sentence = describe_copy(outcome, first, differences)
    found = [*[OF_TWO] * (code == OF_TWO), *[CONTRADICTS] * bool(differences)]
    doubts.setdefault(first.uri, set()).update(found)
    return _unprepared(task.acquisition, code, sentence)


def _writer(
    out: Location, preprocessing: Preprocessing, compression: Compression | None, key_hash: str | None
) -> StoreWriter:
    if isinstance(out, Path):
        return StoreWriter(out, preprocessing, compression, key_hash)
    from octfm.store.bucket import BucketStoreWriter

    return BucketStoreWriter(out, preprocessing, compression, key_hash)


def describe(summary: dict[str, Any]) -> list[str]:
    """`Store.summary()` as lines of text."""
    lines = [f"{number(summary['volumes'], 'volume')} of {number(summary['participants'], 'participant')} prepared"]
    for title, key in (("scanner", "by_scanner"), ("group", "by_diagnosis")):
        for name, counts in summary[key].items():
            low = f"{counts['low_confidence']:,} ({counts['low_confidence'] / counts['volumes']:.0%})"
            lines.append(
                f"  {title} {name}: {number(counts['volumes'], 'volume')}, tissue band of low confidence in {low}"
            )
    lines += [f"  {count:,} {flag}: {FLAGS[flag]}" for flag, count in summary["found"].items()]
    lines += [f"  not prepared, {code}: {count:,}" for code, count in summary["unprepared"].items()]
    return lines


@dataclass(frozen=True)
class _Task:
    acquisition: Acquisition
    location: str
    """Address of the file: the acquisition's uri, unless that is a pseudonym."""
    index: int | None
    """The row whose shards are lost; None for a new volume."""
    name: str
    """Name of its files in the staging folder."""


def _missing(writer: StoreWriter, acquisitions: Sequence[Acquisition], locations: Mapping[str, str]) -> list[_Task]:
    """A task for each acquisition that is not in the store, or whose shards are lost."""
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


def _follow_catalog(writer: StoreWriter, acquisitions: Sequence[Acquisition]) -> None:
    """Update rows from the catalog: a new scan may move participants to other splits, and stale rows leak (F16)."""
    known = {acquisition.sop_instance_uid: acquisition for acquisition in acquisitions}
    gone = {row.participant for row in writer.rows if row.acquisition not in known}
    split_of = _splits_of(gone, acquisitions) if gone else {}
    rows = []
    for row in writer.rows:
        acquisition = known.get(row.acquisition)
        if acquisition is not None:
            if differs := _difference(row, acquisition):
                raise StoreError(
                    f"{writer.named}: {row.uri} {differs}; prepare into a new folder, with --reuse "
                    f"{shlex.quote(str(writer.named))} for what has not changed"
                )
            row = replace(row, **fields_of(acquisition))
        else:
            # A scan that was deleted, replaced or is in another catalog: its participant may have others in this one.
            row = replace(row, split=split_of.get(row.participant, row.split))
        rows.append(row)
    if rows != writer.rows:
        writer.rewrite(rows)


def _splits_of(participants: Collection[str], acquisitions: Sequence[Acquisition]) -> dict[str, str | None]:
    """Participant → split in the catalog of this person, or else of one that may be the same, as a scan places both."""
    split_of = {a.participant: a.split for a in acquisitions}
    of_person = {person_key(participant): split for participant, split in split_of.items()}
    found = {}
    for pair in may_be_one_person({*participants, *split_of}):
        found |= {one: split_of[other] for one, other in (pair, pair[::-1]) if other in split_of}
    return found | {own: of_person[key] for own in participants if (key := person_key(own)) in of_person}


def _difference(row: StoreRow, acquisition: Acquisition) -> str:
    """How the voxels of a row were prepared, if the catalog now says otherwise, as after a sidecar was corrected; empty
    if they agree in eye, axes, modality, scan pattern, millimetres and way up."""
    stated: dict[str, tuple[Any, Any]] = {
        "laterality": (row.laterality, acquisition.laterality),
        "modality": (row.modality, acquisition.modality),
        "layout": (row.layout, acquisition.layout),
    }
    if row.layout == "raster":
        stated["shape"] = (list(row.transform["native_shape"]), list(acquisition.shape))
    for name, (before, now) in stated.items():
        if before != now:
            return f"was prepared with {name} {before}, but the catalog now says {now}"
    # Of anything but a raster, only rows of the image keep their millimetres; estimated ones follow the whole cohort.
    axes = slice(None) if row.layout == "raster" else slice(1, 2)
    before, now = (tuple(mm)[axes] for mm in (row.transform["native_spacing_mm"], acquisition.spacing_mm))
    estimated = FLAG in acquisition.flags and FLAG in row.flags
    if not estimated and not all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(before, now, strict=True)):
        return f"was prepared with millimetres {list(before)}, but the catalog now says {list(now)}"
    upside_down = "declared_upside_down"
    return "was prepared the other way up" if (upside_down in row.flags) != (upside_down in acquisition.flags) else ""


def _reusable(other: Store, acquisitions: Sequence[Acquisition], keep_upside_down: bool) -> dict[str, StoreRow]:
    """Acquisition → its row in another store, if the catalog describes it as it was prepared, and it would be prepared
    now. Raises StoreError if there is none."""
    known = {a.sop_instance_uid: a for a in acquisitions}
    rows = [row for row in other.rows if (own := known.get(row.acquisition)) and not _difference(row, own)]
    if not rows:
        raise StoreError(
            f"{other.path}: holds none of the scans of this catalog as it describes them now, so nothing can be "
            "reused; name the store that has them, or leave out --reuse"
        )
    # Quarantined today, unless this call or the scan (its --keep-upside-down) keeps such volumes.
    upside_down = "looks_upside_down"
    return {
        row.acquisition: row
        for row in rows
        if keep_upside_down or upside_down not in row.found or upside_down in known[row.acquisition].flags
    }


def _with_reused(
    tasks: Sequence["_Task"],
    other: Store,
    reusable: Mapping[str, StoreRow],
    writer: StoreWriter,
    anew: Callable[[Sequence["_Task"]], Iterator[StoreRow | Unprepared]],
    at_once: int,
) -> Iterator[StoreRow | Unprepared]:
    """The outcome of every task in turn: a reusable volume staged again, `at_once` of them since in a bucket staged
    volumes wait on the local disk, or what `anew` prepares from the file."""

    def reused(task: _Task) -> StoreRow | Unprepared:
        row = reusable[task.acquisition.sop_instance_uid]
        try:
            stage_again(other, row, task.acquisition.flags, writer, task.name)
        except StoreError:  # damaged or doubtful
            [outcome] = anew([task])
            return outcome
        found = tuple(flag for flag in row.found if flag not in OF_COPIES)  # found again, if its copy is still there
        index = -1 if task.index is None else task.index
        return replace(row, index=index, found=found, **fields_of(task.acquisition))

    mine = [task for task in tasks if task.acquisition.sop_instance_uid in reusable]
    outcomes = anew([task for task in tasks if task.acquisition.sop_instance_uid not in reusable])
    other.read([])  # opens the files, once for all threads
    with ThreadPoolExecutor(at_once) as pool:
        ready = chain.from_iterable(pool.map(reused, mine[i : i + at_once]) for i in range(0, len(mine), at_once))
        for task in tasks:
            yield next(ready if task.acquisition.sop_instance_uid in reusable else outcomes)


def fields_of(acquisition: Acquisition) -> dict[str, Any]:
    """The fields of a StoreRow that are copied from the catalog."""
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
        "modality": acquisition.modality,
    }


# ---- in a worker ----------------------------------------------------------------------------------------------------


def _prepare_one(
    task: _Task,
    *,
    preprocessing: Preprocessing,
    read: Read | None,
    readers: Sequence[Reader],
    staging: Path,
    compression: Compression,
    crc: bool,
    keep_upside_down: bool,
    find_band: BandFinder | None,
    key: bytes | None,
) -> StoreRow | Unprepared:
    acquisition = task.acquisition
    try:
        prepared, pixels, doubts = prepare_acquisition(
            acquisition,
            task.location,
            preprocessing,
            read,
            keep_upside_down=keep_upside_down,
            readers=readers,
            find_band=find_band,
            key=key,
        )
    except BucketError:
        raise  # an unreachable bucket says nothing about the file
    except BAD_INPUT as error:
        return _unprepared(acquisition, code_of(error), reason_of(error).replace(task.location, acquisition.uri))
    digest = stage(prepared, staging, task.name, compression, crc)
    row = row_of(acquisition, prepared, digest, pixels, doubts)
    return row if task.index is None else replace(row, index=task.index)


def row_of(
    acquisition: Acquisition, prepared: Prepared, digest: str, pixels: str = "", doubts: tuple[str, ...] = ()
) -> StoreRow:
    """The row of a volume that has no index yet. `doubts`: flags raised by its voxels."""
    # Left eyes are mirrored to look like right ones, so the optic disc belongs on the right in every prepared volume.
    structure = acquisition.modality == "structure"
    if structure and acquisition.laterality and prepared.disc == "left":
        doubts = (*doubts, "laterality_contradicts_anatomy")
    return StoreRow(
        index=-1,
        confident=bool(prepared.confident),
        confidence=dict(prepared.confidence),
        transform=prepared.transform.to_dict(),
        checksum=digest,
        pixels=pixels,
        found=doubts,
        **fields_of(acquisition),
    )


def prepare_acquisition(
    acquisition: Acquisition,
    where: str,
    preprocessing: Preprocessing,
    read: Read | None = None,
    *,
    keep_upside_down: bool = False,
    readers: Sequence[Reader] = (),
    find_band: BandFinder | None = None,
    key: bytes | None = None,
) -> tuple[Prepared, str, tuple[str, ...]]:
    """Read and prepare the file at `where`. key: that of the acquisition's pseudonyms.

    Returns the prepared volume, a fingerprint of the native voxels, and flags for whatever is doubtful about them.
    Raises one of BAD_INPUT; `code_of` gives its reason code.
    """
    hidden = acquisition.uri.startswith(PSEUDONYM)
    without_uid = read is not None or (hidden and key is None)
    if read is None:
        read = functools.partial(
            read_volume,
            spacing_mm=acquisition.spacing_mm,
            raster_only=acquisition.layout == "raster",
            structure_only=acquisition.modality == "structure",
            readers=readers,
        )
    volume = read(where)
    if hidden and key is not None:
        volume = replace(volume, acquisition=hidden_uid(volume.acquisition, key))
    known = acquisition.apply_to(volume, same_uid=not without_uid)
    prepared = preprocessing(known, find_band)
    if known.modality != "structure":
        return prepared, fingerprint(volume.voxels), ()  # flow has no border to the vitreous that shows the way up
    keep = keep_upside_down or "looks_upside_down" in acquisition.flags
    doubts = doubtful_way_up(replace(known, source=where), prepared.confidence["ilm_support"], keep, acquisition.flags)
    if not prepared.confident:  # no need to flag both: without a confident tissue band the way up is never clear
        doubts = tuple(flag for flag in doubts if flag != "way_up_unclear")
    return prepared, fingerprint(volume.voxels), doubts


def meaning_of(code: str) -> str:
    """What a reason code means and what would fix it; contains nothing from the file, so it is safe to publish."""
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


def _unprepared(acquisition: Acquisition, code: str, sentence: str) -> Unprepared:
    # Error messages quote paths, archive members and header values, which a pseudonymous store must not contain.
    if acquisition.uri.startswith(PSEUDONYM):
        sentence = f"{acquisition.uri}: {meaning_of(code)}"
    return Unprepared(acquisition.sop_instance_uid, acquisition.uri, acquisition.scanner, code, sentence)
