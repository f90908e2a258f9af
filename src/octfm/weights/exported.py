"""Read a folder that `octfm export` wrote, in the layout of the Hugging Face hub, from a disk or a bucket.

model.safetensors        tensors network.* (octfm.models.vit3d) and, if fine-tuned, head.*; float32, of packaged
                         encoders bfloat16; with a checksum
config.json              sizes, token budget and Preprocessing; for a head, what it predicts; for packaged encoders,
                         what they are and the hash of their weights
seen_participants.json   keyed hashes of the participants it was trained on, and a hash to know their key by; `before`:
                         those of every run whose weights came before (model.init, or the encoder that was fine-tuned)
participants.key         the key of those hashes, and in further lines those of `before`, in this order, or - where
                         nobody had it; may be kept elsewhere and copied here for an evaluation
README.md                the model card
octfm.onnx               only if requested
"""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octfm.display import number
from octfm.errors import CheckpointError, EvaluationError, reason_of
from octfm.io.hashing import keyed_hash
from octfm.io.location import BucketPath, Location, from_json

if TYPE_CHECKING:  # torch takes two seconds, and `octfm models` lists files
    from torch import Tensor

CONFIG, WEIGHTS, SEEN, KEY, CARD, ONNX = (
    "config.json", "model.safetensors", "seen_participants.json", "participants.key", "README.md", "octfm.onnx",
)  # fmt: skip
FORMAT, VERSION = "octfm-export", 2
"""Version 2, written only where a run or a fine-tuning began with weights that were trained on people, has these
participants as well (`before`), whom an older octfm would overlook."""
CHECKED = "octfm key"
"""The text whose keyed hash is `key_check`."""
UNKNOWN = "-"
"""The line of a key that is kept elsewhere."""
SETTINGS = ("seed", "precision", "model", "predictor", "objective", "masks")
"""The settings of a run that define its encoder. The others are not exported, because they contain paths."""


