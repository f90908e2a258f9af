"""Tables that come with the images, with a row per file or per person: AI-READI's (v2 and v3), or a user's own."""

import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from octfm.addresses import expect_place
from octfm.catalog.columns import FIELDS, OF_FILES, Columns, Row, TableError, clean_id, composed, read_rows, rounded
from octfm.catalog.labels import as_number, stated, with_points
from octfm.catalog.participants.ids import person_key
from octfm.errors import ConfigError
from octfm.formats.names import may_be_an_eye, may_be_labels
from octfm.io.archive import unpacked_paths
from octfm.io.location import BucketPath, Location, is_remote, location
from octfm.io.progress import say

_NUMBER = re.compile(r"\d*\.?\d+(?:[eE][-+]?\d+)?")
_DRIVE = re.compile(r"^[A-Za-z]:")
MOST_NAMED = 10
"""Columns that a message names."""
_ELSEWHERE = re.compile(r"^([A-Za-z]:)?[\\/]|^[A-Za-z]:")
"""An absolute path, possibly of another computer: with a drive letter, on a share (UNC), or from the root."""


@dataclass(frozen=True)
class ManifestRow:
    """The facts of one file in a manifest; empty strings or None where it states nothing."""

    participant: str = ""
    laterality: str = ""
    manufacturer: str = ""
    model: str = ""
    region: str = ""
    shape: tuple[int, int, int] | None = None
    in_plane_mm: tuple[float, float] | None = None
    """(axial, lateral)."""
    slice_thickness_mm: float | None = None
    sop_instance_uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of this file, under AI-READI's names."""

    @property
    def spacing_mm(self) -> tuple[float, float, float] | None:
        """(dz, dy, dx) if the row states all three."""
        if self.in_plane_mm is None or self.slice_thickness_mm is None:
            return None
        return (self.slice_thickness_mm, *self.in_plane_mm)


@dataclass(frozen=True)
class Tables:
    """All tables of a scan: rows of files by SOP Instance UID and by path, and columns of participants."""

    by_uid: dict[str, ManifestRow] = field(default_factory=dict)
    by_path: dict[str, ManifestRow] = field(default_factory=dict)
    participants: dict[str, dict[str, str]] = field(default_factory=dict)
    """Columns of participants.tsv by `person_key`, without direct identifiers."""
    unpacked_from: dict[str, str] = field(default_factory=dict)
    """Unpacked file -> member of the archive it came from: tables list files by the archive's location."""
    own: Location | None = None
    """The user's own table of files, if one was given."""
    unfound: dict[str, str] = field(default_factory=dict)
    """File of a row of `own` that is no single file of the scan -> SOP Instance UID of that row."""

    def find(self, uri: str, sop_instance_uid: str) -> ManifestRow | None:
        """The row of a file: the one at its path if the UID agrees, else any with its UID, else the one at its path."""
        at_path = self.at_path(uri)
        if at_path is not None and at_path.sop_instance_uid == sop_instance_uid:
            return at_path
        return self.by_uid.get(sop_instance_uid) or at_path

    def at_path(self, uri: str) -> ManifestRow | None:
        """The row that lists this path. A member of an archive is listed at the path that unpacking would give it."""
        paths = unpacked_paths(self.unpacked_from.get(uri, uri))
        return next((self.by_path[path] for path in paths if path in self.by_path), None)

    def labels_of(self, participant: str) -> dict[str, str]:
        return self.participants.get(person_key(participant), {})


def read_tables(root: Location, companions: Iterable[Location], skip: Iterable[str]) -> Tables:
    """All manifest.tsv and participants.tsv below `root`, and above it if `root` lies inside a retinal_oct folder.

    `skip`: names of tables that the user's own replace.
    """
    found = sorted(companions)
    inside = next((parent for parent in (root, *root.parents) if parent.name == "retinal_oct"), None)
    if inside is not None:
        above = (inside / "manifest.tsv", inside.parent / "participants.tsv")
        found += [path for path in above if path.is_file() and path not in found]
    tables = Tables()
    for path in found:
        if path.name in skip:
            continue
        if path.name == "manifest.tsv":
            _read_manifest(path, tables)
        elif path.name == "participants.tsv":
            _add_participants(read_rows(path, "\t"), Columns(), tables, path)
    return tables


