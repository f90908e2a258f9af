"""Transform: the map between a prepared volume and its native frame, to show results on the original scan."""

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

    def points_to_native(self, points_N3: np.ndarray) -> np.ndarray:
        """Prepared (d, h, w) indices, float [N, 3], to native ones; exact inverse of `points_to_prepared`."""
        canonical = np.asarray(points_N3, np.float64) * self.scale + self.origin
        canonical[:, 1] += self._displacement_at(canonical[:, 0])
        return self._flip(canonical)

    def points_to_prepared(self, points_N3: np.ndarray) -> np.ndarray:
        """Native (d, h, w) indices, float [N, 3], to prepared ones; outside [0, shape) means cropped away."""
        canonical = self._flip(np.array(points_N3, np.float64))
        canonical[:, 1] -= self._displacement_at(canonical[:, 0])
        return (canonical - self.origin) / self.scale

    def rows_to_native(self, surface_DW: np.ndarray) -> np.ndarray:
        """Convert a surface [D, W] from prepared to native rows, linear in between; NaN outside the prepared field."""
        surface_DW = np.asarray(surface_DW, np.float64)
        self._expect(surface_DW.shape, (self.shape[0], self.shape[2]), "surface")
        registered = self.origin[1] + self.scale[1] * surface_DW
        rows = _resample_surface(registered, self._prepared_index(0), self._prepared_index(2))
        return self._flip_surface(rows + np.asarray(self.displacement)[:, None])

    def rows_to_prepared(self, surface_DW: np.ndarray) -> np.ndarray:
        """Convert a surface [D, W] from native to prepared rows, linear in between; NaN on padding."""
        surface_DW = np.asarray(surface_DW, np.float64)
        self._expect(surface_DW.shape, (self.native_shape[0], self.native_shape[2]), "surface")
        return self.canonical_rows_to_prepared(self._flip_surface(surface_DW))

    def canonical_rows_to_prepared(self, surface_DW: np.ndarray) -> np.ndarray:
        """As `rows_to_prepared`, for a surface whose B-scan order and laterality are canonical already."""
        registered = surface_DW - np.asarray(self.displacement)[:, None]
        rows = _resample_surface(registered, self._canonical_index(0), self._canonical_index(2))
        return (rows - self.origin[1]) / self.scale[1]

    def to_native(self, array_DHW: np.ndarray, order: int = 0) -> np.ndarray:
        """Resample a prepared array (segmentation, voxel map) to the native frame: order 0 nearest, 1 trilinear."""
        self._expect(array_DHW.shape, self.shape, "array")
        return self._resample(array_DHW, to_native=True, order=order)

    def to_prepared(self, array_DHW: np.ndarray, order: int = 0) -> np.ndarray:
        """Resample a native array (labels) to the prepared frame: order 0 nearest, 1 trilinear.

        For images, Preprocessing uses area averages instead.
        """
        self._expect(array_DHW.shape, self.native_shape, "array")
        return self._resample(array_DHW, to_native=False, order=order)

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
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        try:
            return cls(**fields)
        except TypeError as error:
            raise StoreError(
                f"transform record: {error}; it was written by another version of octfm, prepare the store again"
            ) from None

    def _resample(self, array: np.ndarray, *, to_native: bool, order: int) -> np.ndarray:
        index = self._prepared_index if to_native else self._canonical_index
        slices, columns = index(0), index(2)
        rows = np.arange(self.native_shape[1] if to_native else self.shape[1], dtype=np.float64)
        source = array if to_native else self._flip_volume(array)
        out = np.zeros((len(slices), len(rows), len(columns)), source.dtype if order == 0 else np.float32)
        for d, position in enumerate(slices):
            total, weights = np.zeros(out.shape[1:]), np.zeros(out.shape[1:])
            for near, weight in _neighbours(position, source.shape[0], order):
                if to_native:
                    at = (rows - self.displacement[d] - self.origin[1]) / self.scale[1]
                else:
                    # The displacement of the B-scan that is read, of which up to two contribute.
                    at = self.origin[1] + self.scale[1] * rows + self.displacement[near]
                plane = _sample(_sample(source[near].astype(np.float64), at, 0, order), columns, 1, order)
                inside = np.isfinite(plane)
                total[inside] += weight * plane[inside]
                weights[inside] += weight
            # At the edge only one of two B-scans may hold the place; divided by its weight, it keeps its brightness.
            np.divide(total, weights, out=total, where=weights > 0)
            out[d][weights > 0] = total[weights > 0]
        return self._flip_volume(out) if to_native else out

    def _prepared_index(self, axis: int) -> np.ndarray:
        """Where canonical indices 0..n-1 lie on the prepared axis."""
        return (np.arange(self.native_shape[axis]) - self.origin[axis]) / self.scale[axis]

    def _canonical_index(self, axis: int) -> np.ndarray:
        """Where prepared indices 0..n-1 lie on the canonical axis."""
        return self.origin[axis] + self.scale[axis] * np.arange(self.shape[axis])

    def _displacement_at(self, bscan: np.ndarray) -> np.ndarray:
        return np.interp(bscan, np.arange(len(self.displacement)), self.displacement)

    def _flip(self, points: np.ndarray) -> np.ndarray:
        for axis, flip in ((0, self.reversed_bscans), (2, self.mirrored)):
            if flip:
                points[:, axis] = self.native_shape[axis] - 1 - points[:, axis]
        return points

    def _flip_surface(self, surface: np.ndarray) -> np.ndarray:
        return surface[:: -1 if self.reversed_bscans else 1, :: -1 if self.mirrored else 1]

    def _flip_volume(self, array: np.ndarray) -> np.ndarray:
        # The axial axis is never flipped, here or elsewhere: an upside-down retina does not exist.
        return array[:: -1 if self.reversed_bscans else 1, :, :: -1 if self.mirrored else 1]

    def _expect(self, got: tuple[int, ...], expected: tuple[int, ...], what: str) -> None:
        if tuple(got) != tuple(expected):
            raise ValueError(
                f"{what} of shape {tuple(got)} does not belong to this transform, expected {tuple(expected)}"
            )


