"""The labelled cases of a probe target, and which participants each fit trains on and tests."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from octfm.catalog.columns import nearest
from octfm.catalog.labels import LabelTable, as_number, bare, one_spelling, stated, with_points
from octfm.catalog.participants.ids import under_one_id
from octfm.encoder.embeddings import Embeddings
from octfm.errors import EvaluationError, UnknownColumn

Design = Literal["recommended_split", "k-fold"]
Unit = Literal["participant", "eye", "acquisition"]
Seen = Collection[str] | Callable[[str], bool]
"""Whom an encoder was pretrained on: ids, or a function that tells whether a participant was among them."""

HEALTHY = ("healthy", "normal", "control", "none", "no disease")
"""Diagnoses that mean no disease, in lower case."""

MANY_NUMBERS = 10
"""Numeric columns with more distinct values than this are regressed; in others, values are grades and classified."""

SEPARATOR = ";"
"""Separator of several labels in one cell (`drusen;dme`); each label becomes a binary target."""

ORDERS: dict[str, tuple[str, ...]] = {
    "study_group": (
        "healthy",
        "pre_diabetes_lifestyle_controlled",
        "oral_medication_and_or_non_insulin_injectable_medication_controlled",
        "insulin_dependent",
    )
}
"""Columns whose classes are grades, lowest first; they also get an ordinal score. AI-READI's study group is the
diabetes status of the participant, not a diagnosis of the eye."""


SEEN = "Test participants were in the pretraining of one of the encoders, so the result would be too good."


@dataclass(frozen=True)
class Target:
    """A label column to predict, and the unit at which it is scored."""

    name: str
    column: str
    unit: Unit
    """Coarsest unit at which the label may be scored; a finer one is used if labels differ inside a unit."""
    leakage: bool = False
    """True for nuisance information such as the scanner: a higher score is worse."""
    order: tuple[str, ...] = ()
    """Grades, lowest first; empty if the classes have no order."""
    label: str | None = None
    """In a column of multi-label cells, the label this binary target predicts."""


TARGETS = (
    Target("disease", "diagnosis", "participant"),
    Target("diagnosis", "diagnosis", "participant"),
    Target("study_group", "study_group", "participant"),
    Target("label", "label", "participant"),
    Target("cst_um", "cst_um", "eye"),
    Target("scanner", "scanner", "acquisition", leakage=True),
)
"""Targets that are probed, if their column exists, when none is named."""


@dataclass(frozen=True, eq=False)
class Cases:
    """The labelled acquisitions of one target."""

    target: Target
    rows: np.ndarray
    """[n] positions in the (sorted) embeddings."""
    label: np.ndarray
    """[n] class index, or the number itself for regression."""
    classes: tuple[str, ...] | None
    """None for regression."""
    participant: np.ndarray
    """[n] one id per person (`people`), for folds and resamples"""
    unit: np.ndarray
    """[n] id of the participant, eye or acquisition; rows of one unit are scored as one case."""
    unit_name: Unit
    unlabelled: int
    """Number of acquisitions without a label."""
    left_out: tuple[str, ...] = ()
    """Classes excluded for having too few participants for the design."""
    ordered: bool = False
    """The classes are grades, lowest first."""
    eye: np.ndarray | None = None
    """[n] the eye of each row if a unit is scored by its worse eye; None if it is scored by the mean of its rows."""

    @property
    def kind(self) -> Literal["binary", "ordinal", "multiclass", "regression"]:
        """The kind of target; two grades are binary."""
        if self.classes is None:
            return "regression"
        return "binary" if len(self.classes) == 2 else "ordinal" if self.ordered else "multiclass"


def log_share(cases: Cases, rows: np.ndarray) -> np.ndarray:
    """[K] log of each class's share of the units of these rows. A unit counts once, however many scans it has, because
    probabilities are given for units; if a unit has several labels, the highest counts, as in scoring."""
    assert cases.classes is not None
    label = _unit_labels(cases, rows)
    # The floor avoids −inf for a class that is absent from a small training subset.
    return np.log(np.maximum(np.bincount(label, minlength=len(cases.classes)) / len(label), 1e-6))


def _unit_labels(cases: Cases, rows: np.ndarray) -> np.ndarray:
    """Class of every unit of these rows; the highest if it has several."""
    _, member = np.unique(cases.unit[rows], return_inverse=True)
    label = np.zeros(member.max() + 1, dtype=int)
    np.maximum.at(label, member, cases.label[rows])
    return label


@dataclass(frozen=True, eq=False)
class Round:
    """Training and test rows of one fit, as positions in the cases."""

    train: np.ndarray
    test: np.ndarray


class Skip(Exception):
    """Raised for a target that cannot be probed on this data; the report shows the message. `public` is the same
    without values of the table; both end with the remedy if there is one."""

    def __init__(self, message: str, public: str = "", remedy: str = ""):
        end = f"; {remedy}." if remedy else ""
        super().__init__(message + end)
        self.public = (public or message) + end

    def refusal(self, target: str) -> EvaluationError:
        """The error for a target that the caller named."""
        return EvaluationError(f"target {target}: {self}", public=self.public)

    def refuse_if_named(self, target: "Target", names: object) -> None:
        """Raise the error if the caller gave names of targets; a rare label of a multi-label column is skipped even
        then."""
        if names is not None and target.label is None:
            raise self.refusal(target.name) from None


def label_columns(data: Embeddings, table: LabelTable | None) -> set[str]:
    """Names of the columns of participants and of the label table."""
    return {*(key for labels in data.participant_labels for key in labels), *(table.columns if table else ())}


def find_targets(
    names: str | Iterable[str] | None,
    data: Embeddings,
    table: LabelTable | None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
) -> list[Target]:
    """The targets of these names, or those of TARGETS whose column exists; multi-label columns give a target per label.

    Any label column can be a target; a column named `disease` is used as it is, not derived from the diagnosis.
    `orders` adds to ORDERS and to those of the table. Raises EvaluationError for a name without a column, also one of
    `orders`, and for `scanner` if the table has such a column: this target is the scanner that the scans' files state.
    """
    columns = {"scanner"} | label_columns(data, table)
    if names is None:
        targets = [target for target in TARGETS if target.column in columns]
    else:
        targets = _named_targets((names,) if isinstance(names, str) else tuple(names), table)
    for name in orders or {}:
        if name not in columns:
            hint = nearest(name, sorted(columns), "columns")
            raise UnknownColumn(
                f"order of grades: no label column {name}; {hint}",
                public="The labels lack a column whose order of grades was given.",
            )
    grades, found = {**ORDERS, **(table.orders if table else {}), **(orders or {})}, []
    for target in targets:
        if target.column not in columns:
            hint = nearest(target.column, sorted(columns), "columns")
            raise UnknownColumn(
                f"target {target.name}: no label column {target.column}; {hint}",
                public="The labels lack a column that was named as a target.",
            )
        target = replace(target, order=grades.get(target.column, ()))
        cells = [cell for cell in column_values(target.column, data, table) if cell]
        if not _is_disease(target) and any(SEPARATOR in cell for cell in cells):
            parts = {part for cell in cells for part in _parts(cell)}
            labels = sorted(part for part in parts if part.lower() not in HEALTHY)
            found += [replace(target, name=f"{target.name}:{label}", label=label) for label in labels]
        else:
            found.append(target)
    return found


def _named_targets(names: Sequence[str], table: LabelTable | None) -> list[Target]:
    """Targets by name, each once; a column of the table takes precedence over the known target of its name."""
    own = {name for name in names if table is not None and name in table.columns}
    if table is not None and "scanner" in own:
        raise EvaluationError(
            f"target scanner: it is the scanner that the scans' files state, and {table.path} has a column scanner as "
            "well; rename that column to probe it, or drop it to probe the scanner of the files",
            public="The label table has a column scanner, which is not the scanner that the scans' files state.",
        )
    known = {target.name: target for target in TARGETS if target.name not in own or target.column == target.name}
    return [known.get(name) or Target(name, name, "participant") for name in dict.fromkeys(names)]


def find_target(
    name: str, data: Embeddings, table: LabelTable | None, orders: Mapping[str, tuple[str, ...]] | None = None
) -> Target:
    """The one target of this name. Raises EvaluationError as `find_targets`, and for a column of several labels."""
    targets = find_targets([name], data, table, orders)
    if len(targets) != 1:
        raise EvaluationError(f"target {name}: its cells hold several labels; name a column with one label per cell")
    return targets[0]


def make_cases(target: Target, data: Embeddings, table: LabelTable | None) -> Cases:
    """Join the target's labels to the embeddings.

    Raises Skip without labels, for `disease` with only one class, and for a column that holds neither numbers nor
    classes: numbers mixed with words or infinities, a different text for most participants, or one class (or label of
    a multi-label column) in two spellings.
    """
    values = column_values(target.column, data, table)
    # Some cells hold separators alone, as where a spreadsheet joined two empty ones.
    rows = np.array([i for i, value in enumerate(values) if value is not None and _parts(value)], dtype=int)
    if rows.size == 0:
        raise Skip(f"No acquisition has a label in column {target.column}.")
    kept = [str(values[i]) for i in rows]
    data = data.by_person()
    participant, unlabelled = data.participant[rows], len(values) - len(rows)
    if _is_disease(target):
        healthy = [all(part.lower() in HEALTHY for part in _parts(v)) for v in kept]
        if all(healthy) or not any(healthy):
            raise Skip(
                f"Column {target.column} does not hold both healthy and diseased eyes "
                f"(healthy is spelt {', '.join(HEALTHY)})."
            )
        # Training uses each eye's label; scoring is per participant, who counts as diseased if either eye is.
        ill, eye = 1 - np.array(healthy, dtype=int), data.eye_id[rows]
        return Cases(
            target, rows, ill, ("healthy", "disease"), participant, participant, "participant", unlabelled, eye=eye
        )
    # Few distinct numbers are grades, such as a severity of 0 to 4, and handled as classes below.
    numbers = [as_number(v) for v in kept]
    numeric = target.label is None and None not in numbers
    if numeric and len(set(numbers)) > MANY_NUMBERS:
        # Measurements of an eye, such as thickness, must not be averaged over both eyes of a participant. A scan of
        # unknown laterality may be of either eye, so it is scored separately.
        by_eye = np.array([data.laterality[i] is not None for i in rows]) & (target.unit != "acquisition")
        unit = np.where(by_eye, data.eye_id[rows], data.acquisition[rows])
        unit_name: Unit = "eye" if by_eye.any() else "acquisition"
        # Nor over visits that found different ones: the mean is easier to predict, and no visit's.
        if len(set(zip(unit.tolist(), numbers, strict=True))) > len(np.unique(unit)):
            unit, unit_name = data.acquisition[rows], "acquisition"
        return Cases(target, rows, np.array(numbers, dtype=float), None, participant, unit, unit_name, unlabelled)
    if target.label is not None:
        parts = [_parts(v) for v in kept]
        _require_one_spelling(target.column, [p for own in parts for p in own if bare(p) == bare(target.label)])
        kept = [target.label if target.label in own else f"no {target.label}" for own in parts]
    else:
        if not numeric:
            _require_classes(target.column, kept, participant)
        kept = one_spelling(kept)
    classes, ordered = _classes(target, kept)
    label = np.array([classes.index(v) for v in kept])
    unit, unit_name = _unit(target.unit, data, rows, label)
    return Cases(target, rows, label, classes, participant, unit, unit_name, unlabelled, ordered=ordered)


def _is_disease(target: Target) -> bool:
    """Whether the target is healthy against any diagnosis."""
    return target.name == "disease" and target.column == "diagnosis"


_AMOUNT = re.compile(r"[<>+-]?\d+(?:[.,]\d+)? ?([%°a-zA-Zµ]{1,5})")
"""A number with a unit, as in 45% and 310 µm."""


def _is_a_word(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return True


def _require_classes(column: str, cells: Sequence[str], participant: np.ndarray) -> None:
    """Raise Skip unless the cells, of which some are no numbers, are classes."""
    words = [cell for cell in cells if as_number(cell) is None]
    if len(words) <= len(cells) / 2 and len(set(cells) - set(words)) > MANY_NUMBERS:
        # As classes, every number would be a class.
        among = f"{len(cells) - len(words)} of {len(cells)} labels in column {column} are finite numbers, the others"
        others = ", ".join(sorted(set(words))[:3])
        raise Skip(f"{among} are not ({others})", f"{among} are not", "write numbers, or leave those cells empty")
    if not any(map(_is_a_word, words)):
        raise Skip(
            f"Column {column} has {words[0]}, neither a finite number nor a class",
            f"Column {column} has numbers that are not finite",
            "write numbers, or leave those cells empty",
        )
    units = Counter(match[1] for cell in words if (match := _AMOUNT.fullmatch(cell)))
    if len(set(cells)) > MANY_NUMBERS and units and (most := units.most_common(1)[0])[1] > len(cells) / 2:
        raise Skip(
            f"{most[1]} of {len(cells)} labels in column {column} are numbers with the unit {most[0]}",
            f"Column {column} has numbers with a unit",
            "write numbers without a unit",
        )
    _require_one_spelling(column, cells)
    alone = Counter(cell for cell, _ in set(zip(cells, participant.tolist(), strict=True)))
    people = len(set(participant.tolist()))
    if len(alone) > MANY_NUMBERS and sum(n == 1 for n in alone.values()) > people / 2:
        raise Skip(
            f"Column {column} has {len(alone)} different texts for {people} participants, which are no classes; write "
            "dates and amounts as plain numbers."
        )


def _require_one_spelling(column: str, cells: Sequence[str]) -> None:
    """Raises Skip if two cells differ only in capitals or spaces."""
    spelt: dict[str, str] = {}
    for cell in cells:
        known = spelt.setdefault(bare(cell), cell)
        if known != cell:
            raise Skip(
                f"Column {column} has {known} and {cell}",
                f"Column {column} spells one label in two ways",
                "spell them alike, or they are two classes",
            )


def _parts(cell: str) -> list[str]:
    """The labels of a cell, without missing values among them."""
    return [part for piece in cell.split(SEPARATOR) if (part := stated(piece))]


def _classes(target: Target, values: Sequence[str]) -> tuple[tuple[str, ...], bool]:
    """The classes in order, and whether the order is one of grades."""
    present = set(values)
    if target.label is not None:
        return (f"no {target.label}", target.label), False
    if present <= set(target.order):
        return tuple(name for name in target.order if name in present), True
    if target.order and target.order != ORDERS.get(target.column):
        raise EvaluationError(
            f"target {target.name}: {min(present - set(target.order))} is not among the grades "
            f"{', '.join(target.order)}"
        )
    numbers = {name: as_number(name) for name in present}
    if all(n is not None for n in numbers.values()):
        return tuple(sorted(present, key=lambda name: numbers[name] or 0.0)), True
    # Healthy first: class 1 of a binary target is then the disease.
    return tuple(sorted(present, key=lambda name: (name.lower() not in HEALTHY, name))), False


def make_rounds(
    cases: Cases, data: Embeddings, design: Design, seen: np.ndarray | None, allow_seen: bool, folds: int, seed: int
) -> tuple[Cases, list[Round]]:
    """The cases without classes too rare for the design, and rounds that together test every test row exactly once.

    `seen` bool [N] marks rows of participants used in an encoder's pretraining; None: nobody can tell. Raises
    EvaluationError on leakage, and Skip if too few participants remain.
    """
    if seen is None and not allow_seen:
        raise EvaluationError(
            "nobody can tell whom the encoder was pretrained on; pass --allow-seen to get results that say so"
        )
    splits, person = np.array([data.split[i] or "" for i in cases.rows]), people(data.participant)
    # The person was seen, under whatever spelling of the id.
    seen = np.isin(person, [] if seen is None else person[seen])[cases.rows]
    if design == "k-fold" and folds < 2:
        raise EvaluationError(f"k-fold: expected at least 2 folds, got {folds}")
    if design == "recommended_split":
        train, tested = np.isin(splits, ("train", "val")), splits == "test"
        _refuse_leakage(cases.participant, data.participant[cases.rows], train, tested, seen, allow_seen)
    else:
        # People seen in pretraining are in the training part of every round and never tested.
        train, tested = np.ones(len(seen), bool), np.ones(len(seen), bool) if allow_seen else ~seen
        if not tested.any():
            raise EvaluationError(
                f"k-fold: all {len(np.unique(cases.participant))} participants were in the encoder's pretraining; "
                "embed participants that were not, or pass --allow-seen to get the result flagged",
                public=SEEN,
            )
    if cases.classes is not None:
        cases, train, tested = _of_common_classes(cases, train, tested, design, folds)
    participants_tested = len(np.unique(cases.participant[tested]))
    if design == "recommended_split":
        if participants_tested < 2 or len(np.unique(cases.participant[train])) < 6:
            raise Skip(
                f"{len(np.unique(cases.participant[train]))} participants with {cases.target.column} to learn from and "
                f"{participants_tested} to test, expected at least 6 and 2; label more, or make new splits."
            )
        return cases, [Round(np.flatnonzero(train), np.flatnonzero(tested))]
    if participants_tested < 2 * folds:
        left = len(np.unique(cases.participant)) - participants_tested
        others = f"; {left} others were in the encoder's training" if left else ""
        raise Skip(
            f"{participants_tested} participants with {cases.target.column} are too few for {folds} folds, expected at "
            f"least {2 * folds}{others}."
        )
    # Fold −1 is never tested: rows of participants seen in pretraining.
    fold = np.full(len(tested), -1)
    fold[tested] = participant_folds(
        cases.participant[tested], cases.label[tested], folds, seed, stratify=cases.classes is not None
    )
    return cases, [Round(np.flatnonzero(fold != k), np.flatnonzero(fold == k)) for k in range(folds)]


def _of_common_classes(
    cases: Cases, train: np.ndarray, tested: np.ndarray, design: Design, folds: int
) -> tuple[Cases, np.ndarray, np.ndarray]:
    """The cases without classes that have too few participants for every round, which the result lists; and which of
    the remaining rows are trained on and tested. Raises Skip unless two classes can be learned and tested."""
    assert cases.classes is not None
    # In k-fold a class needs a participant in every fold; in a single fit, two to learn from.
    needed, counted = (2, train) if design == "recommended_split" else (folds, tested)
    enough = [
        k
        for k in range(len(cases.classes))
        if len(np.unique(cases.participant[(cases.label == k) & counted])) >= needed
    ]
    if len(enough) < 2:
        who = "to learn from" if design == "recommended_split" else "who can be tested, one for each fold"
        found = f"{len(cases.classes)} class{'es' * (len(cases.classes) != 1)}"
        raise Skip(
            f"Fewer than two classes of {cases.target.column} have {needed} participants each {who}: "
            f"{len(np.unique(cases.participant[counted]))} labelled participants, {found}."
        )
    keep = np.isin(cases.label, enough)
    train, tested = train[keep], tested[keep]
    cases = replace(
        cases,
        rows=cases.rows[keep],
        label=np.searchsorted(enough, cases.label[keep]),
        classes=tuple(cases.classes[k] for k in enough),
        participant=cases.participant[keep],
        unit=cases.unit[keep],
        left_out=tuple(name for k, name in enumerate(cases.classes) if k not in enough),
        eye=None if cases.eye is None else cases.eye[keep],
    )
    # If every participant has a diseased eye, all are diseased.
    present = np.unique(_unit_labels(cases, tested)) if tested.any() else np.zeros(0, int)
    if len(present) < 2:
        names = cases.classes or ()
        found = f"Of the classes of {cases.target.column} that can be learned ({', '.join(names)}), the test has "
        found += f"only {names[int(present[0])]}" if len(present) else "none"
        raise Skip(
            f"{found}, and two are needed; label more{', or make new splits' * (design == 'recommended_split')}.",
            f"The test participants have fewer than two classes of {cases.target.column} that can be learned.",
        )
    return cases, train, tested


def participant_folds(
    participant: np.ndarray, label: np.ndarray, folds: int, seed: int, *, stratify: bool
) -> np.ndarray:
    """Fold of every row, int [n]; rows of a participant share a fold, and folds are balanced by class.

    Ids that differ in spelling only share one as well, as they share a split. With `stratify` False (regression), folds
    are balanced by fifths of the participants' mean label. Depends on the set of (participant, label) and the seed, not
    on the order of rows.
    """
    names, member = np.unique(people(participant), return_inverse=True)
    stratum = rarest_class(member, label) if stratify else fifths(member, label)
    # Shuffle, sort by stratum and deal out in turn: every fold gets its share of each stratum.
    shuffled = np.random.default_rng(seed).permutation(len(names))
    dealt = shuffled[np.argsort(stratum[shuffled], kind="stable")]
    fold = np.empty(len(names), dtype=int)
    fold[dealt] = np.arange(len(names)) % folds
    return fold[member]


def people(participant: np.ndarray) -> np.ndarray:
    """The ids [n], each as the first of those that differ from it in spelling only."""
    return np.array(under_one_id(participant.tolist()), dtype=str)


def rarest_class(member: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Class of each group; if its rows have several classes, the rarest, which is hardest to balance."""
    rarity = np.bincount(label)[label]
    # Rarest first: np.unique then finds the rarest class of each group.
    order = np.lexsort((label, rarity))
    return label[order][np.unique(member[order], return_index=True)[1]]


