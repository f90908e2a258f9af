"""The verbs that show: report, compare, view, card; imports happen inside the verbs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from octfm.cli.options import FileGB, FileSeconds, limits_of, local_argument, local_option, place_argument, place_option

Run = Annotated[Path, local_argument(help="Run folder.")]
CatalogOption = Annotated[str | None, place_option("--catalog", help="Folder written by `octfm scan`.")]
StoreOption = Annotated[str | None, place_option("--store", help="Prepared store, also s3:// or gs://.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this file to the command."""
    for verb in (report, compare, view, card):
        app.command()(verb)


def report(
    run: Annotated[str, place_argument(metavar="RUN", help="Run folder or address of a run.")],
    catalog: CatalogOption = None,
    store: StoreOption = None,
    out: Annotated[
        str | None, place_option("--out", help="HTML file, also in a bucket; default: RUN/report.html.")
    ] = None,
    images: Annotated[
        bool,
        typer.Option(help="Include B-scans; without them it is a page to share: no id, path, date or UID is on it."),
    ] = True,
) -> None:
    """One self-contained page that says what was run and what came out."""
    from octfm.io.location import location
    from octfm.report.html import write_report

    page = location(out) if out is not None else location(run) / "report.html"
    places = {"catalog": _located(catalog), "store_path": _located(store)}
    typer.echo(str(write_report(run, page, **places, images=images)))


def compare(
    runs: Annotated[
        list[Path], local_argument(help="Two or more run folders; the first is the one that others are compared with.")
    ],
    labels: Annotated[
        Path | None, local_option(help="CSV or TSV of labels; default: those that the runs were probed with.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Target column; repeat for several. Default: all known ones.")
    ] = None,
    out: Annotated[Path, local_option("--out", help="HTML file.")] = Path("compare.html"),
    pairs: Annotated[
        bool, typer.Option(help="Probe all runs again on identical participants and resamples, for paired intervals.")
    ] = True,
    allow_seen: Annotated[
        bool, typer.Option(help="Flag, instead of refusing, test participants that any run was pretrained on.")
    ] = False,
) -> None:
    """Several runs on one page: what was set otherwise, curves, probes, and paired intervals where they can be computed."""
    from octfm.errors import ConfigError, EvaluationError
    from octfm.report.compare import labels_of, names_of, write_compare

    if len(runs) < 2:
        raise ConfigError("compare: expected two or more run folders; for one run there is octfm report")
    named, result, reason = names_of(runs), None, "They were not asked for (--no-pairs)."
    table = labels or labels_of(named)
    if pairs:
        from octfm.evaluation.compare import probe_together

        try:
            result, reason = probe_together(named, table, targets=target, allow_seen=allow_seen), ""
        except EvaluationError as error:
            # The error names paths and acquisitions, which have no place in a page that is passed around.
            reason = "The runs could not be probed together; octfm compare said why when it made this page."
            typer.echo(f"without paired intervals: {error}", err=True)
    typer.echo(str(write_compare(named, out, result, reason)))


def view(
    file: Annotated[
        str,
        place_argument(
            metavar="FILE", help="OCT file of any format, folder of B-scans, x.zip!/member, or an address in a bucket."
        ),
    ],
    out: Annotated[
        Path | None,
        local_option("--out", help="HTML file; default: the file's name with .html, in the current folder."),
    ] = None,
    run: Annotated[
        Path | None,
        local_option(
            help="Run of octfm pretrain or finetune, checkpoint or export: adds what its encoder, and head, make of it."
        ),
    ] = None,
    segment: Annotated[Path | None, local_option(help="Run of octfm segment: adds its layers and areas.")] = None,
    spacing: Annotated[str | None, typer.Option(help="dz,dy,dx in mm for a file that states none.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is.")] = None,
    file_seconds: FileSeconds = 10,
    file_gb: FileGB = 2,
) -> None:
    """Any OCT file as one page to scrub through, offline; under 25 MB. It shows the patient's scan: treat it like the file."""
    from octfm.errors import ConfigError, ReadError
    from octfm.formats import read_surfaces, read_volume
    from octfm.report.viewer import view_facts, write_view
    from octfm.tasks.view import scene_of

    page = out or Path(f"{Path(file.rstrip('/')).stem or 'view'}.html")
    if page.is_dir():
        raise ConfigError(
            f"--out {page}: expected the name of an HTML file, this is a folder; give for example {page / 'view.html'}"
        )
    stated = parse_spacing(spacing, "--spacing") if spacing else None
    limits = limits_of(file_seconds, file_gb)
    try:
        volume = read_volume(file, spacing_mm=stated, raster_only=False, limits=limits)
    except ReadError as error:
        if error.code != "missing_spacing":
            raise
        raise ReadError(error.code, f"{error}; here with --spacing dz,dy,dx") from None
    try:
        surfaces = read_surfaces(file, limits)
    except ReadError as error:
        surfaces = None
        typer.echo(f"without its layers: {error}", err=True)
    encoder = head = segmenter = None
    if run is not None:
        from octfm.encoder.trained_head import load_with_head

        encoder, head = load_with_head(run, device)
    if segment is not None:
        from octfm.tasks.segment import load_segmenter

        segmenter = load_segmenter(segment, device)
    scene = scene_of(volume, surfaces=surfaces, encoder=encoder, head=head, segmenter=segmenter)
    detail = (
        "As it lies in its file."
        if scene.is_raster == (volume.layout == "raster")
        else "A raster made of the star in its file."
    )
    typer.echo(str(write_view(scene, page, view_facts(volume, scene), detail)))


def card(
    run: Run,
    catalog: CatalogOption = None,
    store: StoreOption = None,
    licence: Annotated[
        str | None, typer.Option("--licence", "--license", help="Of the weights: apache-2.0, cc-by-nc-4.0, ...")
    ] = None,
    data_agreement: Annotated[
        str | None, typer.Option(help="Terms of the pretraining data, and whether weights may be passed on.")
    ] = None,
    dataset: Annotated[str | None, typer.Option(help="Name of the data set.")] = None,
    contact: Annotated[str | None, typer.Option(help="Whom to ask.")] = None,
    name: Annotated[str | None, typer.Option(help="What the model is called; the folder's name stays private.")] = None,
    out: Annotated[Path | None, local_option("--out", help="Folder; default: the run folder.")] = None,
) -> None:
    """A model card for the hub, and drafts for a paper: methods, participant flow, CLAIM checklist, BibTeX."""
    from octfm.report.card.model_card import Statements, write_model_card
    from octfm.report.card.paper import write_paper

    folder = out or run
    said = Statements(licence, data_agreement, dataset, contact)
    common = {"catalog": _located(catalog), "store": _located(store), "name": name}
    typer.echo(str(write_model_card(run, folder / "model_card.md", statements=said, **common)))
    typer.echo(str(write_paper(run, folder / "paper.md", **common)))


def _located(place: str | None) -> Any:
    from octfm.io.location import location

    return location(place) if place is not None else None


def parse_spacing(text: str, option: str) -> tuple[float, float, float]:
    """`dz,dy,dx` in millimetres."""
    from octfm.errors import ConfigError, shown

    try:
        z, y, x = (float(mm) for mm in text.split(","))
    except ValueError:
        z = y = x = 0.0
    if not all(1e-4 <= mm <= 100 for mm in (z, y, x)):
        raise ConfigError(f"{option}: expected dz,dy,dx in millimetres such as 0.12,0.0039,0.0115; got {shown(text)}")
    return z, y, x
