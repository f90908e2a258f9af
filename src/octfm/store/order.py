"""Which row stands at which position of the endless sequence of volumes that a run sees: a pure function of the seed."""

import functools
from collections.abc import Sequence

import numpy as np

ORDER_STREAM = 1
"""Sets the order of volumes apart from whatever else is drawn with the run's seed."""
TURN_STREAM = 2
"""Sets whose turn it is apart from it."""


class Order:
    """Groups of rows take turns: each block of as many positions as there are groups has one of each, in an order drawn anew.

    A group is walked epoch by epoch, every row once per epoch and shuffled by (seed, epoch). With one group, all rows, that is the plain
    order: position p is row perm_e[p mod n] of epoch e = p // n. With a group per scanner, every scanner is as frequent as any other;
    those with few volumes repeat them sooner.
    """

    def __init__(self, groups: Sequence[np.ndarray], seed: int):
        self.groups, self.seed = [np.asarray(rows, np.int64) for rows in groups], seed
        self._permutation = functools.lru_cache(maxsize=2 * len(groups))(self._shuffled)

    def rows_at(self, positions: np.ndarray, excluded: frozenset[int] = frozenset()) -> np.ndarray:
        """int64 [B]. An excluded row is replaced by the one after it in its epoch's order; all else stays."""
        blocks, places = np.divmod(positions, len(self.groups))
        group = np.zeros_like(positions)
        if len(self.groups) > 1:
            turns = {
                int(block): _draw(len(self.groups), (self.seed, int(block), TURN_STREAM)) for block in np.unique(blocks)
            }
            group = np.array([turns[int(block)][place] for block, place in zip(blocks, places, strict=True)], np.int64)
        rows = np.empty_like(positions)
        for g in np.unique(group):
            mine = np.flatnonzero(group == g)
            epochs, place = np.divmod(blocks[mine], len(self.groups[g]))
            for epoch in np.unique(epochs):
                order = self.groups[g][self._permutation(int(g), int(epoch))]
                for i in np.flatnonzero(epochs == epoch):
                    at = place[i]
                    while int(order[at]) in excluded:
                        at = (at + 1) % len(order)
                    rows[mine[i]] = order[at]
        return rows

    def _shuffled(self, group: int, epoch: int) -> np.ndarray:
        one_of_several = (group,) if len(self.groups) > 1 else ()
        return _draw(len(self.groups[group]), (self.seed, epoch, ORDER_STREAM, *one_of_several))


def _draw(count: int, seed: tuple[int, ...]) -> np.ndarray:
    # numpy keeps the raw output of its bit generators across versions, and not that of Generator.permutation.
    return np.argsort(np.random.Philox(np.random.SeedSequence(seed)).random_raw(count), kind="stable")
