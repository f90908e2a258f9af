"""Functions of files that nobody vouches for, in child processes: a decoder that crashes, hangs or swallows memory ends its child only.

A child is a fresh interpreter that serves one file after the other and is replaced when it dies. Not a fork, which would copy threads,
locks and torch; not multiprocessing, which runs the caller's script again and is forbidden inside the workers of a cluster.

Children never import from the current folder, which may be where strangers' files lie: a json.py there would run in the place of Python's.
"""

import atexit
import contextlib
import json
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from octfm.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")

IDLE_S = 30.0
"""A child without work ends after this long, and gives its memory back."""

_START_S = 120.0
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "VECLIB_MAXIMUM")}
_HEAD = struct.Struct("<Q")
_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from octfm.io.isolation import serve; serve(int(sys.argv[2]))"
_HOME = Path(__file__).absolute().parents[2]
"""The folder that octfm is imported from, also where an editable install finds it without sys.path."""


@dataclass(frozen=True)
class Limits:
    """What one file may cost before its child is ended."""

    seconds: float = 10.0
    """For a file of any size, running or asleep but not waiting for a core; ..."""
    seconds_per_megabyte: float = 1.0
    """...and for every megabyte of it (million voxels, once they are known): ten times what JPEG 2000, the slowest codec, needs."""
    seconds_remote: float = 120.0
    """More for a file in a bucket, whose server may be slow or have to be asked again."""
    memory: int = 2 * 10**9
    """Bytes of heap and private mappings of the whole child (RLIMIT_DATA). Linux enforces it; elsewhere only time is limited."""

    def deadline(self, size: int, uri: str = "") -> float:
        """Seconds for a file of `size` bytes."""
        return self.seconds + self.seconds_per_megabyte * size / 1e6 + (self.seconds_remote if "://" in uri else 0)


@dataclass(frozen=True)
class Lost:
    """An item whose child ended before its result was there."""

    code: str
    """decoder_crashed, decoder_timeout or decoder_memory, of octfm.formats.reasons.REASONS."""
    what: str
    """What was seen, as the end of a sentence."""


def each(
    function: Callable[[T], R], items: Sequence[T], limits: Limits, deadline: Callable[[T], float]
) -> Iterator[R | Lost]:
    """`function` of every item, in a child; whatever ends the child costs the item that it was at, and another child goes on.

    `deadline` is in seconds and begins anew with every item. Function, items and results travel as pickles; what the function raises is
    raised here, except MemoryError.
    """
    done = 0
    while done < len(items):
        child = _borrow(limits.memory)
        try:
            child.send(function, items[done:])
            while done < len(items):
                result = child.receive(deadline(items[done]))
                done += 1
                yield result
                if child.ended:
                    break
        except BaseException:
            child.kill()  # it may be in the middle of something
            raise
        _give_back(child)


def release(keep: int = 0) -> None:
    """End all but `keep` of the children that wait for work."""
    with _lock:
        idle, _idle[:] = _idle[keep:], _idle[:keep]
    for child in idle:
        child.kill()


# ---- the parent's side -----------------------------------------------------------------------------------------------------------


