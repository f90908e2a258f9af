"""What only pixels tell: copies under other identities never reach two splits, and an eye on the wrong side is noticed, never changed."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pydicom import uid

from dicom_files import write_oct_dicom
from octfm.data.catalog import scan
from octfm.data.laterality import disc_side
from octfm.data.phantom import DIAGNOSES, SCANNERS, phantom_volume
from octfm.data.pixel_copies import fingerprint
from octfm.data.prepare import prepare
from octfm.data.preprocessing import Preprocessing
from octfm.data.tissue import find_tissue
from octfm.data.volume import Volume
from octfm.report.data_health import write_data_health
from store_samples import SMALL, acquisition, catalog, read_sample

SIZE = (20, 192, 128)
ROUGH = Preprocessing(image_size=(16, 96, 64), target_spacing=(0.4, 0.02, 0.1))


def same_as(other: dict[str, str]):
    """Reads the voxels of another sample for some."""

    def read(location: str) -> Volume:
        number = location.split(":")[1]
        return replace(read_sample(f"sample:{other.get(number, number)}:reads"), source=location)

    return read


def run(files, out, read):
    return prepare(catalog(files), out, SMALL, workers=0, progress=False, read=read)


def test_a_copy_under_another_uid_is_not_prepared_twice(tmp_path):
    files = [acquisition(n) for n in range(6)]
    store = run(files, tmp_path / "a", same_as({"1": "0"}))  # both eyes of P000
    assert len(store) == 5
    (copy,) = store.unprepared()
    assert (copy.acquisition, copy.code) == ("1.2.3.1", "duplicate_pixels")
    assert files[0].uri in copy.sentence and "eye R and as L" in copy.sentence


def test_F16_voxels_of_two_participants_are_named_and_never_in_two_splits(tmp_path):
    files = [acquisition(n) for n in range(8)]
    assert (files[0].split, files[6].split) == ("train", "test")
    read = same_as({"6": "0"})
    store = run(files, tmp_path / "a", read)
    (copy,) = store.unprepared()
    assert copy.code == "pixels_of_two_participants"
    assert all(word in copy.sentence for word in (files[0].uri, files[6].uri, "P000", "P003"))
    assert [row.uri for row in store.rows if row.found] == [files[0].uri]
    assert store.rows[0].found == ("pixels_of_two_participants",)
    assert len({row.pixels for row in store.rows}) == len(store) == 7

    # Found again by a later call, and in any order of files.
    before = (tmp_path / "a" / "rows.jsonl").read_bytes()
    assert run(files, tmp_path / "a", read).unprepared() == (copy,)
    assert (tmp_path / "a" / "rows.jsonl").read_bytes() == before
    grown = run(files[:3], tmp_path / "b", read)
    assert not grown.unprepared()
    assert run(files, tmp_path / "b", read).unprepared() == (copy,)


def test_stores_from_before_fingerprints_are_read(tmp_path):
    import json

    run([acquisition(n) for n in range(2)], tmp_path / "a", read_sample)
    rows = tmp_path / "a" / "rows.jsonl"
    old = [
        {k: v for k, v in json.loads(line).items() if k not in ("pixels", "found", "digest")}
        for line in rows.read_text().splitlines()
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in old))
    store = run([acquisition(n) for n in range(3)], tmp_path / "a", read_sample)
    assert len(store) == 3 and store.rows[0].pixels == "" and store.rows[2].pixels


def test_a_fingerprint_depends_on_voxels_shape_and_type_alone():
    rng = np.random.default_rng(0)
    voxels = rng.integers(0, 255, (4, 6, 8), dtype=np.uint8)
    assert fingerprint(voxels) == fingerprint(np.asfortranarray(voxels)) == fingerprint(voxels[::-1][::-1])
    others = [voxels[::-1], voxels.reshape(4, 8, 6), voxels.astype(np.uint16), voxels + np.eye(6, 8, dtype=np.uint8)]
    assert len({fingerprint(other) for other in [voxels, *others]}) == 5


def phantom(seed: int, **options) -> Volume:
    return phantom_volume(seed, size=SIZE, **options)[0].superior_to_inferior()


def side(volume: Volume) -> str:
    return disc_side(volume.voxels, volume.spacing_mm, find_tissue(volume.voxels, volume.spacing_mm)).side


@pytest.mark.parametrize("scanner", SCANNERS)
@pytest.mark.parametrize("laterality", ["R", "L"])
def test_the_side_of_the_disc_is_told_on_every_scanner(scanner, laterality):
    found = [side(phantom(seed, scanner=scanner, laterality=laterality)) for seed in (1, 2)]
    expected = "right" if laterality == "R" else "left"
    assert set(found) <= {expected, "unclear"} and expected in found


def test_an_image_without_a_side_gives_no_verdict():
    volume = phantom(3)
    symmetric = volume.voxels.copy()
    symmetric[:, :, SIZE[2] // 2 :] = symmetric[:, :, : SIZE[2] // 2][:, :, ::-1]
    assert side(replace(volume, voxels=symmetric)) == "unclear"
    assert side(replace(volume, voxels=np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8))) == "unclear"
    narrow = replace(volume, voxels=volume.voxels[:, :, 50:78].copy())
    assert side(narrow) == "unclear"


@pytest.mark.slow
def test_the_audit_of_laterality_hardly_ever_errs():
    """Fresh eyes of every scanner and diagnosis; the rates are in docs/LOG.md."""
    verdicts: dict[str, Counter] = {}
    for seed in range(2000, 2140):
        scanner, laterality, diagnosis = list(SCANNERS)[seed % 5], "RL"[seed // 35 % 2], list(DIAGNOSES)[seed // 5 % 7]
        eye = phantom(
            seed, scanner=scanner, laterality=laterality, diagnosis=diagnosis, severity=0.3 + seed * 7 % 10 / 16
        )
        found = side(eye)
        verdict = (
            "unclear"
            if found == "unclear"
            else "agrees"
            if (found == "right") == (laterality == "R")
            else "contradicts"
        )
        verdicts.setdefault(scanner, Counter())[verdict] += 1
    print(verdicts)
    total = sum(verdicts.values(), Counter())
    assert total["contradicts"] == 0 and total["agrees"] >= 0.9 * total.total()


def test_the_real_eye_has_its_disc_on_the_right(real_data):
    """Vessels of its en face image converge to the right, so it is a right eye: no alarm as R, an alarm as L."""
    voxels = np.load(real_data / "medvisbonn_amd_spectralis_145.npz")["volume"][::3]
    found = disc_side(voxels, (0.09, 0.003872, 0.011182), find_tissue(voxels, (0.09, 0.003872, 0.011182)))
    assert not found.contradicts("R") and found.contradicts("L") and not found.contradicts(None)


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """Six phantoms of three people: 1 well tagged, 1 tagged as the other eye, 1 without a tag, 2 copies in another compression."""
    root = tmp_path_factory.mktemp("clinic")

    def write(name, volume, participant, laterality, **options):
        write_oct_dicom(
            root / name,
            volume.voxels,
            volume.spacing_mm,
            participant=participant,
            laterality=laterality,
            superior_first=True,
            **options,
        )

    eyes = [phantom(n, scanner="zeiss_cirrus", laterality="R") for n in (11, 12, 13)]
    write("a_right.dcm", eyes[0], "1001", "R")
    write("b_wrong.dcm", eyes[1], "1002", "L")
    write("c_unknown.dcm", eyes[2], "1003", None)
    write("d_copy.dcm", eyes[0], "1001", "R", transfer_syntax=uid.JPEGLSLossless)
    write("e_leak.dcm", eyes[1], "1003", "L", transfer_syntax=uid.RLELossless)
    return root


def test_a_scan_that_looks_at_pixels_finds_copies_and_wrong_sides_and_changes_nothing(clinic):
    plain, looked = scan(clinic, workers=0), scan(clinic, pixels=True, workers=0)
    assert len(plain.acquisitions) == 5 and not plain.rejects
    name = {row.uri.rpartition("/")[2]: row for row in looked.acquisitions}
    assert {reject.uri.rpartition("/")[2]: reject.code for reject in looked.rejects} == {
        "d_copy.dcm": "duplicate_pixels",
        "e_leak.dcm": "pixels_of_two_participants",
    }
    assert {
        key: [f for f in row.flags if f.startswith(("laterality_con", "disc", "pixels"))] for key, row in name.items()
    } == {
        "a_right.dcm": [],
        "b_wrong.dcm": ["laterality_contradicts_anatomy", "pixels_of_two_participants"],
        "c_unknown.dcm": ["disc_on_the_right"],
    }
    assert [name[key].laterality for key in sorted(name)] == ["R", "L", None]
    before = {row.uri: row for row in plain.acquisitions}
    assert all(
        replace(row, flags=(), split=None) == replace(before[row.uri], flags=(), split=None)
        for row in looked.acquisitions
    )
    splits = {}
    for row in looked.acquisitions:
        assert splits.setdefault(row.participant, row.split) == row.split


def test_the_audit_shows_the_eye_on_the_wrong_side(clinic, tmp_path):
    catalog = scan(clinic, pixels=True, workers=0)
    html = write_data_health(catalog, tmp_path / "health.html", looked=True).read_text()
    table = html[html.index('id="laterality"') : html.index('id="geometry"')]
    rows = [part.split("</tr>")[0] for part in table.split("<tr>") if "data:image" in part]
    assert len(rows) == 2 and "<td>left</td><td>right</td>" in rows[0] and "<td>nothing</td><td>right</td>" in rows[1]
    assert all(row.count("<img ") == 2 for row in rows)


def test_prepare_finds_the_same_in_the_pixels_it_reads_anyway(clinic, tmp_path):
    store = prepare(scan(clinic, workers=0), tmp_path / "store", ROUGH, workers=0, progress=False)
    assert {row.uri.rpartition("/")[2]: row.found for row in store.rows} == {
        "a_right.dcm": (),
        "b_wrong.dcm": ("laterality_contradicts_anatomy", "pixels_of_two_participants"),
        "c_unknown.dcm": (),
    }
    assert sorted(u.code for u in store.unprepared()) == ["duplicate_pixels", "pixels_of_two_participants"]
    assert store.summary()["found"]["laterality_contradicts_anatomy"] == 1
    assert [row.laterality for row in store.rows] == ["R", "L", None]
