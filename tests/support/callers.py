"""What a caller's notebook may have set in torch for networks of its own."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def _doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64, "the caller's dtype is left as it was"
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _device() -> Iterator[None]:
    with torch.device("meta"):  # as `cuda` would be
        yield
        assert torch.get_default_device().type == "meta", "the caller's device is left as it was"


@contextmanager
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
        assert not torch.is_grad_enabled(), "gradients stay off"


SET_OTHERWISE: dict[str, Callable[[], AbstractContextManager]] = {
    "float64": _doubles,
    "device": _device,
    "no_grad": _no_gradients,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}
