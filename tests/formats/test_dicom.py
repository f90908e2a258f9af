"""A DICOM file becomes the Volume that was written into it, or an error with a reason code; never a guess, never a
crash."""

import functools
import hashlib
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydicom import uid
from pydicom.encaps import encapsulate, generate_frames

from octfm.formats import ReadError, read_header, read_volume
from octfm.formats.dicom import file as dicom_file
from octfm.formats.names import scanner_slug
from octfm.formats.reasons import REASONS
from support.dicom_files import BIRTH_DATE, LOSSLESS, LOSSY, NATIVE, PATIENT_NAME, item, write_oct_dicom
from support.examples import examples
from support.fuzz_files import deflated_bomb

SPACING_MM = (0.12, 0.0039, 0.0115)

lenient = settings(max_examples=examples(40))


def ramp(d=5, h=40, w=36, dtype=np.uint8) -> np.ndarray:
    """Every axis is distinguishable, no B-scan equals another."""
    values = np.arange(d)[:, None, None] * 20 + np.arange(h)[None, :, None] * 2 + np.arange(w)[None, None, :]
    return (values * (1 if dtype == np.uint8 else 257)).astype(dtype)


def code_of(path) -> str:
    """Reason code that header-only and full reading agree on."""
    with pytest.raises(ReadError) as from_header:
        read_header(path)
    with pytest.raises(ReadError) as from_pixels:
        read_volume(path)
    assert from_header.value.code == from_pixels.value.code
    assert from_header.value.code in REASONS
    assert str(path) in str(from_header.value)
    return from_header.value.code


@st.composite
def written_volumes(draw):
    dtype = draw(st.sampled_from([np.uint8, np.uint16]))
    # OpenJPEG cannot encode below 32 pixels.
    shape = draw(st.tuples(st.integers(2, 6), st.integers(32, 45), st.integers(32, 45)))
    voxels = draw(hnp.arrays(dtype, shape, elements=st.integers(0, np.iinfo(dtype).max), fill=st.integers(0, 200)))
    voxels[0, 0, :2] = 0, 255  # not blank
    millimetres = st.tuples(st.floats(0.05, 0.8), st.floats(0.002, 0.03), st.floats(0.004, 0.15))
    return {
        "voxels": voxels,
        "spacing_mm": tuple(float(f"{mm:.6g}") for mm in draw(millimetres)),
        "laterality": draw(st.sampled_from(["R", "L", None])),
        "transfer_syntax": draw(st.sampled_from(LOSSLESS)),
        "spacing_in": draw(st.sampled_from(["shared", "per_frame", "positions", "top_level"])),
        "superior_first": draw(st.sampled_from([True, False, None])),
        "offset_table": draw(st.booleans()),
    }


@lenient
@given(written_volumes())
def test_what_was_written_is_read(tmp_path, written):
    path = write_oct_dicom(tmp_path / "scan", **written)
    volume, header = read_volume(path), read_header(path)
    np.testing.assert_array_equal(volume.voxels, written["voxels"])
    assert volume.voxels.dtype == written["voxels"].dtype
    assert volume.spacing_mm == pytest.approx(written["spacing_mm"], rel=1e-4)
    assert volume.laterality == written["laterality"]
    if written["spacing_in"] != "positions":
        assert volume.superior_first is written["superior_first"]
    assert (header.shape, header.spacing_mm, header.laterality, header.superior_first) == (
        volume.shape, volume.spacing_mm, volume.laterality, volume.superior_first,
    )  # fmt: skip
    assert (volume.scanner, volume.participant, volume.source) == ("heidelberg_spectralis", "1001", str(path))


@pytest.mark.parametrize("transfer_syntax", [uid.ImplicitVRLittleEndian, uid.ExplicitVRLittleEndian])
def test_content_decides_not_the_name_and_the_preamble_may_be_missing(tmp_path, transfer_syntax):
    path = write_oct_dicom(tmp_path / "notes.txt", ramp(), SPACING_MM, transfer_syntax=transfer_syntax, preamble=False)
    np.testing.assert_array_equal(read_volume(path).voxels, ramp())


