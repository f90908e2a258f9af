"""ICC and limits of agreement are those of the papers, under case weights too, and their bootstrap covers what it
says."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octfm.errors import EvaluationError
from octfm.evaluation import agreement
from octfm.evaluation.statistics import bootstrap, bootstrap_together, compare, interval

# Shrout & Fleiss, Psychological Bulletin 1979, table 2: six targets, four judges; the coefficients are those of their
# table 4.
JUDGES = np.array([[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9], [6, 2, 4, 7]], float)
PUBLISHED = {"ICC(1,1)": 0.17, "ICC(2,1)": 0.29, "ICC(3,1)": 0.71}
# Bland & Altman, Lancet 1986: first readings of peak flow in l/min by a Wright meter and a mini meter.
WRIGHT = np.array([494, 395, 516, 434, 476, 557, 413, 442, 650, 433, 417, 656, 267, 478, 178, 423, 427], float)
MINI = np.array([512, 430, 520, 428, 500, 600, 364, 380, 658, 445, 432, 626, 260, 477, 259, 350, 451], float)


@pytest.mark.parametrize("form", PUBLISHED)
def test_icc_is_the_published_one_and_has_a_name(form):
    assert agreement.icc(JUDGES, form)[0] == pytest.approx(PUBLISHED[form], abs=0.005)
    assert agreement.MEANING[form]


def test_bland_and_altman_find_their_own_bias_and_spread():
    apart = WRIGHT - MINI
    assert agreement.bias(apart)[0] == pytest.approx(-2.1, abs=0.05)
    assert agreement.spread(apart)[0] == pytest.approx(38.8, abs=0.05)
    found = agreement.limits(apart, np.arange(len(apart)), None)
    assert found["upper"]["estimate"] - found["lower"]["estimate"] == pytest.approx(2 * 1.96 * 38.765, abs=0.01)


@pytest.mark.parametrize("between", [0.8, 0])
@pytest.mark.parametrize("sizes", [[2] * 12, [6] * 12, [20] + [1] * 20, [1] * 15 + [2] * 2, [1] * 15], ids=str)
def test_the_spread_of_a_new_measurement_is_right_however_often_subjects_were_measured(sizes, between):
    """Variance 1; where .8 of it is between subjects, the sample variance is up to a fifth too small on average."""
    rng = np.random.default_rng(0)
    subject = np.repeat(np.arange(len(sizes)), sizes)
    draws = rng.normal(0, between**0.5, (1500, len(sizes)))[:, subject]
    draws += rng.normal(0, (1 - between) ** 0.5, (1500, len(subject)))
    found = [agreement.spread(draw, None, subject)[0] ** 2 for draw in draws]
    assert np.mean(found) == pytest.approx(1, abs=0.04)
    if max(sizes) == 1:
        np.testing.assert_allclose(found, draws.var(axis=1, ddof=1))


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
def test_intervals_of_a_limit_cover_it_with_few_participants(heavy):
    """Both eyes of 20 participants; nominal 95 %, where BCa intervals cover 80 to 87 %."""
    covered, person = 0, np.repeat(np.arange(20), 2)
    for seed in range(150):
        rng = np.random.default_rng(seed)
        own = rng.standard_t(5, 20) * 0.6**0.5 if heavy else rng.normal(size=20)
        apart = own[person] * 0.8**0.5 + rng.normal(size=40) * 0.2**0.5
        upper = agreement.limits(apart, person, lambda m, s=seed: bootstrap(m, person, resamples=300, seed=s))["upper"]
        assert upper["low"] < upper["estimate"] < upper["high"]
        covered += upper["low"] <= agreement.LIMITS <= upper["high"]
    assert covered >= 0.89 * 150, covered


def test_intervals_of_bias_and_limits_move_with_the_unit_and_the_origin():
    rng, person = np.random.default_rng(1), np.repeat(np.arange(15), [1, 2, 3] * 5)
    apart = rng.normal(size=15)[person] + 0.3 * rng.normal(size=30)

    def found(values):
        return agreement.limits(values, person, lambda m: bootstrap(m, person, resamples=200))

    one, other = found(apart), found(1e6 - 7 * apart)
    for name, mirrored in (("bias", "bias"), ("lower", "upper"), ("upper", "lower")):
        expected = [1e6 - 7 * one[name][end] for end in ("estimate", "high", "low")]
        assert [other[mirrored][end] for end in ("estimate", "low", "high")] == pytest.approx(expected)
    assert agreement.limits(apart, person, None)["bias"]["low"] is None


@pytest.mark.parametrize("name", ["lower", "bias", "upper", "slope"])
def test_a_standard_error_is_that_of_what_every_subject_moves(name):
    """The infinitesimal jackknife (Efron 1982): by how much the value changes with each subject's weight."""
    rng, count = np.random.default_rng(3), 300
    level = rng.normal(size=count)
    apart = 0.3 * level + (1 + 0.5 * (level > 0)) * rng.standard_t(8, count)
    if name == "slope":
        measure = partial(agreement._slope_and_error, apart, level, np.arange(count))
    else:
        side = {"lower": -1, "bias": 0, "upper": 1}[name]
        measure = partial(agreement._limit_and_error, apart, np.arange(count), side)
    values, errors = measure(1 + 1e-4 * np.vstack([np.zeros(count), np.eye(count)]))
    moved = (values[1:] - values[0]) / 1e-4
    assert errors[0] == pytest.approx(np.sqrt(count / (count - 1) * (moved**2).sum()), rel=0.006)


