"""Who is told what happens: metrics.jsonl always, trackers when asked, once per step and job, and a voice when
nothing happens."""

import importlib.util
import json
import threading
from unittest import mock

import numpy as np
import pytest

from octfm.config import without_text
from octfm.errors import ConfigError, TrainingError
from octfm.pretraining import pretrain as loop
from octfm.pretraining.monitors.sample_picture import sample_picture
from octfm.pretraining.preflight.resources import tracker
from octfm.run import trackers
from octfm.run.tracking import Metrics, TrackingConfig, read_metrics
from octfm.run.waiting import Waiting
from octfm.store.selection import select
from support.tiny_runs import Killed, config, killed_at, quick_pretrain, quiet, rows
from support.waiting import wait_until

needs_wandb = pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: pip install octfm[wandb]"
)
needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is not installed: pip install octfm[tensorboard]",
)


def killed_and_resumed(settings, store, out, monkeypatch):
    """A run that dies in step 5 (its checkpoints are after 3 and 6), then is run again to its end."""
    killed_at(6, monkeypatch, loop, "accumulate")
    with pytest.raises(Killed):
        quick_pretrain(settings, store, out, echo=quiet)
    return quick_pretrain(settings, store, out, echo=quiet)


@needs_tensorboard
def test_F10_tensorboard_tells_every_step_once_after_a_kill(store, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = killed_and_resumed(config(tracking={"tensorboard": True}), store, tmp_path / "run", monkeypatch)
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    events.Reload()
    loss = events.Scalars("train/loss")
    assert [event.step for event in loss] == list(range(8)), "from the first step, none twice"
    np.testing.assert_allclose([event.value for event in loss], [row["loss"] for row in rows(run)], rtol=1e-6)
    assert {"validation/masked_over_baseline", "health/teacher", "train/by_scanner/topcon_triton"} <= set(
        events.Tags()["scalars"]
    )
    picture = events.Images("masks")[0]
    assert (picture.height, picture.width) == (64, 4 * 32)


@needs_wandb
def test_F10_wandb_is_one_run_that_tells_no_step_twice(store, tmp_path, monkeypatch):
    """Four W&B runs at once, because every replica believed to be rank 0."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = config(tracking={"wandb": "offline"}, ckpt_second_dir=str(tmp_path / "zqxdisk"))
    run = killed_and_resumed(settings, store, tmp_path / "run", monkeypatch)
    files = sorted((run / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 2 and len({file.stem for file in files}) == 1, "two processes, one run id"
    wait_until(lambda: wandb_records(files[-1])[-1].HasField("exit"), "the file, which W&B's own process writes")
    told = [int(row["_step"]) for file in files for row in wandb_history(file) if "train/loss" in row]
    assert told == list(range(8))
    assert not any(b"zqx" in file.read_bytes() for file in files), "the run hands over its settings without text"


@needs_wandb
def test_wandb_gets_nothing_about_the_machine_the_command_or_the_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("socket.gethostname", lambda: "zqxhost")
    monkeypatch.setattr("sys.argv", ["octfm", "pretrain", "vit_s", "data.store=/clinic/zqxmeyer"])
    run = tmp_path / "zqxfolder" / "run"
    run.mkdir(parents=True)
    own = config(
        tracking={"wandb": "offline", "project": "octfm"},
        data={"store": "/clinic/zqxmeyer", "scanners": ["zqxscanner"]},
    )
    tracker = trackers.WeightsAndBiases(own.tracking, run, without_text(own))
    tracker.row("train", 0, {"loss": 1.0})
    tracker.close()
    (file,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    wait_until(lambda: wandb_records(file)[-1].HasField("exit"), "the file, which W&B's own process writes")
    assert b"zqx" not in file.read_bytes() and not list(file.parent.rglob("requirements.txt"))


@needs_wandb
def test_a_server_that_refuses_the_run_is_no_mistake_in_the_settings(tmp_path, monkeypatch):
    """Else rank 0 ended as if it were done: other GPUs waited ten minutes for it, and nothing started them again."""
    import wandb

    monkeypatch.setattr(wandb, "init", mock.Mock(side_effect=wandb.Error("timed out")))
    with pytest.raises(TrainingError, match=r"Weights & Biases refused the run \(timed out\)"):
        trackers.open_trackers(TrackingConfig(wandb="offline"), tmp_path, {}, 0)


def test_settings_without_text_keep_numbers_switches_and_choices():
    own = config(data={"store": "/clinic/zqxmeyer", "scanners": ["zqxscanner"]})
    kept, whole = without_text(own), own.model_dump(mode="json")
    assert kept["data"]["store"] == "…" and kept["data"]["scanners"] == ["…"] and kept.keys() == whole.keys()
    assert kept["objective"] == whole["objective"] and kept["masks"] == whole["masks"] and kept["steps"] == own.steps


def wandb_history(path):
    """Rows that an offline run was told."""
    for record in wandb_records(path):
        if record.HasField("history"):
            yield {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}


def wandb_records(path):
    """Records of an offline W&B file: LevelDB's log format, 32 KiB blocks after a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, position, parts, found = path.read_bytes(), 7, b"", [wandb_internal_pb2.Record()]
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record())
            found[-1].ParseFromString(parts)
            parts = b""
    return found


