"""Assign participants to train, val and test, so that each split has its share of every scanner and diagnosis."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import numpy as np

from octfm.errors import ConfigError, shown

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
FRACTIONS = (0.8, 0.1, 0.1)
"""Shares of participants for SPLITS, unless others are asked for."""

_SPELLINGS: dict[str, Split] = {
    **{split: split for split in SPLITS},
    "training": "train",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "testing": "test",
}


def parse_split(text: str) -> Split | None:
    """The split that a table's text names; None for anything else (empty, `excluded`, ...)."""
    return _SPELLINGS.get(text.strip().lower())


def diagnosis_of(labels: Mapping[str, str]) -> str | None:
    """A participant's `diagnosis`, else `study_group`, else `label` (of a path), else None."""
    return next((labels[column] for column in ("diagnosis", "study_group", "label") if labels.get(column)), None)


def expect_fractions(fractions: Sequence[float]) -> None:
    """Raises ConfigError unless these are shares of participants for SPLITS."""
    three = isinstance(fractions, Sequence | np.ndarray) and len(fractions) == 3
    if not three or not min(fractions) >= 0 or not abs(sum(fractions) - 1) <= 1e-6:
        raise ConfigError(
            "fractions: expected three shares for train, val and test that sum to 1, such as 0.7, 0.1, 0.2; "
            f"got {shown(fractions)}"
        )


def assign(
    strata: Mapping[str, Hashable], recommended: Mapping[str, Split], fractions: tuple[float, float, float], seed: int
) -> dict[str, Split]:
    """One split per participant: the recommended one, else stratified at random.

    `strata`: participant -> what should be balanced (scanners, diagnosis, number of eyes). A pure function of its
    arguments, independent of the order of the mapping. Of three or more participants to place, each split with a share
    gets at least one.
    """
    expect_fractions(fractions)
    assigned: dict[str, Split] = {
        participant: recommended[participant] for participant in strata if participant in recommended
    }
    remaining = sorted(participant for participant in strata if participant not in recommended)
    rng = np.random.default_rng([seed, 16])  # a stream of its own among the uses of the seed
    shuffled = [remaining[i] for i in rng.permutation(len(remaining))]
    # The sort is stable: equal strata become neighbours in random order. Dealing splits out evenly along this line then
    # balances every stratum.
    order = sorted(shuffled, key=lambda participant: repr(strata[participant]))
    quota = _quota(len(order), fractions)
    dealt = [0, 0, 0]
    for place, participant in enumerate(order, start=1):
        # To the split that is furthest behind its share of the participants placed so far.
        owed = [quota[k] * place / len(order) - dealt[k] if dealt[k] < quota[k] else -np.inf for k in range(3)]
        k = int(np.argmax(owed))
        dealt[k] += 1
        assigned[participant] = SPLITS[k]
    return assigned


def _quota(count: int, fractions: tuple[float, float, float]) -> list[int]:
    """Participants per split by largest remainder; an empty split with a share then takes one from the largest."""
    exact = [count * fraction for fraction in fractions]
    quota = [int(share) for share in exact]
    # Largest remainders first.
    for k in sorted(range(3), key=lambda k: quota[k] - exact[k])[: count - sum(quota)]:
        quota[k] += 1
    for k in range(3):
        if count >= 3 and fractions[k] > 0 and quota[k] == 0:
            quota[int(np.argmax(quota))] -= 1
            quota[k] += 1
    return quota
