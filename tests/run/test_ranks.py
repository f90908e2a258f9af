"""Several ranks train the model that one process trains, decide together, and write once."""

import functools
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from octfm.encoder.encoder import load_encoder
from octfm.errors import TrainingError
from octfm.run import checkpoint, runtime, shards
from octfm.store.selection import select
from octfm.tasks.embed_run import embed_all
from support import free_port
from support.command_line import octfm_here
from support.ranks import codes
from support.tiny_runs import TINY, assert_same_weights, final, quiet, rows, timeless

SMALL = TINY | {
    "model": TINY["model"] | {"depth": 1},
    "data": {"global_batch_size": 4, "per_device_batch_size": 1},
    "runtime": {"timeout_s": 60},
}
SHARDED = {"runtime": {"parallel": "fsdp", "timeout_s": 60}}
WHITENED = SMALL | {"objective": {"target_norm": "whiten"}}
NEAR = {"target_levels": 2, "fuse_levels": True, "context_nearness": True}


LOSSES = ("loss", "masked_loss", "context_loss", "masked_over_baseline")
MEASURES = ("grad_norm", "effective_rank", "teacher_step")


def assert_same_curves(one: Path, other: Path, measures: float = 1e-5) -> None:
    """Losses within 1e-5; `measures` is the tolerance of gradient norm, rank and teacher."""
    for kind in ("train", "validation"):
        a, b = rows(one, kind), rows(other, kind)
        assert [row["step"] for row in a] == [row["step"] for row in b] and a
        for name in (name for name in (*LOSSES, *MEASURES) if name in a[0]):
            tolerance = 1e-5 if name in LOSSES else measures
            np.testing.assert_allclose(
                [row[name] for row in a], [row[name] for row in b], rtol=tolerance, err_msg=f"{kind} {name}"
            )


def places(out: Path, world: int) -> dict[int, list[list[int]]]:
    """Per step, the positions that each rank trained on."""
    found: dict[int, list[list[int]]] = {}
    for rank in range(world):
        for line in Path(f"{out}.positions-{rank}").read_text().splitlines():
            step, position, _ = json.loads(line)
            found.setdefault(step, []).append(position)
    return found


@pytest.fixture(scope="module")
def whole(ranks, store, tmp_path_factory) -> Callable[[int, str], Path]:
    """Uninterrupted runs of WHITENED on so many ranks; each is made once, and only read."""

    @functools.cache
    def run(world: int, parallel: str) -> Path:
        out = tmp_path_factory.mktemp("whole") / "run"
        assert codes(ranks(world, store.path, out, WHITENED | {"runtime": {"parallel": parallel}})) == [0] * world
        return out

    return run


@pytest.mark.parametrize("world, parallel", [(2, "ddp"), pytest.param(4, "ddp", marks=pytest.mark.slow), (2, "fsdp")])
def test_ranks_train_what_one_process_trains(whole, world, parallel):
    """The moments of whitened goals are those of the global batch. One process x 4 micro-batches, two ranks x 2, four
    x 1, two with shards."""
    alone, out = whole(1, "ddp"), whole(world, parallel)
    assert_same_curves(alone, out)
    a, b = final(alone), final(out)
    for name, tensor in a["model"].items():
        # AdamW turns the rounding of a gradient near zero into a step of up to the learning rate.
        torch.testing.assert_close(tensor, b["model"][name], rtol=1e-3, atol=5e-5)
    assert [row["kind"] for row in timeless(alone)] == [row["kind"] for row in timeless(out)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [{"name": "vjepa2"}, {"name": "data2vec"}, NEAR],
    ids=["layer", "data2vec", "levels"],
)
def test_thirty_steps_agree_to_1e_5(ranks, store, tmp_path, objective):
    """Accumulation 4; 2 ranks x 2; 4 ranks x 1; FSDP2 on 2 ranks.

    The gradient of an L1 loss is a sign: where a residual is 0 but for rounding, one step's gradient norm may differ
    by more. Whitening amplifies rounding until that happens to losses, too: thirty steps of one process differ by up to
    5e-4 if only its micro-batches change, so whitened goals are compared over the eight steps above.
    """
    settings = SMALL | {"steps": 30, "validate_every_steps": 10, "objective": objective}
    if objective is NEAR:
        settings |= {"model": TINY["model"], "masks": SMALL["masks"] | {"large_blocks": [0.7, 0.8, 0.2]}}
    assert codes(ranks(1, store.path, tmp_path / "one", settings)) == [0]
    for name, world, parallel in (("two", 2, "ddp"), ("four", 4, "ddp"), ("sharded", 2, "fsdp")):
        out = tmp_path / name
        assert codes(ranks(world, store.path, out, settings | {"runtime": {"parallel": parallel}})) == [0] * world
        assert_same_curves(tmp_path / "one", out, measures=2e-3)


