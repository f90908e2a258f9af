"""Local disk, a real S3 server and a real GCS emulator behave alike, also when a tenth of the requests goes wrong."""

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octfm.addresses import mask, mask_path
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.scan import scan
from octfm.errors import BucketError, ConfigError, ReadError, StoreError
from octfm.formats import read_surfaces, read_volume
from octfm.formats.declared import read_declared
from octfm.io import bucket, bucket_cache, ranged
from octfm.io.archive import recall, split_uri
from octfm.io.lease import RENEW_S, Lease
from octfm.io.location import BucketPath, expect_writable, location, unwritable, write_whole
from octfm.phantom import write_phantom
from octfm.store import verify as store_verify
from octfm.store.bucket import BucketStoreWriter
from octfm.store.layout import shard_key
from octfm.store.loader import Loader
from octfm.store.prepare import prepare
from octfm.store.store import Store
from octfm.store.writer import StoreWriter
from support.bucket_servers import ENDPOINT, SECRET, FaultyProxy
from support.dicom_files import write_oct_dicom
from support.small_store import small_preprocessing
from support.vendor_files import e2e_codes, write_e2e
from support.volumes import telling_voxels

SLOW = pytest.mark.slow
SPACING = (0.3, 0.005, 0.02)
everywhere = pytest.mark.parametrize("place", ["local", "s3", "gs"], indirect=True)
buckets = pytest.mark.parametrize("place", ["s3", "gs"], indirect=True)
faults = pytest.mark.parametrize("faulty", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)


@everywhere
def test_what_is_written_is_read_back(place):
    content = {f"a/{n}.bin": os.urandom(n * 1000) for n in range(4)} | {"b.txt": "Grüße".encode()}
    for name, data in content.items():
        write_whole(place / name, data)
    write_whole(place / "b.txt", b"new")
    content["b.txt"] = b"new"
    for name, data in content.items():
        assert (place / name).read_bytes() == data
        assert (place / name).is_file()
    assert place.exists() and place.is_dir() and not place.is_file()
    assert not (place / "a/9.bin").exists()
    with pytest.raises(FileNotFoundError):
        (place / "a/9.bin").read_bytes()
    (place / "b.txt").unlink()
    (place / "b.txt").unlink(missing_ok=True)
    assert not (place / "b.txt").exists()


def test_a_name_as_long_as_the_disk_allows_can_be_written(tmp_path):
    file = tmp_path / ("ü" * 125 + ".json")  # 255 bytes
    write_whole(file, b"whole")
    assert file.read_bytes() == b"whole" and len(list(tmp_path.iterdir())) == 1


@everywhere
def test_names_are_taken_apart_alike(place):
    path = place / "1001" / "scan.tar.gz"
    assert (path.name, path.stem, path.suffix) == ("scan.tar.gz", "scan.tar", ".gz")
    assert path.parent == place / "1001" and path.is_relative_to(place)
    assert str(path.relative_to(place)) == "1001/scan.tar.gz"
    assert path.with_name("x").name == "x" and place in path.parents
    assert location(str(path)) == path
    assert sorted([place / "b", place / "a"]) == [place / "a", place / "b"]


@buckets
def test_a_bucket_that_does_not_exist_is_named(place):
    nowhere = f"{place.scheme}://no-such-bucket/eyes"
    for use in (lambda: scan(nowhere, workers=0), lambda: bucket.write(nowhere, b"1"), lambda: read_volume(nowhere)):
        with pytest.raises(BucketError, match=r"no-such-bucket/eyes: .*there is no such bucket; check its name"):
            use()


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_results_may_go_into_a_bucket_that_lets_nobody_delete(place, monkeypatch):
    def refuse(uri):
        raise BucketError(f"{uri}: delete it: access denied")

    monkeypatch.setattr(bucket, "delete", refuse)
    expect_writable(place / "out")
    with pytest.raises(BucketError, match="access denied"):  # of a run, which deletes checkpoints
        unwritable(place / "out")


