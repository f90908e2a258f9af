"""Features that the demonstration probes: those of a pretrained encoder and its baselines; or, if there are too few
scans to pretrain on, layers measured by the packaged network and those of an untrained encoder."""

import json
import time
from pathlib import Path

from octfm.demo.request import Request
from octfm.demo.stages import Stages
from octfm.encoder.embed import embed_store, histogram_baseline
from octfm.encoder.embeddings import Embeddings, read_embeddings
from octfm.encoder.encoder import assemble
from octfm.errors import Echo
from octfm.evaluation.arms import make_arms
from octfm.evaluation.tissue_map import tissue_map
from octfm.io.location import write_whole
from octfm.pretraining.learner import build_objective
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import start
from octfm.store.store import Store
from octfm.tasks.embed_run import embed_all
from octfm.tasks.layer_map import layer_map
from octfm.tasks.maps import save_pictures
from octfm.version import __version__

FEWEST = 100
"""With fewer training volumes the demonstration does not pretrain: 800 updates would show each of them more than
sixty times."""


def pretrained_features(
    stages: Stages, request: Request, config: PretrainConfig, store: Store, on: str
) -> list[Embeddings]:
    """Pretrain into OUT/run; returns all arms of a result, the encoder first. `on`: what it is trained on, in words."""
    with stages.stage("pretraining", f"{request.description}, {config.steps:,} steps on {on}"):
        run = pretrain(config, store, request.out / "run", echo=stages.note)
    with stages.stage("features", "of the encoder, of three untrained ones, and without an encoder"):
        return make_arms(embed_all(run, store.path, echo=stages.note))


def untrained_features(config: PretrainConfig, store: Store, run: Path, reason: str, echo: Echo) -> list[Embeddings]:
    """Write OUT/layers.jsonl, vectors, pictures and a run.json that says why nothing was pretrained.

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
    layers = layer_map(store, run.parent / "layers.jsonl", echo=echo)
    return [layers, untrained, histogram, tissue_map(store, untrained)]
