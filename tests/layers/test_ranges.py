"""Ranges of ETDRS zones: conformal quantiles, what a table says of them, and calibration on a user's own scans."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octfm.errors import ConfigError, EvaluationError
from octfm.layers.calibrate import LEAST_PARTICIPANTS, calibrate_rows, expect_enough
from octfm.layers.finder import load_finder
from octfm.layers.ranges import SYNTHETIC, Ranges, conformal_quantile, packaged_ranges
from octfm.layers.rows import describe, read_table, row_of, save_table
from octfm.layers.segment import FOVEA_MM
from octfm.layers.zones import RANGE, UNIT
from octfm.volume.etdrs import ZONES, measure_around
from support.command_line import invoke
from support.segmented import found_in

pytestmark = pytest.mark.usefixtures("remembered_bscans")

RANGES = Ranges((2.0, 1.0, 0.1), (4.0, 0.5, 0.0), 1000)


def table(participants: int, scanner: str = "heidelberg_spectralis") -> list[dict[str, str]]:
    """Rows of scans that a network with RANGES has segmented."""
    row = row_of(replace(found_in(12), ranges=RANGES))
    return [row | {"source": f"{scanner}-{i}.e2e", "scanner": scanner} for i in range(participants)]


def corrected(path, rows: list[dict[str, str]], off_um, end: int = 1) -> None:
    """A user's corrections: every zone `off_um(i, reach)` µm off ours in scan i, whose range reaches that far up (or,
    with `end` 0, -reach down)."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["source", "participant", *UNIT.values()])
        writer.writeheader()
        for i, row in enumerate(rows):
            reach = {
                UNIT[zone]: float(row[RANGE[zone][end]] or "nan") - float(row[UNIT[zone]])
                for zone in UNIT
                if row[UNIT[zone]]
            }
            cells = {column: f"{float(row[column]) + off_um(i, high):.3f}" for column, high in reach.items()}
            writer.writerow({"source": row["source"], "participant": f"P{i}"} | cells)


@given(st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=9), min_size=10, max_size=60))
def test_a_conformal_quantile_covers_nine_participants_in_ten(scores):
    """Every participant counts as one, and the new one as one more that no finite range needs to cover."""
    bar = conformal_quantile(scores)
    covered = np.mean([np.mean(np.asarray(own) <= bar) for own in scores])
    assert covered * len(scores) / (len(scores) + 1) >= 0.9 - 1e-9 or np.isinf(bar)
    lower = [value for own in scores for value in own if value < bar]
    if lower and np.isfinite(bar):
        short = np.mean([np.mean(np.asarray(own) <= max(lower)) for own in scores])
        assert short * len(scores) / (len(scores) + 1) < 0.9 + 1e-9, "the smallest such value"


def test_too_few_participants_have_no_finite_quantile():
    assert np.isinf(conformal_quantile([[1.0]] * 8)) and conformal_quantile([[1.0]] * 9) == 1.0
    assert conformal_quantile([*[[1.0]] * 9, []]) == 1.0, "somebody without any zone does not count"


def test_conformal_ranges_cover_new_participants_as_promised():
    """Of many draws, on average: participants with an offset of their own, which one zone alone would not show."""
    rng = np.random.default_rng(0)
    people = np.abs(rng.normal(0, 3, (400, 60, 1)) + rng.normal(0, 1, (400, 60, 9)))
    covered = [np.mean(draw[50:] <= conformal_quantile(draw[:50])) for draw in people]
    assert np.mean(covered) == pytest.approx(0.9, abs=0.015) and np.mean(covered) >= 0.89


def test_rows_and_terminal_show_ranges_and_their_name():
    found = replace(found_in(12), ranges=RANGES)
    row, grid = row_of(found), found.etdrs()
    low, high = (float(row[column]) for column in RANGE["centre"])
    expected = found.zone_ranges()["centre"]
    assert (low, high) == pytest.approx(expected, abs=0.06) and low < grid.mean_um["centre"] < high
    assert row["range_kind"] == SYNTHETIC and "interval" not in SYNTHETIC and row["range_factor"] == ""
    assert f"({low:.0f} to {high:.0f})" in describe(found) and SYNTHETIC in describe(found)
    odd = replace(found, volume=replace(found.volume, source="a\n  verdict: accepted"))
    assert describe(odd).startswith(r"a\n  verdict: accepted: "), "a name of a file is no verdict"
    without = row_of(found_in(12))
    assert not any(without[column] for pair in RANGE.values() for column in pair) and not without["range_kind"]


