"""A TIFF that is cut, turned, or holds more than one stack is refused, and never read as another volume."""

import numpy as np
import pytest
import tifffile
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from octfm.errors import ReadError
from octfm.formats import read_header, read_volume
from support.examples import examples
from support.vendor_files import SPACING_MM, write_sidecar, write_tiff
from support.volumes import telling_voxels

VOXELS = telling_voxels(shape=(5, 24, 20))


def by_pillow(path, compression: str) -> None:
    first, *others = map(Image.fromarray, VOXELS)
    first.save(path, save_all=True, append_images=others, compression=compression)


WRITERS = {
    "pages first": lambda path: write_tiff(path, VOXELS),
    "deflated": lambda path: write_tiff(path, VOXELS, compression="zlib"),
    "BigTIFF": lambda path: write_tiff(path, VOXELS, bigtiff=True),
    "ImageJ": lambda path: write_tiff(path, VOXELS, imagej=True),
    "OME": lambda path: write_tiff(path, VOXELS, ome=True),
    "Pillow": lambda path: by_pillow(path, "raw"),
    "Pillow, LZW": lambda path: by_pillow(path, "tiff_lzw"),
}


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=examples(60))
@given(at=st.floats(0, 1, exclude_max=True))
@example(0.999)
@example(0.998)
@example(0.995)
def test_a_cut_tiff_is_refused_or_whole(writer, tmp_path, at):
    """The cut may fall into the list of pages, whose end then looks like the end of the volume."""
    WRITERS[writer](tmp_path / "a.tif")
    content = (tmp_path / "a.tif").read_bytes()
    (tmp_path / "cut.tif").write_bytes(content[: int(at * len(content))])
    try:
        found = read_volume(tmp_path / "cut.tif", spacing_mm=SPACING_MM, raster_only=False)
    except ReadError as error:
        assert error.code in ("truncated_pixel_data", "decode_failed", "empty_file", "not_dicom", "damaged_file")
    else:
        assert np.array_equal(found.voxels, VOXELS)


def test_a_tiff_cut_anywhere_in_its_list_of_pages_is_refused(tmp_path):
    by_pillow(tmp_path / "a.tif", "tiff_lzw")
    content = (tmp_path / "a.tif").read_bytes()
    with tifffile.TiffFile(tmp_path / "a.tif") as file:
        third, fourth = file.pages[2].offset, file.pages[3].offset
    for end in range(third, fourth):
        (tmp_path / "cut.tif").write_bytes(content[:end])
        with pytest.raises(ReadError) as refused:
            read_header(tmp_path / "cut.tif")
        assert refused.value.code in ("truncated_pixel_data", "decode_failed")


@pytest.mark.parametrize("orientation", [2, 3, 6])
@pytest.mark.parametrize("suffix", ["tif", "jpg"])
def test_images_that_are_stored_turned_are_refused(tmp_path, suffix, orientation):
    """Left alone, the first page of a TIFF would be turned and no other, and no JPEG."""
    path = tmp_path / f"a.{suffix}"
    if suffix == "tif":
        write_tiff(path, VOXELS, extratags=[(274, "H", 1, orientation, True)])
    else:
        exif = Image.Exif()
        exif[274] = orientation
        Image.fromarray(VOXELS[0]).save(path, exif=exif)
    with pytest.raises(ReadError, match=f"Orientation {orientation}") as refused:
        read_volume(path, spacing_mm=SPACING_MM, raster_only=False)
    assert refused.value.code == "unsupported_pixels"


@pytest.mark.parametrize("kind", ["imagej", "ome"])
def test_channels_are_not_bscans(tmp_path, kind):
    both = np.stack([VOXELS, 255 - VOXELS], axis=1)
    tifffile.imwrite(tmp_path / "a.tif", both, metadata={"axes": "ZCYX"}, **{kind: True})
    with pytest.raises(ReadError, match="5 slices, 2 channels and 1 times") as refused:
        read_volume(tmp_path / "a.tif", spacing_mm=SPACING_MM)
    assert refused.value.code == "unknown_axes"


def test_an_image_of_too_many_pixels_is_said_to_be_so(tmp_path):
    Image.new("1", (20_000, 10_000)).save(tmp_path / "a.tif", compression="group4")
    with pytest.raises(
        ReadError, match=r"a\.tif: more pixels than any B-scan has; fetch or export it again$"
    ) as refused:
        read_volume(tmp_path / "a.tif", spacing_mm=SPACING_MM, raster_only=False)
    assert refused.value.code == "absurd_size"


