"""The part of the report that is not folded: how scans became results, what to do next, and the limits."""

import shlex
from dataclasses import dataclass

from octfm.display import number, readable
from octfm.report import words
from octfm.report.participants import Step, by_split, flow
from octfm.report.sources import Sources, lookup

NOT_FOR = (
    "Not for diagnosis, screening, triage or any decision about a patient: this is research software, not a medical "
    "device. Test it again before you use it with other scanners, protocols or populations. A good number says that "
    "features hold information, not that a model built on them is safe."
)

WHAT = "A program that turns a 3-D OCT scan into a list of numbers (features)."
FOR_WHAT = (
    "Alone it answers no clinical question: small models are fitted on its features, and this page shows how well they "
    "do."
)
UNTRAINED = (
    "Numbers of each 3-D OCT scan (features): thickness and fluid as the packaged network measures them, and those of "
    "an encoder that has learned nothing, for comparison. Small models are fitted on these features, and this page "
    "shows how well they do."
)


@dataclass(frozen=True)
class Box:
    """One box of the data flow."""

    label: str
    counts: tuple[str, ...]
    lost: str = ""
    """What is lost before the next box, in words."""


@dataclass(frozen=True)
class DataFlow:
    """The flow from files to results, as boxes and a sentence."""

    boxes: tuple[Box, ...]
    """In order: files, accepted, prepared."""
    splits: tuple[Box, ...]
    """The splits of the last box."""
    sentence: str


def data_flow(sources: Sources) -> DataFlow:
    """From the files that were found to the participants that were tested, by the counts of `participants.flow`."""
    steps = flow(sources)
    boxes: list[Box] = []
    lost: list[str] = []
    for step in (s for s in steps if s.kind not in ("split", "part")):
        if step.is_lost:
            lost.append(f"{step.volumes:,} {step.kind}")
            continue
        if boxes and lost:
            last = boxes[-1]
            boxes[-1] = Box(last.label, last.counts, ", ".join(lost))
            lost = []
        # Nothing was lost since the previous box, and its counts are the same.
        if boxes and step.label == "Prepared" and _counts(step) == boxes[-1].counts and not boxes[-1].lost:
            boxes[-1] = Box("Accepted and prepared", boxes[-1].counts)
            continue
        boxes.append(Box(step.label, _counts(step)))
    splits = tuple(Box(s.label.removesuffix(" split"), _counts(s)) for s in steps if s.kind == "split")
    whose = "Synthetic eyes, no patients: results in the generator." if sources.is_phantom else ""
    return DataFlow(tuple(boxes), splits, " ".join(filter(None, (whose, _trained(sources), _tested(sources)))))


def _counts(step: Step) -> tuple[str, ...]:
    if step.participants is None:
        return (number(step.volumes or 0, "file"),)
    volumes = () if step.volumes is None else (number(step.volumes, "volume"),)
    return (number(step.participants, "participant"), *volumes)


def _trained(sources: Sources) -> str:
    """The number of participants used in pretraining, if they are not those of the training split."""
    trained = lookup(sources.record, "store", "train_participants")
    known = {row.participant for row in by_split(sources).get("train", ())}
    before = f", and began with weights that had seen at least {number(n, 'other')}" if (n := sources.inherited) else ""
    if (unknown := sources.record.get("inherited_unknown", 0)) > n:  # their key is kept elsewhere
        before = f", and began with weights that had seen at least {unknown:,}; nobody can tell how many are others"
    if not isinstance(trained, int) or (trained == len(known) and not before):
        return ""
    return f"The encoder was pretrained on {number(trained, 'participant')}{before}."


def _tested(sources: Sources) -> str:
    probe = sources.probe
    if probe is None:
        return ""
    counts = sorted({r["n_test_participants"] for r in probe["results"] if not r.get("leakage")})
    if not counts:
        return ""
    people = number(counts[-1], "participant")
    people = people if len(counts) == 1 else f"{counts[0]:,} to {people}, by target"
    if probe.get("settings", {}).get("design") == "k-fold":
        return f"The probe tested {people}, each by a model fitted on others."
    return f"The probe tested {people} that it was not fitted on."


def next_step(sources: Sources, run: str, store: str | None) -> tuple[str, tuple[str, ...]]:
    """(sentence, commands): what to do with this result; `run` and `store` are their locations."""
    store = store or "STORE"
    probe = sources.probe
    if probe is None:
        commands = (["embed", run, "--store", store], ["probe", run, "--labels", "LABELS.csv"])
        return "Measure how good the features are, with a table of labels per participant:", _shell(*commands)
    if any(row["seen_test_participants"] for row in probe["results"]):
        text = "Tested participants had been seen in pretraining. Probe again on others:"
        return text, _shell(["probe", run, "--design", "k-fold"])
    if sources.record.get("not_pretrained"):
        text = "Too few scans to pretrain on. What the packaged network measures, scan by scan:"
        return text, _shell(["segment", "FOLDER", "--out", "eyes.csv"])
    tone, _ = words.verdict(probe)
    if sources.is_phantom:
        text = "These eyes are synthetic: whether pretraining helps you is a question for your own scans."
        return text, _shell(["demo", "--data", "FOLDER", "--labels", "TABLE", "--out", "own"])
    key = next((r["column"] for r in probe["results"] if not r.get("leakage")), None)
    labels = ["--labels", "LABELS.csv"] if probe.get("labels") else []
    trust = ["trust", run, "--store", store, *labels, *(["--target", key] if key else [])]
    why = {
        "better": "Before you build on it, compare it with thickness alone, across scanners and subgroups:",
        "worse": "A simpler method does better: do not build on these features. See what they miss:",
    }.get(tone, "Nothing is decided yet. Compare with more baselines, and test more participants if you can:")
    return why, _shell(trust)


def _shell(*commands: list[str]) -> tuple[str, ...]:
    return tuple(shlex.join(["octfm", *command]) for command in commands)


def about(sources: Sources) -> list[tuple[str, str]]:
    """Questions and answers on what was measured and how certain it is."""
    what = UNTRAINED
    if not sources.record.get("not_pretrained"):
        what = " ".join(filter(None, (WHAT, words.objective(sources).learned, FOR_WHAT)))
    return [("What is it?", what), ("How sure?", _sure(sources))]


def _sure(sources: Sources) -> str:
    probe = sources.probe
    if probe is None:
        return "Nothing is sure before a probe has been run."
    parts = ["A 95\u00a0% interval shows how far a number could move with other participants."]
    compared = words.planned(probe)
    undecided = sum(c["verdict"] == "inconclusive" or words.fails_holm(c) for c in compared)
    if compared:
        parts.append(f"Inconclusive: {undecided} of {number(len(compared), 'planned comparison')}.")
    if few := words.without_interval(probe["results"]):
        parts.append(f"Too few participants for an interval: {', '.join(map(readable, few))}.")
    leak = words.leakage(probe["results"])
    if leak is not None and words.leaks(leak):
        parts.append(
            "The features also tell scanners apart. Where clinics differ in scanners and diseases, a model may mistake "
            "one for the other."
        )
    settings = probe.get("settings", {})
    one = " with one set of folds" if settings.get("design") == "k-fold" and settings.get("seeds", 1) == 1 else ""
    parts.append(
        f"This is one training run{one}; another would give somewhat different numbers, and no other hospital's data "
        "were tested."
    )
    return " ".join(parts)
