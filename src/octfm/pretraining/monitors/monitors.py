"""Detect faulty steps and runs during training: findings with a name, a sentence and, if known, the volumes."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

import numpy as np
import torch

from octfm.pretraining.monitors.health import PLAUSIBLE, HealthConfig, implausible, least_rank
from octfm.pretraining.monitors.limits import LASTING, NEAR, limits
from octfm.pretraining.monitors.summary import StepSummary
from octfm.pretraining.run_state import RunState
from octfm.pretraining.settings import PretrainConfig

RANKS = 4
"""Measurements of effective rank needed before a drop can be judged."""
RISE = 1.5
"""A loss rises if it has grown by this factor and is this many times that of a constant prediction; the latter ratio
is at most 2.4 and falls in healthy runs."""
APART = 0.1
"""Share by which held-out loss must rise and training loss fall to count as diverging."""
STUCK = 0.25
"""Share of weights that an update may leave unchanged; in healthy runs at most 0.001 are."""
ROUNDING = 1e-6
"""A teacher's movement below this share of its norm is lost in float32 rounding."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a step or a run."""

    what: str
    sentence: str
    kind: Literal["step", "features", "code", "advice"] = "code"
    """`step`: this update is suspect. `features`: learned features are being lost. `code`: something is computed
    wrongly. `advice`: every update is fine, but somebody should look at the run."""
    volumes: tuple[int, ...] = ()
    """Rows of the store at fault, if known."""
    damaging: bool = True
    """False if the weights are unharmed: the update was skipped, and its volumes are the cause."""


def step_findings(config: PretrainConfig, state: RunState, summary: StepSummary, index: np.ndarray) -> Finding | None:
    """The most specific finding of a step, or None. `index` are the store rows of the global batch."""
    # Causes before effects: NaN breaks every later measurement, and a leak or reversed gradient explains a spike.
    return (
        non_finite(summary.masked_loss_B + summary.context_loss_B, summary.grad_norm, index)
        or miscalculated(summary.leak, summary.ascent, summary.batch_effect)
        or spike(config.health, state, summary.loss, summary.grad_norm)
    )


def non_finite(losses_B: torch.Tensor, grad_norm: float, index: np.ndarray) -> Finding | None:
    """NaN or infinity in a volume's loss or in the gradient norm."""
    bad = (~torch.isfinite(losses_B)).cpu().numpy()
    if bad.any():
        rows = tuple(int(row) for row in index[bad])
        sentence = f"the loss of {bad.sum()} of {len(bad)} volumes is not finite"
        # If most losses fail at once, the cause is the weights and not their volumes, none of which would be left.
        most = bool(bad.mean() > 0.5)
        return Finding("non-finite loss", sentence, "step", () if most else rows, damaging=most)
    if not isfinite(grad_norm):
        sentence = f"gradient norm is {grad_norm}, every loss is finite: the backward pass overflowed"
        return Finding("non-finite gradient", sentence, "step")
    return None


def spike(config: HealthConfig, state: RunState, loss: float, grad_norm: float) -> Finding | None:
    """A loss or gradient norm above its limit."""
    most = limits(config, state)
    for name, history, value, limit in (
        ("loss", state.losses, loss, most.loss),
        ("gradient", state.grad_norms, grad_norm, most.grad_norm),
    ):
        if value > limit:
            rise = value / np.median(history[-NEAR:])
            sentence = f"{name} is {value:.3g}, {rise:.1f} times the median of the {NEAR} steps before"
            return Finding(f"{name} spike", sentence, "step")
        if name == "loss" and value > most.lasting_loss:
            rise = min(value, max(history[1 - LASTING :])) / np.median(history[1 - LASTING - NEAR : 1 - LASTING])
            sentence = f"{name} is {rise:.1f} times the median of the {NEAR} steps before, and not in this step alone"
            return Finding(f"{name} spike", sentence, "step")
    return None