def test_F10_ranks_train_on_disjoint_data_and_only_rank_0_writes(ranks, store, tmp_path):
    """Every replica of the prototype believed to be rank 0: the same shard, the same seed, four W&B runs."""
    out = tmp_path / "run"
    settings = SMALL | {"steps": 4, "tracking": {"tensorboard": True}}
    ended = ranks(2, store.path, out, settings, preflight=True)
    assert codes(ended) == [0, 0], ended
    for step, shares in places(out, 2).items():
        assert not set(shares[0]) & set(shares[1]) and sorted(shares[0] + shares[1]) == list(
            range(4 * step, 4 * step + 4)
        )
    assert [row["step"] for row in rows(out)] == list(range(4)), "every step is told once"
    assert len(list((out / "tensorboard").iterdir())) == 1
    assert "step      4/4" in ended[0].said and ended[1].said == "", "rank 0 alone speaks"
    assert sorted(p.name for p in tmp_path.iterdir() if "said" not in p.name and "positions" not in p.name) == ["run"]


def test_F10_ranks_that_would_read_the_same_volumes_are_stopped(ranks, store, tmp_path):
    ended = ranks(2, store.path, tmp_path / "run", SMALL, fault="wrong-rank")
    assert codes(ended) == [1, 1] and "would read 2 of 4 volumes of a batch twice" in ended[0].said
    ended = ranks(2, store.path, tmp_path / "run2", SMALL, fault="other-store", on=1)
    assert codes(ended) == [1, 1] and "rank 1 has opened other training volumes than rank 0" in ended[0].said
    assert not (tmp_path / "run2").exists()


def test_F10_slurm_tasks_that_do_not_know_their_rank_are_refused(monkeypatch):
    from octfm.errors import ConfigError
    from octfm.run.launch import join
    from octfm.run.runtime import RuntimeConfig

    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(
        ConfigError, match=r"SLURM started 4 tasks and none of them knows its rank.*launch/slurm\.sbatch"
    ):
        join(RuntimeConfig(), "fp32", "cpu")
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"):
        join(RuntimeConfig(), "fp32", "cpu")


@pytest.mark.slow
def test_ranks_train_on_scans_and_phantoms_what_one_process_trains(ranks, store, tmp_path):
    """Also the queries that only phantoms teach, where a rank may have none; a validation segments B-scans on rank 0."""
    settings = SMALL | {
        "steps": 2,
        "model": SMALL["model"] | {"summary": 2},
        "objective": {"name": "anchored", "goal_average": [2, 1, 4], "pool": "summary"},
        "data": SMALL["data"] | {"phantoms": {"seed": 1, "volumes": 40, "share": 0.5}},
        "validation_volumes": 2,
    }
    one, two, sharded = (tmp_path / name for name in ("one", "two", "sharded"))
    for out, world, parallel in ((one, 1, "fsdp"), (two, 2, "ddp"), (sharded, 2, "fsdp")):
        assert codes(ranks(world, store.path, out, settings | {"runtime": {"parallel": parallel}})) == [0] * world
    for out in (two, sharded):
        assert_same_curves(one, out, measures=1e-4)
        assert [row["segmenter_um"] for row in rows(out, "anchor")]


def test_F10_a_verb_whose_work_cannot_be_shared_is_not_done_once_per_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, out, error = octfm_here("phantom", tmp_path / "clinic", "--participants", "1", cwd=tmp_path)
    assert (code, out) == (1, "") and "only octfm pretrain and finetune share work among ranks" in error
    assert not [*tmp_path.iterdir()]
    code, out, _ = octfm_here("phantom", "--help", cwd=tmp_path)
    assert code == 0 and out.startswith("Usage: octfm phantom")


