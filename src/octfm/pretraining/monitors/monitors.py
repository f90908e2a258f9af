"""What tells, while a run trains, that a step or the run cannot be believed: findings with a name, a sentence and, where known, volumes."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
import torch

from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.monitors.limits import LASTING, NEAR, limits
from octfm.pretraining.run_state import RunState
from octfm.pretraining.settings import PretrainConfig
from octfm.pretraining.step import Told

RANKS = 4
"""Looks at the features before a drop of their rank is believed."""
RISE = 1.5
"""Growth of the loss, and share of the constant answer's, from which it is rising; sound runs begin at up to 2.4 and fall."""
APART = 0.1
"""Share by which held-out loss must rise, and training loss fall, before they count as parting."""
STUCK = 0.25
"""Share of the weights that an update must not leave as they were; in sound runs it is .001 at most."""
ROUNDING = 1e-6
"""A teacher that should move by less than this share of its norm cannot be told from one that stands still in float32."""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be."""

    what: str
    sentence: str
    kind: Literal["step", "features", "code", "advice"]
    """`step`: this update is in doubt. `features`: what was learned is being lost. `code`: something is not computed as it should be.
    `advice`: every update is sound, and somebody should look at the run all the same."""
    volumes: tuple[int, ...] = ()
    """Rows of the store that it comes from, where they are known."""
    damaging: bool = True
    """False when the weights cannot have suffered: the update was not made, and its volumes are to blame."""


def step_findings(config: PretrainConfig, state: RunState, told: Told, index: np.ndarray) -> Finding | None:
    """The most telling finding of a step, or none. `index` are the rows of all its volumes."""
    return (
        non_finite(told.masked_loss_B + told.context_loss_B, told.grad_norm, index)
        or context(told.leak)
        or ascent(told.ascent)
        or batch_statistics(told.company)
        or spike(config.health, state, told.loss, told.grad_norm)
    )


def non_finite(losses_B: torch.Tensor, grad_norm: float, index: np.ndarray) -> Finding | None:
    """A loss or a gradient that is no number."""
    bad = (~torch.isfinite(losses_B)).cpu().numpy()
    if bad.any():
        rows = tuple(int(row) for row in index[bad])
        told = f"the loss of {bad.sum()} of {len(bad)} volumes is not finite"
        # All of them at once is not the fault of volumes.
        return Finding("non-finite loss", told, "step", rows if not bad.all() else (), damaging=bool(bad.all()))
    if not isfinite(grad_norm):
        return Finding(
            "non-finite gradient",
            f"gradient norm is {grad_norm}, every loss is finite: the backward pass overflowed",
            "step",
        )
    return None


def spike(config: HealthConfig, state: RunState, loss: float, grad_norm: float) -> Finding | None:
    """A loss or gradient norm beyond its limits."""
    most = limits(config, state)
    for name, history, value, limit in (
        ("loss", state.losses, loss, most.loss),
        ("gradient", state.grad_norms, grad_norm, most.grad_norm),
    ):
        if value > limit:
            told = f"{name} is {value:.3g}, {value / np.median(history[-NEAR:]):.1f} times the median of the {NEAR} steps before"
            return Finding(f"{name} spike", told, "step")
        if name == "loss" and value > most.lasting_loss:
            rise = min(value, max(history[1 - LASTING :])) / np.median(history[1 - LASTING - NEAR : 1 - LASTING])
            told = f"{name} is {rise:.1f} times the median of the {NEAR} steps before, and not in this step alone"
            return Finding(f"{name} spike", told, "step")
    return None


def sudden_drop(config: HealthConfig, state: RunState, rank: float) -> Finding | None:
    """A loss that falls steeply while the features lose rank has found constant features (FACTS section 3); learning keeps them."""
    if len(state.losses) < config.window or len(state.ranks) < RANKS:
        return None
    now, before = np.median(state.losses[-NEAR:]), np.median(state.losses[: config.window // 2])
    usual = float(np.median(state.ranks))
    if now < config.drop * before and rank < config.drop * usual:
        told = f"in {config.window} steps masked loss fell from {before:.3g} to {now:.3g} and effective rank from {usual:.1f} to {rank:.1f}"
        return Finding("sudden drop", told, "features")
    return None


def rising_loss(state: RunState, ratio: float) -> Finding | None:
    """A loss that grows away from what any constant answer has: whatever the cause, training does the opposite of learning."""
    if len(state.losses) < 2 * NEAR or ratio < RISE:
        return None
    now, before = np.median(state.losses[-NEAR:]), np.median(state.losses[:NEAR])
    if now < RISE * before:
        return None
    told = f"masked loss has grown {now / before:.1f}-fold within {len(state.losses)} steps, to {ratio:.1f} times that of a constant answer"
    return Finding(
        "rising loss", f"{told}: check the signs of loss and gradient, and lower schedule.base_lr", "features"
    )


def held_out(rows: Iterable[dict[str, Any]]) -> Finding | None:
    """From a run's metrics up to a validation: held-out loss rises while training loss falls.

    The validation is compared with the best one before it, each with the training steps that led to it; both as shares of their
    baselines. Held-out volumes and masks are the same ones every time, so little of the difference is chance.
    """
    looks: list[float] = []
    points: list[tuple[int, float, float]] = []
    for row in rows:
        if row["kind"] == "train":
            looks.append(float(row["masked_over_baseline"]))
        elif row["kind"] == "validation" and looks:
            points.append((int(row["step"]), float(row["masked_over_baseline"]), float(np.median(looks[-NEAR:]))))
            looks = []
    if len(points) < 2:
        return None
    step, now, training = points[-1]
    best, lowest, then = min(points[:-1], key=lambda point: point[1])
    highest_since = max((point[1] for point in points[:-1] if point[0] > best), default=0.0)
    if now < (1 + APART) * lowest or training > (1 - APART) * then or now <= highest_since:
        return None
    return Finding(
        "held-out loss",
        f"from step {best} to {step} the loss on held-out participants rose from {lowest:.3f} to {now:.3f} of its baseline, while that of "
        f"training fell from {then:.3f} to {training:.3f}: the run learns its volumes by heart; train on more of them or for fewer steps, "
        f"augment more, and take the checkpoint near step {best}",
        "advice",
    )


class LearningRate:
    """After the warm-up the rate that is applied never rises and is never 0 (F1, F2), whatever the schedule's code says."""

    def __init__(self, warmup_steps: int):
        self.warmup_steps, self.lowest = warmup_steps, float("inf")

    def __call__(self, step: int, lr: float) -> Finding | None:
        if not lr > 0:
            return Finding("learning rate", f"{lr}: this update trains nothing (F2)", "code")
        if step < self.warmup_steps:
            return None
        lowest, self.lowest = self.lowest, min(self.lowest, lr)
        if lr > 1.001 * lowest:
            return Finding(
                "learning rate",
                f"{lr:.2e}, {lr / lowest:.1f} times what it had come down to: it was restarted (F1)",
                "code",
            )
        return None


