"""A store ends the same whatever happened on the way: more workers, a kill, a bad file, a growing catalog."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from octfm.catalog.duplicates import OF_TWO
from octfm.catalog.participants.pseudonyms import locate, pseudonym, pseudonymise
from octfm.catalog.scan import scan
from octfm.errors import ReadError, StoreError
from octfm.formats import read_volume
from octfm.io.isolation import Limits, each
from octfm.io.location import holds_other
from octfm.store.layout import StoreRow
from octfm.store.prepare import (
    _difference,
    _reusable,
    _splits_of,
    _unless_copy,
    code_of,
    describe,
    prepare,
    with_finder,
)
from octfm.store.selection import assert_disjoint_splits
from octfm.store.store import Store
from octfm.store.writer import stage
from octfm.volume.estimated import FLAG
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import Volume
from support.dicom_files import write_oct_dicom
from support.store_samples import SMALL, acquisition, catalog, content, read_sample
from support.waiting import planted_delay, wait_until

UPSIDE_DOWN = "looks_upside_down"


def run(acquisitions, out, *, preprocessing=SMALL, workers=1, **other) -> Store:
    return prepare(
        catalog(acquisitions), out, preprocessing, workers=workers, progress=False, read=read_sample, **other
    )


class Counting:
    """Which files were read, by this process."""

    def __init__(self):
        self.uris: list[str] = []

    def __call__(self, uri: str) -> Volume:
        self.uris.append(uri)
        return read_sample(uri)


MIXED = [acquisition(n, {2: "slow", 3: "truncated", 7: "breaks"}.get(n, "reads")) for n in range(12)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("undisturbed") / "store"
    run(MIXED, out)
    return out


def test_the_store_holds_what_preprocessing_makes_of_each_file(undisturbed):
    store = Store.open(undisturbed)
    assert [row.acquisition for row in store.rows] == [
        a.sop_instance_uid for a in MIXED if a.uri.endswith(("reads", "slow"))
    ]
    for row in store.rows:
        volume = replace(read_sample(row.uri), laterality=row.laterality)
        wanted = SMALL(volume)
        found = store.read([row.index])
        np.testing.assert_array_equal(found.voxels[0], wanted.voxels)
        np.testing.assert_array_equal(found.band[0], wanted.band)
        np.testing.assert_array_equal(found.valid[0], wanted.valid)
        assert row.confident == wanted.confident and row.transform == wanted.transform.to_dict()
    assert store.verify() == len(store)


def test_workers_change_neither_order_nor_bytes(undisturbed, tmp_path):
    run(MIXED, tmp_path / "store", workers=2)
    assert content(tmp_path / "store") == content(undisturbed)


def test_F9_bad_files_are_quarantined_with_a_code_and_the_run_goes_on(undisturbed):
    store = Store.open(undisturbed)
    assert len(store) == 10
    assert [(u.acquisition, u.code) for u in store.unprepared()] == [
        ("1.2.3.3", "truncated_pixel_data"),
        ("1.2.3.7", "preprocessing_failed"),
    ]
    assert "frame 3 of 6 is cut; fetch it again" in store.unprepared()[0].sentence
    assert store.summary()["unprepared"] == {"truncated_pixel_data": 1, "preprocessing_failed": 1}


def test_a_second_call_reads_only_what_is_missing(tmp_path):
    whole = [acquisition(n) for n in range(5)]
    run(whole[:3], tmp_path / "store")
    before = content(tmp_path / "store")
    again, grown = Counting(), Counting()
    prepare(catalog(whole[:3]), tmp_path / "store", SMALL, workers=0, progress=False, read=again)
    assert again.uris == [] and content(tmp_path / "store") == before
    store = prepare(catalog(whole), tmp_path / "store", SMALL, workers=0, progress=False, read=grown)
    assert grown.uris == [a.uri for a in whole[3:]] and len(store) == 5
    run(whole, tmp_path / "at_once")
    assert content(tmp_path / "store") == content(tmp_path / "at_once")


def test_new_files_never_renumber_old_rows(tmp_path):
    run([acquisition(n) for n in (4, 6)], tmp_path / "store")
    store = run([acquisition(n) for n in (1, 4, 5, 6)], tmp_path / "store")
    assert [row.acquisition for row in store.rows] == ["1.2.3.4", "1.2.3.6", "1.2.3.1", "1.2.3.5"]
    assert store.verify() == 4


def test_a_mended_file_leaves_the_quarantine(tmp_path):
    store = run([acquisition(0), acquisition(1, "truncated")], tmp_path / "store")
    assert len(store.unprepared()) == 1
    store = run([acquisition(0), acquisition(1)], tmp_path / "store")
    assert len(store) == 2 and store.unprepared() == ()


def test_a_restored_shard_ends_the_quarantine_of_its_volume(tmp_path):
    """Its file was unreadable when the volume was lost; the shard came back from a copy, so that nothing is tried."""
    run([acquisition(0), acquisition(1)], tmp_path / "store")
    shard = tmp_path / "store" / "voxels" / "c.1.0.0.0"
    shard.rename(tmp_path / "copy")
    assert len(run([acquisition(0), acquisition(1, "truncated")], tmp_path / "store").unprepared()) == 1
    (tmp_path / "copy").rename(shard)
    store = run([acquisition(0), acquisition(1)], tmp_path / "store")
    assert store.unprepared() == () and store.verify() == 2


def test_quarantine_of_other_catalogs_is_kept(tmp_path):
    run([acquisition(0), acquisition(1, "truncated")], tmp_path / "store")
    store = run([acquisition(2), acquisition(3, "breaks")], tmp_path / "store")
    assert [u.acquisition for u in store.unprepared()] == ["1.2.3.1", "1.2.3.3"]


@pytest.mark.parametrize("name", ["voxels", "band", "valid"])
def test_a_lost_or_cut_shard_is_made_again_in_its_place(tmp_path, name):
    files = [acquisition(n) for n in range(4)]
    run(files, tmp_path / "store")
    before = content(tmp_path / "store")
    (tmp_path / "store" / name / "c.1.0.0.0").unlink()
    os.truncate(tmp_path / "store" / name / "c.2.0.0.0", 9)
    read = Counting()
    prepare(catalog(files), tmp_path / "store", SMALL, workers=0, progress=False, read=read)
    assert read.uris == [files[1].uri, files[2].uri]
    assert content(tmp_path / "store") == before


def test_F16_rows_follow_the_catalog_without_touching_voxels(tmp_path):
    """Splits drawn anew must reach the store, or a participant ends in two of them."""
    files = [acquisition(n) for n in range(3)]
    run(files, tmp_path / "store")
    voxels = content(tmp_path / "store" / "voxels")
    read = Counting()
    moved = [replace(a, split="test", participant_labels={"study_group": "dme"}) for a in files]
    store = prepare(catalog(moved), tmp_path / "store", SMALL, workers=0, progress=False, read=read)
    assert read.uris == [] and {row.split for row in store.rows} == {"test"} and store.rows[0].diagnosis == "dme"
    assert content(tmp_path / "store" / "voxels") == voxels


def test_F16_a_scan_that_is_gone_follows_its_participant_to_another_split(tmp_path):
    """Its row stays in the store: left in the old split, it would stop every training, whatever is scanned again."""
    files = [acquisition(n) for n in range(4)]
    run(files, tmp_path / "store")
    voxels = content(tmp_path / "store" / "voxels")
    store = run([replace(files[1], split="test", participant="000")], tmp_path / "store", workers=0)
    assert [row.split for row in store.rows] == ["test", "test", "train", "train"]
    assert_disjoint_splits(store)
    assert store.rows[0].participant == "P000" and content(tmp_path / "store" / "voxels") == voxels
    # A scan gives ids that may be one person's one split, so a row that only the store has follows as well.
    run([acquisition(9, participant="01-0234")], tmp_path / "store", workers=0)
    store = run([acquisition(8, split="test", participant="010234")], tmp_path / "store", workers=0)
    assert [row.split for row in store.rows[-2:]] == ["test", "test"]


def test_a_changed_laterality_is_refused(tmp_path):
    run([acquisition(0)], tmp_path / "store")
    with pytest.raises(StoreError, match=r"prepared with laterality R, but the catalog now says L.*new folder"):
        run([acquisition(0, laterality="L")], tmp_path / "store")


def test_millimetres_axes_and_modality_that_were_corrected_are_refused(tmp_path):
    """What was prepared stays as it was: a corrected sidecar or --nominal-spacing would change the row's words only."""
    run([acquisition(0)], tmp_path / "store")
    with pytest.raises(
        StoreError, match=r"with millimetres .*, but the catalog now says \[0.3, 0.05, 0.2\].*new folder"
    ):
        run([acquisition(0, spacing_mm=(0.3, 0.05, 0.2))], tmp_path / "store")
    with pytest.raises(StoreError, match=r"was prepared the other way up; prepare into a new folder"):
        run([acquisition(0, flags=("declared_upside_down",))], tmp_path / "store")
    for was, now, other in [
        (r"shape \[6, 40, 20\]", r"\[6, 20, 40\]", {"shape": (6, 20, 40)}),
        ("modality structure", "octa", {"modality": "octa"}),
        ("layout raster", "radial", {"layout": "radial"}),
    ]:
        with pytest.raises(StoreError, match=f"was prepared with {was}, but the catalog now says {now}; prepare into"):
            run([acquisition(0, **other)], tmp_path / "store")
    assert len(run([acquisition(0)], tmp_path / "store")) == 1


