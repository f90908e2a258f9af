"""Fine-tuning for one label: head first, then the encoder; chosen on validation participants, judged once on test participants."""

import json
import math
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octfm.catalog.labels import read_labels
from octfm.encoder.embeddings import Embeddings, of_store
from octfm.encoder.encoder import Encoder, load_encoder, seen_by
from octfm.encoder.ranks import collect
from octfm.encoder.tokens import token_features
from octfm.encoder.tuned import Answer
from octfm.errors import ConfigError, EvaluationError, Preempted
from octfm.evaluation.cases import Cases, Round, Skip, find_targets, make_cases, make_rounds, participant_folds
from octfm.evaluation.metrics import balanced_accuracy, r_squared
from octfm.evaluation.probe import RESAMPLES, describe, rows_seen, write_probe
from octfm.evaluation.scoring import Predictions, score, to_units
from octfm.io.location import local_path
from octfm.pretraining.preflight.ranks import require_disjoint
from octfm.pretraining.run_folder import git_state
from octfm.run import checkpoint
from octfm.run.interruption import Interruption
from octfm.run.launch import join
from octfm.run.runtime import Runtime, environment
from octfm.run.tracking import Metrics, Unheard
from octfm.store.exclusion import without_excluded
from octfm.store.loader import Loader
from octfm.store.store import Store
from octfm.tasks.finetune_folder import claim_together, newest, save
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.predictions import write_predictions
from octfm.tasks.task_model import Features, Live, Source, TaskModel

Echo = Callable[[str], None]
STATISTICS_FROM = 128
"""Training volumes that tokens are standardised by."""


@dataclass(frozen=True, eq=False)
class Task:
    """Who is trained on, validated on and tested: positions in the cases."""

    cases: Cases
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    facts: dict[str, Any]

    @property
    def log_prior(self) -> np.ndarray:
        """[K] log of how common classes are in training."""
        share = np.bincount(self.cases.label[self.train], minlength=len(self.cases.classes or ())) / len(self.train)
        return np.log(np.maximum(share, 1e-6))


def finetune(
    config: FinetuneConfig, out: str | Path, device: str | None = None, *, allow_seen: bool = False, echo: Echo = print
) -> Path:
    """Train until validation participants no longer gain and return the run folder; the same call resumes an interrupted run.

    Writes config.yaml, metrics.jsonl, one checkpoint, predictions.parquet and finetune.json (as probe.json). Raises EvaluationError where a
    test participant was in the encoder's pretraining (unless `allow_seen`), Preempted after SIGTERM or SIGINT. Under torchrun every rank
    makes this call, takes its share of every batch, and rank 0 alone speaks and writes.
    """
    if config.encoder is None or config.store is None:
        raise ConfigError(
            "encoder and store: name a pretraining run and a prepared store, encoder=runs/a store=prepared/"
        )
    out, store = local_path(out), without_excluded(Store.open(config.store), config.exclude)
    runtime = join(config.runtime, config.precision, device)
    try:
        with runtime.guarded():
            _finetune(config, out, store, runtime, allow_seen, echo if runtime.leads else lambda _: None)
    finally:
        runtime.close()
    return out


def _finetune(config: FinetuneConfig, out: Path, store: Store, runtime: Runtime, allow_seen: bool, echo: Echo) -> None:
    if config.batch_size % runtime.world:
        raise ConfigError(
            f"batch_size {config.batch_size} is not a multiple of the {runtime.world} ranks that share it"
        )
    encoder = load_encoder(str(config.encoder), random_init=config.from_scratch, runtime=runtime)
    if store.fingerprint != encoder.fingerprint:
        raise EvaluationError(
            f"{store.path}: prepared with other settings than {encoder.source} was trained on; octfm prepare --like (F15)"
        )
    seen = (lambda _: False) if config.from_scratch else seen_by(str(config.encoder))
    task = find_task(config, store, seen, allow_seen)
    with claim_together(runtime, out, config, echo), Interruption() as interruption:
        model = TaskModel(config, encoder, len(task.cases.classes or ()) or 1)
        source: Source = Live(encoder, store, config)
        if config.frozen:
            kept = token_features(encoder, store, out, per_volume=config.tokens_per_volume, max_gb=config.max_cache_gb)
            source = Features(kept, store, runtime)
        best = _train(config, task, store, model, source, encoder, out, interruption, echo)
        model.module.load_state_dict(best["model"])
        predictions = _predictions(task, model, source, task.test)
        if runtime.leads:
            _write_result(config, task, store, predictions, best, runtime, out)


