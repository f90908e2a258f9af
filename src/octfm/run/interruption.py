"""SIGTERM and SIGINT: the step is finished and saved first; a second signal acts at once, unless a launcher repeats signals."""

import os
import signal
import threading
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """While entered, remembers that the process was asked to stop. Only the main thread can listen; elsewhere it hears nothing."""

    def __init__(self) -> None:
        self.asked: str | None = None
        """Name of the signal that came."""
        # torchrun passes on a signal that the whole process group got already; it kills by itself what takes too long.
        self._patient = "TORCHELASTIC_RUN_ID" in os.environ
        self._before: dict = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked = signal.Signals(number).name
        if not self._patient:
            self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
