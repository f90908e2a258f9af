"""A sidecar that is broken or mistyped is an error that names file, line and key: never as good as none."""

import json
import re
import string
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.catalog import NothingAccepted
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_surfaces, read_volume
from octfm.formats.declared import KEYS, read_declared
from octfm.layers.table import state_of
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.vendor_files import (
    SPACING_MM,
    e2e_codes,
    ends_of,
    write_e2e,
    write_images,
    write_nifti,
    write_npy,
    write_tiff,
    write_vol,
)
from support.volumes import telling_voxels

many = settings(max_examples=examples(60))
GOOD = {
    "spacing_mm": [0.12, 0.0039, 0.0115],
    "laterality": "OS",
    "participant": "p1",
    "scanner": "cirrus",
    "protocol": "macula",
    "modality": "octa",
    "axes": "DHW",
    "bits": 12,
    "superior_first": True,
    "bscan_lines_mm": [[1.5, 2, 7.5, 2], [1.5, 2.1, 7.5, 2.1]],
    "upside_down": False,
}


def refused(folder, content: str | bytes) -> str:
    (folder / "a.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ReadError) as caught:
        read_declared(str(folder / "a.npy"))
    message = str(caught.value)
    assert (
        caught.value.code == "contradicting_declaration" and str(folder / "a.json") in message and "\n" not in message
    )
    return message


def line_of(facts: dict, key: str) -> str:
    return f": line {2 + list(facts).index(key)}: "


def test_every_key_is_read(tmp_path):
    assert set(GOOD) == set(KEYS)
    for encoding in ("utf-8", "utf-8-sig", "utf-16"):
        (tmp_path / "a.json").write_text(json.dumps(GOOD), encoding=encoding)
        found = read_declared(str(tmp_path / "a.npy"))
        assert {key: getattr(found, key) for key in GOOD} == GOOD | {
            "spacing_mm": (0.12, 0.0039, 0.0115),
            "bscan_lines_mm": ((1.5, 2, 7.5, 2), (1.5, 2.1, 7.5, 2.1)),
        }


@many
@given(
    key=st.sampled_from(sorted(KEYS)),
    at=st.integers(0, 30),
    letter=st.sampled_from(string.ascii_lowercase),
    edit=st.integers(0, 4),
)
def test_a_mistyped_key_names_the_nearest(tmp_path, key, at, letter, edit):
    at %= len(key) - 1
    wrong = (
        key[:at] + key[at + 1 :],
        key[:at] + letter + key[at:],
        key[:at] + key[at + 1] + key[at] + key[at + 2 :],
        key.upper(),
        key.replace("_", "-") + " ",
    )[edit]
    if wrong in KEYS:
        return
    facts = {"note": "line 2", wrong: GOOD[key], "source": 1}
    message = refused(tmp_path, json.dumps(facts, indent=1))
    assert line_of(facts, wrong) in message and f"did you mean {key}?" in message and KEYS[key] in message


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("spacing", "spacing_mm"),
        ("voxel_size", "spacing_mm"),
        ("eye", "laterality"),
        ("patient_id", "participant"),
        ("flipped", "upside_down"),
    ],
)
def test_other_words_for_a_key_are_not_ignored(tmp_path, word, key):
    assert f"did you mean {key}?" in refused(tmp_path, json.dumps({word: GOOD[key]}))


@pytest.mark.parametrize(
    "facts",
    [
        {"spacing_mm": [0.1, 0.004, 0.01], "age": float("nan")},
        {"spacing_mm": [0.1, 0.004, 0.01], "laterality": "N/A"},
        {"spacing_mm": [0.1, 0.004, 0.01], "scan": 3, "lateral": 512},
    ],
)
def test_what_other_programs_write_beside_the_millimetres_is_left_alone(tmp_path, facts):
    (tmp_path / "a.json").write_text(json.dumps(facts))
    assert read_declared(str(tmp_path / "a.npy")).spacing_mm == (0.1, 0.004, 0.01)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@many
