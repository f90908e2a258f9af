"""Layers and geometry survive every export: what is written is read back as it was, gaps and order of B-scans too."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.scan import scan
from octfm.errors import EvaluationError
from octfm.formats import ReadError, read_overlay, read_surfaces, read_volume
from octfm.formats.dicom.labels import LABEL_MAP
from octfm.formats.dicom.surfaces import surfaces_of_volume
from octfm.formats.overlay import _names_of_labels
from octfm.layers.export import label_map, write_dicom, write_nifti
from octfm.tasks.view import scene_of
from octfm.volume.segmentation import Segmentation
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.segmented import NAMES, for_segmentation, segmentation
from support.vendor_files import (
    SPACING_MM,
    e2e_codes,
    ends_of,
    radial_ends,
    write_e2e,
    write_metaimage,
    write_vol,
)
from support.volumes import SHAPE, telling_voxels

ORDERS = ("as it lies", "shuffled", "inferior first")


def stored_order(order: str, depth: int) -> np.ndarray:
    """Which B-scan of a volume each frame of the file is."""
    return {
        "as it lies": np.arange(depth),
        "shuffled": np.random.default_rng(4).permutation(depth),
        "inferior first": np.arange(depth)[::-1],
    }[order]


def shuffled(stored: np.ndarray) -> Callable[[Any], None]:
    def edit(dataset):
        groups = dataset.PerFrameFunctionalGroupsSequence
        dataset.PerFrameFunctionalGroupsSequence = [groups[i] for i in stored]
        for_segmentation(dataset)

    return edit


def stacked(found: Segmentation) -> np.ndarray:
    return np.stack(list(found.surfaces.values()))


@settings(max_examples=8)
@given(seed=st.integers(0, 10**6))
def test_heights_and_labels_come_back_from_nifti(tmp_path, monkeypatch, seed):
    nibabel = pytest.importorskip("nibabel")
    found = segmentation(seed)
    heights, labels = write_nifti(found, tmp_path, "eye")
    image = nibabel.load(heights)
    dz, dy, dx = SPACING_MM
    rows = np.asarray(image.dataobj).transpose(2, 1, 0) / (1000 * dy) - 0.5
    np.testing.assert_allclose(rows, stacked(found), atol=1e-4)
    np.testing.assert_allclose(np.abs(np.diag(image.affine)[:2]), (dx, dz), rtol=1e-6)
    with pytest.raises(ReadError, match="masks of a segmentation"):
        read_volume(labels)
    monkeypatch.setattr("octfm.formats.bscans.MOST_LABELS", 0)
    read = read_volume(labels)  # our own reader finds the axes by the spacing
    np.testing.assert_array_equal(read.voxels, label_map(found)[0])
    np.testing.assert_allclose(read.spacing_mm, SPACING_MM, rtol=1e-6)
    monkeypatch.undo()


def test_no_seg_is_written_for_a_file_that_is_no_dicom(tmp_path):
    pytest.importorskip("highdicom")
    (tmp_path / "a.jpg").write_bytes(b"\xff\xd8\xff" + bytes(200))
    for source in (tmp_path / "a.jpg", tmp_path, tmp_path / "a.zip!/a.dcm"):
        with pytest.raises(EvaluationError, match="no DICOM SEG can refer to it"):
            write_dicom(segmentation(1), source, tmp_path / "out")


@pytest.mark.parametrize("order", ORDERS)
def test_heights_and_labels_come_back_from_dicom(tmp_path, order):
    pytest.importorskip("highdicom")
    from pydicom import dcmread

    stored = stored_order(order, SHAPE[0])
    source = write_oct_dicom(
        tmp_path / "a.dcm", telling_voxels()[stored], SPACING_MM, superior_first=True, edit=shuffled(stored)
    )
    volume, found = read_volume(source), segmentation(9)
    seg, heights = write_dicom(found, source, tmp_path / "out")
    back = surfaces_of_volume(source, heights)
    assert back.names == NAMES and back.heights_px.shape[1:] == (volume.shape[0], volume.shape[2])
    np.testing.assert_array_equal(back.heights_px, stacked(found))
    file = dcmread(seg)
    kinds = {
        segment.SegmentLabel: tuple(
            segment[f"SegmentedProperty{part}CodeSequence"][0].CodeMeaning for part in ("Category", "Type")
        )
        for segment in file.SegmentSequence
    }
    assert kinds["fluid"] == ("Morphologically Abnormal Structure", "Lesion"), "not a part of the healthy retina"
    assert kinds["ilm to rpe"] == ("Anatomical Structure", "Retina")
    frames = {}
    for group, plane in zip(file.PerFrameFunctionalGroupsSequence, file.pixel_array, strict=True):
        segment = group.SegmentIdentificationSequence[0].ReferencedSegmentNumber
        number = group.DerivationImageSequence[0].SourceImageSequence[0].ReferencedFrameNumber
        frames[int(segment), int(number) - 1] = plane.astype(bool)
    labels, meaning = label_map(found)
    # Where each B-scan of the volume lies in the file.
    place = [int(np.flatnonzero((telling_voxels()[stored] == bscan).all(axis=(1, 2)))[0]) for bscan in volume.voxels]
    for value in meaning:
        for bscan, frame in enumerate(place):
            np.testing.assert_array_equal(frames[value, frame], labels[bscan] == value)


@pytest.mark.parametrize("suffix", ["vol", "e2e"])
def test_the_instruments_own_layers_survive_an_export(tmp_path, suffix):
    nibabel = pytest.importorskip("nibabel")
    rows = stacked(segmentation(3))[:2]
    uri: Path = tmp_path / f"a.{suffix}"
    if suffix == "vol":
        write_vol(uri, telling_voxels(), layers=rows)
    else:
        layers = dict(enumerate(rows))
        write_e2e(uri, {(1, 2, 3): e2e_codes(telling_voxels())}, ends=ends_of(*SHAPE[::2]) * 15 / 4.4, layers=layers)
    volume, surfaces = read_volume(uri), read_surfaces(uri)
    own = Segmentation(dict(zip(surfaces.names, surfaces.heights_px, strict=True)), {}, volume.spacing_mm)
    heights, _ = write_nifti(own, tmp_path / "out", "eye")
    image = nibabel.load(heights)
    dz, dy, dx = volume.spacing_mm
    np.testing.assert_allclose(np.asarray(image.dataobj).transpose(2, 1, 0) / (1000 * dy) - 0.5, rows, atol=1e-4)
    np.testing.assert_allclose(np.abs(np.diag(image.affine)[:2]), (dx, dz), rtol=1e-6)
    np.testing.assert_allclose((dx, dz), SPACING_MM[::-2], rtol=1e-4)


def scans(folder: Path) -> dict[str, tuple[Path, dict]]:
    """Scans whose geometry a label map must keep, and how they are read."""
    voxels, ends = telling_voxels(), ends_of(*SHAPE[::2])
    even = tmp_json(folder / "even.npy", {"spacing_mm": [0.01, 0.01, 0.01], "laterality": "L", "axes": "DHW"})
    np.save(even, voxels)
    return {
        "vol, inferior first": (write_vol(folder / "a.vol", voxels, ends=ends[::-1]), {}),
        "e2e": (write_e2e(folder / "a.e2e", {(1, 2, 3): e2e_codes(voxels)}, eyes="L", ends=ends * 15 / 4.4), {}),
        "star": (write_vol(folder / "b.vol", voxels, ends=radial_ends(SHAPE[0])), {"raster_only": False}),
        "dicom": (write_oct_dicom(folder / "a.dcm", voxels, SPACING_MM, laterality="L", superior_first=False), {}),
        "voxels of equal sides": (even, {}),
    }


def tmp_json(path: Path, facts: dict) -> Path:
    path.with_suffix(".json").write_text(json.dumps(facts))
    return path


@pytest.mark.parametrize("name", ["vol, inferior first", "e2e", "star", "dicom", "voxels of equal sides"])
def test_a_label_map_keeps_the_geometry_and_the_eye_of_its_scan(tmp_path, monkeypatch, name):
    pytest.importorskip("nibabel")
    monkeypatch.setattr("octfm.formats.bscans.MOST_LABELS", 0)  # else it is refused, because it is no scan
    uri, how = scans(tmp_path)[name]
    volume = read_volume(uri, **how)
    found = segmentation(6, spacing_mm=volume.spacing_mm)
    labels = write_nifti(found, tmp_path / "out", "eye", volume)[-1]
    back = read_volume(labels, **how)
    np.testing.assert_array_equal(back.voxels, label_map(found)[0])
    for fact in ("laterality", "superior_first", "layout", "scanner", "protocol", "modality"):
        assert getattr(back, fact) == getattr(volume, fact), fact
    assert back.spacing_mm == pytest.approx(volume.spacing_mm, rel=1e-5) and back.participant == "unknown"
    assert (back.lines is None) == (volume.lines is None) == (name == "voxels of equal sides")
    if volume.lines is not None:
        for end in ("start", "end"):
            np.testing.assert_allclose(getattr(back.lines, end), getattr(volume.lines, end), atol=1e-6)


def test_positions_for_another_number_of_bscans_are_refused(tmp_path):
    uri = tmp_json(tmp_path / "a.npy", {"spacing_mm": list(SPACING_MM), "bscan_lines_mm": [[0, 0, 6, 0]]})
    np.save(uri, telling_voxels())
    with pytest.raises(ReadError, match=f"has 1 lines, expected one for each of the {SHAPE[0]} B-scans"):
        read_volume(uri)


shapes = st.tuples(st.integers(1, 7), st.integers(20, 31), st.integers(10, 17))


@settings(max_examples=examples(12))
@given(
    shape=shapes,
    eye=st.sampled_from(["R", "L", None]),
    order=st.sampled_from(ORDERS),
    upside_down=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dicom_layers_come_back_on_the_scan_they_were_found_in(tmp_path, shape, eye, order, upside_down, seed):
    """Of any size, either eye, frames in any order, and files whose rows begin at the choroid."""
    pytest.importorskip("highdicom")
    stored = stored_order(order, shape[0])
    voxels = telling_voxels(shape=shape)[stored]
    source = tmp_path / "a.dcm"
    write_oct_dicom(source, voxels, SPACING_MM, laterality=eye, superior_first=True, edit=shuffled(stored))
    tmp_json(source, {"upside_down": upside_down})
    volume, found = read_volume(source, raster_only=False), segmentation(seed, shape)
    seg, heights = write_dicom(found, source, tmp_path / "out")
    lines, labels = read_overlay(heights, volume), read_overlay(seg, volume)
    assert lines.names == NAMES and lines.axial_mm == pytest.approx(volume.spacing_mm[1])
    np.testing.assert_allclose(lines.heights_px, stacked(found), atol=1e-5)
    expected, meaning = label_map(found)
    assert labels.names == meaning
    np.testing.assert_array_equal(labels.values, expected)
    of = {name: value for value, name in labels.names.items()}
    np.testing.assert_array_equal(labels.values == of["fluid"], found.masks["fluid"])


@settings(max_examples=12)
@given(shape=shapes, eye=st.sampled_from(["R", "L"]), reverse=st.booleans(), seed=st.integers(0, 99))
def test_nifti_layers_come_back_on_the_scan_they_were_found_in(tmp_path, shape, eye, reverse, seed):
    pytest.importorskip("nibabel")
    ends = ends_of(*shape[::2])[:: -1 if reverse else 1]
    source = write_vol(
        tmp_path / "a.vol", telling_voxels(shape=shape), ends=ends, laterality={"R": "OD", "L": "OS"}[eye]
    )
    volume = read_volume(source, raster_only=False)
    assert volume.laterality == eye
    found = segmentation(seed, shape, volume.spacing_mm)
    heights, labels = (read_overlay(file, volume) for file in write_nifti(found, tmp_path / "out", "eye", volume))
    assert heights.names == NAMES and (labels.values.shape, labels.names) == (shape, label_map(found)[1])
    np.testing.assert_allclose(heights.heights_px, stacked(found), atol=1e-4)
    np.testing.assert_array_equal(labels.values, label_map(found)[0])


@pytest.mark.parametrize("axes", ["WHD", "WDH", "DHW"])
@pytest.mark.parametrize("codes", [(1, 0), (0, 2), (1, 1)])
@pytest.mark.parametrize("unit", ["mm", "micron"])
def test_labels_of_a_nifti_scan_lie_on_it_in_other_programs(tmp_path, axes, codes, unit):
    """They have its axes, and its affine with turned axes and an origin: ITK-SNAP takes no others."""
    nibabel = pytest.importorskip("nibabel")
    mm = dict(zip("DHW", SPACING_MM, strict=True))
    scale = 1000 if unit == "micron" else 1
    affine = np.diag([*(mm[axis] * scale for axis in axes), 1.0])
    affine[:3, 3] = 3, -4, 5
    affine[:3, :3] = np.array([[0, 0, 1], [-1, 0, 0], [0, 1, 0]]) @ affine[:3, :3] @ np.diag([1, 1, -1])
    stored = ["DHW".index(axis) for axis in axes]
    scan_image = nibabel.Nifti1Image(telling_voxels().transpose(stored), affine)
    scan_image.header.set_xyzt_units(unit)
    scan_image.set_qform(affine, codes[0])
    scan_image.set_sform(affine, codes[1])
    source = tmp_path / "a.nii.gz"
    nibabel.save(scan_image, source)
    tmp_json(tmp_path / "a.nii", {"axes": axes, "laterality": "R"})
    volume = read_volume(source)
    np.testing.assert_array_equal(volume.voxels, telling_voxels())
    found = segmentation(3, spacing_mm=volume.spacing_mm)
    _, labels = write_nifti(found, tmp_path / "out", "a", volume)
    image = nibabel.load(labels)
    assert image.shape == scan_image.shape
    np.testing.assert_allclose(image.affine, scan_image.affine, atol=1e-5)
    for name in ("qform_code", "sform_code", "xyzt_units"):
        assert image.header[name] == scan_image.header[name], name
    expected = label_map(found)[0]
    np.testing.assert_array_equal(np.asarray(image.dataobj), expected.transpose(stored))
    np.testing.assert_array_equal(read_overlay(labels, volume).values, expected)
    labels.with_name("a_labels.json").unlink()  # as labels that another program has drawn
    np.testing.assert_array_equal(read_overlay(labels, volume).values, expected)


@pytest.mark.parametrize("kind", ["nifti", "metaimage"])
@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_masks_drawn_on_a_file_lie_on_its_volume_even_if_that_is_turned(tmp_path, kind, lines, copied):
    """A sidecar may say that the vitreous is at the bottom, and where B-scans lie; the mask may have a copy of it."""
    nibabel = pytest.importorskip("nibabel")
    mask = np.zeros(SHAPE, np.uint8)
    mask[0, 2:5, 3:9] = 1

    def write(name, voxels):
        if kind == "metaimage":
            return write_metaimage(tmp_path / f"{name}.mha", voxels, SPACING_MM)
        image = nibabel.Nifti1Image(voxels.transpose(2, 1, 0), np.diag([*SPACING_MM[::-1], 1.0]))
        image.header.set_xyzt_units("mm")
        nibabel.save(image, tmp_path / f"{name}.nii.gz")
        return tmp_path / f"{name}.nii.gz"

    order = np.roll(np.arange(SHAPE[0]), 2) if lines else np.arange(SHAPE[0])
    source, drawn = write("a", telling_voxels()[order, ::-1]), write("a_mask", mask[order, ::-1])
    facts = {"upside_down": True, "axes": "WHD"}
    if lines:
        facts["bscan_lines_mm"] = ends_of(*SHAPE[::2])[order].reshape(SHAPE[0], 4).tolist()
    tmp_json(tmp_path / "a.x", facts)
    if copied:
        tmp_json(tmp_path / "a_mask.x", facts)
    volume, way = read_volume(source), slice(None, None, -1 if lines else 1)
    np.testing.assert_array_equal(volume.voxels, telling_voxels()[way])
    np.testing.assert_array_equal(read_overlay(drawn, volume).values, mask[way])


def test_a_mask_whose_affine_mirrors_the_scan_is_refused(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    affine = np.diag([*(-mm for mm in SPACING_MM[:0:-1]), SPACING_MM[0], 1.0])  # as SimpleITK writes arrays
    for name, voxels in (("a", telling_voxels()), ("a_mask", (telling_voxels() > 128).astype(np.uint8))):
        image = nibabel.Nifti1Image(voxels.transpose(2, 1, 0), affine)
        image.header.set_xyzt_units("mm")
        nibabel.save(image, tmp_path / f"{name}.nii.gz")
    nibabel.save(nibabel.as_closest_canonical(nibabel.load(tmp_path / "a_mask.nii.gz")), tmp_path / "b_mask.nii.gz")
    tmp_json(tmp_path / "a.x", {"axes": "WHD"})
    volume = read_volume(tmp_path / "a.nii.gz")
    np.testing.assert_array_equal(read_overlay(tmp_path / "a_mask.nii.gz", volume).values, volume.voxels > 128)
    plain = nibabel.Nifti1Image((telling_voxels() > 128).astype(np.uint8).transpose(2, 1, 0), np.eye(4))
    nibabel.save(plain, tmp_path / "c_mask.nii.gz")  # says nothing
    np.testing.assert_array_equal(read_overlay(tmp_path / "c_mask.nii.gz", volume).values, volume.voxels > 128)
    with pytest.raises(ReadError, match=r"its affine turns axes another way than that of a\.nii\.gz"):
        read_overlay(tmp_path / "b_mask.nii.gz", volume)


def test_labels_in_octfms_own_axes_without_a_sidecar_are_read_on_a_scan_with_others(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    scan_image = nibabel.Nifti1Image(
        telling_voxels().transpose(2, 0, 1), np.diag([SPACING_MM[i] for i in (2, 0, 1)] + [1.0])
    )
    scan_image.header.set_xyzt_units("mm")
    nibabel.save(scan_image, tmp_path / "a.nii.gz")
    tmp_json(tmp_path / "a.nii", {"axes": "WDH", "laterality": "R"})
    volume = read_volume(tmp_path / "a.nii.gz")
    found = segmentation(3, spacing_mm=volume.spacing_mm)
    labels = write_nifti(found, tmp_path / "out", "a")[-1]  # as a program writes them that has no volume at hand
    np.testing.assert_array_equal(read_overlay(labels, volume).values, label_map(found)[0])


@pytest.mark.parametrize("axes", ["WHD", "DHW"])
def test_labels_of_a_single_bscan_in_nifti_lie_on_it_in_other_programs(tmp_path, axes):
    nibabel = pytest.importorskip("nibabel")
    stored, one = ["DHW".index(axis) for axis in axes], telling_voxels()[:1]
    affine = np.diag([*(SPACING_MM[axis] for axis in stored), 1.0])
    affine[:3, 3] = 3, -4, 5
    nibabel.save(nibabel.Nifti1Image(one.transpose(stored), affine), tmp_path / "a.nii.gz")
    tmp_json(tmp_path / "a.nii", {"axes": axes})
    volume = read_volume(tmp_path / "a.nii.gz", raster_only=False)
    found = segmentation(1, volume.shape, spacing_mm=volume.spacing_mm)
    _, labels = write_nifti(found, tmp_path / "out", "a", volume)
    image = nibabel.load(labels)
    np.testing.assert_array_equal(np.asarray(image.dataobj), label_map(found)[0].transpose(stored))
    np.testing.assert_allclose(image.affine, affine, atol=1e-5)


@pytest.mark.parametrize("axes", ["WHD", "HWD", "DWH"])
def test_labels_of_a_metaimage_lie_on_it_in_other_programs(tmp_path, axes):
    """ITK: point = Offset + directions (TransformMatrix, axis by axis) * spacing * index, x to the left, y to the back;
    NIfTI's x and y run the other way."""
    nibabel = pytest.importorskip("nibabel")
    stored = ["DHW".index(axis) for axis in axes]
    tags = {"TransformMatrix": "0 0 1 0.6 -0.8 0 0.8 0.6 0", "Offset": "3 -4 5"}
    source = write_metaimage(tmp_path / "a.mha", telling_voxels(), axes=axes, tags=tags)
    tmp_json(source, {"axes": axes})
    volume = read_volume(source)
    found = segmentation(3, volume.shape, spacing_mm=volume.spacing_mm)
    _, labels = write_nifti(found, tmp_path / "out", "a", volume)
    image = nibabel.load(labels)
    expected = label_map(found)[0]
    np.testing.assert_array_equal(np.asarray(image.dataobj), expected.transpose(stored))
    directions = np.array([[0, 0, 1], [0.6, -0.8, 0], [0.8, 0.6, 0]])
    for index in ([0, 0, 0], [2, 5, 7]):
        steps = np.array([SPACING_MM[stored[i]] * index[i] for i in range(3)])
        at = np.array([3, -4, 5]) + steps @ directions
        for affine in (image.get_sform(), image.get_qform()):
            np.testing.assert_allclose(affine @ [*index, 1], [-at[0], -at[1], at[2], 1], atol=1e-4)
    np.testing.assert_array_equal(read_overlay(labels, volume).values, expected)
    for odd in ("0 0 0 0 0 0 0 0 0", "1 0 0 1", "nan 0 0 0 1 0 0 0 1"):
        other = write_metaimage(tmp_path / "b.mha", telling_voxels(), tags={"TransformMatrix": odd})
        _, labels = write_nifti(found, tmp_path / "odd", "b", read_volume(other))
        assert nibabel.load(labels).header.get_zooms() == pytest.approx(SPACING_MM[::-1]), "as of other files"
    tmp_json(source, {"axes": axes, "upside_down": True})
    turned = read_volume(source)
    _, labels = write_nifti(found, tmp_path / "turned", "a", turned)
    assert nibabel.load(labels).shape == turned.shape[::-1], "rows of the image, no longer of the file"


