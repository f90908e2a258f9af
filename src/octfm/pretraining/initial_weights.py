"""Initial weights (model.init): the packaged encoder, an encoder of one's own, or a local V-JEPA 2 checkpoint.

The packaged encoder is named `packaged`; a run records it as NAME@HASH. Others are named by their place, and run.json
keeps their hash: a run never goes on from other weights than it began with.

Layout of a V-JEPA 2 checkpoint (facebookresearch/vjepa2), pretrained on natural video: a `.pt` with `target_encoder`
(or `encoder`, or the tensors themselves), names after an optional prefix `module.` and `backbone.`:

    patch_embed.proj.weight        [D, C, t, p, p]   Conv3d with stride = kernel; .bias [D]
    blocks.<i>.norm1 | norm2       LayerNorm
    blocks.<i>.attn.qkv, .proj     Linear
    blocks.<i>.mlp.fc1, .fc2       Linear
    norm                           LayerNorm

No code of the file is ever run. What cannot be carried over: wavelengths of the rotary positions (ours are in mm), the
epsilon of layer norms (1e-6 there, 1e-5 here), the colour normalisation of natural video.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from octfm.errors import CheckpointError
from octfm.io.location import BucketPath, location
from octfm.models.objectives.objective import Objective
from octfm.models.vit3d import ViTConfig
from octfm.pretraining.resume import frozen_weights, part_of, read_content
from octfm.pretraining.settings import PretrainConfig, stored_config
from octfm.run import checkpoint
from octfm.run.weights_file import read_weights
from octfm.weights.exported import checksum, is_export, read_export, read_seen
from octfm.weights.packaged import CURRENT_ENCODER, packaged_encoder

PACKAGED = "packaged"
NAMED = re.compile(r"([\w.-]+)@([0-9a-f]{12})")
"""Name and hash of a packaged encoder, as runs record it."""
MUST_AGREE = ("patch_size", "width", "heads", "mlp_ratio", "positions")
CONTAINERS = ("target_encoder", "encoder")
PREFIX = re.compile(r"^(module\.)?(backbone\.)?")
RENAMED = {
    ".attn.proj.": ".attn.out.",
    ".mlp.fc1.": ".mlp.0.",
    ".mlp.fc2.": ".mlp.2.",
    "patch_embed.proj.": "patch_embed.",
}


def with_hash(config: PretrainConfig) -> PretrainConfig:
    """The same settings with `model.init=packaged` as NAME@HASH. Raises CheckpointError if there is none."""
    if config.model.init != PACKAGED:
        return config
    digest = read_export(packaged_encoder())["sha256"]
    model = config.model.model_copy(update={"init": f"{CURRENT_ENCODER}@{digest[:12]}"})
    return config.model_copy(update={"model": model})


@dataclass(frozen=True)
class Initial:
    """What model.init names."""

    named: str
    """For messages: the word of the setting or, of a run, the checkpoint."""
    encoder: dict[str, Tensor]
    """By our names, in the shapes of the encoder that will be trained."""
    rest: dict[str, Tensor] = field(default_factory=dict)
    """All tensors of a run with the same objective, by the names of the objective's networks."""
    before: tuple[dict[str, Any], ...] = ()
    """Of each run behind these weights that was trained on people: `key` (None if it is kept elsewhere) and `hashes` of
    its participants and, except of an export, which does not record them, the scanners that it chose and left out
    (data.scanners, data.leave_out_scanners)."""
    preprocessing: Mapping[str, Any] | None = None
    """How the volumes behind these weights were prepared; None for V-JEPA 2."""

    @property
    def digest(self) -> str:
        """SHA-256 of all tensors that a run may begin with."""
        return checksum({f"encoder.{name}": tensor for name, tensor in self.encoder.items()} | self.rest)


