"""Examine one file of a scan: it yields headers of volumes, a part of a volume, or a reject with a reason."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from octfm import formats
from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.io.archive import file_size, links
from octfm.io.location import Location
from octfm.io.ranged import recall
from octfm.volume.volume import STRUCTURE_ONLY, Layout, Modality

if TYPE_CHECKING:
    from octfm.formats.bscans import Reader
    from octfm.formats.dicom.parts import Part
    from octfm.formats.reasons import Header


def examine_file(
    path: Location,
    layouts: Collection[Layout],
    follow_links: bool = True,
    readers: "Sequence[Reader]" = (),
    modalities: Collection[Modality] = STRUCTURE_ONLY,
) -> "list[Header | Part | Reject]":
    """The outcome of a file or of each volume in it; for a folder, also a reject for each image that is not a
    B-scan."""
    recall(path)
    with links(follow=follow_links):
        found = _examine(path, layouts, readers, modalities)
        if isinstance(found, Reject) and found.code == "several_volumes":
            return [
                _examine(uri, layouts, readers, modalities) for uri in formats.volumes_in(str(path), readers=readers)
            ]
        aside = found.set_aside if isinstance(found, formats.Header) else ()
        return [
            found,
            *(Reject(uri, "not_a_bscan", f"{uri}: {why}; left out", file_size(uri)) for uri, why in aside),
        ]


def wanted(outcomes: "Sequence[Header | Reject]", layouts: Collection[Layout]) -> "tuple[list[Header], list[Reject]]":
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


def _examine(
    path: Location | str,
    layouts: Collection[Layout],
    readers: "Sequence[Reader]",
    modalities: Collection[Modality],
) -> "Header | Part | Reject":
    try:
        return formats.examine(str(path), layouts, readers, modalities)
    except ReadError as error:
        return Reject.of(path, error)
