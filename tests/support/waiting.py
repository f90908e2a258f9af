"""Waiting for a condition with a deadline, and delays that are themselves what a test plants."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], seconds: float = 60) -> T:
    """The first true value of `condition`; fails after `seconds` with `what` was waited for."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what() if callable(what) else what}")
        time.sleep(0.005)
    return found


def planted_delay(seconds: float) -> None:
    """A slow disk, rank, reader or bucket, or the moment of a kill; never a wait for something to have happened."""
    time.sleep(seconds)
