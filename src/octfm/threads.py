"""Change settings of the whole process for a while, from several threads at once.

If each thread restored what it found, the last one could leave behind what another had set meanwhile.
"""

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar, cast

L = TypeVar("L", bound="threading.Lock | threading.RLock")


def held_while_forking(lock: L) -> L:
    """The lock, which is free in a forked process even if another thread holds it when the process forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    return lock


class OneAtATime:
    """A context for one thread at a time, for long work; free in a forked process, whoever was inside.

    A process may be forked meanwhile: if that waited, as `held_while_forking` does, it could hold a lock that the
    thread inside needs, such as that of logging."""

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            yield


# A generator that is inside may be closed by the garbage collector in a thread that already holds the lock.
_lock = held_while_forking(threading.RLock())


class Shared:
    """A context that the first thread inside enters, and the last one leaves."""

    def __init__(self, context: Callable[[], AbstractContextManager]):
        self._context, self._inside = context, 0
        self._entered: AbstractContextManager | None = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with _lock:
            self._inside += 1
        try:
            with _lock:
                if self._entered is None:
                    entered = self._context()
                    entered.__enter__()
                    self._entered = entered
            yield
        finally:
            with _lock:
                self._inside -= 1
                if not self._inside and self._entered is not None:
                    entered, self._entered = self._entered, None
                    entered.__exit__(None, None, None)


class _Meanwhile:
    """Stands for the regular expression in a filter of warnings, and matches nothing once `ended`."""

    def __init__(self, message: str):
        self._message, self.ended = re.compile(message, re.IGNORECASE), False

    def match(self, text: str) -> bool:
        return not self.ended and self._message.match(text) is not None


@contextmanager
def ignoring_warnings(message: str = "") -> Iterator[None]:
    """Ignore warnings that begin with a regular expression, by default all of them, in every thread meanwhile.

    Not by catch_warnings, which restores a whole list of filters: if another thread uses it at the same time, as
    libraries do, one of them would leave behind the filters of the other."""
    meanwhile = _Meanwhile(message)
    own = ("ignore", meanwhile, Warning, None, 0)
    with _lock:
        before = cast(list, warnings.filters)
        before.insert(0, own)
    try:
        yield
    finally:
        meanwhile.ended = True  # in copies of the list, too
        with _lock:
            # The list from then as well: another thread may put that back.
            for filters in (before, cast(list, warnings.filters)):
                if (at := next((n for n, one in enumerate(filters) if one is own), None)) is not None:
                    del filters[at]
