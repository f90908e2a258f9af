"""Locations: a path on a disk, or an address in a bucket used like one; and how files are written atomically."""

import errno
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from octfm.addresses import SCHEMES, expect_local, expect_place, is_bucket, path_text, refuse_credentials
from octfm.errors import BucketError, ConfigError, Echo
from octfm.io import bucket
from octfm.io.progress import say

PARTIAL_S = 3600.0
"""Age in seconds at which a partial file is deleted: its writer was killed. A newer one may be being written now."""
_PARTIAL = re.compile(r"\..+\.\d+\.[0-9a-f]{8}\.partial")
_NOT_FOR_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EACCES)


def is_remote(where: Any) -> bool:
    """Whether this is an address in a bucket, s3:// or gs://."""
    return isinstance(where, BucketPath) or str(where).startswith(tuple(f"{scheme}://" for scheme in SCHEMES))


def location(where: "str | PathLike[str] | BucketPath") -> "Path | BucketPath":
    """The place that a user names: a Path, or a BucketPath for s3:// and gs://. Raises ConfigError for other schemes
    and for credentials, TypeError for what is no path."""
    if isinstance(where, BucketPath):
        return where
    return listed(expect_place(path_text(where)))


def local_path(where: "str | PathLike[str]") -> Path:
    """A path that must be on a disk. Raises ConfigError for an address, which would create a folder called s3:,
    TypeError for what is no path."""
    return Path(expect_local(str(where) if isinstance(where, BucketPath) else path_text(where)))


def listed(uri: str) -> "Path | BucketPath":
    """The place that a listing or a catalog names, or a path that has been checked before."""
    return BucketPath.of(uri) if is_remote(uri) else Path(uri)


def from_json(text: str | bytes) -> Any:
    """What a JSON file says. Raises ValueError, also for lists in lists in lists, to which Python's own reader answers
    with a RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_whole(where: "Path | BucketPath", data: bytes, *, private: bool = False) -> None:
    """Replace a file: it holds the old content or the new, whatever happens; the new one is then on the disk.
    `private`: at no time can others than its owner read it there, if its disk keeps permissions."""
    if isinstance(where, BucketPath):
        where.write_bytes(data)
        return
    with replacing(where) as partial:
        if private:
            partial.touch(0o600)
        partial.write_bytes(data)
    if private:
        warn_if_shared(where)


def warn_if_shared(key: Path) -> None:
    """Warn if others than its owner may read a new key: USB disks, and a Windows disk in WSL, keep no permissions."""
    if key.stat().st_mode & 0o077:
        say(f"{key}: this disk keeps no permissions, so others may read the key; move it to a disk that only you read")


@contextmanager
def replacing(where: Path) -> Iterator[Path]:
    """A path to write a new file to, which replaces `where` when the context ends, as in `write_whole`."""
    where.parent.mkdir(parents=True, exist_ok=True)
    _delete_left_over(where.parent)
    # Cut, as a name may have 255 bytes, up to four for a letter.
    partial = where.with_name(f".{where.name[:50]}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        # Before the rename: a power cut must not leave the name on an empty file.
        flush(partial)
        partial.replace(where)
    except BaseException as error:
        with suppress(OSError):  # on a read-only disk, also of a file that is not there
            partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(partial)):
            error.filename = str(where)
        raise
    # A power cut may undo the rename until the folder is on the disk as well.
    flush(where.parent)


@lru_cache(maxsize=1024)
def _delete_left_over(folder: Path) -> None:
    """Delete the partial files of killed writers in a folder, where they would keep what its files no longer hold, such
    as the rows of somebody who has withdrawn. Once per process, since a large folder takes long to list."""
    with suppress(OSError):
        for path in folder.glob(".*.partial"):
            with suppress(OSError):  # another user's, or deleted by another process meanwhile
                # A folder of this name is an export's, which deletes it itself.
                if _PARTIAL.fullmatch(path.name) and path.is_file() and time.time() - path.stat().st_mtime > PARTIAL_S:
                    path.unlink()


def flush(path: Path) -> None:
    """Force a file's bytes, or the names in a folder, to the disk (fsync)."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some file systems cannot sync a folder, and keep its names by other means; one may be write-only too.
        if error.errno not in _NOT_FOR_FOLDERS or not path.is_dir():
            raise


def lock(path: Path, echo: Echo = say) -> TextIO:
    """Open and lock a file, until it is closed or the process ends, however it ends; where the file system has no
    locks, `echo` says so. Raises BlockingIOError if another process holds the lock; its `strerror` names that one; and
    OSError if the file is a link."""
    import fcntl

    # Never through a link, which others may have left in a shared folder: what it names would be overwritten.
    try:
        file = os.fdopen(
            os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a+", encoding="utf-8"
        )
    except OSError as error:
        if error.errno == errno.ELOOP:
            error.strerror = f"its lock {path.name} is a symbolic link"
        raise
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        with file:
            file.seek(0)
            raise BlockingIOError(error.errno, file.read().strip() or "unknown", str(path)) from None
    except OSError as error:  # as on some network file systems
        echo(f"{path.parent}: cannot be locked here ({error.strerror}); let no other process write into it meanwhile")
    # Only now that the lock is held: until then the file names its holder. On a full disk it names nobody.
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    with suppress(OSError):
        file.truncate(0)
        os.write(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()} since {now}\n".encode())
    return file


