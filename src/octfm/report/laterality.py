"""The laterality audit of a catalog: for each doubtful eye, the stated side and the side that its anatomy shows."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from octfm.catalog.acquisition import FLAGS, Acquisition
from octfm.volume.laterality import CANNOT_TELL

AUDITED = (
    "laterality_contradicts_anatomy",
    "laterality_conflict",
    "disc_on_the_right",
    "disc_on_the_left",
    "laterality_unknown",
)
"""Flags of the audit, the most serious first."""
SHOWN = 24
"""Rows of the page's table."""
EYES = {"R": "right", "L": "left"}


@dataclass(frozen=True)
class Doubt:
    row: int
    """Row of catalog.parquet, from 0."""
    acquisition: Acquisition
    flag: str
    stated: str
    anatomy: str

    @property
    def meaning(self) -> str:
        return FLAGS[self.flag]


def laterality_doubts(acquisitions: Sequence[Acquisition]) -> list[Doubt]:
    """Every volume whose side is doubtful, the most serious first; a side that is merely unknown comes last."""
    found = []
    for row, a in enumerate(acquisitions):
        flag = next((flag for flag in AUDITED if flag in a.flags), None)
        if flag is not None:
            stated = "two eyes" if "laterality_conflict" in a.flags else EYES.get(a.laterality or "", "nothing")
            found.append(Doubt(row, a, flag, stated, _anatomy(a)))
    return sorted(found, key=lambda doubt: (AUDITED.index(doubt.flag), doubt.row))


def _anatomy(a: Acquisition) -> str:
    # The anatomy shows the other eye than the one stated.
    if "laterality_contradicts_anatomy" in a.flags:
        return {"R": "left", "L": "right"}.get(a.laterality or "", "unclear")
    if "disc_on_the_right" in a.flags:
        return "right"
    if "disc_on_the_left" in a.flags:
        return "left"
    return next((f"cannot tell: {CANNOT_TELL[flag]}" for flag in a.flags if flag in CANNOT_TELL), "unclear")


def by_scanner(acquisitions: Sequence[Acquisition]) -> list[tuple[str, int, int]]:
    """(scanner, volumes with a stated side, volumes without one); a faulty export affects a whole scanner."""
    stated = Counter(a.scanner for a in acquisitions if a.laterality)
    unknown = Counter(a.scanner for a in acquisitions if not a.laterality)
    return [(s, stated[s], unknown[s]) for s in sorted(stated.keys() | unknown.keys())]
