"""The trust report in plain words: one finding per question, and never more than its interval allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octfm.report.words import METRICS, TARGETS, encoder, interval

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
    "metadata": "age, site and scanner alone",
    "from_scratch": "the same network trained from scratch",
}
WORDS: dict[str, str] = {
    "better": "better",
    "worse": "worse",
    "inconclusive": "inconclusive",
    "measured": "measured",
    "none": "not asked",
    "ok": "nothing found",
    "bad": "found",
}


@dataclass(frozen=True)
class Finding:
    question: str
    tone: Tone
    sentence: str
    section: str
    """Where on the page the numbers are."""


def findings(result: dict[str, Any]) -> list[Finding]:
    """One per question, in the order of the page."""
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
    return BASELINES.get(name, encoder(name))


def target(name: str) -> str:
    return TARGETS.get(name, f"predicting {name.replace('_', ' ')}").removesuffix(" (leakage: less is better)")


def digits_of(name: str) -> int:
    """Errors in the unit of a label need fewer digits than shares."""
    return 1 if name in ("mae", "predicted value") else 2


def _baselines(result: dict[str, Any]) -> list[Finding]:
    found = []
    reference = result["reference"]
    seen = result["cohort"]["tested_seen_in_pretraining"]
    for name in dict.fromkeys(r["target"] for r in result["results"]):
        own = [c for c in result["comparisons"] if c["target"] == name and c["planned"]]
        metric = own[0]["metric"] if own else "auroc"
        if any(c["metric"] == "kappa" for c in own):
            metric = "kappa"
        own = [c for c in own if c["metric"] == metric]
        row = next(
            r for r in result["results"] if (r["target"], r["encoder"], r["metric"]) == (name, reference, metric)
        )
        people = f"{row['n_test_participants']} participants"
        people += f", {seen} of whom pretraining had seen" if seen else " it had never seen"
        text = f"In {target(name)} among {people}, {reference} reaches {NAMES[metric]} {interval(row)}."
        if row["low"] is None:
            found.append(
                Finding(_question(name), "inconclusive", f"{text} {row['note']} No comparison is claimed.", "baselines")
            )
            continue
        groups: dict[str, list[str]] = {}
        for c in own:
            groups.setdefault(c["claim"], []).append(f"{named(c['b'])} ({NAMES[metric]} {c['difference']:+.2f})")
        for claim in ("worse", "better"):
            if claim in groups:
                text += f" It is {claim} than {_list(groups[claim])}."
        if "inconclusive" in groups:
            text += f" Against {_list(groups['inconclusive'])} the difference is inconclusive."
        tone: Tone = "worse" if "worse" in groups else "better" if set(groups) == {"better"} else "inconclusive"
        found.append(Finding(_question(name), tone, text, "baselines"))
    return found


def _question(name: str) -> str:
    return f"Does it beat every baseline in {target(name)}?"


def _left_out(result: dict[str, Any]) -> Finding:
    question, part = "Does it hold on a scanner that the probe has never seen?", result["left_out_scanner"]
    planned = [c for c in part["comparisons"] if c["planned"]]
    if not planned:
        return Finding(
            question, "none", part["sentence"] or "Too few participants per scanner for an interval.", "left-out"
        )
    mean = [c for c in planned if c["scanner"] is None]
    lost = [c for c in planned if c["scanner"] is not None and c["claim"] == "worse"]
    gained = [c for c in planned if c["scanner"] is not None and c["claim"] == "better"]
    parts = []
    for c in mean:
        change = f"{NAMES[c['metric']]} {interval(c)}"
        said = {
            "worse": f"In {target(c['target'])} it loses: {change}",
            "better": f"In {target(c['target'])} it gains: {change}",
            "inconclusive": f"In {target(c['target'])} a loss is neither shown nor excluded: {change}",
        }[c["claim"]]
        parts.append(
            f"{said}, mean over scanners, against a probe fitted on as many participants of the tested scanner."
        )
    singles = len([c for c in planned if c["scanner"] is not None])
    if singles:
        on = _list([f"{_plain(c['scanner'])} ({target(c['target'])}, {c['difference']:+.2f})" for c in lost])
        parts.append(
            f"Scanner by scanner, {len(lost)} of {singles} comparisons show a loss{f': {on}' if lost else ''}."
        )
    if gained:
        parts.append(f"{len(gained)} show a gain.")
    tone: Tone = "worse" if lost or any(c["claim"] == "worse" for c in mean) else "inconclusive"
    if mean and all(c["claim"] == "better" for c in mean):
        tone = "better"
    return Finding(question, tone, " ".join(parts), "left-out")


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
        verdict = {"better": "is better", "worse": "is worse", "inconclusive": "is inconclusive"}[c["claim"]]
        parts.append(f"In {target(c['target'])}, {who} {verdict}: {gap}.")
        tones.add(c["claim"])
    single = [c for c in part["comparisons"] if c["scanner"] is not None]
    stands = [c for c in single if c["claim"] != "inconclusive"]
    if single:
        which = _list(
            [f"{c['claim']} on {_plain(c['scanner'])} ({target(c['target'])}, {c['difference']:+.2f})" for c in stands]
        )
        parts.append(
            f"Scanner by scanner {len(stands)} of {len(single)} differences stand{f': {which}' if stands else ''}."
        )
    tone: Tone = "inconclusive"
    if len(tones) == 1:
        tone = tones.pop()
    elif "worse" in tones:
        tone = "worse"
    return Finding(question, tone, " ".join(parts), "domains")


def _same_eye(result: dict[str, Any]) -> list[Finding]:
    question, part = "Does it say the same of one eye on two scanners?", result["same_eye"]
    if part["sentence"]:
        return [Finding(question, "none", part["sentence"], "same-eye")]
    reference, parts = result["reference"], []
    for row in [r for r in part["agreement"] if r["encoder"] == reference]:
        parts.append(
            f"The {row['quantity']} in {target(row['target'])} agrees with ICC(1,1) {interval(row)} over {row['n_eyes']} eyes of "
            f"{row['n_participants']} participants."
        )
    limits = [p for p in part["pairs"] if p["bland_altman"] and p["quantity"] == "predicted value"]
    if limits:
        worst = max(limits, key=lambda p: abs(p["bland_altman"]["bias"]["estimate"] or 0))
        b = worst["bland_altman"]
        sure = (b["bias"]["low"] or 0) > 0 or (b["bias"]["high"] or 0) < 0
        text = f"{interval(b['bias'], digits=1)}" + ("" if sure else ", which includes no offset")
        parts.append(
            f"The largest mean offset of {_plain(worst['target'])} is between {_plain(worst['a'])} and {_plain(worst['b'])}: {text}; "
            f"95\u00a0% of eyes lie between {interval({'estimate': b['lower']['estimate']}, digits=1)} and "
            f"{interval({'estimate': b['upper']['estimate']}, digits=1)}."
        )
    parts.append(
        "ICC depends on how different the eyes are; a probe that says one number of every eye would have none."
    )
    measured = len(parts) > 1
    found = [
        Finding(
            question,
            "measured" if measured else "none",
            " ".join(parts) if measured else part["skipped"][0]["sentence"],
            "same-eye",
        )
    ]
    own = next((r for r in part["retrieval"] if r["encoder"] == reference), None)
    if own:
        chance, gallery = own["chance"]["first"], own["median_gallery"]
        text = (
            f"Of {own['n_queries']} scans, a share of {interval(own['first'])} have the same eye first among the tested scans of another "
            f"scanner (by chance {chance:.3f} of a median {gallery:.0f}); median rank {own['median_rank']:g}."
        )
        text, tone = _against(text, [c for c in part["comparisons"] if c["metric"] == "reciprocal_rank"])
        found.append(Finding("Does it find the same eye on another scanner?", tone, text, "same-eye"))
    return found


def _against(text: str, compared: Sequence[dict[str, Any]]) -> tuple[str, Tone]:
    groups: dict[str, list[str]] = {}
    for c in compared:
        groups.setdefault(c["claim"], []).append(named(c["b"]))
    for claim in ("better", "worse"):
        if claim in groups:
            text += f" That is {claim} than {_list(groups[claim])}."
    if "inconclusive" in groups:
        text += f" Against {_list(groups['inconclusive'])} it is inconclusive."
    return text, "worse" if "worse" in groups else "better" if set(groups) == {"better"} else "inconclusive"


def _subgroups(result: dict[str, Any]) -> Finding:
    question, part = "Is it worse for some?", result["subgroups"]
    if part["sentence"]:
        return Finding(question, "none", part["sentence"], "subgroups")
    planned = [c for c in part["comparisons"] if c["planned"]]
    silent = len(part["comparisons"]) - len(planned)
    stands = [c for c in planned if c["claim"] != "inconclusive"]
    text = f"{len(stands)} of {len(planned)} gaps stand after Holm"
    if stands:
        text += ": " + "; ".join(
            f"{c['claim']} for {c['group']} {_plain(c['value'])} than for {_plain(c['against'])} in {target(c['target'])} "
            f"({NAMES[c['metric']].removesuffix(' (less is better)')} {interval(c, digits=digits_of(c['metric']))})"
            for c in stands
        )
    text += "."
    if silent:
        text += f" {silent} more groups have fewer than 10 participants per class, so nothing can be said of them."
    if not stands:
        text += " That is no proof of fairness: a gap as wide as the intervals may be there."
    tone: Tone = "worse" if any(c["claim"] == "worse" for c in stands) else "inconclusive"
    return Finding(question, tone, text, "subgroups")


def _calibration(result: dict[str, Any]) -> list[Finding]:
    part, found = result["calibration"], []
    if part["sentence"]:
        return [Finding("Do its probabilities mean what they say?", "none", part["sentence"], "calibration")]
    for row in [r for r in part["results"] if r["encoder"] == result["reference"]]:
        question = f"Do its probabilities mean what they say in {target(row['target'])}?"
        honest = f"{row['honest_ece']['mean']:.2f} (up to {row['honest_ece']['high']:.2f})"
        text = f"ECE {interval(row['ece'])}; probabilities that were true would score {honest} with as few cases."
        if row["note"]:
            found.append(Finding(question, "inconclusive", f"{text} {row['note']}", "calibration"))
            continue
        wrong = row["verdict"] in ("overconfident", "underconfident")
        says = (
            f"It is {row['verdict']}"
            if wrong
            else "No miscalibration is shown, which is not the same as being calibrated"
        )
        text += f" {says}: it is {row['mean_confidence']:.0%} sure on average and {row['accuracy']:.0%} of its answers are right."
        found.append(Finding(question, "worse" if wrong else "inconclusive", text, "calibration"))
    return found


def _leakage(result: dict[str, Any]) -> Finding:
    question, part = "Can the scanner be told from its features?", result["leakage"]
    rows = [r for r in part["results"] if r["encoder"] == result["reference"]]
    if not rows:
        return Finding(question, "none", part["sentence"] or "Not measured.", "leakage")
    row = next((r for r in rows if r["metric"] == "balanced_accuracy"), rows[0])
    text = (
        f"A linear probe tells the scanner with balanced accuracy {interval(row)}; guessing gives {row['chance']:.2f}."
    )
    if row["low"] is None:
        return Finding(question, "inconclusive", f"{text} {row['note']}", "leakage")
    told = row["low"] > row["chance"]
    text += (
        " Whatever is confounded with the scanner can be learned through it."
        if told
        else " More than guessing is not shown."
    )
    text, tone = _less(text, [c for c in part["comparisons"] if c["planned"]])
    return Finding(
        question, "worse" if told and tone == "worse" else "bad" if told else "inconclusive", text, "leakage"
    )


def _less(text: str, compared: Sequence[dict[str, Any]]) -> tuple[str, Tone]:
    """Leakage: better is less."""
    more, less = ([named(c["b"]) for c in compared if c["claim"] == claim] for claim in ("worse", "better"))
    text += f" It leaks more than {_list(more)}." if more else ""
    text += f" It leaks less than {_list(less)}." if less else ""
    return text, "worse" if more else "better" if less else "inconclusive"


def _neighbours(result: dict[str, Any]) -> Finding:
    question, part = "What lies next to a scan: disease, or the scanner?", result["neighbours"]
    if part["sentence"]:
        return Finding(question, "none", part["sentence"], "neighbours")
    rows = [r for r in part["results"] if r["encoder"] == result["reference"]]
    parts = []
    for r in rows:
        what = "the scanner" if r["leakage"] else f"the class of {_plain(r['target'])}"
        parts.append(
            f"Of the five nearest scans of other participants, {interval(r)} share {what} (by chance {r['chance']:.2f})."
        )
    tones: set[Tone] = set()
    planned = [c for c in part["comparisons"] if c["planned"]]
    for name in dict.fromkeys(c["target"] for c in planned):
        text, tone = _against("", [c for c in planned if c["target"] == name])
        text = text.strip()
        parts.append(f"For the class of {_plain(name)}: {text[:1].lower()}{text[1:]}")
        tones.add(tone)
    whole: Tone = (
        "worse" if "worse" in tones else "better" if tones == {"better"} else "inconclusive" if tones else "measured"
    )
    return Finding(question, whole, " ".join(parts), "neighbours")


def _copies(result: dict[str, Any]) -> Finding:
    question, part = "Is a tested scan in the training data under another name?", result["copies"]
    exact, near = len(part["exact"]), len(part["near"])
    if exact or near:
        text = f"{exact} pairs hold the same voxels and {near} more the same speckle, across the split or under two participants."
        return Finding(question, "bad", f"{text} Results above are too good until they are removed.", "copies")
    known = f"{part['fingerprints']} of the volumes have a fingerprint of their file"
    highest = f"highest correlation {part['highest_correlation']:.2f}, threshold {part['threshold']:.2f}"
    text = f"No pair has the same voxels ({known}), and of {part['looked_at']} pairs that the vectors suspect none has the same speckle"
    text += f" ({highest})."
    return Finding(question, "ok", f"{text} A copy that the vectors do not suspect would be missed.", "copies")


def _list(items: Sequence[str]) -> str:
    items = list(items)
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1] if items else ""


def _plain(name: str) -> str:
    return str(name).replace("_", " ")
