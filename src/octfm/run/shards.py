"""Sharded checkpoints (PyTorch DCP), for models that no rank holds whole; complete, or known to be damaged.

`step-XXXXXXXX.dcp/` holds one file of tensors per rank, DCP's index of them, everything else in rest.pt, and
manifest.json with the SHA-256 of each. It is written under another name and renamed when it is complete. Any number
of ranks can read it, a single one as well.
"""

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import EnumMeta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octfm.errors import CheckpointError, reason_of
from octfm.io.hashing import hash_file
from octfm.io.location import flush, from_json
from octfm.run.checkpoint_files import SHARDS as SUFFIX
from octfm.run.checkpoint_files import former_of, name_of
from octfm.run.runtime import Runtime
from octfm.run.weights_file import read_torch, write_torch
from octfm.threads import ignoring_warnings

REST, MANIFEST = "rest.pt", "manifest.json"
INDEX = ".metadata"
FORMAT = "octfm-checkpoint"
"""The same as in checkpoint.py: shards hold the same content."""


def version_of(content: Mapping[str, Any]) -> int:
    """The version that a checkpoint with this content is written as."""
    return 3 if content.get("participants", {}).get("before") else 2


class DamagedShards(Exception):
    """The folder is not what was written; `checkpoint.load` turns this into a DamagedCheckpoint."""


def write(folder: Path, step: int, content: dict[str, Any], *, runtime: Runtime) -> Path:
    """Write a sharded checkpoint, each rank in a thread. If one cannot, all raise OSError and nothing is left."""
    import torch.distributed.checkpoint as dcp

    path = folder / name_of(step, SUFFIX)
    partial, former = path.with_name(f"{path.name}.partial"), former_of(path)

    def prepare() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for left in (partial, former):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()

    def finish() -> None:
        tensorless = {"model": {}, "optimizer": {**content["optimizer"], "state": {}}}
        # Versions 2 and 3 require the key `checksum`; here the manifest has one for each file instead.
        rest = {"format": FORMAT, "version": version_of(content), "step": step, **content, **tensorless, "checksum": ""}
        write_torch(partial / REST, rest)
        names = sorted(p.name for p in partial.iterdir())
        (partial / MANIFEST).write_text(json.dumps({name: hash_file(partial / name) for name in names}), "utf-8")
        for name in (REST, INDEX, MANIFEST):
            flush(partial / name)
        if path.exists():
            # From before a rollback. Not deleted yet, which takes time: a kill meanwhile would leave neither.
            path.rename(former)
        partial.replace(path)
        flush(folder)
        shutil.rmtree(former, ignore_errors=True)

    try:
        _first(prepare, runtime)
        writer = dcp.FileSystemWriter(partial, single_file_per_rank=True, sync_files=True)
        try:
            dcp.save(flat(content), storage_writer=writer, process_group=runtime.background)
        except dcp.CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {_reason(e[0])}" for rank, e in error.failures.items())
            raise OSError(None, reasons) from None
        _first(finish, runtime)
    except OSError:
        if runtime.leads:  # the next one needs the room
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return path


def _reason(error: BaseException) -> str:
    words = reason_of(error, 120)
    # torch's words for a write that the system refused.
    return f"a file was cut off, as on a full disk ({words})" if "inline_container" in words else words


def load(path: Path) -> dict[str, Any]:
    """The same content as that of a single file, with whole tensors on the host. Raises DamagedShards."""
    verify(path)
    content = load_rest(path)
    found = _read(path, {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in _index(path).items()}, None)
    for name, tensor in found.items():
        kind, _, rest = name.partition(".")
        if kind == "model":
            content["model"][rest] = tensor
        else:
            number, _, moment = rest.partition(".")
            content["optimizer"]["state"].setdefault(int(number), {})[moment] = tensor
    content["optimizer"]["state"] = dict(sorted(content["optimizer"]["state"].items()))
    return content


