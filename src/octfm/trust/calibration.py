"""Calibration of probabilities: reliability curves, ECE with its expectation under calibration, intercept and slope."""

from typing import Any

import numpy as np

from octfm.evaluation.metrics import ECE_BINS, ece_bin
from octfm.evaluation.scoring import (
    Predictions,
    Units,
    calibrated,
    count_participants,
    estimate,
    metrics_of,
    rare_note,
    to_units,
)
from octfm.trust.study import Study, Task

SIMULATIONS = 2000


def calibration(study: Study) -> dict[str, Any]:
    """Assess the run, other runs and the network trained from scratch on every target with classes."""
    results, skipped = [], []
    for task in study.tasks:
        if task.cases.classes is None:
            sentence = "A number has no probability; its errors are in the table."
            skipped.append({"target": task.name, "sentence": sentence})
            continue
        for name, predictions in study.all_predictions(task):
            if study.kinds[name] in ("run", "other run", "from scratch"):
                results.append(_assess(study, task, name, predictions))
    return {
        "bins": ECE_BINS,
        "results": results,
        "skipped": skipped,
        "sentence": None if results else "No target has classes, so there are no probabilities to judge.",
    }


def _assess(study: Study, task: Task, name: str, predictions: Predictions) -> dict[str, Any]:
    units = to_units(task.cases, predictions)
    probability = calibrated(units)
    rare = count_participants(task.cases, units)[1]
    row: dict[str, Any] = {
        "target": task.name,
        "encoder": name,
        "n_participants": len(np.unique(units.participant)),
        "note": rare_note(rare),
    }
    for metric, fn, chance in metrics_of(task.cases, units):
        if metric in ("ece", "brier"):
            boot = study.bootstrap(fn, units.participant)
            row[metric] = estimate(None if rare else boot, boot.estimate) | {"chance": chance}
    if task.cases.kind == "binary":
        shown, outcome = probability[:, 1], (units.truth == 1).astype(float)
        row["of"] = f"probability of {(task.cases.classes or ('', ''))[1]}"
        row["line"] = None if rare else _line(units, outcome, study)
    else:
        shown, outcome = probability.max(1), (probability.argmax(1) == units.truth).astype(float)
        row["of"], row["line"] = "probability of the likeliest class", None
    row["curve"] = _curve(shown, outcome, units.participant)
    winner = probability.max(1)
    row["honest_ece"] = expected = _ece_if_calibrated(winner, units.participant, study.seed)
    confidence, accuracy = float(winner.mean()), float((probability.argmax(1) == units.truth).mean())
    row |= {"mean_confidence": confidence, "accuracy": accuracy}
    measured = row["ece"]["estimate"]
    if rare or measured is None:
        row["verdict"] = "inconclusive"
    elif measured > expected["high"]:
        # Confidence may equal accuracy on average, too high in some cases and too low in others.
        one_way = abs(confidence - accuracy) > expected["gap"]
        row["verdict"] = (
            ("overconfident" if confidence > accuracy else "underconfident") if one_way else "miscalibrated"
        )
    else:
        row["verdict"] = "no miscalibration shown"
    return row


def _curve(shown: np.ndarray, outcome: np.ndarray, participant: np.ndarray) -> list[dict[str, float | int | None]]:
    """Per bin: cases, mean predicted probability, observed share with Wilson's interval for as many independent cases
    as there are participants, because predictions for a participant's eyes tend to be right or wrong together."""
    which = ece_bin(shown)
    rows = []
    for b in range(ECE_BINS):
        own = which == b
        n = int(own.sum())
        if n:
            observed = float(outcome[own].mean())
            low, high = wilson(observed, len(np.unique(participant[own])))
            rows.append({"n": n, "predicted": float(shown[own].mean()), "observed": observed, "low": low, "high": high})
    return rows


def wilson(share: float, n: int) -> tuple[float, float]:
    """95 % confidence interval of a binomial proportion (Wilson 1927)."""
    z = 1.959964
    middle = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
    return float(max(0, middle - half)), float(min(1, middle + half))


def _ece_if_calibrated(confidence: np.ndarray, participant: np.ndarray, seed: int) -> dict[str, float]:
    """Mean and 97.5 % quantile of the ECE, and 95 % quantile of |confidence − accuracy|, if these probabilities were
    calibrated: even then, ECE is above 0 with few cases (Bröcker & Smith 2007). One draw per participant, because
    predictions for a participant's eyes tend to be right or wrong together."""
    _, member = np.unique(participant, return_inverse=True)
    drawn = np.random.default_rng((seed, 3)).random((SIMULATIONS, int(member.max()) + 1))[:, member]
    right = drawn < confidence
    which = ece_bin(confidence)
    gaps = [np.abs(((confidence - right) * (which == b)).sum(1)) for b in range(ECE_BINS)]
    ece = np.sum(gaps, axis=0) / len(confidence)
    gap = np.abs((confidence - right).mean(1))
    return {"mean": float(ece.mean()), "high": float(np.quantile(ece, 0.975)), "gap": float(np.quantile(gap, 0.95))}


def _line(units: Units, outcome: np.ndarray, study: Study) -> dict[str, Any]:
    """Cox's calibration intercept and slope, 0 and 1 if calibrated: logistic regression of outcome on log-odds."""
    assert units.log_prior is not None
    both = units.value + units.log_prior
    odds = both[:, 1] - both[:, 0]
    return {
        name: estimate(study.bootstrap(lambda W, i=i: calibration_line(outcome, odds, W)[:, i], units.participant))
        for i, name in enumerate(("intercept", "slope"))
    }


def calibration_line(outcome: np.ndarray, log_odds: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Intercept and slope [R, 2] under case weights [R, n], by Newton's method; NaN if the classes are separable."""
    # Start at 0, on scaled log-odds: starting at slope 1, the first step diverges for an extremely overconfident model.
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
        # Newton step with the inverse of the 2 x 2 Hessian in closed form, for all resamples at once.
        determinant = h00 * h11 - h01**2
        safe = np.where(determinant > 1e-10, determinant, np.nan)
        step = np.stack([(h11 * g0 - h01 * g1) / safe, (h00 * g1 - h01 * g0) / safe], axis=1)
        beta = beta + np.clip(step, -5, 5)
        if not (np.abs(step) >= 1e-8).any():
            break
    # Separable classes have no finite maximum: their steps never become small.
    return np.where(np.abs(step) < 1e-6, beta / [1, scale], np.nan)
