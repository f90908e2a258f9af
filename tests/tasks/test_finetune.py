"""Fine-tuning learns what is there, resumes bit for bit, never sees a test participant, and the leaderboard judges
all alike."""

import csv
import errno
import io
import json
import os
import shutil
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.special import softmax

from octfm.config import load
from octfm.encoder.embeddings import of_store
from octfm.encoder.encoder import load_encoder
from octfm.encoder.tokens import token_features
from octfm.encoder.tuned import load_tuned
from octfm.errors import CheckpointError, ConfigError, EvaluationError, OctfmError
from octfm.evaluation.arms import covariates
from octfm.evaluation.cases import Cases, Target
from octfm.evaluation.scoring import Predictions
from octfm.io.parquet import from_parquet
from octfm.models.heads import CrossAttentionPool, MeanPool, TaskHead, add_low_rank
from octfm.report.leaderboard import write_leaderboard
from octfm.report.sources import gather
from octfm.report.watch import watch
from octfm.run import checkpoint
from octfm.run.runtime import Runtime
from octfm.run.tracking import read_metrics
from octfm.store.selection import to_evaluate
from octfm.store.store import Store
from octfm.tasks import finetune as module
from octfm.tasks.finetune import find_task, finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.predictions import read_predictions, write_predictions
from octfm.trust.leaderboard import _tuned, leaderboard, to_csv, to_markdown
from octfm.trust.report import trust
from support.command_line import invoke
from support.finetune_runs import settings
from support.small_store import GRADES, darkened, edit_rows, small_store
from support.tiny_runs import Killed, config, killed_at, killed_by, quick_pretrain, quiet

MANY = ("train",) * 20 + ("val",) * 4 + ("test",) * 36


def test_the_pages_of_pretraining_name_the_kind_of_another_run(tmp_path):
    (tmp_path / "run.json").write_text('{"format": "octfm-run", "version": 1, "kind": "finetune"}')
    for show in (partial(watch, once=True), gather):
        with pytest.raises(
            EvaluationError, match=r"holds a run of octfm finetune, expected one of octfm pretrain; .*board"
        ):
            show(tmp_path)