def _write_result(
    config: FinetuneConfig,
    task: Task,
    store: Store,
    predictions: Predictions,
    best: dict[str, Any],
    runtime: Runtime,
    out: Path,
) -> None:
    prior = task.log_prior if task.cases.classes else None
    write_predictions(out / "predictions.parquet", store, task.cases, prior, predictions, config, best["epoch"])
    rows = [s.row for s in score(task.cases, out.name, [predictions], task.facts, RESAMPLES, 0)]
    result = {
        "format": "octfm-finetune",
        "version": 1,
        "results": rows,
        "comparisons": [],
        "best_epoch": best["epoch"],
        "validation_score": best["score"],
        "validation_participants": len(np.unique(task.cases.participant[task.validation])),
        "settings": config.model_dump(mode="json"),
        "environment": environment(runtime),
        "git": git_state(),
    }
    write_probe(out / "finetune.json", result)


def find_task(config: FinetuneConfig, store: Store, seen: Callable[[str], bool], allow_seen: bool) -> Task:
    """The participants of the store's splits that have the label; without a val split, a fifth of the training participants validates."""
    data: Embeddings = of_store(store)
    table = read_labels(config.labels) if config.labels is not None else None
    orders = {config.target: config.order} if config.order else None
    targets = find_targets([config.target], data, table, orders)
    if len(targets) != 1:
        raise EvaluationError(f"target {config.target}: its cells hold several labels; give a column of one label each")
    if not {"train", "test"} <= set(data.split):
        raise EvaluationError(
            f"{store.path}: expected train and test splits, got {sorted({str(s) for s in data.split})}; octfm scan makes them"
        )
    seen_rows = rows_seen(data, seen)
    try:
        cases, rounds = make_rounds(
            make_cases(targets[0], data, table), data, "recommended_split", seen_rows, allow_seen, 1, config.seed
        )
    except Skip as reason:
        raise EvaluationError(f"target {config.target}: {reason}") from None
    learning, test = rounds[0].train, rounds[0].test
    validates = np.array([data.split[row] == "val" for row in cases.rows[learning]])
    if not validates.any():
        fold = participant_folds(
            cases.participant[learning], cases.label[learning], 5, 0, stratify=cases.classes is not None
        )
        validates = fold == 0
    train, validation = learning[~validates], learning[validates]
    if not len(train) or (cases.classes is not None and len(np.unique(cases.label[train])) < len(cases.classes)):
        raise EvaluationError(f"target {config.target}: some class has no training participant outside validation")
    facts = describe(cases, [Round(train, test)], "recommended_split", seen_rows)
    facts["readout"] = "attention" if config.pool == "attention" else "mean"
    return Task(cases, train, validation, test, facts)


