"""Tables beside the images: both AI-READI releases, and anybody's own CSV through a column map; a wrong column is
one clear error."""

import csv
import json
import re
import time
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.columns import Columns, TableError, is_identifier, read_rows, read_table
from octfm.catalog.labels import read_labels
from octfm.catalog.participants.people import AmbiguousPeople
from octfm.catalog.scan import scan
from octfm.catalog.tables import Listed
from octfm.errors import ConfigError, EvaluationError
from octfm.phantom import write_phantom
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.vendor_files import write_images, write_npy
from support.volumes import telling_voxels

SPACING_MM = (0.12, 0.0039, 0.0115)
COLUMNS = {"participant": "pid", "file": "path", "laterality": "eye"}
PEOPLE = {"participant": "pid", "split": "set", "diagnosis": "dx"}


@pytest.fixture
def clinic(tmp_path) -> Path:
    """Two people, both eyes, files that say nothing of either; a table of files and a table of people with a
    clinic's own columns."""
    root = tmp_path / "images"
    lines = ["path,pid,eye,room"]
    for number, (pid, side) in enumerate((p, s) for p in ("p1", "p2") for s in "RL"):
        voxels = np.random.default_rng(number).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        name = f"{pid}/{number}.dcm"
        write_oct_dicom(
            root / name, voxels, SPACING_MM, laterality=None, participant=None, sop_instance_uid=f"1.2.{number}"
        )
        lines.append(f"{name},{pid},{'OD' if side == 'R' else 'os'},3")
    (tmp_path / "files.csv").write_text("\n".join(lines) + "\n", encoding="utf-8-sig")  # as spreadsheets save it
    (tmp_path / "people.csv").write_text(
        "pid;set;dx;PatientName;years\np1;train;dme;Planted^Secret;61\np2;test;healthy;Planted^Secret;58\n"
    )
    return root


def rows(catalog: Catalog) -> list[tuple]:
    return [(a.participant, a.laterality, a.split, a.participant_labels, a.flags) for a in catalog.acquisitions]


@pytest.mark.parametrize("zipped", [False, True])
def test_a_cohort_reads_the_same_with_columns_of_release_2_and_3(tmp_path, zipped):
    root = write_phantom(tmp_path / "cohort", 4, 6, size=(8, 64, 48), workers=1, zipped=zipped)
    release_3 = scan(root)
    for path in (root / "retinal_oct" / "manifest.tsv", root / "participants.tsv"):
        text = path.read_text()
        assert text.startswith("person_id\t")
        path.write_text("participant_id" + text.removeprefix("person_id"))
    assert rows(scan(root)) == rows(release_3) and all(flags == () for *_, flags in rows(release_3))
    assert {split for _, _, split, _, _ in rows(release_3)} > {"train"}


def test_files_of_a_table_that_are_not_there_are_said(clinic, capsys):
    table = clinic.parent / "files.csv"
    scan(clinic, table=table, columns=COLUMNS, workers=0)
    assert "ignored" not in capsys.readouterr().err
    with table.open("a") as file:
        file.write("nothere/b.dcm,p9,OD,3\n")
    catalog = scan(clinic, table=table, columns=COLUMNS, workers=0)
    err = capsys.readouterr().err
    assert re.search(r"files.csv: ignored 1 row whose file is not below .* nothere/b.dcm;", err), err
    assert len(catalog.acquisitions) == 4


def test_own_tables_are_joined_by_path_and_by_id(clinic):
    catalog = scan(
        clinic, table=clinic.parent / "files.csv", participants=clinic.parent / "people.csv", columns=COLUMNS | PEOPLE
    )
    assert [(a.participant, a.laterality, a.split) for a in catalog.acquisitions] == [
        ("p1", "R", "train"),
        ("p1", "L", "train"),
        ("p2", "R", "test"),
        ("p2", "L", "test"),
    ]
    first = catalog.acquisitions[0]
    assert first.participant_labels == {"recommended_split": "train", "diagnosis": "dme", "years": "61"}, (
        "no name, AI-READI's words"
    )
    assert first.flags == ("laterality_from_manifest",)


def test_own_table_may_name_files_absolutely_by_uid_or_beside_itself(clinic):
    expected = rows(scan(clinic, table=clinic.parent / "files.csv", columns=COLUMNS))
    lines = (clinic.parent / "files.csv").read_text().splitlines()
    absolute = clinic.parent / "absolute.tsv"
    absolute.write_text("\n".join([lines[0], *(f"{clinic}/{line}" for line in lines[1:])]).replace(",", "\t"))
    assert rows(scan(clinic, table=absolute, columns=COLUMNS)) == expected
    by_uid = clinic.parent / "uids.csv"
    by_uid.write_text(
        "\n".join(["uid,pid,eye,room", *(f"1.2.{i},{line.split(',', 1)[1]}" for i, line in enumerate(lines[1:]))])
    )
    columns = {"participant": "pid", "sop_instance_uid": "uid", "laterality": "eye"}
    assert rows(scan(clinic, table=by_uid, columns=columns)) == expected
    beside = clinic / "p1" / "mine.csv"
    beside.write_text("\n".join([lines[0], *(line.removeprefix("p1/") for line in lines[1:3])]))
    flags = [a.flags for a in scan(clinic, table=beside, columns=COLUMNS).acquisitions]
    assert flags[:2] == [("laterality_from_manifest",)] * 2 and all("not_in_manifest" in others for others in flags[2:])


WRITTEN = {
    "relative": "p1\\0.dcm",
    "dot": ".\\p1\\0.dcm",
    "mixed slashes": "p1/0.dcm".replace("/", "\\/"),
    "drive": "D:\\study\\images\\p1\\0.dcm",
    "drive, slashes": "d:/study/images/p1/0.dcm",
    "share": "\\\\server\\oct\\images\\p1\\0.dcm",
    "another disk": "/mnt/d/study/images/p1/0.dcm",
    "another case": "P1\\0.DCM",
    "drive, another case": "D:\\Images\\P1\\0.DCM",
}


