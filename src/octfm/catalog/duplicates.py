"""Keep one file per SOP Instance UID, and reject the others as copies or as reused UIDs.

The file that the manifest lists under this UID at its own path is kept, else the first by path that is no symbolic
link, which is the same on every machine. Another file with the same voxels is a copy (duplicate_sop_uid), even if it is
compressed differently. One with other voxels is a second acquisition with the same UID (reused_sop_uid): it is
rejected, and the kept one is flagged, because tables that refer to the UID may mean either. Which copy is kept is
mostly a matter of names, so what a copy contradicts is doubtful: eye and labels then count as unknown.
"""

import functools
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.labels import bare, stated
from octfm.catalog.participants.ids import person_key
from octfm.catalog.tables import Tables
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.declared import DECLARED
from octfm.formats.reasons import Header
from octfm.io.archive import file_size, is_folder, open_file
from octfm.io.spread import Spread
from octfm.volume.estimated import FLAG
from octfm.volume.volume import Spacing3

OF_TWO = "pixels_of_two_participants"
"""Reason code of a copy under another participant's id, and flag of the one that is kept."""
CONTRADICTS = "copy_contradicts"
"""Flag of a scan that keeps what a copy of it contradicts."""
_PIECE = 2**20
_LABELS = ("label", "diagnosis", "study_group")
"""Labels that a path or a table may give to a file."""
_ROUNDED = 0.01
"""Millimetres that differ by less are the same, rounded."""
_OF_COPIES = ("duplicate_pixels", OF_TWO)
"""Codes of rejects whose pixels show that they are copies of another scan."""


class Filed(Protocol):
    """Voxels as they were filed: an Acquisition of a catalog, a StoreRow of a store."""

    @property
    def uri(self) -> str: ...
    @property
    def participant(self) -> str: ...
    @property
    def laterality(self) -> str | None: ...
    @property
    def participant_labels(self) -> Mapping[str, str]: ...
    @property
    def flags(self) -> tuple[str, ...]: ...
    @property
    def layout(self) -> str: ...


F = TypeVar("F", bound=Filed)


def without_duplicates(
    headers: Sequence[Header], tables: Tables, in_children: Spread, readers: Sequence[Reader] = ()
) -> tuple[list[Header], list[tuple[Header, Reject]]]:
    """Headers to keep, in their order, and the others with their rejects. Only files that share a UID are opened."""

    def listed(header: Header) -> bool:
        row = tables.at_path(header.uri)
        return row is not None and row.sop_instance_uid in ("", header.sop_instance_uid)

    def rank(header: Header) -> tuple[bool | str, ...]:
        # Prefer the copy that states more: one without millimetres would be rejected, and both would be lost. And the
        # file to a link, since the other is to be removed.
        states_less = header.spacing_mm is None, header.laterality is None, DECLARED.isdisjoint(header.flags)
        return not listed(header), *states_less, os.path.islink(header.uri), header.uri  # noqa: PTH114

    kept: dict[str, Header] = {}
    # Files that the manifest lists come first, then those that state more, then the order of paths decides.
    for header in sorted(headers, key=rank):
        kept.setdefault(header.sop_instance_uid, header)
    others = [header for header in headers if kept[header.sop_instance_uid] is not header]
    rejects, reused = [], set()
    pairs = [(header, kept[header.sop_instance_uid]) for header in others]
    same_voxels = in_children(
        functools.partial(_same_voxels, readers=readers),
        pairs,
        lambda pair, lost: False,  # a file that cannot be decoded cannot be shown to be a copy
        deadline=lambda limits, pair: sum(limits.deadline(math.prod(header.shape), header.uri) for header in pair),
    )
    for header, same in zip(others, same_voxels, strict=True):
        original = kept[header.sop_instance_uid].uri
        if same:
            code, sentence = "duplicate_sop_uid", f"a copy of {original}, with the same voxels; remove it"
        else:
            code = "reused_sop_uid"
            sentence = (
                f"the same SOP Instance UID as {original}, but other voxels; export both again with their own UIDs"
            )
            reused.add(header.sop_instance_uid)
        rejects.append((header, Reject(header.uri, code, f"{header.uri}: {sentence}", file_size(header.uri))))
    stay = [header for header in headers if kept[header.sop_instance_uid] is header]
    flagged = [
        replace(header, flags=(*header.flags, "reused_sop_uid")) if header.sop_instance_uid in reused else header
        for header in stay
    ]
    return flagged, rejects


