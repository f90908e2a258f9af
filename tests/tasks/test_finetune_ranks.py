"""Fine-tuning on several ranks is that of one process, stops and resumes together, and a run folder belongs to one
of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from octfm.errors import CheckpointError, ConfigError
from octfm.run.folder import locked
from octfm.run.tracking import read_metrics
from octfm.tasks.finetune import finetune
from octfm.tasks.predictions import read_predictions
from support import ROOT
from support.finetune_runs import settings
from support.ranks import codes
from support.tiny_runs import final, quiet
from support.waiting import wait_until

SHORT = {"epochs": 3, "batch_size": 4, "per_device_batch_size": 1}
WAYS = {"finetune": {}, "frozen": {"lr_encoder": 0, "pool": "attention"}, "lora": {"lora_rank": 2, "lr_encoder": 3e-3}}


def told(out, *names):
    return [[row[name] for name in names if name in row] for row in read_metrics(out / "metrics.jsonl")]


@pytest.mark.parametrize(
    "way", ["finetune", *(pytest.param(name, marks=pytest.mark.slow) for name in ("frozen", "lora"))]
)
def test_ranks_fine_tune_what_one_process_fine_tunes(ranks, run, store, labels, tmp_path, way):
    config = settings(run, store, labels, **SHORT, **WAYS[way])
    finetune(config, tmp_path / "one", echo=quiet)
    ended = ranks(2, store.path, tmp_path / "two", config.model_dump(mode="json"), task="finetune")
    assert codes(ended) == [0, 0] and "epoch" in ended[0].said and not ended[1].said, "rank 0 alone speaks"
    a, b = (told(tmp_path / name, "kind", "step", "lr_head") for name in ("one", "two"))
    assert a == b
    for row, other in zip(
        *(told(tmp_path / name, "loss", "grad_norm", "score") for name in ("one", "two")), strict=True
    ):
        np.testing.assert_allclose(row, other, rtol=1e-4, atol=1e-6)
    one, two = final(tmp_path / "one"), final(tmp_path / "two")
    for name, tensor in one["model"].items():
        torch.testing.assert_close(tensor, two["model"][name], rtol=1e-3, atol=1e-4)
    said = [read_predictions(tmp_path / name / "predictions.parquet").of_acquisition for name in ("one", "two")]
    assert said[0].keys() == said[1].keys()
    assert all(np.allclose(said[0][name][0], said[1][name][0], atol=1e-3) for name in said[0])
    assert json.loads((tmp_path / "two" / "finetune.json").read_text())["environment"]["ranks"] == "2"
    if config.frozen:
        kept = [sorted((tmp_path / name).glob("tokens-*")) for name in ("one", "two")]
        assert [path.name for path in kept[0]] == [path.name for path in kept[1]]
        assert all(x.read_bytes() == y.read_bytes() for x, y in zip(*kept, strict=True)), "features are the same bits"


def test_a_signal_to_one_rank_stops_both_and_they_resume_bit_for_bit(ranks, run, store, labels, tmp_path):
    config = settings(run, store, labels, **SHORT).model_dump(mode="json")
    ended = ranks(2, store.path, tmp_path / "halves", config, task="finetune", fault="term", at=5, on=1)
    assert codes(ended) == [75, 75] and "SIGTERM: saved after 6 of" in ended[1].said
    for name in ("halves", "whole"):
        assert codes(ranks(2, store.path, tmp_path / name, config, task="finetune")) == [0, 0]
    a, b = final(tmp_path / "whole"), final(tmp_path / "halves")
    assert a["step"] == b["step"] and all(torch.equal(tensor, b["model"][name]) for name, tensor in a["model"].items())
    names = ("kind", "step", "loss", "grad_norm", "score", "lr_encoder")
    assert told(tmp_path / "whole", *names) == told(tmp_path / "halves", *names)
    assert (tmp_path / "whole" / "predictions.parquet").read_bytes() == (
        tmp_path / "halves" / "predictions.parquet"
    ).read_bytes()


def test_token_features_that_only_rank_0_has_stop_all_ranks(ranks, run, store, labels, tmp_path):
    """As after a run on one host that is gone on with on two which share no disk."""
    config = settings(run, store, labels, **SHORT, **WAYS["frozen"], runtime={"timeout_s": 12})
    finetune(config, tmp_path / "run-0", echo=quiet)
    ended = ranks(2, store.path, tmp_path / "run", config.model_dump(mode="json"), task="finetune", apart=True)
    assert codes(ended) == [1, 1], ended
    for rank in ended:
        assert "EvaluationError: rank 1 does not see the folder that rank 0 keeps token features in" in rank.said, ended
        assert "put --out on a disk that all hosts share" in rank.said, ended


def test_ranks_that_do_not_divide_the_batch_are_refused_by_all(ranks, run, store, labels, tmp_path):
    config = settings(run, store, labels, batch_size=2).model_dump(mode="json")
    ended = ranks(3, store.path, tmp_path / "run", config, task="finetune")
    assert codes(ended) == [1, 1, 1] and all("not a multiple of the 3 ranks" in rank.said for rank in ended)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="ddp; got fsdp"):
        settings(run, store, labels, runtime={"parallel": "fsdp"})


def test_two_processes_do_not_train_into_one_folder(run, store, labels, tmp_path):
    config = settings(run, store, labels, epochs=1, lr_encoder=0)
    (tmp_path / "run").mkdir()
    with (
        locked(tmp_path / "run", quiet),
        pytest.raises(CheckpointError, match=r"another process .pid .* is training into this folder"),
    ):
        finetune(config, tmp_path / "run", echo=quiet)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]
    finetune(config, tmp_path / "run", echo=quiet)  # what a lock leaves behind keeps nobody out
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    with pytest.raises(CheckpointError, match="not a run folder"):
        finetune(config, tmp_path / "other", echo=quiet)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_launcher_stops_with_75_and_the_same_command_ends_the_run(run, store, labels, tmp_path):
    """launch/torchrun.sh -- finetune, the packaged recipe, two ranks."""
    words = [
        f"{key}={value}"
        for key, value in {"encoder": run, "store": store.path, "labels": labels, "target": "grade"}.items()
    ]
    words += [
        "order=[low,middle,high]",
        "epochs=4",
        "batch_size=4",
        "per_device_batch_size=2",
        "precision=fp32",
        "runtime.timeout_s=60",
    ]
    command = [
        "bash",
        str(ROOT / "launch" / "torchrun.sh"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "--",
        "finetune",
        "study_group_finetune",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "OCTFM_GRACE_S": "60"}
    out, said = tmp_path / "run", tmp_path / "said"

    def start() -> subprocess.Popen:
        with said.open("a") as file:
            return subprocess.Popen(
                [*command, *words, "--device", "cpu", "--out", str(out)], stdout=file, stderr=file, env=environment
            )

    first = start()

    def saved() -> bool:
        assert first.poll() is None, said.read_text()[-3000:]
        return (out / "checkpoints").is_dir() and any((out / "checkpoints").glob("*.pt"))

    wait_until(saved, lambda: f"a checkpoint: {said.read_text()[-3000:]}", 200)
    first.terminate()
    assert first.wait(200) == 75, said.read_text()[-3000:]
    assert not (out / "finetune.json").exists()
    assert start().wait(400) == 0, said.read_text()[-3000:]
    result = json.loads((out / "finetune.json").read_text())
    assert result["environment"]["ranks"] == "2" and result["environment"]["parallel"] == "ddp"
    assert said.read_text().count("resuming") == 1 and said.read_text().count(str(Path(out / "finetune.json"))) == 1, (
        "rank 0 alone speaks"
    )
