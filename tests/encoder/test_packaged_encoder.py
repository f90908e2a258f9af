"""The encoder that comes with octfm: loaded without a name, named by its hash everywhere, begun from, built anew."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import octfm
from octfm.encoder.embed import embed_store
from octfm.encoder.embed_scans import embed_scans
from octfm.encoder.embeddings import read_embeddings
from octfm.encoder.encoder import load_encoder, seen_by
from octfm.encoder.export import export
from octfm.encoder.packaging import MOST_BYTES, package
from octfm.errors import BucketError, CheckpointError, EvaluationError
from octfm.layers.sample import samples
from octfm.pretraining.initial_weights import with_hash
from octfm.pretraining.preflight.resources import initial_weights
from octfm.pretraining.settings import smoke, stored_config
from octfm.run import checkpoint
from octfm.weights.exported import digest, read_export
from octfm.weights.packaged import CURRENT_ENCODER, encoders_folder, packaged_encoders
from support.command_line import octfm_here
from support.dicom_files import write_oct_dicom
from support.packaged_encoder import NAME, ship, write_packaged
from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, quiet
from support.untrained import untrained_encoder
from support.volumes import eye

REAL = encoders_folder() / CURRENT_ENCODER


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    write_packaged(folder)
    return folder


@pytest.fixture
def shipped(weights, monkeypatch):
    ship(monkeypatch, weights)
    return weights / NAME


def test_no_name_is_the_packaged_encoder_whatever_lies_in_the_folder(shipped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    encoder = octfm.load_encoder(device="cpu")
    assert encoder.source == NAME, "no path of site-packages"
    assert encoder.digest == json.loads((shipped / "config.json").read_text())["sha256"]
    assert {tensor.dtype for tensor in encoder.network.state_dict().values()} == {torch.float32}
    (tmp_path / NAME).rmdir()
    assert load_encoder(NAME, device="cpu").key == encoder.key
    assert not seen_by(NAME)("anybody"), "phantoms are no participants"
    assert load_encoder(random_init=True, device="cpu").source == f"{NAME} at random initialisation"


def test_an_octfm_without_an_encoder_says_so(tmp_path, monkeypatch):
    ship(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=rf"{NAME}: this octfm comes without.*none yet; give the path of a run"):
        load_encoder()
    code, _, err = octfm_here("embed", "--store", "prepared", cwd=tmp_path)
    assert code == 1 and "comes without that encoder" in err and err.count("\n") == 1


def test_other_weights_than_the_config_names_are_refused(weights, tmp_path, monkeypatch):
    shutil.copytree(weights / NAME, tmp_path / NAME)
    facts = json.loads((tmp_path / NAME / "config.json").read_text())
    (tmp_path / NAME / "config.json").write_text(json.dumps(facts | {"sha256": "0" * 64}))
    ship(monkeypatch, tmp_path)
    with pytest.raises(CheckpointError, match=r"not those that config\.json names .*expected 000000000000"):
        load_encoder()


def test_scans_are_embedded_without_a_run(shipped, tmp_path):
    volume = eye()
    for name in ("a.dcm", "b.dcm"):
        (tmp_path / "clinic").mkdir(exist_ok=True)
        write_oct_dicom(
            tmp_path / "clinic" / name, volume.voxels, volume.spacing_mm, sop_instance_uid=f"1.2.{len(name)}"
        )
    (tmp_path / "clinic" / "cut.dcm").write_bytes((tmp_path / "clinic" / "a.dcm").read_bytes()[:-999])
    code, out, err = octfm_here("embed", "clinic/a.dcm", "clinic/b.dcm", "--out", "vectors", cwd=tmp_path)
    encoder = load_encoder(device="cpu")
    assert code == 0, err
    assert f"{NAME}, SHA-256 {encoder.digest[:12]}: research use only" in out
    assert f"vectors/pretrained.parquet: 2 vectors of width {encoder.vector_width} by {NAME}" in out
    file = tmp_path / "vectors" / "pretrained.parquet"
    found = read_embeddings(file)
    assert found.metadata["encoder"] == NAME and found.metadata["weights"] == encoder.digest
    assert sorted(found.acquisition) == ["clinic/a.dcm", "clinic/b.dcm"], "one UID of two files names neither"
    np.testing.assert_array_equal(found.vectors[0].astype(np.float32), encoder.embed(tmp_path / "clinic" / "a.dcm"))
    code, out, err = octfm_here("embed", "clinic", NAME, "--out", "v", cwd=tmp_path)
    assert code == 1 and f"{NAME}: a run, an export or an address, where a scan is expected" in err
    code, out, err = octfm_here("embed", "clinic/a.dcm", "clinic/cut.dcm", "--out", "vectors", cwd=tmp_path)
    assert code == 1 and "cut.dcm" in err and "1 of 2 scans could not be embedded" in err and "1 vector of" in out
    assert pq.read_table(file).num_rows == 1


def test_an_encoder_of_ones_own_comes_before_the_scans(shipped, tmp_path):
    write_oct_dicom(tmp_path / "a.dcm", eye().voxels, eye().spacing_mm)
    shutil.copytree(shipped, tmp_path / "exported")
    shutil.copytree(shipped, tmp_path / "new!" / "exported")
    for name in ("exported", "new!/exported"):  # the second looks like a member of an archive
        code, out, err = octfm_here("embed", name, "a.dcm", "--out", "vectors", cwd=tmp_path)
        assert code == 0 and f"1 vector of width 48 by {name}" in out and "research" not in out, err
    (tmp_path / "exported" / "participants.key").unlink(missing_ok=True)
    code, out, err = octfm_here("export", "exported", "--out", "again", cwd=tmp_path)
    assert code == 0 and "participants.key" not in out, "there is no such file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "embed: nothing to embed; give scans"),
        (("nowhere.e2e", "--out", "v"), "nowhere.e2e: no such scan, run, checkpoint or export"),
        (("scan.dcm",), "scans need an output folder; add --out FOLDER"),
        (("empty", "--out", "v"), "empty: no scan in it, and it is no run"),
        (("stored", "--out", "v"), "use octfm embed --store stored"),
        (("scan.dcm", "--out", "v", "--retry"), "embed: takes single scans and does nothing with --retry"),
        (("scan.dcm", "other.dcm", "--store", "stored"), "--store: embeds that and no scans"),
    ],
)
def test_a_wrong_guess_is_one_clear_line(words, said, shipped, tmp_path):
    (tmp_path / "scan.dcm").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "store.json").write_text("{}")
    code, _, err = octfm_here("embed", *words, cwd=tmp_path)
    assert code == 1 and said in err and err.count("\n") == 1, err


def test_a_store_without_a_run_is_read_by_the_packaged_encoder(shipped, store, tmp_path):
    code, _, err = octfm_here("embed", "--store", store.path, cwd=tmp_path)
    assert code == 1 and f"{NAME}: an export" in err and "--out" in err
    code, _, err = octfm_here("embed", "--store", store.path, "--out", "vectors", "--no-baselines", cwd=tmp_path)
    assert code == 0, err
    found = read_embeddings(tmp_path / "vectors" / "pretrained.parquet")
    assert found.metadata["encoder"] == NAME and len(found.vectors) == len(store)


@pytest.mark.slow
def test_a_leaderboard_takes_the_packaged_encoder(shipped, tmp_path):
    store = small_store(tmp_path / "prepared", splits=("train",) * 12 + ("val",) * 4 + ("test",) * 8)
    rows = "".join(f"P{i:03d}\t{'high' if i % 2 else 'low'}\n" for i in range(24))
    (tmp_path / "labels.tsv").write_text("participant_id\tgrade\n" + rows)
    words = ("--store", store.path, "--labels", tmp_path / "labels.tsv", "--target", "grade")
    code, _, error = octfm_here("leaderboard", NAME, *words, cwd=tmp_path)
    assert code == 0, error
    result = json.loads((tmp_path / "leaderboard/leaderboard.json").read_text())
    assert {NAME, "random_init"} < {row["encoder"] for row in result["results"]}
    code, _, error = octfm_here("leaderboard", f"{NAME}0", *words, cwd=tmp_path)
    assert code == 1 and "no packaged encoder of this name" in error
    code, _, error = octfm_here("trust", NAME, *words, cwd=tmp_path)
    assert code == 1 and f"{NAME}: an export, which does not record the scanners" in error


def test_a_store_is_prepared_like_the_packaged_encoder(shipped, tmp_path):
    volume = eye()
    np.savez(tmp_path / "1001_OD.npz", volume=volume.voxels, spacing_mm=volume.spacing_mm, laterality="OD")
    for words in (
        ("scan", ".", "--participant-from", "{participant}_{eye}", "--out", "catalog", "--workers", 0),
        ("prepare", "catalog", "--like", NAME, "--out", "prepared", "--workers", 0),
    ):
        code, said, err = octfm_here(*words, cwd=tmp_path)
        assert code == 0, said + err
    load_encoder().require_prepared(octfm.Store.open(tmp_path / "prepared"))


def test_a_folder_of_files_without_a_run(shipped, tmp_path):
    write_oct_dicom(tmp_path / "clinic.dcm", eye().voxels, eye().spacing_mm, participant="P1")
    (tmp_path / "clinic").mkdir()
    (tmp_path / "clinic.dcm").rename(tmp_path / "clinic" / "a.dcm")
    code, out, err = octfm_here("embed", "--files", "clinic", "--out", "vectors", "--workers", 0, cwd=tmp_path)
    assert code == 0 and "1 of 1 volumes embedded" in out, err
    assert read_embeddings(tmp_path / "vectors" / "pretrained.parquet").metadata["weights"] == load_encoder().digest


def test_models_lists_it_and_prints_its_card(shipped, tmp_path):
    digest = load_encoder(device="cpu").digest
    _, listed, _ = octfm_here("models", cwd=tmp_path)
    assert f"{NAME}: untrained, used by load_encoder() and octfm embed" in listed and digest[:12] in listed
    assert "layers-2: " in listed
    _, finder, _ = octfm_here("models", "layers-2", cwd=tmp_path)
    assert "Trained by `make weights`, 3,400 steps with seed 11 on one thread." in finder
    _, card, _ = octfm_here("models", NAME, cwd=tmp_path)
    for needed in (
        digest,
        "8 × 64 × 32 voxels",
        "Research use only",
        "not a medical device",
        "Apache-2.0",
        "results.md",
    ):
        assert needed in card, needed


# ---- model.init=packaged ---------------------------------------------------------------------------------------------

STREAMED = {"phantoms": {"seed": 1, "share": 0.5}, "global_batch_size": 4, "per_device_batch_size": 2}
OBJECTIVES = {
    "mae": ({"name": "mae", "context_loss": 0.0, "frozen": "context"}, None),
    "vjepa2": ({"name": "vjepa2"}, None),
    "dense": ({"name": "dense", "frozen": "context", "answer_average": [2, 1, 8]}, STREAMED),
    "anchored": ({"name": "anchored", "frozen": "context", "answer_average": [2, 1, 8]}, STREAMED),
}


def begun(objective: str, **changes):
    settings, data = OBJECTIVES[objective]
    model = config().model.model_dump() | {"init": "packaged"} | changes.pop("model", {})
    return config(objective=settings, model=model, **({"data": data} if data else {}), **changes)


@pytest.mark.parametrize(
    "objective", ["mae", "vjepa2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dense", "anchored"))]
)
def test_a_run_begins_with_it_whatever_the_objective(objective, shipped, store, tmp_path):
    settings = begun(objective, steps=1, validation_volumes=2, schedule={"base_lr": 1e-6, "warmup_ratio": 0.1})
    run = quick_pretrain(settings, store, tmp_path / "run", "cpu", echo=quiet)
    content = checkpoint.load(checkpoint.newest(run))
    given = read_export(shipped)["network"]
    for name, tensor in given.items():
        torch.testing.assert_close(content["model"][f"encoder.{name}"], tensor, rtol=0, atol=1e-5)
    assert content["config"]["model"]["init"] == f"{NAME}@{digest(given)[:12]}", "the hash, not the word"


def test_a_run_does_not_go_on_from_other_weights(shipped, store, tmp_path, monkeypatch):
    settings = begun("mae", steps=2, ckpt_every_steps=1)
    quick_pretrain(settings, store, tmp_path / "run", "cpu", echo=quiet)
    quick_pretrain(settings, store, tmp_path / "run", "cpu", echo=quiet)  # finished: the same command is no error
    encoder = load_encoder(device="cpu")
    named = with_hash(settings)
    with torch.no_grad():
        encoder.network.norm.bias += 1
    write_packaged(tmp_path / "later", encoder)
    ship(monkeypatch, tmp_path / "later")
    with pytest.raises(CheckpointError, match=r"began with other values of model\.init"):
        quick_pretrain(settings, store, tmp_path / "run", "cpu", echo=quiet)
    (check,) = initial_weights(named, store)
    assert check.status == "FAIL" and "has other weights" in check.measured


def test_other_sizes_are_named_before_the_run_begins(shipped, store):
    (check,) = initial_weights(begun("mae", model={"width": 96, "heads": 4}), store)
    assert check.status == "FAIL" and check.advice == "set model.width=48 model.heads=2"
    (check,) = initial_weights(begun("mae", model={"patch_size": [4, 8, 8]}), store)
    assert check.advice == "set model.patch_size=[2,8,8]"
    assert [check.status for check in initial_weights(begun("mae"), store)] == ["PASS"]
    assert initial_weights(config(), store) == [] and smoke(begun("mae")).model.init is None


# ---- making it -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """A run on phantoms alone."""
    data = {
        "phantoms": {"seed": 1, "image_size": [8, 64, 32], "target_spacing": [0.7, 0.03, 0.18]},
        "global_batch_size": 4, "per_device_batch_size": 2,
    }  # fmt: skip
    return quick_pretrain(
        config(steps=2, data=data, objective=OBJECTIVES["dense"][0]), None, tmp_path_factory.mktemp("runs") / "run",
        "cpu", echo=quiet,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_becomes_the_packaged_encoder_the_same_bytes_every_time(taught, tmp_path, monkeypatch):
    said, written = [], []
    for _ in range(2):  # the second replaces what is there
        package(taught, weights=tmp_path / "one", echo=said.append)
        written.append({path.name: path.read_bytes() for path in (tmp_path / "one" / NAME).iterdir()})
    assert sorted(written[0]) == ["config.json", "model.safetensors", "seen_participants.json"]
    for file, content in written[0].items():
        assert content == written[1][file], file
        assert str(tmp_path).encode() not in content and b"runs" not in content
    assert "cosine of their vectors at least 0.99" in said[1]
    ship(monkeypatch, tmp_path / "one")
    whole, packed = load_encoder(taught, device="cpu"), load_encoder(device="cpu")
    for name, tensor in packed.network.state_dict().items():
        assert torch.equal(tensor, whole.network.state_dict()[name].to(torch.bfloat16).float()), name
    assert packaged_encoders().keys() == {NAME}
    exported = export(taught, tmp_path / "exported", echo=quiet)
    assert load_encoder(exported).digest == whole.digest == load_encoder(taught).digest


@pytest.mark.slow
def test_a_packaged_encoder_names_no_folder_that_its_run_began_with(taught, tmp_path):
    settings = stored_config(checkpoint.load(checkpoint.newest(taught))["config"])
    model = settings.model.model_copy(update={"init": str(taught)})
    later = quick_pretrain(settings.model_copy(update={"model": model}), None, tmp_path / "anna", "cpu", echo=quiet)
    package(later, weights=tmp_path / "one", echo=quiet)
    made = json.loads((tmp_path / "one" / NAME / "config.json").read_text())["made"]
    assert "begun with another run" in made and str(taught) not in made


def test_what_may_not_be_packaged_is_refused(taught, store, tmp_path, monkeypatch):
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", "cpu", echo=quiet)
    with pytest.raises(EvaluationError, match="trained on scans of people"):
        package(run, weights=tmp_path / "weights")
    # Nobody is a phantom, but the run before this one had people.
    content = checkpoint.load(checkpoint.newest(taught))
    content["participants"] |= {"before": [{"key": "k", "hashes": ["0" * 64]}]}
    begun = checkpoint.write(tmp_path, content.pop("step"), content)
    with pytest.raises(EvaluationError, match="trained on scans of people"):
        package(begun, weights=tmp_path / "weights")
    monkeypatch.setattr("octfm.encoder.packaging.MOST_BYTES", 1000)
    with pytest.raises(EvaluationError, match="publish it with octfm export"):
        package(taught, weights=tmp_path / "weights")
    assert not list((tmp_path / "weights").iterdir()), "nothing half-written"


# ---- scans one by one ------------------------------------------------------------------------------------------------


def test_a_scan_that_cannot_be_embedded_loses_no_other_and_shows_nothing_private(taught, tmp_path, monkeypatch):
    encoder, volumes, lines = load_encoder(taught, device="cpu"), [sample.volume for sample in samples()], []
    embed, bad = type(encoder).embed, [volumes[1]]

    def planted(self, volume):
        if any(volume is other for other in bad):
            raise ValueError("Doe^Jane")
        return embed(self, volume)

    monkeypatch.setattr(type(encoder), "embed", planted)
    _, count = embed_scans(encoder, volumes, tmp_path / "vectors", echo=lines.append)
    assert count == 2 and len(lines) == 1 and "could not be embedded (ValueError)" in lines[0]
    bad += volumes
    with pytest.raises(EvaluationError, match="could not be embedded") as caught:
        embed_scans(encoder, volumes, tmp_path / "none", echo=lines.append)
    assert len(lines) == 3, "all but the last are said, the last is raised"
    assert "Doe" not in " ".join([*lines, str(caught.value)])


def test_a_name_that_is_not_utf8_loses_no_vector(tmp_path):
    named = [replace(eye(), source="eye-\udcff.dcm", acquisition="unknown"), eye()]
    path, count = embed_scans(untrained_encoder(), named, tmp_path / "vectors", echo=quiet)
    assert count == 2 and "eye-\\udcff.dcm" in read_embeddings(path).acquisition


def test_a_bucket_that_does_not_answer_stops(taught, tmp_path, monkeypatch):
    encoder, volumes = load_encoder(taught, device="cpu"), [sample.volume for sample in samples()]
    embed = type(encoder).embed

    def planted(self, volume):
        if volume is volumes[0]:
            raise BucketError("no answer")
        return embed(self, volume)

    monkeypatch.setattr(type(encoder), "embed", planted)
    with pytest.raises(BucketError):
        embed_scans(encoder, volumes, tmp_path / "vectors", echo=quiet)
    assert not (tmp_path / "vectors").exists()


def test_every_unreadable_scan_is_named_where_none_can_be_read(shipped, tmp_path):
    names = [tmp_path / "a.vol", tmp_path / "b.vol"]
    for name in names:
        name.write_bytes(b"HSF-OCT-" + bytes(40))
    code, _, err = octfm_here("embed", *names, "--out", "vectors", cwd=tmp_path)
    assert code == 1 and all(str(name) in err for name in names), err


def test_vectors_of_scans_and_of_a_store_do_not_replace_each_other(taught, store, tmp_path):
    encoder, volumes = load_encoder(taught, device="cpu"), [sample.volume for sample in samples()]
    path = embed_store(encoder, store, tmp_path / "store", echo=quiet)
    before = path.read_bytes()
    with pytest.raises(EvaluationError, match="holds vectors of a store"):
        embed_scans(encoder, volumes[:1], tmp_path / "store", echo=quiet)
    assert path.read_bytes() == before
    path, _ = embed_scans(encoder, volumes[:1], tmp_path / "scans", echo=quiet)
    with pytest.raises(EvaluationError, match="holds vectors of single scans"):
        embed_store(encoder, store, tmp_path / "scans", echo=quiet)
    assert embed_scans(encoder, volumes[1:2], tmp_path / "scans", echo=quiet) == (path, 1), "earlier scans are replaced"


# ---- the one that ships ----------------------------------------------------------------------------------------------


def test_the_shipped_encoder_embeds_the_samples(tmp_path):
    encoder = load_encoder(device="cpu")
    path, count = embed_scans(encoder, [sample.volume for sample in samples()], tmp_path / "vectors", echo=quiet)
    found = read_embeddings(path)  # refuses what is not finite
    assert count == 3 and found.metadata["weights"] == encoder.digest == read_export(REAL)["sha256"]
    distance = np.linalg.norm(found.vectors[:, None] - found.vectors[None], axis=2)[np.triu_indices(3, 1)]
    assert distance.min() > 1e-2, "three diagnoses, three vectors"


def test_the_shipped_encoder_is_small_bf16_synthetic_and_begins_a_demo():
    from safetensors.torch import load_file

    assert sum(path.stat().st_size for path in REAL.iterdir()) < MOST_BYTES
    assert {tensor.dtype for tensor in load_file(REAL / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((REAL / "seen_participants.json").read_text())["hashes"] == []
    assert not (REAL / "participants.key").exists()
    facts = json.loads((REAL / "config.json").read_text())
    assert facts["licence"] == "Apache-2.0" and "synthetic" in facts["trained_on"] and "/" not in facts["made"]
    store = SimpleNamespace(preprocessing=load_encoder(device="cpu").preprocessing, rows=[])
    for preset in ("demo", "demo_vjepa2", "dense", "anchored"):
        words = ["model.init=packaged", "model.depth=6"]
        (check,) = initial_weights(octfm.load_config(preset, words), store)
        assert check.status == "WARN" and "without the queries" in check.measured, f"{preset}: {check.advice}"
        if preset in ("dense", "anchored"):
            advised = [word for word in check.advice.split() if word.startswith(("model.", "objective.pool"))]
            (check,) = initial_weights(octfm.load_config(preset, [*words, *advised]), store)
            assert check.status == "PASS", f"{preset}: {check.advice}"


def test_a_store_from_before_version_4_is_refused_with_both_versions(tmp_path):
    encoder = octfm.load_encoder(device="cpu")
    store = small_store(
        tmp_path / "old", splits=("train",), preprocessing=encoder.preprocessing.model_copy(update={"algorithm": 3})
    )
    with pytest.raises(EvaluationError, match=r"\(algorithm is 3, expected 4\); prepare the volumes again .*--like"):
        encoder.embed(store)