def test_F10_only_rank_0_has_trackers(tmp_path):
    assert trackers.open_trackers(TrackingConfig(tensorboard=True, wandb="offline"), tmp_path, {}, 0, rank=1) == []
    assert list(tmp_path.iterdir()) == []


def test_a_missing_tracker_is_named_before_step_0(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    found = tracker(config(tracking={"tensorboard": True}))
    assert found.status == "FAIL" and found.advice.startswith("pip install octfm[tensorboard]")
    with pytest.raises(ConfigError, match=r"pip install octfm\[wandb\]"):
        trackers.open_trackers(TrackingConfig(wandb="offline"), tmp_path, {}, 0)
    assert tracker(config()).status == "PASS"


@needs_wandb
def test_a_tracker_that_cannot_be_reached_is_named(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    found = tracker(config(tracking={"wandb": "online"}))
    assert found.status == "FAIL" and "127.0.0.1:9" in found.measured and "tracking.wandb=offline" in found.advice
    assert tracker(config(tracking={"wandb": "online"}), resumed=True).status == "WARN", "it goes on, offline"
    assert tracker(config(tracking={"wandb": "offline"})).status == "PASS"


class Failing:
    def row(self, kind, step, values):
        raise ConnectionError("the server is gone")

    picture = row

    def close(self):
        raise AssertionError("it was dropped")


def test_a_tracker_that_fails_does_not_stop_training(store, tmp_path, capsys):
    run = quick_pretrain(config(), store, tmp_path / "run", echo=quiet, listeners=[Failing()])
    assert len(rows(run)) == 8
    (told,) = rows(run, "tracker")
    assert "Failing failed and gets no more rows: ConnectionError: the server is gone" in told["sentence"]
    assert told["sentence"] in capsys.readouterr().err, "a monitor that failed would seem to find nothing"


def test_a_listener_cannot_change_what_the_next_one_gets(tmp_path):
    first, second = mock.Mock(), mock.Mock()
    first.row.side_effect = lambda kind, step, values: values.clear()
    Metrics(tmp_path / "metrics.jsonl", listeners=[first, second]).write("train", 1, loss=2.0)
    second.row.assert_called_once_with("train", 1, {"loss": 2.0})


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([print], "listeners: print has no method row, picture, close"),
        ([Failing], r"got the class Failing; write Failing\(\)"),
        (Failing(), r"expected a list of listeners, .*write listeners=\[MyListener\(\)\]"),
    ],
)
def test_what_is_no_listener_is_named_before_the_run_begins(store, tmp_path, wrong, words):
    """Otherwise it would be dropped at the first row, which the terminal does not show."""
    with pytest.raises(ConfigError, match=words):
        quick_pretrain(config(), store, tmp_path / "run", echo=quiet, listeners=wrong)
    assert not (tmp_path / "run").exists()


