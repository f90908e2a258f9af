"""Checks a run's batches: the right volumes on every rank, each with its own voxels, under masks that change."""

import hashlib
import zlib
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from octfm.models.token_map import PADDING, token_map
from octfm.pretraining.inputs import draw_masks
from octfm.pretraining.monitors.monitors import Finding
from octfm.pretraining.settings import PretrainConfig
from octfm.pretraining.step import MicroStep
from octfm.run.runtime import Runtime
from octfm.store.loader import Batch, Loader
from octfm.store.store import Store

STRIP = 16
"""Rows in the middle of the middle B-scan whose CRC identifies a volume in every step: cheap next to its checksum."""
SAME = 3
"""Consecutive steps with the same masks before masks count as fixed."""
ENOUGH = 32
"""Fewest tokens to choose from at which equal masks are no coincidence: with two tokens, one or the other is hidden."""

Fed = np.ndarray
"""float64 [ranks, 7]: what `Feed.inspect` returns on every rank."""


class Feed:
    """One rank's record of the batches it was given."""

    def __init__(self, config: PretrainConfig, store: Store, loader: Loader, runtime: Runtime):
        self.config, self.store, self.loader, self.runtime = config, store, loader, runtime
        self._rows, self._start = np.array([], np.int64), 0
        self._epoch, self._seen = -1, set[int]()
        self._strips: list[int] = []
        self._targets: list[bytes] = []
        self._checksums_compared = 0

    def inspect(
        self,
        at: int,
        rows: np.ndarray,
        excluded: bool,
        batch: Batch,
        micro_steps: Sequence[MicroStep],
        *,
        closely: bool,
    ) -> list[float]:
        """Compare this rank's batch with the data's step `at`, whose global batch should be the store's `rows`.

        Returns what `finding` judges. Checksums and later masks are compared only with `closely`. With `excluded`
        volumes the order has substitutes, so repetitions are not counted."""
        share = len(rows) // self.runtime.world
        own = slice(self.runtime.rank * share, (self.runtime.rank + 1) * share)
        positions = at * len(rows) + np.arange(len(rows))
        misplaced = int(np.sum((batch.index != rows[own]) | (batch.position != positions[own])))
        strips = [_strip(voxels) for voxels in batch.voxels]
        stale = self._stale(positions, rows, excluded, strips)
        # A strip of 0 is blank, which many volumes share.
        twice = sum(
            strips[i] == strips[j] and strips[i] != 0 and self._differ(batch.index[i], batch.index[j])
            for i in range(len(strips))
            for j in range(i)
        )
        # Groups that take turns repeat the volumes of the smaller ones on purpose.
        repeated = 0 if excluded or self.loader.by_turns else self._repeated(positions, rows)
        foreign = self._foreign(batch) if closely else -1
        fixed = self._fixed(micro_steps) or (
            closely and masks_repeat(self.config, self.store, batch, len(self.loader.rows))
        )
        self._rows, self._start, self._strips = rows, int(positions[0]), strips
        # `repeated`: in the epoch; `twice`: in the batch; `foreign`: the row of a volume with other voxels, or -1.
        return [digest(rows), misplaced, float(stale), repeated, twice, foreign, float(fixed)]

    def _stale(self, positions: np.ndarray, rows: np.ndarray, excluded: bool, strips: list[int]) -> bool:
        """Whether this is the previous step's batch again, by its rows or by its voxels."""
        # Across epochs the same rows are legitimate: an epoch may begin with the volumes that the last one ended with.
        one_epoch = self._start // len(self.loader.rows) == int(positions[-1]) // len(self.loader.rows)
        if one_epoch and not (excluded or self.loader.by_turns) and np.array_equal(np.sort(rows), np.sort(self._rows)):
            return True
        if strips != self._strips or not any(strips):
            return False
        share = slice(self.runtime.rank * len(strips), (self.runtime.rank + 1) * len(strips))
        return any(self._differ(a, b) for a, b in zip(rows[share], self._rows[share], strict=True))

    def _repeated(self, positions: np.ndarray, rows: np.ndarray) -> int:
        """Volumes that occur for a second time in their epoch."""
        count = 0
        for position, row in zip(positions, rows, strict=True):
            epoch = int(position) // len(self.loader.rows)
            if epoch != self._epoch:
                self._epoch, self._seen = epoch, set()
            count += int(row) in self._seen
            self._seen.add(int(row))
        return count

    def _foreign(self, batch: Batch) -> int:
        """Compare one volume per call with the store's: its row if they differ, otherwise -1."""
        place = self._checksums_compared % len(batch)
        self._checksums_compared += 1
        row = int(batch.index[place])
        return -1 if self.store.holds(row, batch.one(place)) else row

    def _fixed(self, micro_steps: Sequence[MicroStep]) -> bool:
        """Whether the last SAME steps had the same targets."""
        # As many volumes as it takes: the device would wait while all are counted.
        tokens = accumulate(len(np.unique(kept)) for part in micro_steps for kept in part.masks.kept)
        if not any(count >= ENOUGH for count in tokens):
            return False
        targets = hashlib.sha256(b"".join(part.masks.target.tobytes() for part in micro_steps))
        self._targets = [*self._targets, targets.digest()][-SAME:]
        return len(self._targets) == SAME and len(set(self._targets)) == 1

    def _differ(self, a: int, b: int) -> bool:
        """Whether two rows of the store hold different voxels; two copies of one volume do not."""
        return a != b and self.store.rows[a].checksum != self.store.rows[b].checksum


