"""A Hugging Face hub on this machine, a stand-in: the requests by which its library finds, lists, downloads and uploads the files of a
model or a dataset. It knows no Xet, which its users turn off."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PUBLIC, PRIVATE, TOKEN, READ_TOKEN = "public", "private", "hf_may_write", "hf_may_only_read"


class Hub:
    """Repositories to push to. `fault(method, path)` is called before each request, and may return the status of an error instead of an
    answer; `uploads` are the SHA-256 of uploaded large files, `commits` the branches and messages of commits, in order."""

    def __init__(self) -> None:
        # kind/OWNER/NAME -> visibility, and branches' commits, the newest last: ids and files
        self.repositories: dict[str, str] = {}
        self.branches: dict[str, dict[str, list[tuple[str, dict[str, bytes]]]]] = {}
        self.large: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.commits: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        handler = type("Handler", (_HubRequests,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(self, repository: str, visibility: str, files: dict[str, bytes], branch: str = "main") -> None:
        """A repository, or one more branch of it, whose first commit has these files."""
        self.repositories[repository] = visibility
        commits = [(_commit_id(f"{repository}@{branch}", 0), files)]
        self.branches.setdefault(repository, {})[branch] = commits

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a branch or a commit, without .gitattributes."""
        return {name: data for name, data in self.at(repository, revision)[1].items() if name != ".gitattributes"}

    def at(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]]:
        branches = self.branches[repository]
        if revision in branches:
            return branches[revision][-1]
        return next(commit for commits in branches.values() for commit in commits if commit[0] == revision)

    def kill(self, process: subprocess.Popen[Any], number: int, counts: Callable[[str, str], bool]) -> None:
        """Kill a process at the `number`-th request that `counts(method, path)`, which fails, and wait for its end."""
        seen = 0

        def fault(method: str, path: str) -> int | None:
            nonlocal seen
            seen += counts(method, path)
            if seen < number:
                return None
            process.kill()
            return 500

        self.fault = fault
        try:
            assert process.wait(timeout=120) == -signal.SIGKILL
        finally:
            process.kill()
            self.fault = lambda method, path: None

    def environment(self, home: Path) -> dict[str, str]:
        """Variables with which the hub's library finds it, and writes; `home` is for its cache."""
        quiet = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return quiet | {"HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN, "HF_HOME": str(home)}


class _HubRequests(BaseHTTPRequestHandler):
    hub: Hub

    def do_GET(self) -> None:
        # a branch with slashes in its name is quoted
        path, _, query = self.path.partition("?")
        if self.refused(unquote(path)):
            return
        of_api = re.fullmatch(
            r"/api/((?:model|dataset)s/[^/]+/[^/]+)(?:/(refs|commits|revision|tree)(?:/([^?]*))?)?", path
        )
        of_file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        repository = of_api[1] if of_api else f"{of_file[1] or 'models/'}{of_file[2]}" if of_file else ""
        if repository not in self.hub.branches:
            return self.missing("RepoNotFound")
        revision = (of_file[3] if of_file else of_api[3] if of_api and of_api[3] else "main").partition("/")
        try:
            commit, files = self.hub.at(repository, unquote(revision[0]))
        except StopIteration:
            return self.missing("RevisionNotFound")
        if of_file:
            file = unquote(of_file[4])
            if (data := files.get(file)) is None:
                return self.missing("EntryNotFound")
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
                data = data[int(asked[1]) : int(asked[2]) + 1]
            tag = {"ETag": f'"{blob(files[file])}"', "X-Repo-Commit": commit}
            return self.answer(data, tag, 206 if asked else 200)
        assert of_api is not None
        branches = self.hub.branches[repository]
        if of_api[2] == "refs":
            heads = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c[-1][0]} for n, c in branches.items()]
            self.say({"branches": heads, "converts": [], "tags": []})
        elif of_api[2] == "commits":
            about = {"title": "", "message": "", "date": "2026-01-01T00:00:00.000Z", "authors": []}
            self.say([{"id": oid, **about} for oid, _ in reversed(branches[unquote(revision[0])])])
        elif of_api[2] == "tree":
            self.say(listed(files, unquote(revision[2]), "recursive=true" in query.lower()))
        else:
            private = self.hub.repositories[repository] == PRIVATE
            self.say({"id": repository.partition("/")[2], "sha": commit, "private": private, "siblings": []})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path = unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers["Content-Length"]))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.refused(path):
            return
        if match := re.fullmatch(r"/api/(.+)/paths-info/(.+)", path):
            files = self.hub.at(match[1], match[2])[1]
            everything = {each["path"]: each for each in listed(files, "", True)}
            asked = parse_qs(body.decode()).get("paths", [])
            return self.say([everything[name] for name in asked if name in everything])
        if token not in (TOKEN, READ_TOKEN):
            return self.answer(b'{"error": "Invalid credentials"}', {}, 401)
        if path == "/api/validate-yaml":
            return self.say({"errors": [], "warnings": []})
        if token == READ_TOKEN:
            return self.answer(b'{"error": "This token may not write"}', {}, 403)
        if path == "/api/repos/create":
            self.create(json.loads(body))
        elif match := re.fullmatch(r"/(datasets/)?(.+)\.git/info/lfs/objects/batch", path):
            objects = []
            for each in json.loads(body)["objects"]:
                upload = {"actions": {"upload": {"href": f"{self.hub.address}/large/{each['oid']}?signature=secret"}}}
                objects.append(each | ({} if each["oid"] in self.hub.large else upload))
            self.say({"transfer": "basic", "objects": objects})
        elif match := re.fullmatch(r"/api/(.+)/(branch|preupload|commit)/(.+)", path):
            if match[1] not in self.hub.branches:
                return self.missing("RepoNotFound")
            getattr(self, match[2])(match[1], match[3], body)
        else:
            self.missing("RepoNotFound")

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        path = self.path.partition("?")[0]
        if self.refused(path):
            return
        oid = path.rpartition("/")[2]
        assert hashlib.sha256(data).hexdigest() == oid
        self.hub.large[oid] = data
        self.hub.uploads.append(oid)
        self.answer(b"")

    def create(self, asked: dict[str, Any]) -> None:
        repository = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        about = {"url": f"{self.hub.address}/{repository.removeprefix('models/')}"}
        if repository in self.hub.branches:
            return self.say(about | {"error": "You already created this repo"}, 409)
        first = {".gitattributes": b"*.tar filter=lfs diff=lfs merge=lfs -text"}
        self.hub.add(repository, asked.get("visibility", PUBLIC), first)
        self.say(about)

    def branch(self, repository: str, name: str, body: bytes) -> None:
        branches = self.hub.branches[repository]
        if name in branches:
            return self.answer(b'{"error": "Reference already exists"}', {}, 409)
        branches[name] = [self.hub.at(repository, json.loads(body).get("startingPoint", "main"))]
        self.say({})

    def preupload(self, repository: str, branch: str, body: bytes) -> None:
        files, answers = self.hub.at(repository, branch)[1], []
        for each in json.loads(body)["files"]:
            path = each["path"]
            answer = {"path": path, "shouldIgnore": False, "uploadMode": "lfs" if large(path) else "regular"}
            if (data := files.get(path)) is not None:
                answer["oid"] = hashlib.sha256(data).hexdigest() if large(path) else blob(data)
            answers.append(answer)
        self.say({"files": answers})

    def commit(self, repository: str, branch: str, body: bytes) -> None:
        commits = self.hub.branches[repository][branch]
        header, *changes = map(json.loads, body.splitlines())
        files = dict(commits[-1][1])
        for change in changes:
            value = change["value"]
            if change["key"] == "deletedFile":
                del files[value["path"]]
            elif change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.large[value["oid"]]
        oid = _commit_id(repository, len(self.hub.commits) + 1)
        commits.append((oid, files))
        self.hub.commits.append((branch, header["value"]["summary"]))
        url = f"{self.hub.address}/{repository.removeprefix('models/')}/commit/{oid}"
        self.say({"commitUrl": url, "commitOid": oid})

    def refused(self, path: str) -> bool:
        status = self.hub.fault(self.command, path)
        if status is not None:
            # uploads go to another server, whose errors are not the hub's
            self.answer(b"<Error/>" if self.command == "PUT" else b'{"error": "of the test"}', {}, status)
        return status is not None

    def answer(self, body: bytes, headers: dict[str, str] | None = None, status: int = 200) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def say(self, value: Any, status: int = 200) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"}, status)

    def missing(self, code: str, status: int = 404) -> None:
        self.answer(b"{}", {"X-Error-Code": code}, status)


def _commit_id(repository: str, number: int) -> str:
    return hashlib.sha1(f"{repository} {number}".encode()).hexdigest()


def blob(data: bytes) -> str:
    """Git's id of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def large(path: str) -> bool:
    return path.endswith((".tar", ".safetensors", ".onnx", ".model"))


def listed(files: dict[str, bytes], below: str, recursive: bool) -> list[dict[str, Any]]:
    """Entries of the files and folders below a folder, as the hub lists them."""
    found: dict[str, dict[str, Any]] = {}
    start = f"{below}/" if below else ""
    for path, data in files.items():
        if not path.startswith(start):
            continue
        parts = path.removeprefix(start).split("/")
        for depth in range(1, len(parts)):
            folder = start + "/".join(parts[:depth])
            found[folder] = {"type": "directory", "path": folder, "oid": COMMIT}
        found[path] = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
        if large(path):
            found[path]["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return [each for path, each in found.items() if recursive or "/" not in path.removeprefix(start)]
