"""Charts as inline SVG, which use the page's font and colours and so work on light and dark backgrounds."""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import quoteattr

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from octfm.display import drawing, interval, readable
from octfm.errors import one_line
from octfm.report.sources import Sources, lookup, number, series
from octfm.report.words import METRICS, objective, probed, short
from octfm.threads import ignoring_warnings

# Okabe & Ito's colour-blind-safe palette; the page's style sheet brightens it on dark backgrounds.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
INK, GRID = "#1b1c1d", "#d9dadb"
MARKERS = ("o", "s", "D", "^", "v")
DASHES = ("-", "--", "-.", ":", "-")
DASHED: Any = (0, (3, 3))
REFERENCE: dict[str, Any] = {"color": INK, "linewidth": 0.9, "linestyle": DASHED}
"""Style of a line for chance, a baseline or perfect agreement."""
MAX_POINTS = 400
TEXT_PT, PHONE_PT = 11.0, 9.6
"""Sizes of text: at least 11 pixels on a page, for charts that are shown at about their own size and for those that are
enlarged, least on a phone."""
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True)
class Chart:
    """A chart for a page; `svg` is an <svg> element."""

    title: str
    caption: str
    svg: str


@dataclass(frozen=True)
class Line:
    """A curve of a chart: steps [n] and values [n]."""

    label: str
    steps: np.ndarray
    values: np.ndarray
    points: bool = False
    """Draw a marker at every value."""


@contextmanager
def canvas(name: str, width: float, height: float, text_pt: float = TEXT_PT) -> Iterator[tuple[Figure, Axes]]:
    """A figure in the page's style, in inches; call `to_svg` before leaving the context. `name`: no other figure of the
    page has it."""
    with panels(name, width, height, (1,), text_pt) as (figure, (axes,)):
        yield figure, axes


@contextmanager
def panels(
    name: str, width: float, height: float, ratios: Sequence[float], text_pt: float = TEXT_PT
) -> Iterator[tuple[Figure, list[Axes]]]:
    """As `canvas`, with one axes below the other for each of these relative heights."""
    key = re.sub(r"\W+", "-", name).strip("-")
    # The salt makes ids in the SVG the same in every rendering.
    with drawing({**STYLE, "svg.hashsalt": key, "font.size": text_pt}):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.set_label(key)
        yield figure, list(figure.subplots(len(ratios), height_ratios=ratios, squeeze=False)[:, 0])


def training_charts(sources: Sources) -> list[Chart]:
    """One chart per question that a training curve answers; charts without data are left out, and so are those of a
    context loss or teacher that the objective does not have."""
    train, validation = sources.train, sources.validation
    what = objective(sources).predicted
    loss = f"The error of predicting {what}, over that of a constant prediction. 1 = learned nothing."
    if not lookup(sources.settings, "objective", "context_loss") and train and "context_weight" in train[-1]:
        train, validation = ([_without(row, "context_over_baseline") for row in rows] for rows in (train, validation))
    if lookup(sources.record, "parameters", "target_encoder") == 0:
        train = [_without(row, "ema", "teacher_step", "teacher_distance") for row in train]
    if len(set(series(train, "weight_decay")[1])) == 1:
        train = [_without(row, "weight_decay") for row in train]  # constant, and in the settings

    def curves(title: str, caption: str, names: dict[str, str], **options: Any) -> Chart | None:
        return _chart(title, caption, _lines(train, names), **options)

    charts = [
        _chart(
            "Masked loss over baseline",
            loss,
            [*_lines(train, {"masked_over_baseline": "training"}), *_validation(validation, "masked")],
            1,
        ),
        _chart(
            "Masked loss, per scanner",
            "The same ratio for each instrument. Curves that drift apart mean that the encoder serves one scanner "
            "better.",
            _per_scanner(train),
            1,
        ),
        _chart(
            "Context loss over baseline",
            "The same for the visible tokens: this term keeps features from collapsing. Its target moves, so it may "
            "rise.",
            [*_lines(train, {"context_over_baseline": "training"}), *_validation(validation, "context")],
            1,
        ),
        curves(
            "Effective rank",
            "How many independent directions the features use on tissue tokens (RankMe). A steady fall towards 1 is "
            "collapse.",
            {"effective_rank": "effective rank"},
        ),
        curves(
            "Feature spread",
            "Standard deviation of features over tissue tokens. 0 would mean that every token looks the same to the "
            "encoder.",
            {"feature_std": "standard deviation"},
        ),
        curves(
            "Gradient norm",
            "Before clipping, logarithmic. Spikes can lead to skipped updates; exactly 0 would mean that nothing is "
            "learned.",
            {"grad_norm": "gradient norm"},
            log=True,
        ),
        curves(
            "Teacher movement",
            "How far the target encoder moved in the last update, and how far it is from the encoder, both relative. "
            "It must move.",
            {"teacher_step": "last update", "teacher_distance": "distance to encoder"},
            log=True,
        ),
        _online_probe(sources),
        curves("Learning rate", "One warm-up, one decay: a second rise would be a fault.", {"lr": "learning rate"}),
        curves(
            "Weight decay",
            "The pull of weights towards zero; it may rise over the run, by plan.",
            {"weight_decay": "weight decay"},
        ),
        curves(
            "EMA momentum",
            "How much of the old target encoder each update keeps. Close to 1 = slow teacher.",
            {"ema": "EMA momentum"},
        ),
        curves(
            "Throughput",
            "Volumes per second, all devices together.",
            {"volumes_per_s": "volumes per second"},
            floor=0,
        ),
        curves(
            "Waiting for data",
            "Share of the time spent waiting for volumes. Above 0.2, faster storage or more prefetch would pay.",
            {"data_wait_share": "share of time"},
            floor=0.25,
        ),
    ]
    return [chart for chart in charts if chart is not None]