@pytest.mark.parametrize(
    ("stated", "inverted"),
    [
        ({"PresentationLUTShape": "IDENTITY"}, False),
        ({"PresentationLUTShape": "INVERSE"}, True),
        ({"PresentationLUTShape": "INVERSE", "PhotometricInterpretation": "MONOCHROME1"}, True),
        ({"RescaleSlope": "-1", "RescaleIntercept": "4095"}, True),
        ({"RescaleSlope": "2", "RescaleIntercept": "-10"}, False),
        ({"RescaleSlope": "-1", "RescaleIntercept": "4095", "PhotometricInterpretation": "MONOCHROME1"}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("grouped", [False, True])
def test_white_is_the_end_that_the_header_states(tmp_path, stated, inverted, grouped):
    image = with_12_bits()

    def edit(dataset):
        for keyword, value in stated.items():
            if grouped and keyword.startswith("Rescale"):
                shared = dataset.SharedFunctionalGroupsSequence[0]
                shared.PixelValueTransformationSequence = [item(**{k: v for k, v in stated.items() if "Resc" in k})]
            else:
                setattr(dataset, keyword, value)

    path = write_oct_dicom(tmp_path / "a", image, SPACING_MM, bits_stored=12, edit=edit)
    np.testing.assert_array_equal(read_volume(path).voxels, (4095 - image if inverted else image) << 4)


def test_what_unsigned_pixels_do_not_need_may_be_malformed(tmp_path):
    def edit(dataset):
        dataset.add_new("RescaleSlope", "LO", "1,0")
        dataset.PixelPaddingValue = [65535, 0]

    image = with_12_bits()
    path = write_oct_dicom(tmp_path / "a", image, SPACING_MM, bits_stored=12, edit=edit)
    np.testing.assert_array_equal(read_volume(path).voxels, image << 4)


def test_frames_that_fall_and_rise_in_gray_are_refused(tmp_path):
    def edit(dataset):
        for number, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            frame.PixelValueTransformationSequence = [item(RescaleSlope=str((-1) ** number), RescaleIntercept="0")]

    with pytest.raises(ReadError, match="RescaleSlope has both signs") as refused:
        read_header(write_oct_dicom(tmp_path / "a", with_12_bits(), SPACING_MM, edit=edit))
    assert refused.value.code == "unsupported_pixels"


@pytest.mark.parametrize("transfer_syntax", [uid.ExplicitVRLittleEndian, uid.ImplicitVRLittleEndian])
@pytest.mark.parametrize("photometric", ["MONOCHROME1", "MONOCHROME2"])
@pytest.mark.parametrize("limit", [None, 65000])
def test_pixels_outside_the_image_are_dark_and_say_nothing_about_white(tmp_path, photometric, limit, transfer_syntax):
    """White of 16-bit files without a stated number of bits is that of their brightest voxel."""
    image = with_12_bits()
    image[:, :2] = 0
    stored = 4095 - image if photometric == "MONOCHROME1" else image.copy()
    stored[:, 0], stored[:, 1] = 65535, limit or 65535

    def edit(dataset):
        dataset.PixelPaddingValue = 65535
        if limit:
            dataset.PixelPaddingRangeLimit = limit

    options = {"photometric": photometric, "transfer_syntax": transfer_syntax, "edit": edit}
    volume = read_volume(write_oct_dicom(tmp_path / "a", stored, SPACING_MM, **options))
    assert volume.full_scale == 4095
    np.testing.assert_array_equal(volume.voxels, image)


def with_12_bits() -> np.ndarray:
    """Values of 12 bits, 0 and 4,095 among them."""
    return np.random.default_rng(0).permutation(np.linspace(0, 4095, 3 * 40 * 36).astype(np.uint16)).reshape(3, 40, 36)


def test_pixels_in_the_upper_bits_of_their_words_are_refused(tmp_path):
    """Read as if they were in the lower ones, they would lose their highest bits."""

    def in_the_upper_bits(dataset):
        dataset.BitsStored, dataset.HighBit = 12, 15

    path = write_oct_dicom(tmp_path / "a", ramp(dtype=np.uint16), SPACING_MM, edit=in_the_upper_bits)
    assert code_of(path) == "unsupported_pixels"


def test_eight_bit_pixels_in_big_endian_words_are_not_swapped(tmp_path):
    def as_words(dataset):
        pixels = np.frombuffer(dataset.PixelData, np.uint8).reshape(-1, 2)[:, ::-1]
        dataset.PixelData = pixels.tobytes()
        dataset["PixelData"].VR = "OW"

    path = write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, transfer_syntax=uid.ExplicitVRBigEndian, edit=as_words)
    np.testing.assert_array_equal(read_volume(path).voxels, ramp())


# Spacing and order


def test_F9_spacing_is_read_from_shared_functional_groups(tmp_path):
    volume = read_volume(write_oct_dicom(tmp_path / "a.dcm", ramp(), SPACING_MM, spacing_in="shared"))
    assert volume.spacing_mm == pytest.approx(SPACING_MM)
    assert read_header(tmp_path / "a.dcm").spacing_source == "shared"


def test_F9_missing_spacing_is_refused_never_one(tmp_path):
    assert code_of(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, spacing_in="nowhere")) == "missing_spacing"
    no_z = write_oct_dicom(
        tmp_path / "b",
        ramp(),
        SPACING_MM,
        edit=lambda ds: delattr(ds.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0], "SliceThickness"),
    )
    assert code_of(no_z) == "missing_spacing"