def verify(path: Path) -> None:
    """Raises DamagedShards if a file is missing or is not what was written."""
    try:
        manifest = from_json((path / MANIFEST).read_text("utf-8"))
        for name, stated in manifest.items():
            if (found := hash_file(path / name)) != stated:
                raise DamagedShards(f"{name}: its checksum is {found[:12]} and should be {stated[:12]}")
    except (OSError, ValueError) as error:
        raise DamagedShards(f"{type(error).__name__}: {error}") from None


def load_rest(path: Path) -> dict[str, Any]:
    """Everything but the tensors."""
    return read_torch(path / REST)


def load_into(path: Path, tensors: dict[str, Tensor], runtime: Runtime) -> None:
    """Fill live tensors, which may be sharded, by name from a verified folder; each rank reads its own shares."""
    if missing := tensors.keys() - _index(path).keys():
        raise CheckpointError(f"{path}: lacks {sorted(missing)[0]}; choose another --out")
    _read(path, dict(tensors), runtime)


def shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the networks' tensors."""
    return {
        name.removeprefix("model."): tuple(shape)
        for name, (shape, _) in _index(path).items()
        if name.startswith("model.")
    }


def has_moments(content: dict[str, Any], path: Path) -> bool:
    """Whether the optimizer had made a step."""
    if path.is_dir():
        return any(name.startswith("optimizer.") for name in _index(path))
    return bool(content["optimizer"]["state"])


def flat(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights and the optimizer's moments of a checkpoint's content, by their names in shards; in the same order on
    all ranks."""
    states = sorted(content["optimizer"]["state"].items())
    moments = {f"optimizer.{i}.{name}": t for i, state in states for name, t in state.items()}
    return {f"model.{name}": t for name, t in content["model"].items()} | moments


def _index(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    found = _reader(path).read_metadata().state_dict_metadata
    return {name: (entry.size, entry.properties.dtype) for name, entry in found.items()}  # pyright: ignore[reportAttributeAccessIssue]


def _read(path: Path, tensors: dict[str, Tensor], runtime: Runtime | None) -> dict[str, Tensor]:
    import torch.distributed.checkpoint as dcp

    group = runtime.background if runtime is not None else None
    # A single process reads, as intended.
    with ignoring_warnings("torch.distributed is disabled"):
        dcp.load(tensors, storage_reader=_reader(path), process_group=group, no_dist=runtime is None)
    return tensors


def _reader(path: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    class Reader(FileSystemReader):
        """Accepts only DCP's own plain classes in the index, which is a pickle: code in a checkpoint is never run."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (path / INDEX).open("rb") as file:
                metadata = _PlainUnpickler(file).load()
            if getattr(metadata, "storage_meta", None) is None:
                metadata.storage_meta = StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(path)


class _PlainUnpickler(pickle.Unpickler):
    MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
    NAMES = (
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11.0 to 3.11.3 write members of an Enum
            return _member
        if module == "pathlib._local":  # as Python 3.13 writes it
            module = "pathlib"
        dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if dtype or (module, name) in self.NAMES:
            return super().find_class(module, name)
        # Only these two modules' own classes: no functions, no methods of what they import (Path.unlink), nothing that
        # opens files.
        if module in self.MODULES and "Reader" not in name and "Writer" not in name:
            with suppress(AttributeError):
                found = super().find_class(module, name)
                if isinstance(found, type) and found.__module__ == module:
                    return found
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into an index of tensors")


def _member(of: Any, name: Any) -> Any:
    if not (isinstance(of, EnumMeta) and isinstance(name, str) and name in of.__members__):
        raise pickle.UnpicklingError("getattr of anything but an Enum does not belong into an index of tensors")
    return of.__members__[name]


def _first(work: Callable[[], None], runtime: Runtime) -> None:
    """Call `work` on rank 0, in the writers' own process group; its OSError is raised on every rank."""
    reason: str | None = None
    if runtime.leads:
        try:
            work()
        except OSError as error:
            reason = f"{error.strerror or error}"
    reason = runtime.value_of_first(reason)
    if reason is not None:
        raise OSError(None, reason)
