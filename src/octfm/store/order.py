"""Training order: the row at each position of a run's endless sequence of volumes, a pure function of the seed."""

import functools
from collections.abc import Sequence

import numpy as np

ORDER_STREAM = 1
"""Part of the random key: separates the order of volumes from everything else drawn with the run's seed."""
TURN_STREAM = 2
"""The same for the order in which groups take turns."""


class Order:
    """Groups of rows take turns: each block of len(groups) positions has one row of every group, in random order.

    A group is traversed epoch by epoch: every row once per epoch, shuffled by (seed, epoch). A single group with all
    rows gives the plain order: position p is row perm_e[p mod n] of epoch e = p // n. One group per scanner makes all
    scanners equally frequent; those with few volumes repeat them sooner. With `counts`, a block has so many rows of
    each group, the next ones of its sequence.
    """

    def __init__(self, groups: Sequence[np.ndarray], seed: int, counts: Sequence[int] | None = None):
        self.groups, self.seed = [np.asarray(rows, np.int64) for rows in groups], seed
        self.counts = np.array(counts if counts is not None and len(groups) > 1 else [1] * len(groups), np.int64)
        # Turn t of a block is the `_nth[t]`-th that group `_whose[t]` has in it.
        self._whose = np.repeat(np.arange(len(self.groups)), self.counts)
        self._nth = np.concatenate([np.arange(count) for count in self.counts])
        # Two epochs for each group: a batch may span the end of one and the start of the next.
        self._permutation = functools.lru_cache(maxsize=2 * len(groups))(self._shuffled)

    def rows_at(self, positions: np.ndarray, excluded: frozenset[int] = frozenset()) -> np.ndarray:
        """int64 [B]. An excluded row is replaced by the next one in its epoch's order; all other positions stay."""
        # Position p is turn `place` of block p // turns; block b takes the next rows of each group's own sequence.
        length = len(self._whose)
        blocks, places = np.divmod(positions, length)
        turn = np.zeros_like(positions)
        if length > 1:
            turns = {int(block): _draw(length, (self.seed, int(block), TURN_STREAM)) for block in np.unique(blocks)}
            turn = np.array([turns[int(block)][place] for block, place in zip(blocks, places, strict=True)], np.int64)
        group, rows = self._whose[turn], np.empty_like(positions)
        for g in np.unique(group):
            mine = np.flatnonzero(group == g)
            place = blocks[mine] * self.counts[g] + self._nth[turn[mine]]
            epochs, place = np.divmod(place, len(self.groups[g]))
            for epoch in np.unique(epochs):
                order = self.groups[g][self._permutation(int(g), int(epoch))]
                for i in np.flatnonzero(epochs == epoch):
                    at = place[i]
                    # Ends, because Loader.exclude refuses to exclude a whole group.
                    while int(order[at]) in excluded:
                        at = (at + 1) % len(order)
                    rows[mine[i]] = order[at]
        return rows

    def _shuffled(self, group: int, epoch: int) -> np.ndarray:
        # A single group adds nothing to the key, so its order is the same as before there were groups.
        one_of_several = (group,) if len(self.groups) > 1 else ()
        return _draw(len(self.groups[group]), (self.seed, epoch, ORDER_STREAM, *one_of_several))


def _draw(count: int, seed: tuple[int, ...]) -> np.ndarray:
    """A random permutation of range(count)."""
    # Across versions numpy keeps the raw output of its bit generators, but not that of Generator.permutation.
    return np.argsort(np.random.Philox(np.random.SeedSequence(seed)).random_raw(count), kind="stable")
