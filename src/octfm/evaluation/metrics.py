"""Metrics computed for many bootstrap resamples at once.

Every metric takes `weights` [R, n] (how often each of n cases occurs in each of R resamples) and returns [R]. Without
weights it returns one float, equal to scikit-learn's if that has the metric. Undefined values (a class is missing) are
NaN.
"""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from numbers import Real
from pathlib import PurePath
from typing import Literal, Protocol, get_args, overload

import numpy as np

from octfm.errors import EvaluationError, shown

Array = np.ndarray

ECE_BINS = 10
Kind = Literal["binary", "multiclass", "ordinal", "regression"]


class Weighted(Protocol):
    """metric(truth, predicted) -> float; metric(truth, predicted, weights [R, n]) -> [R]."""

    @overload
    def __call__(self, truth: Array, predicted: Array, weights: None = None) -> float: ...
    @overload
    def __call__(self, truth: Array, predicted: Array, weights: Array) -> Array: ...


@dataclass(frozen=True)
class ExtraMetric:
    """A metric of your own: `octfm.probe(..., metrics=[ExtraMetric(...)])`. See docs/guide/plug-ins.md."""

    name: str
    measure: Callable[[Array, Array, Array], Array]
    """(truth, predicted, weights [R, n]) -> [R], NaN for resamples in which it is undefined. For classes, truth is int
    [n], and predicted are probabilities [n, K] as if classes were equally common; for numbers, both are [n]."""
    chance: float
    """Score of guessing."""
    kinds: tuple[Kind, ...] = ("binary",)
    """Kinds of targets for which it is computed."""
    lower_is_better: bool = False

    def __post_init__(self):
        if not callable(self.measure):
            raise EvaluationError(f"metric {self.name}: measure: expected a function, got {shown(self.measure)}")
        if not isinstance(self.chance, Real):
            raise EvaluationError(f"metric {self.name}: chance: expected a number, got {shown(self.chance)}")
        if isinstance(self.kinds, str) or not {*self.kinds} <= {*get_args(Kind)}:
            raise EvaluationError(
                f"metric {self.name}: kinds: expected a tuple of {', '.join(get_args(Kind))}, got {shown(self.kinds)}"
            )

    def __call__(self, truth: Array, predicted: Array, weights: Array) -> Array:
        """float64 [R]. Raises EvaluationError if `measure` fails or returns anything else."""
        try:
            # Copies, so that a metric that changes its arguments does not affect the next ones.
            found = self.measure(truth.copy(), predicted.copy(), weights)
        except Exception as error:  # the caller's code may raise anything
            steps = traceback.extract_tb(error.__traceback__)[1:]  # after this function
            place = f" in {PurePath(steps[0].filename).name}, line {steps[0].lineno}" if steps else ""
            raise EvaluationError(
                f"metric {self.name}: {type(error).__name__}{place}: {error}; it was called with truth "
                f"{list(truth.shape)}, predicted {list(predicted.shape)} and weights {list(weights.shape)}"
            ) from error
        try:
            values = np.asarray(found, np.float64)
        except (TypeError, ValueError):
            values = None
        if values is None or values.shape != (len(weights),):
            got = type(found).__name__ if values is None or not values.ndim else f"shape {list(values.shape)}"
            raise EvaluationError(
                f"metric {self.name}: expected an array of {len(weights)} numbers, one for each row of weights "
                f"{list(weights.shape)}, got {got}"
            )
        return values


def _weighted(metric: Callable[[Array, Array, Array], Array]) -> Weighted:
    @wraps(metric)
    def either(truth: Array, predicted: Array, weights: Array | None = None) -> float | Array:
        truth, predicted = np.asarray(truth), np.asarray(predicted)
        if weights is None:
            return float(metric(truth, predicted, np.ones((1, len(truth))))[0])
        return metric(truth, predicted, weights)

    return either  # pyright: ignore[reportReturnType]


@_weighted
def auroc(positive: Array, score: Array, W: Array) -> Array:
    """Probability that a positive case scores above a negative one; ties count half (Hanley & McNeil 1982)."""
    weight_positive, weight_negative = _by_score(positive, score, W)
    # Pairs that the positive case wins: against all negatives of lower scores, and half of those of equal score.
    below = np.cumsum(weight_negative, axis=1) - weight_negative
    pairs = weight_positive.sum(1) * weight_negative.sum(1)
    return ratio((weight_positive * (below + 0.5 * weight_negative)).sum(1), pairs)


@_weighted
def auprc(positive: Array, score: Array, W: Array) -> Array:
    """Average precision: mean precision at each positive case, without interpolation. Chance is the prevalence."""
    weight_positive, weight_negative = (w[:, ::-1] for w in _by_score(positive, score, W))
    # From the highest score down: positives found among the cases taken so far.
    found, taken = np.cumsum(weight_positive, axis=1), np.cumsum(weight_positive + weight_negative, axis=1)
    precision = np.divide(found, taken, out=np.zeros_like(found), where=taken > 0)
    return ratio((weight_positive * precision).sum(1), weight_positive.sum(1))


