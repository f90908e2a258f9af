"""Scan a folder or bucket: list, examine, combine with tables, find people, place in splits."""

import functools
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.agreement import accept, with_person
from octfm.catalog.catalog import Catalog, CatalogError, NothingAccepted, assign_splits, count_words
from octfm.catalog.columns import Columns, TableError
from octfm.catalog.dicom_directory import left_behind
from octfm.catalog.duplicates import compare_copies, without_duplicates, without_lost_originals
from octfm.catalog.estimation import axial_mm_by_height
from octfm.catalog.examination import examine_files, join_parts, wanted, with_sidecars
from octfm.catalog.inspection import inspect_pixels
from octfm.catalog.participants.ids import person_key
from octfm.catalog.participants.patterns import Pattern
from octfm.catalog.participants.people import AmbiguousPeople, Whose, find_people
from octfm.catalog.participants.pseudonyms import pseudonym
from octfm.catalog.participants.splits import FRACTIONS, SPLITS, Split, expect_fractions
from octfm.catalog.tables import Tables, read_own_tables, read_tables
from octfm.catalog.walk import Found, walk
from octfm.display import number
from octfm.errors import shown
from octfm.formats.bscans import Reader
from octfm.formats.plug_in import require_readers
from octfm.formats.reasons import REASONS, Header
from octfm.io.archive import MEMBER, is_folder, recall, unpack
from octfm.io.bucket import Account
from octfm.io.isolation import Limits
from octfm.io.location import BucketPath, Location, listed, local_path, location
from octfm.io.progress import say
from octfm.io.spread import spread
from octfm.volume.volume import (
    ADMISSIBLE,
    MODALITIES,
    RASTER_ONLY,
    STRUCTURE_ONLY,
    Layout,
    Modality,
    Spacing3,
    as_spacing,
)

_OF_SINGLE = "; if each image is a scan of its own, as in folders of classes: octfm scan FOLDER --layouts line"


class Placed(Protocol):
    """Whatever has a participant and a split: an Acquisition of a catalog, a StoreRow of a store."""

    @property
    def participant(self) -> str: ...
    @property
    def split(self) -> str | None: ...


class HasRows(Protocol):
    """A Store."""

    @property
    def rows(self) -> Sequence[Placed]: ...


