"""The same eye on several scanners: agreement of the probe's outputs, and retrieval of the eye by its vectors."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from octfm.display import number
from octfm.encoder.embeddings import Embeddings
from octfm.evaluation import agreement
from octfm.evaluation.arms import COVARIATES
from octfm.evaluation.readouts import cosines, standardised
from octfm.evaluation.scoring import Predictions, estimate
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, Metric
from octfm.trust.study import Study, Task, add_claims, difference

OVERALL: agreement.Form = "ICC(1,1)"
"""The form over all scanners: each eye was scanned by some of them, not by all, which makes a one-way design."""
PAIRWISE: agreement.Form = "ICC(2,1)"
"""The form between two scanners. An offset between them counts as disagreement."""

QUANTITY = {"regression": "predicted value", "binary": "log-odds", "ordinal": "expected grade"}
"""Kind of target -> the number in its predictions whose agreement is measured."""
NO_QUANTITY = (
    "Several classes without an order are no number; agreement is measured on yes-or-no targets, grades and numbers."
)


@dataclass(frozen=True, eq=False)
class Readings:
    """One number per eye and scanner, the mean over the scans of that eye on that scanner; each array [n]."""

    eye: np.ndarray
    scanner: np.ndarray
    participant: np.ndarray
    value: np.ndarray

    def on(self, a: str, b: str) -> tuple[np.ndarray, np.ndarray]:
        """Values [n, 2] and participants [n] of the eyes scanned on both `a` and `b`."""
        first, second = ({e: i for i, e in enumerate(self.eye) if self.scanner[i] == s} for s in (a, b))
        both = sorted(first.keys() & second.keys())
        rows = np.array([[first[e], second[e]] for e in both], dtype=int).reshape(-1, 2)
        return self.value[rows], self.participant[rows[:, 0]]


def same_eye(study: Study) -> dict[str, Any]:
    """ICC and Bland-Altman limits of the probe's output for every target, and retrieval of the same eye by vectors."""
    study = study.by_person()
    agreements, pairs, comparisons, skipped = [], [], [], []
    for task in study.tasks:
        quantity = QUANTITY.get(task.cases.kind)
        if quantity is None:
            skipped.append({"target": task.name, "sentence": NO_QUANTITY})
            continue
        # Covariates never look at the eye, so their agreement would be meaningless.
        readings = {
            e.name: _readings(study, task, study.predictions(task, e)) for e in study.encoders if e.name != COVARIATES
        }
        of_reference = readings[study.reference]
        several = _on_several_scanners(of_reference)
        count = len(np.unique(of_reference.participant[several]))
        if count < MIN_PARTICIPANTS:
            text = f"{count} tested participants have an eye that several scanners saw, fewer than {MIN_PARTICIPANTS}."
            skipped.append({"target": task.name, "sentence": text})
            continue
        boots = {name: _one_way(r, several, study) for name, r in readings.items()}
        eyes = np.unique(of_reference.eye[several])
        labels = _labels(study, task)
        changed = _changed(labels)
        counts = {"n_eyes": len(eyes), "n_participants": count, "n_changed": changed}
        for name, boot in boots.items():
            row = {"target": task.name, "quantity": quantity, "encoder": name, "form": OVERALL, **estimate(boot)}
            agreements.append(row | counts)
        if changed and task.cases.kind == "regression":
            # Labels that were measured per scan: their own agreement limits that of predictions.
            row = {"target": task.name, "quantity": "the label itself", "encoder": "label", "form": OVERALL}
            agreements.append(row | estimate(_one_way(labels, several, study)) | counts)
        for encoder in study.images()[1:]:
            pair = boots[study.reference], boots[encoder.name]
            facts: dict[str, Any] = {"target": task.name, "metric": "icc", "a": study.reference, "b": encoder.name}
            comparisons.append(difference(*pair, planned=True, **facts))
        pairs += [_pair(study, task, quantity, of_reference, a, b) for a, b in combinations(study.scanners, 2)]
    retrieval, compared = _retrieval(study)
    comparisons += compared
    return {
        "forms": {f: agreement.MEANING[f] for f in (OVERALL, PAIRWISE, "ICC(3,1)")},
        "agreement": agreements,
        "pairs": [p for p in pairs if p["n_eyes"]],
        "retrieval": retrieval,
        "comparisons": add_claims(comparisons),
        "skipped": skipped,
        "sentence": None if agreements or retrieval else "No tested eye was seen by several scanners.",
    }


