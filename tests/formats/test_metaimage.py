"""MetaImage volumes (.mhd with .raw or .zraw, .mha): headers as SimpleITK writes them, RETOUCH's folders, masks."""

import re
import zipfile
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_mask, read_volume
from support import ROOT
from support.command_line import inside
from support.vendor_files import SPACING_MM, write_metaimage, write_sidecar
from support.volumes import telling_voxels

CIRRUS = """ObjectType = Image
NDims = 3
BinaryData = True
BinaryDataByteOrderMSB = False
CompressedData = False
TransformMatrix = 1 0 0 0 1 0 0 0 1
Offset = 0 0 0
CenterOfRotation = 0 0 0
AnatomicalOrientation = RAI
ElementSpacing = 0.0117188 0.00195312 0.046875
DimSize = 48 64 12
ElementType = MET_UCHAR
ElementDataFile = oct.raw
"""
"""As SimpleITK writes it, with the tags and the spacing of a Cirrus cube in RETOUCH's layout; fewer voxels."""
SHAPE = (12, 64, 48)


def code_of(uri) -> str:
    with pytest.raises(ReadError) as caught:
        read_volume(uri, spacing_mm=SPACING_MM)
    assert str(uri.parent) in str(caught.value) and "\n" not in str(caught.value)
    return caught.value.code


def case(folder, seed: int = 0, end: str = "\n"):
    """A folder of RETOUCH: image and masks, each with its header."""
    folder.mkdir(parents=True)
    gray = np.roll(telling_voxels(shape=SHAPE), 5 * seed, axis=2)
    mask = (gray > 200).astype(np.uint8) * 2
    for name, voxels in (("oct", gray), ("reference", mask)):
        (folder / f"{name}.mhd").write_bytes(CIRRUS.replace("oct.raw", f"{name}.raw").replace("\n", end).encode())
        (folder / f"{name}.raw").write_bytes(voxels.tobytes())
    return gray, mask


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_header_of_simpleitk_gives_each_axis_its_millimetres(tmp_path, end):
    gray, mask = case(tmp_path / "TRAIN001", end=end)
    volume = read_volume(tmp_path / "TRAIN001" / "oct.mhd")
    np.testing.assert_array_equal(volume.voxels, gray)
    assert volume.spacing_mm == (0.046875, 0.00195312, 0.0117188), "x is lateral, y axial, z from B-scan to B-scan"
    np.testing.assert_array_equal(read_mask(tmp_path / "TRAIN001" / "reference.mhd"), mask)


def test_a_header_that_an_editor_saved_with_a_byte_order_mark_is_read(tmp_path):
    uri = write_metaimage(tmp_path / "a.mhd", telling_voxels())
    uri.write_bytes(b"\xef\xbb\xbf" + uri.read_bytes())
    np.testing.assert_array_equal(read_volume(uri).voxels, telling_voxels())
    (row,) = scan(tmp_path, nominal_spacing_mm=SPACING_MM, participant_from="{participant}", workers=0).acquisitions
    assert row.uri == str(uri)


def test_the_guide_turns_masks_into_truth(tmp_path):
    page = (ROOT / "docs" / "guide" / "data-images.md").read_text()
    (code,) = re.findall(r'^```python title="truth_of_masks.py"\n(.*?)^```', page, re.S | re.M)
    masks = [case(tmp_path / "retouch" / "Cirrus" / f"TRAIN00{n + 1}", n)[1] for n in range(2)]
    catalog = scan(tmp_path / "retouch", participant_from="*/{participant}/*", workers=0)
    catalog.save(tmp_path / "catalog")
    with inside(tmp_path):
        exec(compile(code, "truth_of_masks.py", "exec"), {})
    for row, mask in zip(sorted(catalog.acquisitions, key=lambda row: row.uri), masks, strict=True):
        with np.load(tmp_path / "truth" / f"{row.sop_instance_uid}.npz") as file:
            np.testing.assert_array_equal(file["lesions"], mask)


def test_a_tree_of_cases_becomes_one_row_per_case(tmp_path):
    for number in range(3):
        case(tmp_path / "retouch" / "Cirrus" / f"TRAIN00{number + 1}", number)
    packed = tmp_path / "packed"
    packed.mkdir()
    with zipfile.ZipFile(packed / "retouch.zip", "w") as archive:
        for path in sorted((tmp_path / "retouch").rglob("*.*")):
            archive.write(path, path.relative_to(tmp_path / "retouch"))
    for root, pattern in ((tmp_path / "retouch", "*/{participant}/*"), (packed, "*/*/{participant}/*")):
        catalog = scan(root, participant_from=pattern, workers=0)
        assert [a.uri.rsplit("/", 2)[1:] for a in catalog.acquisitions] == [
            [f"TRAIN00{n}", "oct.mhd"] for n in (1, 2, 3)
        ]
        assert {a.participant for a in catalog.acquisitions} == {"TRAIN001", "TRAIN002", "TRAIN003"}
        assert not catalog.rejects and [s.code for s in catalog.skipped] == ["voxel_labels"] * 3
        assert catalog.companions == 6, "the files of voxels belong to their headers"


@settings(max_examples=40)
@given(
    axes=st.permutations("WHD").map("".join),
    kind=st.sampled_from(["u1", "u2", "i2", "i8", "f4"]),
    zipped=st.booleans(),
    big_endian=st.booleans(),
    local=st.booleans(),
    spread=st.floats(1.3, 20),
)
def test_any_way_to_write_a_volume_reads_the_same(tmp_path, axes, kind, zipped, big_endian, local, spread):
    gray = telling_voxels(shape=(6, 40, 36))
    gray = gray.astype(np.dtype(kind)) if kind != "u2" else gray.astype(np.uint16) * 257
    spacing_mm = (0.0115 * spread, 0.0039, 0.0115)
    place = tmp_path / ("v.mha" if local else "v.mhd")
    volume = read_volume(write_metaimage(place, gray, spacing_mm, axes=axes, zipped=zipped, big_endian=big_endian))
    np.testing.assert_array_equal(volume.voxels, gray)
    np.testing.assert_allclose(volume.spacing_mm, spacing_mm, rtol=1e-6)


