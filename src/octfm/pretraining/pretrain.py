"""Self-supervised pretraining: `pretrain` sets a run up, `Pretraining.update` is one step of the algorithm,
run/loop.py repeats it."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octfm.errors import ConfigError, Echo
from octfm.io.location import Location, location
from octfm.models.objectives.objective import Objective, ObjectiveConfig
from octfm.pretraining import preflight
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import feed, health, monitors
from octfm.pretraining.monitors.limits import limits
from octfm.pretraining.monitors.measure import Window, train_row, update, validate
from octfm.pretraining.monitors.online_probe import find_cases, online_probe, tissue_vectors
from octfm.pretraining.monitors.sample_picture import sample_picture
from octfm.pretraining.preflight.ranks import (
    require_disjoint,
    require_same_data,
    require_same_folder,
    require_same_order,
)
from octfm.pretraining.reactions import Data, Reactions
from octfm.pretraining.resume import PRETRAINING
from octfm.pretraining.schedule import Schedule, ramp
from octfm.pretraining.settings import PretrainConfig, in_steps
from octfm.pretraining.step import OutOfMemory, accumulate, exchange_results, judge
from octfm.run import checkpoint
from octfm.run.checkpoint_writer import Retention, keep_best
from octfm.run.folder import Identity, RunFolder, open_run, resume, volumes_digest
from octfm.run.launch import join
from octfm.run.loop import Interruption, Session, open_session, train
from octfm.run.runtime import Runtime, environment
from octfm.run.trackers import open_trackers
from octfm.run.tracking import Listener, read_metrics
from octfm.store.exclusion import without_excluded
from octfm.store.loader import Loader
from octfm.store.store import Store
from octfm.version import __version__


def pretrain(
    config: PretrainConfig,
    store: Store | None = None,
    out: str | Location = "runs/run",
    device: str | None = None,
    echo: Echo = print,
    *,
    override: bool = False,
    listeners: Sequence[Listener] = (),
    objective: ObjectiveConfig | None = None,
) -> Path:
    """Train until `config.steps` updates are made and return the run folder; the same call resumes an interrupted run.

    Name the store either here or in `config.data.store`, not in both. `override` accepts a config that contradicts
    the run's. `listeners` get everything that metrics.jsonl gets, for example a progress bar. Raises Preempted after
    SIGTERM or SIGINT, once the step is finished and saved. `objective`: settings of an objective of your own instead
    of the config's section (docs/guide/plug-ins.md). Under torchrun every rank makes this call; only rank 0 prints
    and writes.
    """
    if objective is not None:
        config = config.with_objective(objective)
    store = _one_store(config, store)
    runtime = join(config.runtime, config.precision, device)
    echo_first = echo if runtime.leads else _silent
    data = Data(store, *preflight.training_rows(config, store))
    config = in_steps(config, len(data.train_rows))
    identity = Identity(PRETRAINING, config, store.fingerprint, volumes_digest(store, data.train_rows))
    where = location(out)

    def examine(folder: Path) -> None:
        begun = (folder / "config.yaml").is_file()
        found = preflight.checks(config, store, runtime, data.train_rows, data.validation_rows, where, resumed=begun)
        preflight.require(found, echo_first)

    try:
        with runtime.guarded():
            # Before the folder is touched: a rank with another store would train on other volumes.
            require_same_data(runtime, identity.data)
            opened = open_run(where, identity, runtime, override=override, echo=echo_first, check=examine)
            with opened as run, Interruption() as interruption:
                require_same_folder(runtime, run)
                training = begin(config, data, runtime, run, echo_first)
                with training.loader:
                    settings = config.model_dump(mode="json")
                    trackers = open_trackers(config.tracking, run.path, settings, training.step, runtime.rank)
                    session = open_session(
                        training,
                        run,
                        retention(config, training.loader.steps_per_epoch),
                        echo_first,
                        aloud=echo,
                        listeners=(*trackers, *listeners),
                        rollbacks=len(training.learner.state.rollbacks),
                    )
                    training.reactions.exclude()
                    training.reactions.recall_memory(session)
                    train(training, session, interruption)
                echo_first(f"pretraining done: {config.steps} updates, checkpoint {run.last_checkpoint()}")
    finally:
        runtime.close()
    return run.path


def begin(config: PretrainConfig, data: Data, runtime: Runtime, run: RunFolder, echo: Echo) -> "Pretraining":
    """Networks at their initial weights or at the run's newest checkpoint, and the loader that feeds them."""
    # A run that has checkpoints no longer needs the weights that it began with (model.init).
    fresh = runtime.first(lambda: not checkpoint.everywhere(run.path))
    learner = Learner(config, data.store.preprocessing, runtime, fresh=fresh)
    resume(run, learner, echo)
    names = sorted({data.store.rows[row].participant for row in data.train_rows})
    facts = _facts(learner.model, runtime, data.store, names)
    runtime.first(lambda: run.write_record(**facts, precision=config.precision, **second_destination(config, run)))
    key = runtime.first(lambda: run.key)
    participants = {"key": key, "hashes": checkpoint.participant_hashes(names, key)}
    loader = Loader(
        data.store,
        data.train_rows,
        config.data.global_batch_size,
        config.seed,
        runtime.rank,
        runtime.world,
        config.data.prefetch,
        config.data.balance_scanners,
    )
    data_step = learner.step + learner.state.offset
    require_disjoint(runtime, loader, data_step)
    require_same_order(runtime, loader, data_step)
    return Pretraining(run, data, learner, loader, participants)