def _train(
    config: FinetuneConfig,
    task: Task,
    store: Store,
    model: TaskModel,
    source: Source,
    encoder: Encoder,
    out: Path,
    interruption: Interruption,
    echo: Echo,
) -> dict[str, Any]:
    """The loop; returns the best state. All ranks run it and all come to the same decisions."""
    runtime, train_rows = model.runtime, task.cases.rows[task.train]
    steps = max(1, math.ceil(config.epochs * len(train_rows) / config.batch_size))
    per_epoch = max(1, round(len(train_rows) / config.batch_size))
    head_steps = 0 if config.frozen else min(steps, math.ceil(config.head_epochs * len(train_rows) / config.batch_size))
    target = _Target(task, config, model)
    participants = task.cases.participant[np.r_[task.train, task.validation]].tolist()
    step, best, stale = 0, None, 0
    content = runtime.first(lambda: newest(out, config, store))
    if content is not None:
        model.module.load_state_dict(content["model"])
        model.optimizer.load_state_dict(content["optimizer"])
        step, best, stale = content["step"], content["state"]["best"], content["state"]["stale"]
        echo(f"resuming {out} after {step} updates")
    else:
        with torch.no_grad(), runtime.autocast():
            rows = train_rows[np.linspace(0, len(train_rows) - 1, min(STATISTICS_FROM, len(train_rows))).astype(int)]
            parts = [
                source.tokens(rows[i : i + config.per_device_batch_size], None)
                for i in range(0, len(rows), config.per_device_batch_size)
            ]
            model.head.standardise_by(torch.cat([t for t, _ in parts]), torch.cat([c for _, c in parts]))
    runtime.share(model.module.state_dict().values())
    metrics = Metrics(out / "metrics.jsonl", step) if runtime.leads else Unheard()
    if metrics.broken is not None:
        echo(f"warning: {metrics.broken}")

    def keep() -> None:
        runtime.first(lambda: save(out, step, model, best, stale, encoder, store, participants, target.answer))

    with Loader(store, train_rows, config.batch_size, config.seed, runtime.rank, runtime.world, prefetch=0) as loader:
        require_disjoint(runtime, loader, step)
        while step < steps and stale < config.patience:
            model.set_rates(step, steps, head_steps)
            model.module.train()
            position = loader.positions(step)
            rows = loader.indices(position)
            model.optimizer.zero_grad(set_to_none=True)
            loss = 0.0
            for i in range(0, len(rows), config.per_device_batch_size):
                part = slice(i, i + config.per_device_batch_size)
                part_loss = target.loss(model.answers(source, rows[part], position[part]), rows[part]) / len(rows)
                part_loss.backward()
                loss += float(part_loss.detach())
            loss, asked = _tell(runtime, loss, interruption.asked)
            if not math.isfinite(loss):
                raise EvaluationError(
                    f"{out}: the loss is {loss} at step {step}; lower lr_head and lr_encoder, or use precision fp32"
                )
            trained = [p for p in model.module.parameters() if p.grad is not None]
            runtime.average_gradients(trained)
            grad_norm = float(runtime.clip(trained, config.clip_grad_norm))
            model.optimizer.step()
            rates = {f"lr_{g['part']}": g["lr"] for g in model.optimizer.param_groups}
            metrics.write("train", step, loss=loss, grad_norm=grad_norm, **rates)
            step += 1
            if step % per_epoch == 0 or step == steps:
                value, held_out = validate(task, model, source, target)
                metrics.write("validation", step - 1, score=value, loss=held_out)
                if best is None or (value, -held_out) > (best["score"], -best["loss"]):
                    state = checkpoint.snapshot(model.module.state_dict())
                    best, stale = (
                        {"score": value, "loss": held_out, "epoch": round(step / per_epoch), "model": state},
                        0,
                    )
                else:
                    stale += 1
                echo(
                    f"epoch {round(step / per_epoch):>3}  loss {loss:.3f}  validation {target.metric} {value:.3f}  best {best['score']:.3f}"
                )
                keep()
            if asked and step < steps and stale < config.patience:
                keep()
                metrics.close()
                raise Preempted(f"{asked}: saved after {step} of {steps} updates; run again to continue")
    metrics.close()
    assert best is not None
    return best


def _tell(runtime: Runtime, loss: float, asked: str | None) -> tuple[float, str | None]:
    """The mean loss of all ranks, and a signal that some rank was sent: the same numbers everywhere, so the same decisions."""
    told = runtime.exchange(np.array([loss, signal.Signals[asked] if asked else 0], np.float64))
    number = int(told[:, 1].max())
    return float(told[:, 0].mean()), signal.Signals(number).name if number else None


