"""An exported model is the model: same vectors, same answers, same memory of whom it has seen; whole, or not there."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import octfm
from octfm.catalog.participants.safe_values import is_known_name
from octfm.config import load
from octfm.encoder import onnx_graph
from octfm.encoder.embed_files import embed_files
from octfm.encoder.encoder import assemble, load_encoder, opened, participants_in, preprocessing_of, seen_by
from octfm.encoder.export import export
from octfm.encoder.tuned import load_tuned
from octfm.errors import CheckpointError, ConfigError, EvaluationError
from octfm.models.heads import add_low_rank, merged
from octfm.models.pooling import pooled
from octfm.pretraining.learner import build_objective
from octfm.pretraining.settings import load_config
from octfm.run import checkpoint, checkpoint_files
from octfm.run.runtime import start
from octfm.tasks.embed_run import embed_all
from octfm.tasks.finetune import finetune, summary
from octfm.tasks.predictions import read_predictions
from octfm.volume.preprocessing import Preprocessing
from octfm.weights import exported
from support.command_line import invoke
from support.finetune_runs import settings as finetune_settings
from support.small_store import GRADES, darkened, small_store
from support.tiny_runs import quiet
from support.volumes import eye


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "prepared", darkened)


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    return export(run, tmp_path_factory.mktemp("exports") / "encoder", echo=quiet)


def tune(run, store, out, labels, allow_seen=False, **changes):
    brief = {"epochs": 2, "per_device_batch_size": 4, "tokens_per_volume": 24}
    return finetune(
        finetune_settings(run, store, labels, **brief | changes), out, "cpu", allow_seen=allow_seen, echo=quiet
    )


@pytest.fixture(scope="module")
def labels(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "labels.tsv"
    path.write_text(
        "participant_id\tgrade\tage\n" + "".join(f"P{i:03d}\t{GRADES[i % 3]}\t{50 + 3 * i}\n" for i in range(12))
    )
    return path


def test_the_same_vectors_to_the_last_bit(run, folder):
    original, loaded = load_encoder(run), load_encoder(folder)
    assert loaded.key == original.key and loaded.preprocessing == original.preprocessing
    volume = eye("L")
    np.testing.assert_array_equal(loaded.embed(volume), original.embed(volume))
    np.testing.assert_array_equal(loaded.embed_tokens(volume), original.embed_tokens(volume))
    fresh = [load_encoder(path, random_init=True).embed(volume) for path in (run, folder)]
    np.testing.assert_array_equal(*fresh)
    assert not np.array_equal(fresh[0], original.embed(volume))


@pytest.mark.slow
def test_the_hub_class_loads_offline(run, folder, tmp_path):
    code = f"""
import socket
def refuse(*_): raise AssertionError("no network")
socket.socket.connect = refuse
import numpy as np, torch, octfm
module = octfm.OctEncoder.from_pretrained({str(folder)!r})
assert not module.training
np.save({str(tmp_path / "grid.npy")!r}, module(torch.full((2, 1, 8, 64, 32), 90, dtype=torch.uint8)).detach().numpy())
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr
    expected = load_encoder(run).encode_grid(np.full((2, 8, 64, 32), 90, np.uint8))
    np.testing.assert_array_equal(np.load(tmp_path / "grid.npy"), np.moveaxis(expected, -1, 1))


def test_the_hub_class_is_the_same_network_and_learns(run, folder, tmp_path):
    module = octfm.OctEncoder.from_pretrained(folder)
    volume = eye()
    np.testing.assert_array_equal(module.encoder.embed(volume), load_encoder(run).embed(volume))
    voxels = torch.rand(1, 8, 64, 32, requires_grad=True) * 255
    module(voxels).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.network.patch_embed.parameters())
    with pytest.raises(ConfigError, match=r"expected voxels \[B, 1, 8, 64, 32\], got \[1, 1, 8, 64, 48\]"):
        module(torch.zeros(1, 8, 64, 48))
    # What a user has trained further is written in the same layout, with its own checksum and the same memory.
    with torch.no_grad():
        module.network.norm.bias += 1
    module.save_pretrained(tmp_path / "mine")
    mine = load_encoder(tmp_path / "mine")
    assert mine.key != load_encoder(folder).key
    np.testing.assert_array_equal(mine.embed(volume), module.encoder.embed(volume))
    assert participants_in(*opened(tmp_path / "mine")) == participants_in(*opened(folder))


