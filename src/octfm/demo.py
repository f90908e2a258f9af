"""The demonstration: cohort, catalog, store, pretraining, probe and report in ten minutes on one machine."""

import json
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from octfm.errors import ConfigError, Echo, EvaluationError
from octfm.io.location import local_path

if TYPE_CHECKING:
    from octfm.evaluation.cases import Design


PREPROCESSING = {"image_size": [16, 192, 128], "target_spacing": [0.1875, 0.0104, 0.031]}
"""The central 3 x 2 x 4 mm at about the scanners' native sampling: lesions stay larger than tokens, and a CPU
suffices."""


@dataclass(frozen=True)
class Size:
    """Size of the phantom cohort, and overrides of the pretraining settings."""

    participants: int
    fractions: tuple[float, float, float]
    """Shares of participants for training, validation and test."""
    overrides: tuple[str, ...] = ()


FULL = Size(1000, (0.31, 0.02, 0.67))
"""Leaves 690 participants that pretraining has not seen: the standard error of a paired AUROC difference is then about
.015, a third of the gain for disease (docs/log)."""
PRESETS = {
    "mae": ("demo", "masked voxels without speckle"),
    "vjepa2": ("demo_vjepa2", "V-JEPA 2 with context loss and masked voxels"),
}
"""Objective to packaged config and description. Within minutes mae is better (docs/log); V-JEPA 2 is meant for long
runs."""
DESIGN: "Design" = "k-fold"
"""Design of the probe on the phantom cohort. Every participant that pretraining has not seen is tested once, which
gives the probe more than twice the labels of the split (docs/log). Your own scans keep their recommended split. Chance
AUROC is then a little below .5, equally for all encoders: a class that is frequent in one fold is rarer in the others
(docs/phantom.md)."""
LABELLED, DRAWS = (0.1, 0.3, 1.0), 3
"""Fractions of labelled training participants, and random draws of each: few labels gain most (docs/log)."""
QUICK = Size(30, (0.4, 0.2, 0.4), ("steps=20", "log_every_steps=5", "validate_every_steps=10", "ckpt_every_steps=10"))


def run_demo(
    out: str | Path,
    *,
    data: Path | None = None,
    max_samples: int | None = None,
    participant_from: Sequence[str] = (),
    seed: int = 100,
    quick: bool = False,
    objective: str = "mae",
    echo: Echo = print,
) -> Path:
    """Run or continue a demonstration in `out` and return the path of its report.

    `objective` is a key of PRESETS. Without `data`, a phantom cohort is made; pretraining never uses its validation and
    test participants, and the probe tests only these. With `data`, the same settings run on the user's own scans, and
    whatever needs labels is left out.
    """
    from octfm.catalog.catalog import scan
    from octfm.catalog.participants.people import AmbiguousPeople
    from octfm.encoder.encoder import seen_by
    from octfm.evaluation.efficiency import label_efficiency
    from octfm.evaluation.probe import probe, write_probe
    from octfm.pretraining.pretrain import pretrain
    from octfm.pretraining.settings import load_config
    from octfm.report.card.model_card import write_model_card
    from octfm.report.html import summary_lines, write_report
    from octfm.store.prepare import prepare
    from octfm.tasks.embed_run import embed_all
    from octfm.volume.preprocessing import Preprocessing

    if objective not in PRESETS:
        raise ConfigError(f"--objective: expected one of {', '.join(PRESETS)}; got {objective!r}")
    out, size, clock = local_path(out), QUICK if quick else FULL, _Clock(echo)
    for option, given in (("--max-samples", max_samples is not None), ("--participant-from", bool(participant_from))):
        if data is None and given:
            raise ConfigError(f"{option} applies to your own scans only; give --data FOLDER with it")
    labels = None
    root = Path(data) if data is not None else _cohort(out / "clinic", size, seed, clock)
    if data is None:
        labels = root / "ground_truth" / "labels.tsv"

    clock.start(f"catalog: list every file of {root} as accepted, or rejected with a reason")
    try:
        catalog = scan(str(root), participant_from=participant_from)
    except AmbiguousPeople as ambiguous:
        raise AmbiguousPeople(
            f"{ambiguous}; octfm demo --data takes the same --participant-from", ambiguous.guess
        ) from None
    if max_samples is not None:
        catalog = replace(catalog, acquisitions=_spread(catalog.acquisitions, max_samples))
    catalog.save(out / "catalog")
    rejected = f"{len(catalog.rejects)} rejected: {_counts(catalog.rejects)}"
    echo(f"   {len(catalog.acquisitions)} accepted, {len(catalog.skipped)} skipped, {rejected}")

    clock.start("store: mirror left eyes, register B-scans, find the tissue band, resample to one spacing")
    store = prepare(catalog, out / "prepared", Preprocessing.model_validate(PREPROCESSING))

    preset, description = PRESETS[objective]
    clock.start(f"pretraining: {description}, on tissue tokens of the training participants")
    config = load_config(preset, (f"seed={seed}", *size.overrides))
    run = pretrain(config, store, out / "run", echo=lambda line: echo(f"   {line}"))

    clock.start("frozen features: the encoder, the same encoder at random initialisation, an intensity histogram")
    embeddings = embed_all(run, out / "prepared", echo=lambda line: echo(f"   {line}"))

    clock.start("probe: linear models on frozen features, tested on participants that pretraining has not seen")
    commands = _commands(out, data, max_samples, participant_from, seed, size, objective, labels)
    try:
        design, seen = DESIGN if data is None else "auto", seen_by(run)
        result = probe(embeddings, labels, design=design, seen=seen, commands=commands)
        write_probe(run / "probe.json", result)  # kept even if the label-efficiency curve below fails
        if data is None:
            rows, compared = label_efficiency(
                embeddings, labels, targets=["disease"], design=DESIGN, seen=seen, fractions=LABELLED, seeds=DRAWS
            )
            result |= {"label_efficiency": rows, "label_efficiency_comparisons": compared}
            write_probe(run / "probe.json", result)
    except EvaluationError as error:
        echo(f"   probe incomplete: {error}")

    clock.start("report")
    report = out / "report.html"
    write_report(run, report, catalog=out / "catalog", store_path=store.path)
    card = write_model_card(run, out / "model_card.md", catalog=out / "catalog", store=store.path)
    clock.stop()
    echo(f"took {clock.total:.0f} s: {clock.shares()}")
    echo(f"model card: {card.resolve()}")
    for line in summary_lines(run, catalog=out / "catalog", store_path=store.path):
        echo(line)
    echo(f"report: {report.resolve()}")
    return report


