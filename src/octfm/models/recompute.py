"""Activation checkpointing: keep only a block's input and recompute the rest in backward (arXiv:1604.06174)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def through(block: nn.Module, x_BMD: Tensor, turn: tuple[Tensor, Tensor] | None, again: bool) -> Tensor:
    """A block's output [B, M, D]; with `again`, its intermediate results are recomputed in the backward pass, not kept.

    `turn`: rotary factors of `turn_qkv`, None without rotary positions.
    """
    if not (again and torch.is_grad_enabled()):
        return block(x_BMD, turn)
    if x_BMD.device.type == "xla":
        return Recomputed.apply(block, turn, x_BMD, *block.parameters())  # pyright: ignore[reportReturnType]
    # No block draws random numbers, so there is no generator to restore.
    return checkpoint(block, x_BMD, turn, use_reentrant=False, preserve_rng_state=False)  # pyright: ignore[reportReturnType]


class Recomputed(torch.autograd.Function):
    """Checkpointing for XLA, which records and compiles operations; torch.utils.checkpoint does not support it.

    A compiler would notice that the same result is computed twice and keep the first. So backward starts from
    input + 0 × gradient. To the compiler that is a different value, and since it depends on the gradient, it cannot be
    computed before the backward pass gets here.
    """

    @staticmethod
    def forward(
        ctx: Any, block: nn.Module, turn: tuple[Tensor, Tensor] | None, x_BMD: Tensor, *parameters: Tensor
    ) -> Tensor:
        device = x_BMD.device.type
        ctx.block, ctx.parameters = block, parameters
        # Backward runs outside the forward pass's autocast context, and must compute the same.
        ctx.precision = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        ctx.save_for_backward(x_BMD, *(turn or ()))
        return block(x_BMD, turn)

    @staticmethod
    def backward(ctx: Any, grad_BMD: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BMD, *turn = ctx.saved_tensors
        x_BMD = (x_BMD + 0 * grad_BMD.to(x_BMD.dtype)).detach().requires_grad_()
        learning = [p for p in ctx.parameters if p.requires_grad]
        with torch.enable_grad(), torch.autocast(**ctx.precision):
            out_BMD = ctx.block(x_BMD, tuple(turn) or None)
        grad_x_BMD, *grads = torch.autograd.grad(out_BMD, (x_BMD, *learning), grad_BMD)
        rest = iter(grads)
        return None, None, grad_x_BMD, *(next(rest) if p.requires_grad else None for p in ctx.parameters)
