"""Learning rate, weight decay and EMA momentum, evaluated at every step of the run (F1, F2, F11)."""

from math import ceil

import numpy as np

from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.pretraining.schedule import Schedule

LONG_RUN = 3000
"""In a run of this many steps or more, a teacher that hardly moves is a failure; in a shorter one, a warning."""


def learning_rate(schedule: Schedule) -> list[Check]:
    """One warm-up, one decay (or a declared constant), no restart, and never 0 (F1, F2)."""
    name, curve = "learning rate", np.array([schedule.lr(step) for step in range(schedule.steps)])
    peak = schedule.config.base_lr
    measured = f"{curve[0]:.2e} at step 0, peak {curve.max():.2e} at step {curve.argmax()}, {curve[-1]:.2e} at the end"
    found = []
    if not (curve > 0).all():
        zero = f"0 at step {int(np.argmin(curve > 0))}"
        found.append(fail(name, zero, "a step with learning rate 0 trains nothing (F2)"))
    rises = np.flatnonzero(np.diff(curve) > 1e-12 * peak) + 1
    late = rises[rises > schedule.warmup_steps]
    if late.size:
        again = f"rises again at step {late[0]}, after the warm-up of {schedule.warmup_steps} steps"
        found.append(fail(name, again, "a restart diverges (F1)"))
    warming = np.diff(curve[: schedule.warmup_steps]) < -1e-12 * peak
    if warming.any():
        again = f"falls at step {int(warming.argmax()) + 1}, within the warm-up of {schedule.warmup_steps} steps"
        found.append(fail(name, again, "one warm-up has no second beginning (F1)"))
    declared = schedule.config.lr_shape == "constant" or schedule.config.min_lr_ratio > 1 - 1e-6
    if schedule.steps > schedule.warmup_steps + 1 and not declared and curve[-1] >= curve.max():
        advice = "set schedule.lr_shape=constant if that is what you want (F1)"
        found.append(fail(name, f"{measured}: it never decays", advice))
    return found or [passed(name, f"one warm-up, then {schedule.config.lr_shape}: {measured}")]


def weight_decay(schedule: Schedule) -> Check:
    """Weight decay must never be negative, and must only rise or only fall."""
    name, curve = "weight decay", np.array([schedule.weight_decay(step) for step in range(schedule.steps)])
    measured = f"{curve[0]:g} at step 0, {curve[-1]:g} at the end"
    if not np.isfinite(curve).all() or curve.min() < 0:
        bad = int(np.argmin(np.isfinite(curve) & (curve >= 0)))
        advice = "it must be 0 or more: below 0 weights grow without end"
        return fail(name, f"{curve[bad]:g} at step {bad}", advice)
    change = np.diff(curve)
    if (change > 0).any() and (change < 0).any():
        return fail(name, f"{measured}, and it rises and falls in between", "let it be constant or go one way")
    return passed(name, measured)


def teacher(schedule: Schedule) -> Check:
    """Momentum must stay in 0 … 1 and never fall, and leave at most 5 % of the first teacher after a quarter of the run
    (F11)."""
    name, curve = "teacher momentum", np.array([schedule.ema(step) for step in range(schedule.steps)])
    outside = (curve < 0) | (curve > 1)
    if outside.any():
        bad = int(outside.argmax())
        advice = "an average needs a momentum from 0 to 1; see schedule.ema_base"
        return fail(name, f"{curve[bad]:.4f} at step {bad}", advice)
    if (falls := np.diff(curve) < -1e-12).any():
        fall = f"falls at step {int(falls.argmax()) + 1}"
        return fail(name, fall, "raise schedule.ema_end above schedule.ema_base")
    quarter = ceil(schedule.steps / 4)
    left = float(np.prod(curve[:quarter]))
    momentum = f"momentum from {schedule.ema_base:.5f} to {curve[-1]:.5f}"
    measured = f"{left:.1%} of the initial teacher is left after {quarter} steps ({momentum})"
    if left <= 0.05 + 1e-9:
        return passed(name, measured)
    advice = "lower schedule.ema_base, or set it to null to derive it from the run length (F11)"
    return (fail if schedule.steps >= LONG_RUN else warn)(name, measured, advice)
