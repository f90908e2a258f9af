"""One file per SOP Instance UID: which one is kept, and what the others are.

The file that the manifest lists under this UID at its very path is kept, else the first by path: the same one on every machine. Another
file with the same voxels is a copy (duplicate_sop_uid), even if it is compressed differently. One with other voxels is a second
acquisition that was given the same UID (reused_sop_uid): it is rejected, and the kept one is flagged, because tables that refer to
the UID may mean either.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from octfm.catalog.acquisition import Reject
from octfm.catalog.aireadi import Tables
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.reasons import Header
from octfm.io.archive import file_size, is_folder, open_file
from octfm.io.isolation import Limits, Lost
from octfm.io.spread import spread

_PIECE = 2**20


def without_duplicates(
    headers: Sequence[Header],
    tables: Tables,
    workers: int | None = None,
    limits: Limits | None = None,
    readers: Sequence[Reader] = (),
) -> tuple[list[Header], list[tuple[Header, Reject]]]:
    """The headers that are kept, in their order, and each other one with its reject. Only files that share a UID are opened."""

    def listed(header: Header) -> bool:
        row = tables.at_path(header.uri)
        return row is not None and row.sop_instance_uid in ("", header.sop_instance_uid)

    kept: dict[str, Header] = {}
    for header in sorted(headers, key=lambda header: (not listed(header), header.uri)):
        kept.setdefault(header.sop_instance_uid, header)
    others = [header for header in headers if kept[header.sop_instance_uid] is not header]
    rejects, reused = [], set()
    limits = limits or Limits()
    pairs = [(header, kept[header.sop_instance_uid]) for header in others]
    deadline = functools.partial(_deadline, limits)
    same_voxels = spread(
        functools.partial(_same_voxels, readers=readers),
        pairs,
        _lost,
        workers=workers,
        limits=limits,
        deadline=deadline,
    )
    for header, same in zip(others, same_voxels, strict=True):
        original = kept[header.sop_instance_uid].uri
        if same:
            code, sentence = "duplicate_sop_uid", f"the same SOP Instance UID and voxels as {original}; remove the copy"
        else:
            code = "reused_sop_uid"
            sentence = f"the same SOP Instance UID as {original}, and other voxels; export both again, each needs a UID of its own"
            reused.add(header.sop_instance_uid)
        rejects.append((header, Reject(header.uri, code, f"{header.uri}: {sentence}", file_size(header.uri))))
    stay = [header for header in headers if kept[header.sop_instance_uid] is header]
    return [_flagged(header) if header.sop_instance_uid in reused else header for header in stay], rejects


def _flagged(header: Header) -> Header:
    return replace(header, flags=(*header.flags, "reused_sop_uid"))


def _lost(pair: tuple[Header, Header], lost: Lost) -> bool:
    return False  # what cannot be decoded is not known to be a copy


def _deadline(limits: Limits, pair: tuple[Header, Header]) -> float:
    return sum(limits.deadline(math.prod(header.shape), header.uri) for header in pair)


def _same_voxels(pair: tuple[Header, Header], readers: Sequence[Reader]) -> bool:
    one, other = pair
    if one.shape != other.shape:
        return False
    try:
        whole = "several_files" not in one.flags and "several_files" not in other.flags
        return (whole and _same_bytes(one.uri, other.uri)) or np.array_equal(
            _voxels(one, readers), _voxels(other, readers)
        )
    except (OSError, ReadError):
        return False


def _voxels(header: Header, readers: Sequence[Reader]) -> np.ndarray:
    # Neither millimetres nor the layout matter here.
    spacing_mm = header.spacing_mm or (1.0, 1.0, 1.0)
    return read_volume(header.uri, spacing_mm=spacing_mm, raster_only=False, readers=readers).voxels


def _same_bytes(one: str, other: str) -> bool:
    if is_folder(one) or is_folder(other):
        return False
    if file_size(one) != file_size(other):
        return False
    with open_file(one) as first, open_file(other) as second:
        while piece := first.read(_PIECE):
            if piece != second.read(_PIECE):
                return False
    return True
