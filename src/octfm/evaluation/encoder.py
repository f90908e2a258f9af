"""A frozen encoder that knows its preprocessing: volumes in, vectors or token grids out."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octfm.config import load
from octfm.data.location import Location
from octfm.data.preprocessing import Preprocessing
from octfm.data.store import Arrays
from octfm.data.volume import Volume
from octfm.errors import EvaluationError
from octfm.masks import TISSUE, select_tokens, token_map
from octfm.models.vit3d import VisionTransformer3D, take_patches
from octfm.training import checkpoint
from octfm.training.augment import normalise
from octfm.training.bucket_run import local_run
from octfm.training.inputs import build_objective, frozen_encoder
from octfm.training.learner import config_of
from octfm.training.runtime import Runtime, start
from octfm.training.settings import PretrainConfig

SELECTION_SEED = 0
"""Embedding repeats the training selection of tokens with this seed, so that the same volume gives the same vector."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """The frozen encoder of a run (objective.frozen) with the Preprocessing that its weights expect (F15)."""

    network: VisionTransformer3D
    config: PretrainConfig
    preprocessing: Preprocessing
    runtime: Runtime
    source: str
    fingerprint: str
    """Of the Preprocessing that the weights were trained on, with the version of its algorithm."""
    own_zscore: bool = False
    """Volumes are standardised one by one, as the prototype did, instead of by the Preprocessing's fixed mean and standard deviation."""

    @property
    def width(self) -> int:
        return self.config.model.width

    @property
    def key(self) -> str:
        """Identifies a feature: weights, Preprocessing, precision and token budget. A cache under another key is another feature."""
        digest = hashlib.sha256(f"{self.fingerprint}|{self.runtime.precision}|{self.config.masks.budget}|{self.own_zscore}".encode())
        for name, tensor in self.network.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    def embed(self, volume: Volume) -> np.ndarray:
        """float32 [width]: mean over tissue tokens of one acquisition, in any native geometry."""
        return self.embed_arrays(self._prepare(volume))[0]

    def embed_tokens(self, volume: Volume) -> np.ndarray:
        """float32 [d, h, w, width]: every token of the full grid, padding included."""
        return self.encode_grid(self._prepare(volume).voxels)[0]

    @torch.inference_mode()
    def embed_arrays(self, arrays: Arrays) -> np.ndarray:
        """float32 [B, width] of prepared volumes: the token budget of training, tissue first, mean over tissue tokens."""
        chosen, tissue = self.select(arrays)
        tokens_BMD = self._encode(arrays.voxels, self.runtime.tensor(chosen))
        weight = self.runtime.tensor(tissue.astype(np.float32)).unsqueeze(-1)
        return ((tokens_BMD * weight).sum(1) / weight.sum(1)).cpu().numpy()

    @torch.inference_mode()
    def tissue_tokens(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """float32 [B, M, width] of the same tokens, and bool [B, M]: which of them `embed_arrays` averages."""
        chosen, tissue = self.select(arrays)
        return self._encode(arrays.voxels, self.runtime.tensor(chosen)).cpu().numpy(), tissue

    def select(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """int64 [B, M] flat grid indices of the token budget, and bool [B, M]: which are tissue (all, where none was found)."""
        maps = token_map(arrays.band, arrays.valid, self.preprocessing.image_size, self.config.model.patch_size)
        kept, _, _ = self.config.masks.counts(maps.shape[1:])
        chosen = np.stack([select_tokens(m, kept, np.random.default_rng(SELECTION_SEED)) for m in maps])
        tissue = np.take_along_axis(maps.reshape(len(maps), -1), chosen, 1) == TISSUE
        return chosen, tissue | ~tissue.any(1, keepdims=True)

    @torch.inference_mode()
    def encode_grid(self, voxels: np.ndarray) -> np.ndarray:
        """float32 [B, d, h, w, width] of prepared voxels uint8 [B, D, H, W]: the full grid."""
        grid = self.network.grid
        everything = torch.arange(grid.size, device=self.runtime.device).expand(len(voxels), -1)
        return self._encode(voxels, everything).unflatten(1, grid.shape).cpu().numpy()

    def _encode(self, voxels: np.ndarray, index: Tensor) -> Tensor:
        patches = take_patches(self.runtime.tensor(voxels).unsqueeze(1), index, self.config.model.patch_size)
        if self.own_zscore:
            whole = self.runtime.tensor(voxels).flatten(1).float()
            patches = (patches.float() - whole.mean(1)[:, None, None]) / whole.std(1).clamp_min(1e-6)[:, None, None]
        else:
            patches = normalise(patches, self.preprocessing.intensity_mean, self.preprocessing.intensity_std)
        with self.runtime.autocast():
            return self.network(patches, index).float()

    def _prepare(self, volume: Volume) -> Arrays:
        if self.preprocessing.fingerprint() != self.fingerprint:
            raise EvaluationError(f"{self.source}: trained on volumes that an older octfm prepared differently; use that version (F15)")
        prepared = self.preprocessing(volume)
        return Arrays(prepared.voxels[None], prepared.band[None], prepared.valid[None])


def load_encoder(run: str | Location, *, random_init: bool = False, device: str | None = None) -> Encoder:
    """The encoder of a run (a folder, or in a bucket) or of a checkpoint file, in float32; `random_init`: before its first update."""
    path = checkpoint.newest(local_run(run))
    content = checkpoint.load(path)
    config = config_of(content)
    preprocessing = load(Preprocessing, content["preprocessing"])
    model = build_objective(config, preprocessing)
    if not random_init:
        model.load_state_dict(content["model"])
    runtime = start("fp32", device)
    network = frozen_encoder(config, model).to(runtime.device).eval()
    source = f"{path} at random initialisation" if random_init else str(path)
    return Encoder(network, config, preprocessing, runtime, source, content["fingerprint"])


def seen_by(run: str | Path) -> Callable[[str], bool]:
    """A predicate: was this participant in the pretraining data of the run's newest checkpoint?"""
    participants = checkpoint.load(checkpoint.newest(Path(run)))["participants"]
    known = set(participants["hashes"])
    return lambda participant: checkpoint.participant_hashes([participant], participants["key"])[0] in known
