"""What octfm segment says about zones: why they are blank, and the device's own beside them."""

import json
import sys
import unicodedata
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from pydicom import dcmread

import octfm
from octfm.cli.segment_scans import stems_of
from octfm.errors import ExportError
from octfm.formats import read_device_grid, read_volume
from octfm.layers import segment as segment_module
from octfm.layers import verdict
from octfm.layers.corrections import Corrections
from octfm.layers.export import write_dicom, write_nifti
from octfm.layers.finder import LayerFinder, Layers
from octfm.layers.rows import describe, read_table, row_of
from octfm.layers.segment import ScanSegmentation
from octfm.layers.verdict import Verdict
from octfm.layers.zones import DEVICE_UNIT, UNIT, device_grid_of, same_millimetres
from octfm.models.layer_net import MASKS, SURFACES, LayerNet, LayerNetConfig
from octfm.phantom import phantom_volume, write_phantom
from octfm.volume.etdrs import MOST_APART_MM, ZONES
from octfm.volume.laterality import disc_side
from octfm.volume.segmentation import Segmentation, words_of
from octfm.volume.volume import Lines
from octfm.weights.packaged import NOTE, SHORT_NOTE
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.segmented import for_segmentation, found_in, segmentation
from support.vendor_files import SPACING_MM, with_grid, write_heyex_xml
from support.volumes import telling_voxels

pytestmark = pytest.mark.usefixtures("remembered_bscans")


def changed(found, **facts):
    return replace(found, volume=replace(found.volume, **facts))


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (found_in(1), "no zones: a single B-scan"),
        (changed(found_in(3), layout="line"), "no zones: a line scan"),
        (changed(found_in(1), layout="circle"), "no zones: a circle scan"),
        (changed(found_in(6), layout="radial"), "no zones: a radial scan"),
        (found_in(reasons=("dark",)), "no zones: the verdict"),
        (
            changed(
                found_in(3), lines=Lines(np.array([[0, 1], [0, 3], [0, 2.0]]), np.array([[6, 1], [6, 3], [6, 2.0]]))
            ),
            "no zones: B-scans must come in the order of their positions",
        ),
    ],
)
def test_a_scan_without_zones_says_why(found, why):
    row = row_of(found)
    assert row["zones_note"].startswith(why) and not any(row[column] for column in UNIT.values())
    assert why in describe(found)


def test_notes_name_lines_as_legends_do():
    note = changed(found_in(1), layout="circle").note_on_scan
    assert words_of("nfl_gcl") in note and words_of("ipl_inl") in note and "_" not in note


@pytest.mark.parametrize(("laterality", "stated"), [("R", "R"), ("R", "L"), ("L", "R"), ("L", "L"), ("L", None)])
def test_a_scan_that_looks_like_the_other_eye_says_so(laterality, stated):
    """Nasal and temporal zones of an eye with a wrong tag are exchanged, 20 to 40 µm in the outer ring."""
    volume, truth = phantom_volume(3, laterality=laterality, size=(16, 256, 192))
    lines = dict(zip(truth.surface_names, truth.surfaces, strict=True))
    surfaces = {name: lines.get(name, lines["bm"]).astype(np.float32) for name in SURFACES}
    rows = np.stack(list(surfaces.values()))
    sure, none = np.ones_like(rows), np.zeros_like(rows[0])
    layers = Layers(rows, 0 * rows, sure, none, none + 1, np.zeros(volume.shape, np.uint8))
    found = replace(
        found_in(16), volume=replace(volume, laterality=stated), spacing_mm=volume.spacing_mm, found=layers,
        surfaces=surfaces, masks={},
    )  # fmt: skip
    note = row_of(found)["zones_note"]
    assert ("nasal and temporal may be exchanged" in note) == (stated not in (laterality, None)), note
    if stated != laterality and stated is not None:
        eyes = {"R": "right", "L": "left"}
        assert f"stated as a {eyes[stated]} eye" in note and f"as in a {eyes[laterality]} eye" in note
        lost = {name: np.where(np.arange(16)[:, None] == 5, np.nan, rows) for name, rows in surfaces.items()}
        assert replace(found, surfaces=lost).looks_like_other_eye, "a lost B-scan hides nothing"
        deep = replace(found.volume, voxels=volume.voxels.astype(np.uint16) * 257)
        assert replace(found, volume=deep, surfaces=lost).looks_like_other_eye, "nor do 16 bits"


