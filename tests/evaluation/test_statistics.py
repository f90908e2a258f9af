"""Metrics equal scikit-learn's, also under resampling; intervals cover what they claim; participants, not eyes, are
resampled."""

from functools import partial
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.evaluation.delong import areas
from octfm.evaluation.linear import grade_probability, proportional_odds
from octfm.evaluation.metrics import (
    auprc,
    auroc,
    balanced_accuracy,
    brier,
    ece,
    macro_auprc,
    macro_auroc,
    macro_f1,
    mae,
    r_squared,
    weighted_kappa,
)
from octfm.evaluation.statistics import (
    Bootstrap,
    bootstrap,
    bootstrap_together,
    compare,
    enough_resamples,
    holm,
    interval,
    mean_of,
    over_seeds,
)
from support.examples import examples


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


@settings(max_examples=examples(40))
@given(scored_cases())
def test_auroc_with_ties_and_weights_equals_scikit_learn(cases):
    from sklearn.metrics import roc_auc_score

    label, score, weights = cases
    assert auroc(label == 1, score) == pytest.approx(roc_auc_score(label == 1, score))
    expected = [roc_auc_score(label == 1, score, sample_weight=w) for w in weights]
    np.testing.assert_allclose(auroc(label == 1, score, weights), expected)


@settings(max_examples=examples(40))
@given(scored_cases(), st.integers(0, 1000))
def test_multiclass_metrics_equal_scikit_learn(cases, seed):
    from sklearn.metrics import balanced_accuracy_score, roc_auc_score

    label, _, weights = cases
    rng = np.random.default_rng(seed)
    probability = rng.dirichlet(np.ones(3), len(label))
    predicted = probability.argmax(1)
    assert macro_auroc(label, probability) == pytest.approx(
        roc_auc_score(label, probability, multi_class="ovr", average="macro")
    )
    expected = [balanced_accuracy_score(label, predicted, sample_weight=w) for w in weights]
    np.testing.assert_allclose(balanced_accuracy(label, predicted, weights), expected)
    assert balanced_accuracy(label, predicted) == pytest.approx(balanced_accuracy_score(label, predicted))


@settings(max_examples=40)
@given(scored_cases(), st.floats(0, 1000))
def test_r_squared_equals_scikit_learn_wherever_the_origin_is(cases, offset):
    from sklearn.metrics import r2_score

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
    grade = np.array([0, 0, 2, 2])
    kappa = weighted_kappa(grade, grade, weights)
    assert np.isnan(kappa[0]) and kappa[1] == 1.0, "one grade throughout is no agreement beyond chance"


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
    monkeypatch.setattr("octfm.evaluation.statistics.KEPT_DRAWS", 0)
    chunked = bootstrap(partial(auroc, label, score), participant, resamples=100)
    np.testing.assert_allclose(whole.resampled, chunked.resampled)
    np.testing.assert_allclose(whole.leave_one_out, chunked.leave_one_out)


def test_work_for_an_interval_does_not_grow_with_the_square_of_participants(monkeypatch):
    """Left out in groups, participants give nearly the bounds that they give one by one."""
    x = np.random.default_rng(10).lognormal(size=600)
    who, rows = np.array([f"p{i:03d}" for i in range(600)]), []

    def mean(W):
        rows.append(len(W))
        return W @ x / W.sum(1)

    one_by_one = interval(bootstrap(mean, who, resamples=4000))
    assert sum(rows) == 4000 + 600 + 1
    rows.clear()
    monkeypatch.setattr("octfm.evaluation.statistics.MOST_LEFT_OUT", 100)
    in_groups = bootstrap(mean, who, resamples=4000)
    assert sum(rows) == 4000 + 100 + 1
    percentile = interval(in_groups, method="percentile")
    np.testing.assert_allclose(interval(in_groups), one_by_one, atol=0.3 * abs(one_by_one[1] - percentile[1]))


