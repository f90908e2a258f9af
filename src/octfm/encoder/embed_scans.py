"""Embed scans one by one, without a store, a catalog or participants: a few files, vectors at once."""

from collections.abc import Sequence

import numpy as np

from octfm.encoder.embed import encoder_facts, write_vectors
from octfm.encoder.encoder import Encoder
from octfm.errors import BAD_INPUT, Echo, EvaluationError, ReadError
from octfm.formats import read_volume
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits
from octfm.io.location import Location, location
from octfm.io.progress import Progress
from octfm.volume.volume import Volume
from octfm.weights.exported import refuse_inside_export


def embed_scans(
    encoder: Encoder,
    scans: Sequence[str | Volume],
    out: str | Location,
    *,
    limits: Limits | None = None,
    echo: Echo = print,
) -> tuple[Location, int]:
    """Write OUT/pretrained.parquet, a vector for every scan that can be read; returns it and their number.

    An existing file is replaced. `echo` gets a line for every scan that could not be read or embedded; if none could,
    the last of these errors is raised. Raises EvaluationError if `out` holds a job of embed_files.
    """
    out = location(out)
    refuse_inside_export(out)
    if (out / "job.json").is_file():
        raise EvaluationError(f"{out}: holds vectors of octfm embed --files or --catalog; choose another --out")
    rows, vectors, problems = [], [], []
    structure_only = "octa" not in encoder.config.data.modalities
    with Progress("embed", len(scans), "scans") as progress:
        for scan in scans:
            try:
                volume = scan
                if not isinstance(volume, Volume):
                    volume = read_volume(volume, raster_only=False, structure_only=structure_only, limits=limits)
                vectors.append(encoder.embed(volume))
                rows.append(_row(volume))
            except ReadError as error:
                problems.append(error)
            except BAD_INPUT as error:
                source = scan.source if isinstance(scan, Volume) else scan
                problems.append(EvaluationError(f"{source}: cannot be embedded, {type(error).__name__}: {error}"))
            progress.advance()
    for problem in problems if rows else problems[:-1]:
        echo(str(problem))
    if not rows:
        raise problems[-1] if problems else EvaluationError("embed: expected scans, got none; name files or folders")
    # Two files may state one acquisition, and nobody need know their participants.
    names = [row["acquisition"] for row in rows]
    for row in rows:
        if names.count(row["acquisition"]) > 1 or row["acquisition"] == "unknown":
            row["acquisition"] = row["source"]
    listed = hash_text("\n".join(row["acquisition"] for row in rows))[:16]
    facts = encoder_facts(encoder) | {"key": f"{encoder.vector_key}-{listed}", "name": "pretrained"}
    path = write_vectors(out / "pretrained.parquet", rows, np.stack(vectors), facts, encoder.preprocessing)
    return path, len(rows)


def _row(volume: Volume) -> dict:
    return {
        "source": volume.source,
        "acquisition": volume.acquisition,
        "participant": volume.participant,
        "eye_id": f"{volume.participant}_{volume.laterality or 'unknown'}",
        "laterality": volume.laterality,
        "scanner": volume.scanner,
        "protocol": volume.protocol,
        "split": None,
        "participant_labels": {},
    }
