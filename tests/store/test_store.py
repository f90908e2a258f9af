"""The store gives back exactly what was put in, to any zarr reader, and says so when it cannot.

tests/fixtures/store_v1 is a store of version 1, written once from random numbers and kept, so that stores of users stay
readable:

    from pathlib import Path
    from octfm.volume.preprocessing import Preprocessing
    from support.store_samples import write_store            # with tests/ on the path
    write_store(Path("tests/fixtures/store_v1"), 3, Preprocessing(image_size=(2, 16, 16)))
"""

import json
import math
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import tracemalloc
from array import array
from dataclasses import replace

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.buffer import cpu
from zarr.storage import MemoryStore

from octfm.errors import StoreError
from octfm.store.arrays import TensorStoreArrays
from octfm.store.layout import ARRAYS, Arrays, array_metadata, checksum, read_rows, shapes, shard_key, to_line
from octfm.store.phantoms import MixedStore, PhantomConfig, PhantomStore
from octfm.store.shards import ShardArrays, encode
from octfm.store.store import Store
from octfm.store.writer import StoreWriter
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.transform import Transform
from support import FIXTURES
from support.store_samples import SMALL, prepared, write_store

FIXTURE = FIXTURES / "store_v1"


@pytest.fixture(scope="module", params=["none", "zstd"])
def store(request, tmp_path_factory) -> Store:
    return write_store(tmp_path_factory.mktemp(request.param) / "store", 7, compression=request.param)


@pytest.fixture
def without_crc32c(monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)


def assert_equals_samples(arrays: Arrays, numbers, image_size=SMALL.image_size):
    for place, number in enumerate(numbers):
        sample = prepared(int(number), image_size)
        for name in ("voxels", "band", "valid"):
            found, wanted = getattr(arrays, name)[place], getattr(sample, name)
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)


@settings(max_examples=20)
@given(st.lists(st.integers(0, 6), max_size=9))
def test_reading_returns_what_was_written_in_the_order_asked(store, indices):
    arrays = store.read(indices)
    assert arrays.voxels.shape == (len(indices), *SMALL.image_size)
    assert_equals_samples(arrays, indices)


def test_tensorstore_reads_the_same_where_google_crc32c_is_absent(store, without_crc32c):
    fresh = Store.open(store.path, threads=2)
    assert_equals_samples(fresh.read([5, 0, 5]), [5, 0, 5])
    assert type(fresh._arrays).__name__ == "TensorStoreArrays"


def test_a_fork_without_google_crc32c_is_an_error_and_not_a_crash(store, without_crc32c):
    """tensorstore ends a process that was forked after its import."""
    Store.open(store.path).read([0])
    fresh, (reader, writer) = Store.open(store.path), os.pipe()
    if not (child := os.fork()):
        try:
            fresh.read([0])
        except StoreError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0 and b"install it, or spawn" in os.read(reader, 1000)


def test_any_zarr_reader_sees_one_array_of_volumes(store):
    group = zarr.open_group(store.path, mode="r")
    voxels = group["voxels"]
    assert voxels.shape == (7, *SMALL.image_size) and voxels.shards == (1, *SMALL.image_size)
    assert voxels.metadata.codecs[0].index_location.value == "start"
    np.testing.assert_array_equal(voxels[3], prepared(3).voxels)
    np.testing.assert_array_equal(group["band"][3], prepared(3).band)


