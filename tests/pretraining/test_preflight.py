"""Each check of the preflight with its defect planted."""

import contextlib
import os
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octfm.errors import ConfigError
from octfm.io import cores
from octfm.models.objectives.jepa import JEPA
from octfm.pretraining import preflight
from octfm.pretraining.preflight import data, objective, resources, tokens
from octfm.run import memory
from octfm.run.runtime import start
from octfm.store import loader
from octfm.store.loader import Loader
from octfm.store.selection import select, to_evaluate
from octfm.store.writer import StoreWriter
from support.small_store import edit_rows, small_store
from support.tiny_runs import config
from support.waiting import wait_until


def table(settings, store, out):
    rows = select(store, "train"), select(store, "val")
    return by_name(preflight.checks(settings, store, start("fp32", "cpu"), *rows, out))


def by_name(found):
    return {check.name: check for check in found}


@pytest.fixture(scope="module")
def sound(store, tmp_path_factory):
    """What is found of a sound run, and the folder in which it would have one of its own."""
    folder = tmp_path_factory.mktemp("sound")
    return table(config(steps=4000), store, folder / "run"), folder


ASKED = [
    "token grid", "batch arithmetic", "ranks", "data order", "learning rate", "weight decay", "teacher momentum", "splits", "store",
    "destination", "disk", "parameters", "tracker", "token budget", "tissue dropped", "masks", "dead targets", "mask coverage",
    "tissue bands", "participants", "volumes show tissue", "right side up", "bands fit their volumes", "context is blind to targets",
    "teacher gets no gradient", "teacher moves", "views agree", "masks change", "validation masks", "objective learns", "memory",
    "forecast",
]  # fmt: skip
"""Of every run. Tests of one check call it alone, and would not miss it here."""


def test_a_sound_run_passes_everything(sound):
    found, folder = sound
    assert list(found) == ASKED
    # How fast a busy machine reads is no fault of the settings.
    assert {c.status for c in found.values() if c.name != "forecast"} == {"PASS"}, found
    assert "8 participants to train on, 2 to validate on" in found["splits"].measured
    assert list(folder.iterdir()) == [], "the write test leaves nothing behind"


def test_F14_padding_and_shallow_retina_are_named(tmp_path):
    """Target spacing 0.02 mm put a 0.3 mm retina into a single 16-voxel patch and left most rows empty."""

    def shallow(seed, prepared):
        middle = prepared.band.mean(0)
        valid = prepared.valid.copy()
        valid[0], valid[1] = 8, 32
        return replace(prepared, band=np.stack([middle - 4, middle + 4]).astype(np.float32), valid=valid)

    store = small_store(tmp_path / "prepared", shallow)
    settings = config(masks={"budget": 32})
    found = by_name(tokens.budget(settings, data.read_sample(settings, store, select(store, "train"))))
    assert found["padding"].status == "WARN" and "62% of the grid is padding" in found["padding"].measured
    assert found["axial detail"].status == "WARN" and "1.0 tokens deep" in found["axial detail"].measured


def test_F11_an_encoder_that_sees_the_answers_is_stopped_before_step_0(store, tmp_path, monkeypatch):
    import octfm.models.predictor as predictor

    original = predictor.take_tokens

    def everything(tokens, index):
        # What the prototype did: the context encoder receives the whole volume.
        return original(tokens + tokens.mean(1, keepdim=True), index)

    monkeypatch.setattr(predictor, "take_tokens", everything)
    with pytest.raises(
        ConfigError,
        match=r"stopped the run before step 0: context is blind to targets: gradient .* the encoder sees the answers",
    ):
        preflight.require(list(table(config(), store, tmp_path / "run").values()), lambda _: None)