@given(key=st.sampled_from(sorted(KEYS)), value=anything)
def test_no_value_is_read_as_something_else(tmp_path, key, value):
    """It is taken as it stands, or refused with file, line and what is allowed."""
    facts = {"note": 0, key: value}
    (tmp_path / "a.json").write_text(json.dumps(facts, indent=1))
    try:
        found = getattr(read_declared(str(tmp_path / "a.npy")), key)
    except ReadError as error:
        assert str(tmp_path / "a.json") in str(error) and ": line " in str(error) and value is not None
        return
    plain = {"spacing_mm": lambda v: tuple(map(float, v)), "axes": str.upper, "participant": lambda v: str(v).strip(),
             "bscan_lines_mm": lambda v: tuple(map(tuple, v))}  # fmt: skip
    assert value is None or found == plain.get(key, lambda v: v.strip() if isinstance(v, str) else v)(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{\n "laterality": "links"}', "line 2: laterality is 'links'; expected one of R, L, OD"),
        ('{"spacing_mm": [0.1, 0.1]}', "line 1: spacing_mm is [0.1, 0.1]; expected [dz, dy, dx]"),
        ('{"spacing_mm": "123"}', "expected [dz, dy, dx]"),
        ('{"spacing_mm": [true, 0.01, 0.01]}', "expected [dz, dy, dx]"),
        ('{"spacing_mm": [0.1, NaN, 0.1]}', "line 1: spacing_mm is [0.1, nan, 0.1]"),
        ('{"spacing_mm": [1e999, 0.01, 0.1]}', "expected [dz, dy, dx]"),
        ('{"laterality": "R",\n"laterality": "L"}', "line 2: 'laterality' occurs twice"),
        ("spacing_mm: [0.1, 0.1, 0.1]\nlaterality: OD", "line 1, column 1: not JSON"),
        ('{"laterality": "R",\n "axes": "DHW"\n]', "line 3, column 1: not JSON"),
        ("{'laterality': 'R'}", "not JSON"),
        ('{"laterality": "R"', "not JSON"),
        ("", "not JSON"),
        ("[0.12, 0.0039, 0.0115]", "expected an object"),
        ("[" * 100_000, "not readable as JSON"),
        ('{"spacing_mm": [' + "1" * 5000 + ", 1, 1]}", "not readable as JSON"),
        ('{"laterality": "R",\n "protocol": "für"}'.encode("latin-1"), "line 2: not UTF-8"),
        ('{"upside_down": "true"}', "expected true or false, without quotes"),
        ('{"bits": 4}', "from 8 to 16"),
        ('{"modality": "fundus"}', "line 1: modality is 'fundus'; expected one of structure, oct, octa"),
        ('{"participant": "p\\ud800"}', "participant is not an id"),
        ('{"participant": "p\\n1"}', "participant is not an id"),
        ('{"spacing_mm": [0.1, 0.01, 0.1], "spacing_mm_zyx": [0.2, 0.01, 0.1]}', "differ"),
    ],
)
def test_a_broken_sidecar_names_file_line_and_what_is_allowed(tmp_path, content, says):
    assert says in refused(tmp_path, content)


def test_sidecars_of_other_programs_are_left_alone_and_flagged(tmp_path, real_data):
    uri = write_npy(tmp_path / "a.npz", telling_voxels(), spacing_mm=SPACING_MM)
    bids = {
        "Modality": "OPT",
        "Manufacturer": "Topcon",
        "PatientID": "x",
        "SliceThickness": 0.1,
        "shapes": [{"spacing": 1}],
    }
    for content in (json.dumps(bids), json.dumps({"imageData": "A" * 2**20})):
        (tmp_path / "a.json").write_text(content)
        header = read_header(uri)
        assert header.spacing_mm == SPACING_MM and "sidecar_states_nothing" in header.flags
    assert read_declared(str(real_data / "medvisbonn_amd_spectralis_145.npz")).spacing_mm == (0.03, 0.003872, 0.011182)


def test_a_sidecar_that_cannot_be_opened_is_not_as_good_as_none(tmp_path):
    uri = write_npy(tmp_path / "a.npz", telling_voxels(), spacing_mm=SPACING_MM)
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ReadError, match=r"a\.json: cannot be read"):
        read_header(uri)


@pytest.mark.parametrize("name", ["山田\u3000太郎", "Anna\u00a0Meyer", "علی\u200cرضا"])
def test_a_participant_may_have_the_spaces_of_any_script(tmp_path, name):
    """str.isprintable takes the blank for the only space."""
    assert read_header(write_images(tmp_path / "visit", telling_voxels(), participant=name)).participant == name


def test_a_scan_that_is_declared_upside_down_is_flipped(tmp_path):
    folder = write_images(tmp_path / "visit", telling_voxels()[:, ::-1], upside_down=True)
    np.testing.assert_array_equal(read_volume(folder).voxels, telling_voxels())
    assert "declared_upside_down" in read_header(folder).flags
    kept = write_images(tmp_path / "kept", telling_voxels(), upside_down=False)
    np.testing.assert_array_equal(read_volume(kept).voxels, telling_voxels())
    assert "declared_upright" in read_header(kept).flags


