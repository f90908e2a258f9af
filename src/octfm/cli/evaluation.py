"""The verbs that judge an encoder: thin calls of the public functions; imports happen inside the verbs."""

import functools
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from octfm.addresses import expect_place
from octfm.cli.options import (
    Exclude,
    FileGB,
    FileSeconds,
    limits_of,
    local_argument,
    local_option,
    place_argument,
    place_option,
)

Out = Annotated[Path, local_option("--out", help="Folder to write into.")]
OutPlace = Annotated[str, place_option("--out", help="Folder, or s3:// or gs:// address, to write into.")]


def register(app: typer.Typer) -> None:
    """Add the verbs of this file to the command."""
    for verb in (probe, finetune, leaderboard, trust, segment):
        app.command()(verb)


def probe(
    run: Annotated[
        str, place_argument(metavar="RUN", help="Run folder or address of a run, with embeddings (see `octfm embed`).")
    ],
    labels: Annotated[
        Path | None, local_option(help="CSV or TSV with participant_id (and laterality) and one column per target.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="Target column; repeat for several. Default: all known ones that are present."),
    ] = None,
    exclude: Exclude = None,
    allow_seen: Annotated[
        bool, typer.Option(help="Flag, instead of refusing, test participants that pretraining has seen.")
    ] = False,
    readout: Annotated[str, typer.Option(help="linear (logistic, ridge) or knn (nearest neighbours).")] = "linear",
    order: Annotated[
        list[str] | None, typer.Option(help="Grades of a column, lowest first: severity=none,mild,severe.")
    ] = None,
    embeddings: Annotated[
        str | None,
        place_option(help="Folder of embeddings (octfm embed --out), also in a bucket; default: RUN/embeddings."),
    ] = None,
    out: Annotated[
        Path | None, local_option("--out", help="Folder for probe.json; default: --embeddings, else the run.")
    ] = None,
    design: Annotated[
        str,
        typer.Option(
            help="recommended_split (train and val against test), k-fold (all whom pretraining has not seen), or auto."
        ),
    ] = "auto",
    folds: Annotated[int | None, typer.Option(help="Folds of k-fold; default: 5.", min=2, max=1000)] = None,
    seeds: Annotated[int, typer.Option(help="Repeat folds and subsets with so many seeds.", min=1, max=1000)] = 1,
    label_efficiency: Annotated[
        bool, typer.Option(help="Also with 1, 5, 10, 25, 50 and 100 % of the training participants.")
    ] = False,
) -> None:
    """Frozen probes with participant-level intervals."""
    from octfm.encoder.embed import embedding_files
    from octfm.encoder.embeddings import read_embeddings, without_excluded_vectors
    from octfm.encoder.encoder import seen_by
    from octfm.encoder.exported import refuse_inside_export
    from octfm.evaluation.efficiency import curve_lines
    from octfm.evaluation.efficiency import label_efficiency as curve
    from octfm.evaluation.probe import probe as run_probe
    from octfm.evaluation.probe import summary_lines, write_probe
    from octfm.evaluation.readouts import choose_readout
    from octfm.io.location import location
    from octfm.run.bucket import local_run
    from octfm.store.exclusion import to_stderr

    command = "octfm " + " ".join(sys.argv[1:])
    chosen = choose_readout(readout)
    folder = location(out or embeddings or run)
    refuse_inside_export(folder)
    files = embedding_files(run, embeddings) if embeddings is not None else embedding_files(local_run(run))
    if exclude is not None:
        # Lines that name no volume are the same for every encoder: say so once.
        echoes = [to_stderr, *[lambda line: None] * (len(files) - 1)]
        files = [
            without_excluded_vectors(read_embeddings(file), exclude, echo)
            for file, echo in zip(files, echoes, strict=True)
        ]
    common = {
        "targets": target,
        "orders": _orders(order),
        "readout": chosen,
        "seen": seen_by(run),
        "allow_seen": allow_seen,
    }
    common |= {"design": design, "folds": folds}
    result = run_probe(files, labels, seeds=seeds, commands=[command], **common)
    for line in summary_lines(result):
        typer.echo(line)
    if label_efficiency:
        rows, compared = curve(files, labels, seeds=max(3, seeds), **common)
        result |= {"label_efficiency": rows, "label_efficiency_comparisons": compared}
        for line in curve_lines(rows, compared):
            typer.echo(line)
    typer.echo(str(write_probe(folder / ("probe.json" if chosen == "linear" else f"probe-{chosen}.json"), result)))


def finetune(
    config: Annotated[
        str, typer.Argument(help="YAML file or a packaged config: study_group_linear, _attentive or _finetune.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, for example encoder=runs/a store=prepared/ target=diagnosis")
    ] = None,
    out: OutPlace = "runs/finetune",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is.")] = None,
    allow_seen: Annotated[
        bool, typer.Option(help="Flag, instead of refusing, test participants that pretraining has seen.")
    ] = False,
) -> None:
    """Train for one label: a head on a frozen encoder, or head first and then the encoder; the same command resumes."""
    from octfm.config import load
    from octfm.io.location import location
    from octfm.tasks.finetune import finetune as tune
    from octfm.tasks.finetune import summary
    from octfm.tasks.finetune_settings import FinetuneConfig

    run = tune(load(FinetuneConfig, config, overrides or []), out, device, allow_seen=allow_seen, echo=typer.echo)
    if os.environ.get("RANK", "0") != "0":
        return
    for line in summary(run):
        typer.echo(line)
    typer.echo(str(location(out) / "finetune.json"))


def leaderboard(
    entries: Annotated[
        list[Path], local_argument(help="Runs, checkpoints and folders of octfm finetune; the first is the reference.")
    ],
    store: Annotated[list[str], place_option(help="Prepared store, also s3:// or gs://; one for each Preprocessing.")],
    target: Annotated[str, typer.Option(help="Label column.")] = "study_group",
    labels: Annotated[
        Path | None, local_option(help="CSV or TSV; default: what the store knows about its participants.")
    ] = None,
    order: Annotated[
        list[str] | None, typer.Option(help="Grades of a column, lowest first: severity=none,mild,severe.")
    ] = None,
    exclude: Exclude = None,
    allow_seen: Annotated[
        bool, typer.Option(help="Flag, instead of refusing, test participants that were trained on.")
    ] = False,
    out: Out = Path("leaderboard"),
) -> None:
    """Several checkpoints and fine-tuned models on identical data and splits, beside baselines: CSV, Markdown, HTML."""
    from octfm.evaluation.probe import write_probe
    from octfm.io.location import write_whole
    from octfm.report.leaderboard import write_leaderboard
    from octfm.trust import leaderboard as board

    command = "octfm " + " ".join(sys.argv[1:])
    result = board.leaderboard(
        entries,
        store,
        target,
        out,
        labels=labels,
        orders=_orders(order),
        exclude=exclude,
        allow_seen=allow_seen,
        commands=[command],
        echo=typer.echo,
    )
    text = board.to_markdown(result)
    typer.echo(text)
    write_probe(out / "leaderboard.json", result)
    write_whole(out / "leaderboard.csv", board.to_csv(result).encode())
    write_whole(out / "leaderboard.md", text.encode())
    typer.echo(
        str(write_leaderboard(result, [row["encoder"] for row in board.ranked(result)], out / "leaderboard.html"))
    )


def trust(
    run: Annotated[Path, local_argument(help="Run folder or checkpoint of pretraining.")],
    store: Annotated[
        list[str], place_option(help="Prepared store of RUN, also s3:// or gs://; one for each Preprocessing.")
    ],
    labels: Annotated[
        Path | None, local_option(help="CSV or TSV; default: what the store knows about its participants.")
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="Label column; repeat for several. Default: all known ones that are there.")
    ] = None,
    order: Annotated[
        list[str] | None, typer.Option(help="Grades of a column, lowest first: severity=none,mild,severe.")
    ] = None,
    other: Annotated[
        list[Path] | None,
        local_option(help="Another run, such as one pretrained on a single scanner; compared by pairs."),
    ] = None,
    external: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own encoder, FILE.py:FUNCTION or module:FUNCTION; its code runs (docs/guide/evaluate.md)."
        ),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(help="Column to look for gaps in, besides site, age, eye and scanner; repeat for several."),
    ] = None,
    age_bands: Annotated[
        str, typer.Option(help="Where one age band ends and the next begins, in years.")
    ] = "50,60,70,80",
    from_scratch_epochs: Annotated[
        float,
        typer.Option(help="Epochs of the supervised baseline, for every target; 0 leaves it out.", min=0, max=100_000),
    ] = 60,
    images: Annotated[bool, typer.Option(help="Show B-scans on the page.")] = True,
    exclude: Exclude = None,
    allow_seen: Annotated[
        bool, typer.Option(help="Flag, instead of refusing, test participants that were trained on.")
    ] = False,
    out: Out = Path("trust"),
) -> None:
    """What an encoder is worth, on whom, on which scanner, how surely: trust.html and trust.json, with every baseline."""
    from octfm.errors import ConfigError
    from octfm.evaluation.probe import write_probe
    from octfm.report.trust.page import summary_lines, write_trust
    from octfm.store.store import Store
    from octfm.trust.report import trust as judge

    try:
        bands = [float(year) for year in age_bands.split(",")]
    except ValueError:
        raise ConfigError(f"--age-bands: expected rising years such as 50,60,70, got {age_bands!r}") from None
    result = judge(
        run,
        store,
        out,
        labels=labels,
        targets=target,
        orders=_orders(order),
        others=other or (),
        external=external or (),
        groups=group or (),
        age_bands=bands,
        from_scratch_epochs=from_scratch_epochs,
        exclude=exclude,
        allow_seen=allow_seen,
        commands=["octfm " + " ".join(sys.argv[1:])],
        echo=typer.echo,
    )
    write_probe(out / "trust.json", result)
    for line in summary_lines(result):
        typer.echo(line)
    typer.echo(str(write_trust(result, Store.open(store[0]), out / "trust.html", images=images)))


