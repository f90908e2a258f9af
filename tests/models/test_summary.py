"""The summary: queries that read a volume's tokens and their places, and what teaches them."""

import math
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm import load_encoder
from octfm.encoder.export import export
from octfm.encoder.onnx_graph import write_onnx
from octfm.errors import ConfigError
from octfm.models.objectives.dense import Composition
from octfm.models.objectives.enface import CELLS, COUNTED, EnFaceGoals
from octfm.models.vit3d import TokenGrid, VisionTransformer3D, ViTConfig, take_patches
from octfm.pretraining.data import given_store
from octfm.pretraining.initial_weights import begin_with, read_initial
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import build_objective
from octfm.run.runtime import Runtime
from octfm.store.loader import Batch
from octfm.volume.segmentation import CLASSES, UNKNOWN
from support.examples import examples
from support.packaged_encoder import NAME, ship, write_packaged
from support.small_store import SIZE, small_store
from support.tiny_runs import config, quick_pretrain, quiet

GRID = TokenGrid((3, 4, 5), (0.4, 0.1, 0.5))
SMALL = ViTConfig(patch_size=(2, 4, 4), width=24, depth=1, heads=2, summary=3)
PHANTOMS = {"seed": 1, "volumes": 40, "image_size": list(SIZE), "target_spacing": [0.7, 0.03, 0.18]}


def dense(**changes):
    data = {"global_batch_size": 4, "per_device_batch_size": 2, "phantoms": PHANTOMS}
    model = {"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2, "summary": 3} | changes.pop("model", {})
    objective = {"name": "dense", "pool": "summary"} | changes.pop("objective", {})
    return config(data=data, model=model, objective=objective, validation_volumes=2, **changes)


def network(seed=0, **changes) -> VisionTransformer3D:
    torch.manual_seed(seed)
    return VisionTransformer3D(SMALL.model_copy(update=changes), GRID).eval()


def some_tokens(seed, count):
    rng = torch.Generator().manual_seed(seed)
    index = torch.stack([torch.randperm(GRID.size, generator=rng)[:count] for _ in range(2)])
    return torch.randn(2, count, SMALL.width, generator=rng), index


@settings(max_examples=examples(20))
@given(seed=st.integers(0, 999), count=st.integers(2, 30))
def test_a_summary_depends_on_what_counts_and_where_it_lies_and_on_nothing_else(seed, count):
    own, (tokens, index) = network(), some_tokens(seed, count)
    counts = torch.rand(2, count) < 0.5
    counts[:, 0] = True
    found = own.vector(tokens, counts, index, "summary")
    assert found.shape == (2, 3 * SMALL.width)
    order = torch.randperm(count)
    again = own.vector(tokens[:, order], counts[:, order].float(), index[:, order], "summary")
    torch.testing.assert_close(again, found)
    garbage = torch.where(counts.unsqueeze(-1), tokens, 1e3 * torch.randn_like(tokens))
    torch.testing.assert_close(own.vector(garbage, counts, index, "summary"), found)
    few = [
        own.vector(t[None, c], torch.ones(1, int(c.sum())), i[None, c], "summary")
        for t, c, i in zip(tokens, counts, index, strict=True)
    ]
    torch.testing.assert_close(torch.cat(few), found)


def test_the_same_tokens_elsewhere_are_another_volume():
    own, (tokens, index) = network(), some_tokens(1, 12)
    every = torch.ones(2, 12)
    here = own.vector(tokens, every, index, "summary")
    assert (own.vector(tokens, every, (index + 1) % GRID.size, "summary") - here).abs().max() > 1e-3
    for pool in ("mean", "tails"):
        assert torch.equal(
            own.vector(tokens, every, index, pool), own.vector(tokens, every, (index + 1) % GRID.size, pool)
        )


@settings(max_examples=15)
@given(
    seed=st.integers(0, 999),
    weight=st.sampled_from([1.0, 4.0]),
    part=st.sampled_from([(2, 1, 4), (1, 2, 2)]),
    repeated=st.integers(0, 90),
)
def test_goals_are_thicknesses_counted_voxel_by_voxel(seed, weight, part, repeated):
    """Also where tokens are `repeated`, as those of a volume with fewer of them than the budget are."""
    rng = np.random.default_rng(seed)
    shape = tuple(n * p for n, p in zip(GRID.shape, SMALL.patch_size, strict=True))
    labels = rng.choice([*range(len(CLASSES)), UNKNOWN], (1, 1, *shape)).astype(np.uint8)
    kept = np.sort(np.resize(rng.permutation(GRID.size)[:40], 40 + repeated))[None]
    composition = Composition(SMALL.patch_size, part, weight)
    goals = EnFaceGoals(8, GRID, composition.parts, part[1], composition.weights)
    patches = take_patches(torch.from_numpy(labels), torch.from_numpy(kept), SMALL.patch_size)
    volume, slabs = (x[0].numpy() for x in goals.of(composition.of(patches), torch.from_numpy(kept)))
    inside = np.zeros(GRID.size, bool)
    inside[kept] = True
    inside = np.kron(inside.reshape(GRID.shape), np.ones(SMALL.patch_size, bool))
    counted = np.array([((labels[0, 0] == c) & inside).sum(1) for c in COUNTED], float)
    # Parts average over B-scans and A-scans.
    d, w = shape[0] // part[0], shape[2] // part[2]
    parts = counted.reshape(len(COUNTED), d, part[0], w, part[2]).mean((2, 4))
    cells = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(parts), CELLS).numpy().reshape(-1)
    expected = np.concatenate([cells, parts.max((1, 2)), parts.min((1, 2))])
    np.testing.assert_allclose(volume, np.sqrt(expected), atol=1e-4)
    deep = parts.reshape(len(COUNTED), GRID.shape[0], -1, w).mean(2)
    assert slabs.shape == (GRID.shape[0], len(COUNTED) * (CELLS + 2))
    np.testing.assert_allclose(slabs[:, len(COUNTED) * CELLS :][:, : len(COUNTED)], np.sqrt(deep.max(2).T), atol=1e-4)