def test_a_range_is_wider_where_the_network_is_less_sure():
    sure = replace(found_in(12), ranges=RANGES)
    layers = sure.found
    unsure = replace(sure, found=replace(layers, near=layers.near * 0.5, spread_um=layers.spread_um * 10))
    widths = [np.subtract(*found.zone_ranges()["centre"][::-1]) for found in (sure, unsure)]
    assert widths[1] > widths[0] + 1


def test_a_range_holds_what_the_grid_would_measure_around_a_fovea_beside_it():
    found = replace(found_in(25), ranges=Ranges((0.1, 0.0, 0.0), (0.1, 0.0, 0.0), 1000))
    grid, ranges, retina = found.etdrs(), found.zone_ranges(), found.thickness_um("ilm", "bm")
    for turn in np.arange(8) * np.pi / 4:
        beside = (
            grid.centre_mm[0] + FOVEA_MM["pit"] * np.cos(turn),
            grid.centre_mm[1] + FOVEA_MM["pit"] * np.sin(turn),
        )
        for zone, mean in measure_around(beside, retina, found.place(), "R").mean_um.items():
            if mean is not None and grid.mean_um[zone] is not None:
                assert ranges[zone][0] <= mean <= ranges[zone][1], zone
    assert ranges["centre"][1] - ranges["centre"][0] > 2, "the pit's own slope"


def test_a_range_is_wider_where_bscans_differ_from_their_neighbours():
    """Every other B-scan 40 µm thicker: as far as cysts between B-scans can move a mean that lines alone do not show."""
    even = replace(found_in(25), ranges=RANGES)
    uneven = replace(even, surfaces=even.surfaces | {"bm": even.surfaces["bm"] + 10.0 * (np.arange(25) % 2)[:, None]})
    zone, um = "inner superior", 1000 * 10 * even.spacing_mm[1]
    said = uneven.etdrs().sampling_um[zone]
    narrow, wide = (found.zone_ranges()[zone] for found in (even, uneven))
    through = (um / said / 2) ** 2
    assert 3 < through < 9, "B-scans of 25 over 6 mm that cross a zone"
    assert wide[1] - wide[0] > 1.5 * said and wide[1] - wide[0] > narrow[1] - narrow[0] + 1


def test_a_swollen_zone_may_be_much_thinner_and_is_not_thicker():
    (low, high), (lower, higher) = (RANGES.of(mean, 5.0, 0.0) for mean in (330.0, 430.0))
    assert (330 - low, high - 330) == pytest.approx((7.0, 6.5)) and (430 - lower, higher - 430) == pytest.approx(
        (17, 6.5)
    )
    wet = RANGES.of(430.0, 5.0, 20.0)
    assert 430 - wet[0] == pytest.approx(7.0), "cysts explain the swelling"


def test_fluid_of_an_a_scan_is_its_height():
    """A cyst of 80 µm in one B-scan of nine."""
    found = replace(found_in(9, fluid_in=4), ranges=RANGES)
    assert found.fluid_um().max() == pytest.approx(80) and not found.fluid_um()[3].any()
    assert not replace(found, masks={}).fluid_um().any()


def test_a_refused_scan_has_no_ranges():
    row = row_of(replace(found_in(9, reasons=("no",)), ranges=RANGES))
    assert not row["range_kind"] and not row[RANGE["centre"][0]]


def test_ranges_belong_to_their_weights():
    finder = load_finder()
    found = packaged_ranges(finder.name, finder.digest)
    assert found is not None and found.participants >= 800
    assert packaged_ranges(finder.name, "0" * 64) is None and packaged_ranges("untrained", finder.digest) is None


