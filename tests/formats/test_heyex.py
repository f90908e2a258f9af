"""Heidelberg exports: .vol and XML of one scan agree with each other, with DICOM and with eyepy; what is no raster
is left out."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_device_grid, read_header, read_surfaces, read_volume
from octfm.formats.heyex_vol import display
from octfm.io.isolation import Limits
from octfm.volume.etdrs import ZONES
from octfm.volume.preprocessing import Preprocessing
from support.dicom_files import write_oct_dicom
from support.vendor_files import SPACING_MM, ends_of, radial_ends, with_grid, write_heyex_xml, write_vol
from support.volumes import SHAPE, telling_voxels

DUMMY_VOL, DUMMY_XML = "heyex_vol/eyepy_dummy_10x40x50.vol", "heyex_xml/eyepy_dummy/test_dummy.xml"
LINE, CIRCLE = "heyex_vol/Willis_B_716_0.vol", "heyex_vol/Willis_B_716_2.vol"

LAYERS = {
    "ILM": 0,
    "BM": 1,
    "RNFL": 2,
    "GCL": 3,
    "IPL": 4,
    "INL": 5,
    "OPL": 6,
    "ELM": 8,
    "PR1": 14,
    "PR2": 15,
    "RPE": 16,
}
"""Rows of a segmentation in a .vol file, as eyepy parses it."""


def layers(shape=SHAPE) -> np.ndarray:
    """[2, D, W] rows, another height in every B-scan, with gaps."""
    d, _, w = shape
    ilm = 8.25 + np.arange(d)[:, None] * 0.5 + np.zeros(w)
    ilm[3, 5:9] = np.nan
    return np.stack([ilm, ilm + 15]).astype(np.float32)


# ---- one scan in several formats
# -------------------------------------------------------------------------------------------------


def test_real_vol_and_xml_of_one_scan_agree(real_data):
    vol, xml = read_volume(real_data / DUMMY_VOL), read_volume(real_data / DUMMY_XML)
    np.testing.assert_array_equal(vol.voxels, xml.voxels)
    np.testing.assert_array_equal(vol.voxels, read_volume((real_data / DUMMY_XML).parent).voxels)
    assert vol.shape == (10, 40, 50) and vol.voxels.dtype == np.uint8
    np.testing.assert_allclose(vol.spacing_mm, (0.031444, 0.003872, 0.011819), rtol=1e-4)
    np.testing.assert_allclose(xml.spacing_mm, vol.spacing_mm, rtol=1e-4)
    assert vol.laterality == xml.laterality == "R" and vol.participant == xml.participant == "Study-01"
    assert vol.superior_first is xml.superior_first is False, (
        "y falls from 6.807 to 6.524 mm, so the first B-scan is inferior"
    )


def test_real_xml_agrees_with_eyepy(real_data):
    eyepy = pytest.importorskip("eyepy", reason="install the extra `peers`", exc_type=ImportError)
    volume, surfaces = read_volume(real_data / DUMMY_XML), read_surfaces(real_data / DUMMY_XML)
    theirs = eyepy.import_heyex_xml((real_data / DUMMY_XML).parent)
    np.testing.assert_array_equal(volume.voxels, theirs.data)
    assert list(surfaces.names) == list(theirs.layers) and volume.spacing_mm == pytest.approx(theirs.scale)
    for name, heights in zip(surfaces.names, surfaces.heights_px, strict=True):
        np.testing.assert_allclose(heights, theirs.layers[name].data, rtol=1e-6)
    assert surfaces.names[:3] == ("ILM", "BM", "RNFL") and surfaces.heights_px.shape == (11, 10, 50)
    assert np.nanmin(surfaces.heights_mm) == pytest.approx(9.6 * 0.003872, rel=1e-5)


@pytest.mark.parametrize("name", [LINE, CIRCLE])
def test_real_line_and_circle_agree_with_eyepy(real_data, name):
    """With what it parses: it makes no volume of a circle, and has gray values of its own."""
    vol = pytest.importorskip("eyepy.io.he", reason="install the extra `peers`", exc_type=ImportError)
    (theirs,) = vol.HeVolReader(real_data / name).parsed_file.bscans
    volume, surfaces = read_volume(real_data / name, raster_only=False), read_surfaces(real_data / name)
    np.testing.assert_array_equal(volume.voxels[0], display(theirs.data))
    for layer, heights in zip(surfaces.names, surfaces.heights_px[:, 0], strict=True):
        rows = theirs.layer_segmentations[LAYERS[layer]]
        np.testing.assert_allclose(heights, np.where(rows > 1e30, np.nan, rows))


@pytest.mark.parametrize("superior_first", [True, False])
def test_a_scan_is_the_same_as_vol_xml_and_dicom(tmp_path, real_data, superior_first):
    gray = np.ascontiguousarray(np.load(real_data / "medvisbonn_amd_spectralis_145.npz")["volume"][40:52, :, ::4])
    ends = ends_of(12, gray.shape[2], superior_first=superior_first)
    vol = read_volume(write_vol(tmp_path / "a.vol", gray, ends=ends))
    xml = read_volume(write_heyex_xml(tmp_path / "a", gray, ends=ends))
    dicom = read_volume(write_oct_dicom(tmp_path / "a.dcm", gray, SPACING_MM, superior_first=superior_first))
    for other in (xml, dicom):
        np.testing.assert_array_equal(vol.voxels, other.voxels)
        np.testing.assert_allclose(vol.spacing_mm, other.spacing_mm, rtol=1e-3)
        for fact in ("laterality", "superior_first", "participant", "scanner"):
            assert getattr(vol, fact) == getattr(other, fact), fact


@pytest.mark.parametrize("encoding", ["GB2312", "Big5", "Shift_JIS", "EUC-KR", "utf-16", "ISO-8859-1"])
def test_an_xml_is_read_in_the_encoding_that_it_states(tmp_path, encoding):
    """The parser knows none of several bytes per letter except Unicode's."""
    uri = write_heyex_xml(tmp_path / "a", telling_voxels())
    name = {"GB2312": "张", "Big5": "張", "Shift_JIS": "山田", "EUC-KR": "김"}.get(encoding, "Müller")
    text = re.sub(r"<\?xml[^>]*\?>", "", uri.read_text()).replace("1001", name)
    uri.write_bytes(f'<?xml version="1.0" encoding="{encoding}"?>{text}'.encode(encoding))
    assert read_volume(uri).participant == name
    np.testing.assert_array_equal(read_volume(uri).voxels, telling_voxels())


