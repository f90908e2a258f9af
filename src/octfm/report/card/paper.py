"""Drafts for a paper: methods, participant flow, CLAIM checklist and BibTeX, with gaps that only authors can fill."""

from functools import partial
from pathlib import Path
from typing import Any

from octfm.display import markdown
from octfm.io.location import Location
from octfm.report.participants import flow, tested
from octfm.report.shareable import NAME, shareable
from octfm.report.sources import Sources, gather, lookup
from octfm.report.words import advised_step, encoder, objective, objective_name
from octfm.version import __version__

OPEN = "**for the authors**"

CLAIM: tuple[tuple[str, str], ...] = (
    ("Title names the AI technique", ""),
    ("Structured abstract", ""),
    ("Background, intended use and clinical role", ""),
    ("Aims and hypotheses", ""),
    ("Prospective or retrospective", ""),
    ("Goal of the study", ""),
    ("Data sources", "data"),
    ("Eligibility criteria: where, when and how participants and images were chosen", "eligibility"),
    ("Preprocessing", "preprocessing"),
    ("Selection of subsets of the data", "subsets"),
    ("Definitions of data elements", ""),
    ("De-identification", ""),
    ("Missing data", "missing"),
    ("Reference standard: definition", ""),
    ("Reference standard: why this one", ""),
    ("Reference standard: who annotated, with which qualification", ""),
    ("Annotation tools", ""),
    ("Variability between and within annotators", ""),
    ("Intended sample size and how it was found", ""),
    ("Partitions and their sizes", "partitions"),
    ("Level at which partitions are disjoint", "disjoint"),
    ("Model in enough detail to build it again", "model"),
    ("Software", "software"),
    ("Initialisation", "initialisation"),
    ("Training: augmentation, settings, length", "training"),
    ("How the final model was chosen", "selection"),
    ("Ensembles", "ensembles"),
    ("Metrics", "metrics"),
    ("Uncertainty and significance", "statistics"),
    ("Robustness", ""),
    ("Explainability", "maps"),
    ("External data", ""),
    ("Flow of participants", "flow"),
    ("Characteristics of participants in each partition", "characteristics"),
    ("Performance on all partitions", "performance"),
    ("Estimates with intervals", "performance"),
    ("Failures", ""),
    ("Limitations", "limits"),
    ("What it means for practice", ""),
    ("Registration", ""),
    ("Where protocol, code and data can be had", "code"),
    ("Funding", ""),
)
"""The 42 items of CLAIM in our words (Mongan, Moy, Kahn 2020), each with its answer's key in `_answers`, if any."""
CLAIM_NOTE = (
    "Items in short words, numbered as in Mongan, Moy and Kahn, Radiology: Artificial Intelligence 2020;2(2):e200029. "
    "The update of 2024 (Tejani et al., 2024;6(4):e240300) changes words and adds items; fill in the form that your "
    "journal asks for."
)


def paper(
    run: str | Path,
    *,
    catalog: str | Location | None = None,
    store: str | Location | None = None,
    name: str | None = None,
) -> str:
    """Markdown with draft methods, participant flow, CLAIM checklist and BibTeX. Raises EvaluationError if `run` is no
    run folder of octfm pretrain."""
    sources, name = shareable_run(run, catalog, store), name or NAME
    known = _answers(sources)
    rows = [f"| {i} | {item} | {known.get(key) or OPEN} |" for i, (item, key) in enumerate(CLAIM, 1)]
    parts = [
        f"# Drafts for a paper about {markdown(name)}",
        "Written from the run's own files. Check every sentence: it says what was run, not why.",
        "## Methods (draft)",
        methods(sources),
        "## Flow of participants",
        _flow_figure(sources),
        "## CLAIM checklist (draft)",
        CLAIM_NOTE,
        "| Item | What | Answer |\n|---|---|---|\n" + "\n".join(rows),
        "## BibTeX",
        f"```bibtex\n{bibtex(sources, name)}```",
    ]
    return "\n\n".join(parts) + "\n"


