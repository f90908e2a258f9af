"""An untrained packaged encoder in a folder of its own, as if it came with octfm."""

from pathlib import Path

import torch

from octfm.encoder.encoder import Encoder
from octfm.encoder.export import settings_of, tensors_of, write_files
from octfm.weights import packaged
from octfm.weights.exported import digest
from support.untrained import untrained_encoder

NAME = packaged.CURRENT_ENCODER


def write_packaged(weights: Path, encoder: Encoder | None = None) -> Path:
    """WEIGHTS/NAME in bfloat16, without the run that `python -m octfm.encoder.packaging` takes."""
    encoder = encoder or untrained_encoder()
    stored = {name: tensor.to(torch.bfloat16) for name, tensor in tensors_of(encoder).items()}
    facts = {
        "about": "untrained",
        "licence": "Apache-2.0",
        "trained_on": "nothing",
        "made": "by a test",
        "limits": "all",
    }
    facts["sha256"] = digest({name.removeprefix("network."): tensor for name, tensor in stored.items()})
    write_files(weights / NAME, settings_of(encoder) | facts, stored, {"hashes": []})
    return weights / NAME


def ship(monkeypatch, weights: Path) -> None:
    """Take packaged encoders from this folder instead of octfm/weights."""
    for module in ("weights.packaged", "encoder.sources", "encoder.packaging"):
        monkeypatch.setattr(f"octfm.{module}.encoders_folder", lambda: weights)
