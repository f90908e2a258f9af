"""A run survives its process: kills, signals, damaged files, full disks, two processes at once, other settings."""

import errno
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from octfm.encoder.encoder import load_encoder
from octfm.errors import CheckpointError, Preempted
from octfm.io.hashing import keyed_hash
from octfm.pretraining import pretrain as loop
from octfm.pretraining.resume import PRETRAINING, retention
from octfm.pretraining.run_state import Rollback, RunState
from octfm.run import checkpoint, checkpoint_files, shards
from octfm.run.checkpoint_files import put_back
from octfm.run.checkpoint_writer import CheckpointWriter, Failure, Retention, best_step
from octfm.run.folder import Identity, claim
from octfm.run.loop import Interruption, Session
from octfm.run.runtime import Runtime
from octfm.run.tracking import Metrics, read_metrics
from support.examples import examples
from support.tiny_runs import (
    TINY,
    Killed,
    assert_same_run,
    config,
    final,
    interrupted_after,
    quick_pretrain,
    quiet,
    rows,
    tiny,
)


class KilledRun:
    """A run that gets a SIGKILL again and again, and must equal one that got none."""

    def __init__(self, ranks, store, folder: Path, steps: int) -> None:
        model = {**TINY["model"], "width": 24, "heads": 2}
        self.settings = TINY | {"steps": steps, "ckpt_every_steps": 3, "validate_every_steps": 10, "model": model}
        self.ranks, self.store, self.run, self.whole = ranks, store, folder / "run", folder / "whole"
        assert self.attempt(self.whole) == 0

    def attempt(self, out: Path, **how: Any) -> int:
        """Exit code of one process that trains into `out`."""
        (ended,) = self.ranks(1, self.store.path, out, self.settings, **how)
        assert ended.code in (0, -signal.SIGKILL), ended
        return ended.code

    def killed(self, **how: Any) -> bool:
        return self.attempt(self.run, **how) == -signal.SIGKILL

    def assert_goes_on_to_the_same_end(self) -> None:
        assert self.attempt(self.run) == 0
        assert_same_run(self.run, self.whole)


def test_F18_a_run_killed_at_random_moments_equals_one_that_was_not(ranks, store, tmp_path):
    """In an update, and at writes, flushes or renamings of checkpoints."""
    run = KilledRun(ranks, store, tmp_path, steps=12)
    assert run.killed(fault="kill", at=7)
    assert run.killed(fault="kill-saving", at=5) and run.killed(fault="kill-saving", at=25)
    run.assert_goes_on_to_the_same_end()


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_F18_fifty_kills_change_nothing(ranks, store, tmp_path):
    """Half of them from outside, whatever the run is at."""
    begun, rng = time.monotonic(), random.Random(2)
    run = KilledRun(ranks, store, tmp_path, steps=400)
    # Long enough to get somewhere at times, short enough that the run is not finished before its last kill.
    patience = 0.5 + (time.monotonic() - begun) / 20
    plan = [{"fault": "kill-saving", "at": rng.randrange(1, 150)} for _ in range(25)]
    plan += [{"kill_after": rng.uniform(0, patience), "killed": [0]} for _ in range(25)]
    assert sum(run.killed(**how) for how in rng.sample(plan, len(plan))) >= 35
    run.assert_goes_on_to_the_same_end()


@pytest.mark.parametrize("name", ["term", pytest.param("int", marks=pytest.mark.slow)])
def test_a_signal_finishes_the_step_saves_and_exits_75(ranks, store, tmp_path, name):
    run = tmp_path / "run"
    settings = [s for s in tiny(f"data.store={store.path}", "ckpt_every_steps=100000") if not s.startswith("steps=")]
    command = ["pretrain", "vit_s", *settings, "steps=40", "--device", "cpu", "--out", str(run)]
    (ended,) = ranks(1, store.path, run, {}, command=command, fault=name, at=3)
    assert ended.code == 75
    at_once = f"SIG{name.upper()} received: saving, then stopping; a second one stops at once\n"
    assert at_once in ended.said
    assert ended.said.endswith(f"octfm: SIG{name.upper()}: saved after 4 of 40 updates; run again to continue\n")
    assert final(run)["step"] == 4


def test_a_second_signal_acts_at_once():
    # A shell without job control starts what runs in its background with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Interruption() as interruption, pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            assert interruption.signal_name == "SIGINT"
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_signal_while_the_handlers_are_put_back_changes_nothing(monkeypatch):
    """As Ctrl-C just when a training is done, which ended in a KeyError."""
    before, put, calls = [signal.getsignal(number) for number in Interruption.SIGNALS], signal.signal, []

    def interrupted(number, handler):
        calls.append(number)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGTERM)
        return put(number, handler)

    with Interruption() as interruption:
        monkeypatch.setattr(signal, "signal", interrupted)
    assert interruption.signal_name == "SIGTERM"
    assert [signal.getsignal(number) for number in Interruption.SIGNALS] == before


