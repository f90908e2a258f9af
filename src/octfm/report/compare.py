"""compare.html: several runs on one page, with the settings that differ, curves, probes and paired differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octfm.config import flat
from octfm.display import readable
from octfm.errors import Echo, EvaluationError
from octfm.evaluation.scoring import HEADLINE, fails_holm
from octfm.io.location import Location
from octfm.report import figures, words
from octfm.report.page import MAX_BYTES, html_file, render, write_page
from octfm.report.shareable import shareable_setting
from octfm.report.sources import Sources, gather, lookup, series
from octfm.run.checkpoint_files import named_in

ABSENT = "–"


def write_compare(
    runs: Mapping[str, Path], out: str | Location, result: dict[str, Any] | None = None, reason: str = ""
) -> Location:
    """Render the comparison of run folders, by name, and return its location. `result`: what
    `octfm.evaluation.probe.probe_together` returned; without it, `reason` says why. The page shows no scans. Raises
    EvaluationError if it would be 25 MB or larger, or if a folder is no run of octfm pretrain."""
    out = html_file(out, "compare.html")
    sources = {name: gather(run) for name, run in runs.items()}
    facts = {
        "names": list(sources),
        "lead": _lead(result, reason),
        "overview": [*_overview(sources), *_probed(sources, result)],
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
    """Name runs by the shortest ends of their paths that are all different. Raises EvaluationError if a run is given
    twice."""
    parts = [run.resolve().parts for run in runs]
    if len(set(parts)) < len(parts):
        raise EvaluationError(f"expected different runs, got {', '.join(map(str, runs))}; name each once")
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return dict(zip(names, map(Path, runs), strict=True))
    raise AssertionError("different paths have different ends")


def labels_of(runs: Mapping[str, Path], echo: Echo) -> Path | None:
    """The label table that the runs were probed with; None, with a line to `echo`, if they do not share one or it is
    not a file."""
    probed = [s.probe for run in runs.values() if (s := gather(run)).probe is not None]
    found = {table for probe in probed if (table := probe.get("labels")) is not None}
    if len(found) == 1 and (path := Path(next(iter(found)))).is_file():
        return path
    if found:
        what = "which is no file here" if len(found) == 1 else "not one table"
        echo(
            f"the runs were probed with the labels of {' and '.join(sorted(found))}, {what}: compared by the labels "
            "that came with the scans; --labels TABLE names others"
        )
    return None


def settings_that_differ(sources: Mapping[str, Sources]) -> list[tuple[str, list[str]]]:
    """(dotted key, a value per run) of settings that are not all equal; text that a user wrote is withheld."""
    settings = [flat(s.settings) for s in sources.values()]
    keys = sorted({key for own in settings for key in own})
    differ = [key for key in keys if len({str(own.get(key, ABSENT)) for own in settings}) > 1]
    return [(key, [str(shareable_setting(own[key])) if key in own else ABSENT for own in settings]) for key in differ]


def _overview(sources: Mapping[str, Sources]) -> list[tuple[str, list[str]]]:
    """One row per question, one cell per run."""

    def letters(key: str) -> list[str]:
        """Letters in place of hashes; equal hashes have equal letters."""
        known: dict[Any, str] = {}
        values = [s.record.get(key) for s in sources.values()]
        return [ABSENT if v is None else known.setdefault(v, chr(ord("A") + len(known))) for v in values]

    def last(s: Sources, rows: str, name: str) -> str:
        values = series(getattr(s, rows), name)[1]
        return f"{values[-1]:.3g}" if len(values) else ABSENT

    def health(s: Sources) -> str:
        latest = words.latest_health(s.health)
        troubled = [f"{row['what']}: {row['verdict']}" for row in latest if row["verdict"] != "ok"]
        return ", ".join(troubled) or ("all fine" if s.health else ABSENT)

    def record(*keys: str) -> list[str]:
        values = [lookup(s.record, *keys) for s in sources.values()]
        return [ABSENT if v is None else f"{v:,}" if isinstance(v, int) else str(v) for v in values]

    def taken(sentence: str) -> str:
        return "none: none is better than chance" if words.NO_BETTER in sentence else sentence.split(":")[0] or ABSENT

    def logged(s: Sources) -> str:
        steps = series(s.train, "masked_over_baseline")[0]
        return f"{steps[-1]:,.0f}" if len(steps) else ABSENT

    every = list(sources.values())
    advice = [words.checkpoint_advice([*s.online, *s.validation]) for s in every]
    return [
        ("Started", record("started")),
        ("Code, commit", [commit[:10] for commit in record("git", "commit")]),
        ("Parameters of the encoder", record("parameters", "encoder")),
        ("Steps logged", [logged(s) for s in every]),
        ("Training participants", record("store", "train_participants")),
        ("Training volumes (same letter: the same)", letters("data")),
        ("Preprocessing (same letter: the same)", letters("fingerprint")),
        ("Masked loss over baseline, last", [last(s, "train", "masked_over_baseline") for s in every]),
        ("The same, held out", [last(s, "validation", "masked_over_baseline") for s in every]),
        ("Effective rank, last", [last(s, "train", "effective_rank") for s in every]),
        ("Checkpoint to take", [taken(sentence) for sentence in advice]),
        ("Health", [health(s) for s in every]),
    ]


def _probed(sources: Mapping[str, Sources], result: dict[str, Any] | None) -> list[tuple[str, list[str]]]:
    """The checkpoints whose vectors were probed: a run may have gone on since."""

    def checkpoint_in(facts: Mapping[str, Any]) -> str:
        return named_in(str(facts.get("encoder", ""))) or ABSENT

    rows = {}
    if result is not None:
        rows["Checkpoint probed together"] = [checkpoint_in(facts) for facts in result.get("embeddings", ())]
    own = [s.probe.get("embeddings") if s.probe is not None else None for s in sources.values()]
    rows["Checkpoint probed apart"] = [checkpoint_in(embeddings[0]) if embeddings else ABSENT for embeddings in own]
    return [(label, cells) for label, cells in rows.items() if {*cells} - {ABSENT}]


def _own_probes(sources: Mapping[str, Sources]) -> list[dict[str, Any]]:
    """Results of each run's pretrained encoder from its own probe.json; measured separately, so nothing is paired."""
    rows = []
    for name, s in sources.items():
        own = s.probe["results"] if s.probe is not None else []
        rows += [r | {"encoder": name} for r in own if r["encoder"] == own[0]["encoder"] and r["metric"] in HEADLINE]
    return words.score_rows(rows, sources, ABSENT)


