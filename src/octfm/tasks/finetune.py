"""Fine-tuning for one label: head, then encoder; chosen on validation participants, judged once on test ones."""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from octfm.catalog.labels import read_labels
from octfm.config import load
from octfm.encoder.embeddings import of_store
from octfm.encoder.encoder import beginning_of, load_encoder, opened, participants_in, seen_if_known
from octfm.encoder.tokens import token_features
from octfm.encoder.tuned import Answer
from octfm.errors import ConfigError, Echo, EvaluationError
from octfm.evaluation.cases import (
    Cases,
    Round,
    Seen,
    Skip,
    find_target,
    log_share,
    make_cases,
    make_rounds,
    participant_folds,
)
from octfm.evaluation.metrics import balanced_accuracy, r_squared
from octfm.evaluation.probe import RESAMPLES, describe, rows_seen, summary_lines, write_probe
from octfm.evaluation.scoring import Predictions, finite, odd_numbers, score, to_units
from octfm.io.location import Location, from_json, location
from octfm.pretraining.preflight.ranks import require_disjoint
from octfm.run import checkpoint
from octfm.run.checkpoint_writer import Retention
from octfm.run.folder import Identity, Kind, RunFolder, git_state, open_run, resume, volumes_digest
from octfm.run.launch import join
from octfm.run.loop import Interruption, Session, open_session, train
from octfm.run.runtime import Runtime, environment, torch_defaults
from octfm.run.tracking import TrackingConfig
from octfm.store.loader import Loader
from octfm.store.selection import evenly, to_evaluate
from octfm.store.store import Store
from octfm.tasks.finetune_settings import MAY_CHANGE, FinetuneConfig
from octfm.tasks.predictions import write_predictions
from octfm.tasks.task_model import Features, Live, Source, TaskModel
from octfm.version import __version__

STATISTICS_FROM = 128
"""Training volumes whose tokens give the mean and deviation that the head standardises by."""
FINE_TUNING = Kind("finetune", MAY_CHANGE, lambda settings, _: load(FinetuneConfig, settings))


@dataclass(frozen=True, eq=False)
class Task:
    """A label, and positions in its cases to train on, to validate on and to test."""

    cases: Cases
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    facts: dict[str, Any]
    drawn: bool = False
    """Whether participants to validate on were drawn, because val alone cannot choose an epoch."""


@torch_defaults()
def finetune(
    config: FinetuneConfig,
    out: str | Location,
    device: str | torch.device | None = None,
    *,
    allow_seen: bool = False,
    echo: Echo = print,
) -> Path:
    """Train until validation no longer gains; returns the run folder. The same call resumes an interrupted run.

    Writes config.yaml, run.json, metrics.jsonl, one checkpoint, predictions.parquet and finetune.json (in the format
    of probe.json), to a folder or to an address in a bucket. Raises EvaluationError if a test participant was in the
    encoder's pretraining (unless `allow_seen`), and Preempted after SIGTERM, SIGINT or SIGHUP. Under torchrun every
    rank makes this call and takes its share of every batch; only rank 0 prints and writes.
    """
    if not isinstance(config, FinetuneConfig):
        raise TypeError(f"config: expected a FinetuneConfig, got {type(config).__name__}; octfm.config.load makes one")
    config = load(FinetuneConfig, dict(config))  # model_copy(update=…) of a caller checks nothing
    if config.encoder is None or config.store is None:
        raise ConfigError(
            "encoder and store: name a pretraining run and a prepared store, encoder=runs/a store=prepared/"
        )
    out, store = location(out), Store.open(config.store)
    runtime = join(config.runtime, config.precision, device)
    try:
        with runtime.guarded():
            echo_first = echo if runtime.leads else lambda _: None
            return _finetune(config, out, store, runtime, allow_seen, echo_first)
    finally:
        runtime.close()


