"""Memory and speed are told before step 0, and told right: the estimate is held against a real run in a process of its own."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from octfm.config import load
from octfm.data.loader import select
from octfm.data.preprocessing import Preprocessing
from octfm.training.preflight import data, resources
from octfm.training.preflight.cost import Speed, _step_cost, step_cost
from octfm.training.runtime import Runtime, start
from octfm.training.settings import PretrainConfig, load_config
from small_store import small_store
from test_pretrain import config


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "prepared")


def sized(width: int, batch: int, micro: int, budget: int, depth: int = 4) -> dict:
    return {
        "steps": 2, "precision": "fp32", "log_every_steps": 1, "data": {"global_batch_size": batch, "per_device_batch_size": micro},
        "model": {"patch_size": [2, 8, 8], "width": width, "depth": depth, "heads": 4},
        "predictor": {"width": 96, "depth": 2, "heads": 2}, "masks": {"budget": budget},
    }  # fmt: skip


PROCESS = """
import json, sys
from dataclasses import replace
from pathlib import Path
from octfm.config import load
from octfm.data.store import Store
from octfm.training import pretrain as loop
from octfm.training.settings import PretrainConfig
from octfm.training.tracking import read_metrics
store, out, tiny, settings = Store.open(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
loop.preflight.checks = lambda *words, **more: []
loop.pretrain(load(PretrainConfig, tiny), store, out / "tiny", "cpu", echo=lambda line: None)   # code and threads are not the step's
before = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
run = loop.pretrain(load(PretrainConfig, settings), store, out / "run", "cpu", echo=lambda line: None)
peak = max(row["peak_memory_gb"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train")
print(peak * 1e9 - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="needs /proc to tell what a process uses")
@pytest.mark.parametrize(
    "settings",
    [pytest.param(sized(384, 16, 8, 128), id="wide"), pytest.param(sized(192, 48, 48, 128), id="many volumes", marks=pytest.mark.slow)],
)
def test_F7_memory_estimate_is_within_20_percent_of_a_real_run(store, tmp_path, settings):
    """The prototype's pool died of memory that nobody had estimated."""
    tiny = sized(48, 2, 2, 16, depth=1)
    words = [sys.executable, "-c", PROCESS, str(store.path), str(tmp_path), json.dumps(tiny), json.dumps(settings)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    measured = float(done.stdout)
    micro = settings["data"]["per_device_batch_size"]
    steps = settings["data"]["global_batch_size"] // micro
    estimate = step_cost(load(PretrainConfig, settings), store.preprocessing, micro, steps).peak_bytes
    assert measured > 150e6, "too small to tell"
    assert estimate == pytest.approx(measured, rel=0.2)


def test_F7_too_little_memory_is_stopped_and_what_would_fit_is_told(store, monkeypatch):
    settings = load(PretrainConfig, sized(192, 48, 48, 128))
    full = step_cost(settings, store.preprocessing, 48, 1).peak_bytes / 1e9
    for free, status in ((2 * full, "PASS"), (full, "WARN"), (0.5 * full, "FAIL")):
        monkeypatch.setattr(Runtime, "free_memory_gb", lambda self, free=free: free)
        found = resources.memory(settings, store, start("fp32", "cpu"))
        assert found.status == status, found
    fitting = int(found.advice.split("data.per_device_batch_size=")[1].split(";")[0])
    assert 1 <= fitting < 48 and 48 % fitting == 0
    assert step_cost(settings, store.preprocessing, fitting, 48 // fitting).peak_bytes <= 0.5e9 * full
    monkeypatch.setattr(Runtime, "free_memory_gb", lambda self: 0.001)
    assert "not even one volume" in resources.memory(settings, store, start("fp32", "cpu")).measured


def test_estimate_of_a_large_model_needs_no_memory_and_no_minutes():
    """ViT-S on full-size volumes: 2.5 TFLOP and gigabytes of activations, told by a laptop."""
    cost = step_cost(load_config("vit_s"), Preprocessing(), 8, 4)
    assert 2e9 < cost.peak_bytes < 8e9 and 5e12 < cost.flops < 2e13
    assert cost.peak_bytes > step_cost(load_config("vit_s"), Preprocessing(), 4, 8).peak_bytes


def test_estimating_leaves_no_trace_in_the_random_state(store):
    import torch

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _step_cost.cache_clear()
    step_cost(config(), store.preprocessing, 2, 2)
    resources.parameters(config(), store)
    assert torch.equal(torch.rand(3), expected)


def test_F8_a_store_that_is_slower_than_the_device_is_named(store, monkeypatch):
    """6 to 10 minutes per volume from a bucket: validation was logged, a training metric never came."""
    sample = data.read_sample(config(), store, select(store, "train"))
    monkeypatch.setattr(resources, "measure_speed", lambda *words: Speed(1e12, 1e12, 1e9))
    slow = resources.forecast(config(steps=1000), store, start("fp32", "cpu"), replace(sample, volumes_per_s=1 / 480))
    assert slow.status == "WARN" and "the device would wait 100% of the time" in slow.measured
    assert "1,000 steps take about 22.2 days" in slow.measured
    fast = resources.forecast(config(steps=1000), store, start("fp32", "cpu"), replace(sample, volumes_per_s=1e9))
    assert fast.status == "PASS"


def test_durations_are_told_as_people_tell_them():
    assert [resources.duration(s) for s in (0.041, 12, 600, 12600, 400_000)] == ["41 ms", "12 s", "10 min", "3.5 h", "4.63 days"]
