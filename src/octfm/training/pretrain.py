"""Self-supervised pretraining: one function, one loop."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from octfm import __version__
from octfm.data.loader import Batch, Loader
from octfm.data.store import Store
from octfm.errors import CheckpointError, ConfigError, Preempted, TrainingError
from octfm.models.data2vec import Data2Vec
from octfm.models.jepa import JEPA
from octfm.models.vit3d import count_parameters
from octfm.training import checkpoint, health, preflight
from octfm.training.checkpoint_writer import CheckpointWriter, Retention
from octfm.training.interruption import Interruption
from octfm.training.learner import Learner
from octfm.training.measure import Window, train_row, validate
from octfm.training.resume import resume
from octfm.training.run_folder import RunFolder, claim
from octfm.training.runtime import Runtime, environment, start
from octfm.training.schedule import Schedule, ramp
from octfm.training.settings import PretrainConfig
from octfm.training.step import MicroStep, accumulate
from octfm.training.tracking import Metrics

Echo = Callable[[str], None]


def pretrain(
    config: PretrainConfig,
    store: Store | None = None,
    out: str | Path = "runs/run",
    device: str | None = None,
    echo: Echo = print,
    *,
    override: bool = False,
) -> Path:
    """Train until `config.steps` updates are done and return the run folder; the same call resumes an interrupted run.

    `store` and `config.data.store` are two ways to say the same thing; giving both is an error. `override` accepts a config that
    contradicts the run's. Raises Preempted after SIGTERM or SIGINT, once the step is finished and saved.
    """
    store = _one_store(config, store)
    runtime = start(config.precision, device)
    train_rows, validation_rows = preflight.training_rows(config, store)
    begun = (Path(out) / "config.yaml").is_file()
    preflight.require(preflight.checks(config, store, runtime, train_rows, validation_rows, Path(out), resumed=begun), echo)
    identity = _identity(store, train_rows)
    with claim(out, config, store.fingerprint, identity, override=override, echo=echo) as run, Interruption() as interruption:
        _train(config, store, train_rows, validation_rows, runtime, run, interruption, echo)
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
) -> None:
    """The loop, in a folder that is ours."""
    schedule = Schedule(config.schedule, config.steps)
    learner = Learner(config, store.preprocessing, runtime)
    resume(run, learner, echo)
    names = sorted({store.rows[row].participant for row in train_rows})
    run.write_record(**_facts(learner.model, runtime, store, names), precision=config.precision, **_second_destination(config, run))
    participants = {"key": run.key, "hashes": checkpoint.participant_hashes(names, run.key)}

    size = config.data.global_batch_size
    loader = Loader(store, train_rows, size, config.seed, runtime.rank, runtime.world, config.data.prefetch)
    metrics = Metrics(run.metrics, learner.step)
    writer = CheckpointWriter(run.destinations, _retention(config, loader.steps_per_epoch))
    saved = learner.step

    def save() -> None:
        nonlocal saved
        writer.save(learner.step, learner.content(run.record, store.fingerprint, participants))
        saved = learner.step

    window = Window()
    try:
        while learner.step < config.steps:
            step, model = learner.step, learner.model
            batch = loader.batches(step)
            lr, weight_decay, ema = schedule.lr(step), schedule.weight_decay(step), schedule.ema(step)
            context_weight = config.objective.context_loss * ramp(step, config.objective.context_warmup * config.steps)
            logged = step % config.log_every_steps == 0 or step + 1 == config.steps

            learner.set_rates(lr, weight_decay)
            learner.optimizer.zero_grad(set_to_none=True)
            done = accumulate(learner, batch, context_weight, everything=logged)
            grad_norm = torch.nn.utils.clip_grad_norm_(learner.decayed + learner.free, config.clip_grad_norm)
            _require_finite(step, grad_norm, done, batch, store, run)
            learner.optimizer.step()
            before = [p.clone() for p in health.parameters_of(model.target_encoder)] if logged else []
            model.update_target(ema)
            learner.step += 1

            window.add(batch)
            if logged:
                row = train_row(model, done, before) | window.close(runtime)
                row |= {"lr": lr, "weight_decay": weight_decay, "ema": ema, "grad_norm": float(grad_norm), "context_weight": context_weight}
                metrics.write("train", step, **row)
                _say(metrics, step, config, row | {"step": step, "warmup_steps": schedule.warmup_steps}, echo)
            if _due(step, config.validate_every_steps, config.steps) and len(validation_rows):
                metrics.write("validation", step, **validate(config, model, store, runtime, validation_rows))
                window.restart()
            if _due(step, config.ckpt_every_steps, config.steps):
                save()
            _tell_failures(writer, metrics, step, echo)
            if interruption.asked and learner.step < config.steps:
                if saved != learner.step:
                    save()
                writer.wait()
                _require_saved(writer, metrics, learner.step, run, echo)
                raise Preempted(f"{interruption.asked}: saved after {learner.step} of {config.steps} updates; run again to continue")
        writer.wait()
        _require_saved(writer, metrics, learner.step, run, echo)
    finally:
        loader.close()
        writer.close()
        metrics.close()
    echo(f"pretraining done: {config.steps} updates, checkpoint {run.last_checkpoint()}")


def _tell_failures(writer: CheckpointWriter, metrics: Metrics, step: int, echo: Echo) -> bool:
    """Say which checkpoints were not written where they should be; True if one was not written at all."""
    failures = writer.failures()
    for failure in failures:
        metrics.write("checkpoint", step, verdict="bad" if failure.lost else "watch", sentence=failure.sentence)
        echo(f"step {step}: {failure.sentence}")
    return any(failure.lost for failure in failures)


def _require_saved(writer: CheckpointWriter, metrics: Metrics, step: int, run: RunFolder, echo: Echo) -> None:
    """The last checkpoint of a process must be on disk: what was trained since the one before would be lost without a word."""
    if _tell_failures(writer, metrics, step - 1, echo):
        last = run.last_checkpoint()
        raise CheckpointError(
            f"{run.path}: the checkpoint after step {step} could not be written; free some space or set ckpt_second_dir, and run again: "
            + (f"it continues from {last}" if last else "it starts from the beginning")
        )


def _second_destination(config: PretrainConfig, run: RunFolder) -> dict[str, str]:
    """A folder of this run's own on the other disk."""
    if config.ckpt_second_dir is None:
        return {}
    return {"second_destination": str(Path(config.ckpt_second_dir).resolve() / f"{run.path.resolve().name}-{run.key[:8]}")}


