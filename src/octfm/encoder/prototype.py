"""Encoders of the prototype that octfm replaced (F19), for comparison. Reads weights only; no code in the file is run.

Layout (names after an optional prefix `module.`, then `encoder.`, `context_encoder.` or `student.`):

    patch_embed[.proj].weight      [D, 1, 4, 16, 16]   Conv3d with stride = kernel; .bias [D]
    pos_embed                      [1, N, D] or [N, D] learned positions in the order (B-scan, axial, lateral)
    blocks.<i>.norm1 | norm2       LayerNorm
    blocks.<i>.attn.qkv, .proj     Linear, or .in_proj_weight, .in_proj_bias, .out_proj as in nn.MultiheadAttention
    blocks.<i>.mlp.fc1, .fc2       Linear; also .mlp.0 and .mlp.2
    norm                           LayerNorm

Pre-norm blocks with an exact GELU, as in ViT. The tensors may be at the top level of the file or under `encoder`,
`model`, `state_dict` or `student`. The target encoder is ignored: the prototype never updated it (F11 a).
"""

import re
from math import prod
from pathlib import Path

from torch import Tensor

from octfm.config import load
from octfm.encoder.encoder import Encoder, empty_network
from octfm.errors import CheckpointError, reason_of
from octfm.io.location import local_path
from octfm.models.token_map import token_grid
from octfm.models.vit3d import ViTConfig
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import start, torch_defaults
from octfm.run.weights_file import read_weights
from octfm.volume.preprocessing import Preprocessing

PREPROCESSING = {"image_size": [64, 384, 384], "target_spacing": [0.05, 0.02, 0.02]}
"""How the prototype's training volumes were prepared, as far as its settings say."""
CONTAINERS = ("encoder", "model", "state_dict", "student")
PREFIX = re.compile(r"^(module\.|_orig_mod\.)*(model\.)?((context_)?encoder\.|student\.)?(module\.)?")
TEACHER = re.compile(r"^(module\.)?(target_encoder|teacher|ema|predictor|mask_token)\b")
RENAMED = (
    (re.compile(r"^patch_embed\.(proj\.)?"), "patch_embed."),
    (re.compile(r"^pos_embed$|^position_embedding$"), "position"),
    (re.compile(r"\.attn\.in_proj_"), ".attn.qkv."),
    (re.compile(r"\.attn\.(proj|out_proj)\."), ".attn.out."),
    (re.compile(r"\.mlp\.(fc1|net\.0)\."), ".mlp.0."),
    (re.compile(r"\.mlp\.(fc2|net\.2)\."), ".mlp.2."),
)


@torch_defaults()
def load_prototype_encoder(
    path: str | Path, preprocessing: Preprocessing | None = None, *, heads: int | None = None, device: str | None = None
) -> Encoder:
    """Load the context encoder in a prototype's `.pt`, in float32; volumes are standardised by their own statistics.

    `preprocessing` defaults to PREPROCESSING. `heads` cannot be read from weights; by default heads are 64 wide. Raises
    CheckpointError naming a tensor that is missing, unknown or of another shape.
    """
    path = local_path(path)
    preprocessing = preprocessing or load(Preprocessing, dict(PREPROCESSING))
    state = _translated(path, read_weights(path, CONTAINERS, "a .pt of the prototype"))
    kernel = state["patch_embed.weight"]
    if kernel.ndim != 5 or kernel.shape[1] != 1:
        raise CheckpointError(
            f"{path}: patch_embed.weight: expected [D, 1, d, h, w] of a Conv3d on one channel, got {list(kernel.shape)}"
        )
    width, patch = int(kernel.shape[0]), (int(kernel.shape[2]), int(kernel.shape[3]), int(kernel.shape[4]))
    depth = 1 + max((int(name.split(".")[1]) for name in state if name.startswith("blocks.")), default=-1)
    hidden = state.get("blocks.0.mlp.0.weight")
    try:
        grid = token_grid(preprocessing.image_size, patch)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None
    model = ViTConfig(
        patch_size=patch, width=width, depth=max(1, depth), heads=heads or max(1, width // 64), positions="learned",
        mlp_ratio=hidden.shape[0] / width if hidden is not None else 4.0,
    )  # fmt: skip
    # A convolution whose stride is its kernel is a linear map of the patch, voxels in the same order.
    state["patch_embed.weight"] = kernel.reshape(width, -1)
    if "position" in state:
        found = state["position"] = state["position"].reshape(1, *state["position"].shape[-2:])
        if (expected := [1, prod(grid), width]) != list(found.shape):
            raise CheckpointError(
                f"{path}: position: expected {expected}, got {list(found.shape)}; volumes of this Preprocessing have "
                f"{grid[0]} x {grid[1]} x {grid[2]} tokens: another image_size or patch size than it was trained on"
            )
    masks = {"budget": None, "context_ratio": 0.4}
    config = load(PretrainConfig, {"model": model.model_dump(), "masks": masks, "precision": "fp32"})
    network = empty_network(config, preprocessing)
    try:
        network.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    except RuntimeError as error:
        what = reason_of(error, 200)
        raise CheckpointError(f"{path}: not the layout of octfm/encoder/prototype.py ({what})") from None
    runtime = start("fp32", device)
    network = network.to(runtime.device).eval().requires_grad_(False)
    return Encoder(network, config, preprocessing, runtime, str(path), preprocessing.fingerprint(), own_zscore=True)


def _translated(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's tensors under octfm's names, without those of teacher and predictor."""
    state = {}
    for name, tensor in tensors.items():
        if TEACHER.match(name):
            continue
        short = PREFIX.sub("", name, count=1)
        for pattern, ours in RENAMED:
            short = pattern.sub(ours, short)
        state[short] = tensor
    if "patch_embed.weight" not in state:
        raise CheckpointError(
            f"{path}: no patch_embed.weight among {len(tensors)} tensors ({', '.join(list(tensors)[:3])} …); "
            "see the layout in octfm/encoder/prototype.py"
        )
    return state