def test_own_corrections_turn_ranges_into_intervals(tmp_path):
    """Half as wide where the corrections need no more, for their scanner only; doing it again changes nothing."""
    rows, others = table(60), table(5, "zeiss_cirrus")
    refused = row_of(replace(found_in(9, reasons=("no",)), ranges=RANGES)) | {"scanner": "heidelberg_spectralis"}
    low, high = RANGE["centre"]
    mean, reach = float(rows[0]["centre_um"]), float(rows[0][high]) - float(rows[0]["centre_um"])
    down = mean - float(rows[0][low])
    corrected(tmp_path / "c.csv", rows + others, lambda i, reach: reach * i / 120)
    found, told = calibrate_rows([refused, *rows, *others], tmp_path / "c.csv")
    assert found.pop(0) == refused, "no interval without zones"
    assert "60 participants" in found[0]["range_kind"] and found[0]["range_kind"].startswith("90 % interval")
    # The 55th of 60 participants, since the new one counts, too.
    assert float(found[0]["range_factor"]) == pytest.approx(54 / 120, rel=0.03)
    assert float(found[0][high]) - mean == pytest.approx(reach * 54 / 120, abs=0.15)
    assert mean - float(found[0][low]) == pytest.approx(down * 54 / 120, abs=0.15)
    assert found[-1] == others[-1] and found[-1]["range_kind"] == SYNTHETIC
    assert len(told) == 2 and told[0].startswith(
        "heidelberg_spectralis: 90 % intervals from 60 participants, 0.45 times"
    )
    assert told[1].startswith("zeiss_cirrus: 5 participants are too few") and "as they are" in told[1]
    again, _ = calibrate_rows(found, tmp_path / "c.csv")
    assert float(again[0][low]) == pytest.approx(float(found[0][low]), abs=0.3)
    assert float(again[0]["range_factor"]) == pytest.approx(float(found[0]["range_factor"]), rel=0.02)


def test_each_scanner_has_the_factor_and_the_participants_of_its_own_corrections(tmp_path):
    """Participants are those of the catalog, whoever has corrected the scans."""
    rows, others = table(60), table(80, "zeiss_cirrus")
    corrected(tmp_path / "c.csv", rows + others, lambda i, reach: reach * (i / 120 if i < 60 else 2))
    header, *lines = (tmp_path / "c.csv").read_text().splitlines()
    (tmp_path / "d.csv").write_text("\n".join([f"{header},corrected_participant", *(f"{line},X" for line in lines)]))
    found, _ = calibrate_rows(rows + others, tmp_path / "d.csv")
    for row, people, scanner, factor in ((found[0], 60, "heidelberg_spectralis", 0.45), (found[-1], 80, "zeiss_cirrus", 2)):  # fmt: skip
        assert row["range_kind"] == f"90 % interval, calibrated on {people} participants scanned by {scanner}"
        assert float(row["range_factor"]) == pytest.approx(factor, rel=0.03)


def test_intervals_hold_nine_in_ten_corrections_whichever_way_they_go(tmp_path):
    """A zone that is corrected downwards is compared with how far its range reaches down."""
    rows = table(60)
    for name, end in (("down", 0), ("up", 1)):
        corrected(tmp_path / f"{name}.csv", rows, lambda i, reach: reach * i / 120, end)
        found, _ = calibrate_rows(rows, tmp_path / f"{name}.csv")
        assert float(found[0]["range_factor"]) == pytest.approx(54 / 120, rel=0.03)
    ends = [abs(float(rows[0][column]) - float(rows[0]["centre_um"])) for column in RANGE["centre"]]
    assert abs(ends[0] - ends[1]) > 0.5, "else the test could not tell"


def test_a_column_of_biometry_beside_own_corrections_leaves_no_scan_out(tmp_path):
    """How long an eye is does not say that its zones were scaled by it."""
    rows = table(60)
    corrected(tmp_path / "c.csv", rows, lambda i, reach: reach * i / 120)
    header, *lines = (tmp_path / "c.csv").read_text().splitlines()
    (tmp_path / "b.csv").write_text("\n".join([f"{header},axial_length_mm", *(f"{line},23.6" for line in lines)]))
    assert calibrate_rows(rows, tmp_path / "b.csv") == calibrate_rows(rows, tmp_path / "c.csv")
    # In a table of octfm segment it does.
    cells = [f"{line},{'' if i % 10 else '26'}," for i, line in enumerate(lines)]
    (tmp_path / "s.csv").write_text("\n".join([f"{header},axial_length_mm,zones_note", *cells]))
    said = calibrate_rows(rows, tmp_path / "s.csv")[1]
    assert "54 participants" in said[0] and said[1].startswith("6 scans left out: measured by another axial length")


