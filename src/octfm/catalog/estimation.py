"""Estimate axial millimetres of single B-scans from their retinas, where no file, sidecar or table states them."""

import functools
import math
from collections import defaultdict
from collections.abc import Sequence

from octfm.catalog.acquisition import Reject
from octfm.catalog.tables import Tables
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.bscans import Reader
from octfm.formats.reasons import Header
from octfm.io.spread import Spread
from octfm.volume.estimated import axial_mm, retina_rows
from octfm.volume.volume import eight_bit

SAMPLE = 48
"""B-scans of a size that are searched; the standard error of their median thickness is then 2 % or less."""


def axial_mm_by_height(
    headers: Sequence[Header], tables: Tables, in_children: Spread, readers: Sequence[Reader]
) -> tuple[dict[int, float], dict[str, Reject]]:
    """Rows of an image → axial millimetres, for the sizes of single B-scans that state none; and uri → the reject of a
    B-scan that was tried and cannot be decoded, which would otherwise count as without millimetres.

    One estimate for all B-scans of as many rows, which mostly come from one instrument: estimated one by one, a swollen
    retina would be scaled to the thickness of a healthy one. Sizes without a retina that is found are left out.
    """
    unknown: dict[int, list[Header]] = defaultdict(list)
    for header in headers:
        row = tables.find(header.uri, header.sop_instance_uid)
        if header.layout == "line" and header.spacing_mm is None and (row is None or row.spacing_mm is None):
            unknown[header.shape[1]].append(header)
    # By content, not by path: a class or a patient fills a run of paths.
    searched = [sorted(unknown[height], key=lambda header: header.sop_instance_uid) for height in sorted(unknown)]
    rows: dict[int, list[float]] = defaultdict(list)
    undecoded: dict[str, Reject] = {}

    def search(chosen: Sequence[Header]) -> None:
        found = in_children(
            functools.partial(_rows_of, readers=readers),
            chosen,
            lambda header, lost: None,
            deadline=lambda limits, header: limits.deadline(10 * math.prod(header.shape), header.uri),
        )
        for header, own in zip(chosen, found, strict=True):
            if isinstance(own, Reject):
                undecoded[header.uri] = own
            elif own is not None:
                rows[header.shape[1]].append(own)

    search([header for own in searched for header in own[:SAMPLE]])
    # Where some cannot be decoded and none shows a retina, all are rejected: each for its own reason.
    doubtful = [own for own in searched if own[0].shape[1] not in rows and any(h.uri in undecoded for h in own)]
    search([header for own in doubtful for header in own[SAMPLE:]])
    return {height: axial_mm(several) for height, several in rows.items()}, undecoded


def _rows_of(header: Header, readers: Sequence[Reader]) -> float | Reject | None:
    try:
        # Any millimetres will do: `retina_rows` tries its own.
        volume = read_volume(header.uri, spacing_mm=(1.0, 1.0, 1.0), raster_only=False, readers=readers)
    except ReadError as error:
        return Reject.of(header.uri, error)
    return retina_rows(eight_bit(volume))
