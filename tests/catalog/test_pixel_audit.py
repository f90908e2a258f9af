"""What only pixels tell: copies under other identities never reach two splits, and an eye on the wrong side is
noticed, never changed."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import uid

from octfm.catalog.catalog import Catalog
from octfm.catalog.participants.pseudonyms import pseudonymise
from octfm.catalog.scan import scan
from octfm.display import readable
from octfm.phantom import DIAGNOSES, SCANNERS, phantom_volume
from octfm.report.data_health import write_data_health
from octfm.store.prepare import prepare
from octfm.volume.laterality import CANNOT_TELL, LEAST_REACH_MM, NEEDS, DiscSide, disc_side
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Lines, Volume
from support import ROOT
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.store_samples import SMALL, acquisition, catalog, read_sample

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
    assert files[0].uri in copy.sentence and "eye L instead of R" in copy.sentence


def test_F16_voxels_of_two_participants_are_named_and_never_in_two_splits(tmp_path):
    files = [acquisition(n) for n in range(8)]
    assert (files[0].split, files[6].split) == ("train", "test")
    read = same_as({"6": "0"})
    store = run(files, tmp_path / "a", read)
    (copy,) = store.unprepared()
    assert copy.code == "pixels_of_two_participants"
    assert all(word in copy.sentence for word in (files[0].uri, files[6].uri, "P000", "P003"))
    assert [row.uri for row in store.rows if row.found] == [files[0].uri]
    # Their study groups differ.
    assert store.rows[0].found == ("copy_contradicts", "pixels_of_two_participants")
    assert len({row.pixels for row in store.rows}) == len(store) == 7

    # Found again by a later call, and in any order of files.
    before = (tmp_path / "a" / "rows.jsonl").read_bytes()
    assert run(files, tmp_path / "a", read).unprepared() == (copy,)
    assert (tmp_path / "a" / "rows.jsonl").read_bytes() == before
    # Kept by a row that is prepared again, also where the copy is not there or comes first.
    for others in (files[1:6], files[:0:-1]):
        (tmp_path / "a" / "voxels" / "c.0.0.0.0").unlink()
        run([*others, files[0]], tmp_path / "a", read)
        assert (tmp_path / "a" / "rows.jsonl").read_bytes() == before
    grown = run(files[:3], tmp_path / "b", read)
    assert not grown.unprepared()
    assert run(files, tmp_path / "b", read).unprepared() == (copy,)


def test_a_copy_under_another_spelling_of_the_id_is_a_copy_of_one_person(tmp_path):
    files = [acquisition(n) for n in range(4)]
    same = {"laterality": files[0].laterality, "participant_labels": files[0].participant_labels}
    files[2] = replace(files[2], participant="p-0", **same)
    (copy,) = run(files, tmp_path / "a", same_as({"2": "0"})).unprepared()
    assert copy.code == "duplicate_pixels" and "remove the copy" in copy.sentence
    files[2] = replace(files[2], laterality={"R": "L", "L": "R"}[files[0].laterality])
    (copy,) = run(files, tmp_path / "b", same_as({"2": "0"})).unprepared()
    assert re.search("with eye [RL] instead of [RL]; find out which is right", copy.sentence), "it may be the copy"
    files[2] = replace(files[2], laterality=None, participant_labels={"label": "DME"})
    files[0] = replace(files[0], participant_labels={"label": "AMD"})
    (copy,) = run(files, tmp_path / "c", same_as({"2": "0"})).unprepared()
    assert "with label DME instead of AMD; find out which is right" in copy.sentence


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_which_eye_a_scan_is_of_does_not_depend_on_the_name_of_its_copy_under_another_uid(tmp_path, names):
    rng = np.random.default_rng(0)
    for number in range(4):
        write_oct_dicom(
            tmp_path / f"{number}.dcm", rng.integers(0, 255, (3, 32, 24), np.uint8), (0.1, 0.004, 0.01),
            participant=f"200{number}",
        )  # fmt: skip
    voxels = rng.integers(0, 255, (3, 32, 24), np.uint8)
    for name, eye in zip(names, "RL", strict=True):
        write_oct_dicom(tmp_path / f"{name}.dcm", voxels, (0.1, 0.004, 0.01), laterality=eye)
    found = scan(tmp_path, workers=0, pixels=True, keep_upside_down=True)
    (kept,), (copy,) = [a for a in found if a.participant == "1001"], found.rejects
    assert kept.laterality is None and "laterality_conflict" in kept.flags
    assert copy.code == "duplicate_pixels" and "find out which is right" in copy.sentence


def test_a_cohort_exported_under_two_ids_does_not_rewrite_all_rows_for_each_copy(tmp_path, monkeypatch):
    """With 10,000 copies of 10,000 volumes that would be a hundred gigabytes."""
    from octfm.store.writer import StoreWriter

    rewritten, rewrite = [], StoreWriter.rewrite
    monkeypatch.setattr(StoreWriter, "rewrite", lambda self, rows: (rewritten.append(1), rewrite(self, rows)))
    files, read = [acquisition(n) for n in range(12)], same_as({str(n + 6): str(n) for n in range(6)})
    store = run(files, tmp_path / "a", read)
    assert len(store) == len(store.unprepared()) == 6 and all(row.found for row in store.rows)
    assert len(rewritten) == 1
    run(files, tmp_path / "a", read)
    assert len(rewritten) == 1


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


def disc_of(volume: Volume) -> DiscSide:
    return disc_side(volume.voxels, volume.spacing_mm, find_tissue(volume.voxels, volume.spacing_mm))


def side(volume: Volume) -> str:
    return disc_of(volume).side


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
    noise = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
    narrow = volume.voxels[:, :, 50:78].copy()
    found = [disc_of(replace(volume, voxels=voxels)) for voxels in (symmetric, noise, narrow)]
    assert [disc.side for disc in found] == ["unclear"] * 3
    assert [disc.why_unclear for disc in found] == ["disc_sides_alike", "disc_band_unsure", "disc_field_too_narrow"]


def test_bscans_that_do_not_run_from_left_to_right_show_no_side():
    volume = phantom_volume(1, size=(16, 256, 192))[0].superior_to_inferior()
    (depth, _, width), (dz, dy, dx) = volume.shape, volume.spacing_mm
    near = np.stack([np.zeros(depth), dz * np.arange(depth)], axis=1)
    lines = Lines(near, np.add(near, (dx * (width - 1), 0)))
    turned = Lines(lines.start[:, ::-1], lines.end[:, ::-1]), Lines(lines.end, lines.start)
    preprocessing = Preprocessing(image_size=(16, 64, 64), target_spacing=(dz, 4 * dy, 3 * dx))
    found = [preprocessing(replace(volume, lines=each)).disc for each in (None, lines, *turned)]
    assert found == ["right", "right", "unclear", "unclear"]


@pytest.fixture(scope="module")
def wide():
    volume = phantom(12, scanner="zeiss_cirrus", laterality="R")
    return volume, find_tissue(volume.voxels, volume.spacing_mm)


@settings(max_examples=60)
@given(data=st.data())
def test_any_cut_of_a_field_has_a_side_or_a_reason(wide, data):
    """Wherever the field ends: the true side, or a flag that says why not, and too narrow exactly where there is too
    little."""
    volume, tissue = wide
    width, dx = volume.shape[2], volume.spacing_mm[2]
    first = data.draw(st.integers(0, width - 8))
    last = data.draw(st.integers(first + 8, width))
    confident = data.draw(st.booleans())
    fovea = (tissue.fovea[0], tissue.fovea[1] - first)
    fovea = fovea if 0 <= fovea[1] < last - first else None
    shown = replace(
        tissue, ilm=tissue.ilm[:, first:last], bm=tissue.bm[:, first:last], fovea=fovea, confident=confident
    )
    found = disc_side(volume.voxels[:, :, first:last], volume.spacing_mm, shown)
    middle = fovea[1] if fovea else (last - first - 1) / 2
    reach = min(middle, last - first - 1 - middle) * dx
    assert (found.side == "unclear") == (found.why_unclear in CANNOT_TELL) and bool(found.why_unclear) == (
        found.side == "unclear"
    )
    for eye in ("R", "L", None):
        flags = found.flags(eye)
        assert len(flags) == (0 if found.side == {"R": "right", "L": "left"}.get(eye) else 1)
        assert found.side != "unclear" or flags == (found.why_unclear,)
    if reach < LEAST_REACH_MM:
        assert found.why_unclear == "disc_field_too_narrow" or not confident
    else:
        assert (found.why_unclear == "disc_band_unsure") == (not confident)
        assert found.why_unclear != "disc_field_too_narrow"
    if (last - first - 1) * dx < 2 * LEAST_REACH_MM:
        assert found.why_unclear == "disc_field_too_narrow"
    if fovea and confident and reach >= 2.5:
        assert found.side == "right"


@pytest.fixture(scope="module")
def half_seen(tmp_path_factory):
    """Right eyes, all tagged as left ones: a field of 6 mm, one of 3 mm of the same scanner, and noise of another
    scanner."""
    root = tmp_path_factory.mktemp("half_seen")
    eye = phantom(12, scanner="zeiss_cirrus", laterality="R")
    noise = np.random.default_rng(0).integers(0, 255, (8, 64, 96), dtype=np.uint8)
    cirrus = {"laterality": "L", "superior_first": True, "manufacturer": "Carl Zeiss Meditec", "model": "CIRRUS HD-OCT"}
    write_oct_dicom(root / "a.dcm", eye.voxels, eye.spacing_mm, participant="1", **cirrus)
    write_oct_dicom(root / "b.dcm", eye.voxels[:, :, 32:96].copy(), eye.spacing_mm, participant="2", **cirrus)
    write_oct_dicom(root / "c.dcm", noise, (0.5, 0.01, 0.06), participant="3", laterality="L", superior_first=True)
    return root


def test_a_scan_says_of_which_eyes_pixels_cannot_tell(half_seen, tmp_path):
    words = ["scan", str(half_seen), "--out", str(tmp_path / "a"), "--pixels", "--workers", "1", "--no-images"]
    done = invoke(*words, "--keep-upside-down")
    assert done.exit_code == 0, done.output
    lines = [line.strip() for line in done.stdout.splitlines()]
    cirrus = next(line for line in lines if line.startswith("side of the optic disc, zeiss"))
    assert cirrus.endswith(
        ": checked 2, agrees 0, contradicts 1, only anatomy tells 0, cannot tell 1 (field too narrow 1)"
    )
    other = next(line for line in lines if line.startswith("side of the optic disc, heidelberg_spectralis"))
    assert other.endswith("checked 1, agrees 0, contradicts 0, only anatomy tells 0, cannot tell 1 (band unsure 1)")
    assert any("a wrong eye label goes unnoticed" in line and line.endswith(NEEDS) for line in lines)

    catalog = Catalog.load(tmp_path / "a")
    flags = {a.uri.rpartition("/")[2]: a.flags for a in catalog.acquisitions}
    assert "disc_field_too_narrow" in flags["b.dcm"] and "disc_band_unsure" in flags["c.dcm"]
    scanner = cirrus.removeprefix("side of the optic disc, ").partition(":")[0]
    assert catalog.pixels and catalog.summary()["disc_sides"][scanner]["cannot tell"] == 1
    assert pseudonymise(catalog, b"k" * 32).summary()["disc_sides"][scanner]["cannot tell"] == 1
    page = (tmp_path / "a" / "data_health.html").read_text()
    assert f"The check needs {NEEDS}." in page
    assert (
        f"<tr><td>{readable(scanner)}</td>" + "".join(f'<td class="n">{n}</td>' for n in (2, 0, 1, 0, 1, 1, 0, 0))
        in page
    )

    plain = scan(half_seen, workers=0)
    assert not plain.pixels and "disc_sides" not in plain.summary()
    guide = " ".join((ROOT / "docs" / "guide" / "data-dicom.md").read_text().split())
    assert f"at least {LEAST_REACH_MM} mm of retina on both sides of the fovea" in guide
    assert f"narrower than {2 * LEAST_REACH_MM} mm" in guide


@pytest.mark.slow
def test_the_audit_of_laterality_hardly_ever_errs():
    """Fresh eyes of every scanner and diagnosis; the rates are in docs/log."""
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
    """Six phantoms of three people: 1 well tagged, 1 tagged as the other eye, 1 without a tag, 2 copies in another
    compression."""
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


def test_a_pixel_audit_finds_copies_and_wrong_sides_and_changes_nothing(clinic):
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
        "b_wrong.dcm": ["pixels_of_two_participants", "laterality_contradicts_anatomy"],
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
    html = write_data_health(catalog, tmp_path / "health.html").read_text()
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
