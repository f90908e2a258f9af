"""Vendor formats of which there is no real file: OCT-Converter, another reading of the same structures, finds in our
files what we do.

That proves that two readers agree about a structure, not that instruments write it: the guide says "not verified on
a real file".
"""

import time
import zipfile
from dataclasses import asdict

import numpy as np
import pytest

import octfm
from octfm.catalog.participants.pseudonyms import locate, pseudonymise
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_surfaces, read_volume, volumes_in
from octfm.formats.heidelberg_e2e import reflectivity_of_codes
from octfm.formats.heyex_vol import display
from octfm.report.viewer import view_facts
from octfm.tasks.view import scene_of
from support.vendor_files import (
    SPACING_MM,
    e2e_codes,
    ends_of,
    radial_ends,
    write_bioptigen,
    write_e2e,
    write_img,
    write_optovue,
    write_sidecar,
    write_topcon,
    write_vol,
)
from support.volumes import SHAPE, telling_voxels


def code_of(uri, **options) -> str:
    with pytest.raises(ReadError) as caught:
        read_volume(uri, **options)
    return caught.value.code


@pytest.fixture
def oct_converter(monkeypatch):
    readers = pytest.importorskip("oct_converter.readers", reason="install the extra `peers`", exc_type=ImportError)
    # It reads with numpy.fromstring, which numpy 2.3 took away.
    monkeypatch.setattr(np, "fromstring", np.frombuffer)
    return readers


# ---- the same as another reader
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [True, False])
def test_topcon_agrees_with_oct_converter(tmp_path, oct_converter, compressed):
    voxels = telling_voxels(np.uint8 if compressed else np.uint16)
    uri = write_topcon(tmp_path / ("a.fda" if compressed else "a.fds"), voxels, laterality="L", compressed=compressed)
    theirs = (oct_converter.FDA if compressed else oct_converter.FDS)(uri).read_oct_volume()
    volume = read_volume(uri)
    np.testing.assert_array_equal(volume.voxels, np.stack(theirs.volume))
    dx, dz, dy = theirs.pixel_spacing
    assert volume.spacing_mm == pytest.approx((dz, dy, dx)) and volume.laterality == theirs.laterality == "L"
    assert volume.participant == theirs.patient_id == "1001" and volume.scanner == "topcon_3doct_2000"


@pytest.mark.parametrize("multiple", [True, False])
def test_e2e_agrees_with_oct_converter(tmp_path, oct_converter, multiple):
    """In structure. It reverses the bits of the mantissa, so that only codes that read the same in both directions
    tell."""
    codes = (telling_voxels().astype(np.uint16) // 5 + 12 << 10) | np.uint16(0b1011111101)
    uri = write_e2e(tmp_path / "a.e2e", {(1, 2, 3): codes}, eyes="L", multiple=multiple)
    (theirs,) = oct_converter.E2E(uri).read_oct_volume()
    volume, reflectivity = read_volume(uri, spacing_mm=SPACING_MM), reflectivity_of_codes()[codes]
    np.testing.assert_array_equal(volume.voxels, display(reflectivity))
    shown = np.where(reflectivity <= 1, (np.log(reflectivity + 2.44e-04) + 8.3) / 8.285, reflectivity)
    np.testing.assert_allclose(np.stack(theirs.volume), np.clip(shown, 0, 1), atol=1e-5)
    assert volume.laterality == theirs.laterality == "L" and volume.participant == theirs.patient_id == "1001"


def test_optovue_agrees_with_oct_converter(tmp_path, oct_converter):
    values = telling_voxels(np.uint16).astype(np.float32) / 7
    uri = write_optovue(tmp_path / "a.OCT", values, eye="OS")
    (theirs,) = oct_converter.POCT(uri).read_oct_volume()
    volume = read_volume(uri, spacing_mm=SPACING_MM)
    low, high = values.min(), values.max()
    np.testing.assert_allclose(volume.voxels, (np.stack(theirs.volume) - low) / (high - low) * 65535, atol=0.6)
    assert volume.laterality == theirs.laterality == "L" and "intensity_stretched" in read_header(uri).flags


def test_bioptigen_agrees_with_oct_converter(tmp_path, oct_converter):
    voxels = telling_voxels(np.uint16)
    uri = write_bioptigen(tmp_path / "a.OCT", voxels, scans=12)
    (theirs,) = oct_converter.BOCT(uri).read_oct_volume()
    np.testing.assert_array_equal(read_volume(uri).voxels, np.stack(theirs.volume).transpose(0, 2, 1))


@pytest.mark.parametrize(("side", "word"), [("R", "OD"), ("L", "OS")])
def test_the_eye_is_the_one_that_a_file_states(tmp_path, side, word):
    voxels = telling_voxels()
    optovue = write_optovue(tmp_path / "b.OCT", voxels.astype(np.float32), eye=word)
    text = optovue.with_suffix(".txt").read_text()
    optovue.with_suffix(".txt").write_text("Protocol = OD and OS\n" + text)
    for uri in (
        write_topcon(tmp_path / "a.fds", voxels, laterality=side), optovue,
        write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(voxels)}, eyes=side),
        write_vol(tmp_path / "a.vol", voxels, laterality=word),
        write_img(tmp_path / f"Cube 36x12_1-2-2001_1-2-3_{word}_sn4_cube_z.img", telling_voxels(shape=(12, 1024, 36))),
    ):  # fmt: skip
        assert read_header(uri).laterality == side, uri.name


