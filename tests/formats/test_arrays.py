"""Arrays of research: .npy, .npz and NIfTI are taken as what they say they are, and refused where only a guess would
do."""

import json
import re
import struct
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest
from scipy.io import loadmat, savemat

from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_overlay, read_volume
from octfm.formats.arrays import nifti
from support import ROOT
from support.command_line import inside
from support.vendor_files import SPACING_MM, write_matlab, write_nifti, write_npy, write_sidecar
from support.volumes import SHAPE, telling_voxels


def code_of(uri, **options) -> str:
    with pytest.raises(ReadError) as caught:
        read_volume(uri, **options)
    assert "\n" not in str(caught.value) and str(uri) in str(caught.value)
    return caught.value.code


def test_real_arrays_with_and_without_millimetres(real_data):
    """The sidecar of one states them; of the other it says that nobody knows."""
    header = read_header(real_data / "medvisbonn_amd_spectralis_145.npz")
    assert (
        header.shape == (145, 496, 512)
        and header.spacing_mm == (0.03, 0.003872, 0.011182)
        and header.spacing_source == "sidecar"
    )
    assert header.laterality is None and "laterality_unknown" in header.flags
    assert read_header(real_data / "macular_hole_49.npz").spacing_mm is None
    assert code_of(real_data / "macular_hole_49.npz") == "missing_spacing"
    hole = read_volume(real_data / "macular_hole_49.npz", spacing_mm=(0.12, 0.00387, 0.0115))
    np.testing.assert_array_equal(hole.voxels, np.load(real_data / "macular_hole_49.npz")["volume"])


@pytest.mark.parametrize("axes", ["DHW", "WHD", "HDW", "wdh"])
def test_declared_axes_are_believed(tmp_path, axes):
    voxels = telling_voxels()
    stored = voxels.transpose(["DHW".index(axis) for axis in axes.upper()])
    for uri in (
        write_npy(tmp_path / "a.npy", stored),
        write_matlab(tmp_path / "c.mat", stored.transpose(2, 0, 1)),
        write_nifti(tmp_path / "b.nii.gz", voxels, (0.03, 0.03, 0.03), axes=axes.upper()),
    ):
        write_sidecar(uri, axes=axes)
        volume = read_volume(uri)
        np.testing.assert_array_equal(volume.voxels, voxels)
        assert volume.spacing_mm == pytest.approx((0.03, 0.03, 0.03) if uri.suffix == ".gz" else SPACING_MM)


@pytest.mark.parametrize("mm", [(0.03, 0.002, 0.03), (0.01, 0.01, 0.01), (1.0, 1.0, 1.0), (0.12, 0.011, 0.0115)])
def test_nifti_axes_that_millimetres_do_not_tell_are_never_guessed(tmp_path, mm):
    uri = write_nifti(tmp_path / "a.nii.gz", telling_voxels(), mm)
    assert code_of(uri) == code_of(uri, spacing_mm=SPACING_MM) == "unknown_axes"


@pytest.mark.parametrize("count", [19, 49])
def test_1_mm_between_b_scans_of_an_impossible_field_gives_way_to_a_sidecar(tmp_path, count):
    voxels = np.random.default_rng(0).integers(0, 255, (count, 40, 50), dtype=np.uint8)
    path = write_nifti(tmp_path / "a.nii.gz", voxels, (1.0, 0.0039, 0.0115))
    with pytest.raises(ReadError) as refused:
        read_volume(path)
    assert refused.value.code == "missing_spacing"
    (tmp_path / "a.json").write_text(json.dumps({"spacing_mm": [0.12, 0.0039, 0.0115]}))
    assert read_volume(path).spacing_mm == (0.12, 0.0039, 0.0115)


def test_nifti_says_what_it_assumes(tmp_path):
    assert "axial_direction_assumed" in read_header(write_nifti(tmp_path / "a.nii", telling_voxels())).flags


def test_spacing_of_unknown_unit_is_used_only_where_it_fits_an_oct(tmp_path):
    voxels = telling_voxels()
    assert read_volume(write_nifti(tmp_path / "a.nii", voxels, unit="unknown")).spacing_mm == pytest.approx(SPACING_MM)
    metres = write_nifti(tmp_path / "b.nii", voxels, tuple(mm * 1e-3 for mm in SPACING_MM), unit="unknown")
    assert code_of(metres) == "unknown_axes", "they could be anything"


