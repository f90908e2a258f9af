"""Embed files in a folder or a bucket directly, without a store: decoded in parallel, written and resumed in shards.

OUT/job.json             keys of the vectors; continuing with another encoder is refused
OUT/catalog/             the catalog of the files, reused until a file changes
OUT/parts/000000.parquet vectors and failures of 32 volumes each; a part is complete or absent
OUT/pretrained.parquet   all vectors, as `octfm embed --store` writes them (and random_init, histogram)
OUT/failures.parquet     one row per file without a vector: code, sentence, how to fix it
"""

import functools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.participants.people import AmbiguousPeople
from octfm.catalog.participants.pseudonyms import is_pseudonymous
from octfm.catalog.scan import existing_root, scan
from octfm.encoder.embed import HISTOGRAM_BINS, encoder_facts, histogram, histogram_facts, write_vectors
from octfm.encoder.encoder import Encoder, load_encoder
from octfm.errors import BAD_INPUT, BucketError, Echo, EvaluationError, reason_of
from octfm.formats.declared import sidecars
from octfm.formats.reasons import REASONS
from octfm.io.archive import split_uri
from octfm.io.bucket import Account
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits, Lost
from octfm.io.lease import only_one
from octfm.io.location import BucketPath, Location, from_json, listed, location, write_whole
from octfm.io.parquet import from_parquet, to_parquet
from octfm.io.progress import Progress
from octfm.io.spread import spread
from octfm.io.versions import listing_of, versions
from octfm.layers.band import band_finder
from octfm.models.pooling import VectorPool
from octfm.run.runtime import Precision, start
from octfm.store.exclusion import without_excluded_files
from octfm.store.layout import ARRAYS, Arrays
from octfm.store.prepare import REASONS as PREPARE_REASONS
from octfm.store.prepare import code_of, fields_of, prepare_acquisition, with_finder
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.tissue import BandFinder
from octfm.volume.volume import STRUCTURE_ONLY, Modality
from octfm.weights.exported import refuse_inside_export

FORMAT, VERSION = "octfm-embedding-job", 1
SHARD = 32
"""Volumes whose vectors are written together; a killed job loses at most these."""
BATCH = 8
"""Volumes per forward pass; divides SHARD, so that a resumed job makes the same batches."""


@dataclass(frozen=True)
class _Task:
    acquisition: Acquisition
    version: str
    """Changes with the file, its sidecar and what the catalog states about its voxels."""

    @property
    def identity(self) -> tuple[str, str, str]:
        """Acquisition, uri and version: vectors computed for the same identity are reused."""
        return self.acquisition.sop_instance_uid, self.acquisition.uri, self.version


@dataclass(frozen=True)
class _Failure:
    code: str
    sentence: str


@dataclass(frozen=True, eq=False)
class _Kind:
    """A kind of vector to compute, with the metadata of its embeddings file."""

    name: str
    width: int
    make: Callable[[Arrays], np.ndarray]
    facts: dict[str, Any]


