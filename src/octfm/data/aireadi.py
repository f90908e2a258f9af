"""The tables of an AI-READI data set: manifest.tsv (one row per file) and participants.tsv (one row per person), v2 and v3."""

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from octfm.data.archive import open_file, unpacked_paths
from octfm.errors import OctfmError, ReadError

_PERSON = ("person_id", "participant_id")  # v3, v2
_IDENTIFIER = re.compile(
    r"(^|_)(name|surname|birth|birthdate|birthday|dob|address|street|phone|telephone|email|mail|mrn|ssn|insurance)(_|$)"
)


class TableError(OctfmError):
    """A manifest or participants table that cannot be trusted."""


@dataclass(frozen=True)
class ManifestRow:
    """What the manifest states about one file; empty strings where it states nothing."""

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
    path: str = ""
    """Absolute."""


@dataclass(frozen=True)
class Tables:
    by_uid: dict[str, ManifestRow] = field(default_factory=dict)
    by_path: dict[str, ManifestRow] = field(default_factory=dict)
    participants: dict[str, dict[str, str]] = field(default_factory=dict)
    """Columns of participants.tsv by participant, without direct identifiers."""
    unpacked_from: dict[str, str] = field(default_factory=dict)
    """Member of an archive that each unpacked file came from: the tables know it by the archive's place."""

    def find(self, uri: str, sop_instance_uid: str) -> ManifestRow | None:
        """The row of this file: listed at its path with its UID, else under its UID anywhere, else at its path."""
        at_path = self.at_path(uri)
        if at_path is not None and at_path.sop_instance_uid == sop_instance_uid:
            return at_path
        return self.by_uid.get(sop_instance_uid) or at_path

    def at_path(self, uri: str) -> ManifestRow | None:
        """The row of whatever lies here. A member of an archive is listed where unpacking would put it."""
        return next((self.by_path[path] for path in unpacked_paths(self.unpacked_from.get(uri, uri)) if path in self.by_path), None)


def read_tables(root: Path, companions: Iterable[Path]) -> Tables:
    """Every manifest.tsv and participants.tsv below `root`; above it too where `root` lies inside the retinal_oct folder."""
    found = sorted(companions)
    inside = next((parent for parent in (root, *root.parents) if parent.name == "retinal_oct"), None)
    if inside is not None:
        found += [path for path in (inside / "manifest.tsv", inside.parent / "participants.tsv") if path.is_file() and path not in found]
    tables = Tables()
    for path in found:
        if path.name == "manifest.tsv":
            _read_manifest(path, tables)
        elif path.name == "participants.tsv":
            _read_participants(path, tables)
    return tables


def _read_manifest(path: Path, tables: Tables) -> None:
    for row in _rows(path):
        listed = row.get("filepath", "")
        # "/retinal_oct/..." starts at the folder that holds retinal_oct.
        base = path.parent.parent if listed.lstrip("/").startswith(f"{path.parent.name}/") else path.parent
        shape = [_number(row.get(column, "")) for column in ("number_of_frames", "height", "width")]
        frames, height, width = (int(count) if count else 0 for count in shape)
        in_plane = [float(mm) for mm in re.findall(r"\d*\.?\d+(?:[eE][-+]?\d+)?", row.get("pixel_spacing", ""))]
        entry = ManifestRow(
            participant=_first(row, _PERSON),
            laterality=row.get("laterality", ""),
            manufacturer=row.get("manufacturer", ""),
            model=row.get("manufacturers_model_name", ""),
            region=row.get("anatomic_region", ""),
            shape=(frames, height, width) if all(shape) else None,
            in_plane_mm=(in_plane[0], in_plane[1]) if len(in_plane) == 2 else None,
            slice_thickness_mm=_number(row.get("slice_thickness", "")),
            sop_instance_uid=row.get("sop_instance_uid", ""),
            path=str(base / listed.lstrip("/")) if listed else "",
        )
        if entry.sop_instance_uid:
            tables.by_uid[entry.sop_instance_uid] = entry
        if entry.path:
            tables.by_path[entry.path] = entry


def _read_participants(path: Path, tables: Tables) -> None:
    for row in _rows(path):
        participant = _first(row, _PERSON)
        if not participant:
            raise TableError(f"{path}: expected a column {' or '.join(_PERSON)} with a value in every row, got columns {', '.join(row)}")
        labels = {key: value for key, value in row.items() if key not in _PERSON and not _IDENTIFIER.search(key.lower())}
        known = tables.participants.setdefault(participant, labels)
        if known.get("recommended_split") != labels.get("recommended_split"):
            raise TableError(
                f"{path}: participant {participant} is in {known.get('recommended_split')!r} and in {labels.get('recommended_split')!r}; "
                "a participant has one recommended_split, correct the table"
            )


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with open_file(path, whole=True) as file, io.TextIOWrapper(file, newline="", encoding="utf-8-sig", errors="replace") as text:
            rows = list(csv.DictReader(text, delimiter="\t"))
    except (OSError, ReadError, csv.Error) as error:
        raise TableError(f"{path}: cannot be read as a tab-separated table: {error}; fetch it again") from error
    return [{str(key).strip(): (value or "").strip() for key, value in row.items() if isinstance(value, str | None)} for row in rows]


def _first(row: dict[str, str], columns: tuple[str, ...]) -> str:
    return next((row[column] for column in columns if row.get(column)), "")


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < 1e6 else None
