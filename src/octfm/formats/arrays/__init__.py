"""Arrays as research stores them: NumPy, MATLAB, NIfTI, MetaImage; and what their readers share."""

from typing import TypeVar

import numpy as np

from octfm.errors import ReadError

T = TypeVar("T")


def in_order(values: tuple[T, T, T], axes: str) -> tuple[T, T, T]:
    """Reorder values, given in the order of the letters of `axes` (such as WHD), to D, H, W."""
    d, h, w = (values[axes.index(axis)] for axis in "DHW")
    return d, h, w


def exact_gray(array: np.ndarray, uri: str) -> np.ndarray:
    """The same values as uint8 or uint16.

    Raises ReadError unsupported_pixels where these cannot hold the values: any scale would be a guess.
    """
    if array.dtype.newbyteorder("=") in (np.uint8, np.uint16):
        return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False))
    if array.dtype.kind in "iuf" and np.isfinite(array).all():
        low, high = float(array.min()), float(array.max())  # float16 holds no 65,536
        if low >= 0 and high < 2**16 and (array.dtype.kind != "f" or (array == np.rint(array)).all()):
            return np.ascontiguousarray(array).astype(np.uint8 if high < 256 else np.uint16)
    raise ReadError(
        "unsupported_pixels",
        f"{uri}: {array.dtype} values are not grey levels from 0 to 65,535; save it as uint8 or uint16",
    )
