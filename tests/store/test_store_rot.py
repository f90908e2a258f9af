"""No bit of a store changes unseen: voxels, band, valid, index, geometry and metadata, in old stores and new, on a
disk and in a cache."""

import errno
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.errors import StoreError
from octfm.store import verify as store_verify
from octfm.store.layout import ARRAYS, shard_key
from octfm.store.loader import Loader
from octfm.store.prepare import prepare, row_of
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.preprocessing import Preprocessing
from support import FIXTURES
from support.command_line import invoke
from support.examples import examples
from support.store_samples import SMALL, acquisition, catalog, prepared, read_sample, write_store

OLD = FIXTURES / "store_v1"
"""Written before shards carried checksums of their data."""
KINDS = ("none", "zstd", "old")
MANY = settings(max_examples=examples(25))


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    made = {kind: write_store(folder / kind, 3, compression=kind).path for kind in ("none", "zstd")}
    return made | {"old": Path(shutil.copytree(OLD, folder / "old"))}


@pytest.fixture(params=KINDS)
def copy(request, stores, tmp_path) -> Path:
    return Path(shutil.copytree(stores[request.param], tmp_path / "store"))


def flip(file: Path, bit: int) -> bytes:
    """Returns the bytes as they were."""
    good = file.read_bytes()
    bad = bytearray(good)
    bad[bit // 8 % len(bad)] ^= 1 << bit % 8
    file.write_bytes(bad)
    return good


@pytest.mark.parametrize("reader", ["octfm", "tensorstore"])
@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(st.sampled_from(sorted(ARRAYS)), st.integers(0, 2), st.integers(0, 10**9))
def test_no_flipped_bit_of_a_shard_is_read(stores, kind, reader, name, row, bit):
    with pytest.MonkeyPatch.context() as patch:
        if reader == "tensorstore":
            patch.setitem(sys.modules, "google_crc32c", None)
        path = stores[kind]
        shard = path / name / shard_key(row)
        good = flip(shard, bit)
        try:
            with pytest.raises(
                StoreError, match=rf"c\.{row}\.0\.0\.0: volume {row} \(1\.2\.3\.{row}\).*--verify"
            ) as caught:
                Store.open(path).read([2, 0, 1])
            assert "\n" not in str(caught.value)
        finally:
            shard.write_bytes(good)


@pytest.mark.parametrize("kind", ["none", "zstd"])
@MANY
@given(st.sampled_from(["rows.jsonl", "store.json"]), st.integers(0, 10**9))
def test_no_flipped_bit_of_rows_or_header_passes(stores, kind, name, bit):
    """Geometry, labels and settings. A last line without its end is one that a writer was killed at: its volume is
    made again."""
    path = stores[kind]
    whole = Store.open(path)
    good = flip(path / name, bit)
    try:
        store = Store.open(path)
        assert store.rows in (whole.rows, whole.rows[:-1]) and store.preprocessing == whole.preprocessing
        assert (store.fingerprint, store.image_size) == (whole.fingerprint, whole.image_size)
    except StoreError as error:
        assert name in str(error) and "\n" not in str(error)
    finally:
        (path / name).write_bytes(good)


@pytest.mark.parametrize("kind", KINDS)
@MANY
@given(st.sampled_from(sorted(ARRAYS)), st.integers(0, 10**9))
def test_damaged_zarr_metadata_never_gives_other_voxels(stores, kind, name, bit):
    path = stores[kind]
    whole = Store.open(path).read([0, 1, 2])
    good = flip(path / name / "zarr.json", bit)
    try:
        try:
            arrays = Store.open(path).read([0, 1, 2])
        except StoreError as error:
            assert "\n" not in str(error)
        else:
            assert all(np.array_equal(getattr(arrays, n), getattr(whole, n)) for n in ARRAYS)
    finally:
        (path / name / "zarr.json").write_bytes(good)


def test_a_shard_in_the_place_of_another_is_no_volume_of_its_row(copy):
    """Whole in itself, and found by the checksum of the row."""
    for name in ("voxels", "band"):
        shutil.copy(copy / name / shard_key(0), copy / name / shard_key(2))
        with pytest.raises(StoreError, match=r"volume 2 \(1\.2\.3\.2\) is damaged: this file"):
            Store.open(copy).read([0, 2])


def test_rot_between_two_epochs_stops_the_loader(copy):
    store = Store.open(copy)
    with Loader(store, range(3), 1, seed=0, prefetch=0) as loader:
        for step in range(3):
            loader.batches(step)
        bad = int(loader.indices(np.array([4]))[0])
        flip(copy / "voxels" / shard_key(bad), 8 * 150)
        with pytest.raises(StoreError, match=rf"step 4 failed: .*volume {bad} .*prepare CATALOG --out .* --verify"):
            for step in range(3, 6):
                loader.batches(step)


@pytest.mark.parametrize("kind", ["none", "zstd"])
def test_another_reader_of_zarr_sees_the_rot_too(stores, kind):
    for name in ARRAYS:
        shard = stores[kind] / name / shard_key(1)
        good = flip(shard, 8 * (shard.stat().st_size - 6))
        with pytest.raises(ValueError, match="checksum"):
            zarr.open_array(stores[kind] / name, mode="r")[1]
        shard.write_bytes(good)
        assert zarr.open_array(stores[kind] / name, mode="r").metadata.to_dict()["codecs"]


def test_an_old_store_grows_as_it_is(stores, tmp_path):
    """Its arrays have one codec for all volumes: new ones get no checksum of their own either, and are verified by
    their rows."""
    path = Path(shutil.copytree(OLD, tmp_path / "store"))
    header = json.loads((path / "store.json").read_text())
    # The fixture is older than the algorithm of today; its users would go on with theirs.
    today = {"fingerprint": Preprocessing(image_size=(2, 16, 16)).fingerprint()}
    (path / "store.json").write_text(json.dumps(header | today))
    before = {file: file.read_bytes() for file in path.rglob("c.*")}
    sample = prepared(3, (2, 16, 16))
    with StoreWriter(path, Preprocessing(image_size=(2, 16, 16))) as writer:
        assert not writer.crc and not writer.missing()
        digest = stage(sample, writer.staging, "x", writer.compression, writer.crc)
        writer.append(row_of(acquisition(3), sample, digest), "x")
    store = Store.open(path)
    np.testing.assert_array_equal(store.read([3, 0]).voxels[0], sample.voxels)
    assert store.verify() == 4 and {f: f.read_bytes() for f in before} == before
    flip(path / "valid" / shard_key(3), 77)
    with pytest.raises(StoreError, match="volume 3"):
        store.read([3])


# ---- octfm prepare --verify
# --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clinic(tmp_path):
    """A catalog of eight acquisitions whose files exist but one's, and its store."""
    found = []
    for number in range(8):
        file = tmp_path / f"{number}.oct"
        file.touch()
        found.append(replace(acquisition(number), uri=str(file)))
    scanned = catalog(found)
    scanned.save(tmp_path / "catalog")

    def make():
        return prepare(scanned, tmp_path / "store", SMALL, workers=0, progress=False, read=read_by_number)

    make()
    (tmp_path / "5.oct").unlink()
    return tmp_path, make


def read_by_number(uri):
    return read_sample(f"sample:{Path(uri).stem}:reads")


def verify(folder):
    return invoke("prepare", folder / "catalog", "--out", folder / "store", "--verify")


def test_verify_names_what_is_rotten_and_has_it_prepared_again(clinic):
    folder, make = clinic
    whole = Store.open(folder / "store").read(range(8)).voxels
    assert verify(folder).output.endswith("all 8 volumes are as they were written\n")
    for row, name in ((2, "voxels"), (5, "band"), (6, "valid")):
        flip(folder / "store" / name / shard_key(row), 999)
    told = verify(folder)
    assert isinstance(told.exception, StoreError) and told.exit_code == 1
    assert [line.split(": ")[0].split("/store/")[1] for line in told.output.splitlines()] == [
        "voxels/c.2.0.0.0", "band/c.5.0.0.0", "valid/c.6.0.0.0",
    ]  # fmt: skip
    assert "3 of 8 volumes are damaged; run the `octfm prepare` that made" in str(told.exception), "with its settings"
    assert "prepares 2 of them again; the source of 1 was not found" in str(told.exception)
    assert (folder / "store" / "band" / shard_key(5)).is_file(), "what cannot be made again is left"
    (folder / "5.oct").touch()
    assert isinstance(verify(folder).exception, StoreError)
    store = make()
    np.testing.assert_array_equal(store.read(range(8)).voxels, whole)
    assert verify(folder).exit_code == 0


def test_verify_repairs_metadata_and_deletes_no_volume_for_it(clinic):
    folder, _ = clinic
    for damage in (
        lambda text: "",
        lambda text: text.replace("uint8", "int8"),
        lambda text: text.replace("[8,", "[2,"),
    ):
        file = folder / "store" / "voxels" / "zarr.json"
        good = json.loads(file.read_text())
        file.write_text(damage(file.read_text()))
        told = verify(folder)
        assert told.exit_code == 1 and "damaged and rewritten; all 8 volumes are intact" in str(told.exception), told
        assert json.loads(file.read_text()) == good and verify(folder).exit_code == 0


def test_verify_calls_nothing_damaged_that_a_killed_writer_had_not_begun(clinic):
    folder, _ = clinic
    store = folder / "store"
    for part in [path for path in store.iterdir() if path.name != "store.json"]:
        shutil.rmtree(part) if part.is_dir() else part.unlink()
    told = verify(folder)
    assert told.exit_code == 1 and "holds no volume; run the `octfm prepare` that began it" in str(told.exception)
    assert "damaged" not in told.output and [path.name for path in store.iterdir()] == ["store.json"]


def test_verify_of_a_store_without_its_rows_says_to_restore_them(clinic):
    folder, _ = clinic
    (folder / "store" / "rows.jsonl").unlink()
    told = verify(folder)
    assert told.exit_code == 1 and "restore rows.jsonl from a copy" in str(told.exception)


def test_verify_deletes_nothing_where_most_volumes_differ(clinic):
    folder, _ = clinic
    for row in range(5):
        flip(folder / "store" / "voxels" / shard_key(row), 888)
    told = verify(folder)
    assert "5 of 8 volumes are damaged; with so many, the disk or the memory is suspect" in str(told.exception)
    assert len(list((folder / "store" / "voxels").glob("c.*"))) == 8


@pytest.mark.parametrize("kind", [OSError, ValueError], ids=["own reader", "tensorstore"])
@pytest.mark.parametrize("code", [errno.EACCES, errno.EMFILE, errno.ESTALE], ids=errno.errorcode.get)
def test_verify_deletes_no_volume_that_this_process_may_not_read(clinic, monkeypatch, code, kind):
    """As in a shared folder with files that a colleague wrote under umask 077, where few files may be open, or on a
    network disk that is away."""
    folder, _ = clinic
    refused, opened = folder / "store" / "band" / shard_key(3), Path.open

    def open_(path, *args, **settings):
        if path == refused:
            why = os.strerror(code)
            raise OSError(code, why, str(path)) if kind is OSError else ValueError(f"{why} [os_error_code='{code}']")
        return opened(path, *args, **settings)

    monkeypatch.setattr(Path, "open", open_)
    told = verify(folder)
    assert isinstance(told.exception, StoreError) and "the file may be intact" in str(told.exception), told
    assert refused.is_file()


def test_verify_reads_old_stores_without_changing_them(tmp_path):
    path = Path(shutil.copytree(OLD, tmp_path / "store"))
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    found = store_verify.verify(path, [], echo=lambda _: None)
    assert not found.damaged and not found.metadata
    assert {file: file.read_bytes() for file in before} == before
    flip(path / "voxels" / shard_key(1), 8 * 200)
    found = store_verify.verify(path, [], echo=lambda _: None)
    assert list(found.damaged) == [1] and not found.to_prepare
    with pytest.raises(StoreError, match="the source of 1 was not found: restore these shards from a copy"):
        store_verify.require_whole(found, path)


def test_verify_finds_a_source_in_a_folder_whose_name_ends_like_an_archive(tmp_path):
    path = Path(shutil.copytree(OLD, tmp_path / "store"))
    flip(path / "voxels" / shard_key(1), 8 * 200)
    scan = tmp_path / "new!" / "scan.dcm"
    scan.parent.mkdir()
    scan.write_bytes(b"a scan")
    name = Store.open(path).rows[1].acquisition
    source = replace(acquisition(1), uri=str(scan), sop_instance_uid=name)
    gone = replace(source, uri=f"{tmp_path / 'gone!' / 'scan.dcm'}")
    assert store_verify.verify(path, [gone], echo=lambda _: None).to_prepare == ()
    assert store_verify.verify(path, [source], echo=lambda _: None).to_prepare == (1,)
