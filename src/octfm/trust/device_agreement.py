"""Agreement of octfm segment with the device over many eyes: Bland-Altman limits of every ETDRS zone."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.participants.ids import person_key
from octfm.errors import EvaluationError, one_line
from octfm.evaluation import agreement
from octfm.evaluation.cases import people
from octfm.evaluation.statistics import MIN_PARTICIPANTS, bootstrap, holm
from octfm.formats.names import lateralities, may_be_an_eye
from octfm.layers.rows import ACCEPTED
from octfm.layers.zones import DEVICE_UNIT, NOT_MOVED, UNIT, columns_in, read_rows, same_millimetres, zones_in
from octfm.trust.study import LEVEL
from octfm.volume.etdrs import ZONES

LARGE_UM = 10.0
"""Differences above this are listed one by one."""
RESAMPLES = 2000
UNREADABLE = "could not be read"
REFUSED = "refused by the verdict"
WITHOUT_DEVICE = "without the device's zones"
WITHOUT_OURS = "without ours"
OTHER_MILLIMETRES = "measured with an axial length, unlike the device's zones"
LEFT_OUT: tuple[str, ...] = (UNREADABLE, REFUSED, WITHOUT_DEVICE, WITHOUT_OURS, OTHER_MILLIMETRES)
"""Why rows are left out, in the order of the report."""
_NOMINAL = {"zones_note": ""}
"""A row whose lateral millimetres are nominal, like the device's: it states no axial length."""
OURS = {name: UNIT[name] for name in ZONES}
PARTICIPANT = ("participant", "participant_id")
"""Columns that may name the participant of a row."""


@dataclass(frozen=True)
class _Eye:
    """A row in which octfm and the device measured zones."""

    line: int
    """As a spreadsheet counts them: the header is 1."""
    row: dict[str, str]
    ours: dict[str, float]
    device: dict[str, float]
    participant: str


def device_agreement(table: Path, device: Path | None = None) -> dict[str, Any]:
    """Differences in µm, ours minus the device's, per zone, over the rows of a table of octfm segment.

    device: a CSV with the device's zones (`device_centre_um` … or `centre_um` …), matched by `source`, else by
    participant and laterality; default: the columns device_<zone>_um of the table.
    Rows that could not be read, were refused by the verdict, lack one of both or were measured with an axial length are
    left out and counted. Intervals are studentised bootstraps over participants if a column names them, else over rows;
    there is none with fewer than MIN_PARTICIPANTS. `changing`: zones in which differences change with thickness, after
    Holm's correction over zones.
    Raises EvaluationError if a file is no such table, if no row can be compared, if a scan stands in two rows, and if
    rows of the two tables do not match or contradict each other.
    """
    rows = read_rows(table, ("source", "verdict", "problem", UNIT["centre"]))
    if device is not None:
        rows = _with_device(rows, read_rows(device, (), "the device's zones"), table, device)
    named = _participants_of(rows)
    used, left_out = _compared(rows, named, table)
    if not used:
        counted = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        remedy = "give --device TABLE.csv" if device is None else f"check that {device} names the rows in the same way"
        raise EvaluationError(f"{table}: no eye has zones of ours and of the device ({counted}); {remedy}")
    eyes = {(each.participant, each.row.get("laterality", "")) for each in used}
    zones = [zone for name in ZONES if (zone := _zone(name, used))["points"] or zone["without_ours"]]
    slopes = {zone["target"]: p for zone in zones if (p := (zone["slope_per_100_um"] or {}).get("p")) is not None}
    return {
        "rows": len(rows),
        "used": len(used),
        "left_out": left_out,
        "participant_column": named,
        "participants": len({each.participant for each in used}) if named else None,
        "unnamed": sum(not each.row[named].strip() for each in used) if named else 0,
        "repeated": len(used) - len(eyes) if named else None,
        "not_on_fovea": sum(NOT_MOVED in each.row.get("device_note", "") for each in used),
        "ours_not_on_fovea": sum(each.row.get("grid_centre") == "scan" for each in used),
        "scanners": dict(Counter(name for each in used if (name := each.row.get("scanner", "").strip()))),
        "corrected": sum(bool(each.row.get("corrected_bscans")) for each in used),
        "models": sorted({model for each in used if (model := each.row.get("model"))}),
        "large_um": LARGE_UM,
        "zones": zones,
        "changing": [name for name, p in zip(slopes, holm([*slopes.values()]), strict=True) if p <= LEVEL],
        "large": _large(used),
    }


