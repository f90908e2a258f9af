"""Layers and geometry survive every export: what is written is read back as it was, gaps and order of B-scans too."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octfm.formats import ReadError, read_surfaces, read_volume
from octfm.formats.dicom.surfaces import surfaces_of_volume
from octfm.tasks.segment_export import label_map, write_dicom, write_nifti
from octfm.volume.segmentation import Segmentation
from support.dicom_files import write_oct_dicom
from support.vendor_files import SPACING_MM, e2e_codes, ends_of, radial_ends, write_e2e, write_vol
from support.volumes import SHAPE, telling_voxels

NAMES = ("ilm", "rpe", "bm")


def segmentation(seed: int, shape=SHAPE, spacing_mm=SPACING_MM) -> Segmentation:
    """Surfaces at fractions of rows with gaps, and an area."""
    depth, height, width = shape
    rng = np.random.default_rng(seed)
    rows = np.cumsum(rng.uniform(1, height / 5, (len(NAMES), depth, width)), axis=0).astype(np.float32)
    rows[:, rng.random((depth, width)) < 0.1] = np.nan
    mask = np.zeros(shape, bool)
    mask[1, 5:9, 3:7] = True
    return Segmentation(dict(zip(NAMES, rows, strict=True)), {"fluid": mask}, spacing_mm)


def stacked(found: Segmentation) -> np.ndarray:
    return np.stack(list(found.surfaces.values()))


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_heights_and_labels_come_back_from_nifti(tmp_path, seed):
    nibabel = pytest.importorskip("nibabel")
    found = segmentation(seed)
    heights, labels = write_nifti(found, tmp_path, "eye")
    image = nibabel.load(heights)
    dz, dy, dx = SPACING_MM
    rows = np.asarray(image.dataobj).transpose(2, 1, 0) / (1000 * dy) - 0.5
    np.testing.assert_allclose(rows, stacked(found), atol=1e-4)
    np.testing.assert_allclose(np.abs(np.diag(image.affine)[:2]), (dx, dz), rtol=1e-6)
    read = read_volume(labels)  # our own reader finds the axes by the spacing
    np.testing.assert_array_equal(read.voxels, label_map(found)[0])
    np.testing.assert_allclose(read.spacing_mm, SPACING_MM, rtol=1e-6)


@pytest.mark.parametrize("order", ["as it lies", "shuffled", "inferior first"])
def test_heights_and_labels_come_back_from_dicom(tmp_path, order):
    pytest.importorskip("highdicom")
    from pydicom import dcmread

    depth = SHAPE[0]
    stored = {
        "as it lies": np.arange(depth),
        "shuffled": np.random.default_rng(4).permutation(depth),
        "inferior first": np.arange(depth)[::-1],
    }[order]

    def shuffle(dataset):
        groups = dataset.PerFrameFunctionalGroupsSequence
        dataset.PerFrameFunctionalGroupsSequence = [groups[i] for i in stored]
        dataset.StudyInstanceUID, dataset.StudyID, dataset.SeriesNumber, dataset.InstanceNumber = "1.2", "1", 1, 1
        dataset.StudyDate = dataset.StudyTime = dataset.AccessionNumber = dataset.PatientSex = ""
        dataset.SeriesInstanceUID, dataset.FrameOfReferenceUID = "1.2.3", "1.2.4"

    source = write_oct_dicom(
        tmp_path / "a.dcm", telling_voxels()[stored], SPACING_MM, superior_first=True, edit=shuffle
    )
    volume, found = read_volume(source), segmentation(9)
    seg, heights = write_dicom(found, source, tmp_path / "out")
    back = surfaces_of_volume(source, heights)
    assert back.names == NAMES and back.heights_px.shape[1:] == (volume.shape[0], volume.shape[2])
    np.testing.assert_array_equal(back.heights_px, stacked(found))
    file = dcmread(seg)
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
def test_a_label_map_keeps_the_geometry_and_the_eye_of_its_scan(tmp_path, name):
    pytest.importorskip("nibabel")
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
