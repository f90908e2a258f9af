"""Self-supervised pretraining: one function, one loop."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from octfm import __version__
from octfm.config import load
from octfm.data.loader import Batch, Loader
from octfm.data.store import Store
from octfm.errors import ConfigError, TrainingError
from octfm.models.data2vec import Data2Vec
from octfm.models.jepa import JEPA
from octfm.models.vit3d import count_parameters
from octfm.training import checkpoint, health, preflight
from octfm.training.inputs import build_objective, optimizer_groups
from octfm.training.measure import Window, train_row, validate
from octfm.training.run_folder import RunFolder, claim
from octfm.training.runtime import Runtime, environment, start
from octfm.training.schedule import Schedule, ramp
from octfm.training.settings import PretrainConfig
from octfm.training.step import MicroStep, accumulate
from octfm.training.tracking import Metrics

Echo = Callable[[str], None]


def pretrain(
    config: PretrainConfig, store: Store | None = None, out: str | Path = "runs/run", device: str | None = None, echo: Echo = print
) -> Path:
    """Train until `config.steps` updates are done and return the run folder; the same call resumes an interrupted run.

    `store` and `config.data.store` are two ways to say the same thing; giving both is an error.
    """
    store = _one_store(config, store)
    runtime = start(config.precision, device)
    preprocessing = store.preprocessing
    train_rows, validation_rows = preflight.training_rows(config, store)
    schedule = Schedule(config.schedule, config.steps)

    preflight.require(preflight.checks(config, store, runtime, train_rows, validation_rows, Path(out)), echo)
    run = claim(out, config, store.fingerprint, _identity(store, train_rows))
    model = build_objective(config, preprocessing).to(runtime.device)
    decayed, free = optimizer_groups(model)
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": free, "weight_decay": 0.0}], lr=schedule.lr(0), betas=config.betas, fused=True
    )
    first_step = resume(run, model, optimizer, echo)
    participants = sorted({store.rows[row].participant for row in train_rows})
    run.write_record(**_facts(model, runtime, store, participants), precision=config.precision)

    metrics = Metrics(run.metrics, first_step)
    loader = Loader(store, train_rows, config.data.global_batch_size, config.seed, runtime.rank, runtime.world, config.data.prefetch)
    window = Window()
    try:
        for step in range(first_step, config.steps):
            batch = loader.batches(step)
            lr, weight_decay, ema = schedule.lr(step), schedule.weight_decay(step), schedule.ema(step)
            context_weight = config.objective.context_loss * ramp(step, config.objective.context_warmup * config.steps)
            logged = step % config.log_every_steps == 0 or step + 1 == config.steps

            optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
            optimizer.param_groups[1].update(lr=lr)
            optimizer.zero_grad(set_to_none=True)
            done = accumulate(
                config, model, runtime, preprocessing, batch, config.data.per_device_batch_size, context_weight, everything=logged
            )
            grad_norm = torch.nn.utils.clip_grad_norm_(decayed + free, config.clip_grad_norm)
            _require_finite(step, grad_norm, done, batch, store, run)
            optimizer.step()
            before = [p.clone() for p in health.parameters_of(model.target_encoder)] if logged else []
            model.update_target(ema)

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
                save(run, model, optimizer, config, store, step + 1, participants)
    finally:
        loader.close()
        metrics.close()
    echo(f"pretraining done: {config.steps} updates, checkpoint {run.last_checkpoint()}")
    return run.path


def resume(run: RunFolder, model: JEPA | Data2Vec, optimizer: torch.optim.Optimizer, echo: Echo) -> int:
    """Restore the newest checkpoint in place and return the next step; 0 when there is none. Anything wrong with it stops (F18)."""
    last = run.last_checkpoint()
    if last is None:
        return 0
    content = checkpoint.load(last)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    echo(f"resuming {run.path} after {content['step']} updates")
    return content["step"]


def save(
    run: RunFolder,
    model: JEPA | Data2Vec,
    optimizer: torch.optim.Optimizer,
    config: PretrainConfig,
    store: Store,
    step: int,
    participants: list[str],
) -> None:
    """Everything that resuming, embedding and an honest evaluation need, in one file."""
    record = run.record
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "config": config.model_dump(mode="json"),
        "preprocessing": store.preprocessing.model_dump(mode="json"),
        "fingerprint": store.fingerprint,
        "participants": {
            "key": record["participant_key"],
            "hashes": checkpoint.participant_hashes(participants, record["participant_key"]),
        },
        "git": record["git"],
        "environment": record["environment"],
        "octfm": __version__,
    }
    checkpoint.save(run.checkpoints, step, content, config.keep_checkpoints)


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


def config_of(content: dict) -> PretrainConfig:
    """The config stored in a checkpoint."""
    return load(PretrainConfig, content["config"])
