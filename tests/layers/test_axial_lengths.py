"""A table of axial lengths rescales the lateral millimetres of each eye by its own."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import octfm
from octfm.catalog.participants.ids import person_key
from octfm.cli import segment_scans
from octfm.errors import ConfigError, EvaluationError, ExportError
from octfm.layers.axial_lengths import read_axial_lengths
from octfm.layers.finder import LayerFinder
from octfm.layers.rows import read_table, row_of, save_table
from octfm.layers.table import write_table
from octfm.layers.zones import ZONE_COLUMNS
from octfm.models.layer_net import LayerNet, LayerNetConfig
from octfm.phantom.native.stream import Stream
from support.command_line import invoke
from support.volumes import telling_voxels


def biometry(folder, text):
    path = folder / "biometry.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def eyes(tmp_path):
    """Both eyes of a person, and one of another, named in sidecars."""
    places, image = [], Stream(3, randomised=0.0, ascan_um=(13.0, 19.0))(0)
    for person, eye in [("1001", "OD"), ("1001", "OS"), ("1002", "OD")]:
        places.append(tmp_path / f"{person}-{eye}.npz")
        np.savez(places[-1], volume=image.voxels, spacing_mm=image.spacing_mm)
        places[-1].with_suffix(".json").write_text(json.dumps({"participant": person, "laterality": eye}))
    return [str(place) for place in places]


def lengths_in(out):
    return [row["axial_length_mm"] for row in read_table(out)]


@pytest.mark.parametrize(
    "spelling", ["1001", "00001001", "1001.0", "P-1001", "mrn 1", "MRN_001", "1-11", "01_011", "11-1"]
)
def test_a_length_is_a_persons_under_every_spelling_of_the_id_and_nobody_elses(tmp_path, spelling):
    """A millimetre too many in another's eye makes every zone of it wrong by four per cent."""
    table = "participant_id,axial_length_mm\n1001,25\nmrn1,26\n1-11,27\n11-01,28\n111,29\n10010,30\n"
    lengths = read_axial_lengths(biometry(tmp_path, table))
    expected = {"1001": 25, "mrn1": 26, "1-11": 27, "11-1": 28}
    (own,) = (mm for name, mm in expected.items() if person_key(name) == person_key(spelling))
    volume = octfm.Volume(telling_voxels(), (0.12, 0.0039, 0.0115), participant=spelling, laterality="R")
    assert lengths.of(volume) == own and not lengths.names_none({"a.e2e": spelling})
    assert lengths.of(replace(volume, participant="1002")) is None and lengths.names_none({"a.e2e": "1-1-1"})


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_table_of_axial_lengths_rescales_each_eye_by_its_own(eyes, tmp_path, small_finder, workers):
    out = tmp_path / "table.csv"
    given = biometry(tmp_path, "participant_id;eye;axial_length_mm\n1001;right;27,5\n1001;OS;22\n1001.0;OD;27.5\n")
    table = ["segment", *eyes, "--out", out, "--axial-length", given]
    shown = invoke(*table, *(["--workers", "1"] if workers else []))
    assert shown.exit_code == 0, (shown.output, shown.exception)
    assert lengths_in(out) == ["27.5", "22", ""]
    assert f"no axial length for 1 of 3 scans, such as {eyes[2]}" in shown.output
    for row in read_table(out)[:2]:
        alone = row_of(octfm.segment(row["source"], axial_length_mm=float(row["axial_length_mm"])))
        if not workers:  # the small network is not the children's
            assert {n: alone[n] for n in ZONE_COLUMNS} == {n: row[n] for n in ZONE_COLUMNS}


def test_only_eyes_with_another_axial_length_are_segmented_again(eyes, tmp_path, small_finder):
    out, said = tmp_path / "table.csv", list[str]()
    given = partial(write_table, eyes, out, echo=said.append)
    assert given() == 3 and lengths_in(out) == ["", "", ""]
    one = read_axial_lengths(biometry(tmp_path, "participant,axial_length\n1001,25\n1003,30\n"))
    assert given(axial_lengths=one) == 2 and lengths_in(out) == ["25", "25", ""]
    assert given(axial_lengths=one) == 0
    again = read_axial_lengths(biometry(tmp_path, f"source,axial_length_mm\n{eyes[1]},25\n{eyes[2]},NA\n"))
    assert given(axial_lengths=again) == 1 and lengths_in(out) == ["", "25", ""]
    with pytest.raises(
        EvaluationError, match=r"table.csv: has rows measured with axial lengths.* --axial-length with their table"
    ):
        given()


