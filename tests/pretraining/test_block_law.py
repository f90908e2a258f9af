"""Where targets of blocks in the B-scan plane should lie: the law that the doctor compares with is that of the
sampler, and of no other."""

from itertools import product

import numpy as np
import pytest

from octfm.models.token_map import BACKGROUND, PADDING, TISSUE
from octfm.pretraining import masks
from octfm.pretraining.masks import MaskConfig, sample_masks
from octfm.pretraining.preflight import tokens
from octfm.pretraining.preflight.block_law import block_sizes, expected_targets, first_rows
from octfm.pretraining.preflight.data import Sample
from support.tiny_runs import config

GRID = (6, 16, 12)


@pytest.fixture(scope="module")
def slanted():
    """Bands of tissue that slant towards one side, each at another depth, and a column of padding."""
    maps = np.full((4, *GRID), BACKGROUND, np.uint8)
    for number, volume in enumerate(maps):
        for column in range(GRID[2]):
            first = 2 + 2 * number + column // 4
            volume[:, first : first + 4, column] = TISSUE
    maps[..., -1] = PADDING
    return maps


@pytest.mark.parametrize("aspect", [(0.75, 1.5), (1.0, 1.0), (0.2, 5.0)])
def test_one_block_covers_each_place_as_often_as_was_counted(slanted, aspect):
    """Exact: every size, row and column is enumerated."""
    settings = MaskConfig(plane="bscan", budget=None, aspect=aspect)
    around = np.flatnonzero(slanted[0] == TISSUE)
    rng, hits, draws = np.random.default_rng(1), np.zeros(GRID[1:]), 4000
    for _ in range(draws):
        block = masks._block(settings, GRID, int(rng.choice(around)), rng)
        hits[block[1], block[2]] += 1
    centres_H, expected = (slanted[0] == TISSUE).sum((0, 2)).astype(float), np.zeros(GRID[1:])
    for size in block_sizes(settings, *GRID[1:]):
        rows = np.convolve(first_rows(size.height, centres_H), np.ones(size.height))
        # Along W a block may hang over the edge, so that all columns are alike.
        expected += size.probability * rows[:, None] * size.width / (GRID[2] + size.width - 1)
    assert sum(size.probability for size in block_sizes(settings, *GRID[1:])) == pytest.approx(1)
    assert np.all(np.abs(hits / draws - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws) + 1e-12)


@pytest.mark.parametrize(
    "budget, centres",
    [
        (150, "tissue"),
        (None, "inner"),
        *(
            pytest.param(budget, centres, marks=pytest.mark.slow)
            for budget, centres in ((150, "inner"), (500, "tissue"), (500, "inner"), (None, "tissue"))
        ),
    ],
)
def test_rows_are_targets_as_often_as_the_law_says(slanted, budget, centres):
    """Also where blocks around tissue run out of places and go to the background that is kept."""
    settings, draws = MaskConfig(plane="bscan", budget=budget, centres=centres), 300
    targets, kept = np.zeros((2, draws, GRID[1]))
    for draw in range(draws):
        drawn = sample_masks(settings, slanted[draw % 4][None], [np.random.default_rng((1, draw))])
        for count, index in ((targets, drawn.target), (kept, drawn.kept)):
            count[draw] = np.bincount(np.unravel_index(np.unique(index), GRID)[1], minlength=GRID[1])
    law = [expected_targets(settings, slanted[n % 4], np.random.default_rng((2, n))) for n in range(3 * draws)]
    expected = np.sum([t for t, _ in law], (0, 2)) / np.maximum(1, np.sum([k for _, k in law], (0, 2)))
    observed = targets.sum(0) / np.maximum(1, kept.sum(0))
    error = np.sqrt(((targets - observed * kept) ** 2).sum(0)) / np.maximum(1, kept.sum(0))
    assert np.all(np.abs(observed - expected) <= 5 * 1.2 * error + 0.01), np.round(observed - expected, 3)
    assert np.ptp(expected[kept.sum(0) > 0]) > 0.1, "rows are not alike, so that T / K would not do"


def test_blocks_that_ignore_where_tissue_lies_are_stopped(slanted, monkeypatch):
    """The lower bound that was checked before let every row above it pass."""
    settings = config(masks={"plane": "bscan", "budget": None})
    sample = Sample(np.arange(4), slanted, 40.0, 100.0)
    find = tokens.masking

    def coverage():
        return next(check for check in find(settings, sample) if check.name == "mask coverage")

    assert coverage().status == "PASS"
    block = masks._block

    def anywhere(settings, grid, centre, rng):
        first, rows, columns = block(settings, grid, centre, rng)
        above = int(rng.integers(grid[1] - (rows.stop - rows.start) + 1))
        return first, slice(above, above + rows.stop - rows.start), columns

    monkeypatch.setattr(masks, "_block", anywhere)
    found = coverage()
    assert found.status == "FAIL" and "of H is a target" in found.measured


@pytest.mark.slow
def test_a_row_that_is_hardly_ever_kept_is_no_alarm():
    """Its one kept token in 200 draws is a target or is not; either says nothing."""
    lonely = np.full((1, *GRID), PADDING, np.uint8)
    lonely[:, :, 4:9] = TISSUE
    lonely[:, :, 9:11] = BACKGROUND
    lonely[:, 0, 15, 0] = BACKGROUND
    sample = Sample(np.arange(1), lonely, 40.0, 100.0)
    for plane, seed in product(("bscan", "enface"), range(1)):
        settings = config(seed=seed, masks={"plane": plane, "budget": int((lonely == TISSUE).sum()) + 1})
        assert all(check.status != "FAIL" for check in tokens.masking(settings, sample)), (plane, seed)