def test_F11_a_teacher_that_never_moves_is_stopped_before_step_0(store, monkeypatch):
    monkeypatch.setattr(JEPA, "update_target", lambda self, momentum: None)
    assert by_name(objective.integrity(config(), store, select(store, "train")))["teacher moves"].status == "FAIL"


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").is_dir(), reason="root can write anywhere; needs /proc")
def test_F6_destination_is_write_tested(store):
    assert table(config(), store, Path("/proc/octfm/run"))["destination"].status == "FAIL"


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")
def test_F6_destination_for_full_disks_is_write_tested_too(store, tmp_path):
    """Found out only when the first disk is full, it would be too late."""
    found = table(config(ckpt_second_dir="/proc/octfm"), store, tmp_path / "run")["second destination"]
    assert found.status == "FAIL" and "cannot be written" in found.measured
    found = by_name(resources.destinations(config(ckpt_second_dir=str(tmp_path / "other")), tmp_path / "run"))
    assert found["second destination"].status == "PASS" and not (tmp_path / "other").exists()


def test_a_file_in_place_of_the_destination_is_called_one(tmp_path):
    (tmp_path / "run").write_text("")
    for out in (tmp_path / "run", tmp_path / "run" / "below"):
        found = by_name(resources.destinations(config(), out))["destination"]
        assert found.status == "FAIL" and found.measured == f"{tmp_path / 'run'} is a file, expected a folder"


def test_checking_many_ranks_takes_no_longer_on_a_large_store(store, monkeypatch):
    """Sorting 100,000 volumes by scanner for each of 64 ranks took half a minute at every start."""
    monkeypatch.setattr(loader, "_by_scanner", lambda *_: pytest.fail("sorts the volumes of the store"))
    settings = config(data={"global_batch_size": 64, "per_device_batch_size": 1, "balance_scanners": True})
    assert data.ranks(settings, store, select(store, "train"), 64).status == "PASS"


def test_labels_that_no_probe_uses_are_named(store):
    rows = select(store, "train"), select(store, "val")
    (found,) = data.probed(config(probe={"labels": "labels.csv"}), store, *rows)
    assert found.status == "WARN" and "labels.csv" in found.measured and "probe.target" in found.advice
    assert data.probed(config(), store, *rows) == []


def test_missing_validation_participants_are_named(store):
    rows = select(store, "train"), np.array([], np.int64)
    found = data.splits(store, *rows)
    assert found.status == "WARN" and "no validation loss" in found.advice


def test_budget_larger_than_the_volume_is_named(tmp_path):
    def narrow(seed, prepared):
        valid = prepared.valid.copy()
        valid[:, :, 8:] = 0
        return replace(prepared, valid=valid)

    settings, store = config(masks={"budget": 128}), small_store(tmp_path / "prepared", narrow)
    found = by_name(tokens.budget(settings, data.read_sample(settings, store, select(store, "train"))))
    assert found["tokens repeated"].status == "WARN" and "lower masks.budget to 32" in found["tokens repeated"].advice


@pytest.mark.parametrize(
    ("moves", "fails"),
    [
        ({"axial_shift": 4, "lateral_shift_mm": 1.0, "tilt_deg": 10.0}, False),
        ({"axial_shift": 64}, True),
        ({"lateral_shift_mm": 6.0}, True),
        ({"lateral_shift_mm": 4.5, "lateral_scale": 0.9}, True),
    ],
)
def test_a_volume_that_augmentation_may_move_out_of_its_frame_is_named(store, moves, fails):
    """The run would stop at whatever step does, and could not go on without that volume."""
    settings = config(augment=moves)
    found = tokens.moved(settings, store, data.read_sample(settings, store, select(store, "train")))
    assert [check.status for check in found] == ["FAIL"] * fails
    assert all(f"augment.{name}={value:g}" in check.measured for check in found for name, value in moves.items())


def test_tissue_without_room_is_told_by_scanner_and_diagnosis(store):
    """Oedema must not be starved, however rare it is."""
    rows = select(store, "train")

    def found(budget):
        settings = config(masks={"budget": budget})
        return tokens.starved(settings, store, data.read_sample(settings, store, rows))

    (little,) = found(24)
    assert little.status == "WARN" and "of the tissue is left out, most in " in little.measured
    assert "raise masks.budget to" in little.advice
    (enough,) = found(120)
    assert enough.status == "PASS" and enough.measured.endswith("all tissue is among them")
    assert found(None) == []


