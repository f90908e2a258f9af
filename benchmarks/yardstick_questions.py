"""Questions with headroom: single and mild diseases, a scanner and a disease that no label came from.

"Mild" is a severity below .5, as phantom cohorts record it; results on phantoms are results in the generator.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from octfm.catalog.labels import LabelTable, as_number
from octfm.encoder.embeddings import Embeddings
from octfm.evaluation.cases import (
    HEALTHY,
    Cases,
    Design,
    Round,
    Skip,
    column_values,
    find_targets,
    make_cases,
    make_rounds,
)
from octfm.evaluation.probe import predict_draws
from octfm.evaluation.readouts import Readout
from octfm.evaluation.scoring import Predictions, metrics_of, to_units
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, bootstrap, mean_of, over_seeds

MILD = 0.5
DIAGNOSIS, SEVERITY = "diagnosis", "severity"
SEEN_SCANNER, UNSEEN_SCANNER = "scanner seen", "scanner never seen"
"""Disease, averaged over scanners, by probes that were trained on all of them, and on all but the tested one."""
UNSEEN_DISEASE = "disease never seen"
"""Averaged over diseases: each is told from healthy participants by a probe that was trained without it."""
METRIC = {"regression": "r2"}
"""Metric of a question by the kind of its cases; AUROC otherwise."""


def with_headline_columns(table: LabelTable) -> LabelTable:
    """The table with a column for each disease against healthy eyes, for its mild cases (`mild_drusen`), and for mild
    cases of any disease (`mild_disease`); eyes of other diseases, and more severe ones, are left blank.

    Without a column of diagnoses it stays as it is; without severities no eye counts as mild.
    """
    if DIAGNOSIS not in table.columns:
        return table
    found = {row[DIAGNOSIS].strip() for row in table.rows}
    diseases = sorted(name for name in found if name and name.lower() not in HEALTHY)
    rows = []
    for row in table.rows:
        diagnosis, severity = row[DIAGNOSIS].strip(), as_number(row.get(SEVERITY))
        healthy = diagnosis.lower() in HEALTHY
        is_mild = severity is not None and severity < MILD
        own = {"mild_disease": "healthy" if healthy else "mild disease" if diagnosis and is_mild else ""}
        for name in diseases:
            label = "healthy" if healthy else name if diagnosis == name else ""
            own |= {name: label, f"mild_{name}": label if healthy or is_mild else ""}
        rows.append({**row, **own})
    added = [*diseases, "mild_disease", *(f"mild_{name}" for name in diseases)]
    return replace(table, columns=(*table.columns, *(c for c in added if c not in table.columns)), rows=tuple(rows))


@dataclass(frozen=True, eq=False)
class Question:
    """One number per arm: a metric, averaged over the parts, each with its own training and test rows."""

    name: str
    cases: Cases
    parts: tuple[tuple[str, tuple[Round, ...]], ...]
    """Name and rounds: one part, or one for every scanner or disease that is left out."""

    @property
    def metric(self) -> str:
        return METRIC.get(self.cases.kind, "auroc")


def questions(
    data: Embeddings, table: LabelTable, seen: np.ndarray, design: Design, folds: int, seed: int = 0
) -> tuple[list[Question], list[str]]:
    """All questions that these labels allow, and a sentence for each that they do not.

    seen: bool [N], rows of participants whom an encoder was pretrained on; they are never tested.
    """
    table = with_headline_columns(table)
    known = ["disease", "diagnosis", "cst_um", *(c for c in table.columns if c.startswith("mild_"))]
    names = [name for name in known if name in ("disease", DIAGNOSIS) or name in table.columns]
    names += [name.removeprefix("mild_") for name in names if name.startswith("mild_") and name != "mild_disease"]
    found, without = [], []
    for target in find_targets([n for n in names if n != "disease" or DIAGNOSIS in table.columns], data, table):
        try:
            cases = make_cases(target, data, table)
            cases, rounds = make_rounds(cases, data, design, seen, False, folds, seed)
        except Skip as reason:
            without.append(f"{target.name}: {reason}")
            continue
        found.append(Question(target.name, cases, (("", tuple(rounds)),)))
        if target.name == "disease":
            found += [_by_scanner(cases, rounds, data, is_seen) for is_seen in (True, False)]
            found.append(_unseen_disease(cases, rounds, data, table))
    return [question for question in found if question.parts], without


def _by_scanner(cases: Cases, rounds: Sequence[Round], data: Embeddings, seen: bool) -> Question:
    """Each scanner in turn gives all test rows and, unless it is `seen`, no training row."""
    scanner = data.scanner[cases.rows]
    groups = [(s, (scanner != s) | seen, scanner == s) for s in sorted({*scanner.tolist()})]
    return _left_out(SEEN_SCANNER if seen else UNSEEN_SCANNER, cases, rounds, groups)


def _unseen_disease(cases: Cases, rounds: Sequence[Round], data: Embeddings, table: LabelTable) -> Question:
    """Each disease in turn gives no training row; it is told from healthy participants by what the others taught."""
    values = column_values(DIAGNOSIS, data, table)
    ill: dict[str, str] = {}
    for row in cases.rows:
        if (value := (values[row] or "").strip()).lower() not in HEALTHY:
            ill[str(data.participant[row])] = value
    of_row = np.array([ill.get(str(p), "") for p in cases.participant])
    diseases = sorted({*of_row.tolist()} - {""})
    if len(diseases) < 2:
        return Question(UNSEEN_DISEASE, cases, ())
    return _left_out(
        UNSEEN_DISEASE, cases, rounds, [(d, of_row != d, (of_row == d) | (of_row == "")) for d in diseases]
    )


def _left_out(
    name: str, cases: Cases, rounds: Sequence[Round], groups: Sequence[tuple[str, np.ndarray, np.ndarray]]
) -> Question:
    """A part for each (group, bool [n] rows to train on, bool [n] rows to test) with enough participants to score."""
    parts = []
    for group, trained, tested in groups:
        own = tuple(Round(r.train[trained[r.train]], r.test[tested[r.test]]) for r in rounds)
        own = tuple(r for r in own if len(r.test) and len(np.unique(cases.label[r.train])) > 1)
        rows = np.concatenate([r.test for r in own]) if own else np.zeros(0, int)
        people = [len(np.unique(cases.participant[rows][cases.label[rows] == k])) for k in (0, 1)]
        if min(people) >= MIN_PARTICIPANTS:
            parts.append((group, own))
    return Question(name, cases, tuple(parts))


def answer(question: Question, arm: Embeddings, readout: Readout, resamples: int, seed: int = 0) -> list[Bootstrap]:
    """The question's metric for every draw of an arm, on resamples of participants that all arms share."""
    runs = [predict_draws(question.cases, rounds, arm, readout, seed) for _, rounds in question.parts]
    people = np.unique(np.concatenate([_people(question.cases, of_part[0]) for of_part in runs]))
    draws = []
    for draw in range(len(runs[0])):
        parts = []
        for of_part in runs:
            units = to_units(question.cases, of_part[draw])
            metric = next(m for name, m, _ in metrics_of(question.cases, units) if name == question.metric)
            parts.append(bootstrap(metric, units.participant, resamples=resamples, seed=seed, among=people))
        draws.append(mean_of(parts) if len(parts) > 1 else parts[0])
    return draws


def pooled_over(draws: Sequence[Bootstrap], seed: int = 0) -> Bootstrap:
    """Mean over random draws, or over cohorts, with those resampled as well; their participants may differ."""
    bare = [Bootstrap(b.estimate, b.resampled, np.zeros(0)) for b in draws]
    return over_seeds(bare, seed=seed)


def recombined(cohorts: Sequence[Bootstrap], times: int = 10, seed: int = 0) -> list[Bootstrap]:
    """Several cohorts with `times` as many resamples: they share no participant, so that any resample of one goes with
    any of another. Else p could not fall below 2 / (resamples + 1), and Holm over a long table would reject nothing."""
    if len(cohorts) < 2:
        return list(cohorts)
    rng = np.random.default_rng((seed, 2))
    return [replace(b, resampled=np.concatenate([rng.permutation(b.resampled) for _ in range(times)])) for b in cohorts]


def _people(cases: Cases, run: Predictions) -> np.ndarray:
    return np.unique(cases.participant[run.rows])
