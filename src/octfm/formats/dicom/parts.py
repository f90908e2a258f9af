"""Files that are one volume together: parts of a concatenation, and B-scans of a series with a file each.

Standard: DICOM PS3.3 C.7.6.16.2.2.4 (concatenations), 10.3 (instance numbers). The parts must lie in one folder.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from octfm.errors import ReadError
from octfm.formats.dicom.file import ELEMENTS, OpenFile, integer, parsed, text
from octfm.formats.dicom.geometry import Geometry
from octfm.io.archive import list_folder, split_uri

_FRAME_GROUPS = (
    "PixelMeasuresSequence",
    "PlanePositionSequence",
    "PlaneOrientationSequence",
    "OphthalmicFrameLocationSequence",
)

MAX_PARTS = 10_000
"""No volume has as many files; a damaged number may claim two billions."""


@dataclass(frozen=True)
class Part:
    """One file of a volume that several files may make."""

    uri: str
    volume: str
    """The same for all parts of a volume in a folder."""
    number: int | None
    """Its place: InConcatenationNumber, or the number of the B-scan."""
    total: int | None
    """Parts that there must be, where the file says so."""
    sop_instance_uid: str

    @property
    def concatenated(self) -> bool:
        return self.volume.startswith("concatenation")


def part_of(file: OpenFile) -> Part | None:
    """None for a file that is a volume by itself. One B-scan is never one."""
    dataset = file.dataset
    identity = text(dataset, "SOPInstanceUID")
    if concatenation := text(dataset, "ConcatenationUID"):
        number, total = _number(dataset, "InConcatenationNumber"), _number(dataset, "InConcatenationTotalNumber")
        return None if total == 1 else Part(file.uri, f"concatenation {concatenation}", number, total, identity)
    series = text(dataset, "SeriesInstanceUID")
    if not series or integer(dataset, "NumberOfFrames", 1) != 1:
        return None
    form = [str(dataset.get(keyword) or "") for keyword in ("Rows", "Columns", "ImageLaterality", "Laterality")]
    return Part(file.uri, " ".join(["series", series, *form]), _number(dataset, "InstanceNumber"), None, identity)


def in_order(parts: Sequence[Part]) -> list[Part]:
    """By number, then by name as people count."""
    return sorted(parts, key=lambda part: (part.number is None, part.number or 0, _natural(part.uri)))


def parts_beside(part: Part) -> list[Part]:
    """All parts of its volume in its folder, on disk or in an archive, in order."""
    folder = os.path.dirname(part.uri)  # noqa: PTH120  (archive.zip!/ is no path)
    inside = split_uri(part.uri)
    stamp = Path(inside[0] if inside else folder or ".").stat().st_mtime_ns if "://" not in folder else 0
    found = [other for other in _parts_in(folder, stamp) if other.volume == part.volume]
    return in_order(found if any(other.uri == part.uri for other in found) else [part])


@lru_cache(maxsize=8)
def _parts_in(folder: str, _stamp: int) -> tuple[Part, ...]:
    """Read once per folder and process: a series is read B-scan by B-scan, and a folder may hold many."""
    found = []
    for uri in list_folder(folder or "."):
        try:
            with parsed(uri) as file:
                found.append(part_of(file))
        except ReadError:
            continue  # no part of anything; a scan has told about it
    return tuple(part for part in found if part is not None)


def merged(datasets: Sequence[Any], frames: Sequence[int]) -> dict[str, Any]:
    """One header for several files: the first one's, with the functional groups of every frame."""
    groups = []
    for dataset, count in zip(datasets, frames, strict=True):
        shared = (dataset.get("SharedFunctionalGroupsSequence") or [{}])[0]
        own = list(dataset.get("PerFrameFunctionalGroupsSequence") or [])
        plain = {
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
    header = {keyword: first.get(keyword) for keyword in ELEMENTS}
    source = text(first, "SOPInstanceUIDOfConcatenationSource")
    # In the files, what all frames share may differ from file to file.
    return header | {
        "SharedFunctionalGroupsSequence": [],
        "PerFrameFunctionalGroupsSequence": groups,
        "SOPInstanceUID": source or text(first, "SOPInstanceUID"),
    }


def expect_all_parts(parts: Sequence[Part], geometry: Geometry | None = None) -> None:
    """Raises ReadError: missing_part, which names them; inconsistent_parts where one is there twice or nothing tells the order.

    Without `geometry`, what is wrong whatever the positions say: copies, and gaps in a concatenation.
    """
    uri, joined = parts[0].uri, parts[0].concatenated
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
    if not joined and (geometry is None or even):
        return
    if (joined or not by_position) and (_twice(numbers) or len(numbers) < len(parts)):
        problem = (
            f"number {_listed(_twice(numbers))} is there more than once" if _twice(numbers) else "some have no number"
        )
        raise ReadError(
            "inconsistent_parts", f"{uri}: among {len(parts)} {what}, {problem}; remove copies, or export it again"
        )
    first = 1 if joined else min(numbers, default=1)
    last = max([*numbers, *(part.total for part in parts if part.total)], default=0)
    if last - min([first, *numbers]) > MAX_PARTS:
        raise ReadError(
            "inconsistent_parts",
            f"{uri}: {what} are numbered up to {last:,}, expected at most {MAX_PARTS:,}; export it again",
        )
    expected = range(first, 1 + last)
    if absent := sorted(set(expected) - set(numbers)):
        raise ReadError(
            "missing_part",
            f"{uri}: {what} {_listed(absent)} of {len(expected)} are not in its folder; put all files of the volume there",
        )


def _twice(values: Sequence[Any]) -> list[Any]:
    return sorted(value for value, count in Counter(values).items() if count > 1)


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (" and more" if len(numbers) > most else "")


def _number(dataset: Any, keyword: str) -> int | None:
    value = dataset.get(keyword)
    return None if value in (None, "") else int(value)


def _natural(uri: str) -> list[tuple[int, int | str]]:
    return [(0, int(piece)) if piece.isdigit() else (1, piece) for piece in re.split(r"(\d+)", uri)]
