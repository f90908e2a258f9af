"""The probe that chooses checkpoints: it sees what is there, it never sees a test participant, and training does not
feel it."""

import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cosine

from octfm.errors import ConfigError, Preempted
from octfm.models.pooling import pooled
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import online_probe as probe
from octfm.pretraining.monitors.measure import tissue_vectors
from octfm.pretraining.monitors.online_probe import Cases, OnlineProbeConfig, find_cases
from octfm.report.words import checkpoint_advice
from octfm.run import checkpoint, checkpoint_writer
from octfm.run.checkpoint_writer import best_step
from octfm.run.tracking import read_metrics
from octfm.store.selection import select
from octfm.store.store import Store
from support.examples import examples
from support.small_store import edit_rows, prepared_eye, small_preprocessing
from support.tiny_runs import config, final, interrupted_after, quick_pretrain, quiet, rows


@pytest.fixture(scope="module")
def labels(store, tmp_path_factory):
    """Depth of the band: a property of the image, and one class of two made from it."""
    path = tmp_path_factory.mktemp("labels") / "labels.tsv"
    lines = ["participant_id\tlaterality\tdepth\tside"]
    for row in store.rows:
        depth = float(prepared_eye(row.index, small_preprocessing()).band[0].mean())
        lines.append(f"{row.participant}\t{row.laterality}\t{depth:.3f}\t{'deep' if depth > 17 else 'shallow'}")
    path.write_text("\n".join(lines) + "\n")
    return path


def cases_of(store, **settings):
    return find_cases(OnlineProbeConfig(**settings), store, select(store, "train"), select(store, "val"))


def test_labels_join_by_id_and_kinds_are_told_apart(store, labels):
    number = cases_of(store, target="depth", labels=str(labels))
    assert number.classes == () and number.metric == "r2" and len(number.train) == 16 and len(number.held_out) == 4
    expected = [round(float(prepared_eye(int(row), small_preprocessing()).band[0].mean()), 3) for row in number.train]
    np.testing.assert_allclose(number.train_label, expected, atol=1e-3)
    sided = cases_of(store, target="side", labels=str(labels))
    assert sided.classes == ("deep", "shallow") and sided.metric == "balanced_accuracy" and sided.chance == 0.5


def test_1_and_1_point_0_are_one_class(store, tmp_path):
    """As in octfm probe: half of the table may have been through a spreadsheet with an empty cell."""
    path, spellings = tmp_path / "labels.csv", ("0", "1.0", "0.0", "1")
    eyes = [f"{row.participant},{row.laterality},{spellings[row.index % 4]}" for row in store.rows]
    path.write_text("\n".join(["participant_id,laterality,grade", *eyes]))
    found = cases_of(store, target="grade", labels=str(path))
    assert found.classes == ("0", "1") and found.chance == 0.5
    np.testing.assert_array_equal(found.train_label, found.train % 2)
    np.testing.assert_array_equal(found.held_out_label, found.held_out % 2)


def test_the_penalty_is_chosen_without_all_scans_of_a_person_whose_id_has_two_spellings(store, labels, tmp_path):
    """Left in by one spelling, the other eye would make too weak a penalty seem best."""
    folder = shutil.copytree(store.path, tmp_path / "spelt")
    edit_rows(folder, lambda row: {"participant": row.participant.lower()} if row.laterality == "L" else {})
    member = cases_of(Store.open(folder), target="depth", labels=str(labels)).train_participant
    as_before = cases_of(store, target="depth", labels=str(labels)).train_participant
    assert np.array_equal(*(np.unique(people, return_inverse=True)[1] for people in (member, as_before)))


def test_no_target_no_probe(store):
    assert cases_of(store) is None