def test_display_is_the_fourth_root():
    """HEYEX: gray = 255 * reflectivity^(1/4); the largest float32 means outside."""
    raw = np.array([[0, (64 / 255) ** 4, 1 / 16, 1, 3.4028235e38, 1.5]], np.float32)
    np.testing.assert_array_equal(display(raw), [[0, 64, 128, 255, 0, 255]])


# ---- what is no raster
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "layout"), [(LINE, "line"), (CIRCLE, "circle")])
def test_real_line_and_circle_are_left_out_unless_asked_for(real_data, name, layout):
    for read in (read_header, read_volume):
        with pytest.raises(ReadError) as caught:
            read(real_data / name)
        assert caught.value.code == "not_raster" and {"line": "single B-scan", "circle": "circular"}[layout] in str(
            caught.value
        )
    volume, surfaces = read_volume(real_data / name, raster_only=False), read_surfaces(real_data / name)
    with pytest.raises(ReadError, match="only a raster is a volume in space"):
        Preprocessing()(volume)
    assert volume.layout == layout and volume.shape == (1, 496, 768) and volume.laterality == "R"
    assert volume.spacing_mm[1] == pytest.approx(0.00387167)
    ilm, bm, _ = surfaces.heights_px[:, 0]
    assert surfaces.names == ("ILM", "BM", "RNFL") and (bm > ilm)[~np.isnan(bm - ilm)].all()
    # The surfaces lie on the image: it is brighter just below the ILM than above it.
    columns = np.flatnonzero(~np.isnan(ilm))
    below, above = (
        np.mean([volume.voxels[0, int(ilm[c]) + k, c] for c in columns for k in ks])
        for ks in (range(2, 8), range(-12, -4))
    )
    assert below > 1.5 * above


