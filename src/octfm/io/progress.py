"""Progress of long work: a bar with the time left on a terminal, now and then a line of text elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from octfm.errors import Echo, one_line

T = TypeVar("T")

SHOW_AFTER_S = 2.0
"""A bar appears once the work has taken so long."""
PAUSE_S, SHARE, LONGEST_PAUSE_S = 10.0, 0.05, 600.0
"""Lines are at least PAUSE_S apart and SHARE of the work, unless that would take longer than LONGEST_PAUSE_S."""

_LINES: ContextVar[Echo | None] = ContextVar("_LINES", default=None)
"""Where lines go inside `lines_to`; None: to stderr."""


@contextmanager
def lines_to(echo: Echo) -> Iterator[None]:
    """Give lines about progress to `echo` instead of stderr; bars on a terminal disappear when their work is done."""
    token = _LINES.set(echo)
    try:
        yield
    finally:
        _LINES.reset(token)


def on_terminal(stream: Any) -> bool:
    """Whether a standard stream is a terminal. A program without a console has none, or an object of its own."""
    return stream is not None and hasattr(stream, "isatty") and stream.isatty()


def say(text: str) -> None:
    """A line about long work, where its progress goes."""
    echo = _LINES.get()
    if echo is not None:
        echo(text)
    else:
        print(one_line(text), file=sys.stderr, flush=True)


class Progress:
    """A context manager; `advance` counts what is done."""

    def __init__(
        self,
        what: str,
        total: int,
        unit: str = "volumes",
        *,
        failure: str = "failed",
        echo: Echo | None = None,
        enabled: bool = True,
        always: bool = False,
        pause_s: float = PAUSE_S,
        done: int = 0,
    ):
        """`what` begins every line, `failure` names what happened to units that failed; lines go to `echo`, by default
        to stderr. `always`: also for work that ends at once. `done`: units of an earlier call. Disabled, it is
        silent."""
        self._what, self._total, self._unit, self._failure = one_line(what), total, unit, failure
        self._echo, self._pause, self._always = echo or say, pause_s, always
        self._enabled = enabled and total > 0
        self._on_terminal = self._enabled and on_terminal(sys.stderr)
        self._done = self._before = done
        self._failed = 0
        self._start = self._last = time.monotonic()
        self._last_done = done
        self._bar: Any = None
        self._started = False

    def __enter__(self) -> Self:
        if self._on_terminal:
            from rich import progress as rich
            from rich.console import Console

            columns = (
                rich.TextColumn("{task.description}", markup=False),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TimeElapsedColumn(),
                "left",
                rich.TimeRemainingColumn(compact=True),
                rich.TextColumn("{task.fields[note]}", markup=False),
            )
            self._bar = rich.Progress(
                *columns,
                console=Console(stderr=True),
                transient=_LINES.get() is not None,
                # Results that go to a file must not be caught for the terminal.
                redirect_stdout=on_terminal(sys.stdout),
                # A long window: steps that validate or save would make the estimate of a short one jump.
                speed_estimate_period=600,
            )
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._done, note="")
        return self

    def advance(self, units: int = 1, failed: int = 0) -> None:
        """Count `units` more, of which `failed` failed."""
        self._failed += failed
        self._done += units
        now = time.monotonic()
        if self._bar is not None:
            note = f"{self._failed:,} {self._failure}" if self._failed else ""
            self._bar.update(self._task, completed=self._done, note=note)
            if not self._started and (self._always or now - self._start >= SHOW_AFTER_S):
                self._bar.start()
                self._started = True
        elif self._enabled and self._line_is_due(now):
            self._echo(f"{self._what}: {self._text(now)}")
            self._last, self._last_done = now, self._done

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items one by one; each counts as done when the next one is wanted."""
        for item in items:
            yield item
            self.advance()

    def up_to(self, done: int, total: int) -> None:
        """As `advance`, for callbacks that get the numbers of units done and in all."""
        self._total = total
        if self._bar is not None:
            self._bar.update(self._task, total=total)
        self.advance(done - self._done)

    def __exit__(self, *_: object) -> None:
        if self._started:
            self._bar.stop()

    def _line_is_due(self, now: float) -> bool:
        passed = now - self._last
        if self._done >= self._total:
            return self._always or now - self._start >= self._pause
        far = self._done - self._last_done >= SHARE * self._total
        return passed >= self._pause and (far or passed >= LONGEST_PAUSE_S)

    def _text(self, now: float) -> str:
        rate = (self._done - self._before) / max(now - self._start, 1e-9)
        left = (self._total - self._done) / rate / 60 if rate else 0.0
        text = f"{self._done:,} of {self._total:,} {self._unit}, {rate:.2g} per second, {left:.1f} min left"
        return f"{text}, {self._failed:,} {self._failure}" if self._failed else text
