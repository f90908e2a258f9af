"""Results of a step, exchanged across ranks, which therefore all decide alike."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch

from octfm.pretraining.learner import Learner
from octfm.pretraining.step import MicroStep, Outcome


@dataclass(frozen=True, eq=False)
class StepSummary:
    """Results of a step over the whole global batch, in its order; equal on all ranks."""

    masked_loss_B: torch.Tensor
    context_loss_B: torch.Tensor
    loss: float
    """Mean masked loss."""
    grad_norm: float
    made: bool
    """The update was applied."""
    leak: float | None
    """The largest on any rank, as are the next two."""
    batch_effect: float | None
    ascent: float | None
    signal_name: str | None
    """Name of a signal that any rank has received."""
    fed: np.ndarray
    """[ranks, n]: facts about the data of each rank (feed.py)."""


def exchange_results(
    learner: Learner,
    micro_results: Sequence[MicroStep],
    outcome: Outcome,
    signal_name: str | None = None,
    fed: Sequence[float] = (),
) -> StepSummary:
    """Exchange step results across ranks; the first host sync of a step. The smallest micro-batch of any rank becomes
    that of all (F7). `fed`: facts about this rank's data (feed.py)."""
    runtime = learner.runtime
    losses = [
        torch.cat(runtime.read(*(getattr(d, name) for d in micro_results)))
        for name in ("masked_loss_B", "context_loss_B")
    ]
    measured = [
        [x for x in (getattr(d, name) for d in micro_results) if x is not None]
        for name in ("leak", "batch_effect", "ascent")
    ]
    extremes = [max((float(x) for x in runtime.read(*seen)), default=-inf) for seen in measured]
    number = float(signal.Signals[signal_name]) if signal_name else 0.0
    # One row per rank: both losses of each volume, `fed`, three extremes, micro-batch, signal. float64 holds them all.
    own = np.concatenate(
        [torch.cat(losses).cpu().double().numpy(), [*fed, *extremes, float(learner.micro_batch), number]]
    )
    rows = runtime.exchange(own)
    share = len(losses[0])
    masked, context = (
        torch.from_numpy(np.ascontiguousarray(rows[:, i * share : (i + 1) * share]).reshape(-1)).float() for i in (0, 1)
    )
    # max() drops NaN: it counts as not measured.
    leak, batch_effect = (float(max((x for x in rows[:, column] if x >= 0), default=-1.0)) for column in (-5, -4))
    ascent = float(max((x for x in rows[:, -3] if x > -inf), default=-inf))
    micro_batch, number = int(rows[:, -2].min()), int(rows[:, -1].max())
    if micro_batch != learner.micro_batch:
        learner.state = replace(learner.state, micro_batch=micro_batch)
    loss, grad_norm, made = (x.item() for x in runtime.read(outcome.loss, outcome.grad_norm, outcome.made))
    return StepSummary(
        masked,
        context,
        loss,
        grad_norm,
        bool(made),
        leak=leak if leak >= 0 else None,
        batch_effect=batch_effect if batch_effect >= 0 else None,
        ascent=ascent if ascent > -inf else None,
        signal_name=signal.Signals(number).name if number else None,
        fed=rows[:, 2 * share : rows.shape[1] - 5],
    )
