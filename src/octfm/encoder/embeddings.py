"""Read the embeddings files of `octfm embed` and align encoders by acquisition id."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.participants.ids import person_key, under_one_id
from octfm.display import brief, data_frame, number, with_labels
from octfm.errors import Echo, EvaluationError, reason_of
from octfm.io.location import BucketPath, Location, from_json, location
from octfm.io.parquet import from_parquet
from octfm.io.progress import say
from octfm.store.exclusion import excluded
from octfm.store.store import Store
from octfm.volume.volume import eye_id_of

TEXTS = ("acquisition", "participant", "eye_id", "scanner")
"""Columns that become arrays of text."""
OTHERS = ("laterality", "split", "participant_labels")
"""Columns that become tuples, because values may be None or mappings."""
UNRECORDED = "the tokens of its training"
"""Readout of files by earlier versions, which read vectors from the tokens of each encoder's training."""


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The vectors of one encoder, a row per acquisition, sorted by acquisition id."""

    name: str
    path: str
    metadata: dict[str, Any]
    """key (weights + Preprocessing + precision + readout), encoder, weights (`Encoder.digest`), precision, width,
    readout, as written by `octfm embed`."""
    acquisition: np.ndarray
    participant: np.ndarray
    eye_id: np.ndarray
    laterality: tuple[str | None, ...]
    scanner: np.ndarray
    split: tuple[str | None, ...]
    participant_labels: tuple[dict[str, str], ...]
    vectors: np.ndarray
    """float64 [N, width]. NaN (never in a file) where an arm lacks a number; a probe uses the mean of its training
    rows."""
    parts: tuple[tuple[str, int], ...] = ()
    """Name and width of each arm that `vectors` joins (see `joined`); empty if it is no joint arm."""
    columns: tuple[str, ...] = ()
    """Label column from which each channel was made; a probe of that column leaves it out. Empty: from no label."""
    draws: tuple[np.ndarray, ...] = ()
    """Vectors [N, width] of other random draws of the same arm. A probe reports the mean over all, with its spread."""

    def __post_init__(self):
        count, shape, kind = len(self.acquisition), [*np.shape(self.vectors)], type(self.vectors).__name__
        # A probe would take the values below a mask.
        masked = isinstance(self.vectors, np.ma.MaskedArray)
        if masked or not isinstance(self.vectors, np.ndarray) or len(shape) != 2 or shape[0] != count:
            raise EvaluationError(
                f"{self.name}: expected a NumPy array of vectors [{count}, width], got {kind} {shape}"
            )
        if self.vectors.dtype.kind not in "fiub" or np.isinf(self.vectors).any():
            got = "infinity" if self.vectors.dtype.kind == "f" else str(self.vectors.dtype)
            raise EvaluationError(f"{self.name}: expected vectors of finite numbers, got {got}")
        if self.vectors.size and np.isnan(self.vectors).all():
            raise EvaluationError(f"{self.name}: all its vectors are NaN; find out where its encoder became so")

    def __repr__(self) -> str:
        people = number(len(set(under_one_id(self.participant.tolist()))), "participant")
        count, width = self.vectors.shape
        return brief("Embeddings", self.name, f"{number(count, 'vector')} of {width}", people)

    def by_person(self) -> "Embeddings":
        """The same with one id for each person and each eye: scanners may spell an id differently."""
        person = np.array(under_one_id(self.participant.tolist()), dtype=str)
        eye = [
            own if who == named else eye_id_of(who, side)
            for own, who, named, side in zip(self.eye_id, person, self.participant, self.laterality, strict=True)
        ]
        return replace(self, participant=person, eye_id=np.array(eye, dtype=str))

    def to_pandas(self) -> Any:
        """A DataFrame with one row per acquisition, which is its index: participant, eye, scanner, split, a column for
        every label of the participant, and the vector as columns v0, v1, … Raises ConfigError without pandas."""
        names = [name for name in (*TEXTS, *OTHERS) if name != "participant_labels"]
        rows = []
        for i, labels in enumerate(self.participant_labels):
            vector = {f"v{k}": value for k, value in enumerate(self.vectors[i])}
            rows.append(with_labels({name: getattr(self, name)[i] for name in names} | vector, labels))
        return data_frame(rows).set_index("acquisition") if rows else data_frame(rows)


def without_excluded_vectors(embeddings: Embeddings, file: str | Path, echo: Echo = say) -> Embeddings:
    """The vectors whose acquisition or participant `file` does not list; uris in it are ignored."""
    names = zip(embeddings.acquisition.tolist(), embeddings.participant.tolist(), strict=True)
    kept = np.flatnonzero(~excluded(file, names, embeddings.path, echo=echo))
    return take_rows(embeddings, kept)


def take_rows(embeddings: Embeddings, rows: np.ndarray) -> Embeddings:
    """These rows only, in this order."""
    columns: dict[str, Any] = {name: getattr(embeddings, name)[rows] for name in (*TEXTS, "vectors")}
    columns["draws"] = tuple(vectors[rows] for vectors in embeddings.draws)
    columns |= {name: tuple(getattr(embeddings, name)[i] for i in rows) for name in OTHERS}
    return replace(embeddings, **columns)


def joined(name: str, arms: Sequence[Embeddings]) -> Embeddings:
    """Join aligned arms into one with the channels of all; linear probes penalise each of them separately."""
    first = arms[0]
    parts = tuple((arm.name, arm.vectors.shape[1]) for arm in arms)
    facts = {"encoder": " and ".join(arm.name for arm in arms)}
    if read := [arm.metadata["readout"] for arm in arms if arm.metadata.get("readout")]:
        facts["readout"] = read[0]
    columns = tuple(c for arm in arms for c in arm.columns or ("",) * arm.vectors.shape[1])
    return replace(
        first, name=name, path=name, metadata=facts, vectors=np.hstack([arm.vectors for arm in arms]), parts=parts,
        columns=columns if any(columns) else (), draws=(),
    )  # fmt: skip


def read_embeddings(path: str | PathLike[str] | Location) -> Embeddings:
    """Read a file of `octfm embed`. Raises EvaluationError on damage, repeated acquisitions or non-finite vectors."""
    import pyarrow as pa

    path = location(path)
    if not path.is_file():
        raise EvaluationError(f"{path}: no such embeddings file; make it with octfm embed")
    try:
        table = from_parquet(path)
    except pa.ArrowException as error:
        raise EvaluationError(f"{path}: damaged ({reason_of(error)}); delete it and embed again") from None
    if absent := [name for name in (*TEXTS, *OTHERS, "vector") if name not in table.column_names]:
        raise EvaluationError(
            f"{path}: expected the columns that octfm embed writes, {', '.join(absent)} missing; embed again"
        )
    table = table.take(np.argsort(np.array(table["acquisition"].to_pylist(), dtype=str), kind="stable"))
    facts = from_json((table.schema.metadata or {}).get(b"octfm", b"{}"))
    columns = {name: table.column(name).to_pylist() for name in (*TEXTS, *OTHERS)}
    columns["participant_labels"] = [from_json(text) if text else {} for text in columns["participant_labels"]]
    acquisition = np.array(columns["acquisition"], dtype=str)
    if len(acquisition) == 0:
        raise EvaluationError(f"{path}: holds no acquisition; embed again")
    # Sorted, so repeated acquisitions are neighbours.
    repeated = acquisition[1:][acquisition[1:] == acquisition[:-1]]
    if repeated.size:
        raise EvaluationError(f"{path}: acquisition {repeated[0]} occurs more than once; embed again into a new file")
    vectors = _matrix(table.column("vector"))
    if vectors is None or not np.isfinite(vectors).all():
        raise EvaluationError(
            f"{path}: expected one finite vector of equal width per acquisition; the encoder or the file is damaged"
        )
    metadata = {k: v for k, v in facts.items() if k in ("key", "encoder", "weights", "precision", "width", "readout")}
    if "pool" in facts:  # only vectors of tokens are pooled
        metadata.setdefault("readout", UNRECORDED)
    return from_columns(str(facts.get("name", path.stem)), str(path), metadata, columns, vectors)


def from_columns(
    name: str, path: str, metadata: dict[str, Any], columns: dict[str, list[Any]], vectors: np.ndarray
) -> Embeddings:
    """Embeddings from lists of TEXTS and OTHERS by name."""
    values: dict[str, Any] = {key: np.array(columns[key], dtype=str) for key in TEXTS}
    values |= {key: tuple(columns[key]) for key in OTHERS}
    return Embeddings(name=name, path=path, metadata=metadata, vectors=vectors, **values)


def _matrix(column: Any) -> np.ndarray | None:
    """float64 [N, width] from a column of lists; None if their lengths differ."""
    lists = column.combine_chunks()
    flat, width = lists.flatten().to_numpy(zero_copy_only=False), len(lists[0])
    if lists.null_count or any(np.diff(lists.offsets.to_numpy()) != width) or width == 0:
        return None
    return flat.astype(np.float64).reshape(len(lists), width)


def of_store(store: Store) -> Embeddings:
    """The metadata of a store's volumes as Embeddings of width 0, in the order of the store."""
    columns = {name: [getattr(row, name) for row in store.rows] for name in (*TEXTS, *OTHERS)}
    return from_columns(str(store.path), str(store.path), {}, columns, np.zeros((len(store), 0)))


