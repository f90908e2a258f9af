"""Illnesses that let a run finish as if it were sound: each is planted at step 5, and named within 20 steps; sound
runs are left alone."""

from dataclasses import replace
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine

from octfm.errors import CheckpointError, TrainingError
from octfm.pretraining import inputs
from octfm.pretraining import pretrain as loop
from octfm.pretraining.monitors import feed, health, monitors
from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.monitors.limits import Limits, limits
from octfm.pretraining.preflight import data, objective
from octfm.pretraining.preflight.ranks import require_same_order
from octfm.pretraining.run_state import RunState
from octfm.run import checkpoint
from octfm.store.loader import Loader
from octfm.store.selection import select as choose
from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, rows

AT, STEPS = 5, 26
QUIET = {"log_every_steps": 100, "validate_every_steps": 1000, "ckpt_every_steps": 1000, "steps": STEPS}
SMALL = QUIET | {
    "model": {"patch_size": [2, 8, 8], "width": 24, "depth": 2, "heads": 2},
    "data": {"global_batch_size": 4, "per_device_batch_size": 4},
}


def trained(store, out, **changes):
    """(step, name) of every incident, and the error that ended the run."""
    error = None
    try:
        quick_pretrain(config(**SMALL | changes), store, out, echo=lambda _: None)
    except TrainingError as stop:
        error = stop
    return [(row["step"], row["what"]) for row in rows(out, "incident")], error


def plant(monkeypatch, ill):
    """Do `ill(learner)` before the passes of step 5."""
    accumulate = loop.accumulate

    def faulty(learner, *args, **kwargs):
        if learner.step == AT:
            ill(learner)
        return accumulate(learner, *args, **kwargs)

    monkeypatch.setattr(loop, "accumulate", faulty)


def assert_named(incidents, error, name, kind=TrainingError):
    assert incidents and incidents[0][1] == name and AT <= incidents[0][0] < AT + 20, incidents
    assert isinstance(error, kind), "it stays, so the run stops"


def negative_loss(learner):
    forward = learner.model.forward
    vars(learner.model)["forward"] = lambda *args: (lambda output: output._replace(loss=-output.loss))(forward(*args))


def negative_gradients(learner):
    average = learner.runtime.average_gradients

    def negated(parameters):
        average(parameters)
        for p in learner.trained:
            p.grad.neg_()

    vars(learner.runtime)["average_gradients"] = negated


def uphill_optimizer(learner):
    for group in learner.optimizer.param_groups:
        group["maximize"] = True


@pytest.mark.parametrize("ill", [negative_loss, negative_gradients, uphill_optimizer])
@pytest.mark.parametrize("name", ["vjepa2", pytest.param("mae", marks=pytest.mark.slow)])
def test_a_gradient_with_the_wrong_sign_is_named(store, tmp_path, monkeypatch, ill, name):
    plant(monkeypatch, ill)
    assert_named(*trained(store, tmp_path / "run", objective={"name": name}), "gradient reversed")


def test_a_teacher_that_moves_away_from_the_student_is_named(store, tmp_path, monkeypatch):
    def away(learner):
        update = learner.model.update_target
        learner.model.update_target = lambda momentum: update(2 - momentum)

    plant(monkeypatch, away)
    assert_named(*trained(store, tmp_path / "run"), "teacher")


def cut_off(learner):
    learner.model.encoder.register_forward_hook(lambda module, args, output: output.detach())


def half_without_gradient(learner):
    learner.model.encoder.blocks[0].requires_grad_(False)


def half_of_every_matrix(learner):
    for p in learner.model.encoder.parameters():
        if p.ndim == 2:
            p.register_hook(lambda gradient: torch.cat((gradient[::2] * 0, gradient[1::2])))


def half_not_in_the_optimizer(learner):
    block = {id(p) for p in learner.model.encoder.blocks[0].parameters()}
    for group in learner.optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in block]


