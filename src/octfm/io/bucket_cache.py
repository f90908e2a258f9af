"""Cache of bucket objects on the local disk, shared by processes, with the least recently used evicted.

The folder is $OCTFM_CACHE, by default octfm in the user's cache folder; the limit is $OCTFM_CACHE_GB, by default 50. A
file is named by a hash of the object's address, size and version, so a changed object is another file. Files appear
whole or not at all. Readers hold a shared lock (flock) on theirs, and eviction skips locked files.
"""

import fcntl
import math
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from octfm.errors import BucketError
from octfm.io import bucket
from octfm.io.hashing import hash_text

DEFAULT_GB = 50.0
KEEP = 0.9
"""Eviction goes down to this share of the limit, so that not every new file triggers another one."""
GRACE_S = 3600.0
"""Age in seconds at which partial files of dead processes are deleted."""
REMEDY = "set OCTFM_CACHE to a folder on a local disk"


def folder() -> Path:
    """The cache folder, created if it does not exist. Raises BucketError if it cannot be."""
    try:
        named = os.environ.get("OCTFM_CACHE")
        place = Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octfm"
    except RuntimeError:  # in a container, whose user may have no name and no HOME
        raise BucketError(f"buckets need a cache, and this user has no home folder for it; {REMEDY}") from None
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BucketError(f"{place}: the cache of buckets cannot be written ({error.strerror}); {REMEDY}") from None
    return place


def limit_bytes() -> int:
    """The most bytes that the cache may hold. Raises BucketError."""
    text = os.environ.get("OCTFM_CACHE_GB", str(DEFAULT_GB))
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not 0 < limit < math.inf:
        raise BucketError(f"OCTFM_CACHE_GB: expected a number of gigabytes above 0, got {text!r}")
    return int(limit * 1e9)


@contextmanager
def local_copy(uri: str, found: bucket.Object | None = None) -> Iterator[Path]:
    """A local file with the object's bytes, not evicted while the context lasts.

    `found`, if known from a listing, saves a request. Raises FileNotFoundError, BucketError.
    """
    found = found or bucket.stat(uri)
    with kept(key(uri, found), found.size, lambda file: bucket.download(uri, file, found.size)) as path:
        yield path


def key(uri: str, found: bucket.Object) -> str:
    """File name of this version of an object."""
    return hash_text(f"{uri}\0{found.size}\0{found.version}")


@contextmanager
def kept(name: str, size: int, make: Callable[[Path], None]) -> Iterator[Path]:
    """The cached file of this name, created by `make` if absent or truncated; not evicted while the context lasts."""
    path = folder() / "objects" / name[:2] / name
    # Only once the file is made can it be locked, and it may have been evicted in between.
    while (handle := _locked(path, size)) is None:
        _make_room(size)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            make(partial)
            with _book():  # where another process was faster, its file may have readers, who have locked that one
                if not (path.is_file() and path.stat().st_size == size):
                    partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    with handle:
        yield path


def _locked(path: Path, size: int) -> BinaryIO | None:
    """A cached file, open and locked against eviction; None if it is absent, or truncated and now deleted."""
    with suppress(FileNotFoundError), ExitStack() as opened:
        handle = opened.enter_context(path.open("rb"))
        # Between open and flock the file may have been evicted: then it has no links left, and is made again.
        fcntl.flock(handle, fcntl.LOCK_SH)
        found = os.fstat(handle.fileno())
        if found.st_nlink and found.st_size == size:
            os.utime(path)  # file systems are often mounted without access times
            opened.pop_all()
            return handle
        # Only a truncated file that still has the name: what has it by now may be one that another process has made.
        if found.st_nlink:
            path.unlink(missing_ok=True)
    return None


def _make_room(size: int) -> None:
    """Delete the least recently used files until `size` more bytes are within the limit. One process at a time."""
    limit = limit_bytes()
    if size > limit:
        raise BucketError(
            f"{folder()}: an object of {size / 1e9:.2f} GB does not fit into the cache of {limit / 1e9:.2f} GB; "
            "raise OCTFM_CACHE_GB"
        )
    with _book() as book:
        book.seek(0)
        text = book.read()
        # A running total: adding up all files for each new one would take longer than fetching it.
        # Without a valid total the cache counts as full, so that `_shrink` adds up all files.
        used = int(text) if text.isdigit() else limit
        if used + size > limit:
            used = _shrink(int(limit * KEEP) - size)
        book.truncate(0)
        book.write(str(used + size))


@contextmanager
def _book() -> Iterator[TextIO]:
    """The file with the running total; while a process has it open, no other one adds or evicts a file."""
    place = folder()
    try:
        with (place / "used").open("a+", encoding="utf-8") as book:
            fcntl.flock(book, fcntl.LOCK_EX)
            yield book
    except OSError as error:
        raise BucketError(
            f"{place}: the cache of buckets cannot be written or locked ({error.strerror}); {REMEDY}"
        ) from None


def _shrink(target: int) -> int:
    """Delete the least recently used files until at most `target` bytes are left; return the bytes left."""
    files, total = [], 0
    for path in (folder() / "objects").glob("??/*"):
        with suppress(FileNotFoundError):
            found = path.stat()
            if path.name.startswith(".") and found.st_mtime < time.time() - GRACE_S:
                path.unlink()
                continue
            total += found.st_size
            files.append((found.st_mtime_ns, found.st_size, path))
    for _, length, path in sorted(files):
        if total <= target:
            break
        if not path.name.startswith(".") and _evicted(path):
            total -= length
    return total


def _evicted(path: Path) -> bool:
    """Delete a file unless a reader has it locked; return whether it is gone."""
    try:
        with path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
