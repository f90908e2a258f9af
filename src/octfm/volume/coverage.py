"""How much of a target grid a scan fills, from their sizes alone."""

from dataclasses import dataclass

import numpy as np

from octfm.volume.volume import Shape3, Spacing3

RETINA_MM = 0.3
"""A typical ILM-to-BM thickness."""


@dataclass(frozen=True)
class Coverage:
    """How a target grid and a scan of given size overlap; known before any voxel is read."""

    valid_share: float
    """Share of the prepared voxels that hold image; the rest is padding."""
    kept_share: float
    """Share of the scanned field that is kept; the rest is cropped away."""
    valid_rows: int
    """Rows that hold image."""
    rows: int
    """Rows of the grid."""
    retina_rows: float
    """Rows spanned by a retina of 0.3 mm."""

    def sentence(self) -> str:
        return (
            f"{self.valid_rows} of {self.rows} rows hold image, a 0.3 mm retina spans {self.retina_rows:.0f} rows; "
            f"{1 - self.valid_share:.0%} of the grid is padding, {1 - self.kept_share:.0%} of the scan is cropped away"
        )


def coverage(shape: Shape3, spacing_mm: Spacing3, target_shape: Shape3, target_spacing: Spacing3) -> Coverage:
    """How a scan of `shape` voxels and a grid of `target_shape` overlap: on each axis by the smaller extent."""
    native, target = np.multiply(shape, spacing_mm), np.multiply(target_shape, target_spacing)
    shared = np.minimum(native, target)
    return Coverage(
        valid_share=float(np.prod(shared / target)),
        kept_share=float(np.prod(shared / native)),
        valid_rows=round(float(shared[1]) / target_spacing[1]),
        rows=target_shape[1],
        retina_rows=RETINA_MM / target_spacing[1],
    )