@pytest.mark.parametrize(
    "spacing_mm",
    [
        (1, 1, 1),
        (1, 0.0039, 0.0115),
        (0.12, 3.9, 11.5),
        (0.12, 0, 0.0115),
        (0.12, -0.0039, 0.0115),
        (1e-6, 0.0039, 0.0115),
        (0.12, 0.0115, 0.9),
    ],
)
def test_F9_absurd_spacing_is_refused(tmp_path, spacing_mm):
    assert code_of(write_oct_dicom(tmp_path / "a", ramp(), spacing_mm)) == "absurd_spacing"


@pytest.mark.parametrize(
    "spacing_mm",
    [
        (0.12, 0.0039, 0.0115),
        (0.047, 0.0026, 0.0118),
        (0.035, 0.0026, 0.0137),
        (0.047, 0.00196, 0.0117),
        (0.25, 0.0039, 0.0057),
    ],
)
def test_typical_spacing_of_every_scanner_is_accepted(tmp_path, spacing_mm):
    assert read_volume(write_oct_dicom(tmp_path / "a", ramp(), spacing_mm)).spacing_mm == pytest.approx(spacing_mm)


def test_positions_overrule_a_wrong_slice_thickness_and_say_so(tmp_path):
    def spoil(dataset):
        dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SliceThickness = 0.0115

    header = read_header(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, superior_first=True, edit=spoil))
    assert header.spacing_mm == pytest.approx(SPACING_MM)
    assert header.spacing_source == "shared+positions"
    assert "slice_thickness_contradicts_positions" in header.flags


def test_nonlinear_turning_and_single_scans_are_no_raster(tmp_path):
    def nonlinear(dataset):
        for row, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            line = item(ReferenceCoordinates=[float(row), 0.0, float(row), 9.0], OphthalmicImageOrientation="NONLINEAR")
            frame.OphthalmicFrameLocationSequence = [line]

    def turning(dataset):
        for frame, a in zip(dataset.PerFrameFunctionalGroupsSequence, np.linspace(0, 0.8 * np.pi, 5), strict=True):
            turned = [float(np.cos(a)), 0, float(np.sin(a)), 0, 1, 0]
            frame.PlaneOrientationSequence = [item(ImageOrientationPatient=turned)]

    assert code_of(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, edit=nonlinear)) == "not_raster"
    path = write_oct_dicom(tmp_path / "b", ramp(), SPACING_MM, superior_first=True, edit=turning)
    assert code_of(path) == "not_raster"
    assert code_of(write_oct_dicom(tmp_path / "c", ramp(1), SPACING_MM)) == "not_raster"


