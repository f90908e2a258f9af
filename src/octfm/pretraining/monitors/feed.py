"""Watches what a run is fed: the volumes that the order names, on every rank, each with its own voxels, under masks that change."""

import hashlib
import zlib
from collections.abc import Sequence

import numpy as np

from octfm.pretraining.inputs import draw_masks
from octfm.pretraining.masks import PADDING, token_map
from octfm.pretraining.monitors.monitors import Finding
from octfm.pretraining.settings import PretrainConfig
from octfm.pretraining.step import MicroStep
from octfm.run.runtime import Runtime
from octfm.store.layout import checksum
from octfm.store.loader import Batch, Loader
from octfm.store.store import Store

STRIP = 16
"""Rows in the middle of the middle B-scan by which a volume is recognised in every step; at looks, one is compared as a whole."""
SAME = 3
"""Steps in a row with the same masks before they count as fixed."""
ENOUGH = 32
"""Tokens to choose among from which on masks are not the same again by chance: of two, one or the other is hidden."""

Fed = np.ndarray
"""float64 [ranks, 7] of what `Feed.look` returns."""


class Feed:
    """One rank's memory of what it was fed."""

    def __init__(self, config: PretrainConfig, store: Store, loader: Loader, runtime: Runtime):
        self.config, self.store, self.loader, self.runtime = config, store, loader, runtime
        self._rows, self._start = np.array([], np.int64), 0
        self._epoch, self._seen = -1, set[int]()
        self._strips: list[int] = []
        self._targets: list[bytes] = []
        self._looks = 0

    def look(
        self, at: int, rows: np.ndarray, excluded: bool, batch: Batch, done: Sequence[MicroStep], *, closely: bool
    ) -> list[float]:
        """What this rank says of the batch of step `at` of the data; `rows` are those of the global batch by its order."""
        share = len(rows) // self.runtime.world
        own = slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)
        positions = at * len(rows) + np.arange(len(rows))
        misplaced = int(np.sum((batch.index != rows[own]) | (batch.position != positions[own])))
        strips = [_strip(voxels) for voxels in batch.voxels]
        stale = self._stale(positions, rows, excluded, batch, strips)
        twice = sum(
            strips[i] == strips[j] and strips[i] != 0 and self._differ(batch.index[i], batch.index[j])
            for i in range(len(strips))
            for j in range(i)
        )
        repeated = 0 if excluded or self.config.data.balance_scanners else self._repeated(positions, rows)
        foreign = self._foreign(batch) if closely else -1
        fixed = self._fixed(done) or (closely and masks_repeat(self.config, self.store, batch, len(self.loader.rows)))
        self._rows, self._start, self._strips = rows, int(positions[0]), strips
        return [digest(rows), misplaced, float(stale), repeated, twice, foreign, float(fixed)]

    def _stale(self, positions: np.ndarray, rows: np.ndarray, excluded: bool, batch: Batch, strips: list[int]) -> bool:
        """Whether this is the batch of the step before, under the same names or other ones."""
        # The first batch of an epoch may happen to have the volumes of the last one before it.
        one_epoch = self._start // len(self.loader.rows) == int(positions[-1]) // len(self.loader.rows)
        by_turns = self.config.data.balance_scanners
        if one_epoch and not (excluded or by_turns) and np.array_equal(np.sort(rows), np.sort(self._rows)):
            return True
        if strips != self._strips or not any(strips):
            return False
        share = slice(self.runtime.rank * len(strips), (self.runtime.rank + 1) * len(strips))
        return any(self._differ(a, b) for a, b in zip(rows[share], self._rows[share], strict=True))

    def _repeated(self, positions: np.ndarray, rows: np.ndarray) -> int:
        """Volumes that stand a second time in their epoch."""
        count = 0
        for position, row in zip(positions, rows, strict=True):
            epoch = int(position) // len(self.loader.rows)
            if epoch != self._epoch:
                self._epoch, self._seen = epoch, set()
            count += int(row) in self._seen
            self._seen.add(int(row))
        return count

    def _foreign(self, batch: Batch) -> int:
        """The row whose voxels, band or valid rows are not what the store was written with, -1 if it is not found; one volume at a look."""
        place = self._looks % len(batch)
        self._looks += 1
        row, known = int(batch.index[place]), self.store.rows[batch.index[place]].checksum
        if not known or checksum(batch.voxels[place], batch.band[place], batch.valid[place]) == known:
            return -1
        return row

    def _fixed(self, done: Sequence[MicroStep]) -> bool:
        if sum(len(np.unique(kept)) for part in done for kept in part.masks.kept) < ENOUGH:
            return False
        targets = hashlib.sha256(b"".join(np.ascontiguousarray(part.masks.target).tobytes() for part in done)).digest()
        self._targets = [*self._targets, targets][-SAME:]
        return len(self._targets) == SAME and len(set(self._targets)) == 1

    def _differ(self, a: int, b: int) -> bool:
        """Whether two rows of the store hold different volumes, copies aside."""
        return a != b and self.store.rows[a].checksum != self.store.rows[b].checksum


