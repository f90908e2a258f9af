"""Every file of a tree ends as an accepted row or as a reject with a reason, and nothing that identifies a person
gets in."""

import csv
import os
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from pydicom import uid

from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.columns import TableError
from octfm.catalog.scan import scan
from octfm.errors import ConfigError
from octfm.formats.reasons import REASONS
from octfm.phantom.write import write_phantom
from support.command_line import invoke
from support.dicom_files import BIRTH_DATE, PATIENT_NAME, write_oct_dicom

SPACING_MM = (0.12, 0.0039, 0.0115)


def ramp(seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (4, 32, 36), dtype=np.uint8)


def write_table(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        table.writeheader()
        table.writerows(rows)


def write_aireadi(root: Path, participants, column="person_id", **manifest_other) -> None:
    """Both eyes of each participant with manifest and participants table; `manifest_other` overwrites manifest
    columns."""
    manifest = []
    for number, participant in enumerate(participants):
        for side in "RL":
            identity = f"1.2.{number}.{ord(side)}"
            listed = f"/retinal_oct/structural_oct/heidelberg_spectralis/{participant}/{identity}.dcm"
            write_oct_dicom(
                root / listed[1:],
                ramp(),
                SPACING_MM,
                laterality=side,
                participant=participant,
                sop_instance_uid=identity,
                superior_first=True,
            )
            row = {
                column: participant,
                "manufacturer": "Heidelberg",
                "manufacturers_model_name": "Spectralis",
                "laterality": side,
            }
            row |= {
                "height": 32,
                "width": 36,
                "number_of_frames": 4,
                "pixel_spacing": "[0.0039, 0.0115]",
                "slice_thickness": 0.12,
            }
            manifest.append(row | {"sop_instance_uid": identity, "filepath": listed} | manifest_other)
    write_table(root / "retinal_oct" / "manifest.tsv", manifest)
    table = [
        {column: p, "recommended_split": ("train", "val", "test")[i % 3], "study_group": "healthy", "age": "61"}
        | {"birth_date": BIRTH_DATE, "patient_name": PATIENT_NAME}
        for i, p in enumerate(participants)
    ]
    write_table(root / "participants.tsv", table)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("phantom") / "cohort"
    return write_phantom(root, 8, 5, size=(6, 64, 48), defects=1.0, workers=1)


def test_F9_every_file_ends_as_row_or_reject(phantom):
    catalog = scan(phantom)
    images = sorted(str(path) for path in (phantom / "retinal_oct" / "structural_oct").rglob("*") if path.is_file())
    left_out = [*catalog.rejects, *catalog.skipped]
    assert sorted([a.uri for a in catalog.acquisitions] + [r.uri for r in left_out]) == images
    assert all(reject.code in REASONS and reject.uri in reject.sentence for reject in left_out)
    assert all(reject.bytes == Path(reject.uri).stat().st_size for reject in left_out)


@pytest.mark.parametrize("column", ["participant_id", "person_id", "patient_id"])
def test_both_releases_of_the_aireadi_tables_are_joined_and_tables_of_patients_alike(tmp_path, column):
    write_aireadi(tmp_path, ["1001", "1002", "1003"], column)
    catalog = scan(tmp_path)
    assert {a.participant: a.split for a in catalog.acquisitions} == {"1001": "train", "1002": "val", "1003": "test"}
    assert all(a.participant_labels["study_group"] == "healthy" and a.flags == () for a in catalog.acquisitions)
    assert catalog.companions == 2
    inside = scan(tmp_path / "retinal_oct" / "structural_oct")
    assert [(a.participant, a.split, a.flags) for a in inside.acquisitions] == [
        (a.participant, a.split, a.flags) for a in catalog.acquisitions
    ]


def test_manifest_and_header_that_disagree_are_flagged(tmp_path):
    write_aireadi(
        tmp_path,
        ["1001"],
        laterality="L",
        participant_id="",
        height=31,
        manufacturers_model_name="Cirrus",
        manufacturer="Zeiss",
    )
    right, left = sorted(scan(tmp_path).acquisitions, key=lambda a: a.laterality is not None)
    assert (right.laterality, left.laterality) == (None, "L")
    assert "laterality_conflict" in right.flags and "laterality_conflict" not in left.flags
    assert {"shape_conflict", "scanner_conflict"} <= set(left.flags)


def test_manifest_participant_wins_over_patient_id(tmp_path):
    write_aireadi(tmp_path, ["1001"], person_id="study-7", pixel_spacing="[0.0039, 0.0230]")
    for a in scan(tmp_path).acquisitions:
        assert a.participant == "study-7"
        assert {"participant_conflict", "spacing_conflict"} <= set(a.flags)


@pytest.mark.parametrize("text", ["Varies by frame", "Not reported", ""])
def test_manifest_spacing_that_is_no_number_is_no_conflict(tmp_path, text):
    write_aireadi(tmp_path, ["1001"], pixel_spacing=text, slice_thickness=text)
    assert all(a.flags == () for a in scan(tmp_path).acquisitions)


def test_laterality_comes_from_the_manifest_where_the_header_has_none(tmp_path):
    write_aireadi(tmp_path, ["1001"])
    for path in tmp_path.rglob("*.dcm"):
        write_oct_dicom(path, ramp(), SPACING_MM, laterality=None, participant="1001", sop_instance_uid=path.stem)
    found = scan(tmp_path).acquisitions
    assert {a.laterality for a in found} == {"R", "L"}
    assert all("laterality_from_manifest" in a.flags for a in found)


def test_any_tree_of_dicom_files_needs_no_table(tmp_path):
    write_oct_dicom(tmp_path / "a" / "scan", ramp(), SPACING_MM, participant=None)
    write_oct_dicom(tmp_path / "b" / "deep" / "notes.txt", ramp(), SPACING_MM, participant="77")
    (tmp_path / "b" / "readme.txt").write_text("not an image")
    (tmp_path / "b" / "thumb.gif").write_bytes(b"GIF89a" + bytes(300))
    catalog = scan(tmp_path)
    assert [a.participant for a in catalog.acquisitions] == ["a", "77"]
    assert "participant_from_folder" in catalog.acquisitions[0].flags
    assert [(Path(r.uri).name, r.code) for r in catalog.rejects] == [("thumb.gif", "not_dicom")]
    assert catalog.companions == 1


def test_the_copy_that_the_manifest_does_not_list_is_the_duplicate(tmp_path):
    write_aireadi(tmp_path, ["1001"])
    original = next(tmp_path.rglob("*.dcm"))
    copy = original.with_name("0_copy.dcm")
    copy.write_bytes(original.read_bytes())
    catalog = scan(tmp_path)
    assert [(r.uri, r.code) for r in catalog.rejects] == [(str(copy), "duplicate_sop_uid")]
    assert str(original) in catalog.rejects[0].sentence


def test_links_pipes_and_odd_names_do_not_stop_a_scan(tmp_path):
    path = write_oct_dicom(tmp_path / "a.dcm", ramp(), SPACING_MM)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "broken.dcm").symlink_to(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe.dcm")
    odd = os.fsencode(tmp_path) + b"/\xff.dcm"
    Path(os.fsdecode(odd)).write_bytes(path.read_bytes())
    catalog = scan(tmp_path)
    assert len(catalog.acquisitions) == 1
    assert {r.code for r in catalog.rejects} == {"unreadable"} and len(catalog.rejects) == 3
    assert Catalog.load(catalog.save(tmp_path / "out")) == catalog


def test_of_a_file_and_a_link_to_it_the_link_is_the_copy_to_remove(tmp_path):
    """Without the file that it points to, the link is empty."""
    original = write_oct_dicom(tmp_path / "scans" / "b.dcm", ramp(), SPACING_MM)
    (tmp_path / "a.dcm").symlink_to(original)
    catalog = scan(tmp_path)
    assert [a.uri for a in catalog.acquisitions] == [str(original)]
    assert [(r.uri, r.code) for r in catalog.rejects] == [(str(tmp_path / "a.dcm"), "duplicate_sop_uid")]


def test_workers_do_not_change_the_result_and_progress_counts_all_files(tmp_path):
    for i in range(3):
        write_oct_dicom(tmp_path / f"{i}.dcm", ramp(), SPACING_MM, participant=str(i), sop_instance_uid=f"1.2.{i}")
    (tmp_path / "blank.dcm").write_bytes(b"")
    for i in range(300):
        (tmp_path / f"link_{i:03}.dcm").symlink_to(tmp_path / "blank.dcm")
    seen = []
    alone = scan(tmp_path, workers=1, progress=lambda done, total: seen.append((done, total)))
    assert scan(tmp_path, workers=2) == alone
    assert seen[-1] == (304, 304) and seen == sorted(seen)


def test_a_catalog_is_loaded_as_it_was_saved(phantom, tmp_path):
    catalog = scan(phantom)
    assert Catalog.load(catalog.save(tmp_path)) == catalog
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.parquet", "rejects.parquet"]
    summary = catalog.summary()
    assert tuple(catalog) == catalog.acquisitions
    assert summary["accepted"] == len(catalog) == sum(summary["scanners"].values())
    assert summary["rejected"] == sum(summary["rejects"].values())
    assert summary["participants"] == sum(summary["participants_per_split"].values())


def test_a_full_disk_leaves_the_catalog_that_was_there(phantom, tmp_path, monkeypatch):
    """Scanning a clinic again takes hours."""
    catalog, write = scan(phantom), Path.write_bytes
    catalog.save(tmp_path)

    def full(self, data):
        if "rejects" in self.name:
            raise OSError(28, "No space left on device")
        return write(self, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        Catalog(catalog.root, catalog.acquisitions[1:], catalog.rejects).save(tmp_path)
    assert Catalog.load(tmp_path) == catalog
    assert sorted(path.name for path in tmp_path.iterdir()) == ["catalog.parquet", "rejects.parquet"]


def test_a_catalog_that_is_being_replaced_is_read_whole(phantom, tmp_path, monkeypatch):
    """Its two files are replaced one after the other; whoever read between them was told to scan again."""
    catalog = scan(phantom)
    newer = Catalog(catalog.root, catalog.acquisitions[1:], catalog.rejects)
    folder, other = catalog.save(tmp_path / "a"), newer.save(tmp_path / "b")
    (other / "rejects.parquet").replace(folder / "rejects.parquet")
    files = [other / "catalog.parquet"]
    monkeypatch.setattr(time, "sleep", lambda _: files.pop().replace(folder / "catalog.parquet"))
    assert Catalog.load(folder) == newer


def test_a_catalog_that_is_being_sent_to_a_bucket_is_waited_for(monkeypatch):
    sent: dict[str, bytes] = {}
    monkeypatch.setattr("octfm.io.bucket.write", sent.__setitem__)
    monkeypatch.setattr("octfm.io.bucket.read", sent.__getitem__)
    newer = Catalog("newer", (), ())
    newer.save("s3://eyes/newer")
    Catalog("older", (), ()).save("s3://eyes/catalog")
    rejects, rows = (f"s3://eyes/{{}}/{name}.parquet" for name in ("rejects", "catalog"))
    sent[rejects.format("catalog")] = sent[rejects.format("newer")]
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if sum(waited) >= 5:
            sent[rows.format("catalog")] = sent[rows.format("newer")]

    monkeypatch.setattr(time, "sleep", sleep)
    assert Catalog.load("s3://eyes/catalog") == newer and waited == [1, 2, 3]


def test_a_scan_that_was_killed_while_it_saved_is_made_again(phantom, tmp_path):
    scan(phantom).save(tmp_path / "catalog")
    (tmp_path / "catalog" / "catalog.parquet").unlink()  # replaced second
    assert invoke("scan", phantom, "--out", tmp_path / "catalog").exit_code == 0


@pytest.mark.parametrize("folder", ["s3://eyes/catalog", "catalog"])
def test_catalog_parquet_is_replaced_last(folder, tmp_path, monkeypatch):
    """Whoever is killed between the two files leaves the splits before, which are in catalog.parquet."""
    replaced, replace_file = [], Path.replace
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octfm.io.bucket.write", lambda uri, _: replaced.append(uri))
    monkeypatch.setattr(Path, "replace", lambda own, to: (replaced.append(str(to)), replace_file(own, to))[1])
    Catalog("trial", (), ()).save(folder)
    assert replaced == [f"{folder}/rejects.parquet", f"{folder}/catalog.parquet"]


def test_a_catalog_that_may_not_be_read_is_not_called_damaged(tmp_path, monkeypatch):
    refused = PermissionError(13, "Permission denied", str(tmp_path / "catalog.parquet"))
    monkeypatch.setattr("octfm.catalog.catalog.from_parquet", Mock(side_effect=refused))
    with pytest.raises(PermissionError):
        Catalog.load(tmp_path)


def test_damaged_mixed_and_foreign_catalogs_are_refused(phantom, tmp_path):
    with pytest.raises(CatalogError, match=r"no such file.*octfm scan"):
        Catalog.load(tmp_path)
    catalog = scan(phantom)
    folder = catalog.save(tmp_path / "a")
    Catalog(catalog.root, catalog.acquisitions[1:], catalog.rejects).save(tmp_path / "b")
    (tmp_path / "b" / "catalog.parquet").replace(folder / "catalog.parquet")
    with pytest.raises(CatalogError, match="not from one scan"):
        Catalog.load(folder)
    (folder / "catalog.parquet").write_bytes(b"PAR1")
    with pytest.raises(CatalogError, match="damaged"):
        Catalog.load(folder)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"a": [1]}), folder / "catalog.parquet")
    with pytest.raises(CatalogError, match="expected octfm-catalog version 3"):
        Catalog.load(folder)


