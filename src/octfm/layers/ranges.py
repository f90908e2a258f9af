"""A range for every ETDRS zone, calibrated on phantoms, and the conformal quantile behind it.

One factor is set by conformal prediction for participants with several zones each (Lee, Barber and Willett,
"Distribution-free inference with hierarchical data", 2023): a zone of a new participant lies in its range in 90 % of
cases, if that participant comes from the population that the range was calibrated on. The shape of packaged ranges, six
numbers, was fitted to the same participants; benchmarks/segment_ranges.py measures coverage on others.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np

LEVEL = 0.9
SWOLLEN_UM = 330.0
"""Mean thickness above which most zones are swollen; in healthy eyes the inner ring reaches it."""
WET_UM = 3.0
"""Mean height of intraretinal fluid in a zone that is enough to explain swelling."""
SYNTHETIC = "synthetic-calibrated range"
"""Name of a range that was calibrated on phantoms: it promises nothing for real eyes."""


@dataclass(frozen=True)
class Ranges:
    """How far the true mean of a zone may lie from the mean found, for one network. It grows with the error that the
    network expects there, and with the swelling of zones without fluid, because under epiretinal membranes this network
    is confident and wrong."""

    below: tuple[float, float, float]
    """The range begins a + b · E + c · S µm below the mean found, where E is the mean expected error in µm and S the µm
    by which the mean lies above SWOLLEN_UM, 0 in zones with fluid (WET_UM)."""
    above: tuple[float, float, float]
    """The same coefficients of its end above the mean."""
    participants: int
    """Number of phantom participants that it was calibrated on."""

    def of(self, mean_um: float, expected_um: float, fluid_um: float) -> tuple[float, float]:
        """Low and high end of the range in µm; `fluid_um` is the mean height of intraretinal fluid in the zone."""
        swollen_um = max(0.0, mean_um - SWOLLEN_UM) if fluid_um < WET_UM else 0.0
        low, high = (a + b * expected_um + c * swollen_um for a, b, c in (self.below, self.above))
        return mean_um - low, mean_um + high


def packaged_ranges(name: str, digest: str) -> Ranges | None:
    """The ranges of a packaged network; None for other networks, and for other weights."""
    file = files("octfm.weights") / f"{name}.ranges.json"
    if not file.is_file():
        return None
    facts = json.loads(file.read_text("utf-8"))
    if facts["sha256"] != digest:
        return None
    return Ranges(tuple(facts["below"]), tuple(facts["above"]), facts["participants"])


def conformal_quantile(scores: Sequence[Sequence[float]]) -> float:
    """The smallest value that a score of a new participant exceeds with a probability of at most 1 − LEVEL.

    scores: one sequence per participant; participants count equally, however many scores they have. Infinite if there
    are too few participants.
    """
    people = [np.asarray(own, float) for own in scores if len(own)]
    values = np.concatenate([*people, [np.inf]])
    # The new participant counts as one more, whose unknown score is taken to be infinite.
    weights = np.concatenate([*(np.full(len(own), 1 / len(own)) for own in people), [1.0]]) / (len(people) + 1)
    order = np.argsort(values, kind="stable")
    place = np.searchsorted(np.cumsum(weights[order]), LEVEL - 1e-12)
    return float(values[order][min(place, len(values) - 1)])
