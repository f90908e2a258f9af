"""A local RETFound file (Zhou et al., Nature 622, 2023) as an encoder of volumes, by the mean over B-scans.

Layout, as MAE writes it (He et al., arXiv:2111.06377), under `model` or `state_dict` or at the top level:

    cls_token [1, 1, D], pos_embed [1, 1 + N, D], patch_embed.proj.weight [D, 3, p, p]
    blocks.<i>.norm1 | attn.qkv | attn.proj | norm2 | mlp.fc1 | mlp.fc2
    norm, or fc_norm in files that were fine-tuned with average pooling

Decoder and classification head are ignored. 8-bit B-scans are resized to the square that the network was trained on,
repeated over three channels and normalised like ImageNet. Reads weights only; no code in the file is run.
"""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.errors import CheckpointError, reason_of
from octfm.io.location import local_path
from octfm.run.weights_file import read_weights

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet's channels."""
HEAD_WIDTH = 64
"""Width of attention heads in every ViT of this family; it cannot be read from the weights."""
IGNORED = re.compile(r"^(decoder|mask_token|head|fc_head)")


class SliceViT(nn.Module):
    """The encoder of MAE, a 2-D ViT: one vector per image."""

    def __init__(self, width: int, depth: int, hidden: int, patch: int, tokens: int):
        super().__init__()
        self.side = round(tokens**0.5) * patch
        self.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + tokens, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.ModuleList(SliceBlock(width, hidden) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def forward(self, images: Tensor) -> Tensor:
        """float32 [N, width] of normalised images [N, 3, S, S]: the mean of the patch tokens after the last norm."""
        x = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 1:].mean(1)


class SliceBlock(nn.Module):
    """Pre-norm transformer block with the parameter names of timm."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "proj": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, hidden), "fc2": nn.Linear(hidden, width)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attn["qkv"](self.norm1(x)).unflatten(-1, (3, -1, HEAD_WIDTH)).permute(2, 0, 3, 1, 4)
        x = x + self.attn["proj"](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.norm2(x))))


def load_retfound(path: str | Path, *, slices: int = 16, device: str = "cpu") -> Callable[[np.ndarray], np.ndarray]:
    """A function from prepared voxels uint8 [B, D, H, W] to float32 [B, width], as `octfm trust --external` needs it.

    A vector is the mean over `slices` evenly spaced B-scans. Raises CheckpointError for a file of another layout.
    """
    if slices < 1:
        raise CheckpointError(f"slices: expected 1 or more B-scans of each volume, got {slices}")
    network = read_retfound(local_path(path)).to(device).eval().requires_grad_(False)
    side = network.side
    mean, std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (MEAN, STD))

    @torch.inference_mode()
    def embed(voxels: np.ndarray) -> np.ndarray:
        chosen = np.unique(np.linspace(0, voxels.shape[1] - 1, min(slices, voxels.shape[1])).round().astype(int))
        vectors = []
        for volume in voxels:  # one at a time: 16 images through ViT-L fill a small GPU
            images = torch.from_numpy(volume[chosen]).to(device).unsqueeze(1).float() / 255
            images = F.interpolate(images, (side, side), mode="bilinear", antialias=True).expand(-1, 3, -1, -1)
            vectors.append(network((images - mean) / std).mean(0).cpu().numpy())
        return np.stack(vectors)

    return embed


def read_retfound(path: Path) -> SliceViT:
    """The network in a RETFound file; its sizes are read from the weights. Raises CheckpointError for another
    layout."""
    tensors = read_weights(path, ("model", "state_dict"), "a RETFound .pth")
    state = {name.removeprefix("module."): tensor.float() for name, tensor in tensors.items()}
    state = {name: tensor for name, tensor in state.items() if not IGNORED.match(name)}
    if "fc_norm.weight" in state:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("norm.")}
        state = {name.replace("fc_norm.", "norm."): tensor for name, tensor in state.items()}
    needed = ("cls_token", "pos_embed", "patch_embed.proj.weight", "blocks.0.mlp.fc1.weight")
    if absent := [name for name in needed if name not in state]:
        raise CheckpointError(
            f"{path}: no {absent[0]} among {len(tensors)} tensors ({', '.join(list(tensors)[:3])} …); expected the "
            "layout of MAE, as in RETFound's first release (see octfm/encoder/retfound.py)"
        )
    width = state["cls_token"].shape[-1]
    depth = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    kernel, tokens = state["patch_embed.proj.weight"], state["pos_embed"].shape[1] - 1
    if width % HEAD_WIDTH or kernel.ndim != 4 or kernel.shape[1] != 3 or round(tokens**0.5) ** 2 != tokens:
        raise CheckpointError(
            f"{path}: expected heads of {HEAD_WIDTH} channels, three input channels and a square of patches, "
            f"got width {width}, patch_embed.proj.weight {list(kernel.shape)} and {tokens} positions"
        )
    # Without memory for random weights, which `assign=True` would replace anyway.
    with torch.device("meta"):
        network = SliceViT(width, depth, state["blocks.0.mlp.fc1.weight"].shape[0], kernel.shape[-1], tokens)
    try:
        network.load_state_dict(state, assign=True)
    except RuntimeError as error:
        what = reason_of(error, 200)
        raise CheckpointError(f"{path}: not the layout of octfm/encoder/retfound.py ({what})") from None
    return network
