"""A function over many files in parallel; results come in the order of the files, whichever process is faster."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

from octfm.errors import ConfigError
from octfm.io.isolation import Limits, Lost, each

T = TypeVar("T")
R = TypeVar("R")

HEADERS = 32
"""Headers per task: one takes milliseconds, handing it over to a process takes part of one."""
AHEAD = 2
"""Tasks handed out per worker."""


def spread(
    function: Callable[[T], R],
    items: Sequence[T],
    lost: Callable[[T, Lost], R],
    *,
    workers: int | None = None,
    limits: Limits | None = None,
    deadline: Callable[[T], float] | None = None,
    chunk: int = HEADERS,
    cluster: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[R]:
    """`function` of every item; `lost` says what becomes of an item whose process crashed, hung or ran out of memory.

    workers: child processes, None for one per core; 0 works in this process, where a crash of a decoder is a crash of the run.
    deadline: seconds for an item, by default `limits.seconds`.
    cluster: address of a dask scheduler (tcp://host:port) whose workers are used instead, all of them, each file in a child there.
    progress: called with (done, total) items.
    """
    limits = limits or Limits()
    chunks = [items[i : i + chunk] for i in range(0, len(items), chunk)]
    done = 0
    for part, results in zip(chunks, _results(function, chunks, workers, limits, deadline, cluster), strict=True):
        done += len(part)
        if progress:
            progress(done, len(items))
        for item, result in zip(part, results, strict=True):
            yield lost(item, result) if isinstance(result, Lost) else cast(R, result)


def stream(
    function: Callable[[T], R],
    items: Sequence[T],
    lost: Callable[[T, Lost], R],
    *,
    workers: int | None = None,
    limits: Limits | None = None,
    deadline: Callable[[T], float] | None = None,
) -> Iterator[R]:
    """As `spread`, for results as large as volumes: no more than AHEAD of each worker wait for a slow consumer."""
    if workers == 0:
        yield from map(function, items)
        return
    limits, workers = limits or Limits(), workers or os.cpu_count() or 1
    pool, window = ThreadPoolExecutor(workers), deque[tuple[T, Future]]()
    pending = iter(items)

    def take(future: Future, item: T) -> R:
        result = future.result()[0]
        return lost(item, result) if isinstance(result, Lost) else cast(R, result)

    try:
        for item in pending:
            window.append((item, pool.submit(_isolated, function, [item], limits, deadline)))
            if len(window) >= AHEAD * workers:
                first, future = window.popleft()
                yield take(future, first)
        while window:
            first, future = window.popleft()
            yield take(future, first)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _results(function, chunks, workers, limits, deadline, cluster) -> Iterator[list[Any]]:
    if workers == 0 and not cluster:
        yield from ([function(item) for item in chunk] for chunk in chunks)
        return
    # A child needs as long to start as for eight chunks of headers.
    most = len(chunks) if chunks and len(chunks[0]) == 1 else -(-len(chunks) // 8)
    if (workers == 1 or most <= 1) and not cluster:
        yield from (_isolated(function, chunk, limits, deadline) for chunk in chunks)
        return
    import joblib

    workers = min(workers or joblib.cpu_count(), most)
    tasks = (joblib.delayed(_isolated)(function, chunk, limits, deadline) for chunk in chunks)
    one_by_one: dict[str, Any] = {"return_as": "generator", "pre_dispatch": f"{AHEAD} * n_jobs", "batch_size": 1}
    if cluster:
        with _client(cluster) as client, joblib.parallel_config(backend="dask", client=client, n_jobs=-1):
            parallel = joblib.Parallel(**one_by_one)
            yield from cast(Any, parallel(tasks))
        return
    # Threads that wait for a child each.
    parallel = joblib.Parallel(n_jobs=workers, backend="threading", **one_by_one)
    yield from cast(Any, parallel(tasks))


def require_cluster(address: str) -> None:
    """Raise ConfigError unless a dask scheduler answers there."""
    _client(address).close()


def _client(address: str):
    try:
        from distributed import Client
    except ImportError:
        raise ConfigError(f"cluster {address}: dask is not installed; pip install 'octfm[dask]'") from None
    try:
        return Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        what = " ".join(str(error).split())[:120]
        raise ConfigError(
            f"cluster: no dask scheduler answers at {address} ({what}); expected tcp://host:port of one that runs"
        ) from None


def _isolated(
    function: Callable[[T], R], chunk: Sequence[T], limits: Limits, deadline: Callable[[T], float] | None
) -> list[R | Lost]:
    return list(each(function, chunk, limits, deadline or (lambda _: limits.seconds)))
