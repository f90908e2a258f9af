"""The GPU path as far as it can be proved without a GPU: what `make gpu` runs is rehearsed on the CPU, packed for a
machine without network and unpacked again; the roofline counts what the doctor counts."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict

import pytest

from octfm.models.vit3d import count_parameters
from octfm.pretraining.learner import build_objective
from octfm.pretraining.preflight.cost import step_cost
from support import ROOT
from support.light_python import light_python
from support.small_store import small_preprocessing
from support.tiny_runs import config

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu as bench
import roofline


@pytest.mark.slow
def test_the_roofline_counts_the_arithmetic_that_the_doctor_counts():
    settings, pre = config(precision="fp32"), small_preprocessing()
    works = roofline.micro_batch_work(settings, pre, 5)
    assert sum(work.flops for work in works) == pytest.approx(step_cost(settings, pre, 5, 1).flops, rel=1e-6)
    of = defaultdict(float)
    for work in works:
        of[work.kind] += work.moved
    assert set(of) == {"attention", "products", "elementwise", "input, embedding", "loss"}
    # Patches of 128 voxels for 48 channels, teacher and student; 64 and 22 of 128 tokens, the student's three times.
    embedding = sum(work.flops for work in works if work.kind == "input, embedding")
    assert embedding == 5 * 2 * 128 * 48 * (64 + 2 * 22)
    model = build_objective(settings, pre)
    average = [work for work in roofline.update_work(settings, pre) if work.kind == "average (EMA)"]
    assert sum(work.moved for work in average) == pytest.approx(12 * count_parameters(model.target_encoder))


@pytest.mark.slow
def test_a_prediction_is_bound_by_what_takes_longest():
    settings, pre, gpu = config(precision="bf16"), small_preprocessing(), roofline.GPUS[-1]
    eager, compiled = (roofline.predict(settings, pre, gpu, 2, 1, graph) for graph in (False, True))
    assert eager.bounded_by == "host" and eager.step_ms == eager.host_ms > sum(eager.ms.values())
    assert compiled.step_ms == sum(compiled.ms.values()) < eager.step_ms and compiled.flops == eager.flops
    assert compiled.ms["elementwise"] < eager.ms["elementwise"]
    twice = roofline.predict(settings, pre, gpu, 2, 2)
    assert twice.flops == 2 * eager.flops and twice.ms["average (EMA)"] == pytest.approx(eager.ms["average (EMA)"])


def test_larger_batches_are_not_tried_where_smaller_did_not_fit():
    cell = bench.Cell("update", batch=32)
    done = {bench.Cell("update", batch=16).name: {"trouble": "does not fit"}}
    assert bench.too_large(cell, done) and not bench.too_large(bench.Cell("update", batch=8), done)
    assert not bench.too_large(bench.Cell("update", batch=32, mode="graph"), done)


def test_every_cell_of_the_plan_has_a_measurement_and_its_own_name():
    planned = bench.cells(peer=True, rehearse=False)
    rehearsed = bench.cells(peer=True, rehearse=True)
    assert all(callable(getattr(bench.Worker, cell.kind)) for cell in [*planned, *rehearsed])
    assert {cell.image for cell in planned} == {(64, 384, 384), (32, 192, 192)}
    updates = [cell for cell in planned if cell.kind == "update"]
    assert {cell.mode for cell in updates} == {"eager", "compiled", "graph", "compiled graph", "whole compiled"}
    # The first minutes have to tell the most: rates, updates of both networks, the loop.
    assert [cell.kind for cell in planned[:4]] == ["peak", "update", "update", "update"]
    assert "train" in {cell.kind for cell in planned[4:8]}


def run(words, **environment):
    own = {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([str(w) for w in words], capture_output=True, text=True, env=os.environ | own, timeout=3400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_make_gpu_is_rehearsed_from_a_bundle_in_a_bare_environment(tmp_path):
    """The tests and the benchmark of the GPU path, unpacked elsewhere, with the packages of a bare image alone."""
    packed = run([ROOT / "launch" / "gpu_bundle.sh", tmp_path / "bundle.tar.gz", "--no-wheels"])
    assert packed.returncode == 0, packed.stderr
    subprocess.run(["tar", "xzf", tmp_path / "bundle.tar.gz", "-C", tmp_path], check=True)
    python, out = light_python(tmp_path / "light"), tmp_path / "out"
    absent = run([python, "-c", "import scipy"])
    assert absent.returncode == 1 and "No module named 'scipy'" in absent.stderr
    words = [tmp_path / "octfm-gpu" / "launch" / "gpu.sh", "--out", out, "--rehearse", "--minutes", "15"]
    done = run(words, PYTHON=str(python), OCTFM_GPU_TESTS_S="2400")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed, skipped = (int(n) for n in re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups())
    assert passed >= 20 and skipped == 4, "only graphs and CUDA's allocator are not rehearsed"
    content = json.loads((out / "gpu.json").read_text())
    planned = bench.cells(peer=False, rehearse=True)
    assert not [answer for answer in content["cells"].values() if "trouble" in answer]
    assert content["cells"].keys() == {cell.name for cell in planned}
    assert all(row["ms"] > 0 and row["predicted_ms"] > 0 for row in content["updates"])
    # A rerun measures what is missing, and nothing else.
    (out / "cells" / f"{planned[1].name}.json").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    again = run(words, PYTHON=str(python))
    assert again.returncode == 0 and "passed" not in again.stdout and planned[1].name in again.stdout
    after = {path.name: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    assert before.items() < after.items() and len(after) == len(before) + 1


@pytest.mark.slow
def test_a_cell_that_outlasts_its_limit_does_not_hold_up_the_others(tmp_path, monkeypatch):
    """The worker is ended and another one measures on."""
    chosen = bench.argparse.Namespace(out=tmp_path, peer="", rehearse=True, minutes=10.0, worker=False, only=None)
    hurried, last = bench.cells(peer=False, rehearse=True)[:2]
    plan = [bench.replace(hurried, limit_s=-59.9), last]
    monkeypatch.setattr(bench, "cells", lambda *_: plan)
    done = bench.measure(chosen)
    assert done[hurried.name] == {"trouble": "not within 0 s"} and done[last.name]["ms"] > 0
