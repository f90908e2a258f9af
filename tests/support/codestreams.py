"""One B-scan and encoders of it for tests of transfer syntaxes."""

from collections.abc import Callable

import numpy as np
from pydicom.pixels.encoders.base import RLELosslessEncoder

SHAPE = (48, 64)


def picture(bits: int) -> np.ndarray:
    """[48, 64] uint8 or uint16: a ramp along both axes with texture, by arithmetic alone so that fixtures stay true."""
    rows, columns = np.mgrid[: SHAPE[0], : SHAPE[1]]
    ramp = 2 * rows + columns
    texture = (rows * 7919 + columns * 104729 + (rows * columns) % 37 * 31) % 64
    values = {8: ramp + texture % 32, 12: 24 * ramp + 3 * texture, 16: 400 * ramp + 40 * texture}[bits]
    return values.astype(np.uint8 if bits == 8 else np.uint16)


def imagecodecs_encoder(codec: str, **options) -> Callable[[np.ndarray], bytes]:
    def encode(image):
        import imagecodecs

        return bytes(getattr(imagecodecs, f"{codec}_encode")(image, **options))

    return encode


def rle_encoder(bits: int) -> Callable[[np.ndarray], bytes]:
    """DICOM's run-length encoding by pydicom, which is not the decoder in use. `bits`: BitsStored."""

    def encode(image):
        layout = {"rows": image.shape[0], "columns": image.shape[1], "number_of_frames": 1, "samples_per_pixel": 1}
        depth = {"bits_allocated": 8 * image.dtype.itemsize, "bits_stored": bits, "pixel_representation": 0}
        colours = {"photometric_interpretation": "MONOCHROME2"}
        return RLELosslessEncoder.encode(image, encoding_plugin="pydicom", **layout, **depth, **colours)

    return encode