def sudden_drop(config: HealthConfig, state: RunState, rank: float) -> Finding | None:
    """A steep fall of both loss and rank: features become constant, which are easy to predict. Learning keeps rank."""
    if len(state.losses) < config.window or len(state.ranks) < RANKS:
        return None
    now, before = np.median(state.losses[-NEAR:]), np.median(state.losses[: config.window // 2])
    usual = float(np.median(state.ranks))
    if now < config.drop * before and rank < config.drop * usual:
        sentence = (
            f"in {config.window} steps masked loss fell from {before:.3g} to {now:.3g} and effective rank from "
            f"{usual:.1f} to {rank:.1f}"
        )
        return Finding("sudden drop", sentence, "features")
    return None


def rising_loss(state: RunState, ratio: float) -> Finding | None:
    """A loss that grows beyond a constant prediction's: whatever the cause, training is undoing what was learned."""
    if len(state.losses) < 2 * NEAR or ratio < RISE:
        return None
    now, before = np.median(state.losses[-NEAR:]), np.median(state.losses[:NEAR])
    if now < RISE * before:
        return None
    return Finding(
        "rising loss",
        f"masked loss has grown {now / before:.1f}-fold within {len(state.losses)} steps, to {ratio:.1f} times that of "
        "a constant prediction; check the signs of loss and gradient, and lower schedule.base_lr",
        "features",
    )


def held_out(rows: Iterable[dict[str, Any]]) -> Finding | None:
    """Overfitting: held-out loss rises while training loss falls. `rows` are a run's metrics up to a validation.

    Compares the last validation with the best earlier one, each with the median training loss just before it; losses
    are relative to their baselines. Only validations since the number of volumes last changed count: their volumes and
    masks are the same, so little of the difference is chance."""
    training: list[float] = []
    points: list[tuple[int, float, float]] = []
    volumes: int | None = None
    for row in rows:
        if row["kind"] == "train":
            training.append(float(row["masked_over_baseline"]))
        elif row["kind"] == "validation" and training:
            if row.get("volumes") != volumes:
                points, volumes = [], row.get("volumes")
            points.append(
                (int(row["step"]) + 1, float(row["masked_over_baseline"]), float(np.median(training[-NEAR:])))
            )
            training = []
    if len(points) < 2:
        return None
    step, now, training_now = points[-1]
    best, lowest, training_then = min(points[:-1], key=lambda point: point[1])
    highest_since = max((point[1] for point in points[:-1] if point[0] > best), default=0.0)
    # Report each new high once, not every validation above the best one.
    if now < (1 + APART) * lowest or training_now > (1 - APART) * training_then or now <= highest_since:
        return None
    return Finding(
        "held-out loss",
        f"from step {best} to {step} the loss on held-out participants rose from {lowest:.3f} to {now:.3f} of its "
        f"baseline, while the training loss fell from {training_then:.3f} to {training_now:.3f}: the run memorises its "
        "volumes; train on more of them or for fewer steps, augment more, and take the checkpoint near "
        f"step {best}",
        "advice",
    )


class LearningRate:
    """Check that the applied learning rate is never 0 and, after warm-up, never rises (F1, F2)."""

    def __init__(self, warmup_steps: int):
        self.warmup_steps, self.lowest = warmup_steps, float("inf")

    def __call__(self, step: int, lr: float) -> Finding | None:
        if not lr > 0:
            return Finding("learning rate", f"learning rate is {lr}: this update trains nothing (F2)")
        if step < self.warmup_steps:
            return None
        lowest, self.lowest = self.lowest, min(self.lowest, lr)
        # Rounding may raise a rate by less; a restarted schedule raises it many times.
        if lr > 1.001 * lowest:
            return Finding(
                "learning rate",
                f"learning rate is {lr:.2e}, {lr / lowest:.1f} times its lowest value since warm-up: the schedule was "
                "restarted (F1)",
            )
        return None


def miscalculated(leak: float | None, ascent: float | None, batch_effect: float | None) -> Finding | None:
    """A nonzero gradient from target voxels through the context path (F11), an objective that falls as a volume's loss
    rises, or a volume's loss that depends on the rest of its batch. None: not measured."""
    if leak is not None and leak > 0:
        sentence = f"gradient w.r.t. target voxels is {leak:.1e}: the encoder sees the answers (F11)"
        return Finding("context unmasked", sentence)
    if ascent is not None and ascent > 0:
        sentence = "the minimised value falls as a volume's loss rises, so training makes predictions worse"
        return Finding("gradient reversed", f"{sentence}; check the sign of the loss")
    # Well above the rounding of float32, in which `batch_effect` is computed.
    if batch_effect is not None and batch_effect > 1e-3:
        changes = f"a volume's loss changes by {batch_effect:.1%} with the rest of its batch"
        return Finding("batch statistics", f"{changes}: a layer normalises over the batch")
    return None


def row_findings(config: HealthConfig, state: RunState, row: dict[str, Any], width: int) -> Finding | None:
    """A finding from measurements after an update: movement of weights and teacher, collapse, an implausible loss."""
    # The audit leaves out `update_size` if the whole update is rounding; compiled steps have no audit at all.
    should_move = "update_size" in row or "gradient_taken" not in row
    if row.get("weights_stuck", 0.0) > STUCK and should_move and not row.get("untaught"):
        return Finding(
            "underflow",
            f"{row['weights_stuck']:.0%} of the weights did not change in an update: gradients or updates are lost in "
            "rounding",
        )
    if row.get("ranks_apart", 0.0) > 0:
        return Finding(
            "ranks apart",
            f"ranks that started with equal weights differ by {row['ranks_apart']:.1e} of their norm: they do not "
            "apply the same updates",
        )
    if found := update_findings(state, row):
        return found
    expected, actual = row.get("teacher_asked", 0.0), row.get("teacher_step", 0.0)
    if expected > ROUNDING and not 0.5 < actual / expected < 2:
        return Finding(
            "teacher frozen" if actual < expected else "teacher",
            f"the target encoder moved by {actual:.1e} of its norm, its moving average should move it by "
            f"{expected:.1e} (F11)",
        )
    if expected > ROUNDING and row["teacher_along"] < 0.5:
        return Finding(
            "teacher",
            "the target encoder does not move towards the encoder that it averages (cosine "
            f"{row['teacher_along']:.2f}, expected 1), so its targets are wrong; check the sign and size of its "
            "momentum (F11)",
        )
    rank, std = row["effective_rank"], row["feature_std"]
    least = least_rank(config.rank_share * width + 1, row.get("tissue_tokens", inf))
    if rank < least or std < config.least_std:
        return Finding(
            "collapse", f"tissue tokens are all alike: effective rank {rank:.1f} of {width}, std {std:.2g}", "features"
        )
    if 0 <= row["masked_over_baseline"] < PLAUSIBLE:
        return Finding("masked loss", implausible(row["masked_over_baseline"]))
    return rising_loss(state, row["masked_over_baseline"]) or sudden_drop(config, state, rank)


def update_findings(state: RunState, row: dict[str, Any]) -> Finding | None:
    """A finding from the audit of an update (audit.py), from gradient to weights; None if the step was not audited."""
    agrees = row.get("gradient_agrees", 1.0)
    if agrees < 0:
        sentence = "the optimizer gets the gradient with the wrong sign, so training makes predictions worse"
        return Finding("gradient reversed", sentence)
    if agrees < 0.5:
        sentence = f"the optimizer gets the gradient {1 / max(agrees, 1e-3):.3g} times as large, or a different one"
        return Finding("gradient", sentence)
    if min(row.get("update_agrees", 1.0), row.get("gradient_taken", 1.0)) < 0:
        return Finding(
            "gradient reversed",
            "the weights move along the gradient instead of against it, so training makes predictions worse; check the "
            "sign of the learning rate and `maximize`",
        )
    if row.get("counted", inf) < len(state.losses):
        return Finding(
            "optimizer state",
            f"the optimizer has counted {row['counted']:.0f} updates, the run has applied at least "
            f"{len(state.losses)}: its moments were lost; go back to the checkpoint before the last resume",
        )
    if row.get("frozen"):
        blocks = sorted({name.rpartition(".")[0] for name in row["frozen"]})
        parts = ", ".join(blocks[:4]) + (f" and {len(blocks) - 4} more" if len(blocks) > 4 else "")
        return Finding(
            "encoder frozen",
            f"{len(row['frozen'])} weight matrices of the encoder get no gradient or no update ({parts}) and stay "
            "untrained; check requires_grad, detach and the optimizer's groups",
        )
    if not 0.5 < row.get("update_size", 1.0) < 2:
        sentence = f"the weights move {row['update_size']:.3g} times as far as learning rate and moments prescribe"
        return Finding("update", sentence)
    if row.get("moments_astray", 0.0) > 0.1:
        sentence = (
            f"the optimizer's moments differ by {row['moments_astray']:.0%} from those computed from the gradients"
        )
        return Finding("optimizer state", sentence)
    return None
