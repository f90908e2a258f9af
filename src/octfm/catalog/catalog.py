"""Catalog: one row per accepted acquisition, one reject with a reason per other file, and nothing in between."""

import functools
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.aireadi import Tables, read_own_tables, read_tables
from octfm.catalog.columns import Columns, TableError
from octfm.catalog.dicom_directory import left_behind
from octfm.catalog.duplicates import without_duplicates
from octfm.catalog.examination import deadline_of, examine_file, lost_file
from octfm.catalog.inspection import verdicts
from octfm.catalog.participants.people import Pattern, Scan, find_people
from octfm.catalog.participants.splits import SPLITS, Split, assign, parse_split
from octfm.catalog.parts import join_parts
from octfm.catalog.walk import Found, walk
from octfm.errors import OctfmError
from octfm.formats.reasons import REASONS, Header
from octfm.io.archive import MEMBER, unpack
from octfm.io.bucket import Account
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits
from octfm.io.location import BucketPath, Location, listed, location, write_whole
from octfm.io.ranged import recall
from octfm.io.spread import spread
from octfm.volume.pixel_copies import Owner, describe_copy
from octfm.volume.volume import ADMISSIBLE, RASTER_ONLY, Layout, Spacing3

if TYPE_CHECKING:
    from octfm.formats.bscans import Reader

FORMAT, VERSION = "octfm-catalog", 3
_ADDED = ("layout", "participant_source")
"""Columns that older catalogs of this version lack."""


class CatalogError(OctfmError):
    """A root without a usable scan, or a catalog that is missing, damaged, of another version, or leaks participants."""


class NothingAccepted(CatalogError):
    """Files, and not one acceptable. `catalog` has the rejects, so that they can be saved and looked at."""

    def __init__(self, message: str, catalog: "Catalog"):
        super().__init__(message)
        self.catalog = catalog


