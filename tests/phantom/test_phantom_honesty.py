"""The cohort cannot flatter: without disease, without labels or without pixels nothing predicts, with the truth almost
everything does.

Classifiers are trained on one cohort and tested on another, in both directions. Folds of a single cohort would not
do: its scanners are balanced against its diagnoses exactly, so what a fold has too many of, the others lack, and
chance scores 0.46. Standard errors are those of an AUROC of 0.5 with m and n participants, sqrt((m + n + 1) / (12 m
n)) (Hanley & McNeil 1982). The fast tests prove independence exactly where it can be proved; the slow ones measure
it.
"""

from dataclasses import dataclass, replace
from datetime import date

import numpy as np
import pytest
from pydicom.dataset import Dataset

from octfm.phantom import DEFAULT_SCANNERS, DIAGNOSES, PHANTOM_VERSION, SCANNERS, render, sample_eye
from octfm.phantom.anatomy import LAYER
from octfm.phantom.cohort import Participant, draw_cohort, eye_of
from octfm.phantom.deformation import atrophy, membrane_um
from octfm.phantom.dicom import to_bytes, to_dataset
from octfm.phantom.eye import Eye, layers_um
from octfm.phantom.write import SIDES
from octfm.volume.volume import Laterality

SMALL = (8, 96, 48)
SEEDS = (9, 10)
"""Development seeds."""


def a_cohort(count: int, seed: int = SEEDS[0], **arguments) -> tuple[Participant, ...]:
    return draw_cohort(
        count,
        seed,
        **({"scanners": DEFAULT_SCANNERS, "second_scanner": 0.25, "fractions": (0.7, 0.15, 0.15)} | arguments),
    )


def scanned(person: Participant, side: Laterality, seed: int = SEEDS[0], *, effect: bool = True, size=SMALL):
    scanner = SCANNERS[person.scanners[0]]
    rng = np.random.default_rng([seed, 11, person.index, side == "L"])
    return render(eye_of(person, side, seed, effect=effect), scanner, rng, size)[0]


