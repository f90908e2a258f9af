"""Measurements of a step and of held-out participants: losses over content-free baselines, feature health, speed."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from octfm.models.objectives.objective import Objective
from octfm.models.pooling import width_of
from octfm.models.token_map import token_map
from octfm.models.vit3d import VisionTransformer3D, normalise, take_patches
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner
from octfm.pretraining.masks import same_tokens
from octfm.pretraining.monitors import audit, health
from octfm.pretraining.step import MicroStep
from octfm.run.runtime import Runtime
from octfm.store.layout import Arrays
from octfm.store.loader import Batch, batch_of
from octfm.store.store import Store

PER_VOLUME = ("masked_loss_B", "context_loss_B", "masked_goal_BTD", "context_goal_BCD")


@torch.no_grad()
def validate(learner: Learner, store: Store, rows: np.ndarray) -> dict[str, Any]:
    """Losses over all held-out `rows`, split over the ranks, with real masks that are the same at every call (F12)."""
    config, model, runtime = learner.config, learner.model, learner.runtime
    outputs: list[list[Tensor]] = []
    own, size = runtime.part(rows), learner.micro_batch
    # The same number of passes on every rank, although shares differ by a volume: a sharded network is gathered by
    # all ranks at once, and a rank with one pass fewer would leave the others waiting.
    passes = ceil(ceil(len(rows) / runtime.world) / size)
    for number in range(passes):
        chosen = own[number * size : (number + 1) * size]
        count = len(chosen)
        if not count or (runtime.steady and count < size):
            # Pad to the compiled batch shape, or to one volume; the padding is cut off below.
            chosen = np.concatenate((chosen, np.resize(rows, (size if runtime.steady else 1) - count)))
        inputs = make_inputs(config, store.preprocessing, runtime, batch_of(store, chosen), augmented=False)
        with runtime.autocast():
            output = model(inputs.views, config.objective.context_loss)
        outputs.append([x[:count] for x in runtime.read(*(getattr(output, name) for name in PER_VOLUME))])
    # One baseline over all held-out volumes, so that the ratio depends neither on the micro-batch nor on the ranks.
    whole = [runtime.gather(torch.cat(x)) for x in zip(*outputs, strict=True)]

    def row() -> dict[str, Any]:
        recorded = np.isin(rows, store.recorded(rows))
        # Where the losses are: on the device, or already with the host if steps are compiled.
        kinds = {
            name: torch.from_numpy(own).to(whole[0].device)
            for name, own in {"scans": recorded, "phantoms": ~recorded}.items()
            if 0 < own.sum() < len(rows)
        }
        by_kind = {name: over_baseline(model, whole[0][own], whole[2][own]) for name, own in kinds.items()}
        return ({"by_kind": by_kind} if by_kind else {}) | _losses(model, *whole) | {"volumes": len(rows)}

    return runtime.first(row)


def over_baseline(model: Objective, loss_B: Tensor, goal_BMD: Tensor) -> float:
    """The loss of some volumes over that of an answer without content."""
    # Not over 0: goals that are all alike, as those of blank volumes may be, leave a constant answer no error.
    return float(loss_B.mean() / model.baseline(goal_BMD).mean().clamp_min(1e-9))


def _losses(model: Objective, masked_B: Tensor, context_B: Tensor, masked: Tensor, context: Tensor) -> dict[str, float]:
    """Columns of metrics.jsonl: both losses of these volumes, and each over its baseline, from their goals."""
    return {
        "masked_loss": float(masked_B.mean()),
        "masked_over_baseline": over_baseline(model, masked_B, masked),
        "context_loss": float(context_B.mean()),
        "context_over_baseline": over_baseline(model, context_B, context),
    }


class Encoded(NamedTuple):
    """Some volumes and their tokens, selected as in training: a fixed number, so that shapes stay fixed."""

    arrays: Arrays
    index: np.ndarray
    """int64 [B, K]: flat grid indices."""
    tissue: np.ndarray
    """bool [B, K]"""
    tokens_BKD: Tensor
    """As the network returned them, in the run's precision."""