@pytest.mark.parametrize("ome", [True, False])
def test_two_stacks_in_one_file_are_not_one_volume(tmp_path, ome):
    with tifffile.TiffWriter(tmp_path / "a.tif", ome=ome) as file:
        file.write(VOXELS)
        file.write(255 - VOXELS)
    tifffile.imwrite(tmp_path / "array.tif", np.stack([VOXELS, 255 - VOXELS]), ome=ome, metadata={"axes": "TZYX"})
    for name in ("a.tif", "array.tif"):
        with pytest.raises(ReadError, match="10 pages, the first described as") as refused:
            read_volume(tmp_path / name, spacing_mm=SPACING_MM)
        assert refused.value.code == "unknown_axes"


@pytest.mark.parametrize("ome", [True, False])
def test_pages_written_one_by_one_and_gray_saved_as_colour_are_one_volume(tmp_path, ome):
    with tifffile.TiffWriter(tmp_path / "pages.tif", ome=ome) as file:
        for page in VOXELS:
            file.write(page)
    tifffile.imwrite(tmp_path / "colour.tif", np.stack([VOXELS] * 3, axis=3), ome=ome, photometric="rgb")
    for name in ("pages.tif", "colour.tif"):
        found = read_volume(tmp_path / name, spacing_mm=SPACING_MM)
        np.testing.assert_array_equal(found.voxels, VOXELS)


def test_bscans_behind_the_only_page_are_not_left_out(tmp_path):
    """ImageJ writes one page for files of more than 4 GB, tifffile a single one of depth 5, or of five (`truncate`)."""
    tifffile.imwrite(tmp_path / "deep.tif", VOXELS, volumetric=True, tile=(5, 16, 16))
    tifffile.imwrite(tmp_path / "large.tif", VOXELS[0], description="ImageJ=1.54f\nimages=5\nslices=5\n", metadata=None)
    tifffile.imwrite(tmp_path / "truncated.tif", VOXELS, truncate=True)
    for path in (tmp_path / "deep.tif", tmp_path / "large.tif", tmp_path / "truncated.tif"):
        with pytest.raises(ReadError, match="states 5 images and has 1") as refused:
            read_header(path, layouts=("line",))
        assert refused.value.code == "frame_count_mismatch"


def test_signed_bytes_do_not_wrap_around(tmp_path):
    gray = telling_voxels()
    uri = write_tiff(tmp_path / "a.tif", (gray // 2).astype(np.int8))
    np.testing.assert_array_equal(read_volume(uri, spacing_mm=SPACING_MM).voxels, gray // 2)
    write_tiff(uri, (gray.astype(np.int16) - 128).astype(np.int8))
    with pytest.raises(ReadError, match="signed 8-bit pixels below 0"):
        read_volume(uri, spacing_mm=SPACING_MM)


def test_signed_pixels_that_imagej_saved_are_not_read_as_grey_on_grey(tmp_path):
    """It stores 32,768 for 0, and says so in its description of the first page alone."""
    uri = write_tiff(tmp_path / "a.tif", VOXELS.astype(np.uint16) + 32768, SPACING_MM, imagej=True)
    assert read_volume(uri).voxels.min() >= 32768, "unsigned, as far as it says"
    text = "ImageJ=1.54f\nimages=5\nslices=5\nunit=mm\ncf=0\nc0=-32768.0\nc1=1.0\nvunit=Gray Value\n"
    tifffile.imwrite(uri, VOXELS.astype(np.uint16) + 32768, description=text, metadata=None)
    for read in (read_header, read_volume):
        with pytest.raises(ReadError, match="ImageJ adds 32,768") as refused:
            read(uri)
        assert refused.value.code == "unsupported_pixels"


@pytest.mark.parametrize("pixels", ["float", "coloured lines"])
def test_pixels_of_a_stack_that_no_verb_can_read_are_a_reject_of_the_scan(tmp_path, pixels):
    stack = VOXELS.astype(np.float32) / 255
    if pixels == "coloured lines":
        stack = np.repeat(VOXELS[..., None], 3, axis=3)
        stack[:, 5, 9] = 255, 0, 0
    uri = tmp_path / "clinic" / "a.tif"
    uri.parent.mkdir()
    tifffile.imwrite(uri, stack, photometric="minisblack" if pixels == "float" else "rgb", metadata=None)
    write_sidecar(uri, SPACING_MM)
    with pytest.raises(ReadError) as refused:
        read_volume(uri)
    assert refused.value.code == "unsupported_pixels"
    assert ("coloured lines" in str(refused.value)) == (pixels == "coloured lines")
    with pytest.raises(ReadError) as refused:
        read_header(uri)
    assert refused.value.code == "unsupported_pixels"
