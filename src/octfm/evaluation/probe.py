"""Frozen probe: logistic or ridge regression on the embeddings of several encoders side by side, same participants, folds and resamples."""

import json
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octfm.data.labels import read_labels
from octfm.errors import EvaluationError
from octfm.evaluation.cases import Cases, Design, Round, Skip, find_targets, make_cases, make_rounds, participant_folds
from octfm.evaluation.embeddings import Embeddings, align, read_embeddings
from octfm.evaluation.metrics import auroc, balanced_accuracy, macro_auroc, r_squared
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, Metric, bootstrap, compare, interval

RESAMPLES = 2000
FOLDS = 5
INNER_FOLDS = 3
INTERVAL_MEANING = {
    "recommended_split": "Intervals answer: what if other participants had been tested? The fitted probe is taken as given.",
    "k-fold": "Intervals answer: what if other participants had been tested? They leave out that the folds' probes would differ too, "
    "so with weak probes (AUROC below about 0.7) or under 100 participants they are up to a third too narrow.",
}
"""Measured on simulated cohorts: with five folds, equal encoders are told apart in 7 % (AUROC 0.77, 160 participants) to 20 % (chance
level, 60 participants) of cohorts instead of 5 %. A jackknife that refits the probe has the opposite fault (0–3 %)."""
LOGISTIC_C = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
RIDGE_ALPHA = (1.0, 10.0, 100.0, 1e3, 1e4, 1e5)


@dataclass(frozen=True, eq=False)
class Scored:
    """One metric of one encoder on one target."""

    metric: str
    encoder: str
    chance: float
    bootstrap: Bootstrap | None
    """None: too few participants for an interval."""
    row: dict[str, Any]


def probe(
    embeddings: Sequence[str | Path],
    labels: str | Path | None = None,
    *,
    targets: Sequence[str] | None = None,
    design: Literal["auto", "recommended_split", "k-fold"] = "auto",
    seen: Collection[str] | Callable[[str], bool] = (),
    allow_seen: bool = False,
    folds: int = FOLDS,
    resamples: int = RESAMPLES,
    seed: int = 0,
    commands: Sequence[str] = (),
) -> dict[str, Any]:
    """Probe every encoder on every target; the first encoder is compared with each of the others. The result is what probe.json holds.

    `seen` tells which participants any of the encoders was pretrained on. Under `recommended_split` (train + val against test; chosen by
    `auto` when both exist) a test participant among them raises EvaluationError, or is counted in the result when `allow_seen`. Under
    `k-fold`, seen participants only ever help to train the probe: the folds are made of the others.
    A target named in `targets` that cannot be probed is an error; one found by itself is listed under "skipped" with a sentence.
    """
    if isinstance(seen, str):
        raise TypeError("seen must be a collection of participant ids or a predicate, got one string")
    encoders = align([read_embeddings(path) for path in embeddings])
    first = encoders[0]
    table = read_labels(labels) if labels is not None else None
    is_seen = seen if callable(seen) else frozenset(seen).__contains__
    seen_rows = np.array([bool(is_seen(p)) for p in first.participant.tolist()])
    chosen: Design = _design(first) if design == "auto" else design
    scored: list[Scored] = []
    comparisons: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for target in find_targets(targets, first, table):
        try:
            cases, rounds = make_rounds(make_cases(target, first, table), first, chosen, seen_rows, allow_seen, folds, seed)
        except Skip as reason:
            if targets is not None:
                raise EvaluationError(f"target {target.name}: {reason}") from None
            skipped.append({"target": target.name, "sentence": str(reason)})
            continue
        facts = _facts(cases, rounds, chosen, seen_rows)
        per_encoder = [_score(cases, rounds, encoder, facts, resamples, seed) for encoder in encoders]
        scored += [s for per_metric in per_encoder for s in per_metric]
        comparisons += [
            _compare(a, b, leakage=target.leakage) for other in per_encoder[1:] for a, b in zip(per_encoder[0], other, strict=True)
        ]
    return {
        "format": "octfm-probe",
        "version": 1,
        "results": [s.row for s in scored],
        "comparisons": comparisons,
        "skipped": skipped,
        "settings": {"design": chosen, "folds": folds, "resamples": resamples, "seed": seed, "allow_seen": allow_seen, "level": 0.95},
        "interval_meaning": INTERVAL_MEANING[chosen],
        "labels": table.path if table else None,
        "embeddings": [{**e.metadata, "name": e.name, "path": e.path} for e in encoders],
        "commands": list(commands),
    }


