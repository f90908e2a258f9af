"""The headline questions: mild disease is mild, what was left out of training was left out, and layers resume."""

import json
import sys
from copy import copy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.labels import LabelTable, read_labels
from octfm.catalog.scan import scan as scan_folder
from octfm.encoder.embeddings import of_store
from octfm.errors import EvaluationError
from octfm.evaluation.statistics import Bootstrap, compare, holm
from octfm.layers.finder import load_finder
from octfm.layers.sample import samples
from octfm.layers.segment import segment
from octfm.models.layer_net import MASKS
from octfm.phantom import phantom_volume, write_phantom
from octfm.store.prepare import prepare
from octfm.store.store import Store
from octfm.tasks import layer_map as layer_map_module
from octfm.tasks.layer_map import COLUMNS, Source, describe, layer_map, measured, spaced
from octfm.volume.volume import Lines
from support import BENCHMARKS
from support.dicom_files import write_oct_dicom
from support.small_store import small_preprocessing
from support.trust_cohort import SCANNERS, Cohort

sys.path.insert(0, str(BENCHMARKS))
import yardstick
from yardstick_questions import (
    SEEN_SCANNER,
    UNSEEN_DISEASE,
    UNSEEN_SCANNER,
    answer,
    pooled_over,
    questions,
    recombined,
    with_headline_columns,
)

pytestmark = pytest.mark.usefixtures("remembered_bscans")
DISEASES = ("healthy", "drusen", "glaucoma")


def labels_of(rows):
    columns = ("diagnosis", "severity", "cst_um")
    ids = ("participant_id", "laterality", "sop_instance_uid")
    cells = tuple(dict(zip((*ids, *columns), row, strict=True)) for row in rows)
    return LabelTable("labels.tsv", columns, cells, *ids)


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("healthy", "Normal", "drusen", "dme", "")), st.sampled_from(("0.2", "0.5", "0.9", ""))
        ),
        min_size=1,
    )
)
def test_mild_is_below_half_and_others_are_no_controls(drawn):
    table = with_headline_columns(labels_of([(str(i), "R", str(i), d, s, "300") for i, (d, s) in enumerate(drawn)]))
    for row, (diagnosis, severity) in zip(table.rows, drawn, strict=True):
        for name in {d for d, _ in drawn} & {"drusen", "dme"}:
            if diagnosis in ("healthy", "Normal"):
                assert row[name] == row[f"mild_{name}"] == row["mild_disease"] == "healthy"
            else:
                assert row[name] == (name if diagnosis == name else "")
                assert row[f"mild_{name}"] == (name if diagnosis == name and severity == "0.2" else "")
    assert with_headline_columns(replace(table, columns=("age",))).columns == ("age",)


