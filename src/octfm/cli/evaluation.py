"""The verbs that evaluate an encoder: probe, finetune, leaderboard, trust, segment."""

import functools
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octfm.addresses import expect_place
from octfm.cli import options as opt

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from octfm.io.isolation import Limits
    from octfm.layers.sample import Sample
    from octfm.volume.volume import Laterality, Volume

DEFAULT_SEGMENT = Path("runs/segment")


def probe(
    run: Annotated[
        str,
        opt.place_argument(
            metavar="RUN", help="Run that has embeddings (see `octfm embed`); with --embeddings any encoder: encoder-2."
        ),
    ],
    labels: Annotated[
        Path | None,
        opt.local_option(
            metavar="TABLE", help="CSV or TSV with participant_id (and laterality) and one column per target."
        ),
    ] = None,
    target: opt.Targets = None,
    exclude: opt.Exclude = None,
    allow_seen: opt.AllowSeen = False,
    readout: Annotated[
        str,
        typer.Option(
            metavar="READOUT", help="linear (logistic, ridge), knn (nearest neighbours) or trees (boosted trees)."
        ),
    ] = "linear",
    order: opt.Order = None,
    embeddings: Annotated[
        str | None,
        opt.place_option(
            metavar="FOLDER",
            help="Folder of embeddings (octfm embed --out), also in a bucket; default: RUN/embeddings.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        opt.local_option(
            "--out", metavar="FOLDER", help="Folder for probe.json; default: --embeddings if given, else RUN."
        ),
    ] = None,
    design: Annotated[
        str,
        typer.Option(
            metavar="DESIGN",
            help="recommended_split (fit on train and val, test on test), k-fold (test every participant that "
            "pretraining has not seen), or auto.",
        ),
    ] = "auto",
    folds: Annotated[
        int | None, typer.Option(metavar="N", help="Number of folds for k-fold; default: 5.", min=2, max=1000)
    ] = None,
    seeds: Annotated[
        int, typer.Option(metavar="N", help="Repeat folds and subsets with this many seeds.", min=1, max=1000)
    ] = 1,
    label_efficiency: Annotated[
        bool, typer.Option(help="Also fit on 1, 5, 10, 25, 50 and 100 % of the training participants.")
    ] = False,
) -> None:
    """Fit probes on frozen embeddings; confidence intervals resample participants.

    Examples:
    octfm probe runs/vit_s --labels labels.tsv --target diagnosis
    """
    from octfm.catalog.labels import read_labels
    from octfm.encoder.embed import embedding_files
    from octfm.encoder.embeddings import read_embeddings, without_excluded_vectors
    from octfm.encoder.encoder import seen_by
    from octfm.evaluation.arms import make_arms
    from octfm.evaluation.cases import TARGETS
    from octfm.evaluation.efficiency import curve_lines
    from octfm.evaluation.efficiency import label_efficiency as curve
    from octfm.evaluation.probe import probe as run_probe
    from octfm.evaluation.probe import summary_lines, write_probe
    from octfm.evaluation.readouts import choose_readout
    from octfm.io.location import location
    from octfm.run.bucket import local_run
    from octfm.store.exclusion import to_stderr
    from octfm.weights.exported import refuse_inside_export

    chosen = choose_readout(readout)
    folder = location(out or embeddings or run)
    refuse_inside_export(folder)
    files = embedding_files(run, embeddings) if embeddings is not None else embedding_files(local_run(run))
    if exclude is not None:
        # Warnings about unmatched lines of --exclude are the same for every encoder: print them once.
        echoes = [to_stderr, *[lambda line: None] * (len(files) - 1)]
        files = [
            without_excluded_vectors(read_embeddings(file), exclude, echo)
            for file, echo in zip(files, echoes, strict=True)
        ]
    arms = make_arms(files)
    common = {
        "targets": target,
        "orders": opt.parse_orders(order),
        "readout": chosen,
        "seen": seen_by(run),
        "allow_seen": allow_seen,
        "design": design,
        "folds": folds,
    }
    result = run_probe(arms, labels, seeds=seeds, commands=[opt.command_line()], **common)
    for line in summary_lines(result):
        typer.echo(line)
    if labels is not None and not target:
        asked = {known.column for known in TARGETS}
        if others := [column for column in read_labels(labels).columns if column not in asked]:
            opt.echo_line(f"{labels}: not probed: {', '.join(others)}; name a column with --target")
    if label_efficiency:
        # A single draw of a few participants says little: intervals must also cover other draws.
        rows, compared = curve(arms, labels, seeds=max(3, seeds), **common)
        result |= {"label_efficiency": rows, "label_efficiency_comparisons": compared}
        for line in curve_lines(rows, compared):
            typer.echo(line)
    typer.echo(write_probe(folder / ("probe.json" if chosen == "linear" else f"probe-{chosen}.json"), result))


