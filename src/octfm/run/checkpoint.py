"""Checkpoints: a file each, or a folder of shards; renamed when complete, with checksums that reveal damage."""

import errno
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octfm.catalog.participants.ids import person_key
from octfm.errors import CheckpointError
from octfm.io.hashing import keyed_hash
from octfm.io.location import replacing
from octfm.run import checkpoint_files, shards, weights_file
from octfm.run.checkpoint_files import is_name, name_of

FORMAT, VERSION = shards.FORMAT, 3
"""Version 2 added `state` (RunState) and `checksum`; version 1 is still read. Version 3, written only where a run or
a fine-tuning began with weights that were trained on people, has these participants (`before`), whom an older octfm
would overlook."""
CONTENT = {"version", "step", "model", "optimizer", "config", "preprocessing", "fingerprint", "participants"}
ADDED = {1: set(), 2: {"state", "checksum"}, 3: {"state", "checksum"}}
EXPECTED = "expected a run's folder, a file step-XXXXXXXX.pt of its checkpoints, or the folder that octfm export wrote"


DAMAGE = (shards.DamagedShards, *weights_file.DAMAGE)
"""Errors that torch and pickle raise for bytes that are no checkpoint."""


class DamagedCheckpoint(CheckpointError):
    """Not what was written: cut off, changed, or no checkpoint at all. The one before it may be intact."""


def write(folder: Path, step: int, content: dict[str, Any]) -> Path:
    """Write `step-XXXXXXXX.pt` after `step` updates. Raises OSError, leaving nothing, if the disk does not take it."""
    path = folder / name_of(step)
    whole = {"format": FORMAT, "version": shards.version_of(content), "step": step, **content}
    whole["checksum"] = checksum(whole)
    with replacing(path) as partial:
        weights_file.write_torch(partial, whole)
    return path


def load(path: Path) -> dict[str, Any]:
    """The content given to `write`, verified. Tensors and plain values only: code in a checkpoint never runs.

    Raises DamagedCheckpoint if it is not what was written, CheckpointError if a newer octfm wrote it."""
    if path.suffix == ".safetensors":  # which torch would hand to another reader
        raise DamagedCheckpoint(f"{path}: not an octfm checkpoint; {EXPECTED}")
    try:
        content = shards.load(path) if path.is_dir() else weights_file.read_torch(path)
    except (*DAMAGE, OSError) as error:
        # In a small file that was cut off, torch looks for the end before the beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise DamagedCheckpoint(
            f"{path}: damaged or not a checkpoint ({weights_file.reason(error)}); delete it to continue from the one "
            "before it, or restore it from a copy"
            # Never advise to delete a file that octfm did not write.
            if is_name(path.name) or path.suffix.startswith(".damaged")  # as `set_aside` names them
            else f"{path}: damaged or not a checkpoint ({type(error).__name__}); {EXPECTED}"
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedCheckpoint(f"{path}: not an octfm checkpoint; {EXPECTED}")
    version = content.get("version", 0)
    if version > VERSION:
        raise CheckpointError(f"{path}: checkpoint version {version}, this octfm reads up to {VERSION}; upgrade octfm")
    if missing := (CONTENT | ADDED.get(version, set())) - content.keys():
        raise DamagedCheckpoint(f"{path}: incomplete, it lacks {', '.join(sorted(missing))}; restore it from a copy")
    # Shards have a checksum for each file, which `shards.load` has compared.
    if version > 1 and not path.is_dir() and content["checksum"] != (found := checksum(content)):
        raise DamagedCheckpoint(
            f"{path}: damaged, its checksum is {found[:12]} and should be {content['checksum'][:12]}; "
            "delete it to continue from the one before it, or restore it from a copy"
        )
    return content


def header(path: Path) -> dict[str, Any] | None:
    """A checkpoint's content, memory-mapped and not verified, to identify it; None if it is too damaged."""
    try:
        if path.is_dir():
            content = shards.load_rest(path)
        else:
            content = weights_file.read_torch(path, mmap=True)
    except (*DAMAGE, OSError):
        return None
    return content if isinstance(content, dict) and content.get("format") == FORMAT else None


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of names, types, shapes and bytes of everything but the checksum itself; torch verifies none of these."""
    digest = hashlib.sha256()
    _feed(digest, {name: value for name, value in content.items() if name != "checksum"})
    return digest.hexdigest()


def snapshot(value: Any) -> Any:
    """A copy on the host, which later updates do not change."""
    if isinstance(value, Tensor):
        # Without copy=True, `to` would return the tensor itself on a CPU.
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: snapshot(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(item) for item in value)
    return value


def newest(run: Path) -> Path:
    """The last checkpoint of a run folder, or `run` itself if it is a checkpoint. CheckpointError if there is none."""
    if run.is_file() or run.suffix == shards.SUFFIX:
        return run
    found = checkpoint_files.newest(run)
    if found is None:
        raise CheckpointError(
            f"{run}: no checkpoint found in {run / 'checkpoints'}; expected a run folder or a .pt file"
        )
    return found


def participant_hashes(participants: list[str], key: str) -> list[str]:
    """Keyed hashes of people, which are those of all spellings of their ids; sorted."""
    return sorted({keyed_hash(person_key(participant), key) for participant in participants})


def possible_hashes(participants: Iterable[str], key: str) -> set[str]:
    """Those of `participant_hashes`, and those of ids as they are spelt, which checkpoints of earlier versions hold."""
    return {keyed_hash(text, key) for participant in participants for text in (person_key(participant), participant)}


def parts_of(participants: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """`key` and `hashes` of a run's own people, then those of every run whose weights came before: that of
    model.init, or of the encoder that is fine-tuned."""
    return [participants, *participants.get("before", ())]


def hashes_of(part: Mapping[str, Any]) -> dict[str, Any]:
    """`key` and `hashes` of a part and, where the key is kept elsewhere, the `key_check` to know it by."""
    kept = ("key", "hashes") if part.get("key") else ("key", "hashes", "key_check")
    return {name: part[name] for name in kept if name in part}


def keys_are_known(participants: Mapping[str, Any]) -> bool:
    """Whether everybody in `parts_of` can be recognised; not without a key that is kept elsewhere."""
    return all(part["key"] is not None for part in parts_of(participants) if part["hashes"])


def recogniser(participants: Mapping[str, Any]) -> Callable[[str], bool]:
    """A function that tells whether a participant, under this or another spelling of the id, is among those of a run
    or of a run before it."""
    parts = [(set(part["hashes"]), part["key"]) for part in parts_of(participants) if part["hashes"]]

    def is_known(participant: str) -> bool:
        return any(not hashes.isdisjoint(possible_hashes([participant], key)) for hashes, key in parts)

    return is_known


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        # As bytes, because numpy has no bfloat16.
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        # In order of insertion, which torch.save keeps.
        for name, item in value.items():
            digest.update(repr(name).encode())
            _feed(digest, item)
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(repr(value).encode())