COMPARED = {
    "masked_over_baseline": (
        "Masked loss over baseline",
        "The error of predicting hidden tissue over that of a constant prediction; for dense, the error of predicting "
        "what tokens show. It is not comparable between objectives, and no encoder is chosen by it.",
    ),
    "effective_rank": (
        "Effective rank",
        "How many independent directions the features use on tissue tokens. A fall towards 1 is collapse.",
    ),
    "grad_norm": ("Gradient norm", "Before clipping, logarithmic."),
    "lr": ("Learning rate", "As the schedule set it."),
    "volumes_per_s": ("Throughput", "Volumes per second, all devices together; machines may differ."),
}


def compared_charts(runs: dict[str, Sources]) -> list[Chart]:
    """One chart per curve with a line for every run, by name."""
    charts = []
    for key, (title, caption) in COMPARED.items():
        lines = [Line(plain(name), *series(s.train, key)) for name, s in runs.items()]
        charts.append(_chart(title, caption, lines, log=key == "grad_norm"))
    held_out = [
        Line(plain(name), *series(s.validation, "masked_over_baseline"), points=True) for name, s in runs.items()
    ]
    charts.insert(1, _chart("Held-out masked loss over baseline", "The same on validation participants.", held_out, 1))
    for target, metric in dict.fromkeys((r["target"], r["metric"]) for s in runs.values() for r in s.online):
        own = {n: [r for r in s.online if (r["target"], r["metric"]) == (target, metric)] for n, s in runs.items()}
        lines = [Line(plain(name), *series(rows, "score"), points=True) for name, rows in own.items()]
        caption = "How well frozen features answered for validation participants while the runs went on."
        charts.append(_chart(f"Online probe: {plain(target)}, {metric.replace('_', ' ')}", caption, lines))
    return [chart for chart in charts if chart is not None]


TITLES = {
    "disease": "Disease or healthy",
    "diagnosis": "Which diagnosis",
    "study_group": "Which study group",
    "label": "Which label",
    "cst_um": "Central retinal thickness",
    "scanner": "Which scanner (leakage: less is better)",
}
GUESSING = {"auroc": "AUROC: 0.5 is guessing, 1 perfect", "kappa": "quadratic kappa: 0 is guessing, 1 perfect",
            "r2": "R²: 0 is guessing the mean, 1 perfect"}  # fmt: skip
LOWEST = -0.5
"""Left end of an axis for scores; an arrow marks intervals that continue beyond it."""


