"""One writer at a time in a bucket, as far as a bucket can tell: an object that its owner renews and that others respect.

A lock on a disk ends with its process; nothing does that in a bucket. So the owner renews the lease, a lease that was not renewed for
STALE_S may be taken over, and an owner that finds another's name in it stops writing. Endpoints with conditional requests (S3, GCS) let
only one of two simultaneous claimants begin; with others the second to write wins, and the first notices at its next renewal.
"""

import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Self

from octfm.errors import BucketError
from octfm.io import bucket
from octfm.io.location import BucketPath

RENEW_S = 30.0
STALE_S = 180.0


class Lease:
    """Held from `with` to its end. `lost` tells that somebody else has taken over."""

    def __init__(self, where: BucketPath, purpose: str):
        self._uri, self._purpose = str(where), purpose
        self._owner = f"{socket.gethostname()} process {os.getpid()} {secrets.token_hex(4)}"
        self._end, self.lost = threading.Event(), False

    def __enter__(self) -> Self:
        if self._read():
            self._take_over()
        else:
            with suppress(FileExistsError):  # whose it is shows in a moment
                bucket.write(self._uri, self._content(), create=True)
        self._expect_mine()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="octfm-lease")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        with suppress(BucketError):  # then it goes stale by itself
            if not self.lost and self._read().get("owner") == self._owner:
                bucket.delete(self._uri)

    def require(self) -> None:
        """Raises BucketError once another process has taken over."""
        if self.lost:
            raise BucketError(
                f"{self._uri}: another process has taken over {self._purpose}; this one stops, so that two do not mix"
            )

    def _take_over(self) -> None:
        """Ages are told by the clocks of two machines, which are trusted to agree within a minute."""
        found = self._read()
        renewed = found.get("renewed", 0.0)
        if time.time() - renewed < STALE_S:
            raise BucketError(
                f"{self._uri}: {found.get('owner', 'another process')} is at {self._purpose}; wait for it or stop it. If it was killed, "
                f"the same command works {STALE_S:.0f} s after its last sign of life, or as soon as this object is deleted"
            )
        bucket.write(self._uri, self._content())

    def _expect_mine(self) -> None:
        if (owner := self._read().get("owner")) != self._owner:
            raise BucketError(f"{self._uri}: {owner} was faster and is at {self._purpose}; wait for it or stop it")

    def _renew(self) -> None:
        while not self._end.wait(RENEW_S):
            try:
                if self._read().get("owner") not in (None, self._owner):
                    self.lost = True
                    return
                bucket.write(self._uri, self._content())
            except BucketError:
                continue  # the bucket is away for everybody; the next renewal tells

    def _content(self) -> bytes:
        return json.dumps({"owner": self._owner, "renewed": time.time()}).encode()

    def _read(self) -> dict:
        try:
            return json.loads(bucket.read(self._uri))
        except (FileNotFoundError, ValueError):
            return {}
