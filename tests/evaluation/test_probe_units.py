"""A participant counts once: however many scans there are, and whichever of two eyes comes first in a table."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.encoder.embeddings import Embeddings, take_rows
from octfm.evaluation.cases import Round, Target, log_share, make_cases
from octfm.evaluation.efficiency import label_efficiency, subset
from octfm.evaluation.probe import predict, probe
from octfm.evaluation.scoring import Predictions, to_units


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
