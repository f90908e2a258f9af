"""Which rows of a scan are prepared: the axial window, which follows a drifting retina that would not fit otherwise."""

from dataclasses import dataclass, replace

import numpy as np

from octfm.volume.registration import robust_quadratic
from octfm.volume.tissue import Tissue

IN_CROP = 0.99
"""Smallest share of the retina inside the window at which the tissue band is trusted."""

Field = tuple[slice, slice]
"""The B-scans and A-scans that are prepared."""


@dataclass(frozen=True, eq=False)
class Window:
    """An axial window on one scan, in its registered frame: rows after each B-scan's displacement is subtracted."""

    tissue: Tissue
    height: int
    """Rows of the scan."""
    middle: float
    """Row of the registered frame at the centre of the window."""
    displacement: np.ndarray
    """[D] displacement of every B-scan: eye motion, plus the drift if the window follows it."""

    def around(self, rows: float, margin: float, field: Field, follow: bool) -> "Window":
        """Move the window so that its `rows` rows hold the retina within `field` and `margin` rows above and below.

        If it does not fit, the drift that registration leaves as anatomy is first added to the displacement (`follow`).
        """
        if not self.tissue.located:
            return self
        placed = self
        upper, lower = placed.retina(margin)
        if np.ptp(np.stack([upper[field], lower[field]])) > rows and follow:
            path = np.median((upper + lower)[:, field[1]] / 2, axis=1)
            drift = robust_quadratic(np.arange(len(path), dtype=float), path)
            # Less its median, so that on the whole the registered frame stays where it is.
            placed = replace(placed, displacement=placed.displacement + drift - np.median(drift))
            upper, lower = placed.retina(margin)
            placed = replace(placed, middle=float(np.median((upper + lower)[field] / 2)))
        top, bottom = float(upper[field].min()), float(lower[field].max())
        if bottom - top <= rows:
            placed = replace(placed, middle=min(max(placed.middle, bottom - rows / 2), top + rows / 2))
        return placed

    def retina(self, margin: float = 0) -> tuple[np.ndarray, np.ndarray]:
        """ILM - `margin` and BM + `margin` [D, W] in the registered frame, clipped to the rows that were scanned."""
        surfaces = self.tissue.ilm - margin, self.tissue.bm + margin
        upper, lower = (np.clip(rows, -0.5, self.height - 0.5) - self.displacement[:, None] for rows in surfaces)
        return upper, np.maximum(upper, lower)

    def holds(self, first: float, last: float, field: Field) -> float:
        """Share of the retina within `field` that lies between two rows; 1 if no retina was found."""
        upper, lower = (surface[field] for surface in self.retina())
        inside = np.clip(np.minimum(lower, last) - np.maximum(upper, first), 0, None)
        return float(inside.sum() / max((lower - upper).sum(), 1e-9)) if self.tissue.located else 1.0


def window(tissue: Tissue, height: int) -> Window:
    """Centre a window on the retina, or on the scan if no retina was found."""
    middle = float(np.median((tissue.ilm + tissue.bm) / 2 - tissue.displacement[:, None]))
    return Window(tissue, height, middle if tissue.located else (height - 1) / 2, tissue.displacement)
