"""The verbs that use an encoder: embed, export."""

from pathlib import Path
from typing import Annotated

import typer

from octfm.cli import options as opt


def embed(
    run: Annotated[
        str,
        opt.place_argument(
            metavar="RUN", help="Pretraining or fine-tuning run, checkpoint or export; also s3:// or gs://."
        ),
    ],
    store: Annotated[
        str | None,
        opt.place_option(metavar="STORE", help="Prepared store to embed, also s3:// or gs://; default: prepared."),
    ] = None,
    files: Annotated[
        str | None,
        opt.place_option(
            metavar="FOLDER", help="Instead of --store: folder or address of OCT files, read directly; requires --out."
        ),
    ] = None,
    catalog: Annotated[
        str | None,
        opt.place_option(metavar="CATALOG", help="Instead of --store: catalog of files (octfm scan); requires --out."),
    ] = None,
    out: Annotated[
        str | None,
        opt.place_option(
            "--out",
            metavar="FOLDER",
            help="Folder for the parquet files (with --files also in a bucket); default: RUN/embeddings. Required if "
            "RUN is an export.",
        ),
    ] = None,
    baselines: Annotated[
        bool | None,
        typer.Option(
            help="Also embed with baselines (random initialisation, intensity histogram); default: only for a store."
        ),
    ] = None,
    head: Annotated[
        Path | None,
        opt.local_option(
            metavar="RUN",
            help="Run of octfm finetune on this encoder, frozen: adds its attention and occlusion maps to the report.",
        ),
    ] = None,
    segment: Annotated[
        Path | None,
        opt.local_option(metavar="RUN", help="Run of octfm segment: adds its layers and areas to the report."),
    ] = None,
    exclude: opt.Exclude = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="POOL", help="Pooling over tokens: mean, extremes or tails; default: the run's objective.pool."
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="PRECISION", help="With --files or --catalog: fp32 or bf16.")
    ] = "fp32",
    retry: Annotated[
        bool, typer.Option("--retry", help="With --files or --catalog: retry files that could not be read.")
    ] = False,
    workers: opt.Workers = None,
    device: opt.Device = None,
    follow_links: Annotated[bool, typer.Option(help="With --files: follow symbolic links.")] = True,
    file_seconds: opt.FileSeconds = 10,
    file_gb: opt.FileGB = 2,
) -> None:
    """Write one vector per acquisition, of a store or directly of files; after an interruption, run it again.

    Examples:
    octfm embed runs/vit_s --store prepared
    octfm embed runs/vit_s --files my_scans/ --out vectors
    """
    from octfm.errors import ConfigError
    from octfm.models.pooling import POOLS

    sources = {"--store": store, "--files": files, "--catalog": catalog}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if pool is not None and pool not in POOLS:
        raise ConfigError(f"--pool: expected {', '.join(POOLS[:-1])} or {POOLS[-1]}, got {pool!r}")
    _echo_checkpoint(run)
    if files is None and catalog is None:
        from octfm.tasks.embed_run import embed_all

        for path in embed_all(
            run,
            store or "prepared",
            Path(out) if out is not None else None,
            baselines=baselines is not False,
            head=head,
            segmenter=segment,
            pool=pool,
            exclude=exclude,
            device=device,
            echo=typer.echo,
        ):
            typer.echo(path)
        return
    if head is not None or segment is not None:
        raise ConfigError("--head and --segment add maps to the report of a run; give --store instead of files")
    from octfm.catalog.catalog import Catalog
    from octfm.encoder.embed_files import embed_files

    if out is None:
        raise ConfigError(f"{given[0]}: needs an output folder; add --out FOLDER")
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"--precision: expected fp32 or bf16, got {precision!r}")
    source = files if catalog is None else Catalog.load(catalog)
    assert source is not None
    counts = embed_files(
        run,
        source,
        out,
        baselines=bool(baselines),
        workers=workers,
        limits=opt.limits_of(file_seconds, file_gb),
        retry=retry,
        pool=pool,
        precision=precision,
        device=device,
        follow_links=follow_links,
        exclude=exclude,
        echo=typer.echo,
    )
    typer.echo(
        f"{out}: {counts['embedded']:,} of {counts['volumes']:,} volumes embedded, "
        f"{counts['skipped']:,} other files skipped on purpose"
    )
    for code, count in counts["failures"].items():
        typer.echo(f"  {code}: {count:,}")
    if counts["failures"]:
        typer.echo("  files, reasons and remedies: failures.parquet; --retry tries them again")


def export(
    run: Annotated[
        str,
        opt.place_argument(metavar="RUN", help="Pretraining or fine-tuning run (also s3:// or gs://), or checkpoint."),
    ],
    out: Annotated[Path, opt.local_option("--out", metavar="FOLDER", help="New folder.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also write octfm.onnx; fails unless onnxruntime and torch agree.")
    ] = False,
    card: Annotated[
        Path | None,
        opt.local_option(
            metavar="FILE",
            help="Model card with your licence (octfm card writes one); default: made from the run, without a licence.",
        ),
    ] = None,
    keep_key: Annotated[
        Path | None,
        opt.local_option(
            metavar="FILE",
            help="Write the key of the participants' hashes to this file, not into the export: whoever has both can "
            "test which participants were trained on.",
        ),
    ] = None,
    keep_names: Annotated[
        bool,
        typer.Option(
            "--keep-names", help="Also write class names that octfm does not know; readers of the export will see them."
        ),
    ] = False,
) -> None:
    """Export the encoder (and head) for the Hugging Face hub or offline use: safetensors, config, model card.

    Examples:
    octfm export runs/vit_s --out exported
    """
    from octfm.encoder.export import export as write_export
    from octfm.encoder.export import usage
    from octfm.io.location import location
    from octfm.report.card.model_card import model_card
    from octfm.report.sources import is_pretraining

    text = _text(card) if card is not None else None
    # A full card needs the folder of a pretraining run on disk; else the export contains a short one.
    if text is None and "://" not in run and is_pretraining(location(run)):
        text = model_card(run, usage=usage(out.name), name=out.name)
    _echo_checkpoint(run)
    path = write_export(run, out, onnx=onnx, card=text, keep_key=keep_key, keep_names=keep_names, echo=typer.echo)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    typer.echo(f"{path}: {', '.join(sorted(file.name for file in path.iterdir()))} ({size:,.1f} MB)")
    if keep_key is None:
        typer.echo(
            "participants.key lets anyone who has a list of ids test which were trained on; to publish, use "
            "--keep-key FILE"
        )


def _echo_checkpoint(run: str) -> None:
    """Say which checkpoint the folder of a pretraining run on disk stands for."""
    from octfm.io.location import location
    from octfm.report.sources import is_pretraining, metric_rows
    from octfm.report.words import checkpoint_taken
    from octfm.run.checkpoint import everywhere

    folder = Path(run)
    if "://" not in run and is_pretraining(location(run)) and (found := everywhere(folder)):
        opt.echo_line(checkpoint_taken(metric_rows(folder), found))


def _text(card: Path) -> str:
    from octfm.errors import ConfigError

    try:
        return card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--card {card}: expected Markdown in UTF-8, got other bytes") from None