def test_a_folder_inside_one_that_may_not_be_looked_into_is_refused_in_a_sentence(monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("octfm.io.location.existing", refuse)
    with pytest.raises(ConfigError, match=r"^/private/out cannot be written: Permission denied; choose .*"):
        expect_writable(Path("/private/out"))


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_credentials_that_are_set_after_a_refusal_are_used(place, monkeypatch, tmp_path):
    """In a notebook: the first call says which variables to set, the second must read them."""
    for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    bucket._connect.cache_clear()
    with monkeypatch.context() as without:
        without.delenv("AWS_ACCESS_KEY_ID")
        without.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(BucketError, match="the credentials in the environment"):
            bucket.write(str(place / "x"), b"1")
    bucket.write(str(place / "x"), b"1")
    assert bucket.read(str(place / "x")) == b"1"


@pytest.mark.parametrize("text", ["inf", "nan", "0", "much"])
def test_a_limit_of_the_cache_that_is_no_number_of_gigabytes_is_named(monkeypatch, text):
    monkeypatch.setenv("OCTFM_CACHE_GB", text)
    with pytest.raises(BucketError, match=f"OCTFM_CACHE_GB: expected a number of gigabytes above 0, got '{text}'"):
        bucket_cache.limit_bytes()


@buckets
def test_an_object_is_no_folder(place):
    bucket.write(str(place / "a" / "x"), b"1")
    bucket.write(str(place / "a" / "x y"), b"2")
    assert not (place / "a" / "x").is_dir() and (place / "a").is_dir()
    assert bucket.find(str(place / "a" / "x")) == {}
    with pytest.raises(CatalogError, match="point at the folder"):
        scan(str(place / "a" / "x"), workers=0)


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_key_that_no_path_can_name_is_a_reject_that_says_so(place, tmp_path):
    file = write_oct_dicom(
        tmp_path / "a.dcm", np.random.default_rng(0).integers(0, 256, (6, 64, 48), np.uint8), SPACING
    )
    write_whole(place / "p1" / "a.dcm", file.read_bytes())
    for key in ("p2//a.dcm", "./a.dcm"):
        bucket.write(f"{place}/{key}", file.read_bytes())
    found = scan(str(place), workers=0)
    assert [a.uri for a in found.acquisitions] == [f"{place}/p1/a.dcm"]
    assert sorted(r.uri for r in found.rejects) == [f"{place}/./a.dcm", f"{place}/p2//a.dcm"]
    assert all("an empty name or a dot between slashes" in r.sentence for r in found.rejects)


def test_a_name_that_grows_in_lower_case_is_cut_where_the_archive_ends():
    """The Turkish İ is one letter, in lower case two."""
    assert split_uri("s3://bucket/İzmir.ZIP!/a/b.dcm") == ("s3://bucket/İzmir.ZIP", "a/b.dcm")
    remembered = bucket.Object(1, "v")
    recall(replace(BucketPath.of("s3://bucket/İzmir.zip!/b.dcm"), facts=remembered))
    assert ranged.known("s3://bucket/İzmir.zip") == remembered


KEYS = st.lists(st.text("ab.", min_size=1, max_size=3).filter(lambda part: part.strip(".")), max_size=3)


@given(one=KEYS, other=KEYS, schemes=st.tuples(st.sampled_from(["s3", "gs"]), st.sampled_from(["s3", "gs"])))
def test_an_address_in_a_bucket_has_the_parts_of_a_path_and_never_leaves_its_bucket(one, other, schemes):
    a, b = (
        BucketPath.of(f"{scheme}://bucket/{'/'.join(key)}") for scheme, key in zip(schemes, (one, other), strict=True)
    )
    path = PurePosixPath("bucket", *one)
    assert str(a).rstrip("/") == f"{schemes[0]}://{path}" and BucketPath.of(str(a)) == a
    assert (a.name, a.stem, a.suffix) == (path.name, path.stem, path.suffix)
    assert [str(parent) for parent in a.parents] == [f"{schemes[0]}://{p}" for p in path.parents][: len(one)]
    below = a.is_relative_to(b)
    assert below == (schemes[0] == schemes[1] and one[: len(other)] == other)
    assert not a.is_relative_to(path) and not a.is_relative_to(str(a))
    if below:
        assert b / a.relative_to(b) == a
    if one:
        assert a.parent / a.name == a == a.with_name("x").with_name(a.name) and a.with_suffix(".y").stem == a.stem
    assert (a / "/c").name == "c" and (a / "/c").parent == a, "an absolute name does not lead elsewhere"


@pytest.mark.parametrize("address", ["s3://", "gs://a b/key"])
def test_an_address_without_the_name_of_a_bucket_is_refused(address):
    with pytest.raises(BucketError, match=f"expected the name of a bucket, {address[:2]}://bucket/…"):
        BucketPath.of(address)


def test_an_address_in_a_bucket_is_never_taken_for_a_file():
    assert isinstance(location("s3://b/c"), BucketPath)
    with pytest.raises(TypeError):
        Path(location("s3://b/c"))
    with pytest.raises(ConfigError, match="expected a local path, s3://"):
        location("ftp://host/x")
    with pytest.raises(BucketError, match="name of a bucket"):
        location("s3://")


def test_credentials_in_an_address_are_refused_and_not_repeated():
    for take in (location, read_volume, read_surfaces, bucket.find):
        with pytest.raises(ConfigError, match="holds credentials") as told:
            take(f"s3://key:{SECRET}@clinic/x")
        assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    "address",
    [
        f"https://me:{SECRET}@host/x",
        f"S3://key:{SECRET}@clinic/x",
        f"s3:/key:{SECRET}@clinic/x",
        f"s3:key:{SECRET}@clinic/x",
        f"key:{SECRET}@clinic/x",
        f"https://me:{SECRET}@host/x.zip!/a.dcm",
        f"https://host/x.dcm%3FX-Amz-Signature%3D{SECRET}",
    ],
)
def test_credentials_in_a_path_that_is_no_bucket_are_not_repeated_by_readers(address):
    for read in (read_volume, read_surfaces):
        for where in (address, Path(address)):
            with pytest.raises(ReadError, match="cannot be read: No such file") as told:
                read(where)
            assert SECRET not in "".join(traceback.format_exception_only(told.value))
            assert told.value.__cause__ is None, "a traceback would print the cause, which has the path"


