"""Our networks beside others that compute the same: transformers' V-JEPA 2 with the same weights, and textbook
formulas in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from octfm.models.attention import BlockedAttention, attend
from octfm.models.objectives.objective import absolute_error, cosine_error
from octfm.models.products import Linear, Times
from octfm.models.vit3d import (
    Attention,
    TokenGrid,
    VisionTransformer3D,
    ViTConfig,
    rotary,
    rotate,
    take_patches,
    turn_qkv,
)
from support.examples import examples
from support.vjepa2_peer import EVERY, GRID, PATCH, SIZE, random_vjepa2

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@pytest.fixture(scope="module")
def peer():
    return random_vjepa2()


@pytest.fixture(scope="module")
def ours(peer):
    """Our encoder with the peer's weights."""
    model = VisionTransformer3D(ViTConfig(patch_size=PATCH, width=48, depth=3, heads=4), GRID)
    theirs, mine = dict(peer.encoder.named_parameters()), {}
    mine["patch_embed.weight"] = theirs["embeddings.patch_embeddings.proj.weight"].flatten(1)
    mine["patch_embed.bias"] = theirs["embeddings.patch_embeddings.proj.bias"]
    for kind in ("weight", "bias"):
        mine[f"norm.{kind}"] = theirs[f"layernorm.{kind}"]
        for n in range(3):
            layer = f"layer.{n}."
            mine[f"blocks.{n}.attn.qkv.{kind}"] = torch.cat(
                [theirs[f"{layer}attention.{part}.{kind}"] for part in ("query", "key", "value")]
            )
            names = {
                "attn.out": "attention.proj",
                "norm1": "norm1",
                "norm2": "norm2",
                "mlp.0": "mlp.fc1",
                "mlp.2": "mlp.fc2",
            }
            mine |= {f"blocks.{n}.{our}.{kind}": theirs[f"{layer}{their}.{kind}"] for our, their in names.items()}
    model.load_state_dict(mine)
    return model