def embed_files(
    run: str | Location | None,
    source: str | Location | Catalog,
    out: str | Location,
    *,
    baselines: bool = False,
    workers: int | None = None,
    limits: Limits | None = None,
    retry: bool = False,
    pool: VectorPool | None = None,
    precision: Precision = "fp32",
    device: str | None = None,
    follow_links: bool = True,
    exclude: str | Path | None = None,
    echo: Echo = print,
) -> dict[str, Any]:
    """Embed every OCT volume of `source` (a folder, s3:// or gs://, or a Catalog) into a folder or bucket prefix `out`,
    with the encoder of `run`, None for the packaged one.

    If it is stopped, even by kill -9, the same call continues, recomputing at most one shard, and includes files that
    are new or have changed. Files that cannot be read become rows of failures.parquet; they are tried again when they
    change, or with `retry`.

    baselines: also vectors at random initialisation and histograms.
    workers: processes that read and prepare, None for one per core, 0 for this process only.
    pool: overrides the run's objective.pool.
    follow_links: as for octfm.scan.
    exclude: a file naming volumes to leave out (octfm.store.exclusion).
    Returns counts: volumes, embedded, failures (code → count), skipped, and bucket if one was used. Raises
    EvaluationError if `out` holds vectors of other weights, Preprocessing or precision, or if nothing could be
    embedded; BucketError if the bucket stops answering.
    """
    out = location(out)
    refuse_inside_export(out)
    where = _expect_source(source, out)
    runtime = start(precision, device)
    bscans = isinstance(where, Catalog) and all(a.layout == "line" for a in where.acquisitions)

    def load(random_init: bool) -> Encoder:
        found = load_encoder(run, random_init=random_init, runtime=runtime).pooling(pool)
        return found.of_bscans() if bscans else found

    encoder = load(random_init=False)
    find_band = band_finder(encoder.preprocessing, encoder.source)
    limits = limits or Limits()
    kinds = [_of_encoder("pretrained", encoder)]
    if baselines:
        kinds += [_of_encoder("random_init", load(random_init=True))]
        kinds += [_Kind("histogram", HISTOGRAM_BINS, histogram, histogram_facts(encoder.fingerprint))]
    _refuse_other_folder(out)
    # `_claim` compares keys under the lock and before anything is written: a job never mixes vectors of two encoders.
    with _exclusive(out):
        account = Account(out, where.root if isinstance(where, Catalog) else where)
        _claim(out, kinds)
        modalities = encoder.config.data.modalities
        catalog, version_of = _catalog(where, out, workers, limits, follow_links, modalities, echo)
        fitting = tuple(a for a in catalog.acquisitions if a.modality in modalities)
        included = without_excluded_files(fitting, exclude, str(catalog.root), echo)
        tasks = [_Task(acquisition, version_of(acquisition)) for acquisition in included]
        next_part, finished = _finished(out, retry)
        missing = [task for task in tasks if task.identity not in finished]
        if len(missing) < len(tasks):
            echo(f"{out}: {len(tasks) - len(missing):,} of {len(tasks):,} volumes are embedded already")
        embed = functools.partial(_decode, preprocessing=encoder.preprocessing, find_band=find_band)
        preparing = with_finder(limits, find_band)
        decoded = spread(
            account.counting(embed), missing, _lost, workers=workers, limits=preparing, deadline=_deadline, chunk=1
        )
        decoded = account.counted(decoded)
        with Progress("embed", len(missing), failure="without a vector", echo=echo, always=True) as progress:
            for number, first in enumerate(range(0, len(missing), SHARD), next_part):
                rows = _shard(missing[first : first + SHARD], decoded, kinds)
                write_whole(out / "parts" / f"{number:06d}.parquet", _part(rows, kinds))
                progress.advance(len(rows), sum(bool(row["code"]) for row in rows))
        summary = _finish(out, catalog, tasks, kinds, encoder.preprocessing)
        if spent := account.close():
            summary["bucket"] = spent
    if not summary["embedded"]:
        code, count = next(iter(summary["failures"].items()), ("nothing accepted", 0))
        raise EvaluationError(
            f"{out}: none of {len(tasks)} volumes could be embedded, {count} with {code}; "
            f"see {out / 'failures.parquet'}"
        )
    return summary


def _of_encoder(name: str, encoder: Encoder) -> _Kind:
    return _Kind(name, encoder.vector_width, encoder.embed_arrays, encoder_facts(encoder) | {"name": name})


def _expect_source(source: str | Location | Catalog, out: Location) -> Location | Catalog:
    """`source`, a folder or a prefix in a bucket as a Location. Raises EvaluationError, before anything is written."""
    if isinstance(source, Catalog):
        if is_pseudonymous(source):
            raise EvaluationError(
                f"{source.root}: this catalog names files by pseudonyms; prepare a store (--key, --root) and embed that"
            )
        return source
    root = existing_root(source)
    if isinstance(root, Path) and isinstance(out, Path) and Path(os.path.abspath(out)).is_relative_to(root):  # noqa: PTH100
        raise EvaluationError(f"{out}: inside the folder to be embedded; choose an --out outside {root}")
    return root


def _refuse_other_folder(out: Location) -> None:
    """Raise EvaluationError, before a lock is left there, if the folder holds anything but an embedding job."""
    if (out / "job.json").exists() or not out.is_dir():
        return
    names = {path.name for path in out.iterdir()}  # another job may just have written its job.json
    if "job.json" not in names and any(name != "job.lease" and not name.startswith(".") for name in names):
        raise EvaluationError(f"{out}: not empty and not an embedding job; choose another --out")


def _claim(out: Location, kinds: Sequence[_Kind]) -> None:
    """Begin or continue a job. Raises EvaluationError if its weights, Preprocessing or precision differ from before."""
    ours = {"format": FORMAT, "version": VERSION, "vectors": {kind.name: kind.facts["key"] for kind in kinds}}
    try:
        existing = from_json((out / "job.json").read_bytes())
        before = existing["vectors"] | {}
    except FileNotFoundError:
        write_whole(out / "job.json", (json.dumps(ours, indent=2) + "\n").encode())
        return
    except (ValueError, TypeError, KeyError):
        raise EvaluationError(f"{out / 'job.json'}: damaged, or not an embedding job's; choose another --out") from None
    if existing != ours:
        now = ours["vectors"]
        differ = [name for name in before | now if before.get(name) != now.get(name)]
        raise EvaluationError(
            f"{out}: begun with other vectors ({', '.join(sorted(differ)) or 'another octfm'}); weights, "
            "Preprocessing, precision, --pool and --baselines must stay the same (0.1 read vectors from other tokens); "
            "choose another --out, or restore them"
        )


