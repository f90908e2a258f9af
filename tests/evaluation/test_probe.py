"""The frozen probe: joined by id, participants never on both sides, leakage refused, and words where numbers would
mislead."""

import json
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import octfm
from octfm.catalog.labels import read_labels
from octfm.encoder.embeddings import Embeddings, align, joined, read_embeddings, take_rows
from octfm.encoder.encoder import load_encoder
from octfm.errors import EvaluationError
from octfm.evaluation import linear, readouts
from octfm.evaluation.cases import (
    Cases,
    Round,
    Skip,
    Target,
    column_values,
    find_targets,
    make_cases,
    make_rounds,
    participant_folds,
)
from octfm.evaluation.efficiency import label_efficiency, subset
from octfm.evaluation.linear import logistic, ridge
from octfm.evaluation.probe import probe, summary_lines, write_probe
from octfm.evaluation.scoring import Predictions, difference_words, odd_numbers, score, to_units
from support.command_line import invoke
from support.probe_cohort import Cohort


def row(result, target, metric, encoder="pretrained"):
    return next(r for r in result["results"] if (r["target"], r["metric"], r["encoder"]) == (target, metric, encoder))


@pytest.fixture(scope="module")
def cohort():
    return Cohort()


def test_results_do_not_depend_on_the_order_of_any_file(cohort, tmp_path):
    rng = np.random.default_rng(1)
    straight = probe(
        [cohort.embeddings(tmp_path / "a.parquet")], cohort.labels(tmp_path / "l.tsv"), design="k-fold", resamples=100
    )
    shuffled = probe(
        [cohort.embeddings(tmp_path / "b.parquet", order=rng.permutation(len(cohort.rows)))],
        cohort.labels(tmp_path / "m.tsv", order=rng.permutation(len(cohort.rows)), header="person_id"),
        design="k-fold",
        resamples=100,
    )
    assert straight["results"] == shuffled["results"]
    # And the labels do carry signal, so equality is not that of two coin flips.
    assert row(straight, "disease", "auroc")["estimate"] > 0.8


def test_labels_join_by_uid_as_well_as_by_eye(cohort, tmp_path):
    path = cohort.embeddings(tmp_path / "a.parquet")
    by_eye = probe([path], cohort.labels(tmp_path / "eye.tsv"), resamples=50)
    by_uid = probe([path], cohort.labels(tmp_path / "uid.tsv", by="acquisition"), resamples=50)
    assert by_eye["results"] == by_uid["results"]


def test_every_target_of_the_cohort_is_probed_at_the_right_unit(cohort, tmp_path):
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet")], cohort.labels(tmp_path / "l.tsv"), resamples=50, design="k-fold"
    )
    units = {r["target"]: (r["kind"], r["unit"]) for r in result["results"]}
    assert units == {
        "disease": ("binary", "participant"),
        "diagnosis": ("multiclass", "participant"),
        "study_group": ("binary", "participant"),
        "cst_um": ("regression", "eye"),
        "scanner": ("binary", "acquisition"),
    }
    assert row(result, "cst_um", "r2")["estimate"] > 0.3


def test_a_participant_is_scored_by_the_eye_that_looks_more_ill():
    """Rows of one eye are averaged; the truth is that of any eye, so the mean over both eyes would halve what the
    ill one says."""
    who = np.array(["p", "p", "p", "q", "q"])
    eye = np.array(["p_R", "p_L", "p_R", "q_L", "q_R"])
    ill = np.array([0.2, 0.3, 0.6, 0.1, 0.7])
    label = np.array([0, 1, 0, 0, 1])
    target = Target("disease", "diagnosis", "participant")
    cases = Cases(target, np.arange(5), label, ("healthy", "disease"), who, who, "participant", 0, eye=eye)
    said = Predictions(np.arange(5)[::-1], np.log(np.stack([1 - ill, ill], 1))[::-1], np.zeros((5, 2)))
    units = to_units(cases, said)
    right_of_p = np.log([[0.8, 0.2], [0.4, 0.6]]).mean(0)  # mean odds of .6 and .2 are above those of .3
    odds = units.value[:, 1] - units.value[:, 0]
    np.testing.assert_allclose(odds, [right_of_p[1] - right_of_p[0], np.log(0.7 / 0.3)])
    np.testing.assert_allclose(np.exp(units.value).sum(1), 1)
    assert units.truth.tolist() == [1, 1] and units.log_prior.shape == (2, 2)
    by_mean = to_units(replace(cases, eye=None), said)
    both_of_q = np.log([[0.9, 0.1], [0.3, 0.7]]).mean(0)
    assert by_mean.value[1, 1] - by_mean.value[1, 0] == pytest.approx(both_of_q[1] - both_of_q[0])


def test_a_participant_is_diseased_when_one_eye_is(tmp_path):
    cohort = Cohort(participants=60)
    for r in cohort.rows:
        if r["laterality"] == "L":
            r["diagnosis"] = "healthy"
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet", signal=4)],
        cohort.labels(tmp_path / "l.tsv"),
        design="k-fold",
        resamples=50,
        targets=["disease", "diagnosis"],
    )
    assert row(result, "disease", "auroc")["test_participants_per_class"] == {"healthy": 20, "disease": 40}
    assert row(result, "diagnosis", "auroc")["unit"] == "eye"
    assert row(result, "disease", "auroc")["estimate"] > 0.8


@pytest.mark.parametrize("design", ["recommended_split", "k-fold"])
def test_participants_who_all_have_one_ill_eye_cannot_be_scored(tmp_path, design):
    cohort = Cohort(participants=60)
    for r in cohort.rows:
        r["diagnosis"] = "dme" if r["laterality"] == "L" else "healthy"
    labels = cohort.labels(tmp_path / "l.tsv")
    with pytest.raises(EvaluationError, match=r"Of the classes .*, the test has only disease"):
        probe([cohort.embeddings(tmp_path / "a.parquet")], labels, targets=["disease"], design=design)


def test_recommended_split_scores_only_test_participants(cohort, tmp_path):
    result = probe([cohort.embeddings(tmp_path / "a.parquet")], cohort.labels(tmp_path / "l.tsv"), resamples=50)
    tested = {r["participant"] for r in cohort.rows if r["split"] == "test"}
    facts = row(result, "disease", "auroc")
    assert facts["design"] == "recommended_split"
    assert (facts["n_test_participants"], facts["n_train_participants"]) == (len(tested), 60 - len(tested))


def test_F16_a_participant_on_both_sides_of_the_split_is_an_error(tmp_path):
    cohort = Cohort()
    cohort.rows[0]["split"] = "test"
    with pytest.raises(EvaluationError, match="1000 is both in the test split and in train"):
        probe([cohort.embeddings(tmp_path / "a.parquet")], cohort.labels(tmp_path / "l.tsv"), resamples=50)


def test_F16_folds_never_share_a_participant():
    rng = np.random.default_rng(0)
    participant = rng.integers(0, 40, 200).astype(str)
    label = rng.integers(0, 3, 200)
    fold = participant_folds(participant, label, 5, seed=0, stratify=True)
    assert all(len(set(fold[participant == p])) == 1 for p in participant)
    order = rng.permutation(200)
    np.testing.assert_array_equal(participant_folds(participant[order], label[order], 5, 0, stratify=True), fold[order])


def test_F16_ids_that_one_person_has_on_two_scanners_share_a_fold():
    numbers = [1000 + i for i in range(30)]
    participant = np.array([*map(str, numbers), *(f"{n:08d}" for n in numbers), *(f"P-{n}" for n in numbers)])
    fold = participant_folds(participant, np.tile(np.arange(30) % 2, 3), 5, seed=0, stratify=True).reshape(3, 30)
    assert (fold == fold[0]).all() and sorted(np.bincount(fold[0])) == [6] * 5


def test_F16_a_person_of_pretraining_is_not_tested_under_the_id_of_another_scanner(tmp_path):
    """As after pretraining on one scanner only: the other spelling was never seen, the person was."""
    cohort = Cohort()
    everyone = sorted({r["participant"] for r in cohort.rows})
    for r in cohort.rows:
        if r["laterality"] == "L":
            r["participant"] = r["participant"].zfill(8)
    path, labels = cohort.embeddings(tmp_path / "a.parquet"), cohort.labels(tmp_path / "l.tsv")
    facts = row(probe([path], labels, seen=set(everyone[:20]), design="k-fold", resamples=50), "disease", "auroc")
    assert (facts["n_test_participants"], facts["n_train_participants"]) == (40, 20 + 32)
    elsewhere = {f"MRN-{name}" for name in everyone} | {f"P{name}" for name in everyone[:20]}
    assert row(probe([path], labels, seen=elsewhere, design="k-fold", resamples=50), "disease", "auroc") == facts
    for r in cohort.rows:
        tested = "test" if r["laterality"] == "L" else None
        r["split"] = tested if r["participant"].lstrip("0") in everyone[:30] else "train"
    path = cohort.embeddings(tmp_path / "b.parquet")
    with pytest.raises(EvaluationError, match="20 of 30 test participants were in the encoder's pretraining"):
        probe([path], labels, seen=set(everyone[:20]), design="recommended_split", resamples=50)