@pytest.mark.parametrize("how", WRITTEN)
def test_paths_that_another_computer_wrote_find_their_files(clinic, how):
    table = clinic.parent / "files.csv"
    name = WRITTEN[how]
    rows = [name, name.replace("p1", "p2").replace("P1", "P2").replace("0.", "2.")]
    table.write_text("path,pid,eye\n" + "".join(f'"{row}",w{n},OD\n' for n, row in enumerate(rows)))
    catalog = scan(clinic, table=table, columns=COLUMNS, workers=0)
    found = {Path(a.uri).name: (a.participant, a.laterality) for a in catalog.acquisitions}
    assert (found["0.dcm"], found["2.dcm"]) == (("w0", "R"), ("w1", "R"))
    assert "not_in_manifest" in next(a.flags for a in catalog.acquisitions if a.uri.endswith("1.dcm"))


def test_paths_that_another_computer_wrote_find_members_of_archives(clinic, tmp_path):
    """A member has three paths, which were taken for three files; macOS has u and two dots for \u00fc in its archives."""
    (tmp_path / "zipped").mkdir()
    with zipfile.ZipFile(tmp_path / "zipped" / "scans.zip", "w") as archive:
        archive.write(clinic / "p1" / "0.dcm", "p1/0.dcm")
        archive.write(clinic / "p2" / "2.dcm", "Mu\u0308ller/2.dcm")
    table = tmp_path / "files.csv"
    table.write_text('path,pid,eye\n"D:\\zipped\\P1\\0.DCM",w0,OD\nM\u00fcller/2.dcm,w1,OD\n', "utf-8")
    catalog = scan(tmp_path / "zipped", table=table, columns=COLUMNS, workers=0)
    assert [a.participant for a in sorted(catalog.acquisitions, key=lambda a: a.participant)] == ["w0", "w1"]


@pytest.mark.parametrize("name", ["0.DCM", "D:\\other\\0.dcm", "x\\p1\\0.dcm", "D:\\p3\\0.dcm"])
def test_a_path_that_fits_no_file_or_several_is_not_guessed(clinic, name):
    for folder in ("p1", "p2"):  # the same name in both, and once in two cases
        (clinic / folder / "twin.dcm").write_bytes((clinic / "p1" / "1.dcm").read_bytes())
    (clinic / "p1" / "0.Dcm").write_bytes((clinic / "p1" / "0.dcm").read_bytes())
    (clinic.parent / "files.csv").write_text(f'path,pid,eye\n"{name}",w,OD\np1\\1.dcm,v,OS\n')
    catalog = scan(clinic, table=clinic.parent / "files.csv", columns=COLUMNS, workers=0)
    assert "w" not in {a.participant for a in catalog.acquisitions}
    assert "v" in {a.participant for a in catalog.acquisitions}


def test_a_path_of_another_computer_means_the_file_and_not_its_copy_in_an_archive(tmp_path):
    """The copy took the row, and the unpacked file was nobody's."""
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x.dcm", b"")
    file, member = str(tmp_path / "a" / "x.dcm"), f"{tmp_path}/a.zip!/x.dcm"
    for found in ([file, member], [member, file]):
        listed = Listed.of(tmp_path, found)
        assert listed.fitting("D:\\export\\a\\x.dcm") == [file] and listed.fitting("x.dcm") == []


@pytest.mark.parametrize("column", ["recommended_split", "split"])
def test_own_tables_take_the_place_of_those_in_the_tree(tmp_path, column):
    """`split` is a split in a table of people as it is in one of files."""
    root = write_phantom(tmp_path / "cohort", 4, 6, size=(8, 64, 48), workers=1)
    people = tmp_path / "people.csv"
    with (root / "participants.tsv").open() as file:
        ids = [row["person_id"] for row in csv.DictReader(file, delimiter="\t")]
    people.write_text(f"participant_id,{column}\n" + "".join(f"{pid},test\n" for pid in ids))
    catalog = scan(root, participants=people)
    assert {a.split for a in catalog.acquisitions} == {"test"}
    assert all(a.participant_labels == {"recommended_split": "test"} and a.flags == () for a in catalog.acquisitions)


def test_a_column_split_that_names_no_splits_is_a_label_of_its_name():
    """As of the folds of a cross-validation."""
    assert Columns().labels({"participant_id": "7", "split": "fold 2"}) == {"split": "fold 2"}


@pytest.mark.parametrize(
    ("columns", "error", "words"),
    [
        (["participant=pid,file=pth"], TableError, "no column pth for file; did you mean path?"),
        (["participant=PID,file=path"], TableError, "no column PID for participant; did you mean pid?"),
        (["partisipant=pid"], ConfigError, "unknown field partisipant; did you mean participant?"),
        (["participant"], ConfigError, "expected field=column pairs"),
        (["file=path", "file=pid"], ConfigError, "file is mapped to path and to pid"),
        (
            ["participant=pid"],
            TableError,
            "neither a column of files nor of SOP Instance UIDs.*columns: path, pid, eye, room",
        ),
        (["participant=pid,file=room"], TableError, "line 4: contradicts an earlier line about .*/3"),
        (["participant=pid,file=path,laterality=room"], TableError, "line 2: laterality is '3'; expected R, L, OD"),
    ],
)
def test_a_wrong_column_is_one_error_that_names_the_nearest(clinic, columns, error, words):
    with pytest.raises(error, match=words) as caught:
        scan(clinic, table=clinic.parent / "files.csv", columns=Columns.parse(columns).of_field)
    assert "\n" not in str(caught.value)


