"""Runs of the prototype: its settings are mapped all at once, its presets run, its encoders are read for comparison."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from octfm.encoder.prototype import load_prototype_encoder
from octfm.errors import CheckpointError, ConfigError
from octfm.models.vit3d import count_parameters
from octfm.pretraining import preflight
from octfm.pretraining.data import training_rows
from octfm.pretraining.learner import build_objective
from octfm.pretraining.settings import in_steps, load_config, smoke
from octfm.run.runtime import start
from octfm.volume.preprocessing import Preprocessing
from support.small_store import SIZE, small_preprocessing
from support.tiny_runs import config, quick_pretrain, quiet

OLD = """
# The prototype's own YAML, as it was.
experiment_name: vjepa3d_multi
seed: 42
data_root: gs://bucket/aireadi
list_strategy: multi_domain
image_size: [64, 384, 384]
target_spacing: [0.05, 0.02, 0.02]
max_samples: null
num_workers: 8
per_core_batch_size: 1
global_batch_size: 32
grad_accum_steps: 2
model:
  patch_size: [4, 16, 16]
  embed_dim: 384
  depth: 6
  num_heads: 6
mask_ratio: 0.6
ema_base: 0.996
epochs: 150
warmup_epochs: 5
base_lr: 1.0e-4
weight_decay: 0.05
use_bf16: true
ckpt_dir: null
ckpt_every_epochs: 5
log_every_steps: 2
use_wandb: true
something_else: 3
"""


def test_an_unmodified_prototype_yaml_gets_one_error_that_maps_every_key(tmp_path):
    path = tmp_path / "pretrain_vjepa.yaml"
    path.write_text(OLD)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    told = str(caught.value)
    assert "\n" not in told and "pretrain_vjepa_multi_domain" in told
    for line in OLD.strip().splitlines()[1:]:
        key = line.split(":")[0].strip()
        if key in ("model", "seed", "patch_size", "depth", "epochs", "ckpt_every_epochs", "log_every_steps"):
            continue  # sections, and keys that kept their name and place
        assert f"{key} -> " in told, key
    for successor in (
        "per_core_batch_size -> data.per_device_batch_size=1",
        "model.embed_dim -> model.width=384",
        "mask_ratio -> masks.mask_ratio=0.6",
        "warmup_epochs -> schedule.warmup_ratio",
        "use_bf16 -> precision=bf16",
        "list_strategy -> data.scanners",
        "target_spacing -> octfm prepare CATALOG target_spacing=[0.05,0.02,0.02]",
        "ckpt_dir -> --out FOLDER",
        "something_else -> no such setting; leave it out",
    ):
        assert successor in told, successor


def test_every_successor_is_a_real_setting():
    from octfm.config import known_keys
    from octfm.pretraining.prototype_keys import CHANGED, RENAMED
    from octfm.pretraining.settings import PretrainConfig

    known = set(known_keys(PretrainConfig))
    named = set(RENAMED.values()) | {
        word for text in CHANGED.values() for word in re.findall(r"\b(?:data|schedule|model|masks|tracking)\.\w+", text)
    }
    assert named - known == set()


def test_a_misspelt_key_of_ours_is_not_taken_for_the_prototype(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {widht: 3}\n")
    with pytest.raises(ConfigError, match=r"did you mean model\.width"):
        load_config(tmp_path / "mine.yaml")


def test_F19_presets_have_the_prototypes_values():
    """Its smoke test had 5.8 M parameters; its real runs trained another model than its config said."""
    for name, epochs, scanners in (
        ("pretrain_vjepa_single_domain", 120, ("topcon_triton",)),
        ("pretrain_vjepa_multi_domain", 150, ()),
    ):
        c = load_config(name)
        assert (c.epochs, c.data.scanners, c.ckpt_every_epochs, c.log_every_steps, c.precision) == (
            epochs,
            scanners,
            5,
            2,
            "bf16",
        )
        assert (c.schedule.base_lr, c.schedule.min_lr_ratio, c.schedule.warmup_ratio, c.schedule.weight_decay) == (
            1e-4,
            0.1,
            0.03,
            0.05,
        )
        assert (c.schedule.ema_base, c.schedule.ema_end, c.betas, c.masks.mask_ratio) == (0.996, 1.0, (0.9, 0.95), 0.6)
        assert (c.model.patch_size, c.model.width, c.model.depth, c.data.global_batch_size) == ((4, 16, 16), 384, 6, 32)
        assert c.objective.name == "vjepa2"
    c = load_config("smoke_test")
    assert (c.steps, c.data.max_samples) == (10, 8)
    with torch.device("meta"):
        assert count_parameters(build_objective(c, Preprocessing(image_size=(16, 128, 128)))) == pytest.approx(
            5.8e6, rel=0.01
        )


def test_epochs_become_steps_when_the_store_is_known(store):
    c = config(steps=100_000, epochs=3, ckpt_every_epochs=1, data={"global_batch_size": 4})
    resolved = in_steps(c, 16)
    assert (resolved.steps, resolved.epochs, resolved.ckpt_every_steps, resolved.ckpt_every_epochs) == (
        12,
        None,
        4,
        None,
    )
    assert in_steps(config(), 16) == config()
    with pytest.raises(ConfigError, match="give one of them"):
        config(epochs=3)


def test_epochs_train_and_resume(store, tmp_path):
    c = config(steps=100_000, epochs=0.5, ckpt_every_epochs=0.25, data={"global_batch_size": 4})
    lines = []
    run = quick_pretrain(c, store, tmp_path / "run", echo=quiet)
    assert quick_pretrain(c, store, tmp_path / "run", echo=lines.append) == run
    assert "2 updates" in lines[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["demo_vjepa2", "smoke_test", "pretrain_vjepa_single_domain", "data2vec_prototype", "demo", "vit_s", "mae"],
)
def test_every_preset_shrinks_and_passes_its_preflight(name, store):
    """What `--smoke` runs; under a minute on two cores, here on 8 small volumes in seconds."""
    c = smoke(load_config(name))
    small, plain = (
        c.model.model_copy(update={"patch_size": (2, 8, 8)}),
        c.objective.model_copy(update={"goal_average": (2, 1, 2)}),
    )
    c = c.model_copy(update={"model": small, "objective": c.objective if c.objective.name == "data2vec" else plain})
    assert c.steps <= 10 and c.data.max_samples <= 8 and c.objective.name == load_config(name).objective.name
    rows = training_rows(c, store)
    found = preflight.checks(c, store, start("fp32", "cpu"), *rows, store.path.parent / "run")
    assert not [check for check in found if check.status == "FAIL"]


@pytest.mark.parametrize(("ranks", "batch", "at_a_time"), [(1, 4, 4), (2, 4, 2), (3, 3, 1), (8, 8, 1)])
def test_smoke_shares_its_batch_among_ranks(ranks, batch, at_a_time):
    data = smoke(load_config("vit_s", ["data.per_device_batch_size=8"]), ranks).data
    assert (data.global_batch_size, data.per_device_batch_size) == (batch, at_a_time)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["smoke_test", "pretrain_vjepa_single_domain", "pretrain_vjepa_multi_domain", "vit_s", "data2vec_prototype", "mae"],
)
def test_smoke_of_every_preset_takes_less_than_a_minute(name, tmp_path):
    import resource

    from support.command_line import octfm_command

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code, out, err = octfm_command("pretrain", name, "--smoke", "--out", "run", "--device", "cpu", cwd=tmp_path)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert code == 0 and "pretraining done: 10 updates" in out, err
    size = r"smoke: 10 steps of 4 volumes, [12] blocks? of 48 channels, whatever the settings say"
    assert re.search(size, out), "else one would think that the settings were tried as they are"
    assert after.ru_utime - before.ru_utime < 60, "CPU seconds: what it would take on a machine of its own"


# Encoders
# -------------------------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """As the prototype's are described: pre-norm, fused qkv, GELU."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.Module()
        self.attn.qkv, self.attn.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.attn.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        attention = ((q @ k.transpose(-1, -2)) / (d // self.heads) ** 0.5).softmax(-1)
        x = x + self.attn.proj((attention @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(self.norm2(x))))


class OldEncoder(nn.Module):
    """FACTS F19: Conv3d patches, learned positions, `depth` blocks, final norm."""

    def __init__(self, tokens, patch=(4, 16, 16), width=384, depth=6, heads=6):
        super().__init__()
        self.patch_embed = nn.Module()
        self.patch_embed.proj = nn.Conv3d(1, width, patch, patch)
        self.pos_embed = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, voxels):
        x = self.patch_embed.proj(voxels).flatten(2).transpose(1, 2) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


SMALL = {"patch": (2, 8, 8), "width": 48, "depth": 2, "heads": 2}
TOKENS = 4 * 8 * 4


@pytest.fixture
def old():
    torch.manual_seed(0)
    return OldEncoder(TOKENS, **SMALL).eval()


def containers(old):
    state = old.state_dict()
    yield "bare", state
    yield "ddp", {f"module.{k}": v for k, v in state.items()}
    yield (
        "whole model",
        {
            "epoch": 3,
            "model": {f"context_encoder.{k}": v for k, v in state.items()} | {"predictor.0.weight": torch.ones(2, 2)},
        },
    )
    teacher = {f"target_encoder.{k}": torch.zeros_like(v) for k, v in state.items()}
    yield "with teacher", {"state_dict": teacher | {f"encoder.{k}": v for k, v in state.items()}}
    yield (
        "multihead",
        {
            "encoder": {
                re.sub(r"attn\.qkv\.(\w+)", r"attn.in_proj_\1", k).replace("attn.proj", "attn.out_proj"): v
                for k, v in state.items()
            }
        },
    )


def test_prototype_encoder_gives_the_features_its_own_code_gives(old, tmp_path):
    volume = np.random.default_rng(0).integers(0, 255, (2, *SIZE)).astype(np.uint8)
    x = torch.from_numpy(volume).float().unsqueeze(1)
    x = (x - x.mean((1, 2, 3, 4), keepdim=True)) / x.flatten(1).std(1)[:, None, None, None, None]
    with torch.no_grad():
        expected = old(x).reshape(2, 4, 8, 4, 48).numpy()
    for name, content in containers(old):
        torch.save(content, tmp_path / f"{name}.pt")
        encoder = load_prototype_encoder(tmp_path / f"{name}.pt", small_preprocessing(), heads=2, device="cpu")
        np.testing.assert_allclose(encoder.encode_grid(volume), expected, atol=2e-5, err_msg=name)


def test_prototype_encoder_embeds_a_store_beside_ours(old, store, tmp_path):
    from octfm.encoder.embed import embed_store
    from octfm.encoder.embeddings import read_embeddings

    torch.save(old.state_dict(), tmp_path / "old.pt")
    encoder = load_prototype_encoder(tmp_path / "old.pt", store.preprocessing, heads=2, device="cpu")
    found = read_embeddings(embed_store(encoder, store, tmp_path, "prototype", quiet))
    assert found.name == "prototype" and found.vectors.shape == (24, 48)
    assert encoder.key != replace(encoder, own_zscore=False).key


def test_full_size_prototype_has_the_parameters_that_were_counted():
    with torch.device("meta"):
        assert count_parameters(OldEncoder(9216)) == pytest.approx(14.58e6, rel=0.001)


def test_prototype_files_that_do_not_fit_are_named(old, tmp_path):
    def saved(content):
        torch.save(content, tmp_path / "x.pt")
        return tmp_path / "x.pt"

    state = old.state_dict()
    with pytest.raises(
        CheckpointError, match=r"position: expected \[1, 128, 48\], got \[1, 100, 48\]; volumes .* 4 x 8 x 4 tokens"
    ):
        load_prototype_encoder(
            saved({**state, "pos_embed": state["pos_embed"][:, :100]}), small_preprocessing(), heads=2
        )
    with pytest.raises(CheckpointError, match=r'Missing key\(s\) in state_dict: "blocks\.1\.norm1\.weight"'):
        load_prototype_encoder(
            saved({k: v for k, v in state.items() if k != "blocks.1.norm1.weight"}), small_preprocessing(), heads=2
        )
    with pytest.raises(CheckpointError, match=r'Unexpected key\(s\) in state_dict: "cls_token"'):
        load_prototype_encoder(saved({**state, "cls_token": torch.zeros(1, 1, 48)}), small_preprocessing(), heads=2)
    with pytest.raises(CheckpointError, match=r"no patch_embed\.weight among 1 tensors"):
        load_prototype_encoder(saved({"weight": torch.zeros(2)}), small_preprocessing())
    with pytest.raises(CheckpointError, match="no tensors found"):
        load_prototype_encoder(saved({"epoch": 3}), small_preprocessing())
    with pytest.raises(CheckpointError, match="holds more than weights"):
        load_prototype_encoder(saved(old), small_preprocessing())
    with pytest.raises(CheckpointError, match=r"image_size .* not divisible by patch_size"):
        load_prototype_encoder(saved(state), Preprocessing(image_size=(9, 64, 32)), heads=2)
    (tmp_path / "x.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"holds more than weights|damaged"):
        load_prototype_encoder(tmp_path / "x.pt", small_preprocessing())
