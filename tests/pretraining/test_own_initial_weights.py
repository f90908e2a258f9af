"""`model.init` names a run, a checkpoint or an export of one's own: what is carried over, and who counts as seen."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octfm.encoder.encoder import seen_by, seen_if_known
from octfm.encoder.export import export
from octfm.errors import CheckpointError, EvaluationError
from octfm.io.hashing import keyed_hash
from octfm.pretraining.initial_weights import begin_with, read_initial
from octfm.pretraining.learner import Learner, build_objective
from octfm.pretraining.preflight.resources import initial_weights
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.resume import PRETRAINING, part_of
from octfm.run import checkpoint
from octfm.run.folder import RunFolder
from octfm.run.runtime import start
from octfm.store.store import Store
from octfm.tasks.finetune import finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.trust.report import _pretraining
from octfm.volume.preprocessing import Preprocessing
from support.command_line import invoke
from support.planted_faults import infinite_gradient
from support.small_store import SPLITS, edit_rows, small_preprocessing, small_store
from support.tiny_runs import Killed, assert_same_run, config, final, killed_by, quick_pretrain, quiet, rows

STILL = {"base_lr": 1e-9, "warmup_ratio": 0.1}
NEW = "NEW"
"""Prefix of the participants of the second cohort."""


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Store:
    return small_store(tmp_path_factory.mktemp("first") / "store")


@pytest.fixture(scope="module")
def second(tmp_path_factory) -> Store:
    """Other people, in the same splits."""
    folder = tmp_path_factory.mktemp("second") / "store"
    small_store(folder)
    edit_rows(folder, lambda row: {"participant": NEW + row.participant})
    return Store.open(folder)


@pytest.fixture(scope="module")
def parent(first, tmp_path_factory) -> Path:
    return quick_pretrain(config(steps=4), first, tmp_path_factory.mktemp("parent") / "run", "cpu", echo=quiet)


def begun(init: Path | str, **changes):
    model = config().model.model_dump() | {"init": str(init)} | changes.pop("model", {})
    return config(model=model, **changes)


@pytest.mark.slow
def test_a_smoke_run_reads_the_weights_that_the_run_would_begin_with(parent, first, tmp_path, monkeypatch):
    """It ignored model.init, and a misspelt one stopped the run itself."""
    trained = []
    monkeypatch.setattr("octfm.pretraining.pretrain.pretrain", lambda settings, *_, **__: trained.append(settings))
    settings = tmp_path / "settings.yaml"
    settings.write_text(json.dumps(begun(parent).model_dump(mode="json")), encoding="utf-8")
    words = ("pretrain", str(settings), f"data.store={first.path}", "--smoke")
    said = invoke(*words)
    assert said.exit_code == 0 and f"smoke: {parent} has the sizes of the settings; these small" in said.output
    assert trained.pop().model.init is None
    for wrong, why in ((f"model.init={parent}s", "no such file"), ("model.depth=1", "other sizes than model")):
        assert why in str(invoke(*words, wrong).exception) and not trained


def prepared_as(preprocessing: Preprocessing) -> Any:
    """What `initial_weights` reads of a store without volumes."""
    return SimpleNamespace(preprocessing=preprocessing, rows=[])


def trained_on(store: Store) -> set[str]:
    return {row.participant for row in store.rows if row.split == "train"}


@pytest.mark.parametrize("name", ["vjepa2", "mae"])
def test_a_run_begins_with_the_teacher_and_with_all_networks_of_its_own_objective(parent, first, name):
    settings, given = begun(parent, objective={"name": name}), final(parent)["model"]
    model = build_objective(settings, first.preprocessing)
    filled = begin_with(read_initial(str(parent), settings), model)
    assert filled[0] == "encoder" and (len(filled) > 1) == (name == "vjepa2")
    for network in filled:
        theirs = part_of(given, f"{network.replace('encoder', 'target_encoder')}.")
        for key, tensor in getattr(model, network).state_dict().items():
            torch.testing.assert_close(tensor, theirs[key], rtol=0, atol=0, msg=f"{network}.{key}")


@pytest.mark.slow
def test_all_networks_of_the_same_objective_are_carried_over(parent, second, tmp_path):
    run = quick_pretrain(begun(parent, steps=1, schedule=STILL), second, tmp_path / "run", "cpu", echo=quiet)
    given, taken = final(parent)["model"], final(run)["model"]
    for name, tensor in taken.items():
        theirs = given[name.replace("encoder.", "target_encoder.", 1) if name.startswith("encoder.") else name]
        torch.testing.assert_close(tensor, theirs, rtol=0, atol=1e-6, msg=name)
    other = begun(parent, steps=1, schedule=STILL, objective={"name": "mae"})
    alone = quick_pretrain(other, second, tmp_path / "mae", "cpu", echo=quiet)
    encoder = {name for name in final(alone)["model"] if name.startswith("encoder.")}
    for name in encoder:
        torch.testing.assert_close(final(alone)["model"][name], given[f"target_{name}"], rtol=0, atol=1e-6, msg=name)


def test_F16_the_participants_of_both_runs_count_as_seen(parent, first, second, tmp_path):
    run = quick_pretrain(begun(parent), second, tmp_path / "run", "cpu", echo=quiet)
    both = trained_on(first) | trained_on(second)
    seen = seen_by(run)
    assert all(map(seen, both)) and not any(seen(row.participant) for row in second.rows if row.split == "test")
    assert final(run)["participants"]["trained_on"] == len(trained_on(second))
    assert RunFolder(run, PRETRAINING).record["inherited_participants"] == len(trained_on(first))
    assert not any(map(seen_by(parent), trained_on(second)))
    # Whoever is begun with it has seen them all, also through an export.
    third = quick_pretrain(begun(run, steps=1), second, tmp_path / "third", "cpu", echo=quiet)
    exported = export(run, tmp_path / "exported", echo=quiet)
    fourth = quick_pretrain(begun(exported, steps=1), second, tmp_path / "fourth", "cpu", echo=quiet)
    for later in (third, exported, fourth):
        assert all(map(seen_by(later), both)), later
    # Nobody who knows one run's key can look for the people of another.
    keys = [part["key"] for part in checkpoint.parts_of(final(fourth)["participants"])]
    assert keys == [RunFolder(path, PRETRAINING).key for path in (fourth, parent, run)]
    assert final(parent)["version"] == 2 and final(run)["version"] == 3, "octfm 0.1 would overlook the parent's people"
    assert [json.loads((exported / "config.json").read_text())["version"], (exported / "participants.key").read_text()] == [
        2, f"{keys[2]}\n{keys[1]}\n",
    ]  # fmt: skip


def test_people_of_a_run_of_0_1_do_not_count_as_others_on_the_same_store(parent, first, tmp_path):
    """Its checkpoints have hashes of ids as they are spelt: P001, where today's are of the person, 1."""
    content = final(parent)
    key = content["participants"]["key"]
    spelt = sorted(keyed_hash(person, key) for person in trained_on(first))
    assert set(spelt).isdisjoint(content["participants"]["hashes"])
    content = {name: value for name, value in content.items() if name != "checksum"}
    old = checkpoint.write(tmp_path, content["step"], content | {"participants": {"key": key, "hashes": spelt}})
    run = quick_pretrain(begun(old, steps=1), first, tmp_path / "run", "cpu", echo=quiet)
    assert RunFolder(run, PRETRAINING).record["inherited_participants"] == 0
    assert all(map(seen_by(old), trained_on(first)))


