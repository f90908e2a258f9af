"""The common data of all analyses of a trust report: encoders on identical rows, targets, training and test rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from octfm.catalog.labels import LabelTable
from octfm.encoder.embeddings import Embeddings, align
from octfm.errors import EvaluationError
from octfm.evaluation.arms import MAP_AND_ENCODER, NO_VOXELS, with_table
from octfm.evaluation.cases import Cases, Design, Round, Skip, Target, find_targets, make_cases, make_rounds, people
from octfm.evaluation.probe import FOLDS, choose_design, describe, predict, predict_draws
from octfm.evaluation.scoring import (
    Predictions,
    correct,
    count_participants,
    metrics_of,
    paired_difference,
    planned_metrics,
    to_units,
)
from octfm.evaluation.statistics import Bootstrap, Metric, bootstrap, bootstrap_together

Kind = Literal["run", "other run", "baseline", "external", "from scratch"]
FROM_SCRATCH = "from_scratch"
LEVEL = 0.05
"""A difference is claimed if its p is at most this after Holm's correction over all comparisons of its analysis."""


@dataclass(frozen=True, eq=False)
class Task:
    """One target and its rounds of training and test rows, the same for every encoder."""

    cases: Cases
    rounds: tuple[Round, ...]
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return self.cases.target.name

    @property
    def metric(self) -> str:
        """The metric whose comparisons are planned; of two, the one that knows the order of grades."""
        return planned_metrics(self.cases)[-1]


@dataclass(frozen=True, eq=False)
class Study:
    """Encoders on identical acquisitions, the one under evaluation first."""

    encoders: tuple[Embeddings, ...]
    kinds: dict[str, Kind]
    tasks: tuple[Task, ...]
    skipped: tuple[dict[str, str], ...]
    table: LabelTable | None
    design: Design
    seen: np.ndarray
    """bool [N]: rows of participants that an encoder was pretrained on."""
    tested: np.ndarray
    """bool [N]: rows used for testing; the others are used for training."""
    pretrained_on: dict[str, tuple[str, ...]]
    """Scanners in the pretraining of each run."""
    allow_seen: bool = False
    resamples: int = 4000
    seed: int = 0
    scratch: dict[str, Predictions] = field(default_factory=dict)
    """Test predictions of the network trained from scratch, by target."""
    _predictions: dict[tuple[str, str], Predictions] = field(default_factory=dict)

    @property
    def data(self) -> Embeddings:
        """Ids, scanners and labels of the acquisitions, equal in every encoder."""
        return self.encoders[0]

    @property
    def reference(self) -> str:
        return self.encoders[0].name

    @property
    def scanners(self) -> list[str]:
        """Scanners with test acquisitions."""
        return sorted(set(self.data.scanner[self.tested].tolist()))

    def by_person(self) -> "Study":
        """The study with one id for each person and each eye: scanners may spell an id differently."""
        return replace(self, encoders=(self.data.by_person(), *self.encoders[1:]))

    def images(self) -> list[Embeddings]:
        """The encoders that use voxels, except the joint arm, whose distances have no meaning."""
        return [e for e in self.encoders if e.name not in (*NO_VOXELS, MAP_AND_ENCODER)]

    def predictions(self, task: Task, encoder: Embeddings) -> Predictions:
        """Test predictions of a linear probe on the encoder's vectors, fitted on all training rows; cached."""
        key = (task.name, encoder.name)
        if key not in self._predictions:
            self._predictions[key] = predict(task.cases, task.rounds, encoder, "linear", self.seed)
        return self._predictions[key]

    def all_predictions(self, task: Task) -> list[tuple[str, Predictions]]:
        """Test predictions by name: every encoder, the reference first, then the network trained from scratch."""
        named = [(e.name, self.predictions(task, e)) for e in self.encoders]
        return named + ([(FROM_SCRATCH, self.scratch[task.name])] if task.name in self.scratch else [])

    def all_draws(self, task: Task) -> list[tuple[str, list[Predictions]]]:
        """`all_predictions` as lists: every draw of arms that have several, one element for the others."""
        draws = {
            e.name: predict_draws(task.cases, task.rounds, e, "linear", self.seed) for e in self.encoders if e.draws
        }
        return [(name, draws.get(name, [run])) for name, run in self.all_predictions(task)]

    def bootstrap(self, metric: Metric, participants: np.ndarray) -> Bootstrap:
        """Bootstrap over participants with the resamples of this study."""
        return bootstrap(metric, participants, resamples=self.resamples, seed=self.seed)

    def bootstrap_together(self, parts: "Sequence[Part]") -> list[Bootstrap]:
        """Bootstrap several parts over the resamples of all their participants together."""
        pairs = [(p.metric, p.participants) for p in parts]
        return bootstrap_together(pairs, resamples=self.resamples, seed=self.seed)


