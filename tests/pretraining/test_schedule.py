"""Schedules are functions of the step alone; preflight proves their shape before step 0."""

from math import ceil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octfm.pretraining.preflight import curves
from octfm.pretraining.schedule import Schedule, ScheduleConfig

settings = st.builds(
    ScheduleConfig,
    base_lr=st.floats(1e-6, 1e-2),
    min_lr_ratio=st.floats(0.01, 1),
    warmup_ratio=st.floats(0, 0.5),
    lr_shape=st.sampled_from(["cosine", "constant"]),
)


@given(config=settings, steps=st.integers(1, 3000))
def test_F1_learning_rate_rises_once_and_falls_once(config, steps):
    """The prototype stepped a per-epoch schedule per batch: the rate rose again and the loss was NaN at step 514."""
    curve = np.array([Schedule(config, steps).lr(step) for step in range(steps)])
    peak = int(curve.argmax())
    tolerance = 1e-12 * config.base_lr
    assert (np.diff(curve[: peak + 1]) >= -tolerance).all() and (np.diff(curve[peak:]) <= tolerance).all()
    assert curve.max() <= config.base_lr * (1 + 1e-9)
    assert [c.status for c in curves.learning_rate(Schedule(config, steps))] == ["PASS"]


@given(config=settings, steps=st.integers(1, 3000))
def test_F2_learning_rate_is_never_zero(config, steps):
    assert all(Schedule(config, steps).lr(step) > 0 for step in range(steps))


@given(config=settings, steps=st.integers(10, 3000))
def test_the_first_update_after_the_warm_up_has_the_peak_rate_and_the_last_the_final_one(config, steps):
    schedule = Schedule(config, steps)
    final = config.base_lr * (config.min_lr_ratio if config.lr_shape == "cosine" else 1)
    assert schedule.lr(schedule.warmup_steps) == pytest.approx(config.base_lr)
    assert schedule.lr(steps - 1) == pytest.approx(final)


class Restarting(Schedule):
    """The prototype's fault: the schedule counts epochs, but is asked once per batch."""

    def lr(self, step):
        return super().lr(step % 500)


class SwitchedOff(Schedule):
    def lr(self, step):
        return 0.0 if step > 10 else super().lr(step)


class WarmsUpTwice(Schedule):
    def lr(self, step):
        return super().lr(step % 20 if step < self.warmup_steps else step)


class NeverDecays(Schedule):
    def lr(self, step):
        return super().lr(min(step, self.warmup_steps))


@pytest.mark.parametrize(
    ("schedule", "measured", "advice"),
    [
        (Restarting, "rises again at step 501", "F1"),
        (SwitchedOff, "0 at step 11", "F2"),
        (WarmsUpTwice, "falls at step 20, within the warm-up of 36 steps", "F1"),
        (NeverDecays, "it never decays", "lr_shape=constant"),
    ],
    ids=["test_F1_restart", "test_F2_zero", "test_F1_two_warmups", "test_F1_no_decay"],
)
def test_preflight_stops_a_planted_fault(schedule, measured, advice):
    found = curves.learning_rate(schedule(ScheduleConfig(), 1200))
    assert found[0].status == "FAIL" and measured in found[0].measured and advice in found[0].advice


@given(steps=st.integers(1, 4000))
def test_teacher_forgets_its_initial_weights_within_the_first_quarter(steps):
    schedule = Schedule(ScheduleConfig(), steps)
    left = np.prod([schedule.ema(step) for step in range(ceil(steps / 4))])
    assert left <= 0.05 + 1e-9 and 0 <= schedule.ema(0) < 1 and schedule.ema(steps) == 1
    assert Schedule(ScheduleConfig(), 1000 * steps + 100_000).ema(0) == 0.999, "never slower, however long the run"


def test_preflight_names_a_teacher_that_hardly_moves():
    assert curves.teacher(Schedule(ScheduleConfig(ema_base=0.9999), 4000)).status == "FAIL"
    assert curves.teacher(Schedule(ScheduleConfig(ema_base=0.9999), 1000)).status == "WARN"
    assert curves.teacher(Schedule(ScheduleConfig(), 60_000)).status == "PASS"


def test_preflight_names_a_momentum_that_is_no_average():
    assert "falls at step 1" in curves.teacher(Schedule(ScheduleConfig(ema_base=0.9, ema_end=0.5), 4000)).measured

    class Above(Schedule):
        def ema(self, step):
            return 1.01

    assert curves.teacher(Above(ScheduleConfig(), 100)).status == "FAIL"


def test_preflight_names_a_weight_decay_that_pushes_or_wobbles():
    class Pushes(Schedule):
        def weight_decay(self, step):
            return 0.05 - 0.001 * step

    class Wobbles(Schedule):
        def weight_decay(self, step):
            return 0.05 + 0.01 * (step % 3)

    assert "at step 51" in curves.weight_decay(Pushes(ScheduleConfig(), 100)).measured
    assert "rises and falls" in curves.weight_decay(Wobbles(ScheduleConfig(), 100)).measured
    assert curves.weight_decay(Schedule(ScheduleConfig(), 100)).status == "PASS"