def test_axes_alike_follow_the_usual_order_or_the_sidecar(tmp_path):
    gray = telling_voxels(shape=(40, 64, 40))
    square = (0.03, 0.00196, 0.03)
    np.testing.assert_array_equal(read_volume(write_metaimage(tmp_path / "a.mhd", gray, square)).voxels, gray)
    other = write_metaimage(tmp_path / "b.mhd", gray, square, axes="HWD")
    assert code_of(other) == "unknown_axes", "the finest axis is not the second, so that the usual order is wrong"
    write_sidecar(other, square, axes="HWD")
    np.testing.assert_array_equal(read_volume(other).voxels, gray)
    bare = write_metaimage(tmp_path / "c.mhd", gray, (1, 1, 1))
    assert read_header(bare).spacing_mm is None, "1 1 1 is what a writer without millimetres states"
    np.testing.assert_array_equal(read_volume(bare, spacing_mm=square).voxels, gray)


def test_drawn_fluid_is_known_by_its_values_where_no_name_says_so(tmp_path):
    gray = telling_voxels(shape=SHAPE)
    labels = write_metaimage(tmp_path / "fluid.mhd", (gray > 128).astype(np.uint8) * 3)
    assert read_header(labels).shape == SHAPE and code_of(labels) == "voxel_labels"
    assert read_mask(labels).max() == 3
    with pytest.raises(ReadError, match="labels are 0 to") as caught:
        read_mask(write_metaimage(tmp_path / "reference.mhd", gray))
    assert caught.value.code == "not_labels"


def test_files_that_promise_what_they_lack_have_a_code(tmp_path):
    gray = telling_voxels(shape=SHAPE)

    def written(name: str, **options):
        return write_metaimage(tmp_path / name, gray, **options)

    alone = written("alone.mhd")
    with pytest.raises(ReadError, match=r"alone\.raw: only the voxels; give alone\.mhd"):
        read_volume(alone.with_suffix(".raw"))
    alone.with_suffix(".raw").unlink()
    assert code_of(alone) == "incomplete_export"
    for data in ("LIST", "LIST 2", "oct%03d.raw"):
        alone.write_text(CIRRUS.replace("oct.raw", data))
        assert code_of(alone) == "incomplete_export", data
    huge = {"DimSize": "4096 4096 4096"}
    assert code_of(written("huge.mhd", tags=huge)) == "absurd_size"
    assert code_of(written("more.mhd", tags={"DimSize": "48 64 500"})) == "truncated_pixel_data"
    assert code_of(written("fewer.mhd", tags={"DimSize": "48 64 10"})) == "surplus_data"
    padded = written("padded.mhd")
    padded.with_suffix(".raw").write_bytes(gray.tobytes() + bytes(512))
    np.testing.assert_array_equal(read_volume(padded).voxels, gray)
    assert code_of(written("zipped.mhd", zipped=True, tags={"DimSize": "512 512 900"})) == "truncated_pixel_data"
    assert code_of(written("colour.mhd", tags={"ElementNumberOfChannels": "3"})) == "unsupported_pixels"
    assert code_of(written("text.mhd", tags={"BinaryData": "False"})) == "unsupported_pixels"
    assert code_of(written("kind.mhd", tags={"ElementType": "MET_STRING"})) == "unsupported_pixels"
    assert code_of(written("flat.mhd", tags={"DimSize": "48 64"})) == "unknown_axes"
    assert code_of(written("words.mhd", tags={"DimSize": "48 64 many"})) == "damaged_file"


def test_a_bomb_of_zeros_gives_no_more_than_its_header_says(tmp_path):
    bomb = write_metaimage(tmp_path / "b.mhd", telling_voxels(shape=SHAPE), zipped=True)
    bomb.with_suffix(".zraw").write_bytes(zlib.compress(bytes(2**26)))
    assert code_of(bomb) == "blank_volume", "only the voxels that were promised are inflated"


def test_data_behind_a_prefix_and_paths_of_other_computers_are_found(tmp_path):
    gray = telling_voxels(shape=SHAPE)
    place = write_metaimage(tmp_path / "a.mhd", gray, data=r"C:\export\voxels.raw", tags={"HeaderSize": "-1"})
    raw = tmp_path / "voxels.raw"
    raw.write_bytes(b"prefix" + raw.read_bytes())
    np.testing.assert_array_equal(read_volume(place).voxels, gray)
    place.write_text(place.read_text().replace("HeaderSize = -1", "HeaderSize = 6"))
    np.testing.assert_array_equal(read_volume(place).voxels, gray)


@pytest.mark.parametrize(
    "lines",
    [
        "ElementType = MET_\x85UCHAR\nElementDataFile = LOCAL\n",
        "ElementType = MET_UCHAR\nElementNumberOfChannels = \x1b[1m\nElementDataFile = LOCAL\n",
        "ElementType = MET_UCHAR\nDimSize = 4 4 4\nElementDataFile = \x07scan\xad.raw\n",
    ],
)
def test_a_message_quotes_no_control_characters(tmp_path, lines):
    """Found by the ten thousand damaged files."""
    (tmp_path / "a.mhd").write_bytes(f"ObjectType = Image\nNDims = 3\n{lines}".encode("latin-1"))
    with pytest.raises(ReadError) as caught:
        read_header(tmp_path / "a.mhd")
    assert str(caught.value).isprintable()
