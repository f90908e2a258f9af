"""Sentences and table rows that pages and cards share: the key result, the overview, health and checkpoint advice."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octfm import display
from octfm.display import interval
from octfm.evaluation.results import seen_note
from octfm.evaluation.scoring import HEADLINE, PLANNED, fails_holm
from octfm.report.sources import Sources, lookup, number, series

METRICS = {
    "auroc": "AUROC",
    "auprc": "AUPRC",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "kappa": "quadratic kappa",
    "brier": "Brier score (less is better)",
    "ece": "calibration error (less is better)",
    "r2": "R²",
    "mae": "mean absolute error",
}
ENCODERS = {
    "pretrained": "the pretrained encoder",
    "random_init": "the same encoder at random initialisation",
    "histogram": "a plain intensity histogram",
    "tissue_map": "the tissue map (thickness and height of the tissue band, no voxel)",
    "map_and_encoder": "tissue map and encoder together",
    "covariates": "age, sex, site, scanner and image quality, as far as known",
    "layers": "the layers and fluid that the packaged network measures",
}
SHORT = {"random_init": "untrained", "map_and_encoder": "map + encoder"}
"""Names of encoders on charts, where they are shorter than their own."""
TARGETS = {
    "disease": "telling healthy participants from those with any disease",
    "diagnosis": "telling the diagnoses apart",
    "study_group": "telling the study groups apart",
    "label": "telling the labels apart",
    "cst_um": "predicting central subfield thickness",
    "scanner": "telling the scanners apart (leakage: less is better)",
}
MAIN = (("disease", "auroc"), ("diagnosis", "auroc"), ("label", "auroc"), ("cst_um", "r2"))
"""The key result is the first of these that was measured."""
NO_BETTER = "No probed state is better than chance: do not trust any of them yet."
HIDDEN = "It learned without any label, by predicting hidden parts of the retina."


@dataclass(frozen=True)
class Objective:
    """What pages, cards and papers say about a training objective; the defaults are for one that octfm lacks."""

    predicted: str = "the goal of its objective"
    """The subject of its loss."""
    learned: str = ""
    """How the encoder learned, a sentence."""
    on_card: str = ""
    """Its description in the model card; the card of another objective has its name."""
    in_methods: str = "an unknown objective"
    """What a paper says after "pretrained with"."""
    tags: str = ""
    """Words for the hub."""


OBJECTIVES = {
    "vjepa2": Objective(
        "hidden tissue",
        HIDDEN,
        "V-JEPA 2 with context loss, on tissue tokens",
        "the objective of V-JEPA 2 with context loss",
        "self-supervised v-jepa",
    ),
    "data2vec": Objective("hidden tissue", HIDDEN, "data2vec, on tissue tokens", "data2vec", "self-supervised"),
    "mae": Objective(
        "hidden tissue",
        HIDDEN,
        "masked autoencoding of tissue tokens",
        "masked autoencoding of the voxels of hidden tissue",
        "self-supervised",
    ),
    "dense": Objective(
        "what tokens show",
        "It learned from the ground truth of synthetic scans: which layers and lesions are where.",
        "synthetic-supervised: the layers and lesions in every token, from the truth of streamed phantoms",
        "synthetic supervision (shares of layers and lesions in every token, from the truth of streamed phantoms)",
        "synthetic-supervised",
    ),
    "anchored": Objective(
        "hidden tissue",
        "It learned by predicting hidden parts of the retina, and from the ground truth of synthetic scans.",
        "masked voxels of the data below; synthetic-supervised by the truth of streamed phantoms among them",
        "masked autoencoding of the voxels of hidden tissue, mixed with synthetic supervision (shares of layers and "
        "lesions in every token, from the truth of streamed phantoms)",
        "self-supervised synthetic-supervised",
    ),
}
POOLS = {
    "mean": "mean over tissue tokens",
    "extremes": "for each channel the means of the highest and of the lowest fifth of tissue tokens",
    "tails": "the mean of tissue tokens, and for each channel the means of the highest and lowest 20, 5 and 1 %",
    "summary": "learned queries that read tissue tokens and their positions",
}
"""How objective.pool turns a volume's tokens into a vector."""


def encoder(name: str) -> str:
    """The name of an encoder in a sentence."""
    return ENCODERS.get(name, name)


def short(name: str) -> str:
    """The name of an encoder on charts."""
    return SHORT.get(name, name)


def target(name: str) -> str:
    """What a probe of this target does, for a sentence that begins with "In"."""
    return TARGETS.get(name, f"predicting {display.readable(name)}")


