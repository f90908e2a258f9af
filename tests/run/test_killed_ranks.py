"""Two ranks that are killed again and again, also in the middle of writing checkpoints that no rank holds alone,
lose nothing."""

import random
import shutil
import time

import pytest

from support.ranks import codes
from support.tiny_runs import TINY, assert_same_weights, timeless

SMALL = TINY | {
    "data": {"global_batch_size": 4, "per_device_batch_size": 1},
    "model": {**TINY["model"], "width": 24},
    "validate_every_steps": 10,
}


def kill_again_and_again(
    ranks, store, folder, parallel: str, steps: int, kills: int, saves: int, seed: int, operations: int = 250
) -> tuple[int, int]:
    """SIGKILL to one rank or both: `saves` times at a random one of the first `operations` of saving, else at a random
    time.

    A run that finishes before its kill must equal one that was never killed, as the last one must; the next begins anew.

    Returns how many kills hit, and how many of them left a checkpoint half written. A rank that lives on alone must
    say what happened.
    """
    settings = SMALL | {"steps": steps, "runtime": {"parallel": parallel, "timeout_s": 60}}
    out, whole, rng = folder / "run", folder / "whole", random.Random(seed)
    begun = time.monotonic()
    assert codes(ranks(2, store.path, whole, settings)) == [0, 0]
    patience = 2.5 * (time.monotonic() - begun) / max(2, kills)
    plan = ["save"] * saves + ["time"] * (kills - saves)
    rng.shuffle(plan)
    hit = half = 0
    for kind in plan:
        victims = rng.choice([[0], [1], [0, 1]])
        if kind == "save":
            # Without shards only rank 0 writes.
            on = 0 if parallel == "ddp" else victims[0]
            ended = ranks(2, store.path, out, settings, fault="kill-saving", on=on, at=rng.randrange(1, operations))
        else:
            ended = ranks(2, store.path, out, settings, kill_after=rng.uniform(0, 1.0 + patience), killed=victims)
        killed = -9 in codes(ended)
        hit += killed
        half += killed and bool(list((out / "checkpoints").glob("*.partial")))
        for rank in ended:
            alone = rank.code == 1 and (
                "has gone" in rank.said or "did not find each other" in rank.said or "(elsewhere)" in rank.said
            )
            assert rank.code in (0, -9) or alone, rank
        if codes(ended) == [0, 0]:
            assert_same_runs(out, whole)
            shutil.rmtree(out)
    assert codes(ranks(2, store.path, out, settings)) == [0, 0]
    assert_same_runs(out, whole)
    return hit, half


def assert_same_runs(out, whole) -> None:
    assert_same_weights(out, whole)
    assert timeless(out) == timeless(whole), "no metric is missing or told twice"


@pytest.mark.slow
def test_F18_a_rank_killed_in_a_sharded_save_changes_nothing(ranks, store, tmp_path):
    hit, _ = kill_again_and_again(ranks, store, tmp_path, "fsdp", steps=12, kills=2, saves=2, seed=1, operations=8)
    assert hit == 2


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_F18_fifty_kills_of_two_ranks_change_nothing(ranks, store, tmp_path, parallel):
    """Twenty-five with whole checkpoints, twenty-five with shards."""
    hit, half = kill_again_and_again(ranks, store, tmp_path, parallel, steps=150, kills=25, saves=13, seed=2)
    print(f"{parallel}: {hit} of 25 kills hit, {half} left a checkpoint half written")
    assert hit >= 20 and half >= 5
