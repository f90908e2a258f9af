"""Batches by step: the global batch is a pure function of (seed, step), and each rank prefetches its share of it."""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field

from octfm.config import Config, LocalPlace, Place
from octfm.display import fields_line
from octfm.errors import ConfigError, StoreError
from octfm.store.layout import ARRAYS, Arrays, shapes
from octfm.store.order import Order
from octfm.store.phantoms import PhantomConfig
from octfm.store.store import Store
from octfm.volume.volume import RASTER_ONLY, STRUCTURE_ONLY, Admissible, Modality

AtMost = Annotated[int, Field(ge=1, le=10**12)]


class DataConfig(Config):
    """Which volumes to train on, and in which batches."""

    store: Place | None = None
    """Folder of a prepared store."""
    phantoms: PhantomConfig | None = None
    """Streamed phantoms, whose truth is known; null trains on data.store alone."""
    exclude: LocalPlace | None = None
    """File with an acquisition, uri or participant per line, whose volumes are left out."""
    scanners: tuple[str, ...] = ()
    """Scanners to train on: one (single-domain) or several (multi-domain); empty for all."""
    leave_out_scanners: tuple[str, ...] = ()
    """Scanners never trained on, so that they can be tested on afterwards (leave one scanner out)."""
    layouts: tuple[Admissible, ...] = RASTER_ONLY
    """Scan patterns to train on; [raster, radial] adds radial scans, which the store holds resampled to rasters."""
    modalities: tuple[Modality, ...] = STRUCTURE_ONLY
    """What to train on: structure (reflectivity), octa (flow) or both. A store holds flow only if the scan of its files
    accepted it; evaluations of a run take the same modalities."""
    balance_scanners: bool = False
    """Draw every scanner equally often, whatever its share of the volumes."""
    max_samples: AtMost | tuple[AtMost | None, ...] | None = None
    """At most this many volumes, always the same ones; a list gives a limit for each of `scanners`; null for all."""
    global_batch_size: int = Field(default=32, ge=1, le=1_000_000)
    """Volumes per optimizer step, over all ranks and accumulation passes."""
    per_device_batch_size: int = Field(default=1, ge=1, le=1_000_000)
    """Volumes per forward pass on one device. Accumulation passes are global / (per device × world), a whole number."""
    prefetch: int = Field(default=2, ge=0, le=1000)
    """Steps to read ahead."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch(Arrays):
    """One rank's share of a global batch. Its memory is reused once no array, slice or tensor refers to it."""

    index: np.ndarray
    """int64 [B], rows of the store."""
    position: np.ndarray
    """int64 [B], positions in the run's sequence of volumes: step × global_batch_size + place in the global batch."""
    wait_s: float = 0.0
    """Seconds the caller waited for this batch."""
    laterality: tuple[str | None, ...] = ()
    """R, L or None if unknown, for each volume; empty if all are known."""
    drawn: Any = None
    """What the loader's caller has drawn at random for these volumes; sliced with them."""

    __repr__ = fields_line

    def __len__(self) -> int:
        return len(self.index)


