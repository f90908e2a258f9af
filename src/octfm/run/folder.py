"""A run's folder: begun once, resumed by the same command, refused if it holds anything else, never overwritten.

Pretraining, fine-tuning and segmentation share it; a `Kind` says in what they differ.
"""

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from octfm.config import Config, dump, flat, read_yaml
from octfm.errors import CheckpointError, ConfigError, Echo, shown
from octfm.io.hashing import hash_text
from octfm.io.location import BucketPath, Location, from_json, location, lock, write_whole
from octfm.run import checkpoint, checkpoint_files
from octfm.run.bucket import BucketRun, mirror_of
from octfm.run.checkpoint_files import put_back, set_aside, strangers
from octfm.run.runtime import Runtime, environment
from octfm.store.store import Store
from octfm.version import __version__

FORMAT, VERSION = "octfm-run", 1
LOCK = "run.lock"
MOST_IN_WORDS = 8
"""Changed settings up to which an error names their values."""


class OtherVolumes(CheckpointError):
    """A run folder whose training began on other volumes, splits or labels."""


@dataclass(frozen=True)
class Kind:
    """A kind of training, and how its run folders differ from those of other kinds."""

    name: str
    """The command's verb, as in run.json."""
    may_change: frozenset[str]
    """Settings, or whole sections, that may change when a run resumes."""
    parse: Callable[[dict[str, Any], Any], Config]
    """Parses the settings stored in a run. Stored settings must not load the code of plug-ins by themselves: the second
    argument, if not None, is a config of the caller's that names the same plug-ins. Raises ConfigError."""
    own_key: bool = False
    """Whether each run draws its own key for participants' hashes, so that the key identifies its checkpoints."""
    never_change: frozenset[str] = frozenset()
    """Settings that not even --override changes."""


@dataclass(frozen=True)
class Identity:
    """The values that identify a run: only with the same ones can it be resumed."""

    kind: Kind
    config: Config
    fingerprint: str
    """Fingerprint of the Preprocessing."""
    data: str
    """Hash of the volumes in use, their order and their voxels."""
    key: str | None = None
    """Key of the participants' hashes; None draws a new one."""
    encoder: str | None = None
    """Identifies the encoder that the settings name: `Encoder.key` if it is frozen, since no checkpoint contains it,
    else its run or, of an export, its weights (`beginning_of`). None if there is none."""
    counts: list[int] | None = None
    """How many volumes of `data` are trained, validated and tested on, in this order; None if all are trained on."""


@dataclass(frozen=True)
class Override:
    """Settings with which a run goes on although it began with others (--override)."""

    config: Config
    changed: dict[str, tuple[Any, Any]]
    """Dotted keys with the value now and the one before."""


