"""Plant faults, to show and to test that monitors name them; patched in from outside, without a trace in the loop."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from octfm.pretraining import pretrain as loop
from octfm.pretraining import step as passes
from octfm.pretraining.learner import Learner

NAMES = {
    "teacher-frozen": "teacher frozen",
    "context-unmasked": "context unmasked",
    "lr-restart": "learning rate",
    "nan-volume": "non-finite loss",
}
"""Name of each fault in the monitors' findings."""


@contextmanager
def sabotage(name: str, at: int) -> Iterator[None]:
    """Give every training in this process a fault of NAMES, from step `at` of its data on."""
    accumulate, make_inputs = loop.accumulate, passes.make_inputs
    volume: list[int] = []

    def accumulate_with_fault(learner: Learner, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if learner.step + learner.state.offset >= at:
            volume[:] = volume or [int(batch.index[0])]
            if name in INTO_LEARNER and not hasattr(learner.model, "sabotaged"):
                INTO_LEARNER[name](learner)
                vars(learner.model)["sabotaged"] = True  # a rollback to the beginning builds new networks
            if name == "lr-restart":
                for group in learner.optimizer.param_groups:
                    group["lr"] = group["lr"] * 100
        return accumulate(learner, batch, *args, **kwargs)

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


INTO_LEARNER: dict[str, Callable[[Learner], None]] = {
    "teacher-frozen": _freeze_teacher,
    "context-unmasked": _unmask_context,
}
