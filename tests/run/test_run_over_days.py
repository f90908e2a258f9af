"""A run over days: it is stopped, killed, damaged, moved and resumed with other settings, and a simple model says which
checkpoint each start goes on from; updates and metrics are those of a run that nothing disturbed."""

import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octfm.errors import CheckpointError, Preempted
from octfm.run import checkpoint, checkpoint_files
from octfm.run import folder as run_folder
from support.small_store import small_store
from support.tiny_runs import config, interrupted_after, quick_pretrain, quiet, rows

TINY = {
    "steps": 6,
    "model": {"patch_size": [2, 16, 16], "width": 12, "depth": 1, "heads": 1},
    "predictor": {"width": 12, "depth": 1, "heads": 1},
    "masks": {"budget": 16},
    "validate_every_steps": 100,
    "ckpt_every_steps": 2,
}
FREE = [{}, {"ckpt_every_steps": 1}, {"ckpt_every_steps": 3}, {"keep_checkpoints": 1}, {"validate_every_steps": 2}]
OTHER = [
    ({"seed": 4}, False, "other values of seed"),
    ({"steps": 9}, False, "other values of steps"),
    ({"model": {**TINY["model"], "width": 24}}, True, "do not fit"),
    ({"objective": {"name": "mae"}}, True, "do not fit"),
]
"""Other settings, whether they are overridden, and why they are refused."""
SPEED = ("volumes_per_s", "data_wait_share", "peak_memory_gb", "time")


def weights(content: dict) -> str:
    return checkpoint.checksum({part: content[part] for part in ("model", "optimizer", "state")})


@cache
def volumes(folder: Path):
    return small_store(folder / "store", splits=("train",) * 3 + ("test",))


@cache
def undisturbed(folder: Path) -> tuple[dict[int, str], dict[int, dict]]:
    """The weights after every update, and the row of every step."""
    run = quick_pretrain(config(**TINY | FREE[1], keep_checkpoints=99), volumes(folder), folder / "whole", echo=quiet)
    contents = [checkpoint.load(path) for path in checkpoint_files.steps(run / "checkpoints")]
    return {content["step"]: weights(content) for content in contents}, logged(run)


def logged(run: Path) -> dict[int, dict]:
    found = rows(run) if (run / "metrics.jsonl").exists() else []
    assert [row["step"] for row in found] == sorted({row["step"] for row in found}), "every step once, in order"
    return {row["step"]: {key: value for key, value in row.items() if key not in SPEED} for row in found}


