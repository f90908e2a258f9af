"""Predictions of a fine-tuned model for every tested acquisition: a table for the leaderboard."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octfm.display import number
from octfm.encoder.embeddings import Embeddings
from octfm.errors import EvaluationError, reason_of
from octfm.evaluation.cases import Cases
from octfm.evaluation.scoring import Predictions
from octfm.io.location import from_json, write_whole
from octfm.io.parquet import from_parquet, to_parquet
from octfm.store.store import Store


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """The content of a predictions.parquet."""

    path: str
    facts: dict[str, Any]
    """target, classes, recipe, seed, best_epoch, log_prior, fingerprint of the Preprocessing."""
    of_acquisition: dict[str, tuple[np.ndarray, float | None]]
    """Acquisition -> value [K] and grade."""
    checksums: dict[str, str | None]
    """Acquisition -> checksum of the volume that was predicted on; None in files of earlier versions."""

    def require_same_volumes(self, stores: Sequence[Store]) -> None:
        """Raises EvaluationError if a store of the same Preprocessing holds other voxels of a tested acquisition."""
        for store in stores:
            if store.fingerprint != self.facts.get("fingerprint"):
                continue
            names = [r.acquisition for r in store.rows if self.checksums.get(r.acquisition) not in (None, r.checksum)]
            if names:
                raise EvaluationError(
                    f"{self.path}: made from other voxels than {store.path} holds now for "
                    f"{number(len(names), 'tested volume')} ({names[0]} …), prepared again since; fine-tune again, "
                    "into another --out"
                )

    def for_cases(self, cases: Cases, data: Embeddings, tested: np.ndarray) -> Predictions:
        """Predictions for these tested positions. Raises EvaluationError for a run of other participants or classes."""
        if (self.facts["target"], tuple(self.facts["classes"])) != (cases.target.name, cases.classes or ()):
            raise EvaluationError(
                f"{self.path}: made for {self.facts['target']} with classes "
                f"{', '.join(self.facts['classes']) or 'none'}, expected "
                f"{cases.target.name} with {', '.join(cases.classes or ()) or 'none'}; the order of fine-tuning and "
                "--order here must agree"
            )
        names = data.acquisition[cases.rows[tested]].tolist()
        if absent := [name for name in names if name not in self.of_acquisition]:
            raise EvaluationError(
                f"{self.path}: lacks {len(absent)} test acquisitions ({absent[0]} …); fine-tune on this data"
            )
        value = np.stack([self.of_acquisition[name][0] for name in names])
        grades = [self.of_acquisition[name][1] for name in names]
        prior = np.tile(self.facts["log_prior"], (len(names), 1)) if cases.classes else None
        return Predictions(tested, value, prior, None if None in grades else np.array(grades, float))


def write_predictions(
    path: Path,
    store: Store,
    cases: Cases,
    log_prior: np.ndarray | None,
    predictions: Predictions,
    recipe: dict[str, Any],
    seed: int,
    best_epoch: int,
) -> None:
    """Write a Parquet file with a row per tested acquisition: ids, scanner, checksum of the volume, label, value, grade
    (null without grades) and, for classes, the most probable one. `recipe`: what runs that differ only in their seed
    share."""
    import pyarrow as pa

    rows = [store.rows[i] for i in cases.rows[predictions.rows]]
    columns: dict[str, Any] = {
        name: [getattr(row, name) for row in rows]
        for name in ("acquisition", "participant", "eye_id", "scanner", "checksum")
    }
    label = cases.label[predictions.rows]
    columns["label"] = [cases.classes[int(k)] for k in label] if cases.classes else label.astype(str).tolist()
    if cases.classes:
        columns["predicted"] = [cases.classes[k] for k in predictions.value.argmax(1)]
    columns["value"] = pa.array(predictions.value.tolist(), pa.list_(pa.float64()))
    columns["grade"] = pa.array(
        [None] * len(rows) if predictions.grade is None else predictions.grade.tolist(), pa.float64()
    )
    facts = {
        "target": cases.target.name,
        "classes": list(cases.classes or ()),
        "recipe": recipe,
        "seed": seed,
        "best_epoch": best_epoch,
        "fingerprint": store.fingerprint,
        "log_prior": log_prior.tolist() if log_prior is not None else [],
    }
    write_whole(path, to_parquet(pa.table(columns).replace_schema_metadata({"octfm": json.dumps(facts)})))


def read_predictions(path: Path) -> PredictionTable:
    """Read a predictions.parquet. Raises EvaluationError if it is not one."""
    import pyarrow as pa

    try:
        table = from_parquet(path)
        facts = from_json((table.schema.metadata or {})[b"octfm"])
    except (pa.ArrowException, KeyError, ValueError, FileNotFoundError) as error:
        raise EvaluationError(f"{path}: not the predictions of octfm finetune ({reason_of(error, 120)})") from None
    rows = table.to_pylist()
    found = {r["acquisition"]: (np.array(r["value"]), r["grade"]) for r in rows}
    return PredictionTable(str(path), facts, found, {r["acquisition"]: r.get("checksum") for r in rows})
