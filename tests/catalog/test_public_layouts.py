"""Folders as public data sets come in: masks beside images, numbers that start again in every class, tables of files."""

import bz2
import csv
import gzip
import json
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from octfm.catalog import estimation
from octfm.catalog.catalog import CatalogError, NothingAccepted
from octfm.catalog.columns import TableError
from octfm.catalog.participants.folders import doubts_about_people
from octfm.catalog.participants.patterns import Pattern, place_of
from octfm.catalog.participants.people import AmbiguousPeople, find_people
from octfm.catalog.scan import scan
from octfm.errors import ConfigError, ReadError
from octfm.formats import read_volume
from octfm.formats.images import read_gray
from octfm.formats.names import is_flow_beside_structure
from octfm.io import bucket, ranged
from octfm.io.location import BucketPath
from support import ROOT
from support.bscan_set import layered, write_image
from support.dicom_files import write_oct_dicom

SPACING = (0.12, 0.02, 0.05)


def mask(*levels: int) -> np.ndarray:
    out = np.zeros((200, 120), np.uint8)
    for place, level in enumerate(levels):
        out[60 + 20 * place : 80 + 20 * place] = level
    return out


def line_scan(root, pattern, **options):
    return scan(root, layouts=("line",), participant_from=pattern, workers=0, **options)


def write_volume(folder, seed, name="{}.png"):
    for k in range(4):
        write_image(folder / name.format(k + 1), layered(100 * seed + k))


def test_equal_drawings_do_not_make_one_person_of_two(tmp_path):
    for n in range(1, 7):
        side = "test" if n > 4 else "train"
        write_image(tmp_path / side / "images" / f"{n}.png", layered(n))
        write_image(tmp_path / side / "annotated" / f"{n}.png", mask(*([255] if n % 2 else [])))  # the same file thrice
    catalog = line_scan(tmp_path, "{split}/*/{participant}")
    assert len(catalog.acquisitions) == 6 and not any("split_with_another_id" in a.flags for a in catalog.acquisitions)
    assert {a.participant: a.split for a in catalog.acquisitions} == {
        str(n): "test" if n > 4 else "train" for n in range(1, 7)
    }
    assert {(r.code, "annotated" in r.uri) for r in (*catalog.rejects, *catalog.skipped)} == {
        ("voxel_labels", True),
        ("blank_volume", True),
    }


def test_masks_of_volumes_are_skipped_by_a_scan_of_headers(tmp_path):
    for person in (1001, 1002):
        write_volume(tmp_path / "Images" / str(person), person)
        for k in range(4):
            write_image(tmp_path / "Masks" / str(person) / f"{k + 1}.png", mask(80, 160, k + 1))
            colours = np.dstack([mask(80), mask(0, 160), mask(k + 1)])
            write_image(tmp_path / "GroundTruth" / str(person) / f"{k + 1}.png", colours)
    write_volume(tmp_path / "labels of 2020" / "1003", 3)  # the name alone does not make them labels
    catalog = scan(tmp_path, participant_from="*/{participant}/*", nominal_spacing_mm=SPACING, workers=0)
    assert {a.uri.split("/")[-2] for a in catalog.acquisitions} == {"Images", "labels of 2020"}
    assert [r.code for r in catalog.skipped] == 4 * ["voxel_labels"] and not catalog.rejects


