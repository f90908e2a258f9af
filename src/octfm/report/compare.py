"""compare.html: several runs on one page, with what was set otherwise, their curves, their probes and paired differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from octfm.errors import EvaluationError
from octfm.evaluation.scoring import HEADLINE
from octfm.io.location import Location, location
from octfm.report import figures, words
from octfm.report.page import MAX_BYTES, render, write_page
from octfm.report.sources import Sources, gather, series

ABSENT = "–"


def write_compare(
    runs: Mapping[str, Path], out: str | Location, result: dict[str, Any] | None = None, reason: str = ""
) -> Location:
    """Render the comparison of run folders, by name, and return its path; under 25 MB, without any scan in it.

    `result` is what `octfm.evaluation.compare.probe_together` found, `reason` why there is none. Written whole or not at all.
    """
    out = location(out)
    if isinstance(out, Path) and out.is_dir():
        raise EvaluationError(
            f"{out}: expected the name of an HTML file, this is a folder; give for example {out / 'compare.html'}"
        )
    sources = {name: gather(run, None, None) for name, run in runs.items()}
    facts = {
        "names": list(sources),
        "lead": _lead(result, reason),
        "overview": _overview(sources),
        "settings": settings_that_differ(sources),
        "charts": figures.compared_charts(sources),
        "own": _own_probes(sources),
        "together": _together(result) if result is not None else None,
        "reason": reason,
    }
    page = render("compare.html.jinja", facts)
    if len(page.encode()) > MAX_BYTES:
        raise EvaluationError(
            f"{out}: the page would take {len(page.encode()):,} bytes, expected under {MAX_BYTES:,}; compare fewer runs"
        )
    return write_page(page, out)


def names_of(runs: Sequence[Path]) -> dict[str, Path]:
    """The shortest ends of their paths that tell them apart. Raises EvaluationError where one is given twice."""
    parts = [run.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise EvaluationError(f"expected different runs, got {', '.join(map(str, runs))}; name each once")
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, map(Path, runs), strict=True))
    raise AssertionError("different paths have different ends")


def labels_of(runs: Mapping[str, Path]) -> Path | None:
    """The label table that the runs were probed with, where it is one and still there."""
    probed = [s.probe for run in runs.values() if (s := gather(run, None, None)).probe is not None]
    found = {table for probe in probed if (table := probe.get("labels")) is not None}
    path = Path(found.pop()) if len(found) == 1 else None
    return path if path is not None and path.is_file() else None


def settings_that_differ(sources: Mapping[str, Sources]) -> list[tuple[str, list[str]]]:
    """(dotted key, a value per run) of config.yaml, where not all are equal."""
    flat = [_flat(yaml.safe_load(s.config) if s.config else {}) for s in sources.values()]
    keys = sorted({key for own in flat for key in own})
    rows = [(key, [str(own.get(key, ABSENT)) for own in flat]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _flat(values: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {prefix[:-1]: values} if prefix else {}
    return {key: value for name, inner in values.items() for key, value in _flat(inner, f"{prefix}{name}.").items()}


def _overview(sources: Mapping[str, Sources]) -> list[tuple[str, list[str]]]:
    """One row per question, one cell per run."""

    def letters(key: str) -> list[str]:
        """The same letter for the same value: hashes say nothing to a reader."""
        known: dict[Any, str] = {}
        values = [s.record.get(key) for s in sources.values()]
        return [ABSENT if v is None else known.setdefault(v, chr(ord("A") + len(known))) for v in values]

    def last(s: Sources, rows: str, name: str) -> str:
        values = series(getattr(s, rows), name)[1]
        return f"{values[-1]:.3g}" if len(values) else ABSENT

    def health(s: Sources) -> str:
        troubled = [
            f"{row['what']}: {row['verdict']}" for row in words.latest_health(s.health) if row["verdict"] != "ok"
        ]
        return ", ".join(troubled) or ("all fine" if s.health else ABSENT)

    def record(*keys: str) -> list[str]:
        values = []
        for s in sources.values():
            value: Any = s.record
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            values.append(ABSENT if value is None else f"{value:,}" if isinstance(value, int) else str(value))
        return values

    every = list(sources.values())
    return [
        ("Started", record("started")),
        ("Code, commit", [commit[:10] for commit in record("git", "commit")]),
        ("Parameters of the encoder", record("parameters", "encoder")),
        (
            "Steps logged",
            [
                f"{steps[-1] + 1:,.0f}" if len(steps := series(s.train, "masked_over_baseline")[0]) else ABSENT
                for s in every
            ],
        ),
        ("Training participants", record("store", "train_participants")),
        ("Training volumes (same letter: the same)", letters("data")),
        ("Preprocessing (same letter: the same)", letters("fingerprint")),
        ("Masked loss over baseline, last", [last(s, "train", "masked_over_baseline") for s in every]),
        ("The same, held out", [last(s, "validation", "masked_over_baseline") for s in every]),
        ("Effective rank, last", [last(s, "train", "effective_rank") for s in every]),
        (
            "Checkpoint to take",
            [words.checkpoint_advice([*s.online, *s.validation]).split(":")[0] or ABSENT for s in every],
        ),
        ("Health", [health(s) for s in every]),
    ]


def _own_probes(sources: Mapping[str, Sources]) -> list[dict[str, Any]]:
    """What each run's probe.json says of its pretrained encoder: measured apart, so nothing here is paired."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for name, s in sources.items():
        rows = s.probe["results"] if s.probe is not None else []
        for r in rows:
            if r["encoder"] == rows[0]["encoder"] and r["metric"] in HEADLINE:
                found.setdefault((r["target"], r["metric"]), {})[name] = r
    return [
        {
            "target": target,
            "metric": words.METRICS[metric],
            "leakage": next(iter(cells.values()))["leakage"],
            "cells": [words.interval(cells[n]) if n in cells else ABSENT for n in sources],
            "people": ", ".join(dict.fromkeys(str(r["n_test_participants"]) for r in cells.values())),
        }
        for (target, metric), cells in found.items()
    ]