def methods(sources: Sources) -> str:
    """Paragraphs in the past tense; facts that the run's files do not state are left out."""
    known = _answers(sources)
    topics = (
        ("data", "eligibility", "missing", "partitions", "disjoint"),
        ("preprocessing",),
        ("model", "initialisation", "training", "selection", "software"),
        ("metrics", "statistics"),
    )
    paragraphs = [" ".join(known[key] for key in keys if known.get(key)) for keys in topics]
    return "\n\n".join(p for p in paragraphs if p)


def shareable_run(run: str | Path, catalog: str | Location | None, store: str | Location | None) -> Sources:
    """The contents of a run's files, without anything that names a person, place or day."""
    return shareable(gather(Path(run), catalog, store))


def setting(sources: Sources, *keys: str) -> Any:
    """A setting of the run from config.yaml, or "unknown"."""
    value = lookup(sources.settings, *keys)
    return "unknown" if value is None else value


def by(sizes: Any) -> str:
    """A setting with one size for each axis: `4 × 16 × 16`; any other one as it is."""
    return " × ".join(map(str, sizes)) if isinstance(sizes, (list, tuple)) else str(sizes)


def bibtex(sources: Sources, name: str) -> str:
    """BibTeX entries for the run, octfm, and the methods that the run used."""
    started = str(sources.record.get("started", ""))[:4]
    commit = str(lookup(sources.record, "git", "commit") or "")[:10]
    note = f"octfm {sources.record.get('octfm', __version__)}" + (f", commit {commit}" if commit else "")
    # BibTeX keys allow neither spaces nor accents.
    key = "".join(c for c in name if c.isascii() and c.isalnum()) or "encoder"
    entries = [
        ("misc", key, {"title": f"{{{_tex(name)}}}: a 3-D encoder for retinal OCT", "year": started, "note": note}),
        ("software", "octfm", {
            "title": "octfm: a 3D OCT foundation model, built to be trusted", "author": "{The octfm authors}",
            "version": __version__, "license": "Apache-2.0"}),
    ]  # fmt: skip
    used = objective_name(sources)
    if used == "data2vec":
        entries.append(("misc", "baevski2022data2vec", {
            "title": "data2vec: A General Framework for Self-supervised Learning in Speech, Vision and Language",
            "author": "Baevski, Alexei and Hsu, Wei-Ning and Xu, Qiantong and Babu, Arun and Gu, Jiatao and "
                      "Auli, Michael",
            "year": "2022", "eprint": "2202.03555", "archivePrefix": "arXiv"}))  # fmt: skip
    elif used in ("mae", "anchored"):
        entries.append(("misc", "he2021mae", {
            "title": "Masked Autoencoders Are Scalable Vision Learners",
            "author": "He, Kaiming and Chen, Xinlei and Xie, Saining and Li, Yanghao and "
                      r"Doll{\'a}r, Piotr and Girshick, Ross",
            "year": "2021", "eprint": "2111.06377", "archivePrefix": "arXiv"}))  # fmt: skip
    elif used == "vjepa2":
        entries.append(("misc", "assran2025vjepa2", {
            "title": "V-JEPA 2: Self-Supervised Video Models Enable Understanding, Prediction and Planning",
            "author": "Assran, Mahmoud and others",
            "year": "2025", "eprint": "2506.09985", "archivePrefix": "arXiv"}))  # fmt: skip
    if sources.probe is not None:
        entries.append(("article", "efron1987bca", {
            "title": "Better Bootstrap Confidence Intervals", "author": "Efron, Bradley", "year": "1987",
            "journal": "Journal of the American Statistical Association",
            "volume": "82", "pages": "171--185"}))  # fmt: skip
    text = ""
    for kind, key, fields in entries:
        inner = "".join(f"  {field} = {{{value}}},\n" for field, value in fields.items() if value)
        text += f"@{kind}{{{key},\n{inner}}}\n\n"
    return text.rstrip("\n") + "\n"


def _answers(sources: Sources) -> dict[str, str]:
    """Sentences that follow from the run's files, by topic; a topic on which they say nothing is missing."""
    commit = lookup(sources.record, "git", "commit")
    return {
        **_about_cohort(sources),
        **_about_preprocessing(sources),
        **(_about_model(sources) | _about_training(sources) if sources.config else {}),
        **_about_software(sources),
        **_about_evaluation(sources),
        "code": f"octfm{f', commit {commit[:10]}' if commit else ''}; protocol and data: {OPEN}",
        "limits": "Model card, “Limits”; " + OPEN,
        "maps": "PCA, occlusion and similarity of tokens (report); maps show what features follow, not why a decision "
        "was made",
    }


