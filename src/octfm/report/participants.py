"""Participants of a run, for cards and papers: the flow from files to tests, and characteristics by split."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from octfm.catalog.acquisition import Acquisition
from octfm.display import readable
from octfm.report import words
from octfm.report.sources import Sources, lookup, number
from octfm.store.layout import StoreRow

SPLITS = ("train", "val", "test", "none")
SMALL = 5
"""Counts of fewer people are withheld from pages that may be published, since these could be recognised."""
GROUPS = ("study_group", "diagnosis", "clinical_site", "sex", "race", "ethnicity")
"""Columns of participants to count, in this order, if the data has them."""
MOST_GROUPS = 12
"""Columns with more values than this are not shown."""


@dataclass(frozen=True)
class Step:
    """One box of the participant flow."""

    label: str
    volumes: int | None
    participants: int | None
    detail: str = ""
    kind: Literal["all", "skipped", "rejected", "not prepared", "split", "part"] = "all"
    """Everything that remains (all), why something was lost on the way, or a part of what remains (split, part)."""

    @property
    def is_lost(self) -> bool:
        return self.kind in ("skipped", "rejected", "not prepared")


def flow(sources: Sources) -> list[Step]:
    """Steps from the files found to the participants tested; unknown steps are left out."""
    steps: list[Step] = []
    if sources.catalog is not None:
        s = sources.catalog.summary()
        files = s["accepted"] + s["rejected"] + s["skipped"]
        steps.append(Step("Image files found", files, None))
        if s["skipped"]:
            label = "Skipped on purpose (no structural OCT volume)"
            steps.append(Step(label, s["skipped"], None, _counts(s["skips"]), "skipped"))
        if s["rejected"]:
            steps.append(Step("Rejected, each with a reason", s["rejected"], None, _counts(s["rejects"]), "rejected"))
        steps.append(Step("Accepted OCT volumes", s["accepted"], s["participants"]))
    rows = sources.store.rows if sources.store is not None else None
    if rows is not None:
        lost = Counter(u.code for u in sources.unprepared)
        if lost:
            steps.append(Step("Could not be prepared", sum(lost.values()), None, _counts(lost), "not prepared"))
        steps.append(Step("Prepared", len(rows), len({row.participant for row in rows})))
    for split, own in by_split(sources).items():
        name = {"train": "Training split", "val": "Validation split", "test": "Test split"}.get(split, "In no split")
        steps.append(Step(name, len(own), len({a.participant for a in own}), kind="split"))
    trained = lookup(sources.record, "store", "train_participants")
    if trained is not None:
        steps.append(Step("Pretrained on", None, int(trained), kind="part"))
    for row in tested(sources.probe):
        counts = row["n_test_acquisitions"], row["n_test_participants"]
        steps.append(Step(f"Probed for {row['target']}", *counts, _probed(row), "part"))
    return steps


def by_split(sources: Sources) -> dict[str, Sequence[StoreRow | Acquisition]]:
    """Prepared volumes, or accepted ones without a store, by split in the usual order."""
    known: Sequence[StoreRow | Acquisition] = ()
    if sources.store is not None:
        known = sources.store.rows
    elif sources.catalog is not None:
        known = sources.catalog.acquisitions
    return {split: own for split in SPLITS if (own := [a for a in known if (a.split or "none") == split])}


def characteristics(sources: Sources) -> list[tuple[str, list[str]]]:
    """Table 1 of a clinical paper as (name, a cell per split); small groups are withheld."""
    splits = by_split(sources)
    if not splits:
        return []
    people = [_labels(own) for own in splits.values()]
    table: list[tuple[str, list[str]]] = [
        ("Participants", [f"{len(p):,}" for p in people]),
        ("Eyes of known side", [f"{len({a.eye_id for a in own if a.laterality}):,}" for own in splits.values()]),
        ("Volumes", [f"{len(own):,}" for own in splits.values()]),
    ]
    for scanner in sorted({a.scanner for own in splits.values() for a in own}):
        counts = [sum(a.scanner == scanner for a in own) for own in splits.values()]
        table.append((f"Volumes of {readable(scanner)}", [f"{n:,}" for n in counts]))
    everyone = [labels for own in people for labels in own]
    if any("age" in labels for labels in everyone):
        ages = [[number(labels.get("age")) for labels in own] for own in people]
        table.append(("Age, median (quartiles)", [_quartiles(own) for own in ages]))
    for column in GROUPS:
        values = sorted({labels[column] for labels in everyone if labels.get(column)})
        # One value says nothing; very many are free text, which could identify people.
        if not 1 < len(values) <= MOST_GROUPS:
            continue
        found = [Counter(labels.get(column) for labels in own) for own in people]
        counted = [guarded({value: own[value] for value in values}) for own in found]
        table += [(f"{readable(column)}: {readable(value)}", [text[value] for text in counted]) for value in values]
    return table


def _labels(rows: Sequence[StoreRow | Acquisition]) -> list[dict[str, str]]:
    """The labels of each participant, merged over rows: a table may have them under only one of two ids."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        own = found.setdefault(row.participant, {})
        own |= {column: value for column, value in row.participant_labels.items() if value or column not in own}
    return [*found.values()]


def tested(probe: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The first result of every target of a probe except the scanner, for its counts of participants."""
    rows: dict[str, dict[str, Any]] = {}
    for r in probe["results"] if probe is not None else ():
        if not r.get("leakage"):
            rows.setdefault(r["target"], r)
    return list(rows.values())


def _probed(row: dict[str, Any]) -> str:
    per_class = row.get("test_participants_per_class") or {}
    each = "in every fold fitted on about" if row.get("design") == "k-fold" else "fitted on"
    text = f"{each} {row['n_train_participants']} other participants"
    shown = ", ".join(f"{name} {count}" for name, count in guarded(per_class, row["n_test_participants"]).items())
    return text + (f"; {shown}{words.of_two(row)}" if shown else "")


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in counts.items())


def guarded(counts: dict[str, int], people: int | None = None) -> dict[str, str]:
    """Counts of people as text, small ones withheld; if so, at least two, since one would follow from the total.

    Shares are of `people`, which are fewer than the sum where a person's scans are of two classes; None: of the sum.
    """
    withheld = {name for name, count in counts.items() if 0 < count < SMALL}
    if len(withheld) == 1:
        others = {name: count for name, count in counts.items() if count >= SMALL}
        withheld |= {min(others, key=others.__getitem__)} if others else set()
    total = max(1, sum(counts.values()) if people is None else people)
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
