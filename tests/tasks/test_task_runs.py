"""Fine-tuning and segmentation go on bit for bit after signals and kills, on a disk and in a bucket."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from octfm.config import load
from octfm.encoder import tokens
from octfm.encoder.export import export
from octfm.encoder.tuned import load_tuned
from octfm.errors import CheckpointError, EvaluationError, Preempted
from octfm.io import bucket
from octfm.report.sources import gather
from octfm.run import bucket as bucket_runs
from octfm.run import checkpoint, checkpoint_files
from octfm.run.bucket import local_run
from octfm.run.tracking import read_metrics
from octfm.store.store import Store
from octfm.tasks import finetune as finetuning
from octfm.tasks.finetune import finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment import Segmenter, load_segmenter
from octfm.tasks.segment_score import segment
from octfm.tasks.segment_settings import SegmentConfig
from octfm.weights.exported import KEY
from support import finetune_runs
from support.signals import signal_in
from support.small_store import SIZE, darkened, edit_rows, small_store
from support.tiny_runs import config, quick_pretrain, quiet

SLOW = pytest.mark.slow
SHORT = {"epochs": 3, "batch_size": 4, "per_device_batch_size": 2}
VERBS = ("finetune", "segment")
EITHER = ["finetune", pytest.param("segment", marks=pytest.mark.slow)]
"""Where both do the same."""


class Clinic:
    """A store with labels and surfaces, a pretrained encoder, and one finished run of either task."""

    def __init__(self, folder: Path):
        (folder / "truth").mkdir()

        def edit(seed, prepared):
            top = prepared.band[0].astype(np.float64) + 2
            surfaces = np.stack([top + 2, top + 19])
            lesions = np.zeros(SIZE, np.uint8)
            names = np.array(["ilm", "bm"])
            truth = folder / "truth" / f"1.2.3.{seed}.npz"
            np.savez(truth, surfaces=surfaces, surface_names=names, lesions=lesions)
            return darkened(seed, prepared)

        self.store = small_store(folder / "prepared", edit)
        self.labels = finetune_runs.write_labels(folder / "labels.tsv")
        self.truth = folder / "truth"
        self.run = quick_pretrain(config(steps=2), self.store, folder / "run", "cpu", echo=quiet)
        self.whole = {verb: folder / verb for verb in VERBS}
        for verb in VERBS:
            self.do(verb, self.whole[verb])

    def config(self, verb: str, **changes):
        if verb == "finetune":
            return finetune_runs.settings(self.run, self.store, self.labels, **SHORT | changes)
        settings = {"encoder": str(self.run), "store": str(self.store.path), "truth": str(self.truth), "steps": 10}
        return load(SegmentConfig, settings | {"surfaces": ["ilm", "bm"], "lr": 1e-2, "lr_encoder": 1e-3} | changes)

    def do(self, verb: str, out, echo=quiet, **changes) -> None:
        (finetune if verb == "finetune" else segment)(self.config(verb, **changes), out, "cpu", echo=echo)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the process of `killed_at` has: sums of several threads end in other bits
    yield Clinic(tmp_path_factory.mktemp("clinic"))
    torch.set_num_threads(threads)


def assert_same(one: Path, other: Path, verb: str) -> None:
    """Weights, optimizer, metrics and results, bit for bit."""
    a, b = (checkpoint.load(checkpoint.newest(run)) for run in (one, other))
    assert a["step"] == b["step"]
    for part in ("model", "optimizer", "state"):
        assert checkpoint.checksum(a[part]) == checkpoint.checksum(b[part]), part
    learned = ("train", "validation")  # how long uploads took, and what was waited for, is of each run
    rows = [[row for row in read_metrics(run / "metrics.jsonl") if row["kind"] in learned] for run in (one, other)]
    assert rows[0] == rows[1]
    results = [json.loads((run / f"{verb}.json").read_text())["results"] for run in (one, other)]
    for row in (*results[0], *results[1]):
        if verb == "finetune":  # named after the folder
            row.pop("encoder")
    assert results[0] == results[1]


def killed_at(step: int, ranks, clinic: Clinic, verb: str, out: Path) -> None:
    """SIGKILL in that step, in a process of its own."""
    settings = clinic.config(verb).model_dump(mode="json")
    (ended,) = ranks(1, clinic.store.path, out, settings, task=verb, fault="kill", at=step, on=0)
    assert ended.code == -9, ended


def stop_at(step: int, clinic: Clinic, verb: str, out: Path) -> None:
    """SIGTERM in that step, in this process."""
    with signal_in(verb, "term", step), pytest.raises(Preempted):
        clinic.do(verb, out)


@pytest.mark.slow
def test_a_signal_while_token_features_are_computed_stops_at_once(clinic, tmp_path, monkeypatch, capfd):
    """Else the first Ctrl-C seems to do nothing until all volumes are encoded."""
    drawn, draw = [], tokens.draw_tissue

    def signalled(*args):
        if not drawn:
            os.kill(os.getpid(), signal.SIGINT)
        drawn.append(args)
        return draw(*args)

    monkeypatch.setattr(tokens, "draw_tissue", signalled)
    with pytest.raises(Preempted, match="SIGINT: stopped while token features were computed"):
        clinic.do("finetune", tmp_path / "run", lr_encoder=0)
    assert len(drawn) == tokens.BATCH < len(clinic.store)
    assert capfd.readouterr().err.count("SIGINT received: saving, then stopping; a second one stops at once\n") == 1
    clinic.do("finetune", tmp_path / "run", lr_encoder=0)
    assert (tmp_path / "run" / "finetune.json").is_file()


@pytest.mark.parametrize("verb", ["finetune", pytest.param("segment", marks=pytest.mark.slow)])
def test_a_task_that_was_killed_and_stopped_equals_one_that_was_not(ranks, clinic, tmp_path, verb):
    """SIGKILL in the first epoch or fifth after a checkpoint, then SIGTERM in the middle of a later one."""
    out = tmp_path / "run"
    killed_at(7, ranks, clinic, verb, out)
    assert checkpoint_files.step_of(checkpoint.newest(out)) < 7
    stop_at(9, clinic, verb, out)
    assert checkpoint_files.step_of(checkpoint.newest(out)) == 10
    if verb == "segment":
        stop_at(15, clinic, verb, out)  # while the first baseline is trained
    clinic.do(verb, out)
    assert_same(out, clinic.whole[verb], verb)
    assert len(checkpoint_files.steps(out / "checkpoints")) == 1


@pytest.mark.parametrize("verb", EITHER)
def test_a_task_with_other_settings_or_of_another_verb_is_refused(clinic, tmp_path, verb):
    stop_at(2, clinic, verb, tmp_path / "run")
    with pytest.raises(
        CheckpointError,
        match=r"other values of seed \(\d+, now \d+\); restore them to resume \(.*config\.yaml has them\), or choose",
    ):
        clinic.do(verb, tmp_path / "run", seed=1)
    other = next(name for name in VERBS if name != verb)
    with pytest.raises(CheckpointError, match=f"holds a run of octfm {verb}; choose another --out"):
        clinic.do(other, tmp_path / "run")
    newest = checkpoint.newest(tmp_path / "run")
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="damaged"):
        clinic.do(verb, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("verb", EITHER)
def test_a_task_goes_on_where_its_store_lies_elsewhere(clinic, tmp_path, monkeypatch, verb):
    """On another disk or machine, as pretraining does; with other voxels it would be another run."""
    stop_at(2, clinic, verb, tmp_path / "run")
    moved = Store.open(shutil.copytree(clinic.store.path, tmp_path / "moved"))
    monkeypatch.setattr(clinic, "store", small_store(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="training volumes of the store are not those it began on"):
        clinic.do(verb, tmp_path / "run")
    monkeypatch.setattr(clinic, "store", moved)
    record = (tmp_path / "run" / "run.json").rename(tmp_path / "run.json")
    with pytest.raises(CheckpointError, match="other values of store"):  # of 0.1, which recorded no volumes
        clinic.do(verb, tmp_path / "run")
    record.rename(tmp_path / "run" / "run.json")
    clinic.do(verb, tmp_path / "run")
    assert_same(tmp_path / "run", clinic.whole[verb], verb)


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_another_machine_goes_on_with_a_task_in_a_bucket(place, clinic, tmp_path, monkeypatch, verb):
    seen = []

    def echo(line: str) -> None:
        seen.append(line)
        if sum(line.startswith(("epoch", "step")) for line in seen) == 2:
            raise Stop

    with pytest.raises(Stop):
        clinic.do(verb, place / verb, echo=echo)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    seen.clear()
    clinic.do(verb, str(place / verb), echo=seen.append)
    assert any("resuming" in line for line in seen)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "a third machine"))
    assert_same(local_run(place / verb), clinic.whole[verb], verb)
    loaded = (load_tuned if verb == "finetune" else load_segmenter)(str(place / verb))
    assert loaded is not None
    objects = {uri.removeprefix(f"{place}/{verb}/") for uri in bucket.find(str(place / verb))}
    assert {"config.yaml", "run.json", "metrics.jsonl", f"{verb}.json"} <= objects and "run.lease" not in objects


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_features_of_a_frozen_encoder_are_not_sent_to_a_bucket(place, clinic):
    clinic.do("finetune", place / "frozen", lr_encoder=0, epochs=1)
    assert not [uri for uri in bucket.find(str(place / "frozen")) if "tokens-" in uri]


def test_only_pretraining_has_a_report(clinic):
    for verb in VERBS:
        with pytest.raises(EvaluationError, match=r"expected (a run folder|one of octfm pretrain)"):
            gather(clinic.whole[verb], None, None)


def test_a_segmentation_that_is_not_finished_finds_nothing_yet(clinic, tmp_path):
    stop_at(4, clinic, "segment", tmp_path / "run")
    with pytest.raises(EvaluationError, match="has made 5 of 10 updates; run its command again"):
        load_segmenter(tmp_path / "run")


@pytest.mark.parametrize("left", [{"kind": "pretrain", "participant_key": "a"}, {"participant_key": "a"}])
def test_a_run_json_that_another_verb_left_before_it_began_is_not_of_the_run(clinic, tmp_path, left):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"format": "octfm-run", "version": 1} | left))
    stop_at(2, clinic, "finetune", tmp_path / "run")
    clinic.do("finetune", tmp_path / "run")
    assert_same(tmp_path / "run", clinic.whole["finetune"], "finetune")


@pytest.mark.parametrize("verb", EITHER)
def test_a_loss_without_a_gradient_leaves_the_last_checkpoint_as_it_was(clinic, tmp_path, monkeypatch, verb):
    """The loss is finite, its slope is not: an update would put NaN into the only checkpoint, and no resume helps."""
    owner = finetuning._Target if verb == "finetune" else Segmenter
    whole, calls = owner.loss, []

    def kinked(self, answers, *rest):
        calls.append(1)
        steep = (answers * 0).sum().sqrt() if answers.requires_grad and len(calls) > 8 else 0
        return whole(self, answers, *rest) + steep

    with monkeypatch.context() as patch:
        patch.setattr(owner, "loss", kinked)
        with pytest.raises(EvaluationError, match=r"gradient norm nan at step \d+; lower lr"):
            clinic.do(verb, tmp_path / "run")
    clinic.do(verb, tmp_path / "run")
    assert_same(tmp_path / "run", clinic.whole[verb], verb)


@pytest.mark.parametrize("verb", EITHER)
def test_a_frozen_encoder_that_was_replaced_since_is_refused(clinic, tmp_path, verb):
    """Its place is the same; a checkpoint of the task does not hold it, and the head would go on with other tokens."""
    encoder = tmp_path / "encoder"
    quick_pretrain(config(steps=1), clinic.store, encoder, "cpu", echo=quiet)
    seen = []

    def echo(line: str) -> None:
        seen.append(line)
        if sum(line.startswith(("epoch", "step")) for line in seen) == 2:
            raise Stop

    changes = {"encoder": str(encoder), "lr_encoder": 0.0}
    with pytest.raises(Stop):
        clinic.do(verb, tmp_path / "run", echo=echo, **changes)
    kept = checkpoint.newest(tmp_path / "run").read_bytes()
    shutil.copytree(encoder, tmp_path / "earlier")
    longer = config(steps=2)
    quick_pretrain(longer, clinic.store, encoder, "cpu", override=True, echo=quiet)
    with pytest.raises(CheckpointError, match="encoder that the settings name is not the one that this run began with"):
        clinic.do(verb, tmp_path / "run", **changes)
    assert checkpoint.newest(tmp_path / "run").read_bytes() == kept
    later = tmp_path / "later"
    encoder.rename(later)
    (tmp_path / "earlier").rename(encoder)
    clinic.do(verb, tmp_path / "run", **changes)
    load = load_tuned if verb == "finetune" else load_segmenter
    load(tmp_path / "run", "cpu")
    shutil.rmtree(encoder)
    later.rename(encoder)
    with pytest.raises(EvaluationError, match=r"has other weights than this (head|decoder) was trained on"):
        load(tmp_path / "run", "cpu")


@pytest.mark.parametrize(
    ("verb", "changes"),
    [
        ("finetune", {}),
        pytest.param("finetune", {"from_scratch": True, "head_epochs": 0}, marks=pytest.mark.slow),
        pytest.param("segment", {}, marks=pytest.mark.slow),
    ],
    ids=["finetune", "from scratch", "segment"],
)
def test_another_run_at_the_place_of_a_learning_encoder_is_refused(clinic, tmp_path, verb, changes):
    """Also one of another size, whose weights do not fit, and which leaves the baselines of a segmentation unlike."""
    encoder = tmp_path / "encoder"
    shutil.copytree(clinic.run, encoder)
    changes = {"encoder": str(encoder), **changes}
    with signal_in(verb, "term", 4), pytest.raises(Preempted):
        clinic.do(verb, tmp_path / "run", **changes)
    shutil.rmtree(encoder)
    small = {"patch_size": [2, 8, 8], "width": 24, "depth": 1, "heads": 2}
    quick_pretrain(config(steps=1, model=small), clinic.store, encoder, "cpu", echo=quiet)
    with pytest.raises(CheckpointError, match="encoder that the settings name is not the one that this run began with"):
        clinic.do(verb, tmp_path / "run", **changes)


def test_an_export_under_a_learning_encoder_is_known_by_its_weights_with_and_without_its_key(clinic, tmp_path):
    """It was known by the key alone: without it nothing was compared, and a run begun with it could not go on."""
    encoder, out = export(clinic.run, tmp_path / "encoder", echo=quiet), tmp_path / "run"
    chosen = clinic.config("finetune", encoder=str(encoder))
    with signal_in("finetune", "term", 4), pytest.raises(Preempted):
        finetune(chosen, out, "cpu", echo=quiet)
    (encoder / KEY).unlink()
    finetune(chosen, out, "cpu", allow_seen=True, echo=quiet)
    shutil.rmtree(encoder)
    other = quick_pretrain(config(steps=1), clinic.store, tmp_path / "other", "cpu", echo=quiet)
    export(other, encoder, keep_key=tmp_path / "key", echo=quiet)
    with pytest.raises(CheckpointError, match="encoder that the settings name is not the one that this run began with"):
        finetune(chosen, out, "cpu", allow_seen=True, echo=quiet)


def test_numbers_of_which_validation_has_one_value_are_learned_and_written(clinic, tmp_path):
    """R² of a single value is not a number: the loss then decides, and finetune.json is written nevertheless."""
    labels = tmp_path / "ages.tsv"
    val = {row.participant for row in clinic.store.rows if row.split == "val"}
    names = sorted({row.participant for row in clinic.store.rows})
    ages = [50 if name in val or not val else 40 + 3 * i for i, name in enumerate(names)]
    labels.write_text("participant_id\tage\n" + "".join(f"{n}\t{a}\n" for n, a in zip(names, ages, strict=True)))
    out = tmp_path / "run"
    settings = clinic.config("finetune").model_dump() | {"labels": str(labels), "target": "age", "order": ()}
    finetune(load(FinetuneConfig, settings), out, "cpu", echo=quiet)
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "validation"]
    result = json.loads((out / "finetune.json").read_text())
    assert result["validation_score"] is None and result["best_epoch"] == 1 + int(np.argmin(losses))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_two_readers_that_fetch_one_run_at_once_share_its_copy(place, clinic, tmp_path, monkeypatch):
    """Ranks on one machine read the same encoder from a bucket: the second must not delete what the first reads."""
    quick_pretrain(config(steps=1), clinic.store, place / "run", "cpu", echo=quiet)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "reader"))
    fetch, other = bucket_runs._fetch, []

    def late(*args, **options):
        if not other:
            other.append(None)
            monkeypatch.setattr(bucket_runs.os, "getpid", lambda: 1)
            other[0] = local_run(place / "run").stat().st_ino
            monkeypatch.setattr(bucket_runs.os, "getpid", lambda: 2)
        return fetch(*args, **options)

    monkeypatch.setattr(bucket_runs, "_fetch", late)
    copy = local_run(place / "run")
    assert copy.stat().st_ino == other[0]
    assert [path.name for path in copy.parent.iterdir()] == [copy.name]


@pytest.mark.slow
def test_a_segmentation_whose_truth_was_changed_since_is_refused(clinic, tmp_path):
    """As fine-tuning with other labels is: its first half would have learned other surfaces than its second."""
    copy = tmp_path / "run"
    stop_at(4, clinic, "segment", copy)
    train = next(row for row in clinic.store.rows if row.split == "train")
    file = clinic.truth / f"{train.acquisition}.npz"
    before = file.read_bytes()
    arrays = dict(np.load(file))
    try:
        np.savez(file, **arrays | {"surfaces": arrays["surfaces"] + 1})
        with pytest.raises(CheckpointError, match="prepared again, split or labelled anew"):
            clinic.do("segment", copy)
    finally:
        file.write_bytes(before)
    clinic.do("segment", copy)
    assert_same(copy, clinic.whole["segment"], "segment")


def test_a_fine_tuning_whose_splits_were_drawn_anew_is_refused(clinic, tmp_path):
    """Who moves from the end of train to the beginning of val, or of val to that of test, leaves the order of all volumes
    as it was: a finished run would be tested on a participant by whom its epoch was chosen."""
    run = shutil.copytree(clinic.whole["finetune"], tmp_path / "run")
    rows = clinic.store.path / "rows.jsonl"
    before = rows.read_bytes()
    try:
        edit_rows(clinic.store.path, lambda row: {"split": "val"} if row.participant == "P007" else {})
        with pytest.raises(CheckpointError, match="prepared again, split or labelled anew"):
            clinic.do("finetune", run)
    finally:
        rows.write_bytes(before)
    clinic.do("finetune", run)
