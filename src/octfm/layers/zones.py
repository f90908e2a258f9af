"""ETDRS zones of a scan for a table: ours with the reason for every blank, and those that the device measured."""

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from octfm.catalog.columns import composed, decoded, separator_above
from octfm.display import from_csv_cell
from octfm.errors import EvaluationError, ReadError, one_line
from octfm.formats import read_device_grid
from octfm.formats.heyex_xml import DeviceGrid
from octfm.io.isolation import Limits
from octfm.layers.ranges import SYNTHETIC
from octfm.layers.segment import FOVEA_MM, PLACE_UM, ScanSegmentation
from octfm.volume.etdrs import LEAST_COVERED, ZONES, EtdrsGrid, lateral_scale

SIDES = ("inner left", "inner right", "outer left", "outer right")
"""Zones of an eye whose laterality is unknown."""
UNIT = {name: f"{name.replace(' ', '_')}_um" for name in (*ZONES, *SIDES)}
"""Zone → column of its mean thickness."""
RANGE = {name: (column.replace("_um", "_low_um"), column.replace("_um", "_high_um")) for name, column in UNIT.items()}
"""Zone → columns of the ends of its range."""
SAMPLING_UM = 2.0
"""If `EtdrsGrid.sampling_um` of a zone is larger, the note says how much the zone depends on which B-scans were
taken."""
PLAUSIBLE_UM = (10.0, 3000.0)
"""Means of a zone that can be micrometres. Larger numbers are nanometres or rows, smaller ones are millimetres or codes
for a missing value."""
NOT_MOVED = "nobody has moved it"
"""Words of a device's note by which octfm agree counts grids that are not on the fovea."""
DEVICE_UNIT = {name: f"device_{UNIT[name]}" for name in ZONES}
ZONE_COLUMNS = ("grid_centre", *UNIT.values(), "volume_mm3", "withheld", "zones_note")
RANGE_COLUMNS = (*(column for pair in RANGE.values() for column in pair), "range_kind", "range_factor")
"""`range_kind` says how far ranges can be trusted; `range_factor` is the factor by which `--calibrate` scaled them."""
DEVICE_COLUMNS = (*DEVICE_UNIT.values(), "device_volume_mm3", "device_note")


def zone_cells(found: ScanSegmentation, grid: EtdrsGrid | None) -> dict[str, str]:
    """Cells of ZONE_COLUMNS; `zones_note` says in words why a zone is blank."""
    if grid is None:
        notes = (found.why_no_zones, found.why_no_um, found.note_on_scan, _note_on_length(found))
        return {"zones_note": "; ".join(filter(None, notes))}
    return {
        "grid_centre": grid.centre,
        "volume_mm3": "" if grid.volume_mm3 is None else f"{grid.volume_mm3:.3f}",
        "withheld": "; ".join(_unsure(grid)),
        "zones_note": _note(found, grid),
        **{UNIT[name]: f"{mean:.1f}" for name, mean in grid.mean_um.items() if mean is not None},
    }


def range_cells(found: ScanSegmentation, grid: EtdrsGrid | None) -> dict[str, str]:
    """Cells of RANGE_COLUMNS."""
    ranges = {} if grid is None else found.zone_ranges(grid)
    if not ranges:
        return {}
    return {"range_kind": SYNTHETIC} | {
        column: f"{end:.1f}" for zone, ends in ranges.items() for column, end in zip(RANGE[zone], ends, strict=True)
    }


def grid_of(found: ScanSegmentation) -> EtdrsGrid | None:
    """Our zones; None if the scan covers none or the verdict refuses it."""
    try:
        return found.etdrs() if found.verdict.accepted else None
    except EvaluationError:
        return None


def _unsure(grid: EtdrsGrid) -> list[str]:
    """Names of the zones that were measured but withheld: the network expects too large an error there, or another
    place of the fovea would change them."""
    return [
        name
        for name, mean in grid.mean_um.items()
        if mean is None and grid.coverage[name] >= LEAST_COVERED and name not in grid.too_sparse
    ]


def unsteady(grid: EtdrsGrid) -> list[str]:
    """Sentences that name the zones whose mean would change by some µm if the grid or the B-scans lay elsewhere."""
    given = [name for name, mean in grid.mean_um.items() if mean is not None]
    by_place = {name: grid.place_um[name] for name in given if grid.place_um.get(name, 0.0) > PLACE_UM}
    by_bscans = {name: grid.sampling_um[name] for name in given if grid.sampling_um[name] > SAMPLING_UM}
    causes = {
        f"if the fovea lies {FOVEA_MM[grid.centre]:g} mm from the grid's centre": by_place,
        f"if other B-scans are taken, {grid.bscans_per_mm:.1f} per mm": by_bscans,
    }
    return [
        f"means that may change {cause}: {', '.join(f'{name} by {change:.0f} µm' for name, change in changes.items())}"
        for cause, changes in causes.items()
        if changes
    ]