def test_a_copy_of_the_table_itself_may_state_the_axial_lengths(eyes, tmp_path, small_finder, monkeypatch):
    out, copy = tmp_path / "table.csv", tmp_path / "copy.csv"
    monkeypatch.chdir(tmp_path)
    relative = [Path(eye).name for eye in eyes]
    write_table(relative, out, echo=lambda _: None)
    rows = [row | {"axial_length_mm": "24,1"} for row in read_table(out)]
    save_table(rows, copy)
    assert write_table(relative, out, axial_lengths=read_axial_lengths(copy), echo=lambda _: None) == 3
    assert lengths_in(out) == ["24.1"] * 3
    found = [read_axial_lengths(copy).of(octfm.read_volume(eye, raster_only=False)) for eye in eyes]
    assert found == [24.1] * 3, "the same files by their whole paths"


def test_lengths_of_nobody_here_end_the_command(eyes, tmp_path, small_finder):
    shown = invoke(
        "segment",
        *eyes,
        "--out",
        tmp_path / "t.csv",
        "--axial-length",
        biometry(tmp_path, "participant_id,axial_length_mm\np7,25\n"),
    )
    assert shown.exit_code == 1 and isinstance(shown.exception, ConfigError)
    assert "names none of these scans (p7 there," in str(shown.exception)
    alone = invoke(
        "segment", eyes[0], "--axial-length", biometry(tmp_path, "participant_id,axial_length_mm\n1001,25\n")
    )
    assert alone.exit_code == 0 and "for an axial length of 25 mm" in alone.output


def test_a_scan_that_was_measured_but_not_written_is_not_all_of_them(eyes, tmp_path, small_finder, monkeypatch):
    """Of two scans the one without a length is refused as it is written; the other has its own length."""
    write_files = segment_scans.write_files

    def write(*given, **options):
        if Path(eyes[2]).stem in (*given, *options.values()):
            raise ExportError("cannot be written")
        return write_files(*given, **options)

    monkeypatch.setattr(segment_scans, "write_files", write)
    given = biometry(tmp_path, "participant_id,axial_length_mm\n1001,25\n")
    shown = invoke("segment", eyes[0], eyes[2], "--out", tmp_path / "out", "--axial-length", given)
    assert shown.exit_code == 1 and "1 of 2 scans could not be read or written" in shown.output
    assert f"no axial length for 1 of 2 scans, such as {eyes[2]}" in shown.output


@pytest.mark.parametrize(
    "text, said",
    [
        ("participant_id,length\n1,25\n", "expected a column axial_length_mm, found participant_id, length"),
        ("name,axial_length_mm\n1,25\n", "expected a column participant_id"),
        ("participant_id,axial_length_mm\n1,2.5\n", "axial_length_mm: expected 14 to 40 mm or nothing, got '2.5'"),
        ("participant_id,axial_length_mm\n1,long\n", "axial_length_mm: expected 14 to 40 mm or nothing, got 'long'"),
        ("participant_id,axial_length_mm\n1,nan\n2,0\n", "expected 14 to 40 mm or nothing, got '0'"),
        ("participant_id,axial_length_mm\n1,25\n1,26\n", "axial_length_mm is 26 for 1, an earlier line says 25"),
        ("participant_id,eye,axial_length_mm\n1,R,25\n1,OD,26\n", "26 for 1 R, an earlier line says 25"),
        ("sop_instance_uid,axial_length_mm\n1.2,25\n1.2,26\n", "axial_length_mm of 1.2 contradicts an earlier line"),
        ("source,axial_length_mm\na.vol,25\n./a.vol,26\n", "./a.vol has two axial lengths"),
        ("\n", "holds no row"),
        ("participant_id,axial_length_mm\n1,\n,25\n", "states no axial length"),
        ("source,axial_length_mm\na.vol,\n", "states no axial length"),
    ],
)
def test_a_wrong_table_of_axial_lengths_ends_before_any_work(text, said, eyes, tmp_path):
    given = biometry(tmp_path, text)
    with pytest.raises(EvaluationError, match=re.escape(said)):
        read_axial_lengths(given)
    out = tmp_path / "table.csv"
    shown = invoke("segment", *eyes, "--out", out, "--axial-length", given)
    assert isinstance(shown.exception, EvaluationError) and not out.exists()


def test_no_axial_length_is_said_to_scale_millimetres_that_are_estimated():
    finder = LayerFinder(LayerNet(LayerNetConfig((8, 8))))
    bscan = octfm.Volume(telling_voxels()[:1], (0.02, 0.0078, 0.023), layout="line", spacing_estimated=True)
    note = row_of(octfm.segment(bscan, axial_length_mm=26, finder=finder))["zones_note"]
    assert "millimetres are estimated" in note and "axial length" not in note