@pytest.mark.parametrize("ill", [cut_off, half_without_gradient, half_of_every_matrix, half_not_in_the_optimizer])
def test_an_encoder_that_does_not_learn_is_named(store, tmp_path, monkeypatch, ill):
    """All of it, or half: weight decay moves what no gradient reaches, so movement alone would not show it."""
    plant(monkeypatch, ill)
    assert_named(*trained(store, tmp_path / "run"), "encoder frozen")


def test_the_same_batch_for_ever_is_named(store, tmp_path, monkeypatch):
    batches = Loader.batches
    monkeypatch.setattr(Loader, "batches", lambda self, step: batches(self, min(step, AT)))
    incidents, error = trained(store, tmp_path / "run")
    assert_named(incidents, error, "same batch")
    assert incidents[0][0] == AT + 1


@pytest.mark.parametrize("of", ["order", "voxels"])
def test_the_same_volumes_under_other_names_are_named(store, tmp_path, monkeypatch, of):
    """The order itself stands still, or what is read."""
    if of == "order":
        indices = Loader.indices
        monkeypatch.setattr(Loader, "indices", lambda self, at: indices(self, np.where(at < 4 * AT, at, at % 4)))
        incidents, error = trained(store, tmp_path / "run")
        assert incidents[0][1] in ("same batch", "volume repeated") and error is not None
    else:
        load = Loader._load
        monkeypatch.setattr(
            Loader, "_load", lambda self, step: replace(load(self, step), voxels=load(self, min(step, AT)).voxels)
        )
        assert_named(*trained(store, tmp_path / "run"), "same batch")


@pytest.mark.parametrize("of", ["order", "voxels"])
def test_one_volume_repeated_in_a_batch_is_named(store, tmp_path, monkeypatch, of):
    if of == "order":
        indices = Loader.indices

        def doubled(self, positions):
            found = indices(self, positions)
            return np.where((positions >= 4 * AT) & (positions % 4 == 1), np.roll(found, 1), found)

        monkeypatch.setattr(Loader, "indices", doubled)
    else:
        load = Loader._load

        def doubled(self, step):
            batch = load(self, step)
            if step >= AT:
                batch.voxels[1] = batch.voxels[0]
            return batch

        monkeypatch.setattr(Loader, "_load", doubled)
    assert_named(*trained(store, tmp_path / "run"), "volume repeated")


def test_bands_of_other_volumes_in_a_batch_are_named(store, tmp_path, monkeypatch):
    """What stands in the store is looked at before step 0 (test_cohort_health.py)."""
    load = Loader._load

    def mixed(self, step):
        batch = load(self, step)
        return replace(batch, band=np.roll(batch.band, 1, 0)) if step >= AT else batch

    monkeypatch.setattr(Loader, "_load", mixed)
    assert_named(*trained(store, tmp_path / "run"), "wrong volume")


@pytest.mark.parametrize("of", ["generators", "masks"])
def test_fixed_masks_are_named(store, tmp_path, monkeypatch, of):
    """The same numbers are drawn for every volume, or the first step's masks are kept."""
    if of == "generators":
        monkeypatch.setattr(
            inputs, "generators", lambda seed, stream, at, *view: [np.random.default_rng((seed, stream)) for _ in at]
        )
    else:
        sample, kept = inputs.sample_masks, []

        def first(*args):
            kept.append(sample(*args))
            return kept[0]

        monkeypatch.setattr(inputs, "sample_masks", first)
    incidents, error = trained(store, tmp_path / "run", data={"global_batch_size": 4, "per_device_batch_size": 4})
    assert incidents[0][1] == "fixed masks" and incidents[0][0] < 20 and error is not None


def test_fixed_masks_are_named_before_step_0(store, monkeypatch):
    chosen = choose(store, "train")
    assert objective.masks_change(config(), store, chosen).status == "PASS"
    monkeypatch.setattr(inputs, "generators", lambda seed, stream, at, *view: [np.random.default_rng(seed) for _ in at])
    assert objective.masks_change(config(), store, chosen).status == "FAIL"


