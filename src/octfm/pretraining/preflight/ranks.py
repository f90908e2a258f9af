"""Checks between running ranks: the same store, folder and order on all of them, and no volume read twice (F10)."""

import time

import numpy as np

from octfm.errors import CheckpointError, ConfigError, TrainingError
from octfm.pretraining.monitors.feed import digest
from octfm.run.folder import RunFolder
from octfm.run.runtime import Runtime
from octfm.store.loader import Loader

PATIENCE_S = 20.0
"""Longest wait for a new file to appear on a network file system."""
AHEAD = 4
"""Steps whose order of volumes the ranks compare before the first step."""


def require_same_data(runtime: Runtime, identity: str) -> None:
    """Raise ConfigError unless all ranks opened the same volumes in the same order; `identity` is their hash."""
    # 48 bits of the hash, which a float64 holds exactly.
    if other := _different_ranks(runtime, float(int(identity[:12], 16))):
        raise ConfigError(
            f"rank {other[0]} has opened other training volumes than rank 0: data.store names different stores on "
            "their hosts; copy rank 0's prepared store there, or put it where all hosts can read it"
        )


def _different_ranks(runtime: Runtime, value: float) -> list[int]:
    """Ranks whose `value` differs from rank 0's."""
    values = runtime.exchange(np.array([value]))[:, 0]
    return np.flatnonzero(values != values[0]).tolist()


def require_same_folder(runtime: Runtime, run: RunFolder) -> None:
    """Raise ConfigError unless all ranks of a sharded run see rank 0's run folder, where each writes its shards."""
    if not runtime.sharded:
        return
    key = runtime.first(lambda: run.key)
    # Well before the collective call below would time out.
    deadline = time.monotonic() + min(PATIENCE_S, runtime.timeout_s / 3)
    while not (seen := _has_key(run, key)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = np.flatnonzero(runtime.exchange(np.array([float(seen)]))[:, 0] == 0)
    if len(blind):
        raise ConfigError(
            f"rank {blind[0]} does not see rank 0's run folder ({run.path}), into which every rank writes its shards "
            "with runtime.parallel=fsdp; put --out, or for a run in a bucket $OCTFM_CACHE, on a disk that all hosts "
            "share"
        )


def _has_key(run: RunFolder, key: str) -> bool:
    try:
        return run.key == key
    except CheckpointError:
        return False


def require_same_order(runtime: Runtime, loader: Loader, step: int) -> None:
    """Raise TrainingError unless all ranks would draw the same volumes for the next AHEAD steps."""
    places = step * loader.global_batch_size + np.arange(AHEAD * loader.global_batch_size)
    if other := _different_ranks(runtime, digest(loader.indices(places))):
        raise TrainingError(
            f"rank {other[0]} of {runtime.world} draws its volumes in another order than rank 0, so some would be "
            "trained on twice and others never; start all ranks with the same seed, settings and store (F10)"
        )


def require_disjoint(runtime: Runtime, loader: Loader, step: int) -> None:
    """Raise TrainingError unless the ranks' places in this step's global batch cover it, each once."""
    taken = runtime.exchange(loader.positions(step).astype(np.float64)).astype(np.int64)
    places = taken - step * loader.global_batch_size
    if np.array_equal(np.sort(places.ravel()), np.arange(loader.global_batch_size)):
        return
    twice = len(places.ravel()) - len(np.unique(places))
    raise TrainingError(
        f"the {runtime.world} ranks would read {twice} of {loader.global_batch_size} volumes of a batch twice; report "
        "this as a bug (F10)"
    )
