"""Preprocessing: everything that happens to a Volume before the model sees it, in one place.

Orient to the canonical frame (B-scan 0 superior, left eyes mirrored), remove frames and marks of exports, convert to
8 bit, find the tissue band, undo axial eye motion between B-scans, crop or pad around the band at a fixed spacing, and
resample by area averages.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import (
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from octfm.config import Config, load
from octfm.display import fields_line
from octfm.errors import ConfigError, ReadError
from octfm.io.hashing import hash_text
from octfm.volume.laterality import Side, disc_side
from octfm.volume.margins import darkened, levelled, trimmed, without_padding
from octfm.volume.radial import to_raster
from octfm.volume.resampling import resample, seen_rows
from octfm.volume.tissue import MARGIN_MM, BandFinder, Tissue, find_tissue
from octfm.volume.transform import Transform
from octfm.volume.volume import ADMISSIBLE, Planes, Shape3, Volume, eight_bit, expect_volume
from octfm.volume.window import IN_CROP, window

COARSEST_ROWS_MM = 1.0
"""No OCT has rows farther apart; numbers above are micrometres."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """One volume as the model gets it, with the Transform back to its native frame."""

    voxels: np.ndarray
    """uint8 [D, H, W], exactly `image_size`; padding is 0."""
    band: np.ndarray
    """float32 [2, D, W], edges of the tissue band in prepared rows: ILM - 50 µm and BM + 50 µm by default.

    Row h is inside where upper <= h < lower. The whole valid interval if the search is not confident; both 0 on
    padding."""
    valid: np.ndarray
    """int16 [2, D, W], first row that holds image and one past the last; both 0 on padding."""
    confident: bool
    """Whether the tissue band is trusted."""
    confidence: dict[str, float]
    transform: Transform
    disc: Side = "unclear"
    """Side of the optic disc in the canonical frame: right in every eye whose stated laterality is correct."""

    __repr__ = fields_line


MAX_SIDE, MAX_VOXELS = 32_767, 4 * 10**9
"""Limits of a prepared volume: surfaces are stored as int16, voxels in one shard."""
Millimetres = Annotated[float, Field(ge=1e-4, le=10)]
"""From a tenth of a micrometre, far below the resolution of light, to a whole macula in one voxel."""


class Preprocessing(Config):
    """How a Volume is prepared: settings, and a function that applies them. Stores and checkpoints record it."""

    image_size: tuple[PositiveInt, PositiveInt, PositiveInt] = (64, 384, 384)
    """Prepared voxels [D, H, W]."""
    target_spacing: tuple[Millimetres, Millimetres, Millimetres] = (0.094, 0.0052, 0.0156)
    """Millimetres per prepared voxel (z, y, x). Fixed: scans are cropped or padded, never stretched. A voxel is the
    average over its extent along axes where it is coarser than the scan, else interpolated linearly."""
    margin_mm: float = Field(default=MARGIN_MM, ge=0, le=10)
    """The tissue band extends this far above ILM and below BM."""
    center: Literal["fovea", "field"] = "fovea"
    """Centre of the crop of a larger scan: `fovea` is the foveal pit if found, else the middle of the field."""
    band: Literal["classic", "learned", "either"] = "classic"
    """What finds ILM and BM: `classic` follows borders and brightness, `learned` is a network trained on phantoms,
    `either` asks the network only where the classic band is unsure."""
    band_network: str = Field(default="", pattern=r"^(\S+ [0-9a-f]{64})?$")
    """Name and SHA-256 of the network behind a band that is not classic; `octfm prepare` fills it in."""
    register_bscans: bool = True
    """Undo axial eye motion before anything is averaged across B-scans."""
    uint16_full_scale: int = Field(default=65535, gt=0, le=65535)
    """The uint16 value that becomes 255. At the default, 65535, each volume's own white is used (`Volume.full_scale`);
    any other value replaces it. Keep the default for DICOM: voxels of 9 to 15 bits are scaled to 16 when read."""
    algorithm: Literal[2, 3, 4] = 4
    """Version of the algorithm, raised whenever the same settings would give other voxels or another band.

    Version 4 removes what exports add to the image: padding where A-scans were shifted, frames, burnt-in scale bars and
    icons, and bright rows across; earlier versions take it for image. Version 2 also trusts a band that runs along the
    tops of lesions, and its crop does not follow a drifting retina. Stores and checkpoints of earlier versions can
    still be continued and used. All versions mirror left eyes in vertical B-scans by reversing the order of their
    B-scans."""
    intensity_mean: float = Field(default=0.2, ge=-100, le=100)
    """Subtracted from voxels / 255 on the device."""
    intensity_std: float = Field(default=0.2, ge=1e-4, le=100)
    """Divides voxels / 255 - intensity_mean on the device."""

    @classmethod
    def recorded(cls, settings: Mapping[str, Any]) -> "Preprocessing":
        """Parse the record of a store or a checkpoint; before version 3 records did not name the algorithm."""
        return load(cls, {"algorithm": 2, **settings})

    @field_validator("image_size")
    @classmethod
    def _check_size(cls, size: Shape3) -> Shape3:
        if max(size) > MAX_SIDE or prod(size) > MAX_VOXELS:
            raise ValueError(
                f"{list(size)} would take {prod(size) / 1e9:,.2f} GB for each volume; "
                f"the most is {MAX_VOXELS / 1e9:g} GB, and {MAX_SIDE:,} voxels along an axis"
            )
        return size

    @model_validator(mode="after")
    def _check_band(self) -> "Preprocessing":
        if self.band != "classic" and self.algorithm == 2:
            raise ValueError(f"band: {self.band} needs algorithm 3, got 2")
        return self

    @model_serializer(mode="wrap")
    def _settings(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the settings of learned bands if the band is classic, so that older stores' fingerprints fit."""
        settings = handler(self)
        if self.band == "classic":
            settings.pop("band", None)
            settings.pop("band_network", None)
        return settings

    def fingerprint(self) -> str:
        """Stable hash of all settings and the algorithm's version; equal exactly if stores are interchangeable."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hash_text(text)[:16]

    @property
    def takes_bscans(self) -> bool:
        """Whether these settings prepare single B-scans, and nothing else: volumes one voxel deep."""
        return self.image_size[0] == 1

    def of_bscans(self) -> "Preprocessing":
        """The same settings for single B-scans, which an encoder of volumes reads with `Encoder.of_bscans`."""
        return self.model_copy(update={"image_size": (1, *self.image_size[1:])})

    def expect_finder(self, find_band: BandFinder | None) -> None:
        """Raises ConfigError unless `find_band` is the finder that these settings name: None for a classic band."""
        given = find_band.network if find_band is not None else ""
        if self.band == "classic" and given:
            raise ConfigError(f"find_band: got the network {given}, but band is classic; set band to learned or either")
        if self.band != "classic" and (not given or given != self.band_network):
            raise ConfigError(
                f"band: {self.band} needs the network {self.band_network or '(band_network is empty)'}, got "
                f"{given or 'none'}; pass find_band=LearnedBand() of octfm.layers.band with its settings"
            )

    def __call__(self, volume: Volume, find_band: BandFinder | None = None) -> Prepared:
        """Prepare one volume; a radial scan (star) is made a raster first. Settings `of_bscans` take single B-scans.

        `find_band` finds a band that is not classic; see `expect_finder`. Raises ReadError for other layouts, for a
        star of too few lines, for rows more than 1 mm apart, and for volumes that are blank, or blank in the part that
        is kept.
        """
        expect_volume(volume)
        self.expect_finder(find_band)
        self._expect_preparable(volume)
        volume = self._as_raster(volume)
        canonical = volume.superior_to_inferior()
        left_eye = volume.laterality == "L"
        if left_eye:
            canonical = canonical.mirrored()
        outer, inner, image = canonical.shape, None, None
        if self._trims(volume):
            shown, inner, image = trimmed(canonical.voxels, self._white(canonical))
            canonical = replace(canonical, voxels=shown if image is None else darkened(shown, image))
        voxels = self._to_uint8(canonical)
        tissue = self._tissue(canonical, voxels, image, find_band)
        reversed_bscans = (volume.superior_first is False) != (left_eye and volume.vertical)
        transform, in_crop = self._place(
            canonical, tissue, reversed_bscans=reversed_bscans, mirrored=left_eye and not volume.vertical
        )
        if self.algorithm > 2:
            confident = tissue.confident and in_crop >= IN_CROP
            tissue = replace(tissue, confident=confident, confidence={**tissue.confidence, "in_crop": in_crop})
        # Rows that a scanner filled with one value hold no image; they must not be averaged into voxels that do.
        seen = seen_rows(voxels)
        if image is not None:
            seen = np.maximum(seen[0], image[0]), np.minimum(seen[1], image[1])
            seen = np.where(seen[0] < seen[1], seen, 0)
        out, valid = resample(voxels, seen, transform)
        if not (valid[1] > valid[0]).any():
            raise ReadError(
                "no_image",
                f"{volume.source}: expected image in the prepared field, found only A-scans of one value, or a scan "
                f"({' x '.join(map(str, canonical.shape))}) too small to fill one voxel of target_spacing; "
                "look at it (octfm view)",
            )
        band = self._band(tissue, valid, transform)
        disc = disc_side(voxels, canonical.spacing_mm, tissue, volume.left_to_right).side
        if inner is not None:
            transform = transform.placed(inner, outer)
        return Prepared(out, band, valid, tissue.confident, tissue.confidence, transform, disc)

    def _expect_preparable(self, volume: Volume) -> None:
        """Raises ReadError for a layout or a spacing that these settings do not prepare."""
        if volume.layout not in ADMISSIBLE or (volume.layout == "line" and not self.takes_bscans):
            own = ", and single B-scans go into a store of their own (octfm scan --layouts line)"
            raise ReadError(
                "not_raster",
                f"{volume.source}: is a {volume.layout} scan; only a raster is a volume in space"
                f"{own if volume.layout == 'line' else ''}",
            )
        if self.takes_bscans and len(volume.voxels) > 1:
            raise ReadError(
                "several_bscans",
                f"{volume.source}: a {volume.layout} scan of {len(volume.voxels)} B-scans, while image_size "
                f"{list(self.image_size)} is for single ones",
            )
        if volume.spacing_mm[1] > COARSEST_ROWS_MM:
            raise ReadError(
                "absurd_spacing",
                f"{volume.source}: spacing_mm {volume.spacing_mm}: expected (dz, dy, dx) in millimetres, got rows "
                f"{volume.spacing_mm[1]:g} mm apart; divide micrometres by 1000",
            )

    def _trims(self, volume: Volume) -> bool:
        """Whether margins that hold no image are cut off."""
        return self.algorithm > 3 and volume.modality == "structure"

    def _as_raster(self, volume: Volume) -> Volume:
        """A radial scan resampled; a single B-scan at the distance between B-scans of the prepared grid."""
        if volume.layout == "radial":
            if self._trims(volume):
                volume = replace(volume, voxels=without_padding(volume.voxels, self._white(volume)))
            volume = to_raster(volume)
        if volume.layout == "line":  # its distance between B-scans has no meaning: it fills the depth of a voxel
            volume = replace(volume, spacing_mm=(self.target_spacing[0], *volume.spacing_mm[1:]))
        return volume

    def _tissue(
        self,
        canonical: Volume,
        voxels: np.ndarray | Planes,
        image: np.ndarray | None,
        find_band: BandFinder | None,
    ) -> Tissue:
        """The tissue band of a volume, superior B-scan first and left eyes mirrored, and how B-scans are moved.
        `voxels`: its own in eight bits. `image`: the rows that hold image, where margins were cut off."""
        searched = voxels
        if image is not None:
            searched = self._to_uint8(replace(canonical, voxels=levelled(canonical.voxels, image)))
        # On native voxels: averages of unregistered B-scans would blur the surfaces that are searched for.
        tissue = find_tissue(searched, canonical.spacing_mm)
        if canonical.modality != "structure":
            # Flow shows vessels, not the borders that are looked for: every row is kept, no B-scan is moved.
            tissue = replace(tissue, confident=False, located=False, displacement=np.zeros(len(voxels)))
        elif find_band is not None and not (self.band == "either" and tissue.confident):
            tissue = find_band(voxels, canonical.spacing_mm, tissue)
        if not self.register_bscans:
            tissue = replace(tissue, displacement=np.zeros(len(voxels)))
        # Version 2 is kept to the bit, so that its stores and checkpoints can be continued.
        return replace(tissue, confident=tissue.located) if self.algorithm == 2 else tissue

    def _white(self, volume: Volume) -> int:
        own = volume.voxels.dtype == np.uint8 or self.uint16_full_scale == 65535
        return volume.white if own else self.uint16_full_scale

    def _to_uint8(self, volume: Volume) -> np.ndarray | Planes:
        # Stores of version 2 scaled all volumes alike, and are continued that way.
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
        """Place the target grid on the scan: axially around the tissue band, laterally around the fovea or the middle.

        Also returns the share of the retina, in the A-scans covered, that lies in the grid.
        """
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
        # Rows of the registered frame that hold image in at least one B-scan.
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


def differences(recorded: Mapping[str, Any], wanted: Preprocessing) -> str:
    """Settings in which a store's record differs, with both values; empty if in none."""
    differing = _differing(recorded, wanted).items()
    return "; ".join(f"{key} is {before}, expected {now}" for key, (before, now) in differing)


def repeating(recorded: Mapping[str, Any], wanted: Preprocessing) -> str:
    """These settings with the record's values, as arguments of octfm prepare: `algorithm=2`."""
    differing = _differing(recorded, wanted).items()
    return shlex.join(f"{key}={before}" for key, (before, _) in differing if before is not None)


def _differing(recorded: Mapping[str, Any], wanted: Preprocessing) -> dict[str, tuple[Any, Any]]:
    # Version 2 did not name the algorithm, and classic bands are not named.
    before = {"algorithm": 2, "band": "classic", **recorded}
    now = {"band": "classic", **wanted.model_dump(mode="json")}
    return {key: (before.get(key), now.get(key)) for key in {**before, **now} if before.get(key) != now.get(key)}


def _first_index(center: float, count: int, step: float, first: float, last: float) -> float:
    """Native index of the first prepared voxel: centred, then shifted so that nothing is cropped beside padding."""
    span = count * step
    low, high = sorted((first, last + 1 - span))
    start = min(max(center - span / 2 + 0.5, low), high)
    # `start` is the lower edge in units where native voxel i covers [i, i + 1); its centre lies half a step further.
    return start + step / 2 - 0.5
