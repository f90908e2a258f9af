"""One step's forward and backward passes: the global batch in micro-batches, gradients accumulated, losses kept per volume."""

from dataclasses import dataclass

import torch

from octfm.data.loader import Batch, microbatches
from octfm.data.preprocessing import Preprocessing
from octfm.masks import TokenMasks
from octfm.models.data2vec import Data2Vec
from octfm.models.jepa import JEPA
from octfm.models.objective import ObjectiveOutput
from octfm.training.inputs import Inputs, make_inputs
from octfm.training.runtime import Runtime
from octfm.training.settings import PretrainConfig


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


def accumulate(
    config: PretrainConfig,
    model: JEPA | Data2Vec,
    runtime: Runtime,
    preprocessing: Preprocessing,
    batch: Batch,
    size: int,
    context_weight: float,
    *,
    everything: bool,
) -> list[MicroStep]:
    """Gradients of the mean loss of the whole batch, computed in micro-batches of `size` volumes."""
    micro_steps = len(batch) // size
    done = []
    for part in microbatches(batch, size):
        inputs = make_inputs(config, preprocessing, runtime, part)
        with runtime.autocast():
            output = model(inputs.patches, inputs.target_patches, inputs.index, context_weight)
        (output.loss / micro_steps).backward()
        done.append(_keep(inputs, output, part.scanner, everything=everything))
    return done
