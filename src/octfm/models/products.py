"""Matrix products in float32 on CPUs where MKL, which torch takes for them, leaves half of the processor unused.

On AMD processors MKL keeps to AVX2. oneDNN, which torch ships with and takes for bfloat16, uses AVX-512 on any: products of our sizes take
1.6 to 2.4 times less there (docs/log), forward and backward. Elsewhere nothing is different.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


@cache
def onednn_is_faster() -> bool:
    """Of this processor and this torch, never of a measurement: a resumed run computes with the same kernels, to the last bit."""
    known = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(
        str(known.get("cpu_name", "")).startswith("AMD")
        and known.get("avx512_f")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def by_onednn(*tensors: Tensor) -> bool:
    """Whether these are multiplied by `times`: float32 on such a CPU, and plain tensors, not shards or those of a tracer or exporter."""
    return onednn_is_faster() and all(
        x.is_cpu and x.dtype is torch.float32 and type(x) in (Tensor, nn.Parameter) for x in tensors
    )


def times(a: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a b^T + bias, [..., N], of a [..., K] by oneDNN. A transposed view as `b` costs nothing extra, as `a` it is copied."""
    if not (b_NK.is_contiguous() or b_NK.mT.is_contiguous()):
        b_NK = b_NK.contiguous()  # oneDNN would multiply other views by a loop that takes two thousand times as long
    return torch.ops.mkldnn._linear_pointwise(a, b_NK, bias_N, "none", [], "")


def times_transposed(a_MN: Tensor, b_MK: Tensor) -> Tensor:
    """a^T b, [N, K]; the narrower one is the one that is copied."""
    if a_MN.shape[1] <= b_MK.shape[1]:
        return times(a_MN.mT, b_MK.mT)
    return times(b_MK.mT, a_MN.mT).mT


class Linear(nn.Linear):
    """torch's linear layer; its float32 products on CPU are made by oneDNN where that is faster."""

    def forward(self, input: Tensor) -> Tensor:
        plain = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or not input.numel()
        if plain or not by_onednn(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        return Times.apply(input, self.weight, self.bias)


class Times(torch.autograd.Function):
    """x [..., K], weight [N, K], bias [N] or None -> [..., N]"""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_MN, x_MK = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        return (
            times(grad, weight.mT) if of_x else None,
            times_transposed(grad_MN, x_MK) if of_weight else None,
            grad_MN.sum(0) if of_bias else None,
        )
