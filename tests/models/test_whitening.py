"""Whitened goals: every direction counts the same, whatever the micro-batch, and nothing is learned from held-out
volumes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.errors import ConfigError
from octfm.models.objectives.jepa import JEPA, JEPAConfig
from octfm.models.objectives.objective import View
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import TokenGrid, TokenIndex, ViTConfig
from octfm.models.whitening import Whitening
from octfm.pretraining.settings import load_config

WIDTH = 24


def features(seed: int) -> list[torch.Tensor]:
    """Two levels of correlated features [B, M, D] whose directions differ by three orders of magnitude in variance."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)))[0]
    scale = torch.logspace(0, -1.5, WIDTH)
    return [3.0 * level + torch.randn(2, 600, WIDTH, generator=generator) * scale @ mixing for level in (1, 2)]


def test_goals_are_decorrelated_with_unit_variance():
    whitening = Whitening(levels=2, width=WIDTH, shrinkage=1e-4)
    for seed in range(20):
        whitening(features(seed), gather=True)
        whitening.update()
    goals = whitening(features(99), gather=False)
    assert goals.shape == (2, 600, 2 * WIDTH)
    for level in goals.flatten(0, 1).split(WIDTH, dim=1):
        torch.testing.assert_close(torch.cov(level.T), torch.eye(WIDTH), atol=0.2, rtol=0)
        torch.testing.assert_close(level.mean(0), torch.zeros(WIDTH), atol=0.15, rtol=0)


def test_shrinkage_keeps_noise_from_being_blown_up():
    """A direction without variance stays without, instead of being divided by zero."""
    whitening = Whitening(levels=1, width=WIDTH)
    dead = features(0)[0].clone()
    dead[..., 5] = 1.0
    for _ in range(3):
        whitening([dead], gather=True)
        whitening.update()
    goals = whitening([dead], gather=False)
    assert torch.isfinite(goals).all() and goals.std(dim=(0, 1)).max() < 1.5


@settings(max_examples=20)
@given(split=st.integers(1, 599))
def test_how_a_batch_is_split_changes_nothing(split):
    whole, parts = Whitening(2, WIDTH), Whitening(2, WIDTH)
    for seed in range(3):
        levels = features(seed)
        whole(levels, gather=True)
        parts([f[:, :split] for f in levels], gather=True)
        parts([f[:, split:] for f in levels], gather=True)
        whole.update()
        parts.update()
    torch.testing.assert_close(whole.mean_LD, parts.mean_LD, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.moment_LDD, parts.moment_LDD, rtol=1e-4, atol=1e-4)


def build() -> tuple[JEPA, torch.Tensor, TokenIndex]:
    torch.manual_seed(0)
    grid = TokenGrid((2, 3, 4), (0.4, 0.08, 0.25))
    model = JEPA(
        JEPAConfig(target_levels=2, target_norm="whiten"),
        ViTConfig(patch_size=(2, 2, 2), width=24, depth=2, heads=2),
        PredictorConfig(width=24, depth=1, heads=2),
        grid,
    )
    kept = torch.arange(12).repeat(3, 1)
    index = TokenIndex(kept, torch.arange(5).repeat(3, 1), torch.arange(6, 11).repeat(3, 1))
    return model, torch.randn(3, 12, 8), index


def test_moments_come_from_training_alone_and_travel_in_the_state():
    model, patches, index = build()
    assert model.whitening is not None
    with torch.no_grad():
        model([View(patches, patches, index)], 0.5)
    model.update_target(0.9)
    assert int(model.whitening.updates) == 0, "a validation pass taught the goals something"
    model([View(patches, patches, index)], 0.5)
    model.update_target(0.9)
    assert int(model.whitening.updates) == 1
    other, _, _ = build()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(
        other([View(patches, patches, index)], 0.5).loss,
        model([View(patches, patches, index)], 0.5).loss,
        rtol=0,
        atol=0,
    )


def test_a_batch_does_not_influence_its_own_goals():
    """Statistics of the current batch in its own goals would be a leak from one volume to another."""
    model, patches, index = build()
    other = patches.clone()
    other[1:] = 5.0
    a, b = (model([View(x, x, index)], 0.5).masked_goal_BTD[0] for x in (patches, other))
    torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_whitening_is_for_vjepa2_alone():
    with pytest.raises(ConfigError, match="target_norm belongs to"):
        load_config("data2vec_prototype", ["objective.target_norm=whiten"])
