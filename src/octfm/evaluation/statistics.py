"""Bootstrap intervals and comparisons over participants, because a participant's eyes and scans are not independent."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Metric = Callable[[np.ndarray], np.ndarray]
"""A function from case weights [R, n] to the metric on each of R resamples, [R]."""

Verdict = Literal["better", "worse", "inconclusive"]
Method = Literal["bca", "percentile"]

MIN_PARTICIPANTS = 10
"""Minimum participants per class. With fewer, an interval would look exact but be unreliable, so none is given."""

TAILS = (1 - 0.95) / 2, (1 + 0.95) / 2
"""Quantiles at the ends of a 95 % interval."""
MAX_WEIGHTS = 1 << 16
"""Resamples × cases at once: half a megabyte of float64, which stays in a core's cache."""
MOST_RESAMPLES = 20_000
MOST_LEFT_OUT = 2000
"""Parts in which participants are left out for the acceleration of BCa. Leaving out 50,000 one by one takes eight
minutes for every metric of every encoder. Parts of g participants give the same acceleration: their deviations are 1 /
√g as skewed, and there are g times fewer of them."""
KEPT_DRAWS = 4_000_000
"""Resamples × participants up to which draws are kept for the next metric (16 MB); drawing takes as long as computing
a metric."""


@dataclass(frozen=True, eq=False)
class Bootstrap:
    """One metric on the resamples shared by all encoders."""

    estimate: float
    resampled: np.ndarray
    """[R]; NaN if a resample lacks a class."""
    leave_one_out: np.ndarray
    """[at most MOST_LEFT_OUT] the metric without each participant, or each part of them, for the acceleration of
    BCa."""


@dataclass(frozen=True)
class Comparison:
    """A paired difference a − b with its 95 % interval (NaN without one), p value and verdict."""

    difference: float
    low: float
    high: float
    p: float
    verdict: Verdict


