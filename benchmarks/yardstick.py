"""What an encoder is worth: every arm on every headline question, in one table with intervals by participant.

    octfm demo --seed 201 --out demo-201                                                # makes a cohort, a store, a run
    python benchmarks/yardstick.py --demo demo-201 --demo demo-202 --out yardstick      # goes on after an interruption
    python benchmarks/yardstick.py --demo demo-201 --encoder dense=runs/dense --encoder noise=untrained:5 --layers \\
        --out yardstick                                                                 # more encoders, and the J-map
    python benchmarks/yardstick.py --cohort 201 --cohort 202 --encoder mine=runs/mine --out yardstick  # version 4
    python benchmarks/yardstick.py --store prepared --labels labels.csv --encoder mine=runs/mine --out yardstick

A folder of `octfm demo` gives store, labels and the encoder `pretrained`; --cohort SEED makes OUT/cohort-SEED, phantoms
of version 4 that no encoder has seen (25 CPU-minutes). Cohorts of several seeds are pooled, with every one shown. Arms:
each encoder alone and with the tissue map, random initialisation (three draws, their spread in brackets), tissue map,
histogram, covariates; with --layers also what the packaged network measures (ridge or logistic, and boosted trees),
alone and with each encoder. Encoders are also compared with the first one. Participants whom any encoder has seen are
never tested. Claims are corrected by Holm over all of the table. Vectors, layers and scores lie in OUT and are computed
once. On phantoms all results are in the generator. OUT/yardstick.md, .json.
"""

import argparse
import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.labels import read_labels
from octfm.catalog.scan import scan
from octfm.demo.clinic import PREPROCESSING
from octfm.encoder.embed import RANDOM_INIT, embed_store, histogram_baseline, quality_baseline
from octfm.encoder.embeddings import Embeddings, joined, read_embeddings
from octfm.encoder.encoder import Encoder, load_encoder, seen_by
from octfm.evaluation.arms import MAP, make_arms
from octfm.evaluation.probe import FOLDS, rows_seen
from octfm.evaluation.readouts import Readout
from octfm.evaluation.scoring import finite
from octfm.evaluation.statistics import Bootstrap, compare, holm, interval
from octfm.evaluation.tissue_map import tissue_map_baseline
from octfm.io.location import write_whole
from octfm.models.pooling import POOLS
from octfm.phantom import LESIONS, write_phantom
from octfm.phantom.native.outer_retina import DETACHMENT, MATERIAL
from octfm.store.prepare import prepare
from octfm.store.store import Store
from octfm.tasks.layer_map import layer_map
from octfm.volume.preprocessing import Preprocessing
from yardstick_questions import Question, answer, pooled_over, questions, recombined

UNTRAINED = "untrained:"
SECOND_SCANNER = 0.1
"""Share of the participants of a cohort made here whom two instruments scanned."""
RESAMPLES = 2000
ALONE = 20_000
"""Resamples of a single cohort. Several are recombined; one of 2,000 has no p below .001, and Holm over the 95
differences that an encoder and --layers give would reject nothing."""
LEVEL = 0.05
LAYERS = "layers"
CEILING = "true maps"
CELLS = 4
"""Per side, of the true maps."""


@dataclass(frozen=True)
class Cohort:
    """One store with its labels, and the encoders that are judged on it."""

    name: str
    store: Path
    labels: Path
    encoders: dict[str, str]
    """Name → run, export or untrained:N (of the first one that is a run or export)."""


@dataclass(frozen=True, eq=False)
class Arm:
    name: str
    features: Embeddings
    readout: Readout = "linear"


