"""The verbs that put an encoder to use: thin calls of the public functions; imports happen inside the verbs."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs of this file to the command."""
    for verb in (embed, export):
        app.command()(verb)


def embed(
    run: Annotated[Path, typer.Argument(help="Run folder or checkpoint.")],
    store: Annotated[Path, typer.Option(help="Prepared store to embed.")] = Path("prepared"),
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the parquet files; default: RUN/embeddings.")] = None,
    baselines: Annotated[bool, typer.Option(help="Also random initialisation and intensity histogram.")] = True,
    head: Annotated[
        Path | None, typer.Option(help="Run of octfm finetune on this encoder, frozen: its attention and occlusion in the report.")
    ] = None,
) -> None:
    """One vector per acquisition, with the baselines that any result must be compared with."""
    from octfm.evaluation.embed import embed_all

    for path in embed_all(run, store, out, baselines=baselines, head=head, echo=typer.echo):
        typer.echo(str(path))


def export(
    run: Annotated[str, typer.Argument(help="Run folder (also s3:// or gs://), checkpoint, or folder of octfm finetune.")],
    out: Annotated[Path, typer.Option("--out", help="New folder.")],
    onnx: Annotated[bool, typer.Option("--onnx", help="Also octfm.onnx, refused unless onnxruntime agrees with torch.")] = False,
    card: Annotated[
        Path | None, typer.Option(help="Model card, as octfm card writes it with your licence; default: made from the run, without one.")
    ] = None,
    keep_key: Annotated[
        Path | None,
        typer.Option(help="Put the key of the participants' hashes into this file instead: whoever has both can test who was trained on."),
    ] = None,
) -> None:
    """The encoder (and head) as safetensors, config and model card in the layout of the Hugging Face hub; loads offline."""
    from octfm.data.location import location
    from octfm.evaluation.export import export as write_export
    from octfm.evaluation.export import usage
    from octfm.report.model_card import model_card

    text = card.read_text() if card is not None else None
    if text is None and (location(run) / "run.json").is_file() and "://" not in run:
        text = model_card(run, usage=usage(out.name), name=out.name)
    path = write_export(run, out, onnx=onnx, card=text, keep_key=keep_key, echo=typer.echo)
    size = sum(file.stat().st_size for file in path.iterdir()) / 1e6
    typer.echo(f"{path}: {', '.join(sorted(file.name for file in path.iterdir()))} ({size:,.1f} MB)")
    if keep_key is None:
        typer.echo("participants.key tells whoever has a list of ids which of them were trained on; to publish, use --keep-key FILE")