def test_columns_that_nothing_reads_are_named_with_the_fields_they_may_hold(clinic, capsys):
    """A table with eyes, labels and splits under other names lost them in silence."""
    table = clinic.parent / "own.csv"
    header = "File Name,Patient,eye,disease,split,age"
    table.write_text(header + "".join(f"\n{n}.dcm,p{n},OD,dme,train,70" for n in range(4)) + "\n")
    likely = "--columns 'file=File Name,participant=Patient,laterality=eye,label=disease'"
    with pytest.raises(TableError, match=f"SOP Instance UIDs; .*perhaps {likely}; columns: File Name"):
        scan(clinic, table=table)
    rows = read_rows(clinic.parent / "files.csv")
    table.write_text("path,pid,OD/OS,age,scan\n" + "".join(f"{row['path']},{row['pid']},R,70,1\n" for row in rows))
    capsys.readouterr()
    scan(clinic, table=table, columns={"participant": "pid", "file": "path"}, workers=0)
    assert (
        "own.csv: not read: OD/OS, age, scan; --columns says what a column holds, perhaps --columns laterality=OD/OS"
        in (capsys.readouterr().err)
    )
    scan(clinic, table=clinic.parent / "files.csv", columns=COLUMNS | {"label": "room"}, workers=0)
    assert "not read" not in capsys.readouterr().err


def test_a_guess_of_people_names_the_table_that_may_know_better(tmp_path):
    """The guess of one person per file was offered although a column `patient` of the table stood unread."""
    lines = ["file,patient"]
    for number in range(4):
        write_npy(tmp_path / "images" / f"{number}.npy", telling_voxels())
        lines.append(f"{number}.npy,p{number // 2}")
    table = tmp_path / "own.csv"
    table.write_text("\n".join(lines) + "\n")
    with pytest.raises(AmbiguousPeople, match=r"if a column of .*own\.csv names people, say which: --columns partic"):
        scan(tmp_path / "images", table=table, columns={"file": "file"}, nominal_spacing_mm=SPACING_MM, workers=0)


def test_the_names_of_fields_are_columns_without_a_map(clinic, capsys):
    """As --columns and the guide call them."""
    table = clinic.parent / "own.csv"
    text = (clinic.parent / "files.csv").read_text(encoding="utf-8-sig")
    lines = text.replace("path,pid,eye,room", "file,participant,laterality,split").splitlines()
    splits = ["split", *("train" if ",p1," in line else "test" for line in lines[1:])]
    cells = [line.rpartition(",")[0] for line in lines]
    table.write_text("\n".join(f"{own},{split}" for own, split in zip(cells, splits, strict=True)))
    found = {(a.participant, a.laterality, a.split) for a in scan(clinic, table=table, workers=0).acquisitions}
    assert found == {(p, e, s) for p, s in (("p1", "train"), ("p2", "test")) for e in "RL"}
    assert "not read" not in capsys.readouterr().err


def test_a_column_called_file_is_no_place_where_uids_say_which_file_is_meant(clinic):
    table, volumes = clinic.parent / "own.csv", scan(clinic, workers=0).acquisitions
    rows = [f"{a.sop_instance_uid},oct.dcm,q{n}" for n, a in enumerate(volumes)]
    table.write_text("\n".join(["sop_instance_uid,file,participant", *rows]))
    found = {a.sop_instance_uid: a.participant for a in scan(clinic, table=table, workers=0).acquisitions}
    assert found == {a.sop_instance_uid: f"q{n}" for n, a in enumerate(volumes)}


@pytest.mark.parametrize(
    ("columns", "cells", "problem"),
    [
        ("spacing_mm", "0,12 0,0039 0,0115", ""),
        ("pixel_spacing;slice_thickness", "0,0039 0,0115;0,12", ""),
        (r"pixel_spacing;slice_thickness", r"0.0039\0.0115;0.12", ""),
        ("spacing_mm", "0,12,0,0039,0,0115", "spacing_mm is '0,12,0,0039,0,0115'; expected dz dy dx"),
        ("pixel_spacing;slice_thickness", "0,0039,0,0115;0,12", "pixel_spacing is .*; expected dy dx, two numbers in"),
        (
            "pixel_spacing;slice_thickness",
            "0.0039 0.0115;120 µm",
            "slice_thickness is '120 µm'; expected one number in",
        ),
    ],
)
def test_millimetres_with_decimal_commas_are_read_or_refused(tmp_path, columns, cells, problem):
    """As a spreadsheet saves them in most of Europe: they were overlooked, and nominal ones taken without a word."""
    np.save(tmp_path / "a.npy", telling_voxels(shape=(4, 32, 36)))
    table = table_of(tmp_path / "table.csv", f"file;participant;{columns}\na.npy;1001;{cells}\n")
    ways = {"table": table, "nominal_spacing_mm": (0.2, 0.005, 0.02), "workers": 0}
    if problem:
        with pytest.raises(TableError, match=rf"table\.csv: line 2: {problem}"):
            scan(tmp_path, **ways)
    else:
        (row,) = scan(tmp_path, **ways).acquisitions
        assert (row.spacing_mm, row.spacing_source) == ((0.12, 0.0039, 0.0115), "table")


def test_ages_and_labels_with_decimal_commas_are_numbers(tmp_path):
    """Else the covariates, which an encoder has to beat, know fewer ages, and measurements become classes."""
    for name in "abc":
        np.save(tmp_path / f"{name}.npy", telling_voxels(shape=(4, 32, 36)) + np.uint8(ord(name) - 97))
    rows = "a.npy;1,5;305,5;0,0\nb.npy;2,5;299;0\nc.npy;3,5;;\n"  # a thickness of 0 states none
    files = table_of(tmp_path / "files.csv", f"file;participant;label;slice_thickness\n{rows}")
    people = table_of(
        tmp_path / "people.csv", "participant;age;cst;dx\n1,5;63,5;1,234;a,b\n2,5;70;2,100;c\n3,5;n/a;;c\n"
    )
    catalog = scan(tmp_path, table=files, participants=people, nominal_spacing_mm=(0.2, 0.005, 0.02), workers=0)
    columns = ("label", "age", "cst", "dx")
    assert [(a.participant, *map(a.participant_labels.get, columns)) for a in catalog.acquisitions] == [
        ("1,5", "305.5", "63.5", "1,234", "a,b"),
        ("2,5", "299", "70", "2,100", "c"),
        ("3,5", None, "n/a", "", "c"),
    ]


