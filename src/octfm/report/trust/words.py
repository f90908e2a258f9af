"""Findings of the trust report in sentences, one per question; none claims more than its interval allows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octfm.display import interval, number, readable
from octfm.report.words import METRICS, encoder, people_tested, target

Tone = Literal["better", "worse", "inconclusive", "measured", "none", "ok", "bad"]
NAMES = {
    **METRICS,
    "icc": "ICC(1,1)",
    "reciprocal_rank": "mean reciprocal rank",
    "neighbours": "share of the five nearest scans",
    "ece": "ECE",
    "brier": "Brier score",
}
BASELINES = {
    "random_init": "random initialisation on identical tokens",
    "histogram": "the intensity histogram",
    "tissue_map": "the tissue map alone",
    "map_and_encoder": "the tissue map and the run together",
    "covariates": "age, sex, site, scanner and image quality alone, as far as known",
    "from_scratch": "the same network trained from scratch",
}
WORDS: dict[str, str] = {
    "better": "better",
    "worse": "worse",
    "inconclusive": "inconclusive",
    "measured": "measured",
    "none": "not measured",
    "ok": "nothing found",
    "bad": "found",
}


@dataclass(frozen=True)
class Finding:
    """The answer to one question of the trust report."""

    question: str
    tone: Tone
    sentence: str
    section: str
    """Anchor of the page's section with the numbers."""


def findings(result: dict[str, Any]) -> list[Finding]:
    """One finding per question, in the order of the page."""
    return [
        *_baselines(result),
        _left_out(result),
        _domains(result),
        *_same_eye(result),
        _subgroups(result),
        *_calibration(result),
        _leakage(result),
        _neighbours(result),
        _copies(result),
    ]


def named(name: str) -> str:
    """The name of an encoder or baseline in a sentence."""
    return BASELINES.get(name, encoder(name))


def digits_of(name: str) -> int:
    """Decimals of a metric: fewer for errors in the unit of a label than for shares."""
    return 1 if name in ("mae", "predicted value") else 2


def _baselines(result: dict[str, Any]) -> list[Finding]:
    found = []
    reference = result["reference"]
    for name in dict.fromkeys(r["target"] for r in result["results"]):
        planned = [c for c in result["comparisons"] if c["target"] == name and c["planned"]]
        rows = {r["metric"]: r for r in result["results"] if (r["target"], r["encoder"]) == (name, reference)}
        # Grades are ordered, so for them agreement (kappa) says more than AUROC.
        metric = next(m for m in ("kappa", "r2", "auroc") if m in rows)
        row, own = rows[metric], [c for c in planned if (c["a"], c["metric"]) == (reference, metric)]
        text = f"In {target(name)} among {people_tested(row)}, {reference} reaches {NAMES[metric]} {interval(row)}."
        question = f"Does it beat every baseline in {target(name)}?"
        if row["low"] is None:
            text += " " + " ".join(filter(None, (row["note"], "No comparison is claimed.")))
            found.append(Finding(question, "inconclusive", text, "baselines"))
            continue
        groups: dict[str, list[str]] = {}
        for c in own:
            groups.setdefault(c["claim"], []).append(f"{named(c['b'])} ({NAMES[metric]} {_gap(c)})")
        for claim in ("worse", "better"):
            if claim in groups:
                text += f" It is {claim} than {_list(groups[claim])}."
        if "inconclusive" in groups:
            text += f" Against {_list(groups['inconclusive'])} the difference is inconclusive."
        for c in (c for c in planned if c["a"] != reference and c["metric"] == metric):
            joint, verdict = named(c["a"]), f"{c['claim']} against {named(c['b'])}"
            text += f" {joint[:1].upper()}{joint[1:]}: {verdict} ({NAMES[metric]} {_gap(c)})."
        found.append(Finding(question, _overall(groups), text, "baselines"))
    return found


def _overall(claims: Iterable[str]) -> Tone:
    """Worse if any claim is, better if all are."""
    claims = set(claims)
    return "worse" if "worse" in claims else "better" if claims == {"better"} else "inconclusive"


