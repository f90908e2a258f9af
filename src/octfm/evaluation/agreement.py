"""Do two scanners say the same of one eye? Intraclass correlation in its six forms, and Bland and Altman's limits of agreement."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from octfm.errors import EvaluationError

Form = Literal["ICC(1,1)", "ICC(2,1)", "ICC(3,1)", "ICC(1,k)", "ICC(2,k)", "ICC(3,k)"]
MEANING: dict[Form, str] = {
    "ICC(1,1)": "one-way random effects, absolute agreement, single measurement: each eye has its own set of scanners",
    "ICC(2,1)": "two-way random effects, absolute agreement, single measurement: an offset between scanners counts against it",
    "ICC(3,1)": "two-way mixed effects, consistency, single measurement: a constant offset between scanners is forgiven",
    "ICC(1,k)": "one-way random effects, absolute agreement, mean of k measurements",
    "ICC(2,k)": "two-way random effects, absolute agreement, mean of k measurements",
    "ICC(3,k)": "two-way mixed effects, consistency, mean of k measurements",
}
"""Names of Shrout & Fleiss (Psychological Bulletin 1979); (2,1) is ICC(A,1) and (3,1) is ICC(C,1) of McGraw & Wong (1996)."""


@dataclass(frozen=True)
class FInterval:
    low: float
    high: float


def icc(values: np.ndarray, form: Form, weights: np.ndarray | None = None) -> np.ndarray:
    """Intraclass correlation of `values` [n subjects, k measurements], under case weights [R, n]: [R], or [1] without weights.

    Mean squares of Shrout & Fleiss (1979); a subject that counts w times is w subjects. NaN where a resample holds fewer than two subjects,
    or nothing differs. Missing values are an error: see `icc_one_way` for incomplete designs.
    """
    values = np.asarray(values, float)
    if values.ndim != 2 or values.shape[1] < 2 or not np.isfinite(values).all():
        raise EvaluationError(
            f"ICC: expected finite values [subjects, two or more measurements], got shape {values.shape}"
        )
    between, columns, residual, within, n = _mean_squares(values, _ones(values) if weights is None else weights)
    k = values.shape[1]
    if form == "ICC(1,1)":
        return _over(between - within, between + (k - 1) * within)
    if form == "ICC(2,1)":
        return _over(between - residual, between + (k - 1) * residual + k * (columns - residual) / n)
    if form == "ICC(3,1)":
        return _over(between - residual, between + (k - 1) * residual)
    if form == "ICC(1,k)":
        return _over(between - within, between)
    if form == "ICC(2,k)":
        return _over(between - residual, between + (columns - residual) / n)
    if form == "ICC(3,k)":
        return _over(between - residual, between)
    raise EvaluationError(f"ICC: expected one of {', '.join(get_args(Form))}, got {form!r}")


def icc_one_way(subject: np.ndarray, values: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """ICC(1,1) of an incomplete design: `values` [n] of `subject` [n], each with any number of measurements; `weights` [R, n] -> [R].

    One-way analysis of variance with the mean group size n0 of unequal groups (Donner, International Statistical Review 1986). Rows of a
    subject must weigh the same: they are resampled together.
    """
    values = np.asarray(values, float)
    names, first, member = np.unique(subject, return_index=True, return_inverse=True)
    size = np.bincount(member)
    centred = values - values.mean()
    mean = np.bincount(member, weights=centred) / size
    inside = np.bincount(member, weights=(centred - mean[member]) ** 2)
    W = np.ones((1, len(names))) if weights is None else np.asarray(weights, float)[:, first]
    subjects, total = W.sum(1), W @ size
    grand = _over(W @ (size * mean), total)
    between = _over(W @ (size * mean**2) - total * grand**2, subjects - 1)
    within = _over(W @ inside, total - subjects)
    n0 = _over(total - _over(W @ size**2.0, total), subjects - 1)
    return _over(between - within, between + (n0 - 1) * within)


def f_interval(values: np.ndarray, form: Form, level: float = 0.95) -> FInterval:
    """The interval by F distributions (Shrout & Fleiss 1979; McGraw & Wong 1996), for independent subjects.

    Both eyes of a participant are not independent: the participant-level bootstrap is what reports show, this is its cross-check.
    """
    from scipy.stats import f as F

    values = np.asarray(values, float)
    n, k = values.shape
    between, columns, residual, within, _ = (float(x[0]) for x in _mean_squares(values, _ones(values)))
    tail = (1 + level) / 2
    if form in ("ICC(1,1)", "ICC(1,k)", "ICC(3,1)", "ICC(3,k)"):
        one_way = form.startswith("ICC(1")
        error, df = (within, n * (k - 1)) if one_way else (residual, (n - 1) * (k - 1))
        low, high = between / error / float(F.ppf(tail, n - 1, df)), between / error * float(F.ppf(tail, df, n - 1))
        if form.endswith("k)"):
            return FInterval(1 - 1 / low, 1 - 1 / high)
        return FInterval((low - 1) / (low + k - 1), (high - 1) / (high + k - 1))
    r = float(icc(values, "ICC(2,1)")[0])
    a, b = k * r / (n * (1 - r)), 1 + k * r * (n - 1) / (n * (1 - r))
    df = (a * columns + b * residual) ** 2 / ((a * columns) ** 2 / (k - 1) + (b * residual) ** 2 / ((n - 1) * (k - 1)))
    low_f, high_f = F.ppf(tail, n - 1, df), F.ppf(tail, df, n - 1)
    low = n * (between - low_f * residual) / (low_f * (k * columns + (k * n - k - n) * residual) + n * between)
    high = n * (high_f * between - residual) / (k * columns + (k * n - k - n) * residual + n * high_f * between)
    if form == "ICC(2,k)":
        # Spearman and Brown: the mean of k measurements.
        return FInterval(k * low / (1 + (k - 1) * low), k * high / (1 + (k - 1) * high))
    return FInterval(low, high)


LIMITS = 1.96
"""Standard deviations between bias and limits: 95 % of differences, where they are normal."""


def bias(difference: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Mean difference [R] under case weights [R, n] (Bland & Altman, Lancet 1986)."""
    W = np.ones((1, len(difference))) if weights is None else weights
    return _over(W @ difference, W.sum(1))


