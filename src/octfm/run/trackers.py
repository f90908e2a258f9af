"""TensorBoard and Weights & Biases: rank 0 only, one run per job, no step twice however often it resumes (F10)."""

import importlib.util
import json
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np

from octfm.errors import ConfigError, TrainingError, reason_of
from octfm.io.location import from_json, write_whole
from octfm.run.tracking import Listener, TrackingConfig

STATE = "trackers.json"


def open_trackers(
    config: TrackingConfig, run: Path, settings: dict[str, Any], first_step: int, rank: int = 0
) -> list[Listener]:
    """The configured trackers; none on other ranks than 0. Raises ConfigError if a package is missing."""
    if rank != 0:
        return []
    for name in missing(config):
        raise ConfigError(
            f"tracking.{name}: the package {name} is not installed; pip install octfm[{name}], or turn it off"
        )
    found: list[Listener] = []
    if config.tensorboard:
        found.append(TensorBoard(run, first_step))
    if config.wandb:
        found.append(WeightsAndBiases(config, run, settings))
    return found


def missing(config: TrackingConfig) -> list[str]:
    """Configured trackers that are not installed."""
    configured = [name for name, on in (("tensorboard", config.tensorboard), ("wandb", config.wandb)) if on]
    return [name for name in configured if importlib.util.find_spec(name) is None]


def mode(config: TrackingConfig) -> Literal["online", "offline"] | None:
    """online, offline or None: as configured, and offline if WANDB_MODE says so."""
    return "offline" if config.wandb and os.environ.get("WANDB_MODE") == "offline" else config.wandb


def unusable() -> str | None:
    """None if Weights & Biases can be used online, else the reason: no key is set, or the server does not answer."""
    parts = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    host, port = parts.hostname or "api.wandb.ai", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError as error:
        return f"Weights & Biases cannot be reached ({host}:{port}: {error.strerror or error})"
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return None
    for place in [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]:
        with suppress(OSError, RuntimeError):  # RuntimeError: this user has no home folder
            if (parts.hostname or "").encode() in Path(place).expanduser().read_bytes():
                return None
    return "Weights & Biases answers, but no key is set"


class TensorBoard:
    """Event files in RUN/tensorboard; when a run resumes, steps after the checkpoint are purged and logged anew."""

    def __init__(self, run: Path, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run / "tensorboard"), purge_step=first_step, flush_secs=10)

    def row(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in scalars(kind, values).items():
            self._writer.add_scalar(name, value, step)
        if kind == "train":
            self._writer.flush()

    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One W&B run per run folder. W&B cannot go back in steps: a resumed run logs those not logged yet.

    By itself W&B would also send the command line, folders, the name of the computer, packages and git's remote."""

    def __init__(self, config: TrackingConfig, run: Path, settings: dict[str, Any]):
        import wandb

        self._file = run / STATE
        known = from_json(self._file.read_text("utf-8")) if self._file.is_file() else {}
        self._id: str = known.get("wandb_id") or secrets.token_hex(8)
        self._logged: int = known.get("told", -1)
        self._first_new = self._logged + 1
        self._note(self._logged)
        self._wandb = wandb
        # Without a key W&B would prompt for one, at a terminal that nobody watches.
        how = "offline" if mode(config) == "online" and unusable() else mode(config)
        try:
            self._run = wandb.init(
                project=config.project, id=self._id, name=run.resolve().name, dir=str(run), mode=how, resume="allow",
                config=settings,
                settings=wandb.Settings(
                    console="off", silent=True, init_timeout=60, host="", disable_git=True, disable_code=True,
                    x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
                ),
            )  # fmt: skip
        except wandb.Error as error:
            reason = reason_of(error, 200)
            # Not ConfigError: only rank 0 meets it, it may pass, and the launcher must end the ranks that wait for it.
            raise TrainingError(
                f"tracking.wandb={how}: Weights & Biases refused the run ({reason}); "
                "see tracking.project and `wandb login`, or set tracking.wandb=offline"
            ) from None

    def row(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self._log(step, scalars(kind, values))

    def picture(self, name: str, step: int, pixels: np.ndarray) -> None:
        self._log(step, {name: self._wandb.Image(pixels)})

    def close(self) -> None:
        self._run.finish()

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if not values or step < self._first_new:
            return
        if step > self._logged:
            self._logged = step
            # Before logging: a kill in between loses one row of W&B and repeats none.
            self._note(step)
        self._run.log(values, step=step)

    def _note(self, step: int) -> None:
        write_whole(self._file, json.dumps({"wandb_id": self._id, "told": step}).encode())


def scalars(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """Numbers of a row as `train/loss`, `train/by_scanner/topcon_triton`, …; verdicts as 0 (ok), 1 (watch), 2 (bad)."""
    if kind == "health":
        return {f"health/{values['what'].replace(' ', '_')}": float(("ok", "watch", "bad").index(values["verdict"]))}
    flat: dict[str, float] = {}
    for name, value in values.items():
        if name == "time":
            continue
        if isinstance(value, dict):
            flat |= scalars(f"{kind}/{name}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{kind}/{name}"] = float(value)
    return flat
