"""Corrections by hand: drawn in a page with real pointers and keys, saved, refused if they do not fit, and applied."""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.parquet import read_table as read_table_of_predictions

import octfm
from octfm.errors import ConfigError, CorrectionsError, EvaluationError
from octfm.layers.axial_lengths import read_axial_lengths
from octfm.layers.calibrate import calibrate_rows
from octfm.layers.corrections import FORMAT, find_corrections, read_corrections
from octfm.layers.finder import LayerFinder
from octfm.layers.ranges import Ranges
from octfm.layers.rows import describe, read_table, row_of, save_table
from octfm.layers.segment import ScanSegmentation
from octfm.layers.table import write_table
from octfm.layers.verdict import Verdict
from octfm.models.layer_net import MASKS, SURFACES, LayerNet, LayerNetConfig
from octfm.report.segmented.correct import correction_facts
from octfm.report.segmented.pictures import verdict_of
from octfm.report.viewer import write_view
from octfm.tasks.finetune import finetune
from octfm.tasks.segment import read_truth, to_prepared, transform_of
from octfm.tasks.segment_score import segment
from octfm.tasks.segment_settings import SegmentConfig
from octfm.tasks.view import scene_of
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.volume import Lines
from support.browser import Browser, needs_chromium
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.finetune_runs import settings as finetune_settings
from support.segmented import found_in
from support.small_store import SIZE, edit_rows, small_preprocessing, small_store
from support.tiny_runs import config as pretrain_config
from support.tiny_runs import quick_pretrain, quiet
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("remembered_bscans")

ROOT, BSCAN = "[data-viewer]", '[data-part="bscan"]'
STATUS = "document.querySelector('[data-part=\"hand-status\"]').textContent"
ILM, PEAK, BM = (SURFACES.index(name) for name in ("ilm", "rpe_peak", "bm"))


