"""Sharded checkpoints in buckets: two ranks write one, all of it arrives whatever fails on the way, and other ranks
elsewhere go on."""

import os

import pytest
import torch

from octfm.encoder.encoder import load_encoder
from octfm.io import bucket
from octfm.run.bucket import local_run, read_pointer
from support.bucket_servers import ENDPOINT
from support.ranks import codes
from support.tiny_runs import TINY, assert_same_training, rows

SETTINGS = TINY | {
    "data": {"global_batch_size": 4, "per_device_batch_size": 1},
    "model": {**TINY["model"], "width": 24},
    "ckpt_every_steps": 2,
    "runtime": {"parallel": "fsdp", "timeout_s": 90},
}
buckets = pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture(scope="module")
def on_disk(ranks, store, tmp_path_factory):
    """The same run of two ranks on a local disk."""
    out = tmp_path_factory.mktemp("run") / "run"
    assert codes(ranks(2, store.path, out, SETTINGS)) == [0, 0]
    return out


def surroundings(place, cache) -> dict[str, str]:
    """What ranks are told of this test's bucket, and the disk of their machine."""
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_DEFAULT_REGION",
        "AWS_EC2_METADATA_DISABLED",
        ENDPOINT[place.scheme],
    )
    return {name: os.environ[name] for name in names} | {"OCTFM_CACHE": str(cache)}


@pytest.mark.slow
@buckets
def test_ranks_on_another_machine_go_on_with_shards_in_a_bucket(ranks, place, store, on_disk, tmp_path):
    """Stopped after step 5, a shard of whose checkpoint is then damaged in the bucket: the next machine begins at
    the one before."""
    here, there = (surroundings(place, tmp_path / name) for name in ("here", "there"))
    to = str(place / "run")
    ended = ranks(2, store.path, tmp_path / "a", SETTINGS, to=to, environment=here, fault="term", at=4, on=1)
    assert codes(ended) == [75, 75], ended
    pointer = read_pointer(place / "run")
    assert list(pointer["checkpoints"]) == ["step-00000004.dcp", "step-00000005.dcp"]
    names = {entry["key"].rsplit("/", 1)[1] for entry in pointer["checkpoints"]["step-00000005.dcp"]}
    assert names == {"__0_0.distcp", "__1_0.distcp", ".metadata", "rest.pt", "manifest.json"}
    shard = f"{to}/checkpoints/step-00000005.dcp/__1_0.distcp"
    bucket.write(shard, bucket.read(shard)[:-1] + b"x")
    ended = ranks(2, store.path, tmp_path / "b", SETTINGS, to=to, environment=there)
    assert codes(ended) == [0, 0] and "after 4 updates" in ended[0].said, ended
    copy = local_run(place / "run")
    assert_same_training(copy, on_disk)
    assert [row["step"] for row in rows(copy)] == list(range(8)), "no step is told twice and none is missing"
    assert {path.suffix for path in (copy / "checkpoints").iterdir()} == {".dcp"}
    networks = [load_encoder(run, device="cpu").network for run in (on_disk, to)]
    assert all(torch.equal(a, b) for a, b in zip(*(n.parameters() for n in networks), strict=True))
    listed = {uri.removeprefix(f"{to}/checkpoints/").split("/")[0] for uri in bucket.find(f"{to}/checkpoints")}
    assert listed == {"step-00000006.dcp", "step-00000008.dcp"}, "retention deletes whole folders"


@pytest.mark.parametrize("faulty", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "gs")], indirect=True)
def test_with_a_tenth_of_requests_spoilt_no_shard_is_lost(ranks, faulty, store, on_disk, tmp_path):
    place, proxy = faulty
    to = str(place / "run")
    ended = ranks(
        2,
        store.path,
        tmp_path / "a",
        SETTINGS | {"ckpt_every_steps": 1},
        to=to,
        environment=surroundings(place, tmp_path / "here"),
    )
    assert codes(ended) == [0, 0], ended
    assert_same_training(local_run(place / "run"), on_disk)
    told = rows(next((tmp_path / "here" / "runs").glob("*/run")), "bucket")
    assert proxy.spoilt.total() > 5 and told[-1]["retries"] > 0 and told[-1]["failures"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", "gs"], indirect=True)
def test_ranks_killed_while_shards_are_sent_leave_whole_checkpoints(ranks, place, store, on_disk, tmp_path):
    """Both at once, at any moment; each next attempt is another machine's, which knows what the bucket says and
    nothing else."""
    to, said = str(place / "run"), []
    for number, seconds in enumerate((1.5, 2.0, 2.5, 3.0, 4.0, 6.0)):
        own = surroundings(place, tmp_path / f"machine {number}")
        ended = ranks(
            2, store.path, tmp_path / f"{number}", SETTINGS, to=to, environment=own, kill_after=seconds, killed=[0, 1]
        )
        said.append(codes(ended))
        bucket.delete(f"{to}/run.lease")  # it would be stale in three minutes
        for entries in (read_pointer(place / "run") or {"checkpoints": {}})["checkpoints"].values():
            assert all(len(bucket.read(f"{to}/{entry['key']}")) == entry["bytes"] for entry in entries)
    assert [-9, -9] in said, said
    assert codes(
        ranks(
            2,
            store.path,
            tmp_path / "last",
            SETTINGS,
            to=to,
            environment=surroundings(place, tmp_path / "last machine"),
        )
    ) == [
        0,
        0,
    ]
    assert_same_training(local_run(place / "run"), on_disk)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_ranks_that_see_different_folders_are_stopped_before_step_0(ranks, place, store, tmp_path):
    own = [surroundings(place, tmp_path / name) for name in ("one host", "another host")]
    settings = SETTINGS | {"runtime": {"parallel": "fsdp", "timeout_s": 12}}
    ended = ranks(2, store.path, tmp_path / "a", settings, to=str(place / "run"), environment=own)
    assert codes(ended) == [1, 1] and "rank 1 does not see rank 0's run folder" in ended[0].said, ended
    assert "$OCTFM_CACHE, on a disk that all hosts share" in ended[0].said
