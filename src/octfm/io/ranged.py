"""Bucket objects as seekable streams: headers by range requests, the whole object (cached) once much of it is read."""

import io
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

from octfm.io import bucket, bucket_cache
from octfm.io.location import BucketPath, is_remote

HEAD = 128 * 2**10
"""First bytes of an object, fetched in one request and cached: they hold the header of nearly every volume."""
BLOCK = 16 * 2**10
"""Size of further requests."""
MANY = 6
"""After this many blocks the whole object is fetched: a reader that skips through compressed pixels, where every frame
is preceded by its length, would otherwise send a request per frame."""
AT_ONCE = 32
"""Heads fetched at the same time: the latency of a bucket is long, but it serves many requests in parallel."""
LISTED_S, LOOKED_UP_S = 300.0, 10.0
"""Seconds for which size and version are remembered: of a listing, for the scan of its files; of one object, for its
readers and for the members of an archive."""

_KNOWN: dict[str, tuple[bucket.Object, float]] = {}
"""uri -> facts, and the time until which they hold."""


@contextmanager
def open_binary(where: str | Path | BucketPath, *, whole: bool = False, in_place: bool = False) -> Iterator[BinaryIO]:
    """Open a file or an object as a seekable stream.

    whole: all of an object will be read, so fetch it now.
    in_place: never fetch all of an object, as an archive may be larger than the disk.
    """
    if not is_remote(where):
        with Path(cast("str | Path", where)).open("rb") as file:
            yield file
        return
    uri, found = str(where), known(str(where))
    if whole:
        with bucket_cache.local_copy(uri, found) as path, path.open("rb") as file:
            yield file
        return
    with Ranged(uri, found, in_place) as raw, io.BufferedReader(raw) as file:
        yield cast(BinaryIO, file)


def remember(uri: str, found: bucket.Object, seconds: float = LISTED_S) -> None:
    """Keep the size and version from a listing, which saves a request later."""
    _KNOWN[uri] = (found, time.monotonic() + seconds)


def is_prefix(uri: str) -> bool:
    """Whether this is not an object, but there are objects below it."""
    try:
        known(uri)
    except FileNotFoundError:
        return bool(directly_below(uri))
    return False


def directly_below(uri: str) -> list[str]:
    """Sorted uris of the objects of a prefix, without those of prefixes further down."""
    found = bucket.find(uri)
    for below, facts in found.items():
        remember(below, facts)
    return sorted(below for below in found if "/" not in below[len(uri.rstrip("/")) + 1 :])


def known(uri: str) -> bucket.Object:
    """Size and version of an object, remembered or requested. Raises FileNotFoundError."""
    found, until = _KNOWN.get(uri, (None, 0.0))
    if found is None or time.monotonic() > until:
        found = bucket.stat(uri)
        remember(uri, found, LOOKED_UP_S)
    return found


def fetch_heads(objects: Mapping[str, bucket.Object]) -> None:
    """Fetch the head of each object into the cache, many at a time, before readers open them one by one."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(_head, objects, objects.values()))


class Positioned(io.RawIOBase):
    """A stream of so many bytes that knows its position; subclasses read."""

    def __init__(self, name: str, size: int):
        super().__init__()
        self.name = name  # required by pydicom
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._at = base + offset
        return self._at


class Ranged(Positioned):
    """Stream that reads an object in blocks, its head from the cache."""

    def __init__(self, uri: str, found: bucket.Object, in_place: bool):
        super().__init__(uri, found.size)
        self._uri, self._found, self._in_place = uri, found, in_place
        self._head, self._blocks = b"", {}
        self._block = HEAD if in_place else BLOCK  # in an archive a block elsewhere is the head of another member
        self._whole: BinaryIO | None = None
        self._open = ExitStack()

    def readinto(self, buffer) -> int:
        end = min(self._at + len(buffer), self._found.size)
        if end <= self._at:
            return 0
        data = self._read(self._at, end)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._open.close()
        super().close()

    def _read(self, start: int, end: int) -> bytes:
        if self._whole is None and len(self._blocks) >= MANY and not self._in_place:
            path = self._open.enter_context(bucket_cache.local_copy(self._uri, self._found))
            self._whole = self._open.enter_context(path.open("rb"))
        if self._whole is not None:
            self._whole.seek(start)
            return self._whole.read(end - start)
        if start < HEAD:
            self._head = self._head or _head(self._uri, self._found)
            # readinto may return fewer bytes than requested; the next call goes on behind the head.
            return self._head[start:end]
        if end - start > self._block:
            return bucket.read(self._uri, start, end)
        number = (start - HEAD) // self._block
        first = HEAD + number * self._block
        if number not in self._blocks:
            if self._in_place and len(self._blocks) >= MANY:
                # The oldest block: archives are read forwards.
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[number] = bucket.read(self._uri, first, min(first + self._block, self._found.size))
        return self._blocks[number][start - first : end - first]


def _head(uri: str, found: bucket.Object) -> bytes:
    size, key = min(HEAD, found.size), bucket_cache.key(f"{uri}#head", found)
    with bucket_cache.kept(key, size, lambda file: bucket.download(uri, file, size)) as path:
        return path.read_bytes()