def found_eye(depth: int = 25, seed: int = 0, **facts) -> ScanSegmentation:
    """A left eye of wavy lines, inferior B-scan first, whose ILM is missing in part and whose network is unsure in the
    lower half."""
    rng = np.random.default_rng(seed)
    found = found_in(depth, laterality="L", fluid_in=12 % depth)
    volume = replace(
        found.volume, voxels=rng.integers(0, 255, found.volume.shape, dtype=np.uint8), superior_first=False, **facts
    )
    wave = rng.normal(0, 0.4, (depth, volume.shape[2])).astype(np.float32)
    surfaces = {name: rows + wave for name, rows in found.surfaces.items()}
    surfaces["ilm"][7 % depth, 30:50] = np.nan
    unsure = np.where(np.arange(depth) < depth // 2, 80.0, 1.0)[None, :, None]
    near = np.where(unsure > 1, 0.5, 1.0)
    layers = replace(found.found, spread_um=found.found.spread_um * unsure, near=found.found.near * near)
    return replace(found, volume=volume, surfaces=surfaces, found=layers)


def stated(found: ScanSegmentation, *, checked=(), lines=None, areas=None, **other) -> dict:
    """A file as the page saves it. lines: (B-scan, surface) → rows; areas: B-scan → mask → runs."""
    bscans: dict[int, dict] = {}
    for d in checked:
        rows = {name: stated_rows(found.surfaces[name][d]) for name in SURFACES}
        bscans[d] = {"bscan": d, "checked": True, "surfaces": rows, "areas": {}}
    for (d, name), rows in (lines or {}).items():
        own = bscans.setdefault(d, {"bscan": d, "checked": False, "surfaces": {}})
        own["surfaces"][name] = stated_rows(rows)
    for d, runs in (areas or {}).items():
        bscans.setdefault(d, {"bscan": d, "checked": False, "surfaces": {}})["areas"] = runs
    return {
        "format": FORMAT, "scan": fingerprint(found.volume.voxels), "network": found.model, "octfm": "0.1",
        "author": "A. Grader", "participant": "", "time": "2026-11-23T21:00:00.000Z",
        "shape": list(found.volume.shape), "bscans": list(bscans.values()),
    } | other  # fmt: skip


def stated_rows(rows: np.ndarray) -> list[float | None]:
    return [round(float(row), 3) if np.isfinite(row) else None for row in rows]


def written(content: object, path: Path) -> Path:
    path.write_text(json.dumps(content))
    return path


def open_page(browser: Browser, found: ScanSegmentation, folder: Path) -> None:
    scene, facts = scene_of(found.volume, found=found), correction_facts(found)
    page = write_view(scene, folder / "page.html", corrections=facts, verdict=verdict_of(found))
    browser.complaints.clear()
    browser.asked.clear()
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.open(page)
    browser.wait(
        f"((r) => r?.dataset.started && r.dataset.drawn === r.dataset.bscan)(document.querySelector('{ROOT}'))"
    )
    browser.js(f"document.querySelector('{ROOT}').focus()")


def told(browser: Browser) -> dict[str, str]:
    return browser.js(f"({{...document.querySelector('{ROOT}').dataset}})")


def numbers(browser: Browser) -> dict[str, float | None]:
    """The column "now" of the page's table."""
    cells = browser.js(
        "[...document.querySelectorAll('[data-zone]')].map((row) => [row.dataset.zone, row.children[1].textContent])"
    )
    return {name: None if text == "–" else float(text) for name, text in cells}


def expected_numbers(found: ScanSegmentation) -> dict[str, float | None]:
    grid = found.etdrs()
    volume = {"volume within 3 mm of the centre": grid.volume_mm3}
    return grid.mean_um | volume | {name: found.volume_nl(name) for name in MASKS}


def assert_same(shown: dict[str, float | None], expected: dict[str, float | None]) -> None:
    assert shown.keys() == expected.keys()
    for name, value in expected.items():
        assert (shown[name] is None) == (value is None), (name, shown[name], value)
        assert value is None or shown[name] == pytest.approx(value, abs=0.1 if "mm" not in name else 6e-4), name


def choose_file(browser: Browser, path: Path) -> None:
    node = browser.call("DOM.getDocument", depth=-1)["root"]["nodeId"]
    chosen = browser.call("DOM.querySelector", nodeId=node, selector='[data-part="load"]')["nodeId"]
    browser.call("DOM.setFileInputFiles", nodeId=chosen, files=[str(path)])


def save(browser: Browser, folder: Path) -> Path:
    browser.js("document.querySelector('[data-part=\"save\"]').click()")
    wait_until(lambda: any(path.stat().st_size for path in folder.glob("corrections-*.json")), "the file is saved", 20)
    (path,) = folder.glob("corrections-*.json")
    return path


@needs_chromium
def test_a_page_bridges_one_lost_bscan_and_blanks_the_zones_that_many_cross(browser, tmp_path):
    found = found_eye(49)
    whole = found.etdrs().mean_um
    for rows in found.surfaces.values():
        rows[[30, 38, 39, 40, 41]] = np.nan
    found = replace(found, verdict=replace(found.verdict, parts=("5 of 49 B-scans are dark",)))
    open_page(browser, found, tmp_path)
    shown = numbers(browser)
    assert_same({name: shown.get(name) for name in expected_numbers(found)}, expected_numbers(found))
    assert shown["inner superior"] == pytest.approx(whole["inner superior"], abs=1)
    assert whole["outer superior"] and shown["outer superior"] is None and not set(MASKS) & shown.keys()
    note = browser.js("document.querySelector('[data-part=\"numbers-note\"]').textContent")
    assert "5 of 49 B-scans are dark: zones there are blank" in note


def note_of(browser: Browser) -> str:
    return browser.js("document.querySelector('[data-part=\"numbers-note\"]').textContent")


@needs_chromium
def test_a_page_says_why_zones_are_blank_as_the_table_does(browser, tmp_path):
    found = found_eye(6)  # B-scans 1.2 mm apart
    volume = replace(found.volume, laterality=None, superior_first=None)
    found.surfaces["bm"][:, -40:] = np.nan
    found = replace(found, volume=volume)
    open_page(browser, found, tmp_path)
    told = row_of(found)["zones_note"].split("; ")
    assert len(told) >= 4
    for note in told:
        assert note[1:] in note_of(browser), note
    browser.assert_quiet()


@needs_chromium
def test_a_page_shows_ranges_and_compares_once_there_is_a_correction(browser, tmp_path):
    found = replace(found_in(), ranges=Ranges((3, 1, 0.1), (4, 1, 0), 9))
    open_page(browser, found, tmp_path)
    shown = (
        "[...document.querySelectorAll('[data-part=\"numbers\"] tr')].slice(0, 2)"
        ".map((row) => [...row.children].filter((c) => c.offsetWidth).map((c) => c.textContent))"
    )
    low, high = found.zone_ranges()["centre"]
    centre = f"{found.etdrs().mean_um['centre']:.1f}"
    assert browser.js(shown) == [
        ["ILM to BM, areas", "as found", "range as found"],
        ["centre, µm", centre, f"{low:.0f} to {high:.0f}"],
    ]
    assert "synthetic-calibrated range; it promises nothing for real eyes" in note_of(browser)
    browser.js("document.querySelector('[data-part=\"numbers\"]').closest('.scroll').focus()")
    before = browser.js("document.querySelector('[data-part=\"number\"]').textContent")
    browser.key("ArrowDown")
    after = browser.js("document.querySelector('[data-part=\"number\"]').textContent")
    assert after != before, "a table that was clicked takes no key that it does not need"
    browser.key("e")
    browser.key("u", shift=True)
    head, row = browser.js(shown)
    assert head[1:4] == ["now", "as found", "change"] and row[2] == centre
    browser.key("z")
    assert len(browser.js(shown)[0]) == 3


@needs_chromium
@pytest.mark.slow
def test_tools_stand_right_above_the_bscan(browser, tmp_path):
    open_page(browser, found_in(), tmp_path)
    browser.key("e")
    top, bottom = ("hand-on", "top"), ("bscan", "bottom")
    tools, brush, bscan, end = (
        browser.js(f"document.querySelector('[data-part=\"{part}\"]').getBoundingClientRect().{side}")
        for part, side in (top, ("fill", "bottom"), ("bscan", "top"), bottom)
    )
    assert tools < brush < bscan < brush + 100 and end - tools < 1000
    browser.js(
        "((s) => { s.value = 1; s.dispatchEvent(new Event('input')); })"
        "(document.querySelector('[data-part=\"brush\"]'))"
    )
    width = browser.js("document.querySelector('[data-part=\"brush-width\"]').textContent")
    assert width.startswith("1 A-scan,")


@needs_chromium
def test_what_is_dragged_and_painted_is_measured_saved_and_applied(browser, tmp_path):
    found = found_eye()
    depth, height, width = found.volume.shape
    open_page(browser, found, tmp_path)
    as_found = numbers(browser)
    assert_same(as_found, expected_numbers(found))
    assert None in as_found.values(), "zones in the unsure half are withheld"
    browser.mouse(BSCAN, 0.5, 0.4, to=(0.5, 0.2))
    assert told(browser)["changed"] == "0", "nothing is dragged unless correcting was begun"

    browser.key("e")
    shown = depth - 1 - int(told(browser)["bscan"])  # in the order of the file, which has inferior first
    row = float(found.surfaces["ilm"][shown, 60])
    browser.mouse(BSCAN, 60.5 / width, (row + 0.5) / height, to=(60.5 / width, (row - 14.5) / height))
    assert told(browser)["line"] == "ilm" and told(browser)["changed"] == "1"
    assert numbers(browser)["centre"] > as_found["centre"] + 1
    browser.key("z")
    assert numbers(browser) == as_found and told(browser)["undo"] == "0"
    browser.key("y")
    browser.key("ArrowDown")
    for _ in range(8):
        browser.key("l")  # down to Bruch's membrane
    browser.key("d", shift=True)
    browser.key("d")
    browser.key("k")
    for _ in range(int(told(browser)["bscan"]), depth - 1 - 7):
        browser.key("ArrowDown")
    browser.key("t")  # draw the ILM where it is missing
    browser.key("l")
    assert (told(browser)["hand"], told(browser)["line"]) == ("draw", "ilm")
    y = (float(np.nanmean(found.surfaces["ilm"][7])) + 0.5) / height
    browser.mouse(BSCAN, 29.5 / width, y, to=(51.5 / width, y))
    browser.key("t")
    browser.key("t")  # paint a cyst
    browser.mouse(BSCAN, 0.3, 0.62, to=(0.4, 0.64))
    assert numbers(browser)["intraretinal_fluid"] > as_found["intraretinal_fluid"]

    browser.js("document.querySelector('[data-part=\"save\"]').click()")
    assert "Enter your name" in browser.js(STATUS)
    browser.js("document.querySelector('[data-part=\"author\"]').value = 'A. Grader'")
    path = save(browser, tmp_path)
    content = json.loads(path.read_text())
    assert content.keys() == stated(found).keys() and content["participant"] == "", "no path, no id"
    assert [one["bscan"] for one in content["bscans"]] == [7, shown - 1, shown]

    corrected = found.corrected(read_corrections(path))
    assert_same(numbers(browser), expected_numbers(corrected))
    assert np.isfinite(corrected.surfaces["ilm"][7]).all()
    assert corrected.surfaces["ilm"][shown, 60] == pytest.approx(row - 15, abs=0.5)
    assert corrected.surfaces["ilm"][shown, 60] < corrected.surfaces["ilm"][shown, 55] < row, "a smooth pull"
    assert np.array_equal(corrected.surfaces["ilm"][shown, :20].round(1), found.surfaces["ilm"][shown, :20].round(1))
    assert row_of(corrected)["corrected_bscans"] == "3" and corrected.doubtful[shown - 1].sum() == 0

    again = tmp_path / "again"  # a new page continues from the file, and saves the same
    again.mkdir()
    open_page(browser, found, again)
    browser.key("e")
    for wrong in ({k: value for k, value in content.items() if k != "time"}, content | {"bscans": [None]}):
        choose_file(browser, written(wrong, again / "wrong.txt"))
        browser.wait(f"{STATUS}.startsWith('Not loaded')", 20)
        browser.key("ArrowUp")  # the next message is a new one
        browser.wait(f"!{STATUS}.startsWith('Not loaded')", 20)
    choose_file(browser, path)
    browser.wait(f"document.querySelector('{ROOT}').dataset.changed !== '0'")
    assert_same(numbers(browser), expected_numbers(corrected))
    assert "Loaded: 3 B-scans of A. Grader" in browser.js(STATUS)
    assert "not saved" not in browser.js(STATUS), "all of it is in the file"
    assert json.loads(save(browser, again).read_text())["bscans"] == content["bscans"]
    browser.key("k")
    choose_file(browser, path)
    browser.wait(f"{STATUS}.startsWith('Loaded')")
    assert "not saved" in browser.js(STATUS), "the file lacks what was done before"
    browser.key("z")
    assert "not saved" not in browser.js(STATUS), "or the page would ask before the next one opens"
    browser.assert_quiet()


@needs_chromium
@pytest.mark.slow
def test_lines_keep_their_order_and_come_back_with_the_stroke(browser, tmp_path):
    found = found_in()
    open_page(browser, found, tmp_path)
    depth, height, width = found.volume.shape
    browser.key("e")
    at = (float(found.surfaces["ilm"][12, 60]) + 0.5) / height
    browser.mouse(BSCAN, 60.5 / width, at, to=(60.5 / width, (148.5) / height))
    assert told(browser)["changed"] == str(SURFACES.index("bm")), "all lines but the last made way"
    browser.key("r")
    assert told(browser)["changed"] == "0"
    browser.key("z")
    browser.key("ArrowDown")
    browser.key("ArrowDown")
    browser.key("l", shift=True)
    browser.key("l")
    browser.key("k")
    browser.key("ArrowUp")
    browser.key("i")  # half of the correction in the B-scan between
    browser.js("document.querySelector('[data-part=\"author\"]').value = 'x'")
    own = read_corrections(save(browser, tmp_path))
    corrected = found.corrected(own)
    assert set(own.surfaces["ilm"]) == {12, 13, 14}
    shift = [corrected.surfaces["ilm"][d, 60] - found.surfaces["ilm"][d, 60] for d in (12, 13, 14)]
    assert shift[1] == pytest.approx(shift[0] / 2, abs=0.02) and shift[2] == pytest.approx(0, abs=0.02)
    assert all(
        (np.diff(np.stack(list(corrected.surfaces.values()))[:, d], axis=0) >= -0.01).all() for d in range(depth)
    )


def tilted(depth: int, turn: float, seed: int) -> Lines:
    """B-scans 6 mm long at uneven distances, shifted along themselves, turned by some degrees."""
    rng = np.random.default_rng(seed)
    y = np.sort(np.linspace(-3, 3, depth) + rng.uniform(-0.08, 0.08, depth))
    x = rng.uniform(-0.2, 0.2, depth)
    along = np.array([np.cos(np.radians(turn)), np.sin(np.radians(turn))])
    across = np.array([-along[1], along[0]])
    return Lines(np.outer(y, across) + np.outer(x - 3, along), np.outer(y, across) + np.outer(x + 3, along))


@needs_chromium
@pytest.mark.slow
def test_a_page_gives_no_volume_that_another_fovea_would_change(browser, tmp_path):
    found = found_in(30)
    depth, _, width = found.volume.shape
    wide = (10 / depth, 0.004, 10 / width)
    y, x = np.meshgrid(np.linspace(-5, 5, depth), np.linspace(-5, 5, width), indexing="ij")
    pits = sum(share * np.exp(-((x - cx) ** 2 + y**2) / 0.25) for cx, share in ((-0.7, 1), (0.75, 0.97)))
    rows = 150 - (320 + 15 * x - 120 * pits) / 4 * (1 - np.linspace(0, 1, len(SURFACES))[:, None, None] ** 0.5)
    surfaces = dict(zip(SURFACES, rows.astype(np.float32), strict=True))
    found = replace(found, surfaces=surfaces, spacing_mm=wide, volume=replace(found.volume, spacing_mm=wide))
    grid = found.etdrs()
    assert grid.rivals_mm and grid.volume_mm3 is None
    open_page(browser, found, tmp_path)
    assert_same(numbers(browser), expected_numbers(found))


@needs_chromium
@pytest.mark.parametrize("turned", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fovea_set_in_the_page_is_the_centre_of_the_zones(browser, tmp_path, turned):
    found = found_eye(25, 3, **({"lines": tilted(25, 20.0, 1)} if turned else {}))
    depth = found.volume.shape[0]
    open_page(browser, found, tmp_path)
    as_found = numbers(browser)
    browser.mouse('[data-part="map"]', 0.6, 0.45)
    assert numbers(browser) == as_found, "nothing is set unless correcting was begun"
    browser.key("e")
    browser.mouse('[data-part="map"]', 0.6, 0.45)
    assert numbers(browser) != as_found and told(browser)["fovea"]
    said = browser.js("document.querySelector('[data-part=\"hand-status\"]').textContent")
    assert said.startswith(f"The fovea is set in B-scan {int(told(browser)['bscan']) + 1}, ")
    x, y = found.etdrs().centre_mm
    bscan, ascan = (float(at) for at in told(browser)["fovea"].split(","))
    assert found.place().to_mm(bscan, ascan) == pytest.approx((x + 0.1 * 6.8, y - 0.05 * 6.8), abs=0.02)
    browser.key("z")
    assert numbers(browser) == as_found and not told(browser)["fovea"]
    browser.key("ArrowDown")
    browser.key("ArrowRight", shift=True)
    browser.key("f")
    shown = told(browser)
    assert shown["fovea"] == f"{depth - 1 - int(shown['bscan'])},{shown['column']}"
    where = browser.js("document.querySelector('[data-part=\"readout\"]').textContent")
    assert f"A-scan {int(shown['column']) + 1} of " in where, "counted as below the B-scan"
    assert f"A-scan {int(shown['column']) + 1}; zones" in browser.js(STATUS)
    assert "set by hand" in browser.js("document.querySelector('[data-part=\"numbers-note\"]').textContent")

    browser.js("document.querySelector('[data-part=\"author\"]').value = 'A. Grader'")
    path = save(browser, tmp_path)
    by_hand = read_corrections(path)
    assert by_hand.fovea == (depth - 1 - int(shown["bscan"]), float(shown["column"])) and not by_hand.touched
    corrected = found.corrected(by_hand)
    assert corrected.etdrs().centre == "fovea"
    assert_same(numbers(browser), expected_numbers(corrected))
    if turned:
        return  # the file is the same wherever its B-scans lie

    again = tmp_path / "again"
    again.mkdir()
    open_page(browser, found, again)
    browser.key("e")
    node = browser.call("DOM.getDocument", depth=-1)["root"]["nodeId"]
    chosen = browser.call("DOM.querySelector", nodeId=node, selector='[data-part="load"]')["nodeId"]
    browser.call("DOM.setFileInputFiles", nodeId=chosen, files=[str(path)])
    browser.wait(f"document.querySelector('{ROOT}').dataset.fovea !== ''")
    said = browser.js("document.querySelector('[data-part=\"hand-status\"]').textContent")
    assert said.startswith("Loaded: the fovea of A. Grader")
    assert_same(numbers(browser), expected_numbers(corrected))
    assert read_corrections(save(browser, again)).fovea == by_hand.fovea
    browser.key("f", shift=True)
    assert numbers(browser) == as_found
    browser.key("z")
    browser.assert_quiet()


@needs_chromium
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_page_measures_any_raster_as_python_does(browser, tmp_path, seed):
    rng = np.random.default_rng(seed)
    depth = int(rng.integers(12, 40))
    facts = {"lines": tilted(depth, float(rng.uniform(-30, 30)), seed)} if seed % 2 else {}
    found = found_eye(depth, seed, **facts)
    depth, _, width = found.volume.shape
    laterality = (None, "R", "L")[seed % 3]
    found = replace(found, volume=replace(found.volume, laterality=laterality, superior_first=(None, True)[seed % 2]))
    y, x = np.meshgrid(np.linspace(-3, 3, depth), np.linspace(-3, 3, width), indexing="ij")
    for cx, cy in rng.uniform(-1.5, 1.5, (2, 2)):  # depressions that rival the pit
        found.surfaces["ilm"][:] += (15 * np.exp(-((x - cx) ** 2 + (y - cy) ** 2) / 0.3)).astype(np.float32)
    for name in SURFACES[1:]:
        np.maximum(found.surfaces[name], found.surfaces["ilm"], out=found.surfaces[name])
    found.surfaces["bm"][rng.random((depth, width)) < 0.02] = np.nan
    open_page(browser, found, tmp_path)
    assert_same(numbers(browser), expected_numbers(found))
    browser.assert_quiet()


@needs_chromium
@pytest.mark.slow
def test_corrections_of_a_page_with_an_axial_length_are_measured_by_it(browser, tmp_path):
    found = found_eye()
    open_page(browser, replace(found, axial_length_mm=27.5), tmp_path)
    browser.key("e")
    browser.js("document.querySelector('[data-part=\"author\"]').value = 'A. Grader'")
    (depth, height, _), shown = found.volume.shape, int(told(browser)["bscan"])
    y = (float(found.surfaces["ilm"][depth - 1 - shown, 60]) + 0.5) / height
    browser.mouse(BSCAN, 0.5, y, to=(0.5, y - 0.05))
    path = save(browser, tmp_path)
    corrected = found.corrected(read_corrections(path))
    assert corrected.axial_length_mm == 27.5
    assert_same(numbers(browser), expected_numbers(corrected))
    assert "for an axial length of 27.5 mm" in row_of(corrected)["zones_note"]
    assert replace(found, axial_length_mm=27.5).corrected(read_corrections(path)).axial_length_mm == 27.5
    with pytest.raises(CorrectionsError, match=r"made with an axial length of 27\.5 mm, not 24"):
        replace(found, axial_length_mm=24.0).corrected(read_corrections(path))

    nominal = tmp_path / "nominal"  # a page without the length would save the corrections without it
    nominal.mkdir()
    open_page(browser, found, nominal)
    choose_file(browser, path)
    browser.wait(f"{STATUS}.startsWith('Not loaded: corrected with an axial length of 27.5 mm; make this page with')")


@needs_chromium
def test_a_stroke_ends_where_it_began_whatever_is_pressed_meanwhile(browser, tmp_path):
    """Other keys and the wheel would leave its B-scan, a second finger its history."""
    found = found_eye()
    open_page(browser, found, tmp_path)
    browser.key("e")
    (depth, height, width), shown = found.volume.shape, int(told(browser)["bscan"])
    y = (float(found.surfaces["ilm"][depth - 1 - shown, 60]) + 0.5) / height
    left, top, wide, high = browser.js(
        f"(({{left, top, width, height}}) => [left, top, width, height])"
        f"(document.querySelector('{BSCAN}').getBoundingClientRect())"
    )
    places = [{"x": left + 60.5 / width * wide, "y": top + (y - up) * high} for up in (0, 0.02, 0.04)]

    def mouse(kind: str, place: int, **more) -> None:
        browser.call("Input.dispatchMouseEvent", type=kind, button="left", buttons=1, **places[place], **more)

    mouse("mousePressed", 0, clickCount=1)
    mouse("mouseMoved", 1)
    for key in ("ArrowDown", "k", "z", "l"):
        browser.key(key)
    browser.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=200, **places[1])
    mouse("mouseMoved", 2)
    mouse("mouseReleased", 2, clickCount=1)
    state = told(browser)
    assert [state[name] for name in ("bscan", "line")] == [str(shown), "ilm"]
    assert [state[name] for name in ("changed", "checked", "undo")] == ["1", "0", "1"]
    browser.key("z")
    assert (told(browser)["changed"], told(browser)["undo"]) == ("0", "0")

    fingers = [{**places[0], "id": 1}, {**places[0], "id": 2}]
    touch = partial(browser.call, "Input.dispatchTouchEvent")
    touch(type="touchStart", touchPoints=fingers[:1])
    touch(type="touchMove", touchPoints=[{**places[2], "id": 1}])
    touch(type="touchStart", touchPoints=[{**places[2], "id": 1}, fingers[1]])
    touch(type="touchEnd", touchPoints=[])
    assert told(browser)["changed"] == told(browser)["undo"] == "1"
    browser.key("z")
    assert (told(browser)["changed"], told(browser)["undo"]) == ("0", "0")


@needs_chromium
def test_control_s_saves_from_the_box_of_the_name(browser, tmp_path):
    """There it would save the page, without the corrections."""
    open_page(browser, found_eye(), tmp_path)
    browser.key("e")
    browser.key("k")
    browser.js("((box) => { box.value = 'A. Grader'; box.focus(); })(document.querySelector('[data-part=\"author\"]'))")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="s", code="KeyS", windowsVirtualKeyCode=83, modifiers=2)
    wait_until(
        lambda: any(path.stat().st_size for path in tmp_path.glob("corrections-*.json")), "a file of corrections", 20
    )


