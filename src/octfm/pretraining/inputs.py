"""From a loader's batch to what an objective eats: normalised patches of the kept tokens, and masks; all a function of (seed, position)."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from octfm.models.objectives.data2vec import Data2Vec
from octfm.models.objectives.jepa import JEPA
from octfm.models.objectives.mae import MAE
from octfm.models.objectives.objective import TokenIndex
from octfm.models.vit3d import TokenGrid, VisionTransformer3D, count_parameters, take_patches
from octfm.pretraining import augment
from octfm.pretraining.masks import TokenMasks, TooFewTokens, sample_masks, token_grid, token_map
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import Runtime
from octfm.store.loader import Batch
from octfm.volume.preprocessing import Preprocessing

Objective = JEPA | Data2Vec | MAE

MASKS, AUGMENT, VALIDATION = 1, 2, 3
"""Streams of randomness: what is drawn for one purpose never depends on another."""


def generators(seed: int, stream: int, positions: np.ndarray) -> list[np.random.Generator]:
    """One generator for each position in the global sequence of volumes: the same on any rank and after any restart."""
    return [np.random.default_rng((seed, stream, int(position))) for position in positions]


def grid_of(preprocessing: Preprocessing, patch_size: tuple[int, int, int]) -> TokenGrid:
    """Token grid of volumes prepared this way."""
    shape = token_grid(preprocessing.image_size, patch_size)
    z, y, x = (p * mm for p, mm in zip(patch_size, preprocessing.target_spacing, strict=True))
    return TokenGrid(shape, (z, y, x))


def build_objective(config: PretrainConfig, preprocessing: Preprocessing) -> Objective:
    """The networks of a run at their initial weights, which are a function of the seed alone."""
    torch.manual_seed(config.seed)
    grid = grid_of(preprocessing, config.model.patch_size)
    if config.objective.name == "data2vec":
        return Data2Vec(config.model, grid)
    objective = config.objective
    if objective.name == "mae":
        return MAE(config.model, config.predictor, grid, objective.goal_average)
    aims = objective.target_levels, objective.target_norm, objective.voxel_loss, objective.goal_average
    return JEPA(config.model, config.predictor, grid, *aims)


def frozen_encoder(config: PretrainConfig, model: Objective) -> VisionTransformer3D:
    """The encoder that is embedded and probed with."""
    return (
        model.encoder if model.target_encoder is None or config.objective.frozen == "context" else model.target_encoder
    )


def teacher_parameters(model: Objective) -> int:
    """Of the target encoder; 0 where the objective has none."""
    return count_parameters(model.target_encoder) if model.target_encoder is not None else 0


@dataclass(frozen=True, eq=False)
class Inputs:
    """One micro-batch on the device."""

    patches: Tensor
    """float32 [B, K, P], normalised: what the encoder may see some of."""
    target_patches: Tensor
    """float32 [B, K, P]: what the target encoder sees, the same voxels without recolouring."""
    index: TokenIndex
    tissue: Tensor
    """bool [B, K]"""
    masks: TokenMasks
    """The same masks on the host, with what sampling them cost."""


def make_inputs(
    config: PretrainConfig, preprocessing: Preprocessing, runtime: Runtime, batch: Batch, augmented: bool = True
) -> Inputs:
    """Draw augmentation and masks for every volume of the batch and cut its kept patches out on the device."""
    band, valid = batch.band, batch.valid.astype(np.float32)
    drawn = (
        augment.draw(config.augment, generators(config.seed, AUGMENT, batch.position), batch.laterality)
        if augmented
        else None
    )
    height, width, spacing = *batch.voxels.shape[2:4], preprocessing.target_spacing
    if drawn is not None:
        band, valid = drawn.surfaces(band, valid, height, spacing)
    tokens = token_map(band, valid, preprocessing.image_size, config.model.patch_size)
    try:
        masks = draw_masks(config, tokens, batch.position, training=augmented)
    except TooFewTokens as error:
        raise error.naming(batch.acquisition) from None

    kept = runtime.tensor(masks.kept)
    tissue = runtime.tensor(masks.tissue)
    index = TokenIndex(
        kept, runtime.tensor(masks.where(masks.context)), runtime.tensor(masks.where(masks.target)), tissue
    )
    voxels = runtime.tensor(batch.voxels).unsqueeze(1)
    mean, std = preprocessing.intensity_mean, preprocessing.intensity_std
    moves = drawn.on_device(runtime.tensor, height, width, spacing) if drawn is not None else None
    if moves is not None:
        voxels = augment.move(voxels, moves)
    raw = take_patches(voxels, kept, config.model.patch_size)
    target_patches = patches = augment.normalise(raw, mean, std)
    if moves is not None:
        # Only the context is recoloured: features then gain nothing from brightness and contrast, which tell scanners, not eyes.
        patches = augment.recoloured(raw, kept, moves, mean, std)
    return Inputs(patches, target_patches, index, tissue, masks)


def draw_masks(config: PretrainConfig, tokens: np.ndarray, positions: np.ndarray, training: bool = True) -> TokenMasks:
    """The masks of volumes with these token maps at these places of the run; or of validation, which has the same ones every time."""
    if not training:
        return sample_masks(config.masks, tokens, generators(config.seed, VALIDATION, positions))
    settings = config.masks.at(positions[0] / (config.data.global_batch_size * config.steps))
    return sample_masks(settings, tokens, generators(config.seed, MASKS, positions))


def optimizer_groups(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(decayed, not decayed) parameters: biases, norms and single tokens are not pulled towards zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