def test_masks_of_a_volume_of_two_tokens_are_not_fixed(tmp_path):
    """One of them is hidden: by chance it is often the same one several times."""

    def narrow(seed, eye):
        valid = np.zeros_like(eye.valid)
        valid[1, :2, :8] = 16
        return replace(eye, valid=valid)

    two = small_store(tmp_path / "prepared", narrow)
    looks = [objective.masks_change(config(seed=seed), two, choose(two, "train")) for seed in range(20)]
    assert {found.status for found in looks} == {"PASS"}


def test_an_order_that_repeats_volumes_is_named_before_step_0(store, monkeypatch):
    chosen = choose(store, "train")
    assert data.order(config(), store, chosen).status == "PASS"
    few = data.order(config(), store, chosen[:3])
    assert few.status == "WARN" and "3 training volumes for batches of 4" in few.measured
    single = {"global_batch_size": 1, "per_device_batch_size": 1}
    orders = [data.order(config(data=single, seed=seed), store, chosen[:4]) for seed in range(40)]
    assert {found.status for found in orders} == {"PASS"}, "the last of an epoch may be the first of the next"
    indices = Loader.indices
    monkeypatch.setattr(Loader, "indices", lambda self, at: indices(self, at % 4))
    assert data.order(config(), store, chosen).status == "FAIL"


def test_an_order_that_differs_on_one_rank_stops_all(store):
    def second_rank(differs):
        return SimpleNamespace(world=2, exchange=lambda values: np.stack([values, values + differs]))

    with Loader(store, choose(store, "train"), 4, 0, prefetch=0) as loader:
        require_same_order(second_rank(0), loader, 0)
        with pytest.raises(TrainingError, match="rank 1 of 2 draws its volumes in another order than rank 0"):
            require_same_order(second_rank(1), loader, 0)
    sound = np.array([[5.0, 0, 0, 0, 0, -1, 0]] * 2)
    assert feed.finding(sound, np.arange(4)) is None
    sound[1, 0] = 6
    found = feed.finding(sound, np.arange(4))
    assert found and found.what == "data order" and "rank 1 draws its volumes in another order" in found.sentence


@pytest.mark.slow
def test_one_rank_with_another_order_is_named(ranks, store, tmp_path):
    """Before step 0 where it begins so, else in the first step where it differs."""
    halves = {"global_batch_size": 4, "per_device_batch_size": 2}
    settings = config(**SMALL | {"data": halves}).model_dump(mode="json")
    early = ranks(2, store.path, tmp_path / "early", settings, fault="other-order", on=1)
    assert [end.code for end in early] == [1, 1] and "rank 1 of 2 draws its volumes in another order" in early[0].said
    ranks(2, store.path, tmp_path / "late", settings, fault="other-order", on=1, at=12)
    first = rows(tmp_path / "late", "incident")[0]
    assert (first["step"], first["what"]) == (12, "data order")


@pytest.mark.parametrize("lost", ["in the file", "all zero", "after it was read"])
def test_optimizer_state_that_is_lost_at_resume_is_named(store, tmp_path, monkeypatch, lost):
    run = tmp_path / "run"
    short = config(**SMALL | {"ckpt_every_steps": 8})
    accumulate = loop.accumulate

    def stops(learner, *args, **kwargs):
        if learner.step == 12:
            raise KeyboardInterrupt
        return accumulate(learner, *args, **kwargs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "accumulate", stops)
        quick_pretrain(short, store, run, echo=lambda _: None)
    if lost == "after it was read":
        resume = loop.resume

        def forgetful(folder, learner, echo):
            resume(folder, learner, echo)
            learner.optimizer.state.clear()

        monkeypatch.setattr(loop, "resume", forgetful)
        incidents, _ = trained(store, run, ckpt_every_steps=8)
        assert incidents[0] == (10, "optimizer state")
        return
    path = checkpoint.newest(run)
    content = checkpoint.load(path)
    if lost == "in the file":
        content["optimizer"]["state"] = {}
    else:
        for state in content["optimizer"]["state"].values():
            state["exp_avg_sq"].zero_()
    step = content.pop("step")
    path.unlink()
    checkpoint.write(path.parent, step, content)
    with pytest.raises(CheckpointError, match="the optimizer's state is lost for 9 of 9 weight matrices"):
        quick_pretrain(short, store, run, echo=lambda _: None)


