"""Vectors of a volume: which tokens they are made of, and who says so."""

import json
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.encoder.embed import embed_store
from octfm.encoder.encoder import load_encoder
from octfm.errors import ConfigError
from octfm.models.pooling import EXTREMES, TAILS, TokenPool, extremes, mean, pooled, width_of
from support.examples import examples
from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, quiet


@given(seed=st.integers(0, 2**31), volumes=st.integers(1, 4), tokens=st.integers(1, 40), width=st.integers(1, 6))
@settings(max_examples=examples(60))
def test_the_mean_and_extremes_are_those_of_valid_tokens_and_of_their_sorted_ends(seed, volumes, tokens, width):
    rng = np.random.default_rng(seed)
    x, counts = rng.normal(size=(volumes, tokens, width)), rng.random((volumes, tokens)) < 0.6
    counts[:, rng.integers(tokens)] = True
    found = extremes(torch.from_numpy(x), torch.from_numpy(counts)).numpy()
    assert found.shape == (volumes, width_of("extremes", width))
    # Float32 while gradients are disabled is sorted by NumPy, anything else by torch.
    single = torch.from_numpy(x.astype(np.float32))
    with torch.no_grad():
        by_numpy = extremes(single, torch.from_numpy(counts))
    assert torch.equal(by_numpy, extremes(single, torch.from_numpy(counts)))
    each = torch.func.vmap(lambda own, of: extremes(own[None], of[None])[0])
    assert torch.equal(by_numpy, each(single, torch.from_numpy(counts)))
    means = pooled(torch.from_numpy(x), torch.from_numpy(counts), "mean")
    np.testing.assert_allclose(means, [own[of].mean(0) for own, of in zip(x, counts, strict=True)], atol=1e-12)
    for row, own, of in zip(found, x, counts, strict=True):
        ordered = np.sort(own[of], axis=0)
        ends = int(np.ceil(len(ordered) * EXTREMES - 1e-9))
        np.testing.assert_allclose(row, np.concatenate([ordered[-ends:].mean(0), ordered[:ends].mean(0)]), atol=1e-12)


@given(seed=st.integers(0, 2**31), pool=st.sampled_from(get_args(TokenPool)))
@settings(max_examples=30)
def test_order_and_what_does_not_count_change_nothing(seed, pool):
    rng = np.random.default_rng(seed)
    x, counts = torch.from_numpy(rng.normal(size=(2, 20, 3))), torch.from_numpy(rng.random((2, 20)) < 0.5)
    counts[:, 0] = True
    shuffled = torch.from_numpy(rng.permutation(20))
    garbage = torch.where(counts.unsqueeze(-1), x, torch.from_numpy(rng.normal(size=x.shape) * 1e6))
    expected = pooled(x, counts, pool)
    torch.testing.assert_close(pooled(x[:, shuffled], counts[:, shuffled], pool), expected)
    if pool == "extremes":  # the mean multiplies by zero
        assert torch.equal(pooled(garbage, counts, pool), expected)


@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 250))
@settings(max_examples=30)
def test_tails_are_the_mean_and_extremes_of_several_shares(seed, tokens):
    rng = np.random.default_rng(seed)
    x, counts = torch.from_numpy(rng.normal(size=(2, tokens, 3))), torch.from_numpy(rng.random((2, tokens)) < 0.6)
    counts[:, 0] = True
    found = pooled(x, counts, "tails")
    assert found.shape == (2, width_of("tails", 3))
    parts = [mean(x, counts), *(extremes(x, counts, [share]) for share in TAILS)]
    assert torch.equal(found, torch.cat(parts, 1)) and torch.equal(parts[1], extremes(x, counts))


def test_a_lesion_on_few_tokens_moves_the_extremes_further_than_the_mean():
    rng = np.random.default_rng(0)
    healthy, everyone = torch.from_numpy(rng.normal(size=(64, 100, 8))), torch.ones(64, 100, dtype=torch.bool)
    ill = healthy.clone()
    ill[:, :5, 0] += 4
    shift = {
        f: (f(ill, everyone) - f(healthy, everyone))[:, 0].mean() / f(healthy, everyone)[:, 0].std()
        for f in (mean, extremes)
    }
    assert shift[extremes] > 1.5 * shift[mean]


@pytest.fixture(scope="module")
def run(tmp_path_factory):

    folder = tmp_path_factory.mktemp("pooling")
    store = small_store(folder / "prepared")
    return quick_pretrain(config(steps=2), store, folder / "run", echo=quiet), store


def test_the_pool_is_a_run_setting_and_an_embed_option_with_its_own_key(run, tmp_path):
    folder, store = run
    encoder = load_encoder(folder)
    other = encoder.pooling("extremes")
    assert (other.width, other.vector_width) == (encoder.width, 2 * encoder.width)
    assert other.key == encoder.key, "the tokens are the same"
    assert (
        other.vector_key != encoder.vector_key == encoder.pooling("mean").vector_key == encoder.pooling(None).vector_key
    )
    arrays = store.read([0, 1])
    for place, index in enumerate(encoder.read_tokens(arrays)):
        tokens = torch.from_numpy(encoder.some_tokens(arrays.voxels[place : place + 1], index[None]))
        expected = extremes(tokens, torch.ones(tokens.shape[:2])).numpy()
        np.testing.assert_array_equal(other.embed_arrays(arrays)[place], expected[0])
    for made in (encoder, other):
        path = embed_store(made, store, tmp_path, echo=quiet)  # the second is not taken for the first
        table = pq.read_table(path)
        assert len(table["vector"][0]) == made.vector_width
        said = json.loads(table.schema.metadata[b"octfm"])
        assert said["pool"] == made.config.objective.pool and said["readout"] == made.readout


def test_an_unknown_pool_is_refused():
    with pytest.raises(ConfigError, match="pool"):
        config(objective={"pool": "max"})
