"""Agreement between scanners on the same eyes: three forms of intraclass correlation, and Bland-Altman limits."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np

from octfm.errors import EvaluationError
from octfm.evaluation.metrics import ratio
from octfm.evaluation.statistics import TAILS, Bootstrap, Metric

Form = Literal["ICC(1,1)", "ICC(2,1)", "ICC(3,1)"]
MEANING: dict[Form, str] = {
    "ICC(1,1)": "one-way random effects, absolute agreement, single measurement: each eye has its own set of scanners",
    "ICC(2,1)": "two-way random effects, absolute agreement, single measurement: "
    "an offset between scanners counts against it",
    "ICC(3,1)": "two-way mixed effects, consistency, single measurement: "
    "a constant offset between scanners is forgiven",
}
"""Names of Shrout & Fleiss (Psychol. Bull. 1979); (2,1) is ICC(A,1) and (3,1) ICC(C,1) of McGraw & Wong (1996)."""


def icc(values: np.ndarray, form: Form, weights: np.ndarray | None = None) -> np.ndarray:
    """Intraclass correlation of `values` [n subjects, k measurements] under case weights [R, n]: [R], or [1] without.

    Mean squares of Shrout & Fleiss (1979); a subject of weight w counts as w subjects. NaN for a resample with fewer
    than two subjects or without any variance. Raises EvaluationError for missing values; use `icc_one_way` for
    incomplete designs.
    """
    values = np.asarray(values, float)
    if values.ndim != 2 or values.shape[1] < 2 or not np.isfinite(values).all():
        raise EvaluationError(
            f"ICC: expected finite values [subjects, two or more measurements], got shape {values.shape}"
        )
    if form not in MEANING:
        raise EvaluationError(f"ICC: expected one of {', '.join(MEANING)}, got {form!r}")
    between, columns, residual, within, n = _mean_squares(values, _weights(values, weights))
    k = values.shape[1]
    error = within if form.startswith("ICC(1") else residual
    # Absolute agreement between fixed scanners: an offset between them (the mean square of columns) counts as error.
    offset = columns - residual if form.startswith("ICC(2") else np.zeros_like(n)
    return ratio(between - error, between + (k - 1) * error + k * offset / n)


def icc_one_way(subject: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """ICC(1,1) of an incomplete design: `values` [n] of `subject` [n], any number per subject; `weights` [R, n] -> [R].

    One-way analysis of variance with the effective group size n0 of unequal groups (Donner, International Statistical
    Review 1986). All rows of a subject must have the same weight, because they are resampled together.
    """
    values = np.asarray(values, float)
    between, within, n0 = _one_way(subject, values, _weights(values, weights))
    return ratio(between - within, between + (n0 - 1) * within)


LIMITS = 1.96
"""Standard deviations between bias and limits: these contain 95 % of normally distributed differences."""


def bias(difference: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean difference [R] under case weights [R, n] (Bland & Altman, Lancet 1986)."""
    W = _weights(difference, weights)
    return ratio(W @ difference, W.sum(1))


def spread(difference: np.ndarray, weights: np.ndarray | None = None, subject: np.ndarray | None = None) -> np.ndarray:
    """Standard deviation [R] of the difference of a single measurement; `subject` [n]: whose measurement each is.

    The variance is that within subjects plus that between them, from a one-way analysis of variance (Bland & Altman,
    Journal of Biopharmaceutical Statistics 2007). Both eyes or several visits of a person resemble each other, so the
    sample variance, which treats them as independent, is too small. With one measurement per subject, or without
    `subject`, the result is from the sample variance. All rows of a subject must have the same weight.
    """
    subject = np.arange(len(difference)) if subject is None else subject
    between, within, n0 = _one_way(subject, difference, _weights(difference, weights))
    repeated = np.isfinite(within)
    within = np.where(repeated, within, 0)
    # Where visits differ more than subjects, the variance between subjects is estimated as negative. It counts as such:
    # cut off at 0, the sum was 1.24 instead of 1 in simulated cohorts of 40, of whom 4 had two eyes.
    return np.sqrt(np.where(repeated, within + ratio(between - within, n0), between))


def limits(
    difference: np.ndarray, subject: np.ndarray, boot: Callable[[Metric], Bootstrap] | None
) -> dict[str, dict[str, float | None] | float | None]:
    """Bland-Altman: bias and both limits, each with estimate, low, high and p, and standard deviation; None if unknown.

    `subject` [n]: the participant of each difference. Intervals are studentised (Davison & Hinkley 1997, §5.2) over the
    resamples of participants that `boot` draws; with None there are no intervals. In simulated cohorts of 10 to 40
    participants, these intervals contain the true limit in 90 to 94 % of cases, BCa intervals in 81 to 90 %.
    """
    sd = float(spread(difference, None, subject)[0])
    sides = {"bias": 0, "lower": -1, "upper": 1}
    return {
        name: _with_interval(partial(_limit_and_error, difference, subject, side), len(difference), boot)
        for name, side in sides.items()
    } | {"sd": sd if np.isfinite(sd) else None}