def test_intervals_need_enough_participants_and_corrections(tmp_path):
    rows = table(60)
    corrected(tmp_path / "few.csv", rows[: LEAST_PARTICIPANTS - 1], lambda i, _: 1.0)
    with pytest.raises(EvaluationError, match=r"at least 50 participants of one scanner.* got 49 of heidelberg"):
        calibrate_rows(rows, tmp_path / "few.csv")
    corrected(tmp_path / "enough.csv", rows[:LEAST_PARTICIPANTS], lambda i, _: 1.0)
    assert "50 participants" in calibrate_rows(rows, tmp_path / "enough.csv")[0][0]["range_kind"]
    expect_enough(tmp_path / "enough.csv", {row["source"] for row in rows})
    with pytest.raises(EvaluationError, match="got 49"):
        expect_enough(tmp_path / "enough.csv", {row["source"] for row in rows[: LEAST_PARTICIPANTS - 1]})
    corrected(tmp_path / "none.csv", table(60, "other"), lambda i, _: 1.0)
    with pytest.raises(EvaluationError, match="got none"):
        calibrate_rows(rows, tmp_path / "none.csv")
    corrected(tmp_path / "same.csv", rows, lambda i, _: 0.0)
    corrected(tmp_path / "nearly.csv", rows, lambda i, _: 9.0 * (i == 0))
    for name in ("same.csv", "nearly.csv"):
        with pytest.raises(EvaluationError, match="90 % of the zones of heidelberg_spectralis equal the table's"):
            calibrate_rows(rows, tmp_path / name)
    (tmp_path / "open.csv").write_text('source,participant\na,"P1\n' + "b,P2\n" * 30_000)
    with pytest.raises(EvaluationError, match=r"open.csv: after line \d+: field larger than field limit"):
        calibrate_rows(rows, tmp_path / "open.csv")
    (tmp_path / "bad.csv").write_text(f"source,participant,centre_um\n{rows[0]['source']},a,thin\n")
    with pytest.raises(EvaluationError, match="centre_um expected µm, got 'thin'"):
        calibrate_rows(rows, tmp_path / "bad.csv")


@pytest.mark.parametrize(
    "edit, problem",
    [
        (lambda lines: [lines[0].replace("source", "file"), *lines[1:]], "found no column source but file, participant"),
        (lambda lines: [lines[0].replace("_um", ""), *lines[1:]], "zones in columns such as centre_um, found source, "),
        (lambda lines: [lines[0].replace("inner_nasal_um", "centre_um"), *lines[1:]], "two columns are called centre_um"),
        (lambda lines: [*lines, lines[1]], "stands in two rows; keep the one that was corrected last"),
        (lambda lines: [line.replace("NA", "") for line in lines[:1]] + [f"{line.rsplit(',', 1)[0]},NA" for line in lines[1:]],
         "got 'NA'; write the number alone"),
        (lambda lines: [lines[0], *(f"D:\\{line}" for line in lines[1:])], r"such as .*, got D:\\.* and none that is there"),
        (lambda lines: [lines[0], *(",".join([(c := line.split(","))[0], "", *c[2:]]) for line in lines[1:21]), *lines[21:]],
         r"got 40 \(20 scans left out: the table names no participant"),
        (lambda lines: ["PK\x03\x04\0", *lines], "got other bytes; export the table as CSV"),
        (lambda lines: [], "found no column source but an empty first line"),
        (lambda lines: [lines[0].replace("participant", "person"), *lines[1:]], "expected a column participant, found source, "),
    ],
)  # fmt: skip
def test_a_wrong_table_of_corrections_is_refused_for_what_is_wrong_in_it(tmp_path, edit, problem):
    """Not with the advice to correct more scans."""
    rows = table(60)
    corrected(tmp_path / "c.csv", rows, lambda i, _: i / 10)
    lines = edit((tmp_path / "c.csv").read_text().splitlines())
    (tmp_path / "wrong.csv").write_text("\n".join(lines))
    with pytest.raises(EvaluationError, match=problem):
        expect_enough(tmp_path / "wrong.csv", {row["source"] for row in rows})


