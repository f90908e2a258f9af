"""Whether a segmentation should be believed, and why not."""

from dataclasses import dataclass, replace

import numpy as np

from octfm.layers.finder import LayerFinder, Layers
from octfm.models.layer_net import SURFACES
from octfm.volume.volume import Volume

SEEN = 0.5
"""Least share of A-scans in which the retina must have been found."""


@dataclass(frozen=True)
class Verdict:
    """`reasons` is empty if nothing speaks against the segmentation."""

    reasons: tuple[str, ...] = ()
    """Short sentences, the most serious first."""
    doubt: float = 0.0
    """For sorting scans, the most doubtful first; at least 1 if there is a reason."""

    @property
    def accepted(self) -> bool:
        return not self.reasons


def judge(volume: Volume, found: Layers, finder: LayerFinder) -> Verdict:
    """Judge what was found in a volume. Where hardly any retina was found, the volume is also tried upside down."""
    seen = float((found.present > 0.5).mean())
    spread = np.nanmedian([found.spread_um[SURFACES.index(name)] for name in ("ilm", "bm")])
    doubt = 1 - seen + float(spread) / 100
    if seen >= SEEN:
        return Verdict((), min(doubt, 0.99))
    turned = finder.find(replace(volume, voxels=volume.voxels[:, ::-1]))
    reason = "no retina was found in most A-scans"
    if float((turned.present > 0.5).mean()) >= SEEN:
        reason = "upside down: the vitreous must be at the top"
    return Verdict((reason,), 1 + doubt)