def test_held_out_loss_that_rises_while_training_loss_falls_is_named(store, tmp_path):
    """Two volumes, learned by heart: seen at the second validation, and the run goes on."""
    changes = {
        "steps": 120, "log_every_steps": 5, "validate_every_steps": 60, "objective": {"name": "mae", "context_loss": 0.0},
        "data": {"global_batch_size": 2, "per_device_batch_size": 2, "max_samples": 2}, "augment": {"axial_shift": 0},
        "model": {"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2},
    }  # fmt: skip
    assert trained(store, tmp_path / "run", **changes) == ([(119, "held-out loss")], None)
    (told,) = (row["sentence"] for row in rows(tmp_path / "run", "incident"))
    assert (
        "memorises its volumes" in told
        and "from step 60 to 120" in told
        and told.endswith("checkpoint near step 60; training continues")
    )


def points(*ratios):
    """Rows of metrics: (training, held out) at one validation after the other."""
    for step, (training, held_out) in enumerate(ratios):
        for kind, ratio in (("train", training), ("validation", held_out)):
            yield {"kind": kind, "step": step, "masked_over_baseline": ratio}


@pytest.mark.parametrize(
    "ratios",
    [
        [(0.9, 0.9), (0.7, 0.95)],  # a little, as chance makes it
        [(0.9, 0.6), (0.95, 0.9)],  # both rise: a teacher that moves on
        [(0.9, 0.9), (0.7, 0.7), (0.5, 0.65)],
        [(0.9, 0.9)],
    ],
)
def test_losses_that_do_not_part_are_left_alone(ratios):
    assert monitors.held_out(points(*ratios)) is None


def test_a_loss_on_other_held_out_volumes_is_not_compared():
    """As after a resume with another validation_volumes."""
    parting = [row | {"volumes": 16} for row in points((0.9, 0.9), (0.7, 1.0))]
    found = monitors.held_out(parting)
    assert found is not None and found.what == "held-out loss"
    assert monitors.held_out([*parting[:2], *(row | {"volumes": 64} for row in parting[2:])]) is None


def test_a_loss_that_grows_beyond_that_of_a_constant_answer_is_named():
    grown = RunState(losses=tuple(np.linspace(1.0, 5.5, 24)))
    found = monitors.rising_loss(grown, 5.5)
    assert found is not None and found.what == "rising loss" and "lower schedule.base_lr" in found.sentence
    assert monitors.rising_loss(grown, 1.2) is None, "still better than it sounds"
    assert monitors.rising_loss(RunState(losses=tuple(np.linspace(2.4, 1.6, 24))), 1.6) is None


@pytest.mark.parametrize(
    "audit, named",
    [({}, True), ({"gradient_taken": 0.9, "update_size": 1e-3}, True), ({"gradient_taken": 0.9}, False)],
    ids=["compiled, without an audit", "an update of some size", "an update below rounding"],
)
def test_weights_that_should_have_moved_are_named(audit, named):
    row = {"weights_stuck": 0.5, "effective_rank": 32.0, "feature_std": 1.0, "masked_over_baseline": 0.5}
    found = monitors.row_findings(HealthConfig(), RunState(), row | audit, 32)
    assert (found is not None and found.what == "underflow") == named


WHOLE = {
    "effective_rank": 10.0, "feature_std": 1.0, "tissue_tokens": 500, "masked_over_baseline": 0.5, "weights_stuck": 0.0,
    "ranks_apart": 0.0, "teacher_asked": 1e-3, "teacher_step": 1e-3, "teacher_along": 1.0, "gradient_agrees": 1.0,
    "gradient_taken": 1.0, "update_agrees": 1.0, "update_size": 1.0, "moments_astray": 0.0, "counted": 8.0, "untaught": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("underflow", [{"weights_stuck": 0.26}]),
        ("ranks apart", [{"ranks_apart": 1e-9}]),
        ("gradient reversed", [{"gradient_agrees": -0.1}, {"gradient_taken": -0.1}, {"update_agrees": -0.1}]),
        ("gradient", [{"gradient_agrees": 0.45}]),
        ("optimizer state", [{"counted": 7.0}, {"moments_astray": 0.11}]),
        ("encoder frozen", [{"frozen": ["blocks.0.mlp.weight"]}]),
        ("update", [{"update_size": 0.45}, {"update_size": 2.1}]),
        ("teacher frozen", [{"teacher_step": 0.45e-3}]),
        ("teacher", [{"teacher_step": 2.1e-3}, {"teacher_along": 0.45}]),
        ("collapse", [{"effective_rank": 1.3}, {"feature_std": 0.009}]),
        ("masked loss", [{"masked_over_baseline": 0.019}, {"masked_over_baseline": 0.0}]),
        (None, [{}, {"weights_stuck": 0.24}, {"weights_stuck": 0.5, "untaught": 1}, {"gradient_agrees": 0.55},
                {"gradient_agrees": 9.0}, {"counted": 9.0}, {"moments_astray": 0.09}, {"update_size": 0.55},
                {"update_size": 1.9}, {"teacher_step": 0.55e-3}, {"teacher_step": 1.9e-3}, {"teacher_along": 0.55},
                {"teacher_step": 0.0, "teacher_asked": 9e-7}, {"effective_rank": 1.35}, {"feature_std": 0.011},
                {"effective_rank": 1.3, "tissue_tokens": 5}, {"masked_over_baseline": 0.021}]),
    ],
)  # fmt: skip
def test_what_is_measured_after_an_update_is_named_beyond_its_limit_and_not_before(what, changes):
    for change in changes:
        found = monitors.row_findings(HealthConfig(), RunState(losses=(0.5,) * 8), WHOLE | change, 32)
        assert (found and found.what) == what, change


