"""Pretraining runs of a few seconds: their settings, what they wrote, and whether two are the same."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from octfm.config import load
from octfm.pretraining import preflight
from octfm.pretraining import pretrain as loop
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import PretrainConfig
from octfm.run import checkpoint
from octfm.run.tracking import read_metrics

TINY = {
    "steps": 8,
    "precision": "fp32",
    "seed": 3,
    "data": {"global_batch_size": 4, "per_device_batch_size": 2},
    "model": {"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2},
    "predictor": {"width": 24, "depth": 1, "heads": 1},
    "masks": {"budget": 64},
    "schedule": {"base_lr": 3e-3, "warmup_ratio": 0.1},
    "augment": {"axial_shift": 4},
    "log_every_steps": 1,
    "validate_every_steps": 4,
    "ckpt_every_steps": 3,
}


def config(**changes) -> PretrainConfig:
    return load(PretrainConfig, {**TINY, **changes})


def quick_pretrain(*args: Any, **kwargs: Any) -> Path:
    """`pretrain` without the checks before step 0: they take three quarters of a tiny run, and have their own tests."""
    with patch.object(preflight, "checks", lambda *_, **__: []):
        return pretrain(*args, **kwargs)


def import_all_of_a_step() -> None:
    """What torch imports at the first step takes seconds: before forking it takes them once."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True).step()


def quiet(_: str) -> None:
    pass


def rows(run, kind="train"):
    return [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == kind]


def final(run):
    return checkpoint.load(checkpoint.newest(run))


TIMES = {"volumes_per_s", "data_wait_share", "peak_memory_gb", "time"}


def timeless(run):
    """All rows but what is said about speed, which no two runs share."""
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row.get("what") != "data"]
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


class Killed(BaseException):
    """As if the process died here."""


def killed_at(number: int, at: pytest.MonkeyPatch, owner: object, name: str) -> None:
    """The process dies in this call of `owner.name`."""
    _at_call(number, at, owner, name, Mock(side_effect=Killed))


def killed_by(words: str) -> Callable[[str], None]:
    """An echo in which the process dies at the first line with these words."""

    def echo(line: str) -> None:
        if words in line:
            raise Killed

    return echo


def interrupted_after(steps: int, at: pytest.MonkeyPatch) -> None:
    """As if SIGTERM came during step number `steps`."""
    _at_call(steps, at, loop, "accumulate", lambda: os.kill(os.getpid(), signal.SIGTERM))


def _at_call(number: int, at: pytest.MonkeyPatch, owner: object, name: str, happens: Callable[[], object]) -> None:
    whole, calls = getattr(owner, name), []

    def counted(*args, **kwargs):
        calls.append(1)
        if len(calls) == number:
            happens()
        return whole(*args, **kwargs)

    at.setattr(owner, name, counted)


def tiny(*extra):
    import yaml

    def flat(values, prefix=""):
        for key, value in values.items():
            if isinstance(value, dict):
                yield from flat(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...').strip().splitlines()[0]}"

    return [*flat(TINY), *extra]


def assert_same_run(one: Path, other: Path) -> None:
    """Weights, optimizer, teacher, run state and every metric, bit for bit."""
    assert_same_weights(one, other)
    assert timeless(one) == timeless(other)


def assert_same_weights(one: Path, other: Path) -> None:
    a, b = final(one), final(other)
    assert a["step"] == b["step"] and a["state"] == b["state"]
    assert a["model"].keys() == b["model"].keys()
    for name, tensor in a["model"].items():
        assert torch.equal(tensor, b["model"][name]), name
    for x, y in zip(a["optimizer"]["state"].values(), b["optimizer"]["state"].values(), strict=True):
        assert x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)


def assert_same_training(one: Path, other: Path) -> None:
    """Networks and optimizer, bit for bit; the key of a run's hashes is its own."""
    a, b = final(one), final(other)
    assert a["step"] == b["step"]
    torch.testing.assert_close(a["model"], b["model"], rtol=0, atol=0)
    torch.testing.assert_close(a["optimizer"]["state"], b["optimizer"]["state"], rtol=0, atol=0)


def assert_nearly_the_same(found: dict, expected: dict) -> None:
    """Weights within a tolerance but for one in a thousand: AdamW moves a weight by its gradient's sign, which rounding
    decides where the gradient is nearly zero."""
    assert found.keys() == expected.keys()
    apart = [(~torch.isclose(found[name], tensor, rtol=1e-3, atol=2e-5)).flatten() for name, tensor in expected.items()]
    share = torch.cat(apart).float().mean()
    assert share < 1e-3, f"{share:.2%} of the weights differ"
