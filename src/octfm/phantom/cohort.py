"""Who is in the cohort: participants with age, disease, study group, split, and which scanner sees which eye."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octfm.phantom.eye import Eye, sample_eye
from octfm.phantom.pathology import DIAGNOSES
from octfm.volume.volume import Laterality

STUDY_GROUPS = (
    "healthy",
    "pre_diabetes_lifestyle_controlled",
    "oral_medication_and_or_non_insulin_injectable_medication_controlled",
    "insulin_dependent",
)
SITES = ("UW", "UAB", "UCSD")
SPLITS = ("train", "val", "test")
# Share of each study group given the diagnosis: oedema needs diabetes, but most people with diabetes have none; preretinal fibrosis is
# commoner with diabetes (odds 3.2 in the Blue Mountains Eye Study, Mitchell et al. 1997, PMID 9186446).
_GROUP_GIVEN_DIAGNOSIS = {
    "healthy": (0.40, 0.25, 0.22, 0.13),
    "drusen": (0.36, 0.25, 0.25, 0.14),
    "geographic_atrophy": (0.36, 0.25, 0.25, 0.14),
    "dme": (0.00, 0.08, 0.42, 0.50),
    "epiretinal_membrane": (0.28, 0.26, 0.28, 0.18),
    "macular_hole": (0.38, 0.26, 0.23, 0.13),
    "glaucoma": (0.36, 0.26, 0.24, 0.14),
}
# Share of participants with the disease in both eyes: 11.7 % for holes (McCannel et al. 2009, PMC2867090), 31 % for membranes (Mitchell et
# al. 1997); the others are diseases of both eyes.
_BILATERAL = {"epiretinal_membrane": 0.31, "macular_hole": 0.12}
# Standard deviation of the difference in severity that each eye has from the participant's: glaucoma is the most asymmetric.
_ASYMMETRY = {"glaucoma": 0.22}
# Sick participants per block of consecutive ones, and healthy ones per sick: a cohort is about 40 % healthy, and any prefix nearly so.
_SICK_PER_BLOCK, _HEALTHY_PER_SICK = 12, 2 / 3
# Participants with and without a disease are of the same ages, as controls are matched in a case-control study: otherwise the thinning and
# the drupelets of age alone would tell who is ill. Old enough for atrophy and holes.
_AGE, _AGE_SPREAD, _YOUNGEST, _OLDEST = 66, 8, 50, 88


@dataclass(frozen=True)
class Participant:
    index: int
    participant: str
    age: int
    diagnosis: str
    """Of the participant: that of whichever eye is ill."""
    eye_diagnosis: dict[Laterality, str]
    """The fellow eye of a membrane or a hole is mostly healthy."""
    severity: dict[Laterality, float]
    study_group: str
    clinical_site: str
    split: str
    scanners: tuple[str, ...]
    study_date: str
    """YYYYMMDD"""


def draw_cohort(
    count: int,
    seed: int,
    *,
    scanners: Sequence[str],
    second_scanner: float,
    fractions: tuple[float, float, float],
    diagnoses: Sequence[str] = DIAGNOSES,
) -> tuple[Participant, ...]:
    """The cohort of this seed. Diagnoses and scanners are balanced against each other, splits within each diagnosis; a longer cohort
    begins with the shorter one."""
    people = []
    block = _block(diagnoses)
    seen: dict[tuple[str, str], int] = {(d, s): 0 for d in DIAGNOSES for s in SPLITS}
    of_diagnosis: dict[str, int] = dict.fromkeys(DIAGNOSES, 0)
    for index in range(count):
        if index % len(block) == 0:
            shuffled = np.random.default_rng([seed, 7, index // len(block)]).permutation(block)
        diagnosis = str(shuffled[index % len(block)])
        # As many draws whatever the diagnosis, so that nothing else about the participant depends on it.
        rng = np.random.default_rng([seed, 8, index])
        split = _furthest_behind(seen, diagnosis, fractions)
        seen[diagnosis, split] += 1
        order = _scanner_order(seed, diagnosis, of_diagnosis[diagnosis], scanners)
        of_diagnosis[diagnosis] += 1
        both = rng.random() < second_scanner
        age = float(np.clip(rng.normal(_AGE, _AGE_SPREAD), _YOUNGEST, _OLDEST))
        day = int(rng.integers(0, 365))
        of_eye, severity = _eyes(rng, diagnosis)
        people.append(
            Participant(
                index=index,
                # The seed is part of the identity: participants of two cohorts are different people.
                participant=f"{1000 + seed}{index:04d}",
                age=round(age),
                diagnosis=diagnosis,
                eye_diagnosis=of_eye,
                severity=severity,
                study_group=str(rng.choice(STUDY_GROUPS, p=_GROUP_GIVEN_DIAGNOSIS[diagnosis])),
                clinical_site=str(rng.choice(SITES)),
                split=split,
                scanners=tuple(order[:2] if both else order[:1]),
                study_date=(np.datetime64("2024-01-01") + day).astype(str).replace("-", ""),
            )
        )
    return tuple(people)


def eye_of(person: Participant, laterality: Laterality, seed: int, *, effect: bool = True) -> Eye:
    """The eye to scan; without `effect` the same eye in health, whatever the labels say."""
    return sample_eye(
        (seed, 9, person.index),
        laterality,
        participant=person.participant,
        age=person.age,
        diagnosis=person.eye_diagnosis[laterality] if effect else "healthy",
        severity=person.severity[laterality] if effect else 0.0,
    )


def _block(diagnoses: Sequence[str]) -> tuple[str, ...]:
    sick = [d for d in DIAGNOSES if d in diagnoses and d != "healthy"]
    each = max(1, _SICK_PER_BLOCK // max(len(sick), 1))
    healthy = max(1, round(_HEALTHY_PER_SICK * each * len(sick))) if "healthy" in diagnoses else 0
    return ("healthy",) * healthy + tuple(d for d in sick for _ in range(each))


def _scanner_order(seed: int, diagnosis: str, turn: int, scanners: Sequence[str]) -> list[str]:
    """Participants of one diagnosis take all scanners in turn, every round in another order: neither diagnosis nor split tells which."""
    cycle, at = divmod(turn, len(scanners))
    shuffled = np.random.default_rng([seed, 13, DIAGNOSES.index(diagnosis), cycle]).permutation(len(scanners))
    return [str(scanners[shuffled[(at + k) % len(scanners)]]) for k in range(len(scanners))]


def _eyes(rng: np.random.Generator, diagnosis: str) -> tuple[dict[Laterality, str], dict[Laterality, float]]:
    """Diagnosis and severity of each eye. Where both are ill, they are about as severe."""
    worse, difference = rng.uniform(0.05, 1.0), rng.normal(0, 1, 2)
    bilateral, right_is_ill = rng.random() < _BILATERAL.get(diagnosis, 1.0), rng.random() < 0.5
    severity = np.clip(worse + _ASYMMETRY.get(diagnosis, 0.15) * difference, 0.05, 1.0)
    of_eye: dict[Laterality, str] = {"R": diagnosis, "L": diagnosis}
    if not bilateral:
        of_eye["L" if right_is_ill else "R"] = "healthy"
    graded = (
        0.0 if name == "healthy" else round(float(s), 4) for name, s in zip(of_eye.values(), severity, strict=True)
    )
    return of_eye, dict(zip(of_eye, graded, strict=True))


def _furthest_behind(seen: dict[tuple[str, str], int], diagnosis: str, fractions: tuple[float, float, float]) -> str:
    """The split that lacks most of its share, within this diagnosis first and in the whole cohort second."""
    own = sum(seen[diagnosis, s] for s in SPLITS) + 1
    everyone = sum(seen.values()) + 1

    def lack(split: str) -> float:
        share = fractions[SPLITS.index(split)]
        total = sum(seen[d, split] for d in DIAGNOSES)
        return (share * own - seen[diagnosis, split]) + (share * everyone - total) if share > 0 else -np.inf

    return max(SPLITS, key=lack)