def test_the_fovea_stays_where_it_is_among_the_bscans_that_are_left(monkeypatch):
    seen = []

    def recorded(voxels, spacing_mm, tissue, left_to_right):
        seen.append((voxels, tissue))
        return disc_side(voxels, spacing_mm, tissue, left_to_right)

    monkeypatch.setattr(verdict, "disc_side", recorded)
    found = found_in(25)
    ilm, bm = (np.where(np.isin(np.arange(25), (3, 4, 20))[:, None], np.nan, found.surfaces[n]) for n in ("ilm", "bm"))
    verdict.looks_like_other_eye(found.volume, ilm, bm, found.place(), (0.5, 0.24))
    ((voxels, tissue),) = seen
    assert len(voxels) == len(tissue.ilm) == 22 and tissue.fovea == pytest.approx((13 - 2, 59.5 + 10))


def test_a_row_has_amounts_of_accepted_scans_and_counts_bscans_by_what_was_corrected():
    found = found_in(fluid_in=12)
    row = row_of(found)
    assert row["intraretinal_fluid_nl"] == f"{20 * 20 * 0.24 * 0.004 * 0.05 * 1000:.1f}" and row["drusen_nl"] == "0.0"
    assert (row["doubt"], row["laterality"], row_of(found_in(laterality=None))["laterality"]) == ("0.100", "R", "")
    half = {name: np.where(np.arange(120) < 30, np.nan, rows) for name, rows in found.surfaces.items()}
    unsure = replace(found.found, near=np.full_like(found.found.near, 0.99))
    assert row_of(replace(found, surfaces=half, found=unsure))["doubtful_ascans"] == "0.250"
    refused = row_of(found_in(fluid_in=12, reasons=("dark",)))
    assert not refused["intraretinal_fluid_nl"] and not refused["drusen_nl"]
    pixels = changed(found, spacing_estimated=True)
    assert row_of(pixels)["intraretinal_fluid_pixels"] == "400"
    assert not row_of(replace(pixels, verdict=Verdict(parts=("a blink",))))["intraretinal_fluid_pixels"]
    line = np.full(120, 100, np.float32)
    surfaces = {"ilm": {2: line}, "bm": {4: line, 2: line}, "ez": {6: line}}
    by_hand = Corrections("", found.model, found.volume.shape, "", "p7", "", "", surfaces, {}, frozenset({8}))
    row = row_of(replace(found, corrections=by_hand, axial_length_mm=26.57))
    assert (row["corrected_bscans"], row["checked_bscans"], row["corrected_participant"]) == ("4", "3", "p7")
    assert row["axial_length_mm"] == "26.57"


@pytest.mark.parametrize(("error_um", "given"), [(11.9, True), (12.1, False)])
def test_zones_and_volume_are_withheld_from_an_expected_error_of_12_um_on(monkeypatch, error_um, given):
    monkeypatch.setattr(segment_module, "expected_error_um", lambda *_: np.full((25, 120), error_um, np.float32))
    found = found_in()
    grid, whole = found.etdrs(), found.etdrs(keep_doubtful=True)
    assert whole.volume_mm3 is not None and all(whole.mean_um.values())
    assert {mean is not None for mean in grid.mean_um.values()} == {given} == {grid.volume_mm3 is not None}


def test_zones_that_another_fovea_would_lose_are_withheld(monkeypatch):
    found = found_in()
    x, y = found._measured().centre_mm
    rival = replace(found._measured(), rivals_mm=((x + 1.5, y),))
    monkeypatch.setattr(ScanSegmentation, "_measured", lambda *_: rival)
    other = found._means(found.thickness_um("ilm", "bm"), (x + 1.5, y)).mean_um
    lost = {name for name in ZONES if other[name] is None}
    changed = {name for name in ZONES if name not in lost and abs(other[name] - rival.mean_um[name]) > 10}  # pyright: ignore[reportOperatorIssue]
    assert lost and changed and len(lost | changed) < len(ZONES)
    assert {name for name, mean in found.etdrs().mean_um.items() if mean is None} == lost | changed
    assert found.etdrs().volume_mm3 is None and rival.volume_mm3 is not None
    near = replace(rival, rivals_mm=((x + 0.05, y),))
    monkeypatch.setattr(ScanSegmentation, "_measured", lambda *_: near)
    assert all(found.etdrs().mean_um.values()) and found.etdrs().volume_mm3 == rival.volume_mm3