@_weighted
def macro_auroc(label: Array, probability: Array, W: Array) -> Array:
    """Mean one-versus-rest AUROC over classes that have a case. `label` int [n], `probability` [n, K]."""
    return np.mean([auroc(label == k, probability[:, k], W) for k in np.unique(label)], axis=0)


@_weighted
def macro_auprc(label: Array, probability: Array, W: Array) -> Array:
    """Mean over classes of one-versus-rest average precision."""
    return np.mean([auprc(label == k, probability[:, k], W) for k in np.unique(label)], axis=0)


@_weighted
def balanced_accuracy(label: Array, predicted: Array, W: Array) -> Array:
    """Mean recall over the classes that have a case. `label`, `predicted` int [n]."""
    return np.mean([ratio(W @ ((label == k) & (predicted == k)), W @ (label == k)) for k in np.unique(label)], axis=0)


@_weighted
def macro_f1(label: Array, predicted: Array, W: Array) -> Array:
    """Mean F1 over classes; a class that is predicted but has no case counts as 0, as in scikit-learn.

    NaN for a resample that lacks a class of the full sample.
    """
    per_class = []
    for k in np.union1d(label, predicted):
        correct = W @ ((label == k) & (predicted == k))
        cases = W @ (label == k)
        score = 2 * ratio(correct, cases + W @ (predicted == k), 0.0)
        per_class.append(np.where(cases > 0, score, np.nan) if (label == k).any() else score)
    return np.mean(per_class, axis=0)


@_weighted
def weighted_kappa(grade: Array, predicted: Array, W: Array) -> Array:
    """Cohen's kappa with quadratic weights (Cohen 1968): 1 is agreement, 0 chance. Grades are equidistant integers."""
    disagreement = W @ ((grade - predicted) ** 2).astype(float)
    cases = W.sum(1)
    # Expected under independence: E(a - b)² = var a + var b + (mean a - mean b)².
    mean_a, mean_b = ratio(W @ grade, cases), ratio(W @ predicted, cases)
    expected = (
        ratio(W @ (grade**2).astype(float), cases)
        + ratio(W @ (predicted**2).astype(float), cases)
        - 2 * mean_a * mean_b
    )
    # Without variance kappa is 0 / 0: NaN, not a division by rounding error.
    return 1 - ratio(ratio(disagreement, cases), np.where(expected > 1e-12, expected, 0))


@_weighted
def brier(label: Array, probability: Array, W: Array) -> Array:
    """Mean squared error of probabilities [n, K], summed over classes (Brier 1950): 0 to 2, twice the binary score."""
    wrong = ((probability - np.eye(probability.shape[1])[label]) ** 2).sum(1)
    return ratio(W @ wrong, W.sum(1))


@_weighted
def ece(label: Array, probability: Array, W: Array) -> Array:
    """Expected calibration error of the predicted class: |confidence − accuracy| in 10 equal bins (Guo et al. 2017).

    Biased upwards in small samples: a perfectly calibrated model scores about 0.1 on 100 cases. Compare models only on
    the same cases.
    """
    confidence, right = probability.max(1), probability.argmax(1) == label
    which = ece_bin(confidence)
    gaps = [np.abs(W @ ((confidence - right) * (which == b))) for b in range(ECE_BINS)]
    return ratio(np.sum(gaps, axis=0), W.sum(1))


def ece_bin(probability: Array) -> Array:
    """Bin 0..9 of each probability; bins exclude their lower and include their upper edge (Guo et al. 2017)."""
    return np.clip(np.ceil(probability * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)


@_weighted
def r_squared(truth: Array, predicted: Array, W: Array) -> Array:
    """1 − residual / total sum of squares, around each resample's mean; below 0 is worse than predicting that mean."""
    # R² does not depend on the origin; centring avoids cancellation of large numbers below.
    centred = truth - truth.mean()
    total = W @ centred**2 - ratio((W @ centred) ** 2, W.sum(1), 0.0)
    residual = W @ (truth - predicted) ** 2
    return 1 - ratio(residual, np.where(total > 1e-12 * max(float(centred @ centred), 1e-300), total, 0))


@_weighted
def mae(truth: Array, predicted: Array, W: Array) -> Array:
    """Mean absolute error, in the unit of the target."""
    return ratio(W @ np.abs(truth - predicted), W.sum(1))


def _by_score(positive: Array, score: Array, W: Array) -> tuple[Array, Array]:
    """Weights of positive and of negative cases, each [R, G], summed over groups of equal score in ascending order."""
    order = np.argsort(score, kind="stable")
    ordered, is_positive = score[order], positive.astype(bool)[order]
    # Cases of equal score form one group, so that their order cannot matter.
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ordered_weights = W[:, order]
    positives, negatives = ordered_weights * is_positive, ordered_weights * ~is_positive
    if len(starts) == len(ordered):
        return positives, negatives
    return np.add.reduceat(positives, starts, axis=1), np.add.reduceat(negatives, starts, axis=1)


def ratio(a: Array, b: Array, undefined: float = float("nan")) -> Array:
    """a / b, elementwise with broadcasting; `undefined` where b is not positive."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    return np.divide(a, b, out=np.full(np.broadcast(a, b).shape, undefined), where=b > 0)