class Days(RuleBasedStateMachine):
    home: Path

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.run = self.folder / "run"
        self.damaged: dict[str, bytes] = {}
        """Content of the checkpoints that are damaged, by name."""

    def teardown(self):
        shutil.rmtree(self.folder)

    def whole(self) -> list[int]:
        """Steps of the checkpoints that nobody has damaged."""
        found = checkpoint_files.steps(self.run / "checkpoints")
        return [checkpoint_files.step_of(path) for path in found if path.name not in self.damaged]

    @initialize(at=st.integers(0, 2))
    def begin(self, at):
        self.start("SIGTERM", at, {})

    @rule(
        how=st.sampled_from(["", "SIGTERM", "SIGTERM", "kill", "kill", "full disk"]),
        at=st.integers(0, 40),
        free=st.sampled_from(FREE),
    )
    def start(self, how, at, free):
        last, before = max(self.whole(), default=0), logged(self.run)
        refused = self.damaged and not last
        ended = "refused"
        try:
            ended = self.train(how, at, free)
        except CheckpointError as error:
            assert refused or how == "full disk", error
            assert "\n" not in str(error) and ("damaged" in str(error) or not refused)
        if refused:
            assert ended in ("refused", "killed")
            return
        updates, steps = undisturbed(self.home)
        present = {path.name: path.read_bytes() for path in (self.run / "checkpoints").glob("*.pt")}
        self.damaged = {name: content for name, content in self.damaged.items() if present.get(name) == content}
        now = self.whole()
        assert max(now, default=0) >= last, "a whole checkpoint is gone before its successor is there"
        for step in now:
            assert weights(checkpoint.load(self.run / "checkpoints" / f"step-{step:08d}.pt")) == updates[step]
        found = logged(self.run)
        assert found == {step: steps[step] for step in found}
        if ended == "saved":
            assert max(now) in (last + at % 3 + 1, 6)
        if ended == "done":
            assert max(now) == 6 and {*range(last, 6), *(s for s in before if s < last)} == found.keys()
            assert not list(self.run.rglob("*.partial"))

    def train(self, how: str, at: int, free: dict) -> str:
        """Train to the end or to what happens in between: `how`, at this update or write."""
        left, writes, main = self.folder / "left", iter([False] * at), os.getpid()

        def one_more(descriptor):
            assert os.getpid() == main
            if not next(writes, True):
                return
            if how == "full disk":
                raise OSError(28, "No space left on device")
            if not left.exists():
                shutil.copytree(self.run, left)
            raise SystemExit

        with pytest.MonkeyPatch.context() as patched:
            if how == "SIGTERM":
                interrupted_after(at % 3 + 1, patched)
            patched.setattr(os, "fsync", one_more if how in ("kill", "full disk") else lambda _: None)
            try:
                quick_pretrain(config(**TINY | free), volumes(self.home), self.run, "cpu", echo=quiet)
            except Preempted:
                return "saved"
            except SystemExit:
                shutil.rmtree(self.run)
                left.rename(self.run)
                return "killed"
            except OSError:
                assert how == "full disk"
                return "stopped"
        return "done"

    @rule(other=st.sampled_from(OTHER))
    def start_with_other_settings(self, other):
        changes, override, why = other
        # Without a checkpoint any settings fit, and damaged ones would be set aside.
        if not (self.run / "config.yaml").exists() or not self.whole() or self.damaged:
            return
        files = {path: path.read_bytes() for path in self.run.rglob("*") if path.is_file() and path.name != "run.lock"}
        with pytest.raises(CheckpointError, match=why):
            quick_pretrain(config(**TINY | changes), volumes(self.home), self.run, "cpu", echo=quiet, override=override)
        assert all(path.read_bytes() == content for path, content in files.items()), "what is refused changes nothing"

    @rule(which=st.integers(0, 3), length=st.sampled_from([0, 1000, None]))
    def damage_a_checkpoint(self, which, length):
        """Cut it off or, without a length, change some of its bytes."""
        if found := checkpoint_files.steps(self.run / "checkpoints"):
            path = found[which % len(found)]
            content = bytearray(path.read_bytes()[:length])
            for place in range(0, len(content), 500) if length is None else ():
                content[place] = (content[place] + 1) % 256
            path.write_bytes(content)
            self.damaged[path.name] = bytes(content)

    @rule(what=st.sampled_from(["metrics.jsonl", "last line", "newest checkpoint", "a partial file"]))
    def lose(self, what):
        metrics, found = self.run / "metrics.jsonl", checkpoint_files.steps(self.run / "checkpoints")
        if what == "newest checkpoint" and found:
            found[-1].unlink()
            self.damaged.pop(found[-1].name, None)
        elif what == "a partial file" and found:
            (found[-1].parent / ".step-00000005.pt.7.0123abcd.partial").touch()
        elif what == "metrics.jsonl":
            metrics.unlink(missing_ok=True)
        elif what == "last line" and metrics.exists():
            metrics.write_bytes(metrics.read_bytes()[:-10])

    @rule(copy=st.booleans())
    def move_or_copy_the_folder(self, copy):
        if self.run.exists():
            there = Path(tempfile.mkdtemp(dir=self.folder)) / "run"
            (shutil.copytree if copy else shutil.move)(self.run, there)
            self.run = there


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    Days.home = tmp_path_factory.mktemp("home")
    with patch.object(run_folder, "git_state", dict):
        yield


Days.TestCase.settings = settings(max_examples=settings().max_examples // 8, stateful_step_count=8)
test_run_over_days = Days.TestCase