def test_F18_a_damaged_newest_checkpoint_falls_back_to_the_one_before(store, whole, tmp_path):
    """One flipped bit, which torch reads without complaint."""
    run = shutil.copytree(whole, tmp_path / "run")
    newest = checkpoint.newest(run)
    content = bytearray(newest.read_bytes())
    name = next(iter(checkpoint.load(newest)["model"]))
    at = content.find(checkpoint.load(newest)["model"][name].numpy().tobytes())
    content[at + 5] ^= 1
    newest.write_bytes(bytes(content))
    torch.load(newest, weights_only=True)
    with pytest.raises(CheckpointError, match=r"step-00000008\.pt: damaged, its checksum is \w+ and should be"):
        checkpoint.load(newest)
    said: list[str] = []
    quick_pretrain(config(), store, run, echo=said.append)
    assert any("step-00000008.pt is damaged and was set aside" in line and "going back to" in line for line in said)
    assert_same_run(run, whole)


@pytest.mark.parametrize("what", ["model", "optimizer", "step", "state", "config", "participants"])
def test_the_checksum_covers_everything(tmp_path, what):
    content = {
        "model": {"w": torch.ones(3, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}},
        "state": RunState().to_dict(),
        "config": {"seed": 1},
        "preprocessing": {},
        "fingerprint": "f",
        "participants": {"key": "k", "hashes": ["a"]},
    }
    path = checkpoint.write(tmp_path, 4, content)
    changed = torch.load(path, weights_only=True)
    if what == "step":
        changed["step"] = 5
    elif what == "model":
        changed["model"]["w"][1] = 2
    elif what == "optimizer":
        changed["optimizer"]["state"][0]["step"] += 1
    else:
        next(iter([changed[what]]))[next(iter(changed[what]))] = "other"
    torch.save(changed, path)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.load(path)


def test_two_processes_cannot_train_into_one_folder(store, tmp_path):
    """The lock goes with the process that held it, however it ended."""
    run = tmp_path / "run"
    code = "import sys, signal, pathlib; from octfm.run.folder import locked\nwith locked(pathlib.Path(sys.argv[1]), print): "
    code += "print('held', flush=True); signal.pause()"
    run.mkdir()
    other = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(
            CheckpointError, match=rf"another process \(pid {other.pid} on .* since .*is training into this folder"
        ):
            quick_pretrain(config(steps=1), store, run, echo=quiet)
        assert [p.name for p in run.iterdir()] == ["run.lock"], "nothing was written"
    finally:
        other.kill()
        other.wait()
    quick_pretrain(config(steps=1), store, run, echo=quiet)


def test_a_run_whose_folder_has_another_run_now_writes_nothing_into_it(store, tmp_path, monkeypatch):
    """The folder of a running job was deleted and the same command started anew: the old job replaced the checkpoints
    of the new one, whose folder then held another run's."""
    run, accumulate = tmp_path / "run", loop.accumulate

    def in_between(*args, **kwargs):
        monkeypatch.setattr(loop, "accumulate", accumulate)
        shutil.rmtree(run)
        quick_pretrain(config(steps=4), store, run, echo=quiet)
        return accumulate(*args, **kwargs)

    monkeypatch.setattr(loop, "accumulate", in_between)
    with pytest.raises(CheckpointError, match="another run has begun there; this one stops"):
        quick_pretrain(config(), store, run, echo=quiet)
    monkeypatch.undo()
    assert (
        load_encoder(run).source == str(checkpoint.newest(run))
        and checkpoint_files.step_of(checkpoint.newest(run)) == 4
    )


def test_the_loop_holds_the_lock_until_it_ends(store, tmp_path, monkeypatch):
    def second(*args, **kwargs):
        with (
            pytest.raises(CheckpointError, match="another process"),
            claim(tmp_path / "run", Identity(PRETRAINING, config(steps=1), "", "")),
        ):
            pass
        return accumulate(*args, **kwargs)

    accumulate = loop.accumulate
    monkeypatch.setattr(loop, "accumulate", second)
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    data = json.loads((run / "run.json").read_text())["data"]
    with claim(run, Identity(PRETRAINING, config(steps=1), store.fingerprint, data)):
        pass


def test_a_run_with_another_preprocessing_says_what_may_have_changed(tmp_path):
    """Phantoms have no store to name: their Preprocessing is this octfm's."""
    with claim(tmp_path / "run", Identity(PRETRAINING, config(steps=1), "of an earlier octfm", "")):
        pass
    with (
        pytest.raises(CheckpointError, match="another store or, without a store, on phantoms of another octfm"),
        claim(tmp_path / "run", Identity(PRETRAINING, config(steps=1), "of this one", "")),
    ):
        pass