@pytest.mark.parametrize(
    ("both", "row", "catalog", "differs"),
    [
        ({}, {}, {}, ""), ({}, {}, {"spacing_mm": (0.2, 0.004, 0.01)}, "millimetres"),
        ({}, {}, {"spacing_mm": (0.1, 0.004, 0.01 * (1 + 1e-8))}, ""),
        ({"layout": "line"}, {}, {"spacing_mm": (0.2, 0.004, 0.02), "shape": (1, 32, 40)}, ""),
        ({"layout": "line"}, {}, {"spacing_mm": (0.1, 0.005, 0.01)}, "millimetres"),
        ({"layout": "line", "flags": (FLAG,)}, {}, {"spacing_mm": (0.1, 0.005, 0.01)}, ""),
        ({"layout": "line"}, {"flags": (FLAG,)}, {"spacing_mm": (0.1, 0.005, 0.01)}, "millimetres"),
        ({"layout": "line"}, {}, {"spacing_mm": (0.1, 0.005, 0.01), "flags": (FLAG,)}, "millimetres"),
        ({}, {"flags": ("declared_upside_down",)}, {}, "the other way up"),
        ({}, {}, {"flags": ("declared_upside_down",)}, "the other way up"),
        ({}, {}, {"laterality": None}, "laterality R"), ({}, {}, {"modality": "octa"}, "modality structure"),
        ({}, {}, {"layout": "radial"}, "layout raster"), ({}, {}, {"shape": (8, 32, 36)}, "shape [4, 32, 36]"),
    ],
)  # fmt: skip
def test_a_row_stays_unless_the_catalog_says_what_would_change_its_voxels(both, row, catalog, differs):
    of = {"laterality": "R", "modality": "structure", "layout": "raster", "flags": ()} | both
    transform = {"native_shape": [4, 32, 36], "native_spacing_mm": [0.1, 0.004, 0.01]}
    stated = of | {"shape": (4, 32, 36), "spacing_mm": (0.1, 0.004, 0.01)} | catalog
    found = _difference(SimpleNamespace(**(of | {"transform": transform} | row)), SimpleNamespace(**stated))  # pyright: ignore[reportArgumentType]
    assert differs in found and bool(found) == bool(differs)