def _compared(rows: Sequence[dict[str, str]], named: str | None, table: Path) -> tuple[list[_Eye], dict[str, int]]:
    """Rows that both measured, and how many others are left out for which reason. `named`: the column of participants.

    Raises EvaluationError if a scan stands in two rows.
    """
    used: list[_Eye] = []
    left_out, lines = dict.fromkeys(LEFT_OUT, 0), dict[str, int]()
    for line, row in enumerate(rows, 2):
        ours, theirs = zones_in(row, OURS, table), zones_in(row, DEVICE_UNIT, table)
        if reason := _why_left_out(row, ours, theirs):
            left_out[reason] += 1
            continue
        if (source := row["source"]) and (first := lines.setdefault(source, line)) != line:
            raise EvaluationError(
                f"{table}: {one_line(source)} stands in rows {first} and {line}, and would count as two scans; delete "
                "one of them"
            )
        person = row[named].strip() if named else ""
        # A row without a name must not be joined to the others without one.
        used.append(_Eye(line, row, ours, theirs, person or f"row {line}"))
    ids = people(np.array([each.participant for each in used]))
    return [replace(each, participant=str(person)) for each, person in zip(used, ids, strict=True)], left_out


def _participants_of(rows: Sequence[dict[str, str]]) -> str | None:
    """The first column that names participants; a table made from files has an empty one."""
    return next((name for name in PARTICIPANT if any(row.get(name, "").strip() for row in rows)), None)


def _why_left_out(row: dict[str, str], ours: dict[str, float], theirs: dict[str, float]) -> str:
    if row["problem"]:
        return UNREADABLE
    if row["verdict"] != ACCEPTED:
        return REFUSED
    if not theirs:
        return WITHOUT_DEVICE
    if not same_millimetres(row, _NOMINAL):
        return OTHER_MILLIMETRES
    return "" if ours.keys() & theirs.keys() else WITHOUT_OURS


def _zone(name: str, used: Sequence[_Eye]) -> dict[str, Any]:
    """Bias and limits of one zone, with the points of its plot."""
    both = [each for each in used if name in each.ours and name in each.device]
    ours, theirs = np.array([each.ours[name] for each in both]), np.array([each.device[name] for each in both])
    people = np.array([each.participant for each in both])
    apart, level, count = ours - theirs, (ours + theirs) / 2, len(set(people))
    boot = (lambda metric: bootstrap(metric, people, resamples=RESAMPLES)) if count >= MIN_PARTICIPANTS else None
    return {
        "target": name,
        "a": "octfm",
        "b": "device",
        "quantity": "µm",
        "n_eyes": len(both),
        "n_participants": count,
        "without_ours": sum(name in each.device and name not in each.ours for each in used),
        "n_large": int((np.abs(apart) > LARGE_UM).sum()),
        # One participant does not show how participants differ, so there are no limits.
        "bland_altman": agreement.limits(apart, people, boot) if count > 1 else None,
        "slope_per_100_um": agreement.slope(apart, level / 100, people, boot) if boot else None,
        "points": [[float(m), float(d)] for m, d in zip(level, apart, strict=True)],
    }


def _large(used: Sequence[_Eye]) -> list[dict[str, Any]]:
    """Zones that differ by more than LARGE_UM, the largest difference first."""
    found = [
        {
            "row": each.line,
            "source": one_line(each.row["source"]),
            "zone": name,
            "ours": each.ours[name],
            "device": each.device[name],
            "difference": each.ours[name] - each.device[name],
            "note": each.row.get("device_note", ""),
        }
        for each in used
        for name in ZONES
        if name in each.ours and name in each.device
    ]
    return sorted((f for f in found if abs(f["difference"]) > LARGE_UM), key=lambda f: -abs(f["difference"]))