def _finetune(
    config: FinetuneConfig, out: Location, prepared: Store, runtime: Runtime, allow_seen: bool, echo: Echo
) -> Path:
    if config.batch_size % runtime.world:
        raise ConfigError(
            f"batch_size {config.batch_size} is not a multiple of the {runtime.world} ranks that share it"
        )
    encoder = load_encoder(str(config.encoder), random_init=config.from_scratch, runtime=runtime)
    store = to_evaluate(prepared, config.exclude, encoder.config.data.modalities, echo)
    encoder = encoder.reading(store)
    seen = () if config.from_scratch else seen_if_known(str(config.encoder), allow_seen=allow_seen)
    task = find_task(config, store, seen, allow_seen)
    if remark := odd_numbers(task.cases):
        echo(remark)
    known = {"key": None, "hashes": []} if config.from_scratch else participants_in(*opened(str(config.encoder)))
    before = [checkpoint.hashes_of(part) for part in checkpoint.parts_of(known) if part["hashes"]]
    # With other volumes, splits or labels it would be another run.
    parts = (task.train, task.validation, task.test)
    used = np.concatenate(parts)
    data = volumes_digest(store, task.cases.rows[used], task.cases.label[used].tolist())
    # The order of a store tells how it was prepared, in one go or several.
    acquisition = np.array([store.rows[row].acquisition for row in task.cases.rows])
    used = np.concatenate([part[np.argsort(acquisition[part])] for part in parts])
    ordered = volumes_digest(store, task.cases.rows[used], task.cases.label[used].tolist())
    recipe = {**config.recipe(), "encoder": encoder.key, "data": ordered}
    named = encoder.key if config.frozen else beginning_of(str(config.encoder), encoder)
    counts = [len(part) for part in parts]
    identity = Identity(FINE_TUNING, config, store.fingerprint, data, encoder=named, counts=counts)
    with open_run(out, identity, runtime, echo=echo) as run, Interruption() as interruption:
        model = TaskModel(config, encoder, len(task.cases.classes or ()) or 1)
        source: Source = Live(encoder, store, config)
        if config.frozen:

            def leave() -> None:
                # Several ranks stop together, at a step: one that left here would keep the others waiting.
                if runtime.world == 1:
                    interruption.leave("token features were computed")

            kept = token_features(
                encoder,
                store,
                run.path,
                per_volume=config.tokens_per_volume,
                max_gb=config.max_cache_gb,
                between=leave,
            )
            source = Features(kept, store, runtime)
        # Its own, because others may know that of the encoder's run, such as everybody with a published export.
        key = runtime.first(lambda: run.key)
        training = FineTuning(task, store, model, source, key, before)
        if not resume(run, training, echo):
            training.begin()
        # The last bits of token statistics may differ between hosts.
        runtime.share(model.module.state_dict().values())
        rows = task.cases.rows[task.train]
        # The last checkpoint holds the best state as well.
        session = open_session(training, run, Retention(1), echo)
        # For the order only, so nothing is read ahead: the source reads volumes.
        with Loader(store, rows, config.batch_size, config.seed, runtime.rank, runtime.world, prefetch=0) as loader:
            training.loader = loader
            require_disjoint(runtime, loader, training.step)
            train(training, session, interruption)
        assert training.best is not None
        model.module.load_state_dict(training.best["model"])
        predictions = _predictions(training)
        runtime.first(lambda: _write_result(training, predictions, recipe, run))
    return run.path


def _write_result(training: "FineTuning", predictions: Predictions, recipe: dict[str, Any], run: RunFolder) -> None:
    task, config, best = training.task, training.config, training.best
    assert best is not None
    prior = log_share(task.cases, task.train) if task.cases.classes else None
    file = run.path / "predictions.parquet"
    write_predictions(file, training.store, task.cases, prior, predictions, recipe, config.seed, best["epoch"])
    rows = [s.row for s in score(task.cases, run.path.name, [predictions], task.facts, RESAMPLES, 0)]
    result = {
        "format": "octfm-finetune",
        "version": 1,
        "results": rows,
        "comparisons": [],
        "best_epoch": best["epoch"],
        "validation_score": finite(best["score"]),
        "validation_participants": len(np.unique(task.cases.participant[task.validation])),
        "validation_drawn": task.drawn,
        "settings": config.model_dump(mode="json"),
        "environment": environment(training.runtime),
        "git": git_state(),
    }
    write_probe(run.path / "finetune.json", result)
    run.publish()