@pytest.mark.parametrize(("gain", "verdict"), [(1.5, "better"), (-1.5, "worse"), (0.0, "inconclusive")])
def test_the_verdict_says_whether_the_paired_interval_excludes_zero(gain, verdict):
    rng = np.random.default_rng(4)
    participant, label, score = cohort(rng, participants=120, eyes=1, effect=1.5)
    one, other = (score + shift * label + 0.2 * rng.normal(size=len(score)) for shift in (gain, 0.0))
    a, b = (bootstrap(partial(auroc, label, s), participant, resamples=500) for s in (one, other))
    result = compare(a, b)
    assert result.verdict == verdict
    assert (result.low > 0 or result.high < 0) == (verdict != "inconclusive") == (result.p < 0.05)


def test_an_interval_excludes_0_from_the_first_resample_on_that_makes_p_small_enough():
    for resamples in (39, 40, 99, 159, 400):
        for wrong in range(12):
            values = np.random.default_rng(wrong).permutation(np.arange(resamples) - wrong + 0.5)
            found = compare(Bootstrap(1.0, values, np.zeros(0)), Bootstrap(0.0, np.zeros(resamples), np.zeros(0)))
            assert found.p == pytest.approx(2 * (1 + wrong) / (1 + resamples))
            assert (found.low > 0) == (found.verdict == "better") == (found.p <= 0.05)


@settings(max_examples=examples(100))
@given(st.integers(1, 400), st.floats(-3, 3), st.integers(0, 2**31), st.sampled_from([0.0, 0.1, 0.9]), st.booleans())
def test_interval_p_and_verdict_never_contradict_each_other(resamples, shift, seed, undefined, rounded):
    """However few resamples there are or remain defined, and with many differences of exactly 0."""
    rng = np.random.default_rng(seed)
    values = rng.normal(shift, 1, resamples)
    values = np.round(values) if rounded else values
    values[rng.random(resamples) < undefined] = np.nan
    nothing = Bootstrap(0.0, np.zeros(resamples), np.zeros(0))
    found = compare(Bootstrap(shift, values, np.zeros(0)), nothing)
    excludes = found.low > 0 or found.high < 0
    assert excludes == (found.verdict != "inconclusive") == (found.p <= 0.05)


@pytest.mark.parametrize(
    ("values", "low", "p"),
    [
        (np.ones(38), np.nan, 2 / 39),
        (np.ones(39), 1.0, 0.05),
        (np.ones(99), 1.0, 0.02),
        (np.zeros(99), 0.0, 1.0),
        (np.full(99, np.nan), np.nan, 1.0),
    ],
)
def test_p_counts_the_estimate_as_one_resample_and_is_at_most_1(values, low, p):
    found = compare(Bootstrap(1.0, values, np.zeros(0)), Bootstrap(0.0, np.zeros(len(values)), np.zeros(0)))
    assert found.p == p and found.low == pytest.approx(low, nan_ok=True)


def test_groups_that_share_people_share_their_draws_and_everybody_is_left_out_once():
    groups = np.repeat(["a", "b", "c", "d"], [1, 2, 1, 3]), np.array(["c", "d", "d"])
    drawn = [lambda weights, own=own: weights[:, own == "d"][:, 0] for own in groups]
    one, two = bootstrap_together([*zip(drawn, groups, strict=True)], resamples=60)
    np.testing.assert_array_equal(one.resampled, two.resampled)
    alone = bootstrap(drawn[0], groups[0], resamples=60)
    assert sorted(alone.leave_one_out.tolist()) == [0, 1, 1, 1], "of four people, who have seven cases"


def test_the_mean_of_metrics_is_taken_resample_by_resample():
    a = Bootstrap(0.2, np.array([0.1, 0.2, 0.3]), np.array([0.2, 0.4]))
    b = Bootstrap(0.4, np.array([0.3, np.nan, 0.5]), np.array([0.4, 0.8]))
    found = mean_of([a, b])
    assert found.estimate == pytest.approx(0.3)
    np.testing.assert_allclose(found.resampled, [0.2, np.nan, 0.4])
    np.testing.assert_allclose(found.leave_one_out, [0.3, 0.6])
    np.testing.assert_array_equal(over_seeds([a, b]).leave_one_out, found.leave_one_out)


