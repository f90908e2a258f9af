"""The same voxels under two identities: a copy that was given a new UID, or one person's scan filed under another's name, which leaks
between splits. Told by a fingerprint of the decoded voxels, so other headers and other lossless compressions do not hide it."""

import hashlib
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Owner:
    """Under whose name voxels were first seen."""

    uri: str
    participant: str
    laterality: str | None


class PixelCopies:
    """Who had which voxels first, in the order of the catalog: the same files are kept whatever the number of workers."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    def first_owner(self, fingerprint: str, owner: Owner) -> Owner | None:
        """None for voxels not seen before, which are `owner`'s from now on."""
        first = self._owners.setdefault(fingerprint, owner) if fingerprint else owner
        return None if first is owner else first


def fingerprint(voxels: np.ndarray) -> str:
    """128 bits of SHA-256, which processors have instructions for, over shape, type and voxels."""
    digest = hashlib.sha256(f"{voxels.shape} {voxels.dtype.str}".encode())
    digest.update(np.ascontiguousarray(voxels).data)
    return digest.hexdigest()[:32]


def describe_copy(owner: Owner, first: Owner) -> tuple[str, str]:
    """Reason code and sentence for the later one of two."""
    if owner.participant != first.participant:
        code = "pixels_of_two_participants"
        what = (
            f"the same voxels as {first.uri}, which is participant {first.participant}'s and not {owner.participant}'s"
        )
        return (
            code,
            f"{owner.uri}: {what}; two ids of one person, or a copy filed under another's name: "
            "find out whose they are, and remove the other file",
        )
    eyes = (
        ""
        if owner.laterality == first.laterality
        else f", filed as eye {first.laterality or '?'} and as {owner.laterality or '?'}"
    )
    return (
        "duplicate_pixels",
        f"{owner.uri}: the same voxels as {first.uri} under another SOP Instance UID{eyes}; remove the copy",
    )
