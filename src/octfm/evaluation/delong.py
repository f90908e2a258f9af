"""Variance of AUROC by formula, to cross-check the bootstrap: DeLong for independent cases, Obuchowski for clusters."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Areas:
    """AUROC of M scores on the same cases."""

    area: np.ndarray
    """[M]"""
    covariance: np.ndarray
    """[M, M]"""
    clustered: bool
    """True if a cluster has several cases (Obuchowski 1997); False if none has (DeLong 1988)."""

    def interval(self) -> tuple[float, float]:
        """95 % Wald interval of the first area, clipped to 0..1. Too narrow near 1 and for few cases; reports show the
        bootstrap interval."""
        from scipy.special import ndtri

        half = ndtri((1 + 0.95) / 2) * np.sqrt(self.covariance[0, 0])
        return float(max(0, self.area[0] - half)), float(min(1, self.area[0] + half))

    def p(self, a: int = 0, b: int = 1) -> float:
        """Two-sided p value for a difference between two of the areas; 1 if their difference has no variance."""
        from scipy.special import ndtr

        variance = self.covariance[a, a] + self.covariance[b, b] - 2 * self.covariance[a, b]
        difference = abs(self.area[a] - self.area[b])
        return 1.0 if variance <= 1e-15 else float(2 * ndtr(-difference / np.sqrt(variance)))


def areas(positive: np.ndarray, scores_nM: np.ndarray, cluster: np.ndarray | None = None) -> Areas:
    """AUROC of every column of `scores_nM` and their covariance; `positive` bool [n], `cluster` [n]: participant ids.

    Structural components of DeLong, DeLong & Clarke-Pearson (Biometrics 1988), computed from ranks, summed within
    clusters, and with the covariance of a cluster's positive and negative cases (Obuchowski, Biometrics 1997). Clusters
    of one case give DeLong's variance. Raises ValueError for fewer than two cases, or clusters, of either class.
    """
    from scipy.stats import rankdata

    positive = np.asarray(positive, bool)
    scores_nM = np.asarray(scores_nM, float).reshape(len(positive), -1)
    m, n = int(positive.sum()), int((~positive).sum())
    if min(m, n) < 2:
        raise ValueError(f"expected two cases or more of either class, got {m} positive and {n} negative")
    member = np.unique(np.arange(len(positive)) if cluster is None else cluster, return_inverse=True)[1]
    ranks = rankdata(scores_nM, axis=0)
    # The structural components: the share of negatives that each positive beats, and the other way round.
    wins = np.empty_like(scores_nM)
    # The rank among all less that within the own class counts the other class below it; ties count half.
    wins[positive] = (ranks[positive] - rankdata(scores_nM[positive], axis=0)) / n
    wins[~positive] = 1 - (ranks[~positive] - rankdata(scores_nM[~positive], axis=0)) / m
    area = wins[positive].mean(0)
    centred = wins - area
    parts, present = [], []
    for side in (positive, ~positive):
        total = np.zeros((member.max() + 1, len(area)))
        np.add.at(total, member[side], centred[side])
        parts.append(total)
        present.append(len(np.unique(member[side])))
    clusters = len(np.unique(member))
    (x, y), (with_positive, with_negative) = parts, present
    if min(with_positive, with_negative) < 2:
        raise ValueError("all cases of one class belong to one cluster; its variance cannot be estimated")
    covariance = (
        x.T @ x * with_positive / (with_positive - 1) / m**2 + y.T @ y * with_negative / (with_negative - 1) / n**2
    )
    covariance += (x.T @ y + y.T @ x) * clusters / (clusters - 1) / (m * n)
    return Areas(area, covariance, clustered=clusters < len(positive))
