"""octfm segment on unusual input: tiny and unreadable scans, folders, files of one name, tables of other networks."""

import io
import json
from dataclasses import replace
from typing import get_args
from unittest.mock import DEFAULT, Mock

import numpy as np
import pytest
import torch
from PIL import Image
from pydicom import dcmread

from octfm.catalog.volumes import volumes_below
from octfm.cli.options import AxialLength
from octfm.encoder.embeddings import read_embeddings
from octfm.errors import ConfigError, EvaluationError
from octfm.formats import read_volume
from octfm.formats.dicom.surfaces import surfaces_of_volume
from octfm.layers.corrections import AXIAL_LENGTH_MM
from octfm.layers.edges import onto_edges
from octfm.layers.export import label_map, write_dicom, write_nifti
from octfm.layers.finder import LARGEST, LayerFinder, network_size
from octfm.layers.rows import describe, read_table, row_of
from octfm.layers.segment import segment
from octfm.layers.table import write_table
from octfm.layers.verdict import CONTRAST, measure
from octfm.models.layer_net import SURFACES, LayerNet, LayerNetConfig
from octfm.phantom import write_phantom
from octfm.report.segmented.contact_sheet import ContactSheet
from octfm.report.segmented.correct import correction_facts
from octfm.report.segmented.pictures import bscan_picture, thickness_pictures
from octfm.report.viewer import view_facts, viewer
from octfm.tasks.view import scene_of
from octfm.volume.margins import NEARLY_WHITE
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import LAYOUTS, Lines, Volume
from support.command_line import invoke
from support.segmented import found_in
from support.vendor_files import write_heyex_xml
from support.volumes import telling_voxels


@pytest.fixture
def finder(monkeypatch) -> LayerFinder:
    """An untrained network in place of the packaged one."""
    torch.manual_seed(0)
    made = LayerFinder(LayerNet(LayerNetConfig((8, 8))), digest="1" * 64)
    for module in ("octfm.layers.segment", "octfm.layers.table"):
        monkeypatch.setattr(f"{module}.load_finder", lambda **_: made)
    return made


def noise(shape=(3, 40, 32)) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, shape, dtype=np.uint8)


def saved(path, shape=(3, 40, 32)) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, volume=noise(shape), spacing_mm=(0.1, 0.0039, 0.016))
    return str(path)


def nothing_found(found):
    blank = {name: np.full_like(rows, np.nan) for name, rows in found.surfaces.items()}
    return replace(found, surfaces=blank, masks={})


@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 1, 5), (1, 5, 1), (3, 6, 7)])
def test_tiny_scans_are_segmented_and_drawn(finder, shape):
    found = segment(Volume(noise(shape), (0.12, 0.0039, 0.016)))
    assert found.surfaces["ilm"].shape == (shape[0], shape[2]) and describe(found)
    for rows in (0.0, shape[1] - 1.0):
        at = replace(found, surfaces=dict.fromkeys(SURFACES, np.full((shape[0], shape[2]), rows, np.float32)))
        assert Image.open(io.BytesIO(bscan_picture(at)))


def test_a_picture_needs_no_order_between_surfaces_of_different_a_scans():
    found = found_in(1)
    surfaces = {name: np.full_like(rows, np.nan) for name, rows in found.surfaces.items()}
    surfaces["ilm"][0, 5], surfaces["bm"][0, 90] = 190.0, 10.0
    assert Image.open(io.BytesIO(bscan_picture(replace(found, surfaces=surfaces))))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_a_row(layout):
    found = found_in(3)
    row = row_of(replace(found, volume=replace(found.volume, layout=layout)))
    assert (layout == "raster") != (f"a {layout} scan" in row["zones_note"])


