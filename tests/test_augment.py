"""Augmentation moves voxels and surfaces together and never turns an eye upside down or into the other eye."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.masks import token_map
from octfm.training import augment
from octfm.training.augment import AugmentConfig


def rngs(count, seed=0):
    return [np.random.default_rng((seed, i)) for i in range(count)]


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10_000), reach=st.integers(0, 20))
def test_F13_augmentation_never_flips_an_axis(seed, reach):
    """The prototype flipped D, H and W together. Order along every axis is kept, whatever is drawn."""
    moves = augment.draw(AugmentConfig(axial_shift=reach), rngs(3, seed))
    assert (np.abs(moves.shift) <= reach).all() and (moves.gain > 0).all() and (moves.gamma > 0).all()
    d, h, w = 4, 64, 6
    z, y, x = np.meshgrid(np.arange(d), np.arange(h), np.arange(w), indexing="ij")
    for axis in (z, y, x):
        voxels = torch.from_numpy(np.stack([axis + 1] * 3)[:, None].astype(np.uint8))
        moved = augment.shift_rows(voxels, torch.from_numpy(moves.shift))[:, 0].numpy().astype(int)
        inside = moved > 0
        for number, along in enumerate((1, 2, 3)):
            step = np.diff(moved, axis=along)
            both = np.take(inside, range(1, inside.shape[along]), along) & np.take(inside, range(inside.shape[along] - 1), along)
            assert (step[both] >= 0).all(), f"axis {number} was turned round"


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_surfaces_follow_the_voxels(seed):
    """The token map after a shift equals the map of the shifted picture."""
    rng = np.random.default_rng(seed)
    d, h, w = 2, 64, 8
    top = rng.integers(20, 30, (1, d, w))
    band = np.stack([top, top + 12], 1).astype(np.float32)
    valid = np.stack([np.zeros((1, d, w)), np.full((1, d, w), h)], 1).astype(np.float32)
    rows = np.arange(h)[None, None, :, None]
    picture = ((rows >= band[:, 0][:, :, None]) & (rows < band[:, 1][:, :, None])).astype(np.uint8)
    shift = rng.integers(-15, 16, 1)
    moved = augment.shift_rows(torch.from_numpy(picture)[:, None], torch.from_numpy(shift))[0, 0].numpy()
    shifted_band, shifted_valid = (augment.shift_surfaces(s, shift, h) for s in (band, valid))
    tissue = token_map(shifted_band, shifted_valid, (d, h, w), (1, 4, 2))[0] == 2
    np.testing.assert_array_equal(tissue, moved.reshape(d, 16, 4, 4, 2).mean((2, 4)) >= 0.25)


def test_the_same_generators_draw_the_same_augmentation():
    a, b = (augment.draw(AugmentConfig(), rngs(5, 3)) for _ in range(2))
    for name in ("shift", "gain", "gamma"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_identity_recolouring_is_plain_normalisation():
    patches = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 64)
    one = torch.ones(1)
    torch.testing.assert_close(augment.recolour(patches, one, one, 0.2, 0.3), augment.normalise(patches, 0.2, 0.3))