def test_tables_that_fit_none_of_the_files_are_refused(clinic):
    table = clinic.parent / "elsewhere.csv"
    table.write_text("path,pid\nx/1.dcm,p1\n")
    with pytest.raises(TableError, match=r"no row fits any of 4 acquisitions, for example .*x/1\.dcm against "):
        scan(clinic, table=table, columns={"participant": "pid", "file": "path"})
    arrays = clinic.parent / "arrays"
    write_npy(arrays / "a.npy", telling_voxels())
    table.write_text("path,pid,spacing_mm\nb.npy,p1,0.12 0.02 0.05\n")
    refused = (
        r"no row fits any of 1 files, for example .*b\.npy against .*a\.npy; give .* without it: 1 missing_spacing \("
    )
    with pytest.raises(TableError, match=refused):
        scan(arrays, table=table, columns={"participant": "pid", "file": "path"}, workers=0)
    table.write_text("path,pid\nx/1.dcm,p1\n")
    people = clinic.parent / "others.csv"
    people.write_text("pid,set\nsomeone,train\n")
    refused = r"none of its participants \('someone', …\) is among those of the images \('p1', …\); map the column"
    with pytest.raises(TableError, match=refused):
        scan(clinic, participants=people, columns={"participant": "pid"})
    with pytest.raises(
        TableError, match=r"expected a column person_id or participant_id .* --columns participant=COLUMN"
    ):
        scan(clinic, participants=people)
    with pytest.raises(TableError, match="cannot be read as a table: No such file"):
        scan(clinic, table=clinic / "absent.csv", columns=COLUMNS)
    with pytest.raises(CatalogError, match="--table FILE or --participants FILE"):
        scan(clinic, columns=COLUMNS)


def test_columns_that_identify_a_person_are_known_by_name():
    for column in (
        "PatientName",
        "patient_name",
        "Birth Date",
        "DateOfBirth",
        "dateofbirth",
        "DOB",
        "e-mail",
        "Surname",
        "first name",
        "MRN",
        "Nachname",
        "Geburtsdatum",
        "geboren",
        "geb. am",
        "D.O.B.",
        "yob",
        "Born on",
        "born",
        "Fecha Nac.",
        "dt_nasc",
        "nato il",
        "Rufname",
        "Forename",
        "Fornavn",
        "Efternamn",
        "Nazwisko",
        "Imię",
        "PESEL",
        "Tel.",
        "Fax",
        "Mailadresse",
        "Zip",
        "Medical Record Number",
        "Hospital No",
        "Social Security",
        "codice fiscale",
        "姓名",
        "生年月日",
        "出生日期",
        "Имя",
        "Фамилия",
        "дата рождения",
        "Straße",
        "prénom",
        "date_naissance",
        "téléphone",
        "cognome",
        "apellidos",
        "voornaam",
        "initials",
    ):
        assert is_identifier(column), column
    for column in (
        "age",
        "study_group",
        "recommended_split",
        "diagnosis",
        "clinical_site",
        "hba1c",
        "years",
        "genotype",
        "born_preterm",
        "telangiectasia",
        "nac_dose",
    ):
        assert not is_identifier(column), column


def table_of(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "latin-1", "utf-16"])
def test_participants_keep_their_letters_in_any_encoding(tmp_path, encoding):
    """Replaced by one sign for all, Müller and Möller would be one person."""
    text = "pid\tpath\nMüller\t17/1\nMöller\t18/1\n"
    path = table_of(tmp_path / "files.txt", text, encoding)
    assert [row["pid"] for row in read_rows(path)] == ["Müller", "Möller"]
    if encoding == "latin-1":  # \x81 is no letter of Windows' code
        assert [row["pid"] for row in read_rows(table_of(path, text + "M\x81\t19/1\n", encoding))][2] == "M\x81"


def test_names_that_macos_wrote_are_those_of_the_tables(tmp_path):
    """It writes ü in names of folders as u and two dots."""
    folder = unicodedata.normalize("NFD", "Müller")
    for person in (folder, "Schmid"):
        eye = np.random.default_rng(len(person)).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        write_oct_dicom(tmp_path / "scans" / person / "a.dcm", eye, SPACING_MM, participant=None)
    people = table_of(tmp_path / "p.csv", "participant_id,diagnosis\nMüller,AMD\nSchmid,healthy\n")
    files = table_of(tmp_path / "f.csv", "filepath,diagnosis\nMüller/a.dcm,AMD\nSchmid/a.dcm,healthy\n")
    for tables in ({"participants": people}, {"table": files}):
        catalog = scan(tmp_path / "scans", participant_from="{participant}/*", **tables)
        assert {a.participant: a.participant_labels["diagnosis"] for a in catalog.acquisitions} == {
            folder: "AMD",
            "Schmid": "healthy",
        }


def test_a_name_in_two_unicode_forms_is_no_conflict(tmp_path):
    """Sidecar and table have it from one list of folders, as macOS wrote them; of tables the form is changed."""
    name = unicodedata.normalize("NFD", "Müller")
    eye = np.random.default_rng(1).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    write_images(tmp_path / "scans" / "a", eye, participant=name)
    files = table_of(tmp_path / "f.csv", f"filepath,participant_id\na,{name}\n")
    (row,) = scan(tmp_path / "scans", table=files).acquisitions
    assert row.participant == "Müller" and "participant_conflict" not in row.flags


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("pid,cst,diagnosis\na,301,5,AMD\n", "line 2: 4 cells, expected 3 columns"),
        ("pid,cst,diagnosis\na,301\n", "line 2: 2 cells, expected 3 columns"),
        ("pid,diagnosis,diagnosis\na,AMD,healthy\n", "two columns are called diagnosis"),
    ],
)
def test_cells_that_may_be_of_another_column_are_refused(tmp_path, text, problem):
    with pytest.raises(TableError, match=problem):
        read_rows(table_of(tmp_path / "t.csv", text))
    with pytest.raises(EvaluationError, match=problem):
        read_labels(table_of(tmp_path / "t.csv", text.replace("pid", "participant_id")))


