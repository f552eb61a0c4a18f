"""A Hugging Face hub on this machine, a stand-in: the requests by which its library finds, lists and downloads the files of a model or
a dataset."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

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


class _DatasetRequests(_Requests):
    """A dataset: `folder` has a folder for each branch, slashes of its name as in a URL's part."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        match = re.fullmatch(rf"(?:/api)?/datasets/{self.name}/(revision|tree|resolve)/([^/]+)/?(.*)", path)
        branch = self.folder / match[2] if match else Path()
        file = branch / unquote(match[3]) if match else Path()
        if match is None or not branch.is_dir():
            self.answer(b"{}", {"X-Error-Code": "RevisionNotFound" if match else "RepoNotFound"}, 404)
        elif not file.exists():
            self.answer(b"{}", {"X-Error-Code": "EntryNotFound"}, 404)
        elif match[1] == "revision":
            self.answer(json.dumps({"id": self.name, "sha": COMMIT, "siblings": []}).encode())
        elif match[1] == "tree":
            below = sorted(file.rglob("*") if "recursive=true" in self.path else file.iterdir())
            self.answer(json.dumps([self.listed(each, branch) for each in below]).encode())
        else:
            data = file.read_bytes()
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                data = data[int(asked[1]) : int(asked[2]) + 1]
            self.answer(data, {"ETag": f'"{oid(file)}"', "X-Repo-Commit": COMMIT}, 206 if asked else 200)

    @staticmethod
    def listed(path: Path, branch: Path) -> dict[str, object]:
        entry: dict[str, object] = {"path": path.relative_to(branch).as_posix()}
        if path.is_dir():
            return entry | {"type": "directory", "oid": COMMIT}
        return entry | {"type": "file", "size": path.stat().st_size, "oid": oid(path)}


@contextmanager
def serving(name: str, folder: Path, dataset: bool = False) -> Iterator[str]:
    """The address of a hub whose one model is `name`, the files of `folder`, or whose one dataset, a folder a branch."""
    requests = _DatasetRequests if dataset else _Requests
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Requests", (requests,), {"name": name, "folder": folder}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
