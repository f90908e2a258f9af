"""Folders as public data sets come in: masks beside images, numbers that start again in every class, tables of files."""

import csv

import numpy as np
import pytest

from octfm.catalog.catalog import NothingAccepted, scan
from octfm.catalog.participants.people import AmbiguousPeople
from support.bscan_set import layered, write_image

SPACING = (0.12, 0.02, 0.05)


def mask(*levels: int) -> np.ndarray:
    out = np.zeros((200, 120), np.uint8)
    for place, level in enumerate(levels):
        out[60 + 20 * place : 80 + 20 * place] = level
    return out


def line_scan(root, pattern, **options):
    return scan(root, layouts=("line",), participant_from=pattern, workers=0, **options)


def write_volume(folder, seed, name="{}.png", count=4):
    for k in range(count):
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
