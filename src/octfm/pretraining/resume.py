"""Run folders of pretraining: which settings may change, and which of their checkpoints to load or to return to."""

from pathlib import Path
from typing import Any

from octfm.pretraining.run_state import RunState
from octfm.pretraining.settings import MAY_CHANGE, PretrainConfig, stored_config
from octfm.run import checkpoint
from octfm.run.folder import Kind, RunFolder


def _parse(settings: dict[str, Any], like: PretrainConfig | None) -> PretrainConfig:
    return stored_config(settings, type(like.objective) if like is not None else None)


PRETRAINING = Kind("pretrain", frozenset(MAY_CHANGE), _parse, own_key=True)


def load_newest(run: Path) -> tuple[Path, dict[str, Any]]:
    """The last checkpoint of a run folder, which must be that run's own, or the checkpoint file itself; and its
    content."""
    path = checkpoint.newest(run)
    content = checkpoint.load(path)
    if path != run and (run / "run.json").is_file():
        folder = RunFolder(run, PRETRAINING)
        if folder.record.get("kind", PRETRAINING.name) == PRETRAINING.name:
            folder.require_own(path, content)
    return path, content


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
