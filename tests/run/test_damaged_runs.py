"""A run goes on over full disks, broken lines, foreign and misnamed checkpoints and kills between two writes, or
says why not."""

import errno
import json
import os
import resource
import shutil
import signal
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.config import load
from octfm.encoder.encoder import load_encoder
from octfm.errors import CheckpointError
from octfm.io import location
from octfm.io.hashing import hash_text
from octfm.io.location import BucketPath, write_whole
from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.monitors.recovery import healthy_before
from octfm.pretraining.preflight import resources
from octfm.pretraining.resume import PRETRAINING
from octfm.run import bucket as bucket_run
from octfm.run import checkpoint, checkpoint_files
from octfm.run import folder as run_folder
from octfm.run.bucket import BucketRun
from octfm.run.checkpoint_writer import CheckpointWriter, Retention, best_step, keep_best
from octfm.run.folder import Identity, RunFolder, claim
from octfm.run.loop import Session
from octfm.run.runtime import start
from octfm.run.tracking import Metrics, NoMetrics, TrackingConfig, read_metrics
from octfm.tasks.finetune import FINE_TUNING
from octfm.tasks.finetune_settings import FinetuneConfig
from support.examples import examples
from support.tiny_runs import config as tiny
from support.tiny_runs import quick_pretrain, quiet, timeless

GIB = 2**30
STRIDE = 11
"""Of the operations that a fast test is killed at; the slow ones try those in between."""


def config(**changes):
    return tiny(keep_checkpoints=3, **changes)


CONTENT = {"model": {}, "optimizer": {}, "config": {}, "preprocessing": {}, "fingerprint": "", "state": {}}