@pytest.mark.parametrize(
    ("keep", "flags", "taken"), [(False, (), "2"), (True, (), "12"), (False, (UPSIDE_DOWN,), "12")]
)
def test_a_volume_that_looks_upside_down_is_taken_over_only_where_it_would_be_kept_today(keep, flags, taken):
    of = {"laterality": "R", "modality": "structure", "layout": "raster"}
    transform = {"native_shape": [4, 32, 36], "native_spacing_mm": [0.1, 0.004, 0.01]}
    rows = [SimpleNamespace(acquisition=uid, found=found, flags=(), transform=transform, **of)
            for uid, found in (("1", (UPSIDE_DOWN,)), ("2", ()))]  # fmt: skip
    now = [SimpleNamespace(sop_instance_uid=uid, flags=own, shape=(4, 32, 36), spacing_mm=(0.1, 0.004, 0.01), **of)
           for uid, own in (("1", flags), ("2", ()))]  # fmt: skip
    found = _reusable(SimpleNamespace(rows=rows, path=""), now, keep)  # pyright: ignore[reportArgumentType]
    assert [*found] == [*taken]


def test_a_person_who_is_gone_follows_another_spelling_and_an_id_that_may_be_the_same():
    now = [acquisition(0, participant="p1", split="test"), acquisition(2, participant="1001", split="val")]
    assert _splits_of({"P-001", "00001001", "p9"}, now) == {"P-001": "test", "00001001": "val"}