@pytest.mark.parametrize("factor", [1000, 0.001])
def test_millimetres_that_are_micrometres_or_metres_are_refused_in_words(finder, tmp_path, factor):
    """Before the network: for it, B-scans of micrometres taken for millimetres would have gigabytes."""
    if factor > 1:
        finder.network = None
    spacing_mm = tuple(factor * mm for mm in (0.24, 0.0039, 0.0115))
    found = segment(Volume(noise((3, 496, 512)), spacing_mm), finder=finder)
    assert found.verdict.codes[:2] == ("field", "frame") and found.verdict.doubt >= 1
    assert "check the axial millimetres" in describe(found) and "no retina" not in describe(found)
    write_table([found.volume], tmp_path / "table.csv", finder=finder)
    [row] = read_table(tmp_path / "table.csv")
    assert "check the lateral millimetres" in row["verdict"] and not row["problem"]


def test_lines_of_bscans_in_metres_are_not_smoothed_by_filters_longer_than_they_are():
    found = found_in(1)
    lines, row = found.found.rows, np.arange(found.volume.shape[1])[:, None]
    bright = np.where((row > lines[0]) & (row < lines[-1]), np.uint8(200), found.volume.voxels)
    assert not np.array_equal(onto_edges(bright, lines, found.spacing_mm), lines)
    metres = tuple(mm / 1000 for mm in found.spacing_mm)
    np.testing.assert_array_equal(onto_edges(bright, lines, metres), lines)


def test_bscans_of_twenty_by_eight_millimetres_are_seen_whole():
    assert network_size((1, 2000, 1200), (0.1, 0.0039, 0.016)) == (2000, 1200)
    rows, columns = network_size((1, 512, 512), (0.1, 8 / 512, 20 / 512))
    assert rows <= LARGEST[0] and columns <= LARGEST[1]


def test_white_padding_is_no_reason_against_a_scan():
    found = found_in(2)
    voxels = np.random.default_rng(0).integers(20, 40, found.volume.shape, dtype=np.uint8)
    rows = np.arange(voxels.shape[1])[None, :, None]
    retina = (rows > found.found.rows[0][:, None]) & (rows < found.found.rows[-1][:, None])
    voxels[retina] += 80
    padded = voxels.copy()
    padded[:, :35] = 255  # less than a fifth, above the retina
    plain, white = (measure(replace(found.volume, voxels=each), found.found) for each in (voxels, padded))
    assert plain.contrast > CONTRAST and white.contrast > CONTRAST
    bright = np.random.default_rng(1).integers(150, int(NEARLY_WHITE * 255), padded[:, :35].shape)
    padded[:, :35] = bright  # neither white nor of one grey level, so no padding
    assert measure(replace(found.volume, voxels=padded), found.found).contrast < CONTRAST


def test_label_maps_have_the_rows_of_the_image_whatever_was_found(tmp_path):
    found = nothing_found(found_in(3))
    labels, _ = label_map(found)
    assert labels.shape == found.volume.shape and not labels.any()
    pytest.importorskip("nibabel")
    assert len(write_nifti(found, tmp_path, "a")) == 2
    plain = Segmentation({"ilm": np.full((2, 4), np.nan)}, {}, (0.1, 0.004, 0.05))
    assert not label_map(plain)[0].any(), "also without an image that tells its rows"
    low = replace(found_in(3), masks={})
    low.surfaces["bm"][:] = low.volume.shape[1] - 1
    assert label_map(low)[0].shape == low.volume.shape


def test_a_scan_of_contradicting_positions_is_viewed_without_a_map():
    found = found_in(3)
    lines = Lines(np.array([[0, 1], [0, 3], [0, 2.0]]), np.array([[6, 1], [6, 3], [6, 2.0]]))
    assert thickness_pictures(replace(found, volume=replace(found.volume, lines=lines))) == []


@pytest.mark.parametrize(
    "turned", ["", "vertical on the fundus, not from side to side", "from right to left on the fundus"]
)
def test_ends_of_turned_bscans_have_the_letters_of_the_fundus(turned):
    found = found_in(3)
    at = np.stack([np.zeros(3), np.arange(3.0)], axis=1)
    lines = Lines(at, np.add(at, (6, 0)))
    if turned.startswith("vertical"):
        lines = Lines(lines.start[:, ::-1], lines.end[:, ::-1])
    elif turned:
        lines = Lines(lines.end, lines.start)
    volume = replace(found.volume, lines=lines, superior_first=None if turned.startswith("vertical") else True)
    scene = scene_of(volume, found=found)
    told = dict(view_facts(volume, scene))
    assert scene.turned == bool(turned) and told.get("Direction of B-scans", "") == turned
    sides = ["S", "I"] if turned.startswith("vertical") else ["N", "T"] if turned else ["T", "N"]
    assert f'"sides":{json.dumps(sides, separators=(",", ":"))}' in viewer([scene]).body