def finding(fed: Fed, at_rows: np.ndarray) -> Finding | None:
    """What all ranks together make of it; all come to the same answer. `at_rows` are rows of the global batch."""
    order, misplaced, stale, repeated, twice, foreign, fixed = fed.T
    other = np.flatnonzero(order != order[0])
    if len(other):
        told = f"rank {other[0]} draws its volumes in another order than rank 0, so some are trained on twice and others never"
        return Finding("data order", f"{told}; give every rank the same seed, store and settings (F10)", "code")
    if stale.any():
        told = "this batch has the volumes of the batch before, so the run learns them by heart and sees nothing else"
        return Finding("same batch", f"{told}; check what hands out batches", "code")
    if misplaced.any():
        told = f"rank {int(np.argmax(misplaced > 0))} was given {misplaced.max():.0f} volumes that are not those of this step"
        return Finding("data order", f"{told}; check what hands out batches (F10)", "code")
    if twice.any() or repeated.any():
        count = int(max(twice.max(), repeated.max()))
        told = f"{count} volumes of {len(at_rows)} are there a second time, in this batch or this epoch"
        return Finding("volume repeated", f"{told}: they count more than others; check what hands out batches", "code")
    if (foreign >= 0).any():
        row = int(foreign[foreign >= 0][0])
        told = "a volume's voxels or its tissue band are not those that the store was written with"
        return Finding("wrong volume", f"{told}: run octfm prepare again, and check what reads batches", "code", (row,))
    if fixed.any():
        told = "masks do not change from step to step, so the same places are hidden for ever and the others are never learned"
        return Finding("fixed masks", f"{told}; check what draws them", "code")
    return None


def masks_repeat(config: PretrainConfig, store: Store, batch: Batch, volumes: int) -> bool:
    """Whether the masks of a batch's first volume are the same at other places of the run: at the next ones, or in the next epochs."""
    size, patch = store.preprocessing.image_size, config.model.patch_size
    tokens, start = token_map(batch.band[:1], batch.valid[:1], size, patch), int(batch.position[0])
    if np.count_nonzero(tokens != PADDING) < ENOUGH:
        return False

    def target(position: int) -> bytes:
        return draw_masks(config, tokens, np.array([position])).target.tobytes()

    here = target(start)
    return any(all(target(start + n * step) == here for n in (1, 2, 3)) for step in (1, volumes))


def digest(rows: np.ndarray) -> float:
    """48 bits that tell one list of rows from another; a float64 holds them exactly."""
    return float(int(hashlib.sha256(np.ascontiguousarray(rows, np.int64).tobytes()).hexdigest()[:12], 16))


def _strip(voxels_DHW: np.ndarray) -> int:
    """A number for what is seen in the middle of a volume; 0 where that is blank."""
    depth, height, _ = voxels_DHW.shape
    middle = voxels_DHW[depth // 2, max(0, (height - STRIP) // 2) : (height + STRIP) // 2]
    return zlib.crc32(np.ascontiguousarray(middle)) if middle.min() != middle.max() else 0
