"""The volumes below a folder, of any layout, whoever's they are: segmentation needs neither participants nor splits."""

import functools
from collections.abc import Collection
from pathlib import Path

from octfm.catalog.acquisition import Reject
from octfm.catalog.duplicates import without_duplicates
from octfm.catalog.examination import examine_files, join_parts, wanted
from octfm.catalog.tables import Tables
from octfm.catalog.walk import walk
from octfm.io.bucket import Account
from octfm.io.isolation import Limits
from octfm.io.spread import spread
from octfm.volume.volume import LAYOUTS, Layout


def volumes_below(
    folder: Path,
    limits: Limits | None = None,
    workers: int | None = None,
    layouts: Collection[Layout] = LAYOUTS,
) -> tuple[list[str], list[Reject]]:
    """Find the volumes below a folder; returns their uris and the files that are left out.

    With `layouts` of ("line",) every image is a B-scan of its own.

    Left out are images of other kinds, copies, and files that cannot be opened. A file that should hold a volume but
    cannot be read is among the volumes, so that its reader states the reason. `workers`: as for octfm.scan.
    """
    found = walk(folder, folders_are_volumes="raster" in layouts)
    in_children = functools.partial(spread, workers=workers, limits=limits)
    outcomes, _ = join_parts(examine_files(found.files, in_children, Account(), layouts), in_children, layouts)
    of_layouts, rejects = wanted(outcomes, layouts)
    headers, copies = without_duplicates(of_layouts, Tables(), in_children)
    uris, left_out = [header.uri for header in headers], [*found.refused]
    for reject in rejects:
        # A star of too few lines has no header, but can be read as a radial scan.
        star = reject.code == "not_raster" and "radial" in layouts
        if star or not (reject.expected or reject.code == "not_a_bscan"):
            uris.append(reject.uri)
        else:
            left_out.append(reject)
    return sorted(uris), [*left_out, *(reject for _, reject in copies)]