def test_a_row_that_is_made_again_keeps_what_its_copies_said_unless_its_voxels_changed(undisturbed):
    row = replace(Store.open(undisturbed).rows[0], found=("way_up_unclear", OF_TWO))
    for pixels, kept in ((row.pixels, (OF_TWO,)), ("others", ())):
        made = replace(row, found=("new",), pixels=pixels)
        outcome = _unless_copy(made, SimpleNamespace(index=0), {}, SimpleNamespace(rows=[row]), {})  # pyright: ignore[reportArgumentType]
        assert isinstance(outcome, StoreRow) and outcome.found == ("new", *kept)


def test_a_learned_band_has_its_memory_and_time_besides_those_of_reading_and_errors_have_codes():
    both = with_finder(Limits(memory=10, seconds_per_megabyte=1.0), SimpleNamespace(memory=5, seconds_per_megabyte=2.0))  # pyright: ignore[reportArgumentType]
    assert (both.memory, both.seconds_per_megabyte) == (15, 3)
    errors = ReadError("no_contrast", "x"), MemoryError(), PermissionError(), ValueError()
    codes = ["no_contrast", "decoder_memory", "unreadable", "preprocessing_failed"]
    assert [code_of(error) for error in errors] == codes


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_new_folder_takes_over_what_has_not_changed(tmp_path, compression):
    """A participant has withdrawn, an eye was corrected, a scan has another split, and one is new: the new store equals
    one that was made from nothing, and only two files were read."""
    upright = {"flags": ("declared_upright",)}  # so small, not all of them show it
    run([acquisition(n, **upright) for n in range(6)], tmp_path / "old")
    now = [acquisition(n, **upright) for n in (1, 3, 4, 5, 6)]
    now[0] = replace(now[0], split="test", participant="other", participant_labels={"age": "70"})
    now[1] = replace(now[1], laterality="L" if now[1].laterality == "R" else "R")
    with pytest.raises(StoreError, match=f"new folder, with --reuse {re.escape(str(tmp_path / 'old'))}"):
        run(now, tmp_path / "old")
    run(now, tmp_path / "fresh", compression=compression)
    reads = Counting()
    into = {"progress": False, "compression": compression, "workers": 0, "read": reads}
    prepare(catalog(now), tmp_path / "new", SMALL, reuse=str(tmp_path / "old"), **into)
    assert content(tmp_path / "new") == content(tmp_path / "fresh") and reads.uris == [now[1].uri, now[4].uri]
    shared = (tmp_path / "new/voxels/c.0.0.0.0").samefile(tmp_path / "old/voxels/c.1.0.0.0")
    assert shared == (compression == "none"), "no second copy on the disk"
    shutil.rmtree(tmp_path / "old")
    assert Store.open(tmp_path / "new").verify() == 5


@pytest.mark.slow
def test_a_part_of_a_store_is_taken_over_under_its_own_numbers(tmp_path):
    whole = [acquisition(n) for n in range(4)]
    old = run(whole, tmp_path / "old")
    run(whole, tmp_path / "new", reuse=old.part([3, 1]))
    assert content(tmp_path / "new") == content(tmp_path / "old")
    with pytest.raises(StoreError, match="--reuse and --out are one store"):
        run(whole, tmp_path / "old", reuse=tmp_path / "old")


def test_a_damaged_volume_is_not_taken_over(tmp_path):
    whole = [acquisition(n) for n in range(3)]
    run(whole, tmp_path / "old")
    (tmp_path / "old/voxels/c.1.0.0.0").write_bytes(b"")
    (tmp_path / "old/band/c.2.0.0.0").unlink()
    reads = Counting()
    store = prepare(
        catalog(whole), tmp_path / "new", SMALL, workers=0, progress=False, read=reads, reuse=tmp_path / "old"
    )
    assert reads.uris == [whole[1].uri, whole[2].uri] and store.verify() == 3
    bad = prepare(
        catalog([acquisition(0), acquisition(1, "swallows")]),
        tmp_path / "bad",
        SMALL,
        workers=1,
        progress=False,
        read=read_sample,
        reuse=tmp_path / "old",
    )
    assert [u.code for u in bad.unprepared()] == ["decoder_memory"], "its file is read in a child, as any other"


def test_shards_that_are_links_themselves_are_taken_over_as_files(tmp_path):
    """As in a store under git-annex; a link to a relative link led nowhere, in a store that seemed whole."""
    run([acquisition(0)], tmp_path / "old")
    shard = tmp_path / "old/voxels/c.0.0.0.0"
    shard.rename(tmp_path / "old/elsewhere")
    shard.symlink_to("../elsewhere")
    store = run([acquisition(0)], tmp_path / "further/below/new", reuse=tmp_path / "old")
    shutil.rmtree(tmp_path / "old")
    assert Store.open(store.path).verify() == 1


