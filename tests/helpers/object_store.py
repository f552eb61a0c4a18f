"""moto's S3 server as a process of its own, and a proxy before it that fails as networks do."""

from __future__ import annotations

import http.client
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from benchmarks.common.hardware import free_port
from tests.helpers.waiting import wait_until

KEYS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "not-to-be-logged",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}
# what the proxy does with a request
PASS, DROP, UNAVAILABLE, DENY, EXPIRED, TRUNCATE, STALE = "pass", "drop", "503", "403", "400", "truncate", "stale"
BARE = "bare"  # errors without the field Condition, which AWS alone sends
# headers of a connection, not of an answer
HOP = ("transfer-encoding", "content-length", "connection")
Fault = Callable[[str, str, int], str]


@contextmanager
def s3_server(log: Path) -> Iterator[int]:
    """A server without objects; its port."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)

    def answers() -> bool:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).close()
            return True
        assert process.poll() is None, log.read_text()
        return False

    try:
        wait_until(answers, 120, log.read_text)
        yield port
    finally:
        process.kill()
        process.wait()


def environment(port: int) -> dict[str, str]:
    """Variables with which S3's libraries find a server or proxy."""
    return KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}


class Proxy:
    """Before a server: `fault(method, path, number of this request)` says what becomes of a request. STALE repeats the last answer to the
    same request that was passed on, if any. `requests` counts methods."""

    def __init__(self, server: int) -> None:
        self.fault: Fault = lambda method, path, number: PASS
        self.requests: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.answers: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self.lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_request(self) -> None:
                proxy._handle(self, server)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_request

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: Any, server: int) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if "chunked" in (request.headers.get("Transfer-Encoding") or ""):
            while size := int(request.rfile.readline().split(b";")[0], 16):
                body += request.rfile.read(size)
                request.rfile.readline()
            request.rfile.readline()
        with self.lock:
            self.requests[request.command] += 1
            number = sum(self.requests.values())
        what = self.fault(request.command, request.path, number)
        if what != PASS:
            self.failed[what] += 1
        if what == DROP:
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        if what in (UNAVAILABLE, DENY, EXPIRED):
            request.send_response(int(what))
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        if what == STALE and request.path in self.answers:
            status, given, data = self.answers[request.path]
        else:
            inner = http.client.HTTPConnection("127.0.0.1", server, timeout=60)
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
            inner.request(request.command, request.path, body, headers)
            answer = inner.getresponse()
            status, given, data = answer.status, answer.getheaders(), answer.read()
            inner.close()
            if what == BARE:
                data = re.sub(rb"<Condition>.*?</Condition>", b"", data)
            if listing(request.path):
                self.answers[request.path] = status, given, data
        request.send_response(status)
        for name, value in given:
            if name.lower() not in HOP:
                request.send_header(name, value)
        length = dict(given).get("Content-Length") if request.command == "HEAD" else str(len(data))
        request.send_header("Content-Length", length or "0")
        request.end_headers()
        if request.command == "HEAD":
            return
        if what == TRUNCATE:
            request.wfile.write(data[: len(data) // 2])
            request.wfile.flush()
            request.connection.shutdown(socket.SHUT_RDWR)
            request.close_connection = True
            return
        request.wfile.write(data)


def listing(path: str) -> bool:
    """Whether a request lists a bucket."""
    return bool(re.search(r"[?&]list-type=2", path))
