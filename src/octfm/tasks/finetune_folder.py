"""The folder of a fine-tuning run: one process (or rank 0) writes into it, and its one checkpoint holds the last and the best state."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from octfm.config import dump, load
from octfm.encoder.encoder import Encoder, participants_of
from octfm.encoder.tuned import Answer
from octfm.errors import CheckpointError, ConfigError
from octfm.io.location import write_whole
from octfm.pretraining.run_folder import LOCK, has_only, locked
from octfm.run import checkpoint
from octfm.run.checkpoint_files import delete
from octfm.run.runtime import Runtime
from octfm.store.store import Store
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.task_model import TaskModel
from octfm.version import __version__

MAY_CHANGE = {"runtime", "max_cache_gb"}
"""Settings that a resumed run may change without ceasing to be the same run."""


@contextmanager
def claim_together(runtime: Runtime, out: Path, config: FinetuneConfig, echo: Callable[[str], None]) -> Iterator[None]:
    """The folder, locked by rank 0 while the context lasts: new, or one that was begun with the same settings."""
    with ExitStack() as held:
        runtime.first(lambda: _claim(held, out, config, echo))
        yield


def _claim(held: ExitStack, out: Path, config: FinetuneConfig, echo: Callable[[str], None]) -> None:
    settings = out / "config.yaml"
    if out.exists() and not settings.is_file() and not has_only(out, {LOCK}):
        raise CheckpointError(f"{out}: exists and is not a fine-tuning run (no config.yaml); choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(out, echo))
    if settings.is_file():
        before = load(FinetuneConfig, settings).model_dump(mode="json")
        now = config.model_dump(mode="json")
        if changed := [key for key in now if before[key] != now[key] and key not in MAY_CHANGE]:
            raise CheckpointError(
                f"{out}: this run began with other values of {', '.join(changed)}; restore them, or choose another --out"
            )
        return
    write_whole(settings, dump(config).encode())


def newest(out: Path, config: FinetuneConfig, store: Store) -> dict[str, Any] | None:
    """The checkpoint to go on from; None in a run that has none yet. CheckpointError where one of another run is among them."""
    found = checkpoint.steps(out / "checkpoints")
    for path in found:
        content = checkpoint.header(path)
        if content is not None and not _is_of(content, config, store):
            raise CheckpointError(
                f"{path}: a checkpoint of another run (other settings, encoder or Preprocessing); move it out of this folder and run again"
            )
    return checkpoint.load(found[-1]) if found else None


def _is_of(content: dict[str, Any], config: FinetuneConfig, store: Store) -> bool:
    try:
        before = load(FinetuneConfig, content["config"]).model_dump(mode="json")
    except (ConfigError, LookupError):
        return False
    now = config.model_dump(mode="json")
    key = content["participants"]["key"]
    return (
        all(before[name] == now[name] for name in now if name not in MAY_CHANGE)
        and content["fingerprint"] == store.fingerprint
        and key == _key(config)
    )


def _key(config: FinetuneConfig) -> str:
    """Of the hashes of participants: that of the encoder's run."""
    known = "" if config.from_scratch else participants_of(str(config.encoder))["key"]
    return known or "octfm-finetune"


def save(
    out: Path,
    step: int,
    model: TaskModel,
    best: dict[str, Any] | None,
    stale: int,
    encoder: Encoder,
    store: Store,
    trained_on: list[str],
    answer: Answer,
) -> None:
    """One checkpoint with the last and the best state; it knows whom the encoder and the head were trained on."""
    config = model.config
    known = {"key": "", "hashes": []}
    if not config.from_scratch:
        known = participants_of(str(config.encoder))
    key = _key(config)
    trained = checkpoint.participant_hashes(trained_on, key)
    content = {
        "model": model.module.state_dict(),
        "optimizer": model.optimizer.state_dict(),
        "state": {"best": best, "stale": stale},
        "config": config.model_dump(mode="json"),
        "encoder_config": encoder.config.model_dump(mode="json"),
        "answer": answer.to_dict(),
        "preprocessing": store.preprocessing.model_dump(mode="json"),
        "fingerprint": store.fingerprint,
        "participants": {"key": key, "hashes": sorted({*known["hashes"], *trained})},
        "octfm": __version__,
    }
    written = checkpoint.write(out / "checkpoints", step, content)
    for old in checkpoint.steps(out / "checkpoints"):
        if old != written:
            delete(old)
