"""What lies next to what: is a scan's neighbourhood one of disease, or one of scanners? And can a probe tell the scanner?"""

from typing import Any

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.evaluation.cases import Skip, Target
from octfm.evaluation.probe import predict
from octfm.evaluation.scoring import compare_scored, score
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, bootstrap
from octfm.trust.same_eye import unit_vectors
from octfm.trust.study import Study, claimed, difference, estimate, make_task

NEAREST = 5
EXAMPLES = 6
SHOWN = 3
"""Neighbours of an example that the page shows."""


def scanner_leakage(study: Study) -> dict[str, Any]:
    """A linear probe for the scanner on every encoder. A high score is usual between instruments; it says what could be misused."""
    target = Target("scanner", "scanner", "acquisition", leakage=True)
    try:
        task = make_task(target, study.data, None, study.design, study.seen, study.allow_seen, study.seed)
    except Skip as reason:
        return {"results": [], "comparisons": [], "sentence": str(reason)}
    scored = {}
    for encoder in study.encoders:
        said = predict(task.cases, task.rounds, study.vectors(task, encoder), "linear", study.seed)
        scored[encoder.name] = score(
            task.cases, encoder.name, [said], task.facts, study.resamples, study.seed, ("auroc", "balanced_accuracy")
        )
    comparisons = [
        compare_scored(a, b, leakage=True)
        | {"planned": name in {e.name for e in study.images()} and a.metric == "auroc" and b.bootstrap is not None}
        for name, others in scored.items()
        if name != study.reference
        for a, b in zip(scored[study.reference], others, strict=True)
    ]
    rows = [s.row for own in scored.values() for s in own]
    return {"results": rows, "comparisons": claimed(comparisons), "sentence": None}


def neighbours(study: Study) -> dict[str, Any]:
    """Of the five nearest scans by cosine among those learned from (never the same participant): how many share label and scanner?"""
    results: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    labels = {task.name: _labels(task, study) for task in study.tasks if task.cases.classes is not None}
    boots: dict[tuple[str, str], Bootstrap] = {}
    for encoder in [e for e in study.encoders if e.name != "metadata"]:
        query, nearest, gallery = nearest_scans(study, encoder)
        people = study.data.participant[query]
        if len(np.unique(people)) < MIN_PARTICIPANTS or len(gallery) <= NEAREST:
            return {
                "results": [],
                "comparisons": [],
                "examples": [],
                "sentence": "Too few scans for neighbours to mean anything.",
            }
        for name, label in {**labels, "scanner": study.data.scanner.astype(object)}.items():
            known = np.array([value is not None for value in label])
            asked = known[query]
            # A neighbour without a label shares none.
            share = (label[nearest[asked]] == label[query[asked]][:, None]).mean(1)
            chance = float(np.mean([(label[gallery] == value).mean() for value in label[query[asked]]]))
            boot = bootstrap(
                lambda W, x=share: W @ x / W.sum(1), people[asked], resamples=study.resamples, seed=study.seed
            )
            boots[encoder.name, name] = boot
            facts = {
                "target": name,
                "encoder": encoder.name,
                "k": NEAREST,
                "chance": chance,
                "leakage": name == "scanner",
            }
            results.append(
                {
                    **facts,
                    **estimate(boot),
                    "n_queries": int(asked.sum()),
                    "n_participants": len(np.unique(people[asked])),
                }
            )
    for name in [*labels, "scanner"]:
        for other in [e.name for e in study.encoders if (e.name, name) in boots and e.name != study.reference]:
            pair = boots[study.reference, name], boots[other, name]
            facts = {
                "target": name,
                "metric": "neighbours",
                "a": study.reference,
                "b": other,
                "leakage": name == "scanner",
            }
            comparisons.append(difference(*pair, planned=name != "scanner", lower_is_better=name == "scanner", **facts))
    return {
        "results": results,
        "comparisons": claimed(comparisons),
        "examples": _examples(study, labels),
        "sentence": None,
    }


def nearest_scans(study: Study, encoder: Embeddings, k: int = NEAREST) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of the tested scans [Q], of their k nearest scans of other participants [Q, k], and of the gallery that these come from."""
    unit = unit_vectors(encoder, study)
    query = np.flatnonzero(study.tested)
    gallery = np.flatnonzero(~study.tested) if (~study.tested).any() else query
    names = np.unique(study.data.participant, return_inverse=True)[1]
    found = []
    for part in np.array_split(query, max(1, len(query) // 256)):
        near = unit[part] @ unit[gallery].T
        near[names[part][:, None] == names[gallery][None, :]] = -np.inf
        found.append(gallery[np.argsort(-near, axis=1, kind="stable")[:, :k]])
    return query, np.concatenate(found), gallery


def _labels(task: Any, study: Study) -> np.ndarray:
    """object [N]: the class of every acquisition, None without a label."""
    label = np.full(len(study.data.acquisition), None, dtype=object)
    label[task.cases.rows] = [task.cases.classes[int(k)] for k in task.cases.label]
    return label


def _examples(study: Study, labels: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """Queries of different classes and scanners with their nearest scans; the first of each kind, however good its neighbours look."""
    query, nearest, _ = nearest_scans(study, study.encoders[0], SHOWN)
    target = next(iter(labels), None)
    kind = [(labels[target][i] if target else None, study.data.scanner[i]) for i in query]
    people: set[str] = set()
    chosen: dict[Any, int] = {}
    for at, i in enumerate(query):
        if kind[at] not in chosen and study.data.participant[i] not in people:
            chosen[kind[at]] = at
            people.add(str(study.data.participant[i]))
    places = sorted(chosen.values(), key=lambda at: str(kind[at]))
    step = max(1, len(places) // EXAMPLES)
    return [_example(study, target, labels, int(query[at]), nearest[at].tolist()) for at in places[::step][:EXAMPLES]]


def _example(
    study: Study, target: str | None, labels: dict[str, np.ndarray], query: int, nearest: list[int]
) -> dict[str, Any]:
    names = [str(study.data.acquisition[i]) for i in (query, *nearest)]
    classes = [None if target is None else labels[target][i] for i in (query, *nearest)]
    return {"query": names[0], "nearest": names[1:], "target": target, "labels": classes}