def test_gray_levels_stay_what_they_are(tmp_path):
    """Wider types are narrowed where no value changes; anything else would be a scaling that nobody declared."""
    voxels = telling_voxels()
    for dtype, expected in ((np.int16, np.uint8), (np.float32, np.uint8), (np.int64, np.uint8), (np.float64, np.uint8)):
        uri = write_npy(tmp_path / "a.npy", voxels.astype(dtype))
        volume = read_volume(uri, spacing_mm=SPACING_MM)
        assert volume.voxels.dtype == expected
        np.testing.assert_array_equal(volume.voxels, voxels)
    for bad in (
        voxels / 255.0,
        voxels.astype(np.int16) - 100,
        voxels * np.float32(1e4),
        np.where(voxels > 200, np.nan, voxels),
    ):
        assert code_of(write_npy(tmp_path / "a.npy", bad), spacing_mm=SPACING_MM) == "unsupported_pixels"


def test_a_nifti_that_holds_more_than_its_header_says_is_refused(tmp_path):
    voxels = telling_voxels()
    uri = write_nifti(tmp_path / "a.nii", voxels)
    whole = uri.read_bytes()
    uri.write_bytes(whole + bytes(512))
    np.testing.assert_array_equal(read_volume(uri).voxels, voxels, "padding of a block")
    uri.write_bytes(whole + bytes(5000))
    assert code_of(uri) == "surplus_data"


def test_a_nifti_slope_is_applied(tmp_path):
    voxels = telling_voxels()
    uri = write_nifti(tmp_path / "a.nii", voxels)
    content = bytearray(uri.read_bytes())
    struct.pack_into("<2f", content, 112, 2.0, 10.0)
    uri.write_bytes(content)
    np.testing.assert_array_equal(read_volume(uri).voxels, voxels.astype(np.uint16) * 2 + 10)
    struct.pack_into("<2f", content, 112, 0.3, 0.0)
    uri.write_bytes(content)
    assert code_of(uri) == "unsupported_pixels"


def test_whole_numbers_that_were_saved_with_a_slope_are_whole_again(tmp_path):
    """As nibabel saves floats with the header of an image of bytes."""
    import nibabel

    drawn = telling_voxels() // 20
    uri = write_nifti(tmp_path / "a.nii", telling_voxels())
    scan = nibabel.load(uri)
    for values, code in ((drawn, None), (drawn + 0.3, "unsupported_pixels")):
        stored = values.transpose(2, 1, 0).astype(np.float64)
        nibabel.save(nibabel.Nifti1Image(stored, scan.affine, scan.header), tmp_path / "b.nii")
        if code is None:
            np.testing.assert_array_equal(read_overlay(tmp_path / "b.nii", of=read_volume(uri)).values, drawn)
        else:
            assert code_of(tmp_path / "b.nii") == code


def test_a_search_for_whole_numbers_takes_no_memory_of_a_volume(tmp_path):
    whole = np.arange(2**19, dtype=np.uint16).reshape(32, 128, 128) // 2**8
    uri = write_nifti(tmp_path / "a.nii", whole * 2**8, (0.1, 0.01, 0.02))
    content = bytearray(uri.read_bytes())
    struct.pack_into("<2f", content, 112, 2**-8, 0.0)
    uri.write_bytes(content)
    tracemalloc.start()
    voxels = nifti.open_bscans(str(uri)).decode()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(voxels, whole)
    assert peak < 2.5 * 8 * whole.size, "more than float64 twice"


def test_arrays_that_are_no_volume(tmp_path):
    voxels = telling_voxels()
    assert code_of(write_npy(tmp_path / "a.npy", voxels[0])) == "unknown_axes"
    assert code_of(write_npy(tmp_path / "a.npy", np.array([{"a": 1}], dtype=object))) == "unknown_axes"
    np.savez(tmp_path / "two.npz", left=voxels, right=voxels)
    assert code_of(tmp_path / "two.npz") == "unknown_axes"
    np.savez(tmp_path / "named.npz", anything=voxels, labels=voxels[0])
    assert read_volume(tmp_path / "named.npz", spacing_mm=SPACING_MM).shape == SHAPE