def _together(result: dict[str, Any]) -> dict[str, Any]:
    names = list(dict.fromkeys(r["encoder"] for r in result["results"]))
    headline = [r for r in result["results"] if r["metric"] in HEADLINE]
    return {
        "names": names,
        "rows": words.score_rows(headline, names, ABSENT),
        "comparisons": words.comparison_rows(result["comparisons"]),
        "forests": figures.forest_plots(result["results"]),
        "resamples": result["settings"]["resamples"],
        "meaning": result.get("interval_meaning", ""),
        "skipped": result.get("skipped", []),
        "seen": words.seen_sentence(result["results"]),
    }


def _lead(result: dict[str, Any] | None, reason: str) -> tuple[str, str]:
    """(tone, sentence) from the planned comparisons of the first run with the others."""
    if result is None:
        return "none", f"Which run is better was not tested. {reason}"
    planned = words.planned(result)
    if not planned:
        return "none", "Nothing could be compared; the probe section says why."
    sentences, verdicts = [], set()
    for other in dict.fromkeys(c["b"] for c in planned):
        # One metric per target, the last one: for grades that is agreement (kappa).
        own = {c["target"]: c for c in planned if c["b"] == other}
        claims: dict[str, list[str]] = {}
        for target, c in own.items():
            claim = f"{c['verdict']}, but not after Holm," if fails_holm(c) else c["verdict"]
            claims.setdefault(claim, []).append(readable(target))
        parts = [f"{claim} for {', '.join(claims[claim])}" for claim in sorted(claims)]
        sentences.append(f"{planned[0]['a']} against {other}: {'; '.join(parts)}.")
        verdicts |= set(claims)
    tone = "better" if verdicts == {"better"} else "worse" if verdicts == {"worse"} else "inconclusive"
    return tone, " ".join(sentences)
