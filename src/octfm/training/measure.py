"""What a step and the held-out participants are measured by: losses over their content-free baselines, health of features, speed."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from octfm.data.loader import Batch
from octfm.data.store import Store
from octfm.models.objective import ObjectiveOutput, content_free_baseline
from octfm.training import health
from octfm.training.inputs import make_inputs
from octfm.training.learner import Learner
from octfm.training.runtime import Runtime
from octfm.training.step import MicroStep


@torch.no_grad()
def validate(learner: Learner, store: Store, rows: np.ndarray) -> dict[str, float]:
    """Losses on held-out participants with real masks, the same ones every time; all of `rows` in one pass (F12)."""
    config, model, runtime = learner.config, learner.model, learner.runtime
    outputs: list[ObjectiveOutput] = []
    for first in range(0, len(rows), learner.micro_batch):
        chosen = rows[first : first + learner.micro_batch]
        arrays = store.read(chosen)
        scanner = tuple(store.rows[row].scanner for row in chosen)
        batch = Batch(arrays.voxels, arrays.band, arrays.valid, chosen, chosen, scanner, 0.0)
        inputs = make_inputs(config, store.preprocessing, runtime, batch, augmented=False)
        with runtime.autocast():
            output = model(inputs.patches, inputs.target_patches, inputs.index, config.objective.context_loss)
        outputs.append(output._replace(features_BKD=output.features_BKD[:0]))
    # One median over all held-out volumes, so that the ratio does not depend on the micro-batch.
    masked, context = (float(torch.cat(x).mean()) for x in zip(*((o.masked_loss_B, o.context_loss_B) for o in outputs), strict=True))
    goals = (torch.cat(x) for x in zip(*((o.masked_goal_BTD, o.context_goal_BCD) for o in outputs), strict=True))
    baseline, context_baseline = (float(content_free_baseline(model.name, goal).mean()) for goal in goals)
    return {
        "masked_loss": masked,
        "masked_over_baseline": masked / baseline,
        "context_loss": context,
        "context_over_baseline": context / context_baseline,
        "volumes": len(rows),
    }


@dataclass(frozen=True, eq=False)
class Before:
    """Copies from before an update, to measure what it moved."""

    teacher: list[torch.Tensor]
    sample: list[torch.Tensor]
    """A few of the trained matrices."""

    @classmethod
    def update(cls, learner: Learner) -> "Before":
        teacher = [p.clone() for p in health.parameters_of(learner.model.target_encoder)]
        return cls(teacher, [p.detach().clone() for p in _sample(learner)])


def _sample(learner: Learner) -> list[torch.Tensor]:
    return learner.decayed[1 :: max(1, len(learner.decayed) // 4)]


@torch.no_grad()
def train_row(learner: Learner, done: list[MicroStep], before: Before, ema: float) -> dict:
    """Losses over their content-free baselines, overall and per scanner, and the features' health on tissue tokens."""
    model = learner.model
    masked = torch.cat([d.masked_loss_B for d in done])
    context = torch.cat([d.context_loss_B for d in done])
    goal = torch.cat([d.masked_goal_BTD for d in done if d.masked_goal_BTD is not None])
    baseline = content_free_baseline(model.name, goal)
    context_goal = torch.cat([d.context_goal_BCD for d in done if d.context_goal_BCD is not None])
    context_baseline = content_free_baseline(model.name, context_goal)
    tissue = torch.cat([d.tissue_features_MD for d in done if d.tissue_features_MD is not None])
    scanner = np.array([name for d in done for name in d.scanner])
    masks = [d.masks for d in done]
    after, student = health.parameters_of(model.target_encoder), health.parameters_of(model.encoder)
    stuck = torch.cat([(a == b).flatten() for a, b in zip(before.sample, _sample(learner), strict=True)])
    by_scanner = {}
    for name in sorted(set(scanner)):
        own = torch.from_numpy(scanner == name).to(masked.device)
        # Its own median: a scanner is not easier to predict because another one looks different.
        by_scanner[name] = float(masked[own].mean() / content_free_baseline(model.name, goal[own]).mean().clamp_min(1e-9))
    return {
        "loss": float(torch.stack([d.loss for d in done]).mean()),
        "masked_loss": float(masked.mean()),
        "masked_over_baseline": float(masked.mean() / baseline.mean().clamp_min(1e-9)),
        "context_loss": float(context.mean()),
        "context_over_baseline": float(context.mean() / context_baseline.mean().clamp_min(1e-9)),
        "by_scanner": by_scanner,
        "effective_rank": health.effective_rank(tissue),
        "feature_std": health.feature_std(tissue),
        "teacher_step": health.relative_distance(after, before.teacher),
        "teacher_asked": (1 - ema) * health.relative_distance(student, before.teacher),
        "teacher_distance": health.relative_distance(after, student),
        "weights_stuck": float(stuck.float().mean()),
        "dead_targets": float(np.concatenate([m.dead for m in masks]).mean()),
        "tissue_dropped": float(np.concatenate([m.tissue_dropped for m in masks]).mean()),
        "tokens_repeated": float(np.concatenate([m.repeated for m in masks]).mean()),
    }


class Window:
    """Volumes, time and waiting since the last logged step."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.volumes, self.wait_s, self.since = 0, 0.0, time.perf_counter()

    def add(self, batch: Batch) -> None:
        self.volumes += len(batch.index)
        self.wait_s += batch.wait_s

    def close(self, runtime: Runtime) -> dict[str, float]:
        elapsed = max(1e-9, time.perf_counter() - self.since)
        row = {
            "volumes_per_s": self.volumes / elapsed,
            "data_wait_share": min(1.0, self.wait_s / elapsed),
            "peak_memory_gb": runtime.peak_memory_gb(),
            "time": time.time(),
        }
        self.restart()
        return row
