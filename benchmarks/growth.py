"""Growth of a training step's time and memory with tokens and with batch size: `python benchmarks/growth.py --out DIR`.

octfm with the default networks (384 x 12, predictor 192 x 6; benchmarks/step.py), with and without activation
checkpointing. Each point is a separate process and gives the CPU seconds of the fastest of `--rounds` steps after a
warm-up step, and peak resident memory beyond that after the imports. Points run from the least work to the most;
DIR/growth.json keeps those that are done, and a second call continues. growth.png and the exponents (cost ~ tokens^a
between neighbouring points) use the points there are.
"""

import argparse
import json
import subprocess
import sys
import time
from itertools import pairwise
from math import log, prod
from pathlib import Path
from typing import Any

from step import grid_of, resident

GRIDS = ((16, 128, 128), (16, 192, 192), (32, 192, 192), (32, 256, 256), (64, 256, 256), (64, 384, 384))
"""256, 576, 1,152, 2,048, 4,096 and 9,216 tokens."""
BATCHES = (1, 2, 4, 8)
BATCHED = (16, 128, 128)
"""Volume size at which the batch size varies."""
MODES = {"kept": False, "checkpointing": True}


def worker(size: tuple[int, int, int], batch: int, checkpointing: bool, precision: str, rounds: int) -> None:
    """Measure one point and print it as JSON."""
    import torch

    import octfm.models.objectives.jepa
    import octfm.pretraining.inputs  # noqa: F401
    from step import build_ours

    torch.manual_seed(0)
    before = resident("VmRSS")
    step, seconds = build_ours(size, batch, None, False, checkpointing), []
    for _ in range(rounds + 1):
        begun = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            step()
        seconds.append(time.process_time() - begun)
    print(json.dumps({"cpu_s": min(seconds[1:]), "gb": (resident("VmHWM") - before) / 1e9}))


def points(most: int) -> list[tuple[tuple[int, int, int], int, str]]:
    """(grid, batch, mode) of all points, the least work first."""
    wanted = {(size, 1) for size in GRIDS} | {(BATCHED, batch) for batch in BATCHES}
    chosen = [(size, batch) for size, batch in wanted if prod(grid_of(size)) * batch <= most]
    return [
        (size, batch, mode)
        for size, batch in sorted(chosen, key=lambda p: (prod(grid_of(p[0])) * p[1], p[1]))
        for mode in MODES
    ]


def exponents(found: list[dict[str, Any]], along: str, value: str) -> list[float]:
    """Exponents a of cost ~ x^a between neighbouring points."""
    return [log(b[value] / a[value]) / log(b[along] / a[along]) for a, b in pairwise(found)]


def curves(done: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Points by (varied quantity, mode), in ascending order of the quantity."""
    found = {}
    for mode in MODES:
        own = [row for row in done if row["mode"] == mode]
        found["tokens", mode] = sorted((row for row in own if row["batch"] == 1), key=lambda row: row["tokens"])
        found["batch", mode] = sorted(
            (row for row in own if tuple(row["size"]) == BATCHED), key=lambda row: row["batch"]
        )
    return found


def draw(path: Path, done: list[dict[str, Any]], precision: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.6), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, (along, of) in enumerate(
        (("tokens", "one volume"), ("batch", f"{prod(grid_of(BATCHED))} tokens each"))
    ):
        for row, (value, label) in enumerate((("cpu_s", "CPU seconds per step"), ("gb", "peak memory, GB"))):
            panel, ticks = axes[row, column], set()
            for mode, colour in zip(MODES, ("#0072B2", "#D55E00"), strict=True):
                line = curves(done)[along, mode]
                ticks |= {point[along] for point in line}
                name = "activation checkpointing" if MODES[mode] else "activations kept"
                panel.loglog([p[along] for p in line], [p[value] for p in line], "o-", color=colour, ms=4, label=name)
            panel.set_xticks(sorted(ticks), [f"{tick:,}" for tick in sorted(ticks)], fontsize=8)
            panel.set_xticks([], minor=True)
            panel.set(xlabel=f"{along} ({of})", ylabel=label)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"One training step, 384 x 12, {precision}, one thread", fontsize=10)
    figure.savefig(path, dpi=130)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--most", type=int, default=9216, help="leave out points of more tokens per step than this")
    arguments.add_argument("--point", help=argparse.SUPPRESS)
    chosen = arguments.parse_args()
    if chosen.point:
        size, batch, checkpointing = json.loads(chosen.point)
        worker(tuple(size), batch, checkpointing, chosen.precision, chosen.rounds)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    record = chosen.out / "growth.json"
    done = json.loads(record.read_text()) if record.is_file() else []
    for size, batch, mode in points(chosen.most):
        key = {"size": list(size), "batch": batch, "mode": mode, "precision": chosen.precision}
        if any(key.items() <= row.items() for row in done):
            continue
        command = [
            sys.executable,
            __file__,
            "--out",
            str(chosen.out),
            "--precision",
            chosen.precision,
            "--rounds",
            str(chosen.rounds),
        ]
        told = subprocess.run(
            [*command, "--point", json.dumps([size, batch, MODES[mode]])], stdout=subprocess.PIPE, text=True
        )
        if told.returncode:
            print(
                f"{list(size)}, batch {batch}, {mode}: the process ended with {told.returncode}; no memory left?",
                flush=True,
            )
            continue
        done.append({**key, "tokens": prod(grid_of(size)), **json.loads(told.stdout)})
        partial = record.with_suffix(".partial")
        partial.write_text(json.dumps(done, indent=1) + "\n")
        partial.replace(record)
        print(
            f"{prod(grid_of(size)):>6,} tokens x {batch}, {mode:<14}"
            f"{done[-1]['cpu_s']:>8.2f} CPU s{done[-1]['gb']:>8.2f} GB",
            flush=True,
        )
    done = [row for row in done if row["precision"] == chosen.precision]
    for (along, mode), line in curves(done).items():
        if len(line) > 1:
            told = {value: ", ".join(f"{a:.2f}" for a in exponents(line, along, value)) for value in ("cpu_s", "gb")}
            print(f"{along}, {mode}: time ~ {along}^({told['cpu_s']}), memory ~ {along}^({told['gb']})")
    if done:
        draw(chosen.out / "growth.png", done, chosen.precision)


if __name__ == "__main__":
    main()
