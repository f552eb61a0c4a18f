"""A web server in a thread, for what reads URLs: files by ranges, folders as lists of links, and faults on demand."""

import contextlib
import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Web:
    """`files` maps paths to bytes; each of `faults` is the status that one further answer to a GET has, with `heads` to a HEAD
    too."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: list[int] = []
        self.heads = False
        self.asked: list[tuple[str, int, int]] = []  # (path, first byte, end) of each GET that was answered
        self.ranges = True
        self.url = ""

    def answer(self, handler: BaseHTTPRequestHandler, body: bool) -> None:
        path = handler.path.split("?")[0]
        if self.faults and (body or self.heads):
            return handler.send_error(self.faults.pop(0))
        data = self.files.get(path)
        if data is None:
            below = sorted(name for name in self.files if path.endswith("/") and name.startswith(path))
            if not below:
                return handler.send_error(404)
            data = "".join(f'<a href="{name}">x</a>\n' for name in below).encode()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", "")) if self.ranges else None
        first, end = (int(found[1]), min(int(found[2]) + 1, len(data))) if found else (0, len(data))
        handler.send_response(206 if found else 200)
        if self.ranges:
            handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("ETag", hashlib.sha256(data).hexdigest())
        handler.send_header("Content-Length", str(end - first))
        handler.end_headers()
        if body:
            self.asked.append((path, first, end))
            handler.wfile.write(data[first:end])


@contextlib.contextmanager
def serving():
    web = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            web.answer(self, body=True)

        def do_HEAD(self):
            web.answer(self, body=False)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        web.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield web
        finally:
            server.shutdown()
