"""The forward and backward passes of one step in micro-batches, and the decision whether its update is applied."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from octfm.errors import TrainingError
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner
from octfm.pretraining.masks import TokenMasks
from octfm.pretraining.monitors.audit import gradients
from octfm.pretraining.monitors.leaks import batch_effect, leak
from octfm.pretraining.monitors.limits import Limits
from octfm.run.memory import ran_out_of_memory
from octfm.store.loader import Batch, microbatches

INSPECTED = ("masked_goal_BTD", "context_goal_BCD", "features_BMD", "features_at_BM")
"""What an objective returns besides losses; kept in inspected steps only, because it takes memory."""


@dataclass(frozen=True, eq=False)
class MicroStep:
    """Results of one micro-batch on the device: losses in every step, goals and features only in inspected ones."""

    loss: torch.Tensor
    masked_loss_B: torch.Tensor
    context_loss_B: torch.Tensor
    masks: TokenMasks
    masked_goal_BTD: torch.Tensor | None = None
    context_goal_BCD: torch.Tensor | None = None
    features_BMD: torch.Tensor | None = None
    """`masks.tissue` says which of their tokens are tissue."""
    features_at_BM: torch.Tensor | None = None
    """Places of the features within the kept tokens; None: all of them."""
    leak: torch.Tensor | None = None
    """Largest gradient of the loss w.r.t. voxels hidden from the encoder; None if it was not measured."""
    batch_effect: torch.Tensor | None = None
    """Relative change of a volume's loss when another volume shares its batch; None if it was not measured."""
    ascent: torch.Tensor | None = None
    """Minus the smallest derivative of the loss w.r.t. a volume's masked loss: above 0 if training goes uphill."""
    gradients: list[torch.Tensor] | None = None
    """Followed rows of the gradients after the last micro-batch of this rank (audit.py); None in other steps."""


def accumulate(learner: Learner, batch: Batch, context_weight: float, *, everything: bool) -> list[MicroStep]:
    """Gradients of the mean loss of this rank's share of the batch, computed in micro-batches.

    When memory runs out, the step is repeated with smaller micro-batches: the same global batch, images and maths (F7);
    the learner's state keeps the size. Sharded ranks cannot repeat a step and raise OutOfMemory.
    `everything`: keep goals and features, and check the first micro-batch for leaks."""
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
        # Outside the handler, which holds the failed pass's tensors. Gradients first: memory in use cannot be released.
        learner.optimizer.zero_grad(set_to_none=True)
        learner.runtime.release()
        learner.state = replace(learner.state, micro_batch=_smaller(learner, batch, reason))


def _passes(learner: Learner, batch: Batch, context_weight: torch.Tensor, everything: bool) -> list[MicroStep]:
    model, runtime = learner.model, learner.runtime
    count = len(batch) // learner.micro_batch
    micro_results: list[MicroStep] = []
    for number, part in enumerate(microbatches(batch, learner.micro_batch), start=1):
        # Sharded gradients are reduced in the last pass only.
        runtime.last_pass(model, number == count)
        inputs = make_inputs(learner.config, learner.preprocessing, runtime, part)
        runtime.follow(learner.trained, *(x for view in inputs.views for x in view[:2]))
        examined = everything and number == 1
        # Compiled into a step, these checks would cost time in every one; there the preflight's must do.
        inspected = examined and not runtime.steady
        for view in inputs.views:
            view.patches_BKP.requires_grad_(examined)
        with runtime.autocast():
            # What is inspected is not compiled: another program for it, and slopes within the loss would be lost.
            output = (model if everything else learner.compiled)(inputs.views, context_weight)
        if inspected:
            output.masked_loss_B.retain_grad()
        # Divided here, so that gradients add up to those of the mean over the whole share.
        (output.loss / count).backward()
        if number == 1 and count > 1 and not everything:
            runtime.keep_gradients(learner.trained)
        derivative_B = output.masked_loss_B.grad if inspected else None
        compares = inspected and not model.compares_volumes
        result = MicroStep(
            runtime.keep(output.loss.detach()),
            runtime.keep(output.masked_loss_B.detach()),
            runtime.keep(output.context_loss_B.detach()),
            inputs.masks,
            leak=leak(learner, inputs.views) if examined else None,
            batch_effect=batch_effect(learner, inputs.views, context_weight) if compares else None,
            ascent=-derivative_B.min() if derivative_B is not None else None,
        )
        seen = {name: getattr(output, name) for name in INSPECTED} if everything else {}
        micro_results.append(replace(result, **seen))
    if everything and not runtime.steady:
        micro_results[-1] = replace(micro_results[-1], gradients=gradients(learner))
    return micro_results


class OutOfMemory(TrainingError):
    """Memory ran out in a step that this process cannot repeat; a restart can, with `micro_batch` volumes at a time."""

    def __init__(self, message: str, micro_batch: int):
        super().__init__(message)
        self.micro_batch = micro_batch


def _smaller(learner: Learner, batch: Batch, reason: str) -> int:
    """Volumes per device and pass to try after memory ran out: the most that divide its share, at most half as many.
    Raises TrainingError after one volume at a time, and OutOfMemory if this process cannot repeat the step."""
    devices = learner.runtime.devices
    size, share = learner.micro_batch // devices, len(batch) // devices
    smaller = max((n for n in range(1, size // 2 + 1) if share % n == 0), default=0)
    if not smaller:
        raise TrainingError(
            f"step {learner.step + 1}: memory ran out with one volume at a time ({reason}); lower masks.budget or "
            "model.width, or use a device with more memory"
        )
    if not learner.runtime.repeats:
        raise OutOfMemory(
            f"step {learner.step + 1}: memory ran out on rank {learner.runtime.rank} with {size} volumes at a time "
            f"({reason}); {learner.config.runtime.parallel} cannot repeat a step, so run the same command again "
            "(torchrun --max-restarts does so): the run goes on from the last checkpoint with "
            f"{smaller} at a time and the same global batches (F7)",
            smaller,
        )
    return smaller


@dataclass(frozen=True, eq=False)
class Outcome:
    """Loss and gradient norm before clipping (F3) of a step, and whether its update is applied; equal on all ranks."""

    loss: torch.Tensor
    grad_norm: torch.Tensor
    made: torch.Tensor
    """bool: the update is applied."""


@torch.no_grad()
def judge(learner: Learner, micro_results: Sequence[MicroStep], grad_norm: torch.Tensor, most: Limits) -> Outcome:
    """Decide on the device, without a host sync: every loss and the norm are finite and within their limits."""
    runtime = learner.runtime
    masked, context = (
        torch.cat([getattr(d, name) for d in micro_results]).float() for name in ("masked_loss_B", "context_loss_B")
    )
    # One collective for both numbers; the second also counts context losses, which the reported loss leaves out.
    sums = torch.stack((masked.sum(), (~torch.isfinite(masked + context)).float().sum()))
    runtime.sum_(sums)
    loss, grad_norm = sums[0] / learner.config.data.global_batch_size, grad_norm.float()
    limit = runtime.numbers(most.loss, most.lasting_loss, most.grad_norm)
    beyond = (loss > limit[0]) | (loss > limit[1]) | (grad_norm > limit[2])
    # NaN exceeds no limit, because every comparison with it is false: finiteness is a condition of its own.
    return Outcome(loss, grad_norm, (sums[1] == 0) & torch.isfinite(grad_norm) & ~beyond)
