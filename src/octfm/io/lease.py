"""A lock in a bucket: an object that names its owner, who renews it; others do not write while it is fresh.

A lock on a disk is released when its process dies; a bucket has nothing like that. So the owner renews the lease every
RENEW_S, a lease not renewed for STALE_S may be taken over, and an owner that finds another name in it stops writing. If
two processes claim it at the same moment, endpoints with conditional requests (S3, GCS) let only one begin; with others
the second to write wins, and the first notices at its next renewal. Clocks decide only that a lease is fresh: one that
looks stale is watched for WATCH_S before it is taken over.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import AbstractContextManager, suppress
from typing import Any, Self

from octfm.errors import BucketError, OctfmError
from octfm.io import bucket
from octfm.io.location import BucketPath, Location, lock
from octfm.io.progress import say

RENEW_S = 30.0
STALE_S = 180.0
WATCH_S = 45.0
"""Seconds to watch a lease that looks stale before it is taken over: a live owner renews it meanwhile, whatever its
clock says."""
SETTLE_S = 3.0
"""Seconds to wait after taking over a stale lease: others that found the same one have written theirs by then."""


def only_one(output: Location, guard: Location, purpose: str, refused: type[OctfmError]) -> AbstractContextManager[Any]:
    """A context in which no other process writes to `output`, held by the lock of the file `guard`, or in a bucket by a
    lease of that name. When a process is killed its lock ends at once, its lease after STALE_S.

    Raises `refused`, which says that the other process is `purpose`, and BucketError in a bucket.
    """
    if isinstance(guard, BucketPath):
        return Lease(guard, purpose)
    try:
        return lock(guard)
    except BlockingIOError as error:
        raise refused(
            f"{output}: another process ({error.strerror}) is {purpose}; wait for it, or choose another --out"
        ) from None


class Lease:
    """Context manager that holds the lock; `lost` is True once another process has taken over. Raises BucketError."""

    def __init__(self, where: BucketPath, purpose: str):
        self._uri, self._purpose = str(where), purpose
        self._owner = f"{socket.gethostname()} process {os.getpid()} {secrets.token_hex(4)}"
        self._end, self.lost = threading.Event(), False

    def __enter__(self) -> Self:
        if (found := self._read()) and self._is_stale(found):
            bucket.write(self._uri, self._content())
            # Unlike a new lease, it may be taken by several: the last to write keeps it, as `_expect_mine` finds.
            time.sleep(SETTLE_S)
        else:
            with suppress(FileExistsError):  # another process was faster, as _expect_mine will find
                bucket.write(self._uri, self._content(), create=True)
        self._expect_mine()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="octfm-lease")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        with suppress(BucketError):  # if it cannot be deleted it becomes stale
            if not self.lost and self._read().get("owner") == self._owner:
                bucket.delete(self._uri)

    def require(self) -> None:
        """Raise BucketError if another process has taken over."""
        if self.lost:
            raise BucketError(
                f"{self._uri}: another process has taken over {self._purpose}; this one stops, so that only one writes"
            )

    def _is_stale(self, found: dict) -> bool:
        """Whether this lease may be taken over; False if it has been deleted. Raises BucketError if it is fresh."""
        # The age compares the clocks of two machines, either of which may jump or be wrong by years.
        if abs(time.time() - found.get("renewed", 0.0)) >= STALE_S:
            say(f"{self._uri}: {found.get('owner', 'another process')} seems gone; watching for {WATCH_S:.0f} s")
            time.sleep(WATCH_S)
            if (now := self._read()) in (found, {}):
                return now == found
            found = now
        raise BucketError(
            f"{self._uri}: {found.get('owner', 'another process')} is {self._purpose}; wait for it or stop it. "
            f"If it was killed, the same command works {STALE_S:.0f} s after its last renewal, "
            "or once this object is deleted"
        )

    def _expect_mine(self) -> None:
        if (owner := self._read().get("owner", "another process")) != self._owner:
            raise BucketError(f"{self._uri}: {owner} was faster and is {self._purpose}; wait for it or stop it")

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            try:
                owner = self._read().get("owner")
                if owner not in (None, self._owner):
                    self.lost = True
                    return
                # None: somebody has deleted the object, or is writing it. What another owner writes stays.
                with suppress(FileExistsError):
                    bucket.write(self._uri, self._content(), create=owner is None)
            except BucketError:
                continue  # the bucket is unreachable; the next renewal shows whether the lease is still held

    def _content(self) -> bytes:
        # Always of one length: a reader asks for the size first, and a longer object would reach it cut off.
        return f'{{"owner": {json.dumps(self._owner)}, "renewed": {time.time():.3f}}}'.encode()

    def _read(self) -> dict:
        """The lease; {} if there is none. One that was read while it was written, or that is something else, has no
        owner and counts as stale, so that it is watched."""
        try:
            content = bucket.read(self._uri)
        except FileNotFoundError:
            return {}
        with suppress(ValueError):
            match json.loads(content):
                case {"owner": str(), "renewed": int() | float()} as found:
                    return found
        return {"unreadable": content}
