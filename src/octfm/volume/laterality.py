"""Find the side of the optic disc in a macular scan from the nerve fibre layer, to detect wrong laterality tags.

Nerve fibres converge on the disc, so nasal of the fovea (right in the image of a right eye, left in that of a left eye)
the innermost retina is bright and thick; temporal of it, it is neither. This is evidence against a tag; tags are never
changed. The disc itself need not be in the field, but enough retina on both sides of the fovea must be.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from octfm.volume.tissue import Tissue
from octfm.volume.volume import Laterality, Planes, Spacing3

Side = Literal["left", "right", "unclear"]
Verdict = Literal[
    "agrees", "contradicts", "only anatomy tells", "field too narrow", "band unsure", "sides alike", "B-scans turned"
]
"""Pixels against the stated eye; `only anatomy tells` if none is stated. The last four: why pixels cannot tell."""

NERVE_FIBRES_UM, GANGLION_CELLS_UM, RETINA_UM = (10, 45), (60, 110), (10, 250)
"""Depths below the ILM that are compared: nasally nerve fibres fill the first, temporally they do not; the second is
dark on both sides."""
FROM_FOVEA_MM, ACROSS_MM = (1.0, 3.2), 2.2
"""Distances from the fovea along a B-scan, and between B-scans, at which both sides are compared."""
LEAST_REACH_MM = 1.8
"""A scan that shows less than this on either side of the fovea cannot be judged."""
NEEDS = (
    f"at least {LEAST_REACH_MM} mm of retina on both sides of the fovea "
    "(of the middle of the scan where no pit is found), a tissue band of high confidence, "
    "and a nasal side that is brighter and thicker"
)
"""What a volume must show for the side of its disc to be determined."""
LEAST_BRIGHTNESS, LEAST_THICKNESS_UM = 0.02, 5.0
"""Smallest differences between the sides that count; both must point the same way."""
CANNOT_TELL: dict[str, Verdict] = {
    "disc_field_too_narrow": "field too narrow",
    "disc_band_unsure": "band unsure",
    "disc_sides_alike": "sides alike",
    "disc_bscans_turned": "B-scans turned",
}
"""Flags of volumes whose pixels do not show which eye they are -> the verdict."""


@dataclass(frozen=True)
class DiscSide:
    """The side of the optic disc in one volume."""

    side: Side
    """Side of the image as given; if its B-scans were mirrored, of the mirrored image."""
    why_unclear: str = ""
    """A key of CANNOT_TELL if the side is unclear."""

    def contradicts(self, laterality: Laterality | None) -> bool:
        return (laterality, self.side) in {("R", "left"), ("L", "right")}

    def flags(self, laterality: Laterality | None) -> tuple[str, ...]:
        """Flags for the row of a catalog; none if the side agrees with the stated eye."""
        if self.side == "unclear":
            return (self.why_unclear,)
        if laterality is None:
            return ("disc_on_the_right",) if self.side == "right" else ("disc_on_the_left",)
        return ("laterality_contradicts_anatomy",) if self.contradicts(laterality) else ()


def disc_side(
    voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3, tissue: Tissue, left_to_right: bool = True
) -> DiscSide:
    """Compare right and left of the fovea at equal distances; the median over B-scans and distances decides.

    Brightness and thickness must agree on the side, or it is unclear. `left_to_right`: of the Volume.
    """
    if not left_to_right:
        return DiscSide("unclear", "disc_bscans_turned")
    depth, _, width = voxels_DHW.shape
    dz, dy, dx = spacing_mm
    fovea = tissue.fovea or ((depth - 1) / 2, (width - 1) / 2)
    reach = min(fovea[1], width - 1 - fovea[1]) * dx
    near = np.flatnonzero(np.abs(np.arange(depth) - fovea[0]) * dz < ACROSS_MM)
    if (width - 1) * dx < 2 * LEAST_REACH_MM:  # wherever the fovea may be, which an uncertain band does not show
        return DiscSide("unclear", "disc_field_too_narrow")
    if not tissue.confident:
        return DiscSide("unclear", "disc_band_unsure")
    if reach < LEAST_REACH_MM or not near.size:
        return DiscSide("unclear", "disc_field_too_narrow")
    away = np.arange(FROM_FOVEA_MM[0], min(FROM_FOVEA_MM[1], reach), max(dx, 0.05)) / dx
    # Read only both neighbours of every position that is compared, not all A-scans.
    left = np.floor(np.concatenate([fovea[1] - away, fovea[1] + away])).astype(int)
    columns = np.unique(np.clip(np.concatenate([left, left + 1]), 0, width - 1))
    ilm, thickness_um = tissue.ilm[near][:, columns], (tissue.bm - tissue.ilm)[near][:, columns] * dy * 1000
    layers = _means_below(voxels_DHW, near, columns, ilm, (NERVE_FIBRES_UM, GANGLION_CELLS_UM, RETINA_UM), dy)
    shown = layers[2] > 0  # a raster made from a radial scan is padded with 0 around its circle
    if not shown.any():
        return DiscSide("unclear", "disc_field_too_narrow")
    contrast = (layers[0] - layers[1]) / max(float(layers[2][shown].mean()), 1e-6)
    brightness, thickness = (
        _right_minus_left(np.where(shown, field, np.nan), columns, fovea[1], away) for field in (contrast, thickness_um)
    )
    if not np.isfinite(brightness):  # no B-scan shows both sides
        return DiscSide("unclear", "disc_field_too_narrow")
    # Brightness alone may come from a beam off the centre of the pupil, thickness from disease.
    agree = (
        np.sign(brightness) == np.sign(thickness)
        and abs(brightness) >= LEAST_BRIGHTNESS
        and abs(thickness) >= LEAST_THICKNESS_UM
    )
    if not agree:
        return DiscSide("unclear", "disc_sides_alike")
    return DiscSide("right" if brightness > 0 else "left")


def _means_below(
    voxels: np.ndarray | Planes,
    bscans: np.ndarray,
    columns: np.ndarray,
    ilm: np.ndarray,
    layers_um: tuple[tuple[float, float], ...],
    dy: float,
) -> list[np.ndarray]:
    """Mean brightness between two depths below the ILM, [len(bscans), len(columns)] per layer, from at most 16 rows."""
    depths = []
    for first, last in layers_um:
        rows = (last - first) / 1000 / dy
        depths.append(np.linspace(first, last, int(min(16, max(2, rows)))) / 1000 / dy)
    below, ends = np.concatenate(depths)[:, None], np.cumsum([len(rows) for rows in depths])[:-1]
    means = [np.empty(ilm.shape, np.float32) for _ in layers_um]
    for at, bscan in enumerate(bscans):
        rows = np.clip(np.rint(ilm[at] + below).astype(int), 0, voxels.shape[1] - 1)
        for mean, values in zip(means, np.split(voxels[bscan][rows, columns], ends), strict=True):
            mean[at] = values.mean(axis=0, dtype=np.float32)
    return means


def _right_minus_left(field_DC: np.ndarray, columns: np.ndarray, middle: float, away: np.ndarray) -> float:
    """Median difference between positions `away` right and left of `middle`; nan if no B-scan shows both."""
    differences = [np.interp(middle + away, columns, row) - np.interp(middle - away, columns, row) for row in field_DC]
    known = np.isfinite(differences)
    return float(np.median(np.array(differences)[known])) if known.any() else float("nan")
