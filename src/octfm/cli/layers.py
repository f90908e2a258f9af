"""The verbs of layers and fluid, and of the packaged networks: segment, agree, models."""

from pathlib import Path
from typing import Annotated

import typer

from octfm.cli import options as opt
from octfm.errors import ConfigError
from octfm.io.location import Location, local_path

DEFAULT_SEGMENT = Path("runs/segment")


def segment(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        opt.argument(
            "FILE|KEY=VALUE",
            "Files, folders or a catalog to segment, with the packaged network or --apply; or settings to train a "
            "segmenter, such as encoder=runs/a store=prepared/ truth=clinic/ground_truth.",
        ),
    ] = None,
    store: opt.Store = None,
    steps: opt.Steps = None,
    out: Annotated[
        opt.Place,
        opt.option(
            "FOLDER|TABLE",
            "Output folder, or with scans a table FILE.csv; for a training also an s3:// or gs:// address.",
            "--out",
            parser=opt.place,
        ),
    ] = DEFAULT_SEGMENT,
    apply: Annotated[
        str | None,
        opt.place_option(
            "RUN", "Apply this finished segmentation run to the given files or folders; results go to the folder --out."
        ),
    ] = None,
    dicom: Annotated[
        bool,
        opt.flag("Also write DICOM SEG and height maps into --out FOLDER; the scans must be DICOM files.", "--dicom"),
    ] = False,
    calibrate: Annotated[
        Path | None,
        opt.local_option(
            "TABLE",
            "CSV with source, participant and corrected zones (centre_um …) of at least 50 of your participants, "
            "such as a table of --apply-corrections: turns the ranges of the table --out into 90 % intervals for their "
            "scanner.",
        ),
    ] = None,
    apply_corrections: Annotated[
        Path | None,
        opt.local_option(
            "FILE",
            "Corrections made by hand in a page of octfm view --layers, or a folder of such files: scans that "
            "were corrected get the corrected lines, areas and zones.",
        ),
    ] = None,
    only_corrected: Annotated[
        bool,
        opt.flag(
            "With --apply-corrections and --out FILE.csv: only rows of corrected scans, a table of labels for "
            "octfm finetune.",
            "--only-corrected",
        ),
    ] = False,
    layouts: opt.LayoutsBelow = "any",
    axial_length: opt.AxialLengths = None,
    sample: Annotated[
        bool,
        opt.flag("Segment synthetic scans (healthy, drusen, dme; default: all), to try it without data.", "--sample"),
    ] = False,
    workers: Annotated[
        int,
        opt.option(
            "N",
            "With --out FILE.csv: segment N scans at a time, in processes of one thread and some .6 GB each; by "
            "default one scan, with all cores.",
            min=0,
            max=1024,
        ),
    ] = 0,
    baselines: Annotated[
        bool, opt.flag("Also score baselines: random initialisation, raw voxels, mean height.")
    ] = True,
    allow_seen: opt.AllowSeen = False,
    device: opt.Device = None,
    file_seconds: opt.FileSeconds = 10,
    file_gb: opt.FileGB = 2,
) -> None:
    """Segment layers and fluid of scans with the packaged network; or train and score a segmenter of your own.

    octfm segment scan.e2e prints thickness and fluid; --out table.csv writes a row per scan and resumes; --out FOLDER
    writes NIfTI (and, with --dicom, DICOM SEG and height maps).

    Examples:
    octfm segment scan.e2e
    octfm segment my_scans/ --out eyes.csv --workers 8
    octfm segment catalog --out eyes.csv --axial-length biometry.csv
    octfm segment scan.e2e --apply-corrections corrections-1f2e3d4c.json
    octfm segment my_bscans/ --layouts line --out bscans.csv
    octfm segment encoder=runs/vit_s --store prepared truth=clinic/ground_truth --steps 400 --out runs/segment
    """
    from octfm.cli.segment_scans import Scans, in_catalogs

    training_only, files_only = ("baselines", "allow_seen"), ("dicom", "layouts", "workers", "file_seconds", "file_gb")
    packaged_only = ("calibrate", "apply_corrections", "only_corrected", "axial_length")
    words, limits = words or [], opt.limits_of(file_seconds, file_gb)
    has_settings = store is not None or steps is not None
    are_files = ["=" not in word or Path(word).exists() for word in words]
    if sample:
        others = ("store", "steps", "apply", "calibrate", "axial_length", *training_only, *files_only)
        opt.refuse(context, others, "--sample segments synthetic scans")
    elif has_settings and (apply is not None or any(are_files)):
        raise ConfigError(
            "--store and --steps: settings of a training; with --apply or files to segment leave them out"
        )
    elif apply is None and (has_settings or not all(are_files)):
        opt.refuse(context, (*files_only, *packaged_only), "segment: trains on a store")
        _train(opt.with_options(words, {"store": store, "steps": steps}), out, device, baselines, allow_seen)
        return
    scans = Scans(
        None if out == DEFAULT_SEGMENT and apply is None else local_path(out),
        limits,
        device,
        apply=apply,
        dicom=dicom,
        calibrate=calibrate,
        corrections=apply_corrections,
        only_corrected=only_corrected,
        axial_length=axial_length,
        workers=workers,
    )
    if sample:
        scans.segment_samples(words)
        return
    if not words:
        raise ConfigError(
            "segment: nothing to segment; give scans (octfm segment scan.e2e), or octfm segment --sample without data"
        )
    if apply is None:
        opt.refuse(context, training_only, "segment: uses the packaged network for scans")
    else:
        others = (*training_only, *packaged_only, "layouts")
        opt.refuse(context, others, "--apply: segments raster scans with a finished training")
    words, catalogued = in_catalogs(words, raster_only=apply is not None)
    if catalogued and layouts != "any":
        raise ConfigError("--layouts: a catalog says of each scan what it is; leave it out, or give the folder")
    volumes = opt.volumes_in(words, limits, layouts if apply is None else "raster") if words else {}
    volumes |= catalogued
    scans.segment([*volumes], known=volumes)