def test_F12_a_test_participant_never_chooses_a_checkpoint(store, labels):
    test_rows = select(store, "test")
    for train, held_out in ((test_rows, select(store, "val")), (select(store, "train"), test_rows)):
        with pytest.raises(ConfigError, match=r"of split test, expected (train|val): that would leak"):
            find_cases(OnlineProbeConfig(target="depth", labels=str(labels)), store, train, held_out)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"target": "nothing"}, r"0 training and 0 validation volumes .* set probe\.labels, or choose a label of the store: study_group"),
     ({"target": "study_group"}, "every training volume has the label healthy")],
)  # fmt: skip
def test_a_probe_that_cannot_be_made_is_named(store, settings, message):
    with pytest.raises(ConfigError, match=message):
        cases_of(store, **settings)


def test_a_probe_that_cannot_be_made_is_a_row_of_the_doctor(store):
    from octfm.pretraining.preflight.data import probed

    rows = select(store, "train"), select(store, "val")
    (found,) = probed(config(probe={"target": "study_group"}), store, *rows)
    assert found.status == "FAIL" and "choose a target with at least two labels" in found.advice
    assert probed(config(), store, *rows) == []


def made_up(kind, informative, n=80, width=24, seed=0):
    """Vectors with or without the label in one direction of them."""
    rng = np.random.default_rng(seed)
    x, x_new = rng.normal(size=(n, width)), rng.normal(size=(n, width))
    hidden, hidden_new = rng.normal(size=n), rng.normal(size=n)
    if informative:
        x[:, 3], x_new[:, 3] = 2 * hidden, 2 * hidden_new
    if kind == "number":
        y, y_new, classes = hidden, hidden_new, ()
    else:
        cut = (-1.0, 0.5)
        y, y_new, classes = np.digitize(hidden, cut), np.digitize(hidden_new, cut), ("a", "b", "c")
    return Cases("y", np.arange(n), np.arange(n), y, y_new, classes, np.arange(n)), x, x_new


@pytest.mark.parametrize(("kind", "good", "chance"), [("number", 0.9, 0.0), ("classes", 0.75, 1 / 3)])
def test_readouts_find_what_is_there_and_nothing_else(kind, good, chance):
    cases, x, x_new = made_up(kind, True)
    assert probe._score(cases, probe._ridge(cases, x, x_new)) > good
    assert probe._score(cases, probe._neighbours(cases, x, x_new)) > chance + 0.05
    chances = [probe._score(c, probe._ridge(c, a, b)) for c, a, b in (made_up(kind, False, seed=s) for s in range(5))]
    assert abs(np.mean(chances) - chance) < 0.12


@pytest.mark.parametrize("kind", ["number", "classes"])
def test_scores_are_the_textbooks_for_vectors_of_all_lengths_that_lie_elsewhere_in_validation(kind):
    rng = np.random.default_rng(4)
    cases, x, x_new = made_up(kind, True, seed=2)
    x, x_new = (v * rng.uniform(0.2, 5, (len(v), 1)) * np.geomspace(0.1, 30, 24) + 7 for v in (x, x_new))
    x_new[:, :5] += 2
    if kind == "number":
        cases = replace(cases, train_label=cases.train_label + 100, held_out_label=cases.held_out_label + 103)
    y, y_new = cases.train_label, cases.held_out_label
    row = probe._judge(cases, x, x_new)
    z, z_new = (x - x.mean(0)) / x.std(0), (x_new - x.mean(0)) / x.std(0)
    nearest = [sorted(range(len(x)), key=lambda n: cosine(new, z[n]))[: probe.NEIGHBOURS] for new in z_new]
    linear = probe._ridge(cases, z, z_new)
    if kind == "number":
        answers = linear[:, 0], np.array([y[own].mean() for own in nearest])
        expected = [1 - np.mean((y_new - answer) ** 2) / np.var(y_new) for answer in answers]
    else:
        votes = [[(y[own] == k).sum() / (y == k).sum() for k in range(3)] for own in nearest]
        answers = linear.argmax(1), np.argmax(votes, axis=1)
        expected = [np.mean([(answer[y_new == k] == k).mean() for k in range(3)]) for answer in answers]
    assert [row["score"], row["knn"]] == pytest.approx(expected, abs=1e-9)
    assert (row["metric"], row["chance"]) == (("r2", 0) if kind == "number" else ("balanced_accuracy", 1 / 3))


