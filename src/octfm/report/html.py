"""report.html: one self-contained page (no network) that says what was run and what came out, with a viewer of some volumes."""

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from octfm.errors import EvaluationError
from octfm.evaluation.scoring import HEADLINE
from octfm.io.location import Location, location
from octfm.report import figures, images, words
from octfm.report.overview import two_minutes
from octfm.report.page import MAX_BYTES, render, write_page
from octfm.report.shareable import NAME, shareable, shareable_command
from octfm.report.sources import Sources, gather
from octfm.report.viewer import Viewer, viewer
from octfm.run.bucket import local_run


def write_report(
    run: str | Location,
    out: str | Location,
    *,
    catalog: Location | None = None,
    store_path: Location | None = None,
    images: bool = True,
) -> Location:
    """Render the report of a run folder, or of a run in a bucket, and return its path.

    `catalog` (folder of octfm scan) and `store_path` add data health; without them, or before the probe, sentences say what is missing.
    Without `images` it is a page to share: no id, path, date or UID is on it (octfm.report.shareable).
    The page stays under 25 MB: pictures are coded coarser, then left out. Written whole or not at all.
    """
    run, out = location(run), location(out)
    if isinstance(out, Path) and out.is_dir():
        raise EvaluationError(
            f"{out}: expected the name of an HTML file, this is a folder; give for example {out / 'report.html'}"
        )
    sources = gather(
        local_run(run), location(catalog) if catalog else None, location(store_path) if store_path else None
    )
    command = ["octfm", "report", str(run)]
    command += ["--catalog", str(catalog)] * (catalog is not None) + ["--store", str(store_path)] * (
        store_path is not None
    )
    facts = _facts(sources if images else shareable(sources), shlex.join(command))
    if not images:
        facts |= {"commands": list(dict.fromkeys(map(shareable_command, facts["commands"])))}
    page = ""
    for per_scanner in (2, 1, 0) if images else (0,):
        pictures = _pictures(sources, per_scanner)
        plain = len(render("report.html.jinja", facts | pictures | {"viewer": None}).encode())
        page = render(
            "report.html.jinja", facts | pictures | {"viewer": _viewer(sources, MAX_BYTES - plain) if images else None}
        )
        if len(page.encode()) < MAX_BYTES:
            break
    else:
        raise EvaluationError(
            f"{out}: the report would take {len(page.encode()):,} bytes without pictures, expected under {MAX_BYTES:,}"
        )
    return write_page(page, out)


def summary_lines(run: Path, *, catalog: Location | None = None, store_path: Location | None = None) -> list[str]:
    """The five lines of the overview, for a terminal."""
    return [f"{label}: {sentence}" for label, sentence in words.five_lines(gather(Path(run), catalog, store_path))]


def _facts(sources: Sources, command: str) -> dict[str, Any]:
    tone, key = words.key_result(sources.probe)
    name = sources.run.resolve().name
    return {
        "title": name,
        "subtitle": words.subtitle(sources, name if name == NAME else f"Run folder {name}"),
        "tone": tone,
        "key": key,
        "minutes": two_minutes(sources),
        "five": words.five_lines(sources),
        "data": _data(sources),
        "charts": figures.training_charts(sources),
        "health": words.latest_health(sources.health),
        "probe": _probe(sources.probe),
        "record": _record(sources),
        "config": sources.config,
        "commands": _commands(sources, command),
    }


def _pictures(sources: Sources, per_scanner: int) -> dict[str, Any]:
    return {
        "examples": images.example_pictures(sources.scenes, per_scanner) if per_scanner else [],
        "pca": images.pca_pictures(sources.scenes, per_scanner) if per_scanner else [],
    }


