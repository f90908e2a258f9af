"""What the children of test_isolation.py are given to do. A child imports the module of its function, so this one
imports little."""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence

from octfm.io.isolation import Limits, each
from support.waiting import planted_delay

LIMITS = Limits(seconds=1)


def run(function: Callable, items: Sequence) -> list:
    """What `each` yields for these items, with a second for each."""
    return list(each(function, items, LIMITS, lambda _: LIMITS.seconds))


def children_in_a_worker() -> list:
    return run(misbehave, ["a", "crash", "b"])


def misbehave(how: str) -> str | int | bytes:
    """End, hang or swallow memory as `how` says; any other word comes back in capitals."""
    if how == "crash":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    if how == "exit":
        os._exit(3)
    if how == "sleep":
        planted_delay(600)
    if how == "spin":
        while True:
            pass
    if how == "swallow":
        return len(bytearray(3 * 2**30))
    if how == "answer at length":
        return bytes(3 * 2**29)  # fits into the limit, and its pickle does not
    if how == "swallow natively":
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        ctypes.memset(libc.malloc(3 * 2**30), 1, 3 * 2**30)  # as a decoder that never looks at what malloc says
    return how.upper()


def who(_: object) -> tuple[int, list[str], str]:
    return os.getpid(), sorted({name.split(".")[0] for name in sys.modules}), os.environ["OMP_NUM_THREADS"]


def shout(text: str) -> str:
    print(text)
    os.write(1, text.encode())
    return text


def fail(number: int) -> None:
    raise KeyError(number)


class TwoParts(Exception):
    """Pickled, but not unpickled: its own arguments are not those of Exception."""

    def __init__(self, one: str, other: str):
        super().__init__(one + other)


def raise_or_return(how: str) -> object:
    """An error, or something that cannot be pickled; any other word comes back with the id of its process."""
    if how == "raise":
        raise KeyError(how)
    if how == "raise in parts":
        raise TwoParts("a", "b")
    return (item for item in how) if how == "yield" else (how, os.getpid())


def slowly(number: int) -> int:
    planted_delay(0.2 if number < 3 else 0)
    return number


def spin(seconds: float) -> str:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return "done"
