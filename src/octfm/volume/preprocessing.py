"""Preprocessing: the one home of everything that happens to a Volume before the model sees it (F15)."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, PositiveInt, field_validator

from octfm.config import Config, load
from octfm.errors import ReadError
from octfm.io.hashing import hash_text
from octfm.volume.laterality import Side, disc_side
from octfm.volume.planes import Planes, eight_bit
from octfm.volume.radial import to_raster
from octfm.volume.resampling import resample, seen_rows
from octfm.volume.tissue import MARGIN_MM, Tissue, find_tissue
from octfm.volume.transform import Transform
from octfm.volume.volume import ADMISSIBLE, Shape3, Spacing3, Volume
from octfm.volume.window import IN_CROP, window

RETINA_MM = 0.3
"""A typical ILM-to-BM thickness, for `Coverage`."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """One volume as the model gets it, with the way back."""

    voxels: np.ndarray
    """uint8 [D, H, W], exactly `image_size`; padding is 0."""
    band: np.ndarray
    """float32 [2, D, W], upper and lower surface of the tissue band in prepared rows: ILM - 50 µm and BM + 50 µm; row h is inside
    where upper <= h < lower. The whole valid interval where the search is not confident; both 0 on padding."""
    valid: np.ndarray
    """int16 [2, D, W], first row that holds image and one past the last; both 0 on padding."""
    confident: bool
    confidence: dict[str, float]
    transform: Transform
    disc: Side = "unclear"
    """Where the optic disc lies in the canonical frame: right in every eye whose laterality is known and true."""


@dataclass(frozen=True)
class Coverage:
    """What a target grid makes of a scan of given size, known before any voxel is read (F14)."""

    valid_share: float
    """Share of the prepared voxels that hold image; the rest is padding."""
    kept_share: float
    """Share of the scanned field that is kept; the rest is cropped away."""
    valid_rows: int
    """Rows of H that hold image..."""
    rows: int
    """...of this many."""
    retina_rows: float
    """Rows that a retina of 0.3 mm spans."""

    def sentence(self) -> str:
        return (
            f"{self.valid_rows} of {self.rows} rows hold image, a 0.3 mm retina spans {self.retina_rows:.0f} rows; "
            f"{1 - self.valid_share:.0%} of the grid is padding, {1 - self.kept_share:.0%} of the scan is cropped away"
        )


MAX_SIDE, MAX_VOXELS = 32_767, 4 * 10**9
"""Of a prepared volume: surfaces are stored as int16, voxels in one shard."""
Millimetres = Annotated[float, Field(ge=1e-4, le=10)]
"""A tenth of a micrometre, far below what any light resolves, to a whole macula in one voxel."""


class Preprocessing(Config):
    """Frozen settings; calling them turns a Volume into Prepared. Travels in store and checkpoint."""

    image_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (64, 384, 384)
    """Prepared voxels [D, H, W]."""
    target_spacing: tuple[Millimetres, Millimetres, Millimetres] = (0.094, 0.0052, 0.0156)
    """Millimetres per prepared voxel (z, y, x). Fixed: scans are cropped or padded, never stretched."""
    margin_mm: float = Field(MARGIN_MM, ge=0, le=10)
    """The tissue band reaches this far above ILM and below BM."""
    center: Literal["fovea", "field"] = "fovea"
    """Where a larger scan is cropped around: the foveal pit where it is found, else the middle of the field."""
    register_bscans: bool = True
    """Undo axial eye motion before anything is averaged across B-scans."""
    uint16_full_scale: int = Field(65535, gt=0, le=65535)
    """The uint16 value that becomes 255. 65535, the default: what each volume says is white (`Volume.full_scale`), else every bit
    that its file uses; anything else overrules that."""
    algorithm: Literal[2, 3] = 3
    """Raised whenever the same settings would give other voxels or another band. 2 trusts a band that runs along the tops of lesions, and its
    crop does not follow a drifting retina; what was made by it can be continued and used with it."""
    intensity_mean: float = Field(0.2, ge=-100, le=100)
    """Subtracted from voxels / 255 on the device."""
    intensity_std: float = Field(0.2, ge=1e-4, le=100)
    """Divides voxels / 255 - intensity_mean on the device."""

    @classmethod
    def recorded(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """As a store or a checkpoint records it; before version 3, records did not name the algorithm."""
        return load(cls, {"algorithm": 2, **settings})

    @field_validator("image_size")
    @classmethod
    def _fits_a_memory(cls, size: Shape3) -> Shape3:
        if max(size) > MAX_SIDE or prod(size) > MAX_VOXELS:
            raise ValueError(
                f"{list(size)} would take {prod(size) / 1e9:,.2f} GB for each volume; "
                f"the most is {MAX_VOXELS / 1e9:g} GB, and {MAX_SIDE:,} along an axis"
            )
        return size

    def fingerprint(self) -> str:
        """Stable hash of every setting and of the algorithm's version: equal exactly when stores are interchangeable."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hash_text(text)[:16]

    def __call__(self, volume: Volume) -> Prepared:
        """Prepare one volume, a star (radial) as the raster that it shows. Raises ReadError for one that is neither or has too few lines,
        for pixels that are not 8 or 16 bit, or that are blank where they are kept."""
        if volume.layout not in ADMISSIBLE:
            raise ReadError(
                "not_raster", f"{volume.source}: a {volume.layout} scan; only a raster is a volume in space"
            )
        if volume.layout == "radial":
            volume = to_raster(volume)
        canonical = volume.superior_to_inferior()
        mirrored = volume.laterality == "L"
        if mirrored:
            canonical = canonical.mirrored()
        voxels = self._to_uint8(canonical)
        tissue = find_tissue(voxels, canonical.spacing_mm)
        if not self.register_bscans:
            tissue = replace(tissue, displacement=np.zeros(len(voxels)))
        if self.algorithm == 2:
            tissue = replace(tissue, confident=tissue.located)
        transform, in_crop = self._place(
            canonical, tissue, reversed_bscans=volume.superior_first is False, mirrored=mirrored
        )
        if self.algorithm > 2:
            confident = tissue.confident and in_crop >= IN_CROP
            tissue = replace(tissue, confident=confident, confidence={**tissue.confidence, "in_crop": in_crop})
        seen = seen_rows(voxels)
        out, valid = resample(voxels, seen, transform)
        if not (valid[1] > valid[0]).any():
            raise ReadError(
                "no_image",
                f"{volume.source}: expected image in the prepared field, found only A-scans of one value, or a scan "
                f"({' x '.join(map(str, canonical.shape))}) too small to fill one voxel of target_spacing; look at it (octfm view)",
            )
        band = self._band(tissue, valid, transform)
        disc = disc_side(voxels, canonical.spacing_mm, tissue).side
        return Prepared(out, band, valid, tissue.confident, tissue.confidence, transform, disc)

    def coverage(self, native_shape: Shape3, native_spacing_mm: Spacing3) -> Coverage:
        """How much of the grid a scan of this size fills and how much of the scan is kept."""
        native = np.multiply(native_shape, native_spacing_mm)
        target = np.multiply(self.image_size, self.target_spacing)
        shared = np.minimum(native, target)
        return Coverage(
            valid_share=float(np.prod(shared / target)),
            kept_share=float(np.prod(shared / native)),
            valid_rows=round(float(shared[1]) / self.target_spacing[1]),
            rows=self.image_size[1],
            retina_rows=RETINA_MM / self.target_spacing[1],
        )

    def _to_uint8(self, volume: Volume) -> np.ndarray | Planes:
        if volume.voxels.dtype not in (np.uint8, np.uint16):
            raise ReadError(
                "unsupported_pixels",
                f"{volume.source}: voxels are {volume.voxels.dtype}, expected uint8 or uint16 intensities; convert them when reading",
            )
        # A store of version 2 goes on as it began: one brightness for all of its volumes.
        stated = self.uint16_full_scale == 65535 and self.algorithm > 2
        voxels = eight_bit(volume, None if stated else self.uint16_full_scale)
        first = voxels[0][0, 0]
        if all((bscan == first).all() for bscan in voxels):
            raise ReadError(
                "blank_volume", f"{volume.source}: every voxel is {first}; nothing was imaged, export it again"
            )
        return voxels

    def _place(
        self, volume: Volume, tissue: Tissue, *, reversed_bscans: bool, mirrored: bool
    ) -> tuple[Transform, float]:
        """Put the target window on the scan, around the band axially, around the fovea (or the middle) across; and the share of the
        retina that it holds, of the A-scans that it takes in."""
        scale = tuple(t / n for t, n in zip(self.target_spacing, volume.spacing_mm, strict=True))
        depth, height, width = volume.shape
        fovea = tissue.fovea if self.center == "fovea" and tissue.confident else None
        fovea = fovea or ((depth - 1) / 2, (width - 1) / 2)
        across = [
            _first_index(center, n, step, 0.0, count - 1.0)
            for center, n, step, count in zip(fovea, self.image_size[::2], scale[::2], (depth, width), strict=True)
        ]
        bscans, columns = (
            slice(max(0, round(first)), round(first + (n - 1) * step) + 1)
            for first, n, step in zip(across, self.image_size[::2], scale[::2], strict=True)
        )
        rows, margin = self.image_size[1] * scale[1], self.margin_mm / volume.spacing_mm[1]
        placed = window(tissue, height)
        if self.algorithm > 2:
            placed = placed.around(rows, margin, (bscans, columns), follow=self.register_bscans)
        low, high = -float(placed.displacement.max()), height - 1 - float(placed.displacement.min())
        first = _first_index(placed.middle, self.image_size[1], scale[1], low, high)
        start = first - scale[1] / 2
        transform = Transform(
            native_shape=volume.shape,
            native_spacing_mm=volume.spacing_mm,
            shape=self.image_size,
            origin=(across[0], first, across[1]),
            scale=scale,  # type: ignore[arg-type]
            displacement=tuple(float(d) for d in placed.displacement),
            reversed_bscans=reversed_bscans,
            mirrored=mirrored,
        )
        return transform, placed.holds(start, start + rows, (bscans, columns))

    def _band(self, tissue: Tissue, valid: np.ndarray, transform: Transform) -> np.ndarray:
        if not tissue.confident:
            return valid.astype(np.float32)
        margin = self.margin_mm / transform.native_spacing_mm[1]
        band = np.stack(
            [transform.canonical_rows_to_prepared(surface) for surface in (tissue.ilm - margin, tissue.bm + margin)]
        )
        return np.clip(np.where(np.isnan(band), valid, band), valid[0], valid[1]).astype(np.float32)


def _first_index(center: float, count: int, step: float, first: float, last: float) -> float:
    """Native index of the first prepared voxel: centred, then moved so that no padding appears while there is image left to show."""
    span = count * step
    available = last - first + 1
    start = center - span / 2 + 0.5
    if span <= available:
        start = min(max(start, first), last + 1 - span)
    else:
        start = min(max(start, last + 1 - span), first)
    # `start` is the lower edge in units where native voxel i covers [i, i + 1); its centre lies half a step further.
    return start + step / 2 - 0.5
