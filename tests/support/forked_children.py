"""Children of octfm.io.isolation that are forks of one process, which has imported what they need. An interpreter of its
own and its imports take .3 s of CPU, and 2.5 s with torch, whenever a test has another folder or environment; how children
start is tested where they start as ever (`pytest.mark.own_interpreters`).
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from typing import Any

from support import support_process

STATUS = struct.Struct("<i")
NEEDED = ("formats", "catalog", "volume", "store", "layers", "encoder", "phantom", "report")
"""Folders of octfm whose functions run in children."""


class ForkedChildren:
    """In the place of `subprocess` in octfm.io.isolation."""

    PIPE = subprocess.PIPE

    def __init__(self, start: str) -> None:
        self._start, self._socket, self._pid = start, None, 0

    def Popen(self, words: list[str], **options: Any) -> Any:
        if words[3] != self._start or (self._pid and self._pid != os.getpid()):
            return subprocess.Popen(words, **options)  # of a test that changes it, or of a fork of this process
        return _Child(self._server(), json.loads(words[4]), options["env"])

    def _server(self) -> socket.socket:
        if self._socket is None:
            self._pid = os.getpid()
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                process = support_process("forked_children", theirs.fileno())
                self._process = subprocess.Popen(**process, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        return self._socket

    def close(self) -> None:
        if self._socket is not None and self._pid == os.getpid():
            self._socket.close()
            self._process.wait()


class _Child:
    """What octfm.io.isolation uses of a subprocess.Popen."""

    def __init__(self, server: socket.socket, path: list[str], environment: dict[str, str]) -> None:
        (theirs_in, ours_in), (ours_out, theirs_out), (self._status, theirs_status) = (os.pipe() for _ in range(3))
        job = json.dumps([path, environment, os.getcwd()]).encode("utf-8", "surrogateescape")  # noqa: PTH109
        theirs = [theirs_in, theirs_out, 2, theirs_status]
        socket.send_fds(server, [job], theirs)
        self.pid = int(server.recv(64))
        for end in (theirs_in, theirs_out, theirs_status):
            os.close(end)
        self.stdin, self.stdout = open(ours_in, "wb", 0), open(ours_out, "rb", 0)  # noqa: PTH123, SIM115
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            (self.returncode,) = STATUS.unpack(os.read(self._status, STATUS.size))
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def serve(server: socket.socket) -> None:
    for folder in NEEDED:
        package = importlib.import_module(f"octfm.{folder}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    from octfm.layers.finder import load_finder

    load_finder()
    os.fsync = os.fstat  # as in conftest.py
    gc.collect()
    gc.freeze()
    poll, running = select.poll(), dict[int, tuple[int, int]]()
    poll.register(server, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready != server.fileno():
                pid, status = running.pop(ready)
                poll.unregister(ready)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                    os.write(status, STATUS.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
                os.close(status)
                os.close(ready)
                continue
            job, ends, *_ = socket.recv_fds(server, 2**20, 4)
            if not job:
                return
            pid = os.fork()
            if not pid:
                _be_a_child(job, ends, [server.fileno(), *running, *(status for _, status in running.values())])
            for end in ends[:3]:
                os.close(end)
            watched = os.pidfd_open(pid)
            poll.register(watched, select.POLLIN)
            running[watched] = pid, ends[3]
            server.send(str(pid).encode())


def _be_a_child(job: bytes, ends: list[int], of_others: list[int]) -> None:
    code = 1
    try:
        path, environment, folder = json.loads(job.decode("utf-8", "surrogateescape"))
        for number, end in enumerate(ends[:3]):
            os.dup2(end, number)
        for end in (*ends, *of_others):
            os.close(end)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.path[:] = path
        from octfm.io.isolation import serve

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        serve(os.getppid())
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as server:
        serve(server)
