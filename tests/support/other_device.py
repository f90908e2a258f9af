"""A device that is not the CPU, without hardware: torch's private-use backend, computed by the CPU's own kernels.

Its tensors hold real numbers, so whole programs run on it, but they are of another device: an operation on tensors of
two devices raises as on CUDA, and everything for which CUDA would wait for the device is counted. Autocast to bfloat16
follows CUDA's lists. It cannot be undone: start it in a process of its own.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

import octfm

NAME = "other"
SOURCE = str(Path(octfm.__file__).parent)
aten = torch.ops.aten
BF16 = (
    "linear", "matmul", "mm", "addmm", "addmv", "mv", "bmm", "baddbmm", "einsum", "conv1d", "conv2d", "conv3d",
    "scaled_dot_product_attention",
)  # fmt: skip
FP32 = (
    "layer_norm", "native_layer_norm", "group_norm", "softmax.int", "log_softmax.int", "cosine_similarity",
    "cross_entropy_loss", "nll_loss", "binary_cross_entropy_with_logits", "smooth_l1_loss", "mse_loss", "pow.Tensor_Scalar",
    "pow.Scalar", "pow.Tensor_Tensor", "exp", "log", "rsqrt", "norm.Scalar", "norm.ScalarOpt_dim", "cumsum", "prod", "sum",
    "sum.dim_IntList",
)  # fmt: skip
"""What CUDA's autocast computes in lower and in full precision, as far as octfm uses it."""
WAITS = {
    aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, aten.equal.default,
    aten.nonzero.default, aten.masked_select.default, aten.repeat_interleave.Tensor, aten._unique2.default,
    aten.unique_dim.default, aten.unique_consecutive.default, aten._linalg_check_errors.default,
    aten.bincount.default,
}  # fmt: skip
"""Operations for which the host waits: their result is on the host, or its shape is."""


class Mixed(RuntimeError):
    """An operation on tensors of two devices."""


class OtherTensor(torch.Tensor):
    """A tensor of the other device; `host` holds its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            layout=host.layout, device=torch.device(NAME, 0),
        )  # fmt: skip

    def __init__(self, host: Tensor):
        self.host = host

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"other({self.host!r})"

    def numpy(self, *, force: bool = False):
        raise Mixed(f"numpy(): the tensor is on {NAME}, copy it to the host first, at {_where()}")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return DEVICE.run(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees operations without a tensor of the device: those that create one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not any(isinstance(x, OtherTensor) or _is_other(x) for x in _leaves((args, kwargs))):
            return func(*args, **kwargs)
        # In inference mode operations arrive whole that are otherwise made of others.
        if torch.is_inference_mode_enabled():
            with self:
                if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return made
        return DEVICE.run(func, args, kwargs)


class Device:
    """Runs operations of the device and keeps account of them."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        """Where the host waited: the operation, and the innermost line of octfm."""
        self.doubles = True
        """Whether the device knows float64; Apple's does not."""
        self._mode: _Factories | None = None

    def start(self, *, doubles: bool = True) -> torch.device:
        """Make torch know the device, for the rest of this process."""
        self.doubles = doubles
        _setup_privateuseone_for_python_backend(NAME, _Module())
        _register_autocast()
        # So that torch.tensor(values, device=...) is a copy from the host that is seen here, as it is one on CUDA.
        torch._C._set_only_lift_cpu_tensors(True)
        self._mode = _Factories()
        self._mode.__enter__()
        return torch.device(NAME, 0)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        own = [x for x in tensors if isinstance(x, OtherTensor)]
        to = kwargs.get("device")
        copies = func in (aten.copy_.default, aten._to_copy.default)
        foreign = [x for x in tensors if not isinstance(x, OtherTensor)]
        # A single number of the host is an argument of the kernel, where each element is computed by itself.
        numbers = torch.Tag.pointwise in func.tags and all(x.ndim == 0 for x in foreign)
        if own and foreign and not copies and not numbers:
            raise Mixed(
                f"{func}: expected all tensors on one device, found {NAME} {[tuple(x.shape) for x in own]} and cpu "
                f"{[tuple(x.shape) for x in foreign]} at {_where()}"
            )
        leaves = (to is not None and not _is_other(to)) if func is aten._to_copy.default else False
        if func is aten.copy_.default:
            leaves = not isinstance(args[0], OtherTensor)
        # A copy from the host waits as well, unless it is allowed not to.
        enters = (copies and not own and not kwargs.get("non_blocking")) or (
            func is aten.copy_.default and _enters(args)
        )
        if enters or (own and (leaves or func in WAITS or _by_mask(func, args))):
            self.waited.append(f"{func} at {_where()}")
        hosts = {id(x.host): x for x in own}
        here = _mapped(lambda x: x.host if isinstance(x, OtherTensor) else x, (args, kwargs))
        if to is not None:
            here[1]["device"] = torch.device("cpu")
        if kwargs.get("pin_memory"):
            here[1]["pin_memory"] = False
        found = func(*here[0], **here[1])
        # A copy within the device keeps the strides that its kernels chose; a factory's result is of the device named.
        stays = _is_other(to) if to is not None else bool(own) and not leaves

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            if id(x) in hosts:
                return hosts[id(x)]
            if not stays or isinstance(x, OtherTensor):
                return x
            if x.dtype is torch.float64 and not self.doubles:
                raise TypeError(f"{func}: the device knows no float64, at {_where()}")
            # A view of an ordinary tensor is one, also in inference mode.
            ordinary = func.is_view and bool(own) and not own[0].is_inference()
            with torch.inference_mode(False) if ordinary else nullcontext():
                return OtherTensor(x)

        return _mapped(back, found)

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """Where the host waits for the device meanwhile."""
        before, self.waited = self.waited, []
        try:
            yield self.waited
        finally:
            self.waited = before


