"""Checks of the token budget (F14) and of masks: disjoint, evenly spread, on tissue."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from octfm.models.token_map import (
    BACKGROUND,
    PADDING,
    TISSUE,
    dropped_by,
    left_out,
    percent,
    tissue_dropped,
    token_map,
)
from octfm.pretraining import augment
from octfm.pretraining import masks as sampler
from octfm.pretraining.inputs import generators
from octfm.pretraining.preflight.block_law import expected_targets
from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.pretraining.preflight.data import Sample
from octfm.pretraining.settings import PretrainConfig
from octfm.store.store import Store

DRAWS = 200
PREFLIGHT_STREAM = 9
"""Stream of randomness of the preflight's masks, which are not those of the run."""
AXES = ("D", "H", "W")
TOLERANCE = {"D": 0.10, "H": 0.20, "W": 0.20}
"""Largest departure of observed from expected targets per slice of an axis; B-scans must be equally likely."""
STARVED = 0.02
"""Largest acceptable mean share of tissue outside the budget, by scanner and by diagnosis."""
UNIONS = 5
"""Sampled unions of blocks per draw of masks."""
SIGNIFICANT = 4.0
"""A departure counts only if it exceeds this many standard errors; with 200 draws, a smaller one may be chance."""
SURE = 2.0
"""Standard errors that are taken off a departure: in a single B-scan, where blocks cover whole columns, the departure
of the outermost ones is about 0.1, and chance may double it."""


@dataclass(frozen=True, eq=False)
class Coverage:
    """How often a kept token is a target, slice by slice of each axis."""

    observed: dict[str, np.ndarray]
    expected: dict[str, np.ndarray]
    """Frequency that the sampler should give; NaN for a slice without kept tokens."""
    standard_error: dict[str, np.ndarray]
    shapes: frozenset[tuple[int, int, int]]
    """Numbers of (kept, context, target) tokens drawn: with more than one triple, steps compile again."""
    overlap: int
    """Tokens that were context and target at once."""
    padded: int
    """Kept tokens without image."""
    dead: float
    """Share of targets that are background."""

    def worst(self, axis: str) -> tuple[int, float]:
        """(slice, relative departure) that exceeds chance most, less SURE standard errors; (-1, 0) if none does."""
        difference, error = self.observed[axis] - self.expected[axis], self.standard_error[axis]
        # Comparisons with NaN are false, so slices without kept tokens do not count.
        counts = np.abs(difference) > SIGNIFICANT * error
        sure = difference - SURE * error * np.sign(difference)
        gap = np.where(counts, sure / np.maximum(self.expected[axis], 1e-3), 0.0)
        where = int(np.abs(gap).argmax())
        return (where, float(gap[where])) if gap[where] else (-1, 0.0)


def budget(config: PretrainConfig, sample: Sample) -> Iterator[Check]:
    """Tissue, background and padding tokens, and how the budget fits them (F14)."""
    grid = sample.tokens.shape[1:]
    tissue, background, padding = (
        (sample.tokens == value).reshape(len(sample.tokens), -1).sum(1) for value in (TISSUE, BACKGROUND, PADDING)
    )
    kept, num_context, num_target = config.masks.counts(grid)
    image = tissue + background
    share = f"tissue {tissue.mean():.0f}, background {background.mean():.0f}, padding {padding.mean():.0f}"
    each = config.data.per_device_batch_size
    split = f"{kept} kept, {num_context} context, {num_target} target"
    yield passed("token budget", f"{np.prod(grid)} tokens: {share}; {split}; x {each} volumes per device")
    if (empty := float(padding.mean()) / np.prod(grid)) > 0.4:
        measured = f"{empty:.0%} of the grid is padding"
        yield warn("padding", measured, "choose target_spacing to fit the field of view (F14)")
    if (deep := sample.band_rows / config.model.patch_size[1]) < 2:
        measured = f"the tissue band is {deep:.1f} tokens deep"
        yield warn("axial detail", measured, "use a finer axial target_spacing or patch (F14)")
    if (short := float(np.mean(image < kept))) > 0.1:
        measured = f"{short:.0%} of volumes have fewer image tokens than the budget"
        yield warn("tokens repeated", measured, f"lower masks.budget to {int(image.min())}")