def overview_forest(results: Sequence[dict[str, Any]]) -> Chart | None:
    """Every encoder on every target, one metric per target, with the numbers next to it. It fits on a phone."""
    known = [r for r in results if r["estimate"] is not None]
    groups = _by_metric(known)
    if not groups:
        return None
    encoders = list(dict.fromkeys(r["encoder"] for r in known))
    heights = [sum(_height(rows) for rows in own) for own in groups.values()]
    with panels("forest", 4.3, 0.17 * sum(heights) + 0.42 * len(groups), heights, PHONE_PT) as (figure, parts):
        for (metric, own), height, axes in zip(groups.items(), heights, parts, strict=True):
            y, ticks = 0.0, []
            for rows in own:
                ticks += _draw_target(axes, y, rows, encoders)
                y += _height(rows)
            axes.set_yticks(ticks, [plain(short(row["encoder"])) for rows in own for row in rows])
            axes.set_ylim(height - 0.4, -0.6)
            ends = [number(r[end]) for rows in own for r in rows for end in ("low", "estimate", "chance")]
            least = float(np.nanmin(ends))
            axes.set_xlim(max(LOWEST, least - 0.05 * (1 - least)), 1.02)
            axes.grid(axis="y", visible=False)
            axes.set_xlabel(GUESSING[metric])
        shown = [r for own in groups.values() for rows in own for r in rows]
        svg = to_svg(figure, "Forest plot: " + "; ".join(_spoken(r) for r in shown))
    untrained = "Untrained: the same network before its first update. " if "random_init" in encoders else ""
    hollow = " Hollow: too few participants for an interval." if any(r["low"] is None for r in shown) else ""
    caption = f"{untrained}Bars: 95\u00a0% intervals. Dashed: guessing.{hollow}"
    return Chart("How well frozen features answer", caption, svg)


def _by_metric(results: Sequence[dict[str, Any]]) -> dict[str, list[list[dict[str, Any]]]]:
    """Metric → the rows of each target shown by it, the first of AUROC, R² and kappa that was measured."""
    chosen = {r["target"]: metric for metric in ("kappa", "r2", "auroc") for r in results if r["metric"] == metric}
    groups: dict[str, list[list[dict[str, Any]]]] = {}
    for metric in GUESSING:
        targets = [target for target in chosen if chosen[target] == metric]
        own = [[r for r in results if (r["target"], r["metric"]) == (target, metric)] for target in targets]
        if own:
            # Leakage last: it is no clinical question.
            groups[metric] = sorted(own, key=lambda rows: rows[0]["leakage"])
    return groups


def _height(rows: Sequence[dict[str, Any]]) -> float:
    """Height of a target in the overview: its title, a line for each encoder, and a gap."""
    return len(rows) + 1.25


def _draw_target(axes: Axes, y: float, rows: Sequence[dict[str, Any]], encoders: Sequence[str]) -> list[float]:
    """Draw a target below its title at height `y`; returns the heights of its encoders."""
    ticks = [y + 1 + i for i in range(len(rows))]
    to_edges: dict[str, Any] = {"transform": axes.get_yaxis_transform()}  # x from 0 to 1 across the panel
    axes.text(0, y, title_of(rows[0]["target"]), **to_edges, va="center", fontweight="bold")
    for tick, row in zip(ticks, rows, strict=True):
        draw_interval(axes, tick, row["estimate"], row, encoders.index(row["encoder"]), None)
        axes.text(1.02, tick, interval(row), **to_edges, va="center")
        if min(row["estimate"], row["low"] or 0) < LOWEST:
            axes.plot([0], [tick], "<", color=INK, markersize=4, **to_edges)
    chance = rows[0]["chance"]
    axes.plot([chance, chance], [y + 0.5, y + len(rows) + 0.5], **REFERENCE)
    return ticks


def title_of(target: str) -> str:
    """A target as the heading of a chart."""
    return TITLES.get(target, plain(target))


def forest_plots(results: Sequence[dict[str, Any]], metrics: Sequence[str] = ("auroc", "kappa", "r2")) -> list[Chart]:
    """A forest plot for each of these metrics that was measured."""
    return [chart for metric in metrics if (chart := _forest_plot(results, metric)) is not None]