def _about_cohort(sources: Sources) -> dict[str, str]:
    """Answers from the flow of participants."""
    found: dict[str, str] = {}
    steps = {s.label: s for s in flow(sources)}
    if (accepted := steps.get("Accepted OCT volumes")) and sources.catalog is not None:
        s = sources.catalog.summary()
        kind = "synthetic OCT volumes (phantoms)" if sources.is_phantom else "OCT volumes"
        scanners = ", ".join(f"{n:,} of {name}" for name, n in s["scanners"].items())
        found["data"] = (
            f"The data comprised {accepted.volumes:,} {kind} of {accepted.participants:,} participants "
            f"({markdown(scanners)})."
        )
        found["eligibility"] = (
            f"Of {steps['Image files found'].volumes:,} image files, {s['skipped']:,} were left out as no structural "
            f"OCT raster and {s['rejected']:,} were rejected as unreadable or inconsistent, each with a recorded "
            "reason."
        )
    if prepared := steps.get("Prepared"):
        lost = steps.get("Could not be prepared")
        found["missing"] = f"{prepared.volumes:,} volumes could be prepared" + (
            f"; {lost.volumes:,} could not." if lost else "."
        )
    if splits := [s for s in steps.values() if s.kind == "split"]:
        sizes = ", ".join(
            f"{s.label.split()[0].lower()} {s.participants:,} participants ({s.volumes:,} volumes)" for s in splits
        )
        found["partitions"] = f"Partitions: {sizes}."
        found["disjoint"] = (
            "Partitions were disjoint by participant: both eyes and all visits of a person were in one of them."
        )
        found["flow"], found["characteristics"] = "Flow of participants, above", "Model card, “Who they are”"
    return found


def _about_preprocessing(sources: Sources) -> dict[str, str]:
    if sources.store is None:
        return {}
    pre = sources.store.preprocessing
    size, mm = (" × ".join(f"{v:g}" for v in values) for values in (pre.image_size, pre.target_spacing))
    where = "without labels or, where that was unsure, " if pre.band == "either" else ""
    network = f"by the network {pre.band_network}, trained on synthetic B-scans"
    by = "without labels" if pre.band == "classic" else where + network
    registered = "after axial registration of B-scans, " if pre.register_bscans else ""
    return {
        "preprocessing": f"Volumes were resampled by area averaging to {size} voxels of {mm} mm (B-scan, axial, "
        f"lateral) without stretching, {registered}around the {pre.center}; left eyes were mirrored to right. The "
        f"tissue band, from {pre.margin_mm * 1000:g} µm above the internal limiting membrane to as much below Bruch's "
        f"membrane, was found {by}."
    }


def _about_model(sources: Sources) -> dict[str, str]:
    get = partial(setting, sources, "model")
    patch, total = get("patch_size"), lookup(sources.record, "parameters", "encoder")
    begun = "were initialised at random" if get("init") == "unknown" else f"began from those of another network: {OPEN}"
    return {
        "model": f"The encoder was a 3-D Vision Transformer (width {get('width')}, {get('depth')} blocks, "
        f"{get('heads')} heads{f', {total:,} parameters' if total else ''}) on patches of "
        f"{by(patch)} voxels with {get('positions')} "
        "positions.",
        "initialisation": f"Weights {begun}.",
        "ensembles": "None.",
    }


AUGMENTATIONS = {
    "lateral_shift_mm": "lateral shifts (up to {} mm)",
    "lateral_scale": "lateral magnification (± {})",
    "axial_scale": "axial magnification (± {})",
    "tilt_deg": "tilt (up to {}°)",
    "mirror_unknown": "mirroring of eyes of unknown laterality",
    "noise": "noise (up to {} of white)",
    "speckle": "speckle (up to {})",
}
"""Augmentations that a run may leave out, with their words."""


