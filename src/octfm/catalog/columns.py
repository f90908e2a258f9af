"""Map fields to table columns: AI-READI's names by default, a user's by a map such as participant=pid,file=path."""

import csv
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from octfm.errors import ConfigError, OctfmError, ReadError
from octfm.io.archive import open_file
from octfm.io.location import Location

FIELDS: dict[str, tuple[str, ...]] = {
    "participant": ("person_id", "participant_id", "participant"),  # AI-READI v3, v2; octfm's own tables
    "file": ("filepath",),
    "sop_instance_uid": ("sop_instance_uid",),
    "laterality": ("laterality",),
    "manufacturer": ("manufacturer",),
    "model": ("manufacturers_model_name",),
    "region": ("anatomic_region",),
    "frames": ("number_of_frames",),
    "height": ("height",),
    "width": ("width",),
    "pixel_spacing": ("pixel_spacing",),
    "slice_thickness": ("slice_thickness",),
    "spacing_mm": ("spacing_mm",),
    "split": ("recommended_split",),
    "site": ("clinical_site",),
    "study_group": ("study_group",),
    "diagnosis": ("diagnosis",),
    "age": ("age",),
}
"""Field that octfm reads from tables -> its default column names; the first of them with a value in a row is read."""

_IDENTIFIER = re.compile(
    r"(^|_)((first|last|full|family|given|patient|sur)?name|(date_?of_?)?birth\w*|dob|address|street|(tele)?phone"
    r"|(e_?)?mail|mrn|ssn|insurance|zip_?code|post(al)?_?code)(_|$)"
)


class TableError(OctfmError):
    """A manifest or participants table that contradicts itself, lacks a column or cannot be read."""


@dataclass(frozen=True)
class Columns:
    """A map from fields to the columns of one data set; empty for AI-READI's own names."""

    of_field: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(texts: Iterable[str]) -> "Columns":
        """From texts of `field=column` pairs separated by commas. Raises ConfigError."""
        found: dict[str, str] = {}
        for pair in (pair.strip() for text in texts for pair in text.split(",")):
            name, equals, column = (part.strip() for part in pair.partition("="))
            if not (name and equals and column):
                raise ConfigError(
                    f"--columns: expected field=column pairs such as participant=pid,file=path, got {pair!r}"
                )
            if name not in FIELDS:
                raise ConfigError(f"--columns: unknown field {name}; {nearest(name, list(FIELDS), 'fields')}")
            if found.setdefault(name, column) != column:
                raise ConfigError(f"--columns: {name} is mapped to {found[name]} and to {column}; give it once")
        return Columns(found)

    def value(self, row: Mapping[str, str], name: str) -> str:
        """The field's text in this row, empty if the row has none."""
        mapped = self.of_field.get(name)
        return next((row[column] for column in ((mapped,) if mapped else FIELDS[name]) if row.get(column)), "")

    def present(self, header: Iterable[str], name: str) -> bool:
        """Whether a table with these columns has the field."""
        mapped = self.of_field.get(name)
        return not set((mapped,) if mapped else FIELDS[name]).isdisjoint(header)

    def check(self, headers: Mapping[str, list[str]]) -> None:
        """Raises TableError for a mapped column that no table has. `headers`: columns of each table by its path."""
        known = list(dict.fromkeys(column for columns in headers.values() for column in columns))
        for name, column in self.of_field.items():
            if column not in known:
                where = " and ".join(headers)
                raise TableError(f"{where}: no column {column} for {name}; {nearest(column, known, 'columns')}")

    def labels(self, row: Mapping[str, str]) -> dict[str, str]:
        """All other columns of a person's row, under AI-READI's names, without direct identifiers."""
        names = {column: FIELDS[name][0] for name, column in self.of_field.items()}
        ids = {self.of_field["participant"]} if "participant" in self.of_field else set(FIELDS["participant"])
        return {
            names.get(column, column): value
            for column, value in row.items()
            if column not in ids and not is_identifier(column)
        }


def is_identifier(column: str) -> bool:
    """Whether a column's name is that of a direct identifier: PatientName, date of birth, e-mail, ..."""
    # PatientName -> Patient_Name
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", column)
    return bool(_IDENTIFIER.search(re.sub(r"[^a-z0-9]+", "_", words.lower())))


def read_rows(path: Location, delimiter: str | None = None) -> list[dict[str, str]]:
    """The rows of a CSV or TSV, stripped of spaces. Raises TableError.

    Default delimiter: comma, semicolon or tab, whichever the header line has most of.
    """
    try:
        with (
            open_file(path, whole=True) as file,
            # Excel writes a byte order mark, and other programs Latin-1: a damaged label is better than no table.
            io.TextIOWrapper(file, newline="", encoding="utf-8-sig", errors="replace") as text,
        ):
            first = text.readline()
            if re.search(r"[\0-\x08\x0e-\x1f]", first):
                raise TableError(f"{path}: expected a CSV or TSV of text, got other bytes; export the table as text")
            delimiter = delimiter or max(",;\t", key=first.count)
            text.seek(0)
            rows = list(csv.DictReader(text, delimiter=delimiter))
    except (OSError, ReadError, csv.Error) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise TableError(f"{path}: cannot be read as a table: {reason}; check the path, or fetch it again") from error
    return [
        {str(key).strip(): (value or "").strip() for key, value in row.items() if isinstance(value, str | None)}
        for row in rows
    ]


def nearest(word: str, known: list[str], kind: str) -> str:
    """For an error: the known name that may have been meant, or else all of them after `kind`, such as `columns`."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in known}
    close = get_close_matches(re.sub(r"[^a-z0-9]", "", word.lower()), list(plain), n=1, cutoff=0.5)
    return f"did you mean {plain[close[0]]}?" if close else f"{kind}: {', '.join(known) or 'none'}"
