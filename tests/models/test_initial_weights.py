"""`model.init`: a V-JEPA 2 checkpoint becomes our encoder, or is refused with one clear line."""

import pytest
import torch

from octfm.errors import CheckpointError
from octfm.models.objectives.jepa import JEPA, JEPAConfig
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import ViTConfig, rotary, take_patches
from octfm.pretraining import initial_weights
from octfm.pretraining.initial_weights import read_initial
from octfm.run import checkpoint
from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, quiet
from support.vjepa2_peer import EVERY, GRID, PATCH, SIZE, random_vjepa2

MODEL = ViTConfig(patch_size=PATCH, width=48, depth=3, heads=4)


@pytest.fixture(scope="module")
def peer():
    return random_vjepa2()


def released(peer) -> dict[str, torch.Tensor]:
    """The tensors of transformers' model under the names of facebookresearch/vjepa2's own files."""
    theirs, found = dict(peer.encoder.named_parameters()), {}
    for kind in ("weight", "bias"):
        found[f"patch_embed.proj.{kind}"] = theirs[f"embeddings.patch_embeddings.proj.{kind}"]
        found[f"norm.{kind}"] = theirs[f"layernorm.{kind}"]
        for n in range(3):
            block, layer = f"blocks.{n}.", f"layer.{n}."
            found[f"{block}attn.qkv.{kind}"] = torch.cat(
                [theirs[f"{layer}attention.{p}.{kind}"] for p in ("query", "key", "value")]
            )
            found[f"{block}attn.proj.{kind}"] = theirs[f"{layer}attention.proj.{kind}"]
            found |= {
                f"{block}{part}.{kind}": theirs[f"{layer}{part}.{kind}"]
                for part in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")
            }
    return {f"module.backbone.{name}": tensor.detach().clone() for name, tensor in found.items()}


def objective() -> JEPA:
    torch.manual_seed(0)
    return JEPA(JEPAConfig(), MODEL, PredictorConfig(width=24, depth=1, heads=2), GRID)


def begin_with(path, model, size) -> None:
    initial_weights.begin_with(read_initial(str(path), config(model=size.model_dump())), model)


@torch.no_grad()
def test_the_encoder_answers_as_vjepa2_where_positions_are_equal(peer, tmp_path):
    path, model = tmp_path / "vitl.pt", objective()
    torch.save({"encoder": {}, "target_encoder": released(peer), "epoch": 3}, path)
    before = {name: p.clone() for name, p in model.predictor.named_parameters()}
    begin_with(path, model, MODEL)
    voxels = torch.randn(1, 1, *SIZE, generator=torch.Generator().manual_seed(1))
    x = peer.encoder.embeddings(voxels.transpose(1, 2))
    for layer in peer.encoder.layer:
        x = layer(x, position_mask=torch.zeros_like(EVERY))[0]
    still = rotary(GRID, torch.zeros_like(EVERY), 12)
    for encoder in (model.encoder, model.target_encoder):
        torch.testing.assert_close(
            encoder(take_patches(voxels, EVERY, PATCH), EVERY, still), peer.encoder.layernorm(x), rtol=1e-5, atol=1e-5
        )
    assert all(torch.equal(p, before[name]) for name, p in model.predictor.named_parameters())


