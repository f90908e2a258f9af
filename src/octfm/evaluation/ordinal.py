"""Proportional-odds regression (McCullagh 1980) for ordered grades: one direction and K − 1 thresholds."""

import numpy as np

from octfm.evaluation.linear import WIDE, inverse_root


def proportional_odds(
    x: np.ndarray, grade: np.ndarray, num_grades: int, c: float, weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(direction [width], thresholds [num_grades − 1]) of P(grade ≤ k) = σ(threshold_k − x · direction).

    Minimises ½ |direction|² + C · Σ weight · negative log-likelihood, with the penalty of scikit-learn's logistic
    regression. Every grade must occur.
    """
    from scipy.optimize import minimize
    from scipy.special import expit

    w = np.ones(len(x)) if weight is None else weight
    share = np.cumsum(np.bincount(grade, weights=w, minlength=num_grades))[:-1] / w.sum()
    # Thresholds that give the grades' frequencies while the direction is zero.
    start = np.log(share / (1 - share))
    # Parametrised by the first threshold and the logarithms of the gaps, so that thresholds stay in order.
    begin = np.concatenate([np.zeros(x.shape[1]), start[:1], np.log(np.maximum(np.diff(start), 1e-3))])
    # In units that give the direction unit curvature at the start, and thresholds about as much: far fewer steps.
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
