"""What is done with a trained network, on the device: vectors, layers, and fine-tuning for a label."""

from importlib.util import find_spec

import numpy as np
import pytest

from octfm.encoder.encoder import load_encoder
from octfm.run.runtime import start
from octfm.tasks import finetune as tuning
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