@torch.no_grad()
def test_channels_that_were_turned_by_one_axis_still_are(peer, tmp_path):
    """Queries that answer to one axis of V-JEPA 2 alone depend, here too, on positions along that axis alone."""
    state = released(peer)
    pairs = 12 // 2
    for axis in range(3):
        used = torch.zeros(3, 4, 12, 48)
        used[:, :, 2 * axis * (pairs // 3) : 2 * (axis + 1) * (pairs // 3)] = 1
        alone = dict(state)
        for n in range(3):
            alone[f"module.backbone.blocks.{n}.attn.qkv.weight"] = state[
                f"module.backbone.blocks.{n}.attn.qkv.weight"
            ] * used.flatten(0, 2)
            alone[f"module.backbone.blocks.{n}.attn.qkv.bias"] = torch.zeros(144)
        torch.save(alone, tmp_path / "one_axis.pt")
        model = objective()
        begin_with(tmp_path / "one_axis.pt", model, MODEL)
        attention, x = model.encoder.blocks[0].attn, torch.randn(1, 2, 48)
        for other in range(3):
            stride = (16, 4, 1)[other]
            scores = [_score(attention, x, torch.tensor([[0, steps * stride]])) for steps in (0, 2)]
            assert torch.allclose(*scores, atol=1e-6) == (other != axis), f"axis {axis}, moved along {other}"


def _score(attention, x, index):
    from octfm.models.vit3d import rotate, turn_qkv

    qkv = rotate(attention.qkv(x).unflatten(-1, (3, 4, -1)), turn_qkv(rotary(GRID, index, 12)))
    return (qkv[:, 0, 0] * qkv[:, 1, 1]).sum(-1)


def test_other_patches_and_colours_give_an_even_patch_the_same_answer(peer, tmp_path):
    state = released(peer)
    kernel = torch.randn(48, 3, 2, 16, 16)
    state["module.backbone.patch_embed.proj.weight"] = kernel
    torch.save(state, tmp_path / "video.pt")
    model = objective()
    begin_with(tmp_path / "video.pt", model, MODEL)
    even = model.encoder.patch_embed(torch.ones(1, 1, 2 * 8 * 8))[0, 0]
    torch.testing.assert_close(
        even, kernel.sum((1, 2, 3, 4)) + state["module.backbone.patch_embed.proj.bias"], rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(
    "kernel", [torch.zeros(48, 3, 16, 16), torch.zeros(32, 3, 2, 16, 16)], ids=["images", "narrow"]
)
def test_a_kernel_of_other_patches_than_of_video_is_refused_by_name(peer, tmp_path, kernel):
    torch.save(released(peer) | {"module.backbone.patch_embed.proj.weight": kernel}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"patch_embed\.proj\.weight: expected \[48, C, t, h, w\], got"):
        begin_with(tmp_path / "a.pt", objective(), MODEL)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"width": 96, "heads": 8},
            "expected .96., got .48.; found width 48 and depth 3, the config asks for model.width=96",
        ),
        (
            {"depth": 4},
            "blocks.3.norm1.weight is missing; found width 48 and depth 3, the config asks for model.width=48 and model.depth=4",
        ),
        ({"depth": 2}, "blocks.2.* has no place"),
        ({"positions": "learned"}, "use model.positions=rotary"),
    ],
)
def test_another_architecture_is_refused_by_name(peer, tmp_path, change, said):
    torch.save(released(peer), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=said):
        begin_with(tmp_path / "a.pt", objective(), MODEL.model_copy(update=change))


def test_files_that_are_no_weights_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("no tensors")
    torch.save({"note": 1}, tmp_path / "empty.pt")
    for name in ("text.pt", "empty.pt", "absent.pt"):
        with pytest.raises(CheckpointError, match=name):
            begin_with(tmp_path / name, objective(), MODEL)


def test_a_run_begins_with_given_weights_and_resumes_without_the_file(tmp_path):
    store = small_store(tmp_path / "store")
    plain = quick_pretrain(config(steps=2, ckpt_every_steps=1), store, tmp_path / "plain", "cpu", echo=quiet)
    own = checkpoint.load(checkpoint.newest(plain))["model"]
    size = config().model
    given = {
        name.removeprefix("encoder.")
        .replace(".attn.out.", ".attn.proj.")
        .replace(".mlp.0.", ".mlp.fc1.")
        .replace(".mlp.2.", ".mlp.fc2."): t
        for name, t in own.items()
        if name.startswith("encoder.")
    }
    given["patch_embed.proj.weight"] = given.pop("patch_embed.weight").reshape(size.width, 1, *size.patch_size)
    given["patch_embed.proj.bias"] = given.pop("patch_embed.bias")
    torch.save(given, tmp_path / "given.pt")
    model = {"init": str(tmp_path / "given.pt"), **size.model_dump(exclude={"init"})}
    settings = config(steps=4, ckpt_every_steps=1, keep_checkpoints=9, model=model)
    run = quick_pretrain(settings, store, tmp_path / "run", "cpu", echo=quiet)
    first, *_, last = sorted((run / "checkpoints").glob("*.pt"))
    started = checkpoint.load(first)["model"]
    gap = {
        name: float((started[f"encoder.{name}"] - own[f"encoder.{name}"]).abs().max())
        for name in ("norm.weight", "patch_embed.weight")
    }
    assert max(gap.values()) < 0.01, f"one update away from what was given: {gap}"

    finished = checkpoint.load(last)["model"]
    last.unlink()
    (tmp_path / "given.pt").unlink()
    quick_pretrain(settings, store, run, "cpu", echo=quiet)
    again = checkpoint.load(last)["model"]
    assert all(torch.equal(finished[name], again[name]) for name in finished)