def find_task(config: FinetuneConfig, store: Store, seen: Seen | None, allow_seen: bool) -> Task:
    """Labelled participants of the store's splits. Where val has no labelled participant, or all of them are of one
    class, which any constant answer gets right, a fifth of train and val together is used to validate."""
    data = of_store(store)
    table = read_labels(config.labels) if config.labels is not None else None
    orders = {config.target: config.order} if config.order else None
    target = find_target(config.target, data, table, orders)
    if not {"train", "test"} <= set(data.split):
        raise EvaluationError(
            f"{store.path}: expected train and test splits, got {sorted({str(s) for s in data.split})}; octfm scan "
            "makes them"
        )
    seen_rows = rows_seen(data, seen)
    try:
        cases, rounds = make_rounds(
            make_cases(target, data, table), data, "recommended_split", seen_rows, allow_seen, 1, config.seed
        )
    except Skip as reason:
        raise reason.refusal(config.target) from None
    learning, test = rounds[0].train, rounds[0].test
    validates = np.array([data.split[row] == "val" for row in cases.rows[learning]])
    one_class = cases.classes is not None and len(np.unique(cases.label[learning][validates])) < 2
    if drawn := one_class or not validates.any():
        label, stratify = cases.label[learning], cases.classes is not None
        fold = participant_folds(cases.participant[learning], label, 5, 0, stratify=stratify)
        # A rare class is not in every fifth.
        validates = fold == next(k for k in range(5) if not stratify or len(np.unique(label[fold == k])) > 1)
    train, validation = learning[~validates], learning[validates]
    absent = [name for k, name in enumerate(cases.classes or ()) if k not in cases.label[train]]
    if absent or not len(train):
        raise EvaluationError(
            f"target {config.target}: no training participant outside the validation set has "
            f"{', '.join(absent) or 'a label'}; label more participants"
        )
    facts = describe(cases, [Round(train, test)], "recommended_split", seen_rows)
    facts["readout"] = "attention" if config.pool == "attention" else "mean"
    return Task(cases, train, validation, test, facts, drawn)


