"""Functional groups read from their bytes are those that pydicom reads, in every encoding; what is cut or nested
without end has a code."""

import contextlib
import functools
import io
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import dcmread, uid
from pydicom.dataset import Dataset
from pydicom.sequence import Sequence

from octfm.formats import ReadError, read_header, read_volume
from octfm.formats.dicom.file import parsed
from octfm.formats.dicom.geometry import floats
from octfm.formats.dicom.groups import read_groups
from support.dicom_files import NATIVE, item, write_oct_dicom
from support.examples import examples

SPACING_MM = (0.12, 0.0039, 0.0115)
VOXELS = np.random.default_rng(0).integers(0, 255, (6, 40, 36), dtype=np.uint8)


def lengths(undefined: int):
    """Which sequences and items say how long they are: bits of `undefined`, and elements that nobody wants among
    them."""

    def edit(dataset: Dataset) -> None:
        for number, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            ends = [100.0 + number, 50.0, 100.0 + number, 86.5]
            frame.OphthalmicFrameLocationSequence = [
                item(ReferenceCoordinates=ends, OphthalmicImageOrientation="LINEAR")
            ]
            purpose = item(CodeValue="1", CodeMeaning="nested", CodingSchemeDesignator="99X")
            frame.add_new(0x00089215, "SQ", [item(PurposeOfReferenceCodeSequence=purpose)])  # DerivationCodeSequence
            frame.add_new(0x00211001, "LO", "private")
            frame.add_new(0x00211002, "OB", bytes(300))
        dataset.add_new(0x52011001, "SQ", [item(PurposeOfReferenceCodeSequence=item(CodeValue="2"))])
        _undefine(dataset, undefined)

    return edit


def _undefine(dataset: Dataset, undefined: int) -> None:
    for element in dataset:
        if element.VR == "SQ":
            element.is_undefined_length = bool(undefined & 1)
            for own in element.value:
                own.is_undefined_length_sequence_item = bool(undefined & 2)
                _undefine(own, undefined >> 1 if undefined & 4 else undefined)


def plain(value):
    """pydicom's view in the words of read_groups: only what it wants, numbers as numbers."""
    if isinstance(value, Sequence):
        return [{e.keyword: plain(e.value) for e in own if e.keyword in KEPT} for own in value]
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return tuple(float(v) for v in value)
    return value if isinstance(value, str) else (float(value),)


KEPT = {
    "SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "PixelMeasuresSequence", "PlanePositionSequence",
    "PlaneOrientationSequence", "FrameAnatomySequence", "OphthalmicFrameLocationSequence", "PixelSpacing", "SliceThickness",
    "SpacingBetweenSlices", "ImagePositionPatient", "ImageOrientationPatient", "FrameLaterality", "OphthalmicImageOrientation",
    "ReferenceCoordinates",
}  # fmt: skip


def numbers(value):
    if isinstance(value, list) and value and isinstance(value[0], str):
        return floats(value)
    return [{k: numbers(v) for k, v in own.items()} for own in value] if isinstance(value, list) else value


@pytest.mark.parametrize("syntax", [*NATIVE, uid.RLELossless], ids=str)
@pytest.mark.parametrize("undefined", range(8))
def test_groups_are_those_that_pydicom_reads(tmp_path, syntax, undefined):
    path = write_oct_dicom(
        tmp_path / "a", VOXELS, SPACING_MM, superior_first=True, transfer_syntax=syntax, edit=lengths(undefined)
    )
    expected = dcmread(path)
    with parsed(str(path)) as file:
        for keyword in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
            assert numbers(file.dataset.get(keyword)) == plain(expected[keyword].value), keyword
    np.testing.assert_array_equal(read_volume(path).voxels, VOXELS)


def test_a_sequence_longer_than_what_is_read_at_once_is_read_whole(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 255, (600, 32, 32), dtype=np.uint8)

    def bulky(dataset):
        for frame in dataset.PerFrameFunctionalGroupsSequence:
            frame.add_new(0x00211002, "OB", bytes(1000))
        _undefine(dataset, 7)

    path = write_oct_dicom(tmp_path / "a", voxels, (0.01, 0.0039, 0.0115), superior_first=True, edit=bulky)
    assert read_header(path).spacing_source == "shared+positions" and read_header(path).shape[0] == 600


@pytest.mark.parametrize("undefined", [False, True])
def test_groups_of_unknown_vr_are_implicit_inside(tmp_path, undefined):
    """What gateways that do not know the elements make of them."""
    explicit = write_oct_dicom(tmp_path / "a", VOXELS, SPACING_MM, superior_first=True)
    implicit = write_oct_dicom(
        tmp_path / "b", VOXELS, SPACING_MM, superior_first=True, transfer_syntax=uid.ImplicitVRLittleEndian
    )
    content, inside = explicit.read_bytes(), implicit.read_bytes()
    start, end = content.index(b"\x00\x52\x29\x92"), content.index(b"\xe0\x7f\x10\x00O")
    groups = b""
    for tag in (b"\x00\x52\x29\x92", b"\x00\x52\x30\x92"):
        at = inside.index(tag)
        length = int.from_bytes(inside[at + 4 : at + 8], "little")
        said = b"\xff\xff\xff\xff" if undefined else inside[at + 4 : at + 8]
        groups += (
            tag
            + b"UN\0\0"
            + said
            + inside[at + 8 : at + 8 + length]
            + (b"\xfe\xff\xdd\xe0\0\0\0\0" if undefined else b"")
        )
    (tmp_path / "c").write_bytes(content[:start] + groups + content[end:])
    header, plain_header = read_header(tmp_path / "c"), read_header(explicit)
    assert (header.spacing_mm, header.spacing_source, header.superior_first) == (
        plain_header.spacing_mm, plain_header.spacing_source, plain_header.superior_first,
    )  # fmt: skip
    assert header.laterality == "R"


def test_sequences_nested_without_end_are_refused():
    deep = b"".join(b"\x28\x00\x10\x91SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff" for _ in range(50_000))
    head = b"\x00\x52\x29\x92SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff"
    with pytest.raises(ValueError, match="nested"):
        read_groups(io.BytesIO(head + deep), len(head + deep), False, False)


@functools.cache
def bytes_with(undefined: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path, edit = Path(folder) / "a", lengths(undefined)
        write_oct_dicom(path, VOXELS[:3], SPACING_MM, superior_first=True, edit=edit, sop_instance_uid="1.2.3.4")
        return path.read_bytes()


@settings(max_examples=examples(300))
@given(data=st.data(), undefined=st.integers(0, 7))
def test_damaged_groups_are_read_or_refused_with_a_code(tmp_path, data, undefined):
    path, content = tmp_path / "a", bytearray(bytes_with(undefined))
    start, end = content.index(b"\x00\x52\x29\x92"), content.index(b"\xe0\x7f\x10\x00O")
    for _ in range(data.draw(st.integers(1, 5))):
        content[data.draw(st.integers(start, end - 1))] = data.draw(st.sampled_from([0, 1, 0x7F, 0xFE, 0xFF]))
    if data.draw(st.booleans()):
        at = data.draw(st.integers(start, end - 1))
        del content[at : at + data.draw(st.integers(1, 30))]
    path.write_bytes(content)
    with contextlib.suppress(ReadError):
        assert min(read_header(path).shape) > 0
