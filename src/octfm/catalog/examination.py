"""What a scan makes of one file: headers of the volumes in it, a part of one, or a reject with a reason."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from octfm import formats
from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.io.archive import file_size, links
from octfm.io.isolation import Limits, Lost
from octfm.io.location import Location
from octfm.io.ranged import recall
from octfm.volume.volume import Layout

if TYPE_CHECKING:
    from octfm.formats.bscans import Reader
    from octfm.formats.dicom.parts import Part
    from octfm.formats.reasons import Header


def examine_file(
    path: Location, layouts: Collection[Layout], follow_links: bool = True, readers: "Sequence[Reader]" = ()
) -> "list[Header | Part | Reject]":
    """One outcome for a file, or for each volume in it."""
    recall(path)
    with links(follow=follow_links):
        return _examine(path, layouts, readers)


def _examine(
    path: Location, layouts: Collection[Layout], readers: "Sequence[Reader]"
) -> "list[Header | Part | Reject]":
    try:
        found = formats.examine(str(path), layouts, readers)
        aside = found.set_aside if isinstance(found, formats.Header) else ()
        return [
            found,
            *(Reject(place, "not_a_bscan", f"{place}: {why}; left out", file_size(place)) for place, why in aside),
        ]
    except ReadError as error:
        if error.code != "several_volumes":
            return [Reject(str(path), error.code, str(error), file_size(path), error.refers_to)]
    return [_examine_one(uri, layouts, readers) for uri in formats.volumes_in(str(path), readers=readers)]


def _examine_one(uri: str, layouts: Collection[Layout], readers: "Sequence[Reader]") -> "Header | Part | Reject":
    try:
        return formats.examine(uri, layouts, readers)
    except ReadError as error:
        return Reject(uri, error.code, str(error), file_size(uri), error.refers_to)


def lost_file(path: Location, lost: Lost) -> "list[Header | Part | Reject]":
    sentence = f"{path}: the process that looked at it {lost.what}; {formats.REASONS[lost.code].fix}"
    return [Reject(str(path), lost.code, sentence, file_size(path))]


def deadline_of(limits: Limits, path: Location) -> float:
    """A header takes milliseconds; pixels are decoded only where every one may be the same."""
    return limits.deadline(file_size(path), str(path))
