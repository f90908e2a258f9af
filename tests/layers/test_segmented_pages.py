"""Pages of octfm segment and octfm view --layers: thickness map, contact sheet."""

import io
import re
from itertools import combinations, pairwise

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image

from octfm.demo.pages import first_picture
from octfm.layers.rows import COLUMNS, row_of
from octfm.layers.segment import ScanSegmentation
from octfm.models.layer_net import MASKS, SURFACES
from octfm.phantom.native.stream import Stream
from octfm.report.images import native_pictures
from octfm.report.segmented.contact_sheet import ContactSheet
from octfm.report.segmented.pictures import (
    LINES,
    THUMBNAIL,
    bscan_picture,
    facts_of,
    thickness_pictures,
    verdict_of,
)
from octfm.tasks.scene import FOUND_COLOURS
from support.accessible import VISION, assert_accessible, difference
from support.command_line import invoke
from support.segmented import found_in

pytestmark = pytest.mark.usefixtures("remembered_bscans")


def row(found: ScanSegmentation, source: str) -> dict[str, str]:
    return row_of(found) | {"source": source}


@pytest.mark.slow
def test_a_matplotlibrc_changes_no_picture():
    found = found_in()
    own = thickness_pictures(found), native_pictures(found.volume)
    with mpl.rc_context({"text.usetex": True, "font.size": 30, "savefig.dpi": 30}):
        assert (thickness_pictures(found), native_pictures(found.volume)) == own


def test_the_thickness_map_names_its_zones_and_sides():
    (picture,) = thickness_pictures(found_in())
    assert picture.src.startswith("data:image/png;base64,")
    zones = dict(re.findall(r"([a-z ]+?) (\d+)(?:,|$)", picture.alt.split("µm: ")[1]))
    assert int(zones["centre"]) < 270 and abs(int(zones[" outer nasal"]) - 300) <= 1
    assert "foveal pit" in picture.caption
    assert thickness_pictures(found_in(reasons=("upside down",))) == []
    assert thickness_pictures(found_in(1)) == [], "one B-scan has no map"
    (unknown,) = thickness_pictures(found_in(laterality=None))
    assert "outer right" in unknown.alt and "nasal" not in unknown.alt


def test_a_picture_shows_the_bscan_with_the_most_fluid():
    picture = np.asarray(Image.open(io.BytesIO(bscan_picture(found_in(fluid_in=3)))).convert("RGB")).astype(int)
    assert picture.shape == (THUMBNAIL[1], THUMBNAIL[0], 3)
    blue = (picture[..., 2] > picture[..., 0] + 50) & (picture[..., 2] > picture[..., 1] + 50)
    assert blue.mean() > 0.005
    plain = np.asarray(Image.open(io.BytesIO(bscan_picture(found_in()))).convert("RGB")).astype(int)
    assert not ((plain[..., 2] > plain[..., 0] + 50) & (plain[..., 2] > plain[..., 1] + 50)).any()


def test_a_picture_shows_small_areas_of_coarse_voxels():
    found = found_in()
    found.masks["drusen"][3, 132:142, 50:52] = True  # 20 voxels of .0002 mm²
    found.volume.voxels[3] = np.random.default_rng(0).integers(0, 255, found.volume.shape[1:])
    picture = np.asarray(Image.open(io.BytesIO(bscan_picture(found))).convert("RGB")).astype(int)
    orange = (picture[..., 0] > picture[..., 2] + 60) & (picture[..., 1] > picture[..., 2] + 20)
    assert 12 < orange.sum() < 200