def spread(difference: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Standard deviation of differences [R], with n − 1."""
    W = np.ones((1, len(difference))) if weights is None else weights
    centred = difference - difference.mean()
    squares = W @ centred**2 - _over((W @ centred) ** 2, W.sum(1))
    return np.sqrt(np.maximum(0, _over(squares, W.sum(1) - 1)))


def limit(difference: np.ndarray, side: int, weights: np.ndarray | None = None) -> np.ndarray:
    """Lower (`side` −1) or upper (+1) limit of agreement [R]: bias ± 1.96 standard deviations."""
    return bias(difference, weights) + side * LIMITS * spread(difference, weights)


def _mean_squares(
    values: np.ndarray, W: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Between subjects, between measurements, residual, within subjects [R], and the number of subjects [R]."""
    k = values.shape[1]
    # The origin does not matter to any of them, and large offsets would cost digits below.
    centred = values - values.mean()
    n = W.sum(1)
    mean, squares = centred.mean(1), (centred**2).sum(1)
    column = _over(W @ centred, n[:, None])
    grand = _over(W @ mean, n)
    between = k * (W @ mean**2 - n * grand**2)
    columns = n * (column**2).sum(1) - n * k * grand**2
    total = W @ squares - n * k * grand**2
    within = np.maximum(0, total - between)
    residual = np.maximum(0, within - columns)
    return _over(between, n - 1), columns / (k - 1), _over(residual, (n - 1) * (k - 1)), _over(within, n * (k - 1)), n


def _ones(values: np.ndarray) -> np.ndarray:
    return np.ones((1, len(values)))


def _over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = np.asarray(a, float), np.asarray(b, float)
    return np.divide(a, b, out=np.full(np.broadcast(a, b).shape, np.nan), where=b > 0)
