"""The verbs around the packaged networks: models, agree."""

from pathlib import Path
from typing import Annotated

import typer

from octfm.cli import options as opt


def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Print the model card of this network, in Markdown; default: list all."),
    ] = None,
) -> None:
    """List the packaged networks, those of segment and the encoder: size, hash, licence; or print a model card.

    Examples:
    octfm models
    octfm models layers-2
    """
    from octfm.weights.card import model_card
    from octfm.weights.packaged import NOTE, everything_packaged, find_packaged

    if name is not None:
        typer.echo(model_card(find_packaged(name, everything_packaged())))
        return
    for network in everything_packaged():
        verb = "load_encoder() and octfm embed" if network.is_encoder else "octfm segment"
        use = f", used by {verb}" if network.current else ""
        typer.echo(f"{network.name}: {network.about}{use}")
        typer.echo(f"  {network.size_bytes / 1e6:.1f} MB, SHA-256 {network.digest[:12]}, licence {network.licence}")
        if network.is_encoder:
            typer.echo("  synthetic-supervised: learned from the truth of synthetic scans, not from unlabelled ones")
        else:
            typer.echo(f"  masks reported: {', '.join(mask.replace('_', ' ') for mask in network.masks) or 'none'}")
        typer.echo(f"  {NOTE}; octfm models {network.name} prints the model card")


def agree(
    table: Annotated[Path, opt.local_argument(metavar="TABLE", help="Table of octfm segment --out FILE.")],
    device: Annotated[
        Path | None,
        opt.local_option(
            metavar="TABLE",
            help="CSV with the device's zones (device_centre_um or centre_um …), matched by source, else by "
            "participant and laterality; default: the device's columns of that table.",
        ),
    ] = None,
    out: Annotated[Path, opt.local_option("--out", metavar="FILE", help="HTML file.")] = Path("agree.html"),
) -> None:
    """Compare octfm segment with the device over many eyes: Bland-Altman plots, bias and limits of every ETDRS zone.

    Examples:
    octfm agree eyes.csv --out agree.html
    """
    from octfm.report.segmented.agreement import summary_lines, write_agreement
    from octfm.trust.device_agreement import device_agreement

    result = device_agreement(table, device)
    for line in summary_lines(result):
        typer.echo(line)
    typer.echo(write_agreement(result, out, [opt.command_line()]))
