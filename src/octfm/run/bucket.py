"""Runs in buckets: a run works in a local folder, whose files are copied to the bucket in the background.

Layout: the files of a run folder, and checkpoints.json, the pointer. A checkpoint is uploaded, compared and then
named in the pointer with the SHA-256 of its files; only checkpoints that the pointer names count. Another machine
makes the folder anew from the bucket. A failed upload never stops training: it is repeated with the next checkpoint,
and `failures` reports it.
"""

import glob
import json
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from octfm.errors import BucketError, CheckpointError
from octfm.io import bucket, bucket_cache
from octfm.io.hashing import hash_file, hash_text
from octfm.io.lease import Lease
from octfm.io.location import BucketPath, from_json, location, write_whole
from octfm.run import checkpoint_files
from octfm.run.checkpoint_files import is_name, step_of

POINTER, MARK, VERSIONS = "checkpoints.json", ".bucket.json", ".versions.json"
FORMAT, VERSION = "octfm-bucket-run", 1
FETCHED = 2
"""Checkpoints that another machine fetches: the newest, and an older one in case it is damaged."""
WAITING = 2
"""Most checkpoints that wait to be sent in addition to those that the retention keeps; older ones are dropped."""
PATIENCE_S = 600.0
"""How long a run that has ended tries to send its last checkpoint."""
UNREAD_S = 24 * 3600.0
"""Time after which a copy of a run that nobody opens is deleted, once there is a newer one."""

Surplus = Callable[[Sequence[Path]], list[Path]]


