"""Where a run goes on: at its newest checkpoint that is whole, or at an earlier one that is healthy."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from octfm.pretraining.learner import Learner
from octfm.pretraining.run_folder import RunFolder
from octfm.pretraining.run_state import RunState
from octfm.run import checkpoint
from octfm.run.checkpoint_files import set_aside, strangers

Echo = Callable[[str], None]


def resume(run: RunFolder, learner: Learner, echo: Echo) -> None:
    """Restore the newest checkpoint in place, on all ranks; a damaged one is set aside with a warning and the one before it taken.

    With none there the learner stays at its first step. Anything else that is wrong stops (F18): no error is swallowed, and a run
    that has checkpoints never starts anew because none of them can be read. Rank 0 chooses and reads.
    """
    content: dict[str, Any] | None = None

    def choose() -> Path | None:
        nonlocal content
        found = _newest_whole(run, echo)
        if found is None:
            return None
        path, content = found
        return path

    path = learner.runtime.first(choose)
    if path is not None:
        learner.restore(content, path)
        echo(f"resuming {run.path} after {learner.step} updates")


def _newest_whole(run: RunFolder, echo: Echo) -> tuple[Path, dict[str, Any]] | None:
    for folder in run.destinations:
        if names := strangers(folder):
            echo(
                f"warning: {folder}: left alone, for no checkpoint of a run has such a name: {', '.join(names[:5])}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            )
    # All of them, the older ones too: a rollback may return to one, and retention deletes them.
    for path in checkpoint.everywhere(run.path):
        content = checkpoint.header(path)
        if content is not None and {"participants", "step"} <= content.keys():
            run.require_own(path, content)
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
            aside = set_aside(bad)
            echo(f"warning: {bad} is damaged and was set aside as {aside.name}; going back to {path}")
        return path, content
    if first_problem is not None:
        raise first_problem
    return None


def healthy_before(run: RunFolder, step: int) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole and healthy checkpoint of `step` updates or fewer."""
    for path in reversed(checkpoint.everywhere(run.path)):
        if checkpoint.step_of(path) > step:
            continue
        try:
            content = checkpoint.load(path)
        except checkpoint.DamagedCheckpoint:
            continue
        run.require_own(path, content)
        if RunState.from_dict(content.get("state", {})).healthy:
            return path, content
    return None