@dataclass(frozen=True)
class Catalog:
    root: str
    acquisitions: tuple[Acquisition, ...]
    rejects: tuple[Reject, ...]
    companions: int = 0
    """Tables, documents and ground truth beside the images, and all but the first of the files that one volume is spread over."""
    skipped: tuple[Reject, ...] = ()
    """Recognised and left out on purpose (angiography, photographs, radial scans, ...): counted, no errors."""
    requests: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of a scan in a bucket: what it cost, and how many requests had to be sent again."""
    pixels: bool = False
    """The scan has looked at pixels (octfm.catalog.inspection), so a row without a flag of the optic disc agrees with its eye."""

    def save(self, folder: str | Path | BucketPath) -> Location:
        """Write catalog.parquet and rejects.parquet. Each appears complete or not at all, and a mixed pair is refused by `load`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = location(folder)
        facts = {
            "format": FORMAT,
            "version": VERSION,
            "root": self.root,
            "companions": self.companions,
            "key": self._key(),
        }
        facts |= {"requests": dict(self.requests), "pixels": self.pixels}
        staged = []
        for name, table in (("catalog.parquet", self._rows()), ("rejects.parquet", self._left_out())):
            schema = _schema(name).with_metadata({"octfm": json.dumps(facts)})
            content = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(table, schema), content, compression="zstd")
            staged.append((folder / name, content.getvalue()))
        for file, content in staged:
            write_whole(file, content)
        return folder

    @staticmethod
    def load(folder: str | Path | BucketPath) -> "Catalog":
        """Raises CatalogError where the pair is missing, damaged, of another version or from two different scans."""
        folder = location(folder)
        rows, facts = _read_parquet(folder / "catalog.parquet")
        left_out, other = _read_parquet(folder / "rejects.parquet")
        rejects = [Reject(row["uri"], row["code"], row["sentence"], row["bytes"], row["refers_to"]) for row in left_out]
        catalog = Catalog(
            root=facts["root"],
            acquisitions=tuple(_acquisition(row) for row in rows),
            rejects=tuple(reject for reject in rejects if not reject.expected),
            companions=facts["companions"],
            skipped=tuple(reject for reject in rejects if reject.expected),
            requests=facts.get("requests", {}),
            pixels=facts.get("pixels", False),
        )
        if not facts["key"] == other["key"] == catalog._key():
            raise CatalogError(
                f"{folder}: catalog.parquet and rejects.parquet are not from one scan, or were edited; scan again"
            )
        return catalog

    def layer_heights(self, acquisition: Acquisition) -> tuple[str, ...]:
        """uris of the height maps that refer to this volume; octfm.formats.dicom.surfaces reads them."""
        return tuple(found.uri for found in self.skipped if found.refers_to == acquisition.sop_instance_uid)

    @property
    def reject_share(self) -> float:
        """Rejected over rejected and accepted; what is skipped on purpose counts on neither side."""
        return len(self.rejects) / max(len(self.rejects) + len(self.acquisitions), 1)

    def expect_few_rejects(self, most: float, advice: str = "see its rejects") -> None:
        """Raises CatalogError where a larger share than `most` is rejected: a pipeline stops before it trains on what is left."""
        if self.reject_share > most:
            codes = ", ".join(f"{n} {code}" for code, n in _count(reject.code for reject in self.rejects).items())
            total = len(self.rejects) + len(self.acquisitions)
            raise CatalogError(
                f"{self.root}: {len(self.rejects)} of {total} files are rejected ({self.reject_share:.1%}), expected at most {most:.1%}: "
                f"{codes}; {advice}"
            )

    def summary(self) -> dict[str, Any]:
        """Counts that a report or a terminal shows; rejects most frequent first, splits in participants. `disc_sides`, by scanner, only
        where the scan has looked at pixels."""
        participants = {a.participant: a.split for a in self.acquisitions}
        measured: dict[str, Any] = {"bucket": dict(self.requests)} if self.requests else {}
        measured |= {"disc_sides": verdicts(self.acquisitions)} if self.pixels else {}
        return measured | {
            "accepted": len(self.acquisitions),
            "rejected": len(self.rejects),
            "skipped": len(self.skipped),
            "companions": self.companions,
            "participants": len(participants),
            "eyes": len({a.eye_id for a in self.acquisitions if a.laterality}),
            "scanners": _count(a.scanner for a in self.acquisitions),
            "protocols": _count(a.protocol for a in self.acquisitions),
            "layouts": _count(a.layout for a in self.acquisitions),
            "participants_found_by": _count(a.participant_source or "unknown" for a in self.acquisitions),
            "lateralities": _count(a.laterality or "unknown" for a in self.acquisitions),
            "participants_per_split": {split: n for split in SPLITS if (n := list(participants.values()).count(split))},
            "rejects": _count(reject.code for reject in self.rejects),
            "skips": _count(reject.code for reject in self.skipped),
            "flags": _count(flag for a in self.acquisitions for flag in a.flags),
        }

    def _rows(self) -> list[dict[str, Any]]:
        return [
            asdict(a) | {"participant_labels": json.dumps(a.participant_labels, sort_keys=True), "flags": list(a.flags)}
            for a in self.acquisitions
        ]

    def _left_out(self) -> list[dict[str, Any]]:
        """One row per file that is not in the catalog, with what would put it there."""
        return [
            asdict(reject) | {"fix": reject.fix, "skipped": reject.expected}
            for reject in (*self.rejects, *self.skipped)
        ]

    def _key(self) -> str:
        # Catalogs of before there were layouts, and of before it was kept how participants were found, keep their key.
        added = {("layout", "raster"), ("participant_source", "")}
        rows = [
            {name: value for name, value in row.items() if name not in _ADDED or (name, value) not in added}
            for row in self._rows()
        ]
        content = json.dumps([self.root, self.companions, rows, self._left_out()], default=list)
        return hash_text(content)[:16]