def test_pairing_narrows_the_interval_of_a_difference():
    rng = np.random.default_rng(5)
    participant, label, score = cohort(rng, participants=100, eyes=1)
    a = bootstrap(partial(auroc, label, score), participant, resamples=500)
    b = bootstrap(partial(auroc, label, score + 0.1 * rng.normal(size=100)), participant, resamples=500)
    unpaired = bootstrap(partial(auroc, label, score + 0.1 * rng.normal(size=100)), participant, resamples=500, seed=1)
    paired, loose = compare(a, b), compare(a, unpaired)
    assert paired.high - paired.low < 0.5 * (loose.high - loose.low)


def test_equal_encoders_are_called_inconclusive_most_of_the_time():
    rng = np.random.default_rng(6)
    called = 0
    for _ in range(100):
        participant, label, _ = cohort(rng, participants=60, eyes=1)
        scores = (label + rng.normal(size=60) for _ in range(2))
        a, b = (bootstrap(partial(auroc, label, s), participant, resamples=300) for s in scores)
        called += compare(a, b).verdict != "inconclusive"
    assert called <= 12


@settings(max_examples=examples(20))
@given(scored_cases(), st.integers(0, 1000))
def test_average_precision_f1_and_kappa_equal_scikit_learn(cases, seed):
    from sklearn.metrics import average_precision_score, cohen_kappa_score, f1_score

    label, score, weights = cases
    rng = np.random.default_rng(seed)
    assert auprc(label == 1, score) == pytest.approx(average_precision_score(label == 1, score))
    expected = [average_precision_score(label == 1, score, sample_weight=w) for w in weights]
    np.testing.assert_allclose(auprc(label == 1, score, weights), expected, atol=1e-9)
    probability = rng.dirichlet(np.ones(3), len(label))
    one_hot = np.eye(3, dtype=int)[label]
    assert macro_auprc(label, probability) == pytest.approx(
        average_precision_score(one_hot, probability, average="macro")
    )
    predicted = rng.integers(0, 3, len(label))
    assert macro_f1(label, predicted) == pytest.approx(f1_score(label, predicted, average="macro"))
    expected = [f1_score(label, predicted, average="macro", sample_weight=w) for w in weights]
    np.testing.assert_allclose(macro_f1(label, predicted, weights), expected, atol=1e-9)
    assert weighted_kappa(label, predicted) == pytest.approx(cohen_kappa_score(label, predicted, weights="quadratic"))
    expected = [cohen_kappa_score(label, predicted, weights="quadratic", sample_weight=w) for w in weights]
    np.testing.assert_allclose(weighted_kappa(label, predicted, weights), expected, atol=1e-9)


@settings(max_examples=40)
@given(scored_cases(), st.integers(0, 1000))
def test_brier_calibration_error_and_mae_equal_their_references(cases, seed):
    from sklearn.metrics import brier_score_loss, mean_absolute_error

    label, score, weights = cases
    probability = np.random.default_rng(seed).dirichlet(np.ones(3), len(label))
    wrong = ((probability - np.eye(3)[label]) ** 2).sum(1)
    np.testing.assert_allclose(brier(label, probability, weights), [np.average(wrong, weights=w) for w in weights])
    two = probability[:, :2] / probability[:, :2].sum(1, keepdims=True)
    assert brier((label == 1).astype(int), two) == pytest.approx(2 * brier_score_loss(label == 1, two[:, 1]))
    np.testing.assert_allclose(
        mae(label, score, weights), [mean_absolute_error(label, score, sample_weight=w) for w in weights]
    )
    confidence, right = probability.max(1), probability.argmax(1) == label
    gaps = []
    for low in np.arange(10) / 10:
        inside = (confidence > low + 1e-12) & (confidence <= low + 0.1 + 1e-12)
        gaps.append(inside.mean() * abs(confidence[inside].mean() - right[inside].mean()) if inside.any() else 0)
    assert ece(label, probability) == pytest.approx(sum(gaps))


