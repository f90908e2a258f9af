"""Logistic and ridge regression on frozen embeddings: the objectives of scikit-learn, solved with scipy.

scikit-learn would be 56 MB for these two; tests compare the results with it.
"""

import numpy as np

STEPS = 2000


def logistic(x: np.ndarray, y: np.ndarray, c: float, tolerance: float, x_new: np.ndarray) -> np.ndarray:
    """Log-probabilities [new, classes of y in sorted order] of a fit with L2 penalty 1/c and balanced classes.

    Solver and stopping rule of scikit-learn's LogisticRegression(C=c, class_weight="balanced", tol=tolerance).
    """
    from scipy.optimize import minimize

    classes, index = np.unique(y, return_inverse=True)
    truth = np.eye(len(classes), dtype=x.dtype)[index]
    weight = (1 / (len(classes) * np.bincount(index)))[index].astype(x.dtype)[:, None]
    penalty, first = 1 / (c * len(y)), int(len(classes) == 2)  # of two classes, the first has logit 0

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        theta = flat.reshape(len(classes) - first, -1).astype(x.dtype)
        log_p = _log_probability(x, theta, first)
        residual = (weight * (np.exp(log_p) - truth))[:, first:]
        slopes = theta[:, :-1]
        gradient = np.hstack([residual.T @ x + penalty * slopes, residual.sum(0)[:, None]])
        loss = -float((weight * truth * log_p).sum(dtype=np.float64)) + penalty / 2 * float((slopes**2).sum())
        return loss, gradient.astype(np.float64).ravel()

    start = np.zeros((len(classes) - first) * (x.shape[1] + 1))
    options = {"maxiter": STEPS, "maxls": 50, "gtol": tolerance, "ftol": 64 * np.finfo(float).eps}
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options=options)
    return _log_probability(x_new, found.x.reshape(len(classes) - first, -1), first)


def _log_probability(x: np.ndarray, theta: np.ndarray, first: int) -> np.ndarray:
    """[N, K] from slopes and intercepts [K - first, F + 1]."""
    logits = np.pad(x @ theta[:, :-1].T + theta[:, -1], ((0, 0), (first, 0)))
    logits -= logits.max(1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def ridge(x: np.ndarray, y: np.ndarray, alpha: float, x_new: np.ndarray) -> np.ndarray:
    """Predictions [new] of a least-squares fit with L2 penalty alpha and an intercept without penalty."""
    centre, mean = x.mean(0), y.mean()
    x, y = x - centre, y - mean
    if len(x) < x.shape[1]:  # the smaller of two equal systems
        slopes = x.T @ np.linalg.solve(x @ x.T + alpha * np.eye(len(x)), y)
    else:
        slopes = np.linalg.solve(x.T @ x + alpha * np.eye(x.shape[1]), x.T @ y)
    return (x_new - centre) @ slopes + mean