@needs_chromium
@pytest.mark.slow
def test_a_page_measures_uneven_and_missing_bscans_as_python_does(browser, tmp_path):
    found = found_eye(25)
    at = np.r_[np.linspace(-3, -0.5, 15), np.linspace(0.7, 3, 10)]
    x = np.full(25, 3.0)
    lines = Lines(np.stack([-x, at], axis=1), np.stack([x, at], axis=1))
    found = replace(found, volume=replace(found.volume, lines=lines, superior_first=True))
    found.masks["drusen"][2:20:7, 100:110, 20:40] = True
    open_page(browser, found, tmp_path)
    expected = expected_numbers(found)
    assert expected["centre"] is expected["drusen"] is None and expected["outer inferior"] is not None
    amounts = {name: value for name, value in expected.items() if name not in MASKS}
    assert_same(numbers(browser), amounts)
    sparse = next(each for each in row_of(found)["zones_note"].split("; ") if "too far apart" in each)
    assert f"{sparse}." in note_of(browser)

    even = np.r_[np.linspace(-3, 0, 17), np.linspace(0.4, 3, 8)]
    lines = Lines(np.stack([-x, even], axis=1), np.stack([x, even], axis=1))
    found = replace(found, volume=replace(found.volume, lines=lines))
    (tmp_path / "even").mkdir()
    open_page(browser, found, tmp_path / "even")
    assert found.volume_nl("drusen") is not None
    assert_same(numbers(browser), expected_numbers(found))


