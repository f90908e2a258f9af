"""A RETFound file becomes an encoder of volumes: the same numbers as an independent ViT, slice by slice; anything
else is refused."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from octfm.encoder.retfound import MEAN, STD, load_retfound
from octfm.errors import CheckpointError
from support.retfound_file import DEPTH, PATCH, SIDE, WIDTH, random_file


def oracle(state, images):
    """transformers' ViT with the same weights: mean over patches after the last norm."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=WIDTH // 64, intermediate_size=256, image_size=SIDE,
        patch_size=PATCH, layer_norm_eps=1e-6, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    model = transformers.ViTModel(config, add_pooling_layer=False).eval()
    theirs = dict(model.state_dict())
    names = list(theirs)

    def put(end, tensor):
        (name,) = [n for n in names if n.endswith(end)]
        assert theirs[name].shape == tensor.shape, name
        theirs[name] = tensor

    put("cls_token", state["cls_token"])
    put("position_embeddings", state["pos_embed"])
    put("projection.weight", state["patch_embed.proj.weight"])
    put("projection.bias", state["patch_embed.proj.bias"])
    for i in range(DEPTH):
        for kind in ("weight", "bias"):
            ours = {
                name: state[f"blocks.{i}.{name}.{kind}"]
                for name in ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
            }
            of_block = sorted(n for n in names if f".{i}." in n and n.endswith(kind))
            targets = {
                "norm1": ("layernorm_before",), "norm2": ("layernorm_after",), "attn.proj": ("attention.output.dense", "o_proj"),
                "mlp.fc1": ("intermediate.dense", "fc1"), "mlp.fc2": (".output.dense", "fc2"),
                "q": ("query", "q_proj"), "k": ("key", "k_proj"), "v": ("value", "v_proj"),
            }  # fmt: skip
            ours |= dict(zip("qkv", ours.pop("attn.qkv").chunk(3), strict=True))
            for name, tensor in ours.items():
                found = [n for n in of_block if any(f"{end}.{kind}" in n for end in targets[name])]
                if name == "mlp.fc2":
                    found = [n for n in found if "attention" not in n]
                (one,) = found
                theirs[one] = tensor
    put("layernorm.weight", state["norm.weight"])
    put("layernorm.bias", state["norm.bias"])
    model.load_state_dict(theirs)
    with torch.no_grad():
        return model(images).last_hidden_state[:, 1:].mean(1).numpy()


def test_the_same_numbers_as_an_independent_vit_slice_by_slice(tmp_path):
    state = random_file(tmp_path / "weights.pth")
    voxels = np.random.default_rng(0).integers(0, 256, (2, 5, 96, 48)).astype(np.uint8)
    found = load_retfound(tmp_path / "weights.pth", slices=3)(voxels)
    assert found.shape == (2, WIDTH)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (MEAN, STD))
    for volume, vector in zip(voxels, found, strict=True):
        images = torch.from_numpy(volume[[0, 2, 4]]).unsqueeze(1).float() / 255
        images = (
            F.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True).expand(-1, 3, -1, -1) - mean
        ) / std
        np.testing.assert_allclose(vector, oracle(state, images).mean(0), atol=2e-5)


def test_fine_tuned_files_have_their_norm_elsewhere(tmp_path):
    state = random_file(tmp_path / "a.pth")
    moved = {
        "norm.weight": None,
        "norm.bias": None,
        "fc_norm.weight": state["norm.weight"],
        "fc_norm.bias": state["norm.bias"],
    }
    random_file(tmp_path / "b.pth", **moved, **{"head.weight": torch.zeros(5, WIDTH)})
    voxels = np.random.default_rng(0).integers(0, 256, (1, 4, 64, 64)).astype(np.uint8)
    np.testing.assert_array_equal(*(load_retfound(tmp_path / f"{name}.pth")(voxels) for name in "ab"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cls_token": None}, "no cls_token among .* expected the layout of MAE"),
        ({"blocks.0.ls1.gamma": torch.ones(WIDTH)}, "not the layout"),
        ({"patch_embed.proj.weight": torch.zeros(WIDTH, 1, 16, 16)}, "three input channels"),
        ({"blocks.1.attn.qkv.bias": torch.zeros(5)}, "not the layout"),
    ],
)
def test_other_layouts_are_refused_by_name(tmp_path, changes, words):
    random_file(tmp_path / "weights.pth", **changes)
    with pytest.raises(CheckpointError, match=words):
        load_retfound(tmp_path / "weights.pth")
