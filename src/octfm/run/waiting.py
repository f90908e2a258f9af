"""Say what a run waits for if no step finishes: a prototype hid a dead data path behind minutes of silence (F8)."""

import threading
import time
from collections.abc import Callable

ADVICE = {
    "data": "reading volumes takes this long: use a local prepared store, and see the forecast of octfm doctor",
    "the first step": "kernels are compiled on first use; if it stays so, the device hangs or the step is too large",
    "the other ranks": "another rank is slower, hangs or has died: see its own output, and runtime.timeout_s",
    "the device": "a step takes this long, is being compiled (runtime.compile; the second one mostly) or the device "
    "hangs: see volumes_per_s and octfm doctor's forecast",
    "validation": "validation or writing a checkpoint takes this long: lower validation_volumes, or do both less often",
}


class Waiting:
    """A thread that calls `report` after `deadline_s` without a finished step, then after twice as long, and so on."""

    def __init__(self, deadline_s: float, report: Callable[[str, float, str], None]):
        """`report(what, seconds, sentence)` is called from the thread."""
        self.deadline_s, self._report = deadline_s, report
        self._changed, self._closed = threading.Condition(), False
        self._what, self._since, self._steps = "data", time.monotonic(), 0
        self._thread = threading.Thread(target=self._watch, name="octfm-waiting", daemon=True)

    def start(self) -> None:
        self._since = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def for_(self, what: str) -> None:
        """Note what the step waits for from now on: `data`, `the device` or `the other ranks`."""
        # No lock: assigning one reference is atomic, and training must not wait while a report is written.
        self._what = "the first step" if what == "the device" and self._steps == 0 else what

    def done(self) -> None:
        """Note that a step is finished."""
        with self._changed:
            self._steps += 1
            self._what, self._since = "validation", time.monotonic()
            self._changed.notify()

    def _watch(self) -> None:
        patience = self.deadline_s
        with self._changed:
            steps = self._steps
            while not self._closed:
                if steps != self._steps:
                    steps, patience = self._steps, self.deadline_s
                waited = time.monotonic() - self._since
                if waited < patience:
                    self._changed.wait(patience - waited)
                    continue
                what, patience = self._what, 2 * patience
                first = "no step has finished yet" if steps == 0 else f"no step has finished after step {steps}"
                self._report(what, waited, f"{first}: waiting for {what} for {waited:.0f} s; {ADVICE[what]}")