@pytest.mark.parametrize("line", ["sep=;", "SEP=;", '"sep=;"', "sep=;;"])
def test_the_line_by_which_excel_states_the_separator_is_no_header(tmp_path, line):
    text = f"\ufeff{line}\r\nfilepath;label\r\nP1/R, first.dcm;AMD\r\n"
    names, rows = read_table(table_of(tmp_path / "t.csv", text))
    assert (names, rows) == (["filepath", "label"], [{"filepath": "P1/R, first.dcm", "label": "AMD"}])


@pytest.mark.parametrize("above", ["", "sep=;\n"])
def test_an_error_names_the_line_of_the_file(tmp_path, above):
    """Whatever is above it: Excel's line, blank rows, a cell of two lines."""
    text = f'{above}participant_id;laterality;label\n\na;R;"two\nlines"\nb;both eyes;AMD\n'
    line = text.count("\n")
    with pytest.raises(EvaluationError, match=f"line {line}: laterality is both eyes"):
        read_labels(table_of(tmp_path / "t.csv", text)).join("label", [("1", "a", "R")])
    for eye in ("R", "L"):
        write_npy(tmp_path / "scans" / "a" / f"{eye}.npy", telling_voxels())
    table = table_of(tmp_path / "t.csv", text.replace("participant_id", "filepath"))
    with pytest.raises(TableError, match=f"line {line}: laterality is 'both eyes'"):
        scan(tmp_path / "scans", table=table)


def test_blank_rows_and_columns_without_a_name_are_left_out(tmp_path):
    """As spreadsheets write them."""
    table = table_of(tmp_path / "t.csv", "participant_id; diagnosis;;\na;AMD;;\n;;;\n\nb;healthy;;\n")
    labels = read_labels(table)
    assert labels.columns == ("diagnosis",)
    assert labels.join("diagnosis", [("1", "a", "R"), ("2", "b", "L")]) == ["AMD", "healthy"]


def two_people(folder: Path, first: str, second: str) -> Path:
    for person, participant in (("P1001", first), ("P1002", second)):
        for eye in ("R", "L"):
            voxels = np.random.default_rng([int(person[1:]), eye == "R"]).integers(0, 255, (4, 32, 36), dtype=np.uint8)
            write_oct_dicom(folder / person / f"{eye}.dcm", voxels, SPACING_MM, participant=participant, laterality=eye)
    return folder


@pytest.mark.parametrize("word", ["ANONYMOUS", "anon", "De-identified", "unknown", "N/A", "---", "ANONYMOUS^PATIENT"])
def test_a_word_for_nobody_is_no_participant(tmp_path, word):
    """As the id of one person it would merge everybody, and take one person's label for all."""
    catalog = scan(two_people(tmp_path, word, word), workers=0)
    assert sorted({a.participant for a in catalog.acquisitions}) == ["P1001", "P1002"]
    assert not any("participant_conflict" in a.flags for a in catalog.acquisitions)


def test_a_pseudonym_is_a_participant(tmp_path):
    catalog = scan(two_people(tmp_path, "ANON-17", "ANON-18"), workers=0)
    assert sorted({a.participant for a in catalog.acquisitions}) == ["ANON-17", "ANON-18"]


def test_a_row_per_eye_is_no_table_of_persons(tmp_path):
    """The first row would be taken for both eyes."""
    folder = two_people(tmp_path / "scans", "a", "b")
    table = table_of(tmp_path / "t.csv", "participant,eye,diagnosis\na,R,AMD\na,L,healthy\nb,R,AMD\n")
    with pytest.raises(TableError, match="eye of participant a is 'R' and 'L'; give one row per person"):
        scan(folder, participants=table, workers=0)
    spelt = table_of(tmp_path / "s.csv", "participant,grade\n07,1\nP-7,2\n")
    with pytest.raises(TableError, match=r"grade of participant 07 \(also P-7\) is '1' and '2'"):
        scan(folder, participants=spelt, workers=0)
    table = table_of(tmp_path / "t.csv", "participant,grade,diagnosis\na,,AMD\na,2,AMD\nb,1,AMD\n")
    labels = {a.participant: a.participant_labels for a in scan(folder, participants=table, workers=0).acquisitions}
    assert labels["a"] == {"grade": "2", "diagnosis": "AMD"}


@pytest.mark.parametrize(("listed", "scanned"), [("007", "7"), ("7", "007"), ("P-7", "p07"), ("7.0", "0007")])
def test_labels_are_those_of_a_person_however_scans_and_tables_spell_the_id(tmp_path, listed, scanned):
    """Spreadsheets drop leading zeros; such a person had no label, or the whole table was refused."""
    text = f"participant_id,diagnosis\n{listed},AMD\n107,healthy\n"
    folder = two_people(tmp_path / "scans", scanned, "107")
    catalog = scan(folder, participants=table_of(tmp_path / "t.csv", text), workers=0)
    of_scans = {a.participant: a.participant_labels["diagnosis"] for a in catalog.acquisitions}
    assert of_scans == {scanned: "AMD", "107": "healthy"}
    labels = read_labels(tmp_path / "t.csv")
    assert labels.join("diagnosis", [("1", scanned, "R"), ("2", "70", "L"), ("3", "0107", None)]) == [
        *("AMD", None, "healthy")
    ]
    again = read_labels(table_of(tmp_path / "u.csv", text + f"{scanned},AMD\n"))
    assert again.join("diagnosis", [("1", "7", "R")]) == ["AMD"]
    twice = read_labels(table_of(tmp_path / "u.csv", text + f"{scanned},healthy\n"))
    named, first = (name.removesuffix(".0") for name in (scanned, listed))
    with pytest.raises(
        EvaluationError,
        match=f"line 4: diagnosis is healthy for {named}, the same participant as {first}, an earlier line says AMD",
    ):
        twice.join("diagnosis", [("1", "7", "R")])