SABOTAGE = ("teacher-frozen", "context-unmasked", "lr-restart", "nan-volume")
"""Faults that `octfm demo --sabotage` can plant."""
SABOTAGED_AT = 40
"""Step, of 60, at which the fault is planted."""


def run_sabotage(name: str, out: str | Path, *, seed: int = 1, echo: Echo = print) -> Path:
    """Train the quick demonstration with a planted fault, and return the path of its report.

    Raises EvaluationError if the monitors do not name the fault while the run trains.
    """
    from octfm.catalog.catalog import scan
    from octfm.errors import TrainingError
    from octfm.pretraining.monitors.sabotage import NAMES, sabotage
    from octfm.pretraining.pretrain import pretrain
    from octfm.pretraining.settings import load_config
    from octfm.report.html import write_report
    from octfm.run.tracking import read_metrics
    from octfm.store.prepare import prepare
    from octfm.volume.preprocessing import Preprocessing

    if name not in SABOTAGE:
        raise ConfigError(f"--sabotage: expected one of {', '.join(SABOTAGE)}; got {name!r}")
    out, clock, steps, at = local_path(out), _Clock(echo), 60, SABOTAGED_AT
    root = _cohort(out / "clinic", QUICK, seed, clock)
    clock.start(f"catalog and store of {root}")
    catalog = scan(str(root))
    catalog.save(out / "catalog")
    store = prepare(catalog, out / "prepared", Preprocessing.model_validate(PREPROCESSING))
    clock.start(f"pretraining: {steps} steps, {name} from step {at} on; what the monitors report:")
    config = load_config(
        "demo_vjepa2",
        (f"seed={seed}", f"steps={steps}", "log_every_steps=5", "validate_every_steps=20", "ckpt_every_steps=20"),
    )
    run = out / f"run-{name}"
    try:
        with sabotage(name, at):
            pretrain(config, store, run, echo=lambda line: echo(f"   {line}"))
    except TrainingError as error:
        echo(f"   the run stopped: {error}")
    clock.stop()
    incidents = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "incident"]
    report = out / f"report-{name}.html"
    write_report(run, report, catalog=out / "catalog", store_path=store.path)
    named = next((row for row in incidents if row["what"] == NAMES[name]), None)
    if named is None:
        raise EvaluationError(
            f"{run}: {name} was planted at step {at}, but the monitors reported only "
            f"{[row['what'] for row in incidents]}"
        )
    echo(f"planted {name} at step {at}; named at step {named['step']}: {named['what']}: {named['sentence']}")
    echo(f"report: {report.resolve()}")
    return report


