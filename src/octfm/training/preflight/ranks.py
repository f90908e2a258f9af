"""What ranks can only know of each other by asking: that they train on the same store, and that no volume is trained on twice (F10)."""

import numpy as np

from octfm.data.loader import Loader
from octfm.errors import ConfigError, TrainingError
from octfm.training.runtime import Runtime


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


def require_disjoint(runtime: Runtime, loader: Loader, step: int) -> None:
    """The places of the global batch that the ranks are about to take are all of it, each once."""
    places = runtime.exchange(loader.positions(step).astype(np.float64)).astype(np.int64) - step * loader.global_batch_size
    if np.array_equal(np.sort(places.ravel()), np.arange(loader.global_batch_size)):
        return
    twice = len(places.ravel()) - len(np.unique(places))
    raise TrainingError(
        f"the {runtime.world} ranks would read {twice} of {loader.global_batch_size} volumes of a batch twice; report this (F10)"
    )