def cohorts(chosen: argparse.Namespace) -> list[Cohort]:
    encoders = dict(named.split("=", 1) for named in chosen.encoder)
    found = [
        Cohort(
            demo.name, demo / "prepared", demo / "clinic" / "ground_truth" / "labels.tsv",
            {"pretrained": str(demo / "run")} | encoders,
        )
        for demo in chosen.demo
    ]  # fmt: skip
    for seed in chosen.cohort:
        folder = make_cohort(chosen.out / f"cohort-{seed}", seed, chosen.participants)
        labels = folder / "clinic" / "ground_truth" / "labels.tsv"
        found.append(Cohort(folder.name, folder / "prepared", labels, encoders))
    if chosen.store is not None:
        if chosen.labels is None:
            raise SystemExit("--store: needs --labels TABLE with columns diagnosis and severity")
        found.append(Cohort(chosen.store.name, chosen.store, chosen.labels, encoders))
    if not found:
        raise SystemExit("nothing to judge: give --demo FOLDER of octfm demo, --cohort SEED, or --store with --labels")
    names = [cohort.name for cohort in found]
    if len({*names}) < len(names):
        raise SystemExit(f"two cohorts are named {max(names, key=names.count)}; rename a folder")
    for cohort in found:
        if all(run.startswith(UNTRAINED) for run in cohort.encoders.values()):
            raise SystemExit(f"{cohort.name}: needs a run or an export, of which the untrained networks are draws")
        if absent := next((path for path in (cohort.store, cohort.labels) if not path.exists()), None):
            raise SystemExit(f"{absent}: not there; make it with octfm demo --out {absent.parent}")
    return found


def make_cohort(folder: Path, seed: int, participants: int) -> Path:
    """Phantoms of version 4, their files and the store of octfm demo's Preprocessing; or what is missing of them."""
    if not (folder / "clinic").exists():
        say(f"{folder}: {participants} phantom participants of seed {seed}")
        write_phantom(
            folder / "clinic", participants, seed, fractions=(0, 0, 1), second_scanner=SECOND_SCANNER, version="4"
        )
    preprocessing = Preprocessing.model_validate(PREPROCESSING)
    prepare(scan(str(folder / "clinic")), folder / "prepared", preprocessing, progress=False)
    return folder


def arms_of(cohort: Cohort, chosen: argparse.Namespace) -> tuple[list[Arm], np.ndarray]:
    """All arms of a cohort on the same volumes, by one readout, and bool [N] of rows that an encoder has seen."""
    store, folder = Store.open(cohort.store), chosen.out / cohort.name
    trained = {name: run for name, run in cohort.encoders.items() if not run.startswith(UNTRAINED)}
    base = next(iter(trained.values()))
    pool = chosen.pool or load_encoder(base).config.objective.pool

    def embedded(encoder: Encoder, name: str) -> Embeddings:
        return replace(read_embeddings(embed_store(encoder.pooling(pool), store, folder, name, say)), name=name)

    encoders = []
    for name, run in cohort.encoders.items():
        draw = int(run.removeprefix(UNTRAINED)) if run.startswith(UNTRAINED) else None
        encoder = load_encoder(base, random_init=True, draw=draw) if draw is not None else load_encoder(run)
        encoders.append(embedded(encoder, name))
    files = [encoders[0]]
    files += [embedded(load_encoder(base, random_init=True, draw=d), name) for d, name in enumerate(RANDOM_INIT)]
    made = (histogram_baseline, tissue_map_baseline, quality_baseline)
    files += [read_embeddings(baseline(store, folder)) for baseline in made]
    known = {arm.name: arm for arm in make_arms(files)}
    arms = [Arm(e.name, e) for e in encoders]
    arms += [Arm(f"map + {e.name}", joined(f"map + {e.name}", [known[MAP], e])) for e in encoders]
    arms += [Arm(name, known[name]) for name in (MAP, RANDOM_INIT[0], "histogram", "covariates")]
    if chosen.truth:
        fields = np.array(store.image_size)[[0, 2]] * np.array(store.preprocessing.target_spacing)[[0, 2]]
        ceiling = true_map(known[MAP], cohort.labels.parent, fields)
        arms += [Arm(CEILING, ceiling), Arm(f"{CEILING}, trees", ceiling, "trees")]
    if chosen.layers:
        layers = layer_map(store, folder / "layers.jsonl", bscans=chosen.bscans, echo=say)
        arms += [Arm(LAYERS, layers), Arm(f"{LAYERS}, trees", layers, "trees")]
        arms += [Arm(f"{LAYERS} + {e.name}", joined(f"{LAYERS} + {e.name}", [layers, e])) for e in encoders]
    seen = np.zeros(len(encoders[0].acquisition), bool)
    for run in trained.values():
        seen |= rows_seen(encoders[0], seen_by(run))
    return arms, seen