def _together(result: dict[str, Any]) -> dict[str, Any]:
    names = list(dict.fromkeys(r["encoder"] for r in result["results"]))
    rows = []
    for target, metric in dict.fromkeys(
        (r["target"], r["metric"]) for r in result["results"] if r["metric"] in HEADLINE
    ):
        cells = {r["encoder"]: r for r in result["results"] if (r["target"], r["metric"]) == (target, metric)}
        any_row = next(iter(cells.values()))
        scores = [words.interval(cells[n]) if n in cells else ABSENT for n in names]
        rows.append(
            {
                **any_row,
                "metric": words.METRICS[metric],
                "cells": scores,
                "notes": sorted({r["note"] for r in cells.values() if r["note"]}),
            }
        )
    comparisons = [
        {**c, "metric": words.METRICS[c["metric"]], "gap": words.interval(c)}
        for c in result["comparisons"]
        if c["metric"] in HEADLINE
    ]
    forests = [
        figures.forest_plot(result["results"], metric, words.METRICS[metric]) for metric in ("auroc", "kappa", "r2")
    ]
    return {
        "names": names,
        "rows": rows,
        "comparisons": comparisons,
        "forests": [f for f in forests if f is not None],
        "resamples": result["settings"]["resamples"],
        "meaning": result.get("interval_meaning", ""),
        "skipped": result.get("skipped", []),
        "seen": max((r["seen_test_participants"] for r in result["results"]), default=0),
    }


def _lead(result: dict[str, Any] | None, reason: str) -> tuple[str, str]:
    """(tone, sentence): what the planned comparisons of the first run with the others say."""
    if result is None:
        return "none", f"Which run is better was not tested. {reason}"
    planned = [c for c in result["comparisons"] if c["metric"] in ("auroc", "r2") and not c.get("leakage")]
    if not planned:
        return "none", "Nothing could be compared; the probe section says why."
    sentences = []
    for other in dict.fromkeys(c["b"] for c in planned):
        own = [c for c in planned if c["b"] == other]
        said = {
            v: [c["target"].replace("_", " ") for c in own if c["verdict"] == v]
            for v in ("better", "worse", "inconclusive")
        }
        parts = [f"{verdict} for {', '.join(dict.fromkeys(targets))}" for verdict, targets in said.items() if targets]
        sentences.append(f"{own[0]['a']} against {other}: {'; '.join(parts)}.")
    verdicts = {c["verdict"] for c in planned}
    tone = "better" if verdicts == {"better"} else "worse" if verdicts == {"worse"} else "inconclusive"
    return tone, " ".join(sentences)
