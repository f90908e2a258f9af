"""A participant counts once: however many scans there are, and whichever of two eyes comes first in a table."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import expit
from sklearn.metrics import brier_score_loss, cohen_kappa_score, roc_auc_score

from octfm.encoder.embeddings import Embeddings, take_rows
from octfm.evaluation.cases import Cases, Round, Target, log_share, make_cases, make_rounds
from octfm.evaluation.efficiency import label_efficiency, subset
from octfm.evaluation.metrics import macro_auprc, macro_auroc
from octfm.evaluation.probe import predict, probe
from octfm.evaluation.readouts import fit_predict
from octfm.evaluation.scoring import Predictions, compare_metrics, correct, metrics_of, score, to_units
from octfm.evaluation.statistics import MIN_PARTICIPANTS
from support.examples import examples


def embeddings(participant, laterality, labels, vectors) -> Embeddings:
    """Scans of participants and eyes, each with labels of its own; without splits."""
    participant = np.array([f"p{i:03d}" for i in participant])
    data = Embeddings(
        name="mine",
        path="mine",
        metadata={},
        acquisition=np.array([f"a{i:05d}" for i in range(len(participant))]),
        participant=participant,
        eye_id=np.array([f"{p}_{side}" for p, side in zip(participant, laterality, strict=True)]),
        laterality=tuple(laterality),
        scanner=np.array(["one"] * len(participant)),
        split=(None,) * len(participant),
        participant_labels=tuple(labels),
        vectors=np.asarray(vectors, float),
    )
    return take_rows(data, np.argsort(data.acquisition))


def with_scans(scans_of_ill: int, seed: int, signal: float = 0.0) -> Embeddings:
    """200 participants, every other one ill; each who is ill has as many scans as that, the others one."""
    rng = np.random.default_rng(seed)
    ill = np.arange(200) % 2
    row = np.repeat(np.arange(200), np.where(ill, scans_of_ill, 1))
    vectors = rng.normal(size=(200, 4)) + signal * ill[:, None]
    labels = [{"diagnosis": "drusen" if ill[i] else "healthy"} for i in row]
    return embeddings(row, ["R"] * len(row), labels, vectors[row] + 0.3 * rng.normal(size=(len(row), 4)))


@pytest.mark.parametrize("scans_of_ill", [6, 7, 8])
@pytest.mark.parametrize("readout", ["linear", "knn"])
def test_who_knows_nothing_guesses_however_often_the_ill_were_scanned(scans_of_ill, readout):
    """The mean of seven equal log-probabilities differs from that of one in its last bit: AUROC was 0 or 1."""
    data = with_scans(scans_of_ill, 0)
    sex = np.array([int(name[1:]) // 2 % 2 for name in data.participant])[:, None]
    for vectors in (0 * sex, sex):
        cases = make_cases(Target("disease", "diagnosis", "participant"), replace(data, vectors=1.0 * vectors), None)
        everything = Round(np.arange(len(sex)), np.arange(len(sex)))
        units = to_units(cases, predict(cases, [everything], replace(data, vectors=1.0 * vectors), readout, 0))
        found = {name: metric(np.ones((1, 200)))[0] for name, metric, _ in metrics_of(cases, units)}
        assert (found["auroc"], found["auprc"], found["balanced_accuracy"]) == (0.5, 0.5, 0.5)


def test_equal_probabilities_of_a_class_are_ties_whatever_those_of_the_other_classes():
    """The votes of 40 neighbours are counts; dividing by sums of other roundings told equal ones apart."""
    rng = np.random.default_rng(0)
    truth = np.arange(90) % 3
    votes = np.stack([rng.multinomial(40, np.full(3, 0.25) + 0.25 * (np.arange(3) == k)) for k in truth]) + 0.5
    who, every = np.arange(90).astype(str), np.arange(90)
    cases = Cases(Target("grade", "grade", "participant"), every, truth, ("a", "b", "c"), who, who, "participant", 0)
    units = to_units(cases, Predictions(every, np.log(votes) + rng.normal(size=(90, 1))))
    found = {name: float(metric(np.ones((1, 90)))[0]) for name, metric, _ in metrics_of(cases, units)}
    of_votes = {"auroc": macro_auroc(truth, votes), "auprc": macro_auprc(truth, votes)}
    assert {name: found[name] for name in of_votes} == pytest.approx(of_votes, abs=1e-12)


def test_people_with_equal_vectors_have_equal_neighbours():
    """Products of equal rows may differ in their last bits, which chose other neighbours among equally near ones."""
    rng = np.random.default_rng(32)
    people = np.concatenate([np.stack([rng.integers(0, k, n) for k in (2, 3, 4)], axis=1) for n in (257, 74)])
    vectors = np.concatenate([people[:, :1], np.eye(3)[people[:, 1]], np.eye(4)[people[:, 2]]], axis=1)
    ill, who = rng.integers(0, 2, 257), np.arange(257).astype(str)
    said = fit_predict("knn", vectors[:257], ill, who, vectors[257:], 2, 0)[0]
    _, alike = np.unique(people[257:], axis=0, return_inverse=True)
    assert all(len(np.unique(said[alike == k], axis=0)) == 1 for k in range(alike.max() + 1))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 6), min_size=12, max_size=30), st.integers(0, 1000))
def test_a_class_is_as_common_as_its_participants_however_often_they_were_scanned(scans, seed):
    ill = np.arange(len(scans)) % 3 == 0
    row = np.repeat(np.arange(len(scans)), scans)
    labels = [{"diagnosis": "drusen" if ill[i] else "healthy"} for i in row]
    vectors = np.random.default_rng(seed).normal(size=(len(row), 3))
    data = embeddings(row, ["R"] * len(row), labels, vectors)
    cases = make_cases(Target("disease", "diagnosis", "participant"), data, None)
    everything = Round(np.arange(len(row)), np.arange(len(row)))
    said = predict(cases, [everything], data, "knn", 0)
    assert said.log_prior is not None
    np.testing.assert_allclose(np.exp(said.log_prior), [[1 - ill.mean(), ill.mean()]] * len(row))


def test_a_participant_with_one_diseased_eye_is_a_diseased_participant():
    data = embeddings([0, 0, 1, 1, 1], "RLRLL", [{"diagnosis": d} for d in ("healthy", "dme", *["healthy"] * 3)], np.zeros((5, 1)))  # fmt: skip
    cases = make_cases(Target("disease", "diagnosis", "participant"), data, None)
    np.testing.assert_allclose(np.exp(log_share(cases, np.arange(5))), [0.5, 0.5])
    # Scored by the eye, three of four are healthy.
    by_eye = replace(cases, unit=np.array(["0R", "0L", "1R", "1L", "1L"]), unit_name="eye")
    np.testing.assert_allclose(np.exp(log_share(by_eye, np.arange(5))), [0.75, 0.25])


@pytest.mark.parametrize("signal", [0.0, 0.8])
def test_follow_up_scans_of_the_ill_do_not_make_probabilities_wrong(signal):
    """Of clinics that scan the ill four times and the healthy once, as of those that scan everybody once."""
    found: dict[int, dict[str, float]] = {}
    for scans in (1, 4):
        runs = [
            probe([with_scans(scans, seed, signal)], targets=["disease"], resamples=20)["results"] for seed in range(3)
        ]
        found[scans] = {
            m: float(np.mean([r["estimate"] for run in runs for r in run if r["metric"] == m]))
            for m in ("brier", "ece")
        }
    assert found[4]["brier"] < 1.06 * found[1]["brier"]
    assert found[4]["ece"] < found[1]["ece"] + 0.05


@settings(max_examples=40)
@given(st.integers(12, 40), st.floats(0.01, 1), st.integers(0, 1000))
def test_a_subset_keeps_two_participants_of_every_class_whichever_eye_is_ill(people, fraction, seed):
    """Disease of one eye only: the fellow eye, which may come first in the table, is healthy."""
    rng = np.random.default_rng(seed)
    ill, left_first = np.arange(people) % 4 == 0, rng.random(people) < 0.5
    rows = [(i, side) for i in range(people) for side in ("LR" if left_first[i] else "RL")]
    labels = [{"diagnosis": "dme" if ill[i] and side == "L" else "healthy"} for i, side in rows]
    data = embeddings(*zip(*rows, strict=True), labels, np.zeros((len(rows), 1)))
    cases = make_cases(Target("disease", "diagnosis", "participant"), data, None)
    whole = Round(np.arange(len(rows)), np.arange(0))
    part = subset(cases, whole, fraction, seed).train
    count = len(set(cases.participant[part][cases.label[part] == 1]))
    assert count == max(2, int(np.ceil(fraction * ill.sum())))


@pytest.mark.parametrize(("eyes_of_ill", "eyes_of_healthy"), [(2, 1), (1, 2), (2, 2), (1, 1)])
def test_noise_is_not_above_guessing_where_the_ill_have_more_eyes(eyes_of_ill, eyes_of_healthy):
    """Participants are scored by their worse eye, and the worse of two looks worse than one."""
    found = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rows = [(i, "RL"[eye]) for i in range(120) for eye in range(eyes_of_ill if i % 2 else eyes_of_healthy)]
        labels = [{"diagnosis": "dme" if i % 2 else "healthy"} for i, _ in rows]
        data = embeddings(*zip(*rows, strict=True), labels, rng.normal(size=(len(rows), 4)))
        result = probe([data], targets=["disease"], resamples=40)["results"]
        found.append(next(r for r in result if r["metric"] == "auroc"))
    assert found[0]["chance"] == pytest.approx(eyes_of_ill / (eyes_of_ill + eyes_of_healthy))
    assert np.mean([r["estimate"] for r in found]) == pytest.approx(found[0]["chance"], abs=0.08)
    assert ("Guessing reaches" in (found[0]["note"] or "")) == (eyes_of_ill != eyes_of_healthy)


@pytest.mark.parametrize("sides", ["RL", (None, None), ("R", None)])
def test_thickness_of_two_eyes_is_not_averaged_where_nothing_says_which_they_are(sides):
    thickness = np.random.default_rng(0).normal(280, 30, 24)
    labels = [{"cst_um": f"{um:.2f}"} for um in thickness]
    rows = [i // 2 for i in range(24)]
    data = embeddings(rows, [sides[i % 2] for i in range(24)], labels, np.zeros((24, 1)))
    cases = make_cases(Target("cst_um", "cst_um", "eye"), data, None)
    units = to_units(cases, Predictions(np.arange(24), thickness[:, None]))
    np.testing.assert_allclose(np.sort(units.truth), np.sort(np.round(thickness, 2)))
    assert cases.unit_name == ("eye" if "R" in sides else "acquisition")


@settings(max_examples=30)
@given(
    st.integers(0, 2).flatmap(
        lambda most: st.lists(st.lists(st.integers(0, most), min_size=1, max_size=4), min_size=12)
    )
)
def test_a_number_that_changes_between_visits_is_scored_per_scan(changes):
    """The mean over visits is easier to predict than what each of them found, and no visit may have found it."""
    row = [eye for eye, own in enumerate(changes) for _ in own]
    um = np.array([300.0 + 10 * eye + change for eye, own in enumerate(changes) for change in own])
    data = embeddings(row, ["R"] * len(row), [{"cst_um": str(each)} for each in um], np.zeros((len(row), 1)))
    cases = make_cases(Target("cst_um", "cst_um", "eye"), data, None)
    units = to_units(cases, Predictions(np.arange(len(row)), um[:, None]))
    steady = all(len(set(own)) == 1 for own in changes)
    assert cases.unit_name == ("eye" if steady else "acquisition")
    np.testing.assert_allclose(np.sort(units.truth), np.unique(um) if steady else np.sort(um))


@pytest.mark.slow
def test_a_large_difference_survives_holm_among_many_comparisons():
    """Two labels and 17 rivals of pure noise: with 2,000 resamples p cannot fall far enough."""
    rng = np.random.default_rng(0)
    ill = rng.random((40, 2)) < 0.4
    labels = [{"findings": ";".join(name for name, has in zip("ab", own, strict=True) if has) or "none"} for own in ill]
    good = embeddings(range(40), ["R"] * 40, labels, ill + 0.3 * rng.normal(size=(40, 2)))
    rivals = [replace(good, name=f"noise{i}", vectors=rng.normal(size=(40, 2))) for i in range(17)]
    result = probe([good, *rivals], targets=["findings"], readout="knn")
    planned = [c for c in result["comparisons"] if c["planned"]]
    assert len(planned) == 51 and min(c["difference"] for c in planned) > 0.2
    assert {c["verdict"] for c in planned} == {"better"} and max(c["p_holm"] for c in planned) <= 0.05
    curve = label_efficiency([good, *rivals], targets=["findings"], readout="knn", seeds=1, fractions=(0.5, 1.0))[1]
    assert min(c["p_holm"] for c in curve) <= 0.05


@settings(max_examples=examples(40))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["train", "train", "val", "test", "test", "calibration", None]),
            st.lists(st.sampled_from(["10", "2", "7", "", "1.5"]), min_size=1, max_size=3),
        ),
        min_size=24,
        max_size=36,
    ),
    st.sampled_from([(), ("0", "1.5", "2", "7", "10")]),
)
def test_a_split_trains_on_its_train_and_val_and_tests_its_test_by_the_grade_of_every_row(people, order):
    """Grades that fewer than two participants to learn from have are left out, and the others keep their order."""
    rows = [(who, split, cell) for who, (split, cells) in enumerate(people) for cell in cells]
    data = embeddings([who for who, *_ in rows], ["R"] * len(rows), [{"grade": cell} for *_, cell in rows], np.zeros((len(rows), 1)))  # fmt: skip
    data = replace(data, split=tuple(split for _, split, _ in rows))
    learn = {g: {who for who, split, cell in rows if cell == g and split in ("train", "val")} for g in ("1.5", "2", "7", "10")}  # fmt: skip
    kept = [grade for grade, who in learn.items() if len(who) >= 2]
    tested = [i for i, (_, split, cell) in enumerate(rows) if split == "test" and cell in kept]
    trained = [i for i, (_, split, cell) in enumerate(rows) if split in ("train", "val") and cell in kept]
    many = {rows[i][0] for i in trained}, {rows[i][0] for i in tested}
    assume(len(many[0]) >= 6 and len(many[1]) >= 2 and len({rows[i][2] for i in tested}) >= 2)
    cases = make_cases(Target("grade", "grade", "acquisition", order=order), data, None)
    cases, (only,) = make_rounds(cases, data, "recommended_split", np.zeros(len(rows), bool), False, 5, 0)
    assert cases.classes == tuple(kept)
    assert [cases.classes[k] for k in cases.label] == [rows[i][2] for i in cases.rows]
    assert cases.rows[only.train].tolist() == trained and cases.rows[only.test].tolist() == tested
    assert {*cases.left_out} == {g for g in learn if any(cell == g for *_, cell in rows)} - {*kept}


def test_an_eye_with_a_disease_beside_a_healthy_finding_is_diseased():
    cells = ["healthy", "healthy;dme", "none; normal", "dme"]
    data = embeddings(range(4), ["R"] * 4, [{"diagnosis": cell} for cell in cells], np.zeros((4, 1)))
    assert make_cases(Target("disease", "diagnosis", "participant"), data, None).label.tolist() == [0, 1, 0, 1]


def test_a_class_needs_a_participant_to_test_in_every_fold():
    """Those of pretraining are trained on in every fold and do not count; and another seed deals other folds."""
    grade = np.array(["a", "b", "c"])[np.arange(60) % 3]
    data = embeddings(range(60), ["R"] * 60, [{"grade": g} for g in grade], np.zeros((60, 1)))
    seen = (np.arange(60) % 3 == 1) & (np.arange(60) > 13)
    cases = make_cases(Target("grade", "grade", "participant"), data, None)
    kept, rounds = make_rounds(cases, data, "k-fold", seen, False, 5, 0)
    assert kept.left_out == () and sorted(np.concatenate([r.test for r in rounds])) == np.flatnonzero(~seen).tolist()
    assert all(sorted([*r.train, *r.test]) == [*range(60)] for r in rounds)
    fewer, rounds = make_rounds(cases, data, "k-fold", seen | (np.arange(60) == 1), False, 5, 0)
    assert fewer.left_out == ("b",) and fewer.classes == ("a", "c")
    again = make_rounds(cases, data, "k-fold", seen | (np.arange(60) == 1), False, 5, 1)[1]
    assert {tuple(r.test) for r in rounds}.isdisjoint(tuple(r.test) for r in again)
    assert all({*r.train.tolist(), *r.test.tolist()} == {*range(40)} for r in rounds)


def test_scores_are_those_of_scikit_learn_by_the_worse_eye_and_means_over_seeds_and_draws():
    """Runs of two seeds with three draws each, of people with several scans of one eye or both."""
    rng = np.random.default_rng(0)
    rows = [
        (who, side) for who in range(60) for side in "RL"[: 1 + who % 2] for _ in range(1 + (who + (side == "L")) % 3)
    ]
    ill = [who % 3 == 0 and side == "R" for who, side in rows]
    data = embeddings([who for who, _ in rows], [side for _, side in rows], [{"diagnosis": "dme" if own else "none"} for own in ill], np.zeros((len(rows), 1)))  # fmt: skip
    cases = make_cases(Target("disease", "diagnosis", "participant"), data, None)
    prior, truth = np.tile(np.log([0.7, 0.3]), (len(rows), 1)), np.arange(60) % 3 == 0
    runs, aurocs, briers = [], [], []
    for _ in range(6):
        odds = rng.normal(size=len(rows)) + 1.5 * np.array(ill)
        runs.append(Predictions(np.arange(len(rows)), odds[:, None] / 2 * [-1, 1], prior))
        by_eye = {eye: odds[[i for i, own in enumerate(rows) if own == eye]].mean() for eye in {*rows}}
        worse = np.array([max(by_eye[eye] for eye in by_eye if eye[0] == who) for who in range(60)])
        aurocs.append(roc_auc_score(truth, worse))
        briers.append(2 * brier_score_loss(truth, expit(worse + np.log(3 / 7))))
    found = {s.metric: s for s in score(cases, "a", runs, {"target": "disease"}, 60, 3, draws=3)}
    assert found["auroc"].row["estimate"] == pytest.approx(np.mean(aurocs))
    assert found["auroc"].row["per_draw"] == pytest.approx(np.reshape(aurocs, (2, 3)).mean(0))
    assert found["brier"].row["estimate"] == pytest.approx(np.mean(briers)) and found["auroc"].row["seeds"] == 2
    assert found["brier"].row["chance"] == pytest.approx(2 * truth.mean() * (1 - truth.mean()))
    eyes = 1 + np.arange(60) % 2
    guessed = [a / (a + b) for a in eyes[truth] for b in eyes[~truth]]
    assert found["auroc"].row["chance"] == pytest.approx(np.mean(guessed)), "however often an eye was scanned"
    assert found["auroc"].ranked is None, "several runs have no variance of DeLong"
    # Draws of a seed share its resamples, and the seed of the study draws others.
    again, other = (score(cases, "a", runs, {"target": "disease"}, 60, seed, draws=3)[0].row for seed in (3, 4))
    assert again["low"] == found["auroc"].row["low"] != other["low"]
    alone = {score(cases, "a", runs[:1], {"target": "disease"}, 60, seed)[0].row["low"] for seed in (3, 4)}
    assert len(alone) == 2


@pytest.mark.parametrize("leakage", [False, True])
def test_lower_errors_and_less_leakage_are_better_and_leakage_is_never_planned(leakage):
    data = embeddings(range(40), ["R"] * 40, [{"cst_um": f"{i * i}"} for i in range(40)], np.zeros((40, 1)))
    cases = make_cases(Target("cst_um", "cst_um", "eye", leakage=leakage), data, None)
    rng, truth = np.random.default_rng(0), np.arange(40.0) ** 2
    good, poor = (
        score(
            cases, name, [Predictions(np.arange(40), (truth + rng.normal(0, sd, 40))[:, None])], {"target": "t"}, 200, 0
        )
        for name, sd in (("good", 20), ("poor", 200))
    )
    found = {c["metric"]: c for c in correct(compare_metrics(good, poor, leakage=leakage))}
    assert [found[name]["verdict"] for name in ("r2", "mae")] == ["worse" if leakage else "better"] * 2
    assert (found["r2"]["planned"], found["mae"]["planned"]) == (not leakage, False) and found["mae"]["p_holm"] is None
    assert found["mae"]["difference"] < 0 < found["r2"]["difference"]
    mae = next(s.row for s in good if s.metric == "mae")
    assert mae["chance"] == np.abs(truth - np.median(truth)).mean()


@pytest.mark.parametrize(("few", "given"), [(MIN_PARTICIPANTS - 1, False), (MIN_PARTICIPANTS, True)])
def test_an_interval_needs_a_least_number_of_participants_of_each_class(few, given):
    row = np.repeat(np.arange(30), 2)
    data = embeddings(row, "RL" * 30, [{"diagnosis": "dme" if i < few else "none"} for i in row], np.zeros((60, 1)))
    cases = make_cases(Target("disease", "diagnosis", "participant"), data, None)
    value = np.random.default_rng(0).normal(size=(60, 2))
    assert (score(cases, "a", [Predictions(np.arange(60), value)], {}, 20, 0)[0].row["low"] is not None) == given


def test_a_subset_of_measured_eyes_has_participants_of_every_fifth():
    labels = [{"cst_um": f"{200 + 3 * (i * 17 % 50)}"} for i in range(50)]
    data = embeddings(range(50), ["R"] * 50, labels, np.zeros((50, 1)))
    cases = make_cases(Target("cst_um", "cst_um", "eye"), data, None)
    for seed in range(6):
        kept = cases.label[subset(cases, Round(np.arange(50), np.arange(0)), 0.3, seed).train]
        assert np.bincount((np.argsort(np.argsort(cases.label)) // 10)[np.isin(cases.label, kept)]).tolist() == [3] * 5


def test_the_grade_of_a_participant_is_the_nearest_to_the_mean_of_all_scans():
    rng = np.random.default_rng(1)
    row = np.repeat(np.arange(30), 1 + np.arange(30) % 3)
    data = embeddings(row, ["R"] * len(row), [{"stage": f"{who % 4}"} for who in row], np.zeros((len(row), 1)))
    cases = make_cases(Target("stage", "stage", "participant"), data, None)
    grade = row % 4 + rng.normal(0, 0.8, len(row))
    said = Predictions(np.arange(len(row)), np.zeros((len(row), 4)), None, grade)
    nearest = np.clip(np.rint([grade[row == who].mean() for who in range(30)]), 0, 3)
    kappa = next(s for s in score(cases, "a", [said], {"target": "stage"}, 20, 0) if s.metric == "kappa")
    assert kappa.row["estimate"] == pytest.approx(cohen_kappa_score(np.arange(30) % 4, nearest, weights="quadratic"))


def test_a_measurement_of_eyes_with_few_values_is_still_scored_by_eye():
    labels = [{"cst_um": str(250 + 10 * (i // 2 % 3))} for i in range(24)]
    data = embeddings(np.arange(24) // 2, ["RL"[i % 2] for i in range(24)], labels, np.zeros((24, 1)))
    cases = make_cases(Target("cst_um", "cst_um", "eye"), data, None)
    assert cases.unit_name == "eye" and len({*cases.unit}) == 24 and cases.classes == ("250", "260", "270")