def _forest_plot(results: Sequence[dict[str, Any]], metric: str) -> Chart | None:
    """Estimate and interval of every encoder on every target that has this metric; the dashed line is chance."""
    name, rows = METRICS[metric], [r for r in results if r["metric"] == metric and r["estimate"] is not None]
    if not rows:
        return None
    targets, encoders = list(dict.fromkeys(r["target"] for r in rows)), list(dict.fromkeys(r["encoder"] for r in rows))
    with canvas(f"forest {metric}", 4.9, 0.75 + 0.27 * len(targets) * (len(encoders) + 0.6)) as (figure, axes):
        ticks, pitch = [], len(encoders) + 0.8
        for t, target in enumerate(targets):
            ticks.append(t * pitch + (len(encoders) - 1) / 2)
            own = [r for r in rows if r["target"] == target]
            for e, encoder in enumerate(encoders):
                if row := next((r for r in own if r["encoder"] == encoder), None):
                    label = plain(encoder) if t == 0 else None
                    draw_interval(axes, t * pitch + e, row["estimate"], row, e, label)
            chance = own[0]["chance"]
            axes.plot([chance, chance], [t * pitch - 0.5, t * pitch + len(encoders) - 0.5], **REFERENCE)
        # Colours repeat if there are more encoders than colours, so each row is labelled instead.
        by_name = len(targets) == 1 and len(encoders) > len(SERIES)
        if by_name:
            axes.set_yticks(range(len(encoders)), [plain(encoder) for encoder in encoders])
        else:
            axes.set_yticks(ticks, [plain(target) for target in targets])
        axes.set_ylim(len(targets) * pitch - 0.8, -0.9)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(name)
        if not by_name:
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=min(4, len(encoders)))
        svg = to_svg(figure, f"Forest plot of {name}: " + "; ".join(_spoken(r) for r in rows))
    leakage = ", except for scanner" if any(r["leakage"] for r in rows) else ""
    caption = (
        f"Right is better{leakage}. The bar is the 95\u00a0% interval, the dashed line is chance. Hollow markers have "
        "no interval: too few participants. Overlapping bars do not settle a comparison; the paired differences do."
    )
    return Chart(name, caption, svg)


def draw_interval(axes: Axes, y: float, value: float, row: dict[str, Any], series: int, label: str | None) -> None:
    """A marker at `value` with a bar from low to high; hollow without an interval."""
    color, low, high = SERIES[series % len(SERIES)], row.get("low"), row.get("high")
    if low is not None and high is not None:
        axes.plot([low, high], [y, y], color=color, linewidth=1.8, solid_capstyle="round")
    marker, filled = MARKERS[series % len(MARKERS)], color if low is not None else "none"
    style: dict[str, Any] = {"color": color, "markerfacecolor": filled, "markersize": 5.5, "linestyle": "none"}
    axes.plot([value], [y], marker, **style, label=label)


def efficiency_plots(rows: Sequence[dict[str, Any]]) -> list[Chart]:
    """One chart per target and metric: every encoder's score, with interval, by number of labelled participants."""
    charts = []
    for target, metric in dict.fromkeys((r["target"], r["metric"]) for r in rows):
        own = [r for r in rows if (r["target"], r["metric"]) == (target, metric) and r["estimate"] is not None]
        if not own:
            continue
        encoders = list(dict.fromkeys(r["encoder"] for r in own))
        with canvas(f"efficiency {target} {metric}", 4.3, 3.1, PHONE_PT) as (figure, axes):
            axes.set_xscale("log")
            for e, encoder in enumerate(encoders):
                points = [r for r in own if r["encoder"] == encoder]
                # Shifted slightly, so that intervals of equal numbers do not hide one another.
                people = np.array([r["n_train_participants"] for r in points]) * 1.05 ** (e - (len(encoders) - 1) / 2)
                color, marker = SERIES[e % len(SERIES)], MARKERS[e % len(MARKERS)]
                style: dict[str, Any] = {"color": color, "linestyle": DASHES[e % len(DASHES)], "linewidth": 1.4}
                name = plain(short(encoder))
                axes.plot(people, [r["estimate"] for r in points], marker=marker, markersize=6, label=name, **style)
                for x, r in zip(people, points, strict=True):
                    if r["low"] is not None:
                        axes.plot([x, x], [r["low"], r["high"]], color=color, linewidth=1.8, solid_capstyle="round")
            axes.axhline(own[0]["chance"], **REFERENCE, label="guessing")
            axes.set_xticks(*_log_ticks(sorted({r["n_train_participants"] for r in own})))
            axes.minorticks_off()
            axes.set_xlabel("participants with a label")
            axes.set_ylabel(str(METRICS.get(metric, metric)))
            # Above the plot: inside, it would cover a curve.
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2, handlelength=3.2)
            spoken = "; ".join(f"{r['encoder']} {r['fraction']:.0%}: {number(r['estimate']):.2f}" for r in own)
            svg = to_svg(figure, f"Label efficiency of {plain(target)}: {spoken}")
        shared, weak = "training participants", ""
        if own[0].get("design") == "k-fold":
            shared = "participants that each fold's probe is fitted on, drawn anew for every fold"
            weak = ", up to a third too narrow where probes are weak"
        bars = f"; 95\u00a0% intervals over draws and participants together{weak}"
        bars = bars if any(r["low"] is not None for r in own) else "; too few participants for intervals"
        caption = (
            f"{METRICS.get(metric, metric)} of {plain(target)} with nested shares of the {shared}; those tested stay "
            f"the same. Mean of {own[0]['seeds']} draws{bars}."
        )
        charts.append(Chart(f"Label efficiency: {title_of(target)}", caption, svg))
    return charts