@torch.inference_mode()
def encoded(learner: Learner, network: VisionTransformer3D, store: Store, rows: np.ndarray) -> Iterator[Encoded]:
    """These rows of a store, as many at a time as the run has memory for. `octfm embed` encodes all tissue instead."""
    config, runtime, pre = learner.config, learner.runtime, store.preprocessing
    patch, size = config.model.patch_size, learner.micro_batch
    for first in range(0, len(rows), size):
        arrays = store.read(rows[first : first + size])
        maps = token_map(arrays.band, arrays.valid, pre.image_size, patch)
        budget = config.masks.counts(maps.shape[1:])[0]
        index, tissue = same_tokens(maps, budget, arrays.acquisition)
        kept = runtime.tensor(index)
        raw = take_patches(runtime.tensor(arrays.voxels).unsqueeze(1), kept, patch)
        with runtime.autocast():
            tokens_BKD = network(normalise(raw, pre.intensity_mean, pre.intensity_std), kept)
        yield Encoded(arrays, index, tissue, tokens_BKD)


@torch.inference_mode()
def tissue_vectors(learner: Learner, network: VisionTransformer3D, store: Store, rows: np.ndarray) -> np.ndarray:
    """float64 [n, vector width]: tissue tokens, pooled by objective.pool."""
    pool, vectors = learner.config.objective.pool, []
    for _, index, tissue, tokens_BKD in encoded(learner, network, store, rows):
        tissue |= ~tissue.any(1, keepdims=True)  # without tissue, pool all tokens
        counts, kept = learner.runtime.tensor(tissue), learner.runtime.tensor(index)
        vectors.append(network.vector(tokens_BKD.float(), counts, kept, pool).cpu().double().numpy())
    width = width_of(pool, network.config.width, network.config.summary)
    return np.concatenate(vectors) if vectors else np.zeros((0, width))


@dataclass(frozen=True, eq=False)
class BeforeUpdate:
    """Copies of weights taken before an update, to measure how far it moves them."""

    teacher: list[Tensor]
    """Empty if the objective has no teacher."""
    audit: audit.Audit | None
    """None in compiled steps, because all of them would then run it; the preflight checks the objective instead."""
    sample: list[Tensor]
    """A few trained matrices, to count stuck weights without an audit; empty with one, since the audit counts them."""

    @classmethod
    def copy(cls, learner: Learner, micro_steps: Sequence[MicroStep]) -> "BeforeUpdate":
        teacher, passes = learner.model.target_encoder, micro_steps[-1].gradients if micro_steps else None
        return cls(
            [p.clone() for p in _local_parameters(learner, teacher)] if teacher is not None else [],
            audit.Audit.begin(learner, passes) if passes is not None else None,
            [p.clone() for p in _sample(learner)] if passes is None else [],
        )

    @torch.no_grad()
    def compare(self, learner: Learner) -> dict[str, Tensor]:
        """Movement since the copy, as numbers on the device; `teacher_*` only if the objective has a teacher."""
        sum_shares_, teacher = learner.runtime.sum_shares_, learner.model.target_encoder
        student = _local_parameters(learner, learner.model.encoder)
        after = _local_parameters(learner, teacher) if teacher is not None else []
        # Ranks that apply the same updates agree on this norm to the bit (`ranks_apart`).
        size = torch.stack(torch._foreach_norm([*after, *student])).norm()
        found = {"size": size} | (self.audit.end(learner) if self.audit is not None else self._stuck(learner, size))
        if not after:
            return found
        return found | {
            "teacher_step": health.relative_distance(after, self.teacher, sum_shares_),
            # The step that a momentum of 0 would make; train_row multiplies it by 1 - momentum.
            "teacher_asked": health.relative_distance(student, self.teacher, sum_shares_),
            "teacher_distance": health.relative_distance(after, student, sum_shares_),
            "teacher_along": health.cosine(self.teacher, after, student, sum_shares_),
        }

    def _stuck(self, learner: Learner, like: Tensor) -> dict[str, Tensor]:
        """Share of the sampled weights that did not move."""
        stuck = torch.cat([(a == b).flatten() for a, b in zip(self.sample, _sample(learner), strict=True)])
        counts = torch.stack((stuck.sum().float(), torch.full_like(like, float(stuck.numel()))))
        learner.runtime.sum_shares_(counts)
        return {"weights_stuck": counts[0] / counts[1]}


def update(
    learner: Learner, apply: Tensor, *, inspect: bool, micro_steps: Sequence[MicroStep] = ()
) -> dict[str, Tensor]:
    """Apply the update where `apply` is true; with `inspect`, return how far it moved the weights, still on the device.
    `micro_steps` are the step's passes, whose gradients the audit starts from."""
    before = BeforeUpdate.copy(learner, micro_steps) if inspect else None
    learner.update(apply)
    return before.compare(learner) if before is not None else {}