def test_F16_a_person_is_not_tested_under_one_id_and_trained_on_under_another(tmp_path):
    cohort = Cohort()
    for r in cohort.rows:
        r["split"] = "test" if r["laterality"] == "L" else "train"
        r["participant"] = r["participant"].zfill(8 if r["laterality"] == "L" else 4)
    with pytest.raises(EvaluationError, match="participant 00001000 or 1000 is both in the test split and in train"):
        probe([cohort.embeddings(tmp_path / "a.parquet")], cohort.labels(tmp_path / "l.tsv"), resamples=50)


def test_intervals_are_over_people_whose_ids_two_scanners_spell_differently():
    """Both scans of a person are right, or both wrong: as certain as one scan of each, however the ids are spelt."""
    right = np.random.default_rng(0).random(60) < 0.7
    numbers = np.arange(1000, 1060).astype(str)
    participant = np.r_[numbers, np.char.zfill(numbers, 8)]
    data = Embeddings(
        name="a", path="a", metadata={}, acquisition=np.arange(120).astype(str), participant=participant,
        eye_id=np.array([f"{who}_R" for who in participant]), laterality=("R",) * 120, scanner=np.full(120, "one"),
        split=(None,) * 120, participant_labels=tuple({"label": "ab"[i % 2]} for i in range(60)) * 2,
        vectors=np.zeros((120, 1)),
    )  # fmt: skip
    cases = make_cases(Target("label", "label", "participant"), data, None)
    said = np.tile(np.where(right, cases.label[:60], 1 - cases.label[:60]), 2)
    row = next(
        s.row
        for s in score(cases, "a", [Predictions(np.arange(120), np.log(np.eye(2)[said] + 0.01))], {}, 2000, 0)
        if s.metric == "balanced_accuracy"
    )
    assert row["test_participants_per_class"] == {"a": 30, "b": 30} and len(set(cases.unit)) == 60
    of_eyes = replace(data, participant_labels=tuple({"um": f"{i % 60}"} for i in range(120)))
    measured = make_cases(Target("um", "um", "eye"), of_eyes, None)
    assert measured.unit_name == "eye" and len(set(measured.unit)) == 60
    once = replace(cases, **{n: getattr(cases, n)[:60] for n in ("rows", "label", "participant", "unit")})
    alone = score(once, "a", [Predictions(np.arange(60), np.log(np.eye(2)[said[:60]] + 0.01))], {}, 2000, 0)
    of_one = next(s.row for s in alone if s.metric == "balanced_accuracy")
    assert (row["low"], row["high"]) == pytest.approx((of_one["low"], of_one["high"]))


def test_folds_spread_a_rare_class_evenly():
    participant = np.arange(50).astype(str)
    label = (np.arange(50) < 5).astype(int)
    fold = participant_folds(participant, label, 5, seed=3, stratify=True)
    assert sorted(fold[label == 1]) == [0, 1, 2, 3, 4]


def test_folds_spread_measurements_evenly():
    """By each participant's mean, however many rows they have."""
    rows = np.repeat(np.arange(50), 1 + np.arange(50) % 3)
    fold = participant_folds(rows.astype(str), 100.0 + rows, 5, seed=3, stratify=False)
    for k in range(5):
        assert np.bincount(np.unique(rows[fold == k]) // 10).tolist() == [2] * 5


def test_folds_test_every_participant_once_and_train_on_the_others(cohort, tmp_path):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    for count in (9, 10):
        some = take_rows(data, np.flatnonzero(np.isin(data.participant, np.unique(data.participant)[:count])))
        some = replace(some, participant_labels=tuple({"x": str(20.5 + i)} for i in range(len(some.participant))))
        cases, seen = make_cases(Target("x", "x", "eye"), some, None), np.zeros(len(some.participant), bool)
        if count == 9:
            with pytest.raises(Skip, match="9 participants with x are too few for 5 folds, expected at least 10"):
                make_rounds(cases, some, "k-fold", seen, False, 5, 0)
            continue
        rounds = make_rounds(cases, some, "k-fold", seen, False, 5, 0)[1]
        assert sorted(np.concatenate([r.test for r in rounds]).tolist()) == list(range(len(cases.rows)))
        assert all(sorted([*r.train, *r.test]) == list(range(len(cases.rows))) for r in rounds)


def test_neighbours_take_no_memory_for_every_pair_of_rows(monkeypatch):
    import tracemalloc

    monkeypatch.setattr(readouts, "MOST_PAIRS", readouts.MOST_PAIRS // 8)
    x, y = np.random.default_rng(0).normal(size=(2100, 4)), np.arange(2100) % 2
    who = np.array([f"p{i:04d}" for i in range(2100)])
    tracemalloc.start()
    value, _ = readouts.fit_predict("knn", x, y, who, x[:1400], 2, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert value.shape == (1400, 2) and peak < 8 * 1400 * 2100  # bytes of the similarities alone


def test_noise_scores_at_chance_however_wide_the_vectors(tmp_path):
    cohort = Cohort(participants=90, width=200)
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet", signal=0)],
        cohort.labels(tmp_path / "l.tsv"),
        design="k-fold",
        resamples=200,
        targets=["disease", "cst_um"],
    )
    auc, r2 = row(result, "disease", "auroc"), row(result, "cst_um", "r2")
    assert auc["low"] <= 0.5 <= auc["high"]
    assert r2["estimate"] < 0.1


def test_encoder_that_saw_test_participants_is_refused_or_flagged(cohort, tmp_path):
    path, labels = cohort.embeddings(tmp_path / "a.parquet"), cohort.labels(tmp_path / "l.tsv")
    tested = sorted({r["participant"] for r in cohort.rows if r["split"] == "test"})
    with pytest.raises(
        EvaluationError, match=f"3 of {len(tested)} test participants were in the encoder's pretraining"
    ):
        probe([path], labels, seen=set(tested[:3]), resamples=50)
    flagged = probe([path], labels, seen=lambda p: p in tested[:3], allow_seen=True, resamples=50)
    assert row(flagged, "disease", "auroc")["seen_test_participants"] == 3
    # None: the weights were published without the key to tell by.
    for design in ("recommended_split", "k-fold"):
        with pytest.raises(EvaluationError, match="nobody can tell whom the encoder was pretrained on"):
            probe([path], labels, seen=None, design=design, resamples=50)
        unknown = probe([path], labels, seen=None, design=design, allow_seen=True, resamples=50)
        assert "participants; nobody can tell whether pretraining has seen them" in summary_lines(unknown)[0]
        assert row(unknown, "disease", "auroc")["estimate"] > 0.5
    # Seeing training participants is what pretraining is.
    clean = probe([path], labels, seen={r["participant"] for r in cohort.rows} - set(tested), resamples=50)
    assert row(clean, "disease", "auroc")["seen_test_participants"] == 0


def test_k_fold_tests_only_unseen_participants_or_refuses(cohort, tmp_path):
    path, labels = cohort.embeddings(tmp_path / "a.parquet"), cohort.labels(tmp_path / "l.tsv")
    everyone = sorted({r["participant"] for r in cohort.rows})
    result = probe([path], labels, seen=set(everyone[:20]), design="k-fold", resamples=50)
    facts = row(result, "disease", "auroc")
    # In each of five folds, the 20 of pretraining and four fifths of the others.
    assert (facts["n_test_participants"], facts["n_train_participants"], facts["seen_test_participants"]) == (
        40,
        20 + 32,
        0,
    )
    with pytest.raises(EvaluationError, match="all 60 participants"):
        probe([path], labels, seen=set(everyone), design="k-fold", resamples=50)
    few = "4 participants with cst_um are too few for 5 folds, expected at least 10; [0-9]+ others were in the encoder"
    with pytest.raises(EvaluationError, match=few):
        probe([path], labels, seen=set(everyone[4:]), design="k-fold", targets=["cst_um"], resamples=50)
    with pytest.raises(EvaluationError, match="at least 2 folds, got 1"):
        probe([path], labels, design="k-fold", folds=1, resamples=50)
    with pytest.raises(EvaluationError, match="folds: these embeddings are probed by their recommended split"):
        probe([path], labels, folds=3, resamples=50)
    with pytest.raises(EvaluationError, match="design: expected auto, recommended_split or k-fold, got 'kfold'"):
        probe([path], labels, design="kfold", resamples=50)  # pyright: ignore[reportArgumentType]


def test_encoders_are_compared_on_the_same_participants(cohort, tmp_path):
    files = [
        cohort.embeddings(tmp_path / "pretrained.parquet", "pretrained", signal=3),
        cohort.embeddings(tmp_path / "random_init.parquet", "random_init", signal=0),
    ]
    result = probe(files, cohort.labels(tmp_path / "l.tsv"), design="k-fold", resamples=500)
    verdict = {(c["target"], c["metric"]): c["verdict"] for c in result["comparisons"]}
    assert verdict["disease", "auroc"] == verdict["cst_um", "r2"] == "better"
    # Telling scanners apart is no achievement.
    assert verdict["scanner", "auroc"] == "worse"
    difference = next(c for c in result["comparisons"] if (c["target"], c["metric"]) == ("disease", "auroc"))
    estimates = [row(result, "disease", "auroc", name)["estimate"] for name in ("pretrained", "random_init")]
    assert difference["difference"] == pytest.approx(estimates[0] - estimates[1])


def test_encoders_embedded_from_different_cohorts_are_refused(cohort, tmp_path):
    a = cohort.embeddings(tmp_path / "a.parquet", "pretrained")
    b = cohort.embeddings(tmp_path / "b.parquet", "random_init", order=np.arange(len(cohort.rows) - 1))
    with pytest.raises(EvaluationError, match="1 are in only one of the two"):
        probe([a, b], cohort.labels(tmp_path / "l.tsv"))
    first = read_embeddings(a)
    other = replace(first, name="other", path="other", participant=np.roll(first.participant, 2))
    with pytest.raises(EvaluationError, match=r"other: participants differ from .* for the same acquisitions"):
        align([first, other])
    respelt = replace(first, name="other", path="other", participant=np.char.zfill(first.participant, 8))
    assert len(align([first, respelt])) == 2, "two scanners, or two tables of participants"


def test_a_matrix_of_ones_own_is_compared_in_whatever_order_its_rows_are(cohort, tmp_path):
    file = cohort.embeddings(tmp_path / "a.parquet", "one")
    first = read_embeddings(file)
    mine = replace(take_rows(first, np.random.default_rng(1).permutation(len(first.acquisition))), name="two")
    result = probe([file, mine], targets=["study_group"], design="k-fold", resamples=100)
    assert (
        row(result, "study_group", "auroc", "one")["estimate"] == row(result, "study_group", "auroc", "two")["estimate"]
    )
    with pytest.raises(EvaluationError, match=r"two: expected .* vectors \[120, width\], got ndarray \[3, 16\]"):
        replace(mine, vectors=mine.vectors[:3])
    with pytest.raises(EvaluationError, match=r"two: expected .*, got MaskedArray \[120, 16\]"):
        replace(mine, vectors=np.ma.masked_less(mine.vectors, 0))
    one_of_them = np.where(np.arange(120)[:, None] == 7, np.inf, mine.vectors)
    texts = mine.vectors.astype(str)
    for vectors, got in ((one_of_them, "infinity"), (mine.vectors * 1j, "complex128"), (texts, "<U32")):
        with pytest.raises(EvaluationError, match=f"two: expected vectors of finite numbers, got {got}"):
            replace(mine, vectors=vectors)
    with pytest.raises(EvaluationError, match="two: all its vectors are NaN"):
        replace(mine, vectors=mine.vectors * np.nan)
    with pytest.raises(
        TypeError, match=r"expected files of octfm embed or Embeddings, got ndarray; .*of_store\(store\)"
    ):
        probe([mine.vectors])
    alone = probe(file, targets=["study_group"], design="k-fold", resamples=100)
    assert row(alone, "study_group", "auroc", "one") == row(result, "study_group", "auroc", "one")


def test_a_readout_that_does_not_exist_is_not_reported_as_one(cohort, tmp_path):
    for function in (probe, label_efficiency):
        with pytest.raises(EvaluationError, match="readout: expected one of linear, knn, trees; got 'svm'"):
            function([cohort.embeddings(tmp_path / "a.parquet")], targets=["study_group"], readout="svm")


def test_few_participants_get_words_instead_of_an_interval(tmp_path):
    cohort = Cohort(participants=24)
    files = [cohort.embeddings(tmp_path / f"{n}.parquet", n) for n in ("pretrained", "random_init")]
    result = probe(files, cohort.labels(tmp_path / "l.tsv"), design="k-fold", resamples=50, targets=["disease"])
    facts = row(result, "disease", "auroc")
    assert facts["low"] is None and "only 8 participants with healthy" in facts["note"]
    assert result["comparisons"][0]["verdict"] == "inconclusive" and result["comparisons"][0]["low"] is None
    assert row(result, "disease", "auroc")["estimate"] is not None


def test_perfect_separation_is_not_reported_as_certainty(tmp_path):
    cohort = Cohort(participants=60)
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet", signal=200)],
        cohort.labels(tmp_path / "l.tsv"),
        design="k-fold",
        resamples=50,
        targets=["disease"],
    )
    facts = row(result, "disease", "auroc")
    assert (facts["estimate"], facts["low"]) == (1.0, 1.0)
    assert "too narrow to be believed" in facts["note"]


def test_a_target_that_cannot_be_probed_is_skipped_or_refused_by_name(tmp_path):
    cohort = Cohort()
    for r in cohort.rows:
        r["scanner"] = "zeiss_cirrus"
    path, labels = cohort.embeddings(tmp_path / "a.parquet"), cohort.labels(tmp_path / "l.tsv")
    result = probe([path], labels, resamples=50)
    assert [s["target"] for s in result["skipped"]] == ["scanner"]
    with pytest.raises(EvaluationError, match="target scanner: Fewer than two classes"):
        probe([path], labels, targets=["scanner"])
    with pytest.raises(EvaluationError, match="no label column iop"):
        probe([path], labels, targets=["iop"])
    with pytest.raises(EvaluationError, match="order of grades: no label column diagnosys; did you mean diagnosis"):
        probe([path], labels, orders={"diagnosys": ("healthy", "early", "late")})


def test_rare_class_is_left_out_and_named(tmp_path):
    cohort = Cohort()
    for r in cohort.rows[:2]:
        r["diagnosis"] = "macular_hole"
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet")],
        cohort.labels(tmp_path / "l.tsv"),
        resamples=50,
        targets=["diagnosis"],
    )
    assert row(result, "diagnosis", "auroc")["left_out_classes"] == ["macular_hole"]
    assert any("too rare and left out: macular_hole" in line for line in summary_lines(result))


