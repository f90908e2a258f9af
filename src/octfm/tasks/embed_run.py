"""Embed a store with a run's encoder and baselines, and draw what the encoder sees."""

from pathlib import Path

from octfm.encoder.embed import NAMES, RANDOM_INIT, embed_store, facts_to_replace, histogram_baseline, quality_baseline
from octfm.encoder.encoder import load_encoder
from octfm.encoder.sources import display_name, find
from octfm.encoder.tuned import load_head
from octfm.errors import Echo, EvaluationError
from octfm.evaluation.tissue_map import tissue_map_baseline
from octfm.io.location import Location, expect_writable, local_path
from octfm.models.pooling import VectorPool
from octfm.run.checkpoint_files import SHARDS
from octfm.store.selection import to_evaluate
from octfm.store.store import Store
from octfm.tasks.maps import save_pictures
from octfm.tasks.segment import load_segmenter
from octfm.weights.exported import is_export, refuse_inside_export


def embed_all(
    run: str | Location | None,
    store: str | Location,
    out: str | Path | None = None,
    *,
    baselines: bool = True,
    head: str | Path | None = None,
    segmenter: str | Path | None = None,
    pool: VectorPool | None = None,
    exclude: str | Path | None = None,
    device: str | None = None,
    echo: Echo = print,
) -> list[Path]:
    """Embed a store with the encoder of `run` (None: the packaged one) and, as baselines, with the same encoder before
    its first update (three draws), a histogram, the tissue map and the image quality.

    Vectors go to `out`, or RUN/embeddings, and pictures for the report to RUN/figures, or to `out`/figures if `out`
    lies in no run; never into an export, which may be published. Pictures show the encoder's inputs and features; with
    `head`, a run of octfm finetune on this encoder, also which tokens its answers depend on; with `segmenter`, a run of
    octfm segment, also the surfaces and masks that it finds. `pool` replaces the run's objective.pool. `exclude` is a
    file that names volumes to leave out.
    """
    out = None if out is None else local_path(out)
    # Elsewhere nobody looks for pictures of scans beside the folder that was named.
    in_run = out is None or (out.parent / "config.yaml").is_file()
    home = find(run)
    if out is None and is_export(home):
        raise EvaluationError(
            f"{display_name(home)}: an export, which may be published; name another folder for embeddings and pictures "
            "of people with --out"
        )
    if out is not None:
        refuse_inside_export(out)
    encoder = load_encoder(run, device=device).pooling(pool)
    opened = to_evaluate(Store.open(store), exclude, encoder.config.data.modalities)
    if len(opened) == 0:
        raise EvaluationError(
            f"{opened.path}: the store holds no volume, so there is nothing to embed; see its unprepared.jsonl"
        )
    encoder = encoder.reading(opened)
    if out is None:
        if not isinstance(home, Path):
            raise EvaluationError(f"{run}: the run is in a bucket; name a folder for its embeddings with --out")
        is_run = home.is_dir() and home.suffix != SHARDS
        out = (home if is_run else home.parent.parent) / "embeddings"
    trained = load_head(head, encoder, device) if head is not None else None
    finder = load_segmenter(segmenter, device) if segmenter is not None else None
    if finder is not None:
        finder.encoder.require_prepared(opened)  # before anything is computed
    figures = (out.parent if in_run else out) / "figures"
    # Whatever refuses the vectors must refuse the pictures as well.
    facts_to_replace(out / f"{NAMES[0]}.parquet")
    for folder in (out, figures):
        expect_writable(folder)
    # Before the vectors, which name their checkpoint: older pictures beside new vectors would pass for theirs.
    save_pictures(encoder, opened, figures, trained, finder)
    written = [embed_store(encoder, opened, out, NAMES[0], echo)]
    if baselines:
        for draw, name in enumerate(RANDOM_INIT):
            untrained = load_encoder(run, random_init=True, draw=draw, device=device).pooling(pool).reading(opened)
            written.append(embed_store(untrained, opened, out, name, echo))
        written += [baseline(opened, out) for baseline in (histogram_baseline, tissue_map_baseline, quality_baseline)]
    return written
