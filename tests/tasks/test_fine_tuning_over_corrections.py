"""A fine-tuning while its labels, splits and list of excluded volumes are corrected: what it ends with is what a
new one gives on the same inputs, or it is refused."""

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octfm.errors import CheckpointError, EvaluationError, Preempted
from octfm.run import folder as run_folder
from octfm.store.store import Store
from octfm.tasks import finetune as finetuning
from octfm.tasks.finetune import finetune
from support import finetune_runs
from support.signals import signal_in
from support.small_store import GRADES, darkened, edit_rows, small_store
from support.tiny_runs import config, quick_pretrain, quiet

PEOPLE = [f"P{i:03d}" for i in range(12)]
SPLITS = ("train",) * 6 + ("val",) * 3 + ("test",) * 3
TINY = {"patch_size": [4, 32, 16], "width": 12, "depth": 1, "heads": 1}


class Corrections(RuleBasedStateMachine):
    home: Path
    results: ClassVar[dict[tuple, dict | str]] = {}

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.grade = {person: GRADES[i % 3] for i, person in enumerate(PEOPLE)}
        self.split, self.excluded, self.order = dict(zip(PEOPLE, SPLITS, strict=True)), (), [*PEOPLE]
        self.run: Path | None = None
        self.began: tuple | None = None

    def teardown(self):
        shutil.rmtree(self.folder)

    def write(self) -> None:
        edit_rows(self.home / "store", lambda row: {"split": self.split[row.participant]})
        lines = [f"{person}\t{self.grade[person]}\n" for person in self.order if person in self.grade]
        (self.home / "labels.tsv").write_text("participant_id\tgrade\n" + "".join(lines))
        (self.home / "exclude.txt").write_text("".join(f"{name}\n" for name in ("nobody", *self.excluded)))

    def inputs(self) -> tuple:
        """All that a training may depend on."""
        used = [p for p in PEOPLE if p in self.grade and p not in self.excluded]
        return tuple((p, self.grade[p], self.split[p]) for p in used), self.excluded

    def tune(self, out: Path) -> dict:
        store = Store.open(self.home / "store")
        chosen = {"epochs": 2, "head_epochs": 0, "patience": 9, "exclude": str(self.home / "exclude.txt")}
        tuning = finetune_runs.settings(self.home / "run", store, self.home / "labels.tsv", lr_encoder=0, **chosen)
        done = finetune(tuning, out, "cpu", echo=quiet)
        result = json.loads((done / "finetune.json").read_text())
        for row in result["results"]:
            row.pop("encoder")
        kept = ("results", "best_epoch", "validation_score", "validation_participants", "validation_drawn")
        return {name: result[name] for name in kept}

    def fresh(self, inputs: tuple) -> dict | str:
        """The result of a training that nothing disturbs, or why there is none."""
        if inputs not in self.results:
            try:
                self.results[inputs] = self.tune(Path(tempfile.mkdtemp(dir=self.folder)) / "fresh")
            except EvaluationError as error:
                self.results[inputs] = str(error)
        return self.results[inputs]

    @initialize()
    def begin(self):
        self.start(2)

    @rule(stop=st.none() | st.integers(0, 5))
    def start(self, stop):
        self.write()
        inputs, new, out = self.inputs(), self.run is None, self.run or Path(tempfile.mkdtemp(dir=self.folder)) / "run"
        expected = self.fresh(inputs)
        try:
            if stop is None:
                found = self.tune(out)
            else:
                with signal_in("finetune", "term", stop):
                    found = self.tune(out)
        except EvaluationError as error:
            assert str(error) == expected
            return
        except CheckpointError as error:
            assert self.began != inputs and "split or labelled anew" in str(error)
            self.run = None  # as the error says
            return
        except Preempted:
            found = None
        finally:
            if new and (out / "config.yaml").exists():
                self.run, self.began = out, inputs
        # Where val alone cannot choose an epoch, a participant may move between train and val.
        assert self.run is None or self.fresh(self.began) == expected, "another training, without a word"
        assert found is None or found == expected

    @rule(person=st.sampled_from(PEOPLE), grade=st.sampled_from([*GRADES, None]))
    def correct_a_label(self, person, grade):
        self.grade.pop(person, None)
        if grade is not None:
            self.grade[person] = grade

    @rule(person=st.sampled_from(PEOPLE[5:10]), split=st.sampled_from(["train", "val", "test"]))
    def move_to_another_split(self, person, split):
        self.split[person] = split

    @rule(people=st.lists(st.sampled_from(PEOPLE), max_size=2, unique=True))
    def exclude(self, people):
        self.excluded = tuple(sorted(people))

    @rule(order=st.permutations(PEOPLE))
    def sort_the_table(self, order):
        self.order = order


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory):
    home = Corrections.home = tmp_path_factory.mktemp("home")
    store = small_store(home / "store", darkened, SPLITS)
    first = {"steps": 1, "model": TINY, "predictor": {"width": 12, "depth": 1, "heads": 1}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_folder, "git_state", dict)
        patch.setattr(finetuning, "git_state", dict)
        patch.setattr(finetuning, "RESAMPLES", 20)
        patch.setattr(os, "fsync", lambda _: None)
        quick_pretrain(config(**first), store, home / "run", "cpu", echo=quiet)
        yield


Corrections.TestCase.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=10)
test_fine_tuning_over_corrections = Corrections.TestCase
