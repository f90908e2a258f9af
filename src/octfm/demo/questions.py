"""Find out, before hours of work, which columns of a label table can be probed on a user's own scans."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.labels import LabelTable
from octfm.catalog.participants.ids import under_one_id
from octfm.encoder.embeddings import OTHERS, TEXTS, Embeddings, from_columns
from octfm.errors import EvaluationError
from octfm.evaluation.cases import HEALTHY, Skip, column_values, find_targets, make_cases, make_rounds
from octfm.evaluation.probe import FOLDS

MOST = 8
"""Most columns that are probed without being named; with more, the user must choose."""


@dataclass(frozen=True)
class Questions:
    """Targets that can be probed, and why other columns cannot."""

    targets: tuple[str, ...]
    skipped: tuple[dict[str, str], ...]
    """{"target", "sentence"}, as in probe.json."""


def find_questions(
    acquisitions: Sequence[Acquisition], table: LabelTable, wanted: Sequence[str] = (), *, trains: bool
) -> Questions:
    """The columns of `table`, or those `wanted`, that can be probed on these scans.

    `trains`: participants of the training split will be used in pretraining, so they cannot be tested.
    Raises EvaluationError if no column can be probed, if the table is about other participants, or if it has more than
    MOST columns that could be probed and none was named.
    """
    data = _without_vectors(acquisitions)
    seen = np.array([trains and a.split == "train" for a in acquisitions])
    targets: list[str] = []
    skipped: list[dict[str, str]] = []
    for name in wanted or _columns(table, data):
        reasons = []
        found = find_targets([name], data, table)
        for target in found:
            try:
                make_rounds(make_cases(target, data, table), data, "k-fold", seen, False, FOLDS, 0)
            except Skip as reason:
                reasons.append(str(reason))
        if len(reasons) == len(found):
            skipped.append({"target": name, "sentence": reasons[0] if reasons else f"Column {name} has no label."})
        else:
            targets.append(name)
    if not targets:
        why = " ".join(f"{s['target']}: {s['sentence']}" for s in skipped) or "It has no label column."
        people = under_one_id([a.participant for a in acquisitions])
        if used := {person for person, was in zip(people, seen, strict=True) if was}:
            everyone = set(people)
            why += f" {len(used)} of {len(everyone)} participants are pretrained on, so they cannot be tested."
        raise EvaluationError(
            f"{table.path}: these scans cannot answer any question of the table. {why} A probe needs two classes of at "
            f"least {FOLDS} participants each, or a number known of at least {2 * FOLDS}; label more participants, or "
            "leave --labels out"
        )
    if not wanted and len(targets) > MOST:
        raise EvaluationError(
            f"{table.path}: {len(targets)} columns could be probed ({', '.join(targets)}); choose your questions with "
            "--target COLUMN"
        )
    return Questions(tuple(targets), tuple(skipped))


def _columns(table: LabelTable, data: Embeddings) -> list[str]:
    """Every label column; `disease` as well if the diagnoses name healthy eyes."""
    # The scanner is the one that the files state; a column of that name may hold anything.
    columns = [column for column in table.columns if column != "scanner"]
    if "diagnosis" in columns and any(str(v).lower() in HEALTHY for v in column_values("diagnosis", data, table)):
        columns.insert(0, "disease")
    return columns


def _without_vectors(acquisitions: Sequence[Acquisition]) -> Embeddings:
    """What is known of the scans before any of them is embedded."""
    columns = {n: [getattr(a, n) for a in acquisitions] for n in (*TEXTS, *OTHERS) if n != "acquisition"}
    columns["acquisition"] = [a.sop_instance_uid for a in acquisitions]
    return from_columns("catalog", "catalog", {}, columns, np.zeros((len(acquisitions), 0)))