def test_it_remembers_whom_it_has_seen_and_names_nobody(run, folder, store, labels, tmp_path):
    seen = seen_by(folder)
    assert seen("P000") and not seen("P011")
    everything = b"".join(file.read_bytes() for file in folder.iterdir())
    for row in store.rows:
        for secret in (row.participant, row.acquisition, row.uri):
            assert secret.encode() not in everything, secret
    assert str(store.path).encode() not in everything and str(run).encode() not in everything
    assert preprocessing_of(folder) == store.preprocessing.model_dump(mode="json")
    # As everywhere else: a test participant that was pretrained on stops the evaluation.
    moved = small_store(tmp_path / "moved", darkened, splits=("test",) * 3 + ("train",) * 7 + ("val",) * 2)
    with pytest.raises(EvaluationError, match="pretraining"):
        tune(folder, moved, tmp_path / "leak", labels)
    kept = export(run, tmp_path / "published", keep_key=tmp_path / "key", echo=quiet)
    assert not (kept / exported.KEY).exists()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600, "only its owner may ask who was trained on"
    for evaluate in (seen_by, lambda path: tune(path, store, tmp_path / "refused", labels)):
        with pytest.raises(
            EvaluationError, match=r"without the key .* put the key back as participants.key .* --allow-seen"
        ):
            evaluate(kept)
    # Results with --allow-seen say that it is unknown, and so does what is tuned on these weights.
    flagged = tune(kept, store, tmp_path / "flagged", labels, epochs=1, allow_seen=True)
    assert "participants; nobody can tell whether pretraining has seen them" in summary(flagged)[1]
    with pytest.raises(EvaluationError, match="began with weights that were published without the key"):
        seen_by(flagged)
    assert load_encoder(kept).key == load_encoder(run).key, "embedding needs no key"
    shutil.copy(tmp_path / "key", kept / exported.KEY)
    assert seen_by(kept)("P000")
    # As if it was stopped once its key was written: the same command continues.
    shutil.rmtree(kept)
    assert export(run, kept, keep_key=tmp_path / "key", echo=quiet) == kept


def test_the_file_of_keys_is_asked_for_although_only_weights_further_back_have_seen_people(folder, tmp_path):
    """An export of a run on phantoms without its keys: it asked for a line to be changed in the file that is absent."""
    kept = shutil.copytree(folder, tmp_path / "kept")
    (kept / exported.KEY).unlink()
    seen = json.loads((kept / exported.SEEN).read_text())
    (kept / exported.SEEN).write_text(json.dumps({"hashes": [], "before": [seen]}))
    with pytest.raises(
        EvaluationError, match=r"kept: published without the key .* put the key back as participants.key"
    ):
        seen_by(kept)
    said = []
    assert not (export(kept, tmp_path / "again", keep_key=tmp_path / "key", echo=said.append) / exported.KEY).exists()
    assert said == [f"{tmp_path / 'key'}: not written, because {kept} comes without a key"]


def test_keys_that_are_not_those_of_the_hashes_are_refused(run, store, labels, tmp_path):
    """With the key of another export nobody was recognised, and whoever was trained on could be tested."""
    tuned = export(tune(run, store, tmp_path / "tuned", labels, epochs=1), tmp_path / "exported", echo=quiet)
    key = tuned / exported.KEY
    text = key.read_text()
    own, pretrained = text.split()
    for same in (text.strip(), text.replace("\n", "\r\n"), f"\ufeff{text}"):
        key.write_bytes(same.encode())
        assert seen_by(tuned)("P000")
    other = "0" * len(own)
    for wrong in (
        b"",
        own.encode(),
        f"{pretrained}\n{own}\n".encode(),
        f"{own} {other}".encode(),
        text.encode("utf-16"),
    ):
        key.write_bytes(wrong)
        with pytest.raises(CheckpointError, match=r"participants.key: not what belongs to .* \(2 keys, a line each\)"):
            seen_by(tuned)
        assert load_encoder(tuned).key, "embedding needs no key"
    # A module that was loaded without the key knows it again, too.
    key.unlink()
    octfm.OctEncoder.from_pretrained(tuned).save_pretrained(tmp_path / "mine")
    (tmp_path / "mine" / exported.KEY).write_text(f"{pretrained}\n{own}\n")
    with pytest.raises(CheckpointError, match="put back the file"):
        seen_by(tmp_path / "mine")
    (tmp_path / "mine" / exported.KEY).write_text(text)
    assert (
        seen_by(tmp_path / "mine")("P000")
        and json.loads((tmp_path / "mine" / exported.CONFIG).read_text())["version"] == 2
    )


