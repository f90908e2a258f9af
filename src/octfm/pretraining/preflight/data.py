"""Checks of a run's data: batch arithmetic, ranks, order, store, splits and probe labels; and a sample of volumes."""

import time
from dataclasses import dataclass

import numpy as np

from octfm.catalog.participants.ids import under_one_id
from octfm.errors import ConfigError, OctfmError, StoreError
from octfm.models.token_map import PADDING, TooFewTokens, token_grid, token_map
from octfm.pretraining.monitors.online_probe import find_cases
from octfm.pretraining.preflight.check import Check, fail, fail_with, passed, warn
from octfm.pretraining.settings import PretrainConfig
from octfm.run.memory import host_bytes_available
from octfm.store.layout import volume_bytes
from octfm.store.loader import Loader, accumulation
from octfm.store.selection import evenly
from octfm.store.store import Store
from octfm.volume.volume import Shape3

SAMPLE = 32
"""Volumes read to count tokens."""
AT_ONCE = 4
"""Sampled volumes in memory at a time; a volume may be 9 MB."""
MOST_STEPS = 4096
"""Most steps whose order of volumes is checked."""
MOST_EPOCHS = 1600
"""Passes above which the doctor warns: the longest schedule of masked autoencoders on ImageNet (arXiv:2111.06377)."""
CHECKSUMS = 8
"""Volumes whose checksum is verified."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Some training volumes, evenly spread over the store."""

    rows: np.ndarray
    """int64 [n] store rows."""
    tokens: np.ndarray
    """uint8 [n, d, h, w]: padding, background or tissue."""
    band_rows: float
    """Mean depth of the tissue band in voxels."""
    volumes_per_s: float
    """Reading speed of one process."""


def read_sample(config: PretrainConfig, store: Store, rows: np.ndarray) -> Sample:
    """Read up to SAMPLE of `rows`, at least one. Raises TooFewTokens if a volume has fewer than two tokens."""
    chosen = spread(store, rows, SAMPLE)
    size, patch = store.preprocessing.image_size, config.model.patch_size
    tokens, depth, elapsed = [], [], 0.0
    store.read(chosen[:1])  # open the store before timing
    for first in range(0, len(chosen), AT_ONCE):
        start = time.perf_counter()
        arrays = store.read(chosen[first : first + AT_ONCE])
        elapsed += time.perf_counter() - start
        tokens.append(token_map(arrays.band, arrays.valid, size, patch))
        depth.append((arrays.band[:, 1] - arrays.band[:, 0]).clip(0))
    few = np.count_nonzero(np.concatenate(tokens) != PADDING, axis=(1, 2, 3)) < 2
    if few.any():
        raise TooFewTokens("one or none").naming([store.rows[chosen[few.argmax()]].acquisition])
    return Sample(
        chosen, np.concatenate(tokens), float(np.mean(np.concatenate(depth))), len(chosen) / max(elapsed, 1e-9)
    )


