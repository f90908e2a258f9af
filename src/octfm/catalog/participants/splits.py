"""Train, val and test by participant: no one is ever in two of them, and each holds its share of every scanner and diagnosis."""

from collections.abc import Hashable, Mapping
from typing import Literal

import numpy as np

from octfm.errors import ConfigError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")

_SPELLINGS: dict[str, Split] = {
    "training": "train",
    "validation": "val",
    "valid": "val",
    "dev": "val",
    "testing": "test",
}


def parse_split(text: str) -> Split | None:
    """The split a table names, None where it names none (empty, `excluded`, ...)."""
    word = text.strip().lower()
    return next((split for split in SPLITS if split == word), None) or _SPELLINGS.get(word)


def assign(
    strata: Mapping[str, Hashable], recommended: Mapping[str, Split], fractions: tuple[float, float, float], seed: int
) -> dict[str, Split]:
    """One split per participant: the recommended one, else stratified at random.

    `strata` maps every participant to what should be balanced (scanners, diagnosis, number of eyes). A pure function of its arguments,
    whatever the order of the mapping. With three participants or more to place, each split with a share gets at least one.
    """
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise ConfigError(f"splits: train, val and test shares must be 3 numbers that sum to 1, got {fractions}")
    assigned: dict[str, Split] = {
        participant: recommended[participant] for participant in strata if participant in recommended
    }
    remaining = sorted(participant for participant in strata if participant not in recommended)
    rng = np.random.default_rng([seed, 16])
    shuffled = [remaining[i] for i in rng.permutation(len(remaining))]
    # Equal strata become neighbours; dealing splits out evenly along the line then balances every stratum.
    order = sorted(shuffled, key=lambda participant: repr(strata[participant]))
    quota = _quota(len(order), fractions)
    dealt = [0, 0, 0]
    for place, participant in enumerate(order, start=1):
        owed = [quota[k] * place / len(order) - dealt[k] if dealt[k] < quota[k] else -np.inf for k in range(3)]
        k = int(np.argmax(owed))
        dealt[k] += 1
        assigned[participant] = SPLITS[k]
    return assigned


def _quota(count: int, fractions: tuple[float, float, float]) -> list[int]:
    """Whole participants per split: largest remainder, then one for each split that has a share, taken from the largest."""
    exact = [count * fraction for fraction in fractions]
    quota = [int(share) for share in exact]
    for k in sorted(range(3), key=lambda k: quota[k] - exact[k])[: count - sum(quota)]:
        quota[k] += 1
    for k in range(3):
        if count >= 3 and fractions[k] > 0 and quota[k] == 0:
            quota[int(np.argmax(quota))] -= 1
            quota[k] += 1
    return quota
