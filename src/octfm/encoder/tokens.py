"""A cache of token features of a store: float16 tissue tokens, a fixed number per volume, read by acquisition id."""

import errno
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octfm.encoder.encoder import Encoder
from octfm.errors import EvaluationError
from octfm.io.hashing import hash_text
from octfm.io.location import flush, from_json, write_whole
from octfm.io.progress import Progress
from octfm.pretraining.masks import SELECTION_SEED
from octfm.store.store import Store

BATCH = 8


@dataclass(frozen=True, eq=False)
class TokenFeatures:
    """Features on disk, memory-mapped; T tokens per volume, D channels."""

    place: dict[str, int]
    """Acquisition -> its row in the arrays."""
    tokens: np.ndarray
    """float16 [N, T, D]"""
    counts: np.ndarray
    """bool [N, T]: False for padding of volumes with fewer tissue tokens."""

    def take(self, acquisitions: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """float32 [n, T, D] and bool [n, T] of these acquisitions, in this order."""
        rows = [self.place[name] for name in acquisitions]
        return self.tokens[rows].astype(np.float32), self.counts[rows]


def token_features(
    encoder: Encoder,
    store: Store,
    folder: str | Path,
    *,
    per_volume: int = 256,
    max_gb: float = 16.0,
    between: Callable[[], None] = lambda: None,
) -> TokenFeatures:
    """Read cached features from `folder`, or compute them: up to `per_volume` random tissue tokens of each volume.

    `between` is called before every batch; an exception from it stops the work. Tokens are drawn with a fixed seed.
    Several ranks compute a share each, in a folder that all of them must see.
    Raises EvaluationError before anything is computed if the store was prepared otherwise, if the features would take
    more than `max_gb` or do not fit on the disk, and if a rank does not see the files of the others.
    """
    encoder.require_prepared(store)
    size = len(store) * per_volume * encoder.width * 2 / 1e9
    if size > max_gb:
        fits = int(per_volume * max_gb / size)
        raise EvaluationError(
            f"{folder}: token features of {len(store)} volumes would take {size:.2g} GB, more than max_cache_gb "
            f"{max_gb:g}; set tokens_per_volume={fits} or raise the limit"
        )
    volumes = "\n".join(sorted(f"{row.acquisition} {row.checksum}" for row in store.rows))
    key = hash_text(f"{encoder.key}|{per_volume}|{volumes}")[:24]
    path = Path(folder) / f"tokens-{key}.npy"
    record = path.with_suffix(".json")
    exists = encoder.runtime.collect(np.array([record.is_file()]))
    _require_shared_folder(exists == exists[0], path.parent)
    if not exists[0]:
        _compute(encoder, store, path, record, per_volume, between)
    facts = from_json(record.read_text("utf-8"))
    counts = np.arange(per_volume)[None, :] < np.array(facts["counts"])[:, None]
    place = {name: i for i, name in enumerate(facts["acquisitions"])}
    return TokenFeatures(place, np.load(path, mmap_mode="r"), counts)


def draw_tissue(tokens_MD: np.ndarray, tissue_M: np.ndarray, per_volume: int) -> tuple[np.ndarray, np.ndarray]:
    """Up to T = `per_volume` random tissue tokens of one volume, drawn with a fixed seed.

    Returns float16 [T, D], padded with zeros, and bool [T]: False for padding.
    """
    found = drawn_places(tissue_M, per_volume)
    drawn = np.zeros((per_volume, tokens_MD.shape[1]), np.float16)
    drawn[: len(found)] = tokens_MD[found]
    return drawn, np.arange(per_volume) < len(found)


def drawn_places(tissue_M: np.ndarray, per_volume: int) -> np.ndarray:
    """int64: the places that `draw_tissue` draws, ascending; at most `per_volume` of those where `tissue_M` is True."""
    return np.sort(np.random.default_rng(SELECTION_SEED).permutation(np.flatnonzero(tissue_M))[:per_volume])


def _reserved(path: Path, shape: tuple[int, ...]) -> np.memmap:
    """A new float16 array in a file whose space on the disk is reserved: otherwise a full disk would kill the process,
    without a message, when it writes to the mapped file. Raises EvaluationError if there is no space."""
    try:
        array = np.lib.format.open_memmap(path, "w+", np.float16, shape)
        _reserve(path)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise EvaluationError(
            f"{path.parent}: no room for token features of {2 * math.prod(shape) / 1e9:.2g} GB ({error.strerror}); "
            "free some space, lower tokens_per_volume, or choose another --out"
        ) from None
    return array


def _reserve(path: Path) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        except OSError as error:
            # Some file systems cannot reserve space.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise


def _require_shared_folder(sees: np.ndarray, folder: Path) -> None:
    """Raise EvaluationError on every rank if one does not see rank 0's files. `sees`: bool [ranks], equal on all
    ranks."""
    if not sees.all():
        raise EvaluationError(
            f"rank {np.flatnonzero(~sees)[0]} does not see the folder that rank 0 keeps token features in ({folder}); "
            f"expected the same files there on all {len(sees)} ranks; put --out on a disk that all hosts share, or "
            "train the encoder as well (lr_encoder above 0)"
        )


def _compute(
    encoder: Encoder, store: Store, path: Path, record: Path, per_volume: int, between: Callable[[], None]
) -> None:
    """Compute the features of a store, each rank its share of the batches, and join them on rank 0."""
    runtime = encoder.runtime
    runtime.first(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    # Ranks share whole batches, so that the same sums are computed in the same order for any number of ranks.
    firsts = runtime.part(np.arange(0, len(store), BATCH))
    rows = np.concatenate([np.arange(first, min(first + BATCH, len(store))) for first in firsts] or [np.arange(0)])
    part = path.with_suffix(f".{runtime.rank}.partial.npy")
    # At least one row, because an empty file cannot be mapped.
    array = _reserved(part, (max(1, len(rows)), per_volume, encoder.width))
    counts = np.zeros(len(rows), int)
    with Progress("token features", len(rows), enabled=runtime.leads) as progress:
        for first in range(0, len(rows), BATCH):
            between()
            tokens, tissue = encoder.tissue_tokens(store.read(rows[first : first + BATCH]))
            for place, (own, is_tissue) in enumerate(zip(tokens, tissue, strict=True), first):
                array[place], kept = draw_tissue(own, is_tissue, per_volume)
                counts[place] = kept.sum()
            progress.advance(len(tokens))
    array.flush()
    lengths, counts = runtime.collect(np.array([len(rows)])), runtime.collect(counts)

    def join() -> None:
        parts = [path.with_suffix(f".{rank}.partial.npy") for rank in range(runtime.world)]
        if len(parts) > 1:
            partial = path.with_suffix(".partial.npy")
            whole = _reserved(partial, (len(store), *array.shape[1:]))
            for end, length, own in zip(lengths.cumsum(), lengths, parts, strict=True):
                whole[end - length : end] = np.load(own, mmap_mode="r")[:length]
            whole.flush()
            for own in parts:
                own.unlink()
            parts = [partial]
        flush(parts[0])
        parts[0].replace(path)
        # The record comes last: without it the features count as not computed.
        names = [row.acquisition for row in store.rows]
        facts = {"acquisitions": names, "counts": counts.tolist(), "encoder": encoder.source}
        write_whole(record, json.dumps(facts).encode())

    # Before rank 0 joins the parts: every rank must see the file of rank 0.
    sees = runtime.collect(np.array([runtime.leads or path.with_suffix(".0.partial.npy").is_file()]))
    _require_shared_folder(sees, path.parent)
    runtime.first(join)