def finding(fed: Fed, at_rows: np.ndarray) -> Finding | None:
    """A step's finding from all ranks' inspections, the same on every rank. `at_rows` are the global batch's rows."""
    # The most general fault first: with a wrong order, every later comparison fails too.
    order, misplaced, stale, repeated, twice, foreign, fixed = fed.T
    other = np.flatnonzero(order != order[0])
    if len(other):
        return Finding(
            "data order",
            f"rank {other[0]} draws its volumes in another order than rank 0, so some are trained on twice and others "
            "never; give every rank the same seed, store and settings (F10)",
        )
    if stale.any():
        return Finding(
            "same batch",
            "this batch has the volumes of the previous one, so the run memorises them and sees no others; "
            "check the loader",
        )
    if misplaced.any():
        return Finding(
            "data order",
            f"rank {int(np.argmax(misplaced > 0))} got {misplaced.max():.0f} volumes that do not belong to this step; "
            "check the loader (F10)",
        )
    if twice.any() or repeated.any():
        return Finding(
            "volume repeated",
            f"{int(max(twice.max(), repeated.max()))} of {len(at_rows)} volumes occur a second time in this batch or "
            "this epoch, so they count more than the others; check the loader",
        )
    if (foreign >= 0).any():
        return Finding(
            "wrong volume",
            "a volume's voxels, tissue band or truth differ from what the store holds; run octfm prepare again, and "
            "check the code that reads batches",
            volumes=(int(foreign[foreign >= 0][0]),),
        )
    if fixed.any():
        return Finding(
            "fixed masks",
            "masks are the same in every step, so the same places are always hidden and the others never learned; "
            "check how masks are drawn",
        )
    return None


def masks_repeat(config: PretrainConfig, store: Store, batch: Batch, volumes: int) -> bool:
    """Whether a batch's first volume would get the same masks at its next three positions or in the next three epochs.
    `volumes` is the number of training volumes, that is, positions per epoch."""
    size, patch = store.preprocessing.image_size, config.model.patch_size
    tokens, start = token_map(batch.band[:1], batch.valid[:1], size, patch), int(batch.position[0])
    if np.count_nonzero(tokens != PADDING) < ENOUGH:
        return False

    def target(position: int) -> bytes:
        return draw_masks(config, tokens, np.array([position])).target.tobytes()

    here = target(start)
    return any(all(target(start + n * step) == here for n in (1, 2, 3)) for step in (1, volumes))


def digest(rows: np.ndarray) -> float:
    """48 bits of a hash of a list of rows; a float64 holds them exactly."""
    return float(int(hashlib.sha256(np.ascontiguousarray(rows, np.int64).tobytes()).hexdigest()[:12], 16))


def _strip(voxels_DHW: np.ndarray) -> int:
    """CRC of the middle STRIP rows of the middle B-scan; 0 if they are uniform."""
    depth, height, _ = voxels_DHW.shape
    middle = voxels_DHW[depth // 2, max(0, (height - STRIP) // 2) : (height + STRIP) // 2]
    return zlib.crc32(middle.tobytes()) if middle.min() != middle.max() else 0
