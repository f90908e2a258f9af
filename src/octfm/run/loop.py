"""The loop of pretraining, fine-tuning and segmentation: update, recover, validate, save; and what it writes to."""

import os
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, Self

from octfm.errors import CheckpointError, Echo, Preempted
from octfm.io import bucket
from octfm.io.progress import Progress, on_terminal
from octfm.io.ranks import rank
from octfm.run import checkpoint_files, shards
from octfm.run.checkpoint_writer import CheckpointWriter, Retention
from octfm.run.folder import Resumable, RunFolder
from octfm.run.tracking import Listener, Metrics, NoMetrics, TrackingConfig
from octfm.run.waiting import Waiting


class Training(Resumable, Protocol):
    """Something that is trained. Every rank holds one, and all of them come to the same decisions."""

    tracking: TrackingConfig

    @property
    def steps(self) -> int:
        """Updates in all, at most."""
        ...

    def update(self, session: "Session", interruption: "Interruption") -> str | None:
        """Make one update and log it; returns the name of a signal if any rank received one."""
        ...

    def recover(self, session: "Session") -> bool:
        """Act on what the update showed; True if training went back to an earlier step."""
        ...

    def validate(self, session: "Session") -> bool:
        """Do what is due between two updates; True if a checkpoint is to be written."""
        ...

    def content(self) -> dict[str, Any]:
        """The content of a checkpoint of the current state, for `restore`."""
        ...


@dataclass(eq=False)
class Session:
    """One rank's run folder, metrics, checkpoints and messages; rank 0 logs and prints for all ranks."""

    training: Training
    run: RunFolder
    metrics: Metrics
    writer: CheckpointWriter
    echo: Echo
    """Prints on rank 0 only."""
    aloud: Echo = print
    """Prints on every rank, for messages about that rank."""
    saved: int = field(init=False)
    """Updates in the last checkpoint."""
    lost: set[int] = field(default_factory=set)
    """Updates in the checkpoints that could not be written anywhere."""
    best: bool = False
    """Whether the next checkpoint is of the best state so far."""
    retries: int = 0
    """Repeated requests to buckets that were reported."""
    requests_before: bucket.Tally = field(default_factory=bucket.tally)
    """Requests of this process to buckets before the run began; a run in a bucket keeps its own count."""

    def __post_init__(self) -> None:
        self.saved = self.training.step
        self._key = self.run.key if self.training.runtime.leads else ""  # others may not see the folder
        self.waiting = Waiting(self.training.tracking.step_deadline_s, self.report_waiting)

    def save(self) -> None:
        """Write a checkpoint in the background. Raises CheckpointError if another run has the folder now."""
        step = self.training.step
        if self.training.runtime.leads:
            self.run.require_key(self._key)
        if self.writer.places:
            self.writer.save(step, self.training.content(), best=self.best)
        self.saved, self.best = step, False
        self.report_requests()

    def finish(self) -> None:
        """Save what is not saved yet, and wait until it is written. Raises CheckpointError if it could not be."""
        if self.saved != self.training.step:
            self.save()
        self.writer.finish()
        self.report_requests()  # also requests of uploads that were still running when the last checkpoint began
        self.training.runtime.first(self._require_written)

    def rewind(self, rollbacks: int) -> None:
        """Remove metrics and checkpoints after the step that training went back to; `rollbacks` counts this one."""
        step = self.training.step
        # In this order a kill changes nothing: until the new state is saved, the old one repeats all this.
        self.writer.forget_after(step)
        self.report_failures(step)
        self.lost.clear()  # they were of the abandoned steps
        self.metrics.rewind(step, rollbacks)
        self.save()

    def _require_written(self) -> None:
        step = self.training.step
        self.report_failures(step - 1)
        # Also if the loop has reported it already: the background write may have ended at any moment.
        if step not in self.lost:
            return
        last, remote = self.run.last_checkpoint(), self.writer.remote
        if remote is not None and last is not None and checkpoint_files.step_of(last) == step:
            raise CheckpointError(
                f"{remote.where}: the bucket lacks the checkpoint after step {step}; it is {last}, "
                "and the same command on this machine sends it"
            )
        raise CheckpointError(
            f"{self.run.path}: the checkpoint after step {step} could not be written; free some space "
            "(pretraining can also use ckpt_second_dir) and run again: "
            + (f"it continues from {last}" if last else "it starts from the beginning")
        )

    def report_failures(self, step: int) -> None:
        """Log which checkpoints were not written where they should be, and remember those not written at all."""
        for failure in self.writer.failures():
            verdict = "bad" if failure.lost else "watch"
            self.metrics.write("checkpoint", step, what="checkpoint", verdict=verdict, sentence=failure.sentence)
            self.echo(f"step {step + 1}: {failure.sentence}")
            if failure.lost:
                self.lost.add(failure.step)

    def report_requests(self) -> None:
        """Log how many requests to buckets had to be repeated, if there are more than before."""
        remote = self.writer.remote
        spent = bucket.tally() - (remote.before if remote else self.requests_before)
        if spent.retries > self.retries:
            self.retries = spent.retries
            failed = f"{spent.retries:,} of {spent.requests:,} requests to the bucket failed"
            sentence = f"{failed} and were sent again; nothing is missing"
            facts = {"verdict": "watch", "what": "bucket", "sentence": sentence}
            self.metrics.write("bucket", max(0, self.training.step - 1), **facts, **asdict(spent))

    def report_waiting(self, what: str, seconds: float, sentence: str) -> None:
        """Say that no step has finished for longer than the deadline (F8). Called from another thread."""
        step, runtime = self.training.step, self.training.runtime
        self.metrics.write("waiting", step, what=what, seconds=seconds, sentence=sentence)
        runtime.say(f"waiting for {what} for {seconds:.0f} s at its last sign of life, in step {step + 1}")
        self.aloud(sentence if runtime.leads else f"rank {runtime.rank}: {sentence}")

    def close(self) -> None:
        self.waiting.close()
        self.writer.close()
        self.metrics.close()


