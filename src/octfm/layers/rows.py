"""Rows of a table of `octfm segment`: one per eye scan, with ETDRS zones, fluid and verdict."""

import csv
import io
from collections.abc import Iterable, Mapping

from octfm.display import csv_cell, from_csv_cell, number
from octfm.errors import EvaluationError, one_line
from octfm.formats.heyex_xml import DeviceGrid
from octfm.io.location import Location, write_whole
from octfm.layers.segment import ScanSegmentation
from octfm.layers.zones import (
    DEVICE_COLUMNS,
    RANGE_COLUMNS,
    ZONE_COLUMNS,
    device_cells,
    grid_of,
    range_cells,
    zone_cells,
    zone_lines,
)
from octfm.models.layer_net import MASKS
from octfm.version import __version__
from octfm.volume.volume import Volume
from octfm.weights.packaged import NOTE

ACCEPTED = "nothing speaks against it"
"""The verdict on a scan without a reason to doubt it."""
COLUMNS = (
    *("source", "participant", "acquisition", "laterality", "scanner", "bscans", *ZONE_COLUMNS),
    *(f"{name}_nl" for name in MASKS),
    *("verdict", "doubt", "doubtful_ascans", "model", "note", "problem"),
    *("corrected_bscans", "checked_bscans", "corrected_participant"),
    *RANGE_COLUMNS,
    *DEVICE_COLUMNS,
    *("retina_rows", *(f"{name}_pixels" for name in MASKS)),
    *("axial_length_mm", "octfm", "file_state"),
)
"""`participant` is that of a catalog, else empty; `axial_length_mm` is empty where lateral millimetres are nominal;
`octfm` is the version that wrote the row."""
_ADDED = ("participant",)
"""Columns that tables of earlier versions lack; the cells of their rows are then empty."""
_OF_AN_ACQUISITION = ("acquisition", "scanner", "bscans")
"""Columns by which a scan is recognised when its file was moved."""


def row_of(found: ScanSegmentation, device: DeviceGrid | str | None = None) -> dict[str, str]:
    """One row of the table; cells that the scan does not allow stay empty. `device`: see `device_grid_of`."""
    volume = found.volume
    row = (
        blank_row(volume.source)
        | facts_of(volume, "")
        | {
            "verdict": "; ".join(found.verdict.reasons) or ACCEPTED,
            "doubt": f"{found.verdict.doubt:.3f}",
            "doubtful_ascans": f"{found.doubtful.mean():.3f}",
            "model": found.model,
            "note": NOTE,
            "axial_length_mm": cell_of(found.axial_length_mm),
        }
    )
    if found.corrections is not None:
        row["corrected_bscans"] = str(len(found.corrections.touched))
        # Zones count as checked where somebody has checked the B-scan, or corrected one of their two lines.
        row["checked_bscans"] = str(found.corrections.trusted("ilm", "bm").sum())
        row["corrected_participant"] = found.corrections.participant
    for name in MASKS:
        # Whatever makes zones doubtful, above all wrong millimetres, makes volumes wrong as well.
        amount = found.volume_nl(name) if found.verdict.accepted else None
        row[f"{name}_nl"] = "" if amount is None else f"{amount:.1f}"
    if found.why_no_um:
        row["retina_rows"] = "" if found.retina_rows is None else f"{found.retina_rows:.1f}"
        # As with volumes, nothing is given if the verdict refuses the scan or a part of it was not seen.
        if found.verdict.accepted and not found.verdict.parts:
            row |= {f"{name}_pixels": str(mask.sum()) for name, mask in found.masks.items()}
    grid = grid_of(found)
    return row | zone_cells(found, grid) | range_cells(found, grid) | device_cells(device, found, grid)


def cell_of(axial_length_mm: float | None) -> str:
    """The cell `axial_length_mm`; empty where millimetres are nominal."""
    return "" if axial_length_mm is None else f"{axial_length_mm:g}"


def blank_row(source: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {"source": source, "octfm": __version__}


def facts_of(volume: Volume, state: str) -> dict[str, str]:
    """Cells of a row that are known before anything is measured."""
    return {
        # The key for joining labels: octfm finetune and octfm probe accept this table as it is.
        "acquisition": "" if volume.acquisition == "unknown" else volume.acquisition,
        "laterality": volume.laterality or "",
        "scanner": volume.scanner,
        "bscans": str(volume.shape[0]),
        "file_state": state,
    }


def scan_of(facts: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(facts[name] for name in _OF_AN_ACQUISITION)


def describe(found: ScanSegmentation, device: DeviceGrid | str | None = None) -> str:
    """A few lines for a terminal. `device`: see `device_grid_of`."""
    row, volume = row_of(found, device), found.volume
    bscans, scanner = number(volume.shape[0], "B-scan"), volume.scanner.replace("unknown", "scanner unknown")
    lines = [f"{one_line(volume.source)}: {bscans}, {scanner}, eye {volume.laterality or 'unknown'}"]
    lines += zone_lines(row)
    amounts = [f"{name.replace('_', ' ')} {row[f'{name}_nl']} nl" for name in MASKS if row[f"{name}_nl"]]
    areas = [f"{name.replace('_', ' ')} {row[f'{name}_pixels']} pixels" for name in MASKS if row[f"{name}_pixels"]]
    if row["retina_rows"]:
        areas.insert(0, f"retina {row['retina_rows']} rows (median)")
    for found_here in (amounts, areas):
        if found_here:
            lines.append("  " + ", ".join(found_here))
    share = f"{found.doubtful.mean():.0%} of A-scans are doubtful"
    if row["corrected_bscans"]:
        and_fovea = found.corrections.and_fovea if found.corrections else ""
        lines.append(f"  corrected by hand: {row['corrected_bscans']} of {row['bscans']} B-scans{and_fovea}")
    return "\n".join([*lines, f"  verdict: {row['verdict']}; {share}", f"  {found.model}; {NOTE}"])


def save_table(rows: Iterable[dict[str, str]], out: Location) -> None:
    """Write rows of COLUMNS, the file replaced whole."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in rows)
    # Names of files that are not valid UTF-8 keep their bytes.
    write_whole(out, text.getvalue().encode("utf-8", "surrogateescape"))


def read_table(path: Location) -> list[dict[str, str]]:
    """The rows of a table, whose file may begin with the mark of UTF-8 that spreadsheets write. Raises EvaluationError
    if it has other columns, without those in _ADDED, or a row is damaged."""
    reader = csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig", "surrogateescape"), newline=""))
    rows = []
    try:
        found = tuple(reader.fieldnames or ())
        if found not in (COLUMNS, tuple(name for name in COLUMNS if name not in _ADDED)):
            raise EvaluationError(
                f"{path}: not a table of octfm segment as it writes it, with commas between columns, or of a version "
                "whose numbers must not be mixed with these; "
                "choose another --out, and give --apply-corrections again for scans that were corrected by hand"
            )
        for row in reader:
            if None in row or None in row.values():
                raise EvaluationError(
                    f"{path}: line {reader.line_num}: expected {len(found)} columns as in the header; fix or delete "
                    "the row"
                )
            rows.append(dict.fromkeys(COLUMNS, "") | {name: from_csv_cell(cell) for name, cell in row.items()})
    except csv.Error as error:
        raise EvaluationError(
            f"{path}: after line {reader.line_num}: {error}; fix it, or choose another --out"
        ) from None
    return rows
