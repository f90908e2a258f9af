"""Programs run on a device that is not the CPU: no tensor of the host beside the device's, the CPU's numbers, and a host
that does not wait within an update. The device is torch's private-use backend (support/other_device.py); what only real
hardware shows is in tests/gpu."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octfm.config import load
from octfm.errors import ConfigError
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import device_named, precision_on
from support import TESTS
from support.device_traces import TRACES, metrics_of

SCRIPT = TESTS / "support" / "device_traces.py"
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}
"""Relative to the largest number of a kind. The CPU and the device use other kernels for products and attention."""


def traced(folder: Path, *jobs: str) -> dict[str, dict]:
    """What became of each job, DEVICE:PRECISION:TRACE."""
    command = [sys.executable, str(SCRIPT), str(folder), *jobs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(jobs, map(json.loads, done.stdout.splitlines()), strict=True))


def assert_agrees(found: dict, expected: dict, precision: str) -> None:
    assert "error" not in found, f"{found['trace']}: {found['error']}"
    assert found["numbers"].keys() == expected.keys()
    for name, values in expected.items():
        most = TOLERANCE[precision] * max(1e-3, *map(abs, values))
        assert found["numbers"][name] == pytest.approx(values, abs=most), (found["trace"], name)


def assert_never_waits(waits: list[list[str]]) -> None:
    """Steps 0 and 3 are looked at (health and log), and so is step 3 once it is repeated."""
    assert len(waits) == 6, "six updates: four, and the last two again"
    assert all(not step for step in (waits[1], waits[2], waits[4])), waits


@pytest.mark.slow
def test_pretraining_on_another_device_mixes_none_and_never_waits(tmp_path):
    found = traced(tmp_path, "other:fp32:vjepa2")["other:fp32:vjepa2"]
    assert_agrees(found, metrics_of(tmp_path / "made" / "run"), "fp32")
    assert_never_waits(found["waits"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_program_on_another_device_gives_the_cpus_numbers(precision, tmp_path):
    names = [name for name in TRACES if precision == "fp32" or name != "layers"]
    found = traced(tmp_path, *(f"{device}:{precision}:{name}" for name in names for device in ("cpu", "other")))
    for name in names:
        expected = found[f"cpu:{precision}:{name}"]
        assert "error" not in expected, expected
        assert_agrees(found[f"other:{precision}:{name}"], expected["numbers"], precision)
        if name in ("vjepa2", "mae", "warped", "summary", "vjepa2 without float64"):
            assert_never_waits(found[f"other:{precision}:{name}"]["waits"])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize(
    "name, message",
    [
        ("cuda", "finds no CUDA device here; use device cpu"),
        ("mps", "finds no Apple GPU here; use device cpu"),
        ("xla", "only octfm pretrain trains on XLA devices"),
        ("gpu", r"expected auto, cpu, cuda \(cuda:1 for the second\), mps or xla, got 'gpu'"),
        ("cuda:first", "expected auto, cpu, cuda"),
        ("cpu:1", "there are 1 of this kind here"),
        ("", "expected auto, cpu"),
    ],
)
def test_a_device_that_is_not_there_is_one_clear_line(name, message):
    with pytest.raises(ConfigError, match=message):
        device_named(name)
    assert device_named("auto") == device_named(None) == device_named("cpu") == torch.device("cpu")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has what is missed here")
def test_a_device_without_bfloat16_computes_in_float32_and_says_so(capsys):
    assert precision_on(torch.device("mps"), "bf16") == "fp32"
    (line,) = capsys.readouterr().err.splitlines()
    assert "no bfloat16" in line and line.endswith("computing in float32 instead")
    assert precision_on(torch.device("mps"), "fp32") == "fp32" and precision_on(torch.device("cpu"), "bf16") == "bf16"
    assert capsys.readouterr().err == ""


def test_device_xla_is_the_engine_of_that_name():
    config = load(PretrainConfig, {})
    changed, device = config.on_device("xla")
    assert (changed.runtime.parallel, device) == ("xla_spmd", None)
    assert changed.on_device("xla") == (changed, None) and config.on_device("cuda:1") == (config, "cuda:1")
    with pytest.raises(ConfigError, match=r"xla_spmd compiles every step"):
        load(PretrainConfig, {"objective": {"target_norm": "whiten"}}).on_device("xla")
    with pytest.raises(ConfigError, match="the settings say fsdp"):
        load(PretrainConfig, {"runtime": {"parallel": "fsdp"}}).on_device("xla")