class Loader:
    """Reads batches of `rows` in the order of octfm.store.order: every row once per epoch, or scanners equally often.

    World size, prefetching and threads change which process reads a volume, and when, but never the global batch.
    """

    def __init__(
        self,
        store: Store,
        rows: Sequence[int] | np.ndarray,
        global_batch_size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
        balance: bool = False,
        allocate: Callable[[int], np.ndarray] | None = None,
        draw: Callable[[Batch], Any] | None = None,
    ):
        """`allocate`: see BatchMemory. `draw`: makes a batch's `drawn` once its volumes are read, in a thread of its
        own; calls for two batches may overlap."""
        self.store, self.rows = store, np.asarray(rows, dtype=np.int64)
        self.global_batch_size, self.seed, self.prefetch = global_batch_size, seed, prefetch
        self.rank, self.world = rank, world
        if not len(self.rows):
            raise ConfigError(
                f"{store.path}: no rows to draw batches from; see data.scanners, data.max_samples and the split"
            )
        if not 0 <= rank < world:
            raise ConfigError(f"rank must be in 0 … {world - 1} (world {world}), got {rank}")
        if prefetch < 0:
            raise ConfigError(f"data.prefetch: expected 0 or more steps, got {prefetch}")
        accumulation(global_batch_size, 1, world)
        readers = min(prefetch + 1, store.reads_at_once(global_batch_size // world))
        self._reader = ThreadPoolExecutor(readers, thread_name_prefix="octfm-loader")
        # Two more make `drawn` of batches already read, which takes as long as an update on a fast GPU.
        self._drawer = ThreadPoolExecutor(2, thread_name_prefix="octfm-draw")
        # The caller works on one batch and may still hold the one before; `prefetch` are ready or being read.
        self._memory = BatchMemory(store.image_size, spare=prefetch + 3, allocate=allocate)
        self._ahead: dict[int, Future[Batch]] = {}
        self._closed, self._draw = False, draw
        self._excluded: frozenset[int] = frozenset()
        groups, counts = store.turns(self.rows, global_batch_size)
        if balance:
            if len(groups) > 1:
                raise ConfigError(
                    "data.balance_scanners: expected no streamed phantoms beside the store, which have a share of "
                    "their own; set it to false, or leave data.phantoms out"
                )
            groups, counts = _by_scanner(store, self.rows), None
        self._order = Order(groups, seed, counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps_per_epoch(self) -> float:
        return epoch_volumes(self.store, self.rows, self.global_batch_size) / self.global_batch_size

    @property
    def by_turns(self) -> bool:
        """Whether groups of volumes take turns, so that those of small groups come more often."""
        return len(self._order.groups) > 1

    def exclude(self, rows: Iterable[int]) -> None:
        """From the next `batches` on, replace each of these rows by the next one in its epoch's order."""
        self._excluded = frozenset(int(row) for row in rows)
        for group in self._order.groups:
            if self._excluded.issuperset(group.tolist()):
                of = f" of {self.store.rows[group[0]].scanner}" if len(self._order.groups) > 1 else ""
                raise ConfigError(f"{self.store.path}: every volume{of} is excluded, none is left to train on")
        # Batches that were read ahead may hold an excluded volume.
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def positions(self, step: int) -> np.ndarray:
        """int64 [global_batch_size / world]: this rank's positions in the run's sequence of volumes."""
        # Contiguous shares: with another number of ranks the global batch stays the same, in the same order.
        share = self.global_batch_size // self.world
        return step * self.global_batch_size + self.rank * share + np.arange(share, dtype=np.int64)

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """int64 [B]: the store rows at these positions."""
        return self._order.rows_at(positions, self._excluded)

    def batches(self, step: int) -> Batch:
        """This rank's share of the global batch of `step`; the following steps are read in the background.

        Raises StoreError naming the step, whose cause is the error of the reader; errors of `draw` as they are.
        """
        if self._closed:
            raise RuntimeError("the loader is closed")
        start = time.perf_counter()
        needed = range(step, step + self.prefetch + 1)
        # After a jump (resume, rollback) batches prefetched for other steps are useless.
        for other in [s for s in self._ahead if s not in needed]:
            self._ahead.pop(other).cancel()
        for s in needed:
            if s not in self._ahead:
                self._ahead[s] = self._begin(s)
        batch = self._ahead.pop(step).result()
        return replace(batch, wait_s=time.perf_counter() - start)

    def close(self) -> None:
        """Stop the threads that read and draw; safe to call twice."""
        self._closed = True
        for thread in (self._reader, self._drawer):
            thread.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _begin(self, step: int) -> Future[Batch]:
        reading = self._reader.submit(self._load, step)
        draw = self._draw
        if draw is None:
            return reading

        def drawn() -> Batch:
            batch = reading.result()
            return replace(batch, drawn=draw(batch))

        drawing = self._drawer.submit(drawn)
        drawing.add_done_callback(lambda ended: reading.cancel() if ended.cancelled() else None)
        return drawing

    def _load(self, step: int) -> Batch:
        positions = self.positions(step)
        index = self.indices(positions)
        try:
            # Runs in the reader thread, into recycled memory.
            return batch_of(self.store, index, positions, self._memory.lend(len(index)))
        # Any error at all: the caller, who waits for this thread, learns the step.
        except Exception as error:
            raise StoreError(f"reading the batch of step {step} failed: {error}") from error


def batch_of(store: Store, index: np.ndarray, positions: np.ndarray | None = None, out: Arrays | None = None) -> Batch:
    """These rows of a store, read into `out` if given; positions in the run are by default their numbers."""
    arrays, rows = store.read(index, out), [store.rows[i] for i in index]
    return Batch(
        **vars(replace(arrays, acquisition=tuple(row.acquisition for row in rows))),
        index=index,
        position=index if positions is None else positions,
        laterality=tuple(row.laterality for row in rows),
    )


def batch_of_voxels(voxels: np.ndarray) -> Batch:
    """Volumes of no store, uint8 [B, D, H, W], with a tissue band in the middle: to measure steps."""
    volumes, d, h, w = voxels.shape
    surfaces = np.broadcast_to(np.array([0.4, 0.6, 0.0, 1.0], np.float32)[:, None, None] * h, (volumes, 4, d, w))
    index = np.arange(volumes)
    return Batch(voxels, surfaces[:, :2].copy(), surfaces[:, 2:].astype(np.int16), index=index, position=index)


def epoch_volumes(store: Store, rows: np.ndarray, batch: int) -> float:
    """Volumes per epoch: all `rows`; with phantoms mixed in, as many as pass while each stored volume is used once."""
    groups, counts = store.turns(rows, batch)
    return len(groups[0]) * sum(counts) / counts[0]


def _by_scanner(store: Store, rows: np.ndarray) -> list[np.ndarray]:
    scanner = np.array([store.rows[row].scanner for row in rows])
    return [rows[scanner == name] for name in np.unique(scanner)]


def accumulation(global_batch_size: int, per_device_batch_size: int, world: int) -> int:
    """Forward passes per optimizer step: global / (per device × world ranks).

    Raises ConfigError, suggesting the nearest valid values, if it is not a whole number.
    """
    for name, value in (
        ("data.global_batch_size", global_batch_size),
        ("data.per_device_batch_size", per_device_batch_size),
        ("world", world),
    ):
        if value < 1:
            raise ConfigError(f"{name}: expected at least 1, got {value}")
    per_pass = per_device_batch_size * world
    passes, rest = divmod(global_batch_size, per_pass)
    if not rest:
        return passes
    choices = " or ".join(str(k * per_pass) for k in (passes, passes + 1) if k)
    remedy = f"data.global_batch_size={choices}"
    if global_batch_size % world == 0:
        share = global_batch_size // world
        divisors = [k for k in range(1, share + 1) if share % k == 0]
        below = [k for k in divisors if k < per_device_batch_size][-1:]
        above = [k for k in divisors if k > per_device_batch_size][:1]
        remedy += f", or data.per_device_batch_size={' or '.join(map(str, below + above))}"
    raise ConfigError(
        f"data.global_batch_size {global_batch_size} is not a multiple of per_device_batch_size "
        f"{per_device_batch_size} × {world} {'ranks' if world > 1 else 'rank'} = {per_pass}; "
        f"nearest that work: {remedy}"
    )


def microbatches(batch: Batch, size: int) -> Iterator[Batch]:
    """The batch in parts of `size`, in order. The first part has the whole wait_s and the others 0, so it sums up."""
    if size < 1 or len(batch) % size:
        raise ConfigError(f"data.per_device_batch_size {size} does not divide the {len(batch)} volumes of a rank")
    for start in range(0, len(batch), size):
        columns = {
            f.name: value[start : start + size]
            for f in fields(batch)
            if f.name != "wait_s" and (value := getattr(batch, f.name)) is not None
        }
        yield Batch(**columns, wait_s=0.0 if start else batch.wait_s)


class BatchMemory:
    """Allocates `Arrays` for volumes of one size, reusing buffers that are no longer referenced: page faults of fresh
    memory cost as much as filling it.

    A buffer stays in use as long as any view of it exists, such as a slice or a tensor, and is reclaimed automatically
    when the last view is gone. At most `spare` batches are kept idle; further buffers are freed.
    """

    def __init__(self, image_size: Sequence[int], spare: int, allocate: Callable[[int], np.ndarray] | None = None):
        """`allocate` gives uint8 [n] for a number of bytes; default: ordinary memory."""
        self._shapes, self._spare = shapes(image_size), spare
        self._allocate = allocate or (lambda size: np.empty(size, np.uint8))
        self._idle: dict[int, list[np.ndarray]] = {}
        """Idle buffers by size in bytes."""

    def lend(self, count: int) -> Arrays:
        """Uninitialised arrays for `count` volumes."""
        voxels, band, valid = (
            self._array((count, *shape), np.dtype(ARRAYS[name])) for name, shape in self._shapes.items()
        )
        return Arrays(voxels, band, valid)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape) * dtype.itemsize
        idle = self._idle.setdefault(size, [])
        # Not `if idle`: the thread that drops a batch may append while the reader thread pops.
        try:
            memory = idle.pop()
        except IndexError:
            memory = self._allocate(size)
        # It wraps a foreign buffer, so the base of each of its views is `buffer` itself, not `memory`: `buffer` is
        # collected when the last view is, and its finalizer can return `memory`.
        buffer = np.frombuffer(memory.data, dtype)
        weakref.finalize(buffer, _take_back, idle, memory, self._spare).atexit = False
        return buffer.reshape(shape)


def _take_back(idle: list[np.ndarray], memory: np.ndarray, spare: int) -> None:
    if len(idle) < spare:
        idle.append(memory)