def scan(
    root: str | Path | BucketPath,
    *,
    seed: int = 0,
    table: str | Path | BucketPath | None = None,
    participants: str | Path | BucketPath | None = None,
    columns: Mapping[str, str] | None = None,
    participant_from: str | Sequence[str] = (),
    extract: str | Path | None = None,
    nominal_spacing_mm: Spacing3 | None = None,
    layouts: Collection[Layout] = RASTER_ONLY,
    pixels: bool = False,
    keep_upside_down: bool = False,
    follow_links: bool = True,
    workers: int | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
    readers: "Sequence[Reader]" = (),
) -> Catalog:
    """Look at every file below `root` (AI-READI layout or any tree), without decoding unless `pixels`, and assign participant-level splits.

    `root` is a folder, s3://bucket/prefix or gs://bucket/prefix; a bucket is listed once, and headers are read by ranges.
    AI-READI's tables below `root` are joined. `table` (one row per file) and `participants` (one per person) are CSV or TSV of your own
    that take their place, with `columns` from octfm.catalog.columns.FIELDS to theirs, for example {"participant": "pid", "file": "path"}.
    `participant_from`: where folders and names hold the participant of files that neither header nor table names, as a path below `root`
    such as "{participant}/{eye}/*"; of several patterns the first that fits counts. Without one a guess is made, or the scan stops.
    What a DICOMDIR lists and is not there is a reject; the path of a DICOMDIR stands for its folder.
    `nominal_spacing_mm` (dz, dy, dx) is taken, and flagged, where neither file, sidecar nor table states millimetres.
    `layouts`: ("raster", "radial") also takes stars, as rows of their own layout; what is neither is never a volume.
    ZIP archives are read in place; with `extract`, a folder outside `root`, they are unpacked there first and the rows name the files.
    `follow_links`: also files and folders that symbolic links below `root` lead to, wherever they lie; False leaves them out, with a code.
    `pixels`: decode every accepted volume, too, and find copies under other identities, eyes whose optic disc lies on the wrong side, and
    scans that are upside down, which are rejects unless `keep_upside_down`.
    Files are looked at in child processes (`workers`, default one per core; 0: in this one), which `limits` bounds in time and memory:
    a file that ends its process is a reject. The result does not depend on `workers`. `progress(done, total)` counts files.
    `readers`: readers of formats of your own, as objects (octfm.formats.bscans.Reader); the first that fits a file is taken.
    Raises CatalogError for a root that is missing or has no acceptable file, TableError for tables that contradict themselves, lack a
    column or fit none of the files, AmbiguousPeople where folders leave it open whose eyes are shown.
    """
    patterns = [
        Pattern.parse(text) for text in ([participant_from] if isinstance(participant_from, str) else participant_from)
    ]
    if "raster" not in layouts or any(name not in ADMISSIBLE for name in layouts):
        raise CatalogError(f"layouts: expected raster, or raster and radial, got {', '.join(layouts) or 'none'}")
    folder = _existing(root)
    account = Account(folder)
    found = walk(folder, follow_links=follow_links)
    if not found.files and not found.refused:
        others = f"{len(found.companions)} other files" if found.companions else "it is empty"
        raise CatalogError(
            f"{folder}: no image files below it ({others}); point at the folder that holds the DICOM files"
        )
    tables = _tables(folder, found, table, participants, columns)
    found.refused += left_behind([path for path in found.companions if path.name.lower() == "dicomdir"], found.files)
    if extract is not None:
        found.files = _unpacked(found, folder, Path(os.path.abspath(extract)), tables)  # noqa: PTH100
    limits = limits or Limits()
    deadline = functools.partial(deadline_of, limits)
    look = account.counting(
        functools.partial(examine_file, layouts=tuple(layouts), follow_links=follow_links, readers=readers)
    )
    examined = spread(
        look, found.files, lost_file, workers=workers, limits=limits, deadline=deadline, progress=progress
    )
    outcomes, others = join_parts(
        [outcome for file in account.counted(examined) for outcome in file], workers, limits, layouts
    )
    headers, duplicates = without_duplicates(
        [outcome for outcome in outcomes if isinstance(outcome, Header)], tables, workers, limits, readers
    )
    from octfm.catalog.agreement import accept, with_person  # pydicom stays out of whoever only loads a catalog

    outcomes = [accept(header, tables, nominal_spacing_mm) for header in headers] + [
        o for o in outcomes if isinstance(o, Reject)
    ]
    copied = {copy.uri: accept(copy, tables, nominal_spacing_mm) for copy, reject in duplicates}
    read = [outcome for outcome in [*outcomes, *copied.values()] if isinstance(outcome, Acquisition)]
    for path in found.files:
        recall(path)  # a long scan outlasts the trust in its listing, and every place would cost a request
    scans = [Scan(a.uri, a.participant, a.laterality is None) for a in read]
    whose = find_people(scans, folder, patterns, tables.unpacked_from)
    acquisitions = [with_person(outcome, whose, tables) for outcome in outcomes if isinstance(outcome, Acquisition)]
    left_out = [*found.refused, *(outcome for outcome in outcomes if isinstance(outcome, Reject))]
    copies = [with_person(copy, whose, tables) for copy in copied.values() if isinstance(copy, Acquisition)]
    acquisitions, duplicates, pairs = _under_two_ids(acquisitions, copies, [reject for _, reject in duplicates])
    left_out += duplicates
    if pixels:
        from octfm.catalog.inspection import inspect_pixels

        acquisitions, of_pixels, more = inspect_pixels(acquisitions, workers, limits, keep_upside_down, readers)
        left_out += of_pixels
        pairs += more
    left_out.sort(key=lambda reject: reject.uri)
    catalog = Catalog(
        root=str(folder),
        acquisitions=assign_splits(acquisitions, seed=seed, one_person=pairs) if acquisitions else (),
        rejects=tuple(reject for reject in left_out if not reject.expected),
        companions=len(found.companions) + others - sum(reject.code == "not_a_bscan" for reject in left_out),
        skipped=tuple(reject for reject in left_out if reject.expected),
        requests=account.close(),
        pixels=pixels,
    )
    if not acquisitions:
        reasons = [(n, code, REASONS[code]) for code, n in _count(reject.code for reject in left_out).items()]
        counts = ", ".join(f"{n} {code} ({reason.meaning}; {reason.fix})" for n, code, reason in reasons)
        raise NothingAccepted(f"{folder}: none of {len(left_out)} files is an acceptable OCT volume: {counts}", catalog)
    _expect_a_match(acquisitions, catalog.rejects, tables, participants)
    return catalog