def _left_out(result: dict[str, Any]) -> Finding:
    question, part = "Does it hold on a scanner that the probe has never seen?", result["left_out_scanner"]
    planned = [c for c in part["comparisons"] if c["planned"]]
    if not planned:
        return Finding(
            question, "none", part["sentence"] or "Too few participants per scanner for an interval.", "left-out"
        )
    mean, single = ([c for c in planned if (c["scanner"] is None) is over_all] for over_all in (True, False))
    lost, gained = ([c for c in single if c["claim"] == claim] for claim in ("worse", "better"))
    parts = []
    for c in mean:
        change = f"{NAMES[c['metric']]} {interval(c)}"
        neither = "a loss is neither shown nor excluded"
        if c["verdict"] != "inconclusive":
            neither = "the interval of the change excludes 0, but not after Holm's correction"
        what = {"worse": "it loses", "better": "it gains", "inconclusive": neither}
        asked = (c["target"], c["encoder"])
        alike = [o for o in part["comparisons"] if o["scanner"] is not None and (o["target"], o["encoder"]) == asked]
        # Scanners with too few participants are left out of the mean.
        counted = sum(o["planned"] for o in alike)
        over = f"{counted} of {len(alike)} " if counted < len(alike) else ""
        parts.append(
            f"In {target(c['target'])} {what[c['claim']]}: {change}, mean over {over}scanners, against a probe fitted "
            "on as many participants of the tested scanner."
        )
    if single:
        on = _list([f"{readable(c['scanner'])} ({target(c['target'])}, {_gap(c)})" for c in lost])
        parts.append(
            f"Scanner by scanner, {len(lost)} of {len(single)} comparisons show a loss{f': {on}' if lost else ''}."
        )
    if gained:
        parts.append(f"{len(gained)} show{'s' * (len(gained) == 1)} a gain.")
    tone = _overall(c["claim"] for c in mean)
    return Finding(question, "worse" if lost and tone != "better" else tone, " ".join(parts), "left-out")


def _domains(result: dict[str, Any]) -> Finding:
    question, part = "Is pretraining on several scanners worth it?", result["domains"]
    if part["sentence"]:
        return Finding(question, "none", part["sentence"], "domains")
    parts, tones = [], set()
    for c in [c for c in part["comparisons"] if c["scanner"] is None]:
        a, b = (len(part["pretrained_on"].get(name, [])) for name in (c["a"], c["b"]))
        who = f"{c['a']} ({a} scanner{'s' * (a != 1)}) against {c['b']} ({b} scanner{'s' * (b != 1)})"
        if a == b and part["pretrained_on"].get(c["a"]) == part["pretrained_on"].get(c["b"]):
            who += " (the same scanners, so this compares two runs and no domains)"
        gap = f"{NAMES[c['metric']]} {interval(c)}"
        after = " after Holm's correction" if c["verdict"] != "inconclusive" else ""
        verdict = {"better": "is better", "worse": "is worse", "inconclusive": f"is inconclusive{after}"}[c["claim"]]
        parts.append(f"In {target(c['target'])}, {who} {verdict}: {gap}.")
        tones.add(c["claim"])
    single = [c for c in part["comparisons"] if c["scanner"] is not None]
    stands = [c for c in single if c["claim"] != "inconclusive"]
    if single:
        which = _list([f"{c['claim']} on {readable(c['scanner'])} ({target(c['target'])}, {_gap(c)})" for c in stands])
        parts.append(
            f"Scanner by scanner, {len(stands)} of {len(single)} differences hold after "
            f"Holm{f': {which}' if stands else ''}."
        )
    return Finding(question, _overall(tones), " ".join(parts), "domains")