# ---- Heidelberg .e2e
# -------------------------------------------------------------------------------------------------------------


def test_codes_of_e2e_are_pieces_of_the_floats_of_vol(real_data):
    """A real .vol has floats of 10 bits of mantissa: cut to 16 bit with another bias they are codes, and come back
    as they were."""
    content = (real_data / "heyex_vol" / "Willis_B_716_2.vol").read_bytes()
    values = np.frombuffer(content, "<f4", 768 * 496, 2048 + 768 * 768 + 55296)
    bits = values.view(np.uint32)
    assert not (bits & 0x1FFF).any()
    codes = np.where(bits > 0, (bits >> 13).astype(int) - (64 << 10), 0)
    np.testing.assert_array_equal(reflectivity_of_codes()[codes], values)


def test_brighter_codes_of_e2e_are_never_darker():
    table = reflectivity_of_codes()
    assert table[63 << 10] == 1 and table[0] == 0 and (np.diff(table[:-1]) > 0).all()
    assert table[-1] == 0, "a voxel without image"


@pytest.mark.parametrize("multiple", [True, False])
def test_a_scan_is_the_same_as_vol_and_e2e(tmp_path, multiple):
    voxels = telling_voxels()
    vol = read_volume(write_vol(tmp_path / "a.vol", voxels))
    e2e = read_volume(
        write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(voxels)}, multiple=multiple), spacing_mm=SPACING_MM
    )
    np.testing.assert_array_equal(vol.voxels, e2e.voxels)


def test_each_series_of_an_e2e_is_a_volume(tmp_path):
    one, other = telling_voxels(), telling_voxels()[:, :, ::-1]
    series = {(1, 2, 3): e2e_codes(one), (1, 2, 4): e2e_codes(other)}
    uri = write_e2e(tmp_path / "clinic" / "p7.e2e", series, eyes="RL", participant="p7")
    with pytest.raises(ReadError, match="one of series_1_2_3, series_1_2_4, in single quotes") as several:
        read_volume(uri)  # a shell takes ! for its history
    assert several.value.code == "several_volumes"
    uris = volumes_in(uri)
    assert uris == [f"{uri}!/series_1_2_3", f"{uri}!/series_1_2_4"]
    assert [read_volume(u, spacing_mm=SPACING_MM).laterality for u in uris] == ["R", "L"]
    catalog = scan(tmp_path / "clinic", nominal_spacing_mm=SPACING_MM, workers=0)
    assert [(a.uri, a.participant, a.laterality) for a in catalog.acquisitions] == [
        (uris[0], "p7", "R"),
        (uris[1], "p7", "L"),
    ]
    preprocessing = octfm.Preprocessing(image_size=(8, 32, 32), target_spacing=(0.18, 0.0078, 0.0172))
    store = octfm.prepare(catalog, tmp_path / "store", preprocessing, workers=1, progress=False)
    assert len(store) == 2 and not store.unprepared()
    hidden = pseudonymise(catalog, b"0123456789abcdef")
    assert sorted(locate(hidden, tmp_path / "clinic", b"0123456789abcdef").values()) == uris and "p7" not in str(
        asdict(hidden)
    )


