"""Training on streamed phantoms with their truth: what a token says, the same phantoms whatever happens, the right
truth for every voxel."""

import os
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from octfm import load_encoder
from octfm.errors import ConfigError, Preempted, TrainingError
from octfm.io import cores, isolation
from octfm.models.objectives.dense import Composition
from octfm.models.objectives.objective import squared_error
from octfm.models.token_map import PADDING, TISSUE, token_map
from octfm.models.vit3d import TokenGrid, take_patches
from octfm.phantom.native.bscans import SURFACES, Labelled
from octfm.phantom.native.prepared import classes_of
from octfm.phantom.native.stream import CONDITIONS
from octfm.pretraining import augment
from octfm.pretraining import pretrain as loop
from octfm.pretraining.data import given_store, training_rows
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import build_objective
from octfm.pretraining.monitors import anchor
from octfm.pretraining.monitors.anchor import apart, disorder, named, told_apart
from octfm.pretraining.preflight import checks
from octfm.pretraining.settings import smoke
from octfm.run.checkpoint import participant_hashes
from octfm.run.runtime import Runtime
from octfm.store import phantoms as stores
from octfm.store.loader import Batch, Loader
from octfm.store.order import Order
from octfm.store.phantoms import MixedStore, PhantomConfig, PhantomStore
from octfm.volume.segmentation import CLASSES, LESION_CLASSES, UNKNOWN
from support.examples import examples
from support.small_store import SIZE, small_preprocessing
from support.tiny_runs import (
    Killed,
    assert_same_run,
    assert_same_weights,
    config,
    final,
    interrupted_after,
    killed_at,
    quick_pretrain,
    quiet,
    rows,
)

HOST = Runtime(torch.device("cpu"))
COARSE = {"image_size": list(SIZE), "target_spacing": [0.7, 0.03, 0.18]}
PHANTOMS = {"seed": 1, "volumes": 40, **COARSE}


def dense(**changes):
    data = {"global_batch_size": 4, "per_device_batch_size": 2, "phantoms": PHANTOMS} | changes.pop("data", {})
    return config(data=data, objective={"name": "dense"}, validation_volumes=2, **changes)


@pytest.fixture(scope="module")
def phantoms() -> PhantomStore:
    return PhantomStore(PhantomConfig(**PHANTOMS), small_preprocessing(), held_out=4, threads=1)


@settings(max_examples=examples(40))
@given(data=st.data())
def test_a_voxel_is_the_layer_or_lesion_that_its_centre_lies_in(data):
    height, width = 12, 3
    edges = st.lists(st.floats(-6, 18, width=32), min_size=len(SURFACES), max_size=len(SURFACES))
    rows_SW = np.sort(np.array([data.draw(edges) for _ in range(width)], np.float32).T, axis=0)
    rows_SW[(rows_SW < -0.5) | (rows_SW > height - 0.5)] = np.nan
    seed = data.draw(st.integers(0, 99))
    lesions = np.random.default_rng(seed).integers(0, 9, (1, height, width)).astype(np.uint8)
    image = Labelled(np.zeros((1, height, width), np.uint8), rows_SW[:, None], lesions, (1, 1, 1), "none")
    found = classes_of(image)[0]
    below = ("ilm", "nfl_gcl", "ipl_inl", "inl_opl", "opl_onl", "ez", "rpe_inner", "bm")
    names = {1: "intraretinal_fluid", 2: "subretinal_fluid", 3: "drusen", 5: "membrane", 7: "detachment"} | {
        8: "subretinal_material"
    }
    for x in range(width):
        line = {name: rows_SW[SURFACES.index(name), x] for name in below}
        seen = [name for name in below if np.isfinite(line[name])]
        for y in range(height):
            if not seen:
                assert found[y, x] == UNKNOWN
                continue
            crossed = [name for name in below if below.index(name) < below.index(seen[0]) or line[name] <= y]
            layer = CLASSES[len(crossed)]
            assert CLASSES[found[y, x]] == names.get(int(lesions[0, y, x]), layer)