def fifths(member: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Fifth (0..4) of each group by the mean label of its rows; `member` [n] is the group of each row."""
    mean = np.bincount(member, weights=label) / np.bincount(member)
    return np.argsort(np.argsort(mean, kind="stable")) * 5 // len(mean)


def _refuse_leakage(
    participant: np.ndarray,
    named: np.ndarray,
    train: np.ndarray,
    tested: np.ndarray,
    seen: np.ndarray,
    allow_seen: bool,
) -> None:
    """`named` [n]: the ids as they are spelt."""
    crossing = set(participant[tested].tolist()) & set(participant[train].tolist())
    if crossing:
        spelt = np.unique(named[(participant == min(crossing)) & (train | tested)])
        raise EvaluationError(
            f"participant {' or '.join(spelt)} is both in the test split and in train or val; split by participant and "
            "embed again",
            public="A participant is both in the test split and in train or val.",
        )
    leaked = set(participant[tested & seen].tolist())
    if leaked and not allow_seen:
        raise EvaluationError(
            f"{len(leaked)} of {len(np.unique(participant[tested]))} test participants were in the encoder's "
            f"pretraining ({min(leaked)} …), so the result would be too good; hold them out of pretraining, or pass "
            "--allow-seen to get the result flagged",
            public=SEEN,
        )


def column_values(name: str, data: Embeddings, table: LabelTable | None) -> list[str | None]:
    """Label of every row: from the label table, else the participant's columns; the scanner is the file header's.
    Raises EvaluationError if a comma may separate thousands."""
    if name == "scanner":
        return list(data.scanner)
    if table is not None and name in table.columns:
        return table.join(name, zip(data.acquisition, data.participant, data.laterality, strict=True))
    try:
        return with_points([labels.get(name, "") for labels in data.participant_labels])
    except ValueError as doubt:
        table_of = "in the table of participants, and scan again, or in a table for --labels"
        raise EvaluationError(f"{name} of the participants: {doubt} {table_of}") from None


def _unit(coarsest: Unit, data: Embeddings, rows: np.ndarray, label: np.ndarray) -> tuple[np.ndarray, Unit]:
    """The coarsest unit, `coarsest` or finer, whose rows all have the same label."""
    units: tuple[tuple[Unit, np.ndarray], ...] = (("participant", data.participant[rows]), ("eye", data.eye_id[rows]))
    start = {"participant": 0, "eye": 1, "acquisition": 2}[coarsest]
    for name, ids in units[start:]:
        if len(set(zip(ids.tolist(), label.tolist(), strict=True))) == len(np.unique(ids)):
            return ids, name
    return data.acquisition[rows], "acquisition"