def test_two_trackers_that_fail_at_once_do_not_either(tmp_path):
    """As on a full disk: what says so of the first goes to the second, which fails a first time with it."""
    metrics = Metrics(tmp_path / "metrics.jsonl", listeners=[Failing(), Failing()])
    metrics.write("train", 0)
    metrics.close()
    assert [row["kind"] for row in read_metrics(tmp_path / "metrics.jsonl")] == ["train", "tracker", "tracker"]


@pytest.mark.slow
def test_settings_of_trackers_may_change_when_a_run_resumes(store, tmp_path):
    quick_pretrain(config(), store, tmp_path / "run", echo=quiet)
    quick_pretrain(config(tracking={"step_deadline_s": 5.0}), store, tmp_path / "run", echo=quiet)


# Waiting
# --------------------------------------------------------------------------------------------------------------------------------


def test_F8_a_data_path_that_stands_still_is_named(store, tmp_path, monkeypatch):
    """Validation metrics but never a training metric: data took 6 to 10 minutes per volume, and nothing said so."""
    spoken, lines = threading.Event(), []
    batches = loop.Loader.batches

    def stuck(self, step):
        assert step > 0 or spoken.wait(60), "nobody said anything"
        return batches(self, step)

    def echo(line):
        lines.append(line)
        if "waiting for data" in line and "no step" in line:
            spoken.set()

    monkeypatch.setattr(loop.Loader, "batches", stuck)
    run = quick_pretrain(config(steps=2, tracking={"step_deadline_s": 0.05}), store, tmp_path / "run", echo=echo)
    row = rows(run, "waiting")[0]
    assert (
        row["what"] == "data"
        and row["seconds"] >= 0.05
        and "no step has finished yet: waiting for data" in row["sentence"]
    )
    assert "local prepared store" in row["sentence"]


def test_F8_waiting_tells_the_first_step_from_later_ones_and_grows_patient():
    told = []
    waiting = Waiting(0.03, lambda what, seconds, sentence: told.append((what, sentence)))
    waiting.start()
    waiting.for_("the device")
    wait_until(lambda: len(told) >= 2, "two reports of waiting", 30)
    waiting.done()
    waiting.for_("the device")
    wait_until(lambda: "the device" in dict(told), "a report about the device", 30)
    waiting.close()
    assert {what for what, _ in told[:2]} == {"the first step"} and "compiled on first use" in told[0][1]
    assert "is being compiled (runtime.compile; the second one" in dict(told)["the device"], "the first is inspected"


def test_F8_training_metrics_come_from_the_first_step(store, tmp_path):
    run = quick_pretrain(config(steps=12, log_every_steps=5), store, tmp_path / "run", echo=quiet)
    assert [row["step"] for row in rows(run)] == [0, 5, 10, 11]


def test_rows_from_two_threads_stay_whole(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    threads = [
        threading.Thread(target=lambda k=k: [metrics.write("x", i, k=k, text="y" * 200) for i in range(200)])
        for k in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    metrics.close()
    assert len(list(read_metrics(tmp_path / "metrics.jsonl"))) == 800
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["kind"] == "x"


def test_mask_picture_shows_what_is_seen_and_what_is_predicted(store):
    picture = sample_picture(config(), store, select(store, "val")[:3], 0)
    assert picture.shape == (64, 3 * 32, 3) and picture.dtype == np.uint8
    colour = picture.astype(int)
    orange, blue = (colour[..., 0] - colour[..., 2] > 30).mean(), (colour[..., 2] - colour[..., 0] > 20).mean()
    assert orange > blue > 0.02, "targets are 60 % of the kept tokens, context 35 %"
    assert not np.array_equal(picture, sample_picture(config(), store, select(store, "val")[:3], 1)), (
        "masks change from step to step"
    )


def test_mask_picture_shows_the_stage_of_its_step(store):
    staged = config(masks={"budget": 64, "stages": [[0.1, 0.3], [0.6, 0.3]]})
    first, last = (sample_picture(staged, store, select(store, "val")[:3], step).astype(int) for step in (0, 7))
    early, late = ((colour[..., 0] - colour[..., 2] > 30).mean() for colour in (first, last))
    assert late > 3 * early, "10 % of the tokens are targets in the first half of the run, 60 % in the second"