def result_of(out, metric):
    return next(r for r in json.loads((out / "finetune.json").read_text())["results"] if r["metric"] == metric)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr_encoder": 0, "epochs": 20},
        pytest.param({"lr_encoder": 0, "pool": "attention", "epochs": 20}, marks=pytest.mark.slow),
        {},
        {"lora_rank": 2, "lr_encoder": 3e-3},
        pytest.param({"precision": "bf16"}, marks=pytest.mark.slow),
    ],
    ids=["linear", "attentive", "finetune", "lora", "bf16"],
)
def test_every_way_learns_and_moves_only_what_it_may(run, store, labels, tmp_path, changes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded the caller's GPU"))
    config, random = settings(run, store, labels, **changes), torch.get_rng_state()
    out = finetune(config, tmp_path / "run", echo=quiet)
    load_tuned(out)
    assert torch.equal(random, torch.get_rng_state()), "the caller's random numbers go on as they were"
    losses = [row["loss"] for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
    assert np.mean(losses[-4:]) < 0.9 * np.mean(losses[:4])
    saved = checkpoint.load(checkpoint.newest(out))["model"]
    before = load_encoder(run).network.state_dict()
    encoder = {name.removeprefix("encoder."): tensor for name, tensor in saved.items() if name.startswith("encoder.")}
    if config.frozen:
        assert encoder == {}
    elif config.lora_rank:
        assert torch.equal(encoder["blocks.0.attn.qkv.layer.weight"], before["blocks.0.attn.qkv.weight"])
        assert torch.equal(encoder["patch_embed.weight"], before["patch_embed.weight"])
        assert encoder["blocks.0.attn.qkv.up"].abs().max() > 0
    else:
        moved = {
            n: float((encoder[n] - before[n]).abs().mean()) for n in ("blocks.0.mlp.0.weight", "blocks.1.mlp.0.weight")
        }
        assert 0 < moved["blocks.0.mlp.0.weight"] < moved["blocks.1.mlp.0.weight"], "layer-wise decay"
    facts = result_of(out, "balanced_accuracy")
    assert (facts["kind"], facts["n_test_participants"], facts["unit"]) == ("ordinal", 2, "participant")
    assert result_of(out, "kappa")["low"] is None, "two test participants are no interval"


def test_settings_that_are_none_are_refused(run, store, labels, tmp_path):
    with pytest.raises(TypeError, match="config: expected a FinetuneConfig, got str"):
        finetune("study_group_linear", tmp_path / "run", echo=quiet)
    with pytest.raises(ConfigError, match="unknown key epoch; did you mean epochs"):
        finetune(settings(run, store, labels).model_copy(update={"epoch": 1}), tmp_path / "run", echo=quiet)


def test_an_epoch_is_not_chosen_by_participants_of_one_class(run, store, tmp_path):
    """A constant answer would be right for all of them, and be taken for the best."""
    table = tmp_path / "labels.tsv"
    kinds = {row.participant: row.split for row in store.rows}
    lines = [
        f"{who}\t{'ill' if split == 'val' or i % 2 else 'healthy'}" for i, (who, split) in enumerate(kinds.items())
    ]
    table.write_text("participant_id\tdiagnosis\n" + "\n".join(lines) + "\n")
    config = settings(run, store, table, target="diagnosis", order=[], lr_encoder=0, epochs=1)
    task = find_task(config, store, lambda _: False, False)
    of = {name: set(task.cases.participant[getattr(task, name)]) for name in ("train", "validation", "test")}
    assert len(set(task.cases.label[task.validation])) == 2 and task.drawn
    assert not of["train"] & of["validation"] and of["train"] | of["validation"] == {
        who for who, split in kinds.items() if split != "test"
    }
    out = finetune(config, tmp_path / "run", echo=quiet)
    assert "drawn from train and val: val alone has too few labels" in module.summary(out)[0]


@pytest.mark.parametrize(("healthy", "ill"), [(6, 2), (11, 2), (12, 3)])
def test_participants_drawn_to_validate_on_have_two_classes(run, tmp_path, healthy, ill):
    """A rare class is in few of the fifths that one is drawn from."""
    splits = ("train",) * (healthy + ill) + ("test",) * 2
    store = small_store(tmp_path / "prepared", splits=splits)
    people = dict.fromkeys(row.participant for row in store.rows)
    cells = [*["healthy"] * healthy, *["ill"] * ill, "healthy", "ill"]
    lines = [f"{who}\t{cell}" for who, cell in zip(people, cells, strict=True)]
    (tmp_path / "labels.tsv").write_text("\n".join(["participant_id\tdiagnosis", *lines]))
    config = settings(run, store, tmp_path / "labels.tsv", target="diagnosis", order=[])
    task = find_task(config, store, lambda _: False, False)
    assert task.drawn and set(task.cases.label[task.validation]) == {0, 1} == set(task.cases.label[task.train])


def test_a_code_for_a_missing_number_is_named_before_hours_of_training(run, tmp_path):
    store = small_store(tmp_path / "prepared", splits=("train",) * 10 + ("val",) * 2 + ("test",) * 2)
    people = dict.fromkeys(row.participant for row in store.rows)
    cells = [f"{who}\t{999 if i == 3 else 300 + 4 * i}" for i, who in enumerate(people)]
    (tmp_path / "labels.tsv").write_text("\n".join(["participant_id\tcst_um", *cells]))
    config = settings(run, store, tmp_path / "labels.tsv", target="cst_um", order=[], epochs=1)

    said = "unlike the others; if that stands for a missing value, leave those cells empty"
    with pytest.raises(Killed):
        finetune(config, tmp_path / "out", echo=killed_by(said))
    assert not (tmp_path / "out").exists()


def test_labels_that_cannot_be_learned_are_refused_with_the_class_and_the_counts(run, tmp_path):
    store = small_store(tmp_path / "prepared", splits=("train",) * 8 + ("val",) * 4 + ("test",) * 2)
    kinds = {row.participant: row.split for row in store.rows}

    def told(label):
        cells = [f"{who}\t{label(split, i)}" for i, (who, split) in enumerate(kinds.items())]
        (tmp_path / "labels.tsv").write_text("participant_id\tgrade\n" + "\n".join(cells) + "\n")
        config = settings(run, store, tmp_path / "labels.tsv", target="grade", order=[], lr_encoder=0)
        with pytest.raises(EvaluationError) as caught:
            find_task(config, store, lambda _: False, False)
        return str(caught.value), caught.value.public

    of_val, _ = told(lambda split, i: "große Drusen" if i in (8, 9) else ("a", "b")[i % 2])
    assert "no training participant outside the validation set has große Drusen; label more" in of_val
    one, public = told(lambda split, i: "b" if split == "test" else ("a", "b")[i % 2])
    assert "Of the classes of grade that can be learned (a, b), the test has only b, and two are needed; label" in one
    assert "fewer than two classes of grade" in public and "(a, b)" not in public
    few, _ = told(lambda split, i: "" if split == "test" else i * 1.5)
    assert "12 participants with grade to learn from and 0 to test, expected at least 6 and 2" in few


def test_the_encoder_stands_still_while_the_head_learns(run, store, labels, tmp_path):
    out = finetune(settings(run, store, labels, epochs=3, head_epochs=2), tmp_path / "run", echo=quiet)
    rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "train"]
    steps_per_epoch = 4
    assert all(row["lr_encoder"] == 0 for row in rows[: 2 * steps_per_epoch]) and all(
        row["lr_encoder"] > 0 for row in rows[2 * steps_per_epoch :]
    )
    assert all(row["lr_head"] > 0 for row in rows)


@pytest.mark.parametrize("frozen", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_resumed_run_equals_an_uninterrupted_one(run, store, labels, tmp_path, monkeypatch, frozen):
    changes = {"lr_encoder": 0} if frozen else {}
    whole = finetune(settings(run, store, labels, **changes), tmp_path / "whole", echo=quiet)
    killed_at(4, monkeypatch, module.FineTuning, "held_out_score")
    with pytest.raises(Killed):
        finetune(settings(run, store, labels, **changes), tmp_path / "halves", echo=quiet)
    if not frozen:  # as octfm 0.1 left it
        (tmp_path / "halves" / "run.json").unlink()
    halves = finetune(settings(run, store, labels, **changes), tmp_path / "halves", echo=quiet)
    a, b = (checkpoint.load(checkpoint.newest(path)) for path in (whole, halves))
    assert all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"]) and a["step"] == b["step"]
    untimed = [
        [{k: v for k, v in r.items() if k != "time"} for r in read_metrics(p / "metrics.jsonl")]
        for p in (whole, halves)
    ]
    assert untimed[0] == untimed[1]
    said = [read_predictions(p / "predictions.parquet").of_acquisition for p in (whole, halves)]
    assert all(np.array_equal(said[0][name][0], said[1][name][0]) for name in said[0])
    with pytest.raises(CheckpointError, match="other values of lr_head"):
        finetune(settings(run, store, labels, lr_head=0.5, **changes), tmp_path / "halves", echo=quiet)


def test_the_best_state_and_patience_survive_an_interruption(run, store, labels, tmp_path, monkeypatch):
    """Validation peaks in the second of seven epochs; the process dies in the fourth."""
    scores, calls = [0.5, 0.9, 0.6, Killed, 0.6, 0.6, 0.6, 0.6], []

    def scripted(*args):
        calls.append(1)
        if scores[len(calls) - 1] is Killed:
            raise Killed
        return scores[len(calls) - 1], 1.0

    monkeypatch.setattr(module.FineTuning, "held_out_score", scripted)
    config = settings(run, store, labels, lr_encoder=0, epochs=7, patience=4)
    with pytest.raises(Killed):
        finetune(config, tmp_path / "run", echo=quiet)
    out = finetune(config, tmp_path / "run", echo=quiet)
    assert json.loads((out / "finetune.json").read_text())["best_epoch"] == 2
    rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "validation"]
    assert len(rows) == 6, "four epochs without a better one"


def test_predictions_are_those_of_the_best_state_and_not_of_the_last(run, store, labels, tmp_path, monkeypatch):
    heads, predicts, predicted = [], module._predictions, []

    def weights(training):
        return [p.detach().clone() for p in training.model.head.parameters()]

    def scripted(training):
        heads.append(weights(training))
        return [0.5, 0.9, 0.6][len(heads) - 1], 1.0

    monkeypatch.setattr(module.FineTuning, "held_out_score", scripted)
    monkeypatch.setattr(module, "_predictions", lambda t: (predicted.append(weights(t)), predicts(t))[1])
    finetune(settings(run, store, labels, lr_encoder=0, epochs=3, patience=9), tmp_path / "run", echo=quiet)
    same = [all(torch.equal(a, b) for a, b in zip(predicted[0], head, strict=True)) for head in heads]
    assert same == [False, True, False]


def test_a_better_epoch_has_the_higher_score_then_the_smaller_loss():
    from_best = [(0.8, 0.4), (0.8, 0.5), (0.7, 0.1), (-2.0, 0.1), (np.nan, 0.3), (np.nan, 0.9)]
    assert sorted(from_best, key=lambda epoch: module._rank(*epoch), reverse=True) == from_best


@pytest.mark.parametrize("weighted", [True, False])
def test_classes_weigh_alike_however_rare_unless_that_is_switched_off(weighted):
    label = np.array([0, 2, 0, 0, 1, 0, 1, 2])  # the last two are validated on
    cases = SimpleNamespace(
        rows=np.array([9, 4, 1, 0, 7, 2, 5, 6]), label=label, classes=("a", "b", "c"), kind="multiclass",
        target=SimpleNamespace(name="grade"),
    )  # fmt: skip
    model = SimpleNamespace(config=SimpleNamespace(class_weights=weighted), runtime=Runtime(torch.device("cpu")))
    target = module._Target(SimpleNamespace(cases=cases, train=np.arange(6)), model)  # pyright: ignore[reportArgumentType]
    answers = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    weight = torch.tensor([6 / 4, 6 / 1, 6 / 1]) / 3 if weighted else None
    expected = torch.nn.functional.cross_entropy(answers, torch.from_numpy(label), weight, reduction="none").sum()
    torch.testing.assert_close(target.loss(answers, cases.rows), expected)
    np.testing.assert_allclose(np.exp(target.answer.log_prior), [4 / 6, 1 / 6, 1 / 6])


def test_validation_follows_every_epoch_whatever_the_batch(run, store, labels, tmp_path):
    """A batch that does not divide the training volumes, and one that is larger than all of them."""
    said = list[str]()
    config = settings(run, store, labels, lr_encoder=0, epochs=3, patience=9)
    rows = len(find_task(config, store, quiet, False).train)
    for batch_size in (rows * 3 // 4, 2 * rows):
        finetune(config.model_copy(update={"batch_size": batch_size}), tmp_path / f"{batch_size}", echo=said.append)
    assert [int(line.split()[1]) for line in said if line.startswith("epoch ")] == [1, 2, 3, 2, 3]


def test_training_stops_when_validation_participants_no_longer_gain(run, store, labels, tmp_path):
    out = finetune(
        settings(run, store, labels, lr_encoder=0, epochs=60, patience=2, lr_head=1e-9), tmp_path / "run", echo=quiet
    )
    rows = [row for row in read_metrics(out / "metrics.jsonl") if row["kind"] == "validation"]
    assert len(rows) < 60
    best = json.loads((out / "finetune.json").read_text())
    assert best["validation_score"] == max(row["score"] for row in rows) and best["validation_participants"] == 2


def test_F16_test_participants_are_never_trained_on_seen_ones_refused(run, store, labels, tmp_path):
    task = find_task(settings(run, store, labels), store, lambda _: False, False)
    people = [set(task.cases.participant[part]) for part in (task.train, task.validation, task.test)]
    assert not people[0] & people[1] and not people[0] & people[2] and not people[1] & people[2]
    with pytest.raises(EvaluationError, match="were in the encoder's pretraining"):
        find_task(settings(run, store, labels), store, lambda p: p == "P011", False)
    assert (
        find_task(settings(run, store, labels), store, lambda p: p == "P011", True).facts["seen_test_participants"] == 1
    )
    out = finetune(settings(run, store, labels, epochs=1, from_scratch=True), tmp_path / "scratch", echo=quiet)
    known = checkpoint.load(checkpoint.newest(out))["participants"]
    trained = set(checkpoint.participant_hashes(["P000", "P008"], known["key"]))
    assert trained <= set(known["hashes"]) and not set(checkpoint.participant_hashes(["P010"], known["key"])) & set(
        known["hashes"]
    )
    # Everybody may know the key of a published encoder: it must not be that of those whom it is fine-tuned on.
    assert known["key"] == json.loads((out / "run.json").read_text())["participant_key"] != "octfm-finetune"
    tuned = finetune(settings(run, store, labels, epochs=1), tmp_path / "tuned", echo=quiet)
    own, pretrained = checkpoint.parts_of(checkpoint.load(checkpoint.newest(tuned))["participants"])
    assert own["hashes"] == checkpoint.participant_hashes(sorted(people[0] | people[1]), own["key"])
    encoder = checkpoint.load(checkpoint.newest(run))["participants"]
    assert pretrained == {name: encoder[name] for name in ("key", "hashes")} and own["key"] != encoder["key"]
    with pytest.raises(
        EvaluationError, match="a run of octfm finetune or segment; octfm trust needs one of octfm pretr"
    ):
        trust(out, [store.path], tmp_path / "trust", labels=labels, targets=["grade"], echo=quiet)
    frame = pytest.importorskip("pandas").read_csv(labels, sep="\t")
    with pytest.raises(EvaluationError, match=r"labels: networks that are trained .* this is a DataFrame"):
        trust(run, [store.path], tmp_path / "trust", labels=frame, targets=["grade"], echo=quiet)
    assert not (tmp_path / "trust").exists(), "before anything is embedded"


def test_probabilities_take_a_participant_with_two_eyes_for_one(run, store, labels, tmp_path):
    """Only those of the first grade have both eyes."""
    left = [row.acquisition for row in store.rows if row.laterality == "L" and int(row.participant[1:]) % 3]
    (tmp_path / "exclude.txt").write_text("\n".join(left))
    config = settings(run, store, labels, lr_encoder=0, epochs=1, exclude=str(tmp_path / "exclude.txt"))
    task = find_task(config, to_evaluate(store, config.exclude), lambda _: False, False)
    out = finetune(config, tmp_path / "run", echo=quiet)
    people = {str(task.cases.participant[i]): int(task.cases.label[i]) for i in task.train}
    share = np.bincount([*people.values()], minlength=3) / len(people)
    found = read_predictions(out / "predictions.parquet")
    np.testing.assert_allclose(np.exp(found.facts["log_prior"]), share)
    for value, grade in found.of_acquisition.values():
        assert grade == pytest.approx(softmax(value) @ [0, 1, 2]), "the mean grade, not the likeliest"
    assert not np.allclose(np.exp(load_tuned(out).answer.log_prior), share)


def test_F15_a_store_prepared_otherwise_is_refused(run, labels, tmp_path, store):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(store.path / "rows.jsonl", other)
    header = json.loads((store.path / "store.json").read_text()) | {"fingerprint": "0" * len(store.fingerprint)}
    del header["digest"]
    (other / "store.json").write_text(json.dumps(header))
    with pytest.raises(EvaluationError, match="prepared with other settings"):
        finetune(settings(run, Store.open(other), labels), tmp_path / "run", echo=quiet)


def test_token_features_are_aligned_by_id_never_by_order(run, store, tmp_path):
    encoder = load_encoder(run)
    features = token_features(encoder, store, tmp_path, per_volume=500)
    names = [row.acquisition for row in store.rows]
    shuffled = np.random.default_rng(0).permutation(len(names))
    tokens, counts = features.take([names[i] for i in shuffled])
    pooled = (tokens * counts[..., None]).sum(1) / counts.sum(1)[:, None]
    own, tissue = encoder.tissue_tokens(store.read(shuffled))
    expected = (own * tissue[..., None]).sum(1) / tissue.sum(1)[:, None]
    np.testing.assert_allclose(pooled, expected, atol=5e-3)
    # The same weights and volumes in another order of rows: the same features, not computed again.
    record = next(tmp_path.glob("*.json"))
    before = record.stat().st_mtime_ns
    token_features(encoder, store, tmp_path, per_volume=500)
    assert record.stat().st_mtime_ns == before
    token_features(load_encoder(run, random_init=True), store, tmp_path, per_volume=500)
    assert len(list(tmp_path.glob("tokens-*.npy"))) == 2
    with pytest.raises(EvaluationError, match="set tokens_per_volume="):
        token_features(encoder, store, tmp_path, per_volume=400, max_gb=1e-6)


def test_predictions_come_back_to_the_rows_that_they_were_made_for(store, tmp_path):
    """In another order of tests, from a file that names acquisitions, of cases that are a part of a store."""
    rng, data = np.random.default_rng(0), of_store(store)
    rows = np.sort(rng.choice(len(store), 15, replace=False))
    label = rng.integers(0, 3, 15)
    cases = Cases(Target("grade", "grade", "acquisition"), rows, label, GRADES, data.participant[rows],
                  data.acquisition[rows], "acquisition", 0, ordered=True)  # fmt: skip
    said = Predictions(rng.permutation(15)[:9], rng.normal(size=(9, 3)), None, rng.normal(size=9))
    prior = np.log([0.5, 0.3, 0.2])
    write_predictions(tmp_path / "p.parquet", store, cases, prior, said, {}, 7, 2)
    table = read_predictions(tmp_path / "p.parquet")
    order = rng.permutation(9)
    again = table.for_cases(cases, data, said.rows[order])
    np.testing.assert_array_equal(again.value, said.value[order])
    np.testing.assert_array_equal(again.grade, said.grade[order])
    np.testing.assert_array_equal(again.log_prior, np.tile(prior, (9, 1)))
    for place, row in zip(said.rows, from_parquet(tmp_path / "p.parquet").to_pylist(), strict=True):
        own = store.rows[rows[place]]
        assert (row["acquisition"], row["participant"], row["scanner"]) == (
            own.acquisition,
            own.participant,
            own.scanner,
        )
        assert row["label"] == GRADES[label[place]] and row["predicted"] == GRADES[int(np.argmax(row["value"]))]
    with pytest.raises(EvaluationError, match="the order of fine-tuning and --order here must agree"):
        table.for_cases(replace(cases, classes=GRADES[::-1]), data, said.rows)


def test_few_token_features_are_drawn_from_all_tissue_and_kept_by_volume_and_number(run, store, tmp_path):
    encoder = load_encoder(run)
    rows = np.arange(len(store))
    own, tissue = encoder.tissue_tokens(store.read(rows))
    few, more = (token_features(encoder, store, tmp_path, per_volume=n) for n in (6, 9))
    places = np.zeros(tissue.shape[1], int)
    for features, count in ((few, 6), (more, 9)):
        tokens, counts = features.take([row.acquisition for row in store.rows])
        assert tokens.shape == (len(store), count, encoder.width) and counts.all()
        for i in rows:
            apart = np.abs(own[i][None] - tokens[i][:, None]).max(-1)
            nearest = apart.argmin(1)
            assert apart.min(1).max() < 5e-3 and tissue[i][nearest].all() and len({*nearest}) == count
            places[nearest] += 1
    assert (places[np.flatnonzero(tissue.any(0))[-len(places) // 3 :]] > 0).any(), "not the first ones"
    other = small_store(tmp_path / "other", splits=("train",) * 12)
    assert [row.acquisition for row in other.rows] == [row.acquisition for row in store.rows]
    again = token_features(encoder, other, tmp_path, per_volume=6)
    assert not np.allclose(again.tokens[2], few.tokens[2]), "of a store of other voxels"


def test_token_features_have_their_room_before_they_are_computed(run, store, tmp_path, monkeypatch):
    """A file that is mapped and grows on a full disk ends the process with SIGBUS."""

    def full(file, offset, size):
        assert size > 2 * len(store) * 500 * 8
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        EvaluationError, match=r"no room for token features of .* GB \(No space left.*tokens_per_volume"
    ):
        token_features(load_encoder(run), store, tmp_path, per_volume=500)
    assert not list(tmp_path.iterdir())


def test_pools_ignore_tokens_that_do_not_count_and_their_order():
    torch.manual_seed(0)
    tokens, counts = torch.randn(2, 6, 12), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    for pool in (MeanPool(), CrossAttentionPool(12, 2)):
        answer = pool(tokens, counts)
        spoilt = tokens.clone()
        spoilt[0, 4:] = 1e3
        torch.testing.assert_close(pool(spoilt, counts), answer)
        order = torch.tensor([3, 1, 0, 2, 4, 5])
        torch.testing.assert_close(pool(tokens[:, order], counts[:, order]), answer)
    size = sum(p.numel() for p in TaskHead(384, 6, 4, "attention").parameters())
    assert 0.27e6 < size < 0.33e6


def test_a_low_rank_update_begins_as_no_update(run, store):
    encoder = load_encoder(run)
    before = encoder.embed_arrays(store.read([0, 1]))
    add_low_rank(encoder.network, 4)
    np.testing.assert_allclose(encoder.embed_arrays(store.read([0, 1])), before, atol=1e-6)
    trained = [name for name, p in encoder.network.named_parameters() if p.requires_grad]
    assert trained and all(name.endswith((".up", ".down")) for name in trained)


def test_networks_from_scratch_that_see_other_numbers_of_tokens_are_of_two_recipes(run, store, labels, tmp_path):
    """Their weights begin alike, so that the leaderboard took one for the other or for a seed of it."""
    other = quick_pretrain(config(steps=1, masks={"budget": 32}), store, tmp_path / "other", "cpu", echo=quiet)
    recipes = []
    for encoder in (run, other):
        own = settings(encoder, store, labels, epochs=1, from_scratch=True)
        out = finetune(own, tmp_path / f"from_{encoder.name}", echo=quiet)
        recipes.append(read_predictions(out / "predictions.parquet").facts["recipe"])
    assert recipes[0] != recipes[1]


@pytest.fixture(scope="module")
def large(tmp_path_factory, run):
    """60 participants, more than half of them in the test: enough for intervals."""
    return small_store(tmp_path_factory.mktemp("large") / "prepared", darkened, MANY)


@pytest.fixture(scope="module")
def board(large, run, labels, tmp_path_factory):
    folder = tmp_path_factory.mktemp("board")
    table = folder / "labels.tsv"
    table.write_text(
        "participant_id\tgrade\tage\tclinical_site\n"
        + "".join(f"P{i:03d}\t{GRADES[i % 3]}\t{40 + i}\tsite {i % 3}\n" for i in range(60))
    )
    tuned = []
    for seed in (0, 1):
        # Machines with other disks: neither max_cache_gb nor the place of a file changes a number, and the order of a
        # store, prepared by several commands, changes one as a seed does.
        encoder = shutil.copytree(run, folder / f"run{seed}")
        labels = shutil.copyfile(table, folder / f"labels{seed}.tsv")
        store = small_store(folder / "backwards", darkened, MANY, backwards=True) if seed else large
        config = settings(encoder, store, labels, seed=seed, epochs=3, batch_size=8, max_cache_gb=16.0 + seed)
        tuned.append(finetune(config, folder / f"tuned{seed}", echo=quiet))
    orders = {"grade": GRADES}
    result = leaderboard(
        [run, *tuned], [large.path], "grade", folder / "out", labels=table, orders=orders, resamples=200, echo=quiet
    )
    return result, tuned, table, folder


@pytest.mark.slow
def test_the_leaderboard_judges_all_entries_on_the_same_participants(board):
    result, tuned, _, _ = board
    entries = {r["encoder"]: r for r in result["results"] if r["metric"] == "auroc"}
    assert set(entries) == {"run", "tuned0", "random_init", "histogram", "tissue_map", "covariates"}
    assert {r["n_test_participants"] for r in result["results"]} == {36}
    assert (entries["tuned0"]["what"], entries["run"]["what"], entries["covariates"]["what"]) == (
        "fine-tuned",
        "frozen",
        "baseline",
    )
    assert entries["covariates"]["estimate"] > 0.99, "each grade comes from a site of its own, says the label table"
    assert entries["tuned0"]["seeds"] == 2, "runs that differ in their seed and machine are one entry"
    # The worse the grade, the darker the image: a matter of image quality, not of the retina's shape.
    assert min(entries[name]["estimate"] for name in ("histogram", "covariates")) > 0.9
    assert entries["tissue_map"]["estimate"] < 0.75
    single = json.loads((tuned[0] / "finetune.json").read_text())["results"]
    both = [
        next(r["estimate"] for r in json.loads((t / "finetune.json").read_text())["results"] if r["metric"] == "auroc")
        for t in tuned
    ]
    assert entries["tuned0"]["estimate"] == pytest.approx(np.mean(both)) and single[0]["n_test_participants"] == 36
    planned = [c for c in result["comparisons"] if c["planned"]]
    assert {c["a"] for c in planned} == {"run"} and len(planned) == 10 and all(c["p_holm"] >= c["p"] for c in planned)


def test_the_leaderboard_draws_as_many_resamples_as_holm_needs(board, large, run, monkeypatch):
    """With fewer, no difference of a large leaderboard could be significant, however large."""
    _, tuned, table, folder = board
    monkeypatch.setattr("octfm.trust.leaderboard.RESAMPLES", 10)
    options = {"labels": table, "orders": {"grade": GRADES}, "echo": quiet}
    result = leaderboard([run, *tuned], [large.path], "grade", folder / "out", **options)
    assert result["settings"]["resamples"] == 50 * sum(c["planned"] for c in result["comparisons"]) == 500


def test_runs_of_a_recipe_are_paired_by_seed_in_whatever_order_they_are_given(board):
    _, tuned, _, _ = board
    for order in (tuned, tuned[::-1]):
        (group,) = _tuned(order)
        assert group.name == order[0].name and [saved.facts["seed"] for saved in group.runs] == [0, 1]


def test_the_leaderboard_is_written_as_csv_markdown_and_one_page(board, tmp_path):
    result, *_ = board
    rows = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert {(r["entry"], r["metric"]) for r in rows} == {(r["encoder"], r["metric"]) for r in result["results"]}
    reference = next(r for r in rows if r["entry"] == "run")
    assert reference["difference"] == "" and float(reference["low"]) <= float(reference["estimate"]) <= float(
        reference["high"]
    )
    shaky = [{**c, "verdict": "better", "p_holm": 0.2} if c["planned"] else c for c in result["comparisons"]]
    assert "better, not after Holm" in to_markdown({**result, "comparisons": shaky})
    odd = {
        **result,
        "results": [{**r, "encoder": r["encoder"].replace("run", "a|<b>![x](y) _c_d_")} for r in result["results"]],
    }
    assert "| a\\|&lt;b&gt;!\\[x\\](y) \\_c_d\\_ | frozen |" in to_markdown(odd)
    text = to_markdown(result)
    assert "| covariates | baseline |" in text and "36 test participants" in text
    assert "95 % intervals over participants. Guessing gives auroc 0.5, balanced_accuracy 0.333" in text
    near = [{**r, "estimate": 0.9996, "low": 0.99, "high": 1.0} for r in result["results"]]
    assert "| 0.9996 (0.9900 to 1.0000) |" in to_markdown({**result, "results": near}), "no perfect score"
    few = [{**r, "low": None, "high": None, "note": "No interval: only 2."} for r in result["results"]]
    text = to_markdown({**result, "results": few})
    assert "no intervals. Guessing" in text and text.count("No interval: only 2.") == 1 and "95 %" not in text
    typed = "octfm leaderboard /clinic/Meyer_Anna/run --store s3://meyer/prepared --target grade"
    sure = [{**c, "p": 0.0002, "p_holm": 0.0004} for c in result["comparisons"]]
    result = {**result, "commands": [typed], "comparisons": sure}
    assert "| < 0.001 | < 0.001 |" in to_markdown(result), "no p is 0"
    page = write_leaderboard(
        result, list(dict.fromkeys(r["encoder"] for r in result["results"])), tmp_path / "board.html"
    ).read_text()
    assert "&lt; 0.001" in page and "0.000<" not in page
    assert "<svg" in page and "quadratic kappa" in page and "http" not in page.replace("http-equiv", "")
    assert "octfm leaderboard" in page and "eyer" not in page, "folders are named after people"


def test_the_commands_write_what_they_say(board, run, large, tmp_path):

    _, tuned, table, _ = board
    words = [
        f"encoder={run}",
        f"store={large.path}",
        f"labels={table}",
        "target=grade",
        "order=[low, middle, high]",
        "epochs=1",
        "lr_encoder=0",
    ]
    done = invoke("finetune", "study_group_linear", *words, "--out", tmp_path / "linear")
    assert (
        done.exit_code == 0
        and "balanced_accuracy" in done.output
        and (tmp_path / "linear" / "predictions.parquet").is_file()
    ), done.output
    words = [
        str(tmp_path / "linear"),
        str(tuned[0]),
        "--store",
        str(large.path),
        "--labels",
        str(table),
        "--target",
        "grade",
    ]
    done = invoke("leaderboard", *words, "--order", "grade=low,middle,high", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert {p.suffix for p in (tmp_path / "out").glob("leaderboard.*")} == {".csv", ".md", ".html", ".json"}
    assert json.loads((tmp_path / "out" / "leaderboard.json").read_text())["reference"] == "linear"
    done = invoke("leaderboard", *words, "--order", "grade=low")
    assert isinstance(done.exception, OctfmError) and "three or more grades" in str(done.exception)


def store_of_other_rows(store, folder):
    """The same volumes with a rows.jsonl of its own."""
    folder.mkdir()
    for item in store.path.iterdir():
        if item.name != "rows.jsonl":
            (folder / item.name).symlink_to(item)
    shutil.copy(store.path / "rows.jsonl", folder)
    return folder


def test_the_leaderboard_refuses_predictions_of_voxels_that_the_store_no_longer_holds(board, large, tmp_path):
    """A scan that changed and was prepared again would be judged by what the model said of the former one."""
    _, tuned, table, _ = board
    again = store_of_other_rows(large, tmp_path / "again")
    edit_rows(again, lambda row: {"checksum": "0" * 16} if row.split == "test" and row.laterality == "L" else {})
    with pytest.raises(EvaluationError, match=r"predictions.parquet: .* prepared again since; fine-tune again"):
        leaderboard([tuned[0]], [again], "grade", tmp_path / "out", labels=table, echo=quiet)


def test_the_leaderboard_refuses_entries_that_have_seen_the_test(board, large):
    _, tuned, table, folder = board
    moved = store_of_other_rows(large, folder / "moved")
    edit_rows(moved, lambda row: {"split": "test"} if row.participant == "P003" else {})
    edit_rows(moved, lambda row: {"participant": "3"} if row.eye_id == "P003_L" else {})  # one person in two spellings
    with pytest.raises(EvaluationError, match="1 test participants were in its training"):
        leaderboard([tuned[0]], [moved], "grade", folder / "refused", labels=table, echo=quiet)


def test_the_leaderboard_refuses_two_entries_of_one_name(board, large, run, tmp_path):
    _, tuned, table, _ = board
    for entries, name in (([run, tuned[0]], run.name), ([tuned[0]], "histogram"), ([run, tuned[0]], "random_init")):
        renamed = tmp_path / str(len(list(tmp_path.iterdir()))) / name
        shutil.copytree(tuned[0], renamed)
        with pytest.raises(EvaluationError, match=f"differently named entries, got {name} more than once; give each"):
            leaderboard([*entries[:-1], renamed], [large.path], "grade", tmp_path / "out", labels=table, echo=quiet)


def test_a_fine_tuning_that_goes_on_is_not_judged_as_a_frozen_encoder(board, large, tmp_path):
    _, tuned, table, _ = board
    unfinished = shutil.copytree(tuned[0], tmp_path / "tuned")
    (unfinished / "predictions.parquet").unlink()
    with pytest.raises(EvaluationError, match="has not finished"):
        leaderboard([unfinished], [large.path], "grade", tmp_path / "out", labels=table, echo=quiet)


def test_covariates_name_the_column_of_every_channel(large):
    data = replace(
        of_store(large),
        participant_labels=tuple({"age": str(i), "clinical_site": "AB"[i % 2]} for i in range(len(large))),
    )
    found = covariates(data)
    assert found.columns == ("scanner", "scanner", "age", "clinical_site", "clinical_site")
    assert found.vectors.shape == (len(large), 5)


def test_packaged_recipes_are_the_prototypes_task():
    linear, tuned, attentive = (
        load(FinetuneConfig, f"study_group_{name}") for name in ("linear", "finetune", "attentive")
    )
    assert (linear.target, linear.frozen, linear.lr_head) == ("study_group", True, 1e-3)
    assert (tuned.lr_encoder, tuned.class_weights, attentive.pool) == (3e-5, True, "attention")
