"""The band holds a lifted or drifting retina, or says that it may not; what older versions prepared can be
continued."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from support import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import bands
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

LIFTED = (
    ("heidelberg_spectralis", "drusen", 420, 2600, "serous"),
    ("topcon_maestro2", "glaucoma", 300, 2700, "solid"),
    ("zeiss_cirrus", "healthy", 450, 2600, "solid"),
    ("synthetic_held_out", "epiretinal_membrane", 280, 2900, "solid"),
    ("topcon_triton", "macular_hole", 800, 3000, "serous"),
    ("topcon_triton", "dme", 350, 2500, "detached"),
)
DRIFTING = Preprocessing(image_size=(16, 96, 48), target_spacing=(0.375, 0.0075, 0.125))
"""A crop of 0.72 mm, lower than the way of a drifting retina."""


@pytest.mark.parametrize(("scanner", "diagnosis", "height_um", "width_um", "fill"), LIFTED)
def test_a_lifted_retina_is_held_or_doubted(scanner, diagnosis, height_um, width_um, fill):
    for seed in (20,):
        plain = bands.phantom(seed, scanner, diagnosis, 0.5)
        scan = bands.elevated(plain, height_um, width_um, fill, np.random.default_rng(seed))
        prepared = bands.CROPS["2.0 mm"](scan.volume)
        assert not prepared.confident or bands.held(prepared, scan) >= bands.HELD, prepared.confidence
        assert bands.CROPS["2.0 mm"](plain.volume).confident


def test_truth_of_a_lift_is_in_the_voxels():
    """The brightest row above BM of a lifted solid lesion lies where the lifted RPE is said to be."""
    scan = bands.elevated(
        bands.phantom(3, "heidelberg_spectralis", "healthy", 0.5), 400, 2500, "solid", np.random.default_rng(1)
    )
    d, w = np.unravel_index((scan.bm - scan.rpe).argmax(), scan.bm.shape)
    around = scan.volume.voxels[d, :, w - 2 : w + 3].mean(axis=1)
    brightest = around[: int(scan.bm[d, w]) - 8].argmax()
    assert scan.rpe[d, w] - 6 <= brightest <= scan.rpe_bottom[d, w] + 2
    assert (scan.bm - scan.rpe).max() * scan.volume.spacing_mm[1] > 0.38


@pytest.mark.parametrize("kind", bands.DRIFTS)
@pytest.mark.parametrize("scanner", ["heidelberg_spectralis", pytest.param("topcon_triton", marks=pytest.mark.slow)])
def test_the_crop_follows_a_drifting_retina(scanner, kind):
    scan = bands.drifted(bands.phantom(5, scanner, "healthy", 0.5), 600, kind, np.random.default_rng(0))
    prepared = DRIFTING(scan.volume)
    assert not prepared.confident or bands.held(prepared, scan) >= bands.HELD
    if kind in ("slope", "late"):  # what registration takes for anatomy is followed, not given up
        assert prepared.confident, prepared.confidence
        back = prepared.transform.rows_to_native(prepared.transform.rows_to_prepared(scan.ilm))
        there = np.isfinite(back)
        np.testing.assert_allclose(back[there], scan.ilm[there], atol=5)


def test_a_retina_taller_than_the_crop_is_doubted():
    scan = bands.phantom(5, "topcon_triton", "healthy", 0.5)
    low = Preprocessing(image_size=(16, 24, 48), target_spacing=(0.375, 0.0075, 0.125))
    prepared = low(scan.volume)
    assert not prepared.confident and prepared.confidence["in_crop"] < 0.9
    assert np.array_equal(prepared.band, prepared.valid)


def test_an_older_store_is_continued_as_it_was_made(tmp_path: Path):
    """Records of version 2 do not name the algorithm; they give its fingerprint, and its band."""
    older = Preprocessing.recorded({})
    assert (older.algorithm, older.fingerprint()) == (2, "a12ac4d4af6da24f")
    assert Preprocessing.recorded(Preprocessing().model_dump()) == Preprocessing()
    header = {"fingerprint": "x", "image_size": [16, 96, 48], "compression": "none", "preprocessing": {}}
    assert Store(tmp_path, json.loads(json.dumps(header)), (), None).preprocessing.algorithm == 2

    scan = bands.drifted(bands.phantom(5, "topcon_triton", "healthy", 0.5), 600, "slope", np.random.default_rng(0))
    before = DRIFTING.model_copy(update={"algorithm": 2})(scan.volume)
    assert before.confident and bands.held(before, scan) < 0.98 and "in_crop" not in before.confidence
