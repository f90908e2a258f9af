"""Self-supervised pretraining: one function, one loop."""

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from octfm.errors import ConfigError, Preempted
from octfm.io.location import BucketPath, Location, location
from octfm.models.objectives.objective import Objective
from octfm.pretraining import preflight
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import feed, health, monitors
from octfm.pretraining.monitors.limits import limits
from octfm.pretraining.monitors.measure import Window, train_row, update, validate
from octfm.pretraining.monitors.online_probe import Cases, find_cases, online_probe, tissue_vectors
from octfm.pretraining.monitors.sample_picture import sample_picture
from octfm.pretraining.preflight.ranks import (
    require_disjoint,
    require_same_data,
    require_same_folder,
    require_same_order,
)
from octfm.pretraining.resume import resume
from octfm.pretraining.run_folder import RunFolder, claim_together
from octfm.pretraining.schedule import Schedule, ramp
from octfm.pretraining.session import Session, open_metrics, open_writer, second_destination
from octfm.pretraining.settings import PretrainConfig, in_steps
from octfm.pretraining.step import OutOfMemory, accumulate, judge, tell
from octfm.run import checkpoint
from octfm.run.bucket import BucketRun, mirror_of
from octfm.run.checkpoint_writer import keep_best
from octfm.run.interruption import Interruption
from octfm.run.launch import join
from octfm.run.runtime import Runtime, environment
from octfm.run.tracking import Listener, Metrics, read_metrics
from octfm.run.waiting import Waiting
from octfm.store.exclusion import without_excluded
from octfm.store.loader import Loader
from octfm.store.store import Store
from octfm.version import __version__

Echo = Callable[[str], None]


def pretrain(
    config: PretrainConfig,
    store: Store | None = None,
    out: str | Location = "runs/run",
    device: str | None = None,
    echo: Echo = print,
    *,
    override: bool = False,
    listeners: Sequence[Listener] = (),
) -> Path:
    """Train until `config.steps` updates are done and return the run folder; the same call resumes an interrupted run.

    `store` and `config.data.store` are two ways to say the same thing; giving both is an error. `override` accepts a config that
    contradicts the run's. `listeners` are told what metrics.jsonl is told, for example a progress bar. Raises Preempted after SIGTERM or
    SIGINT, once the step is finished and saved. Under torchrun every rank makes this call; rank 0 alone speaks and writes.
    """
    store = _one_store(config, store)
    runtime = join(config.runtime, config.precision, device)
    aloud, echo = echo, echo if runtime.leads else lambda _: None
    train_rows, validation_rows = preflight.training_rows(config, store)
    config = in_steps(config, len(train_rows))
    identity = _identity(store, train_rows)
    where = location(out)
    remote = BucketRun(where) if isinstance(where, BucketPath) else None
    folder = mirror_of(where) if isinstance(where, BucketPath) else where

    def examine() -> None:
        if remote is not None:
            remote.begin()
        begun = (folder / "config.yaml").is_file()
        preflight.require(
            preflight.checks(config, store, runtime, train_rows, validation_rows, where, resumed=begun), echo
        )

    try:
        with runtime.guarded():
            runtime.first(examine)
            require_same_data(runtime, identity)
            claimed = claim_together(runtime, folder, config, store.fingerprint, identity, override=override, echo=echo)
            with claimed as run, Interruption() as interruption:
                require_same_folder(runtime, run)
                _train(
                    config,
                    store,
                    train_rows,
                    validation_rows,
                    runtime,
                    run,
                    interruption,
                    echo,
                    aloud,
                    listeners,
                    remote,
                )
    finally:
        if remote is not None and runtime.leads:
            remote.end()
        runtime.close()
    return run.path


