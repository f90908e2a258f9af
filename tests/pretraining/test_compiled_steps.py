"""Compiled steps: torch.compile on a CPU, and what XLA's are made of as far as it can be seen without XLA; the rest is in
tests/xla."""

import importlib.util
from dataclasses import replace
from functools import partial
from math import inf, nan
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch

from octfm.errors import ConfigError
from octfm.models.objectives.jepa import JEPAConfig
from octfm.models.objectives.objective import ObjectiveConfig
from octfm.pretraining.monitors import monitors
from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.monitors.limits import Limits, limits
from octfm.pretraining.preflight import examine_tpu
from octfm.pretraining.preflight.cost import step_cost
from octfm.pretraining.preflight.tpu import smaller_steps
from octfm.pretraining.run_state import RunState
from octfm.pretraining.settings import PretrainConfig
from octfm.pretraining.step import MicroStep, judge
from octfm.run.launch import join
from octfm.run.optimizers import CompiledAdamW
from octfm.run.runtime import Runtime, RuntimeConfig
from octfm.volume.preprocessing import Preprocessing
from support.small_store import small_store
from support.tiny_runs import config, final, quick_pretrain, quiet

LOOKED_AT_ONCE = {"log_every_steps": 100, "health": {"check_every_steps": 100}, "validate_every_steps": 10}
HERE = importlib.util.find_spec("torch_xla") is not None


def test_adamw_of_plain_operations_is_torchs_and_skips_what_is_no_number():
    def train(make):
        torch.manual_seed(0)
        weights = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(3))]
        rate = torch.zeros((), dtype=torch.float32)
        optimizer = make([{"params": weights[:1]}, {"params": weights[1:]}], rate)
        for step in range(6):
            rate.fill_(0.01 * (step + 1))
            for weight in weights:
                weight.grad = torch.randn(weight.shape) if step != 2 else torch.full_like(weight, float("nan"))
            optimizer.found_inf = torch.tensor(float(step == 2))
            optimizer.step()
        return weights, [optimizer.state[weight] for weight in weights]

    fused, state = train(
        lambda groups, lr: torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    )
    plain, own = train(lambda groups, lr: CompiledAdamW(groups, lr, (0.9, 0.95), lambda tensor: tensor))
    for a, b, x, y in zip(fused, plain, state, own, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-7)
        assert x.keys() == y.keys() and float(x["step"]) == float(y["step"]) == 5
        torch.testing.assert_close(x["exp_avg_sq"], y["exp_avg_sq"], rtol=2e-6, atol=1e-9)


@pytest.mark.slow
def test_limits_are_where_the_spike_detector_begins_to_find_something():
    """The device decides by the limits, the host explains afterwards: at any loss and gradient norm they say the
    same."""
    rng = np.random.default_rng(0)
    health = HealthConfig()
    for _ in range(20):
        state = RunState()
        for _ in range(int(rng.integers(20, 64))):
            state = state.accept(
                float(np.float32(np.exp(0.2 * rng.normal()))), float(np.float32(np.exp(0.5 * rng.normal()))), 64
            )
        state = state.accept(2.5, 1.0, 64)  # the last step was hard, so that a lasting rise counts, too
        most = limits(health, state)
        for loss, norm in [
            (most.loss, 1.0),
            (most.lasting_loss, 1.0),
            (1.0, most.grad_norm),
            *np.exp(rng.normal(0, 1.5, (50, 2))),
        ]:
            for factor in (1, 1 + 1e-6):
                loss, norm = float(np.float32(loss * factor)), float(np.float32(norm))
                beyond = loss > most.loss or loss > most.lasting_loss or norm > most.grad_norm
                assert (monitors.spike(health, state, loss, norm) is not None) == beyond


