"""Float32 matrix products by oneDNN on AMD CPUs with AVX-512.

By default torch uses MKL, which on AMD processors is limited to AVX2. oneDNN, which torch contains and uses for
bfloat16, has no such limit: products of our sizes are 1.6 to 2.4 times as fast, forward and backward (docs/log).
Other CPUs use PyTorch's default.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN is faster than MKL on this machine.

    Decided by processor and torch version, never by timing: a resumed run must use the same kernels to be
    bit-identical.
    """
    known = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(
        str(known.get("cpu_name", "")).startswith("AMD")
        and known.get("avx512_f")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def by_onednn(*tensors: Tensor) -> bool:
    """Whether `times` can multiply these: plain float32 tensors on such a CPU, no shards and no tensors of a tracer."""
    return onednn_is_faster() and all(
        x.is_cpu and x.dtype is torch.float32 and type(x) in (Tensor, nn.Parameter) for x in tensors
    )


def times(a: Tensor, b_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """a b^T + bias, [..., N], for a [..., K], by oneDNN. Transposed views: `b` is read as it is, `a` is copied."""
    # For any other view oneDNN falls back to a loop that takes two thousand times as long.
    if not (b_NK.is_contiguous() or b_NK.mT.is_contiguous()):
        b_NK = b_NK.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b_NK, bias_N, "none", [], "")


def times_transposed(a_MN: Tensor, b_MK: Tensor) -> Tensor:
    """a^T b, [N, K]. One operand has to be copied; the narrower one is chosen."""
    if a_MN.shape[1] <= b_MK.shape[1]:
        return times(a_MN.mT, b_MK.mT)
    return times(b_MK.mT, a_MN.mT).mT


class Linear(nn.Linear):
    """torch's linear layer, with float32 products by oneDNN where that is faster."""

    def forward(self, input: Tensor) -> Tensor:
        plain = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or not input.numel()
        if plain or not by_onednn(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        return Times.apply(input, self.weight, self.bias)


class Times(torch.autograd.Function):
    """Linear layer by oneDNN: x [..., K], weight [N, K], bias [N] or None -> [..., N]."""

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