def _neighbours(position: float, count: int, order: int) -> list[tuple[int, float]]:
    """(index, weight) of the voxels that make up the value at a fractional position; none outside the array."""
    if not -0.5 <= position < count - 0.5:
        return []
    position = min(max(position, 0.0), count - 1.0)
    if order == 0:
        return [(int(np.floor(position + 0.5)), 1.0)]
    low, part = int(position), position - int(position)
    return [(low, 1 - part), (low + 1, part)] if part else [(low, 1.0)]


def _resample_surface(rows_DW: np.ndarray, bscans: np.ndarray, columns: np.ndarray) -> np.ndarray:
    return _sample(_sample(rows_DW, bscans, 0, extrapolate=True), columns, 1, extrapolate=True)


def _sample(
    array: np.ndarray, position: np.ndarray, axis: int, order: int = 1, extrapolate: bool = False
) -> np.ndarray:
    """Values at fractional positions along one axis of a 2-D array; NaN outside the extent of its first and last voxel.

    In the outer half of a border voxel an image keeps the border value; a surface (`extrapolate`) is continued
    linearly.
    """
    count = array.shape[axis]
    outside = (position < -0.5) | (position >= count - 0.5)
    inner = np.clip(position, 0, count - 1)
    if order == 0:
        values = array.take(np.floor(inner + 0.5).astype(int), axis)
    else:
        # At the last voxel the one before it is `low`, with a weight of 0.
        low = np.clip(inner.astype(int), 0, max(count - 2, 0))
        part = (np.clip(position, -0.5, count - 0.5) if extrapolate and count > 1 else inner) - low
        part = part[:, None] if axis == 0 else part
        values = (1 - part) * array.take(low, axis) + part * array.take(np.minimum(low + 1, count - 1), axis)
    values[outside if axis == 0 else (slice(None), outside)] = np.nan
    return values