@needs_chromium
@pytest.mark.slow
def test_single_and_refused_scans_are_corrected_without_zones(browser, tmp_path):
    words = "document.body.innerText.toLowerCase()"
    (tmp_path / "one").mkdir()
    open_page(browser, found_eye(1), tmp_path / "one")
    assert numbers(browser) == {} and browser.js(words).count("no zones") == 1
    refused = replace(found_eye(), verdict=Verdict(("unsure",), 1.5, ("unfamiliar",)))
    open_page(browser, refused, tmp_path)
    assert browser.js(words).count("do not believe it") == browser.js(words).count("unsure") == 1
    assert numbers(browser) == {} and note_of(browser) == ""
    browser.key("e")
    browser.key("Home")
    for _ in range(25):
        browser.key("k")
        browser.key("ArrowDown")
    assert told(browser)["checked"] == "25"
    assert note_of(browser).startswith("After correction nothing speaks against it.")
    browser.js("document.querySelector('[data-part=\"author\"]').value = 'x'")
    corrected = refused.corrected(read_corrections(save(browser, tmp_path)))
    assert corrected.verdict.accepted and not corrected.doubtful.any()
    assert_same(numbers(browser), expected_numbers(corrected))
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
    assert browser.js("document.documentElement.scrollWidth") <= 390
    browser.call("Emulation.clearDeviceMetricsOverride")


