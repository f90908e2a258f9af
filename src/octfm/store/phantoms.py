"""Streamed phantoms as volumes of a store: rendered when they are read, prepared and with their truth, without files.

Row i is place i of a stream, a pure function of (seed, i). So runs resume exactly, any number of ranks share the
sequence, and excluded or rolled-back volumes are found again. `MixedStore` joins them to the volumes of a store.
"""

import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from octfm.config import Config, Seed
from octfm.errors import ConfigError, StoreError
from octfm.io.cores import available_cores
from octfm.io.isolation import UNLIMITED, Lost, each
from octfm.store.layout import Arrays, StoreRow, Unprepared
from octfm.store.store import Store
from octfm.volume.preprocessing import Millimetres, Preprocessing
from octfm.volume.segmentation import UNKNOWN

if TYPE_CHECKING:
    from octfm.phantom.native.prepared import PreparedPhantom
    from octfm.phantom.native.stream import Stream

VERSION = 4
"""Of the phantoms; in the checksum of every volume, so that those of another version make another run."""
HELD_OUT_SEED = 2**32
"""Added to the seed of the training phantoms for those of validation: beyond every seed that can be set."""
SCANNER = "phantom"
MOST_THREADS = 2
"""More threads than these would wait for the interpreter's lock: on more cores each renders in a process of its own."""
Conditions = tuple[str, ...]


class PhantomConfig(Config):
    """Streamed phantoms to train on, instead of a store's volumes or together with them."""

    seed: Seed = 0
    """Decides the phantoms. Those of validation have a seed of their own, which no setting can reach."""
    volumes: int = Field(default=100_000, ge=1, le=10_000_000)
    """Different phantoms; after so many they repeat."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of every global batch. Below 1 the others are volumes of data.store."""
    image_size: tuple[int, int, int] | None = None
    """Voxels [D, H, W] of a volume, as in Preprocessing; null: those of data.store, or Preprocessing's default."""
    target_spacing: tuple[Millimetres, Millimetres, Millimetres] | None = None
    """Millimetres per voxel, likewise."""
    conditions: Conditions = ()
    """Conditions of the eyes, each equally often (docs/phantom.md); empty for all. Name all but one to learn what an
    encoder knows of a disease it has never seen."""

    @field_validator("conditions")
    @classmethod
    def _known(cls, conditions: Conditions) -> Conditions:
        if not conditions:
            return conditions
        # Phantoms need more than training does.
        from octfm.phantom.native.stream import CONDITIONS

        if wrong := [name for name in conditions if name not in CONDITIONS]:
            raise ValueError(f"{wrong[0]} is no condition of phantoms; they are {', '.join(CONDITIONS)}")
        return conditions

    def preprocessing(self) -> Preprocessing:
        """Preprocessing of phantoms if no store is named; an encoder trained on them expects scans prepared alike."""
        given = {"image_size": self.image_size, "target_spacing": self.target_spacing}
        return Preprocessing.model_validate({name: value for name, value in given.items() if value is not None})

    def among(self, batch: int) -> int:
        """Phantoms in a global batch of this size. Raises ConfigError unless that is a whole number."""
        count = round(self.share * batch)
        if abs(count - self.share * batch) > 1e-6 or (self.share < 1 and not 0 < count < batch):
            choices = [f"{n / batch:g}" for n in range(max(1, count - 1), min(batch, count + 2))]
            raise ConfigError(
                f"data.phantoms.share {self.share:g} of data.global_batch_size {batch} is {self.share * batch:g} "
                f"volumes; choose a share of whole volumes, such as {' or '.join(choices) or '1'}"
            )
        return count


class _Condition(Mapping[str, str]):
    """The label `condition` of one phantom, drawn only when it is looked up."""

    def __init__(self, stream: "Stream", place: int):
        self._stream, self._place = stream, place

    def __getitem__(self, name: str) -> str:
        if name != "condition":
            raise KeyError(name)
        return self._stream.condition(self._place)

    def __iter__(self) -> Iterator[str]:
        return iter(("condition",))

    def __len__(self) -> int:
        return 1


class _Rows(Sequence[StoreRow]):
    """Rows made when they are looked up: a stream has too many to hold."""

    def __init__(self, count: int, row_of: Any):
        self._count, self._row_of = count, row_of

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(self._count)[index]]
        row = int(index)
        if not -self._count <= row < self._count:
            raise IndexError(f"no volume {row} of {self._count}")
        return self._row_of(row % self._count)