def context(leak: float | None) -> Finding | None:
    """The context path must get exactly no gradient from the voxels of targets (F11); None was not looked at."""
    if leak is not None and leak > 0:
        return Finding(
            "context unmasked",
            f"gradient w.r.t. target voxels is {leak:.1e}: the encoder sees the answers (F11)",
            "code",
        )
    return None


def ascent(slope: float | None) -> Finding | None:
    """What is minimised must grow with the loss of every volume; None was not looked at."""
    if slope is not None and slope > 0:
        return Finding(
            "gradient reversed",
            "what is minimised falls as the loss of a volume rises, so training makes predictions worse: check the sign of the loss",
            "code",
        )
    return None


def batch_statistics(change: float | None) -> Finding | None:
    """The loss of a volume must not depend on which others are in its batch: a norm over the batch leaks between volumes."""
    if change is not None and change > 1e-3:
        told = f"the loss of a volume changes by {change:.1%} with its company in a batch: something is normalised over the batch"
        return Finding("batch statistics", told, "code")
    return None


def row_findings(config: HealthConfig, state: RunState, row: dict[str, Any], width: int) -> Finding | None:
    """What the measurements after an update say: movement of weights and teacher, collapse, a loss too good to be true."""
    # An audited update that is all rounding has no size; a compiled step is not audited.
    asked_to_move = "update_size" in row or "gradient_taken" not in row
    if row.get("weights_stuck", 0.0) > STUCK and asked_to_move and not row.get("untaught"):
        told = f"{row['weights_stuck']:.0%} of the weights did not change in an update: gradients or updates are lost in rounding"
        return Finding("underflow", told, "code")
    if row.get("ranks_apart", 0.0) > 0:
        told = f"ranks that began with the same weights differ by {row['ranks_apart']:.1e} of their norm: they do not make the same updates"
        return Finding("ranks apart", told, "code")
    if found := update_findings(state, row):
        return found
    asked, moved = row.get("teacher_asked", 0.0), row.get("teacher_step", 0.0)
    if asked > ROUNDING and not 0.5 < moved / asked < 2:
        what = "teacher frozen" if moved < asked else "teacher"
        return Finding(
            what,
            f"the target encoder moved by {moved:.1e} of its norm, and its average asks for {asked:.1e} (F11)",
            "code",
        )
    if asked > ROUNDING and row["teacher_along"] < 0.5:
        told = f"the target encoder moves away from the encoder that it averages (cosine {row['teacher_along']:.2f} instead of 1)"
        return Finding(
            "teacher",
            f"{told}, so the answers to learn lead nowhere; check the sign and size of its momentum (F11)",
            "code",
        )
    rank, std = row["effective_rank"], row["feature_std"]
    if rank < config.rank_share * width + 1 or std < config.least_std:
        return Finding(
            "collapse", f"tissue tokens are all alike: effective rank {rank:.1f} of {width}, std {std:.2g}", "features"
        )
    if 0 <= row["masked_over_baseline"] < 0.02:
        told = f"{row['masked_over_baseline']:.3f} of the content-free baseline is too good to be true: are the answers seen? (F11)"
        return Finding("masked loss", told, "code")
    return rising_loss(state, row["masked_over_baseline"]) or sudden_drop(config, state, rank)


