"""trust.html: how good an encoder is for which people and scanners, and how certain that is; without names or ids."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from octfm.display import interval, readable
from octfm.report.figures import Chart
from octfm.report.images import prepared_picture
from octfm.report.page import render, write_page
from octfm.report.shareable import shareable_command
from octfm.report.trust import figures, words
from octfm.report.words import of_two, spread
from octfm.store.store import Store

PAIRS = 6
"""Bland-Altman plots to show; trust.json has the numbers of all pairs."""


def write_trust(result: dict[str, Any], store: Store | None, out: str | Path, *, images: bool = True) -> Path:
    """Render what `octfm.trust.report.trust` returned, with pictures from `store` if `images`; returns the page's path.
    It names no participant, acquisition or folder; volumes are identified by their row in the store. Scanners, classes,
    groups and runs have the names that headers, tables and the user gave them."""
    pictured = store if images else None
    facts = {
        "reference": result["reference"],
        "cohort": result["cohort"],
        "findings": [{**asdict(f), "word": words.WORDS[f.tone]} for f in words.findings(result)],
        "encoders": result["encoders"],
        "baseline_table": _table(result),
        "baseline_comparisons": [_compared(c) for c in result["comparisons"] if c["planned"]],
        "baseline_charts": _baseline_charts(result),
        "from_scratch_note": result["from_scratch_note"],
        "left_out": _left_out(result),
        "domains": _domains(result),
        "same_eye": _same_eye(result),
        "subgroups": _subgroups(result),
        "calibration": _calibration(result),
        "leakage": _leakage(result),
        "neighbours": _neighbours(result, pictured),
        "failures": _failures(result, pictured),
        "copies": _copies(result, store),
        "skipped": [{**s, "sentence": s.get("public", s["sentence"])} for s in result["skipped"]],
        "images": pictured is not None,
        "resamples": result["settings"]["resamples"],
        "interval_meaning": result["interval_meaning"],
        # In full they are only in trust.json, because folders may be named after people.
        "commands": [shareable_command(command) for command in result["commands"]],
    }
    return write_page(render("trust.html.jinja", facts), Path(out))


def summary_lines(result: dict[str, Any]) -> list[str]:
    """The findings for a terminal."""
    return [f"[{words.WORDS[f.tone]}] {f.question} {f.sentence}" for f in words.findings(result)]


def _table(result: dict[str, Any]) -> list[dict[str, Any]]:
    """One table per target, with encoders as rows and metrics as columns."""
    tables = []
    for target in dict.fromkeys(r["target"] for r in result["results"]):
        own = [r for r in result["results"] if r["target"] == target]
        metrics = list(dict.fromkeys(r["metric"] for r in own))
        cell = {(r["encoder"], r["metric"]): r for r in own}
        tables.append(
            {
                "target": target,
                "metrics": [words.NAMES[m] for m in metrics],
                "rows": [
                    {
                        "name": e,
                        "what": what,
                        # Predictions of earlier versions have no grades, so kappa may be missing.
                        "cells": [
                            _interval(cell[e, m]) + spread(cell[e, m]) if (e, m) in cell else "" for m in metrics
                        ],
                    }
                    for e, what in {r["encoder"]: r["what"] for r in own}.items()
                ],
                "people": own[0]["n_test_participants"],
                "unit": own[0]["unit"],
                "counts": own[0]["test_participants_per_class"] or {},
                "of_two": of_two(own[0]),
                "notes": sorted({r["note"] for r in own if r["note"]}),
                "left_out": own[0]["left_out_classes"],
            }
        )
    return tables


def _interval(row: dict[str, Any]) -> str:
    return interval(row, digits=words.digits_of(row["metric"]))


def _compared(c: dict[str, Any]) -> dict[str, Any]:
    """A comparison as cells of a table; `lost` if its verdict does not survive Holm's correction."""
    metric, gap = words.NAMES.get(c["metric"], c["metric"]), _interval(c) if c["difference"] is not None else "–"
    lost = c["verdict"] != c["claim"] and c.get("planned")
    return {**c, "metric": metric, "gap": gap, "lost": lost}


def _baseline_charts(result: dict[str, Any]) -> list[Chart]:
    planned = {c["target"]: c["metric"] for c in reversed(result["comparisons"]) if c["planned"]}
    rows = [r for r in result["results"] if r["metric"] == planned.get(r["target"], "auroc")]
    caption = (
        "95\u00a0% intervals over participants; the dashed line is chance. Overlapping bars do not settle a "
        "comparison; the paired table does."
    )
    return _charts(rows, "{}: every encoder", caption, lambda r: figures.Bar(r["encoder"], r), chance=True)


