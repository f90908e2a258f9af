"""Metrics with intervals from predictions, at the unit of the target, and paired comparisons of encoders."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from octfm.catalog.labels import as_number
from octfm.display import interval as shown_interval
from octfm.display import number, p_value
from octfm.evaluation import metrics as m
from octfm.evaluation.cases import Cases
from octfm.evaluation.delong import Areas, areas
from octfm.evaluation.statistics import (
    MIN_PARTICIPANTS,
    Bootstrap,
    Metric,
    bootstrap,
    compare,
    holm,
    interval,
    over_seeds,
)

PLANNED = ("auroc", "kappa", "r2")
"""Metrics whose comparisons are planned, so p values are corrected for their number; the others are descriptive."""
HEADLINE = ("auroc", "balanced_accuracy", "kappa", "r2")
"""Metrics shown first in terminals and on pages."""
BELOW = (
    "Below guessing, which is no finding: in k-fold, a model without signal scores slightly below guessing, because "
    "the cases tested in a fold are missing from its training part."
)
"""Measured on permuted labels of 40 participants: mean AUROC .457, and 10 % of intervals below .5."""
FAR = 20
"""Labels more than this many interquartile ranges from the middle half are remarked on. Normally distributed numbers
never are; of log-normal ones about 1 in 3,000."""
_CODE = re.compile(r"-[19]|-?9{2,}(\.9+)?")
"""Numbers that may be codes for a missing value, such as -1, 99 and 999.9."""
LOWER_IS_BETTER = ("brier", "ece", "mae")
CONFOUNDED = 0.02
"""If the AUROC of guessing differs from 0.5 by this much, a note says that numbers of eyes differ between classes."""
DECIMALS = 9
"""Log-probabilities and grades are rounded to these before they are ranked. Those that differ only by rounding errors,
which depend on the processor and on the number of scans, are then ties."""
BUILT_IN = ("auroc", "auprc", "balanced_accuracy", "macro_f1", "brier", "ece", "kappa", "r2", "mae")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predictions of one fit, or of all folds of one seed, for every test row."""

    rows: np.ndarray
    """[n] positions in the cases."""
    value: np.ndarray
    """[n, K] log-probabilities as if classes were equally common, or [n, 1] predicted numbers."""
    log_prior: np.ndarray | None = None
    """[n, K] log of the class frequencies among the units of training (`log_share`): calibrated probabilities need it,
    ranking does not."""
    grade: np.ndarray | None = None
    """[n] expected grade 0..K-1 of an ordinal target."""
    settings: tuple = ()
    """Hyperparameters chosen by inner folds."""


@dataclass(frozen=True, eq=False)
class Units:
    """The cases that are scored: participants, eyes or acquisitions, each aggregated from its rows by `to_units`."""

    truth: np.ndarray
    participant: np.ndarray
    value: np.ndarray
    log_prior: np.ndarray | None
    grade: np.ndarray | None
    eyes: np.ndarray | None = None
    """[units] number of eyes of each, for targets scored by the worse eye."""


@dataclass(frozen=True, eq=False)
class Scored:
    """One metric of one encoder on one target."""

    metric: str
    encoder: str
    bootstrap: Bootstrap | None
    """None if there are too few participants for an interval."""
    row: dict[str, Any]
    ranked: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    """Positive, score and participant of each unit, if DeLong's variance applies (binary AUROC, one seed)."""


