"""White is white however many bits a file uses, and millimetres of a TIFF are read in every spelling of their unit."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.formats import ReadError, read_header, read_volume
from octfm.formats.images import to_mm
from octfm.phantom import phantom_volume
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import eight_bit
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.vendor_files import SPACING_MM, write_images, write_nifti, write_npy, write_tiff
from support.volumes import telling_voxels

GRAY = np.rint(telling_voxels().astype(float) * (255 / telling_voxels().max())).astype(np.uint8)
"""Reaches white, as every volume of millions of speckles does."""


def with_bits(bits: int) -> np.ndarray:
    stored = np.rint(GRAY.astype(float) * ((2**bits - 1) / 255))
    stored[0] = stored[0].min()  # one B-scan says nothing about the volume
    return stored.astype(np.uint16)


def write_dicom(path, voxels, **options):
    return write_oct_dicom(path.with_suffix(".dcm"), voxels, SPACING_MM, **options)


WRITERS = {
    "tiff": lambda at, v: write_tiff(at.with_suffix(".tif"), v),
    "png": write_images,
    "npy": lambda at, v: write_npy(at.with_suffix(".npy"), v),
    "npy int32": lambda at, v: write_npy(at.with_suffix(".npy"), v.astype(np.int32)),
    "nifti": lambda at, v: write_nifti(at.with_suffix(".nii.gz"), v),
    "dicom": write_dicom,
}


def shown(uri) -> np.ndarray:
    """What the model and every picture see."""
    return np.stack(
        list(eight_bit(read_volume(uri, spacing_mm=SPACING_MM) if uri.suffix != ".dcm" else read_volume(uri)))
    )


@pytest.mark.parametrize("form", WRITERS)
def test_any_number_of_bits_ends_within_one_gray_level(tmp_path, form):
    for bits in range(8, 17, 2):
        uri = WRITERS[form](tmp_path / str(bits), with_bits(bits))
        assert np.abs(shown(uri)[1:].astype(int) - GRAY[1:]).max() <= 1, bits
        assert "bits_from_values" in read_header(uri).flags or bits == 8


def test_volumes_of_16_bit_that_do_not_all_reach_white_stay_equally_bright(tmp_path):
    """The brightest voxels of a cohort's volumes scatter; a boundary at every bit would halve the brightness of
    some."""
    bright, dim = (
        write_npy(tmp_path / f"{top}.npy", (with_bits(16) * (top / 65535)).astype(np.uint16)) for top in (40000, 30000)
    )
    ratio = shown(dim).astype(float).mean() / shown(bright).mean()
    assert ratio == pytest.approx(30000 / 40000, rel=0.02)


@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_bits_that_dicom_states_are_believed_however_dark_the_scan(tmp_path, photometric):
    for bits in range(9, 16):
        dark = with_bits(bits) // 4
        stored = dark if photometric == "MONOCHROME2" else (2**bits - 1) - dark
        uri = write_dicom(tmp_path / str(bits), stored, bits_stored=bits, photometric=photometric)
        assert np.abs(shown(uri)[1:] - GRAY[1:] / 4).max() <= 1, bits
        assert "bits_from_values" not in read_header(uri).flags
    inverted = write_dicom(tmp_path / "a", 4095 - with_bits(12), photometric="MONOCHROME1")
    assert np.abs(shown(inverted)[1:].astype(int) - GRAY[1:]).max() <= 1


def test_stated_bits_of_a_sidecar_or_ome_hold_however_dark_the_scan(tmp_path):
    import tifffile

    dark = with_bits(14) // 16
    uri = write_npy(tmp_path / "a.npy", dark)
    (tmp_path / "a.json").write_text(json.dumps({"bits": 14}))
    ome = tmp_path / "b.ome.tif"
    tifffile.imwrite(ome, dark, ome=True, metadata={"axes": "ZYX", "SignificantBits": 14})
    for stated in (uri, ome):
        assert np.abs(shown(stated)[1:] - GRAY[1:] / 16).max() <= 1
        assert "bits_from_values" not in read_header(stated).flags


def test_values_that_contradict_stated_bits_are_not_cut_off(tmp_path):
    uri = write_npy(tmp_path / "a.npy", with_bits(12))
    (tmp_path / "a.json").write_text(json.dumps({"bits": 8}))
    assert np.abs(shown(uri)[1:].astype(int) - GRAY[1:]).max() <= 1


def test_a_full_scale_that_is_set_overrules_what_the_file_says():
    volume, _ = phantom_volume(size=(4, 96, 64))
    twelve = replace(volume, voxels=volume.voxels.astype(np.uint16) * 16, full_scale=4095)
    small = {"image_size": (4, 48, 32), "target_spacing": (1.8, 0.04, 0.27)}
    seen, as_set = Preprocessing(**small)(twelve), Preprocessing(**small, uint16_full_scale=8160)(twelve)
    assert 1.9 < seen.voxels.mean() / as_set.voxels.mean() < 2.1


def test_twelve_bits_without_their_full_scale_are_warned_about():
    """They would be prepared as a nearly black scan, whose vectors are others."""
    volume, _ = phantom_volume(size=(4, 96, 64))
    small = {"image_size": (4, 48, 32), "target_spacing": (1.8, 0.04, 0.27)}
    twelve = replace(volume, voxels=volume.voxels.astype(np.uint16) * 16)
    with pytest.warns(UserWarning, match="full_scale=4095"):
        Preprocessing(**small)(twelve)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Preprocessing(**small)(replace(twelve, full_scale=4095))
        Preprocessing(**small, uint16_full_scale=4095)(twelve)
        Preprocessing(**small)(replace(twelve, voxels=twelve.voxels * 16))


def test_a_store_of_version_2_keeps_the_brightness_it_began_with():
    volume, _ = phantom_volume(size=(4, 96, 64))
    small = {"image_size": (4, 48, 32), "target_spacing": (1.8, 0.04, 0.27)}
    twelve = replace(volume, voxels=volume.voxels.astype(np.uint16) * 16, full_scale=4095)
    as_before, now = (Preprocessing(**small, algorithm=version)(twelve).voxels.mean() for version in (2, 3))
    assert 14 < now / as_before < 18


def test_a_folder_of_8_and_16_bit_images_names_both(tmp_path):
    folder = write_images(tmp_path / "visit", GRAY)
    from PIL import Image

    Image.fromarray(with_bits(16)[3]).save(folder / "oct 4.png")
    with pytest.raises(ReadError, match=r"oct 1\.png has 8-bit pixels, oct 4\.png 16-bit ones") as caught:
        read_volume(folder)
    assert caught.value.code == "mixed_images"


def test_16_bit_pixels_whose_zero_is_white_are_refused(tmp_path):
    import tifffile

    tifffile.imwrite(tmp_path / "a.tif", with_bits(16), photometric="miniswhite", metadata=None)
    with pytest.raises(ReadError, match="0 is white") as caught:
        read_volume(tmp_path / "a.tif", spacing_mm=SPACING_MM)
    assert caught.value.code == "unsupported_pixels"


# ---- millimetres
# -----------------------------------------------------------------------------------------------------------------

UNITS = {
    "\u00b5m": 1e-3,
    "\u03bcm": 1e-3,
    "um": 1e-3,
    "&#181;m": 1e-3,
    "&#xB5;m": 1e-3,
    "mm": 1,
    "nm": 1e-6,
    "cm": 10,
    "m": 1e3,
    "in": 25.4,
}


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
@settings(max_examples=examples(40))
@given(
    units=st.tuples(*[st.sampled_from([*UNITS, None])] * 3),
    quote=st.sampled_from("\"'"),
    prefix=st.sampled_from(["", "OME:"]),
)
def test_ome_millimetres_in_any_unit_and_encoding(tmp_path, encoding, units, quote, prefix):
    import tifffile

    words = ""
    for axis, mm, unit in zip("ZYX", SPACING_MM, units, strict=True):
        words += f" PhysicalSize{axis}={quote}{mm / UNITS.get(unit, 1e-3):.9g}{quote}"
        words += f" PhysicalSize{axis}Unit={quote}{unit}{quote}" if unit else ""
    pixels = f'<{prefix}Pixels ID="P"{words}/>'
    xml = f'<?xml version="1.0"?><{prefix}OME><{prefix}Image Name="für">{pixels}</{prefix}Image></{prefix}OME>'
    description = xml.encode(encoding, "xmlcharrefreplace")
    uri = tmp_path / "a.ome.tif"
    tifffile.imwrite(uri, GRAY, photometric="minisblack", metadata=None, description=description)
    assert read_header(uri).spacing_mm == pytest.approx(SPACING_MM, rel=1e-6)


def test_ome_written_by_tifffile_in_micrometres_is_read(tmp_path):
    import tifffile

    um = {f"PhysicalSize{axis}": 1000 * mm for axis, mm in zip("ZYX", SPACING_MM, strict=True)}
    um |= {f"PhysicalSize{axis}Unit": "\u00b5m" for axis in "ZYX"}
    tifffile.imwrite(tmp_path / "a.ome.tif", GRAY, ome=True, metadata={"axes": "ZYX", **um})
    assert read_header(tmp_path / "a.ome.tif").spacing_mm == pytest.approx(SPACING_MM, rel=1e-6)


def test_ome_files_of_single_bscans_state_millimetres_as_one_of_many_pages_does(tmp_path):
    import tifffile

    um = {f"PhysicalSize{axis}": 1000 * mm for axis, mm in zip("YX", SPACING_MM[1:], strict=True)}
    for depth_um in (1000 * SPACING_MM[0], None):
        folder = tmp_path / f"oct {depth_um}"
        folder.mkdir()
        stated = um | ({} if depth_um is None else {"PhysicalSizeZ": depth_um})
        for at, bscan in enumerate(GRAY):
            tifffile.imwrite(folder / f"{at}.ome.tif", bscan, ome=True, metadata={"axes": "YX", **stated})
        expected = None if depth_um is None else pytest.approx(SPACING_MM, rel=1e-6)
        assert read_header(folder).spacing_mm == expected
        single = read_header(folder / "3.ome.tif", layouts=("line",))
        assert single.spacing_mm is not None and single.spacing_mm[1:] == pytest.approx(SPACING_MM[1:], rel=1e-6)
    tifffile.imwrite(folder / "3.ome.tif", GRAY[3], ome=True, metadata={"axes": "YX", **um, "PhysicalSizeX": 9.0})
    with pytest.raises(ReadError, match=r"0\.ome\.tif and 3\.ome\.tif state different millimetres") as refused:
        read_header(folder)
    assert refused.value.code == "mixed_images"


@pytest.mark.parametrize("other", ['<BinaryOnly MetadataFile="0.ome.tif"/>', '<Pixels PhysicalSizeX="11,5"/>'])
def test_the_files_of_an_ome_set_have_the_millimetres_that_the_first_states_for_all(tmp_path, other):
    import tifffile

    mm = "".join(f' PhysicalSize{axis}="{1000 * mm}"' for axis, mm in zip("ZYX", SPACING_MM, strict=True))
    for at, bscan in enumerate(GRAY):
        text = f"<OME>{other if at else f'<Pixels{mm}/>'}</OME>"
        tifffile.imwrite(tmp_path / f"{at}.ome.tif", bscan, metadata=None, description=text)
    assert read_header(tmp_path).spacing_mm == pytest.approx(SPACING_MM)


@pytest.mark.parametrize("word", ["pixel", "", "deg", "reference frame", "furlong"])
def test_what_is_no_length_is_never_millimetres(word):
    assert to_mm(word) == 0


@pytest.mark.parametrize(
    "word", ["micron", "microns", "um", "\\u00B5m", "\\u00b5m", "\u00b5m", "\u03bcm", "UM", "micrometers"]
)
def test_imagej_micrometres(word):
    assert to_mm(word) == pytest.approx(1e-3)