def open_session(
    training: Training,
    run: RunFolder,
    retention: Retention,
    echo: Echo,
    *,
    aloud: Echo | None = None,
    listeners: Sequence[Listener] = (),
    rollbacks: int = 0,
) -> Session:
    """Open the metrics and the checkpoint writer of a run. Metrics of later steps than the one that training goes on
    from are removed, except those about its first `rollbacks` rollbacks."""
    runtime = training.runtime
    places = runtime.first(lambda: checkpoint_files.destinations(run.path))
    metrics = Metrics(run.metrics, training.step, rollbacks, listeners) if runtime.leads else NoMetrics()
    if metrics.broken is not None:
        echo(f"warning: {metrics.broken}")
    # Shards are written by all ranks, and deleted by rank 0 alone.
    if runtime.sharded:
        writer = CheckpointWriter(places, retention, partial(shards.write, runtime=runtime), tidies=runtime.leads)
    else:
        writer = CheckpointWriter(places if runtime.leads else [], retention)
    writer.forget_best_after(training.step)  # later checkpoints may have been damaged, and the best among them
    if run.remote is not None and runtime.leads:
        writer.follow(run.remote)
    return Session(training, run, metrics, writer, echo, aloud or echo)


def train(training: Training, session: Session, interruption: "Interruption") -> None:
    """Train to the end. Raises Preempted after a signal, once the step is finished and saved."""
    session.echo, session.aloud = (interruption.heard(echo) for echo in (session.echo, session.aloud))
    session.waiting.start()
    # A bar on a terminal; elsewhere the lines of the training itself show how far it is.
    shown = training.runtime.leads and on_terminal(sys.stderr)
    bar = Progress("training", training.steps, "steps", enabled=shown, always=True, done=training.step)
    try:
        with bar:
            _repeat(training, session, interruption, bar)
        session.finish()
    finally:
        session.close()


def _repeat(training: Training, session: Session, interruption: "Interruption", bar: Progress) -> None:
    while not training.finished:
        step = training.step
        signal_name = training.update(session, interruption)
        session.waiting.done()
        bar.up_to(training.step, training.steps)
        if training.recover(session):
            continue  # at an earlier step, saved already
        if training.validate(session):
            session.save()
        session.report_failures(step)
        if signal_name and not training.finished:
            # Waits for the checkpoint: a launcher kills what is still there after its grace period.
            session.finish()
            progress = f"{training.step} of {training.steps} updates"
            raise Preempted(f"{signal_name}: saved after {progress}; run again to continue")


class Interruption:
    """Remembers SIGTERM, SIGINT and SIGHUP (the terminal is gone) while entered, so that the step is finished and saved
    first; says so at once. A second signal acts at once, unless a launcher repeats it; SIGHUP never does, since shells
    repeat it and systemd sends it right after SIGTERM. A signal that is ignored, as SIGHUP is under nohup, stays so.
    Only the main thread receives signals."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self.signal_name: str | None = None
        """Name of the signal that came."""
        # torchrun repeats a signal that the whole process group has got already, and kills what takes too long.
        self._patient, self._first = "TORCHELASTIC_RUN_ID" in os.environ, rank() == 0
        self._before: dict[int, Any] = {}
        self._terminals: list[int] = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            heeded = [n for n in self.SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self._terminals = [fd for fd in (1, 2) if os.isatty(fd)]
            self._before = {number: signal.signal(number, self._remember) for number in heeded}
        return self

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        answered, self.signal_name = self.signal_name is not None, signal.Signals(number).name
        if not answered:
            again = "" if self._patient or number == signal.SIGHUP else "; a second one stops at once"
            self._announce(f"{self.signal_name} received", again)
        if number == signal.SIGHUP:
            with Path(os.devnull).open("wb") as nowhere:
                for fd in self._terminals:  # a line for a terminal that is gone would be an error
                    os.dup2(nowhere.fileno(), fd)
        elif not self._patient:
            self._restore(but=signal.SIGHUP)

    def _announce(self, why: str, again: str = "") -> None:
        if self._first:
            # Not print, which a signal's handler may have interrupted.
            with suppress(OSError):
                os.write(2, f"{why}: saving, then stopping{again}\n".encode())

    def heard(self, echo: Echo) -> Echo:
        """`echo`, whose lines are lost once nobody reads them, as in `octfm … | head`. That counts as a signal, unless
        one came already: Ctrl-C ends the tee of `octfm … | tee` too."""

        def say(line: str) -> None:
            try:
                echo(line)
            except BrokenPipeError:
                if self.signal_name is None:
                    self.signal_name = signal.SIGPIPE.name
                    self._announce("the output is read no further")

        return say

    def leave(self, what: str) -> None:
        """Raise Preempted after a signal, during work that precedes the first step and is repeated from its start."""
        if self.signal_name is not None:
            raise Preempted(f"{self.signal_name}: stopped while {what}; run again to start over with that")

    def _restore(self, but: int | None = None) -> None:
        for number in set(self._before) - {but}:
            # A signal that comes in between restores the others.
            if (handler := self._before.pop(number, None)) is not None:
                signal.signal(number, handler)
