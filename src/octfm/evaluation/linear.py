"""Logistic and ridge regression on frozen embeddings: the objectives of scikit-learn, solved with scipy.

scikit-learn would be 56 MB for these two; tests compare the results with it.
"""

from collections.abc import Iterator, Sequence

import numpy as np

STEPS = 2000
WIDE = 768
"""Most channels for which `inverse_root` costs less than the steps that it saves."""


def logistic(
    x: np.ndarray, y: np.ndarray, strengths: Sequence[float], tolerance: float, x_new: np.ndarray
) -> Iterator[np.ndarray]:
    """For each C of `strengths`, log-probabilities [new, classes of y in sorted order] of a fit with L2 penalty 1 / C
    and balanced classes: the objective of scikit-learn's LogisticRegression(C=C, class_weight="balanced").

    The fit stops once no element of the gradient exceeds `tolerance`, as there. Its steps are taken in coordinates in
    which the curvature at the start is the identity: a quarter of them suffices (docs/log).
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
    """For each L2 penalty, predictions [new] of a least-squares fit whose intercept has none."""
    centre, mean = x.mean(0), y.mean()
    x, y = x - centre, y - mean
    wide = len(x) < x.shape[1]  # the smaller of two equal systems
    products, right = (x @ x.T, y) if wide else (x.T @ x, x.T @ y)
    for penalty in penalties:
        solved = np.linalg.solve(products + penalty * np.eye(len(products)), right)
        yield (x_new - centre) @ (x.T @ solved if wide else solved) + mean
