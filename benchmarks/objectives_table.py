"""Tables and figure of benchmarks/objectives.py, with intervals over seeds and participants together."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from octfm.evaluation import metrics as m
from octfm.evaluation.scoring import finite
from octfm.evaluation.statistics import Bootstrap, Comparison, Metric, bootstrap, compare, interval, over_seeds

REFERENCE = "ours"
RESAMPLES = 1000
Prepared = tuple[Metric, np.ndarray]
"""A metric as a function of case weights [R, n], and the participant of each of the n cases."""


@dataclass(frozen=True)
class Column:
    """One column of the table."""

    name: str
    of: Callable[[dict[str, Any]], Prepared | None]
    """Gets the metric from an arm's JSON; None if the JSON lacks it."""
    better: int
    """1 if higher is better, -1 if lower is."""
    margin: float | None = None
    """Non-inferiority margin: `ours` loses nothing if the lower bound of its gain is above minus this."""


def _tested(arm: dict[str, Any], held_out: bool = False) -> np.ndarray:
    return np.flatnonzero(np.array(arm["probes"]["held_out"], bool) == held_out)


def _people(arm: dict[str, Any], rows: np.ndarray) -> np.ndarray:
    return np.array(arm["probes"]["participant"])[rows]


def _disease(arm: dict[str, Any], rows: np.ndarray) -> Metric:
    found = arm["probes"]["disease"]
    truth, score = np.array(found["truth"], bool)[rows], np.array(found["score"])[rows]
    return lambda w: m.auroc(truth, score, w)


def _regression(arm: dict[str, Any], name: str, rows: np.ndarray) -> Metric:
    truth, predicted = (np.array(arm["probes"][name][key])[rows] for key in ("truth", "predicted"))
    return lambda w: m.r_squared(truth, predicted, w)