def spread(store: Store, rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of these rows, evenly spread; half of them streamed phantoms if there are both kinds."""
    own = store.recorded(rows)
    kinds = [kind for kind in (own, np.setdiff1d(rows, own, assume_unique=True)) if len(kind)]
    return np.concatenate([evenly(kind, max(1, count // len(kinds))) for kind in kinds])


def patches_tile(config: PretrainConfig, store: Store) -> Check:
    """Fail unless volumes divide into whole patches."""
    size, patch = store.preprocessing.image_size, config.model.patch_size
    try:
        grid: Shape3 = token_grid(size, patch)
    except ValueError as error:
        advice = "choose a model.patch_size that divides the store's volumes"
        return fail("token grid", str(error).partition(";")[0], advice)
    return passed("token grid", "{} x {} x {} tokens".format(*grid))


def arithmetic(config: PretrainConfig, store: Store, replicas: int, volumes: int) -> Check:
    """Check that global batch = per-device batch x devices x accumulation, and that batches fit into memory (F7)."""
    name, data = "batch arithmetic", config.data
    try:
        parts = accumulation(data.global_batch_size, data.per_device_batch_size, replicas)
    except ConfigError as error:
        return fail_with(name, error, "give positive numbers")
    product = f"{data.per_device_batch_size} x {replicas} device{'s' if replicas > 1 else ''} x {parts} accumulation"
    measured = f"global batch {data.global_batch_size} = {product}; {volumes} volumes"
    scanners = set(data.scanners or [row.scanner for row in store.rows]) - set(data.leave_out_scanners)
    train = [row for row in store.rows if row.split == "train" and row.scanner in scanners]
    if left_out := sum(row.layout not in data.layouts for row in train):
        measured += f" ({left_out} radial scans left out; data.layouts=[raster,radial] includes them)"
    if left_out := sum(row.modality not in data.modalities for row in train):
        measured += f" ({left_out} left out: data.modalities is {', '.join(data.modalities)})"
    if volumes == 0:
        advice = "check data.scanners, data.max_samples and the splits"
        return fail(name, "no training volume is left after selection", advice)
    # On top of the prefetched batches: this step's, and the previous step's until this one has arrived.
    held = (data.prefetch + 2) * data.global_batch_size // replicas
    ahead, free = held * volume_bytes(store.preprocessing.image_size), host_bytes_available()
    if ahead > free:
        taken = f"{data.prefetch} steps read ahead take {ahead / 1e9:,.1f} GB of host memory"
        advice = "lower data.prefetch, or data.global_batch_size (F7)"
        return fail(name, f"{taken}, {free / 1e9:,.1f} GB are free", advice)
    epochs = config.steps * data.global_batch_size / volumes
    measured = f"{measured}, {config.steps:,} steps = {epochs:,.1f} epochs"
    if epochs > MOST_EPOCHS:
        fewer = max(1, round(MOST_EPOCHS * volumes / data.global_batch_size))
        often = f"each volume would be seen {epochs:,.0f} times"
        advice = f"choose --steps {fewer} or fewer, or prepare more volumes; octfm plan STORE proposes a length"
        return warn(name, measured, f"{often}: {advice}")
    return passed(name, measured)


def ranks(config: PretrainConfig, store: Store, train_rows: np.ndarray, world: int) -> Check:
    """Fail unless ranks take disjoint places that cover the global batch, in the first two steps and the last (F10)."""
    batch = config.data.global_batch_size
    worlds = [world] if world > 1 else [n for n in (2, 4) if batch % n == 0]
    for count in worlds:
        # The last one as well, where large positions could overflow.
        for step in (0, 1, config.steps - 1):
            shares = []
            # A loader per rank in this process. It need not balance scanners, which takes long and moves no position.
            for rank in range(count):
                with Loader(store, train_rows, batch, config.seed, rank, count, prefetch=0) as loader:
                    shares.append(loader.positions(step))
            together = np.sort(np.concatenate(shares))
            if not np.array_equal(together, step * batch + np.arange(batch)):
                repeated = len(together) - len(np.unique(together))
                measured = f"at step {step} the {count} ranks read {repeated} of {batch} volumes twice"
                advice = "every rank must take its own places of the global batch; report this as a bug (F10)"
                return fail("ranks", measured, advice)
    if not worlds:
        return passed("ranks", "one rank; a global batch of this size cannot be divided by 2 or 4")
    return passed("ranks", f"disjoint shares of the global batch with {' or '.join(map(str, worlds))} ranks")


def order(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> Check:
    """Fail if an epoch has a volume twice."""
    name, batch, volumes = "data order", config.data.global_batch_size, len(train_rows)
    with Loader(store, train_rows, batch, config.seed, balance=config.data.balance_scanners) as loader:
        steps = min(config.steps, 2 * -(-volumes // batch) + 1, MOST_STEPS)
        rows, by_turns = loader.indices(np.arange(steps * batch)), loader.by_turns
    if by_turns and not config.data.balance_scanners:
        streamed = batch - np.array([len(store.recorded(step)) for step in rows.reshape(-1, batch)])
        wanted = store.turns(train_rows, batch)[1][1]
        if (streamed != wanted).any():
            measured = f"batches have {streamed.min()} to {streamed.max()} phantoms instead of {wanted}"
            return fail(name, measured, "every batch must have the same share; report this as a bug")
        return passed(name, f"{wanted} of the {batch} volumes of every batch are streamed phantoms")
    if volumes < batch:
        measured = f"{volumes} training volumes for batches of {batch}: every batch repeats some"
        return warn(name, measured, "lower data.global_batch_size, or prepare more volumes")
    if config.data.balance_scanners:
        return passed(name, f"scanners take turns over {volumes} volumes")
    # Each epoch by itself, since the first batch of the next may repeat volumes of this one's last.
    for first in range(0, len(rows), volumes):
        epoch = rows[first : first + volumes]
        if again := len(epoch) - len(np.unique(epoch)):
            measured = f"{again} of {len(epoch)} places in an epoch of {volumes} volumes repeat a volume"
            return fail(name, measured, "every epoch must have every volume once; report this as a bug")
    return passed(name, f"every volume once in an epoch of {volumes / batch:.3g} steps")


def prepared(store: Store) -> Check:
    """Fail if the store was prepared by another version, or if a sample of volumes is damaged; warn if volumes are
    still being added to it."""
    if store.fingerprint != store.preprocessing.fingerprint():
        measured = f"{store.path} was prepared by another version of octfm"
        return fail("store", measured, "prepare into a new folder (F15)")
    try:
        count = store.verify(sample=min(CHECKSUMS, len(store)))
    except StoreError as error:
        return fail_with("store", error)
    if not len(store.recorded(np.arange(len(store)))):
        return passed("store", "none; phantoms are streamed, and the same one was rendered twice")
    if unfinished := store.unfinished():
        advice = "wait for octfm prepare, or run it again: a run cannot go on with other volumes than it began with"
        return warn("store", unfinished, advice)
    return passed("store", f"{len(store)} volumes, {count} checksums verified")


def splits(store: Store, train_rows: np.ndarray, validation_rows: np.ndarray) -> Check:
    """Fail if a participant is in two splits (F16), warn if nobody is left for validation (F12)."""
    recorded = [store.recorded(rows) for rows in (train_rows, validation_rows)]
    people = under_one_id([store.rows[row].participant for rows in recorded for row in rows])
    train, validation = set(people[: len(recorded[0])]), set(people[len(recorded[0]) :])
    streamed = [len(train_rows) - len(recorded[0]), len(validation_rows) - len(recorded[1])]
    if any(streamed) and not train:
        return passed("splits", f"{streamed[0]:,} streamed phantoms to train on, {streamed[1]} others to validate on")
    if shared := train & validation:
        measured = f"{len(shared)} participants are in training and validation"
        return fail("splits", measured, "split by participant (F16)")
    measured = f"{len(train)} participants to train on, {len(validation)} to validate on"
    if any(streamed):
        measured += f"; {streamed[0]:,} and {streamed[1]} streamed phantoms"
    if not validation:
        advice = "without validation participants there is no validation loss; scan with a val split"
        return warn("splits", measured, advice)
    return passed("splits", measured)


def probed(config: PretrainConfig, store: Store, train_rows: np.ndarray, validation_rows: np.ndarray) -> list[Check]:
    """Check that the online probe finds enough labelled volumes; no check if it is off (F12)."""
    try:
        cases = find_cases(config.probe, store, train_rows, validation_rows)
    except OctfmError as error:
        return [fail_with("online probe", error, "set probe.target=null to train without it")]
    if cases is None and config.probe.labels is not None:
        advice = "name one of its columns in probe.target, or leave probe.labels out"
        return [warn("online probe", f"off, although probe.labels is {config.probe.labels}", advice)]
    if cases is None:
        return []
    kind = f"{len(cases.classes)} classes" if cases.classes else "a number"
    counts = f"{len(cases.train)} training and {len(cases.held_out)} validation volumes"
    return [passed("online probe", f"{cases.target} ({kind}): {counts}")]