class BucketRun:
    """The copy of one run folder in a bucket, from `begin` to `end`."""

    def __init__(self, where: BucketPath):
        self.where, self.path = where, mirror_of(where)
        self._sent: dict[str, list[dict[str, Any]]] = {}
        self._files: dict[str, tuple[int, int]] = {}
        self._waiting: dict[str, Path] = {}
        self._tokens: list[str] = []
        self._failures: list[tuple[int, str]] = []
        self._lock, self._wake, self._idle = threading.Lock(), threading.Event(), threading.Event()
        self._idle.set()
        # Until `keep` is called nothing in the bucket is deleted: the folder's checkpoints have not been checked yet.
        self._surplus: Surplus = lambda found: []
        self._sending: str | None = None
        self._closing = self._gave_up = False
        self.before = bucket.tally()
        """Requests of this process to buckets before the run began."""
        self._stale_pointer = False

    def begin(self) -> None:
        """Take the lease and bring the local folder up to date with the bucket. Raises BucketError."""
        self._lease = Lease(self.where / "run.lease", "training into this run").__enter__()
        try:
            self._pull()
            self._thread = threading.Thread(target=self._work, daemon=True, name="octfm-upload")
            self._thread.start()
        except BaseException:
            self._lease.__exit__()
            raise

    def end(self) -> None:
        """Send what is left, for at most PATIENCE_S, and give the lease back."""
        # `open_run` arranges for this call before `begin`, which may have failed.
        if not hasattr(self, "_thread"):
            return
        if not self._gave_up:
            self.flush()
        self._closing = True
        self._wake.set()
        self._thread.join()
        with suppress(BucketError, OSError):
            self._send_files()
        self._lease.__exit__()

    def keep(self, surplus: Surplus) -> None:
        """Begin to send checkpoints, once the folder's were checked; `surplus`: those to delete in the bucket."""
        self._surplus = surplus
        here, last = checkpoint_files.steps(self.path / "checkpoints"), max(map(step_of, self._sent), default=-1)
        if here and step_of(here[-1]) < last and not self._has_sent(here[-1]):
            # The last process went back to this step, saved it, and ended before the bucket knew.
            last = step_of(here[-1])
            self.forget_after(last)
        for path in here:
            # The last process ended before it was sent.
            if step_of(path) > last or (step_of(path) == last and not self._has_sent(path)):
                self.offer(path)

    def _has_sent(self, path: Path) -> bool:
        """Whether the bucket has these bytes under the checkpoint's name."""
        sums = sorted(hash_file(file) for file in _files_of(path))
        return sums == sorted(entry["sha256"] for entry in self._sent.get(path.name, []))

    def fetch_back_to(self, may_return_to: Callable[[Path], bool]) -> None:
        """Fetch older checkpoints, one by one, until the folder has one to roll back to: another machine begins with
        the newest checkpoint only. Raises BucketError."""
        folder, aside = self.path / "checkpoints", self.path / ".outbox"
        here = checkpoint_files.steps(folder)
        if any(map(may_return_to, here)):
            return
        for name in sorted(self._sent.keys() - {path.name for path in here}, reverse=True):
            # Complete before it is in its place: a process that is killed here leaves no half checkpoint.
            if _fetch_checkpoint(self.where, self._sent[name], aside):
                (aside / "checkpoints" / name).rename(folder / name)
                if may_return_to(folder / name):
                    return

    def require(self) -> None:
        """Raises BucketError once another process trains into this run."""
        self._lease.require()

    def offer(self, path: Path) -> None:
        """Send a checkpoint that is complete on the local disk, in the background. Returns at once.

        Raises OSError, leaving nothing behind, if the disk has no room for a copy."""
        outbox = self.path / ".outbox" / f"{path.name}.{secrets.token_hex(4)}"
        try:
            for file in _files_of(path):
                target = outbox / ("whole" if path.is_file() else str(file.relative_to(path)))
                target.parent.mkdir(parents=True, exist_ok=True)
                # The local retention may delete the file before it is sent: a hard link keeps its bytes.
                try:
                    os.link(file, target)
                except OSError:
                    shutil.copyfile(file, target)
        except OSError:
            shutil.rmtree(outbox, ignore_errors=True)
            raise
        with self._lock:
            self._drop(path.name)
            self._waiting[path.name] = outbox
            known = sorted(self._sent.keys() | self._waiting.keys())
            surplus = {found.name for found in self._surplus([Path(name) for name in known])}
            # Never the one that is being sent: the thread is reading its files.
            for name in sorted(set(self._waiting) - {self._sending})[:-WAITING]:
                if name in surplus:
                    self._drop(name)
                    sentence = f"checkpoint {name} was not sent to {self.where}: newer ones are waiting already"
                    self._failures.append((step_of(name), sentence))
            self._idle.clear()
        self._wake.set()

    def forget_after(self, step: int) -> None:
        """Drop checkpoints after `step`: training went back to it."""
        with self._lock:
            for name in [name for name in self._waiting if step_of(name) > step]:
                self._drop(name)
            for name in [name for name in self._sent if step_of(name) > step]:
                del self._sent[name]
                self._stale_pointer = True
            self._idle.clear()
        self._wake.set()

    def _drop(self, name: str) -> None:
        """Stop waiting for a checkpoint. The thread deletes the files of the one that it is sending."""
        outbox = self._waiting.pop(name, None)
        if outbox is not None and name != self._sending:
            shutil.rmtree(outbox, ignore_errors=True)

    def flush(self) -> bool:
        """Wait until all checkpoints are in the bucket; False if some are not after PATIENCE_S."""
        deadline = time.monotonic() + PATIENCE_S
        while not self._idle.wait(0.2):
            if time.monotonic() > deadline or not self._thread.is_alive():
                self._gave_up = True
                return False
            # End the thread's pause after a failure: the run is over, and nothing else is left to do.
            if self._failures:
                self._wake.set()
        return True

    def publish(self) -> None:
        """Send files that are not checkpoints, such as results. Raises CheckpointError if the bucket refuses them."""
        try:
            self._lease.require()
            self._send_files()
        except BucketError as error:
            raise CheckpointError(
                f"{self.where}: results are in {self.path} and not yet in the bucket ({error}); the same command on "
                "this machine sends them"
            ) from None

    def failures(self) -> list[tuple[int, str]]:
        """(step, sentence) for everything that went wrong since the last call."""
        with self._lock:
            found, self._failures = self._failures, []
        return found

    def waiting(self) -> list[str]:
        """Checkpoints that are not in the bucket yet."""
        with self._lock:
            return sorted(self._waiting)

    # ---- in the thread
    # ---------------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing:
            self._wake.wait(1.0 if self._waiting or self._stale_pointer else None)
            # Before the state is read: an offer that comes later sets the event again.
            self._wake.clear()
            with self._lock:
                name = self._sending = min(self._waiting, default=None)
                outbox = self._waiting.get(name or "")
                nothing = name is None and not self._stale_pointer
                if nothing:
                    self._idle.set()
            if nothing:
                continue
            try:
                self._lease.require()
                self._send(name, outbox)
            except (BucketError, OSError) as error:
                problem = f"the checkpoint is on the local disk and not yet in {self.where}: {error}"
                sentence = f"{problem}; training goes on, it is sent again"
                with self._lock:
                    self._failures.append((step_of(name) if name else 0, sentence))
                # An offer made during the failed request has set the event, and would end the pause at once.
                self._wake.clear()
                self._wake.wait(bucket.PATIENCE.longest_s)
            self._wake.set()

    def _send(self, name: str | None, outbox: Path | None) -> None:
        """Send files, then the checkpoint, then the pointer; only then delete old checkpoints."""
        self._send_files()
        if name is not None and outbox is not None:
            entries = []
            for file in _files_of(outbox):
                inside = "" if file.name == "whole" and file.parent == outbox else f"/{file.relative_to(outbox)}"
                key = f"checkpoints/{name}{inside}"
                bucket.upload(file, str(self.where / key))
                entries.append({"key": key, "bytes": file.stat().st_size, "sha256": hash_file(file)})
            with self._lock:
                if not entries:  # a pointer that named it would be taken for damaged
                    sentence = f"checkpoint {name} was not sent to {self.where}: its files in {outbox} were deleted"
                    self._failures.append((step_of(name), sentence))
                elif self._waiting.get(name) == outbox:  # training has not gone back to before it meanwhile
                    self._sent[name] = entries
        with self._lock:
            gone = {path.name for path in self._surplus([Path(known) for known in sorted(self._sent)])}
            listed = {known: entries for known, entries in self._sent.items() if known not in gone}
        self._point_at(listed)
        for known in gone:
            with self._lock:
                entries = self._sent.pop(known, [])
            for entry in entries:
                bucket.delete(str(self.where / entry["key"]))
        with self._lock:
            self._stale_pointer = self._sent.keys() != listed.keys()
            if outbox is not None:
                shutil.rmtree(outbox, ignore_errors=True)
            if name is not None and self._waiting.get(name) == outbox:
                del self._waiting[name]
            if not self._waiting and not self._stale_pointer:
                self._idle.set()

    def _send_files(self) -> None:
        """Send files other than checkpoints that have changed: metrics, settings, run.json, results."""
        for file in sorted(self.path.rglob("*")):
            inside = file.relative_to(self.path)
            if not file.is_file() or _stays_here(inside):
                continue
            with suppress(FileNotFoundError):  # trackers delete files of their own
                found = file.stat()
                state = (found.st_mtime_ns, found.st_size)
                if self._files.get(str(inside)) != state:
                    bucket.upload(file, str(self.where / str(inside)))
                    self._files[str(inside)] = state

    def _point_at(self, listed: dict[str, list[dict[str, Any]]]) -> None:
        token = secrets.token_hex(8)
        pointer = {
            "format": FORMAT,
            "version": VERSION,
            "token": token,
            "requests": asdict(bucket.tally() - self.before),
        }
        # Noted first: whichever pointer the bucket has if the process is killed here, this folder knows it.
        _mark(self.path, [*self._tokens[-1:], token])
        self._tokens.append(token)
        bucket.write(str(self.where / POINTER), json.dumps(pointer | {"checkpoints": listed}, indent=1).encode())

    # ---- at the beginning
    # --------------------------------------------------------------------------------------------------------------

    def _pull(self) -> None:
        """Fetch the run, unless this folder wrote the bucket's pointer and may be ahead of it."""
        # Left by processes that were killed: what `_fetch` was fetching, and what waited to be sent. `keep` offers the
        # same checkpoints again, from the folder itself. Before anything is fetched, which needs the room.
        for left in (self.path / ".outbox", *self.path.parent.glob(f".{glob.escape(self.path.name)}.*")):
            shutil.rmtree(left, ignore_errors=True)
        pointer = read_pointer(self.where)
        try:
            ours = from_json((self.path / MARK).read_text("utf-8"))["tokens"]
        except (OSError, ValueError, KeyError):
            ours = []
        if pointer is not None:
            self._sent, self._tokens = dict(pointer["checkpoints"]), [pointer["token"]]
            if pointer["token"] not in ours or self._were_cleared():
                _fetch(self.where, pointer, self.path)
        elif ours:
            shutil.rmtree(self.path)  # the run in the bucket was deleted: a new one begins
        else:
            self._refuse_foreign()

    def _were_cleared(self) -> bool:
        """Whether somebody has deleted all checkpoints of the folder, or its newest: the run goes on from those in the
        bucket. After a rollback the newest here is one that the bucket does not have."""
        here, last = checkpoint_files.steps(self.path / "checkpoints"), max(map(step_of, self._sent), default=-1)
        return not here or (step_of(here[-1]) < last and self._has_sent(here[-1]))

    def _refuse_foreign(self) -> None:
        """Raises CheckpointError if the address holds other objects than a run writes before its first pointer."""
        root = f"{self.where}/"
        found = {uri.removeprefix(root) for uri in bucket.find(str(self.where))} - {"run.lease"}
        found = {name for name in found if not name.startswith(".octfm-probe")}
        if found and not found & {"config.yaml", "run.json", "metrics.jsonl"}:
            raise CheckpointError(f"{self.where}: holds objects, but no run ({min(found)}, …); choose another --out")