def test_a_file_that_is_there_is_named_even_if_its_name_looks_like_credentials(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("10:30 a@b").mkdir()
    assert mask_path("10:30 a@b") == "10:30 a@b"
    assert mask_path("10:31 a@b") == "…@…"


def test_a_query_that_an_endpoint_repeats_percent_encoded_is_masked():
    for query in (f"?sig={SECRET}", f"%3Fsig%3D{SECRET}", f"%253Fsig%253D{SECRET}"):
        assert mask(f'no answer from "http://127.0.0.1:9/clinic/x.dcm{query}"') == 'no answer from "http://…"'


@buckets
def test_large_objects_come_in_pieces_and_small_parts_alone(place, monkeypatch):
    monkeypatch.setattr(bucket, "PIECE", 10_000)
    data = os.urandom(123_456)
    uri = str(place / "large")
    bucket.write(uri, data)
    before = bucket.tally()
    assert bucket.read(uri) == data
    assert bucket.read(uri, 1000, 1010) == data[1000:1010]
    spent = bucket.tally() - before
    assert spent.bytes_read == len(data) + 10
    assert spent.retries == 0


def test_a_local_copy_is_whole_although_the_disk_takes_its_bytes_bit_by_bit(tmp_path, monkeypatch):
    """As a disk does that is nearly full: a write may end early without an error."""
    data, pwrite = os.urandom(30_000), os.pwrite
    monkeypatch.setattr(bucket, "_read_piece", lambda uri, start, end: data[start:end])
    monkeypatch.setattr(bucket, "PIECE", 10_000)
    monkeypatch.setattr(os, "pwrite", lambda file, part, at: pwrite(file, bytes(part[:999]), at))
    bucket.download("s3://clinic/scan.dcm", tmp_path / "copy", len(data))
    assert (tmp_path / "copy").read_bytes() == data


@faults
def test_with_a_tenth_of_requests_spoilt_nothing_is_lost_or_wrong(faulty, tmp_path, monkeypatch):
    place, proxy = faulty
    monkeypatch.setattr(bucket, "PIECE", 20_000)
    before = bucket.tally()
    content = {str(place / f"{n}.bin"): os.urandom(2_000 * n) for n in range(20)}
    for uri, data in content.items():
        bucket.write(uri, data)
    listed = bucket.find(str(place))
    assert {uri: found.size for uri, found in listed.items()} == {uri: len(data) for uri, data in content.items()}
    for uri, data in content.items():
        assert bucket.read(uri) == data
        with bucket_cache.local_copy(uri, listed[uri]) as file:
            assert file.read_bytes() == data
    spent = bucket.tally() - before
    assert proxy.spoilt.total() >= 6 and len(proxy.spoilt) == len(proxy.KINDS)
    # A slow answer is an answer, and aiohttp reopens a connection that dropped between two requests without a word.
    assert proxy.spoilt["503"] <= spent.retries <= proxy.spoilt.total() - proxy.spoilt["slow"]
    assert spent.failures == 0


@faults
def test_a_body_that_is_cut_off_and_lied_about_is_noticed(faulty, monkeypatch):
    """The drivers take part of such an object for the part that was asked for."""
    place, proxy = faulty
    proxy.share = 0
    bucket.write(str(place / "x"), bytes(range(256)) * 200)
    proxy.share, proxy.KINDS = 1.0, ("cut off, and lied about",)
    assert len(bucket._driver_of(str(place)).cat_file(str(place / "x"), start=1000, end=26_600)) == 12_800
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(3, 0.001, 0.001))
    with pytest.raises(
        BucketError, match=r"cannot read it: 3 attempts in \d+ s failed, the last with: 12,800 of 25,600 bytes arrived"
    ):
        bucket.read(str(place / "x"), 1000, 26_600)


@buckets
def test_a_server_that_is_gone_is_named_with_what_was_tried(place, monkeypatch):
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(3, 0.001, 0.001))
    for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with pytest.raises(BucketError, match=r"3 attempts in .* failed") as told:
        bucket.read(str(place / "x"))
    assert SECRET not in str(told.value) and str(place) in str(told.value)