def test_override_accepts_other_settings_and_records_them(store, tmp_path):
    run = quick_pretrain(config(steps=3, ckpt_every_steps=2), store, tmp_path / "run", echo=quiet)
    early = shutil.copy(run / "checkpoints" / "step-00000002.pt", tmp_path)
    longer = config(steps=5, clip_grad_norm=1.0, ckpt_every_steps=2)
    with pytest.raises(
        CheckpointError, match=r"other values of clip_grad_norm \(.*\), steps \(3, now 5\); .*--override"
    ):
        quick_pretrain(longer, store, run, echo=quiet)
    said: list[str] = []
    quick_pretrain(longer, store, run, echo=said.append, override=True)
    assert "override: steps is 5 from step 3 on; the run began with 3" in said
    record = json.loads((run / "run.json").read_text())["overrides"]
    assert record[0]["after_step"] == 3
    assert record[0]["settings"] == {"clip_grad_norm": {"before": 3.0, "now": 1.0}, "steps": {"before": 3, "now": 5}}
    assert final(run)["step"] == 5 and final(run)["config"]["steps"] == 5
    quick_pretrain(longer, store, run, echo=quiet)
    # After a return to an earlier checkpoint they hold from there on.
    for path in checkpoint_files.steps(run / "checkpoints"):
        path.write_bytes(b"damaged")
    shutil.copy(early, run / "checkpoints")
    quick_pretrain(longer, store, run, echo=quiet)
    assert [entry["after_step"] for entry in json.loads((run / "run.json").read_text())["overrides"]] == [2]


def test_shapes_cannot_be_overridden(store, tmp_path):
    run = quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet)
    wider = config(steps=3, model={"patch_size": [2, 8, 8], "width": 24, "depth": 2, "heads": 2})
    with pytest.raises(CheckpointError, match=r"weights do not fit the networks of this config .*cannot be overridden"):
        quick_pretrain(wider, store, run, echo=quiet, override=True)
    assert "overrides" not in json.loads((run / "run.json").read_text())
    quick_pretrain(config(steps=3), store, run, echo=quiet)  # which is still the same run


def test_a_version_1_run_goes_on(store, whole, tmp_path):
    """Runs that began before checkpoints had a checksum and a state."""
    run = shutil.copytree(whole, tmp_path / "run")
    for path in checkpoint_files.steps(run / "checkpoints"):
        old = checkpoint.load(path)
        old["version"] = 1
        del old["checksum"], old["state"]
        torch.save(old, path)
    checkpoint.newest(run).unlink()
    quick_pretrain(config(), store, run, echo=quiet)
    a, b = final(run), final(whole)
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])


def test_run_state_survives_the_checkpoint(tmp_path):
    state = RunState(
        offset=3,
        excluded=("a",),
        suspects=("a", "b"),
        lr_scale=0.5,
        micro_batch=2,
        skips=(7,),
        doubts=(8,),
        rollbacks=(Rollback(9, 4, "loss spike"),),
        losses=(0.1, 1 / 3),
        grad_norms=(2.0,),
        ranks=(20.5,),
    )
    content = {
        "model": {},
        "optimizer": {},
        "state": state.to_dict(),
        "config": {},
        "preprocessing": {},
        "fingerprint": "",
        "participants": {},
    }
    saved = checkpoint.load(checkpoint.write(tmp_path, 1, content))["state"]
    assert RunState.from_dict(saved) == state
    later = [rollback | {"added": 1} for rollback in saved["rollbacks"]]
    assert RunState.from_dict(saved | {"rollbacks": later, "added": 1}) == state, "of a later version"


def paths(steps):
    return [Path(f"step-{step:08d}.pt") for step in steps]


def test_retention_keeps_the_last_the_first_of_every_interval_and_the_best():
    found = paths(range(500, 10_001, 500))
    kept = [
        checkpoint_files.step_of(p) for p in found if p not in Retention(2, (3000.0,)).surplus(found, needed={4500})
    ]
    assert kept == [3000, 4500, 6000, 9000, 9500, 10_000]
    assert Retention(3).surplus(found, ()) == found[:-3]
    assert Retention(3).surplus(found[:2], ()) == []


def test_the_newest_checkpoint_is_that_of_most_updates_in_either_place_whatever_the_dates(tmp_path):
    """Copying a run gives new dates, and a number of nine digits sorts before one of eight."""
    run, second = tmp_path / "run", tmp_path / "second"
    steps = {run / "checkpoints": (7, 99_999_999, 10), second: (10, 100_000_000, 12)}
    for folder, own in steps.items():
        folder.mkdir(parents=True)
        for age, step in enumerate(own):
            path = folder / checkpoint_files.name_of(step)
            path.write_text("")
            os.utime(path, (1e9 - age, 1e9 - age))
        assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(folder)] == sorted(own)
    (second / "step-000000099.pt").write_text("")  # a name with a digit too many is somebody else's
    (run / "run.json").write_text(json.dumps({"second_destination": str(second)}))
    found = checkpoint_files.everywhere(run)
    assert [checkpoint_files.step_of(p) for p in found] == [7, 10, 12, 99_999_999, 100_000_000]
    assert found[1].parent == run / "checkpoints", "of two alike that of the run"
    assert checkpoint_files.newest(run) == second / "step-100000000.pt"


