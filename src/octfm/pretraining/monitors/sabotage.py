"""Plant faults, to show and to test that monitors name them; patched in from outside, without a trace in the loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from typing import Any

import torch

from octfm.errors import ConfigError
from octfm.pretraining import pretrain as loop
from octfm.pretraining import step as passes
from octfm.pretraining.learner import Learner

NAMES = {
    "teacher-frozen": "teacher frozen",
    "context-unmasked": "context unmasked",
    "lr-restart": "learning rate",
    "nan-volume": "non-finite loss",
    "inf-gradient": "non-finite gradient",
    "constant-targets": "collapse",
    "batch-norm": "batch statistics",
    "bf16-underflow": "underflow",
    "hidden-lr": "update",
}
"""Name of each fault in the monitors' findings."""


@contextmanager
def sabotage(name: str, at: int, until: float = inf) -> Iterator[None]:
    """Give every training in this process a fault, from step `at` of its data until before step `until`. Those continue
    through a rollback: a fault with an end is tied to certain batches, which a rollback leaves behind."""
    if name not in NAMES:
        raise ConfigError(f"sabotage: expected one of {', '.join(NAMES)}; got {name!r}")
    accumulate, make_inputs = loop.accumulate, passes.make_inputs
    volume: list[int] = []

    def accumulate_with_fault(learner: Learner, batch: Any, *args: Any, **kwargs: Any) -> Any:
        faulty = at <= learner.step + learner.state.offset < until
        if faulty:
            volume[:] = volume or [int(batch.index[0])]
            if name in INTO_LEARNER and not hasattr(learner.model, "sabotaged"):
                INTO_LEARNER[name](learner)
                vars(learner.model)["sabotaged"] = True  # a rollback to the beginning builds new networks
            if name == "lr-restart":
                for group in learner.optimizer.param_groups:
                    group["lr"] = group["lr"] * 100
        micro_steps = accumulate(learner, batch, *args, **kwargs)
        if faulty and name == "inf-gradient":
            gradient = learner.decayed[1].grad
            assert gradient is not None
            learner.runtime.local(gradient).view(-1)[:1] = float("inf")
        return micro_steps

    def make_inputs_with_fault(
        config: Any, preprocessing: Any, runtime: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        inputs = make_inputs(config, preprocessing, runtime, batch, *args, **kwargs)
        # Voxels are stored as uint8, so a NaN can only arise after normalisation.
        for place, row in enumerate(batch.index):
            if name == "nan-volume" and int(row) in volume:
                for view in inputs.views:
                    view.patches_BKP[place, 0] = view.target_patches_BKP[place, 0] = float("nan")
        return inputs

    loop.accumulate, passes.make_inputs = accumulate_with_fault, make_inputs_with_fault
    try:
        yield
    finally:
        loop.accumulate, passes.make_inputs = accumulate, make_inputs


def _freeze_teacher(learner: Learner) -> None:
    learner.model.update_target = lambda momentum: None


def _unmask_context(learner: Learner) -> None:
    """A fault that a prototype had: the context encoder receives every token."""
    forward = learner.model.forward

    def seeing(views: Any, weight: float) -> Any:
        kept = views[0].index.kept
        everything = torch.arange(kept.shape[1], device=kept.device).expand_as(kept)
        return forward([view._replace(index=replace(view.index, context=everything)) for view in views], weight)

    vars(learner.model)["forward"] = seeing


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


INTO_LEARNER: dict[str, Callable[[Learner], None]] = {
    "teacher-frozen": _freeze_teacher,
    "context-unmasked": _unmask_context,
    "constant-targets": _constant_targets,
    "batch-norm": _normalise_over_batch,
    "bf16-underflow": _round_weights,
    "hidden-lr": _hide_learning_rate,
}