def test_export_takes_a_checkpoint_and_says_which_one_a_run_stands_for(run, tmp_path):
    newest = max((run / "checkpoints").glob("*.pt"))
    for name, source in (("run", run), ("checkpoint", newest)):
        done = invoke("export", source, "--out", tmp_path / name)
        assert done.exit_code == 0, done.output
        assert (f"{newest.name}: the newest checkpoint of this run" in done.output) == (source == run)
    weights = [(tmp_path / name / exported.WEIGHTS).read_bytes() for name in ("run", "checkpoint")]
    assert weights[0] == weights[1]


def trains_on(run, monkeypatch, *, keeps):
    """Whenever a checkpoint of `run` has been chosen, the run saves another one with twice its weights, and keeps the
    chosen one or not."""
    load = checkpoint.load

    def twice(tensors):
        return {name: 2 * tensor for name, tensor in tensors.items()}

    def loaded(path):
        if path.parent == run / "checkpoints" and path == checkpoint.newest(run) and checkpoint_files.step_of(path) < 9:
            now = load(path)
            if best := now["state"].get("best"):
                best["model"] = twice(best["model"])
            content = {name: now[name] for name in now.keys() - {"format", "version", "checksum", "step"}}
            checkpoint.write(path.parent, now["step"] + 1, content | {"model": twice(now["model"])})
            if not keeps:
                path.unlink()
        return load(path)

    monkeypatch.setattr(checkpoint, "load", loaded)


def test_all_of_an_export_is_of_one_checkpoint_while_the_run_goes_on(run, store, labels, tmp_path, monkeypatch):
    """Its step was of one checkpoint and its weights of the next; of a fine-tuned model the head was of one and the
    encoder of the next, with answers that neither gives."""
    copy, tuned = shutil.copytree(run, tmp_path / "run"), tune(run, store, tmp_path / "tuned", labels)
    before = load_tuned(tuned)
    trains_on(copy, monkeypatch, keeps=True)
    settings = json.loads((export(copy, tmp_path / "one", echo=quiet) / "config.json").read_text("utf-8"))
    newest = {checkpoint_files.step_of(path): path for path in checkpoint_files.everywhere(copy)}
    assert load_encoder(tmp_path / "one").key == load_encoder(newest[settings["step"]]).key
    trains_on(tuned, monkeypatch, keeps=True)
    after = load_tuned(export(tuned, tmp_path / "two", echo=quiet))
    weights = zip(*(m.head.state_dict().values() for m in (before, after)), strict=True)
    same = all(torch.equal(a, b) for a, b in weights)
    assert same == (before.encoder.key == after.encoder.key)


def test_a_checkpoint_that_the_run_has_just_deleted_gives_way_to_the_newest(run, tmp_path, monkeypatch):
    copy = shutil.copytree(run, tmp_path / "run")
    trains_on(copy, monkeypatch, keeps=False)
    assert load_encoder(copy).source == str(copy / "checkpoints" / "step-00000009.pt")


@pytest.mark.slow
def test_embed_takes_an_export_with_its_baselines(run, folder, store, tmp_path):
    import pyarrow.parquet as pq

    ours, theirs = (embed_all(path, store.path, tmp_path / path.name, echo=quiet) for path in (run, folder))
    for a, b in zip(ours, theirs, strict=True):
        assert pq.read_table(a)["vector"].equals(pq.read_table(b)["vector"])


