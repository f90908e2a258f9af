"""Vectors straight from files in a folder or a bucket, without a store: decoded in parallel, shard by shard; a kill costs one.

OUT/job.json             what the vectors are made by; another encoder is refused
OUT/catalog/             what a scan of the files found; read again as long as no file has changed
OUT/parts/000000.parquet vectors of 32 volumes each, and what could not be read, in one piece or not there
OUT/pretrained.parquet   all of them, as `octfm embed --store` writes it (and random_init, histogram)
OUT/failures.parquet     one row per file without a vector: code, sentence, what would mend it
"""

import functools
import io
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog, scan
from octfm.catalog.participants.people import AmbiguousPeople
from octfm.catalog.participants.pseudonyms import is_pseudonymous
from octfm.encoder.embed import HISTOGRAM_BINS, histogram, histogram_facts, write_vectors
from octfm.encoder.encoder import Encoder, load_encoder
from octfm.encoder.exported import refuse_inside_export
from octfm.errors import BucketError, Echo, EvaluationError
from octfm.formats.reasons import REASONS
from octfm.io.bucket import Account
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits, Lost
from octfm.io.lease import Lease
from octfm.io.location import BucketPath, Location, location, lock, write_whole
from octfm.io.spread import stream
from octfm.io.versions import listing_of, versions
from octfm.models.pooling import VectorPool
from octfm.run.runtime import Precision, start
from octfm.store.exclusion import without_excluded_files
from octfm.store.layout import Arrays
from octfm.store.prepare import BAD_INPUT, code_of, prepare_acquisition, words
from octfm.store.prepare import REASONS as PREPARE_REASONS
from octfm.volume.preprocessing import Preprocessing

FORMAT, VERSION = "octfm-embedding-job", 1
SHARD = 32
"""Volumes whose vectors become visible together: what a kill can cost."""
BATCH = 8
"""Volumes per forward pass; divides SHARD, so that a resumed job makes the same batches."""


@dataclass(frozen=True)
class _Task:
    acquisition: Acquisition
    version: str
    """Of the file: size and time, or what the bucket says."""


@dataclass(frozen=True)
class _Failure:
    code: str
    sentence: str


@dataclass(frozen=True, eq=False)
class _Kind:
    """One vector of a volume, and what an embeddings file says about it."""

    name: str
    width: int
    make: Callable[[Arrays], np.ndarray]
    facts: dict[str, Any]