def test_a_radial_name_does_not_make_a_raster_radial(tmp_path):
    path = write_oct_dicom(
        tmp_path / "triton_3d_radial.dcm", ramp(), SPACING_MM, protocol="triton_3d_radial", superior_first=True
    )
    assert read_volume(path, raster_only=False).layout == "raster" == read_volume(path).layout


def test_frames_stored_out_of_order_are_sorted_by_position(tmp_path):
    stored = [3, 0, 4, 1, 2]

    def shuffle(dataset):
        groups = dataset.PerFrameFunctionalGroupsSequence
        dataset.PerFrameFunctionalGroupsSequence = [groups[i] for i in stored]

    volume = read_volume(write_oct_dicom(tmp_path / "a", ramp()[stored], SPACING_MM, superior_first=True, edit=shuffle))
    straight = volume.superior_to_inferior().voxels
    np.testing.assert_array_equal(straight, ramp())
    assert "frames_reordered" in read_header(tmp_path / "a").flags


# Identity


@pytest.mark.parametrize(
    ("manufacturer", "model", "slug"),
    [
        ("Heidelberg Engineering", "Spectralis", "heidelberg_spectralis"),
        ("Topcon", "Maestro2", "topcon_maestro2"),
        ("TOPCON", "3D OCT-1 Maestro 2", "topcon_maestro2"),
        ("Topcon Corporation", "DRI OCT Triton", "topcon_triton"),
        ("Carl Zeiss Meditec", "CIRRUS HD-OCT 5000", "zeiss_cirrus"),
        ("Optovue, Inc.", "Avanti RTVue XR", "optovue_inc_avanti_rtvue_xr"),
        ("", "", "unknown"),
    ],
)
def test_scanner_slugs(manufacturer, model, slug):
    assert scanner_slug(manufacturer, model) == slug


def test_lateralities_that_contradict_each_other_are_unknown_and_flagged(tmp_path):
    path = write_oct_dicom(
        tmp_path / "a", ramp(), SPACING_MM, laterality="R", edit=lambda ds: setattr(ds, "ImageLaterality", "L")
    )
    header = read_header(path)
    assert header.laterality is None
    assert "laterality_conflict" in header.flags
    assert (
        "laterality_unknown" in read_header(write_oct_dicom(tmp_path / "b", ramp(), SPACING_MM, laterality=None)).flags
    )
    odd = read_header(write_oct_dicom(tmp_path / "c", ramp(), SPACING_MM, laterality="RECHTS"))
    assert odd.laterality is None and {"laterality_unknown", "laterality_not_read"} <= {*odd.flags}
    assert "laterality_not_read" not in (*header.flags, *read_header(tmp_path / "b").flags)


def test_frames_of_two_eyes_in_one_file_are_flagged(tmp_path):
    def two_eyes(dataset):
        del dataset.SharedFunctionalGroupsSequence[0].FrameAnatomySequence
        for number, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            frame.FrameAnatomySequence = [item(FrameLaterality="R" if number < 3 else "L")]
        dataset.ImageLaterality = "R"

    header = read_header(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, edit=two_eyes))
    assert header.laterality is None and "laterality_conflict" in header.flags