def _same_eye(result: dict[str, Any]) -> list[Finding]:
    question, part = "Does it give one eye the same answer on two scanners?", result["same_eye"]
    if part["sentence"]:
        return [Finding(question, "none", part["sentence"], "same-eye")]
    reference, parts = result["reference"], []
    for row in [r for r in part["agreement"] if r["encoder"] == reference]:
        parts.append(
            f"The {row['quantity']} in {target(row['target'])} agrees with ICC(1,1) {interval(row)} over "
            f"{row['n_eyes']} eyes of {row['n_participants']} participants."
        )
        if changed := row.get("n_changed"):
            parts.append(
                f"In {changed} of these eyes the label itself differs between scanners, as after treatment between two "
                "visits; there not all of the disagreement is the scanners'."
            )
    limits = [p for p in part["pairs"] if p["bland_altman"] and p["quantity"] == "predicted value"]
    if limits:
        worst = max(limits, key=lambda p: abs(p["bland_altman"]["bias"]["estimate"] or 0))
        b = worst["bland_altman"]
        sure = (b["bias"]["low"] or 0) > 0 or (b["bias"]["high"] or 0) < 0
        text = f"{interval(b['bias'], digits=1)}" + ("" if sure else ", whose interval includes 0")
        parts.append(
            f"The largest mean offset of {readable(worst['target'])} is between {readable(worst['a'])} and "
            f"{readable(worst['b'])}: {text}; limits of agreement {b['lower']['estimate']:.1f} to "
            f"{b['upper']['estimate']:.1f}, which hold 95\u00a0% of differences if these are normally distributed."
        )
    parts.append(
        "ICC depends on how different the eyes are; a probe that predicts the same number for every eye has no ICC."
    )
    if len(parts) > 1:
        found = [Finding(question, "measured", " ".join(parts), "same-eye")]
    else:
        found = [Finding(question, "none", part["skipped"][0]["sentence"], "same-eye")]
    own = next((r for r in part["retrieval"] if r["encoder"] == reference), None)
    if own:
        chance, gallery = own["chance"]["first"], own["median_gallery"]
        text = (
            f"In {own['n_queries']:,} searches for the eye of a tested scan among those of another "
            f"scanner, a share of {interval(own['first'])} find it first (by chance {chance:.3f}, among a median of "
            f"{gallery:.0f}); median rank "
            f"{own['median_rank']:g}."
        )
        text, tone = _against(text, [c for c in part["comparisons"] if c["metric"] == "reciprocal_rank"])
        found.append(Finding("Does it find the same eye on another scanner?", tone, text, "same-eye"))
    return found


def _against(text: str, compared: Sequence[dict[str, Any]]) -> tuple[str, Tone]:
    """The text, continued by what the comparisons claim, and their overall tone."""
    groups: dict[str, list[str]] = {}
    for c in compared:
        groups.setdefault(c["claim"], []).append(named(c["b"]))
    for claim in ("better", "worse"):
        if claim in groups:
            text += f" That is {claim} than {_list(groups[claim])}."
    if "inconclusive" in groups:
        text += f" Against {_list(groups['inconclusive'])} it is inconclusive."
    return text, _overall(groups)


def _subgroups(result: dict[str, Any]) -> Finding:
    question, part = "Is it worse for some?", result["subgroups"]
    if part["sentence"]:
        return Finding(question, "none", part["sentence"], "subgroups")
    planned = [c for c in part["comparisons"] if c["planned"]]
    if not planned:
        return Finding(question, "none", "No group has 10 participants per class.", "subgroups")
    silent = len(part["comparisons"]) - len(planned)
    stands = [c for c in planned if c["claim"] != "inconclusive"]
    text = f"{len(stands)} of {len(planned)} differences between a group and everybody else hold after Holm"
    if stands:
        text += ": " + "; ".join(
            f"{c['claim']} for {c['group']} {readable(c['value'])} than for {readable(c['against'])} in "
            f"{target(c['target'])} ({NAMES[c['metric']].removesuffix(' (less is better)')} "
            f"{interval(c, digits=digits_of(c['metric']))})"
            for c in stands
        )
    text += "."
    if silent:
        text += f" {number(silent, 'more difference')} cannot be judged, with fewer than 10 participants per class."
    if not stands:
        text += " That is no proof of fairness: there may be gaps as large as the intervals are wide."
    tone: Tone = "worse" if any(c["claim"] == "worse" for c in stands) else "inconclusive"
    return Finding(question, tone, text, "subgroups")