@buckets
def test_one_of_several_creators_wins(place):
    won = []

    def create(n: int) -> None:
        try:
            bucket.write(str(place / "lock"), f"{n}".encode(), create=True)
            won.append(n)
        except FileExistsError:
            pass

    threads = [threading.Thread(target=create, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if place.scheme == "s3":  # the GCS emulator does not know ifGenerationMatch
        assert len(won) == 1
        with pytest.raises(FileExistsError):
            bucket.write(str(place / "lock"), b"late", create=True)
    assert (place / "lock").read_text() in {str(n) for n in won}


# ---- the local cache
# ---------------------------------------------------------------------------------------------------------------


@buckets
def test_an_object_is_fetched_once_and_again_when_it_changed(place):
    uri = str(place / "x")
    bucket.write(uri, b"first")
    before = bucket.tally()
    for _ in range(3):
        with bucket_cache.local_copy(uri) as file:
            assert file.read_bytes() == b"first"
    assert (bucket.tally() - before).bytes_read == 5
    bucket.write(uri, b"other")
    with bucket_cache.local_copy(uri) as file:
        assert file.read_bytes() == b"other"


def test_a_cache_that_cannot_be_locked_or_written_is_named(tmp_path, monkeypatch):
    """Home folders on network file systems may lack locks, those of containers may be read-only."""
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "cache"))
    remedy = "cannot be written .*; set OCTFM_CACHE"
    with monkeypatch.context() as without_locks:
        without_locks.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOSYS, "Function not implemented")))
        with pytest.raises(BucketError, match=remedy), bucket_cache.kept("ab", 1, lambda file: None):
            pass
    monkeypatch.setattr(Path, "mkdir", mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(BucketError, match=remedy), bucket_cache.kept("ab", 1, lambda file: None):
        pass


def test_a_user_without_a_home_folder_must_name_the_cache_and_then_may_use_it(tmp_path, monkeypatch):
    """As `docker run --user 12345` of an image that sets no HOME; a run in a bucket asks for the folder only."""
    for name in ("HOME", "OCTFM_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError))
    with pytest.raises(BucketError, match=r"this user has no home folder .*; set OCTFM_CACHE"):
        bucket_cache.folder()
    monkeypatch.setenv("HOME", "/proc/octfm")
    with pytest.raises(BucketError, match=r"/proc/octfm/.cache/octfm: .* cannot be written .*; set OCTFM_CACHE"):
        bucket_cache.folder()
    monkeypatch.delenv("HOME")
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "cache"))
    assert bucket_cache.folder().is_dir()


def test_the_cache_keeps_to_its_limit_and_keeps_what_was_used_last(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    monkeypatch.setenv("OCTFM_CACHE_GB", "1e-5")  # 10,000 bytes

    def use(name: str) -> bool:
        """Whether it had to be made."""
        made = []

        def make(file):
            made.append(1)
            file.write_bytes(b"x" * 1000)

        with bucket_cache.kept(name, 1000, make):
            assert sum(p.stat().st_size for p in (tmp_path / "objects").glob("??/*")) <= 10_000
        return bool(made)

    for n in range(9):
        assert use(f"{n:02d}")
    assert not use("00")
    for n in range(9, 12):
        assert use(f"{n:02d}")
    assert not use("00"), "what was used last is evicted last"
    assert use("01")


def test_what_a_reader_cannot_find_is_its_own_error(tmp_path, monkeypatch):
    """Taken for an evicted copy, it was fetched again, and the error was lost."""
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    made = []
    for _ in range(2):
        with (
            pytest.raises(FileNotFoundError, match="another file"),
            bucket_cache.kept("ab" * 32, 3, lambda path: made.append(path.write_bytes(b"abc"))),
        ):
            raise FileNotFoundError("another file")
    assert len(made) == 1


@buckets
def test_a_sidecar_that_is_corrected_is_read_again_soon(place, monkeypatch):
    """For five minutes a notebook went on to quote the old one."""
    side = place / "eye.json"
    write_whole(side, b'{"spacing_mm": [1, 2]}')
    with pytest.raises(ReadError, match="expected"):
        read_declared(str(place / "eye.npz"))
    write_whole(side, b'{"spacing_mm": [0.12, 0.0039, 0.0115]}')
    now = time.monotonic()
    monkeypatch.setattr(ranged, "time", SimpleNamespace(monotonic=lambda: now + 20))
    assert read_declared(str(place / "eye.npz")).spacing_mm == (0.12, 0.0039, 0.0115)


@everywhere
def test_the_sidecar_of_a_file_counts_for_each_of_its_volumes(place, tmp_path):
    series = {(1, 2, number): e2e_codes(telling_voxels()) for number in (3, 4)}
    write_whole(place / "p7.e2e", write_e2e(tmp_path / "own.e2e", series, eyes="RL").read_bytes())
    write_whole(place / "p7.json", b'{"protocol": "macula"}')
    assert read_declared(f"{place}/p7.e2e!/series_1_2_4").protocol == "macula"


def test_a_file_that_another_reader_has_just_made_is_not_deleted(tmp_path, monkeypatch):
    """Of several processes that fetched one object at once, one sometimes found no file where it had put one."""
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    path, opened = tmp_path / "objects" / "ab" / ("ab" * 32), Path.open

    def open_too_early(self, *mode):
        monkeypatch.undo()
        path.parent.mkdir(parents=True)
        path.write_bytes(b"abc")
        raise FileNotFoundError

    monkeypatch.setattr(Path, "open", open_too_early)
    assert bucket_cache._locked(path, 3) is None
    assert Path.open is opened and path.read_bytes() == b"abc"


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_large_copy_is_on_the_disk_before_it_has_its_name(place, monkeypatch):
    """It has its full length from the start: after a power cut zeros would pass for the object."""
    monkeypatch.setattr(bucket, "PIECE", 4)
    bucket.write(str(place / "x"), b"0123456789")
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    with bucket_cache.local_copy(str(place / "x")) as file:
        assert file.read_bytes() == b"0123456789" and file.stat().st_ino in synced


def test_a_file_that_is_being_read_is_not_evicted(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    monkeypatch.setenv("OCTFM_CACHE_GB", "1e-5")
    with bucket_cache.kept("held", 6000, lambda file: file.write_bytes(b"h" * 6000)) as held:
        for n in range(5):
            with bucket_cache.kept(f"{n}0", 6000, lambda file: file.write_bytes(b"x" * 6000)):
                pass
        assert held.read_bytes() == b"h" * 6000
    with pytest.raises(BucketError, match="raise OCTFM_CACHE_GB"), bucket_cache.kept("big", 20_000, lambda file: None):
        pass


def test_a_file_that_two_fetched_at_once_is_not_evicted_from_the_first_reader(tmp_path, monkeypatch):
    """The second one's copy took its place, which nobody had locked once the second reader was done."""
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path))
    with ExitStack() as first:
        held: list[Path] = []

        def second(file: Path) -> None:
            """Meanwhile the first process fetches it too, and begins to read."""
            own = first.enter_context(bucket_cache.kept("both", 3, lambda other: other.write_bytes(b"abc")))
            held.append(own)
            file.write_bytes(b"abc")

        with bucket_cache.kept("both", 3, second) as path:
            assert path.read_bytes() == b"abc"
        bucket_cache._shrink(0)
        assert held[0].read_bytes() == b"abc"
    bucket_cache._shrink(0)
    assert not held[0].exists()


