"""Folders of classes: whether one id has several labels, and whether ids and volumes are those of single people."""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from octfm.catalog.participants.path_words import names_classes

if TYPE_CHECKING:
    from octfm.catalog.acquisition import Acquisition


def doubts_about_people(acquisitions: Sequence["Acquisition"]) -> list[str]:
    """Sentences on ids and volumes that may be of several people, or of none; mostly empty."""
    labels: dict[str, set[str]] = defaultdict(set)
    own = [a for a in acquisitions if a.participant_source in ("pattern", "table") and "label" in a.participant_labels]
    for a in own:
        labels[a.participant].add(a.participant_labels["label"])
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
    folders = [a.uri for a in acquisitions if a.layout == "raster" and not PurePath(a.uri).suffix]
    if classes := [uri for uri in folders if names_classes([PurePath(uri).name])]:
        names = ", ".join(sorted({PurePath(uri).name for uri in classes})[:4])
        sentences.append(
            f"{len(classes)} volumes are folders called {names}; "
            "if their images are of several people, each is a scan of its own: --layouts line"
        )
    return sentences