def scan(
    root: str | Path | BucketPath,
    *,
    seed: int = 0,
    fractions: tuple[float, float, float] = FRACTIONS,
    splits_of: Iterable[Placed] | HasRows = (),
    key: bytes | None = None,
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
    readers: Sequence[Reader] = (),
) -> Catalog:
    """Examine every file below `root` (AI-READI layout or any other) and assign participant-level splits.

    root: a folder, s3://bucket/prefix or gs://bucket/prefix. A bucket is listed once, and headers are read by ranges.
        The path of a DICOMDIR stands for its folder; files that a DICOMDIR lists but that are missing are rejects.
    fractions: shares of participants for training, validation and test, where no table recommends a split; they sum to
        1. Of three or more participants each split with a share gets at least one.
    splits_of: an earlier Catalog, or a Store, whose participants keep their split; only others are drawn. key: that of
        its pseudonyms (octfm.catalog.participants.pseudonyms.read_key).
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

    Raises CatalogError for a root that is missing or has no acceptable file, and for `splits_of` without any of its
    participants; TableError for tables that contradict themselves, lack a column or fit none of the files,
    AmbiguousPeople where folders leave open whose eyes are shown.
    """
    patterns = [
        Pattern.parse(text) for text in ([participant_from] if isinstance(participant_from, str) else participant_from)
    ]
    require_readers(readers)
    _expect_possible(layouts, modalities, seed)
    expect_fractions(fractions)
    if nominal_spacing_mm is not None:
        nominal_spacing_mm = as_spacing(nominal_spacing_mm, "nominal_spacing_mm")
    placed = _placed(splits_of)
    bscans_only = tuple(layouts) == ("line",)
    pixels = pixels or bscans_only  # decodes everything, to compare voxels and anatomy: copies of B-scans are common
    # List the files and read the tables.
    folder = existing_root(root)
    account, in_children = Account(folder), functools.partial(spread, workers=workers, limits=limits)
    found = walk(folder, follow_links=follow_links, folders_are_volumes=not bscans_only)
    _expect_images(found, folder)
    tables = _tables(folder, found, table, participants, columns)
    directories = [path for path in found.companions if path.name.lower() == "dicomdir"]
    found.refused += left_behind(directories, found.files, account, in_children)
    if extract is not None:
        _unpack(found, folder, Path(os.path.abspath(local_path(extract))), tables)  # noqa: PTH100
    # Examine headers: an outcome per file, then per volume, then without copies.
    per_file = examine_files(found.files, in_children, account, layouts, modalities, follow_links, readers, progress)
    per_volume, joined_files = join_parts(per_file, in_children, layouts)
    of_layouts, rejects = wanted(with_sidecars(per_volume, found.companions), layouts)
    headers, duplicates = without_duplicates(of_layouts, tables, in_children, readers)
    # Combine headers with tables.
    estimated: dict[int, float] = {}
    undecoded: dict[str, Reject] = {}
    if not nominal_spacing_mm:
        estimated, undecoded = axial_mm_by_height(headers, tables, in_children, readers)
    rows = [accept(header, tables, nominal_spacing_mm, estimated) for header in headers]
    accepted = [row for row in rows if isinstance(row, Acquisition)]
    left_out = [*found.refused, *rejects, *(undecoded.get(row.uri, row) for row in rows if isinstance(row, Reject))]
    _expect_rows_to_fit(accepted, left_out, tables)
    _say_what_is_unfound(folder, tables, {header.sop_instance_uid for header in headers})
    copies = [*_copies([copy for copy, _ in duplicates], tables, nominal_spacing_mm, estimated)]
    # Find participants and eyes that only paths state.
    for path in found.files:
        recall(path)  # facts of the listing expire during a long scan; each would then cost another request
    whose = _people({a.uri: a.participant for a in (*accepted, *copies)}, folder, patterns, tables)
    acquisitions, copy_rejects, pair_of = compare_copies(
        [with_person(a, whose, tables) for a in accepted],
        [with_person(copy, whose, tables) for copy in copies],
        headers,
        duplicates,
    )
    pixel_rejects: list[Reject] = []
    pixel_pairs: list[tuple[str, str]] = []
    if pixels:
        acquisitions, pixel_rejects, pixel_pairs = inspect_pixels(acquisitions, in_children, keep_upside_down, readers)
    copy_rejects, pairs = without_lost_originals(copy_rejects, pair_of, headers, duplicates, pixel_rejects)
    left_out += [*copy_rejects, *pixel_rejects]
    pairs += pixel_pairs
    kept = _kept_splits(placed, key, acquisitions)
    left_out.sort(key=lambda reject: reject.uri)
    catalog = Catalog(
        root=str(folder),
        acquisitions=assign_splits(acquisitions, fractions, seed, one_person=pairs, kept=kept) if acquisitions else (),
        rejects=tuple(reject for reject in left_out if not reject.expected),
        companions=len(found.companions) + joined_files - sum(reject.code == "not_a_bscan" for reject in left_out),
        skipped=tuple(reject for reject in left_out if reject.expected),
        requests=account.close(),
        pixels=pixels,
    )
    if not acquisitions:
        raise NothingAccepted(_why_nothing(folder, left_out, layouts, readers), catalog)
    _expect_people_to_fit(acquisitions, tables, participants)
    return catalog


def _expect_possible(layouts: Collection[Layout], modalities: Collection[Modality], seed: int) -> None:
    if not ("raster" in layouts or tuple(layouts) == ("line",)) or any(name not in ADMISSIBLE for name in layouts):
        raise CatalogError(
            f"layouts: expected raster, raster,radial, raster,line or line; got {','.join(layouts) or 'none'}"
        )
    if "structure" not in modalities or any(name not in MODALITIES for name in modalities):
        got = ",".join(modalities) or "none"
        raise CatalogError(f"modalities: expected structure or structure,octa; got {got}")
    if not isinstance(seed, Integral) or seed < 0:
        raise CatalogError(f"seed: expected a whole number of 0 or more, got {shown(seed)}")


