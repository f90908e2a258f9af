"""Read, write, list and delete objects in buckets: s3:// (any endpoint) and gs://, through fsspec.

Every request has a time limit, is retried with back-off (Patience) and counted (Tally); contents are verified. The
libraries' own retries are switched off, so that there is one policy and every failed request is counted. Credentials
and endpoints come from the standard environment (botocore's and google-auth's chains, AWS_ENDPOINT_URL,
STORAGE_EMULATOR_HOST) and never appear in messages. fsspec and its drivers are imported on first use.
"""

import base64
import functools
import hashlib
import os
import platform
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from octfm.addresses import is_bucket, mask, refuse_credentials
from octfm.errors import BucketError, reason_of

T = TypeVar("T")
R = TypeVar("R")

SCHEMES = {"s3": ("s3fs", "s3"), "gs": ("gcsfs", "gcs")}
"""Scheme -> driver, and the extra of octfm that installs it."""
PIECE = 16 * 2**20
"""Larger objects are read in parallel pieces of this size, each retried on its own."""
ONE_REQUEST = 32 * 2**20
"""Larger objects are written in parts."""
AT_ONCE = 8
"""Pieces of one object read at the same time."""


@dataclass(frozen=True)
class Patience:
    """How often a request is retried: exponential back-off with full jitter.

    M. Brooker, "Exponential backoff and jitter", AWS 2015.
    """

    attempts: int = 10
    first_s: float = 0.2
    longest_s: float = 30.0

    def pause(self, failures: int) -> float:
        """Seconds before the next attempt. On average the pauses of all attempts add up to about 40 seconds."""
        return random.uniform(0, min(self.longest_s, self.first_s * 2**failures))


PATIENCE = Patience()


@dataclass(frozen=True)
class Object:
    """Size and version of an object, as in a listing."""

    size: int
    version: str
    """ETag or generation, which change with the content."""


@dataclass
class Tally:
    """Counts of requests and bytes."""

    requests: int = 0
    retries: int = 0
    """Requests repeated after a failure."""
    failures: int = 0
    """Requests given up after Patience.attempts."""
    bytes_read: int = 0
    bytes_written: int = 0

    def __sub__(self, other: "Tally") -> "Tally":
        return Tally(**{field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)})

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


_TALLY, _LOCK = Tally(), threading.Lock()


def tally() -> Tally:
    """Counts of this process so far."""
    with _LOCK:
        return Tally(**asdict(_TALLY))


@dataclass(frozen=True)
class Counted:
    """A result from another process, with the requests it took there."""

    result: Any
    spent: Tally


def _counting(function: Callable[[T], R], home: tuple[str, int], item: T) -> Counted:
    """`function(item)` as `Counted`. `home`: the calling process, whose own requests `tally` counts already."""
    before = tally()
    result = function(item)
    return Counted(result, tally() - before if _process() != home else Tally())


def _process() -> tuple[str, int]:
    return platform.node(), os.getpid()


class Account:
    """Counts the requests of a piece of work on `places` over all of its processes, if any place is in a bucket."""

    def __init__(self, *places: object):
        self._open = any("://" in str(place) for place in places)
        self._before, self._elsewhere = tally(), Tally()

    def counting(self, function: Callable[[T], R]) -> Callable[[T], R]:
        """Wrap a function that will run in other processes; pass its results through `counted`."""
        return cast(Callable[[T], R], functools.partial(_counting, function, _process())) if self._open else function

    def counted(self, results: Iterable[R]) -> Iterator[R]:
        """Unwrap the results and add up their requests."""
        for result in results:
            if isinstance(result, Counted):
                self._elsewhere += result.spent
                yield cast(R, result.result)
            else:
                yield result

    def close(self) -> dict[str, int]:
        """The counts as a dict; empty for work on local disks, and after the first call."""
        if not self._open:
            return {}
        self._open = False
        return asdict(tally() - self._before + self._elsewhere)


# ---- requests ----------------------------------------------------------------------------------------------------


def find(uri: str) -> dict[str, Object]:
    """List all objects below a prefix: uri -> size and version. Folder markers are left out."""
    scheme, prefix = uri.split("://", 1)[0], uri.rstrip("/") + "/"
    listing = _patiently("list it", uri, lambda: _driver(scheme).find(prefix, detail=True))
    found = {f"{scheme}://{key}": _object(info) for key, info in listing.items() if info.get("type") == "file"}
    # s3fs lists an object as if it were below itself.
    return {key: facts for key, facts in found.items() if key.startswith(prefix) and not key.endswith("/")}


def stat(uri: str) -> Object:
    """Size and version of an object. Raises FileNotFoundError."""
    info = _patiently("look it up", uri, lambda: _driver_of(uri).info(uri))
    if info.get("type") != "file":
        raise FileNotFoundError(f"{uri}: no such object")
    return _object(info)