def _readings(study: Study, task: Task, predictions: Predictions) -> Readings:
    """The QUANTITY of each eye on each scanner."""
    value = predictions.value
    if predictions.grade is not None:
        number = predictions.grade
    else:
        number = value[:, 1] - value[:, 0] if task.cases.kind == "binary" else value[:, 0]
    return _per_eye(study.data, task.cases.rows[predictions.rows], number)


def _labels(study: Study, task: Task) -> Readings:
    """The label of each tested eye on each scanner: the mean over its scans there."""
    tested = np.concatenate([r.test for r in task.rounds])
    return _per_eye(study.data, task.cases.rows[tested], task.cases.label[tested].astype(float))


def _changed(labels: Readings) -> int:
    """Eyes whose label differs between scanners, as where they were treated before they were scanned on another one."""
    distinct = {(eye, round(value, 6)) for eye, value in zip(labels.eye.tolist(), labels.value.tolist(), strict=True)}
    values_of = Counter(eye for eye, _ in distinct)
    return sum(count > 1 for count in values_of.values())


def _per_eye(data: Embeddings, rows: np.ndarray, value: np.ndarray) -> Readings:
    # Without laterality, an eye cannot be identified on another scanner.
    known = np.array([data.laterality[i] is not None for i in rows], dtype=bool)
    rows, value = rows[known], value[known]
    # \x1f, because an id may hold any printable separator.
    keys = [f"{eye}\x1f{scanner}" for eye, scanner in zip(data.eye_id[rows], data.scanner[rows], strict=True)]
    _, first, member = np.unique(np.array(keys, dtype=str), return_index=True, return_inverse=True)
    mean = np.bincount(member, weights=value) / np.bincount(member)
    return Readings(data.eye_id[rows][first], data.scanner[rows][first], data.participant[rows][first], mean)


def _on_several_scanners(readings: Readings) -> np.ndarray:
    """bool [n]: readings of eyes that were scanned on more than one scanner."""
    _, member = np.unique(readings.eye, return_inverse=True)
    return np.bincount(member, minlength=1)[member] > 1


def _one_way(readings: Readings, several: np.ndarray, study: Study) -> Bootstrap:
    eye, value = readings.eye[several], readings.value[several]
    return study.bootstrap(lambda W: agreement.icc_one_way(eye, value, W), readings.participant[several])


def _pair(study: Study, task: Task, quantity: str, readings: Readings, a: str, b: str) -> dict[str, Any]:
    """Agreement between two scanners, with the points of the Bland-Altman plot."""
    values, person = readings.on(a, b)
    count = len(np.unique(person))
    facts = {"target": task.name, "quantity": quantity, "a": a, "b": b, "n_eyes": len(values), "n_participants": count}
    if count < MIN_PARTICIPANTS:
        return facts | {
            "icc": [],
            "bland_altman": None,
            "points": [],
            "note": f"{number(count, 'participant')}, fewer than {MIN_PARTICIPANTS}.",
        }
    apart = values[:, 0] - values[:, 1]

    def boot(metric: Metric) -> dict[str, float | None]:
        return estimate(study.bootstrap(metric, person))

    forms: tuple[agreement.Form, ...] = (PAIRWISE, "ICC(3,1)")
    return facts | {
        "icc": [{"form": f, **boot(lambda W, f=f: agreement.icc(values, f, W))} for f in forms],
        "bland_altman": agreement.limits(apart, person, lambda metric: study.bootstrap(metric, person)),
        "points": [[float(m), float(d)] for m, d in zip(values.mean(1), apart, strict=True)],
        "note": None,
    }


