"""What a step and the held-out participants are measured by: losses over their content-free baselines, health of features, speed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np
import torch

from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import audit, health
from octfm.pretraining.step import MicroStep
from octfm.run.runtime import Runtime
from octfm.store.loader import Batch
from octfm.store.store import Store

PER_VOLUME = ("masked_loss_B", "context_loss_B", "masked_goal_BTD", "context_goal_BCD")


@torch.no_grad()
def validate(learner: Learner, store: Store, rows: np.ndarray) -> dict[str, float]:
    """Losses on held-out participants with real masks, the same ones every time; all of `rows` in one pass, shared by the ranks (F12)."""
    config, model, runtime = learner.config, learner.model, learner.runtime
    outputs: list[list[torch.Tensor]] = []
    own, size = runtime.part(rows), learner.micro_batch
    # As many passes on every rank, whose shares differ by a volume: sharded networks are gathered by all of them at once.
    passes = ceil(ceil(len(rows) / runtime.world) / size)
    for number in range(passes):
        chosen = own[number * size : (number + 1) * size]
        count = len(chosen)
        if not count or (runtime.steady and count < size):
            # Of the shape that was compiled; what is not asked for is left out again.
            chosen = np.concatenate((chosen, np.resize(rows, (size if runtime.steady else 1) - count)))
        arrays = store.read(chosen)
        scanner, acquisition = zip(
            *((store.rows[row].scanner, store.rows[row].acquisition) for row in chosen), strict=True
        )
        batch = Batch(arrays.voxels, arrays.band, arrays.valid, chosen, chosen, scanner, 0.0, acquisition=acquisition)
        inputs = make_inputs(config, store.preprocessing, runtime, batch, augmented=False)
        with runtime.autocast():
            output = model(inputs.views, config.objective.context_loss)
        outputs.append([x[:count] for x in runtime.read(*(getattr(output, name) for name in PER_VOLUME))])
    # One median over all held-out volumes, so that the ratio depends neither on the micro-batch nor on the ranks.
    whole = [runtime.gather(torch.cat(x)) for x in zip(*outputs, strict=True)]

    def row() -> dict[str, float]:
        masked, context = (float(x.mean()) for x in whole[:2])
        baseline, context_baseline = (float(model.baseline(goal).mean()) for goal in whole[2:])
        return {
            "masked_loss": masked,
            "masked_over_baseline": masked / baseline,
            "context_loss": context,
            "context_over_baseline": context / context_baseline,
            "volumes": len(rows),
        }

    return runtime.first(row)


@dataclass(frozen=True, eq=False)
class Before:
    """Copies from before an update, to measure what it moved."""

    teacher: list[torch.Tensor]
    """Empty where the objective has none."""
    audit: audit.Audit | None
    """None where steps are compiled: the preflight has looked at the objective, and every step would carry a share of it."""
    sample: list[torch.Tensor]
    """A few of the trained matrices where there is no audit, which counts weights that do not move among other things."""

    @classmethod
    def update(cls, learner: Learner, done: Sequence[MicroStep]) -> "Before":
        teacher, passes = learner.model.target_encoder, done[-1].gradients if done else None
        return cls(
            [p.clone() for p in _own(learner, teacher)] if teacher is not None else [],
            audit.Audit.begin(learner, passes) if passes is not None else None,
            [p.clone() for p in _sample(learner)] if passes is None else [],
        )

    @torch.no_grad()
    def moved(self, learner: Learner) -> dict[str, torch.Tensor]:
        """What the update has moved since, as numbers on the device; of a teacher only where there is one."""
        share, teacher = learner.runtime.sum_shares_, learner.model.target_encoder
        after, student = _own(learner, teacher) if teacher is not None else [], _own(learner, learner.model.encoder)
        size = torch.stack(torch._foreach_norm([*after, *student])).norm()
        found = {"size": size} | (self.audit.end(learner) if self.audit is not None else self._stuck(learner, size))
        if not after:
            return found
        return found | {
            "teacher_step": health.relative_distance(after, self.teacher, share),
            # As a momentum of 0 would ask it.
            "teacher_asked": health.relative_distance(student, self.teacher, share),
            "teacher_distance": health.relative_distance(after, student, share),
            "teacher_along": health.cosine(self.teacher, after, student, share),
        }

    def _stuck(self, learner: Learner, like: torch.Tensor) -> dict[str, torch.Tensor]:
        """Share of the sampled weights that did not move."""
        stuck = torch.cat([(a == b).flatten() for a, b in zip(self.sample, _sample(learner), strict=True)])
        counts = torch.stack((stuck.sum().float(), torch.full_like(like, float(stuck.numel()))))
        learner.runtime.sum_shares_(counts)
        return {"weights_stuck": counts[0] / counts[1]}


def update(
    learner: Learner, made: torch.Tensor, *, look: bool, done: Sequence[MicroStep] = ()
) -> dict[str, torch.Tensor]:
    """Make the update if `made`; with `look`, what it has moved, still on the device. `done` are the step's passes."""
    before = Before.update(learner, done) if look else None
    learner.update(made)
    return before.moved(learner) if before is not None else {}