@pytest.fixture(scope="module")
def asked():
    """Every third participant is ill, by turns with drusen and glaucoma; none was seen in pretraining."""
    cohort = Cohort(180, SCANNERS[:2])
    arm = cohort.embeddings("run", signal=1.0, noise=1.0)
    people = sorted({r["participant"] for r in cohort.rows})
    rows = [
        (r["participant"], r["laterality"], r["acquisition"],
         "healthy" if not r["ill"] else DISEASES[1 + people.index(r["participant"]) // 3 % 2],
         "0.3" if int(r["participant"][1:]) % 2 else "0.8", f"{r['cst']:.1f}")
        for r in cohort.rows
    ]  # fmt: skip
    found, without = questions(arm, labels_of(rows), np.zeros(len(rows), bool), "k-fold", 3)
    return arm, {q.name: q for q in found}, without, {r[2]: r[3] for r in rows}


def test_every_headline_question_is_asked(asked):
    _, by_name, without, _ = asked
    assert {"disease", "diagnosis", "cst_um", "drusen", "glaucoma", "mild_disease", SEEN_SCANNER, UNSEEN_SCANNER,
            UNSEEN_DISEASE, "mild_drusen", "mild_glaucoma"} == {*by_name} | {w.partition(":")[0] for w in without}  # fmt: skip
    assert by_name["cst_um"].metric == "r2" and by_name["diagnosis"].cases.classes == DISEASES


def test_what_is_left_out_is_in_no_training_row_and_nobody_on_both_sides(asked):
    arm, by_name, _, diagnosis = asked
    names = np.array([diagnosis[a] for a in arm.acquisition])
    for question, of_row in ((by_name[UNSEEN_SCANNER], arm.scanner), (by_name[UNSEEN_DISEASE], names)):
        assert len(question.parts) == 2
        for group, rounds in question.parts:
            for r in rounds:
                train, test = question.cases.rows[r.train], question.cases.rows[r.test]
                assert group not in of_row[train] and group in of_row[test]
                assert not {*arm.participant[train]} & {*arm.participant[test]}
                assert {*of_row[test]} <= {group, "healthy"}
    tested = np.concatenate([r.test for _, rounds in by_name[UNSEEN_SCANNER].parts for r in rounds])
    assert sorted(tested) == [*range(len(arm.acquisition))], "every acquisition once"


def test_answers_pair_arms_and_find_the_one_that_knows(asked):
    arm, by_name, _, _ = asked
    noise = replace(arm, name="noise", vectors=np.random.default_rng(0).normal(size=arm.vectors.shape))
    scores = {"c": {}}
    for name in ("cst_um", UNSEEN_DISEASE):
        own = {a.name: answer(by_name[name], a, "linear", 100) for a in (arm, noise)}
        scores["c"][name] = {"mine": own["run"], "tissue_map": own["noise"]}
    found = yardstick.results(scores, ["mine"])
    rows = {(r["a"], r["b"], r["question"]): r for r in found["differences"]}
    assert rows.keys() == {("mine", "tissue_map", name) for name in scores["c"]}
    assert all(r["claim"] == "better" and r["low"] > 0 for r in rows.values())
    text = yardstick.table(found, ["- in the generator"])
    assert text.count("**") == 4 and "| mine − tissue_map |" in text
    same = yardstick.results({"c": {"cst_um": {"mine": own["noise"], "tissue_map": own["noise"]}}}, ["mine"])
    assert same["differences"][0]["claim"] == "inconclusive"


def test_cohorts_together_can_hold_in_a_long_table():
    rng = np.random.default_rng(0)
    draws = [Bootstrap(0.1, rng.normal(0.1, 0.02, 2000), np.zeros(0)) for _ in range(3)]
    more = recombined(draws)
    assert all(sorted(b.resampled) == sorted([*a.resampled] * 10) for a, b in zip(draws, more, strict=True))
    assert abs(np.corrcoef([b.resampled for b in more])[0, 1]) < 0.05
    nothing = Bootstrap(0.0, np.zeros(20_000), np.zeros(0))
    assert holm([compare(pooled_over(more), nothing).p, *[1.0] * 99])[0] <= 0.05
    assert recombined(draws[:1]) == draws[:1]


def test_two_cohorts_are_pooled_and_each_is_shown(asked):
    arm, by_name, _, _ = asked
    draws = answer(by_name["cst_um"], arm, "linear", 60)
    worse = [replace(d, estimate=d.estimate - 0.2, resampled=d.resampled - 0.2) for d in draws]
    found = yardstick.results({"a": {"q": {"mine": draws}}, "b": {"q": {"mine": worse}}}, ["mine"])
    (cell,) = found["cells"]
    assert cell["estimate"] == pytest.approx(draws[0].estimate - 0.1)
    assert cell["low"] < draws[0].estimate - 0.15 and len(cell["per_cohort"]) == 2


@pytest.fixture(scope="module")
def scan():
    volume = samples(["dme"])[0].volume
    return spaced(volume, 3)


@pytest.mark.slow
def test_layers_are_measured_once_and_go_on_after_a_kill(scan, tmp_path):
    finder, file, said = load_finder(), tmp_path / "layers.jsonl", []
    for name, voxels in (("1", scan.voxels), ("2", scan.voxels[:, :, ::-1])):
        np.save(tmp_path / f"{name}.npy", voxels)
    sources = [Source(name, str(tmp_path / f"{name}.npy"), "R", scan.spacing_mm) for name in ("1", "2")]

    def measure(which, bscans=None):
        return measured(which, file, bscans=bscans, finder=finder, echo=said.append)

    first = measure(sources[:1])
    with file.open("a") as cut:
        cut.write('["2", [1.0, 2')
    both = measure(sources)
    np.testing.assert_array_equal(both["1"], first["1"])
    assert len(file.read_text().splitlines()) == 3 and "1 of 2 volumes are measured already" in said[0]
    found = dict(zip(COLUMNS, both["1"], strict=True))
    assert 150 < found["ilm_bm:mean"] < 600 and found["subretinal_fluid:area"] > 0
    whole = [found[f"{a}:mean"] for a in ("ilm_nfl_gcl", "nfl_gcl_ipl_inl", "ipl_inl_inl_opl", "inl_opl_opl_onl",
             "opl_onl_ez", "ez_rpe_inner", "rpe_inner_rpe_peak", "rpe_peak_bm")]  # fmt: skip
    assert sum(whole) == pytest.approx(found["ilm_bm:mean"], rel=0.02), "layers add up to the retina"
    other_eye = measure([replace(sources[0], laterality="L"), sources[1]])
    nasal, temporal = (COLUMNS.index(f"ilm_bm:inner {side}") for side in ("nasal", "temporal"))
    assert other_eye["1"][nasal] == both["1"][temporal], "its store says another eye now"
    wider = measure([replace(sources[0], pixels="0" * 32), sources[1]])
    assert len(file.read_text().splitlines()) == 5, "its voxels are others now"
    np.testing.assert_array_equal(wider["1"], both["1"])
    whole_file = file.read_text()
    with pytest.raises(EvaluationError, match=r"in 2 B-scans, got .* in all; delete it"):
        measure(sources, 2)
    for damage in ("[1, 2\n", '["1", [0.5]]\n', "7\n", "\n"):
        file.write_text(whole_file + damage)
        with pytest.raises(EvaluationError, match=r"layers.jsonl: line 6 is damaged; delete the line"):
            measure(sources)
    file.write_text(json.dumps({"format": "other"}) + "\n")
    with pytest.raises(EvaluationError, match="got another file"):
        measure(sources)


@pytest.mark.slow
def test_layers_of_a_store_are_those_of_its_files(tmp_path):
    for seed in (2, 1):
        eye, _ = phantom_volume(seed, size=(6, 64, 48))
        write_oct_dicom(
            tmp_path / "dicom" / f"{seed}.dcm", eye.voxels, eye.spacing_mm, participant=f"p{seed}", laterality="L",
            sop_instance_uid=f"1.2.3.{seed}",
        )  # fmt: skip
    catalog = scan_folder(tmp_path / "dicom", workers=0)
    store = prepare(catalog, tmp_path / "store", small_preprocessing(), workers=0, progress=False)
    arm = layer_map(store, tmp_path / "layers.jsonl", echo=lambda _: None)
    assert arm.name == "layers" and arm.acquisition.tolist() == ["1.2.3.1", "1.2.3.2"]
    own = describe(segment(tmp_path / "dicom" / "1.dcm"))
    assert np.isfinite(own).any() and not np.isfinite(own).all(), "a small scan does not cover all zones"
    np.testing.assert_array_equal(arm.vectors[0], np.round(own, 4))


def test_layers_are_in_the_order_of_embeddings_whatever_that_of_the_store(store, tmp_path, monkeypatch):
    turned = copy(store)
    object.__setattr__(turned, "rows", store.rows[::-1])
    number = {row.acquisition: float(row.index) for row in store.rows}
    monkeypatch.setattr(
        layer_map_module, "measured", lambda *_, **__: {n: np.full(len(COLUMNS), number[n]) for n in number}
    )
    for own in (store, turned):
        arm = layer_map(own, tmp_path / "layers.jsonl", echo=lambda _: None)
        assert list(arm.acquisition) == sorted(number) and list(arm.vectors[:, 0]) == [
            number[n] for n in sorted(number)
        ]


def test_measurements_are_of_voxels_an_eye_and_millimetres_wherever_the_file_lies(store):
    own = Source("a", "x.npy", "R", (0.1, 0.004, 0.01), "ff")
    others = [replace(own, acquisition="b"), replace(own, laterality="L"), replace(own, spacing_mm=(0.2, 0.004, 0.01)),
              replace(own, spacing_mm=None), replace(own, pixels="fe")]  # fmt: skip
    assert len({own.key, *(other.key for other in others)}) == 6 and replace(own, uri="y.npy").key == own.key
    assert [s.pixels for s in layer_map_module.sources_of(store)] == [row.pixels for row in store.rows]


def test_masks_are_described_by_their_share_their_greatest_height_and_their_spread_over_bscans():
    def no_place():
        raise EvaluationError("no zones")

    mask = np.zeros((2, 9, 4), bool)
    mask[0, 2:5, 1] = mask[0, 4, 2] = mask[1, 3, 0] = mask[1, 5, 0] = True  # B-scan, row, A-scan
    scan = SimpleNamespace(
        spacing_mm=(0.1, 0.004, 0.01), masks=dict.fromkeys(MASKS, mask), place=no_place,
        thickness_um=lambda *_: np.array([[10.0, 20], [30, np.nan]]), found=SimpleNamespace(present=np.ones((2, 4), bool)),
    )  # fmt: skip
    told = dict(zip(COLUMNS, describe(scan), strict=True))  # pyright: ignore[reportArgumentType]
    for name in MASKS:
        assert [told[f"{name}:{what}"] for what in ("area", "largest", "between_bscans")] == pytest.approx(
            [3 / 8, 12, 1 / 8]
        )
    assert [told[f"ilm_bm:{what}"] for what in ("mean", "sd", "p5", "p95", "between_bscans")] == pytest.approx(
        [20, np.std([10, 20, 30]), 11, 29, 7.5]
    )


@pytest.mark.slow
def test_layers_of_files_without_millimetres_are_in_those_of_the_store(tmp_path):
    """And are measured again once others are declared beside a file, which changes no voxel."""
    eye, _ = phantom_volume(2, size=(6, 64, 48))
    file = tmp_path / "clinic" / "p1" / "eye.npy"
    file.parent.mkdir(parents=True)
    np.save(file, eye.voxels)
    dz, dy, dx = eye.spacing_mm

    def layers(name: str) -> np.ndarray:
        catalog = scan_folder(
            tmp_path / "clinic", nominal_spacing_mm=(dz, dy, dx), participant_from="{participant}/*", workers=0
        )
        store = prepare(catalog, tmp_path / name, small_preprocessing(), workers=0, progress=False)
        return layer_map(store, tmp_path / "layers.jsonl", echo=lambda _: None).vectors[0]

    def expected(spacing_mm) -> np.ndarray:
        return np.round(describe(segment(str(file), spacing_mm=spacing_mm)), 4)

    np.testing.assert_array_equal(layers("nominal"), expected((dz, dy, dx)))
    file.with_suffix(".json").write_text(json.dumps({"spacing_mm": [dz, dy, 1.1 * dx]}))
    np.testing.assert_array_equal(layers("declared"), expected(None))


def test_thinned_scans_keep_their_place(scan):
    lines = Lines(np.arange(24.0).reshape(12, 2), np.arange(24.0).reshape(12, 2) + 5)
    volume = replace(scan, voxels=np.zeros((12, 8, 8), np.uint8), lines=lines, spacing_mm=(0.1, 0.004, 0.02))
    thin = spaced(volume, 4)
    assert len(thin.voxels) == 4 and thin.spacing_mm == pytest.approx((0.3, 0.004, 0.02))
    assert thin.lines.start[:, 0].tolist() == [2, 8, 14, 20]
    assert spaced(volume, None) is volume and spaced(volume, 100) is volume


@pytest.mark.slow
def test_a_cohort_is_made_once_and_its_truth_is_a_ceiling(tmp_path, monkeypatch):
    monkeypatch.setattr(yardstick, "write_phantom", partial(write_phantom, size=(16, 128, 96), workers=1))
    folder = yardstick.make_cohort(tmp_path / "cohort-5", 5, 2)
    files = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
    store = Store.open(yardstick.make_cohort(folder, 5, 2) / "prepared")
    assert {path for path in files if path.suffix == ".dcm"} == set(folder.rglob("*.dcm")) and len(store) == 4
    labels = read_labels(folder / "clinic" / "ground_truth" / "labels.tsv")
    assert {row["phantom_version"] for row in labels.rows} == {"4"}
    data = replace(of_store(store), vectors=np.zeros((len(store), 1)))
    found = yardstick.true_map(data, folder / "clinic" / "ground_truth", np.array([3.0, 4.0]))
    thickest = found.vectors[:, : 11 * yardstick.CELLS**2].reshape(4, -1, 11).sum(2)
    assert (thickest > 150).all() and (thickest < 700).all()


def test_a_scan_that_covers_no_zone_still_has_its_spread(scan):
    line = replace(scan, voxels=scan.voxels[:1], layout="line", lines=None)
    values = dict(zip(COLUMNS, describe(segment(line)), strict=True))
    assert np.isnan(values["ilm_bm:centre"]) and np.isfinite(values["ilm_bm:mean"])