def _retrieval(study: Study) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Results and comparisons of retrieval: rank of the same eye among all test scans of another scanner. Queries are
    the test scans, once for every other scanner that scanned the same eye."""
    data, tested = study.data, study.tested
    rows = np.flatnonzero(tested & np.array([side is not None for side in data.laterality]))
    scanned = set(zip(data.eye_id[rows].tolist(), data.scanner[rows].tolist(), strict=True))
    queries = [
        (i, scanner)
        for i in rows.tolist()
        for scanner in study.scanners
        if scanner != data.scanner[i] and (str(data.eye_id[i]), scanner) in scanned
    ]
    person = np.array([data.participant[i] for i, _ in queries], dtype=str)
    if len(np.unique(person)) < MIN_PARTICIPANTS:
        return [], []
    results, boots = [], {}
    images = [*study.images(), *(e for e in study.encoders if e.name == "tissue_map")]
    for encoder in images:
        ranks, participant_ranks, right, wrong = _ranks(study, encoder, rows, queries)
        row = {
            "encoder": encoder.name,
            "n_queries": len(queries),
            "n_participants": len(np.unique(person)),
            "median_gallery": float(np.median(wrong + 1)),
            "median_rank": float(np.median(ranks)),
        }
        measures = {"reciprocal_rank": 1 / ranks, "first": ranks == 1, "same_participant_first": participant_ranks == 1}
        for name, values in measures.items():
            values = values.astype(float)
            boot = study.bootstrap(lambda W, x=values: W @ x / W.sum(1), person)
            row[name] = estimate(boot)
            if name == "reciprocal_rank":
                boots[encoder.name] = boot
        row["chance"] = _chance(right, wrong)
        results.append(row)
    compared = []
    for name, boot in boots.items():
        if name != study.reference:
            facts: dict[str, Any] = {"target": "same eye", "metric": "reciprocal_rank", "a": study.reference, "b": name}
            compared.append(difference(boots[study.reference], boot, planned=True, **facts))
    return results, compared


def _ranks(
    study: Study, encoder: Embeddings, rows: np.ndarray, queries: Sequence[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Per query: rank of the first scan of the same eye, and of the same participant, among scans of others; number of
    scans of the same eye, and of other scans."""
    data, unit = study.data, unit_vectors(encoder, study)
    gallery = {scanner: rows[data.scanner[rows] == scanner] for scanner in study.scanners}
    ranks, participant_ranks, right, wrong = [], [], [], []
    for i, scanner in queries:
        candidates = gallery[scanner]
        similarity = cosines(unit[candidates], unit[i])
        same_eye = data.eye_id[candidates] == data.eye_id[i]
        same_person = data.participant[candidates] == data.participant[i]
        for correct, found in ((same_eye, ranks), (same_person, participant_ranks)):
            # Ties count half, so that constant vectors find an eye in the middle.
            best = similarity[correct].max()
            found.append(1 + (similarity[~correct] > best).sum() + (similarity[~correct] == best).sum() / 2)
        right.append(int(same_eye.sum()))
        wrong.append(int((~same_eye).sum()))
    return np.array(ranks, float), np.array(participant_ranks, float), np.array(right), np.array(wrong)


def _chance(right: np.ndarray, wrong: np.ndarray) -> dict[str, float]:
    """What random vectors would score: the first of `right` scans among `wrong` others, each [queries]."""
    galleries, times = np.unique(np.stack([right, wrong], axis=1), axis=0, return_counts=True)
    share = np.zeros(wrong.max() + 1)
    for (m, n), weight in zip(galleries.tolist(), times / times.sum(), strict=True):
        hit = m / (m + n - np.arange(n + 1))  # at a rank, if none of the scans before was right
        share[: n + 1] += weight * hit * np.cumprod(np.append(1, 1 - hit[:-1]))
    return {
        "first": float(share[0]),
        "reciprocal_rank": float((share / np.arange(1, len(share) + 1)).sum()),
        "median_rank": float(1 + np.searchsorted(share.cumsum(), 0.5 - 1e-9)),
    }


def unit_vectors(encoder: Embeddings, study: Study) -> np.ndarray:
    """Vectors [N, width] standardised by the training rows (by all rows if all are tested), then scaled to length 1."""
    known = ~study.tested if (~study.tested).any() else study.tested
    _, x = standardised(encoder.vectors[known], encoder.vectors)
    return x / np.maximum(1e-12, np.linalg.norm(x, axis=1, keepdims=True))
