"""Catalog: a row for every accepted acquisition, a reject with a reason for every other file."""

import functools
import io
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.aireadi import Tables, read_own_tables, read_tables
from octfm.catalog.columns import Columns, TableError, lost_zeros
from octfm.catalog.dicom_directory import left_behind
from octfm.catalog.duplicates import without_duplicates
from octfm.catalog.estimation import axial_mm_by_height
from octfm.catalog.examination import examine_file, wanted
from octfm.catalog.inspection import verdicts
from octfm.catalog.participants.patterns import Pattern
from octfm.catalog.participants.people import Scan, find_people, spelt_alike
from octfm.catalog.participants.splits import SPLITS, Split, assign, parse_split
from octfm.catalog.parts import join_parts
from octfm.catalog.walk import Found, walk
from octfm.display import box, brief, counted, data_frame, number, with_labels
from octfm.errors import OctfmError
from octfm.formats.reasons import REASONS
from octfm.io.archive import MEMBER, file_size, is_folder, unpack
from octfm.io.bucket import Account
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits
from octfm.io.location import BucketPath, Location, listed, location, write_whole
from octfm.io.ranged import recall
from octfm.io.spread import spread
from octfm.volume.pixel_copies import describe_copy
from octfm.volume.volume import ADMISSIBLE, MODALITIES, RASTER_ONLY, STRUCTURE_ONLY, Layout, Modality, Spacing3

if TYPE_CHECKING:
    from octfm.formats.bscans import Reader
    from octfm.formats.reasons import Header

FORMAT, VERSION = "octfm-catalog", 3
_ADDED = ("layout", "participant_source", "modality")
"""Columns missing in older catalogs of this version."""
_OF_COPIES = ("duplicate_pixels", "pixels_of_two_participants")
"""Codes of what pixels show to be a copy of another scan."""


_OF_SINGLE = "; if each image is a scan of its own, as in folders of classes: octfm scan FOLDER --layouts line"


class CatalogError(OctfmError):
    """A root that cannot be scanned; a catalog that is missing, damaged, of another version, or leaks participants."""


class NothingAccepted(CatalogError):
    """A scan without a single acceptable file. `catalog` has the rejects, to save and inspect them."""

    def __init__(self, message: str, catalog: "Catalog"):
        super().__init__(message)
        self.catalog = catalog