def people_tested(row: dict[str, Any]) -> str:
    """`40 participants it had never seen`, or how many of them it had, or that nobody can tell."""
    known = f"({note})" if (note := seen_note(row)) else "it had never seen"
    return f"{display.number(row['n_test_participants'], 'participant')} {known}"


def of_two(row: dict[str, Any]) -> str:
    """What follows the counts of people per class of a result if they add up to more than all of them: some have eyes,
    or scans, of several classes."""
    per_class = row.get("test_participants_per_class") or {}
    if sum(per_class.values()) <= row["n_test_participants"]:
        return ""
    if row.get("unit") == "acquisition":
        return "; those whose scans differ count in each of their classes"
    return "; those whose eyes differ count in two"


def score_rows(results: Iterable[dict[str, Any]], encoders: Iterable[str], absent: str = "") -> list[dict[str, Any]]:
    """Rows of a table of probe results, one per target and metric, with a cell for each of `encoders`."""
    cells: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for r in results:
        cells.setdefault((r["target"], r["metric"]), {})[r["encoder"]] = r
    return [
        {
            **next(iter(own.values())),
            "metric": METRICS.get(metric, metric),
            "cells": [interval(own[e]) + spread(own[e]) if e in own else absent for e in encoders],
            "notes": _notes(own),
            "people": ", ".join(dict.fromkeys(str(r["n_test_participants"]) for r in own.values())),
        }
        for (_, metric), own in cells.items()
    ]


def _notes(own: dict[str, dict[str, Any]]) -> list[str]:
    """The notes on a metric; one that is not on every encoder names those it is on."""
    whose: dict[str, list[str]] = {}
    for name, row in own.items():
        if row["note"]:
            whose.setdefault(row["note"], []).append(name)
    return sorted(note if len(names) == len(own) else f"{', '.join(names)}: {note}" for note, names in whose.items())


def spread(row: dict[str, Any]) -> str:
    """`; 3 draws: 0.71 to 0.79` for an arm that was drawn several times, else nothing."""
    draws = [value for value in row.get("per_draw", ()) if value is not None]
    return f"; {len(draws)} draws: {min(draws):z.2f} to {max(draws):z.2f}" if len(draws) > 1 else ""


