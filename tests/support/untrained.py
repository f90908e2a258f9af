"""An encoder at its initial weights and its export, without a run: milliseconds."""

from pathlib import Path

from octfm.encoder.encoder import Encoder, assemble
from octfm.encoder.export import settings_of, tensors_of, write_files
from octfm.pretraining.learner import build_objective
from octfm.run.runtime import start
from support.small_store import small_preprocessing
from support.tiny_runs import config


def untrained_encoder(**changes) -> Encoder:
    """For volumes of `small_store`."""
    settings, preprocessing = config(**changes), small_preprocessing()
    network = build_objective(settings, preprocessing).frozen_encoder(settings.objective.frozen)
    return assemble(network, settings, preprocessing, "untrained", preprocessing.fingerprint(), start("fp32", "cpu"))


def write_export(folder: Path, encoder: Encoder) -> Path:
    """As `octfm export` writes it, by someone who has seen nobody."""
    write_files(folder, settings_of(encoder), tensors_of(encoder), {"hashes": []})
    return folder
