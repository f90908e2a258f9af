"""Thousands of files become vectors without a store: the same ones, once each, whatever happens on the way."""

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydicom import dcmread, uid

from octfm.catalog.acquisition import Reject
from octfm.catalog.catalog import Catalog
from octfm.catalog.scan import scan
from octfm.encoder import embed_files as module
from octfm.encoder.embed import embedding_files, facts_of
from octfm.encoder.embed_files import embed_files
from octfm.encoder.embeddings import read_embeddings
from octfm.encoder.encoder import load_encoder
from octfm.errors import BucketError, EvaluationError
from octfm.evaluation.probe import probe
from octfm.io.location import location
from octfm.io.versions import listing_of
from octfm.store.prepare import prepare
from octfm.tasks.embed_run import embed_all
from support.codestreams import imagecodecs_encoder, picture
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.multifile_dicom import concatenation
from support.small_store import small_preprocessing, small_store
from support.store_samples import SMALL, acquisition
from support.tiny_runs import config, quick_pretrain, quiet
from support.waiting import planted_delay

COUNT = 11


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    store = small_store(tmp_path_factory.mktemp("store") / "prepared")
    return quick_pretrain(config(steps=2), store, tmp_path_factory.mktemp("runs") / "run", echo=quiet)


def test_the_newest_outcome_of_a_file_counts_and_every_vector_stands_beside_its_file(tmp_path):
    """Parts of three calls: a retry of what failed, and a file that has changed since."""
    kind = module._Kind("pretrained", 2, lambda arrays: arrays.voxels, {"key": "k", "name": "pretrained"})
    tasks = [module._Task(acquisition(n), "v1") for n in range(4)]
    changed = replace(tasks[3], version="v0")

    def row(task, outcome):
        names = dict(zip(("acquisition", "uri", "version"), task.identity, strict=True))
        failed = isinstance(outcome, str)
        return names | {"code": outcome if failed else "", "sentence": f"{outcome}!",
                        "pretrained": None if failed else np.full(2, outcome, np.float32)}  # fmt: skip

    parts = {
        3: [row(tasks[0], 1), row(tasks[1], "unreadable"), row(changed, 9)],
        7: [row(tasks[1], 2), row(tasks[2], "no_contrast"), row(tasks[3], 4)],
    }
    (tmp_path / "parts").mkdir()
    for number, rows in parts.items():
        (tmp_path / "parts" / f"{number:06d}.parquet").write_bytes(module._part(rows, [kind]))
    every = {task.identity for task in (*tasks, changed)}
    assert module._finished(tmp_path, retry=False) == (8, every)
    assert module._finished(tmp_path, retry=True) == (8, every - {tasks[2].identity})
    catalog: Any = SimpleNamespace(rejects=[Reject("cut.dcm", "truncated_pixel_data", "cut", 1)], skipped=(1, 2))
    keys = set()
    for chosen, values in ((tasks, [1, 2, 4]), ([*tasks[:3], changed], [1, 2, 9])):
        summary = module._finish(tmp_path, catalog, chosen, [kind], SMALL)
        failures = {"no_contrast": 1, "truncated_pixel_data": 1}
        assert summary == {"volumes": 4, "embedded": 3, "failures": failures, "skipped": 2}
        found = read_embeddings(tmp_path / "pretrained.parquet")
        assert dict(zip(found.acquisition.tolist(), found.vectors[:, 0], strict=True)) == {
            task.acquisition.sop_instance_uid: value for task, value in zip((*tasks[:2], tasks[3]), values, strict=True)
        }
        people = {task.acquisition.sop_instance_uid: task.acquisition.participant for task in tasks}
        assert found.participant.tolist() == [people[name] for name in found.acquisition.tolist()]
        keys.add(facts_of(tmp_path / "pretrained.parquet")["key"])
        rows = pq.read_table(tmp_path / "failures.parquet").to_pylist()
        assert [(row["uri"], row["sentence"]) for row in rows] == [
            (tasks[2].acquisition.uri, "no_contrast!"), ("cut.dcm", "cut")
        ]  # fmt: skip
    assert len(keys) == 2, "of other volumes"


def test_a_vector_is_made_again_for_whatever_would_change_it_and_for_nothing_else(tmp_path):
    file, beside = str(tmp_path / "a.npy"), str(tmp_path / "a.json")
    own = acquisition(0, uri=file)

    def version(listing=(), **changed):
        return module._versions({file: "1"} | dict(listing))(replace(own, **changed))

    others = [{"laterality": "L"}, {"laterality": None}, {"spacing_mm": (0.2, 0.05, 0.25)}, {"layout": "radial"},
              {"modality": "octa"}]  # fmt: skip
    listings = [{file: "2"}, {beside: "1"}, {beside: "2"}]
    found = {version(), *(version(**other) for other in others), *map(version, listings)}
    assert len(found) == 1 + len(others) + len(listings)
    assert (
        version({"b.npy": "1"}, split="val", participant="other", scanner="other", flags=("way_up_unclear",))
        == version()
    )


