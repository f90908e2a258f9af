"""Whether a scan looks like that of the other eye than stated, whose nasal zones would be called temporal."""

from dataclasses import replace

import numpy as np

from octfm.layers.verdict import bridged
from octfm.volume.etdrs import Field
from octfm.volume.laterality import disc_side
from octfm.volume.tissue import Tissue
from octfm.volume.volume import Volume, eight_bit


def looks_like_other_eye(
    volume: Volume, ilm_DW: np.ndarray, bm_DW: np.ndarray, place: Field, pit_mm: tuple[float, float]
) -> bool:
    """Whether nerve fibres are thicker and brighter on the temporal side of the eye that the volume states.

    ilm_DW, bm_DW: rows, NaN where not found. False where the image does not tell (octfm.volume.laterality).
    """
    bscan, ascan = (float(index[0]) for index in place.to_index(*np.array(pit_mm)[:, None]))
    seen = np.flatnonzero(np.isfinite(ilm_DW).any(axis=1) & np.isfinite(bm_DW).any(axis=1))
    if volume.laterality is None or not seen.size or not np.isfinite([bscan, ascan]).all():
        return False
    fovea = float(np.interp(bscan, seen, np.arange(len(seen)))), ascan
    ilm, bm = (bridged(rows[seen]) for rows in (ilm_DW, bm_DW))
    tissue = Tissue(ilm, bm, fovea, np.zeros(len(seen)), confident=True, confidence={}, located=True)
    shown = eight_bit(replace(volume, voxels=volume.voxels[seen], lines=None))
    found = disc_side(shown, volume.spacing_mm, tissue, volume.left_to_right)
    return found.contradicts(volume.laterality)
