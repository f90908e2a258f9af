"""Detect the same voxels under two identities, by a fingerprint of the decoded voxels.

Such a pair is a copy under a new UID, or one person's scan filed under another id, which leaks between splits.
Different headers and different lossless compressions do not hide it.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

OF_TWO = "pixels_of_two_participants"
"""Reason code of a copy under another participant's id, and flag of the one that is kept."""


@dataclass(frozen=True)
class Owner:
    """The file and participant under which voxels were found."""

    uri: str
    participant: str
    laterality: str | None


def first_owner(owners: dict[str, Owner], fingerprint: str, owner: Owner) -> Owner | None:
    """The earlier owner of these voxels, in catalog order; if there is none, this one is recorded and None returned."""
    first = owners.setdefault(fingerprint, owner) if fingerprint else owner
    return None if first is owner else first


def fingerprint(voxels: np.ndarray) -> str:
    """128 bits of SHA-256 over shape, type and voxels; CPUs have instructions for SHA-256."""
    digest = hashlib.sha256(f"{voxels.shape} {voxels.dtype.str}".encode())
    digest.update(np.ascontiguousarray(voxels).data)
    return digest.hexdigest()[:32]


def describe_copy(owner: Owner, first: Owner) -> tuple[str, str]:
    """Reason code and sentence for the later of two files with the same voxels."""
    if owner.participant != first.participant:
        return (
            OF_TWO,
            f"{owner.uri}: the same voxels as {first.uri}, which is participant {first.participant}'s and not "
            f"{owner.participant}'s; two ids of one person, or a copy filed under another's name: "
            "find out whose they are, and remove the other file",
        )
    filed = f", filed as eye {first.laterality or '?'} and as {owner.laterality or '?'}"
    eyes = "" if owner.laterality == first.laterality else filed
    sentence = f"{owner.uri}: the same voxels as {first.uri} under another SOP Instance UID{eyes}; remove the copy"
    return "duplicate_pixels", sentence
