"""`octfm doctor --tpu`: a step compiled by libtpu for a TPU slice that is not there, and the memory of one of its
devices."""

import re

import pytest
import xla_devices  # noqa: F401
from typer.testing import CliRunner

from octfm.cli.main import app
from octfm.pretraining.learner import build_objective
from octfm.pretraining.preflight import tpu
from octfm.pretraining.settings import PretrainConfig
from octfm.volume.preprocessing import Preprocessing

for needed in ("torch_xla", "jax", "libtpu"):
    pytest.importorskip(needed, reason="an environment of its own is needed: make test-xla")
pytestmark = pytest.mark.timeout(1800)

VOLUMES = Preprocessing(image_size=(16, 128, 128), target_spacing=(0.375, 0.0156, 0.047))
SMALL = {
    "data": {"global_batch_size": 32, "per_device_batch_size": 1},
    "model": {"width": 48, "depth": 1, "heads": 2},
    "predictor": {"width": 48, "depth": 1, "heads": 2},
    "masks": {"budget": 128},
}


@pytest.fixture(autouse=True)
def as_a_user_has_it(monkeypatch):
    """What speeds up the CPU's programs is not meant for a TPU's."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def test_a_step_compiles_for_16_devices_with_a_share_of_the_batch_each():
    config = PretrainConfig.model_validate(SMALL)
    made = tpu.compile_step(config, VOLUMES, tpu.SLICES["v4-32"])
    assert made.trouble is None
    model = build_objective(config, VOLUMES)
    total, trained = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    weights, voxels = 4 * (total + 2 * trained), 2 * 16 * 128 * 128
    # The devices round up to their tiles; had the batch not been split, its voxels alone would be 8 MB.
    assert weights + voxels <= made.arguments < 1.3 * (weights + voxels) < 8e6
    assert 0 < made.temporaries < tpu.HBM and made.results < made.arguments, (
        "updated weights take the place of the old ones"
    )


def test_a_step_that_does_not_fit_is_an_answer_with_a_figure():
    """Twelve volumes of 9,216 tokens with eight heads on each device: what attention keeps is more than a device
    has."""
    config = PretrainConfig.model_validate(
        SMALL
        | {"data": {"global_batch_size": 48, "per_device_batch_size": 12}, "masks": {"budget": None}}
        | {part: {"width": 48, "depth": 1, "heads": 8} for part in ("model", "predictor")}
    )
    made = tpu.compile_step(config, Preprocessing(), tpu.SLICES["v4-8"])
    assert made.trouble is not None
    found = re.fullmatch(r"does not fit: ([\d.]+) GiB of temporaries on a device that has 30\.75", made.trouble)
    assert found and float(found[1]) > 30.75, made.trouble


def test_a_batch_that_does_not_divide_among_the_devices_is_told_at_once():
    done = CliRunner().invoke(
        app, ["doctor", "vit_s", "data.global_batch_size=24", "data.per_device_batch_size=1", "--tpu", "v4-32"]
    )
    assert (
        done.exit_code == 1
        and "FAIL  batch arithmetic" in done.output
        and "data.global_batch_size=16 or 32" in done.output
    ), done.output