def test_a_contact_sheet_shows_the_most_doubtful_first_and_keeps_pictures_of_earlier_calls(tmp_path):
    table = tmp_path / "eyes.csv"
    ContactSheet(table).add("good.dcm", found_in())
    assert ContactSheet(table.with_suffix(".CSV")).folder != ContactSheet(table).folder, "two tables shared pictures"
    sheet = ContactSheet(table)  # a later call, which segments only what is new
    sheet.add("bad.dcm", found_in(reasons=("upside down",)))
    unread = dict.fromkeys(COLUMNS, "") | {"source": "broken.dcm", "problem": "no_pixels: nothing <in> it"}
    rows = [row(found_in(fluid_in=3), "good.dcm"), row(found_in(reasons=("upside down",)), "bad.dcm"), unread]
    page = sheet.write(rows).read_text()
    assert page.index("broken.dcm") < page.index("bad.dcm") < page.index("good.dcm")
    assert re.search(r"centre [\d.]+ µm, intraretinal fluid \d+\.\d nl", page)
    rows[0] |= {"centre_um": ""}
    assert re.search(r"good.dcm<br>intraretinal fluid", sheet.write(rows).read_text())
    assert page.count("<img") == 2 and "nothing &lt;in&gt; it" in page
    assert "3 in the table, 1 with a reason not to believe them, 1 that could not be read" in page
    sheet.add("withdrawn.dcm", found_in())  # somebody deleted its row
    small = sheet.write(rows, room=(sheet.folder / next(iter(sheet.folder.iterdir())).name).stat().st_size * 3 // 2)
    assert small.read_text().count("<img") == 1 and "it shows 1 of 2 pictures" in small.read_text()
    assert len([*sheet.folder.iterdir()]) == 3, "or another process may have yet to write the row"
    sheet.keep_only(rows)
    assert len([*sheet.folder.iterdir()]) == 2


def test_a_contact_sheet_names_no_folder_above_the_scans(tmp_path):
    """Folders there may be called after people; what is below leads to the file."""
    table, unread = tmp_path / "eyes.csv", dict.fromkeys(COLUMNS, "")
    folder = "/home/Meier/scans"
    sources = [f"{folder}/a/x.dcm", f"{folder}/a/y.zip!/deep/z.dcm", f"{folder}/b/x.dcm"]
    rows = [unread | {"source": source, "problem": f"damaged_file: {source}: cut off"} for source in sources]
    page = ContactSheet(table).write(rows).read_text()
    assert "Meier" not in page and "damaged_file: b/x.dcm: cut off<br>" in page
    for name in ("a/x.dcm", "a/y.zip!/deep/z.dcm", "b/x.dcm"):
        assert f"<br>\n{name}<" in page
    assert "<br>\ny.zip!/deep/z.dcm<" in ContactSheet(table).write(rows[1:2]).read_text()
    elsewhere = [*rows, unread | {"source": "s3://bucket/x.dcm", "problem": "unreadable"}]
    assert "<br>\ns3://bucket/x.dcm<" in ContactSheet(table).write(elsewhere).read_text()
    there = [tmp_path / "Meier!" / "scans" / name for name in ("x.dcm", "y.dcm")]  # that folder is no archive
    there[0].parent.mkdir(parents=True)
    for file in there:
        file.touch()
    page = ContactSheet(table).write([unread | {"source": str(file)} for file in there]).read_text()
    assert "Meier" not in page and "<br>\ny.dcm<" in page


def test_view_shows_layers_and_table_has_a_contact_sheet(tmp_path):
    image = next(i for i in map(Stream(203, bscans=3, randomised=0.0), range(9)) if i.accident == "none")
    file = tmp_path / "eye.npz"
    np.savez(file, volume=image.voxels[:, :, ::2], spacing_mm=(1.0, image.spacing_mm[1], 2 * image.spacing_mm[2]))
    page = tmp_path / "eye.html"
    done = invoke("view", file, "--layers", "--out", page)
    assert done.exit_code == 0, done.output
    text = page.read_text()
    assert (
        "Segmentation: layers" in text
        and "not a medical device" in text
        and text.index('class="verdict"') < text.index("data-viewer")
    )
    assert_accessible(text)
    table = tmp_path / "eyes.csv"
    ContactSheet(table).add("withdrawn.dcm", found_in())  # somebody deleted its row
    done = invoke("segment", file, "--out", table)
    assert done.exit_code == 0 and "eyes.pictures.html" in done.output
    assert (tmp_path / "eyes.pictures.html").read_text().count("<img") == 1
    assert len([*(tmp_path / "eyes.pictures").iterdir()]) == 1


def test_a_page_opens_with_the_verdict_and_what_the_scan_does_not_show():
    assert verdict_of(found_in()) == [("ok", "accepted", "nothing speaks against it; 0% of A-scans are doubtful")]
    assert verdict_of(found_in(reasons=("upside down",))) == [("bad", "do not believe it", "upside down")]
    (_, zones) = verdict_of(found_in(1))
    assert zones[:2] == ("watch", "no zones") and zones[2].startswith("a single B-scan")


def test_facts_of_a_page_do_not_repeat_the_volumes_of_its_viewer():
    assert [name for name, _ in facts_of(found_in(fluid_in=3))] == ["Found by"]


def test_the_first_picture_of_a_demonstration_states_volumes_that_no_table_has(tmp_path, monkeypatch):
    found = found_in(25, fluid_in=3)
    monkeypatch.setattr("octfm.demo.pages.segment", lambda _: found)
    page = first_picture(found.volume, tmp_path, "Synthetic.").read_text()
    assert "Intraretinal fluid" in page and f"{found.volume_nl('intraretinal_fluid'):.1f} nl" in page


@pytest.mark.parametrize("vision", VISION)
def test_lines_and_areas_next_to_each_other_differ_with_every_vision(vision):
    for names in (SURFACES, MASKS):
        colours = [FOUND_COLOURS[name] for name in names]
        assert min(difference(a, b, vision) for a, b in pairwise(colours)) > 30
        assert min(difference(a, b, vision) for a, b in combinations(colours, 2)) > 19
    fluid = FOUND_COLOURS["intraretinal_fluid"]
    assert min(difference(fluid, FOUND_COLOURS[name], vision) for name in SURFACES) > 19, "fluid reaches every line"


def test_lines_of_a_small_picture_keep_their_colours():
    picture = np.asarray(Image.open(io.BytesIO(bscan_picture(found_in()))).convert("RGB")).astype(int)
    for name in LINES:
        own = np.abs(picture - FOUND_COLOURS[name]).max(-1) < 24
        assert own.any(axis=0).mean() > 0.95, name


def test_a_contact_sheet_says_why_numbers_are_missing_and_what_colours_mean(tmp_path):
    table = tmp_path / "eyes.csv"
    sheet = ContactSheet(table)
    sheet.add("line.dcm", found_in(1))
    page = sheet.write([row(found_in(1), "line.dcm")]).read_text()
    assert_accessible(page)
    assert "line.dcm<br>no zones: a single B-scan" in page
    assert "background: rgb(30, 60, 255)" in page and "intraretinal fluid</span>" in page