class Pretraining:
    """A self-supervised training of run/loop.py: what learns, what it is fed, and the monitors that watch it."""

    def __init__(
        self, run: RunFolder, data: Data, learner: Learner, loader: Loader, participants: dict[str, Any]
    ) -> None:
        """`participants`: the key and the keyed hashes of the participants that are trained on."""
        config = learner.config
        self.run, self.data, self.learner, self.loader, self.participants = run, data, learner, loader, participants
        self.config, self.runtime, self.tracking = config, learner.runtime, config.tracking
        self.schedule = Schedule(config.schedule, config.steps)
        self.reactions = Reactions(data, learner, loader, participants["key"])
        self.cases = find_cases(config.probe, data.store, data.train_rows, data.validation_rows)
        self.feed = feed.Feed(config, data.store, loader, self.runtime)
        self.finding: monitors.Finding | None = None
        """What is wrong with the last update, if anything is."""
        self._restart_monitors()

    def _restart_monitors(self) -> None:
        self.check_rate, self.window = monitors.LearningRate(self.schedule.warmup_steps), Window()

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def update(self, session: Session, interruption: Interruption) -> str | None:
        """One step: read a batch, compute gradients, judge them, update or not, measure, log."""
        config, learner, runtime, step = self.config, self.learner, self.runtime, self.step
        size = config.data.global_batch_size
        # A rollback passes over batches: from then on data are ahead of updates.
        data_step = step + learner.state.offset
        session.waiting.for_("data")
        batch = self.loader.batches(data_step)
        rows = self.loader.indices(data_step * size + np.arange(size))

        session.waiting.for_("the device")
        rates = {"weight_decay": self.schedule.weight_decay(step), "ema": self.schedule.ema(step)}
        context_weight = config.objective.context_loss * ramp(step, config.objective.context_warmup * config.steps)
        log = step % config.log_every_steps == 0 or step + 1 == config.steps
        inspect = log or step % config.health.check_every_steps == 0
        # Compiled steps are all alike, so they measure whether inspected or not.
        measured = runtime.measures(inspect)
        learner.set_rates(self.schedule.lr(step) * learner.state.lr_scale, **rates)
        micro_batch = learner.micro_batch
        try:
            micro_steps = accumulate(learner, batch, context_weight, everything=measured)
        except OutOfMemory as error:
            session.run.note_memory(error.micro_batch)
            raise
        session.waiting.for_("the other ranks")
        runtime.average_gradients(learner.trained)
        grad_norm = runtime.clip(learner.trained, config.clip_grad_norm)
        # Judged on the device: the host does not wait, and an update that is not made runs the same kernels.
        outcome = judge(learner, micro_steps, grad_norm, limits(config.health, learner.state))
        weight_change = update(learner, outcome.made, inspect=measured, micro_steps=micro_steps)
        excluded = bool(learner.state.excluded)
        fed = self.feed.inspect(data_step, rows, excluded, batch, micro_steps, closely=inspect)
        # The first moment at which the host waits for the device, and the ranks for each other.
        summary = exchange_results(learner, micro_steps, outcome, interruption.signal_name, fed)
        session.waiting.for_("the device")
        if learner.micro_batch != micro_batch:
            self.reactions.report_smaller(session, micro_batch)

        lr = float(learner.optimizer.param_groups[0]["lr"])
        finding = self.check_rate(step, lr) or monitors.step_findings(config, learner.state, summary, rows)
        finding = finding or feed.finding(summary.fed, rows)
        row: dict[str, Any] = {}
        # Losses of updates that were not made would widen the limits for the next ones.
        if summary.made:
            learner.state = learner.state.accept(summary.loss, summary.grad_norm, config.health.window)
        if inspect and summary.made:
            scanners = [self.data.store.rows[i].scanner for i in rows]
            row = train_row(learner, micro_steps, weight_change, rates["ema"], scanners)
            row |= {"lr": lr, **rates, "grad_norm": summary.grad_norm, "context_weight": context_weight}
            row |= {"epoch": data_step * size / len(self.data.train_rows)}
            # Exactly 0, or the context encoder sees the answers (F11).
            row |= {"target_gradient": summary.leak} if summary.leak is not None else {}
            finding = finding or monitors.row_findings(config.health, learner.state, row, config.model.width)
            learner.state = learner.state.look(row["effective_rank"])
        self.window.add(batch, runtime.world)
        if log and row:
            row |= self.window.close(runtime)
            session.metrics.write("train", step, **row)
            self._report_health(session, row | {"step": step, "warmup_steps": self.schedule.warmup_steps})
        learner.step += 1
        self.finding = finding
        return summary.signal_name

    def recover(self, session: Session) -> bool:
        """Skip, exclude, roll back or stop, as the finding demands."""
        if self.finding is None or not self.reactions.act(session, self.step - 1, self.finding):
            return False
        self._restart_monitors()
        return True

    def validate(self, session: Session) -> bool:
        """Validation loss and online probe, when they are due; True when a checkpoint is."""
        config, step = self.config, self.step - 1
        if self._due(config.validate_every_steps) and len(self.data.validation_rows):
            self._validate(session, step)
            self.window.restart()
        best = False
        if self.cases is not None and self._due(config.probe.every_steps or config.ckpt_every_steps):
            best = self._probe(session, step)
            self.window.restart()
        return best or self._due(config.ckpt_every_steps)

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.finished

    def _validate(self, session: Session, step: int) -> None:
        store, rows, metrics = self.data.store, self.data.validation_rows, session.metrics
        metrics.write("validation", step, **validate(self.learner, store, rows))
        if advice := self.runtime.first(lambda: monitors.held_out(read_metrics(self.run.metrics))):
            self.reactions.act(session, step, advice)
        if metrics.listeners:
            metrics.picture("masks", step, sample_picture(self.config, store, rows[:4], step))

    def _probe(self, session: Session, step: int) -> bool:
        """Probe the encoder as it is; True, on all ranks, if it is the best state so far: its checkpoint is written
        and kept."""
        config, learner, runtime, cases = self.config, self.learner, self.runtime, self.cases
        assert cases is not None
        network, pool = learner.whole().frozen_encoder(config.objective.frozen), config.objective.pool
        vectors_of = partial(
            tissue_vectors,
            network,
            lambda grid: config.masks.counts(grid)[0],
            config.model.patch_size,
            pool,
            self.data.store,
            runtime,
            learner.micro_batch,
        )
        row = online_probe(cases, vectors_of, runtime)

        def is_best() -> bool:
            # Scores of vectors that were pooled in another way are not comparable.
            alike = {"kind": "probe", "target": cases.target, "pool": pool}
            rows = ({"pool": "mean"} | r for r in read_metrics(self.run.metrics))
            before = [float(r["score"]) for r in rows if alike.items() <= r.items()]
            session.metrics.write("probe", step, pool=pool, **row)
            score = f"{row['metric']} {row['score']:.3f} (nearest neighbours {row['knn']:.3f})"
            session.echo(f"step {step + 1}: {cases.target} from frozen features: {score}")
            best = float(row["score"]) >= max(before, default=-np.inf)
            if best:
                keep_best(self.run.checkpoints, step + 1)
            return best

        return runtime.first(is_best)

    def _report_health(self, session: Session, row: dict[str, Any]) -> None:
        """Log the verdicts on a logged step, and print its line."""
        step, config = row["step"], self.config
        for verdict in health.verdicts(row, config.model.width):
            session.metrics.write("health", step, **verdict.row())
            if verdict.verdict == "bad":
                session.echo(f"step {step}: {verdict.what}: {verdict.sentence}")
        # The context loss is shown only if training lowers it.
        context = f" and context {row['context_over_baseline']:.3f}" if config.objective.context_loss else ""
        session.echo(
            f"step {step + 1:>6}/{config.steps}  masked {row['masked_over_baseline']:.3f}{context} of baseline  "
            f"rank {row['effective_rank']:5.1f}  lr {row['lr']:.1e}  grad {row['grad_norm']:.2f}  "
            f"{row['volumes_per_s']:.1f} volumes/s  waiting for data {row['data_wait_share']:.0%}"
        )

    def content(self) -> dict[str, Any]:
        return self.learner.content(self.run.record, self.data.store.fingerprint, self.participants)

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        self.learner.restore(content, source)


