"""A folder whose images are one volume: by the numbers in their names, with millimetres beside it, or as a HEYEX XML in it says."""

import re
from itertools import pairwise
from pathlib import PurePath

import numpy as np

from octfm.data.archive import list_folder
from octfm.data.readers import heyex_xml
from octfm.data.readers.bscans import Bscans, uid_from
from octfm.data.readers.images import digest_of, image_size, significant_bits, stack_gray
from octfm.errors import ReadError

SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".jpg", ".jpeg")


def open_bscans(uri: str) -> Bscans:
    inside = list_folder(uri)
    exports = heyex_xml.exports_in(inside)
    if len(exports) > 1:
        names = ", ".join(PurePath(place).name for place in exports)
        raise ReadError(
            "several_volumes", f"{uri}: which of its {len(exports)} HEYEX exports? give one of {names[:200]}"
        )
    if exports:
        return heyex_xml.open_bscans(exports[0])
    files = numbered([place for place in inside if PurePath(place).suffix.lower() in SUFFIXES], uri)
    sizes = [image_size(place) for place in files]
    if other := next((i for i, size in enumerate(sizes) if size != sizes[0]), None):
        raise ReadError(
            "mixed_images",
            f"{uri}: {PurePath(files[0]).name} is {sizes[0][1]} x {sizes[0][0]} and {PurePath(files[other]).name} "
            f"{sizes[other][1]} x {sizes[other][0]}; keep only the B-scans of one volume in a folder",
        )

    def decode() -> np.ndarray:
        return stack_gray(files, uri)

    return Bscans(
        uri=uri,
        shape=(len(files), *sizes[0]),
        decode=decode,
        uid=uid_from(digest_of(files)),
        bits=significant_bits(files[0]),
    )


def numbered(places: list[str], uri: str) -> list[str]:
    """In the order of the one number in which their names differ: 2 before 10. Raises ReadError mixed_images."""
    if not places:
        raise ReadError(
            "unreadable",
            f"{uri}: a folder without images; give a file, or a folder whose images are the B-scans of a volume",
        )
    if len(places) < 2:
        raise ReadError("single_image", f"{uri}: {len(places)} image; a volume needs several B-scans")
    parts = [[*re.split(r"(\d+)", PurePath(place).stem), PurePath(place).suffix.lower()] for place in places]
    differing = [i for i in range(len(parts[0])) if len({part[i] for part in parts if len(part) > i}) > 1]
    if len({len(part) for part in parts}) > 1 or len(differing) != 1 or differing[0] % 2 == 0:
        example = " and ".join(PurePath(place).name for place in sorted(places)[:2])
        raise ReadError(
            "mixed_images",
            f"{uri}: {len(places)} images whose names differ in more than one number, for example {example}; keep one volume per folder",
        )
    numbers = {int(part[differing[0]]): place for part, place in zip(parts, places, strict=True)}
    order = sorted(numbers)
    steps = set(np.diff(order).tolist())
    if len(numbers) < len(places) or len(steps) > 1:
        gap = next((a for a, b in pairwise(order) if b - a != min(steps)), order[0])
        raise ReadError(
            "mixed_images",
            f"{uri}: the B-scan after number {gap} is missing, or is there twice; fetch the folder again",
        )
    return [numbers[number] for number in order]