@pytest.fixture
def exported(tmp_path):
    """A scan and the files that its segmentation is exported to."""
    pytest.importorskip("highdicom")
    source = write_oct_dicom(
        tmp_path / "a.dcm", telling_voxels(), SPACING_MM, superior_first=False, edit=for_segmentation
    )
    volume = read_volume(source)
    files = write_dicom(segmentation(2), source, tmp_path / "out")
    return volume, [*files, *write_nifti(segmentation(2, spacing_mm=volume.spacing_mm), tmp_path / "out", "a", volume)]


def test_exports_name_the_patient_in_the_letters_of_the_scan(tmp_path):
    """An archive files what is named otherwise as another patient's."""
    pytest.importorskip("highdicom")

    def named(dataset):
        for_segmentation(dataset)
        dataset.SpecificCharacterSet, dataset.PatientName = "ISO_IR 192", "山田^太郎"

    source = write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), SPACING_MM, superior_first=True, edit=named)
    for file in write_dicom(segmentation(2), source, tmp_path / "out"):
        assert str(pydicom.dcmread(file).PatientName) == "山田^太郎"


def test_exported_layers_are_shown_on_their_scan(tmp_path, exported):
    volume, files = exported
    scene = scene_of(volume, beside=[read_overlay(file, volume) for file in files])
    # The viewer shows the superior B-scan first, which this file has last.
    assert volume.superior_first is False
    expected = label_map(segmentation(2))[0][::-1]
    for at in (0, 3):  # SEG, height map, NIfTI heights, NIfTI labels
        overlay = scene.overlays[at]
        assert overlay.kind == "voxels" and [name for name, _ in overlay.legend] == ["ilm to rpe", "rpe to bm", "fluid"]
        np.testing.assert_array_equal(overlay.values, expected)
    for at in (1, 2):
        assert scene.overlays[at].kind == "lines"
        np.testing.assert_allclose(scene.overlays[at].values, stacked(segmentation(2))[:, ::-1], atol=1e-4)
    options = [word for file in files for word in ("--overlay", str(file))]
    result = invoke("view", volume.source, "--out", tmp_path / "page.html", *options)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "page.html").read_text()
    assert all(f"{file.name}: l" in page for file in files) and '"beside-3"' in page