@torch.no_grad()
def test_encoder_equals_vjepa2_of_transformers_where_positions_are_equal(peer, ours):
    """All tokens at the origin, where every rotation is the identity: patch embedding, attention, MLP, norms and
    their order."""
    voxels = torch.randn(1, 1, *SIZE, generator=torch.Generator().manual_seed(1))
    x = peer.encoder.embeddings(voxels.transpose(1, 2))
    patches = take_patches(voxels, EVERY, PATCH)
    torch.testing.assert_close(ours.patch_embed(patches), x, rtol=1e-5, atol=1e-5)
    for layer in peer.encoder.layer:
        x = layer(x, position_mask=torch.zeros_like(EVERY))[0]
    still = rotary(GRID, torch.zeros_like(EVERY), 12)
    torch.testing.assert_close(ours(patches, EVERY, still), peer.encoder.layernorm(x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rotary_positions_differ_from_vjepa2_on_purpose(peer):
    """A score must depend on the distance of two tokens alone; the peer turns a pair by two different angles, so it
    does not."""

    def score_of_peer(first, second):
        attention = peer.encoder.layer[0].attention
        q, k = torch.ones(1, 4, 1, 12), torch.ones(1, 4, 1, 12)
        q, k = (
            attention.apply_rotary_embeddings(x, attention.get_position_ids(x[:, 0], torch.tensor([[place]])))
            for x, place in ((q, first), (k, second))
        )
        return float((q * k).sum())

    def score_of_ours(first, second):
        one = torch.ones(1, 1, 3, 1, 12)
        q, k = (rotate(one, turn_qkv(rotary(GRID, torch.tensor([[place]]), 12))) for place in (first, second))
        return float((q[:, :, 0] * k[:, :, 1]).sum())

    step = 21  # one token further along all three axes
    assert score_of_ours(0, step) == pytest.approx(score_of_ours(step, 2 * step), rel=1e-5)
    assert score_of_peer(0, step) != pytest.approx(score_of_peer(step, 2 * step), rel=1e-3)


def textbook_attention(x_MD: np.ndarray, layer: Attention, positions_mm: np.ndarray, grid: TokenGrid) -> np.ndarray:
    """Multi-head attention with rotary positions as complex numbers (RoFormer, arXiv:2104.09864), float64, a head
    and a token at a time."""
    weight, bias = (p.detach().double().numpy() for p in (layer.qkv.weight, layer.qkv.bias))
    width = x_MD.shape[1]
    head_width = width // layer.heads
    pairs = head_width // 2
    shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
    frequencies, axes = [], []
    for axis, share in enumerate(shares):
        shortest = 2 * grid.pitch_mm[axis]
        longest = max(4 * grid.pitch_mm[axis] * grid.shape[axis], 2 * shortest)
        for n in range(share):
            frequencies.append(2 * np.pi / (shortest * (longest / shortest) ** (n / max(1, share - 1))))
            axes.append(axis)
    angle_Mk = positions_mm[:, axes] * np.array(frequencies)
    out = np.zeros_like(x_MD)
    for head in range(layer.heads):
        q, k, v = (
            x_MD @ weight[s : s + head_width].T + bias[s : s + head_width]
            for s in (head * head_width + i * width for i in range(3))
        )
        q, k = ((part[:, :pairs] + 1j * part[:, pairs:]) * np.exp(1j * angle_Mk) for part in (q, k))
        score = (q @ k.conj().T).real / np.sqrt(head_width)
        for row in range(len(x_MD)):
            weights = np.exp(score[row] - score[row].max())
            out[row, head * head_width : (head + 1) * head_width] = weights @ v / weights.sum()
    return out @ layer.out.weight.detach().double().numpy().T + layer.out.bias.detach().double().numpy()


def test_attention_with_rotary_positions_equals_the_textbook():
    torch.manual_seed(0)
    layer, x = Attention(48, 4), torch.randn(1, GRID.size, 48)
    torch.nn.init.normal_(layer.qkv.bias)
    with torch.no_grad():
        answer = layer(x, turn_qkv(rotary(GRID, EVERY, 12)))[0]
    expected = textbook_attention(x[0].double().numpy(), layer, GRID.positions_mm(EVERY)[0].double().numpy(), GRID)
    np.testing.assert_allclose(answer.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_losses_equal_the_textbook():
    """mean |z - LN(h)| as the peer's train loop has it, and BYOL's 2 - 2 cos."""
    z, h = torch.randn(2, 5, 7), torch.randn(2, 5, 7)
    goal = F.layer_norm(h, (7,))
    a, b = z.double().numpy(), h.double().numpy()
    normed = (b - b.mean(-1, keepdims=True)) / np.sqrt(b.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(absolute_error(z, goal).numpy(), np.abs(a - normed).mean((1, 2)), rtol=1e-5)
    cosine = (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)
    np.testing.assert_allclose(cosine_error(z, h).numpy(), (2 - 2 * cosine).mean(1), rtol=1e-5)


@pytest.mark.parametrize("tokens", [1, 7, 300, 1500])
def test_blocked_attention_is_attention(tokens, monkeypatch):
    """In bfloat16 on CPU, with and without gradients, within what bfloat16 can tell; blocks of heads and of rows are
    both met."""
    monkeypatch.setattr("octfm.models.attention.BLOCK_BYTES", 400_000)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, tokens, 3, 16, dtype=torch.bfloat16).transpose(2, 3).unbind(0)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
    for learns in (False, True):
        q.requires_grad_(learns)
        error = (attend(q, k, v).double() - exact).norm() / exact.norm()
        assert error < 0.01, f"learns={learns}: {error:.4f}"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_blocked_attention_has_the_gradient_of_attention(precision, kept, monkeypatch):
    """Weights kept or computed again, block of rows by block of rows; float32 where oneDNN multiplies, which is not
    every processor."""
    monkeypatch.setattr("octfm.models.attention.KEPT_TOKENS", 10_000 if kept else 0)
    monkeypatch.setattr("octfm.models.attention.BLOCK_BYTES", 2_000)
    monkeypatch.setattr("octfm.models.products.onednn_is_faster", lambda: HAS_ONEDNN)
    torch.manual_seed(0)
    qkv = torch.randn(2, 39, 3, 3, 8, dtype=precision, requires_grad=True)  # strided, as Attention has them
    mine = torch.autograd.grad(BlockedAttention.apply(*qkv.permute(2, 0, 3, 1, 4)).square().sum(), qkv)
    expected = torch.autograd.grad(
        F.scaled_dot_product_attention(*qkv.double().permute(2, 0, 3, 1, 4)).square().sum(), qkv
    )
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.integers(1, 4), max_size=2), st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.booleans(), st.booleans(),
    st.sampled_from(["dense", "every second", "transposed", "expanded"]),
)  # fmt: skip
@settings(max_examples=examples(150))
def test_linear_layers_equal_torchs_whatever_the_strides(lead, rows, channels, answers, bias, of_input, view):
    """Values and gradients in float32 by oneDNN, on every processor that has it, beside torch's in float64."""
    if not HAS_ONEDNN:
        pytest.skip("this torch has no oneDNN")
    generator = torch.Generator().manual_seed(rows * 41 + channels)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x = {
        "dense": lambda: draw(*lead, rows, channels),
        "every second": lambda: draw(*lead, 2 * rows, 2 * channels)[..., ::2, ::2],
        "transposed": lambda: draw(*lead, channels, rows).mT,
        "expanded": lambda: draw(*lead, 1, channels).expand(*lead, rows, channels),
    }[view]().requires_grad_(of_input)  # fmt: skip
    torch.manual_seed(answers)
    layer = torch.nn.Linear(channels, answers, bias=bias)
    wanted = [*([x] if of_input else []), *layer.parameters()]

    def gradients(y):
        return torch.autograd.grad((y * torch.arange(answers)).sum() + y.square().sum(), wanted)

    mine = Times.apply(x, layer.weight, layer.bias)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)
    # Sums of up to 640 products of some hundreds each: float32 leaves more than .003 in one of some thousand
    # draws.
    for a, b in zip(gradients(mine), gradients(exact), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=6e-3)


def test_who_counts_or_exports_sees_torchs_own_operators(monkeypatch):
    """FakeTensors, autocast and exporters get `aten::linear`, whose cost and meaning others know."""
    monkeypatch.setattr("octfm.models.products.onednn_is_faster", lambda: True)
    layer, x = Linear(6, 5), torch.randn(3, 6)
    with FlopCounterMode(display=False) as counted, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        layer.to_empty(device="cpu")
        layer.weight = torch.nn.Parameter(mode.from_tensor(layer.weight))
        layer(mode.from_tensor(x))
    assert counted.get_total_flops() == 2 * 3 * 6 * 5
    layer = Linear(6, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is torch.bfloat16
    operators = {
        str(node.target) for node in torch.export.export(layer, (x,)).graph.nodes if node.op == "call_function"
    }
    assert operators == {"aten.linear.default"}
