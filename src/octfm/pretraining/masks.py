"""Which tokens a step uses (kept), which the encoder sees (context) and which the predictor must recover (target)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal

import numpy as np
from pydantic import Field, field_validator, model_validator

from octfm.config import Config
from octfm.models.token_map import PADDING, TISSUE, TooFewTokens
from octfm.volume.volume import Shape3


class MaskConfig(Config):
    """Multi-block masking within a fixed budget of tokens, so that tensor shapes never change."""

    budget: int | None = Field(default=3072, ge=8, le=10_000_000)
    """Tokens kept per volume (K): tissue first, the rest drawn at random from background; null keeps the whole grid."""
    mask_ratio: float = Field(default=0.6, gt=0, lt=1)
    """Share of the kept tokens that the predictor must recover."""
    context_ratio: float = Field(default=0.35, gt=0, lt=1)
    """Share of the kept tokens that the context encoder sees."""
    block_area: float = Field(default=0.15, gt=0, le=1)
    """Area of one block as a share of its plane. Blocks are added until they cover the wanted number of targets."""
    aspect: tuple[float, float] = (0.75, 1.5)
    """Range of a block's height over width, in tokens of a square plane."""
    plane: Literal["bscan", "enface"] = "enface"
    """Blocks lie in the B-scan plane (H, W) through all B-scans, as in V-JEPA 2, or en face (D, W) through all rows."""
    centres: Literal["tissue", "inner"] = "tissue"
    """Rows that blocks of the B-scan plane lie around: of any tissue, or of its upper half (the inner retina)."""
    large_blocks: tuple[float, float, float] | None = None
    """(block_area, mask_ratio, context_ratio) of a second set of masks in the same step, such as (0.7, 0.85, 0.15);
    null for none. V-JEPA 2 hides many small blocks in one and few large ones in the other. Only `vjepa2` takes it."""
    stages: tuple[tuple[float, float], ...] = ()
    """(mask_ratio, context_ratio) of consecutive equal parts of the run. Each part has other tensor shapes, for which
    steps are compiled anew. Validation keeps to mask_ratio and context_ratio, so that its losses can be compared."""

    @field_validator("aspect")
    @classmethod
    def _aspect_is_a_range(cls, aspect: tuple[float, float]) -> tuple[float, float]:
        if not 0.001 <= aspect[0] <= aspect[1] <= 1000:
            raise ValueError(f"expected two numbers from 0.001 to 1000, smaller first, got {list(aspect)}")
        return aspect

    @model_validator(mode="after")
    def _disjoint(self) -> "MaskConfig":
        if self.mask_ratio + self.context_ratio > 1:
            raise ValueError(
                f"mask_ratio {self.mask_ratio} + context_ratio {self.context_ratio} exceeds 1: context and target "
                f"would overlap; lower context_ratio to {1 - self.mask_ratio:.2f} or less"
            )
        ratios = [("stages", *stage) for stage in self.stages]
        if self.large_blocks is not None:
            ratios.append(("large_blocks", *self.large_blocks[1:]))
        for name, hidden, seen in ratios:
            if not (0 < hidden < 1 and 0 < seen < 1 and hidden + seen <= 1):
                raise ValueError(
                    f"{name}: expected (mask_ratio, context_ratio) above 0 whose sum is at most 1, got ({hidden}, "
                    f"{seen})"
                )
        if self.large_blocks is not None and not 0 < self.large_blocks[0] <= 1:
            raise ValueError(f"large_blocks: expected a block_area above 0 and at most 1, got {self.large_blocks[0]}")
        if self.centres == "inner" and self.plane == "enface":
            raise ValueError("centres inner: blocks of plane enface go through all rows; set plane to bscan")
        return self

    def at(self, progress: float) -> "MaskConfig":
        """The settings at `progress`, from 0 at the start of the run to 1 at its end."""
        if not self.stages:
            return self
        hidden, seen = self.stages[min(int(progress * len(self.stages)), len(self.stages) - 1)]
        return self.model_copy(update={"mask_ratio": hidden, "context_ratio": seen, "stages": ()})

    @property
    def large(self) -> "MaskConfig | None":
        """The settings of the second set of masks."""
        if self.large_blocks is None:
            return None
        names = ("block_area", "mask_ratio", "context_ratio")
        return self.model_copy(update={**dict(zip(names, self.large_blocks, strict=True)), "large_blocks": None})

    @property
    def heaviest(self) -> "MaskConfig":
        """The settings of the stage with the most tokens to compute with."""
        count = max(1, len(self.stages))
        return max((self.at(i / count) for i in range(count)), key=lambda masks: masks.context_ratio + masks.mask_ratio)

    def counts(self, grid: Shape3) -> tuple[int, int, int]:
        """(kept, context, target) tokens per volume: the same in every step."""
        kept = min(self.budget or prod(grid), prod(grid))
        return kept, max(1, int(self.context_ratio * kept)), max(1, int(self.mask_ratio * kept))


