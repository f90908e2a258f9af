"""A clinic that keeps everything: DICOM, Heidelberg exports and image folders, in one tree or one archive, go from
scan to store."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import octfm
from octfm.catalog.catalog import CatalogError
from octfm.catalog.columns import TableError
from octfm.catalog.participants.pseudonyms import locate, pseudonymise
from octfm.catalog.scan import scan
from octfm.catalog.volumes import volumes_below
from octfm.cli.options import volumes_in
from octfm.io.isolation import Limits
from support.dicom_files import write_oct_dicom
from support.vendor_files import SPACING_MM, ends_of, write_heyex_xml, write_images, write_tiff, write_vol
from support.volumes import telling_voxels

SHAPE = (12, 64, 48)


def different(number: int) -> np.ndarray:
    return np.roll(telling_voxels(shape=SHAPE), 7 * number, axis=2)


@pytest.fixture
def clinic(tmp_path) -> Path:
    root = tmp_path / "clinic"
    write_oct_dicom(root / "p1" / "a.dcm", different(0), SPACING_MM, participant="p1", sop_instance_uid="1.2.3")
    write_vol(root / "p2" / "b.vol", different(1), participant="p2")
    write_heyex_xml(root / "p3" / "export", different(2), participant="p3", laterality="L")
    write_images(root / "p4" / "images", different(3), laterality="L", participant="p4")
    write_tiff(root / "p5" / "c.tif", different(4), imagej=True)
    write_images(root / "p6" / "undeclared", different(5))
    (root / "p6" / "undeclared.json").unlink()
    return root


def test_scan_and_prepare_take_a_tree_of_many_formats(clinic, tmp_path):
    catalog = scan(clinic, workers=1)
    assert [Path(a.uri).name for a in catalog.acquisitions] == ["a.dcm", "b.vol", "export.xml", "images", "c.tif"]
    assert [(a.participant, a.laterality) for a in catalog.acquisitions] == [
        ("p1", "R"),
        ("p2", "R"),
        ("p3", "L"),
        ("p4", "L"),
        ("p5", None),
    ]
    assert (
        "participant_from_folder" in catalog.acquisitions[-1].flags
        and "laterality_unknown" in catalog.acquisitions[-1].flags
    )
    assert [a.spacing_source for a in catalog.acquisitions] == [
        "shared",
        *["header+positions"] * 2,
        "sidecar",
        "header",
    ]
    for a in catalog.acquisitions:
        np.testing.assert_allclose(a.spacing_mm, SPACING_MM, rtol=2e-3)
    assert [(Path(r.uri).name, r.code) for r in catalog.rejects] == [
        ("undeclared", "missing_spacing")
    ] and catalog.rejects[0].bytes > 1000
    # Every file is told of: 12 B-scans in each of three places, a fundus image and a sidecar.
    assert catalog.companions == 3 * SHAPE[0] + 1 + 1

    preprocessing = octfm.Preprocessing(image_size=(8, 32, 32), target_spacing=(0.18, 0.0078, 0.0172))
    store = octfm.prepare(catalog, tmp_path / "store", preprocessing, workers=1, progress=False)
    assert len(store) == 5 and not store.unprepared()
    left = next(row for row in store.rows if row.participant == "p3")
    assert left.laterality == "L" and left.scanner == "heidelberg_spectralis"


def test_a_table_or_a_nominal_spacing_gives_millimetres(clinic):
    table = clinic.parent / "files.csv"
    table.write_text("filepath,spacing_mm,laterality,participant\np6/undeclared,0.12 0.003872 0.0115,OS,p66\n")
    row = next(a for a in scan(clinic, table=table, workers=1).acquisitions if a.uri.endswith("undeclared"))
    assert (row.spacing_mm, row.spacing_source, row.participant, row.laterality) == (SPACING_MM, "table", "p66", "L")
    nominal = next(
        a
        for a in scan(clinic, nominal_spacing_mm=(0.1, 0.004, 0.01), workers=1).acquisitions
        if a.uri.endswith("undeclared")
    )
    assert nominal.spacing_mm == (0.1, 0.004, 0.01) and "nominal_spacing" in nominal.flags
    others = [
        a for a in scan(clinic, nominal_spacing_mm=(0.1, 0.004, 0.01), workers=1).acquisitions if a.uri != nominal.uri
    ]
    assert all(a.spacing_source != "nominal" for a in others), "what a file states is never overridden"


@pytest.mark.parametrize(
    ("stated", "error"), [("1 1 1", "absurd_spacing"), ("0.12 0.0039", TableError), ("0.12 0 0.01", TableError)]
)
def test_millimetres_that_cannot_be_meant_are_refused(clinic, stated, error):
    table = clinic.parent / "files.csv"
    table.write_text(f"filepath,spacing_mm\np6/undeclared,{stated}\n")
    if isinstance(error, str):
        assert [r.code for r in scan(clinic, table=table, workers=1).rejects] == [error]
    else:
        with pytest.raises(error, match="line 2: spacing_mm is"):
            scan(clinic, table=table, workers=1)


def test_an_archive_is_read_in_place_or_unpacked_with_its_folders(clinic, tmp_path):
    expected = scan(clinic, workers=1)
    archive = tmp_path / "zipped" / "all.zip"
    archive.parent.mkdir()
    shutil.make_archive(str(archive.with_suffix("")), "zip", clinic)
    for catalog in (scan(archive.parent, workers=1), scan(archive.parent, extract=tmp_path / "unpacked", workers=1)):
        facts = [
            [(a.participant, a.shape, a.spacing_mm, a.sop_instance_uid, a.flags) for a in c.acquisitions]
            for c in (catalog, expected)
        ]
        assert facts[0] == facts[1]
        assert [r.code for r in catalog.rejects] == ["missing_spacing"]
        for a, b in zip(catalog.acquisitions, expected.acquisitions, strict=True):
            np.testing.assert_array_equal(octfm.read_volume(a.uri).voxels, octfm.read_volume(b.uri).voxels)


def test_copies_are_found_and_folders_that_differ_are_not(clinic):
    shutil.copytree(clinic / "p4", clinic / "q4")
    shutil.copy(clinic / "p2" / "b.vol", clinic / "p2" / "copy.vol")
    catalog = scan(clinic, workers=1)
    assert {Path(r.uri).relative_to(clinic).as_posix() for r in catalog.rejects if r.code == "duplicate_sop_uid"} == {
        "q4/images",
        "p2/copy.vol",
    }


def test_a_pseudonymous_catalog_finds_folders_and_exports_again(clinic, tmp_path):
    key = b"0123456789abcdef"
    hidden = pseudonymise(scan(clinic, workers=1), key)
    assert not any(
        word in str(asdict(hidden)) for word in ("'p1'", "'p4'", "export.xml", str(clinic), "Planted", "Secret")
    )
    assert all(Path(place).exists() for place in locate(hidden, clinic, key).values())
    preprocessing = octfm.Preprocessing(image_size=(8, 32, 32), target_spacing=(0.18, 0.0078, 0.0172))
    locations = locate(hidden, clinic, key)
    options = {"locations": locations, "key": key, "workers": 1, "progress": False}
    store = octfm.prepare(hidden, tmp_path / "store", preprocessing, **options)
    assert len(store) == 5 and not store.unprepared()


def test_a_tree_without_any_volume_says_what_would_make_one(tmp_path):
    write_images(tmp_path / "a" / "visit", different(0))
    (tmp_path / "a" / "visit.json").unlink()
    with pytest.raises(CatalogError, match=r"1 missing_spacing .*declare spacing_mm in NAME\.json or a table"):
        scan(tmp_path, workers=1)


def test_of_two_copies_the_one_with_a_sidecar_is_kept(tmp_path):
    """The other states no millimetres, so it would be rejected, and its twin be lost as a copy of it."""
    folders = [tmp_path / "clinic" / name for name in ("p1", "p2")]
    for folder in folders:
        folder.mkdir(parents=True)
        np.save(folder / "scan.npy", different(0))
    (folders[1] / "scan.json").write_text(json.dumps({"spacing_mm": SPACING_MM, "laterality": "OS"}))
    catalog = scan(tmp_path / "clinic", participant_from="{participant}/*", workers=1)
    assert [a.uri for a in catalog.acquisitions] == [str(folders[1] / "scan.npy")]
    assert [(r.uri, r.code) for r in catalog.rejects] == [(str(folders[0] / "scan.npy"), "pixels_of_two_participants")]
    found, left_out = volumes_below(tmp_path / "clinic", workers=1)
    assert found == [str(folders[1] / "scan.npy")] and [r.uri for r in left_out] == [str(folders[0] / "scan.npy")]


def test_other_layouts_in_a_folder_of_rasters_are_left_out_with_the_reason(tmp_path, capsys):
    """Where only rasters can be read, a circle among them is no scan that failed."""
    write_vol(tmp_path / "a.vol", different(0), ends=ends_of(*SHAPE[::2]))
    write_vol(tmp_path / "b.vol", different(1)[:1], ends=ends_of(1, SHAPE[2]), pattern=2)
    assert [*volumes_in([str(tmp_path)], Limits(), "raster")] == [str(tmp_path / "a.vol")]
    said = capsys.readouterr()
    assert "1 left out, not_raster: " in said.out + said.err
    assert len(volumes_in([str(tmp_path)], Limits())) == 2


def test_a_folder_names_what_is_left_out_and_why(tmp_path, capsys):
    for name in ("a", "b"):
        write_tiff(tmp_path / f"{name}.tif", different(0), imagej=True)
    assert volumes_in([str(tmp_path)], Limits()) == {str(tmp_path / "a.tif"): None}
    said = capsys.readouterr()
    assert f"1 left out, duplicate_sop_uid: {tmp_path / 'b.tif'}: a copy of {tmp_path / 'a.tif'}" in said.out + said.err
