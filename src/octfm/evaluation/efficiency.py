"""Label efficiency: frozen probes fitted on nested subsets of 1 % to 100 % of the training participants."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from octfm.catalog.labels import read_labels
from octfm.encoder.embeddings import Embeddings, align
from octfm.evaluation.arms import with_table
from octfm.evaluation.cases import (
    Cases,
    Design,
    Round,
    Seen,
    Skip,
    fifths,
    find_targets,
    make_cases,
    make_rounds,
    rarest_class,
)
from octfm.evaluation.probe import RESAMPLES, choose_design, describe, drawn, expect_counts, predict, rows_seen
from octfm.evaluation.readouts import Readout, choose_readout
from octfm.evaluation.scoring import PLANNED, compare_metrics, correct, difference_words, planned_metrics, score
from octfm.evaluation.statistics import enough_resamples
from octfm.io.location import Location
from octfm.io.progress import Progress

FRACTIONS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0)


def label_efficiency(
    embeddings: Sequence[str | Location | Embeddings],
    labels: Any = None,
    *,
    targets: Sequence[str] | None = None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
    readout: Readout = "linear",
    design: Literal["auto"] | Design = "auto",
    seen: Seen | None = (),
    allow_seen: bool = False,
    folds: int | None = None,
    fractions: Sequence[float] = FRACTIONS,
    seeds: int = 3,
    resamples: int | None = None,
    seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Probe with fractions of the training participants: (results, comparisons), as in probe.json.

    There is one result per target, encoder, fraction and planned metric, with `fraction` and `n_train_participants`
    added. At every fraction, the first encoder is compared with each of the others on the same subsets, participants
    and resamples; p values are corrected over all comparisons. Each seed draws its own order of participants, and
    larger fractions contain the smaller ones. The test participants stay the same; in k-fold, each fold draws its
    subset from its training participants. Intervals cover other participants, other draws of the subset and, for an
    arm with several draws, other draws of the network, which seeds use in turn. `resamples` None: as in `probe`.
    Raises EvaluationError as `probe` does.
    """
    expect_counts(seeds, resamples)
    choose_readout(readout)
    encoders = align(embeddings)
    first, table = encoders[0], read_labels(labels) if labels is not None else None
    encoders = [with_table(e, table) for e in encoders]
    seen_rows = rows_seen(first, seen)
    chosen, folds = choose_design(first, design, folds)
    rows: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    probed: list[tuple[Cases, list[Round]]] = []
    for target in find_targets(targets, first, table, orders):
        try:
            cases = make_cases(target, first, table)
            probed.append(make_rounds(cases, first, chosen, seen_rows, allow_seen, folds, seed))
        except Skip as reason:
            reason.refuse_if_named(target, targets)
    if resamples is None:
        metrics = sum(len(planned_metrics(cases)) for cases, _ in probed)
        resamples = enough_resamples(metrics * len(fractions) * (len(encoders) - 1), RESAMPLES)
    with Progress("label efficiency", len(probed) * len(fractions) * len(encoders), "fits") as progress:
        for cases, rounds in probed:
            # With equal seeds, subsets are the same for every encoder, which pairs the comparisons.
            for fraction in fractions:
                # The tested folds are the same for all seeds; the draw of training participants varies.
                smaller = [[subset(cases, r, fraction, seed + s) for r in rounds] for s in range(seeds)]
                people = [np.mean([len(np.unique(cases.participant[r.train])) for r in of_seed]) for of_seed in smaller]
                facts = describe(cases, rounds, chosen, seen_rows) | {
                    "readout": readout,
                    "fraction": fraction,
                    "n_train_participants": round(float(np.mean(people))),
                }
                scored = []
                for encoder in progress.over(encoders):
                    arms = drawn(encoder)
                    runs = [predict(cases, r, arms[s % len(arms)], readout, seed + s) for s, r in enumerate(smaller)]
                    scored.append(score(cases, encoder.name, runs, facts, resamples, seed, only=PLANNED))
                rows += [s.row for of_encoder in scored for s in of_encoder]
                of_fraction = {name: facts[name] for name in ("fraction", "n_train_participants")}
                for other in scored[1:]:
                    compared = compare_metrics(scored[0], other, leakage=cases.target.leakage)
                    comparisons += [of_fraction | c for c in compared]
    return rows, correct(comparisons)


def subset(cases: Cases, whole: Round, fraction: float, seed: int) -> Round:
    """The round with a fraction of its training participants: the same share of each class, at least two of each.

    A participant with eyes of two classes counts as the rarer one, as in folds. For regression, fifths of the labels
    take the place of classes. With the same seed, a larger fraction contains every participant of a smaller one.
    """
    participant, label = cases.participant[whole.train], cases.label[whole.train]
    names, member = np.unique(participant, return_inverse=True)
    stratum = fifths(member, label) if cases.classes is None else rarest_class(member, label)
    kept = np.zeros(len(names), bool)
    # One order for all fractions: a larger subset takes more from the front of each class.
    order = np.random.default_rng((seed, 2)).permutation(len(names))
    for value in np.unique(stratum):
        own = order[stratum[order] == value]
        kept[own[: max(2, int(np.ceil(fraction * len(own))))]] = True
    return Round(whole.train[kept[member]], whole.test)


def curve_lines(rows: Sequence[dict[str, Any]], comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for a terminal: per target, metric and encoder the estimate at every fraction, then the comparisons."""
    lines = []
    for key in dict.fromkeys((r["target"], r["metric"], r["encoder"]) for r in rows):
        own = [r for r in rows if (r["target"], r["metric"], r["encoder"]) == key]
        points = ", ".join(
            f"{r['fraction']:.0%} {'–' if r['estimate'] is None else format(r['estimate'], '.3f')}" for r in own
        )
        lines.append(f"{key[0]:<12} {key[1]:<18} {key[2]:<12} {points}")
    for c in comparisons:
        if c["low"] is not None:
            people = f"{c['n_train_participants']} labelled participants"
            lines.append(f"{c['target']:<12} {c['metric']:<18} {people}: {difference_words(c)}")
    return lines