def test_a_catalog_is_read_whose_version_worded_its_advice_otherwise(phantom, tmp_path, monkeypatch):
    catalog = scan(phantom)
    code = catalog.rejects[0].code
    with monkeypatch.context() as earlier:
        earlier.setitem(REASONS, code, replace(REASONS[code], fix="as an earlier version worded it"))
        folder = catalog.save(tmp_path)
    assert Catalog.load(folder) == catalog
    others = {name: reason for name, reason in REASONS.items() if name != code}
    monkeypatch.setattr("octfm.catalog.catalog.REASONS", others)
    with pytest.raises(CatalogError, match=f"reason {code}, which this octfm does not know"):
        Catalog.load(folder)


def test_F16_two_recommended_splits_for_one_participant_are_refused(tmp_path):
    write_aireadi(tmp_path, ["1001"])
    rows = [{"person_id": "1001", "recommended_split": split} for split in ("train", "test")]
    write_table(tmp_path / "participants.tsv", rows)
    with pytest.raises(TableError, match="recommended_split of participant 1001 is 'train' and 'test'"):
        scan(tmp_path)


def test_roots_that_hold_nothing_are_one_clear_error(tmp_path):
    with pytest.raises(CatalogError, match="no such folder"):
        scan(tmp_path / "absent")
    with pytest.raises(CatalogError, match="no image files below it"):
        scan(tmp_path)
    write_oct_dicom(tmp_path / "a.dcm", ramp(), SPACING_MM, sop_class=uid.OphthalmicPhotography8BitImageStorage)
    (tmp_path / "b.dcm").write_bytes(b"")
    with pytest.raises(
        CatalogError, match=r"none of 2 files is an acceptable OCT volume: 1 empty_file \(.*1 photograph \("
    ):
        scan(tmp_path)
    with pytest.raises(CatalogError, match="got a file"):
        scan(tmp_path / "a.dcm")
    with pytest.raises(ConfigError, match="expected a local path, s3://"):
        scan("ftp://clinic/oct")
