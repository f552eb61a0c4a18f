"""A Hugging Face hub on this machine: the three requests by which its library finds and downloads a model's files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class _Requests(BaseHTTPRequestHandler):
    name, folder = "", Path()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        file = self.folder / path.rpartition("/")[2]
        if path == f"/api/models/{self.name}/revision/main" or path == f"/api/models/{self.name}":
            self.answer(json.dumps({"id": self.name, "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/{self.name}/tree/{COMMIT}":
            files = [
                {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": oid(f)} for f in self.folder.iterdir()
            ]
            self.answer(json.dumps(files).encode())
        elif path.startswith(f"/{self.name}/resolve/") and file.is_file():
            self.answer(file.read_bytes(), {"ETag": f'"{oid(file)}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving(name: str, folder: Path) -> Iterator[str]:
    """The address of a hub whose one model is `name`, the files of `folder`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Requests", (_Requests,), {"name": name, "folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