# ---- the file ----


def edits(content: dict) -> dict[str, object]:
    """What somebody could do to a file by hand, by what the refusal says."""
    one = content["bscans"][0]
    rows = one["surfaces"]["ilm"]

    def with_bscan(**changes) -> dict:
        return content | {"bscans": [one | changes]}

    return {
        "scan": content | {"scan": "abc"},
        "format": content | {"format": "octfm corrections 9"},
        "author": {key: value for key, value in content.items() if key != "author"},
        "path": content | {"path": "/home/x"},
        "time": content | {"time": "yesterday"},
        "shape": content | {"shape": [25, 200]},
        "expected B-scans, rows and A-scans": content | {"shape": [0, 200, 120]},
        "120 rows": with_bscan(surfaces={"ilm": rows[:-1]}),
        "rows from 0 to 199": with_bscan(surfaces={"ilm": [1e6, *rows[1:]]}),
        "rows from 0 to 199, got 2.0, 1e+300": with_bscan(surfaces={"ilm": [1e300, *[2.0] * (len(rows) - 1)]}),
        "lies above ilm": with_bscan(surfaces={"ilm": rows, "bm": [3.0, *rows[1:]]}),
        "bm at row 3 lies above ilm": with_bscan(
            surfaces={"ilm": rows, "ez": [None, *rows[1:]], "bm": [3.0, *rows[1:]]}
        ),
        "surfaces": with_bscan(surfaces={"choroid": rows}),
        "number": with_bscan(surfaces={"ilm": ["thick", *rows[1:]]}),
        "at most once": content | {"bscans": [one, one]},
        "each of 0 to 24": with_bscan(bscan=25),
        "all lines of a checked B-scan": with_bscan(checked=True),
        "pairs of first voxel and count": with_bscan(areas={"drusen": [1, 2, 3]}),
        "do not overlap": with_bscan(areas={"drusen": [10, 5], "detachment": [12, 2]}),
        "runs within the B-scan": with_bscan(areas={"drusen": [200 * 120 - 1, 2]}),
        "runs within the B-scan that": with_bscan(areas={"drusen": [-3, 5]}),
        "rows from 0 to 199, got -40.0": with_bscan(surfaces={"ilm": [-40.0, *rows[1:]]}),
        "larger numbers": with_bscan(areas={"drusen": [10**30, 2]}),
        "JSON": "",
    }


def test_a_file_too_large_for_corrections_is_not_read(tmp_path, monkeypatch):
    path = written(stated(found_in(), checked=[1]), tmp_path / "large.json")
    monkeypatch.setattr("octfm.layers.corrections.MOST_BYTES", path.stat().st_size - 1)
    with pytest.raises(CorrectionsError, match=r"large\.json: [\d,]+ bytes, expected at most"):
        read_corrections(path)