def _charts(
    rows: Sequence[dict[str, Any]],
    title: str,
    caption: str,
    bar: Callable[[dict[str, Any]], figures.Bar],
    *,
    chance: bool = False,
) -> list[Chart]:
    """A chart of each target, with a bar for each of its rows; `title` has a place for the target's name."""
    charts = []
    for target in dict.fromkeys(r["target"] for r in rows):
        own = [r for r in rows if r["target"] == target]
        axis, reference = words.NAMES[own[0]["metric"]], own[0]["chance"] if chance else None
        charts.append(figures.bars(title.format(readable(target)), caption, list(map(bar, own)), axis, reference))
    return [chart for chart in charts if chart is not None]


def _left_out(result: dict[str, Any]) -> dict[str, Any]:
    part = result["left_out_scanner"]
    reference, regimes = result["reference"], part["regimes"]
    own = [r for r in part["results"] if r["encoder"] == reference]
    caption = (
        "The same tested participants of each scanner, with four training sets of the probe. Hollow: too few for an "
        "interval and left out of the mean."
    )
    series = list(regimes)

    def bar(r: dict[str, Any]) -> figures.Bar:
        who = r["scanner"] or "mean over scanners"
        return figures.Bar(who, r, series.index(r["regime"]), regimes[r["regime"]])

    table: dict[tuple[str, str, str], dict[str, str]] = {}
    for r in part["results"]:
        if r["scanner"] is None:
            key = r["target"], words.NAMES[r["metric"]], r["encoder"]
            table.setdefault(key, {})[regimes[r["regime"]]] = interval(r)
    pretrained = {r["scanner"]: r["in_pretraining"] for r in own if r["scanner"] is not None}
    return {
        **part,
        "charts": _charts(own, "{} by scanner", caption, bar),
        "regimes": list(regimes.values()),
        "means": [{"target": t, "metric": m, "encoder": e, "cells": cells} for (t, m, e), cells in table.items()],
        "comparisons": [_compared(c) for c in part["comparisons"] if c["encoder"] == reference],
        "never_pretrained": [s for s, seen in pretrained.items() if seen is False],
    }


def _domains(result: dict[str, Any]) -> dict[str, Any]:
    part = result["domains"]
    origin = [
        {**facts, "name": name, "scanners": ", ".join(map(readable, facts["scanners"]))}
        for name, facts in result["pretraining"].items()
    ]
    settings = [facts["settings"] for facts in result["pretraining"].values()]
    differ = sorted({key for other in settings[1:] for key in other if other[key] != settings[0].get(key)})
    return {**part, "origin": origin, "differ": differ, "comparisons": [_compared(c) for c in part["comparisons"]]}


def _same_eye(result: dict[str, Any]) -> dict[str, Any]:
    part = result["same_eye"]
    drawn = sorted(
        (p for p in part["pairs"] if p["bland_altman"]),
        key=lambda p: (p["quantity"] != "predicted value", -p["n_eyes"]),
    )[:PAIRS]
    caption = (
        "One point per eye. Solid: bias; dashed: limits of agreement (± 1.96 standard deviations); shaded: their "
        "95\u00a0% intervals."
    )
    plots = [
        figures.bland_altman(p, f"{readable(p['target'])}: {readable(p['a'])} − {readable(p['b'])}", caption)
        for p in drawn
    ]
    pairs = []
    for p in part["pairs"]:
        icc, bias, limits = " ".join(f"{i['form']} {interval(i)}" for i in p["icc"]) or p["note"], "", ""
        if b := p["bland_altman"]:
            bias = interval(b["bias"])
            limits = f"{b['lower']['estimate']:.2f} to {b['upper']['estimate']:.2f}"
        pairs.append({**p, "icc": icc, "bias": bias, "limits": limits})
    retrieval = [
        {
            **r,
            "first": interval(r["first"]),
            "rank": interval(r["reciprocal_rank"]),
            "fellow": interval(r["same_participant_first"]),
        }
        for r in part["retrieval"]
    ]
    return {
        **part,
        "agreement": [{**r, "cell": interval(r)} for r in part["agreement"]],
        "pairs": pairs,
        "plots": plots,
        "retrieval": retrieval,
        "comparisons": [_compared(c) for c in part["comparisons"]],
    }


def _subgroups(result: dict[str, Any]) -> dict[str, Any]:
    part = result["subgroups"]
    caption = "Every group separately. Hollow: fewer than 10 participants per class, so no interval and no comparison."

    def bar(r: dict[str, Any]) -> figures.Bar:
        return figures.Bar(f"{r['group']}: {r['value']} ({r['n_participants']})", r)

    return {
        "sentence": part["sentence"],
        "charts": _charts(part["results"], "{} by group", caption, bar),
        "comparisons": [_compared(c) for c in part["comparisons"] if c["planned"]],
        "silent": sum(not c["planned"] for c in part["comparisons"]),
    }


