"""AdamW for parameters of which every rank holds a share: the fused kernel, on the shares themselves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, bit for bit, without its first step: given DTensors, that one asks a fake tensor what the kernel returns.

    For the fused kernels nobody has written that down, so torch computes it on real zeros of the whole shapes (torch 2.13): weights,
    gradients and both moments of the whole model at once, on every rank, in a mode whose point is that they do not fit.
    """

    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float], local: Callable[[Tensor], Tensor]
    ):
        """`local` is this rank's share of a tensor, sharing its memory."""
        super().__init__(groups, lr=lr, betas=betas, weight_decay=0.0, fused=True)
        self.local = local

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; where `found_inf` is 1 the same kernel runs and changes nothing."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if not self.state[p]:
                    moments = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
                    self.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32, device=self.local(p).device),
                        **moments,
                    }
            states = [self.state[p] for p in trained]
            gradients = [self.local(p.grad) for p in trained]
            weights, means, squares = (
                [self.local(p) for p in trained],
                *([self.local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")),
            )
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                weights, gradients, means, squares, [], steps, lr=group["lr"], beta1=group["betas"][0], beta2=group["betas"][1],
                weight_decay=group["weight_decay"], eps=group["eps"], amsgrad=False, maximize=False, found_inf=self.found_inf,
            )  # fmt: skip
            if self.found_inf is not None:
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))