@pytest.mark.parametrize("character_set", [None, "ISO_IR 100", "ISO_IR 192", "ISO_IR 13"])
def test_two_participants_stay_two_whatever_character_set_is_stated(tmp_path, character_set):
    """Converters state UTF-8 for ids that they copy in Latin-1."""
    found = set()
    for name in (b"M\xfcller", b"M\xf6ller"):
        edit = (lambda ds: setattr(ds, "SpecificCharacterSet", character_set)) if character_set else None
        path = write_oct_dicom(tmp_path / "a.dcm", ramp(), SPACING_MM, participant="Mxller", edit=edit)
        path.write_bytes(path.read_bytes().replace(b"Mxller", name))
        assert read_header(path).participant == read_volume(path).participant
        found.add(read_header(path).participant)
    assert found == {"Müller", "Möller"}


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ([b"\x8aimek", b"\x8eimek"], ["Šimek", "Žimek"]),
        (["田中".encode("shift_jis"), "鈴中".encode("shift_jis")], None),
        (["M\ufffdller".encode(), "N\ufffdller".encode()], ["M\ufffdller", "N\ufffdller"]),
        ([b"a\\M\xfcller", b"a\\M\xf6ller"], ["a Müller", "a Möller"]),
    ],
    ids=["Windows", "Shift-JIS", "UTF-8", "backslash"],
)
def test_no_id_is_lost_to_its_letters(tmp_path, stored, expected):
    found = []
    for name in stored:
        place, edit = b"Q" * len(name), lambda ds: setattr(ds, "SpecificCharacterSet", "ISO_IR 192")
        path = write_oct_dicom(tmp_path / "a.dcm", ramp(), SPACING_MM, participant=place.decode(), edit=edit)
        path.write_bytes(path.read_bytes().replace(place, name))
        found.append(read_header(path).participant)
    assert None not in found and len(set(found)) == 2 and expected in (None, found)


def test_no_name_or_birth_date_leaves_the_header(tmp_path):
    header = read_header(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM))
    assert PATIENT_NAME not in repr(header) and BIRTH_DATE not in repr(header)


# Files that are wrong

COMPRESSED = [syntax for syntax in (*LOSSLESS, *LOSSY) if syntax not in NATIVE]


def set_frames(count):
    return lambda dataset: setattr(dataset, "NumberOfFrames", count)


@pytest.mark.parametrize("transfer_syntax", [*NATIVE, *COMPRESSED], ids=str)
@pytest.mark.parametrize("frames", [4, 6, 10])
def test_a_wrong_number_of_frames_is_detected(tmp_path, transfer_syntax, frames):
    for offset_table in (True, False):
        path = write_oct_dicom(
            tmp_path / "a",
            ramp(),
            SPACING_MM,
            transfer_syntax=transfer_syntax,
            offset_table=offset_table,
            edit=set_frames(frames),
        )
        assert code_of(path) == "frame_count_mismatch"


@lenient
@given(syntax=st.sampled_from([*NATIVE, *COMPRESSED]), keep=st.floats(0, 1), offset_table=st.booleans())
def test_a_file_cut_anywhere_is_never_accepted(tmp_path, syntax, keep, offset_table):
    path = write_oct_dicom(
        tmp_path / "a",
        ramp(),
        SPACING_MM,
        transfer_syntax=syntax,
        offset_table=offset_table,
        sop_instance_uid="1.2.3.4",
    )
    content = path.read_bytes()
    cut = int(keep * (len(content) - 9))  # at least the end marker and its length
    path.write_bytes(content[:cut])
    assert code_of(path) in {
        "empty_file",
        "not_dicom",
        "unreadable",
        "missing_sop_uid",
        "missing_pixel_data",
        "truncated_pixel_data",
    }


@pytest.mark.parametrize("transfer_syntax", [*NATIVE, *COMPRESSED], ids=str)
@pytest.mark.parametrize("missing", [10, 400])
def test_cut_pixel_data_is_called_truncated(tmp_path, transfer_syntax, missing):
    path = write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, transfer_syntax=transfer_syntax)
    path.write_bytes(path.read_bytes()[:-missing])
    assert code_of(path) == "truncated_pixel_data"