def test_the_way_up_of_a_dicom_may_be_declared_as_windows_writes_it(tmp_path):
    uri = write_oct_dicom(tmp_path / "a.dcm", telling_voxels()[:, ::-1], SPACING_MM)
    (tmp_path / "a.json").write_text('{"upside_down": true}', encoding="utf-16")
    np.testing.assert_array_equal(read_volume(uri).voxels, telling_voxels())


def test_a_dicom_takes_from_its_sidecar_what_its_header_lacks(tmp_path):
    """Alone and in a scan; the header's own statements are believed, and contradictions are flagged."""

    def read(name, header, **stated):
        (tmp_path / name).mkdir()
        uri = write_oct_dicom(tmp_path / name / "a.dcm", telling_voxels(), SPACING_MM, **header)
        uri.with_suffix(".json").write_text(json.dumps(stated))
        (row,) = scan(uri.parent, workers=0).acquisitions
        alone, volume = read_header(uri), read_volume(uri)
        assert row.laterality == alone.laterality == volume.laterality
        assert row.participant == alone.participant == volume.participant and set(alone.flags) <= set(row.flags)
        assert row.scanner == alone.scanner == volume.scanner
        return row

    nameless = {"laterality": None, "participant": None, "manufacturer": "", "model": ""}
    row = read("lacks", nameless, laterality="OS", participant="p7", scanner="Maestro 2", upside_down=False)
    assert (row.laterality, row.participant, row.scanner) == ("L", "p7", "maestro_2")
    assert "declared_upright" in row.flags and "laterality_unknown" not in row.flags
    row = read("agrees", {}, laterality="right", participant="p7", spacing_mm=SPACING_MM)
    assert (row.laterality, row.participant, row.flags) == ("R", "1001", ())
    row = read("differs", {}, laterality="L", spacing_mm=[0.24, *SPACING_MM[1:]], axes="DHW")
    assert row.laterality is None and row.spacing_mm == SPACING_MM
    assert {"laterality_conflict", "spacing_conflict", "sidecar_key_unused"} <= set(row.flags)


def test_a_dicom_is_as_bright_as_the_bits_of_its_sidecar_say(tmp_path):
    uri = write_oct_dicom(tmp_path / "a.dcm", telling_voxels().astype(np.uint16), SPACING_MM)
    assert read_volume(uri).full_scale < 4095 and "bits_from_values" in read_header(uri).flags
    uri.with_suffix(".json").write_text('{"bits": 12}')
    assert read_volume(uri).full_scale == 4095 and "bits_from_values" not in read_header(uri).flags


def test_a_mistyped_sidecar_of_a_dicom_is_refused_and_that_of_another_program_ignored(tmp_path):
    uri = write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), SPACING_MM)
    uri.with_suffix(".json").write_text('{"device": "x", "patient": "y", "nested": {"laterality": "L"}}')
    assert read_header(uri).flags == () and read_volume(uri).laterality == "R"
    for text in (
        '{"modality": "OPT"}',
        '[{"laterality": "L"}]',
        '"laterality"',
        '{"axis": "x", "axis": "y", "seen": ["modality"]}',
        "{laterality",
    ):
        uri.with_suffix(".json").write_text(text)
        assert read_header(uri).flags == () and read_volume(uri).laterality == "R", text
    uri.with_suffix(".json").write_text('{"laterality": "L", "spacing": [1, 1, 1]}')
    for read in (read_header, read_volume):
        with pytest.raises(ReadError, match="did you mean spacing_mm"):
            read(uri)
    assert [reject.code for reject in nothing(tmp_path).rejects] == ["contradicting_declaration"]


def nothing(folder):
    """The catalog of a folder without an acceptable file."""
    with pytest.raises(NothingAccepted) as refused:
        scan(folder, workers=0)
    return refused.value.catalog


def test_a_huge_file_of_another_program_beside_a_dicom_is_not_read(tmp_path):
    uri = write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), SPACING_MM)
    (tmp_path / "a.json").write_text(json.dumps({"upside_down": "a word", "note": "." * 2**20}))
    np.testing.assert_array_equal(read_volume(uri).voxels, telling_voxels())


