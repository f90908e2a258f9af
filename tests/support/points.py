"""Points (d, h, w), float [N, 3], between a native frame and a prepared volume, from the definition of a Transform."""

import numpy as np


def points_to_native(transform, points_N3) -> np.ndarray:
    canonical = np.asarray(points_N3, np.float64) * transform.scale + transform.origin
    canonical[:, 1] += _displacement_at(transform, canonical[:, 0])
    return _flipped(transform, canonical)


def points_to_prepared(transform, points_N3) -> np.ndarray:
    canonical = _flipped(transform, np.array(points_N3, np.float64))
    canonical[:, 1] -= _displacement_at(transform, canonical[:, 0])
    return (canonical - transform.origin) / transform.scale


def _displacement_at(transform, bscans) -> np.ndarray:
    return np.interp(bscans, np.arange(len(transform.displacement)), transform.displacement)


def _flipped(transform, points_N3) -> np.ndarray:
    for axis, flip in ((0, transform.reversed_bscans), (2, transform.mirrored)):
        if flip:
            points_N3[:, axis] = transform.native_shape[axis] - 1 - points_N3[:, axis]
    return points_N3