# ---- scanning
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def clinic(tmp_path_factory) -> Path:
    """A small phantom cohort with a manifest, and some defects."""
    return write_phantom(tmp_path_factory.mktemp("phantom") / "clinic", 4, 0, size=(6, 64, 48), defects=0.5)


@pytest.fixture(scope="session")
def zipped(tmp_path_factory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("phantom") / "zipped", 3, 0, size=(6, 64, 48), zipped=True)


def put_tree(folder: Path, place) -> None:
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            write_whole(place / str(file.relative_to(folder)), file.read_bytes())


def below(catalog, root):
    """What a catalog says, whatever the place of its root."""

    def told(text: str) -> str:
        return text.replace(str(root), "ROOT")

    rows = [replace(a, uri=told(a.uri)) for a in catalog.acquisitions]
    return rows, [replace(r, uri=told(r.uri), sentence=told(r.sentence)) for r in (*catalog.rejects, *catalog.skipped)]


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("s3", "zipped"),
        ("gs", "clinic"),
        pytest.param("s3", "clinic", marks=SLOW),
        pytest.param("gs", "zipped", marks=SLOW),
    ],
    indirect=["place"],
)
def test_a_bucket_gives_the_catalog_of_the_folder(place, kind, request, tmp_path):
    folder = request.getfixturevalue(kind)
    put_tree(folder, place)
    here, there = scan(folder, workers=0), scan(str(place), workers=0)
    assert below(there, place) == below(here, folder)
    assert there.companions == here.companions and len(there.acquisitions) > 4
    assert there.requests["retries"] == 0 and there.requests["requests"] > 0
    there.save(place / "catalog")
    assert Catalog.load(str(place / "catalog")) == there
    assert Catalog.load(place / "catalog").summary()["bucket"] == there.requests


@buckets
def test_headers_are_read_by_ranges_and_once(place, tmp_path, monkeypatch):
    """Large uncompressed volumes: a scan fetches their heads, a second scan nothing."""
    for n in range(4):
        voxels = np.random.default_rng(n).integers(0, 256, (16, 256, 256), np.uint8)
        file = write_oct_dicom(tmp_path / f"{n}.dcm", voxels, (0.3, 0.005, 0.02), participant=f"{n}")
        write_whole(place / f"{n % 2}" / file.name, file.read_bytes())
    write_whole(place / "DICOMDIR", bytes(200))
    first = scan(str(place), workers=0)
    size = sum(found.size for found in bucket.find(str(place)).values())
    assert len(first.acquisitions) == 4
    assert first.requests["bytes_read"] < 0.3 * size
    again = scan(str(place), workers=0)
    assert below(again, place) == below(first, place)
    assert again.requests["bytes_read"] < 0.5 * first.requests["bytes_read"], "heads come from the cache"
    listed = []
    monkeypatch.setattr(bucket, "find", lambda uri, found=bucket.find: listed.append(uri) or found(uri))
    scan(str(place), workers=0)
    assert listed == [str(place)], "one listing, however many folders"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_requests_of_child_processes_are_counted_without_leftover_files(place, clinic, tmp_path, monkeypatch):
    """Those of a scan that stops with an error, too: its account is not a file."""
    put_tree(clinic, place)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    spent = []
    for workers in (0, 2):
        monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / f"cache-{workers}"))
        spent.append(scan(str(place), workers=workers).requests)
    assert spent[1]["requests"] == spent[0]["requests"] > 0 and spent[1]["bytes_read"] == spent[0]["bytes_read"]
    with pytest.raises(CatalogError, match="it is empty"):
        scan(str(place / "nothing"))
    assert not any((tmp_path / "temporary").iterdir())


