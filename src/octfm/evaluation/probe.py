"""Frozen probes: simple models on the embeddings of encoders, with identical participants, folds and resamples."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from octfm.catalog.labels import read_labels
from octfm.display import interval
from octfm.encoder.embeddings import Embeddings, align, read_embeddings
from octfm.encoder.encoder import seen_if_known
from octfm.errors import EvaluationError, shown
from octfm.evaluation.arms import with_table
from octfm.evaluation.cases import (
    ORDERS,
    Cases,
    Design,
    Round,
    Seen,
    Skip,
    Target,
    find_targets,
    label_columns,
    log_share,
    make_cases,
    make_rounds,
    people,
)
from octfm.evaluation.metrics import ExtraMetric
from octfm.evaluation.readouts import Readout, choose_readout, fit_predict
from octfm.evaluation.results import Result, read_result, seen_note
from octfm.evaluation.scoring import (
    BUILT_IN,
    HEADLINE,
    Predictions,
    Scored,
    compare_metrics,
    correct,
    difference_words,
    estimate,
    percentile,
    planned_metrics,
    score,
)
from octfm.evaluation.statistics import enough_resamples, mean_of
from octfm.io.location import Location, location, write_whole
from octfm.io.progress import Progress

RESAMPLES = 2000
FOLDS = 5
INTERVAL_MEANING = {
    "recommended_split": "Intervals answer: what if other participants had been tested? "
    "The fitted probe is taken as given.",
    "k-fold": "Intervals answer: what if other participants had been tested? "
    "They leave out that the folds' probes would differ too, "
    "so with weak probes (AUROC below about 0.7) or under 100 participants they are up to a third too narrow.",
}
"""Measured on simulated cohorts: with five folds, equal encoders differ significantly in 7 % (AUROC 0.77, 160
participants) to 20 % (chance level, 60 participants) of cohorts instead of 5 %. A jackknife that refits the probe errs
the other way (0–3 %)."""


def probe(
    embeddings: str | Location | Embeddings | Iterable[str | Location | Embeddings],
    labels: Any = None,
    *,
    targets: str | Iterable[str] | None = None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
    readout: Readout = "linear",
    design: Literal["auto"] | Design = "auto",
    seen: Seen | None = (),
    allow_seen: bool = False,
    folds: int | None = None,
    seeds: int = 1,
    resamples: int | None = None,
    seed: int = 0,
    commands: Sequence[str] = (),
    metrics: Iterable[ExtraMetric] = (),
) -> Result:
    """Probe every encoder on every target; compare the first with each of the others, and joint arms with their parts.
    Returns the content of probe.json. `embeddings`: octfm.evaluation.arms.make_arms gives all arms of a run.

    labels: a table (CSV, TSV or DataFrame), joined by id; by default the participants' labels in the embeddings.
    seen: participants that any encoder was pretrained on. In `recommended_split`, a seen test participant raises
        EvaluationError, or is counted in the result if `allow_seen`. In `k-fold`, seen participants are in every
        training part, and the folds are made of the others. None, if nobody can tell, needs `allow_seen`.
    design: `recommended_split` fits on train and val and tests on test; `auto` chooses it if the data have both sides,
        and `k-fold` otherwise (`folds`, default 5).
    resamples: of participants; None: RESAMPLES, or more if so many differences are planned that none could survive
        Holm's correction.
    seeds: repeat folds with this many seeds; intervals then resample seeds as well as participants.
    orders: columns whose classes are grades, lowest first; not needed for ordered categories of a DataFrame.
    targets: one or several label columns; one that cannot be probed raises EvaluationError. None takes every known
        column that is present and lists those that cannot be probed under "skipped".
    metrics: metrics of your own, computed next to the built-in ones with intervals from the same resamples.
    """
    expect_counts(seeds, resamples)
    choose_readout(readout)
    metrics = _checked(metrics)
    encoders = align(embeddings)
    first = encoders[0]
    table = read_labels(labels) if labels is not None else None
    encoders = [with_table(e, table) for e in encoders]
    seen_rows = rows_seen(first, seen)
    chosen, folds = choose_design(first, design, folds)
    found = find_targets(targets, first, table, orders)
    stated = {target.column: target.order for target in found if target.order != ORDERS.get(target.column, ())}
    probed: list[tuple[Target, list[tuple[Cases, list[Round]]]]] = []
    skipped: list[dict[str, str]] = []
    for target in found:
        try:
            cases = make_cases(target, first, table)
            rounds = [make_rounds(cases, first, chosen, seen_rows, allow_seen, folds, seed + s) for s in range(seeds)]
        except Skip as reason:
            reason.refuse_if_named(target, targets)
            skipped.append({"target": target.name, "sentence": str(reason)})
            continue
        probed.append((target, rounds))
    if resamples is None:
        means = {target.column for target, _ in probed if target.label is not None}
        metrics_planned = len(means) + sum(len(planned_metrics(rounds[0][0])) for _, rounds in probed)
        resamples = enough_resamples(metrics_planned * len(pairs_of(encoders)), RESAMPLES)
    scored: list[list[Scored]] = []
    comparisons: list[dict[str, Any]] = []
    by_label: dict[str, list[list[list[Scored]]]] = {}
    with Progress("probe", len(probed) * len(encoders), "fits") as progress:
        for target, per_seed in probed:
            facts = describe(*per_seed[0], chosen, seen_rows) | {"readout": readout}
            per_encoder = [
                _score(encoder, per_seed, facts, readout, resamples, seed, metrics)
                for encoder in progress.over(encoders)
            ]
            scored += per_encoder
            comparisons += compared(per_encoder, encoders, target.leakage)
            if target.label is not None:
                by_label.setdefault(target.name.removesuffix(f":{target.label}"), []).append(per_encoder)
    for name, label_scores in by_label.items():
        per_encoder = [_over_labels(name, [labels_[e] for labels_ in label_scores]) for e in range(len(encoders))]
        scored += per_encoder
        comparisons += compared(per_encoder, encoders, False)
    return Result(
        {
            "format": "octfm-probe",
            "version": 1,
            "results": [s.row for per_metric in scored for s in per_metric],
            "comparisons": correct(comparisons),
            "skipped": skipped,
            "settings": {
                "design": chosen,
                "readout": readout,
                "folds": folds if chosen == "k-fold" else None,
                "seeds": seeds,
                "orders": {column: list(grades) for column, grades in {**stated, **(orders or {})}.items()},
                "resamples": resamples,
                "seed": seed,
                "allow_seen": allow_seen,
                "level": 0.95,
            },
            "interval_meaning": INTERVAL_MEANING[chosen],
            "labels": table.path if table else None,
            "embeddings": [{**e.metadata, "name": e.name, "path": e.path} for e in encoders],
            "commands": list(commands),
        }
    )


def _checked(metrics: Iterable[ExtraMetric]) -> tuple[ExtraMetric, ...]:
    """Raise TypeError for what is no list of ExtraMetric, EvaluationError for a name that is there already."""
    if isinstance(metrics, ExtraMetric):
        raise TypeError(f"metrics: expected a list, got the metric {metrics.name} itself; write metrics=[…]")
    metrics = tuple(metrics)
    if odd := next((metric for metric in metrics if not isinstance(metric, ExtraMetric)), None):
        raise TypeError(f"metrics: expected ExtraMetric(name, function, chance=…), got {shown(odd)}")
    names = [metric.name for metric in metrics]
    if twice := {name for name in names if names.count(name) > 1}:
        raise EvaluationError(f"metrics: {', '.join(sorted(twice))} is there twice; give each metric its own name")
    if taken := {*names} & {*BUILT_IN}:
        raise EvaluationError(f"metrics: {', '.join(sorted(taken))} is a built-in metric; choose another name")
    return metrics


def _score(
    encoder: Embeddings,
    per_seed: list[tuple[Cases, list[Round]]],
    facts: dict[str, Any],
    readout: Readout,
    resamples: int,
    seed: int,
    metrics: Sequence[ExtraMetric],
) -> list[Scored]:
    """Fit and score an encoder on one target, with the rounds of every seed and each draw of its weights."""
    runs = [
        run
        for s, (cases, rounds) in enumerate(per_seed)
        for run in predict_draws(cases, rounds, encoder, readout, seed + s)
    ]
    draws = 1 + len(encoder.draws)
    return score(per_seed[0][0], encoder.name, runs, facts, resamples, seed, more=metrics, draws=draws)


def expect_counts(seeds: int, resamples: int | None) -> None:
    """Raise EvaluationError unless there is at least one seed and one resample; None stands for a default number."""
    for name, count in (("seeds", seeds), ("resamples", resamples)):
        if count is not None and count < 1:
            raise EvaluationError(f"{name}: expected at least 1, got {count}")


def write_probe(path: str | Location, result: dict[str, Any]) -> Location:
    """Write the result as JSON, atomically; returns its location."""
    where = location(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    # JSON has no NaN, and browsers refuse a file with one; undefined numbers are null.
    write_whole(where, f"{json.dumps(result, indent=1, allow_nan=False)}\n".encode())
    return where


def summary_lines(result: dict[str, Any], file: str = "probe.json") -> list[str]:
    """Lines for a terminal: one per target, encoder and headline metric, one on guessing per target, one per note, one
    per comparison, then what intervals leave out. `file` holds the result; for a probe, a note on few participants
    suggests k-fold."""
    lines: list[str] = []
    noted: dict[tuple[str, str], list[str]] = {}
    guessing: dict[str, dict[str, str]] = {}
    for r in result["results"]:
        if r["metric"] not in HEADLINE:
            continue
        guessing.setdefault(r["target"], {})[r["metric"]] = f"{r['metric']} {r['chance']:.3g}"
        shown = interval(r, digits=3)
        flag = f"; {note}" if (note := seen_note(r)) else ""
        if r["note"]:
            few = "fewer than" in r["note"] and r["design"] == "recommended_split" and file == "probe.json"
            note = r["note"] + few * " --design k-fold tests every participant."
            noted.setdefault((r["target"], note), []).append(r["encoder"])
        if draws := [value for value in r.get("per_draw", ()) if value is not None]:
            shown += f", {len(draws)} draws from {min(draws):.3f} to {max(draws):.3f}"
        who = f"{r['n_test_participants']} participants{flag}"
        lines.append(f"{r['target']:<12} {r['metric']:<18} {r['encoder']:<12} {shown}, {who}")
    for target, each in guessing.items():
        r = next(r for r in result["results"] if r["target"] == target)
        unlabelled = f", {r['unlabelled_acquisitions']} volumes have no label" if r["unlabelled_acquisitions"] else ""
        rare = f", too rare and left out: {', '.join(r['left_out_classes'])}" if r.get("left_out_classes") else ""
        learned = f"learned from {r['n_train_participants']} participants{unlabelled}{rare}"
        lines.append(f"{target:<12} guessing gives {', '.join(each.values())}; {learned}")
    for (target, note), whose in noted.items():
        every = {r["encoder"] for r in result["results"] if r["target"] == target}
        lines.append(f"{target:<12} " + ("" if {*whose} == every else f"{', '.join(dict.fromkeys(whose))}: ") + note)
    for c in result["comparisons"]:
        if c["low"] is not None and c["metric"] in HEADLINE:
            lines.append(f"{c['target']:<12} {c['metric']:<18} {difference_words(c)}")
    if "interval_meaning" in result and any(c["low"] is not None for c in result["comparisons"]):
        lines.append(result["interval_meaning"])
    hidden = sorted({r["metric"] for r in result["results"]} - set(HEADLINE))
    if hidden:
        lines.append(f"{file} also holds {', '.join(hidden)}")
    return lines + [f"{s['target']:<12} skipped: {s['sentence']}" for s in result["skipped"]]


def choose_design(data: Embeddings, wanted: str = "auto", folds: int | None = None) -> tuple[Design, int]:
    """Resolve `auto` and default folds: the recommended split if the data have both sides of it, otherwise k-fold.

    Raises EvaluationError for an unknown design, or folds without k-fold.
    """
    if wanted != "auto" and wanted not in get_args(Design):
        raise EvaluationError(f"design: expected auto, {' or '.join(get_args(Design))}, got {wanted!r}")
    recommended = {"train", "val"} & set(data.split) and "test" in data.split
    chosen: Design = "k-fold" if wanted == "k-fold" or (wanted == "auto" and not recommended) else "recommended_split"
    if folds is not None and chosen != "k-fold":
        raise EvaluationError(
            "folds: these embeddings are probed by their recommended split, which has no folds; choose design k-fold"
        )
    return chosen, FOLDS if folds is None else folds


def rows_seen(data: Embeddings, seen: Seen | None) -> np.ndarray | None:
    """bool [N]: rows of participants that an encoder was pretrained on; None if nobody can tell."""
    if seen is None:
        return None
    if isinstance(seen, str):
        raise TypeError("seen must be a collection of participant ids or a predicate, got one string")
    named = data.participant.tolist()
    if callable(seen):
        return np.array([bool(seen(p)) for p in named])
    person = people(np.array([*named, *seen]))
    return np.isin(person[: len(named)], person[len(named) :])


def describe(cases: Cases, rounds: list[Round], design: Design, seen_rows: np.ndarray | None) -> dict[str, Any]:
    """The part of a result that is the same for every encoder and metric: target, design, and participants counted."""
    tested = np.concatenate([r.test for r in rounds])
    participant = cases.participant
    trained = [len(np.unique(participant[r.train])) for r in rounds]
    seen = None if seen_rows is None else len(np.unique(participant[tested][seen_rows[cases.rows[tested]]]))
    return {
        "target": cases.target.name,
        "column": cases.target.column,
        "kind": cases.kind,
        "classes": list(cases.classes or ()),
        "leakage": cases.target.leakage,
        "design": design,
        "unit": cases.unit_name,
        "n_train_participants": round(float(np.mean(trained))),  # per fold
        "n_test_participants": len(np.unique(participant[tested])),
        "n_test_units": len(np.unique(cases.unit[tested])),
        "n_test_acquisitions": len(tested),
        "unlabelled_acquisitions": cases.unlabelled,
        "left_out_classes": list(cases.left_out),
        "seen_test_participants": seen,
    }


def predict(cases: Cases, rounds: Sequence[Round], encoder: Embeddings, readout: Readout, seed: int) -> Predictions:
    """Predictions for every test row, each by the model fitted on the training rows of its round.

    Channels made from the target's own column are left out; those of a joint arm get a penalty for each part.
    """
    vectors, num_classes = encoder.vectors[cases.rows], len(cases.classes or ())
    widths = [width for _, width in encoder.parts]
    if encoder.columns:
        kept = np.array([column.lower() != cases.target.column.lower() for column in encoder.columns])
        ends = np.cumsum(widths)
        left = [int(kept[end - width : end].sum()) for end, width in zip(ends, widths, strict=True)]
        widths = [width for width in left if width]
        # Always one channel at least, so that a probe can be fitted.
        vectors = vectors[:, kept] if kept.any() else np.zeros((len(vectors), 1))
    values, priors, grades, chosen = [], [], [], []
    for r in rounds:
        x, y, who, new = vectors[r.train], cases.label[r.train], cases.participant[r.train], vectors[r.test]
        value, setting = fit_predict(readout, x, y, who, new, num_classes, seed, widths)
        values.append(value)
        chosen.append(setting)
        if num_classes:
            priors.append(np.tile(log_share(cases, r.train), (len(new), 1)))
        if cases.kind == "ordinal":
            # Kappa needs a grade. A linear probe gets a proportional-odds model; the others give one directly.
            if readout == "linear":
                log_p = fit_predict("ordinal", x, y, who, new, num_classes, seed, widths)[0]
            else:
                log_p = value
            p = np.exp(log_p)
            grades.append(p @ np.arange(num_classes) / p.sum(1))
    return Predictions(
        np.concatenate([r.test for r in rounds]),
        np.concatenate(values),
        np.concatenate(priors) if priors else None,
        np.concatenate(grades) if grades else None,
        tuple(chosen),
    )


def predict_draws(
    cases: Cases, rounds: Sequence[Round], encoder: Embeddings, readout: Readout, seed: int
) -> list[Predictions]:
    """`predict` for every draw of an arm."""
    return [predict(cases, rounds, draw, readout, seed) for draw in drawn(encoder)]


def drawn(encoder: Embeddings) -> list[Embeddings]:
    """Each draw of an arm as a separate arm; most arms have only one."""
    return [encoder, *(replace(encoder, vectors=vectors, draws=()) for vectors in encoder.draws)]


def compared(per_encoder: list[list[Scored]], encoders: Sequence[Embeddings], leakage: bool) -> list[dict[str, Any]]:
    """Compare the encoders of `pairs_of` on every metric."""
    by_name = {scored[0].encoder: scored for scored in per_encoder}
    pairs = [(by_name[one], by_name[other]) for one, other in pairs_of(encoders)]
    return [row for one, other in pairs for row in compare_metrics(one, other, leakage=leakage)]


def pairs_of(encoders: Sequence[Embeddings]) -> list[tuple[str, str]]:
    """Names of encoders compared: the first with each of the others, and every joint arm with its other parts."""
    (first, *_), names = encoders, {e.name for e in encoders}
    found = [(first.name, other.name) for other in encoders[1:]]
    for arm in encoders[1:]:
        found += [(arm.name, part) for part, _ in arm.parts if part in names and part != first.name]
    return found


def _over_labels(name: str, per_label: list[list[Scored]]) -> list[Scored]:
    """Mean over the labels of a multi-label target, for every metric."""

    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if len(known) == len(values) else None

    rows = [{s.metric: s for s in scored} for scored in per_label]
    means = []
    for metric, any_scored in rows[0].items():
        boots = [r[metric].bootstrap for r in rows]
        boot = mean_of([b for b in boots if b is not None]) if all(b is not None for b in boots) else None
        row = any_scored.row | {
            "target": name,
            "kind": "multilabel",
            "classes": [r[metric].row["classes"][1] for r in rows],
            **estimate(boot, mean([r[metric].row["estimate"] for r in rows])),
            "percentile": percentile(boot),
            "delong": None,
            "chance": mean([r[metric].row["chance"] for r in rows]),
            "note": None if boot else "No interval: some labels are too rare for one.",
            "test_participants_per_class": None,
            "penalty": sorted({s for r in rows for s in r[metric].row["penalty"]}),
        }
        if "per_draw" in row:
            row["per_draw"] = [mean(each) for each in zip(*(r[metric].row["per_draw"] for r in rows), strict=True)]
        means.append(replace(any_scored, bootstrap=boot, row=row, ranked=None))
    return means


def probe_together(
    runs: Mapping[str, Path],
    labels: str | Path | None = None,
    *,
    targets: Sequence[str] | None = None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
    allow_seen: bool = False,
    resamples: int | None = None,
) -> dict[str, Any]:
    """The result of `octfm.evaluation.probe` for the pretrained encoders of `runs`; the first is the reference.

    The design, readout, seeds and grades that the runs' own probes share are used again. The numbers then equal those
    of the runs' own pages, unless a run was pretrained on participants that another one tests. What they do not share
    is `probe`'s default; `orders` adds grades. Raises EvaluationError if a run has no embeddings, if they are not of
    the same acquisitions, or if any run was pretrained on a test participant (unless `allow_seen`).
    """
    encoders = []
    for name, run in runs.items():
        path = run / "embeddings" / "pretrained.parquet"
        if not path.is_file():
            raise EvaluationError(
                f"{run}: no embeddings; make them with `octfm embed {shlex.quote(str(run))} --store prepared`, "
                "the same store for all runs",
                public=f"{name} has no embeddings: octfm embed makes them, from the same store for all runs.",
            )
        encoders.append(replace(read_embeddings(path), name=name))
    settings = _shared_settings(runs)
    options: dict[str, Any] = {"targets": targets, "allow_seen": allow_seen, "resamples": resamples, **settings}
    table = read_labels(labels) if labels is not None else None
    columns = label_columns(encoders[0], table)
    own = {column: grades for column, grades in settings.get("orders", {}).items() if column in columns}
    options["orders"] = {**own, **(orders or {})}
    return probe(encoders, table, seen=seen_if_known(*runs.values(), allow_seen=allow_seen), **options)


def _shared_settings(runs: Mapping[str, Path]) -> dict[str, Any]:
    """The settings that all of the runs' own probes have in common."""
    own = [read_result(run / "probe.json")["settings"] for run in runs.values() if (run / "probe.json").is_file()]
    # Folds only where they are used: other designs store None or a default.
    designs = {(s["design"], s["folds"] if s["design"] == "k-fold" else None) for s in own}
    found: dict[str, Any] = dict(zip(("design", "folds"), designs.pop(), strict=True)) if len(designs) == 1 else {}
    for name in ("readout", "seeds", "seed"):
        if len(values := {s[name] for s in own if name in s}) == 1:
            found[name] = values.pop()
    graded = [{column: tuple(grades) for column, grades in s.get("orders", {}).items()} for s in own]
    found["orders"] = {
        column: grades
        for each in graded
        for column, grades in each.items()
        if all(other.get(column, grades) == grades for other in graded)
    }
    return found
