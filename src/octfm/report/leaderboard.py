"""leaderboard.html: several encoders on identical data and splits."""

from pathlib import Path
from typing import Any

from octfm.display import interval
from octfm.evaluation.scoring import HEADLINE
from octfm.report import figures, words
from octfm.report.page import render, write_page
from octfm.report.shareable import shareable_command

KINDS = {
    "frozen": "frozen encoder, linear probe",
    "head": "frozen encoder, head trained by gradient",
    "low rank": "low-rank updates of the encoder",
    "fine-tuned": "encoder fine-tuned",
    "from scratch": "trained from scratch",
    "baseline": "baseline, linear probe",
}


def write_leaderboard(result: dict[str, Any], order: list[str], out: str | Path) -> Path:
    """Render what `octfm.trust.leaderboard` returned, with entries in the given order."""
    rows = {(r["encoder"], r["metric"]): r for r in result["results"]}
    metrics = list(dict.fromkeys(r["metric"] for r in result["results"]))
    in_order = sorted(result["results"], key=lambda r: order.index(r["encoder"]))
    first = result["results"][0]
    facts = {
        "target": result["target"],
        "reference": result["reference"],
        "participants": first["n_test_participants"],
        "counts": first["test_participants_per_class"] or {},
        "of_two": words.of_two(first),
        "seen": words.seen_sentence(result["results"]),
        "metrics": [words.METRICS[m] for m in metrics],
        "rows": [
            {
                "name": name,
                "kind": KINDS[rows[name, metrics[0]]["what"]],
                "seeds": rows[name, metrics[0]]["seeds"],
                "cells": [interval(rows[name, m]) if (name, m) in rows else "" for m in metrics],
            }
            for name in order
        ],
        "comparisons": words.comparison_rows(result["comparisons"]),
        "notes": sorted({r["note"] for r in result["results"] if r["note"]}),
        "forests": figures.forest_plots(in_order, [m for m in metrics if m in HEADLINE]),
        "resamples": result["settings"]["resamples"],
        # In full they are only in leaderboard.json, because folders may be named after people.
        "commands": [shareable_command(command) for command in result["commands"]],
    }
    return write_page(render("leaderboard.html.jinja", facts), Path(out))