@pytest.mark.parametrize("faulty", ["gs", pytest.param("s3", marks=SLOW)], indirect=True)
def test_a_scan_with_spoilt_requests_finds_the_same(faulty, clinic):
    place, proxy = faulty
    proxy.share = 0
    put_tree(clinic, place)
    proxy.share = 0.25  # few requests, and every kind of fault should be among them
    there = scan(str(place), workers=1)
    assert below(there, place) == below(scan(clinic, workers=1), clinic)
    assert proxy.spoilt["503"] > 0
    assert proxy.spoilt["503"] <= there.requests["retries"] <= proxy.spoilt.total()
    assert there.requests["failures"] == 0


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_a_bucket_that_stops_answering_stops_the_scan_and_rejects_nothing(place, clinic, monkeypatch, tmp_path):
    """A file that could not be fetched is not a bad file."""
    put_tree(clinic, place)
    scan(str(place), workers=0)
    proxy = FaultyProxy(os.environ[ENDPOINT[place.scheme]], share=0)
    monkeypatch.setenv(ENDPOINT[place.scheme], proxy.endpoint)
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(3, 0.001, 0.001))
    proxy.fail_after(5)
    with pytest.raises(BucketError, match="3 attempts"):
        scan(str(place), workers=0)
    proxy.close()


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_the_command_scans_into_a_bucket_and_never_prints_a_credential(place, zipped, tmp_path):
    put_tree(zipped, place / "in")
    command = ["scan", str(place / "in"), "--out", str(place / "out"), "--workers", "0", "--no-images"]
    done = subprocess.run(
        [sys.executable, "-c", "from octfm.cli.main import main; main()", *command],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "retries 0" in done.stdout
    assert Catalog.load(place / "out").acquisitions
    page = (place / "out" / "data_health.html").read_text()
    assert "<html" in page
    left = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    there = [bucket.read(uri) for uri in bucket.find(str(place / "out"))]
    assert not any(SECRET.encode() in text for text in [*left, *there, done.stdout.encode(), done.stderr.encode()])


# ---- stores
# ------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def scanned(clinic) -> Catalog:
    return scan(clinic, workers=0)


@pytest.fixture(scope="session")
def prepared(scanned, tmp_path_factory) -> Store:
    """The same volumes on a local disk."""
    return prepare(scanned, tmp_path_factory.mktemp("store"), small_preprocessing(), workers=0, progress=False)


def same_volumes(one: Store, other: Store) -> bool:
    rows = range(len(one))
    assert len(one) == len(other) > 0
    assert [row.to_line() for row in one.rows] == [row.to_line() for row in other.rows]
    a, b = one.read(rows), other.read(rows)
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("voxels", "band", "valid"))


