"""Charts of the trust report: estimates with intervals in rows, reliability curves, Bland-Altman plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np

from octfm.report.figures import DASHED, INK, REFERENCE, SERIES, Chart, canvas, draw_interval, plain, to_svg

MAX_POINTS = 500


@dataclass(frozen=True)
class Bar:
    """An estimate with its interval, in the row `label` of a chart."""

    label: str
    row: dict[str, Any]
    """With estimate or difference, low and high."""
    series: int = 0
    name: str = ""
    """Name of the series in the legend."""

    @property
    def value(self) -> float | None:
        return self.row.get("difference", self.row.get("estimate"))


def bars(title: str, caption: str, rows: Sequence[Bar], axis: str, reference: float | None) -> Chart | None:
    """One row per label, with its series below each other. Hollow markers have no interval."""
    known = [(b, b.value) for b in rows if b.value is not None]
    if not known:
        return None
    labels = list(dict.fromkeys(b.label for b, _ in known))
    series = sorted({b.series for b, _ in known})
    pitch = len(series) + (0.7 if len(series) > 1 else 0)
    with canvas(f"trust {title}", 4.9, 0.7 + 0.25 * max(2.0, len(labels) * pitch)) as (figure, axes):
        in_legend: set[int] = set()
        for b, value in known:
            label = fill(b.name, 44) if b.name and b.series not in in_legend else None
            in_legend.add(b.series)
            y = labels.index(b.label) * pitch + series.index(b.series)
            draw_interval(axes, y, value, b.row, b.series, label)
        middles = [i * pitch + (len(series) - 1) / 2 for i in range(len(labels))]
        axes.set_yticks(middles, [plain(label) for label in labels])
        axes.set_ylim(len(labels) * pitch - 0.4, -0.7)
        axes.grid(axis="y", visible=False)
        if reference is not None:
            axes.axvline(reference, **REFERENCE)
        axes.set_xlabel(axis)
        if any(b.name for b, _ in known):
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper left")
        spoken = "; ".join(f"{plain(b.label)}{', ' + b.name if b.name else ''} {value:.2f}" for b, value in known)
        svg = to_svg(figure, f"{title}: {spoken}")
    return Chart(title, caption, svg)


def reliability(row: dict[str, Any], title: str, caption: str) -> Chart:
    """Observed share against predicted probability, with Wilson intervals; the diagonal is a calibrated model."""
    with canvas(f"trust reliability {row['target']} {row['encoder']}", 3.6, 3.1) as (figure, axes):
        axes.plot([0, 1], [0, 1], **REFERENCE)
        curve = row["curve"]
        most = max(point["n"] for point in curve)
        for point in curve:
            axes.plot([point["predicted"]] * 2, [point["low"], point["high"]], color=SERIES[0], linewidth=1.2)
        across, up, size = zip(*((p["predicted"], p["observed"], 12 + 70 * p["n"] / most) for p in curve), strict=True)
        axes.scatter(across, up, size, color=SERIES[0], zorder=3, linewidths=0)
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.02)
        axes.set_xlabel(plain(row["of"]))
        axes.set_ylabel("share observed")
        spoken = "; ".join(
            f"{p['predicted']:.2f} predicted, {p['observed']:.2f} observed, {p['n']} cases" for p in curve
        )
        svg = to_svg(figure, f"{title}: {spoken}")
    return Chart(title, caption, svg)


def bland_altman(pair: dict[str, Any], title: str, caption: str) -> Chart:
    """Bland-Altman plot (doi 10.1016/S0140-6736(86)90837-8): difference of two scanners against their mean, per eye.
    Lines are bias and limits of agreement, shaded are their intervals."""
    found, points = pair["bland_altman"], sorted(pair["points"], key=lambda point: point[1])
    if len(points) > MAX_POINTS:
        caption += f" Of {len(points):,} points {MAX_POINTS} are drawn, evenly by difference, with both extremes."
        points = [points[i] for i in np.linspace(0, len(points) - 1, MAX_POINTS).round().astype(int)]
    with canvas(f"trust agreement {pair['target']} {pair['a']} {pair['b']}", 4.2, 2.7) as (figure, axes):
        mean, difference = zip(*points, strict=True)
        axes.scatter(mean, difference, 11, color=SERIES[0], alpha=0.7, linewidths=0, zorder=3)
        for name, dash in (("lower", DASHED), ("bias", "-"), ("upper", DASHED)):
            line = found[name]
            axes.axhline(line["estimate"], color=SERIES[1], linewidth=1.2, linestyle=dash)
            if line["low"] is not None:
                axes.axhspan(line["low"], line["high"], color=SERIES[1], alpha=0.13, linewidth=0)
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel(f"mean of both, {plain(pair['quantity'])}")
        axes.set_ylabel(f"difference, {plain(pair['quantity'])}")
        spoken = ", ".join(f"{name} {found[name]['estimate']:.2f}" for name in ("bias", "lower", "upper"))
        svg = to_svg(figure, f"{title}, {plain(pair['quantity'])}, {len(pair['points'])} points: {spoken}")
    return Chart(title, caption, svg)