# DeLong, DeLong & Clarke-Pearson's 43 patients with complete records, as printed in SAS/STAT's manual (PROC LOGISTIC,
# "Comparing Receiver
# Operating Characteristic Curves"): albumin, total protein, K-G score, whether surgery failed.
OVARIAN = """
3.0 5.8 10 0 3.2 6.3 5 1 3.9 6.8 3 1 2.8 4.8 6 0 3.2 5.8 3 1 0.9 4.0 5 0 2.5 5.7 8 0 1.6 5.6 5 1 3.8 5.7 5 1 3.7 6.7 6 1 3.2 5.4 4 1
3.8 6.6 6 1 4.1 6.6 5 1 3.6 5.7 5 1 4.3 7.0 4 1 3.6 6.7 4 0 2.3 4.4 6 1 4.2 7.6 4 0 4.0 6.6 6 0 3.5 5.8 6 1 3.8 6.8 7 1 3.0 4.7 8 0
4.5 7.4 5 1 3.7 7.4 5 1 3.1 6.6 6 1 4.1 8.2 6 1 4.3 7.0 5 1 4.3 6.5 4 1 3.2 5.1 5 1 2.6 4.7 6 1 3.3 6.8 6 0 1.7 4.0 7 0 3.7 6.1 5 1
3.3 6.3 7 1 4.2 7.7 6 1 3.5 6.2 5 1 2.9 5.7 9 0 2.1 4.8 7 1 2.8 6.2 8 0 4.0 7.0 7 1 3.3 5.7 6 1 3.7 6.9 5 1 3.6 6.6 5 1
"""


def test_delong_equals_the_published_example():
    table = np.array(OVARIAN.split(), float).reshape(-1, 4)
    found = areas(table[:, 3] == 0, np.c_[10 - table[:, 0], 10 - table[:, 1], table[:, 2]])
    np.testing.assert_allclose(found.area, [0.7366, 0.6478, 0.7258], atol=5e-5)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), [0.0927, 0.1000, 0.1028], atol=5e-5)
    contrast = np.array([[1, 0, -1], [0, 1, -1]])
    difference = contrast @ found.area
    chi_square = difference @ np.linalg.solve(contrast @ found.covariance @ contrast.T, difference)
    assert chi_square == pytest.approx(2.5340, abs=5e-5)
    assert found.p(1, 2) == pytest.approx(0.4561, abs=5e-5)
    assert not found.clustered


def test_clustered_variance_is_delongs_if_no_participant_has_two_eyes():
    """Obuchowski 1997, equations 2 to 6, written out case by case."""
    participant, label, score = cohort(np.random.default_rng(7), participants=24)
    label = label ^ (np.random.default_rng(8).random(len(label)) < 0.3)
    found = areas(label, score, participant)
    wins = (score[:, None] > score[None, :]) + 0.5 * (score[:, None] == score[None, :])
    m, n, area = label.sum(), (~label).sum(), wins[np.ix_(label, ~label)].mean()
    v10, v01 = wins[:, ~label].mean(1), wins[label].mean(0)
    names = np.unique(participant)
    x = np.array([(v10[(participant == p) & label] - area).sum() for p in names])
    y = np.array([(v01[(participant == p) & ~label] - area).sum() for p in names])
    i10, i01 = (sum(((participant == p) & side).any() for p in names) for side in (label, ~label))
    s10, s01 = i10 / ((i10 - 1) * m) * (x**2).sum(), i01 / ((i01 - 1) * n) * (y**2).sum()
    s11 = len(names) / (len(names) - 1) * (x * y).sum()
    assert found.clustered and found.area[0] == pytest.approx(area)
    assert found.covariance[0, 0] == pytest.approx(s10 / m + s01 / n + 2 * s11 / (m * n))
    alone = areas(label, score, np.arange(len(label)))
    assert alone.covariance[0, 0] == pytest.approx(v10[label].var(ddof=1) / m + v01[~label].var(ddof=1) / n)


@pytest.mark.parametrize("rare", [0, 1])
def test_the_formula_needs_two_cases_and_two_participants_of_either_class(rare):
    score = np.arange(7.0)
    for count, message in ((1, "expected two cases or more of either class, got"), (2, None)):
        label = (np.arange(7) < count) == rare
        if message:
            with pytest.raises(ValueError, match=message):
                areas(label, score)
        else:
            assert np.isfinite(areas(label, score).covariance).all()
            assert areas(label, score, np.array([0, 1, 0, 1, 2, 3, 4])).clustered
            with pytest.raises(ValueError, match="all cases of one class belong to one cluster"):
                areas(label, score, np.array([0, 0, 0, 1, 2, 3, 4]))