class _Child:
    def __init__(self, memory: int):
        self.memory, self.ended, self.idle_since = memory, False, 0.0
        self.surroundings = _surroundings()
        # -P: the path that it starts with has no current folder either.
        start = [sys.executable, "-P", "-c", _START, json.dumps(import_path()), str(os.getpid())]
        environment = {**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(_python_path())}
        self._process = subprocess.Popen(
            start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._replies = self._process.stdin, self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._buffer = bytearray()
        self._write(pickle.dumps(memory))
        if isinstance(ready := self.receive(_START_S), Lost):
            raise RuntimeError(
                f"a child process for reading files did not start: it {ready.what}; see the lines above this one"
            )

    def send(self, function: Callable, items: Sequence) -> None:
        try:
            message = pickle.dumps((function, items))
        except (pickle.PicklingError, AttributeError, TypeError):
            message = b"__main__"
        if b"__main__" in message:  # the child has another main module, so such functions travel by value
            import cloudpickle

            message = cloudpickle.dumps((function, items))
        self._write(message)

    def receive(self, seconds: float) -> Any:
        """The next result; Lost, with the child ended, where there is none within `seconds`."""
        start, waited = time.monotonic(), self._waited_for_a_core()
        while True:
            if len(self._buffer) >= _HEAD.size:
                (length,) = _HEAD.unpack_from(self._buffer)
                if len(self._buffer) >= _HEAD.size + length:
                    message = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
                    del self._buffer[: _HEAD.size + length]
                    break
            left = seconds - (time.monotonic() - start)
            if left <= 0:
                left += self._waited_for_a_core() - waited
            if left <= 0:
                self.kill()
                return Lost("decoder_timeout", f"was not done after {seconds:g} s, and was ended")
            if not self._poll.poll(1000 * left + 1):
                continue
            if not (piece := os.read(self._replies, 2**16)):
                return self._died()
            self._buffer += piece
        error, result = pickle.loads(message)
        if isinstance(error, MemoryError):
            return Lost("decoder_memory", f"asked for more than {self.memory / 1e9:g} GB of memory")
        if error is not None:
            raise error
        return result

    def _waited_for_a_core(self) -> float:
        """Seconds that it could have run and other processes did: no fault of the file. 0 where the system does not tell."""
        try:
            # CPU time, time on a run queue (ns), time slices: Documentation/scheduler/sched-stats.rst
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text().split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def usable(self) -> bool:
        """Not about to leave by itself, and with what the parent has set since."""
        fresh = time.monotonic() - self.idle_since < IDLE_S / 2
        return fresh and self._process.poll() is None and self.surroundings == _surroundings()

    def kill(self) -> None:
        self.ended = True
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._close()

    def _died(self) -> Lost:
        self.ended = True
        status = self._process.wait()
        self._close()
        if status == -signal.SIGKILL:
            return Lost("decoder_memory", "was killed from outside, as the system does when memory runs out")
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        return Lost("decoder_crashed", f"ended with {how}")

    def _write(self, message: bytes) -> None:
        data = memoryview(_HEAD.pack(len(message)) + message)
        with contextlib.suppress(BrokenPipeError):  # it has died: `receive` says how
            while data:
                data = data[self._requests.write(data) :]

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        if self._process.stdout:
            self._process.stdout.close()


_idle: list[_Child] = []
_lock = threading.Lock()
atexit.register(release)
# A forked process must not talk to the children of its parent.
os.register_at_fork(after_in_child=_idle.clear)


def _borrow(memory: int) -> _Child:
    while True:
        with _lock:
            child = _idle.pop() if _idle else None
        if child is None:
            return _Child(memory)
        if child.memory == memory and child.usable():
            return child
        child.kill()


def _give_back(child: _Child) -> None:
    if child.ended:
        return
    child.idle_since = time.monotonic()
    with _lock:
        _idle.append(child)


def import_path() -> list[str]:
    """sys.path without the current folder, except where the user names that in PYTHONPATH in full, or runs a script that lies there.

    `python -m`, `python -c`, notebooks and an empty entry of PYTHONPATH put it there unasked.
    """
    wanted = {os.path.normpath(place) for place in _python_path()}
    main = sys.modules.get("__main__")
    if (script := getattr(main, "__file__", None)) is not None and getattr(main, "__spec__", None) is None:
        wanted.add(str(Path(script).absolute().parent))
    here = {os.path.normpath(Path.cwd()), os.path.realpath(Path.cwd())}

    def elsewhere(place: str) -> bool:
        return os.path.isabs(place) and not {os.path.normpath(place), os.path.realpath(place)} & here  # noqa: PTH117

    kept = [place for place in sys.path if os.path.normpath(place) in wanted or elsewhere(place)]
    return kept if str(_HOME) in kept else [*kept, str(_HOME)]


def _python_path() -> list[str]:
    """What PYTHONPATH names in full: an empty or relative entry means the current folder, wherever that is."""
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]  # noqa: PTH117


def _surroundings() -> tuple:
    """What a child inherits when it starts, and never hears of again: credentials, for one. (pytest puts the test's name there.)"""
    return (
        Path.cwd(),
        tuple(sys.path),
        {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
    )


# ---- the child's side ------------------------------------------------------------------------------------------------------------


def serve(parent: int) -> None:
    """Answer requests until the parent is gone or has nothing more to ask."""
    # Decoders print; what they print must not end among the answers.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    memory = pickle.loads(_read_message(requests))
    _limit(memory)
    _answer(replies, None, True)
    while True:
        if not select.select([requests], [], [], IDLE_S)[0]:
            return
        try:
            function, items = pickle.loads(_read_message(requests))
        except ImportError as error:
            _answer(replies, _not_importable(error), None)
            return
        for item in items:
            error, result = None, None
            try:
                result = function(item)
            except Exception as raised:
                error = raised
            _answer(replies, error, result)


def _not_importable(error: ImportError) -> ConfigError:
    return ConfigError(
        f"a child process cannot import what it should run ({error}); children do not import from the current folder: put the full path of "
        "the folder that has it into PYTHONPATH, or install it"
    )


def _limit(memory: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _answer(replies: int, error: BaseException | None, result: Any) -> None:
    try:
        message = pickle.dumps((error, result))
        if error is not None:
            pickle.loads(message)  # an exception with arguments of its own may be written and not be read
    except Exception as problem:
        message = pickle.dumps(
            (RuntimeError(f"{type(error).__name__}: {error}" if error else f"a result cannot travel: {problem}"), None)
        )
    data = memoryview(_HEAD.pack(len(message)) + message)
    while data:
        data = data[os.write(replies, data) :]


def _read_message(requests: int) -> bytes:
    (length,) = _HEAD.unpack(_read(requests, _HEAD.size))
    return _read(requests, length)


def _read(requests: int, count: int) -> bytes:
    pieces, left = [], count
    while left:
        piece = os.read(requests, min(left, 2**20))
        if not piece:
            _leave()
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)


def _leave() -> NoReturn:
    os._exit(0)


def _leave_with(parent: int) -> None:
    """Within a second of the parent's death, even in the middle of a file."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _leave()