def starved(config: PretrainConfig, store: Store, sample: Sample) -> list[Check]:
    """Tissue outside the budget, by scanner and diagnosis: a swollen retina has more tissue and must not lose it."""
    kept, _, _ = config.masks.counts(sample.tokens.shape[1:])
    # The budget is the whole grid, so nothing can be left out.
    if kept == sample.tokens[0].size:
        return []
    dropped, rows = tissue_dropped(sample.tokens, kept), [store.rows[row] for row in sample.rows]
    groups = [*dropped_by([row.scanner for row in rows], dropped).items()]
    groups += dropped_by([row.diagnosis for row in rows], dropped).items()
    name, worst = max(groups, key=lambda group: group[1].mean)
    measured = f"{kept:,} tokens of a volume are trained on; {left_out(float(dropped.mean()))}"
    if dropped.any():
        measured += f", most in {name}: {percent(worst.mean)} ({worst.volumes} volumes, up to {percent(worst.most)})"
    if worst.mean > STARVED or np.mean(dropped > 0) > 0.1:
        most = int((sample.tokens == TISSUE).reshape(len(rows), -1).sum(1).max())
        return [warn("tissue dropped", measured, f"raise masks.budget to {most}, the most that a volume has")]
    return [passed("tissue dropped", measured)]


def moved(config: PretrainConfig, store: Store, sample: Sample) -> list[Check]:
    """Fail if augmentation may move a volume out of its frame, which would stop the run then; no check otherwise."""
    least = (sample.tokens != PADDING).reshape(len(sample.tokens), -1).sum(1).argmin()
    arrays, pre, moves = store.read(sample.rows[[least]]), store.preprocessing, augment.farthest(config.augment)
    band, valid = (np.repeat(x, len(moves.shift), 0) for x in (arrays.band, arrays.valid))
    band, valid = moves.surfaces(band, valid, pre.image_size[1], pre.target_spacing)
    left = (token_map(band, valid, pre.image_size, config.model.patch_size) != PADDING).reshape(len(band), -1).sum(1)
    if left.min() >= 2:
        return []
    movements = ("axial_shift", "lateral_shift_mm", "lateral_scale", "axial_scale", "tilt_deg")
    named = [f"augment.{name}={value:g}" for name in movements if (value := getattr(config.augment, name))]
    measured = f"{' '.join(named)} may leave {left.min()} tokens of {arrays.acquisition[0]} in its frame"
    return [fail("augmentation", measured, "a step needs two or more; lower the largest movement")]


def masking(config: PretrainConfig, sample: Sample) -> Iterator[Check]:
    """Check DRAWS masks: context and target disjoint, without padding, few targets dead, places hidden as promised."""
    coverage, counts = draw_coverage(config, sample.tokens), config.masks.counts(sample.tokens.shape[1:])
    if coverage.overlap or coverage.padded:
        measured = f"{coverage.overlap} tokens are context and target, {coverage.padded} kept tokens are padding"
        yield fail("masks", measured, "the encoder would see answers, or learn from nothing; report this as a bug (F4)")
    elif coverage.shapes != {counts}:
        drawn = ", ".join(" + ".join(map(str, shape)) for shape in sorted(coverage.shapes)[:3])
        measured = f"kept, context and target should be {' + '.join(map(str, counts))} tokens, and are {drawn}"
        yield fail("masks", measured, "shapes that change compile anew in every step; report this as a bug (F4)")
    else:
        split = f"{counts[1]} context and {counts[2]} target tokens of {counts[0]} kept"
        yield passed("masks", f"{split}, and disjoint, in each of {DRAWS} draws")
    dead = f"{coverage.dead:.0%} of targets are background"
    if coverage.dead > 0.3:
        yield warn("dead targets", dead, "lower masks.budget so that tissue fills it")
    else:
        yield passed("dead targets", dead)
    uneven = []
    for axis in AXES:
        where, gap = coverage.worst(axis)
        if abs(gap) > TOLERANCE[axis]:
            uneven.append(f"slice {where} of {axis} is a target {gap:+.0%} as often as expected")
    if uneven:
        yield fail("mask coverage", "; ".join(uneven), "some places would hardly be trained on; report this as a bug")
    else:
        widest = max(abs(coverage.worst(axis)[1]) for axis in AXES)
        yield passed("mask coverage", f"even over B-scans, rows and A-scans (largest sure departure {widest:.0%})")


