"""Masks: fixed sizes, disjoint, no padding, fair to every B-scan, a function of their generators."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.errors import ConfigError, StoreError
from octfm.models.token_map import BACKGROUND, PADDING, TISSUE, dropped_by, tissue_dropped, token_grid, token_map
from octfm.pretraining.masks import MaskConfig, same_tokens, sample_masks, select_tokens

GRID = (8, 12, 10)


def retina(volumes=4, seed=0):
    """Token maps with a band of tissue, background around it and a padded edge."""
    rng = np.random.default_rng(seed)
    maps = np.full((volumes, *GRID), BACKGROUND, np.uint8)
    for m in maps:
        top = int(rng.integers(1, GRID[1] - 4))
        m[:, top : top + 3] = TISSUE
    maps[:, :, :, -1] = PADDING
    return maps


def rngs(count, seed=0):
    return [np.random.default_rng((seed, i)) for i in range(count)]


configs = st.builds(
    MaskConfig,
    budget=st.sampled_from([None, 8, 100, 300]),
    mask_ratio=st.floats(0.1, 0.6),
    context_ratio=st.floats(0.1, 0.4),
    block_area=st.floats(0.02, 1.0),
    plane=st.sampled_from(["bscan", "enface"]),
)


@settings(max_examples=60)
@given(config=configs, seed=st.integers(0, 10_000))
def test_masks_are_disjoint_fixed_in_size_and_free_of_padding(config, seed):
    maps = retina(seed=seed)
    masks = sample_masks(config, maps, rngs(len(maps), seed))
    kept, context, target = config.counts(GRID)
    assert masks.kept.shape == (4, kept) and masks.context.shape == (4, context) and masks.target.shape == (4, target)
    for m, k, c, t in zip(maps, masks.kept, masks.context, masks.target, strict=True):
        assert not np.intersect1d(c, t).size
        assert np.isin(c, k).all() and np.isin(t, k).all()
        assert not (m.ravel()[k] == PADDING).any()


def test_F4_masks_are_token_indices_never_voxels():
    """The prototype built masks at voxel resolution inside its transforms."""
    masks = sample_masks(MaskConfig(budget=64), retina(), rngs(4))
    assert masks.target.ndim == 2 and masks.target.dtype == np.int64 and masks.target.max() < np.prod(GRID)


def test_a_volume_has_the_same_masks_in_any_batch():
    """So that any number of ranks trains on the same masks."""
    maps = retina()
    whole = sample_masks(MaskConfig(budget=200), maps, rngs(4))
    alone = sample_masks(MaskConfig(budget=200), maps[2:3], rngs(4)[2:3])
    np.testing.assert_array_equal(whole.target[2], alone.target[0])


@pytest.mark.parametrize("plane", ["bscan", "enface"])
def test_every_bscan_is_equally_likely_to_be_target(plane):
    """Truncating sorted indices, as the reference does, starves the last B-scans."""
    grid = (16, 12, 12)
    maps = np.full((300, *grid), BACKGROUND, np.uint8)
    maps[:, 4:8] = TISSUE
    maps[:, :, 4:8] = TISSUE
    masks = sample_masks(MaskConfig(budget=None, plane=plane), maps, rngs(300))
    frequency = np.bincount(masks.target.ravel() // (12 * 12), minlength=16) / masks.target.size
    np.testing.assert_allclose(frequency, 1 / 16, rtol=0.1)


@pytest.mark.parametrize("plane, through", [("bscan", 0), ("enface", 1)])
def test_a_target_is_hidden_through_the_whole_axis_that_its_plane_leaves_out(plane, through):
    """So that it cannot be copied from its neighbours of the next B-scan, or above and below it."""
    maps = np.full((20, *GRID), TISSUE, np.uint8)
    masks = sample_masks(MaskConfig(budget=None, mask_ratio=0.3, context_ratio=0.2, plane=plane), maps, rngs(20))
    for context, target in zip(masks.context, masks.target, strict=True):
        seen, hidden = (np.isin(np.arange(maps[0].size), own).reshape(GRID) for own in (context, target))
        assert not (seen.any(through) & hidden.any(through)).any()


def test_tissue_comes_first_and_surplus_is_dropped_at_random():
    maps = retina(1)[0]
    tissue = int((maps == TISSUE).sum())
    chosen = select_tokens(maps, tissue + 20, np.random.default_rng(0))
    assert (maps.ravel()[chosen] == TISSUE).sum() == tissue
    draws = [select_tokens(maps, tissue // 2, np.random.default_rng(i)) for i in range(400)]
    frequency = np.bincount(np.concatenate(draws), minlength=maps.size)[maps.ravel() == TISSUE] / 400
    assert frequency.min() > 0.35 and frequency.max() < 0.65, "dropped tissue is not uniform"


def test_too_few_image_tokens_are_repeated_and_counted():
    maps = np.full((1, *GRID), PADDING, np.uint8)
    maps[0, 0, 0, :6] = TISSUE
    masks = sample_masks(MaskConfig(budget=64), maps, rngs(1))
    assert masks.repeated[0] == pytest.approx(58 / 64)
    assert not np.intersect1d(masks.context, masks.target).size


def test_a_small_volume_hides_its_share_and_shows_the_rest():
    """Its few different tokens are repeated, and the counts that are the same for every volume must not hide all."""
    maps = np.full((1, *GRID), PADDING, np.uint8)
    maps[0, 0, 0, :5] = maps[0, 2, 3, :5] = TISSUE
    masks = sample_masks(MaskConfig(budget=64, mask_ratio=0.6, context_ratio=0.35), maps, rngs(1))
    assert (len(set(masks.target[0])), len(set(masks.context[0]))) == (6, 4)


@pytest.mark.parametrize(("aspect", "rows", "columns"), [(2.25, 10, 4), (1 / 2.25, 4, 10), (1.0, 6, 6)])
def test_a_block_has_the_area_and_the_height_over_width_that_are_set(aspect, rows, columns):
    """As many targets as one column of a block, so that there is never a second block; 16 % of 16 x 16 tokens."""
    maps = np.full((1, 8, 16, 16), TISSUE, np.uint8)
    config = MaskConfig(
        budget=None, plane="bscan", aspect=(aspect, aspect), block_area=0.16, mask_ratio=8 * rows / 2048
    )
    spans = []
    for seed in range(40):
        _, row, column = np.unravel_index(sample_masks(config, maps, rngs(1, seed)).target[0], maps.shape[1:])
        spans.append((np.ptp(row) + 1, np.ptp(column) + 1))
    assert tuple(np.max(spans, axis=0)) == (rows, columns)


@pytest.mark.parametrize("plane", ["bscan", "enface"])
def test_thin_tissue_and_small_blocks_still_find_enough_targets(plane):
    """Blocks around tissue alone would never cover the background that a full budget keeps."""
    maps = np.full((1, 4, 64, 8), BACKGROUND, np.uint8)
    maps[:, :, 30] = TISSUE
    masks = sample_masks(MaskConfig(budget=None, block_area=0.02, plane=plane), maps, rngs(1))
    assert masks.target.shape == (1, int(0.6 * maps.size)) and not np.intersect1d(masks.context, masks.target).size


def test_a_volume_of_one_image_token_is_refused():
    maps = np.full((1, *GRID), PADDING, np.uint8)
    maps[0, 1, 1, 1] = TISSUE
    with pytest.raises(StoreError, match="two or more tokens that hold image, found one"):
        sample_masks(MaskConfig(budget=8), maps, rngs(1))


def test_targets_prefer_tissue():
    masks = sample_masks(MaskConfig(budget=240), retina(), rngs(4))
    assert masks.dead.mean() < 0.2


def test_where_finds_grid_indices_among_the_kept():
    masks = sample_masks(MaskConfig(budget=100), retina(), rngs(4))
    np.testing.assert_array_equal(np.take_along_axis(masks.kept, masks.where(masks.target), 1), masks.target)


@settings(max_examples=40)
@given(top=st.floats(0, 60), thickness=st.floats(0, 60), first=st.integers(0, 20), seed=st.integers(0, 1000))
def test_token_map_equals_counting_voxels(top, thickness, first, seed):
    """Against the definition: at least 25 % of a token's voxels inside the band, padding below half inside the
    image."""
    rng = np.random.default_rng(seed)
    size, patch = (4, 64, 8), (2, 8, 4)
    upper = np.round(top + rng.uniform(-3, 3, (4, 8)))
    band = np.stack([upper, upper + round(thickness)]).astype(np.float32)
    valid = np.stack([np.full((4, 8), first), np.full((4, 8), 64)]).astype(np.int16)
    rows = np.arange(64)[None, :, None]
    image = (rows >= valid[0][:, None]) & (rows < valid[1][:, None])
    inside = (rows >= band[0][:, None]) & (rows < band[1][:, None]) & image

    def share(mask):
        return mask.reshape(2, 2, 8, 8, 2, 4).mean((1, 3, 5))

    expected = np.where(share(image) < 0.5, PADDING, np.where(share(inside) >= 0.25, TISSUE, BACKGROUND))
    np.testing.assert_array_equal(token_map(band, valid, size, patch), expected)


@pytest.mark.parametrize(
    ("bscans", "columns"), [(slice(7, 9), slice(None)), (slice(6, 8), slice(20, 44)), (slice(15, 16), slice(31, 33))]
)
def test_a_scan_narrower_than_a_token_has_tokens_and_changes_no_other(bscans, columns):
    """Five lines 0.05 mm apart are a volume to a clinic: it must neither stop a run nor be taken for background."""
    band, valid = np.zeros((2, 2, 16, 64), np.float32), np.zeros((2, 2, 16, 64), np.float32)
    valid[:, 1], band[:, 0], band[:, 1] = 96, 30, 66
    alone = token_map(band[:1], valid[:1], (16, 96, 64), (4, 16, 16))
    inside = np.zeros((16, 64), bool)
    inside[bscans, columns] = True
    valid[1, 1][~inside] = 0
    both = token_map(band, valid, (16, 96, 64), (4, 16, 16))
    np.testing.assert_array_equal(both[0], alone[0])
    touched = inside.reshape(4, 4, 4, 16).any((1, 3))[:, None, :]
    assert (
        (both[1] != PADDING).sum() >= 2
        and (both[1] == TISSUE).any()
        and not (both[1] != PADDING)[np.broadcast_to(~touched, (4, 6, 4))].any()
    )
    sample_masks(MaskConfig(budget=40), both, rngs(2))


def test_a_volume_without_image_is_one_clear_error():
    with pytest.raises(StoreError, match="two or more tokens that hold image, found none"):
        sample_masks(MaskConfig(budget=40), np.zeros((1, 4, 4, 4), np.uint8), rngs(1))
    with pytest.raises(StoreError, match=r"acquisition second: .* found none"):
        same_tokens(np.stack([retina(1)[0], np.full(GRID, PADDING, np.uint8)]), 40, ("first", "second"))


def test_indivisible_volume_is_refused():
    with pytest.raises(ValueError, match=r"\(60, 256, 256\) is not divisible by patch_size \(4, 16, 24\)"):
        token_grid((60, 256, 256), (4, 16, 24))


def test_tissue_without_room_is_counted_by_group():
    """What the doctor and every embeddings file say is what the sampler does."""
    maps = retina()
    maps[0, :, 6:11] = TISSUE  # swollen
    dropped = tissue_dropped(maps, 240)
    np.testing.assert_allclose(dropped, sample_masks(MaskConfig(budget=240), maps, rngs(4)).tissue_dropped)
    assert dropped[0] > 0.2 and not dropped[1:].any()
    groups = dropped_by(["dme", "healthy", "healthy", None], dropped)
    assert groups["dme"] == (1, dropped[0], dropped[0]) and groups["healthy"] == (2, 0.0, 0.0) and len(groups) == 2


def test_blocks_around_the_inner_retina_hide_more_of_it():
    maps = np.full((1, 8, 16, 8), BACKGROUND, np.uint8)
    maps[:, :, 4:12] = TISSUE
    hidden = {}
    for centres in ("tissue", "inner"):
        config = MaskConfig(budget=512, plane="bscan", centres=centres, mask_ratio=0.3)
        counts = np.zeros(16)
        for seed in range(60):
            target = sample_masks(config, maps, rngs(1, seed)).target[0]
            counts += np.bincount(np.unravel_index(target, maps.shape[1:])[1], minlength=16)
        hidden[centres] = counts[4:8].sum() / counts[4:12].sum()
    assert abs(hidden["tissue"] - 0.5) < 0.06 < 0.12 < hidden["inner"] - 0.5
    with pytest.raises(ConfigError, match="set plane to bscan"):
        MaskConfig(centres="inner")


def test_stages_follow_each_other_with_shapes_of_their_own():
    config = MaskConfig(budget=100, stages=((0.4, 0.5), (0.6, 0.35), (0.75, 0.25)))
    assert [config.at(p).counts(GRID) for p in (0, 0.33, 0.34, 0.99, 1.2)] == [
        (100, 50, 40), (100, 50, 40), (100, 35, 60), (100, 25, 75), (100, 25, 75),
    ]  # fmt: skip
    assert config.heaviest.counts(GRID) == (100, 25, 75)
    assert MaskConfig().at(0.5) == MaskConfig().heaviest == MaskConfig()
    for wrong in ((0.4, 0.7), (0.0, 0.3), (0.4, 0.0)):
        with pytest.raises(ConfigError, match="above 0 whose sum is at most 1"):
            MaskConfig(stages=(wrong,))
