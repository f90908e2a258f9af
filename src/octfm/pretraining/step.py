"""The forward and backward passes of one step in micro-batches, the verdict on it, and its summary for all ranks."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch

from octfm.errors import TrainingError
from octfm.models.objectives.objective import ObjectiveOutput, View
from octfm.models.vit3d import TokenIndex, take_tokens
from octfm.pretraining.inputs import Inputs, make_inputs
from octfm.pretraining.learner import Learner
from octfm.pretraining.masks import TokenMasks
from octfm.pretraining.monitors.audit import gradients
from octfm.pretraining.monitors.limits import Limits
from octfm.run.memory import ran_out_of_memory
from octfm.store.loader import Batch, microbatches

COMPANY_TOKENS = 64
"""Tokens of a volume, at even distances, whose loss is compared with and without a second volume in the batch."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Results of one micro-batch on the device: losses in every step, goals and features only in inspected ones."""

    loss: torch.Tensor
    masked_loss_B: torch.Tensor
    context_loss_B: torch.Tensor
    masks: TokenMasks
    scanner: tuple[str, ...]
    masked_goal_BTD: torch.Tensor | None
    context_goal_BCD: torch.Tensor | None
    features_BMD: torch.Tensor | None
    """`masks.tissue` says which of their tokens are tissue."""
    features_at_BM: torch.Tensor | None
    """Places of the features within the kept tokens; None: all of them."""
    leak: torch.Tensor | None
    """Largest gradient of the loss w.r.t. voxels hidden from the encoder; None if it was not measured."""
    company: torch.Tensor | None
    """Relative change of a volume's loss when another volume shares its batch; None if it was not measured."""
    ascent: torch.Tensor | None = None
    """Minus the smallest derivative of the minimised loss w.r.t. a volume's masked loss: above 0 if training goes
    uphill. None if it was not measured."""
    gradients: list[torch.Tensor] | None = None
    """Followed rows of the gradients after the last micro-batch of this rank (audit.py); None in other steps."""


def _keep(
    inputs: Inputs,
    output: ObjectiveOutput,
    part: Batch,
    *,
    everything: bool,
    leak: torch.Tensor | None,
    company: torch.Tensor | None,
) -> MicroStep:
    return MicroStep(
        output.loss.detach(),
        output.masked_loss_B.detach(),
        output.context_loss_B.detach(),
        inputs.masks,
        part.scanner,
        output.masked_goal_BTD if everything else None,
        output.context_goal_BCD if everything else None,
        output.features_BMD if everything else None,
        output.features_at_BM if everything else None,
        leak,
        company,
    )


