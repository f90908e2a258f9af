"""The verbs that use an encoder: embed, export."""

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octfm.cli import options as opt
from octfm.errors import ConfigError
from octfm.io.location import location


def embed(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        opt.place_argument(
            "RUN|SCAN",
            "First the encoder, if it is not the packaged one: a run of pretraining or fine-tuning, a checkpoint "
            "or export, also s3:// or gs://, or a packaged name. Then scans: files or folders of them.",
        ),
    ] = None,
    store: Annotated[
        str | None, opt.place_option("STORE", "Prepared store to embed, also s3:// or gs://; default: prepared.")
    ] = None,
    files: Annotated[
        str | None,
        opt.place_option(
            "FOLDER", "Instead of --store: folder or address of OCT files, read directly; requires --out."
        ),
    ] = None,
    catalog: Annotated[
        str | None, opt.place_option("CATALOG", "Instead of --store: catalog of files (octfm scan); requires --out.")
    ] = None,
    out: Annotated[
        str | None,
        opt.place_option(
            "FOLDER",
            "Folder for the parquet files (with --files, --catalog and scans also in a bucket), with pictures of scans "
            "for --store; default: RUN/embeddings. Required for scans, and if RUN is an export or left out.",
            "--out",
        ),
    ] = None,
    baselines: Annotated[
        bool | None,
        opt.flag("Also embed with baselines (random initialisation, intensity histogram); default: only for a store."),
    ] = None,
    head: Annotated[
        Path | None,
        opt.local_option(
            "RUN", "Run of octfm finetune on this encoder, frozen: adds its attention and occlusion maps to the report."
        ),
    ] = None,
    segment: Annotated[
        Path | None, opt.local_option("RUN", "Run of octfm segment: adds its layers and areas to the report.")
    ] = None,
    exclude: opt.Exclude = None,
    pool: Annotated[
        str | None,
        opt.option("POOL", "Pooling over tokens: mean, extremes, tails or summary; default: the run's objective.pool."),
    ] = None,
    layouts: opt.LayoutsBelow = "any",
    precision: Annotated[
        Literal["fp32", "bf16"], opt.option("PRECISION", "With --files, --catalog or scans: fp32 or bf16.")
    ] = "fp32",
    retry: Annotated[
        bool, opt.flag("With --files or --catalog: retry files that could not be read.", "--retry")
    ] = False,
    workers: opt.Workers = None,
    device: opt.Device = None,
    follow_links: Annotated[bool, opt.flag("With --files: follow symbolic links.")] = True,
    file_seconds: opt.FileSeconds = 10,
    file_gb: opt.FileGB = 2,
) -> None:
    """Write one vector per scan, with the packaged encoder or your own; after an interruption, run it again.

    Examples:
    octfm embed scan.e2e other.dcm --out vectors
    octfm embed --store prepared --out features
    octfm embed runs/vit_s --store prepared
    octfm embed runs/vit_s --files my_scans/ --out vectors
    """
    from octfm.models.pooling import POOLS

    sources = {"--store": store, "--files": files, "--catalog": catalog}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)}: give one of them")
    if pool is not None and pool not in POOLS:
        raise ConfigError(f"--pool: expected {', '.join(POOLS[:-1])} or {POOLS[-1]}, got {pool!r}")
    run, scans = _encoder_and_scans(words or [], given)
    if not scans:
        what = f"{given[0]}: embeds what it holds" if given else "embed: without scans, takes the store prepared"
        opt.refuse(context, ("layouts",), what)
    _echo_encoder(run)
    if scans:
        others = ("head", "segment", "exclude", "baselines", "retry", "workers")
        opt.refuse(context, others, "embed: takes single scans")
        _embed_scans(run, scans, layouts, out, pool, precision, device, opt.limits_of(file_seconds, file_gb))
        return
    if files is None and catalog is None:
        from octfm.tasks.embed_run import embed_all

        paths = embed_all(
            run,
            store or "prepared",
            out,
            baselines=baselines is not False,
            head=head,
            segmenter=segment,
            pool=pool,
            exclude=exclude,
            device=device,
            echo=opt.echo_line,
        )
        opt.echo_line(*paths)
        return
    if head is not None or segment is not None:
        raise ConfigError("--head and --segment add maps to the report of a run; give --store instead of files")
    from octfm.catalog.catalog import Catalog
    from octfm.encoder.embed_files import embed_files

    if out is None:
        raise ConfigError(f"{given[0]}: needs an output folder; add --out FOLDER")
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
        echo=opt.echo_line,
    )
    opt.echo_line(
        f"{out}: {counts['embedded']:,} of {counts['volumes']:,} volumes embedded, "
        f"{counts['skipped']:,} other files skipped on purpose"
    )
    for code, count in counts["failures"].items():
        opt.echo_line(f"  {code}: {count:,}")
    if counts["failures"]:
        opt.echo_line("  files, reasons and remedies: failures.parquet; --retry tries them again")