def _train(
    config: PretrainConfig,
    store: Store,
    train_rows: np.ndarray,
    validation_rows: np.ndarray,
    runtime: Runtime,
    run: RunFolder,
    interruption: Interruption,
    echo: Echo,
    aloud: Echo,
    listeners: Sequence[Listener],
    remote: BucketRun | None,
) -> None:
    """The loop, in a folder that is ours. All ranks run it and all come to the same decisions."""
    schedule = Schedule(config.schedule, config.steps)
    fresh = runtime.first(lambda: not checkpoint.everywhere(run.path))
    learner = Learner(config, store.preprocessing, runtime, fresh=fresh)
    resume(run, learner, echo)
    names = sorted({store.rows[row].participant for row in train_rows})
    facts = _facts(learner.model, runtime, store, names)
    runtime.first(lambda: run.write_record(**facts, precision=config.precision, **second_destination(config, run)))
    key = runtime.first(lambda: run.key)
    participants = {"key": key, "hashes": checkpoint.participant_hashes(names, key)}

    size = config.data.global_batch_size
    data = config.data
    loader = Loader(
        store, train_rows, size, config.seed, runtime.rank, runtime.world, data.prefetch, data.balance_scanners
    )
    require_disjoint(runtime, loader, learner.step + learner.state.offset)
    require_same_order(runtime, loader, learner.step + learner.state.offset)
    cases = find_cases(config.probe, store, train_rows, validation_rows)
    metrics, writer = open_metrics(run, learner, listeners), open_writer(run, learner, loader.steps_per_epoch)
    if metrics.broken is not None:
        echo(f"warning: {metrics.broken}")
    if remote is not None and runtime.leads:
        writer.follow(remote)
    session = Session(store, train_rows, run, learner, loader, metrics, writer, participants, echo, learner.step, aloud)
    session.exclude()
    session.recall_memory()
    check_rate, window = monitors.LearningRate(schedule.warmup_steps), Window()
    fed = feed.Feed(config, store, loader, runtime)
    waiting = Waiting(config.tracking.step_deadline_s, session.tell_waiting)
    waiting.start()
    try:
        while learner.step < config.steps:
            step = learner.step
            at = step + learner.state.offset
            waiting.for_("data")
            batch = loader.batches(at)
            rows = loader.indices(at * size + np.arange(size))
            waiting.for_("the device")
            lr, weight_decay, ema = (
                schedule.lr(step) * learner.state.lr_scale,
                schedule.weight_decay(step),
                schedule.ema(step),
            )
            context_weight = config.objective.context_loss * ramp(step, config.objective.context_warmup * config.steps)
            logged = step % config.log_every_steps == 0 or step + 1 == config.steps
            looked = logged or step % config.health.check_every_steps == 0
            measured = runtime.measures(looked)

            learner.set_rates(lr, weight_decay, ema)
            micro_batch = learner.micro_batch
            done = accumulate(learner, batch, context_weight, everything=measured)
            waiting.for_("the other ranks")
            runtime.average_gradients(learner.trained)
            outcome = judge(
                learner,
                done,
                runtime.clip(learner.trained, config.clip_grad_norm),
                limits(config.health, learner.state),
            )
            moved = update(learner, outcome.made, look=measured, done=done)
            excluded = bool(learner.state.excluded)
            told = tell(
                learner, done, outcome, interruption.asked, fed.look(at, rows, excluded, batch, done, closely=looked)
            )
            waiting.for_("the device")
            if learner.micro_batch != micro_batch:
                session.tell_memory(step, micro_batch)

            rate = float(learner.optimizer.param_groups[0]["lr"])
            finding = check_rate(step, rate) or monitors.step_findings(config, learner.state, told, rows)
            finding = finding or feed.finding(told.fed, rows)
            row = {}
            if told.made:
                learner.state = learner.state.accept(told.loss, told.grad_norm, config.health.window)
            if looked and told.made:
                row = train_row(learner, done, moved, ema, [store.rows[i].scanner for i in rows])
                row |= {"lr": rate, "weight_decay": weight_decay, "ema": ema, "grad_norm": told.grad_norm}
                row |= {"context_weight": context_weight, "epoch": at * size / len(train_rows)}
                # Exactly 0, or the context encoder sees the answers (F11).
                row |= {"target_gradient": told.leak} if told.leak is not None else {}
                finding = finding or monitors.row_findings(config.health, learner.state, row, config.model.width)
                learner.state = learner.state.look(row["effective_rank"])
            window.add(batch, runtime.world)
            if logged and row:
                row |= window.close(runtime)
                metrics.write("train", step, **row)
                _say(metrics, step, config, row | {"step": step, "warmup_steps": schedule.warmup_steps}, echo)
            learner.step += 1
            waiting.done()
            if finding is not None and session.act(step, finding):
                check_rate, window = monitors.LearningRate(schedule.warmup_steps), Window()
                continue
            if _due(step, config.validate_every_steps, config.steps) and len(validation_rows):
                metrics.write("validation", step, **validate(learner, store, validation_rows))
                if advice := runtime.first(lambda: monitors.held_out(read_metrics(run.metrics))):
                    session.act(step, advice)
                if metrics.listeners:
                    metrics.picture("masks", step, sample_picture(config, store, validation_rows[:4], step))
                window.restart()
            best = False
            if cases is not None and _due(step, config.probe.every_steps or config.ckpt_every_steps, config.steps):
                best = _probe(cases, learner, store, metrics, run, step, echo)
                window.restart()
            if best or _due(step, config.ckpt_every_steps, config.steps):
                session.save()
            session.tell_failures(step)
            if told.asked and learner.step < config.steps:
                session.finish()
                raise Preempted(
                    f"{told.asked}: saved after {learner.step} of {config.steps} updates; run again to continue"
                )
        session.finish()
    except OutOfMemory as error:
        run.note_memory(error.micro_batch)
        raise
    finally:
        waiting.close()
        loader.close()
        writer.close()
        metrics.close()
    echo(f"pretraining done: {config.steps} updates, checkpoint {run.last_checkpoint()}")


