"""Who is in the cohort: participants with age, disease, study group, split, and which scanner sees which eye."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octfm.data.phantom.eye import Eye, sample_eye
from octfm.data.phantom.pathology import DIAGNOSES
from octfm.data.volume import Laterality

STUDY_GROUPS = (
    "healthy",
    "pre_diabetes_lifestyle_controlled",
    "oral_medication_and_or_non_insulin_injectable_medication_controlled",
    "insulin_dependent",
)
SITES = ("UW", "UAB", "UCSD")
SPLITS = ("train", "val", "test")
# Share of each study group given the diagnosis: oedema needs diabetes, but most people with diabetes have none.
_GROUP_GIVEN_DIAGNOSIS = {
    "healthy": (0.40, 0.25, 0.22, 0.13),
    "drusen": (0.36, 0.25, 0.25, 0.14),
    "dme": (0.00, 0.08, 0.42, 0.50),
}
# Of 20 consecutive participants: every prefix of a cohort is nearly balanced, and a longer cohort begins with the shorter one.
_BLOCK = ("healthy",) * 8 + ("drusen",) * 6 + ("dme",) * 6


@dataclass(frozen=True)
class Participant:
    index: int
    participant: str
    age: int
    diagnosis: str
    severity: dict[Laterality, float]
    study_group: str
    clinical_site: str
    split: str
    scanners: tuple[str, ...]
    study_date: str
    """YYYYMMDD"""


def draw_cohort(
    count: int, seed: int, *, scanners: Sequence[str], second_scanner: float, fractions: tuple[float, float, float]
) -> tuple[Participant, ...]:
    """The cohort of this seed. Diagnoses and scanners are balanced against each other, splits within each diagnosis."""
    people = []
    seen: dict[tuple[str, str], int] = {(d, s): 0 for d in DIAGNOSES for s in SPLITS}
    of_diagnosis: dict[str, int] = dict.fromkeys(DIAGNOSES, 0)
    for index in range(count):
        if index % len(_BLOCK) == 0:
            block = np.random.default_rng([seed, 7, index // len(_BLOCK)]).permutation(_BLOCK)
        diagnosis = str(block[index % len(_BLOCK)])
        rng = np.random.default_rng([seed, 8, index])
        split = _furthest_behind(seen, diagnosis, fractions)
        seen[diagnosis, split] += 1
        turn = of_diagnosis[diagnosis]
        of_diagnosis[diagnosis] += 1
        order = [scanners[(turn + k) % len(scanners)] for k in range(len(scanners))]
        both = rng.random() < second_scanner
        age = float(np.clip(rng.normal(62 if diagnosis == "drusen" else 59, 10), 40, 88))
        day = int(rng.integers(0, 365))
        people.append(
            Participant(
                index=index,
                # The seed is part of the identity: participants of two cohorts are different people.
                participant=f"{1000 + seed}{index:04d}",
                age=round(age),
                diagnosis=diagnosis,
                severity=_severities(rng, diagnosis),
                study_group=str(rng.choice(STUDY_GROUPS, p=_GROUP_GIVEN_DIAGNOSIS[diagnosis])),
                clinical_site=str(rng.choice(SITES)),
                split=split,
                scanners=tuple(order[:2] if both else order[:1]),
                study_date=(np.datetime64("2024-01-01") + day).astype(str).replace("-", ""),
            )
        )
    return tuple(people)


def eye_of(person: Participant, laterality: Laterality, seed: int) -> Eye:
    return sample_eye(
        (seed, 9, person.index),
        laterality,
        participant=person.participant,
        age=person.age,
        diagnosis=person.diagnosis,
        severity=person.severity[laterality],
    )


def _severities(rng: np.random.Generator, diagnosis: str) -> dict[Laterality, float]:
    """A disease belongs to the participant; the fellow eye is about as severe."""
    worse, difference = rng.uniform(0.05, 1.0), rng.normal(0, 0.15, 2)
    if diagnosis == "healthy":
        return {"R": 0.0, "L": 0.0}
    right, left = np.clip(worse + difference, 0.05, 1.0)
    return {"R": round(float(right), 4), "L": round(float(left), 4)}


def _furthest_behind(seen: dict[tuple[str, str], int], diagnosis: str, fractions: tuple[float, float, float]) -> str:
    """The split that lacks most of its share, within this diagnosis first and in the whole cohort second."""
    own = sum(seen[diagnosis, s] for s in SPLITS) + 1
    everyone = sum(seen.values()) + 1

    def lack(split: str) -> float:
        share = fractions[SPLITS.index(split)]
        total = sum(seen[d, split] for d in DIAGNOSES)
        return (share * own - seen[diagnosis, split]) + (share * everyone - total) if share > 0 else -np.inf

    return max(SPLITS, key=lack)