@torch.no_grad()
def begin_with(initial: Initial, model: Objective) -> list[str]:
    """Load initial weights into the networks of an objective, in place; returns the names of those that they fill, the
    encoder first. The other networks stay as they are.

    Blocks beyond those of the weights begin as the identity (arXiv:1511.05641); a summary query that they lack keeps
    its random weights. Raises CheckpointError naming the first tensor that does not fit."""
    state = dict(initial.encoder)
    blocks = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    own = model.encoder.state_dict()
    for name, tensor in own.items():
        if name.startswith("blocks.") and int(name.split(".")[1]) >= blocks:
            # What a block adds to its input is the answer of these two layers.
            state[name] = torch.zeros_like(tensor) if ".attn.out." in name or ".mlp.2." in name else tensor
        elif is_query(name):
            state.setdefault(name, tensor)
        if name not in state or state[name].shape != tensor.shape:
            got = list(state[name].shape) if name in state else "none"
            raise CheckpointError(
                f"model.init={initial.named}: {name}: expected {list(tensor.shape)}, got {got}"
                + (": learned positions belong to one grid; use a store of that grid" if name == "position" else "")
            )
    for encoder in (model.encoder, model.target_encoder):
        if encoder is not None:
            encoder.load_state_dict({name: state[name] for name in own})
    filled = ["encoder"]
    for name, network in model.named_children():
        theirs, ours = part_of(initial.rest, f"{name}."), network.state_dict()
        fits = theirs.keys() == ours.keys() and all(theirs[key].shape == ours[key].shape for key in ours)
        if fits and theirs and network not in (model.encoder, model.target_encoder):
            network.load_state_dict(theirs)
            filled.append(name)
    return filled


def is_query(name: str) -> bool:
    """Whether a tensor belongs to the queries of an encoder (model.summary)."""
    return name.startswith("summary.")


def read_initial(init: str, config: PretrainConfig) -> Initial:
    """The weights that model.init names, for networks of these settings. Raises CheckpointError, naming what there is
    not, is damaged or has another size."""
    where = location(init)
    if init == PACKAGED or (NAMED.fullmatch(init) and isinstance(where, Path) and not where.exists()):
        return _packaged(init, config.model)
    if isinstance(where, BucketPath) or where.is_dir() or checkpoint.header(where) is not None:
        return _own(init, config)
    if is_export(where.parent):
        raise CheckpointError(f"model.init={init}: one file of an export; name its folder, {where.parent}")
    expected = "a run, a checkpoint, an export, a .pt of facebookresearch/vjepa2, or the word packaged, for model.init"
    found = read_weights(where, CONTAINERS, expected)
    if config.model.positions != "rotary":
        raise CheckpointError(
            f"{where}: V-JEPA 2 has rotary positions, model.positions is {config.model.positions}; use "
            "model.positions=rotary"
        )
    tensors = {PREFIX.sub("", name): tensor for name, tensor in found.items()}
    return Initial(init, translate(tensors, config.model, str(where)))


def _packaged(init: str, config: ViTConfig) -> Initial:
    named = NAMED.fullmatch(init)
    name = named[1] if named else CURRENT_ENCODER
    content = read_export(packaged_encoder(name))
    if named and not content["sha256"].startswith(named[2]):
        raise CheckpointError(
            f"model.init={init}: the {name} of this octfm has other weights ({content['sha256'][:12]}); use the octfm "
            f"that the run began with, or begin a new run with model.init={PACKAGED}"
        )
    _require_sizes(stored_config(content["settings"]).model, config, init, name)
    return Initial(init, content["network"], preprocessing=content["preprocessing"])


def _own(init: str, config: PretrainConfig) -> Initial:
    """Of a run, a checkpoint or an export."""
    where = location(init)
    path, content = read_content(where)
    if isinstance(where, BucketPath) and path != where:  # not the copy on this disk
        path = where / "checkpoints" / path.name
    if "encoder_config" in content:
        raise CheckpointError(
            f"model.init={init}: a run of octfm finetune; export it (octfm export) and name the export, or name its "
            "pretraining run"
        )
    exported = "network" in content
    settings = stored_config(content["settings" if exported else "config"])
    _require_sizes(settings.model, config.model, init, str(path))
    seen = read_seen(path) if exported else content["participants"]
    own = checkpoint.hashes_of(seen)
    if not exported:
        own |= {key: list(getattr(settings.data, key)) for key in ("scanners", "leave_out_scanners")}
    return Initial(
        str(path),
        frozen_weights(content, settings),
        rest=content["model"] if not exported and settings.objective.name == config.objective.name else {},
        before=tuple(part for part in (*seen.get("before", ()), own) if part["hashes"]),
        preprocessing=content["preprocessing"],
    )


