"""One stray file never costs a folder of B-scans: it is set aside and counted where it is recognisably none of them,
and named where not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from octfm.catalog.catalog import NothingAccepted
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_volume
from support.examples import examples
from support.vendor_files import SPACING_MM, write_images, write_npy, write_sidecar
from support.volumes import telling_voxels

VOXELS = telling_voxels(shape=(24, 40, 36))
many = settings(max_examples=examples(25))


def picture(height: int = 50, width: int = 60) -> Image.Image:
    return Image.fromarray(np.random.default_rng(height).integers(0, 255, (height, width), dtype=np.uint8))


STRAYS = {
    "enface.png": lambda at: picture().save(at),
    "slo.jpg": lambda at: picture(40, 36).save(at),
    "average.tif": lambda at: picture(40, 36).save(at),
    "thumbnail 1.png": lambda at: picture(8, 8).save(at),
    "oct 0.png": lambda at: picture().save(at),
    "oct 25.png": lambda at: picture().save(at),
    "oct 7 copy.png": lambda at: picture(40, 36).save(at),
    "broken.png": lambda at: at.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40)),
}
JUNK = {
    "Thumbs.db": b"\xd0\xcf\x11\xe0",
    "desktop.ini": b"[x]",
    ".DS_Store": b"\0\0\0\1Bud1",
    "._oct 1.png": b"\0\5\x16\7",
    "notes.txt": b"-",
}
OTHERS = {"empty.png": b"", "measure.mat": b"MATLAB 5.0", "viewer.exe": b"MZ", "meta.xml": b"<scan/>"}


@pytest.mark.parametrize("name", STRAYS)
def test_a_picture_that_is_no_bscan_is_set_aside_and_counted(tmp_path, name):
    folder = write_images(tmp_path / "oct" / "patient_7", VOXELS)
    STRAYS[name](folder / name)
    catalog = scan(tmp_path / "oct", workers=0)
    (row,) = catalog.acquisitions
    assert row.shape == VOXELS.shape and not catalog.rejects
    (aside,) = catalog.skipped
    assert (aside.code, aside.uri) == ("not_a_bscan", str(folder / name)) and name in aside.sentence
    assert catalog.companions == len(VOXELS) + 1, "its B-scans and its sidecar"
    np.testing.assert_array_equal(read_volume(folder).voxels, VOXELS)


@many
@given(
    junk=st.sets(st.sampled_from(sorted({**JUNK, **OTHERS})), min_size=1, max_size=2),
    stray=st.sampled_from([None, *STRAYS]),
)
def test_files_of_other_kinds_do_not_make_single_images_of_bscans(tmp_path_factory, junk, stray):
    root = tmp_path_factory.mktemp("clinic")
    folder = write_images(root / "patient_7", VOXELS)
    for name in junk:
        (folder / name).write_bytes({**JUNK, **OTHERS}[name])
    if stray:
        STRAYS[stray](folder / stray)
    catalog = scan(root, workers=0)
    assert [row.uri for row in catalog.acquisitions] == [str(folder)]
    assert {reject.uri for reject in catalog.rejects} == {str(folder / name) for name in junk & set(OTHERS)}
    assert [skip.uri for skip in catalog.skipped] == ([str(folder / stray)] if stray else [])


def rejected_once(folder) -> str:
    with pytest.raises(NothingAccepted) as caught:
        scan(folder.parent, workers=0)
    (reject,) = caught.value.catalog.rejects
    assert (reject.code, reject.uri) == ("mixed_images", str(folder)) and not caught.value.catalog.skipped
    with pytest.raises(ReadError) as read:
        read_volume(folder)
    assert str(read.value) == reject.sentence
    return reject.sentence


def test_a_bscan_of_another_size_inside_the_numbering_is_named_once(tmp_path):
    folder = write_images(tmp_path / "oct" / "visit", VOXELS)
    picture().save(folder / "oct 9.png")
    sentence = rejected_once(folder)
    assert "oct 9.png is 60 x 50, the other 23 images 36 x 40" in sentence


@pytest.mark.parametrize("strays", [12, 20])
def test_images_that_may_be_another_volume_are_named_once(tmp_path, strays):
    folder = write_images(tmp_path / "oct" / "visit", VOXELS)
    for number in range(strays):
        picture(40, 36).save(folder / f"left {number}.png")
    said = rejected_once(folder)
    assert "left 0.png may or may not be one of its B-scans" in said and "--layouts line" in said


def test_few_images_and_one_stray_are_not_a_guess(tmp_path):
    folder = write_images(tmp_path / "oct" / "visit", VOXELS[:4])
    picture(40, 36).save(folder / "average.png")
    assert "average.png may or may not" in rejected_once(folder)
    picture(90, 90).save(folder / "average.png")
    assert read_header(folder).shape == (4, 40, 36), "another name and another size"


def test_a_folder_without_millimetres_is_told_how_single_bscans_are_read(tmp_path):
    folder = write_images(tmp_path / "visit", VOXELS)
    (tmp_path / "visit.json").unlink(missing_ok=True)
    with pytest.raises(ReadError, match="if each image is a scan of its own, add --layouts line"):
        read_volume(folder)
    with pytest.raises(ReadError, match=r"--nominal-spacing$"):
        read_volume(write_npy(tmp_path / "a.npy", VOXELS))


def test_the_order_of_bscans_that_nothing_states_is_a_flag(tmp_path):
    write_images(tmp_path / "oct" / "patient_7", VOXELS)
    write_sidecar(write_npy(tmp_path / "oct" / "patient_8.npy", VOXELS[::-1]), SPACING_MM)
    catalog = scan(tmp_path / "oct", workers=0)
    assert catalog.summary()["flags"]["bscan_order_unstated"] == 2
    write_sidecar(tmp_path / "oct" / "patient_8.npy", SPACING_MM, superior_first=False)
    catalog = scan(tmp_path / "oct", workers=0)
    assert catalog.summary()["flags"]["bscan_order_unstated"] == 1, "a sidecar that says where they begin states it"


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_bscans_with_coloured_lines_are_rejected_by_the_scan(tmp_path, mode):
    """Their headers say colour, as do those of gray B-scans saved in colour, which are read."""
    grey, lines = (tmp_path / "oct" / name for name in ("patient_7", "patient_8"))
    for folder in (grey, lines):
        write_images(folder, VOXELS)
        for at in folder.glob("*.png"):
            image = Image.open(at).convert("RGB")
            if folder == lines:
                image.putpixel((5, 9), (255, 0, 0))
            image.convert(mode).save(at)
    catalog = scan(tmp_path / "oct", workers=0)
    assert [row.uri for row in catalog.acquisitions] == [str(grey)]
    (reject,) = catalog.rejects
    assert (reject.code, reject.uri) == ("unsupported_pixels", str(lines))
    assert "without layer lines drawn into it; export it without" in reject.sentence


def test_coloured_masks_stay_labels(tmp_path):
    masks = write_images(tmp_path / "oct" / "patient_7" / "masks", VOXELS)
    write_images(tmp_path / "oct" / "patient_7" / "scan", VOXELS)
    for at in masks.glob("*.png"):
        image = Image.open(at).convert("RGB")
        image.putpixel((5, 9), (255, 0, 0))
        image.save(at)
    found = scan(tmp_path / "oct", workers=0)
    assert [reject.code for reject in (*found.rejects, *found.skipped)] == ["voxel_labels"]
