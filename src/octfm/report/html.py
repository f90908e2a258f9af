"""report.html: one self-contained page about a run and its results, with a viewer of some volumes."""

import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from octfm.catalog.catalog import Catalog
from octfm.config import flat
from octfm.display import number
from octfm.errors import EvaluationError
from octfm.io.location import Location, location
from octfm.report import figures, words
from octfm.report.images import example_pictures, tissue_picture
from octfm.report.overview import NOT_FOR, about, data_flow, next_step
from octfm.report.page import MAX_BYTES, html_file, render, write_page
from octfm.report.participants import by_split, characteristics
from octfm.report.shareable import NAME, shareable, shareable_command
from octfm.report.sources import Sources, gather
from octfm.report.viewer import Viewer, viewer
from octfm.run.bucket import local_run

COUNTED = ("Participants", "Volumes")
"""Rows of `characteristics` that the page shows elsewhere."""


def write_report(
    run: str | Location,
    out: str | Location,
    *,
    catalog: Location | None = None,
    store_path: Location | None = None,
    images: bool = True,
) -> Location:
    """Render the report of a run folder, or of a run in a bucket, and return its location.

    `catalog` (folder of octfm scan) and `store_path` add data health; without them, or before a probe, sentences say
    what is missing. Without `images` the page is meant for sharing: it has no id, path, date or UID
    (octfm.report.shareable). The page stays under 25 MB: volumes in the viewer get coarser and fewer, then example
    pictures are left out. Raises EvaluationError if `run` is no run folder of octfm pretrain, or the page is still too
    large.
    """
    run, out = location(run), html_file(out, "report.html")
    sources = gather(local_run(run), catalog, store_path)
    command = ["octfm", "report", str(run)]
    for option, value in (("--catalog", catalog), ("--store", store_path)):
        command += [option, str(value)] if value is not None else []
    shown = sources if images else shareable(sources)
    facts = _facts(shown, shlex.join(command))
    why, commands = next_step(shown, str(run), str(store_path) if store_path is not None else None)
    if not images:
        facts |= {"commands": list(dict.fromkeys(map(shareable_command, facts["commands"])))}
        commands = tuple(map(shareable_command, commands))
    facts |= {"next": (why, commands)}
    page = ""
    for pictures in (True, False) if images else (False,):
        facts |= _pictures(sources, pictures) | {"viewer": None}
        page = render("report.html.jinja", facts)
        if images:
            # The viewer may use what the rest of the page leaves of the limit.
            page = render("report.html.jinja", facts | {"viewer": _viewer(sources, MAX_BYTES - len(page.encode()))})
        if len(page.encode()) < MAX_BYTES:
            return write_page(page, out)
    raise EvaluationError(
        f"{out}: the report would take {len(page.encode()):,} bytes without pictures, expected under {MAX_BYTES:,}"
    )


def summary_lines(run: Path) -> list[str]:
    """Result, training and health of a run for a terminal."""
    sources = gather(run)
    lines = {
        "Result": f"{words.key_result(sources.probe)[1]} {sources.outdated}".rstrip(),
        "Training": words.training_line(sources),
        "Health": words.health_line(sources),
        "Checkpoint": words.checkpoint_advice([*sources.online, *sources.validation]),
    }
    return [f"{label}: {sentence}" for label, sentence in lines.items() if sentence]


def _facts(sources: Sources, command: str) -> dict[str, Any]:
    tone, key = words.verdict(sources.probe)
    name = sources.run.resolve().name
    return {
        "title": name,
        "subtitle": words.subtitle(sources, name if name == NAME else f"Run folder {name}"),
        "tone": tone,
        "key": key,
        "forest": figures.overview_forest(sources.probe["results"]) if sources.probe is not None else None,
        "flow": data_flow(sources),
        "not_for": NOT_FOR,
        "about": about(sources),
        "data": _data(sources),
        "charts": figures.training_charts(sources),
        "training": words.training_line(sources),
        "advice": words.checkpoint_advice([*sources.online, *sources.validation]),
        "health": words.latest_health(sources.health),
        "health_line": words.health_line(sources),
        "probe": _probe(sources.probe),
        "outdated": sources.outdated,
        "record": _record(sources),
        "config": sources.config,
        "commands": _commands(sources, command),
    }


def _pictures(sources: Sources, examples: bool) -> dict[str, Any]:
    first = sources.scenes[0] if sources.scenes else None
    return {
        "scan": (first, tissue_picture(first)) if examples and first is not None else None,
        "examples": example_pictures(sources.scenes) if examples else [],
    }


