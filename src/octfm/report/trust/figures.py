"""Charts of the trust report: estimates with intervals in rows, reliability curves, Bland-Altman plots."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from octfm.report.figures import INK, MARKERS, SERIES, STYLE, Chart, plain, to_svg

DASHED: Any = (0, (3, 3))
MAX_POINTS = 500


@dataclass(frozen=True)
class Bar:
    label: str
    row: dict[str, Any]
    """With estimate or difference, low and high."""
    series: int = 0
    name: str = ""
    """Of the series, in the legend."""


def bars(title: str, caption: str, rows: Sequence[Bar], axis: str, reference: float | None) -> Chart | None:
    """One row per label; several series of a label stand below each other. Hollow: no interval."""

    def value(b: Bar) -> float | None:
        return b.row.get("difference", b.row.get("estimate"))

    rows = [b for b in rows if value(b) is not None]
    if not rows:
        return None
    labels, key = list(dict.fromkeys(b.label for b in rows)), _key(title)
    series = sorted({b.series for b in rows})
    with mpl.rc_context({**STYLE, "svg.hashsalt": key}):
        pitch = len(series) + (0.7 if len(series) > 1 else 0)
        figure = Figure(figsize=(6.4, 0.7 + 0.25 * max(2.0, len(labels) * pitch)), layout="constrained")
        axes = figure.subplots()
        for b in rows:
            y, color = labels.index(b.label) * pitch + series.index(b.series), SERIES[b.series % len(SERIES)]
            low, high, middle = b.row.get("low"), b.row.get("high"), value(b)
            if low is not None and high is not None:
                axes.plot([low, high], [y, y], color=color, linewidth=1.8, solid_capstyle="round")
            filled = color if low is not None else "none"
            marker = MARKERS[b.series % len(MARKERS)]
            shown = b.name if b.name and b is next(o for o in rows if o.series == b.series) else None
            axes.plot(
                [middle or 0.0],
                [y],
                marker,
                color=color,
                markerfacecolor=filled,
                markersize=5.5,
                linestyle="none",
                label=shown,
            )
        axes.set_yticks(
            [i * pitch + (len(series) - 1) / 2 for i in range(len(labels))], [plain(label) for label in labels]
        )
        axes.set_ylim(len(labels) * pitch - 0.4, -0.7)
        axes.grid(axis="y", visible=False)
        if reference is not None:
            axes.axvline(reference, color=INK, linewidth=0.9, linestyle=DASHED)
        axes.set_xlabel(axis)
        if any(b.name for b in rows):
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        spoken = "; ".join(f"{plain(b.label)}{', ' + b.name if b.name else ''} {value(b):.2f}" for b in rows)
        svg = to_svg(figure, key, f"{title}: {spoken}")
    return Chart(title, caption, svg)


def reliability(row: dict[str, Any], title: str, caption: str) -> Chart:
    """Observed share against predicted probability, with Wilson intervals; the diagonal is a calibrated model."""
    key = _key(f"reliability {row['target']} {row['encoder']}")
    with mpl.rc_context({**STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=(3.6, 3.1), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=INK, linewidth=0.9, linestyle=DASHED)
        curve = row["curve"]
        most = max(point["n"] for point in curve)
        for point in curve:
            axes.plot([point["predicted"]] * 2, [point["low"], point["high"]], color=SERIES[0], linewidth=1.2)
        axes.scatter(
            [p["predicted"] for p in curve], [p["observed"] for p in curve], [12 + 70 * p["n"] / most for p in curve],
            color=SERIES[0], zorder=3, linewidths=0,
        )  # fmt: skip
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel(plain(row["of"]))
        axes.set_ylabel("share observed")
        spoken = "; ".join(
            f"{p['predicted']:.2f} predicted, {p['observed']:.2f} observed, {p['n']} cases" for p in curve
        )
        svg = to_svg(figure, key, f"{title}: {spoken}")
    return Chart(title, caption, svg)


def bland_altman(pair: dict[str, Any], title: str, caption: str) -> Chart:
    """Difference of two scanners against their mean, one point per eye; lines are bias and limits of agreement, shades their intervals."""
    key = _key(f"agreement {pair['target']} {pair['a']} {pair['b']}")
    found = pair["bland_altman"]
    with mpl.rc_context({**STYLE, "svg.hashsalt": key}):
        figure = Figure(figsize=(4.2, 2.7), layout="constrained")
        axes = figure.subplots()
        points = pair["points"][:MAX_POINTS]
        axes.scatter(
            [m for m, _ in points], [d for _, d in points], 11, color=SERIES[0], alpha=0.7, linewidths=0, zorder=3
        )
        for name, dash in (("lower", DASHED), ("bias", "-"), ("upper", DASHED)):
            line = found[name]
            axes.axhline(line["estimate"], color=SERIES[1], linewidth=1.2, linestyle=dash)
            if line["low"] is not None:
                axes.axhspan(line["low"], line["high"], color=SERIES[1], alpha=0.13, linewidth=0)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel(f"mean of both, {plain(pair['quantity'])}")
        axes.set_ylabel("difference")
        spoken = ", ".join(f"{name} {found[name]['estimate']:.2f}" for name in ("bias", "lower", "upper"))
        svg = to_svg(figure, key, f"{title}: {len(pair['points'])} eyes, {spoken}")
    return Chart(title, caption, svg)


def _key(text: str) -> str:
    return "trust-" + re.sub(r"\W+", "-", text.lower()).strip("-")
