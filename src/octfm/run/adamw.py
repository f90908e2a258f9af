"""AdamW of plain tensor operations, for compiled steps: nothing of it is read by the host or is a constant of one step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class CompiledAdamW(torch.optim.AdamW):
    """arXiv:1711.05101 as torch's fused kernel does it, `found_inf` and the names of its state included.

    Moments exist from the start: a first step that made them would be another program than the second.
    """

    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float], send: Callable[[Tensor], Tensor]
    ):
        """`send` brings a tensor of the host to the device."""
        self.send = send
        # Not with `lr` yet: it would be looked at, and be a program of its own.
        super().__init__(groups, betas=betas, weight_decay=0.0, foreach=False, capturable=True)
        for group in self.param_groups:
            group["lr"] = lr
            for p in group["params"]:
                self._begin(p)

    def _begin(self, p: Tensor) -> None:
        # Made on the host: zeros that a device computes would be one more program to compile.
        self.state[p] = {
            "step": self.send(torch.zeros(())),
            **{n: self.send(torch.zeros(p.shape)) for n in ("exp_avg", "exp_avg_sq")},
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update where `found_inf` is 0; the same operations and no change where it is 1, whatever the gradients hold."""
        yes = self.found_inf == 0
        for group in self.param_groups:
            rate, (beta1, beta2), eps = group["lr"], group["betas"], group["eps"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if not self.state[p]:
                    self._begin(p)
                state, gradient = self.state[p], p.grad
                count = state["step"] + yes.to(state["step"].dtype)
                mean = torch.where(yes, state["exp_avg"] * beta1 + gradient * (1 - beta1), state["exp_avg"])
                square = torch.where(
                    yes, state["exp_avg_sq"] * beta2 + gradient * gradient * (1 - beta2), state["exp_avg_sq"]
                )
                bias1, bias2 = (1 - beta**count for beta in (beta1, beta2))
                change = rate / bias1 * mean / (square.sqrt() / bias2.sqrt() + eps)
                # In a step that is not made, change may be no number: it is not chosen.
                p.copy_(torch.where(yes, p - change, p))
                for name, value in (("step", count), ("exp_avg", mean), ("exp_avg_sq", square)):
                    state[name].copy_(value)
