"""Runs in a bucket: nothing is lost, another machine goes on, and a bucket that is away never stops training."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octfm.encoder.encoder import load_encoder
from octfm.errors import BucketError, CheckpointError, ConfigError, EvaluationError
from octfm.io import bucket
from octfm.io.location import location
from octfm.pretraining import resume
from octfm.pretraining.pretrain import pretrain
from octfm.report.watch import follow
from octfm.run import bucket as bucket_run
from octfm.run import checkpoint, checkpoint_files
from octfm.run.bucket import local_run, mirror_of, read_pointer
from octfm.run.checkpoint_files import name_of
from octfm.run.checkpoint_writer import Failure, Retention
from octfm.run.loop import Session
from octfm.run.tracking import read_metrics
from support.bucket_servers import ENDPOINT, SECRET, FaultyProxy
from support.command_line import invoke
from support.probe_cohort import Cohort
from support.tiny_runs import assert_same_training, config, final, quick_pretrain, quiet

SLOW = pytest.mark.slow
buckets = pytest.mark.parametrize("place", ["s3", "gs"], indirect=True)
faults = pytest.mark.parametrize("faulty", ["s3", "gs"], indirect=True)


@pytest.fixture(scope="module")
def on_disk(store, tmp_path_factory):
    """The same run on a local disk."""
    return quick_pretrain(config(), store, tmp_path_factory.mktemp("run") / "run", "cpu", echo=lambda _: None)


class Stop(Exception):
    pass


def stop_after(step: int):
    def echo(text: str) -> None:
        if text.startswith(f"step {step:>6}/"):
            raise Stop

    return echo


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_another_machine_goes_on_with_a_run_in_a_bucket(place, store, on_disk, tmp_path, monkeypatch):
    with pytest.raises(Stop):
        quick_pretrain(config(), store, place / "run", "cpu", echo=stop_after(5))
    told = []
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    # Of a process that was killed while it fetched the run: it may fill the disk that this one fetches to.
    fetched, fetch = mirror_of(place / "run").with_name(".run.77"), bucket_run._fetch
    fetched.mkdir(parents=True)

    def watched(*to, **how):
        assert not fetched.exists()
        fetch(*to, **how)

    monkeypatch.setattr(bucket_run, "_fetch", watched)
    quick_pretrain(config(), store, str(place / "run"), "cpu", echo=told.append)
    assert any("after 3 updates" in line for line in told)
    assert f"pretraining done: 8 updates, checkpoint {place}/run/checkpoints/step-00000008.pt" in told
    assert_same_training(local_run(place / "run"), on_disk)
    pointer = read_pointer(place / "run")
    assert list(pointer["checkpoints"]) == ["step-00000006.pt", "step-00000008.pt"], (
        "the retention of the run holds in the bucket"
    )
    objects = {uri.removeprefix(f"{place}/run/") for uri in bucket.find(str(place / "run"))}
    assert objects >= {"config.yaml", "run.json", "metrics.jsonl", "checkpoints.json"} and "run.lease" not in objects
    assert {name for name in objects if name.startswith("checkpoints/")} == {
        f"checkpoints/{name}" for name in pointer["checkpoints"]
    }
    steps = [row["step"] for row in read_metrics(local_run(place / "run") / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == list(range(8)), "no step is told twice and none is missing"
    here, there = (load_encoder(run, device="cpu") for run in (on_disk, str(place / "run")))
    assert all(torch.equal(a, b) for a, b in zip(here.network.parameters(), there.network.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_another_machine_keeps_the_last_healthy_checkpoint_and_goes_back_to_it(place, store, tmp_path, monkeypatch):
    """It fetches the two newest; trouble since an older one must not lose that one."""
    healthy = {2}
    monkeypatch.setattr(resume, "_healthy", lambda content, config: content["step"] in healthy)
    settings = config(steps=7, ckpt_every_steps=1, keep_checkpoints=2)
    with pytest.raises(Stop):
        quick_pretrain(settings, store, place / "run", "cpu", echo=stop_after(5))
    assert "step-00000002.pt" in read_pointer(place / "run")["checkpoints"]
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    quick_pretrain(settings, store, str(place / "run"), "cpu", echo=lambda _: None)
    assert "step-00000002.pt" in read_pointer(place / "run")["checkpoints"]
    assert (mirror_of(place / "run") / "checkpoints" / "step-00000002.pt").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
@pytest.mark.parametrize("kept", [0, 1])
def test_a_run_whose_local_checkpoints_were_cleared_goes_on_from_those_in_the_bucket(place, store, kept):
    """It began anew, as if there were none, or had the bucket forget its newer ones."""
    settings = config(steps=4, ckpt_every_steps=1, keep_checkpoints=3)
    with pytest.raises(Stop):
        quick_pretrain(settings, store, place / "run", "cpu", echo=stop_after(3))
    newest = max(read_pointer(place / "run")["checkpoints"])
    for path in checkpoint_files.steps(mirror_of(place / "run") / "checkpoints")[kept:]:
        path.unlink()
    told = []
    quick_pretrain(settings, store, place / "run", "cpu", echo=told.append)
    assert any(f"after {int(newest[5:13])} updates" in line for line in told)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_file_of_a_tracker_that_vanishes_holds_nothing_up(place, store, monkeypatch):
    """The metrics after it stayed behind, and the next start waited for a lease that nobody held."""
    upload = bucket.upload

    def vanishing(file, uri):
        if file.name == "debug.log":
            raise FileNotFoundError(file)
        upload(file, uri)

    def echo(text):
        if text.startswith("step"):
            log = mirror_of(place / "run") / "a tracker" / "debug.log"
            log.parent.mkdir(exist_ok=True)
            log.write_text(text)

    monkeypatch.setattr(bucket, "upload", vanishing)
    quick_pretrain(config(steps=1), store, place / "run", "cpu", echo=echo)
    found = {uri.removeprefix(f"{place}/run/") for uri in bucket.find(f"{place}/run")}
    assert "checkpoints/step-00000001.pt" in found and "run.lease" not in found


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_copies_of_a_growing_run_that_nobody_reads_any_more_leave_the_disk(place, store):
    """Each probe of a run in progress left two checkpoints in the cache for good, beyond its limit."""
    with pytest.raises(Stop):
        quick_pretrain(config(), store, place / "run", "cpu", echo=stop_after(5))
    first = local_run(place / "run")
    quick_pretrain(config(), store, place / "run", "cpu", echo=lambda _: None)
    second = local_run(place / "run")
    assert first.is_dir() and first != second, "somebody may be reading it"
    left = first.with_name(".run.1")  # by a process that was killed
    left.mkdir()
    os.utime(left, (0, 0))
    shutil.rmtree(second)
    assert local_run(place / "run") == second and first.is_dir() and not left.exists()
    os.utime(first, (0, 0))
    shutil.rmtree(second)
    assert local_run(place / "run") == second and not first.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_rollback_that_a_kill_kept_from_the_bucket_is_sent_by_the_next_start(place, store, tmp_path, monkeypatch):
    """Another machine went on with what training had gone back from."""
    settings = config(ckpt_every_steps=1, keep_checkpoints=3)
    with pytest.raises(Stop):
        quick_pretrain(settings, store, place / "run", "cpu", echo=stop_after(6))
    folder = mirror_of(place / "run") / "checkpoints"
    content = checkpoint.load(folder / name_of(3))
    # A process goes back to step 3, saves that, and is killed before it sends anything.
    for step in (4, 5):
        (folder / name_of(step)).unlink()
    back = {"rollbacks": [{"at": 4, "to": 3, "what": "loss spike"}], "offset": 2}
    checkpoint.write(folder, 3, content | {"state": content["state"] | back})
    with pytest.raises(Stop):
        quick_pretrain(settings, store, place / "run", "cpu", echo=stop_after(4))
    assert list(read_pointer(place / "run")["checkpoints"]) == [name_of(3)]
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    quick_pretrain(settings, store, str(place / "run"), "cpu", echo=lambda _: None)
    assert final(local_run(place / "run"))["state"]["offset"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_a_run_in_a_bucket_is_probed_and_watched_from_another_machine(place, store, tmp_path, monkeypatch):
    """What is added to the run later counts, too: nothing is looked up in an old copy."""
    run = str(place / "run")
    quick_pretrain(config(steps=2), store, run, "cpu", echo=lambda _: None)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    cohort, seen = Cohort(), []
    for signal in (0.0, 6.0):
        file = cohort.embeddings(tmp_path / "pretrained.parquet", signal=signal)
        bucket.write(f"{run}/embeddings/pretrained.parquet", file.read_bytes())
        labels = str(cohort.labels(tmp_path / "labels.tsv"))
        told = invoke("probe", run, "--labels", labels, "--target", "diagnosis", "--allow-seen")
        assert told.exit_code == 0 and told.stdout.splitlines()[-1] == f"{run}/probe.json", told
        results = json.loads(bucket.read(f"{run}/probe.json"))["results"]
        seen.append(next(row["estimate"] for row in results if row["metric"] == "auroc"))
    assert seen[1] > 0.9 > seen[0]

    metrics = place / "run" / "metrics.jsonl"
    assert [row["step"] for row in follow(metrics) if row["kind"] == "train"] == [0, 1]
    before = bucket.read(f"{run}/metrics.jsonl")
    bucket.write(f"{run}/metrics.jsonl", before + b'{"kind": "train", "step": 2}\n')
    assert [row["step"] for row in follow(metrics) if row["kind"] == "train"] == [0, 1, 2]
    told = invoke("watch", run, "--once")
    assert told.exit_code == 0 and "step 3 of 2" in told.output and told.output.startswith("run "), told
    told = invoke("watch", f"{place}/nowhere", "--once")
    assert isinstance(told.exception, EvaluationError) and "expected a run folder" in str(told.exception)


def test_a_run_does_not_end_as_if_the_bucket_had_its_last_checkpoint():
    last, place = Path("step-00000008.pt"), SimpleNamespace(where="s3://b/run", before=bucket.tally())
    here = SimpleNamespace(leads=False, first=lambda function: function())
    training = SimpleNamespace(step=8, runtime=here, tracking=SimpleNamespace(step_deadline_s=60.0))
    writer = SimpleNamespace(remote=place, finish=lambda: None, failures=lambda: [Failure(8, "it is whole, but", True)])
    metrics = SimpleNamespace(write=lambda *_, **__: None)
    run = SimpleNamespace(last_checkpoint=lambda: last, path=Path("run"))
    session = Session(training, run, metrics, writer, echo=quiet)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match=r"s3://b/run: the bucket lacks the checkpoint after step 8; it is step-"):
        session.finish()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_run_whose_last_checkpoint_finds_no_room_on_its_way_to_the_bucket_sends_it_later(place, store, on_disk):
    outbox = mirror_of(place / "run") / ".outbox"

    def echo(text: str) -> None:
        if text.startswith(f"step {1:>6}/"):
            outbox.touch()  # as a full disk, it takes no copy

    lacks = r"the bucket lacks the checkpoint after step 8; it is .*step-00000008\.pt, and the same command .* sends it"
    with pytest.raises(CheckpointError, match=lacks):
        quick_pretrain(config(), store, place / "run", "cpu", echo=echo)
    told = [
        row["sentence"]
        for row in read_metrics(mirror_of(place / "run") / "metrics.jsonl")
        if row["kind"] == "checkpoint"
    ]
    assert len(told) == 3 and all("is whole, but" in each and "not written" not in each for each in told)
    outbox.unlink()
    quick_pretrain(config(), store, place / "run", "cpu", echo=lambda _: None)
    assert "step-00000008.pt" in read_pointer(place / "run")["checkpoints"]
    assert_same_training(mirror_of(place / "run"), on_disk)


@pytest.mark.slow
@buckets
def test_a_damaged_checkpoint_in_the_bucket_falls_back_to_the_one_before(place, store, on_disk, tmp_path, monkeypatch):
    quick_pretrain(config(), store, place / "run", "cpu", echo=lambda _: None)
    uri = str(place / "run" / "checkpoints" / "step-00000008.pt")
    bucket.write(uri, bucket.read(uri)[:-1000] + b"x" * 1000)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    told = []
    quick_pretrain(config(), store, place / "run", "cpu", echo=told.append)
    assert any("after 6 updates" in line for line in told)
    assert_same_training(local_run(place / "run"), on_disk)


@pytest.mark.parametrize("faulty", ["gs", pytest.param("s3", marks=SLOW)], indirect=True)
def test_training_survives_a_tenth_of_requests_failing_and_reports_it(faulty, store, on_disk, tmp_path, monkeypatch):
    place, proxy = faulty

    def echo(text: str) -> None:
        if text.startswith("step      4/"):  # what is drawn may miss all requests of so short a run
            proxy.spoil_next("503")

    quick_pretrain(config(ckpt_every_steps=1), store, place / "run", "cpu", echo=echo)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    copy = local_run(place / "run")
    assert_same_training(copy, on_disk)
    assert proxy.spoilt["503"] > 0
    rows = [row for row in read_metrics(mirror(place, tmp_path) / "metrics.jsonl") if row["kind"] == "bucket"]
    assert rows and rows[-1]["retries"] > 0 and rows[-1]["failures"] == 0 and rows[-1]["step"] < config().steps
    assert "failed and were sent again" in rows[-1]["sentence"]


def mirror(place, tmp_path):
    """The local folder of the run, on the first machine."""
    return next((tmp_path / "cache" / "runs").glob("*/run"))


@pytest.mark.slow
@buckets
def test_a_lost_bucket_never_stops_training_and_gets_everything_later(place, store, on_disk, tmp_path, monkeypatch):
    proxy = FaultyProxy(os.environ[ENDPOINT[place.scheme]], share=0)
    monkeypatch.setenv(ENDPOINT[place.scheme], proxy.endpoint)
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(2, 0.001, 0.01))
    monkeypatch.setattr(bucket_run, "PATIENCE_S", 1.0)
    told = []

    def echo(text: str) -> None:
        told.append(text)
        if text.startswith("step      2/"):
            proxy.fail_after(0)

    with pytest.raises(
        CheckpointError, match=r"lacks the checkpoint after step 8; .* the same command on this machine sends it"
    ):
        quick_pretrain(config(), store, place / "run", "cpu", echo=echo)
    assert any("not yet in" in line and "training goes on" in line for line in told)
    folder = mirror_of(place / "run")
    assert_same_training(folder, on_disk)  # the local disk has it
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "checkpoint"]
    assert rows and all(row["what"] == "checkpoint" for row in rows)
    proxy.fail_after(10**9)
    monkeypatch.setattr(bucket_run, "PATIENCE_S", 60.0)
    bucket.delete(str(place / "run" / "run.lease"))
    quick_pretrain(config(), store, place / "run", "cpu", echo=lambda _: None)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    assert_same_training(local_run(place / "run"), on_disk)
    proxy.close()


def test_a_slow_bucket_gets_the_checkpoint_to_roll_back_to_and_not_all_between(tmp_path, monkeypatch):
    """Under load the last healthy checkpoint was dropped for newer ones, and another machine had none to return to."""
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    run = bucket_run.BucketRun(location("s3://bucket/run"))  # its thread, which sends, does not run
    folder = run.path / "checkpoints"
    folder.mkdir(parents=True)
    run.keep(lambda found: Retention(2).surplus(found, {2}))
    for step in range(1, 7):
        path = folder / f"step-{step:08}.pt"
        path.write_bytes(b"a checkpoint")
        run.offer(path)
    assert run.waiting() == [f"step-{step:08}.pt" for step in (2, 5, 6)]
    assert [step for step, _ in run.failures()] == [1, 3, 4]
    assert len(list((run.path / ".outbox").iterdir())) == 3, "nothing of the others is left"


def test_a_checkpoint_that_is_not_sent_after_all_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "cache"))
    run = bucket_run.BucketRun(location("s3://bucket/run"))
    path = tmp_path / name_of(4)
    path.write_bytes(b"state")
    run.offer(path)
    run.offer(path)  # written anew, after training went back to an earlier step
    (kept,) = (run.path / ".outbox").iterdir()
    assert (kept / "whole").read_bytes() == b"state"
    run.forget_after(3)
    assert not run.waiting() and not list((run.path / ".outbox").iterdir())


def test_a_checkpoint_whose_copy_was_deleted_before_it_was_sent_is_not_in_the_pointer(tmp_path, monkeypatch):
    """Whoever empties the cache meanwhile must not make the run in the bucket unreadable."""
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "cache"))
    written = {}
    monkeypatch.setattr(bucket_run.bucket, "write", written.__setitem__)
    run = bucket_run.BucketRun(where := location("s3://bucket/run"))
    (path := tmp_path / name_of(4)).write_bytes(b"state")
    run.offer(path)
    shutil.rmtree(outbox := run._waiting[path.name])
    run._send(path.name, outbox)
    monkeypatch.setattr(type(where), "read_text", lambda self, encoding=None: written[str(self)].decode())
    assert read_pointer(where)["checkpoints"] == {} and not run.waiting()
    ((step, sentence),) = run.failures()
    assert step == 4 and "was not sent" in sentence


@pytest.mark.slow
@buckets
def test_a_run_killed_at_any_request_leaves_a_pointer_to_whole_checkpoints(
    place, store, on_disk, tmp_path, monkeypatch
):
    direct = os.environ[ENDPOINT[place.scheme]]
    proxy = FaultyProxy(direct, share=0)
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(1, 0.001, 0.001))
    stopped = 0
    for left in (8, 14, 20, 27, 33):
        monkeypatch.setattr(bucket_run, "PATIENCE_S", 0.0)
        monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / f"machine {left}"))
        monkeypatch.setenv(ENDPOINT[place.scheme], proxy.endpoint)
        proxy.fail_after(left)
        try:
            quick_pretrain(config(), store, place / f"run {left}", "cpu", echo=lambda _: None)
        except (BucketError, CheckpointError, ConfigError):
            stopped += 1
        monkeypatch.setenv(ENDPOINT[place.scheme], direct)
        pointer = read_pointer(place / f"run {left}")
        for entries in (pointer or {"checkpoints": {}})["checkpoints"].values():
            for entry in entries:
                assert len(bucket.read(str(place / f"run {left}" / entry["key"]))) == entry["bytes"]
        bucket.delete(str(place / f"run {left}" / "run.lease"))
        monkeypatch.setattr(bucket_run, "PATIENCE_S", 60.0)
        monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / f"other machine {left}"))
        quick_pretrain(config(), store, place / f"run {left}", "cpu", echo=lambda _: None)
        assert_same_training(local_run(place / f"run {left}"), on_disk)
    assert stopped >= 4, "a run that needs fewer requests than that ends well"
    proxy.close()


@pytest.mark.parametrize("place", ["gs", pytest.param("s3", marks=SLOW)], indirect=True)
def test_two_processes_do_not_train_into_one_run(place, store):
    inside = []

    def echo(text: str) -> None:
        if text.startswith("step") and not inside:
            inside.append(True)
            with pytest.raises(BucketError, match="is training into this run; wait for it or stop it"):
                quick_pretrain(config(), store, place / "run", "cpu", echo=lambda _: None)

    quick_pretrain(config(), store, place / "run", "cpu", echo=echo)
    assert inside


@buckets
def test_a_destination_that_cannot_be_written_stops_before_step_0(place, store, monkeypatch):
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(2, 0.001, 0.001))
    with pytest.raises((BucketError, ConfigError), match="no-such-bucket"):
        pretrain(config(), store, f"{place.scheme}://no-such-bucket/run", "cpu", echo=lambda _: None)


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_no_credential_reaches_a_run(light_checks, place, store, tmp_path, capfd):
    pretrain(config(steps=2, ckpt_every_steps=1), store, place / "run", "cpu")
    told = capfd.readouterr()
    texts = [file.read_bytes() for file in (tmp_path / "cache").rglob("*") if file.is_file()]
    texts += [bucket.read(uri) for uri in bucket.find(str(place / "run"))] + [told.out.encode(), told.err.encode()]
    assert len(texts) > 8 and not any(SECRET.encode() in text for text in texts)