def score(
    cases: Cases,
    encoder: str,
    runs: Sequence[Predictions],
    facts: dict[str, Any],
    resamples: int,
    seed: int,
    only: Sequence[str] = (),
    more: Sequence[m.ExtraMetric] = (),
    draws: int = 1,
) -> list[Scored]:
    """Score every metric of the target, and those of `more` that are for its kind.

    With several runs (seeds), the result is their mean; seeds and participants are resampled. `draws`: number of
    consecutive runs that share a seed and differ in the draw of the encoder; draws are resampled as well, and
    `per_draw` has their scores. `facts` are added to every row; `only`: names of metrics, by default all.
    """
    units = [to_units(cases, run) for run in runs]
    first, odd = units[0], odd_numbers(cases)
    lower_is_better = {*LOWER_IS_BETTER, *(metric.name for metric in more if metric.lower_is_better)}
    counts, rare = count_participants(cases, first)
    scored = []
    for of_runs in zip(*(metrics_of(cases, u, more) for u in units), strict=True):
        name, _, chance = of_runs[0]
        if only and name not in only:
            continue
        measures = [measure for _, measure, _ in of_runs]
        # New weights for each, because a caller's metric may change them.
        whole = [float(measure(np.ones((1, len(first.truth))))[0]) for measure in measures]
        boot = None if rare else _bootstrap_runs(measures, first.participant, resamples, seed, draws)
        found = estimate(boot, float(np.mean(whole)))
        high = found["high"]
        below = name in HEADLINE and facts.get("design") == "k-fold" and high is not None and high < chance
        notes = [
            odd,
            (_note(boot) if boot else rare_note(rare, " in the test")) or (BELOW if below else None),
            _eyes_note(first) if name == "auroc" else None,
        ]
        ranked = None
        # DeLong's formula covers other participants, not other seeds.
        if name == "auroc" and cases.kind == "binary" and len(runs) == 1 and not rare:
            ranked = (first.truth == 1, first.value[:, 1] - first.value[:, 0], first.participant)
        row = {
            **facts,
            "metric": name,
            "encoder": encoder,
            **found,
            "percentile": percentile(boot),
            "delong": _delong(ranked),
            "chance": chance,
            "lower_is_better": name in lower_is_better,
            "note": " ".join(n for n in notes if n) or None,
            "test_participants_per_class": counts if cases.classes else None,
            "seeds": len(runs) // draws,
            "penalty": sorted({s for run in runs for s in run.settings}),
        }
        if draws > 1:
            row["per_draw"] = [finite(float(np.mean(whole[d::draws]))) for d in range(draws)]
        scored.append(Scored(name, encoder, boot, row, ranked))
    return scored


def _bootstrap_runs(
    measures: Sequence[Metric], participant: np.ndarray, resamples: int, seed: int, draws: int
) -> Bootstrap:
    """The mean over runs, whose draws, seeds and participants are resampled."""
    per_run = [bootstrap(measure, participant, resamples=resamples, seed=seed) for measure in measures]
    of_seeds = [over_seeds(per_run[s : s + draws], seed=seed + 1) for s in range(0, len(per_run), draws)]
    return over_seeds(of_seeds, seed=seed)


def estimate(boot: Bootstrap | None, alone: float | None = None) -> dict[str, float | None]:
    """`estimate`, `low` and `high` (BCa) for a result row; without a bootstrap only the estimate `alone`."""
    if boot is None:
        return {"estimate": finite(alone), "low": None, "high": None}
    low, high = interval(boot)
    return {"estimate": finite(boot.estimate), "low": finite(low), "high": finite(high)}


def percentile(boot: Bootstrap | None) -> list[float | None]:
    """Ends of the percentile interval; None for both without a bootstrap."""
    return [None, None] if boot is None else [finite(end) for end in interval(boot, method="percentile")]


def compare_scored(a: Scored, b: Scored, *, leakage: bool) -> dict[str, Any]:
    """Compare a with b (a − b) on the same participants and resamples; for errors and leakage, lower is "better"."""
    planned = a.metric in PLANNED and not leakage
    row = {
        "target": a.row["target"],
        "metric": a.metric,
        "a": a.encoder,
        "b": b.encoder,
        "leakage": leakage,
        "planned": planned,
    }
    if a.bootstrap is None or b.bootstrap is None:
        one, other = a.row["estimate"], b.row["estimate"]
        difference, unknown = None if one is None or other is None else one - other, dict.fromkeys(("low", "high", "p"))
        return {**row, "difference": difference, **unknown, "verdict": "inconclusive", "note": a.row["note"]}
    # For leakage such as recognising the scanner, a higher score is worse.
    lower_is_better = leakage != a.row.get("lower_is_better", a.metric in LOWER_IS_BETTER)
    p_delong = _areas(a.ranked, b.ranked).p() if a.ranked and b.ranked else None
    found = paired_difference(a.bootstrap, b.bootstrap, lower_is_better=lower_is_better)
    return {**row, **found, "p_delong": p_delong, "note": None}


def paired_difference(a: Bootstrap, b: Bootstrap, *, lower_is_better: bool) -> dict[str, Any]:
    """`difference` (a − b), `low`, `high`, `p` and `verdict` on the same resamples, for a result row."""
    c = compare(a, b)
    verdict = c.verdict
    if lower_is_better and verdict != "inconclusive":
        verdict = "worse" if verdict == "better" else "better"
    ends = {"low": finite(c.low), "high": finite(c.high)}
    return {"difference": finite(c.difference), **ends, "p": c.p, "verdict": verdict}


def compare_metrics(a: Sequence[Scored], b: Sequence[Scored], *, leakage: bool) -> list[dict[str, Any]]:
    """`compare_scored` for every metric that both have: without expected grades there is no kappa."""
    others = {scored.metric: scored for scored in b}
    return [compare_scored(own, others[own.metric], leakage=leakage) for own in a if own.metric in others]