def test_a_copy_in_another_store_stays_out_of_the_new_one(tmp_path):
    """Its owner was flagged there; both flag and refusal are made again, and go with the copy."""
    first, copy = acquisition(1), replace(acquisition(1), sop_instance_uid="1.2.3.77", participant="other")
    run([first, copy], tmp_path / "old")
    both = run([first, copy], tmp_path / "both", reuse=tmp_path / "old")
    assert "pixels_of_two_participants" in both.rows[0].found and both.unprepared()[0].acquisition == "1.2.3.77"
    alone = run([first], tmp_path / "alone", reuse=tmp_path / "old")
    assert alone.rows[0].found == () and not alone.unprepared()


def test_a_row_says_that_a_copy_contradicts_its_eye_label_or_millimetres(tmp_path):
    """Which of the two is kept is a matter of names; without scan --pixels, prepare is the first to see the copy."""
    first = replace(acquisition(1), laterality="R", participant_labels={"diagnosis": "amd"})
    others = [{"laterality": "L"}, {"participant_labels": {"diagnosis": "dme"}}, {"laterality": None}]
    dz, dy, dx = first.spacing_mm
    others += [{"spacing_mm": (dz, 2 * dy, dx)}, {"spacing_mm": (dz, 2 * dy, dx), "flags": ("nominal_spacing",)}]
    found_of = [("copy_contradicts",), ("copy_contradicts",), (), ("copy_contradicts",), ()]
    for number, (other, found) in enumerate(zip(others, found_of, strict=True)):
        copy = replace(first, sop_instance_uid="1.2.3.77", **other)
        for _ in ("once", "again"):
            store = run([first, copy], tmp_path / str(number), workers=0)
            assert [row.found for row in store.rows] == [found]
        assert ("but with" in store.unprepared()[0].sentence) == bool(found)
        corrected = replace(first, sop_instance_uid="1.2.3.77")
        assert run([first, corrected], tmp_path / str(number), workers=0).rows[0].found == ()


def test_volumes_are_reused_from_the_store_that_was_opened(tmp_path, monkeypatch):
    """Another store in the current folder, of the same name, gave its files."""
    for place, volumes in (("here", [acquisition(0)]), ("there", [acquisition(1), acquisition(0)])):
        run(volumes, tmp_path / place / "old")
    monkeypatch.chdir(tmp_path / "here")
    old = Store.open("old")
    with pytest.raises(StoreError, match="--reuse and --out are one store"):
        run([acquisition(0)], tmp_path / "here/old", reuse=old)
    monkeypatch.chdir(tmp_path / "there")
    assert run([acquisition(0)], tmp_path / "new", reuse=old).verify() == 1


def test_what_cannot_be_reused_is_refused_before_anything_is_written(tmp_path):
    run([acquisition(1)], tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "empty")
    (tmp_path / "empty/rows.jsonl").write_bytes(b"")
    for acquisitions, settings, other, why in (
        ([acquisition(2)], SMALL, "old", "holds none of the scans of this catalog"),
        ([acquisition(1)], SMALL, "empty", "holds none of the scans of this catalog"),
        ([acquisition(1)], SMALL.model_copy(update={"image_size": (4, 32, 32)}), "old", "image_size is"),
        ([acquisition(1)], SMALL, "new", "--reuse and --out are one store|no prepared store here"),
    ):
        with pytest.raises(StoreError, match=why):
            run(acquisitions, tmp_path / "new", preprocessing=settings, reuse=tmp_path / other)
        assert not (tmp_path / "new").exists()


def test_a_compression_that_there_is_not_is_refused_before_anything_is_written(tmp_path):
    """Such a store named it in its header, and none of its volumes could be read."""
    with pytest.raises(StoreError, match="compression: expected none or zstd, got 'gzip'"):
        run([acquisition(1)], tmp_path / "new", compression="gzip")
    assert not (tmp_path / "new").exists()


