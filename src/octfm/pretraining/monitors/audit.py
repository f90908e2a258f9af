"""Audit of an update: follow some rows of every weight matrix from gradient to optimizer moments to weights.

Each link is compared with its expected value, so a lost sign, rate or part of the network shows in one inspection
instead of thousands of steps. Weight decay is excluded: it also moves weights that get no gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octfm.models.token_map import token_grid
from octfm.pretraining.learner import Learner
from octfm.run.runtime import widest_on

ROWS = 16
"""Rows followed in each matrix; a copy of all weights would cost memory and time."""
FROZEN = 0.4
"""Share of a matrix without gradient or movement at which it counts as frozen; in healthy runs there is none."""
TINY = 1e-6
"""An update smaller than this share of the weights is lost in float32 rounding."""
SUMS = (
    "passes_final", "final_final", "actual_ideal", "actual_actual", "ideal_ideal", "moment_error", "taken",
    "moment_moment", "no_gradient", "still", "size", "weights",
)  # fmt: skip
"""Quantities summed over the followed rows of a matrix and over ranks, in the order in which `Audit.end` computes them.
Two words mean a product: `passes_final` is that of the passes' gradient and the final one."""


@torch.no_grad()
def gradients(learner: Learner) -> list[Tensor]:
    """Copies of the followed rows of every gradient; zeros for a matrix without one."""
    return [_gradient(learner, p).clone() for p in _matrices(learner).values()]


@dataclass(frozen=True, eq=False)
class Audit:
    """Copies of the followed rows taken before an update."""

    passes: list[Tensor]
    """Gradients after this rank's backward passes."""
    final: list[Tensor]
    """Gradients that the optimizer gets, averaged over ranks and clipped."""
    weights: list[Tensor]
    mean: list[Tensor]
    """First moments."""

    @classmethod
    @torch.no_grad()
    def begin(cls, learner: Learner, passes: list[Tensor]) -> "Audit":
        matrices = _matrices(learner).values()
        return cls(
            passes,
            [_gradient(learner, p).clone() for p in matrices],
            [_rows(learner, p).clone() for p in matrices],
            [_moment(learner, p, "exp_avg").clone() for p in matrices],
        )

    @torch.no_grad()
    def end(self, learner: Learner) -> dict[str, Tensor]:
        """Sums [matrices, len(SUMS)] over ranks, and the optimizer's count of updates."""
        group = learner.optimizer.param_groups[0]
        (beta1, beta2), eps, rate = group["betas"], group["eps"], learner.lr
        keep = 1 - group["lr"] * learner.weight_decay
        decayed = {id(p) for p in learner.decayed}
        sums, counted = [], []
        widest = widest_on(learner.runtime.device)
        parts = zip(_matrices(learner).values(), self.passes, self.final, self.weights, self.mean, strict=True)
        for p, passes, final, weights, mean in parts:
            state = learner.optimizer.state.get(p, {})
            now, first, second = _rows(learner, p), _moment(learner, p, "exp_avg"), _moment(learner, p, "exp_avg_sq")
            # The weights after decay alone, so that `actual` is the gradient's part of the movement.
            (before,) = torch._foreach_mul([weights], keep if id(p) in decayed else torch.ones_like(learner.lr))
            count = state["step"] if "step" in state else torch.zeros_like(learner.lr)
            counted.append(count.detach().to(learner.lr).reshape(()))
            actual = now - before
            # AdamW's step from its own moments (arXiv:1711.05101), with bias correction.
            bias1, bias2 = (1 - beta ** counted[-1].clamp_min(1) for beta in (beta1, beta2))
            ideal = -(rate / bias1) * first / (second.sqrt() / bias2.sqrt() + eps)
            expected = beta1 * mean + (1 - beta1) * final
            sums.append(
                torch.stack([x.to(widest) for x in (
                    (passes * final).sum(), final.square().sum(),
                    (actual * ideal).sum(), actual.square().sum(), ideal.square().sum(),
                    (first - expected).square().sum(), ((first - beta1 * mean) * final).sum() / (1 - beta1),
                    expected.square().sum(), (final == 0).sum(), ((actual == 0) | (now == weights)).sum(),
                    torch.full((), now.numel(), device=now.device), weights.square().sum(),
                )])
            )  # fmt: skip
        whole = torch.stack(sums)
        learner.runtime.sum_(whole)
        return {"audit": whole, "counted": torch.stack(counted).max()}