@pytest.mark.parametrize("place", ["gs", *(pytest.param(name, marks=SLOW) for name in ("local", "s3"))], indirect=True)
def test_a_store_is_the_same_wherever_it_is(place, scanned, prepared):
    store = prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False)
    assert same_volumes(prepared, store) and same_volumes(prepared, Store.open(str(place / "store")))
    assert store.compression == ("none" if isinstance(place, Path) else "zstd")
    assert store.verify() == len(store)
    assert [u.code for u in store.unprepared()] == [u.code for u in prepared.unprepared()]
    assert not store.unfinished()
    with (StoreWriter if isinstance(place, Path) else BucketStoreWriter)(place / "store", small_preprocessing()):
        assert "octfm prepare is not done with this store, or was killed" in Store.open(place / "store").unfinished()
    with Loader(store, range(len(store)), 2, seed=0) as loader, Loader(prepared, range(len(store)), 2, seed=0) as local:
        for step in range(4):
            assert np.array_equal(loader.batches(step).voxels, local.batches(step).voxels)
    # A second call finds everything there.
    assert same_volumes(prepared, prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False))
    # Into a new store, with nothing left to read the volumes from.
    taken = prepare(scanned, place / "new", small_preprocessing(), workers=0, progress=False, read=len, reuse=store)
    assert same_volumes(prepared, taken) and same_volumes(prepared, Store.open(str(place / "new")))
    first = replace(scanned.acquisitions[0], laterality=None)
    corrected = replace(scanned, acquisitions=(first, *scanned.acquisitions[1:]))
    with pytest.raises(StoreError, match=f"^{place}/new: .* --reuse {place}/new for what has not changed$"):
        prepare(corrected, place / "new", small_preprocessing(), workers=0, progress=False)


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=SLOW)], indirect=True)
def test_a_volume_is_fetched_once_and_a_damaged_copy_is_fetched_again(place, scanned, prepared, tmp_path):
    prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False)
    before = bucket.tally()
    store = Store.open(place / "store")
    for _ in range(3):
        store.read([0, 1, 0])
    fetched = (bucket.tally() - before).bytes_read
    again = Store.open(place / "store")
    before = bucket.tally()
    assert np.array_equal(again.read([0, 1]).voxels, prepared.read([0, 1]).voxels)
    assert (bucket.tally() - before).bytes_read < fetched
    # A copy that rots in the cache is fetched again, also in the middle of a run.
    for store in (again, Store.open(place / "store")):
        for cached in (bucket_cache.folder() / "objects").rglob("*"):
            if cached.is_file():
                cached.write_bytes(cached.read_bytes()[:-9] + b"x" * 9)
        with pytest.warns(UserWarning, match="copy of volume 0 in .* was damaged and is downloaded again"):
            assert np.array_equal(store.read([0, 1]).voxels, prepared.read([0, 1]).voxels)
    # What arrives and is not what was written is never handed out.
    uri = str(place / "store" / "voxels" / "c.0.0.0.0")
    good = bucket.read(uri)
    bucket.write(uri, bucket.read(str(place / "store" / "voxels" / "c.1.0.0.0")))
    with pytest.raises(StoreError, match="never matching its checksum"):
        Store.open(place / "store").read([0])
    found = store_verify.verify(place / "store", scanned.acquisitions, echo=lambda _: None)
    assert found.to_prepare == (0,) and uri not in bucket.find(str(place / "store"))
    assert same_volumes(prepared, prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False))
    assert bucket.read(uri) == good


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_verify_deletes_no_object_whose_copy_this_process_cannot_open(place, scanned, monkeypatch):
    store = prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False)
    stored = bucket.find(str(place / "store"))
    copy = shard_key(0)

    def open_(path, *args, opened=Path.open, **settings):
        if path.name == copy:  # the link to a copy in the cache
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return opened(path, *args, **settings)

    monkeypatch.setattr(Path, "open", open_)
    with pytest.raises(StoreError, match=r"volume 0 .* Too many open files.*; the file may be intact"):
        store_verify.verify(place / "store", scanned.acquisitions, echo=lambda _: None)
    assert bucket.find(str(place / "store")) == stored and len(store) > 1


@pytest.mark.slow
@faults
def test_a_store_made_and_read_with_spoilt_requests_is_the_same(faulty, scanned, prepared, tmp_path, monkeypatch):
    place, proxy = faulty
    store = prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False)
    assert same_volumes(prepared, store)
    assert proxy.spoilt["503"] > 0 and store.requests["retries"] >= 1 and store.requests["failures"] == 0
    proxy.share = 0
    monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / "another machine"))
    assert same_volumes(prepared, Store.open(place / "store"))


@pytest.mark.slow
@buckets
def test_a_store_whose_writer_was_killed_is_whole_and_goes_on(place, scanned, prepared, tmp_path, monkeypatch):
    """Killed at any request: what is visible is whole, and the same call ends with the same store, on another
    machine."""
    proxy = FaultyProxy(os.environ[ENDPOINT[place.scheme]], share=0)
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(1))
    direct = os.environ[ENDPOINT[place.scheme]]
    for left in (12, 25, 41, 60):
        monkeypatch.setenv(ENDPOINT[place.scheme], proxy.endpoint)
        monkeypatch.setenv("OCTFM_CACHE", str(tmp_path / f"machine {left}"))
        proxy.fail_after(left)
        with pytest.raises(BucketError):
            prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False)
        monkeypatch.setenv(ENDPOINT[place.scheme], direct)
        bucket.delete(str(place / "store" / "writer.lock"))  # or three minutes of patience
        if (place / "store" / "store.json").is_file():
            store = Store.open(place / "store")
            if len(store):
                assert store.verify() == len(store)
    assert same_volumes(prepared, prepare(scanned, place / "store", small_preprocessing(), workers=0, progress=False))
    proxy.close()


@buckets
def test_two_writers_of_one_store_do_not_mix(place, monkeypatch):
    lock, purpose = place / "lock", "preparing this store"
    with Lease(lock, purpose) as first:
        with (
            pytest.raises(BucketError, match="is preparing this store; wait for it or stop it"),
            Lease(lock, purpose),
        ):
            pass
        # An owner that gave no sign of life is replaced, and knows it.
        monkeypatch.setattr("octfm.io.lease.STALE_S", 0.0)
        monkeypatch.setattr("octfm.io.lease.WATCH_S", 0.0)
        monkeypatch.setattr("octfm.io.lease.SETTLE_S", 0.1)  # nobody else takes over
        monkeypatch.setattr("octfm.io.lease.RENEW_S", 0.05)
        with Lease(lock, purpose) as second:
            first._renew()
            assert first.lost and not second.lost
            with pytest.raises(BucketError, match="has taken over"):
                first.require()
    assert not lock.exists()