@pytest.mark.parametrize(
    ("at", "value", "made"),
    [("", 0, True), ("masked", nan, False), ("masked", inf, False), ("context", nan, False), ("norm", nan, False),
     ("norm", inf, False), ("loss", 2.4, False), ("lasting_loss", 2.4, False), ("grad_norm", 2.9, False)],
)  # fmt: skip
def test_an_update_is_made_only_if_all_numbers_of_all_ranks_are_finite_and_within_their_limits(at, value, made):
    """Two ranks of two micro-batches each, of which the other has the same numbers."""
    masked, context, norm = torch.tensor([1.0, 2, 3, 4]), torch.ones(4), torch.tensor(3.0)
    for name, tensor in (("masked", masked[2:3]), ("context", context[:1]), ("norm", norm)):
        if at == name:
            tensor.fill_(value)
    parts = [MicroStep(torch.zeros(()), masked[own], context[own], None) for own in (slice(2), slice(2, 4))]  # pyright: ignore[reportArgumentType]
    learner = SimpleNamespace(
        runtime=SimpleNamespace(sum_=lambda sums: sums.mul_(2), numbers=Runtime(torch.device("cpu")).numbers),
        config=SimpleNamespace(data=SimpleNamespace(global_batch_size=8)),
    )
    most = Limits(**{at: value}) if at in Limits.__dataclass_fields__ else Limits()
    outcome = judge(learner, parts, norm, most)  # pyright: ignore[reportArgumentType]
    assert bool(outcome.made) is made
    if at != "masked":
        assert float(outcome.loss) == 2.5


@pytest.mark.skipif(HERE, reason="torch_xla is installed")
def test_one_error_names_the_missing_libraries_and_how_to_get_them():
    with pytest.raises(ConfigError, match=r"xla_spmd needs torch_xla.*tests/xla/environment\.sh"):
        join(RuntimeConfig(parallel="xla_spmd"), "fp32")
    with pytest.raises(ConfigError, match=r"torch-tpu, which could not be loaded.*untested on hardware"):
        join(RuntimeConfig(parallel="tpu"), "fp32")


class StatisticsConfig(ObjectiveConfig):
    """An objective of one's own that gathers statistics."""

    name: Literal["statistics"] = "statistics"

    @property
    def gathers(self):
        return True


@pytest.mark.parametrize("objective", [JEPAConfig(target_norm="whiten"), StatisticsConfig()])
def test_what_gathers_statistics_is_refused_where_steps_are_compiled(objective):
    """They outlast their pass, whose memory the next graph overwrites."""
    what = rf"objective {objective.name} with these settings gathers statistics, which compiled steps lose; "
    with pytest.raises(ConfigError, match=what + r"xla_spmd compiles every step: use ddp, .*target_norm=layer"):
        config(runtime={"parallel": "xla_spmd"}).with_objective(objective)
    with pytest.raises(ConfigError, match=what + r"set runtime\.compile=null"):
        config(runtime={"compile": True}).with_objective(objective)


@pytest.mark.skipif(HERE, reason="torch_xla is installed")
def test_doctor_tells_what_compiling_for_a_tpu_needs():
    with pytest.raises(
        ConfigError, match=r"--tpu v4-32 compiles the step for a TPU and needs torch_xla.*tests/xla/environment\.sh"
    ):
        examine_tpu(PretrainConfig(), "v4-32", print)
    with pytest.raises(ConfigError, match=r"--tpu: expected one of v4-8, v4-16, v4-32.*got 'v3-8'"):
        examine_tpu(PretrainConfig(), "v3-8", print)


def test_what_does_not_fit_a_tpu_becomes_smaller_step_by_step():
    """The same training first (smaller passes, then activations computed again), fewer tokens last."""
    config = PretrainConfig.model_validate(
        {"data": {"global_batch_size": 96, "per_device_batch_size": 6}, "masks": {"budget": None}}
    )
    tried = list(smaller_steps(config, Preprocessing()))
    again = "data.per_device_batch_size=1 model.activation_checkpointing=true"
    assert [words for words, _ in tried] == [
        "data.per_device_batch_size=3",
        "data.per_device_batch_size=1",
        again,
        f"{again} masks.budget=3072",
    ]
    assert tried[0][1].data.per_device_batch_size == 3 and tried[0][1].data.global_batch_size == 96
    assert (
        tried[2][1].model.activation_checkpointing
        and tried[2][1].masks.budget is None
        and tried[3][1].masks.budget == 3072
    )
    assert not list(smaller_steps(tried[3][1], Preprocessing()))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("objective", ["vjepa2", "mae"])
