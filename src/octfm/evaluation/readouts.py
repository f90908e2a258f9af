"""Models on frozen embeddings: logistic, ridge and ordinal regression, nearest neighbours; tuned by inner folds."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np

from octfm.errors import EvaluationError
from octfm.evaluation.cases import participant_folds
from octfm.evaluation.linear import logistic, ridge
from octfm.evaluation.ordinal import grade_probability, proportional_odds

SMALL = 1 << 22
"""Size of a matrix, in elements, up to which BLAS gets one thread: more threads lose more time waiting than
they save (docs/log)."""

Readout = Literal["linear", "knn"]

INNER_FOLDS = 3
LOGISTIC_C = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
RIDGE_ALPHA = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
NEIGHBOURS = (1.0, 3.0, 5.0, 10.0, 20.0, 40.0)
TOLERANCE, WHILE_SEARCHING = 1e-4, 1e-3
"""Largest gradient at which a logistic fit stops (scikit-learn's default), for the final fit and for comparing
penalties. With the larger one, losses agree within 1 % and fits take two thirds of the time (docs/log)."""
PAST_THE_BEST = 1.05
"""The search over LOGISTIC_C stops once the inner-fold loss exceeds this multiple of the best so far. In every
measurement the loss had a single minimum over LOGISTIC_C, and fits with weaker penalties took half of the time; over
NEIGHBOURS it has several minima (docs/log)."""


def choose_readout(name: str) -> Readout:
    """Check the name of a readout. Raises EvaluationError."""
    if name not in get_args(Readout):
        raise EvaluationError(f"--readout: expected {' or '.join(get_args(Readout))}, got {name!r}")
    return name  # pyright: ignore[reportReturnType]


def fit_predict(
    readout: Readout | Literal["ordinal"],
    x: np.ndarray,
    y: np.ndarray,
    participant: np.ndarray,
    x_new: np.ndarray,
    num_classes: int,
    seed: int,
) -> tuple[np.ndarray, float]:
    """Log-probabilities [new, K] (or predicted numbers [new, 1]), and the setting chosen by inner participant folds.

    Classes have equal total weight. `num_classes` 0: regression.
    """
    from threadpoolctl import threadpool_limits

    if readout == "knn":
        grid, path = NEIGHBOURS, _neighbours
    elif readout == "ordinal":
        grid, path = LOGISTIC_C, _ordinal
    else:
        grid, path = (LOGISTIC_C if num_classes else RIDGE_ALPHA), _linear
    search = partial(_linear, tolerance=WHILE_SEARCHING) if path is _linear else path
    fold = participant_folds(participant, y, INNER_FOLDS, seed, stratify=num_classes > 0)
    # With fewer participants than folds, some folds are empty.
    held_out = [h for h in (fold == k for k in range(INNER_FOLDS)) if h.any() and not h.all()]
    with threadpool_limits(1 if x.size <= SMALL else None, user_api="blas"):
        paths = [search(*standardised(x[~h], x[h]), y[~h], num_classes, grid) for h in held_out]
        # Each path yields its predictions for one setting of the grid after the other, so the search can stop early.
        losses: list[float] = []
        for predicted in zip(*paths, strict=True):
            losses.append(sum(_loss(p, y[h], y, num_classes) for p, h in zip(predicted, held_out, strict=True)))
            if grid is LOGISTIC_C and losses[-1] > PAST_THE_BEST * min(losses):
                break
        best = grid[int(np.argmin(losses))] if losses else grid[0]
        return next(path(*standardised(x, x_new), y, num_classes, (best,))), best


def standardised(x: np.ndarray, x_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both scaled by mean and standard deviation of the training rows `x`."""
    mean, scale = x.mean(0), x.std(0)
    # A constant channel becomes 0; dividing it by its rounding noise would make it dominate.
    scale[scale <= 1e-6 * np.abs(mean)] = np.inf
    return (x - mean) / scale, (x_new - mean) / scale


def _linear(
    x: np.ndarray,
    x_new: np.ndarray,
    y: np.ndarray,
    num_classes: int,
    grid: Sequence[float],
    tolerance: float = TOLERANCE,
) -> Iterator[np.ndarray]:
    if num_classes == 0:
        yield from (ridge(x, y, alpha, x_new)[:, None] for alpha in grid)
        return
    present = np.unique(y)
    for c in grid:
        # Balanced, because balanced accuracy is reported and a screening cohort is mostly healthy.
        log_p = _nothing_known(len(x_new), num_classes)
        if len(present) > 1:
            # Only the classes that occur in this training part.
            log_p[:, present] = np.maximum(logistic(x, y, c, tolerance, x_new), np.log(1e-12))
        yield log_p


def _neighbours(
    x: np.ndarray, x_new: np.ndarray, y: np.ndarray, num_classes: int, grid: Sequence[float]
) -> Iterator[np.ndarray]:
    """Votes of the nearest training rows by cosine similarity, weighted by the inverse class frequency."""
    unit, unit_new = (v / np.maximum(1e-12, np.linalg.norm(v, axis=1, keepdims=True)) for v in (x, x_new))
    order = np.argsort(-(unit_new @ unit.T), axis=1, kind="stable")
    if num_classes == 0:
        yield from (y[order[:, : int(k)]].mean(1)[:, None] for k in grid)
        return
    # Balanced like the linear readout: a vote counts the more, the rarer its class.
    vote = np.eye(num_classes)[y] / np.maximum(1, np.bincount(y, minlength=num_classes)) * len(y) / num_classes
    for k in grid:
        # Half a vote for every class, so that no probability is zero.
        counted = vote[order[:, : int(k)]].sum(1) + 0.5
        yield np.log(counted / counted.sum(1, keepdims=True))


def _ordinal(
    x: np.ndarray, x_new: np.ndarray, y: np.ndarray, num_classes: int, grid: Sequence[float]
) -> Iterator[np.ndarray]:
    # A small training part may lack a grade; thresholds exist only between grades that occur.
    present, grade = np.unique(y, return_inverse=True)
    weight = (len(y) / (len(present) * np.bincount(grade)))[grade]
    for c in grid:
        log_p = _nothing_known(len(x_new), num_classes)
        if len(present) > 1:
            log_p[:, present] = np.log(grade_probability(x_new, *proportional_odds(x, grade, len(present), c, weight)))
        yield log_p


def _nothing_known(rows: int, num_classes: int) -> np.ndarray:
    return np.full((rows, num_classes), np.log(1e-6))


def _loss(predicted: np.ndarray, y: np.ndarray, y_all: np.ndarray, num_classes: int) -> float:
    """Sum of squared errors, or class-balanced log loss."""
    if num_classes == 0:
        return float(((predicted[:, 0] - y) ** 2).sum())
    # Frequencies of all rows, so that the folds' losses add up to one balanced loss.
    weight = 1 / np.bincount(y_all, minlength=num_classes)[y]
    return float(-(weight * predicted[np.arange(len(y)), y]).sum())
