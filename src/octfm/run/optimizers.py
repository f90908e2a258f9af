"""AdamW in two forms that torch lacks: plain operations for compiled steps, the fused kernel on shards (FSDP2)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def no_moments(parameter: Tensor, device: torch.device) -> dict[str, Tensor]:
    """The state of a parameter before AdamW's first step."""
    zeros = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.zeros((), dtype=torch.float32, device=device), **zeros}


class CompiledAdamW(torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) like torch's fused kernel, with `found_inf` and the same names of its state. Moments
    exist from the start: a first step that created them would compile to another program than the second."""

    found_inf: Tensor

    def __init__(
        self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float], send: Callable[[Tensor], Tensor]
    ):
        """`send` copies a tensor from the host to the device."""
        self.send = send
        # Without `lr` yet: torch would read its value, which compiles a program of its own.
        super().__init__(groups, betas=betas, weight_decay=0.0, foreach=False, capturable=True)
        for group in self.param_groups:
            group["lr"] = lr
            for p in group["params"]:
                self._begin(p)

    def _begin(self, p: Tensor) -> None:
        # Created on the host: zeros computed on the device would be one more program to compile.
        self.state[p] = {
            "step": self.send(torch.zeros(())),
            **{n: self.send(torch.zeros(p.shape)) for n in ("exp_avg", "exp_avg_sq")},
        }

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update if `found_inf` is 0; if it is 1, the same operations change nothing, whatever the gradients."""
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
                # In a step that is not made, `change` may be NaN: torch.where does not choose it.
                p.copy_(torch.where(yes, p - change, p))
                for name, value in (("step", count), ("exp_avg", mean), ("exp_avg_sq", square)):
                    state[name].copy_(value)


class ShardedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, bit for bit, called on this rank's shares instead of on DTensors.

    On the first step with DTensors, torch (2.13) infers what the fused kernel returns by running it on zeros of the
    whole model's shapes, on every rank, where they need not fit."""

    found_inf: Tensor | None = None

    def __init__(
        self, groups: list[dict[str, Any]], lr: Tensor, betas: tuple[float, float], local: Callable[[Tensor], Tensor]
    ):
        """`local` is this rank's share of a tensor, sharing its memory."""
        super().__init__(groups, lr=lr, betas=betas, weight_decay=0.0, fused=True)
        self.local = local

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update; if `found_inf` is 1, the same kernel runs and changes nothing."""
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            for p in trained:
                if not self.state[p]:
                    self.state[p] = no_moments(p, self.local(p).device)
            states = [self.state[p] for p in trained]
            gradients = [self.local(p.grad) for p in trained]
            weights, means, squares = (
                [self.local(p) for p in trained],
                *([self.local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")),
            )
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                weights, gradients, means, squares, [], steps, lr=group["lr"],
                beta1=group["betas"][0], beta2=group["betas"][1], weight_decay=group["weight_decay"], eps=group["eps"],
                amsgrad=False, maximize=False, found_inf=self.found_inf,
            )  # fmt: skip
            if self.found_inf is not None:
                # The kernel leaves weights and moments as they were, but the count was raised before it.
                torch._foreach_sub_(steps, [self.found_inf] * len(steps))