def _expect_images(found: Found, folder: Location) -> None:
    if not found.files and not found.refused:
        endings = ", ".join(count_words(path.suffix or path.name for path in found.companions))
        others = f"{len(found.companions)} other files: {endings[:100]}" if found.companions else "it is empty"
        raise CatalogError(f"{folder}: no image files below it ({others}); point at the folder that holds the scans")


def existing_root(root: str | Path | BucketPath) -> Location:
    """The folder, or the prefix in a bucket, that `root` stands for. Raises CatalogError."""
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
    own_table, own_people = (None if place is None else location(place) for place in (table, participants))
    return read_own_tables(root, own_table, own_people, own, tables, [str(path) for path in found.files])


def _expect_rows_to_fit(acquisitions: Sequence[Acquisition], rejects: Sequence[Reject], tables: Tables) -> None:
    """Raises TableError if no row of a user's table of files fits: then a path or a column is wrong, and folder names
    would have to answer for the whole table."""
    # A row that fits only a reject is a fit as well.
    fits_none = all("not_in_manifest" in a.flags for a in acquisitions) and not any(
        tables.at_path(reject.uri) for reject in rejects
    )
    # Where nothing was accepted, such as for want of the table's millimetres, only paths can be compared.
    tried = [f"{a.uri} ({a.sop_instance_uid})" for a in acquisitions] or [r.uri for r in rejects if tables.by_path]
    if tried and tables.own is not None and fits_none:
        example = next(iter({**tables.by_path, **tables.by_uid}))
        what, also = "acquisitions", ""
        if not acquisitions:
            what, also = "files", f"; not accepted without it: {_reasons(rejects)}"
        raise TableError(
            f"{tables.own}: no row fits any of {len(tried)} {what}, for example {example} against {tried[0]}; give "
            f"paths relative to the root or to the table, or SOP Instance UIDs{also}"
        )


def _say_what_is_unfound(folder: Location, tables: Tables, uids: Collection[str]) -> None:
    """Say which rows of a user's table of files are ignored, as of a set of which a part is missing."""
    unfound = [listed for listed, uid in tables.unfound.items() if not uid or uid not in uids]
    if unfound:
        say(
            f"{tables.own}: ignored {number(len(unfound), 'row')} whose file is not below {folder} or may be several "
            f"there, for example {unfound[0]}; fetch what is missing, or correct the paths"
        )


def _copies(
    headers: Iterable[Header], tables: Tables, nominal_spacing_mm: Spacing3 | None, estimated: Mapping[int, float]
) -> Iterator[Acquisition]:
    """The copies, which may be filed under another participant; their paths help to find out whose a folder is."""
    for header in headers:
        row = accept(header, tables, nominal_spacing_mm, estimated)
        if isinstance(row, Reject):  # for want of millimetres, as a rule: it is given some, which nothing uses
            row = accept(replace(header, spacing_mm=(1.0, 1.0, 1.0), spacing_source="nominal"), tables)
        if isinstance(row, Acquisition):
            yield row


def _people(scans: Mapping[str, str], root: Location, patterns: Sequence[Pattern], tables: Tables) -> dict[str, Whose]:
    """`find_people`, whose error also points to the user's table of files if that names nobody."""
    try:
        return find_people(scans, root, patterns, tables.unpacked_from)
    except AmbiguousPeople as error:
        if tables.own is None or any(row.participant for row in (tables.by_path | tables.by_uid).values()):
            raise
        hint = f"if a column of {tables.own} names people, say which: --columns participant=COLUMN"
        raise AmbiguousPeople(f"{error}; {hint}", error.guess) from None


def _placed(splits_of: Any) -> list[Placed]:
    """The rows whose splits are to be kept. Raises TypeError for anything but a Catalog, a Store or their rows."""
    found = getattr(splits_of, "rows", splits_of)
    rows = [*found] if isinstance(found, Iterable) else [found]
    if not all(hasattr(row, "participant") for row in rows):
        raise TypeError(
            f"splits_of: expected a Catalog or a Store, got {type(splits_of).__name__}; octfm.Catalog.load and "
            "octfm.Store.open read one from its folder"
        )
    return rows