def _cohort(folder: Path, size: Size, seed: int, clock: "_Clock") -> Path:
    """Make the phantom cohort of this size and seed, or reuse it."""
    from octfm.phantom import write_phantom

    facts = folder / "ground_truth" / "phantom.json"
    if facts.is_file():
        known = json.loads(facts.read_text())
        if (known["participants"], known["seed"]) != (size.participants, seed):
            raise ConfigError(
                f"{folder}: holds a cohort of {known['participants']} participants with seed {known['seed']}, not "
                f"{size.participants} with seed {seed}; choose another --out"
            )
        return folder
    clock.start(
        f"cohort: {size.participants} phantom participants, both eyes, four scanners, seed {seed}, some files defective"
    )
    return write_phantom(
        folder,
        size.participants,
        seed,
        fractions=size.fractions,
        second_scanner=0.1,
        defects=0.03,
        progress=clock.progress("participants"),
    )


def _spread(acquisitions: tuple, count: int) -> tuple:
    """About `count` acquisitions, evenly spaced within every split, in proportion to its size, at least one each."""
    if count < 1:
        raise ConfigError(f"--max-samples: expected at least 1, got {count}")
    if count >= len(acquisitions):
        return acquisitions
    chosen = set()
    for split in dict.fromkeys(a.split for a in acquisitions):
        own = [a.uri for a in acquisitions if a.split == split]
        quota = max(1, round(count * len(own) / len(acquisitions)))
        chosen |= {own[i * len(own) // quota] for i in range(quota)}
    return tuple(a for a in acquisitions if a.uri in chosen)


def _counts(rejects: tuple) -> str:
    codes = Counter(reject.code for reject in rejects)
    return ", ".join(f"{code} {n}" for code, n in sorted(codes.items())) or "none"


def _commands(
    out: Path,
    data: Path | None,
    max_samples: int | None,
    participant_from: Sequence[str],
    seed: int,
    size: Size,
    objective: str,
    labels: Path | None,
) -> list[str]:
    """The command that was run, and the single verbs that repeat its steps from the catalog on."""
    demo = ["octfm", "demo", "--out", out, "--seed", seed]
    demo += ["--data", data] * (data is not None)
    demo += ["--max-samples", max_samples] * (max_samples is not None)
    demo += [word for pattern in participant_from for word in ("--participant-from", pattern)]
    demo += ["--quick"] * (size is QUICK)
    demo += ["--objective", objective] * (objective != "mae")
    pretrain = ["octfm", "pretrain", PRESETS[objective][0], f"seed={seed}", *size.overrides]
    settings = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in PREPROCESSING.items()]
    verbs = [
        demo,
        ["octfm", "prepare", out / "catalog", *settings, "--out", out / "prepared"],
        [*pretrain, f"data.store={out / 'prepared'}", "--out", out / "run"],
        ["octfm", "embed", out / "run", "--store", out / "prepared"],
        ["octfm", "probe", out / "run", *(["--labels", labels, "--design", DESIGN] if labels else [])],
        ["octfm", "report", out / "run", "--catalog", out / "catalog", "--store", out / "prepared"],
    ]
    return [shlex.join(str(word) for word in words) for words in verbs]


class _Clock:
    """Prints the start of every part and records its duration."""

    def __init__(self, echo: Echo):
        self.echo, self.parts, self.began = echo, [], time.perf_counter()

    @property
    def total(self) -> float:
        return time.perf_counter() - self.began

    def start(self, what: str) -> None:
        self.stop()
        self.echo(f"[{self.total:4.0f} s] {what}")
        self.parts.append([what.split(":")[0], time.perf_counter(), 0.0])

    def stop(self) -> None:
        if self.parts:
            self.parts[-1][2] = time.perf_counter() - self.parts[-1][1]

    def progress(self, unit: str) -> Callable[[int, int], None]:
        def report(done: int, total: int) -> None:
            if done == total or done % max(1, total // 5) == 0:
                self.echo(f"   {done} of {total} {unit}")

        return report

    def shares(self) -> str:
        return ", ".join(f"{name} {seconds:.0f} s" for name, _, seconds in self.parts)
