"""Axial lengths of many eyes, from a table of biometry."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeVar

from octfm.catalog.labels import as_number, read_labels, stated
from octfm.catalog.participants.ids import person_key
from octfm.errors import EvaluationError, one_line
from octfm.layers.corrections import AXIAL_LENGTH_MM
from octfm.layers.zones import as_read, columns_in, read_rows
from octfm.volume.volume import Volume

COLUMNS = ("axial_length_mm", "axial_length")
K = TypeVar("K")


@dataclass(frozen=True)
class AxialLengths:
    """The axial length in mm of each scan, eye or person that a table names."""

    path: Path
    by_source: Mapping[str, float] = field(default_factory=dict)
    """Absolute path of a scan → length."""
    by_uid: Mapping[str, float] = field(default_factory=dict)
    by_eye: Mapping[tuple[str, str | None], float] = field(default_factory=dict)
    """(`person_key`, eye) → length."""
    has_eyes: bool = False
    """Whether the table has a column of eyes; without one, the eye is None throughout `by_eye`."""
    first_person: str = ""
    """The id in the first row that names a participant, as it is spelt there."""

    def __post_init__(self) -> None:
        if not (self.by_source or self.by_uid or self.by_eye):
            raise EvaluationError(f"{self.path}: states no axial length of a scan, an eye or a person; fill it in")

    def of(self, volume: Volume) -> float | None:
        """The length for this scan; None if the table states none."""
        own = self.by_source.get(_place(volume.source), self.by_uid.get(volume.acquisition))
        if own is not None or volume.participant == "unknown":
            return own
        return self.by_eye.get((person_key(volume.participant), volume.laterality if self.has_eyes else None))

    def names_none(self, scans: Mapping[str, str]) -> bool:
        """Whether none of these scans (source → participant, empty if only its file says) can have a length, as far as
        that is known before they are read."""
        if self.by_source:
            return self.by_source.keys().isdisjoint(map(_place, scans))
        people = {person for person, _ in self.by_eye}
        return bool(people) and all(who and person_key(who) not in people for who in scans.values())

    @property
    def example(self) -> str:
        """The first scan with a length, or the first participant."""
        return one_line(next(chain(self.by_source, self.by_uid), self.first_person))


def read_axial_lengths(path: Path) -> AxialLengths:
    """Read a CSV with `axial_length_mm` (or `axial_length`), and `source` as in a table of octfm segment, else a SOP
    Instance UID, else a participant, with `laterality` if eyes differ. A length may be missing.

    Raises EvaluationError for a table without such columns or any length, a length of no eye, and rows that contradict
    each other.
    """
    rows = read_rows(path, (), "a table of axial lengths")
    column = next((name for name in COLUMNS if name in rows[0]), None)
    if column is None:
        raise EvaluationError(
            f"{path}: expected a column axial_length_mm, found {columns_in(rows[0])}; rename the column that has the "
            "axial lengths"
        )
    if "source" in rows[0]:
        by_source: dict[str, float] = {}
        for row in rows:
            place, length = _place(row["source"].strip()), _length(row[column], f"{path}: {row['source']}: {column}")
            if length is not None and by_source.setdefault(place, length) != length:
                raise EvaluationError(f"{path}: {row['source']} has two axial lengths; which of them is meant?")
        return AxialLengths(path, by_source=by_source)
    table = read_labels(path)
    if table.acquisition_column is not None:
        labels = {uid: label for uid, (label, _) in table.by_uid(column).items()}
        return AxialLengths(path, by_uid=_lengths(labels, path, column))
    by_eye = _lengths(table.by_eye(column), path, column)
    first = next((name for row in table.rows if (name := row[table.participant_column or ""].strip())), "")
    return AxialLengths(path, by_eye=by_eye, has_eyes=table.laterality_column is not None, first_person=first)


def _lengths(labels: Mapping[K, str | None], path: Path, column: str) -> dict[K, float]:
    lengths = {key: _length(label or "", f"{path}: {column}") for key, label in labels.items()}
    return {key: length for key, length in lengths.items() if length is not None}


def _length(text: str, where: str) -> float | None:
    (low, high), value = AXIAL_LENGTH_MM, stated(text)
    length = None if value is None else as_number(value.replace(",", ".")) or 0.0
    if length is not None and not low <= length <= high:
        raise EvaluationError(f"{where}: expected {low} to {high} mm or nothing, got {one_line(text)[:80]!r}")
    return length


def _place(source: str) -> str:
    return os.path.abspath(as_read(source))  # noqa: PTH100