def described(voxels: np.ndarray) -> np.ndarray:
    """What a simple classifier looks at: the histogram, and brightness on a coarse grid."""
    histogram = np.histogram(voxels, 32, (0, 256), density=True)[0] * 256
    d, h, w = (n // k for n, k in zip(voxels.shape, (4, 8, 6), strict=True))
    coarse = voxels[: 4 * d, : 8 * h, : 6 * w].reshape(4, d, 8, h, 6, w).mean(axis=(1, 3, 5))
    return np.concatenate([histogram, coarse.ravel() / 64])


Pair = tuple[np.ndarray, np.ndarray]
"""The same of two cohorts."""


def auroc(features: Pair, positive: Pair, strength: float = 0.01) -> float:
    """Logistic regression on one cohort's participants, judged on the other's; mean of both directions."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    found = []
    for train, test in ((0, 1), (1, 0)):
        model = make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=2000, class_weight="balanced"))
        score = model.fit(features[train], positive[train]).decision_function(features[test])
        found.append(roc_auc_score(positive[test], score))
    return float(np.mean(found))


def standard_error(positive: Pair, means: int = 1) -> float:
    """Of the mean of both directions, over `means` permutations."""
    m, n = (int(sum(sign(part).sum() for part in positive)) for sign in (np.asarray, np.logical_not))
    return float(np.sqrt((m + n + 1) / (12 * m * n) / means))


@dataclass(frozen=True)
class Scanned:
    features: np.ndarray
    """[N, 2, F]"""
    diagnosis: np.ndarray
    """[N, 2]"""
    size: np.ndarray
    """[N, 2], of the RLE file, over its scanner's mean."""


@pytest.fixture(scope="module")
def cohorts() -> tuple[Scanned, Scanned]:
    first, second = (_scan(seed) for seed in SEEDS)
    return first, second


def _scan(seed: int) -> Scanned:
    people = a_cohort(250, seed)
    volumes = [[scanned(person, side, seed) for side in SIDES] for person in people]
    size = [
        [
            len(
                to_bytes(
                    to_dataset(
                        replace(volume, acquisition="1.2.3"),
                        SCANNERS[volume.scanner],
                        person,
                        PHANTOM_VERSION,
                        rle=True,
                    )
                )
            )
            for volume in pair
        ]
        for person, pair in zip(people, volumes, strict=True)
    ]
    relative, scanner = np.array(size, float), np.array([person.scanners[0] for person in people])
    for name in DEFAULT_SCANNERS:
        relative[scanner == name] /= relative[scanner == name].mean()
    features = np.array([[described(volume.voxels) for volume in pair] for pair in volumes])
    return Scanned(features, np.array([[person.eye_diagnosis[side] for side in SIDES] for person in people]), relative)


# What can be proved


def test_nothing_else_about_a_participant_depends_on_the_diagnosis():
    """The same seed with other diseases draws the same ages, sites, dates and second scans."""
    cohorts = [a_cohort(60, diagnoses=(name,)) for name in DIAGNOSES]
    for same in zip(*cohorts, strict=True):
        assert len({(p.participant, p.age, p.clinical_site, p.study_date, len(p.scanners)) for p in same}) == 1


def test_null_images_do_not_depend_on_the_labels():
    for person in a_cohort(4):
        for diagnosis in ("dme", "glaucoma"):
            labelled = replace(
                person, eye_diagnosis=dict.fromkeys(SIDES, diagnosis), severity=dict.fromkeys(SIDES, 1.0)
            )
            null, other = (scanned(p, "R", effect=False).voxels for p in (person, labelled))
            assert np.array_equal(null, other)
            assert not np.array_equal(null, scanned(labelled, "R").voxels), "with effect, the disease shows"


@pytest.mark.parametrize("scanner", DEFAULT_SCANNERS)
def test_header_is_the_same_whatever_the_diagnosis(scanner):
    person = replace(a_cohort(1)[0], scanners=(scanner,))

    def header(diagnosis: str) -> Dataset:
        volume = scanned(replace(person, diagnosis=diagnosis, eye_diagnosis=dict.fromkeys(SIDES, diagnosis)), "R")
        ds = to_dataset(replace(volume, acquisition="1.2.3"), SCANNERS[scanner], person, PHANTOM_VERSION)
        del ds.PixelData
        return ds

    headers = [header(name) for name in DIAGNOSES]
    assert all(other == headers[0] and other.file_meta == headers[0].file_meta for other in headers[1:])
    assert not any(name in str(headers[0]).lower() for name in DIAGNOSES if name != "healthy")


@pytest.mark.slow
def test_header_fields_alone_predict_nothing():
    """Scanner, geometry, date, number of scans and the participant's number, of two cohorts of 3,000: standard error
    0.008."""
    people = [a_cohort(3000, seed) for seed in SEEDS]
    positive = tuple(np.array([person.diagnosis != "healthy" for person in cohort]) for cohort in people)
    assert 2.3 * standard_error(positive) < 0.02

    def fields(person: Participant) -> list[float]:
        scanner = SCANNERS[person.scanners[0]]
        day = date.fromisoformat(person.study_date).timetuple().tm_yday
        one_hot = [float(name in person.scanners) for name in DEFAULT_SCANNERS]
        return [
            *scanner.vendor_size,
            *scanner.field_mm,
            day,
            day % 7,
            len(person.scanners),
            int(person.participant) % 97,
            *one_hot,
        ]

    features = tuple(np.array([fields(person) for person in cohort]) for cohort in people)
    assert auroc(features, positive) == pytest.approx(0.5, abs=0.02)
    rng = np.random.default_rng(0)
    permuted = [auroc(features, tuple(rng.permutation(part) for part in positive)) for _ in range(20)]
    assert np.mean(permuted) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
def test_cross_scanner_truth_agrees():
    """One eye on five scanners: the layers found on each instrument's own grid are those of the eye, in µm."""
    x = np.linspace(-2.5, 2.5, 60)[None, :] * np.ones((60, 1))
    y = -x.T
    for diagnosis in DIAGNOSES:
        eye = sample_eye((3, 0), "R", participant="x", age=66, diagnosis=diagnosis, severity=0.7)
        truth = layers_um(eye, x, y)[: LAYER["choroid"]].sum(axis=0).mean()
        thickness, cst = [], set()
        for scanner in SCANNERS.values():
            _, seen = render(eye, scanner, np.random.default_rng(1), (40, 128, 60))
            dz, dy, dx = seen.spacing_mm
            d, w = round(2.5 / dz), round(2.5 / dx)
            centre = (slice(20 - d, 20 + d), slice(30 - w, 30 + w))
            thickness.append(1000 * dy * (seen.surface("bm") - seen.surface("ilm"))[centre].mean())
            cst.add(seen.cst_um)
        # The instruments sample other A-scans of the central 5 x 5 mm, and fixation differs.
        assert thickness == pytest.approx([truth] * len(thickness), abs=6), diagnosis
        assert len(cst) == 1


# What can be measured


def truth_features(eye: Eye) -> np.ndarray:
    """True layer thickness in 34 sectors of the central 6 mm and the true extent of every lesion."""
    grid = (np.arange(48) + 0.5) / 48 * 6 - 3
    x, y = np.meshgrid(grid, -grid)
    r, octant = np.hypot(x, y), np.floor((np.arctan2(y, x) + np.pi) / np.pi * 4).astype(int) % 8
    sectors = [r < 0.2, (r >= 0.2) & (r < 0.5)]
    sectors += [
        (r >= a) & (r < b) & (octant == k)
        for a, b in ((0.5, 1.0), (1.0, 1.5), (1.5, 2.2), (2.2, 3.0))
        for k in range(8)
    ]
    layers = layers_um(eye, x, y)[: LAYER["choroid"]]
    thickness = [layers[:, sector].mean(axis=1) for sector in sectors]
    found = eye.lesions
    cysts = (found.cysts[:, 2] ** 2 * found.cysts[:, 3]).sum()
    gap = 0.0 if found.roof else (found.hole[:, 2] ** 2).sum()
    extent = [layers[LAYER["drusen"]].sum(), layers[LAYER["subretinal_fluid"]].sum(), cysts, gap]
    extent += [atrophy(found, x, y).sum(), (membrane_um(found, x, y)[0] > 0).sum()]
    return np.concatenate([np.concatenate(thickness), np.log1p(1000 * np.array(extent))])


@pytest.mark.slow
def test_supervised_ceiling_is_at_least_95():
    """From true thickness and lesion maps: any disease, and each of the six. Eyes are scored, participants are
    folds."""
    people = a_cohort(200)
    features = np.array([[truth_features(eye_of(person, side, SEEDS[0])) for side in SIDES] for person in people])
    diagnosis = np.array([[person.eye_diagnosis[side] for side in SIDES] for person in people])
    assert ceiling(features, diagnosis != "healthy") >= 0.95
    for name in DIAGNOSES[1:]:
        assert ceiling(features, diagnosis == name) >= 0.95, name


def ceiling(features: np.ndarray, positive: np.ndarray) -> float:
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000, class_weight="balanced"))
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    score = np.zeros(positive.shape)
    for train, test in folds.split(features, positive.any(axis=1)):
        model.fit(features[train].reshape(-1, features.shape[-1]), positive[train].ravel())
        score[test] = model.decision_function(features[test].reshape(-1, features.shape[-1])).reshape(-1, 2)
    return roc_auc_score(positive.ravel(), score.ravel())