def test_people_of_a_run_and_of_those_before_it_are_known_by_every_spelling_and_key():
    """Checkpoints of earlier versions have hashes of ids as they were spelt."""
    before = {"key": "b", "hashes": [keyed_hash("P-0002", "b")]}
    of = {"key": "a", "hashes": checkpoint.participant_hashes(["P001"], "a"), "before": [before]}
    known = checkpoint.recogniser(of)
    assert [known(who) for who in ("P001", "p-1", "P-0002", "P003")] == [True, True, True, False]
    assert checkpoint.keys_are_known(of)
    assert not checkpoint.keys_are_known(of | {"before": [before | {"key": None}]})
    assert checkpoint.keys_are_known(of | {"before": [{"key": None, "hashes": []}]})


def test_a_copy_for_a_checkpoint_stays_and_its_checksum_knows_names_types_and_shapes():
    weights = torch.zeros(2, 3)
    copy = checkpoint.snapshot({"model": [weights]})
    weights.add_(1)
    assert not copy["model"][0].any()
    same_bytes = (weights, weights.reshape(3, 2), weights.view(torch.int32), weights.reshape(6))
    assert len({checkpoint.checksum({"model": tensor}) for tensor in same_bytes}) == 4
    assert checkpoint.checksum({"mode": weights}) != checkpoint.checksum({"model": weights})


def test_a_checkpoint_is_sound_if_it_is_one_and_nothing_was_wrong_shortly_before(tmp_path):
    kept, sound = {"optimizer": {}, "participants": {}}, retention(config(), 4.0).may_return_to
    states = {
        "sound": {},
        "skips": {"skips": [5]},
        "doubts": {"doubts": [95]},
        "long ago": {"skips": [5], "doubts": [9]},
    }
    steps = {"sound": 3, "skips": 50, "doubts": 100, "long ago": 200}
    written = {
        name: checkpoint.write(tmp_path / name, steps[name], kept | {"state": RunState().to_dict() | state})
        for name, state in states.items()
    }
    assert {name: sound(path) for name, path in written.items()} == {
        "sound": True, "skips": False, "doubts": False, "long ago": True,
    }  # fmt: skip
    torch.save({"format": checkpoint.FORMAT}, written["sound"])
    assert not sound(written["sound"])
    written["sound"].write_bytes(b"no checkpoint")
    assert not sound(written["sound"])


def test_checkpoints_of_every_interval_in_steps_and_in_epochs_are_kept_for_good():
    """An epoch of 4 steps: the first checkpoint at or after 6 steps is kept, and after 12."""
    kept = retention(config(keep_checkpoints=1, keep_every_steps=5, keep_every_epochs=1.5), 4.0)
    found = [Path(checkpoint_files.name_of(step)) for step in range(1, 14)]
    surplus = kept.surplus(found, ())
    assert [checkpoint_files.step_of(path) for path in found if path not in surplus] == [5, 6, 10, 12, 13]


@pytest.mark.slow
def test_retention_over_a_whole_run(store, tmp_path):
    settings = config(steps=12, ckpt_every_steps=1, keep_checkpoints=1, keep_every_steps=5, keep_every_epochs=1.5)
    run = quick_pretrain(settings, store, tmp_path / "run", echo=quiet)
    # 16 training volumes in batches of 4: an epoch is 4 steps, and the first checkpoint at or after 6 steps is kept,
    # and after 12.
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(run / "checkpoints")] == [5, 6, 10, 12]


def test_the_best_checkpoint_is_never_deleted(tmp_path):
    with_best = CheckpointWriter([tmp_path], Retention(1))
    for step in range(1, 6):
        with_best.save(step, {"model": {}}, best=step == 2)
    with_best.close()
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(tmp_path)] == [2, 5]


def full(refuses: Callable[[Path, int], bool]) -> Callable[[Path, int, dict], Path]:
    """Writes checkpoints to a disk that is full for these folders and steps."""

    def write(folder: Path, step: int, content: dict) -> Path:
        if refuses(folder, step):
            raise OSError(errno.ENOSPC, "no space left")
        return checkpoint.write(folder, step, content)

    return write


@hypothesis.settings(max_examples=40)
@hypothesis.given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_the_best_checkpoint_that_was_written_is_there_whatever_the_disk_refused(course):
    """Each step is (best so far, taken by the disk): one that was refused must not cost the best before it."""
    refused = {step for step, (_, taken) in enumerate(course) if not taken}
    with tempfile.TemporaryDirectory() as folder:
        writer = CheckpointWriter([Path(folder)], Retention(1), full(lambda _, step: step in refused))
        for step, (best, _) in enumerate(course):
            writer.save(step, {"model": {}}, best=best)
        writer.close()
        written = [step for step in range(len(course)) if step not in refused]
        best = [step for step in written if course[step][0]]
        kept = [checkpoint_files.step_of(p) for p in checkpoint_files.steps(Path(folder))]
        assert best_step(Path(folder)) == (best[-1] if best else None)
        assert kept == sorted({*written[-1:], *best[-1:]})