def summary(names: list[str], audit: Tensor) -> dict[str, Any]:
    """Columns of metrics.jsonl from the sums of an update.

    `gradient_agrees`: projection of the passes' gradient on the optimizer's, over the latter, for the worst matrix; 1,
    or more if clipped. `gradient_taken`: the same for what the optimizer added to its moments. `update_agrees` and
    `update_size`: cosine and relative size of the movement against learning rate and moments; absent if the whole
    update is rounding. `moments_astray`: relative error of the first moment. `weights_stuck`: share of weights that did
    not move, or by decay only. `untaught`: matrices of which at least FROZEN gets no gradient. `frozen`: names of the
    encoder's matrices of which at least FROZEN gets no gradient or does not move.
    """
    s = dict(zip(SUMS, audit.cpu().double().unbind(1), strict=True))
    least = 1e-60
    # Averaging over ranks leaves 1, clipping makes it more. Matrices without gradient have nothing to compare.
    agrees = (s["passes_final"] / s["final_final"].clamp_min(least))[s["final_final"] > 0]
    row: dict[str, Any] = {
        "gradient_taken": float(s["taken"].sum() / s["final_final"].sum()) if s["final_final"].any() else 1.0,
        "gradient_agrees": float(agrees.min()) if len(agrees) else 1.0,
        "moments_astray": float((s["moment_error"].sum() / s["moment_moment"].sum().clamp_min(least)).sqrt()),
        "weights_stuck": float(s["still"].sum() / s["size"].sum()),
    }
    moves = s["ideal_ideal"] > TINY**2 * s["weights"]
    if moves.any():
        dot, actual, ideal = (s[name][moves].sum() for name in ("actual_ideal", "actual_actual", "ideal_ideal"))
        row["update_agrees"] = float(dot / (actual * ideal).clamp_min(least).sqrt())
        row["update_size"] = float((actual / ideal).sqrt())
    frozen = s["no_gradient"] > FROZEN * s["size"]
    row["untaught"] = int(frozen.sum())
    # Rounding hides part of a tiny update in any matrix, so the update must be well above it.
    frozen |= (s["still"] > FROZEN * s["size"]) & (s["ideal_ideal"] > (10 * TINY) ** 2 * s["weights"])
    # A gradient, but no moments and no update: the matrix is missing from the optimizer's groups.
    frozen |= (
        (s["final_final"] > 0)
        & ((s["moment_error"] - s["moment_moment"]).abs() < 0.1 * s["moment_moment"])
        & (s["ideal_ideal"] == 0)
    )
    found = zip(names, frozen.tolist(), strict=True)
    row["frozen"] = [
        name.removeprefix("encoder.") for name, is_frozen in found if is_frozen and name.startswith("encoder.")
    ]
    return row


def names(learner: Learner) -> list[str]:
    """Names of the followed matrices, in the order of the sums."""
    return list(_matrices(learner))


def _matrices(learner: Learner) -> dict[str, Tensor]:
    """Weight matrices that should learn, including any that the optimizer lacks by mistake; without tables of positions
    (a batch uses few rows) and, if the encoder sees one token, query-key-value weights (they have no gradient)."""
    grid = token_grid(learner.preprocessing.image_size, learner.config.model.patch_size)
    alone = learner.config.masks.counts(grid)[1] == 1
    return {
        name: p
        for name, p in learner.model.named_parameters()
        if p.ndim == 2
        and not name.startswith("target_")
        and "position" not in name
        and not (alone and name.endswith("attn.qkv.weight"))
    }


def _rows(learner: Learner, tensor: Tensor) -> Tensor:
    whole = learner.runtime.local(tensor.detach())
    return whole[:: max(1, len(whole) // ROWS)][:ROWS]


def _gradient(learner: Learner, p: Tensor) -> Tensor:
    return _rows(learner, p.grad if p.grad is not None else torch.zeros_like(p))


def _moment(learner: Learner, p: Tensor, name: str) -> Tensor:
    moment = learner.optimizer.state.get(p, {}).get(name)
    return _rows(learner, moment if moment is not None else torch.zeros_like(p))
