"""Logistic, ridge and proportional-odds regression on frozen embeddings, solved with scipy.

The first two have the objectives of scikit-learn, which would add 56 MB for them alone; tests compare the results.
"""

from collections.abc import Iterator, Sequence

import numpy as np

STEPS = 2000
WIDE = 768
"""With more channels than this, `inverse_root` would cost more than the steps that it saves."""


def logistic(
    x: np.ndarray, y: np.ndarray, strengths: Sequence[float], tolerance: float, x_new: np.ndarray
) -> Iterator[np.ndarray]:
    """For each C of `strengths`, log-probabilities [new, classes of y in sorted order] of a fit with L2 penalty 1 / C
    and balanced classes: the objective of scikit-learn's LogisticRegression(C=C, class_weight="balanced").

    `y` [n] are classes of the rows of `x` [n, F]. The fit stops once no element of the gradient exceeds `tolerance`, as
    in scikit-learn. Steps are taken in coordinates in which the curvature at the start is the identity, so that a
    quarter of them suffices (docs/log).
    """
    classes, index = np.unique(y, return_inverse=True)
    first = int(len(classes) == 2)  # of two classes, the first has logit 0
    weight = (1 / (len(classes) * np.bincount(index)))[index]
    x, x_new = (np.column_stack([v, np.ones(len(v))]) for v in (x, x_new))  # the last column is the intercept
    # At the start all classes are equally probable.
    curvature = x.T @ (x * weight[:, None]) / (4 if first else len(classes)) if x.shape[1] <= WIDE else None
    for strength in strengths:
        penalty = np.full(x.shape[1], 1 / (strength * len(y)))
        penalty[-1] = 0
        inverse = None if curvature is None else inverse_root(curvature, penalty)
        yield _log_probability(x_new, _fitted(x, index, weight, penalty, inverse, tolerance), first).T


def _fitted(
    x: np.ndarray,
    index: np.ndarray,
    weight: np.ndarray,
    penalty: np.ndarray,
    inverse: np.ndarray | None,
    tolerance: float,
) -> np.ndarray:
    """Slopes and intercepts [K - first, F] for classes `index` [N] of rows with a weight each."""
    from scipy.optimize import minimize

    truth, rows = np.eye(index.max() + 1)[:, index], np.arange(len(index))
    first = int(len(truth) == 2)
    largest = np.inf

    def theta_of(flat: np.ndarray) -> np.ndarray:
        theta = flat.reshape(len(truth) - first, -1)
        return theta if inverse is None else theta @ inverse

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal largest
        theta = theta_of(flat)
        log_p = _log_probability(x, theta, first)
        shrinkage = penalty * theta
        gradient = (weight * (np.exp(log_p) - truth))[first:] @ x + shrinkage
        largest = np.abs(gradient).max()
        gradient = gradient if inverse is None else gradient @ inverse.T
        return float((shrinkage * theta).sum() / 2 - weight @ log_p[index, rows]), gradient.ravel()

    def stop(_: np.ndarray) -> None:
        # A step ends at the point that was evaluated last.
        if largest <= tolerance:
            raise StopIteration

    options = {"maxiter": STEPS, "maxls": 50, "gtol": 0, "ftol": 64 * np.finfo(float).eps}
    start = np.zeros((len(truth) - first) * x.shape[1])
    return theta_of(minimize(objective, start, jac=True, method="L-BFGS-B", options=options, callback=stop).x)


def inverse_root(curvature: np.ndarray, penalty: np.ndarray) -> np.ndarray:
    """R [F, F] with R (curvature + diag(penalty)) R^T = 1: parameters z R have unit curvature in z."""
    from scipy.linalg import solve_triangular

    root = np.linalg.cholesky(curvature + np.diag(penalty))
    return solve_triangular(root, np.eye(len(root)), lower=True, check_finite=False)


def _log_probability(x: np.ndarray, theta: np.ndarray, first: int) -> np.ndarray:
    """[K, N] from slopes and intercepts [K - first, F]."""
    logits = np.zeros((len(theta) + first, len(x)))
    logits[first:] = theta @ x.T
    logits -= logits.max(0)
    logits -= np.log(np.exp(logits).sum(0))
    return logits