def ill(cohorts: tuple[Scanned, Scanned], name: str = "any") -> Pair:
    """bool [N] of each cohort: participants with this diagnosis, or with any disease, in some eye."""
    sick = [c.diagnosis != "healthy" if name == "any" else c.diagnosis == name for c in cohorts]
    return sick[0].any(axis=1), sick[1].any(axis=1)


@pytest.mark.slow
def test_intensity_histogram_does_not_give_the_diagnosis_away(cohorts):
    """At most 0.75 for any disease and for each: brightness and contrast belong to the acquisition. Nor does a
    compressed file's size."""
    first, second = cohorts
    histogram = first.features[:, :, :32].mean(axis=1), second.features[:, :, :32].mean(axis=1)
    for name in ("any", *DIAGNOSES[1:]):
        positive = ill(cohorts, name)
        for strength in (0.01, 1.0):
            assert auroc(histogram, positive, strength) <= 0.75, name
        assert auroc((first.size, second.size), positive) <= 0.75, name


@pytest.mark.slow
def test_permuted_labels_predict_nothing(cohorts):
    """20 permutations over two cohorts of 250: standard error of the mean 0.006."""
    positive = ill(cohorts)
    assert 2.5 * standard_error(positive, means=20) < 0.02
    features = cohorts[0].features.mean(axis=1), cohorts[1].features.mean(axis=1)
    rng = np.random.default_rng(0)
    found = [auroc(features, (rng.permutation(positive[0]), rng.permutation(positive[1]))) for _ in range(20)]
    assert np.mean(found) == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_null_cohort_predicts_nothing():
    """Labels as ever, every eye healthy. One eye of each of 5,000 participants: standard error 0.008."""
    people = [a_cohort(2500, seed) for seed in SEEDS]
    positive = tuple(np.array([person.diagnosis != "healthy" for person in cohort]) for cohort in people)
    assert 2.3 * standard_error(positive) < 0.02
    features = tuple(
        np.array([described(scanned(person, "R", seed, effect=False, size=(5, 64, 32)).voxels) for person in cohort])
        for seed, cohort in zip(SEEDS, people, strict=True)
    )
    assert auroc(features, positive) == pytest.approx(0.5, abs=0.02)
