"""The learned band of `prepare`: named with its hash, the same wherever volumes are prepared, and doubted where the
network is unsure."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octfm
from octfm.catalog.scan import scan
from octfm.config import load
from octfm.encoder.embed_files import embed_files
from octfm.encoder.embeddings import read_embeddings
from octfm.encoder.encoder import load_encoder
from octfm.encoder.export import export
from octfm.errors import CheckpointError, ConfigError, StoreError
from octfm.io.isolation import Limits, Lost, each
from octfm.layers.band import Found, LearnedBand, band_finder, with_network
from octfm.layers.band import retina as retina_in
from octfm.layers.finder import load_finder
from octfm.phantom import phantom_volume
from octfm.run import checkpoint
from octfm.store.layout import read_header
from octfm.store.prepare import with_finder
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.tissue import MARGIN_MM, Tissue, find_tissue
from octfm.volume.volume import Volume
from octfm.weights.packaged import find_packaged
from support import FIXTURES
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.small_store import SIZE, small_preprocessing, small_store
from support.store_samples import content
from support.tiny_runs import config, quick_pretrain, quiet

pytestmark = pytest.mark.usefixtures("remembered_bscans")
BAND = LearnedBand()
GRID = {"image_size": list(SIZE), "target_spacing": [0.7, 0.03, 0.18]}
"""That of small_preprocessing."""
LEARNED = load(Preprocessing, GRID | BAND.settings)
LOST_NETWORK = f"layers-0 {'0' * 64}"


@pytest.fixture(scope="module")
def retina():
    """A few wide-spaced B-scans of an eye with drusen, and its truth."""
    return phantom_volume(3, scanner="heidelberg_spectralis", diagnosis="drusen", size=(4, 256, 160))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory, retina) -> Path:
    root = tmp_path_factory.mktemp("clinic")
    for n, voxels in enumerate((retina[0].voxels, retina[0].voxels[:, :, ::-1])):
        write_oct_dicom(
            root / f"{n}.dcm", np.ascontiguousarray(voxels), retina[0].spacing_mm, laterality="R", participant=f"P{n}"
        )
    return root


def test_settings_with_a_classic_band_are_what_they_were():
    """Stores, checkpoints and exports from before bands could be learned stay valid, and readable by older octfm."""
    assert Preprocessing(algorithm=3).fingerprint() == "280539577be3ae15"
    assert Preprocessing().fingerprint() == "dbee6b2b5fd2d97b"
    assert not {"band", "band_network"} & Preprocessing().model_dump(mode="json").keys()
    of_store = Preprocessing.recorded(json.loads((FIXTURES / "store_v1" / "store.json").read_text())["preprocessing"])
    of_run = Preprocessing.recorded(checkpoint.load(FIXTURES / "checkpoint_v1.pt")["preprocessing"])
    assert (of_store.fingerprint(), of_store.band) == ("ec2b25402126066b", "classic")
    assert (of_run.fingerprint(), of_run.band) == ("21c01a4aeeca396f", "classic")


def test_a_learned_band_is_named_with_its_hash():
    named = with_network(load(Preprocessing, GRID, ["band=learned"]))
    assert named == LEARNED == Preprocessing.recorded(named.model_dump(mode="json"))
    assert named.band_network == f"{BAND.name} {find_packaged(BAND.name).digest}"
    other = named.model_copy(update={"band_network": LOST_NETWORK})
    assert with_network(small_preprocessing()) == small_preprocessing(), "a classic band needs none"
    assert with_network(other) == other, "a network that is named is never exchanged"
    assert len({p.fingerprint() for p in (named, other, small_preprocessing())}) == 3
    with pytest.raises(ConfigError, match="learned needs algorithm 3"):
        load(Preprocessing, {"band": "learned", "algorithm": 2})
    with pytest.raises(ConfigError, match="band_network"):
        load(Preprocessing, {"band_network": "layers-2"})


def test_the_learned_band_holds_the_retina_and_is_tight(retina):
    """With the margin it holds every row of the retina, in the frame of the volume it was given."""
    volume, truth = retina
    classic = find_tissue(volume.voxels, volume.spacing_mm)
    found = BAND(volume.voxels, volume.spacing_mm, classic)
    assert found.confident and found.located, found.confidence
    assert set(classic.confidence) < set(found.confidence), "the way up is judged by the classic measurements"
    margin = MARGIN_MM / volume.spacing_mm[1]
    ilm, bm = truth.surface("ilm"), truth.surface("bm")
    assert (found.ilm - margin < ilm).mean() > 0.99 and (found.bm + margin > bm).mean() > 0.99
    thick = {name: (t.bm - t.ilm).mean() for name, t in (("classic", classic), ("learned", found))}
    assert abs(thick["learned"] - (bm - ilm).mean()) < 0.02 / volume.spacing_mm[1], thick


@pytest.mark.parametrize("dz", [0.03, 0.24])
@given(seed=st.integers(0, 2**32 - 1), spoilt=st.integers(0, 7))
def test_the_band_is_the_networks_or_doubted_whatever_it_found(dz, seed, spoilt):
    """Seven B-scans that the network was given, registered; with many B-scans between them where they lie close."""
    rng, step, depth, width, height = np.random.default_rng(seed), round(0.24 / dz), 61, 60, 300
    at = np.arange(step // 2, depth, step)[:7]
    depth = at[-1] + 1 + rng.integers(0, step)
    across, along = np.linspace(-1, 1, width), np.arange(depth)[:, None] * dz
    displacement = rng.normal(0, 6, depth)
    bm = 200 + rng.uniform(-5, 5) * along + rng.uniform(-20, 20) * across + rng.uniform(0, 20) * across**2
    truth = np.stack([bm - rng.uniform(30, 100), bm]) + displacement[:, None]
    rows, error, present = truth[:, at].copy(), np.full((len(at), width), 5.0), np.ones((len(at), width))
    classic = Tissue(0 * bm, 0 * bm + height, None, displacement, True, {"rpe": 1.0}, True)
    some = slice(0, 20) if spoilt else slice(0, 0)
    if spoilt == 1:
        present[:2] = 0.1
    elif spoilt == 2:
        rows[0, :, some] = np.nan
    elif spoilt == 3:
        error[:, some] = 1000 * MARGIN_MM + 1
    elif spoilt == 4:
        rows[:, :, some] += np.where(np.arange(len(at)) % 2, 60, -60)[:, None]
    elif spoilt == 5:
        rows[0, :, some] = rows[1, :, some] - 10
    elif spoilt == 6:
        rows[1, :, some] -= 25
    elif spoilt == 7:
        rows[0, :, some] = rows[1, :, some] - 500
    found = retina_in(Found(rows.astype(np.float32), present, error), at, height, (dz, 0.004, 0.05), classic)
    assert found.confidence.items() >= classic.confidence.items() and "learned_bscans" in found.confidence
    assert found.displacement is displacement
    if spoilt:
        assert not found.confident and found.bm is classic.bm and found.ilm is classic.ilm
    else:
        inside = slice(at[0], at[-1] + 1)
        assert found.confident and found.located, found.confidence
        assert np.allclose(np.stack([found.ilm, found.bm])[:, inside], truth[:, inside], atol=0.7)


@pytest.mark.parametrize(("dz", "slope", "trusted"), [(0.03, 0.2, True), (0.03, 0.3, False), (0.3, 0.4, True)])
def test_a_retina_that_drifts_is_trusted_where_every_bscan_was_asked_or_it_drifts_little(dz, slope, trusted):
    """Between two B-scans that the network was given, others may lie deeper than a line that joins both."""
    step, width, height = round(0.24 / dz), 60, 300
    at = np.arange(0, 6 * step + 1, step) if step > 1 else np.arange(7)
    ways = np.array([1, -1, -1, 1, 1, -1]) if dz > 0.24 else np.ones(at[-1])
    drift = np.concatenate([[0], np.cumsum(slope * dz / 0.004 * ways)])[:, None] * np.ones(width)
    rows = np.stack([60 + drift, 130 + drift])[:, at].astype(np.float32)
    classic = Tissue(0 * drift, 0 * drift, None, np.zeros(len(drift)), True, {}, True)
    sure = Found(rows, np.ones((len(at), width)), np.full((len(at), width), 5.0))
    found = retina_in(sure, at, height, (dz, 0.004, 0.05), classic)
    assert found.confident == trusted, found.confidence


@pytest.mark.parametrize("dz", [0.03, 0.12, 0.24])
@pytest.mark.parametrize("at_mm", [(0.33, -0.42), (-0.5, 0.21)])
def test_the_fovea_of_a_learned_band_is_where_the_pit_is(dz, at_mm):
    depth, width, height, step = round(6 / dz) + 1, 240, 300, max(1, round(0.24 / dz))
    at = np.arange(depth)[(depth - 1) % step // 2 :: step]
    z, x = np.meshgrid(dz * np.arange(depth) - 3, 0.025 * np.arange(width) - 2.9875, indexing="ij")
    pit = 30 * np.exp(-((z - at_mm[0]) ** 2 + (x - at_mm[1]) ** 2) / 0.2)
    rows = np.stack([120 + pit, np.full_like(pit, 200)])[:, at].astype(np.float32)
    classic = Tissue(0 * pit, 0 * pit, None, np.zeros(depth), True, {}, True)
    sure = Found(rows, np.ones((len(at), width)), np.full((len(at), width), 5.0))
    found = retina_in(sure, at, height, (dz, 0.004, 0.025), classic)
    assert found.confident and found.fovea is not None
    assert found.fovea[0] * dz - 3 == pytest.approx(at_mm[0], abs=0.2)
    assert found.fovea[1] * 0.025 - 2.9875 == pytest.approx(at_mm[1], abs=0.06)
    mirrored = retina_in(replace(sure, rows=rows[:, :, ::-1]), at, height, (dz, 0.004, 0.025), classic).fovea
    assert mirrored == pytest.approx((found.fovea[0], width - 1 - found.fovea[1]))


def test_the_network_is_asked_with_one_thread_whatever_is_set():
    """Sums of other threads differ in their last digit, and with them a store's checksums."""
    used, before = [], torch.get_num_threads()
    hook = load_finder(BAND.name, "cpu").network.register_forward_pre_hook(
        lambda *_: used.append(torch.get_num_threads())
    )
    voxels, none = np.random.default_rng(0).integers(0, 90, (2, 96, 64)).astype(np.uint8), np.zeros((2, 64))
    try:
        torch.set_num_threads(2)
        BAND(voxels, (0.3, 0.004, 0.012), Tissue(none, none, None, none[:, 0], True, {}, True))
        assert set(used) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        hook.remove()