def test_other_settings_are_refused_and_named(tmp_path):
    run([acquisition(0)], tmp_path / "store")
    before = content(tmp_path / "store")
    other = Preprocessing(image_size=(4, 32, 32), target_spacing=SMALL.target_spacing)
    with pytest.raises(
        StoreError,
        match=r"prepared differently \(image_size is \[4, 32, 16\], expected \[4, 32, 32\]\).*prepare into a new folder, "
        r"or give its settings \('image_size=\[4, 32, 16\]'\)$",
    ):
        run([acquisition(0), acquisition(1)], tmp_path / "store", preprocessing=other)
    with pytest.raises(StoreError, match=r"this store has compression none, got zstd"):
        run([acquisition(0), acquisition(1)], tmp_path / "store", compression="zstd")
    assert content(tmp_path / "store") == before


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.docx").write_text("years of work")
    with pytest.raises(StoreError, match="not empty and holds no store"):
        run([acquisition(0)], tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.docx"]


def test_a_store_that_another_process_begins_at_this_moment_is_no_foreign_folder(tmp_path, monkeypatch):
    """The second of two commands looks for store.json before it is written, and for other files afterwards."""
    is_dir = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda self: is_dir(self) and bool((self / "store.json").write_text("{}")))
    assert not holds_other(tmp_path, "store.json")


def test_nothing_prepared_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(
        StoreError, match=r"none of 2 volumes.*2 with truncated_pixel_data, for example: .*frame 3 of 6"
    ):
        run([acquisition(n, "truncated") for n in range(2)], tmp_path / "store")
    with pytest.raises(StoreError, match="no accepted acquisition"):
        run([], tmp_path / "empty")


def test_a_file_that_changed_since_the_scan_is_quarantined(tmp_path):
    store = run([acquisition(0), acquisition(1, "shrank")], tmp_path / "store")
    assert [u.code for u in store.unprepared()] == ["changed_since_scan"]


def test_another_scan_at_the_same_place_is_quarantined(tmp_path):
    """Of the same size, as all scans of one protocol: it would be prepared under the other's participant and label."""
    for name in ("a", "b"):
        voxels = np.random.default_rng(ord(name)).integers(0, 255, (6, 40, 36), dtype=np.uint8)
        write_oct_dicom(tmp_path / "scans" / f"{name}.dcm", voxels, (0.12, 0.0039, 0.0115), participant=name)
    found = scan(tmp_path / "scans", workers=0)
    (tmp_path / "scans" / "b.dcm").write_bytes((tmp_path / "scans" / "a.dcm").read_bytes())
    store = prepare(found, tmp_path / "store", SMALL, workers=0, progress=False)
    assert [row.participant for row in store.rows] == ["a"]
    assert [(u.code, u.uri) for u in store.unprepared()] == [("changed_since_scan", str(tmp_path / "scans" / "b.dcm"))]
    # Under pseudonyms as well, with their key.
    key = b"0123456789abcdef"
    hidden = pseudonymise(found, key)
    options = {"locations": locate(hidden, tmp_path / "scans", key), "key": key, "workers": 0, "progress": False}
    store = prepare(hidden, tmp_path / "hidden", SMALL, **options)
    assert [row.participant for row in store.rows] == [pseudonym("a", key)]
    (left_out,) = store.unprepared()
    assert left_out.code == "changed_since_scan" and "scans" not in left_out.sentence.replace("since scan", "")


def test_the_catalog_decides_geometry(tmp_path):
    """The catalog cross-checked spacing and laterality; the file's own word is only one of its sources."""
    store = run([acquisition(0, spacing_mm=(0.3, 0.05, 0.2), laterality="L")], tmp_path / "store")
    assert (
        store.rows[0].transform["native_spacing_mm"] == [0.3, 0.05, 0.2] and store.rows[0].transform["mirrored"] is True
    )


ENDS = {3: "crashes", 4: "slow", 5: "hangs", 6: "swallows", 9: "kills"}
CODES = {3: "decoder_crashed", 5: "decoder_timeout", 6: "decoder_memory", 9: "decoder_memory"}


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_file_that_ends_its_process_is_named_and_the_rest_is_prepared(tmp_path, workers):
    files = [acquisition(n, ENDS.get(n, "reads")) for n in range(12)]
    store = run(files, tmp_path / "store", workers=workers, limits=Limits(seconds=3))
    assert {(u.acquisition, u.code) for u in store.unprepared()} == {(f"1.2.3.{n}", code) for n, code in CODES.items()}
    assert [row.acquisition for row in store.rows] == [
        a.sop_instance_uid for n, a in enumerate(files) if n not in CODES
    ]
    assert store.verify() == len(files) - len(CODES)
    sentences = {u.code: u.sentence for u in store.unprepared()}
    assert "SIG" in sentences["decoder_crashed"] and "not done after" in sentences["decoder_timeout"]