def test_files_behind_links_are_listed_too(tmp_path):
    """A scan follows links: a new file there must not be missed by what decides whether to scan again."""
    (tmp_path / "scans").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "scans" / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "back").symlink_to(tmp_path / "scans")  # a circle
    (tmp_path / "scans" / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "other" / "a.dcm").write_bytes(b"1")
    assert list(listing_of(tmp_path / "scans")) == [f"{tmp_path}/scans/link/a.dcm"]


@pytest.mark.slow
def test_a_dicomdir_stands_for_its_folder_whose_new_files_are_embedded(run, tmp_path):
    (tmp_path / "cd").mkdir()
    (tmp_path / "cd" / "DICOMDIR").write_bytes(b"")
    for count in (1, 2):
        write_eye(tmp_path / "cd" / f"{count}.dcm", count, f"p{count}")
        embed_files(run, tmp_path / "cd" / "DICOMDIR", tmp_path / "out", workers=0, echo=quiet)
        assert len(Catalog.load(tmp_path / "out" / "catalog").acquisitions) == count


def write_eye(path: Path, seed: int, participant: str) -> Path:
    from octfm.phantom import phantom_volume

    volume, _ = phantom_volume(seed, size=(6, 64, 48))
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_oct_dicom(
        path, volume.voxels, volume.spacing_mm, participant=participant, sop_instance_uid=f"1.2.3.{seed + 1}"
    )


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    """Eleven eyes of eleven people; one file has lost its end, one is no image at all, one has
    pixels that its header does not allow, which only decoding tells."""
    root = tmp_path_factory.mktemp("clinic")
    for seed in range(COUNT):
        write_eye(root / f"p{seed:02d}" / "eye.dcm", seed, f"Q{seed:02d}")
    broken = root / "p03" / "eye.dcm"
    broken.write_bytes(broken.read_bytes()[:-3000])
    (root / "p05" / "scan.dcm").write_bytes(b"no image")
    (root / "p99").mkdir()
    write_oct_dicom(
        root / "p99" / "eye.dcm", np.stack([np.roll(picture(16), k, axis=0) for k in range(6)]), (0.9, 0.03, 0.1),
        participant="Q99", sop_instance_uid="1.2.9", transfer_syntax=uid.HTJ2KLossless, bits_stored=12,
        encode=imagecodecs_encoder("htj2k", reversible=True),
    )  # fmt: skip
    return root


def vectors(out) -> dict[str, np.ndarray]:
    read = read_embeddings(location(str(out)) / "pretrained.parquet")
    return dict(zip(read.acquisition.tolist(), read.vectors, strict=True))


def same(a, b) -> bool:
    a, b = vectors(a), vectors(b)
    return list(a) == list(b) and all(np.array_equal(a[name], b[name]) for name in a)


def test_the_vectors_are_those_of_a_store_and_failures_are_rows(run, clinic, tmp_path):
    done = embed_files(run, clinic, tmp_path / "out", baselines=True, workers=0, echo=quiet)
    assert done["embedded"] == COUNT - 1 and done["volumes"] == COUNT
    failures = {
        row["uri"].split("/")[-2]: row for row in pq.read_table(tmp_path / "out" / "failures.parquet").to_pylist()
    }
    assert {name: row["code"] for name, row in failures.items()} == {
        "p03": "truncated_pixel_data", "p05": "not_dicom", "p99": "unsupported_pixels",
    }  # fmt: skip
    assert all(row["sentence"] and row["fix"] for row in failures.values())
    store = prepare(scan(clinic, workers=0), tmp_path / "store", small_preprocessing(), workers=0, progress=False)
    from_store = {
        read_embeddings(path).name: read_embeddings(path)
        for path in embed_all(run, store.path, tmp_path / "of_store", echo=quiet)
    }
    for path in embedding_files(run, tmp_path / "out"):
        ours, theirs = read_embeddings(path), from_store[read_embeddings(path).name]
        assert (
            ours.acquisition.tolist() == theirs.acquisition.tolist()
            and ours.participant.tolist() == theirs.participant.tolist()
        )
        assert ours.split == theirs.split
        np.testing.assert_allclose(
            ours.vectors, theirs.vectors, atol=1e-5
        )  # batches of 8 and of 16 add up in another order