@pytest.mark.parametrize(
    ("measured", "what"),
    [((None, None, None), None), ((0.0, 0.0, 9e-4), None), ((1e-9, 1.0, 1.0), "context unmasked"),
     ((0.0, 1e-9, 1.0), "gradient reversed"), ((0.0, 0.0, 2e-3), "batch statistics")],
)  # fmt: skip
def test_leaks_are_named_the_cause_first(measured, what):
    found = monitors.miscalculated(*measured)
    assert (found and found.what) == what


def test_words_about_a_logged_step_change_at_their_limits():
    row = WHOLE | {"step": 80, "warmup_steps": 10, "grad_norm": 1.0, "dead_targets": 0.3, "data_wait_share": 0.2}

    def said(**changes):
        found = health.verdicts(row | {"effective_rank": 10.0} | changes, 100)
        return {verdict.what: verdict.verdict for verdict in found if verdict.verdict != "ok"}

    assert said() == said(masked_over_baseline=0.021) == said(teacher_step=0.55e-3) == said(effective_rank=4.1) == {}
    assert said(masked_over_baseline=0.019) == {"masked loss": "bad"} and said(grad_norm=0.0) == {"gradient": "bad"}
    assert (
        said(masked_over_baseline=0.98) == {"masked loss": "watch"} and said(masked_over_baseline=0.98, step=79) == {}
    )
    assert said(teacher_step=0.45e-3) == {"teacher": "bad"} and said(teacher_step=0.0, teacher_asked=9e-7) == {}
    assert said(effective_rank=1.9) == {"effective rank": "bad"}
    assert said(effective_rank=3.9) == {"effective rank": "watch"}
    assert said(effective_rank=1.9, tissue_tokens=6) == {}, "of six tokens it cannot be higher"
    assert said(dead_targets=0.31) == {"targets": "watch"} and said(data_wait_share=0.21) == {"data": "watch"}


