"""A table of many scans: one row per eye scan with ETDRS zones, fluid and verdict; the same call resumes."""

import csv
import io
from collections.abc import Callable, Iterable
from pathlib import Path

from octfm.errors import EvaluationError, ReadError
from octfm.formats import read_volume
from octfm.io.isolation import Limits
from octfm.io.location import write_whole
from octfm.layers.finder import LayerFinder
from octfm.layers.packaged import NOTE, load_finder
from octfm.layers.segment import ScanSegmentation, segment
from octfm.models.layer_net import MASKS
from octfm.volume.etdrs import LEAST_COVERED, ZONES
from octfm.volume.volume import Volume

SIDES = ("inner left", "inner right", "outer left", "outer right")
"""Zones of an eye whose laterality is unknown."""
UNIT = {name: f"{name.replace(' ', '_')}_um" for name in (*ZONES, *SIDES)}
COLUMNS = (
    *("source", "laterality", "scanner", "bscans", "grid_centre", *UNIT.values(), "volume_mm3", "withheld"),
    *(f"{name}_nl" for name in MASKS),
    *("verdict", "doubt", "doubtful_ascans", "model", "note", "problem"),
)


def row_of(found: ScanSegmentation) -> dict[str, str]:
    """One row of the table; what the scan does not allow stays empty."""
    volume = found.volume
    row = dict.fromkeys(COLUMNS, "") | {
        "source": volume.source,
        "laterality": volume.laterality or "",
        "scanner": volume.scanner,
        "bscans": str(volume.shape[0]),
        "verdict": "; ".join(found.verdict.reasons) or "nothing speaks against it",
        "doubt": f"{found.verdict.doubt:.3f}",
        "doubtful_ascans": f"{found.doubtful.mean():.3f}",
        "model": found.model,
        "note": NOTE,
    }
    for name in MASKS:
        amount = found.volume_nl(name)
        row[f"{name}_nl"] = "" if amount is None else f"{amount:.1f}"
    if volume.layout == "raster" and volume.shape[0] > 1 and found.verdict.accepted:
        grid = found.etdrs()
        row["grid_centre"] = grid.centre
        row["volume_mm3"] = "" if grid.volume_mm3 is None else f"{grid.volume_mm3:.3f}"
        unsure = [name for name, mean in grid.mean_um.items() if mean is None and grid.coverage[name] >= LEAST_COVERED]
        row["withheld"] = "; ".join(unsure)
        row |= {UNIT[name]: f"{mean:.1f}" for name, mean in grid.mean_um.items() if mean is not None}
    return row


def write_table(
    sources: Iterable[str | Volume],
    out: Path,
    *,
    limits: Limits | None = None,
    finder: LayerFinder | None = None,
    also: Callable[[str, ScanSegmentation], None] | None = None,
    echo=print,
) -> int:
    """Segment each source that `out` does not hold yet, and add its row, the file replaced whole after every scan.

    A file that cannot be read gets a row with its problem. `also` is called with each source and what was found in it,
    before its row is written. Returns the number of new rows. Raises EvaluationError if
    `out` is something else than such a table.
    """
    finder = finder or load_finder()
    rows = read_table(out) if out.exists() else []
    known, added = {row["source"] for row in rows}, 0
    for given in sources:
        source = given.source if isinstance(given, Volume) else given
        if source in known:
            continue
        try:
            volume = given if isinstance(given, Volume) else read_volume(given, raster_only=False, limits=limits)
            found = segment(volume, finder=finder)
            row = row_of(found) | {"source": source}
            if also:
                also(source, found)
        except ReadError as error:
            row = dict.fromkeys(COLUMNS, "") | {"source": source, "problem": f"{error.code}: {error}"}
        rows.append(row)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(out, text.getvalue().encode())
        added += 1
        echo(f"{source}: {row['problem'] or row['verdict']}")
    return added


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a table. Raises EvaluationError if it has other columns."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise EvaluationError(f"{path}: not a table of octfm segment of this version; choose another --out")
        return list(reader)


def describe(found: ScanSegmentation) -> str:
    """A few lines for a terminal."""
    row, volume = row_of(found), found.volume
    lines = [f"{volume.source}: {volume.shape[0]} B-scans, {volume.scanner}, eye {volume.laterality or 'unknown'}"]
    zones = [f"  {name:16} {float(row[UNIT[name]]):6.1f} µm" for name in UNIT if row[UNIT[name]]]
    if zones:
        lines += [f"  retina (ILM to BM) in ETDRS zones around the {row['grid_centre']}", *zones]
    if row["volume_mm3"]:
        lines.append(f"  volume within 3 mm {row['volume_mm3']} mm³")
    if row["withheld"]:
        lines.append(f"  withheld, because the network is unsure there: {row['withheld']}")
    amounts = [f"{name.replace('_', ' ')} {row[f'{name}_nl']} nl" for name in MASKS if row[f"{name}_nl"]]
    if amounts:
        lines.append("  " + ", ".join(amounts))
    share = f"{found.doubtful.mean():.0%} of A-scans are doubtful"
    return "\n".join([*lines, f"  verdict: {row['verdict']}; {share}", f"  {found.model}; {NOTE}"])
