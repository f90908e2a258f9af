"""A folder whose images are the B-scans of one volume: numbered in their names, or listed in a HEYEX XML among them."""

import re
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import PurePath

import numpy as np

from octfm.errors import ReadError
from octfm.formats import heyex_xml
from octfm.formats.bscans import OR_SINGLE, Bscans, uid_from
from octfm.formats.images import (
    MAGIC,
    digest_of,
    expect_gray,
    image_size,
    several_pages,
    significant_bits,
    stack_gray,
    stated_mm,
)
from octfm.formats.names import may_be_labels
from octfm.formats.reasons import ZARR_FILES, zarr_array
from octfm.io.archive import file_size, list_folder, open_file, split_uri
from octfm.io.location import Location

SUFFIXES = (".png", ".tif", ".tiff", ".bmp", ".jpg", ".jpeg")


def open_bscans(uri: str) -> Bscans:
    inside = list_folder(uri)
    if export := heyex_xml.only_export(inside, uri):
        return heyex_xml.open_bscans(export)
    images = [place for place in inside if PurePath(place).suffix.lower() in SUFFIXES and is_image(place)]
    if not images and any(PurePath(place).name in ZARR_FILES for place in inside):
        raise zarr_array(uri)
    files, size, set_aside = sort_out(images, uri)
    if not may_be_labels(uri):  # lines drawn into B-scans are seldom missing in the middle one
        expect_gray(files[len(files) // 2])
    in_plane, between = stated_mm(files, uri)
    return Bscans(
        uri=uri,
        shape=(len(files), *size),
        decode=partial(stack_gray, files, uri),
        uid=uid_from(digest_of(files)),
        in_plane_mm=in_plane,
        between_mm=between,
        bits=significant_bits(files[0]),
        set_aside=set_aside,
    )


def is_image(place: str | Location) -> bool:
    """Whether a file is a single image, not a TIFF of several pages, which is a volume by itself."""
    try:
        if split_uri(place) and file_size(place) > heyex_xml.MAX_BYTES:
            return False  # a B-scan is never so large, and reading a member of an archive means inflating it
        with open_file(place) as file:
            return file.read(8).startswith(MAGIC) and not several_pages(file, str(place))
    except (OSError, ReadError):
        return False


def sort_out(places: list[str], uri: str) -> tuple[list[str], tuple[int, int], tuple[tuple[str, str], ...]]:
    """The B-scans of a folder in order, their (H, W), and the other images as (uri, reason).

    B-scans have one size, and names that differ in their numbers only. Images that differ from most in both size and
    name are set aside if at least three times as many do not differ; images that differ in one of the two, if at least
    eight times as many do not. Raises ReadError mixed_images, which names the doubtful image.
    """
    kinds = Counter(map(_kind, places))
    main, _ = max(kinds.items(), key=lambda item: (item[1], "#" in item[0], item[0]), default=("", 0))
    sizes = {place: image_size(place) for place in places if _kind(place) == main}
    if len(sizes) < 2:
        return numbered(places, uri), (0, 0), ()  # `numbered` raises: fewer than two images, or no common name
    size, _ = Counter(sizes.values()).most_common(1)[0]
    kept = [place for place, own in sizes.items() if own == size]
    like_most = f"{len(kept)} images are {size[1]} x {size[0]} and named like {PurePath(kept[0]).name}"
    aside, differ_in_one = [], 0
    for place in places:
        own = sizes[place] if place in sizes else _size_or_none(place)
        if own == size and place in sizes:
            continue
        differ_in_one += own == size or place in sizes
        shown = "unreadable" if own is None else f"{own[1]} x {own[0]} pixels"
        aside.append((place, f"{shown}, while {like_most}"))
    if len(kept) < max(3 * len(aside), 8 * differ_in_one):
        culprit, why = aside[0]
        raise ReadError(
            "mixed_images",
            f"{uri}: {PurePath(culprit).name} may or may not be one of its B-scans: {why}; "
            f"keep only the B-scans of one volume in a folder{OR_SINGLE}",
        )
    try:
        return numbered(kept, uri), size, tuple(aside)
    except ReadError as error:
        culprit = next((place for place, _ in aside if place in sizes), None)
        if culprit is None:
            raise
        h, w = sizes[culprit]
        raise ReadError(
            "mixed_images",
            f"{uri}: {PurePath(culprit).name} is {w} x {h}, the other {len(kept)} images {size[1]} x {size[0]}, and "
            "without it a number is missing among the B-scans; fetch it again, or remove it and renumber the rest",
        ) from error


def _kind(place: str) -> str:
    """The file name with every number replaced by #."""
    path = PurePath(place)
    return re.sub(r"\d+", "#", path.stem) + path.suffix.lower()


def _size_or_none(place: str) -> tuple[int, int] | None:
    try:
        return image_size(place)
    except ReadError:
        return None


def numbered(places: list[str], uri: str) -> list[str]:
    """Files in the order of the only number in which their names differ, 2 before 10. Raises ReadError mixed_images."""
    if not places:
        raise ReadError(
            "unreadable",
            f"{uri}: a folder without PNG, TIFF, BMP or JPEG images; give a file, or a folder whose images are the "
            "B-scans of a volume",
        )
    if len(places) < 2:
        raise ReadError("single_image", f"{uri}: {len(places)} image; a volume needs several B-scans")
    parts = [[*re.split(r"(\d+)", PurePath(place).stem), PurePath(place).suffix.lower()] for place in places]
    differing = [i for i in range(len(parts[0])) if len({part[i] for part in parts if len(part) > i}) > 1]
    if len({len(part) for part in parts}) > 1 or len(differing) != 1 or differing[0] % 2 == 0:
        example = " and ".join(PurePath(place).name for place in sorted(places)[:2])
        raise ReadError(
            "mixed_images",
            f"{uri}: {len(places)} images whose names differ in more than one number, for example {example}; "
            f"keep one volume per folder{OR_SINGLE}",
        )
    # Odd elements of re.split are the numbers.
    numbers = {int(part[differing[0]]): place for part, place in zip(parts, places, strict=True)}
    order = sorted(numbers)
    steps = set(np.diff(order).tolist())
    if len(numbers) < len(places) or len(steps) > 1:
        gap = next((a for a, b in pairwise(order) if b - a != min(steps)), order[0])
        raise ReadError(
            "mixed_images",
            f"{uri}: the B-scan after number {gap} is missing or occurs twice; fetch the folder again{OR_SINGLE}",
        )
    return [numbers[number] for number in order]
