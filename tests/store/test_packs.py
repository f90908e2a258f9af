"""Volumes of unequal numbers of tokens that share every operator but attention: each gets the vector it has alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.encoder.encoder import Encoder, packed
from octfm.models.pooling import POOLS
from octfm.store.layout import Arrays
from support.small_store import prepared_eye, small_preprocessing
from support.untrained import untrained_encoder

assert_close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
"""For float32 vectors of order 1: products may round differently for another number of tokens."""


def volumes(count: int) -> Arrays:
    """With deeper and deeper tissue bands, so that each has more tissue tokens than the one before."""
    eyes = [prepared_eye(seed, small_preprocessing()) for seed in range(count)]
    band = np.stack([eye.band for eye in eyes])
    band[:, 1] += 8 * np.arange(count)[:, None, None] - 8
    return Arrays(np.stack([eye.voxels for eye in eyes]), band, np.stack([eye.valid for eye in eyes]))


def part(arrays: Arrays, places: Sequence[int]) -> Arrays:
    return Arrays(arrays.voxels[places], arrays.band[places], arrays.valid[places])


def bscans(arrays: Arrays) -> Arrays:
    """The first B-scan of each volume."""
    return Arrays(arrays.voxels[:, :1], arrays.band[:, :, :1], arrays.valid[:, :, :1])


@pytest.fixture
def passes(monkeypatch):
    """The numbers of volumes and of tokens that pass the network together, in turn."""
    seen, encode = [], Encoder._encode

    def counted(self, voxels, index, *lengths):
        seen.append((len(voxels), index.numel()))
        return encode(self, voxels, index, *lengths)

    monkeypatch.setattr(Encoder, "_encode", counted)
    return seen


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("own_zscore", [False, True])
@pytest.mark.parametrize("of_bscans", [False, True])
def test_a_vector_does_not_depend_on_the_volumes_beside_it(positions, own_zscore, of_bscans, passes, monkeypatch):
    model = {"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2, "positions": positions, "summary": 2}
    encoder = replace(untrained_encoder(model=model, objective={"name": "dense"}), own_zscore=own_zscore)
    arrays = volumes(5)
    if of_bscans:
        encoder, arrays = encoder.of_bscans(), bscans(arrays)
    counts = [len(index) for index in encoder.read_tokens(arrays)]
    assert len(set(counts)) > 3, "volumes have to differ"
    for pool in POOLS:
        passes.clear()
        pooling = encoder.pooling(pool)
        alone = pooling.embed_arrays(arrays)
        assert passes == [(1, count) for count in counts], "one by one on a CPU"
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(Encoder, "_most_tokens", lambda _: sum(counts))
            together, others = (pooling.embed_arrays(part(arrays, places)) for places in (range(5), [4, 0, 2]))
        assert [volumes for volumes, _ in passes[5:]] == [5, 3]
        assert together.dtype == np.float32 and together.shape == alone.shape == (5, pooling.vector_width)
        assert np.abs(alone[0] - alone[1]).max() > 0.01, "the tolerance has to tell volumes apart"
        assert_close(together, alone)
        assert_close(others, alone[[4, 0, 2]])


def test_a_pack_holds_a_bounded_number_of_tokens(passes, monkeypatch):
    encoder, arrays = untrained_encoder(), volumes(5)
    alone = encoder.embed_arrays(arrays)
    counts = [len(index) for index in encoder.read_tokens(arrays)]
    passes.clear()
    most = counts[0] + counts[1]
    monkeypatch.setattr(Encoder, "_most_tokens", lambda _: most)
    assert_close(encoder.embed_arrays(arrays), alone)
    assert passes[0] == (2, most) and sum(volumes for volumes, _ in passes) == 5
    assert all(tokens <= most or volumes == 1 for volumes, tokens in passes)
    assert encoder.embed_arrays(part(arrays, [])).shape == (0, encoder.vector_width)


@given(counts=st.lists(st.integers(1, 50), max_size=20), most=st.integers(0, 100))
@settings(max_examples=100)
def test_packs_are_full_and_keep_the_order(counts, most):
    packs = packed(counts, most)
    assert [place for pack in packs for place in range(len(counts))[pack]] == list(range(len(counts)))
    sums = [sum(counts[pack]) for pack in packs]
    assert all(tokens <= most or pack.stop - pack.start == 1 for pack, tokens in zip(packs, sums, strict=True))
    for pack, tokens in zip(packs[:-1], sums, strict=False):
        assert tokens + counts[pack.stop] > most, "the next volume would not have fitted"
