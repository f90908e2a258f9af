"""Run functions on untrusted files in child processes, since decoders may crash, hang or exhaust memory.

A child is a fresh interpreter that handles one file after the other and is replaced when it dies. It is not a fork,
which would copy threads, locks and torch, and not multiprocessing, which runs the caller's script again and is
forbidden inside the workers of a cluster. Children never import from the current folder, which may hold untrusted
files: a json.py there would replace Python's.
"""

import atexit
import contextlib
import errno
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
from typing import Any, BinaryIO, TypeVar

from octfm.errors import ConfigError
from octfm.io.heap import ENVIRONMENT
from octfm.threads import held_while_forking

T = TypeVar("T")
R = TypeVar("R")

IDLE_S = 30.0
"""An idle child exits after this long, which frees its memory."""

_START_S = 120.0
_FREE_MEMORY = "free memory, or choose fewer workers"
_RAISE_LIMIT = (
    "raise the limit of processes or files (ulimit -u, ulimit -n, or that of the container), or choose fewer workers"
)
_ADVICE = {errno.ENOMEM: _FREE_MEMORY, **dict.fromkeys((errno.EAGAIN, errno.EMFILE, errno.ENFILE), _RAISE_LIMIT)}
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "VECLIB_MAXIMUM")}
_HEAD = struct.Struct("<Q")
_OF_GROUP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Terminals and schedulers send them to the whole group; the parent decides, and children ignore them."""
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from octfm.io.isolation import serve; serve(*map(int, sys.argv[2:]))"
)
_HOME = Path(__file__).absolute().parents[2]
"""The folder that octfm is imported from; an editable install may find it without sys.path."""


@dataclass(frozen=True)
class Limits:
    """Time and memory that one file may take before its child is killed."""

    seconds: float = 10.0
    """Seconds for a file of any size. Time in which the child waits for a core does not count."""
    seconds_per_megabyte: float = 1.0
    """Further seconds per megabyte (per million voxels once their number is known): ten times what JPEG 2000, the
    slowest codec, needs."""
    seconds_remote: float = 120.0
    """Further seconds for a file in a bucket, whose server may be slow or need retries."""
    memory: int = 2 * 10**9
    """Bytes of heap and private mappings of the child (RLIMIT_DATA). Linux enforces it; elsewhere only time counts."""

    def deadline(self, size: int, uri: str = "") -> float:
        """Seconds for a file of `size` bytes."""
        return self.seconds + self.seconds_per_megabyte * size / 1e6 + (self.seconds_remote if "://" in uri else 0)


UNLIMITED = Limits(seconds=24 * 3600, memory=2**62)
"""No limits in effect, for functions that read no files."""


@dataclass(frozen=True)
class Lost:
    """Takes the place of a result whose child died or was killed."""

    code: str
    """decoder_crashed, decoder_timeout or decoder_memory, of octfm.formats.reasons.REASONS."""
    what: str
    """What happened, as the predicate of a sentence."""


def each(
    function: Callable[[T], R], items: Sequence[T], limits: Limits, deadline: Callable[[T], float]
) -> Iterator[R | Lost]:
    """Yield `function(item)` for every item, computed in a child process.

    Where the child ended before its result, yield Lost and continue in a new child.

    `deadline` is in seconds for each item. Function, items and results are pickled. Exceptions of the function are
    raised here, except MemoryError, which gives Lost.
    """
    finished = 0
    while finished < len(items):
        child = _borrow(limits.memory)
        try:
            child.send(function, items[finished:])
            while finished < len(items):
                result = child.receive(deadline(items[finished]))
                finished += 1
                yield result
                if child.ended:
                    break
        except BaseException:
            if child.waiting:
                _give_back(child)
            else:
                child.kill()  # it is still working on an item, and would answer the next request with that
            raise
        _give_back(child)


def release(keep: int = 0) -> None:
    """Kill idle children, all but the `keep` that were used last."""
    with _lock:
        idle = _idle[: max(len(_idle) - keep, 0)]
        del _idle[: len(idle)]
    for child in idle:
        child.kill()


# ---- the parent's side -------------------------------------------------------------------------------------------


class _Child:
    """A child process, with a pipe of requests to it and one of replies from it."""

    def __init__(self, memory: int):
        self.memory, self.ended, self.idle_since = memory, False, 0.0
        self.waiting = False
        """True once its function has raised and it has left the batch: it then waits for the next request."""
        self.surroundings = _surroundings()
        # -P keeps the current folder out of sys.path until _START has replaced it.
        start = [sys.executable, "-P", "-c", _START, json.dumps(import_path()), str(os.getpid()), str(memory)]
        environment = {**ENVIRONMENT, **os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(_python_path())}
        # Inherited, until `serve` ignores them: Ctrl-C during its imports would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_GROUP)
        try:
            self._process = subprocess.Popen(
                start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, env=environment
            )
        except OSError as error:  # not to be taken for an error of a file that is written meanwhile
            advice = _ADVICE.get(error.errno or 0, f"check that {sys.executable} runs, or reinstall octfm")
            raise _not_started(f"{error.strerror}; {advice}") from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin and self._process.stdout
        self._requests, self._replies = self._process.stdin, self._process.stdout.fileno()
        self._poll = select.poll()
        self._poll.register(self._replies, select.POLLIN)
        self._buffer = bytearray()
        try:
            ready = self.receive(_START_S)
        except RuntimeError as error:  # Python's, if the system refuses a thread
            self.kill()
            raise _not_started(f"{error}; {_RAISE_LIMIT}") from error
        if isinstance(ready, Lost):
            advice = {
                "decoder_memory": _FREE_MEMORY,
                "decoder_timeout": "the machine is too busy, or its disk too slow; run it again",
            }.get(ready.code, "see the lines above this one, if there are any")
            raise _not_started(f"it {ready.what}; {advice}")

    def send(self, function: Callable, items: Sequence) -> None:
        self.waiting = False
        try:
            message = pickle.dumps((function, items))
        except (pickle.PicklingError, AttributeError, TypeError):
            message = b"__main__"
        if b"__main__" in message:  # the child has another __main__, so such functions are pickled by value
            import cloudpickle

            message = cloudpickle.dumps((function, items))
        self._write(message)

    def receive(self, seconds: float) -> Any:
        """Wait for the next result; kill the child and return Lost if there is none within `seconds`."""
        start, waited = time.monotonic(), self._waited_for_a_core()
        while True:
            if len(self._buffer) >= _HEAD.size:
                (length,) = _HEAD.unpack_from(self._buffer)
                if len(self._buffer) >= _HEAD.size + length:
                    message = bytes(self._buffer[_HEAD.size : _HEAD.size + length])
                    del self._buffer[: _HEAD.size + length]
                    break
            left = seconds - (time.monotonic() - start)
            if left <= 0:  # extend the deadline by the time in which the child had no core
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
            self.waiting = True
            raise error
        return result

    def _waited_for_a_core(self) -> float:
        """Seconds that the child was ready to run while others had the cores; 0 if the system does not report it."""
        try:
            # CPU time, time on a run queue (ns), time slices: Documentation/scheduler/sched-stats.rst of Linux
            return int(Path(f"/proc/{self._process.pid}/schedstat").read_text("utf-8").split()[1]) / 1e9
        except (OSError, IndexError, ValueError):
            return 0.0

    def usable(self) -> bool:
        """Whether it is alive, not about to exit as idle, and started in the parent's present environment."""
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
        with contextlib.suppress(BrokenPipeError):  # the child has died; `receive` reports how
            while data:
                data = data[self._requests.write(data) :]

    def _close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        if self._process.stdout:
            self._process.stdout.close()


