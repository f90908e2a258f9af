"""Normal macular thickness in the nine sectors of the ETDRS grid, as published and as measured on a phantom eye."""

import numpy as np

from octfm.phantom.anatomy import LAYER
from octfm.phantom.eye import Eye, layers_um

PUBLISHED_UM: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "retina": (
        (257.0, 339.4, 339.6, 335.1, 324.9, 300.4, 317.4, 287.2, 283.8),
        (18.9, 17.6, 17.2, 17.0, 15.8, 15.8, 22.0, 15.3, 15.4),
    ),
    "nfl": ((10.8, 23.4, 20.1, 24.5, 16.8, 37.5, 46.1, 38.9, 19.2), (2.2, 3.7, 2.3, 3.1, 1.3, 5.1, 6.9, 5.7, 8.4)),
    "gcl": ((12.3, 52.0, 50.1, 51.3, 46.7, 36.6, 40.5, 34.0, 36.9), (3.2, 5.8, 6.0, 5.3, 5.5, 3.9, 4.3, 3.7, 4.7)),
    "ipl": ((18.3, 41.2, 42.3, 40.9, 41.0, 29.7, 31.2, 27.8, 32.6), (2.9, 3.8, 3.8, 3.7, 3.6, 3.0, 3.2, 3.1, 3.0)),
    "inl": ((15.3, 39.8, 38.5, 40.5, 36.5, 32.3, 35.1, 32.1, 33.9), (4.6, 4.5, 4.1, 4.2, 3.8, 3.2, 3.0, 3.2, 2.6)),
    "opl": ((23.5, 32.9, 31.9, 36.2, 31.1, 26.2, 28.2, 27.0, 26.4), (6.1, 8.4, 8.3, 9.9, 6.0, 2.9, 3.5, 3.1, 2.6)),
    "onl": ((88.4, 67.5, 72.5, 60.5, 70.0, 58.2, 55.9, 49.6, 55.8), (11.4, 12.7, 11.5, 12.7, 9.3, 7.7, 7.6, 7.2, 6.3)),
    "photoreceptors and rpe": (
        (90.2, 82.7, 83.9, 81.3, 82.6, 79.8, 79.8, 77.8, 79.8),
        (4.4, 3.2, 3.3, 3.3, 3.2, 3.1, 2.7, 2.8, 2.7),
    ),
}
"""Layer -> (mean, standard deviation) in µm of each of octfm.volume.etdrs.ZONES, on Spectralis: BMC Ophthalmology
2018;18:169 (PMC6042244), table 6."""
_PARTS = {name: slice(index, index + 1) for name, index in LAYER.items()} | {
    "retina": slice(0, LAYER["choroid"]),
    "photoreceptors and rpe": slice(LAYER["myoid"], LAYER["choroid"]),
}


def sectors_um(eye: Eye) -> dict[str, np.ndarray]:
    """Mean thickness in µm of every part of PUBLISHED_UM in each zone, [9]."""
    grid = (np.arange(120) + 0.5) / 120 * 6 - 3
    x, y = np.meshgrid(grid, -grid)
    r = np.hypot(x, y)
    quadrant = np.where(np.abs(x) > np.abs(y), np.where(x > 0, 1, 3), np.where(y > 0, 0, 2))
    inside = [r < 0.5] + [(r >= a) & (r < b) & (quadrant == k) for a, b in ((0.5, 1.5), (1.5, 3.0)) for k in range(4)]
    mean = np.stack([layers_um(eye, x[sector], y[sector]).mean(axis=1) for sector in inside], axis=1)
    return {name: mean[_PARTS[name]].sum(axis=0) for name in PUBLISHED_UM}