def slope(
    difference: np.ndarray, level: np.ndarray, subject: np.ndarray, boot: Callable[[Metric], Bootstrap]
) -> dict[str, float | None]:
    """Slope of the regression of the difference on the mean of both, with an interval as in `limits`. Unless it is 0,
    limits are too high at one end of the range and too low at the other (Bland & Altman, Statistical Methods in Medical
    Research 1999, §3.2)."""
    return _with_interval(partial(_slope_and_error, difference, level, subject), len(difference), boot)


def _with_interval(
    measure: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    count: int,
    boot: Callable[[Metric], Bootstrap] | None,
) -> dict[str, float | None]:
    """`measure`: from case weights [R, count] to an estimate and its standard error, each [R]. p: of a value of 0."""
    values, errors = measure(np.ones((1, count)))
    estimate, error = float(values[0]), float(errors[0])
    if not np.isfinite(estimate):
        return dict.fromkeys(("estimate", "low", "high", "p"))

    def studentised(W: np.ndarray) -> np.ndarray:
        values, errors = measure(W)
        return ratio(values - estimate, errors)

    t = boot(studentised).resampled if boot is not None else np.zeros(0)
    t = t[np.isfinite(t)]
    if not t.size:
        return {"estimate": estimate, "low": None, "high": None, "p": None}
    low, high = (float(estimate - q * error) for q in np.quantile(t, TAILS[::-1]))
    p = float(1 + (np.abs(t) >= abs(estimate) / error).sum()) / (1 + t.size)
    return {"estimate": estimate, "low": low, "high": high, "p": p}


def _limit_and_error(
    difference: np.ndarray, subject: np.ndarray, side: int, W: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A limit, or the bias for side 0, and its standard error by the influence of every subject. Each [R]."""
    _, first, member = np.unique(subject, return_index=True, return_inverse=True)
    origin = difference.mean()
    x = difference - origin
    size, total, squares = (np.bincount(member, weights=values) for values in (np.ones(len(x)), x, x**2))
    middle = bias(x, W)[:, None]
    influence = total - middle * size
    value = middle[:, 0]
    if side:
        sd = spread(x, W, subject)
        value = value + side * LIMITS * sd
        around = squares - 2 * middle * total + middle**2 * size
        influence = influence + side * LIMITS * (ratio(around, 2 * sd[:, None]) - sd[:, None] * size / 2)
    W = W[:, first]
    subjects = W.sum(1)
    error = np.sqrt(ratio(subjects, subjects - 1) * (W * influence**2).sum(1)) / (W @ size)
    return value + origin, error


def _slope_and_error(
    difference: np.ndarray, level: np.ndarray, subject: np.ndarray, W: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The slope and its standard error by the influence of every subject. Each [R]."""
    _, first, member = np.unique(subject, return_index=True, return_inverse=True)
    # From the median, so that equal differences give an error of exactly 0, free of rounding.
    x, y = level - level.mean(), difference - np.median(difference)
    size, sx, sy, sxx, sxy = (np.bincount(member, weights=v) for v in (np.ones(len(x)), x, y, x**2, x * y))
    W = W[:, first]
    n = W @ size
    mx, my = ratio(W @ sx, n)[:, None], ratio(W @ sy, n)[:, None]
    # Of each subject, around the means of the resample.
    across = sxx - 2 * mx * sx + mx**2 * size
    along = sxy - mx * sy - my * sx + mx * my * size
    total = (W * across).sum(1)
    value = ratio((W * along).sum(1), total)
    influence = along - value[:, None] * across
    subjects = W.sum(1)
    return value, ratio(np.sqrt(ratio(subjects, subjects - 1) * (W * influence**2).sum(1)), total)


def _one_way(subject: np.ndarray, values: np.ndarray, W: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean squares between and within subjects, and the effective size n0 of a group. Each [R]; NaN where undefined."""
    _, first, member = np.unique(subject, return_index=True, return_inverse=True)
    size = np.bincount(member)
    centred = values - values.mean()
    mean = np.bincount(member, weights=centred) / size
    inside = np.bincount(member, weights=(centred - mean[member]) ** 2)
    # One weight per subject: that of its first row.
    W = W[:, first]
    subjects, total = W.sum(1), W @ size
    grand = ratio(W @ (size * mean), total)
    between = ratio(np.maximum(0, W @ (size * mean**2) - total * grand**2), subjects - 1)
    within = ratio(W @ inside, total - subjects)
    return between, within, ratio(total - ratio(W @ size**2.0, total), subjects - 1)


def _mean_squares(
    values: np.ndarray, W: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean squares between subjects, between measurements, residual and within subjects; number of subjects. [R]"""
    k = values.shape[1]
    # Mean squares do not depend on the origin; centring avoids cancellation of large numbers below.
    centred = values - values.mean()
    n = W.sum(1)
    mean, squares = centred.mean(1), (centred**2).sum(1)
    column = ratio(W @ centred, n[:, None])
    grand = ratio(W @ mean, n)
    between = k * (W @ mean**2 - n * grand**2)
    columns = n * (column**2).sum(1) - n * k * grand**2
    total = W @ squares - n * k * grand**2
    within = np.maximum(0, total - between)
    residual = np.maximum(0, within - columns)
    return ratio(between, n - 1), columns / (k - 1), ratio(residual, (n - 1) * (k - 1)), ratio(within, n * (k - 1)), n


def _weights(values: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
    return np.ones((1, len(values))) if weights is None else np.asarray(weights, float)
