"""Runs on the device resume exactly, survive lack of memory and a killed process, and go on on a CPU and back."""

import gc
import subprocess
import sys
from functools import partial

import pytest
import torch

from octfm.pretraining import step as passes
from octfm.run import checkpoint, checkpoint_files
from support import support_process
from support.tiny_runs import (
    TINY,
    assert_nearly_the_same,
    assert_same_run,
    assert_same_weights,
    config,
    final,
    interrupted_after,
    quick_pretrain,
    quiet,
    rows,
)

pytestmark = pytest.mark.gpu

COMPILED = {"runtime": {"compile": True}, "log_every_steps": 3, "health": {"check_every_steps": 3}}
"""Steps between those that are inspected are compiled."""


def half(settings, store, out, device, monkeypatch):
    """A run that is stopped after its fourth step."""
    from octfm.errors import Preempted

    with monkeypatch.context() as patch, pytest.raises(Preempted):
        interrupted_after(4, patch)
        quick_pretrain(settings, store, out, device, echo=quiet)
    assert checkpoint_files.step_of(checkpoint.newest(out)) == 4


@pytest.fixture
def compiler(device, monkeypatch):
    """On a CPU, a rehearsal: the same graphs, executed by torch."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.mark.parametrize(("precision", "compiled"), [("fp32", False), ("bf16", False), ("bf16", True)])
def test_F18_resume_is_exact_with_deterministic_kernels(
    device, store, tmp_path, monkeypatch, deterministic, compiler, precision, compiled
):
    settings = config(precision=precision, **(COMPILED if compiled else {}))
    whole = quick_pretrain(settings, store, tmp_path / "whole", device, echo=quiet)
    half(settings, store, tmp_path / "halves", device, monkeypatch)
    assert_same_run(quick_pretrain(settings, store, tmp_path / "halves", device, echo=quiet), whole)


@pytest.mark.parametrize("way", ["to the CPU", "from the CPU"])
def test_checkpoints_cross_between_cpu_and_device(device, store, tmp_path, monkeypatch, way):
    settings, devices = config(), (device, "cpu") if way == "to the CPU" else ("cpu", device)
    half(settings, store, tmp_path / "run", devices[0], monkeypatch)
    content = torch.load(checkpoint.newest(tmp_path / "run"), map_location=None, weights_only=True)
    moments = [t for state in content["optimizer"]["state"].values() for t in state.values()]
    assert all(t.device.type == "cpu" for t in (*content["model"].values(), *moments)), "files name no device"
    run = quick_pretrain(settings, store, tmp_path / "run", devices[1], echo=quiet)
    alone = quick_pretrain(settings, store, tmp_path / "alone", "cpu", echo=quiet)
    found, expected = ([row["masked_loss"] for row in rows(out)] for out in (run, alone))
    assert final(run)["step"] == 8 and found == pytest.approx(expected, rel=5e-3)


LARGE = {
    "steps": 2,
    "data": {"global_batch_size": 32, "per_device_batch_size": 32, "prefetch": 0},
    # So narrow that the passes need several times the memory of the weights.
    "model": {"patch_size": [2, 8, 8], "width": 192, "depth": 6, "heads": 3},
    "masks": {"budget": 128},
    "ckpt_every_steps": 100,
}
ROOM = 0.6
"""Of the memory that the passes need beside weights and what else is there."""


@pytest.fixture
def little_memory(device, monkeypatch):
    """A function that leaves a part of what a run has just taken: by CUDA's own allocator, or, on a CPU, by an error
    like its."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, total = torch.cuda.memory_reserved(), torch.cuda.get_device_properties(0).total_memory

    def leave(room: float) -> None:
        if device == "cuda":
            taken = torch.cuda.max_memory_reserved() - before
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + room * taken) / total)
            return
        make_inputs = passes.make_inputs

        def limited(settings, preprocessing, runtime, batch, *words, **more):
            inputs = make_inputs(settings, preprocessing, runtime, batch, *words, **more)
            if len(batch) > room * 32:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return inputs

        monkeypatch.setattr(passes, "make_inputs", limited)

    yield leave
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_F7_a_full_device_halves_the_micro_batch_and_keeps_the_maths(
    device, store, tmp_path, little_memory, compiler, compiled
):
    settings = config(**{**LARGE, **(COMPILED | {"steps": 6} if compiled else {})})
    whole = final(quick_pretrain(settings, store, tmp_path / "whole", device, echo=quiet))
    # Graphs hold their memory besides that of inspected steps, so that either would fit into more.
    little_memory(ROOM / 2 if compiled else ROOM)
    said = []
    short = final(quick_pretrain(settings, store, tmp_path / "short", device, echo=said.append))
    (incident,) = rows(tmp_path / "short", "incident")[:1]
    assert incident["what"] == "memory" and "the same global batch of 32" in incident["sentence"]
    assert any("memory ran out; the step was computed again with" in line for line in said)
    assert (
        short["state"]["micro_batch"] in (4, 8, 16)
        and short["step"] == settings.steps
        and short["config"] == whole["config"]
    )
    assert_nearly_the_same(short["model"], whole["model"])


def test_F18_torchrun_starts_a_killed_rank_again_and_nothing_is_lost(device, store, tmp_path):
    """SIGKILL in the fifth step; the CUDA context goes with the process."""
    outs = [tmp_path / "killed", tmp_path / "whole"]
    for out, fault in zip(outs, ("kill", "none"), strict=True):
        process = support_process("device_run", store.path, out, device, fault)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        words = [*launcher, "--max-restarts", "2", *process["args"][1:]]
        done = subprocess.run(words, capture_output=True, text=True, env=process["env"], timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert ("resuming" in done.stdout) == (fault == "kill"), done.stdout
    assert_same_weights(*outs)
    assert [row["step"] for row in rows(outs[0])] == list(range(TINY["steps"])), "every step is told once"
