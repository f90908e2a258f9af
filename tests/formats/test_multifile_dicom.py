"""Volumes in several DICOM files, concatenated or a file per B-scan, and media with a DICOMDIR: whole, or what is
missing is named."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread, uid
from pydicom.dataset import Dataset
from pydicom.fileset import FileSet

from octfm.catalog.catalog import NothingAccepted
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_volume
from support.dicom_files import item, write_oct_dicom
from support.multifile_dicom import SPACING_MM, concatenation, cube, series


def code_of(path) -> tuple[str, str]:
    found = []
    for read in (read_header, read_volume):
        with pytest.raises(ReadError) as refused:
            read(path)
        found.append((refused.value.code, str(refused.value)))
    assert found[0] == found[1]
    return found[0]


# Concatenations


@pytest.mark.parametrize("syntax", [uid.ExplicitVRLittleEndian, uid.RLELossless, uid.JPEGLSLossless], ids=str)
def test_a_concatenation_is_one_volume_whichever_part_is_asked(tmp_path, syntax):
    paths = concatenation(tmp_path, transfer_syntax=syntax)
    for path in paths:
        volume = read_volume(path)
        np.testing.assert_array_equal(volume.voxels, cube())
        assert (
            volume.spacing_mm == pytest.approx(SPACING_MM) and volume.superior_first and volume.source == str(paths[0])
        )
        assert read_header(path).shape == (7, 40, 36) and "several_files" in read_header(path).flags
    assert volume.acquisition == str(dcmread(paths[0]).SOPInstanceUIDOfConcatenationSource)


def test_parts_are_ordered_by_number_not_by_name(tmp_path):
    voxels = cube(12)
    sizes = [1] * 12
    paths = concatenation(tmp_path, voxels, sizes)  # part10 before part2 in a listing
    np.testing.assert_array_equal(read_volume(paths[4]).voxels, voxels)
    backwards = [path.rename(path.with_name(f"{99 - n}")) for n, path in enumerate(paths)]
    np.testing.assert_array_equal(read_volume(backwards[4]).voxels, voxels)


@pytest.mark.parametrize("total", [True, False])
@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_missing_part_is_named(tmp_path, total, lost):
    paths = concatenation(tmp_path, total=total)
    paths.pop(lost - 1).unlink()
    if lost == 3 and not total:
        assert read_header(paths[0]).shape[0] == 5  # nothing in the files tells of a third
        return
    for path in paths:
        code, sentence = code_of(path)
        assert code == "missing_part" and f"concatenation {lost} of 3" in sentence
    with pytest.raises(NothingAccepted) as nothing:
        scan(tmp_path)
    assert [reject.code for reject in nothing.value.catalog.rejects] == ["missing_part"]


def test_a_part_that_is_there_twice_or_of_another_size_is_refused(tmp_path):
    paths = concatenation(tmp_path / "twice")
    (tmp_path / "twice" / "copy").write_bytes(paths[1].read_bytes())
    assert code_of(paths[0])[0] == "inconsistent_parts"
    paths = concatenation(tmp_path / "sizes", names="{}")
    other = concatenation(tmp_path / "other", cube(7, 40, 40), names="{}")
    dataset = dcmread(other[1])
    dataset.ConcatenationUID = dcmread(paths[0]).ConcatenationUID
    dataset.save_as(paths[1])
    assert code_of(paths[0])[0] == "inconsistent_parts"


@pytest.mark.parametrize("how", ["window", "bits", "black"])
def test_files_of_different_gray_scales_are_no_volume(tmp_path, how):
    """Each file is decoded by itself: one B-scan would be brighter than its neighbours, or inverted."""

    def edit(dataset, place):
        if how == "window":  # each B-scan's own brightest voxel, as converters write it
            dataset.PixelRepresentation, dataset.WindowCenter, dataset.WindowWidth = 1, 60 + place, 100 + 2 * place
        elif place == 6 and how == "bits":
            dataset.BitsStored, dataset.HighBit = 12, 11
        elif place == 6:
            dataset.PhotometricInterpretation = "MONOCHROME1"

    voxels = cube().astype(np.uint8 if how == "window" else np.uint16)
    paths = series(tmp_path, voxels // 2 if how == "window" else 16 * voxels, edit=edit)
    code, sentence = code_of(paths[0])
    assert code == "inconsistent_parts" and "grey scale" in sentence


def test_windows_of_each_file_change_nothing_where_none_is_needed(tmp_path):
    """A rescale that allows no value below 0 says what is black, so the window is only how a display shows it."""

    def edit(dataset, place):
        dataset.PixelRepresentation, dataset.RescaleSlope, dataset.RescaleIntercept = 1, 1, 128
        dataset.WindowCenter, dataset.WindowWidth = 60 + place, 100 + 2 * place

    voxels = cube() // 2
    paths = series(tmp_path, voxels, edit=edit)
    np.testing.assert_array_equal(read_volume(paths[0]).voxels, voxels + 128)


def test_a_cut_part_is_named(tmp_path):
    paths = concatenation(tmp_path)
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    code, sentence = code_of(paths[0])
    assert code == "truncated_pixel_data" and str(paths[1]) in sentence


# One file per B-scan


@pytest.mark.parametrize("enhanced", [True, False])
def test_single_b_scan_files_become_a_volume_ordered_by_position(tmp_path, enhanced):
    order = [3, 0, 6, 1, 5, 2, 4, 7, 11, 8, 10, 9]
    paths = series(tmp_path, cube(12), order=order, enhanced=enhanced)
    volume = read_volume(paths[5])
    np.testing.assert_array_equal(volume.superior_to_inferior().voxels, cube(12))
    assert volume.spacing_mm == pytest.approx(SPACING_MM) and volume.source == str(paths[0])
    catalog = scan(tmp_path)
    (row,) = catalog.acquisitions
    assert (row.uri, row.shape, catalog.companions, row.laterality) == (str(paths[0]), (12, 40, 36), 11, "R")
    assert {"several_files", "frames_reordered"} <= set(row.flags)


def test_without_positions_the_instance_number_tells_the_order(tmp_path):
    paths = series(tmp_path, cube(12), positions=False)
    np.testing.assert_array_equal(read_volume(paths[3]).voxels, cube(12))
    paths = [path.rename(path.with_name(f"{99 - n}")) for n, path in enumerate(paths)]
    np.testing.assert_array_equal(read_volume(paths[3]).voxels, cube(12))
    paths[5].unlink()
    code, sentence = code_of(paths[0])
    assert code == "missing_part" and "series 6 of 12" in sentence


def test_without_position_and_number_nothing_is_guessed(tmp_path):
    assert code_of(series(tmp_path, positions=False, numbers=False)[0])[0] == "inconsistent_parts"


def test_counted_positions_show_that_no_file_is_missing(tmp_path):
    """As a program writes them that knows none; the files need no numbers then, or may have numbers with gaps."""
    for numbers in (False, True):

        def count(dataset, place, numbers=numbers):
            frame = dataset.PerFrameFunctionalGroupsSequence[0]
            frame.PlanePositionSequence = [item(ImagePositionPatient=[0, 0, round(place * SPACING_MM[0], 6)])]
            if numbers:
                dataset.InstanceNumber = 3 * place + 1

        volume = read_volume(series(tmp_path / str(numbers), numbers=False, edit=count)[0])
        np.testing.assert_array_equal(volume.voxels, cube())
        assert volume.spacing_mm == pytest.approx(SPACING_MM) and volume.superior_first is None


def test_a_lost_b_scan_is_noticed_by_position_and_number(tmp_path):
    paths = series(tmp_path)
    paths[3].unlink()
    assert code_of(paths[0])[0] == "missing_part"


def test_a_copy_of_a_b_scan_is_named(tmp_path):
    paths = series(tmp_path)
    (tmp_path / "copy").write_bytes(paths[2].read_bytes())
    code, sentence = code_of(paths[0])
    assert code == "inconsistent_parts" and "copy" in sentence


def test_a_single_b_scan_and_radial_b_scans_are_no_volume(tmp_path):
    assert code_of(series(tmp_path / "one", cube(1))[0])[0] == "not_raster"

    def turn(dataset, place):
        a = np.pi * place / 7
        axes = [float(np.cos(a)), 0, float(np.sin(a)), 0, 1, 0]
        dataset.SharedFunctionalGroupsSequence[0].PlaneOrientationSequence = [item(ImageOrientationPatient=axes)]

    assert code_of(series(tmp_path / "radial", edit=turn)[0])[0] == "not_raster"
    with pytest.raises(NothingAccepted) as nothing:
        scan(tmp_path)
    assert [reject.code for reject in nothing.value.catalog.skipped] == ["not_raster"] * 2
    assert nothing.value.catalog.companions == 6


def test_both_eyes_in_one_series_are_two_volumes(tmp_path):
    def eye(dataset, place):
        dataset.ImageLaterality = "R" if place < 6 else "L"
        dataset.SharedFunctionalGroupsSequence[0].FrameAnatomySequence[0].FrameLaterality = dataset.ImageLaterality

    series(tmp_path, cube(12), edit=eye)
    assert {(row.laterality, row.shape[0]) for row in scan(tmp_path).acquisitions} == {("R", 6), ("L", 6)}


def test_two_people_in_one_series_are_two_volumes(tmp_path):
    """Programs that anonymise may give all files one series UID."""

    def person(dataset, place):
        dataset.PatientID = "A" if place < 6 else "B"

    series(tmp_path, cube(12), positions=False, edit=person)
    assert [(row.participant, row.shape[0]) for row in scan(tmp_path).acquisitions] == [("A", 6), ("B", 6)]


def test_a_file_that_lacks_the_patient_of_the_others_is_not_said_to_be_elsewhere(tmp_path):
    def person(dataset, place):
        dataset.PatientID = "" if place == 3 else "A"

    paths = series(tmp_path, positions=False, edit=person)
    code, sentence = code_of(paths[0])
    assert code == "missing_part" and "series 4 of 7 are not in its folder, or state another PatientID" in sentence


@pytest.mark.parametrize(
    ("keyword", "values", "code"),
    [
        ("PixelSpacing", ([0.0039, 0.0115], [0.0039, 0.023]), "mixed_spacing"),
        ("SliceThickness", (0.12, 0.24), "missing_spacing"),
    ],
)
def test_millimetres_of_the_first_file_are_not_those_of_files_that_state_others(tmp_path, keyword, values, code):
    def stated(dataset, place):
        setattr(dataset, keyword, values[place % 2])

    paths = series(tmp_path, enhanced=False, positions=False, edit=stated)
    assert code_of(paths[0])[0] == code


def test_signs_that_look_like_digits_do_not_stop_a_scan(tmp_path):
    for path in series(tmp_path):
        path.rename(path.with_name(path.name.replace("IM", "1²")))
    (row,) = scan(tmp_path).acquisitions
    assert row.shape == (7, 40, 36)


def test_files_of_one_volume_in_an_archive(tmp_path):
    paths = concatenation(tmp_path / "tree")
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for path in paths:
            archive.write(path, f"device/1001/{path.name}")
    (tmp_path / "only").mkdir()
    (tmp_path / "all.zip").rename(tmp_path / "only" / "all.zip")
    (row,) = scan(tmp_path / "only").acquisitions
    np.testing.assert_array_equal(read_volume(row.uri).voxels, cube())


def test_a_scan_does_not_depend_on_how_many_series_share_a_folder(tmp_path):
    for n in range(3):
        concatenation(tmp_path, np.roll(cube(), n, 2), names=f"{n}_{{}}")
    catalog = scan(tmp_path)
    assert len(catalog.acquisitions) == 3 and catalog.companions == 6 and not catalog.rejects
    assert len({row.sop_instance_uid for row in catalog.acquisitions}) == 3


def test_a_concatenation_is_prepared_like_a_file(tmp_path):
    from octfm.store.prepare import prepare
    from octfm.volume.preprocessing import Preprocessing

    rng = np.random.default_rng(0)
    voxels = np.clip(
        np.where((np.arange(64) > 20)[None, :, None], 150, 20) + rng.integers(0, 40, (8, 64, 48)), 0, 255
    ).astype(np.uint8)
    concatenation(tmp_path / "clinic", voxels, (5, 3))
    small = Preprocessing(image_size=(8, 64, 48), target_spacing=(0.12, 0.0039, 0.0115))
    store = prepare(scan(tmp_path / "clinic"), tmp_path / "store", small, workers=1, progress=False)
    assert len(store) == 1 and not store.unprepared()


# Media with a DICOMDIR


def medium(folder: Path) -> Path:
    """A file-set as pydicom writes it: DICOMDIR and PT000000/ST000000/SE000000/IM000000..."""
    source = folder.with_name("source")
    files = FileSet()
    for n in range(3):

        def describe(dataset: Dataset, n=n) -> None:
            dataset.StudyInstanceUID, dataset.SeriesInstanceUID = "1.2.3", f"1.2.3.{n}"
            dataset.StudyDate, dataset.StudyTime, dataset.StudyID = "20260101", "120000", "1"
            dataset.SeriesNumber = dataset.InstanceNumber = n + 1

        files.add(write_oct_dicom(source / f"{n}.dcm", np.roll(cube(), n, 1), SPACING_MM, edit=describe))
    files.write(folder)
    return folder / "DICOMDIR"


def test_a_medium_is_scanned_from_its_dicomdir_and_omissions_named(tmp_path):
    directory = medium(tmp_path / "medium")
    assert len(scan(directory).acquisitions) == 3 and not scan(directory).rejects
    lost = sorted(path for path in directory.parent.rglob("*") if path.is_file() and path.name != "DICOMDIR")[1]
    lost.unlink()
    catalog = scan(directory.parent)
    assert len(catalog.acquisitions) == 2
    (reject,) = catalog.rejects
    assert reject.code == "missing_file" and reject.uri == str(lost)
    for path in [p for p in directory.parent.rglob("*") if p.is_file() and p.name != "DICOMDIR"]:
        path.rename(path.with_name(path.name.lower()))  # as some copies of ISO 9660 media are
    assert len(scan(directory.parent).rejects) == 1


def test_a_damaged_dicomdir_is_told_and_stops_nothing(tmp_path):
    directory = medium(tmp_path / "medium")
    content = directory.read_bytes()
    directory.write_bytes(content[:400] + b"\xff" * 40 + content[440:])
    catalog = scan(directory.parent)
    assert len(catalog.acquisitions) == 3 and [reject.code for reject in catalog.rejects] in ([], ["unreadable"])