@pytest.mark.parametrize("write", [write_vol, write_heyex_xml])
@pytest.mark.parametrize("kind", ["radial", "repeated", "one place", "one place, eye moving"])
def test_radial_and_repeated_scans_are_told_by_their_positions(tmp_path, write, kind):
    ends = radial_ends(12) if kind == "radial" else np.repeat(ends_of(3, 36), 4, axis=0)
    if kind.startswith("one place"):
        moved = np.random.default_rng(0).uniform(-0.001, 0.001, 12) * kind.endswith("moving")
        ends, kind = np.repeat(ends_of(1, 36), 12, axis=0) + moved[:, None] * (0, 1, 0, 1), "repeated"
    uri = write(tmp_path / "a.vol", telling_voxels(), ends=ends)
    with pytest.raises(ReadError) as caught:
        read_volume(uri)
    assert caught.value.code == "not_raster"
    volume = read_volume(uri, raster_only=False)
    assert volume.layout == kind and np.array_equal(volume.voxels, telling_voxels())


# ---- order and surfaces
# ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_vol, write_heyex_xml])
def test_bscans_and_surfaces_follow_the_positions(tmp_path, write):
    """Stored in a jumbled order, they come out in the order in which they lie on the fundus."""
    voxels, heights, jumbled = telling_voxels(), layers(), np.random.default_rng(5).permutation(SHAPE[0])
    given = heights[:, jumbled] if write is write_vol else dict(zip(("ILM", "BM"), heights[:, jumbled], strict=True))
    uri = write(tmp_path / "a.vol", voxels[jumbled], ends=ends_of(*SHAPE[::2])[jumbled], layers=given)
    header, volume, surfaces = read_header(uri), read_volume(uri), read_surfaces(uri)
    assert header.flags == ("frames_reordered",)
    straight = volume.superior_to_inferior()
    np.testing.assert_array_equal(straight.voxels, voxels)
    order = slice(None) if volume.superior_first else slice(None, None, -1)
    np.testing.assert_allclose(surfaces.heights_px[:, order], heights, atol=0.01)
    assert surfaces.names == ("ILM", "BM") and surfaces.axial_mm == pytest.approx(SPACING_MM[1])


def test_rows_that_an_older_export_rounds_are_as_high_as_in_vol(tmp_path):
    """Of a retina of 300 µm the rounded height of a row would make 302."""
    older = write_heyex_xml(tmp_path / "older", telling_voxels(), (0.12, 0.0039, 0.0115), layers={"ILM": layers()[0]})
    vol = write_vol(tmp_path / "a.vol", telling_voxels(), (0.12, 0.0038717, 0.0115))
    row_mm = read_volume(vol).spacing_mm[1]
    assert read_volume(older).spacing_mm[1] == pytest.approx(row_mm, rel=1e-4)
    assert read_surfaces(older).axial_mm == pytest.approx(row_mm, rel=1e-4)


def test_without_positions_xml_numbers_decide_and_never_names(tmp_path):
    uri = write_heyex_xml(tmp_path / "a", telling_voxels(), shuffle=3)
    uri.write_text(re.sub(r"<(Start|End)>.*?</\1>", "", uri.read_text()))
    header = read_header(uri)
    assert header.spacing_mm is None and header.superior_first is None
    np.testing.assert_array_equal(read_volume(uri, spacing_mm=SPACING_MM).voxels, telling_voxels())


def test_a_file_without_layers_has_no_surfaces(tmp_path):
    assert read_surfaces(write_vol(tmp_path / "a.vol", telling_voxels())) is None
    assert read_surfaces(write_heyex_xml(tmp_path / "a", telling_voxels())) is None
    assert read_surfaces(write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), SPACING_MM)) is None