@dataclass(frozen=True)
class Catalog:
    """The result of a scan: accepted acquisitions, rejects with their reasons, and what was skipped on purpose."""

    root: str
    acquisitions: tuple[Acquisition, ...]
    rejects: tuple[Reject, ...]
    companions: int = 0
    """Number of tables, documents and ground truth files, and of files of a volume after its first."""
    skipped: tuple[Reject, ...] = ()
    """Recognised and left out on purpose (angiography, photographs, radial scans, ...); not errors."""
    requests: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Requests of a scan in a bucket by kind, and how many had to be repeated."""
    pixels: bool = False
    """Whether pixels were checked (octfm.catalog.inspection). If so, the optic disc of a row without a flag about it
    agrees with the laterality tag."""

    def __repr__(self) -> str:
        people = number(len({a.participant for a in self.acquisitions}), "participant")
        left_out = f"{number(len(self.rejects), 'file')} rejected, {len(self.skipped):,} skipped"
        return brief("Catalog", f"{number(len(self.acquisitions), 'volume')} of {people}", left_out)

    def _repr_html_(self) -> str:
        facts = self.summary()
        shown = {
            "accepted": f"{number(facts['accepted'], 'volume')} of {number(facts['participants'], 'participant')}",
            "scanners": counted(facts["scanners"]),
            "protocols": counted(facts["protocols"]),
            "layouts": counted(facts["layouts"]) if set(facts["layouts"]) - {"raster"} else "",
            "modalities": counted(facts["modalities"]) if set(facts["modalities"]) - {"structure"} else "",
            "eyes": counted(facts["lateralities"]),
            "participants per split": counted(facts["participants_per_split"]),
            "flags": counted(facts["flags"]),
            "skipped on purpose": counted(facts["skips"]),
        }
        why = [(code, f"{count:,}", REASONS[code].fix) for code, count in facts["rejects"].items()]
        return box("Catalog", shown, table=(("rejected because", "files", "what to do"), why))

    def to_pandas(self, *, rejects: bool = False) -> Any:
        """A DataFrame with one row per accepted volume and a column for every label of its participant; or, with
        `rejects`, one per file that was rejected or skipped, with code, sentence and what to do.

        Raises ConfigError without pandas.
        """
        if rejects:
            return data_frame(self._left_out(), [*Reject.__dataclass_fields__, "fix", "skipped"])
        rows = []
        for a in self.acquisitions:
            own = {name: getattr(a, name) for name in Acquisition.__dataclass_fields__ if name != "participant_labels"}
            rows.append(with_labels(own, a.participant_labels))
        return data_frame(rows)

    def save(self, folder: str | Path | BucketPath) -> Location:
        """Write catalog.parquet and rejects.parquet, each atomically; `load` refuses a pair from two scans."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = location(folder)
        facts = {"format": FORMAT, "version": VERSION, "root": self.root, "companions": self.companions}
        # Both files carry the key, which is how `load` recognises a pair.
        facts |= {"key": self._key(), "requests": dict(self.requests), "pixels": self.pixels}
        staged = []
        for name, table in (("catalog.parquet", self._rows()), ("rejects.parquet", self._left_out())):
            schema = _schema(name).with_metadata({"octfm": json.dumps(facts)})
            content = io.BytesIO()
            pq.write_table(pa.Table.from_pylist(table, schema), content, compression="zstd")
            staged.append((folder / name, content.getvalue()))
        for file, content in staged:  # after both are built: an error in one must not leave the other
            write_whole(file, content)
        return folder

    @staticmethod
    def load(folder: str | Path | BucketPath) -> "Catalog":
        """Read a saved catalog.

        Raises CatalogError if the pair is missing, damaged, of another version or from two different scans.
        """
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
        # The key is a hash of both tables: a mixed or edited pair does not have it.
        if not facts["key"] == other["key"] == catalog._key():
            raise CatalogError(
                f"{folder}: catalog.parquet and rejects.parquet are not from one scan, or were edited; scan again"
            )
        return catalog

    def layer_heights(self, acquisition: Acquisition) -> tuple[str, ...]:
        """uris of the height maps that refer to this volume; octfm.formats.read_overlay reads them."""
        return self._skipped(acquisition, "layer_heights")

    def voxel_labels(self, acquisition: Acquisition) -> tuple[str, ...]:
        """uris of the DICOM SEG that refer to this volume; octfm.formats.read_overlay reads them."""
        return self._skipped(acquisition, "voxel_labels")

    def _skipped(self, acquisition: Acquisition, code: str) -> tuple[str, ...]:
        about = acquisition.sop_instance_uid
        return tuple(found.uri for found in self.skipped if found.code == code and found.refers_to == about)

    @property
    def reject_share(self) -> float:
        """Rejected files over rejected and accepted ones; skipped files do not count."""
        return len(self.rejects) / max(len(self.rejects) + len(self.acquisitions), 1)

    def expect_few_rejects(self, most: float, advice: str = "see its rejects") -> None:
        """Raises CatalogError if a larger share than `most` is rejected: a pipeline stops before training."""
        if self.reject_share > most:
            codes = ", ".join(f"{n} {code}" for code, n in _count(reject.code for reject in self.rejects).items())
            total = len(self.rejects) + len(self.acquisitions)
            raise CatalogError(
                f"{self.root}: {len(self.rejects)} of {total} files are rejected ({self.reject_share:.1%}), "
                f"expected at most {most:.1%}: {codes}; {advice}"
            )

    def summary(self) -> dict[str, Any]:
        """Counts for reports and the terminal; rejects most frequent first, splits in participants.

        `disc_sides`, by scanner, only if the scan has checked pixels.
        """
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
            "modalities": _count(a.modality for a in self.acquisitions),
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
        """One row per file that is not in the catalog, with how to get it in."""
        return [
            asdict(reject) | {"fix": reject.fix, "skipped": reject.expected}
            for reject in (*self.rejects, *self.skipped)
        ]

    def _key(self) -> str:
        # Added columns with their defaults do not enter the hash: catalogs from before these columns keep their key.
        added = {("layout", "raster"), ("participant_source", ""), ("modality", "structure")}
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
    modalities: Collection[Modality] = STRUCTURE_ONLY,
    pixels: bool = False,
    keep_upside_down: bool = False,
    follow_links: bool = True,
    workers: int | None = None,
    limits: Limits | None = None,
    progress: Callable[[int, int], None] | None = None,
    readers: "Sequence[Reader]" = (),
) -> Catalog:
    """Examine every file below `root` (AI-READI layout or any other) and assign participant-level splits.

    root: a folder, s3://bucket/prefix or gs://bucket/prefix. A bucket is listed once, and headers are read by ranges.
        The path of a DICOMDIR stands for its folder; files that a DICOMDIR lists but that are missing are rejects.
    table, participants: your own CSV or TSV with one row per file or per person; they replace AI-READI's tables, which
        are found below `root`. columns: from octfm.catalog.columns.FIELDS to your columns, for example
        {"participant": "pid", "file": "path"}.
    participant_from: where paths below `root` hold the participant of files that neither header nor table names, such
        as "{participant}/{eye}/*"; of several patterns the first that fits counts. Without one, octfm guesses or stops.
        {label} in a pattern gives every row the label of its path, {split} the split that its folder names.
    extract: a folder outside `root` to unpack ZIP archives into; rows then name the unpacked files. By default
        archives are read in place.
    nominal_spacing_mm: (dz, dy, dx), used and flagged where neither file, sidecar nor table states a spacing.
    layouts: ("raster", "radial") also accepts radial scans, as rows of their own layout, "line" single B-scans. With
        ("line",) alone every image is a B-scan of its own, volumes are left out, and pixels are always decoded.
        Millimetres that nothing states are then estimated (octfm.volume.estimated) and flagged.
    modalities: ("structure", "octa") also accepts volumes of OCT angiography (flow), as rows of their own modality.
    pixels: decode every accepted volume and find copies under other ids, eyes whose optic disc lies on the wrong side,
        and scans that are upside down, which are rejects unless keep_upside_down. By default nothing is decoded.
    follow_links: if False, symbolic links below `root` are rejects with code link_not_followed.
    workers: child processes that examine files, by default one per core, 0 for none; the result does not depend on it.
    limits: time and memory of a child process; a file that ends its process is a reject.
    progress: called with (files examined, all files).
    readers: readers of formats of your own, as objects (octfm.formats.bscans.Reader); the first that fits a file is
        taken.

    Raises CatalogError for a root that is missing or has no acceptable file, TableError for tables that contradict
    themselves, lack a column or fit none of the files, AmbiguousPeople where folders leave open whose eyes are shown.
    """
    patterns = [
        Pattern.parse(text) for text in ([participant_from] if isinstance(participant_from, str) else participant_from)
    ]
    from octfm.formats.detect import require_readers  # keeps parsers out of what only reads catalogs

    require_readers(readers)
    bscans_only = tuple(layouts) == ("line",)
    if not ("raster" in layouts or bscans_only) or any(name not in ADMISSIBLE for name in layouts):
        raise CatalogError(
            f"layouts: expected raster, raster,radial, raster,line or line; got {','.join(layouts) or 'none'}"
        )
    if "structure" not in modalities or any(name not in MODALITIES for name in modalities):
        got = ",".join(modalities) or "none"
        raise CatalogError(f"modalities: expected structure or structure,octa; got {got}")
    # List the files and read the tables.
    folder = _existing(root)
    account = Account(folder)
    found = walk(folder, follow_links=follow_links, folders_are_volumes=not bscans_only)
    if not found.files and not found.refused:
        endings = ", ".join(_count(path.suffix or path.name for path in found.companions))
        others = f"{len(found.companions)} other files: {endings[:100]}" if found.companions else "it is empty"
        raise CatalogError(f"{folder}: no image files below it ({others}); point at the folder that holds the scans")
    tables = _tables(folder, found, table, participants, columns)
    found.refused += left_behind([path for path in found.companions if path.name.lower() == "dicomdir"], found.files)
    if extract is not None:
        found.files = _unpacked(found, folder, Path(os.path.abspath(extract)), tables)  # noqa: PTH100
    # Examine headers: an outcome per file, then per volume, then without copies.
    limits = limits or Limits()
    examine = account.counting(
        functools.partial(
            examine_file,
            layouts=tuple(layouts),
            follow_links=follow_links,
            readers=readers,
            modalities=tuple(modalities),
        )
    )
    examined = spread(
        examine,
        found.files,
        lambda path, lost: [Reject.lost(path, lost, "examined it")],
        workers=workers,
        limits=limits,
        # A deadline by size, although headers take milliseconds: a volume that may be blank is decoded.
        deadline=lambda path: limits.deadline(file_size(path), str(path)),
        progress=progress,
    )
    per_file = [outcome for outcomes in account.counted(examined) for outcome in outcomes]
    per_volume, joined_files = join_parts(per_file, workers, limits, layouts)
    of_layouts, rejects = wanted(per_volume, layouts)
    headers, duplicates = without_duplicates(of_layouts, tables, workers, limits, readers)
    from octfm.catalog.agreement import accept, with_person  # importing a catalog must not import the readers

    # Combine headers with tables.
    estimated = {} if nominal_spacing_mm else axial_mm_by_height(headers, tables, workers, limits, readers)
    rows = [accept(header, tables, nominal_spacing_mm, estimated) for header in headers]
    left_out = [*found.refused, *rejects, *(row for row in rows if isinstance(row, Reject))]
    accepted = [row for row in rows if isinstance(row, Acquisition)]
    _expect_rows_to_fit(accepted, left_out, tables)
    # Copies may be filed under another participant, and their paths help to find out whose a folder is.
    copied = [accept(copy, tables, nominal_spacing_mm, estimated) for copy, _ in duplicates]
    copies = [copy for copy in copied if isinstance(copy, Acquisition)]
    # Find participants and eyes that only paths state.
    for path in found.files:
        recall(path)  # facts of the listing expire during a long scan; each would then cost another request
    scans = [Scan(a.uri, a.participant) for a in (*accepted, *copies)]
    whose = find_people(scans, folder, patterns, tables.unpacked_from)
    acquisitions, copy_rejects, pair_of = _under_two_ids(
        [with_person(a, whose, tables) for a in accepted],
        [with_person(copy, whose, tables) for copy in copies],
        [reject for _, reject in duplicates],
    )
    pixel_rejects: list[Reject] = []
    pixel_pairs: list[tuple[str, str]] = []
    # On request, decode everything and compare voxels and anatomy. In sets of single B-scans copies are common.
    if pixels or bscans_only:
        from octfm.catalog.inspection import inspect_pixels

        acquisitions, pixel_rejects, pixel_pairs = inspect_pixels(
            acquisitions, workers, limits, keep_upside_down, readers
        )
    copy_rejects, pairs = _without_lost_originals(copy_rejects, pair_of, headers, duplicates, pixel_rejects)
    left_out += [*copy_rejects, *pixel_rejects]
    pairs += pixel_pairs
    # Scanners write one person's id as 1001 and as 00001001.
    pairs += spelt_alike(a.participant for a in acquisitions)
    left_out.sort(key=lambda reject: reject.uri)
    catalog = Catalog(
        root=str(folder),
        acquisitions=assign_splits(acquisitions, seed=seed, one_person=pairs) if acquisitions else (),
        rejects=tuple(reject for reject in left_out if not reject.expected),
        companions=len(found.companions) + joined_files - sum(reject.code == "not_a_bscan" for reject in left_out),
        skipped=tuple(reject for reject in left_out if reject.expected),
        requests=account.close(),
        pixels=pixels or bscans_only,
    )
    if not acquisitions:
        reasons = [(n, code, REASONS[code]) for code, n in _count(reject.code for reject in left_out).items()]
        counts = ", ".join(f"{n} {code} ({reason.meaning}; {reason.fix})" for n, code, reason in reasons)
        hint = "" if "line" in layouts or not any(map(_may_be_single, left_out)) else _OF_SINGLE
        message = f"{folder}: none of {len(left_out)} files is an acceptable OCT volume: {counts}{hint}"
        raise NothingAccepted(message, catalog)
    _expect_people_to_fit(acquisitions, tables, participants)
    return catalog


