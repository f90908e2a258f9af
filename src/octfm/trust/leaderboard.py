"""Checkpoints, fine-tuned models and baselines compared on identical data and splits."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.labels import LabelTable, read_labels
from octfm.config import load
from octfm.display import csv_cell, interval, markdown, p_value
from octfm.encoder.embed import embed_store, histogram_baseline, quality_baseline
from octfm.encoder.embeddings import Embeddings, align, of_store, read_embeddings, take_rows
from octfm.encoder.encoder import Encoder, load_encoder, seen_if_known
from octfm.encoder.sources import find as found
from octfm.errors import ConfigError, Echo, EvaluationError
from octfm.evaluation.arms import covariates, with_table
from octfm.evaluation.cases import Cases, Round, Skip, find_target, make_cases, make_rounds, people
from octfm.evaluation.probe import RESAMPLES, describe, predict, rows_seen
from octfm.evaluation.scoring import HEADLINE, compare_metrics, correct, fails_holm, planned_metrics, score
from octfm.evaluation.statistics import enough_resamples
from octfm.evaluation.tissue_map import tissue_map
from octfm.io.location import local_path
from octfm.models.pooling import VectorPool
from octfm.run.folder import RunFolder
from octfm.store.selection import to_evaluate
from octfm.store.store import Store
from octfm.tasks.finetune import FINE_TUNING
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.predictions import PredictionTable, read_predictions

COLUMNS = ("entry", "kind", "target", "metric", "estimate", "low", "high", "n_test_participants", "seeds")
BASELINES = ("histogram", "tissue_map", "covariates")
AGAINST = ("difference", "difference_low", "difference_high", "p", "p_holm", "verdict")


@dataclass(frozen=True, eq=False)
class Tuned:
    """Fine-tuned runs of one recipe, one per seed."""

    name: str
    runs: list[PredictionTable]
    what: str
    """head (frozen encoder), low rank, fine-tuned or from scratch."""


def leaderboard(
    entries: Sequence[str | Path],
    stores: Sequence[str | Path],
    target: str,
    out: str | Path,
    *,
    labels: str | Path | None = None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
    exclude: str | Path | None = None,
    allow_seen: bool = False,
    resamples: int | None = None,
    seed: int = 0,
    commands: Sequence[str] = (),
    echo: Echo = print,
) -> dict[str, Any]:
    """Evaluate every entry on the test participants of the recommended split; returns leaderboard.json's content.

    An entry is a pretraining run, a checkpoint, an export or a packaged encoder (evaluated by a logistic or ridge
    probe) or a folder of `octfm finetune`; fine-tuned runs that differ only in the seed form one entry. The first entry
    is compared with each of the others. Baselines: random initialisation of the first checkpoint, intensity histogram,
    tissue map, and covariates (age, sex, site, scanner, image quality). All checkpoints are pooled like the first one.

    stores: one per preprocessing among the encoders, all of the same acquisitions.
    exclude: a file of volumes to leave out.
    resamples: of participants; None: as in `octfm.evaluation.probe.probe`.

    Raises EvaluationError if a test participant was trained on, unless `allow_seen`, and if two entries, or an entry
    and a baseline, have the same name.
    """
    out, opened = local_path(out), [to_evaluate(Store.open(path), exclude) for path in stores]
    paths = [local_path(str(found(str(entry)))) for entry in entries]
    if not paths or not opened:
        raise EvaluationError("expected at least one run, checkpoint or fine-tuned folder, and a store")
    # Check all inputs before hours of embedding, and before anything is written.
    frozen, tuned = _entries(paths)
    for saved in (saved for own in tuned for saved in own.runs):
        saved.require_same_volumes(opened)
    table = read_labels(labels) if labels is not None else None
    volumes = of_store(opened[0])
    volumes = take_rows(volumes, np.argsort(volumes.acquisition))  # in the order of embeddings
    cases, rounds, seen_rows = _tested(target, volumes, table, orders, paths, allow_seen, seed)
    vectors = _embed_entries(frozen, opened, out / "embeddings", echo)
    base = replace(read_embeddings(histogram_baseline(opened[0], out / "embeddings")), name="histogram")
    quality = read_embeddings(quality_baseline(opened[0], out / "embeddings"))
    known = with_table(covariates(base, quality.vectors), table)
    # The last vectors are those of the first checkpoint's random initialisation.
    baselines = [*vectors[len(frozen) :], base, tissue_map(opened[0], base), known]
    align([volumes, base, *vectors])
    facts = describe(cases, rounds, "recommended_split", seen_rows)
    runs = {e.name: ("frozen", [predict(cases, rounds, e, "linear", seed)]) for e in vectors[: len(frozen)]}
    runs |= {t.name: (t.what, [saved.for_cases(cases, base, rounds[0].test) for saved in t.runs]) for t in tuned}
    runs |= {e.name: ("baseline", [predict(cases, rounds, e, "linear", seed)]) for e in baselines}
    if resamples is None:
        resamples = enough_resamples(len(planned_metrics(cases)) * (len(runs) - 1), RESAMPLES)
    scored = {
        name: score(cases, name, predictions, facts | {"what": what}, resamples, seed)
        for name, (what, predictions) in runs.items()
    }
    # The first entry, unless it is a fine-tuned run in a group that has the name of another run.
    first = next(name for name in (entry_name(paths[0]), *scored) if name in scored)
    others = [own for name, own in scored.items() if name != first]
    comparisons = [row for own in others for row in compare_metrics(scored[first], own, leakage=False)]
    return {
        "format": "octfm-leaderboard",
        "version": 1,
        "target": target,
        "reference": first,
        "results": [s.row for per_metric in scored.values() for s in per_metric],
        "comparisons": correct(comparisons),
        "settings": {"resamples": resamples, "seed": seed, "allow_seen": allow_seen, "level": 0.95},
        "stores": [str(store.path) for store in opened],
        "labels": table.path if table else None,
        "commands": list(commands),
    }


def _tested(
    target: str,
    data: Embeddings,
    table: LabelTable | None,
    orders: Mapping[str, tuple[str, ...]] | None,
    paths: Sequence[Path],
    allow_seen: bool,
    seed: int,
) -> tuple[Cases, list[Round], np.ndarray | None]:
    """The cases of a target, its single round, and bool [N]: rows whose participants an entry was trained on, None if
    nobody can tell. Vectors are not needed. Raises EvaluationError if labels are missing or too few, or if a test
    participant was seen in training, unless `allow_seen`."""
    seen_rows: np.ndarray | None = np.zeros(len(data.acquisition), bool)
    tested = np.array([split == "test" for split in data.split])
    for path in paths:
        own = rows_seen(data, seen_if_known(path, allow_seen=allow_seen))
        if own is None or seen_rows is None:
            seen_rows = None
            continue
        if (own & tested).any() and not allow_seen:
            who = np.unique(people(data.participant[own & tested]))
            raise EvaluationError(
                f"{path}: {len(who)} test participants were in its training ({who[0]} …); "
                "hold them out of training, or pass --allow-seen"
            )
        seen_rows |= own
    try:
        cases = make_cases(find_target(target, data, table, orders), data, table)
        return *make_rounds(cases, data, "recommended_split", seen_rows, allow_seen, 1, seed), seen_rows
    except Skip as reason:
        source = table.path if table is not None else f"{data.path} (its own labels; --labels TABLE names others)"
        raise EvaluationError(f"target {target}: {reason} Labels: {source}") from None


def to_csv(result: dict[str, Any]) -> str:
    """CSV with one line per entry and metric, best entry first, with the difference from the reference."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *AGAINST])
    for row in ranked(result):
        for r in [x for x in result["results"] if x["encoder"] == row["encoder"]]:
            c = _difference(result, r["encoder"], r["metric"])
            cells = [r["encoder"], r["what"], r["target"], *(r[key] for key in COLUMNS[3:])]
            cells += [c.get(key) for key in ("difference", "low", "high", "p", "p_holm", "verdict")]
            writer.writerow([csv_cell(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue()


def to_markdown(result: dict[str, Any]) -> str:
    """Markdown tables of the headline metrics, best entry first, and of the paired differences."""
    metrics = [m for m in HEADLINE if any(r["metric"] == m for r in result["results"])]
    shown = [r for r in result["results"] if r["metric"] in metrics]
    between = "95 % intervals over participants" if any(r["low"] is not None for r in shown) else "no intervals"
    chance = ", ".join(f"{m} {next(r['chance'] for r in shown if r['metric'] == m):.3g}" for m in metrics)
    lines = [
        f"# Leaderboard: {result['target']}",
        "",
        f"{result['results'][0]['n_test_participants']} test participants, identical data and splits; {between}. "
        f"Guessing gives {chance}.",
        *(f"{markdown(note)}" for note in dict.fromkeys(r["note"] for r in shown if r["note"])),
        "",
        "| entry | kind | " + " | ".join(metrics) + " |",
        "|---" * (len(metrics) + 2) + "|",
    ]
    for row in ranked(result):
        cells = [
            interval(next(x for x in result["results"] if (x["encoder"], x["metric"]) == (row["encoder"], m)), digits=3)
            for m in metrics
        ]
        lines.append(f"| {markdown(row['encoder'])} | {row['what']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        f"Paired differences, {markdown(result['reference'])} minus each other; Holm over all planned comparisons.",
        "",
    ]
    lines += ["| metric | against | difference | p | Holm | verdict |", "|---|---|---|---|---|---|"]
    for c in result["comparisons"]:
        if c["metric"] in metrics:
            p, adjusted = p_value(c["p"]), p_value(c["p_holm"])
            verdict = c["verdict"] + ", not after Holm" * fails_holm(c)
            lines.append(
                f"| {c['metric']} | {markdown(c['b'])} | {interval(c, digits=3)} | {p} | {adjusted} | {verdict} |"
            )
    return "\n".join(lines) + "\n"


def ranked(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The row of each entry's first headline metric, best first. Only paired intervals show whether entries differ."""
    metric = next(m for m in HEADLINE if any(r["metric"] == m for r in result["results"]))
    rows = [r for r in result["results"] if r["metric"] == metric]
    return sorted(rows, key=lambda r: -(r["estimate"] if r["estimate"] is not None else -np.inf))


def _difference(result: dict[str, Any], entry: str, metric: str) -> dict[str, Any]:
    return next((c for c in result["comparisons"] if (c["b"], c["metric"]) == (entry, metric)), {})


def entry_name(path: Path) -> str:
    """Name of an entry: the folder of a run; run folder and step of a checkpoint."""
    return f"{path.parent.parent.name}:{path.stem}" if path.is_file() else path.resolve().name


def embed_run(
    path: Path,
    name: str,
    stores: Sequence[Store],
    folder: Path,
    echo: Echo,
    *,
    draw: int | None = None,
    pool: VectorPool | None = None,
) -> Embeddings:
    """Embed the store that has the encoder's preprocessing (else the first) into `folder`, and read the vectors.

    draw: use the weights of this draw before the first update. pool: use this instead of the run's objective.pool.
    """
    encoder = load_encoder(path, random_init=draw is not None, draw=draw or 0).pooling(pool)
    return read_embeddings(embed_store(encoder, _store_of(encoder, stores), folder, name, echo))


def _store_of(encoder: Encoder, stores: Sequence[Store]) -> Store:
    """The store that has the encoder's preprocessing. Raises EvaluationError if none has."""
    store = next((s for s in stores if s.fingerprint == encoder.fingerprint), stores[0])
    encoder.reading(store)
    return store


def common_pool(encoders: Mapping[str, Path], stores: Sequence[Store]) -> VectorPool:
    """Pooling of the first of these encoders. Raises EvaluationError, before hours of embedding, if one of the others
    cannot be pooled like it, or if none of the stores was prepared for one of them."""
    pool = load_encoder(next(iter(encoders.values()))).config.objective.pool
    read = []
    for name, path in encoders.items():
        try:
            read.append(load_encoder(path).pooling(pool))
        except ConfigError as error:
            raise EvaluationError(
                f"{path}: cannot be pooled as the first encoder is: {error}; name {name} first, or leave it out"
            ) from None
    for encoder in read:
        _store_of(encoder, stores)
    return pool


def _embed_entries(paths: Sequence[Path], stores: Sequence[Store], folder: Path, echo: Echo) -> list[Embeddings]:
    """Embeddings of every checkpoint, then of the first one's random initialisation."""
    if not paths:
        return []
    names = [entry_name(path) for path in paths]
    pool = common_pool(dict(zip(names, paths, strict=True)), stores)
    found = [embed_run(path, name, stores, folder, echo, pool=pool) for path, name in zip(paths, names, strict=True)]
    return [*found, embed_run(paths[0], "random_init", stores, folder, echo, draw=0, pool=pool)]


def _entries(paths: Sequence[Path]) -> tuple[list[Path], list[Tuned]]:
    """Encoders to probe, and fine-tuned runs by recipe. Raises EvaluationError for a fine-tuning that has not finished
    and for a name that occurs twice."""
    finished = [path for path in paths if (path / "predictions.parquet").is_file()]
    frozen, tuned = [path for path in paths if path not in finished], _tuned(finished)
    for path in frozen:
        if (path / "run.json").is_file() and RunFolder(path, FINE_TUNING).record.get("kind") == FINE_TUNING.name:
            raise EvaluationError(
                f"{path}: this fine-tuning has not finished, so it has no predictions.parquet; wait for it, or run its "
                "command again; for its encoder alone, give a file of its checkpoints"
            )
    names = [*map(entry_name, frozen), *(t.name for t in tuned), *BASELINES, *(["random_init"] if frozen else [])]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise EvaluationError(
            f"expected differently named entries, got {min(repeated)} more than once; give each run once, or rename a "
            "folder"
        )
    return frozen, tuned


def _tuned(paths: Sequence[Path]) -> list[Tuned]:
    """Group fine-tuned runs by recipe, each group under the name of its first run and in the order of seeds. Two
    recipes of the same seeds are then paired seed by seed, in whatever order their runs are given."""
    groups: list[Tuned] = []
    for path in paths:
        saved = read_predictions(path / "predictions.parquet")
        config = load(FinetuneConfig, path / "config.yaml")
        learned = "fine-tuned" if config.lora_rank is None else "low rank"
        what = "head" if config.frozen else "from scratch" if config.from_scratch else learned
        own = next((t for t in groups if t.runs[0].facts["recipe"] == saved.facts["recipe"]), None)
        if own is None:
            groups.append(Tuned(path.resolve().name, [saved], what))
        elif saved.facts["seed"] in [s.facts["seed"] for s in own.runs]:
            raise EvaluationError(f"{path}: the same recipe and seed as {own.name}; give each run once")
        else:
            own.runs.append(saved)
    for own in groups:
        own.runs.sort(key=lambda saved: saved.facts["seed"])
    return groups
