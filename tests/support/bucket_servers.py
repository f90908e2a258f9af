"""Real S3 and GCS servers on loopback, and a proxy in front of them that spoils a share of the requests."""

import http.client
import random
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest

from octfm.io import bucket
from octfm.io.location import location
from support import free_port
from support.waiting import planted_delay

BUCKET = "clinic"
ENDPOINT = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST"}
SECRET = "planted-5ecret-that-nobody-may-see"


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3, empty but for one bucket; yields its endpoint."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    _request("PUT", host, port, f"/{BUCKET}")
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@contextmanager
def gcs_server() -> Iterator[str]:
    """A GCS emulator that keeps everything in memory; yields its endpoint."""
    from gcp_storage_emulator.server import create_server

    port = free_port()
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stop()


def _request(method: str, host: str, port: int, path: str) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request(method, path)
    assert connection.getresponse().status < 300
    connection.close()


class FaultyProxy:
    """Passes requests on to `upstream` and spoils `share` of them, drawn with `seed`, each kind in its turn;
    `spoilt` counts them."""

    KINDS = ("reset", "lost answer", "503", "slow", "cut off", "cut off, and lied about")

    def __init__(self, upstream: str, share: float = 0.1, seed: int = 0):
        host, port = upstream.removeprefix("http://").split(":")
        self.share, self.spoilt, self.served = share, Counter(), 0
        self._left, self._next = 10**9, None
        self._rng, self._lock = random.Random(seed), threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self._body()
                fault = proxy._draw()
                if fault == "reset":
                    return self._reset()
                if fault == "503":
                    return self._answer(503, [], b"<Error><Code>ServiceUnavailable</Code></Error>")
                upstream = http.client.HTTPConnection(host, int(port), timeout=60)
                try:
                    upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        if name.lower() not in ("transfer-encoding", "content-length", "connection", "expect"):
                            upstream.putheader(name, value)
                    upstream.putheader("Content-Length", str(len(body)))
                    upstream.endheaders(body)
                    answer = upstream.getresponse()
                    content, headers = answer.read(), answer.getheaders()
                finally:
                    upstream.close()
                if fault == "lost answer" or (fault and fault.startswith("cut off") and not content):
                    return self._reset()
                if fault == "slow":
                    planted_delay(0.3)
                if fault == "cut off, and lied about":
                    content = content[: len(content) // 2]
                self._answer(answer.status, headers, content, cut=fault == "cut off")

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_any

            def _body(self) -> bytes:
                if self.headers.get("Expect", "").lower() == "100-continue":
                    self.send_response_only(100)
                    self.end_headers()
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    parts = []
                    while size := int(self.rfile.readline().split(b";")[0], 16):
                        parts.append(self.rfile.read(size))
                        self.rfile.readline()
                    while self.rfile.readline().strip():
                        pass
                    return b"".join(parts)
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))

            def _answer(self, status, headers, content, cut=False) -> None:
                self.send_response_only(status)
                length = next((value for name, value in headers if name.lower() == "content-length"), None)
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                keep = length if self.command == "HEAD" and length is not None else str(len(content))
                self.send_header("Content-Length", keep)
                self.end_headers()
                if cut:
                    self.wfile.write(content[: len(content) // 2])
                    self.wfile.flush()
                    return self._reset()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def _reset(self) -> None:
                # SO_LINGER 0: the peer gets a RST, not an orderly end.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

            def log_message(self, *_) -> None:
                pass

        class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
            daemon_threads = allow_reuse_address = True
            request_queue_size = 64

            def handle_error(self, *_) -> None:
                pass  # connections that were reset on purpose

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def fail_after(self, requests: int) -> None:
        """Refuse everything after so many more."""
        self._left = requests

    def spoil_next(self, kind: str) -> None:
        """The next request for certain, whatever is drawn."""
        self._next = kind

    def _draw(self) -> str | None:
        with self._lock:
            self.served += 1
            if self._next:
                kind, self._next = self._next, None
                self.spoilt[kind] += 1
                return kind
            self._left -= 1
            if self._left < 0:
                return "503"
            if self._rng.random() >= self.share:
                return None
            kind = self.KINDS[self.spoilt.total() % len(self.KINDS)]
            self.spoilt[kind] += 1
            return kind

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def point_at(monkeypatch, scheme: str, endpoint: str, cache) -> None:
    """The standard environment of a process that uses this server, with a cache of its own."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "octfm-test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv(ENDPOINT[scheme], endpoint)
    monkeypatch.setenv("OCTFM_CACHE", str(cache))


SERVERS = {"s3": s3_server, "gs": gcs_server}


@pytest.fixture(scope="session")
def endpoints():
    """scheme -> endpoint, started on first use and shared by all tests of this process."""
    running = {}

    def endpoint(scheme: str) -> str:
        if scheme not in running:
            server = SERVERS[scheme]()
            running[scheme] = (server, server.__enter__())
        return running[scheme][1]

    yield endpoint
    for server, _ in running.values():
        server.__exit__(None, None, None)


@pytest.fixture
def place(request, tmp_path, monkeypatch, endpoints):
    """A place of this test's own on a disk or in a bucket."""
    if request.param == "local":
        return tmp_path / "place"
    point_at(monkeypatch, request.param, endpoints(request.param), tmp_path / "cache")
    return location(f"{request.param}://{BUCKET}/{tmp_path.name}")


@pytest.fixture
def faulty(request, tmp_path, monkeypatch, endpoints):
    """A place behind a proxy that spoils a tenth of the requests, and the proxy."""
    proxy = FaultyProxy(endpoints(request.param), seed=1)
    point_at(monkeypatch, request.param, proxy.endpoint, tmp_path / "cache")
    monkeypatch.setattr(bucket, "PATIENCE", bucket.Patience(first_s=0.01, longest_s=0.05))
    yield location(f"{request.param}://{BUCKET}/{tmp_path.name}"), proxy
    proxy.close()