def test_a_best_checkpoint_that_cannot_be_named_is_a_sentence_and_no_end_of_training(tmp_path):
    writer = CheckpointWriter([tmp_path], Retention(1))
    (tmp_path / "best.json").mkdir()
    writer.save(1, {"model": {}}, best=True)
    writer.close()
    assert ["unnamed" in failure.sentence and not failure.lost for failure in writer.failures()] == [True]
    assert writer.failures() == [], "each is told once"
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(tmp_path)] == [1]


def test_a_full_disk_that_takes_no_name_lets_the_other_disk_fill_no_further_than_retention_says(tmp_path):
    """The second disk holds the best and the last one, also while every score is the best so far."""
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "best.json").mkdir(parents=True)
    writer = CheckpointWriter([first, second], Retention(1), full(lambda folder, _: folder == first))
    for step in range(1, 9):
        writer.save(step, {"model": {}}, best=step < 6)
    writer.wait()
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(second)] == [5, 8]
    assert sum("unnamed" in failure.sentence for failure in writer.failures()) == 5
    writer.forget_after(5)
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(second)] == [5]
    writer.save(6, {"model": {}})
    writer.save(7, {"model": {}})
    writer.wait()
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(second)] == [5, 7], "the best one has no name"
    writer.close()


def test_the_last_checkpoint_to_roll_back_to_is_kept_on_either_disk_and_a_failure_names_the_one_before(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write = full(lambda folder, step: step == 7 or (folder == first and step % 2 == 0))
    may_return_to = Retention(1, may_return_to=lambda path: checkpoint_files.step_of(path) in (2, 4))
    writer = CheckpointWriter([first, second], may_return_to, write)
    for step in range(1, 8):
        writer.save(step, {"model": {}})
    writer.close()
    kept = [[checkpoint_files.step_of(p) for p in checkpoint_files.steps(folder)] for folder in (first, second)]
    assert kept == [[5], [4, 6]]
    failures = writer.failures()
    assert [(f.step, f.lost) for f in failures] == [(2, False), (4, False), (6, False), (7, False), (7, True)]
    assert f"step-00000006.pt, is intact; trying {second}" in failures[-2].sentence
    assert "is intact; training goes on; free some space" in failures[-1].sentence
    assert "step-00000005.pt, is intact" in failures[2].sentence


def test_a_checkpoint_of_which_the_bucket_gets_no_copy_is_lost_there_and_whole_here(tmp_path):
    def offer(path):
        raise OSError(errno.ENOSPC, "no space left")

    writer = CheckpointWriter([tmp_path], Retention(2))
    writer.remote = SimpleNamespace(require=lambda: None, offer=offer, path=tmp_path, where="s3://b/run", failures=list)  # pyright: ignore[reportAttributeAccessIssue]
    writer.save(3, {"model": {}}, best=True)
    writer.close()
    (failure,) = writer.failures()
    assert failure.lost and failure.step == 3 and "is whole, but" in failure.sentence
    assert best_step(tmp_path) == 3 and len(checkpoint_files.steps(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "null", "[3]", '{"step": null}', '{"step": 3, "before": 2}', '{"before": [2]}'])
def test_a_damaged_name_of_the_best_checkpoint_is_as_good_as_none(tmp_path, text):
    writer = CheckpointWriter([tmp_path], Retention(1))
    (tmp_path / "best.json").write_text(text)
    for step in (1, 2, 3):
        writer.save(step, {"model": {}}, best=step == 2)
        writer.wait()
    writer.close()
    assert best_step(tmp_path) == 2 and [checkpoint_files.step_of(p) for p in checkpoint_files.steps(tmp_path)] == [
        2,
        3,
    ]


def test_a_checkpoint_that_is_a_link_is_deleted_and_what_it_links_to_is_not(tmp_path):
    places = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for number, name in enumerate(("step-00000001.dcp", "step-00000002.pt"), 1):
        (places[1] / str(number)).mkdir(parents=True)
        places[0].mkdir(exist_ok=True)
        (places[1] / str(number) / "file").touch()
        (places[0] / name).symlink_to(places[1] / str(number) / ("file" if number == 2 else ""))
    writer = CheckpointWriter([places[0]], Retention(1))
    writer.save(3, {"model": {}})
    writer.close()
    assert not writer.failures() and [p.name for p in places[0].iterdir()] == ["step-00000003.pt"]
    assert all((places[1] / number / "file").is_file() for number in "12")


def test_a_full_disk_does_not_keep_training_from_going_back(tmp_path, monkeypatch):
    writer = CheckpointWriter([tmp_path], Retention(3))
    for step in (2, 4):
        writer.save(step, {"model": {}}, best=True)
    writer.wait()

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("octfm.run.checkpoint_writer.write_whole", full)
    writer.forget_after(2)
    assert [checkpoint_files.step_of(path) for path in checkpoint_files.steps(tmp_path)] == [2]
    (failure,) = writer.failures()
    assert failure.sentence.endswith("names a best checkpoint after step 2, which is gone: No space left on device")
    assert not failure.lost


def test_going_back_keeps_the_checkpoint_that_was_the_best_before(tmp_path):
    writer = CheckpointWriter([tmp_path], Retention(3))
    for step in (2, 4, 5):
        writer.save(step, {"model": {}}, best=step != 4)
    writer.wait()
    assert best_step(tmp_path) == 5
    writer.forget_after(4)
    for step in (6, 8, 10):
        writer.save(step, {"model": {}})
    writer.wait()
    assert best_step(tmp_path) == 2
    assert [checkpoint_files.step_of(p) for p in checkpoint_files.steps(tmp_path)] == [2, 6, 8, 10]
    writer.save(12, {"model": {}}, best=True)
    writer.forget_after(2)
    assert best_step(tmp_path) == 2
    writer.forget_after(1)
    assert best_step(tmp_path) is None
    for step in (4, 2):  # a run whose newest checkpoints are damaged goes on from an earlier one
        writer.save(step, {"model": {}}, best=True)
        writer.wait()
        assert best_step(tmp_path) == step
    writer.close()


class FullDisk:
    """The kernel refuses every file beyond `size` bytes in this process, as a full disk would refuse it."""

    def __init__(self, size):
        self.size = size

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def disk_full_from(step, monkeypatch):
    """The disk is full while this process writes checkpoints after `step` updates and later."""
    write = checkpoint.write

    def limited(folder, at, content):
        if at < step or "second" in str(folder):
            return write(folder, at, content)
        with FullDisk(50_000):
            return write(folder, at, content)

    monkeypatch.setattr(checkpoint, "write", limited)


@pytest.mark.parametrize(
    "writer_is_fast", [pytest.param(False, marks=pytest.mark.slow), True], ids=["", "told in the loop"]
)
def test_a_full_disk_leaves_the_last_checkpoint_and_training_goes_on(
    store, whole, tmp_path, monkeypatch, writer_is_fast
):
    said: list[str] = []
    with monkeypatch.context() as patch:
        if writer_is_fast:  # the last failure is known, and told, before the loop ends
            save = CheckpointWriter.save
            patch.setattr(CheckpointWriter, "save", lambda self, *of, **best: (save(self, *of, **best), self.wait()))
        disk_full_from(6, patch)
        with pytest.raises(
            CheckpointError,
            match=r"after step 8 could not be written; free some space .* it continues from .*step-00000003\.pt",
        ):
            quick_pretrain(config(), store, tmp_path / "run", echo=said.append)
    message = next(line for line in said if "was not written" in line)
    assert os.strerror(errno.EFBIG) in message and "step-00000003.pt, is intact; training goes on" in message
    assert rows(tmp_path / "run", "checkpoint")[0]["sentence"] in message
    assert any(line.startswith("step      8/8") for line in said), "training went on"
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003.pt"], (
        "no half file is left"
    )
    run = quick_pretrain(config(), store, tmp_path / "run", echo=quiet)
    assert_same_run(run, whole)


