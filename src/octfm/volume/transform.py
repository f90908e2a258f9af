"""Transform: the map between a prepared volume and its native frame, to show results on the original scan."""

from array import array
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from octfm.errors import StoreError
from octfm.volume.volume import Shape3, Spacing3


@dataclass(frozen=True)
class Transform:
    """An invertible map between prepared and native voxel indices; integers are voxel centres in both.

    On each axis `canonical = origin + scale * prepared`; on the axial one the displacement of the B-scan is added.
    Flips then lead from the canonical frame (B-scan 0 superior, left eyes mirrored) to the native one.
    """

    native_shape: Shape3
    native_spacing_mm: Spacing3
    shape: Shape3
    """Prepared [D, H, W]."""
    origin: tuple[float, float, float]
    """Canonical index (D, H, W) of prepared voxel (0, 0, 0); negative where the prepared frame starts in padding."""
    scale: tuple[float, float, float]
    """Native voxels per prepared voxel."""
    displacement: tuple[float, ...]
    """Axial position of each canonical B-scan relative to the registered frame, in native rows."""
    reversed_bscans: bool
    """True: canonical B-scan 0 is the last native one: the superior one, or of a left eye in vertical B-scans the nasal
    one."""
    mirrored: bool
    """True: a left eye was mirrored to a right one, A-scan by A-scan."""

    def rows_to_native(self, surface_DW: np.ndarray) -> np.ndarray:
        """Convert a surface [D, W] from prepared to native rows, linear in between; NaN outside the prepared field."""
        surface_DW = np.asarray(surface_DW, np.float64)
        self._expect(surface_DW.shape, (self.shape[0], self.shape[2]), "surface")
        registered = self.origin[1] + self.scale[1] * surface_DW
        rows = _sample(_sample(registered, self._prepared_index(0), 0), self._prepared_index(2), 1)
        return self._flip(rows + np.asarray(self.displacement)[:, None])

    def rows_to_prepared(self, surface_DW: np.ndarray) -> np.ndarray:
        """Convert a surface [D, W] from native to prepared rows, linear in between; NaN on padding."""
        surface_DW = np.asarray(surface_DW, np.float64)
        self._expect(surface_DW.shape, (self.native_shape[0], self.native_shape[2]), "surface")
        return self.canonical_rows_to_prepared(self._flip(surface_DW))

    def canonical_rows_to_prepared(self, surface_DW: np.ndarray) -> np.ndarray:
        """As `rows_to_prepared`, for a surface whose B-scan order and laterality are canonical already."""
        registered = surface_DW - np.asarray(self.displacement)[:, None]
        rows = _sample(_sample(registered, self._canonical_index(0), 0), self._canonical_index(2), 1)
        return (rows - self.origin[1]) / self.scale[1]

    def to_native(self, array_DHW: np.ndarray) -> np.ndarray:
        """Bring a prepared array (segmentation, voxel map) to the native frame: the nearest voxel, 0 outside."""
        self._expect(array_DHW.shape, self.shape, "array")
        return self._resample(array_DHW, to_native=True)

    def to_prepared(self, array_DHW: np.ndarray) -> np.ndarray:
        """Bring a native array (labels) to the prepared frame: the nearest voxel, 0 outside.

        For images, Preprocessing uses area averages instead, or linear interpolation where the target is finer.
        """
        self._expect(array_DHW.shape, self.native_shape, "array")
        return self._resample(array_DHW, to_native=False)

    def placed(self, inner: tuple[slice, slice], native_shape: Shape3) -> "Transform":
        """The same map for a volume of this shape, some canonical rows and A-scans `inner` of which were prepared."""
        z, y, x = self.origin
        origin = (z, y + inner[0].start, x + inner[1].start)
        return replace(self, native_shape=native_shape, origin=origin)

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Transform":
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list | array) else value for key, value in values.items()
        }
        try:
            return cls(**fields)
        except TypeError as error:
            raise StoreError(
                f"transform record: {error}; it was written by another version of octfm, prepare the store again"
            ) from None

    def _resample(self, array: np.ndarray, *, to_native: bool) -> np.ndarray:
        index = self._prepared_index if to_native else self._canonical_index
        source = array if to_native else self._flip(array)
        bscans, columns = (_nearest(index(axis), source.shape[axis]) for axis in (0, 2))
        rows = np.arange(self.native_shape[1] if to_native else self.shape[1], dtype=np.float64)
        out = np.zeros((len(bscans), len(rows), len(columns)), source.dtype)
        for d in np.flatnonzero(bscans >= 0):
            if to_native:
                at = (rows - self.displacement[d] - self.origin[1]) / self.scale[1]
            else:
                at = self.origin[1] + self.scale[1] * rows + self.displacement[bscans[d]]
            at = _nearest(at, source.shape[1])[:, None]
            out[d] = np.where((at >= 0) & (columns >= 0), source[bscans[d]][at, columns], 0)
        return self._flip(out) if to_native else out

    def _prepared_index(self, axis: int) -> np.ndarray:
        """Where canonical indices 0..n-1 lie on the prepared axis."""
        return (np.arange(self.native_shape[axis]) - self.origin[axis]) / self.scale[axis]

    def _canonical_index(self, axis: int) -> np.ndarray:
        """Where prepared indices 0..n-1 lie on the canonical axis."""
        return self.origin[axis] + self.scale[axis] * np.arange(self.shape[axis])

    def _flip(self, array: np.ndarray) -> np.ndarray:
        """A surface [D, W] or a volume [D, H, W] from one frame in the other. The axial axis is never flipped, here or
        elsewhere: an upside-down retina does not exist."""
        return array[:: -1 if self.reversed_bscans else 1, ..., :: -1 if self.mirrored else 1]

    def _expect(self, got: tuple[int, ...], expected: tuple[int, ...], what: str) -> None:
        if tuple(got) != tuple(expected):
            raise ValueError(
                f"{what} of shape {tuple(got)} does not belong to this transform, expected {tuple(expected)}"
            )


def _nearest(position: np.ndarray, count: int) -> np.ndarray:
    """int64: index of the nearest of `count` voxels; -1 outside the extent of the first and the last."""
    index = np.floor(np.clip(position, 0, count - 1) + 0.5).astype(int)
    return np.where((position < -0.5) | (position >= count - 0.5), -1, index)


def _sample(array: np.ndarray, position: np.ndarray, axis: int) -> np.ndarray:
    """Values of a surface at fractional positions along one axis, linear in between and in the outer half of the first
    and the last voxel; NaN outside these."""
    count = array.shape[axis]
    # At the last voxel the one before it is `low`, with a weight of 0.
    low = np.clip(position.astype(int), 0, max(count - 2, 0))
    part = np.clip(position, -0.5, count - 0.5) - low if count > 1 else np.zeros(len(position))
    part = part[:, None] if axis == 0 else part
    values = (1 - part) * array.take(low, axis) + part * array.take(np.minimum(low + 1, count - 1), axis)
    outside = (position < -0.5) | (position >= count - 0.5)
    values[outside if axis == 0 else (slice(None), outside)] = np.nan
    return values
