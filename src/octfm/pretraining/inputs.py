"""From a loader's batch to what an objective receives: normalised patches of the kept tokens, and masks.

Everything random is a function of (seed, position in the run, view).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from torch import Tensor

from octfm.models.objectives.objective import View
from octfm.models.token_map import TooFewTokens, token_map
from octfm.models.vit3d import TokenIndex, normalise, take_patches
from octfm.pretraining import augment
from octfm.pretraining.augment import Augmentation
from octfm.pretraining.masks import TokenMasks, sample_masks
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import Runtime
from octfm.store.loader import Batch
from octfm.volume.preprocessing import Preprocessing

MASKS, AUGMENT, VALIDATION = 1, 2, 3
"""Streams of randomness: what is drawn for one purpose never depends on another."""
STREAMS = 16
"""Streams reserved for each view."""


def generators(seed: int, stream: int, positions: np.ndarray, view: int = 0) -> list[np.random.Generator]:
    """One generator for each position in the global sequence of volumes: the same on any rank and after any restart."""
    return [np.random.default_rng((seed, stream + STREAMS * view, int(position))) for position in positions]


@dataclass(frozen=True, eq=False)
class Inputs:
    """One micro-batch on the device."""

    views: tuple[View, ...]
    """Those of the objective; with masks.large_blocks, each is followed by itself under its second set of masks."""
    masks: TokenMasks
    """Masks of the first view, on the host, and the statistics of their sampling."""


@dataclass(frozen=True, eq=False)
class Drawn:
    """What is drawn on the host for the volumes of a batch. A slice of it is that of some of them."""

    views: tuple[tuple[Augmentation | None, TokenMasks], ...]

    def __getitem__(self, volumes: slice) -> "Drawn":
        return Drawn(tuple((moves and _of(moves, volumes), _of(masks, volumes)) for moves, masks in self.views))


def _of(drawn: Any, volumes: slice) -> Any:
    """Some volumes' share of an augmentation or of masks."""
    columns = {f.name: getattr(drawn, f.name) for f in fields(drawn)}
    own = {name: value[volumes] for name, value in columns.items() if isinstance(value, np.ndarray)}
    large = columns.get("large")
    return replace(drawn, **own, **({"large": _of(large, volumes)} if large is not None else {}))


def draw(config: PretrainConfig, preprocessing: Preprocessing, batch: Batch, augmented: bool = True) -> Drawn:
    """Draw augmentation and masks for every view of every volume."""
    views: list[tuple[Augmentation | None, TokenMasks]] = []
    for view in range(config.objective.num_views):
        moves = None
        if augmented:
            rngs = generators(config.seed, AUGMENT, batch.position, view)
            moves = augment.draw(config.augment, rngs, batch.laterality)
        if views and config.objective.shares_masks:
            views.append((moves and moves.at_places_of(views[0][0]), views[0][1]))
        else:
            views.append((moves, _masks(config, preprocessing, batch, moves, view)))
    return Drawn(tuple(views))


def make_inputs(
    config: PretrainConfig, preprocessing: Preprocessing, runtime: Runtime, batch: Batch, augmented: bool = True
) -> Inputs:
    """Kept patches of every view of every volume on the device, moved and recoloured as drawn (`batch.drawn`)."""
    # uint8 to the device, a quarter of the bytes of float32; normalised there, and only in the patches that are kept.
    voxels = runtime.tensor(batch.voxels).unsqueeze(1)
    labels = runtime.tensor(batch.labels).unsqueeze(1) if batch.labels is not None else None
    drawn = batch.drawn if augmented and batch.drawn is not None else draw(config, preprocessing, batch, augmented)
    views: list[View] = []
    for moves, masks in drawn.views:
        index = token_index(runtime, masks)
        views.append(view_of(config, preprocessing, runtime.tensor, voxels, labels, moves, index))
        if masks.large is not None:
            # A copy: what one set hides, the other may show, and the gradient of hidden voxels is checked by set.
            index = token_index(runtime, masks.large)
            views.append(views[-1]._replace(patches_BKP=views[-1].patches_BKP.clone(), index=index))
    return Inputs(tuple(views), drawn.views[0][1])


def _masks(
    config: PretrainConfig, preprocessing: Preprocessing, batch: Batch, drawn: Augmentation | None, view: int
) -> TokenMasks:
    """Masks on the tissue where the augmentation has moved it."""
    # Surfaces are moved, not voxels: masks are drawn on the host, while the device moves the voxels in the same way.
    band, valid = batch.band, batch.valid.astype(np.float32)
    if drawn is not None:
        band, valid = drawn.surfaces(band, valid, batch.voxels.shape[2], preprocessing.target_spacing)
    tokens = token_map(band, valid, preprocessing.image_size, config.model.patch_size)
    try:
        return draw_masks(config, tokens, batch.position, training=drawn is not None, view=view)
    except TooFewTokens as error:
        raise error.naming(batch.acquisition) from None


def view_of(
    config: PretrainConfig,
    preprocessing: Preprocessing,
    tensor: Callable[[np.ndarray], Tensor],
    voxels: Tensor,
    labels: Tensor | None,
    drawn: Augmentation | None,
    index: TokenIndex,
) -> View:
    """Voxels and labels [B, 1, D, H, W] as drawn, at the tokens of `index`; `tensor` moves an array to the device."""
    patch = config.model.patch_size
    mean, std = preprocessing.intensity_mean, preprocessing.intensity_std
    moves = None
    if drawn is not None:
        *_, height, width = voxels.shape
        moves = drawn.on_device(tensor, height, width, preprocessing.target_spacing)
        voxels = augment.move(voxels, moves)
        labels = augment.move_labels(labels, moves) if labels is not None else None
    raw = take_patches(voxels, index.kept, patch)
    truth = take_patches(labels, index.kept, patch) if labels is not None else None
    # Only the encoder that learns sees recoloured voxels: features then gain nothing from brightness and contrast,
    # which reveal the scanner, not the eye.
    own = augment.recoloured(raw, index.kept, moves, mean, std) if moves is not None else None
    target = normalise(raw, mean, std)
    return View(target if own is None else own, target, index, truth)


def token_index(runtime: Runtime, masks: TokenMasks) -> TokenIndex:
    """The masks as tensors on the device, context and target as places within the kept tokens."""
    context, target = (runtime.tensor(masks.where(index)) for index in (masks.context, masks.target))
    return TokenIndex(runtime.tensor(masks.kept), context, target, runtime.tensor(masks.tissue))


def draw_masks(
    config: PretrainConfig, tokens: np.ndarray, positions: np.ndarray, training: bool = True, view: int = 0
) -> TokenMasks:
    """Masks for token maps [B, d, h, w] at these positions of the run; in validation the same ones every time."""
    if not training:
        return sample_masks(config.masks, tokens, generators(config.seed, VALIDATION, positions, view))
    # A step has one stage, however many ranks and micro-batches share it.
    settings = config.masks.at(positions[0] // config.data.global_batch_size / config.steps)
    return sample_masks(settings, tokens, generators(config.seed, MASKS, positions, view))