def _viewer(sources: Sources, room: int) -> Viewer | None:
    """A viewer of as many volumes as fit into `room` bytes; None if not even one does."""
    # The first volume of each scanner, then the second of each, and so on.
    met: Counter[str] = Counter()
    ranked = []
    for scene in sources.scenes:
        ranked.append((met[scene.scanner], scene))
        met[scene.scanner] += 1
    scenes = [scene for _, scene in sorted(ranked, key=lambda pair: pair[0])]
    # Halve the number of volumes until they fit.
    while scenes:
        try:
            return viewer(scenes, room - 20_000)
        except EvaluationError:
            scenes = scenes[: len(scenes) // 2]
    return None


def _data(sources: Sources) -> dict[str, Any]:
    """Tables of data health; the page shows an empty table as a sentence."""
    catalog, store = sources.catalog, sources.store
    accepted = catalog.acquisitions if catalog is not None else ()
    prepared = store.rows if store else ()
    scanners = [_scanner_row(sources, name) for name in sorted({each.scanner for each in (*accepted, *prepared)})]
    members = {split: {a.participant for a in own} for split, own in by_split(sources).items()}
    order = list(members)
    summary = catalog.summary() if catalog is not None else {}
    first_of_code = _first_sentences(catalog) if catalog is not None else {}
    unprepared = Counter(f"{u.code}: {u.sentence.replace(u.uri, Path(u.uri).name)}" for u in sources.unprepared)
    rejected = (
        "" if catalog is None else f"{len(catalog.rejects) or 'no'} file{'s' * (len(catalog.rejects) != 1)} rejected"
    )
    return {
        "state": rejected,
        "has_catalog": catalog is not None,
        "has_store": store is not None,
        "scanners": scanners,
        "splits": order,
        "people": [row for row in characteristics(sources) if not row[0].startswith(COUNTED)],
        "shared": sum(len(members[a] & members[b]) for i, a in enumerate(order) for b in order[i + 1 :]),
        "rejects": [
            {"code": code, "count": n, "sentence": first_of_code[code]}
            for code, n in summary.get("rejects", {}).items()
        ],
        "flags": summary.get("flags", {}),
        "unprepared": unprepared.most_common(20),
    }


def _scanner_row(sources: Sources, name: str) -> dict[str, Any]:
    """Counts of one scanner, None where catalog or store are missing."""
    catalog, store = sources.catalog, sources.store
    accepted = [a for a in catalog.acquisitions if a.scanner == name] if catalog is not None else []
    prepared = [row for row in store.rows if row.scanner == name] if store else []
    unsure = sum(not row.confident for row in prepared)
    return {
        "name": name,
        "accepted": len(accepted) if catalog is not None else None,
        "participants": len({each.participant for each in (*accepted, *prepared)}),
        "prepared": len(prepared) if store else None,
        "unsure": f"{unsure / len(prepared):.0%} ({unsure})" if prepared else None,
    }


def _first_sentences(catalog: Catalog) -> dict[str, str]:
    """Code → the sentence of its first reject, with file names instead of paths (rejects.parquet has the paths)."""
    sentences = {reject.code: reject.sentence for reject in reversed(catalog.rejects)}
    # A sentence may also name the file of which the rejected one is a copy.
    for uri in [each.uri for each in (*catalog.acquisitions, *catalog.rejects)]:
        for code, text in sentences.items():
            if uri in text:
                sentences[code] = text.replace(uri, Path(uri).name)
    return sentences


def _probe(probe: dict[str, Any] | None) -> dict[str, Any] | None:
    if probe is None:
        return None
    encoders = {r["encoder"]: words.encoder(r["encoder"]) for r in probe["results"]}
    targets = list(dict.fromkeys(r["target"] for r in probe["results"]))
    return {
        "state": f"{number(len(targets), 'target')}, {number(len(encoders), 'encoder')}, every number",
        "encoders": encoders,
        "rows": words.score_rows(probe["results"], encoders),
        "comparisons": words.comparison_rows(probe["comparisons"]),
        "by_labels": words.comparison_rows(probe.get("label_efficiency_comparisons", [])),
        "fewer": words.with_fewer_labels(probe),
        "efficiency": figures.efficiency_plots(probe.get("label_efficiency", [])),
        "skipped": probe.get("skipped", []),
        "settings": probe.get("settings", {}),
        "meaning": probe.get("interval_meaning", ""),
        "seen": words.seen_sentence(probe["results"]),
    }


def _record(sources: Sources) -> list[tuple[str, str]]:
    """(name, value) from run.json and the store's Preprocessing, without the key of the participants' hashes."""
    # With the key, anyone could test whether a participant is in the data. The command is shown elsewhere.
    hidden = ("format", "version", "participant_key", "command")
    values: dict[str, Any] = {name: value for name, value in sources.record.items() if name not in hidden}
    if sources.store is not None:
        preprocessing = sources.store.preprocessing.model_dump(mode="json")
        values |= {"preprocessing": preprocessing, "preprocessing fingerprint": sources.store.fingerprint}
    return [(re.sub("[._]", " ", name), _cell(value)) for name, value in flat(values).items()]


def _cell(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return "unknown" if value is None else str(value)


def _commands(sources: Sources, report: str) -> list[str]:
    listed = [sources.record["command"]] if sources.record.get("command") else []
    listed += (sources.probe or {}).get("commands", [])
    return list(dict.fromkeys([*listed, report]))