def first_filed(known: dict[str, F], fingerprint: str, now: F) -> F | None:
    """The earlier file of these voxels, in catalog order; if there is none, this one is recorded and None returned."""
    first = known.setdefault(fingerprint, now) if fingerprint else now
    return None if first is now else first


def describe_copy(copy: Filed, first: Filed, differences: Sequence[str]) -> tuple[str, str]:
    """Reason code and sentence for the later of two files with the same voxels; `differences`: what it has instead of
    what is stated of the first."""
    same = f"{copy.uri}: the same voxels as {first.uri}"
    but = f", but with {' and '.join(differences)}" if differences else ""
    if person_key(copy.participant) != person_key(first.participant):
        return (
            OF_TWO,
            f"{same}, which is participant {first.participant}'s and not {copy.participant}'s{but}; two ids of one "
            "person, or a copy filed under another's name: find out whose they are, and remove the other file",
        )
    if differences:
        return "duplicate_pixels", f"{same}{but}; find out which is right, and remove the other file"
    eyes = ""
    if copy.laterality != first.laterality:
        eyes = f", filed as eye {first.laterality or '?'} and as {copy.laterality or '?'}"
    return "duplicate_pixels", f"{same} under another SOP Instance UID{eyes}; remove the copy"


def _same_voxels(pair: tuple[Header, Header], readers: Sequence[Reader]) -> bool:
    one, other = pair
    if one.shape != other.shape:
        return False
    try:
        # The uri of such a volume is that of its first file only.
        whole = "several_files" not in one.flags and "several_files" not in other.flags
        return (whole and _same_bytes(one.uri, other.uri)) or np.array_equal(
            _voxels(one, readers), _voxels(other, readers)
        )
    except (OSError, ReadError):
        return False


def _voxels(header: Header, readers: Sequence[Reader]) -> np.ndarray:
    # Any spacing will do, and any layout: only the voxels are compared.
    spacing_mm = header.spacing_mm or (1.0, 1.0, 1.0)
    return read_volume(
        header.uri, spacing_mm=spacing_mm, raster_only=False, structure_only=False, readers=readers
    ).voxels


def _same_bytes(one: str, other: str) -> bool:
    size = file_size(one)  # 0 of one of several volumes in a file
    if is_folder(one) or is_folder(other) or not size or size != file_size(other):
        return False
    with open_file(one) as first, open_file(other) as second:
        while piece := first.read(_PIECE):
            if piece != second.read(_PIECE):
                return False
    return True


def compare_copies(
    acquisitions: Sequence[Acquisition],
    copies: Sequence[Acquisition],
    headers: Sequence[Header],
    duplicates: Sequence[tuple[Header, Reject]],
) -> tuple[list[Acquisition], list[Reject], dict[str, tuple[str, str]]]:
    """Compare the copies that `without_duplicates` left out with what it kept, once it is known whose they are.

    Copies under another participant's id get a code of their own: somebody must find out which id is right. So must
    they for copies that are filed or described otherwise: an eye or a label that differs counts as unknown, other
    differences are flagged.

    Returns the acquisitions, the rejects, and the two participants of each copy under two ids by its uri.
    """
    filed = {a.sop_instance_uid: a for a in acquisitions}
    kept = {**filed}
    copy_of = {copy.uri: copy for copy in copies}
    header_of = {header.uri: header for header in headers}
    rejects, pairs = [], {}
    for header, reject in duplicates:
        copy, first = copy_of.get(reject.uri), filed.get(header.sop_instance_uid)
        if copy and first and reject.code == "duplicate_sop_uid":
            reverse = {header.superior_first, header_of[first.uri].superior_first} == {True, False}
            also = ["its B-scans in the other order"] if reverse else []
            now = kept[first.sop_instance_uid]
            kept[first.sop_instance_uid], (code, sentence), differ = beside_copy(now, copy, first, also)
            if code == OF_TWO:
                reject = replace(reject, code=code, sentence=sentence, refers_to=first.sop_instance_uid)
                pairs[copy.uri] = (copy.participant, first.participant)
            elif differ:
                reject = replace(reject, sentence=sentence)
        rejects.append(reject)
    return list(kept.values()), rejects, pairs


