"""A run's folder: started once, resumed by the same command, refused when it holds something else; never overwritten."""

import fcntl
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octfm.config import dump, load
from octfm.errors import CheckpointError, ConfigError
from octfm.io.location import write_whole
from octfm.pretraining.settings import PretrainConfig, differences, stored_config
from octfm.run import checkpoint
from octfm.run.runtime import Runtime

FORMAT, VERSION = "octfm-run", 1
LOCK = "run.lock"


@dataclass(frozen=True)
class RunFolder:
    """config.yaml, run.json, metrics.jsonl, checkpoints/, run.lock; memory.json where memory ran out between checkpoints."""

    path: Path

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def record(self) -> dict[str, Any]:
        """run.json: what was run, on what, with which code."""
        path = self.path / "run.json"
        try:
            facts = json.loads(path.read_text())
            if not isinstance(facts, dict) or not isinstance(facts.get("participant_key"), str):
                raise ValueError("it lacks participant_key")
            return facts
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: missing or damaged ({error}); restore it from a copy, or choose another --out"
            ) from None

    @property
    def key(self) -> str:
        """The secret of this run's keyed hashes."""
        return self.record["participant_key"]

    @property
    def destinations(self) -> list[Path]:
        """Where checkpoints go: the run folder, then, should its disk be full, the second destination."""
        second = checkpoint.second_destination(self.path)
        return [self.checkpoints, *([second] if second else [])]

    def last_checkpoint(self) -> Path | None:
        found = checkpoint.everywhere(self.path)
        return found[-1] if found else None

    def require_own(self, path: Path, content: dict[str, Any]) -> None:
        """Raises CheckpointError where a checkpoint is another run's: its participants' hashes have another key, or, for one of a version
        without a key, its settings or its Preprocessing are not this run's."""
        key = content["participants"].get("key")
        if content["step"] != checkpoint.step_of(path):
            raise CheckpointError(
                f"{path}: its name says {checkpoint.step_of(path)} updates and it holds {content['step']}; give it back its name, "
                f"{checkpoint.name_of(content['step'], path.suffix)}, or move it out of this folder"
            )
        if key == self.key or (not key and self._agrees_with(content)):
            return
        raise CheckpointError(
            f"{path}: a checkpoint of another run (its key and that in {self.path / 'run.json'} differ); move it out of this folder and "
            "run again, which goes on from this run's own last checkpoint; to begin a run with these weights, set model.init to the file"
        )

    def _agrees_with(self, content: dict[str, Any]) -> bool:
        try:
            before = stored_config(content["config"])
        except ConfigError:
            return False
        overridden = {key for entry in self.record.get("overrides", []) for key in entry["settings"]}
        changed = differences(before, load(PretrainConfig, self.path / "config.yaml")).keys()
        return content["fingerprint"] == self.record.get("fingerprint") and changed <= overridden

    def write_record(self, **facts: Any) -> None:
        """Add facts to run.json, atomically."""
        path = self.path / "run.json"
        known = self.record if path.exists() else {"format": FORMAT, "version": VERSION}
        write_whole(path, json.dumps(known | facts, indent=2).encode())

    def note_memory(self, micro_batch: int) -> None:
        """For the next start: memory suffices for so many volumes at a time. The one file that is not rank 0's alone to write."""
        write_whole(self.path / "memory.json", json.dumps({"micro_batch": micro_batch}).encode())

    def noted_memory(self) -> int | None:
        """What `note_memory` was told last; None where memory never ran out so."""
        try:
            return int(json.loads((self.path / "memory.json").read_text())["micro_batch"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{self.path / 'memory.json'}: damaged ({error}); delete it") from None


def load_newest(run: Path) -> tuple[Path, dict[str, Any]]:
    """The last checkpoint of a run folder, which must be that run's own; a checkpoint file is its own answer."""
    path = checkpoint.newest(run)
    content = checkpoint.load(path)
    if path != run and (run / "run.json").is_file():
        RunFolder(run).require_own(path, content)
    return path, content


@contextmanager
def claim_together(runtime: Runtime, out: str | Path, *arguments: Any, **options: Any) -> Iterator[RunFolder]:
    """`claim` by rank 0 for all ranks; the others may read the folder and never write into it."""
    with ExitStack() as held:

        def enter() -> None:
            held.enter_context(claim(out, *arguments, **options))

        runtime.first(enter)
        yield RunFolder(Path(out))


@contextmanager
def claim(
    out: str | Path,
    config: PretrainConfig,
    fingerprint: str,
    data: str,
    *,
    override: bool = False,
    echo: Callable[[str], None] = print,
) -> Iterator[RunFolder]:
    """The folder of this run, locked while the context lasts: new, or one that the same config began on the same training volumes.

    `fingerprint` is the Preprocessing's; `data` identifies the training volumes, their order and their voxels. With
    `override`, settings other than the run's are accepted and recorded in run.json.
    """
    run = RunFolder(Path(out))
    settings = run.path / "config.yaml"
    if run.path.exists() and not settings.is_file() and not has_only(run.path, {"run.json", LOCK}):
        raise CheckpointError(f"{run.path}: exists and is not a run folder (no config.yaml); choose another --out")
    run.path.mkdir(parents=True, exist_ok=True)
    with locked(run.path, echo):
        if settings.is_file():
            _continue(run, settings, config, fingerprint, data, override, echo)
        else:
            run.write_record(
                command="octfm " + " ".join(sys.argv[1:]),
                started=_now(),
                fingerprint=fingerprint,
                data=data,
                participant_key=secrets.token_hex(16),
                git=git_state(),
            )
            write_whole(settings, dump(config).encode())
        yield run


def _continue(
    run: RunFolder,
    settings: Path,
    config: PretrainConfig,
    fingerprint: str,
    data: str,
    override: bool,
    echo: Callable[[str], None],
) -> None:
    """Refuse what would make it another run, or record that the user wanted it so."""
    if run.record.get("fingerprint") != fingerprint:
        raise CheckpointError(f"{run.path}: this run began on a store with another Preprocessing; choose another --out")
    if run.record.get("data") != data:
        raise CheckpointError(
            f"{run.path}: the training volumes of the store are not those it began on (added, removed, prepared again or split anew), "
            "so it would not be the same run and its list of participants would be wrong; choose another --out (F18)"
        )
    changed = differences(config, load(PretrainConfig, settings))
    if not changed:
        return
    if not override:
        raise CheckpointError(
            f"{run.path}: this run began with other values of {', '.join(changed)}; restore them to resume, "
            "accept the change with --override, or choose another --out"
        )
    last = run.last_checkpoint()
    keys = {key: {"before": before, "now": now} for key, (now, before) in changed.items()}
    step = checkpoint.step_of(last) if last else 0
    run.write_record(
        overrides=[*run.record.get("overrides", []), {"time": _now(), "after_step": step, "settings": keys}]
    )
    write_whole(settings, dump(config).encode())
    for key, (now, before) in changed.items():
        echo(f"override: {key} is {now} from step {step} on; the run began with {before}")


def has_only(folder: Path, beginnings: set[str]) -> bool:
    """Whether a folder holds no more than a kill between a run's first files leaves there: that run has not begun yet."""
    return folder.is_dir() and all(p.name in beginnings or p.suffix == ".partial" for p in folder.iterdir())


@contextmanager
def locked(folder: Path, echo: Callable[[str], None]) -> Iterator[None]:
    """Held by one process at a time; the system takes it back from a process that dies, however it dies."""
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CheckpointError(
                f"{folder}: another process ({file.read().strip() or 'unknown'}) is training into this folder; "
                "wait for it, stop it, or choose another --out"
            ) from None
        except OSError as error:
            echo(
                f"{folder} cannot be locked on this file system ({error.strerror}): make sure that no other process trains into it"
            )
        for partial in folder.glob(".*.partial"):  # of a process that was killed while it wrote
            partial.unlink()
        file.truncate(0)
        file.write(f"pid {os.getpid()} since {_now()}\n")
        file.flush()
        yield


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def git_state() -> dict[str, Any]:
    """Commit of the source tree this package runs from; None outside a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", __file__) is None:
        return {"commit": None, "dirty": None}
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
