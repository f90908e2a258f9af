"""Which rows of a scan are prepared: the axial window, which follows a retina that drifts through the volume where it has to."""

from dataclasses import dataclass

import numpy as np

from octfm.data.registration import robust_quadratic
from octfm.data.tissue import Tissue

IN_CROP = 0.99
"""Smallest share of the retina in the window that is still trusted."""


@dataclass(frozen=True, eq=False)
class Window:
    middle: float
    """Row of the registered frame that it is centred on."""
    displacement: np.ndarray
    """[D], of every B-scan against the registered frame: eye motion, and the drift where the window follows it."""
    upper: np.ndarray
    """[D, W], ILM in rows of the registered frame, as far as it was scanned."""
    lower: np.ndarray
    """[D, W], the same of Bruch's membrane."""

    def holds(self, first: float, last: float, field: tuple[slice, slice]) -> float:
        """Share of the retina within `field` (B-scans, A-scans) that lies between two rows."""
        upper, lower = self.upper[field], self.lower[field]
        inside = np.clip(np.minimum(lower, last) - np.maximum(upper, first), 0, None)
        return float(inside.sum() / max((lower - upper).sum(), 1e-9))


def window(tissue: Tissue, height: int, rows: float, margin: float, field: tuple[slice, slice], follow: bool) -> Window:
    """Where to put `rows` native rows of `height`: around the retina of the whole volume, moved so that all of `field` and `margin` rows
    above and below it go in; where no place does, after the drift that registration leaves as anatomy has been taken out (`follow`)."""

    def registered(displacement: np.ndarray, margin: float) -> tuple[np.ndarray, np.ndarray]:
        surfaces = (np.clip(rows, -0.5, height - 0.5) for rows in (tissue.ilm - margin, tissue.bm + margin))
        upper, lower = (surface - displacement[:, None] for surface in surfaces)
        return upper, np.maximum(upper, lower)

    displacement = tissue.displacement
    upper, lower = registered(displacement, margin)
    middle = float(np.median((tissue.ilm + tissue.bm) / 2 - displacement[:, None]))
    if not tissue.located:
        middle = (height - 1) / 2
    else:
        if lower[field].max() - upper[field].min() > rows and follow:
            path = np.median((upper + lower)[:, field[1]] / 2, axis=1)
            drift = robust_quadratic(np.arange(len(path), dtype=float), path)
            displacement = displacement + drift - np.median(drift)
            upper, lower = registered(displacement, margin)
            middle = float(np.median((upper + lower)[field] / 2))
        top, bottom = float(upper[field].min()), float(lower[field].max())
        if bottom - top <= rows:
            middle = min(max(middle, bottom - rows / 2), top + rows / 2)
    return Window(middle, displacement, *registered(displacement, 0))