def test_only_the_checkpoint_that_would_be_the_last_counts_as_lost(store, tmp_path, monkeypatch):
    """A rollback goes back in steps: what was lost in the abandoned course is neither an error nor hides one."""
    found: list[Session] = []
    save = Session.save
    monkeypatch.setattr(Session, "save", lambda self: (found.append(self), save(self))[1])
    quick_pretrain(config(steps=2), store, tmp_path / "run", echo=quiet)
    session = found[-1]
    for lost, raises in (
        ([100, session.training.step], True),
        ([session.training.step], True),
        ([100], False),
        ([], False),
    ):
        session.lost.clear()
        monkeypatch.setattr(
            session.writer,
            "failures",
            lambda lost=lost: [Failure(step, "the disk is full", lost=True) for step in lost],
        )
        monkeypatch.setattr(session, "metrics", Mute())
        if raises:
            with pytest.raises(CheckpointError, match="could not be written"):
                session._require_written()
        else:
            session._require_written()


class Mute:
    def write(self, *_, **__):
        pass


def test_a_full_disk_sends_checkpoints_to_the_second_destination(store, tmp_path, monkeypatch):
    settings = config(ckpt_second_dir=str(tmp_path / "second"))
    said: list[str] = []
    disk_full_from(6, monkeypatch)
    run = quick_pretrain(settings, store, tmp_path / "run", echo=said.append)
    assert any("trying" in line for line in said)
    newest = checkpoint.newest(run)
    assert newest.name == "step-00000008.pt" and (tmp_path / "second") in newest.parents
    said.clear()
    quick_pretrain(settings, store, run, echo=said.append)
    assert any("after 8 updates" in line for line in said), "it is found again"


