"""A frozen encoder knows its preprocessing, repeats itself, and tells whom it has seen."""

import shutil

import numpy as np
import pytest
import torch

from octfm.encoder.embed import WORDS, embed_store, embedding_files, write_vectors
from octfm.encoder.encoder import load_encoder, seen_by
from octfm.errors import CheckpointError, EvaluationError
from octfm.run import checkpoint
from octfm.tasks.embed_run import embed_all
from support.small_store import SIZE, edit_rows, small_preprocessing, small_store
from support.tiny_runs import config, quick_pretrain, quiet
from support.volumes import eye


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "prepared")


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    return quick_pretrain(config(steps=4), store, tmp_path_factory.mktemp("runs") / "run", echo=quiet)


def test_F15_preprocessing_travels_with_the_weights(run, store):
    """The prototype z-scored in pretraining and used quantiles in fine-tuning."""
    encoder = load_encoder(run)
    assert encoder.preprocessing == store.preprocessing == small_preprocessing()
    volume = eye()
    prepared = encoder.preprocessing(volume)
    np.testing.assert_array_equal(encoder.embed_tokens(volume), encoder.encode_grid(prepared.voxels[None])[0])


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


def test_random_init_is_the_run_before_its_first_update(run):
    trained, random = load_encoder(run), load_encoder(run, random_init=True)
    assert trained.key != random.key
    again = load_encoder(run, random_init=True)
    assert random.key == again.key


def test_key_changes_with_the_weights_and_the_budget(run):
    encoder = load_encoder(run)
    key = encoder.key
    with_other_budget = encoder.config.model_copy(
        update={"masks": encoder.config.masks.model_copy(update={"budget": 32})}
    )
    from dataclasses import replace

    assert replace(encoder, config=with_other_budget).key != key
    encoder.network.norm.bias.data[0] += 1e-3
    assert encoder.key != key


def test_embed_all_writes_the_encoder_and_both_baselines(run, store):
    import pyarrow.parquet as pq

    written = embed_all(run, store.path, echo=quiet)
    assert written == embedding_files(run) and [p.stem for p in written] == ["pretrained", "random_init", "histogram"]
    table = pq.read_table(written[0])
    assert table["acquisition"].to_pylist() == [row.acquisition for row in store.rows]
    said: list[str] = []
    embed_all(run, store.path, echo=said.append)
    assert any("already there" in line for line in said)


def test_embeddings_say_what_their_budget_left_out(store, tmp_path):
    """Half of the grid does not hold all tissue of these eyes; who lost how much, and what it did to the vectors, is
    kept with them."""
    from octfm.encoder.budget import COMPARED
    from octfm.encoder.embeddings import read_embeddings

    run = quick_pretrain(config(steps=2, masks={"budget": 24}), store, tmp_path / "run", echo=quiet)
    said: list[str] = []
    encoder = load_encoder(run)
    budget = read_embeddings(embed_store(encoder, store, tmp_path, echo=said.append)).metadata["budget"]
    assert (budget["kept"], budget["grid"]) == (24, 128) and 0.1 < budget["tissue_dropped"] < 0.9
    assert budget["by_scanner"].keys() == {"heidelberg_spectralis", "topcon_triton"} and budget[
        "by_diagnosis"
    ].keys() == {"healthy"}
    assert budget["by_diagnosis"]["healthy"]["volumes"] == len(store)
    assert (
        budget["full_grid"]["volumes"] == COMPARED
        and budget["full_grid"]["own"] > 0
        and budget["full_grid"]["offset"] > 0
    )
    assert "sees 24 of the 128 tokens" in said[0] and "of the tissue is left out" in said[0]
    whole = quick_pretrain(config(steps=2, masks={"budget": None}), store, tmp_path / "whole", echo=quiet)
    assert read_embeddings(embed_store(load_encoder(whole), store, tmp_path / "w", echo=quiet)).metadata["budget"] == {}


def test_what_old_embeddings_say_of_their_budget_is_not_believed(store, tmp_path):
    """They held against the budget what moves all vectors alike; the key of the vectors is the same as then."""
    from octfm.encoder.embeddings import read_embeddings

    encoder = load_encoder(quick_pretrain(config(steps=2, masks={"budget": 24}), store, tmp_path / "run", echo=quiet))
    file = embed_store(encoder, store, tmp_path, echo=quiet)
    fresh = read_embeddings(file)
    old = fresh.metadata["budget"] | {
        "full_grid": {"volumes": 12, "difference": 1.3},
        "sentence": "They differ by 1.30.",
    }
    rows = [{name: getattr(row, name) for name in (*WORDS, "participant_labels")} for row in store.rows]
    write_vectors(file, rows, fresh.vectors, fresh.metadata | {"budget": old}, store.preprocessing)
    said: list[str] = []
    again = read_embeddings(embed_store(encoder, store, tmp_path, echo=said.append))
    assert again.metadata == fresh.metadata and said == [fresh.metadata["budget"]["sentence"]]
    np.testing.assert_array_equal(again.vectors, fresh.vectors)
    embed_store(encoder, store, tmp_path, echo=said.append)
    assert "already there" in said[1], "once is enough"


def test_what_a_budget_does_to_all_vectors_alike_is_not_held_against_it():
    """A shift of all vectors is no loss, whatever its size; what differs from volume to volume is."""
    from octfm.encoder.budget import against_full_grid

    rng = np.random.default_rng(0)
    kept, shift, noise = rng.normal(size=(400, 16)), 7 * rng.normal(size=16), 0.1 * rng.normal(size=(400, 16))
    shifted, noisy = against_full_grid(kept + shift, kept, kept), against_full_grid(kept + shift + noise, kept, kept)
    assert shifted["own"] < 1e-12 and shifted["offset"] > 3
    np.testing.assert_allclose(noisy["own"], 0.1 / np.sqrt(2), rtol=0.1)  # two volumes are sqrt(2) deviations apart
    np.testing.assert_allclose(noisy["offset"], shifted["offset"], rtol=0.01)
    assert against_full_grid(kept[:1], kept[:1], kept) == {"offset": None, "own": None}


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


def test_no_checkpoint_is_one_clear_error(tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint found"):
        load_encoder(tmp_path)
    (tmp_path / "weights.pt").write_bytes(b"not a zip")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_encoder(tmp_path / "weights.pt")
