"""The data-health page says what the scan found, names nobody, and a pipeline can stop on it."""

import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import octfm
from octfm.catalog.acquisition import FLAGS, Acquisition
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.scan import scan
from octfm.display import readable
from octfm.formats.reasons import REASONS
from octfm.phantom import write_phantom
from octfm.report.data_health import AXES, EXTENTS, SHOWN, by_scanner, laterality_doubts, outliers, write_data_health
from support.accessible import assert_accessible
from support.browser import assert_renders, needs_chromium
from support.command_line import octfm_here
from support.dicom_files import write_oct_dicom

pytestmark = pytest.mark.drawn

SPACING_MM = (0.12, 0.0039, 0.0115)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("clinic") / "cohort", 13, 3, size=(8, 64, 48), defects=1.0, workers=1)


@pytest.fixture(scope="module")
def catalog(clinic) -> Catalog:
    return scan(clinic, workers=0)


@pytest.fixture(scope="module")
def page(catalog, tmp_path_factory) -> Path:
    return write_data_health(catalog, tmp_path_factory.mktemp("page") / "data_health.html")


def text_of(page: Path) -> str:
    body = page.read_text().split("</head>")[1]
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<svg.*?</svg>", " ", body, flags=re.DOTALL))).replace(
        "&nbsp;", " "
    )


def test_page_says_what_the_catalog_says(catalog, page):
    text, summary = text_of(page), catalog.summary()
    assert (
        f"Accepted: {summary['accepted']} volumes of 13 participants ({summary['eyes']} eyes of known side); rejected: "
        f"{summary['rejected']} files ({100 * catalog.reject_share:.1f} %); skipped on purpose: {summary['skipped']}."
        in text
    )
    for code, count in (summary["rejects"] | summary["skips"]).items():
        assert re.search(
            rf"{code} {count} [\d.,]+ {re.escape(REASONS[code].meaning)} {re.escape(REASONS[code].fix)}", text
        ), code
    for flag, count in summary["flags"].items():
        assert f"{flag} {count} {FLAGS[flag]}" in text
    for site in {a.participant_labels["clinical_site"] for a in catalog.acquisitions}:
        people = {a.participant for a in catalog.acquisitions if a.participant_labels["clinical_site"] == site}
        volumes = [a for a in catalog.acquisitions if a.participant in people]
        assert f"{site} {len(volumes)} {len(people)} " in text
    for scanner in summary["scanners"]:
        sides = [a.laterality for a in catalog.acquisitions if a.scanner == scanner]
        assert f"{len(sides)} " in text and f"{sides.count('R')} {sides.count('L')} {sides.count(None)}" in text
    for split, count in summary["participants_per_split"].items():
        assert re.search(rf"\b{split} {count} \d+ ", text, re.I), split
    for scanner, size in {(a.scanner, " × ".join(map(str, a.shape))) for a in catalog.acquisitions}:
        same = [a for a in catalog.acquisitions if a.scanner == scanner and " × ".join(map(str, a.shape)) == size]
        assert re.search(rf"{readable(scanner)} {size} {len(same)} ", text), (scanner, size)
    for name in (*AXES, *EXTENTS):
        assert name[0].upper() + name[1:] in text and f"{name}: " in page.read_text(), (
            "a chart, and its words for those who cannot see it"
        )


def test_page_is_self_contained_and_names_no_file_folder_or_person(catalog, page):
    html = page.read_text()
    assert_accessible(html)
    assert not re.search(r"<script|<link rel=.stylesheet|@import|(src|href)=\"(?!data:|#)|url\((?!#)", html)
    assert "default-src 'none'" in html and len(html) < 10_000_000
    shown = len(outliers(catalog.acquisitions)) + len(laterality_doubts(catalog.acquisitions)[:SHOWN])
    assert html.count("<img ") == 2 * shown > 0
    for secret in {catalog.root, Path(catalog.root).name, *(a.participant for a in catalog.acquisitions)}:
        assert secret not in html
    for a in catalog.acquisitions:
        assert Path(a.uri).name not in html and a.sop_instance_uid not in html


def write_clinic(root: Path, odd_mm=SPACING_MM, count=6, **odd) -> Catalog:
    for i in range(count):
        voxels = np.random.default_rng(i).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        mm, other = (odd_mm, odd) if i == 3 else (SPACING_MM, {})
        write_oct_dicom(root / f"{i:02}.dcm", voxels, mm, participant=str(i), sop_instance_uid=f"1.2.{i}", **other)
    return scan(root, workers=0)