def assign_splits(
    acquisitions: Sequence[Acquisition],
    diagnosis: Mapping[str, str] | None = None,
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    one_person: Iterable[tuple[str, str]] = (),
) -> tuple[Acquisition, ...]:
    """The acquisitions with their split: recommended_split where participants.tsv has one, else stratified by participant.

    `diagnosis` by participant; by default the column diagnosis, else study_group. `one_person`: pairs of participants that may be one
    person, because the same voxels are there under both ids. They get one split, and where tables recommend several, the one that is
    trained on: nobody is then tested who was seen.
    """
    same = _leaders(one_person)
    recommended: dict[str, Split] = {}
    scanners: dict[str, set[str]] = {}
    eyes: dict[str, set[str]] = {}
    for a in acquisitions:
        person = same.get(a.participant, a.participant)
        scanners.setdefault(person, set()).add(a.scanner)
        eyes.setdefault(person, set()).add(a.eye_id)
        if split := parse_split(a.participant_labels.get("recommended_split", "")):
            recommended[person] = min(split, recommended.get(person, split), key=SPLITS.index)
    if diagnosis is None:
        labels = {a.participant: a.participant_labels for a in acquisitions}
        diagnosis = {p: columns.get("diagnosis") or columns.get("study_group", "") for p, columns in labels.items()}
    strata = {p: (sorted(scanners[p]), diagnosis.get(p, ""), len(eyes[p])) for p in scanners}
    splits = assign(strata, recommended, fractions, seed)
    placed = []
    for a in acquisitions:
        flags = (
            (*a.flags, "split_with_another_id")
            if a.participant in same and "split_with_another_id" not in a.flags
            else a.flags
        )
        placed.append(replace(a, split=splits[same.get(a.participant, a.participant)], flags=flags))
    assert_participant_level(placed)
    return tuple(placed)