def read_own_tables(
    root: Location,
    table: Location | None,
    participants: Location | None,
    columns: Columns,
    tables: Tables,
    found: Iterable[str],
) -> Tables:
    """Add a user's own tables: `table` has one row per file, `participants` one per person; either may be None.

    Files are named by absolute path, by path relative to `root` or to the table's folder, or by SOP Instance UID. Paths
    from another computer (backslashes, drives, shares, another case) count if exactly one of the files `found` below
    `root` fits. Raises TableError for missing columns, impossible values and rows that contradict each other.
    """
    files, people = (read_rows(path) if path is not None else [] for path in (table, participants))
    given = [(path, rows) for path, rows in ((table, files), (participants, people)) if path is not None]
    for path, rows in given:
        if not rows:
            raise TableError(f"{path}: no rows; expected a header line and at least one row")
    columns.check({str(path): list(rows[0]) for path, rows in given})
    if table is not None:
        tables = replace(tables, own=table)
        unread, likely = columns.unread(list(files[0]))
        perhaps = f", perhaps {likely}" if likely else ""
        if not (columns.present(files[0], "file") or columns.present(files[0], "sop_instance_uid")):
            raise TableError(
                f"{table}: neither a column of files nor of SOP Instance UIDs; name one with --columns file=COLUMN or "
                f"sop_instance_uid=COLUMN{perhaps}; columns: {', '.join(files[0])}"
            )
        if unread and table != participants:
            more = f" and {len(unread) - MOST_NAMED} more" if len(unread) > MOST_NAMED else ""
            say(
                f"{table}: not read: {', '.join(unread[:MOST_NAMED])}{more}; --columns says what a column holds"
                f"{perhaps}; --participants TABLE takes all that is known about a person"
            )
        listed = Listed.of(root, found)
        labelled = [{FIELDS[name][0]: cell for name in OF_FILES if (cell := columns.value(row, name))} for row in files]
        _read_decimal_commas(labelled)
        for row, labels in zip(files, labelled, strict=True):
            entry = replace(_manifest_row(row, columns), labels=labels)
            _add_file(row, entry, columns, tables, root, table, listed)
    if participants is not None:
        _add_participants(people, columns, tables, participants)
    return tables


def _add_file(
    row: Row,
    entry: ManifestRow,
    columns: Columns,
    tables: Tables,
    root: Location,
    table: Location,
    present: "Listed",
) -> None:
    if not may_be_an_eye(entry.laterality):
        raise TableError(
            f"{table}: line {row.line}: laterality is {entry.laterality!r}; "
            "expected R, L, OD, OS, right, left, or nothing"
        )
    if remark := rounded(entry.participant):
        raise TableError(f"{table}: line {row.line}: participant {remark}")
    whole = entry.spacing_mm and min(entry.spacing_mm) > 0
    for name, read, expected in (
        ("spacing_mm", whole, "dz dy dx, three numbers in mm"),
        ("pixel_spacing", entry.in_plane_mm, "dy dx, two numbers in mm"),
        ("slice_thickness", entry.slice_thickness_mm, "one number in mm"),
    ):
        # A thickness of 0 states none.
        if (text := stated(columns.value(row, name))) and not read and as_number(_with_points(text)) != 0:
            raise TableError(f"{table}: line {row.line}: {name} is {text!r}; expected {expected}, or nothing")
    listed = columns.value(row, "file")
    if entry.sop_instance_uid and "file" not in columns.of_field and not row.get("filepath"):
        listed = ""  # the UID says it; a column that happens to be called file may name all alike
    try:
        if listed:
            expect_place(listed)
    except ConfigError as error:
        raise TableError(f"{table}: line {row.line}: {error}") from None
    places = [str(location(listed))] if listed.startswith("/") or is_remote(listed) else []
    beside = table if isinstance(table, BucketPath) else Path(os.path.abspath(table))  # noqa: PTH100
    places += [str(base / listed.lstrip("/")) for base in (root, beside.parent)] if listed else []
    # Paths of another computer are tried only if the path fits no file of this one.
    if listed and not present.places.intersection(places):
        fitting = present.fitting(listed)
        places += fitting
        if not fitting:
            tables.unfound[listed] = entry.sop_instance_uid
    for known, key in [(tables.by_path, place) for place in places] + [(tables.by_uid, entry.sop_instance_uid)]:
        if key and known.setdefault(key, entry) != entry:
            raise TableError(
                f"{table}: line {row.line}: contradicts an earlier line about {key}; keep one row per file"
            )