@pytest.fixture(scope="module")
def finished(store, tmp_path_factory):
    """Runs of 8 steps with checkpoints after 3, 6 and 8: two of one config, and one of another seed."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: quick_pretrain(config(seed=seed), store, folder / name, echo=quiet)
        for name, seed in (("a", 3), ("other", 4))
    }


@pytest.fixture
def halted(finished, tmp_path):
    """As if the run had been killed after its checkpoint at step 6."""
    run = Path(shutil.copytree(finished["a"], tmp_path / "run"))
    (run / "checkpoints" / "step-00000008.pt").unlink()
    return run


# ---- room on the disk
# ------------------------------------------------------------------------------------------------------------


def disk_of(bytes_free, monkeypatch, others=()):
    free = dict(others)
    monkeypatch.setattr(
        resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=free.get(str(path), bytes_free))
    )


def test_a_finished_run_needs_no_room_on_the_disk(store, finished, monkeypatch):
    disk_of(0, monkeypatch)
    assert resources.disk(config(), store, finished["a"], 16).status == "PASS"
    assert quick_pretrain(config(), store, finished["a"], echo=quiet) == finished["a"]


def test_a_preempted_run_needs_only_the_room_that_it_lacks(store, halted, tmp_path, monkeypatch):
    """Two of its checkpoints are there, a third is written before the first is deleted."""
    one = max(path.stat().st_size for path in checkpoint_files.steps(halted / "checkpoints"))
    disk_of(1.3 * one, monkeypatch)
    assert resources.disk(config(), store, tmp_path / "new", 16).status == "FAIL"
    (halted / "checkpoints" / "step-00000007.partial").write_bytes(b"x" * one)
    assert resources.disk(config(), store, halted, 16).status == "PASS"
    quick_pretrain(config(), store, halted, echo=quiet)
    assert checkpoint_files.step_of(checkpoint.newest(halted)) == 8
    assert not list((halted / "checkpoints").glob("*.partial"))


def test_a_resumed_run_still_needs_room_for_the_next_checkpoint(store, halted, monkeypatch):
    for step in range(100):  # more than are kept: they are deleted only after the next one is written
        checkpoint.write(halted / "checkpoints", step + 10_000, CONTENT | {"participants": {}})
    disk_of(1000, monkeypatch)
    assert resources.disk(config(steps=20_000), store, halted, 16).status == "FAIL"


def test_a_run_whose_disk_is_full_goes_on_in_its_second_folder(store, halted, tmp_path, monkeypatch):
    second = tmp_path / "second"
    second.mkdir()
    disk_of(0, monkeypatch, {str(second): GIB})
    found = resources.disk(config(ckpt_second_dir=str(second)), store, halted, 16)
    assert found.status == "WARN" and str(second) in found.advice


# ---- metrics.jsonl
# ---------------------------------------------------------------------------------------------------------------

ROWS = st.lists(st.integers(0, 30), min_size=1, max_size=30).map(
    lambda steps: [
        json.dumps({"kind": "train", "step": step, "loss": i}).encode() for i, step in enumerate(sorted(steps))
    ]
)
JUNK = st.one_of(
    st.binary(min_size=1, max_size=30).map(lambda data: data.replace(b"\n", b"?")),
    st.sampled_from(
        [b"{", b"5", b"[]", b'{"kind": "train"}', b'{"step": 1}', b"\0" * 40, b"[" * 3000, b'{"kind":1,"step":1}']
    ),
).filter(lambda data: data.strip())


@settings(max_examples=40)
@given(ROWS, st.lists(st.tuples(st.integers(0, 30), JUNK), max_size=4), st.integers(0, 31), st.booleans())
def test_broken_lines_are_set_aside_and_take_no_other_row(tmp_path_factory, rows, junk, first, cut):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    lines, expected = list(rows), [row for row in rows if json.loads(row)["step"] < first]
    for place, text in junk:
        lines.insert(place % (len(lines) + 1), text)
    path.write_bytes(b"".join(line + b"\n" for line in lines) + (b'{"kind": "tr' if cut else b""))
    metrics = Metrics(path, first)
    metrics.close()
    kept = [line for line in path.read_bytes().split(b"\n") if line]
    assert kept[: len(expected)] == expected
    aside = path.with_name("metrics.broken.txt")
    broken = [text + b"\n" for text in lines if text not in rows]
    assert (aside.read_bytes() if junk else b"") == b"".join(broken)
    assert len(kept) == len(expected) + bool(junk) and (metrics.broken is not None) == bool(junk)
    if junk:
        (named,) = [row for row in read_metrics(path) if row["kind"] == "incident"]
        assert "metrics.broken.txt" in named["sentence"] and named["what"] == "metrics"


def test_a_broken_line_in_the_middle_costs_no_row_of_a_resumed_run(store, finished, halted):
    path = halted / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(len(lines) // 2, b'{"kind": "train", "st\xff\n')
    path.write_bytes(b"".join(lines))
    said = []
    quick_pretrain(config(), store, halted, echo=said.append)
    told = [row for row in timeless(halted) if row.get("what") != "metrics"]
    assert told == timeless(finished["a"])
    assert any("1 damaged line was moved to metrics.broken.txt" in line for line in said)


def test_a_rollback_keeps_abandoned_rows_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for step in range(6):
        metrics.write("train", step, loss=1.0)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"\0\0\0\n", *lines[5:]]))
    metrics.rewind(3, 1)
    metrics.close()
    assert (tmp_path / "abandoned-1.jsonl").read_bytes() == b"".join(lines[3:])
    assert [row["step"] for row in read_metrics(path) if row["kind"] == "train"] == [0, 1, 2]
    assert (tmp_path / "metrics.broken.txt").read_bytes() == b"\0\0\0\n"


# ---- names
# -----------------------------------------------------------------------------------------------------------------------

ODD_NAMES = (
    "step-best.pt", "step-00000050 (1).pt", "step-50.pt", "Step-00000050.pt", "step-00000050.pt.crdownload", "step-00000050.tmp",
    "step-00000050.PT", "step-000000050.pt", "step--0000050.pt", "step-0000005a.pt", "step-٠٠٠٠٠٠٥٠.pt", "step-00000050.pt~", "copy.pt",
)  # fmt: skip


@settings(max_examples=50)
@given(
    st.from_regex(
        r"(step|Step|stp)?-?[0-9]{0,10}( ?\([0-9]\))?(best|a)?(\.pt|\.dcp|\.tmp|\.partial|\.damaged){0,2}",
        fullmatch=True,
    )
)
def test_only_exact_names_are_checkpoints(tmp_path_factory, name):
    if not name.strip(". "):
        return
    folder = tmp_path_factory.mktemp("n")
    (folder / name).touch()
    (folder / "step-00000007.pt").touch()
    found = [path.name for path in checkpoint_files.steps(folder)]
    exact = name.endswith(".pt") and name[5:-3].isdigit() and name == f"step-{int(name[5:-3]):08d}.pt"
    assert set(found) == {"step-00000007.pt", *([name] if exact else [])}
    assert [checkpoint_files.step_of(path) for path in checkpoint_files.steps(folder)] == sorted(
        checkpoint_files.step_of(name) for name in found
    )


def test_files_that_look_like_checkpoints_are_named_and_left_alone(store, finished, halted):
    folder = halted / "checkpoints"
    for name in ODD_NAMES:
        (folder / name).write_bytes(b"not mine")
    (folder / "step-00000099.pt").mkdir()
    (folder / "step-00000098.dcp").touch()
    (folder / "step-00000097.pt").symlink_to("nowhere")
    said = []
    quick_pretrain(config(), store, halted, echo=said.append)
    assert timeless(halted) == timeless(finished["a"])
    assert all((folder / name).read_bytes() == b"not mine" for name in ODD_NAMES)
    assert (folder / "step-00000099.pt").is_dir()
    (warning,) = [line for line in said if "ignored" in line]
    assert "Step-00000050.pt" in warning and "and 11 more" in warning
    assert load_encoder(halted, device="cpu") is not None


def test_odd_names_are_not_sent_to_a_bucket(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    remote = BucketRun(BucketPath.of("s3://bucket/run"))
    folder = remote.path / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("step-00000050 (1).pt", "step-best.pt", "step-00000004.pt", "step-00000002.pt"):
        (folder / name).write_bytes(b"x")
    remote._sent = {"step-00000002.pt": [{"sha256": hash_text("x")}]}
    remote.keep(lambda found: [])
    assert remote.waiting() == ["step-00000004.pt"]


def test_a_checkpoint_that_waits_for_the_bucket_does_not_hide_that_the_last_one_is_lost(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    monkeypatch.setattr(bucket_run, "PATIENCE_S", 0.0)
    remote = BucketRun(BucketPath.of("s3://bucket/run"))
    checkpoint.write(remote.path / "checkpoints", 4, CONTENT | {"participants": {}})

    def full(folder: Path, step: int, content: dict) -> Path:
        raise OSError(errno.ENOSPC, "no space left on device")

    writer = CheckpointWriter([remote.path / "checkpoints"], Retention(2), full)
    writer.save(8, CONTENT)
    writer.follow(remote)
    training = SimpleNamespace(step=8, tracking=TrackingConfig(), runtime=start("fp32", "cpu"))
    run = RunFolder(remote.path, PRETRAINING, remote)
    run.write_record(participant_key="")
    session = Session(training, run, NoMetrics(), writer, quiet)
    with pytest.raises(
        CheckpointError, match=r"after step 8 could not be written; .* continues from .*step-00000004\.pt"
    ):
        session.finish()
    writer.close()


AWAY = (
    "/etc/x",
    "../x",
    "checkpoints/../../x",
    "checkpoints/step-00000001.pt/../../../x",
    "checkpoints//etc/x",
    "x",
    ".",
    "",
)
"""Keys of objects that are not below checkpoints/step-00000001.pt."""


@pytest.mark.parametrize(
    "text",
    [
        *(
            "{",
            "[]",
            {"checkpoints": {"step-50 (1).pt": []}},
            {"checkpoints": {"step-00000001.pt": []}},
            {"checkpoints": 5},
        ),
        *({"token": token} for token in (1, "", "/etc", "../../0123456789")),
        *({"checkpoints": {"step-00000001.pt": [{"key": key, "sha256": "0"}]}} for key in (*AWAY, "a\0", 5, None)),
    ],
)
def test_a_damaged_pointer_of_a_bucket_is_named(monkeypatch, text):
    """It names files and a folder of this machine that are written and deleted: another run's must not."""
    good = {"format": bucket_run.FORMAT, "version": bucket_run.VERSION, "token": "0123456789abcdef", "checkpoints": {}}
    text = json.dumps(good | text) if isinstance(text, dict) else text
    monkeypatch.setattr(BucketPath, "read_text", lambda self, encoding=None: text)
    with pytest.raises(CheckpointError, match=r"checkpoints\.json: damaged"):
        bucket_run.read_pointer(BucketPath.of("s3://bucket/run"))