def test_labels_of_two_sites_are_not_mixed(tmp_path):
    text = "participant_id,diagnosis\n1-11,AMD\n11-1,healthy\n111,dme\n"
    folder = two_people(tmp_path / "scans", "1_11", "11_1")
    catalog = scan(folder, participants=table_of(tmp_path / "t.csv", text), workers=0)
    assert {a.participant: a.participant_labels["diagnosis"] for a in catalog.acquisitions} == {
        "1_11": "AMD",
        "11_1": "healthy",
    }
    labels = read_labels(tmp_path / "t.csv")
    assert labels.join("diagnosis", [("1", "01-011", "R"), ("2", "011-01", "R"), ("3", "0111", "R")]) == [
        *("AMD", "healthy", "dme")
    ]


def test_the_table_that_a_spreadsheet_saved_labels_the_scans_that_it_was_made_from(tmp_path):
    """It was refused as one of another cohort, because 0007 had become 7."""
    labels = read_labels(table_of(tmp_path / "t.csv", "participant,acquisition,centre_um\n7,1.2,250\n7,1.2,250\n"))
    assert labels.join("centre_um", [("1.2", "0007", "R")]) == ["250"]
    with pytest.raises(EvaluationError, match=r"1\.2 is participant 7's here, 70's in the embeddings"):
        labels.join("centre_um", [("1.2", "70", "R")])


def test_header_and_table_agree_on_a_person_in_two_spellings(tmp_path):
    write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), (0.12, 0.0039, 0.0115), participant="00001001")
    for named, conflict in (("1001", False), ("10010", True)):
        table = table_of(tmp_path / "t.csv", f"file,participant\na.dcm,{named}\n")
        (row,) = scan(tmp_path, table=table, workers=0).acquisitions
        assert row.participant == named and ("participant_conflict" in row.flags) == conflict


def test_a_word_that_is_no_eye_is_not_ignored(tmp_path):
    text = "participant_id,laterality,diagnosis\na,{},AMD\n"
    with pytest.raises(EvaluationError, match="line 2: laterality is right eye; expected R, L, OD"):
        read_labels(table_of(tmp_path / "t.csv", text.format("right eye"))).join("diagnosis", [("1", "a", "R")])
    for word in ("OD", " right", "r"):
        labels = read_labels(table_of(tmp_path / "t.csv", text.format(word)))
        assert labels.join("diagnosis", [("1", "a", "R"), ("2", "a", "L")]) == ["AMD", None]


@pytest.mark.parametrize("column", ["eye", "Eye", "side", "Laterality"])
def test_a_column_of_eyes_is_one_whatever_its_name(tmp_path, column):
    """The label of a right eye is not the left one's as well."""
    text = f"Participant_ID,{column},diagnosis\na,OD,AMD\n"
    labels = read_labels(table_of(tmp_path / "t.csv", text))
    assert labels.join("diagnosis", [("1", "a", "R"), ("2", "a", "L")]) == ["AMD", None]
    assert labels.columns == ("diagnosis",)
    both = read_labels(table_of(tmp_path / "b.csv", text + "a,OS,healthy\n"))
    assert both.join("diagnosis", [("1", "a", "R"), ("2", "a", "L")]) == ["AMD", "healthy"]
    with pytest.raises(EvaluationError, match=f"line 3: {column} is third; expected R, L, OD"):
        read_labels(table_of(tmp_path / "c.csv", text + "b,third,AMD\n")).join("diagnosis", [("1", "a", "R")])


@pytest.mark.parametrize("column", ["participant_id", "Person_ID", "patient_id", "subject_id"])
def test_people_are_found_by_the_usual_names_of_their_column(tmp_path, column):
    labels = read_labels(table_of(tmp_path / "t.csv", f"{column},diagnosis\na,AMD\n"))
    assert labels.columns == ("diagnosis",) and labels.join("diagnosis", [("1", "a", "R")]) == ["AMD"]


def test_a_column_that_names_no_eye_is_a_label(tmp_path):
    labels = read_labels(table_of(tmp_path / "t.csv", "participant_id,eye,side\na,dry,x\nb,,y\n"))
    assert labels.columns == ("eye", "side") and labels.join("eye", [("1", "a", "R")]) == ["dry"]


def test_eyes_in_words_that_are_not_known_are_named_where_rows_contradict_each_other(tmp_path):
    labels = read_labels(table_of(tmp_path / "t.csv", "participant_id,eye,diagnosis\na,rechts,AMD\na,links,healthy\n"))
    with pytest.raises(EvaluationError, match=r"line 3: .*if eye is the eye, write R, L, .* instead of links"):
        labels.join("diagnosis", [("1", "a", "R")])


@pytest.mark.parametrize("row", ['b,"AMD', '"b,AMD'])
def test_a_quote_that_is_never_closed_does_not_swallow_the_lines_below_it(tmp_path, row):
    text = f"participant_id,diagnosis\na,AMD\n{row}\n" + "".join(f"p{i},healthy\n" for i in range(9))
    with pytest.raises(EvaluationError, match=r"t\.csv: line 3: a quote is opened and never closed"):
        read_labels(table_of(tmp_path / "t.csv", text))
    closed = read_labels(table_of(tmp_path / "u.csv", 'participant_id,diagnosis\na,"AMD,\nwet"\nb,healthy\n'))
    assert [row["diagnosis"] for row in closed.rows] == ["AMD,\nwet", "healthy"]


