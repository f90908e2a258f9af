"""What only pixels tell about a catalog, before splits are drawn: copies under other identities, and eyes on the wrong side.

Every accepted volume is decoded once, as long as the rest of a scan takes many times over; so a scan does it when asked. `prepare` reads
the pixels anyway and looks for the same things.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from octfm.catalog.acquisition import FLAGS, Acquisition, Reject
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.declared import doubtful_way_up
from octfm.formats.reasons import REASONS
from octfm.io.archive import file_size
from octfm.io.isolation import Limits, Lost
from octfm.io.spread import spread
from octfm.volume.laterality import CANNOT_TELL, DiscSide, Verdict, disc_side
from octfm.volume.pixel_copies import Owner, PixelCopies, describe_copy, fingerprint
from octfm.volume.planes import eight_bit
from octfm.volume.radial import to_raster
from octfm.volume.tissue import find_tissue


@dataclass(frozen=True)
class Seen:
    fingerprint: str
    disc: DiscSide
    way_up: tuple[str, ...]
    """Flags."""


def inspect_pixels(
    acquisitions: Sequence[Acquisition],
    workers: int | None = None,
    limits: Limits | None = None,
    keep_upside_down: bool = False,
    readers: Sequence[Reader] = (),
) -> tuple[list[Acquisition], list[Reject], list[tuple[str, str]]]:
    """The acquisitions that stay, flagged where their anatomy contradicts their laterality or cannot tell, a reject for each copy and
    each file that cannot be decoded, and pairs of participants that have voxels in common. Nothing else about an acquisition is changed."""
    limits = limits or Limits()
    deadline = functools.partial(_deadline, limits)
    look = functools.partial(_look, keep_upside_down=keep_upside_down, readers=readers)
    looked = spread(look, acquisitions, _lost, workers=workers, limits=limits, deadline=deadline, chunk=1)
    copies, kept, rejects, pairs = PixelCopies(), [], [], []
    uid_of = {acquisition.uri: acquisition.sop_instance_uid for acquisition in acquisitions}
    for acquisition, outcome in zip(acquisitions, looked, strict=True):
        if isinstance(outcome, Reject):
            rejects.append(outcome)
            continue
        owner = Owner(acquisition.uri, acquisition.participant, acquisition.laterality)
        if (first := copies.first_owner(outcome.fingerprint, owner)) is not None:
            code, sentence = describe_copy(owner, first)
            of_two = code in FLAGS
            original = uid_of[first.uri] if of_two else ""
            rejects.append(Reject(acquisition.uri, code, sentence, file_size(acquisition.uri), original))
            pairs += [(owner, first)] if of_two else []
            continue
        kept.append(
            replace(
                acquisition,
                flags=(*acquisition.flags, *outcome.way_up, *outcome.disc.flags(acquisition.laterality)),
            )
        )
    shared = {first.uri for _, first in pairs}
    kept = [replace(a, flags=(*a.flags, "pixels_of_two_participants")) if a.uri in shared else a for a in kept]
    return kept, rejects, [(owner.participant, first.participant) for owner, first in pairs]


def _look(acquisition: Acquisition, keep_upside_down: bool, readers: Sequence[Reader]) -> Seen | Reject:
    try:
        volume = read_volume(
            acquisition.uri,
            spacing_mm=acquisition.spacing_mm,
            raster_only=acquisition.layout == "raster",
            readers=readers,
        )
        native = fingerprint(volume.voxels)
        volume = replace(volume, spacing_mm=acquisition.spacing_mm)
        volume = to_raster(volume) if volume.layout == "radial" else volume
        voxels = eight_bit(volume.superior_to_inferior())
        tissue = find_tissue(voxels, volume.spacing_mm)
        way_up = doubtful_way_up(volume, tissue.confidence["ilm_support"], keep_upside_down, acquisition.flags)
    except ReadError as error:
        return Reject(acquisition.uri, error.code, str(error), file_size(acquisition.uri))
    return Seen(native, disc_side(voxels, volume.spacing_mm, tissue), way_up)


def _lost(acquisition: Acquisition, lost: Lost) -> Reject:
    uri = acquisition.uri
    return Reject(
        uri, lost.code, f"{uri}: the process that read its pixels {lost.what}; {REASONS[lost.code].fix}", file_size(uri)
    )


def _deadline(limits: Limits, acquisition: Acquisition) -> float:
    return limits.deadline(math.prod(acquisition.shape), acquisition.uri)


def verdict(acquisition: Acquisition) -> Verdict:
    """Of a row whose pixels `octfm scan --pixels` has looked at."""
    for flag in acquisition.flags:
        if flag in CANNOT_TELL:
            return CANNOT_TELL[flag]
    if acquisition.laterality is None:
        return "only anatomy tells"
    return "contradicts" if "laterality_contradicts_anatomy" in acquisition.flags else "agrees"


def verdicts(acquisitions: Iterable[Acquisition]) -> dict[str, dict[str, int]]:
    """Scanner -> volumes of each verdict, of all and of those that cannot tell: a check that sees nothing must not look passed."""
    found = Counter((a.scanner, verdict(a)) for a in acquisitions)
    table = {}
    for scanner in sorted({scanner for scanner, _ in found}):
        own = {name: found[scanner, name] for name in get_args(Verdict)}
        unclear = {name: own.pop(name) for name in CANNOT_TELL.values()}
        total = sum(unclear.values())
        table[scanner] = {"checked": sum(own.values()) + total, **own, "cannot tell": total, **unclear}
    return table