class _Target:
    """Labels as tensors, and the loss of a target's kind."""

    def __init__(self, task: Task, config: FinetuneConfig, model: TaskModel):
        self.task, self.runtime = task, model.runtime
        labels = task.cases.label
        self._case = np.full(int(task.cases.rows.max()) + 1, -1)
        self._case[task.cases.rows] = np.arange(len(task.cases.rows))
        self.weight: Tensor | None = None
        self.answer = what_is_answered(task, config)
        if task.cases.classes is not None and config.class_weights:
            count = np.bincount(labels[task.train], minlength=len(task.cases.classes))
            self.weight = self.runtime.tensor((len(task.train) / (len(count) * count)).astype(np.float32))

    @property
    def metric(self) -> str:
        return "R²" if self.task.cases.classes is None else "balanced accuracy"

    def loss(self, answers: Tensor, rows: np.ndarray) -> Tensor:
        """Summed over the volumes."""
        label = self.task.cases.label[self._case[rows]]
        if self.task.cases.classes is None:
            truth = self.runtime.tensor(((label - self.answer.mean) / self.answer.std).astype(np.float32))
            return ((answers[:, 0] - truth) ** 2).sum()
        truth = self.runtime.tensor(label.astype(np.int64))
        each = F.cross_entropy(answers, truth, reduction="none")
        return (each if self.weight is None else each * self.weight[truth]).sum()


def what_is_answered(task: Task, config: FinetuneConfig) -> Answer:
    """The meaning of the head's outputs: for a number the mean and deviation of its training labels, for classes their names."""
    cases, labels = task.cases, task.cases.label[task.train]
    if cases.classes is None:
        return Answer(cases.target.name, mean=float(labels.mean()), std=float(max(labels.std(), 1e-9)))
    prior = tuple(task.log_prior.tolist())
    return Answer(
        cases.target.name, tuple(cases.classes), cases.kind == "ordinal", weighted=config.class_weights, log_prior=prior
    )


def validate(task: Task, model: TaskModel, source: Source, target: _Target) -> tuple[float, float]:
    """Balanced accuracy (R²) of validation participants, scored as the probe scores them; and the mean loss per volume."""
    rows = task.cases.rows[task.validation]
    answers = _answers(model, source, rows)
    loss = float(target.loss(model.runtime.tensor(answers), rows)) / len(rows)
    units = to_units(task.cases, Predictions(task.validation, target.answer.value(answers)))
    if task.cases.classes is None:
        return r_squared(units.truth, units.value[:, 0]), loss
    return balanced_accuracy(units.truth, units.value.argmax(1)), loss


def _predictions(task: Task, model: TaskModel, source: Source, positions: np.ndarray) -> Predictions:
    target = _Target(task, model.config, model)
    value = target.answer.value(_answers(model, source, task.cases.rows[positions])).astype(float)
    if task.cases.classes is None:
        return Predictions(positions, value)
    grade = None
    if task.cases.kind == "ordinal":
        p = np.exp(value - value.max(1, keepdims=True))
        grade = p @ np.arange(p.shape[1]) / p.sum(1)
    return Predictions(positions, value, np.tile(task.log_prior, (len(positions), 1)), grade)


@torch.no_grad()
def _answers(model: TaskModel, source: Source, rows: np.ndarray) -> np.ndarray:
    """float32 [n, O] without augmentation, computed by all ranks and known to all."""
    model.module.eval()
    size = model.config.per_device_batch_size
    own = model.runtime.part(np.arange(0, len(rows), size))
    parts = [model.answers(source, rows[i : i + size]).cpu().numpy() for i in own]
    return collect(model.runtime, np.concatenate([*parts, np.zeros((0, model.outputs), np.float32)]))


def summary(out: str | Path) -> list[str]:
    """One line per metric of a finished run, for a terminal."""
    from octfm.evaluation.probe import summary_lines

    result = json.loads((Path(out) / "finetune.json").read_text())
    chosen = f"best epoch {result['best_epoch']} by {result['validation_participants']} validation participants"
    return [chosen, *summary_lines({**result, "skipped": []})]