def test_either_asks_the_network_only_where_the_classic_band_is_unsure(retina, monkeypatch):
    volume, _ = retina
    either = with_network(load(Preprocessing, GRID, ["band=either"]))
    assert either.band_network == BAND.network and either.fingerprint() != LEARNED.fingerprint()
    sure = either(volume, BAND)
    assert np.array_equal(sure.band, small_preprocessing()(volume).band) and "learned_sure" not in sure.confidence
    classic = find_tissue(volume.voxels, volume.spacing_mm)
    monkeypatch.setattr("octfm.volume.preprocessing.find_tissue", lambda *_: replace(classic, confident=False))
    unsure = either(volume, BAND)
    assert unsure.confident and np.array_equal(unsure.band, LEARNED(volume, BAND).band)
    assert not small_preprocessing()(volume).confident


@pytest.mark.slow
def test_where_the_network_is_unsure_the_band_is_doubted(retina):
    volume, _ = retina
    noise = np.random.default_rng(0).gamma(2, 20, volume.shape).clip(0, 255).astype(np.uint8)
    half_dark = np.where(np.arange(4)[:, None, None] < 2, volume.voxels, 3).astype(np.uint8)
    for voxels in (np.ascontiguousarray(volume.voxels[:, ::-1]), half_dark):
        classic = find_tissue(voxels, volume.spacing_mm)
        found = BAND(voxels, volume.spacing_mm, classic)
        assert not found.confident and np.array_equal(found.bm, classic.bm), found.confidence
    prepared = LEARNED(replace(volume, voxels=noise), BAND)
    assert not prepared.confident and np.array_equal(prepared.band, prepared.valid)


