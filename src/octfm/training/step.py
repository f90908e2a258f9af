"""One step's forward and backward passes: the global batch in micro-batches, gradients accumulated, losses kept per volume."""

from dataclasses import dataclass

import torch

from octfm.data.loader import Batch, microbatches
from octfm.masks import TokenMasks
from octfm.models.objective import ObjectiveOutput
from octfm.training.inputs import Inputs, make_inputs
from octfm.training.learner import Learner


@dataclass(frozen=True, eq=False)
class MicroStep:
    """What one micro-batch leaves behind: losses always, goals and features only in steps that are logged."""

    loss: torch.Tensor
    masked_loss_B: torch.Tensor
    context_loss_B: torch.Tensor
    masks: TokenMasks
    scanner: tuple[str, ...]
    masked_goal_BTD: torch.Tensor | None
    context_goal_BCD: torch.Tensor | None
    tissue_features_MD: torch.Tensor | None


def _keep(inputs: Inputs, output: ObjectiveOutput, scanner: tuple[str, ...], *, everything: bool) -> MicroStep:
    return MicroStep(
        output.loss.detach(),
        output.masked_loss_B.detach(),
        output.context_loss_B.detach(),
        inputs.masks,
        scanner,
        output.masked_goal_BTD if everything else None,
        output.context_goal_BCD if everything else None,
        output.features_BKD[inputs.tissue] if everything else None,
    )


def accumulate(learner: Learner, batch: Batch, context_weight: float, *, everything: bool) -> list[MicroStep]:
    """Gradients of the mean loss of the whole batch, computed in micro-batches."""
    micro_steps = len(batch) // learner.micro_batch
    done = []
    for part in microbatches(batch, learner.micro_batch):
        inputs = make_inputs(learner.config, learner.preprocessing, learner.runtime, part)
        with learner.runtime.autocast():
            output = learner.model(inputs.patches, inputs.target_patches, inputs.index, context_weight)
        (output.loss / micro_steps).backward()
        done.append(_keep(inputs, output, part.scanner, everything=everything))
    return done