def finetune(
    config: Annotated[
        str,
        opt.config_argument(
            "finetune",
            "YAML file, or packaged config: study_group_linear, study_group_attentive or study_group_finetune.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="key=value, for example encoder=runs/a store=prepared/ target=diagnosis"
        ),
    ] = None,
    store: opt.Store = None,
    epochs: opt.Epochs = None,
    out: opt.OutPlace = Path("runs/finetune"),
    device: opt.Device = None,
    allow_seen: opt.AllowSeen = False,
) -> None:
    """Train for one label: a head on a frozen encoder, or the head and then the encoder; the same command resumes.

    Examples:
    octfm finetune study_group_linear encoder=runs/vit_s --store prepared target=diagnosis
    octfm finetune study_group_finetune encoder=runs/vit_s --store prepared --epochs 10 --out runs/tuned
    """
    from octfm.config import load
    from octfm.tasks.finetune import finetune as tune
    from octfm.tasks.finetune import summary
    from octfm.tasks.finetune_settings import FinetuneConfig

    settings = load(FinetuneConfig, config, opt.with_options(overrides, {"store": store, "epochs": epochs}))
    run = tune(settings, out, device, allow_seen=allow_seen, echo=typer.echo)
    # Every rank runs this command; only the first one prints the result.
    if os.environ.get("RANK", "0") != "0":
        return
    for line in summary(run):
        typer.echo(line)
    typer.echo(out / "finetune.json")


def leaderboard(
    entries: Annotated[
        list[Path],
        opt.local_argument(
            metavar="RUN",
            help="Runs of pretraining or fine-tuning, and checkpoints; the others are compared with the first.",
        ),
    ],
    store: Annotated[
        list[str],
        opt.place_option(metavar="STORE", help="Prepared store, also s3:// or gs://; repeat, one per preprocessing."),
    ],
    target: Annotated[str, typer.Option(metavar="COLUMN", help="Label column.")] = "study_group",
    labels: opt.StoreLabels = None,
    order: opt.Order = None,
    exclude: opt.Exclude = None,
    allow_seen: opt.AllowSeen = False,
    out: opt.Out = Path("leaderboard"),
) -> None:
    """Compare checkpoints, fine-tuned models and baselines on identical data and splits: CSV, Markdown, HTML.

    Examples:
    octfm leaderboard runs/vit_s runs/mae --store prepared --target diagnosis
    """
    from octfm.evaluation.probe import write_probe
    from octfm.io.location import write_whole
    from octfm.report.leaderboard import write_leaderboard
    from octfm.trust import leaderboard as board

    result = board.leaderboard(
        entries,
        store,
        target,
        out,
        labels=labels,
        orders=opt.parse_orders(order),
        exclude=exclude,
        allow_seen=allow_seen,
        commands=[opt.command_line()],
        echo=typer.echo,
    )
    text = board.to_markdown(result)
    typer.echo(text)
    write_probe(out / "leaderboard.json", result)
    write_whole(out / "leaderboard.csv", board.to_csv(result).encode())
    write_whole(out / "leaderboard.md", text.encode())
    names = [row["encoder"] for row in board.ranked(result)]
    typer.echo(write_leaderboard(result, names, out / "leaderboard.html"))


