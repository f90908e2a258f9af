"""All data of reports and cards, read from a run folder, its catalog and its store."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.participants.ids import under_one_id
from octfm.config import parse_yaml
from octfm.errors import EvaluationError
from octfm.io.location import Location, from_json
from octfm.run.checkpoint_files import before_newest
from octfm.run.tracking import read_metrics
from octfm.store.layout import StoreRow, Unprepared
from octfm.store.store import Store
from octfm.tasks.scene import Scene, load_scenes
from octfm.volume.volume import eye_id_of

_OF_RECORD: dict[str, type] = {
    "command": str, "data": str, "fingerprint": str, "started": str, "environment": dict, "git": dict,
    "parameters": dict, "store": dict, "inherited_participants": int, "inherited_unknown": int,
}  # fmt: skip
"""Keys of run.json that reports and cards look into -> type."""
_KINDS = {str: "text", dict: "an object", int: "a whole number"}


@dataclass(frozen=True, eq=False)
class Sources:
    """Contents of a run's files. Optional files that do not exist are None or empty."""

    run: Path
    record: dict[str, Any]
    """run.json"""
    config: str | None
    """config.yaml as written"""
    train: list[dict[str, Any]]
    validation: list[dict[str, Any]]
    health: list[dict[str, Any]]
    online: list[dict[str, Any]]
    """Rows of the online probe."""
    probe: dict[str, Any] | None
    outdated: str
    """A sentence if the probe is of a checkpoint before the run's newest one, as after more training; else empty."""
    catalog: Catalog | None
    store: Store | None
    unprepared: tuple[Unprepared, ...]
    """Volumes that could not be prepared."""
    is_phantom: bool
    """Whether the catalog is of a phantom cohort, which has a ground_truth folder."""
    scenes: tuple[Scene, ...]
    """A few volumes of each scanner with the encoder's tokens, masks and features."""

    @property
    def inherited(self) -> int:
        """How many people, at least, only the weights that the run began with have seen (model.init)."""
        return self.record.get("inherited_participants", 0)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """config.yaml, parsed."""
        return (yaml.safe_load(self.config) if self.config else None) or {}


def is_pretraining(run: Location) -> bool:
    """Whether this is a run folder of octfm pretrain; runs of fine-tuning and segmentation have a run.json as well."""
    return _verb(run) == "pretrain"