def test_F16_weights_published_without_their_key_may_be_begun_with_but_nobody_forgets_it(
    parent, first, second, tmp_path
):
    """Weights that others share come without it. Whom they have seen stays unknown until somebody has the key."""
    kept = tmp_path / "kept.key"
    published = export(parent, tmp_path / "published", keep_key=kept, echo=quiet)
    (_, unknown) = initial_weights(begun(published), first)
    assert unknown.status == "WARN" and "published without the key" in unknown.measured
    run = quick_pretrain(begun(published, steps=1), second, tmp_path / "run", "cpu", echo=quiet)
    record = RunFolder(run, PRETRAINING).record
    assert record["inherited_participants"] == 1, "at least"
    assert record["inherited_unknown"] == len(final(parent)["participants"]["hashes"])
    # Neither a later run nor exports forget it, and the run's own people are known in all of them.
    third = quick_pretrain(begun(run, steps=1), second, tmp_path / "third", "cpu", echo=quiet)
    exported = export(third, tmp_path / "exported", echo=quiet)
    for later in (run, third, exported):
        with pytest.raises(
            EvaluationError, match=r"began with weights that were published without .* in the place of -"
        ):
            seen_by(later)
        assert seen_if_known(later, allow_seen=True) is None
    keys = (exported / "participants.key").read_text().splitlines()
    assert keys == [RunFolder(third, PRETRAINING).key, "-", RunFolder(run, PRETRAINING).key]
    leaking = small_store(tmp_path / "leaking", splits=SPLITS[::-1])
    edit_rows(leaking.path, lambda row: {"participant": NEW + row.participant})
    checks = initial_weights(begun(exported), Store.open(leaking.path))
    assert [check.status for check in checks if check.name == "inherited participants"] == ["WARN", "FAIL"]
    (_, inherited, *_) = initial_weights(begun(parent), first)
    people = {row.participant for row in first.rows if row.split == "val"}
    seen = sum(map(seen_by(parent), people))
    assert f" and {seen} of {len(people)} in its validation split were seen by" in inherited.measured
    # Whoever gets the key puts it in its place; another is refused.
    text = (exported / "participants.key").read_text()
    (exported / "participants.key").write_text(text.replace("-", keys[0]))
    with pytest.raises(CheckpointError, match="not what belongs to the hashes"):
        seen_by(exported)
    (exported / "participants.key").write_text(text.replace("-", kept.read_text().strip()))
    assert all(map(seen_by(exported), trained_on(first) | trained_on(second)))
    assert not any(map(seen_by(exported), {row.participant for row in second.rows if row.split == "test"}))