def test_dark_bscans_lines_at_the_edge_and_masks_that_a_network_lacks_are_left_out(monkeypatch):
    volume = found_in(3).volume
    rows = np.random.default_rng(0).uniform(20, 60, (len(SURFACES), 3, 120)).astype(np.float32)
    rows[0, 0, :3], rows[-1, 0, :3] = (4.9, 5, 5.1), (79.9, 80, 80.1)
    lesions = np.random.default_rng(1).integers(0, 1 + len(MASKS), volume.shape, np.uint8)
    layers = Layers(rows, rows, rows, rows[0], rows[0], lesions)
    finder = SimpleNamespace(find=lambda _: layers, masks=MASKS[1:], model="m", name="n", digest="d")
    for name, stub in (
        ("dark_bscans", lambda _: np.array([False, True, False])), ("believed_rows", lambda _: (5, 80)),
        ("onto_edges", lambda voxels, rows, spacing_mm: rows.copy()), ("judge", lambda *_: Verdict()),
        ("packaged_ranges", lambda *_: None),
    ):  # fmt: skip
        monkeypatch.setattr(segment_module, name, stub)
    found = segment_module.segment(volume, finder=finder)  # pyright: ignore[reportArgumentType]
    expected = rows.copy()
    expected[:, 1] = expected[0, 0, 0] = expected[-1, 0, 2] = np.nan
    np.testing.assert_array_equal([*found.surfaces.values()], expected)
    assert [*found.masks] == [*MASKS[1:]]
    for name, mask in found.masks.items():
        np.testing.assert_array_equal(mask[[0, 2]], lesions[[0, 2]] == 1 + MASKS.index(name))
        assert not mask[1].any()


def test_volumes_need_bscans_as_close_as_the_inner_ring_does():
    """Evenly spaced, without the tenth that single distances may be larger."""
    most = MOST_APART_MM["inner"]
    for apart_mm, given in ((most, True), (1.05 * most, False)):
        found = changed(found_in(), spacing_mm=(apart_mm, 0.004, 0.05))
        assert (found.volume_nl("drusen") is not None) == given
        unseen = replace(found, verdict=Verdict(parts=("a blink",)))
        assert unseen.volume_nl("drusen") is None


def test_a_range_adds_place_and_sampling_in_quadrature_on_either_side():
    asked = []

    def of(*given):
        asked.append(given)
        return given[0] - 3, given[0] + 5

    found = replace(found_in(fluid_in=12), ranges=SimpleNamespace(of=of))  # pyright: ignore[reportArgumentType]
    zones = found.etdrs()
    for part in (zones.place_um, zones.sampling_um):
        assert part.keys() == zones.mean_um.keys()
    grid = replace(zones, place_um=dict.fromkeys(ZONES, 4.0), sampling_um=dict.fromkeys(ZONES, 3.0))
    mean = grid.mean_um["centre"]
    assert mean is not None
    assert found.zone_ranges(grid)["centre"] == pytest.approx((mean - np.hypot(3, 5), mean + np.hypot(5, 5)))
    _, error_um, fluid_um = asked[0]
    assert error_um == pytest.approx(found._expected("ilm", "bm", grid).mean_um["centre"]) and error_um != fluid_um > 0
    one = found.fluid_um()
    assert one[12].tolist() == [0] * 40 + [pytest.approx(20 * 4)] * 20 + [0] * 60 and not one[11].any()