def trust(
    run: Annotated[Path, opt.local_argument(metavar="RUN", help="Pretraining run or checkpoint.")],
    store: Annotated[
        list[str],
        opt.place_option(
            metavar="STORE", help="Prepared store of RUN, also s3:// or gs://; repeat, one per preprocessing."
        ),
    ],
    labels: opt.StoreLabels = None,
    target: opt.Targets = None,
    order: opt.Order = None,
    other: Annotated[
        list[Path] | None,
        opt.local_option(
            metavar="RUN", help="Another run for paired comparison, for example one pretrained on a single scanner."
        ),
    ] = None,
    external: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FUNCTION", help="Your own encoder, FILE.py:FUNCTION or module:FUNCTION; its code is executed."
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN",
            help="Column of subgroups to compare, besides site, age, eye and scanner; repeat for several.",
        ),
    ] = None,
    age_bands: Annotated[
        str, typer.Option(metavar="YEARS", help="Boundaries between age bands, in years.")
    ] = "50,60,70,80",
    from_scratch_epochs: Annotated[
        float,
        typer.Option(
            metavar="N",
            help="Epochs of the supervised baseline trained for every target; 0: no such baseline.",
            min=0,
            max=100_000,
        ),
    ] = 60,
    images: Annotated[bool, typer.Option(help="Show B-scans on the page.")] = True,
    exclude: opt.Exclude = None,
    allow_seen: opt.AllowSeen = False,
    out: opt.Out = Path("trust"),
) -> None:
    """Evaluate an encoder against every baseline, by subgroup and scanner, with intervals: trust.html, trust.json.

    Examples:
    octfm trust runs/vit_s --store prepared --labels labels.tsv --target diagnosis
    """
    from octfm.errors import ConfigError
    from octfm.evaluation.probe import write_probe
    from octfm.report.trust.page import summary_lines, write_trust
    from octfm.store.store import Store
    from octfm.trust.report import trust as judge

    try:
        bands = [float(year) for year in age_bands.split(",")]
    except ValueError:
        raise ConfigError(
            f"--age-bands: expected years in ascending order such as 50,60,70, got {age_bands!r}"
        ) from None
    result = judge(
        run,
        store,
        out,
        labels=labels,
        targets=target,
        orders=opt.parse_orders(order),
        others=other or (),
        external=external or (),
        groups=group or (),
        age_bands=bands,
        from_scratch_epochs=from_scratch_epochs,
        exclude=exclude,
        allow_seen=allow_seen,
        commands=[opt.command_line()],
        echo=typer.echo,
    )
    write_probe(out / "trust.json", result)
    for line in summary_lines(result):
        typer.echo(line)
    typer.echo(write_trust(result, Store.open(store[0]), out / "trust.html", images=images))


