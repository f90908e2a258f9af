"""Export a run or a fine-tuned model as a folder that others can load; exported.py describes its layout."""

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from octfm.catalog.participants.safe_values import is_known_class, is_known_name
from octfm.encoder.encoder import Encoder, load_encoder, opened, participants_in
from octfm.encoder.tuned import TunedModel, with_head_in
from octfm.errors import Echo, EvaluationError
from octfm.io.location import PARTIAL_S, Location, local_path, write_whole
from octfm.models.heads import MeanPool
from octfm.models.vit3d import count_parameters
from octfm.run.checkpoint import parts_of
from octfm.version import __version__
from octfm.weights import exported


def export(
    run: str | Location,
    out: str | Path,
    *,
    onnx: bool = False,
    card: str | None = None,
    keep_key: str | Path | None = None,
    keep_names: bool = False,
    echo: Echo = print,
) -> Path:
    """Write a new folder `out` for `load_encoder`, `load_tuned` and `OctEncoder.from_pretrained`, completely or not at
    all.

    run: a pretraining run, a checkpoint, or a run of `octfm finetune`, which is exported with its head.
    onnx: also write octfm.onnx, compared with torch.
    card: Markdown for README.md.
    keep_key: file to write the key of the participants' hashes to, instead of the export.
    keep_names: also publish names of classes and label columns that octfm does not know and that may identify somebody.
    Raises EvaluationError if `out` exists or `keep_key` is another file, if a name is unknown, or if reading the export
    back gives other weights.
    """
    out = local_path(out)
    _expect_new(out)
    # Once: while the run goes on, a second look would find a later checkpoint.
    path, content = opened(run, echo)
    encoder, tuned = with_head_in(run, path, content, "cpu")
    if tuned is not None and not keep_names:
        _expect_known_names(tuned)
    participants = participants_in(path, content)
    keys, kept = exported.keys_text(participants), local_path(keep_key) if keep_key is not None else None
    # Its own key may be there: an export that was stopped has written it before the folder got its name.
    if kept is not None and kept.exists() and not (kept.is_file() and kept.read_bytes() == keys.encode()):
        raise EvaluationError(f"{keep_key}: exists already; choose another file for the key")
    # Written next to the target and renamed at the end, so that a folder `out` is always complete.
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(out)
    partial = out.with_name(f".{out.name[:50]}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        settings = settings_of(encoder, tuned, content.get("step"))
        write_files(partial, settings, tensors_of(encoder, tuned), participants)
        write_whole(partial / exported.CARD, (card or _plain_card(out.name, encoder, tuned)).encode())
        if onnx:
            from octfm.encoder.onnx_graph import write_onnx

            worst = write_onnx(encoder, tuned.head if tuned else None, partial / exported.ONNX)
            echo(f"{exported.ONNX}: onnxruntime and torch differ by at most {worst:.1e}")
        if (read := load_encoder(partial, device="cpu")).key != encoder.key:
            raise EvaluationError(
                f"{out}: {read.source} differs from {encoder.source} after reading it back; nothing was exported, "
                "please report it"
            )
        if keys:
            write_whole(kept or partial / exported.KEY, keys.encode(), private=kept is not None)
        elif keep_key is not None:
            echo(f"{keep_key}: not written, because {run} comes without a key")
        _expect_new(out)  # once more: another process may have been faster
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def _remove_left_over(out: Path) -> None:
    """Delete what killed exports to `out` have left; a newer one may be being written at this moment."""
    own = re.compile(rf"\.{re.escape(out.name[:50])}\.\d+\.[0-9a-f]{{8}}\.partial")
    for left in out.parent.iterdir():
        with suppress(FileNotFoundError):
            if own.fullmatch(left.name) and time.time() - left.stat().st_mtime > PARTIAL_S:
                shutil.rmtree(left, ignore_errors=True)


def _expect_new(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise EvaluationError(f"{out}: exists already; exports are never overwritten, choose another --out")


def _expect_known_names(tuned: TunedModel) -> None:
    answer = tuned.answer
    unknown = [name for name in answer.classes if not is_known_class(name)]
    unknown += [] if is_known_name(answer.target) else [answer.target]
    if unknown:
        # A class may have the name of its column.
        names = ", ".join(map(repr, dict.fromkeys(unknown)))
        raise EvaluationError(
            f"config.json would publish the names {names}, which octfm does not know and which "
            "may identify somebody; rename them in the table of labels and fine-tune again, or pass --keep-names "
            "if anybody may read them"
        )


def settings_of(encoder: Encoder, tuned: TunedModel | None = None, step: int | None = None) -> dict[str, Any]:
    """The content of config.json. It contains no paths and no names of people."""
    run = encoder.config.model_dump(mode="json")
    settings = {name: run[name] for name in exported.SETTINGS}
    settings["model"] = settings["model"] | {"init": None}  # a path on the machine that trained
    content = {
        "format": exported.FORMAT,
        "octfm": __version__,
        "step": step,
        "parameters": count_parameters(encoder.network),
        "embedding_width": encoder.vector_width,
        "token_grid": list(encoder.network.grid.shape),
        "settings": settings,
        "preprocessing": encoder.preprocessing.model_dump(mode="json"),
        "fingerprint": encoder.fingerprint,
    }
    if tuned is not None:
        pool = "mean" if isinstance(tuned.head.pool, MeanPool) else "attention"
        content["answer"] = tuned.answer.to_dict()
        content["head_settings"] = {"pool": pool, "tokens_per_volume": tuned.tokens_per_volume}
    return content


def tensors_of(encoder: Encoder, tuned: TunedModel | None = None) -> dict[str, Tensor]:
    """The tensors of model.safetensors, named as in OctEncoder."""
    tensors = {f"network.{name}": tensor for name, tensor in encoder.network.state_dict().items()}
    if tuned is not None:
        tensors |= {f"head.{name}": tensor for name, tensor in tuned.head.state_dict().items()}
    return tensors


def write_files(
    folder: Path, settings: dict[str, Any], tensors: dict[str, Tensor], participants: Mapping[str, Any]
) -> None:
    """Write everything that loading needs but the keys of `participants`; config.json last, because it marks a folder
    as an export."""
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    # Clones, because safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    # One entry only: safetensors writes several in an order that differs between processes.
    write_whole(folder / exported.WEIGHTS, save(tensors, {"sha256": exported.checksum(tensors)}))
    own, *before = map(exported.public, parts_of(participants))
    seen = {"hash": "HMAC-SHA256"} | own | ({"before": before} if before else {})
    write_whole(folder / exported.SEEN, json.dumps(seen, indent=0).encode())
    # An older octfm would overlook those of the runs before.
    settings = settings | {"version": exported.VERSION if before else 1}
    write_whole(folder / exported.CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def usage(name: str, tuned: bool = False) -> str:
    """How to load an export of this name, for its model card."""
    verb, call = ("load_tuned", "predict") if tuned else ("load_encoder", "embed")
    result = "float32 [embedding_width], its tissue tokens pooled"
    if tuned:
        result = "probability of every class, or the number"
    return f"""```python
import octfm

model = octfm.{verb}("{name}")                      # this folder
model.{call}(octfm.read_volume("scan.dcm"))         # {result}

module = octfm.OctEncoder.from_pretrained("{name}")    # a torch module; also a name on the Hugging Face hub
features = module(voxels)                           # prepared voxels [B, 1, D, H, W] to [B, width, d, h, w]
```"""


def _plain_card(name: str, encoder: Encoder, tuned: TunedModel | None) -> str:
    """A minimal model card, for an export without the files of its run."""
    needs = ""
    if encoder.preprocessing.band != "classic":
        network = encoder.preprocessing.band_network
        needs = f"To read scans it needs an octfm that has the network {network}, which finds their tissue bands.\n\n"
    what = f"fine-tuned for {tuned.answer.target}" if tuned is not None else "pretrained without labels"
    return (
        "---\nlibrary_name: octfm\ntags:\n- medical\n- oct\n- retina\n- pytorch_model_hub_mixin\n---\n\n"
        f"# {name}\n\nA 3-D encoder of retinal OCT volumes, {what} with octfm {__version__}. Not a medical device.\n\n"
        f"{needs}{usage(name, tuned is not None)}\n"
    )