def test_the_command_line_has_the_limits_of_an_axial_length():
    option = get_args(AxialLength)[1]
    assert (option.min, option.max) == AXIAL_LENGTH_MM


def test_an_axial_length_of_no_eye_and_millimetres_of_a_volume_are_refused(finder):
    volume = Volume(np.zeros((1, 64, 32), np.uint8), (0.1, 0.004, 0.012), layout="line")
    for length in (2.4, 245.0, float("nan")):
        with pytest.raises(ConfigError, match="axial_length_mm: expected 14 to 40 mm"):
            segment(volume, axial_length_mm=length, finder=finder)
    with pytest.raises(ConfigError, match="a Volume has its own"):
        segment(volume, spacing_mm=(0.1, 0.004, 0.012), finder=finder)


def test_axial_length_rescales_volumes_and_the_ruler_like_zones():
    found = found_in(fluid_in=3)
    longer = replace(found, axial_length_mm=1.82 + 1.1 * (24.46 - 1.82))
    assert scene_of(found.volume, found=longer).spacing_mm == pytest.approx(
        np.multiply(found.spacing_mm, (1.1, 1, 1.1))
    )
    assert correction_facts(longer)["mm"] == pytest.approx(np.multiply(found.spacing_mm, (1.1, 1, 1.1)))
    before, after = (each.volume_nl("intraretinal_fluid") for each in (found, longer))
    assert before and after == pytest.approx(1.1**2 * before)


def test_layers_of_a_star_are_not_drawn_on_the_raster_made_of_it():
    found = found_in(6)
    star = replace(found.volume, layout="radial")
    with pytest.raises(EvaluationError, match="give one of them"):
        scene_of(star, found=replace(found, volume=star), segmenter=Mock())


def test_a_table_refuses_rows_of_another_network(finder, tmp_path):
    files, out = [saved(tmp_path / f"{name}.npz") for name in "ab"], tmp_path / "table.csv"
    assert write_table([files[0], files[0]], out, echo=lambda _: None) == 1, "one file named twice has one row"
    other = LayerFinder(finder.network, "other", "2" * 64)
    with pytest.raises(EvaluationError, match="rows of another network"):
        write_table(files, out, finder=other, echo=lambda _: None)
    assert len(read_table(out)) == 1 and write_table(files, out, echo=lambda _: None) == 1


PLEASE = "IndexError; please report it with the file's format"


@pytest.mark.parametrize(
    ("error", "problem"), [(IndexError("9"), PLEASE), (ConfigError("no child"), "no child"), (TypeError("bug"), None)]
)
def test_only_bugs_end_a_table(finder, tmp_path, monkeypatch, error, problem):
    """A scan that numpy stumbles over has a row with its problem; a bug of ours stops the run."""
    files = [saved(tmp_path / name / "a.npz") for name in ("bad", "good")]
    monkeypatch.setattr("octfm.layers.table.segment", Mock(wraps=segment, side_effect=[error, DEFAULT]))
    out = tmp_path / "t.csv"
    if problem is None:
        with pytest.raises(type(error)):
            write_table(files, out, echo=lambda _: None)
        return
    assert write_table(files, out, echo=lambda _: None) == 2
    assert [row["problem"] for row in read_table(out)] == [f"segmentation_failed: {files[0]}: {problem}", ""]


def test_names_that_are_not_utf8_survive_a_table_and_its_page(finder, tmp_path):
    volume, out = Volume(noise(), (0.1, 0.0039, 0.016), source="eye\udcff.npz"), tmp_path / "table.csv"
    sheet = ContactSheet(out)
    assert write_table([volume], out, also=sheet.add, echo=lambda _: None) == 1
    assert [row["source"] for row in read_table(out)] == ["eye\udcff.npz"]
    assert "eye\\udcff.npz" in sheet.write(read_table(out)).read_text()
    assert write_table([volume], out, echo=lambda _: None) == 0
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(EvaluationError, match="not a table"):
        read_table(tmp_path / "picture.csv")


