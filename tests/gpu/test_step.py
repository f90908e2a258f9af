"""One step on the device is the CPU's, compiled and as a CUDA graph as well, and takes the memory that the doctor says."""

import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from octfm.pretraining.learner import Learner
from octfm.pretraining.preflight.cost import step_cost
from octfm.pretraining.step import accumulate
from octfm.run.runtime import start
from octfm.store.loader import Loader
from support import ROOT
from support.tiny_runs import TINY, config, final, quick_pretrain, quiet, rows

sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_step import WARM_UP, compile_blocks, update_of

pytestmark = pytest.mark.gpu
LR, DECAY, EMA, CONTEXT = 1e-3, 0.05, 0.99, 0.5
BF16_BAND = 0.02
"""Largest relative difference of bf16's loss from fp32's, averaged over five steps; .6 % on a CPU."""


def learner_on(device, store, precision="fp32", compiles=False, **changes):
    runtime = replace(start(precision, device), compiles=compiles)
    made = Learner(config(precision=precision, **changes), store.preprocessing, runtime)
    made.set_rates(LR, DECAY, EMA)
    return made


def batch_of(store, size=4):
    with Loader(store, np.arange(16), size, seed=3, prefetch=0) as loader:
        return loader.batches(0)


def gradients(learner, batch, everything=False):
    """Results of the first micro-batch and the gradients on the host."""
    done = accumulate(learner, batch, CONTEXT, everything=everything)
    return done[0], {name: p.grad.cpu() for name, p in learner.model.named_parameters() if p.grad is not None}


def assert_alike(found, expected, tolerance):
    """Relative to the length of each gradient, and of all of them: some are zero but for rounding."""
    whole = torch.stack([g.norm() for g in expected.values()]).norm()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm()
        assert error <= tolerance * gradient.norm() + 0.01 * tolerance * whole, f"{name}: {error / gradient.norm():.1e}"


@pytest.mark.parametrize("objective", ["vjepa2", "data2vec", "mae"])
def test_step_and_gradients_are_the_cpus_to_1e_4(device, store, objective):
    one, other = (learner_on(name, store, objective={"name": objective}) for name in ("cpu", device))
    batch = batch_of(store)
    (expected, on_cpu), (found, on_device) = gradients(one, batch, True), gradients(other, batch, True)
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-4, atol=0)
    torch.testing.assert_close(found.masked_loss_B.cpu(), expected.masked_loss_B, rtol=1e-4, atol=0)
    assert found.leak is not None and float(found.leak) == 0, "and hidden voxels are hidden there as well"
    assert_alike(on_device, on_cpu, 1e-4)
    # AdamW's first step is nearly the sign of a gradient, so both get the same ones.
    for p, q in zip(one.trained, other.trained, strict=True):
        q.grad.copy_(p.grad)
    for learner in (one, other):
        learner.update(torch.ones((), dtype=torch.bool, device=learner.runtime.device))
    for name, tensor in one.model.state_dict().items():
        torch.testing.assert_close(other.model.state_dict()[name].cpu(), tensor, rtol=1e-4, atol=1e-6, msg=name)


def test_an_update_that_is_not_made_changes_nothing_there_either(device, store):
    learner = learner_on(device, store)
    accumulate(learner, batch_of(store), CONTEXT, everything=False)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    learner.trained[0].grad.fill_(float("nan"))
    learner.update(torch.zeros((), dtype=torch.bool, device=learner.runtime.device))
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items())


def test_fifty_steps_in_bf16_stay_near_those_in_fp32(device, store, tmp_path):
    curves = []
    for precision in ("fp32", "bf16"):
        run = quick_pretrain(config(steps=50, precision=precision), store, tmp_path / precision, device, echo=quiet)
        curves.append(np.array([row["masked_loss"] for row in rows(run)]))
    exact, rounded = (curve.reshape(-1, 5).mean(1) for curve in curves)
    gap = np.abs(rounded / exact - 1).max()
    assert len(curves[0]) == 50 and exact[-1] < exact[0] and gap < BF16_BAND, f"{gap:.2%} apart"
    assert (curves[0] != curves[1]).any(), "bf16 was not used"


@pytest.mark.parametrize(("precision", "what"), [("fp32", "blocks"), ("bf16", "blocks"), ("fp32", "whole")])
def test_the_compiled_step_is_the_eager_one(device, store, monkeypatch, precision, what):
    """Blocks alone, as the benchmark compiles them, and networks and loss at once, by runtime.compile."""
    if device == "cpu":  # a rehearsal: the same graphs, executed by torch
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    batch = batch_of(store)
    eager = learner_on(device, store, precision)
    compiled = learner_on(device, store, precision, compiles=what == "whole")
    if what == "blocks":
        compile_blocks(compiled.model, device)
    (expected, exact), (found, own) = gradients(eager, batch), gradients(compiled, batch)
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    torch.testing.assert_close(found.loss, expected.loss, rtol=tolerance, atol=0)
    assert_alike(own, exact, 1e-4 if precision == "fp32" else 5e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_cuda_graph_of_a_whole_update_trains_what_eager_steps_train(device, store, precision):
    losses = []
    for mode in ("eager", "graph" if device == "cuda" else "compiled"):
        update = update_of(learner_on(device, store, precision), batch_of(store, 2), CONTEXT, mode)
        # Those before the graph is recorded were made already.
        losses.append([float(update()) for _ in range(WARM_UP + 4 if mode != "graph" else 4)][-4:])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3 if precision == "fp32" else 2e-2)
    if device == "cpu":
        pytest.skip("a CPU has no graphs: rehearsed with compiled blocks")


def test_a_compiled_run_accumulates_what_an_uncompiled_one_does(device, store, tmp_path, monkeypatch):
    """With CUDA, passes of steps that are not inspected are graphs, whose results and gradients the next pass
    overwrites: both have to be kept."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    losses = []
    for compiled in (False, True):
        settings = config(
            steps=24, log_every_steps=6, health={"check_every_steps": 6}, runtime={"compile": compiled},
            data={"global_batch_size": 12, "per_device_batch_size": 4},
        )  # fmt: skip
        run = quick_pretrain(settings, store, tmp_path / f"{compiled}", device, echo=quiet)
        losses.append(final(run)["state"]["losses"])
    assert len(losses[0]) == 24 and losses[1] == pytest.approx(losses[0], rel=2e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_doctors_estimate_of_memory_is_within_20_percent(device, store, tmp_path, precision):
    settings = config(
        steps=2, precision=precision, data={"global_batch_size": 16, "per_device_batch_size": 16},
        model={**TINY["model"], "width": 384, "depth": 6, "heads": 6}, predictor={"width": 96, "depth": 2, "heads": 3},
        masks={"budget": 128},
    )  # fmt: skip
    estimate = step_cost(settings, store.preprocessing, 16, 1, device=device).peak_bytes
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved() if device == "cuda" else 0
    quick_pretrain(settings, store, tmp_path / "run", device, echo=quiet)
    if device == "cpu":
        pytest.skip(
            "a CPU's memory is compared in tests/pretraining/test_preflight_resources.py, in a process of its own"
        )
    # What the allocator has taken is what others cannot have.
    taken = torch.cuda.max_memory_reserved() - before
    print(f"{precision}: {taken / 1e9:.3f} GB taken, {estimate / 1e9:.3f} GB estimated")
    assert 0.8 < taken / estimate < 1.2, f"{taken / 1e9:.2f} GB taken, {estimate / 1e9:.2f} GB estimated"