def threads_of_worker(uri: str) -> Volume:
    Path(os.environ["OCTFM_TEST_SEEN"], uri.split(":")[1]).write_text(
        " ".join(os.environ.get(f"{k}_NUM_THREADS", "") for k in ("OMP", "OPENBLAS"))
    )
    return read_sample(uri)


def test_workers_compute_with_one_thread_each(tmp_path, monkeypatch):
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    seen = tmp_path / "seen"
    seen.mkdir()
    monkeypatch.setenv("OCTFM_TEST_SEEN", str(seen))
    prepare(
        catalog([acquisition(n) for n in range(2)]),
        tmp_path / "store",
        SMALL,
        workers=1,
        progress=False,
        read=threads_of_worker,
    )
    assert {p.read_text() for p in seen.iterdir()} == {"1 1"}


def peak_of_prepare(task) -> float:
    """GB that this process, interpreter and imports included, held at most while it prepared a file."""
    path, staging = task
    volume = read_volume(path)
    stage(Preprocessing()(volume), staging, "volume", "none")
    fingerprint(volume.voxels)
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1e6


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak of a process in /proc")
@pytest.mark.parametrize("kind", ["8 bit", "16 bit", "12 bit, inverted, a left eye, inferior first", "signed"])
def test_a_worker_needs_less_than_a_gigabyte_for_the_largest_volumes(tmp_path, kind):
    """512 x 1024 x 512: a quarter of a gigabyte of pixels at 8 bit, half at 16, so that no step may make a second
    volume of them."""
    retina = np.zeros((64, 1024, 512), np.float32)
    retina[:, 400:560] = 100
    retina[:, 540:560] = 200
    tile = (retina + np.random.default_rng(0).gamma(2, 12, retina.shape)).clip(0, 255)
    tile = tile.astype(np.uint8) if kind == "8 bit" else tile.astype(np.uint16) * (257 if kind == "16 bit" else 16)
    options = {}
    if kind == "signed":
        options = {"edit": lambda dataset: setattr(dataset, "PixelRepresentation", 1), "bits_stored": 13}
    if kind.startswith("12"):
        tile = 4095 - tile
        options = {"bits_stored": 12, "photometric": "MONOCHROME1", "laterality": "L", "superior_first": False}
    write_oct_dicom(tmp_path / "large.dcm", np.concatenate([tile] * 8), (6 / 512, 2 / 1024, 6 / 512), **options)
    (peak,) = each(peak_of_prepare, [(tmp_path / "large.dcm", tmp_path)], Limits(), lambda _: 600.0)
    print(f"peak {kind}: {peak:.2f} GB")
    assert peak < 1.0


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    prepare(catalog(MIXED), tmp_path / "store", SMALL, workers=0, read=read_sample)
    text = capsys.readouterr().err
    assert "12 of 12 volumes" in text and "2 not prepared" in text and "\x1b" not in text
    assert "\n  not prepared, truncated_pixel_data: 1\n" in text and "low confidence" in text


def test_a_bar_with_the_remaining_time_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    prepare(catalog(MIXED), tmp_path / "store", SMALL, workers=0, read=read_sample)
    text = capsys.readouterr().err
    assert "━" in text and "12/12" in text and "left" in text and "2 not prepared" in text


def test_the_summary_is_said_per_scanner_and_diagnosis(undisturbed):
    text = "\n".join(describe(Store.open(undisturbed).summary()))
    assert "scanner topcon_triton: " in text and "group healthy: " in text