def test_disk_and_parameters_are_told(sound):
    found, _ = sound
    assert "M parameters" in found["parameters"].measured and "GB free" in found["disk"].measured


def test_a_full_disk_is_told_before_step_0(store, tmp_path, monkeypatch):
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    found = table(config(), store, tmp_path / "run")["disk"]
    assert found.status == "FAIL" and "lower keep_checkpoints" in found.advice


def test_disk_counts_what_is_kept_for_good_and_the_best(store, tmp_path):
    probed = {"probe": {"target": "depth"}}
    for more, count in (({}, 3), (probed, 4), ({"keep_every_steps": 100}, 33)):
        assert f"up to {count} checkpoints" in resources.disk(config(steps=3000, **more), store, tmp_path, 16).measured


@pytest.mark.slow
def test_preflight_never_reads_more_than_a_sample(store, tmp_path, monkeypatch):
    read, seen = type(store).read, []
    monkeypatch.setattr(
        type(store), "read", lambda self, index, out=None: seen.append(len(index)) or read(self, index, out)
    )
    table(config(), store, tmp_path / "run")
    assert max(seen) <= data.AT_ONCE
    assert sum(seen) <= data.SAMPLE + data.CHECKSUMS + 8


def test_F7_a_global_batch_that_does_not_divide_is_a_row_of_the_table(store, tmp_path):
    found = table(config(data={"global_batch_size": 4, "per_device_batch_size": 3}), store, tmp_path / "run")[
        "batch arithmetic"
    ]
    assert found.status == "FAIL" and "global_batch_size 4 is not a multiple" in found.measured


def test_F7_batches_read_ahead_beyond_the_memory_are_a_row_of_the_table(store, monkeypatch):
    monkeypatch.setattr(data, "host_bytes_available", lambda: 10**9)
    assert data.arithmetic(config(), store, 1, 16).status == "PASS"
    monkeypatch.setattr(data, "host_bytes_available", lambda: 4 * 60 * store_bytes(store))
    assert data.arithmetic(config(data={"global_batch_size": 60, "prefetch": 2}), store, 1, 60).status == "PASS"
    assert data.arithmetic(config(data={"global_batch_size": 60, "prefetch": 3}), store, 1, 60).status == "FAIL"
    monkeypatch.setattr(data, "host_bytes_available", lambda: 10**9)
    found = data.arithmetic(config(data={"global_batch_size": 60, "prefetch": 1000}), store, 1, 16)
    assert found.status == "FAIL" and "1000 steps read ahead take 1.2 GB" in found.measured
    assert "lower data.prefetch" in found.advice


def store_bytes(store) -> int:
    """Of one volume in memory."""
    return sum(getattr(store.read([0]), name).nbytes for name in ("voxels", "band", "valid"))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_F7_no_more_batches_are_in_memory_than_were_counted(store, monkeypatch, prefetch):
    load_step, lent, alive = Loader._load, [], []

    def counted(self, step):
        loaded = load_step(self, step)
        lent.append(weakref.ref(loaded.voxels))
        alive.append(sum(array() is not None for array in lent))
        return loaded

    monkeypatch.setattr(Loader, "_load", counted)
    with Loader(store, range(16), 4, 0, prefetch=prefetch) as loader:
        for step in range(8):
            batch = loader.batches(step)
            assert len(batch) == 4
            wait_until(lambda ahead=step + prefetch + 1: len(lent) >= ahead, "batches read ahead")
    assert max(alive) <= prefetch + 2