def test_errors_are_unknown_without_lines_and_none_where_both_were_checked_by_hand(monkeypatch):
    monkeypatch.setattr(segment_module, "expected_error_um", lambda *_: np.full((25, 120), 12.0, np.float32))
    found = found_in()
    found.surfaces["bm"][3] = np.nan
    found.surfaces["bm"][4, 7] = np.nan
    line = np.full(120, 100, np.float32)
    by_hand = Corrections("", found.model, found.volume.shape, "", "p7", "", "", {"ez": {6: line}}, {}, frozenset({8}))
    corrected = replace(found, corrections=by_hand)
    error, other = corrected.expected_error_um(), corrected.expected_error_um("ilm", "ez")
    assert np.isnan(error[3]).all() and np.isfinite(np.delete(error, 3, 0)).all()
    assert [bscan for bscan in range(25) if not error[bscan].any()] == [8]
    assert [bscan for bscan in range(25) if not other[bscan].any()] == [6, 8]
    expected = np.zeros((25, 120), bool)
    expected[3], expected[4, 7] = True, True
    np.testing.assert_array_equal(corrected.doubtful, expected)


def test_a_zone_that_was_not_measured_is_not_called_withheld():
    found = found_in()
    cut = {name: np.where(np.arange(25)[:, None] < 6, np.nan, rows) for name, rows in found.surfaces.items()}
    row = row_of(replace(found, surfaces=cut))
    assert row["withheld"] == "" and "less than 90% measured: outer superior" in row["zones_note"]
    assert same_millimetres(
        {"zones_note": "", "axial_length_mm": "26,5"}, {"zones_note": "", "axial_length_mm": "26.5"}
    )


def test_blank_zones_are_explained():
    note = row_of(changed(found_in(), superior_first=None))["zones_note"]
    assert "does not say which B-scan is superior" in note
    unknown = row_of(found_in(laterality=None))
    assert "does not say which eye" in unknown["zones_note"] and unknown[UNIT["outer left"]]
    flat = found_in()
    thick = replace(flat, surfaces={name: np.full_like(rows, rows[0, 0]) for name, rows in flat.surfaces.items()})
    assert "no foveal pit was found" in row_of(thick)["zones_note"]


def test_the_devices_grid_stands_beside_ours(tmp_path):
    uri = with_grid(write_heyex_xml(tmp_path / "a", telling_voxels()))
    found, device = found_in(), read_device_grid(uri)
    row = row_of(found, device)
    assert row[DEVICE_UNIT["centre"]] == "280.0" and row["device_volume_mm3"] == "8.729"
    assert "less than 90% of: outer inferior" in row["device_note"] and not row[DEVICE_UNIT["outer inferior"]]
    shown = describe(found, device)
    difference = float(row[UNIT["centre"]]) - 280
    assert f"device  280.0 µm   difference {difference:+6.1f} µm" in shown and "volume by the device 8.729 mm³" in shown
    assert "the device" not in describe(found) and f"volume within 3 mm {row['volume_mm3']} mm³" in describe(found)
    refused = describe(found_in(reasons=("dark",)), device)
    assert "device  280.0 µm   difference      – µm" in refused and "zones of the device" in refused
    lines = Lines(
        np.array([[0.0, y] for y in np.linspace(6, 0, 25)]), np.array([[6.0, y] for y in np.linspace(6, 0, 25)])
    )
    placed = row_of(changed(found, lines=lines), device)
    assert "mm from ours" in placed["device_note"]
    longer = replace(changed(found, lines=lines), axial_length_mm=27.0)
    assert row_of(longer, device)["device_note"] == placed["device_note"], "the device's millimetres are nominal"
    untouched = row_of(found, replace(device, centre_moved=False))
    assert "nobody has moved it to the fovea" in untouched["device_note"] and "moved" not in row["device_note"]
    assert row_of(found, replace(device, volume_mm3=None))["device_volume_mm3"] == ""
    unread = row_of(found, "the device's grid cannot be read: damaged_file")
    assert unread["device_note"] == "the device's grid cannot be read: damaged_file"