@pytest.mark.parametrize("transfer_syntax", [s for s in COMPRESSED if s != uid.RLELossless], ids=str)
def test_a_codestream_without_its_end_is_truncated_even_in_a_whole_file(tmp_path, transfer_syntax):
    def cut_one(dataset):
        frames = list(generate_frames(dataset.PixelData, number_of_frames=5))
        frames[2] = frames[2][: len(frames[2]) // 2]
        dataset.PixelData = encapsulate(frames)

    assert (
        code_of(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, transfer_syntax=transfer_syntax, edit=cut_one))
        == "truncated_pixel_data"
    )


@pytest.mark.parametrize("transfer_syntax", [*NATIVE, uid.RLELossless, uid.JPEG2000Lossless], ids=str)
def test_blank_volumes_are_recognised(tmp_path, transfer_syntax):
    for value in (0, 255):
        blank = np.full((5, 40, 36), value, np.uint8)
        assert (
            code_of(write_oct_dicom(tmp_path / "a", blank, SPACING_MM, transfer_syntax=transfer_syntax))
            == "blank_volume"
        )
    if transfer_syntax != uid.JPEG2000Lossless:  # bytes of one voxel differ
        gray = np.full((5, 40, 36), 0x8001, np.uint16)
        assert (
            code_of(write_oct_dicom(tmp_path / "a", gray, SPACING_MM, transfer_syntax=transfer_syntax))
            == "blank_volume"
        )
    nearly = np.zeros((5, 40, 36), np.uint8)
    nearly[4, 39, 35] = 1
    assert read_volume(write_oct_dicom(tmp_path / "b", nearly, SPACING_MM, transfer_syntax=transfer_syntax))
    assert read_header(tmp_path / "b")


def test_a_blank_scan_that_deflates_a_thousandfold_is_no_bomb(tmp_path, monkeypatch):
    """What its header declares explains it; what inflates beyond that is refused as before."""
    monkeypatch.setattr(dicom_file, "RATIO_FROM_BYTES", 2**18)
    blank = np.zeros((40, 200, 256), np.uint8)
    assert (
        code_of(write_oct_dicom(tmp_path / "a", blank, SPACING_MM, transfer_syntax=uid.DeflatedExplicitVRLittleEndian))
        == "blank_volume"
    )
    blank[39, 199, 255] = 7
    path = write_oct_dicom(tmp_path / "b", blank, SPACING_MM, transfer_syntax=uid.DeflatedExplicitVRLittleEndian)
    assert path.stat().st_size < blank.nbytes // 200, "beyond the ratio at which a file without a header is a bomb"
    np.testing.assert_array_equal(read_volume(path).voxels, blank)
    assert code_of(deflated_bomb(tmp_path / "bomb", 1)) == "decompression_bomb"


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda ds: delattr(ds, "PixelData"), "missing_pixel_data"),
        (lambda ds: setattr(ds, "PixelData", b""), "missing_pixel_data"),
        (lambda ds: delattr(ds, "SOPInstanceUID"), "missing_sop_uid"),
        (lambda ds: setattr(ds, "SOPClassUID", uid.OphthalmicPhotography8BitImageStorage), "photograph"),
        (lambda ds: setattr(ds, "SOPClassUID", "1.2.840.10008.5.1.4.1.1.77.1.5.8"), "angiography"),
        (lambda ds: setattr(ds, "SOPClassUID", "1.2.840.10008.5.1.4.1.1.66.8"), "layer_heights"),
        (lambda ds: setattr(ds, "Rows", 0), "absurd_size"),
        (lambda ds: setattr(ds, "NumberOfFrames", 2_000_000), "absurd_size"),
        (lambda ds: setattr(ds, "SamplesPerPixel", 3), "unsupported_pixels"),
        (lambda ds: setattr(ds, "PixelRepresentation", 2), "unsupported_pixels"),
        (lambda ds: setattr(ds, "BitsAllocated", 32), "unsupported_pixels"),
        (lambda ds: setattr(ds, "PhotometricInterpretation", "RGB"), "unsupported_pixels"),
    ],
)
def test_every_other_defect_has_its_code(tmp_path, edit, code):
    assert code_of(write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, edit=edit)) == code