def segment(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE|KEY=VALUE",
            help="Files or folders to segment with the packaged network; or settings of a training, such as "
            "encoder=runs/a store=prepared/ truth=clinic/ground_truth; with --apply: files.",
        ),
    ] = None,
    store: opt.Store = None,
    steps: opt.Steps = None,
    out: Annotated[
        opt.Place,
        typer.Option(
            "--out",
            parser=opt.place,
            metavar="FOLDER|TABLE",
            help="Output folder, or with scans a table FILE.csv; of a training also an s3:// or gs:// address.",
        ),
    ] = DEFAULT_SEGMENT,
    apply: Annotated[
        str | None,
        opt.place_option(
            metavar="RUN",
            help="Apply this finished segmentation run to the given files; results go to the folder --out.",
        ),
    ] = None,
    dicom: Annotated[
        bool,
        typer.Option(
            "--dicom", help="Also write DICOM SEG and height maps into --out FOLDER; the scans must be DICOM files."
        ),
    ] = False,
    calibrate: Annotated[
        Path | None,
        opt.local_option(
            metavar="TABLE",
            help="CSV with source, participant and corrected zones (centre_um …) of at least 50 of your participants, "
            "such as a table of --apply-corrections: turns the ranges of the table --out into 90 % intervals for their "
            "scanner.",
        ),
    ] = None,
    apply_corrections: Annotated[
        Path | None,
        opt.local_option(
            metavar="FILE",
            help="Corrections made by hand in a page of octfm view --layers, or a folder of such files: scans that "
            "were corrected get the corrected lines, areas and zones.",
        ),
    ] = None,
    only_corrected: Annotated[
        bool,
        typer.Option(
            "--only-corrected",
            help="With --apply-corrections and --out FILE.csv: only rows of corrected scans, a table of labels for "
            "octfm finetune.",
        ),
    ] = False,
    layouts: Annotated[
        str, typer.Option(metavar="LAYOUTS", help="any, or line: every image in a folder is a single B-scan.")
    ] = "any",
    axial_length: opt.AxialLength = None,
    sample: Annotated[
        bool,
        typer.Option(
            "--sample", help="Segment synthetic scans (healthy, drusen, dme; default: all), to try it without data."
        ),
    ] = False,
    baselines: Annotated[
        bool, typer.Option(help="Also score baselines: random initialisation, raw voxels, mean height.")
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
    octfm segment my_scans/ --out eyes.csv
    octfm segment scan.e2e --apply-corrections corrections-1f2e3d4c.json
    octfm segment my_bscans/ --layouts line --out bscans.csv
    octfm segment encoder=runs/vit_s --store prepared truth=clinic/ground_truth --steps 400 --out runs/segment
    """
    from octfm.config import load
    from octfm.errors import ConfigError
    from octfm.formats import read_volume, within
    from octfm.io.location import local_path
    from octfm.tasks.segment import load_segmenter
    from octfm.tasks.segment_export import write_dicom, write_nifti
    from octfm.tasks.segment_score import segment as run_segment
    from octfm.tasks.segment_score import summary_lines
    from octfm.tasks.segment_settings import SegmentConfig

    if only_corrected and (apply_corrections is None or out.suffix != ".csv"):
        raise ConfigError(
            "--only-corrected: leaves scans out of a table; add --apply-corrections FOLDER and --out FILE.csv"
        )
    if layouts not in ("any", "line"):
        raise ConfigError(f"--layouts: expected any or line, got {layouts!r}")
    training_only, files_only = ("baselines", "allow_seen"), ("dicom", "layouts", "file_seconds", "file_gb")
    if sample:
        others = ("store", "steps", "apply", "calibrate", "axial_length", *training_only, *files_only)
        opt.refuse(context, others, "--sample segments synthetic scans")
        limits, made = opt.limits_of(file_seconds, file_gb), _samples(words or [])
        volumes = [each.volume for each in made]
        _segment_scans(volumes, out, dicom, limits, None, apply_corrections, only_corrected, device, truth=made)
        return
    if axial_length is not None and (apply is not None or out.suffix == ".csv"):
        raise ConfigError("--axial-length: belongs to one eye; give its scan, without --apply or a table")
    is_training = store is not None or steps is not None
    if not words and not is_training:
        raise ConfigError(
            "segment: nothing to segment; give scans (octfm segment scan.e2e), or octfm segment --sample without data"
        )
    if is_training and (apply is not None or any("=" not in word or Path(word).exists() for word in words or [])):
        raise ConfigError(
            "--store and --steps: settings of a training; with --apply or files to segment leave them out"
        )
    if apply is None and words and not is_training and all("=" not in word or Path(word).exists() for word in words):
        opt.refuse(context, training_only, "segment: uses the packaged network for scans")
        limits = opt.limits_of(file_seconds, file_gb)
        volumes = opt.volumes_in(words, limits, layouts)
        if not volumes:
            raise ConfigError(
                f"{', '.join(words)}: no scan in it; check the path, or run octfm scan, which lists every file with "
                "the reason"
            )
        if axial_length is not None and len(volumes) > 1:
            raise ConfigError(f"--axial-length: belongs to one eye; give one scan instead of {len(volumes)}")
        named = [*volumes]
        _segment_scans(
            named, out, dicom, limits, calibrate, apply_corrections, only_corrected, device, axial_length, volumes
        )
        return
    if axial_length is not None:
        raise ConfigError("--axial-length: rescales zones and volumes of a scan; give a scan")
    if apply_corrections is not None:
        raise ConfigError(
            "--apply-corrections: corrects what the packaged network finds; give scans, or truth=FOLDER to train on it"
        )
    if calibrate is not None:
        raise ConfigError("--calibrate: scales the ranges of the packaged network; give scans and --out FILE.csv")
    if apply is None:
        opt.refuse(context, files_only, "segment: trains on a store")
        config = load(SegmentConfig, {}, opt.with_options(words, {"store": store, "steps": steps}))
        result = run_segment(config, out, device, baselines=baselines, allow_seen=allow_seen, echo=typer.echo)
        for line in summary_lines(result):
            typer.echo(line)
        typer.echo(out / "segment.json")
        return
    opt.refuse(context, (*training_only, "layouts"), "--apply: uses a finished training on the files named")
    folder = local_path(out)
    segmenter, limits = load_segmenter(apply, device), opt.limits_of(file_seconds, file_gb)
    for file, stem in _stems(expect_place(word) for word in words or []).items():
        volume = read_volume(file, limits=limits)
        found = segmenter.segment(volume)
        written = write_nifti(found, folder, stem, volume)
        write = functools.partial(write_dicom, found, folder=folder, stem=stem)
        written += within(limits, write, file) if dicom else []
        for path in written:
            typer.echo(path)


def _stems(sources: "Iterable[str]") -> dict[str, str]:
    """Source → the stem of its results. Where files of several folders have one name, theirs end in a part of the hash
    of the path, so that none overwrites another's."""
    from octfm.io.hashing import hash_text

    stems = {source: Path(source).stem for source in sources}
    count = Counter(stems.values())
    return {source: stem if count[stem] == 1 else f"{stem}-{hash_text(source)[:8]}" for source, stem in stems.items()}


def _samples(names: list[str]) -> "list[Sample]":
    from octfm.layers.sample import samples

    made = samples(names)
    for each in made:
        true = f"a true central thickness of {each.centre_um:.1f} µm around its pit"
        typer.echo(f"{each.volume.source}: synthetic, with {true}")
    return made


def _segment_scans(
    sources: "Sequence[str | Volume]",
    out: Path,
    dicom: bool,
    limits: "Limits",
    calibrate: Path | None,
    corrections: Path | None,
    only_corrected: bool,
    device: str | None,
    axial_length_mm: float | None = None,
    eyes: "Mapping[str, Laterality | None] | None" = None,
    truth: "Sequence[Sample]" = (),
) -> None:
    """Segment files or volumes with the packaged network. `eyes`: file → the eye that its path names; `truth`: what is
    known of the volumes, printed where zones were found."""
    from octfm.errors import ConfigError, CorrectionsError, ReadError, one_line
    from octfm.formats import read_volume, within
    from octfm.io.heap import keep_freed_memory
    from octfm.io.progress import Progress
    from octfm.layers.calibrate import calibrate_rows, read_corrected
    from octfm.layers.corrections import find_corrections
    from octfm.layers.segment import segment as segment_scan
    from octfm.layers.table import describe, only_writer, read_table, save_table, write_table
    from octfm.layers.zones import device_grid_of
    from octfm.report.segmented.contact_sheet import ContactSheet
    from octfm.tasks.segment_export import write_dicom, write_nifti
    from octfm.volume.pixel_copies import fingerprint
    from octfm.volume.volume import Volume

    keep_freed_memory()
    if dicom and (out == DEFAULT_SEGMENT or out.suffix == ".csv"):
        raise ConfigError("--dicom: writes files into a folder; add --out FOLDER")
    if calibrate is not None and out.suffix != ".csv":
        raise ConfigError("--calibrate: scales the ranges of a table; add --out FILE.csv")
    if calibrate is not None:
        read_corrected(calibrate)  # before hours of work
    by_hand = find_corrections(corrections) if corrections is not None else {}
    if out.suffix == ".csv":
        if len(sources) == 1 and isinstance(sources[0], str):
            read_volume(sources[0], raster_only=False, limits=limits)  # an error, not a table of one problem
        sheet = ContactSheet(out)
        with Progress("segment", len(sources), "scans") as progress:
            added = write_table(
                progress.over(sources),
                out,
                limits=limits,
                device=device,
                corrections=by_hand,
                only_corrected=only_corrected,
                eyes=eyes,
                also=sheet.add,
                echo=opt.echo_line,
            )
        failed = sum(bool(row["problem"]) and row["source"] in sources for row in read_table(out))
        problems = f"; {failed} could not be read or segmented, see the column problem" if failed else ""
        typer.echo(f"{out}: {added} new of {len(sources)} scans{problems}")
        if calibrate is not None:
            with only_writer(out):
                rows, told = calibrate_rows(read_table(out), calibrate)
                save_table(rows, out)
            for line in told:
                opt.echo_line(line)
        typer.echo(sheet.write(read_table(out)))
        if failed == len(sources):
            raise typer.Exit(1)
        return
    stems = _stems(each.source if isinstance(each, Volume) else each for each in sources)
    unread, used = 0, 0
    with Progress("segment", len(sources), "scans") as progress:
        for source in progress.over(sources):
            try:
                if isinstance(source, str):
                    volume = read_volume(source, raster_only=False, limits=limits).with_eye((eyes or {}).get(source))
                else:
                    volume = source
            except ReadError as error:
                if len(sources) == 1:
                    raise
                typer.echo(one_line(error), err=True)
                unread += 1
                continue
            own = by_hand.get(fingerprint(volume.voxels)) if by_hand else None
            if corrections is not None and own is None and len(by_hand) == len(sources) == 1:
                next(iter(by_hand.values())).require(volume, "")  # says which scan it is of, before it is segmented
            found = segment_scan(volume, axial_length_mm=axial_length_mm, device=device)
            if own is not None:
                found = found.corrected(own)
                used += 1
            grid = None if isinstance(source, Volume) else device_grid_of(source, limits)
            for line in describe(found, grid).splitlines():
                opt.echo_line(line)
            if (sample := next((each for each in truth if each.volume is volume), None)) and found.verdict.accepted:
                true = sample.centre_at(found.etdrs().centre_mm)
                typer.echo(f"  true central thickness where the zones lie: {true:.1f} µm")
            if out != DEFAULT_SEGMENT:
                name = source.source if isinstance(source, Volume) else source
                written = write_nifti(found, out, stems[name], volume)
                write = functools.partial(write_dicom, found, folder=out, stem=stems[name])
                written += within(limits, write, name) if dicom else []
                for path in written:
                    typer.echo(path)
    if by_hand and not used:
        raise CorrectionsError(f"{corrections}: corrections of none of these scans; give the scan that was corrected")
    if unread:
        typer.echo(f"{unread} of {len(sources)} scans could not be read", err=True)
        raise typer.Exit(1)