@dataclass(frozen=True, order=True)
class BucketPath:
    """An address of an object or a prefix, with those methods of pathlib that make sense for it.

    Not os.PathLike: code that needs a disk fails at once, not halfway.
    """

    scheme: str
    inside: PurePosixPath
    """bucket/key"""
    facts: bucket.Object | None = field(default=None, compare=False)
    """Size and version of the object, or of the archive that it is in; None if no listing gave them."""

    @staticmethod
    def of(uri: str) -> "BucketPath":
        """Parse scheme://bucket/key. Raises BucketError; ConfigError for credentials in the address."""
        scheme, _, rest = uri.partition("://")
        if not is_bucket(rest.split("/")[0]):
            refuse_credentials(uri)
            raise BucketError(f"{scheme}://…: expected the name of a bucket, {scheme}://bucket/…")
        if not rest.strip("/"):
            raise BucketError(f"{uri}: expected the name of a bucket, {scheme}://bucket/…")
        return BucketPath(scheme, PurePosixPath(rest))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.inside}"

    def __truediv__(self, name: "str | PurePosixPath") -> "BucketPath":
        return BucketPath(self.scheme, self.inside / str(name).lstrip("/"))

    @property
    def name(self) -> str:
        return self.inside.name

    @property
    def stem(self) -> str:
        return self.inside.stem

    @property
    def suffix(self) -> str:
        return self.inside.suffix

    @property
    def parent(self) -> "BucketPath":
        return BucketPath(self.scheme, self.inside.parent)

    @property
    def parents(self) -> tuple["BucketPath", ...]:
        return tuple(BucketPath(self.scheme, parent) for parent in list(self.inside.parents)[:-1])

    def with_name(self, name: str) -> "BucketPath":
        return BucketPath(self.scheme, self.inside.with_name(name))

    def with_suffix(self, suffix: str) -> "BucketPath":
        return BucketPath(self.scheme, self.inside.with_suffix(suffix))

    def is_relative_to(self, other: Any) -> bool:
        return (
            isinstance(other, BucketPath) and other.scheme == self.scheme and self.inside.is_relative_to(other.inside)
        )

    def relative_to(self, other: "BucketPath") -> PurePosixPath:
        return self.inside.relative_to(other.inside)

    def is_file(self) -> bool:
        try:
            bucket.stat(str(self))
        except FileNotFoundError:
            return False
        return True

    def exists(self) -> bool:
        """Whether this is an object or a prefix of objects."""
        return self.is_file() or self.is_dir()

    def is_dir(self) -> bool:
        return next(self.iterdir(), None) is not None

    def iterdir(self) -> Iterator["BucketPath"]:
        """All objects below this prefix, at any depth: a bucket has no folders."""
        return (BucketPath.of(uri) for uri in sorted(bucket.find(str(self))))

    def mkdir(self, **_: Any) -> None:
        """Does nothing: a prefix exists once it has an object."""

    def read_bytes(self) -> bytes:
        return bucket.read(str(self))

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        bucket.write(str(self), data)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok and not self.is_file():
            raise FileNotFoundError(f"{self}: no such object")
        bucket.delete(str(self))


Location = Path | BucketPath


def existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(p for p in (folder, *folder.parents) if p.exists())


def unwritable(folder: Location, *, deletes: bool = True) -> str:
    """Why no file can be written in the folder, or in its nearest parent that exists; empty if one can, which was
    written, read back and deleted. `deletes`: whether a bucket must allow deletion, too. Raises BucketError."""
    parent = folder
    try:
        parent = folder if isinstance(folder, BucketPath) else existing(folder)
        if isinstance(parent, Path) and not parent.is_dir():
            return f"{parent} is a file, expected a folder"
        probe = parent / f".octfm-probe.{os.getpid()}.{secrets.token_hex(4)}.partial"
        write_whole(probe, b"octfm")
        same = probe.read_bytes() == b"octfm"
        try:
            probe.unlink()
        except BucketError:
            if deletes:
                raise
    except OSError as error:
        return f"{parent} cannot be written: {error.strerror or error}"
    return "" if same else f"{parent} returns other bytes than were written"


def expect_writable(folder: Location) -> None:
    """Raises ConfigError if the folder is `unwritable`: call it before work whose result would be lost. A bucket need
    not allow deletion; the file that was tried is then left there."""
    if problem := unwritable(folder, deletes=False):
        raise ConfigError(f"{problem}; choose another folder, free some space, or change the permissions")


def holds_other(folder: Location, own: str) -> bool:
    """Whether a folder has files but not `own`. A leading dot does not count: a lock, the file of a killed writer."""
    if (folder / own).is_file() or not folder.is_dir() or all(p.name[0] == "." for p in folder.iterdir()):
        return False
    return not (folder / own).is_file()  # once more: another process may have begun there between the two