@pytest.mark.parametrize("name", ["bias", "slope"])
def test_a_standard_error_of_several_visits_is_that_of_what_every_subject_moves(name):
    rng = np.random.default_rng(4)
    subject = np.repeat(np.arange(80), rng.integers(1, 5, 80))
    level = rng.normal(size=len(subject))
    apart = 0.3 * level + rng.normal(size=80)[subject] + rng.normal(size=len(subject))
    of = partial(agreement._slope_and_error, apart, level) if name == "slope" else partial(agreement._limit_and_error, apart)  # fmt: skip
    measure = partial(of, subject) if name == "slope" else partial(of, subject, 0)
    values, errors = measure(1 + 1e-4 * np.vstack([np.zeros(80), np.eye(80)])[:, subject])
    moved = (values[1:] - values[0]) / 1e-4
    assert errors[0] == pytest.approx(np.sqrt(80 / 79 * (moved**2).sum()), rel=0.003)
    found = agreement.limits(apart, subject, None)
    for side in (-1, 1):
        limit = found["upper" if side > 0 else "lower"]["estimate"]
        assert limit - found["bias"]["estimate"] == pytest.approx(
            side * 1.96 * agreement.spread(apart, None, subject)[0]
        )
    assert abs(found["sd"] / apart.std(ddof=1) - 1) > 0.001


def test_a_difference_or_a_slope_downwards_is_as_certain_as_one_upwards():
    rng, person = np.random.default_rng(2), np.repeat(np.arange(20), 2)
    level, boot = rng.normal(size=40), lambda m: bootstrap(m, person, resamples=200)
    apart = 0.5 * level + rng.normal(0.5, 0.4, 40)
    for found in (
        lambda side: agreement.limits(side * apart, person, boot)["bias"],
        lambda side: agreement.slope(side * apart, level, person, boot),
    ):
        up, down = found(1), found(-1)
        assert up["low"] > 0 > down["high"] and up["p"] == down["p"] < 0.05


@pytest.mark.parametrize(("bias", "p"), [(0.0, 1.0), (100.0, 1 / 201), (-100.0, 1 / 201)])
def test_p_of_a_bias_counts_the_estimate_as_one_resample(bias, p):
    person, apart = np.arange(40), np.random.default_rng(3).normal(size=40)
    apart += bias - apart.mean()
    assert agreement.limits(apart, person, lambda m: bootstrap(m, person, resamples=200))["bias"]["p"] == p


def test_the_spread_of_one_subject_is_not_known():
    assert np.isnan(agreement.spread(np.array([1.0, 2.0, 4.0]), None, np.zeros(3))[0])