class PhantomStore(Store):
    """Phantoms for training, rows 0 to `volumes` - 1, then `held_out` for validation."""

    def __init__(
        self, config: PhantomConfig, preprocessing: Preprocessing, held_out: int = 0, threads: int | None = None
    ):
        from octfm.phantom.native.stream import CONDITIONS, Stream

        self.config, self.held_out = config, held_out
        header = {
            "fingerprint": preprocessing.fingerprint(),
            "compression": "none",
            "image_size": preprocessing.image_size,
            "preprocessing": preprocessing.model_dump(mode="json"),
        }
        super().__init__(Path(f"phantoms of seed {config.seed}"), header, (), threads)
        conditions = config.conditions or CONDITIONS
        self._streams = tuple(
            Stream(seed, conditions=conditions, size=self.image_size)
            for seed in (config.seed, config.seed + HELD_OUT_SEED)
        )
        self._spacing, self._margin_mm = preprocessing.target_spacing, preprocessing.margin_mm
        self.rows = _Rows(config.volumes + held_out, self._row)  # pyright: ignore[reportAttributeAccessIssue]
        self._painters: ThreadPoolExecutor | None = None
        self._starting = threading.Lock()

    def __reduce__(self):
        return PhantomStore, (self.config, self.preprocessing, self.held_out, self.threads)

    def _place(self, row: int) -> tuple["Stream", int]:
        own = row < self.config.volumes
        return self._streams[0 if own else 1], row if own else row - self.config.volumes

    def _row(self, row: int) -> StoreRow:
        stream, place = self._place(row)
        name = f"phantom {stream.seed}-{place}"
        return StoreRow(
            index=row,
            acquisition=name,
            uri=name,
            participant=name,
            eye_id=f"{name} R",
            laterality="R",
            scanner=SCANNER,
            protocol=SCANNER,
            split="train" if row < self.config.volumes else "val",
            participant_labels=_Condition(stream, place),  # pyright: ignore[reportArgumentType]
            flags=(),
            confident=True,
            confidence={},
            transform={},
            checksum=f"version {VERSION}, {len(stream.conditions)} conditions, {name}",
        )

    def reads_at_once(self, count: int) -> int:
        # Each phantom is rendered on one core, and ranks share those of their host; a single phantom is rendered by the
        # reading thread itself.
        cores = self.threads or available_cores(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        return max(1, cores // count) if count > 1 else 1

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        index = self._numbers(indices)
        out = out or Arrays.empty(len(index), self.image_size)
        labels = np.empty((len(index), *self.image_size), np.uint8)

        cores = self.threads or available_cores()
        apart = len(index) > 1 and cores > MOST_THREADS

        def paint(at: int) -> None:
            stream, place = self._place(int(index[at]))
            job = (stream, place, self.image_size, self._spacing, self._margin_mm)
            image = _rendered_apart(job) if apart else _rendered(job)
            out.voxels[at], out.band[at], out.valid[at] = image.voxels, image.band, image.valid
            labels[at] = image.labels

        if len(index) > 1 and cores > 1:
            # NumPy and SciPy release the interpreter's lock in the loops that take the time.
            with self._starting:
                if self._painters is None or self._process != os.getpid():
                    self._painters, self._process = ThreadPoolExecutor(cores, "octfm-phantoms"), os.getpid()
            list(self._painters.map(paint, range(len(index))))
        else:
            for at in range(len(index)):
                paint(at)
        names = tuple(self.rows[i].acquisition for i in index.tolist())
        return replace(out, labels=labels, acquisition=names)

    def holds(self, row: int, arrays: Arrays) -> bool:
        """Render the phantom again: voxels and truth must both be the same."""
        own = self.read([row])
        return own.checksum() == arrays.checksum() and np.array_equal(_truth(own), _truth(arrays))

    def verify(self, sample: int | None = None, seed: int = 0) -> int:
        """Render a phantom twice: both must be the same. Raises StoreError; returns 1, the number checked."""
        if not self.holds(0, self.read([0])):
            raise StoreError(f"{self.path}: one phantom rendered twice differs; report this as a bug")
        return 1

    def damaged(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, str]:
        return {}

    def unprepared(self) -> tuple[Unprepared, ...]:
        return ()

    def recorded(self, rows: np.ndarray) -> np.ndarray:
        return rows[:0]

    def summary(self) -> dict[str, Any]:
        return {"volumes": len(self), "participants": 0, "by_scanner": {}, "low_confidence": 0, "unprepared": {}}

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>"

    def __repr__(self) -> str:
        return f"PhantomStore({self.config.volumes:,} phantoms of seed {self.config.seed})"


class MixedStore(Store):
    """The volumes of a store, then streamed phantoms on the same grid."""

    def __init__(self, store: Store, phantoms: PhantomStore):
        self.__dict__.update(store.__dict__)
        self.volumes, self.phantoms, self._ends = store, phantoms, (0, len(store), len(store) + len(phantoms))
        self.rows = _Rows(self._ends[-1], self._row)  # pyright: ignore[reportAttributeAccessIssue]
        self._one_at_a_time = threading.Lock()

    def __reduce__(self):
        return MixedStore, (self.volumes, self.phantoms)

    def _row(self, row: int) -> StoreRow:
        part, first = (self.volumes, 0) if row < len(self.volumes) else (self.phantoms, len(self.volumes))
        return replace(part.rows[row - first], index=row)

    def reads_at_once(self, count: int) -> int:
        return self.phantoms.reads_at_once(max(1, round(self.phantoms.config.share * count)))

    def read(self, indices: Sequence[int] | np.ndarray, out: Arrays | None = None) -> Arrays:
        index = self._numbers(indices)
        out = out or Arrays.empty(len(index), self.image_size)
        labels = np.full((len(index), *self.image_size), UNKNOWN, np.uint8)
        for part, (first, end) in zip((self.volumes, self.phantoms), pairwise(self._ends), strict=True):
            mine = np.flatnonzero((index >= first) & (index < end))
            if len(mine):
                with self._one_at_a_time if part is self.volumes else nullcontext():
                    found = part.read(index[mine] - first)
                out.voxels[mine], out.band[mine], out.valid[mine] = found.voxels, found.band, found.valid
                if found.labels is not None:
                    labels[mine] = found.labels
        return replace(out, labels=labels, acquisition=tuple(self.rows[i].acquisition for i in index.tolist()))

    def holds(self, row: int, arrays: Arrays) -> bool:
        if row < len(self.volumes):
            return self.volumes.holds(row, arrays) and bool((_truth(arrays) == UNKNOWN).all())
        return self.phantoms.holds(row - len(self.volumes), arrays)

    def verify(self, sample: int | None = None, seed: int = 0) -> int:
        return self.volumes.verify(sample, seed) + self.phantoms.verify(sample, seed)

    def damaged(self, rows: Sequence[int] | np.ndarray | None = None) -> dict[int, str]:
        checked = np.arange(len(self.volumes)) if rows is None else self.recorded(self._numbers(rows))
        return self.volumes.damaged(checked)

    def recorded(self, rows: np.ndarray) -> np.ndarray:
        return rows[rows < len(self.volumes)]

    def turns(self, rows: np.ndarray, batch: int) -> tuple[list[np.ndarray], list[int]]:
        """Every global batch has its share of phantoms, at random places."""
        phantoms = self.phantoms.config.among(batch)
        return [self.recorded(rows), rows[rows >= len(self.volumes)]], [batch - phantoms, phantoms]

    @property
    def left_out(self) -> tuple[str, ...]:
        return self.volumes.left_out

    def unprepared(self) -> tuple[Unprepared, ...]:
        return self.volumes.unprepared()

    def summary(self) -> dict[str, Any]:
        return self.volumes.summary()

    def __repr__(self) -> str:
        return f"MixedStore({self.volumes!r}, {self.phantoms!r})"


def _rendered(job: tuple) -> "PreparedPhantom":
    # Phantoms need more than training does.
    from octfm.phantom.native.prepared import render_prepared

    return render_prepared(*job)


def _rendered_apart(job: tuple) -> "PreparedPhantom":
    """`_rendered` in a child process; in this process, with a warning, if the child cannot start or ends early, for
    example because memory ran out."""
    try:
        (image,) = each(_rendered, [job], UNLIMITED, lambda _: UNLIMITED.seconds)
        if not isinstance(image, Lost):
            return image
        trouble = image.what
    # `each` also raises errors of the rendering itself, which the call below raises again.
    except (OSError, RuntimeError, ConfigError) as error:
        trouble = f"did not start ({error})"
    warnings.warn(
        f"a process that renders phantoms {trouble}; this one renders in its place, more slowly; free memory, or run "
        "fewer processes",
        stacklevel=2,
    )
    return _rendered(job)


def _truth(arrays: Arrays) -> np.ndarray:
    """Labels of a batch of one; UNKNOWN without any."""
    return arrays.labels[0] if arrays.labels is not None else np.full(arrays.voxels[0].shape, UNKNOWN, np.uint8)
