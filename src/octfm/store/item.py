"""One prepared volume of a store with its metadata: `store[i]`."""

from dataclasses import dataclass

import numpy as np

from octfm.display import Picture, box, brief, picture, readable, stretched, times
from octfm.store.layout import Arrays, StoreRow
from octfm.volume.transform import Transform
from octfm.volume.volume import Shape3, Spacing3


@dataclass(frozen=True, eq=False)
class StoredVolume:
    """One prepared volume of a store, as networks get it. Left eyes are mirrored, so that all look like right ones."""

    row: StoreRow
    """Whose eye it is, scanner, split, labels; `row.index` is its place in the store."""
    voxels: np.ndarray
    """uint8 [D, H, W]; padding is 0."""
    band: np.ndarray
    """float32 [2, D, W]: upper and lower surface of the tissue band, in fractional rows."""
    valid: np.ndarray
    """int16 [2, D, W]: first image row and one past the last, per A-scan; both 0 where the A-scan is padding."""
    spacing_mm: Spacing3
    """(dz, dy, dx)"""
    fingerprint: str
    """Of the Preprocessing that made it; encoders take no other."""

    @property
    def shape(self) -> Shape3:
        d, h, w = self.voxels.shape
        return d, h, w

    @property
    def arrays(self) -> Arrays:
        """The same as a batch of one."""
        return Arrays(self.voxels[None], self.band[None], self.valid[None], (self.row.acquisition,))

    @property
    def transform(self) -> Transform:
        """Back to the frame of the file: `transform.rows_to_native(rows)`, `transform.to_native(mask)`."""
        return Transform.from_dict(self.row.transform)

    def pictures(self) -> list[Picture]:
        """The middle B-scan with its tissue band, and the mean over depth seen from the front; for notebooks."""
        z, y, x = (n * mm for n, mm in zip(self.shape, self.spacing_mm, strict=True))
        middle = len(self.voxels) // 2
        band = self.band[:, middle] if self.row.confident else ()
        return [
            picture(self.voxels[middle], (y, x), "middle B-scan with its tissue band" if len(band) else "middle B-scan",
                    lines=list(band)),
            picture(stretched(self.voxels.mean(axis=1)), (z, x), "from the front"),
        ]  # fmt: skip

    def __repr__(self) -> str:
        facts = self._described()
        named = (f"{name} {facts[name]}" for name in ("split", "tissue band") if facts[name])
        return brief("StoredVolume", facts["size"], facts["extent"], facts["scanner"], facts["eye"], *named)

    def _repr_html_(self) -> str:
        return box(f"Volume {self.row.index} of a store", self._described(), pictures=self.pictures())

    def _described(self) -> dict[str, str]:
        extent = [float(n * mm) for n, mm in zip(self.shape, self.spacing_mm, strict=True)]
        eye = {"R": "right eye", "L": "left eye, mirrored"}.get(self.row.laterality or "", "eye unknown")
        return {
            "size": f"{times(self.shape)} voxels",
            "extent": f"{times(extent)} mm",
            "scanner": readable(self.row.scanner),
            "eye": eye,
            "split": self.row.split or "",
            "tissue band": "" if self.row.confident else "of low confidence",
        }