def test_a_run_leaves_no_checkpoint_behind_on_the_second_disk(store, tmp_path, monkeypatch):
    """Renamed, or with another second folder, it would begin anew after the next kill."""
    settings = config(steps=3, ckpt_second_dir=str(tmp_path / "second"))
    disk_full_from(0, monkeypatch)
    run = quick_pretrain(settings, store, tmp_path / "run", echo=quiet)
    (kept,) = (tmp_path / "second").iterdir()
    renamed = run.rename(tmp_path / "renamed")
    for changed in (settings, config(steps=3, ckpt_second_dir=str(tmp_path / "third"))):
        with pytest.raises(CheckpointError, match=f"checkpoints of this run lie in {kept}, and .*; move them there"):
            quick_pretrain(changed, store, renamed, echo=quiet)
    kept.rename(kept.with_name(kept.name.replace("run-", "renamed-")))
    said: list[str] = []
    quick_pretrain(settings, store, renamed, echo=said.append)
    assert any("after 3 updates" in line for line in said), "it is found there"


def test_a_second_disk_that_is_not_mounted_is_noticed(store, tmp_path):
    """What is newest may lie on it, and the run would go on from an older checkpoint."""
    settings = config(steps=2, ckpt_second_dir=str(tmp_path / "disk" / "second"))
    said: list[str] = []
    run = quick_pretrain(settings, store, tmp_path / "run", echo=said.append)
    quick_pretrain(settings, store, run, echo=said.append)
    assert not any("mounted" in line for line in said)
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    other = config(steps=2, ckpt_second_dir=str(tmp_path / "other"))
    for again in (settings, settings, config(steps=2), other):
        said.clear()
        quick_pretrain(again, store, run, echo=said.append)
        assert any(f"{tmp_path / 'disk'}" in line and "is its disk mounted?" in line for line in said)


def test_an_encoder_says_that_its_newest_checkpoint_may_lie_on_a_disk_that_is_not_mounted(store, tmp_path, capsys):
    run = quick_pretrain(config(steps=2, ckpt_second_dir=str(tmp_path / "disk")), store, tmp_path / "run", echo=quiet)
    capsys.readouterr()
    load_encoder(run)
    assert capsys.readouterr().err == ""
    (tmp_path / "disk").rename(tmp_path / "elsewhere")
    load_encoder(run)
    assert capsys.readouterr().err.count("is its disk mounted? Newer checkpoints of this run may be on it") == 1
    load_encoder(run / "checkpoints" / "step-00000002.pt")
    assert capsys.readouterr().err == "", "this file was meant"