def embed_files(
    run: str | Location,
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
    """Embed every OCT volume below `source` (a folder, s3:// or gs://, or a Catalog) into `out`, a folder or an address in a bucket.

    Stopped at any moment, even by kill -9, the same call continues and computes at most one shard again; files that are new or have changed
    since are taken up. What cannot be read is a row of failures.parquet, and is tried again when its file changes, or with `retry`.
    workers: processes that read and prepare, None for one per core, 0 for this one. baselines: also random initialisation and histogram.
    pool: instead of the run's own objective.pool. follow_links: as for octfm.scan.
    exclude: a file that names volumes to leave out.
    Returns counts. Raises EvaluationError where `out` holds vectors of other weights, Preprocessing or precision, or where nothing could
    be embedded; BucketError where the bucket stopped answering, which is no file's fault.
    """
    out, limits = location(out), limits or Limits()
    refuse_inside_export(out)
    encoder = _in_precision(load_encoder(run, device=device), precision, device).pooling(pool)
    kinds = [_of_encoder("pretrained", encoder)]
    if baselines:
        fresh = _in_precision(load_encoder(run, random_init=True, device=device), precision, device).pooling(pool)
        kinds += [_of_encoder("random_init", fresh)]
        kinds += [_Kind("histogram", HISTOGRAM_BINS, histogram, histogram_facts(encoder.fingerprint))]
    with _alone(out):
        account = Account(out, source.root if isinstance(source, Catalog) else source)
        _claim(out, encoder, kinds)
        catalog, version_of = _catalog(source, out, workers, limits, follow_links, echo)
        wanted = without_excluded_files(catalog.acquisitions, exclude, str(catalog.root), echo)
        tasks = [_Task(acquisition, version_of(acquisition.uri)) for acquisition in wanted]
        parts, done = _done(out, retry)
        missing = [task for task in tasks if done.get(_identity(task)) is None]
        if len(missing) < len(tasks):
            echo(f"{out}: {len(tasks) - len(missing):,} of {len(tasks):,} volumes are done already")
        embed = functools.partial(_decoded, preprocessing=encoder.preprocessing)
        deadline = functools.partial(_deadline, limits)
        decoded = stream(account.counting(embed), missing, _lost, workers=workers, limits=limits, deadline=deadline)
        decoded = account.counted(decoded)
        progress = _Progress(len(missing), echo)
        for number, first in enumerate(range(0, len(missing), SHARD), parts):
            part = missing[first : first + SHARD]
            rows = _shard(part, decoded, kinds)
            write_whole(out / "parts" / f"{number:06d}.parquet", _to_parquet(rows, kinds))
            progress.advance(rows)
        summary = _finish(out, catalog, tasks, kinds, encoder.preprocessing)
        if spent := account.close():
            summary["bucket"] = spent
    if not summary["embedded"]:
        code, count = next(iter(summary["failures"].items()), ("nothing accepted", 0))
        raise EvaluationError(
            f"{out}: not one of {len(tasks)} volumes could be embedded, {count} with {code}; see {out / 'failures.parquet'}"
        )
    return summary


def _in_precision(encoder: Encoder, precision: Precision, device: str | None) -> Encoder:
    return replace(encoder, runtime=start(precision, device))


def _of_encoder(name: str, encoder: Encoder) -> _Kind:
    facts = {
        "key": encoder.vector_key,
        "encoder": encoder.source,
        "precision": encoder.runtime.precision,
        "pool": encoder.config.objective.pool,
        "name": name,
    }
    return _Kind(name, encoder.vector_width, encoder.embed_arrays, facts)


def _claim(out: Location, encoder: Encoder, kinds: Sequence[_Kind]) -> None:
    """Begin a job, or continue it where its vectors are made by the same weights, Preprocessing and precision."""
    ours = {"format": FORMAT, "version": VERSION, "vectors": {kind.name: kind.facts["key"] for kind in kinds}}
    try:
        there = json.loads((out / "job.json").read_bytes())
    except FileNotFoundError:
        if any(path.name != "job.lease" and not path.name.startswith(".") for path in out.iterdir()):
            raise EvaluationError(f"{out}: holds other things than an embedding job; choose another --out") from None
        write_whole(out / "job.json", (json.dumps(ours, indent=2) + "\n").encode())
        return
    except ValueError:
        raise EvaluationError(f"{out / 'job.json'}: damaged; choose another --out") from None
    if there != ours:
        before, now = there.get("vectors", {}), ours["vectors"]
        differ = [name for name in before | now if before.get(name) != now.get(name)]
        raise EvaluationError(
            f"{out}: begun with other vectors ({', '.join(sorted(differ)) or 'another octfm'}); weights, Preprocessing, precision"
            " and --baselines must stay the same. Choose another --out, or restore them"
        )


@contextmanager
def _alone(out: Location) -> Iterator[None]:
    """One job at a time writes here; the lock of a killed one ends with it (in a bucket after three minutes)."""
    if isinstance(out, BucketPath):
        with Lease(out / "job.lease", "embedding into it"):
            yield
        return
    out.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(out / ".lock")
    except BlockingIOError:
        raise EvaluationError(
            f"{out}: another process is embedding into it; wait for it, or choose another --out"
        ) from None
    with held:
        yield


# ---- which files -------------------------------------------------------------------------------------------------------------------


def _catalog(
    source: str | Location | Catalog,
    out: Location,
    workers: int | None,
    limits: Limits,
    follow_links: bool,
    echo: Echo,
) -> tuple[Catalog, Callable[[str], str]]:
    """What there is to embed, and the version of each of its files. A scan is kept, and used again while no file below has changed."""
    if isinstance(source, Catalog):
        if is_pseudonymous(source):
            raise EvaluationError(
                f"{source.root}: this catalog has pseudonyms for files; prepare a store (--key, --root) and embed that"
            )
        return source, versions(listing_of(location(source.root)))
    root = location(source)
    if isinstance(root, Path):
        root = Path(os.path.abspath(root))  # noqa: PTH100
        if isinstance(out, Path) and Path(os.path.abspath(out)).is_relative_to(root):  # noqa: PTH100
            raise EvaluationError(
                f"{out}: lies among the files that are to be embedded; choose an --out outside {root}"
            )
    listing = listing_of(root)
    scanned = [str(root), sorted(listing.items()), *([] if follow_links else ["no links"])]
    digest = hash_text(json.dumps(scanned))
    kept = out / "catalog"
    try:
        if json.loads((kept / "listing.json").read_bytes())["digest"] == digest:
            return Catalog.load(kept), versions(listing)
    except (FileNotFoundError, ValueError, KeyError):
        pass
    echo(f"{root}: looking at {len(listing):,} files")
    try:
        catalog = scan(root, follow_links=follow_links, workers=workers, limits=limits)
    except AmbiguousPeople as ambiguous:
        raise EvaluationError(f"{ambiguous}; then embed the catalog that it makes with --catalog") from None
    catalog.save(kept)
    write_whole(kept / "listing.json", json.dumps({"digest": digest}).encode())
    return catalog, versions(listing)


# ---- from a file to rows -----------------------------------------------------------------------------------------------------------


def _decoded(task: _Task, *, preprocessing: Preprocessing) -> Arrays | _Failure:
    """In a worker."""
    acquisition = task.acquisition
    try:
        prepared, *_ = prepare_acquisition(acquisition, acquisition.uri, preprocessing)
    except BucketError:
        raise  # what could not be fetched is no bad file
    except BAD_INPUT as error:
        return _Failure(code_of(error), " ".join(str(error).split()) or type(error).__name__)
    return Arrays(prepared.voxels[None], prepared.band[None], prepared.valid[None])


def _lost(task: _Task, lost: Lost) -> _Failure:
    return _Failure(lost.code, f"{task.acquisition.uri}: the process that read it {lost.what}")


def _deadline(limits: Limits, task: _Task) -> float:
    return limits.deadline(math.prod(task.acquisition.shape), task.acquisition.uri)


def _shard(
    tasks: Sequence[_Task], decoded: Iterator[Arrays | _Failure], kinds: Sequence[_Kind]
) -> list[dict[str, Any]]:
    """A row for every task: vectors, or a code and a sentence."""
    rows, waiting = [], []

    def flush() -> None:
        if not waiting:
            return
        arrays = Arrays(
            *(np.concatenate([getattr(a, name) for _, a in waiting]) for name in ("voxels", "band", "valid"))
        )
        for kind in kinds:
            for (row, _), vector in zip(waiting, kind.make(arrays), strict=True):
                row[kind.name] = vector.astype(np.float32)
        waiting.clear()

    for task in tasks:
        row: dict[str, Any] = {
            "acquisition": task.acquisition.sop_instance_uid, "uri": task.acquisition.uri, "version": task.version,
            "code": "", "sentence": "",
        }  # fmt: skip
        rows.append(row)
        outcome = next(decoded)
        if isinstance(outcome, _Failure):
            row |= {"code": outcome.code, "sentence": outcome.sentence}
            continue
        waiting.append((row, outcome))
        if len(waiting) == BATCH:
            flush()
    flush()
    return rows


def _to_parquet(rows: Sequence[dict[str, Any]], kinds: Sequence[_Kind]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [(name, pa.string()) for name in ("acquisition", "uri", "version", "code", "sentence")]
    schema = pa.schema(names + [(kind.name, pa.list_(pa.float32())) for kind in kinds])
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows), schema), content)
    return content.getvalue()


