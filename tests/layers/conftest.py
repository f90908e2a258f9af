"""The network of tests about layers that ask nothing of its answers."""

import functools

import pytest

from octfm.layers.finder import LayerFinder, Layers
from octfm.models.layer_net import LayerNet, LayerNetConfig
from octfm.volume.volume import Volume
from support.remembered_bscans import RememberedBscans


class SmallFinder(LayerFinder):
    """An untrained network, which looks at the same B-scan once."""

    def __init__(self) -> None:
        super().__init__(LayerNet(LayerNetConfig((8, 8))))
        self._memory = RememberedBscans()

    def find(self, volume: Volume) -> Layers:
        return self._memory.apart(self, volume)


one_small_finder = functools.cache(SmallFinder)


@pytest.fixture
def small_finder(monkeypatch):
    """In place of the packaged network: only the plumbing is tested."""
    for module in ("octfm.layers.segment", "octfm.layers.table"):
        monkeypatch.setattr(f"{module}.load_finder", lambda **_: one_small_finder())
