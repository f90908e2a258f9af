"""Where a run goes on: at its newest checkpoint that is whole, or at an earlier one that is healthy."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octfm.training import checkpoint
from octfm.training.learner import Learner
from octfm.training.run_folder import RunFolder
from octfm.training.run_state import RunState

Echo = Callable[[str], None]


def resume(run: RunFolder, learner: Learner, echo: Echo) -> None:
    """Restore the newest checkpoint in place; a damaged one is set aside with a warning and the one before it taken.

    With none there the learner stays at its first step. Anything else that is wrong stops (F18): no error is swallowed, and a run
    that has checkpoints never starts anew because none of them can be read.
    """
    first_problem: checkpoint.DamagedCheckpoint | None = None
    damaged: list[Path] = []
    for path in reversed(checkpoint.everywhere(run.path)):
        try:
            content = checkpoint.load(path)
        except checkpoint.DamagedCheckpoint as error:
            first_problem = first_problem or error
            damaged.append(path)
            continue
        for bad in damaged:
            aside = bad.replace(bad.with_suffix(".damaged"))
            echo(f"warning: {bad} is damaged and was set aside as {aside.name}; going back to {path}")
        learner.restore(content, path)
        echo(f"resuming {run.path} after {learner.step} updates")
        return
    if first_problem is not None:
        raise first_problem


def healthy_before(run: RunFolder, step: int) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Whole and healthy checkpoints of `step` updates or fewer, newest first."""
    for path in reversed(checkpoint.everywhere(run.path)):
        if checkpoint.step_of(path) > step:
            continue
        try:
            content = checkpoint.load(path)
        except checkpoint.DamagedCheckpoint:
            continue
        if RunState.from_dict(content.get("state", {})).healthy:
            yield path, content
