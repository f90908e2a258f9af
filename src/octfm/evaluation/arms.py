"""The arms of every result: the encoder, and the baselines that it has to beat.

An arm is a name and a matrix of features with a row per volume: Embeddings. `make_arms` makes all of them from the
files of `octfm embed`; any other Embeddings of the same volumes can be probed with them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octfm.catalog.labels import LabelTable, as_number
from octfm.encoder.embed import RANDOM_INIT
from octfm.encoder.embeddings import Embeddings, align, joined
from octfm.errors import EvaluationError
from octfm.evaluation.cases import column_values
from octfm.io.location import Location

COVARIATES = "covariates"
MAP, MAP_AND_ENCODER = "tissue_map", "map_and_encoder"
OF_PARTICIPANT = ("age", "sex", "clinical_site")
"""Participant columns among the covariates; those that a cohort lacks are left out."""
NO_VOXELS = (COVARIATES, MAP)
"""Arms that see no voxel of the retina."""
Channels = list[tuple[str, np.ndarray]]
"""Each channel [N] with the name of the column that it was made from."""


def make_arms(files: Sequence[str | Location | Embeddings]) -> list[Embeddings]:
    """All arms, from the files (or Embeddings) that `octfm embed` writes for a run, the encoder of interest first.

    Draws of random initialisation become one arm. Where the tissue map is among the files, `map_and_encoder` joins it
    with the first one; where the image quality is, `covariates` joins it with age, sex, site and scanner. Files of any
    other name stay as they are.
    """
    found = align(files)
    named = {e.name: e for e in found}
    arms = []
    for e in found:
        if e.name == RANDOM_INIT[0]:
            others = tuple(named[name].vectors for name in RANDOM_INIT[1:] if name in named)
            arms.append(replace(e, draws=others))
        elif e.name == MAP and found[0] is not e:
            arms += [e, joined(MAP_AND_ENCODER, [e, found[0]])]
        elif e.name == "image_quality":
            arms.append(covariates(e, e.vectors))
        elif e.name not in RANDOM_INIT[1:] or RANDOM_INIT[0] not in named:
            arms.append(e)
    return arms


def covariates(data: Embeddings, quality: np.ndarray | None = None) -> Embeddings:
    """What is known without looking at the retina: age, sex, site, scanner, and image quality [N, 4] if given.

    `data` gives the rows; its vectors are not used. An age that is not stated is NaN, which a probe replaces by the
    mean of its training rows. A probe whose target is one of these columns leaves it out; columns of its label table
    are added (`with_table`).
    """
    channels: Channels = [("scanner", column) for column in _one_hot(data.scanner.tolist())]
    for name in OF_PARTICIPANT:
        channels += _channels(name, [labels.get(name) for labels in data.participant_labels])
    if quality is not None:
        channels += [("image quality", column) for column in quality.T]
    return _of_channels(data, channels)


def with_table(arm: Embeddings, table: LabelTable | None) -> Embeddings:
    """Covariates with the age, sex and site that a label table states; every other arm unchanged."""
    if table is None or arm.name != COVARIATES or not arm.columns:
        return arm
    channels: Channels = list(zip(arm.columns, arm.vectors.T, strict=True))
    for name in (column for column in table.columns if column.lower() in OF_PARTICIPANT):
        try:
            own = column_values(name, arm, table)
        except EvaluationError:  # a table with a row per visit does not say which age belongs to a scan
            continue
        pairs = zip(own, arm.participant_labels, strict=True)
        if stated := _channels(name, [labels.get(name.lower()) if value is None else value for value, labels in pairs]):
            channels = [each for each in channels if each[0].lower() != name.lower()] + stated
    return _of_channels(arm, channels)


def _channels(name: str, values: Sequence[str | None]) -> Channels:
    if name.lower() != "age":
        return [(name, column) for column in _one_hot(values)]
    ages = [as_number(v) for v in values]
    return [(name, np.array(ages, float))] if any(age is not None for age in ages) else []  # None becomes NaN


def _of_channels(data: Embeddings, channels: Channels) -> Embeddings:
    return replace(
        data, name=COVARIATES, path=COVARIATES, metadata={"encoder": _words([name for name, _ in channels])},
        vectors=np.stack([values for _, values in channels], axis=1), columns=tuple(name for name, _ in channels),
        parts=(), draws=(),
    )  # fmt: skip


def _words(columns: Sequence[str]) -> str:
    names = [name.lower().replace("clinical_", "") for name in dict.fromkeys(columns)]
    return f"{', '.join(names)}; no retina"


def _one_hot(values: Sequence[str | None]) -> list[np.ndarray]:
    return [np.array([float(v == value) for v in values]) for value in sorted({v for v in values if v})]