def test_ids_and_pictures_do_not_end_up_in_an_export(folder, store, tmp_path):
    before = sorted(folder.rglob("*"))
    with pytest.raises(EvaluationError, match=r"an export, which may be published; name another folder .* with --out"):
        embed_all(folder, store.path, echo=quiet)
    for inside in (folder, folder / "embeddings", folder / "a" / "b"):
        with pytest.raises(EvaluationError, match="have no place there, choose another --out"):
            embed_all(folder, store.path, inside, echo=quiet)
        with pytest.raises(EvaluationError, match="have no place there"):
            embed_files(folder, tmp_path, inside)
        answer = invoke("probe", folder, "--embeddings", inside)
        assert isinstance(answer.exception, EvaluationError) and "have no place there" in str(answer.exception)
    assert sorted(folder.rglob("*")) == before


def test_names_of_classes_nobody_knows_are_not_published_unawares(run, store, tmp_path):
    table = tmp_path / "labels.tsv"
    names = ("Dr Geheim", "seen by Dr Weber")
    rows = "".join(f"P{i:03d}\t{names[i % 2]}\n" for i in range(12))
    table.write_text(f"participant_id\tDr Geheim\n{rows}")
    tuned = tune(run, store, tmp_path / "tuned", table, target="Dr Geheim", order=[], lr_encoder=0)
    with pytest.raises(EvaluationError, match=r"the names 'Dr Geheim', 'seen by Dr Weber', which .*--keep-names"):
        export(tuned, tmp_path / "out", echo=quiet)
    assert not (tmp_path / "out").exists()
    assert load_tuned(export(tuned, tmp_path / "out", keep_names=True, echo=quiet), "cpu").answer.classes == names


def test_what_octfm_segment_measures_may_be_published_as_a_target():
    """A label of `octfm finetune labels=TABLE target=centre_um`, as the guide has it."""
    from octfm.layers.rows import MASKS
    from octfm.layers.zones import UNIT

    assert all(map(is_known_name, [*UNIT.values(), "volume_mm3", *(f"{mask}_nl" for mask in MASKS)]))
    assert is_known_name("label"), "the column of {label} in a pattern"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"lr_encoder": 0}, marks=pytest.mark.slow),
        {"pool": "attention"},
        pytest.param({"lora_rank": 2, "lr_encoder": 3e-3}, marks=pytest.mark.slow),
        pytest.param({"target": "age", "order": [], "head_epochs": 0}, marks=pytest.mark.slow),
    ],
    ids=["head only", "attentive", "low rank", "number"],
)
def test_a_fine_tuned_model_answers_as_it_did_when_it_was_tested(run, store, labels, tmp_path, changes):
    out = tune(run, store, tmp_path / "tuned", labels, **changes)
    said = read_predictions(out / "predictions.parquet").of_acquisition
    rows = [row.index for row in store.rows if row.acquisition in said]
    written = export(out, tmp_path / "exported", echo=quiet)
    arrays = store.read(rows)
    answers = [load_tuned(path, "cpu").answers(arrays) for path in (out, written)]
    np.testing.assert_array_equal(*answers)
    np.testing.assert_allclose(answers[0], [said[store.rows[row].acquisition][0] for row in rows], atol=2e-5)
    volume = eye()
    np.testing.assert_array_equal(load_encoder(out).embed(volume), load_encoder(written).embed(volume))
    assert np.array_equal(load_encoder(out).embed(volume), load_encoder(run).embed(volume)) == (
        changes.get("lr_encoder") == 0
    )
    model = load_tuned(written)
    predicted = model.predict(volume)
    assert model.predict([volume, store[rows[0]]]) == [predicted, *model.predict(store[rows[:1]])]
    file = tmp_path / "scan.npz"
    np.savez(file, volume=volume.voxels, spacing_mm=volume.spacing_mm)
    assert model.predict(file) == model.predict(octfm.read_volume(file))
    single = replace(volume, voxels=volume.voxels[:1])
    assert model.predict(single) != predicted
    if changes.get("target") == "age":
        assert set(predicted) == {"age"} and 30 < predicted["age"] < 100
    else:
        assert tuple(predicted) == GRADES and sum(predicted.values()) == pytest.approx(1)
    if "lora_rank" in changes:  # what is merged is what was trained
        best = checkpoint.load(checkpoint.newest(out))["state"]["best"]["model"]
        own = {name.removeprefix("encoder."): t for name, t in best.items() if name.startswith("encoder.")}
        unmerged = add_low_rank(load_encoder(run).network, 2)
        unmerged.load_state_dict(own)
        patches, index = torch.randn(1, 5, 128), torch.arange(5)[None]
        plain = load_encoder(out).network
        torch.testing.assert_close(plain(patches, index), unmerged(patches, index), atol=1e-5, rtol=1e-5)
        assert set(merged(own)) == set(plain.state_dict())
    assert seen_by(written)("P000"), "whom the encoder and the head were trained on"


