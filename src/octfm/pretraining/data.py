"""The volumes of a run: its store, the rows to train on and the rows to validate on."""

from dataclasses import dataclass

import numpy as np

from octfm.errors import ConfigError
from octfm.pretraining.settings import PretrainConfig
from octfm.store.exclusion import without_excluded
from octfm.store.selection import matches, select
from octfm.store.store import Store


@dataclass(frozen=True, eq=False)
class Data:
    """A store with the rows to train on and those to measure the validation loss on."""

    store: Store
    train_rows: np.ndarray
    validation_rows: np.ndarray


def given_store(config: PretrainConfig, store: Store | None = None) -> Store:
    """The store of a run, given as an object or named in its config, without the volumes that it excludes.

    Raises ConfigError if it is given twice or not at all.
    """
    if store is not None and config.data.store is not None:
        raise ConfigError(f"a store was given ({store.path}) and data.store is {config.data.store}; give one of them")
    if store is None:
        if config.data.store is None:
            raise ConfigError("data.store is not set; name the prepared store, for example data.store=prepared/")
        store = Store.open(config.data.store)
    return without_excluded(store, config.data.exclude)


def training_rows(config: PretrainConfig, store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Store rows for training and for validation; the latter may be empty."""
    data = config.data
    train = select(
        store, "train", data.scanners, data.max_samples, data.leave_out_scanners, data.layouts, data.modalities
    )
    seen = set(data.scanners or (row.scanner for row in store.rows)) - set(data.leave_out_scanners)
    held_out = any(
        row.split == "val" and row.scanner in seen and matches(row, data.layouts, data.modalities) for row in store.rows
    )
    validation = np.array([], np.int64)
    if held_out:
        validation = select(
            store,
            "val",
            data.scanners,
            config.validation_volumes,
            data.leave_out_scanners,
            data.layouts,
            data.modalities,
        )
    return train, validation
