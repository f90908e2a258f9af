"""Effects of the token budget: tissue it drops by scanner and diagnosis, and how far it moves vectors."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octfm.encoder.encoder import Encoder
from octfm.models.token_map import TISSUE, dropped_by, left_out, percent, tissue_dropped, token_map
from octfm.store.store import Store

COMPARED = 12
"""Volumes, spread over the store, whose full grid is encoded for comparison: ten CPU seconds each at 9,216 tokens."""
ROUNDING = 1e-4
"""Vectors closer than this share of their length are considered equal; such a distance is no yardstick."""


def budget_facts(encoder: Encoder, store: Store, tissue_dropped_N: np.ndarray, vectors: np.ndarray) -> dict[str, Any]:
    """Facts about the token budget for an embeddings file, given the share of tissue that each volume loses.

    `vectors` [N, width] are those of the store. Empty if the budget is the whole grid. For the key `full_grid` see
    `against_full_grid`.
    """
    grid = encoder.network.grid
    kept, _, _ = encoder.config.masks.counts(grid.shape)
    if kept == grid.size or not len(store):
        return {}
    rows = np.unique(np.linspace(0, len(store) - 1, COMPARED).astype(int))
    image_size, patch_size = store.preprocessing.image_size, encoder.config.model.patch_size
    full_grid = []
    for row in rows:
        arrays = store.read([row])
        tissue = token_map(arrays.band, arrays.valid, image_size, patch_size)[0] == TISSUE
        tokens = encoder.encode_grid(arrays.voxels)[0].reshape(-1, encoder.width)
        full_grid.append(encoder.vector_of(tokens, (tissue | ~tissue.any()).reshape(-1)))
    sample = vectors[np.unique(np.linspace(0, len(store) - 1, 200).astype(int))]
    facts = {
        "kept": kept,
        "grid": grid.size,
        "tissue_dropped": float(tissue_dropped_N.mean()),
        "by_scanner": _by_group([row.scanner for row in store.rows], tissue_dropped_N),
        "by_diagnosis": _by_group([row.diagnosis for row in store.rows], tissue_dropped_N),
        "full_grid": {"volumes": len(rows), **against_full_grid(np.array(full_grid), vectors[rows], sample)},
    }
    return facts | {"sentence": _sentence(facts)}


def against_full_grid(whole_ND: np.ndarray, kept_ND: np.ndarray, sample_KD: np.ndarray) -> dict[str, float | None]:
    """Distance between vectors of the full grid and of the budget, relative to the median distance in `sample`.

    `offset`: the part common to all volumes. It comes from background that tokens of the full grid see; a probe does
    not notice it unless vectors of both kinds are mixed. `own`: the median of the rest over volumes; near 1, the budget
    would change a vector as much as another eye. Both are None if no two volumes differ.
    """
    sample = sample_KD.astype(np.float64)
    apart = np.linalg.norm(sample[:, None] - sample[None], axis=-1)[np.triu_indices(len(sample), 1)]
    # Vectors of identical volumes differ by rounding errors only, which is no yardstick.
    least = ROUNDING * np.linalg.norm(sample, axis=1).max(initial=0.0)
    if len(whole_ND) < 2 or not len(apart) or not np.median(apart) > least:
        return {"offset": None, "own": None}
    gaps = whole_ND.astype(np.float64) - kept_ND
    offset = gaps.mean(0)
    # n / (n - 1): deviations from the mean of so few volumes are a little too small.
    own = np.linalg.norm(gaps - offset, axis=1) * np.sqrt(len(gaps) / (len(gaps) - 1))
    return {"offset": float(np.linalg.norm(offset) / np.median(apart)), "own": float(np.median(own) / np.median(apart))}


def dropped_of(encoder: Encoder, arrays: Any) -> np.ndarray:
    """float [B]: share of the tissue tokens of prepared volumes that does not fit the encoder's budget."""
    tokens = token_map(arrays.band, arrays.valid, encoder.preprocessing.image_size, encoder.config.model.patch_size)
    return tissue_dropped(tokens, encoder.config.masks.counts(tokens.shape[1:])[0])


def _sentence(facts: dict[str, Any]) -> str:
    """The facts in words, for terminal and report."""
    text = f"The encoder sees {facts['kept']:,} of the {facts['grid']:,} tokens of a volume; "
    text += left_out(facts["tissue_dropped"])
    groups = {**facts["by_scanner"], **facts["by_diagnosis"]}
    if groups and facts["tissue_dropped"] > 0:
        name = max(groups, key=lambda key: groups[key]["mean"])
        text += f", most in {name} ({percent(groups[name]['mean'])} in {groups[name]['volumes']:,} volumes)"
    if (own := facts["full_grid"]["own"]) is not None:
        text += f". With all tokens a vector would differ by {own:.2f} of the distance between two volumes, "
        text += f"and by another {facts['full_grid']['offset']:.2f} that is the same for all volumes: "
        text += "no probe notices it, as long as vectors of the two kinds are not mixed"
    return text + "."


def _by_group(names: Sequence[str | None], tissue_dropped_N: np.ndarray) -> dict[str, dict[str, Any]]:
    return {name: group._asdict() for name, group in dropped_by(names, tissue_dropped_N).items()}