def test_a_file_edited_wrongly_is_refused_in_one_line(tmp_path):
    found = found_in()
    content = stated(found, lines={(3, "ilm"): found.surfaces["ilm"][3] - 2})
    assert read_corrections(written(content, tmp_path / "good.json")).author == "A. Grader"
    for number, (said, wrong) in enumerate(edits(content).items()):
        path = written(wrong, tmp_path / f"{number}.json")
        if not wrong:
            path.write_bytes(b"\xff{")
        with pytest.raises(CorrectionsError) as refused:
            read_corrections(path)
        assert said in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)
    whole = stated(found, checked=[3])
    whole["bscans"][0]["areas"] = None
    with pytest.raises(CorrectionsError, match="B-scan 3: expected the areas of a checked B-scan, got none"):
        read_corrections(written(whole, tmp_path / "without_areas.json"))
    for place in (tmp_path / "missing.json", tmp_path / "empty", Path("x" * 5000), Path("a\0b")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(CorrectionsError):
            find_corrections(place)


PATHS = st.lists(st.integers(0, 10**6), min_size=1, max_size=5)
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


@settings(max_examples=30)
@given(path=PATHS, value=ODD)
def test_any_edit_is_read_or_refused_in_one_line(tmp_path, path, value):
    found = found_in(3)
    content = stated(found, checked=[1], lines={(0, "ilm"): found.surfaces["ilm"][0]}, areas={2: {"drusen": [5, 3]}})
    place = content
    for turn in path:  # follow the numbers down into the file, and change what lies there
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = keys[turn % len(keys)]
        if turn is path[-1] or not isinstance(place[key], dict | list) or not place[key]:
            place[key] = value
            break
        place = place[key]
    file = written(content, tmp_path / "edited.json")
    try:
        corrected = found.corrected(read_corrections(file))
    except CorrectionsError as error:
        assert "\n" not in str(error)
    else:
        assert all(rows.shape == (3, 120) for rows in corrected.surfaces.values())


@given(seed=st.integers(0, 2**32 - 1), parts=st.integers(2, 30))
def test_areas_come_back_voxel_for_voxel_and_none_may_overlap(tmp_path, seed, parts):
    """In any order, as run lengths of neighbouring areas of four kinds."""
    rng, found = np.random.default_rng(seed), found_in(3)
    height, width = found.volume.shape[1:]
    ends = np.unique([0, *rng.integers(0, height * width, parts), height * width])
    kinds, labels = rng.integers(0, 1 + len(MASKS), len(ends) - 1), np.zeros(height * width, np.uint8)
    runs = {name: list[int]() for name in MASKS}
    for i in rng.permutation(len(kinds)):
        labels[ends[i] : ends[i + 1]] = kinds[i]
        if kinds[i]:
            runs[MASKS[kinds[i] - 1]] += [int(ends[i]), int(ends[i + 1] - ends[i])]
    file = written(stated(found, areas={1: runs}), tmp_path / "areas.json")
    corrected = read_corrections(file)
    assert np.array_equal(corrected.labels(1), labels.reshape(height, width)) and corrected.touched == {1}
    if taken := np.flatnonzero(labels).tolist():
        runs[MASKS[seed % len(MASKS)]] += [taken[seed % len(taken)], 1]
        with pytest.raises(CorrectionsError, match="runs within the B-scan that do not overlap"):
            read_corrections(written(stated(found, areas={1: runs}), file))


def test_corrections_of_another_scan_or_network_are_refused(tmp_path):
    found = found_in()
    own = read_corrections(
        written(stated(found, lines={(3, "ilm"): found.surfaces["ilm"][3] - 2}), tmp_path / "c.json")
    )
    other = replace(found, volume=replace(found.volume, voxels=found.volume.voxels + np.uint8(1)))
    with pytest.raises(CorrectionsError, match="corrections of another scan"):
        other.corrected(own)
    with pytest.raises(CorrectionsError, match="corrects lines of 'test 000000000000', this is newer"):
        replace(found, model="newer").corrected(own)
    with pytest.raises(CorrectionsError, match=r"shape \(200, 25, 120\), expected the scan's \(25, 200, 120\)"):
        found.corrected(read_corrections(written(stated(found, shape=[200, 25, 120]), tmp_path / "turned.json")))
    (tmp_path / "turned.json").unlink()
    gaps = {(3, name): np.full(120, np.nan) for name in SURFACES[1:]} | {(3, "bm"): found.surfaces["ilm"][3] - 1}
    with pytest.raises(CorrectionsError, match=r"B-scan 3, A-scan 0: bm at row .* lies above ilm"):
        found.corrected(read_corrections(written(stated(found, lines=gaps), tmp_path / "c.json")))
    across = stated(found, lines={(3, "ilm"): found.surfaces["bm"][3] + 1})
    with pytest.raises(CorrectionsError, match=r"B-scan 3, A-scan 0: nfl_gcl at row .* lies above ilm"):
        found.corrected(read_corrections(written(across, tmp_path / "across.json")))
    written(stated(found, checked=[1]), tmp_path / "d.json")
    (tmp_path / "across.json").unlink()
    with pytest.raises(CorrectionsError, match="corrects the same scan as"):
        find_corrections(tmp_path)


def test_a_fovea_set_by_hand_is_in_rows_and_takes_no_part_of_the_range(tmp_path):
    found = replace(found_in(25), ranges=Ranges((3.0, 0.5, 0.0), (3.0, 0.5, 0.0), 1000))
    own = found.etdrs()
    bscan, ascan = (float(at[0]) for at in found.place().to_index(*(np.array([at]) for at in own.centre_mm)))
    corrected = found.corrected(read_corrections(written(stated(found, fovea=[bscan, ascan]), tmp_path / "a.json")))
    grid, row = corrected.etdrs(), row_of(corrected)
    assert grid.centre_mm == pytest.approx(own.centre_mm) and grid.mean_um == pytest.approx(own.mean_um)
    assert not any(grid.place_um.values()) and own.place_um["centre"] > 1
    (low, high), (narrow, upper) = (each.zone_ranges()["centre"] for each in (found, corrected))
    assert low < narrow < grid.mean_um["centre"] < upper < high
    assert row["grid_centre"] == "fovea" and "the fovea was set by hand" in row["zones_note"]
    assert row["corrected_bscans"] == row["checked_bscans"] == "0"
    assert "0 of 25 B-scans and the fovea" in describe(corrected)
    elsewhere = found.corrected(read_corrections(written(stated(found, fovea=[2.5, 30]), tmp_path / "b.json")))
    assert elsewhere.etdrs().centre_mm == pytest.approx(found.place().to_mm(2.5, 30))


def test_a_fovea_beside_the_scan_is_refused(tmp_path):
    found = found_in(9)
    for fovea in ([9, 3], [0, -1], [0, found.volume.shape[2]]):
        with pytest.raises(CorrectionsError, match="fovea: expected a B-scan from 0 to 8 and an A-scan from 0 to 119"):
            read_corrections(written(stated(found, fovea=fovea), tmp_path / "a.json"))


def test_only_what_somebody_looked_at_is_trusted(tmp_path):
    found = replace(found_eye(), verdict=Verdict(("unsure", "narrow"), 1.5, ("unfamiliar", "field")))
    lines = {(2, "ilm"): found.surfaces["ilm"][2], (4, "ez"): found.surfaces["ez"][4]}
    part = found.corrected(read_corrections(written(stated(found, checked=[3], lines=lines), tmp_path / "c.json")))
    error = part.expected_error_um()
    assert not error[[2, 3]].any() and (error[[1, 4]] == found.expected_error_um()[[1, 4]]).all()
    assert not part.expected_error_um("ez", "bm")[4].any()
    with pytest.raises(EvaluationError, match="no surface 'ILM'; surfaces: ilm"):
        found.expected_error_um("ILM")
    with pytest.raises(TypeError, match="expected Corrections, got PosixPath; octfm"):
        found.corrected(tmp_path / "c.json")
    assert part.verdict.codes == ("unfamiliar", "field") and part.zone_ranges() == {}
    whole = found.corrected(read_corrections(written(stated(found, checked=range(25)), tmp_path / "d.json")))
    assert whole.verdict.codes == ("field",), "a person answers for lines, not for millimetres"
    assert "corrected by hand" in whole.comments and "corrected" in repr(whole._described())


# ---- its uses ----


def layered_scan(path: Path, seed: int = 203) -> Path:
    from octfm.phantom.native.stream import Stream

    image = next(i for i in map(Stream(seed, bscans=2, randomised=0.0), range(9)) if i.accident == "none")
    np.savez(path, volume=image.voxels[:, :, ::4], spacing_mm=(1.0, image.spacing_mm[1], 4 * image.spacing_mm[2]))
    return path


def corrections_of(scan: Path, path: Path) -> Path:
    found = octfm.segment(scan)
    return written(stated(found, checked=[0], areas={1: {"drusen": [5, 3]}}, participant="P7"), path)


def test_the_command_applies_corrections(tmp_path):
    scan, other = layered_scan(tmp_path / "a.npz"), tmp_path / "b.npz"
    path = corrections_of(scan, tmp_path / "corrections.json")
    done = invoke("segment", scan, "--apply-corrections", path)
    assert done.exit_code == 0 and "corrected by hand: 2 of 2 B-scans" in done.output, done.output
    with np.load(scan) as file:
        np.savez(other, volume=file["volume"][:, :, ::-1], spacing_mm=file["spacing_mm"])
    refused = invoke("segment", other, "--apply-corrections", path)
    assert isinstance(refused.exception, CorrectionsError) and "another scan" in str(refused.exception)
    training = invoke("segment", "encoder=a", "--apply-corrections", path)
    assert isinstance(training.exception, ConfigError)


@pytest.mark.slow
def test_a_corrected_row_says_so_and_stays(tmp_path):
    scan, other = layered_scan(tmp_path / "a.npz"), layered_scan(tmp_path / "b.npz", 204)
    path = corrections_of(scan, tmp_path / "corrections.json")
    table, said = tmp_path / "t.csv", []
    assert write_table([str(scan), str(other)], table, echo=said.append) == 2
    assert [row["corrected_bscans"] for row in read_table(table)] == ["", ""]
    assert write_table([str(scan), str(other)], table, corrections=find_corrections(path), echo=said.append) == 1
    rows = read_table(table)
    assert [(row["corrected_bscans"], row["corrected_participant"]) for row in rows] == [("2", "P7"), ("", "")]
    assert write_table([str(scan), str(other)], table, echo=said.append) == 0, "a row stays corrected"
    corrected, now = table.read_text(), scan.stat().st_mtime_ns
    os.utime(scan, ns=(0, 0))  # copied back from a backup
    assert write_table([str(scan), str(other)], table, echo=said.append) == 0 and table.read_text() == corrected
    assert "has changed since somebody corrected it" in said[-1]
    os.utime(scan, ns=(now, now))
    with pytest.raises(CorrectionsError, match="corrections of none of these scans"):
        write_table([str(other)], table, corrections=find_corrections(path), echo=said.append)


def test_a_corrected_row_that_another_axial_length_leaves_as_it_was_is_named(tmp_path):
    scan, table, lengths, said = layered_scan(tmp_path / "a.npz"), tmp_path / "t.csv", tmp_path / "lengths.csv", []
    hand = find_corrections(corrections_of(scan, tmp_path / "corrections.json"))

    def measured(length, **corrections):
        lengths.write_text(f"source,axial_length_mm\n{scan},{length}\nanother.npz,25\n")
        known = {"axial_lengths": read_axial_lengths(lengths), "echo": said.append}
        return write_table([str(scan)], table, **known, **corrections)

    assert measured(25, corrections=hand) == 1 and measured(25) == 0 and len(said) == 1
    assert measured("") == 0 and len(said) == 1, "it may go by the length of its page"
    assert measured(26) == 0 and read_table(table)[0]["axial_length_mm"] == "25"
    assert "another axial length" in said[1] and "left as it was; give --apply-corrections" in said[1]
    assert measured(26, corrections=hand) == 1 and read_table(table)[0]["axial_length_mm"] == "26"


def test_calibration_counts_scans_that_were_corrected_whole(tmp_path):
    found = replace(found_in(), ranges=Ranges((5.0, 0.0, 0.0), (5.0, 0.0, 0.0), 9))
    shifted = found.surfaces["bm"][0] + 1
    whole = stated(found, checked=range(25), lines={(d, "bm"): shifted for d in range(25)}, participant="P1")
    corrected = found.corrected(read_corrections(written(whole, tmp_path / "w.json")))
    part = found.corrected(read_corrections(written(stated(found, checked=[1]), tmp_path / "p.json")))
    as_found, by_hand = row_of(found), row_of(corrected)
    rows = [as_found | {"source": f"{i}"} for i in range(60)]
    fixed = [by_hand | {"source": f"{i}", "corrected_participant": f"P{i}"} for i in range(55)]
    fixed += [row_of(part) | {"source": "56", "corrected_participant": "P56"}, as_found | {"source": "57"}]
    save_table(fixed, tmp_path / "fixed.csv")
    scaled, said = calibrate_rows(rows, tmp_path / "fixed.csv")
    assert "55 participants" in scaled[0]["range_kind"] and "1 scan left out: not every B-scan was" in said[-1]
    assert float(scaled[0]["range_factor"]) == pytest.approx(4 / 5, rel=0.02), "4 µm of a range of 5"
    save_table(fixed[:3], tmp_path / "few.csv")
    with pytest.raises(EvaluationError, match="at least 50 participants"):
        calibrate_rows(rows, tmp_path / "few.csv")


def test_a_file_of_the_first_pages_is_read(tmp_path):
    """They knew neither fovea nor axial length, and what they saved is hours of somebody's work."""
    (tmp_path / "corrections-8cf526b0.json").write_text(
        '{"format": "octfm corrections 1", "scan": "8cf526b084a75ed4bcf8d3bc1d1cda42", "network": "layers-2 b3262ca03a42", '
        '"octfm": "0.1.0", "author": "A. Reader", "participant": "P7", "time": "2026-11-23T21:04:00.000Z", '
        '"shape": [2, 4, 3], "bscans": [{"bscan": 1, "checked": false, "surfaces": {"rpe_peak": [2.5, null, 3]}, '
        '"areas": {"subretinal_fluid": [4, 2]}}]}',
        "utf-8",
    )
    found = read_corrections(tmp_path / "corrections-8cf526b0.json")
    assert (found.touched, found.checked, found.fovea, found.axial_length_mm) == ({1}, set(), None, None)
    np.testing.assert_array_equal(found.surfaces["rpe_peak"][1], np.float32([2.5, np.nan, 3]))
    assert (found.labels(1) == 1 + MASKS.index("subretinal_fluid")).tolist() == [[False] * 3, [False, True, True]] + [
        [False] * 3
    ] * 2


@pytest.mark.parametrize("blank", ["", ", "], ids=["no other column", "a blank cell"])
def test_calibration_takes_a_table_with_the_corrected_participant_and_zones_alone(tmp_path, blank):
    row = row_of(replace(found_in(), ranges=Ranges((5.0, 0.0, 0.0), (5.0, 0.0, 0.0), 9)))
    lines = [f"{i}{blank},P{i},{float(row['centre_um']) + 4}" for i in range(60)]
    columns = f"source{',participant' * bool(blank)},corrected_participant,centre_um"
    (tmp_path / "fixed.csv").write_text("\n".join([columns, *lines]))
    scaled, _ = calibrate_rows([row | {"source": f"{i}"} for i in range(60)], tmp_path / "fixed.csv")
    assert "60 participants" in scaled[0]["range_kind"]


def test_calibration_counts_scans_without_a_participant_as_left_out(tmp_path):
    """Nothing makes whoever corrects a scan type whose it is; more corrections would not help."""
    found = replace(found_in(), ranges=Ranges((5.0, 0.0, 0.0), (5.0, 0.0, 0.0), 9))
    lines = {(d, "bm"): found.surfaces["bm"][0] + 1 for d in range(25)}
    by_hand = row_of(found.corrected(read_corrections(written(stated(found, lines=lines), tmp_path / "c.json"))))
    as_found = row_of(found)
    save_table([by_hand | {"source": f"{i}", "corrected_participant": ""} for i in range(60)], tmp_path / "fixed.csv")
    with pytest.raises(EvaluationError, match=r"got none \(60 scans left out: the table names no"):
        calibrate_rows([as_found | {"source": f"{i}"} for i in range(60)], tmp_path / "fixed.csv")


def test_calibration_counts_no_scan_that_was_measured_by_another_axial_length(tmp_path):
    """Its zones are other places of the retina: they differ by more than lines."""
    found = replace(found_in(), ranges=Ranges((5.0, 0.0, 0.0), (5.0, 0.0, 0.0), 9))
    lines = {(d, "bm"): found.surfaces["bm"][0] + 1 for d in range(25)}
    facts = {"checked": range(25), "lines": lines, "participant": "P1"}
    nominal, longer = (
        row_of(found.corrected(read_corrections(written(stated(found, **facts, **length), tmp_path / "c.json"))))
        for length in ({}, {"axial_length_mm": 27.5})
    )
    assert nominal["centre_um"] != longer["centre_um"]
    as_found = row_of(found)
    rows = [as_found | {"source": f"{i}"} for i in range(60)]
    own = [nominal | {"source": f"{i}", "corrected_participant": f"P{i}"} for i in range(50)]
    other = [longer | {"source": f"{i}", "corrected_participant": f"P{i}"} for i in range(50, 60)]
    save_table([*own, *other], tmp_path / "fixed.csv")
    scaled, said = calibrate_rows(rows, tmp_path / "fixed.csv")
    assert float(scaled[0]["range_factor"]) == pytest.approx(4 / 5, rel=0.02)
    assert said[-1] == "10 scans left out: measured by another axial length than in the table"
    save_table([*own[:3], *other], tmp_path / "few.csv")
    with pytest.raises(EvaluationError, match=r"got 3 of \w+ \(10 scans left out"):
        calibrate_rows(rows, tmp_path / "few.csv")


def clinic_of(folder: Path, participants: int) -> list[Path]:
    """One scan per participant, 2.5 × 3 mm, with a bright retina."""
    rng, files = np.random.default_rng(5), []
    for number in range(participants):
        voxels = rng.integers(0, 40, (5, 96, 64)).astype(np.uint8)
        voxels[:, 36 : 60 + number] += np.uint8(150)
        files.append(write_oct_dicom(folder / f"{number}.dcm", voxels, (0.5, 0.01, 0.045), participant=f"P{number}"))
    return files


@pytest.mark.slow
def test_corrected_numbers_are_labels_that_finetune_learns(tmp_path, monkeypatch):
    """From files of corrections through a table of octfm segment to a fine-tuned model, by acquisition."""
    torch.manual_seed(0)
    finder = LayerFinder(LayerNet(LayerNetConfig((8, 8))))
    monkeypatch.setattr("octfm.layers.table.load_finder", lambda **_: finder)
    # An untrained network stands for one that is wrong everywhere, in scans that somebody has corrected whole.
    monkeypatch.setattr("octfm.layers.segment.judge", lambda *_: Verdict(("unsure",), 1.5, ("unfamiliar",)))
    files, hand, table = clinic_of(tmp_path / "clinic", 13), tmp_path / "hand", tmp_path / "corrected.csv"
    hand.mkdir()
    for number, path in enumerate(files[:-1]):
        volume = octfm.read_volume(path)
        lines = {name: [36 + i * (24 + number) / 8] * 64 for i, name in enumerate(SURFACES)}
        bscans = [{"bscan": d, "checked": True, "surfaces": lines, "areas": {}} for d in range(5)]
        content = stated(
            found_in(), scan=fingerprint(volume.voxels), network=finder.model, shape=[5, 96, 64], bscans=bscans
        )
        written(content, hand / f"{number}.json")
    cut = tmp_path / "clinic" / "cut.dcm"
    cut.write_bytes(files[0].read_bytes()[:-2000])
    command = ["segment", str(tmp_path / "clinic"), "--out", str(table), "--apply-corrections", str(hand)]
    done = invoke(*command, "--only-corrected")
    assert done.exit_code == 0 and str(cut) in done.output, done.output
    assert len(read_table(table)) == 12, "what cannot be read has a line on the terminal, and no row"
    cut.unlink()
    expected = {row["acquisition"]: float(row["centre_um"]) for row in read_table(table)}
    assert sorted(expected.values()) == pytest.approx([10.0 * (24 + number) for number in range(12)], abs=0.1)

    people, splits = tmp_path / "people.csv", ("train",) * 7 + ("val",) * 2 + ("test",) * 4
    people.write_text("pid,set\n" + "".join(f"P{number},{split}\n" for number, split in enumerate(splits)))
    catalog = octfm.scan(
        tmp_path / "clinic", participants=people, columns={"participant": "pid", "split": "set"}, workers=0
    )
    store = octfm.prepare(catalog, tmp_path / "prepared", small_preprocessing(), progress=False, workers=0)
    run = quick_pretrain(pretrain_config(steps=2), store, tmp_path / "run", echo=quiet)
    config = finetune_settings(run, store, table, target="centre_um", order=[], epochs=2, batch_size=2)
    predicted = read_table_of_predictions(finetune(config, tmp_path / "tuned", echo=quiet) / "predictions.parquet")
    learned = {str(one["acquisition"]): float(one["label"]) for one in predicted.to_pylist()}
    assert len(learned) == 3 and learned == pytest.approx({uid: expected[uid] for uid in learned})

    found = tmp_path / "found.csv"
    write_table([str(files[-1])], found, echo=quiet)
    with pytest.raises(EvaluationError, match="rows of scans that nobody has corrected"):
        write_table(map(str, files), found, corrections=find_corrections(hand), only_corrected=True, echo=quiet)
    with pytest.raises(ConfigError, match="--only-corrected: limits a table to corrected scans"):
        invoke("segment", files[0], "--only-corrected", catch_exceptions=False)


def truth_for(folder: Path) -> tuple:
    """A small store whose scans have fingerprints, and corrections of all of them."""
    store = small_store(folder / "prepared")
    edit_rows(folder / "prepared", lambda row: {"pixels": f"{row.index:032x}"})
    (folder / "hand").mkdir()
    depth, _, width = SIZE
    for row in store.rows:
        bscans = []
        for d in range(depth):
            lines = {name: [20.0 + 2 * i] * width for i, name in enumerate(SURFACES)}
            one = {"bscan": d, "checked": d < 4, "surfaces": lines if d < 4 else {"bm": [40.0] * width}}
            bscans.append(one | ({"areas": {"drusen": [64, 8]}} if d < 4 else {}))
        content = stated(found_in(), scan=f"{row.index:032x}", shape=list(SIZE), bscans=bscans)
        written(content, folder / "hand" / f"{row.index}.json")
    return type(store).open(folder / "prepared"), folder / "hand"


@pytest.mark.slow
def test_corrected_and_checked_lines_are_training_truth(tmp_path):
    store, hand = truth_for(tmp_path)
    config = SegmentConfig(truth=str(hand), surfaces=("ilm", "bm"))
    row = store.rows[0]
    truth = read_truth(config, row)
    assert np.isfinite(truth["rows"]).all(axis=2).tolist() == [[True] * 4 + [False] * 4, [True] * 8]
    assert truth["rows"][0, 0, 0] == 20 and truth["rows"][1, 7, 0] == 40 and truth["mask"] is None
    assert to_prepared(truth, transform_of(row)).rows.shape == (2, SIZE[0], SIZE[2])
    with pytest.raises(EvaluationError, match="4 of 8 B-scans have areas"):
        read_truth(config.model_copy(update={"mask_values": (3,)}), row)
    with pytest.raises(EvaluationError, match="no surface called rpe; surfaces: ilm"):
        read_truth(config.model_copy(update={"surfaces": ("rpe",)}), row)
    with pytest.raises(EvaluationError, match="no truth for this acquisition, nor corrections of its voxels"):
        read_truth(config, replace(row, pixels="f" * 32))
    content = json.loads((hand / "0.json").read_text())
    content["bscans"][4:] = [one | {"areas": {}} for one in content["bscans"][4:]]
    written(content, hand / "0.json")
    mask = read_truth(config.model_copy(update={"mask_values": (3,)}), row)["mask"]
    assert mask[0, 2, :8].all() and mask.sum() == 4 * 8


@pytest.mark.slow
def test_a_segmenter_learns_from_corrections(tmp_path):
    store, hand = truth_for(tmp_path)
    run = quick_pretrain(pretrain_config(steps=2), store, tmp_path / "run", echo=quiet)
    config = SegmentConfig(
        encoder=str(run), store=str(tmp_path / "prepared"), truth=str(hand), surfaces=("ilm", "bm"), steps=2
    )
    result = segment(config, tmp_path / "out", baselines=False, echo=quiet)
    assert "bm" in json.dumps(result)
