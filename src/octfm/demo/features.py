"""Features that the demonstration probes: of a pretrained encoder and its baselines; or, of scans too few to pretrain
on, the layers that the packaged network measures and an untrained encoder."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.encoder.embed import embed_store, histogram_baseline
from octfm.encoder.embeddings import Embeddings, of_store, read_embeddings, take_rows
from octfm.encoder.encoder import assemble
from octfm.errors import Echo
from octfm.evaluation.arms import make_arms
from octfm.evaluation.tissue_map import tissue_map
from octfm.io.location import write_whole
from octfm.layers.table import read_table, write_table
from octfm.layers.zones import UNIT
from octfm.models.layer_net import MASKS
from octfm.pretraining.learner import build_objective
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import start
from octfm.store.store import Store
from octfm.tasks.embed_run import embed_all
from octfm.tasks.maps import save_pictures
from octfm.version import __version__

FEWEST = 100
"""Training volumes below which the demonstration does not pretrain: 1,300 updates would show each of them more than a
hundred times."""
NUMBERS = (*UNIT.values(), *(f"{name}_nl" for name in MASKS))
"""Columns of the table of octfm segment that describe a scan."""


def pretrained_features(run: Path, store: Store, echo: Echo) -> list[Embeddings]:
    """All arms of a result, the encoder first."""
    return make_arms(embed_all(run, store.path, echo=echo))


def untrained_features(config: PretrainConfig, store: Store, run: Path, reason: str, echo: Echo) -> list[Embeddings]:
    """Write OUT/layers.csv, vectors, pictures and a run.json that says why nothing was pretrained.

    Returns layers, the untrained encoder, the histogram and the tissue map.
    """
    network = build_objective(config, store.preprocessing).frozen_encoder(config.objective.frozen)
    encoder = assemble(
        network, config, store.preprocessing, "random initialisation", store.fingerprint, start("fp32", None)
    )
    folder = run / "embeddings"
    untrained = read_embeddings(embed_store(encoder, store, folder, "random_init", echo))
    histogram = read_embeddings(histogram_baseline(store, folder))
    save_pictures(encoder, store, run / "figures")
    record = {"octfm": __version__, "started": time.strftime("%Y-%m-%d %H:%M"), "not_pretrained": reason}
    write_whole(run / "run.json", f"{json.dumps(record, indent=1)}\n".encode())
    layers = layers_of(store, run.parent / "layers.csv", echo)
    return [layers, untrained, histogram, tissue_map(store, untrained)]


def layers_of(store: Store, table: Path, echo: Echo) -> Embeddings:
    """Thickness of the zones and volumes of fluid of every scan of the store, float64 [N, len(NUMBERS)].

    A number that a scan does not allow is the mean of those of the others. The table stays, and resumes.
    """
    write_table([row.uri for row in store.rows], table, echo=echo)
    rows = {row["source"]: row for row in read_table(table)}
    values = np.array([[float(rows[r.uri][name] or "nan") for name in NUMBERS] for r in store.rows])
    known = np.isfinite(values)
    mean = np.where(known, values, 0).sum(0) / np.maximum(known.sum(0), 1)
    data = of_store(store)
    data = replace(
        data,
        name="layers",
        path="layers",
        metadata={"encoder": "packaged network of octfm segment"},
        vectors=np.where(known, values, mean),
    )
    return take_rows(data, np.argsort(data.acquisition))
