"""The model card of a run: Markdown with front matter for the Hugging Face hub; unknown facts are "not stated".

The sections follow Mitchell et al. 2019, "Model Cards for Model Reporting" (doi 10.1145/3287560.3287596).
"""

import re
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import yaml

from octfm.display import duration, interval, markdown
from octfm.errors import one_line
from octfm.evaluation.scoring import HEADLINE, fails_holm
from octfm.io.location import Location
from octfm.report import words
from octfm.report.card.paper import bibtex, by, setting, shareable_run
from octfm.report.participants import by_split, characteristics, flow, tested
from octfm.report.shareable import NAME
from octfm.report.sources import Sources, lookup, seconds_per_step, series

NOT_STATED = "not stated"
HUB_LICENCES = ("apache-2.0", "mit", "bsd-3-clause", "gpl-3.0", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0",
                "cc-by-nc-sa-4.0", "cc-by-nc-nd-4.0", "openrail")  # fmt: skip
"""Licences whose identifiers the hub knows; any other one is `other` with its name."""
HUB_DATASETS = "https://huggingface.co/datasets/"
TASKS = {"binary": "image-classification", "multiclass": "image-classification", "ordinal": "image-classification"}
MARK = {"all": "", "split": "of these: ", "part": "of these: "}
USAGE = """```python
import octfm

encoder = octfm.load_encoder("{run}")                      # weights, and the preprocessing they expect
vector = encoder.embed(octfm.read_volume("scan.dcm"))      # float32: {pooled}
tokens = encoder.embed_tokens(octfm.read_volume("scan.dcm"))  # float32 [d, h, w, {width}]
```"""
INTENDED = """## Intended use

For research: frozen features of macular OCT volumes for probes, retrieval, segmentation or fine-tuning, on scanners and
participants that are described below, evaluated again on your own data with participant-level splits.

## Not for

- Diagnosis, screening, triage or any decision about a patient. This is research software, not a medical device, and no
  regulator has seen it.
- Participants, scanners or protocols other than those described below, without a new evaluation: features may carry the
  scanner more than the eye.
- Identifying people. Retinal images are biometric data."""


_text = partial(escape, quote=False)
"""Text of Markdown in which nothing opens an HTML element."""


@dataclass(frozen=True)
class Statements:
    """Statements that no file of a run contains, which the publisher of the weights has to make."""

    licence: str | None = None
    """Licence of the weights: an identifier (apache-2.0, cc-by-nc-4.0), or words with the address of its text."""
    data_agreement: str | None = None
    """Terms of use of the pretraining data, and whether they allow the weights to be distributed."""
    dataset: str | None = None
    """Name of the data set."""
    contact: str | None = None


def model_card(
    run: str | Path,
    *,
    catalog: str | Location | None = None,
    store: str | Location | None = None,
    statements: Statements = Statements(),
    usage: str | None = None,
    name: str | None = None,
) -> str:
    """The text of a model card (README.md on the hub) for a run folder; `catalog` and `store` add the participants.

    `usage` replaces the example of how to load the weights; `name` is the model's name. Counts of fewer than five
    people are withheld, and no path, date, participant or acquisition is named (octfm.report.shareable). Raises
    EvaluationError if `run` is no run folder.
    """
    sources, name = shareable_run(run, catalog, store), name or NAME
    if usage is None:
        pooled = words.POOLS.get(setting(sources, "objective", "pool"), words.POOLS["mean"])
        place = "folder or hub id" if name == NAME else one_line(name)  # code, where nothing is escaped
        usage = USAGE.format(run=place, width=setting(sources, "model", "width"), pooled=pooled)
    parts = [
        _front_matter(sources, statements, name),
        f"# {markdown(name)}: a 3-D encoder for retinal OCT",
        _key(sources),
        _model(sources, name),
        f"## How to use it\n\n{usage}",
        INTENDED,
        _terms(sources, statements),
        _data(sources, statements),
        _training(sources),
        _evaluation(sources.probe),
        _limits(sources),
        "## Citation\n\n```bibtex\n" + bibtex(sources, name) + "```",
        f"## Contact\n\n{markdown(statements.contact, links=True) if statements.contact else 'Not stated.'}",
    ]
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _front_matter(sources: Sources, statements: Statements, name: str) -> str:
    facts: dict[str, Any] = {}
    licence = (statements.licence or NOT_STATED).strip()
    # The hub rejects an unknown identifier, but takes "other" with a name and a link to the text.
    if licence.lower() in HUB_LICENCES:
        facts["license"] = licence.lower()
    else:
        link = next((found.rstrip(".,;") for found in re.findall(r"https?://[^\s<>()\[\]]+", licence)), "")
        slugs = (re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") for text in (licence.replace(link, ""), licence))
        facts |= {"license": "other", "license_name": next(filter(None, slugs), "not-stated")}
        facts |= {"license_link": link} if link else {}
    how = words.objective(sources).tags
    tags = f"oct optical-coherence-tomography retina ophthalmology medical 3d {how} pytorch"
    facts |= {"library_name": "octfm", "pipeline_tag": "image-feature-extraction", "tags": tags.split()}
    if dataset := _hub_id(statements.dataset or ""):
        facts["datasets"] = [dataset]
    if index := _index(sources.probe, name):
        facts["model-index"] = index
    return "---\n" + yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=1000) + "---"


