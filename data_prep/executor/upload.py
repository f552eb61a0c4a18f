"""Upload of a dataset to a URL: all its files, then the manifests, so that nobody who reads there finds half a dataset.

A dataset that goes to a URL is built in a folder of this machine. Beside it is a list of what was uploaded; what is on it with
the same SHA-256, and at the URL as it was left, is not uploaded again.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

from data_prep.common.errors import BadInput
from data_prep.executor.output_folder import WORK
from megabert.common import remote
from megabert.common.atomic_io import sha256_of, write_whole
from megabert.data.shards import MANIFEST
from megabert.data.shards.manifest import SHARD

PROBE = ".writable"


def staging(url: str) -> Path:
    """The folder of this machine that a dataset is built in which goes to `url`."""
    name = url.rstrip("/")
    known = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
    return remote.cache_folder() / "builds" / f"{name.rsplit('/', 1)[-1]}-{known}"


def check(url: str, seq_lens: tuple[int, ...], overwrite: bool) -> None:
    """Before the work: raises BadInput where a dataset that was not uploaded from here is at `url`, and is not to be replaced,
    and OSError where nothing can be written."""
    done = _Uploaded(url)
    names = [MANIFEST] if len(seq_lens) == 1 else [f"seq{n}/{MANIFEST}" for n in seq_lens]
    for name in names:
        if not overwrite and remote.exists(remote.join(url, name)) and not done.is_there(name):
            raise BadInput(f"--output {url}: already holds a dataset; --overwrite replaces it")
    with tempfile.NamedTemporaryFile() as empty:
        remote.upload(Path(empty.name), remote.join(url, PROBE))
    remote.remove(remote.join(url, PROBE))


def upload(url: str) -> int:
    """Bring what was built for `url` there, and return the number of files that were not there yet. Raises OSError."""
    folder, done = staging(url), _Uploaded(url)
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    digests = {path.as_posix(): sha256_of(folder / path) for path in paths if WORK not in path.parts}
    missing = [name for name, digest in digests.items() if not done.is_there(name, digest)]
    if not missing:
        return 0
    manifests = sorted((name for name in digests if _is_manifest(name)), key=lambda name: -name.count("/"))
    for name in reversed(manifests):  # of another dataset, before any of its files goes
        if name in missing and remote.exists(remote.join(url, name)):
            remote.remove(remote.join(url, name))
            _remove_shards(remote.parent(remote.join(url, name)), folder / Path(name).parent)
    for name in (*(name for name in missing if not _is_manifest(name)), *manifests):
        if name in missing:
            remote.upload(folder / name, remote.join(url, name))
            done.add(name, digests[name])
    return len(missing)


def _is_manifest(name: str) -> bool:
    return name.rsplit("/", 1)[-1] == MANIFEST


def _remove_shards(url: str, folder: Path) -> None:
    """Those of a larger dataset that nothing will replace."""
    for name in remote.names(url):
        if name.startswith(SHARD.partition("{")[0]) and not (folder / name).exists():
            remote.remove(remote.join(url, name))


class _Uploaded:
    """What was uploaded to a URL: of each file its SHA-256, and what the server said of it afterwards."""

    def __init__(self, url: str) -> None:
        self._url = url
        folder = staging(url)
        self._path = folder.with_name(f"{folder.name}.uploaded")
        self._files: dict[str, Any] = {}
        if self._path.exists():
            whole, _, cut = self._path.read_text(encoding="utf-8").rpartition("\n")
            if cut:  # by a kill
                write_whole(self._path, f"{whole}\n".encode())
            self._files = {entry[0]: entry[1:] for entry in map(json.loads, whole.splitlines())}

    def is_there(self, name: str, sha256: str | None = None) -> bool:
        """Whether a file, of this SHA-256 where it is given, is at the URL as it was left."""
        entry = self._files.get(name)
        if entry is None or sha256 not in (None, entry[0]):
            return False
        try:
            return list(astuple(remote.status(remote.join(self._url, name)))) == entry[1]
        except FileNotFoundError:
            return False

    def add(self, name: str, sha256: str) -> None:
        found = astuple(remote.status(remote.join(self._url, name)))
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps([name, sha256, found]) + "\n")
