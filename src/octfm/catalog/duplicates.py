"""Keep one file per SOP Instance UID, and reject the others as copies or as reused UIDs.

The file that the manifest lists under this UID at its own path is kept, else the first by path that is no symbolic
link, which is the same on every machine. Another file with the same voxels is a copy (duplicate_sop_uid), even if it is
compressed differently. One with other voxels is a second acquisition with the same UID (reused_sop_uid): it is
rejected, and the kept one is flagged, because tables that refer to the UID may mean either.
"""

import functools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from octfm.catalog.acquisition import Acquisition, Owner, Reject
from octfm.catalog.participants.ids import person_key
from octfm.catalog.tables import Tables
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.declared import DECLARED
from octfm.formats.reasons import Header
from octfm.io.archive import file_size, is_folder, open_file
from octfm.io.spread import Spread

OF_TWO = "pixels_of_two_participants"
"""Reason code of a copy under another participant's id, and flag of the one that is kept."""
_PIECE = 2**20
_OF_COPIES = ("duplicate_pixels", OF_TWO)
"""Codes of rejects whose pixels show that they are copies of another scan."""


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


def first_owner(owners: dict[str, Owner], fingerprint: str, owner: Owner) -> Owner | None:
    """The earlier owner of these voxels, in catalog order; if there is none, this one is recorded and None returned."""
    first = owners.setdefault(fingerprint, owner) if fingerprint else owner
    return None if first is owner else first


def describe_copy(owner: Owner, first: Owner) -> tuple[str, str]:
    """Reason code and sentence for the later of two files with the same voxels."""
    if person_key(owner.participant) != person_key(first.participant):
        return (
            OF_TWO,
            f"{owner.uri}: the same voxels as {first.uri}, which is participant {first.participant}'s and not "
            f"{owner.participant}'s; two ids of one person, or a copy filed under another's name: "
            "find out whose they are, and remove the other file",
        )
    eyes, advice = "", "remove the copy"
    if owner.laterality != first.laterality:
        eyes = f", filed as eye {first.laterality or '?'} and as {owner.laterality or '?'}"
    if filed_as_two_eyes(owner, first):
        advice = "find out which eye it is, and remove the other file"
    sentence = f"{owner.uri}: the same voxels as {first.uri} under another SOP Instance UID{eyes}; {advice}"
    return "duplicate_pixels", sentence


def filed_as_two_eyes(owner: Owner, first: Owner) -> bool:
    """Whether one is a right and the other a left eye; which of two copies is right, nothing tells."""
    return {owner.laterality, first.laterality} == {"R", "L"}


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


def under_two_ids(
    acquisitions: Sequence[Acquisition], copies: Sequence[Acquisition], rejects: Sequence[Reject]
) -> tuple[list[Acquisition], list[Reject], dict[str, tuple[str, str]]]:
    """Give copies under another participant's id a code of their own: somebody must find out which id is right. So must
    they for copies filed as the other eye: which of the two is kept is a matter of names, so its eye counts as unknown.

    Returns the acquisitions with flags, the rejects, and the two participants of each copy under two ids by its uri.
    """
    kept = {a.sop_instance_uid: a for a in acquisitions}
    copy_of = {copy.uri: copy for copy in copies}
    out, shared, pairs, of_two_eyes = [], set(), {}, set()
    for reject in rejects:
        copy = copy_of.get(reject.uri)
        first = kept.get(copy.sop_instance_uid) if copy else None
        if copy and first and reject.code == "duplicate_sop_uid":
            code, sentence = describe_copy(copy.owner, first.owner)
            if of_other_eye := filed_as_two_eyes(copy.owner, first.owner):
                of_two_eyes.add(first.uri)
            if code == OF_TWO:
                reject = replace(reject, code=code, sentence=sentence, refers_to=first.sop_instance_uid)
                shared.add(first.uri)
                pairs[copy.uri] = (copy.participant, first.participant)
            elif of_other_eye:
                sentence = (
                    f"{copy.uri}: the same voxels as {first.uri}, filed as eye {first.laterality} and as "
                    f"{copy.laterality}; find out which eye it is, and remove the other file"
                )
                reject = replace(reject, sentence=sentence)
        out.append(reject)
    marked = [replace(a, flags=(*a.flags, OF_TWO)) if a.uri in shared else a for a in acquisitions]
    marked = [of_unknown_eye(a) if a.uri in of_two_eyes else a for a in marked]
    return marked, out, pairs


def of_unknown_eye(a: Acquisition) -> Acquisition:
    """The acquisition after a copy of it turned out to be filed as the other eye."""
    kept = [flag for flag in a.flags if not flag.startswith("laterality_from")]
    return replace(a, laterality=None, flags=(*kept, "laterality_conflict"))


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
