"""When memory runs out the micro-batch is halved, and nothing else changes (F7)."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octfm.errors import TrainingError
from octfm.pretraining import step as forward
from octfm.run import memory
from support import support_process
from support.tiny_runs import config, final, quick_pretrain, quiet, rows


def train(store, out, *limit):
    process = support_process("short_of_memory", store.path, out, *limit)
    # Freed memory goes back to the system at once, and threads reserve no address space of their own: the limit then
    # means what it says.
    malloc = {
        "MALLOC_ARENA_MAX": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    done = subprocess.run(process["args"], capture_output=True, text=True, env=process["env"] | malloc)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the size of a process from /proc")
def test_F7_an_allocation_limit_halves_the_micro_batch_and_keeps_the_maths(store, tmp_path):
    needed = int(train(store, tmp_path / "whole")[-1].split()[1])
    said = train(store, tmp_path / "short", needed * 6 // 10)
    (incident,) = [row for row in rows(tmp_path / "short", "incident") if row["step"] == 0][:1]
    assert (
        incident["what"] == "memory" and "the same global batch of 32 and the same images (F7)" in incident["sentence"]
    )
    assert any("memory ran out; the step was computed again with" in line for line in said)
    whole, short = final(tmp_path / "whole"), final(tmp_path / "short")
    assert short["state"]["micro_batch"] in (4, 8, 16) and short["step"] == 2
    assert short["config"] == whole["config"], "images and global batch are those of the config"
    for name, tensor in short["model"].items():
        torch.testing.assert_close(tensor, whole["model"][name], rtol=1e-3, atol=1e-5)


WORDS = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 805306368 bytes"


def no_room_for_more_than(volumes, monkeypatch, error=None):
    make_inputs, sizes = forward.make_inputs, []

    def limited(settings, preprocessing, runtime, batch, *args, **kwargs):
        sizes.append(len(batch))
        # The second micro-batch fails, when the first one has left gradients behind.
        if len(batch) > volumes and (len(sizes) > 1 or not volumes):
            raise error or RuntimeError(WORDS)
        return make_inputs(settings, preprocessing, runtime, batch, *args, **kwargs)

    monkeypatch.setattr(forward, "make_inputs", limited)
    return sizes


def test_F7_a_failed_pass_leaves_nothing_behind(store, tmp_path, monkeypatch):
    """Gradients and moments of the passes before the failure are not counted twice; the size is kept after a
    restart."""
    shallow = {
        "steps": 2,
        "objective": {"target_norm": "whiten"},
        "model": {"patch_size": [2, 8, 8], "width": 48, "depth": 1, "heads": 2},
    }
    ones = config(**shallow, data={"global_batch_size": 4, "per_device_batch_size": 1})
    one_by_one = final(quick_pretrain(ones, store, tmp_path / "single", echo=quiet))["model"]
    settings = config(**shallow, data={"global_batch_size": 4, "per_device_batch_size": 2})
    for error in (torch.OutOfMemoryError("CUDA"), MemoryError()):
        with monkeypatch.context() as patch:
            sizes = no_room_for_more_than(1, patch, error)
            short = quick_pretrain(settings, store, tmp_path / type(error).__name__, echo=quiet)
            assert sizes[:6] == [2, 2, 1, 1, 1, 1] and final(short)["state"]["micro_batch"] == 1
        for name, tensor in final(short)["model"].items():
            assert torch.equal(tensor, one_by_one[name]), name


def test_F7_other_errors_are_not_taken_for_memory(store, tmp_path, monkeypatch):
    no_room_for_more_than(1, monkeypatch, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="shapes cannot"):
        quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)


def test_F7_no_room_for_a_single_volume_stops_with_what_to_do(store, tmp_path, monkeypatch):
    no_room_for_more_than(0, monkeypatch)
    with pytest.raises(TrainingError, match=r"memory ran out with one volume at a time .*lower masks\.budget"):
        quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)


@pytest.mark.parametrize(("system", "unit"), [("darwin", 1), ("freebsd14", 1024)])
def test_peak_memory_is_in_bytes_on_systems_without_proc(monkeypatch, system, unit):
    def absent(path, encoding=None):
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(memory.resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 10**9 // unit))
    assert memory.host_bytes_at_peak() == pytest.approx(3e9, abs=1024)