def _note(found: ScanSegmentation, grid: EtdrsGrid) -> str:
    notes = [note for note in (found.note_on_scan, _note_on_length(found)) if note]
    if grid.centre == "fovea":
        notes.append("the fovea was set by hand")
    if grid.centre == "scan":
        notes.append("no foveal pit was found, so the grid is centred on the middle of the scan")
    if grid.rivals_mm:
        apart = min(float(np.hypot(*np.subtract(other, grid.centre_mm))) for other in grid.rivals_mm)
        notes.append(f"the foveal pit could also lie {apart:.1f} mm away; zones that this would change are withheld")
    if sparse := [*grid.too_sparse, *([] if found.bscan_nl is not None else ["volumes"])]:
        apart_mm = grid.furthest_mm or float(np.diff(found.place().bscans_mm).max())
        notes.append(f"B-scans {apart_mm:.2f} mm apart are too far apart for: {', '.join(sparse)}")
    notes += unsteady(grid)
    if not any("superior" in name for name in grid.mean_um):
        notes.append("no superior and inferior zones: the file does not say which B-scan is superior")
    if found.volume.laterality is None:
        notes.append("left and right instead of nasal and temporal: the file does not say which eye it is")
    if short := [name for name, share in grid.coverage.items() if share < LEAST_COVERED]:
        notes.append(f"less than {LEAST_COVERED:.0%} measured: {', '.join(short)}")
    return "; ".join(notes)


def _note_on_length(found: ScanSegmentation) -> str:
    length = found.axial_length_mm
    return "" if length is None or found.why_no_um else f"lateral millimetres for an axial length of {length:g} mm"


def same_millimetres(one: dict[str, str], other: dict[str, str]) -> bool:
    """Whether the zones of two rows were measured with the same axial length, or both with nominal millimetres; True if
    one row does not say.

    Raises EvaluationError for an axial length that is no number.
    """
    # Only in tables of octfm segment, which have notes; elsewhere a column of this name may be biometry.
    lengths = [_axial_length_mm(row) for row in (one, other) if "zones_note" in row]
    return len(lengths) < 2 or lengths[0] == lengths[1]


def _axial_length_mm(row: dict[str, str]) -> float | None:
    """Axial length by which lateral distances of a row were scaled; None if they are nominal."""
    length = row.get("axial_length_mm", "").strip().replace(",", ".")
    try:
        return float(length) if length else None
    except ValueError:
        raise EvaluationError(
            f"{row.get('source', 'a row')}: axial_length_mm expected a number or nothing, got {length!r}"
        ) from None


def device_grid_of(source: str | Path, limits: Limits | None = None) -> DeviceGrid | str | None:
    """The device's own grid; None if the file has none; a sentence if it cannot be read."""
    try:
        return read_device_grid(source, limits)
    except ReadError as error:
        return f"the device's grid cannot be read: {error.code}"


def device_cells(device: DeviceGrid | str | None, found: ScanSegmentation, grid: EtdrsGrid | None) -> dict[str, str]:
    """Cells of DEVICE_COLUMNS."""
    if device is None or isinstance(device, str):
        return {"device_note": device or ""}
    notes = []
    if not device.centre_moved:
        notes.append(f"the device's grid lies in the middle of the fundus image, where {NOT_MOVED} to the fovea")
    if grid is not None and found.volume.lines is not None and device.centre_mm is not None:
        ours = np.divide(grid.centre_mm, lateral_scale(found.axial_length_mm))  # the device's millimetres are nominal
        apart = float(np.hypot(*np.subtract(device.centre_mm, ours)))
        notes.append(f"its centre lies {apart:.2f} mm from ours")
    if short := [name for name, share in device.coverage.items() if share < LEAST_COVERED]:
        notes.append(f"the device measured less than {LEAST_COVERED:.0%} of: {', '.join(short)}")
    return {
        "device_volume_mm3": "" if device.volume_mm3 is None else f"{device.volume_mm3:.3f}",
        "device_note": "; ".join(notes),
        **{DEVICE_UNIT[name]: f"{mean:.1f}" for name, mean in device.mean_um.items() if mean is not None},
    }