@pytest.mark.usefixtures("undrawn")
def test_the_volume_unlike_its_kind_is_shown_first(tmp_path):
    assert outliers(write_clinic(tmp_path / "same").acquisitions) == []
    catalog = write_clinic(tmp_path / "odd", (0.48, 0.0039, 0.0115))
    (odd,) = outliers(catalog.acquisitions)
    assert (odd.row, odd.why, odd.distance) == (
        3,
        "B-scan distance 0.48 mm, usual for its kind 0.12 mm",
        pytest.approx(4),
    )
    assert "Row 3: Heidelberg Spectralis" in text_of(write_data_health(catalog, tmp_path / "a.html"))
    without = write_data_health(catalog, tmp_path / "b.html", images=False).read_text()
    assert "<img" not in without and "Row 3" in without
    flagged = write_clinic(tmp_path / "flagged", count=12, laterality=None)
    assert outliers(flagged.acquisitions) == [] and [d.row for d in laterality_doubts(flagged.acquisitions)] == [3]


def flagged_clinic(flags: dict[int, tuple[str | None, tuple[str, ...]]]) -> list[Acquisition]:
    """Rows of two scanners; `flags` gives some another side and flags."""
    rows = []
    for i in range(30):
        side, own = flags.get(i, ("RL"[i % 2], ()))
        scanner = ("heidelberg_spectralis", "zeiss_cirrus")[i % 2]
        rows.append(
            Acquisition(
                f"/{i}.dcm", f"P{i}", side, scanner, "macula", (4, 32, 36), SPACING_MM, "shared", f"1.2.{i}", flags=own
            )
        )
    return rows


@pytest.mark.usefixtures("undrawn")
def test_the_laterality_audit_is_a_table_of_its_own(tmp_path):
    """The gravest first, whatever else the page shows; what is stated beside what anatomy says."""
    rows = flagged_clinic({
        2: (None, ("laterality_unknown", "disc_on_the_left")), 5: ("R", ("laterality_contradicts_anatomy",)),
        7: ("L", ("nominal_spacing", "laterality_contradicts_anatomy")), 8: (None, ("laterality_conflict", "disc_on_the_right")),
        9: (None, ("laterality_unknown", "disc_sides_alike")), 11: ("L", ("disc_band_unsure",)),
    })  # fmt: skip
    found = [(d.row, d.stated, d.anatomy) for d in laterality_doubts(rows)]
    assert found == [
        (5, "right", "left"),
        (7, "left", "right"),
        (8, "two eyes", "right"),
        (2, "nothing", "left"),
        (9, "nothing", "cannot tell: sides alike"),
    ]
    assert by_scanner(rows) == [("heidelberg_spectralis", 13, 2), ("zeiss_cirrus", 14, 1)]
    assert [(o.row, o.why) for o in outliers(rows)] == [(7, FLAGS["nominal_spacing"])], "the others are in the table"
    catalog = Catalog(str(tmp_path), tuple(rows), (), pixels=True)
    looked = text_of(write_data_health(catalog, tmp_path / "a.html", images=False))
    assert "5 Zeiss Cirrus right left Its optic disc lies on the side of the other eye" in looked
    assert "Zeiss Cirrus 15 11 2 0 2 0 1 1" in looked and "Pixels were not read" not in looked
    plain = Catalog(str(tmp_path), tuple(flagged_clinic({})), ())
    text = text_of(write_data_health(plain, tmp_path / "b.html", images=False))
    assert "Pixels were not read" in text and "octfm scan --pixels" in text and "Zeiss Cirrus 15 0" in text
    many = Catalog(
        str(tmp_path),
        tuple(flagged_clinic(dict.fromkeys(range(SHOWN + 3), ("R", ("laterality_contradicts_anatomy",))))),
        (),
        pixels=True,
    )
    assert "3 more are flagged in catalog.parquet" in text_of(
        write_data_health(many, tmp_path / "c.html", images=False)
    )


@pytest.mark.usefixtures("undrawn")
def test_an_outlier_that_cannot_be_decoded_is_said_not_fatal(tmp_path):
    catalog = write_clinic(tmp_path / "odd", (0.48, 0.0039, 0.0115))
    Path(catalog.acquisitions[3].uri).write_bytes(b"")
    text = text_of(write_data_health(catalog, tmp_path / "a.html"))
    assert f"It could not be decoded: {REASONS['empty_file'].meaning}." in text