def test_a_slab_is_read_as_if_its_tokens_were_all():
    own, (tokens, index) = network(), some_tokens(3, 20)
    goals = EnFaceGoals(8, GRID, (1, 4, 2), 1, [1.0] * len(CLASSES))
    index[:, :] = index.sort(1).values
    index[0] = index[0] % 20 + 20  # all of one slab: the others have no token of their own
    groups = goals.slabs(index)
    assert groups[0, 1].all() and groups[0, 0].all(), "a slab without tokens is read from all, and has no truth"
    read = own.summary(tokens, groups, index)
    for slab in range(3):
        mine = groups[1, slab]
        alone = own.summary(tokens[1:, mine], torch.ones(1, 1, int(mine.sum()), dtype=torch.bool), index[1:, mine])
        torch.testing.assert_close(read[1:, slab], alone[:, 0])


def test_a_volume_without_truth_teaches_a_summary_nothing():
    """As scans among phantoms (data.phantoms.share below 1): no layer is not the same as unknown layers."""
    composition = Composition(SMALL.patch_size, (2, 1, 4), 4.0)
    goals = EnFaceGoals(8, GRID, composition.parts, 1, composition.weights)
    kept = torch.arange(GRID.size).expand(2, -1)
    labels = torch.full((2, GRID.size, math.prod(SMALL.patch_size)), UNKNOWN, dtype=torch.uint8)
    labels[1] = 3
    read = torch.randn(2, 1 + GRID.shape[0], 8, requires_grad=True)
    error = goals.error(read[:, 0], read[:, 1:], *goals.of(composition.of(labels), kept))
    error.sum().backward()
    assert error[0] == 0 and (read.grad[0] == 0).all() and error[1] > 0 and (read.grad[1] != 0).any()


@pytest.mark.slow
def test_what_a_batch_says_of_thickness_is_learned():
    """The same phantoms again and again: the summary's error falls below that of the best constant."""
    settings_ = dense()
    store, places = given_store(settings_), np.arange(4)
    arrays = store.read(places)
    batch = Batch(**vars(arrays), index=places, position=places)
    inputs = make_inputs(settings_, store.preprocessing, Runtime(torch.device("cpu")), batch, augmented=False)
    model = build_objective(settings_, store.preprocessing)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def error():
        with torch.no_grad():
            out = model(inputs.views, 0.5)
        return float(out.loss - out.masked_loss_B.mean()) / settings_.objective.summary_weight

    before = error()
    for _ in range(40):
        optimizer.zero_grad()
        model(inputs.views, 0.5).loss.backward()
        optimizer.step()
    index = inputs.views[0].index.kept
    volume, slabs = model.enface.of(model.composition.of(inputs.views[0].labels_BKP), index)
    known = slabs.amax(2) > 0
    constant = model.enface._apart(volume.mean(0).expand_as(volume), volume).mean()
    constant += model.enface._apart(slabs[known].mean(0).expand_as(slabs[known]), slabs[known]).mean()
    assert error() < 0.5 * float(constant) < 0.5 * before


