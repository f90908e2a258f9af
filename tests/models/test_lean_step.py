"""A step is lean: few operators, and angles computed once."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from octfm.models.objectives.jepa import JEPA, JEPAConfig
from octfm.models.objectives.objective import View
from octfm.models.predictor import PredictorConfig
from octfm.models.vit3d import TokenGrid, TokenIndex, ViTConfig
from octfm.pretraining.learner import optimizer_groups

GRID = TokenGrid((4, 6, 6), (0.375, 0.083, 0.25))
"""Of a [16, 96, 96] volume: how many operators there are does not depend on how many tokens."""


class Counter(TorchDispatchMode):
    """Counts ATen operators, and oneDNN's, that are not views, by name."""

    def __init__(self):
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("aten", "mkldnn") and not func.is_view:
            self.counts[func.overloadpacket.__name__] = self.counts.get(func.overloadpacket.__name__, 0) + 1
        return func(*args, **(kwargs or {}))


def count_step() -> dict[str, int]:
    """Operators of the second step, forward pass through EMA, of ViT-S/12 in bfloat16 on one volume."""
    torch.manual_seed(0)
    model = JEPA(JEPAConfig(), ViTConfig(), PredictorConfig(), GRID)
    decayed, free = optimizer_groups(model)
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": free, "weight_decay": 0.0}], fused=True)
    order = torch.randperm(GRID.size).unsqueeze(0)
    context, target = order[:, : int(0.4 * GRID.size)].sort().values, order[:, int(0.4 * GRID.size) :].sort().values
    index = TokenIndex(torch.arange(GRID.size).unsqueeze(0), context, target)
    patches = torch.randn(1, GRID.size, 1024)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16):
            output = model([View(patches, patches, index)], 0.5)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(decayed + free, 1.0)
        optimizer.step()
        model.update_target(0.99)

    step()  # the first creates the optimizer's state
    with Counter() as counter:
        step()
    return counter.counts


@pytest.mark.slow
def test_a_step_of_depth_12_takes_at_most_2000_operators():
    counts = count_step()
    assert sum(counts.values()) <= 2000, counts
    assert counts["cos"] == counts["sin"] == 1, "angles are computed once per step"