def test_vectors_of_a_checkpoint_before_the_newest_are_pointed_out(run, tmp_path):
    """A run that went on after `octfm embed` would be probed as it was then, without a word."""
    run, cohort = Path(shutil.copytree(run, tmp_path / "run")), Cohort(30)
    (run / "embeddings").mkdir()
    labels = cohort.labels(tmp_path / "labels.tsv")
    for step, said in ((2, True), (3, False)):
        encoder = str(run / "checkpoints" / f"step-0000000{step}.pt")
        cohort.embeddings(run / "embeddings" / "pretrained.parquet", encoder=encoder)
        done = invoke("probe", run, "--labels", labels, "--target", "diagnosis")
        remark = (
            "vectors of step-00000002.pt; the newest checkpoint of this run is step-00000003.pt, which `octfm embed"
        )
        assert done.exit_code == 0 and (remark in done.output) == said, done.output


def test_a_label_table_that_is_replaced_after_the_probe_is_not_that_of_the_label_curve(run, tmp_path, monkeypatch):
    """One probe.json held scores of two tables."""
    run, cohort, given = Path(shutil.copytree(run, tmp_path / "run")), Cohort(30), []
    (run / "embeddings").mkdir()
    cohort.embeddings(run / "embeddings" / "pretrained.parquet")
    labels = cohort.labels(tmp_path / "labels.tsv")

    def probed(arms, table, **options):
        given.append(read_labels(table))
        labels.write_text("participant_id\tdiagnosis\n")
        return probe(arms, table, resamples=50, **{name: options[name] for name in ("targets", "seen", "allow_seen")})

    monkeypatch.setattr("octfm.evaluation.probe.probe", probed)
    monkeypatch.setattr(
        "octfm.evaluation.efficiency.label_efficiency",
        lambda _, table, **__: given.append(read_labels(table)) or ([], []),
    )
    done = invoke("probe", run, "--labels", labels, "--target", "diagnosis", "--label-efficiency")
    assert done.exit_code == 0, done.output
    assert given[0] == given[1]


def test_vectors_of_other_weights_than_the_run_are_pointed_out(run, tmp_path):
    """As where two runs were embedded into one folder: participants seen in pretraining are those of RUN."""
    path, cohort = tmp_path / "vectors" / "pretrained.parquet", Cohort(30)
    path.parent.mkdir()
    labels = cohort.labels(tmp_path / "labels.tsv")
    for weights, said in ((load_encoder(run).digest, False), ("of others", True)):
        table = pq.read_table(cohort.embeddings(path, encoder="runs/other"))
        facts = json.loads(table.schema.metadata[b"octfm"]) | {"weights": weights}
        pq.write_table(table.replace_schema_metadata({"octfm": json.dumps(facts)}), path)
        done = invoke("probe", run, "--embeddings", path.parent, "--labels", labels, "--target", "diagnosis")
        remark = f"vectors of runs/other, which are not by the weights of {run}; participants that were trained on"
        assert done.exit_code == 0 and (remark in done.output) == said, done.output


def test_result_is_strict_json_written_whole(cohort, tmp_path):
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet")],
        cohort.labels(tmp_path / "l.tsv"),
        resamples=50,
        commands=["octfm probe x"],
    )
    path = write_probe(tmp_path / "run" / "probe.json", result)
    read = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert (read["format"], read["version"], read["commands"]) == ("octfm-probe", 1, ["octfm probe x"])
    assert [p.name for p in path.parent.iterdir()] == ["probe.json"]


def test_contradicting_or_foreign_label_tables_are_refused(cohort, tmp_path):
    path = cohort.embeddings(tmp_path / "a.parquet")
    twice = tmp_path / "twice.tsv"
    twice.write_text("participant_id\tdiagnosis\n1000\thealthy\n1000\tdme\n")
    with pytest.raises(EvaluationError, match="line 3: diagnosis is dme for 1000, an earlier line says healthy"):
        probe([path], twice)
    foreign = tmp_path / "foreign.csv"
    foreign.write_text("participant_id,diagnosis\n9,healthy\n8,dme\n")
    with pytest.raises(EvaluationError, match="no participant_id matches"):
        probe([path], foreign)
    swapped = tmp_path / "swapped.tsv"
    swapped.write_text(f"person_id\tsop_instance_uid\tdiagnosis\n7\t{cohort.rows[0]['acquisition']}\thealthy\n")
    with pytest.raises(EvaluationError, match=r"is participant 7.s here"):
        probe([path], swapped)
    nothing = tmp_path / "nothing.csv"
    nothing.write_text("name,diagnosis\nx,healthy\n")
    with pytest.raises(EvaluationError, match="expected a column participant_id"):
        read_labels(nothing)