def test_volumes_are_blamed_for_a_loss_that_is_not_finite_unless_most_have_one():
    rows, fine = np.array([7, 3, 9, 5]), torch.ones(4)
    for bad, blamed in (([2], (9,)), ([1, 2], (3, 9)), ([0, 1, 2], ())):
        losses = fine.index_fill(0, torch.tensor(bad), float("nan"))
        found = monitors.non_finite(losses, float("nan"), rows)
        assert found is not None and (found.what, found.volumes) == ("non-finite loss", blamed)
        assert found.damaging == (len(bad) > 2), "then the weights are the cause"
    overflow = monitors.non_finite(fine, float("inf"), rows)
    assert overflow is not None and overflow.damaging and overflow.what == "non-finite gradient"
    assert monitors.non_finite(fine, 3.0, rows) is None


@pytest.mark.parametrize("seed", range(20))
def test_limits_of_a_step_are_those_of_a_plain_loop_over_the_steps_before(seed):
    rng = np.random.default_rng(seed)
    count = 23 + seed
    losses = np.exp(np.linspace(0, -1, count) + rng.choice([0.02, 0.2]) * rng.normal(size=count))
    losses[-1 - seed % 4] *= rng.choice([1, 1.5, 4])
    state = RunState(losses=tuple(losses), grad_norms=tuple(losses))
    found = limits(HealthConfig(), state)
    if count < 24:
        assert found == Limits()
        return
    logs = np.log(losses)
    jumps = [logs[n] - median(logs[n - 8 : n]) for n in range(8, count)]
    spread = 8 * 1.4826 * median(abs(jump - median(jumps)) for jump in jumps)
    before = median(logs[-8:]) + median(jumps)
    assert [found.loss, found.grad_norm] == pytest.approx(
        [np.exp(before + max(spread, np.log(factor))) for factor in (3, 20)], rel=1e-6
    )
    lasting = np.exp(median(logs[-10:-2]) + median(jumps) + max(spread, np.log(1.3)))
    assert found.lasting_loss == pytest.approx(lasting if max(losses[-2:]) > lasting else np.inf, rel=1e-6)
    said = [(1.1 * found.loss, 1.1 * found.loss / median(losses[-8:]))]
    if found.lasting_loss < 0.9 * found.loss:
        said.append((1.01 * lasting, min(1.01 * lasting, max(losses[-2:])) / median(losses[-10:-2])))
    for loss, rise in said:
        told = monitors.spike(HealthConfig(), state, loss, 0.0)
        assert told is not None and f"{rise:.1f} times the median of the 8 steps before" in told.sentence


def test_a_drop_or_a_rise_is_one_of_medians_and_from_its_factor_on():
    before, middle, now = [0.8] * 30, [0.5] * 26, [0.39] * 7 + [0.7]

    def drop(losses, rank, ranks=4):
        state = RunState(losses=tuple(losses), ranks=(20.0,) * ranks)
        return monitors.sudden_drop(HealthConfig(), state, rank) is not None

    assert drop(before + middle + now, 9.9) and not drop(before + middle + now, 10.1)
    assert not drop(before + middle + [0.41] * 8, 9.9) and not drop((before + middle + now)[1:], 9.9)
    assert not drop(before + middle + now, 9.9, ranks=3)
    for losses, ratio, named in (
        ([1.0] * 8 + [1.51] * 7 + [0.1], 1.6, True), ([1.0] * 8 + [1.51] * 8, 1.45, False),
        ([1.0] * 8 + [1.45] * 8, 1.6, False), ([1.0] * 7 + [1.51] * 8, 1.6, False),
    ):  # fmt: skip
        assert (monitors.rising_loss(RunState(losses=tuple(losses)), ratio) is not None) == named