def written_by_zarr(name, array, size, compression, crc) -> bytes:
    metadata = json.dumps(array_metadata(name, 1, size, compression, crc)).encode()
    memory = {"zarr.json": cpu.Buffer.from_bytes(metadata)}
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.open_array(MemoryStore(memory), mode="r+")[0] = array
    return memory[shard_key(0)].to_bytes()


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("size", [(1, 8, 8), (4, 32, 16), (34, 8, 8), (61, 16, 16)])
def test_shards_are_what_zarr_writes(size, compression):
    rng = np.random.default_rng(0)
    for name, shape in shapes(size).items():
        for values in (rng.integers(0, 200, shape).astype(ARRAYS[name]), np.zeros(shape, ARRAYS[name])):
            for crc in (True, False):
                ours = encode(name, values, size, compression, crc)
                theirs = written_by_zarr(name, values, size, compression, crc)
                assert ours == theirs or (compression == "zstd" and abs(len(ours) - len(theirs)) < 64), name


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("crc", [True, False])
def test_each_reader_reads_what_each_writer_wrote(tmp_path, monkeypatch, compression, crc):
    """octfm, zarr and tensorstore."""
    size = (32, 24, 16)
    sample = {
        name: (np.arange(np.prod(shape)) * 7 % 201).astype(ARRAYS[name]).reshape(shape)
        for name, shape in shapes(size).items()
    }
    for name, values in sample.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "zarr.json").write_text(json.dumps(array_metadata(name, 3, size, compression, crc)))
        (folder / shard_key(0)).write_bytes(encode(name, values, size, compression, crc))
        (folder / shard_key(1)).write_bytes(written_by_zarr(name, values, size, compression, crc))
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "google_crc32c", None)
            (folder / shard_key(2)).write_bytes(encode(name, values, size, compression, crc))
    for name, values in sample.items():
        ours, theirs = np.empty((2, 3, *values.shape), ARRAYS[name])
        ShardArrays(tmp_path, compression, crc, 2).read_into(name, np.arange(3), ours)
        TensorStoreArrays(tmp_path, 2).read_into(name, np.arange(3), theirs)
        for found in (ours, theirs, zarr.open_array(tmp_path / name, mode="r")[:]):
            np.testing.assert_array_equal(found, np.stack([values] * 3))


def test_given_memory_is_filled(store):
    out = Arrays.empty(2, store.image_size)
    assert store.read([1, 2], out=out) is out
    assert_equals_samples(out, [1, 2])


def test_rows_lead_back_to_the_native_frame(store):
    assert [row.index for row in store.rows] == list(range(7))
    assert Transform.from_dict(store.rows[1].transform) == prepared(1).transform
    assert store.preprocessing == SMALL and store.fingerprint == SMALL.fingerprint()


@pytest.mark.parametrize("index", [7, -1, 100])
def test_rows_that_do_not_exist_are_refused(store, index):
    with pytest.raises(StoreError, match=f"no row {index}; the store has 7 rows"):
        store.read([0, index])


def test_a_mask_is_not_read_as_numbers_of_rows(store):
    chosen = np.arange(7) > 4
    for mask in (chosen, chosen.astype(float)):
        with pytest.raises(StoreError, match="expected numbers of rows"):
            store.read(mask)
        with pytest.raises(StoreError, match="expected numbers of rows"):
            store.damaged(mask)  # rows 0 and 1 were compared over and over, and all others called intact
        with pytest.raises(StoreError, match="expected numbers of rows"):
            MixedStore(store, PhantomStore(PhantomConfig(), store.preprocessing)).damaged(mask)
    assert not len(store.read([]).voxels)


def test_a_store_is_read_after_the_current_folder_has_changed(store, monkeypatch, tmp_path):
    """Its volumes were called damaged."""
    monkeypatch.chdir(store.path.parent)
    relative, part = Store.open(store.path.name), Store.open(store.path.name)[2:4]
    monkeypatch.chdir(tmp_path)
    assert str(relative.path) == store.path.name
    np.testing.assert_array_equal(relative[1].voxels, store[1].voxels)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(part))[0].voxels, store[2].voxels)


def test_the_folder_above_a_link_is_not_the_one_that_holds_it(store, monkeypatch, tmp_path):
    """A store that was opened as link/../prepared was looked for beside the link, where there may be another."""
    (tmp_path / "link").symlink_to(store.path / "voxels")
    monkeypatch.chdir(tmp_path)
    assert Store.open("link/..")[1].voxels.any()


def test_an_unreadable_volume_is_named_by_the_path_that_was_given(own, monkeypatch):
    """The absolute folder stood beside it, and cut off the reason."""
    monkeypatch.chdir(own.path.parent)
    relative = Store.open(own.path.name)
    (own.path / "voxels" / shard_key(1)).unlink()
    with pytest.raises(StoreError, match="No such file") as raised:
        relative[1]
    assert str(own.path.parent) not in str(raised.value)


def test_a_store_that_is_gone_is_not_called_damaged(own):
    """As after a disk was unmounted: all volumes were to be prepared again."""
    own[0]
    own.path.rename(own.path.with_name("elsewhere"))
    for read in (lambda: own[1], own.verify, lambda: own[:2].read([0])):
        with pytest.raises(StoreError, match=r"this store is no longer here .* put it back"):
            read()