def bootstrap(
    metric: Metric, participants: np.ndarray, *, resamples: int = 2000, seed: int = 0, among: np.ndarray | None = None
) -> Bootstrap:
    """Resample participants with replacement, each with all their cases. `participants` [n]: id of each case.

    Resamples depend only on the seed and the set of participants, so two metrics or encoders are compared on the same
    ones. `among`: ids to draw from, if that is a larger set than `participants`.
    """
    names = np.unique(participants if among is None else among)
    member = np.searchsorted(names, participants)
    step = max(1, MAX_WEIGHTS // len(member))
    drawn = _draws(len(names), resamples, seed, step)
    resampled = [metric(counts[:, member].astype(float)) for counts in drawn]
    # Jackknife: weight 0 for all cases of one participant, or of a group of them, 1 for the others.
    left_out, parts = [], min(len(names), MOST_LEFT_OUT)
    part = member % parts
    for first in range(0, parts, step):
        without = np.arange(first, min(first + step, parts))
        left_out.append(metric((part[None, :] != without[:, None]).astype(float)))
    estimate = float(metric(np.ones((1, len(member))))[0])
    return Bootstrap(estimate, np.concatenate(resampled), np.concatenate(left_out))


def _draws(count: int, resamples: int, seed: int, step: int) -> Iterator[np.ndarray]:
    """How often each of `count` participants is in each resample, int [at most `step`, count] at a time."""
    if resamples * count <= KEPT_DRAWS:
        kept = _kept_draws(count, resamples, seed)
        yield from (kept[first : first + step] for first in range(0, resamples, step))
        return
    rng = np.random.default_rng(seed)
    yield from (_multinomial(rng, count, min(step, resamples - first)) for first in range(0, resamples, step))


@lru_cache(maxsize=2)
def _kept_draws(count: int, resamples: int, seed: int) -> np.ndarray:
    kept = _multinomial(np.random.default_rng(seed), count, resamples).astype(np.int32)
    kept.flags.writeable = False
    return kept


def _multinomial(rng: np.random.Generator, count: int, resamples: int) -> np.ndarray:
    """int [resamples, count]: how often each participant is drawn, as in drawing with replacement, without a list of
    draws."""
    return rng.multinomial(count, np.full(count, 1 / count), size=resamples)


def interval(result: Bootstrap, *, method: Method = "bca") -> tuple[float, float]:
    """95 % interval: percentile, or BCa (bias-corrected, accelerated; Efron 1987), better near AUROC 0 and 1."""
    from scipy.special import ndtr, ndtri

    values = result.resampled[np.isfinite(result.resampled)]
    if values.size == 0:
        return float("nan"), float("nan")
    tails = np.array(TAILS)
    # Ties count half; otherwise a discrete metric such as balanced accuracy would appear biased.
    below = (np.mean(values < result.estimate) + np.mean(values <= result.estimate)) / 2
    jackknife = result.leave_one_out[np.isfinite(result.leave_one_out)]
    if method == "bca" and 0 < below < 1 and jackknife.size > 1 and np.ptp(jackknife) > 0:
        # The acceleration is a sixth of the skewness of the jackknife values.
        deviation = jackknife.mean() - jackknife
        acceleration = (deviation**3).sum() / (6 * (deviation**2).sum() ** 1.5)
        # BCa shifts and stretches the tails by the median bias and by the acceleration.
        bias = ndtri(below)
        z = bias + ndtri(tails)
        tails = ndtr(bias + z / (1 - acceleration * z))
    low, high = np.quantile(values, tails)
    return float(low), float(high)


def bootstrap_together(
    parts: Sequence[tuple[Metric, np.ndarray]], *, resamples: int = 2000, seed: int = 0
) -> list[Bootstrap]:
    """Bootstrap several (metric, `participants` [n]) pairs over the same resamples of all their participants.

    This pairs groups that share participants (right and left eyes, scanners); groups that share none stay independent.
    """
    everyone = np.unique(np.concatenate([participants for _, participants in parts]))
    return [
        bootstrap(metric, participants, resamples=resamples, seed=seed, among=everyone)
        for metric, participants in parts
    ]


def mean_of(results: Sequence[Bootstrap]) -> Bootstrap:
    """Mean of several metrics on the same resamples, for example over the labels of a multi-label target."""
    return Bootstrap(
        float(np.mean([r.estimate for r in results])),
        np.mean([r.resampled for r in results], axis=0),
        np.mean([r.leave_one_out for r in results], axis=0),
    )


def over_seeds(results: Sequence[Bootstrap], *, seed: int = 0) -> Bootstrap:
    """Mean over S training seeds; each resample of participants also draws its own seeds.

    S − 1 seeds are drawn rather than S: with few seeds, the variance of the plain bootstrap is too small by (S − 1) /
    S, and this corrects it (Rao & Wu 1988). Equal `seed` pairs two models over their training seeds; pass different
    ones if their training seeds are unrelated.
    """
    count = len(results)
    if count == 1:
        return results[0]
    stacked = np.stack([r.resampled for r in results])
    drawn = np.random.default_rng((seed, 1)).integers(count, size=(count - 1, stacked.shape[1]))
    mean = mean_of(results)
    return Bootstrap(mean.estimate, np.take_along_axis(stacked, drawn, 0).mean(0), mean.leave_one_out)


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for multiple comparisons (Holm 1979); controls the probability of any false positive."""
    order = np.argsort(p, kind="stable")
    # The smallest p is multiplied by the number of tests, the next by one less, and so on, kept in ascending order.
    stepped = np.maximum.accumulate(np.asarray(p, float)[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(1, stepped)
    return adjusted.tolist()


def enough_resamples(comparisons: int, least: int) -> int:
    """At least `least`, and enough resamples for the smallest possible p, 2 / (resamples + 1), to survive Holm's
    correction for this number of comparisons: with fewer, no difference could, however large. At most MOST_RESAMPLES,
    enough for 400 comparisons, to limit the time."""
    return max(least, min(50 * comparisons, MOST_RESAMPLES))


def compare(a: Bootstrap, b: Bootstrap) -> Comparison:
    """Compare a with b (a − b) on the same resamples: 95 % percentile interval, two-sided bootstrap p, verdict.

    p follows Davison & Hinkley (1997, §4.2). The interval uses percentiles rather than BCa, and order statistics rather
    than values between them, so that it and p cannot contradict each other: it excludes 0 if and only if p is at most
    0.05. Fewer than 39 defined resamples give no p that small, hence no interval (NaN).
    """
    differences = a.resampled - b.resampled
    differences = np.sort(differences[np.isfinite(differences)])
    difference = a.estimate - b.estimate
    one_sided = min((differences <= 0).sum(), (differences >= 0).sum())
    # The estimate itself counts as one resample, so that p is never 0.
    p = min(1.0, 2 * (1 + int(one_sided)) / (1 + differences.size))
    # If at most this many resamples, the estimate included, are on the wrong side of 0, p is at most 0.05.
    tail = int(TAILS[0] * (1 + differences.size))
    if tail == 0:
        return Comparison(difference, float("nan"), float("nan"), p, "inconclusive")
    low, high = float(differences[tail - 1]), float(differences[-tail])
    verdict: Verdict = "better" if low > 0 else "worse" if high < 0 else "inconclusive"
    return Comparison(difference, low, high, p, verdict)