def _train(settings: list[str], out: "Path | Location", device: str | None, baselines: bool, allow_seen: bool) -> None:
    from octfm.config import load
    from octfm.tasks.segment_score import segment, summary_lines
    from octfm.tasks.segment_settings import SegmentConfig

    config = load(SegmentConfig, {}, settings)
    result = segment(config, out, device, baselines=baselines, allow_seen=allow_seen, echo=opt.echo_line)
    opt.echo_line(*summary_lines(result))
    opt.echo_line(out / "segment.json")


def models(
    name: Annotated[
        str | None, opt.argument("NAME", "Print the model card of this network, in Markdown; default: list all.")
    ] = None,
) -> None:
    """List the packaged networks (for segment, and the encoder): size, hash, licence; or print a model card.

    Examples:
    octfm models
    octfm models layers-2
    """
    from octfm.weights.packaged import NOTE, everything_packaged, find_packaged

    if name is not None:
        from octfm.weights.card import model_card

        opt.echo_line(*model_card(find_packaged(name, everything_packaged())).split("\n"))
        return
    for network in everything_packaged():
        verb = "load_encoder() and octfm embed" if network.is_encoder else "octfm segment"
        use = f", used by {verb}" if network.current else ""
        opt.echo_line(f"{network.name}: {network.about}{use}")
        opt.echo_line(f"  {network.size_bytes / 1e6:.1f} MB, SHA-256 {network.digest[:12]}, licence {network.licence}")
        if network.is_encoder:
            opt.echo_line("  synthetic-supervised: learned from the truth of synthetic scans, not from unlabelled ones")
        else:
            opt.echo_line(f"  masks reported: {', '.join(mask.replace('_', ' ') for mask in network.masks) or 'none'}")
        opt.echo_line(f"  {NOTE}; octfm models {network.name} prints the model card")


def agree(
    table: Annotated[Path, opt.local_argument("TABLE", "Table of octfm segment --out FILE.")],
    device: Annotated[
        Path | None,
        opt.local_option(
            "TABLE",
            "CSV with the device's zones (device_centre_um or centre_um …), matched by source, else by "
            "participant and laterality; default: the device's columns of that table.",
        ),
    ] = None,
    out: Annotated[Path, opt.page_option("HTML file.")] = Path("agree.html"),
) -> None:
    """Compare octfm segment with the device over many eyes: Bland-Altman plots, bias and limits of every ETDRS zone.

    Examples:
    octfm agree eyes.csv --out agree.html
    """
    from octfm.report.segmented.agreement import summary_lines, write_agreement
    from octfm.trust.device_agreement import device_agreement

    result = device_agreement(table, device)
    opt.echo_line(*summary_lines(result))
    opt.echo_line(write_agreement(result, out, [opt.command_line()]))