def test_a_frame_may_hold_ids_in_its_index_and_no_column_twice():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"participant_id": ["a", "b"], "laterality": ["R", "L"], "grade": [1, 2]})
    for ids in (["participant_id"], ["participant_id", "laterality"]):
        assert read_labels(frame.set_index(ids)).join("grade", [("1", "a", "R"), ("2", "b", "R")]) == ["1", None]
    named = frame.rename(columns={"participant_id": "Participant_ID "}).set_index("Participant_ID ")
    assert read_labels(named).join("grade", [("1", "b", "L")]) == ["2"]
    dated = frame.assign(since=[pd.NaT, pd.Timestamp("2026-01-02")])
    assert read_labels(dated).join("since", [("1", "a", "R"), ("2", "b", "L")]) == [None, "2026-01-02 00:00:00"]
    arrow = pyarrow.table({"participant_id": ["a", "b"], "grade": [1, None]})
    assert read_labels(arrow).join("grade", [("1", "a", "R"), ("2", "b", "L")]) == ["1", None], "not 1.0"
    with pytest.raises(EvaluationError, match="DataFrame: no column stage; label columns: grade"):
        read_labels(frame).join("stage", [("1", "a", "R")])
    with pytest.raises(EvaluationError, match="DataFrame: two columns are called grade"):
        read_labels(pd.concat([frame, frame.grade + 1], axis=1))
    with pytest.raises(EvaluationError, match="got grade; rename the column or index that says whose labels these are"):
        read_labels(frame.grade)
    for other in ({"a": 1}, None, 3):
        with pytest.raises(
            EvaluationError, match=f"expected a CSV, a TSV or a DataFrame .* got a {type(other).__name__}"
        ):
            read_labels(other)


def test_a_header_of_another_format_is_not_printed_in_full(tmp_path):
    cells = {"participant_id": {str(i): i for i in range(500)}, "diagnosis": {str(i): "AMD" for i in range(500)}}
    (tmp_path / "t.json").write_text(json.dumps(cells, separators=(",", ":")))
    with pytest.raises(EvaluationError, match="rename the column that says whose labels these are") as error:
        read_labels(tmp_path / "t.json")
    assert len(str(error.value)) < 600


def test_an_id_that_a_spreadsheet_made_a_fraction_is_the_id(tmp_path):
    folder = two_people(tmp_path / "scans", "1001", "1002")
    files = table_of(tmp_path / "f.csv", "participant,filepath\n1001.0,P1001/R.dcm\n")
    people = table_of(tmp_path / "p.csv", "participant,diagnosis\n1001.0,AMD\n1002.0,healthy\n")
    found = scan(folder, table=files, participants=people, workers=0).acquisitions
    assert {a.participant: a.participant_labels["diagnosis"] for a in found} == {"1001": "AMD", "1002": "healthy"}
    assert not any("participant_conflict" in a.flags for a in found)


@pytest.mark.parametrize("rounded", ["1.23457E+11", "1,23457E+11", "1E+11"])
def test_ids_that_a_spreadsheet_has_rounded_do_not_make_one_person_of_two(tmp_path, rounded):
    folder = two_people(tmp_path / "scans", "", "")
    files = f"participant;filepath\n{rounded};P1001/R.dcm\n{rounded};P1002/R.dcm\n"
    people = f"participant;diagnosis\n{rounded};AMD\n"
    for name, text in (("table", files), ("participants", people)):
        with pytest.raises(TableError, match=r"participant 1\S*E\+11 is a number that a spreadsheet has rounded"):
            scan(folder, **{name: table_of(tmp_path / "t.csv", text)}, workers=0)
    with pytest.raises(EvaluationError, match=r"participant 1\S*E\+11 is a number that a spreadsheet has rounded"):
        read_labels(tmp_path / "t.csv").join("diagnosis", [("1", "123456700001", "R")])


cells = st.text("ab1 ,;\t\"'.äöüß", max_size=6)


@settings(max_examples=examples(150))
@given(
    rows=st.lists(st.tuples(cells, cells, cells), max_size=5),
    delimiter=st.sampled_from(",;\t"),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "cp1252", "utf-16"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_table_is_read_as_it_was_written(tmp_path, rows, delimiter, encoding, end):
    with (tmp_path / "t.csv").open("w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator=end)
        writer.writerows([("pid", "path", "eye"), *rows])
    stripped = [tuple(cell.strip() for cell in row) for row in rows]
    assert [tuple(row.values()) for row in read_rows(tmp_path / "t.csv")] == [row for row in stripped if any(row)]


def test_a_file_of_just_this_name_is_meant_before_one_with_an_ending():
    found = Listed.of(Path("/r"), ["/r/IM1", "/r/IM1.png", "/r/1.2.3", "/r/a/1.2.3.4", "/r/p/b.dcm", "/r/masks/b.png"])
    assert [found.fitting(name) for name in ("im1", "D:\\r\\1.2.3", "D:\\x\\P\\b", "B")] == [
        ["/r/IM1"], ["/r/1.2.3"], ["/r/p/b.dcm"], ["/r/p/b.dcm"],
    ]  # fmt: skip


@pytest.mark.timeout(20)
@pytest.mark.parametrize("written", ["P{:05}/OD/scan", "D:\\study\\P{:05}\\OD\\scan.npz"])
def test_paths_of_a_large_cohort_are_found_at_once(written):
    found = Listed.of(Path("/r"), [f"/r/p{n:05}/OD/scan.npz" for n in range(20_000)])
    for n in range(20_000):
        assert found.fitting(written.format(n)) == [f"/r/p{n:05}/OD/scan.npz"]


def test_a_table_of_endless_rows_does_not_fill_the_memory(tmp_path, monkeypatch):
    """Kilobytes in an archive, read by the scan itself."""
    write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), (0.12, 0.0039, 0.0115))
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("participants.tsv", b"person_id\n" + b"1\n" * 20_001)
    monkeypatch.setattr("octfm.catalog.columns.MOST_ROWS", 20_000)
    with pytest.raises(TableError, match="more than 20,000 rows"):
        scan(tmp_path)


def test_cells_with_line_breaks_take_no_longer_than_others(tmp_path):
    """Every one of them was a look at all lines of the table: half an hour for 100,000 findings of two lines."""
    text = "participant_id,finding\n" + "".join(f'P{i},"drusen\nedema"\n' for i in range(10_000))
    start = time.process_time()
    table = read_labels(table_of(tmp_path / "t.csv", text))
    assert len(table.rows) == 10_000 and table.rows[9_999]["finding"] == "drusen\nedema"
    assert time.process_time() - start < 3
    with pytest.raises(EvaluationError, match="line 20002: a quote is opened and never closed"):
        read_labels(table_of(tmp_path / "u.csv", text + 'P1,"dry\nP2,wet\n'))