def is_export(where: Location) -> bool:
    """Whether this is a folder (or prefix) that `octfm export` wrote."""
    try:
        return from_json((where / CONFIG).read_bytes()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def refuse_inside_export(out: Location) -> None:
    """Raise EvaluationError if `out` is inside an export, which may be published; embeddings and pictures may not."""
    folder = out if isinstance(out, BucketPath) else Path(os.path.abspath(out))  # noqa: PTH100
    for parent in (folder, *(folder.parents if isinstance(folder, Path) else ())):
        if is_export(parent):
            raise EvaluationError(
                f"{out}: inside the export {parent}, which may be published; embeddings and pictures of people "
                "have no place there, choose another --out"
            )


def read_export(where: Location) -> dict[str, Any]:
    """config.json with `network` and `head` (float32 tensors by name) added; whom they have seen: `read_seen`.

    Raises CheckpointError if anything is missing or damaged.
    """
    settings = read_settings(where)
    tensors = _read_tensors(where)
    parts: dict[str, dict[str, Tensor]] = {"network": {}, "head": {}}
    for name, tensor in tensors.items():
        part, _, rest = name.partition(".")
        if part not in parts:
            raise CheckpointError(
                f"{where / WEIGHTS}: unknown tensor {name}; expected network.* and head.*; export again"
            )
        parts[part][rest] = tensor.float()
    if settings.get("sha256", found := digest(parts["network"])) != found:
        raise CheckpointError(
            f"{where / WEIGHTS}: the weights are not those that {CONFIG} names (SHA-256 {found[:12]}, expected "
            f"{settings['sha256'][:12]}); install octfm again, or fetch the whole export again"
        )
    return {**settings, **parts}


def read_settings(where: Location) -> dict[str, Any]:
    """config.json of an export. Raises CheckpointError if it is incomplete or of another format or version."""
    settings = _read_json(where / CONFIG)
    if settings.get("format") != FORMAT:
        raise CheckpointError(
            f"{where / CONFIG}: expected format {FORMAT}, got {settings.get('format')!r}; was it made by octfm export?"
        )
    version = settings.get("version", 0)
    if not isinstance(version, int) or version > VERSION:
        raise CheckpointError(
            f"{where / CONFIG}: export version {version}, this octfm reads up to {VERSION}; upgrade octfm"
        )
    if absent := {"settings", "preprocessing", "fingerprint"} - settings.keys():
        raise CheckpointError(f"{where / CONFIG}: incomplete, it lacks {', '.join(sorted(absent))}; export again")
    return settings


def read_seen(where: Location) -> dict[str, Any]:
    """`hashes`: keyed hashes of the participants that the model was trained on; `key`: their key, None if it is kept
    elsewhere; `before`: the same of the runs whose weights came before, if there are any. Raises CheckpointError if the
    file of hashes is missing or damaged, or if the file of keys is not the one that belongs to it."""
    if not (where / SEEN).exists():
        raise CheckpointError(
            f"{where / SEEN}: missing, so the model's training participants are unknown; fetch the whole export again"
        )
    seen = _read_json(where / SEEN)
    try:
        parts = [public(part) for part in (seen, *seen.get("before", ()))]
    except (LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{where / SEEN}: damaged, it lacks hashes; fetch the whole export again") from None
    keys: list[str | None] = [None] * len(parts)
    with suppress(FileNotFoundError):
        words = (where / KEY).read_bytes().decode("utf-8-sig", "replace").split()
        keys = [None if word == UNKNOWN else word for word in words]
    # Exports of octfm 0.1 have no check. With another key nobody would be recognised.
    fits = len(keys) == len(parts) and all(
        key is None or part.get("key_check") in (None, keyed_hash(CHECKED, key))
        for key, part in zip(keys, parts, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"{where / KEY}: not what belongs to the hashes in {SEEN} ({number(len(parts), 'key')}, a line each), so "
            "nobody would be recognised; put back the file that octfm export wrote"
        )
    first, *before = [{"key": key, **part} for key, part in zip(keys, parts, strict=True)]
    return first | ({"before": before} if before else {})


def public(part: Mapping[str, Any]) -> dict[str, Any]:
    """`hashes` of a run's participants and `key_check`, to know their key by: all that an export shows of them."""
    check = keyed_hash(CHECKED, part["key"]) if part.get("key") else part.get("key_check")
    return {"hashes": part["hashes"]} | ({"key_check": check} if check else {})


def keys_text(participants: Mapping[str, Any]) -> str:
    """The content of participants.key; empty if there is no key."""
    keys = [part["key"] for part in (participants, *participants.get("before", ()))]
    return "".join(f"{key or UNKNOWN}\n" for key in keys) if any(keys) else ""


def digest(network: "Mapping[str, Tensor]") -> str:
    """SHA-256 that identifies the weights of an encoder, computed in float32 whatever their stored type."""
    return checksum({f"network.{name}": tensor.float() for name, tensor in network.items()})


def checksum(tensors: "Mapping[str, Tensor]") -> str:
    """SHA-256 over names, shapes and bytes."""
    import torch

    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # As bytes, because numpy has no bfloat16.
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def _read_tensors(where: Location) -> "dict[str, Tensor]":
    from safetensors import SafetensorError
    from safetensors.torch import load

    file = where / WEIGHTS
    try:
        data = file.read_bytes()
        tensors = load(data)
        # A safetensors file begins with the length of its JSON header in 8 bytes; `load` returns no metadata.
        length = int.from_bytes(data[:8], "little")
        stated = from_json(data[8 : 8 + length]).get("__metadata__", {}).get("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; fetch the whole export again") from None
    except (SafetensorError, ValueError) as error:
        raise CheckpointError(f"{file}: damaged ({reason_of(error, 120)}); fetch it again") from None
    if stated != (found := checksum(tensors)):
        raise CheckpointError(
            f"{file}: damaged, or written by another program: its checksum is {found[:12]}, "
            f"expected {str(stated)[:12]}; fetch it again"
        )
    return tensors


def _read_json(file: Location) -> dict[str, Any]:
    try:
        content = from_json(file.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; expected a folder that octfm export wrote") from None
    except ValueError:
        raise CheckpointError(f"{file}: not valid JSON; fetch it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a JSON object, got {type(content).__name__}; fetch it again")
    return content