@pytest.mark.slow
def test_workers_prepare_what_this_process_prepares(clinic, tmp_path):
    """In a child of the default memory limit, torch included; with the settings that `octfm prepare` fills in."""
    catalog = scan(clinic, workers=0)
    catalog = replace(catalog, acquisitions=catalog.acquisitions[:1])
    here = octfm.prepare(catalog, tmp_path / "here", LEARNED, workers=0, progress=False, find_band=BAND)
    catalog.save(tmp_path / "catalog")
    settings = [f"{name}={value}" for name, value in GRID.items()]
    command = ["prepare", str(tmp_path / "catalog"), "--out", str(tmp_path / "there"), "--workers", "1"]
    done = invoke(*command, *settings, "band=learned")
    assert done.exit_code == 0, done.output
    assert content(tmp_path / "there") == content(tmp_path / "here")
    header = read_header(tmp_path / "there")
    assert header["preprocessing"]["band_network"] == BAND.network and header["fingerprint"] == LEARNED.fingerprint()
    assert all(row.confident and row.confidence["learned_sure"] > 0.9 for row in here.rows)
    classic = octfm.prepare(catalog, tmp_path / "classic", small_preprocessing(), workers=0, progress=False)
    assert not np.array_equal(classic.read([0]).band, here.read([0]).band)
    with pytest.raises(StoreError, match="band is classic, expected learned"):
        octfm.prepare(catalog, tmp_path / "classic", LEARNED, workers=0, progress=False, find_band=BAND)