def test_a_class_without_training_volumes_is_no_class_and_its_volumes_are_not_scored(store, tmp_path):
    val = select(store, "val")
    people = {row.participant: row.split for row in store.rows}
    only = store.rows[val[0]].participant
    label = {person: "c" if person == only else "ab"[n % 2] for n, person in enumerate(sorted(people))}
    table = tmp_path / "labels.tsv"
    table.write_text("participant_id\tletter\n" + "".join(f"{person}\t{own}\n" for person, own in label.items()))
    found = cases_of(store, target="letter", labels=str(table))
    assert found is not None and found.classes == ("a", "b") and found.chance == 0.5
    kept = [row for row in val if store.rows[row].participant != only]
    assert 0 < len(kept) < len(val) and found.held_out.tolist() == kept
    for chosen, numbers in ((found.train, found.train_label), (found.held_out, found.held_out_label)):
        assert [found.classes[n] for n in numbers] == [label[store.rows[row].participant] for row in chosen]


@pytest.mark.parametrize(("different", "classes"), [(10, 10), (11, 0)])
def test_up_to_ten_different_numbers_are_grades(store, tmp_path, different, classes):
    people = sorted(
        {row.participant for row in store.rows if row.split != "test"},
        key=lambda person: ([row.split for row in store.rows if row.participant == person], person),
    )
    table = tmp_path / "labels.tsv"
    rows = [f"{person}\t{eye}\t{(2 * n + (eye == 'L')) % different}" for n, person in enumerate(people) for eye in "RL"]
    table.write_text("\n".join(["participant_id\tlaterality\tgrade", *rows]))
    found = cases_of(store, target="grade", labels=str(table))
    assert (
        found is not None
        and len(found.classes) == classes
        and found.metric == ("balanced_accuracy" if classes else "r2")
    )


def test_ridge_equals_the_textbook_form():
    cases, x, x_new = made_up("number", True, n=30, width=5)
    centred, y = x - x.mean(0), cases.train_label
    answers = []
    for penalty in probe.PENALTIES:
        fitted = np.linalg.solve(centred.T @ centred + penalty * np.eye(5), centred.T @ (y - y.mean()))
        answers.append((x_new - x.mean(0)) @ fitted + y.mean())
    found = probe._ridge(cases, x, x_new)[:, 0]
    assert min(np.abs(found - answer).max() for answer in answers) < 1e-9


@settings(max_examples=examples(20))
@given(st.sampled_from(["number", "classes"]), st.integers(0, 1000), st.integers(2, 40))
def test_the_penalty_is_the_one_that_is_best_for_participants_left_out(kind, seed, people):
    """As refitting without each participant finds it, all other things equal."""
    cases, x, x_new = made_up(kind, True, n=40, width=6, seed=seed)
    cases = replace(cases, train_participant=np.random.default_rng(seed).integers(0, people, 40))
    y = np.eye(3)[cases.train_label] if kind == "classes" else cases.train_label[:, None]
    weight = 1 / np.bincount(cases.train_label)[cases.train_label] if kind == "classes" else np.ones(40)
    weight = weight / weight.mean()

    def fitted(kept, penalty, new):
        w = weight[kept, None]
        centre_x, centre_y = np.average(x[kept], 0, w[:, 0]), np.average(y[kept], 0, w[:, 0])
        a = x[kept] - centre_x
        slope = np.linalg.solve(a.T @ (w * a) + penalty * np.eye(6), a.T @ (w * (y[kept] - centre_y)))
        return (new - centre_x) @ slope + centre_y

    def error(penalty):
        own = [cases.train_participant == p for p in np.unique(cases.train_participant)]
        return sum((weight[g, None] * (y[g] - fitted(~g, penalty, x[g])) ** 2).sum() for g in own)

    hypothesis.assume(len(np.unique(cases.train_participant)) > 1)
    expected = fitted(np.ones(40, bool), min(probe.PENALTIES, key=error), x_new)
    np.testing.assert_allclose(probe._ridge(cases, x, x_new), expected, atol=1e-6)


