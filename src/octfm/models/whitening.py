"""Whiten the target encoder's features, so that every direction has the same weight in the loss.

Layer norm acts on single tokens and does not decorrelate features. On OCT a few directions (which layer, how deep) hold
nearly all of their variance and so dominate the loss; the others are lost within a few hundred updates. Whitening the
targets keeps their rank. Ermolov et al. (arXiv:2007.06346) whiten both views; here only the targets are whitened,
from running moments.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def _alone(*tensors: Tensor) -> None:
    """The sum over ranks if there is only one: tensors stay as they are."""


class Whitening(nn.Module):
    """ZCA whitening of each level's features by moments of previous updates; a batch does not affect its own targets.

    Moments are accumulated over all micro-batches of an update and used from the next update on, so the result does not
    depend on how a batch is split.
    """

    mean_LD: Tensor
    moment_LDD: Tensor
    matrix_LDD: Tensor
    updates: Tensor

    def __init__(self, levels: int, width: int, shrinkage: float = 0.01, window: int = 5, refresh: int = 10):
        """`shrinkage`: share of the mean eigenvalue that is added to all eigenvalues. `window`: updates over which
        moments are averaged. `refresh`: the matrix is computed at each of the first 100 updates, when features change
        most, then at every `refresh`-th.
        """
        super().__init__()
        self.shrinkage, self.window, self.refresh = shrinkage, window, refresh
        self.register_buffer("mean_LD", torch.zeros(levels, width))
        self.register_buffer("moment_LDD", torch.eye(width).repeat(levels, 1, 1))
        self.register_buffer("matrix_LDD", torch.eye(width).repeat(levels, 1, 1))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self._gathered: list[tuple[Tensor, Tensor, int]] = []
        self.over_ranks: Callable[..., None] = _alone
        """Sums tensors over all ranks in place, so that moments are those of the global batch."""

    @torch.no_grad()
    def forward(self, features: list[Tensor], *, gather: bool) -> Tensor:
        """Targets [B, M, L * D] from the features [B, M, D] of every level; `gather` accumulates their moments."""
        # Second moments need float32: in bfloat16 small eigenvalues would be rounding noise.
        with torch.autocast(features[0].device.type, enabled=False):
            rows_LND = torch.stack([f.float().flatten(0, 1) for f in features])
            if gather:
                self._gathered.append((rows_LND.sum(1), rows_LND.transpose(1, 2) @ rows_LND, rows_LND.shape[1]))
            goals_LND = (rows_LND - self.mean_LD.unsqueeze(1)) @ self.matrix_LDD
        return goals_LND.transpose(0, 1).flatten(1).unflatten(0, features[0].shape[:2])

    def discard(self) -> None:
        """Discard the moments accumulated since the last update."""
        self._gathered.clear()

    @torch.no_grad()
    def update(self) -> None:
        """Update the running moments, and when due the matrix, from what was accumulated since the last update."""
        if not self._gathered:
            return
        total = torch.full((), float(sum(count for _, _, count in self._gathered)), device=self.mean_LD.device)
        sum_LD = torch.stack([s for s, _, _ in self._gathered]).sum(0)
        product_LDD = torch.stack([m for _, m, _ in self._gathered]).sum(0)
        self._gathered.clear()
        self.over_ranks(total, sum_LD, product_LDD)
        mean_LD, moment_LDD = sum_LD / total, product_LDD / total
        self.updates += 1
        # Waits for the device, as the eigendecomposition does.
        updates = int(self.updates)
        # 1 at the first update, which replaces the initial moments; then a plain mean until the window is full.
        share = 1 / min(updates, self.window)
        self.mean_LD.lerp_(mean_LD, share)
        self.moment_LDD.lerp_(moment_LDD, share)
        # An eigendecomposition costs little compared with an update on a CPU, but not on a fast GPU.
        if updates <= 100 or updates % self.refresh == 0:
            covariance = self.moment_LDD - self.mean_LD.unsqueeze(2) * self.mean_LD.unsqueeze(1)
            value_LD, vector_LDD = torch.linalg.eigh(covariance)
            floor_L1 = self.shrinkage * value_LD.clamp_min(0).mean(1, keepdim=True)
            # With few tokens the covariance has zero eigenvalues, and rounding may make them negative.
            scale_LD = (value_LD.clamp_min(0) + floor_L1).clamp_min(1e-12).rsqrt()
            self.matrix_LDD.copy_((vector_LDD * scale_LD.unsqueeze(1)) @ vector_LDD.transpose(1, 2))