def assign_splits(
    acquisitions: Sequence[Acquisition],
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seed: int = 0,
    one_person: Iterable[tuple[str, str]] = (),
) -> tuple[Acquisition, ...]:
    """Assign splits: recommended_split where participants.tsv has one, else stratified by participant.

    Strata are of the column diagnosis, else study_group or label. `one_person`: pairs of participants that may be one
    person, because both ids have the same voxels or are spelt alike. They get the same split; if tables or folders
    recommend several, train goes first: nobody in the test split may have been seen in training.
    """
    same = _leaders(one_person)
    recommended: dict[str, Split] = {}
    several: set[str] = set()
    scanners: dict[str, set[str]] = {}
    eyes: dict[str, set[str]] = {}
    for a in acquisitions:
        person = same.get(a.participant, a.participant)
        scanners.setdefault(person, set()).add(a.scanner)
        eyes.setdefault(person, set()).add(a.eye_id)
        if split := parse_split(a.participant_labels.get("recommended_split", "")):
            # SPLITS is in this order: train before val before test.
            earlier = recommended.get(person, split)
            several |= {person} if earlier != split else set()
            recommended[person] = split if SPLITS.index(split) < SPLITS.index(earlier) else earlier
    labels = {a.participant: a.participant_labels for a in acquisitions}
    diagnosis = {
        p: next((columns[name] for name in ("diagnosis", "study_group", "label") if columns.get(name)), "")
        for p, columns in labels.items()
    }
    # Balanced over scanners, diagnosis and the number of eyes.
    strata = {p: (sorted(scanners[p]), diagnosis.get(p, ""), len(eyes[p])) for p in scanners}
    splits = assign(strata, recommended, fractions, seed)
    placed = []
    for a in acquisitions:
        flags = a.flags
        person = same.get(a.participant, a.participant)
        for flag, applies in (("split_with_another_id", a.participant in same), ("several_splits", person in several)):
            flags = (*flags, flag) if applies and flag not in flags else flags
        placed.append(replace(a, split=splits[person], flags=flags))
    assert_participant_level(placed)
    return tuple(placed)


