"""The networks of fine-tuning with their optimizer: an encoder, or its features computed once, and a head."""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from octfm.encoder.encoder import Encoder
from octfm.encoder.tokens import TokenFeatures
from octfm.encoder.tuned import heads_of
from octfm.models.heads import TaskHead, add_low_rank, depth_of
from octfm.models.vit3d import normalise, take_patches
from octfm.pretraining import augment
from octfm.pretraining.inputs import AUGMENT, generators
from octfm.pretraining.schedule import Schedule, ScheduleConfig
from octfm.run.runtime import Runtime
from octfm.store.layout import Arrays
from octfm.store.store import Store
from octfm.tasks.finetune_settings import FinetuneConfig


class Source(Protocol):
    """Gives tokens [B, M, D] for rows of the store, and bool [B, M]: which of them are tissue."""

    def tokens(self, rows: np.ndarray, position: np.ndarray | None) -> tuple[Tensor, Tensor]:
        """`position` seeds the augmentation of each volume; None for no augmentation."""
        ...


class Features:
    """Cached tokens of a frozen encoder."""

    def __init__(self, features: TokenFeatures, store: Store, runtime: Runtime):
        self.features, self.store, self.runtime = features, store, runtime

    def tokens(self, rows: np.ndarray, position: np.ndarray | None) -> tuple[Tensor, Tensor]:
        tokens, counts = self.features.take([self.store.rows[row].acquisition for row in rows])
        return self.runtime.tensor(tokens), self.runtime.tensor(counts)


class Live:
    """Tokens of an encoder that learns: volumes are read, augmented and encoded."""

    def __init__(self, encoder: Encoder, store: Store, config: FinetuneConfig):
        self.encoder, self.store, self.config = encoder, store, config

    def tokens(self, rows: np.ndarray, position: np.ndarray | None) -> tuple[Tensor, Tensor]:
        encoder, pre, arrays = self.encoder, self.encoder.preprocessing, self.store.read(rows)
        runtime, patch_size = encoder.runtime, encoder.config.model.patch_size
        voxels = runtime.tensor(arrays.voxels).unsqueeze(1)
        moves = None
        if position is not None:
            laterality = [self.store.rows[row].laterality for row in rows]
            drawn = augment.draw(self.config.augment, generators(self.config.seed, AUGMENT, position), laterality)
            height, width = arrays.voxels.shape[2:]
            surfaces = drawn.surfaces(arrays.band, arrays.valid, height, pre.target_spacing)
            arrays = Arrays(arrays.voxels, *surfaces, acquisition=arrays.acquisition)
            moves = drawn.on_device(runtime.tensor, height, width, pre.target_spacing)
            voxels = augment.move(voxels, moves)
        chosen, tissue = encoder.select(arrays)
        index = runtime.tensor(chosen)
        patches = take_patches(voxels, index, patch_size)
        mean, std = pre.intensity_mean, pre.intensity_std
        if moves is None:
            patches = normalise(patches, mean, std)
        else:
            patches = augment.recoloured(patches, index, moves, mean, std)
        return encoder.network(patches, index), runtime.tensor(tissue)


class TaskModel:
    """The head, the encoder if it is trained, and one AdamW for both, with a learning rate per depth."""

    def __init__(self, config: FinetuneConfig, encoder: Encoder, outputs: int):
        self.config, self.encoder, self.runtime, self.outputs = config, encoder, encoder.runtime, outputs
        network = encoder.network.requires_grad_(not config.frozen)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            self.head = TaskHead(encoder.width, heads_of(encoder.config.model), outputs, config.pool)
            if config.lora_rank is not None:
                add_low_rank(network, config.lora_rank)
        self.head.to(self.runtime.device)
        network.to(self.runtime.device)
        # A frozen encoder is not saved: its run has it.
        self.module = nn.ModuleDict({"head": self.head} if config.frozen else {"head": self.head, "encoder": network})
        self.learning = [p for p in network.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self._groups(), lr=config.lr_head, betas=(0.9, 0.999))

    def _groups(self) -> list[dict]:
        """Parameter groups: `rate` is the peak learning rate, `part` is head or encoder."""
        config, groups = self.config, []
        depth = self.encoder.config.model.depth
        named = [("head", 0, p) for p in self.head.parameters()]
        named += [
            ("encoder", depth_of(name, depth), p)
            for name, p in self.encoder.network.named_parameters()
            if p.requires_grad
        ]
        found: dict[tuple, list[nn.Parameter]] = {}
        for part, level, p in named:
            found.setdefault((part, level, p.ndim >= 2), []).append(p)
        for (part, level, decayed), parameters in found.items():
            rate = config.lr_head if part == "head" else config.lr_encoder * config.layer_decay ** (depth + 1 - level)
            decay = config.weight_decay if decayed else 0.0
            groups.append({"params": parameters, "rate": rate, "part": part, "weight_decay": decay})
        return groups

    def set_rates(self, step: int, steps: int, head_steps: int) -> None:
        """Set the learning rates of this step; the encoder rests for `head_steps` and then has a warm-up of its own."""
        curve = ScheduleConfig(base_lr=1.0, warmup_ratio=self.config.warmup_ratio, min_lr_ratio=0.01)
        moving = step >= head_steps
        for p in self.learning:
            p.requires_grad_(moving)
        head = Schedule(curve, steps).lr(step)
        encoder = Schedule(curve, max(1, steps - head_steps)).lr(step - head_steps) if moving else 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * (head if group["part"] == "head" else encoder)

    def answers(self, source: Source, rows: np.ndarray, position: np.ndarray | None = None) -> Tensor:
        """float32 [B, O]: the head's outputs for rows of the store; `position` as in `Source.tokens`."""
        with self.runtime.autocast():
            tokens, counts = source.tokens(rows, position)
            return self.head(tokens, counts).float()