def update_findings(state: RunState, row: dict[str, Any]) -> Finding | None:
    """What the way from the gradient to the weights says (audit.py); nothing where it was not followed."""
    if row.get("gradient_agrees", 1.0) < 0.5:
        told = "the optimizer gets the gradient of the passes" + (
            " with the wrong sign, so training makes predictions worse"
            if row["gradient_agrees"] < 0
            else f" {1 / max(row['gradient_agrees'], 1e-3):.3g} times as large, or another one"
        )
        return Finding("gradient reversed" if row["gradient_agrees"] < 0 else "gradient", told, "code")
    if min(row.get("update_agrees", 1.0), row.get("gradient_taken", 1.0)) < 0:
        told = "the weights move along the gradient and not against it, so training makes predictions worse"
        return Finding("gradient reversed", f"{told}; check the sign of the learning rate and `maximize`", "code")
    if row.get("counted", inf) < len(state.losses):
        told = f"it counts {row['counted']:.0f} updates, and the run has made {len(state.losses)} or more: its moments were lost on the way"
        return Finding("optimizer state", f"{told}; go back to the checkpoint before the last resume", "code")
    if row.get("frozen"):
        blocks = sorted({name.rpartition(".")[0] for name in row["frozen"]})
        parts = ", ".join(blocks[:4]) + (f" and {len(blocks) - 4} more" if len(blocks) > 4 else "")
        told = f"{len(row['frozen'])} weight matrices of the encoder get no gradient or no update ({parts}): they stay untrained"
        return Finding("encoder frozen", f"{told}; check requires_grad, detach and the optimizer's groups", "code")
    if not 0.5 < row.get("update_size", 1.0) < 2:
        told = f"the weights move {row['update_size']:.3g} times as far as learning rate and moments ask for"
        return Finding("update", told, "code")
    if row.get("moments_astray", 0.0) > 0.1:
        told = f"the optimizer's moments differ by {row['moments_astray']:.0%} from what the gradients make of them"
        return Finding("optimizer state", told, "code")
    return None
