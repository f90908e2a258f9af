"""Stored values to gray values. The Modality LUT and the window state which number is black; it is never guessed.

Standard: DICOM PS3.3 C.11.1 (Modality LUT), C.11.2.1.2 (linear VOI), C.7.6.16.2.9 and .10 (their functional groups),
C.11.6 (Presentation LUT Shape). PS3.3 C.8.17.7 requires unsigned OCT images, of which only white's end can be another;
signed ones come from conversion software.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import numpy as np

from octfm.errors import ReadError
from octfm.formats.dicom.groups import Elements, items_in_groups


@dataclass(frozen=True)
class Gray:
    """Meaning of the stored values according to the header."""

    slope: float = 1.0
    intercept: float = 0.0
    """Modality value = slope x stored value + intercept."""
    window: tuple[float, float] | None = None
    """Centre and width of the range of modality values that a display shows from black to white."""


def read_gray(dataset: Elements, uri: str) -> Gray:
    """Rescale and window from the top level, shared or per-frame functional groups.

    Raises ReadError unsupported_pixels where frames differ or the slope is 0.
    """
    rescale = _stated(dataset, "PixelValueTransformationSequence", ("RescaleSlope", "RescaleIntercept"), uri)
    window = _stated(dataset, "FrameVOILUTSequence", ("WindowCenter", "WindowWidth"), uri)
    if rescale is not None and rescale[0] == 0:
        raise ReadError(
            "unsupported_pixels", f"{uri}: RescaleSlope is 0, which makes every pixel the same; export it again"
        )
    slope, intercept = rescale or (1.0, 0.0)
    return Gray(slope, intercept, window if window is not None and window[1] > 1 else None)


def lowest_is_white(dataset: Elements, signed: bool, uri: str) -> bool:
    """Whether the lowest stored value is white: MONOCHROME1, which INVERSE repeats, or a falling rescale.

    `unsigned` applies the rescale of signed values itself. Raises ReadError unsupported_pixels where frames differ.
    """
    inverted = "MONOCHROME1" in str(dataset.get("PhotometricInterpretation"))
    inverted |= "INVERSE" in str(dataset.get("PresentationLUTShape"))
    slopes = [] if signed else _places(dataset, "PixelValueTransformationSequence")
    falling = set[bool]()
    for place in slopes:
        with suppress(ValueError):  # such as "1,0": unsigned values are read without it
            if slope := _number(place, "RescaleSlope"):
                falling.add(slope < 0)
    if len(falling) > 1:
        raise ReadError("unsupported_pixels", f"{uri}: RescaleSlope has both signs; export it again")
    return inverted != (True in falling)


def padding(dataset: Elements) -> tuple[int, int] | None:
    """Lowest and highest value of unsigned pixels outside the image (PS3.3 C.7.5.1.1.2); None if not stated."""
    # pydicom leaves bytes where the encoding states no type; a value stated as signed has the same bits.
    found = (dataset.get(keyword) for keyword in ("PixelPaddingValue", "PixelPaddingRangeLimit"))
    ends = [int.from_bytes(v[:2], "little") if isinstance(v, bytes) else v & 0xFFFF for v in found if _is_one(v)]
    return (min(ends), max(ends)) if ends else None


def _is_one(value: Any) -> bool:
    """Whether it is one value; a list of them states no padding."""
    return isinstance(value, int) or (isinstance(value, bytes) and value != b"")


def needed(gray: Gray, bits_stored: int) -> Gray:
    """`gray` without its window if no value below 0 can be stored: black is then 0, and the window is not needed."""
    return gray if _ends(gray, bits_stored)[0] < 0 else replace(gray, window=None)


def _ends(gray: Gray, bits_stored: int) -> tuple[float, float]:
    """The lowest and the highest modality value that can be stored."""
    stored = -(2 ** (bits_stored - 1)), 2 ** (bits_stored - 1) - 1
    low, high = sorted(gray.slope * end + gray.intercept for end in stored)
    return low, high


def unsigned(stored: np.ndarray, bits_stored: int, gray: Gray, inverted: bool, uri: str) -> np.ndarray:
    """Convert two's complement `stored` [D, H, W] in place to unsigned values of the same width, white at full scale.

    Black is modality value 0 if `bits_stored` and the rescale allow no value below it. Otherwise the window defines
    black and white; without a window, black is 0 if no voxel of this volume lies below it. `inverted`: see
    `lowest_is_white`. Raises ReadError unsupported_pixels where black would be a guess. In place, because a second
    volume would not fit into a worker's memory.
    """
    unused = 8 * stored.dtype.itemsize - bits_stored
    # Shifting left and back extends the sign from BitsStored to the whole word; bits above it may hold anything.
    values = np.left_shift(stored, np.array(unused, stored.dtype), out=stored).view(f"i{stored.dtype.itemsize}")
    np.right_shift(values, np.array(unused, values.dtype), out=values)
    low, white = _ends(gray, bits_stored)
    black, window = 0.0, needed(gray, bits_stored).window
    if window is not None:
        centre, width = window
        black, white = centre - 0.5 - (width - 1) / 2, centre - 0.5 + (width - 1) / 2
    elif low < 0:
        lowest = gray.slope * int(values.min() if gray.slope > 0 else values.max()) + gray.intercept
        if lowest < 0 or white <= 0:
            raise ReadError(
                "unsupported_pixels",
                f"{uri}: signed pixels with values down to {lowest:g}, and neither a rescale nor a window states which "
                "value is black; export it as unsigned greyscale",
            )
    full = np.iinfo(stored.dtype).max
    scale = full / (white - black)
    for number, frame in enumerate(values):  # one B-scan at a time: float64 is four times the volume
        stored[number] = np.rint(((gray.slope * frame + gray.intercept - black) * scale).clip(0, full))
    return np.invert(stored, out=stored) if inverted else stored


def _stated(dataset: Elements, sequence: str, keywords: tuple[str, str], uri: str) -> tuple[float, float] | None:
    """The two numbers from the top level or the functional groups; None if they are in neither."""
    found = {pair for place in _places(dataset, sequence) if (pair := _pair(place, keywords)) is not None}
    if len(found) > 1 or not all(map(isfinite, next(iter(found), ()))):
        raise ReadError(
            "unsupported_pixels",
            f"{uri}: {' and '.join(keywords)} differ from B-scan to B-scan or are not finite; export it again",
        )
    return next(iter(found), None)


def _places(dataset: Elements, sequence: str) -> list[Elements]:
    return [dataset, *items_in_groups(dataset, sequence)]


def _pair(place: Elements, keywords: tuple[str, str]) -> tuple[float, float] | None:
    first, second = (_number(place, keyword) for keyword in keywords)
    return None if first is None or second is None else (first, second)


def _number(place: Elements, keyword: str) -> float | None:
    value: Any = place.get(keyword)
    if not isinstance(value, str) and hasattr(value, "__iter__"):
        value = next(iter(value), None)  # the first of several windows
    return None if value is None or value == "" else float(value)