def _exclusive(out: Location) -> AbstractContextManager[Any]:
    """A context in which no other job writes to `out`."""
    out.mkdir(parents=True, exist_ok=True)
    guard = out / ("job.lease" if isinstance(out, BucketPath) else ".lock")
    return only_one(out, guard, "embedding into it", EvaluationError)


# ---- which files -----------------------------------------------------------------------------------------------------


def _catalog(
    source: Location | Catalog,
    out: Location,
    workers: int | None,
    limits: Limits,
    follow_links: bool,
    modalities: Sequence[Modality],
    echo: Echo,
) -> tuple[Catalog, Callable[[Acquisition], str]]:
    """The catalog of `source`, and the version of each acquisition. A scan is reused until a file changes."""
    if isinstance(source, Catalog):
        return source, _versions(listing_of(location(source.root)))
    listing = listing_of(source)
    # Defaults add nothing, so that jobs of versions without these options keep their digest.
    others = [*([] if follow_links else ["no links"]), *(name for name in modalities if name != "structure")]
    scanned = [str(source), sorted(listing.items()), *others]
    digest = hash_text(json.dumps(scanned))
    kept = out / "catalog"
    try:
        if from_json((kept / "listing.json").read_bytes())["digest"] == digest:
            return Catalog.load(kept), _versions(listing)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        pass
    echo(f"{source}: scanning {len(listing):,} files")
    try:
        catalog = scan(
            source,
            follow_links=follow_links,
            modalities=tuple(sorted({*STRUCTURE_ONLY, *modalities})),
            workers=workers,
            limits=limits,
        )
    except AmbiguousPeople as ambiguous:
        raise EvaluationError(f"{ambiguous}; then embed the resulting catalog with --catalog") from None
    # Emptied before and written after: a later call uses the catalog if the digest agrees. Not deleted, which a bucket
    # may not allow.
    write_whole(kept / "listing.json", b"{}")
    catalog.save(kept)
    write_whole(kept / "listing.json", json.dumps({"digest": digest}).encode())
    return catalog, _versions(listing)


def _versions(listing: dict[str, str]) -> Callable[[Acquisition], str]:
    """A function that gives `_Task.version` from this listing and from what the catalog states: with another eye or
    other millimetres, an acquisition has another vector."""
    version_of_file = versions(listing)

    def version_of(acquisition: Acquisition) -> str:
        beside = [listing[name] for name in map(str, sidecars(acquisition.uri)) if name in listing]
        stated = [acquisition.laterality, acquisition.spacing_mm, acquisition.layout, acquisition.modality]
        uri = acquisition.uri
        if "several_files" in acquisition.flags and split_uri(uri) is None:
            uri = str(listed(uri).parent)  # the row names the first of them
        return " ".join([version_of_file(uri), hash_text(json.dumps([stated, beside]))[:8]])

    return version_of


# ---- from a file to rows ---------------------------------------------------------------------------------------------


def _decode(task: _Task, *, preprocessing: Preprocessing, find_band: BandFinder | None) -> Arrays | _Failure:
    """Read and prepare one file; runs in a worker."""
    acquisition = task.acquisition
    try:
        prepared, *_ = prepare_acquisition(acquisition, acquisition.uri, preprocessing, find_band=find_band)
    except BucketError:
        raise  # an unreachable bucket says nothing about the file
    except BAD_INPUT as error:
        return _Failure(code_of(error), reason_of(error))
    return Arrays.of(prepared)


def _lost(task: _Task, lost: Lost) -> _Failure:
    return _Failure(lost.code, f"{task.acquisition.uri}: the process that read it {lost.what}")


def _deadline(limits: Limits, task: _Task) -> float:
    return limits.deadline(math.prod(task.acquisition.shape), task.acquisition.uri)


def _shard(
    tasks: Sequence[_Task], decoded: Iterator[Arrays | _Failure], kinds: Sequence[_Kind]
) -> list[dict[str, Any]]:
    """A row for every task: vectors, or a code and a sentence."""
    rows: list[dict[str, Any]] = []
    batch: list[tuple[dict[str, Any], Arrays]] = []

    def embed_batch() -> None:
        if not batch:
            return
        voxels, band, valid = (np.concatenate([getattr(arrays, name) for _, arrays in batch]) for name in ARRAYS)
        for kind in kinds:
            for (row, _), vector in zip(batch, kind.make(Arrays(voxels, band, valid)), strict=True):
                row[kind.name] = vector.astype(np.float32)
        batch.clear()

    for task in tasks:
        row: dict[str, Any] = dict(zip(("acquisition", "uri", "version"), task.identity, strict=True))
        outcome = next(decoded)
        failure = outcome if isinstance(outcome, _Failure) else _Failure("", "")
        rows.append(row | {"code": failure.code, "sentence": failure.sentence})
        if isinstance(outcome, Arrays):
            batch.append((rows[-1], outcome))
        if len(batch) == BATCH:
            embed_batch()
    embed_batch()
    return rows