def test_it_resumes_bit_for_bit_and_forgets_nobody(parent, first, second, tmp_path):
    settings = begun(parent)
    whole = quick_pretrain(settings, second, tmp_path / "whole", "cpu", echo=quiet)

    place = tmp_path / "parent"
    shutil.copytree(parent, place)
    settings = begun(place)
    with pytest.raises(Killed):
        quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=killed_by("step      5/"))
    shutil.rmtree(place)  # a run that has checkpoints no longer needs it
    run = quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=quiet)
    assert_same_run(whole, run)
    assert all(map(seen_by(run), trained_on(first) | trained_on(second)))
    assert final(run)["participants"]["before"] == final(whole)["participants"]["before"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_it_resumes_after_it_began_with_a_run_in_a_bucket(place, first, second, tmp_path):
    """Its own config.yaml named no place of initial weights when it was read again."""
    quick_pretrain(config(steps=1), first, place / "run", "cpu", echo=quiet)
    settings = begun(f"{place}/run", steps=2, ckpt_every_steps=1)
    (read, _) = initial_weights(settings, second)
    assert f"begin as in {place}/run/checkpoints/step-00000001.pt" in read.measured, "not as in the copy on this disk"
    (refused,) = initial_weights(begun(f"{place}/run/checkpoints/step-00000001.pt"), second)
    assert "name the run, which opens with its newest one" in refused.measured + refused.advice

    with pytest.raises(Killed):
        quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=killed_by("step      2/"))
    run = quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=quiet)
    assert all(map(seen_by(run), trained_on(first) | trained_on(second)))


def test_a_run_killed_before_its_first_checkpoint_does_not_begin_with_other_weights(parent, first, second, tmp_path):
    place = tmp_path / "parent"
    shutil.copytree(parent, place)

    settings = begun(place)
    with pytest.raises(Killed):
        quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=killed_by("step      1/"))
    quick_pretrain(config(steps=4, ckpt_every_steps=1), first, place, "cpu", echo=quiet)
    newest = checkpoint.newest(place)
    content = checkpoint.load(newest)
    content["model"]["target_encoder.norm.bias"] += 1
    checkpoint.write(newest.parent, 4, {name: content[name] for name in content if name not in ("format", "version")})
    with pytest.raises(
        CheckpointError,
        match=r"holds other weights now \(.*step-00000004.pt\) than this run began with; .* another --out with a copy of "
        r".*step-00000004.pt as model.init, since a run deletes old checkpoints",
    ):
        quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=quiet)
    shutil.rmtree(place)
    shutil.copytree(parent, place)
    quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=quiet)


