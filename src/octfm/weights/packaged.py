"""The networks in the wheel: those of `octfm segment` and the encoders, with hashes and a record of their training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from octfm.errors import CheckpointError
from octfm.weights.exported import CONFIG, WEIGHTS, is_export

CURRENT = "layers-2"
"""The network that `octfm segment` uses."""
CURRENT_ENCODER = "encoder-2"
"""The encoder that `load_encoder()`, `octfm embed SCAN` and `model.init=packaged` use."""
NOTE = "research use only; not a medical device; trained on synthetic images only"
"""Goes into every result of a packaged network."""
SHORT_NOTE = "Research only; not a medical device; trained on synthetic images"
"""NOTE within the 64 characters of a DICOM long string."""


@dataclass(frozen=True)
class Packaged:
    """A network in the wheel: octfm/weights/NAME.safetensors and NAME.json, or the export octfm/weights/NAME/."""

    name: str
    digest: str
    """SHA-256 of the safetensors file for a network of `octfm segment`, `Encoder.digest` for an encoder."""
    facts: dict
    size_bytes: int

    @property
    def about(self) -> str:
        return str(self.facts["about"])

    @property
    def licence(self) -> str:
        return str(self.facts["licence"])

    @property
    def is_encoder(self) -> bool:
        return "settings" in self.facts

    @property
    def current(self) -> bool:
        """Whether it is used by default."""
        return self.name in (CURRENT, CURRENT_ENCODER)

    @property
    def masks(self) -> tuple[str, ...]:
        """Masks that the network has learned and reports."""
        return tuple(self.facts.get("masks", ()))


def packaged() -> list[Packaged]:
    """The packaged networks of `octfm segment`, in the order of their names."""
    found = sorted(path.name for path in files("octfm.weights").iterdir() if path.name.endswith(".safetensors"))
    return [_described(name.removesuffix(".safetensors")) for name in found]


def everything_packaged() -> list[Packaged]:
    """The packaged networks of `octfm segment`, then the packaged encoders."""
    return [*packaged(), *map(_described_encoder, packaged_encoders())]


def find_packaged(name: str, known: Sequence[Packaged] | None = None) -> Packaged:
    """The packaged network of this name among `known`, by default `octfm segment`'s. Raises CheckpointError if there is
    none."""
    by_name = {each.name: each for each in (packaged() if known is None else known)}
    if name not in by_name:
        raise CheckpointError(f"{name}: no packaged network has this name; there are {', '.join(by_name)}")
    return by_name[name]


def weights_of(name: str) -> bytes:
    """The safetensors file of a network of `octfm segment`."""
    return (files("octfm.weights") / f"{name}.safetensors").read_bytes()


def _described(name: str) -> Packaged:
    facts = json.loads((files("octfm.weights") / f"{name}.json").read_text("utf-8"))
    return Packaged(name, facts["sha256"], facts, len(weights_of(name)))


def encoders_folder() -> Path:
    """octfm/weights, where packaged encoders are folders."""
    with as_file(files("octfm.weights")) as folder:
        return folder


def packaged_encoders() -> dict[str, Path]:
    """Name → folder of the encoders that come with octfm, each an export."""
    folders = (path for path in sorted(encoders_folder().iterdir()) if path.is_dir())
    return {path.name: path for path in folders if is_export(path)}


def packaged_encoder(name: str = CURRENT_ENCODER) -> Path:
    """The folder of a packaged encoder. Raises CheckpointError, which names those that there are, if it is missing."""
    encoders = packaged_encoders()
    if name not in encoders:
        raise CheckpointError(
            f"{name}: this octfm comes without that encoder; packaged encoders: {', '.join(encoders) or 'none yet'}; "
            "give the path of a run (octfm pretrain) or of an export (octfm export)"
        )
    return encoders[name]


def _described_encoder(name: str) -> Packaged:
    """A packaged encoder, as its config.json describes it."""
    folder = packaged_encoder(name)
    facts = json.loads((folder / CONFIG).read_bytes())
    return Packaged(name, facts["sha256"], facts, (folder / WEIGHTS).stat().st_size)
