"""Signed DICOM pixels become the gray values that the file says, in every encoding, or are refused where it does not
say them."""

import numpy as np
import pytest
from pydicom import uid
from pydicom.pixels import apply_modality_lut, apply_voi_lut, pixel_array

from octfm.errors import ReadError
from octfm.formats import read_header, read_volume
from support.codestreams import imagecodecs_encoder
from support.dicom_files import item, write_oct_dicom

SPACING_MM = (0.12, 0.0039, 0.0115)
EXACT = (
    uid.ImplicitVRLittleEndian,
    uid.ExplicitVRBigEndian,
    uid.DeflatedExplicitVRLittleEndian,
    uid.RLELossless,
    uid.JPEGLSLossless,
)


def gray(bits: int) -> np.ndarray:
    """Every gray value from black to white, unsigned [D, H, W]."""
    values = np.linspace(0, 2**bits - 1, 3 * 40 * 36).round().astype(np.uint16 if bits > 8 else np.uint8)
    return np.random.default_rng(0).permutation(values).reshape(3, 40, 36)


def write(path, values, bits, slope=None, intercept=None, window=None, groups="", **options):
    """Signed `values` as two's complement of `bits` bits, with what is stated about them at the top level or in
    functional groups."""
    unsigned = (values.astype(np.int32) & (2**bits - 1)).astype(np.uint16 if bits > 8 else np.uint8)

    def edit(dataset):
        dataset.PixelRepresentation = 1
        rescale = {} if slope is None else {"RescaleSlope": slope, "RescaleIntercept": intercept, "RescaleType": "US"}
        windowed = {} if window is None else {"WindowCenter": window[0], "WindowWidth": window[1]}
        if not groups:
            for keyword, value in (rescale | windowed).items():
                setattr(dataset, keyword, value)
        shared = dataset.SharedFunctionalGroupsSequence[0]
        if groups and rescale:
            shared.PixelValueTransformationSequence = [item(**rescale)]
        if groups and windowed:
            shared.FrameVOILUTSequence = [item(**windowed)]

    return write_oct_dicom(path, unsigned, SPACING_MM, bits_stored=bits, edit=edit, **options)


@pytest.mark.parametrize("bits", [8, 12, 16])
@pytest.mark.parametrize("groups", ["", "groups"])
def test_an_image_shifted_into_signed_numbers_is_what_it_was(tmp_path, bits, groups):
    """What conversion software does to unsigned images: the intercept says by how much."""
    image, half = gray(bits), 2 ** (bits - 1)
    path = write(tmp_path / "a", image.astype(int) - half, bits, 1, half, groups=groups)
    full = 2 ** (8 * image.dtype.itemsize) - 1
    expected = np.rint(image * (full / (2**bits - 1))).astype(image.dtype)
    np.testing.assert_array_equal(read_volume(path).voxels, expected)
    if not groups:
        np.testing.assert_array_equal(
            apply_modality_lut(pixel_array(path), item(RescaleSlope=1, RescaleIntercept=half)), image
        )
    assert read_header(path).shape == image.shape


@pytest.mark.parametrize("syntax", EXACT, ids=str)
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
def test_in_every_encoding_that_keeps_bits(tmp_path, syntax, photometric):
    image = gray(16)
    path = write(
        tmp_path / "a", image.astype(int) - 2**15, 16, 1, 2**15, transfer_syntax=syntax, photometric=photometric
    )
    np.testing.assert_array_equal(read_volume(path).voxels, 65535 - image if photometric == "MONOCHROME1" else image)


def test_in_a_jpeg_2000_codestream_that_is_signed_itself(tmp_path):
    image = gray(16)

    def encode(frame):
        return imagecodecs_encoder("jpeg2k", codecformat="J2K", reversible=True)(frame.view(np.int16))

    path = write(
        tmp_path / "a", image.astype(int) - 2**15, 16, 1, 2**15, transfer_syntax=uid.JPEG2000Lossless, encode=encode
    )
    np.testing.assert_array_equal(read_volume(path).voxels, image)


def test_values_that_are_never_negative_need_no_word_about_black(tmp_path):
    image = gray(16) >> 1
    voxels = read_volume(write(tmp_path / "a", image.astype(int), 16)).voxels
    assert voxels.min() == 0 and voxels.max() == 65535, "white is full scale"
    np.testing.assert_allclose(voxels, image * (65535 / 32767), atol=0.5)


def test_a_window_says_what_is_black_and_white(tmp_path):
    """PS3.3 C.11.2.1.2, as pydicom applies it."""
    values, (centre, width) = gray(12).astype(int) - 2048, (100.0, 1500.0)
    path = write(tmp_path / "a", values, 12, 0.5, 20, window=(centre, width))
    stated = item(RescaleSlope=0.5, RescaleIntercept=20, WindowCenter=centre, WindowWidth=width, BitsStored=12, PixelRepresentation=1,
                  PhotometricInterpretation="MONOCHROME2")  # fmt: skip
    shown = apply_voi_lut(apply_modality_lut(values, stated), stated)
    expected = (shown - shown.min()) / (shown.max() - shown.min()) * 65535
    np.testing.assert_allclose(read_volume(path).voxels, expected, atol=1)


def test_a_negative_slope_turns_black_and_white(tmp_path):
    image = gray(16)
    path = write(tmp_path / "a", 2**15 - 1 - image.astype(int), 16, -1, 2**15 - 1)
    np.testing.assert_array_equal(read_volume(path).voxels, image)


@pytest.mark.parametrize(
    ("stated", "why"),
    [
        ({}, "values down to -2048"),
        ({"slope": 2, "intercept": 0}, "values down to -4096"),
        ({"slope": 0, "intercept": 0}, "RescaleSlope is 0"),
    ],
)
def test_where_black_would_be_a_guess_the_file_is_refused(tmp_path, stated, why):
    """A stack with one value below 0 is not read otherwise than one without: that would be two brightnesses of one
    instrument."""
    path = write(tmp_path / "a", gray(12).astype(int) - 2048, 12, **stated)
    with pytest.raises(ReadError, match=why) as refused:
        read_volume(path)
    assert refused.value.code == "unsupported_pixels"


def test_a_rescale_that_changes_from_b_scan_to_b_scan_is_refused(tmp_path):
    from pydicom import dcmread

    from support.dicom_files import save

    path = write(tmp_path / "a", gray(16).astype(int) - 2**15, 16, 1, 2**15, groups="groups")
    dataset = dcmread(path)
    dataset.SharedFunctionalGroupsSequence[0].PixelValueTransformationSequence[0].RescaleSlope = 2
    for number, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
        frame.PixelValueTransformationSequence = [
            item(RescaleSlope=1 + number, RescaleIntercept=2**15, RescaleType="US")
        ]
    save(dataset, tmp_path / "b", uid.ExplicitVRLittleEndian)
    with pytest.raises(ReadError, match="differ from B-scan to B-scan") as refused:
        read_volume(tmp_path / "b")
    assert refused.value.code == "unsupported_pixels"
