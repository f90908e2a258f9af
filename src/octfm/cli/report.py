"""The verbs that show results: report, compare, view, card."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octfm.cli import options as opt
from octfm.errors import ConfigError, EvaluationError, ReadError, UnknownColumn

if TYPE_CHECKING:
    from octfm.io.isolation import Limits
    from octfm.volume.volume import Fundus, Spacing3, Surfaces, Volume

CatalogOption = Annotated[
    opt.Place, opt.option("CATALOG", "Folder written by `octfm scan`.", "--catalog", parser=opt.place)
]
StoreOption = Annotated[
    opt.Place, opt.option("STORE", "Prepared store, also s3:// or gs://.", "--store", parser=opt.place)
]


def report(
    run: Annotated[opt.Place, opt.argument("RUN", "Folder or address of a run.", parser=opt.place)],
    catalog: CatalogOption = None,
    store: StoreOption = None,
    out: Annotated[
        opt.Place, opt.page_option("HTML file, also in a bucket; default: RUN/report.html.", parser=opt.place)
    ] = None,
    images: Annotated[
        bool,
        opt.flag("Include B-scans. A page made with --no-images can be shared: it contains no id, path, date or UID."),
    ] = True,
) -> None:
    """Write one self-contained HTML page about a run: settings, data and results.

    Examples:
    octfm report runs/vit_s
    octfm report runs/vit_s --no-images --out shareable.html
    """
    from octfm.report.html import write_report

    page = run / "report.html" if out is None else out
    opt.echo_line(write_report(run, page, catalog=catalog, store_path=store, images=images))


def compare(
    runs: Annotated[
        list[Path], opt.local_argument("RUN", "Two or more run folders; the others are compared with the first.")
    ],
    labels: Annotated[
        Path | None, opt.local_option("TABLE", "Label table (CSV or TSV); default: the one the runs were probed with.")
    ] = None,
    target: opt.Targets = None,
    order: opt.Order = None,
    out: Annotated[Path, opt.page_option("HTML file.")] = Path("compare.html"),
    pairs: Annotated[
        bool, opt.flag("Probe all runs again, on identical participants and resamples, for paired intervals.")
    ] = True,
    allow_seen: opt.AllowSeen = False,
) -> None:
    """Compare runs on one page: settings that differ, curves, probes, and paired intervals where possible.

    Examples:
    octfm compare runs/vit_s runs/mae --labels labels.tsv --target diagnosis
    """
    from octfm.catalog.labels import read_labels
    from octfm.report.compare import labels_of, names_of, write_compare

    if len(runs) < 2:
        raise ConfigError("compare: expected two or more run folders; for one run there is octfm report")
    if labels is not None:
        read_labels(labels)  # a wrong table is an error, not a page without intervals
    orders = opt.parse_orders(order)
    named, result, reason = names_of(runs), None, "They were not requested (--no-pairs)."
    remarks: list[str] = []
    if pairs:
        from octfm.encoder.embed import older_vectors
        from octfm.evaluation.probe import probe_together

        table = labels or labels_of(named, remarks.append)
        try:
            result, reason = probe_together(named, table, targets=target, orders=orders, allow_seen=allow_seen), ""
            older = (older_vectors(run, run / "embeddings" / "pretrained.parquet") for run in runs)
            remarks += filter(None, older)
        except EvaluationError as error:
            if isinstance(error, UnknownColumn) and not remarks:
                raise  # mistyped; not the column of a table that the runs do not share
            # Not the whole error, which names paths and acquisitions: the page may be passed on.
            reason = error.public or "The runs could not be probed together."
            remarks.append(f"without paired intervals: {error}")
    page = write_compare(named, out, result, reason)
    # Not earlier: where there is no page, the error stands alone.
    opt.echo_line(*remarks, err=True)
    opt.echo_line(page)


def view(
    context: typer.Context,
    file: Annotated[
        str | None,
        opt.place_argument(
            "FILE",
            "OCT file of any format, folder of B-scans, x.zip!/member, or an address in a bucket; with --sample: "
            "healthy, drusen or dme.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        opt.page_option("HTML file; default: the file's name with .html, in the current folder.", "--out"),
    ] = None,
    run: Annotated[
        Path | None,
        opt.local_option(
            "RUN", "Pretraining or fine-tuning run, checkpoint or export: adds maps of its encoder (and head)."
        ),
    ] = None,
    segment: Annotated[Path | None, opt.local_option("RUN", "Run of octfm segment: adds its layers and areas.")] = None,
    layers: Annotated[
        bool, opt.flag("Add surfaces, fluid and the map of thickness that the packaged network of segment finds.")
    ] = False,
    axial_length: opt.AxialLength = None,
    overlay: Annotated[
        list[str] | None,
        opt.place_option(
            "FILE",
            "Lines or labels of this scan in another file, such as the DICOM SEG, height map and NIfTI of octfm "
            "segment --out; repeatable.",
        ),
    ] = None,
    sample: Annotated[
        bool, opt.flag("Show a synthetic scan with its layers, to try octfm without data.", "--sample")
    ] = False,
    spacing: Annotated[
        str | None, opt.option("DZ,DY,DX", "Millimetres between B-scans, rows and A-scans, if a file has none.")
    ] = None,
    device: opt.Device = None,
    file_seconds: opt.FileSeconds = 10,
    file_gb: opt.FileGB = 2,
) -> None:
    """Show an OCT file as one offline HTML page (under 25 MB); it contains the scan, so protect it like the file.

    Examples:
    octfm view scan.dcm --layers
    octfm view scan.dcm --overlay found/scan_seg.dcm --overlay found/scan_heights.dcm
    octfm view --sample
    """
    from octfm.formats import read_overlay
    from octfm.report.viewer import view_facts, write_view
    from octfm.tasks.view import scene_of

    if file is None and not sample:
        raise ConfigError("view: expected a file; octfm view --sample shows a synthetic scan")
    name = f"sample-{file or 'dme'}" if sample else str(file)
    page = out or Path(f"{Path(name.rstrip('/')).stem or 'view'}.html")
    if page.is_dir():
        raise ConfigError(
            f"--out {page}: expected the name of an HTML file, this is a folder; give for example {page / 'view.html'}"
        )
    if sample:
        others = ("overlay", "spacing", "segment", "axial_length", "file_seconds", "file_gb")
        opt.refuse(context, others, "--sample shows a synthetic scan and its layers")
    beside = []
    if sample:
        from octfm.layers.sample import samples

        volume, surfaces, fundus = samples([file or "dme"])[0].volume, None, None
    else:
        limits = opt.limits_of(file_seconds, file_gb)
        volume, surfaces = _read(name, opt.parse_spacing(spacing, "--spacing"), limits)
        fundus = _fundus(name, limits)
        beside = [read_overlay(file, volume, limits) for file in overlay or ()]
    encoder = head = segmenter = None
    if run is not None:
        from octfm.encoder.tuned import load_with_head

        encoder, head = load_with_head(run, device)
    if segment is not None:
        from octfm.tasks.segment import load_segmenter

        segmenter = load_segmenter(segment, device)
    layers = layers or sample
    if layers and segment is not None:
        raise ConfigError("view: give --layers or --segment, not both")
    if axial_length is not None and not layers:
        raise ConfigError("--axial-length: rescales zones and volumes of a scan; add --layers")
    found, correct, layer_facts, verdict = None, None, [], []
    if layers:
        from octfm.io.heap import keep_freed_memory
        from octfm.layers.segment import segment as segment_scan
        from octfm.report.segmented.correct import correction_facts
        from octfm.report.segmented.pictures import facts_of, verdict_of

        keep_freed_memory()
        found = segment_scan(volume, axial_length_mm=axial_length, device=device)
        correct, layer_facts, verdict = correction_facts(found), facts_of(found), verdict_of(found)
    scene = scene_of(
        volume,
        surfaces=surfaces,
        encoder=encoder,
        head=head,
        segmenter=segmenter,
        found=found,
        fundus=fundus,
        beside=beside,
    )
    detail = "As it is in its file."
    if scene.is_raster != (volume.layout == "raster"):
        detail = "A raster made from the radial scan in its file."
    if sample:
        detail = "Synthetic: no patient's scan."
    facts = [*layer_facts, *view_facts(volume, scene, axial_length)]
    opt.echo_line(write_view(scene, page, facts, detail, corrections=correct, verdict=verdict))


def _read(file: str, spacing_mm: "Spacing3 | None", limits: "Limits") -> "tuple[Volume, Surfaces | None]":
    """A volume and the layers of its file."""
    from octfm.formats import read_surfaces, read_volume
    from octfm.formats.bscans import OR_SINGLE

    try:
        volume = read_volume(file, spacing_mm=spacing_mm, raster_only=False, structure_only=False, limits=limits)
    except ReadError as error:
        hint = {
            "missing_spacing": "; octfm view also takes --spacing",
            "layer_heights": f": octfm view SCAN --overlay {shlex.quote(file)}",
            "voxel_labels": f": octfm view SCAN --overlay {shlex.quote(file)}",
        }.get(error.code, "")
        # A page shows one scan.
        sentence = str(error).replace(
            OR_SINGLE, f", or, if each image is a separate scan: octfm view {shlex.quote(f'{file}/IMAGE')}"
        )
        raise ReadError(error.code, f"{sentence}{hint}") from None
    try:
        return volume, read_surfaces(file, limits)
    except ReadError as error:
        opt.echo_line(f"shown without its layers: {error}", err=True)
        return volume, None


def _fundus(file: str, limits: "Limits") -> "Fundus | None":
    """The picture of the fundus in a file, if it can be read."""
    from octfm.formats import read_fundus

    try:
        return read_fundus(file, limits)
    except ReadError as error:
        opt.echo_line(f"shown without its picture of the fundus: {error}", err=True)
        return None


def card(
    run: Annotated[Path, opt.local_argument("RUN", "Run folder.")],
    catalog: CatalogOption = None,
    store: StoreOption = None,
    licence: Annotated[
        str | None,
        opt.option(
            "LICENCE",
            "Licence of the weights: apache-2.0, cc-by-nc-4.0, ..., or 'NAME, ADDRESS' of another.",
            "--licence",
            "--license",
        ),
    ] = None,
    data_agreement: Annotated[
        str | None, opt.option("TEXT", "Terms of the pretraining data, and whether the weights may be redistributed.")
    ] = None,
    dataset: Annotated[str | None, opt.option("NAME", "Name of the data set.")] = None,
    contact: Annotated[str | None, opt.option("CONTACT", "Contact for questions.")] = None,
    name: Annotated[
        str | None, opt.option("NAME", "Name of the model; the folder's name is not used, as it may be private.")
    ] = None,
    out: Annotated[Path | None, opt.local_option("FOLDER", "Output folder; default: the run folder.", "--out")] = None,
) -> None:
    """Write a model card for the hub, and drafts for a paper: methods, participant flow, CLAIM checklist, BibTeX.

    Examples:
    octfm card runs/vit_s --licence apache-2.0
    """
    from octfm.io.location import write_whole
    from octfm.report.card.model_card import Statements, model_card
    from octfm.report.card.paper import paper

    statements = Statements(licence, data_agreement, dataset, contact)
    common = {"catalog": catalog, "store": store, "name": name}
    texts = {"model_card.md": model_card(run, statements=statements, **common), "paper.md": paper(run, **common)}
    for file, text in texts.items():
        write_whole((out or run) / file, text.encode())
        opt.echo_line((out or run) / file)
