"""Health of a run: measurements on tissue tokens, and a verdict in words for each."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from octfm.config import Config
from octfm.run.runtime import widest_on


class HealthConfig(Config):
    """When a step counts as faulty, and what happens then."""

    check_every_steps: int = Field(default=10, ge=1, le=10_000_000)
    """Steps between inspections of features, teacher and objective; logged steps are inspected as well."""
    window: int = Field(default=64, ge=32, le=100_000)
    """Accepted steps that a loss and a gradient norm are compared with."""
    deviations: float = Field(default=8.0, gt=0, le=1e12)
    """A spike is this many robust standard deviations above the steps before it, and at least the factors below."""
    loss_factor: float = Field(default=3.0, gt=1, le=1e12)
    """Least factor over the median loss of the window that makes a spike."""
    gradient_factor: float = Field(default=20.0, gt=1, le=1e12)
    """Least factor over the median gradient norm of the window that makes a spike."""
    lasting_factor: float = Field(default=1.3, gt=1, le=1e12)
    """Factor for the loss if two of the last three steps exceed it."""
    drop: float = Field(default=0.5, gt=0, lt=1)
    """Share of their earlier medians below which loss and effective rank must not both fall within the window."""
    rank_share: float = Field(default=0.01, ge=0, lt=1)
    """Collapse: effective rank of tissue tokens below this share of the width, plus 1."""
    least_std: float = Field(default=0.01, ge=0, le=1e3)
    """Collapse: standard deviation over tissue tokens below this."""
    max_skips: int = Field(default=4, ge=1, le=1_000_000)
    """This many skipped updates within `skip_window` steps roll the run back."""
    skip_window: int = Field(default=50, ge=1, le=1_000_000)
    """Steps over which skipped updates are counted."""
    margin: int = Field(default=20, ge=0, le=1_000_000)
    """A checkpoint this many steps before the first sign of trouble is preferred to a later one."""
    max_rollbacks: int = Field(default=2, ge=0, le=1_000_000)
    """Times that training may continue from the same checkpoint before the run stops."""
    lr_factor: float = Field(default=1.0, gt=0, le=1)
    """Factor on the learning rate at each rollback; 1 leaves it unchanged."""
    max_excluded: float = Field(default=0.05, ge=0, lt=1)
    """Share of the volumes that may be excluded before the run stops."""
    on_fault: Literal["stop", "warn"] = "stop"
    """What to do when something is computed wrongly (teacher frozen, context unmasked, learning rate restarted …)."""


PLAUSIBLE = 0.02
"""Masked loss over that of a constant prediction below which answers must have leaked."""


@dataclass(frozen=True)
class Verdict:
    """One inspected property of a run, its state, and a sentence that says what that means or what to do."""

    what: str
    verdict: Literal["ok", "watch", "bad"]
    sentence: str


@torch.no_grad()
def effective_rank(features_MD: Tensor) -> float:
    """RankMe (arXiv:2210.02885) of centred features, from 1 (collapse) to the width D: exp of the entropy of the
    normalised singular values."""
    # float64: the Gram matrix squares the condition number, and float32 noise would pass for rank.
    if widest_on(features_MD.device) is not torch.float64:
        features_MD = features_MD.cpu()
    centred = features_MD.double() - features_MD.double().mean(0)
    singular = torch.linalg.eigvalsh(centred.T @ centred).clamp_min(0).sqrt()
    share = singular / singular.sum().clamp_min(1e-12)
    return float(torch.exp(-(share * share.clamp_min(1e-12).log()).sum()))


def least_rank(usual: float, tokens: float) -> float:
    """Effective rank to expect of so many tokens: `usual`, or less of so few that theirs cannot be higher."""
    return min(usual, tokens / 4)


@torch.no_grad()
def feature_std(features_MD: Tensor) -> float:
    """Mean over channels of the standard deviation over tokens; 0 is collapse."""
    return float(features_MD.float().std(0).mean())


@torch.no_grad()
def relative_distance(a: list[Tensor], b: list[Tensor], sum_shares_: Callable[[Tensor], None]) -> Tensor:
    """|a - b| / |b| over lists of tensors; `sum_shares_` sums over the shares of sharded tensors, in place."""
    norms = torch.stack([torch.stack(torch._foreach_norm(x)).norm() for x in (torch._foreach_sub(a, b), b)])
    # Squares of the norms of shares add up, norms do not.
    squares = norms.square()
    sum_shares_(squares)
    norms = squares.sqrt()
    return norms[0] / norms[1].clamp_min(1e-12)


@torch.no_grad()
def cosine(start: list[Tensor], a: list[Tensor], b: list[Tensor], sum_shares_: Callable[[Tensor], None]) -> Tensor:
    """Cosine between `a - start` and `b - start`, 0 if either is 0. `sum_shares_`: as in `relative_distance`."""
    # One tensor after the other: all differences at once would take twice the memory of the weights.
    pairs = ((x - s, y - s) for s, x, y in zip(start, a, b, strict=True))
    sums = torch.stack([torch.stack(((x * y).sum(), (x * x).sum(), (y * y).sum())) for x, y in pairs]).sum(0)
    sum_shares_(sums)
    return sums[0] / (sums[1].sqrt() * sums[2].sqrt()).clamp_min(1e-30)


def verdicts(row: dict[str, Any], width: int) -> list[Verdict]:
    """Judge one train row of metrics.jsonl in words."""
    # Thresholds of "watch" and "bad" are explained in docs/guide/faq.md, and a test keeps both equal.
    found = [
        _masked(row["masked_over_baseline"], row["step"], row["warmup_steps"]),
        _rank(row["effective_rank"], width, row.get("tissue_tokens", inf)),
        _gradient(row["grad_norm"]),
    ]
    if "teacher_step" in row:
        found.append(_teacher(row["teacher_step"], row["teacher_asked"]))
    if row["dead_targets"] > 0.3:
        dead = f"{row['dead_targets']:.0%} of targets are background: lower masks.budget so that tissue fills it"
        found.append(Verdict("targets", "watch", dead))
    if row["data_wait_share"] > 0.2:
        waited = f"{row['data_wait_share']:.0%} of the time was spent waiting for data"
        found.append(Verdict("data", "watch", f"{waited}: raise data.prefetch or use a local store"))
    return found


def _masked(ratio: float, step: int, warmup_steps: int) -> Verdict:
    name, share = "masked loss", f"{ratio:.0%} of the content-free baseline"
    if ratio < PLAUSIBLE:
        return Verdict(name, "bad", implausible(ratio))
    if ratio < 0.97:
        return Verdict(name, "ok", f"predicts hidden tissue with {ratio:.0%} of a constant prediction's error")
    if step < 3 * warmup_steps + 50:
        return Verdict(name, "ok", f"{share}, as expected this early")
    return Verdict(name, "watch", f"{share}: no better than a constant; check learning rate and masks")


def implausible(ratio: float) -> str:
    """What a masked loss below PLAUSIBLE means."""
    return f"{ratio:.3f} of the content-free baseline is too good to be true: does the encoder see the answers? (F11)"


def _rank(rank: float, width: int, tokens: float) -> Verdict:
    if rank < least_rank(0.01 * width + 1, tokens):
        return Verdict("effective rank", "bad", f"{rank:.1f} of {width}: features have collapsed to a few directions")
    if rank < least_rank(0.04 * width, tokens):
        return Verdict(
            "effective rank", "watch", f"{rank:.1f} of {width}: low; raise objective.context_loss if it keeps falling"
        )
    return Verdict("effective rank", "ok", f"{rank:.1f} of {width} directions in use on tissue tokens")


def _teacher(actual: float, expected: float) -> Verdict:
    if actual < 0.5 * expected and expected > 1e-6:
        return Verdict(
            "teacher", "bad", f"moved by {actual:.1e} of its norm where its average asks for {expected:.1e} (F11)"
        )
    return Verdict("teacher", "ok", f"moved by {actual:.1e} of its norm in the last update")


def _gradient(norm: float) -> Verdict:
    if norm == 0:
        return Verdict("gradient", "bad", "gradient norm before clipping is exactly 0: nothing is learned (F3)")
    return Verdict("gradient", "ok", f"norm {norm:.3g} before clipping")