def _calibration(result: dict[str, Any]) -> dict[str, Any]:
    part = result["calibration"]
    rows, charts = [], []
    for r in part["results"]:
        line = r["line"] or {}
        rows.append(
            {
                **{name: r[name] for name in ("target", "encoder", "verdict", "note")},
                "ece": interval(r["ece"]),
                "brier": interval(r["brier"]),
                "chance": f"{r['brier']['chance']:.2f}",
                "honest": f"{r['honest_ece']['mean']:.2f}, up to {r['honest_ece']['high']:.2f}",
                **{name: interval(line[name]) if line else "–" for name in ("slope", "intercept")},
            }
        )
        caption = f"{r['n_participants']} participants; a larger mark holds more cases; "
        caption += "bars are Wilson's 95\u00a0% intervals, in which a participant counts once."
        charts.append(figures.reliability(r, f"{readable(r['target'])}: {r['encoder']}", caption))
    return {**part, "rows": rows, "charts": charts}


def _leakage(result: dict[str, Any]) -> dict[str, Any]:
    part = result["leakage"]
    names = list(dict.fromkeys(r["encoder"] for r in part["results"]))
    cell = {(r["encoder"], r["metric"]): r for r in part["results"]}
    rows = [{"name": n, **{m: interval(cell[n, m]) for m in ("auroc", "balanced_accuracy")}} for n in names]
    return {
        "sentence": part["sentence"],
        "rows": rows,
        "chance": next((r["chance"] for r in part["results"] if r["metric"] == "balanced_accuracy"), None),
        "comparisons": [_compared(c) for c in part["comparisons"] if c["planned"]],
    }


def _neighbours(result: dict[str, Any], store: Store | None) -> dict[str, Any]:
    part = result["neighbours"]
    rows: dict[str, dict[str, str]] = {}
    columns: dict[str, str] = {}
    for r in part["results"]:
        columns[r["target"]] = f"{readable(r['target'])} (chance {r['chance']:.2f})"
        rows.setdefault(r["encoder"], {})[r["target"]] = interval(r)
    examples = []
    for e in part["examples"] if store is not None else []:
        scans = enumerate(zip([e["query"], *e["nearest"]], e["labels"], strict=True))
        examples.append(
            [
                {"word": f"neighbour {place}" if place else "tested scan", "label": label, **_volume(store, name)}
                for place, (name, label) in scans
            ]
        )
    return {
        "sentence": part["sentence"],
        "columns": columns,
        "rows": [{"name": name, "cells": [cells.get(c, "") for c in columns]} for name, cells in rows.items()],
        "comparisons": [_compared(c) for c in part["comparisons"] if c["planned"]],
        "examples": examples,
    }


def _failures(result: dict[str, Any], store: Store | None) -> list[dict[str, Any]]:
    by_target: dict[str, list[dict[str, Any]]] = {}
    for f in result["failures"]:
        by_target.setdefault(f["target"], []).append({**f, **_volume(store, f["acquisition"])})
    return [{"target": t, "cases": cases} for t, cases in by_target.items()]


def _copies(result: dict[str, Any], store: Store | None) -> dict[str, Any]:
    part = result["copies"]
    # No acquisition ids on the page: row numbers identify volumes for those who have the store.
    place = {row.acquisition: row.index for row in store.rows} if store is not None else {}
    pairs = [
        {
            "rows": " and ".join(str(place.get(name, "?")) for name in p["acquisitions"]),
            "splits": " and ".join(s or "none" for s in p["splits"]),
            "people": "one participant" if p["same_participant"] else "two participants",
            "by": p.get("by") or f"speckle, correlation {p['correlation']:.2f}",
        }
        for p in [*part["exact"], *part["near"]]
    ]
    return {**part, "pairs": pairs}


def _volume(store: Store | None, acquisition: str) -> dict[str, Any]:
    """A picture of a prepared volume and facts about it that identify nobody; no picture without a store."""
    if store is None:
        return {"picture": None}
    row = next(r for r in store.rows if r.acquisition == acquisition)
    arrays = store.read([row.index])
    eye = {"R": "right eye", "L": "left eye, mirrored"}.get(row.laterality or "", "eye unknown")
    scanner, spacing = readable(row.scanner), store.preprocessing.target_spacing
    doubts = [*row.flags, *([] if row.confident else ["tissue band not found with confidence"])]
    return {
        "picture": prepared_picture(arrays.voxels[0], spacing, f"row {row.index}, {scanner}"),
        "row": row.index,
        "scanner": scanner,
        "eye": eye,
        "doubts": ", ".join(map(readable, doubts)),
    }
