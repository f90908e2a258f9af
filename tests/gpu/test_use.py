"""What is done with a trained network, on the device: vectors, layers, and fine-tuning for a label."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch

from octfm.encoder.encoder import load_encoder
from octfm.layers.finder import LayerFinder
from octfm.models.layer_net import MASKS, LayerNet, LayerNetConfig
from octfm.run.runtime import start
from octfm.tasks import finetune as tuning
from octfm.volume.volume import Volume
from support.finetune_runs import settings, write_labels
from support.small_store import darkened, small_store
from support.tiny_runs import config, quick_pretrain, quiet, rows

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A store with something to learn, and the labels."""
    folder = tmp_path_factory.mktemp("graded")
    return small_store(folder / "prepared", darkened), write_labels(folder / "labels.tsv")


@pytest.fixture(scope="module")
def run(device, graded, tmp_path_factory):
    return quick_pretrain(config(steps=3), graded[0], tmp_path_factory.mktemp("runs") / "run", device, echo=quiet)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_vectors_and_tokens_are_those_of_the_cpu(device, graded, run, precision):
    arrays = graded[0].read(range(8))
    exact, found = load_encoder(run, runtime=start("fp32", "cpu")), load_encoder(run, runtime=start(precision, device))
    expected, vectors = exact.embed_arrays(arrays), found.embed_arrays(arrays)
    cosine = (expected * vectors).sum(1) / np.linalg.norm(expected, axis=1) / np.linalg.norm(vectors, axis=1)
    assert vectors.dtype == np.float32 and cosine.min() > (1 - 1e-6 if precision == "fp32" else 0.999)
    if precision == "fp32":
        np.testing.assert_allclose(
            found.encode_grid(arrays.voxels), exact.encode_grid(arrays.voxels), rtol=1e-3, atol=1e-4
        )


def bscans() -> Volume:
    """Three B-scans with a bright band on a dark ground."""
    rng, row = np.random.default_rng(0), np.arange(192)[None, :, None]
    middle = 90 + 10 * np.sin(np.arange(160) / 30)[None, None, :] + np.arange(3)[:, None, None]
    voxels = 200 * np.exp(-(((row - middle) / 25) ** 2)) + rng.normal(30, 8, (3, 192, 160))
    return Volume(voxels.clip(0, 255).astype(np.uint8), (0.2, 0.0039, 0.0113))


def test_layers_are_found_where_the_cpu_finds_them(device):
    torch.manual_seed(0)
    network = LayerNet(LayerNetConfig((16, 16, 16)))
    # Lesions need scipy.
    masks = MASKS if find_spec("scipy") else ()
    expected = LayerFinder(network, masks=masks).find(bscans())
    found = LayerFinder(network, masks=masks, runtime=start(device=device)).find(bscans())
    assert np.isfinite(expected.rows).mean() > 0.5, "an untrained network finds something, too"
    both = np.isfinite(expected.rows) & np.isfinite(found.rows)
    # Convolutions round differently (TF32); where two paths are as likely, another one may win.
    assert (np.isfinite(expected.rows) == np.isfinite(found.rows)).mean() > 0.99
    assert (np.abs(expected.rows - found.rows)[both] < 0.1).mean() > 0.98
    assert (expected.lesions == found.lesions).mean() > 0.98


@pytest.mark.parametrize("way", ["finetune", "frozen", "lora"])
def test_fine_tuning_begins_like_the_cpus_and_learns(device, graded, run, tmp_path, monkeypatch, way):
    ways = {"finetune": {}, "frozen": {"lr_encoder": 0, "pool": "attention"}, "lora": {"lora_rank": 2}}
    if not find_spec("pyarrow") or not find_spec("scipy"):
        # Tables of predictions and intervals are written without the device, and need more packages.
        monkeypatch.setattr(tuning, "_write_result", lambda *_: None)
    chosen = settings(run, *graded, epochs=3, precision="fp32", **ways[way])
    losses = {}
    for name in dict.fromkeys(("cpu", device)):
        out = tuning.finetune(chosen, tmp_path / name, name, echo=quiet)
        losses[name] = [row["loss"] for row in rows(out)]
        assert (scores := [row["score"] for row in rows(out, "validation")]) and all(0 <= s <= 1 for s in scores)
    assert losses[device][:3] == pytest.approx(losses["cpu"][:3], rel=1e-3)
    assert np.mean(losses[device][-4:]) < np.mean(losses[device][:4])