@pytest.mark.parametrize("both", ["OU", "both", "B"])
def test_a_row_about_both_eyes_is_about_each(tmp_path, both):
    (tmp_path / "labels.csv").write_text(f"participant_id,eye,dx\nP1,OD,amd\nP1,OS,normal\nP2,{both},dme\nP3,,rvo\n")
    table = read_labels(tmp_path / "labels.csv")
    scans = [(f"{p}{eye}", p, eye) for p in ("P1", "P2", "P3") for eye in ("R", "L", None)]
    # Of P3, no eye is named: it may be either.
    assert table.join("dx", scans) == ["amd", "normal", None, "dme", "dme", "dme", None, None, "rvo"]
    (tmp_path / "labels.csv").write_text(f"participant_id,eye,dx\nP2,{both},dme\nP2,OS,rvo\n")
    with pytest.raises(EvaluationError, match="dx is rvo for P2 L, an earlier line says dme"):
        read_labels(tmp_path / "labels.csv").join("dx", scans)


@pytest.mark.parametrize("of_both", ["-0.1", ""])
def test_a_third_row_about_both_eyes_contradicts_neither(tmp_path, of_both):
    """As visus is written: of each eye, and of both together."""
    rows = ["P1,OU," + of_both, "P1,OD,0.2", "P1,OS,0.4", "P2,OU,", "P2,OD,0.3"]
    for order in (rows, rows[::-1]):
        (tmp_path / "labels.csv").write_text("\n".join(["participant_id,eye,logmar", *order]) + "\n")
        scans = [(p + eye, p, eye) for p in ("P1", "P2") for eye in "RL"]
        assert read_labels(tmp_path / "labels.csv").join("logmar", scans) == ["0.2", "0.4", "0.3", None]
    (tmp_path / "labels.csv").write_text("participant_id,eye,logmar\nP2,OU,0.1\nP2,OD,\n")
    with pytest.raises(EvaluationError, match=r"logmar is nothing for P2 R, an earlier line says 0\.1"):
        read_labels(tmp_path / "labels.csv").join("logmar", scans)


@pytest.mark.parametrize("column", ["participant_id", "sop_instance_uid"])
def test_rows_without_an_id_do_not_contradict_each_other(tmp_path, column):
    """Of people who were not scanned, or left over in a spreadsheet."""
    (tmp_path / "labels.csv").write_text(f"{column},dx\nP1,amd\n,dme\n,drusen\nP2,normal\n")
    found = read_labels(tmp_path / "labels.csv").join("dx", [("P2", "P2", "R"), ("P1", "P1", "L"), ("P3", "P3", "L")])
    assert found == ["normal", "amd", None]


def test_a_row_without_an_id_does_not_get_one_of_another_column():
    """The same person would count as two, in two splits."""
    columns = Columns()
    assert columns.value({"participant_id": "", "patient_id": "H12", "subject_id": "3"}, "participant") == ""
    assert columns.value({"patient_id": "", "subject_id": "3"}, "participant") == ""
    assert columns.value({"patient_id": "H12", "subject_id": "3"}, "participant") == "H12"
    assert columns.value({"person_id": "", "participant_id": "7"}, "participant") == "7"  # AI-READI's v2 and v3
    assert Columns({"participant": "pid"}).value({"pid": "8", "patient_id": "H12"}, "participant") == "8"


EYES = {"R": ["R", "OD", "right"], "L": ["L", "OS", "left"], "both": ["OU", "both"], None: [""]}


@settings(max_examples=60)
@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "of": st.sampled_from(["each", "both", "third", "one", "unknown"]),
                "values": st.tuples(*[st.integers(0, 40)] * 3),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    st.randoms(use_true_random=False),
)
def test_every_scan_gets_the_label_of_its_eye_however_a_table_writes_it(tmp_path, people, random):
    """A row for each eye, one for both, a third beside two, for one eye, or without an eye."""
    lines, expected = [], {}
    for number, person in enumerate(people, 1):
        right, left, both = (f"{value / 10:g}" for value in person["values"])
        rows = {
            "each": [("R", right), ("L", left)],
            "both": [("both", both)],
            "third": [("R", right), ("L", left), ("both", both)],
            "one": [("L", left)],
            "unknown": [(None, both)],
        }[person["of"]]
        of = dict(rows)
        for eye in ("R", "L", None):
            expected[f"P{number:03d}", eye] = of.get(eye, of.get("both"))
        lines += [
            (random.choice(["P{:03d}", "p-{}", "P{}"]).format(number), random.choice(EYES[eye]), v) for eye, v in rows
        ]
    random.shuffle(lines)
    comma = random.random() < 0.5
    cells = [f"{who};{eye};{value.replace('.', ',') if comma else value}" for who, eye, value in lines]
    (tmp_path / "labels.csv").write_text("\n".join(["participant_id;laterality;visus", *cells]) + "\n", "utf-8")
    table = read_labels(tmp_path / "labels.csv")
    found = table.join("visus", [(f"1.2.{i}", who, eye) for i, (who, eye) in enumerate(expected)])
    assert dict(zip(expected, found, strict=True)) == expected


def test_only_categories_that_pandas_calls_ordered_are_grades():
    pandas = pytest.importorskip("pandas")
    columns = {name: pandas.Categorical(["mild", "none"], ["none", "mild"], ordered=name == "stage") for name in ("stage", "kind")}  # fmt: skip
    table = read_labels(pandas.DataFrame({"participant_id": ["1", "2"], **columns}))
    assert table.orders == {"stage": ("none", "mild")}


def test_a_scan_that_a_table_gives_to_two_people_is_named_though_its_label_is_one(tmp_path):
    (tmp_path / "l.csv").write_text(
        "sop_instance_uid,participant_id,dx\n1.2,P1,amd\n1.2,P-01,amd\n1.3,P1,amd\n1.3,P2,amd\n"
    )
    with pytest.raises(EvaluationError, match=r"line 5: dx of 1\.3 contradicts an earlier line"):
        read_labels(tmp_path / "l.csv").by_uid("dx")