@settings(max_examples=30)
@given(
    patch=st.sampled_from([(2, 8, 16), (1, 4, 4), (2, 2, 4)]),
    whole=st.booleans(),
    weight=st.sampled_from([1.0, 4.0]),
    seed=st.integers(0, 999),
)
def test_a_token_says_what_share_of_each_part_is_what(patch, whole, weight, seed):
    """Against counting voxel by voxel, with unknown voxels in no share."""
    over = patch if whole else (1, 1, patch[2] // 2)
    rng = np.random.default_rng(seed)
    labels = rng.choice([*range(len(CLASSES)), UNKNOWN], (1, 2, np.prod(patch))).astype(np.uint8)
    composition = Composition(patch, over, weight)
    found = composition.of(torch.from_numpy(labels)).numpy()
    for token in range(2):
        blocks = labels[0, token].reshape(patch)
        parts = [
            blocks[z : z + over[0], y : y + over[1], x : x + over[2]].ravel()
            for z in range(0, patch[0], over[0])
            for y in range(0, patch[1], over[1])
            for x in range(0, patch[2], over[2])
        ]
        shares = [
            [(part == c).mean() * (weight if c in LESION_CLASSES else 1) for c in range(len(CLASSES))] for part in parts
        ]
        np.testing.assert_allclose(found[0, token], np.ravel(shares), atol=1e-6)


def test_its_loss_is_the_cross_entropy_of_every_known_voxel():
    labels = torch.randint(len(CLASSES), (2, 3, 8), dtype=torch.uint8)
    labels[:, 0] = UNKNOWN
    composition, answer = Composition((1, 2, 4), (1, 1, 1), 1.0), torch.randn(2, 3, 8 * len(CLASSES))
    goal = composition.of(labels)
    each = F.cross_entropy(answer[:, 1:].reshape(-1, len(CLASSES)), labels[:, 1:].reshape(-1).long(), reduction="none")
    torch.testing.assert_close(composition.entropy(answer, goal), each.view(2, -1).mean(1))
    constant = composition.entropy(composition.constant(goal).expand_as(goal), goal).mean()
    shares = torch.bincount(labels[:, 1:].reshape(-1).long(), minlength=len(CLASSES)) / 32
    torch.testing.assert_close(constant, -(shares * shares.clamp_min(1e-9).log()).sum())
    assert composition.entropy(answer, torch.zeros_like(goal)).tolist() == [0, 0], "without truth there is no loss"


@settings(max_examples=15)
@given(seed=st.integers(0, 999), warped=st.booleans())
def test_labels_move_with_their_voxels(seed, warped):
    """Voxels that show their label as a grey value: after moving, a voxel of one grey value has that label."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.repeat(rng.integers(1, 9, (2, 1, 2, 6, 5)), 6, 3), 6, 4).astype(np.uint8)
    settings_ = augment.AugmentConfig(
        axial_shift=9, **({"lateral_shift_mm": 0.4, "tilt_deg": 9, "axial_scale": 0.2} if warped else {})
    )
    drawn = augment.draw(settings_, [np.random.default_rng((seed, place)) for place in range(2)])
    moves = drawn.on_device(torch.from_numpy, 36, 30, (0.2, 0.03, 0.04))
    voxels, moved = (
        augment.move(torch.from_numpy(20 * labels), moves),
        augment.move_labels(torch.from_numpy(labels), moves),
    )
    pure = (voxels % 20 == 0) & (voxels > 0)
    # Between two grey values an interpolated one may fall on a third; not where all neighbours are alike.
    alike = F.max_pool3d(voxels.float(), (1, 3, 3), 1, (0, 1, 1)) == -F.max_pool3d(
        -voxels.float(), (1, 3, 3), 1, (0, 1, 1)
    )
    assert (moved[pure & alike].int() * 20 == voxels[pure & alike].int()).all() and (pure & alike).any()
    if not warped:
        assert torch.equal(moved == UNKNOWN, voxels == 0), "what comes from outside is unknown"


@settings(max_examples=25)
@given(
    own=st.integers(1, 30), streamed=st.integers(1, 50), counts=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_every_batch_has_its_share_of_phantoms(own, streamed, counts, seed):
    order = Order([np.arange(own), own + np.arange(streamed)], seed, counts)
    batch, steps = sum(counts), 12
    drawn = order.rows_at(np.arange(steps * batch)).reshape(steps, batch)
    assert ((drawn < own).sum(1) == counts[0]).all()
    for of, first, each in ((own, 0, counts[0]), (streamed, own, counts[1])):
        sequence = drawn[(drawn >= first) & (drawn < first + of)]
        assert len(sequence) == steps * each
        often = np.bincount(sequence - first, minlength=of)
        assert set(often) <= {len(sequence) // of, -(-len(sequence) // of)}, "every volume once an epoch"


def test_a_phantom_is_prepared_as_training_expects_it(phantoms):
    """Twice the same; band within the image; truth exactly where there is image; others for validation."""
    first, again = phantoms.read(np.arange(4)), phantoms.read([3, 2, 1, 0])
    for name in ("voxels", "band", "valid", "labels"):
        assert np.array_equal(getattr(first, name), getattr(again, name)[::-1])
    row = np.arange(SIZE[1])[:, None]
    image = (row >= first.valid[:, 0, :, None]) & (row < first.valid[:, 1, :, None])
    assert (first.voxels[~image] == 0).all() and (first.labels[~image] == UNKNOWN).all()
    assert (first.band[:, 0] <= first.band[:, 1]).all() and (first.band >= first.valid[:, :1]).all()
    retina = (first.labels >= 1) & (first.labels < CLASSES.index("choroid"))
    inside = (row >= first.band[:, 0, :, None] - 0.5) & (row <= first.band[:, 1, :, None] + 0.5)
    assert (inside | ~retina).all() and retina.any((1, 2, 3)).all()
    held_out = phantoms.read([40])
    assert not any(np.array_equal(held_out.voxels[0], voxels) for voxels in first.voxels)
    assert {phantoms.rows[i].split for i in (0, 39)} == {"train"} and phantoms.rows[40].split == "val"
    assert phantoms.rows[5].participant_labels["condition"] in CONDITIONS


def test_phantoms_of_single_bscans_show_an_eye():
    """Nothing moves against a single B-scan, and nothing is averaged into it."""
    settings = PhantomConfig(seed=1, volumes=12, image_size=(1, 96, 64), target_spacing=(0.1, 0.0208, 0.06))
    single = PhantomStore(settings, settings.preprocessing(), threads=1).read(np.arange(12))
    tokens = token_map(single.band, single.valid, (1, 96, 64), (1, 8, 8))
    assert ((tokens != PADDING).mean((1, 2, 3)) > 0.3).all() and ((tokens == TISSUE).sum((1, 2, 3)) >= 4).all()
    assert (single.voxels.mean((1, 2, 3)) > 10).all()
    retina = (single.labels >= 1) & (single.labels < CLASSES.index("choroid"))
    assert retina.any((1, 2, 3)).mean() > 0.8


def test_many_cores_render_in_processes_what_one_thread_renders(phantoms, monkeypatch):
    in_processes = mock.Mock(wraps=isolation.each)
    monkeypatch.setattr(stores, "each", in_processes)
    monkeypatch.setattr(stores, "MOST_THREADS", 1)
    apart = PhantomStore(phantoms.config, phantoms.preprocessing, held_out=4, threads=2)
    index = [3, 41, 7]
    found, expected = apart.read(index), phantoms.read(index)
    assert in_processes.call_count == 3, "one for each phantom, of the store on many cores alone"
    for name in ("voxels", "band", "valid", "labels", "acquisition"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("mixed", [False, True])
def test_batches_are_rendered_together_where_one_leaves_cores_idle(phantoms, store, monkeypatch, mixed):
    """Four cores render two batches of two, and both come in their order."""
    four, met = threading.Barrier(4), []
    rendered = stores._rendered

    def rendering(job):
        if len(met) < 4:
            met.append(four.wait(timeout=60))
        return rendered(job)

    def batches(threads):
        streamed = PhantomStore(
            phantoms.config.model_copy(update={"share": 0.5 if mixed else 1.0}), store.preprocessing, threads=threads
        )
        read_from = MixedStore(store, streamed) if mixed else streamed
        with Loader(read_from, np.arange(len(read_from)), 4 if mixed else 2, 7, prefetch=1) as loader:
            return [loader.batches(step) for step in range(2)]

    expected = batches(1)
    monkeypatch.setattr(stores, "_rendered_apart", rendering)
    for found, alone in zip(batches(4), expected, strict=True):
        for name in ("voxels", "labels", "position"):
            assert np.array_equal(getattr(found, name), getattr(alone, name))
    assert sorted(met) == [0, 1, 2, 3]


def test_ranks_of_one_host_render_no_more_batches_at_a_time_than_its_cores_have_room_for(
    phantoms, tmp_path, monkeypatch
):
    """Each rank took all cores for its own: 8 ranks of 4 rendered 96 phantoms at a time, each in a process."""
    store = PhantomStore(phantoms.config, phantoms.preprocessing)
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    monkeypatch.setattr(cores, "GROUP", tmp_path)  # the container of the tests may have fewer
    assert store.reads_at_once(4) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert store.reads_at_once(4) == 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert store.reads_at_once(4) == store.reads_at_once(32) == 1


def test_a_phantom_whose_process_is_killed_is_rendered_all_the_same(phantoms, monkeypatch):
    def killing(job):
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(stores, "MOST_THREADS", 1)
    monkeypatch.setattr(stores, "each", lambda _, *rest: isolation.each(killing, *rest))
    apart = PhantomStore(phantoms.config, phantoms.preprocessing, threads=2)
    with pytest.warns(
        UserWarning, match="a process that renders phantoms was killed from outside.*renders in its place"
    ):
        assert np.array_equal(apart.read([3, 4]).voxels, phantoms.read([3, 4]).voxels)


@pytest.mark.parametrize("start", ["import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None])
def test_a_phantom_whose_process_does_not_start_is_rendered_all_the_same(phantoms, monkeypatch, start):
    """It is killed while it imports, or the system has no room for another process."""
    isolation.release()
    monkeypatch.setattr(stores, "MOST_THREADS", 1)
    if start is not None:
        monkeypatch.setattr(isolation, "_START", start)
    else:
        monkeypatch.setattr(isolation.subprocess, "Popen", mock.Mock(side_effect=BlockingIOError("no process left")))
    apart = PhantomStore(phantoms.config, phantoms.preprocessing, threads=2)
    with pytest.warns(UserWarning, match="a process that renders phantoms did not start.*renders in its place"):
        assert np.array_equal(apart.read([3, 4]).voxels, phantoms.read([3, 4]).voxels)


def test_ranks_render_their_shares_of_the_global_batch(phantoms):
    def batch(rank, world):
        with Loader(phantoms, np.arange(40), 4, 7, rank, world, 0) as loader:
            return loader.batches(3)

    whole, parts = batch(0, 1), [batch(rank, 2) for rank in range(2)]
    for name in ("voxels", "labels", "position"):
        assert np.array_equal(getattr(whole, name), np.concatenate([getattr(part, name) for part in parts]))


@pytest.mark.slow
def test_a_run_without_a_store_resumes_bit_for_bit(tmp_path, monkeypatch):
    whole = quick_pretrain(dense(steps=3, ckpt_every_steps=2), out=tmp_path / "whole", echo=quiet)
    killed_at(3, monkeypatch, loop, "accumulate")
    with pytest.raises(Killed):
        quick_pretrain(dense(steps=3, ckpt_every_steps=2), out=tmp_path / "killed", echo=quiet)
    quick_pretrain(dense(steps=3, ckpt_every_steps=2), out=tmp_path / "killed", echo=quiet)
    assert_same_run(whole, tmp_path / "killed")
    assert rows(whole, "validation")[-1]["volumes"] == 2
    assert final(whole)["participants"]["hashes"] == [], "nobody is a phantom"


@pytest.mark.slow
def test_phantoms_that_choose_a_checkpoint_are_nobody_either(tmp_path):
    """Hashes of nobody would be published with an export, and count as participants of the packaged encoder."""
    probed = dense(steps=1, probe={"target": "condition"}).model_copy(update={"validation_volumes": 32})
    assert final(quick_pretrain(probed, out=tmp_path / "run", echo=quiet))["participants"]["hashes"] == []


@pytest.mark.slow
def test_its_encoder_embeds_a_store_of_the_same_preprocessing(tmp_path, store):
    run = quick_pretrain(dense(steps=2), out=tmp_path / "run", echo=quiet)
    vectors = load_encoder(run).embed(store)
    assert vectors.shape == (len(store), 48) and np.isfinite(vectors).all()


@pytest.mark.slow
def test_preflight_has_an_answer_to_every_question(tmp_path):
    settings_ = dense(steps=20)
    streamed = given_store(settings_)
    found = checks(settings_, streamed, HOST, *training_rows(settings_, streamed), tmp_path / "run")
    assert not [check for check in found if check.status == "FAIL"]
    said = {check.name: check.measured for check in found}
    assert said["splits"] == "40 streamed phantoms to train on, 2 others to validate on"
    assert "targets of another volume raise it" in said["objective learns"]


@pytest.mark.parametrize("every", [True, False])
def test_a_batch_with_the_truth_of_another_volume_stops_the_run(tmp_path, every):
    """The volume that is compared is rendered once more; which it is goes round."""
    load = Loader._load

    def swapped(self, step):
        batch = load(self, step)
        places = slice(None) if every else slice(0, 2)
        labels = batch.labels.copy()
        labels[places] = labels[places][::-1]
        return replace(batch, labels=labels)

    with mock.patch.object(Loader, "_load", swapped), pytest.raises(TrainingError, match="wrong volume"):
        quick_pretrain(dense(), out=tmp_path / "run", echo=quiet)


def anchored(**changes):
    data = {"global_batch_size": 4, "per_device_batch_size": 2, "phantoms": {"seed": 1, "volumes": 40, "share": 0.5}}
    return config(data=data, objective={"name": "anchored", "goal_average": [2, 1, 4]}, validation_volumes=8, **changes)


def scans_among_phantoms(settings_, store):
    """The objective and a view of four volumes: scan, phantom, scan, phantom."""
    mixed = given_store(settings_, store)
    arrays, four = mixed.read([0, len(store), 1, len(store) + 1]), np.arange(4)
    batch = Batch(**vars(arrays), index=four, position=four)
    (view,) = make_inputs(settings_, mixed.preprocessing, HOST, batch).views
    return build_objective(settings_, mixed.preprocessing), view


def test_queries_learn_from_the_truth_of_phantoms_among_scans(store):
    """As much from the phantoms of a mixed batch as from these alone; from scans, whose layers are unknown, nothing."""
    model, view = scans_among_phantoms(anchored(model=config().model.model_dump() | {"summary": 3}), store)

    def gradient(labels):
        model.zero_grad()
        model([view._replace(labels_BKP=labels)], 0.0).loss.backward()
        return model.encoder.summary.query.grad.clone()

    mixed, none = gradient(view.labels_BKP), gradient(torch.full_like(view.labels_BKP, UNKNOWN))
    assert mixed.abs().max() > 0 and (none == 0).all()
    places = {name: getattr(view.index, name)[1::2] for name in ("kept", "context", "target")}
    voxels = {name: getattr(view, name)[1::2] for name in ("patches_BKP", "target_patches_BKP", "labels_BKP")}
    alone = view._replace(index=replace(view.index, tissue=None, **places), **voxels)
    model.zero_grad()
    model([alone], 0.0).loss.backward()
    torch.testing.assert_close(mixed, model.encoder.summary.query.grad / 2)


def test_a_volume_is_trained_by_its_truth_or_else_by_its_voxels(store):
    """Nobody's truth and nobody's voxels count for another; baselines are those of mae and of dense."""
    model, view = scans_among_phantoms(anchored(), store)
    out = model([view], 0.5)
    for place, labelled in enumerate((False, True, False, True)):
        voxels, truth = view.target_patches_BKP.clone(), view.labels_BKP.clone()
        voxels[place] = torch.randn_like(voxels[place])
        truth[place] = torch.where(truth[place] == UNKNOWN, UNKNOWN, (truth[place] + 1) % 9)
        for changed, matters in (
            (view._replace(target_patches_BKP=voxels), not labelled),
            (view._replace(labels_BKP=truth), labelled),
        ):
            same = model([changed], 0.5).masked_loss_B == out.masked_loss_B
            assert same[torch.arange(4) != place].all() and bool(same[place]) != matters
    baseline, goal = model.baseline(out.masked_goal_BTD), out.masked_goal_BTD
    voxels, truth = goal[[0, 2], :, : model.voxels], goal[[1, 3], :, model.voxels :]
    torch.testing.assert_close(baseline[[0, 2]], squared_error(voxels.mean((0, 1)).expand_as(voxels), voxels))
    constant = model.composition.constant(truth).expand_as(truth)
    torch.testing.assert_close(baseline[[1, 3]], model.composition.entropy(constant, truth))
    assert (out.context_loss_B == 0).tolist() == [True, False, True, False]


@pytest.mark.slow
def test_a_run_on_scans_and_phantoms_resumes_bit_for_bit(tmp_path, store, monkeypatch):
    whole = quick_pretrain(anchored(steps=5), store, tmp_path / "whole", echo=quiet)
    interrupted_after(4, monkeypatch)
    with pytest.raises(Preempted):
        quick_pretrain(anchored(steps=5), store, tmp_path / "stopped", echo=quiet)
    quick_pretrain(anchored(steps=5), store, tmp_path / "stopped", echo=quiet)
    assert_same_weights(whole, tmp_path / "stopped")


@pytest.mark.slow
def test_an_anchored_run_says_what_phantoms_do_for_scans(tmp_path, store, monkeypatch):
    monkeypatch.setattr(anchor, "SEGMENTED", 1)  # the others take as long as the run
    whole = quick_pretrain(anchored(steps=2), store, tmp_path / "whole", echo=quiet)
    found = rows(whole, "anchor")[-1]
    assert 0 <= found["domain_auroc"] <= 1 and 0 <= found["surface_disorder"] <= 1
    assert 0 < found["segmenter_um"] < 2000 and 0 < found["segmenter_um_phantoms"] < 2000
    assert set(rows(whole, "validation")[-1]["by_kind"]) == {"scans", "phantoms"}
    assert "phantom" in rows(whole)[-1]["by_scanner"], "losses of scans and phantoms are logged apart"
    people = {row.participant for row in store.rows if row.split == "train"}
    known = final(whole)["participants"]
    assert participant_hashes(sorted(people), known["key"]) == known["hashes"], "whoever was trained on is known"


@pytest.mark.slow
def test_a_run_without_a_disease_says_how_well_it_is_told_from_health(tmp_path, monkeypatch):
    monkeypatch.setattr(anchor, "UNSEEN", 6)
    some = {"phantoms": PHANTOMS | {"conditions": [c for c in CONDITIONS if c not in ("macular_hole", "dme")]}}
    run = quick_pretrain(dense(data=some, steps=1), None, tmp_path / "some", echo=quiet)
    (row,) = rows(run, "unseen")
    assert 0 <= row["unseen_auroc"] <= 1 and row["volumes"] == 12
    every = quick_pretrain(dense(steps=1), None, tmp_path / "every", echo=quiet)
    assert not rows(every, "unseen")


def nine_flat_layers():
    """Their grid, composition, borders, truth, tokens, and the shares of classes in each token."""
    grid, composition = TokenGrid((2, 8, 4), (1.0, 1.0, 1.0)), Composition((2, 8, 16), (2, 1, 8), 4.0)
    borders = np.repeat(np.arange(4.0, 64, 7)[:8, None], 64, 1)
    layers = (np.arange(64)[:, None] >= borders[:, None]).sum(0)
    truth = torch.from_numpy(np.broadcast_to(layers, (1, 1, 4, 64, 64)).copy())
    index = torch.arange(grid.size)[None]
    return grid, composition, borders, truth, index, composition.of(take_patches(truth, index, (2, 8, 16)))


def test_layers_of_few_volumes_are_compared_in_micrometres_and_tissue_is_averaged(monkeypatch):
    """Twelve volumes in two batches, one of them without tissue, whose borders the finder sees two rows further down."""
    grid, composition, borders, _, index, shares = nine_flat_layers()
    odds = (shares + 1e-3).log().expand(6, -1, -1)
    rng, asked = np.random.default_rng(0), []
    tokens = rng.normal(size=(12, grid.size, 3))
    tissue = np.repeat(rng.random((12, 2, 1, 4)) < 0.7, 8, 2).reshape(12, -1)
    tissue[0] = False

    def find(bscan):
        asked.append((*bscan.spacing_mm, int(bscan.voxels.max())))
        rows = np.full((len(SURFACES), 1, 64), np.nan)
        rows[anchor.BORDER_ROWS, 0] = borders + 2
        return SimpleNamespace(rows=rows)

    def encoded(*_):
        voxels = np.broadcast_to(np.arange(4, dtype=np.uint8)[:, None, None], (6, 4, 64, 64))
        for part in (slice(6), slice(6, 12)):
            yield SimpleNamespace(voxels=voxels), np.tile(index, (6, 1)), tissue[part], torch.from_numpy(tokens[part])

    monkeypatch.setattr(anchor, "encoded", encoded)
    monkeypatch.setattr(anchor, "disorder", lambda *_: np.array([1.0, 3.0]))
    monkeypatch.setattr("octfm.layers.finder.load_finder", lambda **_: SimpleNamespace(find=find))
    model = SimpleNamespace(head=lambda _: odds, composition=composition, encoder=SimpleNamespace(grid=grid))
    store = SimpleNamespace(preprocessing=SimpleNamespace(image_size=(4, 64, 64), target_spacing=(0.7, 0.03, 0.18)))
    learner = SimpleNamespace(runtime=HOST)
    vectors, measured = anchor._look(learner, model, store, np.arange(12))  # pyright: ignore[reportArgumentType]
    assert measured == {"surface_disorder": 0.25, "segmenter_um": pytest.approx(60)}
    assert asked == [(0.7, 0.03, 0.18, 2)] * anchor.SEGMENTED, "the middle B-scan"
    expected = [own[kept if kept.any() else slice(None)].mean(0) for own, kept in zip(tokens, tissue, strict=True)]
    np.testing.assert_allclose(vectors, expected, rtol=1e-5)


def test_healthy_phantoms_and_those_of_left_out_conditions_are_ones_that_training_never_draws(monkeypatch):
    seen = []
    monkeypatch.setattr(anchor, "PhantomStore", lambda phantoms, preprocessing, count: phantoms.conditions)
    monkeypatch.setattr(
        anchor, "tissue_vectors", lambda _, __, store, rows: seen.append((store, rows)) or rows[:, None]
    )
    conditions = tuple(c for c in CONDITIONS if c not in ("healthy", "macular_hole", "dme"))
    settings = dense(data={"phantoms": PHANTOMS | {"conditions": conditions}})
    whole = SimpleNamespace(frozen_encoder=lambda _: None)
    learner = SimpleNamespace(config=settings, whole=lambda: whole, runtime=SimpleNamespace(first=lambda row: row()))
    anchor.unseen_row(learner, SimpleNamespace(preprocessing=None))  # pyright: ignore[reportArgumentType]
    assert [{*store} for store, _ in seen] == [{"healthy"}, {"macular_hole", "dme"}]
    assert all(rows.min() == PHANTOMS["volumes"] for _, rows in seen)


def test_scans_are_told_apart_from_phantoms_only_where_they_differ():
    rng = np.random.default_rng(0)
    alike = [told_apart(rng.normal(size=(48, 16)), rng.normal(size=(48, 16))) for _ in range(8)]
    assert abs(np.mean(alike) - 0.5) < 0.08
    assert told_apart(rng.normal(size=(48, 16)), rng.normal(size=(64, 16)) + 1) > 0.95
    assert told_apart(np.ones((9, 4)), np.ones((9, 4))) == 0.5


def test_layers_out_of_order_are_counted():
    labels = np.sort(np.random.default_rng(0).integers(0, 9, (20, 1, 8, 1)), axis=2)

    def crossings(order):
        return disorder(np.log(np.eye(len(CLASSES))[order] + 1e-3).reshape(20, -1), (1, 8, 1))

    wrong, right = crossings(labels)
    assert wrong == 0 and right > 0
    assert crossings(labels[:, :, ::-1]).tolist() == [right, 0]
    labels[:, :, 4] = CLASSES.index("drusen")
    steps = [np.diff(labels[:, :, part], axis=2) for part in (slice(4), slice(5, None))]
    assert crossings(labels).tolist() == [0, sum((step > 0).sum() for step in steps)], "a lesion has no place in it"


def test_borders_that_tokens_name_are_as_far_off_as_they_were_moved():
    """Borders of an eye of nine flat layers, named row by row, against the same ones moved by two rows."""
    grid, composition, borders, truth, index, shares = nine_flat_layers()
    odds = shares[0].numpy() + 1e-3
    found = named(np.log(odds), index[0].numpy(), composition, grid)
    np.testing.assert_array_equal(found, truth[0, 0].numpy())
    assert apart(found[1], borders).tolist() == [0, 8 * 64]
    assert apart(found[1], borders + 2).tolist() == [2 * 8 * 64, 8 * 64]
    lost = (np.arange(64) < 10) & (np.arange(8)[:, None] == 3)  # one border of the first ten A-scans
    assert apart(found[1], np.where(lost, np.nan, borders - 1)).tolist() == [8 * 54, 8 * 54]
    some = named(np.log(odds[:40]), index[0, :40].numpy(), composition, grid)
    assert (some[:2] == -1).sum() == 0 and (some[2:] >= 0).mean() == 8 / 32
    missed, pairs = apart(some[3], borders + 2)
    assert pairs == 2 * 64 and missed == 2 * pairs, "only what lies in tokens counts"


WRONG = {
    "share without a store": ({"share": 0.5}, None, "data.store is not set"),
    "share of no whole volume": ({"share": 0.3}, "store", "choose a share of whole volumes, such as 0.25 or 0.5"),
    "another grid": ({"share": 0.5, "image_size": [8, 64, 64]}, "store", "leave it out"),
}


@pytest.mark.parametrize("case", WRONG)
def test_phantoms_that_cannot_be_trained_on_are_refused_in_a_line(store, case):
    changes, given, says = WRONG[case]
    wanted = {"seed": 1, "volumes": 40} | changes
    with pytest.raises(ConfigError, match=says) as refused:
        given_store(dense(data={"phantoms": wanted}), store if given else None)
    assert "\n" not in str(refused.value)


def test_a_choice_among_scans_is_refused_where_all_volumes_are_phantoms():
    with pytest.raises(ConfigError, match=r"data.max_samples chooses among the volumes of a store, and here all are"):
        given_store(dense(data={"max_samples": 3}))
    given_store(smoke(dense()))


def test_dense_names_what_it_needs_and_unknown_conditions_are_refused():
    with pytest.raises(ConfigError, match=r"learns from the truth of streamed phantoms; set data.phantoms.seed=1"):
        given_store(config(objective={"name": "dense"}))
    with pytest.raises(ConfigError, match="measles is no condition of phantoms"):
        dense(data={"phantoms": {**PHANTOMS, "conditions": ["measles"]}})
    with pytest.raises(ConfigError, match="answer_average"):
        config(objective={"name": "dense", "answer_average": [2, 3, 8]}, data={"phantoms": PHANTOMS})