@dataclass(frozen=True)
class RunFolder:
    """config.yaml, run.json, metrics.jsonl, checkpoints/, run.lock; memory.json once a smaller micro-batch is noted."""

    path: Path
    kind: Kind
    remote: BucketRun | None = None
    """The bucket that this folder is copied to."""
    override: "Override | None" = None
    """Other settings that its next updates have, which `resume` records."""

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
            facts = from_json(path.read_text("utf-8"))
            if not isinstance(facts, dict) or not isinstance(facts.get("participant_key"), str):
                raise ValueError("it lacks participant_key")
            return facts
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}: missing or damaged ({error}); restore it from a copy, or choose another --out"
            ) from None

    @property
    def key(self) -> str:
        """The key of this run's hashes of participants."""
        return self.record["participant_key"]

    def last_checkpoint(self) -> Path | None:
        return checkpoint_files.newest(self.path)

    def shown(self, file: Path | None) -> Location | None:
        """Where users find this file of the run: in its bucket, if it has one."""
        if self.remote is None or file is None or not file.is_relative_to(self.path):
            return file
        return self.remote.where / file.relative_to(self.path).as_posix()

    def newest_whole(self, echo: Echo) -> tuple[Path, dict[str, Any]] | None:
        """The newest undamaged checkpoint and its content, if there is one; damaged newer ones are set aside.

        Raises CheckpointError if any checkpoint is another run's, or if all of them are damaged: a run that has
        checkpoints never starts anew because none of them can be read (F18)."""
        for folder in checkpoint_files.destinations(self.path):
            put_back(folder)
            if names := strangers(folder):
                echo(
                    f"warning: {folder}: ignored, since no checkpoint has such a name: {', '.join(names[:5])}"
                    + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                )
        found = checkpoint_files.everywhere(self.path)
        # Older ones as well: a rollback may return to one, and retention deletes them.
        for path in found:
            content = checkpoint.header(path)
            if content is not None and {"participants", "step"} <= content.keys():
                self.require_own(path, content)
        problems: list[tuple[Path, checkpoint.DamagedCheckpoint]] = []
        for path in reversed(found):
            try:
                content = checkpoint.load(path)
            except checkpoint.DamagedCheckpoint as error:
                problems.append((path, error))
                continue
            for damaged, _ in problems:
                aside = set_aside(damaged)
                echo(f"warning: {damaged} is damaged and was set aside as {aside.name}; going back to {path}")
            return path, content
        if problems:
            raise problems[0][1]
        return None

    def require_own(self, path: Path, content: dict[str, Any]) -> None:
        """Raises CheckpointError if a checkpoint was renamed, or belongs to another run: its key or, where a key
        does not identify a run, its settings or Preprocessing differ."""
        if content["step"] != checkpoint_files.step_of(path):
            name = checkpoint_files.name_of(content["step"], path.suffix)
            raise CheckpointError(
                f"{path}: its name says {checkpoint_files.step_of(path)} updates and it holds {content['step']}; "
                f"rename it to {name}, or move it out of this folder"
            )
        key = content["participants"].get("key")
        if self.kind.own_key and key:
            own = key == self.key
        else:  # checkpoints of version 1 have no key
            own = key in (None, "", self.key) and self._agrees_with(content)
        if not own:
            raise CheckpointError(
                f"{path}: a checkpoint of another run (its key, settings or Preprocessing are not those of "
                f"{self.path}); move it out of this folder and run again: the run then continues from its own last "
                "checkpoint. To begin a new pretraining run with these weights, set model.init to the file"
            )

    def _agrees_with(self, content: dict[str, Any]) -> bool:
        try:
            before = self.kind.parse(content["config"], None)
            now = self.kind.parse(read_yaml(self.path / "config.yaml"), None)
        except (ConfigError, LookupError):
            return False
        overridden = {key for entry in self.record.get("overrides", []) for key in entry["settings"]}
        changed = differences(before, now, self.kind.may_change)
        return content["fingerprint"] == self.record.get("fingerprint") and changed.keys() <= overridden

    def require_key(self, key: str) -> None:
        """Raises CheckpointError if the folder holds another run now, with another key."""
        try:
            now = self.key
        except CheckpointError:  # gone or unreadable, and so not another run's
            return
        if now != key:
            raise CheckpointError(
                f"{self.path}: was deleted while this process trained into it, and another run has begun there; this "
                "one stops, so that only one writes"
            )

    def write_record(self, **facts: Any) -> None:
        """Add facts to run.json."""
        path = self.path / "run.json"
        known = self.record if path.exists() else {"format": FORMAT, "version": VERSION, "kind": self.kind.name}
        write_whole(path, json.dumps(known | facts, indent=2).encode())

    def record_override(self, step: int, echo: Echo) -> None:
        """Write the settings that change from `step` on to run.json and config.yaml, if there are any."""
        # After a return to an earlier checkpoint, updates are made again with the settings of now.
        recorded = self.record.get("overrides", [])
        overrides = [entry | {"after_step": min(entry["after_step"], step)} for entry in recorded]
        if overrides != recorded:
            self.write_record(overrides=overrides)
        if self.override is None:
            return
        changed = self.override.changed
        keys = {key: {"before": before, "now": now} for key, (now, before) in changed.items()}
        # The record before the settings: after a kill in between, the same command finds the change again and records
        # it.
        self.write_record(overrides=[*overrides, {"time": _now(), "after_step": step, "settings": keys}])
        write_whole(self.path / "config.yaml", dump(self.override.config).encode())
        for key, (now, before) in changed.items():
            echo(f"override: {key} is {now} from step {step} on; the run began with {before}")

    def record_environment(self, now: Mapping[str, str]) -> list[str]:
        """Write the software and hardware to run.json. Returns a text for each change that alters a run's last
        digits."""
        before = self.record.get("environment")
        before = before if isinstance(before, dict) else {}
        self.write_record(environment=now, octfm=__version__)
        counts = now.keys() & before.keys() - {"python", "precision"}
        changed = [name for name in now if name in counts and before[name] != now[name]]
        return [f"{name} {now[name]} (before: {before[name]})" for name in changed]

    def note_memory(self, micro_batch: int) -> None:
        """Write down, for the next start, how many volumes at a time memory allows. Any rank may call this."""
        write_whole(self.path / "memory.json", json.dumps({"micro_batch": micro_batch}).encode())

    def noted_memory(self) -> int | None:
        """What `note_memory` wrote last; None if it was never called. Raises CheckpointError if the file is damaged."""
        try:
            return int(from_json((self.path / "memory.json").read_text("utf-8"))["micro_batch"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{self.path / 'memory.json'}: damaged ({error}); delete it") from None

    def publish(self) -> None:
        """Send result files to the bucket. Raises CheckpointError if it does not take them."""
        if self.remote is not None:
            self.remote.publish()


class Resumable(Protocol):
    """Whatever a checkpoint restores."""

    runtime: Runtime

    @property
    def step(self) -> int:
        """Updates made."""
        ...

    @property
    def finished(self) -> bool:
        """Whether no update is left to make."""
        ...

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        """Take the state of a checkpoint, on all ranks; rank 0 has read its `content`, which is None on the others."""


def resume(run: RunFolder, training: Resumable, echo: Echo) -> bool:
    """Restore the newest whole checkpoint on all ranks; False if there is none yet. Rank 0 chooses and reads, and
    records settings that --override changed, and software and hardware, whose changes it names."""
    content: dict[str, Any] | None = None

    def choose() -> Path | None:
        nonlocal content
        found = run.newest_whole(echo)
        if found is None:
            return None
        path, content = found
        return path

    path = training.runtime.first(choose)
    if path is not None:
        training.restore(content, path)
    # Only now: settings that do not fit the checkpoint are refused, and must leave the run as it was.
    training.runtime.first(lambda: run.record_override(training.step, echo))
    # Of a finished run they stay those that it was trained with.
    changes: list[str] = []
    if path is None or not training.finished:
        changes = training.runtime.first(lambda: run.record_environment(environment(training.runtime)))
    if path is None:
        return False
    echo(f"resuming {run.path} after {training.step} updates")
    if changes:
        echo(f"software or hardware has changed, so the run goes on equal up to rounding: {', '.join(changes)}")
    return True


@contextmanager
def open_run(
    out: str | Location,
    identity: Identity,
    runtime: Runtime,
    *,
    override: bool = False,
    echo: Echo = print,
    check: Callable[[Path], None] = lambda folder: None,
) -> Iterator[RunFolder]:
    """The folder of a run, claimed by rank 0 for all ranks, once `check` has accepted it; the others only read it. A
    run in a bucket works in a local folder that is copied there in the background. Raises what `claim` and `check`
    raise, and BucketError."""
    where = location(out)
    remote = BucketRun(where) if isinstance(where, BucketPath) else None
    folder = where if isinstance(where, Path) else mirror_of(where)
    run = RunFolder(folder, identity.kind, remote)
    with ExitStack() as held:

        def enter() -> None:
            nonlocal run
            if remote is not None:
                held.callback(remote.end)
                remote.begin()
            _require_run_or_new(folder)
            check(folder)
            claimed = held.enter_context(claim(folder, identity, override=override, echo=echo))
            run = replace(claimed, remote=remote)

        runtime.first(enter)
        yield run


@contextmanager
def claim(out: str | Path, identity: Identity, *, override: bool = False, echo: Echo = print) -> Iterator[RunFolder]:
    """The folder of this run, locked until the context ends: a new one, or one begun with the same identity. With
    `override`, other settings are accepted, for `resume` to record. Raises CheckpointError if it is another run's, or
    if another process trains into it."""
    run = RunFolder(Path(out), identity.kind)
    settings = run.path / "config.yaml"
    run.path.mkdir(parents=True, exist_ok=True)
    with locked(run.path, echo):
        if settings.is_file():
            run = _continue(run, identity, override)
        else:
            # In this order: a folder with a run.json and no config.yaml has not begun, and the same command begins it.
            _begin_record(run, identity)
            write_whole(settings, dump(identity.config).encode())
        yield run


def _require_run_or_new(folder: Path) -> None:
    if not folder.exists() or (folder / "config.yaml").is_file():
        return
    first_writes = {"run.json", LOCK}  # all that a run leaves if it is killed during them
    if not folder.is_dir() or any(p.name not in first_writes and p.suffix != ".partial" for p in folder.iterdir()):
        raise CheckpointError(f"{folder}: exists and is not a run folder (no config.yaml); choose another --out")


def _begin_record(run: RunFolder, identity: Identity) -> None:
    # Whatever run.json a killed process, perhaps of another verb, has left in a folder that has not begun is gone.
    (run.path / "run.json").unlink(missing_ok=True)
    run.write_record(
        command="octfm " + " ".join(sys.argv[1:]),
        started=_now(),
        fingerprint=identity.fingerprint,
        data=identity.data,
        participant_key=secrets.token_hex(16) if identity.key is None else identity.key,
        **({} if identity.encoder is None else {"encoder": identity.encoder}),
        **({} if identity.counts is None else {"counts": identity.counts}),
        git=git_state(),
    )


def _continue(run: RunFolder, identity: Identity, override: bool) -> RunFolder:
    """Refuse what would make it another run; with --override, other settings are accepted."""
    kind, settings = run.kind, run.path / "config.yaml"
    # Up to version 0.1 fine-tuning and segmentation wrote no run.json.
    recorded = kind.own_key or (run.path / "run.json").exists()
    if recorded:
        _require_same_kind(run, identity)
    # Without a record nothing guards the volumes of a store that lies elsewhere.
    free = kind.may_change if recorded else kind.may_change - {"store"}
    changed = differences(identity.config, kind.parse(read_yaml(settings), identity.config), free)
    fixed = changed.keys() & kind.never_change
    if changed and (fixed or not override):
        # Other volumes are refused whatever is overridden.
        may = kind.own_key and not fixed and run.record.get("data") == identity.data
        accept = "accept the change with --override, " if may else ""
        raise CheckpointError(
            f"{run.path}: this run began with other values of {_in_words(changed)}; restore them to resume "
            f"({settings} has them), {accept}or choose another --out"
        )
    if recorded:
        # After the settings: if they choose other volumes or another encoder, the error should name the setting.
        _require_same_volumes(run, identity)
        _require_same_encoder(run, identity)
    else:
        _begin_record(run, replace(identity, key=_key_of_checkpoints(run) or identity.key))
    return replace(run, override=Override(identity.config, changed)) if changed else run


def _key_of_checkpoints(run: RunFolder) -> str | None:
    """Key of the participants' hashes, as a run that has no run.json wrote it."""
    headers = map(checkpoint.header, checkpoint_files.everywhere(run.path))
    return next((content["participants"].get("key") for content in headers if content is not None), None)


def _in_words(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """`steps (60, now 80)`; names alone where they are many, as with another config."""
    if len(changed) > MOST_IN_WORDS:
        return ", ".join(changed)
    return ", ".join(f"{key} ({shown(before)}, now {shown(now)})" for key, (now, before) in changed.items())


def _require_same_kind(run: RunFolder, identity: Identity) -> None:
    record = run.record
    if (verb := record.get("kind", "pretrain")) != run.kind.name:
        raise CheckpointError(f"{run.path}: holds a run of octfm {verb}; choose another --out")
    if record.get("fingerprint") != identity.fingerprint:
        raise CheckpointError(
            f"{run.path}: this run began with another Preprocessing: on another store or, without a store, on phantoms "
            "of another octfm; name that store, go on with that octfm, or choose another --out"
        )


def _require_same_volumes(run: RunFolder, identity: Identity) -> None:
    record = run.record
    # Runs that began before run.json named the counts are not asked for them.
    if record.get("data") != identity.data or record.get("counts", identity.counts) != identity.counts:
        raise OtherVolumes(
            f"{run.path}: the training volumes of the store are not those it began on (some were added, removed, "
            "prepared again, split or labelled anew), so it would not be the same run and its list of participants "
            "would be wrong; choose another --out (F18)"
        )


def _require_same_encoder(run: RunFolder, identity: Identity) -> None:
    """Settings name the place of an encoder, where another run or a later checkpoint may be by now."""
    record = run.record
    other = identity.key is not None and record["participant_key"] != identity.key
    # Runs that began before run.json named their encoder are not asked for it.
    if other or record.get("encoder", identity.encoder) != identity.encoder:
        raise CheckpointError(
            f"{run.path}: the encoder that the settings name is not the one that this run began with: its place holds "
            "another run now, or a later checkpoint; put the earlier one back, or choose another --out"
        )


def differences(a: Config, b: Config, may_change: frozenset[str]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values; except keys in `may_change`, or in a section named there."""
    left, right = flat(a.model_dump(mode="json")), flat(b.model_dump(mode="json"))
    # One side may lack a key: another objective has other settings.
    fixed = (key for key in sorted(left.keys() | right.keys()) if not {key, key.split(".")[0]} & may_change)
    return {key: (left.get(key), right.get(key)) for key in fixed if left.get(key) != right.get(key)}


def volumes_digest(store: Store, rows: Sequence[int] | np.ndarray, labels: Sequence[Any] = ()) -> str:
    """SHA-256 of the volumes that are trained on: their order, their voxels and, if given, their labels."""
    lines = [f"{store.rows[row].acquisition} {store.rows[row].checksum}" for row in rows]
    if store.left_out:
        lines.append("without " + " ".join(store.left_out))
    return hash_text("\n".join([*lines, *map(str, labels)]))


@contextmanager
def locked(folder: Path, echo: Echo) -> Iterator[None]:
    """Hold the lock of a run folder, at most until this process ends. CheckpointError if another process holds it."""
    try:
        file = lock(folder / LOCK, echo)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{folder}: another process ({error.strerror}) is training into this folder; wait for it, stop it, or "
            "choose another --out"
        ) from None
    with file:
        yield


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def git_state() -> dict[str, Any]:
    """`commit` of the source tree this package runs from, and whether it is `dirty`; both None if it is no checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str | None:
        try:
            command = ["git", "-C", str(folder), *words]
            ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return ended.stdout.strip() if ended.returncode == 0 else None

    # An installed package may lie inside somebody else's checkout, whose commit says nothing about it.
    if git("ls-files", "--error-unmatch", __file__) is None:
        return {"commit": None, "dirty": None}
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