def _classes(arm: dict[str, Any], name: str, rows: np.ndarray) -> Metric:
    found = arm["probes"][name]
    truth = np.searchsorted(found["classes"], np.array(found["truth"])[rows])
    log_p = np.array(found["log_p"])[rows]
    p = np.exp(log_p - log_p.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    # In a small cohort, training may lack a class.
    known = np.isin(np.array(found["truth"])[rows], found["classes"])
    return lambda w: m.macro_auroc(truth[known], p[known], w[:, known])


def _own(metric: Callable[[dict[str, Any], np.ndarray], Metric]) -> Callable[[dict[str, Any]], Prepared]:
    def of(arm: dict[str, Any]) -> Prepared:
        rows = _tested(arm)
        return metric(arm, rows), _people(arm, rows)

    return of


def _shifted(metric: Callable[[dict[str, Any], np.ndarray], Metric]) -> Callable[[dict[str, Any]], Prepared | None]:
    """Metric on the usual scanner minus that on the held-out one, over participants scanned by both."""

    def of(arm: dict[str, Any]) -> Prepared | None:
        there = _tested(arm, held_out=True)
        own = _tested(arm)
        own = own[np.isin(_people(arm, own), _people(arm, there))]
        if not len(there):
            return None
        a, b, count = metric(arm, own), metric(arm, there), len(own)
        return (lambda w: a(w[:, :count]) - b(w[:, count:])), np.concatenate([_people(arm, own), _people(arm, there)])

    return of


def _surfaces(arm: dict[str, Any]) -> Prepared | None:
    if not arm.get("dense"):
        return None
    um = np.array(arm["dense"]["um"]).mean(1)
    return (lambda w: (w @ um) / w.sum(1)), np.array(arm["dense"]["participant"])


COLUMNS = (
    Column("disease AUROC", _own(_disease), 1, 0.01),
    Column("diagnosis AUROC", _own(lambda a, r: _classes(a, "diagnosis", r)), 1, 0.01),
    Column("severity R²", _own(lambda a, r: _regression(a, "severity", r)), 1, 0.02),
    Column("thickness R²", _own(lambda a, r: _regression(a, "cst_um", r)), 1, 0.02),
    Column("surfaces µm", _surfaces, -1),
    Column("scanner AUROC", _own(lambda a, r: _classes(a, "scanner", r)), -1),
    Column("disease, drop", _shifted(_disease), -1),
    Column("thickness, drop", _shifted(lambda a, r: _regression(a, "cst_um", r)), -1),
)


@dataclass(frozen=True, eq=False)
class Cell:
    """One metric of one arm, with its bootstrap."""

    boot: Bootstrap
    per_seed: list[float]
    seeds: tuple[int, ...]


def write_table(out: Path) -> Path:
    """Write objectives.md, .json and .png for the arms in `out`/arms; returns the path of the first."""
    arms: dict[str, dict[int, dict[str, Any]]] = {}
    boots: dict[str, dict[int, dict[str, Bootstrap]]] = {}
    for file in sorted((out / "arms").glob("*.json")):
        found = json.loads(file.read_text())
        arms.setdefault(found["arm"], {})[found["seed"]] = found
        boots.setdefault(found["arm"], {})[found["seed"]] = _boots(file, file.stat().st_mtime_ns, RESAMPLES)
    if not arms:
        raise SystemExit(f"{out / 'arms'}: no arm is finished yet; run without --table")
    read = {
        run.get("readout", "the tokens of its training"): name for name, runs in arms.items() for run in runs.values()
    }
    if len(read) > 1:
        (one, first), (other, second), *_ = read.items()
        raise SystemExit(
            f"{out / 'arms'}: {first} is read from {one}, {second} from {other}, which cannot be compared; delete the "
            "arms of one of them and run again"
        )
    cells = {(name, c.name): cell for name in arms for c in COLUMNS if (cell := _cell(boots[name], c.name))}
    compared = {
        (name, c.name): gain
        for name in arms
        for c in COLUMNS
        if name != REFERENCE and (gain := _compared(boots.get(REFERENCE, {}), boots[name], c)) is not None
    }
    text = "\n".join([*_head(arms), "", *_table(arms, cells), "", *_gains(compared), "", *_amd(arms)]).rstrip() + "\n"
    target = out / "objectives.md"
    target.write_text(text)
    rows = [
        {"arm": name, "metric": column, "mean": finite(cell.boot.estimate),
         "interval": [finite(end) for end in interval(cell.boot, method="percentile")],
         "per_seed": dict(zip(map(str, cell.seeds), cell.per_seed, strict=True))}
        for (name, column), cell in cells.items()
    ]  # fmt: skip
    gains = [
        {
            "arm": name,
            "metric": column,
            "gain_of_ours": finite(c.difference),
            "low": finite(c.low),
            "high": finite(c.high),
        }
        for (name, column), c in compared.items()
    ]
    (out / "objectives.json").write_text(json.dumps({"metrics": rows, "gains": gains}, indent=1) + "\n")
    _figure(out / "objectives.png", compared)
    return target


@lru_cache(maxsize=1024)
def _boots(file: Path, written_ns: int, resamples: int) -> dict[str, Bootstrap]:
    """Every metric of one arm and seed; cached, because a long run renews its table often."""
    arm = json.loads(file.read_text())
    found = {column.name: column.of(arm) for column in COLUMNS}
    return {name: bootstrap(of[0], of[1], resamples=resamples) for name, of in found.items() if of is not None}


def _cell(boots: dict[int, dict[str, Bootstrap]], column: str, seeds: Iterable[int] | None = None) -> Cell | None:
    chosen = {seed: boots[seed][column] for seed in sorted(boots if seeds is None else seeds) if column in boots[seed]}
    if not chosen:
        return None
    return Cell(over_seeds(list(chosen.values())), [b.estimate for b in chosen.values()], tuple(chosen))


def _compared(
    ours: dict[int, dict[str, Bootstrap]], other: dict[int, dict[str, Bootstrap]], column: Column
) -> Comparison | None:
    """Gain of `ours`, positive if it is better, over the seeds that both arms have."""
    a, b = (_cell(boots, column.name, set(ours) & set(other)) for boots in (ours, other))
    if a is None or b is None:
        return None
    return compare(a.boot, b.boot) if column.better > 0 else compare(b.boot, a.boot)


def _head(arms: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    some = next(iter(next(iter(arms.values())).values()))
    tested, there = len(_tested(some)), len(_tested(some, held_out=True))
    lines = [f"{tested:,} test participants, one eye each; {there:,} of them on the held-out scanner, too.", ""]
    return lines + [
        f"- **{name}** ({len(runs)} seeds): {next(iter(runs.values()))['says']}" for name, runs in arms.items()
    ]


def _table(arms: dict[str, dict[int, dict[str, Any]]], cells: dict[tuple[str, str], Cell]) -> list[str]:
    names = [column.name for column in COLUMNS]
    lines = ["Mean over seeds, ± their standard deviation, [95 % interval over seeds and participants].", ""]
    lines += [
        f"| arm | updates | {' | '.join(names)} | effective rank | loss / baseline | volumes/s |",
        "|---" * (len(names) + 5) + "|",
    ]
    for name, runs in arms.items():
        row = [name, str(next(iter(runs.values()))["steps"])]
        row += [_words(cells.get((name, column))) for column in names]
        for key in ("effective_rank", "masked_over_baseline", "volumes_per_s"):
            values = [run[key] for run in runs.values() if run.get(key) is not None]
            row.append(f"{np.mean(values):.3g}" if values else "")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _words(cell: Cell | None) -> str:
    if cell is None:
        return ""
    low, high = interval(cell.boot, method="percentile")
    spread = f" ± {np.std(cell.per_seed, ddof=1):.3f}" if len(cell.per_seed) > 1 else ""
    return f"{cell.boot.estimate:.3f}{spread} [{low:.3f}, {high:.3f}]"


def _gains(compared: dict[tuple[str, str], Comparison]) -> list[str]:
    if not compared:
        return []
    lines = [
        "Gain of `ours`, paired: positive is better, whichever way the number points. **No loss** where the lower end "
        "exceeds the margin (.01 AUROC, .02 R²)."
    ]
    lines += ["", f"| against | {' | '.join(c.name for c in COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name in dict.fromkeys(arm for arm, _ in compared):
        row = [name]
        for column in COLUMNS:
            c = compared.get((name, column.name))
            if c is None:
                row.append("")
                continue
            kept = column.margin is not None and c.low > -column.margin
            row.append(f"{c.difference:+.3f} [{c.low:+.3f}, {c.high:+.3f}]{' **no loss**' if kept else ''}")
        lines.append(f"| {' | '.join(row)} |")
    return lines


def _amd(arms: dict[str, dict[int, dict[str, Any]]]) -> list[str]:
    """The real volume: mean over both halves and seeds."""
    sources: dict[str, list[list[list[float]]]] = {}
    for name, runs in arms.items():
        for run in runs.values():
            for source, halves in run.get("amd", {}).items():
                sources.setdefault(name if source == "frozen" else source, []).append(halves)
    if not sources:
        return []
    lines = ["Real AMD volume, µm, one half of its B-scans judged after the other (one eye: no interval):", ""]
    lines += ["| | RPE 1→2 | RPE 2→1 | BM 1→2 | BM 2→1 |", "|---|---|---|---|---|"]
    for name, found in sources.items():
        (rpe_a, bm_a), (rpe_b, bm_b) = np.mean(found, axis=0)
        lines.append(f"| {name} | {rpe_a:.1f} | {rpe_b:.1f} | {bm_a:.1f} | {bm_b:.1f} |")
    return lines


def _figure(path: Path, compared: dict[tuple[str, str], Comparison]) -> None:
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(arm for arm, _ in compared))
    columns = [column for column in COLUMNS if any((name, column.name) in compared for name in names)]
    if not columns:
        return
    figure = Figure(figsize=(2.3 * len(columns), 0.9 + 0.32 * len(names)), layout="constrained")
    for axes, column in zip(np.atleast_1d(figure.subplots(1, len(columns), sharey=True)), columns, strict=True):
        for at, name in enumerate(names):
            c = compared.get((name, column.name))
            if c is not None:
                axes.plot([c.low, c.high], [at, at], color="#0072B2", lw=2, solid_capstyle="round")
                axes.plot(c.difference, at, "o", color="#0072B2", ms=5)
        axes.axvline(0, color="0.3", lw=0.8)
        if column.margin is not None:
            axes.axvline(-column.margin, color="#D55E00", lw=0.8, ls="--")
        axes.set_title(column.name, fontsize=9)
        axes.set_yticks(range(len(names)), names)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    axes.invert_yaxis()
    figure.suptitle("Gain of ours over each arm (right is better; dashed: the margin of “no loss”)", fontsize=9)
    figure.savefig(path, dpi=130)