def _probe(
    cases: Cases, learner: Learner, store: Store, metrics: Metrics, run: RunFolder, step: int, echo: Echo
) -> bool:
    """Probe the encoder as it is; whether it is the best state so far, whose checkpoint is to be written and kept. All ranks are told."""
    config, runtime = learner.config, learner.runtime
    network = learner.whole().frozen_encoder(config.objective.frozen)
    budget_of, pool = lambda grid: config.masks.counts(grid)[0], config.objective.pool
    row = online_probe(
        cases,
        partial(tissue_vectors, network, budget_of, config.model.patch_size, pool, store, runtime, learner.micro_batch),
        runtime,
    )

    def judge() -> bool:
        # Scores of vectors that were pooled otherwise are of another kind.
        alike = {"kind": "probe", "target": cases.target, "pool": pool}
        rows = ({"pool": "mean"} | r for r in read_metrics(run.metrics))
        before = [float(r["score"]) for r in rows if alike.items() <= r.items()]
        metrics.write("probe", step, pool=pool, **row)
        neighbours = f"(nearest neighbours {row['knn']:.3f})"
        echo(f"step {step + 1}: {cases.target} from frozen features: {row['metric']} {row['score']:.3f} {neighbours}")
        best = float(row["score"]) >= max(before, default=-np.inf)
        if best:
            keep_best(run.checkpoints, step + 1)
        return best

    return runtime.first(judge)


def _say(metrics: Metrics, step: int, config: PretrainConfig, row: dict, echo: Echo) -> None:
    for verdict in health.verdicts(row, config.model.width):
        metrics.write("health", step, **verdict.row())
        if verdict.verdict == "bad":
            echo(f"step {step}: {verdict.what}: {verdict.sentence}")
    context = (
        f" and context {row['context_over_baseline']:.3f}" if config.objective.context_loss else ""
    )  # else nothing lowers it
    echo(
        f"step {step + 1:>6}/{config.steps}  masked {row['masked_over_baseline']:.3f}{context} of baseline  "
        f"rank {row['effective_rank']:5.1f}  lr {row['lr']:.1e}  grad {row['grad_norm']:.2f}  {row['volumes_per_s']:.1f} volumes/s  "
        f"waiting for data {row['data_wait_share']:.0%}"
    )


def _due(step: int, every: int, steps: int) -> bool:
    return (step + 1) % every == 0 or step + 1 == steps


def _one_store(config: PretrainConfig, store: Store | None) -> Store:
    if store is not None and config.data.store is not None:
        raise ConfigError(f"a store was given ({store.path}) and data.store is {config.data.store}; give one of them")
    if store is not None:
        return without_excluded(store, config.data.exclude)
    if config.data.store is None:
        raise ConfigError("data.store is not set; name the prepared store, for example data.store=prepared/")
    return without_excluded(Store.open(config.data.store), config.data.exclude)


def _identity(store: Store, rows: np.ndarray) -> str:
    """Which volumes are trained on, in which order, down to their voxels."""
    text = "\n".join(f"{store.rows[row].acquisition} {store.rows[row].checksum}" for row in rows)
    if store.left_out:
        text += "\nwithout " + " ".join(store.left_out)
    return hashlib.sha256(text.encode()).hexdigest()


def _facts(model: Objective, runtime: Runtime, store: Store, participants: list[str]) -> dict:
    return {
        "parameters": model.parameters_by_part(),
        "environment": environment(runtime),
        "store": {"volumes": len(store), "train_participants": len(participants)},
        "octfm": __version__,
    }
