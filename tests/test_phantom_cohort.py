"""A phantom cohort on disk is what AI-READI looks like, tells the truth about itself, and does not give the diagnosis away."""

import csv
import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest

from octfm.data.phantom import PHANTOM_VERSION, SCANNERS, render, write_phantom
from octfm.data.phantom.cohort import draw_cohort, eye_of
from octfm.data.phantom.defects import DEFECTS
from octfm.data.readers import REASONS, read_volume
from octfm.errors import OctfmError, ReadError

SMALL = (8, 96, 48)
TWO = ("heidelberg_spectralis", "topcon_triton")


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def digest(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(root.rglob("*")) if p.is_file()}


def a_cohort(count: int, seed: int = 0, second_scanner: float = 0.25):
    return draw_cohort(count, seed, scanners=TWO, second_scanner=second_scanner, fractions=(0.7, 0.15, 0.15))


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
    assert {row["scanner"] for row in labels} == set(TWO)
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
        assert [float(mm) for mm in row["pixel_spacing"].strip("[]").split(",")] == pytest.approx(volume.spacing_mm[1:], rel=1e-3)
        with np.load(cohort / "ground_truth" / f"{label['sop_instance_uid']}.npz") as truth:
            assert truth["lesions"].shape == SMALL and truth["surfaces"].shape[1:] == (SMALL[0], SMALL[2])
            ilm, bm = (truth["surfaces"][list(truth["surface_names"]).index(name)] for name in ("ilm", "bm"))
        inside = (np.arange(SMALL[1])[None, :, None] > ilm[:, None]) & (np.arange(SMALL[1])[None, :, None] < bm[:, None])
        assert volume.voxels[inside].mean() > volume.voxels[~inside].mean()
        assert label["phantom_version"] == PHANTOM_VERSION


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
    copies = {row["filepath"] for row in table(cohort / "ground_truth" / "defects.tsv") if row["kind"].endswith("_sop_uid")}
    assert files - copies == {row["filepath"] for row in table(cohort / "retinal_oct" / "manifest.tsv")}
    assert len(planted) == len(files) - len(planted)


def test_cohort_is_balanced_split_by_participant_and_grows_without_changing():
    people = a_cohort(120)
    assert a_cohort(40) == people[:40]
    assert len({person.participant for person in people} | {p.participant for p in a_cohort(120, seed=1)}) == 240
    for key, shares in (("diagnosis", {"healthy": 0.4, "drusen": 0.3, "dme": 0.3}), ("split", {"train": 0.7, "val": 0.15, "test": 0.15})):
        counts = Counter(getattr(person, key) for person in people)
        assert {name: counts[name] / 120 for name in counts} == pytest.approx(shares, abs=0.02)
    for diagnosis in ("healthy", "drusen", "dme"):
        first = [person.scanners[0] for person in people if person.diagnosis == diagnosis]
        assert abs(first.count(TWO[0]) - first.count(TWO[1])) <= 1, "the scanner must not tell the diagnosis"
        assert {person.split for person in people if person.diagnosis == diagnosis} == {"train", "val", "test"}
    assert all((person.severity["R"] > 0) == (person.diagnosis != "healthy") for person in people)
    fellow = np.array([[person.severity[side] for side in "RL"] for person in people if person.diagnosis != "healthy"])
    assert 0.5 < np.corrcoef(fellow.T)[0, 1] < 0.95


def test_study_group_follows_oedema_moderately():
    people = a_cohort(400)
    insulin = [person.diagnosis == "dme" for person in people if person.study_group == "insulin_dependent"]
    assert 0.4 < np.mean(insulin) < 0.85
    assert not any(person.diagnosis == "dme" for person in people if person.study_group == "healthy")


def test_intensity_histogram_does_not_give_the_diagnosis_away():
    """AUROC at most 0.75 for any disease and for each, participants as folds: brightness and contrast belong to the acquisition."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedGroupKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    people = a_cohort(100, seed=9, second_scanner=0)
    rows, who, diagnosis = [], [], []
    for person in people:
        for side in ("R", "L"):
            rng = np.random.default_rng([9, person.index, side == "L"])
            volume, _ = render(eye_of(person, side, 9), SCANNERS[person.scanners[0]], rng, (12, 128, 64))
            rows.append(np.histogram(volume.voxels, 64, (0, 256), density=True)[0])
            who.append(person.index)
            diagnosis.append(person.diagnosis)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    groups = np.array(diagnosis)
    for positive in (groups != "healthy", groups == "dme", groups == "drusen"):
        score = cross_val_predict(model, np.array(rows), positive, groups=who, cv=StratifiedGroupKFold(5), method="decision_function")
        per_person = score.reshape(-1, 2).mean(axis=1)
        assert roc_auc_score(positive[::2], per_person) <= 0.75


def test_bad_requests_say_what_to_do_and_leave_nothing_behind(tmp_path):
    (tmp_path / "there").mkdir()
    for arguments, words in (
        ({"out": tmp_path / "there"}, "exists already"),
        ({"scanners": ["zeiss"]}, "unknown scanner zeiss; known:"),
        ({"participants": 0}, "at least 1 participant"),
        ({"seed": -1}, "expected a seed of 0 or more, got -1"),
        ({"size": (2, 10, 10)}, "at least 4 B-scans"),
        ({"fractions": (0.5, 0.1, 0.1)}, "sum to 1"),
        ({"defects": 12.0}, "expected 0 to 1"),
    ):
        with pytest.raises(OctfmError, match=words):
            write_phantom(**({"out": tmp_path / "new", "participants": 2, "seed": 0} | arguments))
    assert [p.name for p in tmp_path.iterdir()] == ["there"]
