"""The verbs that put an encoder to use: thin calls of the public functions; imports happen inside the verbs."""

from pathlib import Path
from typing import Annotated

import typer

from octfm.cli.options import Exclude, FileGB, FileSeconds, limits_of, local_option, place_argument, place_option


def register(app: typer.Typer) -> None:
    """Add the verbs of this file to the command."""
    for verb in (embed, export):
        app.command()(verb)


def embed(
    run: Annotated[
        str, place_argument(help="Run folder, checkpoint, octfm finetune run or octfm export; also s3:// or gs://.")
    ],
    store: Annotated[
        str | None, place_option(help="Prepared store to embed, also s3:// or gs://; default: prepared.")
    ] = None,
    files: Annotated[
        str | None,
        place_option(help="Instead: folder, s3:// or gs:// of OCT files, read without a store; needs --out."),
    ] = None,
    catalog: Annotated[str | None, place_option(help="Instead: a catalog of files (octfm scan); needs --out.")] = None,
    out: Annotated[
        str | None,
        place_option(
            "--out",
            help="Folder for the parquet files (with --files also in a bucket); default: RUN/embeddings. An export demands it.",
        ),
    ] = None,
    baselines: Annotated[
        bool | None,
        typer.Option(help="Also random initialisation and intensity histogram; default: of a store yes, of files no."),
    ] = None,
    head: Annotated[
        Path | None,
        local_option(help="Run of octfm finetune on this encoder, frozen: its attention and occlusion in the report."),
    ] = None,
    segment: Annotated[
        Path | None, local_option(help="Run of octfm segment: the layers and areas that it finds, in the report.")
    ] = None,
    exclude: Exclude = None,
    pool: Annotated[str | None, typer.Option(help="mean or extremes, instead of the run's objective.pool.")] = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16, of --files and --catalog.")] = "fp32",
    retry: Annotated[
        bool, typer.Option("--retry", help="Try files again that could not be read, of --files and --catalog.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes that read files; default: all cores.", min=0, max=1024)
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda, of --files and --catalog; default: what there is.")
    ] = None,
    follow_links: Annotated[
        bool, typer.Option(help="Of --files: also read what symbolic links lead to; else they are skipped.")
    ] = True,
    file_seconds: FileSeconds = 10,
    file_gb: FileGB = 2,
) -> None:
    """One vector per acquisition: of a store, or straight from thousands of files; the same command continues after any interruption."""
    from octfm.errors import ConfigError

    given = [
        name for name, value in (("--store", store), ("--files", files), ("--catalog", catalog)) if value is not None
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if pool not in (None, "mean", "extremes"):
        raise ConfigError(f"--pool: expected mean or extremes, got {pool!r}")
    if files is None and catalog is None:
        from octfm.tasks.embed_run import embed_all

        folder = Path(out) if out is not None else None
        options = {
            "baselines": baselines is not False,
            "head": head,
            "segmenter": segment,
            "pool": pool,
            "exclude": exclude,
            "echo": typer.echo,
        }
        for path in embed_all(run, store or "prepared", folder, **options):
            typer.echo(str(path))
        return
    if head is not None or segment is not None:
        raise ConfigError("--head and --segment are shown in the report of a run; they need --store")
    from octfm.catalog.catalog import Catalog
    from octfm.encoder.embed_files import embed_files

    if out is None:
        raise ConfigError(f"{given[0]}: say where to with --out")
    if precision not in ("fp32", "bf16"):
        raise ConfigError(f"--precision: expected fp32 or bf16, got {precision!r}")
    source = files if catalog is None else Catalog.load(catalog)
    assert source is not None
    limits = limits_of(file_seconds, file_gb)
    done = embed_files(
        run, source, out, baselines=bool(baselines), workers=workers, limits=limits, retry=retry, pool=pool,
        precision=precision, device=device, follow_links=follow_links, exclude=exclude, echo=typer.echo,
    )  # fmt: skip
    typer.echo(
        f"{out}: {done['embedded']:,} of {done['volumes']:,} volumes embedded, {done['skipped']:,} other files skipped on purpose"
    )
    for code, count in done["failures"].items():
        typer.echo(f"  {code}: {count:,}")
    if done["failures"]:
        typer.echo("  which, why and what would mend it: failures.parquet; --retry tries them again")


def export(
    run: Annotated[
        str, place_argument(help="Run folder (also s3:// or gs://), checkpoint, or folder of octfm finetune.")
    ],
    out: Annotated[Path, local_option("--out", help="New folder.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Also octfm.onnx, refused unless onnxruntime agrees with torch.")
    ] = False,
    card: Annotated[
        Path | None,
        local_option(
            help="Model card, as octfm card writes it with your licence; default: made from the run, without one."
        ),
    ] = None,
    keep_key: Annotated[
        Path | None,
        local_option(
            help="Put the key of the participants' hashes into this file instead: whoever has both can test who was trained on."
        ),
    ] = None,
    keep_names: Annotated[
        bool,
        typer.Option(
            "--keep-names", help="Write names of classes that octfm does not know, too: strangers may read them."
        ),
    ] = False,
) -> None:
    """The encoder (and head) as safetensors, config and model card in the layout of the Hugging Face hub; loads offline."""
    from octfm.encoder.export import export as write_export
    from octfm.encoder.export import usage
    from octfm.io.location import location
    from octfm.report.card.model_card import model_card
    from octfm.report.sources import is_pretraining

    text = _text(card) if card is not None else None
    if text is None and "://" not in run and is_pretraining(location(run)):
        text = model_card(run, usage=usage(out.name), name=out.name)
    path = write_export(run, out, onnx=onnx, card=text, keep_key=keep_key, keep_names=keep_names, echo=typer.echo)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    typer.echo(f"{path}: {', '.join(sorted(file.name for file in path.iterdir()))} ({size:,.1f} MB)")
    if keep_key is None:
        typer.echo(
            "participants.key tells whoever has a list of ids which of them were trained on; to publish, use --keep-key FILE"
        )


def _text(card: Path) -> str:
    from octfm.errors import ConfigError

    try:
        return card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--card {card}: expected Markdown in UTF-8, got other bytes") from None
