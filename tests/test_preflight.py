"""Each check of the preflight with its defect planted."""

import os
from pathlib import Path

import numpy as np
import pytest

from octfm.config import load
from octfm.data.loader import select
from octfm.errors import ConfigError
from octfm.models.jepa import JEPA
from octfm.training import preflight
from octfm.training.runtime import start
from small_store import prepared_eye, small_preprocessing, small_store
from test_pretrain import config


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store") / "prepared")


def table(settings, store, out):
    rows = select(store, "train"), select(store, "val")
    return {c.name: c for c in preflight.checks(settings, store, start("fp32", "cpu"), *rows, out)}


def test_a_sound_run_passes_everything(store, tmp_path):
    found = table(config(steps=4000), store, tmp_path / "run")
    assert {c.status for c in found.values()} == {"PASS"}, found
    assert "8 participants to train on, 2 to validate on" in found["splits"].measured
    assert list(tmp_path.iterdir()) == [], "the write test leaves nothing behind"


def test_F14_padding_and_shallow_retina_are_named(tmp_path):
    """Target spacing 0.02 mm put a 0.3 mm retina into a single 16-voxel patch and left most rows empty."""

    def shallow(seed, prepared):
        from dataclasses import replace

        middle = prepared.band.mean(0)
        valid = prepared.valid.copy()
        valid[0], valid[1] = 8, 32
        return replace(prepared, band=np.stack([middle - 4, middle + 4]).astype(np.float32), valid=valid)

    store = small_store(tmp_path / "prepared", shallow)
    found = table(config(masks={"budget": 32}), store, tmp_path / "run")
    assert found["padding"].status == "WARN" and "62% of the grid is padding" in found["padding"].measured
    assert found["axial detail"].status == "WARN" and "1.0 tokens deep" in found["axial detail"].measured


def test_F11_an_encoder_that_sees_the_answers_is_stopped_before_step_0(store, tmp_path, monkeypatch):
    import octfm.models.jepa as jepa

    original = jepa.take_tokens

    def everything(tokens, index):
        # What the prototype did: the context encoder receives the whole volume.
        return original(tokens + tokens.mean(1, keepdim=True), index)

    monkeypatch.setattr(jepa, "take_tokens", everything)
    with pytest.raises(
        ConfigError, match=r"stopped the run before step 0: context is blind to targets: gradient .* the encoder sees the answers"
    ):
        preflight.require(list(table(config(), store, tmp_path / "run").values()), lambda _: None)


def test_F11_a_teacher_that_never_moves_is_stopped_before_step_0(store, tmp_path, monkeypatch):
    monkeypatch.setattr(JEPA, "update_target", lambda self, momentum: None)
    assert table(config(), store, tmp_path / "run")["teacher moves"].status == "FAIL"


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="root can write anywhere; needs /proc")
def test_destination_is_write_tested(store):
    assert table(config(), store, Path("/proc/octfm/run"))["destination"].status == "FAIL"


def test_missing_validation_participants_are_named(store, tmp_path):
    rows = select(store, "train"), np.array([], np.int64)
    found = {c.name: c for c in preflight.checks(config(), store, start("fp32", "cpu"), *rows, tmp_path)}
    assert found["splits"].status == "WARN" and "no validation loss" in found["splits"].advice


def test_budget_larger_than_the_volume_is_named(tmp_path):
    def narrow(seed, prepared):
        from dataclasses import replace

        valid = prepared.valid.copy()
        valid[:, :, 8:] = 0
        return replace(prepared, valid=valid)

    found = table(config(masks={"budget": 128}), small_store(tmp_path / "prepared", narrow), tmp_path / "run")
    assert found["tokens repeated"].status == "WARN" and "lower masks.budget to 32" in found["tokens repeated"].advice


def test_disk_and_parameters_are_told(store, tmp_path):
    assert "M parameters" in table(config(), store, tmp_path / "run")["disk"].measured


def test_preflight_never_reads_more_than_a_sample(store, tmp_path, monkeypatch):
    read, seen = type(store).read, []
    monkeypatch.setattr(type(store), "read", lambda self, index, out=None: seen.append(len(index)) or read(self, index, out))
    table(config(), store, tmp_path / "run")
    assert sum(seen) <= preflight.SAMPLE + 1


def test_small_volume_helper_is_deterministic():
    a, b = (prepared_eye(3, small_preprocessing()) for _ in range(2))
    np.testing.assert_array_equal(a.voxels, b.voxels)
    assert load(type(config()), config().model_dump()) == config()
