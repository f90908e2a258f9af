"""`octfm segment CATALOG`: scans with the participant, eye and millimetres that the catalog states."""

import csv
import json
import zipfile
from dataclasses import replace

import numpy as np
import pytest

import octfm
from octfm.catalog.catalog import Catalog
from octfm.catalog.labels import read_labels
from octfm.catalog.scan import scan
from octfm.errors import ConfigError, ReadError
from octfm.layers import table
from octfm.layers.corrections import FORMAT
from octfm.layers.rows import read_table
from octfm.layers.sample import samples
from octfm.trust.device_agreement import device_agreement
from octfm.volume.pixel_copies import fingerprint
from support.command_line import invoke
from support.multifile_dicom import series
from support.stars import lines_of, write_star
from support.stars import scanned as scanned_star
from support.vendor_files import e2e_codes, ends_of, write_e2e, write_vol
from support.volumes import telling_voxels

COLUMNS = ("participant", "laterality", "scanner")


@pytest.fixture
def clinic(tmp_path):
    """Three scans in a format that states nothing: whose they are, and all else, is in a table."""
    (tmp_path / "scans").mkdir()
    rows = [("a.npy", "7", "OD"), ("b.npy", "7", "OS"), ("c.npy", "8", "OD")]
    for i, (name, _, _) in enumerate(rows):
        np.save(tmp_path / "scans" / name, np.roll(telling_voxels(), i, 2))
    write_files(tmp_path, rows)
    return tmp_path


def write_files(folder, rows, spacing="0.4 0.0078 0.023"):
    with (folder / "files.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(
            [("file", "participant", "laterality", "spacing_mm"), *((*r, spacing) for r in rows)]
        )


def scanned(folder):
    assert invoke("scan", folder / "scans", "--table", folder / "files.csv", "--out", folder / "catalog").exit_code == 0
    return folder / "catalog"


