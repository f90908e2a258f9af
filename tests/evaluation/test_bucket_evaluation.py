"""A store in a bucket gives evaluation what the same store on a disk does, to the last bit."""

import json

import numpy as np
import pytest

from octfm.config import load
from octfm.encoder.embeddings import read_embeddings
from octfm.io import bucket
from octfm.store.store import Store
from octfm.tasks.finetune import finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from support.command_line import invoke
from support.small_store import GRADES, darkened, small_store
from support.tiny_runs import config, quick_pretrain, quiet


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.slow
def test_a_store_in_a_bucket_is_embedded_probed_and_fine_tuned(place, tmp_path):
    store = small_store(tmp_path / "prepared", darkened)
    for file in sorted(path for path in store.path.rglob("*") if path.is_file()):
        bucket.upload(file, str(place / "prepared" / str(file.relative_to(store.path))))
    there = str(place / "prepared")
    assert len(Store.open(there)) == len(store)
    labels = tmp_path / "labels.tsv"
    labels.write_text("participant_id\tgrade\n" + "".join(f"P{i:03d}\t{GRADES[i % 3]}\n" for i in range(12)))
    run = quick_pretrain(config(steps=2), store, tmp_path / "run", "cpu", echo=quiet)

    told = {}
    for name, where in (("disk", str(store.path)), ("bucket", there)):
        asked = ["embed", str(run), "--store", where, "--out", str(tmp_path / name)]
        shown = invoke(*asked)
        assert shown.exit_code == 0, shown
        asked = [
            "probe",
            str(run),
            "--embeddings",
            str(tmp_path / name),
            "--labels",
            str(labels),
            "--target",
            "grade",
            "--allow-seen",
        ]
        shown = invoke(*asked)
        assert shown.exit_code == 0, shown
        settings = {
            "encoder": str(run), "store": where, "labels": str(labels), "target": "grade", "epochs": 2, "head_epochs": 1, "batch_size": 4,
            "per_device_batch_size": 2, "tokens_per_volume": 32,
        }  # fmt: skip
        finetune(load(FinetuneConfig, settings), tmp_path / name / "tuned", "cpu", echo=quiet)
        vectors = read_embeddings(tmp_path / name / "pretrained.parquet")
        tuned = json.loads((tmp_path / name / "tuned" / "finetune.json").read_text())["results"]
        told[name] = (vectors.vectors, json.loads((tmp_path / name / "probe.json").read_text())["results"], tuned)
    np.testing.assert_array_equal(told["disk"][0], told["bucket"][0])
    assert told["disk"][1:] == told["bucket"][1:] and told["disk"][1] and told["disk"][2]
    shown = invoke("report", run, "--store", there, "--out", place / "report.html")
    assert shown.exit_code == 0 and bucket.read(str(place / "report.html")).startswith(b"<!"), shown


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_the_page_of_a_run_in_a_bucket_shows_no_local_folder(place, tmp_path):
    quick_pretrain(config(steps=1), small_store(tmp_path / "prepared"), place / "run", "cpu", echo=quiet)
    shown = invoke("report", place / "run")
    assert shown.exit_code == 0, shown
    page = (place / "run" / "report.html").read_text()
    assert f"octfm report {place / 'run'}" in page
    assert str(tmp_path / "cache") not in page, "where this machine keeps its copy"
    shared = tmp_path / "shared.html"
    shown = invoke("report", place / "run", "--no-images", "--out", shared)
    assert shown.exit_code == 0, shown
    assert str(place) not in shared.read_text(), "a page to share names no place"
    assert str(tmp_path) not in shared.read_text()