def test_more_scans_of_the_same_people_do_not_loosen_the_penalty():
    """A number of each of 60 participants, four scans of each, vectors wider than there are participants."""
    rng = np.random.default_rng(0)

    def scanned():
        number = rng.normal(size=60)
        vectors = rng.normal(size=(60, 128)) + 0.6 * number[:, None] * (np.arange(128) < 5)
        return np.repeat(vectors, 4, 0) + 0.1 * rng.normal(size=(240, 128)), np.repeat(number, 4)

    scores = []
    for _ in range(5):
        (x, y), (x_new, y_new) = scanned(), scanned()
        rows = np.arange(240)
        cases = Cases("y", rows, rows, y, y_new, (), np.repeat(np.arange(60), 4))
        alone = replace(cases, train_participant=rows)
        scores.append([probe._score(c, probe._ridge(c, x, x_new)) for c in (cases, alone)])
    assert np.mean(scores, 0)[0] > np.mean(scores, 0)[1] + 0.03


def test_a_single_participant_still_gives_a_prediction():
    cases, x, x_new = made_up("classes", True, n=12, width=4)
    assert np.isfinite(probe._ridge(replace(cases, train_participant=np.zeros(12)), x, x_new)).all()


def test_vectors_are_read_from_the_tokens_of_training(store, tmp_path):
    """A fixed number per volume, so that a run never compiles anew for its probe; `octfm embed` reads all tissue."""
    from octfm.encoder.encoder import load_encoder

    run = quick_pretrain(config(steps=2), store, tmp_path / "run", echo=quiet)
    encoder = load_encoder(run)
    chosen = select(store, "val")
    learner = Learner(config(), store.preprocessing, encoder.runtime)
    found = tissue_vectors(learner, encoder.network, store, chosen)
    tokens, tissue = (torch.from_numpy(part) for part in encoder.tissue_tokens(store.read(chosen)))
    np.testing.assert_allclose(found, pooled(tokens, tissue, "mean").numpy(), rtol=1e-5, atol=1e-6)


def scored(monkeypatch, *scores):
    """Probes find these scores, one after the other."""
    left, pending = iter(scores), []
    monkeypatch.setattr(probe, "_ridge", lambda cases, x, x_new: x_new)
    monkeypatch.setattr(probe, "_neighbours", lambda cases, x, x_new: x_new)

    def score(cases, predicted):
        if pending:
            return pending.pop()
        pending.append(0.0)  # the second reading of a row is the nearest neighbours'
        return next(left)

    monkeypatch.setattr(probe, "_score", score)


@pytest.fixture(scope="module")
def plain(store, tmp_path_factory):
    """The weights of a run that is not probed."""
    return final(quick_pretrain(config(), store, tmp_path_factory.mktemp("plain") / "run", echo=quiet))["model"]


@pytest.mark.parametrize("every", [3, 100], ids=["a checkpoint with every probe", "checkpoints elsewhere"])
def test_probing_writes_rows_keeps_the_best_and_leaves_training_unchanged(
    store, labels, plain, tmp_path, monkeypatch, every
):
    scored(monkeypatch, 0.1, 0.6, 0.3)
    settings = config(
        keep_checkpoints=1, ckpt_every_steps=every, probe={"target": "depth", "labels": str(labels), "every_steps": 3}
    )
    run = quick_pretrain(settings, store, tmp_path / "probed", echo=quiet)
    found = rows(run, "probe")
    assert [(row["step"], row["score"]) for row in found] == [(2, 0.1), (5, 0.6), (7, 0.3)]
    assert found[0]["metric"] == "r2" and found[0]["train_volumes"] == 16
    assert best_step(run / "checkpoints") == 6
    assert sorted(p.name for p in (run / "checkpoints").glob("*.pt")) == ["step-00000006.pt", "step-00000008.pt"]
    assert all(torch.equal(a, b) for a, b in zip(final(run)["model"].values(), plain.values(), strict=True))


