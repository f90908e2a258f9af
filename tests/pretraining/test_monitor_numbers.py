"""Numbers that monitors judge by are those of a plain calculation: leaks, losses by scanner, seconds, batches, audits."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from octfm.models.objectives.objective import View
from octfm.models.vit3d import TokenIndex
from octfm.pretraining.monitors import audit, feed, measure
from octfm.pretraining.monitors.leaks import leak
from octfm.store.loader import Batch


def test_a_leak_is_the_largest_gradient_of_a_hidden_voxel_in_any_view():
    learner: Any = SimpleNamespace(model=SimpleNamespace(hidden_from_encoder=lambda index: index.target))
    index = TokenIndex(torch.arange(5).expand(2, -1), torch.tensor([[0, 1]] * 2), torch.tensor([[2, 4]] * 2))
    views = [View(torch.zeros(2, 5, 4), torch.zeros(2, 5, 4), index) for _ in range(2)]
    found = []
    for at in ((1, 1, 0), (1, 4, 3)):
        gradient = torch.zeros(2, 5, 4)
        gradient[at] = -0.5
        views[0].patches_BKP.grad, views[1].patches_BKP.grad = gradient, torch.zeros(2, 5, 4)
        found.append(float(leak(learner, views)))  # pyright: ignore[reportArgumentType]
    assert found == [0, 0.5], "a token that the encoder sees has one"


def test_a_logged_row_has_losses_over_baselines_of_their_own_goals():
    """Of every scanner its own; losses and masks are means over ranks, of volumes of different sizes of goals."""
    model: Any = SimpleNamespace(baseline=lambda goal_BMD: goal_BMD.mean((1, 2)))
    masked, context = torch.tensor([1.0, 2, 3, 6]), torch.tensor([1.0, 1, 1, 5])
    goals = [torch.tensor(mean).reshape(4, 1, 1).expand(4, 3, 2) for mean in ([2.0, 2, 4, 8], [4.0, 4, 4, 8])]
    tissue = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    per_rank = np.array([[1.0, 0.1, 0.2, 0.3, 7.0], [3.0, 0.3, 0.4, 0.5, 7.0]])
    row = measure._row(model, [masked, context, *goals, tissue], np.array(["b", "a", "b", "a"]), per_rank)
    assert row["by_scanner"] == pytest.approx({"a": 8 / 10, "b": 4 / 6})
    expected = {"loss": 2, "masked_loss": 3, "masked_over_baseline": 12 / 16, "context_loss": 2,
                "context_over_baseline": 8 / 20, "dead_targets": 0.2, "tissue_dropped": 0.3, "tokens_repeated": 0.4,
                "tissue_tokens": 40}  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)


def test_a_window_counts_volumes_of_all_ranks_and_the_longest_wait_and_begins_anew(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    runtime: Any = SimpleNamespace(peak_memory_gb=lambda: 2.0, exchange=lambda own: np.stack([own, own * 3]))
    window = measure.Window()
    for _ in range(2):
        for wait_s in (0.25, 0.5):
            batch: Any = SimpleNamespace(index=np.arange(4), wait_s=wait_s)
            window.add(batch, 2)
        now[0] += 10.0
        row = window.close(runtime)
        found = row["volumes_per_s"], row["data_wait_share"], row["peak_memory_gb"]
        assert found == pytest.approx((1.6, 0.225, 6.0))


def fed_by(feeder, at, rows, voxels, index=None, position=None):
    """Numbers of rank 1 of 2, whose share is the second half of the global batch of step `at`."""
    share = len(rows) // 2
    own = np.array(rows[share:])
    batch = Batch(
        np.stack([voxels[row] for row in own]), np.zeros(0), np.zeros(0), index=own if index is None else np.array(index),
        position=at * len(rows) + share + np.arange(share) if position is None else np.array(position),
    )  # fmt: skip
    return feeder.inspect(at, np.array(rows), False, batch, [], closely=False)[1:5]


def feeder_of(checksums="abcdef"):
    rows = [SimpleNamespace(checksum=own) for own in checksums]
    loader = SimpleNamespace(rows=np.arange(6), by_turns=False)
    runtime = SimpleNamespace(world=2, rank=1)
    return feed.Feed(None, SimpleNamespace(rows=rows), loader, runtime)  # pyright: ignore[reportArgumentType]


def test_a_feed_counts_what_is_misplaced_stale_repeated_in_an_epoch_and_twice_in_a_batch():
    """Six volumes in batches of four: epochs end in the middle of a batch, and only the middle of a volume is looked
    at."""
    voxels = np.random.default_rng(0).integers(0, 255, (6, 3, 40, 4), np.uint8)
    voxels[4:, 1] = 0  # two of them are blank there
    voxels[:, 0] = voxels[0, 0]
    feeder = feeder_of()
    steps = [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5], [5, 0, 1, 1]]
    assert [fed_by(feeder, at, rows, voxels) for at, rows in enumerate(steps)] == [[0, 0, 0, 0]] * 3 + [[0, 0, 1, 0]]
    feeder = feeder_of()
    assert [fed_by(feeder, at, rows, voxels) for at, rows in enumerate([[0, 1, 4, 5], [2, 3, 5, 4]])] == [
        [0, 0, 0, 0]
    ] * 2
    for index, position, misplaced in (([2, 4], None, 1), (None, [2, 4], 1), ([3, 2], [3, 2], 2), ([2, 3], [2, 3], 0)):
        assert fed_by(feeder_of(), 0, [0, 1, 2, 3], voxels, index, position)[0] == misplaced
    for at, stale in ((0, 1), (1, 0)):  # an epoch may begin with the volumes that the last one ended with
        feeder = feeder_of()
        assert [fed_by(feeder, at + n, [0, 1, 2], voxels)[1] for n in (0, 1)] == [0, stale]
    for checksums, stale, twice in (("abcdef", 1, 1), ("abacac", 0, 0)):
        same, feeder = np.broadcast_to(voxels[:1], voxels.shape), feeder_of(checksums)
        found = [fed_by(feeder, at, rows, same) for at, rows in enumerate([[1, 1, 0, 2], [3, 3, 2, 4]])]
        assert (found[0][3], found[1][1]) == (twice, stale), "copies of a volume are no mistake"


def test_a_feed_of_groups_that_take_turns_may_repeat_a_volume():
    feeder, voxels = feeder_of(), np.random.default_rng(0).integers(0, 255, (6, 3, 40, 4), np.uint8)
    assert [fed_by(feeder, at, rows, voxels)[1] for at, rows in enumerate([[0, 1], [1, 0]])] == [0, 1]
    feeder = feeder_of()
    feeder.loader.by_turns = True
    assert [fed_by(feeder, at, rows, voxels) for at, rows in enumerate([[0, 1], [1, 0]])] == [[0, 0, 0, 0]] * 2
    assert [fed_by(feeder, 0, [0, 1, 2, 2], voxels), fed_by(feeder, 1, [2, 0, 1, 3], voxels)] == [[0, 0, 0, 0]] * 2


def test_a_feed_compares_volume_after_volume_with_the_store_and_masks_of_three_steps():
    feeder = feeder_of()
    feeder.store.holds = lambda row, one: row != 4
    batch = Batch(np.zeros((3, 1, 1, 1), np.uint8), np.zeros((3, 1)), np.zeros((3, 1)), index=np.array([2, 4, 5]), position=np.arange(3))  # fmt: skip
    assert [feeder._foreign(batch) for _ in range(4)] == [-1, 4, -1, -1]

    def step(target, tokens=40):
        masks = SimpleNamespace(kept=[np.zeros(9), np.arange(tokens)], target=np.array(target))
        return feeder._fixed([SimpleNamespace(masks=masks)])  # pyright: ignore[reportArgumentType]

    assert [step(target) for target in (1, 2, 2, 2, 2, 3)] == [False, False, False, True, True, False]
    assert not any(step(5, tokens=20) for _ in range(4)), "few tokens are the same by chance"


def test_a_feed_names_the_rank_and_the_most_general_fault():
    sound = [7.0, 0, 0, 0, 0, -1, 0]
    assert feed.finding(np.array([sound] * 3), np.arange(6)) is None
    for column, value, what, says in (
        (0, 8.0, "data order", "rank 2 draws"), (1, 3, "data order", "rank 2 got 3 volumes"), (2, 1, "same batch", ""),
        (3, 2, "volume repeated", "2 of 6"), (4, 3, "volume repeated", "3 of 6"), (5, 4, "wrong volume", ""),
        (6, 1, "fixed masks", ""),
    ):  # fmt: skip
        fed = np.array([sound] * 3)
        fed[2, column] = value
        found = feed.finding(fed, np.arange(6))
        assert found is not None and found.what == what and says in found.sentence
        assert found.volumes == ((4,) if column == 5 else ())


def test_an_audit_is_summed_over_matrices_and_names_those_of_the_encoder_that_stand_still():
    sums = {name: np.ones(4) for name in audit.SUMS}
    sums |= {"passes_final": [4.0, 3, 0, 2], "final_final": [4.0, 2, 0, 4], "taken": [4.0, 2, 0, 1]}
    sums |= {"actual_ideal": [2.0, 2, 0, 0], "actual_actual": [4.0, 2, 0, 0], "ideal_ideal": [2.0, 2, 1e-15, 0.0]}
    sums |= {"moment_error": [0.1, 0.1, 0, 0], "moment_moment": [2.0, 2, 0, 1], "weights": [1.0, 1, 1, 1]}
    sums |= {"no_gradient": [0.0, 39, 41, 0], "still": [1.0, 2, 100, 0], "size": [100.0, 100, 100, 100]}
    table = torch.tensor(np.stack([sums[name] for name in audit.SUMS], 1))
    row = audit.summary(["encoder.a", "encoder.b", "encoder.c", "encoder.d"], table)
    expected = {"gradient_taken": 0.7, "gradient_agrees": 0.5, "moments_astray": np.sqrt(0.2 / 5), "untaught": 1,
                "weights_stuck": 103 / 400, "update_agrees": 4 / np.sqrt(24), "update_size": np.sqrt(6 / 4)}  # fmt: skip
    assert {name: row[name] for name in expected} == pytest.approx(expected)
    assert row["frozen"] == ["c"] and audit.summary(["a"] * 4, table)["frozen"] == []
    table[3, audit.SUMS.index("moment_error")] = 1.0
    assert audit.summary(["encoder.a", "b", "predictor.c", "encoder.d"], table)["frozen"] == ["d"]
