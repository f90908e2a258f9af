"""Checks of a catalog that need pixels, before splits are drawn: copies under other ids, and eyes on the wrong side.

Every accepted volume is decoded once, which takes many times as long as the rest of a scan: `octfm scan` does it on
request only. `prepare` reads the pixels anyway and makes the same checks, except that a row which is kept stays as the
catalog has it, with a flag if its copy contradicts it.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.duplicates import OF_TWO, beside_copy, first_filed
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.declared import doubtful_way_up
from octfm.io.archive import file_size
from octfm.io.spread import Spread
from octfm.volume.laterality import CANNOT_TELL, DiscSide, Verdict, disc_side
from octfm.volume.margins import searchable
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.radial import to_raster
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Laterality, eight_bit


def inspect_pixels(
    acquisitions: Sequence[Acquisition], in_children: Spread, keep_upside_down: bool, readers: Sequence[Reader]
) -> tuple[list[Acquisition], list[Reject], list[tuple[str, str]]]:
    """Acquisitions to keep, rejects, and pairs of participants with voxels in common.

    Kept acquisitions get flags if their anatomy contradicts their laterality or does not show it, and lose the eye and
    the labels that a copy contradicts. Rejects are copies, and files that cannot be decoded.
    """
    outcomes = in_children(
        functools.partial(_inspect, keep_upside_down=keep_upside_down, readers=readers),
        acquisitions,
        lambda acquisition, lost: Reject.lost(acquisition.uri, lost, "read its pixels"),
        deadline=lambda limits, acquisition: limits.deadline(math.prod(acquisition.shape), acquisition.uri),
        chunk=1,
    )
    known: dict[str, Acquisition] = {}
    seen: dict[str, _Seen] = {}
    kept: dict[str, Acquisition] = {}
    rejects, pairs = [], []
    for acquisition, outcome in zip(acquisitions, outcomes, strict=True):
        if isinstance(outcome, Reject):
            rejects.append(outcome)
            continue
        first = first_filed(known, outcome.pixels, acquisition)
        if first is None:
            kept[acquisition.uri], seen[acquisition.uri] = acquisition, outcome
            continue
        kept[first.uri], (code, sentence), _ = beside_copy(kept[first.uri], acquisition, first)
        original = ""
        if code == OF_TWO:
            original = first.sop_instance_uid
            pairs.append((acquisition.participant, first.participant))
        rejects.append(Reject(acquisition.uri, code, sentence, file_size(acquisition.uri), original))
    found = [replace(a, flags=(*a.flags, *seen[a.uri].flags(a.laterality))) for a in kept.values()]
    return found, rejects, pairs


@dataclass(frozen=True)
class _Seen:
    """What the pixels of one volume show."""

    pixels: str
    """Their fingerprint."""
    way_up: tuple[str, ...] = ()
    """Flags of a doubtful way up."""
    disc: DiscSide | None = None
    """None where no disc is looked for."""

    def flags(self, laterality: Laterality | None) -> tuple[str, ...]:
        return (*self.way_up, *(self.disc.flags(laterality) if self.disc else ()))


def _inspect(acquisition: Acquisition, keep_upside_down: bool, readers: Sequence[Reader]) -> _Seen | Reject:
    try:
        volume = read_volume(
            acquisition.uri,
            spacing_mm=acquisition.spacing_mm,
            raster_only=acquisition.layout == "raster",
            structure_only=acquisition.modality == "structure",
            readers=readers,
        )
        native = fingerprint(volume.voxels)  # before resampling or flipping, as `prepare` does
        if volume.modality != "structure":
            return _Seen(native)  # flow shows neither nerve fibres nor thickness
        volume = replace(volume, spacing_mm=acquisition.spacing_mm)
        volume = to_raster(volume) if volume.layout == "radial" else volume
        # Not mirrored, unlike in preprocessing: the disc is looked for where it lies in the file.
        voxels = eight_bit(searchable(volume.superior_to_inferior()))
        tissue = find_tissue(voxels, volume.spacing_mm)
        way_up = doubtful_way_up(volume, tissue.confidence["ilm_support"], keep_upside_down, acquisition.flags)
    except ReadError as error:
        return Reject.of(acquisition.uri, error)
    if volume.layout != "raster":
        return _Seen(native, way_up)
    return _Seen(native, way_up, disc_side(voxels, volume.spacing_mm, tissue, volume.left_to_right))


def verdict(acquisition: Acquisition) -> Verdict:
    """The verdict on the laterality of a row whose optic disc `octfm scan --pixels` has checked."""
    for flag in acquisition.flags:
        if flag in CANNOT_TELL:
            return CANNOT_TELL[flag]
    if acquisition.laterality is None:
        return "only anatomy tells"
    return "contradicts" if "laterality_contradicts_anatomy" in acquisition.flags else "agrees"


def verdicts(acquisitions: Iterable[Acquisition]) -> dict[str, dict[str, int]]:
    """Scanner -> number of volumes per verdict.

    Volumes without a verdict are counted as well: a check that shows nothing must not look passed.
    """
    found = Counter((a.scanner, verdict(a)) for a in acquisitions if a.modality == "structure" and a.layout != "line")
    table = {}
    for scanner in sorted({scanner for scanner, _ in found}):
        own = {name: found[scanner, name] for name in get_args(Verdict)}
        unclear = {name: own.pop(name) for name in CANNOT_TELL.values()}
        total = sum(unclear.values())
        table[scanner] = {"checked": sum(own.values()) + total, **own, "cannot tell": total, **unclear}
    return table