def _not_started(why: str) -> ConfigError:
    return ConfigError(f"a child process for reading files did not start: {why}")


_idle: list[_Child] = []
_lock = held_while_forking(threading.Lock())
atexit.register(release)
# A forked process must not share the pipes of its parent's children.
os.register_at_fork(after_in_child=_idle.clear)


def _borrow(memory: int) -> _Child:
    with _lock:
        # All of them, not only the one that is taken: those that ended by themselves would stay as zombies, with pipes.
        unusable = [child for child in _idle if not child.usable()]
        _idle[:] = [child for child in _idle if child not in unusable]
        taken = next((child for child in reversed(_idle) if child.memory == memory), None)
        if taken is not None:
            _idle.remove(taken)
    for child in unusable:
        child.kill()
    return taken or _Child(memory)


def _give_back(child: _Child) -> None:
    if child.ended:
        return
    child.idle_since = time.monotonic()
    with _lock:
        _idle.append(child)


def import_path() -> list[str]:
    """sys.path without the current folder, unless its full path is in PYTHONPATH or the running script lies in it.

    `python -m`, `python -c`, notebooks and an empty entry of PYTHONPATH add the current folder without the user's
    intent.
    """
    intended = {os.path.normpath(place) for place in _python_path()}
    main = sys.modules.get("__main__")
    if (script := getattr(main, "__file__", None)) is not None and getattr(main, "__spec__", None) is None:
        intended.add(str(Path(script).absolute().parent))
    here = {os.path.normpath(Path.cwd()), os.path.realpath(Path.cwd())}

    def elsewhere(place: str) -> bool:
        return os.path.isabs(place) and not {os.path.normpath(place), os.path.realpath(place)} & here  # noqa: PTH117

    kept = [place for place in sys.path if os.path.normpath(place) in intended or elsewhere(place)]
    return kept if str(_HOME) in kept else [*kept, str(_HOME)]