def comparison_rows(comparisons: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table of paired comparisons, for the metrics that pages show."""
    return [
        {"p_holm": None, **c, "metric": METRICS[c["metric"]], "gap": interval(c)}
        for c in comparisons
        if c["metric"] in HEADLINE
    ]


def planned(probe: dict[str, Any]) -> list[dict[str, Any]]:
    """The planned comparisons: those by a metric of PLANNED, without leakage; the others are descriptive."""
    return [c for c in probe["comparisons"] if c["metric"] in PLANNED and not c.get("leakage")]


def seen_sentence(results: Iterable[dict[str, Any]]) -> str:
    """What it means that test participants were, or may have been, trained on; "" if none was."""
    counts = [r["seen_test_participants"] for r in results]
    if None in counts:
        return (
            "Nobody can tell whether test participants were seen in training, because weights were published without "
            "the key of their participants. If they were, these numbers are too good."
        )
    if seen := max(counts, default=0):
        return f"{display.number(seen, 'test participant')} had been seen in training, so these numbers are too good."
    return ""


def leakage(results: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The result of the probe for the scanner, if it was measured."""
    return next((r for r in results if r.get("leakage") and r["metric"] == "auroc" and r["estimate"] is not None), None)


def leaks(row: dict[str, Any]) -> bool:
    """Whether features tell scanners apart well enough to be a shortcut, by the row of `leakage`."""
    return row["estimate"] > 0.6


def without_interval(results: Iterable[dict[str, Any]]) -> list[str]:
    """Targets with too few participants for an interval. A metric that is not defined has none for another reason."""
    return sorted({r["target"] for r in results if r["estimate"] is not None and r["low"] is None})


def key_result(probe: dict[str, Any] | None) -> tuple[str, str]:
    """(tone, text) of the verdict, followed by the same comparison with fewer labels if it was made."""
    tone, text = verdict(probe)
    return tone, f"{text} {fewer}" if (fewer := with_fewer_labels(probe)) else text


def verdict(probe: dict[str, Any] | None) -> tuple[str, str]:
    """(tone, text of at most two sentences). The tone is better, worse, inconclusive (also if the verdict does not
    survive Holm's correction) or none; it is worse as well if the tissue map, which holds no voxel, does better."""
    if probe is None:
        return "none", "No probe has been run on this encoder yet, so nothing can be said about its features."
    row = _key_row(probe)
    if row is None:
        if leakage(probe["results"]):
            return "none", "Only the scanner was probed, which measures leakage, not how good the features are."
        return "none", "The probe found no target that could be measured; its results below give the reasons."
    metric = METRICS.get(row["metric"], row["metric"])
    reaches = "reach" if row["encoder"] == "layers" else "reaches"
    text = f"In {target(row['target'])} among {people_tested(row)}, {encoder(row['encoder'])} {reaches} "
    text += f"{metric} {interval(row)}"
    text += "." if row["low"] is None else ", 95\u00a0% interval in brackets."
    compared = _key_comparison(probe, row)
    if compared is None:
        return "none", f"{text} There is nothing to compare it with."
    other, gap = encoder(compared["b"]), f"{metric} {interval(compared)}"
    if (row["encoder"], compared["b"]) == ("layers", "random_init"):
        other = "an untrained encoder"
    if compared["low"] is None:
        why = "too few participants for an interval" if compared["difference"] is not None else "it is not measurable"
        text += f" Against {other} the result is inconclusive: {why}."
        return "inconclusive", text
    tone = compared["verdict"]
    if tone == "inconclusive":
        text += f" The difference to {other} is inconclusive: {gap}; the interval includes 0"
    else:
        text += f" That is {tone} than {other}: {gap}; the interval excludes 0"
        if fails_holm(compared):
            text += ", but not after Holm's correction"
            tone = "inconclusive"
        elif row["design"] == "k-fold" and (
            row["n_test_participants"] < 100 or (row["metric"] == "auroc" and row["estimate"] < 0.7)
        ):
            text += ", but may be a third too narrow, as other folds would have given other probes"
    ahead = _key_comparison(probe, row, "tissue_map")
    if ahead is not None and ahead is not compared and ahead["verdict"] == "worse" and not fails_holm(ahead):
        tone = "worse"
        text += f"; it is worse than {encoder('tissue_map')}: {metric} {interval(ahead)}"
    return tone, f"{text}."


def with_fewer_labels(probe: dict[str, Any] | None) -> str:
    """The key comparison with fewer labelled participants, one clause per number of them; empty if not measured."""
    if probe is None or (row := _key_row(probe)) is None:
        return ""
    compared = _key_comparison(probe, row)
    if compared is None or compared["low"] is None:
        return ""
    same = ("target", "metric", "a", "b")
    with_fewer = [
        c
        for c in probe.get("label_efficiency_comparisons", [])
        if all(c[name] == compared[name] for name in same) and c["low"] is not None and c["fraction"] < 1
    ]
    if not with_fewer:
        return ""
    clauses = "; ".join(
        f"with {c['n_train_participants']}: {interval(c)}, {c['verdict']}{', but not after Holm' * fails_holm(c)}"
        for c in with_fewer
    )
    return f"That is with {row['n_train_participants']} labelled participants to learn from; {clauses}."


def _key_row(probe: dict[str, Any]) -> dict[str, Any] | None:
    results = [r for r in probe["results"] if r["estimate"] is not None and not r.get("leakage")]
    first = results[0] if results else None
    return next((r for key in MAIN for r in results if (r["target"], r["metric"]) == key), first)


def _key_comparison(probe: dict[str, Any], row: dict[str, Any], other: str | None = None) -> dict[str, Any] | None:
    """The first comparison of the key result, or that with `other`; None if it was not made."""
    key = row["target"], row["metric"], row["encoder"]
    own = (c for c in probe["comparisons"] if (c["target"], c["metric"], c["a"]) == key)
    return next((c for c in own if other in (None, c["b"])), None)


def subtitle(sources: Sources, name: str) -> str:
    """One line: which run, when it started, its size and its commit."""
    record = sources.record
    parts = [name]
    if record.get("started"):
        parts.append(f"started {record['started']}")
    if total := lookup(record, "parameters", "total"):
        parts.append(f"{total / 1e6:.1f} million parameters")
    if commit := lookup(record, "git", "commit"):
        parts.append(f"commit {commit[:10]}" + (", with uncommitted changes" if record["git"].get("dirty") else ""))
    return ", ".join(parts) + "."


def latest_health(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last verdict on every subject with the run's counts of each verdict, the worst first."""
    latest: dict[str, dict[str, Any]] = {}
    counts: dict[str, Counter] = {}
    for row in rows:
        latest[row["what"]] = row
        counts.setdefault(row["what"], Counter())[row["verdict"]] += 1
    order = {"bad": 0, "watch": 1, "ok": 2}
    found = [{**row, "counts": dict(counts[what])} for what, row in latest.items()]
    return sorted(found, key=lambda row: order.get(row["verdict"], 0))


def checkpoint_advice(rows: list[dict[str, Any]]) -> str:
    """The checkpoint with the best online probe, and whether the SSL loss agrees; empty without an online probe."""
    compared = probed(rows)
    if not compared:
        return ""
    best = _best(compared)
    metric, step = METRICS.get(best["metric"], best["metric"]), int(best["step"])
    chance = f", chance {number(best['chance']):.2f}" if best.get("chance") else ""
    score = f"{metric} {number(best['score']):.2f}{chance}"
    text = (
        f"Take step-{step + 1:08d}.pt: frozen features predict {display.readable(best['target'])} best there ({score})."
    )
    if number(best["score"]) <= number(best.get("chance", 0)):
        return f"{text} {NO_BETTER}"
    held_out = [
        row for row in rows if row.get("kind") == "validation" and np.isfinite(number(row.get("masked_over_baseline")))
    ]
    if not held_out:
        return text
    lowest = min(held_out, key=lambda row: number(row["masked_over_baseline"]))
    # Only if they are more than a fifth of the run apart; a smaller difference may be chance.
    span = max(int(row["step"]) for row in [*compared, *held_out]) + 1
    if abs(int(lowest["step"]) - step) > 0.2 * span:
        text += f" The SSL loss disagrees: it is lowest at step {int(lowest['step']) + 1}."
        text += " Trust the probe; the loss says nothing about features."
    return text


def advised_step(rows: list[dict[str, Any]]) -> int | None:
    """Updates of the checkpoint with the best online probe; None without an online probe."""
    compared = probed(rows)
    return int(_best(compared)["step"]) + 1 if compared else None


def checkpoint_taken(rows: list[dict[str, Any]], checkpoints: Sequence[Path]) -> str:
    """Which of a run's checkpoints its folder stands for, the newest, and which one `checkpoint_advice` prefers."""
    text = f"{checkpoints[-1].name}: the newest checkpoint of this run"
    if (advised := advised_step(rows)) is None:
        return text
    name = f"step-{advised:08d}"
    if checkpoints[-1].stem == name:
        return f"{text}, and the one with the best online probe"
    best = next((path for path in checkpoints if path.stem == name), None)
    if best is None:
        return f"{text}; the online probe was best at {name}, which is no longer there"
    return f"{text}; the online probe was best at {best}: give that file instead of the folder to take it"


def probed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the online probe with the target, pooling, volumes and labels of the last one; others cannot be
    compared with it."""
    known = [row for row in rows if row.get("kind") == "probe" and np.isfinite(number(row.get("score")))]
    # Rows of earlier versions, which chose the penalty by another rule, name no cases.
    return [row for row in known if all(row.get(key) == known[-1].get(key) for key in ("target", "pool", "cases"))]


def _best(compared: list[dict[str, Any]]) -> dict[str, Any]:
    """The row with the best score; of equal scores the last, because its checkpoint is kept."""
    return max(compared, key=lambda row: (number(row["score"]), int(row["step"])))


def objective_name(sources: Sources) -> str:
    """Name of the run's objective; that of the default if its config names none, "unknown" without a config."""
    return str(lookup(sources.settings, "objective", "name") or ("vjepa2" if sources.settings else "unknown"))


def objective(sources: Sources) -> Objective:
    return OBJECTIVES.get(objective_name(sources), Objective())


def training_line(sources: Sources) -> str:
    """Number of steps and last loss, relative to a constant prediction."""
    if reason := sources.record.get("not_pretrained"):
        return str(reason)
    steps, ratio = series(sources.train, "masked_over_baseline")
    if not len(steps):
        return "No training step has been logged yet."
    held_out = series(sources.validation, "masked_over_baseline")[1]
    error = f"{100 * ratio[-1]:.0f}\u00a0% of a constant prediction's error"
    if len(held_out):
        error += f", {100 * held_out[-1]:.0f}\u00a0% on held-out participants."
    else:
        error += "; no validation was logged."
    what = objective(sources).predicted
    return f"{display.number(int(steps[-1]), 'step')}. {what[0].upper()}{what[1:]} is predicted with {error}"


def health_line(sources: Sources) -> str:
    """How many checks there are, and which of them need attention."""
    if sources.record.get("not_pretrained"):
        return "Nothing was pretrained, so nothing was checked."
    latest = latest_health(sources.health)
    if not latest:
        return "No health verdict has been logged yet."
    troubled = ", ".join(f"{row['what']} ({row['verdict']})" for row in latest if row["verdict"] != "ok")
    return f"{display.number(len(latest), 'check')}; " + (f"look at {troubled}." if troubled else "all ok.")