def test_an_overlay_of_another_scan_is_refused(tmp_path, exported):
    volume, files = exported
    other = read_volume(write_oct_dicom(tmp_path / "b.dcm", telling_voxels()[:, :-2, :-1], SPACING_MM))
    for file in files:
        with pytest.raises(ReadError) as caught:
            read_overlay(file, other)
        assert caught.value.code == "other_volume", caught.value
    alike = read_volume(write_oct_dicom(tmp_path / "c.dcm", telling_voxels()[:, ::-1], SPACING_MM))
    for file in files[2:]:
        unpacked = file.with_suffix("")
        unpacked.write_bytes(gzip.decompress(file.read_bytes()))
        for own in (file, unpacked):
            with pytest.raises(ReadError, match=r"other than .*c\.dcm, by the fingerprint in a_labels\.json"):
                read_overlay(own, alike)
            assert read_overlay(own, volume) is not None
    sidecar = tmp_path / "out" / "a_labels.json"
    for other_program in ("{}", '{"scan": "T1w"}', '{"scan": null}'):
        sidecar.write_text(other_program, encoding="utf-8")
        assert read_overlay(files[-1], alike).values.shape == alike.shape
    for file in (volume.source, write_vol(tmp_path / "a.vol", telling_voxels())):
        with pytest.raises(ReadError, match="neither labels nor heights of layers"):
            read_overlay(file, volume)
    vol = read_volume(tmp_path / "a.vol")
    for file in files[:2]:
        with pytest.raises(ReadError, match=r"refers to a DICOM file, and .*a\.vol is none"):
            read_overlay(file, vol)


