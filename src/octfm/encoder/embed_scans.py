"""Embed single scans without a store, a catalog or participants, for vectors of a few files at once."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from octfm.encoder.embed import SINGLE_SCANS, encoder_facts, facts_of, write_vectors
from octfm.encoder.encoder import Encoder
from octfm.errors import BAD_INPUT, BucketError, Echo, EvaluationError, OctfmError, one_line
from octfm.formats import read_volume
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits
from octfm.io.location import Location, expect_writable, location
from octfm.io.progress import Progress
from octfm.volume.volume import Laterality, Volume
from octfm.weights.exported import refuse_inside_export


def embed_scans(
    encoder: Encoder,
    scans: Sequence[str | Volume],
    out: str | Location,
    *,
    eyes: Mapping[str, Laterality | None] | None = None,
    limits: Limits | None = None,
    echo: Echo = print,
) -> tuple[Location, int]:
    """Write OUT/pretrained.parquet, a vector for every scan that can be read; returns it and their number.

    eyes: scan → the eye that its path names, see Volume.with_eye; left eyes are mirrored before they are embedded.
    A file of earlier scans is replaced. `echo` gets a line for every scan that could not be read or embedded; if none
    could, the last of these errors is raised and not echoed. Raises EvaluationError if `out` holds vectors of a store
    or of embed_files, and BucketError if a bucket does not answer.
    """
    out = location(out)
    refuse_inside_export(out)
    if (out / "job.json").is_file():
        raise EvaluationError(f"{out}: holds vectors of octfm embed --files or --catalog; choose another --out")
    path = out / "pretrained.parquet"
    if path.is_file() and facts_of(path).get("of") != SINGLE_SCANS:
        raise EvaluationError(f"{path}: holds vectors of a store; choose another --out, or remove the file")
    expect_writable(out)
    rows, vectors, problems = [], [], []
    structure_only = "octa" not in encoder.config.data.modalities
    with Progress("embed", len(scans), "scans") as progress:
        for scan in scans:
            try:
                volume = scan
                if not isinstance(volume, Volume):
                    volume = read_volume(volume, raster_only=False, structure_only=structure_only, limits=limits)
                    volume = volume.with_eye((eyes or {}).get(str(scan)))
                vectors.append(encoder.embed(volume))
                rows.append(_row(volume))
            except BucketError:
                raise  # says nothing about the scan
            except OctfmError as error:
                problems.append(error)
            except BAD_INPUT as error:
                # The message of a library may hold anything, so only the error's type is kept.
                source = scan.source if isinstance(scan, Volume) else scan
                what = f"could not be embedded ({type(error).__name__}); please report it with the file's format"
                problems.append(EvaluationError(f"{source}: {what}"))
            progress.advance()
    for problem in problems if rows else problems[:-1]:
        echo(str(problem))
    if not rows:
        raise problems[-1] if problems else EvaluationError("embed: expected scans, got none; name files or folders")
    # Files may state the same acquisition, or none; then their paths identify them.
    count = Counter(row["acquisition"] for row in rows)
    for row in rows:
        if count[row["acquisition"]] > 1 or row["acquisition"] == "unknown":
            row["acquisition"] = row["source"]
    listed = hash_text("\n".join(row["acquisition"] for row in rows))[:16]
    facts = encoder_facts(encoder) | {"key": f"{encoder.vector_key}-{listed}", "name": "pretrained", "of": SINGLE_SCANS}
    return write_vectors(path, rows, np.stack(vectors), facts, encoder.preprocessing), len(rows)


def _row(volume: Volume) -> dict:
    # Parquet holds only text, but file names may be any bytes; an odd name must not lose hours of work.
    words = {name: one_line(getattr(volume, name)) for name in ("source", "acquisition", "participant", "eye_id")}
    return words | {
        "laterality": volume.laterality,
        "scanner": volume.scanner,
        "protocol": volume.protocol,
        "split": None,
        "participant_labels": {},
    }
