"""The picture of the fundus that comes with a scan: read with the positions of its B-scans, shown beside them."""

from dataclasses import replace

import numpy as np
import pytest

from octfm.formats import read_fundus, read_volume
from octfm.report.viewer import write_view
from octfm.tasks.view import scene_of
from octfm.volume.volume import Fundus, Lines
from support.browser import Browser, needs_chromium
from support.command_line import invoke
from support.vendor_files import (
    BIRTH_DATE,
    NAME,
    SURNAME,
    e2e_codes,
    ends_of,
    with_grid,
    write_e2e,
    write_heyex_xml,
    write_npy,
    write_vol,
)
from support.volumes import SHAPE, telling_voxels

ENDS = ends_of(*SHAPE[::2])
YELLOW = [240, 228, 66]


def on_picture(found: Fundus) -> np.ndarray:
    return np.concatenate([found.lines.start, found.lines.end], axis=1)


@pytest.mark.parametrize("write", [write_vol, write_heyex_xml])
def test_lines_on_the_fundus_are_those_of_the_volumes_bscans(tmp_path, write):
    order = np.random.default_rng(2).permutation(SHAPE[0])
    uri = write(tmp_path / "a.vol", telling_voxels()[order], ends=ENDS[order])
    uri, scale = (with_grid(uri), (0.01, 0.02)) if write is write_heyex_xml else (uri, (0.0118, 0.0118))
    found, volume = read_fundus(uri), read_volume(uri)
    own = np.concatenate([volume.lines.start, volume.lines.end], axis=1)
    np.testing.assert_allclose(on_picture(found), own / (*scale, *scale), rtol=1e-5)
    assert found.image.shape == ((20, 20) if write is write_heyex_xml else (20, 30)) and np.ptp(found.image) == 0


def test_degrees_of_an_e2e_become_lines_on_its_picture(tmp_path):
    """From its middle, if the file says how many degrees it shows: once, or of this size the same every time."""
    order, codes = np.random.default_rng(2).permutation(SHAPE[0]), e2e_codes(telling_voxels())
    degrees = np.array([[-9, y, 6, y] for y in np.linspace(-10, 7, SHAPE[0])])

    def found(*pictures, **others) -> Fundus:
        stored = {(1, 2, 3): codes[order]}
        return read_fundus(write_e2e(tmp_path / "a.e2e", stored, ends=degrees[order], pictures=pictures, **others))

    for shown, pictures in ((30, ((5, 6, 30), (5, 6, 30), (768, 768, 20))), (60, ((5, 6, 60),))):
        on = on_picture(found(*pictures))
        np.testing.assert_allclose(on[np.argsort(on[:, 1])], (degrees / shown + 0.5) * (5, 6, 5, 6), rtol=1e-5)
        volume = read_volume(tmp_path / "a.e2e")
        own = np.concatenate([volume.lines.start, volume.lines.end], axis=1) * 15 / 4.4
        np.testing.assert_allclose(on, (own / shown + 0.5) * (5, 6, 5, 6), rtol=1e-5)
    for pictures in ((), ((6, 5, 30),), ((5, 6, 30), (5, 6, 20)), ((5, 6, 0),)):
        assert found(*pictures).lines is None, pictures
    assert found((5, 6, 30), pattern=2).lines is None, "a circle"


def test_a_fundus_without_positions_or_without_a_picture_is_said_to_be_so(tmp_path):
    e2e = read_fundus(write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())}))
    assert e2e.image.shape == (6, 5) and (e2e.image == 9).all() and e2e.lines is None
    export = write_heyex_xml(tmp_path / "export", telling_voxels())
    assert read_fundus(export).lines is None, "no scale, no position"
    (export.parent / "SLO.tif").unlink()
    assert read_fundus(export) is None and read_volume(export).shape == SHAPE, "an export is complete without it"
    assert read_fundus(write_vol(tmp_path / "c.vol", telling_voxels(), pattern=2)).lines is None, "a circle"
    assert read_fundus(write_npy(tmp_path / "a.npy", telling_voxels())) is None