def test_a_subject_that_counts_twice_is_two_subjects():
    twice = np.array([2, 1, 0, 3, 1, 1])
    repeated = np.repeat(JUDGES, twice, axis=0)
    for form in PUBLISHED:
        assert agreement.icc(JUDGES, form, twice[None].astype(float))[0] == pytest.approx(
            agreement.icc(repeated, form)[0]
        )
    subject, values = np.repeat(np.arange(6), 4), JUDGES.ravel()
    rows = np.concatenate([np.full(4, i) for i in range(6)])
    counted = agreement.icc_one_way(subject, values, twice[rows][None].astype(float))[0]
    assert counted == pytest.approx(agreement.icc_one_way(np.repeat(np.arange(len(repeated)), 4), repeated.ravel())[0])
    rng, by_subject = np.random.default_rng(0), np.repeat(np.arange(6), 4)
    differences = rng.normal(size=24)
    copy = np.concatenate([np.full(4, i) for i in range(twice.sum())])
    assert agreement.spread(differences, twice[by_subject][None].astype(float), by_subject)[0] == pytest.approx(
        agreement.spread(
            np.concatenate([np.tile(differences[4 * i : 4 * i + 4], n) for i, n in enumerate(twice)]), None, copy
        )[0]
    )
    apart = WRIGHT - MINI
    weights = np.random.default_rng(0).integers(0, 3, len(apart))
    assert agreement.spread(apart, weights[None].astype(float))[0] == pytest.approx(
        np.std(np.repeat(apart, weights), ddof=1)
    )


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 3), min_size=4, max_size=9).filter(lambda n: sum(map(bool, n)) > 2),
)
def test_a_bias_a_limit_and_a_slope_of_a_resample_are_those_of_its_subjects_written_out(seed, times):
    """With their standard errors, from which the intervals come. A resample need not have the mean of the cohort."""
    rng = np.random.default_rng(seed)
    subject = np.repeat(np.arange(len(times)), rng.integers(1, 4, len(times)))
    apart, level = 5 + 3 * rng.normal(size=(2, len(subject)))
    weights = np.array(times, float)[subject][None]
    drawn = [np.flatnonzero(subject == who) for who, n in enumerate(times) for _ in range(n)]
    rows, copy = np.concatenate(drawn), np.repeat(np.arange(len(drawn)), [len(own) for own in drawn])
    each = [partial(agreement._limit_and_error, apart), partial(agreement._limit_and_error, apart[rows])]
    for side in (-1, 0, 1):
        found, expected = each[0](subject, side, weights), each[1](copy, side, np.ones((1, len(rows))))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    found = agreement._slope_and_error(apart, level, subject, weights)
    np.testing.assert_allclose(
        found, agreement._slope_and_error(apart[rows], level[rows], copy, np.ones((1, len(rows)))), rtol=1e-6
    )
    assert found[0][0] == pytest.approx(np.polyfit(level[rows], apart[rows], 1)[0])


def test_incomplete_one_way_icc_equals_the_complete_one_without_gaps():
    assert agreement.icc_one_way(np.repeat(np.arange(6), 4), JUDGES.ravel())[0] == pytest.approx(
        agreement.icc(JUDGES, "ICC(1,1)")[0]
    )
    rng = np.random.default_rng(1)
    subject = np.repeat(np.arange(4000), rng.integers(2, 5, 4000))
    values = rng.normal(0, 3**0.5, 4000)[subject] + rng.normal(size=len(subject))
    assert agreement.icc_one_way(subject, values)[0] == pytest.approx(0.75, abs=0.02)


def test_scanner_offset_lowers_agreement_but_not_consistency():
    rng = np.random.default_rng(0)
    eye = rng.normal(size=200)
    both = np.stack([eye + 0.1 * rng.normal(size=200), eye + 2 + 0.1 * rng.normal(size=200)], axis=1)
    assert agreement.icc(both, "ICC(3,1)")[0] > 0.98 and agreement.icc(both, "ICC(2,1)")[0] < 0.4
    assert np.isnan(agreement.icc(np.ones((5, 2)), "ICC(2,1)")[0]), "nothing differs"
    with pytest.raises(EvaluationError, match="finite values"):
        agreement.icc(np.array([[1.0, np.nan], [2.0, 3.0]]), "ICC(2,1)")


def test_groups_are_compared_on_the_same_resamples_of_participants():
    rng = np.random.default_rng(0)
    person = np.repeat(np.arange(40), 2)
    value = np.repeat(rng.normal(size=40), 2) + np.tile([0.0, 0.3], 40) + 0.05 * rng.normal(size=80)
    right, left = np.arange(80) % 2 == 0, np.arange(80) % 2 == 1

    def mean_of(rows):
        return lambda W: W @ value[rows] / W.sum(1)

    paired = bootstrap_together([(mean_of(right), person[right]), (mean_of(left), person[left])], resamples=500)
    assert compare(*paired).verdict == "worse"
    assert paired[0].estimate == pytest.approx(value[right].mean())
    # As if they were other people's eyes, the spread between people hides it.
    apart = bootstrap_together([(mean_of(right), person[right]), (mean_of(left), person[left] + 1000)], resamples=500)
    assert compare(*apart).verdict == "inconclusive"


@pytest.mark.slow
def test_the_bootstrap_of_icc_covers_the_truth():
    """Both eyes of 60 participants on two scanners, true ICC(2,1) 0.6; 200 simulated cohorts, nominal 95 %."""
    covered = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        person = np.repeat(np.arange(60), 2)
        eye = (rng.normal(size=60)[person] + rng.normal(size=120)) * (0.6 / 2) ** 0.5
        both = eye[:, None] + rng.normal(size=(120, 2)) * 0.4**0.5
        boot = bootstrap(lambda W, x=both: agreement.icc(x, "ICC(2,1)", W), person, resamples=800, seed=seed)
        low, high = interval(boot)
        covered += low <= 0.6 <= high
    assert covered >= 0.90 * 200, covered
