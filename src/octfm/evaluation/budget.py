"""What the token budget leaves out: tissue without room, by scanner and diagnosis, and how far vectors are from those of the full grid."""

from typing import Any

import numpy as np
import torch

from octfm.data.store import Store
from octfm.evaluation.encoder import Encoder
from octfm.masks import TISSUE, Dropped, dropped_by, tissue_dropped, token_map
from octfm.models.pooling import pooled

COMPARED = 12
"""Volumes, spread over the store, whose full grid is encoded for the comparison: at 9,216 tokens ten CPU seconds each."""


def budget_facts(encoder: Encoder, store: Store, tissue_dropped_N: np.ndarray, vectors: np.ndarray) -> dict[str, Any]:
    """What an embeddings file says about its budget; empty where the budget is the whole grid. `vectors` [N, width] are the store's.

    `full_grid.difference`: the median distance between a volume's vector and that of all tissue tokens of the full grid, over the
    median distance between the vectors of two volumes. 0 is no difference; near 1 the budget would say as much as the eye.
    """
    grid = encoder.network.grid
    kept, _, _ = encoder.config.masks.counts(grid.shape)
    if kept == grid.size or not len(store):
        return {}
    rows = np.unique(np.linspace(0, len(store) - 1, COMPARED).astype(int))
    gaps = []
    for row in rows:
        arrays = store.read([row])
        tissue = token_map(arrays.band, arrays.valid, store.preprocessing.image_size, encoder.config.model.patch_size)[0] == TISSUE
        whole = encoder.encode_grid(arrays.voxels)[0]
        counts = torch.from_numpy(tissue | ~tissue.any()).reshape(1, -1)
        vector = pooled(torch.from_numpy(whole).reshape(1, -1, encoder.width), counts, encoder.config.objective.pool)
        gaps.append(np.linalg.norm(vector.numpy()[0] - vectors[row]))
    sample = vectors[np.unique(np.linspace(0, len(store) - 1, 200).astype(int))].astype(np.float64)
    apart = np.linalg.norm(sample[:, None] - sample[None], axis=-1)[np.triu_indices(len(sample), 1)]
    difference = float(np.median(gaps) / max(np.median(apart), 1e-12)) if len(apart) else None
    facts = {
        "kept": kept,
        "grid": grid.size,
        "tissue_dropped": float(tissue_dropped_N.mean()),
        "by_scanner": _plain(dropped_by([row.scanner for row in store.rows], tissue_dropped_N)),
        "by_diagnosis": _plain(dropped_by([row.diagnosis for row in store.rows], tissue_dropped_N)),
        "full_grid": {"volumes": len(rows), "difference": difference},
    }
    return facts | {"sentence": _sentence(facts)}


def dropped_of(encoder: Encoder, arrays: Any) -> np.ndarray:
    """float [B]: share of the tissue of prepared volumes that the encoder's budget has no room for."""
    tokens = token_map(arrays.band, arrays.valid, encoder.preprocessing.image_size, encoder.config.model.patch_size)
    return tissue_dropped(tokens, encoder.config.masks.counts(tokens.shape[1:])[0])


def _sentence(facts: dict[str, Any]) -> str:
    """The same in words, for terminal and page."""
    said = f"{facts['kept']:,} of {facts['grid']:,} tokens are kept; {facts['tissue_dropped']:.1%} of the tissue has no room"
    groups = {**facts["by_scanner"], **facts["by_diagnosis"]}
    if groups and facts["tissue_dropped"] > 0:
        name = max(groups, key=lambda key: groups[key]["mean"])
        said += f", most in {name} ({groups[name]['mean']:.1%} of {groups[name]['volumes']:,} volumes' tissue)"
    if (gap := facts["full_grid"]["difference"]) is not None:
        said += f". A vector differs from that of the full grid by {gap:.2f} of the distance between two volumes"
    return said + "."


def _plain(groups: dict[str, Dropped]) -> dict[str, dict[str, Any]]:
    return {name: group._asdict() for name, group in groups.items()}