def stated(out):
    return [tuple(row[name] for name in COLUMNS[:2]) for row in read_table(out)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rows_have_what_the_catalog_knows_and_files_do_not(clinic, workers, request):
    out = clinic / "table.csv"
    if not workers:  # child processes have the packaged network
        request.getfixturevalue("small_finder")
    alone = invoke("segment", clinic / "scans", "--out", out)
    assert (alone.exit_code == 1 and not out.exists()) or all(row["problem"] for row in read_table(out))
    out.unlink(missing_ok=True)
    shown = invoke("segment", scanned(clinic), "--out", out, *(["--workers", "1"] if workers else []))
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert stated(out) == [("7", "R"), ("7", "L"), ("8", "R")]
    assert not any(row["problem"] for row in read_table(out))
    assert "0 new of 3 scans" in invoke("segment", clinic / "catalog", "--out", out).output


@pytest.mark.slow
def test_only_scans_of_which_a_new_catalog_says_something_else_are_segmented_again(clinic, small_finder):
    out = clinic / "table.csv"
    assert "3 new of 3" in invoke("segment", scanned(clinic), "--out", out).output
    write_files(clinic, [("a.npy", "7", "OD"), ("b.npy", "9", "OS"), ("c.npy", "8", "OS")])
    assert "2 new of 3" in invoke("segment", scanned(clinic), "--out", out).output
    assert stated(out) == [("7", "R"), ("9", "L"), ("8", "L")]
    write_files(clinic, [("a.npy", "7", "OD"), ("b.npy", "9", "OS"), ("c.npy", "8", "OS")], "0.4 0.0078 0.02")
    assert "3 new of 3" in invoke("segment", scanned(clinic), "--out", out).output


def test_the_only_scan_of_a_catalog_is_read_as_the_catalog_says(clinic, small_finder):
    for name in ("b.npy", "c.npy"):
        (clinic / "scans" / name).unlink()
    shown = invoke("segment", scanned(clinic), "--out", clinic / "table.csv")
    assert "1 new of 1 scans" in shown.output, (shown.output, shown.exception)


def test_a_row_begun_by_a_relative_path_stays_one_row(clinic, small_finder, monkeypatch):
    monkeypatch.chdir(clinic)
    invoke("segment", "scans/a.npy", "scans/b.npy", "--out", "table.csv")
    for name in ("a", "b", "c"):
        (clinic / "scans" / f"{name}.json").write_text('{"spacing_mm": [0.4, 0.0078, 0.023]}')
    assert "2 new of 2" in invoke("segment", "scans/a.npy", "scans/b.npy", "--out", "table.csv").output
    assert "3 new of 3" in invoke("segment", scanned(clinic), "--out", "table.csv").output
    assert "0 new of 3" in invoke("segment", clinic / "catalog", "--out", "table.csv").output
    assert [row["participant"] for row in read_table(clinic / "table.csv")] == ["7", "7", "8"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_catalogs_and_scans_may_lie_in_a_bucket(clinic, place, small_finder):
    for file in (clinic / "scans").iterdir():
        (place / "scans" / file.name).write_bytes(file.read_bytes())

    def scanned_again():
        scan = ("scan", str(place / "scans"), "--table", clinic / "files.csv", "--out", str(place / "catalog"))
        assert invoke(*scan).exit_code == 0
        return invoke("segment", str(place / "catalog"), "--out", out).output

    out = clinic / "table.csv"
    assert "3 new of 3" in scanned_again() and stated(out) == [("7", "R"), ("7", "L"), ("8", "R")]
    assert "0 new of 3" in scanned_again()
    write_files(clinic, [("a.npy", "7", "OD"), ("b.npy", "9", "OS"), ("c.npy", "8", "OD")])
    assert "1 new of 3" in scanned_again() and stated(out) == [("7", "R"), ("9", "L"), ("8", "R")]
    files = [str(place / "scans" / name) for name in ("a.npy", "b.npy", "c.npy")]
    assert "0 new of 3" in invoke("segment", *files, "--out", out).output, "what the catalog says is kept"


@pytest.mark.slow
def test_a_scan_given_in_every_way_is_that_of_the_catalog(clinic, small_finder, monkeypatch):
    (clinic / "scans" / "c.npy").rename(clinic / "scans" / "left_c.npy")
    write_files(clinic, [("left_c.npy", "8", "OD")])
    monkeypatch.chdir(clinic)
    given = (clinic / "scans", "scans/left_c.npy", scanned(clinic))
    invoke("segment", *given, "--out", "table.csv")
    assert ("8", "") in stated(clinic / "table.csv"), "table and name contradict each other"


@pytest.mark.slow
def test_a_file_that_is_not_the_one_of_the_catalog_is_named(clinic, small_finder):
    out, catalog = clinic / "table.csv", scanned(clinic)
    np.save(clinic / "scans" / "b.npy", np.load(clinic / "scans" / "b.npy")[1:])
    shown = invoke("segment", catalog, "--out", out)
    assert shown.exit_code == 0 and "; 1 could not be read" in shown.output
    assert [row["problem"].split(":")[0] for row in read_table(out)] == ["", "changed_since_scan", ""]


def test_only_the_file_that_a_catalog_describes_is_read_with_what_it_says(clinic):
    """Another scan under its name would get the participant and eye of the one before."""
    catalog = scan(clinic / "scans", table=clinic / "files.csv", workers=0)
    (own,) = (a for a in catalog.acquisitions if a.uri.endswith("b.npy"))
    assert table.read_known(own.uri, own).laterality == "L"
    np.save(clinic / "scans" / "b.npy", np.load(clinic / "scans" / "b.npy")[1:])
    with pytest.raises(ReadError) as refused:
        table.read_known(own.uri, own)
    assert refused.value.code == "changed_since_scan"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_table_of_a_catalog_that_goes_on_with_its_folder_keeps_what_the_catalog_says(
    clinic, small_finder, monkeypatch, workers
):
    """Each row lost its participant, and had a problem if only the catalog knew the millimetres."""
    monkeypatch.setattr(table, "spread", lambda makes, items, *_, **__: map(makes, items))  # has the small network
    out, changed = clinic / "table.csv", clinic / "scans" / "b.npy"

    def segmented(what):
        return invoke("segment", what, "--out", out, "--workers", workers).output

    assert "3 new of 3" in segmented(scanned(clinic))
    rows = read_table(out)
    assert "0 new of 3" in (said := segmented(clinic / "scans")) and "left as it was" not in said
    np.save(changed, np.load(changed)[:, :, ::-1])
    assert "0 new of 3" in (said := segmented(clinic / "scans")) and "missing_spacing: " in said
    changed.with_suffix(".json").write_text('{"spacing_mm": [0.4, 0.0078, 0.023]}')
    assert "0 new of 3" in (said := segmented(clinic / "scans"))
    assert said.count("left as it was") == 1 and f"{changed}: has changed" in said and "give that catalog" in said
    assert read_table(out) == rows
    changed.rename(moved := changed.with_name("moved.npy"))
    changed.with_suffix(".json").rename(moved.with_suffix(".json"))
    assert f"{moved}: " in segmented(clinic / "scans")
    write_files(clinic, [("a.npy", "7", "OD"), ("moved.npy", "7", "OS"), ("c.npy", "8", "OD")])
    segmented(scanned(clinic))
    assert stated(out)[-1] == ("7", "L") and not any(row["problem"] for row in read_table(out))


def test_no_row_of_a_catalog_is_lost_where_scans_were_renamed_to_one_anothers_names(clinic, small_finder):
    """The row of a.npy passed to b.npy, in place of the only row of the scan that is c.npy now."""
    out, scans = clinic / "table.csv", clinic / "scans"
    invoke("segment", scanned(clinic), "--out", out)
    before = read_table(out)
    for new, old in ("dc", "cb", "ba"):
        (scans / f"{old}.npy").rename(scans / f"{new}.npy")
        (scans / f"{new}.json").write_text('{"spacing_mm": [0.4, 0.0078, 0.023]}')
    said = invoke("segment", scans, "--out", out).output
    assert said.count("left as it was") == 2 and read_table(out)[:3] == before
    write_files(clinic, [("b.npy", "7", "OD"), ("c.npy", "7", "OS"), ("d.npy", "8", "OD")])
    invoke("segment", scanned(clinic), "--out", out)
    assert [(row["acquisition"], row["participant"]) for row in before] == [
        (row["acquisition"], row["participant"]) for row in read_table(out)
    ]


def test_corrections_of_a_scan_of_a_catalog_ask_for_the_catalog(clinic, small_finder):
    out, scan = clinic / "table.csv", clinic / "scans" / "a.npy"
    (clinic / "scans" / "a.json").write_text('{"spacing_mm": [0.4, 0.0078, 0.023]}')
    assert "3 new of 3" in invoke("segment", scanned(clinic), "--out", out).output
    hand = clinic / "hand.json"
    found = octfm.segment(scan)
    facts = {"scan": fingerprint(found.volume.voxels), "network": found.model, "shape": found.volume.shape}
    by = {"format": FORMAT, "octfm": "0.1", "author": "A. Grader", "time": "2026-11-23T21:00:00Z"}
    hand.write_text(json.dumps(by | facts | {"bscans": [{"bscan": 0, "areas": {}}]}))
    done = invoke("segment", scan, clinic / "scans" / "b.npy", "--out", out, "--apply-corrections", hand)
    assert done.exit_code == 0 and "0 new of 2" in done.output and "give that catalog" in done.output
    done = invoke("segment", clinic / "catalog", "--out", out, "--apply-corrections", hand)
    assert "1 new of 3" in done.output and stated(out)[0] == ("7", "R")


def test_axial_lengths_are_those_of_the_catalogs_participants(clinic, small_finder):
    out, lengths = clinic / "table.csv", clinic / "lengths.csv"
    lengths.write_text("participant_id,eye,axial_length_mm\n0007,OD,26\nP-7,OS,27\n")
    assert invoke("segment", scanned(clinic), "--out", out, "--axial-length", lengths).exit_code == 0
    assert [row["axial_length_mm"] for row in read_table(out)] == ["26", "27", ""]


@pytest.mark.parametrize("row", ["participant_id,axial_length_mm\n70,26", "source,axial_length_mm\nb/a.npy,26"])
def test_lengths_of_nobody_are_refused_before_hours_of_work(clinic, small_finder, monkeypatch, row):
    (clinic / "lengths.csv").write_text(row)
    catalog = scanned(clinic)
    monkeypatch.setattr("octfm.layers.table.read_known", lambda *_, **__: pytest.fail("read a scan first"))
    refused = invoke("segment", catalog, "--out", clinic / "t.csv", "--axial-length", clinic / "lengths.csv")
    assert isinstance(refused.exception, ConfigError) and "names none of these scans" in str(refused.exception)
    assert not (clinic / "t.csv").exists()


def test_what_a_catalog_cannot_give_is_refused(clinic, small_finder):
    catalog = scanned(clinic)
    assert "a catalog says of each scan" in str(invoke("segment", catalog, "--layouts", "line").exception)
    loaded = Catalog.load(catalog)
    rows = [replace(a, modality="octa") for a in loaded.acquisitions]
    replace(loaded, acquisitions=tuple(rows)).save(clinic / "flow")
    refused = invoke("segment", clinic / "flow", "--out", clinic / "t.csv")
    assert isinstance(refused.exception, ConfigError) and "3 scans left out" in refused.output
    key = clinic / "key" / "key.json"
    key.parent.mkdir()
    hidden = ["scan", clinic / "scans", "--table", clinic / "files.csv", "--out", clinic / "hidden"]
    assert invoke(*hidden, "--pseudonymise", key).exit_code == 0
    refused = invoke("segment", clinic / "hidden", "--out", clinic / "t.csv")
    assert isinstance(refused.exception, ConfigError) and "pseudonymised" in str(refused.exception)


def test_agreement_resamples_the_participants_of_the_catalog(clinic, small_finder):
    out = clinic / "table.csv"
    invoke("segment", scanned(clinic), "--out", out)
    rows = [
        row | {"verdict": "nothing speaks against it", "centre_um": "250", "device_centre_um": "251"}
        for row in read_table(out)
    ]
    named = [row | {"source": f"{i}-{row['source']}"} for i, row in enumerate(rows * 4)]

    def agreement(changes):
        with (clinic / "agree.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows([row | changes for row in named])
        return device_agreement(clinic / "agree.csv")

    assert (agreement({})["participant_column"], agreement({})["participants"]) == ("participant", 2)
    assert agreement({"participant": ""})["participant_column"] is None, "as of a table of files"


def test_labels_by_acquisition_need_no_participant(tmp_path):
    """A table that was made from files has the column, empty."""
    (tmp_path / "t.csv").write_text("participant,acquisition,centre_um\n,1.2,250\n7,1.3,260\n")
    wanted = [("1.2", "somebody", "R"), ("1.3", "7", "L")]
    assert read_labels(tmp_path / "t.csv").join("centre_um", wanted) == ["250", "260"]


def two_eyes(folder):
    voxels = telling_voxels()
    write_e2e(folder / "p7.e2e", {(1, 2, 3): e2e_codes(voxels), (1, 2, 4): e2e_codes(voxels[:, :, ::-1])}, eyes="RL")


def vertical(folder):
    voxels = telling_voxels()
    ends = ends_of(len(voxels), voxels.shape[2])[:, ::-1]
    write_vol(folder / "a.vol", voxels, ends=ends, laterality="OS")


def archived(folder):
    write_vol(folder.parent / "a.vol", telling_voxels(), laterality="OS")
    with zipfile.ZipFile(folder / "scans.zip", "w") as archive:
        archive.write(folder.parent / "a.vol", "OS/a.vol")


def in_parts(folder):
    series(folder, telling_voxels(), order=[3, 0, 2, 1, *range(4, len(telling_voxels()))])


def star(folder):
    made = samples(["healthy"])[0].volume
    write_star(folder / "star.dcm", scanned_star(made, lines_of(12), columns=128))


@pytest.mark.parametrize(
    "made", [two_eyes, archived, *(pytest.param(made, marks=pytest.mark.slow) for made in (vertical, in_parts, star))]
)
def test_a_catalog_that_adds_nothing_changes_no_number(made, tmp_path, small_finder):
    (folder := tmp_path / "scans").mkdir()
    made(folder)
    layouts = ("--layouts", "raster,radial") if made is star else ()
    assert invoke("scan", folder, "--out", tmp_path / "catalog", *layouts).exit_code == 0
    tables = []
    for source in (folder, tmp_path / "catalog"):
        assert invoke("segment", source, "--out", tmp_path / f"{source.name}.csv").exit_code == 0
        tables.append(read_table(tmp_path / f"{source.name}.csv"))
    plain, known = tables
    assert not any(row["problem"] for row in plain) and [row["participant"] for row in plain] == [""] * len(plain)
    assert known == [
        row | {name: other[name] for name in ("participant", "file_state")}
        for row, other in zip(plain, known, strict=True)
    ]
    assert len({(row["source"], row["laterality"]) for row in known}) == len(known) == (2 if made is two_eyes else 1)