def test_a_second_call_reads_nothing_a_changed_file_alone_is_read_again(run, clinic, tmp_path, monkeypatch):
    root, out, decoded = shutil.copytree(clinic, tmp_path / "clinic"), tmp_path / "out", []
    real = module.prepare_acquisition

    def counted(acquisition, *rest, **settings):
        decoded.append(acquisition.participant)
        return real(acquisition, *rest, **settings)

    monkeypatch.setattr(module, "prepare_acquisition", counted)
    embed_files(run, root, out, workers=0, echo=quiet)
    assert len(decoded) == COUNT
    before = vectors(out)
    monkeypatch.setattr(module, "scan", lambda *_, **__: pytest.fail("scanned again"))
    decoded.clear()
    embed_files(run, root, out, workers=0, echo=quiet)
    assert decoded == []
    embed_files(run, root, out, workers=0, retry=True, echo=quiet)
    assert decoded == ["Q99"], "only what failed"
    monkeypatch.undo()
    monkeypatch.setattr(module, "prepare_acquisition", counted)
    decoded.clear()
    write_eye(root / "p01" / "eye.dcm", 77, "Q01")
    write_eye(root / "new" / "eye.dcm", 78, "Q78")
    embed_files(run, root, out, workers=0, echo=quiet)
    assert sorted(decoded) == ["Q01", "Q78"]
    after = vectors(out)
    assert "1.2.3.2" not in after and {"1.2.3.78", "1.2.3.79"} <= set(after)
    assert all(np.array_equal(after[name], before[name]) for name in set(before) & set(after))


def test_killed_while_the_catalog_of_new_files_is_saved_and_these_are_gone_again(run, tmp_path, monkeypatch):
    """The call that followed took the catalog with the new file for that of the folder as it had been before."""
    root, out = tmp_path / "scans", tmp_path / "out"
    write_eye(root / "a.dcm", 1, "Q01")
    embed_files(run, root, out, workers=0, echo=quiet)
    write_eye(root / "b.dcm", 2, "Q02")
    save = Catalog.save

    def killed(catalog, folder):
        save(catalog, folder)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Catalog, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            embed_files(run, root, out, workers=0, echo=quiet)
    (root / "b.dcm").unlink()
    assert embed_files(run, root, out, workers=0, echo=quiet)["volumes"] == 1


def test_a_volume_whose_declared_eye_or_millimetres_changed_is_embedded_again(run, tmp_path):
    from octfm.phantom import phantom_volume

    volume, _ = phantom_volume(3, size=(6, 64, 48))
    (root := tmp_path / "clinic").mkdir()
    np.save(root / "eye.npy", volume.voxels)
    facts = {"spacing_mm": volume.spacing_mm, "laterality": "R", "participant": "Q1"}

    def embedded(out: str, **changed) -> np.ndarray:
        (root / "eye.json").write_text(json.dumps(facts | changed))
        embed_files(run, root, tmp_path / out, workers=0, echo=quiet)
        (vector,) = vectors(tmp_path / out).values()
        return vector

    before = embedded("out")
    for number, changed in enumerate(({"laterality": "L"}, {"upside_down": True})):
        after = embedded("out", **changed)
        assert not np.array_equal(after, before), "the vector of the old words"
        assert np.array_equal(after, embedded(f"fresh{number}", **changed))
    # A catalog states more than the files: the same files, scanned with other millimetres.
    catalog = scan(root, workers=0)
    wider = tuple(1.1 * mm for mm in volume.spacing_mm)
    other = replace(catalog, acquisitions=tuple(replace(a, spacing_mm=wider) for a in catalog.acquisitions))
    for each in (catalog, other):
        embed_files(run, each, tmp_path / "of-catalog", workers=0, echo=quiet)
    embed_files(run, other, tmp_path / "fresh-catalog", workers=0, echo=quiet)
    assert same(tmp_path / "of-catalog", tmp_path / "fresh-catalog")


def test_a_volume_of_several_files_is_embedded_again_if_any_of_them_changes(run, tmp_path):
    from octfm.phantom import phantom_volume

    (root := tmp_path / "clinic").mkdir()
    paths = concatenation(root, phantom_volume(3, size=(7, 64, 48))[0].voxels)
    embed_files(run, root, tmp_path / "out", workers=0, echo=quiet)
    part = dcmread(paths[1])
    part.PixelData = bytes(255 - value for value in part.PixelData)
    part.save_as(paths[1])
    for out in ("out", "fresh"):
        embed_files(run, root, tmp_path / out, workers=0, echo=quiet)
    assert same(tmp_path / "out", tmp_path / "fresh")


