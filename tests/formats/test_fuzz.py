"""Damaged files of every format: each is accepted or rejected with a code; none crashes, hangs over 10 s or
allocates over 2 GB."""

import functools
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import octfm
from octfm.catalog.catalog import NothingAccepted
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_header, read_overlay, read_volume
from octfm.formats.reasons import REASONS
from octfm.io.isolation import Limits, Lost, each
from octfm.layers.export import write_dicom, write_nifti
from octfm.store.prepare import REASONS as PREPARE_REASONS
from octfm.store.prepare import prepare
from octfm.volume.volume import Surfaces, Volume
from support.dicom_files import write_oct_dicom
from support.fuzz_files import DAMAGES, Seed, damaged, deflated_bomb, seeds
from support.multifile_dicom import series
from support.segmented import for_segmentation, segmentation
from support.store_samples import SMALL
from support.vendor_files import BIRTH_DATE, NAME, SPACING_MM, SURNAME
from support.volumes import telling_voxels

LIMITS = Limits()
SOURCE = Path(octfm.__file__).parent


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> list[Seed]:
    return seeds(tmp_path_factory.mktemp("seeds"))


def write(folder: Path, files: dict[str, bytes], read: str) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / read if read else folder


def outcome(function, uri):
    """Shape, or reason code. Whatever is damaged, what identifies a person stays in the file (it is planted in every
    one)."""
    try:
        found = function(uri)
        said, ending = (
            str(vars(replace(found, voxels=np.zeros((1, 1, 1), np.uint8))) if isinstance(found, Volume) else found),
            tuple(found.shape),
        )
    except ReadError as error:
        assert str(error).isprintable() and str(error), error
        said, ending = str(error), error.code
    assert not [word for word in (NAME, SURNAME, BIRTH_DATE) if word.lower() in said.lower()], said
    return ending


def drawn_in(uri, scan: Volume):
    """What `outcome` asks of what was drawn in a scan."""
    found = read_overlay(uri, of=scan)
    return SimpleNamespace(
        shape=(found.heights_px if isinstance(found, Surfaces) else found.values).shape, names=found.names
    )


def read_both(number: int, folder: Path, whole: list[Seed], seed: int, readers=(read_header, read_volume)):
    """What header and volume of damaged file `number` end as, and what was done to it. Runs in a child."""
    rng = np.random.default_rng((seed, number))
    kind = whole[number % len(whole)]
    files, done = damaged(kind, rng)
    place = folder / str(number)
    uri = write(place, files, kind.read)
    start = time.process_time()
    try:
        found = [outcome(read, uri) for read in readers]
    except Exception as error:  # told with the file's number, so that it can be made again
        found = [f"{type(error).__name__}: {error}"] * 2
    shutil.rmtree(place)
    return *found, done, time.process_time() - start


def fuzz(folder: Path, whole: list[Seed], count: int, seed: int, **options) -> Counter:
    work = functools.partial(read_both, folder=folder, whole=whole, seed=seed, **options)
    wrong, ends = [], Counter()
    for number, result in enumerate(each(work, range(count), LIMITS, lambda _: LIMITS.seconds)):
        if isinstance(result, Lost):
            wrong.append((number, result))
            ends[result.code] += 1
            continue
        header, volume, done, _ = result
        ends["accepted" if isinstance(volume, tuple) else volume] += 1
        for end in (header, volume):
            if not (isinstance(end, tuple) or end in REASONS):
                wrong.append((number, done, end))
        if isinstance(header, tuple) and isinstance(volume, tuple) and header != volume:
            wrong.append((number, done, header, volume))
        if isinstance(volume, tuple) and not isinstance(header, tuple):
            wrong.append((number, done, f"header {header}, and the volume can be read"))
    assert not wrong, f"seed {seed}: {wrong[:10]} ... {len(wrong)} of {count}"
    return ends


def test_what_is_fuzzed_is_readable_before(tmp_path, whole):
    for number, seed in enumerate(whole):
        uri = write(tmp_path / str(number), seed.files, seed.read)
        assert isinstance(outcome(read_volume, uri), tuple), (seed.name, outcome(read_volume, uri))


def test_a_hundred_damaged_files_each_end_as_a_volume_or_a_code(tmp_path, whole):
    ends = fuzz(tmp_path, whole, 100, seed=1)
    assert 10 < ends["accepted"] < 90 and len(ends) > 6, "damage that is always or never noticed tests nothing"


