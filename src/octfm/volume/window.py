"""Which rows of a scan are prepared: the axial window, which follows a retina that drifts through the volume where it has to."""

from dataclasses import dataclass, replace

import numpy as np

from octfm.volume.registration import robust_quadratic
from octfm.volume.tissue import Tissue

IN_CROP = 0.99
"""Smallest share of the retina in the window that is still trusted."""

Field = tuple[slice, slice]
"""The B-scans and A-scans that are prepared."""


@dataclass(frozen=True, eq=False)
class Window:
    tissue: Tissue
    height: int
    """Rows of the scan."""
    middle: float
    """Row of the registered frame that the window is centred on."""
    displacement: np.ndarray
    """[D], of every B-scan against the registered frame: eye motion, and the drift where the window follows it."""

    def around(self, rows: float, margin: float, field: Field, follow: bool) -> "Window":
        """Moved so that the retina of `field` and `margin` rows above and below go into `rows` rows; where no place does, after taking out
        the drift that registration leaves as anatomy (`follow`)."""
        if not self.tissue.located:
            return self
        placed = self
        upper, lower = placed.retina(margin)
        if np.ptp(np.stack([upper[field], lower[field]])) > rows and follow:
            path = np.median((upper + lower)[:, field[1]] / 2, axis=1)
            drift = robust_quadratic(np.arange(len(path), dtype=float), path)
            placed = replace(placed, displacement=placed.displacement + drift - np.median(drift))
            upper, lower = placed.retina(margin)
            placed = replace(placed, middle=float(np.median((upper + lower)[field] / 2)))
        top, bottom = float(upper[field].min()), float(lower[field].max())
        if bottom - top <= rows:
            placed = replace(placed, middle=min(max(placed.middle, bottom - rows / 2), top + rows / 2))
        return placed

    def retina(self, margin: float = 0) -> tuple[np.ndarray, np.ndarray]:
        """ILM and Bruch's membrane [D, W], `margin` rows apart from them, in the registered frame, as far as they were scanned."""
        surfaces = self.tissue.ilm - margin, self.tissue.bm + margin
        upper, lower = (np.clip(rows, -0.5, self.height - 0.5) - self.displacement[:, None] for rows in surfaces)
        return upper, np.maximum(upper, lower)

    def holds(self, first: float, last: float, field: Field) -> float:
        """Share of the retina within `field` that lies between two rows; 1 where no retina was found."""
        upper, lower = (surface[field] for surface in self.retina())
        inside = np.clip(np.minimum(lower, last) - np.maximum(upper, first), 0, None)
        return float(inside.sum() / max((lower - upper).sum(), 1e-9)) if self.tissue.located else 1.0


def window(tissue: Tissue, height: int) -> Window:
    """Centred on the middle of the retina, or of the scan where none was found."""
    middle = float(np.median((tissue.ilm + tissue.bm) / 2 - tissue.displacement[:, None]))
    return Window(tissue, height, middle if tissue.located else (height - 1) / 2, tissue.displacement)