def _python_path() -> list[str]:
    """Absolute entries of PYTHONPATH; an empty or relative one depends on the current folder."""
    return [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(place)]  # noqa: PTH117


def _surroundings() -> tuple:
    """What a child inherits at its start only, such as credentials in the environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    return Path.cwd(), tuple(sys.path), environment


# ---- the child's side --------------------------------------------------------------------------------------------


def serve(parent: int, memory: int) -> None:
    """Answer requests until the parent is gone or sends none for IDLE_S."""
    # Decoders print to stdout, which must not get mixed with the replies.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in _OF_GROUP:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OF_GROUP)
    try:
        threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()
    except RuntimeError as error:
        _answer(replies, error, None)
        return
    _limit(memory)
    _answer(replies, None, True)
    # Each request follows the answers to the one before, so none waits in the buffer of `requests`.
    while select.select([requests], [], [], IDLE_S)[0]:
        try:
            function, items = pickle.loads(_read_message(requests))
        except ImportError as error:
            sentence = (
                f"a child process cannot import the function to run ({error}); children do not import from the current "
                "folder: put the full path of the folder that has it into PYTHONPATH, or install it"
            )
            _answer(replies, ConfigError(sentence), None)
            continue
        for item in items:
            error, result = None, None
            try:
                result = function(item)
            except Exception as raised:
                error = raised
            if not _answer(replies, error, result):
                break


def _limit(memory: int) -> None:
    import resource

    # A core dump would leave a patient's image on the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def _answer(replies: BinaryIO, error: BaseException | None, result: Any) -> bool:
    """Send an exception or a result, and return whether the batch goes on, which any exception but MemoryError ends."""
    goes_on = error is None or isinstance(error, MemoryError)
    try:
        message = pickle.dumps((error, result))
        if error is not None:
            pickle.loads(message)  # some exceptions can be pickled but not unpickled
    except Exception as problem:
        if error is None and isinstance(problem, MemoryError):  # there is room for the result, but not for its pickle
            return _answer(replies, problem, None)
        goes_on = False
        message = pickle.dumps(
            (RuntimeError(f"{type(error).__name__}: {error}" if error else f"cannot pickle a result: {problem}"), None)
        )
    try:
        replies.write(_HEAD.pack(len(message)))
        replies.write(message)
        replies.flush()
    except BrokenPipeError:  # the parent was killed
        os._exit(0)
    return goes_on


def _read_message(requests: BinaryIO) -> bytes:
    (length,) = _HEAD.unpack(_read(requests, _HEAD.size))
    return _read(requests, length)


def _read(requests: BinaryIO, count: int) -> bytes:
    content = requests.read(count)
    if len(content) < count:  # the parent is gone
        os._exit(0)
    return content


def _exit_with(parent: int) -> None:
    """Exit within a second of the parent's death, even in the middle of a file."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)