def _viewer(sources: Sources, room: int) -> Viewer | None:
    """Of as many volumes as fit, those of other scanners first; None where not even one does."""
    order = sorted(
        range(len(sources.scenes)),
        key=lambda i: sum(s.scanner == sources.scenes[i].scanner for s in sources.scenes[:i]),
    )
    scenes = [sources.scenes[i] for i in order]
    while scenes:
        try:
            return viewer(scenes, room - 20_000)
        except EvaluationError:
            scenes = scenes[: len(scenes) // 2]
    return None


def _data(sources: Sources) -> dict[str, Any]:
    """Tables of data health; an empty one is shown as a sentence."""
    catalog, store = sources.catalog, sources.store
    accepted = catalog.acquisitions if catalog else ()
    prepared = store.rows if store else ()
    scanners = []
    for name in sorted({a.scanner for a in accepted} | {r.scanner for r in prepared}):
        own, rows = [a for a in accepted if a.scanner == name], [r for r in prepared if r.scanner == name]
        unsure = sum(not r.confident for r in rows)
        scanners.append(
            {
                "name": name,
                "accepted": len(own) if catalog else None,
                "participants": len({a.participant for a in own} | {r.participant for r in rows}),
                "prepared": len(rows) if store else None,
                "unsure": f"{unsure / len(rows):.0%} ({unsure})" if rows else None,
            }
        )
    members: dict[str, set[str]] = {}
    volumes: Counter[str] = Counter()
    for a in accepted or prepared:
        split = a.split or "none"
        members.setdefault(split, set()).add(a.participant)
        volumes[split] += 1
    order = [s for s in ("train", "val", "test", "none") if s in members]
    # The file's name is enough here: the page is passed around, and rejects.parquet has the whole path.
    first_of_code = (
        {r.code: r.sentence.replace(r.uri, Path(r.uri).name) for r in reversed(catalog.rejects)} if catalog else {}
    )
    summary = catalog.summary() if catalog else {}
    unprepared = Counter(f"{u.code}: {u.sentence.replace(u.uri, Path(u.uri).name)}" for u in sources.unprepared)
    return {
        "has_catalog": catalog is not None,
        "has_store": store is not None,
        "scanners": scanners,
        "splits": [{"name": s, "participants": len(members[s]), "volumes": volumes[s]} for s in order],
        "shared": sum(len(members[a] & members[b]) for i, a in enumerate(order) for b in order[i + 1 :]),
        "rejects": [
            {"code": code, "count": n, "sentence": first_of_code[code]}
            for code, n in summary.get("rejects", {}).items()
        ],
        "flags": summary.get("flags", {}),
        "unprepared": unprepared.most_common(20),
    }


def _probe(probe: dict[str, Any] | None) -> dict[str, Any] | None:
    if probe is None:
        return None
    encoders = list(dict.fromkeys(r["encoder"] for r in probe["results"]))
    rows = []
    for target, metric in dict.fromkeys((r["target"], r["metric"]) for r in probe["results"]):
        cells = {r["encoder"]: r for r in probe["results"] if (r["target"], r["metric"]) == (target, metric)}
        any_row = next(iter(cells.values()))
        rows.append(
            {
                **any_row,
                "metric": words.METRICS.get(metric, metric),
                "cells": [words.interval(cells[e]) if e in cells else "" for e in encoders],
                "notes": sorted({r["note"] for r in cells.values() if r["note"]}),
            }
        )

    def compared(name: str) -> list[dict[str, Any]]:
        return [
            {"p_holm": None, **c, "metric": words.METRICS.get(c["metric"], c["metric"]), "gap": words.interval(c)}
            for c in probe.get(name, [])
            if c["metric"] in HEADLINE
        ]

    forests = [
        figures.forest_plot(probe["results"], metric, words.METRICS[metric]) for metric in ("auroc", "kappa", "r2")
    ]
    return {
        "encoders": {e: words.encoder(e) for e in encoders},
        "rows": rows,
        "comparisons": compared("comparisons"),
        "by_labels": compared("label_efficiency_comparisons"),
        "forests": [f for f in forests if f is not None],
        "efficiency": figures.efficiency_plots(probe.get("label_efficiency", []), words.METRICS),
        "skipped": probe.get("skipped", []),
        "settings": probe.get("settings", {}),
        "meaning": probe.get("interval_meaning", ""),
        "budget": next((e["budget"]["sentence"] for e in probe.get("embeddings", []) if e.get("budget")), ""),
        "seen": max((r["seen_test_participants"] for r in probe["results"]), default=0),
    }


def _record(sources: Sources) -> list[tuple[str, str]]:
    """run.json and the store's Preprocessing as (name, value); keys and hashes of participants stay out of a page that is passed around."""
    facts: list[tuple[str, str]] = []
    for name, value in sources.record.items():
        if name not in ("format", "version", "participant_key", "command"):
            facts += _flat(name, value)
    if sources.store is not None:
        facts += _flat("preprocessing", sources.store.preprocessing.model_dump(mode="json"))
        facts.append(("preprocessing fingerprint", sources.store.fingerprint))
    return facts


def _flat(name: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(f"{name} {key}".replace("_", " "), inner)]
    if isinstance(value, int) and not isinstance(value, bool):
        return [(name.replace("_", " "), f"{value:,}")]
    return [
        (
            name.replace("_", " "),
            "unknown" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value),
        )
    ]


def _commands(sources: Sources, report: str) -> list[str]:
    listed = [sources.record["command"]] if sources.record.get("command") else []
    listed += (sources.probe or {}).get("commands", [])
    return list(dict.fromkeys([*listed, report]))
