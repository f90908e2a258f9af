"""The verbs that show: report, card; imports happen inside the verbs."""

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(help="Run folder.")]
CatalogOption = Annotated[Path | None, typer.Option("--catalog", help="Folder written by `octfm scan`.")]
StoreOption = Annotated[Path | None, typer.Option("--store", help="Prepared store.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this file to the command."""
    for verb in (report, card):
        app.command()(verb)


def report(
    run: Run,
    catalog: CatalogOption = None,
    store: StoreOption = None,
    out: Annotated[Path | None, typer.Option("--out", help="HTML file; default: RUN/report.html.")] = None,
    images: Annotated[bool, typer.Option(help="Include B-scans.")] = True,
) -> None:
    """One self-contained page that says what was run and what came out."""
    from octfm.report.html import write_report

    typer.echo(str(write_report(run, out or run / "report.html", catalog=catalog, store_path=store, images=images)))


def card(
    run: Run,
    catalog: CatalogOption = None,
    store: StoreOption = None,
    licence: Annotated[str | None, typer.Option("--licence", "--license", help="Of the weights: apache-2.0, cc-by-nc-4.0, ...")] = None,
    data_agreement: Annotated[str | None, typer.Option(help="Terms of the pretraining data, and whether weights may be passed on.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the data set.")] = None,
    contact: Annotated[str | None, typer.Option(help="Whom to ask.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; default: the run folder.")] = None,
) -> None:
    """A model card for the hub, and drafts for a paper: methods, participant flow, CLAIM checklist, BibTeX."""
    from octfm.report.model_card import Statements, write_model_card
    from octfm.report.paper import write_paper

    folder = out or run
    said = Statements(licence, data_agreement, dataset, contact)
    typer.echo(str(write_model_card(run, folder / "model_card.md", catalog=catalog, store=store, statements=said)))
    typer.echo(str(write_paper(run, folder / "paper.md", catalog=catalog, store=store)))