def test_other_weights_and_other_precision_are_refused(run, clinic, tmp_path):
    out = tmp_path / "out"
    embed_files(run, clinic, out, workers=0, echo=quiet)
    with pytest.raises(EvaluationError, match="begun with other vectors"):
        embed_files(run, clinic, out, precision="bf16", workers=0, echo=quiet)
    with pytest.raises(EvaluationError, match="begun with other vectors"):
        embed_files(run, clinic, out, baselines=True, workers=0, echo=quiet)
    with pytest.raises(EvaluationError, match="inside the folder to be embedded"):
        embed_files(run, clinic, clinic / "out", workers=0, echo=quiet)
    assert not (clinic / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(EvaluationError, match="not an embedding job"):
        embed_files(run, clinic, tmp_path / "mine", workers=0, echo=quiet)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"], (
        "nothing is left in a refused folder"
    )
    with pytest.raises(EvaluationError, match="none of 1 volumes could be embedded, 1 with unsupported_pixels"):
        one = scan(clinic, workers=0)
        one = replace(one, acquisitions=tuple(a for a in one.acquisitions if a.participant == "Q99"))
        embed_files(run, one, tmp_path / "none", workers=0, echo=quiet)


KILLED = """
import os, signal, sys
from octfm.encoder import embed_files as module
module.SHARD = module.BATCH = 2
real, left = module.write_whole, [int(sys.argv[4])]
def counted(where, data):
    if "parts" in str(where):
        left[0] -= 1
        if left[0] < 0:
            where.parent.mkdir(exist_ok=True)
            where.with_name("." + where.name + ".partial").write_bytes(data[:100])
            os.kill(os.getpid(), signal.SIGKILL)
    real(where, data)
module.write_whole = counted
decoded = module.prepare_acquisition
def told(acquisition, *rest, **settings):
    with open(sys.argv[3] + ".decoded", "a") as file: file.write(acquisition.participant + "\\n")
    return decoded(acquisition, *rest, **settings)
module.prepare_acquisition = told
module.embed_files(sys.argv[1], sys.argv[2], sys.argv[3], workers=0, echo=print)
"""


def test_a_part_that_lacks_a_column_is_damaged(run, clinic, tmp_path):
    out = tmp_path / "out"
    embed_files(run, clinic, out, workers=0, echo=quiet)
    part = sorted((out / "parts").iterdir())[-1]
    pq.write_table(pq.read_table(part).drop_columns("version"), part)
    with pytest.raises(EvaluationError, match=r"parquet: damaged \(.*version.*\); delete it, and run the same command"):
        embed_files(run, clinic, out, workers=0, echo=quiet)


@pytest.mark.slow
def test_killed_at_every_shard_only_one_shard_is_computed_twice(run, clinic, tmp_path, monkeypatch):
    """SIGKILL while a shard is written, with half of it on the disk; each attempt finishes one more shard."""
    out = tmp_path / "out"
    attempts = []
    for _ in range(8):
        arguments = [sys.executable, "-c", KILLED, str(run), str(clinic), str(out), "2"]
        attempts.append(subprocess.run(arguments, capture_output=True, text=True, timeout=250))
        if attempts[-1].returncode == 0:
            break
        assert attempts[-1].returncode == -signal.SIGKILL, attempts[-1].stderr
        assert not (out / "pretrained.parquet").exists()
    assert attempts[-1].returncode == 0 and len(attempts) == 3
    decoded = Path(f"{out}.decoded").read_text().split()
    assert len(decoded) == COUNT + 2 * 2, "two kills, two volumes each"
    monkeypatch.setattr(module, "SHARD", 2)
    monkeypatch.setattr(module, "BATCH", 2)
    embed_files(run, clinic, tmp_path / "whole", workers=0, echo=quiet)
    assert same(out, tmp_path / "whole")


