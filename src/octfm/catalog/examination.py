"""Examine the files of a scan: each yields headers of volumes, a part of one that is then joined, or a reject.

Files that form a volume only together have one header, named after the first of them.
"""

import functools
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.formats import detect
from octfm.formats.bscans import Reader
from octfm.formats.declared import declared_for_dicom, sidecars
from octfm.formats.dicom.header import with_sidecar
from octfm.formats.dicom.parts import Part, in_order
from octfm.formats.dicom.reader import read_header_of_parts
from octfm.formats.reasons import Header
from octfm.io.archive import file_size, links, recall
from octfm.io.bucket import Account
from octfm.io.isolation import Lost
from octfm.io.location import Location
from octfm.io.spread import Spread
from octfm.volume.volume import STRUCTURE_ONLY, Layout, Modality


def examine_files(
    files: Sequence[Location],
    in_children: Spread,
    account: Account,
    layouts: Collection[Layout],
    modalities: Collection[Modality] = STRUCTURE_ONLY,
    follow_links: bool = True,
    readers: Sequence[Reader] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[Header | Part | Reject]:
    """Outcomes of all files, in their order. `account` counts requests to buckets."""
    examine = functools.partial(
        _examine_file,
        layouts=tuple(layouts),
        modalities=tuple(modalities),
        follow_links=follow_links,
        readers=readers,
    )
    examined = in_children(
        account.counting(examine),
        files,
        lambda path, lost: [Reject.lost(path, lost, "examined it")],
        # A deadline by size, although headers take milliseconds: a volume that may be blank is decoded.
        deadline=lambda limits, path: limits.deadline(file_size(path), str(path)),
        progress=progress,
    )
    return [outcome for outcomes in account.counted(examined) for outcome in outcomes]


def _examine_file(
    path: Location,
    layouts: Collection[Layout],
    modalities: Collection[Modality],
    follow_links: bool,
    readers: Sequence[Reader],
) -> list[Header | Part | Reject]:
    """Outcomes of a file, or of each volume in it; for a folder, also a reject for each image that is no B-scan."""

    def examine(uri: str) -> Header | Part | Reject:
        try:
            return detect.examine(uri, layouts, readers, modalities)
        except ReadError as error:
            return Reject.of(uri, error)

    recall(path)
    with links(follow=follow_links):
        found = examine(str(path))
        if isinstance(found, Reject) and found.code == "several_volumes":
            return [examine(uri) for uri in detect.volumes_in(str(path), readers)]
        aside = found.set_aside if isinstance(found, Header) else ()
        return [
            found,
            *(Reject(uri, "not_a_bscan", f"{uri}: {why}; left out", file_size(uri)) for uri, why in aside),
        ]


def with_sidecars(outcomes: Sequence[Header | Reject], companions: Collection[Location]) -> list[Header | Reject]:
    """Add what sidecars state to headers of DICOM files; other readers have added it.

    Only those among the companions are opened: a bucket would answer two requests for each file without one.
    """
    present = {str(path) for path in companions if path.suffix == ".json"}

    def added(outcome: Header | Reject) -> Header | Reject:
        if isinstance(outcome, Reject) or not outcome.spacing_source.startswith(("shared", "per_frame", "top_level")):
            return outcome
        if present.isdisjoint(map(str, sidecars(outcome.uri))):
            return outcome
        try:
            return with_sidecar(outcome, declared_for_dicom(outcome.uri))
        except ReadError as error:
            return Reject.of(outcome.uri, error)

    return [added(outcome) for outcome in outcomes]


def wanted(outcomes: Sequence[Header | Reject], layouts: Collection[Layout]) -> tuple[list[Header], list[Reject]]:
    """Headers of these layouts, and the rejects, among them volumes where only single B-scans are taken.

    A line scan is a single B-scan; several of them at one place are no volume.
    """
    headers, rejects = [], []
    for outcome in outcomes:
        if isinstance(outcome, Reject):
            rejects.append(outcome)
        elif outcome.layout == "line" and outcome.shape[0] > 1 and "repeated" not in layouts:
            what = f"{outcome.uri}: {outcome.shape[0]} B-scans along one line are not one B-scan; left out"
            rejects.append(Reject.of(outcome.uri, ReadError("not_raster", what)))
        elif outcome.layout not in layouts:
            what = f"{outcome.uri}: a volume of {outcome.shape[0]} B-scans, while only single B-scans are taken"
            rejects.append(Reject.of(outcome.uri, ReadError("several_bscans", what)))
        else:
            headers.append(outcome)
    return headers, rejects


def join_parts(
    outcomes: Sequence[Header | Part | Reject], in_children: Spread, layouts: Collection[Layout]
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
    joined += in_children(
        functools.partial(_examine_parts, layouts=tuple(layouts)),
        groups,
        _lost,
        deadline=lambda limits, parts: limits.deadline(_bytes(parts), parts[0].uri),
    )
    return joined, sum(len(parts) - 1 for parts in groups)


def _examine_parts(parts: Sequence[Part], layouts: Collection[Layout]) -> Header | Reject:
    try:
        return read_header_of_parts(parts, layouts)
    except ReadError as error:
        return Reject.of(parts[0].uri, error, _bytes(parts))


def _lost(parts: Sequence[Part], lost: Lost) -> Reject:
    return Reject.lost(parts[0].uri, lost, f"examined it and {len(parts) - 1} other files of its volume", _bytes(parts))


def _bytes(parts: Sequence[Part]) -> int:
    return sum(file_size(part.uri) for part in parts)
