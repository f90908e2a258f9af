"""Objects of buckets on the local disk: whole or absent, shared by processes, the least recently used deleted when they take too much room.

The folder is $OCTFM_CACHE, else octfm below the user's cache folder; the limit $OCTFM_CACHE_GB, else 50. A file's name is a hash of the
object's address, size and version, so that an object that changed is another file.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from octfm.errors import BucketError
from octfm.io import bucket
from octfm.io.hashing import hash_text

DEFAULT_GB = 50.0
KEEP = 0.9
"""Share of the limit that is left when it was reached, so that not every new file has to make room."""
GRACE_S = 3600.0
"""Files that were being written when their process died are deleted after so long."""


def folder() -> Path:
    named = os.environ.get("OCTFM_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octfm"
    return Path(named) if named else home


def limit_bytes() -> int:
    text = os.environ.get("OCTFM_CACHE_GB", str(DEFAULT_GB))
    try:
        limit = float(text)
    except ValueError:
        limit = -1.0
    if not limit > 0:
        raise BucketError(f"OCTFM_CACHE_GB: expected a number of gigabytes above 0, got {text!r}")
    return int(limit * 1e9)


@contextmanager
def local_copy(uri: str, found: bucket.Object | None = None) -> Iterator[Path]:
    """A local file with the object's bytes, which stays at least as long as the context.

    `found`: what a listing says about it; without, the bucket is asked. Raises FileNotFoundError, BucketError.
    """
    found = found or bucket.stat(uri)
    with kept(key(uri, found), found.size, lambda file: bucket.download(uri, file, found.size)) as path:
        yield path


def key(uri: str, found: bucket.Object) -> str:
    return hash_text(f"{uri}\0{found.size}\0{found.version}")


@contextmanager
def kept(name: str, size: int, make: Callable[[Path], None]) -> Iterator[Path]:
    """The cached file of this name, made by `make` where it is absent or cut off; it is not evicted while the context lasts."""
    path = folder() / "objects" / name[:2] / name
    while True:
        with suppress(FileNotFoundError):
            with path.open("rb") as handle:
                # Eviction takes an exclusive lock first, and a file that was evicted in between has no name any more.
                fcntl.flock(handle, fcntl.LOCK_SH)
                if os.fstat(handle.fileno()).st_nlink and os.fstat(handle.fileno()).st_size == size:
                    os.utime(path)  # file systems are often mounted without access times
                    yield path
                    return
            path.unlink(missing_ok=True)
        _make_room(size)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            make(partial)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def _make_room(size: int) -> None:
    """Delete the least recently used files until `size` more bytes are within the limit. One process at a time."""
    limit = limit_bytes()
    if size > limit:
        raise BucketError(
            f"{folder()}: an object of {size / 1e9:.2f} GB does not fit into the cache of {limit / 1e9:.2f} GB; raise OCTFM_CACHE_GB"
        )
    folder().mkdir(parents=True, exist_ok=True)
    with (folder() / "used").open("a+") as book:
        fcntl.flock(book, fcntl.LOCK_EX)
        book.seek(0)
        text = book.read()
        # Counting every file for each new one would take longer than fetching it.
        used = int(text) if text.isdigit() else limit
        if used + size > limit:
            used = _shrink(int(limit * KEEP) - size)
        book.truncate(0)
        book.write(str(used + size))


def _shrink(target: int) -> int:
    """Delete the oldest until `target` bytes are left, and return how many are."""
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
    """Whether it could be deleted: not while somebody reads it."""
    try:
        with path.open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
