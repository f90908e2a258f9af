"""What notebooks and terminals show: one line, small HTML that names nobody and escapes, tables for pandas."""

import base64
import io
import json
import re
import shutil
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import octfm
from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.catalog import Catalog
from octfm.display import csv_cell, from_csv_cell, readable
from octfm.encoder.embeddings import of_store, read_embeddings
from octfm.errors import ConfigError, EvaluationError
from octfm.evaluation.probe import probe, write_probe
from octfm.evaluation.results import Result, read_result
from octfm.store.layout import Unprepared
from octfm.store.store import Store
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import Surfaces
from support.browser import Browser, needs_chromium
from support.probe_cohort import Cohort
from support.segmented import found_in
from support.small_store import edit_rows, small_store
from support.untrained import untrained_encoder
from support.volumes import eye

SECRET = "Geheim_19580312"


@given(st.text(alphabet="'=+-@1.e a\t\n＝＋－＠"))
def test_a_cell_of_a_csv_is_no_formula_and_comes_back(text):
    cell = csv_cell(text)
    assert from_csv_cell(cell) == text
    assert cell[:1] not in tuple("=+-@\t\n＝＋－＠") or float(cell) is not None


def test_scanners_and_columns_are_named_as_readers_write_them():
    assert (
        readable("heidelberg_spectralis") == "Heidelberg Spectralis" and readable("optovue_avanti") == "optovue avanti"
    )
    assert readable("cst_um") == "central retinal thickness" and readable("study_group") == "study group"


@pytest.mark.parametrize("text", ["-1.5", "+3", "-2e-3", "", "a-b", "12", "=", "'"])
def test_only_what_could_be_a_formula_is_changed(text):
    assert csv_cell(text) == ("'=" if text == "=" else text)


CLOSED_BY_THEMSELVES = {"img"}


def catalog() -> Catalog:
    rows = [
        Acquisition(
            f"/data/{SECRET}/{k}.dcm", f"{SECRET}{k // 2}", "RL"[k % 2], "topcon_triton", "macula", (8, 64, 32),
            (0.7, 0.03, 0.18), "header", f"1.2.{SECRET}.{k}", "train", {"study_group": "healthy", "uri": "theirs"},
        )
        for k in range(6)
    ]  # fmt: skip
    rejects = (Reject(f"/data/{SECRET}/x.dcm", "empty_file", f"/data/{SECRET}/x.dcm: empty", 0),)
    return Catalog(f"/data/{SECRET}", tuple(rows), rejects, skipped=(Reject(f"{SECRET}.pdf", "layer_heights", "", 3),))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp(SECRET) / "prepared"
    small_store(folder, splits=("train", "train", "test"))
    edit_rows(folder, lambda row: {"participant": SECRET + row.participant, "eye_id": SECRET, "uri": f"{SECRET}.dcm"})
    return Store.open(folder)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp(SECRET)
    cohort = Cohort()
    files = [cohort.embeddings(folder / f"{name}.parquet", name, signal) for name, signal in (("a", 4.0), ("b", 0.5))]
    return probe(files, cohort.labels(folder / "labels.tsv"), targets=["diagnosis", "cst_um"], resamples=200)


