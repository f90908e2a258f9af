"""Models on frozen embeddings: logistic, ridge, ordinal, nearest neighbours and boosted trees, tuned by inner folds."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal, get_args

import numpy as np

from octfm.errors import EvaluationError
from octfm.evaluation.cases import participant_folds
from octfm.evaluation.linear import grade_probability, logistic, proportional_odds, ridge

SMALL = 1 << 22
"""Matrices with at most this many elements get one BLAS thread: more would lose more time waiting than they save
(docs/log)."""

Readout = Literal["linear", "knn", "trees"]

INNER_FOLDS = 3
"""Folds of the training participants by which a setting is chosen."""
LOGISTIC_C = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
"""Inverse L2 penalties of logistic and ordinal regression to choose from, the strongest penalty first."""
RIDGE_ALPHA = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)
"""L2 penalties of ridge regression to choose from."""
NEIGHBOURS = (1.0, 3.0, 5.0, 10.0, 20.0, 40.0)
"""Numbers of nearest neighbours to choose from."""
MOST_PAIRS = 1 << 22
"""Most similarities of new to training rows in memory at a time: those of 10,000 to 50,000 rows would take 12 GB."""
ITERATIONS = (12.0, 25.0, 50.0, 100.0, 200.0)
"""Numbers of boosted trees (per class)."""
TREES = {"learning_rate": 0.06, "max_leaf_nodes": 15, "min_samples_leaf": 10, "l2_regularization": 1.0}
FARTHEST = 5.0
"""New rows are limited to this many standard deviations from the mean of the training rows, or to the farthest of
these."""
WEAKENED = 0.1
"""Factor by which one part of a joint arm is weakened in candidates that rely mostly on the others."""
TOLERANCE, WHILE_SEARCHING = 1e-4, 1e-3
"""Largest gradient at which a logistic fit stops (scikit-learn's default), for the final fit and for comparing
penalties. With the larger one, losses agree within 1 % and fits take two thirds of the time (docs/log)."""
PAST_THE_BEST = 1.05
"""The search over LOGISTIC_C stops once the inner-fold loss exceeds this multiple of the best so far. In every
measurement the loss had a single minimum over LOGISTIC_C, and fits with weaker penalties took half of the time; over
NEIGHBOURS it has several minima (docs/log)."""


def choose_readout(name: str) -> Readout:
    """The readout of this name. Raises EvaluationError if there is none."""
    if name not in get_args(Readout):
        raise EvaluationError(f"readout: expected one of {', '.join(get_args(Readout))}; got {name!r}")
    return name  # pyright: ignore[reportReturnType]


def fit_predict(
    readout: Readout | Literal["ordinal"],
    x: np.ndarray,
    y: np.ndarray,
    participant: np.ndarray,
    x_new: np.ndarray,
    num_classes: int,
    seed: int,
    widths: Sequence[int] = (),
) -> tuple[np.ndarray, float | tuple[float, ...]]:
    """Log-probabilities [new, K] (or predicted numbers [new, 1]), and the setting chosen by inner participant folds.

    `x` [n, F], `y` [n] and `participant` [n] are the training rows; `x_new` [new, F]. Classes have equal total weight.
    `num_classes` 0: regression. `widths`: channels of each part of a joint arm; linear models then penalise each part
    separately (`_choose_strengths`), and nearest neighbours give all parts the same weight.
    """
    import scipy.linalg  # noqa: F401  loads scipy's own BLAS: threadpool_limits affects only libraries that are loaded
    from threadpoolctl import threadpool_limits

    parts = [slice(end - width, end) for end, width in zip(np.cumsum(widths).tolist(), widths, strict=True)]
    if readout == "knn":
        grid, path = NEIGHBOURS, partial(_neighbours, parts=parts)
    elif readout == "trees":
        grid, path = ITERATIONS, partial(_trees, seed=seed)
    elif readout == "ordinal":
        grid, path = LOGISTIC_C, _ordinal
    else:
        grid, path = (LOGISTIC_C if num_classes else RIDGE_ALPHA), _linear
    search = partial(_linear, tolerance=WHILE_SEARCHING) if path is _linear else path
    fold = participant_folds(participant, y, INNER_FOLDS, seed, stratify=num_classes > 0)
    # With fewer participants than folds, some folds are empty.
    held_out = [h for h in (fold == k for k in range(INNER_FOLDS)) if h.any() and not h.all()]
    inner = [standardised(x[~h], x[h]) for h in held_out]

    def losses_of(scale: np.ndarray, kept: slice, settings: Sequence[float]) -> list[float]:
        """Loss over the inner folds for each setting, with the channels `kept` of `inner` multiplied by `scale`."""
        paths = [
            search(a[:, kept] * scale[kept], b[:, kept] * scale[kept], y[~h], num_classes, settings)
            for (a, b), h in zip(inner, held_out, strict=True)
        ]
        # Paths yield predictions setting by setting, so that the search can stop early.
        losses: list[float] = []
        for predicted in zip(*paths, strict=True):
            losses.append(sum(_loss(p, y[h], y, num_classes) for p, h in zip(predicted, held_out, strict=True)))
            if grid is LOGISTIC_C and losses[-1] > PAST_THE_BEST * min(losses):
                break
        return losses

    with threadpool_limits(1 if x.size <= SMALL else None, user_api="blas"):
        if len(parts) > 1 and readout in ("linear", "ordinal"):
            strengths = _choose_strengths(losses_of, parts, grid)
            scale = np.sqrt(np.repeat(strengths, widths))
            known, new = standardised(x, x_new)
            return next(path(known * scale, new * scale, y, num_classes, (1.0,))), strengths
        losses = losses_of(np.ones(x.shape[1]), slice(None), grid)
        best = grid[int(np.argmin(losses))] if losses else grid[0]
        return next(path(*standardised(x, x_new), y, num_classes, (best,))), best


def _choose_strengths(
    losses_of: Callable[[np.ndarray, slice, Sequence[float]], list[float]],
    parts: Sequence[slice],
    grid: Sequence[float],
) -> tuple[float, ...]:
    """The inverse penalty of each part of a joint arm, 0 for a part that is left out, chosen by inner folds.

    Candidates are each part alone, with the penalty that is best for it, and all parts together, with these penalties
    or with stronger ones for all parts or for one. So a part that adds nothing can be left out, however many channels
    it has.
    """
    best, candidates = [], []
    for place, part in enumerate(parts):
        losses = losses_of(np.ones(parts[-1].stop), part, grid)
        setting = grid[int(np.argmin(losses))] if losses else grid[0]
        best.append(setting if grid is LOGISTIC_C else 1 / setting)
        alone = [0.0] * len(parts)
        alone[place] = best[-1]
        candidates.append((min(losses, default=np.inf), tuple(alone)))
    less = np.ones((len(parts), len(parts))) - (1 - WEAKENED) * np.eye(len(parts))
    for share in [np.ones(len(parts)), np.full(len(parts), 1 / 3), *less]:
        strengths = np.array(best) * share
        scale = np.concatenate([np.full(p.stop - p.start, np.sqrt(s)) for p, s in zip(parts, strengths, strict=True)])
        losses = losses_of(scale, slice(None), (1.0,))
        candidates.append((min(losses, default=np.inf), tuple(float(s) for s in strengths)))
    return min(candidates)[1]


def standardised(x: np.ndarray, x_new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both standardised by the mean and standard deviation of the training rows `x`; new rows are limited to their
    range or to FARTHEST. Missing values (NaN) become the mean of the training rows."""
    if not (np.isfinite(x).all() and np.isfinite(x_new).all()):
        known = np.isfinite(x)
        usual = np.where(known, x, 0).sum(0) / np.maximum(1, known.sum(0))
        x, x_new = np.where(known, x, usual), np.where(np.isfinite(x_new), x_new, usual)
    mean, scale = x.mean(0), x.std(0)
    # A constant channel becomes 0; dividing it by its rounding noise would make it dominate.
    scale[scale <= 1e-6 * np.abs(mean)] = np.inf
    x, x_new = (x - mean) / scale, (x_new - mean) / scale
    # Without a limit, a channel that hardly varies in training, such as drusen of a few voxels, could outweigh all
    # others.
    most = np.maximum(np.abs(x).max(0), FARTHEST)
    return x, np.clip(x_new, -most, most)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Cosines [n, m] of unit vectors [n, F] and [m, F], rounded: products of equal rows may differ in their last bits,
    and equally near rows are ties."""
    return (a @ b.T).round(12)


def _linear(
    x: np.ndarray,
    x_new: np.ndarray,
    y: np.ndarray,
    num_classes: int,
    grid: Sequence[float],
    tolerance: float = TOLERANCE,
) -> Iterator[np.ndarray]:
    if num_classes == 0:
        yield from (found[:, None] for found in ridge(x, y, grid, x_new))
        return
    present = np.unique(y)
    if len(present) < 2:
        yield from (_nothing_known(len(x_new), num_classes) for _ in grid)
        return
    # Balanced, because balanced accuracy is reported and a screening cohort is mostly healthy.
    for found in logistic(x, y, grid, tolerance, x_new):
        # Only the classes that occur in this training part.
        log_p = _nothing_known(len(x_new), num_classes)
        log_p[:, present] = np.maximum(found, np.log(1e-12))
        yield log_p


def _trees(
    x: np.ndarray, x_new: np.ndarray, y: np.ndarray, num_classes: int, grid: Sequence[float], seed: int = 0
) -> Iterator[np.ndarray]:
    """Gradient-boosted trees with as many iterations as the grid says, all from one fit."""
    try:
        from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    except ImportError:
        raise EvaluationError("--readout trees needs scikit-learn: pip install 'octfm[bench]'") from None
    common = TREES | {"max_iter": int(max(grid)), "early_stopping": False, "random_state": seed}
    wanted, present = {int(n) for n in grid}, np.unique(y)
    if num_classes == 0:
        numbers = HistGradientBoostingRegressor(**common).fit(x, y).staged_predict(x_new)
        yield from (found[:, None] for n, found in enumerate(numbers, 1) if n in wanted)
        return
    if len(present) < 2:
        yield from (_nothing_known(len(x_new), num_classes) for _ in grid)
        return
    fitted = HistGradientBoostingClassifier(class_weight="balanced", **common).fit(x, y)
    for n, p in enumerate(fitted.staged_predict_proba(x_new), 1):
        if n in wanted:
            log_p = _nothing_known(len(x_new), num_classes)
            log_p[:, present] = np.log(np.maximum(p, 1e-12))
            yield log_p


def _neighbours(
    x: np.ndarray,
    x_new: np.ndarray,
    y: np.ndarray,
    num_classes: int,
    grid: Sequence[float],
    parts: Sequence[slice] = (),
) -> Iterator[np.ndarray]:
    """Votes of the nearest training rows by cosine similarity, weighted by the inverse class frequency."""
    for part in parts:
        # Standardised channels have a mean square of 1, so parts get equal weight whatever their number of channels.
        x, x_new = (np.hstack([v[:, : part.start], v[:, part] / np.sqrt(part.stop - part.start), v[:, part.stop :]])
                    for v in (x, x_new))  # fmt: skip
    unit, unit_new = (v / np.maximum(1e-12, np.linalg.norm(v, axis=1, keepdims=True)) for v in (x, x_new))
    few, most = max(1, MOST_PAIRS // len(unit)), int(max(grid))
    # Copied: a view would keep the order of all training rows in memory.
    order = np.concatenate([
        np.argsort(-cosines(unit_new[i : i + few], unit), axis=1, kind="stable")[:, :most].copy()
        for i in range(0, len(unit_new), few)
    ])  # fmt: skip
    if num_classes == 0:
        yield from (y[order[:, : int(k)]].mean(1)[:, None] for k in grid)
        return
    # Balanced like the linear readout: votes of rarer classes count more.
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
