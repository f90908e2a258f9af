"""A function over many items in several processes; results come in the order of the items, whichever process is faster."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")
R = TypeVar("R")

_CHUNK = 32
"""Items per task: a header takes milliseconds, handing one over to a process as long."""


def spread(
    function: Callable[[T], R], items: Sequence[T], workers: int | None = None, progress: Callable[[int, int], None] | None = None
) -> Iterator[R]:
    """`function` of every item. `workers`: processes, default one per core. `progress(done, total)` counts items."""
    chunks = [items[i : i + _CHUNK] for i in range(0, len(items), _CHUNK)]
    # Fewer items are done before the processes have started.
    workers = 1 if len(items) < 8 * _CHUNK else workers or os.cpu_count() or 1
    if workers == 1:
        results: Iterator[list[R]] = (_each(function, chunk) for chunk in chunks)
    else:
        from joblib import Parallel, delayed

        results = cast(Any, Parallel(n_jobs=workers, return_as="generator")(delayed(_each)(function, chunk) for chunk in chunks))
    done = 0
    for found in results:
        done += len(found)
        if progress:
            progress(done, len(items))
        yield from found


def _each(function: Callable[[T], R], chunk: Sequence[T]) -> list[R]:
    return [function(item) for item in chunk]