def retention(config: PretrainConfig, steps_per_epoch: float) -> Retention:
    """The config's keep_* settings in steps."""
    intervals = [config.keep_every_steps, config.keep_every_epochs and config.keep_every_epochs * steps_per_epoch]
    return Retention(config.keep_checkpoints, tuple(float(interval) for interval in intervals if interval))


def second_destination(config: PretrainConfig, run: RunFolder) -> dict[str, str]:
    """The entry in run.json for a folder of this run's own on the other disk."""
    if config.ckpt_second_dir is None:
        return {}
    name = f"{run.path.resolve().name}-{run.key[:8]}"
    return {"second_destination": str(Path(config.ckpt_second_dir).resolve() / name)}


def _silent(_: str) -> None:
    """Prints nothing: the `echo` of ranks other than the first."""


def _one_store(config: PretrainConfig, store: Store | None) -> Store:
    if store is not None and config.data.store is not None:
        raise ConfigError(f"a store was given ({store.path}) and data.store is {config.data.store}; give one of them")
    if store is not None:
        return without_excluded(store, config.data.exclude)
    if config.data.store is None:
        raise ConfigError("data.store is not set; name the prepared store, for example data.store=prepared/")
    return without_excluded(Store.open(config.data.store), config.data.exclude)


def _facts(model: Objective, runtime: Runtime, store: Store, participants: list[str]) -> dict:
    return {
        "parameters": model.parameters_by_part(),
        "environment": environment(runtime),
        "store": {"volumes": len(store), "train_participants": len(participants)},
        "octfm": __version__,
    }
