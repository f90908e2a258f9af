"""What every question of the trust report shares: encoders on identical rows, targets, who is trained on and who is tested."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from octfm.catalog.labels import LabelTable
from octfm.encoder.embeddings import Embeddings, align
from octfm.errors import EvaluationError
from octfm.evaluation.cases import Cases, Design, Round, Skip, Target, find_targets, make_cases, make_rounds
from octfm.evaluation.probe import FOLDS, choose_design, describe, predict
from octfm.evaluation.scoring import Predictions, correct, finite, metrics_of, to_units
from octfm.evaluation.statistics import MIN_PARTICIPANTS, Bootstrap, Metric, compare, interval
from octfm.trust.leaderboard import metadata

Kind = Literal["run", "other run", "baseline", "external", "from scratch"]
FROM_SCRATCH = "from_scratch"
LEVEL = 0.05
"""A difference is claimed where its p stays below this after Holm's correction over all comparisons of its question."""


@dataclass(frozen=True, eq=False)
class Task:
    """One target, with the participants it is trained and tested on; the same for every encoder."""

    cases: Cases
    rounds: tuple[Round, ...]
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        return self.cases.target.name

    @property
    def metric(self) -> str:
        """The one that is compared; the others describe."""
        return {"regression": "r2", "ordinal": "kappa"}.get(self.cases.kind, "auroc")


@dataclass(frozen=True, eq=False)
class Study:
    """Encoders on identical acquisitions, the one of interest first; `data` says who and what the acquisitions are."""

    encoders: tuple[Embeddings, ...]
    kinds: dict[str, Kind]
    tasks: tuple[Task, ...]
    skipped: tuple[dict[str, str], ...]
    table: LabelTable | None
    design: Design
    seen: np.ndarray
    """bool [N]: participants that an encoder was pretrained on."""
    tested: np.ndarray
    """bool [N]: acquisitions that may be tested; the others may be learned from."""
    pretrained_on: dict[str, tuple[str, ...]]
    """Scanners in the pretraining of each run."""
    allow_seen: bool = False
    resamples: int = 4000
    seed: int = 0
    scratch: dict[str, Predictions] = field(default_factory=dict)
    """By target, what a network trained from scratch for it says of the tested rows."""
    _said: dict[tuple[str, str], Predictions] = field(default_factory=dict)

    @property
    def data(self) -> Embeddings:
        return self.encoders[0]

    @property
    def reference(self) -> str:
        return self.encoders[0].name

    @property
    def scanners(self) -> list[str]:
        """Those that anybody is tested on."""
        return sorted(set(self.data.scanner[self.tested].tolist()))

    def images(self) -> list[Embeddings]:
        """The encoders that look at an image."""
        return [e for e in self.encoders if e.name not in ("metadata", "tissue_map")]

    def vectors(self, task: Task, encoder: Embeddings) -> Embeddings:
        """Of this encoder for this target: metadata must not hold the answer."""
        return (
            replace(metadata(self.data, without=task.cases.target.column), name=encoder.name)
            if encoder.name == "metadata"
            else encoder
        )

    def said(self, task: Task, encoder: Embeddings) -> Predictions:
        """What a linear model on the encoder's vectors says of every tested row, fitted on all that may be learned from. Kept."""
        key = (task.name, encoder.name)
        if key not in self._said:
            self._said[key] = predict(task.cases, task.rounds, self.vectors(task, encoder), "linear", self.seed)
        return self._said[key]

    def everyone(self, task: Task) -> list[tuple[str, Predictions]]:
        """Who says what of the tested rows, the reference first; with the network trained from scratch, where there is one."""
        named = [(e.name, self.said(task, e)) for e in self.encoders]
        return named + ([(FROM_SCRATCH, self.scratch[task.name])] if task.name in self.scratch else [])


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
    """Find targets and rounds. EvaluationError where a test participant was pretrained on (unless `allow_seen`) or no target is left."""
    align(list(encoders))
    data = encoders[0]
    seen = np.zeros(len(data.acquisition), bool) if seen is None else seen
    design, _ = choose_design(data)
    tasks, skipped = [], []
    for target in find_targets(targets, data, table, orders):
        if target.leakage:
            continue
        try:
            tasks.append(make_task(target, data, table, design, seen, allow_seen, seed))
        except Skip as reason:
            if targets is not None:
                raise EvaluationError(f"target {target.name}: {reason}") from None
            skipped.append({"target": target.name, "sentence": str(reason)})
    if not tasks:
        why = " ".join(s["sentence"] for s in skipped)
        raise EvaluationError(
            f"no target can be judged: {why or 'no label column is known'}; give --labels and --target"
        )
    tested = (
        np.array([split == "test" for split in data.split]) if design == "recommended_split" else allow_seen | ~seen
    )
    return Study(
        tuple(encoders), dict(kinds), tuple(tasks), tuple(skipped), table, design, seen, tested, dict(pretrained_on or {}),
        allow_seen, resamples, seed,
    )  # fmt: skip


