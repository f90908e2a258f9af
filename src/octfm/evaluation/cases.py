"""Who is tested, on which label, after training on whom: the cases of a probe target and its rounds of fitting."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from octfm.catalog.labels import LabelTable, as_number
from octfm.encoder.embeddings import Embeddings
from octfm.errors import EvaluationError

Design = Literal["recommended_split", "k-fold"]
Unit = Literal["participant", "eye", "acquisition"]

HEALTHY = ("healthy", "normal", "control", "none", "no disease")
"""Diagnoses that count as no disease, lower case."""

MANY_NUMBERS = 10
"""A column of more different numbers than this is regressed; of fewer, it is a grade and classified."""

SEPARATOR = ";"
"""Between the labels of a cell that holds several (`drusen;dme`): each becomes a yes-or-no target of its own."""

ORDERS: dict[str, tuple[str, ...]] = {
    "study_group": (
        "healthy",
        "pre_diabetes_lifestyle_controlled",
        "oral_medication_and_or_non_insulin_injectable_medication_controlled",
        "insulin_dependent",
    )
}
"""Columns whose classes are grades, lowest first: scored in their order as well. AI-READI's study group is a diabetes status, and
no diagnosis of an eye."""


@dataclass(frozen=True)
class Target:
    """What a probe predicts, and the unit at which it is scored."""

    name: str
    column: str
    unit: Unit
    """Coarsest unit at which the label may be scored; finer where labels differ inside a unit."""
    leakage: bool = False
    """Something an encoder should not know: a higher score is worse."""
    order: tuple[str, ...] = ()
    """Grades, lowest first, where the classes have an order."""
    label: str | None = None
    """Of a cell with several labels, the one that this target asks for."""


TARGETS = (
    Target("disease", "diagnosis", "participant"),
    Target("diagnosis", "diagnosis", "participant"),
    Target("study_group", "study_group", "participant"),
    Target("cst_um", "cst_um", "eye"),
    Target("scanner", "scanner", "acquisition", leakage=True),
)


@dataclass(frozen=True, eq=False)
class Cases:
    """The labelled acquisitions of one target."""

    target: Target
    rows: np.ndarray
    """[n] positions in the (sorted) embeddings."""
    label: np.ndarray
    """[n] class index, or the number itself for regression."""
    classes: tuple[str, ...] | None
    """None: regression."""
    participant: np.ndarray
    """[n]"""
    unit: np.ndarray
    """[n] id of the participant, eye or acquisition that the row is scored with."""
    unit_name: Unit
    unlabelled: int
    left_out: tuple[str, ...] = ()
    """Classes with too few participants for the design."""
    ordered: bool = False
    """The classes are grades, lowest first."""
    eye: np.ndarray | None = None
    """[n] the eye of each row where a unit is as ill as its worse eye, and is scored by it; None: by the mean of its rows."""

    @property
    def kind(self) -> Literal["binary", "ordinal", "multiclass", "regression"]:
        if self.classes is None:
            return "regression"
        return "binary" if len(self.classes) == 2 else "ordinal" if self.ordered else "multiclass"


@dataclass(frozen=True, eq=False)
class Round:
    """One fit: positions in the cases to train on and to predict."""

    train: np.ndarray
    test: np.ndarray


class Skip(Exception):
    """This target cannot be probed here; the message is the sentence that the report shows."""


def find_targets(
    names: Sequence[str] | None,
    data: Embeddings,
    table: LabelTable | None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Target]:
    """The named targets, else those of TARGETS whose column exists. Any label column can be a target; `orders` adds to ORDERS."""
    columns = {
        "scanner",
        *(key for labels in data.participant_labels for key in labels),
        *(table.columns if table else ()),
    }
    known = {t.name: t for t in TARGETS}
    if names is None:
        targets = [t for t in TARGETS if t.column in columns]
    else:
        targets = [known.get(name) or Target(name, name, "participant") for name in names]
    grades, found = {**ORDERS, **(orders or {})}, []
    for target in targets:
        if target.column not in columns:
            raise EvaluationError(
                f"target {target.name}: no label column {target.column}; columns: {', '.join(sorted(columns))}"
            )
        target = replace(target, order=grades.get(target.column, ()))
        several = {
            part.strip()
            for v in _column(target.column, data, table)
            if v and SEPARATOR in v
            for part in v.split(SEPARATOR)
        }
        if several:
            cells = {part.strip() for v in _column(target.column, data, table) if v for part in v.split(SEPARATOR)}
            labels = sorted(cells - {"", *(c for c in cells if c.lower() in HEALTHY)})
            found += [replace(target, name=f"{target.name}:{label}", label=label) for label in labels]
        else:
            found.append(target)
    return found


def make_cases(target: Target, data: Embeddings, table: LabelTable | None) -> Cases:
    """Join the target's labels to the embeddings. Raises Skip where there is nothing to learn."""
    values = _column(target.column, data, table)
    rows = np.array([i for i, value in enumerate(values) if value is not None], dtype=int)
    if rows.size == 0:
        raise Skip(f"No acquisition has a label in column {target.column}.")
    kept = [str(values[i]) for i in rows]
    participant, unlabelled = data.participant[rows], len(values) - len(rows)
    if target.name == "disease":
        healthy = [v.lower() in HEALTHY for v in kept]
        if all(healthy) or not any(healthy):
            raise Skip(
                f"Column {target.column} does not hold both healthy and diseased eyes (healthy is spelt {', '.join(HEALTHY)})."
            )
        # The probe is trained on each eye's own label; the participant is scored, and is diseased when any eye is.
        ill, eye = 1 - np.array(healthy, dtype=int), data.eye_id[rows]
        return Cases(
            target, rows, ill, ("healthy", "disease"), participant, participant, "participant", unlabelled, eye=eye
        )
    numbers = [as_number(v) for v in kept]
    if target.label is None and None not in numbers and len(set(numbers)) > MANY_NUMBERS:
        # A number measured on an eye is not averaged over both eyes of a participant.
        label, classes = np.array(numbers, dtype=float), None
        unit, unit_name = (
            (data.acquisition[rows], "acquisition") if target.unit == "acquisition" else (data.eye_id[rows], "eye")
        )
        return Cases(target, rows, label, classes, participant, unit, unit_name, unlabelled)
    if target.label is not None:
        kept = [
            target.label if target.label in [part.strip() for part in v.split(SEPARATOR)] else f"no {target.label}"
            for v in kept
        ]
    classes, ordered = _classes(target, kept)
    label = np.array([classes.index(v) for v in kept])
    unit, unit_name = _unit(target.unit, data, rows, label)
    return Cases(target, rows, label, classes, participant, unit, unit_name, unlabelled, ordered=ordered)