class FineTuning:
    """A fine-tuning, driven by run/loop.py. It keeps its last state, from which it resumes, and its best one."""

    loader: Loader
    tracking = TrackingConfig()

    def __init__(
        self, task: Task, store: Store, model: TaskModel, source: Source, key: str, before: Sequence[dict[str, Any]]
    ):
        """`key`: that of this run's hashes of participants; `before`: key and hashes of those whom the encoder has
        seen, of each of its runs."""
        self.task, self.store, self.model, self.source = task, store, model, source
        self.config, self.runtime, self.target = model.config, model.runtime, _Target(task, model)
        people = [store.rows[row].participant for row in task.cases.rows[np.r_[task.train, task.validation]]]
        self.participants: dict[str, Any] = {"key": key, "hashes": checkpoint.participant_hashes(people, key)}
        if before:
            self.participants["before"] = list(before)
        batches = len(task.train) / self.config.batch_size
        self.steps = max(1, math.ceil(self.config.epochs * batches))
        self.head_steps = 0 if self.config.frozen else min(self.steps, math.ceil(self.config.head_epochs * batches))
        self.frozen = {"frozen_encoder": model.encoder.digest} if self.config.frozen else {}
        self.step, self.stale, self.loss = 0, 0, 0.0
        self.best: dict[str, Any] | None = None
        """score, loss, epoch and model of the best validation so far."""

    def begin(self) -> None:
        """Standardise tokens by those of some training volumes."""
        config, rows = self.config, evenly(self.task.cases.rows[self.task.train], STATISTICS_FROM)
        with torch.no_grad(), self.runtime.autocast():
            parts = [
                self.source.tokens(rows[i : i + config.per_device_batch_size], None)
                for i in range(0, len(rows), config.per_device_batch_size)
            ]
            self.model.head.standardise_by(torch.cat([t for t, _ in parts]), torch.cat([c for _, c in parts]))

    @property
    def finished(self) -> bool:
        return self.step >= self.steps or self.stale >= self.config.patience

    def update(self, session: Session, interruption: Interruption) -> str | None:
        """One step: this rank's share of the batch in parts, averaged gradients, clipped, AdamW."""
        model, step = self.model, self.step
        model.set_rates(step, self.steps, self.head_steps)
        model.module.train()
        session.waiting.for_("data")
        position = self.loader.positions(step)
        rows = self.loader.indices(position)
        model.optimizer.zero_grad(set_to_none=True)
        losses = []
        for i in range(0, len(rows), self.config.per_device_batch_size):
            part = slice(i, i + self.config.per_device_batch_size)
            answers = model.answers(self.source, rows[part], position[part])
            # Each part is a sum over volumes divided by all of them: together the gradient of the mean.
            part_loss = self.target.loss(answers, rows[part]) / len(rows)
            part_loss.backward()
            losses.append(part_loss.detach())
        # Read after the last part: the device works on while the next volumes are read.
        loss = sum(torch.stack(losses).tolist())
        session.waiting.for_("the other ranks")
        loss, signal_name = _agree(self.runtime, loss, interruption.signal_name)
        trained = [p for p in model.module.parameters() if p.grad is not None]
        self.runtime.average_gradients(trained)
        grad_norm = float(self.runtime.clip(trained, self.config.clip_grad_norm))
        # Before the update: afterwards the weights would be lost, in the only checkpoint as well.
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise EvaluationError(
                f"{session.run.path}: the loss is {loss} and the gradient norm {grad_norm} at step {step + 1}; lower "
                "lr_head and lr_encoder, or use precision fp32"
            )
        model.optimizer.step()
        rates = {f"lr_{g['part']}": g["lr"] for g in model.optimizer.param_groups}
        session.metrics.write("train", step, loss=loss, grad_norm=grad_norm, **rates)
        self.step += 1
        self.loss = loss
        return signal_name

    def recover(self, session: Session) -> bool:
        return False

    def validate(self, session: Session) -> bool:
        """After every epoch: keep the state if it is the best so far; True, since the checkpoint holds it."""
        before, epoch = (step * self.config.batch_size // len(self.task.train) for step in (self.step - 1, self.step))
        if self.step == self.steps:
            epoch = math.ceil(self.config.epochs)
        elif epoch == before:
            return False
        value, held_out = self.held_out_score()
        session.metrics.write("validation", self.step - 1, score=value, loss=held_out)
        # With few participants many epochs reach the same score: the loss decides between them.
        if self.best is None or _rank(value, held_out) > _rank(self.best["score"], self.best["loss"]):
            state = checkpoint.snapshot(self.model.module.state_dict())
            self.best = {"score": value, "loss": held_out, "epoch": epoch, "model": state}
            self.stale = 0
        else:
            self.stale += 1
        session.echo(
            f"epoch {epoch:>3}  step {self.step}/{self.steps}  loss {self.loss:.3f}  "
            f"validation {self.target.metric} {value:.3f}  best {self.best['score']:.3f}"
        )
        return True

    def held_out_score(self) -> tuple[float, float]:
        """Balanced accuracy (R² for a number) on validation participants, scored as by the probe, and mean loss."""
        task, rows = self.task, self.task.cases.rows[self.task.validation]
        answers = _answers(self.model, self.source, rows)
        loss = float(self.target.loss(self.runtime.tensor(answers), rows)) / len(rows)
        units = to_units(task.cases, Predictions(task.validation, self.target.answer.value(answers)))
        if task.cases.classes is None:
            return r_squared(units.truth, units.value[:, 0]), loss
        return balanced_accuracy(units.truth, units.value.argmax(1)), loss

    def content(self) -> dict[str, Any]:
        return {
            "model": self.model.module.state_dict(),
            "optimizer": self.model.optimizer.state_dict(),
            "state": {"best": self.best, "stale": self.stale},
            "config": self.config.model_dump(mode="json"),
            "encoder_config": self.model.encoder.config.model_dump(mode="json"),
            "answer": self.target.answer.to_dict(),
            "preprocessing": self.store.preprocessing.model_dump(mode="json"),
            "fingerprint": self.store.fingerprint,
            **self.frozen,
            "participants": self.participants,
            "octfm": __version__,
        }

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        # Rank 0 has read the file; the others need the best state as well.
        found = self.runtime.first(lambda: content)
        assert found is not None
        self.model.module.load_state_dict(found["model"])
        self.model.optimizer.load_state_dict(found["optimizer"])
        self.step, self.best, self.stale = found["step"], found["state"]["best"], found["state"]["stale"]


def _rank(score: float, loss: float) -> tuple[float, float]:
    """Higher is better. R² of labels that are all alike is not a number, and then the loss alone decides."""
    return (score if math.isfinite(score) else -math.inf), -loss


def _agree(runtime: Runtime, loss: float, signal_name: str | None) -> tuple[float, str | None]:
    """The mean loss of all ranks and a signal that any rank was sent: alike on all, so that they decide alike."""
    own = np.array([loss, signal.Signals[signal_name] if signal_name else 0], np.float64)
    everyone = runtime.exchange(own)
    number = int(everyone[:, 1].max())
    return float(everyone[:, 0].mean()), signal.Signals(number).name if number else None


class _Target:
    """Labels as tensors, the meaning of the head's outputs, and the loss of a target's kind."""

    def __init__(self, task: Task, model: TaskModel):
        self.task, self.runtime = task, model.runtime
        cases, weighted = task.cases, model.config.class_weights
        # From a row of the store to its case; -1 without one.
        self._case = np.full(int(cases.rows.max()) + 1, -1)
        self._case[cases.rows] = np.arange(len(cases.rows))
        self.weight: Tensor | None = None
        name, labels = cases.target.name, cases.label[task.train]
        if cases.classes is None:
            self.answer = Answer(name, mean=float(labels.mean()), std=float(max(labels.std(), 1e-9)))
            return
        count = np.bincount(labels, minlength=len(cases.classes))
        # Shares of the training volumes are what a loss without class weights learns.
        prior = tuple(np.log(np.maximum(count / len(labels), 1e-6)).tolist())
        self.answer = Answer(name, tuple(cases.classes), cases.kind == "ordinal", weighted=weighted, log_prior=prior)
        if weighted:
            self.weight = self.runtime.tensor((len(labels) / (len(count) * count)).astype(np.float32))

    @property
    def metric(self) -> str:
        return "R²" if self.task.cases.classes is None else "balanced accuracy"

    def loss(self, answers: Tensor, rows: np.ndarray) -> Tensor:
        """The loss, summed over volumes."""
        label = self.task.cases.label[self._case[rows]]
        if self.task.cases.classes is None:
            truth = self.runtime.tensor(((label - self.answer.mean) / self.answer.std).astype(np.float32))
            return ((answers[:, 0] - truth) ** 2).sum()
        truth = self.runtime.tensor(label.astype(np.int64))
        each = F.cross_entropy(answers, truth, reduction="none")
        return (each if self.weight is None else each * self.weight[truth]).sum()


def _predictions(training: FineTuning) -> Predictions:
    """Of the tested participants, by the weights that the model holds now."""
    task = training.task
    answers = _answers(training.model, training.source, task.cases.rows[task.test])
    value = training.target.answer.value(answers).astype(float)
    if task.cases.classes is None:
        return Predictions(task.test, value)
    grade = None
    if task.cases.kind == "ordinal":
        p = np.exp(value - value.max(1, keepdims=True))
        grade = p @ np.arange(p.shape[1]) / p.sum(1)
    return Predictions(task.test, value, np.tile(log_share(task.cases, task.train), (len(value), 1)), grade)


@torch.no_grad()
def _answers(model: TaskModel, source: Source, rows: np.ndarray) -> np.ndarray:
    """float32 [n, O] without augmentation, on all ranks, which share the work."""
    model.module.eval()
    size = model.config.per_device_batch_size
    own = model.runtime.part(np.arange(0, len(rows), size))
    parts = [model.answers(source, rows[i : i + size]).cpu().numpy() for i in own]
    return model.runtime.collect(np.concatenate([*parts, np.zeros((0, model.outputs), np.float32)]))


def summary(out: str | Path) -> list[str]:
    """One line per metric of a finished run, for a terminal."""
    result = from_json((Path(out) / "finetune.json").read_text("utf-8"))
    drawn = ", drawn from train and val: val alone has too few labels" * result.get("validation_drawn", False)
    chosen = f"best epoch {result['best_epoch']} by {result['validation_participants']} validation participants{drawn}"
    return [chosen, *summary_lines({**result, "skipped": []}, "finetune.json")]