@pytest.mark.parametrize("years", [-10.0, -0.01, 0.01, 10.0])
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_wrong_clock_neither_displaces_a_live_owner_nor_keeps_a_dead_one(place, years, monkeypatch):
    lock, pauses = place / "lock", []
    lines = iter(f'{{"owner": "other", "renewed": {time.time() + years * 3.15e7 + n}}}'.encode() for n in range(2))

    def owner_renews(seconds: float) -> None:
        pauses.append(seconds)
        bucket.write(str(lock), next(lines))

    bucket.write(str(lock), next(lines))
    clock = SimpleNamespace(time=time.time, sleep=owner_renews)
    monkeypatch.setattr("octfm.io.lease.time", clock)
    with pytest.raises(BucketError, match="other is preparing this store"), Lease(lock, "preparing this store"):
        pass
    assert pauses[0] > RENEW_S
    clock.sleep = pauses.append  # nobody renews
    with Lease(lock, "preparing this store"):
        assert json.loads(lock.read_bytes())["owner"] != "other"
    assert not lock.exists()


@pytest.mark.parametrize("content", [b"", b'{"owner": "oth', b"[]", b'{"owner": "other", "renewed": null}'])
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_what_is_no_lease_is_watched_and_taken_over(place, content, monkeypatch):
    lock = place / "lock"
    bucket.write(str(lock), content)
    clock = SimpleNamespace(time=time.time, sleep=lambda _: bucket.write(str(lock), b"{}"))
    monkeypatch.setattr("octfm.io.lease.time", clock)
    with (
        pytest.raises(BucketError, match="another process is preparing this store"),
        Lease(lock, "preparing this store"),
    ):
        pass
    clock.sleep = lambda _: None
    with Lease(lock, "preparing this store") as lease:
        assert json.loads(lock.read_bytes())["owner"] == lease._owner


@pytest.mark.parametrize("place", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True)
def test_of_two_that_take_over_a_stale_lease_one_wins(place, monkeypatch):
    lock, wins = place / "lock", []
    read, written = threading.Barrier(2, timeout=30.0), threading.Barrier(2, timeout=30.0)
    monkeypatch.setattr("octfm.io.lease.STALE_S", 0.0)
    monkeypatch.setattr("octfm.io.lease.WATCH_S", 0.0)
    monkeypatch.setattr("octfm.io.lease.SETTLE_S", 3.0)  # longer than a busy server needs for a write
    write, is_stale = bucket.write, Lease._is_stale

    def found_by_both(lease: Lease, found: dict) -> bool:
        stale = is_stale(lease, found)
        read.wait()
        return stale

    def at_once(*args, **options):
        """Both have read the stale lease; the one writes and reads it before the other writes."""
        if threading.current_thread().name == "late":
            written.wait()
            threading.Event().wait(0.3)
        write(*args, **options)
        if threading.current_thread().name == "early":
            written.wait()

    def claim():
        try:
            with Lease(lock, "preparing this store"):
                wins.append(threading.current_thread().name)
        except BucketError as error:
            assert "was faster" in str(error)

    bucket.write(str(lock), b'{"owner": "killed", "renewed": 0.0}')
    monkeypatch.setattr(bucket, "write", at_once)
    monkeypatch.setattr(Lease, "_is_stale", found_by_both)
    both = [threading.Thread(target=claim, name=name) for name in ("early", "late")]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(wins) == 1


def read_first(lease: Lease, reads: list[dict], monkeypatch) -> None:
    """What a lease reads: these, then what the bucket holds."""
    whole = lease._read
    monkeypatch.setattr(lease, "_read", lambda: reads.pop(0) if reads else whole())


@pytest.mark.parametrize("place", ["s3"], indirect=True)  # the GCS emulator does not know ifGenerationMatch
def test_a_lease_read_while_another_writes_it_is_not_taken_back(place, monkeypatch):
    """Found as a test that waited for ever: the first owner read half an object and wrote its own name over it."""
    lock = place / "lock"
    monkeypatch.setattr("octfm.io.lease.STALE_S", 0.0)
    monkeypatch.setattr("octfm.io.lease.WATCH_S", 0.0)
    monkeypatch.setattr("octfm.io.lease.SETTLE_S", 0.1)
    with Lease(lock, "preparing this store") as first, Lease(lock, "preparing this store"):
        monkeypatch.setattr("octfm.io.lease.RENEW_S", 0.05)
        read_first(first, [{}], monkeypatch)
        limit = threading.Timer(5.0, first._end.set)  # an owner that takes it back renews it for ever
        limit.start()
        first._renew()
        limit.cancel()
        assert first.lost
    lengths = set()
    for now in (1.0e9, 1.0e9 + 1 / 3, 1.0e9 + 0.5):
        monkeypatch.setattr("octfm.io.lease.time.time", lambda now=now: now)
        lengths.add(len(first._content()))
    assert len(lengths) == 1


@buckets
def test_a_lease_read_while_it_is_written_is_not_taken_for_a_stale_one(place, monkeypatch):
    lock = place / "lock"
    with Lease(lock, "preparing this store") as first:
        second = Lease(lock, "preparing this store")
        read_first(second, [second._read(), {}], monkeypatch)
        with pytest.raises(BucketError, match="wait for it or stop it"), second:
            pass
        assert first._read()["owner"] == first._owner