def test_F12_whoever_chose_a_checkpoint_is_no_test_participant_of_it(store, labels, tmp_path):
    """Folds are made of participants that pretraining has not seen: of validation and test, here."""
    from octfm.encoder.encoder import seen_by

    probed = config(steps=2, probe={"target": "depth", "labels": str(labels)})
    for chosen, chose in ((config(steps=2), False), (probed, True)):
        run = quick_pretrain(chosen, store, tmp_path / f"run-{chose}", echo=quiet)
        known = seen_by(run)
        seen = {s: {known(store.rows[r].participant) for r in select(store, s)} for s in ("train", "val", "test")}
        assert seen == {"train": {True}, "val": {chose}, "test": {False}}
        assert final(run)["participants"]["trained_on"] == len(
            {store.rows[r].participant for r in select(store, "train")}
        )


@pytest.mark.parametrize(
    "change",
    [
        "corrected labels",
        *(pytest.param(change, marks=pytest.mark.slow) for change in ("metrics.jsonl deleted", "rows of 0.1")),
    ],
)
def test_a_score_that_can_be_compared_with_no_other_is_the_best(store, labels, tmp_path, monkeypatch, change):
    """Else a state that mistaken labels, or another rule for the penalty, found good would remain the best one."""
    scored(monkeypatch, 0.9, 0.5, 0.3)
    table = Path(shutil.copy(labels, tmp_path / "labels.tsv"))
    settings = config(keep_checkpoints=1, probe={"target": "depth", "labels": str(table)})
    with monkeypatch.context() as patch, pytest.raises(Preempted):
        interrupted_after(4, patch)
        quick_pretrain(settings, store, tmp_path / "run", echo=quiet)
    assert best_step(tmp_path / "run" / "checkpoints") == 3
    metrics = tmp_path / "run" / "metrics.jsonl"
    if lost := change == "metrics.jsonl deleted":
        metrics.unlink()
    elif change == "rows of 0.1":
        kept = [{name: value for name, value in row.items() if name != "cases"} for row in read_metrics(metrics)]
        metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    else:
        first, *others = table.read_text().splitlines()
        table.write_text("\n".join([first, others[0].replace(".", "1."), *others[1:]]) + "\n")
    said: list[str] = []
    run = quick_pretrain(settings, store, tmp_path / "run", echo=said.append)
    remark = "has no such score of the best checkpoint so far, after step 3; this one counts as the best now"
    assert sum(line.endswith(remark) for line in said) == 1
    assert [row["score"] for row in rows(run, "probe")] == [0.9, 0.5, 0.3][lost:]
    assert best_step(run / "checkpoints") == 6
    assert "step-00000006.pt" in checkpoint_advice(list(read_metrics(run / "metrics.jsonl")))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full disk", "kill"])
def test_a_best_state_whose_checkpoint_was_lost_does_not_hide_the_best_one_that_is_there(
    store, labels, tmp_path, monkeypatch, how
):
    """On a full disk, or by a kill before the checkpoint that was written had been named."""
    scored(monkeypatch, 0.1, 0.9, 0.5, 0.3)
    write, name = checkpoint.write, checkpoint_writer.keep_best

    def refused(folder, step, content):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(folder, step, content)

    if how == "full disk":
        monkeypatch.setattr(checkpoint, "write", refused)
    else:
        monkeypatch.setattr(checkpoint_writer, "keep_best", lambda folder, step: step == 4 or name(folder, step))
    settings = config(
        keep_checkpoints=1, ckpt_every_steps=100, probe={"target": "depth", "labels": str(labels), "every_steps": 2}
    )
    run = quick_pretrain(settings, store, tmp_path / "run", echo=quiet)
    assert [row["score"] for row in rows(run, "probe")] == [0.1, 0.9, 0.5, 0.3]
    assert best_step(run / "checkpoints") == 6
    assert sorted(p.name for p in (run / "checkpoints").glob("*.pt")) == ["step-00000006.pt", "step-00000008.pt"]
