"""A picture of training samples: B-scans of a few volumes with the tokens seen and the tokens to predict."""

import numpy as np

from octfm.models.token_map import token_map
from octfm.pretraining.inputs import draw_masks
from octfm.pretraining.settings import PretrainConfig
from octfm.store.store import Store

CONTEXT, TARGET = np.array([86, 180, 233]), np.array([230, 159, 0])
"""Okabe & Ito's sky blue and orange."""
OPACITY = 0.35


def sample_picture(config: PretrainConfig, store: Store, rows: np.ndarray, step: int) -> np.ndarray:
    """uint8 [H, n * W, 3]: the middle B-scan of each volume with context (blue) and target (orange) of `step`."""
    arrays = store.read(rows)
    pd, ph, pw = config.model.patch_size
    tokens = token_map(arrays.band, arrays.valid, store.preprocessing.image_size, config.model.patch_size)
    positions = step * config.data.global_batch_size + np.arange(len(rows))
    masks = draw_masks(config, tokens, positions)
    middle = arrays.voxels.shape[1] // 2
    tiles = []
    for volume, context, target in zip(arrays.voxels, masks.context, masks.target, strict=True):
        pixels = np.repeat(volume[middle][..., None].astype(np.float32), 3, axis=-1)
        for index, colour in ((context, CONTEXT), (target, TARGET)):
            used = np.zeros(tokens.shape[1:], bool)
            used.ravel()[index] = True
            # Tokens are patches: each covers ph x pw pixels of the B-scan.
            area = np.kron(used[middle // pd], np.ones((ph, pw), bool))
            pixels[area] = (1 - OPACITY) * pixels[area] + OPACITY * colour
        tiles.append(pixels)
    return np.concatenate(tiles, axis=1).clip(0, 255).astype(np.uint8)