def test_exported_files_say_what_they_are_not_for(tmp_path):
    """In every file, within the lengths that DICOM and NIfTI allow."""
    nibabel = pytest.importorskip("nibabel")
    pytest.importorskip("highdicom")
    from pydicom import config, dcmread

    found = found_in()
    for path in write_nifti(found, tmp_path, "eye"):
        header = nibabel.load(path).header
        assert header["descrip"].item().decode() == SHORT_NOTE and len(SHORT_NOTE) <= 64
        comment = header.extensions[0].get_content()
        assert NOTE in (comment if isinstance(comment, str) else comment.decode()) and "bm" in str(comment)
    clinic = write_phantom(tmp_path / "clinic", 1, 3, size=found.volume.shape, workers=1)
    source = min(clinic.rglob("*.dcm"))
    for path in write_dicom(found, source, tmp_path / "out"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config.settings, "reading_validation_mode", config.RAISE)
            file = dcmread(path)
            assert file.SeriesDescription == SHORT_NOTE
            assert NOTE in file.ImageComments and found.model in file.ImageComments
    trained = Segmentation(found.surfaces, found.masks, found.spacing_mm)
    assert not trained.note, "a network that the user trained may have seen real scans"
    seg, heights = (dcmread(path) for path in write_dicom(trained, source, tmp_path / "own"))
    assert "ImageComments" not in seg and len(heights.SeriesDescription) <= 64


def test_a_height_map_has_what_its_standard_requires(tmp_path):
    """DICOM PS3.3 A.91, C.8.20.5: archives sort by the series, and refuse or lose files without these attributes."""
    pytest.importorskip("highdicom")
    found = found_in()
    clinic = write_phantom(tmp_path / "clinic", 1, 3, size=found.volume.shape, workers=1)
    source = min(clinic.rglob("*.dcm"))
    scan = dcmread(source)
    seg, heights = (dcmread(path) for path in write_dicom(found, source, tmp_path / "out"))
    for name in ("ReferringPhysicianName", "PatientBirthDate", "AccessionNumber", "StudyTime"):
        assert name in heights, "may be empty, but not absent"
    for name in ("PatientID", "StudyInstanceUID", "FrameOfReferenceUID", "Manufacturer", "ManufacturerModelName",
                 "DeviceSerialNumber", "ContentDate", "ContentTime", "ContentLabel", "InstanceNumber",
                 "DimensionOrganizationSequence", "ReferencedSeriesSequence"):  # fmt: skip
        assert heights[name].value == seg[name].value not in (None, ""), name
    assert heights.SeriesInstanceUID != seg.SeriesInstanceUID and heights.SeriesNumber != seg.SeriesNumber
    assert heights.Laterality == scan.ImageLaterality
    assert (heights.SegmentationType, heights.ImageType) == ("HEIGHTMAP", ["DERIVED", "PRIMARY"])
    source_image = heights.SharedFunctionalGroupsSequence[0].DerivationImageSequence[0].SourceImageSequence[0]
    # Without frame numbers: rows are the frames of the scan as stored.
    assert source_image.ReferencedSOPInstanceUID == scan.SOPInstanceUID and "ReferencedFrameNumber" not in source_image
    assert (heights.Rows, heights.Columns) == (scan.NumberOfFrames, scan.Columns)
    for number, (frame, segment) in enumerate(
        zip(heights.PerFrameFunctionalGroupsSequence, heights.SegmentSequence, strict=True), start=1
    ):
        assert frame.FrameContentSequence[0].DimensionIndexValues == number == segment.SegmentNumber
        assert frame.SegmentIdentificationSequence[0].ReferencedSegmentNumber == number
        assert segment.SegmentAlgorithmName and segment.SegmentedPropertyTypeCodeSequence
    assert len(heights.DimensionIndexSequence) == 1 and "PixelData" not in heights and "BitsStored" not in heights


def test_a_single_bscan_without_a_frame_of_reference_gets_a_height_map(tmp_path):
    """highdicom refers to it without a frame number."""
    pytest.importorskip("highdicom")
    found = segmentation(1, shape := (1, 40, 36))
    source = write_oct_dicom(
        tmp_path / "a.dcm", np.zeros(shape, np.uint8), SPACING_MM, laterality="U", edit=for_segmentation
    )
    heights = dcmread(write_dicom(found, source, tmp_path / "out")[1])
    groups = heights.SharedFunctionalGroupsSequence[0]
    source_image = groups.DerivationImageSequence[0].SourceImageSequence[0]
    assert source_image.ReferencedSOPInstanceUID == dcmread(source).SOPInstanceUID
    assert "SpatialLocationsPreserved" not in source_image, "its pixels are other places than those of the scan"
    assert (heights.Rows, heights.Columns, heights.NumberOfFrames) == (1, 36, 3)
    assert "Laterality" not in heights, "which knows R and L only"


