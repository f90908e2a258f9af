"""The viewer: what lies where is true on the screen, with keys and mouse, for both eyes, offline and within its
size."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest

from octfm.errors import EvaluationError
from octfm.models.layer_net import MASKS, SURFACES
from octfm.report.viewer import view_facts, viewer, write_view
from octfm.tasks.scene import NONE, Overlay, Placement, Scene, found_overlays, load_scenes, save_scenes
from octfm.tasks.view import scene_of
from octfm.volume.transform import Transform
from octfm.volume.volume import Fundus, Lines, Surfaces, Volume
from support.accessible import assert_accessible
from support.browser import needs_chromium
from support.points import points_to_prepared
from support.waiting import wait_until

D, H, W = 12, 48, 64
GRID = (3, 6, 8)
SPACING = (0.5, 0.02, 0.1)
ROOT, BSCAN, FRONT = "[data-viewer]", '[data-part="bscan"]', '[data-part="enface"]'


def truth() -> np.ndarray:
    """Brighter from B-scan to B-scan, dark above, and a bright corner below on the left: every flip and every mirror
    would show."""
    voxels = np.zeros((D, H, W), np.uint8)
    voxels[:] = (40 + 12 * np.arange(D))[:, None, None]
    voxels[:, : H // 3] = 8
    voxels[:, -H // 3 :, : W // 4] = 250
    return voxels


def features() -> np.ndarray:
    """Two kinds of tokens: left and right half."""
    found = np.zeros((*GRID, 4), np.int8)
    found[..., : GRID[2] // 2, 0], found[..., GRID[2] // 2 :, 1] = 100, 100
    return found


def scene(title: str = "one", **changes) -> Scene:
    classes = np.full(GRID, NONE, np.uint8)
    classes[:, 3:, :2] = 0  # tokens under the bright corner
    colours = np.zeros((*GRID, 4), np.uint8)
    colours[0, 0, -1] = (255, 0, 0, 255)  # one token: first B-scans, top, right
    scalar = np.full(GRID, np.nan, np.float32)
    scalar[:, 5] = np.arange(GRID[2]) / 10
    lines = np.stack([np.full((D, W), 10.0), np.full((D, W), 40.0)]).astype(np.float32)
    lines[:, :, :4] = np.nan
    area = np.zeros((D, H, W), np.uint8)
    area[3, 20:28, 40:50] = 1
    made = Scene(
        title, truth(), SPACING, "R", superior_first=True, placement=Placement.whole((D, H, W)), features=features(),
        about_features="about similarity",
        overlays=(
            Overlay("mask", "Mask", "classes", classes, (("context", (86, 180, 233)),)),
            Overlay("pca", "PCA", "colours", colours),
            Overlay("occlusion", "Occlusion", "scalar", scalar, unit="of it"),
            Overlay("band", "Band", "lines", lines, (("upper", (240, 228, 66)), ("lower", (240, 228, 66)))),
            Overlay("lesions", "Fluid", "voxels", area, (("fluid", (213, 94, 0)),)),
        ),
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def page(browser, tmp_path_factory):
    """A page with a right eye, the same eye as the encoder sees a left one, and one moved by another frame."""
    folder = tmp_path_factory.mktemp("viewer")
    left = scene("left", laterality="L", mirrored=True)
    browser.complaints.clear()
    browser.asked.clear()
    browser.open(write_page([scene("right </script><b>bold"), left], folder / "page.html"))
    settled(browser)
    return browser


def write_page(scenes, path):
    made = viewer(scenes)
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{made.policy}'"
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><title>t</title><style>{made.style}</style>{made.body}'
    )
    return path


def settled(browser) -> dict:
    here = f"document.querySelector({json.dumps(ROOT)})"
    browser.wait(f"((r) => r && r.dataset.started && r.dataset.drawn === r.dataset.bscan && r.dataset.front)({here})")
    return browser.js(f"({{...{here}.dataset}})")


def pixel(browser, selector: str, x: float, y: float) -> list[int]:
    """RGB of a canvas at shares of its width and height."""
    return browser.js(
        f"((c) => [...c.getContext('2d').getImageData(Math.floor({x} * c.width), Math.floor({y} * c.height), 1, "
        "1).data].slice(0, 3))"
        f"(document.querySelector({json.dumps(selector)}))"
    )


def gray(browser, selector: str, x: float, y: float) -> float:
    return float(np.mean(pixel(browser, selector, x, y)))


def focus(browser) -> None:
    browser.js(f"document.querySelector({json.dumps(ROOT)}).focus()")


@needs_chromium
def test_keys_scrub_and_the_picture_follows(page):
    focus(page)
    plan = [
        (["Home"], 0),
        (["ArrowDown"] * 3, 3),
        (["ArrowUp"], 2),
        (["PageDown"], 4),
        (["End"], D - 1),
        (["ArrowDown"], D - 1),
    ]
    for keys, expected in [*plan, (["PageUp"], D - 3)]:
        for key in keys:
            page.key(key)
        assert int(settled(page)["bscan"]) == expected
        # Away from cursor, corner and bars: the brightness of this B-scan and no other.
        assert gray(page, BSCAN, 0.8, 0.45) == pytest.approx(40 + 12 * expected, abs=4)
    page.assert_quiet()


@needs_chromium
def test_F13_vitreous_on_top_superior_first_and_laterality_are_kept(page):
    focus(page)
    page.key("c")  # without the cursor
    page.key("Home")
    settled(page)
    assert gray(page, BSCAN, 0.6, 0.1) < 20 < gray(page, BSCAN, 0.6, 0.7)
    assert gray(page, BSCAN, 0.15, 0.75) > 200 > gray(page, BSCAN, 0.85, 0.75)
    assert gray(page, FRONT, 0.6, 0.3) < gray(page, FRONT, 0.6, 0.7)
    assert gray(page, FRONT, 0.15, 0.3) > gray(page, FRONT, 0.85, 0.3)
    assert "Right eye" in page.js("document.querySelector('[data-part=\"eye\"]').textContent")
    page.key("v")
    settled(page)
    assert gray(page, BSCAN, 0.6, 0.1) < 20
    assert gray(page, BSCAN, 0.15, 0.75) < 200 < gray(page, BSCAN, 0.85, 0.75)
    assert gray(page, FRONT, 0.15, 0.3) < gray(page, FRONT, 0.85, 0.3)
    assert "Left eye" in page.js("document.querySelector('[data-part=\"eye\"]').textContent")
    page.key("1")  # tokens go with the voxels that they are of
    red, _, blue = pixel(page, BSCAN, 0.9, 0.8)
    assert blue > red + 40 and len(set(pixel(page, BSCAN, 0.1, 0.8))) == 1
    page.assert_quiet()


@needs_chromium
def test_mouse_goes_where_it_points(page):
    page.mouse(FRONT, 0.255, 0.04)
    assert (settled(page)["bscan"], settled(page)["column"]) == ("0", "16")
    page.mouse(FRONT, 0.5, 0.5, to=(0.755, 0.96))
    assert (settled(page)["bscan"], settled(page)["column"]) == (str(D - 1), "48")
    page.mouse(BSCAN, 0.505, 0.51)
    assert (settled(page)["row"], settled(page)["column"]) == ("24", "32")
    page.mouse(BSCAN, 0.5, 0.5, wheel=-120)
    page.wait(f"document.querySelector({json.dumps(ROOT)}).dataset.bscan === '{D - 4}'")
    page.js(
        '((s) => { s.value = 5; s.dispatchEvent(new Event("input")); })(document.querySelector(\'[data-part="slider"]\'))'
    )
    assert settled(page)["bscan"] == "5"
    page.assert_quiet()


@needs_chromium
def test_overlays_lie_on_their_tokens_and_come_and_go(page):
    focus(page)
    page.key("c")
    page.key("Home")
    settled(page)
    before = pixel(page, BSCAN, 15.5 / 16, 0.08)
    page.key("2")
    red = pixel(page, BSCAN, 15.5 / 16, 0.08)
    assert red[0] > before[0] + 80 and red[1] < 40  # the one red token, top right, in the first B-scans
    assert pixel(page, BSCAN, 13 / 16, 0.08) == pytest.approx(before, abs=6)
    assert pixel(page, FRONT, 15.5 / 16, 0.1)[0] > pixel(page, FRONT, 15.5 / 16, 0.1)[1] + 60
    page.key("End")
    settled(page)
    assert len(set(pixel(page, BSCAN, 15.5 / 16, 0.08))) == 1
    page.key("2")
    page.key("4")  # lines: rows 10 and 40, none on the left
    rows = [pixel(page, BSCAN, 0.5, (row + 0.5) / H) for row in (10, 25, 40)]
    assert rows[0][0] > 150 > rows[0][2] + 20 and rows[2][0] > 150 and len(set(rows[1])) == 1
    assert len(set(pixel(page, BSCAN, 0.02, 10.5 / H))) == 1
    page.key("0")
    page.key("5")
    page.key("Home")
    for _ in range(3):
        page.key("ArrowDown")
    settled(page)
    page.wait("document.querySelector('[data-viewer]').dataset.overlays === 'lesions'")

    def orange() -> bool:
        red, _, blue = pixel(page, BSCAN, 45 / W, 24 / H)
        return red > blue + 30

    wait_until(orange, "the lesion is drawn", 20)
    page.assert_quiet()


@needs_chromium
def test_values_and_distances_are_told_in_words(page):
    focus(page)
    page.key("3")
    page.mouse(BSCAN, (3.5 / 8), 0.99)
    text = page.js("document.querySelector('[data-part=\"readout\"]').textContent")
    assert "Occlusion: 0.300 of it" in text and "row 48" in text
    page.key("Home")
    page.key("a")
    for _ in range(4):
        page.key("ArrowDown")
    for _ in range(3):
        page.key("ArrowRight", shift=True)
    text = page.js("document.querySelector('[data-part=\"readout\"]').textContent")
    along, across = 30 * SPACING[2], 4 * SPACING[0]
    assert (
        f"from the anchor: {np.hypot(along, across):.3f} mm ({along:.3f} mm along, 0.000 mm deep, {across:.3f} mm "
        "across B-scans)" in text
    )
    assert (
        page.js('document.querySelector(\'[data-part="slider"]\').getAttribute("aria-valuetext")') == f"B-scan 5 of {D}"
    )
    page.assert_quiet()


@needs_chromium
def test_similarity_follows_the_clicked_token_into_another_volume(page):
    focus(page)
    similarity = "document.querySelector('[data-part=\"readout\"]').textContent.match(/Similarity to a clicked token: (-?[\\d.]+)/)?.[1]"
    page.key("6")
    page.mouse(BSCAN, 0.2, 0.5)
    assert float(page.js(similarity)) == pytest.approx(1, abs=1e-3)
    for _ in range(4):
        page.key("ArrowRight", shift=True)
    assert float(page.js(similarity)) == pytest.approx(0, abs=1e-3)
    page.key("v")  # the left eye: what was left lies on the right
    settled(page)
    assert float(page.js(similarity)) == pytest.approx(1, abs=1e-3)
    assert "compared with a token of right" in page.js("document.querySelector('[data-part=\"readout\"]').textContent")
    for _ in range(4):
        page.key("ArrowLeft", shift=True)
    assert float(page.js(similarity)) == pytest.approx(0, abs=1e-3)
    page.key("j")
    assert float(page.js(similarity)) == pytest.approx(1, abs=1e-3)
    page.assert_quiet()


@needs_chromium
def test_words_of_a_header_stay_words_and_every_control_has_a_name(page):
    assert page.js("document.querySelectorAll('b').length") == 0
    assert "</script><b>bold" in page.js("document.querySelector('select').textContent")
    unnamed = page.js(
        "[...document.querySelectorAll('input, select, button')].filter((e) => !(e.labels?.length && "
        "e.labels[0].textContent.trim())"
        " && !e.textContent.trim() && !e.ariaLabel).length"
    )
    assert unnamed == 0
    page.assert_quiet()


def volumes_of(made) -> list[dict]:
    return json.loads(made.body.split('id="viewer-data">')[1].split("</script>")[0])["volumes"]


def test_pages_stay_small_by_dropping_pixels_before_bscans_and_say_so():
    rng = np.random.default_rng(0)
    noisy = scene(
        voxels=rng.integers(0, 255, (48, 200, 200), dtype=np.uint8), overlays=(), features=None, placement=None
    )
    sizes = []
    for budget in (3_000_000, 900_000, 300_000):
        made = viewer([noisy, noisy], budget)
        assert len(made.body.encode()) <= budget
        one = volumes_of(made)[0]
        sizes.append((len(one["kept"]), len(one["bscans"][0])))
        assert ("B-scans is shown" in one["note"]) == (len(one["kept"]) < 48)
    assert sizes[0][0] == 48 and sizes[-1][0] < 48 and sizes[0][1] > sizes[1][1]
    with pytest.raises(EvaluationError, match="show fewer volumes"):
        viewer([noisy] * 20, 150_000)


def test_page_of_a_file_is_self_contained_and_says_what_it_is(tmp_path):
    page = write_view(scene("Spectralis <b>"), tmp_path / "view.html", [("Scanner", "a & b")], "detail").read_text()
    assert (
        "Spectralis &lt;b&gt;" in page
        and "a &amp; b" in page
        and "about similarity" in page
        and "not a medical device" in page
    )
    assert "http://" not in page and "https://" not in page
    assert_accessible(page)


def test_scenes_come_back_as_they_were_written(tmp_path):
    made = [
        scene(),
        scene(
            "left",
            laterality="L",
            mirrored=True,
            placement=Placement((1.0, 2.0), (9.0, 3.0), ((0.0, 1.0),) * D),
            features=None,
        ),
    ]
    back = load_scenes(save_scenes(made, tmp_path / "scenes.npz"))
    for a, b in zip(made, back, strict=True):
        assert (a.title, a.spacing_mm, a.laterality, a.mirrored, a.placement) == (
            b.title,
            b.spacing_mm,
            b.laterality,
            b.mirrored,
            b.placement,
        )
        assert np.array_equal(a.voxels, b.voxels) and (a.features is None) == (b.features is None)
        for x, y in zip(a.overlays, b.overlays, strict=True):
            assert (x.key, x.kind, x.legend, x.unit) == (y.key, y.kind, y.legend, y.unit) and np.array_equal(
                x.values, y.values, equal_nan=True
            )
    (tmp_path / "scenes.npz").write_bytes(b"junk")
    with pytest.raises(EvaluationError, match=r"scenes\.npz: damaged"):
        load_scenes(tmp_path / "scenes.npz")


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shown_reversed", [False, True])
def test_tokens_are_placed_where_the_transform_says(mirrored, reverse, shown_reversed):
    rng = np.random.default_rng(3)
    native, prepared, patch = (20, 90, 70), (16, 64, 32), (4, 8, 8)
    transform = Transform(
        native,
        (0.1, 0.01, 0.02),
        prepared,
        (1.3, -4.2, 5.1),
        (1.1, 1.3, 1.9),
        tuple(rng.normal(0, 3, 20)),
        reverse,
        mirrored,
    )
    placed = Placement.native(transform, shown_reversed)
    # B-scan, row, column as displayed: columns as in the file
    shown = np.stack([rng.integers(0, n, 400) for n in native], 1)
    file = shown.astype(float)
    if shown_reversed:
        file[:, 0] = native[0] - 1 - file[:, 0]
    expected = np.floor((points_to_prepared(transform, file) + 0.5) / patch)
    edges = (placed.bscans, None, placed.columns)
    found = np.empty_like(expected)
    for axis in (0, 2):
        low, high = edges[axis]
        found[:, axis] = np.floor((shown[:, axis] + 0.5 - low) / (high - low) * (prepared[axis] // patch[axis]))
    low, high = np.array(placed.rows)[shown[:, 0]].T
    found[:, 1] = np.floor((shown[:, 1] + 0.5 - low) / (high - low) * (prepared[1] // patch[1]))
    assert (found == expected).mean() > 0.99  # edges fall on rounding


def test_a_file_is_shown_superior_first_with_its_layers():
    voxels = truth()[::-1]
    volume = Volume(voxels, SPACING, "L", "topcon_triton", superior_first=False)
    heights = np.broadcast_to(np.arange(D, dtype=np.float32)[None, :, None], (1, D, W))
    made = scene_of(volume, surfaces=Surfaces(("ILM",), heights, None))
    assert np.array_equal(made.voxels, truth()) and made.superior_first and not made.mirrored
    assert made.overlay("layers")[0, :, 0].tolist() == list(range(D))[::-1]
    lines = scene_of(replace(volume, layout="radial"))
    shown = volumes_of(viewer([lines]))[0]
    assert not lines.is_raster and shown["front"] is None and shown["sides"] is None
    sixteen = scene_of(replace(volume, voxels=voxels.astype(np.uint16) * 16))
    assert sixteen.voxels.dtype == np.uint8 and sixteen.voxels.max() == 255


def test_the_policy_allows_this_script_and_no_other():
    import hashlib

    made = viewer([scene()])
    script = made.body.rsplit("<script>", 1)[1].split("</script>")[0]
    assert made.policy == "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def region(browser, selector: str, x: tuple[float, float], y: tuple[float, float]) -> np.ndarray:
    """RGB [rows, columns, 3] of a part of a canvas, between pixels from the left and top; negative: from the other
    end."""
    shown = browser.js(
        f"((c) => {{ const at = (v, n) => v < 0 ? n + v : v, [x0, x1] = {list(x)}.map((v) => at(v, c.width)), "
        f"[y0, y1] = {list(y)}.map((v) => at(v, c.height)); return [x1 - x0, y1 - y0, "
        f"[...c.getContext('2d').getImageData(x0, y0, x1 - x0, y1 - y0).data]]; }})"
        f"(document.querySelector({json.dumps(selector)}))"
    )
    return np.array(shown[2], np.uint8).reshape(shown[1], shown[0], 4)[..., :3]


def box_of(browser, part: str) -> dict[str, float]:
    return browser.js(f"document.querySelector('[data-part=\"{part}\"]').getBoundingClientRect().toJSON()")


@needs_chromium
def test_the_cursor_of_a_fresh_page_crosses_no_letter(page):
    middle = page.js(f"document.querySelector({json.dumps(FRONT)}).height / 2")
    letters = [
        (BSCAN, (4, 24), (4, 24)),
        (FRONT, (4, 24), (middle - 20, middle - 4)),
    ]
    with_cursor = [region(page, *place) for place in letters]
    focus(page)
    page.key("c")
    settled(page)
    for place, before in zip(letters, with_cursor, strict=True):
        assert (before.min(-1) > 200).sum() > 4, "a white letter"
        assert np.array_equal(before, region(page, *place))
    page.assert_quiet()


@needs_chromium
def test_the_ruler_is_seen_on_white_tissue(browser, tmp_path):
    white = scene(voxels=np.full((D, H, W), 255, np.uint8), overlays=(), features=None, placement=None)
    browser.open(write_page([white], tmp_path / "page.html"))
    settled(browser)
    bar = region(browser, BSCAN, (10, 60), (-16, -4)).astype(int).mean(-1)
    assert (bar[:, 30] > 240).any() and (bar[:, 30] < 80).sum() >= 2, "white with a dark rim"
    focus(browser)
    browser.key("x")
    browser.key("x")
    settled(browser)
    post = region(browser, BSCAN, (10, 13), (-30, -14))
    assert (post == 255).all(), "its length is written beside the upright bar, not over it"


@needs_chromium
def test_slider_and_legend_stand_under_the_bscan_and_a_fundus_beside_it(browser, tmp_path):
    fundus = Fundus(np.full((200, 200), 90, np.uint8), "Infrared image", None)
    browser.open(write_page([scene(fundus=fundus)], tmp_path / "page.html"))
    settled(browser)
    bscan, front, slider = (box_of(browser, part) for part in ("bscan", "enface", "slider"))
    assert bscan["bottom"] < slider["top"] < front["bottom"] < box_of(browser, "fundus")["top"]
    browser.open(write_page([scene(fundus=fundus, is_raster=False)], tmp_path / "page.html"))
    browser.wait(f"document.querySelector({json.dumps(ROOT)})?.dataset.fundus === 'drawn'")
    bscan, shown = box_of(browser, "bscan"), box_of(browser, "fundus")
    assert shown["left"] > bscan["right"] and abs(shown["top"] - bscan["top"]) < 2


@needs_chromium
def test_a_flat_bscan_begins_stretched_where_the_page_is_narrow(browser, tmp_path):
    path = write_page([scene()], tmp_path / "page.html")
    heights = {}
    for width in (1280, 390):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
        browser.open(path)
        settled(browser)
        chosen = browser.js("document.querySelector('[data-part=\"stretch\"]').value")
        heights[width] = (chosen, box_of(browser, "bscan")["height"])
        assert browser.js("document.documentElement.scrollWidth <= innerWidth")
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert heights[1280][0] == "1" and heights[390][0] == "3" and heights[390][1] >= 100


@needs_chromium
@pytest.mark.parametrize(("has_mm", "proportions"), [(True, "true"), (False, "estimated")])
def test_proportions_are_called_true_only_where_millimetres_are_stated(has_mm, proportions, browser, tmp_path):
    browser.open(write_page([scene(has_mm=has_mm)], tmp_path / "page.html"))
    settled(browser)
    first = browser.js("document.querySelector('[data-part=\"stretch\"]').options[0].text")
    assert first == f"1 × ({proportions} proportions)"


@needs_chromium
def test_a_printed_page_holds_its_pictures_and_is_light(browser, tmp_path):
    page = write_view(scene(), tmp_path / "view.html")
    browser.open(page)
    settled(browser)
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.call("Emulation.setEmulatedMedia", media="print", features=dark)
    # As for a print: the page gets narrower after canvases have got their width.
    browser.js(f"document.querySelector({json.dumps(ROOT)}).style.width = '600px'")
    over = browser.js(
        "[...document.querySelectorAll('canvas')].some((c) => c.offsetWidth > c.parentElement.clientWidth)"
    )
    ink = browser.js("getComputedStyle(document.body).color")
    browser.call("Emulation.setEmulatedMedia", media="", features=[])
    assert not over and ink == "rgb(27, 28, 29)"


def test_every_line_that_was_found_has_its_own_colour_and_a_name_for_readers():
    made = found_overlays({name: np.zeros((D, W)) for name in SURFACES}, {name: truth() > 9 for name in MASKS})
    for overlay in made:
        names, colours = zip(*overlay.legend, strict=True)
        assert len(set(colours)) == len(names) and not any("_" in name for name in names)
    assert [name for name, _ in made[0].legend][:2] == ["ILM", "NFL/GCL"]
    assert made[1].legend[0][0] == "intraretinal fluid"
    (others,) = found_overlays({"ilm": np.zeros((D, W)), "choroid_end": np.ones((D, W))}, {})
    assert [name for name, _ in others.legend] == ["ILM", "choroid end"]


@pytest.mark.parametrize("laterality, across", [("R", ["T", "N"]), ("L", ["N", "T"]), (None, None)])
def test_turned_rasters_have_the_letters_of_the_fundus(laterality, across):
    volume = Volume(truth(), SPACING, laterality)
    x, zero = np.arange(float(D)), np.zeros(D)
    down = Lines(np.stack([x, zero], 1), np.stack([x, zero + 6], 1))
    up = Lines(down.end[::-1], down.start[::-1])
    for lines, ends, edges, side in (
        (down, ["S", "I"], across, "left"),
        (up, ["I", "S"], across and across[::-1], "right"),
    ):
        shown = volumes_of(viewer([scene_of(replace(volume, lines=lines))]))[0]
        assert (shown["sides"], shown["vertical"]) == (ends, edges)
        assert f"superior is on the {side}" in shown["frontAbout"]
    leftwards = Lines(np.stack([zero + 6, x], 1), np.stack([zero, x], 1))
    shown = volumes_of(viewer([scene_of(replace(volume, lines=leftwards, superior_first=True))]))[0]
    assert (shown["sides"], shown["vertical"]) == (across and across[::-1], ["S", "I"])
    assert "mirrored" in shown["frontAbout"] and volumes_of(viewer([scene()]))[0]["frontAbout"] == ""


@pytest.mark.parametrize("laterality, across", [("R", ["T", "N"]), ("L", ["N", "T"]), (None, None)])
def test_line_scans_have_the_letters_of_their_places_on_the_fundus(laterality, across):
    volume = Volume(truth()[:2], SPACING, laterality, layout="line")

    def sides(*ends) -> list[str] | None:
        at = np.array(ends, float)
        fundus = Fundus(np.zeros((10, 10), np.uint8), "A picture", Lines(at[:, :2], at[:, 2:]))
        (shown,) = volumes_of(viewer([scene_of(volume, fundus=fundus)]))
        assert shown["front"] is None
        return shown["sides"]

    assert sides((1, 5, 9, 6), (1, 5, 9, 6)) == across
    assert sides((9, 5, 1, 6), (9, 5, 1, 6)) == (across and across[::-1])
    assert sides((5, 1, 5, 9), (6, 1, 6, 9)) == ["S", "I"] and sides((5, 9, 5, 1), (6, 9, 6, 1)) == ["I", "S"]
    assert sides((1, 5, 9, 5), (5, 1, 5, 9)) is None, "a cross"
    assert sides((1, 5, 9, 5), (np.nan,) * 4) is None
    assert volumes_of(viewer([scene_of(volume)]))[0]["sides"] is None, "no picture, no place"


def test_a_single_bscan_is_not_called_several():
    volume = Volume(truth()[:1], SPACING, "R", layout="line")
    (one,) = volumes_of(viewer([scene_of(volume)]))
    assert one["note"] == "A single B-scan: there is no view from the front."
    assert dict(view_facts(volume, scene_of(volume)))["Millimetres per row and A-scan"] == "0.02 × 0.1"
