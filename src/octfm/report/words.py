"""The overview in plain words: what was run, what came out, and how sure that is."""

from collections import Counter
from typing import Any

import numpy as np

from octfm.report.sources import Sources, number, series

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
}
TARGETS = {
    "disease": "telling healthy participants from those with any disease",
    "diagnosis": "telling the diagnoses apart",
    "study_group": "telling the study groups apart",
    "cst_um": "predicting central subfield thickness",
    "scanner": "telling the scanners apart (leakage: less is better)",
}
MAIN = (("disease", "auroc"), ("diagnosis", "auroc"), ("cst_um", "r2"))
"""The key result is the first of these that was measured."""


def encoder(name: str) -> str:
    return ENCODERS.get(name, name)


POOLS = {
    "mean": "mean over tissue tokens",
    "extremes": "by channel the means of the highest and of the lowest fifth of tissue tokens",
}
"""What objective.pool makes of a volume's tokens."""


def interval(row: dict[str, Any], *, digits: int = 2) -> str:
    """`0.91 (0.87 to 0.95)`, or the estimate alone, or a signed difference with its interval."""
    signed = "difference" in row
    value = row["difference"] if signed else row.get("estimate")
    if value is None:
        return "not measurable"
    sign = "+" if signed else ""
    text = f"{value:{sign}.{digits}f}"
    return (
        text if row.get("low") is None else f"{text} ({row['low']:{sign}.{digits}f} to {row['high']:{sign}.{digits}f})"
    )


def key_result(probe: dict[str, Any] | None) -> tuple[str, str]:
    """(tone, text): tone is better, worse, inconclusive or none."""
    if probe is None:
        return (
            "none",
            "No probe has been run on this encoder yet, so nothing can be said about what its features are worth. Run octfm probe.",
        )
    results = [r for r in probe["results"] if r["estimate"] is not None]
    row = next(
        (r for key in MAIN for r in results if (r["target"], r["metric"]) == key), results[0] if results else None
    )
    if row is None:
        return "none", "The probe found no target that could be measured; the probe section says why."
    what = TARGETS.get(row["target"], f"predicting {row['target']}")
    metric = METRICS.get(row["metric"], row["metric"])
    people = f"{row['n_test_participants']} participants"
    people += (
        f", {row['seen_test_participants']} of whom the encoder had seen"
        if row["seen_test_participants"]
        else " it had never seen"
    )
    text = f"In {what} among {people}, {encoder(row['encoder'])} reaches {metric} {interval(row)}"
    text += ", 95\u00a0% interval in brackets." if row["low"] is not None else f". {row['note']}"
    compared = next(
        (
            c
            for c in probe["comparisons"]
            if (c["target"], c["metric"], c["a"]) == (row["target"], row["metric"], row["encoder"])
        ),
        None,
    )
    if compared is None:
        return "none", text + " There is nothing to compare it with."
    gap = f"{metric} {interval(compared)}"
    if compared["low"] is None:
        return (
            "inconclusive",
            f"{text} Against {encoder(compared['b'])} the result is inconclusive: too few participants for an interval.",
        )
    if compared["verdict"] == "inconclusive":
        text += f" The difference to {encoder(compared['b'])} is inconclusive: {gap}; the interval includes 0."
    else:
        text += f" That is {compared['verdict']} than {encoder(compared['b'])}: {gap}; the interval excludes 0."
    return compared["verdict"], text + _with_fewer_labels(probe, row, compared)


def _with_fewer_labels(probe: dict[str, Any], row: dict[str, Any], compared: dict[str, Any]) -> str:
    """The same comparison where fewer participants had a label, a clause for each number of them."""
    of = ("target", "metric", "a", "b")
    looks = [
        c
        for c in probe.get("label_efficiency_comparisons", [])
        if all(c[name] == compared[name] for name in of) and c["low"] is not None and c["fraction"] < 1
    ]
    if not looks:
        return ""
    clauses = "; ".join(f"with {c['n_train_participants']}: {interval(c)}, {_after_holm(c)}" for c in looks)
    return f" That is with {row['n_train_participants']} labelled participants to learn from; {clauses}."


def _after_holm(c: dict[str, Any]) -> str:
    """The verdict, unless several looks may have made it by luck."""
    lucky = c["verdict"] != "inconclusive" and c.get("p_holm") is not None and c["p_holm"] > 0.05
    return f"{c['verdict']}, but not after Holm" if lucky else c["verdict"]


def subtitle(sources: Sources, name: str) -> str:
    """Which run, when, how large, by which code."""
    record = sources.record
    parts = [name]
    if record.get("started"):
        parts.append(f"started {record['started']}")
    if total := (record.get("parameters") or {}).get("total"):
        parts.append(f"{total / 1e6:.1f} million parameters")
    if commit := (record.get("git") or {}).get("commit"):
        parts.append(f"commit {commit[:10]}" + (", with uncommitted changes" if record["git"].get("dirty") else ""))
    return ", ".join(parts) + "."