def test_held_out_losses_are_compared_with_training_since_the_validation_before():
    def of(*parts):
        return monitors.held_out(
            {"kind": kind, "step": step, "masked_over_baseline": ratio}
            for step, (training, held_out) in enumerate(parts)
            for kind, ratio in [*(("train", own) for own in training), ("validation", held_out)]
        )

    first, second = ([0.5] * 4 + [0.9] * 8, 0.6), ([0.7] * 3, 0.67)
    found = of(first, second)
    assert found is not None and "rose from 0.600 to 0.670" in found.sentence
    assert "fell from 0.900 to 0.700" in found.sentence and found.kind == "advice"
    assert of(first, ([0.7] * 3, 0.65)) is None and of(first, ([0.82] * 3, 0.67)) is None
    assert of(first, second, ([0.6], 0.68)) is not None and of(first, second, ([0.6], 0.67)) is None, "a new high only"


def test_features_and_movements_are_measured_as_by_numpy():
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(60, 6)) * [5, 3, 1, 1, 0.5, 0.1] + 4
    share = np.linalg.svd(tokens - tokens.mean(0), compute_uv=False)
    share /= share.sum()
    found = torch.from_numpy(tokens).float()
    assert health.effective_rank(found) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-4)
    assert health.feature_std(found) == pytest.approx(np.mean(tokens.std(0, ddof=1)), rel=1e-5)
    a, b, start = (rng.normal(size=24) for _ in range(3))
    cut = [[torch.from_numpy(x[:10]), torch.from_numpy(x[10:]).reshape(2, 7)] for x in (a, b, start)]
    moved = health.relative_distance(cut[0], cut[1], lambda _: None)
    assert float(moved) == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(b))
    along = health.cosine(cut[2], cut[0], cut[1], lambda _: None)
    assert float(along) == pytest.approx(1 - cosine(a - start, b - start))
    kept = health.cosine(cut[2], cut[2], cut[1], lambda _: None)
    assert float(kept) == 0


SOUND = {
    "vjepa2": {},
    "mae bf16": {"objective": {"name": "mae"}, "precision": "bf16"},
    "data2vec": {"objective": {"name": "data2vec"}},
    "whitened": {"objective": {"target_norm": "whiten"}, "seed": 5},
    "fewer volumes than a batch": {"data": {"global_batch_size": 4, "per_device_batch_size": 2, "max_samples": 3}},
    "a batch of all volumes": {"data": {"global_batch_size": 4, "per_device_batch_size": 4, "max_samples": 4}},
    "two in turn": {"data": {"global_batch_size": 1, "per_device_batch_size": 1, "max_samples": 2}},
    "one at a time": {"data": {"global_batch_size": 1, "per_device_batch_size": 1}, "masks": {"budget": 8}},
    "balanced": {"data": {"global_batch_size": 4, "per_device_batch_size": 2, "balance_scanners": True, "max_samples": 5}},
    "short": {"steps": 2},
}  # fmt: skip


RARELY = {*SOUND} - {"vjepa2", "data2vec", "whitened", "short"}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in RARELY)) for kind in SOUND])
def test_sound_runs_raise_no_alarm(store, tmp_path, kind):
    assert trained(store, tmp_path / "run", **{"log_every_steps": 5} | SOUND[kind]) == ([], None)


def test_a_feed_knows_copies_of_a_volume_from_mistakes(tmp_path):
    """A store may hold the same voxels twice: that is said of the data, not of the loader."""
    first = {}
    store = small_store(tmp_path / "prepared", lambda seed, eye: first.setdefault("eye", eye) if seed < 6 else eye)
    assert trained(store, tmp_path / "run") == ([], None)
    assert feed.digest(np.array([1, 2])) != feed.digest(np.array([2, 1]))
