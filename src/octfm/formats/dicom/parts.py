"""Several files that form one volume: parts of a concatenation, or one file per B-scan of a series.

Standard: DICOM PS3.3 C.7.6.16.2.2.4 (concatenations), 10.3 (instance numbers). The parts must lie in one folder.
"""

import os
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from octfm.errors import ReadError
from octfm.formats.dicom.file import ELEMENTS, OpenFile, integer, locate_pixels, parsed, text
from octfm.formats.dicom.geometry import Geometry
from octfm.formats.dicom.gray import needed
from octfm.formats.dicom.groups import Elements
from octfm.formats.dicom.header import describe
from octfm.formats.dicom.pixels import MAX_BYTES, Pixels, decode, is_blank
from octfm.formats.reasons import Header
from octfm.io.archive import list_folder, split_uri
from octfm.volume.volume import Layout, Shape3

_FRAME_GROUPS = (
    "PixelMeasuresSequence",
    "PlanePositionSequence",
    "PlaneOrientationSequence",
    "OphthalmicFrameLocationSequence",
)
_MILLIMETRES = ("PixelSpacing", "SliceThickness", "SpacingBetweenSlices")

MAX_PARTS = 10_000
"""No volume has so many files; a damaged number may claim two billion."""


@dataclass(frozen=True)
class Part:
    """A file that may be one of several that form a volume."""

    uri: str
    volume: str
    """Identifies the volume among those in its folder."""
    number: int | None
    """InConcatenationNumber, or the InstanceNumber of a B-scan."""
    total: int | None
    """Number of parts, if the file states it."""
    sop_instance_uid: str


def part_of(file: OpenFile) -> Part | None:
    """The part of a volume that this file is; None for a file that is read by itself."""
    dataset = file.dataset
    identity = text(dataset, "SOPInstanceUID")
    if concatenation := text(dataset, "ConcatenationUID"):
        number, total = _number(dataset, "InConcatenationNumber"), _number(dataset, "InConcatenationTotalNumber")
        return None if total == 1 else Part(file.uri, f"concatenation {concatenation}", number, total, identity)
    series = text(dataset, "SeriesInstanceUID")
    if not series or integer(dataset, "NumberOfFrames", 1) != 1:
        return None
    # A series may mix eyes, sizes and modalities, which are different volumes. Some programs give all people one UID.
    keywords = ("Rows", "Columns", "ImageLaterality", "Laterality", "SOPClassUID", "PatientID")
    form = [str(dataset.get(keyword) or "") for keyword in keywords]
    return Part(file.uri, " ".join(["series", series, *form]), _number(dataset, "InstanceNumber"), None, identity)


def in_order(parts: Sequence[Part]) -> list[Part]:
    """Sort by number, then by name with its numbers as numbers."""
    return sorted(parts, key=lambda part: (part.number is None, part.number or 0, _natural(part.uri)))


def parts_beside(part: Part) -> list[Part]:
    """All parts of the same volume in its folder or archive, in order."""
    folder = os.path.dirname(part.uri)  # noqa: PTH120  (archive.zip!/ is no path)
    inside = split_uri(part.uri)
    # The time stamp is part of the cache key: a folder that gains a file is read again. Buckets have no stamp.
    stamp = Path(inside[0] if inside else folder or ".").stat().st_mtime_ns if "://" not in folder else 0
    found = [other for other in _parts_in(folder, stamp) if other.volume == part.volume]
    return in_order(found if any(other.uri == part.uri for other in found) else [part])


@lru_cache(maxsize=8)
def _parts_in(folder: str, _stamp: int) -> tuple[Part, ...]:
    """All parts in a folder. Cached until the folder changes: each file of a series asks for its siblings."""
    found = []
    for uri in list_folder(folder or "."):
        try:
            with parsed(uri) as file:
                found.append(part_of(file))
        except ReadError:
            continue  # not a part; a scan reports such files by themselves
    return tuple(part for part in found if part is not None)


def merged(datasets: Sequence[Elements], frames: Sequence[int]) -> dict[str, Any]:
    """One header for several files: that of the first, with the functional groups of every frame."""
    groups = []
    # What all files state alike stays at the top level; of what differs, the first file's would pass for every frame.
    differ = len({tuple(str(dataset.get(name)) for name in _MILLIMETRES) for dataset in datasets}) > 1
    for dataset, count in zip(datasets, frames, strict=True):
        shared = (dataset.get("SharedFunctionalGroupsSequence") or [{}])[0]
        own = list(dataset.get("PerFrameFunctionalGroupsSequence") or [])
        # Single B-scan files may state millimetres and position at the top level.
        plain = {
            "PixelMeasuresSequence": [dataset] if differ else None,
            "PlanePositionSequence": [dataset] if dataset.get("ImagePositionPatient") else None,
            "PlaneOrientationSequence": [dataset] if dataset.get("ImageOrientationPatient") else None,
        }
        for frame in own if len(own) == count else [{}] * count:
            found = {
                name: frame.get(name) or shared.get(name) or plain.get(name)
                for name in (*_FRAME_GROUPS, "FrameAnatomySequence")
            }
            groups.append({name: value for name, value in found.items() if value})
    first = datasets[0]
    header = {keyword: first.get(keyword) for keyword in ELEMENTS if not (differ and keyword in _MILLIMETRES)}
    source = text(first, "SOPInstanceUIDOfConcatenationSource")
    # No shared group: what frames share within a file may differ between files.
    return header | {
        "SharedFunctionalGroupsSequence": [],
        "PerFrameFunctionalGroupsSequence": groups,
        "SOPInstanceUID": source or text(first, "SOPInstanceUID"),
    }