def ridge(x: np.ndarray, y: np.ndarray, penalties: Sequence[float], x_new: np.ndarray) -> Iterator[np.ndarray]:
    """For each L2 penalty, predictions [new] of a least-squares fit whose intercept is not penalised."""
    centre, mean = x.mean(0), y.mean()
    x, y = x - centre, y - mean
    wide = len(x) < x.shape[1]  # the smaller of two equal systems
    products, right = (x @ x.T, y) if wide else (x.T @ x, x.T @ y)
    for penalty in penalties:
        solved = np.linalg.solve(products + penalty * np.eye(len(products)), right)
        yield (x_new - centre) @ (x.T @ solved if wide else solved) + mean


def proportional_odds(
    x: np.ndarray, grade: np.ndarray, num_grades: int, c: float, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Fit P(grade ≤ k) = σ(threshold_k − x · direction): direction [width] and thresholds [num_grades − 1].

    `grade` [n] is 0..num_grades − 1, and every grade must occur. Minimises ½ |direction|² + C · Σ weight · negative
    log-likelihood, with the penalty of scikit-learn's logistic regression.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    w = np.ones(len(x)) if weight is None else weight
    share = np.cumsum(np.bincount(grade, weights=w, minlength=num_grades))[:-1] / w.sum()
    # Thresholds that give the grades' frequencies while the direction is zero.
    start = np.log(share / (1 - share))
    # Parametrised by the first threshold and the logarithms of the gaps, so that thresholds stay in order.
    begin = np.concatenate([np.zeros(x.shape[1]), start[:1], np.log(np.maximum(np.diff(start), 1e-3))])
    # In units in which the curvature at the start is 1 for the direction, and about 1 for thresholds: far fewer steps.
    below = np.concatenate([[0], share, [1]])
    curvature = w * (below * (1 - below))[np.stack([grade, grade + 1])].sum(0)
    inverse = None
    if x.shape[1] <= WIDE:
        inverse = inverse_root(c * x.T @ (x * curvature[:, None]), np.ones(x.shape[1]))
    unit = (c * curvature.sum()) ** -0.5

    def split(parameters: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        direction, first, gaps = np.split(parameters, [x.shape[1], x.shape[1] + 1])
        return direction if inverse is None else direction @ inverse, unit * first, unit * gaps

    def loss(parameters: np.ndarray) -> tuple[float, np.ndarray]:
        direction, first, gaps = split(parameters)
        thresholds = np.cumsum(np.concatenate([first, np.exp(gaps)]))
        eta = x @ direction
        edges = np.concatenate([[-np.inf], thresholds, [np.inf]])
        upper, lower = expit(edges[grade + 1] - eta), expit(edges[grade] - eta)
        p = np.maximum(upper - lower, 1e-12)
        d_upper, d_lower = w * upper * (1 - upper) / p, w * lower * (1 - lower) / p
        above, below = (np.bincount(grade, weights=d, minlength=num_grades) for d in (d_upper, d_lower))
        # Threshold k is the upper edge of grade k and the lower one of grade k + 1.
        by_edge = above[:-1] - below[1:]
        # Chain rule: a gap moves its own threshold and all that follow.
        following = np.cumsum(by_edge[::-1])[::-1]
        by_threshold = np.concatenate([following[:1], following[1:] * np.exp(gaps)])
        by_direction = direction + c * (x.T @ (d_upper - d_lower))
        by_direction = by_direction if inverse is None else inverse @ by_direction
        gradient = np.concatenate([by_direction, -c * unit * by_threshold])
        return float(0.5 * direction @ direction - c * (w * np.log(p)).sum()), gradient

    begin[x.shape[1] :] /= unit
    found = minimize(loss, begin, jac=True, method="L-BFGS-B", options={"maxiter": 500})
    direction, first, gaps = split(found.x)
    return direction, np.cumsum(np.concatenate([first, np.exp(gaps)]))


def grade_probability(x: np.ndarray, direction: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """[n, K] probabilities of the grades."""
    from scipy.special import expit

    below = expit(thresholds[None, :] - (x @ direction)[:, None])
    return np.diff(np.hstack([np.zeros((len(x), 1)), below, np.ones((len(x), 1))]), axis=1).clip(1e-12)