def draw_coverage(config: PretrainConfig, tokens: np.ndarray) -> Coverage:
    """Draw DRAWS masks for token maps [n, d, h, w], each equally often; compare them with what the sampler should do.

    Along D and W a block starts anywhere and may hang over the edge, along the axis that it spans it covers all slices,
    and the surplus is dropped at random: a kept token is a target with probability T / K, whatever its slice. Along H
    in the B-scan plane blocks follow tissue: there the distribution of a block is enumerated (block_law.py)."""
    volumes, grid = len(tokens), tokens.shape[1:]
    hits = {axis: np.zeros((DRAWS, n)) for axis, n in zip(AXES, grid, strict=True)}
    kept_count = {axis: np.zeros((DRAWS, n)) for axis, n in zip(AXES, grid, strict=True)}
    overlap = padded = targets = 0
    dead, shapes = [], set()
    for draw, rng in enumerate(generators(config.seed, PREFLIGHT_STREAM, np.arange(DRAWS))):
        volume = tokens[draw % volumes]
        drawn = sampler.sample_masks(config.masks, volume[None], [rng])
        shapes.add((drawn.kept.shape[1], drawn.context.shape[1], drawn.target.shape[1]))
        kept, target = np.unique(drawn.kept), np.unique(drawn.target)
        targets += target.size
        overlap += np.intersect1d(drawn.context, target).size
        padded += int((volume.ravel()[kept] == PADDING).sum())
        dead.append(drawn.dead.mean())
        for axis, places_kept, places_target in zip(
            AXES, np.unravel_index(kept, grid), np.unravel_index(target, grid), strict=True
        ):
            n = hits[axis].shape[1]
            hits[axis][draw] = np.bincount(places_target, minlength=n)
            kept_count[axis][draw] = np.bincount(places_kept, minlength=n)
    observed, expected, error = {}, {}, {}
    for axis in AXES:
        total = kept_count[axis].sum(0)
        observed[axis] = hits[axis].sum(0) / np.maximum(1, total)
        expected[axis] = np.where(total > 0, targets / total.sum(), np.nan)
        # Ratio estimator: targets of one draw depend on each other, so draws are the units, not tokens. In a slice with
        # a handful of kept tokens all may be targets, by chance: the error is at least that of independent tokens.
        residual = hits[axis] - observed[axis] * kept_count[axis]
        alone = np.sqrt(expected[axis] * (1 - expected[axis]) / np.maximum(1, total))
        error[axis] = np.maximum(np.sqrt((residual**2).sum(0)) / np.maximum(1, total), alone)
    if config.masks.plane == "bscan":
        expected["H"], error_of_expected = _expected_rows(config, tokens)
        error["H"] = np.hypot(error["H"], error_of_expected)
    return Coverage(observed, expected, error, frozenset(shapes), overlap, padded, float(np.mean(dead)))


def _expected_rows(config: PretrainConfig, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of kept tokens that should be targets in each row, and its standard error; UNIONS per draw of masks."""
    found = []
    for draw, rng in enumerate(generators(config.seed, PREFLIGHT_STREAM, DRAWS + np.arange(DRAWS))):
        found += [expected_targets(config.masks, tokens[draw % len(tokens)], rng) for _ in range(UNIONS)]
    targets, kept = (np.stack(x).sum(2) for x in zip(*found, strict=True))
    share = targets.sum(0) / np.maximum(1, kept.sum(0))
    error = np.sqrt(((targets - share * kept) ** 2).sum(0)) / np.maximum(1, kept.sum(0))
    return np.where(kept.sum(0) > 0, share, np.nan), error
