"""The content of trust.json: all analyses of one run, in one call."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.labels import LabelTable, read_labels
from octfm.config import load
from octfm.encoder.embed import NAMES, RANDOM_INIT, histogram_baseline, quality_baseline
from octfm.encoder.embeddings import Embeddings, of_store, read_embeddings
from octfm.encoder.encoder import seen_if_known
from octfm.encoder.external import Embed, embed_external, load_external
from octfm.encoder.sources import display_name, find
from octfm.errors import Echo, EvaluationError, one_line
from octfm.evaluation.arms import COVARIATES, MAP_AND_ENCODER, make_arms
from octfm.evaluation.cases import people
from octfm.evaluation.probe import INTERVAL_MEANING, rows_seen
from octfm.evaluation.scoring import PLANNED, Scored, compare_metrics, score
from octfm.evaluation.statistics import enough_resamples
from octfm.evaluation.tissue_map import tissue_map_baseline
from octfm.io.location import local_path
from octfm.pretraining.resume import load_newest
from octfm.pretraining.settings import stored_config
from octfm.run.folder import OtherVolumes
from octfm.store.selection import to_evaluate
from octfm.store.store import Store
from octfm.tasks.finetune import finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.predictions import read_predictions
from octfm.trust.calibration import calibration
from octfm.trust.copies import copies
from octfm.trust.failures import failures
from octfm.trust.leaderboard import common_pool, embed_run, entry_name
from octfm.trust.neighbours import neighbours, scanner_leakage
from octfm.trust.same_eye import same_eye
from octfm.trust.scanners import domains, leave_one_scanner_out
from octfm.trust.study import FROM_SCRATCH, Kind, Study, add_claims, make_study
from octfm.trust.subgroups import AGE_BANDS, group_columns, subgroups
from octfm.weights.exported import is_export

RESAMPLES = 4000
"""More than elsewhere, because one analysis may hold some 60 comparisons, and Holm corrects for all of them."""
FROM_SCRATCH_EPOCHS = 60.0
RESERVED = (*NAMES, MAP_AND_ENCODER, COVARIATES, FROM_SCRATCH, "label")


def trust(
    run: str | Path,
    stores: Sequence[str | Path],
    out: str | Path,
    *,
    labels: Any = None,
    targets: Sequence[str] | None = None,
    orders: Mapping[str, tuple[str, ...]] | None = None,
    others: Sequence[str | Path] = (),
    external: Sequence[str] = (),
    groups: Sequence[str] = (),
    age_bands: Sequence[float] = AGE_BANDS,
    from_scratch_epochs: float = FROM_SCRATCH_EPOCHS,
    exclude: str | Path | None = None,
    allow_seen: bool = False,
    resamples: int = RESAMPLES,
    seed: int = 0,
    commands: Sequence[str] = (),
    echo: Echo = print,
) -> dict[str, Any]:
    """Evaluate a run against its baselines, other runs and external encoders; returns trust.json's content.

    stores: one per preprocessing among the runs, all of the same acquisitions.
    labels: a CSV or TSV; without networks trained from scratch also a DataFrame.
    external: FILE.py:FUNCTION of your own encoders, see octfm.encoder.external.
    groups: columns of subgroups, besides site, age, eye and scanner.
    exclude: a file of volumes to leave out.

    Embeddings and networks trained from scratch are kept in `out` and reused. Raises EvaluationError if a test
    participant was in any pretraining, unless `allow_seen`, if no target can be evaluated, and if two encoders have the
    same name.
    """
    out, opened = local_path(out), [to_evaluate(Store.open(path), exclude) for path in stores]
    if not opened or not len(opened[0]):
        raise EvaluationError("expected a prepared store that holds volumes; give --store")
    # Check all inputs before hours of embedding.
    table = read_labels(labels) if labels is not None else None
    if from_scratch_epochs > 0 and not isinstance(labels, str | Path | None):
        raise EvaluationError(
            "labels: networks that are trained from scratch record the path of their table, and this is a "
            f"{type(labels).__name__}; save it as CSV and give its path, or from_scratch_epochs=0"
        )
    runs = _named([Path(path) for path in (run, *others)])
    pretraining = {name: _pretraining(path, opened[0]) for name, path in runs.items()}
    own = {spec: load_external(spec) for spec in external}
    for spec, (name, _) in own.items():
        if name in runs or name in RESERVED or [n for n, _ in own.values()].count(name) > 1:
            raise EvaluationError(f"--external {spec}: another encoder is named {name}; rename the function")
    common = {"table": table, "targets": targets, "orders": orders, "allow_seen": allow_seen}
    known = seen_if_known(*runs.values(), allow_seen=False)
    # Only for their errors: a wrong target or group, or a seen participant, must show before anything is embedded.
    volumes = of_store(opened[0])
    group_columns(make_study([volumes], {}, **common, seen=rows_seen(volumes, known)), groups, age_bands)
    encoders, kinds = _encoders(runs, own, opened, out / "embeddings", echo)
    seen = rows_seen(encoders[0], known)
    scanners = {name: facts["scanners"] for name, facts in pretraining.items()}
    study = make_study(encoders, kinds, **common, seen=seen, pretrained_on=scanners, resamples=resamples, seed=seed)
    scratch_note = "Left out by --from-scratch-epochs 0."
    if from_scratch_epochs > 0:
        settings = {
            "encoder": str(run),
            "store": str(opened[0].path),
            "labels": None if labels is None else str(labels),
            "exclude": None if exclude is None else one_line(exclude),
            "epochs": from_scratch_epochs,
        }
        folder = out / "from_scratch"
        study, scratch_note = _from_scratch(study, settings, table, orders or {}, folder, allow_seen, echo)
    described = [{"name": e.name, "kind": study.kinds[e.name], "what": _what(e)} for e in study.encoders]
    if study.scratch:
        what = "the run's network, trained for the label alone"
        described.append({"name": FROM_SCRATCH, "kind": "from scratch", "what": what})
    return {
        "format": "octfm-trust",
        "version": 1,
        "reference": study.reference,
        "cohort": _cohort(study),
        "encoders": described,
        "pretraining": pretraining,
        **analyse(study, opened[0], groups, age_bands, echo),
        "from_scratch_note": scratch_note,
        "settings": {
            "design": study.design,
            "resamples": resamples,
            "seed": seed,
            "allow_seen": allow_seen,
            "level": 0.95,
            "from_scratch_epochs": from_scratch_epochs,
        },
        "interval_meaning": INTERVAL_MEANING[study.design],
        "labels": table.path if table else None,
        "stores": [str(store.path) for store in opened],
        "commands": list(commands),
    }


def analyse(
    study: Study, store: Store, groups: Sequence[str], age_bands: Sequence[float], echo: Echo
) -> dict[str, Any]:
    """Run every analysis; each result is under its own key."""
    parts: dict[str, Any] = {"skipped": list(study.skipped)}
    echo("probes of the run and its baselines")
    parts |= claimed(baselines, study)
    echo("leave one scanner out")
    parts["left_out_scanner"] = claimed(leave_one_scanner_out, study)
    parts["domains"] = claimed(domains, study)
    echo("the same eye on several scanners")
    parts["same_eye"] = claimed(same_eye, study)
    echo("subgroups, calibration, scanner leakage, neighbours")
    parts["subgroups"] = claimed(partial(subgroups, columns=groups, age_bands=age_bands), study)
    parts["calibration"] = calibration(study)
    parts["leakage"] = claimed(scanner_leakage, study)
    parts["neighbours"] = claimed(neighbours, study)
    echo("failures and copies")
    parts["failures"] = failures(study)
    parts["copies"] = copies(study, store)
    return parts


def claimed(analysis: Callable[[Study], dict[str, Any]], study: Study) -> dict[str, Any]:
    """The result of an analysis, repeated with more resamples if it has so many comparisons that Holm's correction
    would leave none."""
    found = analysis(study)
    enough = enough_resamples(sum(c["planned"] for c in found["comparisons"]), study.resamples)
    return found if enough == study.resamples else analysis(replace(study, resamples=enough))


def baselines(study: Study) -> dict[str, Any]:
    """Every metric of every encoder on every target, and comparisons of the run with each baseline."""
    rows: list[dict[str, Any]] = []
    comparisons: list[dict[str, Any]] = []
    for task in study.tasks:
        scored: dict[str, list[Scored]] = {
            name: score(
                task.cases,
                name,
                runs,
                task.facts | {"what": study.kinds[name]},
                study.resamples,
                study.seed,
                draws=len(runs),
            )
            for name, runs in study.all_draws(task)
        }
        rows += [s.row for own in scored.values() for s in own]
        for name, own in scored.items():
            # Other runs are not baselines; `domains` compares them.
            if name != study.reference and study.kinds[name] != "other run":
                comparisons += compare_metrics(scored[study.reference], own, leakage=False)
        # What the encoder adds to a map without voxels.
        for arm in (e for e in study.encoders if e.parts):
            for part in (name for name, _ in arm.parts if name != study.reference):
                comparisons += compare_metrics(scored[arm.name], scored[part], leakage=False)
    return {"results": rows, "comparisons": add_claims(comparisons), "planned_metrics": list(PLANNED)}


def _what(encoder: Embeddings) -> str:
    """Description of an encoder without folders of this machine, because the page is shared."""
    return re.sub(r".*[/\\]", "", str(encoder.metadata.get("encoder", "")))


def _named(paths: Sequence[Path]) -> dict[str, Path]:
    """Runs by name, the evaluated one first. Raises EvaluationError for names used twice or reserved."""
    names = [entry_name(path) for path in paths]
    for name in names:
        if names.count(name) > 1 or name in RESERVED:
            raise EvaluationError(f"two encoders are named {name}; give each run once, or rename a folder")
    return dict(zip(names, paths, strict=True))


def _encoders(
    runs: Mapping[str, Path],
    external: Mapping[str, tuple[str, Embed]],
    stores: Sequence[Store],
    folder: Path,
    echo: Echo,
) -> tuple[list[Embeddings], dict[str, Kind]]:
    """Embeddings and kinds, in order: the run, other runs, baselines, external encoders. All are pooled as in the run's
    own settings, so that vectors can be compared."""
    read: list[Embeddings] = []
    first = next(iter(runs))
    pool = common_pool(runs, stores)

    def embed(path: Path, name: str, draw: int | None = None) -> None:
        echo(f"embedding {len(stores[0])} volumes with {name}")
        vectors = embed_run(path, _file_name(name), stores, folder, echo, draw=draw, pool=pool)
        read.append(replace(vectors, name=name))

    for name, path in runs.items():
        embed(path, name)
    for draw, name in enumerate(RANDOM_INIT):
        embed(runs[first], name, draw)
    for baseline in (histogram_baseline, tissue_map_baseline, quality_baseline):
        read.append(read_embeddings(baseline(stores[0], folder)))
    found = make_arms(read)
    data = found[0]
    kinds: dict[str, Kind] = {e.name: "other run" if e.name in runs else "baseline" for e in found}
    kinds[first] = "run"
    for spec, loaded in external.items():
        echo(f"embedding with {spec}")
        found.append(embed_external(spec, stores[0], data, loaded))
        kinds[loaded[0]] = "external"
    return found, kinds


def _pretraining(path: Path, store: Store) -> dict[str, Any]:
    """Scanners, participants and settings of a run's pretraining, from its checkpoint."""
    if is_export(where := find(str(path))):
        raise EvaluationError(
            f"{display_name(where)}: an export, which does not record the scanners of its pretraining; octfm trust "
            "needs the run, octfm leaderboard and octfm probe --embeddings take this encoder"
        )
    _, content = load_newest(path)
    if "encoder" in content["config"]:
        raise EvaluationError(
            f"{path}: a run of octfm finetune or segment; octfm trust needs one of octfm pretrain, octfm leaderboard "
            "takes fine-tuned ones"
        )
    config, participants = stored_config(content["config"]), content["participants"]
    own = {"scanners": config.data.scanners, "leave_out_scanners": config.data.leave_out_scanners}
    runs = [*participants.get("before", ()), own]
    if not all("scanners" in run for run in runs):
        raise EvaluationError(
            f"{path}: began with the weights of an export (model.init), which does not record the scanners of its "
            "pretraining; octfm leaderboard and octfm probe --embeddings take this encoder"
        )
    # Without data.scanners, pretraining used every scanner of its store; this store stands in for it.
    every = {row.scanner for row in store.rows}
    scanners = [(set(run["scanners"]) or every) - set(run["leave_out_scanners"]) for run in runs]
    return {
        "scanners": tuple(sorted(set().union(*scanners))),
        "named": bool(config.data.scanners),
        "participants": participants.get("trained_on", len(participants["hashes"])),
        "steps": config.steps,
        "global_batch_size": config.data.global_batch_size,
        "seed": config.seed,
        "settings": config.model_dump(mode="json", exclude={"seed", "data", "tracking", "runtime"}),
    }