def test_the_file_beside_exported_labels_has_no_free_text(tmp_path):
    found = found_in(3)
    for protocol, shown in (("macular_cube_512x128", "macular_cube_512x128"), ("mrs_example_recheck", None)):
        volume = replace(found.volume, protocol=protocol, scanner="zeiss_cirrus")
        write_nifti(found, tmp_path, "a", volume)
        facts = json.loads((tmp_path / "a_labels.json").read_text())
        assert facts.get("protocol") == shown and facts["scanner"] == "zeiss_cirrus"


def test_dicom_exports_say_which_segments_somebody_has_corrected(tmp_path):
    pytest.importorskip("highdicom")
    from pydicom import dcmread

    found = found_in(1, fluid_in=0)
    source = write_oct_dicom(tmp_path / "a.dcm", found.volume.voxels, (0.2, 0.004, 0.05), edit=for_segmentation)
    line = {"bm": {0: found.surfaces["bm"][0]}}
    by_hand = Corrections("", found.model, found.volume.shape, "", "", "", "", line, {}, frozenset())
    for corrections, expected in (
        (None, set()),
        (by_hand, {"bm", f"{SURFACES[-2]} to bm"}),
        (replace(by_hand, surfaces={}, areas={0: {}}), set(MASKS)),
    ):
        corrected = replace(found, corrections=corrections)
        for path in write_dicom(corrected, source, tmp_path / "out"):
            segments = dcmread(path).SegmentSequence
            types = {each.SegmentLabel: each.SegmentAlgorithmType for each in segments}
            semiautomatic = {name for name, kind in types.items() if kind == "SEMIAUTOMATIC"}
            assert semiautomatic == expected & types.keys() and set(types.values()) <= {"AUTOMATIC", "SEMIAUTOMATIC"}


def test_dicom_exports_lie_as_the_file_even_if_it_is_upside_down(tmp_path):
    """A sidecar turns the scan as it is read; what refers to the file must lie as its stored frames."""
    pytest.importorskip("highdicom")
    from pydicom import dcmread

    found = found_in(7, fluid_in=3)
    clinic = write_phantom(tmp_path / "clinic", 1, 3, size=found.volume.shape, workers=1)
    source = min(clinic.rglob("*.dcm"))
    upright = [dcmread(path) for path in write_dicom(found, source, tmp_path / "upright")]
    source.with_suffix(".json").write_text('{"upside_down": true}')
    turned = [dcmread(path) for path in write_dicom(found, source, tmp_path / "turned")]
    assert upright[0].pixel_array.any()
    np.testing.assert_array_equal(turned[0].pixel_array, upright[0].pixel_array[:, ::-1])
    heights, flipped = (np.frombuffer(file[1].FloatPixelData, "<f4") for file in (upright, turned))
    np.testing.assert_allclose(flipped, found.volume.shape[1] - 1 - heights)


