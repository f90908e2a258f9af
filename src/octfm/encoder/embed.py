"""One vector per acquisition of a store, written as parquet with the key of what made it; aligned by id, never by order."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from octfm.encoder.budget import budget_facts, dropped_of
from octfm.encoder.encoder import Encoder
from octfm.errors import Echo, EvaluationError
from octfm.io.hashing import hash_text
from octfm.io.location import Location, location, write_whole
from octfm.store.layout import Arrays
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

L = TypeVar("L", bound=Location)
BATCH = 16
HISTOGRAM_BINS = 64
WORDS = ("acquisition", "participant", "eye_id", "laterality", "scanner", "protocol", "split")
"""Who and what a vector is of."""
NAMES = ("pretrained", "random_init", "histogram")
"""Encoders that stand side by side in every result, the one of interest first."""


def embedding_files(run: str | Location, folder: str | Location | None = None) -> list[Location]:
    """The embeddings of a run, in RUN/embeddings or in `folder` (also in a bucket), the encoder of interest first."""
    where = location(folder) if folder is not None else location(run) / "embeddings"
    found = [where / f"{name}.parquet" for name in NAMES if (where / f"{name}.parquet").is_file()]
    if not found:
        raise EvaluationError(f"{where}: no embeddings; make them with `octfm embed {run} --store prepared`")
    return found


def embed_store(encoder: Encoder, store: Store, out: str | Path, name: str = "pretrained", echo: Echo = print) -> Path:
    """Write <out>/<name>.parquet: one float32 vector for every volume of the store."""
    encoder.require_prepared(store)
    target = Path(out) / f"{name}.parquet"
    key = f"{encoder.vector_key}-{_voxels_of(store)}"
    facts = {"key": key, "encoder": encoder.source, "precision": encoder.runtime.precision, "name": name}
    facts |= {"pool": encoder.config.objective.pool}
    vectors, budget = _known(target, key)
    if vectors is None:
        dropped: list[np.ndarray] = []

        def describe(arrays: Arrays) -> np.ndarray:
            dropped.append(dropped_of(encoder, arrays))
            return encoder.embed_arrays(arrays)

        vectors = _over(store, describe, encoder.vector_width)
        budget = budget_facts(encoder, store, np.concatenate([*dropped, np.zeros(0)]), vectors)
        if name == NAMES[0] and budget:
            echo(budget["sentence"])
    else:
        # Written again all the same: splits and labels may have changed since.
        echo(f"{target}: vectors of these weights and volumes are already there")
    return write_vectors(target, _words(store), vectors, facts | {"budget": budget}, store.preprocessing)


def histogram_baseline(store: Store, out: str | Path) -> Path:
    """The plain descriptor that every result is compared with: a 64-bin intensity histogram of the voxels that hold image."""

    vectors = _over(store, histogram, HISTOGRAM_BINS)
    return write_vectors(
        Path(out) / "histogram.parquet", _words(store), vectors, histogram_facts(store.fingerprint), store.preprocessing
    )


def embed_with(embed: Callable[[np.ndarray], np.ndarray], store: Store, out: str | Path, name: str) -> Path:
    """Write <out>/<name>.parquet with an encoder of your own: a function of uint8 voxels [B, D, H, W] that returns vectors [B, width]."""
    first = np.asarray(embed(store.read([0]).voxels), np.float32)
    if first.ndim != 2 or len(first) != 1:
        raise EvaluationError(f"{name}: expected vectors [1, width] for one volume, got {list(first.shape)}")
    vectors = _over(store, lambda arrays: embed(arrays.voxels), first.shape[1])
    if not np.isfinite(vectors).all():
        raise EvaluationError(f"{name}: returned NaN or infinity for some volume")
    facts = {"key": f"{name}-{_voxels_of(store)}", "encoder": name, "name": name, "precision": "fp32"}
    return write_vectors(Path(out) / f"{name}.parquet", _words(store), vectors, facts, store.preprocessing)


def histogram(arrays: Arrays) -> np.ndarray:
    """float32 [B, 64]: how the voxels that hold image are distributed over grey values."""
    rows = np.arange(arrays.voxels.shape[2])[:, None]
    described = []
    for voxels, valid in zip(arrays.voxels, arrays.valid, strict=True):
        image = (rows >= valid[0][:, None, :]) & (rows < valid[1][:, None, :])
        counts = np.bincount(voxels[image] // (256 // HISTOGRAM_BINS), minlength=HISTOGRAM_BINS)
        described.append(counts / max(1, counts.sum()))
    return np.array(described, np.float32)


def histogram_facts(fingerprint: str) -> dict[str, str]:
    """What an embeddings file says about them."""
    key = f"histogram-{HISTOGRAM_BINS}-{fingerprint}"
    return {"key": key, "encoder": "intensity histogram", "name": "histogram", "precision": "fp32"}


def _voxels_of(store: Store) -> str:
    """Identifies the volumes of a store and their order."""
    return hash_text("\n".join(f"{row.acquisition} {row.checksum}" for row in store.rows))[:16]


def _known(path: Path, key: str) -> tuple[np.ndarray | None, dict[str, Any]]:
    """The vectors of an embeddings file made under this key, and what it says about its budget; None where there is no such file,
    or one whose budget was still compared without telling apart what moves all vectors alike."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return None, {}
    try:
        table = pq.read_table(pa.BufferReader(path.read_bytes()))
    except pa.ArrowInvalid:
        return None, {}
    facts = json.loads((table.schema.metadata or {}).get(b"octfm", b"{}"))
    if facts.get("key") != key or "budget" not in facts:
        return None, {}
    if facts["budget"] and "own" not in facts["budget"].get("full_grid", {}):
        return None, {}
    return np.array(table["vector"].to_pylist(), np.float32), facts["budget"]


def _over(store: Store, describe: Callable, width: int) -> np.ndarray:
    vectors = np.empty((len(store), width), np.float32)
    for first in range(0, len(store), BATCH):
        rows = np.arange(first, min(first + BATCH, len(store)))
        vectors[rows] = describe(store.read(rows))
    return vectors


def _words(store: Store) -> list[dict[str, Any]]:
    return [{name: getattr(row, name) for name in (*WORDS, "participant_labels")} for row in store.rows]


def write_vectors(
    path: L, rows: Sequence[Mapping[str, Any]], vectors: np.ndarray, facts: dict[str, Any], preprocessing: Preprocessing
) -> L:
    """One embeddings file, as `read_embeddings` reads it: who and what each row is, and its vector, float32 [N, width]."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {name: [row[name] for row in rows] for name in WORDS}
    columns["participant_labels"] = [json.dumps(row["participant_labels"]) for row in rows]
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1]).cast(
        pa.list_(pa.float32())
    )
    facts = facts | {"preprocessing": preprocessing.model_dump(mode="json"), "width": int(vectors.shape[1])}
    content = io.BytesIO()
    pq.write_table(pa.table(columns).replace_schema_metadata({"octfm": json.dumps(facts)}), content)
    write_whole(path, content.getvalue())
    return path