@pytest.mark.usefixtures("undrawn")
def test_scan_fails_on_too_many_rejects_but_still_writes_everything(clinic, catalog, tmp_path):
    share = catalog.reject_share
    assert share == len(catalog.rejects) / (len(catalog.rejects) + len(catalog.acquisitions)), (
        "skipped files count on neither side"
    )
    code, _, err = octfm_here(
        "scan", clinic, "--out", "a", "--max-reject", f"{share - 0.01:.3f}", "--no-images", "--workers", 0, cwd=tmp_path
    )
    assert (
        code == 1 and err.count("\n") == 1 and err.startswith("octfm: ") and f"({share:.1%}), expected at most" in err
    )
    assert "empty_file" in err and "data_health.html" in err
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [
        "catalog.parquet",
        "data_health.html",
        "rejects.parquet",
    ]
    assert "too many rejects" in (tmp_path / "a" / "data_health.html").read_text()
    assert (
        octfm_here(
            "scan",
            clinic,
            "--out",
            "b",
            "--max-reject",
            f"{share + 0.01:.3f}",
            "--no-images",
            "--workers",
            0,
            cwd=tmp_path,
        )[0]
        == 0
    )
    assert octfm_here("scan", clinic, "--max-reject", "20", cwd=tmp_path)[0] == 2
    with pytest.raises(CatalogError, match=r"expected at most 0\.0%"):
        catalog.expect_few_rejects(0)


def test_rejects_are_kept_where_nothing_at_all_is_accepted(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "clinic" / name).mkdir(parents=True)
        (tmp_path / "clinic" / name / "x.dcm").write_bytes(b"")
    code, out, err = octfm_here("scan", "clinic", cwd=tmp_path)
    assert code == 1 and "none of 2 files is an acceptable OCT volume: 2 empty_file" in err and err.count("\n") == 1
    catalog = Catalog.load(tmp_path / "catalog")
    assert catalog.acquisitions == () and [r.code for r in catalog.rejects] == ["empty_file"] * 2
    assert octfm_here("prepare", "catalog", cwd=tmp_path)[0] == 1
    page = tmp_path / "catalog" / "data_health.html"
    assert out.strip().endswith("catalog/data_health.html")
    assert "nothing accepted" in text_of(page) and "the file has no bytes" in text_of(page)


def test_a_scan_that_accepts_nothing_hides_names_under_a_key(tmp_path):
    clinic = tmp_path / "Geheim"
    write_oct_dicom(
        clinic / "Meyer" / "19580312.dcm",
        np.zeros((4, 32, 36), np.uint8),
        SPACING_MM,
        participant="Kanarie7",
        spacing_in="nowhere",
    )
    (clinic / "Meyer" / "leer.dcm").write_bytes(b"")
    code, _, err = octfm_here("scan", "Geheim", "--pseudonymise", "key", cwd=tmp_path)
    assert code == 1 and "none of 2 files" in err
    catalog = Catalog.load(tmp_path / "catalog")
    assert not catalog.acquisitions and len(catalog.rejects) == 2
    page = (tmp_path / "catalog" / "data_health.html").read_text()
    for secret in ("Meyer", "19580312", "Kanarie7", "leer", "Geheim"):
        assert secret not in str(asdict(catalog)) + page, secret


def test_rejects_parquet_says_what_would_fix_each_file(catalog, tmp_path):
    import pyarrow.parquet as pq

    rows = pq.read_table(catalog.save(tmp_path) / "rejects.parquet").to_pylist()
    assert len(rows) == len(catalog.rejects) + len(catalog.skipped)
    for row in rows:
        assert row["fix"] == REASONS[row["code"]].fix and row["skipped"] == REASONS[row["code"]].expected
        assert row["sentence"].startswith(row["uri"]) and row["bytes"] == Path(row["uri"]).stat().st_size
    assert {row["code"] for row in rows if row["skipped"]} == {"angiography"}


def test_every_flag_in_the_sources_has_a_meaning():
    root = Path(octfm.__file__).parent
    sources = {path: path.read_text() for path in root.rglob("*.py")}
    added = ("append(", "flags +=", "flags=(", "flags[", "flags = (")
    named = {
        flag
        for text in sources.values()
        for line in text.splitlines()
        if "flags" in line and any(how in line for how in added)
        for flag in re.findall(r'"([a-z]+(?:_[a-z]+)+)"', line)
    }
    assert named <= set(FLAGS)
    others = "".join(text for path, text in sources.items() if path.name != "acquisition.py")
    assert not [flag for flag in FLAGS if f'"{flag}"' not in others]


@needs_chromium
def test_page_renders_in_a_browser_without_console_errors(page, tmp_path):
    assert_renders(page, "Outliers", tmp_path)
