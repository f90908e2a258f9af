"""Read tensors from other people's torch files without running their code; write torch files, with the system's reason
if that fails."""

import errno
import pickle
import re
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from octfm.errors import CheckpointError
from octfm.threads import ignoring_warnings

DAMAGE = (
    *(zipfile.BadZipFile, pickle.UnpicklingError, struct.error, EOFError, RuntimeError),
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError),
)
"""Errors that torch and pickle raise for bytes that are no torch file."""


def read_torch(path: Path, **options: Any) -> Any:
    """The content of a torch file: tensors and plain values only. Raises OSError, and DAMAGE for anything else."""
    # Of a plain pickle and of a TorchScript archive, which are refused.
    with ignoring_warnings("Detected pickle protocol|.*looks like a TorchScript archive"):
        return torch.load(path, map_location="cpu", weights_only=True, **options)


def reason(error: BaseException) -> str:
    """Why a file is no torch file, in a few words. Not torch's own, which advise to load it with the code in it."""
    # The second is torch's look for the end of a small file.
    cut_off = "central directory" in str(error) or getattr(error, "errno", None) == errno.EINVAL
    if cut_off or isinstance(error, EOFError):
        return "it lacks the end of a torch file"
    text = (str(error).splitlines() or [""])[0][:160]
    if text.startswith("Weights only load failed") or "weights_only" in text:
        named = re.search(r"GLOBAL (\S+)", str(error))
        text = f"it names {named[1]}, which is code" if named else "not tensors and plain values alone"
    return f"{type(error).__name__}: {text}"


def read_weights(path: Path, containers: Sequence[str], expected: str) -> dict[str, Tensor]:
    """Tensors by name, from the innermost mapping under keys in `containers`; of several keys, the first counts. Raises
    CheckpointError naming the file and `expected`, a description of the file that should be there."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; expected {expected}")
    try:
        content: Any = read_torch(path)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: holds more than weights ({reason(error)}), and loading it would run its code; save the encoder's "
            "state_dict alone"
        ) from None
    except (*DAMAGE, OSError) as error:
        # In a small file that was cut off, torch looks for the end before the beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise CheckpointError(f"{path}: damaged or not a .pt file ({reason(error)})") from None
    while isinstance(content, dict) and (
        inner := next((content[k] for k in containers if isinstance(content.get(k), dict)), None)
    ):
        content = inner
    tensors = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not tensors:
        raise CheckpointError(f"{path}: no tensors found; expected a state_dict, or one under {', '.join(containers)}")
    return tensors


def write_torch(path: Path, value: Any) -> None:
    """torch.save, which raises OSError if the disk does not take the file."""
    with path.open("wb") as file:
        sink = Sink(file)
        try:
            torch.save(value, sink)  # pyright: ignore[reportArgumentType]  (it needs write and flush only)
        except RuntimeError as error:
            # torch reports a failed write as a broken archive; the operating system's reason is the useful one.
            raise sink.error or error from None


class Sink:
    """A file that keeps the error with which writing failed."""

    def __init__(self, file: BinaryIO):
        self._file, self.error = file, None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()
