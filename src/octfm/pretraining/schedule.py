"""Learning rate, weight decay and EMA momentum as pure functions of the step: nothing to save or restart (F1, F2)."""

from dataclasses import dataclass
from math import cos, pi
from typing import Literal

from pydantic import Field

from octfm.config import Config, LearningRate


class ScheduleConfig(Config):
    """Learning rate, weight decay and teacher momentum over the run: one warm-up, one decay."""

    base_lr: LearningRate = 2.5e-4
    """Peak learning rate. On OCT 5e-4 diverged and 2.5e-4 was stable (ViT-B, batch 512)."""
    min_lr_ratio: float = Field(default=0.1, gt=0, le=1)
    """Ratio of final to peak learning rate; never 0, so that no step is wasted."""
    warmup_ratio: float = Field(default=0.03, ge=0, lt=1)
    """Share of the run spent warming up."""
    lr_shape: Literal["cosine", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up: down along a cosine, or constant at its peak."""
    weight_decay: float = Field(default=0.05, ge=0, le=100)
    """AdamW's weight decay, constant over the run; not for biases, norms, single tokens and learned positions."""
    ema_base: float | None = Field(default=None, ge=0, lt=1)
    """Momentum of the target encoder (the teacher) at step 0: the share of its own weights that it keeps in an update;
    the rest comes from the encoder. null: as much as leaves 5 % of the initial teacher after a quarter of the run, at
    most 0.999."""
    ema_end: float = Field(default=1.0, gt=0, le=1)
    """Momentum at the end of the run, reached along a cosine. At 1 the target encoder no longer changes."""


@dataclass(frozen=True)
class Schedule:
    """The curves of one run of `steps` updates."""

    config: ScheduleConfig
    steps: int

    @property
    def warmup_steps(self) -> int:
        return round(self.config.warmup_ratio * self.steps)

    @property
    def ema_base(self) -> float:
        """As configured; else at most 0.999, so low that a quarter of the run leaves 5 % of the first teacher."""
        if self.config.ema_base is not None:
            return self.config.ema_base
        # 4.22, not 4: momentum rises along its cosine, by 5 % of (1 - base) on average over the first quarter.
        return min(0.999, 0.05 ** (4.22 / max(4.22, self.steps)))

    def lr(self, step: int) -> float:
        peak, end = self.config.base_lr, self.config.base_lr * self.config.min_lr_ratio
        if step < self.warmup_steps:
            # From step + 1: with a rate of 0 the first update would be wasted.
            return peak * (step + 1) / self.warmup_steps
        return peak if self.config.lr_shape == "constant" else _cosine(peak, end, self._progress(step))

    def weight_decay(self, step: int) -> float:
        return self.config.weight_decay

    def ema(self, step: int) -> float:
        return _cosine(self.ema_base, self.config.ema_end, min(1.0, step / max(1, self.steps)))

    def _progress(self, step: int) -> float:
        # The last update is step `steps - 1`, and gets the final rate.
        return min(1.0, (step - self.warmup_steps) / max(1, self.steps - 1 - self.warmup_steps))


def ramp(step: int, steps: float) -> float:
    """0 to 1 over `steps` updates, then 1."""
    return min(1.0, (step + 1) / max(1.0, steps))


def _cosine(start: float, end: float, progress: float) -> float:
    return end + (start - end) * 0.5 * (1 + cos(pi * progress))
