"""benchmarks/real_scans.py: tokens lie where their frame says, lines come back where they were, and icons are gone."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from octfm.layers.finder import load_finder
from octfm.layers.sample import samples
from octfm.tasks.layer_map import COLUMNS, Source, measured
from support import BENCHMARKS
from support.untrained import untrained_encoder

sys.path.insert(0, str(BENCHMARKS))
from real_scans import Frame, by_encoder, by_pixels, decoded_lines, lines_to_fine, masked, tokens_of

SPACING_MM = (0.1, 0.011, 0.05)


@pytest.fixture(scope="module")
def encoder():
    return untrained_encoder()


@pytest.mark.parametrize("axis", [0, 1])
def test_the_tokens_of_a_cell_are_of_the_patch_around_it(encoder, axis):
    size = (96, 150)
    ramp = np.arange(size[axis], dtype=np.uint8)
    bscan = np.broadcast_to(ramp[:, None] if axis == 0 else ramp, size)[None].copy()
    tokens, frame = tokens_of(bscan, SPACING_MM, encoder, by_pixels, 6)
    pre = encoder.preprocessing
    grey = 255 * (tokens[0].float() * pre.intensity_std + pre.intensity_mean).mean(-1)
    found = grey[:, grey.shape[1] // 2] if axis == 0 else grey[grey.shape[0] // 2]
    cells = np.arange(frame.cells[axis]) * frame.fine[axis] + (frame.fine[axis] - 1) / 2
    expected = frame.to_native(cells, axis)
    patch = encoder.config.model.patch_size[1 + axis] * frame.native[axis] / frame.prepared[axis]
    whole = (expected > patch) & (expected < size[axis] - patch)
    assert whole.sum() > 3
    np.testing.assert_allclose(found.numpy()[whole], expected[whole], atol=0.6)


def test_every_cell_has_a_token_of_the_encoder(encoder):
    bscans = np.random.default_rng(0).integers(0, 255, (2, 96, 150), dtype=np.uint8)
    tokens, frame = tokens_of(bscans, SPACING_MM, encoder, by_encoder, 6)
    assert tokens.shape == (2, *frame.cells, encoder.width)
    assert bool((tokens != 0).any(-1).all())


def test_lines_come_back_where_they_were():
    frame = Frame((496, 512), (185, 185), (-2, -2), (47, 47), (12, 4))
    columns = np.arange(512)
    lines = np.stack([250 + 30 * np.sin(columns / 60), 290 + 30 * np.sin(columns / 60)])[:, None]
    lines[:, :, 500:] = np.nan
    fine = lines_to_fine(lines, frame)
    assert np.isnan(fine[..., -1]).all()
    fine = np.where(np.isnan(fine), fine[..., 100:101], fine)

    def decoder(_):
        rows = torch.arange(frame.shape[0])[:, None]
        return -0.5 * ((rows - torch.from_numpy(fine)[:, 0, None, None]) / 1.5)[None] ** 2

    found = decoded_lines(decoder, torch.zeros(1, 1, 1, 1), frame, 3.872)  # type: ignore[arg-type]
    assert np.abs(found - lines)[:, :, 5:480].max() < 0.3


def test_icons_conflicts_and_copies_are_left_out(tmp_path):
    rows = [("a.jpg", "amd", "3", "x", "0"), ("b.jpg", "amd", "3", "x", "0"), ("c.jpg", "dme", "4", "y", "1")]
    for name, folder, *_ in rows:
        (tmp_path / "train" / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((420, 630), 200, np.uint8)).save(tmp_path / "train" / folder / name)
    with (tmp_path / "groups.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "class", "group", "md5", "label_conflict"), *rows])
    masked(tmp_path, tmp_path / "groups.csv", tmp_path / "out")
    (only,) = (tmp_path / "out").rglob("*.png")
    assert only.relative_to(tmp_path / "out") == Path("amd/3-a.png")
    image = np.asarray(Image.open(only))
    assert not image[310:, :112].any()
    assert image[:310].all()


@pytest.mark.slow
def test_layers_of_a_single_bscan_are_measured_at_the_scale_of_the_store(tmp_path):
    volume = samples(["dme"])[0].volume
    Image.fromarray(volume.voxels[10]).save(tmp_path / "1.png")
    found = {}
    for name, share in (("own", 1.0), ("half", 0.5)):
        source = Source("1", str(tmp_path / "1.png"), None, tuple(share * mm for mm in volume.spacing_mm))  # type: ignore[arg-type]
        rows = measured([source], tmp_path / name, bscans=None, finder=load_finder())
        found[name] = rows["1"][COLUMNS.index("ilm_bm:mean")]
    assert found["own"] > 1.5 * found["half"] > 0