@dataclass(frozen=True)
class Listed:
    """The files that a scan has found, for lookup by paths that another computer wrote."""

    places: frozenset[str]
    below_root: tuple[tuple[tuple[str, ...], bool, str, str], ...]
    """Sorted, so that paths that end alike are neighbours: the case-folded, composed parts of a path below the root,
    last first; whether its file name is whole or without its ending; the full path; the file's own uri, because a
    member of an archive has three paths. A path occurs with its whole file name and, if that has an ending, once more
    without it."""

    @staticmethod
    def of(root: Location, found: Iterable[str]) -> "Listed":
        found = list(found)
        # A file that was unpacked next to its archive stands for itself.
        own = {place: uri for uri in found for place in unpacked_paths(uri)} | {uri: uri for uri in found}
        below = []
        for place, uri in own.items():
            inside = composed(place.removeprefix(str(root))).casefold()
            parts = tuple(part for part in inside.split("/") if part)
            if place.startswith(str(root)) and parts:
                below.append((parts[::-1], True, place, uri))
                if (stem := PurePath(parts[-1]).stem) != parts[-1]:
                    below.append(((stem, *parts[-2::-1]), False, place, uri))
        return Listed(frozenset(own), tuple(sorted(below)))

    def fitting(self, listed: str) -> list[str]:
        """The only file that `listed` can mean; empty if none fits, or several fit equally well.

        A file fits if its path ends with all parts of `listed`; or, for an absolute path of another computer, if
        `listed` ends with all parts of the file's path below the root. The ending may be missing where no file has just
        this name, and of an image and its mask the image is meant.
        """
        parts = [part for part in _DRIVE.sub("", listed.replace("\\", "/")).split("/") if part not in ("", ".")]
        wanted = tuple(composed(part).casefold() for part in reversed(parts))
        found = self._beginning_with(wanted) if wanted else []
        common = len(wanted)
        while not found and common > 1 and _ELSEWHERE.match(listed):
            common -= 1
            found = self._beginning_with(wanted[:common], whole=True)
        fits: dict[tuple[bool, bool], dict[str, None]] = defaultdict(dict)
        for whole, place, uri in found:
            # Of files that differ in case only, the one written exactly so is preferred.
            fits[whole, place.endswith("/".join(parts[-common:]))][uri] = None
        best = list(fits[max(fits)]) if fits else []
        if len(best) > 1:
            best = [uri for uri in best if not may_be_labels(uri)]
        return best if len(best) == 1 else []

    def _beginning_with(self, wanted: tuple[str, ...], whole: bool = False) -> list[tuple[bool, str, str]]:
        """Files with these parts, last first; `whole`: and no others."""
        found = []
        for at in range(bisect_left(self.below_root, (wanted,)), len(self.below_root)):
            own, is_whole, place, uri = self.below_root[at]
            if own[: len(wanted)] != wanted or (whole and own != wanted):
                break
            found.append((is_whole, place, uri))
        return found