@pytest.fixture
def one_rank(tmp_path):
    """The runtime of a sharded job of one rank, whose collective calls are real."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield Runtime(torch.device("cpu"), sharded=True)
    torch.distributed.destroy_process_group()


SHARDS = {"model": {"w": torch.arange(9000.0)}, "optimizer": {"state": {}, "param_groups": []}, "participants": {}}


@pytest.mark.parametrize(
    ("size", "reason"),
    [(20_000, "as on a full disk"), (200_000, os.strerror(errno.EFBIG))],
    ids=["tensors", "everything else"],
)
def test_a_full_disk_refuses_shards_with_an_error_that_every_rank_gets(one_rank, tmp_path, size, reason):
    """Whichever of its files does not fit; ranks without the error would wait for the others until their timeout."""
    content = SHARDS | {"participants": {"hashes": [f"{n:064}" for n in range(9000)]}}
    with FullDisk(size), pytest.raises(OSError, match=reason):
        shards.write(tmp_path / "checkpoints", 4, content, runtime=one_rank)
    assert not list((tmp_path / "checkpoints").iterdir()), "nothing is left behind"
    another = SimpleNamespace(leads=False, value_of_first=lambda own: own or reason)
    with pytest.raises(OSError, match=reason):
        shards.write(tmp_path / "elsewhere", 4, content, runtime=another)
    assert not (tmp_path / "elsewhere").exists(), "only rank 0 writes what is no tensor"


def test_what_a_killed_job_of_more_ranks_left_is_no_part_of_the_checkpoint_that_is_written_anew(one_rank, tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / "step-00000004.dcp.partial").mkdir(parents=True)
    (folder / "step-00000004.dcp.partial" / "__7_0.distcp").write_bytes(b"of a rank that is no more")
    for offset in (0, 3):  # the second time after a rollback, in place of the first
        path = shards.write(folder, 4, SHARDS | {"state": {"offset": offset}}, runtime=one_rank)
        assert [*folder.iterdir()] == [path] and not (path / "__7_0.distcp").exists()
        found = shards.load(path)
        assert found["state"] == {"offset": offset} and torch.equal(found["model"]["w"], SHARDS["model"]["w"])


def test_no_file_of_shards_may_be_lost_cut_or_changed(one_rank, tmp_path):
    path = shards.write(tmp_path, 4, SHARDS, runtime=one_rank)
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for spoilt in (None, b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            if spoilt is None:
                file.unlink()
            else:
                file.write_bytes(spoilt)
            with pytest.raises(shards.DamagedShards):
                shards.verify(path)
        file.write_bytes(whole)
    shards.verify(path)


@pytest.mark.parametrize("killed_at", range(6))
def test_a_kill_while_shards_take_the_place_of_older_ones_leaves_one_of_them(
    one_rank, tmp_path, monkeypatch, killed_at
):
    """After a rollback the step that training went back to is saved anew."""
    folder, left = tmp_path / "checkpoints", [killed_at]
    shards.write(folder, 4, SHARDS, runtime=one_rank)

    def fatal(work):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return work(*args, **kwargs)

        return counted

    delete = shutil.rmtree

    def half_deleted(path, **kwargs):
        if left[0] == 0 and Path(path).is_dir():
            next(Path(path).iterdir()).unlink()
        fatal(delete)(path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", half_deleted)
        for name in ("rename", "replace"):
            patch.setattr(Path, name, fatal(getattr(Path, name)))
        with suppress(Killed):
            shards.write(folder, 4, SHARDS | {"state": {"offset": 3}}, runtime=one_rank)
    put_back(folder)
    CheckpointWriter([folder], Retention(1)).close()
    (path,) = folder.iterdir()
    shards.verify(path)


FILLED = """
mount -t tmpfs -o size=24m tmpfs disk
"$@" --out disk/run & run=$!
while ! ls disk/run/checkpoints/*.pt >first 2>&1; do sleep 0.05; kill -0 $run || exit 9; done
cat /dev/zero >disk/filler 2>/dev/null
wait $run; code=$?
ls disk/run/checkpoints >kept; cp disk/run/metrics.jsonl metrics.jsonl
exit $code
"""


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0,
    reason="may not mount a small disk",
)
def test_a_disk_that_fills_up_sends_checkpoints_to_the_second_destination(store, tmp_path):
    """A real one, and the kernel's own refusal: the run goes on, its earlier checkpoint stays, and the message says
    what to do."""
    (tmp_path / "disk").mkdir()
    settings = [
        s
        for s in tiny(f"data.store={store.path}", f"ckpt_second_dir={tmp_path / 'second'}")
        if not s.startswith("steps=")
    ]
    words = [sys.executable, "-m", "octfm", "pretrain", "vit_s", *settings, "steps=60", "--device", "cpu"]
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", FILLED, "sh", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert os.strerror(errno.ENOSPC) in done.stdout and "is intact" in done.stdout and "trying" in done.stdout, (
        done.stdout
    )
    assert (tmp_path / "kept").read_text().startswith("step-0000000"), "what was written before the disk was full"
    (place,) = (tmp_path / "second").iterdir()
    assert checkpoint.load(place / "step-00000060.pt")["step"] == 60


def test_metrics_wait_for_a_full_disk(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.write("train", 0, loss=1.0)
    with FullDisk((tmp_path / "metrics.jsonl").stat().st_size + 5):
        for step in (1, 2):
            metrics.write("train", step, loss=0.5)
    metrics.write("train", 3, loss=0.1)
    metrics.close()
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


@hypothesis.settings(max_examples=examples(40))
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(["train", "incident", "back"]), st.none() | st.integers(0, 300)), max_size=14)
)
def test_metrics_end_as_if_the_disk_had_never_been_full(course):
    """Each event comes at a moment when files may grow to so many bytes; a rollback also takes back what waits."""
    with tempfile.TemporaryDirectory() as folder:
        ended = []
        for name in ("full", "roomy"):
            path = Path(folder) / name / "metrics.jsonl"
            metrics, step, rollbacks = Metrics(path), 0, 0
            for event, room in course:
                with FullDisk(room) if room is not None and name == "full" else nullcontext():
                    if event == "back":
                        rollbacks, step = rollbacks + 1, step // 2
                        metrics.write("incident", step, rollback=rollbacks)
                        metrics.rewind(step, rollbacks)
                    else:
                        metrics.write(event, step)
                        step += event == "train"
            metrics.close()
            ended.append({file.name: file.read_text() for file in path.parent.iterdir()})
        assert ended[0] == ended[1]


def test_what_is_saved_is_the_moment_of_saving(tmp_path, monkeypatch):
    """The thread must not see the next update, and one checkpoint is written at a time."""
    weights, running = torch.zeros(1000), []
    may_write = {1: threading.Event(), 2: threading.Event()}
    write = checkpoint.write

    def held_up(folder, step, content):
        running.append(step)
        assert running == [step] and may_write[step].wait(60)
        running.pop()
        return write(folder, step, content)

    monkeypatch.setattr(checkpoint, "write", held_up)
    writer = CheckpointWriter([tmp_path], Retention(5))
    writer.save(1, {"model": {"w": weights}})  # returns although nothing may be written yet
    weights += 1
    may_write[1].set()
    writer.save(2, {"model": {"w": weights}})
    weights += 1
    may_write[2].set()
    writer.close()
    saved = [torch.load(p, weights_only=True)["model"]["w"] for p in checkpoint_files.steps(tmp_path)]
    assert [float(w.unique()) for w in saved] == [0, 1]


def test_python_callers_get_preempted_too(store, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Preempted, match="SIGTERM: saved after 2 of 8 updates"):
        interrupted_after(2, patch)
        quick_pretrain(config(), store, tmp_path / "run", echo=quiet)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    run = quick_pretrain(config(), store, tmp_path / "run", echo=quiet)
    assert_same_run(run, whole)