def _calibration(result: dict[str, Any]) -> list[Finding]:
    part, found = result["calibration"], []
    if part["sentence"]:
        return [Finding("Do its probabilities mean what they say?", "none", part["sentence"], "calibration")]
    for row in [r for r in part["results"] if r["encoder"] == result["reference"]]:
        question = f"Do its probabilities mean what they say in {target(row['target'])}?"
        honest = f"{row['honest_ece']['mean']:.2f} (up to {row['honest_ece']['high']:.2f})"
        text = f"ECE {interval(row['ece'])}; perfectly calibrated probabilities would score {honest} on as few cases."
        if row["note"]:
            found.append(Finding(question, "inconclusive", f"{text} {row['note']}", "calibration"))
            continue
        wrong = row["verdict"] in ("overconfident", "underconfident", "miscalibrated")
        verdict = "No miscalibration is shown, which is not the same as being calibrated"
        text += f" It is {row['verdict']}" if wrong else f" {verdict}"
        sure, right = f"{row['mean_confidence']:.0%}", f"{row['accuracy']:.0%}"
        text += f": it is {sure} sure on average and {right} of its answers are right."
        found.append(Finding(question, "bad" if wrong else "inconclusive", text, "calibration"))
    return found


def _leakage(result: dict[str, Any]) -> Finding:
    question, part = "Do its features show the scanner?", result["leakage"]
    rows = [r for r in part["results"] if r["encoder"] == result["reference"]]
    if not rows:
        return Finding(question, "none", part["sentence"] or "Not measured.", "leakage")
    row = next((r for r in rows if r["metric"] == "balanced_accuracy"), rows[0])
    text = (
        f"A linear probe recognises the scanner with balanced accuracy {interval(row)}; guessing gives "
        f"{row['chance']:.2f}."
    )
    if row["low"] is None:
        return Finding(question, "inconclusive", f"{text} {row['note']}", "leakage")
    leaks = row["low"] > row["chance"]
    text += " Whatever is confounded with the scanner can be learned through it." if leaks else ""
    text += " More than guessing is not shown." if not leaks else ""
    planned = [c for c in part["comparisons"] if c["planned"]]
    more, less = ([named(c["b"]) for c in planned if c["claim"] == claim] for claim in ("worse", "better"))
    text += f" It leaks more than {_list(more)}." if more else ""
    text += f" It leaks less than {_list(less)}." if less else ""
    # Less leakage is better, so "better" comparisons do not improve the tone of a leak.
    tone: Tone = ("worse" if more else "bad") if leaks else "inconclusive"
    return Finding(question, tone, text, "leakage")


def _neighbours(result: dict[str, Any]) -> Finding:
    question, part = "Do the nearest scans share the disease or the scanner?", result["neighbours"]
    if part["sentence"]:
        return Finding(question, "none", part["sentence"], "neighbours")
    rows = [r for r in part["results"] if r["encoder"] == result["reference"]]
    parts = []
    for r in rows:
        what = "the scanner" if r["leakage"] else f"the class of {readable(r['target'])}"
        chance = f"by chance {r['chance']:.2f}"
        parts.append(f"Of the five nearest scans of other participants, {interval(r)} share {what} ({chance}).")
    tones: set[Tone] = set()
    planned = [c for c in part["comparisons"] if c["planned"]]
    for name in dict.fromkeys(c["target"] for c in planned):
        text, tone = _against("", [c for c in planned if c["target"] == name])
        text = text.strip()
        parts.append(f"For the class of {readable(name)}: {text[:1].lower()}{text[1:]}")
        tones.add(tone)
    return Finding(question, _overall(tones) if tones else "measured", " ".join(parts), "neighbours")


def _copies(result: dict[str, Any]) -> Finding:
    question, part = "Is a tested scan in the training data under another name?", result["copies"]
    exact, near = len(part["exact"]), len(part["near"])
    if exact or near:
        hold = "holds" if exact == 1 else "hold"
        text = f"{number(exact, 'pair')} {hold} the same voxels and {near} more the same speckle, across the split or "
        text += "under two participants. Results above are too good until they are removed."
        return Finding(question, "bad", text, "copies")
    known = f"{part['fingerprints']} of the volumes have a fingerprint of their file"
    highest = f"highest correlation {part['highest_correlation']:.2f}, threshold {part['threshold']:.2f}"
    text = f"No pair has the same voxels ({known}), and none of the {part['looked_at']} pairs with the nearest vectors "
    text += f"has the same speckle ({highest})."
    return Finding(question, "ok", f"{text} Copies whose vectors are far apart would be missed.", "copies")


def _gap(c: dict[str, Any]) -> str:
    """The difference alone, with enough digits not to read as 0."""
    return interval({"difference": c["difference"]})


def _list(items: Sequence[str]) -> str:
    items = list(items)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""
