"""What a scanner costs that the probe was not fitted on, and what several domains of pretraining bring over one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.errors import EvaluationError
from octfm.evaluation.cases import Cases, Round
from octfm.evaluation.efficiency import subset
from octfm.evaluation.probe import predict
from octfm.evaluation.scoring import Predictions
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, bootstrap_together, mean_of, over_seeds
from octfm.trust.study import Part, Study, Task, claimed, difference, estimate, part, part_metric

DRAWS = 3
"""Subsets of participants drawn where the larger training set is cut to the size of the smaller."""
REGIMES = {
    "within": "fitted on this scanner only",
    "left_out": "fitted on the other scanners, as many participants",
    "left_out_all": "fitted on the other scanners, all participants",
    "every": "fitted on all scanners",
}
"""Training sets of the probe, tested on the same participants of one scanner. `left_out` against `within` is the drop."""


def leave_one_scanner_out(study: Study) -> dict[str, Any]:
    """For every target, encoder and scanner: four probes, tested on the same participants, none of whom trained any of them.

    The drop compares equal numbers of training participants: other scanners together have more of them, which would hide it.
    """
    results: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    skipped: list[dict[str, str]] = []
    for task in study.tasks:
        sets = {}
        for scanner in study.scanners:
            try:
                sets[scanner] = training_sets(task, study, scanner)
            except EvaluationError as reason:
                skipped.append({"target": task.name, "scanner": scanner, "sentence": str(reason)})
        if len(sets) < 2:
            continue
        for encoder in study.encoders:
            own = {
                s: {regime: _runs(study, task, encoder, runs) for regime, runs in by.items()} for s, by in sets.items()
            }
            rows, compared = _judged(study, task, encoder, own)
            for row in rows:
                by = sets.get(row["scanner"])
                trained = (
                    [
                        len(np.unique(task.cases.participant[np.concatenate([r.train for r in run])]))
                        for run in by[row["regime"]]
                    ]
                    if by
                    else []
                )
                results.append({**row, "n_train_participants": round(float(np.mean(trained))) if trained else None})
            comparisons += compared
    return {
        "regimes": REGIMES,
        "results": results,
        "comparisons": claimed(comparisons),
        "skipped": skipped,
        "sentence": None if results else "Fewer than two scanners have participants enough to learn from and to test.",
    }


def training_sets(task: Task, study: Study, scanner: str) -> dict[str, list[tuple[Round, ...]]]:
    """By regime, one set of rounds for each draw, all testing the same rows. EvaluationError where too few remain, or where a tested
    participant would be trained on or was pretrained on."""
    cases = task.cases
    on = study.data.scanner[cases.rows] == scanner
    whole = [Round(r.train, r.test[on[r.test]]) for r in task.rounds]
    whole = [r for r in whole if len(r.test)]
    if not whole:
        raise EvaluationError("nobody is tested on it")
    within = [Round(r.train[on[r.train]], r.test) for r in whole]
    others = [Round(r.train[~on[r.train]], r.test) for r in whole]
    for r, where in [*((r, "this scanner") for r in within), *((r, "the other scanners") for r in others)]:
        _enough(cases, r, where)
        _apart(cases, r, study)
    sizes = [
        (len(np.unique(cases.participant[a.train])), len(np.unique(cases.participant[b.train])))
        for a, b in zip(within, others, strict=True)
    ]

    def cut(rounds: list[Round], mine: int) -> list[tuple[Round, ...]]:
        """Cut to the smaller of the two training sets, several times over where that leaves a choice."""
        shares = [min(pair) / pair[mine] for pair in sizes]
        draws = DRAWS if min(shares) < 1 else 1
        return [
            tuple(
                r if share == 1 else subset(cases, r, share, study.seed + d)
                for r, share in zip(rounds, shares, strict=True)
            )
            for d in range(draws)
        ]

    return {
        "within": cut(within, 0),
        "left_out": cut(others, 1),
        "left_out_all": [tuple(others)],
        "every": [tuple(whole)],
    }


def domains(study: Study) -> dict[str, Any]:
    """The run against every other run given, on the same tested participants: over all, and on each scanner alone."""
    others = [e for e in study.encoders if study.kinds[e.name] == "other run"]
    if not others:
        return {
            "sentence": "Only one run was given; --other RUN compares it with one that was pretrained on other scanners.",
            "comparisons": [],
        }
    comparisons = []
    for task in study.tasks:
        for other in others:
            both = [study.said(task, e) for e in (study.encoders[0], other)]
            scanner = study.data.scanner[task.cases.rows[both[0].rows]]
            for where in ["", *study.scanners]:
                keep = scanner == where if where else np.ones(len(scanner), bool)
                if not keep.any():
                    continue
                parts = [part_metric(task.cases, part(run, keep), task.metric) for run in both]
                rare = parts[0].rare
                a, b = (None, None) if rare else _together(parts, study)
                facts = {
                    "target": task.name,
                    "metric": task.metric,
                    "a": study.reference,
                    "b": other.name,
                    "scanner": where or None,
                }
                row = difference(a, b, planned=True, **facts)
                comparisons.append(row | {"n_test_participants": parts[0].n_participants, "note": few(rare)})
    return {
        "pretrained_on": {name: list(scanners) for name, scanners in study.pretrained_on.items()},
        "comparisons": claimed(comparisons),
        "sentence": None,
    }


def few(rare: dict[str, int]) -> str | None:
    """Why there is no interval."""
    if not rare:
        return None
    who = ", ".join(f"{n}" + (f" with {name}" if name else "") for name, n in rare.items())
    return f"No interval: participants {who}, fewer than {MIN_PARTICIPANTS}."


def _runs(study: Study, task: Task, encoder: Embeddings, draws: Sequence[tuple[Round, ...]]) -> list[Predictions]:
    if (
        len(draws) == 1
        and sum(len(r.train) for r in draws[0]) == sum(len(r.train) for r in task.rounds)
        and len(draws[0]) == len(task.rounds)
    ):
        # All scanners: what the study has said already, on this scanner's rows.
        said = study.said(task, encoder)
        return [part(said, np.isin(said.rows, np.concatenate([r.test for r in draws[0]])))]
    vectors = study.vectors(task, encoder)
    return [predict(task.cases, rounds, vectors, "linear", study.seed + d) for d, rounds in enumerate(draws)]


def _judged(
    study: Study, task: Task, encoder: Embeddings, own: dict[str, dict[str, list[Predictions]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Estimates by scanner and regime, their mean over scanners, and the drops of this encoder."""
    parts = {
        (s, regime): [part_metric(task.cases, run, task.metric) for run in runs]
        for s, by in own.items()
        for regime, runs in by.items()
    }
    flat = [p for runs in parts.values() for p in runs]
    boots = iter(
        bootstrap_together([(p.metric, p.participants) for p in flat], resamples=study.resamples, seed=study.seed)
    )
    of = {key: over_seeds([next(boots) for _ in runs], seed=study.seed) for key, runs in parts.items()}
    facts: dict[str, Any] = {"target": task.name, "metric": task.metric, "encoder": encoder.name}
    rows = []
    for (scanner, regime), runs in parts.items():
        boot = None if runs[0].rare else of[scanner, regime]
        row = {**facts, "scanner": scanner, "regime": regime, **estimate(boot, of[scanner, regime].estimate)}
        seen = encoder.name in study.pretrained_on and scanner in study.pretrained_on[encoder.name]
        row |= {"n_test_participants": runs[0].n_participants, "chance": runs[0].chance, "note": few(runs[0].rare)}
        rows.append(row | {"in_pretraining": seen if encoder.name in study.pretrained_on else None})
    planned = encoder.name == study.reference
    usable = [s for s in own if not parts[s, "within"][0].rare]
    compared = [
        difference(
            *(of[s, r] if s in usable else None for r in ("left_out", "within")), planned=planned, **facts, scanner=s
        )
        for s in own
    ]
    if len(usable) > 1:
        mean = {regime: mean_of([of[s, regime] for s in usable]) for regime in REGIMES}
        rows += [
            {
                **facts,
                "scanner": None,
                "regime": r,
                **estimate(mean[r]),
                "n_test_participants": None,
                "chance": None,
                "note": None,
                "in_pretraining": None,
            }
            for r in REGIMES
        ]
        compared.append(difference(mean["left_out"], mean["within"], planned=planned, **facts, scanner=None))
    return rows, compared


def _together(parts: Sequence[Part], study: Study) -> list[Bootstrap]:
    return bootstrap_together([(p.metric, p.participants) for p in parts], resamples=study.resamples, seed=study.seed)


def _enough(cases: Cases, r: Round, where: str) -> None:
    people = cases.participant[r.train]
    if len(np.unique(people)) < 6:
        raise EvaluationError(f"{len(np.unique(people))} participants to learn from on {where}, fewer than 6")
    for k, name in enumerate(cases.classes or ()):
        found = len(np.unique(people[cases.label[r.train] == k]))
        if found < 2:
            raise EvaluationError(f"{found} participants with {name} to learn from on {where}, fewer than 2")


def _apart(cases: Cases, r: Round, study: Study) -> None:
    """The whole point: a tested participant trained nothing, on no scanner."""
    tested = set(cases.participant[r.test].tolist())
    if crossing := tested & set(cases.participant[r.train].tolist()):
        raise AssertionError(f"{len(crossing)} tested participants are in a training set ({min(crossing)} …)")
    if not study.allow_seen and study.seen[cases.rows[r.test]].any():
        raise AssertionError("a tested participant was in pretraining")