# ---- the grid that the instrument measured
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("laterality", ["R", "L"])
def test_the_instruments_etdrs_zones_are_read(tmp_path, laterality):
    uri = with_grid(write_heyex_xml(tmp_path / "a", telling_voxels(), laterality=laterality))
    grid = read_device_grid(uri)
    assert tuple(grid.mean_um) == ZONES and grid.laterality == laterality
    assert grid.mean_um["centre"] == pytest.approx(280) and grid.mean_um["outer temporal"] == pytest.approx(270)
    assert grid.mean_um["inner nasal"] == pytest.approx(345), "HEYEX names nasal and temporal, not left and right"
    assert grid.mean_um["outer inferior"] is None and grid.coverage["outer inferior"] == 0
    assert grid.coverage["outer superior"] == pytest.approx(0.985) and grid.volume_mm3 == 8.729
    assert grid.centre_mm == pytest.approx((3.70, 7.72)) and grid.centre_moved
    assert read_device_grid(uri.parent).mean_um == grid.mean_um
    assert read_device_grid(uri, limits=Limits()).mean_um == grid.mean_um


def test_a_single_exported_series_is_read(tmp_path):
    """Its XML starts with the series, without the examination around it, and HEYEX has renamed its images."""
    whole = read_volume(write_heyex_xml(tmp_path / "whole", telling_voxels()))
    uri = with_grid(write_heyex_xml(tmp_path / "clinic" / "a", telling_voxels()))
    text = uri.read_text()
    uri.write_text("\ufeff" + text[text.index("<Series>") : text.index("</Series>")] + "</Series>")
    for i, image in enumerate(sorted(uri.parent.glob("scan*.tif"))):
        image.rename(uri.parent / f"OCT R {i} [{image.name}].tif")
    assert read_device_grid(uri).mean_um["centre"] == pytest.approx(280)
    volume = read_volume(uri)
    np.testing.assert_array_equal(volume.voxels, whole.voxels)
    assert volume.spacing_mm == whole.spacing_mm and volume.scanner == "heidelberg_spectralis"
    catalog = scan(tmp_path / "clinic", workers=1, participant_from="{participant}/*")
    assert [a.uri for a in catalog.acquisitions] == [str(uri)] and not catalog.rejects
    other = tmp_path / "other.xml"
    other.write_text("<Series><SeriesUID>1</SeriesUID></Series>")
    with pytest.raises(ReadError, match="found no format"):
        read_volume(other)


def test_of_two_patients_in_an_export_a_scan_is_of_the_one_it_is_filed_under(tmp_path):
    uri = write_heyex_xml(tmp_path / "a", telling_voxels(), participant="1001")
    uri.write_text(uri.read_text().replace("<BODY>", "<BODY><Patient><ID>7</ID><PatientID>9009</PatientID></Patient>"))
    assert read_header(uri).participant == read_volume(uri).participant == "1001"


@pytest.mark.parametrize("write", [write_vol, write_heyex_xml])
@pytest.mark.parametrize(
    "word, flags", [("Re", {"laterality_unknown", "laterality_not_read"}), ("L", set()), ("U", {"laterality_unknown"})]
)
def test_a_word_for_the_eye_that_is_not_known_is_flagged(tmp_path, write, word, flags):
    header = read_header(write(tmp_path / "a", telling_voxels(), laterality=word))
    assert {flag for flag in header.flags if flag.startswith("laterality")} == flags


@pytest.mark.parametrize("of_the_series", [True, False], ids=["series", "last image"])
def test_an_export_that_names_both_eyes_names_none(tmp_path, of_the_series):
    uri = write_heyex_xml(tmp_path / "a", telling_voxels(), laterality="R")
    before, eye, after = (text := uri.read_text()).partition("<Laterality>R")
    if not of_the_series:
        before, eye, after = text.rpartition("<Laterality>R")
    uri.write_text(f"{before}{eye[:-1]}L{after}")
    assert read_volume(uri).laterality is None and "laterality_unknown" in read_header(uri).flags


def test_a_file_without_a_grid_of_1_3_and_6_mm_has_none(tmp_path):
    xml = write_heyex_xml(tmp_path / "a", telling_voxels())
    assert read_device_grid(xml) is None and read_device_grid(xml.parent) is None
    assert read_device_grid(with_grid(xml, diameters=(1, 2.22, 3.45))) is None
    assert read_device_grid(write_vol(tmp_path / "a.vol", telling_voxels())) is None
    assert read_device_grid(write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), SPACING_MM)) is None