def test_a_compiled_step_is_one_program_and_gives_the_same_losses(objective, tmp_path):
    """Whole, without a graph break, which fullgraph=True would refuse, and never compiled anew in 20 steps, of which the
    first and the last are looked at and so not compiled."""
    from torch._dynamo.utils import counters  # takes a second

    store, losses = small_store(tmp_path / "store"), []
    torch._dynamo.reset()
    counters.clear()
    for compiled in (False, True):
        settings = config(steps=20, objective={"name": objective}, runtime={"compile": compiled}, **LOOKED_AT_ONCE)
        run = quick_pretrain(settings, store, tmp_path / f"run-{compiled}", "cpu", echo=quiet)
        losses.append(final(run)["state"]["losses"])
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert len(losses[0]) == 20 and losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1] != losses[0], "bit for bit the same: nothing was compiled"


@pytest.mark.slow
def test_a_machine_without_a_compiler_is_told_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    torch._dynamo.reset()
    settings = config(steps=3, runtime={"compile": True}, **LOOKED_AT_ONCE)
    with pytest.raises(ConfigError, match=r"runtime\.compile: torch .* could not compile the step .*compile=false"):
        quick_pretrain(settings, small_store(tmp_path / "store"), tmp_path / "run", "cpu", echo=quiet)


@pytest.fixture
def traced(monkeypatch):
    """torch.compile without a compiler: steps are traced, in seconds."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()


CUDA = Runtime(torch.device("cuda"))
ALIKE = RuntimeConfig()


def test_long_runs_on_cuda_compile_their_steps_by_default(monkeypatch):
    """Runs of two thousand updates and more, in each stage of masks: each compiles anew."""
    monkeypatch.setattr("octfm.run.runtime.find_spec", lambda name: name)
    stages = {"stages": [[0.3, 0.3], [0.6, 0.3]]}
    for settings, expected in (
        (config(steps=2000), True),
        (config(steps=1999), False),
        (config(steps=3998, masks=stages), False),
        (config(steps=2000, objective={"target_norm": "whiten"}), False),
    ):
        assert CUDA.for_run(settings.runtime, settings.steps_per_program).compiles == expected
    assert not Runtime(torch.device("cpu")).for_run(ALIKE, 10**6).compiles
    assert not replace(CUDA, sharded=True).for_run(ALIKE, 10**6).compiles
    assert not CUDA.for_run(RuntimeConfig(compile=False), 10**6).compiles
    monkeypatch.setattr("octfm.run.runtime.find_spec", lambda name: None)
    assert not CUDA.for_run(ALIKE, 10**6).compiles


def test_a_default_that_torch_cannot_compile_costs_a_line_and_not_the_run(capsys, monkeypatch):
    """Such as an objective of one's own, or a machine without a C compiler."""

    class Unusual(torch.nn.Linear):
        def forward(self, x):
            torch._dynamo.graph_break()
            return super().forward(x)

    monkeypatch.setattr(Runtime, "graphs", False)
    model, x = Unusual(3, 2), torch.ones(1, 3)
    call = replace(CUDA.for_run(ALIKE, 10**6), compiles=True).compiled(model)
    assert torch.equal(call(x), model(x)) and torch.equal(call(x), model(x))
    lines = capsys.readouterr().err.splitlines()
    assert sum("could not compile the step" in line and line.endswith("steps are not compiled") for line in lines) == 1
    with pytest.raises(ConfigError, match=r"runtime\.compile: torch .* could not compile the step .*compile=false"):
        replace(CUDA.for_run(RuntimeConfig(compile=True), 1), compiles=True).compiled(model)(x)


@pytest.mark.slow
def test_graphs_are_in_the_estimate_of_what_is_compiled(tmp_path):
    pre = small_store(tmp_path / "store").preprocessing
    plain, graphs = (step_cost(config(), pre, 2, 2, device="cuda", graphs=g) for g in (False, True))
    assert graphs.peak_bytes > plain.peak_bytes and graphs.kernels == 0


@pytest.mark.slow
def test_more_stages_of_masks_than_programs_that_torch_keeps_by_itself(traced):
    """Eight, of all runs of a process together."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    for _ in range(2):
        call = Runtime(torch.device("cpu"), compiles=True).compiled(model)
        for volumes in range(1, 13):
            x = torch.ones(volumes, 3)
            assert torch.equal(call(x), model(x))


def test_compiled_steps_are_refused_for_engines_of_their_own():
    with pytest.raises(ValueError, match=r"compile true goes with parallel ddp .* got fsdp"):
        PretrainConfig.model_validate({"runtime": {"parallel": "fsdp", "compile": True}})