def test_a_label_map_of_dicom_names_every_value_that_it_holds(tmp_path, exported):
    volume, files = exported
    dataset = pydicom.dcmread(files[0])
    dataset.SOPClassUID = dataset.file_meta.MediaStorageSOPClassUID = LABEL_MAP
    dataset.BitsAllocated = dataset.BitsStored = 8
    dataset.PerFrameFunctionalGroupsSequence = dataset.PerFrameFunctionalGroupsSequence[:1]
    dataset.NumberOfFrames, values = 1, np.zeros(volume.shape[1:], np.uint8)
    for value in (1, 77):
        values[0, 0] = value
        dataset.PixelData = values.tobytes() + b"\0" * (values.size % 2)
        dataset.save_as(tmp_path / f"{value}.dcm")
    assert 1 in read_overlay(tmp_path / "1.dcm", volume).values
    with pytest.raises(ReadError, match="segment 77, which has no name"):
        read_overlay(tmp_path / "77.dcm", volume)


def test_a_comment_names_no_background_and_no_label_beyond_a_byte():
    assert _names_of_labels("0 background; 1 ilm; 300 b") == {1: "ilm"}


def test_a_scan_keeps_the_exports_of_its_volume_with_it(tmp_path, exported):
    """The NIfTI files name no volume and are left out as well, wherever they lie: labels are not a scan."""
    volume, files = exported
    catalog = scan(tmp_path)
    (row,) = catalog.acquisitions
    assert {(skip.uri, skip.code) for skip in catalog.skipped} == {
        (str(file), code)
        for file, code in zip(files, ("voxel_labels", "layer_heights", "layer_heights", "voxel_labels"), strict=True)
    }
    nibabel = pytest.importorskip("nibabel")
    image = nibabel.load(files[-1])  # by its name alone, as other programs and earlier versions write it
    image.header.set_intent("none")
    nibabel.save(image, files[-1])
    assert scan(tmp_path).acquisitions == catalog.acquisitions
    assert not catalog.rejects and row.sop_instance_uid == volume.acquisition
    assert catalog.voxel_labels(row) == (str(files[0]),) and catalog.layer_heights(row) == (str(files[1]),)


def test_a_page_of_labels_says_how_to_see_them(exported):
    for file in exported[1][:2]:
        result = invoke("view", file)
        assert result.exit_code == 1 and f"octfm view SCAN --overlay {file}" in str(result.exception)