def _leaders(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Everyone in a pair, with the first by name of all that they are linked to."""
    groups: dict[str, set[str]] = {}
    for a, b in pairs:
        joined = groups.get(a, {a}) | groups.get(b, {b})
        groups |= dict.fromkeys(joined, joined)
    return {participant: min(group) for participant, group in groups.items()}


def _under_two_ids(
    acquisitions: Sequence[Acquisition], copies: Sequence[Acquisition], rejects: Sequence[Reject]
) -> tuple[list[Acquisition], list[Reject], list[tuple[str, str]]]:
    """Images that are there as two participants' are named as that, not as a copy that may be removed; and the pairs of participants."""
    kept = {a.sop_instance_uid: a for a in acquisitions}
    owners = {copy.uri: Owner(copy.uri, copy.participant, copy.laterality) for copy in copies}
    uid_of = {copy.uri: copy.sop_instance_uid for copy in copies}
    out, shared, pairs = [], set(), []
    for reject in rejects:
        first = kept.get(uid_of.get(reject.uri, ""))
        owner = owners.get(reject.uri)
        if (
            first is not None
            and owner is not None
            and reject.code == "duplicate_sop_uid"
            and owner.participant != first.participant
        ):
            code, sentence = describe_copy(owner, Owner(first.uri, first.participant, first.laterality))
            reject = replace(reject, code=code, sentence=sentence, refers_to=first.sop_instance_uid)
            shared.add(first.uri)
            pairs.append((owner.participant, first.participant))
        out.append(reject)
    marked = [
        replace(a, flags=(*a.flags, "pixels_of_two_participants")) if a.uri in shared else a for a in acquisitions
    ]
    return marked, out, pairs


def assert_participant_level(acquisitions: Iterable[Acquisition]) -> None:
    """Raises CatalogError if anyone is in two splits: their second eye would be known before the test."""
    splits: dict[str, Split | None] = {}
    for a in acquisitions:
        if splits.setdefault(a.participant, a.split) != a.split:
            raise CatalogError(
                f"{a.uri}: participant {a.participant} is in {splits[a.participant]} and in {a.split}; assign splits by participant"
            )


def _existing(root: str | Path | BucketPath) -> Location:
    where = location(root)
    if isinstance(where, BucketPath):
        return where
    folder = Path(os.path.abspath(where))  # noqa: PTH100  (not resolve: a linked data set keeps the name that the user knows)
    if not folder.exists():
        raise CatalogError(f"{folder}: no such folder; check the path")
    if folder.name.lower() == "dicomdir" and folder.is_file():
        return folder.parent
    if not folder.is_dir():
        raise CatalogError(
            f"{folder}: expected a folder, got a file; give the folder it is in, or open it with octfm.read_volume"
        )
    return folder


def _tables(
    root: Location,
    found: Found,
    table: str | Path | BucketPath | None,
    participants: str | Path | BucketPath | None,
    columns: Mapping[str, str] | None,
) -> Tables:
    replaced = ["manifest.tsv"] * (table is not None) + ["participants.tsv"] * (participants is not None)
    tables = read_tables(root, found.companions, replaced)
    if not replaced:
        if columns:
            raise CatalogError(
                "--columns: names columns of your own table; give it with --table FILE or --participants FILE"
            )
        return tables
    own = Columns.parse(f"{name}={column}" for name, column in (columns or {}).items())
    own_table, own_people = (location(place) if place else None for place in (table, participants))
    return read_own_tables(root, own_table, own_people, own, tables, [str(path) for path in found.files])


def _expect_a_match(
    acquisitions: Sequence[Acquisition],
    rejects: Sequence[Reject],
    tables: Tables,
    participants: str | Path | BucketPath | None,
) -> None:
    """A table of one's own that fits nothing is a mistake in a path or a column, not an absence of labels."""
    fits_none = all("not_in_manifest" in a.flags for a in acquisitions) and not any(
        tables.at_path(reject.uri) for reject in rejects
    )
    if tables.own is not None and fits_none:
        example = next(iter({**tables.by_path, **tables.by_uid}))
        raise TableError(
            f"{tables.own}: no row fits any of {len(acquisitions)} acquisitions, for example {example} against {acquisitions[0].uri} "
            f"({acquisitions[0].sop_instance_uid}); give paths relative to the root or to the table, or SOP Instance UIDs"
        )
    if participants is not None and not any(a.participant in tables.participants for a in acquisitions):
        example = next(iter(tables.participants))
        raise TableError(
            f"{participants}: none of its {len(tables.participants)} participants is among the images, for example {example!r} against "
            f"{acquisitions[0].participant!r}; map the column with --columns participant=COLUMN, or join ids by --table"
        )


def _unpacked(found: Found, root: Location, into: Path, tables: Tables) -> list[Location]:
    """The files to look at after every archive is unpacked below `into`, at the place that it has below `root`."""
    if isinstance(root, Path) and into.is_relative_to(root):
        raise CatalogError(
            f"--extract {into}: expected a folder outside {root}, where the next scan would find every file twice"
        )
    needed = sum(member.size for archive in found.archives for member in archive.members.values())
    into.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(into).free):
        raise CatalogError(
            f"--extract {into}: {needed:,} bytes to unpack, {free:,} free; choose another disk, or scan without --extract"
        )
    files: dict[str, Path] = {}
    for archive in found.archives:
        inside: Any = listed(archive.path)
        target = into / inside.relative_to(root).with_suffix("")
        files |= unpack(archive, target)
        # Folders of images, too.
        files |= {
            f"{archive.path}{MEMBER}{folder}": target / folder
            for name in archive.members
            for folder in PurePosixPath(name).parents
        }
    tables.unpacked_from.update((str(path), uri) for uri, path in files.items())
    return [files.get(str(path), path) for path in found.files]