def _log_ticks(numbers: Sequence[int]) -> tuple[list[int], list[str]]:
    """The largest number, and those below it whose labels do not overlap on a logarithmic axis; with their labels."""
    least = (numbers[-1] / numbers[0]) ** 0.1 if len(numbers) > 1 else 1
    kept: list[int] = []
    for n in reversed(numbers):
        if not kept or kept[-1] / n > least:
            kept.append(n)
    return kept, [f"{n:,}" for n in kept]


def _chart(
    title: str,
    caption: str,
    lines: list[Line],
    reference: float | None = None,
    *,
    log: bool = False,
    floor: float | None = None,
) -> Chart | None:
    lines = [line for line in lines if len(line.steps)]
    if not lines:
        return None
    with canvas(title, 4.2, 2.35) as (figure, axes):
        for i, line in enumerate(lines):
            _draw(axes, line, i)
        # A value of exactly 0 is a finding that a logarithmic axis would hide.
        if log and min(line.values.min() for line in lines) > 0:
            axes.set_yscale("log")
            plain_ticks(axes.yaxis)
        if reference is not None:
            axes.axhline(reference, **REFERENCE)
        if floor is not None:
            axes.set_ylim(0, max([floor, *(1.1 * float(line.values.max()) for line in lines)]))
        _whole_steps(axes)
        if len(lines) > 1:
            axes.legend(loc="best")
        last = "; ".join(f"{line.label} {line.values[-1]:.3g} at step {line.steps[-1]:.0f}" for line in lines)
        svg = to_svg(figure, f"{title}. Last values: {last}")
    return Chart(title, caption, svg)