def zone_lines(row: dict[str, str]) -> list[str]:
    """Zones of a row for a terminal, ours and the device's, with the notes."""
    device = any(row[name] for name in DEVICE_UNIT.values())
    lines = []
    for name, column in UNIT.items():
        ours, theirs = row[column], row.get(DEVICE_UNIT.get(name, ""), "")
        if ours or theirs:
            both = f"{float(ours) - float(theirs):+6.1f}" if ours and theirs else "     –"
            ours, theirs = (f"{float(cell):6.1f}" if cell else "     –" for cell in (ours, theirs))
            low, high = (row[end] for end in RANGE[name])
            within = f" ({float(low):.0f} to {float(high):.0f})" if low and high else ""
            beside = f"   device {theirs} µm   difference {both} µm" if device else ""
            lines.append(f"  {name:16} {ours} µm{within}{beside}")
    if any(row[column] for column in UNIT.values()):
        centre = row["grid_centre"].replace("scan", "middle of the scan")
        lines.insert(0, f"  retina (ILM to BM) in ETDRS zones around the {centre}")
    elif device:
        lines.insert(0, "  retina (ILM to BM) in ETDRS zones of the device")
    if row["range_kind"]:
        lines.append(f"  in brackets: {row['range_kind']}")
    if row["volume_mm3"]:
        lines.append(f"  volume within 3 mm {row['volume_mm3']} mm³")
    if row["withheld"]:
        lines.append(f"  withheld (network unsure there, or the fovea may lie elsewhere): {row['withheld']}")
    if row["device_volume_mm3"]:
        lines.append(f"  volume by the device {row['device_volume_mm3']} mm³")
    return [*lines, *(f"  {row[name]}" for name in ("zones_note", "device_note") if row[name])]


def read_rows(path: Path, needed: Sequence[str], expected: str = "a table of octfm segment") -> list[dict[str, str]]:
    """Rows of a CSV that has the columns `needed`; cells that a short row lacks are blank. `expected` says in errors
    what the file should be.

    The separator is a comma, a semicolon (as in spreadsheets with a decimal comma) or a tab. The text is UTF-8, UTF-16
    (Excel's Unicode text) or Windows-1252. Letters are `composed`, so that names match. Spaces around column names and
    blank rows are ignored. Raises EvaluationError for a file that is no such table, lacks a column or has no rows.
    """
    content = path.read_bytes()
    utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    # Line by line: in a table of octfm segment, file names may keep bytes that are not UTF-8.
    text = composed("".join(map(decoded, [content] if utf16 else content.splitlines(keepends=True))))
    header = text.partition("\n")[0]
    if re.search(r"[\0-\x08\x0e-\x1f]", header):
        raise EvaluationError(f"{path}: expected {expected}, got other bytes; export the table as CSV")
    above = separator_above(header)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=above or max(",;\t", key=header.count))
    try:
        if above:
            next(reader.reader)
        reader.fieldnames = names = [name.strip() for name in reader.fieldnames or ()]
        if missing := [column for column in needed if column not in names]:
            found = columns_in(names) or "an empty first line"
            raise EvaluationError(f"{path}: expected {expected}, found no column {', '.join(missing)} but {found}")
        if twice := next((name for name in names if name and names.count(name) > 1), None):
            raise EvaluationError(f"{path}: two columns are called {one_line(twice)[:200]}; rename one of them")
        rows = []
        for row in reader:
            if any(cell.strip() for cell in row.pop(None, ())):  # type: ignore[call-overload]
                raise EvaluationError(
                    f"{path}: line {reader.line_num}: more cells than the header has columns, so that numbers may "
                    "be in the wrong columns; put quotation marks around cells that contain the separator"
                )
            if any((cell or "").strip() for cell in row.values()):
                rows.append({key: from_csv_cell(value or "") for key, value in row.items()})
    except csv.Error as error:  # as of a quotation mark that is not closed
        raise EvaluationError(f"{path}: after line {reader.line_num}: {error}; export the table again") from None
    if not rows:
        raise EvaluationError(f"{path}: holds no row")
    return rows


def columns_in(names: Iterable[str]) -> str:
    """The columns of a table on one line, the first 200 characters, for errors."""
    return one_line(", ".join(names))[:200]


def as_read(source: str) -> str:
    """The name of a file as `read_rows` returns it, so that names from other places can be compared."""
    return composed(decoded(source.encode("utf-8", "surrogateescape")))


def zones_in(row: dict[str, str], columns: dict[str, str], path: Path, of: str = "") -> dict[str, float]:
    """Zone → µm from the columns of a row of the CSV at `path`; blank ones are left out.

    A decimal comma is read as a point, unless it may separate thousands. `of` names the row in errors; default: its
    source. Raises EvaluationError for a cell that is no thickness in µm, such as millimetres, or the 0 or -1 that some
    programs write for a missing value.
    """
    found = {}
    for name, column in columns.items():
        if cell := row.get(column, "").strip():
            try:
                found[name] = float(re.sub(r",(?!\d{3}$)", ".", cell))
            except ValueError:
                found[name] = math.nan
            where = f"{path}: {of or row['source']}: {column} expected µm"
            if not math.isfinite(found[name]):
                raise EvaluationError(
                    f"{where}, got {cell!r}; write the number alone, with a decimal point, and leave zones without a "
                    "value blank"
                ) from None
            if not PLAUSIBLE_UM[0] <= found[name] <= PLAUSIBLE_UM[1]:
                raise EvaluationError(
                    f"{where} between {PLAUSIBLE_UM[0]:g} and {PLAUSIBLE_UM[1]:g}, got {cell!r}; convert the column if "
                    "it has another unit, and leave zones without a value blank"
                )
    return found
