"""Write checkpoints in a thread, from a copy on the host; delete old ones; use another disk if one is full."""

import json
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octfm.io.location import from_json, write_whole
from octfm.run import checkpoint, checkpoint_files
from octfm.run.bucket import BucketRun
from octfm.run.checkpoint_files import delete, left_over

BEST = "best.json"
Write = Callable[[Path, int, dict[str, Any]], Path]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints are kept: the last `last`, the first in every interval, the best, and one to roll back to."""

    last: int
    intervals: tuple[float, ...] = ()
    """Intervals in steps; of each interval after the first, the earliest checkpoint is kept for good."""
    may_return_to: Callable[[Path], bool] = lambda path: False
    """Whether a rollback may return to a checkpoint. The last such one is kept, however many follow it."""

    def surplus(self, found: Sequence[Path], needed: Collection[int | None]) -> list[Path]:
        """Those of `found` (all checkpoints, oldest first) that may be deleted; never one whose step is in `needed`."""
        kept = set(found[-self.last :])
        for interval in self.intervals:
            first: dict[int, Path] = {}
            for path in found:
                first.setdefault(int(checkpoint_files.step_of(path) // interval), path)
            kept |= {path for number, path in first.items() if number > 0}
        return [path for path in found if path not in kept and checkpoint_files.step_of(path) not in needed]


def keep_best(folder: Path, step: int) -> None:
    """Name the checkpoint after `step` updates the best so far; it is kept until another one is named."""
    _name_best(folder, [*(best for best in _best_steps(folder) if best < step), step])


def best_step(folder: Path) -> int | None:
    """The step that `keep_best` named last."""
    return next(reversed(_best_steps(folder)), None)


def _best_steps(folder: Path) -> list[int]:
    """The steps that were named the best, in order; the last one is the best now."""
    try:
        named = from_json((folder / BEST).read_text("utf-8"))
        return [int(step) for step in (*named.get("before", ()), named["step"])]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or damaged
        return []


def _name_best(folder: Path, steps: Sequence[int]) -> None:
    named = {"step": steps[-1], "before": list(steps[:-1])} if steps else {}
    write_whole(folder / BEST, json.dumps(named).encode())


@dataclass(frozen=True)
class Failure:
    """Something that went wrong while a checkpoint was written, named, deleted or sent."""

    step: int
    """Updates in the checkpoint; 0 if it is not about one."""
    sentence: str
    lost: bool
    """Whether the checkpoint was written nowhere or, in a run in a bucket, was not sent there."""


class CheckpointWriter:
    """Writes into the first of `places` that takes a checkpoint, in a thread, one at a time. A failure never stops
    training: `failures` reports it, and earlier checkpoints stay as they are."""

    def __init__(
        self, places: Sequence[Path], retention: Retention, write: Write | None = None, *, tidies: bool = True
    ):
        """`write` replaces checkpoint.write; `tidies` is false if another process deletes what is not kept."""
        self.places, self.retention, self._write_into, self._tidies = tuple(places), retention, write, tidies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octfm-checkpoint")
        self._in_flight: Future | None = None
        self._failures: list[Failure] = []
        self._unnamed: int | None = None
        """Updates before a best checkpoint whose name could not be written."""
        self.remote: BucketRun | None = None
        """The bucket that each checkpoint is sent to once it is written."""
        for place in self.places if tidies else ():
            for partial in left_over(place):
                delete(partial)

    def save(self, step: int, content: dict[str, Any], *, best: bool = False) -> None:
        """Copy `content` to the host and write it in the background; waits for a checkpoint that is still being
        written. `best`: name it the best so far, once it is written."""
        self.wait()
        if self.remote is not None:
            # Two machines must not write into one bucket: stop if another has taken the run over.
            self.remote.require()
        # Here and not in the thread: the next update changes these tensors in place.
        copy = checkpoint.snapshot(content)
        self._in_flight = self._thread.submit(self._write, step, copy, best)

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._in_flight is not None:
            self._in_flight.result()  # raises only for a bug: what the disk refuses becomes a Failure
            self._in_flight = None

    def failures(self) -> list[Failure]:
        """Failures since the last call."""
        found, self._failures = self._failures, []
        if self.remote is not None:
            found += [Failure(step, sentence, lost=False) for step, sentence in self.remote.failures()]
        return found

    def follow(self, remote: BucketRun) -> None:
        """Send every checkpoint to a bucket as well, where the same retention applies. Raises BucketError."""
        self.remote = remote
        # Before anything is deleted there: the last one to roll back to is looked for in the folder.
        remote.fetch_back_to(self.retention.may_return_to)
        remote.keep(lambda found: self.retention.surplus(found, self._needed()))

    def finish(self) -> None:
        """Wait until the last checkpoint is written and sent; one that is not sent becomes a failure."""
        self.wait()
        if self.remote is not None and not self.remote.flush():
            for name in self.remote.waiting():
                sentence = f"checkpoint {name} is in {self.remote.path / 'checkpoints'} and not in {self.remote.where}"
                self._failures.append(Failure(checkpoint_files.step_of(Path(name)), sentence, lost=True))

    def forget_after(self, step: int) -> None:
        """Delete checkpoints after `step`: training went back to it."""
        self.wait()
        for place in self.places if self._tidies else ():
            for path in checkpoint_files.steps(place):
                if checkpoint_files.step_of(path) > step:
                    delete(path)
        self.forget_best_after(step)
        if self.remote is not None:
            self.remote.forget_after(step)

    def forget_best_after(self, step: int) -> None:
        """Name the checkpoint that was the best up to `step` the best again: training goes on from `step`."""
        self._unnamed = self._unnamed if self._unnamed is not None and self._unnamed <= step else None
        named = _best_steps(self.places[0]) if self._tidies and self.places else []
        if not named or named[-1] <= step:
            return
        try:
            _name_best(self.places[0], [best for best in named if best <= step])
        except OSError as error:
            reason = f"{self.places[0] / BEST} still names a best checkpoint after step {step}, which is gone"
            self._failures.append(Failure(step, f"{reason}: {error.strerror or error}", lost=False))

    def close(self) -> None:
        """Finish what is being written."""
        self._thread.shutdown(wait=True)

    def _write(self, step: int, content: dict[str, Any], best: bool) -> None:
        for place in self.places:
            try:
                written = (self._write_into or checkpoint.write)(place, step, content)
            except OSError as error:
                self._failures.append(self._explain(step, place, error))
                continue
            if self.remote is not None:
                self._offer(step, written, self.remote)
            if self._tidies:
                self._tidy(place, step if best else None)
            return

    def _offer(self, step: int, written: Path, remote: BucketRun) -> None:
        try:
            remote.offer(written)
        except OSError as error:
            reason = f"checkpoint {written} is whole, but {remote.path} has no copy to send to {remote.where}"
            remedy = "training goes on; free some space for the next one"
            self._failures.append(Failure(step, f"{reason}: {error.strerror or error}; {remedy}", lost=True))

    def _tidy(self, place: Path, best: int | None) -> None:
        try:
            # Not before it is written: a checkpoint that the disk refused must not replace the best one.
            if best is not None:
                self._unnamed = best
                keep_best(self.places[0], best)
                self._unnamed = None
        except OSError as error:
            reason = f"the best checkpoint, after step {best}, is unnamed in {self.places[0] / BEST}"
            self._failures.append(Failure(0, f"{reason}: {error.strerror or error}", lost=False))
        try:
            for path in self.retention.surplus(checkpoint_files.steps(place), self._needed()):
                delete(path)
        except OSError as error:
            reason = f"old checkpoints in {place} were not deleted"
            self._failures.append(Failure(0, f"{reason}: {error.strerror or error}", lost=False))

    def _needed(self) -> set[int | None]:
        """Updates before the best checkpoint, named or not, and before the last one to roll back to."""
        newest_first = sorted(self._written(), key=checkpoint_files.step_of, reverse=True)
        safe = next((path for path in newest_first if self.retention.may_return_to(path)), None)
        return {best_step(self.places[0]), self._unnamed, checkpoint_files.step_of(safe) if safe else None}

    def _written(self) -> list[Path]:
        return [path for folder in self.places for path in checkpoint_files.steps(folder)]

    def _explain(self, step: int, place: Path, error: OSError) -> Failure:
        last, remedy = place == self.places[-1], f"trying {self.places[-1]}"
        if last:
            remedy = "training goes on; free some space, or name another disk in ckpt_second_dir"
        before = max(
            (p for p in self._written() if checkpoint_files.step_of(p) < step),
            key=checkpoint_files.step_of,
            default=None,
        )
        intact = f"the one before it, {before}, is intact" if before else "there is none before it"
        reason = f"checkpoint after step {step} was not written to {place}: {error.strerror or error}"
        return Failure(step, f"{reason}; {intact}; {remedy}", last)