def plain_ticks(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis whose data are drawn: exponents would be too small to read."""
    low, high = axis.get_view_interval()
    decades = np.log10(high / low)
    # With multiples, LogLocator draws no tick at all on five decades, and may draw a single one within a decade.
    log_spaced = LogLocator(subs=(1, 2, 5) if decades < 2 else (1,), numticks=4)
    axis.set_major_locator(log_spaced if decades > 1 else MaxNLocator(4))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_locator(NullLocator())


def _whole_steps(axes: Axes) -> None:
    """Steps along the x axis: a tick between two of them means nothing."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _online_probe(sources: Sources) -> Chart | None:
    """Online probe scores (left axis) and held-out SSL loss (right axis) over the run; the best score is marked."""
    rows = probed(sources.online)
    if not rows:
        return None
    steps, score = series(rows, "score")
    metric = METRICS.get(rows[-1]["metric"], str(rows[-1]["metric"]))
    title = f"Online probe: {plain(rows[-1]['target'])}"
    with canvas("online probe", 4.2, 2.35) as (figure, axes):
        _draw(axes, Line(metric, steps, score, points=True), 0)
        _draw(axes, Line("nearest neighbours", *series(rows, "knn"), points=True), 2)
        best = len(score) - 1 - int(score[::-1].argmax())  # of equal scores the last, as in words.advised_step
        axes.plot([steps[best]], [score[best]], "o", markersize=10, markerfacecolor="none", color=SERIES[0])
        _whole_steps(axes)
        axes.set_ylabel(metric)
        loss = series(sources.validation, "masked_over_baseline")
        if len(loss[0]):
            other = axes.twinx()
            other.spines["right"].set_visible(True)
            other.grid(visible=False)
            _draw(other, Line("held-out loss (right)", *loss), 1)
            other.set_ylabel("loss over baseline")
            handles = [h for part in (axes, other) for h in part.get_legend_handles_labels()[0]]
        else:
            handles = axes.get_legend_handles_labels()[0]
        figure.legend(handles, [str(h.get_label()) for h in handles], loc="outside upper left", ncols=2)
        spoken = f"Best {metric} {score[best]:.3g} at step {steps[best]:.0f}; last {score[-1]:.3g}"
        svg = to_svg(figure, f"{title}. {spoken}")
    caption = (
        "How well frozen features answered for validation participants while the run went on. The ring marks the "
        "checkpoint to take. The SSL loss is shown next to it because the two often disagree; the loss never chooses."
    )
    return Chart(title, caption, svg)


def _draw(axes: Axes, line: Line, i: int) -> None:
    steps, values = _thinned(line.steps, line.values)
    color = SERIES[i % len(SERIES)]
    # A single value makes no line, so it gets a marker.
    marker = MARKERS[i % len(MARKERS)] if line.points or len(steps) == 1 else None
    # The dash changes with every round of colours, so that more lines than colours still differ.
    dash = DASHES[(i + i // len(SERIES)) % len(DASHES)]
    axes.plot(steps, values, color=color, linestyle=dash, marker=marker, markersize=4, label=line.label)


def _thinned(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """At most MAX_POINTS values: from each group the one farthest from its median, so that spikes stay visible."""
    if len(steps) <= MAX_POINTS:
        return steps, values
    groups = np.array_split(np.arange(len(steps)), MAX_POINTS)
    kept = [group[np.abs(values[group] - np.median(values[group])).argmax()] for group in groups]
    return steps[kept], values[kept]


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def _lines(rows: list[dict[str, Any]], names: dict[str, str]) -> list[Line]:
    return [Line(label, *series(rows, name)) for name, label in names.items()]


def _validation(rows: list[dict[str, Any]], what: str) -> list[Line]:
    return [Line("held-out participants", *series(rows, f"{what}_over_baseline"), points=True)]


def _per_scanner(rows: list[dict[str, Any]]) -> list[Line]:
    names = sorted({name for row in rows for name in (row.get("by_scanner") or {})})
    by_scanner = [{**(row.get("by_scanner") or {}), "step": row.get("step")} for row in rows]
    return [Line(plain(name), *series(by_scanner, name)) for name in names]


def to_svg(figure: Figure, alt: str) -> str:
    """A figure of `canvas` or `panels` as an <svg> element: ids unique on the page, colours as CSS variables, text in
    the page's font."""
    key, buffer = figure.get_label(), io.StringIO()
    # The page's font has them: matplotlib's own only measures the text.
    with ignoring_warnings("Glyph .* missing from font"):
        # Without a date, equal data give equal bytes.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"| width="[\d.]+pt"| height="[\d.]+pt"| version="1.1"', "", svg, count=0)
    svg = svg.replace("xlink:href", "href")
    # Ids must be unique on the page; otherwise references would point into the first chart.
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{key}-\1"', svg)
    svg = re.sub(r'href="#([^"]+)"', rf'href="#{key}-\1"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", rf"url(#{key}-\1)", svg)
    svg = re.sub(r"font: (?:(\d+) )?([\d.]+)px [^;\"]+", _font, svg)
    svg = re.sub(r"font-family: [^;\"]+;?", "", svg)
    # Fixed colours would not follow the page's dark scheme.
    svg = svg.replace(INK, "currentColor").replace(GRID, "var(--grid)")
    for i, color in enumerate(SERIES):
        svg = svg.replace(color, f"var(--series-{i + 1})")
    # The label has the numbers; without this, some screen readers read every tick as well.
    svg = svg.replace("<g ", '<g aria-hidden="true" ', 1)
    return svg.replace("<svg", f'<svg role="img" aria-label={quoteattr(alt)}', 1)


def _font(found: re.Match[str]) -> str:
    weight = f"font-weight: {found[1]}; " if found[1] else ""
    return f"{weight}font-size: {found[2]}px"


def plain(name: str) -> str:
    """A name of data as a label in a chart."""
    # A dollar sign would start mathtext.
    return one_line(readable(name)).replace("$", r"\$")


def _spoken(r: dict[str, Any]) -> str:
    return f"{plain(r['target'])}, {r['encoder']}: {interval(r)}{'' if r['low'] is not None else ', no interval'}"