def test_summary_counts_low_confidence_per_scanner_and_diagnosis(store):
    summary = store.summary()
    assert summary["volumes"] == 7 and summary["participants"] == 4
    assert summary["low_confidence"] == 3
    assert summary["by_scanner"]["heidelberg_spectralis"] == {"volumes": 3, "low_confidence": 3}
    assert summary["by_diagnosis"]["healthy"] == {"volumes": 3, "low_confidence": 2}


@pytest.fixture
def own(tmp_path) -> Store:
    return write_store(tmp_path / "store", 3)


def test_a_changed_byte_is_found_by_the_checksum(tmp_path):
    own = write_store(tmp_path / "my store", 3)
    assert own.verify() == 3 and own.verify(sample=2) == 2
    shard = own.path / "voxels" / "c.1.0.0.0"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(StoreError, match=r"1 of 3 volumes are damaged: rows 1 \(1\.2\.3\.1\); run `") as told:
        Store.open(own.path).verify()
    command = shlex.split(str(told.value).split("`")[1])
    assert command == ["octfm", "prepare", "CATALOG", "--out", str(own.path), "--verify"]


@pytest.mark.parametrize("name", ["voxels", "band", "valid"])
@pytest.mark.parametrize("reader", ["octfm", "tensorstore"])
def test_a_lost_shard_is_an_error_and_never_zeros(own, name, reader, request):
    if reader == "tensorstore":
        request.getfixturevalue("without_crc32c")
    (own.path / name / "c.2.0.0.0").unlink()
    with pytest.raises(StoreError, match=rf"{name}.c\.2\.0\.0\.0: volume 2 \(1\.2\.3\.2\) cannot be read.*prepare"):
        Store.open(own.path).read([0, 2])


def test_a_cut_shard_is_an_error_that_names_the_volume(own):
    shard = own.path / "voxels" / "c.1.0.0.0"
    shard.write_bytes(shard.read_bytes()[:-5])
    with pytest.raises(StoreError, match=r"c\.1\.0\.0\.0: volume 1 .*cannot be read"):
        own.read([0, 1, 2])


def test_blank_volumes_are_stored_too(tmp_path):
    """Writers of zarr leave out chunks of zeros by default, which would look like a lost shard."""
    from dataclasses import replace

    from octfm.store.prepare import row_of
    from octfm.store.writer import stage
    from support.store_samples import acquisition

    blank = replace(prepared(0), voxels=np.zeros(SMALL.image_size, np.uint8), valid=np.zeros_like(prepared(0).valid))
    with StoreWriter(tmp_path / "s", SMALL) as writer:
        digest = stage(blank, writer.staging, "0", writer.compression)
        writer.append(row_of(acquisition(0), blank, digest), "0")
    assert not Store.open(tmp_path / "s").read([0]).voxels.any()


def test_checksum_covers_voxels_band_and_valid():
    sample = prepared(0)
    whole = checksum(sample.voxels, sample.band, sample.valid)
    assert whole.startswith("sha256:")
    for name in ("voxels", "band", "valid"):
        arrays = {n: getattr(sample, n).copy() for n in ("voxels", "band", "valid")}
        arrays[name].flat[5] += 1
        assert checksum(**arrays) != whole


def test_a_folder_without_a_store_is_refused(tmp_path):
    with pytest.raises(StoreError, match=r"no prepared store here.*octfm prepare"):
        Store.open(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "store version 2, but this octfm reads version 1"),
        ({"format": "other"}, "not an octfm store"),
    ],
)
def test_other_formats_and_versions_are_refused(own, change, message):
    file = own.path / "store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(StoreError, match=message):
        Store.open(own.path)


def test_a_header_without_its_facts_or_with_foreign_settings_is_refused(own):
    file = own.path / "store.json"
    header = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in header.items() if key != "fingerprint"}))
    with pytest.raises(StoreError, match=r"store\.json: fingerprint missing"):
        Store.open(own.path)
    del header["digest"]
    file.write_text(json.dumps(header | {"preprocessing": {**header["preprocessing"], "image_sise": 1}}))
    with pytest.raises(StoreError, match=r"store\.json: .*did you mean image_size\?"):
        _ = Store.open(own.path).preprocessing


def test_a_damaged_quarantine_list_is_named(own):
    (own.path / "unprepared.jsonl").write_text("junk\n")
    with pytest.raises(StoreError, match=r"unprepared\.jsonl: not a list of unprepared volumes"):
        own.unprepared()


