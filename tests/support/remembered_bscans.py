"""The packaged network looks at the same B-scan once: it finds the same there whatever else is in the volume, and takes
some .2 s for it."""

from dataclasses import fields

import numpy as np

from octfm.layers.finder import LayerFinder, Layers
from octfm.volume.volume import Volume

ALONG = {"rows": 1, "spread_um": 1, "near": 1}
"""The axis of B-scans in arrays of Layers, where it is not the first."""
find = LayerFinder.find


class RememberedBscans:
    """`LayerFinder.find` in whose place it is put, with a memory."""

    def __init__(self) -> None:
        self._known: dict[tuple, Layers] = {}

    def of(self, finder: LayerFinder, volume: Volume) -> Layers:
        if not finder.digest:
            return find(finder, volume)  # networks of tests are small, and change
        return self.apart(finder, volume)

    def apart(self, finder: LayerFinder, volume: Volume) -> Layers:
        """By a network that does not change."""
        found = [self._in_bscan(finder, volume, d) for d in range(volume.shape[0])]
        arrays = {f.name: [getattr(layers, f.name) for layers in found] for f in fields(Layers)}
        return Layers(**{name: np.concatenate(parts, ALONG.get(name, 0)) for name, parts in arrays.items()})

    def _in_bscan(self, finder: LayerFinder, volume: Volume, d: int) -> Layers:
        bscan = np.ascontiguousarray(volume.voxels[d : d + 1])
        seen = (bscan.tobytes(), bscan.shape, str(bscan.dtype), volume.full_scale, volume.spacing_mm[1:])
        key = (finder.network, finder.masks, str(finder.runtime.device), *seen)
        if key not in self._known:
            alone = Volume(bscan, volume.spacing_mm, layout="line", full_scale=volume.full_scale)
            self._known[key] = find(finder, alone)
        return self._known[key]