@pytest.fixture(scope="module")
def objects(store, result):
    volume = eye()
    return {
        "catalog": catalog(),
        "store": store,
        "stored volume": store[1],
        "arrays": store.read([0]),
        "dataset": store.as_torch(target="study_group", split="train"),
        "volume": volume,
        "line scan": octfm.Volume(volume.voxels[:1], volume.spacing_mm, layout="line", source=SECRET),
        "prepared": untrained_encoder().preprocess(volume),
        "encoder": untrained_encoder(),
        "segmentation": Segmentation({"ilm": np.zeros((4, 9))}, {"fluid": np.zeros((4, 5, 9), bool)}, (0.1, 0.1, 0.1)),
        "scan": found_in(fluid_in=12),
        "refused scan": found_in(reasons=("too dark",)),
        "grid": found_in().etdrs(),
        "acquisition": catalog().acquisitions[0],
        "row": store.rows[0],
        "reject": catalog().rejects[0],
        "unprepared": Unprepared(SECRET, f"{SECRET}.dcm", "topcon_triton", "unreadable", f"{SECRET}.dcm: cut"),
        "layers": found_in().found,
        "surfaces": Surfaces(("ILM", "BM"), np.zeros((2, 4, 9), np.float32), 0.004, source=SECRET),
        "result": result,
    }


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.images: list[dict] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in CLOSED_BY_THEMSELVES:
            self.open.append(tag)
        if tag == "img":
            self.images.append(dict(attrs))
        self.fetched += [value for name, value in attrs if name in ("src", "href") and not value.startswith("data:")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_every_object_prints_one_short_line_that_names_nobody(objects):
    for name, thing in objects.items():
        text = repr(thing)
        assert "\n" not in text and len(text) < 240, (name, text)
        assert re.match(r"\w+\(.+\)$", text), (name, text)
        assert SECRET not in text and "array(" not in text and "tensor(" not in text, name


def test_html_is_small_whole_offline_and_names_nobody(objects):
    shown = {name: thing for name, thing in objects.items() if hasattr(thing, "_repr_html_")}
    assert len(shown) >= 11
    for name, thing in shown.items():
        html = thing._repr_html_()
        tags = Tags()
        tags.feed(html)
        assert not tags.open and not tags.fetched and "<script" not in html, name
        assert len(html) < 120_000 and SECRET not in html, (name, len(html))
        assert all(image["alt"] for image in tags.images), name
    assert "6 volumes of 3 participants" in shown["catalog"]._repr_html_()
    assert "empty_file" in shown["catalog"]._repr_html_()
    for name in ("store", "stored volume", "volume", "scan"):
        assert "data:image/png" in shown[name]._repr_html_(), name


def test_what_a_file_calls_itself_is_escaped_in_html(tmp_path):
    small_store(tmp_path / "s", splits=("train",))
    edit_rows(tmp_path / "s", lambda row: {"scanner": "<script>alert(1)</script>"})
    hostile = Store.open(tmp_path / "s")
    for thing in (hostile, hostile[0], Result(catalog_result("<img src=x onerror=alert(1)>"))):
        assert "<script" not in thing._repr_html_() and "<img src=x" not in thing._repr_html_()


def catalog_result(name: str) -> dict:
    row = {"target": name, "metric": "auroc", "encoder": name, "estimate": 0.7, "low": None, "high": None}
    return {
        "format": "octfm-probe",
        "results": [row | {"n_test_participants": 3}],
        "skipped": [{"target": name, "sentence": name}],
    }


def test_a_picture_has_the_proportions_of_the_tissue():
    from PIL import Image

    from octfm.display import PICTURE_WIDTH, picture

    src, _ = picture(np.zeros((400, 100), np.uint8), (2.0, 6.0), "a B-scan", lines=[np.full(100, 200.0)])
    image = Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2]))).convert("RGB")
    assert image.size == (PICTURE_WIDTH, round(PICTURE_WIDTH / 3))
    bright = np.flatnonzero(np.asarray(image).max(axis=(1, 2)) > 60)
    assert abs(bright.mean() / image.size[1] - 0.5) < 0.03, "the line lies where its rows say"


def test_a_scan_that_is_refused_shows_no_thickness_and_says_why(objects):
    html = objects["refused scan"]._repr_html_()
    assert "do not believe it: too dark" in html and "µm" not in html
    assert "µm" in objects["scan"]._repr_html_() and "intraretinal fluid" in objects["scan"]._repr_html_()


def test_showing_a_store_survives_a_damaged_volume(tmp_path):
    store = small_store(tmp_path / "s", splits=("train", "train"))
    (tmp_path / "s" / "voxels" / "c.0.0.0.0").write_bytes(b"")
    html = store._repr_html_()
    assert "4 volumes of 2 participants" in html and html.count("<img") == 1, "of the other scanner"


def test_a_store_is_a_sequence_of_volumes(store):
    assert [volume.row.index for volume in store] == list(range(6)) and len(list(store)) == len(store)
    np.testing.assert_array_equal(store[-1].voxels, store.read([5]).voxels[0])
    np.testing.assert_array_equal(store[np.int64(2)].band, store.read([2]).band[0])
    assert [row.acquisition for row in store[4:1:-1].rows] == [store.rows[i].acquisition for i in (4, 3, 2)]
    assert store[0].transform.shape == store[0].shape == (8, 64, 32)
    mask = np.array([True, False, False, True, False, True])
    for part in (store[mask], store.part(mask), store[[0, 3, 5]], store[np.array([0, 3, -1])]):
        assert [row.acquisition for row in part.rows] == [store.rows[i].acquisition for i in (0, 3, 5)]
    assert len(store[[]]) == 0
    for wrong, words in ((mask[:4], r"a mask of shape \[4\]"), ([0, 6], "no volume 6; "), ([0.5], "got float64")):
        with pytest.raises(IndexError, match=words):
            store[wrong]
    for wrong in (6, -7):
        with pytest.raises(IndexError, match=r"no volume .* the store has 6"):
            store[wrong]
    with pytest.raises(TypeError):
        store["0"]


