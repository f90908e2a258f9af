"""torchrun itself: ranks that are killed, nodes that leave, signals, over loopback with the real command line."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octfm.run import checkpoint, checkpoint_files
from support import ROOT
from support.ranks import Ranks
from support.tiny_runs import TINY, final, rows, tiny
from support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 30
CHANGES = ("data.per_device_batch_size=1", "ckpt_every_steps=4", "runtime.timeout_s=60")


@pytest.fixture(scope="module")
def undisturbed(store, tmp_path_factory):
    out, jobs = tmp_path_factory.mktemp("undisturbed") / "run", Ranks()
    settings = {"steps": STEPS, "data": {"global_batch_size": 4, "per_device_batch_size": 1}, "ckpt_every_steps": 4}
    try:
        assert [rank.code for rank in jobs(2, store.path, out, TINY | settings)] == [0, 0]
    finally:
        jobs.close()
    return final(out)


def torchrun(store: Path, out: Path, *options: str) -> subprocess.Popen:
    settings = [
        s
        for s in tiny(f"data.store={store}", *CHANGES)
        if not s.startswith(("steps=", "ckpt_every_steps=3", "data.per_device_batch_size=2"))
    ]
    command = [
        "bash",
        str(ROOT / "launch" / "torchrun.sh"),
        *options,
        "--",
        "pretrain",
        "vit_s",
        *settings,
        f"steps={STEPS}",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    with Path(f"{out}.said").open("a") as said:
        return subprocess.Popen(
            [*command, "--device", "cpu", "--out", str(out)],
            stdout=said,
            stderr=said,
            env=environment,
            start_new_session=True,
        )


def wait_for_step(out: Path, step: int, process: subprocess.Popen) -> None:
    def reached() -> bool:
        assert process.poll() is None, said(out)
        return (out / "metrics.jsonl").exists() and bool(rows(out)) and rows(out)[-1]["step"] >= step

    wait_until(reached, lambda: f"step {step}: {said(out)}", 300)


def ranks_of(launcher: subprocess.Popen) -> dict[int, int]:
    """Process ids by rank of the ranks that this launcher's agent has started; each is a session of its own."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = dict(e.split("=", 1) for e in (folder / "environ").read_text().split("\0") if "=" in e)
            if "RANK" in entries and parent(parent(int(folder.name))) == launcher.pid:
                found[int(entries["RANK"])] = int(folder.name)
        except OSError:
            continue
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def listens(port: int) -> bool:
    """Whether a process of this machine accepts connections at the port."""
    sockets = [
        line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
    ]
    return any(fields[1].endswith(f":{port:04X}") and fields[3] == "0A" for fields in sockets)


def said(out: Path) -> str:
    return Path(f"{out}.said").read_text()[-3000:]


def assert_undisturbed(out: Path, undisturbed: dict, exactly: bool = True) -> None:
    content = final(out)
    assert content["step"] == STEPS
    for name, tensor in undisturbed["model"].items():
        torch.testing.assert_close(
            content["model"][name], tensor, rtol=0 if exactly else 1e-2, atol=0 if exactly else 1e-3
        )
    assert [row["step"] for row in rows(out)] == list(range(STEPS)), "every step is told once"


def test_a_killed_rank_is_started_again_and_nothing_is_lost(store, undisturbed, tmp_path):
    out, rng = tmp_path / "run", random.Random(5)
    process = torchrun(store.path, out, "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    for step in (6, 17):
        wait_for_step(out, step, process)
        found = ranks_of(process)
        os.kill(found[rng.choice(sorted(found))], signal.SIGKILL)
    assert process.wait(timeout=400) == 0, said(out)
    assert_undisturbed(out, undisturbed)


def test_five_more_at_random_moments():
    done = subprocess.run(
        [sys.executable, "benchmarks/elastic.py", "--runs", "5"], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0 and "5 of 5 runs" in done.stdout, done.stdout + done.stderr[-2000:]


def test_an_error_in_the_settings_is_printed_once_not_by_every_rank():
    """Nor by every attempt: starting again changes no setting."""
    ranks = ["--standalone", "--nproc-per-node", "3", "--max-restarts", "2"]
    words = [*ranks, "--", "pretrain", "vit_s", "steps=none"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.count("octfm: override 'steps': ") == 1, done.stderr
    assert "Traceback" not in done.stderr and "ChildFailedError" not in done.stderr


def test_a_signal_to_torchrun_saves_and_ends_with_75(store, undisturbed, tmp_path):
    out = tmp_path / "run"
    options = ("--standalone", "--nproc-per-node", "2")
    process = torchrun(store.path, out, *options)
    wait_for_step(out, 3, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=200) == 75, said(out)
    assert 3 < final(out)["step"] < STEPS and said(out).count("SIGTERM: saved after") == 1
    assert torchrun(store.path, out, *options).wait(timeout=400) == 0, said(out)
    assert_undisturbed(out, undisturbed)


def test_a_node_that_leaves_lets_the_rest_go_on(store, undisturbed, tmp_path):
    """Two agents with one rank each, `--nnodes 1:2`; all processes of one get a SIGKILL."""
    out = tmp_path / "run"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    patience = "last_call_timeout=8,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "7",
               "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", patience, "--local-addr", "127.0.0.1")  # fmt: skip
    stays = torchrun(store.path, out, *options)
    wait_until(lambda: listens(port), "the rendezvous, which the first agent hosts", 120)
    leaves = torchrun(store.path, out, *options)
    try:
        wait_for_step(out, 4, stays)
        began = json.loads((out / "run.json").read_text())["environment"]["ranks"]
        (gone,) = ranks_of(leaves).values()
        os.killpg(leaves.pid, signal.SIGKILL)
        os.kill(gone, signal.SIGKILL)
        assert stays.wait(timeout=400) == 0, said(out)
    finally:
        for process in (stays, leaves):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert began == "2" and json.loads((out / "run.json").read_text())["environment"]["ranks"] == "1"
    assert checkpoint_files.step_of(checkpoint.newest(out)) == STEPS
    assert_undisturbed(out, undisturbed, exactly=False)