@dataclass(frozen=True, eq=False)
class TokenMasks:
    """Flat token indices into the grid, int64, sorted within a row; context and target are disjoint, not padding."""

    kept: np.ndarray
    """[B, K]: every token of the step; context and target are drawn from it."""
    context: np.ndarray
    """[B, Nc]"""
    target: np.ndarray
    """[B, Nt]"""
    tissue: np.ndarray
    """bool [B, K]: which kept tokens are tissue."""
    tissue_dropped: np.ndarray
    """[B]: share of the volume's tissue tokens that the budget had no room for."""
    repeated: np.ndarray
    """[B]: share of kept tokens that repeat another, because the volume has fewer image tokens than the budget."""
    dead: np.ndarray
    """[B]: share of targets that are background."""
    large: "TokenMasks | None" = None
    """The second set of masks of the same kept tokens (MaskConfig.large_blocks)."""

    def where(self, index: np.ndarray) -> np.ndarray:
        """Positions of grid indices [B, M] within `kept`."""
        return np.stack([np.searchsorted(k, i) for k, i in zip(self.kept, index, strict=True)])


def select_tokens(
    tokens: np.ndarray, count: int, rng: np.random.Generator, acquisition: Sequence[str] = ()
) -> np.ndarray:
    """`count` flat indices of one token map [d, h, w]: tissue first, then background; padding never.

    Tissue beyond the budget is dropped at random. A volume with too few image tokens repeats some of them, which keeps
    the shape fixed without an attention mask; one without any is an error that names its `acquisition`."""
    flat = tokens.ravel()
    # Shuffled first, then sorted stably by kind: random within tissue and within background.
    order = rng.permutation(flat.size)
    order = order[flat[order] != PADDING]
    if order.size == 0:
        raise TooFewTokens("none").naming(acquisition)
    order = order[np.argsort(flat[order] != TISSUE, kind="stable")]
    # np.resize cuts the list to `count` or, if it is too short, repeats it from the start, where tissue is.
    return np.sort(np.resize(order, count))


SELECTION_SEED = 0
"""Seed for selecting tokens as in training, so that a volume always gives the same ones."""


