"""What ranks can only know of each other by asking: that they train on the same store, and that no volume is trained on twice (F10)."""

import time

import numpy as np

from octfm.errors import CheckpointError, ConfigError, TrainingError
from octfm.pretraining.monitors.feed import digest
from octfm.run.folder import RunFolder
from octfm.run.runtime import Runtime
from octfm.store.loader import Loader

PATIENCE_S = 20.0
"""Network file systems may show a new file that late."""


def require_same_data(runtime: Runtime, identity: str) -> None:
    """All ranks have opened the same training volumes, in the same order; `identity` is a hash of them."""
    # 48 bits of it: a float64 holds them exactly.
    found = runtime.exchange(np.array([float(int(identity[:12], 16))]))[:, 0]
    other = np.flatnonzero(found != found[0])
    if len(other):
        raise ConfigError(
            f"rank {other[0]} has opened other training volumes than rank 0: data.store names different stores on their hosts; copy the "
            "prepared store of rank 0 there, or put it where all hosts read it"
        )


def require_same_folder(runtime: Runtime, run: RunFolder) -> None:
    """Ranks with shards all write into the run folder: they must all see rank 0's."""
    if not runtime.sharded:
        return
    key = runtime.first(lambda: run.key)
    deadline = time.monotonic() + min(PATIENCE_S, runtime.timeout_s / 3)
    while not (seen := _has_key(run, key)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = np.flatnonzero(runtime.exchange(np.array([float(seen)]))[:, 0] == 0)
    if len(blind):
        raise ConfigError(
            f"rank {blind[0]} does not see the folder that rank 0 trains into ({run.path}); with runtime.parallel=fsdp every rank writes "
            "its shards there: put --out, or for a run in a bucket $OCTFM_CACHE, on a disk that all hosts share"
        )


def _has_key(run: RunFolder, key: str) -> bool:
    try:
        return run.key == key
    except CheckpointError:
        return False


AHEAD = 4
"""Steps whose volumes the ranks compare before the first."""


def require_same_order(runtime: Runtime, loader: Loader, step: int) -> None:
    """All ranks would draw the same volumes for the next steps."""
    places = step * loader.global_batch_size + np.arange(AHEAD * loader.global_batch_size)
    found = runtime.exchange(np.array([digest(loader.indices(places))]))[:, 0]
    other = np.flatnonzero(found != found[0])
    if len(other):
        raise TrainingError(
            f"rank {other[0]} of {runtime.world} draws its volumes in another order than rank 0, so some would be trained on twice and "
            "others never: start all ranks with the same seed, settings and store (F10)"
        )


def require_disjoint(runtime: Runtime, loader: Loader, step: int) -> None:
    """The places of the global batch that the ranks are about to take are all of it, each once."""
    places = (
        runtime.exchange(loader.positions(step).astype(np.float64)).astype(np.int64) - step * loader.global_batch_size
    )
    if np.array_equal(np.sort(places.ravel()), np.arange(loader.global_batch_size)):
        return
    twice = len(places.ravel()) - len(np.unique(places))
    raise TrainingError(
        f"the {runtime.world} ranks would read {twice} of {loader.global_batch_size} volumes of a batch twice; report this (F10)"
    )