def read(uri: str, start: int = 0, end: int | None = None) -> bytes:
    """Bytes [start, end) of an object, or all; never fewer, since a truncated response is retried."""
    if end is None:
        end = stat(uri).size
    if end <= start:
        return b""
    if end - start <= PIECE:
        return _read_piece(uri, start, end)
    bounds = [(at, min(at + PIECE, end)) for at in range(start, end, PIECE)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return b"".join(pool.map(lambda bound: _read_piece(uri, *bound), bounds))


def download(uri: str, file: Path, size: int) -> None:
    """Download an object of `size` bytes to a local file, in parallel pieces."""
    with file.open("wb") as handle, ThreadPoolExecutor(AT_ONCE) as pool:
        # The full length first: pieces arrive in any order, each at its own offset.
        handle.truncate(size)
        descriptor = handle.fileno()

        def fetch(at: int) -> None:
            piece = memoryview(_read_piece(uri, at, min(at + PIECE, size)))
            # On a disk that fills up, a write may end early without an error; only the next one has one.
            while piece:
                written = os.pwrite(descriptor, piece, at)
                piece, at = piece[written:], at + written

        list(pool.map(fetch, range(0, size, PIECE)))
        if size > PIECE:
            # After a power cut a file that had its full length from the start could hold zeros.
            os.fsync(descriptor)


def write(uri: str, data: bytes, *, create: bool = False) -> None:
    """Write an object, which appears whole or not at all, and verify what the bucket holds.

    create: raise FileExistsError if it exists. This is a conditional request; endpoints without support overwrite.
    """
    mode = {"mode": "create"} if create else {}
    md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
    _put(uri, len(data), md5, lambda: _driver_of(uri).pipe_file(uri, data, **mode))


def upload(file: Path, uri: str) -> None:
    """Upload a local file, in parts if it is large, and verify what the bucket holds."""
    size = file.stat().st_size
    if size <= ONE_REQUEST:
        return write(uri, file.read_bytes())
    with file.open("rb") as handle:
        md5 = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    _put(uri, size, md5, lambda: _driver_of(uri).put_file(str(file), uri))


def delete(uri: str) -> None:
    """Delete an object; do nothing if it does not exist."""

    def remove() -> None:
        with suppress(FileNotFoundError):
            _driver_of(uri).rm_file(uri)

    _patiently("delete it", uri, remove)


# ---- one policy --------------------------------------------------------------------------------------------------


def _read_piece(uri: str, start: int, end: int) -> bytes:
    def get() -> bytes:
        data = _driver_of(uri).cat_file(uri, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"{len(data):,} of {end - start:,} bytes arrived")
        return data

    data = _patiently("read it", uri, get)
    with _LOCK:
        _TALLY.bytes_read += len(data)
    return data


def _put(uri: str, size: int, md5: str, send: Callable[[], None]) -> None:
    """Send an object, verify what arrived, and count its bytes."""

    def put() -> None:
        send()
        _expect_arrived(uri, size, md5)

    _patiently("write it", uri, put)
    with _LOCK:
        _TALLY.bytes_written += size


def _expect_arrived(uri: str, size: int, md5: str) -> None:
    """Raise OSError if the bucket holds other bytes, by the checksum that it states or by reading them back."""
    info = _driver_of(uri).info(uri)
    if info["size"] != size:
        raise OSError(f"{info['size']:,} of {size:,} bytes arrived")
    # An S3 ETag is the MD5 only for single-part uploads without customer keys, and it does not say which it is:
    # equality proves the content, a difference proves nothing.
    stated = base64.b64decode(info["md5Hash"]).hex() if "md5Hash" in info else str(info.get("ETag", "")).strip('"')
    if stated == md5:
        return
    digest = hashlib.md5(usedforsecurity=False)
    for at in range(0, size, PIECE):
        digest.update(_driver_of(uri).cat_file(uri, start=at, end=min(at + PIECE, size)))
    if digest.hexdigest() != md5:
        raise OSError("the bytes in the bucket differ from those sent")


def _patiently(verb: str, uri: str, request: Callable[[], T]) -> T:
    """Run `request`, retrying transient failures. Raises FileNotFoundError, FileExistsError or BucketError; ConfigError
    for credentials before the name of the bucket."""
    if not is_bucket(uri.partition("://")[2].split("/")[0]):
        refuse_credentials(uri)
    uri = mask(uri)
    if not re.match(r"[a-z0-9]+://[^/]", uri):
        raise BucketError(
            f"{uri}: expected the name of a bucket after the scheme, as in {uri.partition(':')[0]}://bucket/…"
        )
    start = time.monotonic()
    for failures in range(PATIENCE.attempts):
        with _LOCK:
            _TALLY.requests += 1
            _TALLY.retries += failures > 0
        try:
            return request()
        except (FileNotFoundError, FileExistsError) as error:
            if verb in ("list it", "write it") and isinstance(error, FileNotFoundError):
                raise BucketError(f"{uri}: cannot {verb}: there is no such bucket; check its name") from None
            found = "no such object" if isinstance(error, FileNotFoundError) else "already exists"
            raise type(error)(f"{uri}: {found}") from None
        except Exception as error:
            # The libraries' exceptions share no base class. Those that come from elsewhere are bugs, and pass through.
            if not _from_outside(error):
                raise
            last = _one_line(error)
            if advice := _advice(error, last):
                _connect.cache_clear()  # a driver keeps the credentials that it began with, also none
                raise BucketError(f"{uri}: cannot {verb}: {last}; {advice}") from None
        if failures + 1 < PATIENCE.attempts:
            time.sleep(PATIENCE.pause(failures))
    with _LOCK:
        _TALLY.failures += 1
    _connect.cache_clear()
    raise BucketError(
        f"{uri}: cannot {verb}: {PATIENCE.attempts} attempts in {time.monotonic() - start:.0f} s failed, "
        f"the last with: {last}; check the network and the endpoint, and run the same command again"
    )


def _from_outside(error: Exception) -> bool:
    """Whether an exception may come from the network, the operating system or a bucket library."""
    libraries = {"aiohttp", "aiobotocore", "botocore", "gcsfs", "google", "requests", "urllib3", "fsspec", "s3fs"}
    return isinstance(error, OSError | ValueError | RuntimeError) or type(error).__module__.split(".")[0] in libraries


def _advice(error: Exception, text: str) -> str:
    """What to do about a permanent error; empty for one that a retry may overcome."""
    name = type(error).__name__
    refused = isinstance(error, PermissionError) or text.startswith("Forbidden")
    if refused or "Credential" in name or "NoSuchBucket" in text:
        return "check the bucket's name, and the credentials in the environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS)"
    if isinstance(error, IsADirectoryError | NotADirectoryError) or text.startswith("Bad Request"):
        return "check the address"
    if name in ("ParamValidationError", "InvalidRegionError", "UnknownEndpointError"):
        return "check the address, the region and the endpoint"
    return ""


_SECRET = re.compile(
    r"(?i)(x-amz-signature|x-amz-credential|x-amz-security-token|x-goog-signature|signature|access_token|token)=[^&\s]+"
)


def _one_line(error: Exception) -> str:
    """The error's message in one line, without secrets."""
    text = reason_of(error)
    for name, value in os.environ.items():
        # A shorter value would occur in ordinary words by chance.
        if len(value) >= 6 and re.search(r"SECRET|TOKEN|ACCESS_KEY|PASSWORD|CREDENTIAL", name):
            text = text.replace(value, f"${name}")
    return _SECRET.sub(r"\1=…", mask(text))[:300]


# ---- drivers -----------------------------------------------------------------------------------------------------


def _driver_of(uri: str) -> Any:
    return _driver(uri.split("://", 1)[0])


def _driver(scheme: str) -> Any:
    # One driver per process, as connections do not survive a fork, and per endpoint.
    return _connect(scheme, os.getpid(), os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("STORAGE_EMULATOR_HOST"))


@functools.lru_cache(maxsize=8)
def _connect(scheme: str, process: int, *endpoints: str | None) -> Any:  # noqa: ARG001
    package, extra = SCHEMES[scheme]
    try:
        if scheme == "s3":
            from s3fs import S3FileSystem

            # botocore and s3fs each retry by themselves; one attempt in both leaves retrying to `_patiently`.
            config: dict[str, Any] = {"retries": {"total_max_attempts": 1}, "max_pool_connections": 64}
            config |= {"connect_timeout": 15, "read_timeout": 60}
            driver = S3FileSystem(config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)
            driver.retries = 1
            return driver
        return _once_gcs()(use_listings_cache=False, skip_instance_cache=True)
    except ImportError:
        raise BucketError(f"{scheme}:// needs {package}; install it with: pip install 'octfm[{extra}]'") from None


@functools.cache
def _once_gcs() -> type:
    """gcsfs without its own retries, which would not be counted and would differ from those of S3.

    This is the class for the JSON API. The one for hierarchical buckets queries a second service about every bucket,
    which emulators do not have.
    """
    from urllib.parse import quote

    from gcsfs.core import GCSFileSystem

    class Once(GCSFileSystem):
        _request = GCSFileSystem._request.__wrapped__  # pyright: ignore[reportFunctionMemberAccess]

        async def _pipe_file(self, path, data, mode="overwrite", **kwargs):
            if not data or len(data) > ONE_REQUEST:
                return await super()._pipe_file(path, data, mode=mode, **kwargs)
            # A media upload sends the bytes alone; a multipart body would end at any line that equals its boundary.
            name, key, _ = self.split_path(path)
            only_new: Any = {"ifGenerationMatch": "0"} if mode == "create" else {}
            address = f"{self._location}/upload/storage/v1/b/{quote(name)}/o"
            kind = {"Content-Type": "application/octet-stream"}
            await self._call("POST", address, uploadType="media", name=key, headers=kind, data=data, **only_new)

    return Once


def _object(info: dict[str, Any]) -> Object:
    keys = ("ETag", "generation", "etag", "md5Hash", "mtime", "LastModified")
    version = next((str(info[key]) for key in keys if info.get(key)), "")
    return Object(int(info["size"] or 0), version.strip('"'))
