"""Run folders of pretraining: which settings may change, which checkpoints are kept, loaded and returned to."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from octfm.errors import CheckpointError, Echo
from octfm.io.location import Location
from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.run_state import RunState
from octfm.pretraining.settings import MAY_CHANGE, PretrainConfig, stored_config
from octfm.run import checkpoint, checkpoint_files
from octfm.run.bucket import local_run
from octfm.run.checkpoint_writer import Retention
from octfm.run.folder import Kind, RunFolder
from octfm.weights.exported import is_export, read_export


def _parse(settings: dict[str, Any], like: PretrainConfig | None) -> PretrainConfig:
    return stored_config(settings, type(like.objective) if like is not None else None)


# Other initial weights would change nothing after a checkpoint, but the run's pages would name them.
PRETRAINING = Kind("pretrain", frozenset(MAY_CHANGE), _parse, own_key=True, never_change=frozenset({"model.init"}))


def read_content(where: Location, echo: Echo | None = None) -> tuple[Location, dict[str, Any]]:
    """The newest checkpoint of a run, a checkpoint file or an export, and its verified content. `echo`: see
    `load_newest`. Raises CheckpointError as `load_newest` and `read_export`, and for a run of `octfm segment`."""
    if is_export(where):
        return where, read_export(where)
    # A bucket has every checkpoint of its run.
    path, content = load_newest(local_run(where), echo if isinstance(where, Path) else None)
    if "decoder" in content["config"]:
        raise CheckpointError(
            f"{where}: a run of octfm segment, which octfm segment FILE --apply RUN uses, and octfm.load_segmenter in "
            "Python; expected one of octfm pretrain or finetune, or an export"
        )
    return path, content


def frozen_weights(content: dict[str, Any], settings: PretrainConfig) -> dict[str, Tensor]:
    """The weights of the encoder that `objective.frozen` names, in the content of a pretraining checkpoint or of an
    export with these settings; objectives without a teacher have only one."""
    if "network" in content:
        return content["network"]
    model = content["model"]
    has_teacher = any(name.startswith("target_encoder.") for name in model)
    return part_of(model, "target_encoder." if has_teacher and settings.objective.frozen == "target" else "encoder.")


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def load_newest(run: Path, echo: Echo | None = None) -> tuple[Path, dict[str, Any]]:
    """The last checkpoint of a run folder, which must be that run's own, or this checkpoint file; and its content.
    `echo` gets a line if newer ones may lie on a disk that is not there. Raises CheckpointError if there is none, or if
    it is damaged or of another run."""
    if echo is not None:
        _say_if_missing(checkpoint_files.second_destination(run), echo)
    path = checkpoint.newest(run)
    while True:
        try:
            content = checkpoint.load(path)
            break
        except (FileNotFoundError, checkpoint.DamagedCheckpoint):
            # While the run goes on it may have deleted this one, since there are newer ones or it has rolled back.
            if (now := checkpoint.newest(run)) == path:
                raise
            path = now
    if path != run and (run / "run.json").is_file():
        folder = RunFolder(run, PRETRAINING)
        if folder.record.get("kind", PRETRAINING.name) == PRETRAINING.name:
            folder.require_own(path, content)
    return path, content


def _say_if_missing(folder: Path | None, echo: Echo) -> None:
    if folder is not None and not folder.is_dir():
        echo(f"{folder} is not there; is its disk mounted? Newer checkpoints of this run may be on it")


def healthy_before(run: RunFolder, step: int, config: HealthConfig) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole and healthy checkpoint of `step` updates or fewer."""
    for path in reversed(checkpoint_files.everywhere(run.path)):
        if checkpoint_files.step_of(path) > step:
            continue
        try:
            content = checkpoint.load(path)
        except checkpoint.DamagedCheckpoint:
            continue
        run.require_own(path, content)
        if _healthy(content, config):
            return path, content
    return None


def _healthy(content: dict[str, Any], config: HealthConfig) -> bool:
    return RunState.from_dict(content.get("state", {})).healthy(content["step"], config)


def retention(config: PretrainConfig, steps_per_epoch: float) -> Retention:
    """The config's keep_* settings in steps; the newest checkpoint that a rollback may return to is always kept."""

    def may_return_to(path: Path) -> bool:
        content = checkpoint.header(path)
        return content is not None and "step" in content and _healthy(content, config.health)

    intervals = [config.keep_every_steps, config.keep_every_epochs and config.keep_every_epochs * steps_per_epoch]
    return Retention(
        config.keep_checkpoints, tuple(float(interval) for interval in intervals if interval), may_return_to
    )


def second_destination(config: PretrainConfig, run: RunFolder, echo: Echo) -> dict[str, str]:
    """Make this run's own folder in `ckpt_second_dir`; returns the entry of run.json that names it, empty if none is
    set. From that entry the next start notices a disk that is not mounted, whatever the settings name by then. Raises
    CheckpointError if checkpoints of the run lie in another second folder, where the next start would not look."""
    before = checkpoint_files.second_destination(run.path)
    _say_if_missing(before, echo)
    if config.ckpt_second_dir is None:
        return {}
    folder = Path(config.ckpt_second_dir).resolve() / f"{run.path.resolve().name}-{run.key[:8]}"
    if before is not None and before != folder and checkpoint_files.steps(before):
        raise CheckpointError(
            f"{run.path}: checkpoints of this run lie in {before}, and with ckpt_second_dir {config.ckpt_second_dir} "
            f"and the name of the run's folder they would be looked for in {folder}; move them there, and run again"
        )
    if before != folder:
        with suppress(OSError):  # reported when a checkpoint needs it
            folder.mkdir(parents=True, exist_ok=True)
    return {"second_destination": str(folder)}
