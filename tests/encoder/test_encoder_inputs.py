"""What an encoder takes: scans in every form, a network in a loop of one's own, and the names that it is loaded by."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octfm
from octfm.encoder.encoder import load_encoder, packed, seen_if_known
from octfm.encoder.sources import find, packaged_encoders
from octfm.errors import CheckpointError, ConfigError, EvaluationError, ReadError
from octfm.formats import read_volume
from octfm.layers.finder import load_finder
from octfm.store.layout import Arrays
from octfm.volume.preprocessing import Preprocessing
from support.dicom_files import write_oct_dicom
from support.packaged_encoder import ship
from support.small_store import small_store
from support.tiny_runs import TINY
from support.untrained import untrained_encoder, write_export
from support.volumes import eye


@pytest.fixture(scope="module")
def encoder():
    return untrained_encoder()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("store"), splits=("train",) * 9)


def test_one_scan_gives_a_vector_and_many_a_row_each(encoder, store, tmp_path):
    volume = eye()
    write_oct_dicom(tmp_path / "scan.dcm", volume.voxels, volume.spacing_mm)
    by_path = encoder.embed(tmp_path / "scan.dcm")
    assert by_path.shape == (48,) and by_path.dtype == np.float32
    np.testing.assert_array_equal(encoder.embed(str(tmp_path / "scan.dcm")), by_path)
    both = encoder.embed([str(tmp_path / "scan.dcm"), volume, store[3]])
    assert both.shape == (3, 48)
    np.testing.assert_array_equal(both[0], by_path)
    np.testing.assert_array_equal(both[1], encoder.embed(volume))
    np.testing.assert_array_equal(both[2], encoder.embed(store[3]))
    assert encoder.embed([]).shape == (0, 48)


def test_a_file_that_is_upside_down_gets_no_vector_until_its_sidecar_declares_it(encoder, tmp_path):
    volume = eye()
    turned, uri = volume.voxels[:, ::-1], tmp_path / "a.npz"
    np.savez(uri, volume=turned, spacing_mm=volume.spacing_mm)
    with pytest.raises(ReadError, match="looks upside down") as refused:
        encoder.embed(uri)
    assert refused.value.code == "upside_down"
    (tmp_path / "a.json").write_text('{"upside_down": true}', encoding="utf-8")
    upright = encoder.embed(octfm.Volume(volume.voxels, volume.spacing_mm))
    np.testing.assert_array_equal(encoder.embed(uri), upright)
    (tmp_path / "a.json").write_text('{"upside_down": false}', encoding="utf-8")
    assert not np.array_equal(encoder.embed(uri), upright)


def test_a_volume_of_one_bscan_is_a_line_as_in_a_file(encoder, tmp_path):
    """It was too thin to fill a voxel, or was smeared over the depth of one."""
    whole = eye()
    for dz in (0.01, 0.5):
        volume = replace(whole, voxels=whole.voxels[:1], spacing_mm=(dz, *whole.spacing_mm[1:]))
        np.savez(tmp_path / "one.npz", volume=volume.voxels, spacing_mm=volume.spacing_mm)
        by_path = encoder.embed(tmp_path / "one.npz")
        np.testing.assert_array_equal(encoder.embed(replace(volume, laterality=None, lines=None)), by_path)


def test_a_volume_of_micrometres_or_tensors_is_refused(encoder):
    volume = eye()
    with pytest.raises(ReadError, match=r"expected \(dz, dy, dx\) in millimetres, got rows .* divide micrometres"):
        encoder.embed(replace(volume, spacing_mm=tuple(1000 * mm for mm in volume.spacing_mm)))
    tensor, masked = torch.from_numpy(volume.voxels.copy()), np.ma.masked_less(volume.voxels, 9)
    gaps = r"MaskedArray; fill its gaps with \.filled\(0\)"
    for voxels, kind in ((tensor, "Tensor"), (volume.voxels.tolist(), "list"), (masked, gaps)):
        with pytest.raises(TypeError, match=f"voxels: expected a NumPy array, got {kind}"):
            replace(volume, voxels=voxels)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.uint32, bool])
def test_a_volume_of_other_numbers_than_grey_levels_is_refused(dtype):
    """Layers were looked for in shares from 0 to 1, and the scan was called too dark."""
    volume = eye()
    with pytest.raises(ValueError, match=f"expected grey levels in uint8 or uint16, got {np.dtype(dtype)}; scale"):
        replace(volume, voxels=(volume.voxels / 255).astype(dtype))
    assert replace(volume, voxels=volume.voxels.astype(">u2")).white == 65535, "in any order of bytes"


@pytest.mark.parametrize(
    "spacing_mm",
    [
        (0.1, 0.0, 0.01),
        (0.1, 1e-9, 0.01),
        (0.1, np.inf, 0.01),
        (0.1, np.nan, 0.01),
        (0.1, 0.01),
        0.01,
        None,
        "111",
        (None, 1, 1),
    ],
)
def test_a_volume_of_impossible_millimetres_is_refused(spacing_mm):
    """With voxels of a picometre, filters of a given length took 14 GB and the machine."""
    with pytest.raises(ValueError, match=r"spacing_mm must be \(dz, dy, dx\) of 1e-06 mm or more, got"):
        replace(eye(), spacing_mm=spacing_mm)


def test_impossible_millimetres_are_no_fault_of_the_file(tmp_path):
    """Its structure was said to contradict itself, and it was to be exported again."""
    for read in (octfm.read_volume, octfm.segment):
        with pytest.raises(ValueError, match=r"^spacing_mm must be \(dz, dy, dx\) .*, got \(0.1, 0.1\)"):
            read(tmp_path, spacing_mm=(0.1, 0.1))
    with pytest.raises(ValueError, match=r"^nominal_spacing_mm must be \(dz, dy, dx\) .*, got 0.1"):
        octfm.scan(tmp_path, nominal_spacing_mm=0.1)


def test_millimetres_may_be_an_array_or_a_tensor():
    for spacing_mm in (
        [0.7, 0.03, 0.18],
        np.array([0.7, 0.03, 0.18]),
        torch.tensor([0.7, 0.03, 0.18], dtype=torch.float64),
    ):
        assert replace(eye(), spacing_mm=spacing_mm).spacing_mm == (0.7, 0.03, 0.18)


@pytest.mark.parametrize(
    "facts",
    [{"laterality": "OS"}, {"layout": "volume"}, {"modality": "oct"}, {"superior_first": "no"}, {"full_scale": 0}],
)
def test_a_volume_of_words_that_nothing_knows_is_refused(facts):
    """A left eye called OS was embedded as a right one."""
    name, value = next(iter(facts.items()))
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value!r}"):
        replace(eye(), **facts)


def test_a_pooling_that_there_is_not_is_named_at_once(encoder):
    with pytest.raises(ConfigError, match="pool: expected mean, extremes, tails, summary, got 'max'"):
        encoder.pooling("max")


def test_a_rank_of_a_loop_of_ones_own_loads_an_encoder(encoder, tmp_path, monkeypatch):
    write_export(tmp_path / "export", encoder)
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert load_encoder(tmp_path / "export", device="cpu").embed(eye()).shape == (48,)


def test_a_store_is_embedded_in_its_order_as_it_was_prepared(encoder, store):
    everything = encoder.embed(store)
    assert everything.shape == (18, 48)
    # Batches of 16 and of 1 may differ in the last bits.
    np.testing.assert_allclose(everything, encoder.embed(list(store)), atol=1e-5)
    np.testing.assert_allclose(encoder.embed(store.part([5, 2])), everything[[5, 2]], atol=1e-5)


def test_volumes_that_were_prepared_otherwise_are_refused(encoder, tmp_path):
    other = Preprocessing(image_size=(8, 64, 32), target_spacing=(0.7, 0.031, 0.18))
    store = small_store(tmp_path / "s", splits=("train",), preprocessing=other)
    for scans in (store, store[0], [store[0]]):
        with pytest.raises(EvaluationError, match="prepared with other settings"):
            encoder.embed(scans)


@pytest.mark.parametrize("scans", [np.zeros((8, 64, 32)), 7, None, {"a": 1}, [np.zeros(3)], b"scan.dcm"])
def test_what_is_no_scan_is_named(encoder, scans):
    with pytest.raises(TypeError, match=r"expected a path, a Volume.*got \w+"):
        encoder.embed(scans)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: octfm.segment(np.zeros((2, 64, 32), np.uint8)), "expected the path of a scan, got ndarray; octfm.Vol"),
        (lambda: octfm.read_volume(["a.dcm"]), "expected the path of a scan, got list"),
        (lambda: octfm.pretrain("vit_s", None), "config: expected a PretrainConfig, got str; octfm.load_config"),
        (
            lambda: octfm.pretrain(octfm.load_config("vit_s"), "a"),
            r"expected a Store, got a path; .*Store.open\(path\)",
        ),
        (lambda: octfm.load_encoder(device="cpu").prepare("a.dcm"), "expected a Volume, got str; octfm.read_volume"),
        (lambda: octfm.Preprocessing()("a.dcm"), "expected a Volume, got str; octfm.read_volume"),
        (lambda: octfm.prepare("a", "b", octfm.Preprocessing()), "expected a Catalog, got str; octfm.Catalog.load"),
        (lambda: octfm.prepare(octfm.Catalog("", (), ()), "b", {}), r"expected octfm.Preprocessing\(…\), got dict"),
        (lambda: octfm.probe(None), "expected files of octfm embed or Embeddings, got NoneType"),
    ],
)
def test_what_a_function_expects_instead_of_a_path_or_an_array_is_named(call, problem):
    with pytest.raises(TypeError, match=problem):
        call()


def test_one_override_needs_no_list():
    assert octfm.load_config("vit_s", "model.depth=3").model.depth == 3


def test_a_file_that_is_missing_is_a_read_error(encoder, tmp_path):
    with pytest.raises(ReadError, match=r"nowhere\.dcm"):
        encoder.embed(tmp_path / "nowhere.dcm")


def test_features_of_whole_volumes_are_the_tokens_of_the_grid(encoder, store):
    arrays = store.read([0, 1])
    voxels, network = torch.from_numpy(arrays.voxels), encoder.network
    with torch.no_grad():
        tokens = network.forward_features(voxels)
        assert tokens.shape == (2, network.grid.size, network.num_features)
        np.testing.assert_array_equal(tokens.unflatten(1, network.grid.shape), encoder.encode_grid(arrays.voxels))
        torch.testing.assert_close(network.forward_features(voxels.unsqueeze(1).float()), tokens)
        image = network.feature_map(voxels)
        assert image.shape == (2, network.num_features, *network.grid.shape)
        torch.testing.assert_close(image.flatten(2).mT, tokens)
        read = [torch.from_numpy(index)[None] for index in encoder.read_tokens(arrays)]
        each = [network.forward_features(voxels[i : i + 1], index) for i, index in enumerate(read)]
        mean = np.stack([tokens.numpy()[0].mean(0) for tokens in each])
    np.testing.assert_allclose(mean, encoder.embed_arrays(arrays), atol=1e-5)


def test_a_network_says_which_voxels_it_expects(encoder):
    with pytest.raises(ConfigError, match=r"expected voxels \[B, 1, 8, 64, 32\], got \[2, 1, 8, 64, 30\]"):
        encoder.network.forward_features(torch.zeros(2, 8, 64, 30))
    from octfm.models.vit3d import VisionTransformer3D

    bare = VisionTransformer3D(encoder.network.config, encoder.network.grid)
    with pytest.raises(ConfigError, match=r"take the one of an octfm\.Encoder"):
        bare.forward_features(torch.zeros(2, 8, 64, 32))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_voxels_that_are_not_finite_are_refused(encoder, store, odd):
    grey = torch.from_numpy(store.read([0]).voxels).float()
    grey[0, 0, 0, 0] = odd
    with pytest.raises(ConfigError, match="NaN or infinite"):
        encoder.network.forward_features(grey)


def test_arrays_that_are_no_batch_are_refused(encoder, store):
    """Of one volume without its first axis, B-scans would be taken for volumes, and tokens of a wrong map returned."""
    batch, one = store.read([0]), store[0].arrays
    assert encoder.select(batch)[0].shape == encoder.select(one)[0].shape
    bare = Arrays(batch.voxels[0], batch.band[0], batch.valid[0])
    for read in (encoder.select, encoder.read_tokens, encoder.embed_arrays, encoder.tissue_tokens):
        with pytest.raises(ConfigError, match=r"band\[None\]"):
            read(bare)
        with pytest.raises(
            TypeError, match=r"expected Arrays\(voxels, band, valid\), as Encoder.prepare .* got ndarray"
        ):
            read(batch.voxels)
    with pytest.raises(ConfigError, match=r"expected band of \[1, 2, 8, 32\] for 1 volumes, got \[2, 8, 32\]"):
        encoder.select(Arrays(batch.voxels, batch.band[0], batch.valid[0]))


@pytest.mark.parametrize("wrong", [lambda x: x.short() * 257, lambda x: x > 100, lambda x: x.float() * 16])
def test_voxels_of_sixteen_bits_and_masks_are_refused(encoder, store, wrong):
    grey = torch.from_numpy(store.read([0]).voxels)
    grey[0, 0, 0, 0] = 255
    with pytest.raises(ConfigError, match=r"expected voxels from 0 to 255.*without a scaling of your own"):
        encoder.network.forward_features(wrong(grey))
    as_bytes = encoder.network.forward_features(grey)
    torch.testing.assert_close(encoder.network.forward_features(grey.int()), as_bytes)
    encoder.network.forward_features(grey.float() * 1.5)  # brightened


def test_a_mask_of_tokens_is_not_taken_for_their_places(encoder, store):
    arrays = store.read([0, 1])
    places, tissue = map(torch.from_numpy, encoder.select(arrays))
    voxels = torch.from_numpy(arrays.voxels)
    assert encoder.network.forward_features(voxels, places).shape[1] == places.shape[1]
    for wrong in (tissue, places[0], places.float()):
        with pytest.raises(ConfigError, match=r"expected places, flat grid indices int64 \[B, M\], got torch"):
            encoder.network.forward_features(voxels, wrong)
    for outside in (-1, encoder.network.grid.size):  # -1 was taken for the last
        with pytest.raises(ConfigError, match=rf"expected places, flat grid indices from 0 to \d+, got .*{outside}"):
            encoder.network.forward_features(voxels, torch.tensor([[0, outside]] * 2))


def test_a_device_of_torch_is_a_device(tmp_path):
    write_export(tmp_path / "export", untrained_encoder())
    assert load_encoder(tmp_path / "export", device=torch.device("cpu")).runtime.device == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device: expected auto, cpu, .* got 'meta'"):
        load_encoder(tmp_path / "export", device=torch.device("meta"))


def test_loading_a_network_draws_none_of_the_callers_random_numbers(tmp_path, monkeypatch):
    """Else every head that is drawn afterwards starts from the same weights, whatever seed its author chose."""
    write_export(tmp_path / "export", untrained_encoder())
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("seeded the caller's GPU"))
    load_encoder(tmp_path / "export", random_init=True).of_bscans()
    octfm.OctEncoder.from_pretrained(tmp_path / "export")
    load_finder.__wrapped__()
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("scaled", ["0 to 1", "standardised"])
def test_voxels_that_were_scaled_already_are_refused(encoder, store, scaled):
    """They would be normalised twice: every scan would be the same grey, and nothing would say so."""
    grey = torch.from_numpy(store.read([0, 1]).voxels).float()
    wrong = grey / 255 if scaled == "0 to 1" else (grey - grey.mean()) / grey.std()
    for network in (encoder.network, encoder.of_bscans().network):
        part = slice(0, network.grid.shape[0] * network.config.patch_size[0])
        with pytest.raises(ConfigError, match=r"expected voxels from 0 to 255.*without a scaling of your own"):
            network.forward_features(wrong[:, part])
        for right in (grey[:, part], grey[:, part] - 20, torch.zeros_like(grey[:, part])):
            network.forward_features(right)
    assert encoder.network.forward_features(grey[:0]).shape[0] == 0
    compiled = torch.compile(encoder.network.forward_features, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(grey), encoder.network.forward_features(grey))


@pytest.mark.parametrize("pool", ["mean", "summary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_of_another_precision_computes_in_it(store, dtype, pool):
    dense = {"model": TINY["model"] | {"summary": 2}, "objective": {"name": "dense"}} if pool == "summary" else {}
    encoder = untrained_encoder(**dense).pooling(pool)
    expected, voxels = encoder.embed(store[0]), torch.from_numpy(store[0].voxels[None])
    encoder.network.to(dtype)
    assert encoder.network.forward_features(voxels).dtype == encoder.network.feature_map(voxels.float()).dtype == dtype
    assert encoder.embed(store[0]).dtype == np.float32 and len(encoder.key) == 32
    np.testing.assert_allclose(encoder.embed(store[0]), expected, atol=0.2 if dtype == torch.bfloat16 else 1e-4)


def test_tokens_are_of_any_scan_that_has_a_vector(encoder, store, tmp_path):
    volume = eye()
    write_oct_dicom(tmp_path / "scan.dcm", volume.voxels, volume.spacing_mm)
    read = encoder.embed_tokens(read_volume(tmp_path / "scan.dcm"))
    np.testing.assert_array_equal(encoder.embed_tokens(tmp_path / "scan.dcm"), read)
    stored = encoder.embed_tokens(store[3])
    np.testing.assert_array_equal(stored, encoder.encode_grid(store.read([3]).voxels)[0])
    with pytest.raises(TypeError, match="got ndarray"):
        encoder.embed_tokens(store[3].voxels)


def test_the_encoder_of_a_backbone_leaves_it_as_it_is(encoder, store, tmp_path):
    """What is frozen stays frozen, and a training goes on."""
    pytest.importorskip("huggingface_hub")
    from octfm.encoder.hub import OctEncoder

    write_export(tmp_path / "export", encoder)
    backbone = OctEncoder.from_pretrained(tmp_path / "export").train().requires_grad_(False)
    np.testing.assert_array_equal(backbone.encoder.embed(store[0]), encoder.embed(store[0]))
    assert backbone.network.training and not any(p.requires_grad for p in backbone.parameters())


def test_features_carry_gradients_to_every_block(store):
    network = untrained_encoder().network.train()
    network.feature_map(torch.from_numpy(store.read([0]).voxels)).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


def test_an_export_in_the_hubs_cache_is_loaded_by_its_id(encoder, tmp_path, monkeypatch):
    """The cache as huggingface_hub lays it out, with the network out of reach."""
    pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--clinic--encoder"
    write_export(repository / "snapshots" / ("a" * 40), encoder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("clinic/encoder", "hf://clinic/encoder", "hf://clinic/encoder@main"):
        assert load_encoder(name, device="cpu").key == encoder.key
    with pytest.raises(CheckpointError, match=r"clinic/other: no run.*fetch it from the hub with hf://clinic/other"):
        load_encoder("clinic/other")
    with pytest.raises(CheckpointError, match=r"clinic/other: the Hugging Face hub does not give it"):
        load_encoder("hf://clinic/other")
    (repository / "snapshots" / ("a" * 40) / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not an export of octfm"):
        load_encoder("clinic/encoder")


def test_a_hub_name_of_a_backbone_ends_in_one_line_without_waiting(encoder, tmp_path, monkeypatch):
    """Where the hub cannot be reached: no half a minute of retries, and what the cache has is loaded."""
    hub = pytest.importorskip("huggingface_hub")
    import time

    from octfm.encoder.hub import OctEncoder

    repository = tmp_path / "hub" / "models--clinic--encoder"
    write_export(repository / "snapshots" / ("a" * 40), encoder)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.chdir(tmp_path)
    for name, options in (
        ("clinic/encoder", {}),
        ("hf://clinic/encoder", {}),
        ("clinic/encoder", {"revision": "main"}),
    ):
        assert OctEncoder.from_pretrained(name, **options).encoder.key == encoder.key
    for name, options in (("clinic/other", {}), ("exportd", {}), ("clinic/other", {"local_files_only": True})):
        with pytest.raises(CheckpointError, match=f"^{name}: .*(hub does not give it|hub's cache)") as raised:
            OctEncoder.from_pretrained(name, **options)
        assert "\n" not in str(raised.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="empty"):
        OctEncoder.from_pretrained("empty")
    with pytest.raises(ConfigError, match=r"^s3://…: expected the folder of an export, or owner/name"):
        OctEncoder.from_pretrained("s3://clinic/exported")
    for open_it in (OctEncoder.from_pretrained, load_encoder):
        with pytest.raises(ConfigError, match=r"^hf://…: the address holds credentials"):
            open_it("hf://u:secret@clinic/encoder")
    assert sum(slept) == 0


def test_a_misspelt_run_is_never_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert find("runs/vit_s") == Path("runs/vit_s")
    with pytest.raises(CheckpointError, match=r"runs/vit_s") as raised:
        load_encoder("runs/vit_s")
    assert "hub" not in str(raised.value)


def test_a_packaged_name_is_found_or_answered_with_what_there_is(encoder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"vit-1: no run.*packaged encoders: (none yet|[\w, -]+);"):
        load_encoder("vit-1")
    with pytest.raises(CheckpointError, match=r"layers-2: a packaged network that segments"):
        load_encoder("layers-2")
    folder = write_export(tmp_path / "weights" / "vit-1", encoder)
    ship(monkeypatch, tmp_path / "weights")
    assert packaged_encoders() == {"vit-1": folder}
    assert load_encoder("vit-1", device="cpu").key == encoder.key
    # A folder of that name comes first.
    write_export(tmp_path / "layers-2", encoder)
    assert load_encoder("layers-2", device="cpu").key == encoder.key


def test_shown_encoders_name_no_path(encoder, tmp_path):
    loaded = load_encoder(write_export(tmp_path / "Dr_Geheim", encoder), device="cpu")
    shown = repr(loaded) + loaded._repr_html_()
    assert "Geheim" not in shown and "\n" not in repr(loaded) and len(repr(loaded)) < 200
    assert re.search(r"vectors of 48", shown)


def test_the_encoder_of_bscans_scales_as_the_one_of_volumes_and_stays_of_an_older_version():
    encoder = untrained_encoder()
    own = replace(encoder, own_zscore=True, fingerprint="older").of_bscans()
    assert own.own_zscore and own.fingerprint == "older" and not encoder.of_bscans().own_zscore
    assert encoder.of_bscans().fingerprint == encoder.of_bscans().preprocessing.fingerprint() != encoder.fingerprint


def test_all_tokens_of_a_volume_without_tissue_are_those_of_its_tissue(store):
    arrays = store.read([0, 1])
    arrays.band[0, 1] = arrays.band[0, 0]
    _, tissue = untrained_encoder().select(arrays)
    assert tissue[0].all() and not tissue[1].all()


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 20))
def test_volumes_are_packed_in_their_order_until_the_next_one_would_not_fit(counts, most):
    packs = [[counts[place] for place in range(len(counts))[pack]] for pack in packed(counts, most)]
    assert [count for pack in packs for count in pack] == counts and all(packs)
    assert all(sum(pack) <= most or len(pack) == 1 for pack in packs)
    assert all(sum(pack) + following[0] > most for pack, following in pairwise(packs))


def test_whoever_one_of_several_runs_has_seen_is_seen(monkeypatch):
    people = {"a": ["P1"], "b": ["P2", "P3"]}
    monkeypatch.setattr("octfm.encoder.encoder.seen_by", lambda run: people[run].__contains__)
    seen = seen_if_known("a", "b", allow_seen=False)
    assert seen is not None and [seen(who) for who in ("P1", "P2", "P3", "P4")] == [True, True, True, False]
