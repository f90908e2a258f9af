"""The network of tests about layers that ask nothing of its answers."""

import pytest

from octfm.layers.finder import LayerFinder
from octfm.models.layer_net import LayerNet, LayerNetConfig


@pytest.fixture
def small_finder(monkeypatch):
    """An untrained network in place of the packaged one: only the plumbing is tested."""
    finder = LayerFinder(LayerNet(LayerNetConfig((8, 8))))
    for module in ("octfm.layers.segment", "octfm.layers.table"):
        monkeypatch.setattr(f"{module}.load_finder", lambda **_: finder)
