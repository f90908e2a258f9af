"""Apply a function to many files in parallel child processes; results come in the order of the files."""

import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from numbers import Integral
from typing import Any, TypeVar, cast

from octfm.errors import ConfigError, reason_of
from octfm.io.cores import available_cores
from octfm.io.isolation import Limits, Lost, each

T = TypeVar("T")
R = TypeVar("R")

HEADERS = 32
"""Headers per task: reading one takes milliseconds, so passing them on one by one would be a noticeable overhead."""
AHEAD = 2
"""Tasks per worker that are queued or have a result that nobody has taken yet."""


def spread(
    function: Callable[[T], R],
    items: Sequence[T],
    lost: Callable[[T, Lost], R],
    *,
    workers: int | None = None,
    limits: Limits | None = None,
    deadline: Callable[[Limits, T], float] | None = None,
    chunk: int = HEADERS,
    cluster: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[R]:
    """Yield `function(item)` for every item, or `lost(item, …)` if its process crashed, hung or ran out of memory.

    workers: child processes, None for one per core; 0 for this process, which a crashing decoder then takes down.
    deadline: seconds allowed for an item under these limits, by default `limits.seconds`.
    chunk: items per task; 1 for results as large as volumes, few of which then wait for a slow consumer.
    cluster: address of a dask scheduler (tcp://host:port), all of whose workers are used instead, with children there.
    progress: called with (done, total) items.
    Raises ConfigError for `workers` that are no number of processes.
    """
    expect_workers(workers)
    limits = limits or Limits()
    chunks = [items[i : i + chunk] for i in range(0, len(items), chunk)]
    finished = 0
    for part, results in zip(chunks, _results(function, chunks, workers, limits, deadline, cluster), strict=True):
        finished += len(part)
        if progress:
            progress(finished, len(items))
        for item, result in zip(part, results, strict=True):
            yield lost(item, result) if isinstance(result, Lost) else cast(R, result)


def expect_workers(workers: int | None) -> None:
    """Raise ConfigError unless `workers` is None or a number of child processes."""
    if workers is not None and not (isinstance(workers, Integral) and int(workers) >= 0):
        raise ConfigError(
            f"workers: expected a whole number, 0 to work in this process, or None for one per core, got {workers!r}"
        )


Spread = Callable[..., Iterator[Any]]
"""`spread` with its workers and limits already bound: (function, items, lost) → results, for steps of a scan."""


def _results(
    function: Callable[[T], R],
    chunks: Sequence[Sequence[T]],
    workers: int | None,
    limits: Limits,
    deadline: Callable[[Limits, T], float] | None,
    cluster: str | None,
) -> Iterator[Sequence[R | Lost]]:
    """Results of each chunk, in order: in this process, in children, or on a cluster."""
    if workers == 0 and not cluster:
        yield from ([function(item) for item in chunk] for chunk in chunks)
        return
    # Starting a child takes as long as eight chunks of headers.
    most = len(chunks) if chunks and len(chunks[0]) == 1 else -(-len(chunks) // 8)
    work = partial(_isolated, function, limits=limits, deadline=deadline)
    if (workers == 1 or most <= 1) and not cluster:
        yield from map(work, chunks)
        return
    if cluster:
        with _client(cluster) as client:
            yield from _in_order(client.get_executor(pure=False), work, chunks, sum(client.nthreads().values()))
        return
    workers = min(workers or available_cores(), most)
    with ThreadPoolExecutor(workers) as pool:  # each thread waits for a child of its own
        yield from _in_order(pool, work, chunks, workers)


def _in_order(pool: Executor, work: Callable[[T], R], tasks: Iterable[T], workers: int) -> Generator[R]:
    """Results in the order of `tasks`, with at most AHEAD tasks per worker submitted or waiting to be taken."""
    window = deque[Future[R]]()
    try:
        for task in tasks:
            window.append(pool.submit(work, task))
            if len(window) >= AHEAD * workers:
                yield window.popleft().result()
        while window:
            yield window.popleft().result()
    finally:
        # If the consumer stops early, or a task raised.
        for future in window:
            future.cancel()


def require_cluster(address: str) -> None:
    """Raise ConfigError unless a dask scheduler answers at this address."""
    _client(address).close()


def _client(address: str) -> Any:
    # A client that dask cannot even begin to connect is closed when Python ends, with a traceback after 20 seconds.
    if not re.fullmatch(r"(tcp|tls)://([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}", address, re.ASCII):
        raise ConfigError(f"cluster: expected the tcp://host:port of a dask scheduler, got {address!r}")
    try:
        from distributed import Client
        from distributed.security import Security
    except ImportError:
        raise ConfigError(f"cluster {address}: dask is not installed; pip install 'octfm[dask]'") from None
    if address.startswith("tls") and not Security().get_connection_args("client")["ssl_context"]:
        raise ConfigError(f"cluster {address}: dask's configuration names no certificates (distributed.comm.tls)")
    try:
        return Client(address, timeout=10, set_as_default=False)
    except (OSError, ValueError) as error:
        what = reason_of(error, 120)
        raise ConfigError(
            f"cluster: no dask scheduler answers at {address} ({what}); give the tcp://host:port of a running one"
        ) from None


def _isolated(
    function: Callable[[T], R], chunk: Sequence[T], limits: Limits, deadline: Callable[[Limits, T], float] | None
) -> list[R | Lost]:
    return list(each(function, chunk, limits, lambda item: deadline(limits, item) if deadline else limits.seconds))