def test_a_scan_in_which_nothing_was_found_is_exported_empty(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    found = found_in()
    nothing = {name: np.full_like(rows, np.nan) for name, rows in found.surfaces.items()}
    _, labels = (
        nibabel.load(path) for path in write_nifti(replace(found, surfaces=nothing, masks={}), tmp_path, "eye")
    )
    assert labels.shape == found.volume.shape[::-1] and not np.asarray(labels.dataobj).any()


@pytest.mark.slow
def test_a_table_of_an_export_has_the_devices_zones(tmp_path, monkeypatch):
    for module in ("octfm.layers.segment", "octfm.layers.table"):
        monkeypatch.setattr(f"{module}.load_finder", lambda **_: LayerFinder(LayerNet(LayerNetConfig((8, 8)))))
    uri = with_grid(write_heyex_xml(tmp_path / "a", telling_voxels()))
    assert read_volume(uri).shape[0] > 1
    out = tmp_path / "eyes.csv"
    done = invoke("segment", uri, "--out", out)
    assert done.exit_code == 0, done.output
    (row,) = read_table(out)
    assert row[DEVICE_UNIT["inner nasal"]] == "345.0" and row["zones_note"]
    assert set(DEVICE_UNIT) == set(ZONES)
    uri.write_text(uri.read_text().replace("</HEDX>", ""))
    assert "cannot be read: damaged_file" in device_grid_of(uri)


@pytest.mark.slow
def test_a_segmentation_in_python_saves_what_the_command_writes(tmp_path):
    pytest.importorskip("highdicom")
    scan = write_oct_dicom(
        tmp_path / "scan 1.dcm", telling_voxels(), SPACING_MM, superior_first=True, edit=for_segmentation
    )
    done = invoke("segment", scan, "--out", tmp_path / "command", "--dicom")
    assert done.exit_code == 0, done.output
    found = octfm.segment(scan)
    saved = found.save(tmp_path / "python", dicom=True)
    assert [f"{path.name}" for path in saved] == [line.rpartition("/")[2] for line in done.stdout.splitlines()[-4:]]
    for name in ("heights_um.nii.gz", "labels.nii.gz", "labels.json"):
        one, other = (tmp_path / folder / f"scan 1_{name}" for folder in ("python", "command"))
        assert one.read_bytes() == other.read_bytes()
    one, other = (dcmread(tmp_path / folder / "scan 1_seg.dcm") for folder in ("python", "command"))
    assert one.PixelData == other.PixelData
    assert found.save(tmp_path / "python", "mine")[0].name == "mine_heights_um.nii.gz"
    with pytest.raises(ExportError, match="results of a scan other than memory"):
        changed(found, voxels=found.volume.voxels[::-1], source="memory").save(tmp_path / "python", "mine")
    with pytest.raises(ExportError, match="memory: no DICOM file on this disk"):
        changed(found, source="memory").save(tmp_path / "refused", dicom=True)
    assert not (tmp_path / "refused").exists(), "a refusal left NIfTI files, and would leave an empty folder"


def test_results_that_cannot_be_written_are_refused_before_a_scan_is_segmented(tmp_path, monkeypatch):
    scan = tmp_path / "eye.npz"
    np.savez(scan, volume=telling_voxels(), spacing_mm=SPACING_MM)
    monkeypatch.setattr("octfm.cli.segment_scans.segment_scan", lambda *_, **__: pytest.fail("it was segmented"))
    done = invoke("segment", scan, "--out", tmp_path / "found", "--dicom")
    assert "eye.npz: no DICOM file on this disk" in str(done.exception)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "highdicom", None)
        done = invoke("segment", scan, "--out", tmp_path / "found", "--dicom")
    assert "DICOM export needs highdicom" in str(done.exception)
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "eye_labels.json").write_text('{"scan": "of another"}', encoding="utf-8")
    done = invoke("segment", scan, "--out", tmp_path / "found")
    assert "results of a scan other than" in str(done.exception)


def test_a_call_that_is_stopped_leaves_no_image_that_another_scan_could_take_for_its_own(tmp_path, monkeypatch):
    found = octfm.segment(octfm.Volume(telling_voxels(), SPACING_MM, source="first/eye.npz"))

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as within, pytest.raises(KeyboardInterrupt):
        within.setattr("octfm.layers.export._nifti", stopped)
        found.save(tmp_path)
    with pytest.raises(ExportError, match=r"results of a scan other than second/eye\.npz"):
        changed(found, voxels=found.volume.voxels[::-1], source="second/eye.npz").save(tmp_path)
    assert found.save(tmp_path)


def test_results_of_two_scans_have_two_names_on_macos_too():
    """There A1 is a1, and ü is u with two dots: results of the second scan met those of the first."""
    sources = ["p/A1.dcm", "q/a1.dcm", "p/M\u00fcller.nii.gz", "q/Mu\u0308ller.dcm", "p/b.dcm"]
    names = stems_of(sources)
    assert len({unicodedata.normalize("NFC", name).casefold() for name in names.values()}) == len(sources)
    assert names["p/b.dcm"] == "b"
