"""Fifty steps on CPU give the curve they have always given: a refactoring that changes the maths turns this red.

`PYTHONPATH=tests python tests/pretraining/test_golden_curve.py` writes the fixture anew; do so only for a change that is meant, and say so in the
commit.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from octfm.errors import Preempted
from support import FIXTURES
from support.small_store import small_store
from support.tiny_runs import config, interrupted_after, quick_pretrain, quiet, rows

FIXTURE = FIXTURES / "golden_curve.json"
TOLERANCE = 1e-3
"""Relative. One and two threads differ by 2e-6 after fifty steps."""


def trained(objective: str, folder: Path) -> Path:
    settings = config(steps=50, objective={"name": objective}, validate_every_steps=25, ckpt_every_steps=50)
    return quick_pretrain(settings, small_store(folder / "store"), folder / "run", "cpu", echo=quiet)


def curve(run: Path) -> dict[str, list[float]]:
    """Losses and gradient norms of every step."""
    return {name: [row[name] for row in rows(run)] for name in ("masked_loss", "context_loss", "grad_norm")}


OBJECTIVES = ("vjepa2", "data2vec", "mae")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_first_steps_give_the_curve_they_always_gave(objective, tmp_path, monkeypatch):
    """Twelve of the fifty below: warmup, the first updates of the teacher, and its first moments."""
    golden = json.loads(FIXTURE.read_text())[objective]
    interrupted_after(12, monkeypatch)
    with pytest.raises(Preempted):
        trained(objective, tmp_path)
    for name, values in curve(tmp_path / "run").items():
        assert values == pytest.approx(golden[name][:12], rel=TOLERANCE), name


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_fifty_steps_give_the_curve_they_always_gave(objective, tmp_path):
    """Which falls, in training and on held-out participants."""
    golden = json.loads(FIXTURE.read_text())[objective]
    run = trained(objective, tmp_path)
    for name, values in curve(run).items():
        assert values == pytest.approx(golden[name], rel=TOLERANCE), name
    training, held_out = ([row["masked_over_baseline"] for row in rows(run, kind)] for kind in ("train", "validation"))
    assert training[-1] < 0.9 * training[0] and held_out[-1] < held_out[0]
    assert rows(run, "incident") == [], "no false alarm"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {objective: curve(trained(objective, Path(folder) / objective)) for objective in OBJECTIVES}
    if "--compare" in sys.argv:
        golden = json.loads(FIXTURE.read_text())
        gaps = [abs(a / b - 1) for o in found for n in found[o] for a, b in zip(found[o][n], golden[o][n], strict=True)]
        print(f"largest relative difference {max(gaps):.1e}")
        return
    rounded = {
        o: {name: [float(f"{v:.7g}") for v in values] for name, values in curves.items()} for o, curves in found.items()
    }
    FIXTURE.write_text(json.dumps(rounded, indent=1) + "\n")


if __name__ == "__main__":
    main()