def test_composed_and_decomposed_letters_are_the_same_class_and_the_same_id(tmp_path):
    """macOS writes ü in names of folders, and so in ids and tables made of them, as u and two dots."""
    table = tmp_path / "labels.csv"
    table.write_text("participant_id,grade\nMu\u0308ller,gro\u00df\nb,mu\u0308de\nc,m\u00fcde\n")
    found = read_labels(table).join("grade", [("u1", "M\u00fcller", None), ("u2", "b", None), ("u3", "c", None)])
    assert found == ["gro\u00df", "m\u00fcde", "m\u00fcde"]


def test_a_label_table_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "labels.xlsx").write_bytes(b"PK\x03\x04\xff\xfe\xe1")
    with pytest.raises(EvaluationError, match=r"labels\.xlsx: expected a CSV or TSV of text"):
        read_labels(tmp_path / "labels.xlsx")


def test_a_damaged_or_foreign_embeddings_file_is_named(tmp_path):
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(EvaluationError, match=r"cut\.parquet: damaged .* embed again"):
        read_embeddings(tmp_path / "cut.parquet")
    pq.write_table(pa.table({"acquisition": ["1"]}), tmp_path / "other.parquet")
    with pytest.raises(EvaluationError, match=r"participant, eye_id, .* missing"):
        read_embeddings(tmp_path / "other.parquet")
    with pytest.raises(EvaluationError, match=r"absent\.parquet: no such embeddings file; make it with octfm embed"):
        read_embeddings(tmp_path / "absent.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: [*rows, rows[3]], r"acquisition 1\S+ occurs more than once; embed again into a new file"),
        (lambda rows: [], "holds no acquisition"),
        *(
            (
                lambda rows, odd=odd: [*rows[:5], rows[5] | {"vector": odd}, *rows[6:]],
                "one finite vector of equal width",
            )
            for odd in ([1.0] * 3, [1.0] * 17, [], None, [float("nan")] * 16)
        ),
        (lambda rows: [row | {"vector": []} for row in rows], "one finite vector of equal width"),
    ],
)
def test_an_embeddings_file_of_other_rows_is_refused(cohort, tmp_path, change, message):
    """Vectors that are joined to the wrong scans would be scored without a sign of it."""
    file = cohort.embeddings(tmp_path / "a.parquet", "one")
    assert [data.name for data in align(str(file))] == ["one"], "a file's name alone is one file"
    table = pq.read_table(file)
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), file)
    with pytest.raises(EvaluationError, match=message):
        read_embeddings(file)