def test_copies_of_an_e2e_with_several_series_are_known_as_copies(tmp_path):
    series = {(1, 2, n): e2e_codes(np.roll(telling_voxels(), n, 2)) for n in (3, 4)}
    for folder in ("a", "b"):
        write_e2e(tmp_path / folder / "p7.e2e", series, eyes="RL")
    catalog = scan(tmp_path, nominal_spacing_mm=SPACING_MM, workers=0)
    assert [a.uri.split("/")[-3] for a in catalog.acquisitions] == ["a", "a"]
    assert [reject.code for reject in catalog.rejects] == ["duplicate_sop_uid"] * 2


def test_series_are_found_in_an_e2e_inside_an_archive(tmp_path):
    uri = write_e2e(
        tmp_path / "p7.e2e", {(1, 2, n): e2e_codes(np.roll(telling_voxels(), n, 2)) for n in (3, 4)}, eyes="RL"
    )
    (tmp_path / "clinic").mkdir()
    with zipfile.ZipFile(tmp_path / "clinic" / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(uri, "p7.e2e")
    for options in ({}, {"extract": tmp_path / "unpacked"}):
        catalog = scan(tmp_path / "clinic", nominal_spacing_mm=SPACING_MM, workers=0, **options)
        assert [a.uri.rpartition("!/")[2] for a in catalog.acquisitions] == ["series_1_2_3", "series_1_2_4"]
        for a, n in zip(catalog.acquisitions, (3, 4), strict=True):
            np.testing.assert_array_equal(
                read_volume(a.uri, spacing_mm=SPACING_MM).voxels, np.roll(telling_voxels(), n, 2)
            )


def test_bscans_of_an_e2e_lie_where_those_of_a_vol_lie(tmp_path):
    """Positions point to the right and downwards in both; millimetres that are declared are those of this eye."""
    voxels, ends = telling_voxels(), ends_of(*SHAPE[::2])
    middle = ends[:, :2].mean(axis=0)
    for name, way in (("down", slice(None)), ("up", slice(None, None, -1))):
        vol = read_volume(write_vol(tmp_path / f"{name}.vol", voxels, ends=ends[way]))
        degrees = (ends[way] - [*middle, *middle]) * 15 / 4.4
        uri = write_e2e(tmp_path / f"{name}.e2e", {(1, 2, 3): e2e_codes(voxels)}, ends=degrees)
        for scale in (1.0, 1.1):
            dz, dy, dx = SPACING_MM
            e2e = read_volume(uri, spacing_mm=(scale * dz, dy, scale * dx)) if scale != 1 else read_volume(uri)
            assert e2e.superior_first is vol.superior_first and vol.superior_first is not None
            np.testing.assert_array_equal(e2e.voxels, vol.voxels)
            apart = np.concatenate([e2e.lines.start - vol.lines.start * scale, e2e.lines.end - vol.lines.end * scale])
            np.testing.assert_allclose(apart, np.broadcast_to(-scale * middle, apart.shape), atol=1e-4)


def test_degrees_of_an_e2e_order_bscans_and_become_a_mean_eyes_millimetres(tmp_path):
    voxels, jumbled = telling_voxels(), np.random.default_rng(5).permutation(SHAPE[0])
    uri = write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(voxels)[jumbled]}, ends=ends_of(*SHAPE[::2])[jumbled])
    header = read_header(uri)
    dz, dy, dx = SPACING_MM
    assert header.spacing_mm == pytest.approx((dz * 4.4 / 15, dy, dx * 4.4 / 15), rel=1e-4), "rows are stated in mm"
    assert {"lateral_mm_of_a_mean_eye", "frames_reordered"} <= set(header.flags)
    read = read_volume(uri, spacing_mm=SPACING_MM).superior_to_inferior().voxels
    assert np.abs(read.astype(int) - voxels).max() <= 1
    assert read_volume(uri).mean_eye and not read_volume(uri, spacing_mm=SPACING_MM).mean_eye
    write_sidecar(uri)
    assert read_volume(uri).spacing_mm == SPACING_MM and not read_volume(uri).mean_eye, "what is declared wins"
    assert "lateral_mm_of_a_mean_eye" not in read_header(uri).flags


