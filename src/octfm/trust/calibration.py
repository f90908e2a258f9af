"""Do probabilities mean what they say? Reliability curves, ECE beside what an honest model would score, and the calibration line."""

from typing import Any

import numpy as np

from octfm.evaluation import metrics as m
from octfm.evaluation.scoring import Predictions, Units, metrics_of, softmax, to_units
from octfm.evaluation.statistics import bootstrap
from octfm.trust.scanners import few
from octfm.trust.study import Study, Task, estimate, part_metric

SIMULATIONS = 2000
BINS = m.ECE_BINS


def calibration(study: Study) -> dict[str, Any]:
    """For every target with classes, the run, other runs and what was trained from scratch."""
    results, skipped = [], []
    for task in study.tasks:
        if task.cases.classes is None:
            skipped.append(
                {"target": task.name, "sentence": "A number has no probability; its errors are in the table."}
            )
            continue
        for name, said in study.everyone(task):
            if study.kinds[name] in ("run", "other run", "from scratch"):
                results.append(_judged(study, task, name, said))
    return {
        "bins": BINS,
        "results": results,
        "skipped": skipped,
        "sentence": None if results else "No target has classes, so there are no probabilities to judge.",
    }


def _judged(study: Study, task: Task, name: str, said: Predictions) -> dict[str, Any]:
    units = to_units(task.cases, said)
    assert units.log_prior is not None
    probability = softmax(units.value + units.log_prior)
    rare = part_metric(task.cases, said, "ece").rare
    row: dict[str, Any] = {
        "target": task.name,
        "encoder": name,
        "n_participants": len(np.unique(units.participant)),
        "note": few(rare),
    }
    for metric, fn, chance in metrics_of(task.cases, units):
        if metric in ("ece", "brier"):
            boot = bootstrap(fn, units.participant, resamples=study.resamples, seed=study.seed)
            row[metric] = estimate(None if rare else boot, boot.estimate) | {"chance": chance}
    if task.cases.kind == "binary":
        shown, outcome = probability[:, 1], (units.truth == 1).astype(float)
        row["of"] = f"probability of {(task.cases.classes or ('', ''))[1]}"
        row["line"] = None if rare else _line(units, outcome, study)
    else:
        shown, outcome = probability.max(1), (probability.argmax(1) == units.truth).astype(float)
        row["of"], row["line"] = "probability of the likeliest class", None
    row["curve"] = _curve(shown, outcome)
    row["honest_ece"] = honest = _honest(probability.max(1), units.participant, study.seed)
    confidence, accuracy = float(probability.max(1).mean()), float((probability.argmax(1) == units.truth).mean())
    row |= {"mean_confidence": confidence, "accuracy": accuracy}
    measured = row["ece"]["estimate"]
    if rare or measured is None:
        row["verdict"] = "inconclusive"
    elif measured > honest["high"]:
        row["verdict"] = "overconfident" if confidence > accuracy else "underconfident"
    else:
        row["verdict"] = "no miscalibration shown"
    return row


def _curve(shown: np.ndarray, outcome: np.ndarray) -> list[dict[str, float | int | None]]:
    """Per bin of probability: cases, mean probability, observed share with Wilson's interval (which takes units for independent)."""
    which = np.clip(np.ceil(shown * BINS).astype(int) - 1, 0, BINS - 1)
    rows = []
    for b in range(BINS):
        own = which == b
        n = int(own.sum())
        if n:
            observed = float(outcome[own].mean())
            low, high = wilson(observed, n)
            rows.append({"n": n, "predicted": float(shown[own].mean()), "observed": observed, "low": low, "high": high})
    return rows


def wilson(share: float, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Interval of a binomial share (Wilson 1927)."""
    middle, half = (
        (share + z**2 / (2 * n)) / (1 + z**2 / n),
        z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2)),
    )
    return float(max(0, middle - half)), float(min(1, middle + half))


def _honest(confidence: np.ndarray, participant: np.ndarray, seed: int) -> dict[str, float]:
    """The ECE that these probabilities would score if they were true (consistency resampling, Bröcker & Smith 2007): mean and 97.5 %.

    ECE is above 0 for a perfect model of few cases. One draw per participant: several eyes of one are right or wrong together.
    """
    _, member = np.unique(participant, return_inverse=True)
    drawn = np.random.default_rng((seed, 3)).random((SIMULATIONS, int(member.max()) + 1))[:, member]
    right = drawn < confidence
    which = np.clip(np.ceil(confidence * BINS).astype(int) - 1, 0, BINS - 1)
    found = np.sum([np.abs(((confidence - right) * (which == b)).sum(1)) for b in range(BINS)], axis=0) / len(
        confidence
    )
    return {"mean": float(found.mean()), "high": float(np.quantile(found, 0.975))}


def _line(units: Units, outcome: np.ndarray, study: Study) -> dict[str, Any]:
    """Cox's calibration intercept and slope (0 and 1 when calibrated): logistic regression of the outcome on the predicted log-odds."""
    assert units.log_prior is not None
    both = units.value + units.log_prior
    odds = both[:, 1] - both[:, 0]
    found = {}
    for i, name in enumerate(("intercept", "slope")):
        boot = bootstrap(
            lambda W, i=i: calibration_line(outcome, odds, W)[:, i],
            units.participant,
            resamples=study.resamples,
            seed=study.seed,
        )
        found[name] = estimate(boot)
    return found


def calibration_line(outcome: np.ndarray, log_odds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[R, 2] intercept and slope by Newton's method under case weights [R, n]; NaN where classes are separated and none exists."""
    # From 0 and in units of their own spread: from slope 1, a model that is far too sure makes the first step jump away.
    scale = max(float(log_odds.std()), 1e-12)
    x = log_odds / scale
    beta = np.zeros((len(weights), 2))
    step = np.full_like(beta, np.inf)
    for _ in range(30):
        eta = np.clip(beta[:, :1] + beta[:, 1:] * x, -30, 30)
        p = 1 / (1 + np.exp(-eta))
        error, curvature = weights * (outcome - p), weights * p * (1 - p)
        g0, g1 = error.sum(1), error @ x
        h00, h01, h11 = curvature.sum(1), curvature @ x, curvature @ x**2
        determinant = h00 * h11 - h01**2
        safe = np.where(determinant > 1e-10, determinant, np.nan)
        step = np.stack([(h11 * g0 - h01 * g1) / safe, (h00 * g1 - h01 * g0) / safe], axis=1)
        beta = beta + np.clip(step, -5, 5)
        if not (np.abs(step) >= 1e-8).any():
            break
    return np.where(np.abs(step) < 1e-6, beta / [1, scale], np.nan)