def segment(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="key=value: encoder=runs/a store=prepared/ truth=clinic/ground_truth; or files, with --apply."
        ),
    ] = None,
    out: OutPlace = "runs/segment",
    apply: Annotated[
        str | None, place_option(help="A finished segmentation: segment these files with it, into the folder --out.")
    ] = None,
    dicom: Annotated[
        bool, typer.Option("--dicom", help="With --apply: also DICOM SEG and height maps, for DICOM files.")
    ] = False,
    baselines: Annotated[
        bool, typer.Option(help="Also random initialisation, bare voxels and the mean height.")
    ] = True,
    allow_seen: Annotated[
        bool, typer.Option(help="Flag, instead of refusing, test participants that pretraining has seen.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is.")] = None,
    file_seconds: FileSeconds = 10,
    file_gb: FileGB = 2,
) -> None:
    """Layer surfaces and fluid from tokens: train and judge in µm and Dice (the same command resumes), or apply to files and export NIfTI
    and DICOM."""
    from octfm.config import load
    from octfm.formats import read_volume, within
    from octfm.io.location import local_path, location
    from octfm.tasks.segment import load_segmenter
    from octfm.tasks.segment_export import write_dicom, write_nifti
    from octfm.tasks.segment_score import segment as run_segment
    from octfm.tasks.segment_score import summary_lines
    from octfm.tasks.segment_settings import SegmentConfig

    if apply is None:
        config = load(SegmentConfig, {}, words or [])
        for line in summary_lines(
            run_segment(config, out, device, baselines=baselines, allow_seen=allow_seen, echo=typer.echo)
        ):
            typer.echo(line)
        typer.echo(str(location(out) / "segment.json"))
        return
    folder = local_path(out)
    segmenter, limits = load_segmenter(apply, device), limits_of(file_seconds, file_gb)
    for file in [expect_place(word) for word in words or []]:
        volume = read_volume(file, limits=limits)
        found = segmenter.segment(volume)
        written = write_nifti(found, folder, Path(file).stem)
        written += within(limits, functools.partial(write_dicom, found, folder=folder), file) if dicom else []
        for path in written:
            typer.echo(str(path))


def _orders(texts: list[str] | None) -> dict[str, tuple[str, ...]]:
    """`severity=none,mild,severe` as a mapping."""
    from octfm.errors import ConfigError

    orders = {}
    for text in texts or []:
        column, equals, grades = text.partition("=")
        orders[column] = tuple(grade.strip() for grade in grades.split(","))
        if not equals or len(set(orders[column])) < 3:
            raise ConfigError(
                f"--order: expected a column and three or more grades, lowest first, severity=none,mild,severe; got {text!r}"
            )
    return orders
