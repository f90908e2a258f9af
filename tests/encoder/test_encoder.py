"""A frozen encoder knows its preprocessing, repeats itself, and tells whom it has seen."""

import re
import shlex
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from octfm.encoder.embed import (
    NAMES,
    WORDS,
    embed_store,
    embed_with,
    embedding_files,
    encoder_facts,
    write_rows,
    write_vectors,
)
from octfm.encoder.embeddings import align, read_embeddings
from octfm.encoder.encoder import load_encoder, opened, seen_by
from octfm.errors import CheckpointError, ConfigError, EvaluationError
from octfm.io.hashing import keyed_hash
from octfm.models.token_map import TISSUE, TooFewTokens, tissue_index, token_map
from octfm.models.vit3d import take_patches
from octfm.run import checkpoint
from octfm.run.runtime import alone
from octfm.store.store import Store
from octfm.tasks.embed_run import embed_all
from support.command_line import invoke
from support.small_store import SIZE, edit_rows, small_preprocessing
from support.tiny_runs import config, quick_pretrain, quiet
from support.vendor_files import write_npy
from support.volumes import eye, telling_voxels


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    return quick_pretrain(config(steps=4), store, tmp_path_factory.mktemp("runs") / "run", echo=quiet)


def test_F15_preprocessing_travels_with_the_weights(run, store):
    """The prototype z-scored in pretraining and used quantiles in fine-tuning."""
    encoder = load_encoder(run)
    assert encoder.preprocessing == store.preprocessing == small_preprocessing()
    volume = eye()
    prepared = encoder.preprocessing(volume)
    tokens = encoder.encode_grid(prepared.voxels[None])
    np.testing.assert_array_equal(encoder.embed_tokens(volume), tokens[0])
    voxels, index = torch.from_numpy(prepared.voxels)[None, None], torch.arange(encoder.network.grid.size)[None]
    patches = take_patches(voxels, index, encoder.config.model.patch_size).float()
    mean, std = store.preprocessing.intensity_mean, store.preprocessing.intensity_std
    for own_zscore, grey in ((False, (patches / 255 - mean) / std), (True, (patches - patches.mean()) / patches.std())):
        with torch.no_grad():
            expected = encoder.network(grey, index)
        found = replace(encoder, own_zscore=own_zscore).encode_grid(prepared.voxels[None])
        np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=2e-4)


def test_F15_a_store_prepared_otherwise_is_refused(run, store, tmp_path):
    from octfm.store.store import Store

    other = Store.open(store.path)
    other.fingerprint = "another"
    with pytest.raises(EvaluationError, match="prepared with other settings"):
        embed_store(load_encoder(run), other, tmp_path, echo=quiet)


@pytest.mark.parametrize(("chosen", "taken"), [("target", "target_encoder"), ("context", "encoder")])
def test_the_encoder_that_is_asked_for_is_frozen(chosen, taken, store, tmp_path):
    settings = config(steps=3, objective={"frozen": chosen, "target_norm": "whiten"})
    run = quick_pretrain(settings, store, tmp_path / "run", echo=quiet)
    kept = checkpoint.load(checkpoint.newest(run))["model"]
    assert not all(
        torch.equal(kept[n], kept[n.replace("target_encoder.", "encoder.")])
        for n in kept
        if n.startswith("target_encoder.")
    )
    for name, tensor in load_encoder(run).network.state_dict().items():
        torch.testing.assert_close(tensor, kept[f"{taken}.{name}"], rtol=0, atol=0)


