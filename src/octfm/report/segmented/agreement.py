"""The page of octfm agree: Bland-Altman plots and limits of octfm segment against the device, zone by zone."""

from pathlib import Path
from typing import Any

from octfm.display import interval, number, readable
from octfm.report.page import html_file, render, write_page
from octfm.report.shareable import shareable_command
from octfm.report.trust.figures import bland_altman

MOST_LISTED = 200
CAPTION = (
    "One point per scan. Solid: bias; dashed: limits of agreement (± 1.96 standard deviations, within and between "
    "participants together); shaded: their "
    "95\u00a0% intervals. Above 0 octfm measures more than the device."
)


def write_agreement(result: dict[str, Any], out: str | Path, commands: list[str]) -> Path:
    """Render what `device_agreement` returned, without paths, which may name people; returns the page's path. Raises
    EvaluationError if `out` is a folder."""
    from octfm.weights.packaged import NOTE

    zones = []
    for zone in result["zones"]:
        cells = dict.fromkeys(("bias", "lower", "upper"), "")
        if limits := zone["bland_altman"]:
            cells = {name: interval(limits[name], digits=1) for name in cells}
        slope = zone["slope_per_100_um"]
        zones.append(zone | cells | {"slope": interval(slope, digits=1) if slope else ""})
    facts = {
        **result,
        "zones": zones,
        "sentence": f"{sentence(result)} {_changing(result)}".strip(),
        "pooled": pooled_scanners(result),
        "plots": [bland_altman(z, z["target"].capitalize(), CAPTION) for z in result["zones"] if z["bland_altman"]],
        "listed": result["large"][:MOST_LISTED],
        "note": NOTE,
        "commands": [shareable_command(command) for command in commands],
    }
    return write_page(render("agreement.html.jinja", facts), Path(str(html_file(out, "agree.html"))))


def sentence(result: dict[str, Any]) -> str:
    """The agreement in the central zone, in one sentence."""
    centre = next((zone for zone in result["zones"] if zone["target"] == "centre"), None)
    if centre is None or not centre["n_eyes"]:
        lacking = f": octfm lacks it in {number(centre['without_ours'], 'scan')}" if centre else ""
        return f"No scan has a central zone of octfm and of the device{lacking}."
    scans = number(centre["n_eyes"], "scan")
    who = f"{scans} of {number(centre['n_participants'], 'participant')}" if result["participant_column"] else scans
    if not (limits := centre["bland_altman"]):
        few = "too few for limits of agreement"
        return f"Centre: octfm minus the device is {_mean_um(centre):+z.1f} µm on average ({who}, {few})."
    bias, lower, upper = (limits[name] for name in ("bias", "lower", "upper"))
    between = f"between {lower['estimate']:+z.1f} and {upper['estimate']:+z.1f} µm"
    if bias["low"] is None:
        return (
            f"Centre: octfm minus the device is {bias['estimate']:+z.1f} µm on average; limits of agreement lie "
            f"{between}, but {who} are too few to expect others there."
        )
    return (
        f"Centre: octfm minus the device is {bias['estimate']:+z.1f} µm on average (95\u00a0% interval "
        f"{bias['low']:+z.1f} to {bias['high']:+z.1f}); 95\u00a0% of scans are expected {between} if differences are "
        f"normally distributed ({scans})."
    )


def _changing(result: dict[str, Any]) -> str:
    """The zones whose limits do not hold at every thickness, in one sentence; empty if there is none."""
    if not result["changing"]:
        return ""
    return (
        f"The difference changes with thickness in {', '.join(result['changing'])} (slope not 0, after correction for "
        f"{len(result['zones'])} zones): there the limits do not hold over the whole range (Bland & Altman 1999)."
    )


def pooled_scanners(result: dict[str, Any]) -> str:
    """A sentence that names the scanners whose rows are pooled; empty if there is one."""
    if len(result["scanners"]) < 2:
        return ""
    each = ", ".join(f"{count} of {readable(name)}" for name, count in sorted(result["scanners"].items()))
    return (
        f"The scans of several scanners are pooled ({each}), and makers measure to different boundaries; bias and "
        "limits are those of this mixture. Compare the rows of each scanner by themselves."
    )


def _mean_um(zone: dict[str, Any]) -> float:
    """The mean difference in a zone that has no limits of agreement."""
    return sum(difference for _, difference in zone["points"]) / len(zone["points"])


def summary_lines(result: dict[str, Any]) -> list[str]:
    """The result for a terminal."""
    lines = [f"{result['used']} of {result['rows']} rows used"]
    lines += [f"  {count} left out: {reason}" for reason, count in result["left_out"].items() if count]
    for zone in result["zones"]:
        counted = f"  {zone['target']:15} n {zone['n_eyes']:4}"
        if limits := zone["bland_altman"]:
            bias, lower, upper = (interval(limits[name], digits=1) for name in ("bias", "lower", "upper"))
            lines.append(f"{counted}  bias {bias}  limits {lower} to {upper} µm")
        elif zone["points"]:
            lines.append(f"{counted}  {_mean_um(zone):+z.1f} µm on average, too few for limits of agreement")
        else:
            lines.append(f"{counted}  octfm lacks it in {number(zone['without_ours'], 'scan')}")
    if changing := _changing(result):
        lines.append(f"  {changing}")
    if pooled := pooled_scanners(result):
        lines.append(f"  {pooled}")
    if result["corrected"]:
        lines.append(f"  {result['corrected']} of them corrected by hand: there the device is compared with a person")
    if result["participant_column"] is None:
        lines.append("  the table names no participants: intervals take every row for an independent eye")
    return lines
