"""Move surfaces that the network found onto the edge or the peak of brightness that defines them.

The network places a line to within two or three rows. Where nearby the band is brightest or ends is then read from the
image, averaged along the line. benchmarks/segment_packaged.py measures what this gains.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from octfm.models.layer_net import SURFACES
from octfm.volume.volume import Spacing3

STEP_UM = 2.0
"""Distance between the depths at which brightness is compared."""


@dataclass(frozen=True)
class Edge:
    """How far a surface may move, and how smooth it is."""

    kind: Literal["peak", "fall"]
    """Where brightness is highest (peak), or falls most steeply with depth (fall)."""
    up_um: float
    down_um: float
    smooth_um: float
    """Standard deviation, across A-scans, of the Gaussian that smooths the network's line before it is moved."""
    steady_um: float
    """The same for the distances by which the line is moved."""


EDGES = {
    "rpe_peak": Edge("peak", 16.0, 4.0, 15.0, 40.0),
    "bm": Edge("fall", 10.0, 12.0, 80.0, 120.0),
}
DEPTH_UM, ALONG_UM = 3.0, 20.0
"""Standard deviations of the Gaussian that averages brightness, across and along the line."""
LEAST_MM = 0.2
"""B-scans narrower than this must have wrong millimetres; their lines are not moved, since they would be shorter than
the filters."""


def onto_edges(bscans: np.ndarray, rows_SDW: np.ndarray, spacing_mm: Spacing3) -> np.ndarray:
    """Rows [S, D, W] of SURFACES with those of EDGES moved, in order from top to bottom; NaN stays NaN.

    bscans: [D, H, W] of any number type. Images of inverted grey levels, whose retina is darker than the vitreous, are
    left as they are.
    """
    found = rows_SDW.copy()
    if bscans.shape[2] * spacing_mm[2] < LEAST_MM or not _brighter_below(bscans, rows_SDW[0], rows_SDW[-1]):
        return found
    for name, edge in EDGES.items():
        surface = SURFACES.index(name)
        found[surface] = onto_edge(bscans, rows_SDW[surface], edge, spacing_mm)
    # Surfaces above the peak are moved up where it would cross them, the one below is moved down.
    peak = SURFACES.index("rpe_peak")
    ordered = np.concatenate([np.fmin.accumulate(found[peak::-1], axis=0)[::-1], found[peak + 1 :]])
    ordered[peak:] = np.fmax.accumulate(ordered[peak:], axis=0)
    return np.where(np.isnan(found), np.nan, ordered).astype(np.float32)


def onto_edge(bscans: np.ndarray, rows_DW: np.ndarray, edge: Edge, spacing_mm: Spacing3) -> np.ndarray:
    """One line, rows [D, W] in B-scans [D, H, W], smoothed and moved onto its edge: float [D, W]; NaN stays NaN."""
    row_um, ascan_um = 1000 * spacing_mm[1], 1000 * spacing_mm[2]
    line = _smooth(rows_DW, edge.smooth_um / ascan_um)
    reach = np.arange(-edge.up_um - STEP_UM, edge.down_um + 1.5 * STEP_UM, STEP_UM)
    # [R, D, W]: brightness on lines parallel to the surface.
    near = np.stack([_at(bscans, line + um / row_um) for um in reach])
    near = gaussian_filter(near, (DEPTH_UM / STEP_UM, 0, ALONG_UM / ascan_um), mode="nearest")
    score = near[1:-1] if edge.kind == "peak" else near[:-2] - near[2:]
    moved = np.where(np.isfinite(rows_DW), reach[1:-1][score.argmax(axis=0)] / row_um, np.nan)
    return line + _smooth(moved, edge.steady_um / ascan_um)


def _at(bscans: np.ndarray, rows_DW: np.ndarray) -> np.ndarray:
    """float32 [D, W]: grey values at fractional rows, interpolated; rows are clipped to the frame, and NaN is row 0."""
    depth, height, width = bscans.shape
    rows = np.clip(np.nan_to_num(rows_DW), 0, height - 1)
    above = np.minimum(rows.astype(np.intp), height - 2)
    bscan, column = np.ogrid[:depth, :width]
    share = (rows - above).astype(np.float32)
    return bscans[bscan, above, column] * (1 - share) + bscans[bscan, above + 1, column] * share


def _smooth(values_DW: np.ndarray, sigma: float) -> np.ndarray:
    """Values smoothed across A-scans, from those that are not NaN; NaN stays NaN. `sigma` in A-scans."""
    known = np.isfinite(values_DW)
    weight = gaussian_filter1d(known.astype(np.float64), sigma, axis=1, mode="nearest")
    total = gaussian_filter1d(np.where(known, values_DW, 0.0), sigma, axis=1, mode="nearest")
    return np.where(known, total / np.maximum(weight, 1e-6), np.nan)


def _brighter_below(bscans: np.ndarray, ilm_DW: np.ndarray, bm_DW: np.ndarray) -> bool:
    """Whether the middle of the retina is brighter than the image a quarter of its thickness above the ILM."""
    known = np.isfinite(ilm_DW) & np.isfinite(bm_DW)
    inner, outer = (_at(bscans, ilm_DW + share * (bm_DW - ilm_DW))[known] for share in (0.5, -0.25))
    return len(inner) > 0 and float(inner.mean()) > float(outer.mean())
