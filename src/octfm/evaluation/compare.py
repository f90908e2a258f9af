"""Probe several pretraining runs on identical participants, folds and resamples, so that differences are paired."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from octfm.encoder.embeddings import read_embeddings
from octfm.encoder.encoder import seen_by
from octfm.errors import EvaluationError
from octfm.evaluation.probe import probe
from octfm.evaluation.results import read_result


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
                f"{run}: no embeddings; make them with `octfm embed {run} --store prepared`, "
                "the same store for all runs",
                public=f"{name} has no embeddings: octfm embed makes them, from the same store for all runs.",
            )
        encoders.append(replace(read_embeddings(path), name=name))
    seen = [seen_by(run) for run in runs.values()]
    settings = _settings(runs)
    options: dict[str, Any] = {"targets": targets, "allow_seen": allow_seen, "resamples": resamples, **settings}
    options["orders"] = {**settings.get("orders", {}), **(orders or {})}
    return probe(encoders, labels, seen=lambda p: any(is_seen(p) for is_seen in seen), **options)


def _settings(runs: Mapping[str, Path]) -> dict[str, Any]:
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