@pytest.mark.parametrize(
    ("pattern", "path", "participant", "label"),
    [
        ("{label+participant}/{participant}/*", "AMD/1/001.tif", "AMD/1", "AMD"),
        ("*/{label+participant}{participant}/*", "Publication_Dataset/NORMAL12/TIFFs/001.tif", "NORMAL/12", "NORMAL"),
        ("*/{label+participant} ({participant})/*", "Images/AMD (10)/Image (3).png", "AMD/10", "AMD"),
        ("{label+participant}{participant}", "CSR7.jpeg", "CSR/7", "CSR"),
    ],
)
def test_numbers_that_start_again_in_every_class(pattern, path, participant, label, tmp_path):
    found = Pattern.parse(pattern).match(place_of(str(tmp_path / path), tmp_path))
    assert (found.participant, found.labels) == (participant, {"label": label})


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_whose_name_ends_with_an_exclamation_mark_is_a_folder(tmp_path, packed):
    """All people below S12! were taken for one, S12, and the right pattern was refused."""
    pattern = "*/{participant}/*_{eye}"
    for person in ("P001", "P002"):
        write_image(tmp_path / "S12!" / person / f"{person}_OD.png", layered(int(person[1:])))
    if packed:
        with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
            for path in sorted((tmp_path / "S12!").rglob("*.png")):
                archive.write(path, path.relative_to(tmp_path).as_posix())
        shutil.rmtree(tmp_path / "S12!")
        pattern = f"*/{pattern}"
    catalog = line_scan(tmp_path, pattern)
    assert {(a.participant, a.laterality) for a in catalog.acquisitions} == {("P001", "R"), ("P002", "R")}


def test_nor_is_it_a_file_in_a_bucket_and_no_request_finds_that_out(monkeypatch):
    monkeypatch.setattr(bucket, "stat", lambda uri: pytest.fail(f"a request for {uri}"))
    monkeypatch.setattr(bucket, "find", lambda uri: pytest.fail(f"a listing of {uri}"))
    uris = [f"s3://clinic/scans/S12!/{person}/{person}_OD.png" for person in ("P001", "P002")]
    for uri in uris:  # as listed
        ranged.remember(uri, bucket.Object(1, "1"))
    places = [
        place_of(uri, BucketPath.of("s3://clinic/scans"))
        for uri in [*uris, "s3://clinic/scans/S12!/P003/P003_OS.e2e!/1"]
    ]
    found = [Pattern.parse("*/{participant}/*_{eye}").match(place) for place in places]
    assert [match and match.participant for match in found] == ["P001", "P002", "P003"]


def test_a_label_is_given_once():
    with pytest.raises(ConfigError, match=r"\{label\} occurs twice"):
        Pattern.parse("{label+participant}/{label}/{participant}")
    with pytest.raises(ConfigError, match="nothing separates"):
        Pattern.parse("{label}{participant}/*")
    with pytest.raises(ConfigError, match="unknown"):
        Pattern.parse("{participant+label}/{participant}/*")


def test_a_scan_says_that_numbers_may_start_again_in_every_class(tmp_path):
    for label in ("AMD", "DME"):
        for n in range(1, 4):
            write_image(tmp_path / label / str(n) / "1.png", layered(n + 10 * len(label) + ord(label[0])))
    (merged, alone) = ("{label}/{participant}/*", "{label+participant}/{participant}/*")
    catalog = line_scan(tmp_path, merged)
    (doubt,) = doubts_about_people(catalog.acquisitions)
    assert doubt.startswith("3 of 3 participants have scans of several labels (participant 1: AMD, DME)")
    long = [replace(a, participant=f"1000{a.participant}") for a in catalog.acquisitions]
    assert not doubts_about_people(long)
    catalog = line_scan(tmp_path, alone)
    assert {a.participant for a in catalog.acquisitions} == {f"{c}/{n}" for c in ("AMD", "DME") for n in (1, 2, 3)}
    assert {a.participant_labels["label"] for a in catalog.acquisitions} == {"AMD", "DME"}
    (doubt,) = doubts_about_people(catalog.acquisitions)
    assert doubt.startswith("each of 6 B-scans is a participant of its own")


