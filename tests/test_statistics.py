"""Metrics equal scikit-learn's, also under resampling; intervals cover what they claim; participants, not eyes, are resampled."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, r2_score, roc_auc_score

from octfm.evaluation.metrics import auroc, balanced_accuracy, macro_auroc, r_squared
from octfm.evaluation.statistics import bootstrap, compare, interval


@st.composite
def scored_cases(draw):
    """Labels of 3 classes, scores with ties, and integer case weights [2, n] that keep every class."""
    n = draw(st.integers(6, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    label = np.r_[0, 1, 2, rng.integers(0, 3, n - 3)]
    score = rng.integers(0, draw(st.integers(2, 50)), n) / 7
    weights = rng.integers(0, 4, (2, n)).astype(float)
    weights[:, :3] += 1
    return label, score, weights


@settings(deadline=None, max_examples=40)
@given(scored_cases())
def test_auroc_with_ties_and_weights_equals_scikit_learn(cases):
    label, score, weights = cases
    assert auroc(label == 1, score) == pytest.approx(roc_auc_score(label == 1, score))
    expected = [roc_auc_score(label == 1, score, sample_weight=w) for w in weights]
    np.testing.assert_allclose(auroc(label == 1, score, weights), expected)


@settings(deadline=None, max_examples=40)
@given(scored_cases(), st.integers(0, 1000))
def test_multiclass_metrics_equal_scikit_learn(cases, seed):
    label, _, weights = cases
    rng = np.random.default_rng(seed)
    probability = rng.dirichlet(np.ones(3), len(label))
    predicted = probability.argmax(1)
    assert macro_auroc(label, probability) == pytest.approx(roc_auc_score(label, probability, multi_class="ovr", average="macro"))
    expected = [balanced_accuracy_score(label, predicted, sample_weight=w) for w in weights]
    np.testing.assert_allclose(balanced_accuracy(label, predicted, weights), expected)
    assert balanced_accuracy(label, predicted) == pytest.approx(balanced_accuracy_score(label, predicted))


@settings(deadline=None, max_examples=40)
@given(scored_cases(), st.floats(0, 1000))
def test_r_squared_equals_scikit_learn_wherever_the_origin_is(cases, offset):
    label, score, weights = cases
    truth, predicted = label + offset, score + offset
    assert r_squared(truth, predicted) == pytest.approx(r2_score(truth, predicted))
    np.testing.assert_allclose(
        r_squared(truth, predicted, weights), [r2_score(truth, predicted, sample_weight=w) for w in weights], rtol=1e-6
    )


def test_a_resample_without_one_class_is_undefined_not_wrong():
    weights = np.array([[1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    values = auroc(np.array([False, False, True, True]), np.array([0.1, 0.2, 0.3, 0.4]), weights)
    assert np.isnan(values[0]) and values[1] == 1.0


def cohort(rng, participants=60, eyes=2, effect=1.0):
    """Binary labels per participant and scores per eye; both eyes share most of their noise, as eyes do."""
    participant = np.repeat([f"p{i:03d}" for i in range(participants)], eyes)
    label = np.repeat(np.r_[np.zeros(participants // 2, bool), np.ones(participants - participants // 2, bool)], eyes)
    score = label * effect + np.repeat(rng.normal(size=participants), eyes) + 0.1 * rng.normal(size=participants * eyes)
    return participant, label, score


def test_both_eyes_of_a_participant_do_not_count_as_two():
    participant, label, score = cohort(np.random.default_rng(0))
    metric = partial(auroc, label, score)
    honest = interval(bootstrap(metric, participant, resamples=1000))
    pretend = interval(bootstrap(metric, np.arange(len(participant)).astype(str), resamples=1000))
    assert honest[1] - honest[0] > 1.25 * (pretend[1] - pretend[0])


def test_intervals_cover_the_truth_about_95_times_in_100():
    from scipy.stats import norm

    rng = np.random.default_rng(1)
    truth = norm.cdf(1.5 / np.sqrt(2 * (1 + 0.1**2)))
    covered = 0
    for _ in range(200):
        participant, label, score = cohort(rng, participants=60, eyes=1, effect=1.5)
        low, high = interval(bootstrap(partial(auroc, label, score), participant, resamples=400))
        covered += low <= truth <= high
    assert 0.89 <= covered / 200 <= 0.99


def test_resamples_do_not_depend_on_the_order_of_rows():
    rng = np.random.default_rng(2)
    participant, label, score = cohort(rng)
    order = rng.permutation(len(label))
    a = bootstrap(partial(auroc, label, score), participant, resamples=100)
    b = bootstrap(partial(auroc, label[order], score[order]), participant[order], resamples=100)
    np.testing.assert_allclose(a.resampled, b.resampled)


def test_memory_chunks_do_not_change_the_resamples(monkeypatch):
    participant, label, score = cohort(np.random.default_rng(3))
    whole = bootstrap(partial(auroc, label, score), participant, resamples=100)
    monkeypatch.setattr("octfm.evaluation.statistics.MAX_WEIGHTS", 1000)
    chunked = bootstrap(partial(auroc, label, score), participant, resamples=100)
    np.testing.assert_allclose(whole.resampled, chunked.resampled)
    np.testing.assert_allclose(whole.leave_one_out, chunked.leave_one_out)


@pytest.mark.parametrize(("gain", "verdict"), [(1.5, "better"), (-1.5, "worse"), (0.0, "inconclusive")])
def test_the_verdict_says_whether_the_paired_interval_excludes_zero(gain, verdict):
    rng = np.random.default_rng(4)
    participant, label, score = cohort(rng, participants=120, eyes=1, effect=1.5)
    one, other = (score + shift * label + 0.2 * rng.normal(size=len(score)) for shift in (gain, 0.0))
    a, b = (bootstrap(partial(auroc, label, s), participant, resamples=500) for s in (one, other))
    result = compare(a, b)
    assert result.verdict == verdict
    assert (result.low > 0 or result.high < 0) == (verdict != "inconclusive") == (result.p < 0.05)


def test_pairing_narrows_the_interval_of_a_difference():
    rng = np.random.default_rng(5)
    participant, label, score = cohort(rng, participants=100, eyes=1)
    a = bootstrap(partial(auroc, label, score), participant, resamples=500)
    b = bootstrap(partial(auroc, label, score + 0.1 * rng.normal(size=100)), participant, resamples=500)
    unpaired = bootstrap(partial(auroc, label, score + 0.1 * rng.normal(size=100)), participant, resamples=500, seed=1)
    paired, loose = compare(a, b), compare(a, unpaired)
    assert paired.high - paired.low < 0.5 * (loose.high - loose.low)


def test_two_encoders_without_any_difference_are_called_inconclusive_most_of_the_time():
    rng = np.random.default_rng(6)
    called = 0
    for _ in range(100):
        participant, label, _ = cohort(rng, participants=60, eyes=1)
        scores = (label + rng.normal(size=60) for _ in range(2))
        a, b = (bootstrap(partial(auroc, label, s), participant, resamples=300) for s in scores)
        called += compare(a, b).verdict != "inconclusive"
    assert called <= 12
