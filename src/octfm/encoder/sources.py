"""What `load_encoder` and `load_tuned` take: a run, a checkpoint, an export, an address, a hub id, a packaged name.

A name of two words such as `owner/name` is the path of a run, or else an export in the local cache of the Hugging Face
hub. The hub itself is contacted for `hf://owner/name` only, because a path may name a person.
"""

import re
from pathlib import Path
from typing import Any

from octfm.addresses import refuse_credentials
from octfm.errors import CheckpointError, ConfigError
from octfm.io.location import Location, is_remote, location
from octfm.run.checkpoint_files import FILE, SHARDS
from octfm.weights.exported import CONFIG, KEY, SEEN, WEIGHTS, is_export
from octfm.weights.packaged import encoders_folder, packaged, packaged_encoder, packaged_encoders

HUB = "hf://"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
FILES = (CONFIG, WEIGHTS, SEEN, KEY)
"""Files of an export that are fetched from the hub; not the ONNX graph, which is as large as the weights."""


def find(run: str | Location | None) -> Location:
    """The folder, file or address that a user's word names; for None the packaged encoder. A path that does not exist
    may be returned.

    Raises CheckpointError for a hub id or a packaged name that does not exist, ConfigError for hf:// without
    huggingface_hub.
    """
    if run is None:
        return packaged_encoder()
    if not isinstance(run, str):
        return location(run)
    if run.startswith(HUB):
        return from_hub(run.removeprefix(HUB))
    if is_remote(run):
        return location(run)
    where = location(run)
    if where.exists():
        return where
    if re.fullmatch(r"[\w.-]+", run) and run == Path(run).name:
        return _named(run)
    # If a folder of the first word exists, the name is more likely a misspelt run.
    if _HUB_ID.fullmatch(run) and not Path(run).parent.exists():
        return _cached(run)
    return where


def display_name(where: Location) -> str:
    """The name of a packaged encoder instead of its folder in site-packages; other paths and addresses unchanged."""
    packaged_here = isinstance(where, Path) and where.parent == encoders_folder()
    return where.name if packaged_here else str(where)


def names_encoder(word: str) -> bool:
    """Whether a word of a command line names an encoder: a run, a checkpoint, an export, a packaged or hub name, or any
    address. False for another file or folder, which is a scan.

    Raises CheckpointError for a word that names neither an encoder nor a file or folder.
    """
    if word.startswith(HUB) or is_remote(word):
        return True
    path = Path(word)
    if "!/" in word and not path.exists():
        return False  # a member of an archive
    if path.exists() and path.suffix in (FILE, SHARDS):
        return True
    if path.is_file():
        return False
    if path.is_dir():
        return is_export(path) or any((path / name).exists() for name in ("config.yaml", "run.json", "checkpoints"))
    try:
        found = find(word)
    except CheckpointError:
        found = path
    if isinstance(found, Path) and not found.exists():
        raise CheckpointError(
            f"{word}: no such scan, run, checkpoint or export here, and no packaged encoder of this name; packaged "
            f"encoders: {_known_encoders()}; check the path"
        )
    return True


def from_hub(name: str, offline: bool = False, **options: Any) -> Path:
    """The folder of an export on the Hugging Face hub, `owner/name` or `owner/name@revision`, downloaded or from its
    cache; with `offline` or HF_HUB_OFFLINE=1 only from the cache. `options`: further ones of snapshot_download.

    Raises CheckpointError if it is not there, ConfigError without huggingface_hub and for credentials.
    """
    refuse_credentials(f"{HUB}{name}")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise ConfigError(f"{HUB}{name} needs huggingface_hub; install it with: pip install 'octfm[hub]'") from None
    repository, _, revision = name.partition("@")
    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=list(FILES), local_files_only=offline, **options
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        if offline:
            sentence = "no run, checkpoint or export here, and no such export in the hub's cache"
            way = f"check the path, or fetch it from the hub with {HUB}{name}"
        else:
            sentence = f"the Hugging Face hub does not give it ({type(error).__name__}), and its cache has no copy"
            way = "check the name and the connection, or copy the export here and give its folder"
        raise CheckpointError(f"{name}: {sentence}; {way}") from None
    if not is_export(folder):
        raise CheckpointError(f"{name}: not an export of octfm; expected a config.json of `octfm export` on the hub")
    return folder


def _cached(name: str) -> Path:
    try:
        return from_hub(name, offline=True)
    except ConfigError:
        raise CheckpointError(
            f"{name}: no run, checkpoint or export here, and huggingface_hub is not installed for a hub id; give the "
            "path of a run, or: pip install 'octfm[hub]'"
        ) from None


def _named(name: str) -> Path:
    """The folder of a packaged encoder. Raises CheckpointError, which lists the packaged ones, if there is none."""
    encoders = packaged_encoders()
    if name in encoders:
        return encoders[name]
    if name in [network.name for network in packaged()]:
        raise CheckpointError(
            f"{name}: a packaged network that segments and is no encoder; use octfm.segment(scan), or load_encoder "
            "with a run or an export"
        )
    raise CheckpointError(
        f"{name}: no run, checkpoint or export here, and no packaged encoder of this name; packaged encoders: "
        f"{_known_encoders()}; give the path of a run (octfm pretrain) or of an export (octfm export)"
    )


def _known_encoders() -> str:
    return ", ".join(packaged_encoders()) or "none yet"
