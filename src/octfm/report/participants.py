"""Who the data came from, for a model card or a paper: the way from files to tested participants, and their characteristics by split."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from octfm.catalog.acquisition import Acquisition
from octfm.report.sources import Sources, number
from octfm.store.layout import StoreRow

SPLITS = ("train", "val", "test", "none")
SMALL = 5
"""A group of fewer people is not counted on a page that may be published: it could be recognised."""
GROUPS = ("study_group", "diagnosis", "clinical_site", "sex", "race", "ethnicity")
"""Columns of participants that are counted where the data has them, in this order."""
MOST_GROUPS = 12


@dataclass(frozen=True)
class Step:
    """One box of the flow."""

    label: str
    volumes: int | None
    participants: int | None
    detail: str = ""
    kind: Literal["all", "lost", "part"] = "all"
    """What is left, what was left out on the way, or a part of what is left."""


def flow(sources: Sources) -> list[Step]:
    """From the files that were found to the participants that a probe was tested on; steps that nothing is known of are left out."""
    steps: list[Step] = []
    if sources.catalog is not None:
        s = sources.catalog.summary()
        files = s["accepted"] + s["rejected"] + s["skipped"]
        steps.append(Step("Image files found", files, None))
        if s["skipped"]:
            steps.append(
                Step("Skipped on purpose (no structural OCT volume)", s["skipped"], None, _counts(s["skips"]), "lost")
            )
        if s["rejected"]:
            steps.append(Step("Rejected, each with a reason", s["rejected"], None, _counts(s["rejects"]), "lost"))
        steps.append(Step("Accepted OCT volumes", s["accepted"], s["participants"]))
    rows = sources.store.rows if sources.store is not None else None
    if rows is not None:
        lost = Counter(u.code for u in sources.unprepared)
        if lost:
            steps.append(Step("Could not be prepared", sum(lost.values()), None, _counts(lost), "lost"))
        steps.append(Step("Prepared", len(rows), len({row.participant for row in rows})))
    for split, own in by_split(sources).items():
        name = {"train": "Training split", "val": "Validation split", "test": "Test split"}.get(split, "In no split")
        steps.append(Step(name, len(own), len({a.participant for a in own}), kind="part"))
    trained = (sources.record.get("store") or {}).get("train_participants")
    if trained is not None:
        steps.append(Step("Pretrained on", None, int(trained), kind="part"))
    for target in tested(sources.probe):
        steps.append(
            Step(
                f"Probed for {target['target']}",
                target["n_test_acquisitions"],
                target["n_test_participants"],
                _probed(target),
                "part",
            )
        )
    return steps


def by_split(sources: Sources) -> dict[str, Sequence[StoreRow | Acquisition]]:
    """What was prepared, or else accepted, by split in the usual order."""
    known: Sequence[StoreRow | Acquisition] = ()
    if sources.store is not None:
        known = sources.store.rows
    elif sources.catalog is not None:
        known = sources.catalog.acquisitions
    return {split: own for split in SPLITS if (own := [a for a in known if (a.split or "none") == split])}


def characteristics(sources: Sources) -> list[tuple[str, list[str]]]:
    """Rows of a table with one column per split, (name, a cell for each), as Table 1 of a clinical paper; small groups uncounted."""
    splits = by_split(sources)
    if not splits:
        return []
    people = [{a.participant: a.participant_labels for a in own} for own in splits.values()]
    table: list[tuple[str, list[str]]] = [
        ("Participants", [f"{len(p):,}" for p in people]),
        ("Eyes of known side", [f"{len({a.eye_id for a in own if a.laterality}):,}" for own in splits.values()]),
        ("Volumes", [f"{len(own):,}" for own in splits.values()]),
    ]
    for scanner in sorted({a.scanner for own in splits.values() for a in own}):
        table.append(
            (f"Volumes of {scanner}", [f"{sum(a.scanner == scanner for a in own):,}" for own in splits.values()])
        )
    if any("age" in labels for own in people for labels in own.values()):
        table.append(
            (
                "Age, median (quartiles)",
                [_quartiles([number(labels.get("age")) for labels in own.values()]) for own in people],
            )
        )
    for column in GROUPS:
        values = sorted({labels[column] for own in people for labels in own.values() if labels.get(column)})
        if not 1 < len(values) <= MOST_GROUPS:
            continue
        counted = [
            guarded({value: sum(labels.get(column) == value for labels in own.values()) for value in values})
            for own in people
        ]
        for value in values:
            cells = [text[value] for text in counted]
            table.append((f"{column.replace('_', ' ')}: {value.replace('_', ' ')}", cells))
    return table


def tested(probe: dict[str, Any] | None) -> list[dict[str, Any]]:
    """One result per target of a probe, leakage aside: whom it was fitted and scored on."""
    rows = {r["target"]: r for r in reversed(probe["results"]) if not r.get("leakage")} if probe is not None else {}
    return list(reversed(rows.values()))


def _probed(row: dict[str, Any]) -> str:
    per_class = row.get("test_participants_per_class") or {}
    each = "in every fold fitted on about" if row.get("design") == "k-fold" else "fitted on"
    text = f"{each} {row['n_train_participants']} other participants"
    shown = ", ".join(f"{name} {count}" for name, count in guarded(per_class).items())
    return text + (f"; {shown}" if shown else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items())


def guarded(counts: dict[str, int]) -> dict[str, str]:
    """Counts of people as text; small ones are withheld, and where only one is, the next smallest too, lest it follow from the total."""
    withheld = {name for name, count in counts.items() if 0 < count < SMALL}
    if len(withheld) == 1:
        others = {name: count for name, count in counts.items() if count >= SMALL}
        withheld |= {min(others, key=others.__getitem__)} if others else set()
    total = max(1, sum(counts.values()))
    return {
        name: "withheld" if name in withheld else f"{count:,} ({count / total:.0%})" for name, count in counts.items()
    }


def _quartiles(values: list[float]) -> str:
    known = [v for v in values if np.isfinite(v)]
    if len(known) < SMALL:
        return f"fewer than {SMALL} known"
    low, middle, high = np.percentile(known, (25, 50, 75))
    missing = f"; unknown for {len(values) - len(known)}" if len(known) < len(values) else ""
    return f"{middle:.0f} ({low:.0f} to {high:.0f}){missing}"