def difference_words(c: dict[str, Any], digits: int = 3) -> str:
    """A comparison with an interval for a terminal: `a is better against b: +0.020 (+0.005 to +0.034, p = 0.010, Holm
    0.020)`, with `not after Holm: 0.070` where the verdict does not survive that correction."""
    difference = shown_interval(c, digits=digits).removesuffix(")")
    holm_words = "not after Holm:" if fails_holm(c) else "Holm"
    adjusted = "" if c["p_holm"] is None else f", {holm_words} {p_value(c['p_holm'])}"
    p = "p < 0.001" if c["p"] < 0.001 else f"p = {c['p']:.3f}"
    return f"{c['a']} is {c['verdict']} against {c['b']}: {difference}, {p}{adjusted})"


def correct(comparisons: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `p_holm` to every comparison: the p value after Holm's correction, or None if unplanned or without p."""
    planned = [i for i, c in enumerate(comparisons) if c["planned"] and c["p"] is not None]
    adjusted = dict(zip(planned, holm([comparisons[i]["p"] for i in planned]), strict=True))
    return [{**c, "p_holm": adjusted.get(i)} for i, c in enumerate(comparisons)]


def planned_metrics(cases: Cases) -> tuple[str, ...]:
    """The metrics of PLANNED that are computed for a target; none for leakage."""
    if cases.target.leakage:
        return ()
    return {"regression": ("r2",), "ordinal": ("auroc", "kappa")}.get(cases.kind, ("auroc",))


def fails_holm(comparison: dict[str, Any]) -> bool:
    """Whether a verdict of better or worse does not survive Holm's correction for several comparisons."""
    p = comparison.get("p_holm")
    return comparison["verdict"] != "inconclusive" and p is not None and p > 0.05


def finite(value: float | None) -> float | None:
    """The value as a float; None if it is not finite, since JSON has no NaN."""
    return None if value is None or not np.isfinite(value) else float(value)


def to_units(cases: Cases, run: Predictions) -> Units:
    """Average rows per unit; for targets scored by the worse eye, use the eye with the highest predicted log-odds.

    Log-probabilities are normalised, and with grades rounded to DECIMALS.
    """
    label = cases.label[run.rows]
    ids, first, member = np.unique(cases.unit[run.rows], return_index=True, return_inverse=True)
    weight, eyes = np.ones(len(label)), None
    if cases.eye is not None:
        weight = _of_the_worse_eye(cases.eye[run.rows], member, run.value)
        eyes = np.bincount(member[np.unique(cases.eye[run.rows], return_index=True)[1]])
    size = np.bincount(member, weights=weight)

    def mean(values: np.ndarray | None) -> np.ndarray | None:
        if values is None:
            return None
        columns = values.reshape(len(values), -1)
        means = [np.bincount(member, weights=weight * c) / size for c in columns.T]
        return np.stack(means, axis=1).reshape(len(ids), *values.shape[1:])

    if cases.classes is None:
        truth = np.bincount(member, weights=label) / size
    else:
        truth = np.zeros(len(ids), dtype=int)
        # Rows of a unit share their label, except in target `disease`: a participant with one diseased eye is diseased.
        np.maximum.at(truth, member, label)
    value, log_prior, grade = mean(run.value), mean(run.log_prior), mean(run.grade)
    assert value is not None
    if cases.classes is not None:
        value = (value - np.logaddexp.reduce(value, axis=1, keepdims=True)).round(DECIMALS)
        log_prior, grade = (None if v is None else v.round(DECIMALS) for v in (log_prior, grade))
    return Units(truth, cases.participant[run.rows][first], value, log_prior, grade, eyes)


def count_participants(cases: Cases, units: Units) -> tuple[dict[str, int], dict[str, int]]:
    """Participants per class (or under "" for regression), and those counts that are too low for an interval."""
    counts = {"": len(np.unique(units.participant))}
    if cases.classes is not None:
        counts = {name: len(np.unique(units.participant[units.truth == k])) for k, name in enumerate(cases.classes)}
    return counts, {name: n for name, n in counts.items() if n < MIN_PARTICIPANTS}


def _of_the_worse_eye(eye: np.ndarray, unit: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Row weights [n]: 1.0 for each unit's eye of higher mean log-odds of the last class (first of ties), else 0.0."""
    _, member = np.unique(eye, return_inverse=True)
    odds = (np.bincount(member, weights=value[:, -1] - value[:, 0]) / np.bincount(member)).round(DECIMALS)[member]
    # By unit, then by odds from the highest, then by eye: the first of each unit is its worse eye.
    order = np.lexsort((member, -odds, unit))
    worse = member[order][np.unique(unit[order], return_index=True)[1]]
    return (member == worse[unit]).astype(float)


def metrics_of(cases: Cases, u: Units, more: Sequence[m.ExtraMetric] = ()) -> list[tuple[str, Metric, float]]:
    """(name, metric as a function of weights [R, n], score of guessing) of each metric; `more`: the caller's
    metrics."""
    # Every metric is called with weights [R, n] alone; partial binds truth and predictions.
    predicted = u.value[:, 0] if cases.classes is None else softmax(u.value)
    own = [(x.name, partial(x, u.truth, predicted), x.chance) for x in more if cases.kind in x.kinds]
    return [*_built_in(cases, u), *own]


def _built_in(cases: Cases, u: Units) -> list[tuple[str, Metric, float]]:
    if cases.classes is None:
        spread = float(np.abs(u.truth - np.median(u.truth)).mean())
        value = u.value[:, 0]
        return [("r2", partial(m.r_squared, u.truth, value), 0.0), ("mae", partial(m.mae, u.truth, value), spread)]
    winner = u.value.argmax(1)
    share = np.bincount(u.truth, minlength=len(cases.classes)) / len(u.truth)
    present = int((share > 0).sum())
    if cases.kind == "binary":
        ranking = u.value[:, 1] - u.value[:, 0]
        found = [
            ("auroc", partial(m.auroc, u.truth == 1, ranking), _guessed_auroc(u)),
            ("auprc", partial(m.auprc, u.truth == 1, ranking), float(share[1])),
        ]
    else:
        found = [
            # Of log-probabilities: computing probabilities from rounded ones would end ties.
            ("auroc", partial(m.macro_auroc, u.truth, u.value), 0.5),
            ("auprc", partial(m.macro_auprc, u.truth, u.value), 1 / present),
        ]
    found += [
        ("balanced_accuracy", partial(m.balanced_accuracy, u.truth, winner), 1 / present),
        ("macro_f1", partial(m.macro_f1, u.truth, winner), 1 / present),
    ]
    if u.log_prior is not None:
        likely = calibrated(u)
        found += [
            # Predicting the test's class shares for everyone has a Brier score of 1 − Σ share².
            ("brier", partial(m.brier, u.truth, likely), float(1 - (share**2).sum())),
            ("ece", partial(m.ece, u.truth, likely), 0.0),
        ]
    if u.grade is not None:
        rounded = np.clip(np.rint(u.grade), 0, len(cases.classes) - 1).astype(int)
        found.append(("kappa", partial(m.weighted_kappa, u.truth, rounded), 0.0))
    return found


def _guessed_auroc(u: Units) -> float:
    """AUROC of random scores for every eye: above 0.5 if positive participants have more eyes, since the worse eye
    counts.

    Of a + b random scores, the highest is among the a of one participant with a probability of a / (a + b).
    """
    if u.eyes is None or not 0 < (u.truth == 1).sum() < len(u.truth):
        return 0.5
    # By number of eyes, of which there are one or two: pairs of participants may be too many to list.
    (a, times_a), (b, times_b) = (np.unique(u.eyes[own], return_counts=True) for own in (u.truth == 1, u.truth != 1))
    return float(times_a @ (a[:, None] / (a[:, None] + b)) @ times_b / (times_a.sum() * times_b.sum()))


def softmax(log_p: np.ndarray) -> np.ndarray:
    """Probabilities [n, K] from log-probabilities [n, K] that need not be normalised."""
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def calibrated(of: Predictions | Units) -> np.ndarray:
    """Probabilities [n, K]. Probes are fitted with classes of equal weight; adding the log class frequencies of
    training undoes that."""
    assert of.log_prior is not None
    return softmax(of.value + of.log_prior)


def _areas(*ranked: tuple[np.ndarray, np.ndarray, np.ndarray]) -> Areas:
    positive, _, participant = ranked[0]
    return areas(positive, np.stack([scores for _, scores, _ in ranked], axis=1), participant)


def _delong(ranked: tuple[np.ndarray, np.ndarray, np.ndarray] | None) -> dict[str, Any] | None:
    """Interval by formula, a cross-check of the bootstrap interval: they should agree within a few hundredths."""
    if ranked is None:
        return None
    found = _areas(ranked)
    low, high = found.interval()
    return {"low": low, "high": high, "method": "Obuchowski 1997 (clustered)" if found.clustered else "DeLong 1988"}


def _eyes_note(u: Units) -> str | None:
    """A warning if the number of eyes alone separates the classes; else None."""
    guessed = _guessed_auroc(u)
    if u.eyes is None or abs(guessed - 0.5) < CONFOUNDED:
        return None
    ill, well = (u.eyes[u.truth == k].mean() for k in (1, 0))
    return (
        f"Guessing reaches {guessed:.2f} here: the diseased were scanned in {ill:.1f} eyes on average, the others in "
        f"{well:.1f}, and participants are scored by the eye that looks worse."
    )


def odd_numbers(cases: Cases) -> str | None:
    """A remark on codes for missing values (999, -1) among numbers or classes, or on numbers so far from the others
    that they alone decide R²; None if there are none.

    A number that looks like a code is taken for one if it is negative and no other number is, if it is farther from all
    others than the range of nine in ten of them, or if it is outside the range of the others and the most frequent.
    999 µm between 980 and 1010 is none.
    """
    if cases.classes is not None:
        return _coded_classes(cases, cases.classes)
    # One of each unit: several scans of an eye repeat its number.
    own = [value for _, value in set(zip(cases.unit.tolist(), cases.label.tolist(), strict=True))]
    values, counts = np.unique(own, return_counts=True)
    coded = np.array([_CODE.fullmatch(f"{value:.10g}") is not None for value in values])
    if coded.all():
        return None
    usual, most = values[~coded], max(2, *counts[~coded])
    middle = np.ptp(np.quantile(np.repeat(usual, counts[~coded]), (0.05, 0.95)))

    def is_code(value: float, count: int) -> bool:
        inside = usual[0] < value < usual[-1]
        alone = np.abs(usual - value).min() > middle > 0
        return value < 0 <= usual[0] or alone or (not inside and count > most)

    if codes := [v for v, count in zip(values[coded], counts[coded], strict=True) if is_code(v, count)]:
        return _name_codes(cases, {f"{code:.10g}": int((cases.label == code).sum()) for code in codes})
    low, high = np.quantile(cases.label, (0.25, 0.75))
    far = (cases.label < low - FAR * (high - low)) | (cases.label > high + FAR * (high - low))
    if low == high or not far.any():
        return None
    return (
        f"{far.sum()} of {len(far)} labels lie more than {FAR} interquartile ranges from the others and decide the "
        "result; is it a code for a missing value?"
    )


def _coded_classes(cases: Cases, classes: Sequence[str]) -> str | None:
    """The warning about classes that probably stand for a missing value, such as 9 or -99; None without any.

    Beside classes that are words, every such number is taken for a code. Beside numbers, it is one if its distance to
    the nearest of them is larger than every step between these (9 beside grades 0 to 3, but not 4), or if it alone is
    negative beside at least three others (-1 beside grades 0 to 4, but not beside 0 and 1: worse, same, better).
    """
    values = {name: number for name in classes if (number := as_number(name)) is not None}
    # A column of a DataFrame with an empty cell holds 9.0.
    spelt = {name: f"{number:.10g}" for name, number in values.items()}
    coded = {name for name, text in spelt.items() if _CODE.fullmatch(text) or text == "9"}
    usual = np.sort([number for name, number in values.items() if name not in coded])
    step = np.diff(usual).max(initial=0)
    if len(values) < len(classes):
        found = coded if not usual.size else set[str]()
    else:
        only_positive = len(usual) >= 3 and usual[0] >= 0
        found = {
            name
            for name in coded
            if (step and np.abs(usual - values[name]).min() > step) or (only_positive and values[name] < 0)
        }
    often = {name: int((cases.label == classes.index(name)).sum()) for name in sorted(found)}
    return _name_codes(cases, often) if often else None


def _name_codes(cases: Cases, often: dict[str, int]) -> str:
    """`often`: code → how many labels it is."""
    found = " and ".join(f"{n} {'is' if n == 1 else 'are'} {code}" for code, n in often.items())
    return (
        f"Of {len(cases.label)} labels in column {cases.target.column}, {found}, unlike the others; if that stands for "
        "a missing value, leave those cells empty."
    )


def rare_note(rare: dict[str, int], where: str = "") -> str | None:
    """A sentence that explains a missing interval; None if no class is too rare."""
    who = ", ".join(number(n, "participant") + f" with {name}" * bool(name) for name, n in rare.items())
    return f"No interval: only {who}{where}, fewer than {MIN_PARTICIPANTS}." if rare else None


def _note(boot: Bootstrap) -> str | None:
    known = boot.resampled[np.isfinite(boot.resampled)]
    if not known.size:
        return "Not defined on these cases; R², for example, is not if all numbers are equal."
    if np.ptp(known) == 0:
        return (
            "Every resample gave the same value, so the interval is too narrow to be believed; "
            "only more participants can tell."
        )
    return None
