"""One conformance suite for every format but DICOM: axes, spacing, laterality, type, order of B-scans, and what becomes
of bad files.

A volume in which every voxel knows where it is goes through the format and has to come back, whatever the file is
called.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest

from octfm.formats import ReadError, read_header, read_volume
from octfm.formats.reasons import REASONS
from support.vendor_files import BIRTH_DATE, FORMATS, NAME, SPACING_MM, SURNAME, Format, write_sidecar
from support.volumes import telling_voxels


@pytest.fixture(params=FORMATS)
def form(request) -> Format:
    return FORMATS[request.param]


def written(form: Format, folder: Path, dtype=np.uint8) -> tuple[Path, np.ndarray]:
    voxels = telling_voxels(dtype, form.shape)
    uri = form.write(folder / "visit", voxels)
    if not form.states >= {"spacing", "laterality"}:
        write_sidecar(uri, laterality="R")
    if form.stretched:
        voxels = np.rint((voxels - voxels.min()) * (65535 / np.ptp(voxels))).astype(np.uint16)
    return uri, voxels


def test_axes_order_and_type_survive(form, tmp_path):
    for dtype in form.dtypes:
        uri, voxels = written(form, tmp_path / dtype.__name__, dtype)
        volume = read_volume(uri)
        assert volume.voxels.dtype == dtype and volume.shape == form.shape
        assert np.abs(volume.voxels.astype(int) - voxels).max() <= form.tolerance
        assert volume.source == str(uri) and volume.layout == "raster"


def test_header_knows_what_the_volume_has(form, tmp_path):
    uri, _ = written(form, tmp_path)
    header, volume = read_header(uri), read_volume(uri)
    np.testing.assert_allclose(header.spacing_mm, SPACING_MM, rtol=2e-3)
    assert (header.shape, header.spacing_mm, header.laterality) == (volume.shape, volume.spacing_mm, volume.laterality)
    assert header.laterality == "R" and volume.acquisition == header.sop_instance_uid
    assert header.superior_first is (True if "positions" in form.states else None), (
        "no positions, no claim about which is superior"
    )
    assert header.participant == ("1001" if "participant" in form.states else None)


def test_nothing_is_guessed_where_nothing_is_stated(form, tmp_path):
    uri, _ = written(form, tmp_path)
    for sidecar in uri.parent.glob("*.json"):
        sidecar.unlink()
    header = read_header(uri)
    assert ("laterality_unknown" in header.flags) is ("laterality" not in form.states) is (header.laterality is None)
    if "spacing" in form.states:
        np.testing.assert_allclose(header.spacing_mm, SPACING_MM, rtol=2e-3)
        other = (0.3, 0.002, 0.02)
        assert read_volume(uri, spacing_mm=other).spacing_mm == (other if form.of_a_mean_eye else header.spacing_mm), (
            "a file that states millimetres is believed, one that states degrees gives way"
        )
    else:
        assert header.spacing_mm is None
        with pytest.raises(
            ReadError, match=r"declare them in .*\.json beside it, \{\"spacing_mm\": \[between"
        ) as caught:
            read_volume(uri)
        assert caught.value.code == "missing_spacing"
        assert read_volume(uri, spacing_mm=SPACING_MM).spacing_mm == SPACING_MM


def test_the_name_does_not_matter(form, tmp_path):
    """Only where a format has no magic bytes does its ending count."""
    uri, voxels = written(form, tmp_path)
    if uri.is_dir() or form.needs_name:
        return
    other = shutil.copy(uri, uri.with_name("scan.dcm"))
    volume = read_volume(other, spacing_mm=SPACING_MM)
    assert np.abs(volume.voxels.astype(int) - voxels).max() <= form.tolerance
    assert volume.acquisition == read_header(uri).sop_instance_uid, "the same bytes are the same acquisition"


def test_no_name_and_no_birth_date_leaves_the_file(form, tmp_path):
    uri, _ = written(form, tmp_path)
    told = repr(read_header(uri)) + repr(read_volume(uri))
    assert not any(secret in told for secret in (NAME, SURNAME, BIRTH_DATE))


def test_a_cut_file_is_a_reject_with_a_code(form, tmp_path):
    """Wherever the end is missing, unless it held no image."""
    uri, voxels = written(form, tmp_path)
    target = form.cut(uri)
    content = target.read_bytes()
    for share in (0.0, 0.001, 0.1, 0.5, 0.9, 0.999):
        target.write_bytes(content[: int(share * len(content))])
        try:
            volume = read_volume(uri, spacing_mm=SPACING_MM)
        except ReadError as error:
            assert error.code in REASONS and "\n" not in str(error)
            assert str(uri.parent) in str(error) and not any(secret in str(error) for secret in (NAME, SURNAME))
        else:
            lossless = np.abs(volume.voxels.astype(int) - voxels).max() <= form.tolerance
            assert share == 0.999 and lossless, "read as if nothing were missing"


def test_garbage_is_a_reject_with_a_code(form, tmp_path):
    """Bytes overwritten in the part that says what the rest means."""
    uri, _ = written(form, tmp_path)
    target = form.cut(uri)
    content = bytearray(target.read_bytes())
    rng = np.random.default_rng(1)
    for _ in range(25):
        damaged = bytearray(content)
        start = int(rng.integers(0, min(len(content), 3000)))
        damaged[start : start + 8] = rng.bytes(min(8, len(content) - start))
        target.write_bytes(damaged)
        for read in (read_header, read_volume):
            try:
                read(uri)
            except ReadError as error:
                assert error.code in REASONS and "\n" not in str(error)