@pytest.mark.parametrize("key", ["/etc/x", "../x", "a/../../x", "a//b"])
def test_no_object_of_a_bucket_is_written_outside_the_folder(monkeypatch, tmp_path, key):
    monkeypatch.setattr(bucket_run.bucket, "find", lambda uri: {f"{uri}/{key}": bucket_run.bucket.Object(1, "1")})
    monkeypatch.setattr(bucket_run.bucket, "download", lambda *_: pytest.fail("downloaded"))
    with pytest.raises(CheckpointError, match=f"s3://bucket/run/{key}: .* is no file of a run; delete it"):
        bucket_run._fetch_files(BucketPath.of("s3://bucket/run"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_no_address_of_a_run_leads_out_of_the_folder_for_copies():
    with pytest.raises(CheckpointError, match=r"in a bucket \.\. does not lead"):
        bucket_run.BucketRun(BucketPath.of("s3://bucket/runs/.."))


def test_a_lock_is_never_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / ".x.lock").symlink_to("mine")
    with pytest.raises(OSError, match=r"its lock \.x\.lock is a symbolic link"):
        location.lock(tmp_path / ".x.lock")
    assert (tmp_path / "mine").read_text() == "precious"


def test_only_what_a_killed_writer_left_is_deleted(tmp_path):
    for name in (
        "step-00000004.partial",
        "step-00000004.dcp.partial",
        ".step-00000004.dcp.former.partial",
        ".best.json.7.ab.partial",
        "mine.partial",
        "movie.pt.partial",
    ):
        (tmp_path / name).touch()
    CheckpointWriter([tmp_path], Retention(2)).close()
    assert {path.name for path in tmp_path.iterdir()} == {"mine.partial", "movie.pt.partial"}


# ---- damage
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bytes_of_a_checkpoint(tmp_path_factory):
    content = CONTENT | {"model": {"w": torch.arange(4000.0)}, "participants": {"key": "k", "hashes": ["a"]}}
    return checkpoint.write(tmp_path_factory.mktemp("c"), 5, content).read_bytes()


@settings(max_examples=examples(80))
@given(st.data())
def test_a_damaged_checkpoint_is_never_taken_nor_a_traceback(tmp_path_factory, bytes_of_a_checkpoint, data):
    good = bytes_of_a_checkpoint
    path = tmp_path_factory.mktemp("d") / "step-00000005.pt"
    if data.draw(st.booleans()):
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        changed = bytearray(good)
        for at in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
            changed[at] ^= data.draw(st.integers(1, 255))
        bad = bytes(changed)
    path.write_bytes(bad)
    checkpoint.header(path)
    try:
        content = checkpoint.load(path)
    except CheckpointError as error:
        assert str(path) in str(error) and "\n" not in str(error)
    else:  # in what zip files leave unused
        assert torch.equal(content["model"]["w"], torch.arange(4000.0)) and content["step"] == 5


@pytest.mark.parametrize("length", [0, 100])
def test_a_cut_newest_checkpoint_falls_back_twice_over(store, finished, halted, length):
    """Also where an earlier damaged one was set aside under the same name before."""
    newest = checkpoint.newest(halted)
    newest.with_suffix(".damaged").mkdir()
    newest.write_bytes(newest.read_bytes()[:length])
    said = []
    quick_pretrain(config(), store, halted, echo=said.append)
    assert any("step-00000006.pt is damaged and was set aside as step-00000006.damaged2" in line for line in said)
    assert timeless(halted) == timeless(finished["a"])


def test_a_run_that_goes_back_to_an_older_checkpoint_keeps_the_best_one_before_it(store, halted):
    """The best one is damaged: the one that was the best before must not be deleted for its sake."""
    folder = halted / "checkpoints"
    for step in (3, 6):
        keep_best(folder, step)
    checkpoint.newest(halted).write_bytes(b"")
    quick_pretrain(tiny(keep_checkpoints=1), store, halted, echo=quiet)
    assert best_step(folder) == 3
    assert [checkpoint_files.step_of(path) for path in checkpoint_files.steps(folder)] == [3, 8]


# ---- whose checkpoint it is
# --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [8, 6, 3])
def test_a_checkpoint_of_another_run_stops_and_is_named(store, finished, halted, step):
    """Also an older one: a rollback would return to it, and retention delete it."""
    name = f"step-{step:08d}.pt"
    foreign = shutil.copy(checkpoint.newest(finished["other"]), halted / "checkpoints" / "step-00000008.pt")
    if step < 8:
        content = torch.load(foreign, weights_only=True) | {"step": step}
        Path(foreign).unlink()
        foreign = checkpoint.write(
            halted / "checkpoints", step, {k: content[k] for k in content if k not in ("format", "version")}
        )
    before = Path(foreign).read_bytes()
    with pytest.raises(CheckpointError, match=rf"{name}: a checkpoint of another run .*move it out .*model\.init"):
        quick_pretrain(config(), store, halted, echo=quiet)
    if step > 3:
        with pytest.raises(CheckpointError, match=rf"{name}: a checkpoint of another run"):
            load_encoder(halted, device="cpu")
    with pytest.raises(CheckpointError, match="another run"):
        healthy_before(RunFolder(halted, PRETRAINING), step, HealthConfig())
    assert Path(foreign).read_bytes() == before
    load_encoder(foreign, device="cpu")  # named as a file, it is what was asked for


def test_shards_of_another_run_stop_too(store, finished, halted):
    shards = halted / "checkpoints" / "step-00000009.dcp"
    shards.mkdir()
    torch.save(checkpoint.load(checkpoint.newest(finished["other"])) | {"step": 9, "model": {}}, shards / "rest.pt")
    with pytest.raises(CheckpointError, match=r"step-00000009\.dcp: a checkpoint of another run"):
        quick_pretrain(config(), store, halted, echo=quiet)
    assert shards.is_dir()


def test_a_renamed_checkpoint_stops(store, halted):
    newest = checkpoint.newest(halted)
    newest.rename(newest.with_name("step-00000007.pt"))
    with pytest.raises(
        CheckpointError, match=r"its name says 7 updates and it holds 6; rename it to step-00000006\.pt"
    ):
        quick_pretrain(config(), store, halted, echo=quiet)


@pytest.mark.parametrize("own", [True, False])
def test_a_checkpoint_without_a_key_is_judged_by_its_settings(store, finished, halted, own):
    source = checkpoint.load(
        halted / "checkpoints" / "step-00000006.pt" if own else checkpoint.newest(finished["other"])
    )
    (halted / "checkpoints" / "step-00000006.pt").unlink()
    source |= {"participants": {}, "step": 6}
    checkpoint.write(
        halted / "checkpoints",
        6,
        {k: v for k, v in source.items() if k not in ("format", "version", "checksum", "step")},
    )
    if own:
        quick_pretrain(config(), store, halted, echo=quiet)
        assert checkpoint_files.step_of(checkpoint.newest(halted)) == 8
    else:
        with pytest.raises(CheckpointError, match="another run"):
            quick_pretrain(config(), store, halted, echo=quiet)


def test_fine_tuning_refuses_a_foreign_checkpoint_too(store, tmp_path):
    def content(settings, key="octfm-finetune"):
        facts = {
            "config": settings.model_dump(mode="json"),
            "participants": {"key": key},
            "fingerprint": store.fingerprint,
        }
        return CONTENT | facts

    ours = load(FinetuneConfig, {"encoder": "runs/a", "store": "s", "from_scratch": True, "target": "grade"})
    other = ours.model_copy(update={"seed": 1})
    identity = Identity(FINE_TUNING, ours, store.fingerprint, "data", "octfm-finetune")
    with claim(tmp_path / "run", identity, echo=quiet) as run:
        assert run.newest_whole(quiet) is None
        checkpoint.write(run.checkpoints, 4, content(ours))
        found = run.newest_whole(quiet)
        assert found is not None and found[1]["step"] == 4
        prepared_otherwise, keyless = (
            content(ours) | {"fingerprint": "0" * 16},
            CONTENT | {"participants": {"key": "k", "hashes": []}},
        )
        for foreign in (content(other), content(ours, "k"), prepared_otherwise, keyless):
            for step in (2, 9):
                path = checkpoint.write(run.checkpoints, step, foreign)
                with pytest.raises(CheckpointError, match=rf"{path.name}: a checkpoint of another run"):
                    run.newest_whole(quiet)
                path.unlink()


# ---- kills and power cuts between two writes
# -----------------------------------------------------------------------------------------


def test_what_is_written_whole_is_flushed_with_its_name(tmp_path, monkeypatch):
    """The bytes before the rename, the folder after it."""
    happened, fsync, replace = [], os.fsync, Path.replace

    def flushed(descriptor):
        happened.append(("flush", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def renamed(self, target):
        happened.append(("rename", str(self)))
        return replace(self, target)

    monkeypatch.setattr(location.os, "fsync", flushed)
    monkeypatch.setattr(Path, "replace", renamed)
    write_whole(tmp_path / "x.json", b"{}")
    partial = happened[0][1]
    assert happened == [("flush", partial), ("rename", partial), ("flush", str(tmp_path))]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_what_could_not_be_written_leaves_the_old_content(tmp_path):
    write_whole(tmp_path / "x", b"old")
    with pytest.raises(ValueError, match="no"), location.replacing(tmp_path / "x") as partial:
        partial.write_bytes(b"new")
        raise ValueError("no")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"old"}


def test_what_killed_writers_left_is_deleted_once_nobody_can_be_writing_it(tmp_path):
    """The rows of somebody who had withdrawn stayed in a hidden file next to a table of octfm segment; and a probe lost
    its result when the training of its run was started again while it wrote."""
    old, new = tmp_path / ".table.csv.7.0123abcd.partial", tmp_path / ".report.html.8.0123abcd.partial"
    export, other = tmp_path / ".encoder.9.0123abcd.partial", tmp_path / ".mine.partial"
    export.mkdir()
    for path in (old, new, other):
        path.touch()
    for path in (old, export, other):
        os.utime(path, (0, 0))
    write_whole(tmp_path / "other.csv", b"")
    assert {path.name for path in tmp_path.iterdir()} == {new.name, export.name, other.name, "other.csv"}


def test_a_partial_file_that_stays_does_not_keep_the_others(tmp_path, monkeypatch):
    """As one of another user in a shared folder, or one that another process has deleted meanwhile."""
    left = [tmp_path / f".table.csv.{number}.0123abcd.partial" for number in range(3)]
    for path in left:
        path.touch()
        os.utime(path, (0, 0))
    delete, tried = Path.unlink, []

    def not_the_first(path):
        tried.append(path)
        if len(tried) == 1:
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", not_the_first)
        write_whole(tmp_path / "other.csv", b"")
    assert {path.name for path in tmp_path.iterdir()} == {tried[0].name, "other.csv"}


def work(folder: Path) -> None:
    """Everything that a run writes besides tensors, twice over."""
    with claim(folder, Identity(PRETRAINING, config(), "fingerprint", "data"), echo=quiet) as run:
        run.write_record(parameters={"total": 1})
        metrics = Metrics(run.metrics, 2)
        for step in (2, 3):
            metrics.write("train", step, loss=0.5)
        metrics.rewind(3, 1)
        run.note_memory(2)
        keep_best(run.checkpoints, 3)
        checkpoint.write(run.checkpoints, 3, CONTENT | {"participants": {"key": run.key}})
        metrics.close()


def half_safe(folder: Path, monkeypatch) -> list[str]:
    """Files of `work` that took their name before their bytes were on the disk, or whose name was not brought there
    after it."""
    happened: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def flushed(descriptor):
        happened.append(("flush", str(Path(f"/proc/self/fd/{descriptor}").readlink())))
        fsync(descriptor)

    def renamed(self, target):
        happened.extend([("rename", str(self)), ("name", str(target))])
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", flushed)
        patch.setattr(Path, "replace", renamed)
        work(folder)
    found = []
    for file in (
        path for path in folder.rglob("*") if path.is_file() and path.name not in ("run.lock", "metrics.jsonl")
    ):
        named = max((i for i, event in enumerate(happened) if event == ("name", str(file))), default=None)
        if named is None or ("flush", happened[named - 1][1]) not in happened[:named]:
            found.append(f"{file.name} before")
        if named is None or ("flush", str(file.parent)) not in happened[named:]:
            found.append(f"{file.name} after")
    return found


def test_files_of_a_run_reach_the_disk_before_and_after_their_rename(tmp_path, monkeypatch):
    assert half_safe(tmp_path / "run", monkeypatch) == []
    names = {path.name for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert names > {"run.json", "config.yaml", "memory.json", "best.json", "step-00000003.pt"}


@pytest.mark.parametrize("lost", ["file", "folder"])
def test_a_flush_that_is_left_out_would_be_noticed(tmp_path, monkeypatch, lost):
    flush = location.flush
    monkeypatch.setattr(location, "flush", lambda path: flush(path) if path.is_dir() == (lost == "file") else None)
    found = half_safe(tmp_path / "run", monkeypatch)
    assert len(found) >= 5 and {line.split()[1] for line in found} == {"before" if lost == "file" else "after"}


def killed_at(operation: int, folder: Path) -> bool:
    """Do `work` in a child that gets a SIGKILL before its n-th opening, flushing or renaming of a file; whether it
    came to that."""
    left = [operation]

    def seen(event, _):
        left[0] -= event in ("open", "os.rename", "os.mkdir", "os.truncate", "fsync")
        if left[0] < 0:
            left[0] = sys.maxsize  # killing is an event, too
            os.kill(os.getpid(), signal.SIGKILL)

    def doom():
        fsync = os.fsync
        os.fsync = lambda descriptor: (seen("fsync", None), fsync(descriptor))
        sys.addaudithook(seen)

    return killed(doom, folder)


def killed_within(size: int, folder: Path) -> bool:
    """The same, with the kernel ending the child as soon as it writes more than so many bytes into any file."""

    def doom():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

    return killed(doom, folder)


def killed(doom, folder: Path) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            doom()
            work(folder)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0
    return os.WIFSIGNALED(status)


def assert_goes_on(folder: Path, key: str | None) -> None:
    """With the key that it had."""
    if not key and (folder / "config.yaml").exists():
        key = RunFolder(folder, PRETRAINING).key
    work(folder)
    assert not key or RunFolder(folder, PRETRAINING).key == key
    steps = [row["step"] for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "train"]
    assert set(steps) <= {2, 3} and RunFolder(folder, PRETRAINING).noted_memory() == 2
    assert checkpoint.load(checkpoint.newest(folder))["participants"]["key"] == RunFolder(folder, PRETRAINING).key


@pytest.mark.parametrize("first", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, STRIDE))])
def test_a_kill_between_any_two_writes_leaves_a_run_that_goes_on(tmp_path, monkeypatch, first):
    """Of a run that begins, and of one that was begun."""
    monkeypatch.setattr(run_folder, "git_state", dict)
    kills = 0
    for begun in (False, True):
        for operation in count(first, STRIDE):
            folder = tmp_path / f"{begun} {operation}"
            if begun:
                work(folder)
            key = RunFolder(folder, PRETRAINING).key if begun else None
            if not killed_at(operation, folder):
                break
            kills += 1
            assert_goes_on(folder, key)
    assert kills > 6


@pytest.mark.parametrize("size", [0, 20, 150, 300, 400, 1000])
def test_a_kill_in_the_middle_of_a_file_leaves_a_run_that_goes_on(tmp_path, monkeypatch, size):
    monkeypatch.setattr(run_folder, "git_state", dict)
    work(tmp_path / "begun")
    key = RunFolder(tmp_path / "begun", PRETRAINING).key
    for folder, known in ((tmp_path / "new", None), (tmp_path / "begun", key)):
        assert killed_within(size, folder)
        assert_goes_on(folder, known)