def _leaders(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Participant in a pair -> the first by name of all participants that pairs link it to."""
    groups: dict[str, set[str]] = {}
    for a, b in pairs:
        # All members of a group share one set, so that chains of pairs end up in one group.
        joined = groups.get(a, {a}) | groups.get(b, {b})
        groups |= dict.fromkeys(joined, joined)
    return {participant: min(group) for participant, group in groups.items()}


def _under_two_ids(
    acquisitions: Sequence[Acquisition], copies: Sequence[Acquisition], rejects: Sequence[Reject]
) -> tuple[list[Acquisition], list[Reject], dict[str, tuple[str, str]]]:
    """Give copies under another participant's id a reason of their own: which id is right must be found out first.

    Returns the acquisitions with flags, the rejects, and the two participants of each of these copies by its uri.
    """
    kept = {a.sop_instance_uid: a for a in acquisitions}
    copy_of = {copy.uri: copy for copy in copies}
    out, shared, pairs = [], set(), {}
    for reject in rejects:
        copy = copy_of.get(reject.uri)
        first = kept.get(copy.sop_instance_uid) if copy else None
        if copy and first and reject.code == "duplicate_sop_uid" and copy.participant != first.participant:
            code, sentence = describe_copy(copy.owner, first.owner)
            reject = replace(reject, code=code, sentence=sentence, refers_to=first.sop_instance_uid)
            shared.add(first.uri)
            pairs[copy.uri] = (copy.participant, first.participant)
        out.append(reject)
    marked = [
        replace(a, flags=(*a.flags, "pixels_of_two_participants")) if a.uri in shared else a for a in acquisitions
    ]
    return marked, out, pairs


def _without_lost_originals(
    rejects: Sequence[Reject],
    pair_of: Mapping[str, tuple[str, str]],
    headers: Sequence["Header"],
    duplicates: Sequence[tuple["Header", Reject]],
    pixel_rejects: Sequence[Reject],
) -> tuple[list[Reject], list[tuple[str, str]]]:
    """The rejects of copies, and the pairs of participants whose images are the same.

    A copy of what its pixels show to be no scan is none either, and says nothing about people: the empty masks of two
    of them are the same file. It gets the code of its original.
    """
    by_uri = {reject.uri: reject for reject in pixel_rejects if reject.code not in _OF_COPIES}
    lost = {header.sop_instance_uid: by_uri[header.uri] for header in headers if header.uri in by_uri}
    original = {copy.uri: lost[copy.sop_instance_uid] for copy, _ in duplicates if copy.sop_instance_uid in lost}
    kept = [
        replace(
            reject,
            code=original[reject.uri].code,
            sentence=f"{reject.uri}: a copy of {original[reject.uri].sentence}",
            refers_to="",
        )
        if reject.uri in original
        else reject
        for reject in rejects
    ]
    return kept, [pair for uri, pair in pair_of.items() if uri not in original]


def assert_participant_level(acquisitions: Iterable[Acquisition]) -> None:
    """Raises CatalogError if a participant is in two splits: training would see the fellow eye of a test eye."""
    splits: dict[str, Split | None] = {}
    for a in acquisitions:
        if splits.setdefault(a.participant, a.split) != a.split:
            raise CatalogError(
                f"{a.uri}: participant {a.participant} is in {splits[a.participant]} and in {a.split}; "
                "assign splits by participant"
            )


def _existing(root: str | Path | BucketPath) -> Location:
    where = location(root)
    if isinstance(where, BucketPath):
        return where
    folder = Path(os.path.abspath(where))  # noqa: PTH100  (not resolve: it would replace a link that the user knows)
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


def _expect_rows_to_fit(acquisitions: Sequence[Acquisition], rejects: Sequence[Reject], tables: Tables) -> None:
    """Raises TableError if no row of a user's table of files fits: then a path or a column is wrong, and everything
    that the table says would be asked of folders."""
    # A row that fits only a reject is a fit as well.
    fits_none = all("not_in_manifest" in a.flags for a in acquisitions) and not any(
        tables.at_path(reject.uri) for reject in rejects
    )
    if acquisitions and tables.own is not None and fits_none:
        example = next(iter({**tables.by_path, **tables.by_uid}))
        raise TableError(
            f"{tables.own}: no row fits any of {len(acquisitions)} acquisitions, for example {example} against "
            f"{acquisitions[0].uri} ({acquisitions[0].sop_instance_uid}); give paths relative to the root or to the "
            "table, or SOP Instance UIDs"
        )


def _expect_people_to_fit(
    acquisitions: Sequence[Acquisition], tables: Tables, participants: str | Path | BucketPath | None
) -> None:
    """Raises TableError if a user's table of people names nobody of the scan."""
    people = {a.participant for a in acquisitions}
    if participants is not None and (remark := lost_zeros(people, tables.participants)):
        raise TableError(f"{participants}: participant {remark}")
    if participants is not None and people.isdisjoint(tables.participants):
        example = next(iter(tables.participants))
        raise TableError(
            f"{participants}: none of its {len(tables.participants)} participants is among the images, for example "
            f"{example!r} against {acquisitions[0].participant!r}; map the column with --columns participant=COLUMN, "
            "or join ids by --table"
        )


def _unpacked(found: Found, root: Location, into: Path, tables: Tables) -> list[Location]:
    """Unpack every archive below `into`, at its path below `root`; returns the files to examine."""
    if isinstance(root, Path) and into.is_relative_to(root):
        raise CatalogError(
            f"--extract {into}: expected a folder outside {root}: the next scan would find every file twice"
        )
    needed = sum(member.size for archive in found.archives for member in archive.members.values())
    into.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(into).free):
        raise CatalogError(
            f"--extract {into}: {needed:,} bytes to unpack, {free:,} free; choose another disk, "
            "or scan without --extract"
        )
    files: dict[str, Path] = {}
    for archive in found.archives:
        inside: Any = listed(archive.path)
        target = into / inside.relative_to(root).with_suffix("")
        files |= unpack(archive, target)
        # Folders as well: `files` of a scan may hold a folder of images.
        files |= {str(listed(f"{archive.path}{MEMBER}{folder}")): target / folder for folder in archive.folders}
    tables.unpacked_from.update((str(path), uri) for uri, path in files.items())
    return [files.get(str(path), path) for path in found.files]


def _may_be_single(reject: Reject) -> bool:
    """Whether it is an image, or a folder of images, that may be of several eyes."""
    return reject.code in ("single_image", "mixed_images") or (
        reject.code == "missing_spacing" and is_folder(reject.uri)
    )


def _count(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _schema(name: str):
    import pyarrow as pa

    if name == "rejects.parquet":
        text = {name: pa.string() for name in ("uri", "code", "sentence", "fix", "refers_to")}
        return pa.schema(text | {"bytes": pa.int64(), "skipped": pa.bool_()})
    text = ("uri", "participant", "laterality", "scanner", "protocol", "spacing_source", "sop_instance_uid", "split")
    return pa.schema(
        {name: pa.string() for name in (*text, "participant_labels", *_ADDED)}
        | {"shape": pa.list_(pa.int64(), 3), "spacing_mm": pa.list_(pa.float64(), 3), "flags": pa.list_(pa.string())}
    )


def _read_parquet(path: Location) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(path.read_bytes()))
    except FileNotFoundError:
        raise CatalogError(f"{path}: no such file; make it with: octfm scan FOLDER") from None
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