def _identity(task: _Task) -> tuple[str, str, str]:
    return task.acquisition.sop_instance_uid, task.acquisition.uri, task.version


def _done(out: Location, retry: bool) -> tuple[int, dict[tuple[str, str, str], bool]]:
    """The number of the next part, and what is in those before it: identity -> whether it has vectors."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    done, last = {}, -1
    for path in _parts(out):
        try:
            table = pq.read_table(pa.BufferReader(path.read_bytes()), columns=["acquisition", "uri", "version", "code"])
        except (pa.ArrowException, KeyError) as error:
            raise EvaluationError(
                f"{path}: damaged ({' '.join(str(error).split())[:100]}); delete it, and run the same command again"
            ) from None
        last = int(path.stem)
        for row in table.to_pylist():
            if not row["code"] or not retry:
                done[row["acquisition"], row["uri"], row["version"]] = not row["code"]
    return last + 1, done


def _parts(out: Location) -> list[Location]:
    folder = out / "parts"
    if isinstance(folder, Path) and not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix == ".parquet")


# ---- at the end ---------------------------------------------------------------------------------------------------------------------


def _finish(
    out: Location, catalog: Catalog, tasks: Sequence[_Task], kinds: Sequence[_Kind], preprocessing: Preprocessing
) -> dict[str, Any]:
    """The parts as embeddings files, with the words of the catalog; what is newest about a file counts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [pq.read_table(pa.BufferReader(path.read_bytes())) for path in _parts(out)]
    place: dict[tuple[str, str, str], tuple[int, int]] = {}
    for number, table in enumerate(tables):
        columns = (table.column(name).to_pylist() for name in ("acquisition", "uri", "version"))
        place |= {identity: (number, row) for row, identity in enumerate(zip(*columns, strict=True))}
    found = [place[_identity(task)] for task in tasks]
    codes = [tables[number].column("code")[row].as_py() for number, row in found]
    good = [i for i, code in enumerate(codes) if not code]
    identities = "\n".join(" ".join(_identity(tasks[i])) for i in good)
    volumes = hash_text(identities)[:16]
    rows = [words(tasks[i].acquisition) for i in good]
    for kind in kinds:
        if good:
            vectors = np.empty((len(good), kind.width), np.float32)
            for at, i in enumerate(good):
                number, row = found[i]
                vectors[at] = tables[number].column(kind.name)[row].values.to_numpy()
            write_vectors(
                out / f"{kind.name}.parquet",
                rows,
                vectors,
                kind.facts | {"key": f"{kind.facts['key']}-{volumes}"},
                preprocessing,
            )
    failures = [
        _failure_row(
            tasks[i].acquisition.uri,
            tasks[i].acquisition,
            codes[i],
            tables[found[i][0]].column("sentence")[found[i][1]].as_py(),
        )
        for i in range(len(tasks))
        if codes[i]
    ]
    failures += [_failure_row(reject.uri, None, reject.code, reject.sentence) for reject in catalog.rejects]
    schema = pa.schema([(name, pa.string()) for name in ("uri", "acquisition", "scanner", "code", "sentence", "fix")])
    content = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(failures, schema), content)
    write_whole(out / "failures.parquet", content.getvalue())
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


class _Progress:
    """A line now and then, with the time to go."""

    def __init__(self, total: int, echo: Echo, pause_s: float = 10):
        self._total, self._echo, self._pause = total, echo, pause_s
        self._done = self._failed = 0
        self._start = self._last = time.monotonic()

    def advance(self, rows: Sequence[dict[str, Any]]) -> None:
        self._done += len(rows)
        self._failed += sum(bool(row["code"]) for row in rows)
        now = time.monotonic()
        if now - self._last < self._pause and self._done < self._total:
            return
        rate = self._done / max(now - self._start, 1e-9)
        left = (self._total - self._done) / rate / 60
        self._echo(
            f"{self._done:,} of {self._total:,} volumes, {self._failed:,} without a vector, {rate:.2g} per second, {left:.0f} min left"
        )
        self._last = now
