"""octfm agree: what is compared, what is left out, whose rows are resampled together, and the page."""

import csv
import re
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from octfm.errors import EvaluationError
from octfm.evaluation import agreement
from octfm.evaluation.statistics import bootstrap
from octfm.layers.rows import ACCEPTED, COLUMNS
from octfm.layers.zones import DEVICE_UNIT, UNIT
from octfm.report.segmented.agreement import sentence, summary_lines, write_agreement
from octfm.report.trust.figures import bland_altman
from octfm.trust.device_agreement import device_agreement
from octfm.volume.etdrs import ZONES
from support.accessible import assert_accessible
from support.browser import assert_renders, needs_chromium
from support.command_line import invoke

pytestmark = pytest.mark.drawn


def rows_of(people: int = 12, *, bias: float = 4.0) -> list[dict[str, str]]:
    """Both eyes of each participant, whose difference from the device is mostly their own."""
    rng = np.random.default_rng(3)
    rows = []
    for person in range(people):
        own = rng.normal(bias, 3)
        for side in "RL":
            row = dict.fromkeys(COLUMNS, "") | {
                "source": f"{person}{side}.xml",
                "laterality": side,
                "verdict": ACCEPTED,
            }
            for zone in ZONES:
                device = rng.normal(300, 20)
                row |= {UNIT[zone]: f"{device + own + rng.normal(0, 0.1):.2f}", DEVICE_UNIT[zone]: f"{device:.2f}"}
            rows.append(row | {"participant": f"p{person}"})
    return rows