def _verb(run: Location) -> str | None:
    """The verb that made a run folder; None without a run.json."""
    try:
        record = from_json((run / "run.json").read_text("utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # the latter if `run` is a file, such as a checkpoint
        return None
    except ValueError:
        return "pretrain"  # `gather` raises an error that names the damage
    return record.get("kind", "pretrain") if isinstance(record, dict) else "pretrain"


def require_pretraining(run: Location) -> None:
    """Raise EvaluationError unless this is a run folder of octfm pretrain."""
    if (verb := _verb(run)) == "pretrain":
        return
    if verb is None:
        raise EvaluationError(f"{run}: expected a run folder with a run.json; create one with octfm pretrain")
    shows = "octfm leaderboard compares it with others, and " if verb == "finetune" else ""
    raise EvaluationError(
        f"{run}: holds a run of octfm {verb}, expected one of octfm pretrain; {shows}octfm.read_result "
        "in Python shows it"
    )


def gather(run: Path, catalog: str | Location | None = None, store: str | Location | None = None) -> Sources:
    """Read a run folder. Raises EvaluationError, or ConfigError for its settings, if it is not one; a given catalog or
    store must be readable."""
    require_pretraining(run)
    rows = metric_rows(run)
    config = run / "config.yaml"
    probe = _json(run / "probe.json", ("results", "comparisons")) if (run / "probe.json").is_file() else None
    scanned = Catalog.load(catalog) if catalog else None
    prepared = Store.open(store) if store else None
    accepted, volumes = by_person(scanned.acquisitions if scanned else (), prepared.rows if prepared else ())
    if scanned is not None:
        scanned = replace(scanned, acquisitions=accepted)
    if prepared is not None:
        prepared = prepared.with_rows(tuple(volumes))
    return Sources(
        run=run,
        record=_record(run / "run.json"),
        config=_config(config) if config.is_file() else None,
        train=[row for row in rows if row.get("kind") == "train"],
        validation=[row for row in rows if row.get("kind") == "validation"],
        health=[row for row in rows if row.get("kind") in ("health", "incident", "checkpoint", "bucket")],
        online=[row for row in rows if row.get("kind") == "probe"],
        probe=probe,
        outdated=_outdated(probe, run),
        catalog=scanned,
        store=prepared,
        unprepared=prepared.unprepared() if prepared is not None else (),
        is_phantom=scanned is not None and (Path(scanned.root) / "ground_truth" / "phantom.json").is_file(),
        scenes=load_scenes(run / "figures" / "scenes.npz") if (run / "figures" / "scenes.npz").is_file() else (),
    )


def by_person(
    acquisitions: Sequence[Acquisition], rows: Sequence[StoreRow] = ()
) -> tuple[tuple[Acquisition, ...], tuple[StoreRow, ...]]:
    """Both with one id for each person, as results count them: scanners may spell an id differently."""
    ids = [row.participant for row in (*acquisitions, *rows)]
    one = dict(zip(ids, under_one_id(ids), strict=True))
    return tuple(replace(a, participant=one[a.participant]) for a in acquisitions), tuple(
        replace(row, participant=one[row.participant], eye_id=eye_id_of(one[row.participant], row.laterality))
        for row in rows
    )


def metric_rows(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl; empty without one."""
    metrics = run / "metrics.jsonl"
    return [row for row in read_metrics(metrics) if isinstance(row, dict)] if metrics.is_file() else []


def number(value: Any) -> float:
    """A metric as a float. metrics.jsonl spells "nan" and "inf"; other words and absent values become NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def lookup(values: Any, *keys: str) -> Any:
    """The value under nested keys, or None."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def series(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one metric, finite values only. Steps count from 1, as in checkpoints and lines of progress;
    metrics.jsonl has the index of the update, from 0."""
    points = [(number(row.get("step")) + 1, number(row.get(name))) for row in rows]
    kept = [(step, value) for step, value in points if np.isfinite(step) and np.isfinite(value)]
    return np.array([s for s, _ in kept]), np.array([v for _, v in kept])


def seconds_per_step(rows: list[dict[str, Any]]) -> float | None:
    """Median pace of logged steps, which a pause or a clock that was set hardly changes; None if it is not known."""
    at = zip(*series(rows, "time"), strict=True)
    # Without those over which the clock was set back.
    paces = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(at) if b[0] > a[0] and b[1] >= a[1]]
    return float(np.median(paces)) if paces else None


def _outdated(probe: dict[str, Any] | None, run: Path) -> str:
    embeddings = (probe or {}).get("embeddings") or [{}]
    if (names := before_newest(embeddings[0].get("encoder", ""), run)) is None:
        return ""
    return f"The probe is of {names[0]}, and the run's newest checkpoint is {names[1]}: embed and probe it again."


def _config(path: Path) -> str:
    """config.yaml as written. Raises ConfigError if it holds no settings."""
    content = path.read_bytes()
    parse_yaml(content, str(path))
    return content.decode("utf-8")


def _record(path: Path) -> dict[str, Any]:
    """run.json; what is null is not stated. Raises EvaluationError."""
    record = {key: value for key, value in _json(path).items() if value is not None}
    kinds = {key: (record[key], kind) for key, kind in _OF_RECORD.items() if key in record}
    if isinstance(parameters := record.get("parameters"), dict):
        kinds |= {f"parameters.{part}": (count, int) for part, count in parameters.items()}
    for key, (value, kind) in kinds.items():
        if not isinstance(value, kind):
            raise EvaluationError(f"{path}: {key} is not {_KINDS[kind]}; the file was edited, restore it from a copy")
    return record


def _json(path: Path, keys: tuple[str, ...] = ()) -> dict[str, Any]:
    try:
        values = from_json(path.read_text("utf-8"))
    except ValueError as error:
        raise EvaluationError(
            f"{path}: not valid JSON ({error}); the file was edited or cut off, create it again"
        ) from None
    if not isinstance(values, dict) or any(key not in values for key in keys):
        wanted = f" with {' and '.join(keys)}" if keys else ""
        raise EvaluationError(f"{path}: expected an object{wanted}; create the file again")
    return values
