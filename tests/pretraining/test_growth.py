"""benchmarks/growth.py: exponents of known curves, the least work first, and a call that goes on where another was
stopped."""

import json
import subprocess
import sys

import pytest

from support import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import growth


def test_exponents_are_those_of_the_curve():
    found = [{"tokens": n, "cpu_s": 3e-6 * n**1.5} for n in (256, 576, 9216)]
    assert growth.exponents(found, "tokens", "cpu_s") == pytest.approx([1.5, 1.5])


def test_the_least_work_comes_first_and_too_much_is_left_out():
    work = [growth.prod(growth.grid_of(size)) * batch for size, batch, _ in growth.points(2048)]
    assert work == sorted(work) and work[-1] == 2048 and growth.points(9216)[-1] == ((64, 384, 384), 1, "checkpointing")


@pytest.mark.slow
def test_a_step_is_measured_once_and_needs_no_more_memory_with_checkpointing(tmp_path):
    command = [
        sys.executable,
        str(BENCHMARKS / "growth.py"),
        "--out",
        str(tmp_path),
        "--most",
        "256",
        "--rounds",
        "1",
        "--precision",
        "fp32",
    ]

    def run() -> tuple[str, list[dict]]:
        told = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout
        return told, json.loads((tmp_path / "growth.json").read_text())

    told, done = run()
    assert told.count("256 tokens x 1") == 2 and {row["mode"] for row in done} == {"kept", "checkpointing"}
    memory = {row["mode"]: row["gb"] for row in done}
    assert 0.1 < memory["checkpointing"] < memory["kept"] + 0.01, "activations of so few tokens are a few megabytes"
    assert (tmp_path / "growth.png").stat().st_size > 5000
    told, again = run()
    assert again == done and "tokens x" not in told