def test_label_table_forgives_spelling_of_laterality_and_numbers(tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("person_id,laterality,diagnosis\n1001.0,OD,healthy\n1001.0,left,NA\n")
    joined = read_labels(table).join("diagnosis", [("uid", "1001", "R"), ("uid2", "1001", "L"), ("uid3", "1001", None)])
    assert joined == ["healthy", None, None]


def test_decimal_commas_are_numbers_unless_they_may_separate_thousands(tmp_path):
    def joined(*cells: str):
        table = tmp_path / "labels.csv"
        table.write_text("participant_id;um\n" + "".join(f"p{i};{cell}\n" for i, cell in enumerate(cells)))
        return read_labels(table).join("um", [(f"u{i}", f"p{i}", "R") for i in range(len(cells))])

    assert joined("3,5", "4", "NA", "-1,125") == ["3.5", "4", None, "-1.125"]
    assert joined("0,125", "1,250") == ["0.125", "1.250"], "no thousands begin with 0"
    assert joined("dme, erm", "3,5") == ["dme, erm", "3,5"] and joined("1,2,4", "2") == ["1,2,4", "2"]
    with pytest.raises(EvaluationError, match=r"um: is 1,234 a decimal number or one in thousands\? .* 1\.234 or 1234"):
        joined("1,234", "2,345", "7")


def test_a_doubtful_comma_of_a_participant_does_not_make_every_number_a_class(cohort, tmp_path):
    """The scan keeps such cells as they are; a target of them was refused for having as many classes as people."""
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))

    def values(cell):
        return column_values(
            "um", replace(data, participant_labels=({"um": cell}, {}) * (len(data.scanner) // 2)), None
        )

    assert values("23,5")[:2] == ["23.5", None]
    with pytest.raises(
        EvaluationError, match=r"um of the participants: is 23,456 a .* 23\.456 or 23456 in the table of"
    ):
        values("23,456")


def relabelled(cohort, path, column, cells):
    """A table with one row per participant."""
    people = sorted({r["participant"] for r in cohort.rows})
    lines = [f"{p},{cell}" for p, cell in zip(people, cells, strict=False)]
    path.write_text(f"participant_id,{column}\n" + "\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("odd", ["inf", "CF", "<0.05"])
def test_numbers_with_a_word_among_them_are_not_classes(cohort, tmp_path, odd):
    """Else every visual acuity would be a class of its own, and the answer one about the test participants."""
    numbers = [f"{0.01 * i:.2f}" for i in range(60)]
    numbers[7] = odd
    table = relabelled(cohort, tmp_path / "l.csv", "va", numbers)
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    with pytest.raises(EvaluationError, match=re.escape(f"are finite numbers, the others are not ({odd})")) as error:
        probe(files, table, targets=["va"])
    assert "118 of 120 labels in column va" in str(error.value) and odd not in error.value.public
    numbers[7] = "?"
    table = relabelled(cohort, tmp_path / "l.csv", "va", numbers)
    assert row(probe(files, table, targets=["va"], resamples=50), "va", "r2")["unlabelled_acquisitions"] == 2


@pytest.mark.parametrize("cells", [["inf"] * 60, ["-inf", "inf"] * 30, ["0", "1", "inf"] * 20, ["0", "1e400"] * 30])
def test_infinities_are_no_class(cohort, tmp_path, cells):
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    table = relabelled(cohort, tmp_path / "l.csv", "ratio", cells)
    with pytest.raises(EvaluationError, match=r"Column ratio has .*, neither a finite number nor a class; write num"):
        probe(files, table, targets=["ratio"])
    halves = relabelled(cohort, tmp_path / "l.csv", "half", ["inf", "sup"] * 30)
    assert row(probe(files, halves, targets=["half"], resamples=50), "half", "auroc")


def test_a_text_for_every_participant_is_no_class(cohort, tmp_path):
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    dates = relabelled(
        cohort, tmp_path / "l.csv", "onset", [f"2024-{i // 28 + 1:02d}-{i % 28 + 1:02d}" for i in range(60)]
    )
    with pytest.raises(EvaluationError, match="onset has 60 different texts for 60 participants, which are no classes"):
        probe(files, dates, targets=["onset"])
    one = relabelled(cohort, tmp_path / "l.csv", "onset", ["late"] * 60)
    with pytest.raises(
        EvaluationError, match=r"2 participants each to learn from: 48 labelled participants, 1 class\."
    ):
        probe(files, one, targets=["onset"])


@pytest.mark.parametrize("unit", ["%", " µm"])
def test_numbers_with_a_unit_are_not_classes(cohort, tmp_path, unit):
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    amounts = relabelled(cohort, tmp_path / "l.csv", "um", [f"{i // 3}{unit}" for i in range(60)])
    with pytest.raises(
        EvaluationError, match=f"120 of 120 labels in column um are numbers with the unit {unit.strip()}"
    ):
        probe(files, amounts, targets=["um"])
    stages = relabelled(cohort, tmp_path / "l.csv", "stage", ["1a", "2b", "3c"] * 20)
    assert row(probe(files, stages, targets=["stage"], resamples=50), "stage", "auroc")["classes"] == ["1a", "2b", "3c"]


def test_a_label_in_two_spellings_is_refused(cohort, tmp_path):
    table = relabelled(cohort, tmp_path / "l.csv", "grade", ["Mild", "none", "mild"] * 20)
    with pytest.raises(EvaluationError, match="Column grade has Mild and mild; spell them alike") as error:
        probe([cohort.embeddings(tmp_path / "a.parquet")], table, targets=["grade"])
    assert "ild" not in error.value.public


def test_a_label_of_several_in_two_spellings_is_skipped(cohort, tmp_path):
    """As two targets, the scans of one would be negatives of the other."""
    table = relabelled(cohort, tmp_path / "l.csv", "finding", ["DME;drusen", "dme; drusen", "none"] * 20)
    result = probe([cohort.embeddings(tmp_path / "a.parquet")], table, targets=["finding"], resamples=50)
    assert {r["target"] for r in result["results"]} == {"finding:drusen", "finding"}
    assert [s["target"] for s in result["skipped"]] == ["finding:DME", "finding:dme"]
    assert "Column finding has DME and dme; spell them alike" in result["skipped"][0]["sentence"]


def test_grades_that_are_named_for_a_known_column_are_all_there_are(cohort, tmp_path):
    table = relabelled(cohort, tmp_path / "l.csv", "study_group", ["a", "b", "c", "d"] * 15)
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    with pytest.raises(EvaluationError, match="target study_group: d is not among the grades a, b, c"):
        probe(files, table, targets=["study_group"], orders={"study_group": ("a", "b", "c")})


def test_the_curve_refuses_what_the_probe_refuses_and_keeps_values_private(cohort, tmp_path):
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    table = relabelled(cohort, tmp_path / "l.csv", "grade", ["Mild", "none", "mild"] * 20)
    with pytest.raises(EvaluationError, match="Mild and mild") as error:
        label_efficiency(files, table, targets=["grade"])
    assert error.value.public and "ild" not in error.value.public
    with pytest.raises(TypeError, match="got one string"):
        label_efficiency(files, targets=["disease"], seen="1002")


def test_a_target_that_is_named_twice_counts_once(cohort, tmp_path):
    """Holm's correction would otherwise count each of its comparisons twice."""
    files = [cohort.embeddings(tmp_path / f"{name}.parquet", name=name) for name in "ab"]
    table = relabelled(cohort, tmp_path / "l.csv", "grade", ["a", "b"] * 30)
    once, twice = (probe(files, table, targets=["grade"] * n, resamples=50) for n in (1, 2))
    assert once == twice


def test_files_may_come_from_a_glob_and_one_target_needs_no_list(cohort, tmp_path):
    """No file was said to be given, and a name was taken for as many columns as it has letters."""
    file = cohort.embeddings(tmp_path / "a.parquet")
    table = relabelled(cohort, tmp_path / "l.csv", "grade", ["a", "b"] * 30)
    listed = probe([file], table, targets=["grade"], resamples=50)
    assert probe(tmp_path.glob("*.parquet"), table, targets="grade", resamples=50) == listed


def test_a_column_called_disease_is_asked_for_as_it_is(cohort, tmp_path):
    cells = ["no", "yes", "yes"] * 20
    table = relabelled(cohort, tmp_path / "l.csv", "disease", cells)
    result = probe([cohort.embeddings(tmp_path / "a.parquet")], table, targets=["disease"], resamples=50)
    assert row(result, "disease", "auroc")["classes"] == ["no", "yes"]


def test_a_scanner_of_the_table_is_not_mistaken_for_that_of_the_scans(cohort, tmp_path):
    table = relabelled(cohort, tmp_path / "l.csv", "scanner", ["old", "new"] * 30)
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    with pytest.raises(EvaluationError, match=r"target scanner: .* has a column scanner as well; rename"):
        probe(files, table, targets=["scanner"])
    assert row(probe(files, table, resamples=50), "scanner", "auroc")["leakage"], "without a name it is the scans' own"


@pytest.mark.slow
def test_an_interval_below_guessing_by_folds_is_called_no_finding(cohort, tmp_path):
    """Held-out rows are missing from the mean that a probe without signal learns, so they score below one half."""
    rng, people = np.random.default_rng(0), sorted({r["participant"] for r in cohort.rows})[:40]
    cohort = replaced_rows(cohort, [r for r in cohort.rows if r["participant"] in people])
    files, notes = [cohort.embeddings(tmp_path / "a.parquet", signal=0)], {}
    for _ in range(12):
        table = relabelled(cohort, tmp_path / "l.csv", "x", rng.permutation(["a", "b"] * 20))
        found = row(probe(files, table, targets=["x"], design="k-fold", resamples=200), "x", "auroc")
        notes[found["high"] < 0.5] = found["note"]
    assert "Below guessing, which is no finding" in notes[True] and notes[False] is None


def test_a_code_for_a_missing_number_is_pointed_out(cohort, tmp_path):
    files, numbers = [cohort.embeddings(tmp_path / "a.parquet")], [f"{300 + i % 37}" for i in range(60)]

    def note(*cells):
        table = relabelled(cohort, tmp_path / "l.csv", "um", [*cells, *numbers[len(cells) :]])
        result = probe(files, table, targets=["um"], resamples=50, design="k-fold")
        found = row(result, "um", "r2")["note"]
        assert sum(found in line for line in summary_lines(result)) == 1 if found else True
        return found

    assert note() is None
    remedy = "; if that stands for a missing value, leave those cells empty."
    assert note("999").startswith("Of 120 labels in column um, 2 are 999, unlike the others" + remedy)
    assert "2 are -1, unlike" in note("-1") and "2 are -9 and 4 are 9999, unlike" in note("-9", "9999", "9999")
    assert note("5000").startswith("2 of 120 labels lie more than 20 interquartile ranges from the others")
    assert "ranges" not in (note(*["0"] * 47) or "")


def test_a_code_for_a_missing_grade_or_class_is_pointed_out(cohort, tmp_path):
    """It is a class of its own otherwise, and the lowest grade if it is -9."""
    files = [cohort.embeddings(tmp_path / "a.parquet")]

    def note(*cells):
        table = relabelled(cohort, tmp_path / "l.csv", "x", (list(cells) * 60)[:60])
        result = probe(files, table, targets=["x"], resamples=50, design="k-fold", readout="knn")
        return row(result, "x", "auroc")["note"] or ""

    assert "Of 120 labels in column x, 24 are -9, unlike the others; if that stands" in note(*"0123", "-9")
    assert "24 are 9, unlike" in note(*"01239") and "30 are 99, unlike" in note("yes", "no", "no", "99")
    assert "24 are -9 and 24 are 99, unlike" in note("yes", "no", "yes", "-9", "99")
    assert "24 are -1, unlike" in note("-1", *"0123") and "unlike" not in note("-2", "-1", *"012")
    # As pandas writes a column with an empty cell.
    assert "24 are 9.0, unlike" in note("0.0", "1.0", "2.0", "3.0", "9.0")
    for real in (
        "0123",
        ("-1", "0", "1"),
        ("-1", "1"),
        "789",
        ("0", "1", "2", "3", "4"),
        ("yes", "no"),
        ("G1", "8", "9"),
    ):
        assert "unlike" not in note(*real), real


def test_a_real_number_is_no_code_for_a_missing_one():
    """In a cohort with oedema 999 µm is a thickness, and a change of -1 has others around it."""
    oedema = np.r_[np.linspace(210, 480, 60), 560, 640, 760, 880, 980, 1010]

    def remark(*values):
        label = np.array(values, float)
        unit = np.arange(len(label)).astype(str)
        target = Target("um", "um", "eye")
        return odd_numbers(Cases(target, np.arange(len(label)), label, None, unit, unit, "eye", 0))

    assert remark(*oedema, 999) is None and remark(*oedema, 999, 999, 999) is None
    assert remark(*oedema[:-2], 999) is None, "120 µm above another"
    assert "4 are 999" in remark(*oedema[:-2], *[999] * 4), "no thickness is so frequent"
    assert remark(*range(-20, 21)) is None and remark(*np.linspace(40, 95, 56), 99) is None, "changes, and ages"
    assert remark(*np.linspace(-3, 2, 51)) is None and remark(*[-1] * 5, *range(-30, 20)) is None


def replaced_rows(cohort, rows):
    other = Cohort(participants=0)
    other.rows = rows
    return other


def test_a_summary_says_what_guessing_gives_and_which_file_holds_the_rest(cohort, tmp_path):
    result = probe([cohort.embeddings(tmp_path / "a.parquet")], cohort.labels(tmp_path / "l.tsv"), resamples=50)
    lines = summary_lines(result)
    assert "diagnosis    guessing gives auroc 0.5, balanced_accuracy 0.333; learned from 48 participants" in lines
    assert "cst_um       guessing gives r2 0; learned from 48 participants" in lines and any(
        "probe.json also holds" in line for line in lines
    )
    assert any("--design k-fold" in line for line in lines)
    tuned = "\n".join(summary_lines(result, "finetune.json"))
    assert "finetune.json also holds" in tuned and "--design" not in tuned and "probe.json" not in tuned
    arms = [cohort.embeddings(tmp_path / "a.parquet"), cohort.embeddings(tmp_path / "b.parquet", "other")]
    options = {"targets": ["disease"], "resamples": 50}
    folds = "\n".join(summary_lines(probe(arms, cohort.labels(tmp_path / "l.tsv"), design="k-fold", **options)))
    assert "against other" in folds and "up to a third too narrow" in folds and "too narrow" not in "\n".join(lines)


def test_a_finding_that_training_rows_hardly_have_does_not_outweigh_the_rest():
    """Two of 24 eyes have drusen, one of them by a voxel."""
    rng = np.random.default_rng(0)
    thickness = rng.normal(280, 25, 24)
    x = np.c_[thickness[:, None] + rng.normal(0, 8, (24, 40)), np.zeros(24)]
    x[3, -1], x[20, -1] = 1e-4, 0.1
    train = np.arange(24) < 18
    people = np.array([f"p{i}" for i in range(18)])
    predicted, _ = readouts.fit_predict("linear", x[train], thickness[train], people, x[~train], 0, seed=0)
    assert np.abs(predicted[:, 0] - thickness[~train]).max() < 20


GRADES = ("none", "mild", "moderate", "severe")


def graded(cohort, path):
    """A table with a grade that the vectors know, several findings in one cell, and a number with few values."""
    lines = ["participant_id\tlaterality\tseverity\tfindings\tstage"]
    for r in cohort.rows:
        grade = int(np.clip((r["cst_um"] - 250) // 30, 0, 3))
        found = [name for name in ("drusen", "dme") if r["diagnosis"] == name] + ["erm"] * (
            int(r["participant"]) // 6 % 4 == 0
        )
        lines.append(
            f"{r['participant']}\t{r['laterality']}\t{GRADES[grade]}\t{';'.join(found) or 'none'}\t{12 if grade == 3 else grade}"
        )
    path.write_text("\n".join(lines) + "\n")
    return path


def test_grades_are_scored_in_their_order(tmp_path):
    cohort = Cohort(participants=120)
    files, table = [cohort.embeddings(tmp_path / "a.parquet", signal=6)], graded(cohort, tmp_path / "l.tsv")
    result = probe(
        files,
        table,
        design="k-fold",
        resamples=100,
        targets=["severity", "stage"],
        orders={"severity": tuple(reversed(GRADES))},
    )
    kappa = row(result, "severity", "kappa")
    assert kappa["kind"] == "ordinal" and kappa["classes"] == list(reversed(GRADES)) and kappa["estimate"] > 0.4
    # Numbers are in their order without being told, 12 after 2.
    assert row(result, "stage", "kappa")["classes"] == ["0", "1", "2", "12"]
    unordered = probe(files, table, design="k-fold", resamples=100, targets=["severity"])
    assert "kappa" not in {r["metric"] for r in unordered["results"]}
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_csv(table, sep="\t", dtype=str, keep_default_na=False)
    frame["severity"] = pandas.Categorical(frame["severity"], reversed(GRADES), ordered=True)
    stated = probe(files, frame, design="k-fold", resamples=100, targets=["severity"])
    assert row(stated, "severity", "kappa") == kappa and stated["settings"]["orders"] == result["settings"]["orders"]
    with pytest.raises(EvaluationError, match="severe is not among the grades"):
        probe(files, table, targets=["severity"], orders={"severity": GRADES[:3]})


def test_a_cell_with_several_labels_makes_one_target_each_and_their_mean(tmp_path):
    cohort = Cohort(participants=120)
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet", signal=6)], graded(cohort, tmp_path / "l.tsv"), design="k-fold", resamples=100,
        targets=["findings"],
    )  # fmt: skip
    each = [row(result, f"findings:{name}", "auroc") for name in ("dme", "drusen", "erm")]
    mean = row(result, "findings", "auroc")
    assert mean["kind"] == "multilabel" and mean["classes"] == ["dme", "drusen", "erm"]
    assert mean["estimate"] == pytest.approx(np.mean([r["estimate"] for r in each]))
    assert each[0]["estimate"] > 0.8 and each[2]["low"] < 0.5 < each[2]["high"]
    assert mean["high"] - mean["low"] < max(r["high"] - r["low"] for r in each)


def by_participant(cohort, path, column, value_of):
    people = {r["participant"]: value_of(r) for r in cohort.rows}
    path.write_text(f"participant_id\t{column}\n" + "".join(f"{who}\t{value}\n" for who, value in people.items()))
    return path


def test_a_diagnosis_of_several_labels_still_asks_for_disease_once(cohort, tmp_path):
    several = by_participant(
        cohort, tmp_path / "l.tsv", "diagnosis", lambda r: {"dme": "drusen; dme"}.get(r["diagnosis"], r["diagnosis"])
    )
    single = by_participant(cohort, tmp_path / "m.tsv", "diagnosis", lambda r: r["diagnosis"])
    files = [cohort.embeddings(tmp_path / "a.parquet")]
    found, plain = (probe(files, table, resamples=50) for table in (several, single))
    names = [r["target"] for r in found["results"] if r["metric"] == "auroc" and r["column"] == "diagnosis"]
    assert names == ["disease", "diagnosis:dme", "diagnosis:drusen", "diagnosis"]
    assert row(found, "disease", "auroc") == row(plain, "disease", "auroc")


def test_grades_are_the_same_however_their_numbers_are_spelt(cohort, tmp_path):
    grade = {"healthy": "0", "drusen": "1", "dme": "2"}
    tables = [
        by_participant(cohort, tmp_path / name, "grade", lambda r, own=own: grade[r["diagnosis"]] + own(r))
        for name, own in (("a.tsv", lambda r: ""), ("b.tsv", lambda r: ".0" * (int(r["participant"]) % 2)))
    ]
    files = [cohort.embeddings(tmp_path / "e.parquet")]
    one, two = (probe(files, table, targets=["grade"], resamples=50)["results"] for table in tables)
    assert one == two and one[0]["classes"] == ["0", "1", "2"]


@pytest.mark.parametrize("healthy", ["Healthy", "NORMAL", "Control", "None", "No disease"])
def test_the_class_of_no_disease_comes_first_however_it_is_written(cohort, tmp_path, healthy):
    """The other one of two is then what scores ask about: an AUROC of .9 would be .1."""
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    labels = tuple({"group": (healthy, "AMD")[int(p) % 2]} for p in data.participant)
    cases = make_cases(Target("group", "group", "participant"), replace(data, participant_labels=labels), None)
    assert cases.classes == (healthy, "AMD")


@pytest.mark.parametrize(("learn", "test"), [(5, 4), (6, 1), (6, 2)])
def test_too_few_participants_to_learn_from_or_to_test_are_refused(cohort, tmp_path, learn, test):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    people = np.unique(data.participant)[: learn + test].tolist()
    data = take_rows(data, np.flatnonzero(np.isin(data.participant, people)))
    split = tuple("train" if people.index(p) < learn else "test" for p in data.participant)
    labels = tuple({"x": str(20.5 + people.index(p) + n / 99)} for n, p in enumerate(data.participant))
    data = replace(data, split=split, participant_labels=labels)
    cases, seen = make_cases(Target("x", "x", "eye"), data, None), np.zeros(len(split), bool)
    if (learn, test) == (6, 2):
        assert len(make_rounds(cases, data, "recommended_split", seen, False, 5, 0)[1]) == 1
    else:
        with pytest.raises(
            Skip, match=f"{learn} participants with x to learn from and {test} to test, expected at least 6"
        ):
            make_rounds(cases, data, "recommended_split", seen, False, 5, 0)


@pytest.mark.parametrize("groups", [2, 12], ids=["a few", "as many as measurements"])
def test_groups_between_two_numbers_are_classes_and_no_numbers(cohort, tmp_path, groups):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    labels = tuple({"group": f"{(low := 40 + 4 * (int(p) % groups))}_{low + 3}"} for p in data.participant)
    cases = make_cases(Target("group", "group", "participant"), replace(data, participant_labels=labels), None)
    assert cases.classes is not None and len(cases.classes) == groups and not cases.ordered


@pytest.mark.parametrize("word", ["missing", "NA", "n/a", "NaN", " ", ".", "Unknown"])
def test_a_missing_value_of_the_participants_own_table_is_no_class(cohort, tmp_path, word):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    labels = tuple({"group": ("a", "b", word)[int(p) % 3]} for p in data.participant)
    cases = make_cases(Target("group", "group", "participant"), replace(data, participant_labels=labels), None)
    assert cases.classes == ("a", "b") and cases.unlabelled == 40


@pytest.mark.parametrize("nothing", [";", " ; ", "NA; unknown"])
def test_separators_and_missing_values_between_them_are_no_label(cohort, tmp_path, nothing):
    """As a spreadsheet joins two columns of diagnoses of which one or both are empty."""
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    cells = ("Healthy", "AMD; NA", nothing, "; none")
    data = replace(data, participant_labels=tuple({"diagnosis": cells[int(p) % 4]} for p in data.participant))
    cases = make_cases(Target("disease", "diagnosis", "participant"), data, None)
    ill = [int(data.participant[i]) % 4 == 1 for i in cases.rows]
    assert cases.unlabelled == 30 and cases.label.tolist() == ill
    assert [target.name for target in find_targets(["diagnosis"], data, None)] == ["diagnosis:AMD"]
    one = make_cases(find_targets(["diagnosis"], data, None)[0], data, None)
    assert one.unlabelled == 30 and one.label.tolist() == ill


@pytest.mark.parametrize("cell", ["Healthy", "AMD", ";"])
def test_disease_needs_healthy_and_diseased_eyes(cohort, tmp_path, cell):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    data = replace(data, participant_labels=({"diagnosis": cell},) * len(data.participant))
    message = "No acquisition has a label" if cell == ";" else "does not hold both healthy and diseased eyes"
    with pytest.raises(Skip, match=message):
        make_cases(Target("disease", "diagnosis", "participant"), data, None)


@pytest.mark.parametrize("numbers", [10, 11])
def test_more_than_ten_numbers_are_measurements_and_no_grades(cohort, tmp_path, numbers):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    labels = tuple({"x": str(int(p) % numbers)} for p in data.participant)
    cases = make_cases(Target("x", "x", "eye"), replace(data, participant_labels=labels), None)
    assert cases.kind == ("ordinal" if numbers == 10 else "regression")


def test_numbers_that_are_all_alike_in_the_test_have_no_r_squared(cohort, tmp_path):
    lines = [
        f"{r['participant']}\t{r['laterality']}\t{5.0 if r['split'] == 'test' else i}"
        for i, r in enumerate(cohort.rows)
    ]
    (tmp_path / "l.tsv").write_text("\n".join(["participant_id\tlaterality\tx", *lines]))
    result = probe([cohort.embeddings(tmp_path / "a.parquet")], tmp_path / "l.tsv", targets=["x"], resamples=50)
    unknown, error = row(result, "x", "r2"), row(result, "x", "mae")
    assert unknown["estimate"] is None and "Not defined" in unknown["note"] and error["estimate"] > 0


@pytest.mark.parametrize("name", ["seeds", "resamples"])
def test_no_seeds_and_no_resamples_are_named(name, cohort, tmp_path):
    for function in (probe, label_efficiency):
        with pytest.raises(EvaluationError, match=f"{name}: expected at least 1, got 0"):
            function([cohort.embeddings(tmp_path / "a.parquet")], targets=["disease"], **{name: 0})


def test_a_rare_label_is_skipped_in_the_curve_as_in_the_probe(cohort, tmp_path):
    table = by_participant(
        cohort, tmp_path / "l.tsv", "findings", lambda r: "hole;dme" if r["participant"] == "1002" else r["diagnosis"]
    )
    files: dict[str, Any] = {"embeddings": [cohort.embeddings(tmp_path / "a.parquet")], "labels": table}
    result = probe(**files, targets=["findings"], resamples=50)
    curve, _ = label_efficiency(**files, targets=["findings"], resamples=50, fractions=(1.0,), seeds=1)
    assert [s["target"] for s in result["skipped"]] == ["findings:hole"]
    assert {r["target"] for r in curve} == {"findings:dme", "findings:drusen"}


def test_draws_of_a_network_count_in_means_over_labels_and_in_the_curve(cohort, tmp_path):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    noise = np.random.default_rng(0).normal(size=data.vectors.shape)
    arm = replace(data, draws=(noise,))
    table = by_participant(
        cohort, tmp_path / "l.tsv", "findings", lambda r: {"dme": "drusen;dme"}.get(r["diagnosis"], "none")
    )
    result = probe([arm], table, targets=["findings"], resamples=50)
    each, mean = row(result, "findings:dme", "auroc"), row(result, "findings", "auroc")
    other = row(result, "findings:drusen", "auroc")
    assert mean["per_draw"] == pytest.approx(np.mean([each["per_draw"], other["per_draw"]], axis=0))
    assert mean["estimate"] == pytest.approx(np.mean(mean["per_draw"]))

    alone = [replace(data, name="a"), replace(data, name="b", vectors=noise)]
    whole = {"targets": ["findings"], "fractions": (1.0,), "resamples": 50}
    first, second = (label_efficiency([e], table, **whole, seeds=1)[0][0]["estimate"] for e in alone)
    both = label_efficiency([arm], table, **whole, seeds=2)[0][0]
    assert both["estimate"] == pytest.approx((first + second) / 2, abs=0.05) and abs(first - second) > 0.2


def test_a_joint_arm_that_comes_first_is_compared_with_each_part_once(cohort, tmp_path):
    data = read_embeddings(cohort.embeddings(tmp_path / "a.parquet"))
    other = replace(data, name="map", vectors=np.random.default_rng(0).normal(size=data.vectors.shape))
    arms = [joined("both", [other, data]), other, data]
    result = probe(arms, cohort.labels(tmp_path / "l.tsv"), targets=["disease"], resamples=50)
    pairs = [(c["a"], c["b"]) for c in result["comparisons"] if c["metric"] == "auroc"]
    assert pairs == [("both", "map"), ("both", "pretrained")]


def test_probabilities_are_calibrated_to_how_common_a_class_is(tmp_path):
    """The probe weighs classes equally; a rare disease must still be called rare."""
    cohort = Cohort(participants=150)
    for r in cohort.rows:
        if int(r["participant"]) % 30 != 2:  # every tenth of those with DME keeps it
            r["diagnosis"] = "healthy"
    result = probe(
        [cohort.embeddings(tmp_path / "a.parquet", signal=0)], cohort.labels(tmp_path / "l.tsv"), design="k-fold", resamples=50,
        targets=["disease"],
    )  # fmt: skip
    assert row(result, "disease", "brier")["estimate"] < 1.3 * row(result, "disease", "brier")["chance"]
    assert row(result, "disease", "ece")["estimate"] < 0.1


def test_neighbours_see_what_a_line_cannot(tmp_path):
    cohort = Cohort(participants=90)
    path = cohort.embeddings(tmp_path / "a.parquet", signal=4)
    table = pq.read_table(path)
    rng = np.random.default_rng(0)
    corner = rng.integers(0, 4, len(cohort.rows))
    vectors = 3 * np.c_[corner % 2 * 2 - 1, corner // 2 * 2 - 1] + rng.normal(size=(len(cohort.rows), 2))
    flat = pa.array([v.astype(np.float32) for v in vectors], pa.list_(pa.float32()))
    pq.write_table(table.set_column(table.column_names.index("vector"), "vector", flat), path)
    lines = [
        "sop_instance_uid\tparity",
        *(f"{r['acquisition']}\t{'ab'[int(c in (0, 3))]}" for r, c in zip(cohort.rows, corner, strict=True)),
    ]
    (tmp_path / "l.tsv").write_text("\n".join(lines) + "\n")
    score = {
        name: row(
            probe([path], tmp_path / "l.tsv", design="k-fold", resamples=50, targets=["parity"], readout=name),
            "parity",
            "auroc",
        )
        for name in ("linear", "knn")
    }
    assert score["knn"]["estimate"] > 0.9 > 0.7 > score["linear"]["estimate"]
    assert score["knn"]["readout"] == "knn"


@pytest.mark.parametrize(
    ("verdict", "p_holm", "words"),
    [
        ("better", 0.162, ", not after Holm: 0.162)"),
        ("better", 0.03, ", Holm 0.030)"),
        ("inconclusive", 1.0, ", Holm 1.000)"),
    ],
)
def test_a_terminal_says_what_does_not_survive_the_correction(verdict, p_holm, words):
    compared = {"a": "one", "b": "other", "verdict": verdict, "difference": 0.018, "low": 0.001, "high": 0.062}
    compared |= {"p": 0.027, "p_holm": p_holm}
    assert difference_words(compared) == f"one is {verdict} against other: +0.018 (+0.001 to +0.062, p = 0.027{words}"
    assert "(+0.001 to +0.062, p < 0.001, " in difference_words(compared | {"p": 0.0001})
    assert "+0.0002 (+0.0001 to +0.0620, " in difference_words(compared | {"difference": 0.0002, "low": 0.0001})


def test_planned_comparisons_are_corrected_for_their_number(tmp_path):
    cohort = Cohort(participants=90)
    files = [
        cohort.embeddings(tmp_path / f"{n}.parquet", n, s)
        for n, s in (("pretrained", 2), ("random_init", 1), ("histogram", 0))
    ]
    result = probe(files, cohort.labels(tmp_path / "l.tsv"), design="k-fold", resamples=200)
    planned = [c for c in result["comparisons"] if c["planned"]]
    assert {c["metric"] for c in planned} == {"auroc", "r2"} and not any(c["leakage"] for c in planned)
    assert all(c["p_holm"] >= c["p"] for c in planned) and any(c["p_holm"] > c["p"] for c in planned)
    assert all(c["p_holm"] is None for c in result["comparisons"] if not c["planned"])
    # Less error is better.
    mae = next(c for c in result["comparisons"] if c["metric"] == "mae" and c["b"] == "histogram")
    assert mae["difference"] < 0 and mae["verdict"] == "better"
    assert {r["metric"] for r in result["results"] if r["lower_is_better"]} == {"brier", "ece", "mae"}
    precision, disease = (row(result, "disease", metric) for metric in ("auprc", "auroc"))
    assert precision["low"] > precision["chance"]
    assert disease["delong"]["method"] == "DeLong 1988"
    assert disease["delong"]["low"] == pytest.approx(disease["low"], abs=0.06)


def test_label_efficiency_uses_nested_participants_and_rises(tmp_path):
    cohort = Cohort(participants=120)
    files, table = [cohort.embeddings(tmp_path / "a.parquet", signal=2)], cohort.labels(tmp_path / "l.tsv")
    curve, alone = label_efficiency(files, table, targets=["disease"], seeds=2, resamples=50)
    assert alone == [], "one encoder is compared with none"
    assert [r["fraction"] for r in curve] == [0.01, 0.05, 0.1, 0.25, 0.5, 1.0]
    people = [r["n_train_participants"] for r in curve]
    assert people == sorted(people) and people[0] == 4 and len({r["n_test_participants"] for r in curve}) == 1
    assert curve[-1]["estimate"] > curve[0]["estimate"] + 0.05
    whole = row(probe(files, table, targets=["disease"], resamples=50), "disease", "auroc")
    assert curve[-1]["n_train_participants"] == whole["n_train_participants"]

    data = read_embeddings(files[0])
    cases = make_cases(find_targets(["disease"], data, read_labels(table))[0], data, read_labels(table))
    everything = Round(np.arange(len(cases.rows)), np.arange(0))
    smaller = [set(cases.participant[subset(cases, everything, f, 3).train]) for f in (0.05, 0.25, 1.0)]
    assert smaller[0] < smaller[1] < smaller[2] == set(cases.participant)
    # Folds test everybody whom pretraining has not seen, after learning from the same share of all others.
    unseen = {r["participant"] for r in cohort.rows[60:]}
    thirds: dict[str, Any] = {"design": "k-fold", "folds": 3, "seen": lambda p: p not in unseen}
    folded, _ = label_efficiency(
        files, table, targets=["disease"], fractions=(0.3, 1.0), seeds=2, resamples=50, **thirds
    )
    assert [r["n_test_participants"] for r in folded] == [90, 90] and [r["design"] for r in folded] == ["k-fold"] * 2
    assert [r["n_train_participants"] for r in folded] == [pytest.approx(27, abs=2), 30 + 60]
    whole = row(probe(files, table, targets=["disease"], resamples=50, **thirds), "disease", "auroc")
    assert folded[-1]["n_train_participants"] == whole["n_train_participants"]
    # Both eyes come or neither.
    rows = subset(cases, everything, 0.25, 3).train
    assert all((cases.participant[rows] == p).sum() == 2 for p in set(cases.participant[rows]))


def test_what_pretraining_saves_in_labels_is_paired_and_corrected(tmp_path):
    cohort = Cohort(participants=200)
    files = [
        cohort.embeddings(tmp_path / f"{name}.parquet", name=name, signal=signal)
        for name, signal in (("good", 3), ("poor", 0.5))
    ]
    rows, compared = label_efficiency(
        files, cohort.labels(tmp_path / "l.tsv"), targets=["disease"], fractions=(0.2, 1.0), resamples=200
    )
    assert [(c["a"], c["b"], c["fraction"]) for c in compared] == [("good", "poor", 0.2), ("good", "poor", 1.0)]
    for c in compared:
        good, poor = (
            next(r for r in rows if (r["encoder"], r["fraction"]) == (name, c["fraction"])) for name in ("good", "poor")
        )
        assert c["difference"] == pytest.approx(good["estimate"] - poor["estimate"], abs=1e-9)
        assert c["n_train_participants"] == good["n_train_participants"]
        assert c["low"] < c["difference"] < c["high"] and c["verdict"] == "better" and c["p_holm"] >= c["p"]
    good = read_embeddings(files[0])
    _, equal = label_efficiency(
        [good, replace(good, name="twin")], cohort.labels(tmp_path / "l.tsv"), targets=["disease"], resamples=50
    )
    assert {c["verdict"] for c in equal} == {"inconclusive"} and {c["difference"] for c in equal} == {0.0}


def test_several_seeds_widen_what_one_seed_claims(cohort, tmp_path):
    files, table = [cohort.embeddings(tmp_path / "a.parquet", signal=1)], cohort.labels(tmp_path / "l.tsv")
    one, three = (
        row(probe(files, table, design="k-fold", targets=["disease"], resamples=200, seeds=n), "disease", "auroc")
        for n in (1, 3)
    )
    assert (one["seeds"], three["seeds"]) == (1, 3)
    assert three["high"] - three["low"] > 0.8 * (one["high"] - one["low"])


@pytest.mark.slow
def test_the_demo_sized_probe_takes_under_40_seconds(tmp_path):
    cohort = Cohort(participants=300, width=384)
    files = [cohort.embeddings(tmp_path / f"{n}.parquet", n) for n in ("pretrained", "random_init", "histogram")]
    start = time.process_time()  # of this process, whoever else is at work
    probe(
        files, cohort.labels(tmp_path / "l.tsv"), design="k-fold", targets=["disease", "diagnosis", "cst_um", "scanner"]
    )
    assert time.process_time() - start < 40


@pytest.mark.parametrize(
    ("readout", "seed"), [("linear", 0), ("linear", 1), ("ordinal", 0), ("ordinal", 1), ("knn", 1), ("knn", 6)]
)
def test_penalties_far_behind_the_best_are_not_fitted(monkeypatch: pytest.MonkeyPatch, readout, seed) -> None:
    """The hardly penalised fits took half the time of a probe and were never chosen (docs/log). Neighbours are all
    tried: with a rare class their loss has several valleys."""
    rng = np.random.default_rng(seed)
    y = (rng.random(300) < 0.05).astype(int) if readout == "knn" else np.arange(300) % 3
    classes, signal = (2, 0.6) if readout == "knn" else (3, 0.3)
    x = rng.normal(size=(300, 40)) + signal * np.eye(classes)[y] @ rng.normal(size=(classes, 40))
    name = {"linear": "_linear", "ordinal": "_ordinal", "knn": "_neighbours"}[readout]
    grid, path, tried = readouts.NEIGHBOURS if readout == "knn" else readouts.LOGISTIC_C, getattr(readouts, name), []

    def counted(x, x_new, y, num_classes, grid, **how):
        for setting, predicted in zip(grid, path(x, x_new, y, num_classes, grid, **how), strict=True):
            tried.append(setting)
            yield predicted

    monkeypatch.setattr(readouts, name, counted)
    who = np.arange(300).astype(str)
    few, best = readouts.fit_predict(readout, x, y, who, x, classes, 0)
    assert (max(tried) < grid[-1]) == (readout != "knn") and best <= max(tried)
    monkeypatch.setattr(readouts, "PAST_THE_BEST", np.inf)
    tried.clear()
    every, same = readouts.fit_predict(readout, x, y, who, x, classes, 0)
    assert set(tried) == set(grid) and same == best
    np.testing.assert_array_equal(few, every)


@pytest.mark.parametrize(("rows", "classes"), [(30, 2), (120, 2), (120, 3), (120, 5)])
@pytest.mark.parametrize("c", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize("wide", [0, 768])
def test_logistic_regression_equals_that_of_scikit_learn(monkeypatch, rows, classes, c, wide):
    from sklearn.linear_model import LogisticRegression

    monkeypatch.setattr(linear, "WIDE", wide)
    rng = np.random.default_rng(rows + classes)
    y = rng.choice([2, 3, 5, 7, 8][:classes], rows, p=np.arange(1, classes + 1) / np.arange(1, classes + 1).sum())
    x, new = readouts.standardised(rng.normal(y[:, None] / 4, size=(rows, 40)), rng.normal(1, 1, size=(9, 40)))
    # Its default solver stops 1e-6 before the optimum.
    fit = LogisticRegression(C=c, class_weight="balanced", solver="newton-cg", max_iter=2000, tol=1e-10).fit(x, y)
    theirs = fit.predict_proba(new)
    np.testing.assert_allclose(np.exp(next(logistic(x, y, (c,), 1e-8, new))), theirs, atol=1e-6)


@pytest.mark.parametrize("rows", [20, 40, 200])
def test_ridge_regression_equals_that_of_scikit_learn(rows):
    from sklearn.linear_model import Ridge

    rng = np.random.default_rng(rows)
    x, new = rng.normal(3, 2, size=(rows, 40)), rng.normal(size=(9, 40))
    y = 5 + x[:, 0] + rng.normal(size=rows)
    for alpha, found in zip((1.0, 1e3), ridge(x, y, (1.0, 1e3), new), strict=True):
        np.testing.assert_allclose(found, Ridge(alpha=alpha).fit(x, y).predict(new), rtol=1e-8)


def test_what_is_missing_is_the_mean_of_the_training_rows():
    """Not of all rows: the tested ones must not reach a fit."""
    rng = np.random.default_rng(0)
    x, new = rng.normal(3, 2, size=(30, 4)), rng.normal(90, 2, size=(9, 4))
    x[rng.random(x.shape) < 0.2], new[rng.random(new.shape) < 0.2] = np.nan, np.nan
    x[:, 3] = np.nan  # never known: tells nothing
    usual = np.append(np.nanmean(x[:, :3], axis=0), 0)
    expected = readouts.standardised(np.where(np.isnan(x), usual, x), np.where(np.isnan(new), usual, new))
    found = readouts.standardised(x, new)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)
    assert not found[0][:, 3].any() and not found[1][:, 3].any()


def test_probes_of_small_matrices_take_one_blas_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other took seven times the CPU time of one (docs/log)."""
    from threadpoolctl import threadpool_info, threadpool_limits

    def blas_threads() -> set[int]:
        return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}

    seen: list[set[int]] = []
    linear = readouts._linear

    def watched(*arguments, **how):
        for predicted in linear(*arguments, **how):
            seen.append(blas_threads())
            yield predicted

    monkeypatch.setattr(readouts, "_linear", watched)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 4)), np.tile([0, 1], 20)
    with threadpool_limits(2, user_api="blas"):
        readouts.fit_predict("linear", x, y, np.arange(40).astype(str), x, 2, 0)
        assert blas_threads() == {2}
        monkeypatch.setattr(readouts, "SMALL", 0)
        before = len(seen)
        readouts.fit_predict("linear", x, y, np.arange(40).astype(str), x, 2, 0)
    assert all(threads == {1} for threads in seen[:before])
    assert all(threads == {2} for threads in seen[before:])


@pytest.mark.slow
def test_reading_embeddings_starts_no_thread_that_may_outlive_the_command(cohort, tmp_path):
    """Threads of pyarrow.parquet.read_table and Table.sort_by abort a process that ends while they clean up."""
    path = cohort.embeddings(tmp_path / "a.parquet")
    script = (
        "import os, sys, pyarrow.compute, pyarrow.parquet, octfm.encoder.embeddings as module\n"
        "before = os.listdir('/proc/self/task')\n"
        "module.read_embeddings(sys.argv[1])\n"
        "print(len(os.listdir('/proc/self/task')) - len(before))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=120)
    assert (done.stdout.strip(), done.stderr) == ("0", "")


def test_parquet_is_read_in_one_place():
    source = Path(octfm.__file__).parent
    users = {
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if "parquet as pq" in path.read_text()
    }
    assert users == {"io/parquet.py"}