def test_a_table_declares_the_millimetres_of_an_e2e(tmp_path):
    write_e2e(tmp_path / "clinic" / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())})
    (tmp_path / "files.csv").write_text("file,spacing_mm\na.e2e,0.13 0.0039 0.0125\n")
    table = {"table": tmp_path / "files.csv", "columns": {"file": "file", "spacing_mm": "spacing_mm"}}
    (told,) = scan(tmp_path / "clinic", workers=0, **table).acquisitions
    (untold,) = scan(tmp_path / "clinic", workers=0).acquisitions
    assert told.spacing_mm == (0.13, 0.0039, 0.0125) and told.spacing_source == "table"
    assert "spacing_conflict" not in told.flags, "a mean eye is no contradiction"
    assert untold.spacing_mm == pytest.approx(SPACING_MM, rel=1e-4)
    flagged = ["lateral_mm_of_a_mean_eye" in a.flags for a in (told, untold)]
    assert flagged == [False, True]


def test_the_page_of_an_e2e_says_that_its_millimetres_are_a_mean_eyes(tmp_path):
    uri = write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())})
    volume = read_volume(uri)
    facts = view_facts(volume, scene_of(volume))
    assert dict(facts)["Lateral millimetres"].startswith("those of a mean eye")
    assert "Lateral millimetres" not in dict(view_facts(volume, scene_of(volume), axial_length_mm=25.0))
    declared = read_volume(uri, spacing_mm=SPACING_MM)
    assert "Lateral millimetres" not in dict(view_facts(declared, scene_of(declared)))


def some_layers(count: int) -> np.ndarray:
    """Rows [count, D, W] that differ everywhere, with gaps."""
    depth, height, width = SHAPE
    z, x = np.mgrid[:depth, :width]
    rows = np.stack([3.0 + 4 * n + 0.5 * (z % 3) + x % 4 for n in range(count)]).astype(np.float32)
    rows[0, 2, 5:9] = np.nan
    assert np.nanmax(rows) < height
    return rows


def test_a_single_bscan_of_an_e2e_is_read_with_its_millimetres(tmp_path):
    one = telling_voxels()[:1]
    uri = write_e2e(tmp_path / "line.e2e", {(1, 2, 3): e2e_codes(one)}, ends=ends_of(1, SHAPE[2]) * 3)
    volume = read_volume(uri, raster_only=False)
    assert volume.layout == "line" and volume.shape == one.shape
    assert volume.spacing_mm[1] == pytest.approx(SPACING_MM[1]) and not volume.spacing_estimated


def test_layers_of_an_e2e_lie_on_its_bscans_as_those_of_a_vol(tmp_path):
    rows, order = some_layers(3), np.random.default_rng(1).permutation(SHAPE[0])
    codes, ends = e2e_codes(telling_voxels()), ends_of(*SHAPE[::2]) * 3
    numbers = (0, 1, 16)  # of ILM, BM and RPE; a number beyond the instrument's list is no layer
    layers = {**dict(zip(numbers, rows, strict=True)), 99: rows[0]}
    found = read_surfaces(write_e2e(tmp_path / "a.e2e", {(1, 2, 3): codes}, ends=ends, layers=layers))
    assert found is not None and found.names == ("ILM", "BM", "RPE") and found.axial_mm == pytest.approx(SPACING_MM[1])
    np.testing.assert_array_equal(found.heights_px, rows)
    mixed = {number: surface[order] for number, surface in layers.items()}
    stored = write_e2e(tmp_path / "b.e2e", {(1, 2, 3): codes[order]}, ends=ends[order], layers=mixed)
    sorted_again, voxels = read_surfaces(stored), read_volume(stored).voxels.astype(int)
    whole = telling_voxels().astype(int)
    forward = np.abs(voxels - whole).max() <= 1  # which end comes first is not known
    np.testing.assert_array_equal(sorted_again.heights_px, rows if forward else rows[:, ::-1])
    assert read_surfaces(write_e2e(tmp_path / "c.e2e", {(1, 2, 3): codes})) is None


def test_an_e2e_that_stores_its_last_bscan_first_is_the_same_scan(tmp_path):
    codes = e2e_codes(telling_voxels())
    rows = np.add.outer(np.arange(12.0), np.arange(36)) + 1
    files = [
        write_e2e(tmp_path / f"{n}.e2e", {(1, 2, 3): codes}, layers={0: rows}, backwards_from=first)
        for n, first in enumerate((None, 0, 5))
    ]
    for file in files:
        volume, found = read_volume(file), read_surfaces(file)
        np.testing.assert_array_equal(volume.voxels, read_volume(files[0]).voxels)
        assert volume.lines is not None and np.all(np.diff(volume.lines.start[:, 1]) > 0)
        assert found is not None
        np.testing.assert_array_equal(found.heights_px[0], rows)