def test_bootstrap_agrees_with_the_formula_where_both_hold():
    participant, label, score = cohort(np.random.default_rng(9), participants=200)
    boot = bootstrap(partial(auroc, label, score), participant, resamples=2000)
    found = areas(label, score, participant)
    assert boot.resampled.std() == pytest.approx(np.sqrt(found.covariance[0, 0]), rel=0.1)
    np.testing.assert_allclose(interval(boot), found.interval(), atol=0.02)


def test_bca_and_percentile_equal_scipys_on_a_skewed_mean():
    from scipy.stats import bootstrap as scipy_bootstrap

    x = np.random.default_rng(10).lognormal(size=40)
    boot = bootstrap(lambda W: W @ x / W.sum(1), np.arange(40).astype(str), resamples=20_000)
    for ours, theirs in (("bca", "BCa"), ("percentile", "percentile")):
        reference = scipy_bootstrap((x,), np.mean, n_resamples=20_000, method=theirs, rng=1).confidence_interval
        np.testing.assert_allclose(interval(boot, method=ours), reference, rtol=0.02)


@pytest.mark.parametrize("jackknife", [[0.4, 0.5, 0.6], [0.5, 0.5, 0.5]])
def test_bca_neither_corrects_a_metric_of_few_values_nor_fails_where_nobody_changes_it(jackknife):
    """Half the resamples equal the estimate, as many are above it as below: there is no bias."""
    boot = Bootstrap(0.5, np.repeat([0.0, 0.5, 1.0], (250, 500, 250)), np.array(jackknife))
    assert interval(boot) == interval(boot, method="percentile") == (0.0, 1.0)


def test_holm_is_the_closed_test_of_bonferroni():
    """A hypothesis is rejected if Bonferroni rejects every set that it is in."""
    for seed in range(12):
        p = np.random.default_rng(seed).random(seed % 7 + 1) ** 3
        sets = [[*some] for size in range(1, len(p) + 1) for some in combinations(range(len(p)), size)]
        closed = [max(min(1, len(some) * p[some].min()) for some in sets if n in some) for n in range(len(p))]
        np.testing.assert_allclose(holm(p.tolist()), closed)
    assert holm([]) == []


@given(st.integers(1, 400))
def test_the_smallest_p_survives_holm_among_up_to_400_comparisons(comparisons):
    smallest = 2 / (enough_resamples(comparisons, 2000) + 1)
    assert holm([smallest] * comparisons)[0] <= 0.05
    assert enough_resamples(1, 2000) == 2000 and enough_resamples(10**6, 2000) == 20_000


def test_proportional_odds_equal_statsmodels():
    from statsmodels.miscmodels.ordinal_model import OrderedModel

    rng = np.random.default_rng(11)
    x = rng.normal(size=(400, 3))
    grade = np.digitize(x @ [1.0, -0.5, 0.0] + rng.logistic(size=400), [-1, 0.3, 2])
    direction, thresholds = proportional_odds(x, grade, 4, c=1e6)
    reference = OrderedModel(grade, x, distr="logit").fit(method="bfgs", disp=False)
    np.testing.assert_allclose(direction, reference.params[:3], atol=2e-3)
    np.testing.assert_allclose(
        thresholds, reference.model.transform_threshold_params(reference.params)[1:-1], atol=5e-3
    )
    np.testing.assert_allclose(grade_probability(x, direction, thresholds), reference.predict(x), atol=2e-3)


def seeded_scores(rng, seeds=3):
    """Labels, and scores of several trainings of one recipe, each better or worse by its own draw of training."""
    label = np.arange(80) % 2 == 1
    shared = rng.normal(size=80)
    return label, [label * (1.2 + 0.6 * rng.normal()) + shared for _ in range(seeds)]


def test_a_row_of_weight_two_counts_as_two_rows():
    rng = np.random.default_rng(2)
    x, grade, weight = rng.normal(size=(60, 4)), np.arange(60) % 4, rng.integers(1, 5, 60)
    x[:, 0] += grade
    weighted = proportional_odds(x, grade, 4, 0.5, weight.astype(float))
    repeated = proportional_odds(np.repeat(x, weight, axis=0), np.repeat(grade, weight), 4, 0.5)
    for found, expected in zip(weighted, repeated, strict=True):
        np.testing.assert_allclose(found, expected, atol=2e-3)


