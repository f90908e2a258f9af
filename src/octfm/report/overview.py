"""The report's two-minute overview for clinicians: what the encoder is, its data, how good, how certain, and its
limits."""

from typing import Any

from octfm.evaluation.scoring import HEADLINE
from octfm.report import words
from octfm.report.participants import by_split, characteristics
from octfm.report.sources import Sources

PLAIN = {
    "disease": "a participant with a disease from a healthy one",
    "diagnosis": "the diagnoses from each other",
    "study_group": "the study groups from each other",
}
NOT_FOR = (
    "Diagnosis, screening, triage or any decision about a patient: this is research software, not a medical device. "
    "Other scanners, protocols or populations than those named here, without a new test. A good number here says that "
    "features hold information, not that a model built on them is safe."
)


def two_minutes(sources: Sources) -> list[tuple[str, str]]:
    """Five questions and answers; every number comes from the run's files."""
    return [
        ("What is it?", _what(sources)),
        ("On whom?", _whom(sources)),
        ("How good?", _good(sources.probe)),
        ("How sure?", _sure(sources)),
        ("Not for", NOT_FOR),
    ]


def _what(sources: Sources) -> str:
    trained = (sources.record.get("store") or {}).get("train_participants")
    on = f"the scans of {trained:,} participants" if isinstance(trained, int) else "scans"
    return (
        f"A program that turns a 3-D OCT scan into a list of numbers (features). It learned from {on} without any "
        "label, by predicting hidden parts of the retina. It answers no clinical question by itself: small models are "
        "fitted on its features, and this page says how well they do."
    )


def _whom(sources: Sources) -> str:
    splits = by_split(sources)
    if not splits:
        return "Not known to this page: neither a catalog nor a prepared store was given to it."
    people = {a.participant for own in splits.values() for a in own}
    scanners = sorted({a.scanner.replace("_", " ") for own in splits.values() for a in own})
    kind = "Synthetic eyes, no patients:" if sources.is_phantom else "Scans:"
    volumes = sum(map(len, splits.values()))
    text = f"{kind} {volumes:,} volumes of {len(people):,} participants from {', '.join(scanners)}"
    ages = next((cells for name, cells in characteristics(sources) if name.startswith("Age")), None)
    known = [f"{split} {cell}" for split, cell in zip(splits, ages or (), strict=False) if not cell.startswith("fewer")]
    text += f"; age, median and quartiles: {', '.join(known)}." if known else "."
    probe = sources.probe or {}
    if probe.get("settings", {}).get("design") == "k-fold":
        tested = max((r["n_test_participants"] for r in probe["results"]), default=0)
        text += f" Each of {tested:,} participants was tested by a model that had learned from others."
    elif "test" in splits:
        others = len({a.participant for a in splits["test"]})
        text += f" Models were tested on {others:,} other participants than they learned from."
    return text


def _good(probe: dict[str, Any] | None) -> str:
    if probe is None:
        return "Not measured yet: no probe has been run."
    results = [r for r in probe["results"] if r["estimate"] is not None and not r.get("leakage")]
    if not results:
        return "No question could be measured; the probe section says why."
    first, sentences = results[0]["encoder"], []
    for target in dict.fromkeys(r["target"] for r in results):
        own = {r["metric"]: r for r in results if r["target"] == target and r["encoder"] == first}
        if row := own.get("auroc"):
            what = PLAIN.get(target, f"{target.replace('_', ' ')}")
            sentences.append(f"Telling {what}: right in {_of_100(row)} pairs out of 100 (guessing: 50).")
        elif row := own.get("r2"):
            what = "central retinal thickness" if target == "cst_um" else target.replace("_", " ")
            off = own.get("mae")
            unit = " µm" if target.endswith("_um") else ""
            miss = f", off by {off['estimate']:.3g}{unit} on average" if off is not None else ""
            sentences.append(
                f"Predicting {what}: {_of_100(row)} % of the differences between people explained{miss} "
                "(guessing: 0 %)."
            )
    # Of the key result, only what follows the numbers: its comparison with the baseline.
    _, key = words.key_result(probe)
    compared = [part for part in key.split(". ")[1:] if part.startswith(("That is", "The difference", "Against"))]
    return " ".join([*sentences[:4], *(f"{part.rstrip('.')}." for part in compared)])


def _of_100(row: dict[str, Any]) -> str:
    text = f"{100 * row['estimate']:.0f}"
    return text if row["low"] is None else f"{text} ({100 * row['low']:.0f} to {100 * row['high']:.0f})"


def _sure(sources: Sources) -> str:
    probe = sources.probe
    if probe is None:
        return "Nothing is sure before a probe has been run."
    parts = [
        "The numbers in brackets are 95\u00a0% intervals: with other participants the result would probably lie there."
    ]
    compared = [c for c in probe["comparisons"] if not c.get("leakage") and c["metric"] in HEADLINE]
    undecided = sum(c["verdict"] == "inconclusive" for c in compared)
    if compared:
        parts.append(f"Of {len(compared)} comparisons with simpler methods, {undecided} are inconclusive.")
    few = sorted({r["target"].replace("_", " ") for r in probe["results"] if r["low"] is None})
    if few:
        parts.append(f"Too few participants for an interval: {', '.join(few)}.")
    if seen := words.tested_before(probe["results"]):
        parts.append(f"Caution: {seen} tested participants had been seen in training, so the numbers are too good.")
    leak = words.leakage(probe["results"])
    if leak is not None and leak["estimate"] > 0.6:
        parts.append(
            "The features also tell scanners apart, which a model may mistake for disease where clinics differ in both."
        )
    one = "" if probe.get("settings", {}).get("seeds", 1) > 1 else " with one set of folds"
    parts.append(
        f"It is one training run{one}; another would give somewhat other numbers, and no other hospital's data were "
        "tested."
    )
    return " ".join(parts)