def test_two_exports_at_once_do_not_touch_each_other(run, tmp_path, monkeypatch):
    """The second emptied the folder that the first was writing, which ended with "no such file"."""
    at_once, checked = list[Path](), exported.checksum

    def checksum(tensors):
        monkeypatch.setattr(exported, "checksum", checked)
        at_once.append(export(run, tmp_path / "encoder", echo=quiet))
        return checked(tensors)

    monkeypatch.setattr(exported, "checksum", checksum)
    with pytest.raises(EvaluationError, match="exists already"):
        export(run, tmp_path / "encoder", echo=quiet)
    assert load_encoder(at_once[0]).key == load_encoder(run).key
    assert list(tmp_path.iterdir()) == at_once


def test_what_a_killed_export_left_is_removed_once_it_is_old(run, tmp_path):
    """It holds the key of the participants' hashes, in a folder that nobody sees."""
    left = {name: tmp_path / name for name in (".a[1].77.0123abcd.partial", ".a[1].78.0123abcd.partial", ".a[1].x")}
    left[".b.77.0123abcd.partial"] = tmp_path / ".b.77.0123abcd.partial"
    for name, folder in left.items():
        folder.mkdir()
        (folder / exported.KEY).touch()
        if ".78." not in name:
            os.utime(folder, (0, 0))
    export(run, tmp_path / "a[1]", echo=quiet)
    assert [name for name, folder in left.items() if not folder.exists()] == [".a[1].77.0123abcd.partial"]


def test_nothing_is_overwritten_and_nothing_is_left_half_written(run, folder, tmp_path, monkeypatch):
    with pytest.raises(EvaluationError, match="exists already"):
        export(run, folder)
    (tmp_path / "key").write_text("precious")
    with pytest.raises(EvaluationError, match="exists already"):
        export(run, tmp_path / "a", keep_key=tmp_path / "key")

    class Stopped(BaseException):
        pass

    def stopped(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(onnx_graph, "write_onnx", stopped)
        with pytest.raises(Stopped):
            export(run, tmp_path / "b", onnx=True, echo=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "settings", "foreign", "newer", "odd", "seen", "hashes"])
def test_damage_is_told_where_it_is(folder, tmp_path, damage):
    copy = shutil.copytree(folder, tmp_path / "copy")
    weights, settings = copy / exported.WEIGHTS, json.loads((copy / exported.CONFIG).read_text())
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-9] ^= 64
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage in ("missing", "seen"):
        (weights if damage == "missing" else copy / exported.SEEN).unlink()
    elif damage == "hashes":
        (copy / exported.SEEN).write_text('{"before": [{}]}')
    elif damage == "settings":
        settings["settings"]["model"]["width"] = 96
    elif damage == "foreign":
        settings["format"] = "bert"
    else:
        settings["version"] = 99 if damage == "newer" else None
    (copy / exported.CONFIG).write_text(json.dumps(settings))
    words = {
        "flip": "model.safetensors: damaged.*checksum", "cut": "model.safetensors: damaged", "missing": "no such file",
        "settings": "do not fit the model", "foreign": "no checkpoint found", "newer": "upgrade octfm", "odd": "version None", "seen": "seen_participants.*missing", "hashes": "seen_participants.*lacks hashes",
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=words[damage]):
        (seen_by if damage in ("seen", "hashes") else load_encoder)(copy)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_an_export_in_a_bucket(place, run, folder):
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    assert load_encoder(str(place)).key == load_encoder(run).key and seen_by(place)("P000")


