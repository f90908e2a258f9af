"""DDP and FSDP2 with one rank: every collective call of a run goes through NCCL, and changes nothing."""

import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from octfm.pretraining import pretrain as loop
from octfm.run.launch import meet
from support.tiny_runs import assert_nearly_the_same, config, final, quick_pretrain, quiet, rows

pytestmark = pytest.mark.gpu


class One(int):
    """A number of ranks that is 1 and takes none of the shortcuts for 1."""

    def __eq__(self, other):
        return False

    def __gt__(self, other):
        return int(self) >= other

    __hash__ = int.__hash__


@pytest.fixture
def group(device, monkeypatch):
    """A function that makes the runtime of the only rank of a group."""
    here = torch.device(device, 0) if device == "cuda" else torch.device(device)

    def make(settings):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        return replace(meet(settings.runtime, settings.precision, here, 0, 1), world=One(1))

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_run_of_one_rank_is_that_of_one_process(device, store, tmp_path, monkeypatch, group, deterministic, parallel):
    settings = config(runtime={"parallel": parallel, "timeout_s": 60})
    alone = quick_pretrain(settings, store, tmp_path / "alone", device, echo=quiet)
    calls, reduce = [], dist.all_reduce

    def counted(tensor, *words, **more):
        calls.append(tensor.device.type)
        return reduce(tensor, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "join", lambda *_: group(settings))
        patch.setattr(dist, "all_reduce", counted)
        run = quick_pretrain(settings, store, tmp_path / "run", device, echo=quiet)
    assert device in calls, "gradients of ddp and sums over shards go through the group"
    assert (run / "checkpoints" / "step-00000008.dcp").is_dir() == (parallel == "fsdp")
    found, expected = final(run), final(alone)
    assert found["step"] == 8 and len(rows(run)) == 8
    assert_nearly_the_same(found["model"], expected["model"])


def test_shards_are_read_again_by_the_rank_and_by_a_single_process(device, store, tmp_path, monkeypatch, group):
    settings = config(runtime={"parallel": "fsdp", "timeout_s": 60})
    with monkeypatch.context() as patch:
        patch.setattr(loop, "join", lambda *_: group(settings))
        out = quick_pretrain(config(steps=4, runtime=settings.runtime), store, tmp_path / "run", device, echo=quiet)
    shards = final(out)
    runtime = group(settings)
    learner = loop.Learner(settings, store.preprocessing, runtime)
    learner.restore(None, out / "checkpoints" / "step-00000004.dcp")
    for name, tensor in learner.model.state_dict().items():
        assert torch.equal(runtime.whole(tensor).cpu(), shards["model"][name]), name