def align(given: str | Location | Embeddings | Iterable[str | Location | Embeddings]) -> list[Embeddings]:
    """Embeddings of the same acquisitions, with rows in the order of the first; files are read. Raises EvaluationError
    unless names differ and readout, acquisitions and participants are the same, TypeError for anything else.
    """
    one = str | PathLike | BucketPath | Embeddings
    many: Iterable[Any] = [given] if isinstance(given, one) or not isinstance(given, Iterable) else given
    encoders: list[Embeddings] = []
    for each in many:
        if not isinstance(each, one):
            raise TypeError(
                f"expected files of octfm embed or Embeddings, got {type(each).__name__}; of vectors [N, width] in a "
                'store\'s order, replace(of_store(store), name="mine", vectors=vectors) makes Embeddings '
                "(octfm.encoder.embeddings)"
            )
        encoders.append(each if isinstance(each, Embeddings) else read_embeddings(each))
    if not encoders:
        raise EvaluationError("expected at least one embeddings file, got none")
    names = [e.name for e in encoders]
    if len(set(names)) < len(names):
        raise EvaluationError(f"expected differently named embeddings, got {', '.join(names)}; pass each encoder once")
    first = encoders[0]
    _expect_one_readout(encoders)
    for place, other in enumerate(encoders[1:], 1):
        row_of = {acquisition: row for row, acquisition in enumerate(other.acquisition.tolist())}
        if odd := sorted(row_of.keys() ^ set(first.acquisition.tolist())):
            raise EvaluationError(
                f"{other.path}: expected the acquisitions of {first.path}, but {len(odd)} are in only one of the two "
                f"({odd[0]} …); embed both from the same store",
                public="The embeddings are not of the same acquisitions: embed all runs from the same store.",
            )
        if not np.array_equal(first.acquisition, other.acquisition):
            # Embeddings of a store are in its order, those of a file are sorted.
            rows = np.array([row_of[acquisition] for acquisition in first.acquisition.tolist()])
            encoders[place] = other = take_rows(other, rows)
        people, others = (list(map(person_key, each.participant.tolist())) for each in (first, other))
        if people != others:
            raise EvaluationError(
                f"{other.path}: participants differ from {first.path} for the same acquisitions; "
                "embed both from the same store",
                public="The embeddings name other participants for the same acquisitions: use one store.",
            )
    return encoders


def _expect_one_readout(encoders: Sequence[Embeddings]) -> None:
    """Raise EvaluationError for different readouts: other tokens or another pooling can change a score more than
    training does."""
    read = [(e, e.metadata["readout"]) for e in encoders if e.metadata.get("readout")]
    for other, readout in read[1:]:
        first, expected = read[0]
        if readout != expected:
            raise EvaluationError(
                f"{other.path}: vectors read from {readout}, those of {first.path} from {expected}; embed both again, "
                "with the same --pool",
                public="The embeddings were read from other tokens or pooled otherwise: embed all runs again with the "
                "same --pool.",
            )