def _about_training(sources: Sources) -> dict[str, str]:
    get = partial(setting, sources)
    scanners, most = get("data", "scanners"), get("data", "max_samples")
    limits = [f"scanners {', '.join(scanners)}"] if isinstance(scanners, list) and scanners else []
    limits += [f"at most {most} volumes"] if most != "unknown" else []
    limited = f"Pretraining was limited to {markdown('; '.join(limits))}."
    found = {
        "subsets": limited if limits else "None: all training volumes were used.",
        "selection": "The last checkpoint was used; none was chosen.",
    }
    if advised := advised_step(sources.online):
        found["selection"] = (
            "A frozen probe on validation participants rated checkpoints; the best was the one after "
            f"{advised:,} steps. Whether it or the last one was evaluated: {OPEN}."
        )
    if isinstance(get("steps"), int):
        sizes = {name: get("augment", name) for name in AUGMENTATIONS}
        used = [AUGMENTATIONS[n].format(size) for n, size in sizes.items() if size not in ("unknown", None, 0, False)]
        tokens = f"mask ratio {get('masks', 'mask_ratio')} of {get('masks', 'budget')} tokens"
        if get("objective", "name") == "dense" and get("objective", "hidden") is not True:
            tokens = f"{get('masks', 'budget')} tokens, none of them hidden"
        found["training"] = (
            f"It was pretrained with {objective(sources).in_methods} for {get('steps'):,} steps of "
            f"{get('data', 'global_batch_size')} volumes (AdamW, peak learning rate "
            f"{get('schedule', 'base_lr')}, weight decay {get('schedule', 'weight_decay')}, {tokens}, "
            f"seed {get('seed')}); augmented by axial shifts (up to {get('augment', 'axial_shift')} rows), contrast "
            f"(± {get('augment', 'contrast')}) and gamma (± {get('augment', 'gamma')})"
            f"{''.join(f', {name}' for name in used)}."
        )
    return found


def _about_software(sources: Sources) -> dict[str, str]:
    environment = sources.record.get("environment")
    if not environment:
        return {}
    torch, python = environment.get("torch", "unknown"), environment.get("python", "unknown")
    return {"software": f"octfm {sources.record.get('octfm', __version__)}, PyTorch {torch}, Python {python}."}


def _about_evaluation(sources: Sources) -> dict[str, str]:
    """Answers from the probe."""
    if sources.probe is None:
        return {}
    resamples = sources.probe.get("settings", {}).get("resamples", "unknown")
    corrected = any(c.get("p_holm") is not None for c in sources.probe["comparisons"])
    targets = ", ".join(f"{t['target']} ({t['n_test_participants']} participants)" for t in tested(sources.probe))
    first, *others = dict.fromkeys(r["encoder"] for r in sources.probe["results"]) or ("",)
    beside = f", next to {markdown('; '.join(map(encoder, others)))}" if others else ""
    paired = f"; differences are paired on the same resamples{', planned comparisons corrected after Holm' * corrected}"
    return {
        "metrics": f"Frozen features ({markdown(encoder(first))}) were judged by linear probes (penalties by inner "
        f"folds) for {markdown(targets)}{beside}.",
        "statistics": f"Intervals are 95 % BCa bootstrap intervals over {resamples} resamples of participants"
        f"{paired if others else ''}.",
        "performance": f"Model card, “Evaluation” (test participants; others: {OPEN})",
    }


def _flow_figure(sources: Sources) -> str:
    """The participant flow as boxes of text, which look the same in every editor."""
    boxes: list[str] = []
    for s in flow(sources):
        counts = [f"n = {s.volumes:,}"] if s.volumes is not None else []
        counts += [f"{s.participants:,} participants"] if s.participants is not None else []
        box = f"{s.label}: {', '.join(counts)}" + (f" ({s.detail})" if s.detail else "")
        if s.kind == "all":
            boxes += ["  │"] * bool(boxes) + [box]
        else:
            boxes.append(f"  ├──{'✗' if s.is_lost else '►'} {box}")
    if not boxes:
        return "Neither a catalog nor a store was given."
    return "```text\n" + "\n".join(box.replace("```", "'''") for box in boxes) + "\n```"


def _tex(text: str) -> str:
    return "".join(f"\\{c}" if c in "#$%&_{}" else c for c in text if c not in "\\^~")