def test_seeds_and_participants_are_resampled_together():
    label, scores = seeded_scores(np.random.default_rng(12))
    names = np.arange(len(label)).astype(str)
    single = [bootstrap(partial(auroc, label, s), names, resamples=1000) for s in scores]
    both = over_seeds(single)
    assert both.estimate == pytest.approx(np.mean([b.estimate for b in single]))
    assert both.resampled.std() > np.mean([b.resampled for b in single], axis=0).std()
    np.testing.assert_array_equal(over_seeds(single[:1]).resampled, single[0].resampled)
    # Identical trainings add nothing, and pairing over seeds takes a shared effect of the seed out of a difference.
    np.testing.assert_allclose(over_seeds(single[:1] * 3).resampled, single[0].resampled)
    gap = compare(over_seeds(single), over_seeds(single))
    assert gap.low == gap.high == 0
    # One of two seeds is drawn, whose variance is that of the mean of two of many.
    two = [Bootstrap(value, np.full(400, value), np.zeros(0)) for value in (1.0, 3.0)]
    drawn, other = (over_seeds(two, seed=seed).resampled for seed in (0, 1))
    assert {*drawn} == {1.0, 3.0} and drawn.mean() == pytest.approx(2, abs=0.2) and (drawn != other).any()


@pytest.mark.slow
def test_intervals_over_seeds_cover_the_recipes_mean():
    """Drawing S − 1 of S seeds: the plain bootstrap (S of S) covers less with three seeds."""
    from scipy.stats import norm

    effects = np.random.default_rng(13).normal(size=200_000)
    truth = norm.cdf((1.2 + 0.6 * effects) / np.sqrt(2)).mean()
    rng, covered = np.random.default_rng(14), 0
    for _ in range(400):
        label, scores = seeded_scores(rng, seeds=5)
        names = np.arange(len(label)).astype(str)
        low, high = interval(
            over_seeds([bootstrap(partial(auroc, label, s), names, resamples=400) for s in scores]), method="percentile"
        )
        covered += low <= truth <= high
    assert 0.88 <= covered / 400 <= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["auprc", "balanced_accuracy", "macro_f1", "kappa", "r2"])
def test_every_interval_covers_its_truth_about_95_times_in_100(metric):
    """Truth is the metric on 200,000 participants of the same making; both eyes of a participant share their noise."""
    rng = np.random.default_rng(15)

    def draw(participants):
        label = rng.integers(0, 3, participants).repeat(2)
        score = label + 0.9 * rng.normal(size=participants).repeat(2) + 0.3 * rng.normal(size=2 * participants)
        predicted = np.clip(np.rint(score), 0, 2).astype(int)
        made = {
            "auprc": partial(auprc, label == 2, score),
            "balanced_accuracy": partial(balanced_accuracy, label, predicted),
            "macro_f1": partial(macro_f1, label, predicted),
            "kappa": partial(weighted_kappa, label, predicted),
            "r2": partial(r_squared, label.astype(float), score),
        }[metric]
        return made, np.arange(participants).repeat(2).astype(str)

    truth = draw(200_000)[0](np.ones((1, 400_000)))[0]
    covered = 0
    for _ in range(400):
        made, names = draw(100)
        low, high = interval(bootstrap(made, names, resamples=400))
        covered += low <= truth <= high
    assert 0.91 <= covered / 400 <= 0.98


@pytest.mark.slow
def test_delong_and_obuchowski_cover_and_ignoring_clusters_does_not():
    from scipy.stats import norm

    rng, truth = np.random.default_rng(3), norm.cdf(1.0 / np.sqrt(2 * 1.01))
    covered = {"clustered": 0, "as if independent": 0}
    for _ in range(1500):
        participant, label, score = cohort(rng, participants=80, eyes=2)
        for name, cluster in (("clustered", participant), ("as if independent", None)):
            low, high = areas(label, score, cluster).interval()
            covered[name] += low <= truth <= high
    assert 0.925 <= covered["clustered"] / 1500 <= 0.97
    assert covered["as if independent"] / 1500 < 0.88
