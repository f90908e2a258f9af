"""The dashboard follows a growing file, tells time to go, and names the checkpoint to take."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from octfm.errors import EvaluationError
from octfm.report.html import write_report
from octfm.report.sources import series
from octfm.report.watch import follow, seconds_left, sparkline, watch
from octfm.report.words import checkpoint_advice, checkpoint_taken
from support.run_folder import write_run

pytestmark = pytest.mark.drawn


def probe_rows(*scores, metric="r2", chance=0.0):
    return [
        {
            "kind": "probe",
            "step": 100 * i + 99,
            "target": "cst_um",
            "metric": metric,
            "score": s,
            "knn": s / 2,
            "chance": chance,
        }
        for i, s in enumerate(scores)
    ]


def append(path, *rows):
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_growing_file_is_followed_and_a_torn_line_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert follow(path) == []
    append(path, {"kind": "train", "step": 0})
    assert [row["step"] for row in follow(path)] == [0]
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(follow(path)) == 1
    with path.open("a") as file:
        file.write('ep": 1}\n')
    assert [row["step"] for row in follow(path)] == [0, 1]


def test_time_to_go_ignores_the_night_between_two_processes():
    rows = [{"kind": "train", "step": 10 * i, "time": 20.0 * i + (30_000 if i > 5 else 0)} for i in range(11)]
    assert seconds_left(rows, 201) == pytest.approx(200.0)
    assert seconds_left(rows[:1], 201) is None
    set_back = [rows[0], rows[1] | {"time": rows[0]["time"] - 3600.0}]
    assert seconds_left(set_back, 201) is None


def test_sparklines_have_shape():
    assert sparkline(np.arange(8.0)) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.ones(3)) == "▁▁▁" and sparkline(np.array([np.nan])) == ""
    assert len(sparkline(np.random.default_rng(0).normal(size=5000))) == 40


def test_once_prints_curves_verdicts_and_advice(tmp_path):
    run = write_run(tmp_path)
    spike = {
        "kind": "incident",
        "step": 199,
        "what": "loss spike",
        "verdict": "watch",
        "sentence": "no weight was changed",
    }
    append(run / "metrics.jsonl", spike, *probe_rows(0.1, 0.5, 0.4))
    out = io.StringIO()
    watch(run, once=True, console=Console(file=out, width=120))
    told = out.getvalue()
    for expected in (
        "step 399 of 400",
        "masked loss / baseline",
        "effective rank",
        "watch",
        "low",
        "step 200: no weight was changed",
        "Take step-00000200.pt",
        "█",
    ):
        assert expected in told, expected


def test_sentences_of_a_stranger_cannot_command_the_terminal(tmp_path):
    run, out = write_run(tmp_path).rename(tmp_path / "a\x1b[2J"), io.StringIO()
    health = {"kind": "health", "step": 399, "verdict": "bad", "what": "[link=x]data\x1b]0;a\x07", "sentence": "\x9b2J"}
    append(run / "metrics.jsonl", health, health | {"kind": "incident", "action": "stop"})
    watch(run, console=Console(file=out, width=120))
    assert not set("\x1b\x07\x9b") & set(out.getvalue()) and "[link=x]data" in out.getvalue()


def test_watching_a_finished_run_returns(tmp_path):
    run = write_run(tmp_path, steps=401)
    out = io.StringIO()
    watch(run, console=Console(file=out, width=120))
    assert "finished" in out.getvalue()


def test_watching_a_run_that_a_finding_stopped_returns(tmp_path):
    run, out = write_run(tmp_path), io.StringIO()
    stop = {"kind": "incident", "step": 400, "action": "stop", "verdict": "bad", "sentence": "no weight is finite"}
    append(run / "metrics.jsonl", stop)
    watch(run, console=Console(file=out, width=120))
    assert "stopped" in out.getvalue() and "to go" not in out.getvalue() and "no weight is finite" in out.getvalue()


def test_the_checkpoint_that_a_folder_stands_for_is_named_beside_the_best(tmp_path):
    paths = [tmp_path / f"step-{step:08d}.pt" for step in (100, 200, 300)]
    assert checkpoint_taken([], paths) == "step-00000300.pt: the newest checkpoint of this run"
    assert checkpoint_taken(probe_rows(0.1, 0.2, 0.3), paths).endswith("and the one with the best online probe")
    assert f"best at {paths[1]}: give that file" in checkpoint_taken(probe_rows(0.1, 0.5, 0.3), paths)
    assert "no longer there" in checkpoint_taken(probe_rows(0.1, 0.5, 0.3), paths[2:])
    # Of equal scores the last is the one whose checkpoint is kept; other targets, poolings and labels are other scales.
    assert checkpoint_taken(probe_rows(0.5, 0.1, 0.5), paths).endswith("and the one with the best online probe")
    for other in ({"target": "age"}, {"pool": "tails"}):
        mixed = [probe_rows(0.9)[0] | other, *probe_rows(0.1, 0.5, 0.3)[1:]]
        assert f"best at {paths[1]}: give that file" in checkpoint_taken(mixed, paths)
    later = [row | {"cases": "b"} for row in probe_rows(0.1, 0.5, 0.3)[1:]]
    for before in ({"cases": "a"}, {}):  # rows of earlier versions have none
        assert f"best at {paths[1]}: give that file" in checkpoint_taken([probe_rows(0.9)[0] | before, *later], paths)


def test_charts_count_steps_as_checkpoints_do():
    """The chart of the online probe ringed step 199, and the sentence above it advised step-00000200.pt."""
    rows = probe_rows(0.1, 0.3, 0.2)
    steps, scores = series(rows, "score")
    assert f"step-{steps[scores.argmax()]:08.0f}.pt" == "step-00000200.pt"
    assert checkpoint_advice(rows).startswith("Take step-00000200.pt")


def test_no_run_is_named(tmp_path):
    with pytest.raises(EvaluationError, match="expected a run folder"):
        watch(tmp_path, once=True)


def test_F12_the_probe_chooses_and_says_when_the_loss_disagrees():
    """The SSL loss was lowest in the first epoch while features kept getting better."""
    loss = [
        {"kind": "validation", "step": 100 * i + 99, "masked_over_baseline": v}
        for i, v in enumerate((0.5, 0.6, 0.7, 0.8))
    ]
    told = checkpoint_advice([*probe_rows(0.1, 0.2, 0.3, 0.4), *loss])
    assert told.startswith("Take step-00000400.pt") and "lowest at step 100. Trust the probe" in told
    agree = checkpoint_advice(
        [*probe_rows(0.1, 0.2, 0.3, 0.4), *({**row, "masked_over_baseline": -i} for i, row in enumerate(loss))]
    )
    assert "disagrees" not in agree
    assert checkpoint_advice(loss) == ""
    assert "do not trust any" in checkpoint_advice(probe_rows(0.4, 0.45, metric="balanced_accuracy", chance=0.5))


@pytest.mark.slow
def test_report_plots_the_probe_against_the_loss_and_names_the_checkpoint(tmp_path, remembered_charts):
    run = write_run(tmp_path, probe=False, figures=False)
    plain = write_report(run, tmp_path / "plain.html").read_text()
    assert "Online probe" not in plain and "Take step-" not in plain
    append(run / "metrics.jsonl", *probe_rows(0.1, 0.5, 0.4))
    page = write_report(run, tmp_path / "report.html").read_text()
    assert (
        "Online probe: central retinal thickness" in page
        and "held-out loss (right)" in page
        and "Take step-00000200.pt" in page
    )
