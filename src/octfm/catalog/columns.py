"""Map fields to table columns: AI-READI's names by default, a user's by a map such as participant=pid,file=path."""

import contextlib
import csv
import io
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

from octfm.catalog.participants.path_words import plain
from octfm.catalog.participants.splits import parse_split
from octfm.errors import ConfigError, OctfmError, ReadError
from octfm.io.archive import open_file
from octfm.io.location import Location

FIELDS: dict[str, tuple[str, ...]] = {
    # AI-READI v3, v2; octfm's own tables; common names
    "participant": ("person_id", "participant_id", "participant", "patient_id", "subject_id"),
    "file": ("filepath", "file"),
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
    "label": ("label",),
    "split": ("recommended_split", "split"),
    "site": ("clinical_site",),
    "study_group": ("study_group",),
    "diagnosis": ("diagnosis",),
    "age": ("age",),
}
"""Field that octfm reads from tables -> its default column names; the first of them with a value in a row is read."""
MOST_ROWS = 2_000_000
"""Rows of a table: four times the scans of a large cohort. A scan reads tables of archives in its own process, and 12
kB may inflate to six million rows, which take 1.3 GB."""
_COMMON_IDS = ("patient_id", "subject_id")
"""Read only in tables without a better column: one id per person must not come from several."""
LIKELY: dict[str, tuple[str, ...]] = {
    "file": ("filename", "path", "image", "imagepath", "imagename", "img", "scan"),
    "participant": ("patient", "participant", "subject", "person", "pid", "patientid", "patno", "case"),
    "laterality": ("eye", "side", "eyeside", "odos", "lat"),
    "label": ("labels", "class", "classes", "disease", "category", "condition", "grade"),
    "split": ("set", "subset", "partition"),
}
"""Field -> other column names that probably hold it. octfm suggests them in a message and reads them only if told."""
OF_FILES = ("label", "split", "study_group", "diagnosis")
"""Fields that label a person in a table of people, and a file in a table of files."""

_IDENTIFIER = re.compile(
    r"""(^|_)(
    (first|last|full|family|given|patient|sur|fore|f|l)?name|(vor|nach|ruf|familien|geburts|patienten)name
    |(for|etter|efter)?na(vn|mn)|nazwisko|imie|姓名|氏名|名前|имя|фамилия|отчество
    |(voor|achter)?naam|(pre|sobre)?nome?|cognome|nombres?|apellidos?|initial(s|en|es|i)?|iniziali
    |(date_?of_?)?birth\w*|dob|d_o_b|yob|born_on|geb((oren|urt|oorte|_?dat)\w*)?|naissance\w*|ddn|nee?_le
    |f(echa)?_nac|nacimiento|nasc(ita|imento)?|nat[oa]_il|生年月日|出生日期|рождения
    |addresse?s?|adresse?|anschrift|direccion|indirizzo|endereco|street|strasse|wohnort
    |(tele)?(phone|fono?|foon)|tel|fax|handy|mobile?|(e_?)?mail(_?adress?e)?|courriel|correo
    |mrn|medical_record|hosp(ital)?_(no|nr|number)|ssn|social_security|nhs|bsn|dni|cpf|nss|nif|pesel|ahv|svnr|kvnr
    |codice_fiscale|passport|insurance|versicher\w*|krankenkasse|zip(_?code)?|plz|post(al)?_?code|code_postal
    )(_|$)|^born$""",
    re.VERBOSE,
)
"""Words for direct identifiers in English, German, Dutch, French, Italian, Spanish and Portuguese, and the commonest of
Scandinavian languages, Polish, Russian, Chinese and Japanese. It finds only words of this list; what may leave the
clinic is decided by a list of what is known to be safe (octfm.catalog.participants.safe_values)."""


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
        columns = (mapped,) if mapped else FIELDS[name]
        if name == "participant" and (first := next((c for c in columns if c in row), None)) in _COMMON_IDS:
            columns = (first,)
        elif name == "participant":  # a hospital's number would make a second person of one whose other rows have an id
            columns = tuple(column for column in columns if column not in _COMMON_IDS)
        return next((row[column] for column in columns if row.get(column)), "")

    def present(self, header: Iterable[str], name: str) -> bool:
        """Whether a table with these columns has the field."""
        mapped = self.of_field.get(name)
        return not set((mapped,) if mapped else FIELDS[name]).isdisjoint(header)

    def unread(self, header: Sequence[str]) -> tuple[list[str], str]:
        """Columns of a table of files that no field reads, and the --columns for those whose names say what they hold.

        The second is quoted for a shell, and empty if no name says it.
        """
        of_people = ("site", "age")
        known = {*self.of_field.values(), *(c for name in FIELDS if name not in of_people for c in FIELDS[name])}
        others = [column for column in header if column not in known]
        likely = []
        for name, words in LIKELY.items():
            fits = [column for column in others if re.sub(r"[\W_]+", "", plain(column)) in words]
            if fits and not self.present(header, name):
                likely.append(f"{name}={fits[0]}")
        return others, f"--columns {shlex.quote(','.join(likely))}" if likely else ""

    def check(self, headers: Mapping[str, list[str]]) -> None:
        """Raises TableError for a mapped column that no table has. `headers`: columns of each table by its path."""
        known = list(dict.fromkeys(column for columns in headers.values() for column in columns))
        for name, column in self.of_field.items():
            if column not in known:
                where = " and ".join(headers)
                raise TableError(f"{where}: no column {column} for {name}; {nearest(column, known, 'columns')}")

    def labels(self, row: Mapping[str, str]) -> dict[str, str]:
        """Other columns of a person's row, under AI-READI's names, without names of files and direct identifiers."""
        names = {column: FIELDS[name][0] for name, column in self.of_field.items()}
        if "split" not in self.of_field and parse_split(row.get("split", "")) and not row.get("recommended_split"):
            row = {c: v for c, v in row.items() if c != "split"} | {"recommended_split": row["split"]}
        # One table may be given for files and for participants.
        named = ("participant", "file", "sop_instance_uid")
        ids = {c for name in named for c in ([self.of_field[name]] if name in self.of_field else FIELDS[name])}
        return {
            names.get(column, column): value
            for column, value in row.items()
            if column not in ids and not is_identifier(column)
        }


