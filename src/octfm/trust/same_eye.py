"""The same eye on several scanners: does the probe say the same of it, and do its vectors find each other?"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.evaluation import agreement
from octfm.evaluation.scoring import Predictions, finite
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, Metric, bootstrap
from octfm.trust.study import Study, Task, claimed, difference, estimate

OVERALL: agreement.Form = "ICC(1,1)"
"""Over all scanners: each eye was seen by a few of them, not by all, which is the one-way design."""
PAIRWISE: agreement.Form = "ICC(2,1)"
"""Between two scanners: an offset between them is disagreement."""


@dataclass(frozen=True, eq=False)
class Seen:
    """One number for every eye on every scanner that saw it (the mean over its scans there)."""

    eye: np.ndarray
    scanner: np.ndarray
    participant: np.ndarray
    value: np.ndarray

    def on(self, a: str, b: str) -> tuple[np.ndarray, np.ndarray]:
        """Values [n, 2] and participants [n] of eyes that both saw."""
        first, second = ({e: i for i, e in enumerate(self.eye) if self.scanner[i] == s} for s in (a, b))
        both = sorted(first.keys() & second.keys())
        rows = np.array([[first[e], second[e]] for e in both], dtype=int).reshape(-1, 2)
        return self.value[rows], self.participant[rows[:, 0]]


def same_eye(study: Study) -> dict[str, Any]:
    """ICC and Bland-Altman of what the probe says of every target, and retrieval of the same eye by its vectors."""
    agreements, pairs, comparisons, skipped = [], [], [], []
    for task in study.tasks:
        quantity, reading = _quantity(task)
        if quantity is None:
            skipped.append({"target": task.name, "sentence": reading})
            continue
        # What never looks at the eye agrees with itself.
        measured = {e.name: _seen(study, task, study.said(task, e)) for e in study.encoders if e.name != "metadata"}
        several = _several(measured[study.reference])
        people = len(np.unique(measured[study.reference].participant[several]))
        if people < MIN_PARTICIPANTS:
            text = f"{people} tested participants have an eye that several scanners saw, fewer than {MIN_PARTICIPANTS}."
            skipped.append({"target": task.name, "sentence": text})
            continue
        boots = {name: _one_way(m, several, study) for name, m in measured.items()}
        for name, boot in boots.items():
            row = {"target": task.name, "quantity": quantity, "encoder": name, "form": OVERALL, **estimate(boot)}
            agreements.append(row | {"n_eyes": len(np.unique(measured[name].eye[several])), "n_participants": people})
        truth = _truth(study, task)
        if truth is not None:
            row = {"target": task.name, "quantity": "the label itself", "encoder": "label", "form": OVERALL}
            agreements.append(
                row
                | estimate(_one_way(truth, several, study))
                | {"n_eyes": len(np.unique(truth.eye[several])), "n_participants": people}
            )
        comparisons += [
            difference(
                boots[study.reference], b, planned=True, target=task.name, metric="icc", a=study.reference, b=name
            )
            for name, b in boots.items()
            if name in {e.name for e in study.images()} - {study.reference}
        ]
        pairs += [
            _pair(study, task, quantity, measured[study.reference], a, b) for a, b in combinations(study.scanners, 2)
        ]
    retrieval, found = _retrieval(study)
    comparisons += found
    return {
        "forms": {f: agreement.MEANING[f] for f in (OVERALL, PAIRWISE, "ICC(3,1)")},
        "agreement": agreements,
        "pairs": [p for p in pairs if p["n_eyes"]],
        "retrieval": retrieval,
        "comparisons": claimed(comparisons),
        "skipped": skipped,
        "sentence": None if agreements or retrieval else "No tested eye was seen by several scanners.",
    }


def _quantity(task: Task) -> tuple[str | None, str]:
    kind = task.cases.kind
    if kind == "regression":
        return "predicted value", ""
    if kind == "binary":
        return "log-odds", ""
    if kind == "ordinal":
        return "expected grade", ""
    return (
        None,
        "Several classes without an order are no number; agreement is measured on yes-or-no targets, grades and numbers.",
    )


def _seen(study: Study, task: Task, said: Predictions) -> Seen:
    if said.grade is not None:
        value = said.grade
    else:
        value = said.value[:, 1] - said.value[:, 0] if task.cases.kind == "binary" else said.value[:, 0]
    return _per_eye(study.data, task.cases.rows[said.rows], value)


def _truth(study: Study, task: Task) -> Seen | None:
    """Numbers that were measured once per scan agree only so well themselves; None where the label is the eye's or the participant's."""
    if task.cases.kind != "regression":
        return None
    tested = np.concatenate([r.test for r in task.rounds])
    seen = _per_eye(study.data, task.cases.rows[tested], task.cases.label[tested])
    by_eye: dict[str, set[float]] = {}
    for eye, value in zip(seen.eye.tolist(), seen.value.tolist(), strict=True):
        by_eye.setdefault(eye, set()).add(round(value, 6))
    return seen if any(len(values) > 1 for values in by_eye.values()) else None


def _per_eye(data: Embeddings, rows: np.ndarray, value: np.ndarray) -> Seen:
    # An eye whose side is unknown cannot be found on another scanner.
    known = np.array([data.laterality[i] is not None for i in rows], dtype=bool)
    rows, value = rows[known], value[known]
    keys = [f"{eye}\x1f{scanner}" for eye, scanner in zip(data.eye_id[rows], data.scanner[rows], strict=True)]
    _, first, member = np.unique(np.array(keys, dtype=str), return_index=True, return_inverse=True)
    mean = np.bincount(member, weights=value) / np.bincount(member)
    return Seen(data.eye_id[rows][first], data.scanner[rows][first], data.participant[rows][first], mean)


def _several(seen: Seen) -> np.ndarray:
    """bool [n]: measurements of eyes that more than one scanner saw."""
    _, member = np.unique(seen.eye, return_inverse=True)
    return np.bincount(member, minlength=1)[member] > 1


def _one_way(seen: Seen, several: np.ndarray, study: Study) -> Bootstrap:
    eye, value = seen.eye[several], seen.value[several]
    return bootstrap(
        lambda W: agreement.icc_one_way(eye, value, W),
        seen.participant[several],
        resamples=study.resamples,
        seed=study.seed,
    )


def _pair(study: Study, task: Task, quantity: str, seen: Seen, a: str, b: str) -> dict[str, Any]:
    values, people = seen.on(a, b)
    count = len(np.unique(people))
    facts = {"target": task.name, "quantity": quantity, "a": a, "b": b, "n_eyes": len(values), "n_participants": count}
    if count < MIN_PARTICIPANTS:
        return facts | {
            "icc": [],
            "bland_altman": None,
            "points": [],
            "note": f"{count} participant{'s' * (count != 1)}, fewer than {MIN_PARTICIPANTS}.",
        }
    apart = values[:, 0] - values[:, 1]

    def boot(metric: Metric) -> dict[str, float | None]:
        return estimate(bootstrap(metric, people, resamples=study.resamples, seed=study.seed))

    forms: tuple[agreement.Form, ...] = (PAIRWISE, "ICC(3,1)")
    limits = {
        "bias": boot(lambda W: agreement.bias(apart, W)),
        "lower": boot(lambda W: agreement.limit(apart, -1, W)),
        "upper": boot(lambda W: agreement.limit(apart, 1, W)),
        "sd": finite(float(agreement.spread(apart)[0])),
    }
    return facts | {
        "icc": [{"form": f, **boot(lambda W, f=f: agreement.icc(values, f, W))} for f in forms],
        "bland_altman": limits,
        "points": [[float(m), float(d)] for m, d in zip(values.mean(1), apart, strict=True)],
        "note": None,
    }


def _retrieval(study: Study) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """For every tested scan and every other scanner that saw the eye: at which place among all tested scans of that scanner is the eye?"""
    data, tested = study.data, study.tested
    rows = np.flatnonzero(tested & np.array([side is not None for side in data.laterality]))
    shelved = set(zip(data.eye_id[rows].tolist(), data.scanner[rows].tolist(), strict=True))
    queries = [
        (i, scanner)
        for i in rows.tolist()
        for scanner in study.scanners
        if scanner != data.scanner[i] and (str(data.eye_id[i]), scanner) in shelved
    ]
    people = np.array([data.participant[i] for i, _ in queries], dtype=str)
    if len(np.unique(people)) < MIN_PARTICIPANTS:
        return [], []
    results, boots = [], {}
    images = [*study.images(), *(e for e in study.encoders if e.name == "tissue_map")]
    for encoder in images:
        ranks, fellow, sizes = _ranks(study, encoder, rows, queries)
        row = {
            "encoder": encoder.name,
            "n_queries": len(queries),
            "n_participants": len(np.unique(people)),
            "median_gallery": float(np.median(sizes)),
        }
        row["median_rank"] = float(np.median(ranks))
        measures = {"reciprocal_rank": 1 / ranks, "first": ranks == 1, "same_participant_first": fellow == 1}
        for name, values in measures.items():
            boot = _mean(values.astype(float), people, study)
            row[name] = estimate(boot)
            if name == "reciprocal_rank":
                boots[encoder.name] = boot
        # By chance the eye is anywhere in the gallery.
        row["chance"] = {
            "first": float(np.mean(1 / sizes)),
            "reciprocal_rank": float(np.mean([np.mean(1 / np.arange(1, n + 1)) for n in sizes])),
        }
        results.append(row)
    reference = boots[study.reference]
    compared = [
        difference(
            reference, boot, planned=True, target="same eye", metric="reciprocal_rank", a=study.reference, b=name
        )
        for name, boot in boots.items()
        if name != study.reference
    ]
    return results, compared


def _ranks(
    study: Study, encoder: Embeddings, rows: np.ndarray, queries: Sequence[tuple[int, str]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank of the same eye, rank of the first scan of the same participant, and gallery size, for every query."""
    data, unit = study.data, unit_vectors(encoder, study)
    gallery = {scanner: rows[data.scanner[rows] == scanner] for scanner in study.scanners}
    ranks, fellows, sizes = [], [], []
    for i, scanner in queries:
        shelf = gallery[scanner]
        near = unit[shelf] @ unit[i]
        same, person = data.eye_id[shelf] == data.eye_id[i], data.participant[shelf] == data.participant[i]
        for mine, found in ((same, ranks), (person, fellows)):
            # Ties count half, so that an encoder that says the same of everything is at chance.
            best = near[mine].max()
            found.append(1 + (near[~mine] > best).sum() + (near[~mine] == best).sum() / 2)
        sizes.append(int((~same).sum()) + 1)
    return np.array(ranks, float), np.array(fellows, float), np.array(sizes)


def unit_vectors(encoder: Embeddings, study: Study) -> np.ndarray:
    """Vectors of length 1, standardised by the rows that are not tested (all rows, where everybody is)."""
    known = ~study.tested if (~study.tested).any() else study.tested
    mean, scale = encoder.vectors[known].mean(0), encoder.vectors[known].std(0)
    scale[scale <= 1e-6 * np.abs(mean)] = np.inf
    x = (encoder.vectors - mean) / scale
    return x / np.maximum(1e-12, np.linalg.norm(x, axis=1, keepdims=True))


def _mean(values: np.ndarray, people: np.ndarray, study: Study) -> Bootstrap:
    return bootstrap(lambda W: W @ values / W.sum(1), people, resamples=study.resamples, seed=study.seed)
