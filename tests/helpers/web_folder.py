"""A folder on a web server of Python's own, with what real servers do: folders without a list, sorted lists, no ranges, no answer."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from html import escape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

ELSEWHERE = ("?C=N;O=D", "?C=M;O=A", "#top", "../style.css", "mailto:me@h")


class WebFolder(SimpleHTTPRequestHandler):
    ranges = lists = True
    packs = False  # answers in full, compressed, whoever takes that
    stalls = ""  # paths that are not answered
    status = 0  # of every answer, an error
    tag = ""  # the version of every file
    encoding = ""  # the Content-Encoding of every file
    asked: ClassVar[list[str]] = []  # ranges that were asked for

    def send_head(self):
        path = self.translate_path(self.path)
        if self.status:
            self.send_error(self.status)
            return None
        if self.stalls and re.search(self.stalls, self.path):
            time.sleep(5)
            return None
        if Path(path).is_dir() and not self.lists:
            self.send_error(403)
            return None
        wanted = self.headers.get("Range")
        if self.packs and "gzip" in self.headers["Accept-Encoding"]:
            wanted = None
        if not (wanted and self.ranges and Path(path).is_file()):
            return super().send_head()
        self.asked.append(wanted)
        first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        data = Path(path).read_bytes()
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{min(last, len(data) - 1)}/{len(data)}")
        self.send_header("Content-Length", str(len(data[first : last + 1])))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[first : last + 1])
        return None

    def end_headers(self):
        if self.tag:
            self.send_header("ETag", self.tag)
        if self.encoding:
            self.send_header("Content-Encoding", self.encoding)
        super().end_headers()

    def list_directory(self, path):
        """As Apache's: its links sort the page, and some lead elsewhere."""
        names = sorted(each.name + "/" * each.is_dir() for each in Path(path).iterdir())
        links = "".join(f'<a href="{escape(name)}">{name}</a>' for name in (*ELSEWHERE, *names))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(links.encode())

    def log_message(self, *_):
        """Nothing."""


@contextmanager
def serve(folder: Path, **behaviour) -> Iterator[str]:
    """The address of `folder`; `behaviour` are class attributes of WebFolder."""
    handler = partial(type("Handler", (WebFolder,), behaviour), directory=str(folder))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
