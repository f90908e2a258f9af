"""Fifty steps on CPU give the curve they have always given: a refactoring that changes the maths turns this red.

`python tests/test_golden_curve.py` writes the fixture anew; do so only for a change that is meant, and say so in the
commit.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest

from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, quiet, rows

FIXTURE = Path(__file__).parent / "fixtures" / "golden_curve.json"
TOLERANCE = 1e-3
"""Relative. One and two threads differ by 2e-6 after fifty steps."""


def curve(objective: str, folder: Path) -> dict[str, list[float]]:
    """Losses and gradient norms of every step."""
    run = quick_pretrain(
        config(steps=50, objective={"name": objective}, validate_every_steps=50, ckpt_every_steps=50),
        small_store(folder / "store"),
        folder / "run",
        "cpu",
        echo=quiet,
    )
    return {name: [row[name] for row in rows(run)] for name in ("masked_loss", "context_loss", "grad_norm")}


OBJECTIVES = ("vjepa2", "data2vec", "mae")


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_fifty_steps_give_the_curve_they_always_gave(objective, tmp_path):
    golden = json.loads(FIXTURE.read_text())[objective]
    for name, values in curve(objective, tmp_path).items():
        assert values == pytest.approx(golden[name], rel=TOLERANCE), name


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {objective: curve(objective, Path(folder) / objective) for objective in OBJECTIVES}
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
