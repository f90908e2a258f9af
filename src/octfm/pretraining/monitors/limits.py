"""Upper limits of a step's loss and gradient norm, set before the step so that the device can decide to skip it."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.run_state import RunState

FEWEST = 24
"""Accepted steps needed before a spike can be judged."""
NEAR = 8
"""A step is compared with the median of this many steps before it."""
LASTING = 3
"""Window of a lasting rise, in steps: two of them must show it."""


@dataclass(frozen=True)
class Limits:
    """Limits rounded to float32, so that device and host compare with the same numbers."""

    loss: float = inf
    lasting_loss: float = inf
    """A lower limit, infinite unless one of the last two steps exceeded it: one hard batch is no spike, two are."""
    grad_norm: float = inf


def limits(config: HealthConfig, state: RunState) -> Limits:
    """Limits beyond which a loss or gradient norm is a spike against the last steps. A step's logarithm is compared
    with the median of the `NEAR` steps before it, so that a falling loss hides nothing. The tolerance comes from the
    median absolute deviation of the same differences over the window."""
    loss, lasting = _above(state.losses, config.deviations, config.loss_factor, config.lasting_factor)
    return Limits(loss, lasting, _above(state.grad_norms, config.deviations, config.gradient_factor, inf)[0])


def _above(history: Sequence[float], deviations: float, factor: float, lasting: float) -> tuple[float, float]:
    if len(history) < FEWEST:
        return inf, inf
    # Logarithms make a spike the same factor at every level of the loss.
    logs = np.log(np.maximum(history, 1e-30))
    jumps = logs[NEAR:] - np.median(np.lib.stride_tricks.sliding_window_view(logs[:-1], NEAR), axis=1)
    middle = np.median(jumps)
    # 1.4826 times the median absolute deviation estimates the standard deviation of a normal distribution.
    spread = deviations * 1.4826 * np.median(np.abs(jumps - middle))
    most = np.median(logs[-NEAR:]) + middle + max(spread, np.log(factor))
    rise = np.median(logs[1 - LASTING - NEAR : 1 - LASTING]) + middle + max(spread, np.log(lasting))
    # This step and one of the two before it make two of three.
    lasts = max(logs[1 - LASTING :]) > rise
    return float(np.float32(np.exp(most))), float(np.float32(np.exp(rise))) if lasts else inf
