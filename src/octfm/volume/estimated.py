"""Millimetres of a B-scan whose file states none, estimated from the retina in it.

The retina is a ruler for the axial axis: from ILM to BM it is about 0.3 mm thick, averaged over a B-scan of the macula.
For the lateral axis there is none, so a usual width is taken. Such millimetres are good enough to bring B-scans to
about the scale that an encoder expects, but not to measure anything: they are flagged wherever they go, and no result
turns them into micrometres.
"""

from collections.abc import Iterable

import numpy as np

from octfm.volume.margins import ready_for_search
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Planes, Shape3, Spacing3

RETINA_MM = 0.3
"""A typical ILM-to-BM thickness."""
FRAMES_MM = (1.9, 2.8, 1.3, 4.2, 0.9)
"""Heights of a B-scan that are tried, the usual ones first: instruments have 1.9 to 3 mm, crops of their exports less,
wide fields more."""
GOOD = 0.7
"""Quality at which no other height is tried."""
WIDTH_MM = 7.0
"""Width that is taken for a B-scan: those of the macula are 5 to 9 mm wide."""
CONSISTENT = 1.25
"""Largest factor between the millimetres assumed in the search for a retina and those that its thickness implies."""
FLAG = "estimated_spacing"
"""Flag of a catalog row, and of its row in a store, whose millimetres are such an estimate."""
WHY = (
    f"its millimetres are estimated (retina taken as {1000 * RETINA_MM:.0f} µm thick, B-scan as {WIDTH_MM:g} mm wide), "
    "so nothing is given in µm"
)
"""Why a result has no micrometres; for tables and pages."""


def retina_rows(bscans_DHW: np.ndarray | Planes) -> float | None:
    """Rows from ILM to BM, the median over the A-scans; None if no retina is found with confidence.

    The search needs millimetres, so several are tried; a result counts if its own millimetres agree with them.
    """
    bscans_DHW = ready_for_search(np.stack(list(bscans_DHW)), 255)
    _, height, width = bscans_DHW.shape
    best: tuple[float, float] | None = None
    for frame_mm in FRAMES_MM:
        dy = frame_mm / height
        for _ in range(2):  # once more with the millimetres that the first search gives
            tissue = find_tissue(bscans_DHW, (WIDTH_MM / width, dy, WIDTH_MM / width))
            rows = float(np.median(tissue.bm - tissue.ilm))
            off = max(RETINA_MM / rows / dy, rows * dy / RETINA_MM) if rows > 0 else np.inf
            if not CONSISTENT < off < CONSISTENT**3:
                break
            dy = RETINA_MM / rows
        shares = [tissue.confidence[name] for name in ("ilm_support", "retina_support", "rpe_support")]
        quality = float(np.prod(shares)) if tissue.located else 0.0
        if off <= CONSISTENT and quality > 0 and (best is None or quality > best[0]):
            best = quality, rows
        if best is not None and best[0] >= GOOD:
            break
    return best and best[1]


def axial_mm(rows: Iterable[float]) -> float:
    """Axial millimetres from `retina_rows` of B-scans of one instrument.

    With the median over many B-scans, one retina can still be thicker than another; estimated singly, all would be
    alike.
    """
    return RETINA_MM / float(np.median(list(rows)))


def spacing_of(dy: float, shape: Shape3) -> Spacing3:
    """(dz, dy, dx) of a single B-scan; dz repeats dx and has no meaning."""
    dx = WIDTH_MM / shape[2]
    return dx, dy, dx