def _from_scratch(
    study: Study,
    common: dict[str, Any],
    table: LabelTable | None,
    orders: Mapping[str, tuple[str, ...]],
    out: Path,
    allow_seen: bool,
    echo: Echo,
) -> tuple[Study, str]:
    """Train the run's architecture from random weights for each label; returns the study with these predictions, and a
    note. The learning rate suits training from scratch: it is higher than in fine-tuning.

    table: of `common["labels"]`, which every training reads again, perhaps hours later. Raises EvaluationError if that
    file has changed."""
    if study.design != "recommended_split":
        return study, "Left out: it needs train and test splits, and this store has none (octfm scan makes them)."
    recipe = {"from_scratch": True, "head_epochs": 0, "lr_encoder": 3e-4, "layer_decay": 1.0, "patience": 15}
    epochs = common["epochs"]
    predictions, notes = {}, []
    for task in study.tasks:
        if task.cases.target.label is not None:
            continue
        order = list(orders.get(task.cases.target.column, ()))
        config = load(FinetuneConfig, common | recipe | {"target": task.name, "order": order, "seed": study.seed})
        folder = out / _file_name(task.name)
        echo(f"training {task.name} from scratch: at most {epochs:g} epochs, chosen on validation participants")
        try:
            finetune(config, folder, allow_seen=allow_seen, echo=lambda line: None)
        except OtherVolumes:
            raise EvaluationError(
                f"{folder}: this network was trained before volumes, splits or labels of {task.name} changed; delete "
                "this folder, and the same command trains it again"
            ) from None
        except EvaluationError as reason:
            echo(str(reason))
            notes.append(f"{task.name} was left out: {reason.public or 'octfm trust says why when it runs.'}")
            continue
        if table is not None and read_labels(common["labels"]) != table:
            raise EvaluationError(
                f"{common['labels']}: changed while octfm trust ran; delete {folder}, and run the same command again"
            )
        saved = read_predictions(folder / "predictions.parquet")
        predictions[task.name] = saved.for_cases(task.cases, study.data, task.rounds[0].test)
    kinds: dict[str, Kind] = {**study.kinds, FROM_SCRATCH: "from scratch"}
    note = f"At most {epochs:g} epochs, learning rate 3e-4, the epoch chosen on validation participants; one seed."
    return replace(study, scratch=predictions, kinds=kinds), " ".join([note, *notes])


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)


def _cohort(study: Study) -> dict[str, Any]:
    """Numbers of acquisitions and participants, all and tested, overall and per scanner."""
    data, tested, person = study.data, study.tested, people(study.data.participant)

    def count(keep: np.ndarray) -> int:
        return len(np.unique(person[keep]))

    return {
        "acquisitions": len(data.acquisition),
        "participants": count(np.ones(len(tested), bool)),
        "tested_acquisitions": int(tested.sum()),
        "tested_participants": count(tested),
        "tested_seen_in_pretraining": count(tested & study.seen),
        "by_scanner": {
            scanner: {
                "acquisitions": int((data.scanner == scanner).sum()),
                "tested_participants": count(tested & (data.scanner == scanner)),
            }
            for scanner in sorted(set(data.scanner.tolist()))
        },
        "design": study.design,
    }