def _sample(learner: Learner) -> list[Tensor]:
    return [learner.runtime.local(p.detach()) for p in learner.decayed[1 :: max(1, len(learner.decayed) // 4)]]


def _local_parameters(learner: Learner, module: torch.nn.Module) -> list[Tensor]:
    """A network's parameters; with sharding, this rank's part of each."""
    return [learner.runtime.local(p.detach()) for p in module.parameters()]


@torch.no_grad()
def train_row(
    learner: Learner,
    micro_steps: list[MicroStep],
    movement: dict[str, Tensor],
    ema: float,
    scanners: Sequence[str],
) -> dict:
    """Losses over their content-free baselines, overall and per scanner, and feature health on tissue tokens: rank 0's
    row of the whole global batch, on all ranks. `movement` is what `update` returned."""
    model, runtime = learner.model, learner.runtime
    per_volume = [torch.cat(runtime.read(*(getattr(m, name) for m in micro_steps))) for name in PER_VOLUME]
    whole = [runtime.gather(x) for x in (*per_volume, _tissue_features(runtime, micro_steps))]
    loss = torch.stack(runtime.read(*(m.loss for m in micro_steps))).mean()
    masks = np.concatenate(
        [(m.masks.dead, m.masks.tissue_dropped, m.masks.repeated) for m in micro_steps], 1, dtype=np.float64
    )
    read = dict(zip(movement, runtime.read(*movement.values()), strict=True))
    audited = audit.summary(audit.names(learner), read.pop("audit")) if "audit" in read else {}
    measured = {name: float(x) for name, x in read.items()}
    per_rank = runtime.exchange(np.array([float(loss), *torch.from_numpy(masks).mean(1), measured.pop("size")]))
    if "teacher_asked" in measured:
        measured["teacher_asked"] *= 1 - ema
    # Unsharded ranks hold the same weights, so their norms are equal to the bit.
    measured["ranks_apart"] = 0.0 if runtime.sharded else float(np.ptp(per_rank[:, -1]) / per_rank[0, -1])
    return runtime.first(lambda: _row(model, whole, np.array(scanners), per_rank) | measured | audited)


def _tissue_features(runtime: Runtime, micro_steps: list[MicroStep]) -> Tensor:
    """[tokens, D] of this rank's volumes."""
    features = runtime.read(*(m.features_BMD for m in micro_steps if m.features_BMD is not None))
    places = runtime.read(*(m.features_at_BM for m in micro_steps if m.features_at_BM is not None))
    found = []
    for x, at, m in zip(features, places or [None] * len(micro_steps), micro_steps, strict=True):
        tissue = torch.from_numpy(m.masks.tissue).to(x.device)
        found.append(x[tissue if at is None else torch.gather(tissue, 1, at)])
    return torch.cat(found)


def _row(model: Objective, whole: list[Tensor], scanner: np.ndarray, per_rank: np.ndarray) -> dict:
    *losses, tissue = whole
    masked_B, _, masked_goal, _ = losses
    dead, dropped, repeated = (float(x) for x in per_rank[:, 1:4].mean(0))
    by_scanner = {}
    for kind in sorted(set(scanner.tolist())):
        own = torch.from_numpy(scanner == kind).to(masked_B.device)
        # A baseline of the scanner's own: it is not easier to predict because other scanners look different.
        by_scanner[kind] = over_baseline(model, masked_B[own], masked_goal[own])
    return {
        "loss": float(per_rank[:, 0].mean()),
        **_losses(model, *losses),
        "by_scanner": by_scanner,
        "tissue_tokens": len(tissue),
        "effective_rank": health.effective_rank(tissue),
        "feature_std": health.feature_std(tissue),
        "dead_targets": dead,
        "tissue_dropped": dropped,
        "tokens_repeated": repeated,
    }


class Window:
    """Counts volumes, elapsed seconds and seconds spent waiting for data since the last logged step."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.volumes, self.wait_s, self.since = 0, 0.0, time.perf_counter()

    def add(self, batch: Batch, ranks: int) -> None:
        """Count the batch of one of so many ranks."""
        self.volumes += len(batch.index) * ranks
        self.wait_s += batch.wait_s

    def close(self, runtime: Runtime) -> dict[str, float]:
        """The measurements since the last call, over all ranks, each of which must call this; begins anew."""
        elapsed = max(1e-9, time.perf_counter() - self.since)
        # Maxima over ranks: every rank waits for the one whose data came last.
        wait_s, peak = (float(x) for x in runtime.exchange(np.array([self.wait_s, runtime.peak_memory_gb()])).max(0))
        row = {
            "volumes_per_s": self.volumes / elapsed,
            "data_wait_share": min(1.0, wait_s / elapsed),
            "peak_memory_gb": peak,
            "time": time.time(),
        }
        self.restart()
        return row