def beside_copy(
    kept: Acquisition, copy: Acquisition, first: Acquisition, also: Sequence[str] = ()
) -> tuple[Acquisition, tuple[str, str], bool]:
    """`kept`, the row of `first` by now, without what its copy contradicts and with flags for it; `describe_copy` of
    both; and whether they differ. `also`: further differences that were found."""
    filing = filed_otherwise(copy, first)
    described = [*described_otherwise(copy, first, copy.spacing_mm, first.spacing_mm), *also]
    code, sentence = describe_copy(copy, first, [*filing.values(), *described])
    kept = doubted(kept, filing)
    for flag, applies in ((CONTRADICTS, described), (OF_TWO, code == OF_TWO)):
        kept = flagged(kept, flag) if applies else kept
    return kept, (code, sentence), bool(filing or described)


def filed_otherwise(copy: Filed, first: Filed) -> dict[str, str]:
    """Which of `first`'s eye and labels its copy contradicts, and what the copy has instead."""
    found = {}
    for name, flag in {"eye": "laterality_conflict", **dict.fromkeys(_LABELS, "label_conflict")}.items():
        own, other = (a.laterality if name == "eye" else stated(a.participant_labels.get(name)) for a in (first, copy))
        if other is None and flag in copy.flags:  # of two, in tables or among copies of its own
            other = "unclear"
        if own and other and bare(own) != bare(other):
            found[name] = f"{name} {other} instead of {own}"
    return found


def doubted(a: Acquisition, names: Collection[str]) -> Acquisition:
    """`a` without those of its eye and labels that a copy contradicts."""
    if "eye" in names:
        flags = tuple(flag for flag in a.flags if not flag.startswith("laterality_from"))
        a = flagged(replace(a, laterality=None, flags=flags), "laterality_conflict")
    if doubtful := {*names} & {*_LABELS}:
        labels = {name: value for name, value in a.participant_labels.items() if name not in doubtful}
        a = flagged(replace(a, participant_labels=labels), "label_conflict")
    return a


def described_otherwise(copy: Filed, first: Filed, copy_mm: Spacing3, first_mm: Spacing3) -> list[str]:
    """Which millimetres header, sidecar or table state of the copy instead of the kept file's."""
    # Stated of neither file, or only of one.
    if not {*copy.flags, *first.flags}.isdisjoint(("nominal_spacing", FLAG)):
        return []
    found = []
    places = ("between B-scans", "per row", "per column")
    for place, other, own in zip(places, copy_mm, first_mm, strict=True):
        meaningless = place == "between B-scans" and first.layout != "raster"
        if abs(other / own - 1) > _ROUNDED and not meaningless:
            found.append(f"{other:.4g} mm {place} instead of {own:.4g}")
    return found


def flagged(a: Acquisition, flag: str) -> Acquisition:
    """`a` with this key of FLAGS, once."""
    return a if flag in a.flags else replace(a, flags=(*a.flags, flag))


def without_lost_originals(
    rejects: Sequence[Reject],
    pair_of: Mapping[str, tuple[str, str]],
    headers: Sequence[Header],
    duplicates: Sequence[tuple[Header, Reject]],
    pixel_rejects: Sequence[Reject],
) -> tuple[list[Reject], list[tuple[str, str]]]:
    """The rejects of copies, and the pairs of participants whose images are the same.

    A copy of an image that pixels show to be no scan gets the code of its original and is no evidence that two ids are
    one person: empty masks of two people are the same file.
    """
    by_uri = {reject.uri: reject for reject in pixel_rejects if reject.code not in _OF_COPIES}
    lost = {header.sop_instance_uid: by_uri[header.uri] for header in headers if header.uri in by_uri}
    original = {copy.uri: lost[copy.sop_instance_uid] for copy, _ in duplicates if copy.sop_instance_uid in lost}
    kept = [
        replace(
            reject,
            code=original[reject.uri].code,
            sentence=f"{reject.uri}: a copy of {original[reject.uri].sentence}",
            refers_to="",
        )
        if reject.uri in original
        else reject
        for reject in rejects
    ]
    return kept, [pair for uri, pair in pair_of.items() if uri not in original]