# ---- exports that are damaged
# ----------------------------------------------------------------------------------------------------


def test_an_xml_without_its_images_says_which_is_missing(tmp_path):
    uri = write_heyex_xml(tmp_path / "a", telling_voxels())
    (tmp_path / "a" / "scan 7.tif").unlink()
    with pytest.raises(ReadError, match=r"1 of 12 B-scans are not next to it, for example scan 7.tif") as caught:
        read_header(uri)
    assert caught.value.code == "incomplete_export"


def test_an_xml_cannot_reach_out_of_its_folder_nor_grow(tmp_path):
    uri = write_heyex_xml(tmp_path / "a" / "b", telling_voxels())
    text = uri.read_text()
    (tmp_path / "a" / "secret.tif").write_bytes((uri.parent / "scan 7.tif").read_bytes())
    uri.write_text(text.replace(r"file:///\\server\share\scan 7.tif", r"..\secret.tif"))
    with pytest.raises(ReadError) as caught:
        read_volume(uri)
    assert caught.value.code == "incomplete_export"
    bomb = '<!DOCTYPE x [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    uri.write_text(bomb + text.replace("IR_OCT", "&b;"))
    with pytest.raises(ReadError) as caught:
        read_volume(uri)
    assert caught.value.code == "damaged_file"


def test_the_folder_of_an_export_is_read_by_its_xml(tmp_path):
    """A user points at the folder as often as at the file; by their names the images lie in another order."""
    uri = write_heyex_xml(tmp_path / "visit", telling_voxels(), shuffle=3, layers={"ILM": layers()[0]})
    by_folder, by_file = read_volume(uri.parent), read_volume(uri)
    np.testing.assert_array_equal(by_folder.voxels, by_file.voxels)
    assert (by_folder.spacing_mm, by_folder.acquisition, by_folder.source) == (
        by_file.spacing_mm,
        by_file.acquisition,
        str(uri),
    )
    assert read_header(uri.parent) == read_header(uri) and read_surfaces(uri.parent).names == ("ILM",)
    shutil.copy(uri, uri.with_name("second.xml"))
    with pytest.raises(
        ReadError, match=r"which of its 2 HEYEX exports\? give one of export\.xml, second\.xml"
    ) as caught:
        read_volume(uri.parent)
    assert caught.value.code == "several_volumes"


def test_scan_takes_an_export_as_one_acquisition(tmp_path):
    """Its images are companions, not files of their own; a stray image is a reject that says so."""
    uri = write_heyex_xml(tmp_path / "clinic" / "a", telling_voxels())
    stray = Path(str(uri.parent / "another.tif"))
    stray.write_bytes((uri.parent / "SLO.tif").read_bytes())
    write_vol(tmp_path / "clinic" / "b.vol", telling_voxels(), ends=radial_ends(12))
    catalog = scan(tmp_path / "clinic", workers=1)
    assert [a.uri for a in catalog.acquisitions] == [str(uri)] and catalog.companions == SHAPE[0] + 1
    assert [(r.uri, r.code) for r in catalog.rejects] == [(str(stray), "single_image")]
    assert [r.code for r in catalog.skipped] == ["not_raster"]


def test_images_whose_names_differ_in_case_only_stay_two(tmp_path):
    """Taken for one file, a B-scan would be there twice and another not at all."""
    voxels = telling_voxels()
    export = write_heyex_xml(tmp_path / "export", voxels)
    text = export.read_text()
    for old, new in (("scan 0.tif", "S.tif"), ("scan 1.tif", "s.tif")):
        (tmp_path / "export" / old).rename(tmp_path / "export" / new)
        text = text.replace(old, new)
    export.write_text(text)
    assert np.array_equal(read_volume(export).voxels, voxels)
    (tmp_path / "export" / "s.tif").unlink()
    with pytest.raises(ReadError, match="names one image for two B-scans"):
        read_volume(export)