def test_not_even_an_override_changes_what_a_run_began_with(parent, second, tmp_path):
    """Before the first checkpoint it dropped the parent's participants, or took weights that no check had seen."""

    for before, now in ((begun(parent), config()), (config(), begun(parent))):
        out = tmp_path / f"from {before.model.init is None}"
        with pytest.raises(Killed):
            quick_pretrain(before, second, out, "cpu", echo=killed_by("step      1/"))
        with pytest.raises(
            CheckpointError, match=r"other values of model\.init .*; restore them to resume \(.*\), or choose"
        ):
            quick_pretrain(now, second, out, "cpu", echo=quiet, override=True)


def test_a_rollback_to_the_beginning_finds_the_same_weights(parent, second, tmp_path):
    place = tmp_path / "parent"
    shutil.copytree(parent, place)
    learner = Learner(begun(place), second.preprocessing, start("cpu"))
    learner.begin()
    shutil.rmtree(place)
    quick_pretrain(config(steps=1), second, place, "cpu", echo=quiet)
    with pytest.raises(CheckpointError, match="holds other weights now"):
        learner.begin()


def test_a_rollback_that_misses_the_initial_weights_leaves_an_incident(parent, second, tmp_path):
    """The run's pages must say why it ended."""
    place = tmp_path / "parent"
    shutil.copytree(parent, place)

    def echo(text: str) -> None:
        if text.startswith("step      1/"):
            shutil.rmtree(place)

    settings = begun(place, health={"max_skips": 1})
    with infinite_gradient(1), pytest.raises(CheckpointError, match="parent: no such file; expected a run"):
        quick_pretrain(settings, second, tmp_path / "run", "cpu", echo=echo)
    (incident,) = rows(tmp_path / "run", "incident")
    assert incident["action"] == "stop" and "no such file" in incident["sentence"]


@pytest.mark.slow
def test_checkpoints_of_either_run_are_strangers_in_the_other(parent, second, tmp_path):
    here = tmp_path / "parent"
    shutil.copytree(parent, here)
    run = quick_pretrain(begun(here, steps=6), second, tmp_path / "run", "cpu", echo=quiet)
    for source, target in ((here, run), (run, here)):
        copy = tmp_path / f"copy-{target.name}"
        shutil.copytree(target, copy)
        for path in (source / "checkpoints").glob("*.pt"):
            shutil.copy(path, copy / "checkpoints" / path.name)
        with pytest.raises(CheckpointError, match="a checkpoint of another run"):
            RunFolder(copy, PRETRAINING).newest_whole(quiet)


# ---- before step 0 ---------------------------------------------------------------------------------------------------


def test_F16_test_participants_whom_the_weights_have_seen_stop_the_run(parent, first, tmp_path):
    small_store(tmp_path / "store", splits=SPLITS[::-1])
    drawn_again = Store.open(tmp_path / "store")
    overlap = trained_on(first) & {row.participant for row in drawn_again.rows if row.split == "test"}
    assert overlap
    _, check = initial_weights(begun(parent), drawn_again)
    assert check.status == "FAIL" and check.measured.startswith(f"{len(overlap)} of 2 test participants")
    assert "--splits-of OLD" in check.advice
    with pytest.raises(Exception, match="were seen by"):
        pretrain(begun(parent, steps=1), drawn_again, tmp_path / "run", "cpu", echo=quiet)
    assert not (tmp_path / "run").exists()
    assert [check.status for check in initial_weights(begun(parent), first)] == ["PASS", "PASS"]


def test_volumes_of_another_meaning_are_noticed(parent):
    size = small_preprocessing()
    larger = size.model_copy(update={"image_size": (8, 64, 64)})
    wider = size.model_copy(update={"target_spacing": (0.7, 0.06, 0.18)})
    for preprocessing, said in ((larger, []), (wider, ["WARN"])):
        found = initial_weights(begun(parent), prepared_as(preprocessing))
        assert [check.status for check in found if check.name == "preparation"] == said
    assert "target_spacing is" in found[-1].measured