def _part(rows: Sequence[dict[str, Any]], kinds: Sequence[_Kind]) -> bytes:
    """A parquet file of these rows."""
    import pyarrow as pa

    names = [(name, pa.string()) for name in ("acquisition", "uri", "version", "code", "sentence")]
    schema = pa.schema(names + [(kind.name, pa.list_(pa.float32())) for kind in kinds])
    return to_parquet(pa.Table.from_pylist(list(rows), schema))


def _finished(out: Location, retry: bool) -> tuple[int, set[tuple[str, str, str]]]:
    """The number of the next part, and the identities in earlier parts, without failures if `retry`."""
    import pyarrow as pa

    finished, last = set(), -1
    for path in _parts(out):
        try:
            table = from_parquet(path, ["acquisition", "uri", "version", "code"])
        except (pa.ArrowException, KeyError) as error:
            raise EvaluationError(
                f"{path}: damaged ({reason_of(error, 100)}); delete it, and run the same command again"
            ) from None
        last = int(path.stem)
        for row in table.to_pylist():
            if not row["code"] or not retry:
                finished.add((row["acquisition"], row["uri"], row["version"]))
    return last + 1, finished


def _parts(out: Location) -> list[Location]:
    folder = out / "parts"
    if isinstance(folder, Path) and not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == ".parquet")


# ---- at the end ------------------------------------------------------------------------------------------------------


def _finish(
    out: Location, catalog: Catalog, tasks: Sequence[_Task], kinds: Sequence[_Kind], preprocessing: Preprocessing
) -> dict[str, Any]:
    """Join the parts to embeddings files, with metadata from the catalog; returns counts."""
    import pyarrow as pa

    tables = [from_parquet(path) for path in _parts(out)]
    # Later parts overwrite earlier ones: after `retry` the newest outcome for a file counts.
    place: dict[tuple[str, str, str], tuple[int, int]] = {}
    for number, table in enumerate(tables):
        columns = (table.column(name).to_pylist() for name in ("acquisition", "uri", "version"))
        place |= {identity: (number, row) for row, identity in enumerate(zip(*columns, strict=True))}
    found = [place[task.identity] for task in tasks]
    codes = [tables[number].column("code")[row].as_py() for number, row in found]
    good = [i for i, code in enumerate(codes) if not code]
    volumes = hash_text("\n".join(" ".join(tasks[i].identity) for i in good))[:16]
    rows = [fields_of(tasks[i].acquisition) for i in good]
    for kind in kinds:
        if good:
            vectors = np.empty((len(good), kind.width), np.float32)
            for at, i in enumerate(good):
                number, row = found[i]
                vectors[at] = tables[number].column(kind.name)[row].values.to_numpy()
            # As for a store (`embed._voxels_of`), the key also identifies the volumes.
            facts = kind.facts | {"key": f"{kind.facts['key']}-{volumes}"}
            write_vectors(out / f"{kind.name}.parquet", rows, vectors, facts, preprocessing)
    failures = []
    for task, code, (number, row) in zip(tasks, codes, found, strict=True):
        if code:
            sentence = tables[number].column("sentence")[row].as_py()
            failures.append(_failure_row(task.acquisition.uri, task.acquisition, code, sentence))
    failures += [_failure_row(reject.uri, None, reject.code, reject.sentence) for reject in catalog.rejects]
    schema = pa.schema([(name, pa.string()) for name in ("uri", "acquisition", "scanner", "code", "sentence", "fix")])
    write_whole(out / "failures.parquet", to_parquet(pa.Table.from_pylist(failures, schema)))
    counts = Counter(failure["code"] for failure in failures)
    return {
        "volumes": len(tasks),
        "embedded": len(good),
        "failures": dict(counts.most_common()),
        "skipped": len(catalog.skipped),
    }


def _failure_row(uri: str, acquisition: Acquisition | None, code: str, sentence: str) -> dict[str, str | None]:
    fix = REASONS[code].fix if code in REASONS else PREPARE_REASONS.get(code, "")
    known = (acquisition.sop_instance_uid, acquisition.scanner) if acquisition is not None else (None, None)
    return {"uri": uri, "acquisition": known[0], "scanner": known[1], "code": code, "sentence": sentence, "fix": fix}
