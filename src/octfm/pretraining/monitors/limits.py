"""What a step's loss and gradient norm must not exceed, known before the step: the device itself can then decide whether to update."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.run_state import RunState

FEWEST = 24
"""Accepted steps before one can stand out from them."""
NEAR = 8
"""Steps whose median a step is compared with."""
LASTING = 3
"""Steps most of which must show a smaller rise."""


@dataclass(frozen=True)
class Limits:
    """Rounded to float32: the device compares with the same numbers as the host."""

    loss: float = inf
    lasting_loss: float = inf
    """Lower, and infinite unless the steps before have passed it, too: one batch of hard volumes is no spike; two among three are."""
    grad_norm: float = inf


def limits(config: HealthConfig, state: RunState) -> Limits:
    """Above which a loss or gradient norm stands out from those of the last steps.

    Each is compared with the median of the `NEAR` steps before it, in the logarithm, so that a loss that falls as it should hides
    nothing; how much it may differ is told by the median absolute deviation of the same differences over the window.
    """
    loss, lasting = _above(state.losses, config.deviations, config.loss_factor, config.lasting_factor)
    return Limits(loss, lasting, _above(state.grad_norms, config.deviations, config.gradient_factor, None)[0])


def _above(history: Sequence[float], deviations: float, factor: float, lasting: float | None) -> tuple[float, float]:
    if len(history) < FEWEST:
        return inf, inf
    logs = np.log(np.maximum(history, 1e-30))
    jumps = logs[NEAR:] - np.median(np.lib.stride_tricks.sliding_window_view(logs[:-1], NEAR), axis=1)
    middle = np.median(jumps)
    spread = deviations * 1.4826 * np.median(np.abs(jumps - middle))  # the standard deviation of a normal distribution
    most = np.median(logs[-NEAR:]) + middle + max(spread, np.log(factor))
    if lasting is None:
        return float(np.float32(np.exp(most))), inf
    rise = np.median(logs[1 - LASTING - NEAR : 1 - LASTING]) + middle + max(spread, np.log(lasting))
    lasts = max(logs[1 - LASTING :]) > rise
    return float(np.float32(np.exp(most))), float(np.float32(np.exp(rise))) if lasts else inf