def _kept_splits(
    placed: Sequence[Placed], key: bytes | None, acquisitions: Sequence[Acquisition]
) -> Callable[[str], Split | None]:
    """Participant of this scan → split in `placed`, if it is there. Raises CatalogError if none is."""
    # Earlier versions took two spellings of an id for two people. Written last, train goes first.
    kept = {person_key(row.participant): name for name in reversed(SPLITS) for row in placed if row.split == name}

    def split_of(participant: str) -> Any:
        names = (participant,) if key is None else (participant, pseudonym(participant, key))
        return next((kept[person_key(name)] for name in names if person_key(name) in kept), None)

    if kept and acquisitions and not any(split_of(a.participant) for a in acquisitions):
        raise CatalogError(
            f"splits_of: none of the {number(len(kept), 'participant')} whose splits are to be kept is among those of "
            f"the images ({acquisitions[0].participant!r}, …); state the catalog or store of the same people, and the "
            "key file if it has pseudonyms (--pseudonymise)"
        )
    return split_of


def _expect_people_to_fit(
    acquisitions: Sequence[Acquisition], tables: Tables, participants: str | Path | BucketPath | None
) -> None:
    """Raises TableError if a user's table of people names no participant of the scan."""
    people = {person_key(a.participant) for a in acquisitions}
    if participants is not None and people.isdisjoint(tables.participants):
        raise TableError(
            f"{participants}: none of its participants ({next(iter(tables.participants))!r}, …) is among those of the "
            f"images ({acquisitions[0].participant!r}, …); map the column with --columns participant=COLUMN, or join "
            "ids by --table"
        )


def _unpack(found: Found, root: Location, into: Path, tables: Tables) -> None:
    """Unpack every archive below `into`, at its path below `root`, and replace members in `found` by their files."""
    if isinstance(root, Path) and into.is_relative_to(root):
        raise CatalogError(
            f"--extract {into}: expected a folder outside {root}: the next scan would find every file twice"
        )
    needed = sum(member.file_size for archive in found.archives for member in archive.members.values())
    into.mkdir(parents=True, exist_ok=True)
    if needed > (free := shutil.disk_usage(into).free):
        raise CatalogError(
            f"--extract {into}: {needed:,} bytes to unpack, {free:,} free; choose another disk, "
            "or scan without --extract"
        )
    targets: dict[str, Path] = {}
    owners: dict[Path, str] = {}
    for archive in found.archives:
        inside: Any = listed(archive.path)
        target = targets[archive.path] = into / inside.relative_to(root).with_suffix("")
        for folder in archive.folders:
            if (first := owners.setdefault(target / folder, archive.path)) != archive.path:
                raise CatalogError(
                    f"--extract: {first} and {archive.path} would both unpack into {target / folder}; rename one of "
                    "them, or scan without --extract"
                )
    files: dict[str, Path] = {}
    for archive in found.archives:
        target = targets[archive.path]
        files |= unpack(archive, target)
        # Folders as well: `files` of a scan may hold a folder of images.
        files |= {str(listed(f"{archive.path}{MEMBER}{folder}")): target / folder for folder in archive.folders}
    tables.unpacked_from.update((str(path), uri) for uri, path in files.items())
    for paths in (found.files, found.companions):
        paths[:] = [files.get(str(path), path) for path in paths]


def _why_nothing(
    folder: Location, left_out: Sequence[Reject], layouts: Collection[Layout], readers: Sequence[Reader]
) -> str:
    """The sentence of an error, with every reason, how often it occurs and what to do."""
    # Images, or a folder of them, that may be of several eyes.
    single = "line" not in layouts and any(
        reject.code in ("single_image", "mixed_images") or (reject.code == "missing_spacing" and is_folder(reject.uri))
        for reject in left_out
    )
    hint = _OF_SINGLE if single else ""
    if readers:  # only from Python, where no health page shows what the reader did wrong
        damaged = (reject for reject in left_out if reject.code == "damaged_file")
        hint += f"; for example {next(damaged, left_out[0]).sentence}"
    return f"{folder}: none of {len(left_out)} files is an acceptable OCT volume: {_reasons(left_out)}{hint}"


def _reasons(left_out: Sequence[Reject]) -> str:
    counts = count_words(reject.code for reject in left_out)
    return ", ".join(f"{n} {code} ({REASONS[code].meaning}; {REASONS[code].fix})" for code, n in counts.items())