@pytest.mark.parametrize(
    ("paths", "guess", "participants"),
    [
        # A long number is one person in every class and on both sides: two would leak.
        (
            ["train/CNV/CNV-10160-1", "train/DRUSEN/DRUSEN-10160-2", "test/CNV/CNV-10160-3", "test/DRUSEN/DRUSEN-1017-1"],
            ["{split}/{label}/*-{participant}-*"],
            2,
        ),
        (["OCTDL/AMD/amd_10471_1", "OCTDL/NO/no_10599_1", "OCTDL/VID/vid_10777_1"], ["*/{label}/*_{participant}_*"], 3),
        # Short ones may start again in every class.
        (["AMD/1/1", "AMD/2/1", "DME/1/1", "NORMAL/1/1"], ["{label+participant}/{participant}/*"], 4),
        (["Set/AMD1/TIFFs/001", "Set/DME1/TIFFs/001"], ["*/{label+participant}{participant}/*"], 2),
        (["THOCT1800/AMD/AMD (1)", "THOCT1800/DME/DME (1)"], ["*/{label+participant}/* ({participant})"], 2),
        # A number that an eye follows is not that of an image.
        (["image/0001R_1001", "image/0001R_1002", "image/0002L_1001"], ["*/{participant}{eye}_*"], 2),
        (["training/multi-modality_images/0001/0001/0_image", "training/multi-modality_images/0002/0002/0_image"],
         ["*/*/{participant}/*"], 2),
    ],
)  # fmt: skip
def test_the_guess_of_a_public_set_keeps_people_together_and_apart(paths, guess, participants, tmp_path):
    scans = {str(tmp_path / f"{path}.png"): "" for path in paths}
    with pytest.raises(AmbiguousPeople) as stopped:
        find_people(scans, tmp_path)
    assert stopped.value.guess.patterns == guess and stopped.value.guess.participants == participants
    accepted = find_people(scans, tmp_path, [Pattern.parse(guess[0])])
    assert len({whose.participant for whose in accepted.values()}) == participants


@pytest.mark.parametrize(
    ("names", "people"),
    [
        (
            [
                "AMD/Farsiu_Ophthalmology_2013_AMD_Subject_1001.mat",
                "C/Farsiu_Ophthalmology_2013_Control_Subject_1001.mat",
            ],
            ["AMD/1001", "Control/1001"],
        ),
        (
            ["1000123_21012_0_0.fds", "1000123_21014_1_0.fds", "1000456_21014_0_0.fds"],
            ["1000123", "1000123", "1000456"],
        ),
        (["hc01_spectralis_macula_v1_s1_R.vol", "ms01_spectralis_macula_v1_s1_R.vol"], ["hc01", "ms01"]),
        (["OCTA_3mm/OCT/10001/1.bmp", "OCTA_6mm/OCT/10002/1.bmp"], ["10001", "10002"]),
        (["imagesTr/case_001_0000.nii.gz", "imagesTs/case_002_0000.nii.gz"], ["case_001", "case_002"]),
    ],
)
def test_the_patterns_of_the_guide_find_whose_volumes_they_are(names, people):
    page = (ROOT / "docs" / "guide" / "data-images.md").read_text(encoding="utf-8")
    (row,) = {
        line
        for line in page.splitlines()
        if line.startswith("| ") and any(f"`{name.replace('C/', 'AMD/')}`" in line for name in names)
    }
    (pattern,) = re.findall(r"--participant-from '([^']+)'", row)
    found = find_people(dict.fromkeys((f"/set/{name}" for name in names), ""), Path("/set"), [Pattern.parse(pattern)])
    assert [whose.participant for whose in found.values()] == people


def test_whoever_accepts_that_a_number_is_one_person_sees_the_other_reading(tmp_path):
    scans = {str(tmp_path / c / f"{c}-{n}-1.png"): "" for c in ("CNV", "DME") for n in (1001, 1002)}
    with pytest.raises(
        AmbiguousPeople, match=r"may be one person or two \(if two: --participant-from '\{label\+"
    ) as it:
        find_people(scans, tmp_path)
    assert it.value.guess.patterns == ["{label}/*-{participant}-*"]


