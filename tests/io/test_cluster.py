"""prepare on a real dask cluster of two worker processes on loopback: the same store, and bad files end no worker."""

import subprocess
import sys

import pytest

from octfm.errors import ConfigError
from octfm.io.isolation import Limits
from octfm.store.prepare import prepare
from support.store_samples import SMALL, acquisition, catalog, content, read_sample


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None, protocol="tcp://"
    ) as running:
        yield running


@pytest.mark.slow
def test_a_dask_cluster_prepares_the_store_that_one_process_prepares(cluster, tmp_path):
    files = [
        acquisition(n, {3: "truncated", 5: "crashes", 7: "slow", 8: "swallows"}.get(n, "reads")) for n in range(14)
    ]
    before = {worker.pid for worker in cluster.workers.values()}
    there = prepare(
        catalog(files), tmp_path / "there", SMALL, progress=False, read=read_sample, cluster=cluster.scheduler_address
    )
    prepare(catalog(files), tmp_path / "here", SMALL, workers=1, progress=False, read=read_sample)
    assert content(tmp_path / "there") == content(tmp_path / "here") and len(there) == 11
    assert [u.code for u in there.unprepared()] == ["truncated_pixel_data", "decoder_crashed", "decoder_memory"]
    assert {worker.pid for worker in cluster.workers.values()} == before, "the crash was in a child of a worker"


@pytest.mark.slow
def test_a_cluster_that_is_not_there_is_an_error_and_not_a_wait(tmp_path):
    with pytest.raises(ConfigError, match=r"no dask scheduler answers at tcp://127\.0\.0\.1:9"):
        prepare(
            catalog([acquisition(0)]),
            tmp_path / "store",
            SMALL,
            progress=False,
            read=read_sample,
            cluster="tcp://127.0.0.1:9",
        )


REFUSED = """
import sys
from octfm.errors import ConfigError
from octfm.io.spread import require_cluster
for address in sys.argv[1:]:
    try:
        require_cluster(address)
    except ConfigError as error:
        print(error)
"""


@pytest.mark.slow
def test_an_address_that_dask_cannot_use_is_an_error_before_dask_begins():
    """Else dask says so in a traceback at the end of the process."""
    addresses = ["nan", "127.0.0.1:9", "tcp://127.0.0.1", "ftp://a:1", "tls://127.0.0.1:9"]
    done = subprocess.run([sys.executable, "-c", REFUSED, *addresses], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    said = done.stdout.splitlines()
    assert (
        len(said) == 5 and all(line.startswith("cluster: ") for line in said[:4]) and said[4].startswith("cluster tls")
    )


@pytest.mark.slow
def test_limits_travel_to_the_cluster(cluster, tmp_path):
    files = [acquisition(0), acquisition(1, "hangs")]
    store = prepare(
        catalog(files),
        tmp_path / "store",
        SMALL,
        progress=False,
        read=read_sample,
        cluster=cluster.scheduler_address,
        limits=Limits(seconds=3),
    )
    assert [u.code for u in store.unprepared()] == ["decoder_timeout"]