@pytest.mark.slow
def test_a_run_with_a_summary_resumes_embeds_and_exports_alike(tmp_path):
    store = small_store(tmp_path / "store")
    whole = quick_pretrain(dense(steps=3, ckpt_every_steps=2), out=tmp_path / "whole", echo=quiet)
    encoder = load_encoder(whole)
    vectors = encoder.embed(store)
    assert vectors.shape == (len(store), 3 * 48) == (len(store), encoder.vector_width) and np.isfinite(vectors).all()
    assert encoder.pooling("mean").embed(store).shape == (len(store), 48)
    again = load_encoder(export(whole, tmp_path / "export", echo=quiet))
    np.testing.assert_array_equal(again.embed(store), vectors)
    bscan = again.of_bscans()
    assert bscan.network.summary is not None
    for name, tensor in again.network.summary.state_dict().items():
        assert torch.equal(bscan.network.summary.state_dict()[name], tensor)
    arrays = store.read([0])
    (index,) = encoder.read_tokens(arrays)
    tokens = encoder.some_tokens(arrays.voxels, index[None])[0]
    np.testing.assert_allclose(encoder.vector_of(tokens, np.ones(len(index), bool), index), vectors[0], atol=1e-5)
    assert encoder.vector_key != encoder.pooling("mean").vector_key


@pytest.mark.slow
def test_an_onnx_graph_reads_a_summary_as_torch_does(tmp_path):
    pytest.importorskip("onnxruntime")
    run = quick_pretrain(dense(steps=1, model={"depth": 1}), out=tmp_path / "run", echo=quiet)
    assert write_onnx(load_encoder(run, device="cpu"), None, tmp_path / "graph.onnx") < 1e-4


def test_a_deeper_encoder_with_a_summary_begins_as_the_packaged_one(tmp_path, monkeypatch):
    write_packaged(tmp_path)
    ship(monkeypatch, tmp_path)
    packaged = load_encoder(NAME, device="cpu")
    model = packaged.config.model.model_copy(update={"depth": packaged.config.model.depth + 1, "summary": 2})
    settings_ = packaged.config.model_copy(update={"model": model})
    wanted = dense(model=model.model_dump() | {"init": None})
    begun = build_objective(wanted, packaged.preprocessing)
    random_query = begun.encoder.summary.query.clone()
    begin_with(read_initial("packaged", wanted), begun)
    patches = torch.randn(1, 30, prod(settings_.model.patch_size))
    index = torch.arange(30)[None]
    with torch.inference_mode():
        assert torch.equal(begun.encoder(patches, index), packaged.network(patches, index))
    assert torch.equal(begun.encoder.summary.query, random_query)
    silent = [name for name, p in begun.encoder.blocks[-1].named_parameters() if "weight" in name and not p.any()]
    assert silent == ["attn.out.weight", "mlp.2.weight"], "with others at zero the block could not learn"


WRONG = {
    "another objective": ({"objective": {"name": "mae", "pool": "mean"}}, "objective mae does not train these queries"),
    "no queries": ({"model": {"summary": 0}}, r"objective\.pool summary needs queries, such as model\.summary=8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_summary_that_nothing_trains_is_refused(case):
    change, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        dense(**change)


def test_an_encoder_without_a_summary_says_so(tmp_path):
    settings_ = dense(steps=1, model={"summary": 0}, objective={"pool": "mean"})
    run = quick_pretrain(settings_, out=tmp_path / "run", echo=quiet)
    with pytest.raises(ConfigError, match=r"has no summary \(model\.summary is 0\); choose another pooling"):
        load_encoder(run).pooling("summary").embed(small_store(tmp_path / "store"))
