"""One vector per acquisition of a store, written as parquet with the key of what made it; aligned by id, never by order."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from octfm.data.store import Store
from octfm.errors import EvaluationError
from octfm.evaluation.encoder import Encoder, load_encoder
from octfm.evaluation.maps import save_pictures
from octfm.evaluation.trained_head import load_head

BATCH = 16
HISTOGRAM_BINS = 64


NAMES = ("pretrained", "random_init", "histogram")
"""Encoders that stand side by side in every result, the one of interest first."""


def embed_all(
    run: str | Path,
    store: str | Path,
    out: Path | None = None,
    *,
    baselines: bool = True,
    head: str | Path | None = None,
    echo: Callable[[str], None] = print,
) -> list[Path]:
    """Embed a store with a run's encoder and, as baselines, with the same encoder before its first update and with a histogram.

    Into `out`, or RUN/embeddings; beside it, in `figures`, what the encoder is shown and what it sees (for the report); with `head`, a run
    of octfm finetune on this encoder, also what its answers depend on.
    """
    run = Path(run)
    encoder, opened = load_encoder(run), Store.open(store)
    if len(opened) == 0:
        raise EvaluationError(f"{opened.path}: the store holds no volume, so there is nothing to embed; see its unprepared.jsonl")
    home = run if run.is_dir() else run.parent.parent
    folder = out or home / "embeddings"
    written = [embed_store(encoder, opened, folder, "pretrained", echo)]
    if baselines:
        written.append(embed_store(load_encoder(run, random_init=True), opened, folder, "random_init", echo))
        written.append(histogram_baseline(opened, folder))
    trained = load_head(head, encoder) if head is not None else None
    save_pictures(encoder, opened, folder.parent / "figures", trained)
    return written


def embedding_files(run: str | Path) -> list[Path]:
    """The embeddings of a run, the encoder of interest first."""
    folder = Path(run) / "embeddings"
    found = [folder / f"{name}.parquet" for name in NAMES if (folder / f"{name}.parquet").is_file()]
    if not found:
        raise EvaluationError(f"{folder}: no embeddings; make them with `octfm embed {run} --store prepared`")
    return found


def embed_store(encoder: Encoder, store: Store, out: str | Path, name: str = "pretrained", echo: Callable[[str], None] = print) -> Path:
    """Write <out>/<name>.parquet: one float32 vector for every volume of the store."""
    if store.fingerprint != encoder.fingerprint:
        raise EvaluationError(
            f"{store.path}: prepared with other settings than {encoder.source} was trained on; "
            "prepare the volumes with the checkpoint's own Preprocessing (octfm prepare --like RUN) (F15)"
        )
    target = Path(out) / f"{name}.parquet"
    key = f"{encoder.key}-{_voxels_of(store)}"
    facts = {"key": key, "encoder": encoder.source, "precision": encoder.runtime.precision, "name": name}
    vectors = _known_vectors(target, key)
    if vectors is None:
        vectors = _over(store, encoder.embed_arrays, encoder.width)
    else:
        # Written again all the same: splits and labels may have changed since.
        echo(f"{target}: vectors of these weights and volumes are already there")
    return _write(target, store, vectors, facts)


def histogram_baseline(store: Store, out: str | Path) -> Path:
    """The plain descriptor that every result is compared with: a 64-bin intensity histogram of the voxels that hold image."""

    def describe(arrays) -> np.ndarray:
        rows = np.arange(arrays.voxels.shape[2])[:, None]
        described = []
        for voxels, valid in zip(arrays.voxels, arrays.valid, strict=True):
            image = (rows >= valid[0][:, None, :]) & (rows < valid[1][:, None, :])
            counts = np.bincount(voxels[image] // (256 // HISTOGRAM_BINS), minlength=HISTOGRAM_BINS)
            described.append(counts / max(1, counts.sum()))
        return np.array(described, np.float32)

    vectors = _over(store, describe, HISTOGRAM_BINS)
    facts = {
        "key": f"histogram-{HISTOGRAM_BINS}-{store.fingerprint}",
        "encoder": "intensity histogram",
        "name": "histogram",
    }
    return _write(Path(out) / "histogram.parquet", store, vectors, facts | {"precision": "fp32"})


def _voxels_of(store: Store) -> str:
    """Identifies the volumes of a store and their order."""
    return hashlib.sha256("\n".join(f"{row.acquisition} {row.checksum}" for row in store.rows).encode()).hexdigest()[:16]


def _known_vectors(path: Path, key: str) -> np.ndarray | None:
    """The vectors of an embeddings file made under this key; None where there is no such file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.is_file():
        return None
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid:
        return None
    metadata = table.schema.metadata or {}
    if json.loads(metadata.get(b"octfm", b"{}")).get("key") != key:
        return None
    return np.array(table["vector"].to_pylist(), np.float32)


def _over(store: Store, describe: Callable, width: int) -> np.ndarray:
    vectors = np.empty((len(store), width), np.float32)
    for first in range(0, len(store), BATCH):
        rows = np.arange(first, min(first + BATCH, len(store)))
        vectors[rows] = describe(store.read(rows))
    return vectors


def _write(path: Path, store: Store, vectors: np.ndarray, facts: dict) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = store.rows
    columns = {
        name: [getattr(row, name) for row in rows]
        for name in ("acquisition", "participant", "eye_id", "laterality", "scanner", "protocol", "split")
    }
    columns["participant_labels"] = [json.dumps(row.participant_labels) for row in rows]
    columns["vector"] = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1]).cast(pa.list_(pa.float32()))
    facts = facts | {"preprocessing": store.preprocessing.model_dump(mode="json"), "width": int(vectors.shape[1])}
    table = pa.table(columns).replace_schema_metadata({"octfm": json.dumps(facts)})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    pq.write_table(table, partial)
    partial.replace(path)
    return path
