"""Augmentation moves voxels and surfaces together and never turns an eye upside down or into the other eye."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, uniform

from octfm.models.token_map import token_map
from octfm.models.vit3d import normalise
from octfm.pretraining import augment
from octfm.pretraining.augment import AugmentConfig
from octfm.pretraining.inputs import draw as draw_inputs
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.preflight.objective import HOST, views
from octfm.store.loader import Loader, microbatches
from support import ROOT
from support.small_store import small_store
from support.tiny_runs import config as run_config

EVERYTHING = AugmentConfig(
    lateral_shift_mm=0.4, lateral_scale=0.2, axial_scale=0.1, tilt_deg=8, mirror_unknown=True, noise=0.05, speckle=0.2
)
SPACING = (0.25, 0.02, 0.05)


def rngs(count, seed=0):
    return [np.random.default_rng((seed, i)) for i in range(count)]


@settings(max_examples=40)
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
            both = np.take(inside, range(1, inside.shape[along]), along) & np.take(
                inside, range(inside.shape[along] - 1), along
            )
            assert (step[both] >= 0).all(), f"axis {number} was turned round"


@settings(max_examples=25)
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


def test_identity_recolouring_is_plain_normalisation():
    patches = torch.arange(256, dtype=torch.uint8).reshape(1, 4, 64)
    one, index = torch.ones(1), torch.arange(4)[None]
    moves = augment.Moves(torch.zeros(1), None, gain_B=one, gamma_B=one, strength_2B=None, key_B=one.int())
    torch.testing.assert_close(augment.recoloured(patches, index, moves, 0.2, 0.3), normalise(patches, 0.2, 0.3))


def test_grey_values_are_raised_to_gamma_then_multiplied_by_gain_and_normalised():
    patches = torch.arange(256, dtype=torch.uint8).reshape(2, 4, 32)
    index, gamma, gain = torch.arange(4).expand(2, -1), torch.tensor([0.7, 1.4]), torch.tensor([1.3, 0.8])
    moves = augment.Moves(torch.zeros(2), None, gain_B=gain, gamma_B=gamma, strength_2B=None, key_B=gain.int())
    grey = np.arange(256).reshape(2, 4, 32) / 255
    expected = [((1.3 * grey[0] ** 0.7) - 0.2) / 0.3, ((0.8 * grey[1] ** 1.4) - 0.2) / 0.3]
    np.testing.assert_allclose(augment.recoloured(patches, index, moves, 0.2, 0.3), expected, atol=1e-5)


@pytest.mark.parametrize("config", [AugmentConfig(), EVERYTHING])
def test_labels_move_with_the_voxels_to_whole_classes_and_nothing_is_known_of_what_enters(config):
    labels = np.zeros((3, 2, 64, 32), np.uint8)
    labels[:, :, 20:] = 7
    labels[:, :, 30:] = 12
    drawn = replace(augment.draw(config, rngs(3)), shift=np.array([5, -5, 0]))
    moves = drawn.on_device(torch.from_numpy, *labels.shape[2:], SPACING)
    moved = augment.move_labels(torch.from_numpy(labels)[:, None], moves)[:, 0].numpy()
    assert set(np.unique(moved)) <= {0, 7, 12, 255}
    nothing = warp(np.full_like(labels, 255), drawn) == 0
    assert nothing.any() and (moved[nothing] == 255).all()
    for name in (7, 12):  # as the picture of the class moves, but for voxels that it shares with others
        share = warp(np.where(labels == name, 255, 0).astype(np.uint8), drawn)
        assert (moved[share > 230] == name).all() and not (moved[share < 25] == name).any()


def warp(voxels, drawn):
    """uint8 [B, D, H, W] through the device path."""
    moves = drawn.on_device(torch.from_numpy, *voxels.shape[2:], SPACING)
    return augment.move(torch.from_numpy(voxels)[:, None], moves)[:, 0].numpy()


def tilted_band(rng, d=3, h=96, w=32):
    """Surfaces [1, 2, D, W] of a curved, tilted band, and of an image without its first columns; with its picture
    uint8 [1, D, H, W]."""
    x = np.arange(w) + 0.5
    top = h / 2 - 8 + rng.uniform(-3, 3) + rng.uniform(-0.2, 0.2) * (x - w / 2) + 0.01 * (x - w / 2) ** 2
    band = np.broadcast_to(np.stack([top, top + rng.uniform(14, 22)])[None, :, None], (1, 2, d, w)).copy()
    valid = np.zeros((1, 2, d, w), np.int16)
    valid[:, 1] = h
    first = int(rng.integers(0, 6))
    band[..., :first] = valid[..., :first] = 0
    rows = np.arange(h)[None, None, :, None]
    # The share of every voxel that lies in the band.
    inside = np.clip(np.minimum(band[:, 1][:, :, None], rows + 1) - np.maximum(band[:, 0][:, :, None], rows), 0, 1)
    return band.astype(np.float32), valid, np.round(200 * inside).astype(np.uint8)


@pytest.mark.parametrize("mirrored", [False, True])
def test_movements_are_those_that_are_set_in_millimetres_rows_and_degrees(mirrored):
    """A blob at a known place of a volume whose pixels are not square is found where the definition puts it."""
    (h, w), (row, column) = (160, 100), (90.5, 40.5)  # from the upper left corner, in voxels
    _, dy, dx = SPACING
    y, x = np.mgrid[:h, :w] + 0.5
    blob = np.round(250 * np.exp(-((y - row) ** 2 + (x - column) ** 2) / 18)).astype(np.uint8)[None, None]
    shift, lateral_mm, wider, taller, slope = 6, 0.5, 1.2, 1.1, np.tan(np.deg2rad(5))
    config = AugmentConfig(axial_shift=8, lateral_shift_mm=1, lateral_scale=0.5, axial_scale=0.5, tilt_deg=9)
    drawn = augment.Augmentation.of(config, [(shift, 1, 1, lateral_mm, wider, taller, slope, mirrored, 0, 0, 0)])
    moved = warp(blob, drawn)[0, 0].astype(float)
    found = (moved * y).sum() / moved.sum(), (moved * x).sum() / moved.sum()
    # About the middle of the B-scan, in millimetres: scaled, mirrored, moved, then sheared by where it has come to lie.
    right_mm = (-1 if mirrored else 1) * wider * (column - w / 2) * dx + lateral_mm
    down_mm = taller * (row - h / 2) * dy + shift * dy + slope * right_mm
    assert found == pytest.approx((h / 2 + down_mm / dy, w / 2 + right_mm / dx), abs=0.05)


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), scale=st.floats(0, 0.5), tilt=st.floats(0, 20))
def test_F13_no_setting_flips_the_retina_or_an_eye_of_known_side(seed, scale, tilt):
    """Vitreous stays above choroid in every A-scan, nasal stays where it is; an eye of unknown laterality alone may
    be mirrored."""
    config = EVERYTHING.model_copy(update={"lateral_scale": scale, "axial_scale": scale, "tilt_deg": tilt})
    laterality = ("R", "L", None, "R", "L", None)
    drawn = augment.draw(config, rngs(6, seed), laterality)
    known = np.array([side is not None for side in laterality])
    assert not drawn.mirrored[known].any()
    d, h, w = 2, 64, 32
    down = np.broadcast_to(np.arange(1, h + 1, dtype=np.uint8)[:, None], (6, d, h, w))
    right = np.broadcast_to(np.arange(1, w + 1, dtype=np.uint8) * 7, (6, d, h, w))
    for voxels, axis, sign in ((down, 2, np.ones(6)), (right, 3, np.where(drawn.mirrored, -1, 1))):
        moved = warp(np.ascontiguousarray(voxels), drawn).astype(int)
        # Voxels at the edge are blended with the padding outside.
        whole = warp(np.full_like(voxels, 255), drawn) == 255
        both = np.take(whole, range(1, whole.shape[axis]), axis) & np.take(whole, range(whole.shape[axis] - 1), axis)
        assert both.any((1, 2, 3)).all()
        assert (np.where(both, np.diff(moved, axis=axis), 0) * sign[:, None, None, None] >= 0).all()


def test_what_is_drawn_has_the_ranges_and_the_distributions_that_are_set():
    config = AugmentConfig(axial_shift=3, contrast=0.3, gamma=0.5, lateral_shift_mm=0.4, lateral_scale=0.2,
                           axial_scale=0.1, tilt_deg=8, noise=0.05, speckle=0.2)  # fmt: skip
    drawn = augment.draw(config, rngs(600))
    slope = np.tan(np.deg2rad(8))
    for values, low, high in (
        (drawn.gain, 0.7, 1.3), (np.log(drawn.gamma), -np.log(1.5), np.log(1.5)), (drawn.lateral_mm, -0.4, 0.4),
        (np.log(drawn.lateral_scale), -np.log(1.2), np.log(1.2)), (np.log(drawn.axial_scale), -np.log(1.1), np.log(1.1)),
        (drawn.slope, -slope, slope), (drawn.noise, 0, 0.05), (drawn.speckle, 0, 0.2),
    ):  # fmt: skip
        assert kstest(values, uniform(low, high - low).cdf).pvalue > 1e-3
    assert set(drawn.shift) == set(range(-3, 4)) and len(set(drawn.key)) == 600


def test_half_of_the_unknown_eyes_are_mirrored_and_only_on_request():
    unknown = [None] * 200
    assert 70 < augment.draw(EVERYTHING, rngs(200), unknown).mirrored.sum() < 130
    assert not augment.draw(AugmentConfig(), rngs(200), unknown).mirrored.any()


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_the_token_map_follows_an_affine_too(seed):
    """Tissue by the moved surfaces is tissue in the moved picture, padding by the moved field is where nothing was
    imaged."""
    rng = np.random.default_rng(seed)
    band, valid, picture = tilted_band(rng)
    drawn = augment.draw(EVERYTHING, rngs(1, seed), (None,))
    size, patch = picture.shape[1:], (1, 8, 4)
    moved_band, moved_valid = drawn.surfaces(band, valid, size[1], SPACING)
    tokens = token_map(moved_band, moved_valid, size, patch)[0]
    imaged = np.where(np.arange(size[1])[None, None, :, None] < valid[:, 1][:, :, None], 255, 0).astype(np.uint8)

    def by_token(voxels):
        return warp(voxels, drawn)[0].reshape(size[0], 12, 8, 8, 4).swapaxes(2, 3).reshape(size[0], 12, 8, -1) / 255

    tissue, field = by_token(picture).mean(-1) * 255 / 200, by_token(imaged)
    edge, field = ((field > 0.02) & (field < 0.98)).any(-1), field.mean(-1)
    # Interpolation blurs a surface by a fraction of a row, and the edge of the field by a column, which surfaces cannot
    # say.
    sure = (np.abs(tissue - 0.25) > 0.08) & (np.abs(field - 0.5) > 0.1) & ~edge
    assert sure.mean() > 0.5
    np.testing.assert_array_equal((tokens == 2)[sure], ((tissue >= 0.25) & (field >= 0.5))[sure])
    np.testing.assert_array_equal((tokens == 0)[sure], (field < 0.5)[sure])


def test_an_affine_that_moves_nothing_gives_back_every_voxel():
    voxels = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 48), dtype=np.uint8)
    drawn = augment.draw(EVERYTHING, rngs(2))
    nothing = {name: np.zeros(2) for name in ("shift", "lateral_mm", "slope")} | {
        n: np.ones(2) for n in ("lateral_scale", "axial_scale")
    }
    np.testing.assert_array_equal(warp(voxels, replace(drawn, **nothing)), voxels)


def test_whole_rows_are_moved_alike_with_and_without_interpolation():
    voxels = np.random.default_rng(0).integers(0, 256, (2, 3, 96, 48), dtype=np.uint8)
    drawn = augment.draw(AugmentConfig(lateral_shift_mm=1e-9), rngs(2))
    plain = augment.draw(AugmentConfig(), rngs(2))
    np.testing.assert_array_equal(drawn.shift, plain.shift)
    np.testing.assert_array_equal(warp(voxels, drawn), warp(voxels, plain))


def test_grain_is_white_and_of_unit_variance():
    grain = augment.grain_of(torch.tensor([5, 6], dtype=torch.int32), torch.arange(50).expand(2, -1), 1024).numpy()
    assert abs(grain.mean()) < 0.01 and abs(grain.std() - 1) < 0.01 and np.abs(grain).max() < 3.5
    for a, b in (
        (grain[0], grain[1]),
        (grain[..., 1:], grain[..., :-1]),
        (grain[:, 1:], grain[:, :-1]),
        (grain[..., 16:], grain[..., :-16]),
    ):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_grain_belongs_to_a_voxel_of_a_volume_whoever_else_is_looked_at():
    key, index = torch.tensor([5, 6], dtype=torch.int32), torch.stack((torch.arange(50), torch.randperm(50)))
    grain = augment.grain_of(key, index, 16)
    torch.testing.assert_close(augment.grain_of(key[1:], index[1:, 7:9], 16), grain[1:, 7:9], rtol=0, atol=0)


def test_speckle_leaves_black_alone_and_noise_does_not():
    raw = torch.tensor([0, 128, 255], dtype=torch.uint8)[:, None].expand(1, 3, 4096)
    drawn = augment.draw(AugmentConfig(contrast=0, gamma=0, noise=0.05, speckle=0.2), rngs(1))
    for noise, speckle in ((0.0, 0.2), (0.05, 0.0), (0.03, 0.04)):
        strengths = replace(drawn, noise=np.array([noise], np.float32), speckle=np.array([speckle], np.float32))
        patches = augment.recoloured(
            raw, torch.arange(3)[None], strengths.on_device(torch.from_numpy, 8, 8, SPACING), 0.0, 1.0
        )
        assert patches.min() >= 0
        for level, found in zip((0.0, 128 / 255, 1.0), patches[0], strict=True):
            if level:
                assert found.std().item() == pytest.approx((noise**2 + (speckle * level) ** 2) ** 0.5, rel=0.05)
            else:
                assert (found.std() > 0) == (noise > 0)


def test_a_step_sees_the_same_augmented_volumes_however_they_are_shared(tmp_path):
    """One process with the global batch, micro-batches of one, two ranks, drawn for in the loader's thread or not: bit
    for bit the same patches, masks and tissue."""
    store = small_store(tmp_path / "store")
    config = run_config(augment=EVERYTHING.model_dump() | {"axial_shift": 3}, masks={"large_blocks": (0.5, 0.7, 0.3)})
    rows = np.arange(8)

    def parts(world, size, ahead):
        own = partial(draw_inputs, config, store.preprocessing) if ahead else None
        for rank in range(world):
            with Loader(store, rows, 4, config.seed, rank, world, 0, draw=own) as loader:
                for part in microbatches(loader.batches(3), size):
                    assert (part.drawn is not None) == ahead
                    views = make_inputs(config, store.preprocessing, HOST, part).views
                    assert len(views) == 2, "two sets of masks"
                    yield tuple(
                        x
                        for v in views
                        for x in (*v[:2], v.index.kept, v.index.context, v.index.target, v.index.tissue)
                    )

    whole = next(parts(1, 4, False))
    assert not torch.equal(whole[0], whole[1])
    for world, size, ahead in ((1, 1, False), (2, 2, False), (4, 1, True), (1, 4, True), (1, 2, True)):
        for expected, found in zip(whole, zip(*parts(world, size, ahead), strict=True), strict=True):
            assert torch.equal(expected, torch.cat(found))


def test_the_doctor_finds_noisy_views_at_the_same_places(tmp_path):
    store = small_store(tmp_path / "store")
    config = run_config(augment=EVERYTHING.model_dump() | {"axial_shift": 3})
    assert views(config, store, np.arange(4)).status == "PASS"


def test_the_settings_in_the_guide_are_settings():
    guide = (ROOT / "docs" / "guide" / "training.md").read_text()
    settings_ = yaml.safe_load(guide.split("```yaml\n")[1].split("```")[0])["augment"]
    config = AugmentConfig.model_validate(settings_)
    assert config.warps and config.is_noisy and not AugmentConfig().warps and not AugmentConfig().is_noisy
    assert settings_.keys() == AugmentConfig.model_fields.keys() - {"axial_shift", "contrast", "gamma"}, (
        "every one that is off by default"
    )