def same_tokens(maps: np.ndarray, count: int, acquisitions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """`select_tokens` of token maps [B, d, h, w], always the same ones, [B, M]; and which are tissue, bool [B, M]."""
    chosen = [
        select_tokens(m, count, np.random.default_rng(SELECTION_SEED), acquisitions[place : place + 1])
        for place, m in enumerate(maps)
    ]
    index = np.stack(chosen)
    return index, np.take_along_axis(maps.reshape(len(maps), -1), index, 1) == TISSUE


def wanted_targets(config: MaskConfig, kept: int, num_target: int) -> int:
    """Number of targets among `kept` different tokens: `num_target`, or fewer in a small volume; never all."""
    return min(num_target, kept - 1, max(1, round(kept * config.mask_ratio)))


def sample_masks(config: MaskConfig, tokens: np.ndarray, rngs: Sequence[np.random.Generator]) -> TokenMasks:
    """Masks for token maps [B, d, h, w], one generator per volume; sizes are the same on every call. Blocks rarely
    cover exactly the wanted number of tokens, so the surplus is dropped uniformly at random; cutting the tail of a
    sorted index instead would make the last B-scans almost never a target."""
    sets = [config] if config.large is None else [config, config.large]
    kept, splits = [], [[] for _ in sets]
    for place, (volume, rng) in enumerate(zip(tokens, rngs, strict=True)):
        image = np.count_nonzero(volume != PADDING)
        if image < 2:
            raise TooFewTokens("one" if image else "none", place)
        kept.append(select_tokens(volume, config.counts(volume.shape)[0], rng))
        for own, found in zip(sets, splits, strict=True):
            found.append(_split(own, volume, _different(kept[-1]), rng))
    first, *second = (_described(tokens, np.stack(kept), *map(np.stack, zip(*found, strict=True))) for found in splits)
    return replace(first, large=second[0]) if second else first


def _different(ordered: np.ndarray) -> np.ndarray:
    """The different values of sorted token indices [K]; np.unique would sort them again."""
    first = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return ordered[first]


def _split(
    config: MaskConfig, volume: np.ndarray, unique: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(context, target) among the different kept tokens `unique` of one volume."""
    # `unique`, because a repeated token could otherwise be context and target at once.
    _, num_context, num_target = config.counts(volume.shape)
    split = wanted_targets(config, unique.size, num_target)
    covered = _cover(config, volume, unique, split, rng)
    # Covered tokens first, each half in random order: a prefix is target-like, a suffix context-like.
    order = rng.permutation(unique.size)
    order = unique[order[np.argsort(~covered[order], kind="stable")]]
    # From the far end: uncovered tokens first, so that context lies outside the blocks as far as there are enough.
    visible = order[split:][::-1][: max(1, min(num_context, order.size - split))]
    return np.sort(np.resize(visible, num_context)), np.sort(np.resize(order[:split], num_target))


def _described(tokens: np.ndarray, kept: np.ndarray, context: np.ndarray, target: np.ndarray) -> TokenMasks:
    flat = tokens.reshape(len(tokens), -1)
    tissue_kept = np.take_along_axis(flat, kept, 1) == TISSUE
    unique_tissue = np.array([_different(k[t]).size for k, t in zip(kept, tissue_kept, strict=True)])
    return TokenMasks(
        kept,
        context,
        target,
        tissue_kept,
        tissue_dropped=1 - unique_tissue / np.maximum(1, (flat == TISSUE).sum(1)),
        repeated=np.array([1 - _different(k).size / k.size for k in kept]),
        dead=(np.take_along_axis(flat, target, 1) != TISSUE).mean(1),
    )


def _cover(
    config: MaskConfig, volume: np.ndarray, kept: np.ndarray, wanted: int, rng: np.random.Generator
) -> np.ndarray:
    """bool over `kept`: inside the union of blocks, which grows until it holds `wanted` tokens."""
    covered = np.zeros(volume.shape, bool)
    aimed = volume == TISSUE
    if config.centres == "inner":
        # Counted from above in each column: the upper half of its tissue, one token at least.
        aimed &= 2 * np.cumsum(aimed, axis=1) <= aimed.sum(1, keepdims=True) + 1
    tissue = kept[aimed.ravel()[kept]]
    centres = tissue if tissue.size else kept
    inside = covered.ravel()[kept]
    while (reached := np.count_nonzero(inside)) < wanted:
        # As rng.choice draws, in a quarter of its time.
        centre = int(centres[rng.integers(len(centres))])
        covered[_block(config, volume.shape, centre, rng)] = True
        inside = covered.ravel()[kept]
        if np.count_nonzero(inside) == reached:
            # Blocks around tissue may never reach the background that is kept; go where nothing is covered yet.
            centres = kept[~inside]
    return inside


def _block(config: MaskConfig, grid: Shape3, centre: int, rng: np.random.Generator) -> tuple[slice, ...]:
    """A block of the plane, full along the axis that the plane leaves out. Along D and W it may hang over the edge, so
    that every B-scan and A-scan is covered equally often; along H it lies around the row of the token `centre`."""
    spanned = 0 if config.plane == "bscan" else 1
    first, second = (axis for axis in range(3) if axis != spanned)
    aspect = rng.uniform(*config.aspect)
    block = [slice(None)] * 3
    for axis, share in ((first, sqrt(config.block_area * aspect)), (second, sqrt(config.block_area / aspect))):
        size = min(max(1, round(share * grid[axis])), grid[axis])
        if axis == 1:
            row = int(np.unravel_index(centre, grid)[1])
            start = min(max(0, row - int(rng.integers(size))), grid[1] - size)
        else:
            start = int(rng.integers(1 - size, grid[axis]))
        block[axis] = slice(max(0, start), start + size)
    return tuple(block)