def test_an_e2e_that_names_both_eyes_names_none(tmp_path):
    path = write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())})
    stored, own = path.read_bytes(), (bytes(14) + b"R").ljust(27, b"\0")
    assert stored.count(own) == 1
    path.write_bytes(stored.replace(own, own.replace(b"R", b"L")))
    assert read_header(path).laterality is None


def test_heights_above_the_image_and_none_are_no_layer(tmp_path):
    """A .vol may hold heights below 0 beside its largest float, a .e2e 0 where nothing was found."""
    rows = np.add.outer(np.arange(12.0), np.arange(36)) + 1
    known = np.arange(36) % 5 > 0
    vol = write_vol(tmp_path / "a.vol", telling_voxels(), layers=np.where(known, rows, -3.0)[None])
    e2e = write_e2e(
        tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())}, layers={0: np.where(known, rows, 0.0)}
    )
    for found in map(read_surfaces, (vol, e2e)):
        assert found is not None
        np.testing.assert_array_equal(found.heights_px[0], np.where(known, rows, np.nan))


def test_layers_of_a_topcon_lie_on_its_bscans(tmp_path):
    rows = np.floor(some_layers(3))
    layers = {"MULTILAYERS_7": rows[2], "MULTILAYERS_1": rows[0], "MULTILAYERS_9": rows[1], "DISC": rows[1]}
    for name, dtype in (("a.fda", np.uint8), ("a.fds", np.uint16)):
        uri = write_topcon(tmp_path / name, telling_voxels(dtype), compressed=name == "a.fda", layers=layers)
        found = read_surfaces(uri)
        assert found is not None and found.names == ("ILM", "ELM", "BM"), "from the vitreous downwards"
        np.testing.assert_array_equal(found.heights_px, rows)
        assert found.axial_mm == pytest.approx(SPACING_MM[1])
    short = {"MULTILAYERS_1": rows[0][:5]}
    assert read_surfaces(write_topcon(tmp_path / "b.fds", telling_voxels(np.uint16), layers=short)) is None


def test_a_bscan_that_is_missing_in_an_e2e_is_noticed(tmp_path):
    uri = write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())})
    content = bytearray(uri.read_bytes())
    kind = content.rindex(b"MDbData") + 52  # of the last chunk, an image: 1 is nothing that is read
    assert content[kind : kind + 4] == b"\0\0\0\x40"
    content[kind : kind + 4] = b"\1\0\0\0"
    uri.write_bytes(content)
    assert code_of(uri, spacing_mm=SPACING_MM) == "frame_count_mismatch"


ONE_LINE = np.repeat(ends_of(1, 36), 12, axis=0)
MOVING = ONE_LINE + np.random.default_rng(0).uniform(-0.001, 0.001, (12, 1)) * (0, 1, 0, 1)


@pytest.mark.parametrize(("ends", "pattern"), [(radial_ends(12), 3), (ONE_LINE, 3), (MOVING, 3), (None, 2)])
def test_star_repeats_and_circle_of_an_e2e_are_left_out(tmp_path, ends, pattern):
    uri = write_e2e(tmp_path / "a.e2e", {(1, 2, 3): e2e_codes(telling_voxels())}, ends=ends, pattern=pattern)
    assert code_of(uri, spacing_mm=SPACING_MM) == "not_raster"


# ---- the others
# ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scan_mode", "layout"), [(3, "radial"), (4, "radial")])
def test_radial_topcon_scans_are_left_out_unless_asked_for(tmp_path, scan_mode, layout):
    uri = write_topcon(tmp_path / "a.fds", telling_voxels(np.uint16), scan_mode=scan_mode)
    assert code_of(uri) == "not_raster"
    assert read_volume(uri, raster_only=False).layout == layout


@pytest.mark.parametrize("compressed", [True, False])
def test_a_topcon_line_is_read(tmp_path, compressed):
    voxels = telling_voxels(np.uint8 if compressed else np.uint16)[:1]
    line = read_volume(write_topcon(tmp_path / "a.fda", voxels, compressed=compressed), raster_only=False)
    assert line.layout == "line"
    np.testing.assert_array_equal(line.voxels, voxels)


