"""Layer surfaces and lesion masks from tokens: trained on labelled volumes, found in any, in its native frame."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from octfm.config import load
from octfm.encoder.encoder import Encoder, as_trained_on, load_encoder
from octfm.errors import ConfigError, EvaluationError
from octfm.formats import within
from octfm.formats.arrays.npy import named_arrays
from octfm.io.isolation import Limits
from octfm.io.location import Location
from octfm.layers.corrections import Corrections, read_corrections
from octfm.layers.finder import PATH_PENALTY, STEEPEST
from octfm.models.dense import DenseDecoder, mask_loss, surface_loss, surface_rows
from octfm.models.layer_net import MASKS, SURFACES
from octfm.models.vit3d import normalise, take_patches
from octfm.phantom.native.outer_retina import DETACHMENT
from octfm.phantom.pathology import LESIONS
from octfm.pretraining.resume import part_of
from octfm.run import checkpoint
from octfm.run.bucket import local_run
from octfm.run.runtime import Runtime, start, torch_defaults
from octfm.store.layout import Arrays, StoreRow
from octfm.store.selection import to_evaluate
from octfm.store.store import Store
from octfm.tasks.segment_settings import SegmentConfig
from octfm.volume.segmentation import Segmentation
from octfm.volume.surface import best_path
from octfm.volume.transform import Transform
from octfm.volume.volume import Volume

Tokens = Literal["encoder", "voxels"]
"""Input of the decoder: the encoder's tokens, or the voxels of each patch (the intensity baseline)."""
VALUES_OF_AREAS = np.array([0, *(LESIONS.get(name, DETACHMENT) for name in MASKS)], np.uint8)
"""Values of `lesions` in a truth file, of 0 and the areas of the packaged network."""


@dataclass(frozen=True, eq=False)
class Labelled:
    """Ground truth of one prepared volume."""

    rows: np.ndarray
    """float32 [S, D, W] in prepared rows; NaN where unknown or outside the scan."""
    mask: np.ndarray | None
    """bool [D, H, W]"""


