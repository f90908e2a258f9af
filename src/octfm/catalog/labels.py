"""A table of labels (CSV or TSV) joined to acquisitions by id, never by order."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from octfm.catalog.columns import FIELDS, Row, TableError, clean_id, composed, read_table, rounded
from octfm.catalog.participants.ids import person_key
from octfm.errors import EvaluationError, one_line
from octfm.formats.names import BOTH, lateralities, may_be_an_eye
from octfm.io.location import local_path

PARTICIPANT_COLUMNS = ("participant_id", *FIELDS["participant"])
"""AI-READI v2, v3, and octfm's own tables."""

ACQUISITION_COLUMNS = ("sop_instance_uid", "acquisition")

LATERALITY = "laterality"
EYE_COLUMNS = ("eye", "side")
"""Columns that may hold the eye of a row, in a table without a column laterality."""

MISSING = frozenset({"", "na", "n/a", "nan", "null", ".", "?", "#n/a", "<na>", "unknown", "missing"})
"""Texts that mean a missing value. Not `none`: a diagnosis of none is a label; nor `-`, which may mean negative."""


@dataclass(frozen=True)
class LabelTable:
    """Rows of text as written in the file; the caller of `join` interprets the values."""

    path: str
    columns: tuple[str, ...]
    """Label columns, without the ids that the table is joined by."""
    rows: tuple[Row, ...]
    participant_column: str | None
    laterality_column: str | None
    acquisition_column: str | None
    orders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Grades, lowest first, of columns whose type states them: ordered categories of pandas."""

    def join(self, column: str, acquisitions: Iterable[tuple[str, str, str | None]]) -> list[str | None]:
        """The label of each (acquisition, participant, laterality); None if the table has none.

        Joined by the finest id in the table: SOP Instance UID, else participant (in any spelling of the id) and
        laterality, else participant. Rows without it are ignored.
        Raises EvaluationError if rows of one id contradict each other, if a UID's row names another participant, or if
        no id of the table matches.
        """
        if column not in self.columns:
            raise EvaluationError(f"{self.path}: no column {column}; label columns: {', '.join(self.columns)}")
        acquisitions = list(acquisitions)
        if self.acquisition_column is not None:
            return self._by_acquisition(column, acquisitions)
        keyed, key_of = self.by_eye(column), {who: person_key(who) for _, who, _ in acquisitions}
        self._expect_a_match(key_of, {key for key, _ in keyed}, self.participant_column or "")
        return [keyed.get((key_of[who], eye if self.laterality_column else None)) for _, who, eye in acquisitions]

    def by_eye(self, column: str) -> dict[tuple[str, str | None], str | None]:
        """(`person_key`, eye) → label; the eye is None where it is not known, and in a table without a column of eyes.

        Raises EvaluationError if rows of one eye contradict each other.
        """
        keyed: dict[tuple[str, str | None], str | None] = {}
        named = [clean_id(row[self.participant_column or ""]) for row in self.rows]
        if remark := next(filter(None, map(rounded, named)), ""):
            raise EvaluationError(f"{self.path}: {self.participant_column} {remark}")
        people, spelt = [person_key(name) for name in named], dict[str, str]()
        eyes = [self._eyes(row) for row in self.rows]
        single = {(person, of[0]) for person, of in zip(people, eyes, strict=True) if len(of) == 1}
        for place, (row, value) in enumerate(zip(self.rows, self._cells(column), strict=True)):
            person, of = people[place], eyes[place]
            first = spelt.setdefault(person, named[place])
            also = "" if named[place] == first else f", the same participant as {first}"
            # Beside a row for each eye, one for both is a third finding, such as the visus with both eyes open.
            if value is None or {(person, "R"), (person, "L")} <= single:
                of = of[-1:]
            for key in [(person, eye) for eye in of] if person else ():
                if keyed.setdefault(key, value) != value:
                    raise EvaluationError(
                        f"{self.path}: line {row.line}: {column} is {value or 'nothing'} for "
                        f"{' '.join(filter(None, (named[place], key[1])))}{also}, an earlier line says "
                        f"{keyed[key] or 'nothing'}; "
                        f"{self._one_row_each(row)}"
                    )
        return keyed

    def _one_row_each(self, row: Mapping[str, str]) -> str:
        """What to do about rows of one id that contradict each other."""
        eye = None if self.laterality_column else next((c for c in self.columns if c.lower() in EYE_COLUMNS), None)
        if eye is not None:
            return f"if {eye} is the eye, write R, L, OD, OS, right or left instead of {row[eye] or 'nothing'}"
        return "keep one row per participant (and eye), or add a sop_instance_uid column"

    def _cells(self, column: str) -> list[str | None]:
        """The value of each row, `with_points`; EvaluationError if a comma may separate thousands."""
        try:
            return with_points([row[column] for row in self.rows])
        except ValueError as doubt:
            raise EvaluationError(f"{self.path}: {column}: {doubt}") from None

    def _by_acquisition(self, column: str, acquisitions: list[tuple[str, str, str | None]]) -> list[str | None]:
        keyed = self.by_uid(column)
        self._expect_a_match({uid: uid for uid, _, _ in acquisitions}, set(keyed), self.acquisition_column or "")
        values: list[str | None] = []
        for acquisition, participant, _ in acquisitions:
            value, named = keyed.get(acquisition, (None, None))
            if named is not None and person_key(named) != person_key(participant):
                raise EvaluationError(
                    f"{self.path}: {acquisition} is participant {named}'s here, {participant}'s in the embeddings; "
                    "the two were made from different cohorts"
                )
            values.append(value)
        return values

    def by_uid(self, column: str) -> dict[str, tuple[str | None, str | None]]:
        """SOP Instance UID → label and participant, None where the table has none.

        Raises EvaluationError if rows of one UID contradict each other.
        """
        keyed: dict[str, tuple[str | None, str | None]] = {}
        for row, value in zip(self.rows, self._cells(column), strict=True):
            uid = row[self.acquisition_column or ""].strip()
            participant = clean_id(row[self.participant_column]) or None if self.participant_column else None
            first, owner = keyed.setdefault(uid, (value, participant)) if uid else (value, participant)
            if (first, person_key(owner or "")) != (value, person_key(participant or "")):
                raise EvaluationError(
                    f"{self.path}: line {row.line}: {column} of {uid} contradicts an earlier line; keep one row per UID"
                )
        return keyed

    def _eyes(self, row: Row) -> tuple[str | None, ...]:
        """The eyes that a row is about, None for one that is not known; of OU both, and those that are not known."""
        eye = row[self.laterality_column] if self.laterality_column else ""
        if not may_be_an_eye(eye):
            raise EvaluationError(
                f"{self.path}: line {row.line}: {self.laterality_column} is {eye}; expected R, L, OD, OS, right, left, "
                "OU, or nothing"
            )
        return ("R", "L", None) if eye.strip().upper() in BOTH else lateralities([eye])[:1]

    def _expect_a_match(self, wanted: Mapping[str, str], known: Collection[str], column: str) -> None:
        """`wanted`: id of the scans → the key that `known` would hold."""
        if wanted and set(known).isdisjoint(wanted.values()):
            example = min(filter(None, (row[column].strip() for row in self.rows)), default="nothing")
            raise EvaluationError(
                f"{self.path}: no {column} matches these scans (table: {example} …, scans: {min(wanted)} …); "
                "is this the label table of the same cohort?",
                public="No row of the label table is about a participant of these embeddings.",
            )


def read_labels(table: Any) -> LabelTable:
    """Read a CSV or TSV with a header line, or take a DataFrame or Series of pandas, whose index may hold the ids, or a
    table of polars or pyarrow. A LabelTable is returned as it is.

    It needs a column participant_id (or person_id, patient_id, subject_id) or sop_instance_uid, in capitals or not; a
    column laterality, or eye if it names eyes, is optional. Raises EvaluationError.
    """
    if isinstance(table, LabelTable):
        return table
    if hasattr(table, "columns") and hasattr(table, "to_pandas"):
        table = table.to_pandas(integer_object_nulls=True)  # else 1 is 1.0 where another cell is missing
    if hasattr(table, "index") and hasattr(table, "to_frame"):
        table = table.to_frame()
    if hasattr(table, "columns") and hasattr(table, "to_dict"):
        if {str(name).strip().lower() for name in table.index.names} & {*PARTICIPANT_COLUMNS, *ACQUISITION_COLUMNS}:
            table = table.reset_index()
        names = tuple(str(name).strip() for name in table.columns)
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise EvaluationError(f"DataFrame: two columns are called {twice}; rename one of them")
        cells = [[_text(cell) for cell in row] for row in table.itertuples(index=False, name=None)]
        # Numbered as in a CSV file of it.
        rows = [Row(zip(names, row, strict=True), number) for number, row in enumerate(cells, start=2)]
        graded = {n: t.categories for n, t in zip(names, table.dtypes, strict=True) if getattr(t, "ordered", False)}
        orders = {name: tuple(filter(None, (stated(_text(c)) for c in grades))) for name, grades in graded.items()}
        return replace(_label_table("DataFrame", names, rows), orders=orders)
    if not isinstance(table, str | PathLike):
        raise EvaluationError(
            f"labels: expected a CSV, a TSV or a DataFrame with a column participant_id, got a {type(table).__name__}"
        )
    path = local_path(table)
    if not path.is_file():
        raise EvaluationError(f"{path}: no such label table; expected a CSV or TSV with a participant_id column")
    try:
        names, rows = read_table(path)
    except TableError as error:
        raise EvaluationError(str(error)) from error
    return _label_table(str(path), tuple(names), rows)


def _label_table(path: str, names: tuple[str, ...], rows: list[Row]) -> LabelTable:
    written = {name.lower(): name for name in names} | {name: name for name in names}
    participant, acquisition = (
        next((written[c] for c in wanted if c in written), None)
        for wanted in (PARTICIPANT_COLUMNS, ACQUISITION_COLUMNS)
    )
    # A column of eyes that is overlooked would give both eyes the label of one.
    laterality = written.get(LATERALITY) or next(
        (written[c] for c in EYE_COLUMNS if c in written and any(lateralities([row[written[c]]])[0] for row in rows)),
        None,
    )
    if participant is None and acquisition is None:
        got = one_line(", ".join(names) or "no header")
        raise EvaluationError(
            f"{path}: expected a column participant_id, person_id or sop_instance_uid, got "
            f"{got if len(got) <= 300 else got[:300] + ' …'}; rename the column{' or index' * (path == 'DataFrame')} "
            "that says whose labels these are"
        )
    if not rows:
        raise EvaluationError(f"{path}: a header without rows; nothing to join")
    ids = {participant, acquisition, laterality}
    return LabelTable(path, tuple(n for n in names if n not in ids), tuple(rows), participant, laterality, acquisition)


def as_number(value: str | None) -> float | None:
    """The text as a finite number; None if it is not one."""
    try:
        # Python reads 40_49, as an age group may be called, as 4049.
        number = float(value) if value is not None and "_" not in value else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def with_points(column: Sequence[str]) -> list[str | None]:
    """The cells of a column, `stated`; in a column of numbers decimal commas become points. Raises ValueError, with a
    number and what to do, if all commas may separate thousands."""
    cells = [stated(cell) for cell in column]
    commas = [cell for cell in cells if cell is not None and "," in cell]
    points = [cell and cell.replace(",", ".") for cell in cells]
    if not commas or any(as_number(point) is None for point in points if point is not None):
        return cells
    if all(re.fullmatch(r"[+-]?[1-9]\d{0,2},\d{3}", cell) for cell in commas):
        cell = commas[0]
        raise ValueError(
            f"is {cell} a decimal number or one in thousands? write numbers with a decimal point, "
            f"{cell.replace(',', '.')} or {cell.replace(',', '')}"
        )
    return points


def one_spelling(texts: Sequence[str]) -> list[str]:
    """The texts; if all are numbers, each in its shortest spelling among them: 1 and 1.0 are one grade."""
    numbers = [as_number(text) for text in texts]
    if None in numbers:
        return list(texts)
    spelt = dict(sorted(zip(numbers, texts, strict=True), key=lambda pair: (-len(pair[1]), pair[1])))
    return [spelt[number] for number in numbers]


def stated(text: str | None) -> str | None:
    """The text of a cell without spaces around it; None if it means a missing value."""
    text = composed((text or "").strip())
    return None if text.lower() in MISSING else text


def bare(label: str) -> str:
    """The label in small letters, with single spaces: equal for spellings of one label."""
    return " ".join(label.lower().split())


def _text(cell: object) -> str:
    """A cell of a DataFrame as a file would have it."""
    text = str(cell)
    return "" if cell is None or text in ("nan", "NaN", "NaT", "<NA>") else text