def write_probe(path: str | Path, result: dict[str, Any]) -> Path:
    """Write the result as JSON, whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial_file.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    partial_file.replace(path)
    return path


def summary_lines(result: dict[str, Any]) -> list[str]:
    """One line per target, encoder and metric, then one per comparison, for a terminal."""
    lines = []
    for r in result["results"]:
        between = f" ({r['low']:.3f} to {r['high']:.3f})" if r["low"] is not None else ""
        estimate = "undefined" if r["estimate"] is None else f"{r['estimate']:.3f}"
        flag = f"; {r['seen_test_participants']} of them seen in pretraining" if r["seen_test_participants"] else ""
        note = f"  {r['note']}" if r["note"] else ""
        who = f"{r['n_test_participants']} participants{flag}"
        lines.append(f"{r['target']:<12} {r['metric']:<18} {r['encoder']:<12} {estimate}{between}, {who}{note}")
    for c in result["comparisons"]:
        if c["low"] is not None:
            numbers = f"{c['difference']:+.3f} ({c['low']:+.3f} to {c['high']:+.3f}, p = {c['p']:.3f})"
            lines.append(f"{c['target']:<12} {c['metric']:<18} {c['a']} is {c['verdict']} against {c['b']}: {numbers}")
    return lines + [f"{s['target']:<12} skipped: {s['sentence']}" for s in result["skipped"]]


def _design(data: Embeddings) -> Design:
    return "recommended_split" if {"train", "val"} & set(data.split) and "test" in data.split else "k-fold"


def _facts(cases: Cases, rounds: list[Round], design: Design, seen_rows: np.ndarray) -> dict[str, Any]:
    """What a result says about whom it was measured on; the same for every encoder and metric."""
    tested = np.concatenate([r.test for r in rounds])
    trained = np.concatenate([r.train for r in rounds])
    participant = cases.participant
    return {
        "target": cases.target.name,
        "column": cases.target.column,
        "kind": cases.kind,
        "leakage": cases.target.leakage,
        "design": design,
        "unit": cases.unit_name,
        "n_train_participants": len(np.unique(participant[trained])),
        "n_test_participants": len(np.unique(participant[tested])),
        "n_test_units": len(np.unique(cases.unit[tested])),
        "n_test_acquisitions": len(tested),
        "unlabelled_acquisitions": cases.unlabelled,
        "left_out_classes": list(cases.left_out),
        "seen_test_participants": len(np.unique(participant[tested][seen_rows[cases.rows[tested]]])),
    }


def _score(cases: Cases, rounds: list[Round], encoder: Embeddings, facts: dict[str, Any], resamples: int, seed: int) -> list[Scored]:
    """Fit every round, average the tested rows of each unit, and measure."""
    vectors = encoder.vectors[cases.rows]
    tested = np.concatenate([r.test for r in rounds])
    fits = [_fit_predict(vectors, cases, r, seed) for r in rounds]
    predicted = np.concatenate([p for p, _ in fits])
    units, first, member = np.unique(cases.unit[tested], return_index=True, return_inverse=True)
    participant = cases.participant[tested][first]
    size = np.bincount(member)
    metrics: list[tuple[str, Metric, float]]
    if cases.classes is None:
        truth = np.bincount(member, weights=cases.label[tested]) / size
        value = np.bincount(member, weights=predicted[:, 0]) / size
        # Any metric is called with weights [R, n]; partial keeps what they are weights of.
        metrics = [("r2", partial(r_squared, truth, value), 0.0)]
        counts = {"": len(np.unique(participant))}
    else:
        truth = np.zeros(len(units), dtype=int)
        # Labels agree inside a unit, except that a participant with one diseased eye is diseased.
        np.maximum.at(truth, member, cases.label[tested])
        log_p = np.stack([np.bincount(member, weights=predicted[:, k]) / size for k in range(len(cases.classes))], axis=1)
        probability = np.exp(log_p - log_p.max(1, keepdims=True))
        probability /= probability.sum(1, keepdims=True)
        area = partial(auroc, truth == 1, log_p[:, 1] - log_p[:, 0]) if cases.kind == "binary" else partial(macro_auroc, truth, probability)
        present = np.unique(truth)
        accuracy = partial(balanced_accuracy, truth, log_p.argmax(1))
        metrics = [("auroc", area, 0.5), ("balanced_accuracy", accuracy, 1 / len(present))]
        counts = {name: len(np.unique(participant[truth == k])) for k, name in enumerate(cases.classes)}
    rare = {name: n for name, n in counts.items() if n < MIN_PARTICIPANTS}
    scored = []
    for name, metric, chance in metrics:
        boot = None if rare else bootstrap(metric, participant, resamples=resamples, seed=seed)
        estimate = boot.estimate if boot else float(metric(np.ones((1, len(units))))[0])
        low, high = interval(boot) if boot else (None, None)
        row = {
            **facts,
            "metric": name,
            "encoder": encoder.name,
            "estimate": _finite(estimate),
            "low": _finite(low),
            "high": _finite(high),
            "chance": chance,
            "note": _note(rare, boot),
            "test_participants_per_class": counts if cases.classes else None,
            "penalty": sorted({p for _, p in fits}),
        }
        scored.append(Scored(name, encoder.name, chance, boot, row))
    return scored


def _fit_predict(vectors: np.ndarray, cases: Cases, r: Round, seed: int) -> tuple[np.ndarray, float]:
    """Log-probabilities [tested, K] (or predicted numbers [tested, 1]) and the penalty that inner participant folds chose."""
    grid = RIDGE_ALPHA if cases.classes is None else LOGISTIC_C
    x, y, num_classes = vectors[r.train], cases.label[r.train], len(cases.classes or ())
    fold = participant_folds(cases.participant[r.train], y, INNER_FOLDS, seed, stratify=num_classes > 0)
    loss = np.zeros(len(grid))
    for k in range(INNER_FOLDS):
        train, held_out = fold != k, fold == k
        for i, predicted in enumerate(_path(x[train], y[train], x[held_out], num_classes, grid)):
            loss[i] += _loss(predicted, y[held_out], y, num_classes)
    best = grid[int(loss.argmin())]
    return _path(x, y, vectors[r.test], num_classes, (best,))[0], best


def _path(x: np.ndarray, y: np.ndarray, x_new: np.ndarray, num_classes: int, grid: Sequence[float]) -> list[np.ndarray]:
    """Standardise on the training rows, fit at every penalty, predict the new rows."""
    from sklearn.linear_model import LogisticRegression, Ridge

    mean, scale = x.mean(0), x.std(0)
    # A channel without spread carries nothing; dividing by its rounding noise would make it the loudest.
    scale[scale <= 1e-6 * np.abs(mean)] = np.inf
    x, x_new = (x - mean) / scale, (x_new - mean) / scale
    if num_classes == 0:
        return [Ridge(alpha=alpha).fit(x, y).predict(x_new)[:, None] for alpha in grid]
    present = np.unique(y)
    predictions = []
    for c in grid:
        # Classes weigh the same however rare: balanced accuracy is reported, and a screening cohort is mostly healthy.
        log_p = np.full((len(x_new), num_classes), np.log(1e-6))
        if len(present) > 1:
            fitted = LogisticRegression(C=c, class_weight="balanced", max_iter=500).fit(x, y)
            log_p[:, present] = np.log(np.maximum(fitted.predict_proba(x_new), 1e-12))
        predictions.append(log_p)
    return predictions


def _loss(predicted: np.ndarray, y: np.ndarray, y_all: np.ndarray, num_classes: int) -> float:
    """Summed squared error, or class-balanced log loss."""
    if num_classes == 0:
        return float(((predicted[:, 0] - y) ** 2).sum())
    weight = 1 / np.bincount(y_all, minlength=num_classes)[y]
    return float(-(weight * predicted[np.arange(len(y)), y]).sum())


def _compare(a: Scored, b: Scored, *, leakage: bool) -> dict[str, Any]:
    row = {"target": a.row["target"], "metric": a.metric, "a": a.encoder, "b": b.encoder, "leakage": leakage}
    if a.bootstrap is None or b.bootstrap is None:
        difference = None if a.row["estimate"] is None or b.row["estimate"] is None else a.row["estimate"] - b.row["estimate"]
        return {**row, "difference": difference, "low": None, "high": None, "p": None, "verdict": "inconclusive", "note": a.row["note"]}
    c = compare(a.bootstrap, b.bootstrap)
    verdict = c.verdict
    if leakage and verdict != "inconclusive":
        # Telling scanners apart more easily is not an achievement.
        verdict = "worse" if verdict == "better" else "better"
    return {
        **row,
        "difference": _finite(c.difference),
        "low": _finite(c.low),
        "high": _finite(c.high),
        "p": c.p,
        "verdict": verdict,
        "note": None,
    }


def _note(rare: dict[str, int], boot: Bootstrap | None) -> str | None:
    if rare:
        who = ", ".join(f"{n} participant{'s' * (n != 1)}" + (f" with {name}" if name else "") for name, n in rare.items())
        return f"No interval: only {who} in the test, fewer than {MIN_PARTICIPANTS}."
    if boot is not None and np.ptp(boot.resampled[np.isfinite(boot.resampled)]) == 0:
        return "Every resample gave the same value, so the interval is too narrow to be believed; only more participants can tell."
    return None


def _finite(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)
