"""Join files that form a volume only together: one header, named after the first file."""

import functools
import os
from collections import defaultdict
from collections.abc import Collection, Sequence

from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.formats import read_header_of_parts
from octfm.formats.dicom.parts import Part, in_order
from octfm.formats.reasons import Header
from octfm.io.archive import file_size
from octfm.io.isolation import Limits, Lost
from octfm.io.spread import spread
from octfm.volume.volume import RASTER_ONLY, Layout


def join_parts(
    outcomes: Sequence[Header | Part | Reject],
    workers: int | None = None,
    limits: Limits | None = None,
    layouts: Collection[Layout] = RASTER_ONLY,
) -> tuple[list[Header | Reject], int]:
    """One outcome per volume or file, and the number of files that are covered by another file's outcome."""
    volumes: dict[tuple[str, str], list[Part]] = defaultdict(list)
    joined: list[Header | Reject] = []
    for outcome in outcomes:
        if isinstance(outcome, Part):
            volumes[os.path.dirname(outcome.uri), outcome.volume].append(outcome)  # noqa: PTH120  (archive.zip!/ is no path)
        else:
            joined.append(outcome)
    groups = [in_order(parts) for parts in volumes.values()]
    limits = limits or Limits()
    examine = functools.partial(_examine, layouts=tuple(layouts))
    joined += spread(
        examine,
        groups,
        _lost,
        workers=workers,
        limits=limits,
        deadline=lambda parts: limits.deadline(_bytes(parts), parts[0].uri),
    )
    return joined, sum(len(parts) - 1 for parts in groups)


def _examine(parts: Sequence[Part], layouts: Collection[Layout]) -> Header | Reject:
    try:
        return read_header_of_parts(parts, layouts)
    except ReadError as error:
        return Reject.of(parts[0].uri, error, _bytes(parts))


def _lost(parts: Sequence[Part], lost: Lost) -> Reject:
    return Reject.lost(parts[0].uri, lost, f"examined it and {len(parts) - 1} other files of its volume", _bytes(parts))


def _bytes(parts: Sequence[Part]) -> int:
    return sum(file_size(part.uri) for part in parts)