class Segmenter:
    """An encoder (or the bare voxels) with a dense decoder."""

    def __init__(self, config: SegmentConfig, encoder: Encoder, tokens: Tokens = "encoder"):
        self.config, self.encoder, self.tokens = config, encoder, tokens
        # Every source begins with the same decoder weights.
        patch = encoder.config.model.patch_size
        width = math.prod(patch) if tokens == "voxels" else encoder.width
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)
            self.decoder = DenseDecoder(width, config.channels, patch, config.decoder, bool(config.mask_values))
        self.decoder.to(self.runtime.device)
        learns = bool(config.lr_encoder) and tokens == "encoder"
        if tokens == "encoder":  # the baseline of bare voxels shares its encoder with one that may be learning
            encoder.network.requires_grad_(learns)
        groups = [{"params": list(self.decoder.parameters()), "lr": config.lr}]
        if learns:
            groups.append({"params": list(encoder.network.parameters()), "lr": config.lr_encoder})
        self.learns = learns
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.05)

    @property
    def runtime(self) -> Runtime:
        return self.encoder.runtime

    def grid(self, voxels: np.ndarray) -> Tensor:
        """Tokens [B, d, h, w, F] of prepared voxels uint8 [B, D, H, W]: the full grid."""
        grid, pre = self.encoder.network.grid, self.encoder.preprocessing
        index = torch.arange(grid.size, device=self.runtime.device).expand(len(voxels), -1)
        patches = take_patches(self.runtime.tensor(voxels).unsqueeze(1), index, self.encoder.config.model.patch_size)
        patches = normalise(patches, pre.intensity_mean, pre.intensity_std)
        if self.tokens == "encoder":
            with self.runtime.autocast():
                patches = self.encoder.network(patches, index).float()
        return patches.unflatten(1, grid.shape)

    def train(self, volumes: Callable[[int], np.ndarray], truth: Sequence[Labelled]) -> list[float]:
        """Fit to labelled volumes (`volumes(i)` gives uint8 [D, H, W]); the loss of every step."""
        fit = Fit(self, volumes, truth)
        fit.begin()
        return [fit.update(step) for step in range(self.config.steps)]

    def loss(self, logits: Tensor, truth: Sequence[Labelled]) -> Tensor:
        """[]: loss of surfaces plus loss of masks, of logits [B, channels, D, H, W] and the truth of each volume."""
        count = len(self.config.surfaces)
        loss = logits.new_zeros(())
        if count:
            rows = self.runtime.tensor(np.stack([t.rows for t in truth]).astype(np.float32))
            loss = surface_loss(logits[:, :count], rows)
        if self.config.mask_values:
            masks = np.stack([t.mask for t in truth if t.mask is not None])[:, None].astype(np.float32)
            loss = loss + mask_loss(logits[:, count:], self.runtime.tensor(masks))
        return loss

    @torch.no_grad()
    def predict(self, voxels: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Rows [S, D, W] and mask [D, H, W] (or None) of one prepared volume uint8 [D, H, W]."""
        logits = self.decoder(self.grid(voxels[None]))
        count = len(self.config.surfaces)
        rows = np.zeros((0, *voxels.shape[::2]), np.float32)
        if count:
            _, dy, dx = self.encoder.preprocessing.target_spacing
            # The best path per B-scan: a surface is continuous, so neighbours decide between layers that look alike.
            score = logits[0, :count].log_softmax(2).transpose(2, 3).cpu().numpy()
            path = np.stack([best_path(s, max(1, math.ceil(STEEPEST * dx / dy)), PATH_PENALTY) for s in score])
            rows = surface_rows(logits[:, :count], self.runtime.tensor(path[None]))[0].cpu().numpy()
        return rows, (logits[0, count] > 0).cpu().numpy() if self.config.mask_values else None

    def in_prepared(self, arrays: Arrays) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Surfaces, rows [D, W] with NaN for padding, and masks bool [D, H, W] of one prepared volume, in its frame."""
        rows, mask = self.predict(arrays.voxels[0])
        rows[:, arrays.valid[0, 1] <= arrays.valid[0, 0]] = np.nan
        return dict(zip(self.config.surfaces, rows, strict=True)), {} if mask is None else {self.config.mask_name: mask}

    def in_native(self, arrays: Arrays, transform: Transform) -> Segmentation:
        """Surfaces and masks of one prepared volume, in its native frame."""
        rows, found = self.in_prepared(arrays)
        surfaces = {name: transform.rows_to_native(row) for name, row in rows.items()}
        masks = {name: transform.to_native(mask.astype(np.uint8)).astype(bool) for name, mask in found.items()}
        return Segmentation(surfaces, masks, transform.native_spacing_mm)

    def segment(self, volume: Volume) -> Segmentation:
        """Surfaces and masks of any volume, in its native frame."""
        prepared = self.encoder.preprocess(volume)
        return self.in_native(Arrays.of(prepared), prepared.transform)

    def weights(self) -> dict[str, Tensor]:
        """Weights of the decoder, and of the encoder if it has learned."""
        found = {f"decoder.{name}": tensor for name, tensor in self.decoder.state_dict().items()}
        if self.learns:
            found |= {f"encoder.{name}": tensor for name, tensor in self.encoder.network.state_dict().items()}
        return found

    def load_weights(self, tensors: dict[str, Tensor]) -> None:
        """Load what `weights` returned."""
        for part, module in (("decoder", self.decoder), ("encoder", self.encoder.network)):
            if own := part_of(tensors, f"{part}."):
                module.load_state_dict(own)


class Fit:
    """Fits a segmenter to labelled volumes; what a step draws is a function of the seed and the step."""

    def __init__(self, segmenter: Segmenter, volumes: Callable[[int], np.ndarray], truth: Sequence[Labelled]):
        """`volumes(i)` gives the uint8 [D, H, W] that belong to `truth[i]`."""
        self.segmenter, self.volumes, self.truth = segmenter, volumes, truth
        config, encoder = segmenter.config, segmenter.encoder
        tokens = math.prod(encoder.preprocessing.image_size) / math.prod(encoder.config.model.patch_size)
        size_gb = len(truth) * tokens * segmenter.decoder.mean.numel() * 2 / 1e9
        self._keeps = not segmenter.learns and size_gb <= config.max_cache_gb
        self._kept: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Standardise tokens by those of the first volumes."""
        with torch.no_grad():
            some = [self._tokens(i).flatten(0, 2) for i in range(min(8, len(self.truth)))]
            self.segmenter.decoder.standardise_by(torch.cat(some))

    def forget(self) -> None:
        """Free the kept tokens."""
        self._kept.clear()

    def _tokens(self, i: int) -> Tensor:
        if i not in self._kept:
            # `begin` asks without gradients, even if the encoder learns.
            with torch.set_grad_enabled(self.segmenter.learns and torch.is_grad_enabled()):
                found = self.segmenter.grid(self.volumes(i)[None])[0]
            if not self._keeps:
                return found
            self._kept[i] = found.half()
        # Rounded on the first use as on any other: a resumed run, which keeps none yet, gets the same numbers.
        return self._kept[i].float()

    def update(self, step: int) -> float:
        """One update; its loss. Raises EvaluationError before the update if loss or gradient is not finite."""
        segmenter, config = self.segmenter, self.segmenter.config
        chosen = np.random.default_rng((config.seed, step)).permutation(len(self.truth))[: config.batch_size]
        logits = segmenter.decoder(torch.stack([self._tokens(int(i)) for i in chosen]))
        loss = segmenter.loss(logits, [self.truth[i] for i in chosen])
        # A cosine to 0 after a warm-up of 5 % of the steps.
        cosine = 0.5 * (1 + math.cos(math.pi * step / config.steps))
        warmup = min(1.0, (step + 1) / (0.05 * config.steps + 1))
        for group, peak in zip(segmenter.optimizer.param_groups, (config.lr, config.lr_encoder), strict=False):
            group["lr"] = peak * cosine * warmup
        segmenter.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        slopes = [p.grad for group in segmenter.optimizer.param_groups for p in group["params"] if p.grad is not None]
        grad_norm = float(torch.nn.utils.get_total_norm(slopes))
        # Before the update: afterwards the weights would be lost, in the only checkpoint as well.
        if not (math.isfinite(value := float(loss.detach())) and math.isfinite(grad_norm)):
            raise EvaluationError(
                f"segmentation: the loss is {value} and the gradient norm {grad_norm} at step {step + 1}; "
                "lower lr and lr_encoder"
            )
        segmenter.optimizer.step()
        return value


@torch_defaults()
def load_segmenter(out: str | Location, device: str | torch.device | None = None) -> Segmenter:
    """Load the segmenter that `octfm segment` trained into this folder, or into this address in a bucket."""
    content = checkpoint.load(checkpoint.newest(local_run(out)))
    if "decoder" not in content["config"]:
        raise EvaluationError(f"{out}: expected a run of octfm segment, got one of pretraining or fine-tuning")
    config = load(SegmentConfig, content["config"])
    if content["step"] < config.steps:
        raise EvaluationError(
            f"{out}: the segmentation has made {content['step']} of {config.steps} updates; run its command again to "
            "finish it"
        )
    encoder = as_trained_on(open_encoder(config, device), content, f"{out}: {config.encoder}", "decoder")
    segmenter = Segmenter(config, encoder, content["state"]["tokens"])
    segmenter.load_weights(content["model"])
    return segmenter


def open_encoder(
    config: SegmentConfig, device: str | torch.device | None = None, *, random_init: bool = False
) -> Encoder:
    """The encoder that the settings name, computing in their precision. Raises ConfigError if they name none."""
    if config.encoder is None:
        raise ConfigError("encoder: name a pretraining run or checkpoint, encoder=runs/a")
    return replace(
        load_encoder(config.encoder, random_init=random_init, device=device), runtime=start(config.precision, device)
    )


def truth_file(config: SegmentConfig, row: StoreRow) -> Path:
    """The file with the ground truth of one acquisition: <acquisition>.npz, else corrections made in the viewer on the
    same voxels. Raises EvaluationError if there is none."""
    if config.truth is None:
        raise ConfigError("truth: name a folder with <acquisition>.npz, truth=clinic/ground_truth")
    folder = Path(config.truth)
    if not folder.is_dir():
        raise ConfigError(f"truth: {folder}: no such folder; expected one with <acquisition>.npz or corrections")
    path = folder / f"{row.acquisition}.npz"
    if path.is_file():
        return path
    stats = {each: each.stat() for each in sorted(folder.glob("*.json"))}
    by_hand = _corrections(tuple((each, stat.st_mtime_ns, stat.st_size) for each, stat in stats.items()))
    if row.pixels and row.pixels in by_hand:
        return Path(by_hand[row.pixels])
    raise EvaluationError(
        f"{path}: no truth for this acquisition, nor corrections of its voxels in a .json file there; every volume to "
        "train or test on needs one; leave the others out with exclude=FILE"
    )


@functools.lru_cache(1)
def _corrections(files: tuple[tuple[Path, int, int], ...]) -> dict[str, str]:
    """Fingerprint of a scan → file, for the corrections files of a folder in the state that their times and sizes
    identify."""
    found: dict[str, str] = {}
    for path, _, _ in files:
        scan = read_corrections(path).scan
        if (other := found.setdefault(scan, str(path))) != str(path):
            raise EvaluationError(f"{path}: corrects the same scan as {other}; keep the one that counts")
    return found


def read_truth(config: SegmentConfig, row: StoreRow) -> dict[str, Any]:
    """Ground truth of one acquisition in its native frame: `rows` float [S, D, W] and `mask` bool [D, H, W] or None.

    Raises EvaluationError without a file, and for one that lacks a surface or has arrays of another shape."""
    path = truth_file(config, row)
    if path.suffix == ".json":
        return _by_hand(config, read_corrections(path), transform_of(row).native_shape)
    file = within(Limits(), named_arrays, str(path))
    # Names may be bytes, as in files of HDF5 origin.
    names = file["surface_names"].astype(str).tolist() if "surface_names" in file else []
    if absent := [name for name in config.surfaces if name not in names]:
        held = f"surfaces: {', '.join(names)}" if names else "it holds none; surfaces=[] learns a mask alone"
        raise EvaluationError(f"{path}: no surface called {', '.join(absent)}; {held}")
    shape = transform_of(row).native_shape
    wanted = (
        ("surfaces", config.surfaces, (len(names), *shape[::2]), "[surface, B-scan, A-scan]"),
        ("lesions", config.mask_values, shape, "[B-scan, row, A-scan]"),
    )
    for name, needed, expected, axes in wanted:
        if needed and name not in file:
            raise EvaluationError(f"{path}: expected an array {name}, found {', '.join(file) or 'none'}")
        if needed and file[name].shape != expected:
            raise EvaluationError(
                f"{path}: expected {name} of shape {expected}, {axes} of the scan as acquired, got {file[name].shape}"
            )
    rows = (
        file["surfaces"][[names.index(name) for name in config.surfaces]].astype(np.float64)
        if config.surfaces
        else np.zeros((0, 1, 1))
    )
    mask = np.isin(file["lesions"], config.mask_values) if config.mask_values else None
    return {"rows": rows, "mask": mask}


def _by_hand(config: SegmentConfig, corrections: Corrections, shape: Sequence[int]) -> dict[str, Any]:
    """Corrections as ground truth: corrected or checked lines, NaN elsewhere, and the mask. Raises EvaluationError if a
    mask is wanted and some B-scan has none."""
    source = corrections.source
    if tuple(shape) != corrections.shape:
        raise EvaluationError(f"{source}: corrects a scan of {corrections.shape}, the store's has {tuple(shape)}")
    depth, height, width = corrections.shape
    if absent := [name for name in config.surfaces if name not in SURFACES]:
        raise EvaluationError(f"{source}: no surface called {', '.join(absent)}; surfaces: {', '.join(SURFACES)}")
    rows = np.full((len(config.surfaces), depth, width), np.nan)
    for surface, name in zip(rows, config.surfaces, strict=True):
        for bscan, line in corrections.surfaces.get(name, {}).items():
            surface[bscan] = line
    if not config.mask_values:
        return {"rows": rows, "mask": None}
    if len(corrections.areas) < depth:
        raise EvaluationError(
            f"{source}: {len(corrections.areas)} of {depth} B-scans have areas that somebody corrected or checked; a "
            "mask can be learned only from all of them: check the others in the viewer, or leave out mask_values"
        )
    mask = np.zeros((depth, height, width), bool)
    for bscan in range(depth):
        mask[bscan] = np.isin(VALUES_OF_AREAS[corrections.labels(bscan)], config.mask_values)
    return {"rows": rows, "mask": mask}


def to_prepared(truth: dict[str, Any], transform: Transform) -> Labelled:
    """Transform ground truth from the native to the prepared frame."""
    rows = [transform.rows_to_prepared(surface) for surface in truth["rows"]]
    shape = (0, transform.shape[0], transform.shape[2])
    mask = None if truth["mask"] is None else transform.to_prepared(truth["mask"].astype(np.uint8)).astype(bool)
    return Labelled(np.stack(rows).astype(np.float32) if rows else np.zeros(shape, np.float32), mask)


def transform_of(row: StoreRow) -> Transform:
    """The transform between native and prepared frame of one row of a store."""
    return Transform.from_dict(row.transform)


def open_store(config: SegmentConfig, encoder: Encoder) -> Store:
    """The store that the settings name. Raises EvaluationError if the encoder expects another Preprocessing."""
    if config.store is None:
        raise ConfigError("store: name a prepared store, store=prepared/")
    store = to_evaluate(Store.open(config.store), config.exclude, encoder.config.data.modalities)
    if store.image_size[0] == 1:
        raise EvaluationError(
            f"{store.path}: a store of single B-scans; segmenters are trained on volumes, and the packaged network "
            "segments B-scans: octfm segment FOLDER --layouts line"
        )
    encoder.require_prepared(store)
    return store