def test_variables_that_a_template_of_a_job_leaves_empty_are_as_unset(tmp_path, monkeypatch, capfd):
    from octfm.cli import main
    from octfm.errors import ConfigError, Preempted
    from octfm.run.launch import join
    from octfm.run.loop import Interruption
    from octfm.run.runtime import RuntimeConfig

    for name in ("WORLD_SIZE", "RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "")
    assert octfm_here("models", cwd=tmp_path)[0] == 0
    assert join(RuntimeConfig(), "fp32", "cpu").world == 1
    with Interruption() as interruption:
        signal.raise_signal(signal.SIGTERM)
    assert interruption.signal_name == "SIGTERM" and "SIGTERM received: saving" in capfd.readouterr().err
    monkeypatch.setattr(main, "app", Mock(side_effect=Preempted("SIGTERM: saved after 2 of 8 updates")))
    assert main._run() == (75, "SIGTERM: saved after 2 of 8 updates")
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(ConfigError, match="WORLD_SIZE: expected a number from 1, got 'two'"):
        join(RuntimeConfig(), "fp32", "cpu")


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_an_inf_gradient_on_one_rank_is_skipped_by_all(ranks, store, tmp_path, parallel):
    out = tmp_path / "run"
    settings = SMALL | {"steps": 3, "runtime": {"parallel": parallel}}
    assert codes(ranks(2, store.path, out, settings, fault="inf", at=1, on=1)) == [0, 0]
    (incident,) = rows(out, "incident")
    assert (incident["step"], incident["what"], incident["action"]) == (1, "non-finite gradient", "skip")
    assert [row["step"] for row in rows(out)] == [0, 2]
    assert all(bool(tensor.isfinite().all()) for tensor in final(out)["model"].values())


def test_a_nan_volume_on_one_rank_is_named_by_rank_0(ranks, store, tmp_path):
    out = tmp_path / "run"
    assert codes(ranks(2, store.path, out, SMALL | {"steps": 4}, fault="nan", at=2, on=1)) == [0, 0]
    (incident,) = rows(out, "incident")
    lines = [json.loads(line) for line in Path(f"{out}.positions-1").read_text().splitlines()]
    assert incident["volumes"] == [store.rows[next(index for step, _, index in lines if step == 2)[0]].uri]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_four_inf_gradients_on_one_rank_take_all_back_together(ranks, store, tmp_path, parallel):
    out = tmp_path / "run"
    settings = SMALL | {"steps": 12, "health": {"margin": 0}, "runtime": {"parallel": parallel, "timeout_s": 60}}
    assert codes(ranks(2, store.path, out, settings, fault="inf", at=4, until=8, on=1)) == [0, 0]
    back = next(row for row in rows(out, "incident") if row["action"] == "roll back")
    assert (back["step"], back["to"]) == (7, 3) and len(back["volumes"]) > 2, "volumes of both ranks are named"
    trained = [position for shares in places(out, 2).values() for share in shares for position in share]
    assert len(trained) == len(set(trained)), "no batch is repeated, on no rank"
    assert [row["step"] for row in rows(out)] == list(range(12))


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_signal_to_one_rank_stops_all_and_the_run_goes_on_bit_for_bit(ranks, store, whole, tmp_path, parallel):
    settings = WHITENED | {"runtime": {"parallel": parallel}}
    ended = ranks(2, store.path, tmp_path / "run", settings, fault="term", at=4, on=1)
    assert codes(ended) == [75, 75] and "SIGTERM: saved after 5 of 8 updates" in ended[0].said, ended
    assert codes(ranks(2, store.path, tmp_path / "run", settings)) == [0, 0]
    assert_same_weights(tmp_path / "run", whole(2, parallel))
    assert timeless(tmp_path / "run") == timeless(whole(2, parallel))


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_all_ranks_killed_resume_bit_for_bit(ranks, store, whole, tmp_path, parallel):
    """SIGKILL to both at once, three times; the checkpoints are after 3 and 6 steps."""
    settings = WHITENED | {"runtime": {"parallel": parallel}}
    for at in (2, 4, 7):
        assert codes(ranks(2, store.path, tmp_path / "run", settings, fault="kill-all", at=at)) == [-9, -9]
    assert codes(ranks(2, store.path, tmp_path / "run", settings)) == [0, 0]
    assert_same_weights(tmp_path / "run", whole(2, parallel))
    assert timeless(tmp_path / "run") == timeless(whole(2, parallel))


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_with_the_same_data(ranks, store, tmp_path):
    """Two ranks, then one, then four with shards, then two: every volume once, and the curve of one process."""
    out = tmp_path / "run"
    for world, parallel, at in ((2, "ddp", 2), (1, "ddp", 4), (4, "fsdp", 6), (2, "fsdp", 99)):
        settings = SMALL | {"ckpt_every_steps": 1, "keep_checkpoints": 3, "runtime": {"parallel": parallel}}
        ended = ranks(world, store.path, out, settings, fault="term", at=at)
        assert codes(ended) == [0 if at == 99 else 75] * world, ended
    assert codes(ranks(1, store.path, tmp_path / "one", SMALL | {"ckpt_every_steps": 1, "keep_checkpoints": 3})) == [0]
    assert_same_curves(tmp_path / "one", out)
    trained = [position for shares in places(out, 4).values() for share in shares for position in share]
    assert sorted(trained) == list(range(32)), "nothing is repeated, nothing skipped"


@pytest.mark.slow
def test_a_sharded_checkpoint_is_one_like_the_others(ranks, store, whole, tmp_path):
    """Verified, read by one process, embedded from, and left alone by code in its index."""
    out = shutil.copytree(whole(2, "fsdp"), tmp_path / "run")
    newest = checkpoint.newest(out)
    assert newest.name == "step-00000008.dcp" and {"__0_0.distcp", "__1_0.distcp", "rest.pt", "manifest.json"} <= {
        p.name for p in newest.iterdir()
    }
    content = checkpoint.load(newest)
    assert content["step"] == 8 and len(content["optimizer"]["state"]) > 10
    arrays = store.read(select(store, "val")[:2])
    assert np.isfinite(load_encoder(out).embed_arrays(arrays)).all()
    written = embed_all(str(newest), store.path, baselines=False, echo=quiet)
    assert written == [out / "embeddings" / "pretrained.parquet"], "beside the checkpoint's folder, not in it"

    shard = newest / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    ended = ranks(2, store.path, out, WHITENED | SHARDED)
    assert codes(ended) == [0, 0] and "step-00000008.dcp is damaged and was set aside" in ended[0].said
    with pytest.raises(checkpoint.DamagedCheckpoint, match=r"__1_0\.distcp: its checksum is"):
        checkpoint.load(newest.with_suffix(".damaged"))


@pytest.mark.slow
def test_ranks_begin_with_the_weights_of_a_sharded_run(ranks, store, whole, tmp_path):
    parent = whole(2, "fsdp")
    settings = SMALL | {"model": SMALL["model"] | {"init": str(parent)}, "steps": 2}
    for world, name in ((2, "two"), (1, "one")):
        assert codes(ranks(world, store.path, tmp_path / name, settings)) == [0] * world
    one, two = final(tmp_path / "one"), final(tmp_path / "two")
    assert_same_curves(tmp_path / "one", tmp_path / "two")
    first = [json.loads((tmp_path / name / "run.json").read_text())["initial_weights"] for name in ("one", "two")]
    assert first[0] == first[1]
    assert one["participants"]["before"] == two["participants"]["before"]
    assert one["participants"]["before"][0]["hashes"] == final(parent)["participants"]["hashes"]


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_an_index_is_read_whichever_python_wrote_it(module):
    """Python 3.13 has classes of paths elsewhere: no sharded checkpoint could be read there, and runs went back."""
    content = re.sub(rb"cpathlib[._a-z]*\n", f"c{module}\n".encode(), pickle.dumps(Path("__0_0.distcp"), protocol=2))
    assert shards._PlainUnpickler(io.BytesIO(content)).load() == Path("__0_0.distcp")


class ByGetattr:
    """Pickled as Python 3.11.0 to 3.11.3 pickle a member of an Enum."""

    def __init__(self, *arguments):
        self.arguments = arguments

    def __reduce__(self):
        return getattr, self.arguments


def test_an_index_of_python_3_11_2_is_read():
    """Debian 12 has it: no sharded checkpoint could be read there, and runs went back."""
    memory_format = _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    index = pickle.dumps(ByGetattr(_MEM_FORMAT_ENCODING, memory_format.name))
    assert shards._PlainUnpickler(io.BytesIO(index)).load() is memory_format
    for arguments in [
        (Metadata, "__init__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (_MEM_FORMAT_ENCODING, ["a"]),
        ("", "join"),
    ]:
        with pytest.raises(pickle.UnpicklingError, match="does not belong into an index of tensors"):
            shards._PlainUnpickler(io.BytesIO(pickle.dumps(ByGetattr(*arguments)))).load()


DCP = "torch.distributed.checkpoint"


@pytest.mark.parametrize(
    "name",
    [
        "os system", "builtins eval", "torch load", "torch nn", "torch.serialization load", "pathlib Path.unlink",
        "pathlib PosixPath.write_bytes", f"{DCP}.filesystem Path.unlink", f"{DCP}.filesystem Path",
        f"{DCP}.filesystem os.remove", f"{DCP}.filesystem FileSystem.rm_file", f"{DCP}.filesystem FileSystemReader",
        f"{DCP}.filesystem FileSystemWriter", f"{DCP}.metadata os", f"{DCP}.metadata Metadata.__init__", f"{DCP}.metadata Absent", f"{DCP} FileSystemReader",
    ],
)  # fmt: skip
def test_an_index_of_a_stranger_can_call_nothing(name):
    """An index is a pickle, which may name anything that can be imported, and call it."""

    def reference(module: str, name: str) -> io.BytesIO:
        words = (b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
        return io.BytesIO(b"\x80\x04" + b"".join(words) + b"\x93.")

    with pytest.raises(pickle.UnpicklingError, match="does not belong into an index of tensors"):
        shards._PlainUnpickler(reference(*name.split())).load()
    assert shards._PlainUnpickler(reference(f"{DCP}.metadata", "Metadata")).load().__name__ == "Metadata"
    assert shards._PlainUnpickler(reference("torch", "bfloat16")).load() is torch.bfloat16


def test_an_index_that_would_run_code_is_refused(whole, tmp_path):
    import hashlib

    out = shutil.copytree(whole(2, "fsdp"), tmp_path / "run")
    newest, trace = checkpoint.newest(out), tmp_path / "trace"

    class Evil:
        def __reduce__(self):
            return Path.touch, (trace,)

    (newest / ".metadata").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest[".metadata"] = hashlib.sha256((newest / ".metadata").read_bytes()).hexdigest()
    (newest / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(checkpoint.DamagedCheckpoint, match="does not belong into an index of tensors"):
        checkpoint.load(newest)
    assert not trace.exists()


@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_halves_the_micro_batch_of_all(ranks, store, tmp_path):
    settings = SMALL | {"steps": 4, "data": {"global_batch_size": 4, "per_device_batch_size": 2}}
    assert codes(ranks(2, store.path, tmp_path / "run", settings, fault="memory", on=1)) == [0, 0]
    assert codes(ranks(1, store.path, tmp_path / "one", settings)) == [0]
    (incident,) = rows(tmp_path / "run", "incident")
    assert incident["what"] == "memory" and "1 instead of 2 volumes at a time" in incident["sentence"]
    assert final(tmp_path / "run")["state"]["micro_batch"] == 1
    assert_same_curves(tmp_path / "one", tmp_path / "run")


@pytest.mark.slow
def test_F7_with_shards_the_next_start_goes_on_with_half_the_micro_batch(ranks, store, tmp_path):
    """A step cannot be computed again by ranks that wait for each other's shards: the job ends, and nobody need
    change a setting."""
    out, settings = tmp_path / "run", SMALL | SHARDED | {"data": {"global_batch_size": 4, "per_device_batch_size": 2}}
    ended = ranks(2, store.path, out, settings, fault="memory", on=1, at=4)
    assert codes(ended) == [1, 1] and "memory ran out on rank 1 with 2 volumes at a time" in ended[1].said
    assert "goes on from the last checkpoint with 1 at a time" in ended[1].said
    assert "rank 0 of 2: another rank has gone" in ended[0].said, ended[0]
    ended = ranks(2, store.path, out, settings, fault="memory", on=1, at=4)
    assert codes(ended) == [0, 0] and "resuming" in ended[0].said
    (incident,) = rows(out, "incident")
    assert (
        incident["step"] == 3 and "1 instead of 2 volumes at a time, the same global batch of 4" in incident["sentence"]
    )
    assert codes(ranks(1, store.path, tmp_path / "one", settings | {"runtime": {}})) == [0]
    assert_same_curves(tmp_path / "one", out)
    assert codes(ranks(2, store.path, out, settings)) == [0, 0] and len(rows(out, "incident")) == 1, "told once"


def test_F7_what_memory_allowed_fits_another_number_of_ranks(ranks, store, tmp_path):
    """Six at a time on one rank; of a share of three on each of four, three."""
    out, settings = (
        tmp_path / "run",
        SMALL | {"steps": 1, "data": {"global_batch_size": 12, "per_device_batch_size": 12}},
    )
    ended = ranks(1, store.path, out, settings, fault="memory", most=6)
    assert codes(ended) == [0] and final(out)["state"]["micro_batch"] == 6, ended
    fewer = settings | {"steps": 2, "data": {"global_batch_size": 12, "per_device_batch_size": 3}}
    ended = ranks(4, store.path, out, fewer, override=True)
    assert codes(ended) == [0] * 4 and final(out)["step"] == 2, ended


def test_a_hung_rank_ends_the_job_within_the_timeout_and_is_named(ranks, store, tmp_path):
    begun = time.monotonic()
    settings = SMALL | {"runtime": {"timeout_s": 4}, "tracking": {"step_deadline_s": 1}}
    ended = ranks(2, store.path, tmp_path / "run", settings, fault="sleep", at=3, on=1, nap=6)
    assert ended[0].code == 1 and time.monotonic() - begun < 60
    told = ended[0].said
    assert (
        "rank 0 of 2: another rank did not answer within 4 s (runtime.timeout_s) (rank 1 was waiting for the device"
        in told
    ), ended
    assert "waiting for the other ranks for" in told, "it spoke up before"


def test_a_wait_that_is_long_over_is_not_given_as_a_reason(monkeypatch):
    """Hours after a slow first step, a rank that was killed was reported as waiting for it."""
    store, now = dist.HashStore(), time.time()
    monkeypatch.setattr(runtime, "_store", lambda: store)
    here, other = (runtime.Runtime(torch.device("cpu"), rank=rank, world=2, timeout_s=60) for rank in (0, 1))
    other.say("waiting for data for 20 s, in step 3")
    gone = RuntimeError("gloo: Connection closed by peer")
    with (
        pytest.raises(TrainingError, match=r"has gone \(rank 1 was waiting for data for 20 s, in step 3\);"),
        here.guarded(),
    ):
        raise gone
    monkeypatch.setattr(time, "time", lambda: now + 100)
    with pytest.raises(TrainingError, match="another rank has gone; torchrun"), here.guarded():
        raise gone


def test_a_rank_that_dies_ends_the_others_with_a_message(ranks, store, tmp_path):
    ended = ranks(2, store.path, tmp_path / "run", SMALL, fault="kill", at=3, on=1)
    assert codes(ended) == [1, -9] and "rank 0 of 2: another rank has gone" in ended[0].said, ended


def test_weights_that_drift_apart_between_ranks_stop_the_run(ranks, store, tmp_path):
    ended = ranks(2, store.path, tmp_path / "run", SMALL, fault="drift", at=3, on=1)
    assert codes(ended) == [1, 1] and "ranks apart" in ended[0].said, ended
    assert ended[1].said.endswith("(elsewhere)\n"), "one of many ranks reports what all of them found"


@pytest.mark.slow
def test_the_online_probe_is_shared_and_judged_once(ranks, store, tmp_path):
    labels = tmp_path / "labels.csv"
    people = sorted({row.participant for row in store.rows})
    labels.write_text("participant_id,group\n" + "".join(f"{p},{'ab'[i % 2]}\n" for i, p in enumerate(people)))
    settings = SMALL | {"probe": {"target": "group", "labels": str(labels), "every_steps": 4}}
    for name, world, parallel in (("one", 1, "ddp"), ("two", 2, "ddp"), ("sharded", 2, "fsdp")):
        assert (
            codes(ranks(world, store.path, tmp_path / name, settings | {"runtime": {"parallel": parallel}}))
            == [0] * world
        )
    scores = [
        [(row["step"], row["score"], row["knn"]) for row in rows(tmp_path / name, "probe")]
        for name in ("one", "two", "sharded")
    ]
    assert len(scores[0]) == 2
    for other in scores[1:]:
        np.testing.assert_allclose(scores[0], other, atol=1e-6)


@pytest.mark.slow
def test_no_thread_of_the_ranks_outlives_their_group():
    """One that is still there when Python ends may abort a rank that has saved everything."""
    lines = """
import torch
from pathlib import Path
from octfm.run.launch import meet
from octfm.run.runtime import RuntimeConfig

runtime = meet(RuntimeConfig(), "fp32", torch.device("cpu"), 0, 1)
import torch._dynamo  # as compiled optimizers do

def gloo_runs():
    return any("gloo" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))

torch.distributed.all_reduce(torch.ones(3))
print(gloo_runs())
torch.distributed.destroy_process_group()
print(gloo_runs())
"""
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    said = subprocess.check_output([sys.executable, "-c", lines], env=environment, text=True).splitlines()
    assert said == ["True", "False"]