def _encoder_and_scans(words: list[str], sources: list[str]) -> tuple[str | None, list[str]]:
    """RUN (None: the packaged encoder) and scans from the words of `octfm embed`; `sources`: options that name what to
    embed instead of scans. Raises ConfigError."""
    from octfm.encoder.sources import names_encoder

    if sources:
        if len(words) > 1:
            raise ConfigError(f"{sources[0]}: embeds that and no scans; give at most one RUN before it")
        return (words[0], []) if words else (None, [])
    if not words:
        raise ConfigError(
            "embed: nothing to embed; give scans (octfm embed scan.e2e --out vectors), or a store (--store prepared)"
        )
    named = [names_encoder(word) for word in words]
    if any(named[1:]):
        raise ConfigError(
            f"{words[named.index(True, 1)]}: a run, an export or an address, where a scan is expected; RUN is the "
            "first word, and --files reads buckets"
        )
    run, scans = (words[0], words[1:]) if named[0] else (None, words)
    for scan in scans:
        for name, option in (("store.json", "--store"), ("catalog.parquet", "--catalog")):
            if (Path(scan) / name).is_file():
                command = shlex.join(["octfm", "embed", option, str(scan)])
                raise ConfigError(f"{scan}: expected scans, got what {option} takes; use {command}")
    return run, scans


def _embed_scans(
    run: str | None,
    scans: list[str],
    layouts: str,
    out: str | None,
    pool: Any,
    precision: Any,
    device: str | None,
    limits: Any,
) -> None:
    from octfm.display import number
    from octfm.encoder.embed_scans import embed_scans
    from octfm.encoder.encoder import load_encoder
    from octfm.run.runtime import start

    if out is None:
        raise ConfigError("embed: scans need an output folder; add --out FOLDER")
    encoder = load_encoder(run, runtime=start(precision, device)).pooling(pool)
    nor = ", and it is no run (config.yaml) and no export (config.json)"
    volumes = opt.volumes_in(scans, limits, layouts, nor)
    path, count = embed_scans(
        encoder, [*volumes], out, eyes=volumes, limits=limits, echo=lambda line: opt.echo_line(line, err=True)
    )
    opt.echo_line(f"{path}: {number(count, 'vector')} of width {encoder.vector_width} by {encoder.source}")
    if failed := len(volumes) - count:
        opt.echo_line(f"{failed} of {len(volumes)} scans could not be embedded", err=True)
        raise typer.Exit(1)


def export(
    run: Annotated[
        str, opt.place_argument("RUN", "Pretraining or fine-tuning run (also s3:// or gs://), or checkpoint.")
    ],
    out: Annotated[Path, opt.local_option("FOLDER", "New folder.", "--out")],
    onnx: Annotated[
        bool, opt.flag("Also write octfm.onnx; fails unless onnxruntime and torch agree.", "--onnx")
    ] = False,
    card: Annotated[
        Path | None,
        opt.local_option(
            "FILE",
            "Model card with your licence (octfm card writes one); default: made from the run, without a licence.",
        ),
    ] = None,
    keep_key: Annotated[
        Path | None,
        opt.local_option(
            "FILE",
            "Write the key of the participants' hashes to this file, not into the export: whoever has both can "
            "test which participants were trained on.",
        ),
    ] = None,
    keep_names: Annotated[
        bool,
        opt.flag(
            "Also write class names that octfm does not know; readers of the export will see them.", "--keep-names"
        ),
    ] = False,
) -> None:
    """Export the encoder (and head) for the Hugging Face hub or offline use: safetensors, config, model card.

    Examples:
    octfm export runs/vit_s --out exported
    """
    from octfm.encoder.export import export as write_export
    from octfm.encoder.export import usage
    from octfm.report.card.model_card import model_card
    from octfm.report.sources import is_pretraining
    from octfm.run.checkpoint_files import size_of
    from octfm.weights.exported import KEY

    text = _text(card) if card is not None else None
    # A full card needs the folder of a pretraining run on disk; else the export contains a short one.
    if text is None and "://" not in run and is_pretraining(location(run)):
        text = model_card(run, usage=usage(out.name), name=out.name)
    _echo_checkpoint(run)
    path = write_export(run, out, onnx=onnx, card=text, keep_key=keep_key, keep_names=keep_names, echo=opt.echo_line)
    names = ", ".join(sorted(file.name for file in path.iterdir()))
    opt.echo_line(f"{path}: {names} ({size_of(path) / 1e6:,.1f} MB)")
    if (path / KEY).is_file():
        opt.echo_line(
            "participants.key lets anyone who has a list of ids test which were trained on; to publish, use "
            "--keep-key FILE"
        )


def _echo_encoder(run: str | None) -> None:
    """Print which encoder is used: the packaged one, by its hash, or a checkpoint of a run."""
    from octfm.weights.packaged import CURRENT_ENCODER, NOTE, everything_packaged, find_packaged, packaged_encoder

    if run is not None:
        _echo_checkpoint(run)
        return
    packaged_encoder()  # raises if there is none
    encoder = find_packaged(CURRENT_ENCODER, everything_packaged())
    opt.echo_line(f"{encoder.name}, SHA-256 {encoder.digest[:12]}: {NOTE}")


def _echo_checkpoint(run: str) -> None:
    """Print which checkpoint the folder of a pretraining run on disk stands for."""
    from octfm.report.sources import is_pretraining, metric_rows
    from octfm.report.words import checkpoint_taken
    from octfm.run.checkpoint_files import everywhere

    folder = Path(run)
    if "://" not in run and is_pretraining(location(run)) and (found := everywhere(folder)):
        opt.echo_line(checkpoint_taken(metric_rows(folder), found))


def _text(card: Path) -> str:
    try:
        return card.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--card {card}: expected Markdown in UTF-8, got other bytes") from None
