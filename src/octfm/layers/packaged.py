"""The packaged networks: weights in the wheel, their hash and what they were trained on."""

import functools
import hashlib
import json
from dataclasses import dataclass
from importlib.resources import files

from octfm.errors import CheckpointError
from octfm.layers.finder import LayerFinder
from octfm.models.layer_net import LayerNet, LayerNetConfig
from octfm.run.runtime import start

CURRENT = "layers-2"
"""The network that `octfm segment` uses."""
NOTE = "research use only; not a medical device; trained on synthetic images only"
"""Goes into every result of a packaged network."""
SHORT_NOTE = "Research only; not a medical device; trained on synthetic images"
"""NOTE within the 64 characters of a DICOM long string."""


@dataclass(frozen=True)
class Packaged:
    """A network in the wheel: octfm/weights/NAME.safetensors, described by NAME.json."""

    name: str
    digest: str
    """SHA-256 of the safetensors file."""
    facts: dict

    @property
    def about(self) -> str:
        return str(self.facts["about"])

    @property
    def licence(self) -> str:
        return str(self.facts["licence"])

    @property
    def masks(self) -> tuple[str, ...]:
        """Masks that the network has learned and reports."""
        return tuple(self.facts["masks"])

    @property
    def size_bytes(self) -> int:
        return len(_weights(self.name))


def packaged() -> list[Packaged]:
    """All packaged networks, in the order of their names."""
    found = sorted(path.name for path in files("octfm.weights").iterdir() if path.name.endswith(".safetensors"))
    return [_described(name.removesuffix(".safetensors")) for name in found]


def find_packaged(name: str) -> Packaged:
    """The packaged network of this name. Raises CheckpointError if there is none."""
    known = {each.name: each for each in packaged()}
    if name not in known:
        raise CheckpointError(f"{name}: no packaged network has this name; there are {', '.join(known)}")
    return known[name]


def _weights(name: str) -> bytes:
    return (files("octfm.weights") / f"{name}.safetensors").read_bytes()


def _described(name: str) -> Packaged:
    facts = json.loads((files("octfm.weights") / f"{name}.json").read_text())
    return Packaged(name, facts["sha256"], facts)


@functools.cache
def load_finder(name: str = CURRENT, device: str | None = None) -> LayerFinder:
    """The packaged network of this name on a device. Raises CheckpointError if its file is damaged or missing."""
    from safetensors.torch import load

    about = find_packaged(name)
    content = _weights(name)
    digest = hashlib.sha256(content).hexdigest()
    if digest != about.digest:
        raise CheckpointError(
            f"octfm/weights/{name}.safetensors: damaged (SHA-256 {digest[:12]}, expected "
            f"{about.digest[:12]}); install octfm again"
        )
    network = LayerNet(LayerNetConfig(tuple(about.facts["channels"])))
    network.load_state_dict({key: tensor.float() for key, tensor in load(content).items()})
    return LayerFinder(network, name, digest, about.masks, start(device=device))
