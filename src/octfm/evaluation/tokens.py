"""Token features of a store, computed once: float16, tissue only, so many per volume; keyed by what made them, read by acquisition id."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octfm.data.store import Store
from octfm.errors import EvaluationError
from octfm.evaluation.encoder import SELECTION_SEED, Encoder

BATCH = 8


@dataclass(frozen=True, eq=False)
class TokenFeatures:
    """Features on disk, mapped into memory."""

    place: dict[str, int]
    """Acquisition to its row in the arrays."""
    tokens: np.ndarray
    """float16 [N, T, D]"""
    counts: np.ndarray
    """bool [N, T]: False where a volume has fewer tissue tokens."""

    def take(self, acquisitions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """float32 [n, T, D] and bool [n, T], in the order asked for."""
        rows = [self.place[name] for name in acquisitions]
        return self.tokens[rows].astype(np.float32), self.counts[rows]


def token_features(encoder: Encoder, store: Store, folder: str | Path, *, per_volume: int = 256, max_gb: float = 16.0) -> TokenFeatures:
    """Read the features from `folder`, or compute and write them; at most `per_volume` tissue tokens of a volume, drawn with a fixed seed.

    Raises EvaluationError before anything is computed where they would take more than `max_gb`.
    """
    if store.fingerprint != encoder.fingerprint:
        raise EvaluationError(f"{store.path}: prepared with other settings than {encoder.source} was trained on (F15)")
    size = len(store) * per_volume * encoder.width * 2 / 1e9
    if size > max_gb:
        fits = int(per_volume * max_gb / size)
        raise EvaluationError(
            f"{folder}: token features of {len(store)} volumes would take {size:.2g} GB, more than max_cache_gb {max_gb:g}; "
            f"set tokens_per_volume={fits} or raise the limit"
        )
    volumes = "\n".join(sorted(f"{row.acquisition} {row.checksum}" for row in store.rows))
    key = hashlib.sha256(f"{encoder.key}|{per_volume}|{volumes}".encode()).hexdigest()[:24]
    path = Path(folder) / f"tokens-{key}.npy"
    record = path.with_suffix(".json")
    if not record.is_file():
        _compute(encoder, store, path, record, per_volume)
    facts = json.loads(record.read_text())
    counts = np.arange(per_volume)[None, :] < np.array(facts["counts"])[:, None]
    return TokenFeatures({name: i for i, name in enumerate(facts["acquisitions"])}, np.load(path, mmap_mode="r"), counts)


def draw_tissue(tokens_MD: np.ndarray, tissue_M: np.ndarray, per_volume: int) -> tuple[np.ndarray, np.ndarray]:
    """float16 [T, D]: at most `per_volume` tissue tokens of one volume, drawn with a fixed seed, then zeros; bool [T]: which are tokens."""
    found = np.flatnonzero(tissue_M)
    found = np.sort(np.random.default_rng(SELECTION_SEED).permutation(found)[:per_volume])
    drawn = np.zeros((per_volume, tokens_MD.shape[1]), np.float16)
    drawn[: len(found)] = tokens_MD[found]
    return drawn, np.arange(per_volume) < len(found)


def _compute(encoder: Encoder, store: Store, path: Path, record: Path, per_volume: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial.npy")
    array = np.lib.format.open_memmap(partial, "w+", np.float16, (len(store), per_volume, encoder.width))
    counts = []
    for first in range(0, len(store), BATCH):
        rows = np.arange(first, min(first + BATCH, len(store)))
        tokens, tissue = encoder.tissue_tokens(store.read(rows))
        for row, own, is_tissue in zip(rows, tokens, tissue, strict=True):
            array[row], kept = draw_tissue(own, is_tissue, per_volume)
            counts.append(int(kept.sum()))
    array.flush()
    partial.replace(path)
    # The record comes last: without it there are no features.
    waiting = record.with_suffix(".partial")
    waiting.write_text(json.dumps({"acquisitions": [row.acquisition for row in store.rows], "counts": counts, "encoder": encoder.source}))
    waiting.replace(record)