@pytest.mark.parametrize(
    ("at", "value"), [(6, b"\xc8\0"), (8, b"\x01"), (8, b"\x40"), (10, b"\x63\0"), (10, b"\x0c\0"), (10, b"\x0e\0")]
)
def test_an_archive_with_a_password_or_unknown_method_is_rejected(tmp_path, at, value):
    """Version, flags and method of every member, in the directory of the .npz: a flipped bit must not stop a scan
    (found by seed 9090)."""
    np.savez_compressed(tmp_path / "a.npz", volume=np.arange(4 * 40 * 36, dtype=np.uint16).reshape(4, 40, 36))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + at : entry + at + len(value)] = value
    (tmp_path / "a.npz").write_bytes(content)
    for read in (read_header, read_volume):
        with pytest.raises(ReadError) as caught:
            read(tmp_path / "a.npz")
        assert caught.value.code in ("damaged_file", "unreadable")


def test_a_header_cannot_ask_for_memory_that_the_file_does_not_fill(tmp_path):
    uri = write_npy(tmp_path / "a.npy", telling_voxels())
    content = uri.read_bytes()
    uri.write_bytes(content.replace(b"(12, 40, 36)", b"(99999,9999,9)"[:12].ljust(12)))
    assert code_of(uri) in ("damaged_file", "absurd_size", "unknown_axes")
    uri.write_bytes(content.replace(b"(12, 40, 36)", b"(12, 99, 99)"))
    assert code_of(uri) == "truncated_pixel_data"


@pytest.mark.parametrize(
    "facts", [{"spacing_mm": [1, 2]}, {"spacing_mm": "thin"}, {"spacing_mm": [0.1, -1, 0.1]}, {"axes": "XYZ"}]
)
def test_a_sidecar_that_cannot_be_meant_is_a_reject(tmp_path, facts):
    uri = write_npy(tmp_path / "a.npy", telling_voxels())
    (tmp_path / "a.json").write_text(json.dumps(facts))
    with pytest.raises(ReadError, match=r"a\.json") as caught:
        read_header(uri)
    assert caught.value.code == "contradicting_declaration"


def test_a_sidecar_and_a_file_that_name_different_eyes(tmp_path):
    uri = write_npy(tmp_path / "a.npz", telling_voxels(), laterality="OD", spacing_mm=SPACING_MM)
    write_sidecar(uri, (0.2, 0.004, 0.0115), laterality="OS")
    header = read_header(uri)
    assert header.laterality is None and {"laterality_conflict", "spacing_conflict"} <= set(header.flags)
    assert header.spacing_mm == SPACING_MM, "the file is believed"


def test_the_images_of_a_matlab_file_are_told_from_its_masks_and_maps(tmp_path):
    """As in Duke's sets: masks of the images' shape, maps, ages; doubles that hold gray levels."""
    voxels = telling_voxels().astype(np.float64)
    masks = np.full(voxels.transpose(1, 2, 0).shape, np.nan)
    uri = write_matlab(tmp_path / "a.mat", voxels, compressed=True, manualFluid1=masks, layerMaps=masks, Age=71.0)
    np.testing.assert_array_equal(read_volume(uri, spacing_mm=SPACING_MM).voxels, voxels)
    savemat(uri, {"oct": voxels.transpose(1, 2, 0), "mask": voxels.transpose(1, 2, 0) > 9})
    assert read_volume(uri, spacing_mm=SPACING_MM).shape == SHAPE, "a mask is no volume"
    savemat(uri, {"images": voxels[0], "fluid": masks})
    assert read_header(uri, layouts=("line",)).shape == (1, *SHAPE[1:]), "MATLAB drops a last axis of one"


def test_matlab_files_without_one_volume_say_what_they_hold(tmp_path):
    volume = telling_voxels()
    d, h, w = SHAPE
    for arrays, found in (
        ({"left": volume, "right": volume}, f"left {d} x {h} x {w}, right "),
        ({"thickness": volume[0]}, f"thickness {h} x {w}"),
        ({"images": volume[..., None]}, f"images {d} x {h} x {w} x 1"),
        ({"study": {"images": volume}}, "none of numbers"),
    ):
        savemat(tmp_path / "a.mat", arrays)
        with pytest.raises(ReadError, match=found) as caught:
            read_header(tmp_path / "a.mat")
        assert caught.value.code == "unknown_axes"
    savemat(tmp_path / "a.mat", {"images": np.zeros((8, 6, 0), np.uint8)})
    with pytest.raises(ReadError, match="0 B-scans of 8 x 6 pixels"):
        read_header(tmp_path / "a.mat")
    write_matlab(tmp_path / "a.mat", volume / 2)
    assert code_of(tmp_path / "a.mat", spacing_mm=SPACING_MM) == "unsupported_pixels"