def true_map(data: Embeddings, truth: Path, voxels_mm: np.ndarray) -> Embeddings:
    """What a phantom is, float64 [N, channels]: in the middle `voxels_mm` (B-scan, lateral) of a scan, thickness of
    every layer in CELLS × CELLS cells with its spread; volume in nl, largest height in µm and share of A-scans of
    every lesion. No encoder can know more of these; what it lacks for a diagnosis is not in layers and lesions."""
    rows = np.array([_true(truth / f"{name}.npz", voxels_mm) for name in data.acquisition.tolist()])
    return replace(data, name=CEILING, path=str(truth), metadata={}, vectors=rows, draws=())


def _true(file: Path, field_mm: np.ndarray) -> np.ndarray:
    with np.load(file) as found:
        surfaces, lesions, spacing = found["surfaces"], found["lesions"], found["spacing_mm"]
    depth, width = surfaces.shape[1:]
    d, w = (
        slice(max(0, round((n - mm / step) / 2)), min(n, round((n + mm / step) / 2)))
        for n, mm, step in zip((depth, width), field_mm, spacing[[0, 2]], strict=True)
    )
    thickness = 1000 * spacing[1] * np.diff(surfaces[:, d, w].astype(float), axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # means of no value, which stay missing
        cells = [
            np.nanmean(cell, axis=(1, 2))
            for band in np.array_split(thickness, CELLS, axis=1)
            for cell in np.array_split(band, CELLS, axis=2)
        ]
        values = [*cells, np.nanstd(thickness, axis=(1, 2)), *np.nanpercentile(thickness, (2, 98), axis=(1, 2))]
    for kind in range(1, 1 + max(*LESIONS.values(), DETACHMENT, MATERIAL)):
        mask = lesions[d, :, w] == kind
        height = 1000 * spacing[1] * mask.sum(1)
        values.append(np.array([mask.sum() * spacing.prod() * 1000, height.max(), (height > 0).mean()]))
    return np.concatenate(values)


def scored(cohort: Cohort, arms: Sequence[Arm], seen: np.ndarray, chosen: argparse.Namespace) -> dict[str, Any]:
    """Question → arm → draws of its metric; from OUT where they are there."""
    data = arms[0].features
    asked, without = questions(data, read_labels(cohort.labels), seen, "k-fold", FOLDS, chosen.seed)
    for sentence in without:
        say(f"{cohort.name}: {sentence}")
    found: dict[str, Any] = {}
    if unknown := set(chosen.question) - {question.name for question in asked}:
        raise SystemExit(f"--question {min(unknown)}: expected one of {', '.join(q.name for q in asked)}")
    for question in asked:
        if chosen.question and question.name not in chosen.question:
            continue
        found[question.name] = {
            arm.name: _kept(chosen.out / cohort.name / "scores", question, arm, chosen) for arm in arms
        }
        line = ", ".join(f"{name} {draws[0].estimate:.3f}" for name, draws in found[question.name].items())
        say(f"{cohort.name}: {question.name}: {line}")
    return found


def _kept(folder: Path, question: Question, arm: Arm, chosen: argparse.Namespace) -> list[Bootstrap]:
    """The answer, computed once for these features, cases and settings."""
    features, digest = arm.features, hashlib.sha256()
    for values in (features.vectors, *features.draws, question.cases.rows, question.cases.label):
        digest.update(np.ascontiguousarray(values).tobytes())
    for name, rounds in question.parts:
        digest.update(name.encode() + b"".join(r.train.tobytes() + b"|" + r.test.tobytes() for r in rounds))
    about = [arm.readout, features.parts, features.columns, question.name, question.metric]
    digest.update(json.dumps([*about, chosen.resamples, chosen.seed]).encode())
    file = folder / f"{digest.hexdigest()[:24]}.npz"
    if file.is_file():
        with np.load(file) as saved:
            pairs = zip(saved["estimate"], saved["resampled"], strict=True)
            return [Bootstrap(float(estimate), resampled, np.zeros(0)) for estimate, resampled in pairs]
    draws = answer(question, features, arm.readout, chosen.resamples, chosen.seed)
    folder.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.npz")
    np.savez(partial, estimate=[d.estimate for d in draws], resampled=[d.resampled for d in draws])
    partial.replace(file)
    return draws


def claims(names: Sequence[str], encoders: Sequence[str]) -> list[tuple[str, str]]:
    """(a, b) of the differences a − b that are asked for, over the arms that there are."""
    wanted = [(name, encoders[0]) for name in encoders[1:]]
    for name in encoders:
        wanted += [(name, "random_init"), (name, MAP), (f"map + {name}", MAP)]
        wanted += [(name, LAYERS), (f"{LAYERS} + {name}", LAYERS)]
    return [(a, b) for a, b in wanted if a in names and b in names]


Scores = dict[str, dict[str, dict[str, list[Bootstrap]]]]
"""Cohort → question → arm → draws."""


def results(scores: Scores, encoders: Sequence[str]) -> dict[str, Any]:
    """The content of yardstick.json: `cells` (pooled over cohorts, with each of them) and `differences` with Holm."""
    asked = list(dict.fromkeys(name for of_cohort in scores.values() for name in of_cohort))
    names = list(dict.fromkeys(arm for of_cohort in scores.values() for own in of_cohort.values() for arm in own))
    cells, boots = [], {}
    for question in asked:
        for name in names:
            own = {c: of[question][name] for c, of in scores.items() if question in of and name in of[question]}
            each = {cohort: pooled_over(draws) for cohort, draws in own.items()}
            boots[question, name] = each
            whole = pooled_over(list(each.values()))
            low, high = interval(whole, method="percentile")
            spread = [d.estimate for draws in own.values() for d in draws] if len(next(iter(own.values()))) > 1 else []
            cells.append(
                {
                    "question": question, "arm": name, "estimate": finite(whole.estimate), "low": finite(low),
                    "high": finite(high), "per_cohort": {c: finite(b.estimate) for c, b in each.items()},
                    "per_draw": [finite(v) for v in spread],
                }
            )  # fmt: skip
    rows = []
    for a, b in claims(names, encoders):
        for question in asked:
            pairs = [(boots[question, a][c], boots[question, b][c]) for c in boots[question, a]]
            # Both of one cohort are paired, so the difference is pooled, not the difference of what is pooled.
            gains = [Bootstrap(x.estimate - y.estimate, x.resampled - y.resampled, np.zeros(0)) for x, y in pairs]
            whole = pooled_over(recombined(gains))
            found = compare(whole, Bootstrap(0.0, np.zeros_like(whole.resampled), np.zeros(0)))
            per_cohort = dict(zip(boots[question, a], [finite(gain.estimate) for gain in gains], strict=True))
            rows.append(
                {
                    "a": a, "b": b, "question": question, "difference": finite(found.difference),
                    "low": finite(found.low), "high": finite(found.high), "p": found.p, "per_cohort": per_cohort,
                }
            )  # fmt: skip
    adjusted = holm([row["p"] for row in rows])
    for row, p in zip(rows, adjusted, strict=True):
        verdict = "better" if (row["low"] or 0) > 0 else "worse" if (row["high"] or 0) < 0 else "inconclusive"
        row |= {"p_holm": p, "claim": verdict if p <= LEVEL else "inconclusive"}
    return {"cells": cells, "differences": rows}


def table(found: dict[str, Any], facts: Sequence[str]) -> str:
    """Markdown: arms × questions with intervals, then the differences, bold where they hold after Holm."""
    asked = list(dict.fromkeys(cell["question"] for cell in found["cells"]))
    lines = ["# What the encoders are worth", "", *facts, "", _row(["arm", *asked]), "|---" * (len(asked) + 1) + "|"]
    for name in dict.fromkeys(cell["arm"] for cell in found["cells"]):
        own = {cell["question"]: cell for cell in found["cells"] if cell["arm"] == name}
        lines.append(_row([name, *(_cell(own[question]) for question in asked)]))
    lines += ["", "Paired differences; bold: excludes 0, and p ≤ .05 after Holm over all of this table.", ""]
    lines += [_row(["difference", *asked]), "|---" * (len(asked) + 1) + "|"]
    for a, b in dict.fromkeys((row["a"], row["b"]) for row in found["differences"]):
        own = {row["question"]: row for row in found["differences"] if (row["a"], row["b"]) == (a, b)}
        lines.append(_row([f"{a} − {b}", *(_gain(own[question]) for question in asked)]))
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _number(value: float | None, sign: str = "") -> str:
    return "–" if value is None else f"{value:{sign}.3f}".replace("0.", ".", 1)


def _cell(cell: dict[str, Any]) -> str:
    text = f"{_number(cell['estimate'])} [{_number(cell['low'])}, {_number(cell['high'])}]"
    if cell["per_draw"]:
        text += f" (draws {_number(min(cell['per_draw']))} to {_number(max(cell['per_draw']))})"
    return text + _each(cell["per_cohort"])


def _gain(row: dict[str, Any]) -> str:
    text = f"{_number(row['difference'], '+')} [{_number(row['low'], '+')}, {_number(row['high'], '+')}]"
    text = f"**{text}**" if row["claim"] != "inconclusive" else text
    return text + _each(row["per_cohort"], "+")


def _each(per_cohort: dict[str, float | None], sign: str = "") -> str:
    if len(per_cohort) < 2:
        return ""
    return f"; {', '.join(_number(value, sign) for value in per_cohort.values())}"


def say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--demo", type=Path, action="append", default=[], help="folder of octfm demo; repeat")
    arguments.add_argument(
        "--cohort", type=int, action="append", default=[], metavar="SEED", help="make phantoms of this seed; repeat"
    )
    arguments.add_argument("--participants", type=int, default=700, help="of every --cohort")
    arguments.add_argument("--store", type=Path, help="a prepared store, with --labels")
    arguments.add_argument("--labels", type=Path)
    arguments.add_argument(
        "--encoder", action="append", default=[], metavar="NAME=RUN", help="a run, an export, or untrained:N; repeat"
    )
    arguments.add_argument("--layers", action="store_true", help="also measure layers by the packaged network (hours)")
    arguments.add_argument("--truth", action="store_true", help="also the phantoms' true layers and lesions: a ceiling")
    arguments.add_argument("--bscans", type=int, help="of every volume at most so many for --layers; default: all")
    arguments.add_argument("--question", action="append", default=[], help="only this one; repeat")
    arguments.add_argument("--pool", choices=POOLS, help="of the vectors of all encoders; default: the first one's")
    arguments.add_argument(
        "--resamples", type=int, help=f"per cohort; default: {RESAMPLES:,}, of a single cohort {ALONE:,}, for Holm"
    )
    arguments.add_argument("--seed", type=int, default=0, help="of folds and resamples")
    arguments.add_argument("--out", type=Path, required=True)
    chosen = arguments.parse_args()
    if wrong := next((e for e in chosen.encoder if "=" not in e), None):
        raise SystemExit(f"--encoder {wrong}: expected NAME=RUN, such as dense=runs/dense")
    scores: Scores = {}
    facts, encoders = [], []
    judged = cohorts(chosen)
    chosen.resamples = chosen.resamples or (RESAMPLES if len(judged) > 1 else ALONE)
    for cohort in judged:
        arms, seen = arms_of(cohort, chosen)
        encoders = [*dict.fromkeys([*encoders, *cohort.encoders])]
        people = np.unique(arms[0].features.participant[~seen])
        facts.append(f"- {cohort.name}: {len(people):,} participants whom no encoder has seen, in {FOLDS} folds.")
        scores[cohort.name] = scored(cohort, arms, seen, chosen)
    readout = arms[0].features.metadata.get("readout", "")
    facts.append(
        f"- Vectors: {readout}. AUROC (R² for cst_um), 95 % intervals by participant. On phantoms: in-generator."
    )
    found = results(scores, encoders)
    chosen.out.mkdir(parents=True, exist_ok=True)
    text = table(found, facts)
    write_whole(chosen.out / "yardstick.json", f"{json.dumps(found, indent=1)}\n".encode())
    write_whole(chosen.out / "yardstick.md", text.encode())
    say(text)


if __name__ == "__main__":
    main()
