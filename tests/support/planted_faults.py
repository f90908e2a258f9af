"""Faults to plant in a training, besides those that `octfm demo --sabotage` has."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any
from unittest import mock

import torch

from octfm.pretraining import pretrain as loop
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import sabotage as shipped

NAMES = shipped.NAMES | {
    "inf-gradient": "non-finite gradient",
    "constant-targets": "collapse",
    "batch-norm": "batch statistics",
    "bf16-underflow": "underflow",
    "hidden-lr": "update",
}
"""Name of each fault in the monitors' findings."""


@contextmanager
def sabotage(name: str, at: int) -> Iterator[None]:
    """Give every training a fault of NAMES, from step `at` of its data on."""
    if name == "inf-gradient":
        with infinite_gradient(at):
            yield
        return
    known = mock.patch.dict(shipped.NAMES, NAMES), mock.patch.dict(shipped.INTO_LEARNER, INTO_LEARNER)
    with known[0], known[1], shipped.sabotage(name, at):
        yield


@contextmanager
def infinite_gradient(at: int, until: float = inf) -> Iterator[None]:
    """From step `at` of the data until before step `until`: tied to batches, which a rollback leaves behind."""
    accumulate = loop.accumulate

    def accumulate_with_fault(learner: Learner, *args: Any, **kwargs: Any) -> Any:
        micro_steps = accumulate(learner, *args, **kwargs)
        if at <= learner.step + learner.state.offset < until:
            gradient = learner.decayed[1].grad
            assert gradient is not None
            learner.runtime.local(gradient).view(-1)[:1] = inf
        return micro_steps

    with mock.patch.object(loop, "accumulate", accumulate_with_fault):
        yield


def _constant_targets(learner: Learner) -> None:
    teacher = learner.model.target_encoder
    assert teacher is not None
    hidden = teacher.hidden

    def constant(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [torch.zeros_like(x) for x in hidden(*args, **kwargs)]

    teacher.hidden = constant


def _normalise_over_batch(learner: Learner) -> None:
    def batch_norm(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return (output - output.mean((0, 1))) / (output.std((0, 1)) + 1e-5)

    learner.model.encoder.norm.register_forward_hook(batch_norm)


def _round_weights(learner: Learner) -> None:
    """Keep weights in bfloat16, with three digits, so that most updates vanish."""
    update = learner.optimizer.step

    @torch.no_grad()
    def rounded(*args: Any, **kwargs: Any) -> None:
        update(*args, **kwargs)
        for p in learner.model.parameters():
            p.copy_(p.bfloat16())

    with torch.no_grad():
        for p in learner.model.parameters():
            p.copy_(p.bfloat16())
    learner.optimizer.step = rounded


def _hide_learning_rate(learner: Learner) -> None:
    """Update with a hundred times the rate that the optimizer shows."""
    update = learner.optimizer.step

    def faster(*args: Any, **kwargs: Any) -> None:
        shown = [group["lr"] for group in learner.optimizer.param_groups]
        for group in learner.optimizer.param_groups:
            group["lr"] = group["lr"] * 100
        update(*args, **kwargs)
        for group, lr in zip(learner.optimizer.param_groups, shown, strict=True):
            group["lr"] = lr

    learner.optimizer.step = faster


INTO_LEARNER = {
    "constant-targets": _constant_targets,
    "batch-norm": _normalise_over_batch,
    "bf16-underflow": _round_weights,
    "hidden-lr": _hide_learning_rate,
}