def test_layers_of_a_scan_that_is_declared_upside_down_are_flipped_with_it(tmp_path):
    voxels = telling_voxels()
    layers = np.arange(2 * 12 * 36, dtype=np.float32).reshape(2, 12, 36) % 30
    uri = write_vol(tmp_path / "a.vol", voxels, ends=ends_of(12, 36), layers=layers)
    before = read_surfaces(uri).heights_px
    (tmp_path / "a.json").write_text('{"upside_down": true}')
    np.testing.assert_array_equal(read_volume(uri).voxels, voxels[:, ::-1])
    np.testing.assert_allclose(read_surfaces(uri).heights_px, voxels.shape[1] - 1 - before)


def test_the_sidecar_of_one_folder_is_not_that_of_its_numbered_neighbours(tmp_path):
    for name in ("vol", "vol.1", "vol.2"):
        write_images(tmp_path / name, telling_voxels())
    for name in ("vol", "vol.1"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"participant": name, "spacing_mm": SPACING_MM}))
    assert [read_header(tmp_path / name).participant for name in ("vol", "vol.1", "vol.2")] == ["vol", "vol.1", None]


def test_masks_of_any_format_are_no_scan(tmp_path):
    labels = telling_voxels() // 20
    places = [
        write_images(tmp_path / "masks", labels),
        write_npy(tmp_path / "mask.npz", labels),
        write_tiff(tmp_path / "mask.tif", np.where(labels > 5, 255, 0).astype(np.uint8)),
        write_nifti(tmp_path / "mask.nii", labels),
    ]
    for place in places:
        with pytest.raises(ReadError, match="masks of a segmentation") as refused:
            read_volume(place, spacing_mm=SPACING_MM)
        assert refused.value.code == "voxel_labels"


@pytest.mark.parametrize(("word", "eye"), [(b"OD", "R"), ("left", "L"), ("", None), ("right eye", "refused")])
def test_the_eye_in_an_npz_is_read_or_refused(tmp_path, word, eye):
    uri = write_npy(tmp_path / "a.npz", telling_voxels(), laterality=word, spacing_mm=SPACING_MM)
    if eye == "refused":
        with pytest.raises(ReadError, match="its laterality is 'right eye'"):
            read_header(uri)
    else:
        assert read_header(uri).laterality == eye


def folder_of_a_date(folder):
    write_images(folder / "eye.2023.05", telling_voxels())
    (folder / "eye.json").unlink()
    return folder / "eye.2023.05"


def second_of_two_series(folder):
    both = {(1, 2, number): e2e_codes(telling_voxels()) for number in (3, 4)}
    nowhere = np.zeros((len(telling_voxels()), 4))
    return f"{write_e2e(folder / 'a.e2e', both, eyes='RL', ends=nowhere)}!/series_1_2_4"


def nifti_of_known_axes(folder):
    (folder / "a.json").write_text('{"axes": "WHD"}')
    return write_nifti(folder / "a.nii.gz", telling_voxels(), (1, 1, 1))


@pytest.mark.parametrize("write", [folder_of_a_date, second_of_two_series, nifti_of_known_axes])
def test_the_sidecar_that_an_error_asks_for_is_the_one_that_is_read(tmp_path, write):
    uri = write(tmp_path)
    with pytest.raises(ReadError) as caught:
        read_volume(uri)
    assert caught.value.code == "missing_spacing"
    (name,) = re.findall(r"declare them in (\S+) beside it", str(caught.value))
    (tmp_path / name).write_text(json.dumps({"spacing_mm": SPACING_MM, "axes": "WHD"}))
    assert read_volume(uri).spacing_mm == pytest.approx(SPACING_MM)


def test_a_table_notices_the_sidecar_of_a_file_with_several_series(tmp_path):
    uri = second_of_two_series(tmp_path)
    before = state_of(uri)
    (tmp_path / "a.json").write_text(json.dumps({"spacing_mm": SPACING_MM}))
    assert before and state_of(uri) != before


def test_a_folder_whose_name_ends_with_the_mark_keeps_its_sidecars_in_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("new!/x.json", '{"laterality": "R"}')
        archive.writestr("new!/x.npy", b"")
        archive.writestr("new/y.json", "{}")
    assert read_declared(f"{tmp_path}/a.zip!/new!/x.npy").laterality == "R"


def test_a_series_without_millimetres_is_a_reject_of_this_reason(tmp_path):
    second_of_two_series(tmp_path)
    with pytest.raises(NothingAccepted) as nothing:
        scan(tmp_path, workers=0)
    assert [reject.code for reject in nothing.value.catalog.rejects] == ["missing_spacing"] * 2