def _classes(target: Target, values: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The classes in their order, and whether that order means something."""
    present = set(values)
    if target.label is not None:
        return (f"no {target.label}", target.label), False
    if present <= set(target.order):
        return tuple(name for name in target.order if name in present), True
    if target.order and target.column not in ORDERS:
        raise EvaluationError(
            f"target {target.name}: {min(present - set(target.order))} is not among the grades {', '.join(target.order)}"
        )
    numbers = {name: as_number(name) for name in present}
    if all(n is not None for n in numbers.values()):
        return tuple(sorted(present, key=lambda name: numbers[name] or 0.0)), True
    # Healthy first, so that it is class 0 of a binary target.
    return tuple(sorted(present, key=lambda name: (name.lower() not in HEALTHY, name))), False


def make_rounds(
    cases: Cases, data: Embeddings, design: Design, seen: np.ndarray, allow_seen: bool, folds: int, seed: int
) -> tuple[Cases, list[Round]]:
    """The cases without classes too rare for the design, and the rounds that test each tested row exactly once.

    `seen` bool [N] marks the rows of participants that an encoder was pretrained on. Raises EvaluationError on leakage, Skip where too
    few participants remain.
    """
    splits = np.array([data.split[i] or "" for i in cases.rows])
    seen = seen[cases.rows]
    if design == "k-fold" and folds < 2:
        raise EvaluationError(f"k-fold: expected at least 2 folds, got {folds}")
    if design == "recommended_split":
        train, tested = np.isin(splits, ("train", "val")), splits == "test"
        _refuse_leakage(cases.participant, train, tested, seen, allow_seen)
    else:
        # Seen participants help to train in every round and are never tested.
        train, tested = np.ones(len(seen), bool), np.ones(len(seen), bool) if allow_seen else ~seen
        if not tested.any():
            raise EvaluationError(
                f"k-fold: all {len(np.unique(cases.participant))} participants were in the encoder's pretraining; "
                "embed participants that it has not seen, or pass --allow-seen to get the result flagged"
            )
    # A class needs participants to learn from in every round; rarer ones are left out and the result says so.
    if cases.classes is not None:
        needed, counted = (2, train) if design == "recommended_split" else (folds, tested)
        enough = [
            k
            for k in range(len(cases.classes))
            if len(np.unique(cases.participant[(cases.label == k) & counted])) >= needed
        ]
        if len(enough) < 2:
            raise Skip(
                f"Fewer than two classes of {cases.target.column} have {needed} participants each to learn from."
            )
        keep = np.isin(cases.label, enough)
        cases, train, tested = _only_classes(cases, enough), train[keep], tested[keep]
        if len(np.unique(cases.label[tested])) < 2:
            raise Skip(f"The test participants have fewer than two classes of {cases.target.column}.")
    participants_tested = len(np.unique(cases.participant[tested]))
    if design == "recommended_split":
        if participants_tested < 2 or len(np.unique(cases.participant[train])) < 6:
            raise Skip(f"Too few participants with {cases.target.column} on one side of the split.")
        return cases, [Round(np.flatnonzero(train), np.flatnonzero(tested))]
    if participants_tested < 2 * folds:
        raise Skip(f"{participants_tested} participants with {cases.target.column} are too few for {folds} folds.")
    fold = np.full(len(tested), -1)
    fold[tested] = participant_folds(
        cases.participant[tested], cases.label[tested], folds, seed, stratify=cases.classes is not None
    )
    return cases, [Round(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def participant_folds(
    participant: np.ndarray, label: np.ndarray, folds: int, seed: int, *, stratify: bool
) -> np.ndarray:
    """Fold of every row, int [n]; a participant is in one fold, and classes (or quantiles, unless `stratify`) are spread evenly over folds.

    Depends on the set of (participant, label) and the seed, not on the order of rows.
    """
    names, member = np.unique(participant, return_inverse=True)
    if stratify:
        # A participant with two classes counts for the rarer one, which is harder to spread.
        rarity = np.bincount(label)[label]
        order = np.lexsort((label, rarity))
        first = np.unique(member[order], return_index=True)[1]
        stratum = label[order][first]
    else:
        mean = np.bincount(member, weights=label) / np.bincount(member)
        stratum = np.argsort(np.argsort(mean, kind="stable")) * 5 // len(names)
    shuffled = np.random.default_rng(seed).permutation(len(names))
    dealt = shuffled[np.argsort(stratum[shuffled], kind="stable")]
    fold = np.empty(len(names), dtype=int)
    fold[dealt] = np.arange(len(names)) % folds
    return fold[member]


def _refuse_leakage(
    participant: np.ndarray, train: np.ndarray, tested: np.ndarray, seen: np.ndarray, allow_seen: bool
) -> None:
    crossing = set(participant[tested].tolist()) & set(participant[train].tolist())
    if crossing:
        raise EvaluationError(
            f"participant {min(crossing)} is in the test split and in train or val; split by participant, then embed again"
        )
    leaked = set(participant[tested & seen].tolist())
    if leaked and not allow_seen:
        raise EvaluationError(
            f"{len(leaked)} of {len(np.unique(participant[tested]))} test participants were in the encoder's pretraining "
            f"({min(leaked)} …); the result would be too good: hold them out of pretraining, or pass --allow-seen to get it flagged"
        )


def _column(name: str, data: Embeddings, table: LabelTable | None) -> list[str | None]:
    """The label of every row: from the label table, else the participant's own columns. The scanner is what the header said."""
    if name == "scanner":
        return list(data.scanner)
    if table is not None and name in table.columns:
        return table.join(name, zip(data.acquisition, data.participant, data.laterality, strict=True))
    return [labels.get(name) or None for labels in data.participant_labels]


def _unit(coarsest: Unit, data: Embeddings, rows: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, Unit]:
    """The coarsest unit, at most `coarsest`, inside which no two rows carry different labels."""
    units: tuple[tuple[Unit, np.ndarray], ...] = (("participant", data.participant[rows]), ("eye", data.eye_id[rows]))
    start = {"participant": 0, "eye": 1, "acquisition": 2}[coarsest]
    for name, ids in units[start:]:
        if len(set(zip(ids.tolist(), label.tolist(), strict=True))) == len(np.unique(ids)):
            return ids, name
    return data.acquisition[rows], "acquisition"


def _only_classes(cases: Cases, enough: list[int]) -> Cases:
    if cases.classes is None or len(enough) == len(cases.classes):
        return cases
    keep = np.isin(cases.label, enough)
    return replace(
        cases,
        rows=cases.rows[keep],
        label=np.searchsorted(enough, cases.label[keep]),
        classes=tuple(cases.classes[k] for k in enough),
        participant=cases.participant[keep],
        unit=cases.unit[keep],
        left_out=tuple(name for k, name in enumerate(cases.classes) if k not in enough),
        eye=None if cases.eye is None else cases.eye[keep],
    )
