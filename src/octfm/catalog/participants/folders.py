"""Read splits and classes from folder names, and count participants with scans in several splits."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from octfm.catalog.participants.ids import may_be_one_person, person_key, under_one_id
from octfm.catalog.participants.path_words import names_classes
from octfm.catalog.participants.splits import SPLITS, Split, parse_split
from octfm.display import number

if TYPE_CHECKING:
    from octfm.catalog.acquisition import Acquisition


@dataclass(frozen=True)
class SplitFolders:
    """Splits that folders name, and how many participants have scans in several of them."""

    splits: tuple[Split, ...]
    participants: int
    on_both_sides: int
    """Participants with scans in folders of several splits, or with the pixels of another id that has."""
    used: bool
    """Whether the catalog's splits are those of the folders, except for these participants."""

    @property
    def sentence(self) -> str:
        named = " and ".join(self.splits)
        leak = f"{self.on_both_sides} of {self.participants} participants have scans in several of them"
        if self.used:
            then = f"; all scans of each count as {self.splits[0]}" if self.on_both_sides else ""
            return f"folders {named} are used as splits: {leak}{then}"
        advice = "" if self.on_both_sides else " ({split} in --participant-from uses them)"
        return f"folders {named} are not used as splits, which are drawn by participant{advice}: {leak}"


def split_folders(root: str, acquisitions: Iterable["Acquisition"]) -> SplitFolders | None:
    """None if fewer than two splits are named by folders below `root`."""
    sides: dict[str, set[Split]] = defaultdict(set)
    leaking, used = set(), False
    for a in acquisitions:
        folders, person = a.uri.removeprefix(root).split("/")[:-1], person_key(a.participant)
        sides[person] |= {split for folder in folders if (split := parse_split(folder))}
        used |= "recommended_split" in a.participant_labels
        # A rejected copy is not in the catalog; the row that is kept says that another id has its pixels.
        leaking |= {person} if "several_splits" in a.flags else set()
    named = set().union(*sides.values())
    if len(named) < 2:
        return None
    leaking |= {person for person, own in sides.items() if len(own) > 1}
    return SplitFolders(tuple(split for split in SPLITS if split in named), len(sides), len(leaking), used)


def doubts_about_people(acquisitions: Sequence["Acquisition"]) -> list[str]:
    """Sentences on ids and volumes that may be of several people, or of none; mostly empty."""
    labels: dict[str, set[str]] = defaultdict(set)
    own = [a for a in acquisitions if a.participant_source in ("pattern", "table") and "label" in a.participant_labels]
    for a, person in zip(own, under_one_id([a.participant for a in own]), strict=True):
        labels[person].add(a.participant_labels["label"])
    sentences = []
    # Numbers of four digits do not start again in every class: such a person has scans of several labels.
    short = {participant for participant in labels if not re.search(r"\d{4}", participant)}
    if several := sorted(participant for participant in short if len(labels[participant]) > 1):
        some = ", ".join(sorted(labels[several[0]])[:4])
        sentences.append(
            f"{len(several)} of {len(labels)} participants have scans of several labels (participant {several[0]}: "
            f"{some}); if numbers start again in every class, they are several people; {{label+participant}} in "
            "--participant-from keeps them apart where no table names them"
        )
    if len(own) == len(labels) > 1 and all((a.layout, a.participant_source) == ("line", "pattern") for a in own):
        sentences.append(
            f"each of {len(own)} B-scans is a participant of its own; if their names hold no patient, splits may "
            "divide an eye, and no result is about new patients"
        )
    pairs = may_be_one_person(a.participant for a in acquisitions)
    if apart := [pair for pair in pairs if len(set(map(person_key, pair))) == 2]:
        one, other = apart[0]
        sentences.append(
            f"{number(len(apart), 'pair')} of ids such as {one} and {other} count as two people; if they are one, "
            "write one of them for both in a table (--table)"
        )
    folders = [a.uri for a in acquisitions if a.layout == "raster" and not PurePath(a.uri).suffix]
    if classes := [uri for uri in folders if names_classes([PurePath(uri).name])]:
        names = ", ".join(sorted({PurePath(uri).name for uri in classes})[:4])
        sentences.append(
            f"{len(classes)} volumes are folders called {names}; "
            "if their images are of several people, each is a scan of its own: --layouts line"
        )
    return sentences
