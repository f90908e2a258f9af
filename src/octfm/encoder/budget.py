"""What the token budget leaves out: tissue without room, by scanner and diagnosis, and how far vectors are from those of the full grid."""

from typing import Any

import numpy as np
import torch

from octfm.encoder.encoder import Encoder
from octfm.models.pooling import pooled
from octfm.pretraining.masks import TISSUE, Dropped, dropped_by, tissue_dropped, token_map
from octfm.store.store import Store

COMPARED = 12
"""Volumes, spread over the store, whose full grid is encoded for the comparison: at 9,216 tokens ten CPU seconds each."""


def budget_facts(encoder: Encoder, store: Store, tissue_dropped_N: np.ndarray, vectors: np.ndarray) -> dict[str, Any]:
    """What an embeddings file says about its budget; empty where the budget is the whole grid. `vectors` [N, width] are the store's.

    `full_grid`: see `against_full_grid`.
    """
    grid = encoder.network.grid
    kept, _, _ = encoder.config.masks.counts(grid.shape)
    if kept == grid.size or not len(store):
        return {}
    rows = np.unique(np.linspace(0, len(store) - 1, COMPARED).astype(int))
    whole = []
    for row in rows:
        arrays = store.read([row])
        tissue = (
            token_map(arrays.band, arrays.valid, store.preprocessing.image_size, encoder.config.model.patch_size)[0]
            == TISSUE
        )
        tokens = torch.from_numpy(encoder.encode_grid(arrays.voxels)[0]).reshape(1, -1, encoder.width)
        counts = torch.from_numpy(tissue | ~tissue.any()).reshape(1, -1)
        whole.append(pooled(tokens, counts, encoder.config.objective.pool).numpy()[0])
    sample = vectors[np.unique(np.linspace(0, len(store) - 1, 200).astype(int))]
    facts = {
        "kept": kept,
        "grid": grid.size,
        "tissue_dropped": float(tissue_dropped_N.mean()),
        "by_scanner": _plain(dropped_by([row.scanner for row in store.rows], tissue_dropped_N)),
        "by_diagnosis": _plain(dropped_by([row.diagnosis for row in store.rows], tissue_dropped_N)),
        "full_grid": {"volumes": len(rows), **against_full_grid(np.array(whole), vectors[rows], sample)},
    }
    return facts | {"sentence": _sentence(facts)}


def against_full_grid(whole_ND: np.ndarray, kept_ND: np.ndarray, sample_KD: np.ndarray) -> dict[str, float | None]:
    """How far the vectors of the full grid are from those of the budget, over the median distance between two of `sample`.

    `offset`: the part that is the same for every volume. It comes from the background that the tokens then see, and a probe does not
    notice it, unless vectors of both kinds are mixed. `own`: the median of what is left, volume by volume; near 1 the budget would say as
    much as the eye. Both None where no two volumes differ.
    """
    sample = sample_KD.astype(np.float64)
    apart = np.linalg.norm(sample[:, None] - sample[None], axis=-1)[np.triu_indices(len(sample), 1)]
    # Identical volumes are apart by rounding, which is no yardstick.
    least = ROUNDING * np.linalg.norm(sample, axis=1).max(initial=0.0)
    if len(whole_ND) < 2 or not len(apart) or not np.median(apart) > least:
        return {"offset": None, "own": None}
    gaps = whole_ND.astype(np.float64) - kept_ND
    offset = gaps.mean(0)
    # Deviations from the mean of so few are a little too small.
    own = np.linalg.norm(gaps - offset, axis=1) * np.sqrt(len(gaps) / (len(gaps) - 1))
    return {"offset": float(np.linalg.norm(offset) / np.median(apart)), "own": float(np.median(own) / np.median(apart))}


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
    if (own := facts["full_grid"]["own"]) is not None:
        said += f". Against the full grid a vector moves by {own:.2f} of the distance between two volumes in a way of its own, and by "
        said += f"{facts['full_grid']['offset']:.2f} as all others do, which no probe notices as long as vectors of the two are not mixed"
    return said + "."


def _plain(groups: dict[str, Dropped]) -> dict[str, dict[str, Any]]:
    return {name: group._asdict() for name, group in groups.items()}


ROUNDING = 1e-4
"""Two vectors closer than this share of their length are equal for our purposes: their distance is no yardstick."""