def test_the_verb(run, tmp_path):
    out = tmp_path / "out"
    result = invoke("export", run, "--out", out, catch_exceptions=False)
    assert result.exit_code == 0 and "model.safetensors" in result.output and "--keep-key" in result.output
    card = (out / exported.CARD).read_text()
    assert card.startswith("---\n") and 'octfm.load_encoder("out")' in card
    assert (
        load(Preprocessing, json.loads((out / exported.CONFIG).read_text())["preprocessing"])
        == load_encoder(run).preprocessing
    )


@pytest.mark.parametrize("changes", [{}, {"lr_encoder": 0}, {"lr_encoder": 0, "pool": "attention"}], ids=str)
def test_a_head_answers_from_the_tokens_that_it_selects(run, store, labels, tmp_path, changes):
    """What a graph needs as index and counts; a frozen encoder's head pools a sample of the tissue, in float16."""
    model, arrays = load_tuned(tune(run, store, tmp_path / "tuned", labels, **changes), "cpu"), store.read([0, 3])
    index, counts = model.select(arrays)
    tokens = torch.from_numpy(model.encoder.some_tokens(arrays.voxels, index))
    answers = model.answer.value(model.head(tokens, torch.from_numpy(counts)).numpy())
    np.testing.assert_allclose(answers, model.answers(arrays), atol=2e-3)
    tissue = model.encoder.select(arrays)[1]
    assert (counts <= tissue).all() and (counts.sum(1) == (24 if changes else tissue.sum(1))).all()


@pytest.mark.slow
def test_onnx_agrees_with_torch_for_any_batch_or_is_refused(run, store, labels, tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    tuned = tune(run, store, tmp_path / "tuned", labels, pool="attention")
    out = export(tuned, tmp_path / "tuned-out", onnx=True, echo=quiet)
    assert b".py" not in (out / exported.ONNX).read_bytes(), "no trace of the source and its folders"
    session = onnxruntime.InferenceSession(str(out / exported.ONNX), providers=["CPUExecutionProvider"])
    model = load_tuned(out, "cpu")
    for rows in ([0], [1, 2, 3, 4, 5]):
        arrays = store.read(rows)
        index, tissue = model.encoder.select(arrays)
        feed = {"voxels": arrays.voxels, "index": index, "counts": tissue.astype(np.float32)}
        tokens, vector, answers = session.run(None, feed)
        pool = pooled(torch.from_numpy(tokens), torch.from_numpy(tissue), "mean")
        np.testing.assert_allclose(vector, pool.numpy(), atol=1e-4)
        np.testing.assert_allclose(tokens, model.encoder.tissue_tokens(arrays)[0], atol=1e-4)
        np.testing.assert_allclose(model.answer.value(answers), model.answers(arrays), atol=1e-4)
    graph = onnx_graph.Graph(model.encoder, model.head).eval()
    with torch.no_grad():
        graph.network.norm.bias[3] += 1e-3
    with pytest.raises(EvaluationError, match=r"onnxruntime and torch differ by 0\.00.* in tokens with 1 volumes"):
        onnx_graph.check(graph, model.encoder, out / exported.ONNX)
    monkeypatch.setattr(onnx_graph, "TOLERANCE", -1.0)
    with pytest.raises(EvaluationError, match="nothing was exported"):
        export(run, tmp_path / "refused", onnx=True, echo=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tuned", "tuned-out"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_onnx_agrees_with_torch_at_vit_s_size(tmp_path):
    """384 wide, 12 deep, [64, 384, 384], the whole token budget: write_onnx compares with onnxruntime before it
    believes its file."""
    pytest.importorskip("onnxruntime")
    settings, preprocessing = load_config("vit_s"), Preprocessing()
    network = build_objective(settings, preprocessing).frozen_encoder(settings.objective.frozen)
    with torch.no_grad():  # as after training: the exporter stores equal parameters, such as all zero biases, only once
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    encoder = assemble(network, settings, preprocessing, "vit_s", preprocessing.fingerprint(), start("fp32", "cpu"))
    assert (encoder.width, settings.model.depth, preprocessing.image_size) == (384, 12, (64, 384, 384))
    assert settings.masks.counts(network.grid.shape)[0] == 3072
    assert onnx_graph.write_onnx(encoder, None, tmp_path / "vit_s.onnx") <= 1e-4
    assert (tmp_path / "vit_s.onnx").stat().st_size > 4 * sum(p.numel() for p in network.parameters())
