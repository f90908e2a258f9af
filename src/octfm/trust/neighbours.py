"""Whether nearest neighbours share labels or only the scanner, and whether a probe can recognise the scanner."""

from typing import Any

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.evaluation.arms import COVARIATES, MAP_AND_ENCODER
from octfm.evaluation.cases import Skip, Target, people
from octfm.evaluation.readouts import cosines
from octfm.evaluation.scoring import compare_scored, estimate, score
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap
from octfm.trust.same_eye import unit_vectors
from octfm.trust.study import Study, Task, add_claims, difference, make_task

NEAREST = 5
EXAMPLES = 6
SHOWN = 3
"""Neighbours per example on the page."""


def scanner_leakage(study: Study) -> dict[str, Any]:
    """Probe every encoder for the scanner. High scores are usual; they show what a downstream model could exploit."""
    target = Target("scanner", "scanner", "acquisition", leakage=True)
    try:
        task = make_task(target, study.data, None, study.design, study.seen, study.allow_seen, study.seed)
    except Skip as reason:
        return {"results": [], "comparisons": [], "sentence": str(reason)}
    scored = {}
    for encoder in study.encoders:
        predictions = study.predictions(task, encoder)
        metrics = ("auroc", "balanced_accuracy")
        scored[encoder.name] = score(
            task.cases, encoder.name, [predictions], task.facts, study.resamples, study.seed, metrics
        )
    images = {e.name for e in study.images()}
    comparisons = [
        compare_scored(a, b, leakage=True)
        | {"planned": name in images and a.metric == "auroc" and b.bootstrap is not None}
        for name, others in scored.items()
        if name != study.reference
        for a, b in zip(scored[study.reference], others, strict=True)
    ]
    rows = [s.row for own in scored.values() for s in own]
    return {"results": rows, "comparisons": add_claims(comparisons), "sentence": None}


def neighbours(study: Study) -> dict[str, Any]:
    """Share of a test scan's five nearest training scans (by cosine) of other participants that have its label or
    scanner."""
    results: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    labels = {task.name: _labels(task, study) for task in study.tasks if task.cases.classes is not None}
    boots: dict[tuple[str, str], Bootstrap] = {}
    person = people(study.data.participant)
    for encoder in [e for e in study.encoders if e.name not in (COVARIATES, MAP_AND_ENCODER)]:
        query, nearest, gallery = nearest_scans(study, encoder)
        tested = person[query]
        if len(np.unique(tested)) < MIN_PARTICIPANTS or len(gallery) <= NEAREST:
            return {
                "results": [],
                "comparisons": [],
                "examples": [],
                "sentence": "Too few scans for neighbours to mean anything.",
            }
        for name, label in {**labels, "scanner": study.data.scanner.astype(object)}.items():
            known = np.array([value is not None for value in label])
            labelled = known[query]
            # Neighbours without a label count as not sharing it.
            share = (label[nearest[labelled]] == label[query[labelled]][:, None]).mean(1)
            chance = chance_of(label, person, query[labelled], gallery)
            boot = study.bootstrap(lambda W, x=share: W @ x / W.sum(1), tested[labelled])
            boots[encoder.name, name] = boot
            row = {"target": name, "encoder": encoder.name, "k": NEAREST, "chance": chance}
            row |= {"leakage": name == "scanner", **estimate(boot), "n_queries": int(labelled.sum())}
            results.append(row | {"n_participants": len(np.unique(tested[labelled]))})
    for name in [*labels, "scanner"]:
        for other in [e.name for e in study.encoders if (e.name, name) in boots and e.name != study.reference]:
            pair = boots[study.reference, name], boots[other, name]
            leakage = name == "scanner"
            facts = {"target": name, "metric": "neighbours", "a": study.reference, "b": other, "leakage": leakage}
            comparisons.append(difference(*pair, planned=not leakage, lower_is_better=leakage, **facts))
    return {
        "results": results,
        "comparisons": add_claims(comparisons),
        "examples": _examples(study, labels),
        "sentence": None,
    }


def chance_of(label: np.ndarray, participant: np.ndarray, query: np.ndarray, gallery: np.ndarray) -> float:
    """Mean share of the gallery's scans of other participants that have the label of a query. `label` and `participant`
    have an entry for every scan; `query` and `gallery` are rows among them."""
    _, person = np.unique(participant, return_inverse=True)
    place = {value: k for k, value in enumerate(dict.fromkeys(label.tolist()))}
    kind = np.array([place[value] for value in label.tolist()])
    counts = np.zeros((person.max() + 1, len(place)))
    np.add.at(counts, (person[gallery], kind[gallery]), 1)
    # Scans of a query's own participant cannot be neighbours, so they do not count for chance either.
    others = counts.sum() - counts[person[query]].sum(1)
    alike = counts.sum(0)[kind[query]] - counts[person[query], kind[query]]
    return float(np.mean(alike / np.maximum(others, 1)))


def nearest_scans(study: Study, encoder: Embeddings, k: int = NEAREST) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the test scans [Q], of the k nearest gallery scans of other participants [Q, k], and of the gallery. The
    gallery holds the training scans, or all scans if all are tested."""
    unit = unit_vectors(encoder, study)
    query = np.flatnonzero(study.tested)
    gallery = np.flatnonzero(~study.tested) if (~study.tested).any() else query
    names = np.unique(people(study.data.participant), return_inverse=True)[1]
    found = []
    # In parts, so that the similarity matrix stays small.
    for part in np.array_split(query, max(1, len(query) // 256)):
        near = cosines(unit[part], unit[gallery])
        # Other scans of the same participant are excluded: they are near for the wrong reason.
        near[names[part][:, None] == names[gallery][None, :]] = -np.inf
        found.append(gallery[np.argsort(-near, axis=1, kind="stable")[:, :k]])
    return query, np.concatenate(found), gallery


def _labels(task: Task, study: Study) -> np.ndarray:
    """Class name of every acquisition, object [N]; None without a label."""
    label = np.full(len(study.data.acquisition), None, dtype=object)
    label[task.cases.rows] = [(task.cases.classes or ())[int(k)] for k in task.cases.label]
    return label


def _examples(study: Study, labels: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """The first query of each class and scanner with its nearest scans, however good these look."""
    query, nearest, _ = nearest_scans(study, study.encoders[0], SHOWN)
    target = next(iter(labels), None)
    kind = [(labels[target][i] if target else None, study.data.scanner[i]) for i in query]
    person, shown = people(study.data.participant), set[str]()
    chosen: dict[Any, int] = {}
    for at, i in enumerate(query):
        if kind[at] not in chosen and person[i] not in shown:
            chosen[kind[at]] = at
            shown.add(str(person[i]))
    places = sorted(chosen.values(), key=lambda at: str(kind[at]))
    step = max(1, len(places) // EXAMPLES)
    examples = []
    for at in places[::step][:EXAMPLES]:
        scans = [int(query[at]), *nearest[at].tolist()]
        first, *others = (str(study.data.acquisition[i]) for i in scans)
        classes = [None if target is None else labels[target][i] for i in scans]
        examples.append({"query": first, "nearest": others, "target": target, "labels": classes})
    return examples
