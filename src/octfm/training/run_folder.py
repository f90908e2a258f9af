"""A run's folder: started once, resumed by the same command, refused when it holds something else; never overwritten."""

import json
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octfm.config import dump, load
from octfm.errors import CheckpointError
from octfm.training import checkpoint
from octfm.training.settings import PretrainConfig, differences

FORMAT, VERSION = "octfm-run", 1


@dataclass(frozen=True)
class RunFolder:
    """config.yaml, run.json, metrics.jsonl, checkpoints/."""

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
            return json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: missing or damaged ({error}); restore it from a copy, or choose another --out") from None

    def last_checkpoint(self) -> Path | None:
        found = checkpoint.steps(self.checkpoints)
        return found[-1] if found else None

    def write_record(self, **facts: Any) -> None:
        """Add facts to run.json, atomically."""
        path = self.path / "run.json"
        known = json.loads(path.read_text()) if path.exists() else {"format": FORMAT, "version": VERSION}
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(known | facts, indent=2))
        partial.replace(path)


def claim(out: str | Path, config: PretrainConfig, fingerprint: str, data: str) -> RunFolder:
    """The folder of this run: new, or one that the same config began on the same training volumes.

    `fingerprint` is the Preprocessing's; `data` identifies the training volumes, their order and their voxels.
    """
    run = RunFolder(Path(out))
    settings = run.path / "config.yaml"
    if settings.is_file():
        if changed := differences(config, load(PretrainConfig, settings)):
            raise CheckpointError(
                f"{run.path}: this run began with other values of {', '.join(changed)}; restore them to resume, or choose another --out"
            )
        if run.record.get("fingerprint") != fingerprint:
            raise CheckpointError(f"{run.path}: this run began on a store with another Preprocessing; choose another --out")
        if run.record.get("data") != data:
            raise CheckpointError(
                f"{run.path}: the training volumes of the store are not those it began on (added, removed, prepared again or split anew), "
                "so it would not be the same run and its list of participants would be wrong; choose another --out (F18)"
            )
        return run
    # A kill between the two first files leaves run.json alone: that run has not begun yet.
    if run.path.exists() and (
        not run.path.is_dir() or {p.name for p in run.path.iterdir()} - {"run.json", "run.partial", "config.partial"}
    ):
        raise CheckpointError(f"{run.path}: exists and is not a run folder (no config.yaml); choose another --out")
    run.path.mkdir(parents=True, exist_ok=True)
    run.write_record(
        command="octfm " + " ".join(sys.argv[1:]),
        started=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        fingerprint=fingerprint,
        data=data,
        participant_key=secrets.token_hex(16),
        git=git_state(),
    )
    partial = settings.with_suffix(".partial")
    partial.write_text(dump(config))
    partial.replace(settings)
    return run


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
