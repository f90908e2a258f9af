"""What version 0.1 wrote is still read: catalog, store, run, checkpoint, embeddings, export and fine-tuned model.

tests/fixtures/octfm_0_1.zip was written once, at commit 6edcedc: 14 phantom participants of seed 0 at [2, 32, 32],
four updates of a V-JEPA 2 12 channels wide, two epochs of fine-tuning, and the vectors that its encoder gave the
first three volumes.
"""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import octfm
from octfm.catalog.catalog import Catalog
from octfm.encoder.embeddings import read_embeddings
from octfm.models.token_map import PADDING, TISSUE, token_map
from octfm.pretraining.settings import load_config
from octfm.run import checkpoint, checkpoint_files
from octfm.run.tracking import read_metrics
from octfm.store.store import Store
from octfm.tasks.predictions import read_predictions
from support import FIXTURES


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """The artefacts, in the working directory: the fine-tuned model names its encoder by a relative path."""
    with zipfile.ZipFile(FIXTURES / "octfm_0_1.zip") as archive:
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_catalog_and_store_of_0_1_are_read(old):
    catalog, store = Catalog.load(old / "catalog"), Store.open(old / "store")
    assert store.verify() == len(store) == 32
    assert {row.acquisition for row in store.rows} <= {row.sop_instance_uid for row in catalog.acquisitions}


@pytest.mark.parametrize("source", ["run", "export"])
def test_encoders_of_0_1_give_the_vectors_they_gave(old, source):
    """0.1 encoded all tokens of the image and averaged those of tissue; today only tissue is encoded."""
    arrays, encoder = Store.open(old / "store").read([0, 1, 2]), octfm.load_encoder(str(old / source))
    before, vectors = np.load(old / "vectors.npy"), encoder.embed_arrays(arrays)
    maps = token_map(arrays.band, arrays.valid, encoder.preprocessing.image_size, encoder.config.model.patch_size)
    only_tissue = 0
    for place, own in enumerate(maps.reshape(3, -1)):
        image = np.flatnonzero(own != PADDING)
        with torch.no_grad():
            voxels = torch.from_numpy(arrays.voxels[place : place + 1])
            tokens = encoder.network.forward_features(voxels, torch.from_numpy(image)[None])[0].numpy()
        as_before = tokens[own[image] == TISSUE].mean(0)
        np.testing.assert_allclose(as_before, before[place], rtol=1e-4, atol=1e-5)
        if (own[image] == TISSUE).all():
            only_tissue += 1
            np.testing.assert_allclose(vectors[place], before[place], rtol=1e-4, atol=1e-5)
    assert only_tissue == 2


def test_results_of_0_1_are_read(old):
    embeddings = read_embeddings(old / "run" / "embeddings" / "pretrained.parquet")
    store = Store.open(old / "store")
    first = embeddings.vectors[embeddings.acquisition == store.rows[0].acquisition][0]
    np.testing.assert_allclose(first, np.load(old / "vectors.npy")[0], rtol=1e-4, atol=1e-5)
    predictions = read_predictions(old / "tuned" / "predictions.parquet")
    assert predictions.facts["target"] == "study_group"
    assert set(predictions.of_acquisition) <= {row.acquisition for row in store.rows}
    assert octfm.load_tuned(old / "tuned").encoder.fingerprint == store.fingerprint


def test_a_run_of_0_1_goes_on(old):
    """The run had reached its four updates; asked for ten, it makes the six that are missing and keeps what it had
    logged."""
    before = list(read_metrics(old / "run" / "metrics.jsonl"))
    octfm.pretrain(
        load_config(old / "run" / "config.yaml", ["steps=10"]), Store.open(old / "store"), out="run", override=True
    )
    after = list(read_metrics(old / "run" / "metrics.jsonl"))
    assert str(after[: len(before)]) == str(before), "NaN is not equal to itself, its text is"
    assert [row["what"] for row in after if row["kind"] == "incident"] == []
    assert max(row["step"] for row in after) == 9, "rows count steps from 0"
    newest = checkpoint.load(checkpoint_files.steps(old / "run" / "checkpoints")[-1])
    assert newest["step"] == 10
