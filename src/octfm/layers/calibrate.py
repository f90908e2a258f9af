"""90 % intervals for the zones of a table, calibrated on a user's own corrected scans."""

from collections.abc import Mapping, Set
from pathlib import Path

from octfm.catalog.participants.ids import under_one_id
from octfm.display import number
from octfm.errors import EvaluationError
from octfm.layers.ranges import conformal_quantile
from octfm.layers.zones import RANGE, UNIT, as_read, columns_in, read_rows, same_millimetres, zones_in

LEAST_PARTICIPANTS = 50
"""Least number of participants with corrected zones for a range to be called a 90 % interval."""
LEAST_FACTOR = 0.01
"""Smallest factor of ranges. A smaller one means that nine in ten zones equal the table's: nobody has corrected
them."""


def calibrate_rows(rows: list[dict[str, str]], corrected: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of a table of octfm segment, with 90 % intervals in place of synthetic-calibrated ranges, and a summary in
    lines.

    corrected: a CSV with `source`, `participant` and corrected zones in the table's columns (`centre_um` …); or a table
    of `octfm segment --apply-corrections`, with `corrected_participant` where there is no `participant`. Of such a
    table only scans count in which every B-scan was checked or had ILM or Bruch's membrane corrected
    (`checked_bscans`); otherwise unchecked lines would count as correct. Scans that were measured with another axial
    length do not count, because not only lines change their zones. For each scanner with at least LEAST_PARTICIPANTS
    corrected participants, ranges are scaled by one factor, the smallest that covers 90 % (`range_factor`). Raises
    EvaluationError if there is no such scanner, or nothing was corrected.
    """
    fixed, left_out = read_corrected(corrected)
    known = {as_read(row["source"]): row for row in rows if not row["problem"]}
    scores: dict[str, dict[str, list[float]]] = {}
    of_other_length = 0
    for other in fixed:
        if (row := known.get(other["source"])) is None:
            continue
        if not same_millimetres(row, other):
            of_other_length += 1
            continue
        ours, theirs = zones_in(row, UNIT, corrected), zones_in(other, UNIT, corrected)
        for zone in ours.keys() & theirs.keys():
            if (reach := synthetic_reach(row, zone)) is not None:
                own = scores.setdefault(row["scanner"], {}).setdefault(other["participant"], [])
                own.append(_score(theirs[zone] - ours[zone], reach))
    if of_other_length:
        scans = number(of_other_length, "scan")
        left_out.append(f"{scans} left out: measured by another axial length than in the table")
    counts = {scanner: len(people) for scanner, people in sorted(scores.items())}
    enough = {scanner for scanner, count in counts.items() if count >= LEAST_PARTICIPANTS}
    if not enough:
        found = ", ".join(f"{count} of {scanner}" for scanner, count in counts.items()) or "none"
        raise _too_few(corrected, found, left_out)
    factors = {scanner: conformal_quantile(list(scores[scanner].values())) for scanner in enough}
    if copied := [scanner for scanner in sorted(enough) if factors[scanner] < LEAST_FACTOR]:
        raise EvaluationError(
            f"{corrected}: at least 90 % of the zones of {copied[0]} equal the table's; expected every zone as "
            "somebody has corrected it; leave out scans that nobody has looked at"
        )
    messages = [
        f"{scanner}: 90 % intervals from {counts[scanner]} participants, {factors[scanner]:.2f} times the "
        "synthetic-calibrated ranges; they hold for this scanner and this population"
        if scanner in enough
        else f"{scanner}: {counts[scanner]} participants are too few (at least {LEAST_PARTICIPANTS}); its ranges "
        "stay as they are"
        for scanner in counts
    ]
    messages += left_out
    return [
        _scaled(row, factors[row["scanner"]], counts[row["scanner"]]) if row["scanner"] in enough else row
        for row in rows
    ], messages


def expect_enough(corrected: Path, sources: Set[str]) -> None:
    """Raise EvaluationError, before scans are segmented, unless `corrected` is a CSV as for `calibrate_rows` with
    corrected zones of at least LEAST_PARTICIPANTS participants whose scans are among `sources`."""
    fixed, left_out = read_corrected(corrected)
    sources = {as_read(source) for source in sources}
    if fixed and sources.isdisjoint(row["source"] for row in fixed):
        raise EvaluationError(
            f"{corrected}: expected source as in the table, such as {min(sources)}, got {fixed[0]['source']} and none "
            "that is there"
        )
    known = [row for row in fixed if row["source"] in sources and zones_in(row, UNIT, corrected)]
    people = {row["participant"] for row in known}
    if len(people) < LEAST_PARTICIPANTS:
        raise _too_few(corrected, str(len(people)), left_out)


def _too_few(corrected: Path, found: str, left_out: list[str]) -> EvaluationError:
    why = f" ({'; '.join(left_out)})" if left_out else ""
    return EvaluationError(
        f"{corrected}: expected corrected zones of at least {LEAST_PARTICIPANTS} participants of one scanner whose "
        f"scans are in the table, got {found}{why}; correct more scans, or keep the synthetic-calibrated ranges"
    )


def read_corrected(path: Path) -> tuple[list[dict[str, str]], list[str]]:
    """Rows of a CSV with corrected zones, each with `participant`, and a sentence for each reason why scans do not
    count: they were corrected in part, or have no participant. Raises EvaluationError if the file is no such CSV, or
    has two rows for a scan: if one of them was not corrected, ranges would be too narrow."""
    rows = read_rows(path, ("source",), "corrected zones of scans")
    found = f"found {columns_in(rows[0])}"
    if not rows[0].keys() & {"participant", "corrected_participant"}:
        raise EvaluationError(f"{path}: expected a column participant, {found}")
    if not rows[0].keys() & set(UNIT.values()):
        raise EvaluationError(f"{path}: expected corrected zones in columns such as {UNIT['centre']}, {found}")
    if rows[0].keys() >= {"corrected_bscans", "checked_bscans", "bscans"}:
        touched = [row for row in rows if row["corrected_bscans"]]
        rows = [row for row in touched if row["checked_bscans"] == row["bscans"]]
        in_part = len(touched) - len(rows)
    else:
        in_part = 0
    seen = set[str]()
    for row in rows:
        if row["source"] in seen:
            raise EvaluationError(f"{path}: {row['source']} stands in two rows; keep the one that was corrected last")
        seen.add(row["source"])
    cells = [(row.get("participant", "").strip(), row.get("corrected_participant", "").strip()) for row in rows]
    people = under_one_id([stated or typed for stated, typed in cells])
    named = [row | {"participant": person} for row, person in zip(rows, people, strict=True) if person]
    left_out = {
        "not every B-scan was checked or had ILM or Bruch's membrane corrected": in_part,
        "the table names no participant of theirs": len(rows) - len(named),
    }
    return named, [f"{number(count, 'scan')} left out: {why}" for why, count in left_out.items() if count]


def synthetic_reach(row: Mapping[str, str], zone: str) -> tuple[float, float] | None:
    """µm by which the synthetic-calibrated range of a zone reaches below and above its mean; None without a range."""
    low, high = (row[column] for column in RANGE[zone])
    if not (low and high and row[UNIT[zone]]):
        return None
    mean, factor = float(row[UNIT[zone]]), float(row["range_factor"] or 1)
    return (mean - float(low)) / factor, (float(high) - mean) / factor


def _score(apart_um: float, reach: tuple[float, float]) -> float:
    """Distance of the corrected mean from the mean found, in units of the range's reach on that side."""
    return abs(apart_um) / max(reach[apart_um > 0], 1e-3)


def _scaled(row: dict[str, str], factor: float, participants: int) -> dict[str, str]:
    cells = {}
    for zone in UNIT:
        if (reach := synthetic_reach(row, zone)) is not None:
            mean = float(row[UNIT[zone]])
            ends = mean - factor * reach[0], mean + factor * reach[1]
            cells |= {column: f"{end:.1f}" for column, end in zip(RANGE[zone], ends, strict=True)}
    if not cells:
        return row
    kind = f"90 % interval, calibrated on {participants} participants scanned by {row['scanner']}"
    return row | cells | {"range_kind": kind, "range_factor": f"{factor:.4f}"}