def _retention(config: PretrainConfig, steps_per_epoch: float) -> Retention:
    intervals = [config.keep_every_steps, config.keep_every_epochs and config.keep_every_epochs * steps_per_epoch]
    return Retention(config.keep_checkpoints, tuple(float(interval) for interval in intervals if interval))


def _say(metrics: Metrics, step: int, config: PretrainConfig, row: dict, echo: Echo) -> None:
    for verdict in health.verdicts(row, config.model.width):
        metrics.write("health", step, **verdict.row())
        if verdict.verdict == "bad":
            echo(f"step {step}: {verdict.what}: {verdict.sentence}")
    echo(
        f"step {step + 1:>6}/{config.steps}  "
        f"masked {row['masked_over_baseline']:.3f} and context {row['context_over_baseline']:.3f} of baseline  "
        f"rank {row['effective_rank']:5.1f}  lr {row['lr']:.1e}  grad {row['grad_norm']:.2f}  {row['volumes_per_s']:.1f} volumes/s  "
        f"waiting for data {row['data_wait_share']:.0%}"
    )


def _require_finite(step: int, grad_norm: torch.Tensor, done: list[MicroStep], batch: Batch, store: Store, run: RunFolder) -> None:
    """Stop before a non-finite gradient touches the weights, and name the volumes whose loss is not finite."""
    if torch.isfinite(grad_norm):
        return
    losses = torch.cat([d.masked_loss_B + d.context_loss_B for d in done]).cpu()
    culprits = [store.rows[row].uri for row, loss in zip(batch.index, losses, strict=True) if not torch.isfinite(loss)]
    last = run.last_checkpoint()
    raise TrainingError(
        f"step {step}: gradient norm is {float(grad_norm)}; no weight was changed. "
        + (
            f"Volumes with a non-finite loss: {', '.join(culprits)}. "
            if culprits
            else "Every loss was finite: the backward pass overflowed. "
        )
        + (f"The last good state is {last}" if last else "No checkpoint was written yet")
        + "; lower schedule.base_lr, or exclude the volumes and prepare again"
    )


def _due(step: int, every: int, steps: int) -> bool:
    return (step + 1) % every == 0 or step + 1 == steps


def _one_store(config: PretrainConfig, store: Store | None) -> Store:
    if store is not None and config.data.store is not None:
        raise ConfigError(f"a store was given ({store.path}) and data.store is {config.data.store}; give one of them")
    if store is not None:
        return store
    if config.data.store is None:
        raise ConfigError("data.store is not set; name the prepared store, for example data.store=prepared/")
    return Store.open(config.data.store)


def _identity(store: Store, rows: np.ndarray) -> str:
    """Which volumes are trained on, in which order, down to their voxels."""
    text = "\n".join(f"{store.rows[row].acquisition} {store.rows[row].checksum}" for row in rows)
    return hashlib.sha256(text.encode()).hexdigest()


def _facts(model: JEPA | Data2Vec, runtime: Runtime, store: Store, participants: list[str]) -> dict:
    parts = {"encoder": count_parameters(model.encoder), "target_encoder": count_parameters(model.target_encoder)}
    total = count_parameters(model)
    return {
        "parameters": {**parts, "predictor": total - sum(parts.values()), "total": total},
        "environment": environment(runtime),
        "store": {"volumes": len(store), "train_participants": len(participants)},
        "octfm": __version__,
    }
