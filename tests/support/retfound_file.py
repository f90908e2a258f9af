"""A checkpoint of random weights in RETFound's layout."""

import torch

WIDTH, DEPTH, PATCH, SIDE = 128, 2, 16, 64


def random_file(path, **changes):
    """Random weights in the layout of MAE's pretraining checkpoints, decoder included."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator) * 0.05

    state = {
        "cls_token": draw(1, 1, WIDTH),
        "pos_embed": draw(1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "mask_token": draw(1, 1, 32),
    }
    state |= {"patch_embed.proj.weight": draw(WIDTH, 3, PATCH, PATCH), "patch_embed.proj.bias": draw(WIDTH)}
    for i in range(DEPTH):
        block = f"blocks.{i}."
        state |= {f"{block}norm{k}.weight": 1 + draw(WIDTH) for k in (1, 2)} | {
            f"{block}norm{k}.bias": draw(WIDTH) for k in (1, 2)
        }
        sizes = {
            "attn.qkv": (3 * WIDTH, WIDTH),
            "attn.proj": (WIDTH, WIDTH),
            "mlp.fc1": (256, WIDTH),
            "mlp.fc2": (WIDTH, 256),
        }
        for name, (out, into) in sizes.items():
            state |= {f"{block}{name}.weight": draw(out, into), f"{block}{name}.bias": draw(out)}
    state |= {"norm.weight": 1 + draw(WIDTH), "norm.bias": draw(WIDTH), "decoder_embed.weight": draw(32, WIDTH)}
    state |= changes
    torch.save({"model": {name: tensor for name, tensor in state.items() if tensor is not None}, "epoch": 800}, path)
    return state