VICTIM = """
import sys
import threading
sys.path[:0] = {paths!r}
from octfm.store.prepare import prepare
from support.store_samples import SMALL, acquisition, catalog, read_sample

if __name__ == "__main__":
    files = [acquisition(n, "truncated" if n % 7 == 3 else "reads") for n in range({count})]
    prepare(catalog(files), sys.argv[1], SMALL, workers=int(sys.argv[2]), progress=False, read=read_sample)
"""


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds the workers of a killed process in /proc")
@pytest.mark.parametrize(("workers", "kills"), [pytest.param(1, 8, marks=pytest.mark.slow), (2, 3)])
def test_killed_at_any_moment_and_resumed_equals_undisturbed(tmp_path, workers, kills):
    count = 40
    script = tmp_path / "victim.py"
    script.write_text(VICTIM.format(paths=[p for p in sys.path if p], count=count))
    victim = [sys.executable, str(script)]
    start = time.monotonic()
    subprocess.run([*victim, tmp_path / "whole", str(workers)], check=True)
    duration = time.monotonic() - start
    draw = random.Random(workers)
    out, progress, orphans = tmp_path / "store", [0], []
    for _ in range(kills):
        process = subprocess.Popen([*victim, out, str(workers)])
        rows = out / "rows.jsonl"
        size = rows.stat().st_size if rows.exists() else 0
        # Half of the kills fall anywhere, start-up included; half wait for the writing, and fall within it.
        if draw.random() < 0.5:
            planted_delay(draw.uniform(0, duration))
        else:
            wait_until(lambda: process.poll() is not None or (rows.exists() and rows.stat().st_size > size), "a row")  # noqa: B023
            planted_delay(draw.uniform(0, 0.02))
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        orphans += children.read_text().split() if children.exists() else []
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (out / "store.json").exists():
            store = Store.open(out)
            assert store.verify() == len(store), "what is visible is whole"
            assert len(store) >= progress[-1], "what was visible stays"
            progress.append(len(store))
    assert any(0 < n < count - count // 7 for n in progress), f"no kill fell into the writing: {progress}"
    run([acquisition(n, "truncated" if n % 7 == 3 else "reads") for n in range(count)], out, workers=0)
    assert content(out) == content(tmp_path / "whole")
    wait_until(lambda: not any(alive(int(pid)) for pid in orphans), "workers of a killed process end by themselves", 20)


def test_a_worker_that_outlives_its_writer_keeps_no_staging_folder_alive(tmp_path):
    run([acquisition(0)], tmp_path / "store")
    left_over = tmp_path / "store" / "staging-killed"
    left_over.mkdir()
    started = threading.Event()

    def orphan():
        for number in itertools.count():
            try:
                (left_over / f"{number}.voxels").write_bytes(b"")
            except FileNotFoundError:
                return
            if number == 1000:
                started.set()

    worker = threading.Thread(target=orphan)
    worker.start()
    started.wait()
    run([acquisition(0)], tmp_path / "store")
    shutil.rmtree(left_over, ignore_errors=True)  # ends the thread where the test fails
    worker.join()
    assert not [path.name for path in (tmp_path / "store").iterdir() if "staging" in path.name]


def test_a_line_cut_by_a_kill_is_unseen_and_replaced(tmp_path):
    files = [acquisition(n) for n in range(3)]
    run(files, tmp_path / "store")
    before = content(tmp_path / "store")
    rows = tmp_path / "store" / "rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-7])
    assert len(Store.open(tmp_path / "store")) == 2
    run(files, tmp_path / "store")
    assert content(tmp_path / "store") == before


def test_an_interrupted_start_is_continued(tmp_path):
    """Killed before the header was whole: only names with a dot exist."""
    out = tmp_path / "store"
    out.mkdir()
    (out / ".store.json.tmp").write_text('{"form')
    assert len(run([acquisition(0)], out)) == 1


def test_a_full_disk_stops_the_run_and_keeps_what_is_there(tmp_path, monkeypatch):
    files = [acquisition(n) for n in range(4)]
    run(files[:2], tmp_path / "store")
    before = content(tmp_path / "store")

    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("octfm.store.writer.write_durably", full)
        with pytest.raises((StoreError, OSError), match="No space left"):
            run(files, tmp_path / "store", workers=0)
    assert {k: v for k, v in content(tmp_path / "store").items() if k in before} == before
    assert len(run(files, tmp_path / "store")) == 4


def test_real_dicom_ends_in_the_store(tmp_path, real_data):
    """The AMD volume through the reader that `prepare` uses by default."""
    with np.load(real_data / "medvisbonn_amd_spectralis_145.npz") as arrays:
        voxels = arrays["volume"][::5]
    folder = tmp_path / "dicom"
    folder.mkdir()
    write_oct_dicom(folder / "amd.dcm", voxels, spacing_mm=(0.15, 0.003872, 0.011182))
    preprocessing = Preprocessing(image_size=(16, 192, 192), target_spacing=(0.35, 0.0104, 0.0312))
    found = scan(folder)
    store = prepare(found, tmp_path / "store", preprocessing, workers=1, progress=False)
    assert len(store) == 1 and json.loads(store.rows[0].to_line())["uri"].endswith("amd.dcm")
    wanted = preprocessing(replace(read_volume(store.rows[0].uri), laterality=found.acquisitions[0].laterality))
    np.testing.assert_array_equal(store.read([0]).voxels[0], wanted.voxels)