def write(path: Path, rows: list[dict[str, str]], leave_out=()) -> Path:
    with path.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.DictWriter(file, [c for c in rows[0] if c not in leave_out], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_bias_and_limits_are_those_of_bland_and_altman(tmp_path):
    rows = rows_of()[::2]
    centre = device_agreement(write(tmp_path / "t.csv", rows))["zones"][0]
    apart = [float(row[UNIT["centre"]]) - float(row[DEVICE_UNIT["centre"]]) for row in rows]
    found = centre["bland_altman"]
    level = [(float(row[UNIT["centre"]]) + float(row[DEVICE_UNIT["centre"]])) / 2 for row in rows]
    np.testing.assert_allclose(centre["points"], np.transpose([level, apart]))
    assert found["bias"]["estimate"] == pytest.approx(np.mean(apart))
    assert found["upper"]["estimate"] == pytest.approx(np.mean(apart) + 1.96 * np.std(apart, ddof=1))
    assert found["lower"]["low"] < found["lower"]["estimate"] < found["lower"]["high"]


@pytest.mark.usefixtures("undrawn")
def test_differences_that_grow_with_thickness_are_named(tmp_path):
    """octfm measures 20 % more than the device in the outer superior zone: its limits hold in the middle only."""
    rows = rows_of(20)
    plain = device_agreement(write(tmp_path / "a.csv", rows))
    for row in rows:
        row[UNIT["outer superior"]] = f"{1.2 * float(row[UNIT['outer superior']]) - 60:.2f}"
    grown = device_agreement(write(tmp_path / "b.csv", rows))
    found = next(z for z in grown["zones"] if z["target"] == "outer superior")
    slope, points = found["slope_per_100_um"], np.array(found["points"])
    assert slope["estimate"] == pytest.approx(100 * np.polyfit(*points.T, 1)[0]) and 5 < slope["low"] < slope["high"]
    words = "The difference changes with thickness in outer superior (slope not 0, after correction for 9 zones)"
    page = write_agreement(grown, tmp_path / "agree.html", []).read_text(encoding="utf-8")
    assert page.count(words) == 1 and sum(words in line for line in summary_lines(grown)) == 1
    assert "changes with thickness" not in " ".join(summary_lines(plain))
    assert all(z["slope_per_100_um"] is None for z in device_agreement(write(tmp_path / "c.csv", rows[:8]))["zones"])


def test_a_slope_counts_after_holms_correction_over_zones(tmp_path, monkeypatch):
    chances = iter([0.5, 0.02, 0.5, 0.001, 0.5, 0.5, 0.03, 0.5, 0.007])
    slope = {"estimate": 1.0, "low": 0.5, "high": 1.5}
    monkeypatch.setattr(agreement, "slope", lambda *_: slope | {"p": next(chances)})
    found = device_agreement(write(tmp_path / "t.csv", rows_of()))
    assert found["changing"] == [ZONES[3]]  # 0.007 of 8 zones that are left is 0.056


def test_two_eyes_alike_narrow_no_slope():
    """Their slope is that of one eye of each participant, and as uncertain."""
    rng = np.random.default_rng(0)
    level, person = rng.normal(300, 20, 40), np.arange(40).astype(str)
    difference = 0.05 * level + rng.normal(0, 5, 40)
    one, two = (
        agreement.slope(
            np.tile(difference, n),
            np.tile(level, n),
            who,
            lambda metric, who=who: bootstrap(metric, who, resamples=500),
        )
        for n, who in ((1, person), (2, np.tile(person, 2)))
    )
    assert two == pytest.approx(one) and one["high"] - one["low"] > 0.1


def test_two_tables_that_differ_in_one_scan_have_a_slope_of_no_astronomical_interval():
    """As before and after a correction: most resamples then hold no difference, and their error was one of rounding."""
    level, person = np.random.default_rng(1).normal(3, 0.2, 20), np.arange(20).astype(str)
    found = agreement.slope(np.eye(20)[0], level, person, lambda metric: bootstrap(metric, person, resamples=200))
    assert all(abs(found[name]) < 100 for name in ("estimate", "low", "high"))


def test_follow_up_scans_of_one_participant_do_not_narrow_the_limits(tmp_path):
    """Twenty visits of one of twelve participants look alike: others differ as much as before."""
    rows = rows_of()
    plain = device_agreement(write(tmp_path / "a.csv", rows))["zones"][0]["bland_altman"]
    middle = min(rows, key=lambda row: abs(float(row[UNIT["centre"]]) - float(row[DEVICE_UNIT["centre"]]) - 4))
    visits = [middle | {"source": f"visit{i}.xml"} for i in range(20)]
    often = device_agreement(write(tmp_path / "b.csv", [*rows, *visits]))["zones"][0]["bland_altman"]
    assert often["sd"] > 0.95 * plain["sd"]


@pytest.mark.usefixtures("undrawn")
def test_few_participants_are_not_said_to_hold_95_percent_of_scans(tmp_path):
    text = {}
    for people in (1, 5, 12):
        result = device_agreement(write(tmp_path / "t.csv", rows_of(people)))
        text[people] = sentence(result)
        assert "µm on average" in write_agreement(result, tmp_path / "agree.html", []).read_text(encoding="utf-8")
    one = write_agreement(device_agreement(write(tmp_path / "t.csv", rows_of(1)[:1])), tmp_path / "agree.html", [])
    assert ">1 of 1 scan<" in one.read_text(encoding="utf-8")
    assert "2 scans of 1 participant, too few for limits of agreement" in text[1]
    assert "10 scans of 5 participants are too few to expect others there" in text[5]
    assert (
        "95\u00a0% of scans are expected between" in text[12] and "if differences are normally distributed" in text[12]
    )


def test_scans_in_which_a_grid_lies_beside_the_fovea_are_counted(tmp_path):
    rows = rows_of()
    rows[0]["grid_centre"], rows[1]["grid_centre"] = "scan", "pit"
    for row in rows[2:5]:
        row["device_note"] = "the device's grid lies in the middle of the fundus image, where nobody has moved it"
    found = device_agreement(write(tmp_path / "t.csv", rows))
    assert (found["ours_not_on_fovea"], found["not_on_fovea"]) == (1, 3)


def test_two_eyes_of_a_participant_do_not_count_as_two_participants(tmp_path):
    rows = rows_of()
    named = device_agreement(write(tmp_path / "a.csv", rows))
    alone = device_agreement(write(tmp_path / "b.csv", rows, leave_out=("participant",)))
    width = [r["zones"][0]["bland_altman"]["bias"] for r in (named, alone)]
    width = [bias["high"] - bias["low"] for bias in width]
    assert width[0] > 1.25 * width[1], "eyes that differ alike carry the information of one"
    assert (named["participants"], named["used"], named["repeated"]) == (12, 24, 0)
    assert alone["participant_column"] is None and alone["participants"] is None
    again = device_agreement(write(tmp_path / "c.csv", [*rows, rows[0] | {"source": "again.xml"}]))
    assert again["repeated"] == 1
    with pytest.raises(EvaluationError, match=r"c\.csv: 0R\.xml stands in rows 2 and 26, .*; delete one of them"):
        device_agreement(write(tmp_path / "c.csv", [*rows, rows[0]]))


def test_ids_that_differ_in_zeros_are_one_participant(tmp_path):
    """As two scanners write them: the eyes of one person are no more certain than under one id."""
    rows = [row | {"participant": row["participant"].replace("p", "10")} for row in rows_of(12)]
    one = device_agreement(write(tmp_path / "a.csv", rows))
    padded = [row | {"participant": row["participant"].zfill(8 * (i % 2))} for i, row in enumerate(rows)]
    two = device_agreement(write(tmp_path / "b.csv", padded))
    assert two["participants"] == 12 and two["zones"][0]["bland_altman"]["sd"] == one["zones"][0]["bland_altman"]["sd"]


def test_what_cannot_be_compared_is_left_out_and_counted(tmp_path):
    rows = rows_of()
    rows[0]["problem"], rows[1]["verdict"] = "damaged_file: x", "dark"
    rows[2] |= dict.fromkeys(DEVICE_UNIT.values(), "")
    rows[3] |= dict.fromkeys(UNIT.values(), "")
    rows[4][UNIT["centre"]] = " "  # as a spreadsheet may leave a blank
    rows[5][UNIT["centre"]] = f"{float(rows[5][DEVICE_UNIT['centre']]) + 40}"
    rows[7][UNIT["centre"]] = f"{float(rows[7][DEVICE_UNIT['centre']]) - 60}"
    # Corrections of a page with an axial length: zones of another size than the device's.
    rows[6] |= {"axial_length_mm": "27.5"}
    found = device_agreement(write(tmp_path / "t.csv", rows))
    assert list(found["left_out"].values()) == [1, 1, 1, 1, 1] and found["used"] == 19
    assert found["zones"][0]["without_ours"] == 1 and found["zones"][0]["n_eyes"] == 18
    assert [each["source"] for each in found["large"][:2]] == [rows[7]["source"], rows[5]["source"]]
    assert [each["difference"] for each in found["large"][:2]] == pytest.approx([-60, 40])


def test_an_axial_length_that_is_no_number_is_named(tmp_path):
    rows = rows_of()
    rows[7]["axial_length_mm"] = "long"
    with pytest.raises(EvaluationError, match=r"3L.xml: axial_length_mm expected a number or nothing, got 'long'"):
        device_agreement(write(tmp_path / "t.csv", rows))


def test_the_page_names_no_file_or_folder(tmp_path):
    """Folders and files may be called after people; the row leads to them."""
    rows = rows_of()
    rows[5] |= {
        "source": "/clinic/Meier/Evangelina.xml",
        UNIT["centre"]: f"{float(rows[5][DEVICE_UNIT['centre']]) + 40}",
    }
    (tmp_path / "Meier").mkdir()
    table = write(tmp_path / "Meier" / "Evangelina.csv", rows)
    result = device_agreement(table)
    assert result["large"][0]["row"] == 7 and result["large"][0]["source"] == "/clinic/Meier/Evangelina.xml"
    command = f"octfm agree {table} --out /clinic/Meier/Evangelina.html"
    page = write_agreement(result, tmp_path / "agree.html", [command]).read_text(encoding="utf-8")
    assert "Meier" not in page and "Evangelina" not in page and str(tmp_path) not in page
    assert "octfm agree" in page and '<td class="n">7</td><td>centre</td>' in page


@pytest.mark.usefixtures("undrawn")
def test_a_note_of_the_devices_table_is_escaped_and_short(tmp_path):
    rows = rows_of()
    rows[5] |= {"device_note": "<b>" + "grid " * 100, UNIT["centre"]: f"{float(rows[5][DEVICE_UNIT['centre']]) + 40}"}
    table = write(tmp_path / "t.csv", rows)
    page = write_agreement(device_agreement(table), tmp_path / "agree.html", []).read_text(encoding="utf-8")
    assert "&lt;b&gt;grid grid" in page and "<b>" not in page and page.count("grid ") < 30 and "…</td>" in page


def test_fewer_than_ten_participants_get_no_interval(tmp_path):
    found = device_agreement(write(tmp_path / "t.csv", rows_of(5)))["zones"][0]["bland_altman"]
    assert found["bias"]["low"] is None and found["bias"]["estimate"] is not None


def test_the_devices_zones_may_come_from_another_table(tmp_path):
    rows = rows_of()
    whole = device_agreement(write(tmp_path / "t.csv", rows))
    others = [
        {"participant": row["participant"], "source": row["source"], "laterality": row["laterality"]}
        | {UNIT[zone]: row[DEVICE_UNIT[zone]] for zone in ZONES}
        for row in rows[::-1]
    ]
    bare = write(tmp_path / "bare.csv", rows, leave_out=DEVICE_UNIT.values())
    for left_out in ((), ("source",)):
        device = write(tmp_path / "device.csv", others, leave_out=left_out)
        assert device_agreement(bare, device)["zones"] == whole["zones"]
    # Nor does a zone that the device's table leaves blank come from the first table.
    blank = [others[0] | {UNIT["centre"]: ""}, *others[1:]]
    some = device_agreement(write(tmp_path / "t.csv", rows), write(tmp_path / "blank.csv", blank))["zones"]
    assert (some[0]["n_eyes"], some[1]["n_eyes"]) == (23, 24)
    nameless = write(tmp_path / "nameless.csv", rows, leave_out=("participant", *DEVICE_UNIT.values()))
    found = device_agreement(nameless, write(tmp_path / "device.csv", others))
    assert found["participants"] == 12 and found["zones"] == whole["zones"], (
        "the device's table says whose eyes they are"
    )
    with pytest.raises(EvaluationError, match="stands in two rows"):
        device_agreement(bare, write(tmp_path / "twice.csv", [*others, others[0]]))
    with pytest.raises(EvaluationError, match="no eye has zones"):
        device_agreement(bare)
    with pytest.raises(EvaluationError, match="expected µm, got 'thick'"):
        device_agreement(write(tmp_path / "odd.csv", [row | {UNIT["centre"]: "thick"} for row in rows]))
    with pytest.raises(EvaluationError, match="expected a table of octfm segment"):
        device_agreement(write(tmp_path / "other.csv", [{"a": "1"}]))


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    rows = rows_of()
    rows[5][UNIT["centre"]] = f"{float(rows[5][DEVICE_UNIT['centre']]) + 40}"
    table = write(folder / "t.csv", rows, leave_out=("participant",))
    done = invoke("agree", table, "--out", folder / "agree.html")
    assert done.exit_code == 0, done.output
    assert "24 of 24 rows used" in done.output and "every row for an independent eye" in done.output
    return folder / "agree.html"


def test_the_page_says_what_it_counts(page):
    assert_accessible(page.read_text())
    text = " ".join(page.read_text().split())
    for needed in ("24 rows in the table, 24 compared", "The table names no participants", "not a medical device"):
        assert needed in text, needed
    assert '<td class="n">7</td><td>centre</td>' in text, "the largest difference is listed"
    assert text.count("<svg") == len(ZONES)
    axes = re.findall(r">(mean of both[^<]*|difference[^<]*)</text>", text)
    assert axes == ["mean of both, µm", "difference, µm"] * len(ZONES)


@needs_chromium
def test_the_page_renders_offline(page, tmp_path):
    assert_renders(page, "Limits of agreement", tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_names_that_are_not_utf8_make_no_page_fail(tmp_path):
    rows = rows_of(bias=30.0)
    rows[0]["source"] = "eye\udcff.xml"
    table = write(tmp_path / "t.csv", rows)
    done = invoke("agree", table, "--out", tmp_path / "agree.html")
    assert done.exit_code == 0, done.exception
    assert "Limits of agreement" in (tmp_path / "agree.html").read_text(encoding="utf-8")


@pytest.mark.usefixtures("undrawn")
def test_a_zone_that_octfm_never_has_is_not_left_unsaid(tmp_path):
    """As the centre, where B-scans lie more than half a millimetre apart."""
    rows = [row | {UNIT["centre"]: ""} for row in rows_of(3)]
    result = device_agreement(write(tmp_path / "t.csv", rows))
    centre = result["zones"][0]
    assert (centre["target"], centre["n_eyes"], centre["without_ours"]) == ("centre", 0, 6)
    page = write_agreement(result, tmp_path / "agree.html", []).read_text(encoding="utf-8")
    assert "No scan has a central zone of octfm and of the device: octfm lacks it in 6 scans." in page
    assert summary_lines(result)[1].endswith("n    0  octfm lacks it in 6 scans")


def test_the_terminal_has_the_differences_of_one_participant_too(tmp_path):
    first = summary_lines(device_agreement(write(tmp_path / "t.csv", rows_of(1))))[1]
    assert first.split()[:3] == ["centre", "n", "2"] and "µm on average, too few for limits" in first


@pytest.mark.usefixtures("undrawn")
def test_scans_corrected_by_hand_are_counted(tmp_path):
    rows = rows_of()
    rows[3]["corrected_bscans"] = "2"
    result = device_agreement(write(tmp_path / "t.csv", rows))
    page = write_agreement(result, tmp_path / "agree.html", []).read_text(encoding="utf-8")
    assert "1 scan was corrected by hand" in page
    assert any(line.startswith("  1 of them corrected by hand") for line in summary_lines(result))


def test_one_row_of_the_device_is_not_compared_with_every_visit(tmp_path):
    """Its baseline thickness is no measurement of the eye half a year later."""
    rows = rows_of(12)
    visits = [row | {"source": f"{visit}/{row['source']}"} for visit in ("V0", "V6") for row in rows]
    device = [{"participant": r["participant"], "laterality": r["laterality"], "centre_um": "300"} for r in rows]
    with pytest.raises(EvaluationError, match=r"participant p0, laterality R, of whom .*t\.csv has 2 scans; which"):
        device_agreement(write(tmp_path / "t.csv", visits), write(tmp_path / "d.csv", device))
    # One of the two could not be read: whether it is the one that the device measured is not known either.
    visits[0] |= {"problem": "truncated", "centre_um": ""}
    with pytest.raises(EvaluationError, match="has 2 scans"):
        device_agreement(write(tmp_path / "t.csv", visits[:1] + visits[24:]), write(tmp_path / "d.csv", device))
    by_source = [{"source": row["source"], "centre_um": "300"} for row in visits]
    assert device_agreement(write(tmp_path / "t.csv", visits), write(tmp_path / "d.csv", by_source))["used"] == 47
    # A line of the same eye has no zones, so there is nothing to ask.
    line = dict.fromkeys(COLUMNS, "") | {"source": "l.dcm", "bscans": "1", "verdict": ACCEPTED}
    line |= {name: rows[0][name] for name in ("participant", "laterality")}
    result = device_agreement(write(tmp_path / "t.csv", [*rows, line]), write(tmp_path / "d.csv", device))
    assert result["used"] == 24 and result["left_out"]["without ours"] == 1


@pytest.mark.usefixtures("undrawn")
def test_scanners_that_are_pooled_are_named(tmp_path):
    rows = [row | {"scanner": "topcon_triton" if i % 3 else "zeiss_cirrus"} for i, row in enumerate(rows_of())]
    result = device_agreement(write(tmp_path / "t.csv", rows))
    page = write_agreement(result, tmp_path / "agree.html", []).read_text(encoding="utf-8")
    for text in (page, "\n".join(summary_lines(result))):
        assert "several scanners are pooled (16 of Topcon Triton, 8 of Zeiss Cirrus)" in text
    alone = device_agreement(write(tmp_path / "t.csv", [row | {"scanner": "zeiss_cirrus"} for row in rows]))
    assert not any("pooled" in line for line in summary_lines(alone))


def test_rows_that_name_nobody_are_no_pair(tmp_path):
    rows = rows_of(3)
    for row in rows[:4]:
        row["participant"] = ""
    device = [{"participant": "", "laterality": "R", "centre_um": "400"}]
    device += [{"participant": "p2", "laterality": eye, "centre_um": "300"} for eye in "RL"]
    table = write(tmp_path / "t.csv", rows, leave_out=DEVICE_UNIT.values())
    result = device_agreement(table, write(tmp_path / "d.csv", device))
    assert (result["used"], result["left_out"]["without the device's zones"]) == (2, 4)


def test_tables_of_a_spreadsheet_with_decimal_commas_are_read(tmp_path):
    """Excel in most of Europe writes semicolons, decimal commas and a byte order mark."""
    rows = rows_of()
    whole = device_agreement(write(tmp_path / "t.csv", rows))

    def saved(name: str, columns: list[str]) -> Path:
        lines = [";".join(columns), *(";".join(row[c].replace(".", ",") for c in columns) for row in rows)]
        (tmp_path / name).write_text("\r\n".join(lines) + "\r\n", encoding="utf-8-sig")
        return tmp_path / name

    again = saved("again.csv", [*COLUMNS])
    assert device_agreement(again)["zones"] == whole["zones"]
    device = saved("device.csv", ["participant", "laterality", *DEVICE_UNIT.values()])
    assert device_agreement(again, device)["zones"] == whole["zones"]
    rows[0][UNIT["centre"]] = "12.345"  # saved as 12,345, which may be in thousands
    with pytest.raises(EvaluationError, match=r"again\.csv: .*centre_um expected µm, got '12,345'"):
        device_agreement(saved("again.csv", [*COLUMNS]))


def test_a_devices_table_that_names_eyes_otherwise_is_refused_for_it(tmp_path):
    """A word for the left eye that is not known must not leave out all left eyes."""
    table = write(tmp_path / "t.csv", rows_of(3))
    device = [
        {"participant": row["participant"], "laterality": row["laterality"], "centre_um": "300"} for row in rows_of(3)
    ]

    def refused(rows: list[dict[str, str]], problem: str) -> None:
        with pytest.raises(EvaluationError, match=problem):
            device_agreement(table, write(tmp_path / "d.csv", rows))

    refused(
        [row | {"laterality": row["laterality"].replace("L", "links")} for row in device], "laterality is links; exp"
    )
    refused([row | {"participant": "x" + row["participant"]} for row in device],
            "names none of the eyes of .*: participant xp0, laterality . here, participant p0, laterality . there")  # fmt: skip
    refused([row | {"laterality": ""} for row in device], "participant nothing, laterality nothing here")
    refused(
        [{"PatientID": row["participant"], "Eye": "OD", "C0": "300"} for row in device], "found PatientID, Eye, C0$"
    )
    refused(
        [row | {"center_um": row.pop("centre_um")} for row in [dict(row) for row in device]], "neither but .*center_um"
    )
    numbered = [row | {"participant": f"{i}"} for i, row in enumerate(rows_of(3))]
    by_file = [{"source": row["source"], "laterality": "unbekannt", "centre_um": "300"} for row in numbered]
    assert device_agreement(table, write(tmp_path / "d.csv", by_file))["used"] == 6
    table = write(tmp_path / "t.csv", numbered)
    device = [row | {"participant": f"{i}.0"} for i, row in enumerate(device)]  # as pandas writes them beside gaps
    assert device_agreement(table, write(tmp_path / "d.csv", device))["used"] == 6


def test_a_table_without_eyes_is_not_matched_by_them(tmp_path):
    table = write(tmp_path / "t.csv", rows_of(3), leave_out=("laterality",))
    device = write(tmp_path / "d.csv", [{"participant": "p1", "laterality": "R", "centre_um": "300"}])
    with pytest.raises(EvaluationError, match=r"expected a column source .*, and no laterality in .*t\.csv"):
        device_agreement(table, device)


def test_rows_of_the_other_eye_and_shifted_rows_are_refused(tmp_path):
    table = write(tmp_path / "t.csv", rows_of(1))
    device = [{"source": f"0{eye}.xml", "laterality": "OD", "centre_um": "400"} for eye in "RL"]
    with pytest.raises(EvaluationError, match=r"0L\.xml is eye OD, in .*t\.csv eye L; zones of two eyes are no pair"):
        device_agreement(table, write(tmp_path / "d.csv", device))
    (tmp_path / "d.csv").write_text("source,centre_um,inner_superior_um\n0R.xml,250,330,\n0L.xml,Müller, 250,330\n")
    with pytest.raises(EvaluationError, match=r"d\.csv: line 3: more cells than the header has columns"):
        device_agreement(table, tmp_path / "d.csv")
    (tmp_path / "d.csv").write_text("source,centre_um,inner_superior_um\n0R.xml,250\n,\n0L.xml,250,330\n")
    assert device_agreement(table, tmp_path / "d.csv")["used"] == 2, "short and blank rows lack cells at their end"


@pytest.mark.parametrize("cell", ["0.268", "0", "-9999", "268000"])
def test_zones_that_cannot_be_micrometres_are_refused(tmp_path, cell):
    """Millimetres would be compared without a word, and 0 or -1 stand for zones without a value."""
    table = write(tmp_path / "t.csv", rows_of(3), leave_out=DEVICE_UNIT.values())
    device = [{"participant": "p1", "laterality": "R", "centre_um": "300", "inner_nasal_um": cell}]
    refused = rf"d\.csv: p1, R: inner_nasal_um expected µm between 10 and 3000, got '{cell}'"
    with pytest.raises(EvaluationError, match=refused):
        device_agreement(table, write(tmp_path / "d.csv", device))


def test_eyes_of_another_table_may_be_spelt_otherwise(tmp_path):
    table = write(tmp_path / "t.csv", rows_of(3), leave_out=DEVICE_UNIT.values())
    device = [
        {"participant": f"p{i}", "laterality": eye, "centre_um": "300"} for i in range(3) for eye in ("OD", "left")
    ]
    assert device_agreement(table, write(tmp_path / "d.csv", device))["used"] == 6
    with pytest.raises(EvaluationError, match=r"p0, R stands in two rows"):
        device_agreement(table, write(tmp_path / "d.csv", [*device, device[0] | {"laterality": "R"}]))
    for spelling in ("P-{}", "{}.0", "000{}"):
        others = [row | {"participant": spelling.format(row["participant"][1:])} for row in device]
        assert device_agreement(table, write(tmp_path / "d.csv", others))["used"] == 6
    others = write(tmp_path / "d.csv", [row | {"participant": f"Q{row['participant']}"} for row in device])
    with pytest.raises(EvaluationError, match=r"names none of the eyes of .*participant Qp0, laterality OD here"):
        device_agreement(table, others)


def test_a_plot_of_many_scans_shows_the_largest_difference_and_says_how_many_it_draws():
    rng = np.random.default_rng(0)
    points = [[float(m), float(d)] for m, d in zip(rng.normal(300, 20, 600), rng.normal(0, 3, 600), strict=True)]
    points[-1][1] = 90.0
    line = {"estimate": 0.0, "low": None, "high": None}
    pair = {"target": "centre", "a": "octfm", "b": "device", "quantity": "µm", "points": points}
    chart = bland_altman(pair | {"bland_altman": dict.fromkeys(("lower", "bias", "upper"), line)}, "Centre", "")
    assert "Of 600 points 500 are drawn" in chart.caption
    assert ">80</text>" in chart.svg, "the axis reaches the largest difference"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252", "utf-16"])
def test_umlauts_match_however_a_table_writes_them(tmp_path, encoding):
    """Folders of macOS have u and two dots for ü, and Excel saves CSV in Windows' code: these eyes were left out as
    without the device's zones."""
    rows = [row | {"source": f"Mu\u0308ller/{row['source']}"} for row in rows_of(3)]
    rows[0]["source"] = "M\udcfcller/raw.xml"
    device = [{"source": unicodedata.normalize("NFC", row["source"]), "centre_um": "300"} for row in rows]
    device[0]["source"] = "Müller/raw.xml"
    path = write(tmp_path / "d.csv", device)
    path.write_text(path.read_text("utf-8"), encoding)
    assert device_agreement(write(tmp_path / "t.csv", rows), path)["used"] == len(rows)