@pytest.mark.parametrize("damaged", ["{}", "[1]", '"text"', "7", "", "[" * 100_000], ids=lambda text: text[:6])
def test_a_damaged_row_is_named_by_its_line(own, damaged):
    file = own.path / "rows.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text(lines[0] + damaged + "\n" + lines[2])
    with pytest.raises(StoreError, match="line 2 is not a valid row"):
        Store.open(own.path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda line: line.replace('"confident":true', '"confident":false'), "it does not match its digest"),
        (lambda line: json.dumps(json.loads(line)), "it was edited by hand"),
        (lambda line: json.dumps({"digest": "0" * 16} | json.loads(line)), "it was edited by hand"),
    ],
)
def test_a_row_that_somebody_has_edited_is_refused(own, change, reason):
    """With its digest anywhere but at the end it can no longer be verified."""
    file = own.path / "rows.jsonl"
    lines = file.read_text().splitlines()
    changed = change(lines[1])
    assert changed != lines[1]
    file.write_text("\n".join([lines[0], changed, lines[2]]) + "\n")
    with pytest.raises(StoreError, match=rf"line 2 is not a valid row \({reason}"):
        Store.open(own.path)


NUMBERS = (
    st.sampled_from([math.inf, -math.inf, math.nan])
    | st.floats()
    | st.integers(-(2**62), 2**62)
    | st.booleans()
    | st.none()
    | st.text(max_size=3)
)
VALUES = st.recursive(
    NUMBERS
    | st.lists(st.floats(), max_size=4).map(np.array)
    | st.lists(st.floats(), max_size=4).map(lambda values: array("d", values))
    | st.floats(width=32).map(np.float32),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(value=VALUES)
def test_a_line_is_json_that_any_reader_takes_and_holds_what_was_given(value):
    """NaN and infinity, for which JSON has no word, are null."""

    def plain(given):
        if isinstance(given, np.ndarray | array | list | tuple):
            return [plain(each) for each in given]
        if isinstance(given, dict):
            return {key: plain(each) for key, each in given.items()}
        number = float(given) if isinstance(given, np.floating) else given
        return None if isinstance(number, float) and not math.isfinite(number) else number

    line = to_line({"value": value})
    assert line.endswith("\n") and line.count("\n") == 1

    def refuse(word):
        raise AssertionError(word)

    assert json.loads(line, parse_constant=refuse) == {"value": plain(value)}


def test_rows_of_a_large_store_take_little_more_memory_than_their_file(own):
    first = replace(own.rows[0], participant_labels={f"column {k}": f"value {k}" for k in range(12)})
    first.transform["displacement"] = [k / 7 for k in range(64)]
    written = "".join(replace(first, index=i, acquisition=f"1.2.{i}").to_line() for i in range(400))
    (own.path / "rows.jsonl").write_text(written)
    tracemalloc.start()
    rows, length = read_rows(own.path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert length == len(written) and "".join(row.to_line() for row in rows) == written
    assert held < 1.8 * len(written)


def test_two_writers_cannot_share_a_store(own):
    with (
        StoreWriter(own.path, SMALL),
        pytest.raises(StoreError, match=r"another process .pid \d+ on .* since .* is preparing"),
        StoreWriter(own.path, SMALL),
    ):
        pass


def test_confidence_that_is_not_a_number_becomes_null():
    from dataclasses import replace

    from octfm.store.prepare import row_of
    from support.store_samples import acquisition

    row = row_of(acquisition(0), replace(prepared(0), confidence={"contrast": np.float32("nan")}), "sha256:0")
    assert json.loads(row.to_line())["confidence"] == {"contrast": None}


def test_a_store_of_version_1_stays_readable(tmp_path):
    path = shutil.copytree(FIXTURE, tmp_path / "store")
    store = Store.open(path)
    assert store.verify() == len(store) == 3
    assert store.image_size == (2, 16, 16) and isinstance(store.preprocessing, Preprocessing)
    assert_equals_samples(store.read([2, 0, 1]), [2, 0, 1], store.image_size)


def test_opening_the_store_module_loads_no_heavy_package():
    heavy = "('tensorstore', 'google_crc32c', 'imagecodecs', 'torch', 'rich')"
    code = f"import sys, octfm.store.store, octfm.store.loader; print([m for m in {heavy} if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


def test_a_store_is_read_where_checksums_have_no_code_in_c(store, monkeypatch):
    """google-crc32c falls back to Python where it has no wheel: no volume could be read there."""
    from google_crc32c import python

    monkeypatch.setattr("google_crc32c.value", python.value)
    assert_equals_samples(Store.open(store.path).read([1]), [1])