def test_files_of_other_kinds_have_their_code(tmp_path):
    for name, content, code in (
        ("empty.dcm", b"", "empty_file"),
        ("page.dcm", b"<html>503</html>", "not_dicom"),
        ("archive.dcm", b"PK\x03\x04" + bytes(200), "not_dicom"),
        ("zeros.dcm", bytes(4000), "not_dicom"),
    ):
        (tmp_path / name).write_bytes(content)
        assert code_of(tmp_path / name) == code
    (tmp_path / "all.zip").write_bytes(b"PK\x03\x04" + bytes(200))
    for name, found in (("archive.dcm", "without the ending .zip"), ("all.zip", r"one of its files, .*all\.zip!/NAME")):
        with pytest.raises(ReadError, match=found):
            read_volume(tmp_path / name)
    assert code_of(tmp_path / "absent.dcm") == "unreadable"
    assert code_of(tmp_path) == "unreadable"


def relabel(path: Path, old: str, new: str) -> None:
    """Change the transfer syntax in the header and nothing else."""
    padded = [text.encode() + b"\0" * (len(text) % 2) for text in (old, new)]
    content = path.read_bytes()
    at = content.index(b"\x02\x00\x10\x00UI")
    length = int.from_bytes(content[at + 6 : at + 8], "little")
    group = int.from_bytes(content[140:144], "little") + len(padded[1]) - length
    content = (
        content[:140]
        + group.to_bytes(4, "little")
        + content[144 : at + 6]
        + len(padded[1]).to_bytes(2, "little")
        + padded[1]
        + content[at + 8 + length :]
    )
    path.write_bytes(content)


def test_an_unknown_transfer_syntax_has_its_code(tmp_path):
    path = write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, transfer_syntax=uid.RLELossless)
    relabel(path, uid.RLELossless, uid.MPEG2MPML)
    assert code_of(path) == "unsupported_transfer_syntax"


def test_F9_a_failed_decode_never_rewrites_the_transfer_syntax(tmp_path):
    path = write_oct_dicom(tmp_path / "a", ramp(), SPACING_MM, transfer_syntax=uid.JPEGLSLossless)
    relabel(path, uid.JPEGLSLossless, uid.JPEG2000Lossless)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(ReadError) as refused:
        read_volume(path)
    assert refused.value.code == "decode_failed"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before

    raw = write_oct_dicom(tmp_path / "b", ramp(), SPACING_MM)
    relabel(raw, uid.ExplicitVRLittleEndian, uid.JPEG2000Lossless)
    assert code_of(raw) == "decode_failed"


@functools.cache
def bytes_in(syntax: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        write_oct_dicom(
            path, ramp(), SPACING_MM, transfer_syntax=syntax, superior_first=True, sop_instance_uid="1.2.3.4"
        )
        return path.read_bytes()


@settings(parent=lenient, max_examples=examples(200))
@given(data=st.data())
def test_F9_mutated_bytes_are_read_or_refused_with_a_code(tmp_path, data):
    """Only syntaxes that Python decodes: native decoders may kill the process, which prepare survives by using
    others."""
    path, syntax = tmp_path / "a", data.draw(st.sampled_from([*NATIVE, uid.RLELossless]))
    content = bytearray(bytes_in(syntax))
    header = min(len(content), 2500)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.one_of(st.integers(0, header - 1), st.integers(0, len(content) - 1)))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        at, size = data.draw(st.integers(0, header - 1)), data.draw(st.integers(1, 40))
        del content[at : at + size]
    path.write_bytes(content)
    for read in (read_header, read_volume):
        try:
            found = read(path)
        except ReadError as error:
            assert error.code in REASONS
        else:
            assert min(found.shape) > 0 and all(mm > 0 for mm in found.spacing_mm)