def _count(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _schema(name: str):
    import pyarrow as pa

    if name == "rejects.parquet":
        text = {name: pa.string() for name in ("uri", "code", "sentence", "fix", "refers_to")}
        return pa.schema(text | {"bytes": pa.int64(), "skipped": pa.bool_()})
    text = (
        "uri",
        "participant",
        "laterality",
        "scanner",
        "protocol",
        "spacing_source",
        "sop_instance_uid",
        "split",
        "participant_labels",
    )
    text += _ADDED
    return pa.schema(
        {name: pa.string() for name in text}
        | {"shape": pa.list_(pa.int64(), 3), "spacing_mm": pa.list_(pa.float64(), 3), "flags": pa.list_(pa.string())}
    )


def _read_parquet(path: Location) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(path.read_bytes()))
    except FileNotFoundError:
        raise CatalogError(f"{path}: no such file; make it with: octfm scan ROOT") from None
    except (OSError, pa.ArrowException) as error:
        raise CatalogError(f"{path}: damaged ({' '.join(str(error).split())[:120]}); scan again") from error
    facts = json.loads((table.schema.metadata or {}).get(b"octfm", b"{}"))
    if facts.get("format") != FORMAT or facts.get("version") != VERSION:
        found = f"{facts.get('format', 'another parquet file')} version {facts.get('version', '?')}"
        raise CatalogError(f"{path}: expected {FORMAT} version {VERSION}, got {found}; scan again with this octfm")
    return table.to_pylist(), facts


def _acquisition(row: dict[str, Any]) -> Acquisition:
    d, h, w = row.pop("shape")
    z, y, x = row.pop("spacing_mm")
    labels, flags = json.loads(row.pop("participant_labels")), tuple(row.pop("flags"))
    return Acquisition(shape=(d, h, w), spacing_mm=(z, y, x), participant_labels=labels, flags=flags, **row)
