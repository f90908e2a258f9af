"""What the encoder was shown and what it sees, saved as arrays for the report: mask and tissue overlays, PCA of tokens."""

from pathlib import Path
from typing import Any

import numpy as np

from octfm.data.store import Store
from octfm.evaluation.encoder import Encoder
from octfm.masks import PADDING, TISSUE, sample_masks, token_map

PER_SCANNER = 2


def save_examples(encoder: Encoder, store: Store, out: Path) -> Path:
    """<out>/examples.npz: a few volumes of each scanner with their tissue tokens and one draw of masks."""
    chosen = _some_of_each_scanner(store)
    arrays = store.read(chosen)
    patch = encoder.config.model.patch_size
    maps = token_map(arrays.band, arrays.valid, store.preprocessing.image_size, patch)
    masks = sample_masks(encoder.config.masks, maps, [np.random.default_rng(i) for i in range(len(maps))])
    drawn = np.zeros((len(maps), maps[0].size), np.uint8)
    np.put_along_axis(drawn, masks.context, 1, 1)
    np.put_along_axis(drawn, masks.target, 2, 1)
    rows = [store.rows[i] for i in chosen]
    return _save(
        out / "examples.npz",
        voxels=arrays.voxels,
        band=arrays.band,
        tokens=maps,
        mask=drawn.reshape(maps.shape),
        scanner=np.array([row.scanner for row in rows]),
        laterality=np.array([row.laterality or "unknown" for row in rows]),
        patch_size=np.array(patch),
        spacing_mm=np.array(store.preprocessing.target_spacing),
    )


def save_pca(encoder: Encoder, store: Store, out: Path) -> Path:
    """<out>/pca.npz: three principal components of tissue tokens as colours in 0..1, one basis for all volumes shown; 0 elsewhere."""
    chosen = _some_of_each_scanner(store)
    arrays = store.read(chosen)
    tokens = np.stack([encoder.encode_grid(voxels[None])[0] for voxels in arrays.voxels])
    maps = token_map(arrays.band, arrays.valid, store.preprocessing.image_size, encoder.config.model.patch_size)
    tissue = maps == TISSUE if (maps == TISSUE).any() else maps != PADDING
    # A basis over all tokens would spend its colours on telling tissue from background.
    centred = tokens - tokens[tissue].mean(0)
    _, _, axes = np.linalg.svd(centred[tissue], full_matrices=False)
    scores = centred @ axes[:3].T
    low, high = np.percentile(scores[tissue], (1, 99), axis=0)
    colours = np.clip((scores - low) / np.maximum(high - low, 1e-6), 0, 1) * tissue[..., None]
    return _save(
        out / "pca.npz",
        pca=colours.astype(np.float32),
        voxels=arrays.voxels,
        scanner=np.array([store.rows[i].scanner for i in chosen]),
        laterality=np.array([store.rows[i].laterality or "unknown" for i in chosen]),
        spacing_mm=np.array(store.preprocessing.target_spacing),
    )


def _some_of_each_scanner(store: Store) -> np.ndarray:
    """Store rows: the first volumes of each scanner, different participants."""
    chosen: dict[str, dict[str, int]] = {}
    for i, row in enumerate(store.rows):
        own = chosen.setdefault(row.scanner, {})
        if len(own) < PER_SCANNER:
            own.setdefault(row.participant, i)
    return np.array([i for own in chosen.values() for i in own.values()])


def _save(path: Path, **arrays: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npz")
    np.savez_compressed(partial, **arrays)
    partial.replace(path)
    return path