def test_older_topcon_files_state_the_field_in_another_chunk(tmp_path):
    """PARAM_SCAN_02 has two numbers and a byte more in front of it (OCT-Converter's param_scan_02_header)."""
    uri = write_topcon(tmp_path / "a.fds", telling_voxels(np.uint16))
    name, content = b"@PARAM_SCAN_04", uri.read_bytes()
    at = content.index(name) + len(name)
    size = int.from_bytes(content[at : at + 4], "little")
    older = bytes(9) + content[at + 4 : at + 4 + size]
    uri.write_bytes(
        content.replace(
            name + content[at : at + 4 + size], b"@PARAM_SCAN_02" + len(older).to_bytes(4, "little") + older
        )
    )
    assert read_volume(uri).spacing_mm == pytest.approx(SPACING_MM)


def test_topcon_without_a_field_size_asks_for_millimetres(tmp_path):
    assert (
        code_of(write_topcon(tmp_path / "a.fds", telling_voxels(np.uint16), states_spacing=False)) == "missing_spacing"
    )


def test_an_encrypted_topcon_id_is_not_taken_for_one(tmp_path):
    uri = write_topcon(tmp_path / "a.fds", telling_voxels(np.uint16))
    uri.write_bytes(uri.read_bytes().replace(b"1001", b"\x9c\x01\xffz"))
    assert read_header(uri).participant is None


def test_cirrus_cubes_are_told_by_their_size_or_by_their_name(tmp_path):
    """Stored upside down and mirrored; the eye is in the instrument's name and nowhere else."""
    voxels = telling_voxels(shape=(12, 1024, 36))
    header = read_header(write_img(tmp_path / "Macular Cube 36x12_1-2-2001_1-2-3_OS_sn4_cube_z.img", voxels))
    assert (
        header.laterality == "L" and "laterality_from_name" in header.flags and header.protocol == "macular_cube_36x12"
    )
    other = tmp_path / "Macular Cube 36x12_1-2-2001_1-2-4_OS_sn4_cube_z.img"
    assert code_of(write_img(other, voxels[1:])) == "truncated_pixel_data"
    assert code_of(write_img(other, np.concatenate([voxels, voxels[:1]]))) == "surplus_data"
    cube = np.zeros((128, 1024, 512), np.uint8)
    cube[:, -1, -1] = np.arange(128)
    unnamed = read_volume(write_img(tmp_path / "a.img", cube), spacing_mm=(0.047, 0.002, 0.0117))
    assert (
        unnamed.shape == cube.shape
        and unnamed.laterality is None
        and np.array_equal(unnamed.voxels[:, -1, -1], np.arange(128))
    )
    assert code_of(write_img(tmp_path / "b.img", voxels)) == "not_dicom", "no instrument's size, no instrument's name"


def test_optovue_needs_its_text_and_one_group(tmp_path):
    uri = write_optovue(tmp_path / "a.OCT", telling_voxels().astype(np.float32))
    text = uri.with_suffix(".txt").read_text()
    uri.with_suffix(".txt").write_text(text + "XY Scan Length = 36\nScan Usage = 2\n")
    assert code_of(uri, spacing_mm=SPACING_MM) == "not_raster"
    uri.with_suffix(".txt").unlink()
    assert code_of(uri, spacing_mm=SPACING_MM) == "incomplete_export"


def test_a_text_of_optovue_that_only_repeats_itself_is_read_at_once(tmp_path):
    path = write_optovue(tmp_path / "a.OCT", np.random.default_rng(0).random((3, 12, 8)))
    path.with_suffix(".txt").write_text("Window Height " * 20_000)
    start = time.process_time()
    with pytest.raises(ReadError, match="does not say how many B-scans"):
        read_volume(path, spacing_mm=SPACING_MM)
    assert time.process_time() - start < 5  # a minute and a half before


@pytest.mark.parametrize(("scan_type", "scans"), [(0, 1), (3, 1), (1, 4)])
def test_bioptigen_scans_that_are_no_raster_are_left_out(tmp_path, scan_type, scans):
    assert (
        code_of(write_bioptigen(tmp_path / "a.OCT", telling_voxels(np.uint16), scan_type=scan_type, scans=scans))
        == "not_raster"
    )
