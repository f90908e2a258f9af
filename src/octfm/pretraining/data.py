"""The volumes of a run: its store or streamed phantoms, the rows to train on and the rows to validate on."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octfm.errors import ConfigError
from octfm.pretraining.settings import PretrainConfig
from octfm.store.exclusion import without_excluded
from octfm.store.phantoms import MixedStore, PhantomConfig, PhantomStore
from octfm.store.selection import select
from octfm.store.store import Store

OF_SCANS = ("scanners", "leave_out_scanners", "max_samples", "exclude")
"""Settings of section `data` that choose among recorded volumes; empty or null by default."""


@dataclass(frozen=True, eq=False)
class Data:
    """A store with the rows to train on and those to measure the validation loss on."""

    store: Store
    train_rows: np.ndarray
    validation_rows: np.ndarray


def given_store(config: PretrainConfig, store: Store | None = None) -> Store:
    """The store of a run, given as an object or named in its config, without the volumes that it excludes. With
    `data.phantoms`, streamed phantoms take its place or join it. ConfigError if it is given twice or not at all."""
    phantoms = config.data.phantoms
    if phantoms is not None and phantoms.share == 1 and (ignored := [n for n in OF_SCANS if getattr(config.data, n)]):
        raise ConfigError(
            f"data.{ignored[0]} chooses among the volumes of a store, and here all are streamed phantoms; leave it out "
            "(data.phantoms.volumes is the number of phantoms), or set data.phantoms.share below 1"
        )
    # Not a rule of the settings: those of an export have no section `data`.
    if phantoms is None and config.objective.learns_truth:
        raise ConfigError(
            f"objective.name {config.objective.name} learns from the truth of streamed phantoms; set "
            "data.phantoms.seed=1"
        )
    if isinstance(store, str | Path):
        raise TypeError("store: expected a Store, got a path; give octfm.Store.open(path)")
    if store is not None and not hasattr(store, "rows"):
        kind = type(store).__name__
        raise TypeError(f"store: expected a Store, got {kind}; octfm.prepare(catalog, folder, preprocessing) makes one")
    if store is not None and config.data.store is not None:
        raise ConfigError(f"a store was given ({store.path}) and data.store is {config.data.store}; give one of them")
    if store is None and config.data.store is None and phantoms is not None:
        if phantoms.share < 1:
            raise ConfigError(
                f"data.phantoms.share is {phantoms.share:g} and data.store is not set; name the prepared store of the "
                "other volumes, or train on phantoms alone with data.phantoms.share=1"
            )
        return PhantomStore(phantoms, phantoms.preprocessing(), config.validation_volumes)
    if store is None:
        if config.data.store is None:
            raise ConfigError("data.store is not set; name the prepared store, for example data.store=prepared/")
        store = Store.open(config.data.store)
    store = without_excluded(store, config.data.exclude)
    return store if phantoms is None else _with_phantoms(config, phantoms, store)


def _with_phantoms(config: PretrainConfig, phantoms: PhantomConfig, store: Store) -> Store:
    """Phantoms on the grid of a store, with its volumes if they have a share of the batches."""
    own = store.preprocessing
    for name in ("image_size", "target_spacing"):
        wanted, found = getattr(phantoms, name), getattr(own, name)
        if wanted is not None and wanted != found:
            raise ConfigError(
                f"data.phantoms.{name} is {list(wanted)}, but the volumes of {store.path} have {list(found)}; leave it "
                "out (null), or name another store"
            )
    streamed = PhantomStore(phantoms, own, config.validation_volumes)
    if phantoms.share == 1:
        return streamed
    phantoms.among(config.data.global_batch_size)
    return MixedStore(store, streamed)


def training_rows(config: PretrainConfig, store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Store rows for training and for validation; the latter may be empty."""
    if isinstance(store, PhantomStore):
        return np.arange(store.config.volumes), np.arange(store.config.volumes, len(store))
    if isinstance(store, MixedStore):
        own, streamed = (training_rows(config, part) for part in (store.volumes, store.phantoms))
        train, validation = (np.concatenate((a, len(store.volumes) + b)) for a, b in zip(own, streamed, strict=True))
        return train, validation
    data, kinds = config.data, (config.data.leave_out_scanners, config.data.layouts, config.data.modalities)
    train = select(store, "train", data.scanners, data.max_samples, *kinds)
    return train, select(store, "val", data.scanners, config.validation_volumes, *kinds, required=False)
