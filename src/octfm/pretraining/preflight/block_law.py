"""Expected coverage of block masks in the B-scan plane, from the distribution of a block, independent of the sampler.

One block is enumerated: every size, row and column that it can have, with their probabilities. A union of several has
no closed form, because whether another block is added depends on what the others cover. Unions are therefore sampled,
and each is replaced by its expectation over the remaining randomness (which covered tokens are surplus), so that few
samples suffice.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np

from octfm.models.token_map import TISSUE
from octfm.pretraining.masks import MaskConfig, select_tokens, wanted_targets


@dataclass(frozen=True)
class BlockSize:
    """Tokens of a block along H and W."""

    height: int
    width: int
    probability: float


def block_sizes(config: MaskConfig, height: int, width: int) -> list[BlockSize]:
    """Every possible size of a block in a plane of `height` x `width` tokens, with its probability. The aspect is drawn
    uniformly; rounding to whole tokens divides its range into intervals, one for each size."""
    low, high = config.aspect
    edges = {low, high}
    for whole in range(max(height, width) + 1):
        half = (whole + 0.5) ** 2
        edges |= {
            aspect
            for aspect in (half / (config.block_area * height**2), config.block_area * width**2 / half)
            if low < aspect < high
        }
    ordered = sorted(edges)
    found: dict[tuple[int, int], float] = {}
    for first, last in zip(ordered, ordered[1:] or ordered, strict=False):
        middle = (first + last) / 2
        rows, columns = (
            min(max(round(sqrt(config.block_area * share) * n), 1), n)
            for share, n in ((middle, height), (1 / middle, width))
        )
        found[rows, columns] = found.get((rows, columns), 0.0) + ((last - first) / (high - low) if high > low else 1.0)
    return [BlockSize(*size, probability) for size, probability in found.items()]


def first_rows(size: int, centres_H: np.ndarray) -> np.ndarray:
    """Probability [H - size + 1] that a block of `size` rows begins in each row, its centre drawn as by `centres_H`.
    The centre lies equally often in each of the block's rows, and the block stays within the volume."""
    height = len(centres_H)
    # From size - 1 rows above the volume to its last row.
    begin = np.convolve(centres_H / centres_H.sum(), np.full(size, 1 / size))
    inside = begin[size - 1 :][: height - size + 1]
    inside[0] += begin[: size - 1].sum()
    inside[-1] += begin[height:].sum()
    return inside


def expected_targets(config: MaskConfig, tokens: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(targets, kept tokens), each [H, W], of one token map [d, h, w], for one union of blocks."""
    _, height, width = tokens.shape
    kept_count, _, num_target = config.counts(tokens.shape)
    chosen = np.unique(select_tokens(tokens, kept_count, rng))
    kept = np.zeros(tokens.shape)
    kept.ravel()[chosen] = 1
    aimed = tokens == TISSUE
    if config.centres == "inner":
        aimed &= 2 * np.cumsum(aimed, 1) <= aimed.sum(1, keepdims=True) + 1
    kept_HW, around_H = kept.sum(0), (kept * aimed).sum((0, 2))
    wanted = wanted_targets(config, chosen.size, num_target)
    sizes = block_sizes(config, height, width)
    which = np.cumsum([block.probability for block in sizes])
    covered, reached = np.zeros((height, width), bool), 0.0
    centres_H = around_H if around_H.any() else kept_HW.sum(1)
    while reached < wanted:
        block = sizes[_drawn(which, rng)]
        row = _drawn(np.cumsum(first_rows(block.height, centres_H)), rng)
        column = rng.integers(1 - block.width, width)
        covered[row : row + block.height, max(0, column) : column + block.width] = True
        before, reached = reached, kept_HW[covered].sum()
        if reached == before:
            centres_H = (kept_HW * ~covered).sum(1)
    return kept_HW * covered * (wanted / reached), kept_HW


def _drawn(cumulative: np.ndarray, rng: np.random.Generator) -> int:
    return int(np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right"))