def _read_manifest(path: Location, tables: Tables) -> None:
    for row in read_rows(path, "\t"):
        listed = row.get("filepath", "")
        # AI-READI lists "/retinal_oct/...": a path from the folder that contains retinal_oct.
        base = path.parent.parent if listed.lstrip("/").startswith(f"{path.parent.name}/") else path.parent
        entry = _manifest_row(row, Columns())
        # By UID and by path: files may have been moved or renamed since the manifest was written.
        if entry.sop_instance_uid:
            tables.by_uid[entry.sop_instance_uid] = entry
        if listed:
            tables.by_path[str(base / listed.lstrip("/"))] = entry


def _manifest_row(row: Mapping[str, str], columns: Columns) -> ManifestRow:
    shape = [_number(columns.value(row, name)) for name in ("frames", "height", "width")]
    frames, height, width = (int(count) if count else 0 for count in shape)
    in_plane, all_three = (
        [float(mm) for mm in _NUMBER.findall(_with_points(columns.value(row, name)))]
        for name in ("pixel_spacing", "spacing_mm")
    )
    thickness = _number(_with_points(columns.value(row, "slice_thickness")))
    if len(all_three) == 3:
        thickness, *in_plane = all_three
    return ManifestRow(
        participant=clean_id(columns.value(row, "participant")),
        laterality=columns.value(row, "laterality"),
        manufacturer=columns.value(row, "manufacturer"),
        model=columns.value(row, "model"),
        region=columns.value(row, "region"),
        shape=(frames, height, width) if all(shape) else None,
        in_plane_mm=(in_plane[0], in_plane[1]) if len(in_plane) == 2 else None,
        slice_thickness_mm=thickness,
        sop_instance_uid=columns.value(row, "sop_instance_uid"),
    )


def _add_participants(rows: Sequence[Row], columns: Columns, tables: Tables, path: Location) -> None:
    spelt: dict[str, str] = {}
    labelled = [columns.labels(row) for row in rows]
    _read_decimal_commas(labelled)
    for row, labels in zip(rows, labelled, strict=True):
        participant = clean_id(columns.value(row, "participant"))
        if not participant:
            wanted = columns.of_field.get("participant") or "person_id or participant_id"
            raise TableError(
                f"{path}: expected a column {wanted} with a value in every row, got columns {', '.join(row)}; "
                "name yours with --columns participant=COLUMN"
            )
        if remark := rounded(participant):
            raise TableError(f"{path}: participant {remark}")
        known = tables.participants.setdefault(person := person_key(participant), {})
        first = spelt.setdefault(person, participant)
        for column, value in labels.items():
            # What one row leaves empty, another may state.
            if value and known.get(column) and known[column] != value:
                who = participant if participant == first else f"{first} (also {participant})"
                raise TableError(
                    f"{path}: {column} of participant {who} is {known[column]!r} and {value!r}; give one row per "
                    "person, and labels of eyes or visits to octfm probe --labels"
                )
            known[column] = known.get(column) or value


def _read_decimal_commas(labelled: Sequence[dict[str, str]]) -> None:
    """Replace decimal commas by points in labels that are numbers in all rows, by column."""
    for column in dict.fromkeys(column for labels in labelled for column in labels):
        with suppress(ValueError):  # thousands, or decimals: they stay as they are
            cells = with_points([labels.get(column, "") for labels in labelled])
            for labels, cell in zip(labelled, cells, strict=True):
                if cell and "," in labels[column]:
                    labels[column] = cell


def _with_points(text: str) -> str:
    """`text` with decimal points, if all its numbers have decimal commas and no comma stands between them."""
    numbers = re.split(r"[\s;\\]+", text.strip("[]() "))
    return text.replace(",", ".") if all(re.fullmatch(r"\d+,\d+", number) for number in numbers) else text


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < 1e6 else None