def make_task(
    target: Target,
    data: Embeddings,
    table: LabelTable | None,
    design: Design,
    seen: np.ndarray,
    allow_seen: bool,
    seed: int,
) -> Task:
    """Raises Skip where there is nothing to learn or too few to learn from."""
    cases, rounds = make_rounds(make_cases(target, data, table), data, design, seen, allow_seen, FOLDS, seed)
    return Task(cases, tuple(rounds), describe(cases, rounds, design, seen))


def part(run: Predictions, keep: np.ndarray) -> Predictions:
    """The predictions at which `keep` bool [n] is true."""

    def own(values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[keep]

    return Predictions(run.rows[keep], run.value[keep], own(run.log_prior), own(run.grade), run.settings)


@dataclass(frozen=True, eq=False)
class Part:
    """One metric on some of the tested rows, scored at the target's unit."""

    metric: Metric
    participants: np.ndarray
    """[n units]"""
    rare: dict[str, int]
    """Classes with too few participants for an interval."""
    chance: float
    n_participants: int


def part_metric(cases: Cases, run: Predictions, name: str) -> Part:
    """The metric `name` of these predictions as a function of weights, and whether an interval may be given."""
    units = to_units(cases, run)
    metric, chance = next((fn, chance) for n, fn, chance in metrics_of(cases, units) if n == name)
    people = len(np.unique(units.participant))
    counts = {"": people}
    if cases.classes is not None:
        counts = {c: len(np.unique(units.participant[units.truth == k])) for k, c in enumerate(cases.classes)}
    rare = {c: n for c, n in counts.items() if n < MIN_PARTICIPANTS}
    return Part(metric, units.participant, rare, chance, people)


def estimate(boot: Bootstrap | None, alone: float | None = None) -> dict[str, float | None]:
    """`estimate`, `low` and `high` (BCa); without a bootstrap the number `alone`."""
    if boot is None:
        return {"estimate": finite(alone), "low": None, "high": None}
    low, high = interval(boot)
    return {"estimate": finite(boot.estimate), "low": finite(low), "high": finite(high)}


def difference(
    a: Bootstrap | None, b: Bootstrap | None, /, *, planned: bool, lower_is_better: bool = False, **facts: Any
) -> dict[str, Any]:
    """a − b on the same resamples, before Holm; a verdict is about a. Without a bootstrap: inconclusive."""
    if a is None or b is None:
        return {
            **facts,
            "difference": None,
            "low": None,
            "high": None,
            "p": None,
            "verdict": "inconclusive",
            "planned": False,
        }
    c = compare(a, b)
    verdict = c.verdict
    if lower_is_better and verdict != "inconclusive":
        verdict = "worse" if verdict == "better" else "better"
    return {
        **facts,
        "difference": finite(c.difference),
        "low": finite(c.low),
        "high": finite(c.high),
        "p": c.p,
        "verdict": verdict,
        "planned": planned,
    }


def claimed(comparisons: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One question's comparisons with `p_holm`, and `claim`: the verdict where it stands after Holm, else inconclusive.

    A comparison that was not planned is never claimed.
    """
    rows = correct(list(comparisons))
    return [
        {**c, "claim": c["verdict"] if c["p_holm"] is not None and c["p_holm"] <= LEVEL else "inconclusive"}
        for c in rows
    ]
