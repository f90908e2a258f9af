"""Several hosts with addresses of their own: network namespaces of this machine, joined by a virtual cable."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from support import ROOT
from support.ranks import Ranks
from support.small_store import small_store
from support.tiny_runs import TINY, final, tiny

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ADDRESSES = ("10.213.7.1", "10.213.7.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, in which `oct` is a network card and nothing else reaches the other one."""
    if shutil.which("ip") is None:
        pytest.skip("needs the command ip (iproute2)")
    names = tuple(f"octfm-{os.getpid()}-{number}" for number in (0, 1))
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", "oct", "netns", names[0], "type", "veth", "peer", "name", "oct", "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "oct")
                ip("-n", name, "link", "set", "oct", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine does not allow network namespaces: {error.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def test_two_hosts_train_what_two_ranks_of_one_host_train(hosts, tmp_path):
    """torchrun on each, which meet at the address of the first; the weights are the same, bit for bit."""
    store = small_store(tmp_path / "prepared")
    data = {"global_batch_size": 4, "per_device_batch_size": 1}
    jobs = Ranks()
    try:
        assert [rank.code for rank in jobs(2, store.path, tmp_path / "one", TINY | {"steps": 6, "data": data})] == [
            0,
            0,
        ]
    finally:
        jobs.close()

    settings = [
        s for s in tiny(f"data.store={store.path}") if not s.startswith(("steps=", "data.per_device_batch_size="))
    ]
    settings += ["steps=6", "data.per_device_batch_size=1", "runtime.timeout_s=120"]
    meet = (
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "--rdzv-backend",
        "c10d",
        "--rdzv-id",
        "job",
        "--rdzv-endpoint",
        f"{ADDRESSES[0]}:29411",
    )
    running = []
    for number, (name, address) in enumerate(zip(hosts, ADDRESSES, strict=True)):
        # Which of them serves torchrun could tell from host names only, and these have one name.
        launcher = [
            "bash",
            str(ROOT / "launch" / "torchrun.sh"),
            *meet,
            "--local-addr",
            address,
            "--rdzv-conf",
            f"is_host={1 - number}",
        ]
        train = ["pretrain", "vit_s", *settings, "--device", "cpu", "--out", str(tmp_path / "two")]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "oct"}
        said = (tmp_path / f"said-{name[-1]}").open("w")
        command = ["ip", "netns", "exec", name, *launcher, "--", *train]
        running.append(subprocess.Popen(command, stdout=said, stderr=said, env=environment))
    try:
        codes = [process.wait(timeout=800) for process in running]
    finally:
        for process in running:
            process.kill()
    assert codes == [0, 0], [(tmp_path / f"said-{n}").read_text()[-2000:] for n in (0, 1)]
    asked = ["ip", "-json", "-stats", "-n", hosts[0], "link", "show", "oct"]
    sent = json.loads(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)[0]["stats64"]["tx"][
        "bytes"
    ]
    one, two = final(tmp_path / "one"), final(tmp_path / "two")
    assert one["step"] == two["step"] == 6
    assert all(torch.equal(tensor, two["model"][name]) for name, tensor in one["model"].items())
    # A ring all-reduce among two: every host sends as many bytes as its gradients have, once per update; validation and
    # talk come on top.
    trained = sum(tensor.numel() for name, tensor in one["model"].items() if not name.startswith("target_encoder."))
    print(f"the first host sent {sent:,} bytes, {sent / (6 * 4 * trained):.3f} times its gradients")
    assert 1 < sent / (6 * 4 * trained) < 1.5
    assert "step      6/6" in (tmp_path / "said-0").read_text() + (tmp_path / "said-1").read_text()