def expect_all_parts(parts: Sequence[Part], geometry: Geometry | None = None) -> None:
    """Check that no part is missing. Raises ReadError missing_part, which names them, and inconsistent_parts.

    Without `geometry`, only copies and gaps in a concatenation are found. With it, gaps in the numbers of single
    B-scans are errors too, unless the B-scans are evenly spaced: then none can be missing between them.
    """
    uri, joined = parts[0].uri, parts[0].volume.startswith("concatenation")
    what = "parts of the concatenation" if joined else "B-scans of the series"
    copies = _twice([part.sop_instance_uid for part in parts if part.sop_instance_uid])
    if copies:
        same = [part.uri for part in parts if part.sop_instance_uid == copies[0]]
        raise ReadError(
            "inconsistent_parts", f"{uri}: {' and '.join(same[:2])} have one SOP Instance UID; remove the copy"
        )
    by_position = geometry is not None and geometry.spacing_source.endswith("+positions")
    even = by_position and geometry is not None and "uneven_positions" not in geometry.flags
    numbers = [part.number for part in parts if part.number is not None]
    # Without a gap in their positions no B-scan of a series is missing, whatever their numbers are.
    if not joined and (geometry is None or even):
        return
    if (joined or not by_position) and (_twice(numbers) or len(numbers) < len(parts)):
        repeated = _twice(numbers)
        problem = f"number {_listed(repeated)} occurs more than once" if repeated else "some have no number"
        raise ReadError(
            "inconsistent_parts", f"{uri}: among {len(parts)} {what}, {problem}; remove copies, or export it again"
        )
    # A concatenation counts from 1; instance numbers of a series may start anywhere.
    first = 1 if joined else min(numbers, default=1)
    last = max([*numbers, *(part.total for part in parts if part.total)], default=0)
    if last - min([first, *numbers]) > MAX_PARTS:
        raise ReadError(
            "inconsistent_parts",
            f"{uri}: {what} are numbered up to {last:,}, expected at most {MAX_PARTS:,}; export it again",
        )
    expected = range(first, 1 + last)
    if absent := sorted(set(expected) - set(numbers)):
        others = "" if joined else ", or state another PatientID, eye or size"
        raise ReadError(
            "missing_part",
            f"{uri}: {what} {_listed(absent)} of {len(expected)} are not in its folder{others}; "
            "put all files of the volume there",
        )


def inspect_parts(parts: Sequence[Part], layouts: Collection[Layout]) -> tuple[Header, Geometry, bool]:
    """Header, geometry, and whether every file is blank by itself. The volume has the uri and UID of its first part."""
    # Checked before and after reading: some gaps show in the numbers, others only in the positions.
    expect_all_parts(parts)
    datasets, pixels, all_blank = [], [], True
    for part in parts:
        with parsed(part.uri) as file:
            datasets.append(file.dataset)
            pixels.append(locate_pixels(file))
            all_blank = all_blank and is_blank(file.stream, pixels[-1], part.uri)
    shape = _joint_shape(parts, pixels)
    frames = [p.shape[0] for p in pixels]
    header, geometry = describe(merged(datasets, frames), pixels[0], shape, parts[0].uri, layouts)
    expect_all_parts(parts, geometry)
    return replace(header, flags=(*header.flags, "several_files")), geometry, all_blank


def _joint_shape(parts: Sequence[Part], pixels: Sequence[Pixels]) -> Shape3:
    # Files are decoded one by one: with other bits, black or window the same tissue would have another gray.
    grays = [p.gray and needed(p.gray, p.bits_stored) for p in pixels]
    forms = {
        (p.shape[1:], p.bits_allocated, p.bits_stored, p.inverted, gray) for p, gray in zip(pixels, grays, strict=True)
    }
    if len(forms) > 1:
        raise ReadError(
            "inconsistent_parts",
            f"{parts[0].uri}: its {len(parts)} files have B-scans of different size, bits or grey scale (window, "
            "rescale, MONOCHROME1); export it again",
        )
    frames = sum(p.shape[0] for p in pixels)
    if sum(p.bytes_expected for p in pixels) > MAX_BYTES:
        raise ReadError(
            "absurd_size",
            f"{parts[0].uri}: {len(parts)} files of {frames} frames together; expected at most {MAX_BYTES:,} bytes",
        )
    return (frames, *pixels[0].shape[1:])


def decode_parts(parts: Sequence[Part], shape: Shape3) -> tuple[np.ndarray, Pixels]:
    """All B-scans, and the pixel format of the last file."""
    voxels, pixels, at = None, None, 0
    for part in parts:
        with parsed(part.uri, whole=True) as file:
            pixels = locate_pixels(file)
            planes = decode(file.stream, pixels, part.uri)
        voxels = np.empty(shape, planes.dtype) if voxels is None else voxels
        voxels[at : at + len(planes)] = planes
        at += len(planes)
    assert voxels is not None and pixels is not None  # there is at least one part
    return voxels, pixels


def _twice(values: Sequence[Any]) -> list[Any]:
    return sorted(value for value, count in Counter(values).items() if count > 1)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" and more" if len(numbers) > 8 else "")


def _number(dataset: Elements, keyword: str) -> int | None:
    value = dataset.get(keyword)
    return None if value in (None, "") else int(value)


def _natural(uri: str) -> list[tuple[int, int | str]]:
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in re.split(r"(\d+)", uri)]
