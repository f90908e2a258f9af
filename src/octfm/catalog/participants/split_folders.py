"""Folders named train, val or test: what they say about splits, and whose scans they hold on both sides."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octfm.catalog.participants.splits import SPLITS, Split, parse_split

if TYPE_CHECKING:
    from octfm.catalog.acquisition import Acquisition


@dataclass(frozen=True)
class SplitFolders:
    """Splits that folders name, and whether they hold people apart."""

    splits: tuple[Split, ...]
    participants: int
    on_both_sides: int
    """Participants with scans in folders of several splits, under their own id or under another with the same
    pixels."""
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
        folders = a.uri.removeprefix(root).split("/")[:-1]
        sides[a.participant] |= {split for folder in folders if (split := parse_split(folder))}
        used |= "recommended_split" in a.participant_labels
        # A rejected copy is not in the catalog; the row that is kept says that another id has its pixels.
        leaking |= {a.participant} if "several_splits" in a.flags else set()
    named = set().union(*sides.values())
    if len(named) < 2:
        return None
    leaking |= {participant for participant, own in sides.items() if len(own) > 1}
    return SplitFolders(tuple(split for split in SPLITS if split in named), len(sides), len(leaking), used)