def _hub_id(dataset: str) -> str:
    """What can be the id of a data set on the hub, which rejects a card that names another in its metadata."""
    parts = dataset.removeprefix(HUB_DATASETS).split("/")
    words = [word for part in parts if (word := re.sub(r"(\.{2,}|[^A-Za-z0-9._])+", "-", part).strip("-."))]
    owner_and_name = len(words) == 2 and len(dataset.split()) == 1
    return re.sub(r"([-./]|\.git)+$", "", ("/" if owner_and_name else "-").join(words)[:96])


def _index(probe: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The measured numbers of the encoder as the hub's `model-index`."""
    if probe is None:
        return []
    first = probe["results"][0]["encoder"] if probe["results"] else ""
    results = []
    for target in dict.fromkeys(r["target"] for r in probe["results"] if not r.get("leakage")):
        own = [r for r in probe["results"] if (r["target"], r["encoder"]) == (target, first)]
        rows = [r for r in own if r["estimate"] is not None]
        metrics = []
        for r in rows:
            label = str(words.METRICS.get(r["metric"], r["metric"]))
            if r["low"] is not None:
                label += f", 95 % interval {r['low']:.3f} to {r['high']:.3f}"
            metrics.append({"type": r["metric"], "value": round(float(r["estimate"]), 4), "name": label})
        if metrics:
            task = {"type": TASKS.get(rows[0].get("kind", ""), "other"), "name": f"frozen linear probe: {target}"}
            people = f"{rows[0]['n_test_participants']} test participants"
            results.append({"task": task, "dataset": {"type": "private", "name": people}, "metrics": metrics})
    return [{"name": name, "results": results}] if results else []


def _key(sources: Sources) -> str:
    tone, text = words.key_result(sources.probe)
    verdict = {
        "better": "Better than its baseline.",
        "worse": "Worse than its baseline.",
        "inconclusive": "Inconclusive.",
    }.get(tone, "")
    text = f"> **{verdict}** {_text(text)}" if verdict else f"> {_text(text)}"
    if sources.is_phantom and sources.probe is not None:
        text += " **Everything was measured on synthetic phantoms; nothing here says anything about patients.**"
    return text


def _model(sources: Sources, name: str) -> str:
    parameters = sources.record.get("parameters") or {}
    get = partial(setting, sources)
    rows = [
        ("Architecture", f"3-D Vision Transformer, width {get('model', 'width')}, {get('model', 'depth')} blocks, "
                         f"{get('model', 'heads')} heads, patches of {by(get('model', 'patch_size'))} voxels"),
        ("Parameters", f"{parameters['encoder']:,} in the encoder, {parameters['total']:,} in all networks"
                       if parameters else NOT_STATED),
        ("Objective", words.objective(sources).on_card or words.objective_name(sources)),
        ("Weights at the beginning", "random" if get("model", "init") == "unknown" else "those of another network"),
        ("Code", words.subtitle(sources, name)),
    ]  # fmt: skip
    if sources.store is not None:
        pre = sources.store.preprocessing
        mm = " × ".join(f"{n * s:.3g}" for n, s in zip(pre.image_size, pre.target_spacing, strict=True))
        size = f"{by(pre.image_size)} voxels (B-scan, axial, lateral)"
        rows.append(("Input", f"{size} over {mm} mm; left eyes are mirrored to right"))
        if pre.band != "classic":
            rows.append(("Network that finds tissue bands", pre.band_network))
        rows.append(("Preprocessing fingerprint", sources.store.fingerprint))
    return "## Model\n\n" + _table(("", ""), rows)


def _terms(sources: Sources, statements: Statements) -> str:
    licence = f"The weights are licensed under {markdown(statements.licence, links=True)}." if statements.licence else (
        "**The licence of the weights is not stated.** Without one nobody may use them; whoever publishes this card "
        "has to state it (`octfm card RUN --licence ...`)."
    )  # fmt: skip
    if statements.data_agreement:
        agreement = f"Data agreement: {markdown(statements.data_agreement, links=True)}"
    elif sources.is_phantom and not sources.inherited:
        agreement = (
            "The data are synthetic phantoms made by octfm: no agreement binds them, and no person can be found in "
            "them."
        )
    else:
        agreement = (
            "**The data agreement is not stated.** Weights are derived from the data they saw, and some agreements "
            "(AI-READI's among them) limit what may be done with the data; check that they allow these weights to be "
            "passed on (`octfm card RUN --data-agreement ...`)."
        )
    if sources.inherited:
        agreement += " The run began with weights that had seen other people's scans, whose agreements bind it as well."
    return f"## Licence and data agreement\n\n{licence} The octfm code is Apache-2.0.\n\n{agreement}"


def _data(sources: Sources, statements: Statements) -> str:
    text = "## Data\n\n" + (f"Data set: {markdown(statements.dataset, links=True)}.\n\n" if statements.dataset else "")
    if sources.catalog is None and sources.store is None:
        return text + (
            "Neither a catalog nor a prepared store was given to this card, so who the data came from is not described."
        )
    text += "### From files to participants\n\n"
    rows = [(MARK.get(s.kind, "− ") + s.label, _n(s.volumes), _n(s.participants), s.detail) for s in flow(sources)]
    text += _table(("", "Volumes or files", "Participants", ""), rows)
    if table := characteristics(sources):
        text += "\n\n### Who they are\n\n" + _table(("", *by_split(sources)), [(name, *cells) for name, cells in table])
        text += (
            "\n\nSmall groups (fewer than five people) are withheld. Characteristics without a row were not in the "
            "data's tables and are unknown."
        )
    return text


def _training(sources: Sources) -> str:
    steps, _ = series(sources.train, "masked_over_baseline")
    get = partial(setting, sources)
    lines = [
        f"{get('steps')} steps of {get('data', 'global_batch_size')} volumes, AdamW, peak learning rate "
        f"{get('schedule', 'base_lr')}, {sources.record.get('precision', NOT_STATED)}."
    ]
    if len(steps):
        lines.append(words.training_line(sources))
    if advice := words.checkpoint_advice([*sources.online, *sources.validation]):
        lines.append(advice)
    if environment := sources.record.get("environment"):
        machine = ", ".join(f"{key} {value}" for key, value in environment.items() if key != "precision")
        lines.append(f"Ran on {machine}.")
    if (pace := seconds_per_step(sources.train)) is not None:
        lines.append(f"About {duration(pace * max(series(sources.train, 'step')[0]))} of training at its median pace.")
    lines.append("Health: " + words.health_line(sources))
    return "## Training\n\n" + " ".join(_text(line) for line in lines)


def _evaluation(probe: dict[str, Any] | None) -> str:
    if probe is None:
        unknown = "No probe has been run on this encoder: it is not known how good its features are."
        return f"## Evaluation\n\n{unknown}"
    encoders = list(dict.fromkeys(r["encoder"] for r in probe["results"]))
    text = "## Evaluation\n\nLinear models on frozen features; estimate and 95 % interval over participants. "
    text += _text(probe.get("interval_meaning", ""))
    rows = []
    for r in words.score_rows((r for r in probe["results"] if r["metric"] in HEADLINE), encoders):
        what = f"{r['target']} (leakage: less is better)" if r["leakage"] else r["target"]
        rows.append((what, r["metric"], *r["cells"], f"{r['chance']:.2f}", str(r["n_test_participants"])))
    text += "\n\n" + _table(("Target", "Metric", *encoders, "Chance", "Participants"), rows)
    if compared := [c for c in words.comparison_rows(probe["comparisons"]) if not c.get("leakage")]:
        rows = [
            (c["target"], c["metric"], f"{c['a']} − {c['b']}", c["gap"],
             c["verdict"] + " (not after Holm's correction)" * fails_holm(c)) for c in compared
        ]  # fmt: skip
        text += "\n\nPaired differences on the same participants:\n\n"
        text += _table(("Target", "Metric", "Compared", "Difference (95 % interval)", "Verdict"), rows)
        text += "\n\n“Better” and “worse” are used only where the interval of the difference excludes 0."
    for skipped in probe.get("skipped", []):
        text += f"\n\n{markdown(skipped['target'])} was not probed. {_text(skipped['sentence'])}"
    return text


def _limits(sources: Sources) -> str:
    """Known gaps and weaknesses, from the run's own numbers."""
    found = []
    if lookup(sources.settings, "data", "phantoms"):
        found.append("Trained with the truth of synthetic phantoms: it has learned their lesions only, and no others.")
    if sources.is_phantom:
        used = "Trained" if sources.probe is None else "Trained and tested"
        only = ", beginning with weights that had seen other scans" if sources.inherited else " only"
        found.append(f"{used} on synthetic phantoms{only}. Nothing is known about real eyes.")
    elif sources.probe is not None:
        found.append("Tested on participants of one data set only; no second one confirms the results.")
    scanners = sorted({a.scanner for own in by_split(sources).values() for a in own})
    if scanners:
        found.append(f"Scanners seen: {', '.join(scanners)}. How features behave on any other was not measured here.")
    if sources.store is not None and sources.store.rows:
        unsure = sum(not row.confident for row in sources.store.rows)
        if unsure:
            found.append(
                f"In {unsure} of {len(sources.store.rows)} volumes the tissue band was not found with confidence; they "
                "keep every row."
            )
    if sources.probe is None:
        found.append("No probe was run.")
    else:
        results = sources.probe["results"]
        if sources.outdated:
            found.append(sources.outdated)
        if leak := words.leakage(results):
            shortcut = ": a shortcut for any model built on them" if words.leaks(leak) else ""
            found.append(f"Frozen features tell {leak['target']} apart with AUROC {interval(leak)}{shortcut}.")
        if few := words.without_interval(results):
            found.append(f"Too few participants for an interval: {', '.join(few)}.")
        if seen := words.seen_sentence(results):
            found.append(seen)
        # Those of the table above.
        compared = [c for c in sources.probe["comparisons"] if c["metric"] in HEADLINE and not c.get("leakage")]
        if undecided := sorted({c["target"] for c in compared if c["verdict"] == "inconclusive" or fails_holm(c)}):
            found.append(f"Some comparisons with the baselines are inconclusive: {', '.join(undecided)}.")
        if not any("age" in t["column"] or "site" in t["column"] for t in tested(sources.probe)):
            found.append(
                "Differences between subgroups (age, sex, ethnicity, site) are not in this card; octfm's trust report "
                "measures them."
            )
    latest = words.latest_health(sources.health)
    if troubled := [f"{r['what']} ({r['verdict']}: {r['sentence']})" for r in latest if r["verdict"] != "ok"]:
        found.append("Health checks that were not fine at the last look: " + "; ".join(troubled) + ".")
    return "## Limits\n\n" + "\n".join(f"- {_text(line)}" for line in found)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(markdown(c) for c in head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(markdown(str(c)) for c in row) + " |" for row in rows])


def _n(count: int | None) -> str:
    return "" if count is None else f"{count:,}"
