"""transformers' V-JEPA 2 encoder at random weights, and the grid of tokens it is compared on."""

import logging

import torch

from octfm.models.vit3d import (
    TokenGrid,
)

SIZE, PATCH = (8, 32, 32), (2, 8, 8)


GRID = TokenGrid((4, 4, 4), (0.4, 0.1, 0.3))


EVERY = torch.arange(GRID.size).unsqueeze(0)


def random_vjepa2():
    """transformers' V-JEPA 2 encoder of the same size at random weights that are not at their initial values."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers import VJEPA2Config, VJEPA2Model

    config = VJEPA2Config(
        patch_size=8, crop_size=32, frames_per_clip=8, tubelet_size=2, hidden_size=48, in_chans=1, num_attention_heads=4,
        num_hidden_layers=3, mlp_ratio=4.0, layer_norm_eps=1e-5, pred_hidden_size=24, pred_num_attention_heads=2, pred_num_hidden_layers=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = VJEPA2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model