def mirror_of(where: BucketPath) -> Path:
    """The local folder of a run in a bucket. Raises CheckpointError for an address with .., which would name another
    folder here; as a bucket has no folders, it does not lead up there."""
    if ".." in where.inside.parts:
        raise CheckpointError(
            f"{where}: in a bucket .. does not lead to the folder above; write the address without it"
        )
    return bucket_cache.folder() / "runs" / hash_text(str(where))[:16] / where.name


def local_run(run: str | Path | BucketPath) -> Path:
    """A folder to read a run from: the run's own or, for a bucket, a copy with its newest checkpoints and all other
    files as they are there now. Raises CheckpointError."""
    where = location(run)
    if isinstance(where, Path):
        return where
    if is_name(where.name):
        raise CheckpointError(
            f"{where}: one checkpoint of a run in a bucket; name the run, which opens with its newest one, or copy "
            "this one to a disk"
        )
    pointer = read_pointer(where)
    if pointer is None:
        raise CheckpointError(f"{where}: no run here ({POINTER} is missing), or none that has saved a checkpoint yet")
    # One copy per pointer: whoever reads an earlier one is not disturbed by a new checkpoint.
    copies = mirror_of(where).parent / ".copies"
    copy = copies / pointer["token"] / where.name
    if (copy / MARK).is_file():
        _fetch_files(where, copy)
        return copy
    for old in copies.glob("*/*"):
        with suppress(OSError):  # another process was faster, or another user made it
            if time.time() - old.stat().st_mtime > UNREAD_S:
                shutil.rmtree(old)  # and not what others have fetched for the same pointer since
                old.parent.rmdir()
    _fetch(where, pointer, copy, anew=False)
    return copy