def test_two_jobs_do_not_write_into_one_folder(run, clinic, tmp_path):
    with (
        module._exclusive(tmp_path / "out"),
        pytest.raises(EvaluationError, match=r"another process .pid \d+ on .* is embedding"),
    ):
        embed_files(run, clinic, tmp_path / "out", workers=0, echo=quiet)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_from_a_bucket_into_a_bucket_that_lets_nobody_delete_and_on_to_the_probe(
    place, run, clinic, tmp_path, monkeypatch
):
    from octfm.io import bucket

    def refuse(uri):
        raise BucketError(f"{uri}: delete it: access denied")

    monkeypatch.setattr(bucket, "delete", refuse)
    for file in sorted(path for path in clinic.rglob("*") if path.is_file()):
        (place / "raw" / str(file.relative_to(clinic))).write_bytes(file.read_bytes())
    done = embed_files(run, place / "raw", place / "vectors", workers=1, echo=quiet)
    assert done["embedded"] == COUNT - 1 and done["bucket"]["requests"] > 0 and done["bucket"]["failures"] == 0
    embed_files(run, clinic, tmp_path / "here", workers=0, echo=quiet)
    assert same(place / "vectors", tmp_path / "here")
    labels = tmp_path / "labels.tsv"
    labels.write_text("participant_id\tsick\n" + "".join(f"Q{i:02d}\t{('yes', 'no')[i % 2]}\n" for i in range(COUNT)))
    result = probe(
        embedding_files(run, place / "vectors"), labels, targets=["sick"], design="k-fold", folds=2, resamples=200
    )
    assert result["results"][0]["n_test_acquisitions"] == COUNT - 1
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(attempts=2, first_s=0.01))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(BucketError):
        embed_files(run, place / "raw", tmp_path / "gone", workers=0, echo=quiet)


@pytest.mark.parametrize("place", ["gs"], indirect=True)
def test_from_gs_into_gs_and_on_after_a_stop(place, run, clinic, tmp_path, monkeypatch):
    """The second shard cannot be written; the same call goes on with it, and the vectors are those of files on a
    disk."""
    for file in sorted(path for path in clinic.rglob("*") if path.is_file()):
        (place / "raw" / str(file.relative_to(clinic))).write_bytes(file.read_bytes())
    with monkeypatch.context() as patch:
        real, written = module.write_whole, []

        def stopped(where, data):
            if "parts" in str(where) and len(written) == 1:
                raise KeyboardInterrupt
            written.extend(["part"] * ("parts" in str(where)))
            real(where, data)

        patch.setattr(module, "write_whole", stopped)
        patch.setattr(module, "SHARD", 8)
        with pytest.raises(KeyboardInterrupt):
            embed_files(run, place / "raw", place / "vectors", workers=0, echo=quiet)
    said = []
    done = embed_files(run, place / "raw", place / "vectors", workers=0, echo=said.append)
    assert "8 of 11 volumes are embedded already" in said[0] and done["embedded"] == COUNT - 1
    assert done["bucket"]["requests"] > 0 and done["bucket"]["failures"] == 0
    embed_files(run, clinic, tmp_path / "here", workers=0, echo=quiet)
    assert same(place / "vectors", tmp_path / "here")
    failures = pq.read_table(tmp_path / "here" / "failures.parquet").to_pylist()
    assert sorted(row["code"] for row in failures) == ["not_dicom", "truncated_pixel_data", "unsupported_pixels"]


def test_the_verb_and_a_catalog(run, clinic, tmp_path):
    def octfm(*words):
        return invoke("embed", run, *words)

    scan(clinic, workers=0).save(tmp_path / "catalog")
    result = octfm("--catalog", tmp_path / "catalog", "--out", tmp_path / "out", "--workers", 0)
    assert result.exit_code == 0, result.output
    assert "10 of 11 volumes embedded" in result.output and "unsupported_pixels: 1" in result.output
    assert len(Catalog.load(tmp_path / "catalog").acquisitions) == len(vectors(tmp_path / "out")) + 1
    assert (
        json.loads((tmp_path / "out" / "job.json").read_text())["vectors"]["pretrained"] == load_encoder(run).vector_key
    )
    for job in ([], {}, {"vectors": []}, None):
        (tmp_path / "out" / "job.json").write_text(json.dumps(job))
        refused = octfm("--catalog", tmp_path / "catalog", "--out", tmp_path / "out", "--workers", 0)
        assert refused.exit_code == 1 and "damaged, or not an embedding job's" in str(refused.exception), job
    for words, message in (
        (("--files", clinic), "--out"),
        (("--files", clinic, "--store", "prepared"), "give one of them"),
        (("--files", clinic, "--out", tmp_path / "x", "--precision", "fp8"), "'fp8' is not one of 'fp32', 'bf16'"),
    ):
        refused = octfm(*words)
        assert message in f"{refused.exception}{refused.output}"


def test_decoding_waits_for_the_encoder(monkeypatch):
    """A slow encoder must not let decoded volumes pile up in memory."""
    from octfm.io import spread

    begun, taken = [], 0

    def slow(item):
        begun.append(item)
        return item

    monkeypatch.setattr(spread, "_isolated", lambda function, items, **_: [function(items[0])])
    for result in spread.spread(slow, list(range(50)), lambda item, _: item, workers=2, chunk=1):
        assert result == taken
        taken += 1
        planted_delay(0.002)
        assert len(begun) <= taken + spread.AHEAD * 2
    assert taken == 50
