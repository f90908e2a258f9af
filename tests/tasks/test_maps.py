"""Maps of an encoder: on the right tokens, in common directions, equal to what they claim, for the encoder that they
belong to."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from octfm.config import load
from octfm.encoder.embed import SINGLE_SCANS
from octfm.encoder.encoder import load_encoder
from octfm.encoder.tuned import load_head, load_with_head
from octfm.errors import EvaluationError
from octfm.formats import read_volume
from octfm.models.heads import CrossAttentionPool
from octfm.models.token_map import TISSUE
from octfm.phantom import phantom_volume
from octfm.store.layout import Arrays
from octfm.store.store import Store
from octfm.tasks import embed_run, maps
from octfm.tasks.embed_run import embed_all
from octfm.tasks.finetune import finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.scene import NONE, load_scenes
from octfm.tasks.view import scene_of
from octfm.volume.radial import to_raster
from support.command_line import invoke
from support.small_store import GRADES, edit_rows, prepared_eye, small_preprocessing, small_store
from support.stars import lines_of, scanned, write_star
from support.tiny_runs import quiet


def test_the_two_volumes_that_are_drawn_are_of_two_people_whatever_their_ids(store, tmp_path):
    folder = shutil.copytree(store.path, tmp_path / "spelt")
    edit_rows(folder, lambda row: {"scanner": "one"} | ({"participant": "p-0"} if row.index == 1 else {}))
    assert maps.some_of_each_scanner(Store.open(folder)).tolist() == [0, 3], "a right eye, and another's left eye"


@pytest.fixture(scope="module")
def attentive(run, store, tmp_path_factory):
    """A pooling probe with attention on the frozen encoder."""
    folder = tmp_path_factory.mktemp("heads")
    labels = folder / "labels.tsv"
    labels.write_text("participant_id\tgrade\n" + "".join(f"P{i:03d}\t{GRADES[i % 3]}\n" for i in range(12)))
    base = {
        "encoder": str(run), "store": str(store.path), "labels": str(labels), "target": "grade", "order": list(GRADES), "epochs": 2,
        "head_epochs": 1, "batch_size": 4, "per_device_batch_size": 4, "lr_head": 1e-2, "lr_encoder": 0, "pool": "attention",
        "tokens_per_volume": 32,
    }  # fmt: skip
    return finetune(load(FinetuneConfig, base), folder / "head", echo=quiet)


@pytest.fixture(scope="module")
def seen(run, store):
    """Encoder, one volume, its tokens, their kinds and a basis."""
    encoder = load_encoder(run)
    arrays = store.read([0, 1])
    tokens, kinds = maps.encode(encoder, arrays), encoder.token_maps(arrays)
    one = Arrays(arrays.voxels[:1], arrays.band[:1], arrays.valid[:1])
    return encoder, one, tokens, kinds, maps.fit_basis(encoder, tokens, kinds)


def test_attention_is_what_the_pool_weighs_by():
    torch.manual_seed(0)
    pool = CrossAttentionPool(12, 2)
    tokens, counts = torch.randn(3, 7, 12), torch.rand(3, 7) > 0.3
    weights_BHM = pool.attention(tokens, counts)
    torch.testing.assert_close(weights_BHM.sum(-1), torch.ones(3, 2))
    assert (weights_BHM.masked_select(~counts[:, None].expand(-1, 2, -1)) == 0).all()
    values = pool.value(tokens).unflatten(-1, (2, -1))
    by_hand = torch.einsum("bhm,bmhk->bhk", weights_BHM, values).flatten(1)
    torch.testing.assert_close(pool.norm(by_hand), pool(tokens, counts))


def test_reduced_features_keep_similarities_as_far_as_they_say(seen):
    encoder, _, tokens, kinds, basis = seen
    tissue = tokens[kinds == TISSUE]
    np.testing.assert_allclose(basis.axes @ basis.axes.T, np.eye(len(basis.axes)), atol=1e-4)
    full = maps.fit_basis(encoder, tokens, kinds, directions=tokens.shape[-1])
    assert full.explained == pytest.approx(1) and maps.similarity_error(tissue, full)[1] < 0.05  # rounding alone
    few = maps.fit_basis(encoder, tokens, kinds, directions=2)
    assert (
        few.explained < basis.explained
        and maps.similarity_error(tissue, few)[0] > maps.similarity_error(tissue, basis)[0]
    )


def test_occlusion_is_what_leaving_out_a_block_changes(seen, attentive):
    encoder, one, _, _, basis = seen
    head = load_head(attentive, encoder)
    chosen, counts = (part[0] for part in encoder.select(one))
    for with_head in (None, head):
        values = maps.occlusion(encoder, one, basis, with_head, blocks=10).values.reshape(-1)
        assert set(np.flatnonzero(np.isfinite(values))) == set(chosen[counts])
        place = np.stack(np.unravel_index(chosen, encoder.network.grid.shape), 1)
        sizes = maps.block_sizes(place[counts], 10)
        assert len(np.unique(place[counts] // sizes, axis=0)) <= 10
        hidden = counts & (place // sizes == place[counts][0] // sizes).all(1)
        rest = encoder.some_tokens(one.voxels, chosen[~hidden][None])
        whole = encoder.some_tokens(one.voxels, chosen[None])
        if with_head is None:
            vectors = [t[0][c].mean(0) for t, c in ((whole, counts), (rest, counts[~hidden]))]
            expected = np.linalg.norm(vectors[0] - vectors[1]) / basis.spread
        else:
            before, after = (head.outputs(t, c[None])[0] for t, c in ((whole, counts), (rest, counts[~hidden])))
            p, q = np.exp(before.max()), np.exp(after[before.argmax()])
            expected = np.log(p / (1 - p)) - np.log(q / (1 - q))
        np.testing.assert_allclose(values[chosen[hidden]], expected, rtol=1e-3, atol=1e-5)


def the_same(seed, prepared):
    return prepared_eye(0, small_preprocessing())


def nearly_the_same(seed, prepared):
    one = the_same(seed, prepared)
    voxels = one.voxels.copy()
    voxels[0, 0, 0] ^= seed & 1
    return replace(one, voxels=voxels)


def constant(seed, prepared):
    return replace(prepared, voxels=np.full_like(prepared.voxels, 90))


@pytest.mark.parametrize("edit", [the_same, nearly_the_same, constant])
def test_volumes_without_spread_are_embedded_and_drawn(run, tmp_path, edit):
    """Identical, nearly identical and constant volumes: nothing is divided by how far they are apart."""
    store = small_store(tmp_path / "prepared", edit, ["train"] * 3)  # the first and the third on one scanner
    embed_all(str(run), str(store.path), tmp_path / "embeddings", baselines=False, echo=quiet)
    scenes = load_scenes(tmp_path / "embeddings" / "figures" / "scenes.npz")
    assert not (tmp_path / "figures").exists(), "pictures of scans beside the folder that was named"
    shown = [values for scene in scenes if (values := scene.overlay("occlusion")) is not None]
    assert shown and all(np.nanmax(np.abs(values)) < 1e3 for values in shown)


def test_no_older_pictures_stand_beside_new_vectors_after_a_kill(run, store, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*_):
        assert (tmp_path / "figures" / "scenes.npz").is_file()
        raise Killed

    monkeypatch.setattr(embed_run, "embed_store", killed)
    with pytest.raises(Killed):
        embed_all(str(run), str(store.path), tmp_path, baselines=False, echo=quiet)


def test_no_pictures_are_drawn_where_the_vectors_are_refused(run, store, tmp_path, monkeypatch):
    monkeypatch.setattr("octfm.encoder.embed.facts_of", lambda _: {"of": SINGLE_SCANS})
    with pytest.raises(EvaluationError, match="holds vectors of single scans"):
        embed_all(str(run), str(store.path), tmp_path, baselines=False, echo=quiet)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("tissue", [1, 2, None])
def test_one_volume_of_equal_tokens_has_a_basis(seen, tissue):
    encoder, one, tokens, kinds, _ = seen
    few = kinds[:1].copy()
    few[0].flat[np.flatnonzero(few[0] == TISSUE)[tissue:]] = TISSUE if tissue is None else 0
    basis = maps.fit_basis(encoder, np.broadcast_to(tokens[:1, :1, :1, :1], tokens[:1].shape), few)
    assert np.isnan(basis.spread) and np.isfinite(basis.axes).all() and np.isfinite(basis.explained)
    assert np.nanmax(np.abs(maps.occlusion(encoder, one, basis).values)) < 1e3


def test_attention_lies_on_tissue_and_is_one_on_average(seen, attentive):
    encoder, one, *_ = seen
    values = maps.attention(encoder, one, load_head(attentive, encoder))
    assert values is not None
    chosen, counts = (part[0] for part in encoder.select(one))
    assert set(np.flatnonzero(np.isfinite(values.reshape(-1)))) == set(chosen[counts])
    assert np.nanmean(values) == pytest.approx(1, abs=1e-3)


def test_a_head_of_another_encoder_is_refused_and_a_run_brings_its_own(attentive, run):
    with pytest.raises(EvaluationError, match="its head was trained on"):
        load_head(attentive, load_encoder(run, random_init=True))
    encoder, head = load_with_head(attentive)
    assert head is not None and head.answer.target == "grade" and encoder.key == load_encoder(run).key
    assert load_with_head(run)[1] is None


@pytest.mark.parametrize("hidden", [False, True])
def test_a_training_mask_is_drawn_only_for_an_encoder_that_had_to_predict_hidden_tokens(hidden):
    encoder = load_encoder()
    objective = encoder.config.objective.model_copy(update={"hidden": hidden})
    encoder = replace(encoder, config=encoder.config.model_copy(update={"objective": objective}))
    tissue = np.full(encoder.network.grid.shape, TISSUE)
    assert ("mask" in [overlay.key for overlay in maps.masks_of(encoder, tissue, 0)]) == hidden


def test_pictures_show_both_eyes_of_every_scanner_in_common_colours(run, store, attentive, tmp_path):
    encoder = load_encoder(run)
    scenes = load_scenes(maps.save_pictures(encoder, store, tmp_path, load_head(attentive, encoder)))
    assert sorted((s.scanner, s.laterality) for s in scenes) == sorted(
        (n, e) for n in {r.scanner for r in store.rows} for e in "RL"
    )
    for scene in scenes:
        assert scene.mirrored == (scene.laterality == "L")
        keys = [o.key for o in scene.overlays]
        assert {"band", "tokens", "mask", "pca", "attention"} <= set(keys)
        tissue = scene.overlay("tokens") != NONE
        assert ((scene.overlay("pca")[..., 3] > 0) == tissue).all() and (
            np.isfinite(scene.overlay("attention")) <= tissue
        ).all()
        assert scene.features.shape[:3] == tissue.shape and "% of their variance" in scene.about_features
    assert sum("occlusion" in [o.key for o in s.overlays] for s in scenes) == 2
    # One basis: tokens of equal features have equal colours, in whichever volume.
    features = np.concatenate([s.features[s.overlay("tokens") != NONE] for s in scenes])
    colours = np.concatenate([s.overlay("pca")[s.overlay("tokens") != NONE] for s in scenes])
    order = np.lexsort((features[:, 0],))
    inner = (colours[:, 0] > 5) & (colours[:, 0] < 250)
    assert (np.diff(colours[order][inner[order]][:, 0].astype(int)) >= -6).all()


@pytest.mark.parametrize("laterality", ["R", "L"])
def test_band_of_a_file_lies_around_its_retina(run, laterality):
    volume, truth = phantom_volume(5, size=(16, 128, 96), laterality=laterality)
    made = scene_of(volume, encoder=load_encoder(run))
    shown = [truth.surface(name)[:: -1 if volume.superior_first is False else 1] for name in ("ilm", "bm")]
    upper, lower = made.overlay("band")
    known = np.isfinite(upper) & np.isfinite(lower)
    assert known.mean() > 0.3
    assert (upper < shown[0])[known].mean() > 0.9 and (shown[1] < lower)[known].mean() > 0.9
    assert made.placement is not None and (made.placement.columns[0] > made.placement.columns[1]) == (laterality == "L")
    with pytest.raises(EvaluationError, match="circle scan"):
        scene_of(replace(volume, layout="circle"), encoder=load_encoder(run))


@pytest.mark.parametrize("laterality", [pytest.param("R", marks=pytest.mark.slow), "L"])
def test_a_star_is_viewed_as_the_raster_that_its_encoder_gets(run, laterality, tmp_path):
    """The page says so, and what the encoder makes of it lies on the retina that is shown."""
    eye = phantom_volume(5, size=(24, 128, 96), laterality=laterality)[0].superior_to_inferior()
    star = replace(scanned(eye, lines_of(12), columns=128), laterality=laterality)
    path = write_star(tmp_path / "star.dcm", star, circles=2)
    pages = {name: tmp_path / f"{name}.html" for name in ("run", "plain")}
    for name, more in (("run", ["--run", str(run)]), ("plain", [])):
        done = invoke("view", path, "--out", pages[name], *more)
        assert done.exit_code == 0, done
    raster = to_raster(read_volume(path, raster_only=False))
    made = scene_of(read_volume(path, raster_only=False), encoder=load_encoder(run))
    np.testing.assert_array_equal(made.voxels, raster.voxels)
    assert made.placement is not None and (made.placement.columns[0] > made.placement.columns[1]) == (laterality == "L")
    rows, (upper, lower) = np.arange(raster.shape[1])[None, :, None], (line[:, None] for line in made.overlay("band"))
    shown = np.broadcast_to((raster.voxels != 0).any(axis=1, keepdims=True), raster.shape)
    inside, above = (np.mean(raster.voxels[shown & place]) for place in ((rows > upper) & (rows < lower), rows < upper))
    assert inside > 1.5 * above
    text = {
        name: " ".join(re.sub(r"<[^>]+>", " ", page.read_text().split("About this scan")[1]).split())
        for name, page in pages.items()
    }
    assert " × ".join(map(str, raster.shape)) in text["run"] and "interpolated from 14 radial B-scans" in text["run"]
    assert "14 × 128 × 128" in text["plain"] and "radial; the distance between B-scans means nothing" in text["plain"]
    facts = [
        json.loads(re.search(r"<script[^>]*json[^>]*>(.*?)</script>", p.read_text(), re.S)[1])["volumes"][0]
        for p in pages.values()
    ]
    assert [bool(one["front"]) for one in facts] == [True, False] and facts[0]["shape"] == list(raster.shape)
    assert ["As it is in its file." in page.read_text() for page in pages.values()] == [False, True]
