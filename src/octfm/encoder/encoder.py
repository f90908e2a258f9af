"""A frozen encoder with its preprocessing: volumes in, vectors or grids of tokens out."""

import hashlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octfm.display import box, brief, times
from octfm.encoder.sources import display_name, find
from octfm.errors import CheckpointError, ConfigError, Echo, EvaluationError, reason_of
from octfm.formats import read_volume
from octfm.formats.declared import doubtful_way_up
from octfm.io.location import Location
from octfm.io.progress import say
from octfm.layers.band import band_finder
from octfm.models.heads import merged
from octfm.models.objectives.builtin import UnknownObjective
from octfm.models.objectives.objective import ObjectiveConfig
from octfm.models.pooling import POOLS, VectorPool, width_of
from octfm.models.token_map import tissue_index, token_map
from octfm.models.vit3d import VisionTransformer3D, bscan_weights, count_parameters
from octfm.pretraining.learner import build_objective, grid_of
from octfm.pretraining.masks import same_tokens
from octfm.pretraining.resume import frozen_weights, part_of, read_content
from octfm.pretraining.settings import PretrainConfig, stored_config
from octfm.run import checkpoint
from octfm.run.runtime import Runtime, alone, torch_defaults
from octfm.store.item import StoredVolume
from octfm.store.layout import Arrays, shapes
from octfm.store.store import Store
from octfm.volume.preprocessing import Prepared, Preprocessing, differences
from octfm.volume.volume import Volume, expect_volume
from octfm.weights import exported

Scan = str | PathLike | Volume | StoredVolume
"""What `Encoder.embed` takes for one scan; a str is a path or an address."""
EMBEDDED_AT_ONCE = 16
MOST_PACKED = 32_768 * 384
"""Most values (tokens times channels) of volumes that are encoded together: 32,768 tokens of a ViT-S. The GPU then
computes for about as long as the host needs to launch the operators, which takes the same time for any number."""
READ = "all tissue tokens"
"""The tokens that vectors are read from, not those of the training objective: adding background tokens would change the
score of a vector, even of an untrained network."""


AT_RANDOM = " at random initialisation"
"""Follows the path of an encoder in `Encoder.source` if its weights are those before the first update."""