def test_the_page_of_a_scan_shows_the_fundus_and_nothing_of_its_owner(tmp_path):
    for write, name in ((write_vol, "a.vol"), (write_heyex_xml, "export")):
        page = tmp_path / f"{name}.html"
        uri = write(tmp_path / "Mustermann" / name, telling_voxels(), participant="MRN-77-1234")
        told = invoke("view", uri, "--out", page)
        content = page.read_text()
        assert told.exit_code == 0 and '"fundus":{"image":' in content, told.output
        for secret in ("Mustermann", "MRN-77-1234", NAME, SURNAME, BIRTH_DATE, str(tmp_path), "SLO.tif"):
            assert secret not in content, secret


@needs_chromium
def test_the_page_says_where_a_bscan_lies_beyond_the_picture(tmp_path):
    ends = np.array([[10, 110, 90, 120], [10, 50, 90, 50], [-50, 90, 150, 120], [np.nan] * 4], float)
    volume = replace(read_volume(write_vol(tmp_path / "a.vol", telling_voxels())), voxels=telling_voxels()[:4])
    fundus = Fundus(np.full((100, 100), 60, np.uint8), "A picture", Lines(ends[:, :2], ends[:, 2:]))
    page = write_view(scene_of(replace(volume, superior_first=True), fundus=fundus), tmp_path / "view.html")
    said = []
    with Browser(tmp_path / "chromium") as browser:
        browser.open(page)
        browser.wait("document.querySelector('[data-viewer]').dataset.fundus === 'drawn'")
        browser.key("Home")
        for _ in ends:
            said.append(browser.js("document.querySelector('[data-part=\"fundus-about\"]').textContent"))
            browser.key("ArrowDown")
    assert said == [
        "A picture. This B-scan lies outside the picture.", "A picture. The bright line is the B-scan.",
        "A picture. The bright line is the B-scan.", "A picture. Where this B-scan lies on it is not known.",
    ]  # fmt: skip


@needs_chromium
@pytest.mark.parametrize("superior_first", [True, False])
def test_the_line_on_the_fundus_follows_the_bscan(tmp_path, superior_first):
    ends = np.array([[10, y, 90, y] for y in np.linspace(20, 75, SHAPE[0])], float)
    ends = ends if superior_first else ends[::-1]
    volume = read_volume(write_vol(tmp_path / "a.vol", telling_voxels()))
    volume = replace(volume, superior_first=superior_first)
    fundus = Fundus(np.full((100, 100), 60, np.uint8), "A picture", Lines(ends[:, :2], ends[:, 2:]))
    page = write_view(scene_of(volume, fundus=fundus), tmp_path / "view.html")
    canvas = "document.querySelector('[data-part=\"fundus\"]')"

    def colour(y: float) -> list[int]:
        at = f"Math.floor(.5 * c.width), Math.round({y / 100} * c.height), 1, 1"
        return browser.js(f"((c) => [...c.getContext('2d').getImageData({at}).data].slice(0, 3))({canvas})")

    with Browser(tmp_path / "chromium") as browser:
        browser.open(page)
        browser.wait("document.querySelector('[data-viewer]').dataset.fundus === 'drawn'")
        assert not browser.js("document.querySelector('[data-part=\"fundus-pane\"]').hidden")
        for key, shown in (("Home", 20), ("End", 75)):  # the first B-scan shown is superior
            browser.js("document.querySelector('[data-viewer]').focus()")
            browser.key(key)
            browser.wait(f"document.querySelector('[data-viewer]').dataset.bscan === '{0 if key == 'Home' else 11}'")
            np.testing.assert_allclose(colour(shown), YELLOW, atol=40)
            assert max(np.abs(np.subtract(colour(95 - shown), YELLOW))) > 60, "the others are faint"
        browser.assert_quiet()