def five_lines(sources: Sources) -> list[tuple[str, str]]:
    """Data, preparation, training, probe, health, and the checkpoint to take where an online probe ran: a label and a sentence each."""
    return [
        ("Data", _data(sources)),
        ("Preparation", _preparation(sources)),
        ("Training", _training(sources)),
        ("Probe", _probe(sources.probe)),
        ("Health", _health(sources)),
        *([("Checkpoint", advice)] if (advice := checkpoint_advice([*sources.online, *sources.validation])) else []),
    ]


def latest_health(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The last verdict on every subject, with how often each verdict was given over the run; the worst first."""
    latest: dict[str, dict[str, Any]] = {}
    counts: dict[str, Counter] = {}
    for row in rows:
        latest[row["what"]] = row
        counts.setdefault(row["what"], Counter())[row["verdict"]] += 1
    order = {"bad": 0, "watch": 1, "ok": 2}
    found = [{**row, "counts": dict(counts[what])} for what, row in latest.items()]
    return sorted(found, key=lambda row: order.get(row["verdict"], 0))


def checkpoint_advice(rows: list[dict[str, Any]]) -> str:
    """Which checkpoint the online probe would take, and whether the SSL loss agrees; empty without a probe."""
    probed = [row for row in rows if row.get("kind") == "probe" and np.isfinite(number(row.get("score")))]
    if not probed:
        return ""
    best = max(probed, key=lambda row: number(row["score"]))
    metric, step = METRICS.get(best["metric"], best["metric"]), int(best["step"])
    text = f"Take step-{step + 1:08d}.pt: frozen features predict {best['target']} best there ({metric} {number(best['score']):.2f}"
    text += f", chance {number(best['chance']):.2f})." if best.get("chance") else ")."
    if number(best["score"]) <= number(best.get("chance", 0)):
        return f"{text} No probed state is better than chance: do not trust any of them yet."
    held_out = [
        row for row in rows if row.get("kind") == "validation" and np.isfinite(number(row.get("masked_over_baseline")))
    ]
    if not held_out:
        return text
    lowest = min(held_out, key=lambda row: number(row["masked_over_baseline"]))
    span = max(int(row["step"]) for row in [*probed, *held_out]) + 1
    if abs(int(lowest["step"]) - step) > 0.2 * span:
        text += f" The SSL loss disagrees: it is lowest at step {int(lowest['step']) + 1}."
        text += " Trust the probe; the loss says nothing about features."
    return text


def _data(sources: Sources) -> str:
    if sources.catalog is None:
        return "No catalog was given to this report, so accepted and rejected files are not counted here."
    s = sources.catalog.summary()
    codes = ", ".join(f"{code} {n}" for code, n in s["rejects"].items())
    scanners = ", ".join(f"{n} {name}" for name, n in s["scanners"].items())
    rejected = (
        f"{s['rejected']} files were rejected, each with a reason ({codes})."
        if s["rejected"]
        else "No file was rejected."
    )
    return f"{s['accepted']} OCT volumes of {s['participants']} participants were accepted ({scanners}). {rejected}"


def _preparation(sources: Sources) -> str:
    if sources.store is None:
        return "No prepared store was given to this report."
    rows = sources.store.rows
    unsure = sum(not row.confident for row in rows)
    d, h, w = sources.store.image_size
    text = f"{len(rows)} volumes were brought to {d} B-scans × {h} rows × {w} A-scans. "
    if not rows:
        return text
    text += f"The tissue band was found with confidence in {1 - unsure / len(rows):.0%}"
    return text + (f"; in the other {unsure} every row was kept." if unsure else " of them.")


def _training(sources: Sources) -> str:
    steps, ratio = series(sources.train, "masked_over_baseline")
    if not len(steps):
        return "No training step has been logged yet."
    held_out = series(sources.validation, "masked_over_baseline")[1]
    text = f"{steps[-1] + 1:.0f} steps. Hidden tissue is predicted with {ratio[-1]:.0%} of the error of an answer that never looks"
    return text + (
        f", {held_out[-1]:.0%} on held-out participants." if len(held_out) else "; no validation was logged."
    )


def _probe(probe: dict[str, Any] | None) -> str:
    if probe is None:
        return "Not run."
    results, compared = (
        probe["results"],
        [c for c in probe["comparisons"] if not c.get("leakage") and c["metric"] in ("auroc", "r2")],
    )
    encoders = len({r["encoder"] for r in results})
    text = f"{len({r['target'] for r in results})} targets, {encoders} encoders."
    by_verdict = Counter(c["verdict"] for c in compared)
    verdicts = ", ".join(
        f"{n} {verdict}" for verdict in ("better", "worse", "inconclusive") if (n := by_verdict[verdict])
    )
    if verdicts:
        text += f" Of {len(compared)} paired comparisons of {encoder(compared[0]['a'])} with another: {verdicts}."
    seen = max((number(r["seen_test_participants"]) for r in results), default=0)
    return text + (f" Caution: {seen:.0f} test participants had been seen in pretraining." if seen else "")


def _health(sources: Sources) -> str:
    latest = latest_health(sources.health)
    if not latest:
        return "No health verdict has been logged yet."
    troubled = [f"{row['what']} ({row['verdict']})" for row in latest if row["verdict"] != "ok"]
    return f"{len(latest)} checks; " + (
        "to look at: " + ", ".join(troubled) + "." if troubled else "all fine at the last look."
    )