def test_a_person_of_two_spellings_is_one_of_those_that_an_interval_needs(tmp_path):
    rows = table(60)
    corrected(tmp_path / "c.csv", rows, lambda i, _: i / 10)
    text = (tmp_path / "c.csv").read_text().replace(",P1,", ",p0002,")
    (tmp_path / "c.csv").write_text(text)
    _, summary = calibrate_rows(rows, tmp_path / "c.csv")
    assert "59 participants" in summary[0]


def test_tables_of_corrections_from_a_spreadsheet_are_read(tmp_path):
    """Excel's Unicode text and its line sep=;, spaces in the header, rows of nothing but separators."""
    rows = table(60)
    corrected(tmp_path / "c.csv", rows, lambda i, _: i / 10)
    header, *lines = (tmp_path / "c.csv").read_text().splitlines()
    lines = [" " + header.replace(",", " , "), *lines, "," * header.count(",")]
    (tmp_path / "again.csv").write_text("\r\n".join(lines).replace(",", "\t"), encoding="utf-16")
    assert calibrate_rows(rows, tmp_path / "again.csv") == calibrate_rows(rows, tmp_path / "c.csv")
    (tmp_path / "again.csv").write_text("\r\n".join(["sep=;", *lines]).replace(",", ";"))
    assert calibrate_rows(rows, tmp_path / "again.csv") == calibrate_rows(rows, tmp_path / "c.csv")


@pytest.mark.parametrize("name", ["M\udcfcller", "Mu\u0308ller", "Müller"])
def test_scans_with_umlauts_count_in_tables_from_a_spreadsheet(tmp_path, name):
    """Excel saves CSV in Windows' code; names of files may be in it as well, or have two dots of their own on macOS."""
    rows = [row | {"source": f"{name}/{row['source']}"} for row in table(60)]
    corrected(
        tmp_path / "c.csv",
        [row | {"source": row["source"].replace(name, "Müller")} for row in rows],
        lambda i, _: i / 10,
    )
    content = (tmp_path / "c.csv").read_text("utf-8")
    (tmp_path / "c.csv").write_text(content, "cp1252")
    assert "60 participants" in calibrate_rows(rows, tmp_path / "c.csv")[1][0]


def test_the_command_calibrates_a_table(tmp_path, monkeypatch):
    rows, out = table(55), tmp_path / "table.csv"
    for i, row in enumerate(rows):  # readable places, so that the table is complete and nothing is segmented
        row["source"] = str(tmp_path / f"{i}.npz")
        np.savez(row["source"], volume=np.zeros((2, 8, 8), np.uint8), spacing_mm=(0.1, 0.004, 0.05))
    rows = [row | {"model": load_finder().model} for row in rows]
    save_table(rows, out)
    corrected(tmp_path / "c.csv", rows, lambda i, _: i / 10)
    words = ["segment", *(row["source"] for row in rows), "--out", str(out), "--calibrate", str(tmp_path / "c.csv")]
    done = invoke(*words)
    assert done.exit_code == 0 and "55 participants" in done.output, done.output
    assert all(row["range_kind"].startswith("90 % interval") for row in read_table(out))
    corrected(tmp_path / "few.csv", rows[:49], lambda i, _: i / 10)
    monkeypatch.setattr(
        "octfm.cli.segment_scans.write_table", lambda *_, **__: pytest.fail("segmented all scans first")
    )
    too_few = invoke(*words[:-1], tmp_path / "few.csv")
    assert isinstance(too_few.exception, EvaluationError) and "got 49; correct more" in str(too_few.exception)
    for wrong in (["--sample"], [rows[0]["source"]]):
        refused = invoke("segment", *wrong, "--calibrate", tmp_path / "c.csv")
        assert isinstance(refused.exception, ConfigError)


def test_every_zone_has_columns_for_its_range():
    assert set(ZONES) <= set(RANGE) and len({column for pair in RANGE.values() for column in pair}) == 2 * len(UNIT)