def is_identifier(column: str) -> bool:
    """Whether a column's name is that of a direct identifier: PatientName, Geburtsdatum, e-mail, ..."""
    # PatientName -> Patient_Name
    words = plain(re.sub(r"([a-z])([A-Z])", r"\1_\2", column))
    return bool(_IDENTIFIER.search(re.sub(r"[\W_]+", "_", words)))


class Row(dict[str, str]):
    """Cells by column, and the last line of the file that they are on."""

    def __init__(self, cells: Iterable[tuple[str, str]], line: int):
        super().__init__(cells)
        self.line = line


def read_rows(path: Location, delimiter: str | None = None) -> list[Row]:
    """The rows of a CSV or TSV. Raises TableError."""
    return read_table(path, delimiter)[1]


def read_table(path: Location, delimiter: str | None = None) -> tuple[list[str], list[Row]]:
    """The columns and the rows of a CSV or TSV, stripped of spaces, without blank rows and columns without a name.

    Default delimiter: comma, semicolon or tab, whichever the header line has most of. Raises TableError, also for a row
    of another length than the header: a comma in a number would shift all cells after it.
    """
    try:
        with open_file(path, whole=True) as file:
            text = decoded(file.read())
        first = text.partition("\n")[0]
        if re.search(r"[\0-\x08\x0e-\x1f]", first):
            raise TableError(f"{path}: expected a CSV or TSV of text, got other bytes; export the table as text")
        above = separator_above(first)
        delimiter = delimiter or above or max(",;\t", key=first.count)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        if above:
            next(lines)
        header = [name.strip() for name in next(lines, [])]
        names = [name for name in header if name]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise TableError(f"{path}: two columns are called {twice}; rename one of them")
        rows, end, last = [], lines.line_num, sum(1 for _ in io.StringIO(text, newline=""))
        for cells in lines:
            begin, end = end, lines.line_num
            if not any(cell.strip() for cell in cells):
                continue
            # Only a row that ends with the file; looking at all lines for each cell with a line break would take hours.
            if begin + 1 < end == last and _never_closed(text, begin, lines.dialect.delimiter):
                raise TableError(
                    f"{path}: line {begin + 1}: a quote is opened and never closed, so all lines below it would be one "
                    "cell; close or remove it"
                )
            if len(cells) != len(header):
                raise TableError(
                    f"{path}: line {lines.line_num}: {len(cells)} cells, expected {len(header)} columns as in the "
                    "header; put cells with the separator in them into quotes"
                )
            if len(rows) == MOST_ROWS:
                raise TableError(f"{path}: more than {MOST_ROWS:,} rows; split the table, or move it away")
            pairs = zip(header, cells, strict=True)
            rows.append(Row(((name, cell.strip()) for name, cell in pairs if name), lines.line_num))
    except (OSError, ReadError, csv.Error) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise TableError(f"{path}: cannot be read as a table: {reason}; check the path, or fetch it again") from error
    return names, rows


def separator_above(first: str) -> str:
    """The separator that Excel states in a line of its own above the header; empty if the first line states none."""
    found = re.fullmatch(r'(?:sep=([,;\t])|"sep=([,;\t])")[,;\s]*', first.strip("\ufeff"), re.IGNORECASE)
    return (found[1] or found[2]) if found else ""


def _never_closed(text: str, begin: int, delimiter: str) -> bool:
    """Whether the row after the first `begin` lines opens a quote that ends with the file."""
    lines = list(io.StringIO(text, newline=""))[begin:]
    try:
        next(csv.reader(lines, delimiter=delimiter, strict=True))
    except csv.Error as error:
        return "unexpected end" in str(error)
    return False


def decoded(content: bytes) -> str:
    """Text in UTF-8, in UTF-16 with a byte order mark, as Excel's Unicode text, or else in Windows' Western European
    code. Nothing is replaced: Müller and Möller must not become one participant."""
    for encoding in ("utf-16",) if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig", "cp1252"):
        with contextlib.suppress(UnicodeDecodeError):
            return content.decode(encoding)
    return content.decode("latin-1")  # which has a letter for every byte


def clean_id(text: str) -> str:
    """An id, `composed`, without what spreadsheets add: 1001 becomes 1001.0 if another cell of the column is empty."""
    text = composed(text.strip())
    return text[:-2] if text.endswith(".0") and text[:-2].isdigit() else text


def rounded(participant: str) -> str:
    """A remark on an id that a spreadsheet has rounded, so that many people may have it; empty for any other."""
    if not re.fullmatch(r"\d([.,]\d+)?[eE]\+\d+", participant):
        return ""
    return f"{participant} is a number that a spreadsheet has rounded; write the column again, as text"


def composed(text: str) -> str:
    """The text with ü as one letter: macOS writes it in names of folders as u and two dots, which look the same."""
    return unicodedata.normalize("NFC", text)


def nearest(word: str, known: list[str], kind: str) -> str:
    """For an error: the known name that may have been meant, or else all of them after `kind`, such as `columns`."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()): name for name in known}
    close = get_close_matches(re.sub(r"[^a-z0-9]", "", word.lower()), list(plain), n=1, cutoff=0.5)
    return f"did you mean {plain[close[0]]}?" if close else f"{kind}: {', '.join(known) or 'none'}"
