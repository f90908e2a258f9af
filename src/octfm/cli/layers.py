"""The verbs around the packaged networks of octfm segment: models, agree."""

from typing import Annotated

import typer


def models(
    name: Annotated[
        str | None, typer.Argument(help="Print the model card of this network, in Markdown; default: list all.")
    ] = None,
) -> None:
    """List the packaged networks: size, hash, licence, what they find, what they are not for; or print a model card."""
    from octfm.layers.card import model_card
    from octfm.layers.packaged import CURRENT, NOTE, find_packaged, packaged

    if name is not None:
        typer.echo(model_card(find_packaged(name)))
        return
    for network in packaged():
        use = ", used by octfm segment" if network.name == CURRENT else ""
        masks = ", ".join(mask.replace("_", " ") for mask in network.masks) or "none"
        typer.echo(f"{network.name}: {network.about}{use}")
        typer.echo(f"  {network.size_bytes / 1e6:.1f} MB, SHA-256 {network.digest[:12]}, licence {network.licence}")
        typer.echo(f"  masks reported: {masks}")
        typer.echo(f"  {NOTE}; octfm models {network.name} prints the model card")