def test_what_cannot_be_begun_with_is_refused_in_one_line(parent, first, tmp_path):
    exported = export(parent, tmp_path / "exported", echo=quiet)
    learned = quick_pretrain(
        config(steps=1, model=config().model.model_dump() | {"positions": "learned"}), first, tmp_path / "learned", "cpu",
        echo=quiet,
    )  # fmt: skip
    wide = prepared_as(first.preprocessing.model_copy(update={"image_size": (8, 64, 64)}))
    (tmp_path / "empty").mkdir()
    damaged = tmp_path / "step-00000004.pt"
    damaged.write_bytes(checkpoint.newest(parent).read_bytes()[:9000])
    (tmp_path / "note.txt").write_text("hello")
    refused = [
        (exported / "model.safetensors", first, {}, f"one file of an export; name its folder, {exported}"),
        (tmp_path / "absent", first, {}, "no such file; expected a run, a checkpoint, an export"),
        (tmp_path / "absent", first, {"positions": "learned"}, "no such file; expected a run, a checkpoint, an export"),
        (tmp_path / "empty", first, {}, "no checkpoint found"),
        (tmp_path / "note.txt", first, {}, "damaged or not a .pt file"),
        (damaged, first, {}, "damaged or not a .pt file"),
        (parent, first, {"width": 96}, r"set model\.width=48"),
        (parent, first, {"depth": 1}, r"set model\.depth=2"),
        (learned, wide, {"positions": "learned"}, r"position: expected \[1, 256, 48\], got \[1, 128, 48\]: learned"),
        ("s3://bucket-that-is-not-there/run", first, {}, "bucket-that-is-not-there"),
    ]
    for init, store, model, said in refused:
        (check,) = initial_weights(begun(init, model=model), store)
        assert check.status == "FAIL", init
        assert "\n" not in check.measured + check.advice
        assert re.search(said, f"{check.measured}; {check.advice}"), f"{check.measured}; {check.advice}"


# ---- what else reads a run -------------------------------------------------------------------------------------------


def test_F16_trust_knows_the_scanners_of_all_runs_behind_the_weights(first, second, tmp_path):
    def on(scanner: str | None, store: Store, out: str, init: Path | None = None) -> Path:
        data = config().data.model_dump() | ({"scanners": [scanner]} if scanner else {})
        settings = begun(init, steps=1, data=data) if init else config(steps=1, data=data)
        return quick_pretrain(settings, store, tmp_path / out, "cpu", echo=quiet)

    spectralis = on("heidelberg_spectralis", first, "spectralis")
    both = on("topcon_triton", second, "both", spectralis)
    assert _pretraining(spectralis, first)["scanners"] == ("heidelberg_spectralis",)
    assert _pretraining(both, first)["scanners"] == ("heidelberg_spectralis", "topcon_triton")
    unknown = on("topcon_triton", second, "unknown", export(spectralis, tmp_path / "exported", echo=quiet))
    with pytest.raises(EvaluationError, match="does not record the scanners"):
        _pretraining(unknown, first)


@pytest.mark.slow
@pytest.mark.parametrize("exported", [False, True])
def test_a_fine_tuning_notices_that_another_run_is_at_its_encoders_place(parent, first, second, tmp_path, exported):
    """Going on from a checkpoint, it would forget whom only the former had seen."""
    child = quick_pretrain(begun(parent, steps=1), first, tmp_path / "child", "cpu", echo=quiet)
    place = tmp_path / "place"

    def put(run: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        if exported:
            export(run, place, echo=quiet)
        else:
            shutil.copytree(run, place)

    edit_rows(second.path, lambda row: {"participant_labels": {"study_group": "ab"[row.index % 2]}})
    settings = FinetuneConfig(
        encoder=str(place), store=str(second.path), target="scanner", epochs=2, batch_size=4, lr_encoder=1e-4
    )

    put(child)
    with pytest.raises(Killed):
        finetune(settings, tmp_path / "tuned", echo=killed_by("epoch"))
    put(parent)
    with pytest.raises(CheckpointError, match="is not the one that this run began with"):
        finetune(settings, tmp_path / "tuned", echo=quiet)
