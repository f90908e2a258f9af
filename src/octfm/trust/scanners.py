"""Generalisation across scanners: probes on a scanner that was left out, and runs pretrained on other scanners."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.errors import EvaluationError
from octfm.evaluation.cases import Cases, Round
from octfm.evaluation.efficiency import subset
from octfm.evaluation.probe import predict
from octfm.evaluation.scoring import Predictions, estimate, rare_note
from octfm.evaluation.statistics import mean_of, over_seeds
from octfm.trust.study import Study, Task, add_claims, difference, part, part_metric

DRAWS = 3
"""Random subsets averaged when the larger training set is reduced to the size of the smaller."""
REGIMES = {
    "within": "fitted on this scanner only",
    "left_out": "fitted on the other scanners, as many participants",
    "left_out_all": "fitted on the other scanners, all participants",
    "every": "fitted on all scanners",
}
"""Training sets of the probe, all tested on the same rows of one scanner. `left_out` minus `within` is the drop."""


def leave_one_scanner_out(study: Study) -> dict[str, Any]:
    """Fit four probes (REGIMES) per target, encoder and scanner, all tested on the same participants of that scanner.
    The drop compares equal numbers of training participants, because the other scanners together have more, which would
    hide it."""
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
            predictions = {
                s: {regime: _predictions(study, task, encoder, draws) for regime, draws in by.items()}
                for s, by in sets.items()
            }
            rows, compared = _compare_regimes(study, task, encoder, predictions)
            for row in rows:
                trained = None  # rows for the mean over scanners
                if row["scanner"] is not None:
                    draws = sets[row["scanner"]][row["regime"]]
                    counts = [_count(task.cases, np.concatenate([r.train for r in rounds])) for rounds in draws]
                    trained = round(float(np.mean(counts)))
                results.append({**row, "n_train_participants": trained})
            comparisons += compared
    return {
        "regimes": REGIMES,
        "results": results,
        "comparisons": add_claims(comparisons),
        "skipped": skipped,
        "sentence": None if results else "Fewer than two scanners have enough participants to learn from and to test.",
    }


def training_sets(task: Task, study: Study, scanner: str) -> dict[str, list[tuple[Round, ...]]]:
    """Rounds by regime and draw, all testing the same rows. Raises EvaluationError if too few participants remain, and
    AssertionError if a tested participant would be trained on or was used in pretraining."""
    cases = task.cases
    on = study.data.scanner[cases.rows] == scanner
    whole = [Round(r.train, r.test[on[r.test]]) for r in task.rounds]
    whole = [r for r in whole if len(r.test)]
    if not whole:
        raise EvaluationError("no test participant was scanned on it")
    within = [Round(r.train[on[r.train]], r.test) for r in whole]
    others = [Round(r.train[~on[r.train]], r.test) for r in whole]
    for r, where in [*((r, "this scanner") for r in within), *((r, "the other scanners") for r in others)]:
        _require_participants(cases, r, where)
        _require_disjoint(cases, r, study)
    sizes = [(_count(cases, a.train), _count(cases, b.train)) for a, b in zip(within, others, strict=True)]

    def cut(rounds: list[Round], side: int) -> list[tuple[Round, ...]]:
        """Reduce each training set to the smaller of its pair, by DRAWS random subsets if there is a choice."""
        # More participants make a better probe, so both regimes of a pair get the same number.
        shares = [min(pair) / pair[side] for pair in sizes]
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
    """Compare the run with every other run given, on the same test participants: overall and on each scanner."""
    others = [e for e in study.encoders if study.kinds[e.name] == "other run"]
    if not others:
        return {
            "sentence": "Only one run was given; --other RUN compares it with one that was pretrained on other "
            "scanners.",
            "comparisons": [],
        }
    comparisons = []
    for task in study.tasks:
        for other in others:
            both = [study.predictions(task, e) for e in (study.encoders[0], other)]
            scanner = study.data.scanner[task.cases.rows[both[0].rows]]
            for where in ["", *study.scanners]:
                keep = scanner == where if where else np.ones(len(scanner), bool)
                if not keep.any():
                    continue
                parts = [part_metric(task.cases, part(run, keep), task.metric) for run in both]
                rare = parts[0].rare
                a, b = (None, None) if rare else study.bootstrap_together(parts)
                facts = {
                    "target": task.name,
                    "metric": task.metric,
                    "a": study.reference,
                    "b": other.name,
                    "scanner": where or None,
                }
                row = difference(a, b, planned=True, **facts)
                comparisons.append(row | {"n_test_participants": parts[0].n_participants, "note": rare_note(rare)})
    return {
        "pretrained_on": {name: list(scanners) for name, scanners in study.pretrained_on.items()},
        "comparisons": add_claims(comparisons),
        "sentence": None,
    }


def _predictions(
    study: Study, task: Task, encoder: Embeddings, draws: Sequence[tuple[Round, ...]]
) -> list[Predictions]:
    """Test predictions of one regime, per draw."""
    first = draws[0]
    size, full_size = (sum(len(r.train) for r in rounds) for rounds in (first, task.rounds))
    if len(draws) == 1 and size == full_size and len(first) == len(task.rounds):
        # Regime `every`: the study has cached this fit; select the rows of this scanner.
        predictions = study.predictions(task, encoder)
        return [part(predictions, np.isin(predictions.rows, np.concatenate([r.test for r in first])))]
    return [predict(task.cases, rounds, encoder, "linear", study.seed + d) for d, rounds in enumerate(draws)]


def _compare_regimes(
    study: Study, task: Task, encoder: Embeddings, predictions: dict[str, dict[str, list[Predictions]]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results by scanner and regime with their mean over scanners, and the drops, of one encoder."""
    parts = {
        (s, regime): [part_metric(task.cases, run, task.metric) for run in runs]
        for s, by in predictions.items()
        for regime, runs in by.items()
    }
    # One call for all parts, so that scanners and regimes are paired by their participants.
    boots = iter(study.bootstrap_together([p for runs in parts.values() for p in runs]))
    # In the order of `parts`, one for each draw.
    of = {key: over_seeds([next(boots) for _ in runs], seed=study.seed) for key, runs in parts.items()}
    facts: dict[str, Any] = {"target": task.name, "metric": task.metric, "encoder": encoder.name}
    rows = []
    for (scanner, regime), runs in parts.items():
        boot = None if runs[0].rare else of[scanner, regime]
        row = {**facts, "scanner": scanner, "regime": regime, **estimate(boot, of[scanner, regime].estimate)}
        seen = encoder.name in study.pretrained_on and scanner in study.pretrained_on[encoder.name]
        row |= {
            "n_test_participants": runs[0].n_participants,
            "chance": runs[0].chance,
            "note": rare_note(runs[0].rare),
        }
        rows.append(row | {"in_pretraining": seen if encoder.name in study.pretrained_on else None})
    planned = encoder.name == study.reference
    usable = [s for s in predictions if not parts[s, "within"][0].rare]
    compared = []
    for s in predictions:
        pair = (of[s, "left_out"], of[s, "within"]) if s in usable else (None, None)
        compared.append(difference(*pair, planned=planned, **facts, scanner=s))
    if len(usable) > 1:
        mean = {regime: mean_of([of[s, regime] for s in usable]) for regime in REGIMES}
        unknown = dict.fromkeys(("n_test_participants", "chance", "note", "in_pretraining"))
        rows += [{**facts, "scanner": None, "regime": r, **estimate(mean[r]), **unknown} for r in REGIMES]
        compared.append(difference(mean["left_out"], mean["within"], planned=planned, **facts, scanner=None))
    return rows, compared


def _count(cases: Cases, rows: np.ndarray) -> int:
    """Number of participants in these rows of the cases."""
    return len(np.unique(cases.participant[rows]))


def _require_participants(cases: Cases, r: Round, where: str) -> None:
    if (count := _count(cases, r.train)) < 6:
        raise EvaluationError(f"{count} participants to learn from on {where}, fewer than 6")
    for k, name in enumerate(cases.classes or ()):
        count = _count(cases, r.train[cases.label[r.train] == k])
        if count < 2:
            raise EvaluationError(f"{count} participants with {name} to learn from on {where}, fewer than 2")


def _require_disjoint(cases: Cases, r: Round, study: Study) -> None:
    """Raise AssertionError, a bug of octfm, if a tested participant is in a training part or was in pretraining."""
    tested = set(cases.participant[r.test].tolist())
    if crossing := tested & set(cases.participant[r.train].tolist()):
        raise AssertionError(f"{len(crossing)} tested participants are in a training set ({min(crossing)} …)")
    if not study.allow_seen and study.seen[cases.rows[r.test]].any():
        raise AssertionError("a tested participant was in pretraining")
