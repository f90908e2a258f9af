"""The participants of a phantom cohort: age, disease and severity of each eye, study group, split and scanners.

Everything is drawn from the cohort's seed. Diagnoses are balanced against scanners and splits, and ages have the same
distribution in all of them, so that none of these predicts a diagnosis.
"""

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
# Probability of each study group given the diagnosis: oedema needs diabetes, but most people with diabetes have no
# oedema; preretinal fibrosis is commoner with diabetes (odds ratio 3.2 in the Blue Mountains Eye Study, Mitchell et al.
# 1997, PMID 9186446).
_GROUP_GIVEN_DIAGNOSIS = {
    "healthy": (0.40, 0.25, 0.22, 0.13),
    "drusen": (0.36, 0.25, 0.25, 0.14),
    "geographic_atrophy": (0.36, 0.25, 0.25, 0.14),
    "dme": (0.00, 0.08, 0.42, 0.50),
    "epiretinal_membrane": (0.28, 0.26, 0.28, 0.18),
    "macular_hole": (0.38, 0.26, 0.23, 0.13),
    "glaucoma": (0.36, 0.26, 0.24, 0.14),
}
# Share of participants with the disease in both eyes: 11.7 % for holes (McCannel et al. 2009, PMC2867090), 31 % for
# membranes (Mitchell et al. 1997). All other diagnoses are bilateral.
_BILATERAL = {"epiretinal_membrane": 0.31, "macular_hole": 0.12}
# Standard deviation of an eye's severity around the participant's; 0.15 for the other diagnoses.
_ASYMMETRY = {"glaucoma": 0.22}
# Participants are drawn in shuffled blocks, so that every prefix of a cohort is about 40 % healthy.
_SICK_PER_BLOCK, _HEALTHY_PER_SICK = 12, 2 / 3
# Ages have the same distribution with and without disease, as in a matched case-control study; otherwise the thinning
# and the drupelets of age alone would predict the diagnosis. Old enough for atrophy and holes.
_AGE, _AGE_SPREAD, _YOUNGEST, _OLDEST = 66, 8, 50, 88


@dataclass(frozen=True)
class Participant:
    """One person of a phantom cohort, with what was drawn for both eyes."""

    index: int
    """Place in the cohort."""
    participant: str
    """The participant's id in the files."""
    age: int
    diagnosis: str
    """The diagnosis of whichever eye is ill."""
    eye_diagnosis: dict[Laterality, str]
    """Differs from `diagnosis` in the healthy fellow eye of a unilateral membrane or hole."""
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
    """Draw the cohort of this seed; a longer cohort begins with the shorter one.

    Diagnoses and scanners are balanced against each other, and splits within each diagnosis. `second_scanner` is the
    share of participants scanned on two instruments, `fractions` the shares of train, val and test.
    """
    people = []
    block = _block(diagnoses)
    counts: dict[tuple[str, str], int] = {(d, s): 0 for d in DIAGNOSES for s in SPLITS}
    for index in range(count):
        if index % len(block) == 0:
            shuffled = np.random.default_rng([seed, 7, index // len(block)]).permutation(block)
        diagnosis = str(shuffled[index % len(block)])
        turn = sum(counts[diagnosis, s] for s in SPLITS)
        order = _scanner_order(seed, diagnosis, turn, scanners)
        split = _furthest_behind(counts, diagnosis, fractions)
        counts[diagnosis, split] += 1
        # The same number of draws for every diagnosis, so that age, date and site do not depend on it.
        rng = np.random.default_rng([seed, 8, index])
        both = rng.random() < second_scanner
        age = float(np.clip(rng.normal(_AGE, _AGE_SPREAD), _YOUNGEST, _OLDEST))
        day = int(rng.integers(0, 365))
        eye_diagnosis, severity = _eyes(rng, diagnosis)
        people.append(
            Participant(
                index=index,
                # The seed is part of the identity: participants of two cohorts are different people.
                participant=f"{1000 + seed}{index:04d}",
                age=round(age),
                diagnosis=diagnosis,
                eye_diagnosis=eye_diagnosis,
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
    """One eye of a participant; without `effect` the same eye without its disease, although the labels state it."""
    return sample_eye(
        (seed, 9, person.index),
        laterality,
        participant=person.participant,
        age=person.age,
        diagnosis=person.eye_diagnosis[laterality] if effect else "healthy",
        severity=person.severity[laterality] if effect else 0.0,
    )


def _block(diagnoses: Sequence[str]) -> tuple[str, ...]:
    """The diagnoses of one block of consecutive participants, before shuffling."""
    sick = [d for d in DIAGNOSES if d in diagnoses and d != "healthy"]
    each = max(1, _SICK_PER_BLOCK // max(len(sick), 1))
    healthy = max(1, round(_HEALTHY_PER_SICK * each * len(sick))) if "healthy" in diagnoses else 0
    return ("healthy",) * healthy + tuple(d for d in sick for _ in range(each))


def _scanner_order(seed: int, diagnosis: str, turn: int, scanners: Sequence[str]) -> list[str]:
    """Scanners of the `turn`-th participant with this diagnosis, the first one first.

    Participants of one diagnosis rotate through all scanners, in a new random order every round, so that neither
    diagnosis nor split predicts the scanner.
    """
    cycle, at = divmod(turn, len(scanners))
    shuffled = np.random.default_rng([seed, 13, DIAGNOSES.index(diagnosis), cycle]).permutation(len(scanners))
    return [str(scanners[shuffled[(at + k) % len(scanners)]]) for k in range(len(scanners))]


def _eyes(rng: np.random.Generator, diagnosis: str) -> tuple[dict[Laterality, str], dict[Laterality, float]]:
    """Draw diagnosis and severity of each eye; in bilateral disease both eyes scatter around one severity."""
    mean, difference = rng.uniform(0.05, 1.0), rng.normal(0, 1, 2)
    bilateral, right_is_ill = rng.random() < _BILATERAL.get(diagnosis, 1.0), rng.random() < 0.5
    severity = np.clip(mean + _ASYMMETRY.get(diagnosis, 0.15) * difference, 0.05, 1.0)
    right = diagnosis if bilateral or right_is_ill else "healthy"
    left = diagnosis if bilateral or not right_is_ill else "healthy"
    graded = [0.0 if d == "healthy" else round(float(s), 4) for d, s in zip((right, left), severity, strict=True)]
    return {"R": right, "L": left}, {"R": graded[0], "L": graded[1]}


def _furthest_behind(counts: dict[tuple[str, str], int], diagnosis: str, fractions: tuple[float, float, float]) -> str:
    """The split furthest below its share, within this diagnosis and in the whole cohort together."""
    own = sum(counts[diagnosis, s] for s in SPLITS) + 1
    everyone = sum(counts.values()) + 1

    def deficit(split: str) -> float:
        share = fractions[SPLITS.index(split)]
        total = sum(counts[d, split] for d in DIAGNOSES)
        return (share * own - counts[diagnosis, split]) + (share * everyone - total) if share > 0 else -np.inf

    return max(SPLITS, key=deficit)