def test_a_folder_needs_no_participants_and_keeps_every_layout(finder, tmp_path):
    clinic = tmp_path / "clinic"
    saved(clinic / "scan1.npz")
    saved(clinic / "scan2.npz", (3, 40, 33))
    line = write_heyex_xml(clinic / "line", telling_voxels()[:1])
    line.write_text(line.read_text().replace("<Type>Volume</Type>", "<Type>Line</Type>"))
    (clinic / "broken.npz").write_bytes(b"PK\x03\x04 not an archive")
    sources, left_out = volumes_below(clinic, workers=0)
    assert not left_out
    out = tmp_path / "table.csv"
    assert write_table(sources, out, echo=lambda _: None) == 4
    rows = {row["source"].removeprefix(f"{clinic}/"): row for row in read_table(out)}
    assert {"scan1.npz", "scan2.npz", "broken.npz"} < set(rows) and rows["broken.npz"]["problem"]
    assert sum("a line scan" in row["zones_note"] for row in rows.values()) == 1


def test_a_scan_has_one_row_however_it_is_named(finder, tmp_path, monkeypatch):
    """A scan of a folder that was named by itself, too, had two, and counted as two eyes wherever a table is read."""
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "clinic" / "OS" / "scan.npz")
    for words in (["clinic"], ["clinic/OS/scan.npz", "./clinic/OS/scan.npz"], ["clinic", "clinic/OS/scan.npz"]):
        assert invoke("segment", *words, "--out", "table.csv").exit_code == 0
        [row] = read_table(tmp_path / "table.csv")
        assert row["source"] == str(tmp_path / "clinic" / "OS" / "scan.npz") and row["laterality"] == "L"


def test_a_scan_of_the_same_name_in_another_folder_takes_no_row_away(finder, tmp_path, monkeypatch):
    """A whole path was taken for the relative one of a row that was written elsewhere, and replaced it."""
    for name, shape in (("a", (3, 40, 32)), ("b", (4, 40, 32))):
        saved(tmp_path / name / "scan.npz", shape)
        monkeypatch.chdir(tmp_path / name)
        assert invoke("segment", "scan.npz" if name == "a" else ".", "--out", "../table.csv").exit_code == 0
    rows = read_table(tmp_path / "table.csv")
    assert {row["source"]: row["bscans"] for row in rows} == {"scan.npz": "3", str(tmp_path / "b" / "scan.npz"): "4"}


def test_the_eye_that_a_folder_names_counts_as_in_a_scan(finder, tmp_path):
    """In a table, and, mirrored to a right eye, in vectors; a folder that contradicts the file makes it unknown."""
    for name, eye in (("OD/a.npz", None), ("OS/b.npz", None), ("OS/c.npz", "L"), ("OS/d.npz", "R"), ("e.npz", None)):
        place = saved(tmp_path / "in" / name)
        voxels = np.random.default_rng(ord(name[-5])).integers(0, 255, (3, 40, 32), dtype=np.uint8)
        voxels[:, :16] //= 16  # vitreous
        np.savez(place, volume=voxels, spacing_mm=(0.1, 0.0039, 0.016))
        if eye:
            (tmp_path / "in" / name).with_suffix(".json").write_text(json.dumps({"laterality": eye}))
    expected = {"OD/a.npz": "R", "OS/b.npz": "L", "OS/c.npz": "L", "OS/d.npz": "", "e.npz": ""}

    def by_name(rows) -> dict[str, str]:
        return {row["source"].removeprefix(f"{tmp_path}/in/"): row["laterality"] or "" for row in rows}

    run = invoke("segment", tmp_path / "in", "--out", tmp_path / "table.csv")
    assert run.exit_code == 0, run.output
    assert by_name(read_table(tmp_path / "table.csv")) == expected
    printed = invoke("segment", tmp_path / "in").output
    assert "OD/a.npz: 3 B-scans, scanner unknown, eye R" in printed
    run = invoke("segment", *(tmp_path / "in" / name for name in expected), "--out", tmp_path / "named.csv")
    assert run.exit_code == 0, run.output
    assert by_name(read_table(tmp_path / "named.csv")) == expected
    run = invoke("embed", tmp_path / "in", "--out", tmp_path / "vectors")
    assert run.exit_code == 0, run.output
    data = read_embeddings(tmp_path / "vectors" / "pretrained.parquet")
    assert sorted(eye or "" for eye in data.laterality) == sorted(expected.values())