def test_embedding_is_repeatable_and_shaped(run):
    encoder, volume = load_encoder(run), eye()
    vector, tokens = encoder.embed(volume), encoder.embed_tokens(volume)
    assert vector.shape == (48,) and vector.dtype == np.float32
    assert tokens.shape == (SIZE[0] // 2, SIZE[1] // 8, SIZE[2] // 8, 48)
    np.testing.assert_array_equal(vector, load_encoder(run).embed(volume))


def test_store_and_single_volume_agree(run, store):
    encoder = load_encoder(run)
    arrays = store.read([3, 7, 3])
    vectors = encoder.embed_arrays(arrays)
    np.testing.assert_allclose(vectors[0], vectors[2], rtol=1e-5, atol=1e-6)
    assert not np.allclose(vectors[0], vectors[1])


def test_vectors_are_of_the_encoders_own_precision(run, store):
    encoder, arrays = load_encoder(run), store.read([0])
    vectors, tokens = encoder.embed_arrays(arrays), encoder.encode_grid(arrays.voxels)
    with torch.autocast("cpu", torch.bfloat16):
        np.testing.assert_array_equal(encoder.embed_arrays(arrays), vectors)
        np.testing.assert_array_equal(encoder.encode_grid(arrays.voxels), tokens)


def test_random_init_is_the_run_before_its_first_update(run):
    trained, random = load_encoder(run), load_encoder(run, random_init=True)
    assert trained.key != random.key
    again = load_encoder(run, random_init=True)
    assert random.key == again.key
    drawn = load_encoder(run, random_init=True, draw=1)
    assert drawn.key not in (random.key, trained.key) and drawn.source == f"{random.source}, draw 2"


def test_key_changes_with_the_weights_the_budget_and_the_precision(run):
    encoder = load_encoder(run)
    key = encoder.key
    with_other_budget = encoder.config.model_copy(
        update={"masks": encoder.config.masks.model_copy(update={"budget": 32})}
    )
    assert replace(encoder, config=with_other_budget).key != key
    assert replace(encoder, runtime=alone("bf16", "cpu")).key != key
    encoder.network.norm.bias.data[0] += 1e-3
    assert encoder.key != key


def test_embed_all_writes_the_encoder_and_every_baseline(run, store, tmp_path):
    import pyarrow.parquet as pq

    written = embed_all(run, store.path, echo=quiet)
    assert written == embedding_files(run) and [p.stem for p in written] == [*NAMES]
    table = pq.read_table(written[0])
    assert table["acquisition"].to_pylist() == [row.acquisition for row in store.rows]
    said: list[str] = []
    embed_all(run, store.path, echo=said.append)
    assert any("already there" in line for line in said)
    aside = shutil.copytree(written[0].parent, tmp_path / "my vectors")
    with pytest.raises(EvaluationError, match=f"holds embeddings, not a run; .*{run.name}.* --embeddings ") as told:
        embedding_files(aside)
    assert shlex.split(str(told.value))[-2:] == ["--embeddings", str(aside)]


def test_vectors_that_do_not_belong_together_are_refused(run, store, tmp_path):
    """octfm embed writes file by file: probed in between, an encoder would be compared with another one's baselines."""
    again = Path(shutil.copytree(store.path, tmp_path / "again"))
    edit_rows(again, lambda row: {"checksum": f"{row.checksum[:-4]}0000"})
    other = Path(shutil.copytree(run, tmp_path / "other"))
    for name, (encoder, volumes), says in (
        ("a", (other, store), f"random_init.parquet: of {run}/.*, and pretrained.parquet is of {other}/.*embed again"),
        ("b", (run, Store.open(again)), "random_init.parquet: of other volumes than pretrained.parquet: .*embed again"),
    ):
        for draw in (None, 0):
            own = load_encoder(run, random_init=draw is not None)
            embed_store(own, store, tmp_path / name, NAMES[0 if draw is None else 1], quiet)
        assert len(embedding_files(run, tmp_path / name)) == 2
        vectors = np.zeros((len(volumes), own.vector_width), np.float32)
        facts = encoder_facts(load_encoder(encoder)) | {"name": "pretrained"}
        write_rows(tmp_path / name, volumes, vectors, facts)
        with pytest.raises(EvaluationError, match=says):
            embedding_files(run, tmp_path / name)


def test_vectors_do_not_depend_on_the_tokens_of_training(run, store):
    """All tissue and nothing else, whatever budget a run was trained with, so that two objectives can be compared."""
    encoder, arrays = load_encoder(run), store.read([0, 3, 7])
    expected = encoder.embed_arrays(arrays)
    for budget in (16, 64, None):
        masks = encoder.config.masks.model_copy(update={"budget": budget})
        other = replace(encoder, config=encoder.config.model_copy(update={"masks": masks}))
        np.testing.assert_array_equal(other.embed_arrays(arrays), expected)
        assert other.readout == encoder.readout == "all tissue tokens, mean"
    maps = token_map(arrays.band, arrays.valid, SIZE, (2, 8, 8))
    for place, index in enumerate(encoder.read_tokens(arrays)):
        assert index.tolist() == np.flatnonzero(maps[place].ravel() == TISSUE).tolist()
        tokens = encoder.some_tokens(arrays.voxels[place : place + 1], index[None])
        np.testing.assert_allclose(expected[place], tokens[0].mean(0), atol=1e-5)


def test_a_volume_without_tissue_is_read_from_its_image():
    assert tissue_index(np.array([[[0, 2, 1, 2]]])).tolist() == [1, 3]
    assert tissue_index(np.array([[[0, 1, 1, 0]]])).tolist() == [1, 2]
    with pytest.raises(TooFewTokens, match="acquisition 7"):
        tissue_index(np.zeros((1, 1, 4), np.uint8), ["7"])


def test_threads_embed_what_one_embeds_and_pass_an_error_on(run, store, tmp_path, monkeypatch):
    encoder, threads, vectors = load_encoder(run), torch.get_num_threads(), {}
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            data = read_embeddings(embed_store(encoder, store, tmp_path / str(count), echo=quiet))
            vectors[count] = dict(zip(data.acquisition.tolist(), data.vectors, strict=True))
            assert torch.get_num_threads() == count
        for place, row in enumerate(store.rows):
            alone = encoder.reading(store).embed_arrays(store.read([place]))[0]
            np.testing.assert_array_equal(vectors[3][row.acquisition], vectors[1][row.acquisition])
            np.testing.assert_allclose(vectors[3][row.acquisition], alone, rtol=1e-4, atol=1e-5)
        monkeypatch.setattr(type(encoder), "embed_arrays", lambda *_: (_ for _ in ()).throw(RuntimeError("no memory")))
        with pytest.raises(RuntimeError, match="no memory"):
            embed_store(encoder, store, tmp_path / "none", echo=quiet)
        assert torch.get_num_threads() == 3 and not list((tmp_path / "none").glob("*.parquet"))
    finally:
        torch.set_num_threads(threads)


def test_the_next_volumes_are_read_while_vectors_of_these_are_made(store, tmp_path, monkeypatch):
    """A GPU would wait for the disk. Each call ends only once the batch after it has been asked for."""
    read, asked, described = store.read, threading.Event(), []

    def seen(rows):
        if rows[-1] >= sum(described) + 8:
            asked.set()
        return read(rows)

    def describe(voxels):
        # Batches of 8, the last of which has none after it.
        assert len(described) == 2 or asked.wait(20)
        asked.clear()
        described.append(len(voxels))
        return voxels.reshape(len(voxels), -1)[:, :2].astype(np.float32)

    monkeypatch.setattr(store, "read", seen)
    embed_with(describe, store, tmp_path, "ahead")
    assert described == [8, 8, 8]


def test_an_encoder_of_ones_own_gives_one_vector_for_each_volume(store, tmp_path):
    def means(voxels):
        return voxels.mean((2, 3)).astype(np.float32)

    found = read_embeddings(embed_with(means, store, tmp_path, "own"))
    place = {row.acquisition: row.index for row in store.rows}
    rows = np.array([place[name] for name in found.acquisition.tolist()])
    np.testing.assert_allclose(found.vectors, means(store.read(rows).voxels), rtol=1e-6)
    wrong = {
        r"expected vectors \[8, 8\], got \[1, 8\]": lambda voxels: means(voxels).mean(0, keepdims=True),
        "expected finite vectors": lambda voxels: means(voxels) * np.nan,
        "expected finite vectors, got": lambda voxels: means(voxels).astype(np.float64) * 1e200,
        r"expected vectors \[8, 8\], got \[8\]": lambda voxels: means(voxels)[0],
    }
    for message, own in wrong.items():
        with pytest.raises(EvaluationError, match=message):
            embed_with(own, store, tmp_path, "wrong")
    assert not (tmp_path / "wrong.parquet").exists()


@pytest.mark.parametrize("as_torch_gives_it", [lambda x: x.requires_grad_(), lambda x: x.bfloat16()])
def test_an_encoder_of_ones_own_may_return_a_tensor(store, tmp_path, as_torch_gives_it):
    def brightness(voxels):
        return torch.from_numpy(voxels.max((2, 3)).astype(np.float32))

    file = embed_with(lambda voxels: as_torch_gives_it(brightness(voxels)), store, tmp_path, "own")
    exact = read_embeddings(embed_with(lambda voxels: brightness(voxels).numpy(), store, tmp_path, "exact"))
    np.testing.assert_allclose(read_embeddings(file).vectors, exact.vectors, rtol=0.01)


def test_draws_of_random_initialisation_differ_and_come_again(run):
    draws = [load_encoder(run, random_init=True, draw=draw) for draw in (0, 1, 2, 1)]
    assert draws[0].key == load_encoder(run, random_init=True).key and draws[1].key == draws[3].key
    assert len({encoder.key for encoder in draws}) == 3 and "draw 2" in draws[1].source


def test_vectors_of_other_tokens_or_another_pooling_are_not_compared(run, store, tmp_path):
    encoder = load_encoder(run)
    mean = read_embeddings(embed_store(encoder, store, tmp_path, echo=quiet))
    assert mean.metadata["readout"] == encoder.readout
    extremes = read_embeddings(embed_store(encoder.pooling("extremes"), store, tmp_path, "other", quiet))
    rows = [{name: getattr(row, name) for name in (*WORDS, "participant_labels")} for row in store.rows]
    facts = {"key": "old", "encoder": "old", "name": "old", "pool": "mean"}  # as written before readouts were recorded
    vectors = mean.vectors.astype(np.float32)
    old = read_embeddings(write_vectors(tmp_path / "old.parquet", rows, vectors, facts, store.preprocessing))
    for other, says in ((extremes, "all tissue tokens, extremes"), (old, "the tokens of its training")):
        with pytest.raises(EvaluationError, match=f"vectors read from {says}.*embed both again"):
            align([mean, other])
    plain = replace(mean, name="histogram", metadata={})
    assert align([mean, plain])[1] is plain, "what reads no tokens can be compared with anything"


def test_embeddings_follow_splits_that_changed(run, store, tmp_path):
    """The probe trains and tests by this column: an old split would put test participants into its training."""
    import pyarrow.parquet as pq

    from octfm.store.store import Store

    moved = shutil.copytree(store.path, tmp_path / "moved")
    encoder = load_encoder(run)
    before = pq.read_table(embed_store(encoder, Store.open(moved), tmp_path, echo=quiet))
    edit_rows(moved, lambda row: {"split": "test"})
    after = pq.read_table(embed_store(encoder, Store.open(moved), tmp_path, echo=quiet))
    assert set(before["split"].to_pylist()) == {"train", "val", "test"} and set(after["split"].to_pylist()) == {"test"}
    assert after["vector"].equals(before["vector"])


def test_whom_the_encoder_has_seen(run):
    seen = seen_by(run)
    assert seen("P000") and not seen("P011") and not seen("nobody")


def test_whom_the_encoder_has_seen_is_known_under_the_id_of_another_scanner(run, monkeypatch):
    """As where the pretraining's files write P001 and those of the evaluation p-1."""
    content = opened(run)[1]
    assert all(map(seen_by(run), ("p-1", "0001", "sub-001"))) and not seen_by(run)("p-11")
    # As checkpoints were before: hashes of the ids alone.
    people, key = ["P001", "MRN-12", "1001", "1-11"], content["participants"]["key"]
    before = content | {"participants": {"key": key, "hashes": [keyed_hash(name, key) for name in people]}}
    monkeypatch.setattr("octfm.encoder.encoder.opened", lambda _: (run, before))
    assert all(map(seen_by(run), [*people, "00001001"]))
    assert not any(map(seen_by(run), ("P011", "MRN-21", "10010", "11-1")))


def test_no_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        load_encoder(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_encoder(tmp_path / "weights.pt")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc, where nobody can make a folder")
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(store, run, tmp_path, monkeypatch):
    """A scan of a million files was lost when its catalog could not be written."""

    def worked(*_, **__):
        raise AssertionError("worked before it tried to write")

    in_module = (
        "catalog.scan.scan",
        "encoder.embed._in_batches",
        "encoder.encoder.Encoder.embed",
        "evaluation.arms.make_arms",
    )
    for name in in_module:
        monkeypatch.setattr(f"octfm.{name}", worked)
    write_npy(tmp_path / "a_0.12x0.0039x0.0115.npy", telling_voxels())
    (tmp_path / "pretrained.parquet").touch()
    for words in (
        ("scan", tmp_path),
        ("embed", run, "--store", store.path),
        ("embed", run, tmp_path / "a_0.12x0.0039x0.0115.npy"),
        ("probe", run, "--embeddings", tmp_path),
    ):
        done = invoke(*words, "--out", "/proc/octfm")
        assert isinstance(done.exception, ConfigError), (words, done.exception, done.output)
        assert re.fullmatch("/proc cannot be written: .*; choose another folder, .*", str(done.exception))
    mistyped = invoke("probe", "/proc/octfm")
    assert "/proc/octfm: no run here" in str(mistyped.exception), "a folder to read is no folder to write into"