def table(path, *rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_a_table_of_files_gives_each_its_label(tmp_path):
    """As OCTDL_labels.csv: names without ending or folder, a label per file, the person and the eye."""
    for n, (name, folder) in enumerate([("amd_7_1", "AMD"), ("amd_7_2", "AMD"), ("no_8_1", "NO"), ("no_9_1", "NO")]):
        write_image(tmp_path / "OCTDL" / folder / f"{name}.png", layered(n))
        write_image(tmp_path / "OCTDL" / "masks" / f"{name}.png", mask(80, 160, n + 1))
    files = table(
        tmp_path / "labels.csv",
        ["file_name", "disease", "patient_id", "eye", "part"],
        *(["amd_7_1", "AMD", "7", "OD", "test"], ["amd_7_2", "drusen", "7", "OS", "test"]),
        *(["no_8_1", "normal", "8", "OD", "train"], ["no_9_1", "normal", "9", "OD", "train"]),
    )
    columns = {"file": "file_name", "participant": "patient_id", "laterality": "eye"}
    catalog = scan(
        tmp_path, layouts=("line",), table=files, columns=columns | {"label": "disease", "split": "part"}, workers=0
    )
    found = {a.uri.split("/")[-1]: a for a in catalog.acquisitions}
    assert {name: a.participant_labels["label"] for name, a in found.items()} == {
        **{"amd_7_1.png": "AMD", "amd_7_2.png": "drusen"},
        **{"no_8_1.png": "normal", "no_9_1.png": "normal"},
    }
    assert {a.participant: a.split for a in found.values()} == {"7": "test", "8": "train", "9": "train"}
    assert {a.laterality for a in found.values()} == {"R", "L"} and {a.participant_source for a in found.values()} == {
        "table"
    }


def test_volumes_of_public_sets_of_glaucoma_are_read_with_their_labels(tmp_path, capsys):
    """Folders as FairVision's: npz with a fundus picture and facts beside the voxels, a table of labels and splits; and
    Ishikawa's: npy, with diagnosis, patient, date and eye in the name."""
    rng = np.random.default_rng(0)
    names = [f"data_{n:05d}.npz" for n in range(1, 5)]
    stages = ["no.amd.diagnosis", "early.dry"] * 2
    parts = ["training", "training", "validation", "test"]
    for name, stage, part in zip(names, stages, parts, strict=True):
        folder = tmp_path / "AMD" / part.capitalize()
        folder.mkdir(parents=True, exist_ok=True)
        voxels = rng.integers(0, 255, (12, 40, 30), dtype=np.uint8)
        facts = {"amd_condition": np.array(stage), "age": np.array(70.5), "male": np.array(1)}
        np.savez(folder / name, slo_fundus=rng.integers(0, 255, (51, 66), dtype=np.uint8), oct_bscans=voxels, **facts)
    (tmp_path / "AMD" / "ReadMe").mkdir()
    rows = zip(names, ["70.5"] * 4, ["Male"] * 4, stages, parts, strict=True)
    people = table(tmp_path / "AMD" / "ReadMe" / "summary.csv", ["filename", "age", "gender", "amd", "use"], *rows)
    columns = {"file": "filename", "participant": "filename", "label": "amd", "split": "use", "age": "age"}
    catalog = scan(
        tmp_path / "AMD",
        nominal_spacing_mm=(0.0469, 0.01, 0.03),
        table=people,
        participants=people,
        columns=columns,
        workers=0,
    )
    assert "not read" not in capsys.readouterr().err, "the table of participants takes the other columns"
    labels = {a.uri.split("/")[-1]: a.participant_labels for a in catalog.acquisitions}
    assert [labels[name]["label"] for name in names] == stages and labels[names[0]]["gender"] == "Male"
    assert Counter(a.split for a in catalog.acquisitions) == {"train": 2, "val": 1, "test": 1}
    assert {a.shape for a in catalog.acquisitions} == {(12, 40, 30)} and not catalog.rejects

    page = (ROOT / "docs" / "guide" / "data-images.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'^```python title="labels_in_npz.py"\n(.*?)^```', page, re.S | re.M)
    subprocess.run([sys.executable, "-c", code, "AMD"], cwd=tmp_path, check=True)
    own = tmp_path / "labels.csv"
    again = scan(
        tmp_path / "AMD",
        nominal_spacing_mm=(0.0469, 0.01, 0.03),
        table=own,
        participants=own,
        columns={"label": "amd_condition"},
        workers=0,
    )
    found = {a.uri.split("/")[-1]: (a.participant, a.participant_labels) for a in again.acquisitions}
    assert {name: who for name, (who, _) in found.items()} == {name: name.removesuffix(".npz") for name in names}
    assert [found[name][1]["label"] for name in names] == stages and found[names[0]][1]["male"] == "1"
    assert "file" not in found[names[0]][1], "a path is no label of a person"

    (tmp_path / "POAG").mkdir()
    for name in ("POAG-001978-2012-02-08-OS", "POAG-001978-2013-01-09-OD", "Normal-000012-2012-02-08-OD"):
        np.save(tmp_path / "POAG" / f"{name}.npy", rng.integers(0, 255, (8, 16, 8), dtype=np.uint8))
    found = scan(
        tmp_path / "POAG",
        nominal_spacing_mm=(0.094, 0.0156, 0.094),
        participant_from="{label}-{participant}-*-{eye}",
        workers=0,
    )
    assert {(a.participant, a.laterality, a.participant_labels["label"]) for a in found.acquisitions} == {
        ("001978", "L", "POAG"),
        ("001978", "R", "POAG"),
        ("000012", "R", "Normal"),
    }


def test_a_table_that_fits_no_file_is_named_before_folders_are_asked(tmp_path):
    write_image(tmp_path / "AMD" / "1.png", layered(1))
    write_image(tmp_path / "DME" / "1.png", layered(2))
    files = table(tmp_path / "labels.csv", ["file", "pid"], ["elsewhere/7.png", "7"])
    with pytest.raises(TableError, match="no row fits any of 2"):
        scan(tmp_path, layouts=("line",), table=files, columns={"file": "file", "participant": "pid"}, workers=0)


def test_folders_of_classes_are_named_where_they_pass_for_volumes(tmp_path):
    for label in ("AMRD", "NORMAL"):
        for n in range(1, 5):
            write_image(tmp_path / label / f"{label}{n}.jpeg", layered(n + ord(label[0])))
    with pytest.raises(NothingAccepted, match=r"as in folders of classes: octfm scan FOLDER --layouts line$"):
        scan(tmp_path, workers=0)
    catalog = scan(tmp_path, nominal_spacing_mm=SPACING, participant_from="{participant}/*", workers=0)
    (doubt,) = doubts_about_people(catalog.acquisitions)
    assert doubt.startswith("2 volumes are folders called AMRD, NORMAL; if their images are of several people")
    write_volume(tmp_path / "raw", 1, name="b{}00.png")
    (tmp_path / "raw" / "b200.png").unlink()
    with pytest.raises(ReadError, match=r"missing or occurs twice.*add --layouts line"):
        read_volume(tmp_path / "raw", spacing_mm=SPACING)


def test_tables_beside_scans_are_no_scans_and_hdf5_is_named(tmp_path):
    write_volume(tmp_path / "patient_1" / "OD", 1)
    for name in ("Demographics.xlsx", "read_me.docx", "load.m", "loader.py"):
        (tmp_path / name).write_bytes(b"PK\3\4")
    (tmp_path / "Subject_01.mat").write_bytes(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(400))
    catalog = scan(tmp_path, nominal_spacing_mm=SPACING, workers=0)
    assert len(catalog.acquisitions) == 1 and catalog.companions == 8
    (reject,) = catalog.rejects
    assert reject.code == "not_dicom" and "save its volume as .npz" in reject.sentence
    with pytest.raises(CatalogError, match=r"2 other files: \.md, \.parquet"):
        (tmp_path / "hf").mkdir()
        (tmp_path / "hf" / "train.parquet").write_bytes(b"PAR1")
        (tmp_path / "hf" / "README.md").write_bytes(b"x")
        scan(tmp_path / "hf", workers=0)


def test_a_zarr_array_is_one_reject_and_its_chunks_are_none(tmp_path):
    write_volume(tmp_path / "patient_1" / "OD", 1)
    for name in ("old/zarr.json", "old/0/.zarray", "old/0/0.0.0", "old/0/0.0.1", "old/1/zarr.json", "old/1/c/0/0/1"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(300))
    write_volume(tmp_path / "old" / "patient_2" / "OD", 2)
    (tmp_path / "old" / "patient_2" / "OD" / "zarr.json").touch()
    eye = np.stack([layered(k) for k in range(4)])
    write_oct_dicom(tmp_path / "old" / "1.2.840.7", eye, spacing_mm=SPACING)
    catalog = scan(tmp_path, nominal_spacing_mm=SPACING, workers=0)
    assert len(catalog.acquisitions) == 3
    (reject,) = catalog.rejects
    assert reject.code == "not_dicom" and reject.sentence.startswith(f"{tmp_path / 'old'}: a Zarr array")
    with pytest.raises(ReadError, match="a Zarr array"):
        read_volume(tmp_path / "old" / "0")


def test_flow_beside_structure_is_no_structure(tmp_path):
    """As OCTA-500: OCT/10001 and OCTA/10001 hold the same eye, in images that state nothing."""
    for n, folder in enumerate(("OCTA_3mm/OCT", "OCTA_3mm/OCTA", "elsewhere/OCTA")):
        for person in (10001, 10002):
            write_volume(tmp_path / folder / str(person), 2 * person + 10 * n)
    (tmp_path / "OCTA_3mm" / "OCTA" / "10002.json").write_text(json.dumps({"modality": "structure"}))

    def found(**options):
        catalog = scan(
            tmp_path, nominal_spacing_mm=SPACING, participant_from="*/*/{participant}/*", workers=0, **options
        )
        flow = {a.uri.removeprefix(str(tmp_path)) for a in catalog.acquisitions if a.modality == "octa"}
        return len(catalog.acquisitions), [reject.code for reject in catalog.skipped], flow

    assert found() == (5, ["angiography"], set())  # a folder without a counterpart, or a sidecar, says nothing of flow
    assert found(modalities=("structure", "octa")) == (6, [], {"/OCTA_3mm/OCTA/10001"})


def test_images_for_print_are_read_and_those_of_the_web_named(tmp_path):
    gray = layered(1)
    Image.fromarray(gray).convert("CMYK").save(tmp_path / "a.tif")
    assert np.array_equal(read_volume(tmp_path / "a.tif", raster_only=False).voxels[0], gray)
    for ending in ("gif", "webp", "jp2"):
        Image.fromarray(gray).save(tmp_path / f"a.{ending}")
        with pytest.raises(ReadError, match="a GIF, WebP, HEIC, AVIF, JPEG 2000 or PGM image; save it as PNG"):
            read_volume(tmp_path / f"a.{ending}", raster_only=False)


def test_packed_files_documents_and_videos_are_named_and_not_to_be_fetched_again(tmp_path):
    write_oct_dicom(tmp_path / "a.dcm", layered(1)[None], (0.12, 0.0039, 0.0115))
    whole = (tmp_path / "a.dcm").read_bytes()
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "a.dcm", "a.dcm")
    Image.fromarray(layered(1)).save(tmp_path / "a.pdf")
    for name, content, said in (
        *((f"a.dcm.{module.__name__}", module.compress(whole), "a compressed file or") for module in (gzip, bz2, lzma)),
        ("a.tar", None, "an archive other than ZIP; unpack it"),
        ("a.pdf", None, "a PDF; export the scan itself"),
        ("a.mp4", b"\0\0\0\x18ftypmp42" + bytes(400), "a video; export the scan"),
        ("a.nrrd", b"NRRD0005\ntype: uint8\n" + bytes(400), "an NRRD, VTK or Analyze image; save it as NIfTI"),
        ("b.hdr", b"\x5c\x01\0\0" + bytes(344), "an NRRD, VTK or Analyze image; save it as NIfTI"),
        ("b.img", bytes(400), "only the voxels; give b.hdr"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(ReadError, match=said):
            read_volume(tmp_path / name)


@pytest.mark.parametrize("subsampling", [0, 2], ids=["full colour", "half colour"])
def test_gray_bscans_saved_as_colour_jpegs_are_read_and_lines_in_them_are_not(subsampling, tmp_path):
    """As in a public set of Cirrus line scans, whose icon in light grey has a tint."""
    gray = np.repeat(layered(1)[..., None], 3, axis=2)
    tinted, lines = gray.copy(), gray.copy()
    tinted[:2, ::40] = (180, 205, 235)  # a dozen pixels
    lines[80, :60] = (255, 128, 128)
    gray[80, :20] = (255, 0, 0)  # too few to count, too red for a tint
    write_image(tmp_path / "red.png", gray)
    for name, picture in (("tinted", tinted), ("lines", lines)):
        Image.fromarray(picture).save(tmp_path / f"{name}.jpg", quality=90, subsampling=subsampling)
    assert np.ptp(np.asarray(Image.open(tmp_path / "tinted.jpg")).astype(int), axis=2).max() > 1
    voxels = read_gray(str(tmp_path / "tinted.jpg"))
    np.testing.assert_allclose(voxels[3:].astype(int), layered(1)[3:], atol=40)
    for refused in ("lines.jpg", "red.png"):
        with pytest.raises(ReadError, match="without layer lines"):
            read_gray(str(tmp_path / refused))


def test_bscans_with_coloured_lines_are_not_rejected_for_want_of_millimetres(tmp_path, monkeypatch):
    monkeypatch.setattr(estimation, "SAMPLE", 2)
    for n in range(1001, 1005):
        lines = np.repeat(layered(n)[..., None], 3, axis=2)
        lines[80] = (0, 255, 0)
        write_image(tmp_path / "AMD" / f"AMD-{n}-1.png", lines)
    with pytest.raises(NothingAccepted, match="volume: 4 unsupported_pixels"):
        line_scan(tmp_path, "{label}/*-{participant}-*")
    write_image(tmp_path / "AMD" / "AMD-1005-1.png", layered(1005))
    catalog = line_scan(tmp_path, "{label}/*-{participant}-*")
    assert len(catalog.acquisitions) == 1 and {reject.code for reject in catalog.rejects} == {"unsupported_pixels"}


def test_numbers_of_a_table_may_start_again_in_every_class(tmp_path):
    """As NEH-UT: Patient ID 1 of CNV is not Patient ID 1 of NORMAL; each image has a label of its own."""
    rows = [("CNV", 1, "CNV"), ("CNV", 2, "Normal"), ("NORMAL", 1, "Normal"), ("NORMAL", 2, "Normal")]
    for n, (folder, patient, label) in enumerate(rows):
        write_image(tmp_path / folder / str(patient) / "OS" / f"003_{label}.jpg", layered(n))
    files = table(
        tmp_path / "data_information.csv",
        ["Directory", "Patient ID", "Class", "Label"],
        *([f"{c}\\{p}\\OS\\003_{label.upper()}.jpg", p, c, label.upper()] for c, p, label in rows),
    )
    of_class = {"file": "Directory", "label": "Class"}
    merged = scan(tmp_path, layouts=("line",), table=files, columns=of_class | {"participant": "Patient ID"}, workers=0)
    assert doubts_about_people(merged.acquisitions)[0].startswith("2 of 2 participants have scans of several labels")
    catalog = line_scan(
        tmp_path, "{label+participant}/{participant}/*", table=files, columns=of_class | {"label": "Label"}
    )
    assert {a.participant: a.participant_labels["label"] for a in catalog.acquisitions} == {
        **{"CNV/1": "CNV", "CNV/2": "NORMAL", "NORMAL/1": "NORMAL", "NORMAL/2": "NORMAL"}
    }


def test_a_letter_between_number_and_eye_is_no_part_of_the_id(tmp_path):
    """As OLIVES: 0201GOD and 0201TOS are the eyes of 0201 in two arms."""
    for arm, letter, eye in (("GILA", "G", "OD"), ("TREX", "T", "OS")):
        place = place_of(str(tmp_path / f"TREX DME/{arm}/0201{letter}{eye}/V1/{eye}/J_0.tif"), tmp_path)
        found = Pattern.parse(f"TREX DME/{arm}/{{participant}}{letter}{{eye}}/*").match(place)
        assert found.participant == "0201" and found.eyes == {"R" if eye == "OD" else "L"}


def test_a_guess_that_would_merge_a_surname_says_so(tmp_path):
    names = [f"{person}_19610203_{eye}_1.png" for person in ("Meier_Eva", "Meier_Hans") for eye in ("OD", "OS")]
    with pytest.raises(AmbiguousPeople, match="the pattern reads 'Meier_Eva' as 'Meier', and would merge people"):
        find_people({str(tmp_path / name): "" for name in names}, tmp_path)


def test_flow_beside_structure_is_found_in_a_bucket_as_well(monkeypatch):
    asked = []

    def is_folder(uri):
        asked.append(uri)
        return uri == "s3://clinic/set/oct"

    monkeypatch.setattr("octfm.formats.names.is_folder", is_folder)
    assert is_flow_beside_structure("s3://clinic/set/OCTA/10001/1.npz")
    first = len(asked)
    assert is_flow_beside_structure("s3://clinic/set/OCTA/10002/1.npz") and len(asked) == first  # each lists a prefix
    assert not is_flow_beside_structure("s3://clinic/other/OCTA/1.npz")


@pytest.mark.parametrize(
    ("paths", "pattern", "participants"),
    [
        # A macular hole, geographic atrophy? Initials and sites are written so as well.
        ([f"{who}/{eye}/scan" for who in ("MH001", "JS002", "GA003") for eye in ("OD", "OS")], "{participant}/{eye}/*", 3),
        # 2018 and 2019 are visits of one person.
        ([f"{who}/{year}{eye}" for who in ("Smith", "Meier") for year in (2018, 2019) for eye in ("OD", "OS")],
         "{participant}/*{eye}", 2),
    ],
)  # fmt: skip
def test_letters_and_years_next_to_ids_are_not_taken_for_classes_and_people(paths, pattern, participants, tmp_path):
    with pytest.raises(AmbiguousPeople) as stopped:
        find_people({str(tmp_path / f"{path}.png"): "" for path in paths}, tmp_path)
    assert (stopped.value.guess.patterns, stopped.value.guess.participants) == ([pattern], participants)


@pytest.mark.parametrize(
    "people", [["GA1001", "NY1001"], ["AMD1001", "DME1001"], ["(1001)", "(1002)"], ["[1001]", "[1002]"]]
)
def test_long_ids_with_letters_or_brackets_are_people(people, tmp_path):
    scans = {str(tmp_path / who / f"{eye}.png"): "" for who in people for eye in ("OD", "OS")}
    found = {whose.participant for whose in find_people(scans, tmp_path).values()}
    assert found == {who.strip("()[]") for who in people}


@pytest.mark.parametrize(
    ("form", "eyes"), [("patient {}", "OD OS"), ("patient_{}", "left right"), ("patients/{}", "L R")]
)
def test_eyes_right_after_a_number_are_not_two_people(form, eyes, tmp_path):
    scans = {str(tmp_path / f"{form.format(n)}{eye}.png"): "" for eye in eyes.split() for n in (1, 2, 3)}
    with pytest.raises(AmbiguousPeople, match=r"may be eyes of one person; \{participant\}\{eye\} reads them so"):
        find_people(scans, tmp_path)
    accepted = find_people(scans, tmp_path, [Pattern.parse(form.format("{participant}{eye}"))])
    assert len({whose.participant for whose in accepted.values()}) == 3