def _require_sizes(theirs: ViTConfig, config: ViTConfig, init: str, name: str) -> None:
    differ = [key for key in MUST_AGREE if getattr(theirs, key) != getattr(config, key)]
    differ += ["depth"] if theirs.depth > config.depth else []
    differ += ["summary"] if config.summary and theirs.summary and theirs.summary != config.summary else []
    if differ:
        wanted = " ".join(f"model.{key}={_written(getattr(theirs, key))}" for key in differ)
        raise CheckpointError(f"model.init={init}: {name} has other sizes than model; set {wanted}")


def _written(value: object) -> str:
    """As in KEY=VALUE of a command line."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def translate(tensors: dict[str, Tensor], config: ViTConfig, source: str) -> dict[str, Tensor]:
    """V-JEPA 2's tensors under our names, in our shapes."""
    width = config.width
    expected = {
        "patch_embed.proj.weight": None,
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    sizes = f"found {_size(tensors)}, the config asks for model.width={config.width} and model.depth={config.depth}"
    hidden = int(config.mlp_ratio * config.width)
    parts = {
        "norm1": (width,), "norm2": (width,), "attn.qkv": (3 * width, width), "attn.proj": (width, width),
        "mlp.fc1": (hidden, width), "mlp.fc2": (width, hidden),
    }  # fmt: skip
    for i in range(config.depth):
        for part, shape in parts.items():
            expected |= {f"blocks.{i}.{part}.weight": shape, f"blocks.{i}.{part}.bias": shape[:1]}
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"{source}: {name} is missing; {sizes}")
        if shape is not None and tuple(tensors[name].shape) != shape:
            raise CheckpointError(f"{source}: {name}: expected {list(shape)}, got {list(tensors[name].shape)}; {sizes}")
    if extra := {name for name in tensors if name.startswith("blocks.") and name not in expected}:
        raise CheckpointError(f"{source}: {min(extra)} has no place; {sizes}")

    state = {}
    for name in expected:
        tensor = tensors[name].float()
        if name == "patch_embed.proj.weight":
            tensor = _patch_kernel(tensor, config, source)
        elif ".attn.qkv." in name:
            tensor = _pair_channels(tensor, config)
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        state[name] = tensor
    return state


def _patch_kernel(kernel_DCTHW: Tensor, config: ViTConfig, source: str) -> Tensor:
    """[D, P]: kernels summed over colours and resampled to our patch; the response to a constant patch stays."""
    if kernel_DCTHW.ndim != 5 or len(kernel_DCTHW) != config.width:
        raise CheckpointError(
            f"{source}: patch_embed.proj.weight: expected [{config.width}, C, t, h, w], got {list(kernel_DCTHW.shape)}"
        )
    grey_D1THW = kernel_DCTHW.sum(1, keepdim=True)
    resampled = F.interpolate(grey_D1THW, size=config.patch_size, mode="trilinear")
    before, after = (k.flatten(1).shape[1] for k in (grey_D1THW, resampled))
    return resampled.flatten(1) * (before / after)


def _pair_channels(rows: Tensor, config: ViTConfig) -> Tensor:
    """Query and key channels moved so that V-JEPA 2's pairs (2j, 2j + 1) of an axis become ours, (j, j + K / 2)."""
    width = config.width // config.heads
    pairs = width // 2
    third = pairs // 3
    # In V-JEPA 2 each axis takes a third of the pairs, and those left over are not rotated; here the first takes them.
    order = [*range(third), *range(3 * third, pairs), *range(third, 3 * third)]
    channels = torch.tensor([2 * pair for pair in order] + [2 * pair + 1 for pair in order])
    parts = rows.unflatten(0, (3, config.heads, width)).clone()
    # Query and key; values are not rotated, so their channels need no pairing.
    parts[:2] = parts[:2, :, channels]
    return parts.flatten(0, 2)


def _size(tensors: dict[str, Tensor]) -> str:
    depth = 1 + max((int(name.split(".")[1]) for name in tensors if re.match(r"blocks\.\d+\.", name)), default=-1)
    width = len(tensors["norm.weight"]) if "norm.weight" in tensors else "unknown"
    return f"width {width} and depth {depth}"