def read_pointer(where: BucketPath) -> dict[str, Any] | None:
    """The pointer of a run in a bucket: its `token`, and the objects and hashes of its `checkpoints`; None if there is
    none yet. Raises CheckpointError if it is damaged or of another version."""
    try:
        pointer = from_json((where / POINTER).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        pointer = None
    if not isinstance(pointer, dict):
        raise CheckpointError(f"{where / POINTER}: damaged; restore it from a copy")
    if pointer.get("format") != FORMAT or pointer.get("version") != VERSION:
        raise CheckpointError(f"{where / POINTER}: expected {FORMAT} version {VERSION}; use the octfm that wrote it")
    listed = pointer.get("checkpoints")
    whole = isinstance(listed, dict) and all(_is_checkpoint(name, entries) for name, entries in listed.items())
    # The token names a folder.
    if not whole or not re.fullmatch("[0-9a-f]{16}", str(pointer.get("token"))):
        raise CheckpointError(f"{where / POINTER}: damaged; restore it from a copy")
    return pointer


def _is_checkpoint(name: str, entries: Any) -> bool:
    """Whether a pointer's entries are the objects and hashes of one checkpoint, a file or a folder of shards."""
    place = PurePosixPath("checkpoints", name)
    try:
        known = {_inside(entry["key"]): entry["sha256"] for entry in entries}
    except (LookupError, TypeError):
        return False
    own = all(key and place in (key, *key.parents) and isinstance(sha, str) for key, sha in known.items())
    return is_name(name) and bool(known) and own


def _inside(key: str) -> PurePosixPath | None:
    """The path of an object below its run's folder; None if it leaves the folder: whoever may write to the bucket could
    write, and delete, any file of this machine."""
    path = PurePosixPath(key)
    leaves = str(path) != key or not path.parts or path.is_absolute() or ".." in path.parts or "\0" in key
    return None if leaves else path


def _fetch(where: BucketPath, pointer: dict[str, Any], folder: Path, *, anew: bool = True) -> None:
    """Fetch the files and checkpoints that the pointer names into another folder, which then replaces `folder`. Without
    `anew` a folder that another process has fetched in the meantime stays: that process may be reading it."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    (partial / "checkpoints").mkdir(parents=True)
    _fetch_files(where, partial)
    whole = 0
    for name in sorted(pointer["checkpoints"], reverse=True):
        if whole == FETCHED:
            break
        whole += _fetch_checkpoint(where, pointer["checkpoints"][name], partial)
    if pointer["checkpoints"] and not whole:
        raise CheckpointError(
            f"{where}: all {len(pointer['checkpoints'])} checkpoints differ from what {POINTER} says; restore one from "
            "a copy"
        )
    _mark(partial, [pointer["token"]])
    if not anew:
        with suppress(OSError):  # a folder that is not empty is not replaced
            partial.rename(folder)
            return
        # Another process was faster: its copy is complete, because the mark is written last.
        if (folder / MARK).is_file():
            shutil.rmtree(partial, ignore_errors=True)
            return
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _fetch_files(where: BucketPath, folder: Path) -> None:
    """Fetch files other than checkpoints that are not here yet or have changed since."""
    try:
        known = from_json((folder / VERSIONS).read_text("utf-8"))
    except (OSError, ValueError):
        known = {}
    for uri, found in bucket.find(str(where)).items():
        if (inside := _inside(uri.removeprefix(f"{where}/"))) is None:
            raise CheckpointError(f"{uri}: an object with // or a dot between slashes is no file of a run; delete it")
        version = bucket_cache.key(uri, found)
        if _stays_here(inside) or inside.name in (POINTER, "run.lease") or known.get(str(inside)) == version:
            continue
        (folder / inside).parent.mkdir(parents=True, exist_ok=True)
        partial = (folder / inside).with_name(f".{inside.name}.{os.getpid()}.partial")
        bucket.download(uri, partial, found.size)
        partial.replace(folder / inside)
        known[str(inside)] = version
    # After the files: a process killed before downloads them again instead of trusting files that are not there.
    write_whole(folder / VERSIONS, json.dumps(known).encode())


def _fetch_checkpoint(where: BucketPath, entries: list[dict[str, Any]], folder: Path) -> bool:
    """Fetch a checkpoint; False, leaving nothing, if it is not what was uploaded."""
    files = []
    for entry in entries:
        file = folder / entry["key"]  # which `read_pointer` has checked
        file.parent.mkdir(parents=True, exist_ok=True)
        files.append(file)
        try:
            bucket.download(str(where / entry["key"]), file, bucket.stat(str(where / entry["key"])).size)
        except FileNotFoundError:
            break
        if hash_file(file) != entry["sha256"]:
            break
    else:
        return True
    for file in files:
        file.unlink(missing_ok=True)
    for shards in {file.parent for file in files} - {folder / "checkpoints"}:
        shutil.rmtree(shards)
    return False


def _files_of(path: Path) -> list[Path]:
    """A file itself, or all files below a folder."""
    return [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())


def _mark(folder: Path, tokens: list[str]) -> None:
    """Note the pointers that this folder has written or was made from: it is at least as new as they are."""
    write_whole(folder / MARK, json.dumps({"tokens": tokens}).encode())


def _stays_here(inside: PurePath) -> bool:
    """Whether a file is not sent with the others: checkpoints go with the pointer; locks, parts and notes stay here."""
    of_checkpoint = inside.parts[0] == "checkpoints" and inside.name != "best.json"
    # tokens-*: features of a frozen encoder, gigabytes that any machine can compute again.
    local = inside.name in (MARK, VERSIONS, "run.lock") or inside.name.startswith("tokens-")
    return of_checkpoint or local or inside.parts[0] == ".outbox" or inside.suffix == ".partial"
