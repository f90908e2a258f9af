"""AUROC, balanced accuracy and R² under many case weights at once: the arithmetic the participant-level bootstrap runs on.

Every metric takes `weights` [R, n] (how often each of the n cases counts in each of R resamples) and returns [R]; without weights it
returns one float, equal to scikit-learn's. A resample on which a metric is undefined (a class is missing) gives NaN.
"""

from typing import overload

import numpy as np

Array = np.ndarray


@overload
def auroc(positive: Array, score: Array, weights: None = None) -> float: ...
@overload
def auroc(positive: Array, score: Array, weights: Array) -> Array: ...
def auroc(positive: Array, score: Array, weights: Array | None = None) -> float | Array:
    """Probability that a positive case scores above a negative one, ties counting half (Hanley & McNeil 1982). `positive` bool [n]."""
    W = np.ones((1, len(score))) if weights is None else weights
    order = np.argsort(score, kind="stable")
    ordered, is_positive = np.asarray(score)[order], np.asarray(positive, bool)[order]
    # Cases of equal score form one group; a group's pairs with itself count half.
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    weight_positive = np.add.reduceat(W[:, order] * is_positive, starts, axis=1)
    weight_negative = np.add.reduceat(W[:, order] * ~is_positive, starts, axis=1)
    below = np.cumsum(weight_negative, axis=1) - weight_negative
    pairs = weight_positive.sum(1) * weight_negative.sum(1)
    wins = (weight_positive * (below + 0.5 * weight_negative)).sum(1)
    value = np.divide(wins, pairs, out=np.full(len(W), np.nan), where=pairs > 0)
    return float(value[0]) if weights is None else value


@overload
def macro_auroc(label: Array, probability: Array, weights: None = None) -> float: ...
@overload
def macro_auroc(label: Array, probability: Array, weights: Array) -> Array: ...
def macro_auroc(label: Array, probability: Array, weights: Array | None = None) -> float | Array:
    """Mean over classes of one-versus-rest AUROC. `label` int [n], `probability` [n, K]; classes without a case are left out."""
    present = [k for k in range(probability.shape[1]) if (label == k).any()]
    per_class = [auroc(label == k, probability[:, k], np.ones((1, len(label))) if weights is None else weights) for k in present]
    value = np.mean(per_class, axis=0)
    return float(value[0]) if weights is None else value


@overload
def balanced_accuracy(label: Array, predicted: Array, weights: None = None) -> float: ...
@overload
def balanced_accuracy(label: Array, predicted: Array, weights: Array) -> Array: ...
def balanced_accuracy(label: Array, predicted: Array, weights: Array | None = None) -> float | Array:
    """Mean recall over the classes that have a case. `label`, `predicted` int [n]."""
    W = np.ones((1, len(label))) if weights is None else weights
    recalls = []
    for k in np.unique(label):
        cases = W @ (label == k)
        correct = W @ ((label == k) & (predicted == k))
        recalls.append(np.divide(correct, cases, out=np.full(len(W), np.nan), where=cases > 0))
    value = np.mean(recalls, axis=0)
    return float(value[0]) if weights is None else value


@overload
def r_squared(truth: Array, predicted: Array, weights: None = None) -> float: ...
@overload
def r_squared(truth: Array, predicted: Array, weights: Array) -> Array: ...
def r_squared(truth: Array, predicted: Array, weights: Array | None = None) -> float | Array:
    """1 − residual / total sum of squares, the total around each resample's own mean; below 0 is worse than predicting that mean."""
    W = np.ones((1, len(truth))) if weights is None else weights
    # Centred first: R² does not depend on the origin, and large offsets would cost digits below.
    centred = truth - truth.mean()
    cases = W.sum(1)
    total = W @ centred**2 - np.divide((W @ centred) ** 2, cases, out=np.zeros(len(W)), where=cases > 0)
    residual = W @ (truth - predicted) ** 2
    ratio = np.divide(residual, total, out=np.full(len(W), np.nan), where=total > 1e-12 * max(float(centred @ centred), 1e-300))
    value = 1 - ratio
    return float(value[0]) if weights is None else value