def test_settings_and_finder_must_name_the_same_network(clinic, tmp_path):
    catalog = scan(clinic, workers=0)
    for settings, finder, message in (
        (LEARNED, None, f"learned needs the network {BAND.network}, got none"),
        (small_preprocessing(), BAND, "but band is classic"),
        (LEARNED.model_copy(update={"band_network": LOST_NETWORK}), BAND, "learned needs the network layers-0 0000"),
        (LEARNED.model_copy(update={"band_network": ""}), BAND, "band_network is empty"),
    ):
        with pytest.raises(ConfigError, match=message):
            octfm.prepare(catalog, tmp_path / "store", settings, workers=0, progress=False, find_band=finder)
    assert not (tmp_path / "store").exists()
    assert band_finder(small_preprocessing(), "x") is None and with_finder(Limits(), None) == Limits()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on volumes with learned bands."""
    folder = tmp_path_factory.mktemp("run")
    store = small_store(folder / "store", preprocessing=LEARNED)
    return quick_pretrain(config(steps=2), store, folder / "run", echo=quiet)


@pytest.mark.slow
def test_an_export_prepares_with_the_network_that_it_names(run, clinic, tmp_path):
    folder = export(run, tmp_path / "export", echo=quiet)
    assert json.loads((folder / "config.json").read_text())["preprocessing"]["band_network"] == BAND.network
    assert BAND.network in (folder / "README.md").read_text()
    encoder, volume = load_encoder(folder), octfm.read_volume(clinic / "0.dcm")
    prepared = encoder.prepare(volume)
    np.testing.assert_array_equal(prepared.band[0], LEARNED(volume, BAND).band)
    vector = load_encoder(run).embed_arrays(prepared)[0]
    embed_files(folder, clinic, tmp_path / "vectors", workers=0, echo=quiet)
    found = read_embeddings(tmp_path / "vectors" / "pretrained.parquet").vectors
    # In the order of the files' UIDs, which are drawn anew.
    assert np.isclose(found, vector, atol=1e-5).all(axis=1).sum() == 1


def test_a_network_that_is_not_here_is_one_clear_error(run, clinic, tmp_path):
    """As after an export by an octfm with another network."""
    folder = export(run, tmp_path / "export", echo=quiet)
    facts = json.loads((folder / "config.json").read_text())
    facts["preprocessing"]["band_network"] = LOST_NETWORK
    facts["fingerprint"] = Preprocessing.recorded(facts["preprocessing"]).fingerprint()
    (folder / "config.json").write_text(json.dumps(facts))
    encoder = load_encoder(folder)
    encoder.embed_arrays(octfm.Store.open(run.parent / "store").read([0]))  # what is prepared needs no network
    message = f"needs the network layers-0 000000000000 .* has {BAND.name} {find_packaged(BAND.name).digest[:12]}"
    with pytest.raises(CheckpointError, match=message):
        encoder.embed(octfm.read_volume(clinic / "0.dcm"))
    with pytest.raises(CheckpointError, match=message):
        embed_files(folder, clinic, tmp_path / "vectors", workers=0, echo=quiet)
    scan(clinic, workers=0).save(tmp_path / "catalog")
    command = ["prepare", str(tmp_path / "catalog"), "--out", str(tmp_path / "new"), "--like", str(folder)]
    done = invoke(*command)
    assert done.exit_code == 1 and isinstance(done.exception, CheckpointError), done.output
    assert not (tmp_path / "new").exists()


def prepare_noise(shape) -> bool:
    """Whether the band is trusted, of course not."""
    voxels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return LEARNED(Volume(voxels, (0.7, 0.00387, 0.0115)), BAND).confident


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux enforces the memory limit")
def test_a_worker_gets_the_memory_for_the_largest_bscans():
    """Next to nothing is left for the volume, so what `with_finder` adds must hold PyTorch and the network."""
    little = Limits(memory=300_000_000)
    largest = [(1, 2048, 1700)]
    assert list(each(prepare_noise, largest, with_finder(little, BAND), lambda _: 600.0)) == [False]
    (lost,) = each(prepare_noise, largest, little, lambda _: 600.0)
    assert isinstance(lost, Lost) and lost.code == "decoder_memory"
