"""Metrics under many case weights at once: the arithmetic the participant-level bootstrap runs on.

Every metric takes `weights` [R, n] (how often each of the n cases counts in each of R resamples) and returns [R]; without weights it
returns one float, equal to scikit-learn's where that has the metric. A resample where a metric is undefined (a class is missing) gives NaN.
"""

from collections.abc import Callable
from functools import wraps
from typing import Protocol, overload

import numpy as np

Array = np.ndarray

ECE_BINS = 10


class Weighted(Protocol):
    """metric(truth, predicted) -> float; metric(truth, predicted, weights [R, n]) -> [R]."""

    @overload
    def __call__(self, truth: Array, predicted: Array) -> float: ...
    @overload
    def __call__(self, truth: Array, predicted: Array, weights: None) -> float: ...
    @overload
    def __call__(self, truth: Array, predicted: Array, weights: Array) -> Array: ...


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
    """Probability that a positive case scores above a negative one, ties counting half (Hanley & McNeil 1982). `positive` bool [n]."""
    weight_positive, weight_negative = _by_score(positive, score, W)
    below = np.cumsum(weight_negative, axis=1) - weight_negative
    pairs = weight_positive.sum(1) * weight_negative.sum(1)
    return _ratio((weight_positive * (below + 0.5 * weight_negative)).sum(1), pairs)


@_weighted
def auprc(positive: Array, score: Array, W: Array) -> Array:
    """Average precision: the mean precision at every positive case, without interpolation. Chance is the prevalence."""
    weight_positive, weight_negative = (w[:, ::-1] for w in _by_score(positive, score, W))
    found, taken = np.cumsum(weight_positive, axis=1), np.cumsum(weight_positive + weight_negative, axis=1)
    precision = np.divide(found, taken, out=np.zeros_like(found), where=taken > 0)
    return _ratio((weight_positive * precision).sum(1), weight_positive.sum(1))


@_weighted
def macro_auroc(label: Array, probability: Array, W: Array) -> Array:
    """Mean over classes of one-versus-rest AUROC. `label` int [n], `probability` [n, K]; classes without a case are left out."""
    return np.mean([auroc(label == k, probability[:, k], W) for k in np.unique(label)], axis=0)


@_weighted
def macro_auprc(label: Array, probability: Array, W: Array) -> Array:
    """Mean over classes of one-versus-rest average precision."""
    return np.mean([auprc(label == k, probability[:, k], W) for k in np.unique(label)], axis=0)


@_weighted
def balanced_accuracy(label: Array, predicted: Array, W: Array) -> Array:
    """Mean recall over the classes that have a case. `label`, `predicted` int [n]."""
    return np.mean([_ratio(W @ ((label == k) & (predicted == k)), W @ (label == k)) for k in np.unique(label)], axis=0)


@_weighted
def macro_f1(label: Array, predicted: Array, W: Array) -> Array:
    """Mean over classes of the harmonic mean of precision and recall; 0 for a class that is predicted but has no case, as in scikit-learn.

    A resample from which a class of the whole sample is missing is undefined.
    """
    per_class = []
    for k in np.union1d(label, predicted):
        correct = W @ ((label == k) & (predicted == k))
        cases = W @ (label == k)
        score = 2 * _ratio(correct, cases + W @ (predicted == k), 0.0)
        per_class.append(np.where(cases > 0, score, np.nan) if (label == k).any() else score)
    return np.mean(per_class, axis=0)


@_weighted
def weighted_kappa(grade: Array, predicted: Array, W: Array) -> Array:
    """Cohen's kappa with quadratic weights (Cohen 1968): 1 agrees, 0 is chance. Grades are integers at equal distances."""
    disagreement = W @ ((grade - predicted) ** 2).astype(float)
    cases = W.sum(1)
    # Expected under independence: E(a - b)² = var a + var b + (mean a - mean b)².
    mean_a, mean_b = _ratio(W @ grade, cases), _ratio(W @ predicted, cases)
    expected = (
        _ratio(W @ (grade**2).astype(float), cases)
        + _ratio(W @ (predicted**2).astype(float), cases)
        - 2 * mean_a * mean_b
    )
    return 1 - _ratio(_ratio(disagreement, cases), np.where(expected > 1e-12, expected, 0))


@_weighted
def brier(label: Array, probability: Array, W: Array) -> Array:
    """Mean squared error of probabilities [n, K], summed over classes (Brier 1950): 0 to 2, and for two classes twice the binary score."""
    wrong = ((probability - np.eye(probability.shape[1])[label]) ** 2).sum(1)
    return _ratio(W @ wrong, W.sum(1))


@_weighted
def ece(label: Array, probability: Array, W: Array) -> Array:
    """Expected calibration error of the winning class: |confidence − accuracy| in 10 equal bins, weighted by cases (Guo 2017).

    Biased upwards in small samples: an honest model of 100 cases scores about 0.1. Compare models on the same cases only.
    """
    confidence, right = probability.max(1), probability.argmax(1) == label
    # Bins are open below and closed above, as in the paper.
    which = np.clip(np.ceil(confidence * ECE_BINS).astype(int) - 1, 0, ECE_BINS - 1)
    gaps = [np.abs(W @ ((confidence - right) * (which == b))) for b in range(ECE_BINS)]
    return _ratio(np.sum(gaps, axis=0), W.sum(1))


@_weighted
def r_squared(truth: Array, predicted: Array, W: Array) -> Array:
    """1 − residual / total sum of squares, the total around each resample's own mean; below 0 is worse than predicting that mean."""
    # Centred first: R² does not depend on the origin, and large offsets would cost digits below.
    centred = truth - truth.mean()
    total = W @ centred**2 - _ratio((W @ centred) ** 2, W.sum(1), 0.0)
    residual = W @ (truth - predicted) ** 2
    return 1 - _ratio(residual, np.where(total > 1e-12 * max(float(centred @ centred), 1e-300), total, 0))


@_weighted
def mae(truth: Array, predicted: Array, W: Array) -> Array:
    """Mean absolute error, in the target's own unit."""
    return _ratio(W @ np.abs(truth - predicted), W.sum(1))


def _by_score(positive: Array, score: Array, W: Array) -> tuple[Array, Array]:
    """Weight of positive and of negative cases [R, G] in the groups of equal score, lowest first."""
    order = np.argsort(score, kind="stable")
    ordered, is_positive = score[order], positive.astype(bool)[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    ordered_weights = W[:, order]
    return np.add.reduceat(ordered_weights * is_positive, starts, axis=1), np.add.reduceat(
        ordered_weights * ~is_positive, starts, axis=1
    )


def _ratio(a: Array, b: Array, undefined: float = float("nan")) -> Array:
    a, b = np.asarray(a, float), np.asarray(b, float)
    return np.divide(a, b, out=np.full(np.broadcast(a, b).shape, undefined), where=b > 0)