def test_a_changed_byte_of_a_compressed_matlab_array_is_found(tmp_path):
    """Few of them end the inflating; the checksum knows all."""
    noise = np.random.default_rng(0).integers(0, 255, (11, 41, 37), dtype=np.uint8)
    content = write_matlab(tmp_path / "a.mat", noise, compressed=True).read_bytes()
    for place in range(len(content) // 2, len(content), 997):
        (tmp_path / "a.mat").write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert code_of(tmp_path / "a.mat", spacing_mm=SPACING_MM) == "damaged_file"


def test_a_volume_that_eyepy_saved_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", raw_volume=telling_voxels().astype(np.float32))
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as file:
        file.writestr("meta.json", '{"scale_z": 0.12}')
    with pytest.raises(ReadError, match="a volume that eyepy saved") as refused:
        read_header(tmp_path / "a.npz")
    assert refused.value.code == "not_dicom"


@pytest.mark.parametrize("head", [b"MATLAB 7.3 MAT-file, Platform: GLNXA64", b"\x89HDF\r\n\x1a\n"])
def test_hdf5_is_refused_with_what_to_do(tmp_path, head):
    (tmp_path / "a.mat").write_bytes(head.ljust(512) + b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(ReadError, match=r"HDF5 file.* save its volume as \.npz") as caught:
        read_header(tmp_path / "a.mat")
    assert caught.value.code == "not_dicom"


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("packed", [False, True])
def test_doubles_that_matlab_stores_as_bytes_in_either_byte_order(tmp_path, order, packed):
    """scipy writes neither, MATLAB both: an array of class double whose whole numbers take one byte each."""

    def element(kind: int, content: bytes) -> bytes:
        return struct.pack(f"{order}2I", kind, len(content)) + content + bytes(-len(content) % 8)

    voxels = telling_voxels()
    stored = voxels.transpose(1, 2, 0)
    name = struct.pack(f"{order}I", 3 << 16 | 1) + b"oct\0"
    parts = [
        element(6, struct.pack(f"{order}2I", 6, 0)), element(5, np.array(stored.shape, f"{order}i4").tobytes()), name,
        element(2, stored.tobytes(order="F")),
    ]  # fmt: skip
    matrix = element(14, b"".join(parts))
    if packed:
        content = zlib.compress(matrix)
        matrix = struct.pack(f"{order}2I", 15, len(content)) + content
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack(f"{order}2H", 0x0100, 0x4D49)
    (tmp_path / "a.mat").write_bytes(header + matrix)
    np.testing.assert_array_equal(loadmat(tmp_path / "a.mat")["oct"], stored)
    np.testing.assert_array_equal(read_volume(tmp_path / "a.mat", spacing_mm=SPACING_MM).voxels, voxels)


def test_the_guide_turns_lines_of_matlab_files_into_truth(tmp_path):
    """Lines [B-scan, A-scan, line] that count rows from 1, as in Farsiu et al. 2014."""
    page = (ROOT / "docs" / "guide" / "data-images.md").read_text()
    (code,) = re.findall(r'^```python title="truth_of_duke.py"\n(.*?)^```', page, re.S | re.M)
    d, _, w = SHAPE
    rows = np.arange(3 * d * w, dtype=float).reshape(3, d, w)
    rows[:, 0] = np.nan
    write_matlab(tmp_path / "duke" / "1001.mat", telling_voxels(), layerMaps=rows.transpose(1, 2, 0) + 1)
    catalog = scan(tmp_path / "duke", nominal_spacing_mm=SPACING_MM, participant_from="{participant}.mat", workers=0)
    catalog.save(tmp_path / "catalog")
    with inside(tmp_path):
        exec(compile(code, "truth_of_duke.py", "exec"), {})
    (row,) = catalog.acquisitions
    with np.load(tmp_path / "truth" / f"{row.sop_instance_uid}.npz") as file:
        np.testing.assert_array_equal(file["surfaces"], rows)
        assert file["surface_names"].tolist() == ["ilm", "rpe", "bm"]