def _with_device(
    rows: list[dict[str, str]], others: list[dict[str, str]], table: Path, device: Path
) -> list[dict[str, str]]:
    """Rows with the device's zones of another table in place of their own."""
    people = [_participants_of(some) for some in (rows, others)]
    keys, wanted = _matched_by(rows, others, people, table, device)
    own = DEVICE_UNIT["centre"] not in others[0]
    if own and UNIT["centre"] not in others[0]:
        raise EvaluationError(
            f"{device}: expected the column {DEVICE_UNIT['centre']} or {UNIT['centre']}, found neither but "
            f"{columns_in(others[0])}"
        )
    columns, known = UNIT if own else DEVICE_UNIT, _by_key(others, wanted, device)
    ours = [row for row in rows if all(_key(row, keys))]
    # A single B-scan has no zones, so the device's are not of it.
    scans = Counter(_key(row, keys) for row in ours if row.get("bscans") != "1")
    if repeated := next((key for key in known if scans[key] > 1 and "laterality" in wanted), None):
        raise EvaluationError(
            f"{device}: one row for {_named(wanted, known[repeated])}, of whom {table} has {scans[repeated]} scans; "
            f"which of them did the device measure? give {device} a column source as in {table} instead"
        )
    if known.keys().isdisjoint(_key(row, keys) for row in ours):
        raise EvaluationError(
            f"{device}: names none of the eyes of {table}: {_first(wanted, known.values())} here, "
            f"{_first(keys, ours)} there; write both in the same way"
        )
    joined = []
    for row in rows:
        other = known.get(_key(row, keys), {})
        eyes = [each.get("laterality", "") for each in (row, other)]
        if lateralities(eyes)[1]:
            raise EvaluationError(
                f"{device}: {row['source']} is eye {eyes[1]}, in {table} eye {eyes[0]}; zones of two eyes are no pair"
            )
        named = ", ".join(row[name].strip() for name in keys)
        zones_in(other, {name: columns[name] for name in ZONES}, device, named)  # names the other table
        zones = {DEVICE_UNIT[name]: other.get(columns[name], "") for name in ZONES}
        person = {people[1]: other.get(people[1], "")} if people[1] and not people[0] else {}
        joined.append(row | zones | person | {"device_note": other.get("device_note", "")})
    return joined


def _matched_by(
    rows: list[dict[str, str]],
    others: list[dict[str, str]],
    people: Sequence[str | None],
    table: Path,
    device: Path,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The columns by which rows of both tables are matched: the source of a scan, or participant and eye. `people`: the
    column of participants in each table."""
    if "source" in others[0]:
        return ("source",), ("source",)
    lacking = [*([] if people[0] else ["participant"]), *([] if "laterality" in rows[0] else ["laterality"])]
    if lacking or not people[1] or "laterality" not in others[0]:
        raise EvaluationError(
            f"{device}: expected a column source as in {table}, or participant and laterality in both tables; found "
            f"{columns_in(others[0])}{f', and no {lacking[0]} in {table}' if lacking else ''}"
        )
    return (str(people[0]), "laterality"), (str(people[1]), "laterality")


def _by_key(
    others: list[dict[str, str]], wanted: tuple[str, ...], device: Path
) -> dict[tuple[str, ...], dict[str, str]]:
    """Rows by the cells that they are matched by; those without a participant or an eye are left out."""
    known: dict[tuple[str, ...], dict[str, str]] = {}
    for other in others:
        key = _key(other, wanted)
        if not all(key):
            continue
        named = ", ".join(one_line(other[column].strip()) for column in wanted)
        if "laterality" in wanted and not may_be_an_eye(eye := other["laterality"]):
            raise EvaluationError(
                f"{device}: {named}: laterality is {one_line(eye)}; expected R, L, OD, OS, right or left"
            )
        if key in known:
            raise EvaluationError(f"{device}: {named} stands in two rows; which of them is meant?")
        known[key] = other
    return known


def _first(columns: Sequence[str], rows: Iterable[dict[str, str]]) -> str:
    """What the first of these rows is matched by, in words for an error."""
    return _named(columns, next(iter(rows), dict.fromkeys(columns, "nothing")))


def _named(columns: Sequence[str], row: dict[str, str]) -> str:
    return ", ".join(f"{column} {one_line(row[column].strip())}" for column in columns)


def _key(row: dict[str, str], columns: Sequence[str]) -> tuple[str, ...]:
    """The cells by which rows are matched: an eye is R or L however its table spells it (OD, left), a participant is
    one under every spelling of the id."""
    cells = ((column, row[column].strip()) for column in columns)
    return tuple(
        cell if column == "source" else lateralities([cell])[0] or cell if column == "laterality" else person_key(cell)
        for column, cell in cells
    )