def test_an_unreadable_file_in_a_folder_does_not_stop_the_others(finder, tmp_path):
    saved(tmp_path / "scan.npz")
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 not an archive")
    done = invoke("segment", tmp_path)
    assert done.exit_code == 1 and "1 of 2 scans could not be read" in done.output
    assert "scan.npz: 3 B-scans" in done.output


def test_results_of_files_of_one_name_do_not_overwrite_each_other(finder, tmp_path):
    pytest.importorskip("nibabel")
    files = [saved(tmp_path / person / "eye.npz") for person in ("p1", "p2")]
    files.append(saved(tmp_path / "site=Basel.npz"))
    done = invoke("segment", *files, "--out", tmp_path / "found")
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "found").glob("eye-*_labels.nii.gz"))) == 2
    assert (tmp_path / "found" / "site=Basel_labels.nii.gz").exists(), "a file with = in its name is no setting"
    refused = invoke("segment", files[0], "--dicom")
    assert isinstance(refused.exception, ConfigError)


def test_dicom_results_follow_frames_that_are_stored_out_of_order(tmp_path):
    highdicom = pytest.importorskip("highdicom")
    clinic = write_phantom(tmp_path / "clinic", 1, 3, size=(6, 160, 48), scanners=["heidelberg_spectralis"], workers=1)
    file, stored = next(iter(sorted(clinic.rglob("*.dcm")))), [3, 0, 5, 1, 4, 2]
    in_order = read_volume(str(file))
    dataset = dcmread(file)
    groups = dataset.PerFrameFunctionalGroupsSequence
    dataset.PerFrameFunctionalGroupsSequence = [groups[i] for i in stored]
    dataset.PixelData = np.ascontiguousarray(dataset.pixel_array[stored]).tobytes()
    dataset.save_as(file)
    volume = read_volume(str(file))
    np.testing.assert_array_equal(volume.superior_to_inferior().voxels, in_order.superior_to_inferior().voxels)
    mask = np.zeros(volume.shape, bool)
    mask[0, 20:30] = True
    ilm = np.zeros((6, 48)) + np.arange(6)[:, None]
    found = Segmentation({"ilm": ilm}, {"fluid": mask}, volume.spacing_mm)
    seg, heights = write_dicom(found, file, tmp_path)
    frames = highdicom.seg.segread(seg).get_pixels_by_source_frame(volume.acquisition, list(range(1, 7)))
    stored_rows = np.frombuffer(dcmread(heights).FloatPixelData, "<f4").reshape(6, 48)[:, 0]
    assert [bool(frame.any()) for frame in frames] == [row == 0 for row in stored_rows]
    assert list(stored_rows) != sorted(stored_rows)
    np.testing.assert_array_equal(surfaces_of_volume(file, heights).heights_px[0], ilm)
    with pytest.raises(EvaluationError, match="6 frames of 48 columns"):
        write_dicom(Segmentation({}, {"fluid": mask[:4]}, volume.spacing_mm), file, tmp_path)


@pytest.mark.parametrize("name", ["found", "found.csv"])
def test_an_address_for_results_of_scans_is_refused_before_they_are_segmented(finder, tmp_path, name):
    saved(tmp_path / "scan.npz")
    said = invoke("segment", tmp_path / "scan.npz", "--out", f"s3://bucket/{name}")
    assert isinstance(said.exception, ConfigError) and "expected a path on a disk" in str(said.exception)
    assert said.output == ""