def make_study(
    encoders: Sequence[Embeddings],
    kinds: Mapping[str, Kind],
    *,
    table: LabelTable | None = None,
    targets: Sequence[str] | None = None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
    seen: np.ndarray | None = None,
    allow_seen: bool = False,
    pretrained_on: Mapping[str, tuple[str, ...]] | None = None,
    resamples: int = 4000,
    seed: int = 0,
) -> Study:
    """Find targets and rounds. Raises EvaluationError if no target can be evaluated, or if a test participant was seen
    in pretraining, unless `allow_seen`. `seen`: bool [N] of rows."""
    align(list(encoders))
    data = encoders[0]
    person = people(data.participant)
    seen = np.isin(person, [] if seen is None else person[seen])
    design, _ = choose_design(data)
    # Without a recommended split, every participant that pretraining has not seen is tested in some fold.
    tasks, skipped = [], []
    for target in find_targets(targets, data, table, orders):
        if target.leakage:
            continue
        try:
            tasks.append(make_task(target, data, table, design, seen, allow_seen, seed))
        except Skip as reason:
            reason.refuse_if_named(target, targets)
            skipped.append({"target": target.name, "sentence": str(reason), "public": reason.public})
    if not tasks:
        why = " ".join(s["sentence"] for s in skipped)
        raise EvaluationError(
            f"no target can be evaluated; give --labels and --target. {why or 'No label column is known.'}"
        )
    tested = (
        np.array([split == "test" for split in data.split]) if design == "recommended_split" else allow_seen | ~seen
    )
    # Retrieval, neighbours and copies also test scans without a label.
    if not allow_seen and (leaked := np.unique(people(data.participant[tested & seen]))).size:
        raise EvaluationError(
            f"{len(leaked)} test participants were in the encoder's pretraining ({leaked[0]} …), without a label of "
            "any target; hold them out of pretraining, leave them out (--exclude), or pass --allow-seen"
        )
    return Study(
        encoders=tuple(with_table(e, table) for e in encoders),
        kinds=dict(kinds),
        tasks=tuple(tasks),
        skipped=tuple(skipped),
        table=table,
        design=design,
        seen=seen,
        tested=tested,
        pretrained_on=dict(pretrained_on or {}),
        allow_seen=allow_seen,
        resamples=resamples,
        seed=seed,
    )


def make_task(
    target: Target,
    data: Embeddings,
    table: LabelTable | None,
    design: Design,
    seen: np.ndarray,
    allow_seen: bool,
    seed: int,
) -> Task:
    """Cases, rounds and facts of a target. Raises Skip if it cannot be evaluated on this data."""
    cases, rounds = make_rounds(make_cases(target, data, table), data, design, seen, allow_seen, FOLDS, seed)
    return Task(cases, tuple(rounds), describe(cases, rounds, design, seen))


def part(run: Predictions, keep: np.ndarray) -> Predictions:
    """The predictions of the rows that `keep`, bool [n], selects."""

    def own(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[keep]

    return Predictions(run.rows[keep], run.value[keep], own(run.log_prior), own(run.grade), run.settings)


@dataclass(frozen=True, eq=False)
class Part:
    """One metric on a subset of the test rows, aggregated to the target's unit."""

    metric: Metric
    participants: np.ndarray
    """[n units]"""
    rare: dict[str, int]
    """Classes with too few participants for an interval."""
    chance: float
    n_participants: int


def part_metric(cases: Cases, run: Predictions, name: str) -> Part:
    """The metric `name` of these predictions as a function of case weights, with the counts an interval needs."""
    units = to_units(cases, run)
    metric, chance = next((fn, chance) for n, fn, chance in metrics_of(cases, units) if n == name)
    _, rare = count_participants(cases, units)
    return Part(metric, units.participant, rare, chance, len(np.unique(units.participant)))


def difference(
    a: Bootstrap | None, b: Bootstrap | None, /, *, planned: bool, lower_is_better: bool = False, **facts: Any
) -> dict[str, Any]:
    """Result row of a − b on the same resamples, before Holm. Without bootstraps the verdict is "inconclusive"."""
    if a is None or b is None:
        unknown = dict.fromkeys(("difference", "low", "high", "p"))
        return {**facts, **unknown, "verdict": "inconclusive", "planned": False}
    return {**facts, **paired_difference(a, b, lower_is_better=lower_is_better), "planned": planned}


def add_claims(comparisons: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `p_holm` and `claim` to the comparisons of one analysis. The claim is the verdict if the comparison is
    planned and p after Holm is at most LEVEL, else "inconclusive"."""
    rows = correct(list(comparisons))
    return [
        {**c, "claim": c["verdict"] if c["p_holm"] is not None and c["p_holm"] <= LEVEL else "inconclusive"}
        for c in rows
    ]
