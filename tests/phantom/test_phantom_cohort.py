"""A phantom cohort on disk is what AI-READI looks like, tells the truth about itself, and does not give the
diagnosis away."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest

from octfm.errors import OctfmError, ReadError
from octfm.formats import read_volume
from octfm.formats.reasons import REASONS
from octfm.phantom import DEFAULT_SCANNERS, DIAGNOSES, LESIONS, PHANTOM_VERSION, SCANNERS, write_phantom
from octfm.phantom.cohort import draw_cohort
from octfm.phantom.defects import DEFECTS
from support.command_line import invoke

SMALL = (8, 96, 48)
TWO = ("heidelberg_spectralis", "topcon_triton")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def digest(root: Path) -> dict[str, str]:
    return {
        str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(root.rglob("*"))
        if p.is_file()
    }


def a_cohort(count: int, seed: int = 0, second_scanner: float = 0.25):
    return draw_cohort(
        count, seed, scanners=DEFAULT_SCANNERS, second_scanner=second_scanner, fractions=(0.7, 0.15, 0.15)
    )


@pytest.fixture(scope="module")
def cohort(tmp_path_factory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("phantom") / "cohort", 8, 5, size=SMALL, defects=1.0, workers=1)


def test_same_seed_same_bytes_whatever_the_number_of_workers(tmp_path):
    one, two, other = (
        digest(write_phantom(tmp_path / name, 3, seed, size=SMALL, defects=0.5, workers=workers))
        for name, seed, workers in (("one", 1, 1), ("two", 1, 2), ("other", 2, 1))
    )
    assert one == two
    assert not set(one) & set(other) - {
        "participants.tsv",
        "retinal_oct/manifest.tsv",
        *(f"ground_truth/{name}" for name in ("labels.tsv", "defects.tsv", "phantom.json")),
    }, "another seed is other people"


def test_manifest_header_reader_and_ground_truth_agree(cohort):
    manifest = {row["sop_instance_uid"]: row for row in table(cohort / "retinal_oct" / "manifest.tsv")}
    labels = table(cohort / "ground_truth" / "labels.tsv")
    assert {row["scanner"] for row in labels} == set(DEFAULT_SCANNERS)
    for label in labels:
        path = cohort / label["filepath"].lstrip("/")
        header, volume, row = pydicom.dcmread(path), read_volume(path), manifest[label["sop_instance_uid"]]
        assert header.SOPClassUID == "1.2.840.10008.5.1.4.1.1.77.1.5.4" and header.Modality == "OPT"
        assert header.PatientID == row["person_id"] == label["participant_id"] == volume.participant == path.parent.name
        assert header.ImageLaterality == row["laterality"] == label["laterality"] == volume.laterality
        assert (int(row["number_of_frames"]), int(row["height"]), int(row["width"])) == volume.shape == SMALL
        scanner = SCANNERS[label["scanner"]]
        assert volume.scanner == scanner.name and volume.superior_first == scanner.superior_first
        assert volume.spacing_mm == pytest.approx(scanner.spacing_mm(SMALL), rel=1e-5)
        assert [float(mm) for mm in row["pixel_spacing"].strip("[]").split(",")] == pytest.approx(
            volume.spacing_mm[1:], rel=1e-3
        )
        with np.load(cohort / "ground_truth" / f"{label['sop_instance_uid']}.npz") as truth:
            assert truth["lesions"].shape == SMALL and truth["surfaces"].shape[1:] == (SMALL[0], SMALL[2])
            ilm, bm = (truth["surfaces"][list(truth["surface_names"]).index(name)] for name in ("ilm", "bm"))
        inside = (np.arange(SMALL[1])[None, :, None] > ilm[:, None]) & (
            np.arange(SMALL[1])[None, :, None] < bm[:, None]
        )
        assert volume.voxels[inside].mean() > volume.voxels[~inside].mean()
        assert label["phantom_version"] == PHANTOM_VERSION


def test_version_4_scans_the_same_eyes_with_other_looks(tmp_path):
    folders = {v: write_phantom(tmp_path / v, 2, 3, size=SMALL, version=v, workers=1) for v in ("3", "4")}
    again = write_phantom(tmp_path / "again", 2, 3, size=SMALL, version="4", workers=2)
    rows = {v: table(folder / "ground_truth" / "labels.tsv") for v, folder in folders.items()}
    said = ("participant_id", "laterality", "scanner", "diagnosis", "severity", "cst_um", "age")
    assert [[r[c] for c in said] for r in rows["3"]] == [[r[c] for c in said] for r in rows["4"]]
    for three, four in zip(rows["3"], rows["4"], strict=True):
        assert (three["phantom_version"], four["phantom_version"]) == ("3", "4")
        assert three["sop_instance_uid"] != four["sop_instance_uid"]
        file = folders["4"] / four["filepath"].lstrip("/")
        assert file.read_bytes() == (again / four["filepath"].lstrip("/")).read_bytes()
        volume = read_volume(file)
        assert "phantom 4" in pydicom.dcmread(file).SoftwareVersions and volume.laterality == four["laterality"]
        with np.load(folders["4"] / "ground_truth" / f"{four['sop_instance_uid']}.npz") as truth:
            ilm, bm = (truth["surfaces"][list(truth["surface_names"]).index(name)] for name in ("ilm", "bm"))
        row = np.arange(SMALL[1])[None, :, None]
        inside = (row > ilm[:, None]) & (row < bm[:, None])
        assert volume.voxels[inside].mean() > 1.2 * volume.voxels[row + 0 * volume.voxels < ilm[:, None]].mean()
    with pytest.raises(OctfmError, match="expected version 3 or 4, got 5"):
        write_phantom(tmp_path / "5", 1, 0, version="5")


def test_every_defect_has_the_reason_code_it_was_planted_for(cohort):
    planted = table(cohort / "ground_truth" / "defects.tsv")
    assert {row["kind"] for row in planted} == {defect.kind for defect in DEFECTS} and len(DEFECTS) >= 6
    for row in planted:
        if row["kind"] in ("duplicate_sop_uid", "reused_sop_uid", "wrong_laterality"):
            continue  # wrong beside other files only: test_defects.py
        assert row["code"] in REASONS
        with pytest.raises(ReadError) as error:
            read_volume(cohort / row["filepath"].lstrip("/"))
        assert error.value.code == row["code"], row["kind"]


def test_defects_are_extra_files_so_that_nobody_is_lost(cohort):
    good = Counter((row["participant_id"], row["laterality"]) for row in table(cohort / "ground_truth" / "labels.tsv"))
    people = {row["person_id"] for row in table(cohort / "participants.tsv")}
    assert set(good) == {(person, side) for person in people for side in "RL"}
    files = {"/" + str(p.relative_to(cohort)) for p in cohort.rglob("*.dcm")}
    planted = {row["filepath"] for row in table(cohort / "ground_truth" / "defects.tsv")}
    copies = {
        row["filepath"] for row in table(cohort / "ground_truth" / "defects.tsv") if row["kind"].endswith("_sop_uid")
    }
    assert files - copies == {row["filepath"] for row in table(cohort / "retinal_oct" / "manifest.tsv")}
    assert len(planted) == len(files) - len(planted)


def test_cohort_is_balanced_split_by_participant_and_grows_unchanged():
    people = a_cohort(280)
    assert a_cohort(90) == people[:90]
    assert len({person.participant for person in people} | {p.participant for p in a_cohort(280, seed=1)}) == 560
    for key, shares in (
        ("diagnosis", {name: 0.4 if name == "healthy" else 0.1 for name in DIAGNOSES}),
        ("split", {"train": 0.7, "val": 0.15, "test": 0.15}),
    ):
        counts = Counter(getattr(person, key) for person in people)
        assert {name: counts[name] / 280 for name in counts} == pytest.approx(shares, abs=0.02)
    for diagnosis in DIAGNOSES:
        own = [person for person in people if person.diagnosis == diagnosis]
        first = Counter(person.scanners[0] for person in own)
        assert set(first) == set(DEFAULT_SCANNERS) and max(first.values()) - min(first.values()) <= 1, (
            "the scanner must not tell the diagnosis"
        )
        assert {person.split for person in own} == {"train", "val", "test"}
    for prefix in range(20, 280):
        healthy = sum(person.diagnosis == "healthy" for person in people[:prefix])
        assert abs(healthy - 0.4 * prefix) <= 5


def test_cohort_of_some_diagnoses_keeps_two_fifths_healthy():
    people = draw_cohort(
        100, 0, scanners=TWO, second_scanner=0, fractions=(0.7, 0.15, 0.15), diagnoses=("healthy", "drusen", "dme")
    )
    assert Counter(person.diagnosis for person in people) == {"healthy": 40, "drusen": 30, "dme": 30}
    ill = draw_cohort(
        60, 0, scanners=TWO, second_scanner=0, fractions=(0.7, 0.15, 0.15), diagnoses=("glaucoma", "macular_hole")
    )
    assert Counter(person.diagnosis for person in ill) == {"glaucoma": 30, "macular_hole": 30}


def test_membranes_and_holes_are_mostly_of_one_eye_other_diseases_of_both():
    people = a_cohort(1000)
    assert all((p.severity[side] > 0) == (p.eye_diagnosis[side] != "healthy") for p in people for side in "RL")
    assert all({*p.eye_diagnosis.values()} - {"healthy"} == {p.diagnosis} - {"healthy"} for p in people), (
        "the participant's label follows"
    )
    for diagnosis, share in (
        ("macular_hole", 0.12),
        ("epiretinal_membrane", 0.31),
        ("glaucoma", 1),
        ("dme", 1),
        ("drusen", 1),
    ):
        both = [len(set(p.eye_diagnosis.values())) == 1 for p in people if p.diagnosis == diagnosis]
        assert np.mean(both) == pytest.approx(share, abs=0.12)
        fellow = np.array([[p.severity[side] for side in "RL"] for p in people if p.diagnosis == diagnosis])
        if share == 1:
            assert 0.4 < np.corrcoef(fellow.T)[0, 1] < 0.95


def test_study_group_follows_oedema_moderately():
    people = a_cohort(800)
    insulin = {
        p.diagnosis: np.mean([q.study_group == "insulin_dependent" for q in people if q.diagnosis == p.diagnosis])
        for p in people
    }
    assert max(insulin, key=lambda name: insulin[name]) == "dme" and 0.35 < insulin["dme"] < 0.65
    assert not any(person.diagnosis == "dme" for person in people if person.study_group == "healthy")


def test_held_out_scanner_scans_only_where_it_is_named(tmp_path):
    assert [name for name, scanner in SCANNERS.items() if scanner.held_out] == ["synthetic_held_out"]
    assert {name for person in a_cohort(200, second_scanner=1) for name in person.scanners} == set(DEFAULT_SCANNERS)
    root = write_phantom(tmp_path / "fifth", 1, 0, size=SMALL, scanners=["synthetic_held_out"], workers=1)
    volume = read_volume(next(root.rglob("*.dcm")))
    assert (volume.scanner, volume.protocol) == ("synthetic_held_out", "held_out_macula")


def test_null_cohort_has_the_same_labels_and_no_disease(tmp_path):
    arguments = {"participants": 6, "seed": 3, "size": SMALL, "workers": 1, "scanners": TWO}
    real, null = (
        write_phantom(tmp_path / name, **arguments, effect=effect) for name, effect in (("real", True), ("null", False))
    )
    assert (real / "participants.tsv").read_bytes() == (null / "participants.tsv").read_bytes()
    with_effect, without = (
        {row["sop_instance_uid"]: row for row in table(root / "ground_truth" / "labels.tsv")} for root in (real, null)
    )
    assert with_effect.keys() == without.keys()
    assert {row["diagnosis"] for row in without.values()} > {"healthy"}
    for uid, row in without.items():
        assert {k: v for k, v in row.items() if k != "cst_um"} == {
            k: v for k, v in with_effect[uid].items() if k != "cst_um"
        }
        with np.load(null / "ground_truth" / f"{uid}.npz") as truth:
            assert set(np.unique(truth["lesions"])) <= {0, LESIONS["drusen"]}, "only the drupelets of age"
        files = [root / row["filepath"].lstrip("/") for root in (real, null)]
        healthy = row["diagnosis"] == "healthy"
        assert (files[0].read_bytes() == files[1].read_bytes()) == healthy
    assert '"effect": false' in (null / "ground_truth" / "phantom.json").read_text()


def test_bad_requests_say_what_to_do_and_leave_nothing_behind(tmp_path):
    (tmp_path / "there").mkdir()
    for arguments, words in (
        ({"out": tmp_path / "there"}, "already exists"),
        ({"scanners": ["zeiss"]}, "unknown scanner zeiss; known:"),
        ({"diagnoses": ["amd"]}, "unknown diagnosis amd; known: healthy, drusen"),
        ({"participants": 0}, "at least 1 participant"),
        ({"seed": -1}, "expected a seed of 0 or more, got -1"),
        ({"size": (2, 10, 10)}, "at least 4 B-scans"),
        ({"fractions": (0.5, 0.1, 0.1)}, "sum to 1"),
        ({"defects": 12.0}, "expected 0 to 1"),
        ({"second_scanner": 5.0}, "expected 0 to 1"),
        ({"scanners": ["zeiss_cirrus", "zeiss_cirrus"]}, "zeiss_cirrus is named twice"),
        ({"only": ["zeiss_cirrus", "zeiss"]}, "only zeiss: expected some of heidelberg_spectralis"),
    ):
        with pytest.raises(OctfmError, match=words):
            write_phantom(**({"out": tmp_path / "new", "participants": 2, "seed": 0} | arguments))
    assert [p.name for p in tmp_path.iterdir()] == ["there"]


def test_two_processes_never_write_one_cohort_together(tmp_path):
    """The second deleted what the first had written, which then listed files that were not there."""
    out, refused = tmp_path / "cohort", []

    def second(done: int, total: int) -> None:
        if done == 1:
            with pytest.raises(OctfmError, match="another process is writing this cohort") as caught:
                write_phantom(out, 2, 0, size=(4, 64, 32), workers=1)
            refused.append(caught)

    left = tmp_path / "cohort.partial" / "retinal_oct" / "of_a_killed_process"
    left.mkdir(parents=True)
    for name in ("participants.tsv", ".lock"):
        (tmp_path / "cohort.partial" / name).write_bytes(b"")
    write_phantom(out, 2, 0, size=(4, 64, 32), workers=1, progress=second)
    listed = [row["filepath"].lstrip("/") for row in table(out / "retinal_oct" / "manifest.tsv")]
    assert refused and all((out / path).is_file() for path in listed)
    assert [p.name for p in tmp_path.iterdir()] == ["cohort"] and not list(out.rglob("of_a_killed_process"))


def test_a_folder_of_somebody_is_not_emptied_because_its_name_ends_in_partial(tmp_path):
    kept = tmp_path / "cohort.partial" / "thesis.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    with pytest.raises(OctfmError, match=r"cohort\.partial: would be emptied, .* name another folder"):
        write_phantom(tmp_path / "cohort", 1, 0, size=(4, 64, 32), workers=1)
    assert [p.name for p in tmp_path.rglob("*")] == ["cohort.partial", "thesis.txt"] and kept.read_text() == "mine"


@pytest.mark.parametrize("share", ["-0.1", "1.5"])
def test_the_command_refuses_more_defective_files_than_good_ones(tmp_path, share):
    result = invoke("phantom", tmp_path / "new", "--defects", share)
    assert result.exit_code == 2