def _sample(learner: Learner) -> list[torch.Tensor]:
    return [learner.runtime.local(p.detach()) for p in learner.decayed[1 :: max(1, len(learner.decayed) // 4)]]


def _own(learner: Learner, module: torch.nn.Module) -> list[torch.Tensor]:
    """A network's parameters, or this rank's shares of them."""
    return [learner.runtime.local(p) for p in health.parameters_of(module)]


@torch.no_grad()
def train_row(
    learner: Learner, done: list[MicroStep], moved: dict[str, torch.Tensor], ema: float, scanners: Sequence[str]
) -> dict:
    """Losses over their content-free baselines, overall and per scanner, and the features' health on tissue tokens.

    Rank 0 measures the global batch as one process would, and all ranks get its row. `moved` is from `update`, `scanners` are those
    of the global batch.
    """
    model, runtime = learner.model, learner.runtime
    found = [torch.cat(runtime.read(*(getattr(d, name) for d in done))) for name in PER_VOLUME]
    whole = [runtime.gather(x) for x in (*found, _tissue_features(runtime, done))]
    loss = torch.stack(runtime.read(*(d.loss for d in done))).mean()
    masks = torch.from_numpy(
        np.concatenate([(d.masks.dead, d.masks.tissue_dropped, d.masks.repeated) for d in done], 1, dtype=np.float64)
    )
    read = dict(zip(moved, runtime.read(*moved.values()), strict=True))
    audited = audit.summary(audit.names(learner), read.pop("audit")) if "audit" in read else {}
    measured = {name: float(x) for name, x in read.items()}
    shares = runtime.exchange(np.array([float(loss), *masks.mean(1), measured.pop("size")]))
    if "teacher_asked" in measured:
        measured["teacher_asked"] *= 1 - ema
    measured["ranks_apart"] = 0.0 if runtime.sharded else float(np.ptp(shares[:, -1]) / shares[0, -1])
    return runtime.first(lambda: _row(model.baseline, whole, np.array(scanners), shares) | measured | audited)


def _tissue_features(runtime: Runtime, done: list[MicroStep]) -> torch.Tensor:
    """[tokens, D] of this process's volumes."""
    features = runtime.read(*(d.features_BMD for d in done if d.features_BMD is not None))
    places = runtime.read(*(d.features_at_BM for d in done if d.features_at_BM is not None)) or [None] * len(done)
    found = []
    for x, at, d in zip(features, places, done, strict=True):
        tissue = torch.from_numpy(d.masks.tissue).to(x.device)
        found.append(x[tissue if at is None else torch.gather(tissue, 1, at)])
    return torch.cat(found)


def _row(
    baseline_of: Callable[[torch.Tensor], torch.Tensor],
    whole: list[torch.Tensor],
    scanner: np.ndarray,
    shares: np.ndarray,
) -> dict:
    masked, context, goal, context_goal, tissue = whole
    baseline, context_baseline = baseline_of(goal), baseline_of(context_goal)
    dead, dropped, repeated = (float(x) for x in shares[:, 1:4].mean(0))
    by_scanner = {}
    for kind in sorted(set(scanner.tolist())):
        own = torch.from_numpy(scanner == kind).to(masked.device)
        # Its own median: a scanner is not easier to predict because another one looks different.
        by_scanner[kind] = float(masked[own].mean() / baseline_of(goal[own]).mean().clamp_min(1e-9))
    return {
        "loss": float(shares[:, 0].mean()),
        "masked_loss": float(masked.mean()),
        "masked_over_baseline": float(masked.mean() / baseline.mean().clamp_min(1e-9)),
        "context_loss": float(context.mean()),
        "context_over_baseline": float(context.mean() / context_baseline.mean().clamp_min(1e-9)),
        "by_scanner": by_scanner,
        "effective_rank": health.effective_rank(tissue),
        "feature_std": health.feature_std(tissue),
        "dead_targets": dead,
        "tissue_dropped": dropped,
        "tokens_repeated": repeated,
    }


class Window:
    """Volumes, time and waiting since the last logged step."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.volumes, self.wait_s, self.since = 0, 0.0, time.perf_counter()

    def add(self, batch: Batch, ranks: int) -> None:
        self.volumes += len(batch.index) * ranks
        self.wait_s += batch.wait_s

    def close(self, runtime: Runtime) -> dict[str, float]:
        elapsed = max(1e-9, time.perf_counter() - self.since)
        # Of the rank that waited longest, and of the one that needed most: the others had to wait for it.
        wait_s, peak = (float(x) for x in runtime.exchange(np.array([self.wait_s, runtime.peak_memory_gb()])).max(0))
        row = {
            "volumes_per_s": self.volumes / elapsed,
            "data_wait_share": min(1.0, wait_s / elapsed),
            "peak_memory_gb": peak,
            "time": time.time(),
        }
        self.restart()
        return row
