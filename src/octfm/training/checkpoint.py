"""Checkpoints: written beside and renamed, so that a killed process leaves the old one or the new one, never half of one."""

import hashlib
import hmac
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from octfm.errors import CheckpointError

FORMAT, VERSION = "octfm-checkpoint", 1
CONTENT = {"version", "step", "model", "optimizer", "config", "preprocessing", "fingerprint", "participants"}


def save(folder: Path, step: int, content: dict[str, Any], keep: int) -> Path:
    """Write `step-XXXXXXXX.pt` after `step` updates, then delete all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save({"format": FORMAT, "version": VERSION, "step": step, **content}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the rename itself must survive a power cut
    finally:
        os.close(descriptor)
    for old in steps(folder)[:-keep]:
        old.unlink()
    return path


def steps(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first."""
    return sorted(folder.glob("step-*.pt"))


def load(path: Path) -> dict[str, Any]:
    """Everything `save` was given. Tensors and plain values only: no code in a checkpoint is ever run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, zipfile.BadZipFile, pickle.UnpicklingError, ValueError, LookupError, AttributeError) as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise CheckpointError(
            f"{path}: damaged or not a checkpoint ({reason}); delete it to continue from the one before it, or restore it from a copy"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not an octfm checkpoint; expected format {FORMAT}")
    if content.get("version", 0) > VERSION:
        raise CheckpointError(f"{path}: checkpoint version {content['version']}, this octfm reads up to {VERSION}; upgrade octfm")
    if missing := CONTENT - content.keys():
        raise CheckpointError(f"{path}: incomplete, it lacks {', '.join(sorted(missing))}; restore it from a copy")
    return content


def newest(run: Path) -> Path:
    """The last checkpoint of a run folder; a checkpoint file is its own answer."""
    if run.is_file():
        return run
    found = steps(run / "checkpoints")
    if not found:
        raise CheckpointError(f"{run}: no checkpoint found in {run / 'checkpoints'}; expected a run folder or a .pt file")
    return found[-1]


def participant_hashes(participants: list[str], key: str) -> list[str]:
    """Keyed hashes (HMAC-SHA256) of participant ids: membership can be tested, ids cannot be read off."""
    return sorted(hmac.new(key.encode(), p.encode(), hashlib.sha256).hexdigest() for p in set(participants))