@pytest.mark.parametrize(
    ("limit", "used", "parts"),
    [
        ("memory.max", "memory.current", "active_file 500000\ninactive_file 1500000\n"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "active_file 0\ninactive_file 7\ntotal_active_file 500000\ntotal_inactive_file 1500000\n",
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_container_leaves_less_memory_but_files_that_were_read_take_none(tmp_path, monkeypatch, limit, used, parts):
    """Version 1 of control groups, as on Red Hat 8, names its files otherwise."""
    monkeypatch.setattr(cores, "GROUP", tmp_path)
    for name, text in (
        (limit, "3000000\n"),
        (used, "2900000\n"),
        (limit.rpartition("memory.")[0] + "memory.stat", parts),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert memory.host_bytes_available() == 2_100_000


def test_a_selection_that_leaves_no_volume_is_named(store):
    found = data.arithmetic(config(), store, 1, 0)
    assert found.status == "FAIL" and "no training volume is left" in found.measured and "data.scanners" in found.advice


def test_F10_ranks_that_read_the_same_volumes_are_stopped(store, tmp_path, monkeypatch):
    """Every replica of the prototype believed to be rank 0."""
    monkeypatch.setattr(data.Loader, "positions", lambda self, step: step * 4 + np.arange(4 // self.world))
    found = table(config(), store, tmp_path / "run")["ranks"]
    assert found.status == "FAIL" and "at step 0 the 2 ranks read 2 of 4 volumes twice" in found.measured


def test_a_damaged_store_is_stopped(tmp_path):
    store = small_store(tmp_path / "prepared")
    edit_rows(store.path, lambda row: {"checksum": "sha256:0"})
    found = table(config(), type(store).open(store.path), tmp_path / "run")["store"]
    assert found.status == "FAIL" and "volumes are damaged" in found.measured and "octfm prepare" in found.advice


def test_a_store_that_octfm_prepare_has_not_finished_is_not_taken_for_whole(tmp_path):
    """Runs and results on half of a cohort looked like those on all of it."""
    store, said = small_store(tmp_path / "prepared"), []
    assert data.prepared(store).status == "PASS"
    with StoreWriter(store.path, store.preprocessing):
        found = data.prepared(store)
        to_evaluate(store, echo=said.append)
    assert found.status == "WARN" and f"it had {len(store)} volumes" in found.measured
    assert len(said) == 1 and f"it had {len(store)} volumes" in said[0]
    to_evaluate(store, echo=said.append)
    assert len(said) == 1


def test_F15_a_store_of_another_version_is_stopped(store, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "fingerprint", "0" * 16)
    assert table(config(), store, tmp_path / "run")["store"].status == "FAIL"


def test_F16_a_participant_in_two_splits_is_stopped(store):
    train = select(store, "train")
    found = data.splits(store, train, train[:2])
    assert found.status == "FAIL" and "1 participants are in training and validation" in found.measured


def test_F16_a_store_with_leaking_splits_is_a_row_of_the_table(tmp_path):
    store = small_store(tmp_path / "prepared")
    edit_rows(store.path, lambda row: {"split": "test" if row.index == 0 else row.split})
    found = preflight.examine(config(data={"store": str(store.path), "global_batch_size": 4}), tmp_path / "run", "cpu")
    assert [(c.name, c.status) for c in found] == [("splits", "FAIL")] and "octfm scan" in found[0].advice


# Masks
# -------------------------------------------------------------------------------------------------------------------------------


def sampled(monkeypatch, edit):
    original = tokens.sampler.sample_masks
    monkeypatch.setattr(
        tokens.sampler, "sample_masks", lambda settings, maps, rngs: edit(original(settings, maps, rngs), maps)
    )


def test_sorted_masks_cut_at_the_end_are_stopped(store, tmp_path, monkeypatch):
    """What vjepa2's collation does: surplus is cut off sorted indices, so that the last B-scans are hardly ever a
    target."""

    def cut(drawn, maps):
        return replace(drawn, target=drawn.target[:, : drawn.target.shape[1] * 3 // 4])

    sampled(monkeypatch, cut)
    found = table(config(), store, tmp_path / "run")
    assert found["mask coverage"].status == "FAIL" and "slice 3 of D is a target" in found["mask coverage"].measured
    assert (
        found["masks"].status == "FAIL"
        and "should be 64 + 22 + 38 tokens, and are 64 + 22 + 28" in found["masks"].measured
    )


@pytest.mark.parametrize("axis", [1, 2])
def test_masks_that_starve_an_edge_are_stopped(store, tmp_path, monkeypatch, axis):
    """A place that blocks never reach: its targets go to the tokens next to it."""

    def starve(drawn, maps):
        target, kept = drawn.target.copy(), drawn.kept
        for row, (t, k) in enumerate(zip(target, kept, strict=True)):
            place = np.unravel_index(k, maps.shape[1:])[axis]
            edge = np.isin(t, k[place == place.min()]) if axis == 2 else np.isin(t, k[place == np.median(place)])
            others = np.setdiff1d(k, t)
            others = others[~np.isin(others, k[place == place.min()])]
            t[edge] = others[: edge.sum()] if len(others) >= edge.sum() else t[~edge][0]
            target[row] = np.sort(t)
        return replace(drawn, target=target, context=np.setdiff1d(kept, target)[None, :4])

    sampled(monkeypatch, starve)
    found = table(config(), store, tmp_path / "run")["mask coverage"]
    assert found.status == "FAIL" and f"of {'DHW'[axis]} is a target" in found.measured


def test_context_that_overlaps_the_target_is_stopped(store, tmp_path, monkeypatch):
    sampled(monkeypatch, lambda drawn, maps: replace(drawn, context=drawn.target[:, :5]))
    found = table(config(), store, tmp_path / "run")["masks"]
    assert found.status == "FAIL" and "1000 tokens are context and target" in found.measured


def test_dead_targets_are_named(store):
    sample = data.read_sample(config(), store, select(store, "train"))
    found = by_name(tokens.masking(config(masks={"budget": None}), sample))["dead targets"]
    assert found.status == "WARN" and "of targets are background" in found.measured


@pytest.mark.parametrize("seed", [10, 13, 50])
def test_sound_masks_of_single_bscans_raise_no_alarm_by_chance(seed):
    """Three of the sixty seeds that stopped runs on lines."""
    maps = np.ones((1, 1, 32, 24), np.uint8)
    maps[:, :, 12:20] = 2
    sample = data.Sample(np.arange(1), maps, 64.0, 1.0)
    *_, found = tokens.masking(config(seed=seed, masks={"budget": 256}), sample)
    assert found.name == "mask coverage" and found.status == "PASS"


@pytest.mark.parametrize("plane", ["enface", "bscan"])
@pytest.mark.parametrize("budget", [32, 64, None])
def test_sound_masks_never_raise_an_alarm(store, plane, budget):
    sample = data.read_sample(config(), store, select(store, "train"))
    found = list(tokens.masking(config(masks={"plane": plane, "budget": budget}), sample))
    assert all(check.status != "FAIL" for check in found), found


# Objective
# ---------------------------------------------------------------------------------------------------------------------------


class Torch:
    """torch whose no_grad forbids nothing."""

    no_grad = contextlib.nullcontext

    def __getattr__(self, name):
        return getattr(torch, name)


def test_F11_a_teacher_that_gets_gradients_is_stopped(store, monkeypatch):
    monkeypatch.setattr("octfm.models.objectives.jepa.torch", Torch())
    build = objective.build_objective

    def trained_teacher(*words):
        model = build(*words)
        model.target_encoder.requires_grad_(True)
        return model

    monkeypatch.setattr(objective, "build_objective", trained_teacher)
    assert (
        by_name(objective.integrity(config(), store, select(store, "train")))["teacher gets no gradient"].status
        == "FAIL"
    )


def test_F11_two_views_that_were_moved_apart_are_stopped(store, monkeypatch):
    """The prototype flipped and warped two views independently and compared them at the same index."""
    make = objective.make_inputs

    def apart(*words, **more):
        inputs = make(*words, **more)
        (view,) = inputs.views
        return replace(inputs, views=(view._replace(target_patches_BKP=view.target_patches_BKP.roll(1, 1)),))

    monkeypatch.setattr(objective, "make_inputs", apart)
    assert objective.views(config(), store, select(store, "train")).status == "FAIL"


def test_F12_validation_without_targets_is_stopped(store, monkeypatch):
    """The prototype's validation mask was all zeros, its loss always 0, and its first epoch the best."""
    make = objective.make_inputs

    def unmasked(*words, augmented=True):
        inputs = make(*words, augmented=augmented)
        if augmented:
            return inputs
        return replace(inputs, masks=replace(inputs.masks, target=np.zeros_like(inputs.masks.target)))

    monkeypatch.setattr(objective, "make_inputs", unmasked)
    (found,) = objective.validation_masks(config(), store, select(store, "val"))
    assert found.status == "FAIL" and "1 of 64 tokens of a held-out volume are targets" in found.measured


@pytest.mark.parametrize(
    "name, fault",
    [
        ("vjepa2", "constant teacher"),
        ("vjepa2", "blind context"),
        ("vjepa2", "learning rate 0"),
        ("data2vec", "constant teacher"),
        *(pytest.param("data2vec", fault, marks=pytest.mark.slow) for fault in ("blind context", "learning rate 0")),
        ("mae", "blind context"),
    ],
)
def test_F11_an_objective_that_learns_nothing_is_stopped(store, monkeypatch, name, fault):
    """Loss may fall all the way in each of these; what it never does is depend on the content of a volume."""
    settings, rows = config(objective={"name": name}), select(store, "train")
    build = objective.build_objective
    monkeypatch.setattr(objective, "OVERFIT_STEPS", 40)
    if fault == "constant teacher":

        def constant(*words):
            model = build(*words)
            model.target_encoder.patch_embed.weight.data.zero_()
            model.update_target = lambda momentum: None
            return model

        monkeypatch.setattr(objective, "build_objective", constant)
    elif fault == "blind context":

        def blind(*words):
            model = build(*words)
            model.encoder.patch_embed.weight.data.zero_()
            model.encoder.patch_embed.weight.requires_grad_(False)
            return model

        monkeypatch.setattr(objective, "build_objective", blind)
    else:
        monkeypatch.setattr(objective, "OVERFIT_LR", 0.0)
    found = objective.overfit(settings, store, rows)
    assert found.status == "FAIL" and "do not depend on what it sees" in found.advice, found


def test_F11_an_objective_without_a_number_or_without_company_is_named(store, monkeypatch):
    rows, build = select(store, "train"), objective.build_objective
    assert "one training volume" in objective.overfit(config(), store, rows[:1]).measured

    def broken(*words):
        model = build(*words)
        model.encoder.patch_embed.weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr(objective, "build_objective", broken)
    monkeypatch.setattr(objective, "OVERFIT_STEPS", 8)
    found = objective.overfit(config(), store, rows)
    assert found.status == "FAIL" and "the loss of a tiny copy is nan" in found.measured


def test_a_sound_objective_is_told_by_its_content(store, monkeypatch):
    """Within the steps that the faults above get."""
    monkeypatch.setattr(objective, "OVERFIT_STEPS", 40)
    for name in ("vjepa2", "data2vec", "mae"):
        assert objective.overfit(config(objective={"name": name}), store, select(store, "train")).status == "PASS"


def test_a_resumed_run_is_not_examined_at_length(store, tmp_path):
    rows = select(store, "train"), select(store, "val")
    found = preflight.checks(config(), store, start("fp32", "cpu"), *rows, tmp_path, resumed=True)
    assert not {"objective learns", "forecast"} & {c.name for c in found} and {"ranks", "destination", "store"} <= {
        c.name for c in found
    }


def test_plot_is_a_picture(store, tmp_path, monkeypatch):
    from matplotlib.image import imread

    monkeypatch.setattr(preflight, "checks", lambda *_: [])  # a picture shows the settings, not what was found
    settings = config(data={"store": str(store.path), "global_batch_size": 4})
    preflight.examine(settings, tmp_path / "run", "cpu", plot=tmp_path / "new" / "doctor")
    picture = imread(tmp_path / "new" / "doctor", format="png")
    assert picture.shape[0] > 400 and picture.std() > 0.05