@dataclass(frozen=True, eq=False)
class Outcome:
    """Loss and gradient norm before clipping (F3) of a step, and whether its update is applied; equal on all ranks."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    made: torch.Tensor
    """bool: the update is applied."""


@torch.no_grad()
def judge(learner: Learner, micro_results: Sequence[MicroStep], grad_norm: torch.Tensor, most: Limits) -> Outcome:
    """Decide on the device, without a host sync: every loss and the gradient norm are finite and within their
    limits."""
    runtime = learner.runtime
    masked, context = (
        torch.cat([getattr(d, name) for d in micro_results]).float() for name in ("masked_loss_B", "context_loss_B")
    )
    sums = torch.stack((masked.sum(), (~torch.isfinite(masked + context)).float().sum()))
    runtime.sum_(sums)
    loss, grad_norm = sums[0] / learner.config.data.global_batch_size, grad_norm.float()
    limit = runtime.numbers(most.loss, most.lasting_loss, most.grad_norm)
    beyond = (loss > limit[0]) | (loss > limit[1]) | (grad_norm > limit[2])
    return Outcome(loss, grad_norm, (sums[1] == 0) & torch.isfinite(grad_norm) & ~beyond)


@dataclass(frozen=True, eq=False)
class StepSummary:
    """Results of a step over the whole global batch, in its order; equal on all ranks, which therefore decide alike."""

    masked_loss_B: torch.Tensor
    context_loss_B: torch.Tensor
    loss: float
    """Mean masked loss."""
    grad_norm: float
    made: bool
    """The update was applied."""
    leak: float | None
    """The largest on any rank, as are the next two."""
    company: float | None
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
    """Exchange step results across ranks; the first host sync of a step.

    The smallest micro-batch of any rank becomes that of all (F7). `fed`: facts about this rank's data (feed.py).
    """
    runtime = learner.runtime
    losses = [
        torch.cat(runtime.read(*(getattr(d, name) for d in micro_results)))
        for name in ("masked_loss_B", "context_loss_B")
    ]
    measured = [
        [x for x in (getattr(d, name) for d in micro_results) if x is not None]
        for name in ("leak", "company", "ascent")
    ]
    extremes = [max((float(x) for x in runtime.read(*seen)), default=-inf) for seen in measured]
    number = float(signal.Signals[signal_name]) if signal_name else 0.0
    own = np.concatenate(
        [torch.cat(losses).double().cpu().numpy(), [*fed, *extremes, float(learner.micro_batch), number]]
    )
    rows = runtime.exchange(own)
    share = len(losses[0])
    masked, context = (
        torch.from_numpy(np.ascontiguousarray(rows[:, i * share : (i + 1) * share]).reshape(-1)).float() for i in (0, 1)
    )
    # max() drops NaN: it counts as not measured.
    leak, company = (float(max((x for x in rows[:, column] if x >= 0), default=-1.0)) for column in (-5, -4))
    ascent = float(max((x for x in rows[:, -3] if x > -inf), default=-inf))
    micro_batch, number = int(rows[:, -2].min()), int(rows[:, -1].max())
    if micro_batch != learner.micro_batch:
        learner.state = replace(learner.state, micro_batch=micro_batch)
    found = signal.Signals(number).name if number else None
    loss, grad_norm, made = (x.item() for x in runtime.read(outcome.loss, outcome.grad_norm, outcome.made))
    return StepSummary(
        masked,
        context,
        loss,
        grad_norm,
        bool(made),
        leak if leak >= 0 else None,
        company if company >= 0 else None,
        ascent if ascent > -inf else None,
        found,
        rows[:, 2 * share : rows.shape[1] - 5],
    )


class OutOfMemory(TrainingError):
    """Memory ran out in a step that this process cannot repeat; a restart can, with `micro_batch` volumes at a time."""

    def __init__(self, message: str, micro_batch: int):
        super().__init__(message)
        self.micro_batch = micro_batch


def accumulate(learner: Learner, batch: Batch, context_weight: float, *, everything: bool) -> list[MicroStep]:
    """Gradients of the mean loss of this rank's share of the batch, computed in micro-batches.

    When memory runs out, the step is repeated with smaller micro-batches, at most half as large: the same global batch,
    images and maths (F7); the learner's state keeps the size. Sharded ranks cannot repeat a step and raise OutOfMemory.
    `everything`: keep goals and features, and check the first micro-batch for leaks.
    """
    (weight,) = learner.runtime.numbers(context_weight)
    while True:
        learner.optimizer.zero_grad(set_to_none=True)
        learner.model.discard_step()
        try:
            return _passes(learner, batch, weight, everything)
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error):
                raise
            reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        # Outside the handler, where the failed pass's tensors are not held any more.
        learner.optimizer.zero_grad(set_to_none=True)
        learner.runtime.release()
        devices = learner.runtime.devices
        size, share = learner.micro_batch // devices, len(batch) // devices
        smaller = max((n for n in range(1, size // 2 + 1) if share % n == 0), default=0)
        if not smaller:
            raise TrainingError(
                f"step {learner.step}: memory ran out with one volume at a time ({reason}); lower masks.budget or "
                "model.width, or use a device with more memory"
            )
        if not learner.runtime.repeats:
            raise OutOfMemory(
                f"step {learner.step}: memory ran out on rank {learner.runtime.rank} with {size} volumes at a time "
                f"({reason}); {learner.config.runtime.parallel} cannot repeat a step, so run the same command again "
                "(torchrun --max-restarts does so): the run goes on from the last checkpoint with "
                f"{smaller} at a time and the same global batches (F7)",
                smaller,
            )
        learner.state = replace(learner.state, micro_batch=smaller)


def _passes(learner: Learner, batch: Batch, context_weight: torch.Tensor, everything: bool) -> list[MicroStep]:
    micro_steps = len(batch) // learner.micro_batch
    micro_results = []
    for number, part in enumerate(microbatches(batch, learner.micro_batch), start=1):
        learner.runtime.last_pass(learner.model, number == micro_steps)
        inputs = make_inputs(learner.config, learner.preprocessing, learner.runtime, part)
        learner.runtime.follow(learner.trained, *(x for view in inputs.views for x in view[:2]))
        examined = everything and not micro_results
        for view in inputs.views:
            view.patches_BKP.requires_grad_(examined)
        with learner.runtime.autocast():
            output = learner.model(inputs.views, context_weight)
        inspected = examined and not learner.runtime.steady
        if inspected:
            output.masked_loss_B.retain_grad()
        (output.loss / micro_steps).backward()
        derivative_B = output.masked_loss_B.grad if inspected else None
        # Compiled into a step, this would cost time in every one; there the preflight's check must do.
        alone = inspected and not learner.model.compares_volumes
        company = _company(learner, inputs.views, context_weight) if alone else None
        leak, ascent = (
            _leak(learner, inputs.views) if examined else None,
            -derivative_B.min() if derivative_B is not None else None,
        )
        result = _keep(inputs, output, part, everything=everything, leak=leak, company=company)
        micro_results.append(replace(result, ascent=ascent))
    if everything and not learner.runtime.steady:
        micro_results[-1] = replace(micro_results[-1], gradients=gradients(learner))
    return micro_results


def _leak(learner: Learner, views: Sequence[View]) -> torch.Tensor | None:
    """Largest gradient of the loss w.r.t. a voxel hidden from the encoder; None if the objective hides nothing."""
    found = []
    for view in views:
        hidden, gradient = learner.model.hidden_from_encoder(view.index), view.patches_BKP.grad
        if hidden is not None:
            found.append(take_tokens(gradient, hidden).abs().max() if gradient is not None else torch.zeros(()))
    return torch.stack(found).max() if found else None


@torch.no_grad()
def _company(learner: Learner, views: Sequence[View], context_weight: torch.Tensor) -> torch.Tensor:
    """Relative change of a volume's loss when a second volume, or if there is none its own negative, joins the batch.

    In float32 whatever the run's precision: bfloat16 rounding would hide a leak of a percent.
    """
    pairs = [_pair(view) for view in views]
    together = learner.model(pairs, context_weight).masked_loss_B[0]
    alone = learner.model([_first(pair) for pair in pairs], context_weight).masked_loss_B[0]
    return (alone - together).abs() / together.abs().clamp_min(1e-12)


def _pair(view: View) -> View:
    """Two volumes with the masks of the first, thinned out to about COMPANY_TOKENS tokens."""
    # An exact copy would not do: it has the statistics of the original, and a norm over both is the norm over one.
    patches, targets = (x[:2] if len(x) > 1 else torch.cat((x, -x)) for x in view[:2])
    kept, context, target, tissue = (x[:1] for x in vars(view.index).values())
    # What is normalised over the batch shows in a few tokens; all of them in float32 took 5 % of the time of a run.
    every = -(-kept.shape[1] // COMPANY_TOKENS)
    few_context, few_target = ((x[x % every == 0] // every).unsqueeze(0) for x in (context, target))
    if few_context.numel() and few_target.numel():
        context, target = few_context, few_target
        kept, tissue, patches, targets = (x[:, ::every] for x in (kept, tissue, patches, targets))
    return View(patches, targets, TokenIndex(*(x.expand(2, -1) for x in (kept, context, target, tissue))))


def _first(pair: View) -> View:
    return View(
        pair.patches_BKP[:1], pair.target_patches_BKP[:1], TokenIndex(*(x[:1] for x in vars(pair.index).values()))
    )