class _Module(_DummyBackendModule):
    """torch.other"""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass


DEVICE = Device()


def _leaves(tree: Any) -> Iterator[Any]:
    """What nested arguments hold. Operations take and return tuples, lists and dictionaries only, for which torch's own
    pytree takes a third of the time of a test."""
    if isinstance(tree, tuple | list):
        for part in tree:
            yield from _leaves(part)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, tuple | list):
        return type(tree)([_mapped(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: _mapped(change, part) for name, part in tree.items()}
    return change(tree)


def _is_other(device: Any) -> bool:
    return isinstance(device, torch.device) and device.type == NAME


def _enters(args: tuple) -> bool:
    """Whether `copy_` copies from the host and may not return before that is done."""
    blocks = not (len(args) > 2 and args[2])
    return blocks and isinstance(args[0], OtherTensor) and not isinstance(args[1], OtherTensor)


def _by_mask(func: Callable, args: tuple) -> bool:
    """Whether elements are chosen by a mask, so that the host must count them first."""
    if func in (aten.index.Tensor, aten._unsafe_index.Tensor):
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    # A single value is written with masked_fill, for which nothing is counted.
    if func in (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
        masks = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        return masks and args[2].numel() != 1
    return False


def _where() -> str:
    lines = [line for line in traceback.extract_stack() if line.filename.startswith(SOURCE)]
    if not lines:
        return "no line of octfm"
    return f"{Path(lines[-1].filename).relative_to(SOURCE)}:{lines[-1].lineno} {lines[-1].line}"


_LIBRARIES: list[torch.library.Library] = []


def _register_autocast() -> None:
    rest, library = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((rest, library))
    for names, dtype in ((BF16, torch.bfloat16), (FP32, torch.float32)):
        for name in names:
            packet, _, overload = name.partition(".")
            operation = getattr(getattr(aten, packet), overload or "default")
            library.impl(name, _cast_to(operation, dtype), "AutocastPrivateUse1")


def _cast_to(operation: Callable, dtype: torch.dtype) -> Callable:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point() and x.dtype is not torch.float64
        return x.to(dtype) if floating and x.device.type == NAME else x

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return operation(*_mapped(cast, args), **_mapped(cast, kwargs))

    return kernel