@pytest.mark.parametrize("count", [60, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_damaged_files_of_what_was_drawn_each_end_as_layers_or_a_code(tmp_path, count):
    """DICOM SEG, height map and NIfTI, as octfm segment writes them of one scan."""
    pytest.importorskip("highdicom")
    scan = write_oct_dicom(
        tmp_path / "scan.dcm", telling_voxels(), SPACING_MM, superior_first=True, edit=for_segmentation
    )
    files = [*write_dicom(segmentation(1), scan, tmp_path), *write_nifti(segmentation(1), tmp_path, "scan")]
    whole = [Seed(file.name, {file.name: file.read_bytes()}, file.name) for file in files]
    read = functools.partial(drawn_in, scan=read_volume(scan))
    assert all(isinstance(outcome(read, file), tuple) for file in files)
    ends = fuzz(tmp_path, whole, count, seed=5, readers=(read, read))
    assert 0.1 < ends["accepted"] / count < 0.9 and len(ends) > 4, ends


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_damaged_files_each_end_as_a_volume_or_a_code(tmp_path, whole):
    ends = fuzz(tmp_path, whole, 10_000, seed=2)
    print(f"\n10,000 damaged files of {len(whole)} kinds:", dict(ends.most_common()))


@pytest.mark.slow
def test_a_clinic_of_damaged_files_is_scanned_and_prepared(tmp_path, whole):
    """The whole way, in one run: every file is a row, a reject or a skip; every row is a volume or quarantined."""
    alone = []
    for number in range(50):
        seed = whole[number % len(whole)]
        if len(seed.files) == 1:
            alone.append(str(tmp_path / "clinic" / str(number) / seed.read))
        files, _ = damaged(seed, np.random.default_rng((3, number)))
        write(tmp_path / "clinic" / str(number), files, seed.read)
    catalog = scan(tmp_path / "clinic", participant_from="{participant}/*")
    told = Counter(outcome.uri for outcome in (*catalog.acquisitions, *catalog.rejects, *catalog.skipped))
    assert [told[uri] for uri in alone] == [1] * len(alone) and max(told.values()) == 1
    assert all(reject.code in REASONS and reject.sentence for reject in (*catalog.rejects, *catalog.skipped))
    store = prepare(catalog, tmp_path / "store", SMALL, progress=False)
    assert len(store) + len(store.unprepared()) == len(catalog.acquisitions) and len(store) == store.verify() > 0
    assert all(u.code in REASONS | PREPARE_REASONS for u in store.unprepared())


@pytest.mark.parametrize("megabytes", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_deflated_bomb_is_refused(tmp_path, megabytes):
    """Gigabytes of zeros in megabytes: refused at a quarter of a gigabyte, long before a child runs out of memory."""
    size = deflated_bomb(tmp_path / "bomb.dcm", megabytes).stat().st_size
    assert size < megabytes * 2000
    with pytest.raises(NothingAccepted) as caught:
        scan(tmp_path)
    (reject,) = caught.value.catalog.rejects
    assert reject.code == "decompression_bomb"


def test_a_value_that_cannot_be_read_has_a_code_in_a_series_too(tmp_path):
    """Values are converted when they are looked at, which for a series is after its files are closed (found by seed
    2)."""
    paths = series(tmp_path)
    content = paths[0].read_bytes()
    assert content.count(b"\x10\x00\x20\x00LO") == 1  # Patient ID
    paths[0].write_bytes(content.replace(b"\x10\x00\x20\x00LO", b"\x10\x00\x20\x00WQ"))
    assert outcome(read_header, paths[0]) == outcome(read_volume, paths[0]) == "unreadable"


@pytest.mark.parametrize("inside", [b"", b"\\"])
def test_a_length_that_swallows_the_name_quotes_nothing_of_it(tmp_path, whole, inside):
    """The SOP Class UID takes in all elements up to the name and birth date, as one value or, with a backslash among
    them, as two."""
    (seed,) = (seed for seed in whole if seed.name == "dicom 16 bit")
    content = seed.files[seed.read].replace(b"Spectralis", inside + b"Spectralis"[len(inside) :])
    at = content.rindex(b"\x08\x00\x16\x00UI") + 6
    end = content.index(BIRTH_DATE.encode()) + 8
    (tmp_path / "a.dcm").write_bytes(content[:at] + (end - at - 2).to_bytes(2, "little") + content[at + 2 :])
    assert outcome(read_header, tmp_path / "a.dcm") in REASONS


@pytest.mark.parametrize(("tag", "vr"), [(b"\x10\x00\x30\x00", b"DA"), (b"\x10\x00\x10\x00", b"PN")])
def test_a_flipped_bit_makes_no_id_of_a_name_or_a_birth_date(tmp_path, whole, tag, vr):
    """The last of two elements of one tag counts (found by seed 4242)."""
    (seed,) = (seed for seed in whole if seed.name == "dicom 16 bit")
    content = seed.files[seed.read]
    assert content.count(tag + vr) == 1
    (tmp_path / "a.dcm").write_bytes(content.replace(tag + vr, b"\x10\x00\x20\x00" + vr))
    assert read_header(tmp_path / "a.dcm").participant in (None, "1001")


def test_what_torch_loads_is_weights_only():
    """A pickle from elsewhere may run anything: every torch.load says weights_only=True, and nothing else unpickles
    files."""
    calls, safe = 0, 0
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        calls += text.count("torch.load(")
        safe += text.count("weights_only=True")
        assert "weights_only=False" not in text and "allow_pickle=True" not in text, path
        if path.name != "isolation.py":  # between a process and its own children, never from a file
            assert "pickle.load" not in text and "joblib.load" not in text, path
    assert calls == safe > 0


def test_damages_damage():
    for damage in DAMAGES:
        content = bytearray(range(256)) * 8
        damage(content, np.random.default_rng(1))
        assert content != bytearray(range(256)) * 8, damage.__name__
