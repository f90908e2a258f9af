"""Stars of B-scans: left out unless asked for, told by their lines alone, and then the raster that a raster scan of
the eye would be."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.catalog import Catalog, CatalogError, NothingAccepted
from octfm.catalog.scan import scan
from octfm.config import load
from octfm.errors import ConfigError
from octfm.formats import read_volume
from octfm.phantom import phantom_volume
from octfm.pretraining import preflight
from octfm.pretraining.data import training_rows
from octfm.pretraining.settings import PretrainConfig
from octfm.store.prepare import prepare
from octfm.store.selection import select
from octfm.store.store import Store
from octfm.volume.laterality import disc_side
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.radial import BSCAN_MM, to_raster
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Lines, Volume
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.small_store import edit_rows, small_store
from support.stars import RADIUS_MM, lines_of, scanned, write_star
from support.vendor_files import write_vol

BOTH = ("raster", "radial")
SMALL = Preprocessing(image_size=(32, 192, 192), target_spacing=(0.15, 0.0104, 0.025))


@pytest.fixture(scope="module")
def eye() -> Volume:
    return phantom_volume(3, scanner="topcon_maestro2", size=(64, 248, 256))[0].superior_to_inferior()


def shuffled(star: Volume, seed: int = 0) -> Volume:
    """B-scans in another order, some of them scanned backwards."""
    rng = np.random.default_rng(seed)
    order, back = rng.permutation(len(star.voxels)), rng.random(len(star.voxels)) < 0.5
    voxels, start, end = star.voxels[order].copy(), star.lines.start[order], star.lines.end[order]
    voxels[back] = voxels[back][:, :, ::-1]
    turned = back[:, None]
    return replace(star, voxels=voxels, lines=Lines(np.where(turned, end, start), np.where(turned, start, end)))


# ---- from the file to the store
# ----------------------------------------------------------------------------------------------------------


def test_a_star_enters_when_asked_for_and_is_the_raster_of_the_same_eye(eye, tmp_path):
    star = shuffled(scanned(eye, lines_of(24), motion_px=6))
    write_star(tmp_path / "dicom" / "star.dcm", star, circles=3, participant="a")
    options = {"protocol": "spectralis_ppol_mac_hr", "participant": "b", "superior_first": True}
    # Between voxels, as the star is: less speckle makes any retina some micrometres thicker.
    v = eye.voxels.astype(np.float32)
    raster = np.rint((v[:-1, :, :-1] + v[1:, :, :-1] + v[:-1, :, 1:] + v[1:, :, 1:]) / 4).astype(np.uint8)
    write_oct_dicom(tmp_path / "dicom" / "raster.dcm", raster, eye.spacing_mm, **options)
    left_out = scan(tmp_path / "dicom", workers=0)
    assert [a.layout for a in left_out.acquisitions] == ["raster"]
    assert [(s.code, "--layouts raster,radial" in s.fix) for s in left_out.skipped] == [("not_raster", True)]

    catalog = Catalog.load(scan(tmp_path / "dicom", layouts=BOTH, workers=0).save(tmp_path / "catalog"))
    radial = next(a for a in catalog.acquisitions if a.layout == "radial")
    assert radial.shape == (27, 248, 384) and radial.protocol == "spectralis_onh_rc_hr" and radial.laterality == "R"
    assert catalog.summary()["layouts"] == {"radial": 1, "raster": 1} and not catalog.skipped and not catalog.rejects
    store = prepare(catalog, tmp_path / "store", SMALL, workers=0, progress=False)
    rows = {row.layout: row for row in store.rows}
    arrays = {name: store.read([row.index]) for name, row in rows.items()}
    shown = {name: found.valid[0, 1] > found.valid[0, 0] for name, found in arrays.items()}
    disc = np.hypot(
        *((np.indices(shown["radial"].shape) - np.array([[[15.5]], [[95.5]]])) * np.array([[[0.15]], [[0.025]]]))
    )
    assert shown["radial"][disc < RADIUS_MM - 0.3].all() and not shown["radial"][disc > RADIUS_MM + 0.3].any(), (
        "padding outside the star"
    )
    # The windows of the two may lie some rows apart: they are centred on the retina that each shows.
    thickness = {name: (found.band[0, 1] - found.band[0, 0])[disc < 2] * 10.4 for name, found in arrays.items()}
    np.testing.assert_allclose(np.median(thickness["radial"] - thickness["raster"]), 0, atol=10)
    assert np.percentile(np.abs(thickness["radial"] - thickness["raster"]), 95) < 35  # µm
    middle = {name: np.rint(found.band[0, 0][disc < 1.5].mean()).astype(int) for name, found in arrays.items()}
    seen = {name: np.roll(found.voxels[0], -middle[name], axis=1)[:, :60] for name, found in arrays.items()}
    inside = np.broadcast_to((disc < 1.5)[:, None], seen["radial"].shape)
    alike = np.corrcoef(*(seen[name][inside] for name in seen))[0, 1]
    assert alike > 0.6, "layer by layer; the speckle is another one"


@pytest.mark.parametrize("where", ["fundus", "patient"])
def test_positions_on_the_fundus_and_in_the_patient_tell_the_same_star(eye, tmp_path, where):
    star = scanned(eye, lines_of(16))
    volume = read_volume(write_star(tmp_path / "star.dcm", star, where), raster_only=False)
    assert volume.layout == "radial"
    for found, written in ((volume.lines.start, star.lines.start), (volume.lines.end, star.lines.end)):
        np.testing.assert_allclose(found - volume.lines.start[0], written - star.lines.start[0], atol=1e-3)


def test_a_heidelberg_star_is_read_from_vol_as_from_dicom(tmp_path, eye):
    star = scanned(eye, lines_of(12))
    ends = np.concatenate([star.lines.start, star.lines.end], axis=1)
    vol = write_vol(tmp_path / "vol" / "star.vol", star.voxels, ends=ends, spacing_mm=star.spacing_mm, pattern=5)
    (row,) = scan(tmp_path / "vol", layouts=BOTH, workers=0).acquisitions
    assert row.layout == "radial"
    rasters = [
        to_raster(read_volume(path, raster_only=False)) for path in (vol, write_star(tmp_path / "star.dcm", star))
    ]
    # Positions are rounded differently, so that here and there the A-scan beside is taken.
    assert np.mean(rasters[0].voxels != rasters[1].voxels) < 0.03


def test_lines_that_were_scanned_twice_change_nothing(eye):
    star = scanned(eye, lines_of(12))
    twice = np.repeat(np.arange(12), 2)
    again = replace(star, voxels=star.voxels[twice], lines=Lines(star.lines.start[twice], star.lines.end[twice]))
    # The centre differs by 1e-15 mm, so that here and there the A-scan beside is taken.
    assert np.mean(to_raster(again).voxels != to_raster(star).voxels) < 0.03


def test_a_catalog_of_before_there_were_layouts_is_still_read(eye, tmp_path):
    write_oct_dicom(tmp_path / "dicom" / "a.dcm", eye.voxels[::8], (0.75, *eye.spacing_mm[1:]), superior_first=True)
    folder = scan(tmp_path / "dicom", workers=0).save(tmp_path / "catalog")
    table = pq.read_table(folder / "catalog.parquet")
    pq.write_table(table.drop_columns(["layout"]), folder / "catalog.parquet")
    (row,) = Catalog.load(folder).acquisitions
    assert row.layout == "raster"


# ---- geometry
# ----------------------------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(12))
@given(
    turn=st.floats(-4, 4),
    seed=st.integers(0, 99),
    place=st.tuples(st.floats(-1.2, 1.2), st.floats(-1.2, 1.2)),
    count=st.integers(12, 40),
)
def test_what_lies_somewhere_on_the_fundus_lies_there_in_the_raster(turn, seed, place, count):
    """A bright spot, whatever the order, the direction and the angle of the first B-scan."""
    lines = lines_of(count, turn)
    share = np.linspace(0, 1, 240)[None, :, None]
    at = (1 - share) * lines.start[:, None] + share * lines.end[:, None] - (3.4, 3.1)
    bright = 20 + 200 * np.exp(-(np.square(at - np.array(place)).sum(2)) / 0.25**2)
    voxels = np.repeat(np.rint(bright)[:, None], 40, axis=1).astype(np.uint8)
    star = Volume(voxels, (0.02, 0.0105, 2 * RADIUS_MM / 239), layout="radial", lines=lines, laterality="R")
    raster = to_raster(shuffled(star, seed))
    assert (
        raster.layout == "raster"
        and raster.superior_first
        and raster.lines is None
        and raster.spacing_mm[0] == BSCAN_MM
    )
    light = (raster.voxels[:, 20].astype(float) - 20).clip(0)
    d, _, w = raster.shape
    y, x = ((np.arange(n) - n // 2) * mm for n, mm in ((d, raster.spacing_mm[0]), (w, raster.spacing_mm[2])))
    centroid = (light.sum(0) @ x / light.sum(), light.sum(1) @ y / light.sum())
    np.testing.assert_allclose(centroid, place, atol=0.06)


def test_left_eyes_are_mirrored_as_rasters_are(eye):
    right = scanned(eye, lines_of(24))
    left = right.mirrored()
    np.testing.assert_array_equal(left.voxels, right.voxels[:, :, ::-1])
    one, other = SMALL(right), SMALL(left)
    assert other.transform.mirrored and not one.transform.mirrored
    # Not to the last bit: the angles of a mirrored star begin elsewhere.
    inside = (one.valid[1] > one.valid[0]) & (other.valid[1] > other.valid[0])
    assert np.mean(np.abs(one.band - other.band)[:, inside]) < 1


@pytest.mark.parametrize(
    ("what", "lines"), [("degrees apart", lines_of(5)), ("without crossing", None), ("positions are not stated", None)]
)
def test_a_star_that_no_raster_can_be_made_of_is_left_out_with_a_reason(eye, tmp_path, what, lines):
    if lines is None:  # tangents of a circle turn, and never meet
        lines = lines_of(16)
        aside = 0.9 * np.stack([-(lines.end - lines.start)[:, 1], (lines.end - lines.start)[:, 0]], 1) / (2 * RADIUS_MM)
        lines = Lines(lines.start + aside, lines.end + aside)
    star = scanned(eye, lines, columns=96)
    where = "patient" if "stated" in what else "fundus"
    path = write_star(tmp_path / "star.dcm", star, where)
    if "stated" in what:  # the beam from the side: left and up on the fundus cannot be told
        import pydicom

        dataset = pydicom.dcmread(path)
        for frame in dataset.PerFrameFunctionalGroupsSequence:
            x, _, z, *_ = frame.PlaneOrientationSequence[0].ImageOrientationPatient
            frame.PlaneOrientationSequence[0].ImageOrientationPatient = [0, x, z, 1, 0, 0]
        dataset.save_as(path)
    with pytest.raises(NothingAccepted) as nothing:
        scan(tmp_path, layouts=BOTH, workers=0)
    (skipped,) = nothing.value.catalog.skipped
    assert skipped.code == "not_raster" and what in skipped.sentence
    assert read_volume(path, raster_only=False).layout == "radial", "to look at it is another matter"


def test_sixteen_bits_stay_sixteen_bits(eye):
    star = scanned(eye, lines_of(12), columns=48)
    deep = replace(star, voxels=star.voxels.astype(np.uint16) * 257)
    raster = to_raster(deep)
    assert raster.voxels.dtype == np.uint16
    np.testing.assert_allclose(raster.voxels / 257, to_raster(star).voxels, atol=1)


# ---- asking
# ------------------------------------------------------------------------------------------------------------------------------


def test_the_disc_side_of_a_star_is_that_of_the_raster(eye):
    """Beyond a star there is padding, a quarter of the places that are compared: it is no evidence."""
    raster = to_raster(scanned(eye, lines_of(24), columns=256))
    for volume in (eye, raster):
        for own in (volume, volume.mirrored()):
            found = disc_side(own.voxels, own.spacing_mm, find_tissue(own.voxels, own.spacing_mm))
            assert found.side == {"R": "right", "L": "left"}[own.laterality], found


def test_the_command_takes_stars_when_asked_and_refuses_other_layouts(eye, tmp_path):
    write_star(tmp_path / "dicom" / "star.dcm", scanned(eye, lines_of(12), columns=96))
    told = invoke("scan", tmp_path / "dicom", "--layouts", "raster,radial", "--out", tmp_path / "c", "--workers", "0")
    assert told.exit_code == 0 and "1 accepted" in told.output, told
    page = (tmp_path / "c" / "data_health.html").read_text()
    assert "(radial)" in page and "B-scan distance" not in page, "the B-scans of a star have no distance"
    for asked in ("radial", "raster,circle", ""):
        with pytest.raises(CatalogError, match="expected raster, raster,radial"):
            scan(tmp_path / "dicom", layouts=tuple(asked.split(",")))


@pytest.fixture
def mixed(tmp_path) -> Store:
    """A store in which every third row is of a star."""
    store = small_store(tmp_path / "prepared")
    edit_rows(store.path, lambda row: {"layout": "radial" if row.index % 3 == 0 else "raster"})
    return Store.open(store.path)


def test_training_takes_rasters_and_stars_only_when_asked(mixed):
    config = {"data": {"store": str(mixed.path), "global_batch_size": 4}}
    for split, rows in zip(("train", "val"), training_rows(load(PretrainConfig, config), mixed), strict=True):
        assert [mixed.rows[row].layout for row in rows] == ["raster"] * len(rows) and len(rows), split
    asked = load(PretrainConfig, {"data": {**config["data"], "layouts": list(BOTH)}})
    assert len(training_rows(asked, mixed)[0]) == len(select(mixed, "train", layouts=BOTH)) == 16
    told = preflight.data.arithmetic(load(PretrainConfig, config), mixed, 1, 10)
    only = load(PretrainConfig, {"data": {**config["data"], "scanners": [mixed.rows[1].scanner]}})
    assert "6 radial" not in preflight.data.arithmetic(only, mixed, 1, 10).measured, (
        "those of other scanners are not left out for that"
    )
    assert "6 radial scans left out; data.layouts=[raster,radial] includes them" in told.measured
    with pytest.raises(ConfigError, match=r"data\.layouts"):
        load(PretrainConfig, {"data": {"layouts": ["circle"]}})