@dataclass(frozen=True, eq=False)
class Encoder:
    """A frozen encoder, with the Preprocessing that its weights expect: turns scans into vectors or tokens."""

    network: VisionTransformer3D
    """A torch module for your own training loop: `forward_features(voxels)`, `feature_map(voxels)`, `num_features`.
    Training it changes this encoder."""
    config: PretrainConfig
    preprocessing: Preprocessing
    runtime: Runtime
    source: str
    fingerprint: str
    """Fingerprint of the Preprocessing that the weights were trained on, including the version of its algorithm."""
    own_zscore: bool = False
    """Standardise each volume by its own mean and standard deviation, as the prototype did, instead of by the fixed
    ones of the Preprocessing."""

    def __post_init__(self):
        pre = self.preprocessing
        self.network.intensity = "own" if self.own_zscore else (pre.intensity_mean, pre.intensity_std)

    def __repr__(self) -> str:
        facts = self._described()
        return brief("Encoder", facts["network"], f"vectors of {self.vector_width}", f"volumes of {facts['volumes']}")

    def _repr_html_(self) -> str:
        return box("Encoder", self._described())

    def _described(self) -> dict[str, str]:
        model, grid = self.config.model, self.network.grid
        spacing = " × ".join(f"{mm:g}" for mm in self.preprocessing.target_spacing)
        size = self.preprocessing.image_size
        millions = f"{count_parameters(self.network) / 1e6:.3g} M parameters"
        return {
            "network": f"ViT of {model.depth} blocks × {model.width} channels, {millions}",
            "length of a vector": str(self.vector_width),
            "readout": self.readout,
            "tokens": f"grid of {times(grid.shape)}, patches of {times(model.patch_size)} voxels",
            "objective": self.config.objective.name,
            "volumes": f"{times(size)} voxels of {spacing} mm",
            "device": f"{self.runtime.device}, {self.runtime.precision}",
        }

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.config.model.width

    @property
    def vector_width(self) -> int:
        """Length of a volume's vector."""
        return width_of(self.config.objective.pool, self.width, self.config.model.summary)

    def pooling(self, pool: VectorPool | None) -> "Encoder":
        """The same encoder with another pooling of vectors; None keeps the run's own (objective.pool).

        Raises ConfigError if there is no such pooling.
        """
        if pool not in (None, *POOLS):
            raise ConfigError(f"pool: expected {', '.join(POOLS)}, got {pool!r}")
        if pool == "summary" and not self.config.model.summary:
            raise ConfigError("pool=summary: this encoder has no summary (model.summary is 0); choose another pooling")
        objective = self.config.objective if pool is None else self.config.objective.model_copy(update={"pool": pool})
        return replace(self, config=self.config.model_copy(update={"objective": objective}))

    @property
    def key(self) -> str:
        """Identifies its tokens in caches: a hash of weights, Preprocessing, precision and token budget."""
        digest = hashlib.sha256(
            f"{self.fingerprint}|{self.runtime.precision}|{self.config.masks.budget}|{self.own_zscore}".encode()
        )
        for name, tensor in self.network.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.cpu().float().contiguous().numpy().tobytes())
        return digest.hexdigest()[:32]

    @property
    def digest(self) -> str:
        """SHA-256 of the float32 weights, which identifies them in results; `octfm models` prints that of packaged
        ones."""
        return exported.digest(self.network.state_dict())

    @property
    def readout(self) -> str:
        """Which tokens become a vector, and how: the same for all encoders that are compared."""
        return f"{READ}, {self.config.objective.pool}"

    @property
    def vector_key(self) -> str:
        """Identifies its vectors: `key` and the readout."""
        return f"{self.key}-{self.readout}"

    def require_prepared(self, store: Store) -> None:
        """Raise EvaluationError if a store was prepared with another Preprocessing than the encoder's (F15)."""
        if store.fingerprint != self.fingerprint:
            differing = differences(store.preprocessing.model_dump(mode="json"), self.preprocessing)
            raise EvaluationError(_prepared_otherwise(str(store.path), self.source, differing))

    @property
    def takes_bscans(self) -> bool:
        """Whether it reads single B-scans instead of volumes."""
        return self.preprocessing.takes_bscans

    def of_bscans(self) -> "Encoder":
        """The same encoder for single B-scans: patch kernels are summed over depth, and there is one layer of tokens.

        Its tokens are those of the encoder of volumes for the B-scan repeated over the depth of a patch, with no other
        tokens visible. An encoder that was trained on B-scans is returned unchanged.
        """
        if self.takes_bscans:
            return self
        config, preprocessing = self.config, self.preprocessing.of_bscans()
        model = config.model.model_copy(update={"patch_size": (1, *config.model.patch_size[1:])})
        config = config.model_copy(update={"model": model})
        network = empty_network(config, preprocessing)
        fill(network, bscan_weights(self.network), self.source)
        old = self.preprocessing.fingerprint() == self.fingerprint
        fingerprint = preprocessing.fingerprint() if old else self.fingerprint
        found = assemble(network, config, preprocessing, self.source, fingerprint, self.runtime)
        return replace(found, own_zscore=self.own_zscore)

    def reading(self, store: Store) -> "Encoder":
        """The encoder for a store: `of_bscans` for single B-scans. Raises EvaluationError as `require_prepared`."""
        encoder = self.of_bscans() if store.image_size[0] == 1 else self
        encoder.require_prepared(store)
        return encoder

    def embed(self, scans: "Scan | Store | Iterable[Scan]") -> np.ndarray:
        """The pooled tissue tokens (objective.pool): float32 [vector_width], or [N, vector_width] of several scans.

        scans: a file or folder that octfm.read_volume reads, a Volume in any native geometry, or `store[i]`; a list of
        these, or a Store, in its order. Volumes of a store are taken as they were prepared, single B-scans are read by
        `of_bscans`. Which way up a Volume lies is not checked if its source is "memory".

        Raises ReadError for a file that cannot be read or is upside down, EvaluationError for a store that was prepared
        otherwise and for a modality (angiography) that the encoder was not trained on.
        """
        if isinstance(scans, Store):
            encoder = self.reading(scans)
            starts = range(0, len(scans), EMBEDDED_AT_ONCE)
            rows = [np.arange(first, min(first + EMBEDDED_AT_ONCE, len(scans))) for first in starts]
            return self._stacked([encoder.embed_arrays(scans.read(part)) for part in rows])
        if isinstance(scans, Scan):
            return self._embed_scan(scans, self.of_bscans)[0]
        of_bscans = cache(self.of_bscans)
        return self._stacked([self._embed_scan(scan, of_bscans) for scan in several(scans, "embed_arrays")])

    def _stacked(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate([*parts, np.zeros((0, self.vector_width), np.float32)])

    def _embed_scan(self, scan: "Scan", of_bscans: Callable[[], "Encoder"]) -> np.ndarray:
        """float32 [1, vector_width]"""
        encoder, arrays = self.prepared(scan, of_bscans)
        return encoder.embed_arrays(arrays)

    def prepared(self, scan: "Scan", of_bscans: Callable[[], "Encoder"]) -> tuple["Encoder", Arrays]:
        """A scan as a batch of one, and the encoder that reads it: `of_bscans` of a single B-scan."""
        if isinstance(scan, StoredVolume):
            encoder = of_bscans() if scan.shape[0] == 1 else self
            if scan.fingerprint != encoder.fingerprint:
                raise EvaluationError(_prepared_otherwise("this volume", self.source))
            return encoder, scan.arrays
        if not isinstance(scan, Scan):
            raise TypeError(f"expected a path, a Volume or a volume of a store, got {type(scan).__name__}")
        if isinstance(scan, Volume):
            # A file with one B-scan is read as a line; an array in memory is a raster unless its layout is given.
            single = scan.layout == "raster" and len(scan.voxels) == 1
            volume = replace(scan, layout="line") if single else scan
        else:
            flow = "octa" in self.config.data.modalities
            volume = read_volume(scan, raster_only=False, structure_only=not flow)
        encoder = of_bscans() if volume.layout == "line" else self
        prepared = encoder.preprocess(volume)
        # Of an array in memory the caller knows, and a sidecar could not declare it.
        if volume.source != "memory" and volume.modality == "structure":
            doubtful_way_up(volume, prepared.confidence["ilm_support"])
        return encoder, Arrays.of(prepared)

    def embed_tokens(self, scan: Scan) -> np.ndarray:
        """float32 [d, h, w, width]: all tokens of one scan (as for `embed`), including padding; d is 1 for a single
        B-scan. Raises as `embed`."""
        encoder, arrays = self.prepared(scan, self.of_bscans)
        return encoder.encode_grid(arrays.voxels)[0]

    @torch_defaults()
    @torch.inference_mode()
    def embed_arrays(self, arrays: Arrays) -> np.ndarray:
        """float32 [B, vector_width] of prepared volumes: all tissue tokens, encoded without any others and pooled.

        On other devices than the CPU, volumes share every operator but attention: up to rounding, a vector does not
        depend on the other volumes in the batch. Raises TooFewTokens for a volume without image, ConfigError for arrays
        of another shape.
        """
        read = self.read_tokens(arrays)
        packs = packed([len(index) for index in read], self._most_tokens())
        # Fetched at the end: the device computes one pack while the host prepares the next.
        vectors = [self._vectors(arrays.voxels[pack], read[pack]) for pack in packs]
        return self._stacked([part.cpu().numpy() for part in vectors])

    def _most_tokens(self) -> int:
        """Most tokens of volumes that are encoded together. On a CPU volumes are encoded one by one: launching
        operators costs nothing there, and a vector's bits do not depend on other volumes."""
        return 0 if self.runtime.device.type == "cpu" else MOST_PACKED // self.width

    def _vectors(self, voxels: np.ndarray, read: Sequence[np.ndarray]) -> Tensor:
        """float32 [B, vector_width] on the device, in one pass, of volumes that are read at flat grid indices [M]."""
        lengths = [len(index) for index in read]
        index_1M = self.runtime.tensor(np.concatenate(read)[None])
        tokens_1MD = self._encode(voxels, index_1M, lengths)
        every_1M = torch.ones(index_1M.shape, device=index_1M.device)
        volumes = zip(*(x.split(lengths, 1) for x in (tokens_1MD, every_1M, index_1M)), strict=True)
        return torch.cat([self._vector(*volume) for volume in volumes])

    def read_tokens(self, arrays: Arrays) -> list[np.ndarray]:
        """Per volume the flat grid indices, int64 [M], of the tokens that its vector is read from."""
        maps = self.token_maps(arrays)
        return [tissue_index(own, arrays.acquisition[place : place + 1]) for place, own in enumerate(maps)]

    def token_maps(self, arrays: Arrays) -> np.ndarray:
        """uint8 [B, d, h, w], the token maps of B volumes. Raises ConfigError for a band of another shape, such as one
        without the batch axis, whose axes would be misread."""
        if not isinstance(arrays, Arrays):
            raise TypeError(
                f"expected Arrays(voxels, band, valid), as Encoder.prepare and Store.read return them, got "
                f"{type(arrays).__name__}"
            )
        count, expected = len(arrays.voxels), shapes(self.preprocessing.image_size)
        for name in ("band", "valid"):
            if (got := getattr(arrays, name).shape) != (count, *(one := expected[name])):
                raise ConfigError(
                    f"expected {name} of {[count, *one]} for {count} volumes, got {list(got)}; the arrays of one "
                    f"volume need a first axis of length 1, {name}[None]"
                )
        return token_map(arrays.band, arrays.valid, self.preprocessing.image_size, self.config.model.patch_size)

    @torch_defaults()
    @torch.inference_mode()
    def vector_of(self, tokens: np.ndarray, counts: np.ndarray, index: np.ndarray) -> np.ndarray:
        """float32 [vector_width]: the pooled tokens [M, width] of one volume at flat grid indices [M]; `counts` bool
        [M] marks those to pool."""
        parts = (self.runtime.tensor(part[None]) for part in (tokens, counts, index))
        return self._vector(*parts)[0].cpu().numpy()

    def _vector(self, tokens_BMD: Tensor, counts_BM: Tensor, index_BM: Tensor) -> Tensor:
        return self.network.vector(tokens_BMD, counts_BM, index_BM, self.config.objective.pool).float()

    def tissue_tokens(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """The input of heads: tokens within training's budget, float32 [B, M, width], and which are tissue, bool [B,
        M]."""
        chosen, tissue = self.select(arrays)
        return self.some_tokens(arrays.voxels, chosen), tissue

    def select(self, arrays: Arrays) -> tuple[np.ndarray, np.ndarray]:
        """Select tokens for heads as training does, a fixed number per volume; vectors do not depend on this choice.

        Returns their flat grid indices, int64 [B, M], and which of them are tissue, bool [B, M]; all of them if a
        volume has no tissue.
        """
        maps = self.token_maps(arrays)
        kept, _, _ = self.config.masks.counts(maps.shape[1:])
        chosen, tissue = same_tokens(maps, kept, arrays.acquisition)
        # A volume without tissue would have no token to pool; then all of them count.
        return chosen, tissue | ~tissue.any(1, keepdims=True)

    @torch_defaults()
    @torch.inference_mode()
    def some_tokens(self, voxels: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        """float32 [B, M, width] of the tokens at flat grid indices [B, M]; the encoder sees no others."""
        return self._encode(voxels, self.runtime.tensor(chosen)).cpu().numpy()

    @torch_defaults()
    @torch.inference_mode()
    def encode_grid(self, voxels: np.ndarray) -> np.ndarray:
        """float32 [B, d, h, w, width]: the full token grid of prepared voxels uint8 [B, D, H, W]."""
        grid = self.network.grid
        everything = torch.arange(grid.size, device=self.runtime.device).expand(len(voxels), -1)
        return self._encode(voxels, everything).unflatten(1, grid.shape).cpu().numpy()

    def _encode(self, voxels: np.ndarray, index: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        with self.runtime.autocast():
            return self.network.forward_features(self.runtime.tensor(voxels), index, lengths).float()

    def prepare(self, volume: Volume) -> Arrays:
        """One acquisition in any native geometry as a batch of one prepared volume."""
        return Arrays.of(self.preprocess(volume))

    def preprocess(self, volume: Volume) -> Prepared:
        """One acquisition as the weights expect it, with the transform back to its native frame. Raises EvaluationError
        for a modality that the encoder was not trained on, and if this octfm prepares volumes differently."""
        expect_volume(volume)
        if self.preprocessing.fingerprint() != self.fingerprint:
            raise EvaluationError(
                f"{self.source}: trained on volumes that another octfm prepared differently; use that version (F15)"
            )
        if volume.modality not in (trained := self.config.data.modalities):
            raise EvaluationError(
                f"{volume.source}: its modality is {volume.modality}, and {self.source} was pretrained on "
                f"{' and '.join(trained)}; its vectors and maps would mean nothing"
            )
        return self.preprocessing(volume, band_finder(self.preprocessing, self.source))


def several(scans: Any, for_arrays: str) -> "Iterable[Scan]":
    """The scans, if they can be iterated over. Raises TypeError for anything else, which names `for_arrays`, the method
    that takes prepared voxels."""
    if not isinstance(scans, Iterable) or isinstance(scans, np.ndarray | Tensor | dict | bytes):
        raise TypeError(
            f"expected a path, a Volume, a volume of a store, a list of these or a Store, got {type(scans).__name__}; "
            f"voxels that are prepared go to {for_arrays}, as Arrays with their band"
        )
    return scans


def packed(counts: Sequence[int], most: int) -> list[slice]:
    """Slices of successive volumes with at most `most` tokens together; a volume with more is in a slice alone."""
    packs, tokens = [], 0
    for place, count in enumerate(counts):
        tokens += count
        if packs and tokens <= most:
            packs[-1] = slice(packs[-1].start, place + 1)
        else:
            packs.append(slice(place, place + 1))
            tokens = count
    return packs


@torch_defaults()
def load_encoder(
    run: str | Location | None = None,
    *,
    random_init: bool = False,
    draw: int = 0,
    device: str | torch.device | None = None,
    runtime: Runtime | None = None,
    objective: type[ObjectiveConfig] | None = None,
) -> Encoder:
    """Load the encoder of a run, a checkpoint file, an `octfm finetune` run or an export, on a disk or in a bucket, or
    by its name on the hub or among the packaged ones. Without `run`, the packaged encoder.

    `run`: "hf://owner/name" is fetched from the Hugging Face hub, "owner/name" is only looked up in the hub's cache.
    `random_init`: with the weights before the first update; a `draw` above 0 uses the run's seed + `draw` instead.
    `device`: auto, cpu, cuda or mps. `runtime`: device and precision, by default `device` and float32. `objective`:
    settings class of a custom objective, needed only with `random_init`, to draw exactly the weights that the run began
    with; without it, other weights of the same network are drawn. The low-rank updates of a fine-tuned encoder are
    merged into its weights.

    Raises CheckpointError if there is no such encoder or its file is damaged, ConfigError for hf:// without
    huggingface_hub, EvaluationError if the encoder that a fine-tuned head belongs to has changed.
    """
    runtime = runtime or alone("fp32", device)
    # Weights before the first update are the same in every checkpoint.
    path, content = opened(run, say if runtime.leads and not random_init else None)
    return encoder_in(path, content, runtime, random_init=random_init, draw=draw, objective=objective)


def encoder_in(
    path: Location,
    content: dict[str, Any],
    runtime: Runtime,
    *,
    random_init: bool = False,
    draw: int = 0,
    objective: type[ObjectiveConfig] | None = None,
) -> Encoder:
    """The encoder of what `opened` returned: whatever else is taken from the same content is of the same checkpoint,
    also while the run goes on."""
    is_tuned = "encoder_config" in content
    own = "encoder_config" if is_tuned else "settings" if "network" in content else "config"
    settings = stored_config(content[own], None if is_tuned else objective)
    preprocessing = Preprocessing.recorded(content["preprocessing"])
    source = display_name(path)
    if random_init:
        network = _untrained(settings, preprocessing, draw)
        source += f"{AT_RANDOM}{f', draw {draw + 1}' if draw else ''}"
    elif not is_tuned:
        network = empty_network(settings, preprocessing)
        fill(network, frozen_weights(content, settings), path)
    elif (best := content["state"]["best"]) is None:
        raise CheckpointError(f"{path}: fine-tuning has no validated weights yet; continue it first")
    elif not content["config"]["lr_encoder"]:
        return _under_head(path, content, preprocessing.takes_bscans, runtime)
    else:
        network = empty_network(settings, preprocessing)
        fill(network, merged(part_of(best["model"], "encoder.")), path)
    return assemble(network, settings, preprocessing, source, content["fingerprint"], runtime)


def _under_head(path: Location, content: dict[str, Any], takes_bscans: bool, runtime: Runtime) -> Encoder:
    """The frozen encoder of a fine-tuned head, which is not in its checkpoint: the one that this names."""
    named = content["config"]["encoder"]
    base = load_encoder(named, random_init=content["config"]["from_scratch"], runtime=runtime)
    base = as_trained_on(base.of_bscans() if takes_bscans else base, content, f"{path}: {named}", "head")
    return replace(base, source=f"{path} on {base.source}")


def _untrained(settings: PretrainConfig, preprocessing: Preprocessing, draw: int) -> VisionTransformer3D:
    """The frozen encoder of a run before its first update, or as its seed + `draw` would have drawn it.

    An objective of one's own may draw other networks first. Without its code, the encoder is drawn alone: the same
    architecture, and as untrained.
    """
    other = settings.model_copy(update={"seed": settings.seed + draw})
    if not isinstance(settings.objective, UnknownObjective):
        return build_objective(other, preprocessing).frozen_encoder(settings.objective.frozen)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(other.seed)
        return VisionTransformer3D(settings.model, grid_of(preprocessing, settings.model.patch_size))


def _prepared_otherwise(what: str, encoder: str, differing: str = "") -> str:
    return (
        f"{what}: prepared with other settings than {encoder} was trained on{f' ({differing})' * bool(differing)}; "
        "prepare the volumes again with its own "
        f"Preprocessing (octfm prepare CATALOG --like {shlex.quote(encoder.partition(AT_RANDOM)[0])}) (F15)"
    )


def assemble(
    network: VisionTransformer3D,
    config: PretrainConfig,
    preprocessing: Preprocessing,
    source: str,
    fingerprint: str,
    runtime: Runtime,
) -> Encoder:
    """An Encoder on the device of `runtime`, in evaluation mode. Its weights can be trained."""
    network = network.to(runtime.device).eval().requires_grad_(True)
    return Encoder(network, config, preprocessing, runtime, source, fingerprint)


def empty_network(config: PretrainConfig, preprocessing: Preprocessing) -> VisionTransformer3D:
    """An encoder without memory for its weights (on the meta device); `fill` loads them."""
    with torch.device("meta"):
        return VisionTransformer3D(config.model, grid_of(preprocessing, config.model.patch_size))


def fill(module: nn.Module, tensors: dict[str, Tensor], where: str | Location) -> None:
    """Load tensors, without a copy, as the module's weights. Raises CheckpointError that names what does not fit."""
    try:
        # Assigned, because nothing can be copied into tensors of the meta device.
        module.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        what = reason_of(error, 200)
        raise CheckpointError(
            f"{where}: the weights do not fit the model in its settings ({what}); fetch or export it again"
        ) from None


def preprocessing_of(run: str | Location) -> dict[str, Any]:
    """Settings of the Preprocessing that a run, a checkpoint or an export expects."""
    return Preprocessing.recorded(opened(run)[1]["preprocessing"]).model_dump(mode="json")


def participants_in(path: Location, content: Mapping[str, Any]) -> dict[str, Any]:
    """The participants of what `opened` returned. Embedding needs neither an export's list of them nor its keys.

    `hashes`: keyed hashes of the participants that it was trained on or chosen by; `key`: their key, None if it is kept
    elsewhere or if there are no hashes, as after training on streamed phantoms; `before`: the same of the runs with
    whose weights it began, if there are any.
    """
    return exported.read_seen(path) if "network" in content else content["participants"]


def beginning_of(run: str | Location, encoder: Encoder) -> str | None:
    """Identifies what an encoder that is fine-tuned began as: its run, which may go on training meanwhile, or the
    weights of an export, whatever is known of its participants. None for checkpoints of version 1."""
    path, content = opened(run)
    return encoder.digest if "network" in content else participants_in(path, content).get("key")


class UnknownParticipants(EvaluationError):
    """The key that participants of a model are recognised by is kept elsewhere."""


def seen_by(run: str | Location) -> Callable[[str], bool]:
    """A function that tells whether the run's newest checkpoint was trained on a participant or chosen by one, whatever
    the spelling of the id. Raises UnknownParticipants if nobody can tell."""
    path, content = opened(run)
    participants = participants_in(path, content)
    if not checkpoint.keys_are_known(participants):
        if participants["key"] is None:
            why = "published without the key of its participants' hashes, so nobody can tell whom it was trained on"
            remedy = f"put the key back as {exported.KEY} next to its {exported.CONFIG}"
        else:
            why = "it began with weights that were published without the key of their participants' hashes, so nobody "
            why += "can tell whom those were trained on"
            remedy = f"write that key in the place of - into {exported.KEY} of its export"
            remedy += "" if "network" in content else " (octfm export), and evaluate that"
        raise UnknownParticipants(
            f"{run}: {why}; {remedy}, or pass --allow-seen to get results that say so",
            public="Nobody can tell whom one of the encoders was trained on: weights were published without the key of "
            "their participants.",
        )
    return checkpoint.recogniser(participants)


def seen_if_known(*runs: str | Location, allow_seen: bool) -> Callable[[str], bool] | None:
    """Whether any of the runs has seen a participant, as `seen_by`; with `allow_seen`, None where nobody can tell."""
    known = []
    for run in runs:
        try:
            known.append(seen_by(run))
        except UnknownParticipants:
            if not allow_seen:
                raise
            return None
    return lambda participant: any(is_seen(participant) for is_seen in known)


def opened(run: str | Location | None, echo: Echo | None = None) -> tuple[Location, dict[str, Any]]:
    """The newest checkpoint of a run, a checkpoint file or an export, and its verified content. `echo`: see
    `load_newest`."""
    return read_content(find(run), echo)


def as_trained_on(encoder: Encoder, content: dict[str, Any], what: str, part: str) -> Encoder:
    """The encoder, if a head or decoder was trained on its weights. Raises EvaluationError if not: a checkpoint names
    only the path of its encoder, where a later checkpoint may be by now."""
    other = "another Preprocessing" if encoder.fingerprint != content["fingerprint"] else ""
    # Checkpoints of earlier versions record no digest.
    if not other and content.get("frozen_encoder", encoder.digest) != encoder.digest:
        other = "other weights"
    if other:
        raise EvaluationError(
            f"{what} has {other} than this {part} was trained on (F15); put the encoder back that it was trained on"
        )
    return encoder
