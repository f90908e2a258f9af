"""Optovue .OCT: float32 A-scans stored bottom-up without a header; NAME.txt next to it states their number and length.

Structure: OCT-Converter and oct-to-tiff. The values have no declared scale: they are stretched to 16 bit, and flagged.
Not verified on a real file.
"""

import io
import re
from pathlib import PurePath

import numpy as np

from octfm.errors import ReadError
from octfm.formats.bscans import Bscans, check_size, uid_from
from octfm.formats.images import digest_of
from octfm.formats.reasons import expect_bytes
from octfm.io.archive import open_file
from octfm.io.location import listed

_MAX_TEXT = 2**20


def fits(name: str) -> bool:
    """Whether the name ends in .oct. Bioptigen's files do as well: `detect` recognises those first, by content."""
    return PurePath(name).suffix.lower() == ".oct"


def open_bscans(uri: str) -> Bscans:
    beside = str(listed(uri).with_suffix(".txt"))
    try:
        with open_file(beside) as file:  # not read_start: of a member, what it states is verified
            text = file.read(_MAX_TEXT).decode("latin-1")
    except (OSError, ReadError):
        raise ReadError(
            "incomplete_export",
            f"{uri}: {PurePath(beside).name} is not next to it; copy the whole folder of the export",
        ) from None
    heights, lengths, counts = (
        _numbers(pattern, text) for pattern in (r"Window Height", r"Scan Length", r"Scan Usage")
    )
    if len(set(heights)) != 1 or not lengths or len(lengths) != len(counts):
        raise ReadError(
            "damaged_file",
            f"{uri}: {PurePath(beside).name} does not say how many B-scans of which size; export it again",
        )
    if len(lengths) > 1:
        raise ReadError(
            "not_raster",
            f"{uri}: {len(lengths)} groups of B-scans in different directions; a volume needs parallel B-scans",
        )
    shape = (counts[0], heights[0], lengths[0])
    check_size(shape, uri, bytes_per_voxel=4)
    depth, height, width = shape
    with open_file(uri) as file:
        size = file.seek(0, io.SEEK_END)
    expect_bytes(uri, size, 4 * depth * height * width)

    def decode() -> np.ndarray:
        with open_file(uri, whole=True) as stream:
            stored = np.frombuffer(stream.read(4 * depth * height * width), "<f4").reshape(depth, width, height)
        # A-scan by A-scan and bottom-up, to rows from the top.
        upright = stored[:, :, ::-1].transpose(0, 2, 1)
        if not np.isfinite(upright).all():
            raise ReadError("damaged_file", f"{uri}: values that are not finite; fetch it again")
        low, high = float(upright.min()), float(upright.max())
        return np.rint((upright - low) * (65535 / max(high - low, 1e-30))).astype(np.uint16)

    eye = re.search(r"Eye Scanned\W*(OD|OS)", text)
    return Bscans(
        uri=uri,
        shape=shape,
        decode=decode,
        uid=uid_from(digest_of([uri, beside])),
        laterality=eye[1] if eye else "",
        scanner="optovue",
        flags=("intensity_stretched",),
    )


def _numbers(name: str, text: str) -> list[int]:
    # Near the name: else a line of nothing but names would be searched to its end for each of them.
    return [int(number) for number in re.findall(rf"{name}[^\d\n]{{0,80}}(\d+)", text)]
