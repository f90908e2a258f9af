"""What V-JEPA 2.1 adds: near context counts more, several levels are read, two sets of masks in a step, and tables of
positions that do not decay."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from octfm.errors import ConfigError, Preempted
from octfm.models.objectives.jepa import JEPA, JEPAConfig, nearness
from octfm.models.objectives.objective import View
from octfm.models.predictor import PredictorConfig, predictor_table, seen_and_answers
from octfm.models.token_map import BACKGROUND, TISSUE
from octfm.models.vit3d import TokenGrid, TokenIndex, ViTConfig, take_tokens
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner, optimizer_groups
from octfm.pretraining.masks import MaskConfig, sample_masks
from octfm.pretraining.monitors.leaks import leak
from octfm.pretraining.step import accumulate
from octfm.run import checkpoint
from octfm.run.runtime import Runtime
from octfm.store.loader import Loader
from octfm.store.selection import select
from support.tiny_runs import assert_same_run, config, interrupted_after, quick_pretrain, quiet

GRID = TokenGrid((4, 5, 6), (0.4, 0.1, 0.3))
MODEL = ViTConfig(patch_size=(2, 8, 8), width=48, depth=4, heads=4)
PREDICTOR = PredictorConfig(width=24, depth=1, heads=2)
ALL = {"target_levels": 4, "fuse_levels": True, "context_nearness": True}
HOST = Runtime(torch.device("cpu"))


def build(**settings):
    torch.manual_seed(0)
    return JEPA(JEPAConfig(**settings), MODEL, PREDICTOR, GRID)


def random_index(seed=0):
    """Two volumes with other kept tokens, 7 of them context and 9 targets."""
    rng = np.random.default_rng(seed)
    kept = [np.sort(rng.permutation(GRID.size)[:40]) for _ in range(2)]
    places = [rng.permutation(40)[:16] for _ in range(2)]
    return TokenIndex(
        torch.tensor(np.stack(kept)),
        torch.tensor(np.stack([np.sort(p[:7]) for p in places])),
        torch.tensor(np.stack([np.sort(p[7:]) for p in places])),
    )


def random_patches():
    return torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(0))


def brute_force(index):
    kept = index.kept.numpy()
    where = np.stack(np.unravel_index(kept, GRID.shape), -1).astype(float)
    rows = zip(where, index.context.numpy(), index.target.numpy(), strict=True)
    near = [[min(np.linalg.norm(w[c] - w[t]) for t in target) for c in context] for w, context, target in rows]
    return 1 / np.sqrt(np.array(near))


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_context_are_those_of_a_search_over_all_pairs(seed):
    index = random_index(seed)
    expected = brute_force(index)
    assert len(np.unique(expected.round(6))) > 1, "the places are not all alike"
    np.testing.assert_allclose(nearness(GRID, index).numpy(), expected, rtol=1e-6)


def test_only_the_context_loss_is_weighted_and_the_reported_one_is_not():
    x, index = random_patches(), random_index()
    plain, weighted = (build(context_nearness=near)([View(x, x, index)], 0.7) for near in (False, True))
    assert torch.equal(plain.masked_loss_B, weighted.masked_loss_B)
    torch.testing.assert_close(plain.context_loss_B, weighted.context_loss_B)
    model = build()
    _, answers = seen_and_answers(model.encoder, model.predictor, x, index)
    error = (answers[:, :7] - plain.context_goal_BCD).abs().mean(2)
    expected = plain.masked_loss_B.mean() + 0.7 * (error * torch.tensor(brute_force(index)).float()).mean()
    torch.testing.assert_close(weighted.loss, expected)
    assert not torch.isclose(weighted.loss, plain.loss)


def rotary_of(model, index):
    from octfm.models.vit3d import rotary

    return rotary(GRID, index.kept, model.encoder.head_width)


@pytest.mark.parametrize("settings", [{}, ALL], ids=["plain", "all"])
def test_the_order_of_tokens_changes_nothing(settings):
    """Context and targets are sets: a weight or a level that went to the wrong token would show here."""
    x, index, order = random_patches(), random_index(), np.random.default_rng(1)
    mixed = replace(
        index,
        context=index.context[:, torch.tensor(order.permutation(7))],
        target=index.target[:, torch.tensor(order.permutation(9))],
    )
    model = build(**settings)
    a, b = (model([View(x, x, i)], 0.7).loss for i in (index, mixed))
    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("level", range(4))
def test_the_predictor_reads_every_level_of_the_encoder_that_learns(level):
    """A fusion that lets one level through gives the predictor that level, normalised."""
    model, x, index = build(target_levels=4, fuse_levels=True), random_patches(), random_index()
    model.fusion.layers = torch.nn.Identity()
    width = MODEL.width
    model.fusion.forward = lambda tokens: tokens[..., level * width : (level + 1) * width]
    table = rotary_of(model, index)
    _, answers = seen_and_answers(model.encoder, model.predictor, x, index, table, model._read)
    seen = model.encoder.hidden(take_tokens(x, index.context), torch.gather(index.kept, 1, index.context))[level]
    assert model.levels == [0, 1, 2, 3]
    places = torch.cat((index.context, index.target), 1)
    expected = model.predictor(
        F.layer_norm(seen, (width,)), 9, predictor_table(model.predictor, model.encoder, table, index, places)
    )
    torch.testing.assert_close(answers, expected)


def test_all_levels_are_supervised_and_reach_the_encoder():
    model, x, index = build(**ALL), random_patches(), random_index()
    output = model([View(x, x, index)], 0.5)
    assert output.masked_goal_BTD.shape == (2, 9, 4 * MODEL.width)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert name.startswith("target_encoder") or parameter.grad.abs().sum() > 0, name


def test_two_sets_of_masks_share_the_teacher_and_every_token_counts_the_same():
    model, x = build(**ALL), random_patches()
    one = random_index(0)
    two = replace(one, context=one.target[:, :4], target=one.context)
    calls, hidden = [], model.target_encoder.hidden
    model.target_encoder.hidden = lambda *a, **k: calls.append(1) or hidden(*a, **k)
    both = model([View(x, x, one), View(x, x, two)], 0.5)
    assert len(calls) == 1
    a, b = (model([View(x, x, index)], 0.5) for index in (one, two))
    torch.testing.assert_close(both.masked_loss_B, (9 * a.masked_loss_B + 7 * b.masked_loss_B) / 16)
    torch.testing.assert_close(both.context_loss_B, (7 * a.context_loss_B + 4 * b.context_loss_B) / 11)
    assert torch.equal(both.masked_goal_BTD, torch.cat((a.masked_goal_BTD, b.masked_goal_BTD), 1))


# Masks
# -------------------------------------------------------------------------------------------------------------------

LARGE = (0.7, 0.85, 0.15)


def maps(volumes=6):
    found = np.full((volumes, 12, 10, 12), BACKGROUND, np.uint8)
    found[:, :, 4:7] = TISSUE
    return found


def draws(settings, volumes=6):
    return sample_masks(settings, maps(volumes), [np.random.default_rng((0, i)) for i in range(volumes)])


def test_the_second_set_has_the_same_tokens_and_leaves_the_first_as_it_was():
    settings = MaskConfig(budget=432, large_blocks=LARGE)
    masks, alone = draws(settings), draws(settings.model_copy(update={"large_blocks": None}))
    assert alone.large is None
    for name in ("kept", "context", "target"):
        np.testing.assert_array_equal(getattr(masks, name), getattr(alone, name))
    large = masks.large
    assert np.array_equal(large.kept, masks.kept) and not np.array_equal(large.target, masks.target)
    assert large.target.shape == (6, int(0.85 * 432)) and large.context.shape == (6, int(0.15 * 432))
    for context, target in zip(large.context, large.target, strict=True):
        assert not np.intersect1d(context, target).size


def test_what_large_blocks_hide_lies_further_from_what_is_seen():
    settings = MaskConfig(
        budget=432, mask_ratio=0.6, context_ratio=0.35, block_area=0.04, large_blocks=(0.55, 0.6, 0.35)
    )
    masks = draws(settings, 20)

    def distance(found):
        where = [np.stack(np.unravel_index(x, (12, 10, 12)), -1) for x in (found.target, found.context)]
        pairs = np.linalg.norm(where[0][:, :, None] - where[1][:, None], axis=-1)
        return pairs.min(2).mean()

    assert distance(masks.large) > 1.3 * distance(masks)


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"masks": {"large_blocks": [0.7, 0.9, 0.2]}}, "sum is at most 1"),
        ({"masks": {"large_blocks": [1.7, 0.8, 0.2]}}, "block_area"),
        ({"masks": {"large_blocks": [0.7, 0.8, 0.2]}, "objective": {"name": "mae"}}, "takes one set of masks"),
        ({"objective": {"fuse_levels": True}}, "more than one of objective.target_levels"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, says):
    with pytest.raises(ConfigError, match=says):
        config(**settings)


# Runs
# -------------------------------------------------------------------------------------------------------------------

RUN = {
    "objective": {"target_levels": 2, "fuse_levels": True, "context_nearness": True},
    "masks": {"budget": 64, "large_blocks": [0.7, 0.8, 0.2]},
    "schedule": {"base_lr": 3e-3, "warmup_ratio": 0.1, "ema_base": 0.999},
}


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_run(store, tmp_path, monkeypatch):
    whole = quick_pretrain(config(**RUN), store, tmp_path / "whole", echo=quiet)
    with monkeypatch.context() as patch:
        interrupted_after(4, patch)
        with pytest.raises(Preempted):
            quick_pretrain(config(**RUN), store, tmp_path / "run", echo=quiet)
    assert_same_run(quick_pretrain(config(**RUN), store, tmp_path / "run", echo=quiet), whole)


def first_step(store, settings, edit=lambda learner: None):
    learner = Learner(settings, store.preprocessing, HOST)
    learner.set_rates(1e-3, 0.5, 0.999)
    edit(learner)
    loader = Loader(store, select(store, "train"), settings.data.global_batch_size, settings.seed)
    with loader:
        batch = loader.batches(0)
    return learner, batch


def test_each_set_of_masks_is_checked_for_leaks_by_itself(store):
    """Tokens that one set hides are context of the other: gradients there are no leak. A context that holds its own
    targets is one, in either set."""
    learner, batch = first_step(store, config(**RUN))
    micro_steps = accumulate(learner, batch, 0.5, everything=True)
    assert float(micro_steps[0].leak) == 0
    inputs = make_inputs(learner.config, learner.preprocessing, HOST, batch)
    small, large = inputs.views
    assert torch.equal(small.index.kept, large.index.kept)
    for view in (small, large):
        view.patches_BKP.requires_grad_()
    seeing = [
        small,
        large._replace(index=replace(large.index, context=torch.cat((large.index.context, large.index.target), 1))),
    ]
    learner.model(seeing, 0.5).loss.backward()
    assert float(leak(learner, [small, large])) > 0
    assert float(leak(learner, [small])) == 0


def test_validation_uses_both_sets(store):
    _, batch = first_step(store, config(**RUN))
    inputs = make_inputs(config(**RUN), store.preprocessing, HOST, batch, augmented=False)
    assert len(inputs.views) == 2 and inputs.masks.large is not None


def test_an_update_that_is_not_made_changes_nothing(store):
    """Neither by decay nor by the average of a teacher that lags behind."""
    learner, _ = first_step(store, config())
    with torch.no_grad():
        learner.model.encoder.norm.weight.add_(1)
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    for made in (False, True):
        for p in learner.trained:
            p.grad = torch.ones_like(p)
        learner.update(torch.tensor(made))
        assert all(float(state["step"]) == made for state in learner.optimizer.state.values())
        same = {name: torch.equal(tensor, before[name]) for name, tensor in learner.model.state_dict().items()}
        assert (
            all(same.values())
            if not made
            else not any(same[f"encoder.{n}"] for n, _ in learner.model.encoder.named_parameters())
        )


@pytest.mark.parametrize(("allowed", "size"), [(None, 6), (6, 6), (5, 3), (4, 3), (2, 2), (1, 1)])
def test_every_pass_has_the_same_number_of_volumes_whatever_memory_allowed(store, allowed, size):
    learner, _ = first_step(store, config(data={"global_batch_size": 6, "per_device_batch_size": 6}))
    if allowed is not None:
        learner.state = replace(learner.state, micro_batch=allowed)
    assert learner.micro_batch == size


def test_gradients_are_those_of_the_mean_loss_whatever_the_size_of_a_pass(store):
    """AdamW hides a factor, the norm that clips and is judged does not."""
    learner, batch = first_step(store, config(data={"global_batch_size": 4, "per_device_batch_size": 4}))
    gradients, losses = [], []
    for size in (4, 2, 1):
        learner.state = replace(learner.state, micro_batch=size)
        results = accumulate(learner, batch, 0.5, everything=False)
        losses.append(torch.stack([r.loss for r in results]).mean())
        gradients.append([p.grad.clone() for p in learner.trained])
        assert len(results) == 4 // size
        torch.testing.assert_close(losses[-1], losses[0])
        torch.testing.assert_close(gradients[-1], gradients[0], rtol=1e-3, atol=1e-6)


def test_networks_that_are_only_averaged_are_not_trained():
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 2) for name in ("encoder", "target_head", "head_of_target_")})
    decayed, free = optimizer_groups(model)
    assert [id(p) for p in decayed] == [id(model[name].weight) for name in ("encoder", "head_of_target_")]
    assert [id(p) for p in free] == [id(model[name].bias) for name in ("encoder", "head_of_target_")]


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_decay_spares_tables_of_positions_and_nothing_else_that_it_took(store, positions):
    settings = config(model={"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2, "positions": positions})
    learner, _ = first_step(store, settings)
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for p in learner.trained:
        p.grad = torch.zeros_like(p)
    learner.update(torch.tensor(True))
    for name, p in learner.model.encoder.named_parameters():
        shrunk = p.ndim >= 2 and name != "position"
        expected = before[f"encoder.{name}"] * (1 - 1e-3 * 0.5 if shrunk else 1)
        torch.testing.assert_close(p, expected, msg=name)
    assert [len(group["params"]) for group in learner.optimizer.param_groups] == [
        len(learner.decayed),
        len(learner.free),
    ]


@pytest.mark.parametrize("began_before", [True, False])
def test_a_run_keeps_the_rule_of_decay_that_it_began_with(store, tmp_path, began_before):
    """Checkpoints from before tables of positions were spared do not name a rule."""
    settings = config(model={"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2, "positions": "learned"})
    learner, _ = first_step(store, settings)
    record = {"git": None, "environment": {}}
    content = learner.content(record, store.fingerprint, {"key": "00", "hashes": []})
    if began_before:
        del content["tables_decay"]
    resumed, _ = first_step(store, settings)
    resumed.restore(checkpoint.load(checkpoint.write(tmp_path, 0, content)), tmp_path)
    resumed.set_rates(1e-3, 0.5, 0.999)
    table = resumed.model.encoder.position
    before = table.detach().clone()
    for p in resumed.trained:
        p.grad = torch.zeros_like(p)
    resumed.update(torch.tensor(True))
    torch.testing.assert_close(table.detach(), before * (1 - 1e-3 * 0.5 if began_before else 1))
    # And so do its own checkpoints.
    assert resumed.content(record, store.fingerprint, {})["tables_decay"] is began_before


@pytest.mark.slow
def test_a_step_is_one_program_without_host_reads(store):
    """fullgraph: whatever depends on data or reads the device ends in an error."""
    learner, batch = first_step(store, config(**RUN))
    views = make_inputs(learner.config, learner.preprocessing, HOST, batch).views
    weight = torch.tensor(0.5)
    program = torch.compile(learner.model, fullgraph=True, dynamic=False, backend="eager")
    torch.testing.assert_close(program(views, weight).loss, learner.model(views, weight).loss)