def test_tables_for_pandas_have_a_row_for_everything(objects, store, result, tmp_path):
    pytest.importorskip("pandas")
    accepted, left_out = catalog().to_pandas(), catalog().to_pandas(rejects=True)
    assert len(accepted) == 6 and set(accepted["study_group"]) == {"healthy"}
    assert set(accepted["participant_labels.uri"]) == {"theirs"} and accepted["uri"].str.startswith("/data").all()
    assert left_out["code"].tolist() == ["empty_file", "layer_heights"] and left_out["skipped"].tolist() == [
        False,
        True,
    ]
    assert Catalog("r", (), ()).to_pandas(rejects=True).columns.tolist() == left_out.columns.tolist()
    volumes = store.to_pandas()
    assert volumes.index.tolist() == list(range(6)) and volumes["split"].tolist() == ["train"] * 4 + ["test"] * 2
    assert "study_group" in volumes and "transform" not in volumes
    zones = objects["grid"].to_pandas()
    assert zones.loc["centre", "mean_um"] == objects["grid"].mean_um["centre"] and len(zones) == 9
    rows = result.to_pandas()
    assert len(rows) == len(result["results"]) and rows["estimate"].notna().all()
    assert result.to_pandas(comparisons=True)["verdict"].tolist() == [c["verdict"] for c in result["comparisons"]]
    data = read_embeddings(Cohort(participants=6).embeddings(tmp_path / "e.parquet"))
    vectors = data.to_pandas()
    np.testing.assert_array_equal(vectors.filter(regex=r"^v\d+$"), data.vectors)
    assert vectors.index.tolist() == data.acquisition.tolist() and len(repr(data)) < 100


def test_an_id_in_two_spellings_is_one_participant_in_every_representation(store, tmp_path):
    folder = shutil.copytree(store.path, tmp_path / "spelt")
    edit_rows(folder, lambda row: {"participant": row.participant.swapcase()} if row.laterality == "L" else {})
    spelt = Store.open(folder)
    assert {row.participant for row in spelt.rows} > {row.participant for row in store.rows}
    assert all("3 participants" in repr(thing) for thing in (of_store(spelt), spelt.as_torch()))


def test_without_pandas_one_line_says_what_to_install(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ConfigError, match=r"^to_pandas\(\) needs pandas.*pip install pandas$"):
        store.to_pandas()


def test_a_result_is_the_dict_that_its_file_holds(result, tmp_path):
    write_probe(tmp_path / "run" / "probe.json", result)
    again = read_result(tmp_path / "run")
    assert again == json.loads((tmp_path / "run" / "probe.json").read_text()) and again.kind == "probe"
    assert repr(again) == repr(result)
    first = next(row for row in result["results"] if row["metric"] == "r2")
    assert f"{first['estimate']:.3f} ({first['low']:.3f} to {first['high']:.3f})" in again._repr_html_()
    (tmp_path / "other.json").write_text('{"format": "octfm-view"}')
    (tmp_path / "odd.json").write_text('{"format": {}}')
    wrong = "not a result of octfm"
    for where, says in (("nowhere", "no result here"), ("other.json", wrong), ("odd.json", wrong)):
        with pytest.raises(EvaluationError, match=says):
            read_result(tmp_path / where)


@pytest.mark.slow
@needs_chromium
def test_shown_objects_fit_wide_and_narrow_pages(objects, tmp_path):
    """As a notebook shows them one below the other; nothing is cut off, wide tables scroll by themselves."""
    shown = "".join(thing._repr_html_() for thing in objects.values() if hasattr(thing, "_repr_html_"))
    page = tmp_path / "page.html"
    page.write_text(f"<!doctype html><meta charset=utf-8><title>t</title><body>{shown}")
    with Browser(tmp_path) as browser:
        for width in (1440, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.open(page)
            assert browser.js("document.documentElement.scrollWidth <= window.innerWidth"), width
            assert browser.js("[...document.images].every(i => i.naturalWidth > 0 && i.width <= innerWidth)")
            browser.screenshot(tmp_path / f"{width}.png", whole=True)
        assert not browser.complaints, browser.complaints
